import functools
import signal

import helpers
import pytest
import tiny_envs

# A shell that starts the tests in the background has Ctrl-C ignored, and so would all processes that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_traces():
    """A training that was broken off leaves its signal handlers behind; the recorded actions are of one test only."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    tiny_envs.received.clear()
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def train(tmp_path):
    """Train in this process, each time in a folder of its own: name, settings -> Outcome."""
    folders = (tmp_path / f"run{i}" for i in range(100))
    return lambda name, **overrides: helpers.train(name, next(folders), **overrides)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """One run of each script by its small settings, which tests share and must not change: name -> Outcome."""
    return functools.cache(lambda name: helpers.train(name, tmp_path_factory.mktemp("small") / name))
