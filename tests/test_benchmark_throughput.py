"""./run.sh throughput with toy budgets, and its parts."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from benchmark_helpers import benchmark, benchmark_here, refusal, toy_flags

from benchmarks.common import processes, programs, results, runs, steady
from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import LIBRARIES, RLLIB_PYTHON, ROOT, SCRIPTS, clone_command, load_script
from benchmarks.common.results import provenance, write_json
from benchmarks.throughput import ceilings, peers, throughput

FLAGS = " ".join(["--log-every=50", "--learning-starts=100", "--total-timesteps=4000"])


@pytest.mark.alone
def test_throughput_from_end_to_end(tmp_path):
    """Two variants of DQN in two rounds; `lean` and not `compile`, to save the time to compile."""
    arguments = ["--scripts", "dqn", "--variants", "eager", "lean", "--rounds", 2, "--seconds", 0.3, "--window", 0.05]
    arguments += ["--whole-steps", 500, "--whole-rounds", 2]
    done = benchmark("throughput", *arguments, f"--flags={FLAGS}", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    name = "dqn_log_every_50_learning_starts_100_total_timesteps_4000.json"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {name, "throughput.md", "throughput.png"}
    result = json.loads((tmp_path / "out" / name).read_text())
    assert result["env_id"] == "CartPole-v1" and result["flags"] == FLAGS and result["published"] is None
    assert result["provenance"]["machine"]["cores"] >= 1
    for name in ("eager", "lean"):
        own = result["contestants"][name]
        assert own["failed"] == [] and len(own["rounds"]) == 2
        low, high = own["quartiles"]
        assert 100 < low <= own["steps_per_second"] <= high
        assert own["cold_seconds"] > 0 and own["warm_seconds"] > 0
        assert own["whole"]["steps"] == 500 and min(own["whole"]["rounds"]) > 0.5
        assert own["whole"]["seconds"] == sum(own["whole"]["rounds"]) / 2
        assert own["whole"]["steps_per_second"] < own["steps_per_second"]
        assert own["peak_resident_mb"] > 50 and own["cores_used"] > 0.1
        parts = result["ceilings"]["variants"][name]
        times = parts["microseconds_per_step"]
        assert list(times) == [*ceilings.SECTIONS]
        assert min(times["env"], times["learn"]) > 0 and min(times.values()) >= 0  # of some hundred samples
        # Two processes that learn at different times: the same unit is all that so short a run can show
        assert 1 / 10 < 1e6 / sum(times.values()) / own["steps_per_second"] < 10
    (ratio,) = result["ratios"]
    assert (ratio["of"], ratio["to"]) == ("lean", "eager") and 0.1 < ratio["ratio"] < 10
    assert ratio["interval"][0] <= ratio["ratio"] <= ratio["interval"][1]
    assert set(result["break_even_steps"]["lean"]) == {"cold", "warm"}
    text = (tmp_path / "out" / "throughput.md").read_text()
    assert text in done.stdout and "| eager |" in text and str(tmp_path) not in text


@pytest.mark.slow
def test_a_contestant_that_fails_is_shown_and_the_others_count(tmp_path, capsys):
    arguments = ["--scripts", "ppo", "--variants", "eager", "--rounds", 1, "--seconds", 0.1, "--window", 0.05]
    arguments += ["--no-ceilings", "--flags=--num-minibatches 7", "--out", tmp_path]
    done = benchmark_here(capsys, "throughput", *arguments)
    assert done.returncode == 1, done.stderr  # the first measurement, so it is kept
    assert "can't be divided into 7 equal minibatches" in done.stdout + done.stderr
    result = json.loads((tmp_path / "ppo_num_minibatches_7.json").read_text())
    assert result["contestants"]["eager"]["failed"] == ["exit code 2"]
    assert "| eager | failed |" in (tmp_path / "throughput.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ceilings": False}, "ceilings, which --no-ceilings would lack"),
        ({"rounds": 2}, "has 3 rounds, more than yours"),
        ({"seconds": 5.0}, "has 20 seconds, more than yours"),
        ({"flags": "--gamma=0.9"}, "has flags --gamma 0.9"),
    ],
)
def test_less_does_not_replace_more(tmp_path, capsys, change, message):
    known = {"contestants": {"eager": {}}, "flags": "--gamma 0.9", "rounds": 3, "ceilings": {}, "seconds": 20}
    known |= {"break_even_steps": {}, "provenance": provenance()}
    write_json(tmp_path / "ppo_gamma_0_9.json", known)
    options = throughput.Options(("ppo",), ("eager",), rounds=3, flags="--gamma 0.9", out=tmp_path)
    assert message in refusal(throughput.main, replace(options, **change), capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scripts": ("sarsa",)}, "no script sarsa; there are a3c_ray"),
        ({"rounds": 0}, "--rounds"),
        ({"seconds": 1.0}, "--seconds 1 is less than --window, which is 2 here"),
        ({"scripts": ("ppo_env_pool",), "peers": ("sb3",)}, "--peers sb3: it trains none of ppo_env_pool"),
        ({"scripts": ("ppo",), "peers": ("leanrl",)}, "--peers leanrl: it trains none of ppo"),
        ({"peers": ("leanrl", "sb3")}, "cleanrl and leanrl have a table of their own"),
        ({"scripts": ("dqn", "ppo_atari_envpool"), "peers": ("cleanrl",)}, "have no script like ppo_atari_envpool"),
        ({"peers": ("leanrl",), "whole_steps": 9}, "--whole-steps: leave it out"),
        ({"out": Path("/dev/null/x")}, "can't write"),
    ],
)
def test_bad_input(options, message, tmp_path, capsys):
    assert message in refusal(throughput.check, throughput.Options(**{"out": tmp_path, **options}), capsys)


def contestant(*rounds: list[float]) -> dict:
    keys = {"first_update_seconds": 10.0, "peak_resident_mb": 100.0, "cores_used": 1.0}
    return throughput.summarize([{"speeds": speeds, **keys} for speeds in rounds])


def test_ratios_and_break_even_of_synthetic_rounds():
    contestants = {"eager": contestant([100.0] * 5, [100.0] * 5), "compile": contestant([400.0] * 5, [400.0] * 5)}
    contestants["sb3"] = contestant([50.0] * 5, [50.0] * 5)
    contestants["compile"]["cold_seconds"] = 40.0
    result = throughput.compare(contestants)
    expected = {("eager", "sb3"): 2, ("compile", "sb3"): 8, ("compile", "eager"): 4}
    assert {(x["of"], x["to"]): x["ratio"] for x in result["ratios"]} == pytest.approx(expected)
    assert result["break_even_steps"]["compile"] == {"cold": pytest.approx(4000), "warm": 0}


def test_compiling_is_compared_with_an_eager_start_that_is_like_the_others():
    """The first one of all reads packages from the disk, which has nothing to do with an empty cache."""
    eager = throughput.summarize([round_of(100.0, start) for start in (26.0, 3.0, 3.0)])
    own = throughput.summarize([round_of(200.0, start) for start in (16.0, 5.0, 5.0)])
    assert throughput.compare({"eager": eager, "compile": own})["break_even_steps"]["compile"] == {
        "cold": pytest.approx((16 - 3) * 200),
        "warm": pytest.approx((5 - 3) * 200),
    }


def test_compiling_pays_by_the_gain_of_the_rounds():
    """As in the table, and not by medians of a machine that was slow in some rounds and fast in others."""
    eager, own = (contestant(*[[scale * x] * 5 for x in (10.0, 10.0, 30.0)]) for scale in (1, 2))
    eager["steps_per_second"], own["cold_seconds"] = 19.9, 40.0
    assert throughput.compare({"eager": eager, "compile": own})["break_even_steps"]["compile"]["cold"] == pytest.approx(
        steady.break_even(40.0, 20.0, np.median([x["first_update_seconds"] for x in eager["rounds"]]), 10.0)
    )


def test_what_the_device_does_is_shown(tmp_path):
    """As on a GPU, which there need not be here."""
    use = {"busy_fraction": 0.25, "busy_us_per_step": 100.0, "seconds": 0.1, "timeline": [0.2, 0.3]}
    use |= {"kernels_per_step": 30.5, "launches_per_step": 2.0, "graph_replays_per_step": 0.5, "copies_per_step": 3.0}
    result = {"script": "dqn", "env_id": "CartPole-v1", "flags": "", "rounds": 1, "window_seconds": 2.0}
    result |= {"contestants": {"eager": contestant([4000.0] * 5)}, "ratios": [], "break_even_steps": {}}
    result |= {"published": None, "provenance": results.provenance(), "differences": {"sb3": "one thing"}}
    result |= {"device_use": {"eager": use, "lean": {"failed": "crash"}}}
    (tmp_path / "dqn.json").write_text(json.dumps(result))
    (tmp_path / "dqn_flags.json").write_text(json.dumps(result | {"flags": "--num-envs 4"}))
    with mock.patch.object(throughput.device_use, "draw", wraps=throughput.device_use.draw) as draw:
        text = throughput.write_summary(tmp_path)
    assert list(draw.call_args.args[0]) == ["dqn", "dqn --num-envs 4"]
    assert "SB3 differs: one thing; changed to compute what ours does" in text
    assert "| `dqn` | eager | 25% | 40% | 100.0 | 30.50 | 2.00 | 0.50 | 3.00 |" in text
    assert "failed: crash" in text and (tmp_path / "device_use.png").stat().st_size > 1000


def test_the_loop_of_every_script_has_a_section_to_act_and_one_to_learn():
    for path in SCRIPTS.glob("*.py"):
        _, sections = ceilings.headings(load_script(path).train)
        known = [["policy", "learn", "learn"], ["policy", "policy", "learn"], ["policy", "learn"]]
        assert sections[:-1] in known and sections[-1] == "rest", path.name


# A script in small, which keeps what each part of its loop took: half in Python, half in a call that lets others run
TOY = """
import sys, time
class Args: pass
class Envs:
    def step(self): spend("env", 0.004)
