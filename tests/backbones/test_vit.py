"""The small vision transformer, and how it is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.backbones.vit import WEIGHTS, Block, SmallViT
from selfmask.commands.pretrain import PretrainConfig
from selfmask.data import SomeImages, open_images
from selfmask.embedding.vectors import embed
from selfmask.evaluation import knn_accuracy
from tests.cli.inside import selfmask
from tests.cli.test_adapt import save_clothes


def test_is_small() -> None:
    model = SmallViT()
    assert 1_700_000 < sum(p.numel() for p in model.parameters()) < 2_300_000
    assert 2 * sum(value.numel() for value in model.state_dict().values()) < 4_000_000


def test_comes_with_the_package() -> None:
    backbone = load_backbone("selfmask/vit")
    assert all(value.dtype == torch.float16 for value in load_file(WEIGHTS).values())
    assert all(value.dtype == torch.float32 for value in backbone.model.state_dict().values())
    vectors, labels = [], []
    for split in ("train", "test"):
        images = open_images("selfmask/fashion", split=split)
        assert images.labels is not None
        vectors.append(embed(backbone.model, SomeImages(images, range(500)), backbone.preprocessing)[0])
        labels.append(torch.tensor(images.labels[:500]))
    assert knn_accuracy(vectors[0], labels[0], vectors[1], labels[1], k=20) > 0.5


@pytest.mark.parametrize("side", [32, 16, 48])
def test_maps_images_to_vectors(side: int) -> None:
    backbone = load_backbone("selfmask/vit", pretrained=False)
    with torch.no_grad():
        vectors = backbone.model(torch.randn(2, 3, side, side))
    assert vectors.shape == (2, backbone.width) == (2, 192)
    assert vectors.isfinite().all()


def test_attention_is_that_of_the_paper() -> None:
    qkv = torch.randn(2, 5, 3 * 192)
    heads = []
    for head in range(3):
        q, k, v = (qkv[..., 192 * part + 64 * head :][..., :64] for part in range(3))
        heads.append(F.softmax(q @ k.mT / 8, -1) @ v)
    torch.testing.assert_close(Block.attend(qkv), torch.cat(heads, -1), rtol=1e-4, atol=1e-5)


def test_masks_are_on_its_blocks() -> None:
    masked = get_masked_model(load_backbone("selfmask/vit", pretrained=False).model, MaskConfig())
    assert all(name.startswith("blocks.") for name in masked.sparsity() if name != "total")
    assert "blocks.0.qkv.weight" in masked.sparsity()


def test_it_is_made_by_a_command(tmp_path: Path) -> None:
    save_clothes(tmp_path / "photos", 40)
    words = ("--network", "vit", "--steps", "2", "--batch-size", "8", "--out", tmp_path / "run")
    done = selfmask("pretrain", tmp_path / "photos", *words)
    assert done.returncode == 0, done.stderr
    backbone = load_backbone("selfmask/vit", weights=tmp_path / "run" / "vit.safetensors")
    assert isinstance(backbone.model, SmallViT)
    again = selfmask("pretrain", "--resume", tmp_path / "run")
    assert again.returncode == 0, again.stderr


def test_each_network_has_its_own_rate() -> None:
    tiny, vit = PretrainConfig(), PretrainConfig().changed(network="vit")
    assert (tiny.lr, tiny.weight_decay) == (0.2, 1e-4)
    assert vit.lr < 0.01
    assert vit.changed(labels=True).weight_decay == vit.weight_decay
    assert PretrainConfig(labels=True).weight_decay == 5e-4
