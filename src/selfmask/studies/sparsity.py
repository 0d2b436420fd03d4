"""The appendix on found sparsities: which share of the weights stays active, by layer and by kind of layer."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files import RunFile
from ..maskfile import PackedMask, unpack_bits
from ..masking import MaskedModel
from ..masking.selection import stage_of
from .drawing import bands
from .readings import active, steps_of
from .scale import CLIP, SWAV, Case, Scale
from .study import Claim, Curve, Entry, Result, Study, register
from .tasks import Adapt, Subject, Task, Train, World, leave

DATA = ("cifar10", "cifar100", "sun397", "dtd")
"""The figures are means over these; the shares of whole networks are of more."""
ALL_DATA = ("cifar10", "cifar100", "dtd", "eurosat", "flowers102", "sun397", "ucf101")
# The last two, which the paper's figure is drawn with, follow from the others.
MEASURES = ("active_share", "active_share_deviation", "active_share_low", "active_share_high")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_TRANSFORMER = (*_PROJECTIONS, "out_proj", "fc1", "fc2")
_OF_RESNETS = ("", "downsample", "convolution", "norm", "earlier", "later")
KINDS = tuple(f"{kind} {what}".strip() for kind in (*_OF_RESNETS, *_TRANSFORMER) for what in ("weights", "biases"))
# What transformers call their layers: timm, open_clip and transformers, each in its own words.
_JOINED = re.compile(r"(?:\.qkv\.|\.in_proj_)(?:weight|bias)$")
_NAMED = {
    "out_proj": re.compile(r"\.(?:attn\.proj|out_proj)\."),
    "fc1": re.compile(r"\.(?:fc1|c_fc)\."),
    "fc2": re.compile(r"\.(?:fc2|c_proj)\."),
    **{name: re.compile(rf"\.{name}\.") for name in _PROJECTIONS},
}
Counts = dict[str, dict[str, tuple[int, int]]]
"""Kind, then place (of all places together ""): how many weights are active, of how many."""


@dataclasses.dataclass(frozen=True)
class Layers(Task):
    """Active weights of a mask, by kind and layer."""

    verb = "count"
    of: Adapt | Train

    @property
    def needs(self) -> tuple[Task, ...]:
        return (self.of,)

    @property
    def title(self) -> str:
        return f"layers of {self.of.title}"

    def settings(self) -> Mapping[str, Any]:
        return {}

    def run(self, place: Path, world: World) -> None:
        model = world.backbone(self.subject).model
        masked = MaskedModel.from_pretrained(model, world.place(self.of) / RunFile.MASK)
        leave(place, counted(masked.pack(), model))


@dataclasses.dataclass(frozen=True)
class Spread(Task):
    """The mean of several masks, and how far they lie apart, by kind and layer."""

    verb = "average"
    of: tuple[Layers, ...]

    @property
    def needs(self) -> tuple[Task, ...]:
        return self.of

    @property
    def title(self) -> str:
        return f"mean of {len(self.of)} masks of {self.subject.backbone} by {self.of[0].of.verb}"

    def settings(self) -> Mapping[str, Any]:
        return {}

    def run(self, place: Path, world: World) -> None:
        leave(place, summed_up([world.result(each) for each in self.of]))


def counted(mask: PackedMask, model: nn.Module) -> Counts:
    """Active weights of every layer, counted from the input on; of transformers, of every block."""
    found: Counts = {}

    def add(kind: str, on: torch.Tensor, *places: str) -> None:
        for place in places:
            active, total = found.setdefault(kind, {}).get(place, (0, 0))
            found[kind][place] = active + int(on.sum()), total + on.numel()

    modules, layer = dict(model.named_modules()), 0
    names = [name for name, _ in model.named_parameters() if name in mask.bits]
    half = sum(not name.endswith("bias") for name in names) / 2
    for name in names:
        on = unpack_bits(mask.bits[name], mask.sizes[name])
        what = "biases" if name.endswith("bias") else "weights"
        if _JOINED.search(name):
            for part, own in zip(_PROJECTIONS, on.chunk(len(_PROJECTIONS)), strict=True):
                add(f"{part} {what}", own, str(stage_of(name)), "")
        elif kind := next((kind for kind, pattern in _NAMED.items() if pattern.search(f".{name}")), None):
            add(f"{kind} {what}", on, str(stage_of(name)), "")
        else:
            layer += what == "weights"
            is_convolution = isinstance(modules[name.rpartition(".")[0]], nn.modules.conv._ConvNd)
            add(what, on, str(layer), "")
            if "downsample" in name.split("."):
                add(f"downsample {what}", on, str(layer), "")
            add(f"{'convolution' if is_convolution else 'norm'} {what}", on, "")
            add(f"{'earlier' if layer <= half else 'later'} {what}", on, "")
    return found


def summed_up(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By kind and place: the mean share over runs, and what lies a standard deviation below and above it."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, places in runs[0].items():
        for place in places:
            shares = [_share(run[kind][place]) for run in runs]
            mean, deviation = statistics.fmean(shares), statistics.stdev(shares) if len(shares) > 1 else 0.0
            values = (mean, deviation, mean - deviation, mean + deviation)
            found.setdefault(kind, {})[place] = dict(zip(MEASURES, values, strict=True))
    return found


def _share(count: Sequence[int]) -> float:
    return count[0] / count[1]


@register
class Sparsity(Study):
    name = "sparsity"
    title = "Which weights stay active: by layer and by kind (appendix: found sparsities)"
    claims = tuple(
        Claim(
            f"earlier layers are masked more ({how})",
            ("active_share",),
            f"{how} later weights",
            f"{how} earlier weights",
        )
        for how in ("self-supervised", "supervised")
    )

    def entries(self, scale: Scale) -> list[Entry]:
        found = []
        for case in scale.cases(ALL_DATA):
            for seed in scale.repetitions():
                run = Adapt(case.subject, scale.adapt(seed=seed))
                found.append(active(case, "self-supervised all weights", run, seed))
        for backbone in (SWAV,) if scale.in_miniature else (SWAV, CLIP):
            cases: dict[str, list[Case]] = {}
            for case in scale.cases(DATA, (backbone,)):
                cases.setdefault(case.subject.backbone, []).append(case)
            for own in cases.values():
                found += _of(scale, own)
        return found

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        return bands(
            found,
            folder / "sparsity.svg",
            x="layer",
            y="share of active weights",
            middle=MEASURES[0],
            width=MEASURES[1],
        )


def _of(scale: Scale, cases: Sequence[Case]) -> list[Entry]:
    """Shares by kind of every mask of one backbone, and by layer their mean over data sets and seeds."""
    subject = cases[0].subject
    data = "+".join(dict.fromkeys(case.subject.data for case in cases))
    # Layers of another network than the paper's have no counterpart there.
    of_paper = subject.backbone if scale.in_miniature else cases[0].backbone
    mean = Case(Subject(subject.backbone, data, subject.weights), of_paper, "+".join(DATA))
    found = []
    for how in ("supervised",) if subject.backbone == CLIP else ("self-supervised", "supervised"):
        each = {
            (case, seed): Layers(case.subject, _run(scale, how, case, seed))
            for case in cases
            for seed in scale.repetitions()
        }
        steps = steps_of(next(iter(each.values())).of)
        for (case, seed), task in each.items():
            found += [
                Entry(case, f"{how} {kind}", "active_share", task, _total(kind), seed=seed, steps=steps)
                for kind in KINDS
            ]
        spread = Spread(subject, tuple(each.values()))
        found += [
            Entry(mean, f"{how} {kind}", measure, spread, _curve(kind, measure), steps=steps)
            for kind in KINDS
            for measure in (MEASURES[:2] if scale.in_miniature else MEASURES)
        ]
    return found


def _run(scale: Scale, how: str, case: Case, seed: int) -> Adapt | Train:
    if how == "self-supervised":
        return Adapt(case.subject, scale.adapt(seed=seed))
    return Train(
        case.subject, scale.train(seed=seed, **({"head": "clip-text"} if case.subject.backbone == CLIP else {}))
    )


def _total(kind: str) -> Callable[[Result], Curve]:
    """Of all layers. Kinds that a network does not have give no numbers."""
    return lambda result: {None: _share(result[kind][""])} if kind in result else {}


def _curve(kind: str, measure: str) -> Callable[[Result], Curve]:
    return lambda result: {float(x): each[measure] for x, each in result.get(kind, {}).items() if x}
