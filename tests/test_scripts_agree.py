"""The scripts are one text as far as they do the same, and a pair differs only where it says why."""

import ast
import dataclasses
import difflib
import io
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest
from helpers import PAIRS, ROOT, SCRIPTS, load, pair_of

from benchmarks.common.pairs import TABLE

# What each algorithm writes in its own way; any other function or class of one name has one text
OWN_NAMES = {"Args", "ActorCritic", "Actor", "Critic", "QNetwork", "Runner", "load_policy", "train"}
# Args whose help differs for a reason: the kind of actions; PPO trains in whole rollouts; between two updates of target
# networks DQN counts steps, SAC updates; what a graph comprises; who steps environments while others act; the symbols
# of a paper; what a learner's share is; which layers are rounded; what else waits for the actor; what acts at random;
# which other processes there are over Ray
OWN_HELP = {"env_id", "total_timesteps", "target_network_frequency", "compile", "cudagraphs", "async_envs"}
OWN_HELP |= {"ent_coef", "vf_coef", "num_learners", "bf16", "policy_frequency", "learning_starts", "fragment_timeout"}
# What a twin may write in another way; over Ray, a learner is made in several processes
CHANGED = {"Args", "train", "make_learner", "make_gradient"}
# Compiled twins alone have these, the same text in all of them: to compile with one set of options, and to refuse what
# compiled code would ignore
OF_TWINS = {
    "compiled",
    "with_own_code",
    "check_adam",
    "is_own",
    "attributes_of",
    "length",
    "readings",
    "refuse_changes",
}
OF_TWINS |= {"tensors_only", "check_equal", "check_places", "is_set", "steps_differ", "wrapped_by", "occurs"}
OF_TWINS |= {"attributes_read"}
OF_STACKED = {"check_stack", "Stack", "transposed", "is_called_by_library"}  # in twins whose critics are stacked
OF_SENT = {"Folders", "find_libraries"}  # in twins whose functions are sent to other processes
MOST_IN_TRAIN = 135
RULE = "# ---- Plumbing: what the algorithm is built on, nearly the same text in every script "
RULE = RULE.ljust(117, "-")
HEADINGS = (
    ["Collect", "Estimate advantages", "Learn", "Log"],  # on-policy
    ["Act", "Step the environment", "Learn", "Log"],  # off-policy
    ["Collect", "Learn", "Log"],  # over Ray
)

README = (ROOT / "README.md").read_text()

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
each_pair = pytest.mark.parametrize(("eager", "compiled"), PAIRS, ids=lambda path: path.stem)


def definitions(path: Path) -> dict[str, str]:
    """The text of each top-level function and class, decorators included."""
    lines, texts = path.read_text().splitlines(), {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(x.lineno for x in (node, *node.decorator_list))
            texts[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return texts


def fields(path: Path) -> dict[str, tuple[str, str]]:
    """The type and the comment of each field of Args."""
    texts = {}
    for line in definitions(path)["Args"].splitlines():
        if match := re.match(r"    (\w+): (.+?) = (.+?)  # (.+)$", line):
            name, kind, _default, comment = match.groups()
            texts[name] = kind, comment
    return texts


def above(path: Path) -> str:
    """What a reader came for: the text above the rule."""
    text, rule, _ = path.read_text().partition(f"\n{RULE}\n")
    assert rule, f"{path.name} has no rule"
    return text + "\n"


def body(path: Path) -> list[str]:
    """The lines of a script above the rule, without its docstring and imports."""
    tree, lines = ast.parse(above(path)), above(path).splitlines()
    for node in tree.body:
        if node is tree.body[0] or isinstance(node, ast.Import | ast.ImportFrom):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return [line for line in lines if line]


def comparison(old: str, new: str) -> str:
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm=""))


def test_each_script_has_a_twin():
    assert SCRIPTS == sorted(path for pair in PAIRS for path in pair)


@pytest.mark.slow
def test_same_name_same_text():
    first = {}
    for path in SCRIPTS:
        for name, text in definitions(path).items():
            if name in CHANGED or name in TABLE[pair_of(path.stem)].own_texts:
                continue
            where, expected = first.setdefault(name, (path.name, text))
            if name not in OWN_NAMES:
                assert text == expected, f"{name} of {where}, {path.name}:\n{comparison(expected, text)}"


