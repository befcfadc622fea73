"""Which committed results today's code might not reproduce, and why: ./run.sh stale.

A result is fresh if it names the command that made it, if its commit is in the history, without uncommitted changes and
without another commit while it ran, and if the scripts that it measured have not changed since, nor the code that
drives its peers or makes its rungs. Changes to comments, docstrings and formatting do not count, nor does a commit
whose message has a line `Results-stay: REASON` that says why its changes can't affect any result, a line
`Results-stay-of: PAIR PAIR ...` for results of these pairs, or a line `Results-stay-in: PATH PATH ...` for results in
these folders or files of benchmarks/results, such as learning or learning/dqn. benchmarks/tools/stays.json has what the
messages of some commits lack, which results name and so must stay as they are.

With --note stale results are listed in benchmarks/results/stale.json, from which `./run.sh readme` marks them in its
tables. A test fails if a stale result is not listed there, or a fresh one is: measure again, or note and mark it.

Measures: nothing.
Takes: half a minute.
Leaves: nothing; with --note that file.
"""

import ast
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.acting.rollout_worker import FAMILIES
from benchmarks.common.programs import CLONES, ROOT, SCRIPTS, SUFFIX, fail, pairs
from benchmarks.common.results import git, write_json
from benchmarks.tools.readme import NOTED, RESULTS


@dataclass
class Source:
    """Where a part of a result comes from."""

    name: str  # of the file, and of the part in it
    commit: str | None
    command: str | None
    is_clean: bool  # whether there were no uncommitted changes
    files: list[str]  # paths of the scripts measured, and of the code that defines what is measured
    pair: str  # what was measured, if it is one pair
    changed_until: str | None = None  # the commit at the end, if the code changed while it ran


STAYS = Path(__file__).with_name("stays.json")  # commit -> the lines of `trailers` that its message lacks, and why
WORDS = "DIFFERENCES", "NOTICED", "SAC", "ENVS", "differences", "TALK"  # they are printed and affect no measurement


@cache
def code(text: str) -> str:
    """What a file does, as a digest: of its syntax tree without docstrings, and without `WORDS`."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not (set(WORDS) & names_of(node))]
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A tree and all statements in it, without the many more nodes of expressions."""
    yield node
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, []):
            yield from statements(inner)


def names_of(node: ast.stmt) -> set[str]:
    """The names that a top-level statement defines."""
    targets = getattr(node, "targets", [])
    return {target.id for target in targets if isinstance(target, ast.Name)} | {getattr(node, "name", "")}


@cache
def is_in_history(commit: str) -> bool:
    full = git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    return bool(full) and git("merge-base", full, "HEAD") == full


@cache
def code_at(file: str, commit: str) -> str:
    """What a file did at a commit; nothing if it was not there."""
    text = git("show", f"{commit}:{file}")
    return code(text) if text else ""


@cache
def trailers(commit: str) -> list[list[str]]:
    """The words of a commit's lines `Results-stay`, `Results-stay-of` and `Results-stay-in`."""
    keys = "Results-stay", "Results-stay-of", "Results-stay-in"
    if commit in (later := json.loads(STAYS.read_text())):
        return [later[commit].get(key, "").split() for key in keys]
    formats = [f"%(trailers:key={key},valueonly)" for key in keys]
    return [text.split() for text in git("log", "-1", f"--format={'%x00'.join(formats)}", commit).split("\0")]


@cache
def keeps_results(commit: str, pair: str, file: str) -> bool:
    """Whether a commit declares that earlier results, or those of a pair, in a folder or in a file, stay valid."""
    of_all, of_pairs, in_paths = trailers(commit)
    return bool(of_all) or pair in of_pairs or not {file, *map(str, Path(file).parents)}.isdisjoint(in_paths)


@cache
def has_changed(file: str, commit: str, pair: str, result: str) -> bool:
    """Whether a file behaves differently today than at a commit, apart from changes declared not to affect a result.

    The result is one of a pair, in a file of the results.
    """
    if not git("ls-tree", commit, "--", file):
        return True
    now = code((ROOT / file).read_text()) if (ROOT / file).exists() else None
    before = commit
    for after in git("log", "--reverse", "--format=%H", f"{commit}..HEAD", "--", file).split():
        # What a commit did is asked last, as that takes tenths of a second
        if not keeps_results(after, pair, result) and code_at(file, before) != code_at(file, after):
            return code_at(file, commit) != now
        before = after
    return code_at(file, before) != now != code_at(file, commit)


