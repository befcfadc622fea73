"""The pool of environments: the rows of each are those it gives alone, whoever is ready first, dies or hangs."""

import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from helpers import load
from test_learning import play

from benchmarks.common.pairs import TABLE

NAME = "ppo_env_pool"
POOL = load(NAME)


class Moody(gym.Wrapper):
    """Takes up to two milliseconds for a step, at its whim; so environments come in any order."""

    def step(self, action):
        time.sleep(int.from_bytes(os.urandom(1)) / 1e5)
        return self.env.step(action)


class Task(tiny_envs.Tiny):
    """Each action says what the environment is to do: be done at once, take so many seconds, or something bad."""

    def __init__(self, action_space=Discrete(10), observation_space=tiny_envs.LINE):  # noqa: B008
        super().__init__(action_space, observation_space)

    def start(self):
        return self.np_random.normal(size=self.observation_space.shape)

    def move(self, action):
        if action == RAISE:
            raise ValueError("the simulator\nis out of order")
        if action == HANG:
            time.sleep(60)
        if action == DIE or (action == FORK_AND_DIE and os.fork()):
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == FORK_AND_DIE:
            time.sleep(5)
            os._exit(0)
        time.sleep(SLOW_SECONDS * (action == SLOW))
        return np.full(3, float(action)), 1.0, False, False


QUICK, SLOW, RAISE, HANG, DIE, FORK_AND_DIE = range(6)
SLOW_SECONDS = 0.8
gym.register("Task-v0", Task)
gym.register("Many-v0", Task, kwargs={"action_space": MultiDiscrete([2, 3])})
gym.register("MoodyReach-v0", lambda: Moody(gym.make("tiny_envs:Reach-v0")))
gym.register("MoodyChoose-v0", lambda: Moody(gym.make("tiny_envs:Choose-v0")))


@pytest.fixture
def make_pool():
    """A pool of forked workers by its settings, with seeds 0, 1, ...; closed at the end."""
    opened = []

    def make(env_id: str, num_workers: int, envs_per_worker: int = 1, **settings):
        settings = {"start_method": "fork", "num_workers": num_workers, "envs_per_worker": envs_per_worker} | settings
        opened.append(POOL.Pool(POOL.Args(env_id=env_id, **settings), list(range(num_workers * envs_per_worker))))
        return opened[-1]

    yield make
    for pool in opened:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_draw_numbers_of_their_own_that_repeat(make_pool, method):
    """From NumPy's and Python's global generators, too, whose state all workers would inherit from one process."""
    first, again = (make_pool("tiny_envs:Drawing-v0", 2, start_method=method).reset() for _ in range(2))
    assert (first == again).all() and len(np.unique(first)) == first.size


def alone(env_id: str, seed: int, actions: np.ndarray) -> list[tuple]:
    """The rows (obs, reward, terminated, truncated) of one environment, reset one step late, by a plain loop."""
    env = gym.make(env_id)
    rows, done = [(env.reset(seed=seed)[0], 0.0, False, False)], False
    for action in actions:
        rows.append((env.reset()[0], 0.0, False, False) if done else env.step(action)[:4])
        done = rows[-1][2] or rows[-1][3]
    return rows


