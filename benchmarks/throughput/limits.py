"""How near compiled scripts are to what the machine could do: ./run.sh limits.

The limit is a step whose parts each take as long as they take alone, called again and again, with their data in the
caches: the environment; the matrix products and convolutions that the eager script hands to PyTorch, each at its own
shapes, memory layout, type, number of threads and precision; and the kernel of Adam, one pass over weights, gradients
and moments. Nothing else is counted: no activation, no loss, no replay, no product in NumPy, no Python. So it is out of
reach, and shows what there is to gain. It is an estimate: the compiled scripts join products of critics into stacks,
which may be faster, and a GPU could run parts beside each other.

Measures: in rounds of fresh processes, microseconds of each part per environment step, and those of a compiled step.
Takes: at the defaults about five minutes per pair.
Leaves: in --out one JSON file per pair, and limits.md from all JSON files there.
"""

import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from tqdm import tqdm

from benchmarks.common import processes, stats, steady
from benchmarks.common.programs import (
    AS_MODULE,
    SCRIPTS,
    check_known,
    check_once,
    check_positive,
    command,
    load_script,
    often_logged,
    pairs,
    same_phase,
)
from benchmarks.common.results import (
    Target,
    describe,
    estimate,
    load_all,
    machine_of,
    make_folder,
    provenance,
    say_written,
    stoppable,
    table,
)
from benchmarks.throughput import throughput

DEFAULT = ("ppo_continuous_action", "dqn", "sac_continuous_action", "td3_continuous_action")
PRODUCTS = "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"
ADAM = "_fused_adam_"
LINES = 5  # of the log, between which calls are counted
BLOCKS, BLOCK_SECONDS = 5, 0.02  # how often and how long each call is repeated
INTRODUCTION = """
The limit of a step is the sum of its parts, each called alone and again and again: the environment, the matrix products
and convolutions of the eager script as PyTorch runs them, and Adam's kernel. Activations, losses, replay, products in
NumPy and Python are left out. So no script can be that fast, except that compiled SAC and TD3 stack their critics'
products, which may be faster than those timed here. GFLOP/s are those of the products. Cells are medians over rounds,
the limit that of the rounds' sums.
""".strip()


@dataclass
class Options:
    scripts: tuple[str, ...] = ()  # pairs, by the name of the eager script; by default PPO (continuous), DQN, SAC, TD3
    rounds: int = 5  # how often everything is measured
    seconds: float = 20.0  # seconds of steady running to measure of each compiled run
    timeout: float = 600.0  # seconds after which a run is ended, steady or not
    out: Path = Path("runs/limits")  # results folder; the results in RESULTS.md are in benchmarks/results/limits


@dataclass(frozen=True)
class Layout:
    """What the time of a kernel depends on in a tensor; equal layouts are one key of a count."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        """A tensor like it, of numbers in [0, 1): as second moments they may not be negative."""
        size = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return torch.rand(size, device=self.device).to(self.dtype).as_strided(self.shape, self.stride)


def frozen(x):
    """Lists as tuples, all through, so that the arguments of a call can be a key."""
    return tuple(map(frozen, x)) if isinstance(x, list | tuple) else x


class Counts(TorchDispatchMode):
    """Counts the calls of products and of Adam's kernel, by their arguments."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[tuple] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in (*PRODUCTS, ADAM):
            given = tree_map_only(torch.Tensor, layout_of, (list(args), list((kwargs or {}).items())))
            self.calls[func, frozen(given)] += 1
        return func(*args, **(kwargs or {}))


def layout_of(x: torch.Tensor) -> Layout:
    return Layout(tuple(x.shape), x.stride(), x.dtype, x.device)


class EnoughError(Exception):
    """Ends a run in which enough was counted."""


def count_calls(module, flags: list[str]) -> tuple[Counter, int]:
    """(calls, environment steps) of an eager script between two lines of its log, both after the first with losses."""
    log, counts, seen = module.Run.log, Counts(), []

    def log_and_stop(run, metrics: dict) -> None:
        log(run, metrics)
        if any(name.startswith("losses/") for name in metrics):
            seen.append((run.step, counts.calls.copy()))
        if len(seen) > LINES:
            raise EnoughError

    module.Run.log = log_and_stop
    try:
        with counts:
            module.train(tyro.cli(module.Args, args=flags))
    except EnoughError:
        pass
    finally:
        module.Run.log = log
    (begin, before), (end, after) = seen[0], seen[-1]
    return after - before, end - begin


