"""`train`: a mask, or what another method trains, learned from labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from ..data import Images, SomeImages, label_split
from ..data.labels import check_left
from ..data.seen import write_seen
from ..data.views import ViewsConfig
from ..embedding.vectors import embed
from ..errors import ConfigError, HeadError, LabelsError
from ..evaluation import LinearProbe, linear_probe_fit
from ..evaluation.metrics import score
from ..files import RunFile
from ..maskfile import Fingerprints, state_of
from ..masking import MaskConfig, MaskedModel
from ..masking.direct import base_meant
from ..objectives import Objective
from ..objectives.heads import Head, LinearHead, MaskedHead, TextHead, head_of
from ..objectives.supervised import Supervised
from ..preprocessing import Preprocessing, preprocessing_for
from ..training.config import RunConfig, preset_named
from ..training.display import Display
from ..training.loop import ParameterGroup
from ..training.methods import Follow, Learner, MethodName, prepare
from ..training.processes import Processes
from ..training.run import Recipe, Run, run, score_group, weighted_layers
from ..training.seeds import derive
from ..training.tuned import About, write_tuned

HeadName = Literal["linear", "masked", "clip-text"]
_UNLIKELY = -10.0  # bias of a class that the probe has not seen


# ---- settings -----------------------------------------------------------------------------------------------------

ONE_VIEW = ViewsConfig(large=1, small=0, blur_p=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """All settings of training with labels; `TrainConfig.preset` returns tested ones.

    method: what to train: mask (scores of the weights), full (all weights), linear (only the head), lora (low-rank
        matrices added to the weights that a mask would select) or bitfit (biases and norm layers).
    head: type of head: linear (trained), masked (random, frozen, with a mask of its own) or clip-text (CLIP's text
        embeddings of the class names).
    head_start: initialisation of a linear head: probe (a linear probe of the frozen backbone) or random.
    label_fraction: share of the training labels to use.
    stratified: draw the same share of labels from every class, instead of drawing uniformly from all images.
    lr: learning rate of what the method trains; the default depends on the method. For a mask with `per_tensor`, the
        distance that the scores of all layers together travel over the run.
    weight_decay: weight decay of heads and of fully trained weights; scores never decay. The default depends on the
        method.
    warmup: share of the run in which learning rates rise linearly; they then follow a cosine to 0. The default depends
        on the method.
    follow: defaults of the method: ours, or those of the paper. Its full fine-tuning trains the weights that a mask
        would select and the head, with the rate and the decay that it has for the kind of ResNet (for other networks,
        those of a ResNet-18), and its masks have a warm-up.
    rank: rank of the LoRA matrices.
    views: augmented views of each training image; `size` is that of the run.
    """

    method: MethodName = "mask"
    head: HeadName = "linear"
    head_start: Literal["probe", "random"] = "random"
    label_fraction: float = 1.0
    stratified: bool = True
    head_lr: float = 0.1
    rank: int = 8
    follow: Follow = "ours"
    weight_decay: float | None = None  # type: ignore[assignment]  # decided by `resolved`, as is the next
    warmup: float | None = None  # type: ignore[assignment]
    views: ViewsConfig = ONE_VIEW

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ConfigError("rank is out of range", expected="1 or more", found=self.rank)
        for name, allowed in (("method", MethodName), ("head", HeadName), ("follow", Follow)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"unknown {name}", expected=", ".join(get_args(allowed)), found=getattr(self, name))
        if not 0 < self.label_fraction <= 1:
            raise ConfigError(
                "label_fraction is out of range", expected="a share above 0, at most 1", found=self.label_fraction
            )
        if self.method == "linear" and self.head != "linear":
            raise ConfigError("the method linear trains only a linear head", found=self.head, todo="use --head linear")
        if self.head == "masked" and self.method != "mask":
            raise ConfigError("a masked head needs the method mask", found=self.method, todo="use --head linear")

    def resolved(self, model: nn.Module) -> Self:
        """With everything decided that depends on the method, and in the paper on the backbone."""
        own = self._defaults(model)
        # The paper's full fine-tuning has one rate for all that learns.
        head_lr = own.lr if self.follow == "paper" and self.method == "full" else self.head_lr
        return dataclasses.replace(
            self,
            lr=own.lr if self.lr is None else self.lr,
            weight_decay=own.weight_decay if self.weight_decay is None else self.weight_decay,
            warmup=own.warmup if self.warmup is None else self.warmup,
            head_lr=head_lr,
        )

    def _defaults(self, model: nn.Module) -> _Defaults:
        if self.method == "linear":
            return _Defaults(self.head_lr)
        if self.follow == "paper" and not self.per_tensor:
            if self.method == "full":
                kinds = {type(module).__name__ for module in model.modules()}
                return _PAPER_FULL["Bottleneck" if "Bottleneck" in kinds else "BasicBlock"]
            if self.method == "mask":
                return _PAPER_MASK[self.head == "clip-text"]
        return _Defaults(_RATES[self.per_tensor][self.method])

    @staticmethod
    def preset(name: str, **changes: Any) -> TrainConfig:
        """A preset, with some settings changed: `TrainConfig.preset("fast", method="full")`."""
        config: TrainConfig = preset_named(_CLIP_PRESETS if changes.get("head") == "clip-text" else PRESETS, name)
        return config.changed(**changes)


class _Defaults(NamedTuple):
    """What a method has where nothing is said."""

    lr: float
    weight_decay: float = 0.0
    warmup: float = 0.0


# By whether `per_tensor` is set, which masks alone use: a distance in the whole run, and not a rate, is given there.
_RATES: Mapping[bool, Mapping[str, float]] = {
    False: {"mask": 50.0, "full": 0.15, "lora": 0.1, "bitfit": 0.1},
    True: {"mask": 60.0, "full": 0.01, "lora": 0.02, "bitfit": 0.1},
}

_PAPER_MASK = {False: _Defaults(50.0, warmup=40 / 150), True: _Defaults(10.0)}  # by whether it is of CLIP
_PAPER_FULL = {"BasicBlock": _Defaults(0.001, 5e-4), "Bottleneck": _Defaults(0.15, 1e-6)}  # by the blocks of the ResNet
_PAPER_VIEWS = dataclasses.replace(ONE_VIEW, large_scale=(1.0, 1.0), jitter=(0.4, 0.4, 0.4, 0.4), solarise_p=0.2)

PRESETS: Mapping[str, TrainConfig] = {
    # As `fast` of an adaptation: anchored statistics, one distance for every backbone, gentle views.
    "fast": TrainConfig(
        steps=300,
        head_start="probe",
        head_lr=0.01,
        per_tensor=True,
        # Gentler than without labels: a head that starts from a probe of whole images knows no others.
        views=dataclasses.replace(
            ONE_VIEW, large_scale=(0.8, 1.0), jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.2, grey_p=0.0
        ),
        mask=MaskConfig(norm="anchored"),
    ),
    "paper": TrainConfig(
        epochs=150,
        views=_PAPER_VIEWS,
        head_lr=0.15,
        mask=MaskConfig(select="paper", alpha_of="projection"),
        follow="paper",
    ),
    # The released command: the head is random, frozen and masked.
    "reference": TrainConfig(
        epochs=150,
        views=_PAPER_VIEWS,
        head="masked",
        mask=MaskConfig(select="paper", alpha_of="projection"),
        follow="paper",
    ),
}
_CLIP_PRESETS = {
    **PRESETS,
    "paper": TrainConfig(
        epochs=32, views=_PAPER_VIEWS, mask=MaskConfig(select="paper-vit", alpha_of="projection"), follow="paper"
    ),
    "reference": TrainConfig(
        epochs=32, views=_PAPER_VIEWS, mask=MaskConfig(select="reference-vit", alpha_of="projection"), follow="paper"
    ),
}


# ---- the verb -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of `train`: the trained model and its head in eval mode, the numbers in `result.json`, and the log."""

    model: nn.Module
    head: Head
    result: dict[str, Any]
    log: list[dict[str, Any]]
    folder: Path | None


