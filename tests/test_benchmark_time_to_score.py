"""Wall time until a policy is good enough, and the board of the fastest settings."""

import contextlib
import dataclasses
import importlib.util
import json
import re
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from benchmark_helpers import make_line, refusal
from tqdm import tqdm

from benchmarks.common import results, runs, steady
from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import SCRIPTS, load_script
from benchmarks.common.results import provenance
from benchmarks.learning import report, speedrun, time_to_score
from benchmarks.learning.time_to_score import contestants_of, measure, run_once, summarize
from benchmarks.throughput import peers

# Sleeps, then writes a line each 0.1 s: one episode of a return that rises by 10 up to a limit; ends after 20 lines
PROGRAM = """
import json, os, signal, sys, time
folder, delay, most, code = sys.argv[sys.argv.index("--run-dir") + 1], *map(float, sys.argv[1:4])
time.sleep(delay)
os.mkdir(folder)
start = time.perf_counter()
with open(folder + "/metrics.jsonl", "w", buffering=1) as log:
    for i in range(1, 21):
        time.sleep(0.1)
        line = {"global_step": 100 * i, "seconds": time.perf_counter() - start, "charts/episodes": 100}
        print(json.dumps(line | {"charts/episodic_return": min(10 * i, most), "losses/x": 1}), file=log)
sys.exit(int(code))
"""


def program(delay: float = 0.0, most: float = 1000, code: int = 0) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(delay), str(most), str(code)]


def outcome(seconds: float, reached: bool = True, **more) -> dict:
    return {"seed": 1, "seconds": seconds, "reached": reached, "steps": 100 * seconds, "best": 1.0, **more}


def test_the_mean_of_the_last_episodes_is_that_of_single_episodes():
    rng = np.random.default_rng(1)
    counts, returns = rng.integers(0, 9, size=60), rng.normal(size=60)
    rows = [(x, n) if n else (None, None) for x, n in zip(returns.tolist(), counts.tolist(), strict=True)]
    lines = [make_line(i, *row) for i, row in enumerate(rows)]
    means = runs.running_returns(runs.Run(None, {}, lines), episodes=20)
    for i in range(60):
        episodes = np.repeat(returns[: i + 1], counts[: i + 1])[-20:]
        known = counts[i] and len(episodes) == 20
        assert means[i] == pytest.approx(episodes.mean()) if known else np.isnan(means[i])
    assert means[np.flatnonzero(counts)[-1]] == pytest.approx(runs.final_return(runs.Run(None, {}, lines), 20))
    best = np.nanmax(means)
    assert runs.reaches(lines, best, 20) == np.nanargmax(means) and runs.reaches(lines, best + 1e-6, 20) is None


@pytest.mark.alone
def test_time_is_that_of_the_line_from_the_start_of_the_process():
    """Half a second before the log begins counts, and that of looking does not; what got there is ended."""
    result = run_once(program(delay=0.5), partial(runs.reaches, score=45), timeout=30)
    assert result["reached"] and result["steps"] == 500 and "failed" not in result
    assert 1.0 < result["seconds"] < 1.4


@pytest.mark.alone
def test_a_run_that_never_gets_there_counts_with_its_length():
    result = run_once(program(most=30), partial(runs.reaches, score=45), timeout=30)
    assert not result["reached"] and 2.0 < result["seconds"] < 2.9
    assert result["steps"] == 2000 and result["best"] == 30
    late = run_once(program(most=30), partial(runs.reaches, score=45), timeout=0.5)
    assert not late["reached"] and late["seconds"] == 0.5 and "failed" not in late
    assert run_once([sys.executable, "-c", "raise SystemExit(3)"], lambda _: None, 30)["failed"] == "exit code 3"


