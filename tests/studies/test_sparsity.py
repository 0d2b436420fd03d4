"""The study of sparsity: shares by layer and kind, against naive counts, and layers numbered as in the paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

from selfmask.backbones import TinyResNet
from selfmask.maskfile import PackedMask, pack_bits
from selfmask.masking import MaskConfig, get_masked_model
from selfmask.masking.selection import select_parameters
from selfmask.studies.catalogue import STUDIES
from selfmask.studies.numbers import paper_numbers
from selfmask.studies.output import write
from selfmask.studies.runner import run_study
from selfmask.studies.scale import CLIP, Scale
from selfmask.studies.sparsity import Layers, Spread, counted, summed_up
from selfmask.studies.tasks import Adapt, Train
from selfmask.studies.verdicts import judged

from .few import short, small_scale, tasks_in, without_entry

__all__ = ["short"]
STUDY = STUDIES["sparsity"]


def masked_at_random(model: nn.Module, select: str) -> PackedMask:
    masked = get_masked_model(model, MaskConfig(select=select))
    with torch.no_grad():
        for scores in masked.scores.parameters():
            scores.copy_(torch.randn_like(scores) + 1)
    return masked.pack()


def all_on(model: nn.Module, select: str) -> PackedMask:
    names = select_parameters(model, MaskConfig(select=select))
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    return PackedMask({name: pack_bits(torch.ones(size)) for name, size in sizes.items()}, sizes, shapes, {}, {}, "")


def test_layers_of_a_residual_network_are_counted_from_the_input() -> None:
    model = TinyResNet()
    mask = masked_at_random(model, "paper")
    found = counted(mask, model)
    on = {name: np.unpackbits(mask.bits[name], count=mask.sizes[name]) for name in mask.bits}
    block = ("conv1.weight", "conv2.weight", "downsample.0.weight", "downsample.1.weight")
    weights = ["stem.conv.weight", *(f"layer{i}.0.{name}" for i in (1, 2, 3) for name in block)]
    assert list(found["weights"]) == ["1", "", *map(str, range(2, 14))]
    for number, name in enumerate(weights, 1):
        assert found["weights"][str(number)] == (on[name].sum(), on[name].size)
    assert found["weights"][""] == (sum(on[n].sum() for n in weights), sum(on[n].size for n in weights))
    assert set(found["downsample weights"]) == {"", "4", "5", "8", "9", "12", "13"}
    assert set(found["downsample biases"]) == {"", "5", "9", "13"}
    assert found["downsample biases"]["9"] == (on["layer2.0.downsample.1.bias"].sum(), 128)
    norms = [name for name in weights if ".downsample.1." in name]
    assert found["norm weights"] == {"": (sum(on[n].sum() for n in norms), 64 + 128 + 256)}
    later = sum(on[name].size for name in weights[8:])  # 16 tensors with the biases; half of the weights are 6.5
    assert found["later weights"][""][1] + found["earlier weights"][""][1] == found["weights"][""][1]
    assert found["later weights"][""][1] >= later


def test_layers_of_resnet50_have_the_numbers_that_they_have_in_the_paper() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    found = counted(all_on(model, "paper"), model)
    for kind in ("weights", "downsample weights", "downsample biases"):
        numbers = [
            n for n in paper_numbers("sparsity") if n.setting == f"supervised {kind}" and n.measure == "active_share"
        ]
        assert {float(x) for x in found[kind] if x} == {n.x for n in numbers}
    assert found["weights"][""][1] + found["biases"][""][1] == 23_462_592


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224"])
def test_joined_projections_of_a_transformer_are_told_apart(name: str) -> None:
    model = timm.create_model(name, depth=2, embed_dim=12, num_heads=3, img_size=32)
    mask = masked_at_random(model, "paper")
    found = counted(mask, model)
    kinds = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    assert set(found) == {f"{kind} {what}" for kind in kinds for what in ("weights", "biases")}
    joined = np.unpackbits(mask.bits["blocks.1.attn.qkv.weight"], count=3 * 144).reshape(3, 12, 12)
    assert found["k_proj weights"]["2"] == (joined[1].sum(), 144)
    assert found["v_proj weights"]["2"] == (joined[2].sum(), 144)
    assert found["fc1 biases"]["1"][1] == 48
    assert found["out_proj weights"][""][1] == 2 * 144


def test_means_and_deviations_over_runs() -> None:
    shares = np.random.default_rng(0).integers(1, 10, 4)
    found = summed_up([{"weights": {"1": [int(on), 10]}} for on in shares])["weights"]["1"]
    assert found["active_share"] == pytest.approx((shares / 10).mean())
    assert found["active_share_deviation"] == pytest.approx((shares / 10).std(ddof=1))
    assert found["active_share_high"] - found["active_share"] == pytest.approx(found["active_share_deviation"])
    assert found["active_share"] - found["active_share_low"] == pytest.approx(found["active_share_deviation"])


def test_runs_are_those_of_the_paper() -> None:
    entries = STUDY.entries(Scale("paper"))
    assert without_entry("sparsity", curves=True) == set()
    spreads = {entry.task for entry in entries if isinstance(entry.task, Spread)}
    runs = {(t.subject.backbone, type(t.of[0].of)): [each.of for each in t.of] for t in spreads}
    assert set(runs) == {("swav/resnet50", Adapt), ("swav/resnet50", Train), (CLIP, Train)}
    for each in runs.values():
        assert [run.subject.data for run in each] == ["cifar10", "cifar100", "sun397", "dtd"]
    clip = runs[CLIP, Train][0].config.resolved(nn.Identity())
    assert (clip.lr, clip.epochs, clip.warmup, clip.head, clip.mask.select) == (10.0, 32, 0.0, "clip-text", "paper-vit")
    masks = runs["swav/resnet50", Train][0].config.resolved(nn.Identity())
    assert (masks.lr, masks.epochs, masks.warmup) == (50.0, 150, 40 / 150)


def test_layers_of_a_run(tmp_path: Path, short: None) -> None:
    scale, tasks = small_scale(tmp_path), tasks_in(tmp_path)
    task = next(entry.task for entry in STUDY.entries(scale) if isinstance(entry.task, Spread))
    (layers,) = task.of
    tasks.run_all([layers.of, layers, task])
    count, mean = tasks.result(layers), tasks.result(task)
    active, total = (sum(count[kind][""][i] for kind in ("weights", "biases")) for i in (0, 1))
    assert tasks.result(layers.of)["active"] == pytest.approx(active / total)
    assert 0 < active < total
    assert mean["weights"]["13"]["active_share"] == count["weights"]["13"][0] / 256
    assert mean["weights"]["13"]["active_share_deviation"] == 0  # of one run


@pytest.mark.heavy
def test_a_small_study_counts_what_runs_left(tmp_path: Path, short: None) -> None:
    scale, tasks = small_scale(tmp_path, seeds=2), tasks_in(tmp_path)
    found = run_study(STUDY, scale, tasks)
    assert not found.missing
    values = {(e.setting, e.measure, e.x, e.seed): value for e, value in found.values.items()}
    assert (
        sum(e.setting == "supervised weights" and e.measure == "active_share" and e.x == 13 for e in found.values) == 1
    )
    for task in {entry.task for entry in found.values if isinstance(entry.task, Layers)}:
        active, total = (sum(tasks.result(task)[kind][""][i] for kind in ("weights", "biases")) for i in (0, 1))
        assert tasks.result(task.of)["active"] == pytest.approx(active / total)
    each = [values["self-supervised downsample weights", "active_share", None, seed] for seed in (0, 1)]
    assert each[0] != each[1]
    assert judged(STUDY.claims[0], found)[0] != "not measured"
    files = write(found, tmp_path / "results")
    assert [file.name for file in files] == ["sparsity.csv", "sparsity.md", "sparsity.html", "sparsity.svg"]
    drawing = files[-1].read_text()
    assert drawing.startswith("<?xml")
