"""A grid of methods, shares of the labels and seeds, run cell by cell: what is finished is not run again."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..backbones import Backbone
from ..data import Images, label_split
from ..data.identity import identity
from ..embedding.vectors import embed
from ..errors import ConfigError, DivergedRunError, TooFewImagesError
from ..evaluation import linear_probe_fit
from ..files import RunFile
from ..maskfile import Fingerprints
from ..objectives.heads import LinearHead
from ..preprocessing import Preprocessing
from ..report.comparison import Cell, Comparison
from ..training import Processes, open_folder
from ..training.methods import MethodName, need_peft
from ..training.stages import StagesDisplay
from .adapt import AdaptConfig, adapt
from .train import TrainConfig, train

CompareMethod = Literal["frozen", "mask", "self-mask", "full", "linear", "lora", "bitfit"]
_A_PROBE = 10  # what a cell without training costs, in steps: only the estimate of time left needs to know


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What is compared.

    methods: "frozen" and "self-mask" are probed linearly, with the labels of the cell; all others are trained on them.
    label_fractions, seeds: each method is run with each share of the labels and each seed, which decides which labels.
    stratified: the same share of every class, or of all images at random.
    preset, size, batch_size: of the runs. steps: of those with labels; adapt_steps: of those without.
    """

    methods: Sequence[CompareMethod] = get_args(CompareMethod)
    label_fractions: Sequence[float] = (0.01, 0.05, 0.25, 1.0)
    seeds: int = 3
    stratified: bool = True
    preset: str = "fast"
    steps: int | None = None
    adapt_steps: int | None = None
    size: int | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in get_args(CompareMethod):
                raise ConfigError(f"unknown method {method!r}", expected=", ".join(get_args(CompareMethod)))
        for share in self.label_fractions:
            if not 0 < share <= 1:
                raise ConfigError("no such share of the labels", expected="above 0, at most 1", found=share)
        if not self.methods or not self.label_fractions or self.seeds < 1:
            raise ConfigError("nothing to compare", expected="a method, a share of the labels and a seed at least")

    @property
    def cells(self) -> list[Cell]:
        """In the order they are run: one seed of everything first, so that a first table is there soon."""
        return [
            Cell(method, share, seed)
            for seed in range(self.seeds)
            for share in sorted(set(self.label_fractions))
            for method in dict.fromkeys(self.methods)
        ]

    def train(self, cell: Cell) -> TrainConfig:
        return TrainConfig.preset(
            self.preset,
            **{"method": cell.method, "label_fraction": cell.share, "seed": cell.seed, "stratified": self.stratified},
            **self._common(self.steps),
        )

    def adapt(self, seed: int) -> AdaptConfig:
        return AdaptConfig.preset(self.preset, seed=seed, **self._common(self.adapt_steps))

    def _common(self, steps: int | None) -> dict[str, Any]:
        length = {} if steps is None else {"steps": steps}
        return {"size": self.size, "batch_size": self.batch_size, "track": (), **length}


def compare(
    load: Callable[[], Backbone],
    images: Images,
    test: Images,
    config: CompareConfig | None = None,
    *,
    out: str | Path,
    about: Mapping[str, Any] | None = None,
    display: StagesDisplay | None = None,
) -> Comparison:
    """Run all cells that are not finished in `out`, and return all that are.

    load: makes the backbone anew; methods change it.
    images, test: labelled, with the same classes; test images are only ever measured with.
    """
    config, display = config or CompareConfig(), display or StagesDisplay(None)
    if Processes().count > 1:
        raise ConfigError("a comparison runs in one process", todo="start it without torchrun")
    backbone = load()
    _check(config, images)
    with open_folder(Path(out), True, Processes()) as folder:
        assert folder is not None
        names = ("stratified", "preset", "steps", "adapt_steps", "size", "batch_size")
        settings = {name: getattr(config, name) for name in names}
        facts = {
            "base": Fingerprints().of(backbone.model.state_dict())[:16],
            "images": identity(images)[:16],
            "test": identity(test)[:16],
        }
        folder.begin({"verb": "compare", **(about or {}), "backbone": backbone.name}, settings, facts)
        runner = _Runner(load, images, test, config, folder.path, display, (about or {}).get("weights"))
        costs = {cell.title: runner.cost(cell) for cell in config.cells}
        with display.stages(costs, [cell.title for cell in config.cells if runner.is_finished(cell)]):
            for cell in config.cells:
                if not runner.is_finished(cell):
                    with display.stage(cell.title):
                        runner.run(cell)
                    gc.collect()  # models with graphs refer to themselves
        return Comparison({cell: runner.result(cell) for cell in config.cells})


def _check(config: CompareConfig, images: Images) -> None:
    """What would stop the comparison half-way is said before the first cell."""
    assert images.labels is not None
    for share in config.label_fractions:
        for seed in range(config.seeds):
            label_split(images.labels, share, seed, stratified=config.stratified, classes=images.classes)
    if "lora" in config.methods:
        need_peft()
    # An adaptation holds a fifth of the images out.
    if "self-mask" in config.methods and len(images) - len(images) // 5 < config.batch_size:
        raise TooFewImagesError(
            "there are fewer images than a batch of self-mask holds",
            expected=f"{config.batch_size} besides the fifth that is held out",
            found=f"{len(images)} images",
            todo=f"make the batch smaller: --batch-size {max(2, len(images) // 2)}",
        )