def test_turns_alternate_and_each_cold_run_has_an_empty_cache(monkeypatch):
    calls = []

    def run_once(arguments, _find, _timeout, TORCHINDUCTOR_CACHE_DIR):
        calls.append((arguments[-5], arguments[-1], TORCHINDUCTOR_CACHE_DIR.split("/")[-1]))
        return outcome(1.0)

    monkeypatch.setattr(time_to_score, "run_once", run_once)
    contestants = [replace(x, flags=(x.name,)) for x in contestants_of(["eager", "compile"], ())]
    assert [x.name for x in contestants] == ["eager", "compile (cold)", "compile (warm)"]
    known = []
    on_seed = lambda results: known.append({name: len(x) for name, x in results.items()})  # noqa: E731
    measure(("ppo", "CartPole-v1"), 1.0, contestants, (5, 6), 9.0, on_seed, tqdm(disable=True), {})
    names = [name for name, _, _ in calls]
    assert names == ["compile (warm)", "eager", "compile (cold)", "compile (warm)", *names[1:4][::-1]]
    assert [seed for _, seed, _ in calls] == ["0", "5", "5", "5", "6", "6", "6"]
    caches = {name: {cache for other, _, cache in calls if other == name} for name in names}
    assert len(caches["compile (cold)"]) == 2 and len(caches["compile (warm)"]) == 1
    assert all(re.fullmatch(r"\w+", cache) for _, _, cache in calls), "the C++ compiler gets paths without quotes"
    assert known == [dict.fromkeys(names, 1), dict.fromkeys(names, 2)]


def test_a_run_that_was_cut_off_fills_no_cache(monkeypatch, capfd):
    """Else the first of those that are called warm would compile. One that came to its end has compiled everything."""
    contestants, results = contestants_of(["compile"], ()), {}
    for seconds, is_refused in (9.0, True), (8.0, False):
        monkeypatch.setattr(time_to_score, "run_once", lambda *_, s=seconds, **__: outcome(s, reached=False))
        with pytest.raises(SystemExit) if is_refused else contextlib.nullcontext():
            measure(("ppo", "CartPole-v1"), 1.0, contestants, (5,), 9.0, results.update, tqdm(disable=True), {})
        assert bool(results) != is_refused
    assert "compile (warm): the run that fills its cache failed, no end after 9 s" in capfd.readouterr().err


def test_runs_in_vain_are_not_dropped():
    results = [outcome(10.0), outcome(20.0), outcome(60.0, reached=False)] * 2
    results.append(outcome(3.0, reached=False, failed="exit code 1"))
    own = summarize(results)
    assert (own["runs"], own["reached"], own["failed"], own["steps"]) == (6, 4, 1, 1500)
    assert own["mean"] == 30 and own["each"] == 45 and own["interval"][0] < 30 < own["interval"][1]
    row = time_to_score.cells("x", results, [[outcome(90.0)] * 5, results, None])
    assert row[:2] == ["x", "4 of 6, 1 failed"] and row[3] == "45.0" and row[5].startswith("2.00 [")
    assert row[6:] == ["-", "-"]
    never = [outcome(9.0, reached=False)] * 2
    assert time_to_score.cells("x", never, [results]) == ["x", "0 of 2", "≥ 9.0", "never", "-", "-"]
    assert time_to_score.cells("x", [results[-1]], [results])[1] == "1 failed"


@pytest.mark.slow
def test_command(monkeypatch, tmp_path, capsys):
    """What was measured lies in the folder, with where it comes from, a table and a figure."""
    delays = {"eager": 0.0, "sb3": 1.0}
    monkeypatch.setattr(time_to_score, "command", lambda _script, name: program(delays[name]))
    monkeypatch.setattr(time_to_score, "check_settings", lambda _: None)
    monkeypatch.setattr(time_to_score, "check_installed", lambda _: None)
    options = time_to_score.Options(("ppo:CartPole-v1",), ("eager",), ("sb3",), (1, 2), score=15.0, out=tmp_path)
    time_to_score.main(options)
    result = json.loads((tmp_path / "ppo_CartPole-v1.json").read_text())
    assert result["seeds"] == [1, 2] and result["score"] == 15 and result["provenance"]["commit"]
    assert [len(x) for x in result["contestants"].values()] == [2, 2]
    text = (tmp_path / "time_to_score.md").read_text()
    assert text in capsys.readouterr().out and (tmp_path / "time_to_score.png").stat().st_size > 5000
    assert "## ppo on CartPole-v1, to 15" in text and "| eager | 2 of 2 | " in text


