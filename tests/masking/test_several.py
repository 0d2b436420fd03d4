"""The base alone, and several masks on it."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskedModel, get_masked_model
from selfmask.errors import ConfigError, NotAMaskFileError, SelfmaskError, UnknownMaskError

from .architectures import (
    assert_gradients_close,
    assert_same_state,
    digits_base,
    loss_of,
    perturb_scores,
    score_gradients,
    state_of,
)
from .digits import expected_gradients, images, masked_digits, saved

# ---- the base alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["trainable", "loaded", "loaded-trainable"])
def test_disable_mask(training: bool, kind: str, tmp_path: Path) -> None:
    """The untouched base, its own statistics included, in either mode; and nothing changes on the way."""
    path = saved(tmp_path / "mask.smn", 1)
    base = digits_base()
    if kind == "trainable":
        masked = get_masked_model(base)
        perturb_scores(masked)
        masked.train()(images(2))
    else:
        masked = MaskedModel.from_pretrained(base, path, is_trainable=kind == "loaded-trainable")
    masked.train(training)
    before, mask_before = state_of(base), state_of(masked.merge_and_unload())
    with masked.disable_mask():
        assert masked.active_mask is None
        assert torch.equal(masked(images()), digits_base().train(training)(images()))
        assert not masked(images()).requires_grad
    assert masked.active_mask == "default"
    assert_same_state(base, before)
    assert_same_state(masked.merge_and_unload(), mask_before)
    assert not torch.equal(masked(images()), digits_base().train(training)(images()))


def test_disable_mask_ends_with_an_exception() -> None:
    masked = masked_digits()
    with pytest.raises(ZeroDivisionError), masked.disable_mask():
        raise ZeroDivisionError
    assert masked.active_mask == "default"


def test_disable_mask_can_be_nested() -> None:
    masked = masked_digits().eval()
    with masked.disable_mask():
        with masked.disable_mask():
            pass
        assert torch.equal(masked(images()), digits_base().eval()(images()))
    assert masked.active_mask == "default"


def test_disable_mask_keeps_the_gradients_of_the_mask(masked: MaskedModel) -> None:
    """Distillation: the base teaches, between forward and backward of the masked student."""
    output = masked(images(1))
    with masked.disable_mask():
        masked(images(1))
    loss_of(output).backward()
    assert_gradients_close(score_gradients(masked), expected_gradients(masked, images(1)), 1e-3)


def test_nothing_to_save_while_disabled(tmp_path: Path) -> None:
    masked = masked_digits()
    with masked.disable_mask(), pytest.raises(SelfmaskError, match="no mask is active"):
        masked.save_pretrained(tmp_path / "mask.smn")
    assert not list(tmp_path.iterdir())


# ---- several masks ----------------------------------------------------------------------------------------------


def test_several_masks_on_one_base(tmp_path: Path) -> None:
    cats, dogs = saved(tmp_path / "cats.smn", 1), saved(tmp_path / "dogs.smn", 2, select=["3.weight"])
    masked = masked_digits().eval()
    masked.load_mask(cats, "cats")
    masked.load_mask(dogs, name="dogs")
    assert masked.mask_names == ["default", "cats", "dogs"]
    assert masked.active_mask == "default"
    alone = {
        "cats": MaskedModel.from_pretrained(digits_base(), cats).eval()(images()),
        "dogs": MaskedModel.from_pretrained(digits_base(), dogs).eval()(images()),
        "default": masked_digits().eval()(images()),
    }
    for name in ("cats", "dogs", "default", "dogs", "cats", "default"):
        masked.set_mask(name)
        assert masked.active_mask == name
        assert torch.equal(masked(images()), alone[name])
        assert torch.equal(masked.merge_and_unload()(images()), alone[name])
    masked.set_mask("dogs")
    assert masked.num_masked == 16 * 8 * 9
    assert set(masked.sparsity()) == {"3.weight", "total"}


def test_delete_mask(tmp_path: Path) -> None:
    masked = masked_digits()
    masked.load_mask(saved(tmp_path / "cats.smn", 1), "cats")
    masked.set_mask("cats")
    with pytest.raises(UnknownMaskError, match="active"):
        masked.delete_mask("cats")
    masked.set_mask("default")
    masked.delete_mask("cats")
    assert masked.mask_names == ["default"]
    with pytest.raises(UnknownMaskError):
        masked.delete_mask("cats")


def test_a_name_used_again(tmp_path: Path) -> None:
    """Another mask under an old name is another mask."""
    masked = masked_digits().eval()
    for seed in (1, 2):
        path = saved(tmp_path / f"{seed}.smn", seed)
        masked.load_mask(path, "tenant")
        masked.set_mask("tenant")
        expected = MaskedModel.from_pretrained(digits_base(), path).eval()(images())
        assert torch.equal(masked(images()), expected)
        masked.set_mask("default")
        masked.delete_mask("tenant")


def test_the_mask_that_disable_mask_will_return_to_cannot_be_deleted(tmp_path: Path) -> None:
    masked = masked_digits().eval()
    masked.load_mask(saved(tmp_path / "cats.smn", 1), "cats")
    masked.set_mask("cats")
    expected = masked(images())
    with masked.disable_mask(), pytest.raises(UnknownMaskError):
        masked.delete_mask("cats")
    assert torch.equal(masked(images()), expected)


def test_unknown_masks(tmp_path: Path) -> None:
    masked = masked_digits().eval()
    expected = masked(images())
    with pytest.raises(UnknownMaskError, match="'birds'") as caught:
        masked.set_mask("birds")
    assert isinstance(caught.value, KeyError)
    assert "default" in str(caught.value)
    assert "\n" in str(caught.value)  # readable, not the repr that KeyError shows
    with pytest.raises(NotAMaskFileError):
        masked.load_mask(tmp_path / "birds.smn", "birds")
    assert masked.mask_names == ["default"]
    assert torch.equal(masked(images()), expected)


def test_names_are_not_taken_twice(tmp_path: Path) -> None:
    path = saved(tmp_path / "cats.smn", 1)
    masked = masked_digits()
    masked.load_mask(path, "cats")
    for name in ("cats", "default"):
        with pytest.raises(ConfigError, match="already"):
            masked.load_mask(path, name)


def test_a_failed_load_leaves_the_model_alone(tmp_path: Path) -> None:
    """The user goes on with the model, and must not find it frozen."""
    model = digits_base().eval()
    with pytest.raises(NotAMaskFileError):
        MaskedModel.from_pretrained(model, tmp_path / "missing.smn")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_loaded_masks_stay_packed(tmp_path: Path) -> None:
    """Thousands of masks on one base: each costs a bit a weight, and its statistics."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512))
    masked = get_masked_model(base)
    perturb_scores(masked, spread=3)
    masked.save_pretrained(tmp_path / "mask.smn")
    loaded = MaskedModel.from_pretrained(base, tmp_path / "mask.smn").eval()
    loaded(torch.randn(2, 512))
    one = pickled_size(loaded)
    for number in range(8):
        loaded.load_mask(tmp_path / "mask.smn", str(number))
        loaded.set_mask(str(number))
        loaded(torch.randn(2, 512))
    each = (pickled_size(loaded) - one) / 8
    bits, floats = 512 * 512 / 8, 4 * 2 * 512
    assert bits < each < 1.1 * (bits + floats) + 2000