class Run:
    def __init__(self, lines): self.lines = lines
    def log(self, step, metrics): self.lines.append(metrics)
taken, look = {}, lambda frame, part: None
def spend(part, seconds):
    start = time.perf_counter()
    while time.perf_counter() < start + seconds / 2: pass
    look(sys._getframe(), part)
    time.sleep(seconds / 2)
    taken[part] = taken.get(part, 0) + time.perf_counter() - start
def train(args):
    envs, run = Envs(), Run(args)
    look(sys._getframe(), "rest")
    for step in range(80):
        # Act, or do not
        spend("policy", 0.002)

        # Step the environment
        envs.step()
        spend("policy", 0.001)

        # Learn
        spend("learn", 0.008)

        # Log
        spend("rest", 0.003)
        run.log(step, {})
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    yield load_script(tmp_path / "toy.py")
    del sys.modules["toy"]


def test_each_place_of_the_loop_is_of_its_section(toy):
    sampler, seen = ceilings.Sampler(toy), []
    toy.look = lambda frame, part: seen.append((sampler.section_of(frame), part))
    toy.train([])
    assert len(seen) > 300 and all(section == part for section, part in seen)
    assert sampler.section_of(sys._getframe()) == "rest"  # outside of the loop


def test_a_sampler_that_broke_is_missed(toy):
    """In silence it would leave zeros in the log, and all time to the rest."""
    sampler = ceilings.Sampler(toy)
    assert sampler.take() == {f"profile/{section}": 0 for section in ("env", "policy", "learn", "rest")}
    sampler.thread = threading.Thread(target=int)
    sampler.thread.start()
    sampler.thread.join()
    with pytest.raises(RuntimeError, match="has ended"):
        sampler.take()


