"""Heads compute what they say, and come back from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import HeadError
from selfmask.maskfile import read_mask_file
from selfmask.objectives.heads import Head, LinearHead, MaskedHead, TextHead, head_of
from tests.training.small import network

CLASSES = ["coat", "größer", "T-shirt/top"]


def heads() -> dict[str, Head]:
    torch.manual_seed(0)
    masked = MaskedHead(16, CLASSES, mask=MaskConfig())
    with torch.no_grad():
        for score in masked.linear.scores.parameters():  # type: ignore[union-attr]
            score.copy_(torch.randn_like(score))
    return {
        "linear": LinearHead(16, CLASSES),
        "normalised": LinearHead(16, CLASSES, normalised=True),
        "masked": masked,
        "text": TextHead(torch.randn(3, 16), 17.3, CLASSES),
    }


@pytest.mark.parametrize("kind", heads())
def test_a_head_comes_back_as_it_was(kind: str) -> None:
    head, vectors = heads()[kind], torch.randn(9, 16)
    back = head_of(head.tensors())
    assert back.classes == CLASSES
    torch.testing.assert_close(back(vectors), head(vectors), rtol=2e-3, atol=2e-2 if kind == "text" else 2e-3)
    again = head_of(back.tensors())  # rounded once, and not again
    assert torch.equal(again(vectors), back(vectors)) or kind == "text"
    assert sum(value.numel() * value.element_size() for value in head.tensors().values()) < 3 * 16 * 2 + 100


def test_the_text_head_is_a_scaled_cosine() -> None:
    text, vectors = torch.randn(3, 16), torch.randn(5, 16)
    found = TextHead(text, 20.0, CLASSES)(vectors)
    a, b = vectors.double().numpy(), text.double().numpy()
    cosines = a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(found.numpy(), 20 * cosines, rtol=1e-5)
    assert not list(TextHead(text, 20.0, CLASSES).parameters())


def test_a_masked_head_is_a_random_one_with_a_mask() -> None:
    head = heads()["masked"]
    assert isinstance(head, MaskedHead)
    assert isinstance(head.linear, MaskedModel)
    (score,) = head.linear.scores.parameters()
    weight, mask = head.linear.base.weight, (score > 0).float()
    vectors = torch.randn(4, 16)
    expected = vectors @ (weight * mask / mask.mean().sqrt()).T + head.linear.base.bias  # type: ignore[operator]
    torch.testing.assert_close(head(vectors), expected)
    assert not weight.requires_grad  # type: ignore[union-attr]


def test_ranked_is_best_first_and_no_more_than_there_are() -> None:
    head = heads()["linear"]
    vectors = torch.randn(7, 16)
    ranked = head.ranked(vectors)
    assert ranked.shape == (7, 3)
    assert torch.equal(ranked, head(vectors).argsort(1, descending=True))


def test_a_head_travels_in_the_mask_file(tmp_path: Path) -> None:
    masked, head = get_masked_model(network()), heads()["normalised"]
    masked.save_pretrained(tmp_path / "birds.smn", head=head.tensors())
    loaded = MaskedModel.from_pretrained(network(), tmp_path / "birds.smn").pack().head
    vectors = torch.randn(4, 16)
    assert torch.equal(head_of(loaded)(vectors), head_of(head.tensors())(vectors))
    assert read_mask_file  # the same reader


def _names(names: object) -> Tensor:
    return torch.tensor(list(json.dumps(names).encode()), dtype=torch.uint8)


GOOD = {"classes": _names(["a", "b"]), "weight": torch.ones(2, 4), "bias": torch.ones(2), "normalised": torch.tensor(0)}
BROKEN = {
    "nothing": {},
    "no names": {key: value for key, value in GOOD.items() if key != "classes"},
    "no weights": {"classes": GOOD["classes"]},
    "names that are numbers": {**GOOD, "classes": _names([1, 2])},
    "names that are no JSON": {**GOOD, "classes": torch.tensor([255, 1], dtype=torch.uint8)},
    "names of other bytes": {**GOOD, "classes": torch.tensor([-1, 300])},
    "too few names": {**GOOD, "classes": _names(["a"])},
    "another shape": {**GOOD, "bias": torch.ones(3)},
    "no matrix": {**GOOD, "weight": torch.ones(2)},
    "NaN": {**GOOD, "weight": torch.full((2, 4), torch.nan)},
    "text without a scale": {"classes": GOOD["classes"], "text": torch.ones(2, 4)},
    "text of other classes": {"classes": GOOD["classes"], "text": torch.ones(3, 4), "scale": torch.tensor(1.0)},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_head_is_refused(case: str) -> None:
    head_of(GOOD)
    with pytest.raises(HeadError):
        head_of(BROKEN[case])
