"""./run.sh inference with toy budgets, and its parts."""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_helpers import benchmark, refusal

from benchmarks.acting import inference, inference_worker, paths
from benchmarks.acting.networks import NETWORKS, draw_inputs, make_act
from benchmarks.acting.paths import Built, build, path_names
from benchmarks.common import turns
from benchmarks.common.programs import pairs
from benchmarks.common.results import provenance

CPU = torch.device("cpu")


def settings(path: str = "eager", **changes) -> dict:
    return {"network": "ppo", "path": path, "device": "cpu", "threads": 1, "seconds": 0.02, **changes}


@pytest.mark.slow
def test_inference_from_end_to_end(tmp_path):
    """A path that works, and one that this machine lacks."""
    flags = ["--networks", "ppo", "--paths", "numpy", "openxla", "--batch-sizes", 1, 8, "--seconds", 0.05]
    done = benchmark("inference", *flags, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"ppo.cpu.json", "inference.md", "inference.png"}
    result = json.loads((tmp_path / "ppo.cpu.json").read_text())
    cells = {(cell["path"], cell["batch_size"]): cell for cell in result["cells"]}
    assert len(cells) == 4
    for size in (1, 8):
        assert "ImportError" in cells["openxla", size]["error"] and "speedup" not in cells["openxla", size]
        own = cells["numpy", size]
        assert own["equal"] and own["weights"] == "follow" and own["refresh_seconds"] == 0
        assert 1 < own["p50_us"] <= own["p99_us"] < 1e5 and own["cpu_us"] > 1 and own["calls"] > 20
        assert own["speedup"] == pytest.approx(own["eager_p50_us"] / own["p50_us"], rel=0.5)
    text = (tmp_path / "inference.md").read_text()
    assert text in done.stdout and inference.best_line(result) in text and "failed: " in text and "/tmp" not in text


def test_a_result_with_paths_that_did_not_get_their_time_replaces_no_whole_one(tmp_path, monkeypatch):
    """Nor is half a call enough to make up for an update."""

    def measure_with(*broken):
        cells = [
            {"path": path, "batch_size": 1} | ({"error": "no time left"} if path in broken else {}) for path in paths
        ]
        result = {"network": "ppo", "device": "cpu", "threads": 1, "batch_sizes": [1], "cells": cells}
        monkeypatch.setattr(inference, "measure", lambda *x: x[-1](result | {"provenance": provenance()}, True))
        options = {"batch_sizes": (1,), "devices": ("cpu",), "out": tmp_path}
        assert inference.main(inference.Options(("ppo",), ("numpy", "eager"), **options)) == len(broken)
        return [cell for cell in json.loads((tmp_path / "ppo.cpu.json").read_text())["cells"] if "error" in cell]

    paths = ("eager", "numpy")
    monkeypatch.setattr(inference, "write_summary", lambda _: "")
    assert len(measure_with("numpy")) == 1 and measure_with() == []
    assert measure_with("numpy") == [] and (tmp_path / "ppo.cpu.json.part").exists()
    assert [inference.calls(x) for x in (None, 0, 0.2, 1234.5)] == ["never", "0", "1", "1,235"]