@each_pair
def test_pair_shares_all_but_settings_and_loop(eager, compiled):
    ours, theirs = definitions(eager), definitions(compiled)
    assert theirs.keys() >= OF_TWINS and not ours.keys() & OF_TWINS
    assert list(ours) == [name for name in theirs if name not in OF_TWINS | OF_STACKED | OF_SENT]
    assert (theirs.keys() >= OF_SENT) is eager.stem.endswith("_ray")
    for name in ours.keys() - CHANGED:
        assert ours[name] == theirs[name], comparison(ours[name], theirs[name])


@each_pair
def test_each_hunk_of_a_pair_says_why(eager, compiled):
    old, new = body(eager), body(compiled)
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    hunks = [(old[i1:i2], new[j1:j2]) for tag, i1, i2, j1, j2 in changes if tag != "equal"]
    assert hunks
    for removed, added in hunks:
        assert any("# compile: " in line for line in added), "\n".join(["no reason:", *removed, "---", *added])
    imports = re.findall(r"^from tensordict.+", above(compiled), re.MULTILINE)
    assert "# compile: " in imports[0]


def changed_lines(eager: Path, compiled: Path) -> int:
    """Lines above the rule that one of a pair has and the other has not."""
    old, new = above(eager).splitlines(), above(compiled).splitlines()
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(i2 - i1 + j2 - j1 for tag, i1, i2, j1, j2 in changes if tag != "equal")


@each_pair
def test_pair_differs_little(eager, compiled):
    assert changed_lines(eager, compiled) <= TABLE[eager.stem].most_changes


