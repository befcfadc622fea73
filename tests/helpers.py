"""Find, load and run the scripts."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.common.pairs import TABLE

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
PAIRS = [(p, p.with_stem(f"{p.stem}_torchcompile")) for p in SCRIPTS if not p.stem.endswith("_torchcompile")]

# Names of the scripts, but for those that have a file of tests of their own: the eager ones, and their twins
EAGER = [eager.stem for eager, _ in PAIRS if eager.stem in TABLE and TABLE[eager.stem].own_tests is None]
COMPILED = [f"{name}_torchcompile" for name in EAGER]
# On-policy, with a pool of workers, off-policy: what plumbing does, one text in all scripts, is shown by these for all
ONE_OF_EACH_KIND = ["ppo", "ppo_env_pool", "dqn"]
# Ray gives its workers a niceness of 15 more than its own: beside other processes they would come last
os.environ["RAY_worker_niceness"] = "0"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


sys.path.insert(0, str(ROOT / "scripts"))  # worker processes get this path too, and find the script by its name


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until it is so; fail if it still is not after so many seconds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.05)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def in_float64(name: str) -> str:
    """The name of a script's copy that computes in float64.

    Two ways to compute the same differ by rounding, and learning makes the difference larger. It starts from 1e-16 here
    and not from 1e-7, so a bound may be tight and still hold on every CPU.
    """
    module = ModuleType(f"{name}_in_float64")
    if module.__name__ not in sys.modules:
        module.__file__ = str(ROOT / "scripts" / f"{name}.py")
        sys.modules[module.__name__] = module  # where dataclasses and worker processes look for it
        source = re.sub(r"\b(np|torch)\.float32\b", r"\1.float64", Path(module.__file__).read_text())
        exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module.__name__


@contextlib.contextmanager
def default_type_of(name: str):
    """Let PyTorch make tensors of the type in which this script computes."""
    if not name.endswith("_in_float64"):
        yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        # PyTorch loses changes in place of float64 tensors without dimensions when it compiles, but for this: 2.13 asks
        # the function, before it there was only the variable
        switch = "torch.fx.passes._tensorify_python_scalars._is_tensorify_enabled"
        with mock.patch(switch, lambda: False, create=True):
            with mock.patch.dict(os.environ, TENSORIFY_PYTHON_SCALARS="0"):
                yield
    finally:
        torch.set_default_dtype(torch.float32)


def pair_of(name: str) -> str:
    """The eager script of the pair that a script, or its copy in float64, belongs to."""
    return name.removesuffix("_in_float64").removesuffix("_torchcompile")


def defining(name: str) -> ModuleType:
    """A script with this function or class; which one does not matter, since all have the same text of it."""
    found = [p.stem for p in SCRIPTS if any(f"\n{kind} {name}" in p.read_text() for kind in ("def", "class"))]
    return load(found[0])


def on_policy(name: str) -> bool:
    return hasattr(load(name).Args, "num_steps")


def discrete(name: str) -> bool:
    """Whether a script is for discrete actions."""
    return TABLE[pair_of(name)].small["env_id"] == "tiny_envs:Choose-v0"


def has_pool(name: str) -> bool:
    """Whether a script steps its environments in a pool of worker processes, always."""
    return hasattr(load(name), "Pool")


def settings_of(name: str, overrides: dict) -> dict:
    """The small settings of a script with others; a pool has workers instead of environments, and no other backend."""
    settings = TABLE[pair_of(name)].small | overrides
    if has_pool(name):
        settings |= {"num_workers": settings.get("num_envs", settings["num_workers"])}
        settings = {k: v for k, v in settings.items() if k not in ("num_envs", "sync_envs", "env_backend")}
    return settings


def small_settings(name: str) -> dict:
    """Settings of a run of about a second, of any script; one over Ray runs in this process."""
    own = TABLE[pair_of(name)].own_tests
    settings = importlib.import_module(Path(own).stem).SMALL if own else {}
    return settings | ({"num_runners": 0} if hasattr(load(name).Args, "num_runners") else {})


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
    return Outcome(run_dir, lines, torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True))


def adam_steps(state: dict) -> int:
    """How many steps an `Adam` has made, by its state."""
    return int(state["steps"])


def train(name: str, run_dir: Path, **overrides) -> Outcome:
    """Train in this process, by the small settings unless they are overridden."""
    defaults = {"device": "cpu", "tensorboard": False, "run_dir": str(run_dir)}
    return call(name, **defaults | settings_of(name, overrides))


def resume(name: str, run_dir: Path, device: str = "cpu", **settings) -> Outcome:
    return call(name, resume=str(run_dir), device=device, **settings)


def call(name: str, **settings) -> Outcome:
    script = load(name)
    torch.set_num_threads(1)  # and keeps this: threads gain nothing here, and wait for each other on busy cores
    with mock.patch("torch.set_num_threads"), default_type_of(name):
        return outcome(script.train(script.Args(**settings)))


def trainer(folder: Path, name: str, small: dict):
    """Trains in this process, each time in a folder of its own: name (by default this one), settings -> Outcome."""
    folders = (folder / f"run{i}" for i in range(100))
    return lambda name=name, **settings: call(name, **small | {"run_dir": str(next(folders))} | settings)


def flags(name: str, **overrides) -> list[str]:
    """The small settings as a user types them."""
    settings = settings_of(name, overrides)
    named = {f"--{field.replace('_', '-')}": str(value) for field, value in settings.items()}
    return ["--no-tensorboard", "--device", "cpu", *(word for pair in named.items() for word in pair)]


STARTED = []  # processes of the test that runs now; those that it leaves are killed


def start(name: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.Popen:
    """Start a script as a user does, from the folder `cwd`."""
    path = os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    process = subprocess.Popen(
        [sys.executable, ROOT / "scripts" / f"{name}.py", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a signal to its process group does not reach the tests
    )
    STARTED.append(process)
    return process


def end_started() -> None:
    """Kill the programs that a test started and left, as one that failed does."""
    while STARTED:
        process = STARTED.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too, if it has ended before them
        process.wait(10)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# Over Ray


def on_ray(function):
    """A test that needs the cluster: alone, else each of several processes of pytest would start one."""
    return pytest.mark.alone(pytest.mark.usefixtures("cluster")(function))


def without_times(run: Outcome) -> Outcome:
    """A run without the shares of time that its lines have."""
    return run._replace(lines=[{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.lines])


@contextlib.contextmanager
def runners_of(script: ModuleType, args, **others):
    """The runners of a run that has not begun, for tests to talk to."""
    run = script.Run(args)
    runners = (script.RayRunners if args.num_runners else script.OneRunner)(args, run)
    for name, value in others.items():
        setattr(runners, name, value)
    try:
        yield runners
    finally:
        runners.close()


def agent_with(script: ModuleType, runners, factor: float):
    torch.manual_seed(1)
    agent = script.ActorCritic(*runners.spaces)
    with torch.no_grad():
        for weight in agent.parameters():
            weight.mul_(factor).add_(0.1 * (factor - 1) * torch.randn_like(weight))
    return agent


def refused(script: ModuleType, capfd, **settings) -> str:
    """The one line of the error of a training that was refused."""
    with pytest.raises(SystemExit) as end:
        script.train(script.Args(**settings))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == 2 and len(lines) == 1
    return lines[0]


def assert_orders_differ(minibatches: list[dict], epochs: int) -> None:
    """In each epoch on a rollout each row comes once, in an order that no other epoch has."""
    parts = np.array_split(np.stack([rows["old_value"] for rows in minibatches]), epochs)
    orders = [np.concatenate(part) for part in parts]
    assert len({tuple(order) for order in orders}) == epochs
    assert all(np.array_equal(np.sort(order), np.sort(orders[0])) for order in orders)


def assert_line_is_of(minibatches: list[dict], line: dict, clip_coef: float) -> None:
    """These metrics are means over the minibatches, whose ratios leave the clip range on both sides."""
    ratios = [rows["ratio"][rows["valid"]] for rows in minibatches]
    assert min(map(torch.min, ratios)) < 1 - clip_coef and max(map(torch.max, ratios)) > 1 + clip_coef
    for metric, function in (
        ("old_approx_kl", lambda x: -x.log()),
        ("approx_kl", lambda x: x - 1 - x.log()),
        ("clipfrac", lambda x: ((x - 1).abs() > clip_coef).float()),
    ):
        expected = np.mean([function(ratio).mean() for ratio in ratios])
        assert line[f"losses/{metric}"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
