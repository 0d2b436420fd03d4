"""Exports: what another program gets from the files is what the masked model gives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.commands.export import Exported, export, relative_difference
from selfmask.commands.opening import load_embedder
from selfmask.data import Images, SomeImages, open_images
from selfmask.data.pixels import fit, normalised
from selfmask.embedding.embedder import Embedder
from selfmask.embedding.mapping import fit_map, with_map
from selfmask.errors import ExportError, ExportWriteError
from selfmask.export.formats import FORMATS, Safetensors

from ..cascade.small import fitted
from ..cli.inside import selfmask
from ..training.small import HOW

TINY, VIT = "selfmask/tiny", "selfmask/vit"
LARGER = dataclasses.replace(HOW, size=(32, 32))


def clothes(count: int = 64) -> Images:
    return SomeImages(open_images("selfmask/fashion", split="test"), range(count))


def pixels(embedder: Embedder, count: int = 5) -> Tensor:
    images, how = clothes(count), embedder.preprocessing
    return torch.stack([normalised(fit(images[i], how), how) for i in range(count)])


def mask_of(folder: Path, model: nn.Module | None = None, share: float = 0.7) -> Path:
    masked = get_masked_model(model or load_backbone(TINY).model, MaskConfig(rule="topk", active_share=share))
    masked.save_pretrained(folder / "mask.smn")
    return folder / "mask.smn"


@pytest.fixture
def embedder(tmp_path: Path) -> Embedder:
    """With a mask that is seen in the vectors."""
    found = load_embedder(mask_of(tmp_path))
    x = pixels(found)
    assert relative_difference(found.model(x), found.model.frozen(x)) > 0.1
    return found


def timm_embedder(name: str, **settings: object) -> Embedder:
    """A masked network of timm, with random weights."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=0, **settings)
    masked = get_masked_model(model, MaskConfig(rule="topk", active_share=0.5)).eval()
    return Embedder(name, masked, LARGER, model.num_features)


def made(embedder: Embedder, out: Path, format: str, **settings: object) -> Exported:
    return export(embedder, out, format, compare_on=clothes(), say=lambda line: None, **settings)


def onnx_vectors(file: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["vectors"], {"images": x.numpy()})[0])


def test_onnx_runtime_gives_the_vectors_of_the_masked_model(tmp_path: Path, embedder: Embedder) -> None:
    result = made(embedder, tmp_path / "m.onnx", "onnx", dynamic_batch=True)
    assert result.difference is not None
    assert result.difference <= 1e-4
    x = pixels(embedder)
    torch.testing.assert_close(onnx_vectors(tmp_path / "m.onnx", x), embedder.model(x).detach(), rtol=1e-3, atol=1e-4)
    facts = {each.key: each.value for each in onnx.load(tmp_path / "m.onnx").metadata_props}
    told = json.loads(facts["selfmask.preprocessing"])
    assert (told["size"], told["mean"]) == ([32, 32], list(embedder.preprocessing.mean))


def test_the_map_is_part_of_the_graph(tmp_path: Path, embedder: Embedder) -> None:
    whitened = with_map(embedder, fit_map(embedder, clothes(400)))
    made(whitened, tmp_path / "m.pt2", "pt2")
    x = pixels(embedder, 1)
    expected = whitened.module(["mask"])(x).detach()
    assert relative_difference(torch.export.load(tmp_path / "m.pt2").module()(x), expected) < 1e-4
    assert relative_difference(expected, embedder.model(x).detach()) > 0.5
    for format in ("safetensors", "timm"):
        with pytest.raises(ExportError, match="one network, and nothing else"):
            made(whitened, tmp_path / "m.out", format)


def test_pt2_needs_no_code_of_the_network(tmp_path: Path, embedder: Embedder) -> None:
    result = made(embedder, tmp_path / "m.pt2", "pt2", dynamic_batch=True)
    assert result.difference is not None
    told: dict[str, str] = {"selfmask.preprocessing": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=told)
    x = pixels(embedder, 3)
    assert relative_difference(program.module()(x), embedder.model(x).detach()) < 1e-5
    assert json.loads(told["selfmask.preprocessing"])["size"] == [32, 32]


def test_safetensors_are_weights_of_the_backbone(tmp_path: Path, embedder: Embedder) -> None:
    result = made(embedder, tmp_path / "m.safetensors", "safetensors")
    assert result.difference == 0
    x = pixels(embedder)
    again = load_backbone(TINY, weights=tmp_path / "m.safetensors").model
    assert again(x).equal(embedder.model(x))
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert "selfmask.preprocessing" in file.metadata()


