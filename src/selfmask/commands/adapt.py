"""`adapt`, the main job: a frozen backbone and unlabelled images in, a mask out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..data import Images, SomeImages
from ..data.images import MAX_PIXELS
from ..data.partition import LearnedSplit, open_to_learn
from ..data.seen import write_seen
from ..data.splits import first_by_hash
from ..data.views import ViewsConfig
from ..embedding.embedder import Embedder, MaskVariants, TunedVariants
from ..errors import ConfigError
from ..files import RunFile
from ..maskfile import Fingerprints, state_of
from ..masking import MaskConfig, MaskedModel
from ..objectives import Context, Objective
from ..preprocessing import Preprocessing, preprocessing_for
from ..running import evaluating
from ..training.beside import Beside, Tuned
from ..training.display import Display
from ..training.guard import Guard
from ..training.layout import Layout
from ..training.loop import ParameterGroup
from ..training.methods import Learner, frozen_beside, prepare_beside
from ..training.quality import Gain, quality_on
from ..training.run import Recipe, Run, Watch, run, score_group
from ..training.seeds import derive, generator
from ..training.start import Start
from ..training.tuned import FROZEN, About, write_tuned
from .adapt_config import AdaptConfig
from .outcome import (
    Labelled,
    check_labels,
    how_it_went,
    measure,
    sampled,
    write_map,
    write_mask,
    write_neighbours_report,
)

_HELD_OUT = 256  # images that the gate looks at, or a fifth of all if they are few


@dataclasses.dataclass(frozen=True)
class AdaptResult:
    """The result of `adapt`: the adapted model in eval mode, the numbers in `result.json`, and the log."""

    model: MaskedModel | Any
    """A `MaskedModel`; of other methods than a mask, a module that maps images to vectors."""
    result: dict[str, Any]
    log: list[dict[str, Any]]
    folder: Path | None

    @property
    def helped(self) -> bool | None:
        """Whether the representation improved, as estimated without labels; None if that was not measured.

        If it did not, the model is the frozen backbone (a mask leaves all weights on), or the mask is that of `start`.
        """
        return None if "kept" not in self.result else self.result["kept"] not in ("identity", "start")

    @property
    def quality(self) -> list[tuple[int, float]]:
        """The label-free quality over the run: pairs of step and quality. It starts at `result["quality_before"]`."""
        return [(line["step"], line["quality"]) for line in self.log if "quality" in line]


def adapt(
    model: nn.Module,
    images: str | Path | Dataset[Any] | Images,
    config: AdaptConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    preprocessing: Preprocessing | None = None,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    split: LearnedSplit = "train",
    max_pixels: int = MAX_PIXELS,
    labelled: Labelled | None = None,
    start: Start | None = None,
    report: bool = True,
    display: Display | None = None,
    watch: Watch | None = None,
    dry_run: bool = False,
) -> AdaptResult:
    """Learn, without labels, which weights of `model` to switch off for `images` (or what else the method trains).

    >>> result = selfmask.adapt(timm.create_model("resnet18", pretrained=True, num_classes=0), "photos/")
    >>> result.model(batch)                 # the adapted backbone
    >>> result.model.save_pretrained("photos.smn")

    model: any module that maps each image to one vector; its weights are frozen.
    images: a folder, a list file, an array file, the name of a data set, or a Dataset.
    out: the run folder (log, checkpoints, mask.smn, map.safetensors, result.json); with `resume`, a run in it is
        continued exactly.
    preprocessing: the model's preprocessing; by default that of the timm model, otherwise ImageNet's.
    about: names to record in the run folder, such as those of the backbone and its weights.
    max_bad: largest share of images that may be unreadable.
    split: "train" leaves out what `evaluate` would test with: the test split, or a fifth of each class of labelled
        images that have no splits. "all" uses every image. A Dataset is always used whole.
    max_pixels: images with more pixels count as unreadable.
    labelled: labelled images on which to measure the frozen and the adapted backbone at the end.
    start: mask to start from, instead of all weights on; the gate then falls back to it.
    report: whether to write report.html.
    display: receives messages and progress; by default nothing is shown.
    watch: callback that receives the model and each log line.
    dry_run: take a few steps only; the result is what the run would take (steps, seconds, bytes of memory and disk).
    """
    check_labels(labelled)
    source, note = open_to_learn(images, split=split, max_pixels=max_pixels)
    config = config or AdaptConfig.preset("fast")
    if display is not None:
        if note:
            display.say(note)
        if config.most_images is not None and len(source) > config.most_images:
            sample = f"learning from a random sample of {config.most_images:,} of the {len(source):,} images"
            display.say(f"{sample}; --most-images takes more, and more time")
    about = {"backbone": Preprocessing.of_model(model)[0], "weights": None, **(about or {})}
    recipe = Adaptation(
        model,
        source,
        config,
        given=preprocessing,
        name=about["backbone"],
        labelled=labelled,
        start=start,
        report=report and out is not None,
        # What is part of something larger, such as an expert of a cascade, is never embedded with on its own.
        keep_map=out is not None and (report or start is None),
    )
    done = run(recipe, out=out, resume=resume, about=about, max_bad=max_bad, display=display, watch=watch, dry=dry_run)
    return AdaptResult(done.learner.model, done.result, done.log, None if out is None else Path(out))


class Adaptation(Recipe):
    """The recipe of `adapt`: scores, or what else a method trains, and the heads of an objective learn; the gate keeps
    what helped."""

    verb = "adapt"
    config: AdaptConfig

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        config: AdaptConfig,
        *,
        given: Preprocessing | None,
        name: str | None,
        labelled: Labelled | None,
        start: Start | None,
        report: bool,
        keep_map: bool = False,
    ) -> None:
        self.keep_map = keep_map
        self.model, self.source, self.config = model, images, config
        self.given, self.name, self.labelled, self.start, self.report = given, name, labelled, start, report
        self.with_numbers = config.objective.numbered
        if start is not None and config.method != "mask":
            raise ConfigError("only a mask can start from a mask", expected="the method mask", found=config.method)

    def images(self) -> Images:
        count, most = len(self.source), self.config.most_images
        if most is None or count <= most:
            return self.source
        order = torch.randperm(count, generator=generator(self.config.seed, "sample of images"))
        return SomeImages(self.source, sorted(order[:most].tolist()))

    def learner(self) -> Learner:
        learner = self._learner(self.config.mask)
        if learner.masked is not None:
            self.config = self.config.changed(mask=learner.masked.config)  # a start brings its own
        return learner

    def _learner(self, mask: MaskConfig) -> Learner:
        if self.start is None:
            learner = prepare_beside(self.model, self.config.method, mask, self.config.rank, self.config.follow)
        else:
            size = self.config.size or (None if self.given is None else self.given.size[0])
            begun = self.start.begin(self.model, size)
            learner = Learner(begun, list(begun.scores.parameters()))
        masked = learner.masked
        known = Preprocessing.of_model(self.model)[1] if masked is None else masked.preprocessing
        self.preprocessing = preprocessing_for(known, self.given, self.config.size)
        if masked is not None:
            masked.preprocessing, masked.base_name = self.preprocessing, self.name or masked.base_name
        return learner

    def views(self) -> ViewsConfig:
        return self.config.chosen_views

    def facts(self, learner: Learner) -> dict[str, Any]:
        if learner.masked is None:
            return {"base": self._fingerprint[:16]}
        mask = learner.masked.pack()
        return {"base": mask.fingerprint[:16], **({} if self.start is None else {"start": mask.sha256[:16]})}

    @property
    def _fingerprint(self) -> str:
        """Of the frozen backbone, as files of other methods than masks keep it."""
        return Fingerprints().of(state_of(self.model).stored)

    def held_out(self, names: Sequence[str], by_name: bool) -> list[int]:
        count = held_count(len(names), self.config)
        if by_name:
            return first_by_hash(names, count, derive(self.config.seed, "held out"))
        order = torch.randperm(len(names), generator=generator(self.config.seed, "held out"))
        return sorted(order[:count].tolist())

    def objective(self, run: Run) -> Objective:
        model = _beside(run.learner)
        context = Context(
            model=model,
            features=run.features,
            large_crops=self.config.chosen_views.large,
            seed=derive(self.config.seed, "heads"),
            frozen=model.frozen,
            reference=lambda: run.reference,
            steps=run.steps,
            frozen_vectors=lambda: run.vectors(model.frozen),
            vectors=lambda: self._vectors(run),
            frozen_layout=lambda: self._frozen_layout(run),
        )
        objective = self.config.objective.build(context)
        if self.start is not None and not self.start.heads(objective):
            run.display.say("the heads start from scratch: no saved heads fit")
        return objective

    @staticmethod
    def _frozen_layout(run: Run) -> tuple[Tensor, Tensor | None]:
        model = _beside(run.learner)
        layout = Layout(model.base, model.frozen)
        both = run.vectors(layout)
        vectors, places = both[:, : layout.features], both[:, layout.features :]
        return vectors, places if places.shape[1] else None

    def _vectors(self, run: Run) -> Tensor:
        """Features of the images that are trained on, by the model as it is now."""
        model = _beside(run.learner)
        self._recalibrate(run)
        with evaluating(model):
            return run.vectors(model)

    @staticmethod
    def _recalibrate(run: Run) -> None:
        """Have norm layers use the statistics that the model has now, where it is to have statistics of its own."""
        model = _beside(run.learner)
        if model.config.norm in ("anchored", "recalibrate"):
            model.recalibrate(run.reference)

    def groups(self, run: Run, objective: Objective) -> list[ParameterGroup]:
        config, learner = self.config, run.learner
        if learner.masked is not None:
            rate = config.rate(run.steps, self.model)
            learned = score_group(learner.masked, config, rate, run.steps, start=config.heads_first)
        else:
            learned = ParameterGroup(learner.parameters, config.lr, config.weight_decay, start=config.heads_first)
        return [learned, ParameterGroup(list(objective.parameters()), config.head_lr, config.weight_decay)]

    def guard(self, run: Run) -> Guard | None:
        if not self.config.gate:
            return None
        quality, kinds = quality_on(
            _beside(run.learner),
            run.store.batch(run.held_out),
            self.preprocessing,
            generator(self.config.seed, "held-out copies"),
            run.processes.device,
        )

        def measured() -> Tensor:
            self._recalibrate(run)
            return run.processes.from_main(quality)

        masked = run.learner.masked
        starts_frozen = self.start is not None or masked is None or masked.sparsity()["total"] == 1
        every = self.config.look_every(run.steps)
        return Guard(
            measured,
            partial(Gain.of, kinds=kinds),
            every=every,
            looks=math.ceil(run.steps / every),
            baseline=None if starts_frozen else lambda: run.processes.from_main(quality.frozen),
        )

    def settled(self, run: Run) -> Learner:
        masked = run.learner.masked
        if not self._gained_nothing(run) or self.start is not None:
            return run.learner
        if masked is None:
            return frozen_beside(self.model, self.config.mask)
        if masked.sparsity()["total"] < 1:
            # Under this rule no scores stand for the frozen backbone: a threshold with all weights above it does.
            return self._learner(dataclasses.replace(self.config.mask, rule="threshold", score_init=None))
        return run.learner

    @staticmethod
    def _gained_nothing(run: Run) -> bool:
        return run.guard is not None and run.guard.best_step == 0

    def leaves(self) -> list[str]:
        return [RunFile.MASK if self.config.method == "mask" else RunFile.TUNED]

    def finish(self, run: Run) -> dict[str, Any]:
        assert run.folder is not None
        if self.report:
            run.display.say("measuring the result and writing the report")
        numbers: dict[str, Any] = {
            "method": self.config.method,
            "steps": run.steps,
            "seed": self.config.seed,
            "images": len(run.store) - len(run.store.bad),
            "bad_images": len(run.store.bad),
        }
        if (guard := run.guard) is not None:
            numbers |= {
                "quality_before": guard.first_quality,
                "quality_after": guard.best_quality,
                "gain": guard.best_gain.mean if guard.best_gain else 0.0,
                "gain_error": guard.best_gain.error if guard.best_gain else None,
                "best_step": guard.best_step,
                "kept": self.config.method if guard.best_step else "identity" if self.start is None else "start",
                "gate_seconds": guard.seconds,
            }
        embedder = self._embedder(run.learner)
        result = {**self._write(run, run.folder.path), **how_it_went(run.folder), **numbers}
        if self.keep_map:
            found = sampled(embedder, run.store)
            result["map_bytes"] = write_map(embedder, found, run.folder)
        earlier = None if self.start is None else self.start.mask.parent / RunFile.SEEN
        write_seen(run.folder.path / RunFile.SEEN, run.images, before=earlier)
        if self.labelled is not None:
            result |= measure(embedder, self.labelled)
        result["seconds"] = run.seconds()
        if self.report:
            write_neighbours_report(embedder, found, run.folder, result)
        return result

    def _embedder(self, learner: Learner) -> Embedder:
        """Gives vectors of the frozen backbone, and those as adapted."""
        model = _beside(learner)
        variants = TunedVariants(model, self.config.method) if isinstance(model, Tuned) else MaskVariants(model)
        return Embedder("", model, self.preprocessing, 0, variants=variants)

    def _write(self, run: Run, folder: Path) -> dict[str, Any]:
        """The file of what was learned, and its numbers."""
        learner = run.learner
        if learner.masked is not None:
            return write_mask(learner.masked, folder / RunFile.MASK)
        about = About(
            method=FROZEN if self._gained_nothing(run) else self.config.method,
            base_name=self.name,
            fingerprint=self._fingerprint,
            preprocessing=self.preprocessing,
            rank=self.config.rank,
            targets=learner.targets,
        )
        base_bytes = sum(4 * parameter.numel() for parameter in learner.frozen.parameters())
        return {"bytes": write_tuned(folder / RunFile.TUNED, learner, None, about), "base_bytes": base_bytes}


def held_count(count: int, config: AdaptConfig) -> int:
    """How many images, of so many, the gate looks at and nothing is trained on."""
    return max(2, min(_HELD_OUT, count // 5)) if config.gate else 0


def _beside(learner: Learner) -> Beside:
    assert learner.beside is not None
    return learner.beside
