"""Files of results: nothing that was measured is lost, and what is no result is refused by name before measuring."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_helpers import refusal

from benchmarks.acting import inference, rollout
from benchmarks.common import results, stats, turns
from benchmarks.common.programs import ROOT, check_once, split_flags
from benchmarks.common.results import Target, machine_folder, provenance, say_written
from benchmarks.learning import speedrun, sweep, time_to_score
from benchmarks.pools import env_pools, scaling
from benchmarks.throughput import backends, device_use, gpu_speed, ladder, limits, throughput
from benchmarks.throughput.ceilings import SECTIONS

CHECKS = {
    "throughput": lambda out: throughput.main(throughput.Options(("ppo",), out=out)),
    "ladder": lambda out: ladder.main(ladder.Options(out=out)),
    "limits": lambda out: limits.main(limits.Options(out=out)),
    "backends": lambda out: backends.main(backends.Options(out=out)),
    "inference": lambda out: inference.main(inference.Options(("ppo",), out=out)),
    "time_to_score": lambda out: time_to_score.main(time_to_score.Options(("ppo:CartPole-v1",), peers=(), out=out)),
    "speedrun": lambda out: speedrun.main(speedrun.Options("ppo", "CartPole-v1", beside=(), out=out)),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "zz.json can't be read (JSONDecodeError"),
        ('{"a": 1}', "is no result of this command"),
        ("[]", "is no result"),
    ],
)
def test_what_is_no_result_is_refused_before_measuring(name, content, message, tmp_path, capsys):
    (tmp_path / "zz.json").write_text(content)
    assert message in refusal(CHECKS[name], tmp_path, capsys)


def test_a_folder_that_takes_no_file_is_refused(capsys):
    assert "can't write to /proc" in refusal(results.make_folder, Path("/proc"), capsys)


def contestant(speed: float | None) -> dict:
    if speed is None:
        return {"rounds": [], "failed": ["no window of steady speed"]}
    known = {"steps_per_second": speed, "quartiles": [speed, speed], "windows": 1, "cold_seconds": 1, "warm_seconds": 1}
    return known | {"rounds": [{"speeds": [speed]}], "failed": [], "peak_resident_mb": 1, "cores_used": 1}


def test_a_failed_measurement_does_not_replace_an_older_one(tmp_path, monkeypatch):
    """It lies beside it, and the exit code says so."""
    speeds = iter([100.0, None, 200.0])

    def measure_script(script, _options, _bar, _on_round):
        own = {"contestants": {"eager": contestant(next(speeds))}, "ratios": [], "break_even_steps": {}}
        own |= {"script": script, "env_id": "CartPole-v1", "flags": "", "rounds": 1, "window_seconds": 2.0}
        return own | {"published": None, "differences": {}, "provenance": provenance()}

    monkeypatch.setattr(throughput, "measure_script", measure_script)
    options, path = throughput.Options(("ppo",), ("eager",), out=tmp_path), tmp_path / "ppo.json"
    speed = lambda: json.loads(path.read_text())["contestants"]["eager"]["steps_per_second"]  # noqa: E731
    assert throughput.main(options) == 0 and speed() == 100
    assert throughput.main(options) == 1 and speed() == 100 and (tmp_path / "ppo.json.part").exists()
    assert throughput.main(options) == 0 and speed() == 200 and not (tmp_path / "ppo.json.part").exists()


def test_a_result_of_which_a_part_failed_is_incomplete_and_says_so():
    """A round of five, the parts of one loop, or the end of a whole run."""
    good = contestant(100.0)
    for bad in ({"failed": ["exit code 1"]}, {"whole": {"failed": "exit code 1"}}):
        assert not throughput.is_whole({"eager": good, "compile": good | bad})
    assert throughput.is_whole({"eager": good, "compile": good | {"whole": {"seconds": 1.0, "steps": 5}}})
    parts = {"microseconds_per_step": dict.fromkeys(SECTIONS, 1.0)}
    shared = {"script": "ppo", "env_id": "CartPole-v1", "flags": "", "rounds": 5, "window_seconds": 2.0, "ratios": []}
    shared |= {"break_even_steps": {}, "published": None, "differences": {}, "provenance": provenance()}
    shared["contestants"] = {"eager": good, "compile": good | {"failed": ["exit code 1"]}}
    for ceilings, is_good in (
        ({"env_only_steps_per_second": 9.0, "variants": {"eager": parts}}, True),
        ({"env_only_steps_per_second": 9.0, "variants": {"eager": {"failed": "exit code 1"}}}, False),
        ({"failed": "exit code 1"}, False),
    ):
        result = shared | {"ceilings": ceilings}
        assert throughput.has_ceilings(result) is is_good
        text = "\n".join(throughput.section(result))
        assert ("failed" in text.partition("windows of")[0] or "exit code 1" in text) is not is_good
        assert "5 rounds, windows of 2 s; 1 of compile failed; measured" in text


def test_a_command_says_which_results_are_incomplete(tmp_path, capsys):
    (tmp_path / "old.json").write_text(json.dumps({"provenance": provenance()}))
    targets = {name: Target(tmp_path / f"{name}.json") for name in ("old", "new", "whole", "unmeasured")}
    for name in ("old", "new", "whole"):
        targets[name].write({"provenance": provenance()}, is_whole=name == "whole")
    assert say_written(tmp_path, targets.values(), "all.md") == 1
    said = capsys.readouterr()
    assert said.out == f"written to {tmp_path}: all.md, new.json, whole.json\n"
    assert said.err.splitlines() == [
        "failed: not all of old; the older result stays, and the new one is in old.json.part",
        "failed: not all of new",
        "failed: not all of unmeasured",
    ]
    assert say_written(tmp_path, [targets["whole"]]) == 0


def test_where_the_system_does_not_tell_its_affinity(monkeypatch):
    """On macOS, for one."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert provenance()["machine"]["cores"] == os.cpu_count()