@pytest.mark.slow
def test_a_stopped_command_goes_on_and_a_whole_one_begins_anew(monkeypatch, tmp_path, capsys):
    """Not so if the code is another: nothing of the old result may be mixed with the new, or be lost unasked."""
    here = provenance() | {"uncommitted_changes": False}
    here.pop("changed_until", None)  # there is one if the repository gets a commit while the tests run
    monkeypatch.setattr(results, "provenance", lambda: here)
    monkeypatch.setattr(time_to_score, "provenance", lambda: here)
    calls, fails_at = [], [3]

    def run_once(arguments, *_, **__):
        calls.append(arguments[-1])
        if len(calls) == fails_at[0]:
            raise KeyboardInterrupt
        return outcome(float(len(calls)))

    monkeypatch.setattr(time_to_score, "run_once", run_once)
    options = time_to_score.Options(("ppo:CartPole-v1",), ("eager",), (), (1, 2, 3, 4), 15.0, out=tmp_path)
    seconds = lambda: [x["seconds"] for x in json.loads(path.read_text())["contestants"]["eager"]]  # noqa: E731
    path, part = tmp_path / "ppo_CartPole-v1.json", tmp_path / "ppo_CartPole-v1.json.part"
    with pytest.raises(SystemExit):
        time_to_score.main(options)
    assert seconds() == [1, 2]
    time_to_score.main(options)
    assert calls == ["1", "2", "3", "3", "4"] and seconds() == [1, 2, 4, 5]
    fails_at[0] = 9
    with pytest.raises(SystemExit):
        time_to_score.main(options)
    capsys.readouterr()
    assert seconds() == [1, 2, 4, 5] and len(json.loads(part.read_text())["seeds"]) == 3
    here = here | {"commit": "another"}
    assert "part is unfinished, and can't be continued: it is of commit" in refusal(time_to_score.main, options, capsys)
    part.unlink()
    time_to_score.main(options)
    assert seconds() == [10, 11, 12, 13] and not part.exists()


@pytest.mark.slow
def test_of_several_tasks_those_that_are_whole_are_not_measured_again(monkeypatch, tmp_path):
    """After a stop in the second one; when both are whole, the same command begins anew."""
    here = provenance() | {"uncommitted_changes": False}
    here.pop("changed_until", None)
    monkeypatch.setattr(results, "provenance", lambda: here)
    monkeypatch.setattr(time_to_score, "provenance", lambda: here)
    calls = []

    def run_once(arguments, *_, **__):
        calls.append((arguments[-3], arguments[-1]))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return outcome(float(len(calls)))

    monkeypatch.setattr(time_to_score, "run_once", run_once)
    tasks = ("ppo:CartPole-v1", "ppo:Acrobot-v1")
    options = time_to_score.Options(tasks, ("eager",), (), (1, 2), 15.0, out=tmp_path)
    with pytest.raises(SystemExit):
        time_to_score.main(options)
    time_to_score.main(options)
    first, second = (("CartPole-v1", "1"), ("CartPole-v1", "2")), (("Acrobot-v1", "1"), ("Acrobot-v1", "2"))
    assert calls == [*first, *second, second[1]]
    time_to_score.main(options)
    assert calls[5:] == [*first, *second]


def test_scores_are_those_that_are_published(tmp_path, capsys):
    tasks = time_to_score.check(time_to_score.Options(peers=(), out=tmp_path))
    scored = {(name, env_id) for name, pair in TABLE.items() for env_id in pair.scored}
    assert ("ppo", "CartPole-v1") in tasks and set(tasks) < scored <= set(report.read_reference())
    assert time_to_score.published("ppo_continuous_action", "HalfCheetah-v4") == 1442.64
    wrong = {"name script and environment": ("ppo",), "no script sarsa": ("sarsa:CartPole-v1",)}
    for line, named in wrong.items():
        assert line in refusal(time_to_score.check, time_to_score.Options(named, peers=(), out=tmp_path), capsys)
    unknown = time_to_score.Options(("ppo:Taxi-v3",), peers=(), out=tmp_path)
    assert "name one with --score" in refusal(time_to_score.main, unknown, capsys)


