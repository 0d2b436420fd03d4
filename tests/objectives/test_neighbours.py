"""Neighbours against a naive oracle in plain loops and against scikit-learn; its bank, its refreshes, its state."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from selfmask import adapt
from selfmask.data.views import ViewsConfig
from selfmask.errors import ConfigError
from selfmask.evaluation.whitening import chosen_power
from selfmask.objectives.neighbours import Neighbours, NeighboursConfig, Projector, nearest
from selfmask.objectives.principal import principal, whitened

from ..training import small as runs
from . import small

torch.set_num_threads(1)
IMAGES, FEATURES, NEAR = 12, 6, 3
backbone = partial(small.backbone, FEATURES)


def features(seed: int = 1) -> Tensor:
    return torch.randn(IMAGES, FEATURES, generator=torch.Generator().manual_seed(seed)) + 0.5


def objective(
    own: Tensor | None = None, refreshes: int = 4, places: Tensor | None = None, **settings: Any
) -> Neighbours:
    config = NeighboursConfig(**{"neighbours": NEAR, "width": 4, "power": 0.5, **settings})
    own = features(2) if own is None else own
    return Neighbours(features(), config, own=lambda: own, refreshes=refreshes, places=places)


def batch(*numbers: int) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(len(numbers), 3, 8, 8, generator=random) for _ in range(2)], torch.tensor(numbers)


def test_the_loss_is_the_formula() -> None:
    loss, model = objective(share=0.4, temperature=0.3), backbone()
    views, numbers = batch(7, 2, 9)
    value, health = loss.loss(model, (views, numbers), 0.0)
    bank, near = loss.bank.double().numpy(), loss.near.numpy()
    weight, bias = (p.detach().double().numpy() for p in loss.projector.parameters())
    total = 0.0
    for view in views:
        for vector, number in zip(model(view).detach().double().numpy(), numbers.tolist(), strict=True):
            z = weight @ vector + bias
            logits = [float(z @ b) / np.linalg.norm(z) / 0.3 for b in bank]
            log_p = [logit - math.log(sum(map(math.exp, logits))) for logit in logits]
            total -= 0.6 * log_p[number] + 0.4 * sum(log_p[j] for j in near[number]) / NEAR
    assert value.item() == pytest.approx(total / 6, rel=1e-5)
    assert health.guess == pytest.approx(math.log(IMAGES))


def test_the_teacher_is_whitened_as_scikit_learn_does_it_and_finds_the_same_neighbours() -> None:
    found = whitened(features(), 1.0, 4)
    oracle = PCA(4, whiten=True).fit_transform(features().double().numpy())
    oracle /= np.linalg.norm(oracle, axis=1, keepdims=True)
    # The floor under the variances is a thousandth of their mean.
    np.testing.assert_allclose((found @ found.T).numpy(), oracle @ oracle.T, atol=0.02)
    search = NearestNeighbors(n_neighbors=NEAR + 1, metric="cosine").fit(found)
    expected = search.kneighbors(found, return_distance=False)[:, 1:]
    assert np.array_equal(nearest(found, NEAR).numpy(), expected)


def test_the_projector_starts_as_centred_features_along_principal_directions() -> None:
    loss = objective(start=0.0)
    centred = (features() - features().mean(0)).double().numpy()
    axes = PCA(4).fit(centred).components_.T
    expected = centred @ axes
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    bank = loss.bank.double().numpy()
    np.testing.assert_allclose(bank @ bank.T, expected @ expected.T, atol=1e-5)


@pytest.mark.parametrize("far", [0.5, 2.4, 2.6, 40.0])
def test_a_step_of_the_projector_moves_its_vectors_no_farther_for_features_far_from_the_origin(far: float) -> None:
    random = torch.Generator().manual_seed(6)
    centred = torch.randn(500, FEATURES, generator=random)
    centred -= centred.mean(0)
    deviation = centred.square().sum(1).mean().sqrt()
    features = centred + far * deviation * F.normalize(torch.ones(FEATURES), dim=0)
    projector = Projector(features, 0.5, 4)
    left = (features - projector.moved).mean(0).norm() / deviation
    assert left.item() == pytest.approx(min(far, 2.5), rel=1e-3)
    if far < 2.5:
        assert torch.equal(projector.moved, torch.zeros(FEATURES))
    # Wherever the features lie, it starts as the same vectors.
    torch.testing.assert_close(projector(features), Projector(centred, 0.5, 4)(centred), rtol=1e-3, atol=1e-3)


def test_the_bank_follows_what_is_seen_and_nothing_else() -> None:
    loss, model = objective(keep=0.75), backbone()
    before, (views, numbers) = loss.bank.clone(), batch(4, 11)
    loss.loss(model, (views, numbers), 0.0)
    assert torch.equal(loss.bank, before)
    loss.after_step(model, 0.0)
    with torch.no_grad():
        z = F.normalize(loss.projector(model(torch.cat(views))), dim=1).view(2, 2, -1)
    expected = F.normalize(0.75 * before[numbers] + 0.25 * F.normalize(z.mean(0), dim=1), dim=1)
    assert torch.allclose(loss.bank[numbers], expected, atol=1e-6)
    others = [i for i in range(IMAGES) if i not in numbers]
    assert torch.equal(loss.bank[others], before[others])


def test_neighbours_are_found_anew_by_both_teachers() -> None:
    own = features(5)
    loss = objective(own, refreshes=2)
    first = loss.near.clone()
    loss.before_step(backbone(), 0.49)
    assert torch.equal(loss.near, first)
    loss.before_step(backbone(), 0.5)
    frozen, now = whitened(features(), 0.5, 4), whitened(own, 0.5, 4)
    similar = (frozen @ frozen.T + now @ now.T).fill_diagonal_(-9)
    assert torch.equal(loss.near.sort(1)[0], similar.topk(NEAR, 1).indices.sort(1)[0])
    assert not torch.equal(loss.near, first)


def test_what_is_seen_where_has_the_same_say_as_vectors() -> None:
    places = torch.randn(IMAGES, 10, generator=torch.Generator().manual_seed(4)) * 100
    similar = sum(each @ each.T for each in (whitened(features(), 0.5, 4), whitened(places, 0.5, 4)))
    assert isinstance(similar, Tensor)
    similar.fill_diagonal_(-math.inf)
    found = objective(places=places)
    assert torch.equal(found.near.sort(1).values, similar.topk(NEAR, 1).indices.sort(1).values)
    assert not torch.equal(found.near.sort(1).values, objective().near.sort(1).values)


@pytest.mark.parametrize(("width", "power"), [(40, 0.5), (200, 0.25), (400, 0.0)])
def test_the_teacher_is_whitened_as_the_map_would_unless_told(width: int, power: float) -> None:
    """Directions at work: all 40; of 200 with variances that fall, fewer than 150 only with less whitening; of 400."""
    random = torch.Generator().manual_seed(5)
    frozen = torch.randn(900, width, generator=random) * torch.linspace(2, 0.2, width)
    assert chosen_power(principal(frozen)[0]) == power
    near = [
        Neighbours(frozen, NeighboursConfig(power=given), own=lambda: frozen, refreshes=1).near
        for given in (None, power, 1.0)
    ]
    assert torch.equal(near[0], near[1])
    assert not torch.equal(near[0], near[2])


def test_a_resumed_run_has_the_same_neighbours_and_does_not_find_them_twice() -> None:
    one = objective(refreshes=2)
    one.before_step(backbone(), 0.6)
    other = objective(own=torch.full((IMAGES, FEATURES), torch.nan), refreshes=2)  # asking it would show
    other.load_state_dict(one.state_dict())
    other.before_step(backbone(), 0.7)
    assert torch.equal(other.near, one.near)
    assert torch.equal(other.bank, one.bank)
    assert set(one.state_dict()) == {"projector.weight", "projector.bias", "projector.moved", "bank", "near", "done"}


def test_of_few_images_few_are_neighbours() -> None:
    def near(count: int) -> int:
        vectors = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(0))
        context: Any = SimpleNamespace(steps=10, frozen_layout=lambda: (vectors, None), vectors=lambda: vectors)
        return NeighboursConfig().build(context).near.shape[1]

    assert [near(count) for count in (2, 19, 60, 300)] == [1, 1, 6, 20]


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer images than neighbours"):
        objective(neighbours=IMAGES)


def test_a_run_that_was_cut_short_ends_in_the_same_bits_after_refreshes(tmp_path: Path) -> None:
    settings = runs.config(
        objective=NeighboursConfig(neighbours=5, refresh=4, width=8), views=ViewsConfig(size=16, small=0)
    )

    def stop(_: Any, line: Any) -> None:
        if line["step"] == 7:
            raise KeyboardInterrupt

    learn = partial(adapt, images=runs.Clothes(), config=settings, preprocessing=runs.HOW, report=False)
    whole = learn(runs.network(), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        learn(runs.network(), out=tmp_path / "cut", watch=stop)
    learn(runs.network(), out=tmp_path / "cut", resume=True)
    assert (tmp_path / "cut" / "mask.smn").read_bytes() == (tmp_path / "whole" / "mask.smn").read_bytes()
    state = torch.load(tmp_path / "whole" / "checkpoints" / "last.pt", weights_only=True)["objective"]
    assert int(state["done"]) == 2  # twice anew in 12 steps
    assert whole.result["active"] < 1
