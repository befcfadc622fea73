"""A copy of a pair under a name of your own: ./run.sh copy PAIR NAME.

Writes NAME.py and NAME_torchcompile.py. NAME may be a path; files that exist are not overwritten. With --small, NAME.py
is half as long as the script, and its twin three fifths: environments are Gymnasium's, stepped in the script's process,
and runs can't be resumed. The algorithm is the same, and gives the same numbers.

Measures: nothing.
Takes: no time.
Leaves: the two files.
"""

import ast
import importlib.machinery
import keyword
import os
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import SCRIPTS, SUFFIX, check_known, fail, pairs

WIDTH = 120  # of a line
RULE = "# ---- "  # how the line begins below which a script has its plumbing
SMALL = Path(__file__).with_name("small_plumbing.py")
# Left out of a small copy: settings, other names above the rule, methods
SETTINGS = {
    "resume", "override", "checkpoint_every", "save_replay", "tensorboard", "track", "wandb_project_name",
    "wandb_entity", "env_backend", "sync_envs",
}  # fmt: skip
NAMES = {"LIMITS", "CHANGEABLE"}
METHODS = {"ReplayBuffer": {"state_dict", "load_state_dict", "additions"}, "Adam": {"load_state_dict"}}
KEPT = {"is_due"}  # methods of the script's own `Run` that the small one has, too
# What else a small copy says in another way, or not at all: patterns and their replacements
EDITS = {
    r' "envpool==[^"]*",|, "tensorboard==[^"]*"': "",
    r"Train from scratch or from a checkpoint to the end; (.*) Invalid input: SystemExit\(2\)\.": r"Train; \1",
    r' *self\.register_buffer\("first_learning_rate".*\n': "",
    r" *run\.stop_if_asked\(\)\n": "",
    r" or EnvPool\b| EnvPool's can't have any, so Gymnasium's are then used\.| \(not of EnvPool\)": "",
    r"range\(run\.iteration, num_iterations\)": "range(num_iterations)",
    r" *run\.iteration = iteration \+ 1\n": "",
    r" *update_copy\(network, collector\)  # the weights as loaded\n": "",
    r"; at least one, even after a signal": "",
    r"(?s) *handlers = \{signum: signal\.getsignal.*?the C\+\+ compiler, too\n": "",
    r' *advice \+= "; to Ray\'s runners, .*\n': "",
    r", which a checkpoint fills in place": "",
    r'\n *\*\*\(\{"buffer": buffer\} if args\.save_replay else \{\}\),': "",
    r' *buffers = \{"buffer": buffer\} if args\.save_replay else \{\}\n': "",
    r", \*\*buffers\)": ")",
    r" \+ \(0 if args\.save_replay else run\.step\)(  # refill .*)?": "",
    r".*# counted again, as --override .*\n": "",
    r"  # a resumed run that refills .*": "",
    r" *# Not before a log line: .*\n": "",
    r" Do not ask\n *before a log line, .*\n": "\n",
    r" and not run\.is_due\(\):\n( *courier\.ask)": r":\n\1",
    r"args=typed_flags\(\), ": "",
}


@dataclass
class Options:
    pair: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PAIR")]  # as in ppo
    name: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="NAME")]  # of the copy, as in my_ppo
    small: bool = False  # with less plumbing: Gymnasium's environments only, in one process, and no resuming


@dataclass
class Part:
    """A top-level statement: the name that it defines, its text with the comments above it, and the names it uses."""

    name: str
    text: str
    uses: set[str]


def can_be_small() -> list[str]:
    """The pairs that step Gymnasium's environments, and can do that in one process: all but Ray's, pools, games."""
    texts = {pair: (SCRIPTS / f"{pair}.py").read_text() for pair in pairs() if pair in TABLE}
    return [pair for pair, text in texts.items() if "\nclass SyncEnvs" in text and "\nclass Runner" not in text]


