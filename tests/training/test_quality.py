"""The label-free quality: against a naive oracle, and on models that are whole, collapsed, or broken."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.data import open_images
from selfmask.errors import NotABackboneError
from selfmask.training.quality import NEIGHBOURS, Quality, effective_rank, share_found

from .small import network

IMAGES = 105
CHANCE = 20 / (IMAGES - 1)


@functools.cache
def pictures() -> tuple[Tensor, Tensor]:
    """Real images, and a moved, dimmed and noisy view of each."""
    opened = open_images("selfmask/fashion")
    clean = torch.stack([opened[i] for i in range(IMAGES)]).float() / 255
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
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


def naive_centred(vectors: np.ndarray, images: np.ndarray) -> np.ndarray:
    moved = vectors - images.mean(0)
    return moved / np.linalg.norm(moved, axis=1, keepdims=True)


def naive_neighbours(queries: np.ndarray, images: np.ndarray, k: int) -> list[list[int]]:
    """For each query the k nearest images, not counting the image of the same number."""
    queries, bank = naive_centred(queries, images), naive_centred(images, images)
    return [
        sorted((j for j in range(len(bank)) if j != i), key=lambda j, i=i: -float(queries[i] @ bank[j]))[:k]
        for i in range(len(queries))
    ]


def naive_share(found: list[list[int]], wanted: list[list[int]]) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, wanted, strict=True)]))


def clouds(seed: int, images: int = 40, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    clean = 3 + torch.randn(images, 8, generator=generator)
    return clean, clean + noise * torch.randn(images, 8, generator=generator)


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("k", [1, 5, 12])
def test_share_found_equals_the_oracle(k: int, noise: float) -> None:
    clean, distorted = clouds(0, noise=noise)
    other = clouds(1)[0].double().numpy()
    wanted = naive_neighbours(other, other, k)
    found = naive_neighbours(distorted.double().numpy(), clean.double().numpy(), k)
    assert share_found(clean, distorted, torch.tensor(wanted)) == pytest.approx(naive_share(found, wanted), abs=1e-9)


def test_quality_equals_the_oracle() -> None:
    """Half of it by the frozen backbone's neighbours, half by the model's own; less where dimensions are lost."""
    masked, (clean, distorted) = tiny().eval(), pictures()
    quality = Quality(masked, clean, distorted)
    frozen = masked.frozen(clean).double().numpy()
    with torch.no_grad():
        for score in masked.scores.parameters():
            score[torch.rand(score.shape, generator=torch.Generator().manual_seed(1)) < 0.02] = -1
        images, views = (masked(part).double().numpy() for part in (clean, distorted))
    found = naive_neighbours(views, images, NEIGHBOURS)
    by_frozen = naive_share(found, naive_neighbours(frozen, frozen, NEIGHBOURS))
    by_itself = naive_share(found, naive_neighbours(images, images, NEIGHBOURS))
    left = min(1, naive_rank(images) / naive_rank(frozen) / 0.8)
    assert quality() == pytest.approx(
        (by_frozen + by_itself) / 2 * left, abs=1e-3
    )  # float32 may order equals otherwise
    assert by_frozen != by_itself


def naive_rank(vectors: np.ndarray) -> float:
    """Of the correlations between images: their matrix has the same eigenvalues but for zeros."""
    centred = naive_centred(vectors, vectors)
    shares = np.linalg.eigvalsh(centred @ centred.T) / np.trace(centred @ centred.T)
    return float(np.exp(-sum(share * np.log(share) for share in shares if share > 1e-12)))


def test_lost_dimensions_cost_quality() -> None:
    """Vectors of one image and its view may agree to the last digit and still tell less than before."""
    vectors, _ = clouds(0)
    few = vectors.clone()
    few[:, 3:] = 0
    for each in (vectors, few):
        assert effective_rank(each) == pytest.approx(naive_rank(each.double().numpy()), rel=1e-4)
    assert effective_rank(few) <= 3 < 0.8 * effective_rank(vectors)


def test_those_equally_near_share_the_last_places() -> None:
    """Three images as near as each other for two places: two thirds of each."""
    angles = torch.tensor([0.0, 0.3, 0.3, 0.3, 2.5, 3.0])
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    neighbours = torch.tensor([[1, 2], [2, 3], [1, 3], [1, 2], [5, 1], [4, 1]])
    similarity = torch.nn.functional.normalize(circle - circle.mean(0), dim=1)
    similarity = similarity @ similarity.T
    expected = []
    for i, wanted in enumerate(neighbours.tolist()):
        others = [j for j in range(6) if j != i]
        last = sorted((float(similarity[i, j]) for j in others), reverse=True)[1]
        nearer = [j for j in others if float(similarity[i, j]) > last + 1e-5]
        tied = [j for j in others if abs(float(similarity[i, j]) - last) <= 1e-5]
        weight = {**dict.fromkeys(nearer, 1.0), **dict.fromkeys(tied, (2 - len(nearer)) / len(tied))}
        expected += [weight.get(j, 0.0) for j in wanted]
    assert expected[:2] == pytest.approx([2 / 3, 2 / 3])
    assert share_found(circle, circle, neighbours) == pytest.approx(np.mean(expected))


# ---- models that are whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["adapt", "frozen", "anchored"])
def test_undistorted_views_are_all_found(norm: str) -> None:
    clean, _ = pictures()
    assert Quality(tiny(norm), clean, clean)() == 1.0


def test_a_frozen_model_lies_between_chance_and_all_and_always_the_same() -> None:
    clean, distorted = pictures()
    masked = tiny()
    first = Quality(masked, clean, distorted)
    assert 2 * CHANCE < first() < 1
    assert first() == first() == Quality(tiny(), clean, distorted)()


def test_it_is_worse_with_stronger_distortion_and_with_damage() -> None:
    clean, distorted = pictures()
    masked = tiny()
    quality = Quality(masked, clean, distorted)
    start = quality()
    assert Quality(masked, clean, clean + 2 * (distorted - clean))() < start
    with torch.no_grad():
        for score in masked.scores.parameters():
            score[torch.rand(score.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = -1
    assert quality() < start


def test_how_many_images_are_run_at_once_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    clean, distorted = pictures()
    whole = Quality(tiny(), clean, distorted)()
    monkeypatch.setattr("selfmask.training.quality._AT_ONCE", 16)
    assert Quality(tiny(), clean, distorted)() == pytest.approx(whole, abs=1e-3)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", ["adapt", "frozen", "anchored"])
def test_measuring_changes_nothing(norm: str, training: bool) -> None:
    clean, distorted = pictures()
    masked = tiny(norm).train(training)
    before = {name: value.clone() for name, value in masked.state_dict().items()}
    modes = [module.training for module in masked.modules()]
    quality = Quality(masked, clean, distorted)
    assert [module.training for module in masked.modules()] == modes
    quality()
    assert [module.training for module in masked.modules()] == modes
    assert masked.active_mask == "default"
    assert all(torch.equal(value, before[name]) for name, value in masked.state_dict().items())
    masked(clean[:4]).square().sum().backward()  # nothing of it is left in inference mode
    assert all(score.grad is not None for score in masked.scores.parameters())


def test_the_frozen_neighbours_are_those_of_the_start() -> None:
    """Also where the mask has learned already, as in a run that is resumed."""
    clean, distorted = pictures()
    masked = tiny()
    whole = Quality(masked, clean, distorted)
    set_scores(masked, -1.0)
    later = Quality(masked, clean, distorted)
    set_scores(masked, 1.0)
    assert later() == whole()


def test_few_images() -> None:
    clean, distorted = pictures()
    for number in (2, 4, 7):
        assert 0 <= Quality(tiny(), clean[:number], distorted[:number])() <= 1


# ---- models that are not ----------------------------------------------------------------------------------------


def test_all_weights_off_is_at_most_chance() -> None:
    """To a network that sees no images all are equally near, and it has no dimension left."""
    clean, distorted = pictures()
    masked = tiny()
    quality = Quality(masked, clean, distorted)
    set_scores(masked, -1.0)
    assert quality() <= 1.05 * CHANCE


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-7])
def test_features_that_differ_by_rounding_alone_are_chance(noise: float) -> None:
    """Even where rounding errors are the same for an image and its view."""
    clean = torch.randn(1, 64) + noise * torch.randn(IMAGES, 64)
    neighbours = torch.tensor(naive_neighbours(clouds(0, IMAGES)[0].numpy(), clouds(0, IMAGES)[0].numpy(), 20))
    assert share_found(clean, clean, neighbours) == pytest.approx(CHANCE, rel=0.05)
    if noise:
        own = torch.tensor(naive_neighbours(clean.numpy(), clean.numpy(), 20))
        assert share_found(clean, clean, own) == pytest.approx(CHANCE, rel=0.1)


def test_features_on_a_line_are_hardly_better() -> None:
    """A line only says on which side of the mean an image is: not more than twice chance, or so."""
    torch.manual_seed(0)
    direction, place = torch.randn(1, 64), torch.randn(IMAGES, 1)
    own = torch.stack([torch.randperm(IMAGES - 1)[:20] for _ in range(IMAGES)])
    assert share_found(place * direction, place * direction, own) < 2.5 * CHANCE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_give_nothing(value: float) -> None:
    clean, distorted = pictures()
    masked = tiny("adapt").train()
    quality = Quality(masked, clean, distorted)
    with torch.no_grad():
        next(iter(masked._norm.buffers())).fill_(value)
    assert quality() <= 1.05 * CHANCE  # infinities may come out as features that are all alike
    assert np.isfinite(quality())
    assert masked.training


def test_scores_that_are_nan_are_off_and_do_not_crash() -> None:
    clean, distorted = pictures()
    masked = tiny()
    quality = Quality(masked, clean, distorted)
    set_scores(masked, float("nan"))
    assert quality() <= 1.05 * CHANCE


def test_a_model_that_gives_no_vectors_is_refused_and_left_in_its_mode() -> None:
    clean, distorted = pictures()
    masked = get_masked_model(network()[:-2]).train()
    with pytest.raises(NotABackboneError):
        Quality(masked, clean, distorted)
    assert masked.training