def result_of(name: str, seconds: list[float], reached: int) -> dict:
    own = [outcome(x, i < reached) for i, x in enumerate(seconds)]
    settings = {"variant": "eager", "cache": "cold", "flags": f"--name {name}"}
    shared = {"script": "ppo", "env_id": "CartPole-v1", "score": 475.0, "name": name, "settings": settings}
    shared["provenance"] = provenance()
    return shared | {"contestants": {"record": own, "defaults": [outcome(100.0)] * 10}}


def test_a_record_gets_there_nine_times_in_ten():
    found = [result_of("slow", [20.0] * 10, 10), result_of("fast", [5.0] * 10, 9), result_of("rash", [1.0] * 10, 8)]
    found.append(result_of("few", [1.0] * 5, 5))
    lines = speedrun.board(found)
    assert len([line for line in lines if line.startswith("| ---")]) == 1
    order = [line.split("--name ")[1].split("`")[0] for line in lines if "--name" in line]
    assert order[:2] == ["fast", "slow"] and set(order[2:]) == {"rash", "few"}
    assert ["no record" in line for line in lines if "--name" in line] == [False, False, True, True]
    assert "| 9 of 10 |" in lines[2] and "| 18.00 [" in lines[2]  # 100 s against 50 s in all for nine
    assert "beside it: our default flags" in lines[3]


def test_a_record_is_for_the_task_and_for_any_seed(tmp_path, capsys):
    for flags in ("--seed 3", "--num-envs 8 --env-kwargs={}"):
        options = speedrun.Options("ppo", "CartPole-v1", flags=flags, beside=(), out=tmp_path)
        assert "for the task as it is" in refusal(speedrun.main, options, capsys)


def test_speedrun_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(time_to_score, "command", lambda *_: program())
    where = {"seeds": (1,), "score": 15.0, "beside": ("defaults",), "out": tmp_path, "name": "wide"}
    speedrun.main(speedrun.Options("ppo", "CartPole-v1", "--num-envs 16", variant="compile", cache="warm", **where))
    result = json.loads((tmp_path / "ppo_CartPole-v1_15_wide.json").read_text())
    assert result["settings"]["flags"] == "--num-envs 16" and list(result["contestants"]) == ["record", "defaults"]
    text = (tmp_path / "speedrun.md").read_text()
    assert (
        "`ppo`, compile, warm cache: `--num-envs 16` (no record) | 1 of 1 |" in text and text in capsys.readouterr().out
    )


def test_a_peer_at_its_defaults_has_its_own_settings():
    if importlib.util.find_spec("stable_baselines3") is None:
        pytest.skip("sb3 is not installed")
    args = load_script(SCRIPTS / "ppo.py").Args(num_envs=1)
    model = peers.make_model("sb3-defaults", "ppo", args, peers.make_envs(None, args, normalize=False))
    assert (model.n_steps, model.batch_size, model.learning_rate) == (2048, 64, 3e-4)
    assert peers.make_model("sb3", "ppo", args, model.get_env()).n_steps == args.num_steps


def record_of(own: list[dict], name: str = "1") -> dict:
    settings = {"variant": "eager", "cache": "cold", "flags": f"--name {name}"}
    shared = {"script": "ppo", "env_id": "CartPole-v1", "score": 475.0, "name": name, "settings": settings}
    return shared | {"provenance": provenance(), "contestants": {"record": own}}


def test_turns_go_on_in_the_order_of_a_run_that_was_not_stopped(monkeypatch):
    """The second seed in the reverse order, whether or not the first one was measured before."""
    order = []

    def run_once(arguments, *_, **__):
        order.append((arguments[-5], arguments[-1]))
        return outcome(1.0)

    monkeypatch.setattr(time_to_score, "run_once", run_once)
    contestants = [time_to_score.Contestant(name, "eager", (name,)) for name in ("a", "b")]
    begun = {name: [outcome(9.0)] for name in ("a", "b")}
    task = ("ppo", "CartPole-v1"), 1.0, contestants, (5, 6, 7), 9.0
    time_to_score.measure(*task, lambda _: None, tqdm(disable=True), begun)
    assert order == [("b", "6"), ("a", "6"), ("a", "7"), ("b", "7")]


