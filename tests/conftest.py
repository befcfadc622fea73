import functools
import os
import signal
import sys

# Tests run side by side, on a core each: no threads, and no processes of Inductor's own to compile in. Before PyTorch
# is imported, which reads them
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import envpool  # noqa: F401  # it draws from NumPy's random numbers when a first run imports it
import helpers
import pytest
import tiny_envs
import torch

from benchmarks.common.processes import free_slots


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many processes as there are cores, but no more than have memory: each takes 2 GB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores, 8, free_slots(2 * 2**30))


def pytest_collection_modifyitems(items: list) -> None:
    """Tests that need the cluster come last, so that it is started once and nothing is timed beside it."""
    items.sort(key=lambda item: "cluster" in item.fixturenames)


# Of a hook or a rebase that starts the tests, which make repositories of their own
for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"):
    os.environ.pop(name, None)

# A shell that starts the tests in the background has Ctrl-C ignored, and so would all processes that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_traces(monkeypatch):
    """A training that was broken off leaves its signal handlers behind; the recorded actions are of one test only."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))  # SAC and TD3 note a busy machine, such as this
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    tiny_envs.received.clear()
    torch.set_float32_matmul_precision("highest")  # as a process begins; SAC, TD3 and Atari choose it, PPO does not
    yield
    helpers.end_started()
    # To compile a `backward` leaves PyTorch's one `None` with a place of that graph, where later graphs look for it
    if dynamo := sys.modules.get("torch._dynamo.variables"):
        dynamo.ConstantVariable.create(None).source = None
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def train(tmp_path):
    """Train in this process, each time in a folder of its own: name, settings -> Outcome."""
    folders = (tmp_path / f"run{i}" for i in range(100))
    return lambda name, **overrides: helpers.train(name, next(folders), **overrides)


@pytest.fixture
def minibatches(monkeypatch):
    """Note the rows of each minibatch that a script learns from, and its loss, as they come: name -> list."""

    def note(name: str) -> list[dict]:
        script, found, grad = helpers.load(name), [], torch.autograd.grad
        policy_loss, value_loss = script.clipped_policy_loss, script.clipped_value_loss

        def note_policy(ratio, advantage, valid, clip_coef):
            found.append({"ratio": ratio.detach(), "advantage": advantage, "valid": valid == 1})
            return policy_loss(ratio, advantage, valid, clip_coef)

        def note_value(value, old_value, *others):
            found[-1]["old_value"] = old_value
            return value_loss(value, old_value, *others)

        def note_loss(loss, weights):
            found[-1]["loss"] = loss.item()
            return grad(loss, weights)

        monkeypatch.setattr(script, "clipped_policy_loss", note_policy)
        monkeypatch.setattr(script, "clipped_value_loss", note_value)
        monkeypatch.setattr(torch.autograd, "grad", note_loss)
        return found

    return note


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """One run of each script by its small settings, which tests share and must not change: name -> Outcome."""
    return functools.cache(lambda name: helpers.train(name, tmp_path_factory.mktemp("small") / name))


@pytest.fixture(scope="session")
def cluster():
    """Two nodes of two cores each, as far as Ray knows."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100_000_000, "include_dashboard": False}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(helpers.TESTS), os.environ.get("PYTHONPATH", "")])
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.node, cluster.second = node, cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