@each_script
def test_story_comes_first_and_is_short(path):
    """Settings, networks and formulas, the algorithm; below the rule, what is the same text wherever it stands."""
    name = path.stem.removesuffix("_torchcompile")
    more = OF_TWINS | OF_STACKED | OF_SENT
    extra = sum(len(text.splitlines()) + 2 for key, text in definitions(path).items() if key in more)
    assert above(path).count("\n") <= TABLE[name].most_above
    assert path.read_text().count("\n") - extra <= TABLE[name].most_lines
    story = [node.name for node in ast.parse(above(path)).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert story[0] == "Args" and story[-2:] == ["train", "load_policy"]
    below = [name for name in definitions(path) if name not in story]
    assert not set(below) & OWN_NAMES and below[-1] == "Run"
    last = 'if __name__ == "__main__":\n    train(tyro.cli(Args, args=typed_flags(), description=__doc__))\n'
    assert path.read_text().endswith(f"\n\n\n{last}")
    assert f"\n\n    python {path.name} --" in load(path.stem).__doc__  # --help begins with it


@each_script
def test_train_is_short(path):
    assert len(definitions(path)["train"].splitlines()) <= MOST_IN_TRAIN


@each_pair
def test_readme_lists_the_pair(eager, compiled):
    links = [f"[{path.name}](scripts/{path.name})" for path in (eager, compiled)]
    row = f"| {links[0]} | {links[1]} | {changed_lines(eager, compiled)} lines |"
    assert row in (ROOT / "README.md").read_text()


METRIC = r"\b((?:charts|info|losses|pool|replay|runners|time)/\w+)\b"


def page_of(path: Path) -> str:
    """The page in docs/ that README links beside a script."""
    return next(
        re.search(r"docs/\w+\.md", row).group() for row in README.splitlines() if f"(scripts/{path.name})" in row
    )


@each_pair
def test_docs_explain_each_metric_that_is_logged_and_no_other(eager, compiled):
    """Pages of scripts over Ray refer to IMPALA's and, for its losses, A3C's to PPO's."""
    page = page_of(eager)
    pages = [page, *["docs/impala.md"] * eager.stem.endswith("_ray"), *["docs/ppo.md"] * (page == "docs/a3c.md")]
    explained = {name for name in pages for name in re.findall(METRIC, (ROOT / name).read_text())}
    logged = set(re.findall(rf"[\"']{METRIC}[\"']", eager.read_text()))
    assert logged == set(re.findall(rf"[\"']{METRIC}[\"']", compiled.read_text()))
    assert len(logged) > 5 and logged <= explained
    # In its tables; some names are put together, as `time/...` and `runners/...` are, so the last part must be there
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
    texts = [path.read_text() for path, _ in PAIRS if page_of(path) == page]
    for name in re.findall(METRIC, "\n".join(row.split("|")[1] for row in rows)):
        assert any(re.search(rf"\b{name.split('/')[1]}\b", text) for text in texts), name


def test_readme_shows_the_diff_as_it_is():
    hunk = re.search(r"```diff\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert re.sub(r"^\+", "", hunk, flags=re.MULTILINE) in (ROOT / "scripts" / "ppo_torchcompile.py").read_text()


@pytest.mark.slow
def test_same_setting_same_type_and_help():
    versions = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        for name, (kind, comment) in fields(path).items():
            versions[name][kind if name in OWN_HELP else f"{kind}  # {comment}"].append(path.stem)
    different = {name: texts for name, texts in versions.items() if len(texts) > 1}
    lines = [f"--{name}: {text}: {', '.join(where)}" for name in different for text, where in different[name].items()]
    assert not different, "\n".join(lines)


@each_script
def test_each_setting_has_help(path):
    assert list(fields(path)) == [field.name for field in dataclasses.fields(load(path.stem).Args)]


@each_script
def test_loop_has_its_headings_in_order(path):
    loop = definitions(path)["train"]
    words = {word for headings in HEADINGS for word in headings}
    comments = re.findall(r"^ +# ([A-Z][a-z ]+?)(?:[.,;:]|$)", loop, re.MULTILINE)
    assert [comment for comment in comments if comment in words] in HEADINGS


@each_script
def test_imports_nothing_local(path):
    """Copied anywhere, a script runs: it needs the standard library and what its header lists; wandb on request."""
    allowed = sys.stdlib_module_names | {re.split(r"[\[=]", x)[0] for x in header(path)} | {"wandb"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module.split(".")[0] in allowed


def header(path: Path) -> list[str]:
    """The dependencies of the inline metadata (PEP 723)."""
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", path.read_text()).group(1)
    return re.findall(r'"([^">]+)"', block.partition("dependencies")[2])


def packages(file: str) -> dict[str, str]:
    """Name with extras -> version specifier, of a file in requirements/."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements" / file).read_text().splitlines())
    matches = (re.match(r"([\w.-]+(?:\[[\w,]+\])?)(.*)", line) for line in lines if line and line[0] != "-")
    return {name.lower().replace("_", "-"): specifier for name, specifier in (m.groups() for m in matches)}


@each_script
def test_header_pins_what_requirements_pin(path):
    pins = dict(dependency.split("==") for dependency in header(path))
    constraints = packages("constraints.txt")
    needed = packages("requirements.txt") | (packages("requirements-ray.txt") if path.stem.count("_ray") else {})
    assert pins.keys() == needed.keys() - {"matplotlib"}
    for name, version in pins.items():
        assert f"=={version}" == constraints[name.partition("[")[0]], name


@pytest.mark.parametrize("path", SCRIPTS + sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_lines_are_short_and_little_indented(path):
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        assert depth <= 4, f"line {token.start[0]} is indented {depth} times"
    lines = [line for line in path.read_text().splitlines() if "://" not in line]
    assert max(map(len, lines), default=0) <= 120


@pytest.mark.slow
def test_each_name_is_compared():
    """A guard for the tests above: they see the definitions and settings that all scripts are known to share."""
    scripts_with = defaultdict(int)
    for path in SCRIPTS:
        for name in {*definitions(path), *fields(path)}:
            scripts_with[name] += 1
    assert scripts_with["Envs"] + scripts_with["Pool"] == len(SCRIPTS)
    assert all(scripts_with[name] == len(PAIRS) for name in OF_TWINS)
    assert all(scripts_with[name] == 2 for name in OF_STACKED)
    for name in ("Run", "validate", "load_checkpoint", "typed_flags", "Args", "train", "seed", "env_id", "gamma"):
        assert scripts_with[name] == len(SCRIPTS), name
