#!/usr/bin/env bash
# From a bare machine to a trained policy, a tested checkout or a measured table: each command sets up what it needs.
set -euo pipefail
root=$(unset CDPATH && cd -- "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

usage() {
  cat <<'END'
usage: ./run.sh COMMAND [FLAGS]

  demo [FLAGS]          train PPO on HalfCheetah for one to eight minutes; FLAGS go to the script
  evaluate RUN_DIR      play a run's deterministic policy; --episodes N, --video FILE.mp4, --follow while it trains
  diff PAIR             what a pair differs in, hunk by hunk, each with its reason: `diff ppo`, or, of your own with its
                        twin beside it, `diff my/copy_of_ppo.py`
  copy PAIR NAME        a pair under your own name: `copy ppo my_ppo`; --small: shorter, with less plumbing
  sweep [FLAGS]         train scripts x variants x seeds and report; --scripts, --seeds, --total-timesteps, --resume,
                        --ray-address auto --cpus-per-run 1 over the nodes of a Ray cluster
  tune [FLAGS]          search settings, or train a population that changes them, by Ray Tune; --script, --search,
                        --scheduler asha, pbt or pb2, --perturb, --resume DIR
  report RUNS...        table, learning curves and verdicts from run folders; --out DIR
  throughput [FLAGS]    measure steady steps/s of each script and variant; --scripts, --variants, --rounds, --seconds,
                        --peers sb3 sbx rllib to measure Stable-Baselines3, SBX and RLlib beside them, or
                        --peers cleanrl leanrl for the scripts of both
  time-to-score [FLAGS] measure how long each takes to a good policy, compiling included; --tasks, --variants, --peers
  speedrun PAIR ENV     measure how long your own settings take to its score; --score, --flags="...", --name
  backends [FLAGS]      measure which way to step environments is fastest, and whether the scripts choose it; --env-ids
  ladder [FLAGS]        measure what each trick gives, from a plain loop to the compiled script
  limits [FLAGS]        measure how near the compiled scripts are to what the machine could do
  inference [FLAGS]     measure how fast each network acts, by each way to run it; --networks, --paths, --batch-sizes
  rollout [FLAGS]       measure how fast environments are sampled, the policy compiled or not; --compile-actor
  env-pools [FLAGS]     measure pools of slow Python environments beside their models; --parts, --sizes, --rounds
  scaling [FLAGS]       measure slow simulators in lock-step, batched, first-ready, on 1 to 16 simulated nodes; --nodes
  gpu STAGE OUT_DIR     what needs a GPU, without network; STAGE is correctness, speed or more, nine minutes each;
                        --dry-run; PYTHON=... runs it without .venv
  readme                make all tables and figures again from the committed results
  stale                 which committed results today's code might not give again; --note lists them for `readme` to mark
  test [FLAGS]          run all tests; `test quick` leaves out the slow ones; other FLAGS go to pytest

COMMAND --help says what it measures, how long that takes and what it leaves. Paths are those of the folder that you
are in. All but RLlib, CleanRL and LeanRL is installed into .venv beside this file, in the versions of
requirements/constraints.txt.
END
}

# A Python of at least 3.11, the oldest that the scripts support; PYTHON=... picks another.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.14 python3.13 python3.12 python3.11; fi
  for candidate; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer found; name one with PYTHON=/path/to/python3 ./run.sh" >&2
  exit 2
}

