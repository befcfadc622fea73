"""A user copies a file and changes a line: what the change asks for is done, or refused by name; nothing is ignored."""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from gymnasium.spaces import Box, Discrete
from helpers import COMPILED, EAGER, ROOT, defining, discrete, has_pool, load, on_policy
from torch import nn


class Stream(gym.Env):
    """Observations that do not depend on the actions; so a rounding error in one of them changes nothing later."""

    action_space, observation_space = Discrete(3), Box(-np.inf, np.inf, (3,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.x = self.np_random.normal(size=3)
        return self.x.astype(np.float32), {}

    def step(self, action):
        self.x = 0.9 * self.x + 0.3 * self.np_random.normal(size=3)
        reward = float(np.tanh(self.x[action % 3]))
        return self.x.astype(np.float32), reward, self.np_random.random() < 0.1, False, {}


gym.register("OwnStream-v0", Stream)

Change = tuple[str, str]  # text of the script, what is to stand there


def source_of(name: str) -> str:
    return (ROOT / "scripts" / f"{name}.py").read_text()


def changed(name: str, *changes: Change) -> str:
    source = source_of(name)
    for old, new in changes:
        assert old in source, f"{name}.py has no line {old!r}"
        source = source.replace(old, new, 1)
    return source


@pytest.fixture
def copy(tmp_path):
    """A copy of a script with changed lines, imported as a module: name, changes -> module."""
    numbers, made = itertools.count(), []

    def copy(name: str, *changes: Change):
        module_name = f"copy{next(numbers)}_of_{name}"
        path = tmp_path / f"{module_name}.py"
        path.write_text(changed(name, *changes))
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        made.append(module_name)
        spec.loader.exec_module(module)
        return module

    yield copy
    for module_name in made:
        del sys.modules[module_name]


def quick(name: str) -> dict:
    """Settings of a run that has its first updates, where many of them take long."""
    return {} if on_policy(name) else {"total_timesteps": 200}


def metrics_of(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "charts/SPS")} for line in lines]


@pytest.fixture
def train_copy(tmp_path):
    """Train a copy by the small settings of its script -> its log without what depends on the clock."""
    numbers = itertools.count()

    def train_copy(module, name: str, **overrides) -> list[dict]:
        run_dir = tmp_path / f"copy_run{next(numbers)}"
        defaults = {"device": "cpu", "tensorboard": False, "run_dir": str(run_dir)}
        torch.set_num_threads(1)
        with mock.patch("torch.set_num_threads"):
            module.train(module.Args(**defaults | helpers.settings_of(name, overrides)))
        return metrics_of(run_dir)

    return train_copy


# Numbers that change after they were compiled


SETUP = "    @torch.no_grad()\n    def estimate("
LOOP = "    for iteration in range(run.iteration, num_iterations):\n"
BONUS = "args.ent_coef * entropy"


def before_the_loop(lines: str) -> Change:
    return SETUP, f"    {lines}\n{SETUP}"


def in_the_loop(line: str) -> Change:
    return LOOP, f"{LOOP}        {line}\n"


def of_the_file(lines: str) -> Change:
    return "\ndef mlp(", f"\n{lines}\n\n\ndef mlp("


SCHEDULE = "args.ent_coef * (1 - iteration / num_iterations)"
PPO = "ppo_continuous_action"
CLASS_ATTRIBUTE = "    sharpness = 1.0\n\n    def __init__(self, obs_dim: int, num_actions: int):\n"
LOGITS = "self.actor(obs).log_softmax(1)"
INIT = "    def __init__(self, obs_dim: int, num_actions: int):\n"
CRITIC = "mlp(obs_dim, 1, output_gain=1.0)"
SHARP = "def sharp(self):\n        return SHARPNESS"


DECORATOR = """from functools import wraps

class Progress:
    left = 1.0


def annealed(function):
    @wraps(function)
    def scaled(*inputs):
        return Progress.left * function(*inputs)

    return scaled"""


class Way(NamedTuple):
    """A way to change a number in the loop, and how it is called in the message."""

    name: str
    changes: list[Change]


WAYS = {
    "a local of train": Way(
        "`ent_coef`",
        [
            before_the_loop("ent_coef = args.ent_coef"),
            (BONUS, "ent_coef * entropy"),
            in_the_loop(f"ent_coef = {SCHEDULE}"),
        ],
    ),
    "a setting": Way("`args.ent_coef`", [in_the_loop("args.ent_coef *= 0.9")]),
    "other settings": Way("`args", [in_the_loop("args = replace(args, ent_coef=0.9 * args.ent_coef)")]),
    "an attribute of the optimizer": Way("`optimizer.eps`", [in_the_loop("optimizer.eps *= 2")]),
    "a pair of the optimizer": Way(
        "`optimizer.betas", [in_the_loop("optimizer.betas = (0.5 + 0.1 * iteration, 0.999)")]
    ),
    "another tensor": Way("learning_rate", [in_the_loop("optimizer.learning_rate = 0.9 * optimizer.learning_rate")]),
    "a decorator of your own": Way(
        "`Progress.left`",
        [
            of_the_file(DECORATOR),
            ("def masked_mean(", "@annealed\ndef masked_mean("),
            in_the_loop("Progress.left *= 0.9"),
        ],
    ),
    "a key with brackets": Way(
        "`agent.coefs['a[0]']`",
        [
            before_the_loop("agent.coefs = {'a[0]': 0.01}"),
            (BONUS, "agent.coefs['a[0]'] * entropy"),
            in_the_loop("agent.coefs['a[0]'] *= 0.9"),
        ],
    ),
    "a hook of a layer": Way(
        "_forward_hooks",
        [
            (
                LOOP,
                f"{LOOP}        if iteration == 1:\n"
                "            agent.critic[1].register_forward_hook(lambda _, __, out: 2 * out)\n",
            )
        ],
    ),
    "a container in a namespace": Way(
        "`settings.weights['entropy']`",
        [
            before_the_loop("import argparse\n    settings = argparse.Namespace(weights={'entropy': args.ent_coef})"),
            (BONUS, "settings.weights['entropy'] * entropy"),
            in_the_loop("settings.weights['entropy'] *= 0.9"),
        ],
    ),
    "a global": Way(
        "`ENT_COEF`",
        [
            of_the_file("ENT_COEF = 0.01"),
            ("    run = Run(args)\n", "    global ENT_COEF\n    run = Run(args)\n"),
            (BONUS, "ENT_COEF * entropy"),
            in_the_loop("ENT_COEF *= 0.9"),
        ],
    ),
    "a global in a comprehension": Way(
        "`ENT_COEF`",
        [
            of_the_file("ENT_COEF = 0.01"),
            ("    run = Run(args)\n", "    global ENT_COEF\n    run = Run(args)\n"),
            (BONUS, "sum([ENT_COEF * x for x in [entropy]])"),
            in_the_loop("ENT_COEF *= 0.9"),
        ],
    ),
    "a global in a method": Way(
        "`SHARPNESS`",
        [
            of_the_file("SHARPNESS = 1.0"),
            ("    run = Run(args)\n", "    global SHARPNESS\n    run = Run(args)\n"),
            (LOGITS, "(SHARPNESS * self.actor(obs)).log_softmax(1)"),
            in_the_loop("SHARPNESS += 0.1"),
        ],
    ),
    "an entry of a dict": Way(
        "`weights['entropy']`",
        [
            before_the_loop('weights = {"entropy": args.ent_coef}'),
            (BONUS, 'weights["entropy"] * entropy'),
            in_the_loop('weights["entropy"] *= 0.9'),
        ],
    ),
    "another dict": Way(
        "`weights",
        [
            before_the_loop('weights = {"entropy": args.ent_coef}'),
            (BONUS, 'weights["entropy"] * entropy'),
            in_the_loop('weights = {"entropy": ' + SCHEDULE + "}"),
        ],
    ),
    "an entry of a list": Way(
        "`weights[0]`",
        [
            before_the_loop("weights = [args.ent_coef]"),
            (BONUS, "weights[0] * entropy"),
            in_the_loop("weights[0] *= 0.9"),
        ],
    ),
    "an attribute of the agent": Way(
        "`agent.sharpness`",
        [
            (
                "        self.critic = mlp(obs_dim, 1, output_gain=1.0)\n",
                "        self.critic = mlp(obs_dim, 1, output_gain=1.0)\n        self.sharpness = 1.0\n",
            ),
            ("self.critic(obs).squeeze(1)", "(self.sharpness * self.critic(obs).squeeze(1))"),
            in_the_loop("agent.sharpness += 0.1"),
        ],
    ),
    "an attribute of the class": Way(
        "`agent.sharpness`",
        [
            ("    def __init__(self, obs_dim: int, num_actions: int):\n", CLASS_ATTRIBUTE),
            ("self.critic(obs).squeeze(1)", "(self.sharpness * self.critic(obs).squeeze(1))"),
            in_the_loop("ActorCritic.sharpness += 0.1"),
        ],
    ),
    "another function": Way(
        "`decay`",
        [
            before_the_loop("decay = lambda x: args.ent_coef * x  # noqa: E731"),
            (BONUS, "decay(entropy)"),
            in_the_loop("decay = (lambda x: 0.1 * x) if iteration > 1 else decay"),
        ],
    ),
    "a number of NumPy": Way(
        "`ent_coef`",
        [
            before_the_loop("ent_coef = np.float32(args.ent_coef)"),
            (BONUS, "float(ent_coef) * entropy"),
            in_the_loop("ent_coef = np.float32(0.9) * ent_coef"),
        ],
    ),
    "a private attribute": Way(
        "`agent._bonus`",
        [
            before_the_loop("agent._bonus = args.ent_coef"),
            (BONUS, "agent._bonus * entropy"),
            in_the_loop("agent._bonus *= 0.9"),
        ],
    ),
    "an object of another module": Way(
        "`settings.ent_coef`",
        [
            ("import tyro\n", "import tyro\nfrom types import SimpleNamespace\n"),
            before_the_loop("settings = SimpleNamespace(ent_coef=args.ent_coef)"),
            (BONUS, "settings.ent_coef * entropy"),
            in_the_loop("settings.ent_coef *= 0.9"),
        ],
    ),
    "an attribute of a plain class": Way(
        "`Config.scale`",
        [
            of_the_file("class Config:\n    scale = 0.01"),
            (BONUS, "Config.scale * entropy"),
            in_the_loop("Config.scale *= 0.9"),
        ],
    ),
    "an attribute of another module": Way(
        "`tiny_envs.bonus`",
        [
            of_the_file("import tiny_envs\n\ntiny_envs.bonus = 0.01"),
            (BONUS, "tiny_envs.bonus * entropy"),
            in_the_loop("tiny_envs.bonus *= 0.9"),
        ],
    ),
    "a setting of a library's layer": Way(
        ".p`",
        [
            (
                "self.critic = mlp(obs_dim, 1, output_gain=1.0)",
                f"self.critic = nn.Sequential({CRITIC}, nn.Dropout(0.1))",
            ),
            in_the_loop("agent.critic[1].p = 0.1 * iteration"),
        ],
    ),
    "a global in an inherited method": Way(
        "`SHARPNESS`",
        [
            of_the_file(f"SHARPNESS = 1.0\n\n\nclass Base(nn.Module):\n    {SHARP}"),
            ("class ActorCritic(nn.Module)", "class ActorCritic(Base)"),
            ("    run = Run(args)\n", "    global SHARPNESS\n    run = Run(args)\n"),
            (LOGITS, "(self.sharp() * self.actor(obs)).log_softmax(1)"),
            in_the_loop("SHARPNESS += 0.1"),
        ],
    ),
    "a global in a property": Way(
        "`SHARPNESS`",
        [
            of_the_file("SHARPNESS = 1.0"),
            (INIT, f"    @property\n    {SHARP}\n\n{INIT}"),
            ("    run = Run(args)\n", "    global SHARPNESS\n    run = Run(args)\n"),
            (LOGITS, "(self.sharp * self.actor(obs)).log_softmax(1)"),
            in_the_loop("SHARPNESS += 0.1"),
        ],
    ),
    "an attribute behind a method": Way(
        "`self.rate`",
        [
            of_the_file("class Decay:\n    rate = 0.01\n\n    def of(self, x):\n        return self.rate * x"),
            before_the_loop("decay = Decay()\n    bonus = decay.of"),
            (BONUS, "bonus(entropy)"),
            in_the_loop("decay.rate *= 0.9"),
        ],
    ),
    "an object that is called": Way(
        "`bonus.rate`",
        [
            of_the_file("class Bonus:\n    rate = 0.01\n\n    def __call__(self, x):\n        return self.rate * x"),
            before_the_loop("bonus = Bonus()"),
            (BONUS, "bonus(entropy)"),
            in_the_loop("bonus.rate *= 0.9"),
        ],
    ),
    "an attribute instead of its class's": Way(
        "`config.scale`",
        [
            of_the_file("class Config:\n    scale = 0.01"),
            before_the_loop("config = Config()"),
            (BONUS, "config.scale * entropy"),
            in_the_loop('vars(config).update({"scale": 0.02} if iteration > 1 else {})'),
        ],
    ),
    "an attribute in a slot": Way(
        "`config.scale`",
        [
            of_the_file("@dataclass(slots=True)\nclass Config:\n    scale: float = 0.01"),
            before_the_loop("config = Config()"),
            (BONUS, "config.scale * entropy"),
            in_the_loop("config.scale *= 0.9"),
        ],
    ),
    "an argument of a partial": Way(
        ".ent_coef`",
        [
            before_the_loop("bonus = partial(lambda own, x: own.ent_coef * x, replace(args))"),
            (BONUS, "bonus(entropy)"),
            in_the_loop("bonus.args[0].ent_coef *= 0.9"),
        ],
    ),
    "a default": Way(
        "[0]`",
        [
            before_the_loop("weights = [0.01]\n    bonus = lambda x, own=weights: own[0] * x  # noqa: E731"),
            (BONUS, "bonus(entropy)"),
            in_the_loop("weights[0] *= 0.9"),
        ],
    ),
    "an entry of a deque": Way(
        "`weights[0]`",
        [
            before_the_loop("weights = deque([args.ent_coef])"),
            (BONUS, "weights[0] * entropy"),
            in_the_loop("weights[0] *= 0.9"),
        ],
    ),
    "an entry of a set": Way(
        "`the entries of flags`",
        [
            before_the_loop("flags = {0}"),
            (BONUS, "args.ent_coef * entropy * (2 in flags)"),
            in_the_loop("flags.add(iteration)"),
        ],
    ),
    "a longer list": Way(
        "`the length of weights`",
        [
            before_the_loop("weights = [args.ent_coef]"),
            (BONUS, "sum(weights) * entropy"),
            in_the_loop("weights.append(0.1)"),
        ],
    ),
    "a name in a string": Way(
        "`config.scale`",
        [
            of_the_file("class Config:\n    def __init__(self):\n        self.scale = 0.01"),
            before_the_loop("config = Config()"),
            (BONUS, 'getattr(config, "scale") * entropy'),
            in_the_loop("config.scale *= 0.9"),
        ],
    ),
    "a global two functions deep": Way(
        "`ENT_COEF`",
        [
            of_the_file("ENT_COEF = 0.01"),
            ("    run = Run(args)\n", "    global ENT_COEF\n    run = Run(args)\n"),
            (BONUS, "(lambda x: (lambda y: ENT_COEF * y)(x))(entropy)"),
            in_the_loop("ENT_COEF *= 0.9"),
        ],
    ),
    "a setting of a layer derived from a library's": Way(
        ".p`",
        [
            of_the_file("class Drop(nn.Dropout):\n    pass"),
            ("self.critic = mlp(obs_dim, 1, output_gain=1.0)", f"self.critic = nn.Sequential({CRITIC}, Drop(0.1))"),
            in_the_loop("agent.critic[1].p = 0.1 * iteration"),
        ],
    ),
    "one of several names": Way(
        "`config.ent_scale`",
        [
            of_the_file("class Config:\n    def __init__(self):\n        self.ent_scale = self.all_scale = 0.1"),
            before_the_loop("config = Config()"),
            (BONUS, 'math.prod(getattr(config, x) for x in ("ent_scale", "all_scale")) * entropy'),
            in_the_loop("config.ent_scale *= 0.9"),
        ],
    ),
    "a name that is put together": Way(
        "`config.ent_scale`",
        [
            of_the_file("class Config:\n    def __init__(self):\n        vars(self)['ent_' + 'scale'] = 0.1"),
            before_the_loop("config = Config()"),
            (BONUS, '(lambda kind: getattr(config, f"{kind}_scale"))("ent") * entropy'),
            in_the_loop("vars(config)['ent_' + 'scale'] *= 0.9"),
        ],
    ),
    "all attributes": Way(
        "`config.ent_",
        [
            of_the_file("class Config:\n    pass"),
            before_the_loop("config = Config()\n    vars(config)['ent_' + 'scale'] = 0.1"),
            (BONUS, "sum(vars(config).values()) * entropy"),
            in_the_loop("vars(config)['ent_' + 'scale'] *= 0.9"),
        ],
    ),
    "an attribute behind a method that is an attribute": Way(
        "`self.rate`",
        [
            of_the_file("class Decay:\n    rate = 0.01\n\n    def of(self, x):\n        return self.rate * x"),
            before_the_loop("decay, agent.bonus = Decay(), None\n    agent.bonus = decay.of"),
            (BONUS, "agent.bonus(entropy)"),
            in_the_loop("decay.rate *= 0.9"),
        ],
    ),
    "an attribute behind an operator": Way(
        "`weight.number`",
        [
            of_the_file("class Weight:\n    number = 0.01\n\n    def __float__(self):\n        return self.number"),
            before_the_loop("weight = Weight()"),
            (BONUS, "float(weight) * entropy"),
            in_the_loop("weight.number *= 0.9"),
        ],
    ),
    "an attribute of a function": Way(
        "`bonus.rate`",
        [
            of_the_file("def bonus(x):\n    return bonus.rate * x\n\n\nbonus.rate = 0.01"),
            (BONUS, "bonus(entropy)"),
            in_the_loop("bonus.rate *= 0.9"),
        ],
    ),
    "a variable that has no value at first": Way(
        "`bonus`",
        [
            before_the_loop("if args.seed < 0:\n        bonus = 0.05"),
            (BONUS, "(0.01 if args.seed > 0 else bonus) * entropy"),
            in_the_loop("if iteration > 1:\n            bonus = 0.05"),
        ],
    ),
    "nothing, then a number": Way(
        "`bonus`",
        [
            before_the_loop("bonus = None"),
            (BONUS, "(0.01 if bonus is None else bonus) * entropy"),
            in_the_loop("bonus = 0.05 if iteration > 1 else None"),
        ],
    ),
}
each_way = pytest.mark.parametrize("way", list(WAYS))


@each_way
def test_number_that_changes_is_refused_by_name(copy, train_copy, capsys, way):
    """Uncompiled, as all is refused before anything compiled is called; the like of it compiled is below."""
    module = copy("ppo_torchcompile", *WAYS[way].changes)
    with pytest.raises(SystemExit) as end:
        train_copy(module, "ppo_torchcompile", compile=False)
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and WAYS[way].name in error
    assert "at the first call" in error or "of the first call" in error
    assert "change it in place" in error or "from the first call on" in error