def test_the_interval_of_a_ratio_knows_of_runs_in_vain():
    """With five runs, of which four were in vain, all may have been, or two; of fewer there is no interval."""
    others = [outcome(10.0), *[outcome(90.0, reached=False)] * 4]
    assert time_to_score.compared([outcome(10.0)] * 5, others) == "37.00 [7.00, inf]"
    assert time_to_score.compared([outcome(10.0)] * 2, others) == "37.00"


def test_a_ratio_to_a_contestant_that_never_got_there_is_a_bound():
    never = [outcome(600.0, reached=False)] * 3
    assert time_to_score.compared([outcome(40.0), outcome(80.0)], never) == "≥ 10.00"
    assert time_to_score.compared(never, [outcome(40.0)] * 2) == "-"
    assert time_to_score.compared(never, never) == "-"


def test_a_cache_is_warm_some_lines_after_the_first_update():
    lines = [make_line(step, 1.0, 1) for step in range(9)]
    for line in lines[:2]:
        del line["losses/value_loss"]
    found = [time_to_score.is_warm(lines[:count]) for count in range(10)]
    assert found == [None] * (3 + steady.FIRST_LINES) + [2] * (7 - steady.FIRST_LINES)


def test_a_run_that_failed_counts_against_a_record():
    failed = outcome(3.0, reached=False, failed="exit code 1")
    assert speedrun.is_record(record_of([outcome(1.0)] * 9 + [failed]))
    assert not speedrun.is_record(record_of([outcome(1.0)] * 8 + [failed] * 2))


def test_a_mean_is_a_bound_where_a_run_did_not_get_there():
    runs = [{"seconds": x, "reached": True, "steps": 5} for x in (10.0, 10.0, 20.0, 30.0, 30.0)]
    assert time_to_score.cells("eager", runs, [])[2].startswith("20.0 [")
    late = [*runs, {"seconds": 80.0, "reached": False, "steps": 9}]
    assert time_to_score.cells("eager", late, [])[2] == "≥ 30.0"
    failed = [*runs, {"failed": "exit code 1", "reached": False}]
    assert time_to_score.cells("eager", failed, [])[2] == "≥ 20.0"


def test_the_fastest_record_is_that_of_the_least_time_for_each_success():
    """Not that with the fastest or the slowest run."""
    steady_one, one_late = [outcome(10.0)] * 10, [outcome(5.0)] * 9 + [outcome(40.0)]
    mixed = [outcome(1.0)] * 5 + [outcome(30.0)] * 5
    found = [record_of(mixed, "mixed"), record_of(steady_one, "steady"), record_of(one_late, "late")]
    order = [line.split("--name ")[1].split("`")[0] for line in speedrun.board(found) if "--name" in line]
    assert order == ["late", "steady", "mixed"]


def test_a_record_that_was_stopped_does_not_replace_a_whole_one(monkeypatch, tmp_path):
    calls = []

    def run_once(*_, **__):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return outcome(float(len(calls)))

    monkeypatch.setattr(time_to_score, "run_once", run_once)
    options = speedrun.Options("ppo", "CartPole-v1", score=15.0, beside=(), seeds=(1, 2), out=tmp_path)
    speedrun.main(options)
    with pytest.raises(SystemExit):
        speedrun.main(options)
    known = json.loads((tmp_path / "ppo_CartPole-v1_15_1.json").read_text())["contestants"]["record"]
    assert [x["seconds"] for x in known] == [1, 2]


def test_what_a_run_writes_at_its_very_end_counts(monkeypatch):
    """Its last line comes after the last look at its log, as it ends while one waits for the next look."""
    looks, written = [], time_to_score.written
    monkeypatch.setattr(time_to_score, "written", lambda log: (looks.append(1), written(log))[1])
    monkeypatch.setattr(time_to_score.processes.Child, "wait", lambda child, _seconds: child.process.wait())
    first_look = lambda lines: 0 if lines and len(looks) > 1 else None  # noqa: E731
    assert run_once(program(most=3), first_look, 60.0)["reached"]