def pickled_size(masked: MaskedModel) -> int:
    """All that a model holds on to."""
    return len(pickle.dumps(masked))


def test_only_the_active_mask_is_expanded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = nn.Linear(301, 307, bias=False)  # a size that nothing else in this process has
    get_masked_model(base).save_pretrained(tmp_path / "mask.smn")
    masked = MaskedModel.from_pretrained(base, tmp_path / "mask.smn").eval()
    for number in range(5):
        masked.load_mask(tmp_path / "mask.smn", str(number))
        masked.set_mask(str(number))
        with torch.no_grad():
            masked(torch.randn(2, 301))
    gc.collect()
    storages = {
        item.untyped_storage().data_ptr()
        for item in gc.get_objects()
        if type(item) in (Tensor, nn.Parameter) and item.numel() == 301 * 307
    }
    assert len(storages) == 2  # the base, and one effective weight


def test_another_mask_under_a_name_that_was_free_again(tmp_path: Path) -> None:
    """What a deleted mask was expanded to is not taken for the next one of that name."""
    masked = MaskedModel(digits_base()).eval()
    outputs = []
    for seed in (1, 2):
        masked.load_mask(saved(tmp_path / f"{seed}.smn", seed), "a")
        with masked.using("a"):
            outputs.append(masked(images()))
        masked.delete_mask("a")
        alone = MaskedModel.from_pretrained(digits_base(), tmp_path / f"{seed}.smn").eval()
        assert torch.equal(outputs[-1], alone(images()))
    assert not torch.equal(*outputs)
