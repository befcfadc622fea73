"""Reading of run folders in every state that a run can leave them in."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmark_helpers import make_line, make_run

from benchmarks.common import runs


def test_whole_run(tmp_path):
    folder = make_run(tmp_path / "a", [make_line(500, 10.0, 5), make_line(1000, 20.0, 5)], seed=7)
    run = runs.read_run(folder)
    assert (run.script, run.env_id, run.variant, run.seed) == ("ppo", "CartPole-v1", "eager", 7)
    assert run.problems == [] and run.is_complete and run.steps == 1000 and run.seconds == 1.0
    assert runs.final_return(run) == 15


def test_broken_lines_are_counted_and_skipped(tmp_path):
    lines = [
        make_line(200, 10.0, 1), "{not json}\n", "[1, 2]\n", "\n", '{"seconds": 1}\n',
        '{"global_step": null, "seconds": 1}\n',
        make_line(1000, 30.0, 1), json.dumps(make_line(1200, 99.0, 1))[:-20],
    ]  # fmt: skip
    run = runs.read_run(make_run(tmp_path / "a", lines))
    assert [line["global_step"] for line in run.lines] == [200, 1000]
    assert runs.final_return(run) == 20
    assert run.problems == ["5 broken lines in metrics.jsonl"]


def test_a_log_that_is_not_text(tmp_path):
    folder = make_run(tmp_path / "a", [make_line(1000, 30.0, 1)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00{")
    assert runs.final_return(runs.read_run(folder)) == 30


def test_missing_fields(tmp_path):
    lines = [{"global_step": 500, "seconds": 1}, {"global_step": 1000, "seconds": 2, "charts/episodic_return": 5.0}]
    run = runs.read_run(make_run(tmp_path / "a", lines))
    assert runs.final_return(run) == 5  # a line that does not say how many episodes counts as one
    assert np.isnan(run.column("charts/SPS")).all()


def test_no_episode_ended(tmp_path):
    run = runs.read_run(make_run(tmp_path / "a", [make_line(1000, None)]))
    assert math.isnan(runs.final_return(run))
    assert run.problems == ["no episode ended"]
    assert np.isnan(runs.learning_curve(run, np.linspace(0, 1000, 5))).all()


def test_crashed_run(tmp_path):
    run = runs.read_run(make_run(tmp_path / "a", [make_line(100, 1.0, 1)]))
    assert not run.is_complete
    assert run.problems == ["ended after 100 of 1,000 steps"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"args": 3}'])
def test_without_a_configuration(tmp_path, text):
    folder = make_run(tmp_path / "a", [make_line(1000, 1.0, 1)])
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    run = runs.read_run(folder)
    assert (run.script, run.env_id, run.seed) == ("unknown", "unknown", None)
    assert "config.json" in run.problems[0] and not run.is_complete
    assert runs.final_return(run) == 1


def test_empty_folder(tmp_path):
    run = runs.read_run(tmp_path)
    assert run.problems == ["no config.json", "no line in metrics.jsonl"]
    assert run.steps == 0 and not run.is_complete and math.isnan(runs.final_return(run))
    assert runs.find_runs([tmp_path]) == []


def test_budget_is_in_whole_rollouts(tmp_path):
    run = runs.read_run(make_run(tmp_path / "a", [make_line(2048, 1.0, 1)], total=3000, args={"num_steps": 2048}))
    assert run.budget == 2048 and run.is_complete


def test_a_run_of_rollouts_is_complete_with_the_last_of_them(tmp_path):
    """However many of their rows were resets, of episodes or of lives, which are no steps: here a quarter."""
    lines = [make_line(75 * i, 1.0, 1) for i in range(1, 11)]
    args = {"num_steps": 50, "num_envs": 2}
    assert runs.read_run(make_run(tmp_path / "ppo", lines, args=args)).is_complete
    assert not runs.read_run(make_run(tmp_path / "stopped", lines[:9], args=args)).is_complete
    assert not runs.read_run(make_run(tmp_path / "dqn", lines)).is_complete


def test_a_run_over_ray_is_complete_by_its_steps_and_resets(tmp_path):
    """Its lines come by steps, each with as many resets as episodes: here 18 steps and 2 resets."""
    lines = [make_line(18 * i, 1.0, 2) for i in range(1, 11)]
    args = {"num_steps": 10, "num_runners": 2, "envs_per_runner": 5, "log_every": 20}
    run = runs.read_run(make_run(tmp_path / "whole", lines, total=200, args=args))
    assert run.rollout == 100 and run.is_complete
    assert not runs.read_run(make_run(tmp_path / "stopped", lines[:9], total=200, args=args)).is_complete
    alone = runs.read_run(make_run(tmp_path / "alone", lines, total=200, args=args | {"num_runners": 0}))
    assert alone.rollout == 50 and alone.is_complete


def test_steps_that_fall_back_replace_earlier_lines(tmp_path):
    lines = [make_line(500, 1.0, 1), make_line(800, 2.0, 1), make_line(600, 3.0, 1), make_line(1000, 4.0, 1)]
    run = runs.read_run(make_run(tmp_path / "a", lines))
    assert [line["global_step"] for line in run.lines] == [500, 600, 1000]


def test_final_return_weighs_lines_by_their_episodes(tmp_path):
    lines = [make_line(250, 1000.0, 50), make_line(500, 10.0, 60), make_line(750, None), make_line(1000, 20.0, 80)]
    run = runs.read_run(make_run(tmp_path / "a", lines))
    assert runs.final_return(run) == pytest.approx((80 * 20 + 20 * 10) / 100)
    assert runs.final_return(run, episodes=40) == 20


def test_learning_curve_bins_repeat_and_end(tmp_path):
    lines = [make_line(250, 1.0, 1), make_line(300, 4.0, 2), make_line(900, 7.0, 1), make_line(990, 9.0, 1)]
    run = runs.read_run(make_run(tmp_path / "a", lines))
    curve = runs.learning_curve(run, np.linspace(0, 1200, 7))  # bins of 200 steps
    np.testing.assert_array_equal(curve, [np.nan, 3, 3, 3, 8, np.nan])
    in_seconds = runs.learning_curve(run, np.linspace(0, 1.2, 7), axis="seconds")
    np.testing.assert_array_equal(in_seconds, curve)


@pytest.mark.parametrize(
    ("script", "flags", "device", "variant"),
    [
        ("ppo.py", {}, "H200", "eager"),
        ("ppo_torchcompile.py", {"compile": False, "cudagraphs": False}, "cpu", "lean"),
        ("ppo_torchcompile.py", {"compile": True, "cudagraphs": True}, "cpu", "compile"),
        ("ppo_torchcompile.py", {"compile": True, "cudagraphs": True}, "H200", "compile+cudagraphs"),
        ("ppo_torchcompile.py", {"compile": False, "cudagraphs": True}, "H200", "cudagraphs"),
    ],
)
def test_variant(tmp_path, script, flags, device, variant):
    run = runs.read_run(make_run(tmp_path / "a", [], script=script, args=flags, device=device))
    assert run.variant == variant and run.script == "ppo"


@pytest.mark.parametrize(
    ("flags", "variation"),
    [
        ({"matmul_precision": "highest"}, ""),
        ({"matmul_precision": "medium"}, "--matmul-precision medium"),
        ({"matmul_precision": "auto"}, ""),
        ({"bf16": False}, ""),
        ({"bf16": True}, "--bf16"),
        ({"rollout": "batched", "sync_gradients": True}, ""),
        ({"rollout": "first-ready"}, "--rollout first-ready"),
        ({"sync_gradients": False}, "--no-sync-gradients"),
    ],
)
def test_runs_of_a_lower_precision_or_another_way_to_collect_are_a_group_of_their_own(tmp_path, flags, variation):
    plain, own = (runs.read_run(make_run(tmp_path / name, [], args=args)) for name, args in (("a", {}), ("b", flags)))
    assert (plain.variation, own.variation) == ("", variation)
    names = {key[2] for key in runs.groups([plain, own])}
    assert names == {"eager", f"eager {variation}".strip()}


def test_on_a_gpu_the_automatic_precision_is_a_coarser_one(tmp_path):
    run = runs.read_run(make_run(tmp_path / "a", [], args={"matmul_precision": "auto"}, device="H200"))
    assert run.variation == "--matmul-precision auto"


def test_runs_of_other_numbers_of_environments_are_groups_of_their_own(tmp_path):
    """In the order of these numbers; where all have the same, it is not said."""
    few, many = {"num_envs": 1, "gradient_steps": None}, {"num_envs": 64, "gradient_steps": 8}
    paces = {"c": few, "b": many, "a": {"num_envs": 256}}
    found = [runs.read_run(make_run(tmp_path / name, [], args=args)) for name, args in paces.items()]
    flags = ["--num-envs 1", "--num-envs 64 --gradient-steps 8", "--num-envs 256"]
    assert [key[2] for key in runs.groups(found)] == [f"eager {x}" for x in flags]
    assert [key[2] for key in runs.groups(found[1:2])] == ["eager"]
    other = runs.read_run(make_run(tmp_path / "d", [], args=few | {"env_id": "Acrobot-v1"}))
    assert [key[2] for key in runs.groups([found[0], other])] == ["eager", "eager"]


def test_groups_and_duplicate_seeds(tmp_path):
    make_run(tmp_path / "b", [make_line(400, 1.0, 1)], seed=1)
    make_run(tmp_path / "deep" / "c", [make_line(1000, 2.0, 1)], seed=1)
    make_run(tmp_path / "d", [make_line(1000, 3.0, 1)], seed=2)
    make_run(tmp_path / "e", [make_line(1000, 3.0, 1)], script="ppo_torchcompile.py", args={"compile": True})
    make_run(tmp_path / "f", [make_line(1000, 3.0, 1)], peer="sb3")
    found = runs.find_runs([tmp_path, tmp_path / "b"])
    assert len(found) == 5
    grouped = runs.groups(found)
    assert [key[2] for key in grouped] == ["eager", "compile", "sb3"]
    kept, dropped = runs.one_per_seed(grouped["ppo", "CartPole-v1", "eager"])
    assert [run.dir.name for run in kept] == ["c", "d"] and [run.dir.name for run in dropped] == ["b"]


def test_a_score_is_reached_by_the_first_hundred_episodes():
    """Exactly a hundred are enough, and a score that is just reached is reached."""
    lines = [make_line(100, 5.0, 50), make_line(200, 7.0, 49), make_line(300, 107.0, 1), make_line(400, 9.0, 1)]
    assert runs.reaches(lines, (250 + 343 + 107) / 100) == 2
    assert runs.reaches(lines[:2], 0) is None


def test_a_thinned_curve_weighs_lines_by_their_episodes(tmp_path):
    """And ends where the run does, though no episode did."""
    lines = [make_line(100, 10.0, 1), make_line(200, 20.0, 4), make_line(300, 40.0, 5), make_line(400, None)]
    thinned = runs.thin(runs.read_run(make_run(tmp_path / "a", lines)), 1)
    score = {"charts/episodic_return": 29.0, "charts/episodes": 10}
    assert thinned.lines[0] == {"global_step": 300, "seconds": 0.3} | score
    assert thinned.lines[1:] == [{"global_step": 400, "seconds": 0.4}]


def test_a_line_at_the_edge_of_two_bins_is_of_the_first():
    """Its episodes ended before it; so the last line of a run is in its last bin."""
    run = runs.Run(Path(), {}, [make_line(500, 1.0, 1), make_line(1000, 3.0, 1)])
    np.testing.assert_array_equal(runs.learning_curve(run, np.linspace(0, 1000, 3)), [1, 3])
