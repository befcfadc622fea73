"""./run.sh tune: search spaces and what is refused; searches, populations, SIGKILL, trials that crash; the report."""

import csv
import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark_helpers import benchmark, benchmark_here, make_line, make_run, refusal

from benchmarks.common.programs import ROOT
from benchmarks.learning import sweep, tune, tune_report
from benchmarks.learning.tune_history import History, read_histories
from benchmarks.learning.tune_space import as_flag, parse

SMALL = "--flags=--num-steps=32 --update-epochs=2 --device=cpu"
TINY = ("--script", "ppo", SMALL, "--cpus-per-trial", "0.5")
has_tune = all(importlib.util.find_spec(name) for name in ("ray", "pandas", "pyarrow"))
needs_tune = pytest.mark.skipif(not has_tune, reason="needs requirements/requirements-tune.txt")


def started(*flags, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "benchmarks", "tune", *map(str, flags)], cwd=ROOT, **options)


def ended(out: Path) -> dict[str, History]:
    return {name: x for name, x in read_histories(out / "journal.jsonl").items() if x.has_ended}


def runs_of(out: Path) -> dict[Path, int]:
    """When each log of a trial was last written to."""
    return {path: path.stat().st_mtime_ns for path in (out / "trials").rglob("metrics.jsonl")}


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("learning_rate=loguniform(1e-4,1e-2)", "loguniform", (1e-4, 1e-2)),
        ("ent_coef = uniform(0, 0.02)", "uniform", (0, 0.02)),
        ("clip_coef=quniform(0.1,0.3,0.05)", "quniform", (0.1, 0.3, 0.05)),
        ("num_steps=randint(32,256)", "randint", (32, 256)),
        ("gamma=[0.98,0.99,0.995]", "list", (0.98, 0.99, 0.995)),
        ("norm_adv=[True,False]", "list", (True, False)),
        ("env_backend=['auto','gymnasium']", "list", ("auto", "gymnasium")),
        ("target_kl=[None,0.01]", "list", (None, 0.01)),
    ],
)
def test_search_spaces(text, kind, numbers):
    space = parse("--search", text, "ppo")
    assert (space.name, space.kind, space.numbers) == (text.partition("=")[0].strip(), kind, numbers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnig_rate=uniform(0,1)", "no such setting; did you mean learning_rate?"),
        ("seed=[1,2]", "tune sets it itself"),
        ("learning_rate", "there is no ="),
        ("learning_rate=normal(0,1)", "not known"),
        ("learning_rate=__import__('os').getpid()", "not known"),
        ("learning_rate=uniform(1e-2,1e-4)", "is empty"),
        ("learning_rate=uniform(0.1)", "uniform takes 2 numbers"),
        ("learning_rate=uniform(0,a)", "malformed"),
        ("learning_rate=loguniform(0,1)", "must begin above 0"),
        ("learning_rate=[1e-3]", "two different values"),
        ("learning_rate=['a','b']", "has the wrong type"),
        ("num_steps=uniform(1,9)", "uniform draws fractions"),
        ("num_steps=[1.5,2]", "has the wrong type"),
        ("norm_adv=[0,1]", "has the wrong type"),
        ("env_backend=['auto','none']", "has the wrong type"),
        ("clip_coef=quniform(0.1,0.35,0.1)", "must be multiples of the step 0.1"),
        ("gamma=uniform(0.9,1.1)", "1.1 is not between 0 and 1"),
        ("num_steps=[0,8]", "0 is not between 1 and inf"),
        ("learning_rate=*1.2", "invalid syntax"),
    ],
)
def test_search_spaces_that_are_refused(text, message, capsys):
    assert message in refusal(lambda text: parse("--search", text, "ppo"), text, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"script": ""}, "--script: name one"),
        ({"script": "sarsa"}, "no script sarsa"),
        ({"search": ()}, "--search: name a setting"),
        ({"search": ("gamma=[0.9,0.99]", "gamma=[0.9,0.98]")}, "gamma is there twice"),
        ({"trials": 0}, "--trials must be more than 0"),
        ({"gpus_per_trial": 1000}, "GPUs are not enough for 1 trials at a time"),
        ({"interval": 10**9}, "is more than a whole run"),
        ({"flags": "--gamma 0.9"}, "--flags: gamma is searched"),
        ({"flags": "--total-timesteps=9"}, "--flags: total_timesteps is set by tune"),
        ({"flags": "--run-dir 'x"}, "No closing quotation"),
        ({"flags": "--no-such-flag 1"}, "ppo: Unrecognized options: --no-such-flag, 1"),
        ({"perturb": ("gamma=*1.2",)}, "--perturb is for --scheduler pbt or pb2"),
        ({"scheduler": "pbt"}, "--perturb says which settings are to change"),
        ({"scheduler": "pbt", "perturb": ("num_steps=[32,64]",)}, "can't change in a run of ppo; learning_rate"),
        ({"scheduler": "pbt", "perturb": ("gamma=*0.5",)}, "the factor must be more than 1"),
        ({"scheduler": "pbt", "perturb": ("target_kl=*2",)}, "its default, None, can't be multiplied"),
        ({"scheduler": "pbt", "perturb": ("gamma=*2",), "population": 1}, "--population must be at least 2"),
        (
            {"scheduler": "pbt", "perturb": ("gamma=*2",), "trials": 4},
            "--trials is not for --scheduler pbt: --population",
        ),
        ({"population": 4}, "--population is not for --scheduler none: --trials says how many there are"),
        ({"scheduler": "pbt", "perturb": ("gamma=*2",), "search_algorithm": "optuna"}, "a population searches by"),
        (
            {"scheduler": "pbt", "perturb": ("num_runners=*1.2",), "script": "impala_ray"},
            "leaves its default, 2, as it is",
        ),
        ({"scheduler": "pb2", "perturb": ("gamma=*2",)}, "pb2 chooses from a range"),
        ({"resume": Path("/nowhere"), "search": ()}, "there is no search in /nowhere"),
        ({"resume": Path("/nowhere")}, "--search: a resumed search keeps its settings"),
    ],
)
def test_bad_input(options, message, tmp_path, capsys):
    given = {"script": "ppo", "search": ("gamma=[0.9,0.99]",), "out": tmp_path} | options
    given |= {"script": "", "out": tune.Options.out} if "resume" in options else {}
    assert message in refusal(tune.begin, tune.Options(**given), capsys)