def test_two_commands_do_not_write_to_one_folder(tmp_path):
    Target(tmp_path / "a.json")
    Target(tmp_path / "b.json")  # the same command may
    program = "import sys; from pathlib import Path; from benchmarks.common.results import Target; "
    other = [sys.executable, "-c", program + "Target(Path(sys.argv[1], 'c.json'))", tmp_path]
    done = subprocess.run(other, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: another command is writing to {tmp_path}: wait for its end, or give another --out\n"


def test_whole_runs_that_were_measured_are_kept(tmp_path, capsys):
    """Neither none, nor shorter ones, nor fewer of them stand in for those that are there."""
    whole = {"seconds": 1.0, "steps": 500, "rounds": [1.0, 1.0]}
    own = {"contestants": {"eager": contestant(100.0) | {"whole": whole}}, "flags": ""}
    old = own | {"break_even_steps": {}, "rounds": 1, "provenance": provenance()}
    (folder := machine_folder(tmp_path)).mkdir(exist_ok=True)
    (folder / "ppo.json").write_text(json.dumps(old))
    options = throughput.Options(("ppo",), ("eager",), out=tmp_path)
    assert "whole runs, which yours would lack" in refusal(throughput.main, options, capsys)
    shorter = replace(options, whole_steps=400, whole_rounds=1)
    message = refusal(throughput.main, shorter, capsys)
    assert "500 steps, more than yours, and 2 whole runs of each program, more than yours" in message


def test_ways_to_act_that_were_measured_are_kept(tmp_path, capsys):
    """Of `inference` and `rollout`: fewer paths, sizes or actors do not replace more; nor does another machine."""
    source = {"provenance": provenance()}
    cells = [{"path": path, "batch_size": size} for path in ("eager", "numpy") for size in (1, 64)]
    old = {"network": "ppo", "device": "cpu", "threads": 1, "batch_sizes": [1, 64], "cells": cells} | source
    (tmp_path / "ppo.cpu.json").write_text(json.dumps(old))
    options = {"networks": ("ppo",), "devices": ("cpu",), "batch_sizes": (1, 64), "out": tmp_path}
    fewer = inference.Options(**options, paths=("eager",))
    assert "has the paths numpy, which yours would lack" in refusal(inference.main, fewer, capsys)
    (tmp_path / "ppo.cpu.json").write_text(json.dumps(old | {"seconds": 2.0}))
    assert "has 2 seconds, more than yours" in refusal(
        inference.main, inference.Options(**options, paths=("eager", "numpy")), capsys
    )
    fewer = inference.Options(**options | {"batch_sizes": (1,)})
    assert "has the batch_sizes 64, which yours would lack" in refusal(inference.main, fewer, capsys)
    row = {"family": "classic", "num_envs": 8, "backend": "envpool", "actor": "numpy"}
    (tmp_path / "rollout.json").write_text(json.dumps({"device": "cpu", "threads": 1, "rows": [row]} | source))
    fewer = rollout.Options(families=("classic",), num_envs=(1,), compile_actor=("off",), out=tmp_path)
    assert "has classic 8 envpool numpy, which yours would lack" in refusal(rollout.main, fewer, capsys)


def test_a_record_of_ten_seeds_stays(tmp_path, capsys):
    settings = {"variant": "eager", "cache": "cold", "flags": ""}
    old = {"name": "1", "score": 475, "settings": settings, "contestants": {"record": []}, "seeds": [101, 102]}
    old |= {"provenance": provenance()}
    (tmp_path / "ppo_CartPole-v1_475_1.json").write_text(json.dumps(old))
    options = speedrun.Options("ppo", "CartPole-v1", score=475, beside=(), seeds=(102,), out=tmp_path)
    assert "has the seeds 101, which yours would lack" in refusal(speedrun.main, options, capsys)


def test_flags_and_lists_that_make_no_sense(tmp_path, capsys):
    assert split_flags("--a 'b c' --d=1") == ["--a", "b c", "--d=1"]
    for flags, message in (
        ("'", "No closing quotation"),
        ("--run_dir=x", "--run-dir is not for you"),
        ("--resume x", "--resume"),
    ):
        assert message in refusal(split_flags, flags, capsys)
        options = throughput.Options(("ppo",), flags=flags, out=tmp_path)
        assert message in refusal(throughput.check, options, capsys)
    check_once(sweep.Options(seeds=(1, 2)), "seeds")
    assert "--seeds has 1 twice" in refusal(sweep.check, sweep.Options(seeds=(1, 2, 1), out=tmp_path / "x"), capsys)
    for name in ("parts", "sizes"):
        assert f"--{name}: name at least one" in refusal(
            env_pools.check, env_pools.Options(**{name: ()}, out=tmp_path), capsys
        )
    assert "--nodes" in refusal(scaling.main, scaling.Options(nodes=(0,), out=tmp_path), capsys)
    options = scaling.Options(script="impala_ray", steps=512, out=tmp_path)
    assert "--steps is for ppo_ray" in refusal(scaling.main, options, capsys)
    assert "--jobs must be more than 0" in refusal(inference.check, inference.Options(jobs=-1, out=tmp_path), capsys)


def test_an_interval_may_end_at_infinity():
    """Where a contestant may never get there: not a number is no end of an interval."""
    low, high = stats.bootstrap([np.array([1.0, 2.0, np.inf])], lambda strata: strata[0].max())
    assert low == 1 and high == np.inf


def test_a_copy_without_history_is_told_its_commit(monkeypatch):
    monkeypatch.setattr(results, "git", lambda *_: "")
    assert results.code_state() == {"commit": None, "uncommitted_changes": False}
    monkeypatch.setenv("FLATOUT_COMMIT", "c0ffee-dirty")
    assert results.code_state() == {"commit": "c0ffee", "uncommitted_changes": True}
    monkeypatch.setattr(results, "git", lambda *_: "of another")
    assert results.code_state()["commit"] == "c0ffee"


def test_profiles_have_files_of_their_own(tmp_path, monkeypatch):
    """Each variant of each script; each is told of after its turn; what does not fit into memory waits."""
    groups, told = [], []

    def take_turns(contestants, _jobs, timeout, _limit, on_turn):
        groups.append((len(contestants), timeout))
        for contestant in contestants:
            assert not contestant.output.exists()
            contestant.output.write_text("used")
            contestant.error = f"of {contestant.output.name}"
            on_turn(contestant)

    monkeypatch.setattr(turns, "take_turns", take_turns)
    monkeypatch.setattr(device_use.processes, "free_slots", lambda _: 4)
    device_use.measure(
        ["dqn", "ppo", "td3_continuous_action"], ("eager", "compile"), "cpu", 1.0, 100.0, tmp_path, tmp_path,
        lambda *use: told.append(use),
    )  # fmt: skip
    assert groups == [(4, 50.0), (2, 50.0)] and len(told) == 6
    assert all(use["failed"] == f"of {script}.{variant}.out" for script, variant, use in told)


def test_a_window_never_spans_the_time_asleep(tmp_path, monkeypatch):
    """A line may have been timed before the sleep and written after it."""
    one = gpu_speed.Contestant([], tmp_path / "out", window=1.0)
    before = [{"global_step": 10 * i, "seconds": 0.1 * i} for i in range(5)]
    late = {"global_step": 50, "seconds": 0.5}
    after = [{"global_step": 60 + 10 * i, "seconds": 100.0 + 0.1 * i} for i in range(30)]
    seen = iter([before, [*before, late, *after]])
    monkeypatch.setattr(one, "lines", lambda: next(seen))
    child = type("Child", (), {name: lambda *_: None for name in ("go_on", "wait", "freeze", "poll")})
    one.child = child()
    one.take_turn(5.0)
    assert min(one.rounds[0]["speeds"]) == pytest.approx(100)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({}, {"command": "./run.sh other"}),
        ({}, {"commit": "another"}),
        ({}, {"versions": {"torch": "1.0"}}),
        ({}, {"uncommitted_changes": True}),
        ({"uncommitted_changes": True}, {}),
        ({"changed_until": "another"}, {}),
    ],
)
def test_only_what_the_same_code_began_is_gone_on_with(then, now, tmp_path, monkeypatch, capsys):
    """The same command, at the same commit, without changes then or now, with the same packages."""
    clean = provenance() | {"uncommitted_changes": False, "commit": "one", "command": "./run.sh x"}
    clean.pop("changed_until", None)
    here = [clean]
    monkeypatch.setattr(results, "provenance", lambda: here[0])
    target = results.Target(tmp_path / "x.json")
    target.write({"provenance": clean})
    assert target.begun() == {"provenance": clean}
    target.write({"provenance": clean | then})
    here[0] = clean | now
    assert target.begun() == {}
    assert ("is measured anew" in capsys.readouterr().err) is ("command" not in now)
    target = results.Target(tmp_path / "x.json")
    target.write({"provenance": clean | then}, is_whole=False)  # beside the older one: it would be overwritten
    assert "x.json.part is unfinished, and can't be continued: " in refusal(lambda _: target.begun(), None, capsys)