def test_stacks_are_not_read_until_all_is_compiled(monkeypatch):
    """While Dynamo evaluates a frame, that has ended the process."""
    lines, first = [], {"profile/env": 0.0, "profile/policy": 0.0, "profile/learn": 0.0}

    class Run:
        def log(self, metrics):
            lines.append(metrics)

    def train(_args):
        for metrics in ({}, {"losses/a": 1.0}, {"losses/a": 2.0}):
            was_watched.append(sampler.thread.is_alive())
            Run().log(metrics)
            time.sleep(0.05)

    was_watched, toy = [], SimpleNamespace(Run=Run, Args=dict, train=train)
    sampler = SimpleNamespace(thread=threading.Thread(target=time.sleep, args=(0.5,)), take=lambda: first)
    monkeypatch.setattr(ceilings, "Sampler", lambda _module: sampler)
    monkeypatch.setattr(ceilings.tyro, "cli", lambda _args, args: args)
    ceilings.train_watched(toy, [])
    assert was_watched == [False, False, True] and [line | first == line for line in lines] == [True] * 3


def test_the_sampler_sees_where_the_time_goes(toy):
    """In a thread of its own, which is watched; beside clocks within, which other work here stretches as well."""
    lines = []

    def train() -> None:
        sampler, log = ceilings.Sampler(toy), toy.Run.log
        toy.Run.log = lambda run, step, metrics: log(run, step, metrics | sampler.take())
        sampler.thread.start()
        toy.train(lines)

    thread, interval = threading.Thread(target=train), sys.getswitchinterval()
    thread.start()
    thread.join()
    sys.setswitchinterval(interval)
    seconds = {name: sum(line[f"profile/{name}"] for line in lines) for name in ("env", "policy", "learn")}
    assert len(lines) == 80 and seconds["env"] + seconds["policy"] + seconds["learn"] > 0.5
    total = sum(toy.taken.values())
    for name, value in seconds.items():
        assert value / total == pytest.approx(toy.taken[name] / total, abs=0.12)


