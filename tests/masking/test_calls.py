"""Gradients in every order of forward and backward calls."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from selfmask import MaskedModel, get_masked_model

from .architectures import (
    assert_gradients_close,
    loss_of,
    named_scores,
    oracle,
    perturb_scores,
    score_gradients,
)
from .digits import expected_gradients, images, masked_digits, sgd


def test_two_forwards_one_backward(masked: MaskedModel) -> None:
    (loss_of(masked(images(1))) + loss_of(masked(images(2)))).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1), images(2)), 1e-3)


def test_two_forwards_two_backwards(masked: MaskedModel) -> None:
    """One loss per view, each with its own backward, in either order."""
    expected = expected_gradients(masked, images(1), images(2))
    for first, second in ((0, 1), (1, 0)):
        masked.scores.zero_grad()
        losses = [loss_of(masked(images(1))), loss_of(masked(images(2)))]
        losses[first].backward()
        losses[second].backward()
        assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_a_late_backward_is_right_or_refused() -> None:
    """The memory of effective weights is used again; a backward that comes too late must not read what is new."""
    torch.manual_seed(0)
    masked = get_masked_model(nn.Linear(4, 4))
    perturb_scores(masked)
    xs = [torch.randn(3, 4) for _ in range(3)]
    _, expected = oracle(masked, masked.base, xs[1])
    losses = [loss_of(masked(x)) for x in xs[:2]]
    losses[0].backward()
    masked.scores.zero_grad()
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.neg_()
    masked(xs[2])
    try:
        losses[1].backward()
    except RuntimeError:  # as PyTorch does where weights were changed before their backward
        return
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_gradient_accumulation(masked: MaskedModel) -> None:
    for seed in (1, 2, 3):
        loss_of(masked(images(seed))).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, *map(images, (1, 2, 3))), 1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_in_between(mode: type, masked: MaskedModel) -> None:
    expected = expected_gradients(masked, images(1), images(2))
    with mode():
        masked(images(7))
    loss = loss_of(masked(images(1)))
    with mode():
        silent = masked(images(1))
    assert not silent.requires_grad
    loss = loss + loss_of(masked(images(2)))
    with mode():
        masked(images(7))
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_training_steps(mode: type) -> None:
    """The masks of a run that looks at itself on the way are those of one that does not."""
    quiet, watched = masked_digits(), masked_digits()
    for masked in (quiet, watched):
        optimizer = sgd(masked)
        for step in range(3):
            masked.train()
            optimizer.zero_grad()
            loss_of(masked(images(step))).backward()
            optimizer.step()
            if masked is watched:
                masked.eval()
                with mode():
                    output = masked(images(5))
                    assert torch.equal(output, masked.merge_and_unload()(images(5)))
    assert torch.equal(quiet.eval()(images()), watched.eval()(images()))


def test_switching_masks_between_forward_and_backward(masked: MaskedModel) -> None:
    expected = expected_gradients(masked, images(1))
    other = get_masked_model(copy.deepcopy(masked.base))
    perturb_scores(other, seed=8)
    masked.load_mask(other.mask_bytes(), "other")
    loss = loss_of(masked(images(1)))
    masked.set_mask("other")
    with torch.no_grad():
        masked(images(2))
    masked(images(2))
    masked.set_mask("default")
    with torch.no_grad():
        masked(images(3))
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_a_step_between_forward_and_backward(masked: MaskedModel) -> None:
    """The gradient is that of the masks that ran, as it is for any other network's weights, or an error."""
    expected = expected_gradients(masked, images(1))
    loss = loss_of(masked(images(1)))
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.neg_()
    masked(images(2))
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected, 1e-3)


def test_a_discarded_forward(masked: MaskedModel) -> None:
    masked(images(5))
    loss_of(masked(images(1))).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1)), 1e-3)


def test_retained_graph(masked: MaskedModel) -> None:
    loss = loss_of(masked(images(1)))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1), images(1)), 1e-3)


def test_gradient_of_the_input(masked: MaskedModel) -> None:
    """Saliency maps, and adversarial training."""
    x = images(1).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(masked(x)), x)
    merged = masked.merge_and_unload()
    (expected,) = torch.autograd.grad(loss_of(merged(x)), x)
    torch.testing.assert_close(gradient, expected)
    loss_of(masked(x)).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1)), 1e-3)


def test_some_scores_frozen(masked: MaskedModel) -> None:
    scores = named_scores(masked)
    scores["0.weight"].requires_grad_(False)
    loss_of(masked(images(1))).backward()
    assert scores["0.weight"].grad is None
    expected = expected_gradients(masked, images(1))
    for name, score in scores.items():
        if name != "0.weight":
            torch.testing.assert_close(score.grad, expected[name], rtol=1e-3, atol=1e-4)


def test_memory_is_let_go() -> None:
    """A model that goes out of use, its last graph never used up, frees its memory at once: no reference cycles."""
    masked = masked_digits()
    loss_of(masked(images()))
    gone = [weakref.ref(tensor) for tensor in (*masked.base.parameters(), *masked.scores.parameters())]
    gc.disable()
    try:
        del masked
        assert all(reference() is None for reference in gone)
    finally:
        gc.enable()


def test_memory_is_used_again(masked: MaskedModel) -> None:
    """Training takes one effective weight per tensor, not one per step."""
    optimizer = sgd(masked)
    places = set()
    for step in range(6):
        optimizer.zero_grad()
        seen = []
        hook = masked.base[3].register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.weight))
        loss = loss_of(masked(images(step)))
        hook.remove()
        places.add(seen[0].data_ptr())
        loss.backward()
        optimizer.step()
    assert len(places) == 1
