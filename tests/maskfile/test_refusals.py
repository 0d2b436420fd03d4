"""Files that are no mask files, damaged ones, and ones made to mislead: each gets its own error, in little memory."""

from __future__ import annotations

import base64
import json
import lzma
import os
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from selfmask import MaskedModel
from selfmask.errors import (
    CorruptMaskFileError,
    MaskFileError,
    NotAMaskFileError,
    UnsupportedVersionError,
    WrongBaseError,
)
from selfmask.maskfile import inspect_mask_file, write_mask_file

from ..cli.inside import selfmask
from . import smn
from .tiny import Tiny, flags, masked_with

PARTS = ("expected:", "found:", "do:")


EITHER = (CorruptMaskFileError, WrongBaseError)  # damage, or another base: who could tell?
Kind = type[MaskFileError] | tuple[type[MaskFileError], ...]


def refused(path: Path | str, kind: Kind) -> str:
    """The text of the error."""
    with pytest.raises(kind) as caught:
        MaskedModel.from_pretrained(Tiny(), path)
    return str(caught.value)


# ---- not a mask file at all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["none.smn", "folder", "file/a.smn", "none/a.smn"])
def test_paths_that_lead_to_no_file(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    text = refused(tmp_path / path, NotAMaskFileError)
    assert all(part in text for part in (*PARTS, path))
    with pytest.raises(NotAMaskFileError):
        inspect_mask_file(tmp_path / path)


def test_a_name_no_file_can_have() -> None:
    refused("a\0b.smn", NotAMaskFileError)


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\0" * 7, b"\0" * 8, b"\0" * 100, b"\x89PNG\r\n\x1a\n" + bytes(500), b"PK\x03\x04" + bytes(500)],
    ids=["empty", "byte", "7 zeros", "8 zeros", "100 zeros", "png", "zip"],
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.smn").write_bytes(content)
    with pytest.raises((NotAMaskFileError, CorruptMaskFileError)) as caught:
        MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")
    assert all(part in str(caught.value) for part in PARTS)
    with pytest.raises(type(caught.value)):
        inspect_mask_file(tmp_path / "a.smn")


def test_devices_do_not_hang(tmp_path: Path) -> None:
    refused("/dev/zero", NotAMaskFileError)
    refused("/dev/null", NotAMaskFileError)
    os.mkfifo(tmp_path / "pipe")
    # A pipe that nobody writes to would wait for ever; with a writer it ends at once, so no hang can stop the test.
    writer = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(writer, b"\0" * 8)
        refused(tmp_path / "pipe", NotAMaskFileError)
    finally:
        os.close(writer)


def test_a_checkpoint_of_the_base_is_no_mask(tmp_path: Path) -> None:
    """The likeliest mistake: the weights instead of the mask."""
    safetensors.torch.save_file(Tiny().state_dict(), tmp_path / "a.safetensors")
    assert all(part in refused(tmp_path / "a.safetensors", NotAMaskFileError) for part in PARTS)
    torch.save(Tiny().state_dict(), tmp_path / "a.pt")
    refused(tmp_path / "a.pt", NotAMaskFileError)


# ---- altered files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file with all kinds of content in it."""
    path = tmp_path_factory.mktemp("whole") / "a.smn"
    masked = masked_with(Tiny(), "dense")
    with torch.no_grad():
        for key, kind in (("conv2/weight", "stripes"), ("proj/weight", "large")):
            on = torch.from_numpy(flags(kind, Tiny().get_parameter(key.replace("/", "."))))
            masked.scores[key].copy_(on.view_as(masked.scores[key]).float() * 2 - 1)
    mask = masked.pack(head={"w": torch.ones(3)}, notes="notes")
    write_mask_file(path, mask, dict(masked.base.named_parameters()))  # with statistics as they are
    file = smn.parse(path.read_bytes())
    assert {entry["codec"] for entry in file.manifest["masks"].values()} == {"raw", "rice", "lzma"}
    return path.read_bytes()


def test_the_file_these_tests_start_from_is_good(whole: bytes, tmp_path: Path) -> None:
    """And stays good when taken apart and put together again: what is refused below is refused for its edit."""
    for compact in (False, True):
        (tmp_path / "a.smn").write_bytes(smn.build(smn.parse(whole), compact=compact))
        assert MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn").pack().notes == "notes"


def test_truncated_anywhere(whole: bytes, tmp_path: Path) -> None:
    for length in [*range(0, 40), *range(40, len(whole), 37), *range(len(whole) - 40, len(whole))]:
        (tmp_path / "a.smn").write_bytes(whole[:length])
        with pytest.raises((NotAMaskFileError, CorruptMaskFileError)):
            MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")


def test_bytes_at_the_end(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.smn").write_bytes(whole + b"\0")
    refused(tmp_path / "a.smn", CorruptMaskFileError)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 100_000_001, 9 << 20])
