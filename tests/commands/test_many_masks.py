"""`masks`, `combine` and `find`, as a user calls them, on the bundled network and pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import load_backbone
from selfmask.cli.adapt import NOTHING_GAINED
from selfmask.commands.find import find
from selfmask.commands.masks import pack_masks, unpack_masks
from selfmask.commands.opening import load_embedder
from selfmask.data import open_images
from selfmask.embedding.vectors import embed
from selfmask.errors import DifferentMasksError, MaskWriteError, NotAMaskFileError

from ..cascade.small import fitted
from ..cli.inside import Done, selfmask
from .test_verbs import TINY, clothes


def save(file: Path, seed: int, off: float = 0.02, *, licence: str | None = None, **config: Any) -> Path:
    """A mask on the bundled network that leaves out some weights by chance."""
    found = load_backbone(TINY)
    masked = get_masked_model(found.model, MaskConfig(**config))
    masked.base_name, masked.preprocessing = TINY, found.preprocessing
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for score in masked.scores.values():
            score.copy_((torch.rand(score.shape, generator=chance) >= off).float() * 2 - 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    masked.save_pretrained(file, notes=f"seed {seed}", licence=licence)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("masks")
    save(place / "a.smn", 1, licence="CC-BY-4.0")
    save(place / "b.smn", 2, licence="MIT")
    save(place / "noise.smn", 3, off=0.6)
    run = save(place / "run/mask.smn", 4).parent
    (run / "result.json").write_text(json.dumps({"kept": "mask", "quality_before": 0.2, "quality_after": 0.3}))
    return place


def as_json(done: Done, code: int = 0) -> Any:
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


# ---- masks --------------------------------------------------------------------------------------------------------


def test_a_folder_is_listed_with_what_is_broken(tmp_path: Path, folder: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "masks")
    data = bytearray((place / "a.smn").read_bytes())
    data[-3] ^= 1  # of the content, which the header does not tell
    (place / "damaged.smn").write_bytes(data)
    (place / "text.smn").write_text("no mask")
    (place / "with space.smn").write_bytes((place / "a.smn").read_bytes())
    (place / "notes.txt").write_text("")
    fitted(tmp_path, experts=2, images=60).save(place / "some" / "cascade.smn")
    found = {each["name"]: each for each in as_json(selfmask("masks", place, "--json"))}
    assert list(found) == ["a", "b", "damaged", "noise", "run", "some", "text", "with space"]
    assert (found["a"]["licence"], found["a"]["base"], found["a"]["notes"]) == ("CC-BY-4.0", TINY, "seed 1")
    assert 0.97 < found["a"]["active"] < 0.99
    assert found["a"]["bytes"] == (place / "a.smn").stat().st_size
    assert (found["run"]["quality_after"], found["a"]["quality_after"]) == (0.3, None)
    assert "altered" in found["damaged"]["problem"]
    assert found["text"]["problem"]
    assert found["some"]["kind"] == "cascade"
    shown = selfmask("masks", place).stdout
    assert "0.200 to 0.300" in shown
    assert "broken" in shown
    assert "8 masks" in shown


def test_a_list_is_filtered(folder: Path) -> None:
    def names(*words: str) -> list[str]:
        return [each["name"] for each in as_json(selfmask("masks", folder, "--json", *words))]

    assert names("--licence", "mit") == ["b"]
    assert names("--licence", "cc-*") == ["a"]
    assert names("--base", "tiny") == ["a", "b", "noise", "run"]
    assert names("--base", "resnet*") == []
    assert selfmask("masks", folder / "none").returncode == 2
    assert selfmask("masks", folder, "--out", "x").returncode == 2
    assert selfmask("masks", "pack", folder).returncode == 2


def test_a_pack_gives_back_the_same_files(tmp_path: Path, folder: Path) -> None:
    pack, again = tmp_path / "masks.pack", tmp_path / "again"
    done = as_json(selfmask("masks", "pack", folder, "--out", pack, "--json"))
    assert (done["masks"], done["bytes"]) == (4, pack.stat().st_size)
    files = {name: (folder / name).read_bytes() for name in ("a.smn", "b.smn", "noise.smn")}
    files["run.smn"] = (folder / "run/mask.smn").read_bytes()
    assert done["file_bytes"] == sum(map(len, files.values())) > done["bytes"]
    assert selfmask("masks", "unpack", pack, "--out", again).returncode == 0
    assert {path.name: path.read_bytes() for path in again.iterdir()} == files
    assert selfmask("masks", "unpack", pack, "--out", again).returncode == 0  # the same once more
    listed = {each["name"]: each for each in as_json(selfmask("masks", pack, "--json", "--licence", "cc"))}
    assert list(listed) == ["a"]
    assert listed["a"]["active"] == pytest.approx(0.98, abs=0.01)
    (again / "b.smn").write_bytes(files["a.smn"])
    with pytest.raises(MaskWriteError, match="another file"):
        unpack_masks(pack, again)
    assert (again / "b.smn").read_bytes() == files["a.smn"]
    assert "selfmask masks" in selfmask("inspect", pack).stderr


def test_nothing_is_left_out_of_a_pack_in_silence(tmp_path: Path, folder: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "masks")
    (place / "text.smn").write_text("no mask")
    with pytest.raises(DifferentMasksError, match="1 of the files"):
        pack_masks(place, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotAMaskFileError, match="no masks"):
        pack_masks(tmp_path / "empty", tmp_path / "pack")


# ---- combine --------------------------------------------------------------------------------------------------------


def test_masks_are_combined_into_a_file(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "c.smn"
    masks = [folder / "a.smn", folder / "b.smn", folder / "run"]
    shares = {}
    for how in ("and", "vote", "or"):
        told = as_json(selfmask("combine", *masks, "--how", how, "--out", out, "--json"))
        shares[how] = told["active"]
        assert told["bytes"] == out.stat().st_size
        assert (told["images"], told["licence"]) == (None, None)
        assert load_embedder(out).model.sparsity()["total"] == pytest.approx(told["active"])
    assert shares["and"] < min(told["actives"]) < shares["vote"] < shares["or"] <= 1
    assert "or of them" in selfmask("combine", *masks[:2], "--how", "or", "--out", out).stdout


@pytest.mark.parametrize("norm", [pytest.param("anchored", marks=pytest.mark.heavy), "recalibrate"])
def test_statistics_are_taken_from_images(tmp_path: Path, norm: str) -> None:
    """As a run on these images takes them: the bits are the same, and the statistics those of the combined mask."""
    masks = [save(tmp_path / f"{seed}.smn", seed, 0.1, norm=norm) for seed in range(2)]
    photos = clothes(tmp_path / "photos", range(40))
    for name, words in {"means": (), "images": ("--images", photos)}.items():
        told = as_json(selfmask("combine", *masks, "--out", tmp_path / name, "--json", *words))
        assert told["images"] == (40 if words else None)
    means, taken = (load_embedder(tmp_path / name).model.pack() for name in ("means", "images"))
    assert means.sha256 == taken.sha256
    assert any(not torch.equal(value, taken.norm[name]) for name, value in means.norm.items())
    if norm == "recalibrate":
        model = load_embedder(tmp_path / "images")
        seen: list[torch.Tensor] = []
        first = next(module for module in model.model.base.modules() if isinstance(module, torch.nn.BatchNorm2d))
        first.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        embed(model.model, open_images(str(photos)), model.preprocessing, batch_size=64)
        name = next(name for name, module in model.model.base.named_modules() if module is first)
        own = seen[0].mean((0, 2, 3))
        torch.testing.assert_close(taken.norm[f"{name}.running_mean"], own, rtol=0.05, atol=0.05)


def test_what_cannot_be_combined_is_said(tmp_path: Path, folder: Path) -> None:
    other = save(tmp_path / "other.smn", 1, select="late")
    done = selfmask("combine", folder / "a.smn", other, "--out", tmp_path / "c.smn")
    assert (done.returncode, "different weights" in done.stderr) == (2, True)
    foreign = tmp_path / "foreign.smn"
    get_masked_model(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3))).save_pretrained(foreign)
    done = selfmask("combine", folder / "a.smn", foreign, "--out", tmp_path / "c.smn", "--json")
    assert (done.returncode, json.loads(done.stdout)["kind"]) == (2, "WrongBaseError")
    assert selfmask("combine", folder / "a.smn", "--out", tmp_path / "c.smn").returncode == 2
    assert not (tmp_path / "c.smn").exists()


# ---- find -----------------------------------------------------------------------------------------------------------


def test_few_images_prove_little(tmp_path: Path, folder: Path) -> None:
    photos = clothes(tmp_path / "photos", range(12))
    told = as_json(selfmask("find", folder, photos, "--licence", "*mit*", "--json"), NOTHING_GAINED)
    assert {place["name"] for place in told["masks"]} == {"b", "frozen"}
    assert (told["helps"], told["images"], told["skipped"]) == (False, 12, {})
    assert told["passes"] == told["all_passes"]


@pytest.mark.heavy
def test_the_frozen_backbone_is_found_where_no_mask_fits(tmp_path: Path, folder: Path) -> None:
    photos = clothes(tmp_path / "photos", range(100))
    told = as_json(selfmask("find", folder, photos, "--json"), NOTHING_GAINED)
    places = {place["name"]: place for place in told["masks"]}
    assert set(places) == {"a", "b", "noise", "run", "frozen"}
    assert places["noise"]["worse"]  # 60 % of its weights are off
    assert (places["noise"]["images"], places["frozen"]["images"]) == (64, 100)
    assert places["frozen"]["gain"] == 0
    assert (told["helps"], told["images"]) == (False, 100)
    assert told["passes"] < told["all_passes"] == 5 * told["images"] * 6  # a network, five copies
    shown = selfmask("find", folder, photos)
    assert shown.returncode == NOTHING_GAINED
    assert "no mask is proven better" in shown.stdout


@pytest.mark.heavy
def test_the_mask_that_helps_is_found(tmp_path: Path) -> None:
    """The weights of the backbone were spoiled in places; one mask leaves out just these, the others do not."""
    photos = open_images(str(clothes(tmp_path / "photos", range(100))))
    model = load_backbone(TINY).model
    chance = torch.Generator().manual_seed(0)
    spoiled = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 4:
                spoiled[name] = torch.rand(weight.shape, generator=chance) < 0.02
                weight[spoiled[name]] += 8 * weight.std() * torch.randn(int(spoiled[name].sum()), generator=chance)
    weights = tmp_path / "spoiled.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, weights)
    for kind in ("cure", "luck", "more"):
        masked = get_masked_model(load_backbone(TINY, weights=weights).model, MaskConfig(select=list(spoiled)))
        masked.base_name, masked.preprocessing = TINY, load_backbone(TINY).preprocessing
        with torch.no_grad():
            for key, score in masked.scores.items():
                off = spoiled[key.replace("/", ".")]
                off = off if kind == "cure" else torch.rand(off.shape, generator=chance) < 0.02
                score.copy_(1 - 2 * off.float())
        masked.save_pretrained(tmp_path / "masks" / f"{kind}.smn")
    save(tmp_path / "masks" / "foreign.smn", 1)  # of the sound backbone, which has another fingerprint
    found = find(tmp_path / "masks", photos, backbone=TINY, weights=weights)
    assert (found.race.best.name, found.race.helps, found.race.clear) == ("cure", True, True)
    assert found.passes < 0.8 * found.all_passes
    assert list(found.skipped) == ["foreign"]
    assert "other weights" in found.skipped["foreign"]
    words = ("find", tmp_path / "masks", tmp_path / "photos", "--backbone", TINY, "--weights", weights)
    done = selfmask(*words)
    assert done.returncode == 0, done.stderr
    assert "cure fits these images best" in done.stdout
    assert "left out: foreign" in done.stdout


def test_few_images_are_said_to_be_too_few(tmp_path: Path, folder: Path) -> None:
    done = selfmask("find", folder, clothes(tmp_path / "photos", range(5)))
    assert (done.returncode, "too few images" in done.stderr) == (2, True)
