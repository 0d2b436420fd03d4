"""A grid of methods, shares of the labels and seeds, run cell by cell: what is finished is not run again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..backbones import Backbone
from ..data import Images, label_split
from ..data.identity import identity
from ..data.splits import unseen
from ..embedding.vectors import embed
from ..errors import ConfigError, DivergedRunError, TooFewImagesError
from ..evaluation import linear_probe_fit
from ..evaluation.feature_map import FeatureMap
from ..evaluation.measuring import MAP
from ..files import RunFile
from ..maskfile import Fingerprints
from ..objectives.heads import LinearHead
from ..preprocessing import Preprocessing
from ..report.comparison import Cell, Comparison
from ..report.rivals import RivalCell, Rivals
from ..settings import to_dict
from ..training import Processes, open_folder
from ..training.display import StagesDisplay
from ..training.methods import MethodName, need_peft
from .adapt_config import AdaptConfig
from .cells import DIVERGED, Cells
from .job import Job
from .rivals import RivalsRunner
from .train import TrainConfig, train

CompareMethod = Literal["frozen", "mask", "self-mask", "full", "linear", "lora", "bitfit", "adabn"]
METHODS: Mapping[bool, Sequence[CompareMethod]] = {
    True: ("frozen", "mask", "self-mask", "full", "linear", "lora", "bitfit"),
    False: ("frozen", "adabn", "mask", "full", "lora", "bitfit"),
}
"""Those that can be compared, by whether they may learn from labels."""
_PROBED = ("frozen", "self-mask")
GROWING = ("methods", "label_fractions", "seeds")
"""Settings that may change from one call to the next: they only say which cells there are."""
APART = frozenset({"steps", "epochs", "lr"})
"""Settings that mean something else for self-mask than for runs with labels, and are changed apart."""
_MOST_SEEDS = 1000
_A_PROBE = 10  # what a cell without training costs, in steps: only the estimate of time left needs to know


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """All settings of a comparison.

    labels: whether methods may learn from labels. If not, all learn by the objective of an adaptation, and labels,
        where there are any, only measure.
    methods: methods to compare; by default all. A linear probe with the labels evaluates frozen and self-mask, as they
        are and with a map (whitened without labels); all others train on the labels. Without labels, all are evaluated
        as they are and with a map, and adabn takes the batch-norm statistics of the images and learns nothing.
    label_fractions: shares of the training labels to use; every method runs with each of them.
    seeds: number of seeds; every method runs with each of them. The seed decides which labels are used.
    train: settings of the runs with labels; the comparison sets method, share of labels and seed.
    adapt: settings of the runs without labels; the comparison sets method and seed.
    """

    labels: bool = True
    methods: Sequence[CompareMethod] = None  # type: ignore[assignment]  # depends on `labels`
    label_fractions: Sequence[float] = (0.01, 0.05, 0.25, 1.0)
    seeds: int = 3
    train: TrainConfig = dataclasses.field(default_factory=lambda: TrainConfig.preset("fast", track=()))
    adapt: AdaptConfig = dataclasses.field(default_factory=lambda: AdaptConfig.preset("fast", track=()))

    def __post_init__(self) -> None:
        if self.methods is None:
            object.__setattr__(self, "methods", METHODS[self.labels])
        for method in self.methods:
            if method not in METHODS[self.labels]:
                elsewhere = method in METHODS[not self.labels]
                raise ConfigError(
                    f"unknown method {method!r}" if not elsewhere else f"{method} cannot be compared here",
                    expected=", ".join(METHODS[self.labels]),
                    todo=("omit --no-labels" if method in METHODS[True] else "use --no-labels") if elsewhere else None,
                )
        for share in self.label_fractions:
            if not 0 < share <= 1:
                raise ConfigError(
                    "a share in label_fractions is out of range", expected="a share above 0, at most 1", found=share
                )
        if not self.methods or not self.label_fractions or not 1 <= self.seeds <= _MOST_SEEDS:
            raise ConfigError(
                "there is nothing to compare, or too much",
                expected=f"at least one method, one share of labels, and 1 to {_MOST_SEEDS:,} seeds",
                found=f"{len(self.methods)}, {len(self.label_fractions)} and {self.seeds}",
            )

    def changed(self, **changes: Any) -> Self:
        """With some settings changed; with or without labels there are other methods, unless those are said too."""
        if changes.get("labels", self.labels) != self.labels:
            changes = {"methods": None, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def cells(self) -> list[Cell]:
        """In the order they are run: one seed of everything first, so that a first table is there soon."""
        return [
            Cell(method, share, seed)
            for seed in range(self.seeds)
            for share in sorted(set(self.label_fractions))
            for asked in dict.fromkeys(self.methods)
            for method in ((asked, asked + MAP) if asked in _PROBED else (asked,))
        ]

    @property
    def rival_cells(self) -> list[RivalCell]:
        """The same where nothing learns from labels."""
        return [RivalCell(method, seed) for seed in range(self.seeds) for method in dict.fromkeys(self.methods)]

    @staticmethod
    def preset(name: str, **changes: Any) -> CompareConfig:
        """A preset of all runs, with some settings changed; those of both kinds of runs are changed in both.

        `steps` are of runs with labels, `adapt_steps` of those without.
        """
        own = {key: changes.pop(key) for key in (*GROWING, "labels") if key in changes}
        steps = changes.pop("adapt_steps", None)
        known, adapting = ({field.name for field in dataclasses.fields(cls)} for cls in (TrainConfig, AdaptConfig))
        train = {key: value for key, value in changes.items() if key in known or key not in adapting}
        adapt = {key: value for key, value in changes.items() if key in adapting - APART}
        return CompareConfig(
            **own,
            train=TrainConfig.preset(name, **{"track": (), "head": "linear", **train}),  # the same for all methods
            adapt=AdaptConfig.preset(name, **{"track": (), **adapt, **({} if steps is None else {"steps": steps})}),
        )

    def training(self, cell: Cell) -> TrainConfig:
        return dataclasses.replace(
            self.train, method=cast(MethodName, cell.method), label_fraction=cell.share, seed=cell.seed
        )

    def adaptation(self, seed: int) -> AdaptConfig:
        return dataclasses.replace(self.adapt, seed=seed)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, ready for JSON."""
        return to_dict(self)


