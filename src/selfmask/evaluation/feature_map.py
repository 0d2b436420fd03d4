"""The map: vectors centred and whitened in part, by what unlabelled images are like. An artifact of its own.

It is fitted once and kept, so that one process, shards and servers give the same vectors. A file holds the principal
directions (8 bits a number), the variances along them and the mean: the power is chosen when it is used. It says
which model and preprocessing its vectors came from, and is refused on others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from .. import checked
from ..errors import EvaluationError, FeatureMapError, MaskFileError, RunWriteError
from ..files import write_atomically
from ..maskfile import Container, Source, open_container
from ..maskfile.container import Stored, container_bytes, content_hash
from ..maskfile.manifest import hashed_words
from ..preprocessing import Preprocessing
from .inputs import check_features
from .moments import Moments
from .whitening import chosen_power, scales, shrinkage, shrunk

SAMPLE = 4096
"""Images that a map is fitted on, at most."""
MAX_WIDTH = 4096
"""Length of the vectors of a map, at most: it has the square of that many numbers."""
FORMAT, _VERSION = "selfmask-map", "2"
_LARGEST = 1e9  # value of a vector; whatever a file says, no vector that is mapped becomes infinite


@dataclasses.dataclass(frozen=True)
class MadeFor:
    """What made the vectors of a map: the fingerprint of the model, and how images were prepared for it."""

    model: str
    preprocessing: Preprocessing

    def __post_init__(self) -> None:
        # As it is read from a file: 1 and 1.0 are the same number, but not the same words.
        object.__setattr__(self, "preprocessing", Preprocessing.of_json(dataclasses.asdict(self.preprocessing)))


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureMap:
    """Maps vectors [n, width] to float32 vectors of the same shape: centred, turned, and whitened to a power.

    >>> whiten = FeatureMap.fit(vectors)          # unlabelled, at best those of thousands of images
    >>> whiten(others)                            # or whiten.at(1.0)(others)
    >>> whiten.save("map.safetensors")
    >>> whiten = FeatureMap.load("map.safetensors")
    """

    mean: Tensor = dataclasses.field(repr=False)
    """[width]"""
    codes: Tensor = dataclasses.field(repr=False)
    """The principal directions as columns, divided by their steps and rounded: int8, [width, width]."""
    steps: Tensor = dataclasses.field(repr=False)
    """[width]"""
    variances: Tensor = dataclasses.field(repr=False)
    """Along the directions, [width]; shrunk."""
    power: float
    """0 centres, 1 whitens, and between is between."""
    images: int
    """How many it was fitted on."""
    made_for: MadeFor | None = None

    # ---- fitting ----------------------------------------------------------------------------------------------

    @staticmethod
    def fit(
        vectors: Tensor | Iterable[Tensor], *, power: float | None = None, made_for: MadeFor | None = None
    ) -> FeatureMap:
        """Fit to rows of vectors, or to batches of them, of which only sums are kept.

        Of more than `SAMPLE` rows, a fixed sample is taken; batches are all taken. power: by default chosen without
        labels (`whitening.chosen_power`).
        """
        if isinstance(vectors, Tensor):
            vectors = [vectors[sample(len(vectors))]]
        moments: Moments | None = None
        for batch in vectors:
            if not len(batch):  # of images that could not be read
                continue
            rows = check_features(batch, "the images")
            if moments is None:
                moments = Moments(_possible(rows.shape[1]))
            moments.add(rows)
        if moments is None or moments.count < 2:
            raise EvaluationError(
                "there are too few images to fit a map to",
                expected="at least two, better thousands",
                found=0 if moments is None else moments.count,
            )
        width = len(moments.mean)
        found = moments.coded(width)
        variances = shrunk(found.variances, shrinkage(found.variances.double(), moments.count))
        power = chosen_power(variances.double()) if power is None else checked_power(power)
        return FeatureMap(moments.mean.float(), found.codes, found.steps, variances, power, moments.count, made_for)

    def at(self, power: float) -> FeatureMap:
        """The same map with another power of whitening."""
        return dataclasses.replace(self, power=checked_power(power))

    # ---- using ------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        return len(self.mean)

    @cached_property
    def matrix(self) -> Tensor:
        """What centred vectors are multiplied by: float64, [width, width]."""
        return self.codes.double() * (self.steps * scales(self.variances.double(), self.power))

    def __call__(self, vectors: Tensor) -> Tensor:
        if vectors.ndim != 2 or vectors.shape[1] != self.width:
            raise EvaluationError(
                "the map does not fit these vectors",
                expected=f"rows of length {self.width}",
                found=list(vectors.shape),
            )
        # In double precision, so that how many vectors come at a time does not show in those that come out.
        mean, matrix = self.mean.to(vectors.device).double(), self.matrix.to(vectors.device)
        return ((vectors.double() - mean) @ matrix).float()

    def check(self, made_for: MadeFor, name: str) -> FeatureMap:
        """Itself, if it was fitted to vectors of this model, with images prepared in this way."""
        if self.made_for in (None, made_for):
            return self
        assert self.made_for is not None
        same = self.made_for.model == made_for.model
        raise FeatureMapError(
            f"{name} was fitted to other vectors",
            expected=self.made_for.preprocessing if same else f"the model with fingerprint {self.made_for.model[:16]}",
            found=made_for.preprocessing if same else made_for.model[:16],
            todo="use the model and image size it was fitted with, or fit another: --map NEW-FILE",
        )

    # ---- files ------------------------------------------------------------------------------------------------

    @property
    def sha256(self) -> str:
        """Of all that the mapped vectors depend on, besides the vectors."""
        return content_hash(self._words, self._tensors)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).cpu() for name in _TYPES}

    @property
    def _about(self) -> str:
        about = {
            "power": self.power,
            "images": self.images,
            "made_for": None if self.made_for is None else dataclasses.asdict(self.made_for),
        }
        return json.dumps(about, sort_keys=True, allow_nan=False)

    @property
    def _words(self) -> str:
        return hashed_words(FORMAT, _VERSION, self._about)

    def as_bytes(self) -> bytes:
        """The file. The same map gives the same bytes."""
        metadata = {"format": FORMAT, "version": _VERSION, "about": self._about}
        return container_bytes(self._tensors, metadata, self._words)

    def save(self, path: str | Path) -> int:
        """Write the file atomically; return its size in bytes."""
        return write_atomically(Path(path), self.as_bytes(), RunWriteError)

    @staticmethod
    def load(source: Source | Container) -> FeatureMap:
        """Read a file; whatever is wrong with it is a `FeatureMapError`."""
        try:
            with open_container(source, None if isinstance(source, str | Path | Container) else "the map") as file:
                power, images, made_for = _words_of(file)
                _check_table(file)
                tensors = file.read(hashed_words(FORMAT, _VERSION, file.metadata["about"]))
            _check_values(tensors)
        except (MaskFileError, ValueError) as error:
            raise FeatureMapError(
                error.what if isinstance(error, MaskFileError) else f"{file.name} is not a map that can be used",
                expected="a file written by `selfmask adapt`, `selfmask embed --map` or FeatureMap.save",
                found=error.found if isinstance(error, MaskFileError) else str(error)[:200],
                todo="fit it again: --map NEW-FILE",
            ) from error
        mean, codes, steps, variances = (tensors[name] for name in _TYPES)
        return FeatureMap(mean, codes, steps, variances, power, images, made_for)


_TYPES = {"mean": "F32", "codes": "I8", "steps": "F32", "variances": "F32"}


def sample(count: int) -> list[int]:
    """Numbers of the images, of so many, that a map is fitted on: the same every time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return sorted(order[:SAMPLE].tolist())


