"""What all scripts over Ray share: runners with numbers of their own, learners with shares of their own."""

import signal
import sys
from collections import Counter, defaultdict
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import test_ppo_ray
import tiny_envs
import torch
from helpers import load, on_ray, small_settings, without_times
from parity import assert_agree

ACTOR_CRITICS = ["impala_ray", "a3c_ray", "ppo_ray"]
RAY = [*ACTOR_CRITICS, "apex_dqn_ray"]
each_script = pytest.mark.parametrize("name", RAY)


@pytest.mark.parametrize("name", ["a3c_ray", "impala_ray", "ppo_ray"])
def test_all_numbers_of_a_learner_are_on_its_device(name):
    """On CUDA a graph refuses one on the CPU."""
    script = load(name)
    args = script.Args(**small_settings(name) | {"num_runners": 1})
    runner = script.Runner(args, [1, 2])
    spaces = runner.envs.observation_space, runner.envs.action_space
    agent, optimizer, *_ = script.make_learner(args, *spaces, torch.device("meta"))
    assert {x.device.type for part in (agent, optimizer) for x in (*part.parameters(), *part.buffers())} == {"meta"}


@pytest.fixture
def train(tmp_path):
    """Train in this process by the small settings of a script, each time in a folder of its own -> Outcome."""
    folders = (tmp_path / f"run{i}" for i in range(100))

    def train(name: str, **settings) -> helpers.Outcome:
        own = small_settings(helpers.pair_of(name)) | {"run_dir": str(next(folders))} | settings
        return helpers.call(name, **own)

    return train


@pytest.mark.parametrize("name", RAY)
@pytest.mark.parametrize("setting", ["episodic_life", "reward_clip"])
def test_settings_that_hide_the_score_of_a_game_are_refused(name, setting, capfd):
    """By them EnvPool reports lives as episodes, or clipped rewards, and the log would have no score of a game."""
    script = load(name)
    args = script.Args(env_id="Pong-v5", env_kwargs=f'{{"{setting}": true}}', envs_per_runner=1)
    with pytest.raises(SystemExit) as end:
        script.open_envs(args, [1])
    assert end.value.code == 2 and f"--env-kwargs {setting}: returns in the log" in capfd.readouterr().err
    script.open_envs(script.replace(args, env_kwargs=f'{{"{setting}": false}}'), [1]).close()


@each_script
def test_a_runner_draws_other_numbers_than_its_environments(name):
    """Also with a single one: Gymnasium makes the same generator of its seed as NumPy of a list of that."""
    script = load(name)
    for seeds in ([5], [5, 6]):
        args = script.Args(**small_settings(name) | {"envs_per_runner": len(seeds)})
        runner = script.Runner(args, seeds)
        own = runner.rng.random(4)
        runner.envs.close()
        for seed in seeds:
            assert not np.isin(own, gym.utils.seeding.np_random(seed)[0].random(100)).any()


