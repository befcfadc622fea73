"""run.sh and the commands behind it: what gets installed, which paths are meant, what is said of what is missing."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_helpers import ROOT, benchmark, benchmark_here, refusal

from benchmarks import __main__ as commands
from benchmarks.common import processes, programs
from benchmarks.tools import diff

# In place of .venv's Python: it says what it is called with, or notes it if that is pip
PIP = '#!/bin/sh\n[ "$1 $2" = "-m pip" ] && { [ "$3" = --version ] || echo "$@" >> "$(dirname "$0")/pip.log"; exit; }\n'
PYTHON = PIP + 'echo "in $PWD: $@"\necho "path $PYTHONPATH"\n'


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose .venv only says what it is asked: a function that calls its run.sh from another folder."""
    root, elsewhere = tmp_path / "checkout", tmp_path / "else where"
    programs = root / ".venv" / "bin"
    for folder in (programs, elsewhere, root / "requirements"):
        folder.mkdir(parents=True)
    (programs / "python").write_text(PYTHON)
    (programs / "python").chmod(0o755)
    (root / "run.sh").write_bytes((ROOT / "run.sh").read_bytes())
    for path in (ROOT / "requirements").iterdir():
        (root / "requirements" / path.name).write_bytes(path.read_bytes())

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        command = ["bash", str(root / "run.sh"), *arguments]
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH")}
        return subprocess.run(command, cwd=elsewhere, env=variables | environment, capture_output=True, text=True)

    call.pip_log, call.root, call.elsewhere = programs / "pip.log", root, elsewhere
    return call


def test_paths_are_those_of_the_folder_of_the_caller(checkout):
    done = checkout("evaluate", "runs/x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"in {checkout.elsewhere}: -P -m benchmarks evaluate runs/x",
        f"path {checkout.root}",
    ]
    assert f"in {checkout.root}: -m pytest -x" in checkout("test", "-x").stdout


@pytest.mark.parametrize(
    ("command", "installed"),
    [
        (("diff", "ppo"), "requirements"),
        (("inference",), "requirements-benchmark"),
        (("inference", "--paths", "numpy"), "requirements"),
        (("rollout", "--compile-actor", "off", "ort"), "requirements-benchmark"),
        (("throughput", "--scripts", "ppo"), "requirements"),
        (("throughput", "--peers", "sb3"), "requirements-benchmark"),
        (("tune", "--script", "ppo"), "requirements-tune"),
        (("gpu", "correctness", "out"), "requirements-test"),
        (("gpu", "speed", "out"), "requirements"),
        (("test",), "requirements-test"),
    ],
)
def test_a_command_installs_what_its_flags_need_and_once_only(checkout, command, installed):
    for _ in range(2):
        assert checkout(*command).returncode == 0
    (line,) = checkout.pip_log.read_text().splitlines()
    assert f"-r {checkout.root}/requirements/{installed}.txt -c " in line


def test_going_back_to_older_requirements_installs_them_again(checkout):
    """In whichever command: the newer ones have replaced packages that all share."""
    constraints = checkout.root / "requirements" / "constraints.txt"
    first = constraints.read_text()
    for text, command in ((first, ["diff", "ppo"]), (f"{first}# other\n", ["test"]), (first, ["diff", "ppo"])):
        constraints.write_text(text)
        assert checkout(*command).returncode == 0
    assert len(checkout.pip_log.read_text().splitlines()) == 3


def test_a_sweep_on_a_cluster_installs_ray(checkout):
    for flag in ("--ray-address", "--ray-address=auto"):
        assert checkout("sweep", flag, "auto").returncode == 0
    lines = checkout.pip_log.read_text().splitlines()
    assert [line.partition("/requirements/")[2].split()[0] for line in lines] == [
        "requirements.txt",
        "requirements-ray.txt",
    ]


def test_an_environment_of_a_peer_counts_as_made_only_once_all_is_installed(checkout):
    """An installation that was cut off leaves a Python in which the peer is missing."""
    programs = checkout.root / ".venv-rllib" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text('#!/bin/sh\n[ "$3" = --version ]\n')
    (programs / "python").chmod(0o755)
    assert checkout("throughput", "--peers", "rllib").returncode == 1
    (programs / "python").write_text(PYTHON)
    for _ in range(2):
        assert checkout("throughput", "--peers", "rllib").returncode == 0
    (line,) = (programs / "pip.log").read_text().splitlines()
    assert line.endswith(f"-r {checkout.root}/requirements/requirements-rllib.txt")


def test_another_python_runs_the_gpu_stages_without_installing(checkout):
    other = checkout.root / "other"
    other.write_text(PYTHON.replace("in ", "other in "))
    other.chmod(0o755)
    done = checkout("gpu", "speed", "out", PYTHON=str(other))
    assert done.stdout.startswith(f"other in {checkout.elsewhere}: -P -m benchmarks gpu speed out")
    assert not checkout.pip_log.exists()


@pytest.mark.parametrize("command", ["throughput --peers rllib", "tune", "inference"])
def test_help_installs_nothing(checkout, command):
    """With .venv or, in a fresh clone, by the Python that there is."""
    assert f"-m benchmarks {command} --help" in checkout(*command.split(), "--help").stdout
    other = checkout.root / "other"
    (checkout.root / ".venv" / "bin" / "python").rename(other)
    other.write_text(PYTHON.replace("in ", "other in ").replace("\n", '\n[ "$1" = -c ] && exit\n', 1))
    done = checkout(*command.split(), "-h", PYTHON=str(other))
    assert done.stdout.startswith(f"other in {checkout.elsewhere}: -P -m benchmarks {command} -h")
    assert not checkout.pip_log.exists()