@pytest.mark.parametrize(("num_workers", "envs_per_worker"), [(1, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("count", [1, 3, None])
def test_rows_of_each_environment_are_those_it_gives_alone(make_pool, num_workers, envs_per_worker, count):
    pool, steps = make_pool("MoodyReach-v0", num_workers, envs_per_worker), 60
    actions = np.random.default_rng(1).uniform(-0.1, 0.3, (pool.num_envs, steps, 2)).astype(np.float32)
    rows = [[(obs, 0.0, False, False)] for obs in pool.reset()]
    ready, sizes = np.arange(pool.num_envs), set()
    while min(map(len, rows)) <= steps:
        pool.send(np.stack([actions[i, len(rows[i]) - 1] for i in ready]) if len(ready) else np.zeros((0, 2)), ready)
        obs, reward, terminated, truncated, lost, ids = pool.recv(count or pool.num_envs)
        assert not lost.any() and len(ids) >= min(count or pool.num_envs, 1) and (np.diff(ids) > 0).all()
        sizes.add(len(ids))
        for i, *row in zip(ids, obs, reward, terminated, truncated, strict=True):
            rows[i].append(row)
        ready = np.array([i for i in ids if len(rows[i]) <= steps], dtype=int)
    assert (sizes == {pool.num_envs}) == (count is None or num_workers == 1)  # else they came in another order
    for i in range(pool.num_envs):
        expected = alone("tiny_envs:Reach-v0", i, actions[i])
        for row, other in zip(rows[i], expected, strict=True):
            np.testing.assert_array_equal(row[0], other[0])
            assert row[1] == np.float32(other[1]) and tuple(row[2:]) == other[2:]


def unnormalized(monkeypatch, script) -> None:
    monkeypatch.setattr(script.RunningNorm, "__call__", lambda _self, x: x)
    monkeypatch.setattr(script.RewardScale, "__call__", lambda _self, reward, _valid: reward)


@pytest.mark.parametrize("layout", [(4, 1, 0), (4, 1, 1), (2, 2, 2)], ids=["lock-step", "first ready", "hybrid"])
@pytest.mark.parametrize(("plain", "env"), [("ppo", "Choose"), ("ppo_continuous_action", "Reach")])
def test_is_plain_ppo(train, monkeypatch, plain, env, layout):
    """With the seeds and the noise of the script with lock-step; there, what the pool lacks is taken out."""
    if plain != "ppo":
        unnormalized(monkeypatch, load(plain))
    settings = {"total_timesteps": 1024, "seed": 3, "ent_coef": 0.01}
    expected = train(plain, env_id=f"tiny_envs:{env}-v0", num_envs=4, sync_envs=True, **settings)
    workers, per_worker, batch = layout
    settings |= {"num_workers": workers, "envs_per_worker": per_worker, "ready_batch": batch}
    run = train(NAME, env_id=f"Moody{env}-v0", **settings)
    assert len(run.lines) == len(expected.lines) == 4
    for ours, theirs in zip(run.metrics(), expected.metrics(), strict=True):
        assert ours.pop("pool/worker_restarts") == 0
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert run.checkpoint["agent"].keys() == expected.checkpoint["agent"].keys()
    for name, weight in run.checkpoint["agent"].items():
        torch.testing.assert_close(weight, expected.checkpoint["agent"][name], rtol=1e-4, atol=1e-6)


def exchange(pool, actions: dict[int, int], count: int) -> tuple[dict, float]:
    """Send each environment its action -> the rows that come, by environment, and the seconds that this took."""
    start, ids = time.monotonic(), np.array(list(actions), dtype=int)
    pool.send(np.array(list(actions.values())), ids)
    *rows, ids = pool.recv(count)
    return {int(i): row for i, *row in zip(ids, *rows, strict=True)}, time.monotonic() - start


def cpu_seconds(pid: int | str) -> float:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf(
        "SC_CLK_TCK"
    )


@pytest.mark.alone
def test_first_ready_are_returned_and_waiting_takes_no_time_of_the_processor(make_pool):
    pool = make_pool("Task-v0", 3)
    spent = [cpu_seconds(worker.process.pid) for worker in pool.workers]
    rows, seconds = exchange(pool, {0: QUICK, 1: SLOW, 2: QUICK}, 2)
    assert rows.keys() == {0, 2} and seconds < SLOW_SECONDS / 2
    start = time.process_time()
    rows, _ = exchange(pool, {0: SLOW, 2: SLOW}, 3)
    assert rows.keys() == {0, 1, 2} and all(rows[i][0][0] == SLOW for i in rows)
    assert time.process_time() - start < SLOW_SECONDS / 5
    for worker, before in zip(pool.workers, spent, strict=True):
        assert cpu_seconds(worker.process.pid) - before < SLOW_SECONDS / 5


# Faults


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (RAISE, "ValueError: the simulator is out of order"),
        (DIE, "killed by SIGKILL"),
        (FORK_AND_DIE, "killed by SIGKILL"),
        (HANG, "no answer within 1 s; --step-timeout allows more"),  # for two environments
    ],
    ids=["exception", "death", "a child of it lives on", "hang"],
)
def test_fault_is_noticed_and_costs_one_row(make_pool, capfd, fault, text):
    """The two environments of the worker come back as from a reset, with new seeds; those of another go on."""
    pool = make_pool("Task-v0", 2, 2, step_timeout=0.5)
    first = pool.reset()
    rows, seconds = exchange(pool, {0: QUICK, 1: fault, 2: QUICK, 3: QUICK}, 4)
    assert seconds < 2 + 0.5 * 2
    assert [rows[i][4] for i in range(4)] == [True, True, False, False]
    for i in (0, 1):
        obs, reward, terminated, truncated, _ = rows[i]
        assert (reward, terminated, truncated) == (0, False, False)
        assert all((obs != other).all() for other in first)
    assert all(rows[i][0][0] == QUICK and rows[i][1] == 1 for i in (2, 3))
    errors = capfd.readouterr().err
    assert f"worker 0 died: {text}" in errors and "restart 1 of 20" in errors
    assert ("in move" in errors) == (fault == RAISE)  # of its traceback
    rows, _ = exchange(pool, dict.fromkeys(range(4), QUICK), 4)
    assert pool.restarts == 1 and not any(row[4] for row in rows.values())


def test_workers_that_were_suspended_with_the_run_are_not_taken_for_hung(make_pool, monkeypatch):
    """As by Ctrl-Z, or by a scheduler, for longer than a step may take."""
    pool, late = make_pool("Task-v0", 2, step_timeout=5), [0.0]
    pool.reset()
    monkeypatch.setattr(POOL, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0]))
    poller = pool.poller

    def poll(_milliseconds):
        late[0] += 100 * (late[0] == 0)
        return []

    pool.send(np.array([QUICK, QUICK]), np.arange(2))
    monkeypatch.setattr(pool, "poller", SimpleNamespace(poll=poll))
    pool.listen()
    monkeypatch.setattr(pool, "poller", poller)
    *_, lost, ids = pool.recv(2)
    assert pool.restarts == 0 and ids.tolist() == [0, 1] and not lost.any()


