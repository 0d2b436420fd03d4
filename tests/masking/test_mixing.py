"""Images of different masks in one pass: the vectors of each are those of a view of its mask, but for rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from selfmask import MaskConfig, MaskedModel, get_masked_model
from selfmask.masking import mixed_view
from selfmask.masking.masked_product import LANES, PLACES, ROWS, masked_product
from selfmask.masking.mixed_masks import Own, Plan
from selfmask.masking.mixed_view import MixedView
from selfmask.masking.mixing import Mixing
from selfmask.masking.switching import OffWeights, SpareView, Switch

from . import test_switching as switched

LAYERS = ("one", "two", "three", "line", "last")


class Net(nn.Module):
    """Convolutions of several kinds, with and without bias, norms with and without scale, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 16, (3, 5), stride=(2, 1), padding=(1, 2), bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.two = nn.Conv2d(16, 24, 3, padding=2, dilation=2)
        self.bare = nn.BatchNorm2d(24, affine=False)
        self.three = nn.Conv2d(24, 24, 1, stride=2, bias=False)
        self.line = nn.Linear(24, 32)
        self.last = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.three(self.bare(self.two(self.norm(self.one(x)).relu()))).relu()
        z: torch.Tensor = self.last(self.line(y.flatten(2).mT).relu().mean(1))
        return z


def base() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    for norm in (net.norm, net.bare):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return net


def mask_file(path: Path, off: float, seed: int, **settings: object) -> Path:
    masked = get_masked_model(base(), MaskConfig(**{"select": tuple(f"{name}.weight" for name in LAYERS), **settings}))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.fill_(1).masked_fill_(torch.rand(score.shape, generator=generator) < off, -1)
    masked.train()(torch.randn(4, 3, 11, 9, generator=generator))
    masked.eval().save_pretrained(path)
    return path


def plan_of(net: nn.Module) -> Plan:
    """Every weight is used in about so many places of an image of 11 x 9 pixels."""
    counts = dict(zip(LAYERS, (54, 54, 15, 15, 1), strict=True))
    return Plan(net, {f"{name}.weight": count for name, count in counts.items()}, ("norm", "bare"))


