"""./run.sh env-pools: its models against what they are the mean of, its measurements on toy budgets, its report."""

import contextlib
import dataclasses
import heapq
import json
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from benchmark_helpers import refusal

from benchmarks.common.results import provenance, write_json
from benchmarks.pools import env_pools, scaling
from benchmarks.pools import models as pool_models

TIMES = T, TAIL, CHANCE = 0.003, 0.1, 0.05


def steps(*shape: int) -> np.ndarray:
    """Seconds that steps take, drawn at random."""
    return T + TAIL * (np.random.default_rng(1).random(shape) < CHANCE)


def simulate(num_envs: int, ready_batch: int) -> float:
    """Seconds for N steps, first ready in batches of M: when M are ready, the next step of all that are starts."""
    draw, done, now = iter(steps(100_000 + 2 * num_envs).tolist()), 0, 0.0
    finish = [next(draw) for _ in range(num_envs)]
    heapq.heapify(finish)
    while done < 100_000:
        ready = [heapq.heappop(finish) for _ in range(ready_batch)]
        now = max(now, ready[-1])
        while finish and finish[0] <= now:
            ready.append(heapq.heappop(finish))
        done += len(ready)
        for _ in ready:
            heapq.heappush(finish, now + next(draw))
    return now * num_envs / done


@pytest.mark.parametrize(
    ("model", "mean"),
    [
        (pool_models.lock_step(*TIMES, 8), steps(200_000, 8).max(1).mean()),
        (pool_models.one_after_the_other(*TIMES, 8), steps(200_000, 8).sum(1).mean()),
        (pool_models.first_ready(*TIMES), steps(400_000).mean()),
        (pool_models.rollouts(*TIMES, 8, 16), steps(20_000, 16, 8).sum(1).max(1).mean() / 16),
        (pool_models.rollouts(*TIMES, 8, 1), pool_models.lock_step(*TIMES, 8)),
        (pool_models.hybrid_lock_step(*TIMES, 4, 2), steps(100_000, 2, 4).sum(1).max(1).mean()),
        (pool_models.hybrid_first_ready(*TIMES, 2), steps(100_000, 2).sum(1).mean()),
        (simulate(8, 8), pool_models.lock_step(*TIMES, 8)),
        (simulate(8, 1), pool_models.first_ready(*TIMES)),
    ],
)
def test_models_are_the_means_of_what_they_describe(model, mean):
    assert model == pytest.approx(mean, rel=0.02)


def test_the_talk_comes_out_of_the_model():
    slow = [1000 * pool_models.one_slow_step(0.003, 0.1, length) for length in (2, 3, 5)]
    assert slow == pytest.approx([52, 35, 23], abs=1)
    waiting = 1000 * pool_models.lock_step(0.003, 0.1, 0.0098, 24)
    assert waiting == pytest.approx(24, abs=0.5)
    assert 4 < waiting / (1000 * pool_models.rollouts(0.003, 0.1, 0.0098, 24, 128)) < 5


@pytest.mark.alone
def test_measures_and_reports(tmp_path, monkeypatch, capsys):
    """Those of six sleeping environments that start quickly."""
    contestants = env_pools.sleeping_contestants

    def few(*times):
        names = ("gymnasium AsyncVectorEnv", "ours, M = N/4", "ours, M = N/4, W x V = N/2 x 2")
        return [x for x in contestants(*times) if x.name in names]

    monkeypatch.setattr(env_pools, "sleeping_contestants", few)
    env_pools.main(env_pools.Options(parts=("sleeping",), sizes=(6,), rounds=2, seconds=0.4, out=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"sleeping_6.json", "env_pools.md", "env_pools.png"}
    result = json.loads((tmp_path / "sleeping_6.json").read_text())
    for row in result["rows"]:
        assert len(row["seconds"]) == 2 and all(0.003 < x < 0.1 for x in row["seconds"])
    assert [row["model"] for row in result["rows"]] == pytest.approx([0.003 + 0.1 * (1 - 0.99**6), 0.004, 0.008])
    text = (tmp_path / "env_pools.md").read_text()
    assert text in capsys.readouterr().out and "| ours, M = N/4, W x V = N/2 x 2 | " in text


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rounds": 0}, "--rounds"), ({"sizes": (8,)}, "multiples of 6"), ({"seconds": -1.0}, "--seconds")],
)
def test_bad_input(change, message, tmp_path, capsys):
    options = dataclasses.replace(env_pools.Options(out=tmp_path), **change)
    assert message in refusal(env_pools.check, options, capsys)