class Mixing(torch.nn.Module):
    """A policy for frames that looks at the whole batch, or draws random numbers; or not."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.head, self.mix = kind, torch.nn.Linear(7056, 4), torch.nn.GRU(4, 4)

    def forward(self, frames: np.ndarray) -> np.ndarray:
        x = self.head(torch.from_numpy(frames).flatten(2).float().sum(1) / 255)
        x = torch.nn.functional.dropout(x, 0.5) if self.kind == "dropout" else x
        return (self.mix(x)[0] if self.kind == "gru" else x).numpy()


@pytest.mark.parametrize("name", RAY)
def test_a_policy_for_frames_that_gives_a_row_another_action_among_others_is_refused(name, capfd):
    """As one does whose layers take the batch for time; a runner looks when it starts."""
    script, space = load(name), gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    script.check_rows(Mixing("plain"), space)
    for kind in ("gru", "dropout"):
        with pytest.raises(SystemExit) as end:
            script.check_rows(Mixing(kind), space)
        assert end.value.code == 2 and "looks at a whole batch" in capfd.readouterr().err
    with mock.patch.object(script, "check_rows") as check:
        script.Runner(script.Args(env_id="Pong-v5", envs_per_runner=1), [1]).envs.close()
    check.assert_called_once()


# Ray's start


@pytest.mark.parametrize("name", RAY)
def test_a_signal_before_the_run_ends_it_in_one_line(name, capfd):
    before, script = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}, load(name)
    for signum in before:
        with pytest.raises(SystemExit) as end, script.ending_early():
            signal.raise_signal(signum)
        assert end.value.code == 128 + signum and capfd.readouterr().err == "stopped before the run began\n"
    assert before == {x: signal.getsignal(x) for x in before}


@pytest.mark.parametrize("name", RAY)
def test_a_run_says_that_it_waits_for_a_busy_cluster(name, capfd):
    script, machine = load(name), {"Alive": True, "Resources": {"CPU": 4.0}}
    busy = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: [machine], cloudpickle=mock.Mock())
    busy.cluster_resources, busy.available_resources = lambda: machine["Resources"], lambda: {"CPU": 1.0}
    with mock.patch.dict(sys.modules, {"ray": busy}), script.ending_early():
        script.start_ray(script.Args(num_runners=2, ray_address="auto"))
    assert capfd.readouterr().err == "note: this run needs 2 CPUs and waits, as 1 are free\n"


@pytest.mark.parametrize("name", RAY)
def test_a_runner_makes_the_environment_that_the_file_registered(name):
    """Though its process knows another one by this name."""
    spec = gym.envs.registration.EnvSpec("CartPole-v1", "my_module:MyCartPole", max_episode_steps=3)
    with mock.patch.dict(gym.registry), mock.patch("signal.signal"), mock.patch("torch.set_num_threads"):
        load(name).RemoteRunner(load(name).Args(), [1], spec)
        assert gym.registry["CartPole-v1"] is spec


@pytest.mark.parametrize("name", ["impala_ray", "ppo_ray"])
def test_another_optimizer_is_for_one_learner(name, capfd):
    script = load(name)
    learners = script.OtherLearners(script.Args(num_learners=1), SimpleNamespace())
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(1))])
    learners.update(optimizer, [])
    learners.actors = [None]
    with pytest.raises(SystemExit) as end:
        learners.join(torch.device("cpu"), torch.nn.Linear(1, 1), optimizer)
    assert end.value.code == 2 and "RMSprop is none" in capfd.readouterr().err


# Reports


@pytest.mark.parametrize("name", RAY)
def test_a_fragment_that_comes_too_late_counts_but_for_its_steps(name):
    """Else the log would leave out the episodes and the time of just the slowest runners."""
    script = load(name)
    runners = object.__new__(script.NumberedRunners if name == "apex_dqn_ray" else script.RayRunners)
    runners.run = SimpleNamespace(num_updates=5, step=100, episodes=[])
    runners.args, runners.most_stale, runners.late = script.Args(num_runners=1), 1, 0
    runners.seconds, runners.infos, runners.staleness = Counter(), defaultdict(list), []
    runners.failures, runners.since, runners.ask, runners.pending = [0], [0.0], mock.Mock(), [2]
    runners.alive, runners.ahead = {0}, 1
    runners.ray = SimpleNamespace(get=lambda x: x, exceptions=SimpleNamespace(RayError=RuntimeError))
    for version, found in ((4, [None]), (3, [None])):
        report = {"version": version, "steps": 8, "episodes": [(1.0, 8)], "seconds": {"acting": 2.0}}
        runners.ray.get = lambda _, report=report: report | {"infos": {"is_success": [1.0]}}
        runners.in_flight = {"fragment": (0, "report")}
        runners.hear("fragment", found, 0)
        for news, _ in filter(None, found):
            runners.note(news)
        assert runners.run.step == 108 and runners.staleness == [1]  # only the first is learnt from
    assert runners.late == 1 and runners.run.episodes == [(1.0, 8)] * 2
    assert runners.seconds["acting"] == 4 and runners.infos["is_success"] == [1, 1]
    assert runners.pending == [0]


@pytest.mark.parametrize("name", RAY)
def test_each_runner_is_asked_for_no_more_than_it_may_owe(name):
    """Whatever comes, fails or dies. The count is kept: to count all requests for each runner takes its square."""
    script, rng = load(name), np.random.default_rng(0)
    runners = object.__new__(script.RayRunners)
    runners.args = script.Args(num_runners=4, runner_restarts=1000)
    runners.named, runners.run, runners.clock = {}, mock.Mock(num_updates=0), mock.Mock()
    runners.sent = runners.known_to_runners()
    runners.most_stale, runners.ahead, runners.alive, runners.weights = np.inf, 2, set(range(4)), (0, np.zeros(1))
    runners.in_flight, runners.pending, runners.since = {}, [0] * 4, [np.inf] * 4
    runners.places, runners.told, runners.restarts = {}, {}, 0
    runners.remote, runners.last_news, runners.late = mock.Mock(), 0.0, 0
    runners.seeds = list(range(4 * runners.args.envs_per_runner))
    runners.remote.remote.side_effect = lambda *_: mock.MagicMock(
        **{"sample.options.return_value.remote.side_effect": lambda *_: (object(), object())}
    )
    runners.actors = {index: runners.remote.remote() for index in range(4)}
    news = {
        "version": 0,
        "versions": script.versions(),
        "place": "here",
        "spaces": None,
        "backend": None,
        "summary": "",
    }
    runners.ray = mock.Mock(**{"exceptions.RayError": RuntimeError})
    for turn in range(300):
        runners.failures = [0] * 4  # else three deaths of one runner end the run
        runners.publish(turn, np.zeros(1))
        reference = list(runners.in_flight)[rng.integers(len(runners.in_flight))]
        runners.ray.get.side_effect = [RuntimeError("it died")] if rng.random() < 0.1 else [news, "fragment"]
        runners.hear(reference, [None] * 4, 4)
        owed = Counter(index for index, report in runners.in_flight.values() if report is not None)
        assert runners.pending == [owed[index] for index in range(4)] and max(runners.pending) <= 2
        assert all(runners.pending[index] for index in runners.alive)
    assert runners.restarts > 10


@pytest.mark.parametrize("name", ["a3c_ray", "ppo_ray"])
def test_who_owes_its_own_fragment_is_asked_before_who_has_brought_it(name):
    """A runner that took another's place brings what is too old. It is idle then, as is the one that was in time."""
    script = load(name)
    runners = object.__new__(script.RayRunners)
    runners.args, runners.run, runners.clock, runners.queue = script.Args(num_runners=2), mock.Mock(), mock.Mock(), [7]
    runners.in_flight, asked = {"its own": (0, "x"), "too old": (1, "y")}, []
    runners.most_stale, runners.alive = 0, {0, 1}
    runners.ready = lambda: runners.queue.append(len(runners.in_flight)) or list(runners.in_flight)

    def hear(reference, found, _num_ours):
        index, _ = runners.in_flight.pop(reference)
        found[index] = None if reference == "too old" else ({}, reference)

    def ask(index, _count):
        asked.append(index)
        runners.in_flight[f"asked of {index}"] = index, "z"

    runners.hear, runners.ask, runners.note = hear, ask, mock.Mock()
    runners.collect(2, 1)
    assert asked == [1] and runners.queue == [7, 2]  # what was ready at first, not at each later look