@pytest.mark.parametrize("name", ["report.json", "tune"])
def test_a_folder_with_a_report_or_with_trials_that_have_no_journal_is_refused(name, tmp_path, capsys):
    """The one would be replaced; of the others, those of another search would go on."""
    (tmp_path / name).mkdir()
    options = tune.Options(script="ppo", search=("gamma=[0.9,0.99]",), out=tmp_path)
    assert "holds a report, or trials without their journal" in refusal(tune.begin, options, capsys)


def test_packages_that_are_missing_are_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name) or name)
    options = tune.Options(script="ppo", search=("gamma=[0.9,0.99]",), search_algorithm="optuna")
    line = refusal(tune.check, options, capsys)
    assert "needs Optuna: " in line and "-m pip install -c" in line


def test_settings_as_flags():
    flags = [as_flag("learning_rate", 1e-5), as_flag("norm_adv", False), as_flag("anneal_lr", True)]
    assert flags == ["--learning-rate=1e-05", "--no-norm-adv", "--anneal-lr"]


def history(number: int, *reports: tuple, state: str = "finished") -> History:
    """A trial of reports (interval, objective, setting, donor)."""
    found = History(f"x_{number:05}", number, settings={"gamma": reports[0][2]})
    for interval, objective, value, donor in reports:
        line = {"state": "reported", "intervals": interval, "steps": 100 * interval, "objective": objective}
        found.take(line | {"settings": {"gamma": value}, "donor": donor})
    if state != "reported":
        found.take({"state": state})
    return found


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("optuna"), reason="needs requirements/requirements-tune.txt")
def test_the_end_of_a_grid_is_in_it():
    """Six times 0.05 is 0.30000000000000004, as drawn; a list's values are taken as they are."""
    spaces = {x.name: x for x in (parse("--search", text, "ppo") for text in ("gamma=quniform(0.1,0.3,0.05)",))}
    spaces["anneal_lr"] = parse("--search", "anneal_lr=[True,False]", "ppo")
    search = SimpleNamespace(spaces=lambda: spaces)
    values = [0.1, 0.15, 0.2, 6 * 0.05, 0.25, 0.1]
    rows = [{"gamma": x, "anneal_lr": i % 2 == 0, "objective": 100 * x} for i, x in enumerate(values)]
    assert values[3] > 0.3
    found = tune_report.fanova(search, rows, ["gamma", "anneal_lr"])
    assert found["gamma"] > found["anneal_lr"] >= 0


