"""The label-free quality: against a naive oracle, on models that are whole, collapsed, or broken; and its test."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.data import open_images
from selfmask.errors import NotABackboneError
from selfmask.training.quality import MISTAKES, Gain, Quality, as_quality, found_again, recognised, scored, similarities
from tests.light import mostly_heavy

from .small import network

IMAGES = 105
CHANCE = 1 / IMAGES


@functools.cache
def pictures() -> tuple[Tensor, Tensor]:
    """Real images, and two copies of each: moved, dimmed and noisy."""
    opened = open_images("selfmask/fashion")
    clean = torch.stack([opened[i] for i in range(IMAGES)]).float() / 255
    noise = torch.randn(2, *clean.shape, generator=torch.Generator().manual_seed(0))
    return clean, clean.roll((1, 1), (2, 3)) * 0.8 + 0.1 * noise


@functools.cache
def _tiny() -> torch.nn.Module:
    return load_backbone("selfmask/tiny").model


def tiny(norm: str = "anchored") -> MaskedModel:
    return get_masked_model(copy.deepcopy(_tiny()), MaskConfig(norm=norm))


def set_scores(masked: MaskedModel, value: float) -> None:
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.fill_(value)


# ---- the oracle -------------------------------------------------------------------------------------------------


def naive_scored(images: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """By the covariance between features: half whitened, cosine similarity, softmax over the images; and neighbours."""
    mean = images.mean(0)
    values, axes = np.linalg.eigh(np.cov(images.T, bias=True))
    rank = min(images.shape)
    floor = 0.1 * values.clip(0).sum() / rank
    whitening = axes @ np.diag((values.clip(0) + floor) ** -0.25) @ axes.T

    def placed(vectors: np.ndarray) -> np.ndarray:
        # What lies outside the span of the images tells none of them from another.
        inside = axes[:, values > 1e-12 * values.max()]
        vectors = (vectors - mean) @ inside @ inside.T @ whitening
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    def nearest(i: int, similarity: np.ndarray) -> set[int]:
        others = [j for j in np.argsort(-similarity) if j != i]
        return set(others[:5])

    scores, own = np.empty(copies.shape[:2]), placed(images) @ placed(images).T
    for number, vectors in enumerate(copies):
        for i, similarity in enumerate(placed(vectors) @ placed(images).T):
            lost = 1 - len(nearest(i, similarity) & nearest(i, own[i])) / 5
            scores[number, i] = similarity[i] / 0.1 - np.log(np.exp(similarity / 0.1).sum()) - 2 * lost
    return scores


def clouds(seed: int, images: int = 40, features: int = 8, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    clean = 3 + torch.randn(images, features, generator=generator, dtype=torch.float64)
    return clean, clean + noise * torch.randn(2, images, features, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("features", [8, 100])
@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_scores_equal_the_oracle(noise: float, features: int) -> None:
    clean, copies = clouds(0, features=features, noise=noise)
    expected = naive_scored(clean.numpy(), copies.numpy())
    assert scored(clean, copies).numpy() == pytest.approx(expected, abs=1e-6)


def test_quality_equals_the_oracle() -> None:
    masked, (clean, copies) = tiny().eval(), pictures()
    quality = Quality(masked, clean, copies)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score[torch.rand(score.shape, generator=torch.Generator().manual_seed(1)) < 0.02] = -1
        images, views = (masked(part).double().numpy() for part in (clean, copies.flatten(0, 1)))
    expected = naive_scored(images, views.reshape(2, IMAGES, -1))
    assert quality().numpy() == pytest.approx(expected, abs=1e-3)
    assert as_quality(quality()) == pytest.approx(np.exp(expected.mean()), rel=1e-3)


def test_images_that_draw_together_are_a_gain_though_none_is_recognised_better() -> None:
    """With the kinds farther apart, the neighbours of an image, which are of its kind, are found again."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(40).repeat_interleave(6)
    centres = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    own, noise = torch.randn(2, 240, 16, generator=generator, dtype=torch.float64)
    alike = torch.zeros(1, 240, dtype=torch.long)
    spread = [apart * centres[kinds] + own for apart in (1, 3)]
    for proven, measure in ((True, scored), (False, lambda *both: recognised(similarities(*both)[1]))):
        near, far = (measure(images, (images + noise)[None]) for images in spread)
        assert Gain.of(near, far, alike).proven(4) is proven