CASES: list[tuple[float, dict[str, object]]] = [
    (0.0, {}),
    (0.01, {}),
    (0.08, {}),
    (0.6, {}),
    (0.05, {"select": ("two.weight", "line.weight")}),
    (0.08, {"norm": "frozen"}),
]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("many", [0, 20, 10_000])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_image_gets_the_vector_of_its_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: torch.memory_format, many: int, threads: int
) -> None:
    """Whether weights are masked as they come, or written, or both."""
    monkeypatch.setattr(mixed_view, "_MANY", many)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    net = base()
    files = [mask_file(tmp_path / f"{n}.smn", off, n, **settings) for n, (off, settings) in enumerate(CASES)]
    net.to(memory_format=layout)
    plan, mixing = plan_of(net), Mixing(plan_of(net), (11, 9))
    masked, spare, mixed = MaskedModel(net), SpareView(net), MixedView(plan)
    switches = [*(Switch.of(masked.read_mask(file), net) for file in files), Switch({}, {})]
    assert all(mixing.takes(each) for each in switches)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(len(switches), generator=generator).tolist()
        groups = [(number, int(torch.randint(1, 4, (), generator=generator))) for number in order]
        images = torch.randn(sum(count for _, count in groups), 3, 11, 9, generator=generator)
        images = images.contiguous(memory_format=layout)
        with torch.inference_mode():
            mixed.put([(mixing.own(switches[number]), count) for number, count in groups])
            found = mixed.module(images).split([count for _, count in groups])
            for (number, _), own, some in zip(groups, images.split([c for _, c in groups]), found, strict=True):
                spare.put(switches[number])
                torch.testing.assert_close(some, spare.module(own), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_layers_that_use_their_weights_in_few_places_mask_them_as_they_come() -> None:
    net = base().to(memory_format=torch.channels_last)
    kinds = {name: type(each).__name__ for name, each in MixedView(plan_of(net))._layers.items()}
    assert kinds["one.weight"] == "_Written"  # its rows cannot be divided into steps
    assert kinds["two.weight"] == kinds["last.weight"] == "_Masked"
    many = Plan(net, {**plan_of(net).places, "two.weight": 200}, ())
    assert type(MixedView(many)._layers["two.weight"]).__name__ == "_Written"


def _check_product(ons: list[np.ndarray], counts: tuple[int, ...], run: int) -> None:
    """By the naive product, for rows in several parts, and inputs that lie in two places each."""
    random, rows = np.random.default_rng(0), len(ons[0])
    weight = random.standard_normal((rows, 2 * run)).astype(np.float32)
    off = [OffWeights.of(on.ravel(), (1.0,)) for on in ons]
    codes = [each.gaps if each.bits is None else each.bits for each in off]
    ends = np.cumsum(counts[: len(ons)])
    x, runs = random.standard_normal(5 * run + 40).astype(np.float32), np.array([7, 2 * run + 1])
    starts, outs = random.integers(0, 30, ends[-1]), random.permutation(ends[-1]) * rows
    scales = random.random((len(ons), rows)).astype(np.float32)
    y = np.full(ends[-1] * rows, np.nan, np.float32)
    for first, last in ((0, 2 * ROWS), (2 * ROWS, rows)):
        masked_product(
            weight.ravel(), x, starts, runs, run, ends,
            np.array([code.ctypes.data for code in codes]),  # type: ignore[union-attr]
            np.array([-1 if each.bits is not None else len(each.gaps) for each in off]),  # type: ignore[arg-type]
            scales, y, outs, first, last,
        )  # fmt: skip
    for place in range(ends[-1]):
        mask = int(np.searchsorted(ends, place, side="right"))
        inputs = np.concatenate([x[starts[place] + each :][:run] for each in runs])
        right = scales[mask] * ((weight * ons[mask]) @ inputs)
        np.testing.assert_allclose(y[outs[place] : outs[place] + rows], right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shares", [(0.0,), (0.01, 0.4), (0.03, 1.0, 0.002)])
@pytest.mark.parametrize("counts", [(1, 1, 1), (PLACES, 2 * PLACES + 1, 3)])
def test_the_product_is_that_of_weights_with_zeros(shares: tuple[float, ...], counts: tuple[int, ...]) -> None:
    random, run = np.random.default_rng(0), 3 * LANES
    _check_product([random.random((4 * ROWS, 2 * run)) >= share for share in shares], counts, run)


def test_weights_that_are_off_may_be_far_apart() -> None:
    ons = [np.ones((4 * ROWS, 2 * 600 * LANES), bool) for _ in range(2)]
    for on, places in zip(ons, [(0, 131_070), (65_535, 65_536, -1)], strict=True):
        on.ravel()[list(places)] = False
    _check_product(ons, (2, 1), 600 * LANES)


def test_every_part_of_a_weight_has_a_scale_of_its_own() -> None:
    on = np.random.default_rng(0).random(24 * 144) > 0.05
    found = Own.of(Switch({"two.weight": OffWeights.of(on, (2.0, 3.0))}, {}), plan_of(base()))
    assert found.scales.tolist() == [1.0] * 16 + [2.0] * 12 + [3.0] * 12 + [1.0] * 64


@pytest.mark.parametrize("name", ["two.bias", "norm.weight", "other.weight"])
def test_a_mask_of_other_tensors_is_not_taken(name: str) -> None:
    assert not Mixing(plan_of(base()), (11, 9)).takes(Switch({name: OffWeights.of(np.ones(16, bool), (1.0,))}, {}))


def test_parts_that_are_not_whole_channels_are_not_taken() -> None:
    on = np.ones(24 * 144, bool)
    mixing = Mixing(plan_of(base()), (11, 9))
    assert mixing.takes(Switch({"two.weight": OffWeights.of(on, (1.0, 1.0, 1.0))}, {}))
    assert not mixing.takes(Switch({"two.weight": OffWeights.of(on, (1.0,) * 9)}, {}))


def test_statistics_of_other_norms_are_not_taken() -> None:
    assert not Mixing(plan_of(base()), (11, 9)).takes(Switch({}, {"other.running_mean": torch.zeros(4)}))


class Turned(nn.Module):
    """Has images elsewhere than in the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.line(self.conv(x).flatten(2).permute(2, 0, 1)).mean(0)
        return y


class Flat(nn.Module):
    """Is made for images of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(192, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.line(x.flatten(1))
        return y


class Normed(nn.Module):
    """Has a weight that is computed, and a first token that lies among others; names what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.spectral_norm(nn.Conv2d(3, 32, 3))
        self.line = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.line(input=self.conv(x).flatten(2).mT[:, 0])
        return y


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, groups=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x).mean((2, 3))
        return y


def test_whether_a_base_can_be_mixed_is_found_by_trying() -> None:
    found = Mixing.of(base(), (11, 9))
    assert found is not None
    assert found._plan.places == plan_of(base()).places
    assert found._plan.norms == ("norm", "bare")
    for net in (switched.Sly(), Turned(), Grouped()):
        found = Mixing.of(net.eval(), (9, 9))
        assert found is None or not found.takes(_of_all(net)), type(net)
    assert Mixing.of(nn.Flatten().eval(), (9, 9)) is None


def _of_all(net: nn.Module) -> Switch:
    weights = {name: each for name, each in net.named_parameters() if name.endswith("weight")}
    return Switch({name: OffWeights.of(np.ones(each.numel(), bool), (1.0,)) for name, each in weights.items()}, {})


def test_inputs_that_do_not_fit_are_refused() -> None:
    """Torch would do so, too; here, memory of others would be read."""
    found = Mixing.of(Flat().eval(), (8, 8))
    assert found is not None
    view = found.view()
    view.put([(found.own(Switch({}, {})), 1)])
    assert view.module(torch.zeros(1, 3, 8, 8)).shape == (1, 16)
    for wrong in (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 8, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="192 channels of float32"):
            view.module(wrong)


def test_layers_whose_weight_is_computed_are_left_out() -> None:
    found = Mixing.of(Normed().eval(), (8, 8))
    assert found is not None
    assert found._plan.places == {"line.weight": 1}


def test_a_base_that_fails_in_some_way_is_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_view, "MixedView", lambda plan: 1 // 0)
    assert Mixing.of(base(), (11, 9)) is None


def test_a_mixed_view_is_used_for_as_many_images_as_it_was_told() -> None:
    plan = plan_of(base())
    mixed = MixedView(plan)
    mixed.put([(Own.of(Switch({}, {}), plan), 2)])
    with pytest.raises(ValueError, match="2 images"):
        mixed.module(torch.randn(3, 3, 11, 9))