def test_a_header_that_claims_a_huge_length(whole: bytes, tmp_path: Path, length: int) -> None:
    (tmp_path / "a.smn").write_bytes(length.to_bytes(8, "little") + whole[8:])
    tracemalloc.start()
    try:
        refused(tmp_path / "a.smn", NotAMaskFileError)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_that_is_huge(whole: bytes, tmp_path: Path) -> None:
    """As long as it says, of 60 MB: refused before it is parsed."""
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length] + b" " * (60 << 20)
    (tmp_path / "a.smn").write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    tracemalloc.start()
    try:
        refused(tmp_path / "a.smn", CorruptMaskFileError)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


Edit = Callable[[smn.Smn], None]


def setting(*path: str, to: Any) -> Edit:
    """Change one value of the manifest."""

    def edit(file: smn.Smn) -> None:
        at = file.manifest
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return edit


def removing(key: str) -> Edit:
    return lambda file: file.tensors.__delitem__(key)


def adding(key: str, part: smn.Part) -> Edit:
    return lambda file: file.tensors.__setitem__(key, part)


def metadata(**values: str) -> Edit:
    return lambda file: file.metadata.update(values)


def renamed_mask(file: smn.Smn) -> None:
    file.manifest["masks"]["conv9.weight"] = file.manifest["masks"].pop("conv1.weight")
    file.tensors["mask.conv9.weight"] = file.tensors.pop("mask.conv1.weight")


def dropped_mask(file: smn.Smn) -> None:
    del file.manifest["masks"]["conv1.weight"], file.tensors["mask.conv1.weight"]


def dropped_all(file: smn.Smn) -> None:
    file.manifest["masks"] = {}
    file.tensors = {key: part for key, part in file.tensors.items() if key.startswith(("norm.", "head."))}


def flipped_bit(file: smn.Smn) -> None:
    _, _, data = file.tensors["mask.conv1.weight"]
    file.with_payload("mask.conv1.weight", bytes([data[0] ^ 0x80]) + data[1:])


def swapped(tensors: dict[str, smn.Part]) -> None:
    """Mean and variance have one shape: only the content hash tells them apart."""
    keys = ("norm.norm.running_mean", "norm.norm.running_var")
    tensors.update(dict(zip(keys, [tensors[key] for key in reversed(keys)], strict=True)))