class _Runner:
    """Runs cells, and keeps what several of them need: vectors, and masks learned without labels."""

    def __init__(
        self,
        load: Callable[[], Backbone],
        images: Images,
        test: Images,
        config: CompareConfig,
        folder: Path,
        display: StagesDisplay,
        weights: str | None,
    ) -> None:
        self.load, self.images, self.test, self.config = load, images, test, config
        self.folder, self.display, self.weights = folder, display, weights
        self._vectors: dict[str, list[_Part]] = {}

    def cost(self, cell: Cell) -> int:
        if cell.method in get_args(MethodName):
            return self.config.train(cell).number_of_steps(max(1, round(len(self.images) * cell.share) // 64))
        if cell.method == "self-mask" and cell.share == min(self.config.label_fractions):
            # Two views and the frozen backbone's are three times one view.
            return _A_PROBE + 3 * self.config.adapt(cell.seed).number_of_steps(len(self.images) // 64)
        return _A_PROBE

    def place(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def is_finished(self, cell: Cell) -> bool:
        return (self.place(cell) / RunFile.RESULT).exists()

    def result(self, cell: Cell) -> dict[str, Any]:
        numbers: dict[str, Any] = json.loads((self.place(cell) / RunFile.RESULT).read_text())
        return numbers

    def run(self, cell: Cell) -> None:
        if cell.method in get_args(MethodName):
            backbone = self.load()
            self._train(cell, backbone)
            return
        start = time.perf_counter()
        with open_folder(self.place(cell), True, Processes()) as folder:
            assert folder is not None
            mask_bytes, which = 0, "frozen"
            if cell.method == "self-mask":
                which = f"self-mask-{cell.seed}"
                mask_bytes = self._self_mask(which, cell.seed)
            folder.write_json(RunFile.RESULT, self._probe(which, cell, mask_bytes, start))

    def _train(self, cell: Cell, backbone: Backbone) -> None:
        try:
            train(
                *(backbone.model, self.images, self.config.train(cell)),
                test=self.test,
                out=self.place(cell),
                resume=True,
                preprocessing=backbone.preprocessing,
                about={"backbone": backbone.name, "weights": self.weights},
                display=self.display,
            )
        except DivergedRunError as error:  # it would again: a result, too, if a poor one
            with open_folder(self.place(cell), True, Processes()) as folder:
                assert folder is not None
                folder.write_json(RunFile.RESULT, {"method": cell.method, "diverged": error.what})
            self.display.say(f"{cell.name}: {error.what}")

    def _self_mask(self, which: str, seed: int) -> int:
        """Adapt to all training images without labels, or take what is there; the bytes of the mask."""
        if which not in self._vectors:
            backbone = self.load()
            result = adapt(
                *(backbone.model, self.images, self.config.adapt(seed)),
                out=self.folder / which,
                resume=True,
                preprocessing=backbone.preprocessing,
                about={"backbone": backbone.name, "weights": self.weights},
                display=self.display,
            )
            self._vectors[which] = self._embedded(result.model, backbone.preprocessing)
        return (self.folder / which / RunFile.MASK).stat().st_size

    def _embedded(self, model: nn.Module, how: Preprocessing) -> list[_Part]:
        size = self.config.size
        how = how if size is None else dataclasses.replace(how, size=(size, size))
        found = []
        for images in (self.images, self.test):
            assert images.labels is not None
            vectors, kept = embed(model.to(Processes().device), images, how)
            found.append(_Part(vectors, torch.tensor(images.labels)[kept], kept))
        return found

    def _probe(self, which: str, cell: Cell, mask_bytes: int, start: float) -> dict[str, Any]:
        if which not in self._vectors:
            backbone = self.load()
            self._vectors[which] = self._embedded(backbone.model, backbone.preprocessing)
        train, test = self._vectors[which]
        # Of all labels, those of unreadable images included: every method is to see the same.
        split = label_split(self.images.labels or [], cell.share, cell.seed, stratified=self.config.stratified)
        wanted = set(split)
        chosen = [row for row, number in enumerate(train.numbers) if number in wanted]
        probe = linear_probe_fit(train.vectors[chosen], train.labels[chosen])
        right = probe.rank(test.vectors)[:, 0] == test.labels
        classes = self.images.classes or [str(name) for name in probe.classes.tolist()]
        head = LinearHead(train.vectors.shape[1], classes, normalised=True)
        return {
            **{"method": cell.method, "labels": len(chosen), "seed": cell.seed},
            # What such a head takes as a file, in the same 16 bits as those of other methods.
            **{"accuracy": float(right.double().mean()), "bytes": mask_bytes + len(save(head.tensors()))},
            "seconds": time.perf_counter() - start,
        }


class _Part(NamedTuple):
    """Vectors of images, with the labels of those images and their numbers."""

    vectors: Tensor
    labels: Tensor
    numbers: list[int]
