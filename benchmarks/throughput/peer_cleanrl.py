"""Run a script of CleanRL or LeanRL, unchanged, and log its speed: peers `cleanrl` and `leanrl` of ./run.sh throughput.

    CLEANRL_PYTHON benchmarks/throughput/peer_cleanrl.py SCRIPT.py --run-dir DIR [FLAGS]

These scripts need an older Gymnasium than ours, so they have a virtual environment of their own
(requirements/requirements-cleanrl.txt), and this program imports nothing from this repository. Stubs receive what they
would send to TensorBoard or Weights & Biases, and the steps of their vector environment are counted:
`DIR/metrics.jsonl` gets a line after every --log-every steps or more, with a loss once the script has reported one;
LeanRL's begin to report some time after they have compiled. FLAGS are those of our scripts; all but the ones named
below are passed on, under the name that they have there.
"""

import argparse
import json
import os
import runpy
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace

LINE_SECONDS = 0.05  # minimum seconds between two lines
RENAMED = {"--epsilon-start": "--start-e", "--epsilon-end": "--end-e"}
PACKAGES = "torch", "tensordict", "torchrl", "gymnasium", "mujoco", "numpy"


class Log:
    """Counts environment steps, and writes a line now and then."""

    def __init__(self, folder: Path, every: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.every = (folder / "metrics.jsonl").open("w", buffering=1), every
        self.start = time.perf_counter()
        self.steps, self.written, self.seconds, self.learns = 0, 0, 0.0, False

    def count(self, steps: int) -> None:
        self.steps += steps
        seconds = time.perf_counter() - self.start
        if self.steps - self.written >= self.every and seconds - self.seconds >= LINE_SECONDS:
            line = {"global_step": self.steps, "seconds": seconds} | ({"losses/reported": 1.0} if self.learns else {})
            self.file.write(json.dumps(line) + "\n")
            self.written, self.seconds = self.steps, seconds

    def report(self, *_, **__) -> None:
        """In place of `wandb.log`, which LeanRL's scripts call."""
        self.learns = True

    def add_scalar(self, name: str, *_, **__) -> None:
        """In place of TensorBoard's, which CleanRL's scripts call."""
        self.learns |= name.startswith("losses/")


def stub_loggers(log: Log) -> None:
    """Receive what a script reports; nothing is written or leaves the machine."""
    wandb, tensorboard = ModuleType("wandb"), ModuleType("torch.utils.tensorboard")
    wandb.init, wandb.log = lambda *_, **__: None, log.report
    wandb.__spec__ = ModuleSpec("wandb", None)  # torchrl looks for it
    nothing = {name: lambda *_, **__: None for name in ("add_text", "close")}
    tensorboard.SummaryWriter = lambda *_, **__: SimpleNamespace(add_scalar=log.add_scalar, **nothing)
    sys.modules |= {"wandb": wandb, "torch.utils.tensorboard": tensorboard}


def counted(step, log: Log):
    """A vector environment's `step` that counts."""

    def call(*arguments, **named):
        result = step(*arguments, **named)
        log.count(len(result[1]))
        return result

    return call


def count_steps(log: Log) -> None:
    """Make the vector environments of Gymnasium and EnvPool count their steps."""
    import gymnasium as gym

    gym.vector.SyncVectorEnv.step = counted(gym.vector.SyncVectorEnv.step, log)
    try:
        import envpool
    except ImportError:
        return
    make = envpool.make

    def make_counted(*arguments, **named):
        envs = make(*arguments, **named)
        envs.step = counted(envs.step, log)
        return envs

    envpool.make = make_counted


def versions() -> dict[str, str]:
    """The versions of what is installed here."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("script", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-tensorboard", action="store_true")
    own, rest = parser.parse_known_args()
    names = [flag.partition("=") for flag in rest]
    flags = [RENAMED.get(name, name) + equals + value for name, equals, value in names]
    if own.threads:
        os.environ["OMP_NUM_THREADS"] = str(own.threads)  # read when PyTorch is imported
    log = Log(own.run_dir, own.log_every)
    config = {"script": own.script.name, "args": {"flags": flags}, "versions": versions()}
    (own.run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stub_loggers(log)
    count_steps(log)
    sys.argv = [str(own.script), *flags]
    sys.path.append(str(own.script.parents[1]))  # where CleanRL keeps its replay buffer
    runpy.run_path(str(own.script), run_name="__main__")


if __name__ == "__main__":
    main()
