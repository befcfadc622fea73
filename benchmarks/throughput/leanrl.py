"""A script of LeanRL, measured beside ours: python -m benchmarks.throughput.leanrl SCRIPT.py RUN_DIR EVERY [FLAGS].

LeanRL's scripts log to Weights & Biases only. Here a stub `wandb` module receives what they log, and the steps of their
vector environment are counted: `RUN_DIR/metrics.jsonl` gets a line after every EVERY steps or more, with a loss once
the script has begun to report, which is after it has compiled. Nothing leaves the machine.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType

from benchmarks.common.programs import SUFFIX, fields_of

LINE_SECONDS = 0.05  # minimum seconds between two lines
FLAGS = ("--compile", "--cudagraphs")  # its fastest variant


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
        """In place of `wandb.log`."""
        self.learns = True


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


def command(folder: Path, script: str, run: Path) -> list[str] | None:
    """The command that measures a pair's counterpart in a LeanRL folder; None if there is no counterpart."""
    found = [path for path in (folder / "leanrl", folder) if (path / f"{script}{SUFFIX}.py").exists()]
    if not found:
        return None
    known = fields_of(script)
    is_on_policy = "num_steps" in known
    every = known["num_steps"].default * known["num_envs"].default if is_on_policy else 1
    flags = [*FLAGS, "--total-timesteps=1000000000", *([] if is_on_policy else ["--learning-starts=1000"])]
    return [sys.executable, "-m", __name__, str(found[0] / f"{script}{SUFFIX}.py"), str(run), str(every), *flags]


def main(script: str, folder: str, every: str, *flags: str) -> None:
    log, wandb = Log(Path(folder), int(every)), ModuleType("wandb")
    wandb.init, wandb.log = lambda *_, **__: None, log.report
    sys.modules["wandb"] = wandb
    count_steps(log)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
