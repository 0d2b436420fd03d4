"""Packs: many masks in one file, which gives all of them back to the last bit, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from selfmask import MaskedModel
from selfmask.errors import (
    BaseWarning,
    ConfigError,
    CorruptMaskFileError,
    MaskFileError,
    NotAMaskFileError,
    WrongBaseError,
)
from selfmask.maskfile import PackedMask, sharing
from selfmask.maskfile.history import CodeHistory
from selfmask.maskfile.pack_words import BLOCK
from selfmask.maskfile.packing import Packer
from selfmask.maskfile.packs import OpenedPack, is_pack

from . import smn
from .make_golden import FOLDERS
from .tiny import Tiny, images, masked_with


def learned(variant: int, *, alike: float = 0.0, notes: str = "", kind: str = "sparse", **config: object) -> PackedMask:
    """A mask with statistics of its own; a share of its bits is that of variant 0."""
    masked = masked_with(Tiny(), kind, variant, **config)
    masked.train()(images() * (1 + 0.1 * variant))
    mask = masked.eval().pack(notes=notes)
    if alike:
        common = masked_with(Tiny(), kind, 0, **config).pack()
        keep = np.packbits(np.random.default_rng(variant).random(8 * 4000) < alike)
        for name, bits in mask.bits.items():
            same = keep[: len(bits)]
            mask.bits[name] = bits & ~same | common.bits[name] & same
    return dataclasses.replace(mask)


def packed(masks: dict[str, PackedMask]) -> bytes:
    packer = Packer(MaskedModel(Tiny()).as_base())
    for name, mask in masks.items():
        packer.add(name, mask)
    return packer.pack()


def unpacked(data: bytes) -> dict[str, PackedMask]:
    return dict(OpenedPack(data).masks(MaskedModel(Tiny()).as_base()))


def test_every_kind_of_mask_comes_back_to_the_last_bit() -> None:
    masks = {
        "sparse": learned(1, notes="of the first"),
        "large": learned(2, kind="large"),
        "coins": learned(3, kind="dense"),
        "stripes": learned(4, kind="stripes"),
        "all-off": learned(5, kind="off"),
        "kept.norms": learned(6, norm="frozen"),
        "some_weights": learned(7, fraction=0.4, seed=2),
        "others": learned(8, fraction=0.4, seed=3),
        "topk": learned(9, rule="topk", active_share=0.9),
        "head": learned(10).replaced(head={"weight": torch.ones(4, 40), "ids": torch.arange(4)}),
        "licence": learned(11).replaced(extensions=sharing(licence="CC0"), progress=0.5),
        "odd": learned(12).replaced(norm={name: value * 1.0001 for name, value in learned(12).norm.items()}),
    }
    data = packed(masks)
    assert data == packed(masks)
    again, model = unpacked(data), MaskedModel(Tiny())
    assert list(again) == list(masks)
    for name, mask in masks.items():
        assert again[name].sha256 == mask.sha256
        assert model.file_bytes(again[name]) == model.file_bytes(mask), name  # statistics, heads and all words
    kinds = {entry.name: entry.kind for entry in OpenedPack(data).words.entries}
    assert [name for name, kind in kinds.items() if kind is None] == ["head", "odd"]


def test_what_masks_share_is_stored_once() -> None:
    """Masks that have most of their bits in common, with statistics in two blocks."""
    masks = {f"mask-{number}": learned(number, alike=0.9) for number in range(BLOCK + 2)}
    data, model = packed(masks), MaskedModel(Tiny())
    again = unpacked(data)
    assert all(again[name].sha256 == mask.sha256 for name, mask in masks.items())
    assert all(
        torch.equal(again[name].norm[key], each) for name, mask in masks.items() for key, each in mask.norm.items()
    )
    assert len(data) < 0.3 * sum(len(model.file_bytes(mask)) for mask in list(masks.values())[:9]) * len(masks) / 9
    entries = OpenedPack(data).words.entries
    assert entries[-1].bytes < 0.7 * entries[0].bytes  # by those before it, and not only by the words


def test_steps_from_the_mean_lead_back() -> None:
    random = np.random.default_rng(0)
    rows = random.integers(-300, 300, (20, 50))
    there, back = CodeHistory(), CodeHistory()
    assert all(np.array_equal(back.codes(there.steps(row)), row) for row in rows)
    steps = CodeHistory()
    assert [int(steps.steps(np.array([code]))[0]) for code in (4, 7, 6)] == [4, 3, 0]  # from 0, from 4, from 5.5: 6


def test_masks_of_version_1_are_kept_as_they_are(tmp_path: Path) -> None:
    old = FOLDERS["1"] / "rice.smn"
    with pytest.warns(BaseWarning):
        mask = MaskedModel(Tiny()).read_mask(old)
    data = packed({"old": mask})
    with pytest.warns(BaseWarning):
        assert unpacked(data)["old"].sha256 == mask.sha256


def test_another_base_is_refused() -> None:
    data = packed({"a": learned(1), "b": learned(2)})
    with pytest.raises(WrongBaseError):
        dict(OpenedPack(data).masks(MaskedModel(Tiny(seed=1)).as_base()))


@pytest.mark.parametrize("name", ["", "..", "../a", "a/b", "a b", ".a", "é", "a" * 101, "a\n"])
def test_names_are_such_as_any_system_takes(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        packed({name: learned(1)})
    file = smn.parse(packed({"good": learned(1)}), "about")
    file.manifest["masks"][0]["name"] = name
    with pytest.raises(CorruptMaskFileError):
        OpenedPack(rebuilt(file))


def rebuilt(file: smn.Smn) -> bytes:
    """A pack with the hash that belongs to its words."""
    text = json.dumps(file.manifest)
    words = smn.hashed(file.metadata, text)
    metadata = {**file.metadata, "about": text, "sha256": smn.content_hash(words, file.tensors)}
    return smn.assemble(metadata, file.tensors)


def test_no_name_comes_twice() -> None:
    packer = Packer(MaskedModel(Tiny()).as_base())
    packer.add("a", learned(1))
    with pytest.raises(ConfigError):
        packer.add("a", learned(2))
    file = smn.parse(packed({"a": learned(1), "b": learned(2)}), "about")
    file.manifest["masks"][1]["name"] = "a"
    with pytest.raises(CorruptMaskFileError):
        OpenedPack(rebuilt(file))


def test_lies_with_a_right_hash_are_refused() -> None:
    data = packed({"a": learned(1), "b": learned(2), "head": learned(3).replaced(head={"w": torch.ones(1)})})
    file = smn.parse(data, "about")
    assert unpacked(rebuilt(file)).keys() == {"a", "b", "head"}

    def refused(change: object) -> None:
        file = smn.parse(data, "about")
        change(file)  # type: ignore[operator]
        with pytest.raises(MaskFileError):
            unpacked(rebuilt(file))

    def swap_hashes(file: smn.Smn) -> None:
        kind, shape, hashes = file.tensors["hashes"]
        file.tensors["hashes"] = (kind, shape, hashes[32:64] + hashes[:32] + hashes[64:])

    refused(swap_hashes)
    refused(lambda file: file.manifest["masks"][0].update(active=1))
    refused(lambda file: file.manifest["masks"][0].update(kind=9))
    refused(lambda file: file.manifest["masks"][0].update(bytes=file.manifest["masks"][0]["bytes"] - 1))
    refused(lambda file: file.manifest["kinds"][0].update(notes="of one"))
    refused(lambda file: file.manifest["kinds"][0]["masks"]["conv1.weight"].update(bits=100))
    refused(lambda file: file.manifest.update(masks=[]))
    refused(lambda file: file.tensors.pop("norm.0"))
    refused(lambda file: file.with_payload("more", b"1"))
    refused(lambda file: file.with_payload("file.2", file.tensors["file.2"][2][:-1]))
    refused(lambda file: file.with_payload("norm.0", file.tensors["norm.0"][2][:-3]))


def test_a_pack_is_told_from_other_files(tmp_path: Path) -> None:
    data = packed({"a": learned(1)})
    mask = MaskedModel(Tiny()).file_bytes(learned(1))
    assert is_pack(data)
    assert not is_pack(mask)
    assert not is_pack(b"text")
    with pytest.raises(NotAMaskFileError, match="not a pack"):
        OpenedPack(mask)
    with pytest.raises(NotAMaskFileError, match="selfmask-pack"):
        MaskedModel(Tiny()).read_mask(data)