def test_of_few_images_all_others_are_neighbours() -> None:
    for count in (1, 2, 4):
        own = torch.randn(count, count, generator=torch.Generator().manual_seed(0))
        assert torch.equal(found_again(own, own[None]), torch.ones(1, count))
        assert torch.equal(found_again(own, -own[None]), torch.ones(1, count))


def test_neither_scale_nor_rotation_nor_shift_of_all_features_matters() -> None:
    clean, copies = clouds(0)
    turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))[0]
    assert torch.allclose(scored(clean, copies), scored(7 * clean @ turn + 5, 7 * copies @ turn + 5))


# ---- the test ------------------------------------------------------------------------------------------------------


def test_a_gain_and_its_error_equal_a_paired_test() -> None:
    """With one kind of distortion and one copy, it is the paired t-test."""
    before, after = torch.randn(2, 1, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = Gain.of(before, after, torch.zeros(1, 30, dtype=torch.long))
    change = (after - before)[0].numpy()
    assert (found.mean, found.freedom) == (pytest.approx(change.mean()), 29)
    assert found.error == pytest.approx(change.std(ddof=1) / 30**0.5)
    for looks in (1, 3):
        quantile = float(scipy.stats.t.ppf(1 - MISTAKES / looks, 29))
        for factor, proven in ((0.99, False), (1.01, True)):
            assert Gain(factor * quantile * found.error, found.error, 29).proven(looks) is proven


def test_what_a_kind_of_distortion_costs_all_images_alike_is_no_error() -> None:
    before, noise = torch.randn(2, 2, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kinds = torch.stack([torch.arange(60) % 3, (torch.arange(60) + 1) % 3])
    even, uneven = (Gain.of(before, before + noise + cost * kinds, kinds) for cost in (0.0, 5.0))
    assert uneven.error == pytest.approx(even.error)
    assert uneven.mean == pytest.approx(even.mean + 5 * kinds.double().mean())


def test_luck_is_taken_for_a_gain_as_rarely_as_promised() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = torch.stack([torch.arange(70) % 7, (torch.arange(70) + 3) % 7])
    draws = [torch.randn(2, 2, 70, generator=generator, dtype=torch.float64) for _ in range(4000)]
    share = np.mean([Gain.of(before, after, kinds).proven(1) for before, after in draws])
    assert 0.5 * MISTAKES < share < 1.6 * MISTAKES


@pytest.mark.parametrize("images", [1, 2, 7])
def test_as_many_images_as_kinds_prove_nothing(images: int) -> None:
    kinds = torch.arange(images)[None]
    assert not Gain.of(torch.zeros(1, images), torch.ones(1, images), kinds).proven(1)


# ---- models that are whole --------------------------------------------------------------------------------------


def quality_of(masked: MaskedModel, clean: Tensor, copies: Tensor) -> float:
    return as_quality(Quality(masked, clean, copies)())


def test_a_frozen_model_lies_between_chance_and_all_and_always_the_same() -> None:
    clean, copies = pictures()
    masked = tiny()
    first = Quality(masked, clean, copies)
    assert 2 * CHANCE < as_quality(first()) < quality_of(masked, clean, clean[None]) < 1
    assert torch.equal(first(), first())
    assert torch.equal(first(), Quality(tiny(), clean, copies)())


def test_it_is_worse_with_stronger_distortion_and_with_damage() -> None:
    clean, copies = pictures()
    masked = tiny()
    quality = Quality(masked, clean, copies)
    start = quality()
    assert quality_of(masked, clean, clean + 2 * (copies - clean)) < as_quality(start)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score[torch.rand(score.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = -1
    assert as_quality(quality()) < as_quality(start)
    assert torch.equal(quality.frozen(), start)


def test_random_masks_are_never_proven_better() -> None:
    """Five sizes: a share of the weights off, by chance."""
    clean, copies = pictures()
    masked = tiny()
    quality = Quality(masked, clean, copies)
    start, kinds = quality(), torch.zeros(copies.shape[:2], dtype=torch.long)
    for seed, share in enumerate((0.001, 0.005, 0.01, 0.03, 0.1)):
        set_scores(masked, 1.0)
        with torch.no_grad():
            for score in masked.scores.parameters():
                score[torch.rand(score.shape, generator=torch.Generator().manual_seed(seed)) < share] = -1
        assert not Gain.of(start, quality(), kinds).proven(1)


def test_how_many_images_are_run_at_once_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    clean, copies = pictures()
    whole = quality_of(tiny(), clean, copies)
    monkeypatch.setattr("selfmask.training.quality._AT_ONCE", 16)
    assert quality_of(tiny(), clean, copies) == pytest.approx(whole, abs=1e-3)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", mostly_heavy(["anchored", "adapt", "frozen"]))
def test_measuring_changes_nothing(norm: str, training: bool) -> None:
    clean, copies = pictures()
    masked = tiny(norm).train(training)
    before = {name: value.clone() for name, value in masked.state_dict().items()}
    modes = [module.training for module in masked.modules()]
    quality = Quality(masked, clean, copies)
    quality()
    quality.frozen()
    assert [module.training for module in masked.modules()] == modes
    assert masked.active_mask == "default"
    assert all(torch.equal(value, before[name]) for name, value in masked.state_dict().items())
    masked(clean[:4]).square().sum().backward()  # nothing of it is left in inference mode
    assert all(score.grad is not None for score in masked.scores.parameters())


def test_few_images() -> None:
    clean, copies = pictures()
    for number in (2, 4, 7):
        assert 0 <= quality_of(tiny(), clean[:number], copies[:, :number]) <= 1


# ---- models that are not ----------------------------------------------------------------------------------------


def test_all_weights_off_is_chance() -> None:
    """To a network that sees no images all are equally near."""
    clean, copies = pictures()
    masked = tiny()
    quality = Quality(masked, clean, copies)
    set_scores(masked, -1.0)
    assert as_quality(quality()) <= 1.05 * CHANCE


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-7])
def test_features_that_differ_by_rounding_alone_are_chance(noise: float) -> None:
    """Even where rounding errors are the same for an image and its copy."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(1, 64, generator=generator) + noise * torch.randn(IMAGES, 64, generator=generator)
    assert as_quality(scored(clean.double(), clean[None].double())) == pytest.approx(CHANCE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_give_nothing(value: float) -> None:
    clean, copies = pictures()
    masked = tiny("adapt").train()
    quality = Quality(masked, clean, copies)
    with torch.no_grad():
        next(iter(masked._norm.buffers())).fill_(value)
    assert as_quality(quality()) <= 1.05 * CHANCE  # infinities may come out as features that are all alike
    assert masked.training


def test_scores_that_are_nan_are_off_and_do_not_crash() -> None:
    clean, copies = pictures()
    masked = tiny()
    quality = Quality(masked, clean, copies)
    set_scores(masked, float("nan"))
    assert as_quality(quality()) <= 1.05 * CHANCE


def test_a_model_that_gives_no_vectors_is_refused_and_left_in_its_mode() -> None:
    clean, copies = pictures()
    masked = get_masked_model(network()[:-2]).train()
    with pytest.raises(NotABackboneError):
        Quality(masked, clean, copies)()
    assert masked.training
