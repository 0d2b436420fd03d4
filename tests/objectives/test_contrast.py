"""Contrast against a naive oracle in plain loops, finite differences, and itself in two processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from selfmask import MaskConfig, get_masked_model
from selfmask.errors import ConfigError
from selfmask.objectives.contrast import Contrast, ContrastConfig, Objective

from ..processes import PROCESSES
from . import small

torch.set_num_threads(1)
IMAGES, FEATURES = 5, 6
TWO, THREE = (8, 8), (8, 8, 4)  # sides of the views
Array = Any


backbone = partial(small.backbone, FEATURES)


def views(sides: tuple[int, ...] = THREE, images: int = IMAGES) -> list[Tensor]:
    torch.manual_seed(2)
    common = torch.randn(images, 3, 1, 1)
    return [common + torch.randn(images, 3, side, side) for side in sides]


def objective(frozen: Callable[[Tensor], Tensor] | None = None, projector: bool = True, **settings: Any) -> Contrast:
    """With a projector that has learned something, and a frozen backbone other than the one that learns."""
    frozen = frozen or backbone(seed=9)
    torch.manual_seed(3)
    contrast = Contrast(torch.randn(FEATURES) * 0.1, ContrastConfig(**settings), frozen=frozen)
    if projector:
        with torch.no_grad():
            contrast.projector.weight.add_(torch.randn(FEATURES, FEATURES) * 0.3)
            contrast.projector.bias.add_(torch.randn(FEATURES) * 0.1)
    return contrast


# ---- the oracle: float64, one number at a time ---------------------------------------------------------------


def naive_softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def unit(vector: Array) -> Array:
    return vector / math.sqrt(sum(float(x) ** 2 for x in vector))


def naive_targets(h: Array, centre: Array, config: ContrastConfig) -> Array:
    count = len(h)
    h = [unit(row - centre) for row in h]
    targets = np.zeros((count, count))
    for i in range(count):
        others = [j for j in range(count) if j != i]
        kin = naive_softmax([float(h[i] @ h[j]) / config.kin_temperature for j in others])
        for j, share in zip(others, kin, strict=True):
            targets[i, j] = config.kinship * share
        targets[i, i] = 1 - config.kinship
    return targets


def naive_loss(
    features: Array, weight: Array, bias: Array, targets: Array, temperature: float, large: int = 2
) -> float:
    """For features [views, images, dimensions]."""
    z = [[unit(weight @ row + bias) for row in view] for view in features]
    pairs = []
    for s in range(large):
        for t in range(len(z)):
            if t == s:
                continue
            total = 0.0
            for i in range(len(z[t])):
                p = naive_softmax([float(z[t][i] @ other) / temperature for other in z[s]])
                total -= sum(targets[i][j] * math.log(p[j]) for j in range(len(p)))
            pairs.append(total / len(z[t]))
    return sum(pairs) / len(pairs)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("sides", [TWO, THREE])
@pytest.mark.parametrize("settings", [{"kinship": 0.0}, {"kinship": 0.5}, {"kinship": 0.3, "temperature": 0.5}])
def test_loss_equals_the_oracle(sides: tuple[int, ...], settings: dict[str, float]) -> None:
    contrast, model, batch = objective(**settings), backbone(), views(sides)
    loss, health = contrast.loss(model, batch, 0.0)
    features = np.stack([array(model(view)) for view in batch])
    weight, bias = (array(p) for p in contrast.projector.parameters())
    targets = naive_targets(array(backbone(seed=9)(batch[0])), array(contrast.centre), contrast.config)
    assert loss.item() == pytest.approx(
        naive_loss(features, weight, bias, targets, contrast.config.temperature), rel=1e-5
    )
    assert health.guess == pytest.approx(math.log(IMAGES))
    z = np.stack([unit(weight @ row + bias) for view in features for row in view])
    assert float(health.spread) == pytest.approx(1 - float((z.mean(0) ** 2).sum()), rel=1e-5)


@pytest.mark.parametrize("kinship", [0.0, 0.5])
def test_gradients_equal_finite_differences_of_the_oracle(kinship: float) -> None:
    """Of the projector and of the features: both views of a pair get theirs, the targets are held fixed."""
    contrast = objective(nn.Identity(), kinship=kinship)
    torch.manual_seed(4)
    features = torch.randn(3, IMAGES, FEATURES, requires_grad=True)
    contrast.loss(nn.Identity(), list(features), 0.0)[0].backward()
    targets = naive_targets(array(features[0]), array(contrast.centre), contrast.config)
    tensors = [features, *contrast.projector.parameters()]
    arrays = [array(tensor).copy() for tensor in tensors]
    for tensor, values in zip(tensors, arrays, strict=True):
        assert tensor.grad is not None
        for index in np.ndindex(values.shape):
            kept, results = values[index], []
            for change in (1e-5, -1e-5):
                values[index] = kept + change
                results.append(naive_loss(*arrays, targets, contrast.config.temperature))
            values[index] = kept
            slope = (results[0] - results[1]) / 2e-5
            assert float(tensor.grad[index]) == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_without_kin_it_is_cross_entropy() -> None:
    contrast, model, (a, b) = objective(kinship=0.0), backbone(), views(TWO)
    loss, _ = contrast.loss(model, [a, b], 0.0)
    za, zb = (F.normalize(contrast.projector(model(view)), dim=1) for view in (a, b))
    own = torch.arange(IMAGES)
    expected = (F.cross_entropy(za @ zb.T / 0.2, own) + F.cross_entropy(zb @ za.T / 0.2, own)) / 2
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("kinship", [0.0, 0.2, 0.5, 0.9])
def test_targets_are_shares(kinship: float) -> None:
    targets = objective(kinship=kinship)._targets(views()[0])
    torch.testing.assert_close(targets.sum(1), torch.ones(IMAGES))
    torch.testing.assert_close(targets.diagonal(), torch.full((IMAGES,), 1 - kinship))
    assert (targets >= 0).all()


def test_kin_are_the_images_that_the_frozen_backbone_finds_alike() -> None:
    images = views((8,))[0]
    images[3] = images[1] + 0.01  # two pictures of one thing
    targets = objective(kinship=0.5, kin_temperature=0.01)._targets(images)
    assert float(targets[1, 3]) == pytest.approx(0.5, abs=0.05)
    assert float(targets[3, 1]) == pytest.approx(0.5, abs=0.05)


# ---- how it starts, and what it touches -------------------------------------------------------------------------


def test_the_projector_starts_as_features_less_their_mean() -> None:
    contrast = objective(projector=False)
    assert isinstance(contrast, Objective)
    features = torch.randn(4, FEATURES)
    torch.testing.assert_close(contrast.projector(features), features - contrast.centre)
    assert "centre" in contrast.state_dict()


def test_frozen_features_carry_no_gradient() -> None:
    frozen = backbone(seed=9)
    contrast, model = objective(frozen, kinship=0.5), backbone()
    batch = [view.requires_grad_() for view in views(TWO)]
    contrast.loss(model, batch, 0.0)[0].backward()
    assert all(parameter.grad is None for parameter in frozen.parameters())
    assert all(parameter.grad is not None for parameter in [*model.parameters(), *contrast.projector.parameters()])
    assert contrast.centre.grad is None


def test_with_a_masked_model_the_base_says_what_is_alike() -> None:
    """As a run does it: the targets stay those of the base, whatever the mask, and modes stay as they were."""
    base = nn.Sequential(nn.Conv2d(3, FEATURES, 3), nn.BatchNorm2d(FEATURES), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    masked = get_masked_model(base.eval(), MaskConfig(norm="anchored"))
    batch = views(TWO)
    masked.anchor([batch[0]])
    masked.train()
    contrast = Contrast(masked.frozen(batch[0]).mean(0), ContrastConfig(), frozen=masked.frozen)
    targets = contrast._targets(batch[0])
    with torch.no_grad():
        next(iter(masked.scores.values()))[:, 0] = -1
    loss, _ = contrast.loss(masked, batch, 0.0)
    loss.backward()
    assert masked.training
    assert base[1].training
    assert torch.equal(contrast._targets(batch[0]), targets)
    assert all(score.grad is not None and score.grad.any() for score in masked.scores.values() if score.dim() > 1)
    assert all(parameter.grad is None for parameter in base.parameters())


def test_spread_is_nothing_for_identical_vectors() -> None:
    contrast = objective(nn.Identity())
    same = torch.randn(1, FEATURES).expand(IMAGES, -1)
    _, health = contrast.loss(nn.Identity(), [same, same], 0.0)
    assert float(health.spread) == pytest.approx(0, abs=1e-6)
    _, health = contrast.loss(nn.Identity(), [torch.randn(IMAGES, FEATURES) for _ in range(2)], 0.0)
    assert float(health.spread) > 0.3


def test_identical_vectors_have_the_loss_of_a_guess() -> None:
    same = torch.randn(1, FEATURES).expand(IMAGES, -1)
    loss, health = objective(backbone(seed=9)).loss(
        lambda images: same.repeat(len(images) // IMAGES, 1), views(TWO), 0.0
    )
    assert loss.item() == pytest.approx(health.guess, rel=1e-5)


def test_sixteen_bit_autocast_reaches_the_backbone_only() -> None:
    contrast, model, batch = objective(), backbone(), views()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = contrast.loss(model, batch, 0.0)
        features = [model(view) for view in batch]
    assert features[0].dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    expected, _ = objective(lambda _: backbone(seed=9)(batch[0])).loss(nn.Identity(), features, 0.0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


# ---- two processes -------------------------------------------------------------------------------------------


def _run(sides: tuple[int, ...], kinship: float, mine: slice = slice(None)) -> dict[str, Tensor]:
    """Loss, and gradients averaged over processes as distributed training does."""
    contrast, model = objective(kinship=kinship), backbone()
    loss, health = contrast.loss(model, [view[mine] for view in views(sides, 2 * IMAGES)], 0.0)
    loss.backward()
    parts = {"loss": loss.detach().clone(), "ln_k": torch.tensor(health.guess)}
    for prefix, module in (("model", model), ("heads", contrast)):
        parts |= {f"{prefix}.{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    if dist.is_initialized():
        for value in parts.values():
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return parts


_VARIANTS = [(TWO, 0.0), (TWO, 0.5), (THREE, 0.5)]


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mine = slice(rank * IMAGES, (rank + 1) * IMAGES)
    torch.save([_run(sides, kinship, mine) for sides, kinship in _VARIANTS], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.heavy
def test_two_processes_equal_one_with_all_images(tmp_path: Path) -> None:
    mp.start_processes(_process, (str(tmp_path),), nprocs=2, start_method=PROCESSES.get_start_method())
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for (sides, kinship), found in zip(_VARIANTS, results, strict=True):
            expected = _run(sides, kinship)
            assert found.keys() == expected.keys()
            assert len(expected) == 6
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": -1},
        {"temperature": "warm"},
        {"kin_temperature": 0},
        {"kin_temperature": float("nan")},
        {"kin_temperature": float("inf")},
        {"kinship": 1.0},
        {"kinship": -0.1},
        {"kinship": float("nan")},
        {"kinship": None},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ContrastConfig(**settings)


def test_too_few_or_unequal_views_are_refused() -> None:
    batch = views()
    for wrong in (batch[:1], [], [batch[0], batch[1][:2]]):
        with pytest.raises(ConfigError, match="views"):
            objective().loss(backbone(), wrong, 0.0)
    three = Contrast(torch.zeros(FEATURES), ContrastConfig(), frozen=backbone(seed=9), large_crops=3)
    with pytest.raises(ConfigError, match="views"):
        three.loss(backbone(), batch[:2], 0.0)


@pytest.mark.parametrize("kinship", [0.0, 0.5])
def test_one_image_cannot_be_told_apart(kinship: float) -> None:
    with pytest.raises(ConfigError, match="several images in a batch"):
        objective(kinship=kinship).loss(backbone(), [view[:1] for view in views()], 0.0)
