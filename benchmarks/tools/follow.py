"""Plays each new checkpoint of a run that is still training: `./run.sh evaluate RUN_DIR --follow`."""

import contextlib
import json
import os
import re
import time
from pathlib import Path

import numpy as np

from benchmarks.common import plots, runs
from benchmarks.common.results import make_folder
from benchmarks.tools import play

LOOK_EVERY = 1.0  # seconds between two looks for a checkpoint


def is_running(folder: Path) -> bool:
    """Whether a process has the run's log open for writing, as its script does from start to end."""
    log = str((folder / "metrics.jsonl").resolve())
    for process in filter(str.isdigit, os.listdir("/proc")):
        # Other users' processes can't be inspected, and any may end during the check
        with contextlib.suppress(OSError):
            if any(writes(process, number, log) for number in os.listdir(f"/proc/{process}/fd")):
                return True
    return False


def writes(process: str, number: str, file: str) -> bool:
    """Whether a process has a file open for writing under this number; OSError if that can't be known."""
    if os.readlink(f"/proc/{process}/fd/{number}") != file:
        return False
    flags = re.search(r"flags:\s+(\d+)", Path(f"/proc/{process}/fdinfo/{number}").read_text())[1]
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def draw(lines: list[dict], title: str, path: Path) -> None:
    """Mean return over the steps of the checkpoints, and a standard deviation around it."""
    steps, mean, std = (np.array([x[key] for x in lines]) for key in ("global_step", "mean_return", "std_return"))
    with plots.figure(path, size=(6.4, 4)) as axes:
        count = lines[-1]["episodes"]
        of = f"mean ± standard deviation of {count} episodes" if count > 1 else "1 episode"
        name = f"deterministic policy, {of}"
        plots.draw_curve(axes[0, 0], steps, mean, "eager", name, (mean - std, mean + std))
        axes[0, 0].scatter(steps, mean, color=plots.colour("eager"), s=12)
        plots.describe_axis(axes[0, 0], title, "environment steps", "return")
        axes[0, 0].legend()


def new_checkpoint(folder: Path, seen: list[int]) -> dict | None:
    """The checkpoint of a run, if it is a new one; its modification time is added to `seen`."""
    file = folder / "checkpoint.pt"
    written = file.stat().st_mtime_ns if file.exists() else 0
    if written in seen:
        return None
    seen.append(written)
    return play.load_checkpoint(folder) if written else None


def lines_of(log: Path, episodes: int, seed: int) -> list[dict]:
    """What was played before with so many episodes and this seed, in the order of steps; `log` holds others, too."""
    texts = log.read_text(errors="replace").splitlines() if log.exists() else ()
    lines = [line for line in map(runs.parse_line, texts) if line and "mean_return" in line]
    own = [line for line in lines if (line["episodes"], line.get("seed", 0)) == (episodes, seed)]
    return sorted(own, key=lambda line: line["global_step"])


def follow(folder: Path, script: Path | None, episodes: int, seed: int) -> None:
    """Play each checkpoint not played yet; each adds a line to evaluation.jsonl and redraws the curve."""
    import torch

    os.nice(10)  # to disturb the run as little as possible
    torch.set_num_threads(1)
    module, args = play.load_run(folder, script)
    make_folder(folder)  # refuses one that can't be written to
    args, log, seen, has_ended = play.for_playing(module, args), folder / "evaluation.jsonl", [], False
    lines, title = lines_of(log, episodes, seed), f"{Path(module.__file__).stem} on {args.env_id}, seed {args.seed}"
    while not has_ended:
        has_ended = not is_running(folder)  # checked first, so that a last checkpoint is not missed
        checkpoint = new_checkpoint(folder, seen)
        if checkpoint and all(line["global_step"] != checkpoint["global_step"] for line in lines):
            returns = play.play(module, args, checkpoint, episodes, seed)
            line = {"global_step": checkpoint["global_step"], "seconds": round(checkpoint["seconds"], 3)}
            line |= {"mean_return": float(np.mean(returns)), "std_return": float(np.std(returns))}
            line |= {"episodes": episodes, "seed": seed}
            lines.append(line)
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            draw(lines, title, folder / "evaluation.png")
            several = f" ± {line['std_return']:.1f}" * (episodes > 1)
            print(f"step {line['global_step']:,}: {line['mean_return']:.1f}{several}", flush=True)
        elif not has_ended:
            time.sleep(LOOK_EVERY)
    if not lines:
        play.load_checkpoint(folder)  # says that there is none
    print(f"the run has ended: {log}, {folder / 'evaluation.png'}")