def train(
    model: nn.Module,
    images: Images,
    config: TrainConfig | None = None,
    *,
    test: Images | None = None,
    head: Head | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    preprocessing: Preprocessing | None = None,
    about: Mapping[str, Any] | None = None,
    max_bad: float = 0.05,
    report: bool = True,
    display: Display | None = None,
) -> TrainResult:
    """Train a mask, or a baseline method, with the labels of `images`; measure accuracy on `test`, if given.

    >>> train_images, test_images = open_labelled("birds/")
    >>> result = selfmask.train(backbone, train_images, TrainConfig.preset("fast"), test=test_images)
    >>> result.head(result.model(batch))    # one logit per class

    model: any module that maps each image to one vector. Training a mask leaves it unchanged; other methods change it.
    test: labelled images of the same classes, used only to measure accuracy before and after training.
    head: head to use instead of the config's, such as the `TextHead` of CLIP.
    The other arguments are as in `adapt`.
    """
    about = {"backbone": Preprocessing.of_model(model)[0], "weights": None, **(about or {})}
    recipe = Supervision(
        model,
        images,
        config or TrainConfig.preset("fast"),
        test=test,
        head=head,
        given=preprocessing,
        name=about["backbone"],
        report=report and out is not None,
    )
    done = run(recipe, out=out, resume=resume, about=about, max_bad=max_bad, display=display)
    assert isinstance(done.objective, Supervised)
    return TrainResult(
        done.learner.model, done.objective.head, done.result, done.log, None if out is None else Path(out)
    )


