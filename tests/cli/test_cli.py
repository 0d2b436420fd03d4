"""The command line as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from selfmask import MaskConfig, get_masked_model

from .inside import selfmask


@pytest.fixture
def mask_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3))
    masked = get_masked_model(model, MaskConfig(rule="topk", active_share=0.75))
    masked.save_pretrained(tmp_path / "a.smn", notes="[bold]not markup[/bold]")
    return tmp_path / "a.smn"


def test_inspect_shows_sizes_layers_and_notes(mask_file: Path) -> None:
    result = selfmask("inspect", str(mask_file))
    assert result.returncode == 0, result.stderr
    assert "75.00%" in result.stdout
    assert f"{mask_file.stat().st_size:,}" in result.stdout
    assert "[bold]not markup[/bold]" in result.stdout


def test_inspect_json_adds_up(mask_file: Path) -> None:
    found = json.loads(selfmask("inspect", str(mask_file), "--json").stdout)
    sizes = found["bytes"]
    assert sizes["file"] == mask_file.stat().st_size
    assert sizes["file"] == sizes["masks"] + sizes["norm"] + sizes["head"] + sizes["words"]
    weights = 16 * 3 * 9 + 16 + 32 * 16 * 9 + 32
    assert (found["bits"], sizes["float32"], sizes["norm"]) == (weights, 4 * weights, 4 * 2 * 16)
    assert found["active_share"] == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize("content", [None, b"", b"text, not a mask", b"\xff" * 64])
def test_inspect_of_anything_else_is_an_error_with_advice(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.smn"
    if content is not None:
        path.write_bytes(content)
    result = selfmask("inspect", str(path))
    assert result.returncode == 2
    assert "error:" in result.stderr
    assert "do:" in result.stderr
    assert "Traceback" not in result.stderr


def test_damage_is_seen_without_the_base(mask_file: Path) -> None:
    data = bytearray(mask_file.read_bytes())
    data[-3] ^= 1
    mask_file.write_bytes(data)
    result = selfmask("inspect", str(mask_file))
    assert result.returncode == 2
    assert "altered" in result.stderr


def test_help_names_every_verb() -> None:
    result = selfmask("--help")
    assert result.returncode == 0
    for verb in ("adapt", "embed", "evaluate", "inspect", "backbones", "demo", "pretrain"):
        assert verb in result.stdout


def test_help_comes_at_once() -> None:
    """Nothing of torch is imported for it."""
    code = "import sys, selfmask.cli; sys.exit(any(name in sys.modules for name in ('torch', 'timm', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
