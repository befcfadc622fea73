"""Play the deterministic policy of a run, statistics frozen, in a fresh environment: ./run.sh evaluate RUN_DIR.

Works for the runs of every script: the one named in config.json is loaded, and its `load_policy` rebuilds the policy.

Measures: mean and standard deviation of the returns of whole episodes.
Takes: seconds for ten episodes of MuJoCo, minutes for games of Atari.
Leaves: nothing but the video that --video asks for.
"""

import importlib.util
import json
import os
import pickle
import tempfile
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

import numpy as np
import tyro

from benchmarks.common.programs import SCRIPTS, fail, load_script, make_envs

EVALUATION = 0xE7A1  # enters the seed, so that no environment of the training is seen again


@dataclass
class Options:
    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_DIR")]  # folder of the run
    episodes: int = 10  # episodes to play
    video: Annotated[Path | None, tyro.conf.arg(metavar="FILE.mp4")] = None  # film the first episode, too
    script: Annotated[Path | None, tyro.conf.arg(metavar="FILE.py")] = None  # if it is not that of scripts/
    seed: int = 0  # another number, other episodes; none is ever one of the training


def load_run(options: Options) -> tuple[ModuleType, object, dict]:
    """(module of the script, the run's arguments, its checkpoint); whatever is wrong with the folder ends in a line."""
    import torch

    folder = options.run_dir
    if not folder.is_dir():
        fail(f"there is no folder {folder}")
    try:
        config = json.loads((folder / "config.json").read_text())
        name, saved = config["script"], config["args"]
    except OSError:
        fail(f"{folder} is not the folder of a run: it has no config.json")
    except (ValueError, KeyError, TypeError):
        fail(f"{folder / 'config.json'} can't be read")
    path = options.script or SCRIPTS / Path(name).name
    if not path.is_file():
        fail(f"there is no script {path}, whose run this is; name a copy of it with --script PATH")
    try:
        checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    except FileNotFoundError:
        fail(f"{folder} has no checkpoint.pt: the run ended before it wrote one")
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError) as error:
        fail(f"{folder / 'checkpoint.pt'} can't be read ({type(error).__name__})")
    module = load_script(path)
    if not hasattr(module, "load_policy"):
        fail(f"{path} has no function load_policy")
    try:
        args = module.Args(**{f.name: saved[f.name] for f in fields(module.Args) if f.name in saved})
    except TypeError as error:
        fail(f"{path} is not the script of this run: {error}")
    return module, args, checkpoint


def film(module: ModuleType, folder: str) -> None:
    """Let the script make its environment with a camera; the first episode goes to a file in `folder`."""
    import gymnasium as gym

    def make_env(env_id: str) -> gym.Env:
        env = gym.make(env_id, render_mode="rgb_array", disable_env_checker=True)
        return gym.wrappers.RecordVideo(
            env, f"{folder}/video", episode_trigger=lambda episode: episode == 0, disable_logger=True
        )

    module.make_env = make_env


def check_video(module: ModuleType, env_id: str, path: Path) -> None:
    """Refuse to film where it can't work, before anything is played."""
    import gymnasium as gym

    if importlib.util.find_spec("moviepy") is None:
        fail("--video needs moviepy, which is not installed: .venv/bin/pip install moviepy")
    if not hasattr(module, "make_env") or (env_id not in gym.registry and ":" not in env_id):
        fail(f"--video needs an environment of Gymnasium; {env_id} exists in EnvPool only")
    if not path.parent.is_dir():
        fail(f"--video: there is no folder {path.parent}")
    os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display


def play(module: ModuleType, args, checkpoint: dict, options: Options) -> list[float]:
    """Returns of whole episodes, one environment after the other steps of the policy without noise."""
    seed = np.random.SeedSequence([args.seed, EVALUATION, options.seed]).generate_state(1) >> 1
    envs = make_envs(module, args, seed.tolist())
    try:
        policy = module.load_policy(checkpoint, envs)
    except (KeyError, RuntimeError) as error:
        fail(f"the checkpoint does not fit {Path(module.__file__).name}: {str(error).splitlines()[0].rstrip(':')}")
    returns, episode_return, obs = [], 0.0, envs.reset()
    while len(returns) < options.episodes:
        obs, reward, terminated, truncated = envs.step(policy(obs))
        episode_return += float(reward[0])  # the row in which an environment resets itself has reward 0
        if terminated[0] or truncated[0]:
            returns.append(episode_return)
            episode_return = 0.0
    envs.close()
    return returns


def evaluate(options: Options) -> list[float]:
    """Play, print mean and standard deviation, and write the video if one is wanted."""
    if options.episodes < 1:
        fail(f"--episodes must be at least 1, not {options.episodes}")
    module, args, checkpoint = load_run(options)
    backend = "gymnasium"
    if options.video is not None:
        check_video(module, args.env_id, options.video)
    elif hasattr(args, "env_backend"):
        backend = module.choose_backend(args.env_id, args.env_backend, args.sync_envs or args.num_envs == 1)
    changes = {"num_envs": 1, "num_workers": 1, "envs_per_worker": 1, "env_backend": backend}
    args = replace(args, **{name: value for name, value in changes.items() if hasattr(args, name)})
    with tempfile.TemporaryDirectory() as folder:
        if options.video is not None:
            film(module, folder)
        try:
            returns = play(module, args, checkpoint, options)
        except Exception as error:
            if options.video is None:
                raise
            fail(
                f"can't film {args.env_id}: {type(error).__name__}: {error}"
            )  # no driver for MUJOCO_GL, no pygame, ...
        if options.video is not None:
            options.video.write_bytes(next(Path(folder).rglob("*.mp4")).read_bytes())
    print(
        f"{args.env_id}: return {np.mean(returns):.1f} ± {np.std(returns):.1f} (mean ± standard deviation of "
        f"{len(returns)} episodes, deterministic policy, checkpoint of step {checkpoint['global_step']:,})"
    )
    if options.video is not None:
        print(f"video of the first episode: {options.video}")
    return returns


def main(options: Options) -> None:
    evaluate(options)
