"""A compiled script computes what its eager twin computes, really compiles, and does so once.

Whole runs are compared in float64, by settings that keep rounding errors small: see `parity`.
"""

import functools
import math
import re

import helpers
import pytest
import torch
from helpers import EAGER, PAIRS, ROOT, in_float64, load, needs_cuda, on_policy
from parity import CLOSE, assert_agree, check_course, weights_of
from torch._dynamo.utils import counters

from benchmarks.common.pairs import SEVERAL, TABLE

each_pair = pytest.mark.parametrize("name", EAGER)
VARIANTS = [(name, {}) for name in EAGER] + [(name, x) for name in EAGER for x in TABLE[name].compiled_with]


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
    """Train a pair by the settings of its `stream` in float64 -> compiled twin, eager script."""

    def train_both(name, twin_settings, **settings):
        settings = TABLE[name].stream | settings
        run = eager_run(name, **settings)
        # Compiled code draws the numbers that eager code draws
        with torch._inductor.config.patch(fallback_random=True):
            twin = train(in_float64(f"{name}_torchcompile"), **settings | twin_settings)
        return twin, run

    return train_both


@pytest.mark.parametrize("name", [eager.stem for eager, _ in PAIRS])
def test_each_pair_is_in_the_table(name):
    """A pair that is new fails here until it has its entry, with all that the common tests need."""
    assert name in TABLE, f"{name} has no entry in benchmarks/common/pairs.py"
    pair, needed = TABLE[name], ("small", "stream", "shows", "launches", "task", "goal", "learn_value")
    if pair.own_tests is not None:
        assert (ROOT / "tests" / pair.own_tests).exists()
        return
    missing = [field for field in needed if not getattr(pair, field) or getattr(pair, field) == (0.0, 0.0)]
    assert not missing, f"the entry of {name} in benchmarks/common/pairs.py lacks {', '.join(missing)}"


@pytest.mark.parametrize("name", [eager.stem for eager, _ in PAIRS])
def test_the_actions_in_the_table_are_those_that_the_script_names(name):
    known = (ROOT / "scripts" / f"{name}.py").read_text()
    named = re.search(r"    env_id: .* with (.*) actions", known)
    assert TABLE[name].takes == (tuple(named[1].split(" or ")) if named else ("Discrete",))


def test_the_table_has_no_pair_that_is_gone():
    assert set(TABLE) == {eager.stem for eager, _ in PAIRS}


@pytest.mark.slow
@each_pair
def test_uncompiled_twin_computes_the_same(train_both, name):
    """Exactly, but for SAC and TD3, whose twins multiply the matrices of two critics in one call."""
    counters.clear()
    twin, run = train_both(name, {"compile": False})
    assert not counters["stats"]  # nothing was compiled
    check_course(run)
    assert_agree(twin, run, rel=CLOSE if hasattr(load(name), "Critic") else 0)


@pytest.mark.slow
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


def errors(name):
    """What must not go unnoticed in a twin: its own, and one that all share in a script of each kind."""
    shared = {"ppo_continuous_action": [no_mask, stale_learning_rate, forgetful_optimizer], "dqn": [no_mask]}
    own = {"ppo_env_pool": [no_mask, stale_learning_rate], "ppo": [no_mask], "td3_continuous_action": [no_mask]}
    return [*(factor(setting, x) for setting, x in TABLE[name].shows.items()), *(shared | own).get(name, [])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plant"), [(name, plant) for name in EAGER for plant in errors(name)])
def test_a_wrong_formula_shows(train_both, monkeypatch, name, plant):
    """In an uncompiled twin, a hundred times as far from the eager script as the bound allows."""
    script = load(in_float64(f"{name}_torchcompile"))
    wrong = plant(script, TABLE[name].small | TABLE[name].stream, monkeypatch)
    twin, run = train_both(name, {"compile": False, **wrong})
    with pytest.raises(AssertionError, match="further apart than"):
        assert_agree(twin, run, rel=100 * CLOSE)


# The scripts as they are, in float32


# These two are compiled as they stand in test_copies.py and, by the command of LeanRL's users, in test_runs.py
ELSEWHERE = {"ppo", "ppo_continuous_action"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EAGER if name not in ELSEWHERE])
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


@pytest.mark.slow
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
    settings = {**TABLE[name].stream, "total_timesteps": 64, "num_minibatches": 1}
    assert_agree(*(train(in_float64(name), device=device, **settings) for device in ("cpu", "cuda")), rel=CLOSE)
