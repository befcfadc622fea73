"""Do the variants of a pair compute the same?

    python -m benchmarks.throughput.parity SCRIPT RESULT.json VARIANT... [-- FLAGS]

Trains each variant for about fifty updates from the same seed, with compiled code drawing the same random numbers as
eager code, and compares all logged metrics and the acting network's weights with the eager script's on the same device.
"""

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import tyro

from benchmarks.common import processes, runs, turns
from benchmarks.common.programs import AS_MODULE, SCRIPTS, VARIANTS, load_script, num_cores
from benchmarks.common.results import write_whole

TOLERANCE = 1e-3  # relative: kernels differ in the order of their sums, and updates build on each other
NOISE = 10  # the limit is this many times the effect of rounding, where that exceeds TOLERANCE
COUNTS = ("losses/clipfrac",)  # not compared: they count rows, so they change in jumps
CLOCKS = ("seconds", "charts/SPS", "time/")  # prefixes of columns that differ in any two runs
WEIGHTS = ("agent", "network", "actor")  # names of the acting network in a checkpoint


def fifty_updates(args_class: type) -> dict[str, int]:
    """Settings for about fifty updates in which rounding errors stay small: for PPO, all on a single rollout."""
    fields = args_class.__dataclass_fields__
    one, num_envs = {}, fields["num_envs"].default if "num_envs" in fields else 1
    if "num_runners" in fields:  # in one process
        one, num_envs = {"num_runners": 0}, fields["envs_per_runner"].default
    if "num_steps" in fields:
        settings = one | {"num_steps": 64, "num_minibatches": 4, "update_epochs": 13}
        if "num_workers" in fields:  # a pool, in lock-step: otherwise the order of its rows would be random
            return settings | {"num_workers": 2, "ready_batch": 0, "total_timesteps": 2 * 64}
        return settings | {"total_timesteps": 64 * num_envs}
    if "learning_starts" not in fields:
        return one | {"fragment_steps": 16, "total_timesteps": 52 * 16 * num_envs}
    settings = {"learning_starts": 100, "buffer_size": 1000, "batch_size": 64}
    if one:  # a batch is learnt from for every 64 / samples_per_insert steps
        settings |= one | {"fragment_steps": 16, "log_every": 16 * num_envs, "target_network_frequency": 10}
        every = round(64 / fields["samples_per_insert"].default)
    else:
        every = fields["train_frequency"].default if "train_frequency" in fields else 1
        settings |= {"log_every": 25} | ({"target_network_frequency": 5 * every} if every > 1 else {})
    return settings | {"total_timesteps": settings["learning_starts"] + 52 * every}


def train(script: str, variant: str, folder: Path, flags: list[str]) -> tuple[list[dict], torch.Tensor]:
    """The log lines of a variant's fifty updates, and the acting network's weights after them as one vector."""
    suffix, own = VARIANTS[variant]
    return train_module(load_script(SCRIPTS / f"{script}{suffix}.py"), folder, [*own, *flags])


def train_module(module: ModuleType, folder: Path, flags: list[str]) -> tuple[list[dict], torch.Tensor]:
    """The same for a script that is already loaded."""
    settings = {"seed": 2, "run_dir": folder, **fifty_updates(module.Args)}
    if "matmul_precision" in module.Args.__dataclass_fields__:
        settings["matmul_precision"] = "highest"  # the default on CUDA is TF32, which differs in the third digit
    given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    module.train(tyro.cli(module.Args, args=["--no-tensorboard", *given, *flags]))
    lines, _ = runs.read_lines(folder / "metrics.jsonl")
    checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    weights = next(checkpoint[name] for name in WEIGHTS if name in checkpoint)
    return lines, torch.cat([x.double().reshape(-1) for _, x in sorted(weights.items())])


def relative_errors(run: tuple, reference: tuple) -> dict[str, float]:
    """Largest deviation of each metric, relative to its value or to 0.1 if larger; for `weights`, relative in norm.

    Empty if the two logs do not have matching lines.
    """
    (lines, weights), (expected_lines, expected_weights) = run, reference
    names = [name for name in expected_lines[-1] if not name.startswith(CLOCKS) and name not in COUNTS]
    values = [np.array([[line.get(name, np.nan) for name in names] for line in x]) for x in (lines, expected_lines)]
    if values[0].shape != values[1].shape or (np.isnan(values[0]) != np.isnan(values[1])).any():
        return {}
    errors = np.nan_to_num(np.abs(values[0] - values[1]) / np.maximum(np.abs(values[1]), 0.1)).max(0)
    found = dict(zip(names, errors.tolist(), strict=True))
    return found | {"weights": ((weights - expected_weights).norm() / expected_weights.norm()).item()}