ENTRY = ("masks", "conv1.weight")
HUGE = 10**400  # json reads it, float() does not
CASES: dict[str, tuple[Edit, Kind]] = {
    "another format": (metadata(format="lora"), NotAMaskFileError),
    "a later version": (metadata(version="3"), UnsupportedVersionError),
    "no such version": (metadata(version=""), UnsupportedVersionError),
    "an unknown codec": (setting(*ENTRY, "codec", to="zstd-99"), UnsupportedVersionError),
    "a mask tensor is missing": (removing("mask.conv1.weight"), CorruptMaskFileError),
    "the shared stream is missing": (removing("lzma"), CorruptMaskFileError),
    "statistics are missing": (removing("norm.norm.running_var"), CorruptMaskFileError),
    "an extra mask": (adding("mask.other", ("U8", [1], b"x")), CorruptMaskFileError),
    "an extra statistic": (adding("norm.other", ("F32", [1], b"abcd")), CorruptMaskFileError),
    "an extra tensor": (adding("other", ("U8", [1], b"x")), CorruptMaskFileError),
    "a mask of another parameter": (renamed_mask, WrongBaseError),
    "a mask dropped": (dropped_mask, WrongBaseError),  # the fingerprint is over all masked tensors
    "no masks at all": (dropped_all, CorruptMaskFileError),
    "another shape": (setting(*ENTRY, "shape", to=[8, 27]), WrongBaseError),
    "more bits than weights": (setting(*ENTRY, "bits", to=217), CorruptMaskFileError),
    "fewer bits than weights": (setting(*ENTRY, "bits", to=215), CorruptMaskFileError),
    "more on than bits": (setting(*ENTRY, "active", to=217), CorruptMaskFileError),
    "another number on": (setting(*ENTRY, "active", to=3), CorruptMaskFileError),
    "a bit flipped": (flipped_bit, CorruptMaskFileError),
    "another mask hash": (setting("mask_sha256", to="0" * 64), CorruptMaskFileError),
    "a payload too large": (adding("mask.conv1.weight", ("U8", [28], bytes(28))), CorruptMaskFileError),
    "a payload of floats": (adding("mask.conv1.weight", ("F32", [1], bytes(4))), CorruptMaskFileError),
    "an empty payload": (adding("mask.conv1.weight", ("U8", [0], b"")), CorruptMaskFileError),
    "a stream too large": (adding("lzma", ("U8", [400], bytes(400))), CorruptMaskFileError),
    "a stream of nonsense": (adding("lzma", ("U8", [40], bytes(range(40)))), CorruptMaskFileError),
    "statistics of half": (adding("norm.norm.running_var", ("F16", [8], bytes(16))), EITHER),
    "statistics of 64 bits": (adding("norm.norm.running_var", ("F64", [4], bytes(32))), EITHER),
    "statistics too many": (adding("norm.norm.running_var", ("F32", [9], bytes(36))), EITHER),
    "statistics too few": (adding("norm.norm.running_var", ("F32", [7], bytes(28))), EITHER),
    "a head larger than the base": (adding("head.w", ("U8", [12000], bytes(12000))), CorruptMaskFileError),
    "a head of an odd type": (adding("head.w", ("F8_E4M3", [4], bytes(4))), CorruptMaskFileError),
    "a fingerprint of another base": (setting("fingerprint", to="0" * 64), WrongBaseError),
    "a fingerprint that is none": (setting("fingerprint", to="abc"), CorruptMaskFileError),
    "an unknown setting": (setting("config", "colour", to="blue"), CorruptMaskFileError),
    "an unknown rule": (setting("config", "rule", to="magic"), CorruptMaskFileError),
    "a rule that is a list": (setting("config", "rule", to=["threshold"]), CorruptMaskFileError),
    "a threshold beyond floats": (setting("config", "mu", to=HUGE), CorruptMaskFileError),
    "a threshold of NaN": (setting("config", "mu", to=float("nan")), CorruptMaskFileError),
    "a fraction the bits do not fit": (setting("config", "fraction", to=0.5), CorruptMaskFileError),
    "a fraction beyond floats": (setting("config", "fraction", to=HUGE), CorruptMaskFileError),
    "a fraction that is text": (setting("config", "fraction", to="half"), CorruptMaskFileError),
    "settings that are a list": (setting("config", to=[[1, 2], ["colour", 3]]), CorruptMaskFileError),
    "settings with null": (setting("config", to=[[None, 2], [True, 3]]), CorruptMaskFileError),
    "settings that are text": (setting("config", to="threshold"), CorruptMaskFileError),
    "patterns that are numbers": (setting("config", "select", to=[1, 2]), CorruptMaskFileError),
    "a seed that is negative": (setting("config", "seed", to=-1), CorruptMaskFileError),
    "a size of floats": (setting("preprocessing", to={"size": [1.5, 2]}), CorruptMaskFileError),
    "a mean beyond floats": (
        setting("preprocessing", to={"size": [1, 2], "mean": [HUGE], "std": [1], "interpolation": ""}),
        CorruptMaskFileError,
    ),
    "notes that are a number": (setting("notes", to=7), CorruptMaskFileError),
    "masks that are a list": (setting("masks", to=[]), CorruptMaskFileError),
    "an entry that is null": (setting(*ENTRY, to=None), CorruptMaskFileError),
    "a negative shape": (setting(*ENTRY, "shape", to=[-8, -27]), CorruptMaskFileError),
    "a shape of booleans": (setting(*ENTRY, "shape", to=[True]), CorruptMaskFileError),
    "a shape beyond memory": (setting(*ENTRY, "shape", to=[2**62, 2**62]), CorruptMaskFileError),
    "a manifest that is a list": (lambda file: setattr(file, "manifest", [1, 2]), CorruptMaskFileError),
    "a manifest that is null": (lambda file: setattr(file, "manifest", None), CorruptMaskFileError),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compact", [False, True])
def test_edited_files_with_hashes_made_right(whole: bytes, tmp_path: Path, case: str, compact: bool) -> None:
    """Every check behind the content hash, one by one."""
    edit, kind = CASES[case]
    file = smn.parse(whole)
    edit(file)
    (tmp_path / "a.smn").write_bytes(smn.build(file, compact=compact))
    refused(tmp_path / "a.smn", kind)


def test_every_refusal_says_what_was_expected_what_was_found_and_what_to_do(whole: bytes, tmp_path: Path) -> None:
    """One list of all that say less, rather than a failure each."""
    silent = {}
    for case, (edit, _) in CASES.items():
        file = smn.parse(whole)
        edit(file)
        (tmp_path / "a.smn").write_bytes(smn.build(file))
        try:
            MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")
        except MaskFileError as error:
            if missing := [part for part in PARTS if part not in str(error)]:
                silent[case] = f"{error.what}: no {' '.join(missing)}"
        except Exception:  # the test above shows these
            continue
    assert not silent, "\n".join(f"{case}: {text}" for case, text in silent.items())


@pytest.mark.parametrize("key", ["masks", "lzma", "norm.norm.running_mean", "head.w"])
def test_content_is_guarded_by_its_hash(whole: bytes, tmp_path: Path, key: str) -> None:
    """One bit in any part, statistics and head too."""
    file = smn.parse(whole)
    dtype, shape, data = file.stored[key]
    file.stored[key] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])
    (tmp_path / "a.smn").write_bytes(smn.assemble(file.metadata, file.stored))
    refused(tmp_path / "a.smn", CorruptMaskFileError)
    with pytest.raises(CorruptMaskFileError):
        inspect_mask_file(tmp_path / "a.smn")