@pytest.mark.slow
def test_the_sampler_sees_a_pool_of_workers(tmp_path):
    """Which has no `step`: sending actions and waiting for what comes back is the environments' time."""
    flags = ["--num-workers", 2, "--num-steps", 64, "--total-timesteps", 16_384]  # some 20 samples of the policy
    flags += ["--no-tensorboard", "--run-dir", tmp_path]
    done = benchmark("throughput.ceilings", "sections", SCRIPTS / "ppo_env_pool.py", *flags)
    assert done.returncode == 0, done.stderr
    lines, _ = runs.read_lines(tmp_path / "metrics.jsonl")
    assert len(lines) > 8
    assert all(sum(line[f"profile/{part}"] for line in lines) > 0 for part in ("env", "policy", "learn"))


@pytest.mark.slow
def test_environments_alone_are_those_of_all_runners(tmp_path):
    """Two processes step, and both their steps are counted; the second one ends with the first."""
    flags = ["--num-runners", 2, "--envs-per-runner", 4, "--total-timesteps", 300_000, "--run-dir", tmp_path]
    done = benchmark("throughput.ceilings", "env", SCRIPTS / "impala_ray.py", *flags)
    assert done.returncode == 0, done.stderr
    steps = [line["global_step"] for line in runs.read_lines(tmp_path / "metrics.jsonl")[0]]
    other = json.loads((tmp_path / "runner1" / "config.json").read_text())["args"]
    assert other["num_runners"] == 1 and other["envs_per_runner"] == 4
    assert steps and all(step % 2 == 0 for step in steps)
    time.sleep(1)
    before = (tmp_path / "runner1" / "metrics.jsonl").read_text()
    time.sleep(0.6)
    assert (tmp_path / "runner1" / "metrics.jsonl").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["ppo", "dqn", "sac_continuous_action", "td3_continuous_action", "ppo_atari_envpool"]
)
def test_peers_have_the_threads_and_the_precision_of_the_script(script, tmp_path):
    """What `auto` stands for on this machine, and whether denormal numbers are zero, as a run of the script says."""
    told = "print(torch.get_num_threads(), torch.get_float32_matmul_precision(), float(torch.tensor([1e-40]) * 1))"
    program = f"""
import sys, torch
from benchmarks.common.programs import SCRIPTS, environment_class, load_script
from benchmarks.throughput import peers
module = load_script(SCRIPTS / "{script}.py")
if sys.argv[1] == "peer":
    assert peers.set_up_torch(module, module.Args()) == torch.get_num_threads()
else:
    class Envs:
        def __init__(self, *_):
            {told}
            raise SystemExit
    setattr(module, environment_class(module).__name__, Envs)
    module.train(module.Args(run_dir=sys.argv[1]))
{told}
"""
    lines = []
    for word in ("peer", tmp_path / "run"):
        command = ["env", "--unset=OMP_NUM_THREADS", sys.executable, "-c", program, word]  # a script would obey it
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        lines.append(run.stdout.splitlines()[-1] if run.stdout else run.stderr)
    assert lines[0] == lines[1]
    threads, precision, denormal = lines[0].split()
    cores = load_script(SCRIPTS / f"{script}.py").num_cores()
    most = {"ppo": 1, "dqn": 1, "sac_continuous_action": 4, "td3_continuous_action": 4}.get(script, cores)
    assert int(threads) == min(most, cores)
    assert precision in ("highest", "high", "medium") and (float(denormal) == 0) == (script != "ppo")


