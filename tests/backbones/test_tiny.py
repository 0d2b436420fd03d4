"""The bundled network."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import TinyResNet, load_backbone, tiny
from selfmask.errors import WeightsUnavailableError


def test_random_weights_are_the_same_every_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    first = load_backbone("selfmask/tiny", pretrained=False)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    second = load_backbone("selfmask/tiny", pretrained=False)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert "random" in first.note


@pytest.mark.parametrize("size", [(32, 32), (9, 9), (96, 64)])
def test_maps_images_of_any_size_to_vectors(size: tuple[int, int]) -> None:
    backbone = load_backbone("selfmask/tiny", pretrained=False)
    with torch.no_grad():
        vectors = backbone.model(torch.randn(2, 3, *size))
    assert vectors.shape == (2, backbone.width) == (2, 256)
    assert vectors.isfinite().all()
    assert not backbone.model.training


def test_is_small_and_cheap() -> None:
    model = TinyResNet().eval()
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 3_000_000
    assert 2 * sum(value.numel() for value in model.state_dict().values()) < 5_000_000
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert 40e6 < counter.get_total_flops() / 2 < 60e6


def test_bundled_half_precision_weights_are_computed_in_single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = TinyResNet().state_dict()
    halves = {key: value.half() if value.is_floating_point() else value for key, value in stored.items()}
    save_file(halves, tmp_path / "tiny.safetensors")
    monkeypatch.setattr(tiny, "WEIGHTS", tmp_path / "tiny.safetensors")
    model = load_backbone("selfmask/tiny").model
    for key, value in model.state_dict().items():
        assert value.dtype == stored[key].dtype
        assert torch.equal(value, halves[key].to(value.dtype))


def test_missing_bundled_weights_are_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "WEIGHTS", tmp_path / "tiny.safetensors")
    with pytest.raises(WeightsUnavailableError, match="--weights"):
        load_backbone("selfmask/tiny")


def test_masks_fall_into_its_stages_and_carry_its_name() -> None:
    backbone = load_backbone("selfmask/tiny", pretrained=False)
    masked = get_masked_model(backbone.model, MaskConfig(select="stages:1-3"))
    assert all(name.startswith("layer") for name in masked.sparsity() if name != "total")
    assert (masked.base_name, masked.preprocessing) == ("selfmask/tiny", backbone.preprocessing)