def test_swapped_statistics_are_noticed(whole: bytes, tmp_path: Path) -> None:
    file = smn.parse(whole)
    swapped(file.stored)
    (tmp_path / "a.smn").write_bytes(smn.assemble(file.metadata, file.stored))
    refused(tmp_path / "a.smn", CorruptMaskFileError)


@pytest.mark.parametrize("key", ["format", "version", "manifest", "sha256"])
def test_metadata_that_is_missing(whole: bytes, tmp_path: Path, key: str) -> None:
    file = smn.parse(whole)
    del file.metadata[key]
    (tmp_path / "a.smn").write_bytes(smn.assemble(file.metadata, file.stored))
    kind = {"format": NotAMaskFileError, "version": UnsupportedVersionError}.get(key, CorruptMaskFileError)
    refused(tmp_path / "a.smn", kind)


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h["masks"].update(data_offsets=[0, 2**62]),
        lambda h: h["masks"].update(data_offsets=[2**63, 2**64 - 1]),
        lambda h: h["masks"].update(data_offsets=[27, 0]),
        lambda h: h["masks"].update(data_offsets=[-27, 0]),
        lambda h: h["masks"].update(shape=[2**40]),
        lambda h: h["masks"].update(shape=[2**32, 2**32]),
        lambda h: h["masks"].update(dtype="F32"),
        lambda h: h["masks"].update(dtype="nonsense"),
        lambda h: h["lzma"].update(h["masks"]),  # overlap
        lambda h: h.update(hole={"dtype": "U8", "shape": [1], "data_offsets": [10**6, 10**6 + 1]}),
        lambda h: h.update(__metadata__={"format": 1}),
        lambda h: h.update(__metadata__=[]),
    ],
)
def test_headers_that_lie(whole: bytes, tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    edit(header)
    (tmp_path / "a.smn").write_bytes(smn.with_header(json.dumps(header).encode(), whole[8 + length :]))
    with pytest.raises((CorruptMaskFileError, NotAMaskFileError)) as caught:
        MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn")
    assert all(part in str(caught.value) for part in PARTS)


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[" * 100_000, '{"masks":' * 50_000, "1" * 5000, '{"masks": {}}', '"\\ud800"', "NaN"],
    ids=["empty", "open", "null", "deep", "deep masks", "long number", "bare", "surrogate", "nan"],
)
@pytest.mark.parametrize("compact", [False, True])
def test_manifests_that_are_no_manifest(whole: bytes, tmp_path: Path, text: str, compact: bool) -> None:
    (tmp_path / "a.smn").write_bytes(smn.build(smn.parse(whole), text, compact=compact))
    refused(tmp_path / "a.smn", CorruptMaskFileError)
    with pytest.raises(CorruptMaskFileError):
        inspect_mask_file(tmp_path / "a.smn")


@pytest.mark.parametrize("way", ["bomb", "cut", "longer", "spaces"])
def test_compressed_manifests_that_lie(whole: bytes, tmp_path: Path, way: str) -> None:
    """A few kB that unpack to a gigabyte are unpacked to 8 MB at most."""
    file = smn.joined(smn.parse(whole))
    packed = zlib.compress(json.dumps(file.manifest).encode())
    if way == "bomb":
        packer = zlib.compressobj()
        packed = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(200)) + packer.flush()
    packed = {"cut": packed[:-1], "longer": packed + b"x"}.get(way, packed)
    text = base64.b64encode(packed).decode() + (" " if way == "spaces" else "")
    hashed = smn.content_hash(smn.hashed(file.metadata, text), file.tensors)
    data = smn.assemble({**file.metadata, "manifest": text, "sha256": hashed}, file.tensors)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptMaskFileError):
            inspect_mask_file(data)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("lengths", [(1, 0), (-1, 0), (-1, 1), (10**6, 0), (None, 0), ("1", 0)])
