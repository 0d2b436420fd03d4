"""The scikit-learn transformer, in scikit-learn's own hands."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from selfmask import MaskedModel
from selfmask.data import open_images
from selfmask.errors import BadImageError, ConfigError
from selfmask.sklearn import SelfMask

SHORT: dict[str, Any] = {
    "steps": 2,
    "batch_size": 8,
    "settings": {"gate": False, "log_every": 1, "checkpoint_every": 1},
}


def tiny(**changes: Any) -> SelfMask:
    return SelfMask("selfmask/tiny", **{**SHORT, **changes})


def clothes(count: int) -> tuple[np.ndarray, np.ndarray]:
    images = open_images("selfmask/fashion")
    assert images.labels is not None
    pixels = torch.stack([images[i] for i in range(count)])
    return pixels.permute(0, 2, 3, 1).numpy(), np.array(images.labels[:count])


@pytest.mark.heavy
def test_checks_of_scikit_learn() -> None:
    done = check_estimator(tiny(), on_fail=None, on_skip=None)  # none has to be excused: rows are images, too
    failed = {each["check_name"]: str(each["exception"]) for each in done if each["status"] == "failed"}
    assert failed == {}
    assert sum(each["status"] == "passed" for each in done) > 40


def test_a_pipeline_classifies() -> None:
    images, labels = clothes(120)
    classifier = make_pipeline(tiny(), LogisticRegression(max_iter=2000)).fit(images[:90], labels[:90])
    assert classifier.score(images[90:], labels[90:]) > 0.5
    learned = classifier[0]
    assert isinstance(learned.model_, MaskedModel)
    assert learned.transform(images[:3]).shape == (3, 256) == (3, len(learned.get_feature_names_out()))


@pytest.mark.heavy
def test_a_grid_search_chooses_among_settings() -> None:
    images, labels = clothes(90)
    search = GridSearchCV(
        make_pipeline(tiny(), KNeighborsClassifier(3)), {"selfmask__whiten": [False, True]}, cv=2, error_score="raise"
    )
    search.fit(images, labels)
    assert set(search.best_params_) == {"selfmask__whiten"}
    assert all(0.2 < score <= 1 for score in search.cv_results_["mean_test_score"])


def test_all_ways_to_give_images_are_the_same(tmp_path: Path) -> None:
    images, _ = clothes(12)
    files = [tmp_path / f"{number}.png" for number in range(len(images))]
    for file, pixels in zip(files, images, strict=True):
        Image.fromarray(pixels).save(file)
    fitted = tiny().fit(images)
    expected = fitted.transform(images)
    for given in (
        [str(file) for file in files],
        np.array(files),
        [Image.open(file) for file in files],
        images[..., 0],
        images / 255.0,
        torch.from_numpy(images).permute(0, 3, 1, 2),
    ):
        np.testing.assert_allclose(fitted.transform(given), expected, rtol=1e-3, atol=1e-3)


def test_rows_are_flattened_images() -> None:
    rows = load_digits().data[:40]
    fitted = tiny().fit(rows)
    assert fitted.n_features_in_ == 64
    scaled = (255 * rows / rows.max()).round().astype(np.uint8).reshape(-1, 8, 8)
    np.testing.assert_allclose(fitted.transform(rows), fitted.transform(scaled), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="another shape"):
        tiny(image_shape=(4, 4)).fit(rows)


def test_the_same_seed_gives_the_same_mask_also_from_a_pickle() -> None:
    images, _ = clothes(24)
    first = tiny(random_state=3).fit(images)
    again = clone(first).fit(images)
    assert np.array_equal(first.transform(images), again.transform(images))
    loaded = pickle.loads(pickle.dumps(first))
    assert np.array_equal(first.transform(images), loaded.transform(images))


def test_an_image_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    images, _ = clothes(12)
    fitted = tiny().fit(images)
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(BadImageError):
        fitted.transform([tmp_path / "bad.png"])