@pytest.mark.parametrize("name", RAY)
@pytest.mark.parametrize(
    ("kind", "need", "expected"),
    [
        ("CPU", 0, np.inf),
        ("CPU", 0.1, 30),
        ("CPU", 2, 1),
        ("CPU", 4, 0),
        ("GPU", 0.6, 2),
        ("GPU", 0.5, 4),
        ("GPU", 2, 1),
    ],
)
def test_how_many_processes_a_machine_has_room_for(name, kind, need, expected):
    """A part of a GPU is a part of one: of two GPUs, 0.6 have room for two processes, not for three."""
    assert load(name).places({"CPU": 3.0, "GPU": 2.0}, kind, need) == expected


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_a_density_that_actions_are_not_drawn_from_is_refused(name, capsys):
    """A temperature in the log-probability alone, and a bound of the standard deviation alone; of frames, too."""
    script, frames = load(name), gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    vector, box = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32)
    for spaces in ((vector, gym.spaces.Discrete(3)), (vector, box), (frames, gym.spaces.Discrete(3))):
        agent = script.ActorCritic(*spaces)
        before = deepcopy(agent.state_dict())
        script.check_density(agent)
        assert all(torch.equal(x, before[name]) for name, x in agent.state_dict().items())
        log_prob, change = agent.log_prob, (lambda x: x / 5) if agent.is_discrete else (lambda x: x + 0.5)
        agent.log_prob = lambda output, action, log_prob=log_prob, change=change: log_prob(change(output), action)
        with pytest.raises(SystemExit) as end:
            script.check_density(agent)
        assert end.value.code == 2 and "actions have another `log_prob`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_a_scale_that_noise_and_density_share_is_fine(name):
    """A temperature, and a fixed standard deviation; what is drawn by another distribution is not checked."""
    script, vector = load(name), gym.spaces.Box(-1, 1, (3,), np.float32)
    agent = script.ActorCritic(vector, gym.spaces.Discrete(3))
    log_prob, noise = agent.log_prob, agent.noise
    agent.log_prob = lambda output, action: log_prob(output / 5, action)
    agent.noise = lambda rng, *shape: 5 * noise(rng, *shape)
    script.check_density(agent)
    agent = script.ActorCritic(vector, gym.spaces.Box(-1, 1, (2,), np.float32))
    del agent.log_std
    agent.log_prob = lambda output, action: script.normal_log_prob(action, output, torch.full((2,), -1.0))
    agent.noise = lambda rng, *shape: 0.36788 * rng.standard_normal((*shape, 2), dtype=np.float32)
    script.check_density(agent)
    agent.noise = lambda rng, *shape: rng.laplace(size=(*shape, 2))
    script.check_density(agent)
    agent.noise = lambda rng, num_steps, num_envs: rng.standard_normal((num_steps, num_envs, 2), dtype=np.float32)
    script.check_density(agent)
    agent.noise = lambda rng, *shape: 0.36788 * rng.standard_normal((*shape, 2), dtype=np.float32)
    agent.outputs = 4  # a standard deviation among the outputs: noise, of which it makes use, has half as many
    agent.log_prob = lambda output, action: script.normal_log_prob(action, *output.chunk(2, -1))
    script.check_density(agent)


@pytest.mark.parametrize("name", RAY)
def test_a_run_ends_once_its_restarts_are_used_up(name, capsys):
    """However many fragments came between the deaths."""
    script = load(name)
    runners = object.__new__(script.RayRunners)
    runners.args, runners.restarts, runners.told = script.Args(num_runners=2, runner_restarts=1), 0, {}
    runners.alive, runners.in_flight, runners.actors, runners.ray = set(), {}, [None], mock.Mock()
    runners.start, runners.stop, runners.run = mock.Mock(), script.fail, mock.Mock()
    for death in range(3):
        runners.alive.add(0)
        runners.places, runners.failures, runners.pending = {0: "here"}, [0], [1]
        with pytest.raises(SystemExit) if death == 2 else nullcontext():
            runners.bury(0, RuntimeError("it died"))
    assert runners.start.call_count == runners.restarts == 2
    why = "all 2 restarts are used up, --runner-restarts 1 times --num-runners 2"
    assert f"runner 0 (here) died: RuntimeError: it died; {why}" in capsys.readouterr().err


