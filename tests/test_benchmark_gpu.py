"""./run.sh gpu: a dry run, and its parts."""

import copy
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from benchmark_helpers import benchmark, benchmark_here, refusal

from benchmarks import gpu
from benchmarks.common import processes, results, turns
from benchmarks.common.programs import SCRIPTS, VARIANTS, endless_flags, load_script, pairs
from benchmarks.throughput import device_use, gpu_speed, parity

FILES = {
    "correctness": {"correctness.md", "parity.json", "tests.json"},
    "speed": {"speed.md", "speed.json", "speed.png"},
    "more": {"more.md", "inference.json", "inference.png", "rollout.json", "device_use.json", "device_use.png"},
}


JSON = {"parity.json", "tests.json", "speed.json", "inference.json", "rollout.json", "device_use.json"}  # one a part


@pytest.fixture
def dry_run(tmp_path, capsys):
    """A stage run at toy size: name -> what it left, by file, and its Markdown."""

    def run(stage: str, is_program: bool = False) -> tuple[dict, str]:
        words = ["gpu", stage, tmp_path / "out", "--dry-run"]
        done = benchmark(*words) if is_program else benchmark_here(capsys, *words)
        assert done.returncode == 0, done.stderr
        text = (tmp_path / "out" / f"{stage}.md").read_text()
        assert {path.name for path in (tmp_path / "out").iterdir()} == FILES[stage] and len(FILES[stage]) <= 8, text
        assert "dry run" in text and "/tmp" not in text and text.count("| done, ") == len(FILES[stage] & JSON), text
        return {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}, text

    return run


@pytest.mark.slow
def test_dry_run_of_correctness(dry_run):
    """As a program, the other stages in this process."""
    results, text = dry_run("correctness", is_program=True)
    own = results["parity"]["results"]["dqn"]["lean"]
    assert own["equal"] and own["weights"] == 0  # the twins are alike
    assert "| `dqn` | yes (0e+00) |" in text
    assert set(results["tests"]["results"].values()) <= {"SKIPPED", "PASSED"} and results["tests"]["results"]
    assert results["tests"]["provenance"]["machine"]["cores"] > 0


@pytest.mark.slow
def test_dry_run_of_speed(dry_run):
    results, _ = dry_run("speed")
    (result,) = results["speed"]
    for own in result["contestants"].values():
        assert "failed" not in own and own["steps_per_second"] > 100 and len(own["rounds"]) == 2
    assert [x["of"] for x in result["ratios"]] == ["lean"]


@pytest.mark.slow
def test_dry_run_of_more(dry_run):
    results, _ = dry_run("more")
    inference, other = results["inference"]
    assert (inference["network"], other["network"]) == ("dqn", "rllib_cnn") and "speedup" in inference["cells"][0]
    (row,) = results["rollout"]["rows"]
    assert row["actor"] == "off" and row["steps_per_second"] > 100
    use = results["device_use"]["results"]["dqn"]["eager"]
    assert 0 < use["busy_fraction"] < 1 and use["kernels_per_step"] > 1 and len(use["timeline"]) > 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_it_says_so(tmp_path, capsys):
    assert "no CUDA device" in refusal(gpu.check, gpu.Options("speed", tmp_path / "out"), capsys)
    assert not (tmp_path / "out").exists()


def test_bad_input(tmp_path, capsys):
    (tmp_path / "speed.md").touch()
    others = tmp_path / "others"
    others.mkdir()
    (others / "rollout.json").touch()  # of `./run.sh rollout --out`
    for options, message in (
        ({"out": tmp_path}, "holds results of this stage"),
        ({"stage": "more", "out": others}, "holds results of this stage"),
        ({"out": tmp_path / "new", "cache": tmp_path / "a b"}, "does not quote a folder with a space"),
        ({"out": Path("/dev/null/x")}, "can't write"),
        ({"out": tmp_path / "new", "scripts": ("sarsa",)}, "no script sarsa"),
        ({"out": tmp_path / "new", "parts": ("rollout",)}, "no part rollout"),
        ({"out": tmp_path / "new", "variants": ("sb3",)}, "no variant sb3"),
        ({"out": tmp_path / "new", "time_limit": 0}, "--time-limit"),
        ({"out": tmp_path / "new", "memory_gib": 0}, "--memory-gib"),
        ({"out": tmp_path / "new", "leanrl": tmp_path / "none"}, "--leanrl: there is no folder"),
    ):
        assert message in refusal(gpu.check, gpu.Options(**{"stage": "speed", "dry_run": True} | options), capsys)