def test_timm_loads_a_folder_with_its_preprocessing(tmp_path: Path) -> None:
    embedder = timm_embedder("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
    with pytest.raises(ExportError):  # another network than timm's name stands for
        made(embedder, tmp_path / "folder", "timm")
    assert not (tmp_path / "folder").exists()
    embedder = timm_embedder("resnet10t")
    assert made(embedder, tmp_path / "folder", "timm").difference == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    x = pixels(embedder)
    assert model(x).equal(embedder.model(x))
    config = timm.data.resolve_model_data_config(model)
    found = tuple(config["input_size"]), tuple(config["mean"]), config["crop_pct"]
    assert found == ((3, 32, 32), LARGER.mean, 1.0)


@pytest.mark.heavy
def test_transformers_load_the_folder_of_timm(tmp_path: Path) -> None:
    from transformers import AutoModel

    embedder = timm_embedder("resnet10t")
    made(embedder, tmp_path / "folder", "timm")
    model = AutoModel.from_pretrained(tmp_path / "folder").eval()
    x = pixels(embedder)
    with torch.no_grad():
        assert relative_difference(model(x).pooler_output, embedder.model(x)) < 1e-5


@pytest.mark.heavy
def test_half_is_half_as_large_and_near(tmp_path: Path, embedder: Embedder) -> None:
    whole = made(embedder, tmp_path / "m.onnx", "onnx")
    half = made(embedder, tmp_path / "h.onnx", "onnx", half=True)
    assert half.bytes < 0.55 * whole.bytes
    assert 1e-6 < (half.difference or 0) < 0.05
    assert onnx_vectors(tmp_path / "h.onnx", pixels(embedder, 1)).dtype == torch.float32


@pytest.mark.heavy
@pytest.mark.parametrize("combination", ["conditional", "unconditional"])
def test_a_cascade_is_one_graph(tmp_path: Path, combination: str) -> None:
    cascade = fitted(tmp_path)
    embedder = Embedder("cascade", cascade, HOW, cascade.width, variant=combination)
    result = made(embedder, tmp_path / "c.onnx", "onnx", dynamic_batch=True)
    assert (result.difference or 1) <= 1e-4
    images = clothes(40)
    x = torch.stack([normalised(fit(images[i], HOW), HOW) for i in range(40)])
    assert len(set(cascade.route(images).tolist())) > 1  # more than one expert has its say
    expected = cascade.vectors(x, [combination])[0].detach()
    assert relative_difference(onnx_vectors(tmp_path / "c.onnx", x), expected) < 1e-4
    with pytest.raises(ExportError, match="a cascade"):
        made(embedder, tmp_path / "c.safetensors", "safetensors")


def test_what_differs_is_refused_and_nothing_is_written(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Safetensors, "run", lambda *given: embedder.model.frozen(given[3]))  # as if the mask were lost
    with pytest.raises(ExportError, match="other vectors"):
        made(embedder, tmp_path / "m.st", "safetensors")
    assert not (tmp_path / "m.st").exists()


def test_what_is_there_is_not_replaced_unless_asked(tmp_path: Path, embedder: Embedder) -> None:
    (tmp_path / "m.st").write_text("mine")
    with pytest.raises(ExportWriteError, match="exists"):
        made(embedder, tmp_path / "m.st", "safetensors")
    assert (tmp_path / "m.st").read_text() == "mine"
    made(embedder, tmp_path / "m.st", "safetensors", overwrite=True)
    assert (tmp_path / "m.st").stat().st_size > 1_000_000
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ExportWriteError):
        made(timm_embedder("resnet10t"), folder, "timm", overwrite=True)
    assert [each.name for each in folder.iterdir()] == ["notes.txt"]


def test_the_command(tmp_path: Path) -> None:
    network = load_backbone(VIT, pretrained=False).model
    save_file(network.state_dict(), tmp_path / "vit.safetensors")
    mask = mask_of(tmp_path, network), "--weights", tmp_path / "vit.safetensors"
    done = selfmask("export", *mask, "--format", "pt2", "--out", tmp_path / "v.pt2", "--dynamic-batch", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["bytes"] == (tmp_path / "v.pt2").stat().st_size
    assert told["difference"] <= 1e-4
    again = selfmask("export", *mask, "--out", tmp_path / "v.pt2")
    assert (again.returncode, "--overwrite" in again.stderr) == (2, True)
    wrong = selfmask("export", *mask, "--format", "timm", "--out", tmp_path / "t")
    assert (wrong.returncode, "timm has no network" in wrong.stderr) == (2, True)
    assert {*FORMATS} == {"onnx", "pt2", "safetensors", "timm"}


def test_differences_are_shares_of_the_largest_number() -> None:
    expected = torch.tensor([[1.0, -4.0], [0.1, 0.2]])
    assert relative_difference(expected + torch.tensor([[0.0, 0.4], [0.0, 0.0]]), expected) == pytest.approx(0.1)
    assert relative_difference(torch.zeros(2, 3), expected) == np.inf
