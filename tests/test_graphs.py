"""CUDA graphs: what they do to a function, and that each compiled script is right when its functions are replayed.

On a CPU by the emulator; on a GPU the same tests also run with the real CudaGraphModule.
"""

import itertools

import helpers
import numpy as np
import pytest
import torch
from graph_emulator import EmulatedEvent, EmulatedGraph, RefusedCapture, use_graphs
from helpers import EAGER, defining, in_float64, load, needs_cuda, on_policy, resume
from parity import CLOSE, assert_agree, check_course
from tensordict.nn import CudaGraphModule

from benchmarks.common.pairs import TABLE

each_graph = pytest.mark.parametrize(
    ("graph", "device"), [(EmulatedGraph, "cpu"), pytest.param(CudaGraphModule, "cuda", marks=needs_cuda)]
)
each_backend = pytest.mark.parametrize("backend", [None, "aot_eager"])
each_pair = pytest.mark.parametrize("name", EAGER)
CONTINUOUS = [name for name in EAGER if hasattr(load(name), "Critic")]
TO_HOST = ("cpu", "numpy", "tolist", "item", "__bool__")

# What a graph does to a function


@each_graph
def test_runs_then_records_then_replays(graph, device):
    """Each call is one update; Python runs for the first three, once more for the recording, and then no more."""
    count, python = torch.zeros((), device=device), []

    def function(x, scale):
        python.append(1)
        count.add_(1)
        return {"sum": x + count, "nothing": None, "product": [x * scale["factor"]]}

    replayed = graph(function, warmup=3)
    results = [replayed(torch.full((2,), float(i), device=device), scale={"factor": 3}) for i in range(1, 7)]
    assert count == 6 and len(python) == 4
    for i, result in enumerate(results, 1):  # what was returned stays as it was
        assert result["sum"].tolist() == [2 * i] * 2 and result["product"][0].tolist() == [3 * i] * 2
        assert result["nothing"] is None


@each_graph
def test_numbers_of_python_are_frozen_and_tensors_are_not(graph, device):
    rate, number = torch.ones((), device=device), 1.0
    replayed = graph(lambda x: (x * rate, x * number), warmup=2)
    x = torch.ones(1, device=device)
    for number in (1.0, 2.0, 3.0, 4.0):
        rate.fill_(number)
        followed, frozen = replayed(x)
        assert followed == number and frozen == min(number, 2.0)


@each_graph
def test_recording_changes_nothing(graph, device):
    """Not even what lies behind views, nor the random numbers that come next."""
    x, y, result = torch.ones(3, 2, device=device), torch.ones(4, device=device), torch.zeros(5, device=device)

    def function():
        x.t()[0].mul_(2)
        torch._foreach_add_([y[:2], y[2:]], 1)
        torch.randn(5, device=device, out=result)
        fresh = torch.zeros(2, device=device)
        return fresh.add_(1)

    torch.manual_seed(1)
    replayed = graph(function, warmup=1)
    assert replayed().tolist() == [1, 1]
    assert x.tolist() == [[2, 1]] * 3 and y.tolist() == [2] * 4
    torch.manual_seed(1)
    assert torch.equal(result, torch.randn(5, device=device))


@each_graph
def test_arguments_that_change_in_place_do_not_reach_the_caller(graph, device):
    replayed = graph(lambda x: x.add_(1), warmup=2)
    for _ in range(4):
        x = torch.zeros(1, device=device)
        assert replayed(x) == 1 and x == 0


@each_graph
def test_calls_that_do_not_fit_the_recording_are_refused(graph, device):
    replayed, x = graph(lambda x, n: x * n, warmup=2), torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="require"):
        replayed(x.clone().requires_grad_(), 2)
    for _ in range(3):
        replayed(x, 2)
    with pytest.raises(ValueError, match="shape"):
        replayed(torch.ones(3, device=device), 2)
    with pytest.raises(ValueError, match="inputs must be"):
        replayed(x, 3)
    with pytest.raises(ValueError, match="greater than 0"):
        graph(lambda: None, warmup=0)


FAILS_ANYWAY = ("x.detach().numpy()", "x + torch.from_numpy(np.ones(3))", "torch.equal(x, x)")