@pytest.mark.parametrize("name", ["ppo", "ppo_env_pool"])
def test_a_network_acts_once(name):
    """Each layer is called once, or eager would look slower than it is; the values are those of the script."""
    network, calls = make_act(name), []
    obs, noise = draw_inputs(name, network, 5, torch.device("cpu"))
    layers = [layer for layer in network.agent.modules() if isinstance(layer, torch.nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    action, log_prob, value = network(obs, noise)
    assert len(calls) == len(layers) and set(calls) == set(layers)
    output = network.agent.actor(obs)
    assert torch.equal(action, (output + noise).argmax(1)) and torch.equal(value, network.agent.critic(obs)[:, 0])
    torch.testing.assert_close(log_prob, output.log_softmax(1)[torch.arange(5), action])


def contestant(code: str, output: Path) -> turns.Contestant:
    return turns.Contestant([sys.executable, "-c", code], output)


@pytest.mark.slow
def test_a_contestant_that_dies_or_hangs_is_a_row(tmp_path):
    """One ends before its turn, one is killed in it, one is never ready, and the last one measures."""
    programs = {
        "dies": "raise SystemExit('out of luck')",
        "killed": "from benchmarks.common import turns; import os; turns.wait_for_turn(); os.kill(os.getpid(), 11)",
        "hangs": "import time; time.sleep(60)",
        "works": "from benchmarks.common import turns; turns.wait_for_turn(); print('done')",
    }
    contestants = {name: contestant(code, tmp_path / name) for name, code in programs.items()}
    ended = []
    turns.take_turns(list(contestants.values()), 2, 5.0, math.inf, ended.append)
    assert len(ended) == 4
    errors = {name: x.error for name, x in contestants.items()}
    assert errors["works"] is None and "done" in contestants["works"].child.last_lines()
    assert "out of luck" in errors["dies"] and errors["killed"] == "ended by SIGSEGV" and "not ready" in errors["hangs"]


def test_a_case_has_as_many_threads_as_it_says(tmp_path, monkeypatch):
    """NumPy's too, which takes all cores unless it is told at its start."""
    code = "import json, os, sys; case = json.loads(sys.argv[1]); row = {'threads': os.environ['OPENBLAS_NUM_THREADS']}"
    code += "; open(case['rows'], 'w').write(json.dumps(row) + '\\n')"
    (tmp_path / "program.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = []
    case = {"device": "cpu", "threads": 3}
    turns.run_cases("program", [case], 1, 20.0, math.inf, lambda *x: found.append(x))
    assert found == [(case, [{"threads": "3"}], "no result")]


def test_contestants_measure_one_at_a_time(tmp_path):
    """They are ready side by side, and awake in turns."""
    code = "from benchmarks.common import turns; import time; turns.wait_for_turn(); a = time.time(); time.sleep(0.3);"
    code += "print(a, time.time())"
    contestants = [contestant(code, tmp_path / str(i)) for i in range(3)]
    turns.take_turns(contestants, 3, 20.0, math.inf, lambda _: None)
    times = [list(map(float, x.child.last_lines().split())) for x in contestants]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("name", NETWORKS)
def test_numpy_and_torch_agree(name):
    act = make_act(name)
    inputs = draw_inputs(name, act, 5, CPU)
    with torch.no_grad():
        outputs = act(*inputs)
        assert all(len(x) == 5 and x.isfinite().all() for x in outputs)
        if inputs[0].ndim > 2:
            with pytest.raises(NotImplementedError, match="CNN"):
                build("numpy", act, inputs)
            return
        assert inference_worker.difference(list(build("numpy", act, inputs).call(*inputs)), list(outputs)) < 1e-5


def test_every_script_has_an_act_function():
    """Or acts as another one does."""
    assert {name for name in pairs() if not name.endswith("_ray")} <= set(NETWORKS)


def test_log_probabilities_are_those_of_the_actions():
    """Against PyTorch's distributions, by networks whose weights are no longer those of the start."""
    for name in ("ppo", "ppo_continuous_action", "rllib_cnn"):
        act = make_act(name)
        inputs = draw_inputs(name, act, 6, CPU)
        with torch.no_grad():
            for weights in act.parameters():
                weights.add_(0.1 * torch.randn_like(weights))
            action, log_prob, value = act(*inputs)
            if name == "ppo_continuous_action":
                mean, log_std, expected_value = act.agent(inputs[0])
                policy = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
            elif name == "ppo":
                logits, expected_value = act.agent(inputs[0])
                policy = torch.distributions.Categorical(logits=logits)
            else:
                features = act.body(inputs[0])
                policy, expected_value = torch.distributions.Categorical(logits=act.policy(features)), value
                assert features.shape == (6, 256)
        torch.testing.assert_close(log_prob, policy.log_prob(action), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(value, expected_value)


def test_differences():
    floats, flips = [torch.tensor([1.0, 200.0])], [torch.tensor([0, 1]), torch.tensor([1.0, 2.0])]
    assert inference_worker.difference(floats, floats) == 0
    assert inference_worker.difference([torch.tensor([1.0, 202.0])], floats) == pytest.approx(0.01)
    assert inference_worker.difference([torch.tensor([math.nan, 200.0])], floats) == math.inf
    assert inference_worker.difference([torch.tensor([1.0])], floats) == math.inf
    assert inference_worker.difference([torch.tensor([1, 1]), flips[1]], flips) == math.inf
    many = [torch.zeros(2000, dtype=torch.int64), torch.zeros(2000)]
    few_flips = [many[0].clone(), many[1].clone()]
    few_flips[0][:2], few_flips[1][:2] = 1, 5.0  # two rows of 2000: rounding, which the other outputs follow
    assert inference_worker.difference(few_flips, many) == 0
    few_flips[1][5] = 0.5
    assert inference_worker.difference(few_flips, many) == 0.5


def with_copy_of_weights(_path, act, _inputs) -> Built:
    """A path with weights of its own, which a refresh brings up to date."""
    copy = make_act("ppo")
    copy.load_state_dict(act.state_dict())
    return Built(copy, lambda: copy.load_state_dict(act.state_dict()))


@pytest.mark.parametrize("verdict", ["follow", "refreshed", "stale", "stale for ever"])
def test_verdict_on_weights(verdict, monkeypatch):
    real = build

    def fake(path, act, inputs) -> Built:
        if path == "eager":
            return real(path, act, inputs)
        built = with_copy_of_weights(path, act, inputs)
        refresh = {"stale": None, "stale for ever": lambda: None}.get(verdict, built.refresh)
        return Built(lambda *x: act(*x)) if verdict == "follow" else Built(built.call, refresh)

    monkeypatch.setattr(paths, "build", fake)
    with torch.no_grad():
        case = inference_worker.prepare(settings("fake"), 8)
        row = inference_worker.measure(case, 0.02)
    assert row["equal"] and row["weights"] == verdict.split()[0]
    assert (row["refresh_seconds"] > 0) == (verdict in ("refreshed", "stale for ever"))
    assert inference.trusted(row) == (not verdict.startswith("stale"))


def test_an_unequal_path_is_seen(monkeypatch):
    real = build

    def fake(path, act, inputs) -> Built:
        return real(path, act, inputs) if path == "eager" else Built(lambda *x: [1.001 * y for y in act(*x)])

    monkeypatch.setattr(paths, "build", fake)
    with torch.no_grad():
        row = inference_worker.prepare(settings("fake", network="td3_continuous_action"), 8).row
    assert not row["equal"] and row["difference"] > 1e-4


def cell(path: str, speedup: float, **changes) -> dict:
    known = {
        "equal": True,
        "weights": "follow",
        "refresh_seconds": 0.0,
        "interval": [0.9 * speedup, 1.1 * speedup],
        "batch_size": 1,
    }
    return {"path": path, "speedup": speedup, **known, **changes}


def test_only_a_path_that_can_be_trusted_is_best():
    good, faster = cell("good", 2.0), cell("faster", 9.0)
    assert inference.best_of([cell("eager", 1.0), good, faster]) is faster
    for fault in ({"equal": False}, {"weights": "stale"}, {"error": "it crashed"}, {"interval": [1.7, 20.0]}):
        assert inference.best_of([cell("eager", 1.0), good, faster | fault]) is good
    assert inference.best_of([cell("eager", 1.3), cell("doubtful", 1.05)]) is None
    assert inference.best_of([{"path": "eager", "error": "no result"}]) is None
    noisy = cell("eager", 1.2, interval=[0.9, 1.4])  # eager against itself: no smaller gain is one
    assert inference.best_of([noisy, cell("within", 1.5)]) is None and inference.best_of([noisy, good]) is good


def test_one_line_names_the_best():
    cells = [cell("good", 2.0), cell("good", 1.02, batch_size=4096)]
    result = {"network": "ppo", "device": "cpu", "batch_sizes": [1, 4096], "cells": cells}
    assert inference.best_line(result) == "Best for ppo on cpu, by batch size: 1: good (+100 %), 4,096: eager."
    copied = cell("copied", 2.0, refresh_seconds=0.0015, refresh_calls=30.2)
    assert inference.best_paths(result | {"cells": [copied], "batch_sizes": [1]}) == {
        1: "copied (+100 %; 1.5 ms an update, made up for by 31 calls)"
    }


def test_a_compiled_path_has_compiled_something():
    with torch.no_grad():
        case = inference_worker.prepare(settings("aot_eager", network="dqn"), 4)
        assert case.row["compiled_graphs"] == 1
        assert inference_worker.prepare(settings("eager", network="dqn"), 4).row["compiled_graphs"] == 0
        with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="nothing was compiled"):
            inference_worker.prepare(settings("aot_eager", network="dqn"), 4)


def test_break_even_counts_compiling_and_a_refresh(monkeypatch):
    times = {"eager": turns.Times([np.full(9, 3e-3)] * 4, 1e-3), "path": turns.Times([np.full(9, 1e-3)] * 4, 1e-3)}
    monkeypatch.setattr(turns, "interleave", lambda *_: times)
    with torch.no_grad():
        case = inference_worker.prepare(settings(), 1)
        case.row |= {"compile_seconds": 10.004, "refresh_seconds": 0.5}
        row = inference_worker.measure(case, 1.0)
    assert row["speedup"] == pytest.approx(3) and row["cpu_us"] == pytest.approx(1000)
    assert row["break_even_calls"] == pytest.approx(10.5 / 2e-3) and row["refresh_calls"] == pytest.approx(0.5 / 2e-3)


def test_every_backend_and_mode_that_torch_lists_is_a_path():
    cpu, cuda = path_names(CPU), path_names(torch.device("cuda"))
    for names in (cpu, cuda):
        assert set(torch._dynamo.list_backends()) < set(names) and "aoti" in names
        assert {"inductor/reduce-overhead", "inductor/max-autotune", "inductor/max-autotune-no-cudagraphs"} < set(names)
    assert {"ort", "numpy"} < set(cpu) and {"CudaGraphModule", "inductor+CudaGraphModule"} < set(cuda)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"networks": ("alexnet",)}, "no network alexnet; there are ppo"),
        ({"paths": ("magic",)}, "no path magic"),
        ({"batch_sizes": (0,)}, "--batch-sizes"),
        ({"seconds": 0}, "--seconds"),
        ({"devices": ("tpu",)}, "no device tpu"),
        ({"smoke": True, "batch_sizes": (8,)}, "--batch-sizes: --smoke chooses it"),
    ],
)
def test_bad_input(options, message, tmp_path, capsys):
    assert message in refusal(inference.check, inference.Options(**{"out": tmp_path, **options}), capsys)


