"""The scripts as programs: which pairs there are, the variants of a pair, and how to run or load one."""

import contextlib
import difflib
import importlib.util
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import sysconfig
from dataclasses import Field, fields, replace
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Literal, NoReturn

from benchmarks.common.pairs import TABLE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SUFFIX = "_torchcompile"
REQUIREMENTS = shlex.quote(str(ROOT / "requirements"))
# For people to paste, wherever they are
INSTALL = f"{shlex.quote(sys.executable)} -m pip install -c {REQUIREMENTS}/constraints.txt -r {REQUIREMENTS}/"
INSTALL += "requirements{}.txt"

# The variants of a pair: the suffix of the script's name, and flags
VARIANTS = {
    "eager": ("", ()),
    "lean": (SUFFIX, ("--no-compile", "--no-cudagraphs")),
    "compile": (SUFFIX, ("--compile", "--no-cudagraphs")),
    "cudagraphs": (SUFFIX, ("--no-compile", "--cudagraphs")),
    "compile+cudagraphs": (SUFFIX, ("--compile", "--cudagraphs")),
}
Variant = Literal["eager", "lean", "compile", "cudagraphs", "compile+cudagraphs"]  # a key of VARIANTS
LIBRARIES = {"sb3": "stable_baselines3", "sbx": "sbx"}  # to measure beside ours; the module of each
AT_DEFAULTS = "-defaults"  # suffix of a peer's name: with its own settings instead of the script's
# Three need another Gymnasium than the scripts, so they have virtual environments of their own:
# requirements/requirements-rllib.txt, and requirements-cleanrl.txt, which says where the clones belong
RLLIB_PYTHON = Path(os.environ.get("RLLIB_PYTHON", ROOT / ".venv-rllib" / "bin" / "python")).absolute()
CLEANRL_PYTHON = Path(os.environ.get("CLEANRL_PYTHON", ROOT / ".venv-cleanrl" / "bin" / "python")).absolute()
CLONES = {  # the folder of the scripts, the suffix of their names, flags
    "cleanrl": (CLEANRL_PYTHON.parents[1] / "cleanrl" / "cleanrl", "", ()),
    "leanrl": (CLEANRL_PYTHON.parents[1] / "LeanRL" / "leanrl", SUFFIX, ("--compile",)),
}
PEERS = (*LIBRARIES, "rllib", *CLONES)
# How a module of these is started. With -P, what lies in the folder of the user does not hide modules
AS_MODULE = (sys.executable, "-P", "-m")


def fail(message: str) -> NoReturn:
    """Report invalid input in one line and end with exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def cores() -> set[int]:
    """The CPU cores that this process may use; all where the system does not tell, as on macOS."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def num_cores() -> int:
    """How many CPU cores this process may use, by its affinity and its container's share, as the scripts count them."""
    own = len(cores())
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        microseconds, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        own = min(own, math.ceil(microseconds / period))
    return own


def pairs() -> list[str]:
    """Names of all pairs, by their eager twin."""
    names = sorted(path.stem.removesuffix(SUFFIX) for path in SCRIPTS.glob(f"*{SUFFIX}.py"))
    return [name for name in names if (SCRIPTS / f"{name}.py").exists()]


def pairs_here() -> list[str]:
    """The pairs that can run with what is installed; those that use Ray need it."""
    return [name for name in pairs() if not name.endswith("_ray") or importlib.util.find_spec("ray")]


def say_left_out() -> None:
    """Name the pairs that `pairs_here` leaves out."""
    if absent := [name for name in pairs() if name not in pairs_here()]:
        print(f"left out, as Ray is not installed: {', '.join(absent)}: {INSTALL.format('-ray')}", file=sys.stderr)


def peers_of(script: str) -> tuple[str, ...]:
    """The libraries, and collections of scripts, that can train as a script does."""
    if script not in TABLE or TABLE[script].peers is None:
        return ()
    return ("rllib",) if script.endswith("_ray") else (*LIBRARIES, *TABLE[script].clones)


def clone_command(python: str | Path, path: Path, script: str, *flags: str) -> list[str]:
    """The command that runs CleanRL's or LeanRL's counterpart of a pair in its environment, with as many threads."""
    known = fields_of(script)
    is_on_policy = "num_steps" in known
    every = known["num_steps"].default * known["num_envs"].default if is_on_policy else known["log_every"].default
    fixed = [f"--env-id={known['env_id'].default}", f"--log-every={every}"]
    fixed += ["--threads=1"] * (is_on_policy or "train_frequency" in known)  # SAC and TD3 take PyTorch's default
    program = ROOT / "benchmarks" / "throughput" / "peer_cleanrl.py"
    return [str(python), str(program), str(path), *fixed, *flags]


