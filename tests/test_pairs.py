"""A compiled script computes what its eager twin computes, really compiles, and does so once."""

import math

import pytest
import torch
from helpers import COMPILED, EAGER, load, needs_cuda, on_policy
from small import SMALL
from torch._dynamo.utils import counters

each_pair = pytest.mark.parametrize(("eager", "compiled"), list(zip(EAGER, COMPILED, strict=True)), ids=EAGER)


def settings_of_50_updates(name: str) -> dict:
    """Rounding errors stay small: PPO's updates are of one rollout, so that none comes back from a policy's choice.

    With SAC's seed 1 they do not: at some update a gradient is so near 0 that rounding decides over Adam's direction.
    """
    if on_policy(name):
        return {"seed": 2, "total_timesteps": 64, "update_epochs": 13}
    return {"seed": 2, "total_timesteps": SMALL[name]["learning_starts"] + 52 * SMALL[name].get("train_frequency", 1)}


def exact(name: str) -> bool:
    """SAC's and TD3's twins multiply the matrices of two critics in one call, which may sum in another order."""
    return not hasattr(load(name), "Critic")


def weights_of(run) -> torch.Tensor:
    """The weights that act, as one vector."""
    weights = next(run.checkpoint[part] for part in ("agent", "network", "actor") if part in run.checkpoint)
    return torch.cat([x.reshape(-1) for _, x in sorted(weights.items())])


def assert_agree(run, other, rel: float) -> None:
    """All metrics do, and the weights. Losses near 0 are differences of larger numbers: they may be off by more."""
    assert len(run.lines) == len(other.lines)
    for a, b in zip(run.metrics(), other.metrics(), strict=True):
        assert a == pytest.approx(b, rel=rel, abs=rel / 100)
    weights, others = weights_of(run), weights_of(other)
    assert ((weights - others).norm() / weights.norm()).item() <= rel


@each_pair
def test_uncompiled_twin_computes_the_same(train, eager, compiled):
    settings = {} if exact(eager) else settings_of_50_updates(eager)
    with torch.compiler.set_stance("force_eager"):
        twin = train(compiled, **settings)
    run = train(eager, **settings)
    assert_agree(twin, run, rel=0 if exact(eager) else 1e-5)
    assert not on_policy(eager) or max(line["losses/clipfrac"] for line in run.lines) > 0  # clipping had its effect


@each_pair
def test_compiled_twin_computes_the_same(train, eager, compiled):
    """With fallback_random, compiled code draws the numbers that eager code draws."""
    settings = settings_of_50_updates(eager)
    with torch._inductor.config.patch(fallback_random=True):
        twin = train(compiled, **settings)
    assert_agree(twin, train(eager, **settings), rel=1e-4)


def test_second_run_in_a_process_computes_by_its_own_settings(train):
    """What Dynamo does not check at each call must not be taken over from a run with another discount."""
    settings = settings_of_50_updates("dqn")
    train("dqn_torchcompile", gamma=0.1, **settings)
    with torch._inductor.config.patch(fallback_random=True):
        twin = train("dqn_torchcompile", gamma=0.9, **settings)
    assert_agree(twin, train("dqn", gamma=0.9, **settings), rel=1e-4)


@pytest.mark.parametrize(("compile", "cudagraphs"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", COMPILED)
def test_flags_work_in_all_combinations(train, name, compile, cudagraphs):
    """Past the first updates, and past a termination."""
    run = train(name, compile=compile, cudagraphs=cudagraphs)
    assert min(line["charts/episodic_length"] for line in run.lines if "charts/episodes" in line) < 15
    updates = [line for line in run.lines if set(load(name).METRICS) <= line.keys()]
    assert len(updates) > 3 and all(math.isfinite(x) for line in updates for x in line.values())


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_once_and_only_if_asked(train, name):
    counters.clear()
    train(name, compile=False)
    assert not counters["stats"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(name, compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


@needs_cuda
@pytest.mark.parametrize(("compile", "cudagraphs"), [(True, True), (True, False), (False, True), (False, False)])
@each_pair
def test_twin_computes_the_same_on_cuda(train, eager, compiled, compile, cudagraphs):
    settings = {"device": "cuda", **settings_of_50_updates(eager)}
    with torch._inductor.config.patch(fallback_random=True):
        twin = train(compiled, compile=compile, cudagraphs=cudagraphs, **settings)
    assert_agree(twin, train(eager, **settings), rel=1e-3)


@needs_cuda
@pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name)])
def test_cuda_computes_what_the_cpu_computes(train, name):
    """The host draws the actions of a first rollout; the device, the order of its rows, which makes one minibatch."""
    settings = {"total_timesteps": 64, "num_minibatches": 1}
    assert_agree(*(train(name, device=device, **settings) for device in ("cpu", "cuda")), rel=1e-3)