def deviations(run: tuple, reference: tuple, noise: dict[str, float] | None = None) -> dict:
    """Whether a run equals the reference up to rounding, and its largest deviations, measured by what is allowed.

    `noise` is the effect of rounding: the errors of a run whose gradients were perturbed by a rounding error. A metric
    may be off by ten times its own, and so may the weights.
    """
    errors = relative_errors(run, reference)
    if not errors:
        return {"equal": False, "failed": "the logs have other lines"}
    limits = {name: max(TOLERANCE, NOISE * (noise or {}).get(name, 0.0)) for name in errors}
    equal, weights = all(errors[name] <= limits[name] for name in errors), errors.pop("weights")
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    found = {"equal": equal, "metrics": errors[worst], "worst_metric": worst, "limit": limits[worst]}
    return found | {"weights": weights, "limit_of_weights": limits["weights"]}


def train_disturbed(script: str, folder: Path, flags: list[str]) -> tuple[list[dict], torch.Tensor]:
    """What `train` returns for the eager script if each gradient is perturbed by a rounding error of its largest entry.

    That is how sums in another order differ: small entries are off by more than a rounding error of their own.
    """
    module = load_script(SCRIPTS / f"{script}.py")
    own = module.Adam

    class Disturbed(own):
        def step(self, gradients) -> None:
            generator = torch.Generator(gradients[0].device).manual_seed(int(self.steps))
            noise = [torch.randn(g.shape, device=g.device, generator=generator) * g.abs().max() for g in gradients]
            super().step(tuple(g + 2**-23 * x for g, x in zip(gradients, noise, strict=True)))

    module.Adam = Disturbed
    try:
        return train_module(module, folder, flags)
    finally:
        module.Adam = own


def compare(script: str, result: Path, variants: list[str], flags: list[str]) -> None:
    """Compare each variant of a pair with eager; the results so far are written after each variant."""
    found = {}
    importlib.import_module("envpool")  # it draws from NumPy's random numbers when a first run imports it
    # In TF32, which cuDNN uses by default, different kernels disagree in the third digit
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(fallback_random=True):
        try:
            reference = train(script, "eager", Path(folder, "eager"), flags)
            other = train_disturbed(script, Path(folder, "disturbed"), flags)
            noise = relative_errors(other, reference)
        except (Exception, SystemExit) as error:
            reason = {"equal": False, "failed": f"eager: {turns.describe_error(error)}"}
            write_whole(result, json.dumps(dict.fromkeys(variants, reason)))
            return
        for variant in variants:
            try:
                found[variant] = deviations(train(script, variant, Path(folder, variant), flags), reference, noise)
            except (Exception, SystemExit) as error:  # one variant that crashes says nothing about the others
                found[variant] = {"equal": False, "failed": turns.describe_error(error)}
            write_whole(result, json.dumps(found))


def compare_all(
    scripts: list[str],
    variants: tuple[str, ...],
    flags: list[str],
    time_limit: float,
    folder: Path,
    cache: Path,
    on_change: Callable[[dict[str, dict[str, dict]]], None],
) -> None:
    """Compare the variants of many pairs within so many seconds, in one process per pair, several in parallel.

    `on_change` gets all results so far, by script and variant, whenever there are more; at the end none is missing.
    """
    deadline, own = time.perf_counter() + time_limit, num_cores()
    jobs = min(len(scripts), max(1, own // 2), processes.free_slots(processes.SCRIPT_MEMORY))
    settings, waiting, running = turns.compile_settings(cache, jobs), list(scripts), {}
    found, reasons = {script: {} for script in scripts}, dict.fromkeys(scripts, "no time left")
    try:
        while (waiting or running) and time.perf_counter() < deadline:
            while waiting and len(running) < jobs:
                script = waiting.pop(0)
                program = [*AS_MODULE, __name__, script, str(folder / f"{script}.json"), *variants]
                running[script] = processes.start([*program, "--", *flags], folder / f"{script}.out", **settings)
            time.sleep(0.2)
            ended = {script: child for script, child in running.items() if child.poll() is not None}
            reasons |= {script: turns.end_of(child) for script, child in ended.items()}
            files = {script: folder / f"{script}.json" for script in running}
            known = {script: json.loads(file.read_text()) for script, file in files.items() if file.exists()}
            if any(found[script] != results for script, results in known.items()):
                found |= known
                on_change(found)
            running = {script: child for script, child in running.items() if script not in ended}
    finally:
        for child in running.values():
            child.kill()
    for script, known in found.items():
        missing = {"equal": False, "failed": turns.without_paths(reasons[script])}
        found[script] = dict.fromkeys(variants, missing) | known
    on_change(found)


if __name__ == "__main__":
    _, script, result, *rest = sys.argv
    split = rest.index("--") if "--" in rest else len(rest)
    compare(script, Path(result), rest[:split], rest[split + 1 :])
