"""The loss formulas of PPO, each against a plain loop in NumPy over one row after the other."""

import numpy as np
import pytest
import torch
from helpers import SCRIPTS, load

PPO = [path.stem for path in SCRIPTS if path.stem.startswith("ppo") and not path.stem.endswith("_torchcompile")]
each_ppo = pytest.mark.parametrize("name", PPO)


def columns(count: int, rows: int = 200) -> list[np.ndarray]:
    return list(np.random.default_rng(count).normal(size=(count, rows)))


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.asarray(x, dtype=np.float64)) for x in arrays]


@each_ppo
@pytest.mark.parametrize("clip_coef", [0.1, 0.3])
def test_policy_loss_is_the_clipped_surrogate(name, clip_coef):
    """The gain of a row ends where the ratio leaves the clip range; a loss does not. Rows of resets do not count."""
    advantage, log_ratio = columns(2)
    ratio, valid = np.exp(0.5 * log_ratio), np.random.default_rng(1).random(200) < 0.8
    terms = []
    for r, a, is_valid in zip(ratio, advantage, valid, strict=True):
        if is_valid:
            limit = (1 + clip_coef) * a if a > 0 else (1 - clip_coef) * a
            terms.append(min(r * a, limit))
    loss = load(name).clipped_policy_loss(*tensors(ratio, advantage, valid), clip_coef)
    assert loss.item() == pytest.approx(-np.mean(terms), rel=1e-12)
    assert 0.1 < np.mean((ratio < 1 - clip_coef) & valid) and 0.1 < np.mean((ratio > 1 + clip_coef) & valid)


@each_ppo
def test_policy_loss_has_no_gradient_where_the_ratio_was_clipped(name):
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    advantage, valid = tensors([1, -1, 1, -1, 1], [1, 1, 1, 1, 1])
    (gradient,) = torch.autograd.grad(load(name).clipped_policy_loss(ratio, advantage, valid, 0.2), ratio)
    assert (5 * gradient).tolist() == pytest.approx([0, 1, -1, 0, -1])


@each_ppo
@pytest.mark.parametrize("clip_coef", [None, 0.2])
def test_value_loss_is_the_larger_of_two_errors(name, clip_coef):
    value, old_value, returns = columns(3)
    valid, terms, kept = np.random.default_rng(1).random(200) < 0.8, [], 0
    for v, old, target, is_valid in zip(value, old_value, returns, valid, strict=True):
        if is_valid:
            error = (v - target) ** 2
            if clip_coef is not None:
                clipped = min(max(v, old - clip_coef), old + clip_coef)
                kept += (clipped - target) ** 2 > error
                error = max(error, (clipped - target) ** 2)
            terms.append(error)
    loss = load(name).clipped_value_loss(*tensors(value, old_value, returns, valid), clip_coef)
    assert loss.item() == pytest.approx(0.5 * np.mean(terms), rel=1e-12)
    assert clip_coef is None or 20 < kept < 180


@each_ppo
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_clip_scales_all_gradients_together(name, size):
    generator = torch.Generator().manual_seed(1)
    shapes = (3, 4), (5,), (2, 3, 2, 2)
    gradients = tuple(size * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    before = [gradient.clone() for gradient in gradients]
    norm = np.sqrt(sum((x.numpy() ** 2).sum() for x in gradients))
    clipped = load(name).clip(gradients, 0.5)
    for old, kept, new in zip(before, gradients, clipped, strict=True):
        assert torch.equal(old, kept)  # not changed in place
        np.testing.assert_allclose(new.numpy(), old.numpy() * min(1.0, 0.5 / norm), rtol=1e-5)
    assert np.sqrt(sum((x.numpy() ** 2).sum() for x in clipped)) <= 0.5 * (1 + 1e-9)
    assert (norm > 0.5) == (size >= 1)