def test_a_commit_that_leaves_the_code_alone_is_no_reason_to_begin_anew(tmp_path, monkeypatch):
    clean = provenance() | {"uncommitted_changes": False, "commit": "one"}
    clean.pop("changed_until", None)
    monkeypatch.setattr(results, "provenance", lambda: clean | {"commit": "two"})
    target, changed = results.Target(tmp_path / "x.json"), [False]
    monkeypatch.setattr(results, "is_changed", lambda _before, _after: changed[0])
    target.write({"provenance": clean})
    assert target.begun() == {"provenance": clean}
    changed[0] = True
    assert target.begun() == {}


def test_commits_differ_by_the_code_that_measures():
    """Two that exist: the parent of a commit to the README only, and one that changed a script."""
    touched = lambda *paths: results.git("log", "-1", "--format=%H", "--", *paths)  # noqa: E731
    script = touched("scripts/ppo.py")
    assert results.is_changed(f"{script}^", script) and not results.is_changed(script, script)
    assert results.is_changed("none", script)


def test_the_low_end_of_an_interval_comes_first():
    assert results.estimate(2.0, [1.5, 2.5]) == "2.0 [1.5, 2.5]" and results.estimate(2.0, None, ".0f") == "2"


def test_a_measurement_that_is_stopped_leaves_its_finished_rounds(tmp_path, monkeypatch):
    """Of two contestants, the second one's second run is interrupted."""
    turn = iter(range(10))

    def measure(_arguments, _options, **_environment):
        if next(turn) == 3:
            raise KeyboardInterrupt
        own = {"speeds": [100.0] * 3, "first_update_seconds": 1.0, "peak_resident_mb": 1.0, "cores_used": 1.0}
        return own, SimpleNamespace(args={"env_id": "CartPole-v1"}, config={})

    monkeypatch.setattr(throughput, "measure", measure)
    options = throughput.Options(("ppo",), ("eager", "lean"), out=tmp_path)
    with pytest.raises(SystemExit) as end:
        throughput.main(options)
    result = json.loads((tmp_path / "ppo.json").read_text())
    assert end.value.code == 130 and result["rounds"] == 1
    assert [len(x["rounds"]) for x in result["contestants"].values()] == [1, 1]
    assert "1 rounds, windows of 2 s" in "\n".join(throughput.section(result))


def test_without_git_code_counts_as_changed(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert results.is_changed("a", "b")


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_stops_a_measurement(ignored, tmp_path):
    """As Ctrl-C does, which leaves no folder; under nohup it goes on."""
    code = "import os, signal, tempfile\nfrom benchmarks.common.results import stoppable\n"
    code += f"signal.signal(signal.SIGHUP, signal.SIG_{'IGN' if ignored else 'DFL'})\n"  # these tests may be, too
    code += "with stoppable('nothing is kept'), tempfile.TemporaryDirectory():\n"
    code += "    os.kill(os.getpid(), signal.SIGHUP)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == (0 if ignored else 130) and not list(tmp_path.iterdir())