def seconds_of(call: tuple) -> float:
    """Seconds of a call that is made again and again, from Python: the median of several blocks."""
    func, args, kwargs = remade(call)
    run, times = (lambda: func(*args, **kwargs)), []
    count = 1 + int(BLOCK_SECONDS / max(timed(run, 3), 1e-7))
    for _ in range(BLOCKS):
        times.append(timed(run, count))
    return float(np.median(times))


def remade(call: tuple) -> tuple:
    """A counted call's (function, arguments, named arguments), with new tensors of the same layouts."""
    func, (args, kwargs) = call
    return func, *tree_map_only(Layout, Layout.make, (as_lists(args), dict(as_lists(kwargs))))


def as_lists(x):
    """Tuples as lists again, all through: a list of tensors may be no tuple."""
    return [as_lists(y) for y in x] if isinstance(x, tuple) else x


def timed(run, count: int) -> float:
    """Seconds of one of so many calls."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def flops_of(call: tuple) -> int:
    """Multiplications and additions of a product."""
    func, args, kwargs = remade(call)
    return flop_registry[func.overloadpacket](*args, **kwargs, out_val=func(*args, **kwargs))


@torch.no_grad()
def measure_calls(script: Path, flags: list[str]) -> dict:
    """Microseconds per environment step of a script's products and of Adam, each called alone, and MFLOP per step."""
    with torch.enable_grad():
        calls, steps = count_calls(load_script(script), flags)
    times = {call: count * seconds_of(call) for call, count in calls.items()}
    products = [call for call in calls if call[0].overloadpacket.__name__ in PRODUCTS]
    flops = sum(calls[call] * flops_of(call) for call in products)
    adam = sum(times.values()) - sum(times[call] for call in products)
    return {
        "products": 1e6 * sum(times[call] for call in products) / steps, "adam": 1e6 * adam / steps,
        "mflop": 1e-6 * flops / steps,
    }  # fmt: skip


