"""Supervised runs, from labels to files: what they learn, resume to the bit, and refuse."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, TrainConfig, open_labelled, train
from selfmask.data import Images, SomeImages, label_split
from selfmask.data.sources import ArrayImages
from selfmask.errors import BadImageError, ConfigError, HeadError, InterruptedRunError, LabelsError, RunMismatchError
from selfmask.objectives.heads import LinearHead, MaskedHead, TextHead
from selfmask.training.methods import prepare
from selfmask.training.run import score_group
from selfmask.training.schedule import cosine
from tests.light import no_report
from tests.training.small import HOW, network
from tests.training.test_loop import Stopper

from .labelled import clothes, config

FRACTIONS = (0.1, 0.5)


def run(settings: TrainConfig, **options: Any) -> Any:
    (images, test), model = clothes(), options.pop("model", None) or network()
    with nullcontext() if options.pop("report", False) else no_report():
        return train(model, images, settings, test=test, preprocessing=HOW, **options)


@pytest.mark.parametrize("method", ["mask", "full", "linear", "bitfit"])
def test_it_learns(method: str) -> None:
    images, test = clothes(200, 100)
    settings = config(method=method, steps=40, batch_size=32, head_start="random", head_lr=0.5)
    result = train(network(), images, settings, test=test, preprocessing=HOW)
    losses = [line["loss"] for line in result.log]
    assert np.mean(losses[-5:]) < 0.98 * np.mean(losses[:5])
    assert 0 < result.result["accuracy_before"] <= 1
    assert result.result["accuracy"] <= result.result["top5"] <= 1


def test_a_head_that_starts_from_the_probe_starts_where_the_probe_is() -> None:
    result = run(config(method="linear", steps=1, head_lr=1e-12))
    assert result.result["accuracy"] == pytest.approx(result.result["accuracy_before"], abs=0.026)  # 16 bits: one image


@pytest.mark.parametrize("method", ["mask", "full", "lora"])
@pytest.mark.parametrize("step", [1, 3])
def test_resumed_it_ends_in_the_same_bits(tmp_path: Path, method: str, step: int) -> None:
    settings = config(method=method)
    whole = run(settings, out=tmp_path / "whole", model=network(dropout=0.1))
    with pytest.raises(InterruptedRunError):
        run(settings, out=tmp_path / "cut", display=Stopper(step), model=network(dropout=0.1))
    resumed = run(settings, out=tmp_path / "cut", resume=True, model=network(dropout=0.1))
    file = "mask.smn" if method == "mask" else "tuned.safetensors"
    assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    same = {key: value for key, value in whole.result.items() if key != "seconds"}
    assert {key: value for key, value in resumed.result.items() if key != "seconds"} == same
    again = run(settings, out=tmp_path / "cut", resume=True, model=network(dropout=0.1))  # finished: nothing is done
    assert again.result == resumed.result


def test_the_layers_of_a_mask_share_its_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def watched(masked: Any, settings: Any, lr: float, *rest: Any) -> Any:
        given.append(lr)
        return score_group(masked, settings, lr, *rest)

    monkeypatch.setattr("selfmask.commands.train.score_group", watched)
    for per_tensor in (True, False):
        run(config(steps=1, lr=12.0, per_tensor=per_tensor))
    layers = [module for module in network().modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert given == [12.0 / len(layers), 12.0]


def test_a_run_folder_holds_it_all(tmp_path: Path) -> None:
    result = run(config(), out=tmp_path / "run", report=True)
    folder = tmp_path / "run"
    assert json.loads((folder / "result.json").read_text()) == result.result
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["top1"] == result.result["accuracy"]
    assert np.array(scores["confusion"]).sum() == 40
    page = (folder / "report.html").read_text()
    assert "test accuracy" in page
    assert "Confusion matrix" in page
    with pytest.raises(RunMismatchError, match="method"):
        run(config(method="full"), out=folder, resume=True)


@pytest.mark.parametrize("head", ["masked", "linear"])
def test_both_heads_of_the_paper(head: str) -> None:
    result = run(config(head=head, head_start="random", steps=2))
    assert isinstance(result.head, MaskedHead if head == "masked" else LinearHead)


def test_a_text_head_is_not_trained_and_starts_as_zero_shot() -> None:
    images, test = clothes()
    text = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    head = TextHead(text, 10.0, images.classes or [])
    result = train(network(), images, config(head="clip-text"), test=test, head=head, preprocessing=HOW)
    assert torch.equal(head.text, torch.nn.functional.normalize(text, dim=1))
    assert result.result["accuracy_before"] < 0.5  # random texts


# ---- labels that must not leak -------------------------------------------------------------------------------------


def colours(count: int, first: int) -> ArrayImages:
    """Images of one colour each, which no crop or flip changes; all differ."""
    pixels = np.stack([np.full((20, 20, 3), 2 * (first + i), np.uint8) for i in range(count)])
    return ArrayImages(pixels, [i % 2 for i in range(count)], ["even", "odd"])


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_only_the_chosen_images_are_trained_on(fraction: float) -> None:
    trained, model = set(), network()

    def see(_: nn.Module, inputs: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():
            shades = (inputs[0].mean((1, 2, 3)) * HOW.std[0] + HOW.mean[0]) * 255 / 2
            trained.update(shades.round().int().tolist())

    model.register_forward_pre_hook(see)
    views = dataclasses.replace(config().views, jitter_p=0.0, grey_p=0.0)
    settings = config(views=views, steps=12, label_fraction=fraction, batch_size=4, mask=MaskConfig())
    result = train(model, colours(40, 0), settings, test=colours(40, 60), preprocessing=HOW)
    assert len(trained) == fraction * 40 == result.result["labels"]
    assert trained <= set(range(40))  # and none of 60 to 99, which are the test images


def test_the_same_seed_learns_from_the_same_labels() -> None:
    one, two, other = (run(config(label_fraction=0.5, seed=seed, steps=1)) for seed in (1, 1, 2))
    assert one.result["loss"] == two.result["loss"] != other.result["loss"]


def test_fewer_labels_than_a_batch_are_one_batch() -> None:
    result = run(config(batch_size=64, label_fraction=0.2, steps=2))
    assert result.result["labels"] < 64
    assert result.log[-1]["step"] == 2


# ---- presets -------------------------------------------------------------------------------------------------------


def test_the_papers_schedule() -> None:
    paper = TrainConfig.preset("paper").resolved(network())
    assert (paper.lr, paper.epochs, paper.momentum, paper.batch_size, paper.weight_decay) == (50, 150, 0.9, 64, 0)
    steps = 1500
    rates = [cosine((step + 0.5) / steps, paper.warmup) for step in range(steps)]
    assert rates[0] > 0
    assert max(range(steps), key=rates.__getitem__) in (399, 400)  # the end of epoch 40 of 150
    assert rates[-1] < 1e-5
    clip = TrainConfig.preset("paper", head="clip-text").resolved(network())
    assert (clip.lr, clip.epochs, clip.warmup, clip.mask.select) == (10, 32, 0, "paper-vit")
    short = TrainConfig.preset("paper", steps=10)
    assert (short.steps, short.epochs) == (10, None)
    with pytest.raises(ConfigError, match="one of steps, epochs and budget"):
        TrainConfig.preset("paper", steps=10, epochs=2.0)


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize(
    ("name", "lr", "decay", "tensors"),
    [("resnet18", 0.001, 5e-4, 11_168_704), ("resnet50", 0.15, 1e-6, 23_462_592)],
)
def test_full_fine_tuning_of_the_paper(preset: str, name: str, lr: float, decay: float, tensors: int) -> None:
    """A rate and a decay for each ResNet, a plain cosine, and the tensors that its masks have."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
    config = TrainConfig.preset(preset, method="full", head="linear").resolved(model)
    assert (config.lr, config.head_lr, config.weight_decay, config.warmup) == (lr, lr, decay, 0)
    assert (config.epochs, config.batch_size, config.momentum) == (150, 64, 0.9)
    learned = prepare(model, config.method, config.mask, config.rank, config.follow).parameters
    assert sum(parameter.numel() for parameter in learned) == tensors
    assert TrainConfig.preset(preset, method="full", head="linear", lr=0.3).resolved(model).lr == 0.3


