"""The fingerprint names the base: its tensors' names, types, shapes and bytes, as they are now."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from selfmask import MaskedModel, get_masked_model
from selfmask.errors import WrongBaseError
from selfmask.maskfile import Fingerprints

from . import smn
from .tiny import Tiny, masked_with


def fingerprint(**tensors: torch.Tensor) -> str:
    return Fingerprints().of(tensors)


BASE = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}


def test_it_is_what_the_specification_says() -> None:
    parts = {"a": ("float32", (2, 3), BASE["a"].numpy().tobytes()), "b": ("float32", (4,), BASE["b"].numpy().tobytes())}
    assert fingerprint(**BASE) == smn.base_hash(parts)
    half = {"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)}
    assert fingerprint(**half) == smn.base_hash({"w": ("bfloat16", (2,), b"\x80\x3f\x00\xc0")})


@pytest.mark.parametrize(
    "changed",
    [
        {"c": BASE["a"], "b": BASE["b"]},
        {"a": BASE["b"], "b": BASE["a"]},
        {"a": BASE["a"]},
        {**BASE, "c": torch.empty(0)},
        {"a": BASE["a"].view(3, 2), "b": BASE["b"]},
        {"a": BASE["a"].view(2, 3, 1), "b": BASE["b"]},
        {"a": BASE["a"].double(), "b": BASE["b"]},
        {"a": BASE["a"].view(torch.int32), "b": BASE["b"]},
        {"a": BASE["a"] + 1e-6, "b": BASE["b"]},
        {"a": -BASE["a"], "b": BASE["b"]},
        {"a": BASE["a"].t().contiguous().view(2, 3), "b": BASE["b"]},
    ],
    ids=["name", "swapped", "fewer", "more", "shape", "dims", "type", "view", "value", "sign", "order"],
)
def test_it_depends_on(changed: dict[str, torch.Tensor]) -> None:
    assert fingerprint(**changed) != fingerprint(**BASE)


def test_zeros_and_nans_are_told_apart_by_their_bits() -> None:
    assert fingerprint(a=torch.tensor([0.0])) != fingerprint(a=torch.tensor([-0.0]))
    assert fingerprint(a=torch.tensor([float("nan")])) == fingerprint(a=torch.tensor([float("nan")]))


def test_it_does_not_depend_on_order_layout_or_gradients() -> None:
    same = fingerprint(**BASE)
    assert fingerprint(b=BASE["b"], a=BASE["a"]) == same
    assert fingerprint(a=BASE["a"].t().contiguous().t(), b=nn.Parameter(BASE["b"])) == same
    assert fingerprint(a=BASE["a"].repeat(2, 2)[:2, :3], b=torch.ones(1).expand(4)) == same
    image = torch.randn(2, 3, 4, 5)
    assert fingerprint(a=image.to(memory_format=torch.channels_last)) == fingerprint(a=image)


def test_tensors_of_no_and_of_one_number() -> None:
    assert len({fingerprint(a=torch.empty(0)), fingerprint(a=torch.empty(0, 3)), fingerprint(a=torch.tensor(0.0))}) == 3


def test_it_knows_a_base_that_changed_in_place() -> None:
    """Hashes are remembered, because hashing a large base takes a while, but not beyond a change."""
    known = Fingerprints()
    tensors = {key: value.clone() for key, value in BASE.items()}
    first = known.of(tensors)
    assert known.of(tensors) == first
    tensors["a"][1, 1] += 1
    assert known.of(tensors) == fingerprint(**tensors) != first
    tensors["a"][1, 1] -= 1
    assert known.of(tensors) == first


# ---- on a model ---------------------------------------------------------------------------------------------------


def of_model(masked: MaskedModel) -> str:
    return masked.pack().fingerprint


def true_fingerprint(base: nn.Module) -> str:
    """Of a base as it is, by a model that never saw it before."""
    return of_model(get_masked_model(copy.deepcopy(base)))


def test_of_a_model_changed_in_place(base: Tiny) -> None:
    masked = masked_with(base)
    first = of_model(masked)
    with torch.no_grad():
        base.conv2.weight.mul_(2)
    assert of_model(masked) == true_fingerprint(base) != first


def test_of_a_model_with_a_new_checkpoint(base: Tiny) -> None:
    masked = masked_with(base)
    first = of_model(masked)
    base.load_state_dict(Tiny(seed=1).state_dict())
    assert of_model(masked) == true_fingerprint(Tiny(seed=1)) != first


def test_of_a_model_with_an_assigned_checkpoint(base: Tiny) -> None:
    """`assign=True` puts new tensors in place of the old ones, which then have as many changes behind them: none."""
    masked = masked_with(base)
    first = of_model(masked)
    base.load_state_dict(Tiny(seed=1).state_dict(), assign=True)
    assert of_model(masked) == true_fingerprint(Tiny(seed=1)) != first


def test_of_a_model_with_a_replaced_parameter(base: Tiny) -> None:
    base = copy.deepcopy(base)  # its tensors count no changes yet, nor does the new one
    masked = masked_with(base)
    first = of_model(masked)
    base.proj.weight = nn.Parameter(torch.zeros(40, 24), requires_grad=False)
    assert of_model(masked) == true_fingerprint(base) != first


def test_of_a_copy(base: Tiny) -> None:
    """A copy starts to count its changes anew; what was remembered of the original must not be taken for it."""
    base = copy.deepcopy(base)  # a base whose tensors count no changes yet
    masked = masked_with(base)
    first = of_model(masked)
    with torch.no_grad():
        base.conv2.weight.mul_(2)
    twin = copy.deepcopy(masked)
    assert of_model(twin) == true_fingerprint(base) != first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_conversion_of_the_masked_model_keeps_it(base: Tiny, dtype: torch.dtype) -> None:
    """The mask still belongs to the weights it was learned on, in whatever type they run."""
    masked = masked_with(base)
    first = of_model(masked)
    masked.to(dtype)
    assert base.conv1.weight.dtype == dtype
    assert of_model(masked) == first
    masked.float()
    assert of_model(masked) == first


def test_a_conversion_before_the_first_hash_keeps_it(base: Tiny) -> None:
    first = true_fingerprint(base)
    masked = get_masked_model(base).to(torch.bfloat16)
    assert of_model(masked) == first


def test_a_base_converted_by_itself_is_another(base: Tiny) -> None:
    """Nobody told us what it was converted from."""
    first = true_fingerprint(base)
    assert true_fingerprint(base.to(torch.bfloat16)) != first


def test_new_weights_after_a_conversion_are_noticed(base: Tiny) -> None:
    """What was kept through the conversion is not kept for ever."""
    masked = masked_with(base).to(torch.bfloat16)
    first = of_model(masked)
    base.load_state_dict(Tiny(seed=1).state_dict())
    assert of_model(masked) != first


def test_masks_of_the_old_weights_are_refused_after_new_ones(base: Tiny, tmp_path: Path) -> None:
    """The reason for all of the above."""
    masked = masked_with(base)
    masked.save_pretrained(tmp_path / "a.smn")
    base.load_state_dict(Tiny(seed=1).state_dict(), assign=True)
    with pytest.raises(WrongBaseError):
        masked.load_mask(tmp_path / "a.smn", "a")
