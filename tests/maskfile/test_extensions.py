"""What later releases may add, and what an earlier one does with it."""

from __future__ import annotations

from typing import Any

import pytest

from selfmask import MaskedModel
from selfmask.errors import ConfigError, CorruptMaskFileError, UnsupportedVersionError
from selfmask.maskfile import inspect_mask_file, mask_file_bytes, sharing

from . import smn
from .tiny import Tiny, masked_with

DATA = mask_file_bytes(masked_with(Tiny(), "dense").pack(), {})  # with statistics as they are
PART = ("F32", [2, 3], bytes(24))


def file(tensors: dict[str, smn.Part] | None = None, **extensions: Any) -> bytes:
    made = smn.parse(DATA)
    made.manifest["extensions"] = extensions
    made.tensors |= tensors or {}
    return smn.build(made)


def extension(version: int = 1, required: bool = False, words: Any = None) -> dict[str, Any]:
    return {"version": version, "required": required, "words": words}


def test_an_optional_one_that_is_not_known_is_passed_over() -> None:
    data = file({"ext.feature_map.matrix": PART}, feature_map=extension(words={"a": [1, None, "x"]}))
    masked = MaskedModel.from_pretrained(Tiny(), data)
    assert masked.pack().sha256 == MaskedModel.from_pretrained(Tiny(), DATA).pack().sha256
    manifest, parts = inspect_mask_file(data)
    assert (manifest.extensions["feature_map"].version, parts["extensions"]) == (1, 24)
    again = inspect_mask_file(masked.mask_bytes())
    assert (set(again[0].extensions), again[1]["extensions"]) == ({"norm_codes"}, 0)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("feature_map", extension(required=True)), ("share", extension(version=2, required=True, words={}))],
)
def test_a_required_one_that_is_not_known_needs_a_newer_release(name: str, extra: dict[str, Any]) -> None:
    data = file({f"ext.{name}.matrix": PART}, **{name: extra})
    for read in (inspect_mask_file, lambda data: MaskedModel.from_pretrained(Tiny(), data)):
        with pytest.raises(UnsupportedVersionError, match=r"(?s)newer release.*upgrade selfmask"):
            read(data)


def test_what_is_shared_is_kept() -> None:
    mask = MaskedModel.from_pretrained(Tiny(), DATA).pack()
    words = {"licence": "CC0-1.0", "data": "1,000 photos\nmy own", "training": {"steps": 5}}
    data = mask_file_bytes(mask.replaced(extensions=sharing(**words)), {})
    masked = MaskedModel.from_pretrained(Tiny(), data)
    assert masked.pack().extensions["share"].words == words
    assert inspect_mask_file(masked.mask_bytes())[0].extensions["share"].words == words


@pytest.mark.parametrize(
    "extensions",
    [
        None,
        [],
        {"x": None},
        {"X": extension()},
        {"x.y": extension()},
        {"x" * 41: extension()},
        {"x": extension(version=0)},
        {"x": extension(required=1)},  # type: ignore[arg-type]
        {"x": {"version": 1, "required": False}},
        {"x": {**extension(), "more": 1}},
        {"x": extension(words="x" * 70_000)},
        {"x": extension(words=["x" * 60_000] * 2)},
        {"x": extension(words=list(range(3000)))},
        {f"x{i}": extension() for i in range(33)},
        {"share": extension(words={"colour": "blue"})},
        {"share": extension(words={"licence": "\x1b[2Jfree"})},
        {"share": extension(words={"data": {"‮evil": 1}})},
        {"share": extension(words="free")},
    ],
)
def test_extensions_that_are_none(extensions: Any) -> None:
    made = smn.parse(DATA)
    made.manifest["extensions"] = extensions
    with pytest.raises(CorruptMaskFileError):
        MaskedModel.from_pretrained(Tiny(), smn.build(made))


@pytest.mark.parametrize(
    "tensors",
    [{"ext.x.a": PART}, {"ext.y": PART}, {"ext.": PART}, {"ext.feature_map": PART}, {"ext..a": PART}],
)
def test_tensors_of_no_extension(tensors: dict[str, smn.Part]) -> None:
    with pytest.raises(CorruptMaskFileError, match="do not belong"):
        MaskedModel.from_pretrained(Tiny(), file(tensors, feature_map=extension()))


def test_tensors_that_are_too_large_for_the_base() -> None:
    """Together no larger than a float32 copy of the masked weights."""
    limit = 4 * sum(entry.bits for entry in inspect_mask_file(DATA)[0].masks.values())
    half = ("U8", [limit // 2], bytes(limit // 2))
    MaskedModel.from_pretrained(Tiny(), file({"ext.x.a": half, "ext.y.b": half}, x=extension(), y=extension()))
    more = ("U8", [limit // 2 + 1], bytes(limit // 2 + 1))
    with pytest.raises(CorruptMaskFileError, match="too large"):
        MaskedModel.from_pretrained(Tiny(), file({"ext.x.a": half, "ext.x.b": more}, x=extension()))


def test_words_that_cannot_be_stored_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="one of licence"):
        sharing(colour="blue")
    masked = masked_with(Tiny(), "dense")
    with pytest.raises(ConfigError, match="cannot be stored"):
        masked.mask_bytes(notes="x" * (9 << 20))


def test_a_file_cannot_be_taken_for_one_of_version_1() -> None:
    """Whose base would be checked less: the content hash covers the version."""
    made = smn.parse(smn.build(smn.parse(DATA)))
    made.metadata["version"] = "1"
    with pytest.raises(CorruptMaskFileError, match="altered"):
        MaskedModel.from_pretrained(Tiny(), smn.assemble(made.metadata, made.tensors))
