"""One matrix: every rule on every kind of network."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from selfmask import MaskConfig, MaskedModel, get_masked_model

from .architectures import (
    ARCHITECTURES,
    as_tensor,
    assert_gradients_close,
    assert_same_state,
    base_of,
    inputs_of,
    loss_of,
    naive_mask,
    named_scores,
    oracle,
    perturb_scores,
    score_gradients,
    state_of,
)

RULES = {
    "threshold": MaskConfig(rule="threshold"),
    "topk": MaskConfig(rule="topk", active_share=0.7, score_init="constant"),
    "topk-kaiming": MaskConfig(rule="topk", active_share=0.7),
    "progressive": MaskConfig(rule="progressive_topk", active_share=0.6),
}
TOLERANCE = 1e-6  # in float64; scores and their gradients are float32
ALL = [(architecture, rule) for architecture in ARCHITECTURES for rule in RULES]
# Where rule and kind of network can hardly depend on each other: every one of both.
ONCE = [(name, list(RULES)[i % len(RULES)]) for i, name in enumerate(ARCHITECTURES)]
matrix = pytest.mark.parametrize(("architecture", "rule"), ALL)
each_once = pytest.mark.parametrize(("architecture", "rule"), ONCE)
each_once_then_all = pytest.mark.parametrize(
    ("architecture", "rule"), [pytest.param(*pair, marks=() if pair in ONCE else pytest.mark.heavy) for pair in ALL]
)


def masked_of(base: nn.Module, architecture: str, rule: str) -> MaskedModel:
    return get_masked_model(base, dataclasses.replace(RULES[rule], select=ARCHITECTURES[architecture].select))


def trained(base: nn.Module, architecture: str, rule: str) -> MaskedModel:
    """As after some training: scores moved, half-way through, statistics moved."""
    masked = masked_of(base, architecture, rule)
    perturb_scores(masked)
    masked.progress = 0.5
    with torch.no_grad():
        masked.train()(inputs_of(architecture))
    return masked


@matrix
def test_start(architecture: str, rule: str) -> None:
    """Nothing is off at the start but what top-k must leave out; then it is a dense network of w * m / alpha."""
    dtype = torch.float64 if RULES[rule].rule == "topk" else torch.float32
    base, x = base_of(architecture).to(dtype), inputs_of(architecture).to(dtype)
    plain = copy.deepcopy(base)
    masked = masked_of(base, architecture, rule)
    scores = named_scores(masked)
    if masked.config.rule == "topk":
        weights = dict(plain.named_parameters())
        with torch.no_grad():
            for name, score in scores.items():
                mask = naive_mask(masked, score).to(dtype)
                assert mask.sum() == round(0.7 * mask.numel())
                weights[name].mul_(mask / mask.mean().sqrt())
    for training in (False, True):
        expected = as_tensor(plain.train(training)(x)).detach()
        found = as_tensor(masked.train(training)(x)).detach()
        if masked.config.rule == "topk":
            torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))
        else:
            assert torch.equal(found, expected)


@matrix
def test_gradients(architecture: str, rule: str) -> None:
    """Scores get the total derivative dL/dM, alpha's share included, as plain autograd gives it."""
    # Batch norm over few values amplifies rounding, hence float64.
    base, x = base_of(architecture).double().train(), inputs_of(architecture).double()
    plain = copy.deepcopy(base)
    masked = masked_of(base, architecture, rule)
    perturb_scores(masked)
    masked.progress = 0.5
    output = masked(x)
    loss_of(output).backward()
    expected_output, expected = oracle(masked, plain, x)
    torch.testing.assert_close(as_tensor(output), expected_output, rtol=TOLERANCE, atol=TOLERANCE)
    assert_gradients_close(score_gradients(masked), expected, TOLERANCE)
    assert all(parameter.grad is None for parameter in base.parameters())


@each_once_then_all
def test_save_load_merge(architecture: str, rule: str, tmp_path: Path) -> None:
    """A mask on disk, put on a fresh base, burnt in, or both: the same outputs to the last bit."""
    x = inputs_of(architecture)
    masked = trained(base_of(architecture), architecture, rule).eval()
    path = tmp_path / "mask.smn"
    assert masked.save_pretrained(path) == path.stat().st_size
    loaded = MaskedModel.from_pretrained(base_of(architecture), path).eval()
    with torch.no_grad():
        expected = as_tensor(masked(x))
        assert torch.isfinite(expected).all()
        assert not torch.equal(expected, as_tensor(base_of(architecture).eval()(x)))  # the mask does something
        # torch chooses its kernel for some products by requires_grad, even where no gradient is wanted
        merged = (masked.merge_and_unload().requires_grad_(False), loaded.merge_and_unload().requires_grad_(False))
        for other in (loaded, *merged):
            assert torch.equal(as_tensor(other(x)), expected)
    assert loaded.num_masked == masked.num_masked
    assert loaded.sparsity() == masked.sparsity()


@each_once
def test_base_is_untouched_by_training(architecture: str, rule: str) -> None:
    """Three steps in train mode move scores and statistics, and nothing of the base."""
    base, x = base_of(architecture), inputs_of(architecture)
    before, modules = state_of(base), dict(base.named_modules())
    parameters = dict(base.named_parameters())
    masked = trained(base, architecture, rule)
    start = {name: score.detach().clone() for name, score in named_scores(masked).items()}
    optimizer = torch.optim.SGD(masked.scores.parameters(), lr=0.1, momentum=0.9)
    masked.train()
    for step in range(3):
        masked.progress = (step + 1) / 3
        optimizer.zero_grad()
        loss_of(masked(x)).backward()
        optimizer.step()
    moved = [not torch.equal(score, start[name]) for name, score in named_scores(masked).items()]
    assert sum(moved) > 0.5 * len(moved)  # biases of keys, and before a batch norm, have no gradient
    assert_same_state(base, before)
    assert dict(base.named_modules()) == modules
    assert all(parameter is parameters[name] for name, parameter in base.named_parameters())