def test_as_many_at_a_time_as_memory_is_enough_for(monkeypatch):
    monkeypatch.setenv("MEMORY_GIB", "10")
    assert processes.free_slots(3 * 2**30) == 3 and processes.free_slots(100 * 2**30) == 1
    monkeypatch.delenv("MEMORY_GIB")
    assert processes.free_slots(2**60) == 1 and processes.free_slots(2**20) > 10


def test_the_most_important_pairs_come_first(tmp_path):
    scripts = gpu.check(gpu.Options("more", tmp_path, tuple(pairs()), dry_run=True))
    assert sorted(scripts) == pairs() and scripts[:2] == ["ppo_continuous_action", "sac_continuous_action"]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SystemExit("out of memory")])
def test_a_part_that_fails_leaves_the_others_alone(tmp_path, monkeypatch, capsys, error):
    def crash(_task) -> None:
        raise error

    parts = {"speed": (crash, 0.5), "rollout": (lambda _task: None, 1.0)}
    monkeypatch.setattr(gpu, "STAGES", {"speed": parts})
    assert gpu.main(gpu.Options("speed", tmp_path / "out", dry_run=True)) == 1
    text = capsys.readouterr().out
    assert f"| speed | failed: {type(error).__name__}: out of memory, 0 s |" in text
    assert "| rollout | done, 0 s |" in text and text.startswith((tmp_path / "out" / "speed.md").read_text())


def test_some_parts_and_variants_alone(tmp_path, monkeypatch):
    """The plan stays as it is; parts run in the order in which they are named."""
    ran = []
    parts = {name: (lambda task, name=name: ran.append((name, task.plan.variants)), 1.0) for name in ("a", "b", "c")}
    monkeypatch.setattr(gpu, "STAGES", {"speed": parts})
    options = {"parts": ("c", "a"), "variants": ("compile",), "scripts": ("dqn",)}
    assert gpu.main(gpu.Options("speed", tmp_path / "out", **options, dry_run=True)) == 0
    assert ran == [("c", ("compile",)), ("a", ("compile",))] and gpu.TOY.variants == ("eager", "lean")


def test_a_file_is_whole_at_any_moment(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    results.write_whole(path, "the first")

    def cut_off(*_arguments) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        results.write_whole(path, "the second, which is longer")
    assert path.read_text() == "the first"


# A program that writes a line of ten steps each 20 ms, as soon as it is ready; which may be never
LOGS = """
import json, os, sys, time
file, late, total = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
time.sleep(late)
os.makedirs(os.path.dirname(file))
log, start = open(file, "w", buffering=1), time.perf_counter()
for i in range(total):
    time.sleep(0.02)
    print(json.dumps({"global_step": 10 * i, "seconds": time.perf_counter() - start, "losses/x": 1}), file=log)
"""


def contestant(folder: Path, late: float = 0.0, total: int = 10**6, window: float = 0.4) -> gpu_speed.Contestant:
    log = folder / "run" / "metrics.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-c", LOGS, str(log), str(late), str(total)]
    return gpu_speed.Contestant(program, folder / "output", log=log, window=window, warm=0.0)


@pytest.mark.alone
def test_speed_of_a_contestant_that_is_frozen_in_between(tmp_path):
    """Asleep it writes no line, and its sleep is in no window."""
    one = contestant(tmp_path)
    turns.prepare([one], 1, 20.0, time.perf_counter() + 20)
    assert one.child.is_frozen() and one.error is None
    known = len(one.lines())
    time.sleep(0.5)
    assert len(one.lines()) == known
    for _ in range(2):
        one.take_turn(10.0)
        time.sleep(0.3)
    one.child.kill()
    assert len(one.rounds) == 2
    assert 250 < one.result()["steps_per_second"] < 550  # of 500 at most; with its sleep it would be 200


@pytest.mark.slow
def test_only_one_contestant_is_awake(tmp_path):
    """Of those that are measured: the others write nothing meanwhile."""
    contestants = [contestant(tmp_path / str(i)) for i in range(3)]
    lengths = []
    turns.take_turns(
        contestants, 3, 20.0, 30.0, lambda _: lengths.append([len(x.lines()) for x in contestants]), rounds=2
    )
    changed = [{i for i in range(3) if after[i] > before[i]} for before, after in itertools.pairwise(lengths)]
    assert changed == [{1}, {2}, {2}, {1}, {0}]  # forwards, then backwards


