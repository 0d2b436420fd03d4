"""Other methods than masks, learned without labels: what they leave behind, and how they stand beside masks."""

from __future__ import annotations

import json
import math
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
from selfmask.commands.outcome import Labelled
from selfmask.commands.rivals import adabn
from selfmask.data.pixels import fit, normalised
from selfmask.embedding.embedder import TRAINED, Embedder, PlainVariants
from selfmask.embedding.mapping import load_map
from selfmask.embedding.vectors import embed
from selfmask.errors import ConfigError, FeatureMapError, InterruptedRunError
from selfmask.evaluation import knn_accuracy
from selfmask.evaluation.feature_map import FeatureMap
from selfmask.objectives.neighbours import NeighboursConfig
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


def embedder_of(model: nn.Module) -> Embedder:
    """As of a tuned file."""
    return Embedder("", model.eval(), HOW, 0, variants=PlainVariants(model, TRAINED, "as trained"))


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
    load_map(tmp_path / "map.safetensors", embedder_of(loaded))  # which takes no map of other vectors
    with pytest.raises(FeatureMapError):
        load_map(tmp_path / "map.safetensors", embedder_of(network()))


@pytest.mark.parametrize("method", OTHERS)
def test_what_does_not_help_is_given_up(tmp_path: Path, method: str) -> None:
    """At a rate that changes nothing; what is left is the frozen backbone, in a file that says so."""
    result = run(tmp_path, method, changes={"lr": 1e-12})
    assert result.helped is False
    assert (result.result["kept"], result.result["best_step"]) == ("identity", 0)
    opened = open_tuned(tmp_path / "tuned.safetensors")
    assert (opened.about.method, len(opened.tensors)) == ("frozen", 0)
    model, _ = load_tuned(network(), opened)
    load_map(tmp_path / "map.safetensors", embedder_of(model))
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


@pytest.mark.parametrize("method", OTHERS)
def test_neighbours_teach_every_method(tmp_path: Path, method: str) -> None:
    """And its own features, from the middle of the run on."""
    objective = NeighboursConfig(neighbours=3, refresh=2)
    result = run(tmp_path, method, changes={"objective": objective, "gate": False})
    assert all(math.isfinite(line["loss"]) for line in result.log)
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert not torch.equal(result.model(images), network().eval()(images))


def test_labels_measure_a_method_with_and_without_a_map(tmp_path: Path) -> None:
    labelled = Labelled(*clothes(40, 20))
    config = settings("bitfit", steps=2, gate=False)
    result = adapt(network(), Clothes(60), config, out=tmp_path, preprocessing=HOW, labelled=labelled).result
    assert list(result["rows"]) == ["frozen", "frozen+map", "bitfit", "bitfit+map"]
    page = (tmp_path / "report.html").read_text()
    assert "as trained" in page
    assert "with the mask" not in page
    assert "probe (all labels) + map" in page


def test_every_method_has_a_rate_of_its_own() -> None:
    rates = {method: AdaptConfig.preset("fast", method=method).lr for method in ("mask", *OTHERS)}
    assert rates["mask"] == AdaptConfig.preset("fast").lr == 6.0
    assert all(rate < 1 for method, rate in rates.items() if method != "mask")
    assert AdaptConfig.preset("fast", method="full", lr=0.5).lr == 0.5
    assert AdaptConfig.preset("fast", method="full").changed(method="mask").lr == 6.0
    assert AdaptConfig().lr == 50.0


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


@pytest.mark.heavy
def test_all_methods_stand_side_by_side(tmp_path: Path) -> None:
    rivals = compared(tmp_path)
    assert tuple(rivals.methods) == METHODS
    assert rivals.rows == [row for method in METHODS for row in (method, f"{method}+map")]
    assert rivals.columns == ["knn", "knn_200", "probe_few", "probe"]
    images, test = clothes(100, 40)
    bank, queries = (embed(network(), part, HOW)[0] for part in (images, test))
    whiten = FeatureMap.fit(bank)
    for row, own, other in (("frozen", bank, queries), ("frozen+map", whiten(bank), whiten(queries))):
        expected = knn_accuracy(own, images.labels or [], other, test.labels or [], k=20)
        assert rivals.mean(row, "knn") == (expected, None)
    assert (rivals.bytes("frozen"), rivals.bytes("frozen+map")) == (0, len(whiten.as_bytes()))
    assert all(rivals.kept(method)[1] == 1 for method in ("mask", *OTHERS))
    text = markdown(rivals)
    assert "| LoRA |" in text
    assert "| LoRA + map |" in text
    assert "k-NN (k = 20)" in text
    assert [row["method"] for row in as_dict(rivals)["summary"]] == rivals.rows
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
    """Rows and columns that nothing was measured for are left out."""
    own: dict[str, Any] = {"rows": {"mask": {"knn": 0.45}, "mask+map": {"knn": 0.6}}, "map_bytes": 5, "kept": "mask"}
    results: dict[RivalCell, dict[str, Any]] = {
        RivalCell("frozen", 0): {"rows": {"frozen": {"probe": 0.5, "knn": 0.4}}, "bytes": 0, "seconds": 1.0},
        RivalCell("mask", 0): {**own, "quality_after": 0.7, "bytes": 7, "seconds": 2.0},
    }
    lines = markdown(Rivals(results)).splitlines()
    assert lines[0].startswith("|  | k-NN (k = 20) | probe (all labels) | quality")
    assert lines[2:] == [
        "| frozen backbone | 40.0 | 50.0 | - | - | - | 1 |",
        "| mask | 45.0 (+5.0) | - | 0.700 | 1 of 1 | 7 | 2 |",
        "| mask + map | 60.0 (+20.0) | - | - | 1 of 1 | 12 | 2 |",
    ]


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
