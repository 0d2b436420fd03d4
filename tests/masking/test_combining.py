"""One mask out of several: what is on in it, its statistics, and what cannot be combined."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from selfmask import MaskedModel
from selfmask.errors import ConfigError, DifferentMasksError
from selfmask.maskfile import PackedMask, sharing, unpack_bits
from selfmask.masking.combining import How, combined
from selfmask.preprocessing import IMAGENET
from tests.maskfile.tiny import Tiny, images, masked_with


def learned(variant: int, kind: str = "dense", **config: object) -> PackedMask:
    masked = masked_with(Tiny(), kind, variant, **config)
    masked.train()(images() * (1 + variant))
    return masked.eval().pack()


def on(mask: PackedMask, name: str = "conv2.weight") -> np.ndarray:
    return unpack_bits(mask.bits[name], mask.sizes[name]).numpy()


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("how", ["vote", "and", "or"])
def test_a_weight_is_on_as_the_masks_say(how: How, count: int) -> None:
    masks = [learned(variant) for variant in range(count)]
    found = combined(masks, how, Tiny())
    for name in masks[0].bits:
        votes = np.stack([on(mask, name) for mask in masks]).sum(0)
        wanted = {"vote": 2 * votes >= count, "and": votes == count, "or": votes > 0}[how]
        assert np.array_equal(on(found, name), wanted)
    assert len({mask.sha256 for mask in (found, *masks)}) == count + 1


def test_it_is_a_mask_like_any_other() -> None:
    """It goes to a file and back, alpha follows from its bits, and its statistics are the means of the others'."""
    masks = [learned(variant) for variant in range(3)]
    found = combined(masks, "vote", Tiny())
    model = MaskedModel(Tiny())
    again = MaskedModel.from_pretrained(Tiny(), model.file_bytes(found)).eval()
    assert again.pack().sha256 == found.sha256
    weight, flags = Tiny().conv2.weight, torch.from_numpy(on(found)).view(24, 8, 3, 3)
    torch.testing.assert_close(again.merge_and_unload().conv2.weight, weight * flags / flags.float().mean().sqrt())
    for name, value in found.norm.items():
        means = torch.stack([mask.norm[name] for mask in masks]).mean(0)
        torch.testing.assert_close(value, means, rtol=0.02, atol=0.02)  # in the few bits of a file
        assert torch.equal(again.pack().norm[name], value)
    assert not torch.equal(found.norm["norm.running_mean"], masks[0].norm["norm.running_mean"])
    trainable = MaskedModel.from_pretrained(Tiny(), model.file_bytes(found), is_trainable=True)
    assert trainable.pack().sha256 == found.sha256


def test_rules_that_count_end_as_a_threshold() -> None:
    masks = [learned(variant, rule="topk", active_share=0.5) for variant in range(3)]
    found = combined(masks, "and", Tiny())
    assert found.config["rule"] == "threshold"
    again = MaskedModel.from_pretrained(Tiny(), MaskedModel(Tiny()).file_bytes(found), is_trainable=True)
    assert again.pack().sha256 == found.sha256


def test_masks_with_the_statistics_of_the_base_stay_so() -> None:
    found = combined([learned(1, norm="frozen"), learned(2, norm="frozen")], "or", Tiny())
    assert (found.norm, bool(found.norm_fingerprint)) == ({}, True)


def test_words_that_all_agree_on_are_kept() -> None:
    masks = [learned(variant).replaced(extensions=sharing(licence="CC0")) for variant in range(2)]
    assert combined(masks, "vote", Tiny()).extensions == sharing(licence="CC0")
    masks[1] = masks[1].replaced(extensions=sharing(licence="MIT"), head={"weight": torch.ones(2)})
    found = combined(masks, "vote", Tiny())
    assert (found.extensions, found.head) == ({}, {})
    assert masks[0].sha256[:16] in found.notes


def test_what_does_not_fit_is_refused() -> None:
    mask = learned(1)
    for other, word in (
        (learned(2, select=["conv*"]), "different weights"),
        (learned(2, exclude=["proj.bias"]), "different weights"),
        (learned(2, norm="frozen"), "different ways"),
        (dataclasses.replace(mask, preprocessing=IMAGENET), "prepared"),
        (dataclasses.replace(mask, fingerprint="0" * 64), "different weights"),
    ):
        with pytest.raises(DifferentMasksError, match=word) as caught:
            combined([mask, mask, other], "vote", Tiny())
        assert "mask 3" in str(caught.value)
        assert "do:" in str(caught.value)
    a, b = (learned(1, fraction=0.4, fraction_by="magnitude"), learned(1, fraction=0.4, seed=3))
    same_sizes = dataclasses.replace(b, bits=a.bits, sizes=a.sizes)
    with pytest.raises(DifferentMasksError, match="fractions"):
        combined([a, same_sizes], "vote", Tiny())
    with pytest.raises(ConfigError, match="alone"):
        combined([mask], "vote", Tiny())
