#!/usr/bin/env bash
# From a bare machine to a trained policy, a tested checkout or a measured table: each command sets up what it needs.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<'END'
usage: ./run.sh COMMAND [FLAGS]

  demo [FLAGS]          train PPO on HalfCheetah for about two minutes; FLAGS go to the script
  evaluate RUN_DIR      play a run's deterministic policy; --episodes N, --video FILE.mp4
  sweep [FLAGS]         train scripts x variants x seeds and report; --scripts, --seeds, --total-timesteps, --resume
  throughput [FLAGS]    measure steady steps/s of each script and variant; --scripts, --variants, --rounds, --seconds,
                        --peers sb3 sbx to measure Stable-Baselines3 and SBX beside them
  env-pools [FLAGS]     measure pools of slow Python environments beside their models; --parts, --sizes, --rounds
  inference [FLAGS]     measure how fast each network acts, by each way to run it; --networks, --paths, --batch-sizes, --smoke
  rollout [FLAGS]       measure how fast environments are sampled, the policy compiled or not; --compile-actor, --num-envs
  gpu OUT_DIR           all that needs a GPU, in nine minutes without network; --dry-run; PYTHON=... runs it without .venv
  report RUNS...        table, learning curves and verdicts from run folders; --out DIR
  test [FLAGS]          run the test suite; FLAGS go to pytest

Everything is installed into .venv, in the versions of requirements/constraints.txt.
END
}

# A Python of at least 3.11, the oldest that the scripts support; PYTHON=... picks another.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer found; name one with PYTHON=/path/to/python3 ./run.sh" >&2
  exit 2
}

# Make .venv and install one requirements file, unless this has been done since the files last changed.
install() {
  local file=requirements/$1.txt stamp
  stamp=.venv/$1.$(cat "$file" requirements/requirements.txt requirements/constraints.txt | cksum | cut -d ' ' -f 1)
  if [ -e "$stamp" ]; then return; fi
  local python
  python=$(find_python)
  [ -x .venv/bin/pip ] || "$python" -m venv .venv || {
    echo "error: $python can't make a virtual environment; on Debian and Ubuntu, install python3-venv" >&2
    exit 2
  }
  echo "installing $file into .venv"
  .venv/bin/pip install --quiet --disable-pip-version-check -r "$file" -c requirements/constraints.txt
  touch "$stamp"
}

command=${1:-help}
[ $# -eq 0 ] || shift
case $command in
  demo | evaluate | report | sweep) install requirements; exec .venv/bin/python -m "benchmarks.$command" "$@" ;;
  inference | rollout | throughput)
    case " $* " in *" --peers"* | *" ort"*) install requirements-benchmark ;; *) install requirements ;; esac
    exec .venv/bin/python -m "benchmarks.$command" "$@"
    ;;
  env-pools) install requirements-benchmark; exec .venv/bin/python -m benchmarks.env_pools "$@" ;;
  gpu)
    # A machine with a GPU may have no registry to install from, but a Python that has it all
    [ -n "${PYTHON:-}" ] || install requirements
    exec "${PYTHON:-.venv/bin/python}" -m benchmarks.gpu "$@"
    ;;
  test)
    install requirements-test
    # With FLAGS: the tests that they name, in this order, in one process
    [ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"
    echo "the whole suite takes about eight minutes on two cores; one file of it: ./run.sh test tests/test_pairs.py"
    .venv/bin/ruff check
    .venv/bin/ruff format --check
    status=0
    .venv/bin/python -m pytest -q --numprocesses auto --dist worksteal -m "not alone" || status=$?
    .venv/bin/python -m pytest -q -m alone || status=$?
    exit $status
    ;;
  help | -h | --help) usage ;;
  *)
    usage >&2
    echo "error: no command $command" >&2
    exit 2
    ;;
esac
