"""Adaptation as a scikit-learn transformer: `fit(images)` learns a mask, `transform(images)` gives vectors.

>>> from sklearn.linear_model import LogisticRegression
>>> from sklearn.pipeline import make_pipeline
>>> from selfmask.sklearn import SelfMask
>>> classifier = make_pipeline(SelfMask("selfmask/tiny", steps=60), LogisticRegression())
>>> classifier.fit(images, labels).score(others, their_labels)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor, nn

from .backbones import load_backbone
from .commands.adapt import adapt
from .commands.adapt_config import AdaptConfig
from .data import Images
from .data.images import array_to_rgb
from .data.sources import ArrayImages, DatasetImages, FileImages
from .embedding.embedder import MASK, Embedder
from .embedding.mapping import fit_map, with_map
from .embedding.vectors import embed
from .errors import ConfigError
from .preprocessing import preprocessing_for
from .running import best_device, features_of

_BATCH = 64


class SelfMask(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Learns, without labels, which weights of a backbone to switch off; then maps images to vectors.

    Images are paths of files, Pillow images, tensors, or arrays: [n, H, W] or [n, H, W, 3], of bytes or of numbers from
    0 to 1. Rows of a two-dimensional array are flattened grey images, scaled by the range of what was fitted.

    backbone: a name as for `selfmask adapt`, or a module that maps images to vectors.
    preset: settings to start from: fast, paper or reference.
    steps, budget, size, batch_size: as for `selfmask adapt`; by default those of the preset.
    settings: further settings of `AdaptConfig`, by name.
    weights: a file with the backbone's weights.
    whiten: put a map, fitted to the same images, behind the backbone; it suits neighbours.
    image_shape: height and width of flattened images; by default a square, or a line if their number is none.
    random_state: decides all that is random; the same gives the same mask.
    out: a folder for log, mask and report, which must not hold a run.

    Fitted: `model_` (a `MaskedModel`), `result_` (the numbers of the run), `helped_` (as `AdaptResult.helped`).
    """

    def __init__(
        self,
        backbone: str | nn.Module = "resnet50",
        *,
        preset: str = "fast",
        steps: int | None = None,
        budget: str | None = None,
        size: int | None = None,
        batch_size: int | None = None,
        settings: dict[str, Any] | None = None,
        weights: str | Path | None = None,
        whiten: bool = False,
        image_shape: tuple[int, int] | None = None,
        random_state: int | np.random.RandomState | None = 0,
        out: str | Path | None = None,
    ) -> None:
        self.backbone = backbone
        self.preset = preset
        self.steps = steps
        self.budget = budget
        self.size = size
        self.batch_size = batch_size
        self.settings = settings
        self.weights = weights
        self.whiten = whiten
        self.image_shape = image_shape
        self.random_state = random_state
        self.out = out

    # ---- scikit-learn's methods ---------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803
        """Adapt to these images; labels are ignored."""
        images = self._images(X, fitting=True)
        model, preprocessing = self._backbone()
        config = self._config(len(images))
        preprocessing = preprocessing_for(None, preprocessing, config.size)
        done = adapt(model, images, config, preprocessing=preprocessing, out=self.out, report=self.out is not None)
        self.model_, self.result_, self.helped_ = done.model.eval(), done.result, done.helped
        self.preprocessing_ = preprocessing
        self._n_features_out = features_of(self.model_, preprocessing.size[0])
        embedder = self._embedder()
        self.map_ = fit_map(embedder, images) if self.whiten else None
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:  # noqa: N803
        """Vectors [n, features]; an image that cannot be read is an error."""
        check_is_fitted(self)
        images, embedder = self._images(X, fitting=False), self._embedder()
        if self.map_ is not None:
            embedder = with_map(embedder, self.map_)
        self.model_.to(best_device())
        module = embedder.module([MASK])
        rows, _ = embed(module, images, self.preprocessing_, batch_size=_BATCH, skip_bad=False)
        found: NDArray[np.float32] = rows.numpy()
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True  # paths
        tags.transformer_tags.preserves_dtype = []
        return tags

    # ---- parts --------------------------------------------------------------------------------------------------

    def _embedder(self) -> Embedder:
        return Embedder("", self.model_, self.preprocessing_, self._n_features_out)

    def _backbone(self) -> tuple[nn.Module, Any]:
        if isinstance(self.backbone, nn.Module):
            return copy.deepcopy(self.backbone), None  # whose is frozen otherwise
        found = load_backbone(self.backbone, weights=None if self.weights is None else Path(self.weights))
        return found.model, found.preprocessing

    def _config(self, images: int) -> AdaptConfig:
        given = {name: getattr(self, name) for name in ("steps", "budget", "size", "batch_size")}
        changes = {name: value for name, value in given.items() if value is not None}
        config = AdaptConfig.preset(self.preset, seed=self._seed(), **{**changes, **(self.settings or {})})
        if config.method != "mask":
            raise ConfigError("only masks are learned here", expected="mask", found=config.method)
        return config

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _images(self, X: Any, *, fitting: bool) -> Images:  # noqa: N803
        """What was given, as images; numbers are validated as scikit-learn does it."""
        if isinstance(X, Images):
            return X
        if _are_paths(X):
            return FileImages([str(each) for each in X], [f"{number:06d} {each}" for number, each in enumerate(X)])
        if isinstance(X, Sequence) and len(X) and isinstance(X[0], Image.Image | Tensor | np.ndarray):
            return DatasetImages(_Listed(X))
        if isinstance(X, Tensor):
            return DatasetImages(_Listed(list(X)))
        least = 2 if fitting else 1
        if getattr(X, "ndim", 2) > 2:  # of these, no axis counts features
            return ArrayImages(_bytes(check_array(X, allow_nd=True, dtype="numeric", ensure_min_samples=least)))
        rows = validate_data(self, X, reset=fitting, dtype="numeric", ensure_min_samples=least)
        return ArrayImages(self._rows(rows, fitting))

    def _rows(self, rows: NDArray[Any], fitting: bool) -> NDArray[np.uint8]:
        """Flattened images as bytes [n, H, W]."""
        rows = rows.astype(np.float64)
        if fitting:
            self.range_ = float(rows.min()), float(rows.max())
        low, high = self.range_
        scaled = (rows - low) / ((high - low) or 1.0)
        height, width = self._shape(rows.shape[1])
        return (255 * scaled.clip(0, 1)).round().astype(np.uint8).reshape(-1, height, width)

    def _shape(self, values: int) -> tuple[int, int]:
        if self.image_shape is None:
            side = math.isqrt(values)
            return (side, side) if side * side == values else (1, values)
        height, width = self.image_shape
        if height * width != values:
            raise ConfigError("the images are of another shape", expected=self.image_shape, found=f"{values} values")
        return height, width


class _Listed(torch.utils.data.Dataset[Any]):
    """Things in memory, as a data set."""

    def __init__(self, things: Sequence[Any]) -> None:
        self.things = things

    def __len__(self) -> int:
        return len(self.things)

    def __getitem__(self, number: int) -> Any:
        return self.things[number]


def _are_paths(images: Any) -> bool:
    if isinstance(images, np.ndarray):
        return images.ndim == 1 and images.dtype.kind in "UO" and all(isinstance(x, str | Path) for x in images)
    return isinstance(images, Sequence) and len(images) > 0 and all(isinstance(each, str | Path) for each in images)


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """[n, H, W] or [n, H, W, 3]; numbers that are no bytes are from 0 to 1."""
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3, 4)):
        raise ConfigError(
            "these are no images", expected="[n, height, width] or [n, height, width, 3]", found=list(array.shape)
        )
    if array.dtype == np.uint8 and (array.ndim == 3 or array.shape[3] == 3):
        return array
    return np.stack([array_to_rgb(each).permute(1, 2, 0).numpy() for each in array])