def test_help_of_test_is_that_of_pytest(checkout):
    assert checkout("test", "--help").stdout.startswith(f"in {checkout.root}: -m pytest --help")
    assert checkout.pip_log.exists()


def test_help_needs_no_packages(capsys, monkeypatch):
    monkeypatch.setattr(commands, "NEEDED", ("a_package_that_is_missing",))
    commands.main(["throughput", "--help"])
    found = capsys.readouterr().out
    assert "Measures: " in found and found.endswith("which ./run.sh throughput does.\n")
    with pytest.raises(SystemExit):
        commands.main(["throughput"])


def test_unknown_commands(checkout):
    done = checkout("fly")
    assert done.returncode == 2 and done.stderr.endswith("error: no command fly\n")
    assert checkout("--help").returncode == 0


def test_each_command_of_run_sh_is_there():
    usage = subprocess.run(["bash", ROOT / "run.sh", "--help"], capture_output=True, text=True).stdout
    assert {line.split()[0] for line in usage.splitlines() if line[:3] == "  " + line[2:3].strip()} - {"COMMAND"} == {
        *commands.COMMANDS,
        "test",
    }


def test_what_a_machine_lacks_is_said_before_it_is_imported(tmp_path):
    """As on a machine with another Python: the path has nothing but this repository."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(ROOT)!r}); "]
    command[-1] += "from benchmarks import __main__ as commands; commands.main(['gpu', 'speed', 'out'])"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: this Python lacks torch, tensordict, ") and "tyro" in done.stderr


def test_ctrl_c_before_a_command_has_begun(monkeypatch, capsys):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.util, "find_spec", stop)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "stale"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(commands.__file__, run_name="__main__")
    assert end.value.code == 130 and capsys.readouterr().err == "\nstopped\n"


def test_a_twin_without_its_eager_file_is_no_pair(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "SCRIPTS", tmp_path)
    for name in ("a.py", "a_torchcompile.py", "b_torchcompile.py", "c.py"):
        (tmp_path / name).touch()
    assert programs.pairs() == ["a"]


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_says_what_it_measures_how_long_it_takes_and_what_it_leaves(capsys, name):
    done = benchmark_here(capsys, name, "--help")
    text = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0 and f"./run.sh {name}" in text
    for word in ("Measures", "Takes", "Leaves"):
        assert f"{word}: " in text, word


def test_a_pair_is_shown_hunk_by_hunk(capsys):
    done = benchmark("diff", "ppo")
    assert done.returncode == 0 and "\033[" not in done.stdout
    text = (Path(ROOT) / "scripts" / "ppo_torchcompile.py").read_text()
    first = next(line for line in text.splitlines() if "# compile: " in line).split("# compile: ")[1]
    assert f"1. {first}" in done.stdout.replace("\n   ", " ")
    added = [line for line in done.stdout.splitlines() if line.startswith("+")]
    assert "+    compile: bool = True" in "\n".join(added)
    assert "── train, line " in done.stdout
    pair = [Path(ROOT) / "scripts" / f"ppo{suffix}.py" for suffix in ("", "_torchcompile")]
    assert "\033[32m+    compile: bool = True" in diff.render(*pair, is_coloured=True)
    assert benchmark_here(capsys, "diff", "ppo_torchcompile").stdout == done.stdout
    assert benchmark_here(capsys, "diff", "sarsa").stderr.startswith("error: no pair sarsa; there are a3c_ray")


def test_a_copy_of_a_pair_is_shown_by_its_path(tmp_path, monkeypatch, capsys):
    for suffix in ("", "_torchcompile"):
        text = (Path(ROOT) / "scripts" / f"ppo{suffix}.py").read_text()
        (tmp_path / f"mine{suffix}.py").write_text(
            text.replace("gamma: float = 0.99", f"gamma: float = 0.9{len(suffix)}")
        )
    shown = benchmark_here(capsys, "diff", str(tmp_path / "mine.py")).stdout
    assert shown.startswith("mine.py and mine_torchcompile.py differ") and "-    gamma: float = 0.90" in shown
    monkeypatch.chdir(tmp_path)
    assert benchmark_here(capsys, "diff", "mine_torchcompile.py").stdout == shown
    assert "no pair mine; for the file in this folder: ./run.sh diff mine.py" in refusal(
        diff.main, diff.Options("mine"), capsys
    )
    (tmp_path / "mine_torchcompile.py").unlink()
    assert (
        f"there is no {tmp_path / 'mine_torchcompile.py'}"
        in benchmark_here(capsys, "diff", str(tmp_path / "mine.py")).stderr
    )


def test_a_file_that_is_no_script_has_no_diff(tmp_path, capsys):
    for text, message in (("", "has no"), ("x = (", "was never closed")):
        (tmp_path / "mine.py").write_text(text)
        (tmp_path / "mine_torchcompile.py").write_text(text)
        done = benchmark_here(capsys, "diff", tmp_path / "mine.py")
        assert "Traceback" not in done.stderr and (not text or (done.returncode == 2 and message in done.stderr))


def test_a_number_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("MEMORY_GIB", "lots")
    assert "MEMORY_GIB=lots" in refusal(processes.free_slots, 2**30, capsys)