@pytest.mark.parametrize("name", RAY)
def test_the_machine_of_a_runner_that_cannot_start_is_named(name, capsys):
    """As Ray's error does: one machine of many may lack a simulator, and its runner may be the first to answer."""
    script, stopped = load(name), []
    runners = object.__new__(script.RayRunners)
    runners.args, runners.restarts, runners.told = script.Args(num_runners=2, ray_address="auto"), 2, {}
    runners.alive, runners.in_flight, runners.actors, runners.ray = {1}, {}, [None], mock.Mock()
    runners.places, runners.failures, runners.pending, runners.stop = {}, [2], [0], stopped.append
    runners.start, runners.run = mock.Mock(), mock.Mock()
    error = RuntimeError("ray::RemoteRunner.open() (pid=7, ip=10.0.0.8, actor_id=17, repr=...)\nOSError: no licence")
    error.cause = OSError("no licence")
    runners.bury(0, error)
    assert stopped[0].startswith("runner 0 (not yet up, on 10.0.0.8) died: OSError: no licence; so it did 3 times")
    runners.failures = [2]
    runners.bury(
        0, RuntimeError("The actor died.\n\tpid: 7\n\tip: 10.0.0.9\nexit detail: it was killed. Common causes")
    )
    assert stopped[1].startswith("runner 0 (not yet up, on 10.0.0.9) died: RuntimeError: it was killed; so")
    runners.alive, runners.restarts = set(), 0
    with pytest.raises(SystemExit):
        runners.bury(0, error)
    told = capsys.readouterr().err
    assert "error: OSError: no licence; on 10.0.0.8\n" in told and "repr=...)\nOSError: no licence" in told


@pytest.mark.parametrize("name", RAY)
def test_weights_that_find_no_memory_end_the_run_with_a_checkpoint(name):
    """Of Ray: `stop` writes it, an exception of Ray's would not."""
    script = load(name)
    runners = object.__new__(script.RayRunners)
    runners.args, runners.named, runners.clock, runners.alive = script.Args(), {}, mock.Mock(), {0}
    runners.sent, runners.stop = runners.known_to_runners(), mock.Mock(side_effect=SystemExit)
    runners.ray = mock.Mock(**{"exceptions.RayError": RuntimeError, "put.side_effect": RuntimeError("disk is full")})
    with pytest.raises(SystemExit):
        runners.publish(0, np.zeros(100_000))
    runners.stop.assert_called_once_with("Ray can't store the weights: RuntimeError: disk is full")


@pytest.mark.parametrize("name", RAY)
def test_a_run_whose_runners_are_all_silent_ends(name, monkeypatch):
    """After --fragment-timeout without any news, by `stop`, which saves a checkpoint."""
    script, now = load(name), [100.0]
    runners = object.__new__(script.RayRunners)
    runners.args, runners.in_flight = script.Args(fragment_timeout=5.0), {"a": (0, "x")}
    runners.since, runners.last_news, runners.alive, runners.queue, runners.deadline = [0.0], -np.inf, {0}, [], 105.0
    runners.ray, runners.stop, runners.fetches = mock.Mock(), mock.Mock(side_effect=SystemExit), True
    runners.ray.wait.side_effect = lambda references, **_: ([], references)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert runners.ready() == [] and not runners.stop.called
    assert all(call.kwargs["fetch_local"] for call in runners.ray.wait.call_args_list)
    now[0] = 106.0
    with pytest.raises(SystemExit):
        runners.ready()
    assert "no runner has done anything for 5 s" in runners.stop.call_args[0][0]


# Environments of a runner


@pytest.mark.slow
@pytest.mark.parametrize("name", RAY)
def test_few_cheap_environments_step_in_the_runner(name):
    """As in the scripts of one process: EnvPool pays from nine CartPoles on, or if it is asked for."""
    script, found = load(name), []
    for num_envs, settings in ((4, {}), (9, {}), (4, {"env_backend": "envpool"}), (2, {"async_envs": True})):
        envs = script.open_envs(script.Args(env_id="CartPole-v1", **settings), list(range(num_envs)))
        found.append(type(envs.vector).__name__)
        envs.close()
    assert found == ["SyncEnvs", "CartPoleGymnasiumEnvPool", "CartPoleGymnasiumEnvPool", "AsyncVectorEnv"]


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ({"num_runners": 0}, 16),
        ({"num_runners": 2}, 8),
        ({"num_runners": 64}, 1),
        ({"num_runners": 64, "cpus_per_runner": 0.5}, 1),
        ({"num_runners": 64, "cpus_per_runner": 4.0}, 4),
        ({"num_runners": 2, "envs_per_runner": 3}, 3),
        ({"num_runners": 2, "env_kwargs": '{"num_threads": 5}'}, 5),
    ],
)
@pytest.mark.parametrize("name", RAY)
def test_threads_of_envpool_are_a_share_of_the_cores(name, settings, threads, monkeypatch):
    """Not as many in each runner as the machine has cores: they would wait for each other."""
    script, pool = load(name), mock.Mock()
    pool.make_gymnasium.return_value.observation_space = gym.spaces.Box(-1, 1, (3,))
    pool.make_gymnasium.return_value.action_space = gym.spaces.Discrete(2)
    pool.list_all_envs.return_value = ["Some-v0"]
    monkeypatch.setitem(sys.modules, "envpool", pool)
    monkeypatch.setattr(script, "num_cores", lambda: 16)
    args = script.Args(env_id="Some-v0", env_backend="envpool", **{"envs_per_runner": 32} | settings)
    script.open_envs(args, list(range(args.envs_per_runner)))
    assert pool.make_gymnasium.call_args.kwargs["num_threads"] == threads


