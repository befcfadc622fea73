"""Each rung of a ladder is the pair without some tricks, and learns the same numbers."""

import ast
import inspect
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmark_helpers import refusal
from tqdm import tqdm

from benchmarks.common.programs import ROOT
from benchmarks.throughput import ladder, rungs
from benchmarks.throughput.rungs import LADDERS, Trick


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads gain nothing here, and wait for each other on busy cores."""
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


each_ladder = pytest.mark.parametrize("script", LADDERS)


@each_ladder
def test_the_scripts_hold_what_is_taken_out(script):
    """As the scripts stand today; and what is taken out of one rung is there in the next one."""
    for number in range(len(LADDERS[script])):
        module = rungs.load(script, number)
        assert module.Args().total_timesteps and hasattr(module, "compiled") == LADDERS[script][number].is_compiled
    top = rungs.load(script, len(LADDERS[script]) - 1)
    assert module.compiled is not rungs.compile_whole and top.compiled.__module__ == top.__name__


@each_ladder
def test_what_replaces_compiled_takes_what_the_script_hands_it(script):
    """Every call of it in the script as it stands: compiled rungs are run only where they are measured."""
    tree = ast.parse((ROOT / "scripts" / f"{script}_torchcompile.py").read_text())
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call) and getattr(x.func, "id", None) == "compiled"]
    patches = {trick.names["compiled"] for trick in LADDERS[script] if "compiled" in trick.names}
    assert len(patches) == 2 and calls
    for patch, call in itertools.product(patches, calls):
        inspect.signature(patch).bind(*call.args, **{x.arg: x.value for x in call.keywords})


@pytest.mark.slow
@each_ladder
def test_all_uncompiled_rungs_learn_the_same(script):
    """But for rounding; compiled ones are compared before each measurement, as they take a minute."""
    eager = [i for i, trick in enumerate(LADDERS[script]) if not trick.is_compiled]
    found = rungs.check(script, eager, rungs.SMOOTH)
    assert all(x["equal"] and x["weights"] < 1e-6 for x in found.values()), found
    assert found[0]["metrics"] > 0 == found[eager[-1]]["metrics"]  # the lowest does compute otherwise


def test_rungs_learn_the_same_over_several_rollouts():
    """A name that a patch brings in must not be one that the loop uses."""
    found = rungs.check("ppo_continuous_action", [0, 3], (*rungs.SMOOTH, "--total-timesteps", "192"))
    assert all(x["equal"] for x in found.values()), found


def test_a_rung_that_learns_something_else_is_noticed(monkeypatch):
    def wrong(target, online, tau=1.0, _buffers=()):
        rungs.move_one_by_one(target, online, 0.9 * tau)

    monkeypatch.setitem(LADDERS, "td3_continuous_action", (rungs.BASE, Trick("x", names={"move_towards": wrong})))
    assert not rungs.check("td3_continuous_action", [0], rungs.SMOOTH)[0]["equal"]


def test_a_script_that_has_changed_is_refused(monkeypatch, capsys):
    for wrong in ({"texts": (("no such line", ""),)}, {"names": {"nothing": print}}):
        monkeypatch.setitem(LADDERS, "ppo_continuous_action", (rungs.BASE, Trick("x", **wrong)))
        assert "rungs.py takes out" in refusal(lambda number: rungs.load("ppo_continuous_action", number), 0, capsys)


def test_the_replay_of_arrays_holds_and_draws_what_that_of_the_scripts_does():
    script, device = rungs.load("td3_continuous_action", len(rungs.TD3) - 1), torch.device("cpu")
    buffers = [kind(5, 3, 2, device) for kind in (script.ReplayBuffer, rungs.ArraysBuffer)]
    rows = torch.randn(13, 10)
    for part in rows.split([2, 4, 1, 5, 1]):
        batches = []
        for buffer in buffers:
            buffer.add(part)
            torch.manual_seed(1)
            batches.append(buffer.sample(20))
        for a, b in zip(*batches, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_command(monkeypatch, tmp_path, capsys):
    """Rounds in both orders; a chart and a table in which one rung stands on the other."""
    order = []

    def measure(arguments, options, **_):
        number = int(arguments[5])
        order.append(number)
        assert options.seconds == 3 and "--no-tensorboard" in arguments
        own = {"speeds": [100.0 * 2**number] * 5, "first_update_seconds": 1.0}
        own |= {"peak_resident_mb": 1.0, "cores_used": 1.0}
        return own, type("Run", (), {"env_id": "HalfCheetah-v4", "lines": [{}]})

    equal = {"equal": True, "metrics": 1e-6, "weights": 2e-8}
    monkeypatch.setattr(ladder.throughput, "measure", measure)
    monkeypatch.setattr(ladder, "check_rungs", lambda _: {str(i): equal for i in range(len(rungs.PPO))})
    ladder.main(ladder.Options(("ppo_continuous_action",), rounds=2, seconds=3, out=tmp_path))
    count = len(rungs.PPO)
    assert order == [*range(count), *reversed(range(count))]
    result = json.loads((tmp_path / "ppo_continuous_action.json").read_text())
    assert [x["ratio"] for x in result["ratios"]] == pytest.approx([2.0] * (count - 1) + [2.0 ** (count - 1)])
    text = (tmp_path / "ladder.md").read_text()
    assert text in capsys.readouterr().out and (tmp_path / "ladder.png").stat().st_size > 5000
    assert "| the policy in NumPy | 1,600 [1,600, 1,600] | 2.00 [2.00, 2.00] | 2e-08 |" in text
    assert f"From first to last row: {2 ** (count - 1):,.1f} [" in text


def test_a_rung_stands_on_the_one_below_and_says_if_it_differs():
    """The top one too, whose ratio to the lowest is known as well."""
    known = {"steps_per_second": 100.0, "quartiles": [90.0, 110.0]}
    ratios = [("1", "0", 2.0), ("2", "1", 3.0), ("2", "0", 6.0)]
    result = {"rungs": ["a", "b", "c"], "contestants": {str(i): known for i in range(3)}}
    result["ratios"] = [{"of": x, "to": y, "ratio": z, "interval": [z - 0.1, z + 0.1]} for x, y, z in ratios]
    result["deviations"] = {str(i): {"equal": i != 1, "weights": 1e-8} for i in range(3)}
    rows = ladder.rows(result)
    assert [row[2] for row in rows] == ["-", "2.00 [1.90, 2.10]", "3.00 [2.90, 3.10]"]
    assert [row[3] for row in rows] == ["1e-08", "1e-08 (differs)", "1e-08"]


def test_a_rung_that_failed_has_no_ratio_and_nor_has_the_one_on_it(monkeypatch):
    """The ratio to the rung below that one would be of two tricks."""

    def measured(_program, _settings, **cache):
        number = int(Path(cache["TORCHINDUCTOR_CACHE_DIR"]).name)
        own = {"speeds": [100.0 * (number + 1)] * 3, "first_update_seconds": 1.0, "peak_resident_mb": 1.0}
        return own | {"cores_used": 1.0} | ({"failed": "exit code 1"} if number == 1 else {}), SimpleNamespace(lines=[])

    monkeypatch.setattr(ladder.throughput, "measure", measured)
    same = lambda script: {str(i): {"equal": True} for i in range(len(LADDERS[script]))}  # noqa: E731
    monkeypatch.setattr(ladder, "check_rungs", same)
    result = ladder.measure("ppo_continuous_action", ladder.Options(rounds=1), tqdm(disable=True))
    top, found = len(result["rungs"]) - 1, {(int(x["of"]), int(x["to"])) for x in result["ratios"]}
    assert found == {(i, i - 1) for i in range(3, top + 1)} | {(top, 0)}
    assert [row[2] == "-" for row in ladder.rows(result)] == [True] * 3 + [False] * (top - 2)