def test_a_member_that_failed_at_once_has_no_line(tmp_path):
    good, bad = history(0, (1, 5.0, 0.9, None), (2, 6.0, 0.95, None)), History("x_00001", 1, settings={"gamma": 0.5})
    bad.take({"state": "failed", "why": "exit code 2"})
    search = SimpleNamespace(perturbed={"gamma": parse("--perturb", "gamma=*1.2", "ppo")})
    tune_report.draw_schedules(tmp_path / "schedules.png", search, [good, bad], good)
    assert (tmp_path / "schedules.png").exists()


def test_the_best_is_a_whole_trial_and_knows_where_it_comes_from():
    first = history(0, (1, 5.0, 0.9, None), (2, 6.0, 0.9, None), (3, 7.0, 0.9, None))
    second = history(1, (1, 1.0, 0.5, None), (2, 8.0, 0.95, "x_00000"), (3, 9.0, 0.95, None))
    stopped, nothing = history(2, (1, 99.0, 0.1, None), state="stopped"), history(3, (3, math.nan, 0.1, None))
    histories = [first, second, stopped, nothing]
    best = tune_report.best_of(histories)
    assert best is second
    line = [(x["number"], x["intervals"], x["settings"]["gamma"]) for x in tune_report.ancestry(best, histories)]
    assert line == [(0, 1, 0.9), (1, 2, 0.95), (1, 3, 0.95)]
    assert [row["trial"] for row in tune_report.rows_of(histories)] == [1, 0, 3, 2]
    assert {(row["gamma"], row["objective"]) for row in tune_report.gains([first, second])} == {(0.9, 1.0), (0.95, 1.0)}


def test_a_trial_that_goes_back_loses_its_later_reports():
    found = history(0, (1, 1.0, 0.5, None), (2, 2.0, 0.5, None), (3, 3.0, 0.5, None), (2, 7.0, 0.6, "x"))
    assert [x["objective"] for x in found.reports] == [1.0, 7.0]


@pytest.mark.parametrize(
    ("best", "verdict"),
    [
        ([9.0, 9.5, 10.0, 9.0, 9.0], "found"),
        ([1.0, 2.0, 3.0, 1.0, 2.0], "holds zero"),
        ([0.1, 0.1, 0.1, 0.1, 0.1], "worse"),
        ([9.0, 9.5, 10.0, 9.0], "too few"),
        ([9.0], "too few"),
    ],
)
def test_the_verdict_rests_on_the_interval(best, verdict):
    found = tune_report.compare({"default": [1.0, 2.0, 3.0, 1.0, 2.0], "best": best})
    assert verdict in found["verdict"] and (found["interval"] is None) == (len(best) < 5)


def test_the_check_has_no_difference_if_all_runs_failed():
    assert tune_report.compare({"default": [1.0] * 5, "best": [math.nan] * 5})["difference"] is None