def test_lengths_of_masks_that_lie(whole: bytes, lengths: tuple[Any, int]) -> None:
    file = smn.joined(smn.parse(whole))
    for name, change in zip(("conv1.weight", "proj.weight"), lengths, strict=True):
        entry = file.manifest["masks"][name]
        entry["bytes"] = entry["bytes"] + change if isinstance(change, int) else change
    with pytest.raises(CorruptMaskFileError):
        MaskedModel.from_pretrained(Tiny(), smn.build(file))


# ---- files that would be costly ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lzma", "rice"])
def test_bombs_are_not_unpacked(tmp_path: Path, kind: str) -> None:
    """A few bytes that announce far more than the base has room for: memory stays in proportion to the base."""
    base = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    masked = masked_with(base, "stripes" if kind == "lzma" else "sparse")
    masked.save_pretrained(tmp_path / "a.smn")
    file = smn.parse((tmp_path / "a.smn").read_bytes())
    assert file.manifest["masks"]["0.weight"]["codec"] == kind
    if kind == "lzma":
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 23}]
        file.with_payload("lzma", lzma.compress(bytes(64 << 20), lzma.FORMAT_RAW, filters=filters))
    else:  # three classes of all 2^20 weights, at 30 bit planes each, and nothing behind
        file.with_payload("mask.0.weight", b"\x02\x00\x40\x00\x3f" + b"\x1e\x80\x80\x40" * 3)
    (tmp_path / "a.smn").write_bytes(smn.build(file))
    fresh = MaskedModel(base)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptMaskFileError):
            fresh.load_mask(tmp_path / "a.smn", "bomb")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20  # lzma keeps a window of 8 MB, rice a number a weight
    finally:
        tracemalloc.stop()


