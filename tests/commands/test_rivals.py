"""Other methods than masks, learned without labels: what they leave behind, and how they stand beside masks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from selfmask import AdaptConfig, CascadeConfig
from selfmask.backbones.loading import Backbone
from selfmask.commands.adapt import AdaptResult, adapt
from selfmask.commands.compare import CompareConfig, compare_rivals
from selfmask.commands.opening import load_embedder
from selfmask.commands.rivals import a_few, adabn
from selfmask.data.pixels import fit, normalised
from selfmask.embedding.vectors import embed
from selfmask.errors import ConfigError, InterruptedRunError
from selfmask.evaluation import knn_accuracy
from selfmask.report.rivals import RivalCell, Rivals, as_dict, markdown
from selfmask.training.start import Start
from selfmask.training.tuned import load_tuned, open_tuned
from tests.cli.inside import selfmask
from tests.cli.small import refused
from tests.cli.test_adapt import save_clothes
from tests.commands.labelled import clothes
from tests.training.small import HOW, Clothes, network
from tests.training.test_loop import Stopper

OTHERS = ("full", "lora", "bitfit")
METHODS = ("frozen", "adabn", "mask", *OTHERS)


def settings(method: str = "mask", **changes: Any) -> AdaptConfig:
    start: dict[str, Any] = {"steps": 4, "batch_size": 8, "size": 16, "log_every": 1, "checkpoint_every": 1}
    return AdaptConfig.preset("fast", method=method, **{**start, "quality_every": 2, "track": (), **changes})


def run(out: Path | None, method: str, model: nn.Module | None = None, **options: Any) -> AdaptResult:
    config = settings(method, **options.pop("changes", {}))
    return adapt(model or network(), Clothes(60), config, out=out, preprocessing=HOW, report=False, **options)


@pytest.mark.parametrize("method", OTHERS)
def test_a_method_learns_without_labels_and_leaves_the_base_alone(tmp_path: Path, method: str) -> None:
    base, test = network().eval(), clothes(10, 40)[1]
    before = {name: value.clone() for name, value in base.state_dict().items()}
    result = run(tmp_path, method, base, changes={"gate": False})
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())
    loaded, head = load_tuned(network(), tmp_path / "tuned.safetensors")
    assert head is None
    vectors, expected = (embed(model, test, HOW)[0] for model in (loaded, result.model))
    assert torch.equal(vectors, expected)
    assert not torch.equal(vectors, embed(network(), test, HOW)[0])
    assert result.result["bytes"] == (tmp_path / "tuned.safetensors").stat().st_size
    assert result.result["method"] == open_tuned(tmp_path / "tuned.safetensors").about.method == method
    assert not (tmp_path / "mask.smn").exists()


@pytest.mark.parametrize("method", OTHERS)
def test_what_does_not_help_is_given_up(tmp_path: Path, method: str) -> None:
    """At a rate that changes nothing; what is left is the frozen backbone, in a file that says so."""
    result = run(tmp_path, method, changes={"lr": 1e-12})
    assert result.helped is False
    assert (result.result["kept"], result.result["best_step"]) == ("identity", 0)
    opened = open_tuned(tmp_path / "tuned.safetensors")
    assert (opened.about.method, len(opened.tensors)) == ("frozen", 0)
    model, _ = load_tuned(network(), opened)
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(model(images), network().eval()(images))
        assert torch.equal(result.model(images), result.model.base(images))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_that_was_stopped_ends_in_the_same_bits(tmp_path: Path, method: str) -> None:
    whole = run(tmp_path / "whole", method)
    with pytest.raises(InterruptedRunError):
        run(tmp_path / "cut", method, display=Stopper(3))
    again = run(tmp_path / "cut", method, resume=True)
    assert [line["loss"] for line in again.log] == [line["loss"] for line in whole.log]
    files = [tmp_path / name / "tuned.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_every_method_has_a_rate_of_its_own() -> None:
    rates = {method: AdaptConfig.preset("fast", method=method).lr for method in ("mask", *OTHERS)}
    assert rates["mask"] == AdaptConfig.preset("fast").lr == 30.0
    assert all(rate < 1 for method, rate in rates.items() if method != "mask")
    assert AdaptConfig.preset("fast", method="full", lr=0.5).lr == 0.5
    assert AdaptConfig.preset("fast", method="full").changed(method="mask").lr == AdaptConfig().lr == 50.0


def test_masks_are_what_cascades_and_starts_are_made_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="made of masks"):
        CascadeConfig.preset("fast", method="full")
    with pytest.raises(ConfigError, match="only a mask"):
        run(tmp_path, "full", start=Start(tmp_path / "mask.smn"))
    with pytest.raises(ConfigError, match="unknown method"):
        AdaptConfig(method="linear")  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    save_clothes(tmp_path / "photos", 60)
    words = ("adapt", tmp_path / "photos", "--backbone", "selfmask/tiny", "--steps", "2", "--batch-size", "8")
    done = selfmask(*words, "--method", "bitfit", "--lr", "1e-12", "--out", tmp_path / "run")
    assert done.returncode == 3, done.stderr
    assert "the file changes nothing in it" in done.stdout
    assert "tuned.safetensors" in done.stdout
    embedder = load_embedder(tmp_path / "run")
    assert embedder.head is None
    assert list(embedder.variants.variants) == ["trained"]
    refused(selfmask(*words, "--method", "linear"), "linear")


# ---- the comparison ----------------------------------------------------------------------------------------------


def test_a_few_labels_are_ten_of_each_class() -> None:
    labels = torch.tensor([0] * 30 + [1] * 12 + [2] * 4)
    chosen = a_few(labels, 0)
    assert Counter(labels[chosen].tolist()) == {0: 10, 1: 10, 2: 4}
    assert len(set(chosen)) == 24
    assert chosen != a_few(labels, 1)


def test_adabn_takes_the_statistics_of_the_images() -> None:
    images, _ = clothes(60)
    adapted = adabn(network(), images, HOW)
    assert adapted.sparsity()["total"] == 1
    pixels = normalised(torch.stack([fit(images[i], HOW) for i in range(60)]), HOW)
    with torch.no_grad():
        maps = network()[0](pixels)  # type: ignore[index]
        statistics = dict(adapted._norm.named_buffers())
    for key, value in (("mean", maps.mean((0, 2, 3))), ("var", maps.var((0, 2, 3)))):
        (found,) = [each for name, each in statistics.items() if name.endswith(f"running_{key}")]
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def compared(out: Path, *, labelled: bool = True, **changes: Any) -> Rivals:
    images, test = clothes(100, 40)
    start = {"labels": False, "seeds": 1, "adapt_steps": 2, "batch_size": 8, "size": 16}
    config = CompareConfig.preset("fast", **{**start, **changes})
    return compare_rivals(
        lambda: Backbone("small", network(), HOW, 16), images, test if labelled else None, config, out=out
    )


def test_all_methods_stand_side_by_side(tmp_path: Path) -> None:
    rivals = compared(tmp_path)
    assert tuple(rivals.methods) == METHODS
    assert rivals.columns == ["knn_20", "knn_200", "probe_10", "probe"]
    images, test = clothes(100, 40)
    bank, queries = (embed(network(), part, HOW)[0] for part in (images, test))
    expected = knn_accuracy(bank, images.labels or [], queries, test.labels or [], k=20)
    assert rivals.mean("frozen", "knn_20") == (expected, None)
    first, *_ = rivals.results.values()
    assert first["bytes"] == 0
    assert all(rivals.kept(method)[1] == 1 for method in ("mask", *OTHERS))
    text = markdown(rivals)
    assert "| LoRA |" in text
    assert "k-NN, k = 20" in text
    assert {row["method"] for row in as_dict(rivals)["summary"]} == set(METHODS)
    finished = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cells/*/result.json")}
    assert len(finished) == len(METHODS)
    assert compared(tmp_path).results == rivals.results  # nothing is run again
    assert {file: file.stat().st_mtime_ns for file in finished} == finished


def test_without_any_labels_the_gate_alone_speaks(tmp_path: Path) -> None:
    rivals = compared(tmp_path, labelled=False, methods=("frozen", "mask"))
    assert rivals.columns == []
    assert rivals.quality("frozen") is not None
    assert "quality (without labels)" in markdown(rivals)


def test_a_table_has_what_its_results_have() -> None:
    """Rows and columns that nobody has heard of come last, under their own names."""
    results = {
        RivalCell("frozen", 0): {"columns": {"probe": 0.5, "knn_20": 0.4}, "bytes": 0, "seconds": 1.0},
        RivalCell("mask + map", 0): {"columns": {"knn_20": 0.45, "whitened": 0.6}, "bytes": 7, "seconds": 2.0},
    }
    lines = markdown(Rivals(results)).splitlines()
    assert lines[0].startswith("|  | k-NN, k = 20 | probe, all labels | whitened | quality")
    assert lines[2].startswith("| frozen backbone | 40.0 | 50.0 | - |")
    assert lines[3].startswith("| mask + map | 45.0 (+5.0) | - | 60.0 |")


def test_methods_belong_to_one_of_two_comparisons() -> None:
    assert CompareConfig(labels=False).methods == METHODS
    assert CompareConfig().changed(labels=False).methods == METHODS
    with pytest.raises(ConfigError, match="use --no-labels"):
        CompareConfig(methods=("adabn",))
    with pytest.raises(ConfigError, match="omit --no-labels"):
        CompareConfig(labels=False, methods=("self-mask",))


def test_the_command_compares_without_labels(tmp_path: Path) -> None:
    save_clothes(tmp_path / "photos", 60)
    words = ["compare", str(tmp_path / "photos"), "--backbone", "selfmask/tiny", "--no-labels", "--batch-size", "8"]
    words += ["--methods", "frozen,adabn,bitfit", "--seeds", "1"]
    done = selfmask(*words, "--adapt-steps", "2", "--json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["cells"]) == ["frozen-0", "adabn-0", "bitfit-0"]
    assert (tmp_path / "out" / "compare.md").exists()
    assert not (tmp_path / "out" / "compare.png").exists()
    refused(selfmask(*words, "--steps", "2"), "--steps", "--adapt-steps")