def compare(
    load: Callable[[], Backbone],
    images: Images,
    test: Images,
    config: CompareConfig | None = None,
    *,
    out: str | Path,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    display: StagesDisplay | None = None,
) -> Comparison:
    """Run all cells that are not finished in `out`, and return all that are.

    load: makes the backbone anew; methods change it.
    images, test: labelled, with the same classes; test images are only ever measured with.
    """
    config = config or CompareConfig()
    assert config.labels
    with _begun(load, images, test, config, out, about, max_bad, display) as job:
        return Comparison(_Runner(job, test, config).run_all(config.cells))


def compare_rivals(
    load: Callable[[], Backbone],
    images: Images,
    test: Images | None,
    config: CompareConfig | None = None,
    *,
    out: str | Path,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    display: StagesDisplay | None = None,
) -> Rivals:
    """The same for methods that learn without labels: every one learns as an adaptation does.

    test: labelled images, with `images` as the labelled ones to measure by; None where there are no labels.
    """
    config = config or CompareConfig(labels=False)
    assert not config.labels
    with _begun(load, images, test, config, out, about, max_bad, display) as job:
        return Rivals(RivalsRunner(job, test, config.adapt).run_all(config.rival_cells))


@contextmanager
def _begun(
    load: Callable[[], Backbone],
    images: Images,
    test: Images | None,
    config: CompareConfig,
    out: str | Path,
    about: Mapping[str, Any] | None,
    max_bad: float,
    display: StagesDisplay | None,
) -> Iterator[Job]:
    """What all cells share; nobody else may write to the folder meanwhile."""
    if Processes().count > 1:
        raise ConfigError("a comparison runs in one process", todo="start it without torchrun")
    backbone = load()
    _check(config, images)
    with open_folder(Path(out), True, Processes()) as folder:
        assert folder is not None
        facts = {
            "base": Fingerprints().of(backbone.model.state_dict())[:16],
            "images": identity(images)[:16],
            "test": None if test is None else identity(test)[:16],
        }
        about = {"verb": "compare", **(about or {}), "backbone": backbone.name, "max_bad": max_bad}
        folder.begin(about, config.to_dict(), facts, free=GROWING)
        yield Job(load, images, folder.path, display or StagesDisplay(), about.get("weights"), max_bad)


def _check(config: CompareConfig, images: Images) -> None:
    """What would stop the comparison half-way is said before the first cell."""
    if "lora" in config.methods:
        need_peft()
    adapting = {"self-mask"} if config.labels else {"mask", "full", "lora", "bitfit"}
    if config.labels:
        assert images.labels is not None
        for share in config.label_fractions:
            for seed in range(config.seeds):
                label_split(images.labels, share, seed, stratified=config.train.stratified)
    # An adaptation holds a fifth of the images out.
    if adapting & set(config.methods) and len(images) - len(images) // 5 < config.adapt.batch_size:
        raise TooFewImagesError(
            "there are fewer images than a batch of an adaptation needs",
            expected=f"{config.adapt.batch_size} plus the fifth that is held out",
            found=f"{len(images)} images",
            todo=f"use a smaller batch: --batch-size {max(2, len(images) // 2)}",
        )


