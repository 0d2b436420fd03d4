"""The appendix on compression: general compressors on learned masks, and on weights that were fully fine-tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..files import RunFile
from ..maskfile.compressing import COMPRESSORS, Sizes, compressors, sizes_of_mask, sizes_of_weights
from ..masking import MaskedModel
from ..training.tuned import open_tuned
from .readings import active, steps_of
from .scale import Case, Scale
from .study import Claim, Entry, Result, Study, register
from .tasks import Adapt, Task, World, leave

DATA = ("cifar100", "sun397")
_BOTH = "mask against weights both compressed"


@dataclasses.dataclass(frozen=True)
class Compress(Task):
    """`selfmask compress` of a mask, and of the same weights after full fine-tuning; neither with norm statistics."""

    verb = "compress"
    mask: Adapt
    full: Adapt

    @property
    def needs(self) -> tuple[Task, ...]:
        return self.mask, self.full

    @property
    def title(self) -> str:
        return f"compress what was learned of {self.subject}, seed {self.mask.config.seed}"

    def settings(self) -> Mapping[str, Any]:
        return {"compressors": sorted(compressors())}  # who installs one more asks again

    def run(self, place: Path, world: World) -> None:
        file = world.place(self.mask) / RunFile.MASK
        masked = MaskedModel.from_pretrained(world.backbone(self.subject).model, file)
        packed = masked.pack()
        tuned = open_tuned(world.place(self.full) / RunFile.TUNED).weights
        mask = sizes_of_mask(packed, dict(masked.base.named_parameters()))
        weights = sizes_of_weights(tuned[name] for name in packed.bits)
        found = {"mask": dataclasses.asdict(mask), "weights": dataclasses.asdict(weights)}
        leave(place, {**found, "file": file.stat().st_size})


@register
class Compression(Study):
    name = "compression"
    title = "General compressors on masks and on fine-tuned weights (appendix: mask compression)"
    claims = tuple(
        Claim(f"{by} makes masks smaller than it makes weights", ("reduction",), f"mask by {by}", f"weights by {by}")
        for by in COMPRESSORS
    )

    def entries(self, scale: Scale) -> list[Entry]:
        return [
            entry for case in scale.cases(DATA) for seed in scale.repetitions() for entry in self._of(scale, case, seed)
        ]

    def _of(self, scale: Scale, case: Case, seed: int) -> list[Entry]:
        mask, full = (Adapt(case.subject, scale.adapt(seed=seed, method=method)) for method in ("mask", "full"))
        task = Compress(case.subject, mask, full)

        def entry(setting: str, measure: str, read: Callable[[Result], float | None], of: Case = case) -> Entry:
            return Entry(of, setting, measure, task, read, seed=seed, steps=steps_of(mask))

        def entries(setting: str, kind: str, size: Callable[[Sizes], int | None]) -> list[Entry]:
            return [
                entry(setting, "values", lambda result: _sizes(result, kind).values),
                entry(setting, "bytes", lambda result: size(_sizes(result, kind))),
                entry(setting, "reduction", lambda result: _less(result, kind, size, of_paper=True)),
                *(
                    [entry(setting, "reduction_from_1_bit", lambda result: _less(result, kind, size, of_paper=False))]
                    if kind == "mask"
                    else []
                ),
            ]

        nowhere = case._replace(backbone="", data="")  # the paper says it of all
        return [
            active(case, "mask", mask, seed),  # the more weights are off, the less there is to compress
            *entries("mask in 2 bits a weight", "mask", lambda sizes: sizes.paper_plain),
            *entries("mask in 1 bit a weight", "mask", lambda sizes: sizes.plain),
            *(each for by in COMPRESSORS for each in entries(f"mask by {by}", "mask", _by(by))),
            *entries("mask by selfmask", "mask", lambda sizes: sizes.coded),
            *entries("weights in float32", "weights", lambda sizes: sizes.plain),
            *(each for by in COMPRESSORS for each in entries(f"weights by {by}", "weights", _by(by))),
            entry("mask file with norm statistics", "bytes", lambda result: result["file"]),
            entry("mask by the best", "reduction", _best, nowhere),
            entry("mask against weights both uncompressed", "storage_share", _uncompressed, nowhere),
            entry(_BOTH, "storage_share", _compressed),
            entry(_BOTH, "times_smaller", lambda result: 1 / _compressed(result)),
            entry("mask by selfmask against weights by the best", "storage_share", _ours),
        ]


def _by(compressor: str) -> Callable[[Sizes], int | None]:
    return lambda sizes: sizes.by.get(compressor)


def _sizes(result: Result, kind: str) -> Sizes:
    return Sizes(**result[kind])


def _less(result: Result, kind: str, size: Callable[[Sizes], int | None], *, of_paper: bool) -> float | None:
    """By which part of it something became smaller: of two bits a weight, as in the paper, or of one."""
    sizes = _sizes(result, kind)
    found, whole = size(sizes), sizes.paper_plain if of_paper else sizes.plain
    return None if found is None else 1 - found / whole


def _best(result: Result) -> float:
    mask = _sizes(result, "mask")
    return 1 - mask.smallest / mask.paper_plain


def _uncompressed(result: Result) -> float:
    return _sizes(result, "mask").plain / _sizes(result, "weights").plain


def _compressed(result: Result) -> float:
    return _sizes(result, "mask").smallest / _sizes(result, "weights").smallest


def _ours(result: Result) -> float:
    return (_sizes(result, "mask").coded or 0) / _sizes(result, "weights").smallest