def checked_power(power: float) -> float:
    if not 0 <= power <= 1:
        raise EvaluationError(
            "the power of whitening is out of range", expected="0 (centring alone) to 1 (full whitening)", found=power
        )
    return float(power)


def power_named(text: str) -> float | None:
    """A power as a user writes it; None for "auto", the map's own."""
    if text == "auto":
        return None
    try:
        return checked_power(float(text))
    except ValueError as error:
        raise EvaluationError("unknown power of whitening", expected="auto, or 0 to 1", found=text) from error


def _possible(width: int) -> int:
    if width > MAX_WIDTH:
        raise EvaluationError("these vectors are too long for a map", expected=f"at most {MAX_WIDTH}", found=width)
    return width


def _words_of(file: Container) -> tuple[float, int, MadeFor | None]:
    """All of a map but its tensors."""
    if (file.metadata.get("format"), file.metadata.get("version")) != (FORMAT, _VERSION):
        found = f"{file.metadata.get('format')} {file.metadata.get('version')}"
        raise ValueError(f"a file of the format {found[:100]!r}")
    fields = checked.mapping(checked.document(checked.member(file.metadata, "about")))
    return (
        checked.share(checked.member(fields, "power")),
        checked.count(checked.member(fields, "images"), least=2),
        checked.optional(checked.member(fields, "made_for"), _made_for),
    )


def _made_for(value: object) -> MadeFor:
    fields = checked.mapping(value)
    return MadeFor(
        checked.sha256(checked.member(fields, "model")),
        Preprocessing.of_json(checked.member(fields, "preprocessing")),
    )


def _check_table(file: Container) -> None:
    """Before anything is read: the tensors are those of a map."""
    width = (file.table.get("mean") or Stored("F32", ())).shape[:1]
    shapes = {name: (*width, *width) if name == "codes" else width for name in _TYPES}
    if file.table != {name: Stored(kind, shapes[name]) for name, kind in _TYPES.items()} or not width:
        raise ValueError(f"other tensors than those of a map: {', '.join(sorted(file.table))}")
    if not 0 < width[0] <= MAX_WIDTH:
        raise ValueError(f"vectors of length {width[0]}")


def _check_values(tensors: dict[str, Tensor]) -> None:
    mean, steps, variances = (tensors[name].double() for name in ("mean", "steps", "variances"))
    sound = (
        (mean.abs() <= _LARGEST).all() & ((steps >= 0) & (steps <= 1)).all(),
        ((variances >= 0) & (variances <= _LARGEST**2)).all(),  # and with that no number is NaN
    )
    if not all(bool(each) for each in sound):
        raise ValueError("numbers that no vectors have")