def test_runs_that_failed_do_not_replace_those_that_did_not(monkeypatch, tmp_path, capsys):
    """They lie beside the old result, and the command says so by its exit code."""
    options = time_to_score.Options(("ppo:CartPole-v1",), ("eager",), (), (1, 2), score=1.0, out=tmp_path)
    found = {"reached": True, "seconds": 1.0, "steps": 5, "best": 2.0}
    monkeypatch.setattr(time_to_score, "run_once", lambda *_args, **_environment: dict(found))
    assert time_to_score.main(options) == 0
    (path,) = tmp_path.glob("*.json")
    before = path.read_text()
    found |= {"reached": False, "failed": "exit code 1"}
    monkeypatch.setattr(time_to_score.Target, "begun", lambda _target: {})
    assert time_to_score.main(options) == 1
    assert path.read_text() == before and path.with_name(path.name + ".part").exists()
    assert "the older result stays" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (time_to_score, time_to_score.Options(("ppo:CartPole-v1",), ("eager",), (), (1,), score=1.0)),
        (speedrun, speedrun.Options("ppo", "CartPole-v1", score=1.0, beside=(), seeds=(1,))),
    ],
)
def test_runs_with_less_time_do_not_replace_longer_ones(monkeypatch, tmp_path, capsys, module, options):
    monkeypatch.setattr(time_to_score, "run_once", lambda *_args, **_environment: outcome(1.0))
    assert module.main(dataclasses.replace(options, timeout=60.0, out=tmp_path)) == 0
    capsys.readouterr()
    error = refusal(module.main, dataclasses.replace(options, timeout=5.0, out=tmp_path), capsys)
    assert "has 60 timeout, more than yours" in error


def test_a_task_with_runs_that_failed_is_measured_again(monkeypatch, tmp_path):
    """Where the command goes on, of two tasks, with the second one."""
    tasks, asked = ("ppo:CartPole-v1", "ppo:Acrobot-v1"), []
    options = time_to_score.Options(tasks, ("eager",), (), (1,), score=1.0, out=tmp_path)
    begun = {"CartPole-v1": {"eager": [outcome(1.0) | {"failed": "exit code 1"}]}, "Acrobot-v1": {}}
    begun_of = lambda target: {"contestants": begun[target.path.stem.partition("_")[2]]}  # noqa: E731
    monkeypatch.setattr(time_to_score.Target, "begun", begun_of)
    monkeypatch.setattr(time_to_score, "measure", lambda task, *_: asked.append(task))
    time_to_score.main(options)
    begun["CartPole-v1"]["eager"][0].pop("failed")
    time_to_score.main(options)
    assert [task[1] for task in asked] == ["CartPole-v1", "Acrobot-v1", "Acrobot-v1"]


def test_a_log_that_grows_while_it_is_read_is_read_up_to_where_it_was(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert time_to_score.written(log) == ([], 0.0)
    log.write_text('{"global_step": 1, "seconds": 0.5}\n{"global_step": 2, "sec')
    lines, last = time_to_score.written(log)
    assert [line["global_step"] for line in lines] == [1] and last == log.stat().st_mtime


def test_nan_is_no_number(tmp_path, capsys):
    assert "--timeout" in refusal(time_to_score.main, time_to_score.Options(timeout=float("nan"), out=tmp_path), capsys)
    for module, task in ((time_to_score, ()), (speedrun, ("ppo", "CartPole-v1"))):
        options = module.Options(*task, score=float("nan"), beside=()) if task else module.Options(score=float("nan"))
        options.out = tmp_path
        assert "--score must be a number" in refusal(module.main, options, capsys)


def test_records_whose_names_give_one_path_do_not_replace_each_other(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(time_to_score, "run_once", lambda *_args, **_environment: outcome(1.0))
    options = {"beside": (), "seeds": (1,), "score": 1.0, "out": tmp_path}
    assert speedrun.main(speedrun.Options("ppo", "CartPole-v1", name="a/b", **options)) == 0
    capsys.readouterr()
    error = refusal(speedrun.main, speedrun.Options("ppo", "CartPole-v1", name="a b", **options), capsys)
    assert "has name a/b" in error