def test_scaling_is_told_beside_its_model(tmp_path):
    """From rows as they are measured: times lock-step, share of linear, how many runners one learner could have."""
    options = scaling.Options(out=tmp_path, nodes=(1, 4, 8))
    times = scaling.TIMES
    sizes = [
        {"name": "first-ready", "nodes": nodes, "steps_per_second": rate, "model": scaling.model(options, nodes),
         "learner_seconds_per_step": 1e-5, "staleness_max": 1, "late": 0}
        for nodes, rate in ((1, 300.0), (4, 1200.0), (8, 1300.0))
    ]  # fmt: skip
    assert sizes[1]["model"] == pytest.approx(4 * 24 / pool_models.rollouts(*times, 12, 512))
    node = [{"name": "lock-step, SB3", "steps_per_second": 100.0, "model": 24 / pool_models.lock_step(*times, 24)}]
    settings = {"script": "ppo_ray", "runners": 2, "envs": 12, "steps": 512}
    result = {"settings": settings, "node": node, "sizes": sizes, "provenance": provenance()}
    write_json(tmp_path / "scaling.json", result)
    text = scaling.write_summary(tmp_path)
    assert "| 12.0x | 100% | 1 | 0 |" in text and "| 13.0x | 54% | 1 | 0 |" in text
    assert "With 4 nodes, the most that had 90% of linear," in text
    assert "it could take 100,000 steps/s, 4.4 MB/s, 16 sets" in text
    assert "those of some 670 such runners" in text and "150% of what one learner can take" in text
    assert {path.name for path in tmp_path.iterdir()} == {"scaling.json", "scaling.md", "scaling.png"}


def test_what_a_step_costs_the_learner_is_the_mean_over_the_log(monkeypatch, tmp_path):
    """Of two runners and the learner, from the first line on with both up; a single line may be far off."""
    shares = ((0, 1, 90, 0), (100, 2, 50, 50), (1100, 2, 2, 1), (2100, 2, 60, 9))
    lines = [
        {"seconds": float(i), "global_step": step, "runners/alive": alive, "time/learning": a, "time/weights": b,
         "runners/staleness_max": 1}
        for i, (step, alive, a, b) in enumerate(shares)
    ]  # fmt: skip
    monkeypatch.setattr(scaling, "train", lambda *_, **__: (1000.0, lines))
    cluster = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", mock.MagicMock(Cluster=cluster))
    with mock.patch.dict(os.environ):
        row = scaling.measure_cluster(scaling.Options(runners=2, out=tmp_path), 1)
    assert row["learner_seconds_per_step"] == pytest.approx(3 * (0.03 + 0.69) / 2000)


def test_scaling_keeps_what_it_has_measured(monkeypatch, tmp_path, capsys):
    """Of one node and two sizes, the second stopped by Ctrl-C: a record that says that it is unfinished."""
    sizes = iter([{"name": "1 node"}])
    monkeypatch.setattr(scaling, "measure_node", lambda _: [{"name": "lock-step, SB3"}])

    def measure_cluster(_options, nodes: int) -> dict:
        known = json.loads((tmp_path / "scaling.json").read_text())
        assert known["node"] and len(known["sizes"]) == (nodes > 1), "written as soon as it is known"
        if found := next(sizes, None):
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling, "measure_cluster", measure_cluster)
    with pytest.raises(SystemExit):
        scaling.main(scaling.Options(script="impala_ray", nodes=(1, 2), out=tmp_path))
    result = json.loads((tmp_path / "scaling.json").read_text())
    assert result["sizes"] == [{"name": "1 node"}] and result["provenance"]["is_unfinished"]
    assert result["settings"]["steps"] == 16 and "stopped; the one node and the sizes" in capsys.readouterr().err
    node = [{"name": "lock-step, SB3", "steps_per_second": 90.0, "model": 98.0}]
    write_json(tmp_path / "scaling.json", result | {"sizes": [], "node": node})
    assert "| lock-step, SB3 | 90 | 98 | 92% | 1.0x | - | - | - |" in scaling.write_summary(tmp_path)


def test_scaling_does_not_wait_forever_for_runners(monkeypatch, capsys):
    """A script that runs, and of which only one of two runners ever delivers."""

    @contextlib.contextmanager
    def training(_program, **_):
        yield mock.MagicMock(wait=lambda _: None, last_lines=lambda: "no CPU for it"), Path("nowhere")

    monkeypatch.setattr(scaling.env_pools, "training", training)
    monkeypatch.setattr(scaling.runs, "read_lines", lambda _: ([{"runners/alive": 1}] * 3, 0))
    monkeypatch.setattr(scaling, "UP", 0)
    with pytest.raises(SystemExit):
        scaling.train("ppo_ray", 1.0, **{"num-runners": 2})
    assert "not all 2 runners of ppo_ray have delivered in 0 s:\nno CPU for it" in capsys.readouterr().err


def test_a_part_with_fewer_rounds_or_rows_does_not_replace_a_whole_one(monkeypatch, tmp_path):
    def measure_with(*names, rounds=2, seconds=1.0):
        result = {"rows": [{"name": name} for name in names]}
        monkeypatch.setattr(env_pools, "measure_overhead", lambda _: result)
        env_pools.main(env_pools.Options(parts=("overhead",), rounds=rounds, seconds=seconds, out=tmp_path))
        known = json.loads((tmp_path / "overhead.json").read_text())
        return [row["name"] for row in known["rows"]], known["rounds"]

    monkeypatch.setattr(env_pools, "write_summary", lambda _: "")
    assert measure_with("a") == (["a"], 2) and measure_with("a", "b") == (["a", "b"], 2)
    assert measure_with("b") == (["a", "b"], 2)
    for weaker in ({"rounds": 1}, {"seconds": 0.5}):
        with pytest.raises(SystemExit):
            measure_with("a", "b", **weaker)