@pytest.mark.parametrize(
    "kind", ["random.Random(1)", "iter([0.01] * 99)", "np.array(0.01)", "np.random.default_rng(1)"]
)
def test_what_compiled_code_would_read_once_is_refused(copy, train_copy, capsys, kind):
    """It stays the same object, and gives another number each time."""
    read = "next(source)" if "iter" in kind else "float(source)" if "array" in kind else "source.random()"
    changes = [before_the_loop(f"source = {kind}"), (BONUS, f"{read} * entropy")]
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", *changes), "ppo_torchcompile", compile=False)
    assert end.value.code == 2 and "`source` is a " in capsys.readouterr().err


def test_what_is_refused_for_an_object_behind_it_says_what_to_do(copy, train_copy, capsys):
    """The whole of `envs` is behind a method, and with it arrays, of which compiled code might read any."""
    with pytest.raises(SystemExit) as end:
        change = BONUS, "args.ent_coef * entropy * (envs.last_obs is not None and envs.explain is not None)"
        train_copy(copy("ppo_torchcompile", change), "ppo_torchcompile", compile=False, sync_envs=True)
    error = capsys.readouterr().err
    assert end.value.code == 2 and "if it needs a constant of `envs`, read that before" in error
    assert "for a number that changes make a tensor, filled in the loop" in error


@pytest.mark.parametrize("read", ["run.args.ent_coef", "math.log(envs.action_space.n)", "(run.device.type == 'cpu')"])
def test_constants_of_an_object_that_changes_may_be_read(copy, train_copy, read):
    change = BONUS, f"args.ent_coef * entropy * {read}"
    train_copy(copy("ppo_torchcompile", change), "ppo_torchcompile", compile=False, sync_envs=True)


def test_a_counter_of_an_object_that_changes_is_refused_by_name(copy, train_copy, capsys):
    with pytest.raises(SystemExit) as end:
        change = BONUS, "args.ent_coef * entropy * (1 - run.step / args.total_timesteps)"
        train_copy(copy("ppo_torchcompile", change), "ppo_torchcompile", compile=False, sync_envs=True)
    assert end.value.code == 2 and "`run.step` was " in capsys.readouterr().err


def test_a_hook_that_compiled_code_would_not_call_is_refused(copy, train_copy, capsys):
    hook = before_the_loop("agent.critic[0].weight.register_hook(lambda gradient: 0 * gradient)")
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", hook), "ppo_torchcompile", compile=False)
    assert end.value.code == 2 and "has a hook, which compiled code does not call" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        ("weight_decay=0,", "weight_decay=0.1,"),
        ("+ self.eps\n", "+ 1e-3\n"),
        ("part.view_as(weight) for", "part.view_as(weight) * (1.1 if weight.ndim > 1 else 1.0) for"),
    ],
    ids=["kernel", "formula", "formula of matrices"],
)
def test_adam_whose_formula_is_not_its_kernel_is_refused(copy, train_copy, capsys, change):
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", change), "ppo_torchcompile", compile=True)
    assert end.value.code == 2 and "`by_kernel` differ: change both" in capsys.readouterr().err


@pytest.mark.parametrize("zero", ["0.0", "0"])
def test_an_argument_of_adam_that_is_zero_by_default_is_seen(copy, train_copy, capsys, zero):
    """The usual way to give it weight decay, in the kernel alone: compiled code would leave it out."""
    changes = [
        ("betas: tuple = (0.9, 0.999)):", f"betas: tuple = (0.9, 0.999), decay: float = {zero}):"),
        (
            "self.eps, self.betas = list(module.parameters()), eps, betas",
            "self.eps, self.betas, self.decay = (list(module.parameters()), eps, betas, decay)",
        ),
        ("weight_decay=0,", "weight_decay=self.decay,"),
        ("Adam(agent, args.learning_rate, eps=1e-5)", "Adam(agent, args.learning_rate, eps=1e-5, decay=0.1)"),
    ]
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", *changes), "ppo_torchcompile", compile=True)
    assert end.value.code == 2 and "`by_kernel` differ: change both" in capsys.readouterr().err


def test_a_subclass_of_adam_that_changes_its_kernel_alone_is_refused(copy, train_copy, capsys):
    kernel = """
class Decaying(Adam):
    def by_kernel(self, gradients, *betas):
        torch._foreach_mul_(self.weights, 0.999)
        super().by_kernel(gradients, *betas)


"""
    changes = ("def compiled(", f"{kernel}def compiled("), ("optimizer = Adam(agent,", "optimizer = Decaying(agent,")
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", *changes), "ppo_torchcompile", compile=True)
    assert end.value.code == 2 and "`by_formula` of `Decaying`" in capsys.readouterr().err


def scaled(arguments: str) -> str:
    """A subclass of Adam for which the integer 0 is an index, and must stay one."""
    return f"""
class Scaled(Adam):
    def __init__(self, module, learning_rate, {arguments}):
        super().__init__(module, learning_rate, eps=1e-5)
        self.group, self.scales = 0, scales

    def step(self, gradients):
        super().step(tuple(self.scales[self.group] * gradient for gradient in gradients))


def compiled("""


@pytest.mark.slow
def test_a_subclass_of_adam_with_an_index_that_is_zero_is_no_error(copy, train_copy):
    adam = "optimizer = Adam(agent, args.learning_rate, eps=1e-5)", "optimizer = Scaled(agent, args.learning_rate)"
    module = copy("ppo_torchcompile", ("def compiled(", scaled("scales=(1.0, 0.5)")), adam)
    assert len(train_copy(module, "ppo_torchcompile", compile=True)) > 3


def test_a_subclass_of_adam_that_cannot_be_checked_is_refused(copy, train_copy, capsys):
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", ("def compiled(", scaled("scales"))), "ppo_torchcompile", compile=True)
    assert (
        end.value.code == 2 and "`Scaled` must work with a module and `learning_rate` alone" in capsys.readouterr().err
    )


def test_a_number_on_the_cpu_that_a_graph_reads_is_refused(capsys):
    """A graph of a GPU would keep its first value. Another device stands for that here."""
    script = load("ppo_torchcompile")
    weight, scale, own = torch.ones(2, device="meta"), torch.tensor(1.0), torch.tensor(1.0, device="meta")
    names = ["weight", "scale"]
    script.check_places(names, [weight, scale], is_graph=False)
    script.check_places(names, [weight, own], is_graph=True)
    script.check_places(names, [torch.ones(2), scale], is_graph=True)
    with pytest.raises(SystemExit) as end:
        script.check_places(names, [weight, scale], is_graph=True)
    assert end.value.code == 2 and "`scale` lies on the CPU" in capsys.readouterr().err


@pytest.mark.slow
def test_each_size_is_compiled_by_itself():
    """A branch on a size is part of the graph of that size, and others have graphs of their own."""
    script = load("ppo_torchcompile")
    (function,) = script.compiled(torch.device("cpu"), lambda x: x.sum() * (2 if len(x) < 20 else 1))
    function = script.refuse_changes(function)
    for size in (10, 30, 50, 15, 30):
        assert function(torch.ones(size)) == size * (2 if size < 20 else 1)


@pytest.mark.slow
def test_a_part_that_a_setting_leaves_out_may_have_no_value(copy, train_copy, small_run):
    """As `if args.rnd: rnd = ...` leaves `rnd` without one. Compiled code does not read it, either."""
    changes = [
        before_the_loop("if args.seed < 0:\n        bonus = 0.05"),
        (BONUS, "(bonus if args.seed < 0 else args.ent_coef) * entropy"),
    ]
    for compile in (False, True):
        log = train_copy(copy("ppo_torchcompile", *changes), "ppo_torchcompile", compile=compile)
        assert log[0] == pytest.approx(small_run("ppo").metrics()[0], rel=1e-3, abs=1e-5) and len(log) > 3


@pytest.mark.parametrize("way", ["by_kernel", "by_formula"])
def test_adam_begins_anew_as_its_docstring_says(way):
    """Its first step is then, as a first step is, the learning rate in the direction of the gradient."""
    weight = nn.ParameterList([torch.zeros(3)])
    adam = load("ppo_torchcompile").Adam(weight, learning_rate=0.1)
    adam.by_kernel = getattr(adam, way)
    for _ in range(5):
        adam.step((torch.ones(3),))
    for zeroed in (adam.exp_avg, adam.exp_avg_sq, adam.steps):
        zeroed.zero_()
    adam.beta_powers.fill_(1)
    before = weight[0].detach().clone()
    adam.step((torch.tensor([-0.3, 2.0, 50.0]),))
    torch.testing.assert_close(weight[0].detach() - before, torch.tensor([0.1, -0.1, -0.1]), rtol=1e-4, atol=0)


def test_a_weight_without_a_gradient_is_named_where_it_cannot_be_compiled(copy, train_copy, capsys):
    change = (
        f"        self.critic = {CRITIC}\n",
        f"        self.critic = {CRITIC}\n        self.more = nn.Linear(2, 2)\n",
    )
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", change), "ppo_torchcompile", compile=True)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "appears to not have been used in the graph" in error


GONE = {
    "KeyError('entropy')": [
        before_the_loop('weights = {"entropy": args.ent_coef}'),
        (BONUS, 'weights.get("entropy", 1) * entropy'),
        in_the_loop('weights.update(other=weights.pop("entropy", None)) if iteration > 1 else None'),
    ],
    "ValueError('Cell is empty')": [
        before_the_loop("bonus = 0.05"),
        (BONUS, "bonus * entropy"),
        in_the_loop("if iteration == 2:\n            del bonus"),
    ],
}


@pytest.mark.parametrize("error", GONE)
def test_an_entry_or_a_variable_that_is_gone_is_refused(copy, train_copy, capsys, error):
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", *GONE[error]), "ppo_torchcompile", compile=False)
    assert end.value.code == 2 and f"no longer exists: {error}" in capsys.readouterr().err


def test_what_cannot_be_compiled_is_refused_in_one_line(copy, train_copy, capsys):
    change = BONUS, "args.ent_coef * entropy * (1 if float(entropy) > 0 else 2)"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", change), "ppo_torchcompile")
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and error.startswith("error: this can't be compiled: ")
    assert "--no-compile does without" in error and "copy0_of_ppo" in error
    assert "float(entropy)" in error  # the line itself


@pytest.mark.slow
def test_an_optimizer_of_torch_that_cannot_be_compiled_is_refused_with_what_takes_its_place(copy, train_copy, capsys):
    step = "optimizer.step(clip(torch.autograd.grad(loss, optimizer.weights), args.max_grad_norm))"
    made = "optimizer = Adam(agent, args.learning_rate, eps=1e-5)"
    twin = copy(
        "ppo_torchcompile",
        (made, f"{made}\n    adamw = torch.optim.AdamW(agent.parameters())"),
        (step, "adamw.zero_grad()\n        loss.backward()\n        adamw.step()"),
    )
    with pytest.raises(SystemExit) as end:
        train_copy(twin, "ppo_torchcompile")
    assert end.value.code == 2 and "use `Adam` instead of an optimizer of torch.optim" in capsys.readouterr().err


def test_what_a_library_can_not_compile_is_shown_where_the_copy_asks_for_it(copy, train_copy, capsys):
    change = "        loss = policy_loss +", "        agent.requires_grad_(False)\n        loss = policy_loss +"
    with pytest.raises(SystemExit):
        train_copy(copy("ppo_torchcompile", change), "ppo_torchcompile")
    assert "in update_minibatch: agent.requires_grad_(False); " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("way", ["a local of train", "a setting", "a global", "an attribute of the optimizer"])
def test_eager_copy_follows_the_change(copy, train_copy, small_run, way):
    """From the second update on: the first one has the number of the file."""
    plain, log = small_run("ppo").metrics(), train_copy(copy("ppo", *WAYS[way].changes), "ppo")
    first = 1 if way == "a local of train" else 0  # the others change it before the first update, too
    assert log[:first] == plain[:first]
    assert len(log) == len(plain) and all(a != b for a, b in zip(log[first:], plain[first:], strict=True))


@pytest.mark.slow
def test_compiled_copy_follows_a_tensor_and_refuses_a_number(copy, train_copy, tmp_path, capsys):
    """What changes is a tensor for four updates, which agree with the eager copy's; then it is a number."""
    changes = [
        before_the_loop("ent_coef, vf_coef = torch.tensor(args.ent_coef), args.vf_coef"),
        ("args.vf_coef * value_loss - " + BONUS, "vf_coef * value_loss - ent_coef * entropy"),
        in_the_loop("ent_coef.fill_(0.3 * iteration)\n        vf_coef = args.vf_coef if iteration < 4 else 0.1"),
    ]
    settings = {"env_id": "OwnStream-v0", "clip_coef": 0.1}
    followed = train_copy(copy("ppo", *changes), "ppo", **settings)
    plain = train_copy(load("ppo"), "ppo", **settings)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", *changes), "ppo_torchcompile", **settings)
    assert end.value.code == 2 and "`vf_coef` was 0.5" in capsys.readouterr().err
    compiled = metrics_of(tmp_path / "copy_run2")
    assert len(compiled) == 4
    for ours, theirs, other in zip(compiled, followed, plain, strict=False):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert ours["global_step"] < 128 or ours["losses/entropy"] != pytest.approx(other["losses/entropy"], rel=1e-2)


@pytest.mark.parametrize("name", COMPILED)
def test_every_twin_refuses_a_setting_that_changes(copy, train_copy, capsys, name):
    if on_policy(name):
        change, setting = in_the_loop("args.clip_coef *= 0.9"), "`args.clip_coef`"
    else:
        loop = "    while run.goes_on():\n"
        change, setting = (loop, f"{loop}        args.gamma = 0.9 if run.step < 150 else 0.8\n"), "`args.gamma`"
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, change), name, compile=False)
    assert end.value.code == 2 and setting in capsys.readouterr().err


def test_methods_of_a_class_are_no_change(copy, train_copy):
    """Python makes a new object of a classmethod at each access."""
    methods = f"    @classmethod\n    def sharp(cls):\n        return 1.0\n\n{INIT}"
    change = (LOGITS, "(self.sharp() * self.actor(obs)).log_softmax(1)")
    assert len(train_copy(copy("ppo_torchcompile", (INIT, methods), change), "ppo_torchcompile", compile=False)) > 1


STEPS = {  # a number that the loop around the compiled function counts up
    "sac_continuous_action_torchcompile": [
        ("for _ in range(args.policy_frequency)", "for k in range(args.policy_frequency)"),
        ("actor_metrics = step_actor(obs)", "actor_metrics = step_actor(obs, k)"),
        ("def step_actor(obs: Tensor)", "def step_actor(obs: Tensor, k: int)"),
    ],
    "ppo_torchcompile": [
        (
            "update_minibatch(index, *batch) for index in permutation]",
            "update_minibatch(k, index, *batch) for k, index in enumerate(permutation)]",
        ),
        ("def update_minibatch(index: Tensor", "def update_minibatch(k: int, index: Tensor"),
    ],
}


@pytest.mark.slow
def test_what_the_loop_hands_over_must_be_a_tensor(copy, train_copy, capsys):
    module = copy(
        "dqn_torchcompile", ("losses = update()", "losses = update(run.step)"), ("def update()", "def update(_)")
    )
    with pytest.raises(SystemExit):
        train_copy(module, "dqn_torchcompile", **quick("dqn"), compile=True)
    assert "`update` takes tensors alone, by position, not `int`" in capsys.readouterr().err


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_given_a_number_is_refused(copy, train_copy, capsys, name):
    """What is compiled is called by plain functions: the number would stay what it was at first."""
    with pytest.raises(SystemExit):
        train_copy(copy(name, *STEPS[name]), name, **quick(name.removesuffix("_torchcompile")), compile=True)
    called = {"sac_continuous_action_torchcompile": "step_actor", "ppo_torchcompile": "update_minibatch"}[name]
    assert f"`{called}` takes tensors alone, by position, not `int`" in capsys.readouterr().err


def test_cache_of_a_library_may_change():
    """Functions of libraries are not looked into: `match` reads a cache, whose entries come and go."""
    match, x = re.match, torch.zeros(())
    function = load("ppo_torchcompile").refuse_changes(lambda x: x if match("a", "a") else None)
    for _ in range(3):
        assert function(x) is x
        re.purge()