@pytest.mark.slow
def test_the_environment_alone_is_stepped_without_a_pause():
    """Of games in two pools: all are sent the actions in turn, and end as they do together."""
    module = load_script(SCRIPTS / "ppo_atari_envpool.py")
    actions, seen = [np.arange(i, i + 4) % 4 for i in range(7)], []
    for async_envs in (True, False):
        envs = module.Envs(module.Args(async_envs=async_envs), [1, 2, 3, 4])
        seen.append(np.stack(list(islice(ceilings.rounds(envs, actions), 300))))
    assert seen[0].any() and (seen[0] == seen[1]).all()


@pytest.mark.alone
@pytest.mark.parametrize("learns", [True, False])
def test_no_program_that_learns_is_steady_before_its_first_update(tmp_path, learns):
    """It acts at random for a second, at a speed that is of no interest."""
    code = (
        "import json, time; start = time.perf_counter()\n"
        "for i in range(1000):\n"
        "    time.sleep(0.02); seconds = time.perf_counter() - start\n"
        "    row = {'global_step': 10 * i, 'seconds': seconds} | ({'losses/x': 1} if seconds > 1 else {})\n"
        "    print(json.dumps(row), flush=True)"
    )
    log = tmp_path / "metrics.jsonl"
    child = processes.start([sys.executable, "-c", code], log)
    learnt = throughput.follow(child, log, throughput.Options(seconds=0.3), learns)
    child.kill()
    lines, _ = runs.read_lines(log)
    assert (learnt is not None and learnt > 1 and lines[-1]["seconds"] > 1.3) if learns else learnt is None


def peer_model(peer: str, script: str, **settings):
    """A peer's model for a script at small sizes, and the script's settings."""
    if importlib.util.find_spec(LIBRARIES[peer]) is None:
        pytest.skip(f"{peer} is not installed")
    module = load_script(SCRIPTS / f"{script}.py")
    task = {"env_id": "CartPole-v1" if script == "dqn" else "Pendulum-v1", "buffer_size": 1000}
    args = module.Args(**task, **settings)
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_"):  # which `make_model` may replace for all of a process
        return peers.make_model(peer, TABLE[script].peers, args, peers.make_envs(module, args, normalize=False)), args


def test_sac_of_sb3_has_the_learning_rates_of_the_script():
    model, args = peer_model("sb3", "sac_continuous_action")
    model.learn(args.total_timesteps, callback=lambda *_: model.num_timesteps < 20)
    model.train(gradient_steps=1, batch_size=4)
    optimizers = (model.actor.optimizer, model.critic.optimizer, model.ent_coef_optimizer)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    assert rates == [args.policy_lr, args.q_lr, args.q_lr] and args.policy_lr != args.q_lr


