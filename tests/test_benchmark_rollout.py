"""./run.sh rollout with toy budgets, and its parts."""

import json

import numpy as np
import pytest
import torch
from benchmark_helpers import benchmark, refusal

from benchmarks.acting import rollout, rollout_worker
from benchmarks.acting.rollout_worker import FAMILIES, Sampler
from benchmarks.common import turns

CPU = torch.device("cpu")


def settings(actor: str, **changes) -> dict:
    case = {"family": "classic", "backend": "gymnasium-sync", "num_envs": 2, "actor": actor, "seconds": 0.05}
    return case | {"device": "cpu", "threads": 1, **changes}


@pytest.fixture
def measure(monkeypatch):
    """A row measured in this process, which does not wait for its turn."""
    monkeypatch.setattr(turns, "wait_for_turn", lambda: None)

    torch.set_num_threads(1)

    def run(actor: str, **changes) -> dict:
        torch._dynamo.reset()
        with torch.no_grad():
            return rollout_worker.measure(settings(actor, **changes))

    return run


@pytest.mark.slow
def test_rollout_from_end_to_end(tmp_path):
    """One actor that works, and one of a package that may be missing, with one environment."""
    flags = ["--families", "classic", "--num-envs", 1, "--backends", "gymnasium", "--compile-actor", "numpy", "ort"]
    done = benchmark("rollout", *flags, "--seconds", 0.1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"rollout.json", "rollout.md", "rollout.png"}
    result = json.loads((tmp_path / "rollout.json").read_text())
    rows = {row["actor"]: row for row in result["rows"]}
    assert list(rows) == ["numpy", "ort"] and ("error" in rows["ort"]) != ("ratio" in rows["ort"])
    own = rows["numpy"]
    low, high = own["quartiles"]
    assert 100 < low <= own["steps_per_second"] <= high and own["interval"][0] <= own["ratio"] <= own["interval"][1]
    assert own["p50_us"] <= own["p99_us"] and own["cpu_us"] > 1
    text = (tmp_path / "rollout.md").read_text()
    assert text in done.stdout and "| classic | gymnasium | 1 | numpy |" in text and "/tmp" not in text


@pytest.mark.slow
def test_the_flag_compiles(measure):
    """A silent flag is the fault that this is for: compiled, Dynamo has made a graph; off, it has not."""
    assert measure("off")["compiled_graphs"] == 0
    row = measure("inductor")
    assert row["compiled_graphs"] == 1 and row["compile_seconds"] > 0.1
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="nothing was compiled"):
        measure("inductor")


def test_it_samples_what_it_says():
    """Actions are drawn by the policy, rows are kept in order, resets are no steps."""
    sampler = Sampler("classic", "gymnasium-sync", 3, CPU)
    act, calls = sampler.act, []

    def call(obs, noise):
        calls.append((obs.numpy(), noise, [x.numpy() for x in act(obs, noise)]))
        return act(obs, noise)

    with torch.no_grad():
        for _ in range(100):
            sampler.step(call)
    resets = 0
    for t, (obs, _, outputs) in enumerate(calls):
        own_obs, *kept, reward, terminated, truncated, valid = sampler.rows[t]
        np.testing.assert_array_equal(own_obs.astype(np.float32), obs)
        assert all(np.array_equal(a, b) for a, b in zip(kept, outputs, strict=True))
        assert (reward[~valid] == 0).all() and (reward[valid] == 1).all()
        resets += np.count_nonzero(~valid)
        if t + 1 < len(calls):
            np.testing.assert_array_equal(sampler.rows[t + 1][-1], ~(terminated | truncated))
    assert resets > 3 and sampler.steps == 300 - resets and sampler.all_rows == 300
    assert 0 < np.mean([row[1] for row in sampler.rows[:100]]) < 1  # both actions


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "atari"])
@pytest.mark.parametrize("backend", ["gymnasium-sync", "envpool"])
def test_each_family_and_backend(measure, family, backend):
    row = measure("numpy", family=family, backend=backend)
    assert row["steps_per_second"] > 50 and 0.1 < row["ratio"] < 50


def test_atari(measure):
    """The policy sees each game's last four frames, of which the first of a game fills all four places."""
    assert measure("off", family="atari", backend="envpool", num_envs=3)["steps_per_second"] > 50
    sampler, newest, seen = Sampler("atari", "envpool", 2, CPU), [], []

    def call(obs, noise):
        newest.append(sampler.obs)
        seen.append(obs.clone())
        return sampler.act(obs, noise)

    with torch.no_grad():
        for _ in range(6):
            sampler.step(call)
    frames = [sampler.script.space_to_depth(torch.from_numpy(x[:, :84].copy())) for x in newest]
    assert [int(x[0, 84, 0]) for x in newest] == [1, 0, 0, 0, 0, 0] and sampler.steps == sampler.all_rows == 12
    assert torch.equal(seen[0], torch.cat([frames[0]] * 4, 3))
    assert torch.equal(seen[2], torch.cat([frames[0], *frames[:3]], 3))
    assert torch.equal(seen[5], torch.cat(frames[2:], 3))