def test_packages_are_libraries_in_whatever_folder(copy, tmp_path, monkeypatch):
    """By what pip leaves beside them; but a file is no library for what was installed into its own folder."""
    folder = tmp_path / "more"
    for path in (tmp_path, folder):
        (path / "thing-1.0.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(path)
    (folder / "thing_of_pip.py").write_text("def f(): pass")
    (tmp_path / "thing_of_mine.py").write_text("def f(): pass")
    module = copy("ppo_torchcompile")
    theirs, mine = (importlib.import_module(name).f for name in ("thing_of_pip", "thing_of_mine"))
    assert not module.is_own(theirs) and not module.is_own(torch.nn.Linear) and not module.is_own(re.match)
    assert module.is_own(mine) and module.is_own(module.gae) and module.is_own(module.Args)


def test_a_late_change_is_found_within_15_calls(capsys):
    """Whichever of many numbers it is."""
    for name in ("a", "b", "c", "d", "e", "f", "g", "h", "i"):
        own = SimpleNamespace(a=1, b=2, c=3, d=4, e=5, f=6, g=7, h=8, i=9)
        function = load("ppo_torchcompile").refuse_changes(
            lambda x, own=own: x + own.a + own.b + own.c + own.d + own.e + own.f + own.g + own.h + own.i
        )
        for _ in range(110):
            function(torch.zeros(()))
        setattr(own, name, 0)
        with pytest.raises(SystemExit):
            for _ in range(15):
                function(torch.zeros(()))
        assert f".{name}` was" in capsys.readouterr().err


@pytest.mark.parametrize("period", [8, 64, 800])
def test_a_change_for_one_call_in_many_is_found_in_the_end(capsys, period):
    """Whatever the period is: no part of what is checked goes with it."""
    own = SimpleNamespace(**{f"x{i}": i for i in range(8)})
    function = load("ppo_torchcompile").refuse_changes(
        lambda x: x + own.x0 + own.x1 + own.x2 + own.x3 + own.x4 + own.x5 + own.x6 + own.x7
    )
    with pytest.raises(SystemExit):
        for i in range(60 * period):
            own.x3 = 0 if i > 100 and i % period == 0 else 3
            function(torch.zeros(()))
    assert "x3` was 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMPILED)
def test_unchanged_twin_is_not_refused(name, train):
    """Past the first calls, with all that the loop itself changes."""
    assert len(train(name, compile=False, **quick(name)).lines) > 3


# Other networks


def layers_of(*parts) -> list[nn.Module]:
    return [nn.Linear(*part) if isinstance(part, tuple) else part for part in parts]


class Wide(nn.Module):
    """No Sequential, and no layer that follows another."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.a(x) * self.b(x).sigmoid()


NETWORKS = {
    "tanh then ReLU": lambda: nn.Sequential(*layers_of((5, 8), nn.Tanh(), (8, 8), nn.ReLU(), (8, 3))),
    "ReLU then tanh": lambda: nn.Sequential(*layers_of((5, 8), nn.ReLU(), (8, 8), nn.Tanh(), (8, 3))),
    "SiLU": lambda: nn.Sequential(*layers_of((5, 8), nn.SiLU(), (8, 8), nn.SiLU(), (8, 3))),
    "GELU after tanh": lambda: nn.Sequential(*layers_of((5, 8), nn.Tanh(), (8, 8), nn.GELU(), (8, 3))),
    "layer norm": lambda: nn.Sequential(*layers_of((5, 8), nn.LayerNorm(8), nn.Tanh(), (8, 3))),
    "layer norm for an activation": lambda: nn.Sequential(*layers_of((5, 8), nn.LayerNorm(8), (8, 3))),
    "no bias": lambda: nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)),
    "no bias at the end": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)),
    "no hidden layer": lambda: nn.Linear(5, 3),
    "an activation at the end": lambda: nn.Sequential(*layers_of((5, 8), nn.Tanh(), (8, 3), nn.Tanh())),
    "no Sequential": Wide,
    "a Sequential within": lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.ReLU(), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())
def test_numpy_mlp_is_the_module_whatever_its_layers(make):
    torch.manual_seed(1)
    net, x = make(), torch.randn(16, 5)
    forward = defining("numpy_mlp").numpy_mlp(net)
    for _ in range(2):
        result = forward(x.numpy())
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, net(x).detach().numpy(), rtol=1e-5, atol=1e-6)
        with torch.no_grad():  # it follows
            for parameter in net.parameters():
                parameter.mul_(1.5).add_(0.1)


OTHER_FORWARD = {
    "ppo": ("self.actor(obs).log_softmax(1)", "self.actor(3 * obs).log_softmax(1)"),
    "ppo_continuous_action": ("self.actor(obs)", "self.actor(obs).tanh()"),  # the same at first, but for 1e-6
    "ppo_env_pool": ("output, value = self.actor(obs)", "output, value = 2 + self.actor(obs)"),
    "dqn": ("self.net(obs)", "self.net(obs) + 0.1"),
}


@pytest.mark.parametrize("name", [name for name in EAGER if "numpy_mlp(" in Path(load(name).__file__).read_text()])
def test_policy_that_acts_otherwise_than_it_learns_is_refused(copy, train_copy, tmp_path, capsys, name):
    """`forward` has something that `numpy_mlp` of its network does not see."""
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, OTHER_FORWARD[name]), name)
    assert end.value.code == 2 and "the policy that acts differs" in capsys.readouterr().err
    assert not (tmp_path / "copy_run0").exists()


SHARPER = {
    "ppo": ("self.actor(obs).log_softmax(1)", "(SHARP[0] * self.actor(obs)).log_softmax(1)"),
    "ppo_continuous_action": ("self.actor(obs)", "SHARP[0] * self.actor(obs)"),
    "ppo_env_pool": ("output, value = self.actor(obs)", "output, value = SHARP[0] * self.actor(obs)"),
    "dqn": ("self.net(obs)", "SHARP[0] * self.net(obs)"),
}


@pytest.mark.parametrize("name", SHARPER)
def test_a_schedule_that_acting_does_not_follow_is_refused_once_it_changes(copy, train_copy, tmp_path, capsys, name):
    """Nothing tells before that `forward` reads a global number, which `numpy_mlp` does not."""
    loop = LOOP if on_policy(name) else "    while run.goes_on():\n"
    unit = "iteration > 1" if on_policy(name) else "run.step > 150"
    change = loop, f"{loop}        SHARP[0] = 1.0 + 500 * ({unit})\n"
    network = "class QNetwork(" if name == "dqn" else "class ActorCritic("
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, (network, f"SHARP = [1.0]\n\n\n{network}"), SHARPER[name], change), name)
    assert end.value.code == 2 and "the policy that acts differs" in capsys.readouterr().err
    assert len((tmp_path / "copy_run0/metrics.jsonl").read_text().splitlines()) >= 1


def test_a_random_forward_of_a_network_for_frames_is_refused(copy, train_copy, capsys):
    """No layer tells that it is; what acts would draw other masks than what learns."""
    head = "return self.actor(x).log_softmax(1)"
    change = (head, "return (50 * self.actor(nn.functional.dropout(x, 0.5))).log_softmax(1)")
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_atari_envpool", change), "ppo_atari_envpool", num_steps=32, total_timesteps=1024)
    assert end.value.code == 2 and "`forward` is random" in capsys.readouterr().err


THRICE = "net = numpy_mlp({}); {} = lambda x: net(3 * x)"


@pytest.mark.parametrize(
    ("name", "acts", "forward", "kind", "part"),
    [
        ("ppo", "policy = numpy_mlp(collector.actor)", "self.actor(obs).log_softmax(1)", "ActorCritic", "agent"),
        ("ppo_continuous_action", "policy = numpy_mlp(collector.actor)", "self.actor(obs)", "ActorCritic", "agent"),
        ("dqn", "q_values = numpy_mlp(collector.net)", "self.net(obs)", "QNetwork", "network"),
    ],
)
def test_policy_of_a_checkpoint_is_that_of_forward(copy, train_copy, tmp_path, name, acts, forward, kind, part):
    """A copy in which `forward` and the policy that acts are changed alike is evaluated as it learnt."""
    function, _, net = acts.rstrip(")").replace("numpy_mlp(", "").partition(" = ")
    changes = (forward, forward.replace("(obs)", "(3 * obs)")), (acts, THRICE.format(net, function))
    module = copy(name, *changes)
    train_copy(module, name, **quick(name))
    checkpoint = torch.load(tmp_path / "copy_run0" / "checkpoint.pt", weights_only=True)
    envs = module.Envs(module.Args(**checkpoint["args"] | {"num_envs": 1}), [1])
    actions = envs.action_space
    network = getattr(module, kind)(envs.obs_dim, 2 if name == "ppo_continuous_action" else int(actions.n))
    network.load_state_dict(checkpoint[part])
    obs = np.random.default_rng(1).normal(size=(1000, envs.obs_dim)).astype(np.float32)
    policy = module.load_policy(checkpoint, envs)
    if name == "ppo_continuous_action":
        norm = module.RunningNorm((envs.obs_dim,))
        norm.load_state_dict(checkpoint["obs_norm"])
        expected = network(torch.from_numpy(norm(obs)).float())[0].detach().numpy().clip(actions.low, actions.high)
    else:
        output = network(torch.from_numpy(obs))
        expected = actions.start + (output[0] if name == "ppo" else output).argmax(1).numpy()
    np.testing.assert_allclose(policy(obs), expected, rtol=1e-4, atol=1e-6)
    envs.close()


OPEN = {True: "    run.open(envs, agent=agent, optimizer=optimizer)\n"}
OPEN[False] = "    run.open(envs, network=network, target_network=target_network, optimizer=optimizer, **buffers)\n"


def test_a_policy_acts_without_the_checkout_as_the_page_says(train_copy, copy, tmp_path):
    """docs/use.md: by the class, the weights, and the statistics of observations."""
    module = copy("ppo_continuous_action")
    train_copy(module, "ppo_continuous_action")
    page = (ROOT / "docs/use.md").read_text().partition("Without the checkout")[2]
    code = page.partition("```python\n")[2].partition("```")[0].replace("RUN_DIR", str(tmp_path / "copy_run0"))
    envs = module.Envs(module.Args(env_id="tiny_envs:Stream-v0"), [1])
    obs = 3 * np.random.default_rng(1).normal(size=(50, envs.obs_dim))
    names = {"ActorCritic": module.ActorCritic, "torch": torch, "obs": obs, "obs_dim": envs.obs_dim}
    names |= {"action_dim": 2, "low": envs.action_space.low, "high": envs.action_space.high}
    exec(code, names)
    policy = module.load_policy(names["checkpoint"], envs)
    np.testing.assert_allclose(names["action"], policy(obs), rtol=1e-5, atol=1e-6)
    assert np.ptp(names["action"]) > 0.01


@pytest.mark.parametrize(
    ("part", "why"), [("rng=optimizer", " can't keep `rng` in checkpoints"), ("scale=torch.ones(1)", ": `scale` needs")]
)
def test_what_a_checkpoint_could_not_give_back_is_refused(copy, train_copy, tmp_path, capsys, part, why):
    change = (OPEN[True], OPEN[True].replace("optimizer=optimizer", f"optimizer=optimizer, {part}"))
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo", change), "ppo")
    assert end.value.code == 2 and f"`run.open`{why}" in capsys.readouterr().err
    assert not (tmp_path / "copy_run0").exists()


def test_a_network_of_indices_is_told_how_to_do_without_the_check(copy, train_copy, capsys):
    """The check's observations are any numbers, also negative ones."""
    table = of_the_file("TABLE = torch.zeros(3)")
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo", table, (LOGITS, f"({LOGITS} + TABLE[obs.long()].sum())")), "ppo")
    assert end.value.code == 2 and "leave out `check_policy`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_the_best_policy_is_kept_as_the_page_says(copy, train_copy, tmp_path, name):
    """docs/use.md: the one with the highest mean of the last 100 returns."""
    page = (ROOT / "docs/use.md").read_text()
    start, lines = re.search(r"```python\n( +best = .*?)```\n.*?```python\n(.*?)```", page, re.DOTALL).groups()
    log = re.search(r"\n +run\.log\(.*\n", source_of(name))[0]
    lines = lines.replace("\n", "\n    ") if name == "dqn" else lines
    module = copy(
        name,
        (OPEN[on_policy(name)], OPEN[on_policy(name)] + start),
        (log, log + ("    " * (name == "dqn") + lines).rstrip() + "\n"),
        ("import shlex", "import shlex\nimport shutil"),
    )
    train_copy(module, name, total_timesteps=1500, **({} if name == "ppo" else {"learning_starts": 50}))
    folder = tmp_path / "copy_run0"
    best, last = (torch.load(folder / f"{x}.pt", weights_only=True) for x in ("best", "checkpoint"))
    assert 0 < best["global_step"] <= last["global_step"] and float((folder / "best.txt").read_text()) < 0
    (folder / "best.txt").write_text("1e9")  # better than all to come: a resumed run does not forget it
    module.train(module.Args(resume=str(folder), total_timesteps=3000, device="cpu"))
    assert torch.load(folder / "best.pt", weights_only=True)["global_step"] == best["global_step"]


@pytest.mark.parametrize("layer", ["nn.Linear(64, 64), nn.Tanh()", "nn.LayerNorm(64)"])
def test_a_layer_more_begins_orthogonal_and_the_last_one_small(copy, train_copy, layer):
    module = copy("ppo", ("nn.Linear(64, outputs),", f"{layer}, nn.Linear(64, outputs),"))
    train_copy(module, "ppo")
    layers = [x for x in module.mlp(3, 2, output_gain=0.01) if isinstance(x, nn.Linear)]
    found = [torch.linalg.svdvals(x.weight).mean().item() for x in layers]
    assert found == pytest.approx([2**0.5] * (len(layers) - 1) + [0.01], rel=1e-4)


@pytest.mark.parametrize("name", ["impala_ray", "a3c_ray"])
def test_a_metric_more_changes_no_other(copy, tmp_path, name):
    """Wherever it is added, it is a mean over the rows that count."""
    metrics = re.search(r"stack\(\[(policy_loss, value_loss, entropy.*?)\]\)", source_of(name))[1]
    module, logs = copy(name, (metrics, f"{metrics}, 7 * valid.sum()")), []
    module.METRICS += ("losses/seven",)
    for script in (load(name), module):
        run_dir = tmp_path / script.__name__
        script.train(script.Args(**helpers.small_settings(name) | {"run_dir": str(run_dir), "device": "cpu"}))
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        logs.append([{k: v for k, v in line.items() if k.startswith("losses/")} for line in lines])
    assert all(line.pop("losses/seven") == pytest.approx(7) for line in logs[1]) and logs[0] == logs[1]


NO_LOG_STD = "self.actor(obs), self.log_std, "


def test_noise_is_of_the_std_that_forward_gives(copy, train_copy):
    module, actions = copy("ppo_continuous_action", (NO_LOG_STD, "self.actor(obs), self.log_std.clamp(-9, -5), ")), []
    step = module.Envs.step
    with mock.patch.object(module.Envs, "step", lambda envs, action: (actions.append(action), step(envs, action))[1]):
        train_copy(module, "ppo_continuous_action", total_timesteps=64, num_steps=64)
    assert 0.001 < np.std(actions) < 0.03  # by the parameter alone it would be some 0.6


def test_a_std_that_depends_on_the_observation_is_refused(copy, train_copy, capsys):
    change = (NO_LOG_STD, "self.actor(obs), self.log_std + self.actor(obs), ")
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_continuous_action", change), "ppo_continuous_action")
    assert end.value.code == 2 and "the policy that acts differs" in capsys.readouterr().err


@pytest.mark.parametrize("size", [1.0, 255.0, 1e4])
def test_a_tenth_more_of_each_logit_is_seen_whatever_the_size_of_observations(size, capsys):
    """But rounding is not, by NumPy and PyTorch."""
    script, generator = load("ppo"), np.random.default_rng(1)
    torch.manual_seed(1)
    agent, obs = script.ActorCritic(8, 4), (size * generator.normal(size=(64, 8))).astype(np.float32)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(100)
        learnt = agent.actor(torch.from_numpy(obs))
    acted = script.numpy_mlp(agent.actor)(obs)
    script.check_same(acted, learnt, obs)
    with pytest.raises(SystemExit):
        script.check_same(1.1 * acted, learnt, obs)
    assert "the policy that acts differs" in capsys.readouterr().err


@pytest.mark.parametrize("least", [-1e8, -1e9, -np.inf])
def test_masked_logits_do_not_hide_that_the_others_differ(least, capsys):
    script, generator = load("ppo"), np.random.default_rng(1)
    logits, obs = generator.normal(size=(64, 4)), generator.normal(size=(64, 8))
    masked = np.where(generator.random((64, 4)) < 0.5, least, logits)
    script.check_same(masked, torch.from_numpy(masked), obs)
    for others in (np.where(masked < -1e7, masked, 1.1 * logits), logits):  # a factor, or the mask, was forgotten
        with pytest.raises(SystemExit):
            script.check_same(others, torch.from_numpy(masked), obs)
        assert "the policy that acts differs" in capsys.readouterr().err


CHANGED_DRAWS = [
    ("ppo", "policy(obs[t]) + gumbel[t]", "policy(obs[t]) / 5 + gumbel[t]"),
    ("ppo", "policy(obs[t]) + gumbel[t]", "policy(obs[t] / 255) + gumbel[t]"),
    ("ppo", "policy(obs[t]) + gumbel[t]", "policy(obs[t]) + [[0, 0, -1e8]] + gumbel[t]"),
    ("ppo_continuous_action", "policy(obs[t]) + noise[t]", "policy(obs[t]) + 0.5 * noise[t]"),
    ("ppo_continuous_action", "policy(obs[t]) + noise[t]", "policy(obs[t] / 255) + noise[t]"),
    ("ppo_continuous_action", "policy(obs[t]) + noise[t]", "(policy(obs[t]) + noise[t]).clip(-0.01, 0.01)"),
    ("ppo", "= noisy_logits.argmax(1)\n", "= action[t - 1]  # sticky\n"),
    ("ppo_env_pool", "policy(obs[t, ready]) + noise[t, ready]", "policy(obs[t, ready]) / 5 + noise[t, ready]"),
    ("ppo_env_pool", "policy(obs[t, ready]) + noise[t, ready]", "policy(obs[t, ready] / 255) + noise[t, ready]"),
    ("ppo_env_pool", "else sample[t, ready]\n", "else sample[t, ready].clip(-0.01, 0.01)\n"),
]


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
@pytest.mark.parametrize(("name", "old", "new"), CHANGED_DRAWS)
def test_a_change_of_how_actions_are_drawn_that_learning_does_not_know_is_refused(
    copy, train_copy, capsys, name, old, new, twin
):
    """Learning computes the log-probabilities again, so it would take them for on-policy."""
    layers = ("output_gain=0.01", "output_gain=3.0")  # else the logits of a new network are all about zero
    settings = {"compile": False} if twin else {}
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name + twin, (old, new), layers), name, **settings)
    assert end.value.code == 2 and "or are changed after they are drawn" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous_action"])
def test_batch_norm_in_the_critic_of_ppo_works(copy, train_copy, tmp_path, name):
    """Its statistics are of what it learns from: to act, or to look at the standard deviation, changes nothing."""
    change = ("self.critic = mlp(obs_dim, 1,", "self.critic = nn.Sequential(nn.BatchNorm1d(obs_dim)) + mlp(obs_dim, 1,")
    train_copy(copy(name, change), name)
    (path,) = tmp_path.glob("copy_run*/checkpoint.pt")
    saved = torch.load(path)
    batches = 1 + saved["args"]["update_epochs"] * saved["args"]["num_minibatches"]  # one to estimate advantages
    assert saved["agent"]["critic.0.num_batches_tracked"] == saved["iteration"] * batches > 1


