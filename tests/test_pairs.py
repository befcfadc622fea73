"""A compiled script computes what its eager twin computes, really compiles, and does so once.

Whole runs are compared in float64, by settings that keep rounding errors small: see `parity`.
"""

import functools
import math

import helpers
import pytest
import torch
from helpers import EAGER, OWN_TESTS, PAIRS, ROOT, SCRIPTS, in_float64, load, needs_cuda, on_policy
from parity import CLOSE, NAMES, STREAM, assert_agree, check_course, weights_of
from small import SMALL
from torch._dynamo.utils import counters

each_pair = pytest.mark.parametrize("name", NAMES)
# Settings by which a compiled graph becomes another one; TD3's stays the same whatever its policy frequency is
SEVERAL = {"num_envs": 3, "sync_envs": True}
VARIANTS = [
    *((name, {}) for name in NAMES),
    ("ppo", {"num_envs": 3, "sync_envs": True, "clip_vloss": False, "total_timesteps": 8 * 192}),
    ("ppo_continuous_action", {"norm_adv": False, "ent_coef": 0.01}),
    ("ppo_env_pool", {"env_id": "tiny_envs:DiscreteStream-v0", "num_envs": 2, "target_kl": 0.02}),
    ("dqn", {"double_dqn": True, "tau": 0.5, **SEVERAL}),
    ("sac_continuous_action", {"autotune": False, "policy_frequency": 3, "target_network_frequency": 2, **SEVERAL}),
    ("sac_continuous_action", {"policy_frequency": 1}),
    ("td3_continuous_action", {"policy_frequency": 3, **SEVERAL}),
]


def variant_id(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


@pytest.fixture(scope="session")
def eager_run(tmp_path_factory):
    """A run of an eager script in float64, which tests share and must not change: name, settings -> Outcome."""

    @functools.cache
    def run(name, **settings):
        return helpers.train(in_float64(name), tmp_path_factory.mktemp("eager") / name, **settings)

    return run


@pytest.fixture
def train_both(train, eager_run):
    """Train a pair by the settings of `STREAM` in float64 -> compiled twin, eager script."""

    def train_both(name, twin_settings, **settings):
        settings = STREAM[name] | settings
        run = eager_run(name, **settings)
        # Compiled code draws the numbers that eager code draws
        with torch._inductor.config.patch(fallback_random=True):
            twin = train(in_float64(f"{name}_torchcompile"), **settings | twin_settings)
        return twin, run

    return train_both


def test_each_pair_is_in_the_tables():
    """A script that is new fails here until its tests are there."""
    eager = {path.stem for path, _ in PAIRS}
    assert {path for pair in PAIRS for path in pair} == set(SCRIPTS), "a script without its twin"
    assert eager == set(SMALL) | set(OWN_TESTS) == set(STREAM) | set(OWN_TESTS)
    assert all((ROOT / "tests" / path).exists() for path in OWN_TESTS.values())


@each_pair
def test_uncompiled_twin_computes_the_same(train_both, name):
    """Exactly, but for SAC and TD3, whose twins multiply the matrices of two critics in one call."""
    counters.clear()
    twin, run = train_both(name, {"compile": False})
    assert not counters["stats"]  # nothing was compiled
    check_course(run)
    assert_agree(twin, run, rel=CLOSE if hasattr(load(name), "Critic") else 0)


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=variant_id)
def test_compiled_twin_computes_the_same(train_both, name, settings):
    """It compiles once, and nothing runs uncompiled in between."""
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        twin, run = train_both(name, {"compile": True}, **settings)
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
    assert_agree(twin, run, rel=CLOSE)


# What a twin might get wrong


def factor(setting, factor):
    """A setting that is not the eager one's."""

    def plant(script, settings, _monkeypatch):
        value = settings.get(setting, getattr(script.Args, setting))
        return {setting: type(value)(value * factor)}

    plant.__name__ = setting
    return plant


def stale_learning_rate(_script, _settings, _monkeypatch):
    """As if code that is compiled had kept the first one."""
    return {"anneal_lr": False}


def no_mask(script, _settings, monkeypatch):
    """Rows of resets are learnt from; or ends are none."""
    if hasattr(script, "masked_mean"):
        monkeypatch.setattr(script, "masked_mean", lambda x, _mask: x.mean())
        return {}
    sample = script.ReplayBuffer.sample

    def sample_without_ends(self, batch_size):
        *columns, terminated = sample(self, batch_size)
        return *columns, torch.zeros_like(terminated)

    monkeypatch.setattr(script.ReplayBuffer, "sample", sample_without_ends)
    return {}


