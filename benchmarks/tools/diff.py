"""How the two scripts of a pair differ, hunk by hunk, each with its reason: ./run.sh diff PAIR.

PAIR is the name of an eager script, such as ppo, or the path of your own, whose twin lies beside it; that of the twin
will do. The reasons come first, taken from the compiled script's own `# compile:` comments, then the hunks. Docstrings
are left out, and everything below the rule, where compiled scripts have some additional functions, identical in all of
them. Colours are used only if the output is a terminal.

Measures: nothing.
Takes: no time.
Leaves: nothing.
"""

import ast
import contextlib
import difflib
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.common.programs import SCRIPTS, SUFFIX, check_known, fail, pairs

COLOURS = {"+": "32", "-": "31", "#": "1;36", "@": "1"}  # ANSI: added, removed, a reason, a hunk's title
CONTEXT = 2  # lines around a change
WIDTH = 100  # of the list of reasons


@dataclass
class Options:
    pair: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PAIR")]  # name, or path, of the eager script


@dataclass
class Hunk:
    """Adjacent changes: the line of the compiled script at which they begin, and all their lines with diff marks."""

    line: int
    place: str  # the function, class or part of the script that contains them
    lines: list[str]

    def reasons(self) -> list[str]:
        """The comments that say why, each as one line."""
        text = "\n".join(line[1:].strip() for line in self.lines if line.startswith("+"))
        found = re.findall(r"# compile: (.+(?:\n# .+)*)", text)
        return [" ".join(part.removeprefix("# ") for part in comment.splitlines()) for comment in found]


def place_of(lines: list[str], index: int) -> str:
    """The function or class around a line; "imports" before the first one."""
    for line in lines[index::-1]:
        if match := re.match(r"(?:def|class) (\w+)", line):
            return match.group(1)
    return "imports"


def read_code(path: Path) -> list[str]:
    """The lines of a script above the rule; those up to the end of its docstring are blanked."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError) as error:
        fail(f"{path}: {error}")
    end = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
    return [""] * end + path.read_text().partition("\n# ---- ")[0].splitlines()[end:]


def hunks(eager: Path, compiled: Path) -> list[Hunk]:
    """What to change in the eager script of a pair to get the compiled one."""
    old, new = read_code(eager), read_code(compiled)
    found = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
        lines = []
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                lines += [f" {line}" for line in new[new_start:new_end]]
            else:
                lines += [f"-{line}" for line in old[old_start:old_end]]
                lines += [f"+{line}" for line in new[new_start:new_end]]
        first = next(start for tag, *_, start, _ in group if tag != "equal")
        found.append(Hunk(first + 1, place_of(new, min(first, len(new) - 1)), lines))
    return found


def paint(text: str, mark: str, is_coloured: bool) -> str:
    return f"\033[{COLOURS[mark]}m{text}\033[0m" if is_coloured and mark in COLOURS else text


def render(eager: Path, compiled: Path, is_coloured: bool) -> str:
    """The whole text: reasons first, then the hunks."""
    found = hunks(eager, compiled)
    changed = [line for hunk in found for line in hunk.lines if line[0] != " "]
    reasons = [reason for hunk in found for reason in hunk.reasons()]
    what = f"{len(changed)} lines of code, for {len(reasons)} reasons"
    lines = [f"{eager.name} and {compiled.name} differ in {what} (README counts those of the docstrings, too):", ""]
    for i, reason in enumerate(reasons, 1):
        indents = {"initial_indent": f"{i}. ", "subsequent_indent": "   "}
        wrapped = textwrap.fill(reason, WIDTH, **indents, break_on_hyphens=False)
        lines.append(paint(wrapped, "#", is_coloured))
    for hunk in found:
        lines += ["", paint(f"── {hunk.place}, line {hunk.line} of {compiled.name}", "@", is_coloured)]
        for line in hunk.lines:
            is_reason = line[0] == "+" and line[1:].lstrip().startswith("# ")
            lines.append(paint(line, "#" if is_reason else line[0], is_coloured))
    return "\n".join(lines)


def main(options: Options) -> None:
    eager = Path(options.pair.removesuffix(".py").removesuffix(SUFFIX) + ".py")
    if not options.pair.endswith(".py"):
        if eager.stem not in pairs() and eager.is_file():
            fail(f"no pair {eager.stem}; for the file in this folder: ./run.sh diff {eager}")
        check_known("pair", [options.pair.removesuffix(SUFFIX)], pairs())
        eager = SCRIPTS / eager
    compiled = eager.with_stem(f"{eager.stem}{SUFFIX}")
    for path in (eager, compiled):
        if not path.is_file():
            fail(f"there is no {path}")
    with contextlib.suppress(BrokenPipeError):  # as in `diff ppo | head`
        print(render(eager, compiled, sys.stdout.isatty()), flush=True)
