"""What a step can't go below: which calls of PyTorch are counted, how often, and what the table makes of them."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import load
from torch import nn

from benchmarks.common.results import provenance
from benchmarks.throughput import limits


def test_a_tensor_like_another_one():
    transposed, expanded = torch.zeros(3, 5).T, torch.zeros(4).expand(2, 4)
    for x in (transposed, expanded, torch.zeros(0, 3), torch.zeros((), dtype=torch.bfloat16)):
        layout = limits.layout_of(x)
        made = layout.make()
        assert limits.layout_of(made) == layout and hash(layout) is not None
        assert made.numel() == 0 or 0 <= made.float().min() <= made.float().max() <= 1


def test_products_are_counted_by_layout_and_nothing_else():
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)), torch.randn(5, 3)
    with limits.Counts() as counts:
        for _ in range(2):
            torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    names = Counter()
    for (func, _), count in counts.calls.items():
        names[func.overloadpacket.__name__] += count
    assert names == {"addmm": 2, "mm": 2 * 4}  # a bias's is no product; one layer's input needs no gradient
    flops = sum(count * limits.flops_of(call) for call, count in counts.calls.items())
    assert flops == 2 * 2 * 5 * (2 * 3 * 8 + 3 * 8 * 8)


def test_those_of_a_script_are_its_networks_products(tmp_path):
    """DQN: forward by both networks, backward to the weights of each layer, and to the inputs of all but the first."""
    flags = ["--no-tensorboard", "--learning-starts", "200", "--log-every", "100", "--run-dir", str(tmp_path / "run")]
    calls, steps = limits.count_calls(load("dqn"), flags)
    assert steps >= 400 and steps % 10 == 0
    weights, first = 4 * 120 + 120 * 84 + 84 * 2, 4 * 120
    adam = [count for (func, _), count in calls.items() if func.overloadpacket.__name__ == "_fused_adam_"]
    assert adam == [steps // 10]  # an update for ten steps
    products = [call for call in calls if call[0].overloadpacket.__name__ != "_fused_adam_"]
    flops = sum(calls[call] * limits.flops_of(call) for call in products)
    of_checks = limits.LINES * 2 * weights  # one row for each line of the log
    assert flops == 2 * 128 * (4 * weights - first) * steps // 10 + of_checks


def test_each_call_counts_as_often_as_it_was_made(monkeypatch, tmp_path):
    """A product is made to take 2 s and a step of Adam 5, so the sums are known."""
    matrix, vectors = torch.rand(4, 4), [torch.rand(3)]
    with limits.Counts() as counts:
        for _ in range(3):
            matrix @ matrix
        steps = [torch.ones(())]
        torch._fused_adam_(
            vectors, vectors, [torch.rand(3)], [torch.rand(3)], [], steps,
            lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, amsgrad=False, maximize=False,
        )  # fmt: skip
    monkeypatch.setattr(limits, "count_calls", lambda _module, _flags: (counts.calls, 10))
    monkeypatch.setattr(limits, "load_script", lambda _: None)
    names = []

    def seconds_of(call) -> float:
        names.append(call[0].overloadpacket.__name__)
        return {"mm": 2.0, "_fused_adam_": 5.0}[names[-1]]

    monkeypatch.setattr(limits, "seconds_of", seconds_of)
    result = limits.measure_calls(tmp_path, [])
    assert result == {"products": 1e6 * 3 * 2 / 10, "adam": 1e6 * 5 / 10, "mflop": pytest.approx(3 * 2 * 64 / 1e7)}
    assert sorted(names) == ["_fused_adam_", "mm"]
    monkeypatch.undo()
    assert all(0 < limits.seconds_of(call) < 0.1 for call in counts.calls)


def test_the_time_of_a_call_is_the_median_block(monkeypatch):
    times, counts = iter([0.01, 1.0, 2.0, 9.0, 3.0, 1.0]), []
    monkeypatch.setattr(limits, "timed", lambda run, count: counts.append(count) or run() is None or next(times))
    call = torch.ops.aten.mm.default, limits.frozen(([limits.layout_of(torch.rand(2, 2))] * 2, []))
    assert limits.seconds_of(call) == 2.0
    assert counts == [3] + [1 + int(limits.BLOCK_SECONDS / 0.01)] * 5


def test_a_table_of_all_rounds_and_a_failed_one(tmp_path, monkeypatch, capsys):
    found = iter([{"environment": 10.0, "products": 20.0, "adam": 10.0, "compiled": 80.0, "mflop": 2.0}] * 2
                 + [{"failed": "exit code 1"}])  # fmt: skip
    turns = []

    def measure_round(_script, _options, _cache, turn):
        turns.append(turn)
        return next(found), "CartPole-v1"

    monkeypatch.setattr(limits, "measure_round", measure_round)
    assert limits.main(limits.Options(("dqn",), rounds=3, out=tmp_path)) == 1 and turns == [0, 1, 2]
    result = json.loads((tmp_path / "dqn.json").read_text())
    row = "| `dqn`, CartPole-v1 | 10.0 | 20.0 | 10.0 | 40.0 | 80.0 | 0.50 [0.50, 0.50] | 2.0 | 100 |"
    text = (tmp_path / "limits.md").read_text()
    assert row in text and "3 rounds of 20 s; 1 failed" in text and text in capsys.readouterr().out
    result["limits"] = result["limits"][-1:]
    assert limits.row(result)[1] == "failed" and len(limits.row(result)) == 9
    one = {"environment": 1e3, "products": 0.0, "adam": 0.0, "compiled": 2e3, "mflop": 0.0}
    assert limits.row({**result, "limits": [one]})[-4:] == ["2,000", "0.50", "0.0", "nan"]


def test_a_round_is_of_one_script(monkeypatch, tmp_path):
    """Its environment alone, its products, its compiled twin; what failed is named."""
    seen = []

    def measure(program, options, _last=(), learns=True, **_environment):
        seen.append((program[3] if program[1] == "-P" else program[1].rpartition("/")[2], options.seconds, learns))
        own = {"speeds": [1e4, 2e4, 5e4]} if learns else {"speeds": [1e5]}
        return own, type("Run", (), {"env_id": "CartPole-v1", "lines": [{}]})

    monkeypatch.setattr(limits.throughput, "measure", measure)
    monkeypatch.setattr(limits, "measured_calls", lambda *_: {"products": 1.0, "adam": 2.0, "mflop": 3.0})
    result, env_id = limits.measure_round("dqn", limits.Options(seconds=8), tmp_path, 0)
    assert result == {"environment": pytest.approx(10), "compiled": 50, "products": 1.0, "adam": 2.0, "mflop": 3.0}
    assert seen == [("benchmarks.throughput.ceilings", 4.0, False), ("dqn_torchcompile.py", 8, True)]
    assert env_id == "CartPole-v1" and limits.limit_of(result) == pytest.approx(13)
    monkeypatch.setattr(limits, "measured_calls", lambda *_: {"failed": "no end in time"})
    assert limits.measure_round("dqn", limits.Options(), tmp_path, 0)[0] == {"failed": "no end in time"}


def test_rounds_are_kept_when_the_command_is_stopped(monkeypatch, tmp_path, capsys):
    """And a page says that they are not all."""
    parts = {"environment": 10.0, "products": 20.0, "adam": 10.0, "compiled": 80.0, "mflop": 2.0}

    def measure_round(_script, _options, _cache, turn):
        if turn == 2:
            raise KeyboardInterrupt
        return parts, "CartPole-v1"

    monkeypatch.setattr(limits, "measure_round", measure_round)
    with pytest.raises(SystemExit) as end:
        limits.main(limits.Options(("dqn",), rounds=3, out=tmp_path))
    assert (
        end.value.code == 130 and f"the rounds that were finished before lie in {tmp_path}" in capsys.readouterr().err
    )
    result = json.loads((tmp_path / "dqn.json").read_text())
    assert result["limits"] == [parts, parts] and result["rounds"] == 2
    assert ", unfinished" in limits.write_summary(tmp_path)


def test_scripts_over_ray_are_refused(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        limits.main(limits.Options(("impala_ray",), out=tmp_path))
    assert end.value.code == 2 and "no pair impala_ray" in capsys.readouterr().err


@pytest.mark.alone
def test_a_round_of_a_real_script(tmp_path):
    options = limits.Options(("dqn",), rounds=1, seconds=5.0, out=tmp_path)
    assert limits.main(options) == 0
    (parts,) = json.loads((tmp_path / "dqn.json").read_text())["limits"]
    assert parts["mflop"] == pytest.approx(2 * 128 * (4 * (4 * 120 + 120 * 84 + 84 * 2) - 4 * 120) / 1e7, rel=1e-3)
    assert all(np.isfinite(x) and x > 0 for x in parts.values())
    assert limits.limit_of(parts) < 3 * parts["compiled"]


def test_by_default_four_pairs_are_measured(monkeypatch, tmp_path):
    seen = []

    def measure(script, _options, _bar, on_round):
        seen.append(script)
        own = {"script": script, "env_id": "X", "limits": [], "rounds": 3, "seconds": 20.0}
        on_round(own | {"provenance": provenance()})

    monkeypatch.setattr(limits, "measure", measure)
    limits.main(limits.Options(out=tmp_path))
    assert seen == list(limits.DEFAULT)