@pytest.mark.alone
def test_death_at_rest_is_found_by_the_next_action(make_pool, monkeypatch):
    pool, waits = make_pool("Task-v0", 2), []
    listen = pool.listen
    monkeypatch.setattr(pool, "listen", lambda: (waits.append(1), listen()))
    for _ in range(2):
        os.kill(pool.workers[1].process.pid, signal.SIGKILL)
        rows, seconds = exchange(pool, {0: SLOW, 1: QUICK}, 2)
        assert [rows[i][4] for i in range(2)] == [False, True] and seconds < 2
    # Also where it is at rest while others are waited for; and that wait is no busy one
    pool.send(np.array([SLOW]), np.array([0]))
    os.kill(pool.workers[1].process.pid, signal.SIGKILL)
    waits.clear()
    assert pool.recv(1)[-1].tolist() == [0] and len(waits) < 10
    rows, seconds = exchange(pool, {0: QUICK, 1: QUICK}, 2)
    assert [rows[i][4] for i in range(2)] == [False, True] and seconds < 2 and pool.restarts == 3


@pytest.mark.slow
def test_each_replacement_of_a_worker_has_seeds_of_its_own(make_pool):
    """After each of three deaths its two environments begin otherwise than all before."""
    pool = make_pool("Task-v0", 2, 2)
    seen = [*pool.reset()]
    for _ in range(3):
        rows, _ = exchange(pool, {0: DIE, 1: QUICK, 2: QUICK, 3: QUICK}, 4)
        seen += [rows[0][0], rows[1][0]]
    assert len(np.unique(np.stack(seen), axis=0)) == 4 + 3 * 2


def test_a_replaced_worker_leaves_no_open_file(make_pool):
    pool, counts = make_pool("Task-v0", 2), []
    for _ in range(3):
        exchange(pool, {0: DIE, 1: QUICK}, 2)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert pool.restarts == 3 and counts[0] == counts[2]


