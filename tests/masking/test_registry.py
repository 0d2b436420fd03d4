"""A rule of one's own: a class that writes masks, known by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from selfmask import MaskConfig, MaskedModel, adapt
from selfmask.errors import ConfigError
from selfmask.masking.rules import RULES, Rule, register_rule

from ..training.small import HOW, Clothes, config, network


class Band(Rule):
    """On are the scores within `mu` of where they started: those that moved least."""

    name = "band"

    def write(self, scores: Tensor, config: MaskConfig, progress: float, out: Tensor) -> None:
        out.copy_((scores - config.s0).abs() <= config.mu)


@pytest.fixture(autouse=True)
def _band() -> Iterator[None]:
    register_rule(Band)
    yield
    del RULES["band"]


def test_it_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    mask = MaskConfig(rule="band", mu=0.5, select="all", exclude=("*.bias",))
    masked = adapt(network(), Clothes(), config(mask=mask), out=tmp_path, preprocessing=HOW, report=False).model
    assert 0 < masked.sparsity()["total"] < 1
    scores = masked.scores["0/weight"]
    on = dict(masked.masks())["0.weight"]
    assert torch.equal(on.view_as(scores).bool(), (scores - 1).abs() <= 0.5)
    again = MaskedModel.from_pretrained(network(), tmp_path / "mask.smn").eval()
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(images), masked(images))
    assert again.config == masked.config
    assert again.config.rule == "band"


def test_two_of_a_name_are_refused() -> None:
    register_rule(Band)  # the same one again is no harm

    class Other(Band):
        pass

    with pytest.raises(ConfigError, match="two rules named 'band'"):
        register_rule(Other)
    assert type(RULES["band"]) is Band


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"unknown rule[\s\S]*threshold, topk, progressive_topk, band[\s\S]*stripes"):
        MaskConfig(rule="stripes")