@pytest.mark.parametrize(
    "line",
    [
        "x.sum().item()",
        "float(x.sum())",
        "x if x.sum() > 0 else -x",
        "x.tolist()",
        "x[0].cpu()",
        "x.detach().numpy()",
        "x[x > 0]",
        "x.nonzero()",
        "x.index_put_((x > 0,), x[0])",
        "torch.masked_select(x, x > 0)",
        "x + torch.from_numpy(np.ones(3))",
        "x + torch.tensor(1.0, device=x.device)",
        "torch.equal(x, x)",
    ],
)
@each_graph
def test_what_a_graph_cannot_hold_is_refused_with_its_line(tmp_path, graph, device, line):
    path = tmp_path / "function.py"
    path.write_text(f"import torch, numpy as np\n\ndef function(x):\n    y = x * 2\n    return {line}\n")
    if device == "cuda" and line in FAILS_ANYWAY:
        pytest.skip("on CUDA that fails, or is answered without the device, before there is a graph")
    names = {}
    exec(compile(path.read_text(), path, "exec"), names)
    replayed, x = graph(names["function"], warmup=2), torch.ones(3, device=device)
    replayed(x)
    with pytest.raises(RuntimeError) as error:
        replayed(x)
    if graph is EmulatedGraph:
        assert isinstance(error.value, RefusedCapture) and f"{path}:5: return {line}" in str(error.value)


@each_graph
def test_random_numbers_are_new_at_each_replay(graph, device):
    """Of right mean and deviation over the replays, within four standard deviations, and not correlated."""
    torch.manual_seed(1)
    replayed = graph(lambda: (torch.randn(5000, device=device), torch.rand(5000, device=device)), warmup=2)
    normal, uniform = (torch.stack(draws)[2:] for draws in zip(*(replayed() for _ in range(6)), strict=True))
    for draws, mean, deviation in (normal, 0, 1), (uniform, 0.5, 12**-0.5):
        assert (draws.mean(1) - mean).abs().max() < 4 * deviation / 5000**0.5
        assert (draws.std(1) - deviation).abs().max() < 4 * deviation / 5000**0.5
        correlation = torch.corrcoef(draws) - torch.eye(4, device=device)
        assert correlation.abs().max() < 4 / 5000**0.5


def test_launches_are_operations_that_compute():
    """Neither views nor memory that is only allocated."""

    def function(x):
        y = torch.empty_like(x)
        y.copy_(x)
        a, b = y.t().t().view(-1).split(2)
        return torch._foreach_add([a, b], 1)[0] + b

    graph = EmulatedGraph(function, warmup=1)
    graph(torch.ones(2, 2))
    assert graph.launches == 3


# The scripts, their functions replayed


@pytest.fixture
def train_with_graphs(train, monkeypatch):
    """Train a script whose functions are replayed, on the CPU; `backend` None: uncompiled -> Outcome, graphs."""

    def train_with_graphs(name, backend, kind=EmulatedGraph, train=train, **settings):
        with monkeypatch.context() as patch:
            graphs = use_graphs(patch, load(name), backend, kind)
            run = train_in_two_parts(train, name, compile=backend is not None, **settings)
        return run, graphs

    return train_with_graphs


def train_in_two_parts(train, name, stop_at=None, **settings):
    """Train up to step `stop_at`, if there is one, then resume; learning rates fall to 0 twice."""
    if stop_at is None:
        return train(name, **settings)
    half = train(name, **settings | {"total_timesteps": stop_at})
    device, total = settings.get("device", "cpu"), settings["total_timesteps"]
    return resume(name, half.run_dir, device, total_timesteps=total)


@pytest.mark.slow
@each_backend
@each_pair
def test_replayed_twin_computes_what_the_eager_script_does(train, train_with_graphs, name, backend):
    """Over a run that writes over its buffer, anneals, sees terminations, delays its actor, and is resumed.

    But for compiled actors and critics, which to compile twice takes long; compiled, DQN and PPO are resumed.
    """
    stop_at = 6 * 2 * 64 if on_policy(name) else 260
    settings = TABLE[name].stream | {"num_envs": 2, "sync_envs": True, "stop_at": stop_at}
    if backend and hasattr(load(name), "Critic"):
        settings["stop_at"] = None
    run = train_in_two_parts(train, in_float64(name), **settings)
    twin, graphs = train_with_graphs(in_float64(f"{name}_torchcompile"), backend, **settings)
    check_course(run)
    assert_agree(twin, run, rel=CLOSE)
    assert graphs and all(graph.counter > graph.warmup + 1 for graph in graphs)


@needs_cuda
@pytest.mark.parametrize("compile", [True, False])
@each_pair
def test_twin_with_graphs_goes_on_the_same_on_cuda(train, name, compile):
    """With several environments, past a wrap of the buffer, and after a resume."""
    stop_at = 6 * 2 * 64 if on_policy(name) else 260
    settings = TABLE[name].stream | {"num_envs": 2, "sync_envs": True, "stop_at": stop_at}
    settings["device"] = "cuda"
    run = train_in_two_parts(train, in_float64(name), **settings)
    with torch._inductor.config.patch(fallback_random=True):  # compiled code draws the numbers that eager code draws
        twin = train_in_two_parts(train, in_float64(f"{name}_torchcompile"), compile=compile, **settings)
    assert_agree(twin, run, rel=CLOSE)