def test_a_worker_that_has_answered_is_not_too_late(make_pool):
    """Though the pool has not heard it yet, as it was busy."""
    pool = make_pool("Task-v0", 1)
    pool.reset()
    pool.send(np.array([QUICK]), np.array([0]))
    worker = pool.workers[0]
    assert worker.connection.poll(60)
    worker.deadline = pool.next_check = 0.0
    with mock.patch.object(pool, "poller", mock.Mock(poll=lambda _: [])):
        pool.listen()
    assert pool.restarts == 0 and worker.process.is_alive()
    pool.recv(1)


def test_a_closed_pool_leaves_no_open_file():
    counts = []
    for _ in range(3):
        pool = POOL.Pool(POOL.Args(env_id="Task-v0", num_workers=2, start_method="fork"), [0, 1])
        pool.reset()
        pool.close()
        del pool
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]


def test_a_worker_that_cannot_be_replaced_ends_the_run_with_a_checkpoint(make_pool, monkeypatch):
    pool, stopped = make_pool("Task-v0", 2), []
    monkeypatch.setattr(pool, "start", mock.Mock(side_effect=OSError(24, "Too many open files")))
    monkeypatch.setattr(pool, "stop", lambda message: stopped.append(message) or sys.exit(1))
    with pytest.raises(SystemExit):
        exchange(pool, {0: DIE, 1: QUICK}, 2)
    assert "worker 0 died: killed by SIGKILL; can't start another: [Errno 24] Too many open files" in stopped[0]


def test_a_run_survives_deaths_and_masks_what_they_broke_off(train, monkeypatch, capfd):
    """Each worker dies at its 30th step, again and again. Of an episode that this broke off, nothing is reported.

    The returns of whole episodes are known here: those of an environment's episode e are 100 e + 1, 100 e + 2, ...
    """
    monkeypatch.setattr(tiny_envs, "EVENT", "SIGKILL@30")
    episodes, valid = [], []
    log, gae = POOL.Run.log, POOL.gae
    monkeypatch.setattr(POOL.Run, "log", lambda run, metrics: (episodes.extend(run.episodes), log(run, metrics)))
    monkeypatch.setattr(POOL, "gae", lambda *args: (valid.append(args[4].clone()), gae(*args))[1])
    layout = {"num_workers": 2, "envs_per_worker": 2, "ready_batch": 1, "max_restarts": 1000}
    run = train(NAME, env_id="tiny_envs:Count-v0", total_timesteps=1024, **layout)
    restarts = [line["pool/worker_restarts"] for line in run.lines]
    assert restarts == sorted(restarts) and restarts[-1] >= 10
    assert capfd.readouterr().err.count("died: killed by SIGKILL; restart") == restarts[-1]
    rows = torch.stack(valid)
    assert run.lines[-1]["global_step"] == rows.sum()
    # A row is masked for each episode, but for those that end with the run, and two for each death
    assert 0 <= len(episodes) + 2 * restarts[-1] - (rows == 0).sum() <= 4
    for episode_return, length in episodes:
        episode = (episode_return - length * (length + 1) / 2) / (100 * length)
        assert episode in range(10) and length == (3 if episode % 2 == 0 else 5)


def test_the_limits_of_workers_may_change_when_a_run_goes_on(train, tmp_path):
    """As the line says that ends it when they were too narrow."""
    train(NAME, total_timesteps=128)
    helpers.call(NAME, resume=str(tmp_path / "run0"), step_timeout=300.0, max_restarts=99, device="cpu")
    (part,) = json.loads((tmp_path / "run0" / "config.json").read_text())["resumed"]
    assert {"step_timeout": 300.0, "max_restarts": 99}.items() <= part["changed"].items()


def test_too_many_deaths_end_the_run_with_their_cause(train, monkeypatch, tmp_path):
    monkeypatch.setattr(tiny_envs, "EVENT", "raise@100")
    with pytest.raises(SystemExit) as end:
        train(NAME, checkpoint_every=50, max_restarts=1)
    assert "RuntimeError: this environment broke; --max-restarts 1" in end.value.code
    assert helpers.outcome(tmp_path / "run0").checkpoint["global_step"] >= 100


