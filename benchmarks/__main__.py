"""The commands of run.sh: python -m benchmarks COMMAND [FLAGS].

A command is a module with a `main`. Required packages are checked before it is imported, so that a missing one is
reported in one line.
"""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

from benchmarks.common.programs import INSTALL, check_known, fail

COMMANDS = {
    "backends": "benchmarks.throughput.backends",
    "copy": "benchmarks.tools.copy",
    "demo": "benchmarks.tools.demo",
    "diff": "benchmarks.tools.diff",
    "env-pools": "benchmarks.pools.env_pools",
    "evaluate": "benchmarks.tools.evaluate",
    "gpu": "benchmarks.gpu",
    "inference": "benchmarks.acting.inference",
    "ladder": "benchmarks.throughput.ladder",
    "limits": "benchmarks.throughput.limits",
    "readme": "benchmarks.tools.readme",
    "report": "benchmarks.learning.report",
    "rollout": "benchmarks.acting.rollout",
    "scaling": "benchmarks.pools.scaling",
    "speedrun": "benchmarks.learning.speedrun",
    "stale": "benchmarks.tools.stale",
    "sweep": "benchmarks.learning.sweep",
    "throughput": "benchmarks.throughput.throughput",
    "time-to-score": "benchmarks.learning.time_to_score",
    "tune": "benchmarks.learning.tune",
}
NEEDED = ("torch", "tensordict", "gymnasium", "numpy", "tyro", "tqdm", "matplotlib")  # to import any command


def docstring(name: str) -> str:
    """What the module of a command says of itself, read without an import of it."""
    return ast.get_docstring(ast.parse(Path(importlib.util.find_spec(COMMANDS[name]).origin).read_text()))


def main(arguments: list[str]) -> int | None:
    """The exit code of a command; None is 0."""
    if not arguments:
        fail(f"name a command: {', '.join(COMMANDS)}")
    name, *flags = arguments
    check_known("command", [name], list(COMMANDS))
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing and {"-h", "--help"} & set(flags):
        print(f"{docstring(name)}\n\nIts flags are shown once it is installed, which ./run.sh {name} does.")
        return None
    if missing:
        fail(f"this Python lacks {', '.join(missing)}: {INSTALL.format('')}")
    importlib.import_module("benchmarks.common.results").code_at_start()
    module = importlib.import_module(COMMANDS[name])
    if not hasattr(module, "Options"):
        return module.main(flags)
    import tyro

    return module.main(tyro.cli(module.Options, args=flags, prog=f"./run.sh {name}", description=module.__doc__))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the command could say what to do about it
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