def reasons(source: Source) -> list[str]:
    """Why a result is stale; nothing if it is not."""
    found = [] if source.command else ["it does not name its command"]
    if source.commit is None or not is_in_history(source.commit):
        return [*found, f"commit {(source.commit or 'none')[:12]} is not in the history"]
    found += [] if source.is_clean else ["it was made with uncommitted changes"]
    found += [f"the code changed while it ran, until {source.changed_until[:12]}"] if source.changed_until else []
    result = source.name.partition(":")[0]
    changed = [file for file in source.files if has_changed(file, source.commit, source.pair, result)]
    return found + [f"{Path(file).name} has changed" for file in changed]


def twins(script: str) -> list[str]:
    """The files of a pair, if there is one of that name."""
    return [f"scripts/{script}{suffix}.py" for suffix in ("", SUFFIX) if (SCRIPTS / f"{script}{suffix}.py").exists()]


def makers(path: Path, result: dict) -> list[str]:
    """The files besides the scripts that define what a result measures: how peers learn, what a rung leaves out."""
    names, room = result.get("contestants", {}), "benchmarks/throughput"
    found = [f"{room}/peers.py"] * any(name.startswith(("sb3", "sbx")) for name in names)
    found += [f"{room}/peer_envpool.py"] * (bool(found) and "atari" in path.stem)
    found += [f"{room}/peer_rllib.py"] * ("rllib" in names)
    found += [f"{room}/peer_cleanrl.py"] * any(name in CLONES for name in names)
    if path.stem == "rollout" or "network" in result:
        found += [f"benchmarks/acting/{name}.py" for name in ("networks", "paths")]
    if path.parent.name == "env_pools" or path.stem == "scaling":
        found += [f"benchmarks/pools/{name}.py" for name in ("peers", "sleeping")]
    if path.stem == "scaling" and result.get("settings", {}).get("script") != "ppo_ray":
        found += ["scripts/ppo_ray.py"]  # its rows of one node
    found += ["benchmarks/pools/sleeping.py"] * ("backends" in path.parts and path.stem.startswith("Slow"))
    found += [f"{room}/limits.py"] * (path.parent.name == "limits")
    return found + [f"{room}/rungs.py"] * (path.parent.name == "ladder")


def sources_of(path: Path, result: dict) -> Iterator[Source]:
    """The sources of a JSON file in the results; for a report, one for each of its rows and commits."""
    name, origin = str(path.relative_to(RESULTS)), result["provenance"]
    if "pairs" in result:
        for row in result["rows"]:
            variant = row["variant"].split()[0]
            script = f"scripts/{row['script']}{SUFFIX * (variant != 'eager')}.py"
            own = makers(path, {"contestants": [variant]}) or [script]
            place = f"{name}: {row['script']}, {row['env_id']}, {row['variant']}"
            for commit in row.get("commits", []):
                clean, origin_of = not commit.endswith("-dirty"), (commit.removesuffix("-dirty"), origin.get("command"))
                yield Source(place, *origin_of, clean, own, row["script"])
        return
    if "search" in result:
        files = [f"scripts/{result['search']['script']}.py"]
    elif script := result.get("script") or result.get("network") or result.get("settings", {}).get("script"):
        files = twins(script)
    elif path.parent.name == "gpu" and path.stem != "rollout":
        names = pairs() if path.stem == "tests" else result["results"]
        files = [file for name in names for file in twins(name)]
    else:
        names = FAMILIES.values() if path.stem == "rollout" else ["ppo_env_pool"]
        files = [file for name in names for file in twins(name)]
    files, clean = files + makers(path, result), not origin["uncommitted_changes"]
    pair = result["search"]["script"] if "search" in result else script or ""
    yield Source(name, origin["commit"], origin.get("command"), clean, files, pair, origin.get("changed_until"))


def stale() -> dict[str, list[str]]:
    """All that is stale, with the reasons."""
    found = {}
    for path in sorted(set(RESULTS.rglob("*.json")) - {NOTED}):
        content = json.loads(path.read_text())
        results = [x for x in (content if isinstance(content, list) else [content]) if "provenance" in x]
        for source in [source for result in results for source in sources_of(path, result)]:
            for why in reasons(source):
                found.setdefault(source.name, {})[why] = None  # once each, however many commits say so
    return {name: list(why) for name, why in found.items()}


def main(flags: list[str]) -> None:
    if {"-h", "--help"} & set(flags):
        print(__doc__)
        return
    if flags not in ([], ["--note"]):
        fail("stale takes no flags but --note")
    if git("rev-parse", "--is-shallow-repository") != "false":
        fail("stale compares with the whole history: run it in a checkout with git that has it (git fetch --unshallow)")
    found = stale()
    print("\n".join(f"{name}: {'; '.join(why)}" for name, why in found.items()) or "nothing is stale")
    if flags:
        write_json(NOTED, found)
        print(f"noted in {NOTED.relative_to(ROOT)}; ./run.sh readme marks them")
