"""The study of compression: bytes that anybody can check, and reductions in the paper's words and in honest ones."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selfmask.backbones import TinyResNet, load_backbone
from selfmask.maskfile import compressing
from selfmask.masking import MaskConfig, MaskedModel, get_masked_model
from selfmask.studies.catalogue import STUDIES
from selfmask.studies.compression import Compress
from selfmask.studies.output import lines_of, write
from selfmask.studies.runner import run_study
from selfmask.studies.scale import Scale
from selfmask.training.tuned import open_tuned

from .few import short, small_scale, tasks_in, without_entry

__all__ = ["short"]
STUDY = "compression"


def task_of(scale: Scale, data: str) -> Compress:
    tasks = {entry.task for entry in STUDIES[STUDY].entries(scale) if entry.task.subject.data == data}
    (task,) = (task for task in tasks if isinstance(task, Compress))
    return task


def test_masks_and_full_fine_tuning_learn_as_in_the_paper() -> None:
    task = task_of(Scale("paper"), "sun397")
    mask, full = task.mask.config, task.full.config
    assert task.subject.backbone == "swav/resnet50"
    assert (mask.method, mask.lr, mask.momentum, mask.batch_size, mask.steps) == ("mask", 50.0, 0.9, 64, None)
    assert (full.method, full.lr, full.weight_decay, full.follow) == ("full", 0.15, 1e-6, "paper")
    assert (mask.mask.select, mask.mask.rule, full.mask.select) == ("paper", "threshold", "paper")
    assert mask.objective == full.objective
    # The factors of text and abstract, 78.8 and 79, are two for one number, and of no data set.
    assert {row[3] for row in without_entry(STUDY)} == {"times_smaller"}


def test_sizes_of_small_things() -> None:
    model = TinyResNet()
    masked = get_masked_model(model, MaskConfig(select=["layer1.0.conv1.weight", "layer1.0.downsample.1.bias"]))
    with torch.no_grad():
        for scores in masked.scores.parameters():
            scores.copy_(torch.randn_like(scores) + 1)
    packed = masked.pack()
    sizes = compressing.sizes_of_mask(packed, dict(model.named_parameters()))
    bits = b"".join(packed.bits[name].tobytes() for name in packed.bits)
    assert (sizes.values, sizes.plain, sizes.paper_plain) == (18432 + 64, len(bits), 2 * len(bits))
    assert {name: sizes.by[name] for name in ("gzip", "bz2", "lzma")} == {
        "gzip": len(gzip.compress(bits)),
        "bz2": len(bz2.compress(bits)),
        "lzma": len(lzma.compress(bits)),
    }
    assert sizes.coded is not None
    assert sizes.coded < sizes.plain
    halves = compressing.sizes_of_weights([torch.ones(3, dtype=torch.float16), torch.zeros(2, 2)])
    assert (halves.values, halves.plain, halves.paper_plain, halves.is_mask) == (7, 22, 22, False)


@pytest.mark.heavy
def test_bytes_are_those_of_the_compressors(tmp_path: Path, short: None) -> None:
    scale, tasks = small_scale(tmp_path), tasks_in(tmp_path)
    found = run_study(STUDIES[STUDY], scale, tasks)
    assert not found.missing
    values = {(e.setting, e.measure): value for e, value in found.values.items()}
    task = task_of(scale, scale.data[0])
    file = tasks.place(task.mask) / "mask.smn"
    packed = MaskedModel.from_pretrained(load_backbone("selfmask/tiny").model, file).pack()
    on = np.concatenate([np.unpackbits(packed.bits[n], count=packed.sizes[n]) for n in packed.bits])
    assert values["mask", "active_share"] == pytest.approx(on.mean())
    assert 0.5 < on.mean() < 1
    bits = b"".join(packed.bits[name].tobytes() for name in packed.bits)
    tuned = open_tuned(tasks.place(task.full) / "tuned.safetensors").tensors
    weights = b"".join(tuned[f"weight.{name}"].numpy().tobytes() for name in packed.bits)
    count = on.size
    assert len(weights) == 4 * count
    for kind, data, whole in (("mask", bits, count / 4), ("weights", weights, 4 * count)):
        for by, oracle in (("gzip", gzip.compress), ("bz2", bz2.compress), ("lzma", lzma.compress)):
            size = len(oracle(data))
            assert values[f"{kind} by {by}", "bytes"] == size
            assert values[f"{kind} by {by}", "values"] == count
            assert values[f"{kind} by {by}", "reduction"] == pytest.approx(1 - size / whole, abs=1e-6)
    assert values["mask in 1 bit a weight", "bytes"] == len(bits)
    assert values["mask in 1 bit a weight", "reduction_from_1_bit"] == 0
    assert values["mask in 1 bit a weight", "reduction"] == pytest.approx(0.5, abs=1e-4)
    assert values["mask in 2 bits a weight", "reduction"] == 0
    assert values["mask by selfmask", "bytes"] < values["mask by lzma", "bytes"] < len(bits)
    assert (
        values["mask by selfmask", "bytes"] < values["mask file with norm statistics", "bytes"] == file.stat().st_size
    )
    best = min(values[f"mask by {by}", "bytes"] for by in compressing.compressors())
    against = min(values[f"weights by {by}", "bytes"] for by in compressing.compressors())
    both = "mask against weights both compressed"
    assert values[both, "storage_share"] == pytest.approx(best / against)
    assert values[both, "times_smaller"] == pytest.approx(against / best)
    lines = {(line.setting, line.measure): line for line in lines_of(found)}
    assert lines["mask by gzip", "reduction"].paper == 0.7832
    assert lines["mask against weights both uncompressed", "storage_share"].paper == 0.03125
    assert lines["mask by the best", "reduction"].paper == 0.83
    written = {path.suffix: path.read_text() for path in write(found, tmp_path / "results")}
    assert "selfmask study compression --scale laptop" in written[".md"]
    assert "mask by lzma,reduction," in written[".csv"]


def test_compressors_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_extras(name: str) -> Any:
        if name.partition(".")[0] in ("lz4", "snappy"):
            raise ImportError(name)
        return importlib.import_module(name)

    before = task_of(Scale("laptop", seeds=1), "selfmask/fashion").name
    monkeypatch.setattr(compressing, "import_module", no_extras)
    assert list(compressing.compressors()) == ["gzip", "bz2", "lzma"]
    assert compressing.missing() == ["lz4", "snappy"]
    sizes = {"values": 8, "plain": 1, "by": {"gzip": 1}, "coded": 1}
    entries = [e for e in STUDIES[STUDY].entries(Scale("laptop", seeds=1)) if isinstance(e.task, Compress)]
    result = {"mask": sizes, "weights": {**sizes, "coded": None, "plain": 32}, "file": 100}
    read = {(entry.setting, entry.measure): entry.read(result) for entry in entries}
    assert read["mask by snappy", "bytes"] is None
    assert read["mask by gzip", "bytes"] == 1
    if len(compressing.COMPRESSORS) > 3 and importlib.util.find_spec("lz4"):
        assert entries[0].task.name != before  # who installs them asks again
