"""Where the time of a script goes: python -m benchmarks.throughput.ceilings env|sections SCRIPT.py [FLAGS].

`env` steps the script's own `Envs` with random actions and does nothing else: the ceiling that the environment sets.

`sections` runs the script with clocks around three kinds of calls in its loop, wrapped from outside, and adds their
seconds since the line before to each line of the log:

- `profile/env`: `Envs.step`, or `send` and `recv` of a `Pool` or of `Envs`;
- `profile/policy`: the function that chooses actions (`policy`, `q_values`, `act`);
- `profile/learn`: all other functions made in `train` and called in its loop (`estimate`, `update...`).

What is left is the loop itself: normalisation, buffers, statistics, log and checkpoints. On CUDA each of these calls
waits for the device, which costs some overlap; the speed of a script is never taken from such a run.
"""

import ast
import json
import sys
import time
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from types import ModuleType

import cloudpickle
import numpy as np
import tyro

from benchmarks.common.programs import check_known, fail, load_script, make_envs

POLICY = ("policy", "q_values", "act")  # names of functions that choose an action
SECTIONS = ("env", "policy", "learn")
LOG_EVERY = 0.25  # seconds between two lines of an env-only run
NUM_ACTIONS = 256  # random actions are drawn beforehand and used in turn


class Clock:
    """Seconds spent in each section. Of calls within calls only the outermost counts."""

    def __init__(self):
        self.seconds, self.depth = dict.fromkeys(SECTIONS, 0.0), 0

    def around(self, function, section: str):
        """The function, its time counted for a section; objects of the script's own classes stay as they are."""
        import torch

        if type(function).__module__ in sys.modules and hasattr(sys.modules[type(function).__module__], "clock"):
            return function

        def timed(*arguments, **named):
            self.depth += 1
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    if section != "env" and torch.cuda.is_initialized():
                        torch.cuda.synchronize()
                    self.seconds[section] += time.perf_counter() - start

        return timed

    def take(self) -> dict[str, float]:
        """Seconds of each section since the last call, as columns of a log."""
        taken = {f"profile/{section}": seconds for section, seconds in self.seconds.items()}
        self.seconds = dict.fromkeys(SECTIONS, 0.0)
        return taken


def names(nodes: list[ast.stmt], kind: type) -> set[str]:
    """The names that statements load or store."""
    return {x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, kind)}


def functions_of_loop(train: ast.FunctionDef) -> tuple[int, list[str]]:
    """(index of the statement after which the loop follows, names of the functions made before it and called in it)."""
    is_start = [isinstance(node, ast.Assign) and ast.unparse(node).startswith("run = Run(") for node in train.body]
    start = is_start.index(True)
    made = names(train.body[:start], ast.Store) | {x.name for x in train.body[:start] if isinstance(x, ast.FunctionDef)}
    calls = [x.func for node in train.body[start:] for x in ast.walk(node) if isinstance(x, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    return start, sorted(made & called)


def instrument(path: Path, clock: Clock) -> ModuleType:
    """The script as a module in which clocks run.

    Before the loop starts its functions are wrapped under the same names, after the place where they are compiled.
    """
    tree = ast.parse(path.read_text())
    train = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    start, functions = functions_of_loop(train)
    sections = {name: "policy" if name in POLICY else "learn" for name in functions}
    wrap = [f"{name} = clock.around({name}, {section!r})" for name, section in sections.items()]
    train.body[start:start] = ast.parse("\n".join(wrap)).body
    module = ModuleType(path.stem)
    module.__file__, module.clock = str(path), clock
    sys.modules[path.stem] = module
    sys.path.append(str(path.parent))  # worker processes import the script itself, but for those of a pool
    cloudpickle.register_pickle_by_value(module)
    exec(compile(tree, str(path), "exec"), vars(module))
    envs = module.Pool if hasattr(module, "Pool") else module.Envs
    for method in {"step", "send", "recv"} & vars(envs).keys():
        setattr(envs, method, clock.around(getattr(envs, method), "env"))
    log = module.Run.log
    module.Run.log = lambda run, step, metrics, *rest: log(run, step, metrics | clock.take(), *rest)
    return module


def rounds(envs, actions: list[np.ndarray]):
    """Step all environments, with the actions in turn, for ever; yields which of them (N,) ended in each round.

    Of pools that step independently of each other, each is sent its next actions as soon as it has been heard of.
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
            _, _, terminated, truncated, *_ = envs.recv(pool)
            envs.send(pool, part)
            done[pool] = terminated | truncated
        yield done.reshape(-1)


def step_envs(module: ModuleType, flags: list[str]) -> None:
    """Step the environments with random actions until the budget is used up, or until Ctrl-C, and log the speed."""
    args = tyro.cli(module.Args, args=flags)
    folder = Path(args.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"script": Path(module.__file__).name, "args": asdict(args)}
    (folder / "config.json").write_text(json.dumps(config))
    num_envs = args.num_workers * args.envs_per_worker if hasattr(module, "Pool") else args.num_envs
    envs = make_envs(module, args, list(range(1, num_envs + 1)))
    envs.action_space.seed(args.seed)
    draw = envs.action_space.sample
    actions = [np.stack([draw() for _ in range(num_envs)]) for _ in range(NUM_ACTIONS)]
    step, done, start = 0, np.zeros(num_envs, dtype=bool), time.perf_counter()
    written = start
    with (folder / "metrics.jsonl").open("w", buffering=1) as file:
        for ended in rounds(envs, actions):
            step += num_envs - int(done.sum())  # where an episode had ended, this was a reset
            done, now = ended, time.perf_counter()
            if now - written >= LOG_EVERY:
                file.write(json.dumps({"global_step": step, "seconds": now - start}) + "\n")
                written = now
            if step >= args.total_timesteps:
                break
    envs.close()


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        fail("name what to measure, env or sections, and a script")
    what, script, *flags = arguments
    check_known("measurement", [what], ["env", "sections"])
    try:
        if what == "env":
            step_envs(load_script(Path(script)), flags)
        else:
            module = instrument(Path(script), Clock())
            module.train(tyro.cli(module.Args, args=flags))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
