"""Effective weights are computed once per step and never stale, whoever changes the scores, and how."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskedModel
from selfmask.masking import expanding

from .architectures import (
    assert_gradients_close,
    loss_of,
    naive_mask,
    named_scores,
    score_gradients,
)
from .digits import expected_gradients, images, masked_digits, sgd


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each tensor whose mask is computed; four of them make a computation of digits_base."""
    calls: list[int] = []
    original = expanding.write_mask

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(expanding, "write_mask", counting)
    return calls


def computations(masked: MaskedModel, calls: list[int]) -> float:
    result = len(calls) / len(list(masked.scores.parameters()))
    calls.clear()
    return result


def test_computed_once_per_step(computed: list[int]) -> None:
    """Multi-crop runs the backbone several times; the masks are the same for all."""
    masked = masked_digits().train()
    optimizer = sgd(masked)
    computed.clear()
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(loss_of(masked(images(step * 10 + crop, n=8 - crop))) for crop in range(4))
        loss.backward()
        optimizer.step()
        assert computations(masked, computed) == 1


def test_computed_once_for_an_evaluation(computed: list[int]) -> None:
    masked = masked_digits().eval()
    computed.clear()
    with torch.no_grad():
        for seed in range(5):
            masked(images(seed))
    assert computations(masked, computed) <= 1
    with torch.inference_mode():
        for seed in range(5):
            masked(images(seed))
    assert computations(masked, computed) <= 1


def test_computed_again_after_a_step() -> None:
    masked = masked_digits().eval()
    optimizer = sgd(masked)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        output = masked(images())
        seen.append(output.detach())
        loss_of(output).backward()
        optimizer.step()
        torch.testing.assert_close(masked(images()).detach(), masked.merge_and_unload()(images()).detach())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_every_kind_of_sgd(settings: dict[str, bool]) -> None:
    """Fused and foreach steps write to the scores by other roads; each must be noticed."""
    masked = masked_digits().train()
    optimizer = sgd(masked, lr=3.0, **settings)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(masked(images(step))).backward()
        optimizer.step()
        output = masked(images(step))
        torch.testing.assert_close(output, masked.merge_and_unload().train()(images(step)))
        assert_gradients_close(expected_of(masked, images(step)), expected_gradients(masked, images(step)), 1e-3)


def expected_of(masked: MaskedModel, x: Tensor) -> dict[str, Tensor]:
    """Gradients of one fresh forward and backward."""
    for score in masked.scores.parameters():
        score.grad = None
    loss_of(masked(x)).backward()
    return score_gradients(masked)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_other_optimizers(optimizer: type[torch.optim.Optimizer]) -> None:
    masked = masked_digits().eval()
    step = optimizer(masked.scores.parameters(), lr=0.5)
    before = masked(images())
    loss_of(before).backward()
    step.step()
    assert not torch.equal(masked(images()), before)
    torch.testing.assert_close(masked(images()), masked.merge_and_unload()(images()))


def _in_place(masked: MaskedModel, values: list[Tensor]) -> None:
    with torch.no_grad():
        for score, value in zip(masked.scores.parameters(), values, strict=True):
            score.copy_(value)


def _load_state_dict(masked: MaskedModel, values: list[Tensor]) -> None:
    state = {name: value.clone() for name, value in zip(masked.scores.state_dict(), values, strict=True)}
    masked.scores.load_state_dict(state)


def _load_state_dict_assign(masked: MaskedModel, values: list[Tensor]) -> None:
    state = {name: value.clone() for name, value in zip(masked.scores.state_dict(), values, strict=True)}
    masked.scores.load_state_dict(state, assign=True)


def _vector_to_parameters(masked: MaskedModel, values: list[Tensor]) -> None:
    nn.utils.vector_to_parameters(torch.cat([value.flatten() for value in values]), masked.scores.parameters())


@pytest.mark.parametrize("change", [_in_place, _load_state_dict, _load_state_dict_assign, _vector_to_parameters])
@pytest.mark.parametrize("grad", [True, False])
def test_scores_changed_by_hand(change: object, grad: bool) -> None:
    """Averaged scores, restored checkpoints: the next call uses the new scores."""
    masked = masked_digits(seed=3).eval()
    wanted = masked_digits(seed=4).eval()
    with torch.set_grad_enabled(grad):
        masked(images())
        change(masked, [score.detach().clone() for score in wanted.scores.parameters()])
        assert torch.equal(masked(images()), wanted(images()))


def test_optimizers_that_write_to_data() -> None:
    """Old ones do, where autograd cannot see it; in the usual order of a step it must not matter."""
    masked = masked_digits().eval()
    for seed in range(3):
        with torch.no_grad():
            masked(images(7))
        loss_of(masked(images(seed))).backward()
        for score in masked.scores.parameters():
            score.data.add_(score.grad, alpha=-5.0)
            score.grad = None
        expected = dense_of(masked)(images(seed))
        with torch.no_grad():
            torch.testing.assert_close(masked(images(seed)), expected)
        torch.testing.assert_close(masked(images(seed)).detach(), expected)


def dense_of(masked: MaskedModel) -> nn.Module:
    """The base with the mask burnt in by hand."""
    dense = copy.deepcopy(masked.base).requires_grad_(False)
    for name, score in named_scores(masked).items():
        mask = naive_mask(masked, score).float()
        dense.get_parameter(name).mul_(mask / mask.mean().sqrt())
    return dense


def test_base_weights_changed_by_hand() -> None:
    masked = masked_digits().eval()
    before = masked(images()).detach()
    with torch.no_grad():
        masked.base[0].weight.mul_(3)
    found = masked(images()).detach()
    assert not torch.equal(found, before)
    assert torch.equal(found, masked.merge_and_unload()(images()).detach())


def test_progress_is_noticed() -> None:
    masked = masked_digits(rule="progressive_topk", active_share=0.2).eval()
    with torch.no_grad():
        before = masked(images())
        masked.progress = 1.0
        assert not torch.equal(masked(images()), before)
