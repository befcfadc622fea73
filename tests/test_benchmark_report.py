"""./run.sh report on synthetic run folders."""

import json
import shlex
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tyro
from benchmark_helpers import benchmark, make_line, make_run, refusal

from benchmarks.common import plots, runs, stats
from benchmarks.common.programs import load_script
from benchmarks.learning import report, sweep

COMPILE = {"script": "ppo_torchcompile.py", "args": {"compile": True, "cudagraphs": True}}


def curve(score: float, speed: float = 1000, total: int = 500_000) -> list[dict]:
    """Ten lines of a log that rise to a score within the first half, a hundred episodes each."""
    steps = np.linspace(total / 10, total, 10, dtype=int).tolist()
    return [make_line(step, min(score, score * 2 * step / total), 100, speed) for step in steps]


@pytest.fixture
def folder(tmp_path):
    """Runs of PPO on CartPole, eager and compiled, some of them spoilt, and one of an unknown environment."""
    for seed, score in enumerate((480, 484, 488, 492)):
        make_run(tmp_path / f"e{seed}", curve(score), seed=seed, total=500_000)
        make_run(tmp_path / f"c{seed}", curve(score + 20, speed=3000), seed=seed, total=500_000, **COMPILE)
    make_run(tmp_path / "crashed", curve(480)[:4], seed=8, total=500_000)
    make_run(tmp_path / "no_episode", [make_line(500_000, None)], seed=9, total=500_000)
    make_run(tmp_path / "twice", curve(999), seed=0, total=500_000)
    make_run(tmp_path / "other", ["{broken\n", *curve(7, total=1000)], args={"env_id": "Other-v0"})
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_speed_is_that_of_a_run_that_was_not_paused(tmp_path):
    """Compiling in its first half and a pause of an hour in its second one do not count."""
    lines = curve(480, speed=3000)
    pause = {len(lines) // 4: 100, 3 * len(lines) // 4: 3600}
    for i, late in pause.items():
        for line in lines[i:]:
            line["seconds"] += late
    run = runs.read_run(make_run(tmp_path / "paused", lines, total=500_000))
    assert report.steady_speed(run) == pytest.approx(3000, rel=1e-3)


@pytest.mark.slow
def test_report_from_end_to_end(folder, tmp_path):
    done = benchmark("report", folder, "--out", tmp_path / "out" / "deep")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out" / "deep").iterdir()}
    assert names == {"report.md", "report.json", "learning_curves.png", "curves.json.gz"}
    text = (tmp_path / "out" / "deep" / "report.md").read_text()
    assert text in done.stdout
    assert str(tmp_path) not in text
    result = json.loads((tmp_path / "out" / "deep" / "report.json").read_text())
    assert set(result["provenance"]) == {"date", "command", "commit", "uncommitted_changes", "versions", "machine"}
    assert (
        result["provenance"]["command"] == f"./run.sh report {folder.name} --out deep"
    )  # without this machine's folders
    rows = {(row["env_id"], row["variant"]): row for row in result["rows"]}
    eager, compiled, other = rows["CartPole-v1", "eager"], rows["CartPole-v1", "compile"], rows["Other-v0", "eager"]

    assert eager["seeds"] == [0, 1, 2, 3] and eager["mean"] == 486 and eager["iqm"] == 486
    assert eager["interval"] is None  # of four seeds
    assert report.verdict(eager) == report.verdict(compiled) == "too few seeds" and "| too few seeds |" in text
    assert compiled["steps_per_second"] == pytest.approx(3000)
    assert report.verdict(other) == "no published score" and other["interval"] is None
    assert "1 broken line in" in other["notes"][0]
    assert {x["run"] for x in eager["left_out"]} == {"crashed", "no_episode", "twice"}
    for line in (
        "ended after 200,000 of 500,000 steps",
        "no episode ended",
        "twice: seed 0 with the same settings is in e0",
    ):
        assert line in text

    assert eager["settings"] == {}

    (pair,) = result["pairs"]
    assert pair["difference"] == 20 and pair["interval"] is None and pair["agree"] is None
    assert pair["speed_ratio"] == pytest.approx(3)


def test_settings_that_are_not_the_defaults_are_told(tmp_path):
    """And stored; defaults, other scripts' settings and what names the run are not."""
    args = {"num_envs": 8, "gamma": 0.99, "learning_rate": 1e-3, "override": [], "run_dir": "x", "of_old": 3}
    make_run(tmp_path / "a", [make_line(1000, 1.0, 1)], args=args)
    (row,) = report.write_report([tmp_path], tmp_path / "out")["rows"]
    assert row["settings"] == {"learning_rate": 1e-3, "num_envs": 8}
    assert "all with learning_rate = 0.001, num_envs = 8" in (tmp_path / "out" / "report.md").read_text()


def test_a_row_says_how_to_train_its_runs(tmp_path):
    """By a command of `sweep` that plans runs of these settings; none for runs that differ, or changed on the way."""
    args = {"num_envs": 8, "anneal_lr": False, "env_kwargs": '{"goal": 3}', "compile": True, "run_dir": "x"}
    for seed in (3, 4):
        make_run(tmp_path / f"a{seed}", curve(400), script="ppo_torchcompile.py", seed=seed, total=500_000, args=args)
    resumed = [{"global_step": 1000, "commit": "c0ffee", "changed": {"gamma": 0.9}}]
    make_run(tmp_path / "b", curve(400), script="dqn.py", total=500_000, resumed=resumed)
    older = {"a_flag_of_old": 1, "env_id": "Acrobot-v1"}
    make_run(tmp_path / "c", curve(400), script="dqn.py", total=500_000, args=older)
    rows = report.write_report([tmp_path], tmp_path / "out")["rows"]
    assert [row["command"] for row in rows if row["script"] == "dqn"] == [None, None]
    (row,) = [row for row in rows if row["script"] == "ppo"]
    assert f"- `{row['command']}`" in (tmp_path / "out" / "report.md").read_text()
    program, name, *words = shlex.split(row["command"])
    jobs = sweep.plan(tyro.cli(sweep.Options, args=words))
    assert [program, name, len(jobs)] == ["./run.sh", "sweep", 2]
    planned = [vars(tyro.cli(load_script(Path(job.arguments[1])).Args, args=job.arguments[2:])) for job in jobs]
    for seed, x in zip((3, 4), planned, strict=True):
        wanted = args | {"run_dir": None, "seed": seed, "env_id": "CartPole-v1", "total_timesteps": 500_000}
        assert {name: x[name] for name in wanted} == wanted
    cut = report.write_report([tmp_path], tmp_path / "cut", until=200_000)["rows"]
    assert [row["command"] for row in cut] == [None] * 3, "the learning rate fell towards step 500,000"


def test_scripts_are_compared_at_the_same_steps_and_seconds(tmp_path):
    """The second one is ten times as fast and ends after a tenth of the steps; where one has ended, there is none."""
    for seed in (1, 2):
        make_run(tmp_path / f"slow{seed}", curve(400, speed=1000), seed=seed, total=500_000)
        fast = curve(300, speed=10_000, total=50_000)
        make_run(tmp_path / f"fast{seed}", fast, seed=seed, total=50_000, script="dqn.py")
    rows = {row["script"]: row["milestones"] for row in report.write_report([tmp_path], tmp_path / "out")["rows"]}
    marks = [50_000, 130_000, 250_000, 500_000]
    assert rows["ppo"]["global_step"] == [[mark, [x, x]] for mark, x in zip(marks, (80, 160, 400, 400), strict=True)]
    assert rows["dqn"]["global_step"] == [[50_000, [300, 300]], *([mark, None] for mark in marks[1:])]
    assert rows["ppo"]["seconds"][0] == [50, [80, 80]] and rows["dqn"]["seconds"][0] == [50, None]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## CartPole-v1, on the way" in text and "| `dqn`, eager | 2 | 300 | - | - | - |" in text


def test_scores_on_the_way_are_of_the_last_tenth():
    """Not of 100 episodes, which one environment takes long for; where none ended in it, of those just before."""
    lines = [make_line(step, float(step), 10) for step in (100, 800, 910, 950, 1000)]
    run = runs.Run(Path(), {}, lines)
    assert report.scores_at([run], 1000, "global_step") == [pytest.approx((910 + 950 + 1000) / 3)]
    assert report.scores_at([run], 700, "global_step") == [100]
    assert report.scores_at([run], 1200, "global_step") is None
    assert np.isnan(report.recent_return(runs.Run(Path(), {}, [make_line(5, None)]), 0, "global_step"))


def test_settings_of_one_script_are_compared_too(tmp_path):
    """Each in a colour of its own."""
    for number in (1, 4, 16):
        own = {"total": 500_000, "args": {"num_envs": number}}
        make_run(tmp_path / f"{number}", curve(100 + number), script="sac_continuous_action.py", **own)
    rows = report.write_report([tmp_path], tmp_path / "out")["rows"]
    assert [row["variant"] for row in rows] == [f"eager --num-envs {number}" for number in (1, 4, 16)]
    assert [row["milestones"]["global_step"][-1] for row in rows] == [[500_000, [100 + x]] for x in (1, 4, 16)]
    assert len(set(plots.shades([row["variant"] for row in rows]).values())) == 3
    assert plots.shades(["eager", "compile", "compile --bf16"]) == {}


@pytest.mark.parametrize(
    ("scores", "steps", "expected"),
    [
        ([510, 511, 512, 513, 514], 500_000, "above"),
        ([500, 500, 500, 500, 405], 500_000, "no difference seen"),  # CleanRL: 490.04 +- 6.12 of three
        ([480, 484, 490, 496, 499], 499_000, "no difference seen"),
        ([466, 467, 468, 469, 470], 500_000, "below"),
        ([510, 511, 512, 513], 500_000, "too few seeds"),
        ([510, 511, 512, 513, 514], 100_000, "not comparable: 500,000 steps"),
        ([510, 511, 512, 513, 514], 1_000_000, "not comparable: 500,000 steps"),
    ],
)
def test_a_verdict_compares_means(scores, steps, expected):
    published = report.published_score(report.read_reference()["ppo", "CartPole-v1"])
    assert published["mean"] == 490.04 and published["seeds"] == 3
    row = {"scores": scores, "seeds": list(range(len(scores))), "steps": steps, "published": published}
    assert report.verdict(row) == expected


@pytest.mark.slow
def test_curves_are_kept_and_redrawn(folder, tmp_path):
    """The figure is that of the curves in the report's folder: it comes out again, to the byte."""
    out = tmp_path / "out"
    report.write_report([folder], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(before["curves.json.gz"]) < 3000
    panels = report.unpack_curves(before["curves.json.gz"])
    assert report.pack_curves(panels) == before["curves.json.gz"]
    (run,) = panels["Other-v0"]["eager"] if "Other-v0" in panels else panels["ppo", "Other-v0"]["eager"]
    assert (run.steps, runs.final_return(run)) == (1000, 7)
    (out / "learning_curves.png").unlink()
    report.write_summary(out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_resumed_run_names_its_commits(tmp_path):
    resumed = [{"global_step": 1000, "commit": "beef"}, {"global_step": 2000, "commit": "beef"}]
    make_run(tmp_path / "a", curve(480), total=500_000, resumed=resumed)
    (row,) = report.write_report([tmp_path], tmp_path / "out")["rows"]
    assert row["commits"] == ["beef", "c0ffee"] and row["notes"] == [
        "a: resumed at step 1,000 and 2,000; commits c0ffee, then beef"
    ]


def test_settings_that_a_resumed_run_changed_count(tmp_path):
    """As those that it ended with: it is no longer whole by its first budget, and its row says what was changed."""
    resumed = [{"global_step": 1000, "commit": "c0ffee", "changed": {"learning_rate": 1e-3}}]
    make_run(tmp_path / "a", curve(480), total=500_000, resumed=resumed)
    (row,) = report.write_report([tmp_path], tmp_path / "out")["rows"]
    assert row["notes"] == ["a: resumed at step 1,000; with learning_rate = 0.001", "all with learning_rate = 0.001"]
    assert runs.read_run(tmp_path / "a").args["learning_rate"] == 1e-3
    resumed[0]["changed"] = {"total_timesteps": 1_000_000}
    make_run(tmp_path / "b" / "a", curve(480), total=500_000, resumed=resumed)
    (row,) = report.write_report([tmp_path / "b"], tmp_path / "out_b")["rows"]
    assert not row["seeds"] and row["left_out"][0]["why"] == "ended after 500,000 of 1,000,000 steps"


def test_quoted_patterns(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert [x.name for x in report.expand((Path("e*"), Path("c1")))] == ["e0", "e1", "e2", "e3", "empty", "c1"]
    assert report.expand((Path("none*"),)) == [Path("none*")]


def test_one_seed_gives_no_interval_and_no_verdict_on_the_pair(tmp_path):
    make_run(tmp_path / "a", curve(480), total=500_000)
    make_run(tmp_path / "b", curve(400), total=500_000, **COMPILE)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert result["rows"][0]["interval"] is None and result["pairs"][0]["agree"] is None
    assert "too few seeds" in (tmp_path / "out" / "report.md").read_text()


def test_files_that_differ_are_noted(tmp_path):
    """Runs of two copies of a file that have its name in common."""
    for seed in (1, 2):
        make_run(tmp_path / f"{seed}", curve(480), seed=seed, total=500_000, blob=f"{seed:040}")
    result = report.write_report([tmp_path], tmp_path / "out")
    assert result["rows"][0]["notes"] == ["these runs are of 2 different files of this name"]


@pytest.mark.parametrize(
    ("name", "device", "counts"),
    [("log_every", "cpu", True), ("cudagraphs", "cpu", False), ("cudagraphs", "cuda", True)],
)
def test_settings_that_differ_are_noted(tmp_path, name, device, counts):
    for seed in (0, 1):
        args = {"compile": True, "cudagraphs": True, name: bool(seed)}
        make_run(tmp_path / f"{seed}", curve(480), seed=seed, total=500_000, args=args, device=device)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert result["rows"][0]["notes"] == ["the runs of this row differ in their settings"] * counts


def test_runs_of_different_settings_get_no_verdict(tmp_path):
    """Neither beside CleanRL's score nor as one side of a pair, however many there are."""
    for seed in range(6):
        args = {"device": "cpu" if seed else "auto"}
        make_run(tmp_path / f"e{seed}", curve(489 + seed), seed=seed, total=500_000, args=args)
        make_run(tmp_path / f"c{seed}", curve(489 + seed), seed=seed, total=500_000, **COMPILE)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert [report.verdict(row) for row in result["rows"]] == ["settings differ within a row", "no difference seen"]
    text = (tmp_path / "out/report.md").read_text()
    assert "| settings differ within a row | 1.00x |" in text and text.count("| settings differ within a row |") == 2


def test_a_report_of_fewer_runs_does_not_replace_one_of_more(tmp_path, capsys):
    for seed in (1, 2):
        make_run(tmp_path / f"{seed}", curve(480), seed=seed, total=500_000)
    for _ in range(2):
        report.write_report([tmp_path], tmp_path / "out")
    before = (tmp_path / "out/report.md").read_text()
    error = refusal(report.main, report.Options((tmp_path / "1",), tmp_path / "out"), capsys)
    assert "has 2 runs of ppo on CartPole-v1 (eager), yours 1" in error
    for seed in (1, 2):
        make_run(tmp_path / f"shorter/{seed}", curve(480, total=250_000), seed=seed, total=250_000)
        make_run(tmp_path / f"compiled/{seed}", curve(480), seed=seed, total=500_000, **COMPILE)
    error = refusal(report.main, report.Options((tmp_path / "shorter",), tmp_path / "out"), capsys)
    assert "has runs of 500,000 steps of ppo on CartPole-v1 (eager), yours 250,000" in error
    error = refusal(report.main, report.Options((tmp_path / "compiled",), tmp_path / "out"), capsys)
    assert "has 2 runs of ppo on CartPole-v1 (eager), yours 0" in error
    assert (tmp_path / "out/report.md").read_text() == before


def test_runs_of_different_lengths_are_compared_at_the_shortest(tmp_path):
    """The long run's log has a line at 200,000 steps, where it had 160; the next one is beyond the short run's end."""
    medium = {"script": COMPILE["script"], "args": COMPILE["args"] | {"matmul_precision": "medium"}}
    make_run(tmp_path / "short", curve(480, total=250_000), total=250_000, **COMPILE)
    make_run(tmp_path / "long", curve(400, total=1_000_000), total=1_000_000, **medium)
    result = report.write_report([tmp_path], tmp_path / "out")
    names = [(row["variant"], row["common_steps"], row["common_scores"]) for row in result["rows"]]
    assert names == [("compile", 250_000, [480.0]), ("compile --matmul-precision medium", 250_000, [160.0])]
    assert "| compile --matmul-precision medium | 1 | 250,000 | 160.0 |" in (tmp_path / "out/report.md").read_text()


def test_runs_are_not_compared_where_episodes_ended_long_before(tmp_path):
    """As with many environments, all of whose episodes end together; nor are whole runs of different lengths."""
    lines = [make_line(100_000, 50.0, 64), make_line(250_000, 400.0, 64), make_line(1_000_000, 400.0, 64)]
    make_run(tmp_path / "long", lines, total=1_000_000)
    make_run(tmp_path / "short", [make_line(170_000, 480.0, 64)], total=170_000, **COMPILE)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert not any("common_steps" in row for row in result["rows"]) and result["pairs"] == []


def test_notes_tell_which_episodes_count(tmp_path):
    make_run(tmp_path / "few", [make_line(500_000, 400.0, 50)], total=500_000)
    make_run(tmp_path / "apex", curve(480), script="apex_dqn_ray.py", total=500_000)
    notes = {row["script"]: row["notes"] for row in report.write_report([tmp_path], tmp_path / "out")["rows"]}
    assert notes["ppo"] == ["a run has only 50 episodes; its return is their mean, from the first step on"]
    assert len(notes["apex_dqn_ray"]) == 1 and "whose epsilon is below 1 %" in notes["apex_dqn_ray"][0]


def test_longer_runs_count_as_they_were_after_some_steps(tmp_path, capsys):
    """What was changed after those steps does not count, what was changed before does."""
    changes = [(1000, {"gamma": 0.9, "total_timesteps": 900_000}), (500_000, {"gamma": 0.5})]
    resumed = [{"global_step": step, "commit": "c0ffee", "changed": changed} for step, changed in changes]
    make_run(tmp_path / "long", curve(400, total=1_000_000), total=1_000_000, resumed=resumed)
    make_run(tmp_path / "short", curve(480, total=250_000), seed=2, total=250_000, args={"gamma": 0.9})
    make_run(tmp_path / "crashed", curve(400, total=1_000_000)[:1], seed=3, total=1_000_000, args={"gamma": 0.9})
    (row,) = report.write_report([tmp_path], tmp_path / "out", until=200_000)["rows"]
    assert row["scores"] == [160.0, 480.0] and row["steps"] == 200_000 and "common_steps" not in row
    assert row["notes"][0] == "long: as it was after 200,000 of 900,000 steps"
    assert "differ in their settings" not in str(row["notes"])
    assert [x["run"] for x in row["left_out"]] == ["crashed"]
    assert "--until is a number of steps" in refusal(report.main, report.Options((tmp_path,), until=0), capsys)


def test_a_pair_is_compared_at_the_same_number_of_steps(tmp_path):
    make_run(tmp_path / "long", curve(400, total=1_000_000), total=1_000_000)
    make_run(tmp_path / "short", curve(480, total=250_000), total=250_000, **COMPILE)
    (pair,) = report.write_report([tmp_path], tmp_path / "out")["pairs"]
    assert pair["difference"] == 480 - 160


def test_a_short_run_of_another_variant_does_not_shorten_a_pair(tmp_path):
    """Eager and compiled are as long as each other; the third variant learnt for a quarter of that."""
    make_run(tmp_path / "eager", curve(400, total=1_000_000), total=1_000_000)
    make_run(tmp_path / "compiled", curve(440, total=1_000_000), total=1_000_000, **COMPILE)
    bf16 = {"script": "ppo.py", "args": {"bf16": True}}
    make_run(tmp_path / "short", curve(480, total=250_000), total=250_000, **bf16)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert "common_scores" in result["rows"][0] and result["pairs"][0]["difference"] == 440 - 400


def test_a_pair_of_other_settings_gets_no_verdict(tmp_path):
    make_run(tmp_path / "eager", curve(400), total=500_000, args={"learning_rate": 1e-2})
    make_run(tmp_path / "compiled", curve(440), total=500_000, **COMPILE)
    (pair,) = report.write_report([tmp_path], tmp_path / "out")["pairs"]
    assert report.pair_cells(pair)[4] == report.MIXED


def test_pairs_are_of_one_precision(tmp_path):
    for i, script in enumerate(("ppo.py", "ppo_torchcompile.py")):
        for bf16 in (False, True):
            flags = {"compile": True, "cudagraphs": True, "bf16": bf16}
            lines = curve(400 + 10 * i + 5 * bf16 * i)
            make_run(tmp_path / f"{i}{bf16}", lines, total=500_000, script=script, args=flags)
    pairs = report.write_report([tmp_path], tmp_path / "out")["pairs"]
    found = {(pair["eager"], pair["compiled"], pair["difference"]) for pair in pairs}
    assert found == {("eager", "compile", 10), ("eager --bf16", "compile --bf16", 15)}


def test_a_run_too_short_for_an_episode_of_another_is_no_common_length(tmp_path):
    make_run(tmp_path / "short", curve(480, total=10_000), total=10_000)
    make_run(tmp_path / "long", curve(480, total=1_000_000), total=1_000_000, **COMPILE)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert all("common_steps" not in row for row in result["rows"])
    assert "nan" not in (tmp_path / "out/report.md").read_text()


def test_runs_of_one_length_need_no_comparison_at_another(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"{seed}", curve(480), seed=seed, total=500_000)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert "common_steps" not in result["rows"][0]
    assert "same number" not in (tmp_path / "out/report.md").read_text()


def test_crashed_runs_alone_still_give_a_report(tmp_path):
    make_run(tmp_path / "a", [], total=500_000)
    result = report.write_report([tmp_path], tmp_path / "out")
    assert result["rows"][0]["seeds"] == [] and "no line in metrics.jsonl" in (tmp_path / "out/report.md").read_text()


def test_bad_input(tmp_path, capsys):
    for folders, message in ((tmp_path / "missing",), "no folder"), ((tmp_path,), "no runs in"), ((), "at least one"):
        assert message in refusal(report.main, report.Options(folders), capsys)


def test_the_reference_has_every_row():
    reference = report.read_reference()
    assert len(reference) > 150
    assert float(reference["ppo_continuous_action", "HalfCheetah-v4"]["mean_return"]) == 1442.64
    assert reference["ppo_ray", "HalfCheetah-v4"] == reference["ppo_continuous_action", "HalfCheetah-v4"]
    assert reference["ppo_ray", "CartPole-v1"] == reference["ppo", "CartPole-v1"]


def test_the_speed_of_a_run_leaves_its_first_half_out():
    """Even one that was faster, or slower, all the way."""
    seconds = np.cumsum([0.001] * 60 + [0.1] * 40)
    lines = [make_line(100 * (i + 1), 1.0, 1) | {"seconds": float(x)} for i, x in enumerate(seconds)]
    assert report.steady_speed(runs.Run(Path(), {}, lines)) == pytest.approx(1000)


def pair_of(eager: list[float], compiled: list[float]) -> dict:
    row = {"script": "ppo", "env_id": "CartPole-v1", "seeds": [1], "steps": 1, "steps_per_second": 1.0}
    scores = {"eager": eager, "compile": compiled}
    (pair,) = report.compare([row | {"variant": name, "scores": own} for name, own in scores.items()])
    return pair


def test_a_pair_agrees_only_if_zero_is_in_its_interval():
    """Whichever of the two is better, and with enough seeds of both."""
    low, high = [float(x) for x in range(5)], [100.0 + x for x in range(5)]
    assert pair_of(low, high)["agree"] is pair_of(high, low)["agree"] is False and pair_of(low, low)["agree"] is True
    assert pair_of(low, [x + 1 for x in low])["agree"] is True  # their ranges overlap
    assert pair_of(low, high[:4])["agree"] is pair_of(low[:4], high)["agree"] is None


def test_recent_returns_weigh_lines_by_their_episodes():
    """The line at which the last tenth begins is not in it."""
    run = runs.Run(Path(), {}, [make_line(900, 500.0, 9), make_line(950, 10.0, 1), make_line(1000, 20.0, 4)])
    assert report.recent_return(run, 900, "global_step") == 18


def test_a_row_is_of_iqms_and_medians(tmp_path):
    """Of eight runs, one of which is far off, longer and slower."""
    for seed in range(8):
        is_odd = seed == 7
        score, end, speed = (9000.0, 2000, 10) if is_odd else (float(seed), 1000, 1000)
        lines = [make_line(step, score, 100, speed) for step in (500, end)]
        make_run(tmp_path / str(seed), lines, seed=seed)
    (group,) = report.groups(runs.find_runs([tmp_path]))
    row, _ = report.summarize_group(group, {})
    assert (row["iqm"], row["minutes"], row["steps"]) == (3.5, 1 / 60, 1000)
    assert row["mean"] > 1000 and row["steps_per_second"] == pytest.approx(1000)
    assert row["interval"] == report.interval([np.array(row["scores"])], stats.pooled_iqm)


def test_scores_on_the_way_need_all_runs():
    """One that ended earlier has none there, and the others alone would be another sample."""
    short, long = (runs.Run(Path(), {}, [make_line(step, 1.0, 1) for step in (100, end)]) for end in (500, 1000))
    assert report.scores_at([short, long], 1000, "global_step") is None
    assert report.scores_at([short, long], 500, "global_step") == [1, 1]


def test_few_seeds_have_no_band_as_they_have_no_interval(monkeypatch):
    drawn = []
    monkeypatch.setattr(report.plots, "draw_curve", lambda *x: drawn.append(x[5]))
    for count in (report.MIN_SEEDS - 1, report.MIN_SEEDS):
        members = [runs.Run(Path(), {}, [make_line(step, 1.0, 1) for step in range(0, 500, 10)])] * count
        report.draw_panel(mock.Mock(), {"eager": members}, "global_step", None)
    assert drawn[0] is None and drawn[1] is not None


def test_a_curve_ends_where_its_shortest_run_does(monkeypatch):
    drawn = []
    monkeypatch.setattr(report.plots, "draw_curve", lambda _axis, x, *_: drawn.append(x))
    members = [runs.Run(Path(), {}, [make_line(step, 1.0, 1) for step in range(0, end + 1, 10)]) for end in (500, 900)]
    report.draw_panel(mock.Mock(), {"eager": members}, "global_step", None)
    assert drawn[0][-1] == 500


def test_a_report_does_not_replace_what_is_none(tmp_path, capsys):
    """Such as a search's, which has this name, too."""
    make_run(tmp_path / "runs/1", curve(480), total=500_000)
    (tmp_path / "report.json").write_text('{"trials": []}')
    assert "is no report" in refusal(report.main, report.Options((tmp_path / "runs",), tmp_path), capsys)
    assert (tmp_path / "report.json").read_text() == '{"trials": []}'


def test_points_on_the_way_are_round_numbers():
    """Up, so that the last one includes a run's end, but for a last rollout that passed its budget by a little."""
    known = {
        1_000_351: 1e6,
        250_088: 250_000,
        1_049_000: 1.1e6,
        397_897: 400_000,
        33.97: 34,
        34.1: 34,
        34.2: 35,
        0.8: 0.8,
    }
    assert {x: report.rounded_up(x) for x in known} == known