@needs_tune
def test_members_report_in_the_order_of_their_returns(tmp_path):
    """Of three: one that is behind is waited for, one with a better return goes first, one that has failed does not."""
    trial = importlib.import_module("benchmarks.learning.tune_trial")
    me = SimpleNamespace(plan=SimpleNamespace(folder=tmp_path, members=3), trial_id="x_00000")
    others = [history(i, (1, 1.0, 0.9, None), state="reported") for i in (1, 2)]
    histories = {x.id: x for x in [history(0, (1, 1.0, 0.9, None), state="reported"), *others]}

    def arrive(i: int, objective: float) -> None:
        (tmp_path / f"x_{i:05}").mkdir(exist_ok=True)
        (tmp_path / f"x_{i:05}" / trial.ARRIVAL).write_text(json.dumps({"intervals": 2, "objective": objective}))

    def is_my_turn() -> bool:
        return trial.Trial.is_my_turn(me, {"intervals": 2, "objective": 5.0}, histories)

    arrive(1, 4.0)
    assert not is_my_turn(), "the second has not arrived"
    arrive(2, math.nan)
    assert is_my_turn()
    arrive(2, 6.0)
    assert not is_my_turn(), "the second is better, and has not reported"
    others[1].reports.append(others[1].reports[0] | {"intervals": 2})
    assert is_my_turn()
    others[1].reports.pop()
    others[1].state = "failed"
    assert is_my_turn()
    del histories["x_00001"]
    assert not is_my_turn(), "one has not even started"
    histories["x_00001"] = others[0]
    (tmp_path / "x_00001" / trial.ARRIVAL).write_text(json.dumps({"intervals": 3, "objective": 9.0}))
    assert is_my_turn(), "the first has missed this interval: it waits for us"


@needs_tune
def test_a_copy_has_other_settings_than_its_donor():
    """Else both would be the same run; where every draw gives the same, there is an end to drawing."""
    engine = importlib.import_module("benchmarks.learning.tune_engine")
    common = {"time_attr": "intervals", "metric": "objective", "mode": "max"}
    scheduler = engine.Pbt(hyperparam_mutations={"gamma": [0.9, 0.99]}, **common)
    donor = SimpleNamespace(config={"gamma": 0.99})
    drawn = {scheduler._get_new_config(None, donor)[0]["gamma"] for _ in range(50)}
    assert drawn == {0.9}
    scheduler = engine.Pbt(hyperparam_mutations={}, custom_explore_fn=lambda settings: settings, **common)
    assert scheduler._get_new_config(None, donor)[0] == donor.config


@needs_tune
def test_a_copy_takes_the_place_of_a_run_only_when_it_is_whole(tmp_path):
    trial = importlib.import_module("benchmarks.learning.tune_trial")
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        for name in trial.RUN_FILES:
            (folder / name).write_text(folder.name)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        trial.copy_run(tmp_path / "a", tmp_path / "b")
    assert trial.is_whole(tmp_path / "b") and not trial.is_whole(tmp_path / "a")
    assert {(tmp_path / "b" / name).read_text() for name in trial.RUN_FILES} == {"b"}
    trial.copy_run(tmp_path / "b", tmp_path / "a")
    assert {(tmp_path / "a" / name).read_text() for name in trial.RUN_FILES} == {"b"}
    assert not (tmp_path / "a.old").exists()


@needs_tune
def test_a_resumed_member_goes_on_from_its_own_folder(tmp_path):
    """Unless a copy was to be made whose donor's checkpoint is still there."""
    progress = importlib.import_module("benchmarks.learning.tune_progress")
    journal = sweep.Journal(tmp_path / "journal.jsonl", {}, resume=False)
    reporter = progress.Reporter(journal, SimpleNamespace(folder=tmp_path / "trials", seeds=1, last=3), trials=3)
    reporter.note("x_00000", "started", settings={"gamma": 0.9})
    (tmp_path / "donor").mkdir()

    def has_its_own(gamma: float, path: str) -> bool:
        checkpoint = SimpleNamespace(path=str(tmp_path / path))
        return reporter.has_its_own(SimpleNamespace(trial_id="x_00000", config={"gamma": gamma}, checkpoint=checkpoint))

    assert not has_its_own(0.9, "donor"), "it has no run yet"
    folder = tmp_path / "trials" / "x_00000" / "seed0"
    folder.mkdir(parents=True)
    for name in ("checkpoint.pt", "config.json", "metrics.jsonl"):
        (folder / name).write_text("")
    assert has_its_own(0.9, "donor") and has_its_own(0.99, "gone")
    assert not has_its_own(0.99, "donor")


