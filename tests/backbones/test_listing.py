"""The list of backbones, in Python and on the command line."""

import json
from pathlib import Path

import pytest
import timm
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from selfmask.backbones import list_backbones, listing, names
from selfmask.cli.backbones import backbones
from selfmask.errors import UnknownBackboneError

app = typer.Typer()
app.command()(backbones)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_sizes_are_those_of_the_real_network() -> None:
    (info,) = list_backbones("resnet10t*")
    model = timm.create_model("resnet10t", num_classes=0).eval()
    assert info.parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        assert info.width == model(torch.zeros(1, 3, 64, 64)).shape[1]
    assert info.size == timm.get_pretrained_cfg("resnet10t").input_size[1:]


def test_a_pattern_finds_names_that_start_with_it_first() -> None:
    found = names("resnet1")
    assert found.index("resnet10t.c3_in1k") < found.index("seresnet152d.ra2_in1k")
    assert names("timm/resnet10t") == names("ResNet10T") == ["resnet10t.c3_in1k"]
    assert names("swav/*") == ["swav/resnet50"]
    assert "open_clip/ViT-B-32:openai" in names("open_clip/ViT-B-32*")


def test_a_pattern_without_match_is_answered_with_close_names() -> None:
    with pytest.raises(UnknownBackboneError, match="resnet18"):
        names("resnt18.a1_in1k")


def test_weights_on_this_machine_are_seen_and_listed(hub_cache: Path) -> None:
    name = "resnet10t.c3_in1k"
    assert name not in names()
    assert not list_backbones(name)[0].local
    folder = hub_cache / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1" * 40)
    (folder / "snapshots" / ("1" * 40)).mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, folder / "snapshots" / ("1" * 40) / "model.safetensors")
    assert name in names()
    assert list_backbones(name)[0].local


def test_the_command_shows_ours_and_how_to_find_more() -> None:
    shown = run()
    for name in ("selfmask/tiny", "swav/resnet50", "dino/resnet50", "vit_small_patch14_dinov2.lvd142m"):
        assert name in shown
    assert "selfmask backbones 'open_clip/*'" in shown


def test_the_command_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LIMIT", 2)
    shown = run("resnet18")
    first, second, third, *_ = names("resnet18")
    assert first in shown
    assert second in shown
    assert third not in shown
    assert f"the first 2 of {len(names('resnet18'))} matches" in shown


def test_json_is_the_same_list() -> None:
    listed = json.loads(run("/resnet50", "--json"))
    assert [entry["name"] for entry in listed] == ["swav/resnet50", "dino/resnet50"]
    assert listed[0]["width"] == 2048
    assert listed[0]["local"] is False