@pytest.mark.slow
def test_an_atari_game_of_the_peers_goes_on_after_a_lost_life():
    """As in the script, a life is an episode for the learner, and the score is that of all five lives of a game."""
    if importlib.util.find_spec("stable_baselines3") is None:
        pytest.skip("sb3 is not installed")
    module = load_script(SCRIPTS / "ppo_atari_envpool.py")
    envs = peers.make_envs(module, module.Args(num_envs=2), normalize=False)
    envs.reset()
    rng, lives, games = np.random.default_rng(1), 0, []
    for _ in range(800):
        obs, _, done, infos = envs.step(rng.integers(4, size=2))
        lives += done.sum()
        games += [info["episode"] for info in infos if "episode" in info]
        for i in np.flatnonzero(done):
            assert (obs[i] != infos[i]["terminal_observation"]).any()  # the first observation of what comes next
    assert len(games) > 3 and 5 * len(games) <= lives < 5 * (len(games) + 2)
    assert min(game["l"] for game in games) > 100


def test_what_differs_from_a_peer_is_said():
    """By the script or by its algorithm; also in a table of results from before it was known."""
    for script in ("impala_ray", "ppo_ray", "apex_dqn_ray"):
        assert "rllib" in peers.differences(script, ["eager", "rllib"])
    assert list(peers.differences("sac_continuous_action", ["sb3", "eager"])) == ["sb3"]
    old = {"script": "ppo_ray", "contestants": {"rllib": {}, "eager": {}}, "differences": {}}
    assert throughput.all_differences(old) == peers.differences("ppo_ray", ["rllib"])


@pytest.mark.slow
def test_dqn_of_the_peers_has_the_loss_and_the_layers_of_the_script():
    model, _ = peer_model("sb3", "dqn")
    from stable_baselines3.dqn import dqn

    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.full((1,), 9.0)
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_"):
        peers.equalize_sb3("dqn")
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad == 9  # the script clips nothing
    assert dqn.F.smooth_l1_loss(torch.zeros(2), torch.full((2,), 10.0)) == 100  # Huber's would be 9.5
    model, _ = peer_model("sbx", "dqn")
    layers = model.policy.qf_state.params["params"].values()
    assert [layer["kernel"].shape for layer in layers] == [(4, 120), (120, 84), (84, 2)]


def test_peers_learn_as_often_and_in_the_same_environment_as_the_script(capsys):
    """DQN: updates for all environments; the constructor's arguments; and no flag that a library lacks."""
    settings = {"num_envs": 3, "sync_envs": True, "env_kwargs": '{"sutton_barto_reward": true}'}
    model, _ = peer_model("sb3", "dqn", **settings)
    assert (model.train_freq.frequency, model.gradient_steps, model.n_envs) == (10, 3, 3)
    assert model.env.envs[0].unwrapped._sutton_barto_reward
    with pytest.raises(SystemExit):
        peer_model("sb3", "dqn", double_dqn=True)
    assert "no double DQN" in capsys.readouterr().err


def test_rllib_refuses_flags_that_it_would_ignore():
    if not RLLIB_PYTHON.exists():
        pytest.skip(f"no {RLLIB_PYTHON}")
    arguments = [str(RLLIB_PYTHON), "benchmarks/throughput/peer_rllib.py", "impala_ray", "--log-every=5"]
    run = subprocess.run([*arguments, "--env-kwargs", "{}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and "RLlib is not told of --env-kwargs" in run.stderr and "--log-every" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("report", "flag"),
    [
        ("wandb.log({})", "--compile"),
        ("SummaryWriter('runs').add_scalar('losses/td_loss', 1.0, 2)", ""),
    ],
)
def test_cleanrl_and_leanrl_get_our_flags_under_their_names(report, flag, tmp_path):
    """And their log counts environment steps; their speed beside ours goes into a file and a table of their own."""
    script, folder = tmp_path / "dqn_torchcompile.py", tmp_path / "run"
    script.write_text(
        "import os, sys, time\nimport gymnasium as gym, wandb\nfrom torch.utils.tensorboard import SummaryWriter\n"
        "envs = gym.vector.SyncVectorEnv([lambda: gym.make('CartPole-v1')] * 3)\nenvs.reset()\nfor _ in range(2):\n"
        f"    time.sleep(0.06)\n    envs.step(envs.action_space.sample())\n    {report}\n"
        "print(os.environ['OMP_NUM_THREADS'], *sys.argv[1:])\n"
    )
    flags = ["--seed=3", "--no-tensorboard", "--epsilon-start=0.05", "--log-every=1", "--run-dir", str(folder)]
    program = [*clone_command(sys.executable, script, "dqn", *[flag] * bool(flag)), *flags]
    run = subprocess.run(program, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "7"})
    passed = ["1", "--env-id=CartPole-v1", *[flag] * bool(flag), "--seed=3", "--start-e=0.05"]
    assert run.stdout.split() == passed
    lines = runs.read_run(folder).lines
    assert [line["global_step"] for line in lines] == [3, 6]
    assert ["losses/reported" in line for line in lines] == [False, True]