# Random numbers


@pytest.mark.parametrize("name", RAY)
def test_each_runner_draws_numbers_of_its_own(name):
    script = load(name)
    args = script.Args(**small_settings(name) | {"num_runners": 2})
    size = args.envs_per_runner
    drawn = [script.Runner(args, [first + i for i in range(size)]).rng.random(4) for first in (1, 9, 1)]
    assert np.array_equal(drawn[0], drawn[2]) and not np.isin(drawn[0], drawn[1]).any()


@pytest.mark.parametrize("name", RAY)
def test_environments_of_all_runners_have_seeds_of_their_own(name):
    """Those of a runner that replaces a dead one, too."""
    script, given = load(name), []
    runners = object.__new__(script.RayRunners)
    runners.args, runners.seeds = script.Args(num_runners=3, envs_per_runner=2), list(range(6))
    runners.actors, runners.in_flight = {}, {}
    runners.remote = SimpleNamespace(remote=lambda _args, seeds, _spec: given.extend(seeds) or mock.Mock())
    for runners.restarts in range(3):
        for index in range(3):
            runners.start(index)
    assert given[:6] == runners.seeds and len(set(given)) == 18


@pytest.mark.parametrize("name", RAY)
def test_noise_is_new_in_each_fragment(name):
    """Of an environment that always looks the same, so that only noise tells two fragments apart."""
    script, found = load(name), []
    settings = {"env_id": "tiny_envs:DiscreteSame-v0", "num_runners": 1, "epsilon_base": 0.9}
    args = script.Args(**small_settings(name) | {key: x for key, x in settings.items() if hasattr(script.Args, key)})
    runner = script.Runner(args, list(range(args.envs_per_runner)))
    net = runner.network if name == "apex_dqn_ray" else runner.agent
    for version in range(2):
        tiny_envs.received.clear()
        runner.sample(version, script.get_weights(net), *(test_ppo_ray.NOTHING if name == "ppo_ray" else ()))
        found.append(np.array(tiny_envs.received))
    assert len(found[0]) == len(found[1]) >= 16 and not np.array_equal(*found)


# Actions


@pytest.mark.parametrize("env_id", ["tiny_envs:DiscreteStream-v0", "tiny_envs:Stream-v0"])
@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_actions_are_what_the_policy_and_the_noise_say(name, env_id, monkeypatch):
    """At the observations beside them, which PPO normalizes; so are their log-probabilities."""
    script, given = load(name), []
    own = {"norm_obs": True} if name == "ppo_ray" else {}
    args = script.Args(**small_settings(name) | own | {"num_runners": 1, "env_id": env_id})
    runner = script.Runner(args, list(range(args.envs_per_runner)))
    agent = script.ActorCritic(runner.envs.observation_space, runner.envs.action_space)
    with torch.no_grad():
        for weight in agent.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    if name == "a3c_ray":  # its fragments stay where they are made
        gradient = runner.gradient
        monkeypatch.setattr(runner, "gradient", lambda *x: (given.append([y.numpy() for y in x]), gradient(*x))[1])
    known = (200, np.full(runner.envs.obs_dim, 0.5), np.full(runner.envs.obs_dim, 300.0)), test_ppo_ray.NOTHING[1]
    for version in range(2):
        rng = deepcopy(runner.rng)
        _, fragment = runner.sample(version, script.get_weights(agent), *(known if name == "ppo_ray" else ()))
        obs, action, rows = given.pop() if name == "a3c_ray" else fragment
        with torch.no_grad():
            output = agent(torch.tensor(obs[:-1]).flatten(0, 1))[0]
            log_prob = agent.log_prob(output, torch.tensor(action).flatten(0, 1)).numpy()
        sample = output.numpy().reshape(*action.shape[:2], -1) + agent.noise(rng, *action.shape[:2])
        expected = sample.argmax(-1) if agent.is_discrete else sample
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)
        assert len(np.unique(action)) > 1 and np.abs(obs[:-1] - obs[:1]).max() > 0.1
        if name != "a3c_ray":
            np.testing.assert_allclose(rows[..., 4].ravel(), log_prob, rtol=1e-3, atol=1e-4)


