"""Train PPO on HalfCheetah for one to eight minutes, compiled, and draw its learning curve: ./run.sh demo [FLAGS].

FLAGS go to scripts/ppo_continuous_action_torchcompile.py; `--help` lists them. They come last, so they override.

Measures: nothing that a benchmark would: the speed and the return of this run, which it prints at the end.
Takes: one to eight minutes, half a minute of them to compile if there is no cache yet.
Leaves: runs/demo__TIME, or --run-dir, with what a run leaves and learning_curve.png.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.common import plots, runs
from benchmarks.common.programs import SCRIPTS, missing_for_compile

SCRIPT = SCRIPTS / "ppo_continuous_action_torchcompile.py"
UNCOMPILED_STEPS = "300_000"  # so that it takes no longer without torch.compile


def flag_value(flags: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`, with - or _ between words; the last one holds."""
    value = None
    for i, flag in enumerate(flags):
        key, _, given = flag.partition("=")
        if key.replace("_", "-") == f"--{name}":
            value = given or (flags[i + 1] if i + 1 < len(flags) else None)
    return value


def compile_flags(flags: list[str]) -> tuple[list[str], list[str]]:
    """(before, after): flags to put around the user's if this machine lacks something that torch.compile needs."""
    missing = missing_for_compile()
    if missing is None or "--no-compile" in flags:
        return [], []
    print(f"this machine lacks {missing}, which torch.compile needs: training with --no-compile, half as fast")
    is_new = flag_value(flags, "resume") is None
    return ["--total-timesteps", UNCOMPILED_STEPS] if is_new else [], ["--no-compile"] if is_new else []


def wait(process: subprocess.Popen) -> int:
    """Exit code of the script. It ends cleanly at Ctrl-C, since it shares the terminal, and at a SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def draw_learning_curve(run: runs.Run, path: Path) -> None:
    """Mean return of the episodes of each log line, and the mean over each 20th of the run."""
    index, returns, _ = run.episodes()
    steps = run.column("global_step")[index]
    edges = np.linspace(0, run.steps, 21)
    smooth = runs.learning_curve(run, edges)
    with plots.figure(path, size=(6.4, 4)) as axes:
        axis = axes[0, 0]
        points = {"color": plots.colour(run.variant), "alpha": 0.35, "s": 8, "linewidth": 0}
        axis.scatter(steps, returns, **points, label="episodes of one line of the log")
        plots.draw_curve(axis, edges[1:], smooth, run.variant, "mean over a 20th of the run")
        title = f"{run.script} ({run.variant}) on {run.env_id}, seed {run.seed}"
        plots.describe_axis(axis, title, "environment steps", "episode return")
        axis.legend()


def summarize(folder: Path) -> None:
    """Print where the run ended and what lies in its folder."""
    run = runs.read_run(folder)
    if not run.lines:
        return
    quoted = shlex.quote(str(folder))  # in a line to paste
    speed = np.median(run.column("charts/SPS")[len(run.lines) // 5 :])  # the first lines compile
    score, episodes = runs.final_return(run), min(run.episodes()[2].sum(), runs.LAST_EPISODES)
    rows = [
        ("steps", f"{run.steps:,} in {run.seconds:.0f} s; {speed:,.0f} steps/s after the start"),
        ("return", f"{score:,.1f}, mean of the last {episodes:.0f} episodes" if episodes else "no episode has ended"),
        ("log", folder / "metrics.jsonl"),
    ]
    if (folder / "checkpoint.pt").exists():
        rows += [("checkpoint", folder / "checkpoint.pt"), ("evaluate", f"./run.sh evaluate {quoted}")]
    if episodes:
        draw_learning_curve(run, folder / "learning_curve.png")
        rows.insert(3, ("curve", folder / "learning_curve.png"))
    if not run.is_complete:
        rows.append(("go on", f"./run.sh demo --resume {quoted}"))
    print("\n" + "\n".join(f"{name:<11}{value}" for name, value in rows))


def main(flags: list[str]) -> int:
    if {"-h", "--help"} & set(flags):
        print(__doc__, flush=True)
        return subprocess.run([sys.executable, str(SCRIPT), *flags]).returncode
    before, after = compile_flags(flags)
    folder = flag_value(flags, "resume") or flag_value(flags, "run-dir")
    if folder is None:
        folder = f"runs/demo__{time.strftime('%Y%m%d-%H%M%S')}"
        before += ["--run-dir", folder]
    environment = dict(os.environ)
    if "CXX" not in environment and not shutil.which("g++"):
        environment["CXX"] = "clang++"
    code = wait(subprocess.Popen([sys.executable, str(SCRIPT), *before, *flags, *after], env=environment))
    if code != 2:  # 2: the input was wrong, the script has reported it, and nothing ran
        summarize(Path(folder))
    return code if code >= 0 else 128 - code