@needs_tune
def test_numbers_of_trials_are_those_of_the_journal(tmp_path):
    """Also of those that come after one that was dropped."""
    progress = importlib.import_module("benchmarks.learning.tune_progress")
    path = tmp_path / "journal.jsonl"
    journal = sweep.Journal(path, {}, resume=False)
    for name, state in (("a", "started"), ("b", "started"), ("b", "dropped")):
        journal.note(name, state, settings={})
    journal.file.close()
    reporter = progress.Reporter(sweep.Journal(path, {}, resume=True), SimpleNamespace(last=3), trials=3)
    assert reporter.note("c", "started", settings={}).number == read_histories(path)["c"].number == 2


@needs_tune
def test_a_run_that_failed_does_not_count_in_the_check(tmp_path, monkeypatch):
    """Of a run that was broken off, the return of its last episodes says nothing."""

    def run_all(jobs, _place, _options, journal) -> None:
        for i, job in enumerate(jobs):
            make_run(tmp_path / "check" / "runs" / job.name, [make_line(1000, 10.0 * (i + 1))])
            journal.note(job.name, "failed" if i == 0 else "finished")

    monkeypatch.setattr(tune_report.sweep, "run_all", run_all)
    options = tune.Options(
        script="ppo", env_id="CartPole-v1", total_timesteps=1000, check_seeds=3, jobs=1, out=tmp_path
    )
    check = tune_report.check_on_fresh_seeds(options, {"gamma": 0.9})
    returns = [*check["returns"]["default"], *check["returns"]["best"]]
    assert returns.count(None) == 1 and len(returns) == 6 and check["difference"] == 0


@needs_tune
def test_the_table_of_what_runs_is_written_in_place(tmp_path, capsys):
    progress = importlib.import_module("benchmarks.learning.tune_progress")
    journal = sweep.Journal(tmp_path / "journal.jsonl", {}, resume=False)
    plan = SimpleNamespace(folder=tmp_path / "trials", seeds=1, last=3)
    reporter = progress.Reporter(journal, plan, trials=3)
    report = {"intervals": 1, "steps": 1000, "objective": 12.5, "returns": [12.5], "donor": None}
    for name in ("x_00000", "x_00001"):
        reporter.note(name, "started", settings={"gamma": 0.9})
        reporter.note(name, "reported", settings={"gamma": 0.9}, **report)
    reporter.note("x_00001", "failed", why="exit code 2")
    make_run(tmp_path / "trials" / "x_00000" / "seed0", [make_line(1234, 1.0)])
    lines = reporter.lines(["x_00000"])
    assert "1/3 trials ended, 1 failed, best so far 12.5 (trial 0)" in lines[0]
    assert [x.split() for x in lines[1:]] == [
        ["trial", "steps", "return", "settings"],
        ["0", "1,234", "12.5", "gamma=0.9"],
    ]
    reporter.table.draw(lines)
    reporter.say("news")
    shown = capsys.readouterr()
    assert shown.err.endswith(f"gamma=0.9\n\x1b[{len(lines)}F\x1b[J") and shown.out == "news\n"


