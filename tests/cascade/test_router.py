"""The router does what a plain implementation and scikit-learn do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture
from torch import Tensor

from selfmask.backbones import load_backbone
from selfmask.cascade.clusters import Clusters
from selfmask.cascade.config import ShapeConfig
from selfmask.cascade.router import Router
from selfmask.embedding.vectors import embed
from selfmask.errors import ClusterError, ConfigError, CorruptCascadeError, RunDamagedError

from .small import as_numpy, cascade_config, clothes


@pytest.fixture(scope="module")
def vectors() -> Tensor:
    """256 features of 300 pictures, by the bundled network."""
    tiny = load_backbone("selfmask/tiny")
    return embed(tiny.model, clothes(300), tiny.preprocessing)[0]


def whitened(features: Tensor, components: int) -> Any:
    """Principal components by singular values, of vectors of length 1: plain numpy."""
    x = as_numpy(features)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    x = x - x.mean(0)
    _, values, directions = np.linalg.svd(x, full_matrices=False)
    return x @ directions[:components].T / (values[:components] / np.sqrt(len(x) - 1))


def test_components_are_white_and_those_of_numpy(vectors: Tensor) -> None:
    router = Router.fit(vectors, cascade_config(components=20))
    z = (torch.nn.functional.normalize(vectors, dim=1) - router.mean) @ router.components
    np.testing.assert_allclose(np.cov(as_numpy(z).T), np.eye(20), atol=0.02)  # components are of 16 bits
    oracle = whitened(vectors, 20)
    correlation = (as_numpy(z) * oracle).mean(0)
    np.testing.assert_allclose(np.abs(correlation), 1, atol=0.01)


@pytest.mark.parametrize("kind", ["gmm", "kmeans"])
def test_it_routes_as_scikit_learn_does(vectors: Tensor, kind: str) -> None:
    router = Router.fit(vectors, cascade_config(components=10, experts=5, router=kind), seed=3)
    z = as_numpy((torch.nn.functional.normalize(vectors, dim=1) - router.mean) @ router.components)
    if kind == "gmm":
        oracle = GaussianMixture(5, covariance_type="full", random_state=3, max_iter=300).fit(z)
        posterior = router.scores(vectors).double().softmax(1)
        np.testing.assert_allclose(posterior, oracle.predict_proba(z), atol=2e-3)
    else:
        oracle = KMeans(5, n_init=10, random_state=3).fit(z)
    assert (router(vectors).numpy() == oracle.predict(z)).mean() > 0.995
    assert len(set(router(vectors).tolist())) == 5


def naive_route(router: Router, features: Tensor) -> list[int]:
    """With loops and inverse matrices, in double precision."""
    mean, components, centres, precisions, weights = (
        as_numpy(getattr(router, name)) for name in ("mean", "components", "centres", "precisions", "weights")
    )
    chosen = []
    for h in as_numpy(features):
        z = (h / np.sqrt((h**2).sum()) - mean) @ components
        logs = []
        for centre, factor, weight in zip(centres, precisions, weights, strict=True):
            covariance = np.linalg.inv(factor @ factor.T)
            mahalanobis = (z - centre) @ np.linalg.inv(covariance) @ (z - centre)
            logs.append(weight - mahalanobis / 2 - np.linalg.slogdet(covariance)[1] / 2)
        chosen.append(int(np.argmax(logs)))
    return chosen


@pytest.mark.parametrize("kind", ["gmm", "kmeans"])
def test_it_routes_by_the_posterior(vectors: Tensor, kind: str) -> None:
    router = Router.fit(vectors, cascade_config(components=8, experts=4, router=kind))
    naive = np.array(naive_route(router, vectors))
    assert (router(vectors).numpy() == naive).mean() > 0.995  # but where two are equally likely to the last digit


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 100))
def test_the_length_of_a_vector_does_not_matter(scale: float) -> None:
    x = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    router = Router.fit(x, cascade_config(components=4))
    torch.testing.assert_close(router.scores(scale * x), router.scores(x), rtol=1e-3, atol=1e-3)


def test_one_expert_takes_all(vectors: Tensor) -> None:
    assert set(Router.fit(vectors, cascade_config(experts=1))(vectors).tolist()) == {0}


def test_the_same_seed_gives_the_same_router(vectors: Tensor) -> None:
    first, second = (Router.fit(vectors, cascade_config(experts=5), seed=1).tensors() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_stored_and_read_it_is_the_same_to_the_bit(vectors: Tensor) -> None:
    router = Router.fit(vectors, cascade_config(components=20, experts=5))
    again = Router.of(router.tensors(), 256, 5)
    assert torch.equal(router.scores(vectors), again.scores(vectors))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean", torch.zeros(255)),
        ("centres", torch.zeros(4, 6)),
        ("weights", torch.full((3,), torch.nan)),
        ("components", torch.zeros(256)),
        ("more", torch.zeros(1)),
    ],
)
def test_unsound_routers_are_refused(vectors: Tensor, name: str, value: Tensor) -> None:
    stored = Router.fit(vectors, cascade_config()).tensors()
    with pytest.raises(CorruptCascadeError):
        Router.of(stored | {name: value}, 256, 3)
    with pytest.raises(CorruptCascadeError):
        Router.of({key: each for key, each in stored.items() if key != "centres"}, 256, 3)


@pytest.mark.parametrize(
    ("images", "changes", "words"),
    [
        (20, {"components": 20}, "20 components"),
        (300, {"components": 257}, "257 components"),
        (9, {"components": 4, "experts": 10}, "fewer images than experts"),
    ],
)
def test_what_cannot_be_clustered_is_refused(vectors: Tensor, images: int, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words) as caught:
        Router.fit(vectors[:images], cascade_config(**changes))
    assert caught.value.todo


def test_images_that_are_all_alike_are_refused(vectors: Tensor) -> None:
    with pytest.raises(ClusterError, match="vary in too few directions"):
        Router.fit(vectors[:1].expand(50, -1), cascade_config())


def test_small_and_empty_clusters_are_refused_with_a_remedy(vectors: Tensor) -> None:
    clusters = Clusters.fit(vectors, list(range(300)), cascade_config(experts=4))
    assert sum(clusters.sizes) == 300
    clusters.check(min(clusters.sizes))
    with pytest.raises(ClusterError, match="fewer images") as caught:
        clusters.check(min(clusters.sizes) + 1)
    assert "--experts 3" in str(caught.value)
    empty = dataclasses.replace(clusters, experts=clusters.experts.clamp(max=2))
    with pytest.raises(ClusterError, match="empty"):
        empty.check(1)


def test_clusters_are_kept_and_damage_is_seen(tmp_path: Path, vectors: Tensor) -> None:
    config = cascade_config(experts=4)
    clusters = Clusters.fit(vectors, list(range(100, 400)), config)
    clusters.save(file := tmp_path / "router.safetensors")
    again = Clusters.load(file, config)
    assert [again.members(k) for k in range(4)] == [clusters.members(k) for k in range(4)]
    assert sorted(number for k in range(4) for number in again.members(k)) == list(range(100, 400))
    assert torch.equal(again.distances, clusters.distances)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunDamagedError, match=r"router\.safetensors"):
        Clusters.load(file, config)


@pytest.mark.parametrize(
    "changes", [{"experts": 0}, {"experts": 1001}, {"components": 0}, {"router": "x"}, {"scale": "x"}]
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        cascade_config(**changes)


def test_gmm_nearest_goes_by_the_distance_to_the_centres_of_the_mixture() -> None:
    features = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    plain, nearest = (
        Router.fit(features, ShapeConfig(experts=3, components=4, router=name)) for name in ("gmm", "gmm-nearest")
    )
    assert torch.equal(plain.centres, nearest.centres)
    z = (torch.nn.functional.normalize(features, dim=1) - nearest.mean) @ nearest.components
    assert torch.equal(nearest(features), torch.cdist(z, nearest.centres).argmin(1))
    assert not torch.equal(nearest(features), plain(features))