def test_the_released_command_masks_a_random_head(tmp_path: Path) -> None:
    reference = TrainConfig.preset("reference")
    assert (reference.head, reference.head_start, reference.resolved(network()).lr) == ("masked", "random", 50)
    assert TrainConfig.preset("reference", head="clip-text").mask.select == "reference-vit"
    short = {"steps": 2, "batch_size": 8, "size": 16, "track": (), "mask": MaskConfig()}
    found = run(TrainConfig.preset("reference", **short), out=tmp_path / "run")
    assert (found.result["head"], found.result["all_off"]) == ("masked", [])
    written = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (written["lr"], written["warmup"], written["weight_decay"]) == (50, 40 / 150, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"follow": "others"},
        {"method": "prompt"},
        {"head": "none"},
        {"label_fraction": 0.0},
        {"lr": -1.0},
        {"rank": 0},
        {"method": "linear", "head": "masked"},
        {"method": "full", "head": "masked"},
        {"steps": 3, "epochs": 2.0},
        {"seed": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TrainConfig(**wrong)


# ---- bad input -----------------------------------------------------------------------------------------------------


def relabelled(images: Images, labels: list[int], classes: list[str] | None) -> Images:
    some = SomeImages(images, range(len(labels)))
    some.labels, some.classes = labels, classes
    return some


def test_images_without_labels_are_refused() -> None:
    images, _ = clothes(8)
    images.labels = None
    with pytest.raises(LabelsError, match="no labels"):
        train(network(), images, config(), preprocessing=HOW)


def test_one_class_is_refused() -> None:
    images, _ = clothes(8)
    with pytest.raises(LabelsError, match="one class"):
        train(network(), relabelled(images, [0] * 8, ["coat"]), config(), preprocessing=HOW)


def test_classes_in_another_order_are_refused() -> None:
    images, test = clothes(8, 8)
    both = [0, 1] * 4
    with pytest.raises(LabelsError, match="differently"):
        train(
            network(),
            relabelled(images, both, ["coat", "bag"]),
            config(),
            test=relabelled(test, both, ["bag", "coat"]),
            preprocessing=HOW,
        )


def test_classes_that_a_draw_leaves_empty_are_told(tmp_path: Path) -> None:
    found = run(config(label_fraction=0.05, stratified=False), out=tmp_path / "run").result
    images, _ = clothes()
    assert images.labels
    assert images.classes
    chosen = label_split(images.labels, 0.05, 0, stratified=False)
    missing = set(images.labels) - {images.labels[number] for number in chosen}
    assert found["unseen_classes"] == [images.classes[number] for number in sorted(missing)] != []
    assert 0 < found["accuracy"] < 1


def test_a_head_of_other_classes_is_refused() -> None:
    images, _ = clothes()
    head = LinearHead(16, ["cat", "dog"])
    with pytest.raises(HeadError, match="other classes"):
        train(network(), images, config(), head=head, preprocessing=HOW)


def test_a_text_head_and_settings_that_do_not_belong_together() -> None:
    images, _ = clothes()
    text = TextHead(torch.randn(10, 16), 1.0, images.classes or [])
    for settings, head in ((config(head="clip-text"), None), (config(), text)):
        with pytest.raises(ConfigError, match="does not match the settings"):
            train(network(), images, settings, head=head, preprocessing=HOW)


class Damaged(SomeImages):
    """Whose images of one class cannot be read."""

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        assert self.labels is not None
        if self.labels[i] == 3:
            raise BadImageError("cannot read", found="nothing")
        return super().load(i, near=near)


def test_a_class_none_of_whose_images_can_be_read_is_no_silent_loss() -> None:
    images, test = clothes(100)
    damaged = Damaged(images, range(100))
    with pytest.raises(LabelsError, match="can never be predicted"):
        train(network(), damaged, config(), test=test, preprocessing=HOW, max_bad=0.5)


@pytest.mark.parametrize("rule", ["topk", "progressive_topk"])
def test_a_masked_head_follows_its_rule(rule: str) -> None:
    mask = MaskConfig(rule=rule, active_share=0.5)
    result = run(config(head="masked", head_start="random", mask=mask, steps=10))
    assert isinstance(result.head, MaskedHead)
    assert result.head.masked.sparsity()["total"] == pytest.approx(0.5 if rule == "topk" else 0.55, abs=0.01)


def write(folder: Path, names: dict[str, int]) -> None:
    from PIL import Image

    images, _ = clothes()
    for name, count in names.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(images[i].permute(1, 2, 0).numpy()).save(folder / name / f"{i}.png")


def test_classes_are_matched_by_name(tmp_path: Path) -> None:
    write(tmp_path / "train", {"a": 3, "b": 4, "c": 5})
    write(tmp_path / "test", {"b": 2, "c": 1})
    images, test = open_labelled(tmp_path)
    assert images.classes == test.classes == ["a", "b", "c"]
    assert test.labels == [1, 1, 2]
    write(tmp_path / "more" / "train", {"a": 3, "b": 4})
    write(tmp_path / "more" / "test", {"a": 2, "z": 1})
    with pytest.raises(LabelsError, match="can never be predicted"):
        open_labelled(tmp_path / "more")


def test_an_undivided_folder_is_divided_once_and_for_all(tmp_path: Path) -> None:
    write(tmp_path, {"a": 10, "b": 20})
    images, test = open_labelled(tmp_path)
    assert np.bincount(images.labels or []).tolist() == [8, 16]
    assert np.bincount(test.labels or []).tolist() == [2, 4]
    assert not set(images.names) & set(test.names)
    assert [part.names for part in open_labelled(tmp_path)] == [images.names, test.names]
