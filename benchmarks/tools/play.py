"""Loads the policy of a run and plays it, for `evaluate` and `follow`."""

import importlib.util
import json
import pickle
import sys
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import numpy as np

from benchmarks.common.programs import SCRIPTS, fail, load_script, make_envs
from benchmarks.common.results import git

EVALUATION = 0xE7A1  # part of the seed, so that no environment of the training is repeated


def load_run(folder: Path, script: Path | None = None) -> tuple[ModuleType, object]:
    """(module of the script, the run's arguments); exits with a one-line message if anything is wrong with the folder.

    The script is `script`, or else the one that config.json names, in scripts/ or in the current folder.
    """
    if not folder.is_dir():
        fail(f"there is no folder {folder}")
    try:
        config = json.loads((folder / "config.json").read_text())
        name, saved = Path(config["script"]).name, dict(config["args"])
    except OSError:
        fail(f"{folder} is not the folder of a run: it has no config.json")
    except (ValueError, KeyError, TypeError):
        fail(f"{folder / 'config.json'} can't be read")
    if script and not script.is_file():
        fail(f"--script {script}: there is no such file")
    path = script or next((path for path in (SCRIPTS / name, Path(name)) if path.is_file()), None)
    if path is None:
        fail(f"there is no {name}, whose run this is, in {SCRIPTS} or in this folder; name it with --script PATH")
    blob = git("hash-object", str(path.resolve()))  # empty where there is no git
    if blob and config.get("blob") not in (None, blob):
        print(f"note: {path} is not the file that trained this run, or has changed: see --script", file=sys.stderr)
    try:
        module = load_script(path)
    except (SyntaxError, ImportError) as error:
        fail(f"{path} can't be imported: {error}")
    if not hasattr(module, "load_policy"):
        fail(f"{path} has no function load_policy")
    if config.get("env_backend") in ("envpool", "gymnasium") and "env_backend" in saved:
        saved["env_backend"] = config["env_backend"]  # the library whose environments it was trained on
    try:
        args = module.Args(**{f.name: saved[f.name] for f in fields(module.Args) if f.name in saved})
    except TypeError as error:
        fail(f"{path} is not the script of this run: {error}")
    home = args.env_id.rpartition(":")[0].partition(".")[0]
    if home and importlib.util.find_spec(home) is None:
        fail(f"no module {home}, which has the environment {args.env_id}: run this from the folder of {home}.py")
    return module, args


def load_checkpoint(folder: Path) -> dict:
    """The checkpoint of a run, memory-mapped: what is not used, such as a replay buffer, stays on disk."""
    import torch

    path = folder / "checkpoint.pt"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        fail(f"{folder} has no checkpoint.pt: the run has not written one")
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError) as error:
        fail(f"{path} can't be read ({type(error).__name__})")
    if not isinstance(checkpoint, dict) or not {"global_step", "seconds"} <= set(checkpoint):
        fail(f"{path} is not the checkpoint of a run")
    return checkpoint


def for_playing(module: ModuleType, args, is_filmed: bool = False):
    """The settings of a run, with one environment."""
    backend = "gymnasium"
    if not is_filmed and hasattr(args, "env_backend"):
        in_process = module.runs_in_process(args, getattr(args, "num_envs", 1))
        backend = module.choose_backend(args.env_id, args.env_backend, in_process)
    changes = {"num_envs": 1, "num_workers": 1, "envs_per_worker": 1, "env_backend": backend}
    return replace(args, **{name: value for name, value in changes.items() if hasattr(args, name)})


def newest_frame(obs: np.ndarray) -> np.ndarray:
    """The grey frame (84, 84) that an environment of Atari has just shown, of its observation in any script."""
    pixels = obs[0].reshape(-1, 84)
    return pixels[:84] if len(pixels) == 85 else pixels[-84:]  # a frame and a row of flags, or the last few frames


def play(
    module: ModuleType, args, checkpoint: dict, episodes: int, seed: int, frames: list[np.ndarray] | None = None
) -> list[float]:
    """Returns of whole episodes, one after the other in one environment, with the deterministic policy.

    `frames` gets those of the first episode, of a game of Atari.
    """
    seeds = np.random.SeedSequence([args.seed, EVALUATION, seed]).generate_state(1) >> 1
    envs = make_envs(module, args, seeds.tolist())
    try:
        policy = module.load_policy(checkpoint, envs)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        name, why = Path(module.__file__).name, str(error).splitlines()[0].rstrip(":")
        own = checkpoint.get("script", name)  # a copy of it has another name, and may fit
        what = "the" if own == name else f"this is a run of {own}: its"
        fail(f"{what} checkpoint does not fit {name}: {'it has no ' * isinstance(error, KeyError)}{why}")
    returns, episode_return, obs = [], 0.0, envs.reset()
    while len(returns) < episodes:
        if frames is not None and not returns:
            frames.append(newest_frame(obs))
        obs, reward, terminated, truncated = envs.step(policy(obs))
        episode_return += float(reward[0])  # the row in which an environment resets itself has reward 0
        if getattr(envs, "lost", [False])[0]:  # its worker died, and another began a new episode
            episode_return = 0.0
        if terminated[0] or truncated[0]:
            returns.append(episode_return)
            episode_return = 0.0
    envs.close()
    return returns
