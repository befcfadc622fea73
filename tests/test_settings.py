"""Every setting of an algorithm counts: with another value, something else is learnt."""

import re
from dataclasses import fields
from functools import cache

import helpers
import pytest
import torch
from helpers import load

from benchmarks.common.programs import SCRIPTS

# Integers among them; others are sizes, which may be bound to each other
INTEGERS = "update_epochs", "policy_frequency", "target_network_frequency", "n_step", "batch_updates"
# What does not change what is learnt, or not by itself, or not with a single runner
LEFT_OUT = {"save_replay", "alpha", "sync_gradients"}
# Those of Adam that are no setting: PPO's are those of CleanRL
ADAM_EPS = {"dqn": 1e-8, "sac_continuous_action": 1e-8, "td3_continuous_action": 1e-8, "apex_dqn_ray": 1e-8}
ADAM_EPS |= {"impala_ray": 1e-3, "a3c_ray": 1e-3}  # --adam-eps
# The defaults of CleanRL's scripts of the same names, where they are ours too; names are ours
PPO = {
    "total_timesteps": 500_000, "learning_rate": 2.5e-4, "num_envs": 4, "num_steps": 128, "anneal_lr": True,
    "gamma": 0.99, "gae_lambda": 0.95, "num_minibatches": 4, "update_epochs": 4, "norm_adv": True, "clip_coef": 0.2,
    "clip_vloss": True, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None,
}  # fmt: skip
OFF_POLICY = {"total_timesteps": 1_000_000, "num_envs": 1, "buffer_size": 1_000_000, "gamma": 0.99, "tau": 0.005}
OFF_POLICY |= {"batch_size": 256, "policy_frequency": 2}
CLEANRL = {
    "ppo": PPO,
    "ppo_continuous_action": PPO | {
        "total_timesteps": 1_000_000, "learning_rate": 3e-4, "num_envs": 1, "num_steps": 2048, "num_minibatches": 32,
        "update_epochs": 10, "ent_coef": 0.0,
    },
    "ppo_atari_envpool": PPO | {"total_timesteps": 10_000_000, "num_envs": 8, "clip_coef": 0.1},
    "dqn": {
        "total_timesteps": 500_000, "learning_rate": 2.5e-4, "num_envs": 1, "buffer_size": 10_000, "gamma": 0.99,
        "tau": 1.0, "target_network_frequency": 500, "batch_size": 128, "epsilon_start": 1.0, "epsilon_end": 0.05,
        "exploration_fraction": 0.5, "learning_starts": 10_000, "train_frequency": 10,
    },
    "sac_continuous_action": OFF_POLICY | {
        "learning_starts": 5000, "policy_lr": 3e-4, "q_lr": 1e-3, "target_network_frequency": 1, "alpha": 0.2,
        "autotune": True,
    },
    "td3_continuous_action": OFF_POLICY | {
        "learning_rate": 3e-4, "policy_noise": 0.2, "exploration_noise": 0.1, "learning_starts": 25_000,
        "noise_clip": 0.5,
    },
}  # fmt: skip
# Large steps, so that ratios and values reach the bounds at which they are clipped
LARGE = {"learning_rate": 0.03}


def own_settings(name: str) -> list[str]:
    """The numbers and switches below the last heading in a script's `Args`, which is its algorithm's."""
    text = (SCRIPTS / f"{name}.py").read_text()
    text = text[text.index("class Args:") : text.index("\nMETRICS")].partition("\n    # Not settings")[0]
    names = re.findall(r"^    (\w+): (float|bool|int)\b", re.split(r"\n    # [^\n]+\n", text)[-1], re.MULTILINE)
    known = {field.name for field in fields(load(name).Args)} - LEFT_OUT
    return [x for x, kind in names if x in known and (kind != "int" or x in INTEGERS)]


@cache
def small(name: str) -> dict:
    large = {key: value for key, value in LARGE.items() if hasattr(load(name).Args, key)}
    return helpers.small_settings(name) | large


def learnt(run: helpers.Outcome) -> list[torch.Tensor]:
    """All weights of a checkpoint, and what the optimizers hold."""
    parts = [x for x in run.checkpoint.values() if isinstance(x, dict)]
    return [x for part in parts for x in part.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
@pytest.mark.parametrize("name", CLEANRL)
def test_defaults_are_those_of_cleanrl(name, twin):
    args = load(f"{name}{twin}").Args
    assert {setting: getattr(args, setting) for setting in CLEANRL[name]} == CLEANRL[name]


def changed(value: float | bool | None, setting: str) -> float | bool:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value
    if setting in ("target_kl", "max_grad_norm"):  # a bound that must be reached
        return 1e-6
    return value / 2 if value else 0.5


# A run of Atari takes half a minute
@pytest.mark.slow
@pytest.mark.parametrize("name", [eager.stem for eager, _ in helpers.PAIRS if eager.stem != "ppo_atari_envpool"])
def test_each_setting_counts(train, name):
    flags, silent = small(name), []
    first, defaults = learnt(train(name, **flags)), {x.name: x.default for x in fields(load(name).Args)} | small(name)
    assert len(own_settings(name)) >= 5
    for setting in own_settings(name):
        again = learnt(train(name, **flags | {setting: changed(defaults[setting], setting)}))
        silent += [setting] * all(map(torch.equal, first, again))
    assert not silent


@pytest.mark.parametrize("name", [eager.stem for eager, _ in helpers.PAIRS])
def test_adam_has_the_eps_of_its_script(train, monkeypatch, name):
    script, found = load(name), []
    init = script.Adam.__init__
    monkeypatch.setattr(script.Adam, "__init__", lambda adam, *x, **y: (init(adam, *x, **y), found.append(adam.eps))[0])
    train(name, **helpers.small_settings(name))
    assert set(found) == {ADAM_EPS.get(name, 1e-5)}


def test_a_float_may_be_0_written_as_an_integer(capsys):
    """As a default in a copy, or from Python; a setting that is an integer must be at least 1."""
    script = load("ppo")
    script.validate(script.Args(ent_coef=0, vf_coef=0, device="cpu"))
    for setting in ("num_envs", "num_steps", "checkpoint_every"):
        with pytest.raises(SystemExit):
            script.validate(script.Args(**{setting: 0}))
        assert f"--{setting.replace('_', '-')} must be at least 1, not 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.validate(script.Args(max_grad_norm=0))  # all gradients would be 0
    assert "--max-grad-norm must be at least 1e-09, not 0" in capsys.readouterr().err
