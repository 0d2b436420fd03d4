"""Files of tokens and maps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.commands.opening import load_embedder
from selfmask.data import open_images
from selfmask.data.pixels import fit, normalised
from selfmask.embedding import features
from selfmask.embedding.dense import dense
from selfmask.errors import EmbedderError

from ..cli.inside import selfmask
from .samples import pictures


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return pictures(tmp_path / "photos", 9, bad=(4,))


def mask_of(folder: Path, backbone: str) -> tuple[Path, Path]:
    """A mask, and the weights that it is for."""
    model = load_backbone(backbone, pretrained=False).model
    save_file(model.state_dict(), folder / "weights.safetensors")
    masked = get_masked_model(model, MaskConfig(rule="topk", active_share=0.3))
    masked.save_pretrained(folder / "mask.smn")
    return folder / "mask.smn", folder / "weights.safetensors"


def pixels_of(photos: Path, name: str) -> torch.Tensor:
    how, images = load_backbone("selfmask/tiny").preprocessing, open_images(str(photos))
    return normalised(fit(images[images.names.index(name)], how).float()[None], how)


def test_tokens_of_a_transformer(tmp_path: Path, photos: Path) -> None:
    mask, weights = mask_of(tmp_path, "selfmask/vit")
    done = selfmask("embed", mask, photos, "--weights", weights, "--tokens", "--out", tmp_path / "tokens.npz")
    assert done.returncode == 0, done.stderr
    assert "8 arrays of shape [64, 192]" in done.stdout
    masked = load_embedder(mask, weights=weights).model
    with np.load(tmp_path / "tokens.npz") as file:
        assert sorted(file) == ["features", "names"]
        assert file["features"].shape == (8, 64, 192)
        for name, found in zip(file["names"], file["features"], strict=True):
            expected = masked.forward_features(pixels_of(photos, str(name)))[0]
            torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-4, atol=1e-4)


def test_maps_of_a_layer_in_parquet(tmp_path: Path, photos: Path) -> None:
    mask, weights = mask_of(tmp_path, "selfmask/tiny")
    out = tmp_path / "maps.parquet"
    done = selfmask("embed", mask, photos, "--weights", weights, "--feature-map", "layer2", "--out", out, "--json")
    assert json.loads(done.stdout)["shape"] == [128, 8, 8]
    table = pq.read_table(out)
    shape = json.loads(table.schema.metadata[b"selfmask.shape"])
    found = np.array(table["features"].to_pylist(), np.float32).reshape(-1, *shape)
    view = load_embedder(mask, weights=weights).model.view()
    name = table["name"][0].as_py()
    with torch.no_grad():
        expected = view.layer2(view.layer1(view.stem(pixels_of(photos, name))))
    torch.testing.assert_close(torch.from_numpy(found[0]), expected[0], rtol=1e-4, atol=1e-4)


def test_memory_is_that_of_a_part(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are large: so few go to a part that it fits in memory, and the file is the same."""
    embedder, images = dense(load_embedder("selfmask/tiny"), "stem"), open_images(str(photos))
    features.write_features(tmp_path / "whole.npz", embedder, images, batch_size=2)
    monkeypatch.setattr(features, "_PART_BYTES", 4 * 4 * embedder.width)
    written = []
    write = features._write_part
    monkeypatch.setattr(features, "_write_part", lambda *given: (written.append(given[0].name), write(*given)))
    features.write_features(tmp_path / "parts.npz", embedder, images, batch_size=2)
    assert len(written) == 3
    assert (tmp_path / "parts.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


@pytest.mark.parametrize(
    ("backbone", "layer", "message"),
    [
        ("selfmask/tiny", None, "has no tokens"),
        ("selfmask/tiny", "layer7", "such as layer"),
        ("selfmask/tiny", "", "no layer ''"),
    ],
)
def test_what_is_no_layer_is_refused(backbone: str, layer: str | None, message: str) -> None:
    with pytest.raises(EmbedderError, match=message):
        dense(load_embedder(backbone), layer)


def test_dense_features_are_not_whitened(photos: Path) -> None:
    done = selfmask("embed", "selfmask/tiny", photos, "--tokens", "--whiten", "auto")
    assert done.returncode == 2
    assert "only vectors can be whitened" in done.stderr
