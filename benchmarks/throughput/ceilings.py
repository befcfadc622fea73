"""Where a script spends its time, and how fast its environment is alone.

    python -m benchmarks.throughput.ceilings env|sections SCRIPT.py [FLAGS]

`env` only steps the script's own environments, with random actions: the upper bound that they set on its speed.

`sections` trains as the flags say while a second thread samples, a few hundred times a second, which line the loop of
`train` is executing. Each line of the log gets the seconds spent in each section since the previous log line:

- `profile/env`: in a method of the script's `Envs` or `Pool`, under whichever heading it is called;
- `profile/policy`: otherwise, under the heading `Act`, `Step the environment` or `Collect`;
- `profile/learn`: otherwise, under `Estimate advantages` or `Learn`;
- `profile/rest`: in the log, checkpoints, and the head of the loop.

On CUDA a kernel keeps running after the call that launched it, so its time appears where the loop waits for it. The
speed of a script is never taken from such a run.
"""

import bisect
import ctypes
import inspect
import json
import re
import sys
import threading
import time
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import numpy as np
import tyro

from benchmarks.common import processes
from benchmarks.common.programs import AS_MODULE, check_known, environment_class, fail, load_script, make_envs

SECTIONS = ("env", "policy", "learn", "rest")
SECTION_OF = {
    "Act": "policy", "Step the environment": "policy", "Collect": "policy", "Estimate advantages": "learn",
    "Learn": "learn", "Log": "rest",
}  # fmt: skip
INTERVAL = 0.003  # seconds between two samples: not a divisor of a likely loop duration
SWITCH = 1e-5  # seconds after which the loop's thread must yield to the sampling thread
PR_SET_TIMERSLACK = 29  # of prctl(2)
LOG_EVERY = 0.25  # seconds between two lines of an env-only run
NUM_ACTIONS = 256  # random actions, drawn beforehand and cycled through


def headings(train) -> tuple[list[int], list[str]]:
    """The lines of a script at which a part of the loop of `train` begins, and the section of each."""
    lines, first = inspect.getsourcelines(train)
    pattern = re.compile(rf" +# ({'|'.join(SECTION_OF)})(?:[.,;:]|$)")
    found = [(first + i, SECTION_OF[match[1]]) for i, line in enumerate(lines) if (match := pattern.match(line))]
    return [number for number, _ in found], [section for _, section in found]


class Sampler:
    """Seconds that a thread spends in each section of a script's loop, estimated by sampling its stack.

    Python runs one thread at a time. If the sampler waited until the loop released the GIL by itself, it would mostly
    sample PyTorch's calls; so it may demand the GIL within microseconds, and its timer is set to wake it on time.
    """

    def __init__(self, module: ModuleType):
        methods = [x for x in vars(environment_class(module)).values() if inspect.isfunction(x)]
        self.train, self.envs = module.train.__code__, {method.__code__ for method in methods}
        self.starts, self.sections = headings(module.train)
        self.seconds, self.watched = dict.fromkeys(SECTIONS, 0.0), threading.current_thread()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        sys.setswitchinterval(SWITCH)
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
        last = time.perf_counter()
        while self.watched.is_alive():
            frame, now = sys._current_frames().get(self.watched.ident), time.perf_counter()
            self.seconds[self.section_of(frame)] += now - last
            del frame
            last = now
            time.sleep(INTERVAL)

    def section_of(self, frame: FrameType | None) -> str:
        """The section that a thread is in, given its innermost frame."""
        codes: set[CodeType] = set()
        while frame is not None and frame.f_code is not self.train:
            codes.add(frame.f_code)
            frame = frame.f_back
        place = bisect.bisect(self.starts, frame.f_lineno or 0) if frame is not None else 0
        if place == 0:
            return "rest"
        return "env" if codes & self.envs else self.sections[place - 1]

    def take(self) -> dict[str, float]:
        """Seconds of each section since the last call, as columns of a log; a RuntimeError if the thread broke."""
        if self.thread.ident and not self.thread.is_alive():
            raise RuntimeError("the thread that looks at the loop has ended")
        taken = {f"profile/{section}": self.seconds[section] for section in SECTIONS}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return taken