def test_one_standard_deviation_for_all_dimensions_works(copy, train_copy):
    change = ("self.log_std = nn.Parameter(torch.zeros(action_dim))", "self.log_std = nn.Parameter(torch.zeros(1))")
    assert len(train_copy(copy("ppo_continuous_action", change), "ppo_continuous_action")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_noise_that_falls_to_zero_works_as_the_page_says(copy, train_copy, twin):
    """docs/td3.md: three lines, and no change is refused."""
    page = (ROOT / "docs/td3.md").read_text().partition("exploration noise that falls to zero:")[2]
    first, act, fill = page.partition("```python\n")[2].partition("\n```")[0].split("\n    ...\n")
    name, loop = f"td3_continuous_action{twin}", "    while run.goes_on():\n"
    old = "        return actor.noisy(inputs[:, :-action_dim], args.exploration_noise, noise=inputs[:, -action_dim:])"
    before = "    @torch.no_grad()\n    def act("
    module = copy(name, (before, f"{first}\n{before}"), (old, act), (loop, f"{loop}{fill}\n"))
    lines = train_copy(module, name.removesuffix(twin), exploration_noise=5.0, learning_rate=0.0)
    assert lines[-1]["global_step"] == 400
    actions, space = np.stack(tiny_envs.received), tiny_envs.PUSH
    at_a_bound = (np.isclose(actions, space.low) | np.isclose(actions, space.high)).mean(1)
    assert at_a_bound[110:160].mean() > 0.5 > 0.2 > at_a_bound[-8:].mean()  # the noise of act, large at first


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_a_std_that_depends_on_the_observation_works_as_the_page_says(copy, train_copy, twin):
    """docs/ppo.md: four lines change, and the first update sees the policy that collected."""
    page = (ROOT / "docs/ppo.md").read_text().partition("**A standard deviation that depends on")[2]
    lines = page.partition("```python\n")[2].partition("```")[0].splitlines()
    source, name = source_of(f"ppo_continuous_action{twin}"), "ppo_continuous_action"
    function = re.search(r"    def acting_log_std\(\) -> Tensor:\n(?:        .*\n)+\n", source)[0]
    check = re.search(r"    check_policy\(\n        lambda obs: acting_log_std.*\n    \)\n", source)[0]
    begins = ("        log_prob = normal", "        entropy = ", "        noise = ", "            action[t] = policy")
    old = [next(line for line in source.splitlines() if line.startswith(begin)) for begin in begins]
    module = copy(
        f"ppo_continuous_action{twin}",
        ("self.log_std = nn.Parameter(torch.zeros(action_dim))", "self.log_stds = nn.Linear(obs_dim, action_dim)"),
        (NO_LOG_STD, "self.actor(obs), self.log_stds(obs), "),
        (function, ""),
        (check, ""),
        *zip(old, [*lines[:3], "\n".join(lines[3:])], strict=True),
    )
    settings = {"num_minibatches": 1, "update_epochs": 1, "learning_rate": 1e-2} | ({"compile": False} if twin else {})
    log = train_copy(module, name, **settings)
    assert all(abs(line["losses/approx_kl"]) < 1e-5 for line in log) and log[0]["losses/entropy"] != pytest.approx(
        log[-1]["losses/entropy"], abs=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
def test_critics_with_dropout_and_a_parameter_of_their_own(copy, train_copy, name):
    """A twin runs them as one network: each has a mask of its own, and a parameter outside of any layer is stacked."""
    changes = [
        ("nn.Linear(256, 1),", "nn.Dropout(0.1), nn.Linear(256, 1),"),
        (
            "    def forward(self, obs: Tensor, action: Tensor) -> Tensor:\n        return self.net(",
            "        self.gain = nn.Parameter(torch.ones(1))\n\n"
            "    def forward(self, obs: Tensor, action: Tensor) -> Tensor:\n        return self.gain * self.net(",
        ),
    ]
    for twin in (name, f"{name}_torchcompile"):
        made = next(line for line in source_of(twin).splitlines() if line.startswith("    critics = nn.ModuleList("))
        alike = made, f"{made}\n    critics[1].load_state_dict(critics[0].state_dict())"
        for dropout in (True, False):
            settings = quick(name) | ({} if twin == name else {"compile": False})
            last = train_copy(copy(twin, alike, *changes[not dropout :]), twin, **settings)[-1]
            difference = abs(last["losses/qf1_loss"] - last["losses/qf2_loss"])
            assert all(np.isfinite(list(last.values()))) and (difference > 1e-5) == dropout


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
def test_a_matrix_that_does_not_learn_stays_as_it_is(copy, train_copy, tmp_path, name):
    """A buffer of two dimensions, as of random Fourier features; in a twin's stack, too, which is transposed."""
    layers, forward = "        self.net = nn.Sequential(\n            nn.Linear(obs_dim + action_dim, 256)", "dim=1)"
    matrix = "torch.linspace(-1, 1, 16 * (obs_dim + action_dim)).view(-1, 16)"
    changes = [
        (layers, f'        self.register_buffer("matrix", {matrix})\n{layers.replace("obs_dim + action_dim", "16")}'),
        (f"{forward}).squeeze", f"{forward} @ self.matrix).squeeze"),
    ]
    logs = []
    for twin in (name, f"{name}_torchcompile"):
        settings = quick(name) | ({} if twin == name else {"compile": False})
        logs.append(train_copy(copy(twin, *changes), twin, **settings))
        checkpoint = torch.load(tmp_path / f"copy_run{len(logs) - 1}/checkpoint.pt", weights_only=True)
        both = [*checkpoint["critics"].items(), *checkpoint["target_critics"].items()]
        kept = [x.mT if x.ndim == 3 else x for key, x in both if key.endswith("matrix")]
        first = torch.linspace(-1, 1, 16 * kept[0].shape[-2]).view(-1, 16)
        assert all(torch.equal(x, first.expand_as(x)) for x in kept)
    assert logs[1][-1] == pytest.approx(logs[0][-1], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("critics[0].more = critics[1].more = actor", "share layers with the actor"),
        ("actor.norm = critics[0].norm = nn.BatchNorm1d(3, affine=False)", "share layers with the actor"),
        ("critics[0].norm = critics[1].norm = nn.BatchNorm1d(3, affine=False)", "that share layers, or differ"),
    ],
)
def test_layers_that_critics_share_are_refused_by_the_twin(copy, train_copy, capsys, name, change, why):
    """A stack is a copy: the critics' loss would not reach the actor's layers any more. Buffers count, too."""
    made = next(line for line in source_of(name).splitlines() if line.startswith("    critics = nn.ModuleList("))
    with pytest.raises(SystemExit) as end:
        change = made, f"{made}\n    {change}"
        train_copy(copy(f"{name}_torchcompile", change), name, compile=False)
    assert end.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
@pytest.mark.parametrize(
    "line",
    [
        "[layer for layer in critics.modules()]",
        "[layer for _, layer in critics.named_modules()]",
        "[layer for layer in target_critics.children()]",
        "dict(critics.named_children())",
        "target_critics.apply(print)",
        "for critic in critics: critic.scale = 0.0",
        "target_critics[0].requires_grad_(False)",
    ],
)
def test_layers_and_critics_that_a_stack_lacks_are_refused(copy, train_copy, capsys, name, line):
    """They would be copies, whose change does nothing, where the eager script changes the critics."""
    loop = "    while run.goes_on():\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy(f"{name}_torchcompile", (loop, f"{loop}        {line}\n")), name, compile=False)
    assert end.value.code == 2 and "stacked critics have no layers" in capsys.readouterr().err
    train_copy(copy(name, (loop, f"{loop}        {line}\n")), name, total_timesteps=20)


def frozen(name: str, layers: str) -> Change:
    """A change that fills layers of a script with 0.01, once it has made them, and freezes them."""
    made = re.search(r"\n    (?:agent|network|critics) = .*", source_of(name))[0]
    return (
        made,
        f"""{made}
    for layer in {layers}:
        nn.init.constant_(layer.weight, 0.01)
        layer.requires_grad_(False)""",
    )


FROZEN = {  # layers of each script, and what a checkpoint calls their weights
    **dict.fromkeys(["ppo", "ppo_continuous_action"], ("(agent.actor[0], agent.critic[2])", ["actor.0", "critic.2"])),
    "dqn": ("(network.net[0],)", ["net.0"]),
    "sac_continuous_action": ("[critic.net[0] for critic in critics] + [actor.net[0]]", ["net.0"]),
    "td3_continuous_action": ("[critic.net[0] for critic in critics] + [actor.net[0]]", ["net.0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_frozen_layers_stay_as_they_are_while_others_learn(copy, train_copy, tmp_path, name, twin):
    layers, names = FROZEN[name]
    compiles = {"compile": name in ("dqn", "sac_continuous_action")} if twin else {}
    train_copy(copy(name + twin, frozen(name + twin, layers)), name, **quick(name), **compiles)
    saved = torch.load(tmp_path / "copy_run0" / "checkpoint.pt", weights_only=True)
    parts = [saved[part] for part in ("agent", "network", "target_network", "actor", "critics") if part in saved]
    states = [{key: x for key, x in part.items() if key.endswith("weight")} for part in parts]
    kept = [x for state in states for key, x in state.items() if any(name in key for name in names)]
    assert len(kept) >= len(parts) and all((x == 0.01).all() for x in kept)
    optimizers = [state for part, state in saved.items() if part.endswith("optimizer")]
    assert all(helpers.adam_steps(x) > 0 and x["exp_avg"].count_nonzero() > 0 for x in optimizers)


@pytest.mark.parametrize("name", ["impala_ray", "ppo_ray", "a3c_ray", "a3c_ray_torchcompile"])
def test_frozen_layers_stay_as_they_are_over_ray(copy, tmp_path, name):
    """Runners of A3C make the network, too, to compute gradients of the weights that learn."""
    anchor = "        if not self.is_discrete:\n            self.log_std = "
    freeze = "        nn.init.constant_(self.critic[2].weight, 0.01)\n        self.critic[2].requires_grad_(False)\n"
    module, compiles = copy(name, (anchor, freeze + anchor)), {"compile": False} if "torchcompile" in name else {}
    settings = helpers.small_settings(name.removesuffix("_torchcompile")) | compiles
    module.train(module.Args(**settings | {"run_dir": str(tmp_path / "run"), "device": "cpu"}))
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert (saved["agent"]["critic.2.weight"] == 0.01).all() and helpers.adam_steps(saved["optimizer"]) > 0


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
@pytest.mark.parametrize("critic", [0, 1])
def test_critics_of_which_one_is_frozen_are_not_stacked(copy, train_copy, capsys, name, critic):
    """A stack learns as a whole, or does not; the eager file can do both."""
    layers = f"(critics[{critic}].net[0],)"
    train_copy(copy(name, frozen(name, layers)), name, total_timesteps=200)
    with pytest.raises(SystemExit) as end:
        train_copy(copy(f"{name}_torchcompile", frozen(f"{name}_torchcompile", layers)), name, compile=False)
    assert end.value.code == 2 and "can't be stacked: use the eager file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "ppo_torchcompile"])
def test_a_frozen_layer_that_is_to_learn_later_is_refused(copy, train_copy, capsys, name):
    loop = "    for iteration in range(run.iteration, num_iterations):\n"
    later = loop, f"{loop}        agent.critic[2].requires_grad_(iteration > 0)\n"
    with pytest.raises(SystemExit) as end:
        train_copy(
            copy(name, frozen(name, "(agent.critic[2],)"), later), "ppo", **{"compile": True} if "_" in name else {}
        )
    reason = "for the whole run" if "_" in name else "frozen when their Adam was made"
    assert end.value.code == 2 and reason in capsys.readouterr().err


def test_a_layer_that_is_frozen_in_the_loop_is_refused_by_the_twin(copy, train_copy, capsys):
    """Compiled code would go on to change it; eager code can't take its gradient."""
    loop = "    for iteration in range(run.iteration, num_iterations):\n"
    later = loop, f"{loop}        agent.critic[2].requires_grad_(iteration < 1)\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", later), "ppo", compile=False)
    assert end.value.code == 2 and "requires_grad` was True at the first call" in capsys.readouterr().err


def test_an_object_that_holds_a_module_is_read_itself(copy, train_copy, capsys):
    holder = SimpleNamespace(module=nn.Linear(1, 1), decay=0.5)
    module = copy("ppo_torchcompile", (BONUS, "args.ent_coef * entropy * holder.decay"))
    module.holder = holder
    call = module.gae

    def changing(*inputs):
        holder.decay *= 0.9
        return call(*inputs)

    module.gae = changing
    with pytest.raises(SystemExit) as end:
        train_copy(module, "ppo", compile=False)
    assert end.value.code == 2 and "`holder.decay` was 0." in capsys.readouterr().err


@pytest.mark.slow
def test_functions_of_one_factory_or_decorator_are_compiled_apart():
    """Their code is one object, by which compiled code is found again: each gets a copy of it, in one call or two."""
    script, x = load("ppo_torchcompile"), torch.ones(3)
    functions = [(lambda x, factor=factor: factor * x) for factor in (1, 2)]
    functions += [torch.no_grad()(lambda x, factor=factor: factor * x) for factor in (3, 4)]
    made = [*script.compiled(torch.device("cpu"), *functions[:3]), *script.compiled(torch.device("cpu"), functions[3])]
    assert [float(script.refuse_changes(function)(x)[0]) for function in made] == [1, 2, 3, 4]


def test_a_method_is_not_compiled(capsys):
    """It would share its code with that of other objects."""
    with pytest.raises(SystemExit, match="2"):
        load("ppo_torchcompile").compiled(torch.device("cpu"), nn.Linear(1, 1).forward)
    assert "can't be compiled: write a function around it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sac_continuous_action_torchcompile", "td3_continuous_action_torchcompile"])
def test_critics_whose_functions_differ_are_not_stacked(capsys, name):
    """A function is no layer, and nothing that can be compared."""

    class Critic(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.layer, self.function = nn.Linear(3, 1), function

        def forward(self, obs, action):
            return self.function(self.layer(torch.cat([obs, action], dim=1))).squeeze(1)

    inputs, script = (torch.zeros(2, 2), torch.zeros(2, 1)), load(name)
    script.check_stack(nn.ModuleList([Critic(torch.relu), Critic(torch.relu)]), nn.Linear(1, 1), *inputs)
    with pytest.raises(SystemExit, match="2"):
        script.check_stack(nn.ModuleList([Critic(torch.tanh), Critic(torch.cos)]), nn.Linear(1, 1), *inputs)
    assert "they differ in more than weights" in capsys.readouterr().err
    stack = script.Stack(script.from_modules(Critic(torch.relu), Critic(torch.relu))).eval()
    assert not deepcopy(stack).training and deepcopy(stack.train()).training


@pytest.mark.parametrize("module", [nn.Linear(2, 2).requires_grad_(False), nn.Tanh()])
def test_an_adam_with_nothing_to_learn_is_refused(capsys, module):
    with pytest.raises(SystemExit, match="2"):
        defining("Adam").Adam(module, 0.1)
    assert "a module without weights to learn" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
def test_batch_norm_in_the_actor_is_refused(copy, train_copy, capsys, name):
    layers = "            nn.Linear(obs_dim, 256), nn.ReLU(inplace=True),\n"
    change = layers, layers.replace("256),", "256), nn.BatchNorm1d(256),")
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, change), name)
    assert end.value.code == 2 and "BatchNorm in the actor" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
@pytest.mark.parametrize(
    "change",
    [
        ("courier.answer(obs).clip(", "courier.answer(obs / 1000).clip("),
        (
            "        if run.num_updates == 0 and run.step < first_update:",
            "        if run.step < 100 or run.step % 3 == 0:",
        ),
    ],
    ids=["other observations", "steps that do not ask"],
)
def test_an_action_for_other_observations_is_refused(copy, train_copy, capsys, name, change):
    """It was asked for before, by what `ask` got."""
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, change), name, num_envs=1)
    assert end.value.code == 2 and "`courier.answer` got other observations" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_targets_in_eval_mode_have_no_dropout(copy, train_copy, name, twin):
    """While the critics that learn have it."""
    line = "            next_q = q_values(target_critics, next_obs, next_action).amin(0)"
    twice = "(q_values({0}, next_obs, next_action) == q_values({0}, next_obs, next_action)).all()"
    check = f"assert {twice.format('target_critics')} and not {twice.format('critics')}"
    targets = re.search(r"\n    (critic_weights, )?target_weights = .*", source_of(name + twin))[0]
    module = copy(
        name + twin,
        ("nn.Linear(256, 1),", "nn.Dropout(0.5), nn.Linear(256, 1),"),
        (targets, f"{targets}\n    target_critics.eval()"),
        (line, f"            {check}\n{line}"),
    )
    train_copy(module, name, **quick(name), **({"compile": False} if twin else {}))


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
@pytest.mark.parametrize(("name", "frequency"), [("sac_continuous_action", 60), ("td3_continuous_action", 1)])
def test_targets_get_the_statistics_of_batch_norm(copy, train_copy, tmp_path, name, frequency, twin):
    """When they move, which is the last that is done in this run."""
    module = copy(name + twin, ("nn.Linear(256, 1),", "nn.BatchNorm1d(256), nn.Linear(256, 1),"))
    train_copy(module, name, **quick(name), policy_frequency=frequency, **({"compile": False} if twin else {}))
    checkpoint = torch.load(tmp_path / "copy_run0" / "checkpoint.pt", weights_only=True)
    found = {key: x for key, x in checkpoint["critics"].items() if "running" in key}
    assert found
    for key, statistics in found.items():
        assert torch.equal(checkpoint["target_critics"][key], statistics)
        assert statistics.abs().mean() > 0.001  # at the start they are 0 and 1


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_the_target_of_dqn_gets_buffers(copy, train_copy, tmp_path, twin):
    """Here a count that differs between both, as they see different observations."""
    forward = "        return self.net(obs)\n"
    module = copy(
        f"dqn{twin}",
        (forward, f"        self.seen += obs.abs().mean()\n{forward}"),
        ("        self.net = nn", "        self.register_buffer('seen', torch.zeros(()))\n        self.net = nn"),
    )
    settings = {"total_timesteps": 350, "target_network_frequency": 50} | ({"compile": False} if twin else {})
    train_copy(module, "dqn", **settings)
    checkpoint = torch.load(tmp_path / "copy_run0" / "checkpoint.pt", weights_only=True)
    assert checkpoint["network"]["seen"] == checkpoint["target_network"]["seen"] > 0


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
def test_targets_that_change_their_mode_in_the_loop_are_refused(copy, train_copy, capsys, name):
    """Compiled code would keep the first one."""
    line = re.search(r"\n +losses = .*update.*\n|\n +update_critics\(\).*\n", source_of(f"{name}_torchcompile"))[0]
    indent = re.match(r"\n( +)", line)[1]
    late = f"\n{indent}target_critics.train(run.step < 150)"
    module = copy(f"{name}_torchcompile", (line, late + line))
    with pytest.raises(SystemExit) as end:
        train_copy(module, name, **quick(name), compile=False)
    assert end.value.code == 2 and "`target_critics.training` was True" in capsys.readouterr().err


def test_layers_that_look_at_the_whole_batch_cannot_act(copy, train_copy, capsys):
    """Batch normalization computes something else of the rows of a step than of those of a rollout."""
    normalized = ("self.actor = mlp(obs_dim,", "self.actor = nn.Sequential(nn.BatchNorm1d(obs_dim)) + mlp(obs_dim,")
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo", normalized), "ppo")
    assert end.value.code == 2 and "the policy" in capsys.readouterr().err


@pytest.mark.slow
def test_policy_of_a_checkpoint_has_no_dropout(copy, train_copy, tmp_path):
    """It learns with dropout, and is the same function each time when it is loaded."""
    dropout = ("nn.Linear(256, 2 * len(low))", "nn.Dropout(0.5), nn.Linear(256, 2 * len(low))")
    module = copy("sac_continuous_action", dropout)
    train_copy(module, "sac_continuous_action")
    checkpoint = torch.load(tmp_path / "copy_run0" / "checkpoint.pt", weights_only=True)
    envs = module.Envs(module.Args(**checkpoint["args"]), [1])
    policy, obs = module.load_policy(checkpoint, envs), np.ones((1, envs.obs_dim), np.float32)
    np.testing.assert_array_equal(policy(obs), policy(obs))


def test_check_of_the_policy_leaves_weights_and_random_numbers_as_they_were():
    net, state = torch.nn.Linear(3, 2), torch.get_rng_state()
    before = [x.clone() for x in net.parameters()]
    plumbing = defining("check_policy")
    plumbing.check_policy(plumbing.numpy_mlp(net), net, net, 3)
    assert all(map(torch.equal, before, net.parameters())) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("layers", [(512, 512, 512), (512,) * 4, (1024,) * 3])
@pytest.mark.parametrize("outputs", [1, 6])
def test_wide_networks_are_no_other_policies(layers, outputs):
    """Whose numbers are large, so that rounding is more than a small fixed number; whatever their first weights."""
    plumbing = defining("check_policy")
    for seed in range(3):
        torch.manual_seed(seed)
        sizes = zip((17, *layers), layers, strict=False)
        net = nn.Sequential(
            *(x for sizes in sizes for x in (nn.Linear(*sizes), nn.ReLU())), nn.Linear(layers[-1], outputs)
        )
        plumbing.check_policy(plumbing.numpy_mlp(net), net, net, 17)