class _Runner(Cells[Cell]):
    """Runs cells, and keeps what several of them need: vectors, and masks learned without labels."""

    def __init__(self, job: Job, test: Images, config: CompareConfig) -> None:
        super().__init__(job.folder, job.display)
        self.job, self.test, self.config = job, test, config
        self._vectors: dict[str, list[_Part]] = {}
        self._maps: dict[str, FeatureMap] = {}

    def cost(self, cell: Cell) -> int:
        if cell.method in get_args(MethodName):
            return self.config.training(cell).number_of_steps(max(1, round(len(self.job.images) * cell.share) // 64))
        if cell.method == "self-mask" and cell.share == min(self.config.label_fractions):
            # Two views and the frozen backbone's are three times one view.
            return _A_PROBE + 3 * self.config.adaptation(cell.seed).number_of_steps(len(self.job.images) // 64)
        return _A_PROBE

    def run(self, cell: Cell) -> None:
        if cell.method in get_args(MethodName):
            backbone = self.job.load()
            self._train(cell, backbone)
            return
        start = time.perf_counter()
        with open_folder(self.place(cell), True, Processes()) as folder:
            assert folder is not None
            mask_bytes, which = 0, "frozen"
            if cell.method.removesuffix(MAP) == "self-mask":
                which = f"self-mask-{cell.seed}"
                mask_bytes = self._self_mask(which, cell.seed)
            folder.write_json(RunFile.RESULT, self._probe(which, cell, mask_bytes, start))

    def _train(self, cell: Cell, backbone: Backbone) -> None:
        try:
            train(
                backbone.model,
                self.job.images,
                self.config.training(cell),
                test=self.test,
                out=self.place(cell),
                resume=True,
                preprocessing=backbone.preprocessing,
                about={"backbone": backbone.name, "weights": self.job.weights},
                max_bad=self.job.max_bad,
                display=self.job.display,
            )
        except DivergedRunError as error:  # it would again: a result, too, if a poor one
            with open_folder(self.place(cell), True, Processes()) as folder:
                assert folder is not None
                folder.write_json(RunFile.RESULT, {"method": cell.method, DIVERGED: error.what})
            self.job.display.say(f"{cell.name}: {error.what}")

    def _self_mask(self, which: str, seed: int) -> int:
        """Adapt to all training images without labels, or take what is there; the bytes of the mask."""
        if which not in self._vectors:
            backbone = self.job.load()
            result = self.job.adapted(backbone, self.config.adaptation(seed), self.job.folder / which)
            self._vectors[which] = self._embedded(result.model, backbone.preprocessing)
        return (self.job.folder / which / RunFile.MASK).stat().st_size

    def _embedded(self, model: nn.Module, preprocessing: Preprocessing) -> list[_Part]:
        size = self.config.adapt.size
        preprocessing = preprocessing if size is None else dataclasses.replace(preprocessing, size=(size, size))
        found = []
        for images in (self.job.images, self.test):
            assert images.labels is not None
            vectors, kept = embed(model.to(Processes().device), images, preprocessing)
            found.append(_Part(vectors, torch.tensor(images.labels)[kept], kept))
        return found

    def _probe(self, which: str, cell: Cell, mask_bytes: int, start: float) -> dict[str, Any]:
        if which not in self._vectors:
            backbone = self.job.load()
            self._vectors[which] = self._embedded(backbone.model, backbone.preprocessing)
        train, test = self._vectors[which]
        if cell.method.endswith(MAP):
            if which not in self._maps:
                self._maps[which] = FeatureMap.fit(train.vectors)
            whiten = self._maps[which]
            train, test = (part._replace(vectors=whiten(part.vectors)) for part in (train, test))
            mask_bytes += len(whiten.as_bytes())
        # Of all labels, those of unreadable images included: every method is to see the same.
        labels = self.job.images.labels or []
        split = label_split(labels, cell.share, cell.seed, stratified=self.config.train.stratified)
        wanted = set(split)
        chosen = [row for row, number in enumerate(train.numbers) if number in wanted]
        probe = linear_probe_fit(train.vectors[chosen], train.labels[chosen])
        right = probe.rank(test.vectors)[:, 0] == test.labels
        classes = self.job.images.classes or [str(name) for name in probe.classes.tolist()]
        head = LinearHead(train.vectors.shape[1], classes, normalised=True)
        return {
            "method": cell.method,
            "labels": len(chosen),
            "unseen_classes": [classes[number] for number in unseen(labels, split)],
            "seed": cell.seed,
            # What such a head takes as a file, in the same 16 bits as those of other methods.
            "accuracy": float(right.double().mean()),
            "bytes": mask_bytes + len(save(head.tensors())),
            "seconds": time.perf_counter() - start,
        }


class _Part(NamedTuple):
    """Vectors of images, with the labels of those images and their numbers."""

    vectors: Tensor
    labels: Tensor
    numbers: list[int]
