"""How images are prepared, as files say it: in bounds, or not at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
from torch import nn

from selfmask import MaskedModel
from selfmask.errors import CorruptMaskFileError, OversizedImagesError
from selfmask.preprocessing import IMAGENET, Preprocessing, of_file

from .maskfile import smn
from .maskfile.tiny import Tiny, masked_with

GOOD: dict[str, Any] = {"size": [9, 9], "mean": [0, 0.5, 1], "std": [1, 0.5, 0.1], "interpolation": "bicubic"}
BAD: list[dict[str, Any]] = [
    {"std": [0, 0, 0]},
    {"std": [1, 1, -1]},
    {"std": [1, 1, 1e-320]},
    {"std": [1, 1]},
    {"std": None},
    {"mean": "abc"},
    {"mean": [1, 2, "3"]},
    {"mean": [1, 2, True]},
    {"mean": [1e300] * 3},
    {"mean": [0.5]},
    {"mean": {"0": 1}},
    {"interpolation": "lanczos"},
    {"interpolation": None},
    {"interpolation": ["bilinear"]},
    {"size": [9]},
    {"size": [9, 9, 9]},
    {"size": [0, 9]},
    {"size": [9.0, 9]},
    {"size": [9, 2**20]},
    {"size": 9},
    {"more": 1},
]


def test_what_is_good() -> None:
    assert Preprocessing.of_json(GOOD) == Preprocessing((9, 9), (0.0, 0.5, 1.0), (1.0, 0.5, 0.1), "bicubic")


@pytest.mark.parametrize("change", BAD, ids=str)
def test_what_images_cannot_be_prepared_by(change: dict[str, Any]) -> None:
    """Such a mask gave NaN vectors, or a traceback when the first image was prepared."""
    with pytest.raises(ValueError):  # noqa: PT011 (of any kind)
        Preprocessing.of_json({**GOOD, **change})
    file = smn.parse(masked_with(Tiny(), "dense").mask_bytes())
    file.manifest["preprocessing"] = {**GOOD, **change}
    with pytest.raises(CorruptMaskFileError):
        MaskedModel.from_pretrained(Tiny(), smn.build(file))


def test_a_model_that_says_what_cannot_be_used() -> None:
    model = nn.Identity()
    model.pretrained_cfg = {  # type: ignore[assignment]
        "architecture": "x",
        "input_size": (3, 8, 8),
        "mean": (0.5,) * 3,
        "std": (0, 0, 0),
        "interpolation": "bilinear",
    }
    assert Preprocessing.of_model(model) == ("x", None)


def test_the_size_is_bounded_by_what_the_base_calls_for() -> None:
    own = Preprocessing((224, 224), IMAGENET.mean, IMAGENET.std, "bilinear")
    small = Preprocessing((32, 32), IMAGENET.mean, IMAGENET.std, "bilinear")
    for base, most in ((own, 672), (None, 672), (small, 256)):
        for side in (most, most + 1, 2048):
            stored = Preprocessing((side, side), IMAGENET.mean, IMAGENET.std, "bilinear")
            if side <= most:
                assert of_file(stored, base) == stored
                continue
            with pytest.raises(OversizedImagesError, match=f"--size {side}"):
                of_file(stored, base)
            assert of_file(stored, base, side).size == (side, side)
    assert of_file(own, own, 96).size == (96, 96)


def test_a_mask_that_calls_for_huge_images() -> None:
    """It took 4.7 GB to embed two small images."""
    base = timm.create_model("resnet10t", num_classes=0)
    file = smn.parse(masked_with(base, "sparse").mask_bytes())
    file.manifest["preprocessing"]["size"] = [2048, 2048]
    with pytest.raises(OversizedImagesError):
        MaskedModel.from_pretrained(base, smn.build(file))
    asked_for = MaskedModel.from_pretrained(base, smn.build(file), size=2048).preprocessing
    assert asked_for is not None
    assert asked_for.size == (2048, 2048)
    assert not math.isnan(sum(asked_for.std))
