"""./run.sh gpu: a dry run, and its parts."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from benchmark_helpers import benchmark, refusal

from benchmarks import gpu
from benchmarks.common import processes, results, turns
from benchmarks.common.programs import SCRIPTS, VARIANTS, endless_flags, load_script, pairs
from benchmarks.throughput import device_use, gpu_speed, parity

FILES = {"report.md", "speed.json", "speed.png", "inference.json", "inference.png", "rollout.json", "device_use.json",
         "device_use.png"}  # fmt: skip


def test_dry_run(tmp_path):
    done = benchmark("gpu", "--dry-run", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "report.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES and len(FILES) <= 8, text
    assert text.count("| done, ") == 4 and "dry run" in text and str(tmp_path) not in text and "/tmp" not in text
    (result,) = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert result["parity"]["lean"]["equal"] and result["parity"]["lean"]["weights"] == 0  # the twins are alike
    for own in result["contestants"].values():
        assert "failed" not in own and own["steps_per_second"] > 100 and len(own["rounds"]) == 2
    assert [x["of"] for x in result["ratios"]] == ["lean"]
    (inference,) = json.loads((tmp_path / "out" / "inference.json").read_text())
    assert inference["network"] == "dqn" and "speedup" in inference["cells"][0]
    (row,) = json.loads((tmp_path / "out" / "rollout.json").read_text())["rows"]
    assert row["actor"] == "off" and row["steps_per_second"] > 100
    use = json.loads((tmp_path / "out" / "device_use.json").read_text())["dqn"]["eager"]
    assert 0 < use["busy_fraction"] < 1 and use["kernels_per_step"] > 1 and len(use["timeline"]) > 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_it_says_so(tmp_path, capsys):
    assert "no CUDA device" in refusal(gpu.check, gpu.Options(tmp_path / "out"), capsys)
    assert not (tmp_path / "out").exists()


def test_bad_input(tmp_path, capsys):
    (tmp_path / "file").touch()
    for options, message in (
        ({"out": tmp_path}, "is not empty"),
        ({"out": Path("/dev/null/x")}, "can't write"),
        ({"out": tmp_path / "new", "scripts": ("sarsa",)}, "no script sarsa"),
        ({"out": tmp_path / "new", "time_limit": 0}, "--time-limit"),
        ({"out": tmp_path / "new", "memory_gib": 0}, "--memory-gib"),
    ):
        assert message in refusal(gpu.check, gpu.Options(**options, dry_run=True), capsys)


def test_as_many_at_a_time_as_memory_is_enough_for(monkeypatch):
    monkeypatch.setenv("MEMORY_GIB", "10")
    assert processes.free_slots(3 * 2**30) == 3 and processes.free_slots(100 * 2**30) == 1
    monkeypatch.delenv("MEMORY_GIB")
    assert processes.free_slots(2**60) == 1 and processes.free_slots(2**20) > 10


def test_the_most_important_pairs_come_first(tmp_path):
    scripts = gpu.check(gpu.Options(tmp_path, tuple(pairs()), dry_run=True))
    assert sorted(scripts) == pairs() and scripts[:2] == ["ppo_continuous_action", "sac_continuous_action"]


def test_a_stage_that_fails_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    def crash(*_arguments) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "STAGES", {"speed": crash, "rollout": lambda *_: None})
    monkeypatch.setattr(gpu, "SHARES", {"speed": 0.5, "rollout": 0.5})
    gpu.main(gpu.Options(tmp_path / "out", dry_run=True))
    text = capsys.readouterr().out
    assert "| speed | failed: RuntimeError: out of memory, 0 s |" in text and "| rollout | done, 0 s |" in text
    assert text.startswith((tmp_path / "out" / "report.md").read_text())


def test_a_file_is_whole_at_any_moment(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    results.write_whole(path, "the first")

    def cut_off(*_arguments) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        results.write_whole(path, "the second, which is longer")
    assert path.read_text() == "the first"


def test_speed_of_a_contestant_that_is_frozen_in_between(tmp_path):
    """It writes a line of ten steps each 20 ms; asleep it writes none, and its sleep is in no window."""
    (tmp_path / "run").mkdir()
    code = (
        "import json, time; file = open('metrics.jsonl', 'w', buffering=1); start = time.perf_counter()\n"
        "for i in range(10000):\n"
        "    time.sleep(0.02)\n"
        "    row = {'global_step': 10 * i, 'seconds': time.perf_counter() - start, 'losses/x': 1}\n"
        "    print(json.dumps(row), file=file)"
    )
    contestant = gpu_speed.Contestant("ppo", "eager", tmp_path)
    wrapped = f"import os; os.chdir({str(tmp_path / 'run')!r}); exec({code!r})"
    contestant.child = processes.start([sys.executable, "-c", wrapped], tmp_path / "output")
    gpu_speed.wait_until_ready([contestant], [], time.perf_counter() + 20)
    assert contestant.child.is_frozen() and contestant.failed is None
    known = len(contestant.lines())
    time.sleep(0.5)
    assert len(contestant.lines()) == known
    for _ in range(2):
        contestant.measure(0.4, 0.1)
        time.sleep(0.3)
    contestant.child.kill()
    assert len(contestant.rounds) == 2
    assert 250 < contestant.result()["steps_per_second"] < 550  # of 500 at most; with its sleep it would be 200


def test_a_contestant_that_crashes_or_never_learns_is_a_row(tmp_path):
    crashes, idles = (gpu_speed.Contestant("ppo", name, tmp_path / name) for name in ("eager", "lean"))
    for x, code in ((crashes, "raise SystemExit('error: no memory')"), (idles, "import time; time.sleep(60)")):
        x.folder.mkdir()
        x.child = processes.start([sys.executable, "-c", code], x.folder / "output")
    gpu_speed.wait_until_ready([crashes, idles], [], time.perf_counter() + 3)
    (result,) = gpu_speed.results_of([crashes, idles], {}, "cpu")
    assert "no memory" in result["contestants"]["eager"]["failed"]
    assert "not steady after" in result["contestants"]["lean"]["failed"]
    assert "| failed: error: no memory | - | - |" in "\n".join(gpu.speed_lines([result]))


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
    for other in ({"losses/a": 1.01}, {"losses/b": 1e-4}, {"global_step": 11}):
        found = parity.deviations(([lines[0] | other], weights), reference)
        assert not found["equal"] and found["worst_metric"] == next(iter(other))
    assert not parity.deviations((lines, weights + torch.tensor([0.0, 0.0, 0.0, 0.1])), reference)["equal"]
    for broken in ([], lines * 2, [{"global_step": 10}]):
        assert not parity.deviations((broken, weights), reference)["equal"]


def test_settings_of_parity_and_of_endless_runs_suit_every_script():
    for script in pairs():
        for suffix, _ in VARIANTS.values():
            args_class = load_script(SCRIPTS / f"{script}{suffix}.py").Args
            args_class(**parity.fifty_updates(args_class))
            args = tyro.cli(args_class, args=endless_flags(script, "cpu"))
            assert args.total_timesteps == 10**9 and not args.tensorboard
