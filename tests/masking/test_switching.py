"""Views whose mask is exchanged in place: to the bit what `MaskedModel.view` makes, whatever was there before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.masking.switching import OffWeights, SpareView, Switch, can_pass


class Net(nn.Module):
    """Convolutions, a norm, a tied pair and a fused projection, whose parts have scales of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.more = nn.Conv2d(16, 16, 1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.one = nn.Linear(16, 16)
        self.two = nn.Linear(16, 16)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.more(self.norm(self.conv(x))).flatten(2).mT
        y, _ = self.attention(y, y, y)
        z: torch.Tensor = self.two(self.one(y)).mean(1)
        return z


def base() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    net.conv.weight.data[0, 0, 0, 0] = -0.0
    return net


def mask_file(path: Path, off: float, seed: int, **settings: object) -> Path:
    """A mask with this share of weights off, and statistics of its own."""
    masked = get_masked_model(base(), MaskConfig(**settings))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.fill_(1).masked_fill_(torch.rand(score.shape, generator=generator) < off, -1)
    masked.train()(torch.randn(4, 3, 9, 9, generator=generator))
    masked.eval().save_pretrained(path)
    return path


CASES: list[tuple[float, dict[str, object]]] = [
    (0.0, {}),
    (0.01, {}),
    (0.08, {}),
    (0.5, {}),
    (1.0, {}),
    (0.3, {"fraction": 0.4}),
    (0.1, {"alpha_of": "projection", "select": "all"}),
    (0.05, {"select": ("conv.weight",)}),
    (0.05, {"norm": "frozen"}),
]


def same_state(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, other.state_dict()[name]), name
            assert torch.equal(value.signbit(), other.state_dict()[name].signbit()), name


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_any_mask_in_place_of_any_other_is_the_view_of_it(tmp_path: Path, layout: torch.memory_format) -> None:
    net = base()
    files = [mask_file(tmp_path / f"{n}.smn", off, n, **settings) for n, (off, settings) in enumerate(CASES)]
    net.to(memory_format=layout)
    masked = MaskedModel(net)
    for number, file in enumerate(files):
        masked.load_mask(file, str(number))
    switches = [Switch.of(masked.read_mask(file), net) for file in files]
    spare, images = SpareView(net), torch.randn(2, 3, 9, 9)
    order = [*range(len(CASES)), *torch.randperm(len(CASES)).tolist(), 0, len(CASES) - 1]
    for number in order:
        spare.put(switches[number])
        expected = masked.view(str(number))
        same_state(expected, spare.module)
        assert torch.equal(expected(images), spare.module(images))
    spare.put(None)
    same_state(net, spare.module)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_passing_view_gives_the_same_vectors_and_holds_no_weights(
    tmp_path: Path, layout: torch.memory_format
) -> None:
    net = base()
    files = [mask_file(tmp_path / f"{n}.smn", off, n, **settings) for n, (off, settings) in enumerate(CASES)]
    net.to(memory_format=layout)
    masked = MaskedModel(net)
    for number, file in enumerate(files):
        masked.load_mask(file, str(number))
    switches = [Switch.of(masked.read_mask(file), net) for file in files]
    passing, spare, images = SpareView(net, passing=True), SpareView(net), torch.randn(2, 3, 9, 9)
    for number in [*range(len(CASES)), *torch.randperm(len(CASES)).tolist()]:
        passing.put(switches[number])
        expected = masked.view(str(number))(images)
        assert torch.equal(expected, passing.module(images))
        assert torch.equal(expected, passing.module(images))  # a second time, too
    passing.put(None)
    assert torch.equal(net(images), passing.module(images))
    spare.put(switches[-3])  # of all tensors
    assert passing.nbytes < spare.nbytes


class Sly(nn.Module):
    """Uses the weights of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.conv(x).mean((2, 3)), self.line.weight)


def test_whether_a_base_can_be_passed_is_found_by_trying() -> None:
    assert can_pass(base(), (9, 9))
    assert not can_pass(Sly().eval(), (9, 9))


def test_parts_of_a_weight_that_lies_across_memory_have_their_own_scales(tmp_path: Path) -> None:
    file, net = mask_file(tmp_path / "mask.smn", 0.1, 0, alpha_of="projection", select="all"), base()
    weight = net.attention.in_proj_weight
    weight.data = weight.data.T.contiguous().T
    masked, spare = MaskedModel(net), SpareView(net)
    spare.put(Switch.of(masked.read_mask(file), net))
    masked.load_mask(file, "mask")
    same_state(masked.view("mask"), spare.module)


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 100))
def test_what_is_off_is_kept_in_a_bit_a_weight_and_comes_back(count: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    on = random.random(count) >= share
    off = OffWeights.of(on, (2.0,))
    assert off.nbytes <= -(-count // 8)
    weight, out = torch.from_numpy(random.standard_normal(count).astype(np.float32)), torch.empty(count)
    off.write(weight, out)
    assert torch.equal(out, 2.0 * weight * torch.from_numpy(on))


@pytest.mark.parametrize("places", [(0,), (65_534, 65_535, 65_536), (65_535, 196_605), (399_999,), (131_070, 131_071)])
def test_gaps_may_be_wide(places: tuple[int, ...]) -> None:
    on = np.ones(400_000, bool)
    on[list(places)] = False
    off, out = OffWeights.of(on, (1.0,)), torch.empty(400_000)
    assert off.nbytes <= 2 * (len(places) + 6)
    off.write(torch.ones(400_000), out)
    assert np.flatnonzero(out == 0).tolist() == list(places)


def test_few_weights_off_take_memory_in_proportion() -> None:
    on = np.ones(1_000_000, dtype=bool)
    on[::10_000] = False
    assert OffWeights.of(on, (1.0,)).nbytes == 200
    on[::20] = False
    assert OffWeights.of(on, (1.0,)).nbytes == 125_000