@needs_tune
def test_a_resumed_asha_knows_what_was_reported(monkeypatch):
    engine = importlib.import_module("benchmarks.learning.tune_engine")
    histories = {x.id: x for x in (history(0, (1, 9.0, 0.9, None)), history(1, (1, 8.0, 0.9, None)))}
    monkeypatch.setattr(engine.Reporter, "current", SimpleNamespace(histories=histories))
    scheduler = engine.Asha(time_attr="intervals", metric="objective", mode="max", max_t=9, reduction_factor=3)
    trials = [SimpleNamespace(trial_id=f"x_0000{i}") for i in range(4)]
    for trial in trials:
        scheduler.on_trial_add(None, trial)
    decisions = [
        scheduler.on_trial_result(None, trial, {"intervals": 1, "objective": value})
        for trial, value in zip(trials[2:], (1.0, 10.0), strict=True)
    ]
    assert decisions == ["STOP", "CONTINUE"]


@needs_tune
@pytest.mark.alone
def test_a_search_from_end_to_end(tmp_path, capsys):
    """Of the trials with 3 minibatches each one fails: 3 does not divide a rollout."""
    search = ("--search", "num_minibatches=[2,3]", "learning_rate=loguniform(1e-4,1e-2)", "--scheduler", "asha")
    done = benchmark("tune", *TINY, *search, "--trials", 5, "--total-timesteps", 3000, "--interval", 1000,
                     "--check-seeds", 2, "--jobs", 2, "--out", tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("5 trials of 3,000 steps, 2 at a time") and "Traceback" not in done.stderr
    assert [x for x in done.stderr.splitlines() if x and "steps" not in x] == [], "Ray says what nobody can act upon"
    found = read_histories(tmp_path / "journal.jsonl")
    states = {x.id: x.state for x in found.values()}
    assert len(states) == 5 and all(
        (x.settings["num_minibatches"] == 3) == (states[x.id] == "failed") for x in found.values()
    )
    assert "failed" in states.values() and "finished" in states.values()
    assert "exit code 2; its last lines:\n    error:" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["best"]["settings"]["num_minibatches"] == 2 and report["check"]["interval"] is None
    assert report["best"]["command"] in done.stdout and "--learning-rate=" in report["best"]["command"]
    assert report["check"]["verdict"] in done.stdout and len(report["check"]["returns"]["best"]) == 2
    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert len(rows) == 5 and rows[0]["state"] == "finished"
    assert {path.name for path in tmp_path.glob("*.png")} == {"objective.png", "parallel.png"}

    before = runs_of(tmp_path)
    assert benchmark_here(capsys, "tune", "--resume", tmp_path).returncode == 0
    assert runs_of(tmp_path) == before
    again = benchmark_here(capsys, "tune", *TINY, *search, "--out", tmp_path)
    assert again.returncode == 2 and "--resume" in again.stderr


@needs_tune
@pytest.mark.alone
def test_a_member_that_copies_goes_on_at_its_donors_return(tmp_path):
    """Two members, one of which hardly learns: it takes over the other's weights, log and random numbers."""
    flags = ("--search", "learning_rate=[1e-7,3e-3]", "--perturb", "learning_rate=*1.01", "--scheduler", "pbt")
    done = benchmark("tune", *TINY, *flags, "--population", 2, "--total-timesteps", 24000, "--interval", 6000,
                     "--check-seeds", 0, "--search-seed", 2, "--out", tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = read_histories(tmp_path / "journal.jsonl")
    assert sorted(x.settings["learning_rate"] for x in found.values()) == [1e-7, 3e-3]
    copies = [(x, i) for x in found.values() for i, report in enumerate(x.reports) if report["donor"]]
    assert copies, done.stdout
    for member, i in copies:
        donor = found[member.reports[i]["donor"]]
        interval = member.reports[i]["intervals"]
        then = next(x for x in reversed(donor.reports) if x["intervals"] < interval)
        assert member.reports[i]["objective"] > 0.8 * then["objective"] > 25
        assert member.reports[i]["settings"]["learning_rate"] == pytest.approx(3e-3, rel=0.05)
        assert "went on from trial" in done.stdout
    member, donor = copies[0][0], found[copies[0][0].reports[copies[0][1]]["donor"]]
    logs = [(tmp_path / "trials" / x.id / "seed0" / "metrics.jsonl").read_text() for x in (member, donor)]
    assert logs[0][:5000] == logs[1][:5000], "it has not taken over the donor's log"
    assert {path.stem for path in tmp_path.glob("*.png")} == {"objective", "parallel", "lineage", "schedules"}
    assert len(json.loads((tmp_path / "report.json").read_text())["best"]["schedule"]) == 4


@needs_tune
@pytest.mark.alone
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_stopped_says_how_to_go_on(tmp_path, signum):
    search = ("--search", "gamma=[0.9,0.99]", "--total-timesteps", 10**7, "--interval", 2000, "--out", tmp_path)
    process = started(*TINY, *search, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not any(x.reports for x in read_histories(tmp_path / "journal.jsonl").values()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signum)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[1:] == ["", f"stopped; to go on: ./run.sh tune --resume {tmp_path}"]
    sizes = runs_of(tmp_path)
    time.sleep(1)
    assert sizes == runs_of(tmp_path), "a run has outlived the search"


@needs_tune
@pytest.mark.alone
def test_after_sigkill_no_trial_is_run_again_and_none_is_lost(tmp_path):
    search = ("--search", "learning_rate=loguniform(1e-4,1e-2)", "--trials", 4, "--jobs", 2, "--check-seeds", 0)
    process = started(*TINY, *search, "--total-timesteps", 24000, "--out", tmp_path, stderr=subprocess.DEVNULL)
    journal = tmp_path / "journal.jsonl"
    while not ended(tmp_path):
        assert process.poll() is None
        time.sleep(0.1)
    while len(read_histories(journal)) < 3 or not any(
        x.reports and not x.has_ended for x in read_histories(journal).values()
    ):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while (before := runs_of(tmp_path)) != (time.sleep(1), runs_of(tmp_path))[1]:
        assert time.monotonic() < deadline, "a run has outlived the search"
    whole, known = ended(tmp_path), set(read_histories(journal))
    with journal.open("a") as file:
        file.write('{"run": "x", "sta')  # as if cut off in the middle of a line

    done = benchmark("tune", "--resume", tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_histories(journal)
    assert len(found) == 4 and known <= set(found) and all(x.state == "finished" for x in found.values())
    after = runs_of(tmp_path)
    for path in before:
        assert (after[path] == before[path]) == (path.parts[-3] in whole), path
    ends = [line["run"] for line in sweep.read_journal(journal)[1:] if line["state"] == "finished"]
    assert len(ends) == len(set(ends)) == 4
    for path in after:
        assert sweep.last_step(path) > 21000


@needs_tune
@pytest.mark.alone
def test_after_sigkill_no_member_of_a_population_goes_back(tmp_path):
    """Ray Tune knows of checkpoints that are some intervals old, or of none; each member's own run is newer."""
    flags = ("--search", "learning_rate=[1e-4,1e-3]", "--perturb", "learning_rate=*1.1", "--scheduler", "pbt")
    process = started(*TINY, *flags, "--population", 2, "--total-timesteps", 24000, "--interval", 3000,
                      "--check-seeds", 0, "--out", tmp_path, stderr=subprocess.DEVNULL)  # fmt: skip
    journal = tmp_path / "journal.jsonl"
    while min([x.last["intervals"] for x in read_histories(journal).values()] or [0]) < 5:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    known = len(sweep.read_journal(journal))
    before = {name: x.last["intervals"] for name, x in read_histories(journal).items()}
    done = benchmark("tune", "--resume", tmp_path)
    assert done.returncode == 0, done.stderr
    later = [line for line in sweep.read_journal(journal)[known:] if line["state"] == "reported"]
    first = {line["run"]: line["intervals"] for line in reversed(later)}
    assert all(first[name] > interval for name, interval in before.items())
    assert all(x.state == "finished" for x in read_histories(journal).values())