@pytest.mark.parametrize("clipped", ["small", "large", "shifted by a buffer"])
def test_a_policy_that_acts_otherwise_on_some_observations_is_refused(clipped, capsys):
    """`forward` cuts off what is large, or small; or takes statistics off that are still 0."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    net.register_buffer("mean", torch.zeros(3))
    learning = {
        "large": lambda obs: net(obs.clamp(-5, 5)),
        "small": lambda obs: net(torch.where(obs.abs() < 0.3, 0.0, obs)),
        "shifted by a buffer": lambda obs: net(obs - net.mean),
    }[clipped]
    plumbing = defining("check_policy")
    with pytest.raises(SystemExit) as end:
        plumbing.check_policy(plumbing.numpy_mlp(net), learning, net, 3)
    assert end.value.code == 2 and "the policy that acts differs" in capsys.readouterr().err
    assert not net.mean.any()


class Sharpened(nn.Module):
    """Logits times a number that a schedule may change later; at the start it changes nothing."""

    def __init__(self, sharpness):
        super().__init__()
        self.actor, self.sharpness = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0), nn.Linear(8, 2)), sharpness

    def forward(self, obs):
        return torch.as_tensor(self.sharpness) * self.actor(obs)


@pytest.mark.parametrize("sharpness", [1.0, np.float32(1), np.ones(2, dtype=np.float32), torch.tensor(1.0)])
def test_a_policy_that_a_schedule_will_change_is_refused(sharpness, capsys):
    """If only learning would see it; where acting does, too, it is fine, and nothing is changed by the check."""
    net, plumbing = Sharpened(sharpness), defining("check_policy")
    with pytest.raises(SystemExit):
        plumbing.check_policy(plumbing.numpy_mlp(net.actor), net, net, 3)
    assert "the policy that acts differs" in capsys.readouterr().err
    net.unused = torch.zeros(1).expand(3)  # which nothing can change in place
    acting = torch.no_grad()(lambda obs: net(torch.from_numpy(obs)).numpy())
    plumbing.check_policy(acting, torch.no_grad()(net), net, 3)
    assert np.all(np.asarray(net.sharpness) == 1) and type(net.sharpness) is type(sharpness)


class Within(nn.Module):
    """Numbers that must stay below one."""

    def __init__(self):
        super().__init__()
        self.actor, self.quantile, self.correlation, self.zero = nn.Linear(3, 2), 0.9, -0.9, 0.0

    def forward(self, obs):
        logits = self.actor(obs) * math.sqrt(1 - self.correlation**2) * math.sqrt(1 - self.zero)
        return logits - logits.quantile(self.quantile, dim=1, keepdim=True)


def test_the_check_of_the_policy_keeps_probabilities_below_one():
    net = Within()
    acting = torch.no_grad()(lambda obs: net(torch.from_numpy(obs)).numpy())
    defining("check_policy").check_policy(acting, torch.no_grad()(net), net, 3)
    assert (net.quantile, net.correlation, net.zero) == (0.9, -0.9, 0.0)


class SharpenedByItsClass(Sharpened):
    """The same, its number being the class's: `net.sharpness = 2.0` in a loop gives the object its own."""

    sharpness = 1.0

    def __init__(self):
        super().__init__(None)
        del self.sharpness


def test_an_attribute_of_a_class_may_change_for_its_object(capsys):
    """The check that finds it gives the object none: else it would not follow if its class's changed."""
    net, plumbing = SharpenedByItsClass(), defining("check_policy")
    with pytest.raises(SystemExit):
        plumbing.check_policy(plumbing.numpy_mlp(net.actor), net, net, 3)
    assert "the policy that acts differs" in capsys.readouterr().err
    assert "sharpness" not in vars(net) and net.sharpness == 1


def test_a_policy_without_a_value_for_some_observations_is_no_other_one():
    """As that of a square root, of observations that are never negative."""
    net = nn.Linear(3, 2)
    forward = torch.no_grad()(lambda obs: net(obs.sqrt()))
    defining("check_policy").check_policy(lambda obs: forward(torch.from_numpy(obs)).numpy(), forward, net, 3)


def test_a_density_that_actions_are_not_drawn_from_is_refused(copy, train_copy, capsys):
    """A temperature in the log-probability alone, and a bound of the standard deviation alone."""
    discrete_change = (
        "            log_probs = output.log_softmax(1)",
        "            log_probs = (output / 5).log_softmax(1)",
    )
    other = ("return output.log_softmax(1).gather(1,", "return (output / 5).log_softmax(1).gather(1,")
    std = (
        "return normal_log_prob(action, output, self.log_std)",
        "return normal_log_prob(action, output, self.log_std - 1)",
    )
    loud = (
        "self.log_std.detach().exp().cpu().numpy()",
        "(3 * self.log_std.detach().exp().cpu().numpy())",
    )
    cases = (
        ((discrete_change, other), "tiny_envs:Choose-v0"),
        ((std,), "tiny_envs:Reach-v0"),
        ((loud,), "tiny_envs:Reach-v0"),
    )
    for changes, env_id in cases:
        with pytest.raises(SystemExit) as end:
            train_copy(copy("ppo_env_pool", *changes), "ppo_env_pool", env_id=env_id)
        assert end.value.code == 2 and "the policy that acts differs" in capsys.readouterr().err


def test_weights_put_into_another_tensor_are_refused(copy, train_copy, capsys):
    """The policy in NumPy would act by the old ones for ever."""
    line = "                losses = update()\n"
    more = "                for x in network.parameters():\n                    x.data = x.data.clamp(-2, 2)\n"
    with pytest.raises(SystemExit) as end:
        train_copy(
            copy("dqn", (line, line + more)), "dqn", total_timesteps=800, log_every=10**6, checkpoint_every=10**6
        )
    assert end.value.code == 2 and "change them in place" in capsys.readouterr().err


@pytest.mark.parametrize("layer", [nn.Dropout2d(0.1), nn.BatchNorm2d(32)], ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("name", [x.stem for x, _ in helpers.PAIRS if "check_layers(" in x.read_text()])
def test_layers_of_a_network_for_frames_that_act_otherwise_are_refused(name, layer, capsys):
    plumbing = load(name)
    plumbing.check_layers(nn.Sequential(nn.Conv2d(4, 32, 2), nn.LayerNorm(8), nn.ReLU()))
    with pytest.raises(SystemExit) as end:
        plumbing.check_layers(nn.Sequential(nn.Conv2d(4, 32, 2), layer))
    assert end.value.code == 2 and f"layer `1`, {layer}" in capsys.readouterr().err


def test_buffers_that_no_runner_would_get_are_refused(capsys):
    net = nn.Linear(3, 2)
    net.register_buffer("mean", torch.zeros(3))
    with pytest.raises(SystemExit) as end:
        load("a3c_ray").check_layers(net)
    assert end.value.code == 2 and "buffer `mean`" in capsys.readouterr().err


# Numbers that a copy of the network, or a runner, would not get


class Scaled(nn.Linear):
    """A layer with numbers, arrays and tensors that are neither weights nor buffers."""

    power = 1.0

    def __init__(self):
        super().__init__(3, 3)
        self.scale, self.shift, self.name = 1.0, torch.zeros(3), "first"
        self.offset, self.gains, self.own, self.log = np.zeros(3, dtype=np.float32), [1.0, 2.0], [self.weight], []
        self.late, self.by_name, self.table, self.fine = None, {"t": [1.0]}, torch.zeros(2000), torch.tensor(0.01)
        self.seen = None

    def forward(self, x):
        return self.power * self.scale * super().forward(x) + self.shift


def test_a_copy_that_acts_gets_the_numbers_of_the_network():
    script, net = defining("copy_attributes"), nn.Sequential(Scaled(), nn.Tanh())
    copy = script.deepcopy(net).eval()
    net[0].scale, net[0].name = 3.0, "second"
    net[0].shift.fill_(2.0)
    net[0].late = torch.ones(3, requires_grad=True)  # set when there was a copy
    for _ in range(2):
        script.copy_attributes(net, copy)
    x = torch.randn(4, 3)
    assert torch.equal(net(x), copy(x)) and copy[0].shift is not net[0].shift
    assert torch.equal(copy[0].late, net[0].late) and copy[0].late is not net[0].late
    assert copy[0].name == "second" and not copy.training and not copy[0].training and net.training


def test_a_copy_that_acts_gets_arrays_and_what_lists_hold():
    """And attributes of PyTorch's layers. Changed in place, too, and not shared."""
    script, net = defining("copy_attributes"), nn.Sequential(Scaled(), nn.LeakyReLU())
    net[0].table, net[0].level = {"a": [1, np.float32(2)]}, np.int64(1)
    copy = script.deepcopy(net)
    net[0].offset[:] = 2
    net[0].gains[1], net[0].table["a"][1], net[0].level, net[1].negative_slope = 5.0, np.float32(7), np.int64(3), 0.5
    script.copy_attributes(net, copy)
    assert (copy[0].offset == 2).all() and copy[0].gains == [1.0, 5.0] and copy[0].table == {"a": [1, 7]}
    assert copy[0].level == 3 and copy[1].negative_slope == 0.5
    assert copy[0].offset is not net[0].offset and copy[0].gains is not net[0].gains
    assert copy[0].own[0] is copy[0].weight  # which holds a weight, and stays as the copy has it


def test_a_copy_that_acts_gets_what_the_network_did_not_have_at_the_start():
    """A tensor where there was none, or of another shape, as an activation that is kept; none again; a buffer."""
    script, net = defining("copy_attributes"), nn.Sequential(Scaled())
    net[0].kept, net[0].mean = None, torch.zeros(3)
    net[0].register_buffer("temperature", torch.ones(()), persistent=False)
    copy, weight = script.copy_attributes(net, script.deepcopy(net)), net[0].weight
    for kept in (torch.ones(3), weight * 2, weight[:2] * 3, None):
        net[0].kept = kept
        net[0].temperature.add_(1.0)
        script.copy_attributes(net, copy)
        assert copy[0].kept is kept is None or torch.equal(copy[0].kept, kept)
        assert copy[0].temperature == net[0].temperature > 1 and copy[0].temperature is not net[0].temperature
    assert copy[0].kept is None


@pytest.mark.slow
def test_a_schedule_of_the_network_reaches_the_copy_that_acts(copy, train_copy, capsys):
    """One update for each rollout: so the policy that acted is the one that learns, and approx_kl is 0."""
    changes = [
        (
            "        self.actor, self.critic = nn.Linear",
            "        self.temperature = 50.0\n        self.actor, self.critic = nn.Linear",
        ),
        ("return self.actor(x).log_softmax(1)", "return (self.temperature * self.actor(x)).log_softmax(1)"),
        in_the_loop("agent.temperature *= 0.5"),
    ]
    settings = {"num_minibatches": 1, "update_epochs": 1, "num_envs": 8, "num_steps": 8, "total_timesteps": 256}
    module = copy("ppo_atari_envpool", *changes)
    log = train_copy(module, "ppo_atari_envpool", **settings)
    assert len(log) == 4 and all(abs(line["losses/approx_kl"]) < 1e-5 for line in log)
    with mock.patch.object(module, "copy_attributes"), pytest.raises(SystemExit) as end:  # a copy that is not told
        train_copy(module, "ppo_atari_envpool", **settings)
    assert end.value.code == 2 and "acting differs from learning" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        "net[0].scale = 2.0",
        "net[0].shift.fill_(1.0)",
        "Scaled.power = 2.0",
        "net[0].offset += 1",
        "net[0].gains[1] = 1.0",
        "net[0].late = 0.5",
        "net[0].by_name['t'][0] = 0.5",
        "net[0].table[1000] = 0.5",
        "net[0].fine += 1e-6",
        "net[0].name = 'second'",
        "net[1].negative_slope = 0.5",
        "net[0].power = 2.0",
        "net[0].moments['mean'].fill_(1.0)",
        "net[0].schedule.value = 0.5",
        "net[0].beside.scale = 0.5",
    ],
)
def test_a_number_of_the_network_that_no_runner_gets_is_refused_when_it_changes(monkeypatch, capsys, beside, change):
    monkeypatch.setattr(Scaled, "power", 1.0)
    script, net = defining("get_weights"), nn.Sequential(Scaled(), nn.LeakyReLU())
    net[0].moments, net[0].schedule = {"mean": torch.zeros(20)}, SimpleNamespace(value=1.0)
    net[0].schedule.of = net[0].schedule  # objects may refer to each other
    net[0].beside = beside.SCHEDULE
    weights = script.get_weights(net)
    assert (script.get_weights(deepcopy(net)) == weights).all()  # a copy is a network like any other
    with torch.no_grad():
        net[0].weight.add_(1.0)
    net[0].log.append(1.0)
    net[0].seen = torch.ones(3)
    assert (script.get_weights(net) != weights).any()
    exec(change)
    with pytest.raises(SystemExit) as end:
        script.get_weights(net)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert re.search(r"`[01][\w.]+` of the network was .* at the start and is .*, and runners get only weights", said)