def measured_calls(script: str, timeout: float) -> dict:
    """`measure_calls` in a process of its own; `failed` if it ended badly."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--no-tensorboard", *same_phase(script), *often_logged(script), "--run-dir", f"{folder}/run"]
        path = SCRIPTS / f"{script}.py"
        words = [*AS_MODULE, "benchmarks.throughput.limits", str(path), f"{folder}/result", *flags]
        child = processes.start(words, Path(folder, "output"))
        failure, result = child.finish(timeout), Path(folder, "result")
        if not result.exists():
            tqdm.write(child.last_lines())
        return json.loads(result.read_text()) if result.exists() else {"failed": failure or "no result"}


def measure_round(script: str, options: Options, cache: Path, turn: int) -> tuple[dict, str]:
    """(microseconds per step of each part and of a compiled step, or `failed`; the environment's name, if known)."""
    limits = throughput.limits_of(options.seconds, options.timeout)
    flags = ["--no-tensorboard", *same_phase(script), *often_logged(script), "--seed", str(turn + 1)]
    program = [*AS_MODULE, "benchmarks.throughput.ceilings", "env", str(SCRIPTS / f"{script}.py"), *flags]
    alone = throughput.Options(seconds=max(options.seconds / 4, 2 * steady.WINDOW), timeout=options.timeout)
    env, _ = throughput.measure(program, alone, ("--total-timesteps", str(10**12)), learns=False)
    own, run = throughput.measure([*command(script, "compile"), *flags], limits, TORCHINDUCTOR_CACHE_DIR=str(cache))
    calls = measured_calls(script, options.timeout)
    failures = [x["failed"] for x in (env, own, calls) if "failed" in x]
    if failures:
        return {"failed": failures[0]}, run.env_id if run.lines else ""
    times = {"environment": env["speeds"], "compiled": own["speeds"]}
    return {name: 1e6 / float(np.median(x)) for name, x in times.items()} | calls, run.env_id


def measure(script: str, options: Options, bar: tqdm, on_round: Callable[[dict], None]) -> None:
    """All rounds of a pair; `on_round` gets the result so far after each."""
    results, env_id = [], "unknown"
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(options.rounds):
            bar.set_postfix_str(f"{script}, round {turn + 1}")
            result, name = measure_round(script, options, Path(cache), turn)
            results.append(result)
            env_id = name or env_id
            bar.update()
            effort = {"rounds": len(results), "seconds": options.seconds}
            on_round({"script": script, "env_id": env_id, "limits": results, **effort, "provenance": provenance()})


def good_rounds(result: dict) -> list[dict]:
    return [x for x in result["limits"] if "failed" not in x]


def limit_of(parts: dict) -> float:
    """Microseconds of a step at the limit, from those of its parts."""
    return parts["environment"] + parts["products"] + parts["adam"]


def row(result: dict) -> list[str]:
    """Cells of a pair: medians over the rounds, and the compiled script's share of the limit's speed."""
    name, good = f"`{result['script']}`, {result['env_id']}", good_rounds(result)
    if not good:
        return [name, "failed", *["-"] * 7]
    names = "environment", "products", "adam", "compiled", "mflop"
    middle = {name: float(np.median([x[name] for x in good])) for name in names}
    share, interval = stats.ratio_of_rounds([limit_of(x) for x in good], [x["compiled"] for x in good])
    digits = ",.0f" if middle["compiled"] > 1000 else ",.1f"
    rate = 1e3 * middle["mflop"] / middle["products"] if middle["products"] else math.nan  # MFLOP / us, in GFLOP/s
    return [
        name, *(f"{middle[x]:{digits}}" for x in names[:3]), f"{np.median([limit_of(x) for x in good]):{digits}}",
        f"{middle['compiled']:{digits}}", estimate(share, interval, ".2f"), f"{middle['mflop']:,.1f}", f"{rate:,.0f}",
    ]  # fmt: skip


def tables(results: list[dict]) -> list[str]:
    """A table for each machine."""
    lines = []
    for machine in dict.fromkeys(machine_of(result["provenance"]) for result in results):
        own = [result for result in results if machine_of(result["provenance"]) == machine]
        header = [f"µs per environment step, {machine}", "environment", "products", "Adam", "limit: their sum"]
        header += ["compiled", "limit / compiled [95 %]", "MFLOP", "GFLOP/s"]
        lines += [*table(header, map(row, own)), ""]
    return lines


def write_summary(out: Path) -> str:
    """Make `limits.md` of all results in a folder; returns the Markdown."""
    results = load_all(out, "limits")
    lines = ["# How near the compiled scripts are to the machine's limits", "", INTRODUCTION, "", *tables(results)]
    for result in results:
        how = f"{result['rounds']} rounds of {result['seconds']:g} s"
        failed = len(result["limits"]) - len(good_rounds(result))
        how += f"; {failed} failed" * bool(failed)
        lines += [f"`{result['script']}`: {how}; measured {describe(result['provenance'])}", ""]
    text = "\n".join(lines)
    if results:
        (out / "limits.md").write_text(text)
    return text


def check(options: Options) -> None:
    """Refuse what can't work."""
    check_known("pair", options.scripts, [pair for pair in pairs() if not pair.endswith("_ray")])
    check_once(options, "scripts")
    check_positive(options, "rounds", "seconds", "timeout")
    make_folder(options.out)


def main(options: Options) -> int:
    check(options)
    effort, scripts = {"rounds": options.rounds, "seconds": options.seconds}, options.scripts or DEFAULT
    targets = {script: Target(options.out / f"{script}.json", effort, script=script) for script in scripts}
    load_all(options.out, "limits")
    kept = f"the rounds that were finished before lie in {options.out}"
    with stoppable(kept), tqdm(total=options.rounds * len(targets), unit="round") as bar:
        for script, target in targets.items():
            measure(script, options, bar, lambda x, own=target: own.write(x, len(good_rounds(x)) == options.rounds))
            text = write_summary(options.out)
    print(text)
    return say_written(options.out, targets.values(), "limits.md")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure_calls(Path(sys.argv[1]), sys.argv[3:])))