def test_numbers_of_thousands_of_digits_cost_no_minutes(whole: bytes, tmp_path: Path) -> None:
    """Multiplying a shape of such numbers takes time with the square of their count: 200 s for 8 MB of header."""
    file = smn.parse(whole)
    file.manifest["masks"]["conv1.weight"]["shape"] = [10**4200] * 250
    (tmp_path / "a.smn").write_bytes(smn.build(file))
    start = time.process_time()
    refused(tmp_path / "a.smn", CorruptMaskFileError)
    assert time.process_time() - start < 1


def test_many_tensors_cost_no_minutes(whole: bytes, tmp_path: Path) -> None:
    """Twenty thousand names: refused for not belonging, in time that grows with their number only."""
    file = smn.parse(whole)
    for i in range(20_000):
        file.tensors[f"head.{i}"] = ("U8", [0], b"")
    file.tensors["other"] = ("U8", [0], b"")
    (tmp_path / "a.smn").write_bytes(smn.build(file))
    start = time.process_time()
    refused(tmp_path / "a.smn", CorruptMaskFileError)
    assert time.process_time() - start < 5


def with_layers(whole: bytes, count: int) -> bytes:
    file = smn.parse(whole)
    for i in range(count):
        file.manifest["masks"][f"layer{i}.weight"] = {"shape": [8], "bits": 8, "active": 4, "codec": "raw"}
        file.tensors[f"mask.layer{i}.weight"] = ("U8", [1], b"\x0f")
    return smn.build(file)


def test_many_layers_cost_no_minutes(whole: bytes, tmp_path: Path) -> None:
    """Thirty thousand took 46 s to show: they are refused, and as many as are allowed are shown in part."""
    for count, code in ((30_000, 2), (9_900, 0)):
        (tmp_path / "a.smn").write_bytes(with_layers(whole, count))
        start = time.process_time()
        done = selfmask("inspect", tmp_path / "a.smn")
        assert done.returncode == code
        assert time.process_time() - start < 5
    assert "more: see --json" in done.stdout


def test_files_that_are_no_ordinary_ones_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/proc/self/mem", tmp_path / "pipe", "/dev/zero"):
        done = selfmask("inspect", path)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_inspect_checks_without_the_base(whole: bytes, tmp_path: Path) -> None:
    """No base, but still no trust: what can be checked is."""
    (tmp_path / "a.smn").write_bytes(whole)
    assert inspect_mask_file(tmp_path / "a.smn")[0].notes == "notes"
    for case in (
        "a later version",
        "an unknown codec",
        "an extra tensor",
        "a mask tensor is missing",
        "more on than bits",
    ):
        edit, kind = CASES[case]
        file = smn.parse(whole)
        edit(file)
        (tmp_path / "a.smn").write_bytes(smn.build(file))
        with pytest.raises(kind):
            inspect_mask_file(tmp_path / "a.smn")