NOISE = """
NOISE, SEEN, LEARNT = 0.5, {"scale": 1.0}, [1.0]
NARROW, NOTHING, PAIR, LEAST, SPACE = np.float32(1), None, (1.0, 2.0), 1.0, SimpleNamespace(width=1.0)


class Widths:
    most = 2.0

    def __init__(self):
        self.own = 3.0

    @staticmethod
    def least():
        return LEAST


WIDTHS = Widths()
FACTOR, MANY = 1.0, {"visits": np.zeros(2000)}


class Called:
    def __init__(self):
        self.own = 1.0

    def __call__(self):
        return FACTOR * self.own


CALLED = Called()
WIDTHS.inner, RECENT = Widths(), deque([1.0, 2.0])
BY_NAME, IN_LIST, TENSORS = {"a": Widths()}, [Widths()], [torch.zeros(20)]
import beside
from beside import SCHEDULE, level


def scale():
    CALLED(), RECENT, BY_NAME, IN_LIST, TENSORS, SCHEDULE.scale, level(), beside.DIRECT
    return SEEN["scale"], NARROW, NOTHING, PAIR, SPACE.width, Widths.most, WIDTHS.own, Widths.least(), MANY
"""
BESIDE = """
DIRECT, LEVEL, OTHER = 1.0, 1.0, 1.0


class Schedule:
    def __init__(self):
        self.scale = 1.0


SCHEDULE = Schedule()


def level():
    return LEVEL
"""
RAY = [eager.stem for eager, _ in helpers.PAIRS if eager.stem.endswith("_ray")]


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A module that lies beside a copy, which imports it."""
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("beside")
    del sys.modules["beside"]


@pytest.mark.parametrize("name", RAY)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("module.NOISE = 0.4", "`NOISE` changed"),
        ('module.SEEN["scale"] = 2.0', "`SEEN` changed"),
        ("args.scales[0] = 0.5", "`args.scales` changed"),
        ("args.new = 2.0", "`args.new` changed"),
        ("module.NARROW = np.float32(2)", "`NARROW` changed"),
        ("module.NOTHING = 2.0", "`NOTHING` changed"),
        ("module.PAIR = (1.0, 3.0)", "`PAIR` changed"),
        ("module.SPACE.width = 2.0", "`SPACE.width` changed"),
        ("module.Widths.most = 3.0", "`Widths.most` changed"),
        ("module.WIDTHS.own = 4.0", "`WIDTHS.own` changed"),
        ("module.LEAST = 2.0", "`LEAST` changed"),
        ("module.CALLED.own = 2.0", "`CALLED.own` changed"),
        ("module.FACTOR = 2.0", "`FACTOR` changed"),
        ("module.MANY['visits'][1000] = 2.0", "`MANY` changed"),
        ("tiny_envs.own_level = 2.0", "`tiny_envs.own_level` changed"),
        ("module.WIDTHS.inner.own = 4.0", "`WIDTHS.inner.own` changed"),
        ("module.RECENT.append(3.0)", "`RECENT` changed"),
        ("module.BY_NAME['a'].own = 4.0", "`BY_NAME['a'].own` changed"),
        ("module.IN_LIST[0].own = 4.0", "`IN_LIST[0].own` changed"),
        ("module.TENSORS[0][3] = 4.0", "`TENSORS` changed"),
        ("module.beside.DIRECT = 2.0", "`beside.DIRECT` changed"),
        ("module.beside.LEVEL = 2.0", "`beside.LEVEL` changed"),
        ("module.SCHEDULE.scale = 2.0", "`SCHEDULE.scale` changed"),
        ("module.beside.OTHER = 2.0", None),
        ("module.Runner.epsilon = 2.0", "`Runner.epsilon` changed"),
        ("module.LEARNT[0] = 2.0", None),
    ],
)
def test_numbers_that_runners_would_not_get_are_refused_when_they_change(
    copy, beside, monkeypatch, name, change, found
):
    """Those that the code of `Runner` names, itself or in a function that it calls; not those of the learner alone."""
    assert beside.LEVEL == 1.0
    clock = '        self.clock.lap("runners_waiting")\n'
    module = copy(
        name,
        ("\n@dataclass\nclass Args:", f"{NOISE}\n\n@dataclass\nclass Args:"),
        (clock, f"{clock}        NOISE, scale()\n"),
        ("class Runner:\n", "class Runner:\n    epsilon = 1.0\n"),
    )
    args, runners = module.Args(), object.__new__(module.RayRunners)
    args.scales, args.new = [1.0], 1.0
    monkeypatch.setattr(tiny_envs, "own_level", 1.0, raising=False)
    runners.args, runners.clock, runners.alive = args, mock.Mock(), ()
    runners.named = module.named_globals([module.Runner]) | module.globals_beside(gym.registry["Stream-v0"].entry_point)
    assert not module.globals_beside(gym.registry["CartPole-v1"].entry_point)  # of a library
    runners.sent, runners.stop = runners.known_to_runners(), mock.Mock(side_effect=SystemExit)
    runners.publish(0, np.zeros(1))
    exec(change)
    with pytest.raises(SystemExit) if found else contextlib.nullcontext():
        runners.publish(1, np.zeros(1))
    assert found is None or found in runners.stop.call_args[0][0]


def test_numbers_of_an_environment_in_another_file_are_known(monkeypatch):
    """Those of its class, as a curriculum changes them."""
    script = load("impala_ray")
    monkeypatch.setattr(tiny_envs.Stream, "level", 1.0, raising=False)
    assert script.is_users(tiny_envs.Stream) and not script.is_users(gym.Env)
    assert "Stream.level" in script.named_globals([tiny_envs.Stream])


@pytest.mark.parametrize("name", RAY)
def test_an_unchanged_script_has_no_global_number_that_runners_read(name):
    """So nothing that a learner counts by itself is refused."""
    script = load(name)
    learners = [vars(script)[x] for x in ("make_learner", "PrioritizedReplay") if hasattr(script, x)]
    assert set(script.named_globals([script.Runner, *learners])) <= {"METRICS"}


# State of one's own


COUNTER = """class Counter:
    counts = {value}

    def state_dict(self):
        return {{"counts": self.counts}}

    def load_state_dict(self, state):
        self.counts = state["counts"]"""


def with_counter(value: str) -> list[Change]:
    return [
        ("\ndef linear_schedule(", f"\n{COUNTER.format(value=value)}\n\n\ndef linear_schedule("),
        ("optimizer=optimizer, **buffers", "optimizer=optimizer, counter=Counter(), **buffers"),
    ]


DEFAULTS = "__import__('collections').defaultdict(int)"


@pytest.mark.parametrize("value", ["np.zeros(3)", "[1, np.float64(2.0)]", "{1, 2}", "{np.int64(1): 2}", DEFAULTS])
def test_state_that_no_checkpoint_can_be_read_with_is_refused(copy, train_copy, tmp_path, capsys, value):
    with pytest.raises(SystemExit) as end:
        train_copy(copy("dqn", *with_counter(value)), "dqn")
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "state['counter']['counts']" in error and "no checkpoint can hold" in error
    assert not (tmp_path / "copy_run0").exists()


def test_state_that_becomes_what_no_checkpoint_can_hold_does_not_replace_a_good_one(copy, train_copy, tmp_path, capsys):
    """As the best mean of some returns does: a float at the start, a NumPy number later."""
    later = ('{"counts": self.counts}', '{"counts": self.counts if RUN.step < 250 else np.float64(self.counts)}')
    changes = [(old, new.replace(*later)) for old, new in with_counter("0.0")]
    module = copy("dqn", *changes, ("    run = Run(args)\n", "    global RUN\n    RUN = run = Run(args)\n"))
    with pytest.raises(SystemExit) as end:
        train_copy(module, "dqn", checkpoint_every=100)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "state['counter']['counts'] is float64" in error
    checkpoint = torch.load(tmp_path / "copy_run0" / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 200 and not (tmp_path / "copy_run0" / "checkpoint.tmp").exists()


def test_a_setting_whose_default_is_made_anew_is_resumed(copy, train_copy, tmp_path):
    made = "    hidden: list[int] = field(default_factory=lambda: [64, 64])\n"
    settings = "    seed: int = 1 "
    module = copy("dqn", ("asdict, dataclass,", "asdict, dataclass, field,"), (settings, made + settings))
    train_copy(module, "dqn", hidden=[32])
    module.train(module.Args(resume=str(tmp_path / "copy_run0"), total_timesteps=500))
    assert json.loads((tmp_path / "copy_run0" / "config.json").read_text())["args"]["hidden"] == [32]


@pytest.mark.parametrize("change", ["*= 2", "= 0.5"])
def test_a_setting_that_a_resumed_run_would_change_again_is_refused(copy, train_copy, tmp_path, capsys, change):
    line = "    args, device = run.args, run.device\n"
    module = copy("dqn", (line, f"{line}    args.learning_rate {change}\n"))
    train_copy(module, "dqn", learning_rate=0.01)
    settings = {"resume": str(tmp_path / "copy_run0"), "total_timesteps": 500}
    if change == "= 0.5":  # which it is already
        module.train(module.Args(**settings))
        return
    with pytest.raises(SystemExit) as end:
        module.train(module.Args(**settings))
    assert end.value.code == 2 and "`args.learning_rate` is set before `run.open`, so a" in capsys.readouterr().err


def test_state_of_ones_own_is_resumed(copy, train_copy, tmp_path):
    module = copy("dqn", *with_counter('{"a": [1, torch.zeros(2), None], 3: "x"}'))
    train_copy(module, "dqn")
    module.train(module.Args(resume=str(tmp_path / "copy_run0"), total_timesteps=500))
    assert metrics_of(tmp_path / "copy_run0")[-1]["global_step"] == 500


def test_buffers_that_a_copy_gives_the_replay_are_kept():
    buffers = [load("dqn").ReplayBuffer(8, 2, 1, torch.device("cpu")) for _ in range(2)]
    for buffer, value in zip(buffers, (3.0, 0.0), strict=True):
        buffer.register_buffer("priorities", torch.full((8,), value))
        buffer.ages = torch.full((8,), value)  # no buffer of PyTorch's, as `rows` is none
    buffers[0].add(torch.ones(5, 7))
    buffers[1].load_state_dict(buffers[0].state_dict())
    assert (buffers[1].priorities == 3).all() and (buffers[1].rows == buffers[0].rows).all()
    assert (buffers[1].ages == 3).all() and buffers[1].num_written == 5


def test_arrays_and_numbers_that_a_copy_gives_the_replay_are_kept(tmp_path):
    """As those of a sum tree in NumPy, whose leaves are a view of it. Constants and functions are not saved."""
    buffers = [load("dqn").ReplayBuffer(8, 2, 1, torch.device("cpu")) for _ in range(2)]
    for buffer, value in zip(buffers, (3, 0), strict=True):
        buffer.tree, buffer.most, buffer.count, buffer.level = np.full(4, value), value + 0.1, value, np.float32(value)
        buffer.leaves, buffer.entries = buffer.tree[2:], [value]
        buffer.place, buffer.name, buffer.draw = torch.device("cpu"), "mine", np.random.rand
    torch.save(state := buffers[0].state_dict(), tmp_path / "state.pt")
    assert not state.keys() & {"place", "name", "draw"}
    buffers[1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, mmap=True))
    buffers[1].leaves[0] = 7
    assert buffers[1].tree.tolist() == [3, 3, 7, 3] and buffers[1].entries == [3]
    assert (buffers[1].most, buffers[1].count, buffers[1].level) == (3.1, 3, 3)
    assert type(buffers[1].level) is np.float32


def test_what_a_replay_can_not_save_is_refused(copy, train_copy, tmp_path, capsys):
    """Objects, whose numbers would be lost in silence."""
    line = "        self.num_written = torch.zeros((), dtype=torch.int64, device=device)\n"
    change = line, line + "        self.rng = np.random.default_rng(1)\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("dqn", change), "dqn")
    assert end.value.code == 2 and "state['buffer']['rng'] is Generator" in capsys.readouterr().err
    assert not (tmp_path / "copy_run0").exists()


def test_a_changed_learning_rate_reaches_an_optimizer_of_torch(copy, train_copy, tmp_path):
    """Whose `load_state_dict` would bring the old rate back; a rate that is no setting stays."""
    line = "    run.open(envs, agent=agent, optimizer=optimizer)\n"
    more = "    other, own = (torch.optim.SGD(agent.parameters(), rate) for rate in (args.learning_rate, 0.125))\n"
    module = copy("ppo", (line, more + line.replace("optimizer)", "optimizer, other=other, own=own)")))
    module.refuse_idle_calls = lambda: None
    train_copy(module, "ppo", learning_rate=0.01)
    run_dir = tmp_path / "copy_run0"
    settings = {"resume": str(run_dir), "total_timesteps": 1024, "override": ("learning_rate=0.5",)}
    module.train(module.Args(**settings))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert [state[name]["param_groups"][0]["lr"] for name in ("other", "own")] == [0.5, 0.125]


def test_a_changed_learning_rate_reaches_an_optimizer_of_torch_whose_rate_the_loop_has_set(copy, train_copy, tmp_path):
    """By a schedule of one's own, which had left it at another value than that of the start."""
    line = "    run.open(envs, agent=agent, optimizer=optimizer)\n"
    more = "    other = torch.optim.SGD(agent.parameters(), args.learning_rate)\n"
    rate = "if run.step < 500: other.param_groups[0]['lr'] = args.learning_rate = args.learning_rate / 2"
    module = copy("ppo", (line, more + line.replace("optimizer)", "optimizer, other=other)")), in_the_loop(rate))
    module.refuse_idle_calls = lambda: None
    train_copy(module, "ppo", learning_rate=0.5, total_timesteps=640)
    run_dir = tmp_path / "copy_run0"
    assert torch.load(run_dir / "checkpoint.pt")["other"]["param_groups"][0]["lr"] < 0.5
    override = {"override": ("learning_rate=0.125",), "total_timesteps": 1280}
    module.train(module.Args(resume=str(run_dir), **override))
    assert torch.load(run_dir / "checkpoint.pt")["other"]["param_groups"][0]["lr"] == 0.125


def test_another_activation_trains(copy, train_copy):
    layers = "nn.Linear(inputs, 64), nn.Tanh(),\n        nn.Linear(64, 64), nn.Tanh(),"
    other = "nn.Linear(inputs, 64), nn.Tanh(),\n        nn.Linear(64, 64), nn.SiLU(),"
    assert len(train_copy(copy("ppo", (layers, other)), "ppo")) > 3


# Environments of one's own

MY_ENV = '''
import os
import sys

import gymnasium as gym
import numpy as np


class MySim(gym.Env):
    """Episodes of 5 to 9 steps. At an end, `even` is there in every other one only; within one, always."""

    def __init__(self, goal=1.0):
        self.goal, self.episode = goal, 0
        self.observation_space, self.action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.steps, self.length, self.episode = 0, int(self.np_random.integers(5, 10)), self.episode + 1
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        done = self.steps == self.length
        info = {"is_success": True, "goal": self.goal, "torch": int("torch" in sys.modules), "text": "no number"}
        info["blas"], info["main"] = int(os.environ["OPENBLAS_NUM_THREADS"]), hasattr(sys.modules["__main__"], "Args")
        if not done or self.episode % 2 == 0:
            info["even"] = 1.0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), 1.0, done, False, info


gym.register("MySim-v0", MySim)
'''
MY_INFO = {"info/is_success": 1.0, "info/goal": 7.0, "info/torch": 0.0, "info/blas": 1.0, "info/even": 1.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an environment of one's own in `my_env.py`, which is the current one."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_env.py").write_text(MY_ENV)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("my_env", None)
    gym.registry.pop("MySim-v0", None)


def run_script(path: Path, *arguments: str, cwd: Path) -> tuple[list[dict], str]:
    """Run a script by its full path -> its log, and what it wrote to stderr."""
    words = [*arguments, "--run-dir", "run", "--no-tensorboard", "--device", "cpu"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OPENBLAS_NUM_THREADS")}
    result = subprocess.run(
        [sys.executable, path, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return metrics_of(cwd / "run"), result.stderr


def means(log: list[dict]) -> dict[str, float]:
    """Of all numbers of `info` over the lines that have them."""
    names = {name for line in log for name in line if name.startswith("info/")}
    return {name: float(np.mean([line[name] for line in log if name in line])) for name in names}


SHORT = ["--total-timesteps", "256", "--num-steps", "64", "--num-minibatches", "2", "--update-epochs", "1"]


each_way_to_work = pytest.mark.parametrize("name", ["ppo", "ppo_env_pool"])


@pytest.mark.slow
@each_way_to_work
def test_environment_of_the_current_folder_in_worker_processes(folder, name):
    """They start without PyTorch and without the script. What `info` holds at the end of episodes is in the log."""
    workers = ["--num-workers"] if name == "ppo_env_pool" else ["--env-backend", "gymnasium", "--num-envs"]
    mine = ["--env-id", "my_env:MySim-v0", "--env-kwargs", '{"goal": 7}']
    log, errors = run_script(ROOT / "scripts" / f"{name}.py", *mine, *workers, "2", *SHORT, cwd=folder)
    assert "starting 2 worker processes" in errors
    assert means(log) == MY_INFO | {"info/main": 0.0}


@pytest.mark.usefixtures("folder")
def test_environment_of_the_current_folder_in_process(train):
    log = train("ppo", env_id="my_env:MySim-v0", env_kwargs='{"goal": 7}', num_envs=2, sync_envs=True).lines
    in_this_process = {"info/torch", "info/blas", "info/main"}
    found = {name: value for name, value in means(log).items() if name not in in_this_process}
    assert found == {name: value for name, value in MY_INFO.items() if name not in in_this_process}
    assert all(("info/goal" in line) == ("charts/episodes" in line) for line in log)


REGISTERED = MY_ENV.replace("import os\nimport sys\n\nimport gymnasium as gym\nimport numpy as np\n", "")


@pytest.mark.slow
@each_way_to_work
def test_environment_that_a_copy_registers_itself(folder, tmp_path, name):
    """The worker processes get it by value, as they do not import the copy."""
    path = tmp_path / "copy_with_env.py"
    path.write_text(changed(name, ("\n\n@dataclass\nclass Args:", f"{REGISTERED}\n\n@dataclass\nclass Args:")))
    workers = ["--num-workers"] if name == "ppo_env_pool" else ["--num-envs"]
    (folder / "my_env.py").unlink()
    mine = ["--env-id", "MySim-v0", "--env-kwargs", '{"goal": 7}']
    log, errors = run_script(path, *mine, *workers, "2", *SHORT, cwd=folder)
    assert "starting 2 worker processes" in errors
    assert means(log) == MY_INFO | {"info/main": 0.0}


def test_numbers_of_info_are_in_the_log_with_envpool(train):
    log = train("ppo_continuous_action", env_id="Hopper-v4", num_envs=2, env_backend="envpool").lines
    found = {name for line in log for name in line if name.startswith("info/")}
    assert {"info/x_position", "info/x_velocity"} <= found
    assert not found & {"info/env_id", "info/elapsed_step"}


def error_of(name: str, capfd, **settings) -> str:
    """The one line of the error of a training that is refused."""
    capfd.readouterr()
    script = load(name)
    with pytest.raises(SystemExit) as end, mock.patch("torch.set_num_threads"):
        script.train(script.Args(device="cpu", tensorboard=False, **helpers.settings_of(name, settings)))
    assert end.value.code == 2
    *_, error = capfd.readouterr().err.splitlines()
    assert error.startswith("error: ")
    return error


HALF = """class HalfReward(gym.RewardWrapper):
    def reward(self, reward):
        return 0.5 * reward


class Halved(gym.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        assert env.action_space is not None


"""
WRAP = "def wrap(env: gym.Env) -> gym.Env:\n"


def test_environments_side_by_side_have_the_same_spaces(capsys):
    """Else actions that the first one lacks would never be tried."""
    script, sizes = load("ppo"), iter((2, 2, 3))
    with mock.patch.dict(gym.registry):
        gym.register("Differ-v0", lambda: tiny_envs.Tiny(action_space=Discrete(next(sizes))))
        with pytest.raises(SystemExit) as end:
            script.Envs(script.Args(env_id="Differ-v0", sync_envs=True), [1, 2, 3])
    assert end.value.code == 2 and "must have the same spaces" in capsys.readouterr().err


def test_arguments_that_envpool_lacks_are_refused_in_its_name(capsys):
    script = load("ppo")
    with pytest.raises(SystemExit):
        script.Envs(script.Args(env_kwargs='{"sutton_barto_reward": true}', env_backend="envpool"), [1, 2])
    assert "sutton_barto_reward" in (said := capsys.readouterr().err) and "EnvPool's differ" in said


def test_who_adds_a_setting_learns_where_its_bounds_are(copy, capsys):
    module = copy("ppo", ("    gamma: float = 0.99", "    log_std: float = -0.5  # own\n    gamma: float = 0.99"))
    for settings, hint in (({}, True), ({"gamma": 2.0, "log_std": 1.0}, False)):
        with pytest.raises(SystemExit) as end:
            module.train(module.Args(**settings))
        assert end.value.code == 2 and ("go into LIMITS" in capsys.readouterr().err) == hint


@pytest.mark.parametrize(
    ("name", "network", "loss"),
    [("ppo", "agent", "loss"), ("dqn", "network", "td_loss"), ("sac_continuous_action", "actor", "actor_loss")],
)
@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_an_auxiliary_head_learns_by_the_adam_of_its_network(copy, train_copy, name, twin, network, loss):
    """As docs/ say."""
    made = next(x for x in source_of(name).splitlines() if f" = Adam({network}, " in x)
    both = made.replace(f"Adam({network},", f"Adam(nn.ModuleList([{network}, head]),")
    head = "head = nn.Linear(envs.obs_dim, envs.obs_dim).to(device); heads.extend([head, deepcopy(head)])"
    aux = f"grad({loss} + (head(obs) - obs).square().mean(),"
    opened = next(x for x in ("run.open(envs, ", "run.open(\n        envs, ") if x in source_of(name + twin))
    kept = opened, f"{opened}head=head, "
    module = copy(name + twin, (made, f"    {head}\n{both}"), (f"grad({loss},", aux), kept)
    module.heads = heads = []
    train_copy(module, name, **{"compile": False} if twin else {})
    assert not torch.equal(*(head.weight for head in heads))


def test_settings_that_no_checkpoint_restores_are_refused(copy, capsys):
    head, own = "\n@dataclass\nclass Args:\n", "    net: Net = field(default_factory=Net)\n"
    nested = f"\n@dataclass\nclass Net:\n    width: int = 64\n\n{head}{own}"
    module = copy("ppo", (head, nested), ("import asdict, ", "import asdict, field, "))
    with pytest.raises(SystemExit) as end:
        module.train(module.Args())
    assert end.value.code == 2 and "`net` of `Args` is a dataclass" in capsys.readouterr().err


def test_wrappers_of_a_copy_are_around_each_environment(copy, capsys):
    """By default as many environments would be EnvPool's, which can have none."""
    body = "    return HalfReward(Halved(env))\n"
    module = copy("ppo", (WRAP, f"{HALF}{WRAP}{body}"))
    assert module.choose_backend("CartPole-v1", "auto", in_process=False) == "gymnasium"
    assert load("ppo").choose_backend("CartPole-v1", "auto", in_process=False) == "envpool"
    env = module.make_env("CartPole-v1", {})
    env.reset(seed=1)
    assert env.step(env.action_space.sample())[1] == 0.5
    make = "gym.make(env, disable_env_checker=True, **settings)"
    for changed in (  # in `make_env` itself, or no wrapper and yet a change
        copy("ppo", (make, f"gym.wrappers.TransformReward({make}, lambda reward: 0.5 * reward)")),
        copy("ppo", (make, make.replace("**", "max_episode_steps=10, **"))),
        copy("ppo", (make, 'gym.make("CartPole-v0")')),
        copy("ppo", ("return env\n", "env.unwrapped.bonus = 1.0\n    return env\n")),
        # What only some environments get
        copy("ppo", (make, make.replace("**", 'max_episode_steps=10 if "CartPole" in env.id else None, **'))),
        copy("ppo", ("return env\n", "return HalfReward(env) if isinstance(env.action_space, Dict) else env\n")),
    ):
        assert changed.choose_backend("CartPole-v1", "auto", in_process=False) == "gymnasium"
    closed = mock.Mock()
    module = copy("ppo", ("    env = wrap(gym.make", "    env = my_wrap(gym.make"))
    module.my_wrap = lambda env: mock.Mock(wraps=env, close=closed, observation_space=env.observation_space)
    assert module.changes_envs("CartPole-v1") and closed.call_count == 1  # what was tried is not left open
    module.choose_backend("tiny_envs:Count-v0", "auto", in_process=False)
    assert closed.call_count == 1  # not tried where EnvPool has no such environment
    for arguments, problem in (
        (("CartPole-v1", "envpool"), "CartPole-v1 is EnvPool's, which ignores `wrap`, `make_env` and `gym.register`"),
        (("Pong-v5", "auto"), "Pong-v5 is EnvPool's, which ignores `wrap`, `make_env` and `gym.register`"),
    ):
        with pytest.raises(SystemExit) as end:
            module.choose_backend(*arguments, in_process=False)
        assert end.value.code == 2 and problem in capsys.readouterr().err


def test_what_a_copy_registers_takes_the_place_of_an_environment_of_envpools(capsys):
    """And what it changes in Gymnasium's registry; but no id that stands there from the start."""
    script = load("ppo")
    arguments = {"env_id": "CartPole-v1", "in_process": False}
    with mock.patch.dict(gym.registry):
        gym.register("CartPole-v1", Stream)
        assert script.choose_backend(backend="auto", **arguments) == "gymnasium"
        with pytest.raises(SystemExit) as end:
            script.choose_backend(backend="envpool", **arguments)
    assert end.value.code == 2 and "CartPole-v1 is EnvPool's, which ignores" in capsys.readouterr().err
    wrappers = (SimpleNamespace(name="TimeAwareObservation"),)
    for name, value in (("max_episode_steps", 3), ("kwargs", {"bonus": True}), ("additional_wrappers", wrappers)):
        with mock.patch.object(gym.registry["CartPole-v1"], name, value):
            assert script.choose_backend(backend="auto", **arguments) == "gymnasium"
    both = gym.registry.keys() & importlib.import_module("envpool").list_all_envs()
    assert len(both) > 50 and not any(map(script.changes_envs, both))


def test_a_wrapper_changes_what_is_learnt(copy, train_copy):
    module = copy("ppo", (WRAP, f"{HALF}{WRAP}    return HalfReward(env)\n"))
    log = train_copy(
        module, "ppo", env_id="CartPole-v1", num_envs=16, num_steps=32, total_timesteps=1024, sync_envs=True
    )
    lines = [line for line in log if "charts/episodic_return" in line]
    assert lines and all(x["charts/episodic_return"] == 0.5 * x["charts/episodic_length"] for x in lines)


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("text", ["{goal: 7}", "[1, 2]", "7", '{"no_such_argument": 1}'])
def test_env_kwargs_that_cannot_be_used_are_refused(capfd, tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    error_of(name, capfd, env_kwargs=text)
    assert not list(tmp_path.iterdir())


def test_env_kwargs_of_envpool_are_no_flags(capfd, tmp_path, monkeypatch):
    """What a flag says can't be said once more; what EnvPool alone knows can."""
    monkeypatch.chdir(tmp_path)
    own = {"env_id": "CartPole-v1", "env_backend": "envpool", "num_envs": 2}
    error = error_of("ppo", capfd, env_kwargs='{"num_envs": 3, "seed": 1}', **own)
    assert "--env-kwargs can't set num_envs, seed" in error
    for text, reason in (('{"gray_scale": false}', "(12, 84, 84)"), ('{"reward_clip": false}', "reward_clip")):
        assert reason in error_of("ppo_atari_envpool", capfd, env_kwargs=text)
    assert not list(tmp_path.iterdir())


# Hints


class Pixels(gym.Env):
    observation_space, action_space = Box(0, 255, (20, 20, 3), np.uint8), Discrete(3)

    def __init__(self, action_space: gym.Space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return np.zeros((20, 20, 3), np.uint8), {}

    def step(self, _action):
        return np.zeros((20, 20, 3), np.uint8), 0.0, False, self.np_random.random() < 0.1, {}


gym.register("PixelChoice-v0", Pixels, kwargs={"action_space": Discrete(3)})
gym.register("PixelPush-v0", Pixels, kwargs={"action_space": Box(-1, 1, (2,))})


@pytest.mark.parametrize("name", EAGER)
def test_pixels_into_an_mlp_get_a_hint(train, capfd, name):
    train(name, total_timesteps=64)
    assert "pixels" not in capfd.readouterr().err
    train(name, env_id=f"Pixel{'Choice' if discrete(name) else 'Push'}-v0", total_timesteps=64)
    assert "ppo_atari_envpool" in capfd.readouterr().err


@pytest.mark.parametrize("name", [name for name in EAGER if not has_pool(name)] + ["ppo_atari_envpool"])
@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "ALE/Pong-v5"])
def test_games_by_other_names_are_found(capfd, tmp_path, monkeypatch, name, env_id):
    monkeypatch.chdir(tmp_path)
    script = load(name)
    with pytest.raises(SystemExit) as end, mock.patch("torch.set_num_threads"):
        script.train(script.Args(env_id=env_id, device="cpu"))
    assert end.value.code == 2 and "Pong-v5" in capfd.readouterr().err.splitlines()[-1].partition("close to it")[2]


@pytest.mark.parametrize("name", [name for name in EAGER if not on_policy(name)])
def test_run_that_is_over_before_it_learns_gets_a_hint(train, capfd, name):
    train(name, total_timesteps=110)
    assert "note:" not in capfd.readouterr().err
    train(name, total_timesteps=90)
    assert "nothing is learnt before step 100" in capfd.readouterr().err
    run = train(name, total_timesteps=200, save_replay=False)  # resumed, it fills its buffer again before it learns
    for total, hint in ((280, "before step 300"), (420, "before step 380")):
        helpers.call(name, resume=str(run.run_dir), device="cpu", total_timesteps=total)
        assert f"nothing is learnt {hint}" in capfd.readouterr().err


# Critics


@pytest.mark.parametrize("name", ["sac_continuous_action_torchcompile", "td3_continuous_action_torchcompile"])
@pytest.mark.parametrize(
    "change",
    [
        "critics[1].net[1] = nn.Tanh()",
        "critics[1].net[0] = critics[0].net[0]",
        "critics[0].prior, critics[1].prior = 0.0, 50.0",
        "critics[0].prior, critics[1].prior = torch.rand(2, 30)",
    ],
)
def test_critics_that_differ_or_share_layers_are_refused_where_they_are_stacked(copy, train_copy, capsys, name, change):
    line = next(line for line in source_of(name).splitlines() if line.startswith("    critics = nn.ModuleList("))
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, (line, f"{line}\n    {change}")), name, compile=False)
    assert end.value.code == 2 and "critics that share layers, or differ, can't be stacked" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sac_continuous_action_torchcompile", "td3_continuous_action_torchcompile"])
def test_critics_that_cannot_run_stacked_are_refused(copy, train_copy, capsys, name):
    """A bug that shows without the stack, too, keeps its traceback."""
    layer = "nn.Linear(256, 1),\n        )  # fmt: skip\n\n    def forward(self, obs: Tensor, action"
    for new, expected in ((f"spectral_norm({layer[:17]})", SystemExit), ("nn.Linear(255, 1)", RuntimeError)):
        module = copy(name, (layer, layer.replace(layer[:17], new)))
        module.spectral_norm = torch.nn.utils.parametrizations.spectral_norm
        with pytest.raises(expected) as end:
            train_copy(module, name, compile=False)
        error = capsys.readouterr().err
        assert expected is RuntimeError or (end.value.code == 2 and "these critics can't be stacked: " in error)


# Gradients, optimizers and what they change


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_a_loop_that_calls_backward_learns_the_same(copy, train_copy, twin):
    """`Adam.zero_grad` clears the gradients to which `backward` adds, eager and compiled."""
    step = "optimizer.step(torch.autograd.grad(td_loss, optimizer.weights))"
    own = (
        "optimizer.zero_grad()\n        td_loss.backward()\n        optimizer.step([w.grad for w in optimizer.weights])"
    )
    runs = [train_copy(copy(f"dqn{twin}", *changes), "dqn", **quick("dqn")) for changes in ((), ((step, own),))]
    assert runs[0][-1]["losses/td_loss"] == pytest.approx(runs[1][-1]["losses/td_loss"], rel=1e-4)
    assert len(runs[0]) == len(runs[1])


IDLE = {
    "clip": ("optimizer.step(", "nn.utils.clip_grad_norm_(agent.parameters(), 0.5)\n        optimizer.step("),
    "torch": (
        "    run.open(envs, ",
        "    other = torch.optim.AdamW(agent.parameters())\n    run.open(envs, other=other, ",
    ),
    "imported": (
        "    run.open(envs, ",
        "    from torch import optim\n    other = optim.NAdam(agent.parameters())\n    run.open(envs, other=other, ",
    ),
    "by its name": ("    run.open(envs, ", "    other = SGD(agent.parameters())\n    run.open(envs, other=other, "),
}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("clip", "nn.utils.clip_grad_norm_"),
        ("torch", "torch.optim.AdamW"),
        ("imported", "optim.NAdam"),
        ("by its name", "SGD"),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "ppo_torchcompile"])