def test_actors_of_apex_take_the_action_of_the_highest_value():
    """At the observation beside it, by the weights that came with the request, where they do not explore."""
    script = load("apex_dqn_ray")
    settings = {"env_id": "tiny_envs:DiscreteStream-v0", "epsilon_base": 0.0, "num_runners": 1}
    args = script.Args(**small_settings("apex_dqn_ray") | settings)
    runner = script.Runner(args, list(range(args.envs_per_runner)))
    torch.manual_seed(0)  # some networks prefer one action everywhere
    network = script.QNetwork(runner.envs.observation_space, int(runner.actions.n), args.dueling)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    runner.sample(0, script.get_weights(network))  # the first rows of the next one come from here
    _, (obs, _, columns) = runner.sample(1, script.get_weights(network))
    with torch.no_grad():
        expected = network(torch.tensor(obs[: len(columns)]).flatten(0, 1)).argmax(1)
    assert (columns[..., 0].ravel() == expected.numpy()).all() and len(expected.unique()) > 1


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_runners_give_environments_actions_as_they_take_them(train, name):
    for env_id in ("tiny_envs:Choose-v0", "tiny_envs:Reach-v0"):
        tiny_envs.received.clear()
        train(name, **small_settings(name) | {"env_id": env_id})
        actions, space = np.array(tiny_envs.received), gym.make(env_id).action_space
        if isinstance(space, gym.spaces.Box):
            assert (actions.min(0) == space.low).all() and (actions.max(0) == space.high).all()
        else:
            assert set(actions.tolist()) == {5, 6, 7}


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_entropy_is_that_of_torch(name):
    script, output = load(name), torch.randn(7, 3)
    agent = script.ActorCritic(tiny_envs.LINE, tiny_envs.CHOICE)
    torch.testing.assert_close(agent.entropy(output), torch.distributions.Categorical(logits=output).entropy())
    agent, log_std = script.ActorCritic(tiny_envs.LINE, tiny_envs.PUSH), torch.tensor([-1.0, 0.5])
    agent.log_std.data = log_std.clone()
    expected = torch.distributions.Normal(output[:, :2], log_std.exp()).entropy().sum(1)
    torch.testing.assert_close(agent.entropy(output[:, :2]), expected)


# Learners


@pytest.mark.parametrize("name", ["impala_ray", "ppo_ray"])
def test_other_learners_get_what_the_loop_changes_and_fragments_of_their_own(name):
    """The learning rate, and numbers that a copy of the script keeps beside it: tensors are filled, in their place."""
    script, seen, net = load(name), [], torch.nn.Linear(1, 1)
    learners, optimizer = object.__new__(script.OtherLearners), script.Adam(net, 0.5)
    optimizer.ent_coef, optimizer.eps = torch.tensor(0.25), 0.125
    learners.results, learners.frozen, learners.actors = [], {}, [mock.Mock() for _ in range(3)]
    learners.update(optimizer, list("abcdef"))
    messages = [x.learn.remote.call_args.args for x in learners.actors]
    assert [share for _, share in messages] == [["a", "b"], ["c", "d"], ["e", "f"]]
    learner = object.__new__(script.RemoteLearner)
    learner.optimizer = script.Adam(net, 1.0)
    learner.optimizer.ent_coef = first = torch.tensor(1.0)
    learner.learn_from = lambda fragments: seen.append((float(learner.optimizer.learning_rate), fragments))
    ray = SimpleNamespace(get=lambda references: [x.upper() for x in references])
    with mock.patch.dict(sys.modules, ray=ray):
        learner.learn(*messages[0])
    assert seen == [(0.5, ["A", "B"])] and float(first) == 0.25 and learner.optimizer.eps == 0.125
    assert learner.optimizer.ent_coef is first and learner.optimizer.training


def test_what_ends_a_call_in_another_process_is_told(capfd):
    """A message of `fail`, whatever was printed before; and an environment's `sys.exit`, which prints nothing.

    What is printed goes into the process's log, as it does if the call returns.
    """
    script = load("ppo_ray")

    def refuse(*_):
        print("a warning", file=sys.stderr)
        script.fail("there is no compiler")

    for function, message in ((refuse, "there is no compiler"), (sys.exit, "SystemExit('a licence is missing')")):
        with pytest.raises(script.Refused) as error:
            script.heard(function, "a licence is missing")
        assert str(error.value) == message
    assert script.heard(lambda x: print("MuJoCo warns", file=sys.stderr) or x, 3) == 3
    assert capfd.readouterr().err == "a warning\nerror: there is no compiler\nMuJoCo warns\n"


@pytest.mark.parametrize(
    ("name", "settings", "fetches"),
    [
        ("impala_ray", {}, True),
        ("impala_ray", {"num_learners": 2}, False),
        ("ppo_ray", {}, True),
        ("ppo_ray", {"num_learners": 1}, True),
        ("ppo_ray", {"num_learners": 2}, False),
        ("a3c_ray", {}, True),
        ("apex_dqn_ray", {}, True),
        ("apex_dqn_ray", {"replay_shards": 2}, False),
    ],
)
def test_fragments_travel_to_a_learner_that_takes_all(monkeypatch, name, settings, fetches):
    """To other learners, and to shards of a replay, they go by reference."""
    script = load(name)
    runners = object.__new__(script.RayRunners)
    monkeypatch.setattr(script, "start_ray", lambda _: mock.Mock())
    run = mock.Mock(env_seeds=lambda count: list(range(count)))
    runners.start = mock.Mock(side_effect=StopIteration)
    with pytest.raises(StopIteration):
        runners.begin(script.Args(num_runners=2, **settings), run)
    assert runners.fetches == fetches


