"""What PPO's own settings do. Of compiled scripts test_pairs.py shows that they compute the same."""

import pytest
from helpers import EAGER, adam_steps, load, on_policy

from benchmarks.common.pairs import TABLE

SETTINGS = TABLE["ppo"].small
ROLLOUTS = SETTINGS["total_timesteps"] // SETTINGS["num_steps"]

each_script = pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name)])


def updates(run) -> int:
    return adam_steps(run.checkpoint["optimizer"])


@each_script
def test_each_epoch_passes_over_all_minibatches(train, name):
    assert updates(train(name)) == ROLLOUTS * SETTINGS["update_epochs"] * SETTINGS["num_minibatches"]


@each_script
def test_target_kl_ends_the_epochs_on_a_rollout(train, name):
    """After the one in which the policy moved too far, not within it."""
    run = train(name, target_kl=1e-12, anneal_lr=False)
    assert updates(run) == ROLLOUTS * SETTINGS["num_minibatches"]
    assert updates(train(name, target_kl=1e6)) == ROLLOUTS * SETTINGS["update_epochs"] * SETTINGS["num_minibatches"]


@each_script
def test_learning_rate_falls_to_zero_if_asked(train, name):
    falling = [SETTINGS["learning_rate"] * (1 - i / ROLLOUTS) for i in range(ROLLOUTS)]
    for anneal, expected in (True, falling), (False, [SETTINGS["learning_rate"]] * ROLLOUTS):
        rates = [line["charts/learning_rate"] for line in train(name, anneal_lr=anneal).lines]
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings",
    [{"norm_adv": False}, {"clip_vloss": False}, {"ent_coef": 0.1}, {"vf_coef": 0.1}, {"max_grad_norm": 0.01}],
)
@each_script
def test_settings_make_a_difference(train, name, settings):
    """From the first rollout's updates on, to all losses, and in no other way: what was collected is the same."""
    first, other = train(name, total_timesteps=64).lines[0], train(name, total_timesteps=64, **settings).lines[0]
    assert first["charts/episodic_return"] == other["charts/episodic_return"]
    assert first["losses/explained_variance"] == other["losses/explained_variance"]
    assert first["losses/value_loss"] != other["losses/value_loss"]


@each_script
def test_first_update_sees_the_policy_that_collected(train, name):
    """Log-probabilities are computed after the rollout; if that is right, the ratio is 1 in the first minibatch."""
    settings = {"total_timesteps": 64, "num_minibatches": 1, "update_epochs": 1}
    (line,) = train(name, **settings).lines
    assert abs(line["losses/approx_kl"]) < 1e-6 and abs(line["losses/old_approx_kl"]) < 1e-5
    assert line["losses/clipfrac"] == 0
    assert load(name).METRICS[0] in line and abs(line["losses/policy_loss"]) < 1e-5  # the mean of normalized advantages