def test_what_would_find_no_gradient_is_refused(copy, train_copy, capsys, name, kind, named):
    more = ("import tyro\n", f"import tyro\n{'from torch.optim import SGD' * (named == 'SGD')}\n")
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, IDLE[kind], more), "ppo")
    assert end.value.code == 2 and f"`{named}` would do nothing" in capsys.readouterr().err


FILLED = ["loss.backward()", "weight.grad=gradient", "w.grad, g = g, None", "w.grad = None if g is None else g"]


@pytest.mark.parametrize("line", FILLED)
def test_what_finds_gradients_may_work_on_them(copy, line):
    call = ("optimizer.step(clip", f"{line}\n        optimizer.step(clip")
    copy("ppo", IDLE["clip"], call).refuse_idle_calls()
    with pytest.raises(SystemExit):
        copy("ppo", IDLE["clip"], (call[0], f"# {call[1]}")).refuse_idle_calls()
    own = "def clip_grad_norm_(x):\n    return x\n\n\ndef mlp("
    copy("ppo", ("optimizer.step(clip(", "optimizer.step(clip_grad_norm_("), ("def mlp(", own)).refuse_idle_calls()
    copy("ppo", ("optimizer.step(clip(", "# torch.optim.Adam(x)\n        optimizer.step(clip(")).refuse_idle_calls()


def test_a_loss_elsewhere_that_fills_gradients_does_not_hide_a_call_that_finds_none(copy, capsys):
    """In the function with `torch.autograd.grad` it would do nothing; beside `backward` it does what it should."""
    other = "def learn_more(net, loss):\n    loss.backward()\n    nn.utils.clip_grad_norm_(net.parameters(), 1)\n\n\n"
    other = ("def mlp(", f"{other}def mlp(")
    copy("ppo", other).refuse_idle_calls()
    with pytest.raises(SystemExit):
        copy("ppo", other, IDLE["clip"]).refuse_idle_calls()
    assert "clip_grad_norm_` would do nothing" in capsys.readouterr().err
    copy("ppo", other, in_the_loop("nn.utils.clip_grad_norm_(agent.parameters(), 1)")).refuse_idle_calls()


OWNERS = {
    "Adam(agent.actor, args.learning_rate)": "no optimizer in `run.open` changes `agent.critic.0.weight`",
    "Adam(nn.ModuleList([agent, nn.Linear(2, 2)]), args.learning_rate, eps=1e-5)": "must get the modules whose weights",
    "torch.optim.Adam(nn.Linear(2, 2).parameters())": "must get the modules whose weights `optimizer` changes",
}


@pytest.mark.parametrize("made", OWNERS)
def test_each_weight_has_an_optimizer_and_is_saved(copy, train_copy, capsys, tmp_path, made):
    module = copy("ppo", ("Adam(agent, args.learning_rate, eps=1e-5)", made))
    module.refuse_idle_calls = lambda: None
    with pytest.raises(SystemExit) as end:
        train_copy(module, "ppo")
    assert end.value.code == 2 and OWNERS[made] in capsys.readouterr().err
    assert not (tmp_path / "copy_run0").exists()


OPENED = "run.open(envs, agent=agent, optimizer=optimizer)"
MAY_STAY = {
    "a copy that follows": "run.open(envs, agent=agent, optimizer=optimizer, slow=deepcopy(agent))",
    "frozen": "run.open(envs, agent=agent, optimizer=optimizer, own=nn.Linear(2, 2).requires_grad_(False))",
    "a phase of its own": "run.open(envs, agent=agent, optimizer=optimizer, other=Adam(agent.critic, 0.1))",
    "a part that saves the module": "run.open(envs, agent=Part(agent), optimizer=optimizer)",
    "an optimizer of its own class": "run.open(envs, agent=agent, optimizer=optimizer, own=head, other=Plain(head))",
}
PLAIN = """class Part:
    def __init__(self, module):
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict


class Plain(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.weights = list(module.parameters())

    def step(self, gradients):
        pass


def mlp("""


@pytest.mark.parametrize("why", MAY_STAY)
def test_weights_may_have_no_adam_for_a_reason(copy, train_copy, why):
    made = "    run.open(envs,", "    head = nn.Linear(2, 2)\n    run.open(envs,"
    train_copy(copy("ppo", (OPENED, MAY_STAY[why]), made, ("def mlp(", PLAIN)), "ppo")


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_a_rate_of_its_own_for_the_critic_works_as_the_page_says(copy, train_copy, monkeypatch, twin):
    """By a rate of 0 the critic stays as it is, and all else learns."""
    page, name = (ROOT / "docs" / "ppo.md").read_text().partition("rate of its own for the critic")[2], PPO + twin
    made, stepped = re.findall(r"```python\n(.+?)```", page, re.DOTALL)[:2]
    lines = source_of(name).splitlines()
    old_made = next(x for x in lines if x.startswith("    optimizer = Adam("))
    old_step = next(x for x in lines if x.startswith("        optimizer.step(clip("))
    changes = [(old_made, made.replace("1e-3", "0.0").rstrip()), (old_step, stepped.rstrip())]
    module = copy(name, *changes, ("optimizer=optimizer,", "optimizer=optimizer, critic_optimizer=critic_optimizer,"))
    agents, check = [], module.check_owners

    def keep(state: dict, variables: dict) -> None:
        check(state, variables)
        agents.extend([state["agent"], deepcopy(state["agent"])])

    monkeypatch.setattr(module, "check_owners", keep)
    train_copy(module, PPO)
    pairs = zip(*(agent.named_parameters() for agent in agents), strict=True)
    kept = {key for (key, now), (_, before) in pairs if torch.equal(now, before)}
    assert kept == {key for key, _ in agents[0].named_parameters() if key.startswith("critic.")}


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_a_coefficient_that_adapts_is_kept_as_the_page_says(copy, train_copy, tmp_path, twin):
    page, name = (ROOT / "docs" / "ppo.md").read_text().partition("A coefficient that adapts")[2], PPO + twin
    text = re.search(r"```python\n(.+?)```", page, re.DOTALL)[1]
    before, in_the_update, after = text.replace("0.005", "10.0").split("    ...\n")  # halved in each iteration
    lines = source_of(name).splitlines()
    logged = next(x for x in lines if x.startswith("        # Log"))
    step = next(x for x in lines if x.startswith("        optimizer.step(clip("))
    changes = [before_the_loop(before.strip()), (logged, f"{after.rstrip()}\n{logged}")]
    changes += [(step, f"{in_the_update.rstrip()}\n{step}")]
    module = copy(name, *changes, ("optimizer=optimizer,", "optimizer=optimizer, adaptive=adaptive,"))
    train_copy(module, PPO)
    path = tmp_path / "copy_run0" / "checkpoint.pt"
    for _ in range(2):
        state = torch.load(path, weights_only=True)
        assert state["adaptive"]["kl_coef"].item() == pytest.approx(0.2 * 0.5 ** state["iteration"])
        module.train(module.Args(resume=str(path.parent), total_timesteps=state["global_step"] + 128, device="cpu"))
    assert torch.load(path, weights_only=True)["iteration"] > state["iteration"]


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_a_head_in_numpy_works_as_the_page_says(copy, train_copy, twin):
    page = (ROOT / "docs" / "dqn.md").read_text().partition("**A head of another kind.**")[2]
    head = "nn.Linear(84, num_actions),\n        )  # fmt: skip\n"
    wide = head.replace("num_actions", "51 * num_actions")
    changes = [(head, f"{wide}        self.register_buffer('support', torch.linspace(-10, 10, 51))\n")]
    expected = "(self.net(obs).view(len(obs), -1, 51).softmax(2) * self.support).sum(2)"
    changes += [("return self.net(obs)", f"return {expected}")]
    policy = textwrap.indent(re.search(r"```python\n(.+?)```", page, re.DOTALL)[1], "    ")
    log = train_copy(copy(f"dqn{twin}", *changes, ("    q_values = numpy_mlp(collector.net)\n", policy)), "dqn")
    assert "losses/td_loss" in log[-1]


@pytest.mark.parametrize("layer", ["Dropout(0.5)", "BatchNorm1d(120)"])
@pytest.mark.parametrize("twin", ["", "_torchcompile"])
def test_layers_that_act_in_another_mode_work_as_the_page_says(copy, train_copy, twin, layer):
    page = (ROOT / "docs" / "dqn.md").read_text().partition("**Dropout, BatchNorm.**")[2]
    made, update = re.search(r"```python\n(.+?)```", page, re.DOTALL)[1].split("    ...\n")
    lines = source_of(f"dqn{twin}").splitlines()
    network, target = (
        next(x for x in lines if x.startswith(f"    {name} = ")) for name in ("network", "target_network")
    )
    changes = [(f"{network}\n{target}", f"{network}\n{made}{target}"), ("                losses = update()\n", update)]
    changes += [("nn.Linear(120, 84)", f"nn.{layer}, nn.Linear(120, 84)")]
    changes += [("numpy_mlp(collector.net)", "numpy_mlp(collector)")]
    noted = "        modes.add((len(obs), self.training))\n        return self.net(obs)"
    changes += [] if twin else [("        return self.net(obs)", noted)]
    module = copy(f"dqn{twin}", *changes)
    module.modes = modes = set()
    log = train_copy(module, "dqn", **quick("dqn"))
    assert "losses/td_loss" in log[-1]
    if not twin:
        learns = helpers.TABLE["dqn"].small["batch_size"]
        assert {(learns, True), (learns, False)} < modes  # the network that learns, and its targets
        assert not [size for size, training in modes if training and size != learns]


@pytest.mark.parametrize(
    ("name", "setting"),
    [("dqn", "learning_rate"), ("td3_continuous_action", "learning_rate"), ("sac_continuous_action", "q_lr")],
)
def test_a_learning_rate_that_nothing_reads_is_refused(copy, train_copy, capsys, name, setting):
    loop = "    while run.goes_on():\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy(name, (loop, f"{loop}        args.{setting} *= 0.99\n")), name, **quick(name))
    assert end.value.code == 2 and f"setting `args.{setting}` has no effect" in capsys.readouterr().err


KL = 'args.learning_rate *= 1.5 if losses[METRICS.index("losses/approx_kl")] < 0.005 else 0.7'


@pytest.mark.parametrize("settings", [{"anneal_lr": True}, {"anneal_lr": False}], ids=["annealed", "as it is"])
def test_a_learning_rate_that_is_read_in_the_next_iteration_works(copy, train_copy, settings):
    """As one that follows the KL divergence: it is changed after its optimizer was told."""
    changes = [(LOOP, f"{LOOP}        optimizer.learning_rate.fill_(args.learning_rate)\n")]
    changes += [("        # Log\n", f"        {KL}\n        # Log\n")]
    changes += [("    return run.close()", "        run.log({'own/x': 1.0})\n    return run.close()")]  # a second line
    log = train_copy(copy("ppo", *changes), "ppo", **settings)
    assert len({line.get("charts/learning_rate") for line in log}) > 3


def test_a_learning_rate_that_nothing_reads_is_refused_where_annealing_was_taken_out(copy, train_copy, capsys):
    fill = "            optimizer.learning_rate.fill_(args.learning_rate * (1 - iteration / num_iterations))\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo", (fill, "            args.learning_rate *= 0.9\n")), "ppo")
    assert end.value.code == 2 and "setting `args.learning_rate` has no effect" in capsys.readouterr().err