@needs_cuda
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", [name for name in TABLE if name.endswith("_ray")])
def test_twin_over_ray_with_graphs_computes_the_same_on_cuda(tmp_path, name, compile):
    """In one process, where the learner has the GPU."""
    settings = helpers.small_settings(name) | {"device": "cuda"}
    run = helpers.call(in_float64(name), run_dir=str(tmp_path / "eager"), **settings)
    with torch._inductor.config.patch(fallback_random=True):
        twin = helpers.call(
            in_float64(f"{name}_torchcompile"), run_dir=str(tmp_path / "twin"), **settings, compile=compile
        )
    for line in (*run.lines, *twin.lines):
        line.pop("losses/approx_kl", None)  # nothing but rounding, if all rows are of the newest policy
    assert_agree(helpers.without_times(twin), helpers.without_times(run), rel=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "rel"), [(None, 0), ("aot_eager", 1e-2)])
def test_replayed_atari_twin_computes_what_the_eager_script_does(tmp_path, train_with_graphs, backend, rel):
    """Of a few rollouts, since rounding comes back from the games; there is no float64 here."""
    settings = {
        "env_id": "Breakout-v5", "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2,
        "total_timesteps": 8 * 32, "stop_at": None if backend else 4 * 32, "device": "cpu", "tensorboard": False,
        "matmul_precision": "highest",  # by default a CPU and what passes for a GPU may multiply in different ways
    }  # fmt: skip
    run = train_in_two_parts(helpers.call, "ppo_atari_envpool", run_dir=str(tmp_path / "eager"), **settings)
    settings |= {"train": helpers.call, "run_dir": str(tmp_path / "twin")}
    twin, graphs = train_with_graphs("ppo_atari_envpool_torchcompile", backend, **settings)
    assert_agree(twin, run, rel)
    assert graphs and all(graph.counter > graph.warmup for graph in graphs)


@each_pair
def test_number_of_launches(train_with_graphs, name):
    """No more than the table says; and if they become fewer, the table is to say so.

    Counted are the kernels that a call of each graph would launch one by one: for PPO the estimates and an epoch, for
    SAC and TD3 to act, the critics alone, critics and actor. With the views that PyTorch makes between them, SAC's are
    32, some 200 and some 600 operations.
    """
    _, graphs = train_with_graphs(f"{name}_torchcompile", None, total_timesteps=320)
    launches = [graph.launches for graph in graphs]
    assert len(launches) == len(TABLE[name].launches)
    for now, before in zip(launches, TABLE[name].launches, strict=True):
        assert 0.95 * before <= now <= before, f"{launches} launches"


# Off-policy scripts whose host need not wait for what the device learns


def between_steps(course):
    """What was noted after one step of the environment and before the next."""
    ends = [i for i, word in enumerate(course) if word == "step"]
    return [tuple(course[a + 1 : b]) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_host_waits_once_a_step_for_the_action(train_with_graphs, monkeypatch, name):
    """The device is told to act before it is told to learn, if the actor stays as it is; else after that."""
    course = []

    def note(owner, name, word):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: course.append(word) or function(*args, **kwargs))

    class Noted(EmulatedGraph):
        def __call__(self, *args):
            course.append(self.module.__name__)
            return super().__call__(*args)

    note(load(f"{name}_torchcompile").Envs, "step", "step")
    note(EmulatedEvent, "synchronize", "wait")
    for way in TO_HOST:
        note(torch.Tensor, way, way)
    train_with_graphs(f"{name}_torchcompile", None, Noted, log_every=1000, checkpoint_every=1000, num_envs=1)
    at_random, learning = between_steps(course)[:95], between_steps(course)[150:]
    assert set(at_random) == {()}
    alone, both = ("act", "update_critics", "wait", "numpy"), ("update_both", "act", "wait", "numpy")
    assert set(learning) == {alone, both, ("act", "wait", "numpy")}  # the last, where a step was a reset
    assert abs(learning.count(alone) - learning.count(both)) <= 1


@needs_cuda
def test_compiled_graphs_on_cuda_draw_new_batches_at_each_replay():
    """By Inductor's own random numbers, which other tests replace by PyTorch's: all rows alike, and no two calls."""
    script, device = load("dqn_torchcompile"), torch.device("cuda")
    buffer = script.ReplayBuffer(10, 1, 1, device)
    buffer.add(torch.arange(8.0)[:, None].repeat(1, 5))
    (draw,) = script.compiled(device, lambda: buffer.sample(4000)[0].flatten().clone())
    draw = script.refuse_changes(script.CudaGraphModule(draw, warmup=3))
    drawn = torch.stack([draw() for _ in range(9)])[3:]  # replays
    assert ((drawn.flatten().long().bincount(minlength=8) / drawn.numel() - 0.125).abs() < 0.01).all()
    assert (drawn.corrcoef() - torch.eye(6, device=device)).abs().max() < 0.08


