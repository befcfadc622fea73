"""Synthetic run folders, and the benchmarks' programs as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as commands
from benchmarks.common.programs import ROOT, fields_of


def make_line(step: int, episode_return: float | None, episodes: int | None = None, speed: float = 1000) -> dict:
    """A line of a log at a speed in steps/s."""
    line = {"global_step": step, "seconds": step / speed, "charts/SPS": speed, "losses/value_loss": 0.1}
    if episode_return is not None:
        line |= {"charts/episodic_return": episode_return, "charts/episodic_length": 100}
    return line | ({"charts/episodes": episodes} if episodes is not None else {})


def make_run(folder: Path, lines: list, *, script: str = "ppo.py", seed: int = 1, total: int = 1000, **config) -> Path:
    """A run folder; a line may also be a string, to be written as it stands."""
    folder.mkdir(parents=True)
    args = {"env_id": "CartPole-v1", "seed": seed, "total_timesteps": total, **config.pop("args", {})}
    text = {
        "script": script,
        "args": args,
        "device": "cpu",
        "commit": "c0ffee",
        "versions": {"torch": "2.13.0"},
        **config,
    }
    (folder / "config.json").write_text(json.dumps(text))
    rows = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(rows))
    return folder


def toy_flags(script: str, total: int = 600) -> list[str]:
    """Flags with which a script, whichever it is, makes some updates within a second or two."""
    fields = fields_of(script)
    toy = {"num_steps": 32, "num_minibatches": 2, "update_epochs": 2, "learning_starts": 100, "batch_size": 16}
    toy |= {"buffer_size": 1000, "log_every": 50, "total_timesteps": total}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in toy.items() if name in fields]
    return [*flags, "--no-tensorboard"]


def benchmark(name: str, *flags, timeout: float = 300, **options) -> subprocess.CompletedProcess:
    """Run `./run.sh NAME FLAGS` to its end; or a module of benchmarks/ by its name with a dot."""
    module = [f"benchmarks.{name}"] if "." in name else ["benchmarks", name]
    command = [sys.executable, "-m", *module, *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options)


def benchmark_here(capture, name: str, *flags) -> subprocess.CompletedProcess:
    """The same in this process, which has imported it all; `capture` is capsys, or capfd if it starts programs."""
    capture.readouterr()
    try:
        code = commands.main([name, *map(str, flags)])
    except SystemExit as end:
        code = end.code
    return subprocess.CompletedProcess([name, *flags], code or 0, *capture.readouterr())


def refusal(function, options, capsys) -> str:
    """The one line with which a call ends, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        function(options)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith("error: ") and line.count("\n") == 1
    return line