@pytest.mark.parametrize("has_cuda", [False, True])
def test_leanrl_has_cuda_graphs_where_ours_have(has_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert ("--cudagraphs" in programs.command("dqn", "leanrl")) == has_cuda
    assert "--cudagraphs" not in programs.command("dqn", "cleanrl") and "--compile" in programs.command("dqn", "leanrl")


def test_cleanrl_without_its_environment_or_its_clone_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(programs, "CLEANRL_PYTHON", tmp_path / "none")
    assert "make that environment with requirements/requirements-cleanrl.txt" in refusal(
        programs.check_installed, ("cleanrl",), capsys
    )
    monkeypatch.setattr(programs, "CLEANRL_PYTHON", Path(sys.executable))
    monkeypatch.setitem(programs.CLONES, "leanrl", (tmp_path / "none", "", ()))
    assert "requirements-cleanrl.txt says how to get it" in refusal(programs.check_installed, ("leanrl",), capsys)


def test_many_flags_give_a_file_name_that_file_systems_take():
    names = [
        throughput.file_name("dqn", throughput.Options(flags=f"{'--buffer-size 1000 ' * 20}--seed {i}")) for i in "12"
    ]
    assert names[0] != names[1] and all(len(name) < 200 and name.startswith("dqn_buffer_size_1000") for name in names)


def test_cleanrl_and_leanrl_have_a_table_of_their_own():
    result = {"script": "dqn", "contestants": {"eager": {}, "leanrl": {}}}
    assert throughput.peer_columns(result) == ("cleanrl", "leanrl") and "leanrl" in peers.differences("dqn", ["leanrl"])
    assert throughput.file_name("dqn", throughput.Options(peers=("leanrl",))) == "dqn_beside_cleanrl"
    assert throughput.file_name("dqn", throughput.Options(peers=("sb3",))) == "dqn"
    assert throughput.file_name("ppo", throughput.Options(peers=("leanrl",))) == "ppo"  # which LeanRL does not have


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["sb3", "sbx"])
def test_peers_write_the_log_of_a_script(peer, tmp_path):
    if importlib.util.find_spec(LIBRARIES[peer]) is None:
        pytest.skip(f"{peer} is not installed")
    done = benchmark("throughput.peers", peer, "ppo", *toy_flags("ppo"), f"--run-dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["global_step"] == 128 and lines[0]["losses/updates"] == 2
    assert sum(line.get("charts/episodes", 0) for line in lines) > 3
    assert all(np.diff([line["seconds"] for line in lines]) > 0)
    assert json.loads((tmp_path / "config.json").read_text())["peer"] == peer


def test_a_child_that_ignores_signals_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    program = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    child = processes.start(["python3", "-c", program], tmp_path / "output")
    while "up" not in child.last_lines():
        assert child.poll() is None
    assert child.stop() == -9
    assert child.resources()["peak_resident_mb"] > 1


def test_memory_of_a_child_is_its_own(tmp_path):
    """By `ru_maxrss`, a child has at least the memory that its parent had when it started it."""
    ballast = np.ones(500 * 2**17)
    child = processes.start(["python3", "-c", "x = bytearray(50 * 2**20); input()"], tmp_path / "output")
    assert child.wait(30) is not None and ballast.sum() > 0
    assert 1 < child.resources()["peak_resident_mb"] < 200


def round_of(speed: float, start: float | None, **more) -> dict:
    return {"speeds": [speed] * 3, "first_update_seconds": start, "peak_resident_mb": 1.0, "cores_used": 1.0, **more}


def test_a_round_that_failed_counts_nowhere():
    """Even if it was steady for a while; the first round is the one with an empty cache."""
    bad = round_of(900.0, 99.0, failed="exit code 1")
    own = throughput.summarize([round_of(100.0, 40.0), bad, round_of(200.0, 10.0), round_of(200.0, 12.0)])
    assert own["steps_per_second"] == 200 and own["windows"] == 9 and own["failed"] == ["exit code 1"]
    assert (own["cold_seconds"], own["warm_seconds"]) == (40, 11)
    own = throughput.summarize([bad, round_of(100.0, 40.0), round_of(100.0, 10.0)])  # 40 s are neither, or cold
    assert (own["cold_seconds"], own["warm_seconds"], own["steps_per_second"]) == (None, 10, 100)
    base = throughput.summarize([round_of(10.0, 1.0), round_of(50.0, 1.0), round_of(50.0, 1.0)])
    found = throughput.ratio({"compile": own, "eager": base}, "compile", "eager")
    assert (found["ratio"], found["interval"]) == (pytest.approx(2), pytest.approx([2, 2]))
    base = throughput.summarize([round_of(50.0, 1.0), bad, bad])  # no round in which both went well
    found = throughput.ratio({"compile": own, "eager": base}, "compile", "eager")
    assert (found["ratio"], found["interval"]) == (pytest.approx(2), None)


@pytest.mark.parametrize(("interval", "shown"), [([0.9, 1.2], "open"), ([1.1, 1.3], "4,000 / never"), (None, "open")])
def test_whether_compiling_pays_is_open_where_it_may_not_be_faster(interval, shown):
    own = {"steps_per_second": 1.0, "quartiles": [1.0, 1.0], "cold_seconds": 1.0, "warm_seconds": None}
    own |= {"peak_resident_mb": 1.0, "cores_used": 1.0}
    ratios = [{"of": "compile", "to": "eager", "ratio": 1.2, "interval": interval}]
    result = {"script": "ppo", "contestants": {"compile": own}, "ratios": ratios}
    result["break_even_steps"] = {"compile": {"cold": 4000.0, "warm": None}}
    assert shown in throughput.contestant_cells(result, "compile")


def test_programs_start_in_the_folder_of_the_user(tmp_path, monkeypatch):
    """So that paths in flags are theirs; nothing that lies there hides a module of this repository."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "copy.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    child = processes.start([*programs.AS_MODULE, "benchmarks.throughput.ceilings"], tmp_path / "output")
    assert child.wait(60) == 2 and "name what to measure" in child.last_lines()
    (tmp_path / "mine.py").touch()  # it may register an environment
    child = processes.start([*programs.AS_MODULE[:2], "-c", "import benchmarks, mine, copy"], tmp_path / "output")
    assert child.wait(60) == 0
    child = processes.start(["pwd"], tmp_path / "output")
    assert child.wait(60) == 0 and child.last_lines() == str(tmp_path)


def test_when_compiling_pays_says_after_which_start():
    """If the first round has failed, it is not known for an empty cache."""
    contestants = {"eager": throughput.summarize([round_of(100.0, 1.0)] * 3)}
    contestants["lean"] = throughput.summarize([{"failed": "x", "speeds": []}] + [round_of(200.0, 9.0)] * 2)
    result = {"script": "ppo", "contestants": contestants, **throughput.compare(contestants)}
    cells = throughput.contestant_cells(result, "lean")
    assert "- / 9.0" in cells and "- / 1,600" in cells