def test_messages_without_folders():
    assert turns.without_paths("see https://pytorch.org/docs/xla/") == "see https://pytorch.org/docs/xla/"
    assert turns.without_paths("\nOSError: no file /home/me/x-1/lib.so here\nmore") == "OSError: no file lib.so here"


def row_with(monkeypatch, eager: list[float], own: list[float]) -> dict:
    """The row of a path whose calls took, block by block, so many ms beside eager's."""
    blocks = {"eager": [np.full(9, 1e-3 * x) for x in eager], "path": [np.full(9, 1e-3 * x) for x in own]}
    monkeypatch.setattr(turns, "interleave", lambda *_: {name: turns.Times(x, 1e-3) for name, x in blocks.items()})
    with torch.no_grad():
        where = {"network": "ppo", "path": "eager", "device": "cpu", "threads": 1, "seconds": 0.02}
        case = inference_worker.prepare(where, 1)
        case.row |= {"compile_seconds": 10.0, "refresh_seconds": 0.0}
        return inference_worker.measure(case, 1.0)


def test_what_is_not_faster_beyond_doubt_never_pays(monkeypatch):
    row = row_with(monkeypatch, [1.0, 2.0, 3.0, 4.0], [1.0, 1.5, 2.0, 4.0])
    assert row["speedup"] > 1 > row["interval"][0] and row["break_even_calls"] is None is row["refresh_calls"]


def test_outputs_that_change_from_call_to_call_are_unequal(monkeypatch):
    """As of a recorded graph whose first call is right."""
    counts = []

    def fake(_path, act, _inputs) -> Built:
        def call(*inputs):
            counts.append(1)
            return [x * (1.0 if len(counts) == 1 else 1.01) for x in act(*inputs)]

        return Built(call)

    monkeypatch.setattr(paths, "build", fake)
    where = {"network": "td3_continuous_action", "path": "fake", "device": "cpu"}
    with torch.no_grad():
        assert not inference_worker.prepare(where, 8).row["equal"]