@pytest.mark.slow
def test_learns_though_workers_are_killed(train, monkeypatch):
    """One every 400 batches; the task of test_learning.py is learnt all the same, in four times as many steps."""
    killed, num_sends, send = [], itertools.count(1), POOL.Pool.send

    def send_and_kill(pool, action, ids):
        send(pool, action, ids)
        worker = pool.workers[len(killed) % len(pool.workers)]
        if next(num_sends) % 400 == 0 and worker.process.is_alive():
            worker.process.kill()
            killed.append(worker.process.pid)

    settings, (_, goal) = TABLE[NAME].task, TABLE[NAME].goal
    settings = settings | {"total_timesteps": 4 * settings["total_timesteps"]}
    with monkeypatch.context() as patch:
        patch.setattr(POOL.Pool, "send", send_and_kill)
        run = train(NAME, **settings, max_restarts=1000)
    assert len(killed) >= run.lines[-1]["pool/worker_restarts"] >= 10
    assert play(NAME, run, episodes=20) > goal


# The end


def workers_of(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *workers_of(int(child))]
    return found


def named_memory(pids: list[int]) -> set[str]:
    """The files in /dev/shm that processes have mapped, not those of which only the memory is left."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split()[-1] for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")}


@pytest.mark.parametrize(
    ("signum", "method"),
    [(signal.SIGINT, "spawn"), (signal.SIGTERM, "forkserver"), (signal.SIGKILL, "spawn"), (signal.SIGKILL, "fork")],
)
def test_nothing_is_left_of_a_run_that_is_ended(tmp_path, signum, method):
    """Ctrl-C reaches the workers, too. Spawned ones know nothing of PyTorch, and have no second thread to compute."""
    arguments = helpers.flags(NAME, num_workers=3, start_method=method, total_timesteps=10**7, run_dir="run")
    process, log = helpers.start(NAME, *arguments, cwd=tmp_path), tmp_path / "run/metrics.jsonl"
    helpers.wait_until(lambda: log.exists() and log.stat().st_size > 0, 240)
    children = workers_of(process.pid)
    memory = named_memory([process.pid, *children])
    assert len(children) >= 3
    if method == "spawn":
        for pid in children:
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
            assert len(os.listdir(f"/proc/{pid}/task")) <= 2  # the one that works, and the one that waits for the end
    (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum), errors
    assert "Traceback" not in errors
    helpers.wait_until(lambda: not any(map(helpers.is_alive, children)), 30)
    assert not [path for path in memory if Path(path).exists()]


class Collecting(gym.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        gc.collect()


gym.register("CollectingReach-v0", lambda: Collecting(gym.make("tiny_envs:Reach-v0")))


def test_a_forked_worker_leaves_its_parents_garbage_alone(make_pool):
    """The end of EnvPool's environments waits for threads, which a forked process does not have: it would abort."""
    envpool = pytest.importorskip("envpool")
    gc.disable()
    try:
        cycle = [envpool.make_gymnasium("CartPole-v1", num_envs=2)]
        cycle.append(cycle)
        del cycle
        pool = make_pool("CollectingReach-v0", 1)
    finally:
        gc.enable()
    assert pool.reset().shape == (1, 3)


def test_a_step_that_does_not_end_is_no_orphan():
    """Its worker ends two seconds after the process that started it, here a forked one."""
    pid = os.fork()
    if pid == 0:
        gc.disable()  # what other tests left, such as EnvPool's environments, can't be freed here, without its threads
        try:
            pool = POOL.Pool(POOL.Args(env_id="Task-v0", num_workers=1, start_method="fork"), [0])
            pool.send(np.array([HANG]), np.array([0]))
            time.sleep(60)
        finally:
            os._exit(1)  # else it would go on as a second pytest
    helpers.wait_until(lambda: workers_of(pid), 120)
    children = workers_of(pid)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert any(map(helpers.is_alive, children))
    helpers.wait_until(lambda: not any(map(helpers.is_alive, children)), 30)


# What is refused


