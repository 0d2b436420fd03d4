"""A mask is only as good as its base: all of it is checked, not only what is masked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.errors import BaseWarning, WrongBaseError
from selfmask.maskfile import state_of


class Wide(nn.Module):
    """Ten convolutions to mask, and thirty other parameters, beside statistics, a table and a head that is not run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([nn.Conv2d(3, 3, 1) for _ in range(10)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(3) for _ in range(10)])
        self.head = nn.Linear(3, 2)
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.shift: Tensor
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x))
        return (x.mean((2, 3)) + self.shift) * self.table


CONFIG = MaskConfig(select=["convs.*.weight"])


@pytest.fixture
def mask() -> bytes:
    return get_masked_model(Wide().eval(), CONFIG).mask_bytes()


def load(base: nn.Module, mask: bytes) -> MaskedModel:
    return MaskedModel.from_pretrained(base.eval(), mask)


def test_scrambled_parameters_that_are_not_masked(mask: bytes) -> None:
    base = Wide()
    others = [p for name, p in base.named_parameters() if "convs" not in name or "bias" in name][:30]
    with torch.no_grad():
        for parameter in others[:20]:
            parameter.copy_(torch.randn(parameter.shape))
    assert len(others) == 30
    with pytest.raises(WrongBaseError, match="another beside them"):
        load(base, mask)


def test_every_tensor_counts_but_the_counters(mask: bytes) -> None:
    load(Wide(), mask)
    names = [*dict(Wide().named_parameters()), *dict(Wide().named_buffers())]
    for name in names:
        base = Wide()
        tensor = dict([*base.named_parameters(), *base.named_buffers()])[name]
        with torch.no_grad():
            tensor.add_(1)
        if name.endswith("num_batches_tracked"):
            load(base, mask)
        elif name == "table":
            with pytest.warns(BaseWarning, match="not persistent"):
                load(base, mask)
        else:
            with pytest.raises(WrongBaseError):
                load(base, mask)


def test_a_head_that_is_missing_or_new(mask: bytes) -> None:
    base = Wide()
    base.head = nn.Identity()
    with pytest.raises(WrongBaseError, match=r"(?s)63 tensors.*61 tensors.*head \(or without one"):
        load(base, mask)
    bare = get_masked_model(base.eval(), CONFIG).mask_bytes()
    with pytest.raises(WrongBaseError, match=r"(?s)61 tensors.*63 tensors"):
        load(Wide(), bare)


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight if tied else nn.Parameter(self.first.weight.detach().clone())
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def test_tied_tensors_count_under_each_name() -> None:
    """Whether equal values share their memory decides nothing, unless one is masked and the other is not."""
    assert set(state_of(Tied(True)).stored) == set(Tied(True).state_dict())
    config = MaskConfig(select=["scale"])
    mask = get_masked_model(Tied(True), config).mask_bytes()
    MaskedModel.from_pretrained(Tied(False), mask)
    other = Tied(False)
    with torch.no_grad():
        other.second.weight.add_(1)
    with pytest.raises(WrongBaseError):
        MaskedModel.from_pretrained(other, mask)


def test_running_a_base_does_not_make_it_another(mask: bytes) -> None:
    """Nor do caches that it fills on the way, or counters."""
    masked = get_masked_model(Wide(), MaskConfig(select=CONFIG.select))
    first = masked.pack().base_fingerprint
    masked.train()
    masked(torch.randn(4, 3, 5, 5)).sum().backward()
    masked.eval()
    with torch.inference_mode():
        masked.base.table = torch.ones(1)  # a table made on the way, in inference mode
        masked(torch.randn(4, 3, 5, 5))
    assert masked.pack().base_fingerprint == first
    load(Wide(), masked.mask_bytes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_conversion_keeps_it(mask: bytes, dtype: torch.dtype) -> None:
    masked = load(Wide(), mask)
    first = masked.pack()
    converted = masked.to(dtype).pack()
    assert converted.base_fingerprint == first.base_fingerprint
    trained = get_masked_model(Wide().eval(), CONFIG).to(dtype)
    assert trained.pack().base_fingerprint == first.base_fingerprint
    assert trained.pack().tables_fingerprint == first.tables_fingerprint


def test_each_tensor_is_hashed_once(mask: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfmask.maskfile import fingerprint

    hashed: list[str] = []
    real = fingerprint.tensor_digest
    monkeypatch.setattr(fingerprint, "tensor_digest", lambda name, tensor: hashed.append(name) or real(name, tensor))
    masked = load(Wide(), mask)
    for name in ("a", "b"):
        masked.load_mask(mask, name)
    state = state_of(masked.base)
    assert sorted(hashed) == sorted([*state.stored, *state.tables])