class Supervision(Recipe):
    """The recipe of `train`: what the method trains, and a head, learn by cross-entropy."""

    verb = "train"
    with_labels = True
    config: TrainConfig

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        config: TrainConfig,
        *,
        test: Images | None,
        head: Head | None,
        given: Preprocessing | None,
        name: str | None,
        report: bool,
    ) -> None:
        self.model, self.config, self.test, self.head, self.name, self.report = model, config, test, head, name, report
        self.all_images = images
        self.preprocessing = preprocessing_for(Preprocessing.of_model(model)[1], given, config.size)
        self.base_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
        self.numbers: dict[str, float] = {}

    def images(self) -> Images:
        self.classes = _classes(self.all_images, self.test)
        if self.head is not None and self.head.classes != self.classes:
            raise HeadError("the head was made for other classes", expected=self.classes, found=self.head.classes)
        _check_head(self.config, self.head)
        self.chosen = chosen_images(self.all_images, self.config)
        return self.chosen

    def learner(self) -> Learner:
        self.fingerprint = Fingerprints().of(state_of(self.model).stored)  # before a method changes it
        self.config = config = self.config.resolved(self.model)
        learner = prepare(self.model, config.method, config.mask, config.rank, config.follow)
        if learner.masked is not None:
            learner.masked.preprocessing, learner.masked.base_name = self.preprocessing, self.name
        return learner

    def views(self) -> ViewsConfig:
        return self.config.views

    def facts(self, learner: Learner) -> dict[str, Any]:
        return {"base": self.fingerprint[:16], "classes": self.classes}

    def batch_size(self, count: int, processes: Processes) -> int:
        """That of the settings, or less where there are few labels; processes and parts share it out evenly."""
        parts = processes.count * self.config.accumulate
        return self.config.batch_size if count >= self.config.batch_size else max(parts, count // parts * parts)

    def objective(self, run: Run) -> Objective:
        """Cross-entropy with the head; the frozen backbone is measured on the way, before anything has learned."""
        vectors, self.labels = _vectors(run.learner.frozen, self.chosen, self.preprocessing)
        drawn = set(self.chosen.labels or [])
        tested = set() if self.test is None else set(self.test.labels or [])
        check_left(set(self.labels.tolist()), tested & drawn, self.classes)
        self.unseen = [self.classes[number] for number in sorted(set(self.all_images.labels or []) - drawn)]
        if self.unseen:
            run.display.say(
                f"{len(self.unseen):,} of {len(self.classes):,} classes have no label in this draw and cannot be "
                "learned; --stratified draws labels from every class"
            )
        # From the same labels: a probe of the frozen backbone, or what a head knows without any training.
        probe = linear_probe_fit(vectors, self.labels) if self.head is None else None
        if self.test is not None:
            queries, truth = _vectors(run.learner.frozen, self.test, self.preprocessing)
            ranked = probe.rank(queries) if probe is not None else self._given.ranked(queries)
            self.numbers = {"accuracy_before": float((ranked[:, 0].cpu() == truth).double().mean())}
        # One for all processes: their solvers may end a bit apart.
        head = run.processes.from_main(lambda: _head(self.config, run.features, self.classes, probe))
        return Supervised(self.head or head)

    @property
    def _given(self) -> Head:
        assert self.head is not None
        return self.head

    def groups(self, run: Run, objective: Objective) -> list[ParameterGroup]:
        assert isinstance(objective, Supervised)
        config, learner, head, groups = self.config, run.learner, objective.head, list[ParameterGroup]()
        if learner.masked is not None:
            groups.append(self._scores(learner.masked, run.steps))
        elif learner.parameters:
            groups.append(ParameterGroup(learner.parameters, self._rate, self._decay))
        if isinstance(head, MaskedHead):
            groups.append(self._scores(head.masked, run.steps))
        elif own := list(head.parameters()):
            rate = self._rate if config.method == "linear" else config.head_lr
            groups.append(ParameterGroup(own, rate, self._decay))
        return groups

    def _scores(self, masked: MaskedModel, steps: int) -> ParameterGroup:
        # Layers share the distance: few labels soon agree with a mask that changes much of a deep network, and no gate
        # looks after it.
        share = weighted_layers(masked) if self.config.per_tensor else 1
        return score_group(masked, self.config, self._rate / share, steps)

    @property
    def _rate(self) -> float:
        assert self.config.lr is not None  # it is resolved
        return self.config.lr

    @property
    def _decay(self) -> float:
        assert self.config.weight_decay is not None
        return self.config.weight_decay

    def leaves(self) -> list[str]:
        return [self._file]

    @property
    def _file(self) -> RunFile:
        return RunFile.MASK if self.config.method == "mask" else RunFile.TUNED

    def finish(self, run: Run) -> dict[str, Any]:
        """Write the file, and measure what it is worth."""
        assert run.folder is not None
        assert isinstance(run.objective, Supervised)
        run.display.say("measuring the result and writing the report")
        head, learner, path = run.objective.head, run.learner, run.folder.path / self._file
        result: dict[str, Any] = {
            "method": self.config.method,
            "head": _kind(head),
            "steps": run.steps,
            "seed": self.config.seed,
            "base_bytes": self.base_bytes,
            "trained": sum(parameter.numel() for parameter in learner.parameters),
            "labels": len(self.labels),
            "classes": len(self.classes),
            "unseen_classes": self.unseen,
            **self.numbers,
            "loss": run.folder.last_loss,
        }
        if learner.masked is not None:
            result["bytes"] = learner.masked.save_pretrained(path, head=head.tensors())
            result["active"] = learner.masked.sparsity()["total"]
        else:
            about = About(
                method=self.config.method,
                base_name=self.name,
                fingerprint=self.fingerprint,
                preprocessing=self.preprocessing,
                rank=self.config.rank,
                targets=learner.targets,
            )
            result["bytes"] = write_tuned(path, learner, head, about)
        write_seen(run.folder.path / RunFile.SEEN, run.images)
        scores = None
        if self.test is not None:
            vectors, truth = _vectors(learner.model, self.test, self.preprocessing)
            kept = head_of(head.tensors())  # what the file gives back
            scores = score(kept.ranked(vectors), truth, head.classes)
            result |= {"accuracy": scores.top1, "top5": scores.top5, "test_images": len(truth)}
            run.folder.write_json(RunFile.SCORES, {"classes": head.classes, **dataclasses.asdict(scores)})
        result["seconds"] = run.seconds()
        if self.report:
            self._write_report(run, result, () if scores is None else scores.confusion)
        return result

    def _write_report(self, run: Run, result: Mapping[str, Any], confusion: Sequence[Sequence[int]]) -> None:
        from ..report.page import ReportData, write_report  # here, because matplotlib takes its time

        assert run.folder is not None
        config = run.folder.read_json(run.folder.path / RunFile.CONFIG)
        shown, shares = {**result, "accuracy_after": result.get("accuracy")}, dict[str, float]()
        if run.learner.masked is not None:
            shares = run.learner.masked.sparsity()
            shares.pop("total")
            shown["mask_bytes"] = result["bytes"]
        title = f"{self.name or 'A backbone'}, {self.config.method}, trained on {config.get('images') or 'images'}"
        data = ReportData(
            title,
            config,
            shown,
            run.folder.read_log(),
            shares,
            bad_images=run.store.bad,
            confusion=confusion,
            classes=self.classes if confusion else (),
        )
        write_report(run.folder.path / RunFile.REPORT, data)


def _classes(images: Images, test: Images | None) -> list[str]:
    """The names of the classes, which the labels of both sets number."""
    if images.labels is None or (test is not None and test.labels is None):
        raise LabelsError(
            "these images have no labels",
            expected="a folder with a sub-folder for each class, a list with labels, or a labelled data set",
            todo="add labels, or adapt without them: `selfmask adapt`",
        )
    if len(set(images.labels)) < 2:
        raise LabelsError("there is only one class", expected="two or more classes", found=images.classes)
    if test is not None and test.classes != images.classes:
        raise LabelsError(
            "training and test images number their classes differently",
            expected=images.classes,
            found=test.classes,
            todo="open both together with open_labelled",
        )
    return images.classes or [str(number) for number in range(max(images.labels) + 1)]


def chosen_images(images: Images, config: TrainConfig) -> Images:
    """The images whose labels may be learned from."""
    labels = images.labels or []
    return SomeImages(images, label_split(labels, config.label_fraction, config.seed, stratified=config.stratified))


def _kind(head: Head) -> str:
    return "clip-text" if isinstance(head, TextHead) else "masked" if isinstance(head, MaskedHead) else "linear"


def _check_head(config: TrainConfig, head: Head | None) -> None:
    if (config.head == "clip-text") != isinstance(head, TextHead):
        raise ConfigError(
            "the head does not match the settings",
            expected=config.head,
            found="none" if head is None else type(head).__name__,
            todo="pass head=TextHead(...) together with head='clip-text' in the settings",
        )


def _vectors(model: nn.Module, images: Images, preprocessing: Preprocessing) -> tuple[Tensor, Tensor]:
    with base_meant():
        vectors, kept = embed(model, images, preprocessing)
    assert images.labels is not None
    return vectors, torch.tensor(images.labels)[kept]


def _head(config: TrainConfig, features: int, classes: list[str], probe: LinearProbe | None) -> Head:
    seed = derive(config.seed, "head")
    if config.head == "masked":
        return MaskedHead(features, classes, mask=config.mask, seed=seed)
    head = LinearHead(features, classes, normalised=config.head_start == "probe", seed=seed)
    if config.head_start == "probe" and probe is not None:
        weight, bias = torch.zeros(len(classes), features), torch.full((len(classes),), _UNLIKELY)
        seen = probe.classes.cpu()
        weight[seen], bias[seen] = probe.weight.cpu(), probe.bias.cpu()
        head.start_from(weight, bias)
    return head
