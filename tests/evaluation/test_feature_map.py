"""The map against plain numpy and scikit-learn, on real vectors; and its file, which gives the very same vectors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS
from torch import Tensor

from selfmask import FeatureMap
from selfmask.errors import EvaluationError, FeatureMapError, RunWriteError
from selfmask.evaluation import feature_map
from selfmask.evaluation.feature_map import MadeFor, power_named, sample
from selfmask.evaluation.whitening import chosen_power, directions, scales, shrinkage
from selfmask.preprocessing import IMAGENET, Preprocessing

from ..cascade.small import as_numpy, pixels

MADE_FOR = MadeFor("0" * 64, IMAGENET)


def rows(count: int = 200, width: int = 24) -> Tensor:
    """Real numbers of real pictures, far from centred and of very different variances."""
    return pixels(count).flatten(1)[:, 500 : 500 + 9 * width : 9] * torch.logspace(0, 2, width) + 3


def naive(train: Tensor, test: Tensor, power: float) -> np.ndarray:
    """Textbook whitening, with scikit-learn's shrunk covariance."""
    oracle = OAS().fit(as_numpy(train))
    values, axes = np.linalg.eigh(oracle.covariance_)
    return (as_numpy(test) - oracle.location_) @ axes * values ** (-power / 2)


def cosines(vectors: np.ndarray) -> np.ndarray:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5, 1.0])
def test_it_is_whitening_by_the_shrunk_covariance(power: float) -> None:
    train, test = rows(200)[:150], rows(200)[150:]
    mapped = FeatureMap.fit(train, power=power)(test)
    assert (mapped.dtype, mapped.shape) == (torch.float32, test.shape)
    # Turned in another way, by which neither neighbours nor probes are moved; 8 bits cost some hundredths.
    np.testing.assert_allclose(cosines(as_numpy(mapped)), cosines(naive(train, test, power)), atol=0.05)


@pytest.mark.parametrize(("count", "width"), [(200, 24), (20, 24), (2, 24)])
def test_shrinkage_is_that_of_scikit_learn(count: int, width: int) -> None:
    some = rows(count, width)
    variances = np.linalg.eigvalsh(np.cov(as_numpy(some).T))
    assert shrinkage(torch.from_numpy(variances), count) == pytest.approx(OAS().fit(as_numpy(some)).shrinkage_)


def test_no_direction_is_stretched_without_end() -> None:
    """Of fewer images than dimensions, other images lie where none of them did."""
    train, test = rows(60)[:12], rows(60)[12:]
    lengths = FeatureMap.fit(train, power=1.0)(test).norm(dim=1)
    assert float(lengths.max() / lengths.min()) < 30
    constant = FeatureMap.fit(torch.ones(10, 4), power=1.0)
    assert torch.equal(constant(torch.randn(3, 4, generator=torch.Generator().manual_seed(0))), torch.zeros(3, 4))


def test_scales_by_hand() -> None:
    variances = torch.tensor([16.0, 4.0, 0.0])
    torch.testing.assert_close(scales(variances, 1.0), torch.tensor([1 / 4, 1 / 2, 0.0]))
    torch.testing.assert_close(scales(variances, 0.5), torch.tensor([1 / 2, 2**-0.5, 0.0]))
    torch.testing.assert_close(scales(variances, 1.0, floor=0.3), torch.tensor([18**-0.5, 6**-0.5, 0.0]))


def test_power_is_chosen_by_how_many_directions_are_at_work() -> None:
    assert directions(torch.tensor([4.0, 4.0, 0.0]), 0.5) == pytest.approx(2)
    assert directions(torch.tensor([4.0, 1.0]), 0.0) == pytest.approx(25 / 17)
    assert directions(torch.tensor([4.0, 1.0]), 1.0) == pytest.approx(2)
    wide = torch.logspace(0, -4, 512)
    for some in (wide[:240], wide[:200], torch.ones(512), torch.ones(100)):
        fitting = [power for power in (0.0, 0.25, 0.5) if directions(some, power) <= 150]
        assert chosen_power(some) == max(fitting, default=0.0)
    assert [chosen_power(torch.ones(width)) for width in (100, 512)] == [0.5, 0.0]
    assert FeatureMap.fit(rows()).power == 0.5


