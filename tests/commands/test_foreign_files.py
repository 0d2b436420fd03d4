"""Files that others made, on the command line: what they may choose, and what they may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfmask import MaskedModel, get_masked_model
from selfmask.backbones import at_hand, load_backbone, loading
from selfmask.commands.opening import load_embedder
from selfmask.errors import EmbedderError, OversizedImagesError, WrongBaseError
from selfmask.maskfile import write_mask_file

from ..cli.inside import selfmask
from ..embedding.samples import pictures, weights_file
from ..maskfile import smn

NAME = "selfmask/tiny"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    weights = weights_file(folder)
    masked = get_masked_model(load_backbone(NAME, weights=weights).model)
    masked.save_pretrained(folder / "mask.smn")
    write_mask_file(folder / "plain.smn", masked.pack(), {})  # with statistics as they are
    pictures(folder / "photos", 2)
    return folder


def edited(place: Path, to: Path, edit: Callable[[smn.Smn], object], of: str = "mask.smn") -> Path:
    file = smn.parse((place / of).read_bytes())
    edit(file)
    to.write_bytes(smn.build(file))
    return to


def named(name: Any) -> Callable[[smn.Smn], object]:
    return lambda file: file.manifest.update(base_name=name)


def embed(place: Path, mask: Path, *more: str) -> Any:
    weights = ("--weights", place / "tiny.safetensors")
    return selfmask("embed", mask, place / "photos", "--out", mask.parent / "a.npz", *weights, *more)


def version_1(file: smn.Smn) -> None:
    file.metadata["version"] = "1"
    for key in ("base_fingerprint", "base_tensors", "tables_fingerprint", "extensions"):
        del file.manifest[key]


def test_a_mask_of_version_1_warns_in_one_line(place: Path, tmp_path: Path) -> None:
    done = embed(place, edited(place, tmp_path / "old.smn", version_1, of="plain.smn"))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("warning: this mask is from a file of format version 1: only the ")
    assert "could be checked, not the other" in line
    assert "warning" not in embed(place, place / "mask.smn", "--out", str(tmp_path / "b.npz")).stderr


HUB = ["transformers/someone/anything", "transformers//etc", "open_clip/ViT-B-32:openai", "resnet50", "dino/resnet50"]


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize("where", ["mask", "run"])
def test_a_file_does_not_choose_what_is_downloaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    """Unattended, nothing is asked of the network and nothing is built: the user has to name it."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this name was followed")

    monkeypatch.setattr(loading, "fetch", refuse)
    monkeypatch.setattr(loading, "without_weights", refuse)
    edited(place, tmp_path / "mask.smn", named(name if where == "mask" else None))
    what = tmp_path / "mask.smn"
    if where == "run":
        (tmp_path / "config.json").write_text(json.dumps({"backbone": name, "weights": None}))
        what = tmp_path
    done = selfmask("embed", what, place / "photos", "--out", tmp_path / "a.npz")
    assert done.returncode == 2
    assert f"--backbone {name}" in done.stderr
    asked: list[str] = []
    with pytest.raises(EmbedderError, match="--backbone"):
        load_embedder(what, may_use=lambda name: bool(asked.append(name)))
    assert asked == [name]


def test_what_is_at_hand(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = place / "tiny.safetensors"
    assert at_hand(NAME, None)
    assert at_hand("resnet50", weights)  # built by installed code, and filled from a file that the user gave
    assert not at_hand("open_clip/ViT-B-32", weights)
    assert not at_hand(f"transformers/{tmp_path}", weights)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert not at_hand("swav/resnet50", None)
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    (tmp_path / "hub/checkpoints/swav_800ep_pretrain.pth.tar").write_bytes(b"")
    assert at_hand("swav/resnet50", None)


def test_shapes_are_compared_before_memory_is_asked_for(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small mask that names a huge network, with a file of weights that the user gave for another."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(loading, "_with_weights", refuse)
    mask = edited(place, tmp_path / "a.smn", named("vit_giant_patch14_dinov2"))
    with pytest.raises(WrongBaseError, match="another backbone than vit_giant"):
        load_embedder(mask, weights=place / "tiny.safetensors")


def sized(side: int) -> Callable[[smn.Smn], object]:
    return lambda file: file.manifest["preprocessing"].update(size=[side, side])


def test_a_file_does_not_choose_how_much_memory_images_take(place: Path, tmp_path: Path) -> None:
    mask = edited(place, tmp_path / "a.smn", sized(2048))
    done = embed(place, mask)
    assert done.returncode == 2
    assert "--size 2048" in done.stderr
    with pytest.raises(OversizedImagesError):
        load_embedder(mask, weights=place / "tiny.safetensors")
    assert load_embedder(mask, weights=place / "tiny.safetensors", size=40).preprocessing.size == (40, 40)
    assert embed(place, mask, "--size", "40").returncode == 0
    assert load_embedder(NAME, weights=place / "tiny.safetensors", size=40).preprocessing.size == (40, 40)


def test_deviations_of_zero_are_no_vectors_of_nan(place: Path, tmp_path: Path) -> None:
    mask = edited(place, tmp_path / "a.smn", lambda file: file.manifest["preprocessing"].update(std=[0, 0, 0]))
    done = embed(place, mask)
    assert done.returncode == 2
    assert "manifest of the mask file is damaged" in done.stderr
    assert not (tmp_path / "a.npz").exists()


def test_inspect_prints_no_nan(place: Path, tmp_path: Path) -> None:
    def edit(file: smn.Smn) -> None:
        file.manifest["config"]["mu"] = float("nan")

    done = selfmask("inspect", edited(place, tmp_path / "a.smn", edit), "--json")
    assert done.returncode == 2
    done = selfmask("inspect", place / "mask.smn", "--json")
    told = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(word))
    assert (told["version"], set(told["extensions"]), len(told["base_fingerprint"])) == ("2", {"norm_codes"}, 64)


def test_the_vectors_are_those_of_the_mask(place: Path) -> None:
    embedder = load_embedder(place / "mask.smn", weights=place / "tiny.safetensors")
    assert isinstance(embedder.model, MaskedModel)
    with torch.no_grad():
        assert embedder.model(torch.zeros(1, 3, 32, 32)).shape == (1, 256)
