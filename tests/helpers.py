"""Find, load and run the scripts."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from small import SMALL

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
PAIRS = [(p, p.with_stem(f"{p.stem}_torchcompile")) for p in SCRIPTS if not p.stem.endswith("_torchcompile")]

# Names of the scripts that have small settings: the eager ones, and their twins
EAGER = [p.stem for p in SCRIPTS if p.stem in SMALL]
COMPILED = [f"{name}_torchcompile" for name in EAGER]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

sys.path.insert(0, str(ROOT / "scripts"))  # worker processes get this path too, and find the script by its name


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def defining(name: str) -> ModuleType:
    """A script with this function or class; which one does not matter, since all have the same text of it."""
    found = [p.stem for p in SCRIPTS if any(f"\n{kind} {name}" in p.read_text() for kind in ("def", "class"))]
    return load(found[0])


def on_policy(name: str) -> bool:
    return hasattr(load(name).Args, "num_steps")


def discrete(name: str) -> bool:
    """Whether a script is for discrete actions."""
    return SMALL[name.removesuffix("_torchcompile")]["env_id"] == "tiny_envs:Choose-v0"


def has_pool(name: str) -> bool:
    """Whether a script steps its environments in a pool of worker processes, always."""
    return hasattr(load(name), "Pool")


def settings_of(name: str, overrides: dict) -> dict:
    """The small settings of a script with others; a pool has workers instead of environments, and no other backend."""
    settings = SMALL[name.removesuffix("_torchcompile")] | overrides
    if has_pool(name):
        settings |= {"num_workers": settings.get("num_envs", settings["num_workers"])}
        settings = {k: v for k, v in settings.items() if k not in ("num_envs", "sync_envs", "env_backend")}
    return settings


class Outcome(NamedTuple):
    run_dir: Path
    lines: list[dict]  # of metrics.jsonl
    checkpoint: dict

    def metrics(self) -> list[dict]:
        """The lines without what depends on the clock."""
        return [{k: v for k, v in line.items() if k not in ("seconds", "charts/SPS")} for line in self.lines]

    def steps(self) -> list[int]:
        return [line["global_step"] for line in self.lines]


def outcome(run_dir: Path) -> Outcome:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(run_dir, lines, torch.load(run_dir / "checkpoint.pt", weights_only=True))


def adam_steps(state: dict) -> int:
    """How many steps an `Adam` has made, by its state."""
    return int(state["steps"])


def train(name: str, run_dir: Path, **overrides) -> Outcome:
    """Train in this process, by the small settings unless they are overridden."""
    defaults = {"device": "cpu", "tensorboard": False, "run_dir": str(run_dir)}
    return call(name, **defaults | settings_of(name, overrides))


def resume(name: str, run_dir: Path) -> Outcome:
    return call(name, resume=str(run_dir), device="cpu")


def call(name: str, **settings) -> Outcome:
    script = load(name)
    torch.set_num_threads(1)  # and keeps this: threads gain nothing here, and wait for each other on busy cores
    with mock.patch("torch.set_num_threads"):
        return outcome(script.train(script.Args(**settings)))


def flags(name: str, **overrides) -> list[str]:
    """The small settings as a user types them."""
    settings = settings_of(name, overrides)
    named = {f"--{field.replace('_', '-')}": str(value) for field, value in settings.items()}
    return ["--no-tensorboard", "--device", "cpu", *(word for pair in named.items() for word in pair)]


def start(name: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.Popen:
    """Start a script as a user does, from the folder `cwd`."""
    path = os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts" / f"{name}.py", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal to its process group does not reach the tests
    )
