"""Files of weights: every wrapping that training code puts around them, and every way they can be wrong."""

import argparse
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from selfmask.backbones import TinyResNet, load_backbone
from selfmask.errors import BadWeightsError

StateDict = dict[str, Tensor]
NAME = "selfmask/tiny"


@pytest.fixture(scope="module")
def trained() -> StateDict:
    torch.manual_seed(7)
    model = TinyResNet().train()
    model(torch.randn(8, 3, 32, 32))  # moves the statistics
    return {key: value.clone() for key, value in model.state_dict().items()}


def prefixed(prefix: str, tensors: StateDict) -> StateDict:
    return {prefix + key: value for key, value in tensors.items()}


def other(tensors: StateDict) -> StateDict:
    return {key: value * 0 for key, value in tensors.items()}


HEADS = {
    "fc.weight": torch.zeros(10, 256),
    "head.mlp.0.weight": torch.zeros(10, 256),
    "projection_head.0.weight": torch.zeros(8, 256),
    "prototypes.weight": torch.zeros(5, 8),
}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sd: sd,
        lambda sd: {**sd, **HEADS},
        lambda sd: prefixed("module.", {**sd, **HEADS}),
        lambda sd: prefixed("backbone.", sd) | prefixed("head.", HEADS),
        lambda sd: prefixed("module.encoder_q.", sd) | {"module.queue": torch.zeros(4)},
        lambda sd: {"state_dict": prefixed("module.", sd), "epoch": 3, "optimizer": {"state": {}}},
        lambda sd: {"model": sd, "args": argparse.Namespace(lr=0.1)},
        lambda sd: {"student": other(sd), "teacher": prefixed("module.backbone.", sd)},
        lambda sd: prefixed("student.backbone.", other(sd)) | prefixed("teacher.backbone.", sd),
        lambda sd: {key: value for key, value in sd.items() if not key.endswith("num_batches_tracked")},
    ],
    ids=["plain", "heads", "module", "backbone", "moco", "nested", "args", "dino", "flat-teacher", "old"],
)
def test_wrappings_do_not_matter(wrap: Callable[[StateDict], Any], trained: StateDict, tmp_path: Path) -> None:
    torch.save(wrap(trained), tmp_path / "a.pth")
    backbone = load_backbone(NAME, weights=tmp_path / "a.pth")
    for key, value in backbone.model.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert torch.equal(value, trained[key]), key
    assert str(tmp_path / "a.pth") in backbone.note


def test_safetensors_and_half_precision(trained: StateDict, tmp_path: Path) -> None:
    save_file({key: value.half() for key, value in trained.items()}, tmp_path / "a.safetensors")
    model = load_backbone(NAME, weights=tmp_path / "a.safetensors").model
    assert torch.equal(model.stem.conv.weight, trained["stem.conv.weight"].half().float())  # type: ignore[union-attr]


