"""Methods of the base through masked weights, and a base that is called by itself."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings

import pytest
import timm
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.data import open_images
from selfmask.errors import ConfigError, DirectCallWarning

from ..light import mostly_heavy
from .architectures import assert_gradients_close, perturb_scores, score_gradients
from .digits import images as digits
from .digits import masked_digits

NETWORKS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}),
    "resnet": ("resnet18", {}),
    "convnext": ("convnext_atto", {}),
    "mobilevit": ("mobilevit_xxs", {"img_size": 32}),
}


def clothes(count: int = 4) -> Tensor:
    """Bundled images, 32 pixels wide."""
    pictures = open_images("selfmask/fashion", split="test")
    return nn.functional.interpolate(torch.stack([pictures[i] for i in range(count)]) / 255, (32, 32))


def masked_timm(name: str) -> MaskedModel:
    """With a mask that takes a third of the weights, and statistics of its own."""
    architecture, settings = NETWORKS[name]
    base = timm.create_model(architecture, num_classes=0, **settings)
    masked = get_masked_model(base, MaskConfig(rule="topk", active_share=0.66))
    perturb_scores(masked)
    masked.train()(clothes(8))
    return masked.eval()


@pytest.mark.parametrize("name", mostly_heavy([*NETWORKS], 2))
def test_features_are_those_of_the_merged_network_bit_for_bit(name: str) -> None:
    masked, x = masked_timm(name), clothes()
    merged = masked.merge_and_unload().eval()
    with torch.no_grad():
        assert masked.forward_features(x).equal(merged.forward_features(x))
        ours, theirs = (model.forward_intermediates(x, intermediates_only=True) for model in (masked, merged))
        assert len(ours) == len(theirs) > 1
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
        head = masked.call("forward_head", masked.forward_features(x))
        assert head.equal(masked(x))
        with masked.disable_mask():
            plain = masked.forward_features(x)
            assert plain.equal(masked.base.forward_features(x))
        assert not plain.allclose(masked.forward_features(x), rtol=0.1)


def test_scores_learn_from_features_as_from_outputs() -> None:
    masked, x = masked_timm("resnet").train(), clothes()
    statistics = {name: value.clone() for name, value in masked._norm.named_buffers()}
    masked(x).square().mean().backward()
    expected = {name: gradient.clone() for name, gradient in score_gradients(masked).items()}
    for score in masked.scores.parameters():
        score.grad = None
    masked.call("forward_head", masked.forward_features(x)).square().mean().backward()
    assert_gradients_close(score_gradients(masked), expected, 1e-4)
    assert any(not value.equal(statistics[name]) for name, value in masked._norm.named_buffers())
    assert all(parameter.grad is None for parameter in masked.base.parameters())


def test_a_method_that_is_not_there(masked: MaskedModel) -> None:
    with pytest.raises(ConfigError, match="no method 'forward_features'"):
        masked.forward_features(digits())


# ---- the base by itself -----------------------------------------------------------------------------------------


def said(run: object) -> int:
    """How many warnings a call gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()  # type: ignore[operator]
    return sum(issubclass(each.category, DirectCallWarning) for each in found)


def test_a_base_that_is_called_by_itself_says_so_once(masked: MaskedModel) -> None:
    assert said(lambda: masked(digits())) == 0
    assert said(lambda: masked.base(digits())) == 1
    assert said(lambda: masked.base(digits())) == 0


def test_a_method_of_the_base_says_so_too() -> None:
    masked = masked_timm("resnet")
    assert said(lambda: masked.forward_features(clothes())) == 0
    assert said(lambda: masked.base.forward_features(clothes())) == 1


def test_who_means_the_base_is_not_warned(masked: MaskedModel) -> None:
    def without_mask() -> None:
        with masked.disable_mask():
            masked(digits())
            masked.base(digits())

    def holding_the_lock() -> None:
        with masked.lock:
            masked.base(digits())

    def in_another_thread() -> None:
        thread = threading.Thread(target=lambda: masked(digits()))
        thread.start()
        thread.join()

    for run in (without_mask, holding_the_lock, in_another_thread):
        assert said(run) == 0
    assert said(lambda: masked.frozen(digits())) == 0
    assert said(lambda: masked.recalibrate([digits()])) == 0


def test_two_masked_models_on_one_base(masked: MaskedModel) -> None:
    other = get_masked_model(masked.base)

    def both() -> None:
        with other.disable_mask():
            other(digits())
        masked(digits())

    assert said(both) == 0


def test_copies_are_plain_modules_and_a_base_is_left_as_it_was() -> None:
    masked = masked_digits().eval()
    base, x = masked.base, digits()
    hooks = [module._forward_pre_hooks for module in base.modules()]
    assert sum(map(len, hooks)) == 1
    for plain in (masked.view(), masked.merge_and_unload()):
        assert not any(module._forward_pre_hooks for module in plain.modules())
    for free in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        with masked.lock:
            expected = base(x)
        assert said(lambda model=free: model(x)) == 0
        assert free(x).equal(expected)
    assert b"selfmask" not in pickle.dumps(base)
    twin = copy.deepcopy(masked)
    copied = twin.base
    assert said(lambda: copied(x)) == 1
    del masked, twin
    gc.collect()
    assert sum(map(len, hooks)) == 0
