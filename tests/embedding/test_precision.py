"""Vectors computed with bfloat16, or by compiled networks: near to the others, and never taken for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from selfmask import get_masked_model
from selfmask.backbones import load_backbone
from selfmask.data import open_images
from selfmask.data.sources import SomeImages
from selfmask.embedding.embedder import Embedder
from selfmask.embedding.vectors import embed

from ..cli.inside import selfmask
from ..data.shards import shards


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    backbone = load_backbone("selfmask/tiny")
    masked = get_masked_model(backbone.model)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.copy_(torch.randn(score.shape, generator=torch.Generator().manual_seed(0)) + 1)
    return Embedder("tiny", masked.eval(), backbone.preprocessing, 256)


def vectors(embedder: Embedder) -> torch.Tensor:
    images = SomeImages(open_images("selfmask/fashion"), range(40))
    return embed(embedder.module([embedder.variant]), images, embedder.preprocessing, batch_size=16)[0]


def test_bfloat16_is_near_and_another_fingerprint(embedder: Embedder) -> None:
    exact, rounded = vectors(embedder), vectors(half := dataclasses.replace(embedder, precision="bfloat16"))
    assert rounded.dtype == torch.float32
    assert not rounded.equal(exact)
    assert F.cosine_similarity(exact, rounded).min() > 0.999
    prints = {each.fingerprint(each.variant) for each in (embedder, half, dataclasses.replace(half, compile=True))}
    assert len(prints) == 3


@pytest.mark.heavy
def test_compiled_networks_give_the_same_vectors(embedder: Embedder) -> None:
    compiled = dataclasses.replace(embedder, compile=True)
    torch.testing.assert_close(vectors(compiled), vectors(embedder), rtol=1e-4, atol=1e-5)
    assert compiled.fingerprint(compiled.variant) != embedder.fingerprint(embedder.variant)


def test_the_command_does_not_mix_them(tmp_path: Path) -> None:
    shards(tmp_path / "s", 2)
    words = ("embed", "selfmask/tiny", tmp_path / "s", "--batch-size", "8")
    for precision in ("float32", "bfloat16"):
        done = selfmask(*words, "--precision", precision, "--out", tmp_path / f"{precision}.npz")
        assert done.returncode == 0, done.stderr
    exact, rounded = (np.load(tmp_path / f"{each}.npz")["vectors"] for each in ("float32", "bfloat16"))
    assert exact.dtype == rounded.dtype == np.float32
    assert np.abs(exact - rounded).max() > 0
    np.testing.assert_allclose(exact, rounded, atol=0.05 * np.abs(exact).max())
    assert selfmask(*words, "--shard", "1/2", "--out", tmp_path / "v").returncode == 0
    mixed = selfmask(*words, "--shard", "2/2", "--precision", "bfloat16", "--out", tmp_path / "v")
    assert mixed.returncode != 0
    assert "another model" in mixed.stderr