def test_batches_do_not_matter_neither_in_fitting_nor_in_mapping() -> None:
    train = rows(150)
    whole, parts = FeatureMap.fit(train), FeatureMap.fit(iter([*train.split(40), torch.empty(0, 0)]))
    assert whole.images == parts.images == 150
    torch.testing.assert_close(parts(train), whole(train), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat([whole(part) for part in train.split(7)]), whole(train))


def test_a_sample_is_taken_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_map, "SAMPLE", 50)
    train = rows(150)
    chosen = sample(150)
    assert len(set(chosen)) == 50
    assert FeatureMap.fit(train).sha256 == FeatureMap.fit(train[chosen]).sha256


def test_a_file_gives_the_same_vectors_at_any_power(tmp_path: Path) -> None:
    train = rows()
    fitted = FeatureMap.fit(train, made_for=MADE_FOR)
    size = fitted.save(tmp_path / "map.safetensors")
    assert size == (tmp_path / "map.safetensors").stat().st_size < 24 * 24 + 24 * 12 + 1000
    loaded = FeatureMap.load(tmp_path / "map.safetensors")
    assert (loaded.power, loaded.images, loaded.made_for) == (0.5, 200, MADE_FOR)
    assert loaded.sha256 == fitted.sha256 != fitted.at(1.0).sha256
    for power in (0.0, 0.3, 1.0):
        assert torch.equal(loaded.at(power)(train), fitted.at(power)(train))
    fitted.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "map.safetensors").read_bytes()


def test_a_map_of_other_vectors_is_refused() -> None:
    fitted = FeatureMap.fit(rows(), made_for=MADE_FOR)
    assert fitted.check(MadeFor("0" * 64, Preprocessing((224, 224), *_of_imagenet())), "m") is fitted
    assert FeatureMap.fit(rows()).check(MADE_FOR, "m").made_for is None  # of vectors that nobody knows more of
    for other in (MadeFor("1" * 64, IMAGENET), MadeFor("0" * 64, dataclasses.replace(IMAGENET, size=(64, 64)))):
        with pytest.raises(FeatureMapError, match="other vectors") as caught:
            fitted.check(other, "m")
        assert "--map" in str(caught.value)


def _of_imagenet() -> tuple[tuple[float, ...], tuple[float, ...], str]:
    return IMAGENET.mean, IMAGENET.std, IMAGENET.interpolation


def test_mistakes_are_told() -> None:
    for wrong in (torch.ones(1, 4), iter([]), torch.full((3, 4), torch.nan), torch.ones(2, feature_map.MAX_WIDTH + 1)):
        with pytest.raises(EvaluationError):
            FeatureMap.fit(wrong)
    fitted = FeatureMap.fit(rows())
    with pytest.raises(EvaluationError, match="does not fit"):
        fitted(torch.ones(3, 23))
    for power in (-0.1, 1.1, float("nan")):
        with pytest.raises(EvaluationError, match="power"):
            fitted.at(power)
    assert (power_named("auto"), power_named("0.25")) == (None, 0.25)
    for text in ("half", "2", "", "nan"):
        with pytest.raises(EvaluationError, match="power"):
            power_named(text)


def test_files_that_are_no_maps_are_refused(tmp_path: Path) -> None:
    FeatureMap.fit(rows()).save(tmp_path / "map")
    (tmp_path / "cut").write_bytes((tmp_path / "map").read_bytes()[:-1])
    for name in ("cut", "missing"):
        with pytest.raises(FeatureMapError):
            FeatureMap.load(tmp_path / name)
    with pytest.raises(RunWriteError):
        FeatureMap.fit(rows()).save(tmp_path)
