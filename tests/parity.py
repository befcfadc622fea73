"""Settings of whole runs by which the two scripts of a pair are compared, and how they are."""

import json

import torch
from helpers import Outcome, load, on_policy

# In float64. Rounding brings 1e-11 at most, with weights shaken by 1e-14 at the start; a discount or a learning rate
# that is off by 1 %, 5e-3 and more
CLOSE = 1e-5


def weights_of(run: Outcome) -> torch.Tensor:
    """The weights that act, as one vector."""
    weights = next(run.checkpoint[part] for part in ("agent", "network", "actor") if part in run.checkpoint)
    return torch.cat([x.reshape(-1) for _, x in sorted(weights.items())])


def relative(difference: torch.Tensor, value: torch.Tensor) -> float:
    return 0.0 if not difference.any() else (difference.norm() / value.norm()).item()


def differences(run: Outcome, other: Outcome) -> dict[str, float]:
    """How far each metric is apart over the whole run, relative to its size in it; and the weights at the end."""
    apart = {"weights": relative(weights_of(run) - weights_of(other), weights_of(other))}
    for name in {name for line in other.metrics() for name in line}:
        a, b = (torch.tensor([x.get(name, 0.0) for x in y.metrics()], dtype=torch.float64) for y in (run, other))
        apart[name] = relative(a - b, b)
    return apart


def assert_agree(run: Outcome, other: Outcome, rel: float) -> None:
    """All metrics do, in all lines, and the weights."""
    for a, b in zip(run.metrics(), other.metrics(), strict=True):
        assert a.keys() == b.keys(), f"other metrics at step {b['global_step']}"
    apart = differences(run, other)
    too_far = {name: x for name, x in apart.items() if not x <= rel}
    if not too_far:
        return
    first = next((a, b) for a, b in zip(run.metrics(), other.metrics(), strict=True) if a != b)
    table = "\n".join(f"  {name:30} {x:.2e}" for name, x in sorted(too_far.items(), key=lambda item: -item[1]))
    lines = "\n".join(f"  {json.dumps(line)}" for line in first)
    raise AssertionError(f"further apart than {rel:g}:\n{table}\nthe first lines that differ:\n{lines}")


def check_course(run: Outcome) -> None:
    """A run had what the `stream` of its pair promises: episodes ended in both ways, all that is learnt moved."""
    assert min(line["charts/episodic_length"] for line in run.lines if "charts/episodes" in line) < 15  # a termination
    script = load(run.checkpoint["script"].removesuffix(".py"))
    assert sum(set(script.METRICS) <= line.keys() for line in run.lines) > 8
    if on_policy(script.__name__):
        assert max(line["losses/clipfrac"] for line in run.lines) > 0
        assert len({line["charts/learning_rate"] for line in run.lines}) > 5
    else:
        assert run.checkpoint["global_step"] > run.checkpoint["args"]["buffer_size"] + 100
