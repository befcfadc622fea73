"""Which committed results the code of today might not give again, and why: ./run.sh stale.

A result is fresh if it names the command that made it, if its commit is in the history and held no uncommitted changes,
and if the scripts that it measured have not changed since; comments, docstrings and formatting do not count, nor does a
commit whose message says in a line `Results-stay: REASON` why what it changes can't be seen in any result.

Measures: nothing.
Takes: seconds.
Leaves: nothing.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.acting.rollout_worker import FAMILIES
from benchmarks.common.programs import SCRIPTS, SUFFIX, fail
from benchmarks.common.results import git
from benchmarks.tools.readme import RESULTS


@dataclass
class Source:
    """Where a part of a result comes from."""

    name: str  # of the file, and of what in it
    commit: str | None
    command: str | None
    is_clean: bool  # whether nothing was uncommitted
    scripts: list[str]  # names of the files that were measured


def code(text: str) -> str:
    """What a script does: its syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


@cache
def is_in_history(commit: str) -> bool:
    full = git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    return bool(full) and git("merge-base", full, "HEAD") == full


@cache
def code_at(script: str, commit: str) -> str:
    """What a script did at a commit; nothing if it was not there."""
    text = git("show", f"{commit}:scripts/{script}")
    return code(text) if text else ""


@cache
def keeps_results(commit: str) -> bool:
    """Whether a commit says that results from before it stay."""
    return bool(git("log", "-1", "--format=%(trailers:key=Results-stay,valueonly)", commit))


@cache
def has_changed(script: str, commit: str) -> bool:
    """Whether a script of today does something else than at a commit, but for what can't be seen in results."""
    then, now = code_at(script, commit), code((SCRIPTS / script).read_text())
    if not then or then == now:
        return not then
    for later in (git("log", "--reverse", "--format=%H", f"{commit}..HEAD", "--", f"scripts/{script}") or "").split():
        if code_at(script, later) != then and not keeps_results(later):
            return True
        then = code_at(script, later)
    return then != now


def reasons(source: Source) -> list[str]:
    """Why a result is stale; nothing if it is not."""
    found = [] if source.command else ["it does not name its command"]
    if source.commit is None or not is_in_history(source.commit):
        return [*found, f"commit {(source.commit or 'none')[:12]} is not in the history"]
    found += [] if source.is_clean else ["it was made with uncommitted changes"]
    return found + [f"{script} has changed" for script in source.scripts if has_changed(script, source.commit)]


def twins(script: str) -> list[str]:
    """The files of a pair, as far as there is one of that name."""
    return [f"{script}{suffix}.py" for suffix in ("", SUFFIX) if (SCRIPTS / f"{script}{suffix}.py").exists()]


def sources_of(path: Path, result: dict) -> Iterator[Source]:
    """Where a JSON file below the results comes from; of a report, a source for each of its rows and commits."""
    name, origin = str(path.relative_to(RESULTS)), result["provenance"]
    if "pairs" in result:
        for row in result["rows"]:
            script = row["script"] + SUFFIX * (row["variant"].split()[0] not in ("eager", "sb3", "sbx")) + ".py"
            place = f"{name}: {row['script']}, {row['env_id']}, {row['variant']}"
            for commit in row.get("commits", []):
                clean = not commit.endswith("-dirty")
                yield Source(place, commit.removesuffix("-dirty"), origin.get("command"), clean, [script])
        return
    if "search" in result:
        scripts = [f"{result['search']['script']}.py"]
    elif "script" in result or "network" in result:
        scripts = twins(result.get("script") or result["network"])
    else:
        pairs = {"rollout": FAMILIES.values(), "scaling": ["ppo_ray"]}.get(path.parent.name, ["ppo_env_pool"])
        scripts = [script for pair in pairs for script in twins(pair)]
    yield Source(name, origin["commit"], origin.get("command"), not origin["uncommitted_changes"], scripts)


def stale() -> dict[str, list[str]]:
    """All that is stale, with the reasons."""
    found = {}
    for path in sorted(RESULTS.rglob("*.json")):
        content = json.loads(path.read_text())
        for result in content if isinstance(content, list) else [content]:
            for source in sources_of(path, result) if "provenance" in result else ():
                for why in reasons(source):
                    found.setdefault(source.name, {})[why] = None  # once each, however many commits say so
    return {name: list(why) for name, why in found.items()}


def main(flags: list[str]) -> None:
    if {"-h", "--help"} & set(flags):
        print(__doc__)
        return
    if flags:
        fail("stale takes no flags")
    found = stale()
    print("\n".join(f"{name}: {'; '.join(why)}" for name, why in found.items()) or "nothing is stale")