def test_batches_of_replay_shards_travel_ahead():
    """All that are requested, when the first of them is taken."""
    script = load("apex_dqn_ray")
    shards = object.__new__(script.ReplayShards)
    shards.ray, shards.runners, shards.num_given, shards.asked = mock.Mock(), mock.Mock(), {0: 1, 1: 1}, script.deque()
    shards.shards = {index: mock.Mock() for index in (0, 1)}
    shards.hear = lambda *_: (True, (7, np.zeros(3)))
    shards.draw(1)
    ((pending,), how) = shards.ray.wait.call_args
    assert len(pending) == 4 and how == {"num_returns": 4, "timeout": 0}


def test_a_runner_is_asked_for_as_many_fragments_as_a_batch_may_take_from_it():
    """Of three fragments a batch and two runners, another one before the learner comes; else a runner would idle."""
    script = load("impala_ray")
    runners = object.__new__(script.RayRunners)
    runners.run, runners.most_stale, runners.late, runners.ahead = SimpleNamespace(num_updates=0), np.inf, 0, 2
    runners.args, runners.alive, runners.ask, runners.pending = script.Args(), {0, 1}, mock.Mock(), [2, 2]
    runners.failures, runners.since = [0, 0], [0.0, 0.0]
    runners.ray = SimpleNamespace(get=lambda _: {"version": 0}, exceptions=SimpleNamespace(RayError=RuntimeError))
    for count, asked in ((1, 1), (2, 1), (3, 2)):
        runners.in_flight = {"fragment": (1, "report")}
        runners.hear("fragment", [None] * count, count)
        runners.ask.assert_called_with(1, asked)


# Environments


@pytest.mark.slow
@pytest.mark.parametrize("name", RAY)
def test_async_envs_are_those_of_gymnasium(name, capsys):
    """Also where EnvPool has the environment, and would be taken by default."""
    script, env_id = load(name), "CartPole-v1" if name == "apex_dqn_ray" else "Hopper-v4"
    args = script.Args(**small_settings(name) | {"env_id": env_id, "envs_per_runner": 9})
    for async_envs, where in ((False, "envpool, in threads"), (True, "gymnasium, in worker processes")):
        envs = script.Runner(replace(args, async_envs=async_envs), list(range(9))).envs
        assert envs.summary == f"environments: 9 by {where}"
        envs.close()
    with pytest.raises(SystemExit):  # the flag would do nothing
        script.Envs(replace(args, env_id="CheetahRun-v1", async_envs=True), [1, 2])
    assert "--async-envs is for Gymnasium's environments; CheetahRun-v1 is EnvPool's" in capsys.readouterr().err


# Whole runs, in one process


@each_script
def test_log_has_whole_episodes_and_no_resets(train, monkeypatch, name):
    """Returns and lengths are those of the environment's episodes, which end in both ways; only its steps count."""
    script, ended = load(name), []
    log = script.Run.log
    monkeypatch.setattr(script.Run, "log", lambda run, metrics: (ended.extend(run.episodes), log(run, metrics))[1])
    env_id = "tiny_envs:DiscreteCount-v0" if name == "apex_dqn_ray" else "tiny_envs:Count-v0"
    run = train(name, env_id=env_id, envs_per_runner=1, learning_rate=0.0)
    assert run.steps()[-1] == len(tiny_envs.received) and {length for _, length in ended} == {3, 5}
    numbers = [(total - length * (length + 1) / 2) / (100 * length) for total, length in ended]
    assert numbers == list(range(len(numbers))) and [x % 2 for x in numbers] == [length == 5 for _, length in ended]


@each_script
def test_updates_in_the_log_are_those_made(train, name):
    run = train(name)
    assert run.lines[-1]["charts/updates"] == run.checkpoint["num_updates"] > 5
    if name == "apex_dqn_ray":
        held = [line["replay/transitions"] for line in run.lines]
        assert sorted(held) == held and held[-1] == min(run.checkpoint["args"]["buffer_size"], run.steps()[-1])


@each_script
def test_time_of_slow_environments_is_that_of_their_steps(train, name):
    settings = {"env_id": "tiny_envs:Fragile-v0", "env_kwargs": '{"path": "none"}', "total_timesteps": 200}
    line = train(name, **settings).lines[-1]
    assert line["time/env_step"] > 3 * line["time/inference"]


@pytest.mark.parametrize("twin", ["", "_torchcompile"])
@each_script
def test_resumed_run_begins_with_what_was_saved(train, monkeypatch, name, twin):
    """The first weights that act are those of the checkpoint, by their number; Adam goes on."""
    own = {"compile": False} if twin else {}
    script, sent, run = load(f"{name}{twin}"), [], train(f"{name}{twin}", **own)
    publish = script.OneRunner.publish
    monkeypatch.setattr(
        script.OneRunner, "publish", lambda runners, *x: (sent.append(deepcopy(x)), publish(runners, *x))[1]
    )
    longer = {"resume": str(run.run_dir), "device": "cpu", "total_timesteps": 2 * run.steps()[-1]}
    on = helpers.call(f"{name}{twin}", **longer, override=("learning_rate=0.0",))
    part = "network" if "network" in run.checkpoint else "agent"
    saved = torch.cat([x.reshape(-1) for x in run.checkpoint[part].values()]).numpy()
    assert sent[0][0] == run.checkpoint["num_updates"] and np.array_equal(sent[0][1], saved)
    assert all(torch.equal(x, on.checkpoint[part][key]) for key, x in run.checkpoint[part].items())
    before, after = (helpers.adam_steps(x.checkpoint["optimizer"]) for x in (run, on))
    assert after > before > 0