def names_in(tree: ast.AST) -> set[str]:
    """All names, also those of annotations that are strings."""
    nodes = [*ast.walk(tree)]
    quoted = {x.annotation.value for x in nodes if isinstance(x, ast.arg) and isinstance(x.annotation, ast.Constant)}
    return {x.id for x in nodes if isinstance(x, ast.Name)} | quoted


def parts_of(text: str) -> list[Part]:
    """The top-level statements of a file, without its docstring and imports."""
    lines, parts, end = text.splitlines(), [], 0
    for node in ast.parse(text).body:
        name = getattr(node, "name", "") or (ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else "")
        parts.append(Part(name, "\n".join(lines[end : node.end_lineno]).strip("\n"), names_in(node)))
        end = node.end_lineno
    return parts


def without(text: str, nodes: list[ast.stmt]) -> str:
    """A text without some of its statements: top-level ones with the comments above, methods with the empty line."""
    lines, gone = text.splitlines(), set()
    for node in nodes:
        decorators = getattr(node, "decorator_list", [])
        first = min(x.lineno for x in [node, *decorators]) - 1 - isinstance(node, ast.FunctionDef)
        while node.col_offset == 0 and lines[first - 1].startswith("#"):
            first -= 1
        gone |= {*range(first, node.end_lineno)}
    return "\n".join(line for i, line in enumerate(lines) if i not in gone) + "\n"


def methods_of(text: str, kind: str, names: set[str]) -> str:
    """The text of some methods of a class, to be appended to that of another class."""
    lines, tree = text.splitlines(), ast.parse(text)
    body = next(node for node in tree.body if getattr(node, "name", "") == kind).body
    methods = [node for node in body if getattr(node, "name", "") in names]
    return "".join("\n" + "\n".join(lines[x.lineno - 1 : x.end_lineno]) + "\n" for x in methods)


def needed(parts: list[Part], used: set[str]) -> list[Part]:
    """Those parts whose names are used, also by other such parts; parts without a name always are."""
    used = used.union(*(part.uses for part in parts if not part.name))
    while more := [part for part in parts if part.name in used and not part.uses <= used]:
        used = used.union(*(part.uses for part in more))
    return [part for part in parts if not part.name or part.name in used]


def with_used_imports(text: str) -> str:
    """The text with those names of its imports that it uses."""
    tree, lines = ast.parse(text), text.splitlines()
    used = names_in(tree)
    for node in [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]:
        node.names = [x for x in node.names if (x.asname or x.name.partition(".")[0]) in used]
        for x in node.names:  # `import a.b`, if only `a` is used
            package = x.name.partition(".")[0]
            x.name = x.name if isinstance(node, ast.ImportFrom) or text.count(f"{x.name}.") else package
        comment = lines[node.lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1] = ast.unparse(node) + comment if node.names else None
    return "\n".join(line for line in lines if line is not None) + "\n"


def without_unused_methods(text: str, others: str) -> str:
    """Classes without those methods that neither they nor the other text call."""
    while True:
        used = set(re.findall(r"\.(\w+)", text + others)) | {"__init__"}
        methods = [x for part in ast.parse(text).body for x in part.body if isinstance(x, ast.FunctionDef)]
        if not (unused := [x for x in methods if x.name not in used]):
            return text
        text = without(text, unused)


def shortened(text: str, note: str) -> str:
    """A script with the plumbing of a small copy; `note` ends its docstring."""
    for pattern, replacement in EDITS.items():
        text = re.sub(pattern, replacement, text)
    tree = ast.parse(text)
    args = next(node for node in tree.body if getattr(node, "name", "") == "Args")
    gone = [node for node in args.body if isinstance(node, ast.AnnAssign) and node.target.id in SETTINGS]
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign) and names_in(node) & NAMES:
            gone.append(node)
        if methods := METHODS.get(getattr(node, "name", "")):
            gone += [x for x in node.body if getattr(x, "name", "") in methods]
    text = without(text, gone)
    story, rule, plumbing = re.split(rf"^({RULE}.*)$", text, maxsplit=1, flags=re.MULTILINE)
    story = story.replace('\n"""\n', f'\n\n{note}\n"""\n', 1)

    own = SMALL.read_text().partition("noqa: F821\n")[2]
    own += methods_of(plumbing, "Run", KEPT)
    own = own if "run.num_updates" in story else own.replace("self.num_updates = ", "")
    replaced, (*parts, main) = {part.name for part in parts_of(own)}, parts_of(plumbing)
    parts = [part for part in parts if part.name not in replaced]
    own = without_unused_methods(own, "\n".join([story, *(part.text for part in parts)]))
    kept = needed([*parts, *parts_of(own)], names_in(ast.parse(story)))
    return with_used_imports("\n\n\n".join([story.rstrip("\n"), rule, *(part.text for part in kept), main.text]) + "\n")


