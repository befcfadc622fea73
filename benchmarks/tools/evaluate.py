"""Play the deterministic policy of a run, with frozen statistics, in a fresh environment: ./run.sh evaluate RUN_DIR.

Works for runs of every script: the one named in config.json is loaded, and its `load_policy` rebuilds the policy. With
--follow it plays each new checkpoint of a run that is still training, until the run ends or Ctrl-C.

Measures: mean and standard deviation of the returns of whole episodes.
Takes: seconds for ten MuJoCo episodes, minutes for Atari games; with --follow as long as the run, at low priority.
Leaves: nothing but the video that --video asks for; --follow leaves evaluation.jsonl, with a line per checkpoint, and
its curve, evaluation.png, in the run's folder.
"""

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import numpy as np
import tyro

from benchmarks.common.programs import fail
from benchmarks.common.results import stoppable
from benchmarks.tools import follow, play

FRAMES_PER_SECOND = 15  # of a game of Atari
DRAWN_BY_PYGAME = {"classic_control", "toy_text", "box2d"}  # kinds of Gymnasium's environments


@dataclass
class Options:
    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_DIR")]  # folder of the run
    episodes: int = 10  # episodes to play
    video: Annotated[Path | None, tyro.conf.arg(metavar="FILE.mp4")] = None  # also film the first episode
    script: Annotated[Path | None, tyro.conf.arg(metavar="FILE.py")] = None  # the run's, if not in scripts/ or here
    seed: int = 0  # another seed gives other episodes; none repeats one of the training
    follow: bool = False  # play each new checkpoint while the run trains


def film(module: ModuleType, folder: str) -> None:
    """Make the script create its environment with a camera; the first episode is recorded to a file in `folder`."""
    import gymnasium as gym

    make_unfilmed = module.make_env

    def make_env(env: str | gym.envs.registration.EnvSpec, settings: dict) -> gym.Env:
        env = make_unfilmed(env, {**settings, "render_mode": "rgb_array"})
        return gym.wrappers.RecordVideo(
            env, f"{folder}/video", episode_trigger=lambda episode: episode == 0, disable_logger=True
        )

    module.make_env = make_env


def is_game(env_id: str) -> bool:
    """Whether it is one of EnvPool's games of Atari, whose observations are frames."""
    import envpool

    specs = envpool.registration.registry.specs
    return env_id in specs and "atari" in specs[env_id][0]


def write_video(frames: list[np.ndarray], path: Path) -> None:
    """Grey frames (84, 84), four times as wide and high, at the speed of a game of Atari, which skips three of four."""
    from moviepy.video.VideoClip import VideoClip

    def frame_at(seconds: float) -> np.ndarray:
        frame = frames[min(int(seconds * FRAMES_PER_SECOND + 0.5), len(frames) - 1)]
        return np.kron(frame, np.ones((4, 4), dtype=np.uint8))[:, :, None].repeat(3, axis=2)

    clip = VideoClip(frame_at, duration=len(frames) / FRAMES_PER_SECOND)
    clip.write_videofile(str(path), fps=FRAMES_PER_SECOND, logger=None)


def check_video(module: ModuleType, env_id: str, path: Path) -> None:
    """Refuse to film where it can't work, before anything is played."""
    import gymnasium as gym

    if path.suffix.lower() != ".mp4":
        fail(f"--video {path}: name a file that ends in .mp4")
    is_of_gymnasium = hasattr(module, "make_env") and (env_id in gym.registry or ":" in env_id)
    if not is_of_gymnasium and not is_game(env_id):
        fail(f"--video needs an environment of Gymnasium or a game of Atari; {env_id} exists in EnvPool only")
    kind = str(gym.registry[env_id].entry_point).split(".")[2:3] if env_id in gym.registry else []
    needed = ["moviepy", *(["pygame"] if set(kind) & DRAWN_BY_PYGAME else [])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        fail(f"--video of {env_id} needs {' and '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}")
    if path.is_file():
        fail(f"--video: {path} exists; name another file")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"--video: can't write a file {path}")
    os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display


def evaluate(options: Options) -> list[float]:
    """Play, print mean and standard deviation, and write the video if one is wanted."""
    module, args = play.load_run(options.run_dir, options.script)
    checkpoint = play.load_checkpoint(options.run_dir)
    if options.video is not None:
        check_video(module, args.env_id, options.video)
    frames = [] if options.video is not None and is_game(args.env_id) else None
    has_camera = options.video is not None and frames is None
    args = play.for_playing(module, args, has_camera)
    with tempfile.TemporaryDirectory() as folder:
        if has_camera:
            film(module, folder)
        try:
            returns = play.play(module, args, checkpoint, options.episodes, options.seed, frames)
            if frames:
                write_video(frames, Path(folder, "game.mp4"))
        except Exception as error:
            if options.video is None:
                raise
            # For example, there is no driver for MUJOCO_GL
            fail(f"can't film {args.env_id}: {type(error).__name__}: {error}")
        if options.video is not None:
            options.video.write_bytes(next(Path(folder).rglob("*.mp4")).read_bytes())
    several = f" ± {np.std(returns):.1f} (mean ± standard deviation of {len(returns)} episodes, "
    print(
        f"{args.env_id}: return {np.mean(returns):.1f}{several if len(returns) > 1 else ' (1 episode, '}"
        f"deterministic policy, checkpoint of step {checkpoint['global_step']:,})"
    )
    if options.video is not None:
        print(f"video of the first episode: {options.video}")
    return returns


def main(options: Options) -> None:
    for name, least in (("episodes", 1), ("seed", 0)):
        if getattr(options, name) < least:
            fail(f"--{name} must be at least {least}")
    if not options.follow:
        evaluate(options)
        return
    if options.video is not None:
        fail("--follow films nothing: leave --video out")
    if not Path("/proc").is_dir():
        fail("--follow needs Linux, whose /proc tells whether a run goes on: leave it out, to play the last checkpoint")
    with stoppable(f"what was played is in {options.run_dir / 'evaluation.jsonl'}"):
        follow.follow(options.run_dir, options.script, options.episodes, options.seed)