def test_speed_counts_steps_of_all_environments(measure, monkeypatch):
    """1 ms a call, two environments: 2000 steps/s less the resets."""

    def interleave(calls, _seconds) -> dict:
        for _ in range(100):
            calls["actor"]()
        blocks = {"off": 4e-3, "actor": 1e-3}
        return {name: turns.Times([np.full(10, x)] * 4, x) for name, x in blocks.items()}

    monkeypatch.setattr(turns, "interleave", interleave)
    row = measure("off")
    assert 1800 < row["steps_per_second"] < 2000 and row["ratio"] == pytest.approx(4)
    assert row["off_steps_per_second"] == pytest.approx(row["steps_per_second"] / 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ("golf",)}, "no family golf; there are classic"),
        ({"num_envs": (0,)}, "--num-envs"),
        ({"seconds": 0}, "--seconds"),
        ({"compile_actor": ("cudagraphs",)}, "can't be used on cpu"),
        ({"families": ("atari",), "backends": ("gymnasium",)}, "Atari is EnvPool's"),
        ({"families": ("atari",), "compile_actor": ("numpy",)}, "Atari is EnvPool's"),
    ],
)
def test_bad_input(options, message, tmp_path, capsys):
    assert message in refusal(rollout.check, rollout.Options(**{"out": tmp_path, **options}), capsys)


def test_a_single_environment_is_measured_once_for_each_backend(tmp_path):
    cases = rollout.settings_of(rollout.check(rollout.Options(out=tmp_path, compile_actor=("off",))))
    found = [(case["family"], case["backend"], case["num_envs"]) for case in cases]
    assert len(found) == len(set(found)) == 2 * 5 + 2 and ("classic", "gymnasium-sync", 1) not in found


def test_only_timed_steps_of_sampling_count(monkeypatch):
    """Not those before; a block's speed is of its mean call, so a slow reset counts."""
    made = []

    class Sampler(rollout_worker.Sampler):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    def interleave(_calls, _seconds) -> dict:
        assert made[0].steps == made[0].all_rows == 0
        made[0].steps, made[0].all_rows = 90, 100
        block = np.array([1e-3] * 9 + [11e-3])  # 2 ms on average
        return {name: turns.Times([block * x] * 4, 1e-3) for name, x in (("off", 2), ("actor", 1))}

    monkeypatch.setattr(rollout_worker, "Sampler", Sampler)
    monkeypatch.setattr(turns, "wait_for_turn", lambda: None)
    monkeypatch.setattr(turns, "interleave", interleave)
    case = {"family": "classic", "backend": "gymnasium-sync", "num_envs": 2, "actor": "numpy", "seconds": 0.05}
    with torch.no_grad():
        row = rollout_worker.measure(case | {"device": "cpu", "threads": 1})
    assert row["steps_per_second"] == pytest.approx(2 * 0.9 / 2e-3) and row["ratio"] == pytest.approx(2)
    assert row["p50_us"] == pytest.approx(1000)


def test_nothing_measured_is_a_failure(monkeypatch, tmp_path, capsys):
    def run_cases(_module, cases, *more):
        more[-1](cases[0], [], "it broke")

    monkeypatch.setattr(rollout.turns, "run_cases", run_cases)
    options = rollout.Options(families=("classic",), num_envs=(1,), compile_actor=("off",), out=tmp_path)
    assert rollout.main(options) == 1
    done = capsys.readouterr()
    assert f"written to {tmp_path}: rollout.md, rollout.json\n" in done.out and "not all of rollout" in done.err


def test_rows_that_failed_do_not_replace_good_ones(monkeypatch, tmp_path):
    """They lie beside the old result."""
    flags = {"families": ("classic",), "num_envs": (1,), "compile_actor": ("off",), "out": tmp_path}
    found = [[{"steps_per_second": 1.0, "ratio": 1.0, "interval": [1, 1], "p50_us": 1.0}], []]
    for own in found:

        def run_cases(_module, cases, *_, own=own):
            for case in cases:
                _[-1](case, own, "it broke")

        monkeypatch.setattr(rollout.turns, "run_cases", run_cases)
        monkeypatch.setattr(rollout, "write_summary", lambda _out: "")
        rollout.main(rollout.Options(**flags))
    rows = [json.loads((tmp_path / name).read_text())["rows"] for name in ("rollout.json", "rollout.json.part")]
    assert all("error" not in row for row in rows[0]) and all(row["error"] == "it broke" for row in rows[1])