@needs_cuda
def test_actions_come_by_pinned_memory_on_cuda():
    courier = defining("Courier").Courier(lambda inputs: inputs[:, :3], 1, torch.device("cuda"))
    courier.ask(np.ones((2, 3)))
    assert courier.action.is_pinned() and courier.answer(np.ones((2, 3))).tolist() == [[1.0] * 3] * 2


# What the emulator must find: each of these changes nothing in a script whose functions are not replayed


def number_of_python(script, patch):
    """The rows in the buffer are counted by Python, whose number is frozen."""
    add, sample = script.ReplayBuffer.add, script.ReplayBuffer.sample

    def add_and_count(self, rows):
        add(self, rows)
        self.count = getattr(self, "count", 0) + len(rows)

    def sample_counted(self, batch_size):
        num_written, self.num_written = self.num_written, torch.full_like(self.num_written, self.count)
        batch = sample(self, batch_size)
        self.num_written = num_written
        return batch

    patch.setattr(script.ReplayBuffer, "add", add_and_count)
    patch.setattr(script.ReplayBuffer, "sample", sample_counted)


def new_memory(script, patch):
    """Target networks get new tensors, while the graph goes on to read the old ones."""

    def move(targets, weights, *_tau):
        for a, b in zip(targets, weights, strict=True):
            a.data = b.detach().clone()

    patch.setattr(script, "move_towards", move)


def before_each_sample(statement):
    def plant(script, patch):
        sample = script.ReplayBuffer.sample

        def sample_after(self, batch_size):
            statement(self)
            return sample(self, batch_size)

        patch.setattr(script.ReplayBuffer, "sample", sample_after)

    return plant


class ArgumentsStay(EmulatedGraph):
    """As if the arguments of a call were not copied."""

    def replay(self, _leaves):
        return super().replay(self.buffers)


class OneStays(EmulatedGraph):
    """As if the first argument of an epoch, its order of rows, were not copied."""

    def replay(self, leaves):
        is_epoch = self.module.__name__ == "update_epoch"
        return super().replay([self.buffers[0] if is_epoch else leaves[0], *leaves[1:]])


class NoiseStays(EmulatedGraph):
    """As if each replay drew the random numbers of the first one."""

    def replay(self, leaves):
        self.state = getattr(self, "state", torch.get_rng_state())
        torch.set_rng_state(self.state)
        return super().replay(leaves)


@pytest.mark.parametrize("plant", [number_of_python, new_memory])
def test_what_a_graph_freezes_shows(train, train_with_graphs, monkeypatch, plant):
    name = in_float64("dqn_torchcompile")
    plant(load(name), monkeypatch)
    monkeypatch.setattr(load(name), "refuse_changes", lambda function: function)  # which would not let it come so far
    run = train(in_float64("dqn"), **TABLE["dqn"].stream)
    assert_agree(train(name, compile=False, **TABLE["dqn"].stream), run, rel=CLOSE)
    with pytest.raises(AssertionError, match="further apart"):
        assert_agree(train_with_graphs(name, None, **TABLE["dqn"].stream)[0], run, rel=100 * CLOSE)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        (lambda buffer: buffer.num_written.item(), "reads a number"),
        (lambda buffer: buffer.num_written > 0 or None, "passes between"),
        (lambda buffer: buffer.rows[buffer.rows[:, -1] == 0], "depends on data"),
        (lambda buffer: torch.as_tensor(buffer.num_written), "passes between"),
    ],
    ids=["number", "branch", "shape", "host"],
)
def test_what_a_graph_cannot_hold_is_refused_in_a_script(train_with_graphs, monkeypatch, statement, reason):
    before_each_sample(statement)(load("dqn_torchcompile"), monkeypatch)
    with pytest.raises(RefusedCapture, match=reason) as error:
        train_with_graphs("dqn_torchcompile", None)
    assert __file__ in str(error.value)


@pytest.mark.parametrize(("name", "kind"), [("ppo", OneStays), ("dqn", NoiseStays)])
def test_a_wrong_replay_shows(train, train_with_graphs, name, kind):
    run = train(in_float64(name), **TABLE[name].stream)
    twin, _ = train_with_graphs(in_float64(f"{name}_torchcompile"), None, kind=kind, **TABLE[name].stream)
    with pytest.raises(AssertionError, match="further apart"):
        assert_agree(twin, run, rel=100 * CLOSE)


def test_a_rollout_that_is_not_estimated_is_refused(train_with_graphs, capfd):
    with pytest.raises(SystemExit):
        train_with_graphs("ppo_torchcompile", None, kind=ArgumentsStay, **TABLE["ppo"].stream)
    assert "the policy that acts differs from the one that learns" in capfd.readouterr().err
