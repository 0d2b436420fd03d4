"""Files, merging, and what is told of a mask."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from selfmask import MaskConfig, MaskedModel, get_masked_model

from .architectures import (
    assert_same_state,
    base_of,
    digits_base,
    inputs_of,
    loss_of,
    named_scores,
    perturb_scores,
    state_of,
)
from .digits import bits_of, images, masked_digits, saved, sgd

# ---- files and merging ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mu": 0.5, "s0": 0.75},
        {"rule": "topk", "active_share": 0.3},
        {"rule": "progressive_topk", "active_share": 0.2},
        {"mu": 1.0, "s0": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_training_goes_on_from_a_file(settings: dict[str, object], progress: float, tmp_path: Path) -> None:
    """With is_trainable a loaded mask is the mask that was saved, with scores that can be trained."""
    masked = masked_digits(**settings).eval()
    masked.progress = progress
    masked.save_pretrained(tmp_path / "mask.smn")
    again = MaskedModel.from_pretrained(digits_base(), tmp_path / "mask.smn", is_trainable=True).eval()
    assert again.config == masked.config
    assert np.array_equal(bits_of(again), bits_of(masked))
    output = again(images())
    assert torch.equal(output, masked(images()))
    before = [score.detach().clone() for score in again.scores.values()]
    loss_of(output).backward()
    sgd(again, lr=100).step()
    assert not all(torch.equal(*pair) for pair in zip(again.scores.values(), before, strict=True))


def test_order_of_the_scores_is_that_of_the_model(tmp_path: Path) -> None:
    """Optimizers keep their state by position: a reloaded mask must list its scores as the first run did."""
    base = nn.Sequential(*(nn.Linear(40, 40) for _ in range(12)))
    masked = get_masked_model(base)
    perturb_scores(masked)
    with torch.no_grad():
        named_scores(masked)["3.weight"].fill_(1)  # this one is coded in another way than the rest
    masked.save_pretrained(tmp_path / "mask.smn")
    again = MaskedModel.from_pretrained(base, tmp_path / "mask.smn", is_trainable=True)
    assert list(again.scores) == list(masked.scores)
    loaded = MaskedModel.from_pretrained(base, tmp_path / "mask.smn")
    assert list(loaded.sparsity()) == list(masked.sparsity())


def test_loaded_masks_have_no_gradients(tmp_path: Path) -> None:
    masked = MaskedModel.from_pretrained(digits_base(), saved(tmp_path / "mask.smn", 1))
    assert not any(parameter.requires_grad for parameter in masked.parameters())
    assert not masked(images()).requires_grad


def test_the_config_comes_with_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "mask.smn", 1, rule="topk", active_share=0.4, select=["0.*", "3.*"], norm="frozen")
    masked = MaskedModel.from_pretrained(digits_base(), path)
    assert masked.config == MaskConfig(rule="topk", active_share=0.4, select=["0.*", "3.*"], norm="frozen")


def test_merge_leaves_no_trace() -> None:
    base = digits_base()
    base[3].requires_grad_(False)
    flags = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    masked = get_masked_model(base)
    perturb_scores(masked)
    masked.train()(images())
    merged = masked.merge_and_unload()
    assert type(merged) is type(base)
    assert {name: parameter.requires_grad for name, parameter in merged.named_parameters()} == flags
    assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in merged.parameters())
    assert merged.state_dict().keys() == base.state_dict().keys()
    for module in merged.modules():
        assert not type(module).__module__.startswith("selfmask")
        assert not any(getattr(module, hooks) for hooks in vars(module) if hooks.endswith("_hooks"))
    assert b"selfmask" not in pickle.dumps(merged)
    # nor does it share memory with anything of ours
    expected = masked.eval()(images()).detach()
    with torch.no_grad():
        for value in merged.state_dict().values():
            value.zero_()
    assert torch.equal(masked(images()), expected)


@pytest.mark.parametrize("training", [True, False])
def test_merged_keeps_the_mode(training: bool) -> None:
    assert masked_digits().train(training).merge_and_unload().training == training


def test_merging_while_disabled_gives_the_base() -> None:
    masked = masked_digits().eval()
    with masked.disable_mask():
        assert_same_state(masked.merge_and_unload(), state_of(digits_base()))


def test_keyword_arguments_and_outputs_pass_through() -> None:
    masked = get_masked_model(base_of("transformers_clip")).eval()
    plain = base_of("transformers_clip").eval()
    x = inputs_of("transformers_clip")
    found = masked(pixel_values=x, output_hidden_states=True)
    expected = plain(pixel_values=x, output_hidden_states=True)
    assert type(found) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states, expected.hidden_states, strict=True))


def test_sparsity_is_the_active_share() -> None:
    masked = masked_digits()
    shares = masked.sparsity()
    merged = masked.merge_and_unload()
    on = total = 0
    for name in named_scores(masked):
        mask = merged.get_parameter(name) != 0
        assert shares[name] == pytest.approx(mask.float().mean().item())
        on, total = on + int(mask.sum()), total + mask.numel()
    assert shares["total"] == pytest.approx(on / total)
    assert masked.num_masked == total


def test_config_cannot_be_changed_behind_our_back() -> None:
    masked = masked_digits()
    with pytest.raises(dataclasses.FrozenInstanceError):
        masked.config.mu = 3.0