def test_whether_to_anneal_is_no_learning_rate(copy, train_copy):
    train_copy(copy("ppo", in_the_loop("args.anneal_lr = iteration >= 2")), "ppo")


def test_a_learning_rate_may_be_assigned(copy, train_copy):
    """To the tensor, which stays the same."""
    fill = "optimizer.learning_rate.fill_(args.learning_rate * (1 - iteration / num_iterations))"
    set_to = "optimizer.learning_rate = args.learning_rate * (1 - iteration / num_iterations)"
    logs = [train_copy(copy(f"ppo{twin}", (fill, set_to)), "ppo", **settings) for twin, settings in TWINS.items()]
    assert logs[0] == logs[1] == train_copy(load("ppo"), "ppo")


TWINS = {"": {}, "_torchcompile": {"compile": False}}


def test_averaged_weights_are_no_optimizer(copy, train_copy):
    """Though their class comes from a module of torch.optim."""
    changes = [("import tyro\n", "import tyro\nfrom torch.optim.swa_utils import AveragedModel\n")]
    changes += [before_the_loop("averaged = AveragedModel(agent).requires_grad_(False)")]
    changes += [in_the_loop("averaged.update_parameters(agent)")]
    changes += [("optimizer=optimizer)", "optimizer=optimizer, averaged=averaged)")]
    train_copy(copy("ppo", *changes), "ppo")


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        ("own = nn.Linear(2, 2)", "`own`"),
        ("rate = torch.optim.SGD([torch.zeros(2)])  # backward", "`rate`"),
        ("alias, slow = agent.actor, deepcopy(agent)", None),
    ],
)
def test_what_no_checkpoint_would_have_is_noted(copy, train_copy, capsys, monkeypatch, line, noted):
    """A resumed run would begin with a new one. A part of what is saved, or a copy of it, is nothing new."""
    module = copy("ppo", before_the_loop(line))
    monkeypatch.setattr(module, "refuse_idle_calls", lambda: None)
    train_copy(module, "ppo")
    said = capsys.readouterr().err
    assert (noted is None and "is not given" not in said) or f"note: {noted} is not given to `run.open`" in said


@pytest.mark.parametrize(
    "line", ["optimizer = Adam(network, args.learning_rate)", "target_network = deepcopy(network)"]
)
def test_what_is_made_anew_in_the_loop_is_refused(copy, train_copy, capsys, line):
    """A checkpoint would keep the old one."""
    loop = "    while run.goes_on():\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("dqn", (loop, f"{loop}        {line}\n")), "dqn", **quick("dqn"))
    name = line.partition(" ")[0]
    assert end.value.code == 2 and f"`{name}` is not what `run.open` was given" in capsys.readouterr().err


def test_a_variable_may_have_the_name_of_another_part(copy, train_copy):
    """As an opponent by the name under which the network is saved."""
    changes = [("agent=agent, optimizer", "other=agent, optimizer")]
    changes += [("    statistics = Epi", "    other = deepcopy(agent)\n    statistics = Epi")]
    train_copy(copy("ppo", *changes), "ppo")


@pytest.mark.parametrize("value", ["np.float32(1)", "np.bool_(True)", "np.array(0.5)", "torch.ones(())", "True", "3"])
def test_numbers_of_all_kinds_are_metrics(copy, train_copy, value):
    assert train_copy(copy("ppo", ("run.log(named(", f"run.log({{'own/x': {value}}} | named(")), "ppo")[0]["own/x"] > 0


@pytest.mark.parametrize("value", ["None", "'high'", "np.ones(2)"])
def test_a_metric_that_is_no_number_is_named(copy, train_copy, capsys, value):
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo", ("run.log(named(", f"run.log({{'eval/return': {value}}} | named(")), "ppo")
    assert end.value.code == 2 and "the metric eval/return is " in capsys.readouterr().err


def test_a_second_line_for_a_step_has_no_speed(copy, train_copy, tmp_path):
    """Such as that of an evaluation, after the script's own."""
    change = "    return run.close()", "        run.log({'own/x': 1.0})\n    return run.close()"
    log = train_copy(copy("ppo", change), "ppo")
    assert [line.get("own/x") for line in log] == [None, 1.0] * (len(log) // 2)
    (path,) = tmp_path.glob("copy_run*/metrics.jsonl")
    speeds = [json.loads(line).get("charts/SPS") for line in path.read_text().splitlines()]
    assert all(speeds[::2]) and not any(speeds[1::2])


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action_torchcompile"])
def test_batch_norm_in_the_actor_may_be_there_while_it_acts_by_averages(capsys, name):
    actor = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(SystemExit):
        load(name).refuse_batch_norm(actor)
    assert "`eval()` when it is made" in capsys.readouterr().err
    load(name).refuse_batch_norm(actor.eval())


def test_a_learning_rate_that_nothing_reads_is_refused_though_another_one_is_read(copy, train_copy, capsys):
    loop = "    while run.goes_on():\n"
    lines = "        args.policy_lr = args.q_lr = 1e-3 / (1 + run.step)\n"
    lines += "        actor_optimizer.learning_rate.fill_(args.policy_lr)\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("sac_continuous_action", (loop, loop + lines)), "sac_continuous_action")
    assert end.value.code == 2 and "setting `args.q_lr` has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["td3_continuous_action", "td3_continuous_action_torchcompile"])
def test_betas_that_are_changed_after_an_adam_was_made_are_refused(copy, train_copy, capsys, name):
    """Its formula, in compiled code, has the old ones in a tensor."""
    opened = "    run.open(\n"
    with pytest.raises(SystemExit) as end:
        change = opened, f"    actor_optimizer.betas = (0.5, 0.9)\n{opened}"
        train_copy(copy(name, change), "td3_continuous_action", **({"compile": False} if "torch" in name else {}))
    assert end.value.code == 2 and "`betas` of an Adam changed" in capsys.readouterr().err


@pytest.mark.parametrize("wrapper", ["NormalizeObservation", "NormalizeReward"])
def test_statistics_that_no_checkpoint_has_are_refused(copy, train_copy, capsys, wrapper):
    body = f"    return gym.wrappers.ClipReward(gym.wrappers.{wrapper}(env), -1, 1)\n"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo", (WRAP, f"{WRAP}{body}")), "ppo")
    assert end.value.code == 2 and f"no checkpoint has the statistics of `{wrapper}`" in capsys.readouterr().err
    fixed = f"    env = gym.wrappers.{wrapper}(env)\n    env.update_running_mean = False\n    return env\n"
    assert train_copy(copy("ppo", (WRAP, f"{WRAP}{fixed}")), "ppo")


def test_several_numbers_for_each_action_are_refused(capsys):
    """As quantiles, or probabilities of returns: what acts needs their mean."""
    script, net = load("dqn"), nn.Linear(3, 8)
    with pytest.raises(SystemExit):
        script.check_policy(
            lambda x: net(torch.from_numpy(x)).detach().view(-1, 2, 4).numpy(), lambda x: net(x).view(-1, 2, 4), net, 3
        )
    assert "gives outputs of shape (2, 4) per observation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "line", "setting"),
    [
        ("sac_continuous_action", "args.alpha = 0.01", "alpha"),
        ("dqn", "run.args.exploration_fraction *= 0.9", "exploration_fraction"),
        ("dqn_torchcompile", "args.exploration_fraction = 0.1", "exploration_fraction"),
        ("dqn", "args.target_network_frequency = 100", None),
        ("dqn", "args.batch_size = 64", None),
        ("dqn", "if run.step > 1000: args.buffer_size = 10", "buffer_size"),
        ("dqn", "args.alpha = 0.1; print(args.alpha)", None),
        ("dqn", "args.alpha = 0.1; print(vars(args)['alpha'])", None),
        ("dqn", "run.args.buffer_size = 10; print(run.args)", None),
        ("dqn", "envs.kwargs.alpha = 0.1", None),
        ("ppo_continuous_action", "args.norm_adv = False", None),
    ],
)
def test_a_setting_that_only_the_start_reads_is_refused_when_the_loop_changes_it(copy, capsys, name, line, setting):
    loop = "    for iteration in" if name.startswith("ppo") else "    while run.goes_on():"
    (loop,) = [x for x in (ROOT / f"scripts/{name}.py").read_text().splitlines(keepends=True) if x.startswith(loop)]
    module = copy(name, (loop, f"{loop}        {line}\n"))
    with pytest.raises(SystemExit) if setting else contextlib.nullcontext():
        module.refuse_idle_settings()
    said = f"`args.{setting}` is read only before the loop, so setting it there has no effect"
    assert setting is None or said in capsys.readouterr().err
    if setting:
        with pytest.raises(SystemExit):
            module.Run(module.Args())
        read = f"    level = args.{setting}\n{loop}"  # after `run.open`, as by a schedule that goes on after a resume
        copy(name, (loop, f"{read}        {line}\n")).refuse_idle_settings()


HELPER = """class Scale:
    def __init__(self):
        self.mean, self.history, self.scale = 0.0, deque(maxlen=3), torch.ones(())

    def update(self, x: float) -> None:
        self.history.append(x)
        self.mean = sum(self.history) / len(self.history)
        self.scale.fill_(1 / (1 + self.mean))"""


def test_an_object_may_change_of_which_only_a_tensor_is_read(copy, train_copy):
    """What its other methods read, which only the loop calls, does not matter."""
    changes = [of_the_file(HELPER), before_the_loop("scaler = Scale()"), (BONUS, "scaler.scale * entropy")]
    changes += [in_the_loop("scaler.update(float(iteration))")]
    train_copy(copy("ppo_torchcompile", *changes), "ppo_torchcompile", compile=False)


@pytest.mark.parametrize(
    ("made", "read", "changed"),
    [
        (of_the_file("from types import SimpleNamespace\n\nCONFIG = SimpleNamespace(own=1.0, frames=0)"),
         "CONFIG.own", "CONFIG.frames += 1"),
        (before_the_loop("config = type('Config', (), {'own': 1.0})"), "config.own", "config.other = iteration"),
    ],
    ids=["a namespace", "a class"],
)  # fmt: skip
def test_what_no_compiled_code_reads_may_change(copy, train_copy, made, read, changed):
    """Though it is an attribute of an object of which that code reads another one."""
    module = copy("ppo_torchcompile", made, (BONUS, f"{read} * entropy"), in_the_loop(changed))
    train_copy(module, "ppo_torchcompile", compile=False)


def test_a_decorator_around_compiled_code_is_read_too(copy, capsys):
    """`functools.wraps` gives it the marks of what it wraps."""
    script = copy("ppo_torchcompile", of_the_file(DECORATOR))
    inner = script.refuse_changes(lambda x: x + 1)
    outer = script.refuse_changes(script.annealed(inner))
    outer(torch.ones(()))
    script.Progress.left = 0.5
    with pytest.raises(SystemExit):
        outer(torch.ones(()))
    assert "`Progress.left` was 1.0" in capsys.readouterr().err


def test_a_tensor_handed_over_by_name_is_refused(copy, train_copy, capsys):
    """Compiled code takes tensors by position."""
    changes = [("update_minibatch(index, *batch) for", "update_minibatch(index, *batch, scale=index.new_ones(())) for")]
    changes += [("def update_minibatch(index: Tensor, *batch: Tensor)", "def update_minibatch(index, *batch, scale)")]
    with pytest.raises(SystemExit) as end:
        train_copy(copy("ppo_torchcompile", *changes), "ppo_torchcompile", compile=True)
    assert end.value.code == 2 and "not `scale=...`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factor", "hint"),
    [("random.random()", "draw random numbers by PyTorch"), ("(2 if loss.item() > 1 else 1)", "`torch.where` decides")],
)
def test_what_can_not_be_compiled_says_what_to_write(copy, train_copy, capsys, factor, hint):
    line = "        optimizer.step(clip("
    with pytest.raises(SystemExit) as end:
        module = copy("ppo_torchcompile", (line, f"        loss = loss * {factor}\n{line}"))
        train_copy(module, "ppo_torchcompile", compile=True)
    assert end.value.code == 2 and hint in capsys.readouterr().err


def test_a_layer_is_named_as_one_writes_it(copy, train_copy, capsys):
    with pytest.raises(SystemExit):
        module = copy("ppo_torchcompile", in_the_loop("agent.actor[0].train(iteration < 2)"))
        train_copy(module, "ppo_torchcompile", compile=False)
    assert "`agent.actor.0.training` was True" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_checks_itself(capsys, name):
    """Within a function that is checked, too: what changes from one of its calls to the next is back at its end."""
    script, factor = load(name), 2.0
    (times,) = script.compiled(torch.device("cpu"), lambda x: factor * x)
    assert script.refuse_changes(times) is times

    def twice(x: torch.Tensor) -> torch.Tensor:
        nonlocal factor
        first = times(x)
        factor = factor_within
        both = first + times(x)
        factor = 2.0
        return both

    outer = script.refuse_changes(twice)
    factor_within = 2.0
    assert outer(torch.ones(())) == 4
    factor_within = 3.0
    with pytest.raises(SystemExit):
        script.refuse_changes(lambda x: twice(x))(torch.ones(()))
    assert "`factor` was 2.0 at the first call and is 3.0 now" in capsys.readouterr().err


@pytest.mark.slow
def test_more_shapes_than_can_be_compiled_are_refused_in_one_line(capsys):
    script = load("ppo_torchcompile")
    double = script.refuse_changes(*script.compiled(torch.device("cpu"), lambda x: 2 * x))
    for size in range(2, 10):
        assert double(torch.ones(size)).sum() == 2 * size
    with pytest.raises(SystemExit) as end:
        double(torch.ones(20))
    assert end.value.code == 2 and "was compiled for 8 shapes of its inputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["args.clip_coef = first * (1 - iteration / 100)", "args.clip_coef *= 0.9", "args.clip_coef = 0.1"]
)
def test_a_schedule_in_the_settings_goes_on_when_a_run_is_resumed(copy, train_copy, tmp_path, capsys, line):
    """Whether it is computed from the first value or from the last one; --override takes the place of both."""
    first = "    run.open(", "    first = args.clip_coef\n    run.open("
    module = copy("ppo", first, in_the_loop(f"{line}; VALUES.append(args.clip_coef)"))
    module.VALUES = []
    train_copy(module, "ppo", total_timesteps=640)
    whole, module.VALUES = module.VALUES, []
    train_copy(module, "ppo", total_timesteps=320)
    run_dir = str(tmp_path / "copy_run1")
    assert torch.load(f"{run_dir}/checkpoint.pt")["args"]["clip_coef"] == 0.2
    module.train(module.Args(resume=run_dir, total_timesteps=640))
    assert module.VALUES == whole and len(whole) > 5
    assert "note: `args.clip_coef`, 0.2 before `run.open`, is " in capsys.readouterr().err
    done = len(whole)
    for first, total_timesteps in ((0.2, 960), (0.5, 1280)):  # the former is what it was at the start
        module.VALUES.clear()
        override = (f"clip_coef={first}",)
        module.train(module.Args(resume=run_dir, total_timesteps=total_timesteps, override=override))
        expected = {"first": first * (1 - done / 100), "*= 0.9": first * 0.9, "= 0.1": 0.1}
        assert module.VALUES[0] == pytest.approx(next(x for text, x in expected.items() if text in line))
        done += len(module.VALUES)


def test_a_schedule_in_the_settings_begins_anew_where_runners_have_the_first_ones(copy, train_copy, tmp_path):
    """Ray's runners end a run in which settings change, and it could not go on if those of its end came back."""
    line = "        VALUES.append(args.ent_coef); args.ent_coef *= 0.5\n        runners.publish("
    module = copy("ppo_ray", ("        runners.publish(", line))
    module.VALUES = []
    train_copy(module, "ppo_ray", num_runners=0, envs_per_runner=1, num_steps=32, total_timesteps=96)
    first, at_the_end = module.VALUES[0], module.VALUES[-1] / 2
    longer = {"resume": str(tmp_path / "copy_run0"), "device": "cpu"}
    steps = torch.load(tmp_path / "copy_run0/checkpoint.pt")["args"]["total_timesteps"]
    for has_sent, expected in ((False, at_the_end), (True, first)):
        module.VALUES.clear()
        if has_sent:
            module.OneRunner.sent = {}  # as `RayRunners` has it
        module.train(module.Args(**longer, total_timesteps=2 * (1 + has_sent) * steps))
        assert module.VALUES[0] == expected


def test_a_learning_rate_that_is_annealed_may_be_changed(copy, train_copy):
    module = copy("ppo", in_the_loop("args.learning_rate = 0.5"))
    assert train_copy(module, "ppo")[0]["charts/learning_rate"] == 0.5
    with pytest.raises(SystemExit):
        train_copy(module, "ppo", anneal_lr=False)
    for read in ("args.learning_rate", "0.5 * args.learning_rate"):
        both = in_the_loop(f"args.learning_rate *= 0.9; optimizer.learning_rate.fill_({read})")
        train_copy(copy("ppo", both), "ppo", anneal_lr=False)
    start = "    optimizer = Adam("
    train_copy(copy("ppo", (start, f"    args.learning_rate *= 2\n{start}")), "ppo", anneal_lr=False)


def test_names_of_the_log_are_refused_for_metrics_of_ones_own(copy, train_copy, capsys):
    for name in ("charts/episodic_length", "global_step"):
        module = copy("dqn", ("run.log({**metrics,", f"run.log({{**metrics, {name!r}: 1.0,"))
        with pytest.raises(SystemExit) as end:
            train_copy(module, "dqn", **quick("dqn"))
        assert end.value.code == 2 and f"can't be called {name}" in capsys.readouterr().err


WIDE = {
    "dqn": [("nn.Linear(84, num_actions)", "nn.Linear(84, 64 * num_actions)")],
    "ppo": [
        ("self.actor = mlp(obs_dim, num_actions,", "self.actor = mlp(obs_dim, 64 * num_actions,"),
        ("*action.shape, num_actions)", "*action.shape, 64 * num_actions)"),
    ],
    "ppo_atari_envpool": [("nn.Linear(512, num_actions)", "nn.Linear(512, 64 * num_actions)")],
}


@pytest.mark.parametrize("name", WIDE)
def test_a_network_with_more_outputs_than_actions_is_noticed(copy, train_copy, capsys, name):
    """EnvPool, which takes any number, would read what lies behind its own memory."""
    settings = {} if "atari" in name else {"env_id": "CartPole-v1", "env_backend": "envpool", "num_envs": 2}
    more = {"epsilon_start": 0.0, "epsilon_end": 0.0} if name == "dqn" else {}
    with pytest.raises(SystemExit):
        train_copy(copy(name, *WIDE[name]), name, **settings, **more)
    assert "does the network have one output per action?" in capsys.readouterr().err


def test_outputs_of_another_shape_are_shown(copy, train_copy, capsys):
    head = "nn.Linear(84, num_actions)", "nn.Linear(84, 3 * num_actions)"
    mean = "return self.net(obs)", "return self.net(obs).view(len(obs), -1, 3).mean(2)"
    with pytest.raises(SystemExit) as end:
        train_copy(copy("dqn", head, mean), "dqn")
    assert end.value.code == 2
    assert re.search(r"has outputs of shape \(\d+,\), the one that learns \(\d+,\)", capsys.readouterr().err)