def renamed(text: str, pair: str, name: str) -> str:
    """A script whose docstring calls it and its twin by the name of the copy."""
    head, docstring, rest = text.split('"""', maxsplit=2)
    docstring = re.sub(rf"\b{pair}(?=({SUFFIX})?\.py\b)", name, docstring)
    docstring = docstring.replace("CleanRL's script of the same name", f"CleanRL's `{pair}.py`")
    docstring = docstring.replace("`./run.sh diff`", f"`./run.sh diff {name}.py`")
    lines = docstring.splitlines()
    for i, line in enumerate(lines):
        if len(line) > WIDTH and not line.startswith(" "):  # commands stay as they are
            lines[i] = textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)
    return '"""'.join([head, "\n".join(lines) + "\n", rest])


def hides_a_module(name: str) -> bool:
    """Whether a library has this name: in the folder of such a file, scripts would import the file instead."""
    own = {Path.cwd(), SCRIPTS.parent, SCRIPTS}
    places = [place for place in sys.path if Path(place).resolve() not in own]
    return name in sys.stdlib_module_names or bool(importlib.machinery.PathFinder.find_spec(name, places))


def check(options: Options) -> dict[str, Path]:
    """Refuse what can't work; returns the files to write: suffix of the script -> path."""
    check_known("pair", [options.pair], pairs())
    if options.small and options.pair not in can_be_small():
        fail(f"--small can't copy {options.pair}, whose plumbing is needed; it is for {', '.join(can_be_small())}")
    place = options.name.with_suffix("") if options.name.suffix == ".py" else options.name
    name = place.name
    if options.name.is_dir():
        fail(f"{options.name} is a folder: name the file, as in {options.name / f'my_{options.pair}'}")
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name) or name.endswith(SUFFIX):
        fail(f"{name!r} can't be the name: letters, digits and underscores, no word of Python's, not ...{SUFFIX}")
    if name in pairs() or hides_a_module(name):
        fail(f"there is a module or a script {name} already, which could be taken for the copy: choose another name")
    if options.small and place.parent.resolve() == SCRIPTS:
        fail("a small copy does not belong into scripts/, as it lacks what `sweep` and `throughput` need")
    if not place.parent.is_dir():
        fail(f"there is no folder {place.parent}")
    return {suffix: place.with_name(f"{name}{suffix}.py") for suffix in ("", SUFFIX)}


def main(options: Options) -> None:
    targets, texts = check(options), {}
    for suffix, path in targets.items():
        source = f"{options.pair}{suffix}.py"
        texts[path] = renamed((SCRIPTS / source).read_text(), options.pair, targets[""].stem)
        if options.small:
            note = f"Made of `{source}` by `./run.sh copy --small`, with less plumbing: environments are Gymnasium's, "
            note += "stepped in this process, ranges of settings are not checked, and runs can't be resumed."
            texts[path] = shortened(texts[path], textwrap.fill(note, WIDTH))
    if taken := [path for path in texts if os.path.lexists(path)]:
        fail(f"{taken[0]} exists, and is not overwritten")
    for path, text in texts.items():
        try:
            with path.open("x") as file:
                file.write(text)
        except OSError as error:
            fail(f"can't write {path}: {error.strerror}")
        print(f"{path}: {len(text.splitlines())} lines")
    eager = shlex.quote(str(targets[""]))
    print(f"its settings: python {eager} --help; how the two differ: ./run.sh diff {eager}")
