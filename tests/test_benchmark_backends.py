"""Ways to step environments: which there are, which one a script takes by itself, and how far from the best it is."""

import json

import pytest
from benchmark_helpers import refusal

from benchmarks.throughput import backends
from benchmarks.throughput.backends import ALL, PROCESS, TASKS, THREADS, TURNS, WORKERS
from benchmarks.tools import readme


@pytest.mark.parametrize(
    ("env_id", "num_envs", "way"),
    [
        ("CartPole-v1", 4, PROCESS),
        ("CartPole-v1", 16, THREADS),
        ("HalfCheetah-v4", 1, PROCESS),
        ("HalfCheetah-v4", 4, THREADS),
        ("benchmarks.pools.sleeping:SlowCartPole-v0", 1, PROCESS),
        ("benchmarks.pools.sleeping:SlowCartPole-v0", 4, WORKERS),
        ("Breakout-v5", 4, TURNS),
    ],
)
def test_the_default_is_what_the_script_takes(env_id, num_envs, way):
    assert backends.default_way(env_id, num_envs) == way


def test_a_default_is_among_the_ways_that_are_measured():
    for env_id, task in TASKS.items():
        assert task.rollout % max(task.num_envs) == 0
        for num_envs in task.num_envs:
            assert backends.default_way(env_id, num_envs) in backends.ways_of(env_id, num_envs)


def test_command(monkeypatch, tmp_path, capsys):
    """Rounds in both orders, rollouts of one size, and the default beside the best, which may be itself."""
    order, speeds = [], {THREADS: 100.0, PROCESS: 80.0, WORKERS: 20.0}

    def measure(arguments, options, last):
        assert options.seconds == 4 and "--no-tensorboard" in last
        envs, steps = (int(arguments[arguments.index(flag) + 1]) for flag in ("--num-envs", "--num-steps"))
        assert envs * steps == 2048
        way = THREADS if "envpool" in arguments else PROCESS if "--sync-envs" in arguments else WORKERS
        order.append((envs, way))
        own = {"first_update_seconds": 1.0, "peak_resident_mb": 1.0, "cores_used": 1.0}
        return {"speeds": [speeds[way]] * 5, **own}, None

    monkeypatch.setattr(backends.throughput, "measure", measure)
    backends.main(backends.Options(("HalfCheetah-v4",), rounds=2, seconds=4, out=tmp_path))
    assert order[:4] == [(1, PROCESS), (1, THREADS), (1, THREADS), (1, PROCESS)]
    assert order[4:10] == [(4, way) for way in (PROCESS, THREADS, WORKERS, WORKERS, THREADS, PROCESS)]
    rows = json.loads((tmp_path / "HalfCheetah-v4.json").read_text())["rows"]
    assert [backends.to_best_other(row)["ratio"] for row in rows] == pytest.approx([0.8, 1.25, 1.25])
    text = (tmp_path / "backends.md").read_text()
    assert text in capsys.readouterr().out
    first, second = (line for line in text.splitlines() if line.startswith("| HalfCheetah") and "| 16 |" not in line)
    assert first.endswith("| - | - | - | in the process | 0.80 [0.80, 0.80] |")
    assert second.endswith("| EnvPool | 1.25 [1.25, 1.25] |")
    assert "In 2 of 3 rows the default has at least 95% of the speed of the best other way. In 2 the" in text


def test_ways_that_fail_are_shown(monkeypatch, tmp_path):
    """A row without the default's speed has no share."""

    def measure(arguments, _options, _last):
        own = {"speeds": [50.0] * 3, "first_update_seconds": 1.0, "peak_resident_mb": 1.0, "cores_used": 1.0}
        return ({"failed": "exit code 1"} if "--no-async-envs" not in arguments else own), None

    monkeypatch.setattr(backends.throughput, "measure", measure)
    backends.main(backends.Options(("Breakout-v5",), rounds=1, seconds=4, out=tmp_path))
    text = (tmp_path / "backends.md").read_text()
    assert f"| failed | 50 [50, 50] | {TURNS} | - |" in text and ALL in text and "In 0 of 0 rows" in text