def forgetful_optimizer(script, _settings, monkeypatch):
    init = script.Adam.__init__

    def init_with_other_betas(self, *args, **named):
        init(self, *args, **named, betas=(0.9, 0.99))

    monkeypatch.setattr(script.Adam, "__init__", init_with_other_betas)
    return {}


# Each error in one script of those that compute alike, and in each script at least what its own loop could get wrong
ERRORS = {
    "ppo_env_pool": [stale_learning_rate, no_mask],
    "ppo_continuous_action": [
        factor("gamma", 0.99), factor("clip_coef", 0.99), stale_learning_rate, no_mask, forgetful_optimizer,
    ],
    "ppo": [factor("clip_coef", 0.99), no_mask],
    "dqn": [factor("gamma", 0.99), factor("target_network_frequency", 2), no_mask],
    "sac_continuous_action": [factor("gamma", 0.99), factor("policy_frequency", 1.5)],
    "td3_continuous_action": [factor("tau", 1.01), factor("policy_noise", 1.01), no_mask],
}  # fmt: skip


@pytest.mark.parametrize(("name", "plant"), [(name, plant) for name in NAMES for plant in ERRORS[name]])
def test_a_wrong_formula_shows(train_both, monkeypatch, name, plant):
    """In an uncompiled twin, a hundred times as far from the eager script as the bound allows."""
    script = load(in_float64(f"{name}_torchcompile"))
    wrong = plant(script, SMALL[name] | STREAM[name], monkeypatch)
    twin, run = train_both(name, {"compile": False, **wrong})
    with pytest.raises(AssertionError, match="further apart than"):
        assert_agree(twin, run, rel=100 * CLOSE)


# The scripts as they are, in float32


# These two are compiled as they stand in test_copies.py and, by the command of LeanRL's users, in test_runs.py
ELSEWHERE = {"ppo", "ppo_continuous_action"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_compiles_as_it_stands(small_run, train, name):
    """By the flags that users have: in float32, with the random numbers of compiled code, which the seed decides."""
    run = small_run(f"{name}_torchcompile")
    assert run.checkpoint["args"]["compile"] and weights_of(run).dtype == torch.float32
    updates = [line for line in run.lines if set(load(name).METRICS) <= line.keys()]
    assert len(updates) > 3 and all(math.isfinite(x) for line in updates for x in line.values())
    if name in ("ppo_env_pool", "sac_continuous_action"):
        second = train(f"{name}_torchcompile")
        assert second.metrics() == run.metrics() and torch.equal(weights_of(second), weights_of(run))


def test_compiled_sampling_draws_each_row_as_often_and_anew():
    """By the random numbers of compiled code, which DQN's compiled script uses: within four standard deviations."""
    buffer, num_rows, batch = load("dqn").ReplayBuffer(10, 1, 1, torch.device("cpu")), 8, 2000
    buffer.add(torch.arange(float(num_rows))[:, None].repeat(1, 5))
    torch.manual_seed(1)
    torch.compiler.reset()
    sample = torch.compile(buffer.sample, fullgraph=True)
    draws = torch.stack([sample(batch)[0].flatten() for _ in range(5)])
    share = draws.flatten().long().bincount(minlength=num_rows) / draws.numel()
    p = 1 / num_rows
    assert len(share) == num_rows and (share - p).abs().max() < 4 * (p * (1 - p) / draws.numel()) ** 0.5
    assert (torch.corrcoef(draws) - torch.eye(5)).abs().max() < 4 / batch**0.5


def test_second_run_in_a_process_computes_by_its_own_settings(train_both):
    """What Dynamo does not check at each call must not be taken over from a run with another discount."""
    train_both("dqn", {}, gamma=0.1)
    assert_agree(*train_both("dqn", {}), rel=CLOSE)


# On a GPU


@needs_cuda
@pytest.mark.parametrize(("compile", "cudagraphs"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("settings", [{}, SEVERAL], ids=variant_id)
@each_pair
def test_twin_computes_the_same_on_cuda(train_both, name, settings, compile, cudagraphs):
    """Past the first update, past a wrap of the buffer, in float64."""
    twin, run = train_both(name, {"compile": compile, "cudagraphs": cudagraphs}, device="cuda", **settings)
    assert_agree(twin, run, rel=CLOSE)


@needs_cuda
@pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name)])
def test_cuda_computes_what_the_cpu_computes(train, name):
    """The host draws the actions of a first rollout; the device, the order of its rows, which makes one minibatch."""
    settings = {**STREAM[name], "total_timesteps": 64, "num_minibatches": 1}
    assert_agree(*(train(in_float64(name), device=device, **settings) for device in ("cpu", "cuda")), rel=CLOSE)