@pytest.mark.alone
def test_what_was_measured_until_the_time_is_up_is_kept_and_published(tmp_path, monkeypatch, capsys):
    """One pair is well, of one a contestant gets ready too late and one ends, the last one's turn never comes."""
    pairs_of = {
        "ppo": {"eager": 0.0, "lean": 0.0},
        "dqn": {"eager": 0.0, "lean": 60.0, "compile": 0.0},
        "td3_continuous_action": {"eager": 60.0, "lean": 60.0},
    }
    published = []

    def contestants_of(task, script: str) -> dict:
        found = {name: contestant(task.work / f"{script}.{name}", late) for name, late in pairs_of[script].items()}
        if "compile" in found:
            found["compile"] = contestant(task.work / "ends", total=30)
        return found

    write = gpu.Report.write

    def watched(report, *arguments) -> None:
        write(report, *arguments)
        published.append(report.path.read_text())

    monkeypatch.setattr(gpu, "contestants_of", contestants_of)
    monkeypatch.setattr(gpu.Report, "write", watched)
    monkeypatch.setattr(gpu, "FIRST", tuple(pairs_of))
    monkeypatch.setattr(gpu_speed, "PUBLISHED_EVERY", 2.0)
    start = time.perf_counter()
    gpu.main(gpu.Options("speed", tmp_path / "out", tuple(pairs_of), time_limit=30.0, dry_run=True))
    assert time.perf_counter() - start < 50
    results = {x["script"]: x["contestants"] for x in json.loads((tmp_path / "out" / "speed.json").read_text())}
    # Of 500 at most, less on busy cores
    assert all(50 < own["steps_per_second"] < 550 and len(own["rounds"]) > 0 for own in results["ppo"].values())
    assert 50 < results["dqn"]["eager"]["steps_per_second"] < 550
    assert results["dqn"]["lean"]["failed"].startswith("not ready after ")
    assert results["dqn"]["compile"]["failed"] == "ended by itself"
    assert all("not ready after" in own["failed"] for own in results["td3_continuous_action"].values())
    text = (tmp_path / "out" / "speed.md").read_text()
    assert text in capsys.readouterr().out and "| speed | done, " in text and "| failed: not ready after " in text
    # A kill at any moment would have left what was there: the first speeds while others were still to come
    row = r"CartPole-v1 \| %s \| \d"
    first = next(x for x in published if re.search(row % "eager", x))
    assert not re.search(row % "compile script, uncompiled", first) and (tmp_path / "out" / "speed.png").exists()


@pytest.mark.alone
def test_a_contestant_that_crashes_is_a_row(tmp_path):
    one = turns.Contestant([sys.executable, "-c", "raise SystemExit('error: no memory')"], tmp_path / "output")
    crashed = gpu_speed.Contestant(one.command, one.output, log=tmp_path / "none")
    results = []
    gpu_speed.measure({"ppo": {"eager": crashed}}, "cpu", 2, 10.0, results.append)
    (own,) = results[-1]
    assert "no memory" in own["contestants"]["eager"]["failed"]
    assert "| failed: error: no memory | - |" in "\n".join(gpu.speed_lines(results[-1]))