def train_watched(module: ModuleType, flags: list[str]) -> None:
    """Train as the flags say; each line of the log gets the seconds of the sections, after the first one with losses.

    Until then functions are compiled. While Dynamo evaluates a frame, reading the stack may end the process.
    """
    sampler, log = Sampler(module), module.Run.log

    def log_watched(run, metrics: dict) -> None:
        log(run, metrics | sampler.take())
        if not sampler.thread.ident and any(name.startswith("losses/") for name in metrics):
            sampler.thread.start()

    module.Run.log = log_watched
    module.train(tyro.cli(module.Args, args=flags))


def rounds(envs, actions: list[np.ndarray]):
    """Step all environments endlessly, cycling through the actions; yields which episodes (N,) ended in each round.

    Where pools step independently of each other, each gets its next actions as soon as its results have arrived.
    """
    envs.reset()
    if not hasattr(envs, "num_pools"):
        for action in cycle(actions):
            _, _, terminated, truncated, *_ = envs.step(action)
            yield terminated | truncated
    parts = cycle([np.split(action, envs.num_pools) for action in actions])
    for pool, part in enumerate(next(parts)):
        envs.send(pool, part)
    while True:
        done = np.zeros((envs.num_pools, len(actions[0]) // envs.num_pools), dtype=bool)
        for pool, part in enumerate(next(parts)):
            _, (_, terminated, truncated, *_) = envs.recv(pool)
            envs.send(pool, part)
            done[pool] = (terminated + truncated) > 0
        yield done.reshape(-1)


def step_envs(module: ModuleType, flags: list[str]) -> None:
    """Step the environments with random actions until the budget is used up, or until Ctrl-C, and log the speed.

    If the script has several runners, the others do the same in parallel; each is assumed to take as many steps.
    """
    args = tyro.cli(module.Args, args=flags)
    folder = Path(args.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    num_runners = max(1, getattr(args, "num_runners", 1))
    paths = [folder / f"runner{i}" for i in range(1, num_runners)]
    others = {path: runner_beside(module, flags, path) for path in paths}
    config = {"script": Path(module.__file__).name, "args": asdict(args)}
    (folder / "config.json").write_text(json.dumps(config))
    num_envs = args.num_workers * args.envs_per_worker if hasattr(module, "Pool") else 0
    num_envs = num_envs or getattr(args, "num_envs", None) or args.envs_per_runner
    envs = make_envs(module, args, list(range(1, num_envs + 1)))
    envs.action_space.seed(args.seed)
    draw = envs.action_space.sample
    actions = [np.stack([draw() for _ in range(num_envs)]) for _ in range(NUM_ACTIONS)]
    for path, other in others.items():
        while not (path / "metrics.jsonl").exists():
            if other.poll() is not None:
                fail(f"the environments of another runner failed: {other.last_lines()}")
            time.sleep(0.1)
    step, done, start = 0, np.zeros(num_envs, dtype=bool), time.perf_counter()
    written = start
    with (folder / "metrics.jsonl").open("w", buffering=1) as file:
        for ended in rounds(envs, actions):
            step += num_runners * (num_envs - int(done.sum()))  # after the end of an episode this call was a reset
            done, now = ended, time.perf_counter()
            if now - written >= LOG_EVERY:
                file.write(json.dumps({"global_step": step, "seconds": now - start}) + "\n")
                written = now
            if step >= args.total_timesteps:
                break
    envs.close()
    for other in others.values():
        other.kill()


def runner_beside(module: ModuleType, flags: list[str], folder: Path) -> processes.Child:
    """Another process that steps as many environments, and ends with this one."""
    folder.mkdir(exist_ok=True)
    words = [*AS_MODULE, "benchmarks.throughput.ceilings", "env", module.__file__, *flags]
    words += ["--num-runners", "1", "--total-timesteps", str(2**60), "--run-dir", str(folder)]
    return processes.start(words, folder / "output.txt")


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        fail("name what to measure, env or sections, and a script")
    what, script, *flags = arguments
    check_known("measurement", [what], ["env", "sections"])
    try:
        if what == "env":
            step_envs(load_script(Path(script)), flags)
        else:
            train_watched(load_script(Path(script)), flags)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
