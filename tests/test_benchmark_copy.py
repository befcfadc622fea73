"""./run.sh copy: a pair under another name; with --small half as long, and training to the same numbers."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from unittest import mock

import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from benchmark_helpers import benchmark_here
from helpers import ROOT

from benchmarks.tools import copy

PAIRS = copy.can_be_small()
BOTH = [f"{pair}{suffix}" for pair in PAIRS for suffix in ("", "_torchcompile")]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small copy of a script: name -> its path."""
    folder = tmp_path_factory.mktemp("small")
    for pair in PAIRS:
        copy.main(copy.Options(pair, folder / f"small_{pair}", small=True))
    return lambda name: folder / f"small_{name}.py"


def load_small(path: Path) -> ModuleType:
    """Import a file anew; dataclasses look for their module by its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train_small(small, tmp_path):
    """Train a small copy by the small settings of its script: name, settings -> outcome."""
    loaded = set()

    def train_small(name: str, **overrides) -> helpers.Outcome:
        path = small(name)
        module = load_small(path)
        loaded.add(path.stem)
        known = {field.name for field in fields(module.Args)}
        settings = helpers.settings_of(name, overrides) | {"device": "cpu", "run_dir": str(tmp_path / path.stem)}
        assert settings.keys() <= known | copy.SETTINGS
        torch.set_num_threads(1)
        with mock.patch("torch.set_num_threads"):
            module.train(module.Args(**{key: value for key, value in settings.items() if key in known}))
        return helpers.outcome(tmp_path / path.stem)

    yield train_small
    for name in loaded:
        del sys.modules[name]


def original(name: str, run_dir, **overrides) -> helpers.Outcome:
    """The same run by the script itself."""
    return helpers.train(name, run_dir, sync_envs=True, **overrides)


def switches(name: str, compile: bool = False) -> dict:
    return {"compile": compile, "cudagraphs": False} if name.endswith("_torchcompile") else {}


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", BOTH)
def test_a_small_copy_trains_to_the_same_numbers(name, num_envs, train_small, tmp_path):
    settings = switches(name) | {"num_envs": num_envs}
    expected, found = original(name, tmp_path / "run", **settings), train_small(name, **settings)
    assert len(found.lines) > 1 and found.metrics() == [
        {key: x for key, x in line.items() if not key.startswith("info/")} for line in expected.metrics()
    ]
    assert any(key.startswith("losses/") for key in found.lines[-1])
    modules = [key for key, part in found.checkpoint.items() if isinstance(part, dict) and key != "args"]
    assert {"optimizer", "actor_optimizer"} & {*modules}
    for key in modules:
        part = {name: expected.checkpoint[key][name] for name in found.checkpoint[key]}
        torch.testing.assert_close(dict(found.checkpoint[key]), part, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_torchcompile", "sac_continuous_action_torchcompile"])
def test_a_small_copy_compiles(name, train_small, tmp_path):
    expected, found = original(name, tmp_path / "run", **switches(name)), train_small(name, **switches(name, True))
    for line, other in zip(found.metrics()[:3], expected.metrics()[:3], strict=True):
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_a_small_copy_is_half_as_long_and_has_nothing_left_over(name, small):
    text, source = small(name).read_text(), (ROOT / "scripts" / f"{name}.py").read_text()
    most = 0.63 if name.endswith("_torchcompile") else 0.55
    assert len(text.splitlines()) < most * len(source.splitlines())
    assert text.count("Made of") == 1 and f"Made of `{name}.py`" in text
    tree = ast.parse(text)
    args = next(node for node in tree.body if getattr(node, "name", "") == "Args")
    known = {node.target.id for node in args.body if isinstance(node, ast.AnnAssign)}
    assert known and not known & copy.SETTINGS
    assert set(re.findall(r"\bargs\.(\w+)", text)) <= known
    gone = "resume --override save_replay envpool EnvPool LIMITS CHANGEABLE docs/ signal Ray worker loaded".split()
    left = [line for line in text.splitlines() for word in gone if word in line and "can't be resumed" not in line]
    assert not left
    used = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)} | {"load_policy"}
    assert not [x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name not in used]
    for kind in [node for node in tree.body if getattr(node, "name", "") in ("Run", "Envs", "ReplayBuffer")]:
        methods = [x.name for x in kind.body if isinstance(x, ast.FunctionDef) and x.name[:2] != "__"]
        assert not [x for x in methods if f".{x}(" not in text], "methods that nothing calls"


@pytest.mark.parametrize("name", BOTH)
def test_settings_of_a_small_copy_are_those_of_the_script(name, small):
    modules = load_small(small(name)), helpers.load(name)
    own, script = ({x.name: (x.default, x.type) for x in fields(module.Args)} for module in modules)
    assert own.pop("exp_name")[0] == f"small_{name}"
    assert own == {key: x for key, x in script.items() if key not in copy.SETTINGS | {"exp_name"}}


def test_small_copies_are_as_tidy_as_the_scripts(small):
    folder, rules = small("ppo").parent, ROOT / "pyproject.toml"
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, "--config", rules, folder], capture_output=True)
        assert done.returncode == 0, done.stdout.decode()


def test_pairs_that_can_be_small_are_those_of_the_page():
    text = (ROOT / "docs" / "use.md").read_text()
    named = re.search(r"about half as long \((.*?)\)", text, re.DOTALL)[1]
    assert sorted(re.findall(r"`(\w+)`", named)) == PAIRS


def test_each_edit_has_something_to_do_in_both_files_of_a_pair():
    texts = {name: (ROOT / "scripts" / f"{name}.py").read_text() for name in BOTH}
    for pattern in copy.EDITS:
        found = [name for name, text in texts.items() if re.search(pattern, text)]
        assert found, pattern
        twins = [name for name in found if name.endswith("_torchcompile")]
        assert len(twins) in (len(found), len(found) / 2), f"{pattern} is in {found} only"
    known = {field.name for pair in PAIRS for field in fields(helpers.load(pair).Args)}
    assert copy.SETTINGS <= known


@pytest.mark.parametrize(
    ("name", "env_id"), [("dqn_torchcompile", "CartPole-v1"), ("ppo_continuous_action", "Pendulum-v1")]
)
def test_runs_of_a_small_copy_are_evaluated_and_reported(name, env_id, train_small, small, capsys, tmp_path):
    run = train_small(name, env_id=env_id, **switches(name)).run_dir
    done = benchmark_here(capsys, "evaluate", run, "--script", small(name), "--episodes", 2)
    assert done.returncode == 0 and f"{env_id}: return" in done.stdout and not done.stderr, done.stderr
    done = benchmark_here(capsys, "report", run, "--out", tmp_path / "report")
    report = (tmp_path / "report" / "report.md").read_text()
    assert done.returncode == 0 and f"| small_{name.removesuffix('_torchcompile')} | {env_id} |" in report, done.stderr


def test_an_episode_that_terminates_with_nan_counts_as_in_the_script(train_small, tmp_path, monkeypatch):
    """In the statistics of observations, too."""
    monkeypatch.setattr(tiny_envs, "last_observation", np.nan)
    settings = {"env_id": "tiny_envs:Terminated-v0"}
    expected = original("ppo_continuous_action", tmp_path / "run", **settings)
    assert train_small("ppo_continuous_action", **settings).metrics() == expected.metrics()


def test_a_small_copy_is_started_as_a_script_is(small, tmp_path):
    """And finds an environment in the current folder."""
    (tmp_path / "own.py").write_text(
        "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('Own-v0', CartPoleEnv, max_episode_steps=20)\n"
    )
    flags = ["--env-id", "own:Own-v0", "--total-timesteps", "512", "--num-envs", "2", "--run-dir", "run"]
    command = [sys.executable, small("ppo"), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "log, checkpoint, configuration: run" in done.stdout, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "metrics.jsonl", "checkpoint.pt"}


def test_a_small_copy_refuses_a_used_folder_and_numbers_that_are_not_finite(train_small, tmp_path, monkeypatch):
    train_small("ppo")
    with pytest.raises(SystemExit, match="2"):
        train_small("ppo")
    config = json.loads((tmp_path / "small_ppo" / "config.json").read_text())
    assert config["script"] == "small_ppo.py" and config["args"]["num_steps"] == 64
    monkeypatch.setattr(tiny_envs, "EVENT", "nan_obs@5")
    with pytest.raises(ValueError, match="NaN or infinite"):
        train_small("dqn")


def test_a_copy_is_the_script_under_another_name(tmp_path, capsys):
    done = benchmark_here(capsys, "copy", "sac_continuous_action", tmp_path / "my_sac.py")
    assert done.returncode == 0 and f"{tmp_path / 'my_sac_torchcompile.py'}: " in done.stdout
    for suffix, twin in (("", "_torchcompile"), ("_torchcompile", "")):
        text = (tmp_path / f"my_sac{suffix}.py").read_text()
        source = (ROOT / "scripts" / f"sac_continuous_action{suffix}.py").read_text()
        docstring = ast.get_docstring(ast.parse(text))
        assert text.split('"""', 2)[2] == source.split('"""', 2)[2]
        assert f"python my_sac{suffix}.py --env-id" in docstring and f"twin is `my_sac{twin}.py`" in docstring
        assert "CleanRL's `sac_continuous_action.py`" in docstring and docstring.count("sac_continuous_action") == 1
        assert "`./run.sh diff my_sac.py`" in " ".join(docstring.split())
    assert benchmark_here(capsys, "diff", tmp_path / "my_sac.py").returncode == 0


@pytest.mark.parametrize("name", ["mine", "my_long_name", "a_name_that_is_as_long_as_this_one_is"])
def test_names_of_any_length_leave_the_examples_of_a_docstring_as_they_are(name):
    for path in helpers.SCRIPTS:
        pair, text = path.stem.removesuffix("_torchcompile"), path.read_text()
        old, new = (ast.get_docstring(ast.parse(x)).splitlines() for x in (text, copy.renamed(text, pair, name)))
        examples = [line.replace(f"{pair}.py", f"{name}.py") for line in old if line.startswith(" ")]
        examples = [line.replace(f"{pair}_torchcompile.py", f"{name}_torchcompile.py") for line in examples]
        assert [line for line in new if line.startswith(" ")] == examples
        assert not [line for line in new if len(line) > 120 and not line.startswith(" ")]
        assert " ".join(new).count("-") >= " ".join(old).count("-")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("sarsa", "mine"), "no pair sarsa"),
        (("ppo", "my-ppo"), "'my-ppo' can't be the name"),
        (("ppo", "class"), "'class' can't be the name"),
        (("ppo", "my_torchcompile"), "'my_torchcompile' can't be the name"),
        (("ppo", "random"), "there is a module or a script random already"),
        (("ppo", "torch"), "there is a module or a script torch already"),
        (("ppo", "dqn"), "there is a module or a script dqn already"),
        (("ppo", "."), ". is a folder: name the file"),
        (("ppo", ROOT / "scripts" / "my_ppo", "--small"), "a small copy does not belong into scripts/"),
        (("ppo", "nowhere/mine"), "there is no folder nowhere"),
        (("ppo", "taken"), "taken_torchcompile.py exists, and is not overwritten"),
        (("ppo", "linked"), "linked.py exists, and is not overwritten"),
        (("impala_ray", "mine", "--small"), "--small can't copy impala_ray"),
    ],
)
def test_what_can_not_be_copied_is_refused(flags, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken_torchcompile.py").write_text("x = 1\n")
    (tmp_path / "linked.py").symlink_to("nowhere")
    done = benchmark_here(capsys, "copy", *flags)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and reason in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"taken_torchcompile.py", "linked.py"}
    assert (tmp_path / "taken_torchcompile.py").read_text() == "x = 1\n"