@pytest.mark.slow
def test_pairs_are_compared_until_the_time_is_up(tmp_path, monkeypatch):
    """One pair's process writes a variant and then another one, one crashes, one hangs."""
    code = {
        "writes": "write({'lean': {'equal': True}}); write({'lean': {'equal': True}, 'compile': {'equal': False}})",
        "crashes": "write({'lean': {'equal': True}}); raise SystemExit('error: CUDA is out of luck')",
        "hangs": "time.sleep(60)",
    }
    begin = "import json, sys, time; write = lambda x: (time.sleep(0.5), open(sys.argv[1], 'w').write(json.dumps(x)))\n"
    start = processes.start

    def start_code(command, output, **_):
        script, result = command[command.index(parity.__name__) + 1 :][:2]
        return start([sys.executable, "-c", begin + code[script], result], output)

    monkeypatch.setattr(processes, "start", start_code)
    seen, folders = [], (tmp_path, tmp_path / "cache")
    parity.compare_all(list(code), ("lean", "compile"), [], 6.0, *folders, lambda x: seen.append(copy.deepcopy(x)))
    assert seen[0]["hangs"] == {} and len(seen) >= 3
    assert seen[-1]["writes"] == {"lean": {"equal": True}, "compile": {"equal": False}}
    assert (
        seen[-1]["crashes"]["compile"]["failed"] == "error: CUDA is out of luck"
        and seen[-1]["crashes"]["lean"]["equal"]
    )
    assert seen[-1]["hangs"]["lean"]["failed"] == "no time left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "seconds", "why"),
    [
        ("pass", 60, None),
        ("assert False", 60, "not all tests passed"),
        ("__import__('time').sleep(60)", 6, "no time was left for all tests; none has ended"),
        (None, 60, "pytest ended with exit code 4; none has ended"),
    ],
)
def test_tests_are_done_only_if_all_have_passed(tmp_path, monkeypatch, body, seconds, why):
    file = tmp_path / "test_one.py"
    if body is not None:
        file.write_text(f"def test_one():\n    {body}\n")
    (tmp_path / "out").mkdir()
    report = gpu.Report(tmp_path / "out", "correctness", is_dry_run=True)
    plan = SimpleNamespace(tests=(str(file),))
    task = SimpleNamespace(plan=plan, report=report, work=tmp_path, deadline=time.perf_counter() + seconds)
    monkeypatch.setattr(gpu, "compare_pairs", lambda _task: None)
    gpu.run_part("tests", gpu.run_tests, task)
    assert report.status["tests"].partition(",")[0] == "done" if why is None else why in report.status["tests"]


def test_outcomes_of_tests_are_kept_if_the_stage_is_stopped(tmp_path, monkeypatch):
    """As by Ctrl-C while pairs are compared."""
    (file := tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "out").mkdir()
    report, start = gpu.Report(tmp_path / "out", "correctness", is_dry_run=True), time.perf_counter()
    plan = SimpleNamespace(tests=(str(file),))
    task = SimpleNamespace(plan=plan, report=report, work=tmp_path, deadline=start + 60)

    def stop(task):
        while "1 passed" not in (task.work / "output").read_text() and time.perf_counter() < task.deadline:
            time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "compare_pairs", stop)
    monkeypatch.setattr(gpu, "read_tests", lambda output: {"one": "PASSED"} if "1 passed" in output else {})
    with pytest.raises(KeyboardInterrupt):
        gpu.run_tests(task)
    assert report.status["tests"].startswith("1 passed")


def test_outcomes_of_tests_are_read_from_half_an_output():
    lines = ["tests/test_a.py::test_x[cuda-True] PASSED [ 3%]", "tests/test_a.py::test_y SKIPPED (no CUDA)", "tests/te"]
    expected = {"tests/test_a.py::test_x[cuda-True]": "PASSED", "tests/test_a.py::test_y": "SKIPPED"}
    assert gpu.read_tests("\n".join(lines)) == expected
    lines = ["[gw0] [  3%] PASSED tests/test_a.py::test_x[cuda-True] ", "[gw11] [100%] SKIPPED tests/test_a.py::test_y"]
    assert gpu.read_tests("\n".join([*lines, "tests/test_a.py::test_z ", "[gw1] [ 4%] PAS"])) == expected


@pytest.mark.parametrize("line", ["collected 84 items", "created: 4/4 workers", "4 workers [84 items]"])
def test_tests_without_an_outcome_are_counted(line):
    """By what `pytest -v` says before it begins, alone or in several processes."""
    assert gpu.tests_left(f"platform linux\n{line}\n", 80) == (4 if "84" in line else 0)


# As LeanRL's scripts are: they step a vector environment, and report to Weights & Biases once they have compiled
LEANRL = """
import sys
import gymnasium as gym
import numpy as np
import wandb
assert "--compile" in sys.argv and "--cudagraphs" in sys.argv and "--learning-starts=1000" in sys.argv
wandb.init(project="x", config={})
envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)
envs.reset()
for step in range(10**9):
    envs.step(np.zeros(2, dtype=int))
    if step % 100 == 99 and step > 1000:
        wandb.log({"speed": 1.0}, step=step)
"""