# Make .venv and install one requirements file, unless this has been done since any of these files last changed.
# The body is a subshell: at its end the lock is free for another command that installs, too.
install() (
  if [ -n "$help" ]; then exit; fi
  folder=$root/requirements
  sum=$(cat "$folder"/*.txt | cksum | cut -d ' ' -f 1)
  stamp=$root/.venv/$1.$sum
  if [ -e "$stamp" ]; then exit; fi
  if command -v flock > /dev/null; then
    exec 9> "$root/.venv.lock"
    flock 9 || true  # a file system without locks
    if [ -e "$stamp" ]; then exit; fi  # another command has just made it
  fi
  if ! "$root/.venv/bin/python" -m pip --version > /dev/null 2>&1; then  # missing, or broken off while it was made
    python=$(find_python)
    "$python" -m venv "$root/.venv" || {
      echo "error: $python can't make a virtual environment; on Debian and Ubuntu, install python3-venv" >&2
      exit 2
    }
  fi
  echo "installing requirements/$1.txt into .venv" >&2
  find "$root/.venv" -maxdepth 1 -name "requirements*.[0-9]*" ! -name "*.$sum" -delete  # of versions that go now
  # Not .venv/bin/pip, which holds the path at which .venv was made: in a copy, it would install there
  "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$folder/$1.txt" \
    -c "$folder/constraints.txt"
  touch "$stamp"
)

# Make .venv-rllib or .venv-cleanrl, unless it is complete: these programs pin another Gymnasium than the scripts need.
install_apart() {
  local folder=$root/.venv-$1 file=$root/requirements/requirements-$1.txt given=${1^^}_PYTHON stamp python
  stamp=$folder/complete.$(cksum < "$file" | cut -d ' ' -f 1)
  if [ -n "$help${!given:-}" ] || [ -e "$stamp" ]; then return; fi
  echo "installing requirements/requirements-$1.txt into .venv-$1" >&2
  if ! "$folder/bin/python" -m pip --version > /dev/null 2>&1; then
    [ "$1" != cleanrl ] || local PYTHON=${PYTHON:-python3.11}  # its MuJoCo has no wheels for later ones
    python=$(find_python)
    "$python" -m venv "$folder"
  fi
  rm -f "$folder"/complete.*
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$file"
  touch "$stamp"
}

# Run a command in the folder of the caller, so that paths are what they look like. The modules are this checkout's and
# Python's, whatever lies in that folder; benchmarks/__init__.py puts it at the end of the path.
start() {
  local python=$1
  shift
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m benchmarks "$@"
}

command=${1:-help}
[ $# -eq 0 ] || shift
# --help installs nothing: without .venv it is short
help=
case "$command $* " in test\ *) ;; *" --help "* | *" -h "*) help=yes ;; esac
case $command in
  copy | demo | diff | evaluate | ladder | limits | readme | report | stale | sweep)
    install requirements
    # Of these only a sweep starts scripts over Ray: elsewhere `_ray` is part of a name or a path
    case "$command $* " in sweep*_ray* | sweep*" --ray-address"* | sweep*" --ray_address"*) install requirements-ray ;; esac
    ;;
  backends | env-pools | speedrun | time-to-score)
    install requirements-benchmark
    case " $* " in *_ray*) install requirements-ray ;; esac
    ;;
  tune) install requirements-tune ;;
  scaling)
    install requirements-benchmark
    install requirements-ray
    ;;
  inference | rollout)
    # By default all ways to act are measured, and onnxruntime is one of them
    case " $* " in
      *" ort"* | *"=ort"*) install requirements-benchmark ;;
      *" --paths"* | *" --compile-actor"* | *" --smoke"*) install requirements ;;
      *) install requirements-benchmark ;;
    esac
    ;;
  throughput)
    case " $* " in *" --peers"*) install requirements-benchmark ;; *) install requirements ;; esac
    case " $* " in *_ray* | *rllib*) install requirements-ray ;; esac
    case " $* " in *rllib*) install_apart rllib ;; esac
    case " $* " in *leanrl*) install_apart cleanrl ;; esac
    ;;
  gpu)
    # A machine with a GPU may have no registry to install from, but a Python that has it all
    [ -z "${PYTHON:-}" ] || start "$PYTHON" gpu "$@"
    case " $* " in *" correctness "*) install requirements-test ;; *) install requirements ;; esac
    case " $* " in *_ray*) install requirements-ray ;; esac
    ;;
  test)
    install requirements-test
    cd "$root"
    # With FLAGS: the tests that they name, in this order, in one process
    [ $# -eq 0 ] || [ "$1" = quick ] || exec .venv/bin/python -m pytest "$@"
    .venv/bin/python -m ruff check
    .venv/bin/python -m ruff format --check
    beside=(--numprocesses auto --dist worksteal)
    [ $# -eq 0 ] || exec .venv/bin/python -m pytest -q "${beside[@]}" -m "not alone and not slow" "${@:2}"
    echo "the whole suite takes 16 to 60 minutes, by the CPU; nine tests of ten, sooner: ./run.sh test quick"
    status=0
    .venv/bin/python -m pytest -q "${beside[@]}" -m "not alone" || status=$?
    .venv/bin/python -m pytest -q -m alone || status=$?
    exit $status
    ;;
  help | -h | --help)
    usage
    exit
    ;;
  *)
    usage >&2
    echo "error: no command $command" >&2
    exit 2
    ;;
esac
python=$root/.venv/bin/python
[ -z "$help" ] || [ -x "$python" ] || python=$(find_python)
start "$python" "$command" "$@"