def test_rows_are_kept_when_the_command_is_stopped(monkeypatch, tmp_path, capsys):
    """And the page says that they are not all."""

    def measure(arguments, _options, _last):
        if arguments[arguments.index("--num-envs") + 1] == "4":
            raise KeyboardInterrupt
        return {"speeds": [50.0] * 3, "first_update_seconds": 1.0, "peak_resident_mb": 1.0, "cores_used": 1.0}, None

    monkeypatch.setattr(backends.throughput, "measure", measure)
    with pytest.raises(SystemExit) as end:
        backends.main(backends.Options(("HalfCheetah-v4",), rounds=2, seconds=4, out=tmp_path))
    assert end.value.code == 130 and f"rows that were finished before lie in {tmp_path}" in capsys.readouterr().err
    assert [row["num_envs"] for row in json.loads((tmp_path / "HalfCheetah-v4.json").read_text())["rows"]] == [1]
    assert ", unfinished" in backends.write_summary(tmp_path)


def test_each_machine_has_a_folder_and_a_table(monkeypatch, tmp_path):
    """Results of another CPU stay where they are, and each CPU's default is judged by its own."""
    speeds = {"--no-async-envs": 50.0, "--async-envs": 80.0}

    def measure(arguments, _options, _last):
        speed = next(speed for flag, speed in speeds.items() if flag in arguments)
        return {"speeds": [speed] * 3, "first_update_seconds": 1.0, "peak_resident_mb": 1.0, "cores_used": 1.0}, None

    monkeypatch.setattr(backends.throughput, "measure", measure)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.backend_section() == []
    options = backends.Options(("Breakout-v5",), rounds=2, seconds=4, out=tmp_path / "backends")
    backends.main(options)
    old = json.loads((options.out / "Breakout-v5.json").read_text())
    old["provenance"]["machine"]["cpu"] = "Z80"
    (options.out / "Breakout-v5.json").write_text(json.dumps(old))
    speeds["--async-envs"] = 25.0
    backends.main(options)
    assert json.loads((options.out / "Breakout-v5.json").read_text()) == old
    (page,) = options.out.glob("*/backends.md")
    assert "0.50 [0.50, 0.50]" in page.read_text() and "80 [80, 80]" not in page.read_text()
    text = "\n".join(readme.backend_section())
    first, second = (text.index(f"In {count} of 2 rows") for count in (0, 2))
    assert first < text.index("cores of Z80") < second and f"(benchmarks/results/backends/{page.parent.name}" in text


def test_wrong_input(tmp_path, capsys):
    for options, message in (
        (backends.Options(("Chess-v0",), out=tmp_path), "no environment Chess-v0"),
        (backends.Options(rounds=0, out=tmp_path), "--rounds"),
    ):
        assert message in refusal(backends.main, options, capsys)


def test_a_verdict_tells_what_is_sure(monkeypatch):
    """By the ends of intervals. A row without another way is left out."""
    shares = [(1.2, [1.1, 1.3]), (0.97, [0.9, 1.0]), (0.9, [0.8, 0.96]), (0.8, [0.7, 0.9]), None]
    found = [x and {"ratio": x[0], "interval": x[1]} for x in shares]
    monkeypatch.setattr(backends, "to_best_other", lambda row: found[row])
    text = backends.verdict([{"rows": range(5)}])
    assert text.startswith("In 2 of 4 rows the default has at least 95% of the speed of the best other way. In 1 the")
    assert "lies above 95%, in 1 below" in text


def test_a_row_with_a_single_way_has_no_ratio():
    alone = {"steps_per_second": 10.0, "rounds": [{"speeds": [10.0] * 3}]}
    assert backends.to_best_other({"default": PROCESS, "contestants": {PROCESS: alone}}) is None
    assert backends.to_best_other({"default": PROCESS, "contestants": {PROCESS: {}, THREADS: alone}}) is None