@pytest.mark.slow
def test_leanrl_is_measured_beside_ours(tmp_path):
    (tmp_path / "lean" / "leanrl").mkdir(parents=True)
    (tmp_path / "lean" / "leanrl" / "dqn_torchcompile.py").write_text(LEANRL)
    task = gpu.Task(gpu.TOY, ["dqn"], tmp_path / "lean", tmp_path, tmp_path / "cache", None, time.perf_counter() + 30)
    assert "leanrl" not in gpu.contestants_of(task, "ppo")
    one = gpu.contestants_of(task, "dqn")["leanrl"]
    assert one.command[-4:].count("--log-every=1") == 1  # the last one counts: a turn of a slow script needs lines
    results = []
    gpu_speed.measure({"dqn": {"leanrl": one}}, "cpu", 1, 30.0, results.append)
    own = results[-1][0]["contestants"]["leanrl"]
    assert "failed" not in own and own["steps_per_second"] > 1000
    lines = one.lines()
    assert "losses/reported" not in lines[0] and "losses/reported" in lines[-1]


def test_the_error_is_named_and_not_the_advice_after_it(tmp_path):
    for code, expected in (
        ("print('RuntimeError: out of memory\\nCompile with DSA'); raise SystemExit(1)", "RuntimeError: out of memory"),
        ("print('strange'); raise SystemExit(3)", "strange"),
        ("raise SystemExit(3)", "exit code 3"),
    ):
        child = processes.start([sys.executable, "-c", code], tmp_path / "output")
        child.wait(20)
        assert turns.end_of(child) == expected


def test_busy_fractions():
    starts, ends = np.array([1.0, 0.0, 0.5, 3.5]), np.array([2.0, 1.0, 0.75, 9.0])
    fractions = device_use.busy_fractions(starts, ends, 0.0, 4.0, 4)
    assert fractions == pytest.approx([1, 1, 0, 0.5])
    rng = np.random.default_rng(0)
    starts = rng.random(200) * 10
    ends = starts + rng.random(200) * 0.05
    grid = np.linspace(0, 10, 200_001)[:-1] + 2.5e-5
    covered = ((grid[:, None] >= starts) & (grid[:, None] < ends)).any(1)
    expected = covered.reshape(5, -1).mean(1)
    assert device_use.busy_fractions(starts, ends, 0.0, 10.0, 5) == pytest.approx(expected, abs=1e-3)


def test_what_the_device_does_for_a_step():
    launches = [("cudaGraphLaunch", False, 0.0, 0.01), ("cudaLaunchKernelExC", False, 0.5, 0.01)]
    kernels = [("triton_fused", True, 0.1, 0.2), ("gemm", True, 0.2, 0.2), ("Memcpy HtoD", True, 0.9, 0.1)]
    use = device_use.summarize(launches + kernels, steps=2)
    assert (use["kernels_per_step"], use["copies_per_step"], use["launches_per_step"]) == (1, 0.5, 0.5)
    assert use["graph_replays_per_step"] == 0.5
    assert use["seconds"] == pytest.approx(1) and use["busy_fraction"] == pytest.approx(0.4, abs=1e-6)
    assert use["busy_us_per_step"] == pytest.approx(0.4e6 / 2, rel=1e-5)
    assert "failed" in device_use.summarize(launches, steps=2)


def test_parity_sees_a_difference():
    lines = [{"global_step": 10, "seconds": 1.0, "charts/SPS": 10.0, "losses/a": 1.0, "losses/b": 1e-9}]
    weights = torch.ones(4)
    reference = (lines, weights)
    assert parity.deviations(([lines[0] | {"seconds": 9.0, "charts/SPS": 1.0}], weights), reference)["equal"]
    for other in ({"losses/a": 1.01}, {"losses/b": 1e-3}, {"global_step": 11}):
        found = parity.deviations(([lines[0] | other], weights), reference)
        assert not found["equal"] and found["worst_metric"] == next(iter(other))
    assert not parity.deviations((lines, weights + torch.tensor([0.0, 0.0, 0.0, 0.1])), reference)["equal"]
    apart = ([lines[0] | {"losses/a": 1.01}], weights)
    assert parity.deviations(apart, reference, {"losses/a": 2e-3})["equal"]
    assert not parity.deviations(apart, reference, {"losses/a": 5e-4, "losses/b": 1.0, "weights": 1.0})["equal"]
    heavier = (lines, weights + torch.tensor([0.0, 0.0, 0.0, 0.1]))
    assert parity.deviations(heavier, reference, {"weights": 0.01})["equal"]
    assert not parity.deviations(heavier, reference, {"losses/a": 1.0})["equal"]
    for broken in ([], lines * 2, [{"global_step": 10}]):
        assert not parity.deviations((broken, weights), reference)["equal"]