def check_known(kind: str, names: list[str] | tuple[str, ...], known: list[str]) -> None:
    """Refuse names that do not exist, saying which do."""
    unknown = [name for name in names if name not in known]
    if unknown:
        fail(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")


def check_once(options, *names: str) -> None:
    """Refuse lists that name something twice."""
    for name in names:
        values = list(getattr(options, name))
        if twice := [x for i, x in enumerate(values) if x in values[:i]]:
            fail(f"--{name.replace('_', '-')} has {twice[0]} twice")


def check_seeds(options) -> None:
    """Refuse an empty list of seeds, one that is there twice, and one that no script takes."""
    if not options.seeds:
        fail("--seeds: name at least one")
    check_once(options, "seeds")
    if not 0 <= min(options.seeds) <= max(options.seeds) < 2**63:
        fail(f"--seeds: {min(options.seeds)} to {max(options.seeds)} do not lie in 0 to 2^63 - 1")


def split_flags(text: str, *more: str, refused: tuple[str, ...] = ("--run-dir", "--resume")) -> list[str]:
    """The words of --flags; refused if they can't be read, or hold a flag that the command sets itself."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        fail(f"--flags {text}: {error}")
    for word in words:
        if (name := word.partition("=")[0].replace("_", "-")) in (*refused, *more):
            fail(f"--flags: {name} is not for you to set here")
    return words


def check_environment(env_id: str) -> None:
    """Refuse an environment that neither Gymnasium nor EnvPool knows; as in MODULE:ID, MODULE may register it."""
    import envpool
    import gymnasium as gym

    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        if env_id not in envpool.list_all_envs():
            fail(f"no environment {env_id}: {error}")


def did_you_mean(name: str, known: list[str]) -> str:
    """The end of a message about a name that does not exist: the one most like it, if any is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def words_of_parser(text: str, known: list[str]) -> str:
    """What the parser says first, under a title and its rule, and which flag may have been meant; "" if nothing."""
    first = " ".join(takewhile(lambda line: line.strip("-"), [line.strip() for line in text.splitlines()[2:]]))
    flag = re.search(r"^Unrecognized options:.*? --([\w-]+)", first)
    return first + did_you_mean(f"--{flag[1]}", [f"--{name.replace('_', '-')}" for name in known]) if flag else first


def actions_of(module: ModuleType, args):
    """The space of actions of a script's environment; None where that is left to the run, as for MODULE:ID.

    One of Gymnasium's is made for this.
    """
    import envpool
    import gymnasium as gym

    if ":" in args.env_id:
        return None
    backend = getattr(args, "env_backend", "gymnasium" if hasattr(module, "make_env") else "envpool")
    try:
        if hasattr(module, "choose_backend"):
            backend = module.choose_backend(args.env_id, backend, in_process=False)
        if backend == "envpool" or args.env_id not in gym.registry:
            return envpool.make_spec(args.env_id).action_space
        with contextlib.closing(module.make_env(args.env_id, json.loads(args.env_kwargs))) as env:
            return env.action_space
    except Exception:  # the run will say why
        return None


def check_actions(script: str, module: ModuleType, args) -> None:
    """Refuse an environment whose kind of actions a pair can't learn."""
    import gymnasium as gym

    takes, space = TABLE[script].takes if script in TABLE else (), actions_of(module, args)
    if takes and space is not None and not isinstance(space, tuple(getattr(gym.spaces, kind) for kind in takes)):
        fail(f"{script} takes {' or '.join(takes)} actions, {args.env_id} has {space}")


def check_settings(arguments: list[str], is_here: bool = True) -> None:
    """Refuse a script's command line, as from `command`, that the script or its environment would refuse.

    What the script or its parser says of it follows its name. Where it is to run on another machine, that one may have
    a device and environments that this one lacks.
    """
    import tyro

    path, said, argv = Path(arguments[1]), io.StringIO(), sys.argv
    module = load_script(path)
    try:
        sys.argv = arguments[1:]  # of which `typed_flags` translates CleanRL's
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = tyro.cli(module.Args, args=[*module.typed_flags(), *([] if is_here else ["--device=cpu"])])
            module.validate(replace(args, device="cpu") if args.device == "auto" else args)  # CUDA is for the runs
    except SystemExit:
        told = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        if told:
            fail(f"{path.stem}: {told[0].removeprefix('error: ')}")
        said_first = words_of_parser(said.getvalue(), list(module.Args.__dataclass_fields__))
        fail(f"{path.stem}: {said_first or f'it does not take {shlex.join(arguments[2:])}'}")
    finally:
        sys.argv = argv
    if is_here:
        check_environment(args.env_id)
        check_actions(path.stem.removesuffix(SUFFIX), module, args)


def check_installed(peers: tuple[str, ...]) -> None:
    """Refuse peers that are not installed, here or in an environment of their own."""
    absent = [peer for peer in peers if peer in LIBRARIES and importlib.util.find_spec(LIBRARIES[peer]) is None]
    if absent:
        fail(f"{', '.join(absent)} not installed: {INSTALL.format('-benchmark')}")
    for peer in [peer for peer in peers if peer not in LIBRARIES]:
        name, python = ("rllib", RLLIB_PYTHON) if peer == "rllib" else ("cleanrl", CLEANRL_PYTHON)
        file = f"requirements/requirements-{name}.txt"
        if not python.exists():
            fail(f"no {python}: make that environment with {file}, or set {name.upper()}_PYTHON")
        if peer in CLONES and not CLONES[peer][0].is_dir():
            fail(f"no {CLONES[peer][0]}: {file} says how to get it")


def check_positive(options, *names: str) -> None:
    """Refuse options that must be more than 0 and are not."""
    for name in names:
        if (value := getattr(options, name)) is not None and not value > 0:  # nor "nan"
            fail(f"--{name.replace('_', '-')} must be more than 0")


def default_variants() -> list[str]:
    """The variants worth running here: CUDA graphs only where there is CUDA."""
    import torch

    graphs = ["cudagraphs", "compile+cudagraphs"] if torch.cuda.is_available() else []
    return ["eager", "compile", *graphs]


def command(script: str, variant: str) -> list[str]:
    """The command line of a variant, or of a peer, of the pair `script`; to be run in the root of the repository."""
    if variant == "rllib":
        return [str(RLLIB_PYTHON), str(ROOT / "benchmarks" / "throughput" / "peer_rllib.py"), script]
    if variant in CLONES:
        folder, suffix, flags = CLONES[variant]
        flags += ("--cudagraphs",) * (variant == "leanrl" and "cudagraphs" in default_variants())  # its fastest on CUDA
        return clone_command(CLEANRL_PYTHON, folder / f"{script}{suffix}.py", script, *flags)
    if variant.removesuffix(AT_DEFAULTS) in LIBRARIES:
        return [*AS_MODULE, "benchmarks.throughput.peers", variant, script]
    suffix, flags = VARIANTS[variant]
    return [sys.executable, str(SCRIPTS / f"{script}{suffix}.py"), *flags]


def load_script(path: Path) -> ModuleType:
    """Import a script from its file under its own name, so that worker processes can import what is sent to them."""
    path = path.resolve()
    if path.suffix != ".py":
        fail(f"{path} is no Python file")
    if getattr(sys.modules.get(path.stem), "__file__", None) == str(path):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def environment_class(module: ModuleType) -> type:
    """What steps the environments of a script: its `Envs` or its `Pool`."""
    return module.Pool if hasattr(module, "Pool") else module.Envs


def fields_of(script: str) -> dict[str, Field]:
    """The settings of a pair's eager script, by name."""
    return {field.name: field for field in fields(load_script(SCRIPTS / f"{script}.py").Args)}


def make_envs(module: ModuleType, args, seeds: list[int]):
    """The environments of a script, one for each seed."""
    return environment_class(module)(args, seeds)


def same_phase(script: str) -> list[str]:
    """Flags that fix what would otherwise change during a run, so that slow and fast programs do the same work."""
    known = fields_of(script)
    return [f"--epsilon-start={known['epsilon_end'].default}"] if "epsilon_end" in known else []


def often_logged(script: str) -> list[str]:
    """Flags that make a slow script, which learns at each step, log about once a second."""
    known = fields_of(script)
    is_slow = "log_every" in known and "train_frequency" not in known and "num_runners" not in known
    return ["--log-every=200"] if is_slow else []


def endless_flags(script: str, device: str) -> list[str]:
    """Flags for an endless run that soon starts learning and logs often, as far as the script has them."""
    known = fields_of(script)
    settings = {"device": device, "total_timesteps": 10**9, "learning_starts": 1000, "log_every": 100}
    settings["step_timeout"] = 1e4  # so that a pool that was frozen for a while does not take its workers for dead
    given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name in known]
    return ["--no-tensorboard", *given, *same_phase(script)]


def missing_for_compile() -> str | None:
    """What this machine lacks for torch.compile to build CPU kernels; None if nothing is missing."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name):
        return "a C++ compiler (g++ or clang++)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python.h (the package python3-dev on Debian and Ubuntu)"
    if " " in (folder := importlib.util.find_spec("torch").submodule_search_locations[0]):
        return f"a path to PyTorch without spaces (it is in {folder})"
    return None