def test_missing_misshapen_and_surplus_tensors_are_told(trained: StateDict, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({key: value for key, value in trained.items() if "layer2" not in key}, path)
    with pytest.raises(BadWeightsError, match=r"15 missing: layer2\.0\.conv1\.weight"):
        load_backbone(NAME, weights=path)
    torch.save({**trained, "stem.conv.weight": torch.zeros(32, 3, 7, 7)}, path)
    with pytest.raises(BadWeightsError, match=r"stem\.conv\.weight \(32, 3, 7, 7\) instead of \(32, 3, 3, 3\)"):
        load_backbone(NAME, weights=path)
    torch.save({**trained, "layer3.1.conv1.weight": torch.zeros(256, 256, 3, 3)}, path)
    with pytest.raises(BadWeightsError, match=r"1 too many: layer3\.1\.conv1\.weight"):
        load_backbone(NAME, weights=path)


def test_weights_of_a_deeper_network_are_refused(tmp_path: Path) -> None:
    """It has every tensor of the shallower one, in the same shapes, and would load without a complaint."""
    with torch.device("meta"):
        deeper = timm.create_model("resnet26t", num_classes=10)
    tensors = {key: torch.zeros(value.shape, dtype=torch.half) for key, value in deeper.state_dict().items()}
    save_file(tensors, tmp_path / "resnet26t.safetensors")
    with pytest.raises(BadWeightsError, match=r"found: +\d+ too many: layer1\.1"):
        load_backbone("resnet14t", weights=tmp_path / "resnet26t.safetensors")


class Attack:
    """What a hostile pickle looks like: unpickling it runs a command."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


def test_code_in_a_file_is_never_run(tmp_path: Path, trained: StateDict) -> None:
    torch.save({**trained, "extra": Attack(tmp_path / "owned")}, tmp_path / "a.pth")
    with pytest.raises(BadWeightsError, match="pickled code is never executed"):
        load_backbone(NAME, weights=tmp_path / "a.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "b.pth")
    with pytest.raises(BadWeightsError, match="state_dict"):
        load_backbone(NAME, weights=tmp_path / "b.pth")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("how", ["compressed", "one for all"])
def test_what_would_take_more_memory_than_it_takes_in_the_file_is_refused(
    how: str, tmp_path: Path, trained: StateDict
) -> None:
    torch.save({**trained, "other": torch.zeros(1 << 22)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "a.pt", "w") as bomb:
        for name in whole.namelist():
            if how == "compressed":
                bomb.writestr(name, whole.read(name), zipfile.ZIP_DEFLATED)
            else:
                bomb.writestr(name, whole.read(name))
        if how == "one for all":
            largest = max(bomb.infolist(), key=lambda member: member.file_size)
            for member in bomb.infolist():
                member.header_offset, member.file_size = largest.header_offset, largest.file_size
    with pytest.raises(BadWeightsError, match=r"compressed|more than"):
        load_backbone(NAME, weights=tmp_path / "a.pt")
    load_backbone(NAME, weights=tmp_path / "whole.pt")


def test_a_tensor_that_is_called_a_folder_is_refused(tmp_path: Path, trained: StateDict) -> None:
    """In its place torch gives whatever is in memory just now, and says nothing."""
    torch.save(trained, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "a.pt", "w") as other:
        for name in whole.namelist():
            member = zipfile.ZipInfo(name)
            member.external_attr = 0x10 if name.endswith("/data/0") else 0
            other.writestr(member, whole.read(name))
    with pytest.raises(BadWeightsError, match="folder"):
        load_backbone(NAME, weights=tmp_path / "a.pt")


@pytest.mark.parametrize("file", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"no weights", b"\xff" * 64, b"PK\x03\x04" + bytes(40)])
def test_anything_else_is_an_error_with_advice(tmp_path: Path, file: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(BadWeightsError):
        load_backbone(NAME, weights=tmp_path / file)


def test_a_list_of_tensors_is_no_state_dict(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "a.pt")
    with pytest.raises(BadWeightsError, match="a list"):
        load_backbone(NAME, weights=tmp_path / "a.pt")


def test_a_cut_file_is_an_error(tmp_path: Path, trained: StateDict) -> None:
    for file, save in (("a.pth", torch.save), ("a.safetensors", save_file)):
        save(trained, tmp_path / file)
        whole = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(BadWeightsError, match="cannot read"):
            load_backbone(NAME, weights=tmp_path / file)


def test_files_of_other_publishers_are_translated_as_timm_does(tmp_path: Path) -> None:
    """Positions learned at 384 pixels are resampled for 224, as timm's own loader does it."""
    torch.manual_seed(1)
    large = timm.create_model("vit_tiny_patch16_384", num_classes=0).state_dict()
    torch.save({"model": large}, tmp_path / "large.pth")
    ours = load_backbone("vit_tiny_patch16_224", weights=tmp_path / "large.pth").model
    oracle = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, pretrained=True, pretrained_cfg_overlay={"state_dict": large}
    )
    for key, value in oracle.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