def test_settings_of_parity_and_of_endless_runs_suit_every_script():
    for script in pairs():
        for suffix, _ in VARIANTS.values():
            args_class = load_script(SCRIPTS / f"{script}{suffix}.py").Args
            args_class(**parity.fifty_updates(args_class))
            args = tyro.cli(args_class, args=endless_flags(script, "cpu"))
            assert args.total_timesteps == 10**9 and not args.tensorboard


def test_the_tolerance_of_parity_is_that_which_is_told():
    """A thousandth, or ten times the effect of rounding if that is more; each metric by its worst line."""
    lines = [{"global_step": i, "seconds": 1.0, "losses/a": 1.0, "losses/clipfrac": 0.1} for i in range(10)]
    weights = torch.ones(4)

    def equal(a: float, noise: float = 0.0, **more) -> bool:
        apart = [*lines[:4], lines[4] | {"losses/a": a} | more, *lines[5:]]
        return parity.deviations((apart, weights), (lines, weights), {"losses/a": noise})["equal"]

    assert equal(1.0009) and not equal(1.0011)
    assert equal(1.0009, 1e-5) and not equal(1.0011, 5e-5) and equal(1.0019, 2e-4) and not equal(1.0025, 2e-4)
    assert equal(1.0, **{"losses/clipfrac": 0.2})  # it counts rows
    assert not equal(math.nan)


def test_a_contestant_is_ready_when_it_has_learnt_for_a_while(tmp_path):
    one = gpu_speed.Contestant([], tmp_path / "out", log=tmp_path / "metrics.jsonl")
    lines = [{"global_step": i, "seconds": 0.5 * i, **({"losses/x": 1.0} if i > 2 else {})} for i in range(20)]
    for count in (0, 3, 8, 9, 10):
        one.log.write_text("".join(json.dumps(line) + "\n" for line in lines[:count]))
        assert one.is_ready() == (count == 10)  # three seconds after the fourth line


def test_the_speed_of_a_contestant_is_the_median_of_all_its_turns(tmp_path):
    one = gpu_speed.Contestant([], tmp_path / "out")
    one.rounds = [{"speeds": [1.0, 2.0]}, {"speeds": [3.0, 4.0, 5.0]}]
    assert one.result()["steps_per_second"] == 3 and one.result()["quartiles"] == [2, 4]


def test_a_turn_without_a_window_keeps_its_place_among_the_rounds(tmp_path, monkeypatch):
    """Else the turns after it would be paired with the other contestants' turns before theirs."""
    contestants = {name: contestant(tmp_path / name, window=0.2) for name in ("eager", "compile")}
    cut = iter([[], [100.0], [200.0], [400.0], [30.0], [90.0]])  # of eager's three turns, then of compile's
    monkeypatch.setattr(gpu_speed.steady, "cut", lambda *_: np.array(next(cut)))
    monkeypatch.setattr(gpu_speed, "PATIENCE", 0.0)
    for one in contestants.values():
        turns.prepare([one], 1, 20.0, time.perf_counter() + 20)
        for _ in range(3):
            one.take_turn(10.0)
        one.child.kill()
    own = {name: one.result() for name, one in contestants.items()}
    assert [len(x["speeds"]) for x in own["eager"]["rounds"]] == [0, 1, 1]
    assert own["eager"]["steps_per_second"] == 150 and "failed" not in own["eager"]
    ratio = gpu_speed.throughput.ratio(own, "compile", "eager")["ratio"]
    assert ratio == pytest.approx((30 / 100 * 90 / 200) ** 0.5)  # the second and third rounds


def test_blocks_of_calls_alternate(monkeypatch):
    """A B B A, as many calls in each as fit; the processor time is that of a call."""
    order = []

    def timed_block(call, count):
        order.append((call(), count))
        return np.array([0.002, 0.001, 0.003][:count] if count == 3 else [0.001] * count), 0.004 * count

    monkeypatch.setattr(turns, "timed_block", timed_block)
    found = turns.interleave({"a": lambda: "a", "b": lambda: "b"}, 0.1)
    assert order[:2] == [("a", 3), ("b", 3)] and {count for _, count in order[2:]} == {10}
    assert "".join(name for name, _ in order[2:]) == "abba" * (turns.BLOCKS // 2)
    assert found["a"].cpu == pytest.approx(0.004) and len(found["a"].blocks) == turns.BLOCKS