@pytest.fixture
def refused(capfd, tmp_path):
    """The one line of the error of a training that was refused."""

    def refused(**settings) -> str:
        settings = TABLE[NAME].small | settings | {"run_dir": str(tmp_path / "refused")}
        with pytest.raises(SystemExit) as end:
            POOL.train(POOL.Args(**settings))
        *notes, error = capfd.readouterr().err.splitlines()
        assert end.value.code == 2 and error.startswith("error: ") and not any("error" in note for note in notes)
        assert not (tmp_path / "refused").exists()
        return error

    return refused


def test_environment_that_cannot_be_sent_is_refused(refused, monkeypatch):
    lock = threading.Lock()
    monkeypatch.setattr(POOL, "make_env", lambda env, _settings: lock and gym.make(env))
    assert "can't be sent to a worker process: cannot pickle '_thread.lock'" in refused()


def process_number() -> int:
    """That of the process that multiprocessing started before, and 1."""
    return int(multiprocessing.current_process().name.rpartition("-")[2])


def test_spaces_that_differ_are_refused(refused, monkeypatch):
    """In two workers, or in one."""
    spaces = [Box(-1, 1, (size,)) for size in (2, 3)]
    monkeypatch.setattr(POOL, "make_env", lambda _env, _settings: Task(Discrete(2), spaces[process_number() % 2]))
    lines = [refused(env_id="Task-v0", num_workers=2)]
    monkeypatch.setattr(POOL, "make_env", lambda _env, _settings: Task(Discrete(2), spaces.pop()))
    lines.append(refused(env_id="Task-v0", envs_per_worker=2))
    for line in lines:
        assert "environments differ in their spaces" in line and "(2,)" in line and "(3,)" in line


def test_environment_that_breaks_at_its_start_is_refused(refused, monkeypatch):
    monkeypatch.setattr(POOL, "make_env", lambda _env, _settings: 1 / 0)
    assert "can't make environment tiny_envs:Reach-v0: ZeroDivisionError" in refused(num_workers=2)


def test_spaces_that_cannot_be_sent_are_refused_with_the_reason(refused, monkeypatch):
    def make_env(_env, _settings):
        space = Box(-1, 1, (3,))
        space.lock = threading.Lock()
        return Task(Discrete(2), space)

    monkeypatch.setattr(POOL, "make_env", make_env)
    assert "can't make environment Task-v0: TypeError: cannot pickle '_thread.lock'" in refused(env_id="Task-v0")


def test_memory_for_rows_that_is_not_there_is_refused(refused, monkeypatch):
    """Else the first row that finds no memory would end the program by SIGBUS."""
    monkeypatch.setattr(POOL.tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("wb"))
    assert re.search(r"no [\d,]+ bytes for the rows of 2 environments: .*No space left", refused(num_workers=2))


def test_workers_that_cannot_be_started_are_refused(refused, monkeypatch):
    monkeypatch.setattr(POOL.Pool, "start", mock.Mock(side_effect=OSError(24, "Too many open files")))
    assert "can't start 2 worker processes: [Errno 24] Too many open files" in refused(num_workers=2)


def test_layouts_that_cannot_work_are_refused(refused):
    assert "--ready-batch 5 is more than there are environments, 4" in refused(
        num_workers=2, envs_per_worker=2, ready_batch=5
    )
    assert "--num-workers must be at least 1" in refused(num_workers=0)
    assert "--envs-per-worker must be at least 1" in refused(envs_per_worker=-2)


def test_actions_of_another_kind_are_refused(refused):
    assert "Many-v0 has actions MultiDiscrete([2 3])" in refused(env_id="Many-v0")


@pytest.mark.parametrize("what", ["shape", "first shape"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_observation_of_another_shape_is_named(train, capfd, size, what):
    with pytest.raises(SystemExit) as end:
        train(NAME, env_id="tiny_envs:Odd-v0", env_kwargs=json.dumps({"what": what, "size": size}), max_restarts=0)
    message = f"observation has shape ({size},), its space has (3,)"
    assert message in f"{end.value.code} {capfd.readouterr().err}"


def test_names_in_info_may_be_anything(train):
    run = train(NAME, env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "info"}')
    assert {name for name in run.lines[-1] if name.startswith("info/")} == {"info/own"}
