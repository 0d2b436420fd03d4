"""A copy that learns beside its frozen base: its norm statistics are treated as a mask's are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, get_masked_model
from selfmask.training.beside import Tuned
from selfmask.training.methods import prepare_beside
from tests.training.small import network

ANCHORED = MaskConfig(norm="anchored", select="all", exclude=("*.bias", "1.*"))


def images(seed: int = 0) -> Tensor:
    """Unlike what the network's own statistics are of, so that these matter."""
    return 2 + 3 * torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def base() -> nn.Module:
    model = network()
    norm = model[1]
    torch.manual_seed(1)
    for tensor in (norm.weight.data, norm.running_mean):
        tensor.add_(torch.randn(8) / 4)
    norm.running_var.mul_(1 + torch.rand(8))
    return model.eval()


def tuned(method: str = "full", config: MaskConfig = ANCHORED) -> Tuned:
    made = prepare_beside(base(), method, config).model  # type: ignore[arg-type]
    assert isinstance(made, Tuned)
    return made


def test_in_training_it_is_what_a_mask_with_all_weights_on_is() -> None:
    masked, model = get_masked_model(base(), ANCHORED), tuned()
    for each in (masked, model):
        each.anchor([images()])
        each.train()
    torch.testing.assert_close(model(images(1)), masked(images(1)))
    assert not model.base.training


def test_untrained_it_goes_back_to_the_frozen_base() -> None:
    model = tuned()
    model.anchor([images()])
    model.train()
    model(images(1))
    model.recalibrate([images()])
    torch.testing.assert_close(model.eval()(images(2)), base()(images(2)), rtol=1e-4, atol=1e-5)


def test_what_was_trained_is_in_evaluation_what_it_was_in_training() -> None:
    """With other weights, scales and biases, too: on the images that statistics are of, both modes agree."""
    model = tuned()
    model.anchor([images()])
    with torch.no_grad():
        for parameter in model.learned.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    trained = model.train()(images())
    model.recalibrate([images()])
    torch.testing.assert_close(model.eval()(images()), trained, rtol=1e-4, atol=1e-4)


def test_gradients_reach_norm_layers_and_nothing_of_the_base_moves() -> None:
    model = tuned("bitfit")
    before = copy.deepcopy(model.base.state_dict())
    model.anchor([images()])
    model.train()(images(1)).square().sum().backward()
    assert float(model.learned[1].weight.grad.abs().sum()) > 0  # type: ignore[index, union-attr]
    assert float(model.learned[1].bias.grad.abs().sum()) > 0  # type: ignore[index, union-attr]
    assert all(parameter.grad is None for parameter in model.base.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.base.state_dict().items())


@pytest.mark.parametrize(("norm", "moves"), [("adapt", True), ("frozen", False), ("anchored", False)])
def test_statistics_move_in_training_only_where_that_is_asked_for(norm: str, moves: bool) -> None:
    model = tuned(config=MaskConfig(norm=norm))  # type: ignore[arg-type]
    if norm == "anchored":
        model.anchor([images()])
    before = model.learned[1].running_mean.clone()  # type: ignore[index, operator, union-attr]
    model.train()(images())
    assert torch.equal(model.learned[1].running_mean, before) is not moves  # type: ignore[index]


def test_averages_over_batches_are_plain() -> None:
    model = tuned(config=MaskConfig(norm="recalibrate"))
    parts = [images(seed) for seed in range(3)]
    model.recalibrate(parts)
    with torch.no_grad():
        seen = [model.learned[0](part) for part in parts]  # type: ignore[index, operator]
    mean = torch.stack([each.mean((0, 2, 3)) for each in seen]).mean(0)
    torch.testing.assert_close(model.learned[1].running_mean, mean, rtol=1e-4, atol=1e-5)  # type: ignore[index]