@pytest.mark.parametrize("event", ["nan_reward", "nan_obs", "raise"])
@each_script
def test_an_environment_that_breaks_leaves_a_checkpoint_of_the_last_update(train, monkeypatch, tmp_path, name, event):
    """In one process; over Ray, another runner takes its place."""
    monkeypatch.setattr(tiny_envs, "EVENT", f"{event}@137")
    with pytest.raises(SystemExit) as end:
        train(name, checkpoint_every=10**6)
    assert ("this environment broke" if event == "raise" else "NaN or infinite") in end.value.code
    run = helpers.outcome(tmp_path / "run0")
    assert 0 < run.checkpoint["global_step"] == run.steps()[-1] < len(tiny_envs.received)
    part = "network" if "network" in run.checkpoint else "agent"
    assert all(x.isfinite().all() for x in run.checkpoint[part].values())


@each_script
def test_numbers_of_info_are_in_the_log(train, name):
    run = train(name, env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "info"}')
    assert any(line.get("info/own") == 2 for line in run.lines)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compile"), [*((name, False) for name in RAY), ("impala_ray", True)])
def test_twin_learns_from_frames_what_its_eager_script_does(train, name, compile):
    settings = {"env_id": "Pong-v5", "envs_per_runner": 2, "total_timesteps": 32, "log_every": 8, "fragment_steps": 4}
    if name == "apex_dqn_ray":
        settings |= {"total_timesteps": 96, "learning_starts": 30, "buffer_size": 64}
    if name == "ppo_ray":
        settings = {key: x for key, x in settings.items() if hasattr(load(name).Args, key)} | {"num_steps": 4}
    run = train(name, **settings)
    with torch._inductor.config.patch(fallback_random=True):
        twin = train(f"{name}_torchcompile", compile=compile, **settings)
    assert_agree(without_times(twin), without_times(run), rel=1e-2 if compile else 1e-5)
    assert helpers.adam_steps(run.checkpoint["optimizer"]) >= 4 and run.checkpoint["optimizer"]["exp_avg"].any()


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_actions_may_be_a_matrix(train, name):
    """Each number within its own bounds."""
    train(name, env_id="tiny_envs:Matrix-v0")
    actions, space = np.stack(tiny_envs.received), tiny_envs.Matrix().action_space
    assert actions.shape[1:] == (2, 2) and all(map(space.contains, actions.astype(np.float32)))
    assert (np.ptp(actions, axis=0) > 0.1 * (space.high - space.low)).all()


# Over Ray, whole runs


@on_ray
@pytest.mark.parametrize("name", ["impala_ray_torchcompile", "ppo_ray_torchcompile", "apex_dqn_ray_torchcompile"])
def test_twin_learns_over_ray(train, name):
    """Its own loop and its own runners; what is compiled is compared with the eager script in one process."""
    run = train(name, num_runners=1, compile=False)
    assert run.checkpoint["num_updates"] > 5 and run.lines[-1]["runners/alive"] == 1
    assert all(np.isfinite(list(line.values())).all() for line in run.lines)


@on_ray
def test_a_global_of_the_environments_module_that_changes_ends_the_run(monkeypatch, tmp_path):
    """A curriculum, say: runners have a module of their own."""
    script, calls = load("impala_ray"), []
    monkeypatch.setattr(tiny_envs, "own_level", 1.0, raising=False)
    get_weights = script.get_weights

    def raise_level(module):
        calls.append(module)
        tiny_envs.own_level = float(len(calls) // 3)
        return get_weights(module)

    tiny_envs.own_level = 0.0
    monkeypatch.setattr(script, "get_weights", raise_level)
    settings = small_settings("impala_ray") | {"num_runners": 1, "run_dir": str(tmp_path / "run"), "device": "cpu"}
    with pytest.raises(SystemExit) as end:
        script.train(script.Args(**settings))
    assert len(calls) == 3 and "`tiny_envs.own_level` changed, but runners keep its first value" in str(end.value)


@on_ray
@pytest.mark.parametrize("name", [name for name in RAY if "num_runners" in load(name).CHANGEABLE])
def test_a_resumed_run_may_have_other_runners(train, capfd, name):
    run = train(name, num_runners=1)
    longer = {"resume": str(run.run_dir), "device": "cpu", "total_timesteps": 2 * run.steps()[-1]}
    on = helpers.call(name, **longer, override=("num_runners=2",))
    assert on.checkpoint["args"]["num_runners"] == 2 and on.steps()[-1] >= 2 * run.steps()[-1]
    # Not by the log: the second may start after the end of a run this short
    assert "environments of 2 runners, each: " in capfd.readouterr().err
