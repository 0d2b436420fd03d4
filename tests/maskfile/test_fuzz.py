"""Twenty thousand mutated files: a typed error or a correct mask, never anything else, in bounded memory.

Of every kind the first 500 are for every day; the others are heavy.

Every case is made from its own seed, "KIND/NUMBER". To look at one again:

    python -m tests.maskfile.test_fuzz KIND NUMBER

writes it to KIND-NUMBER.smn and loads it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import lzma
import random
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selfmask import MaskedModel
from selfmask.errors import MaskFileError
from selfmask.maskfile import PackedMask, inspect_mask_file, weights_with_bits

from . import smn
from .tiny import Tiny, flags, images, masked_with

# ---- what is mutated --------------------------------------------------------------------------------------------

REFERENCE = "reference"


@functools.cache
def corpus() -> dict[str, tuple[bytes, PackedMask]]:
    """Valid files of every kind, with the masks they hold."""
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.smn"
        reference = masked_with(Tiny(), "dense")
        reference.save_pretrained(path)
        files[REFERENCE] = (path.read_bytes(), reference.pack())
        for kind in ("sparse", "large", "stripes", "off"):
            masked = masked_with(Tiny(), kind)
            masked.save_pretrained(path, notes=kind)
            files[kind] = (path.read_bytes(), masked.pack(notes=kind))
        mixed = masked_with(Tiny(), "large")
        with torch.no_grad():
            on = torch.from_numpy(flags("stripes", mixed.base.conv2.weight)).view(24, 8, 3, 3)
            mixed.scores["conv2/weight"].copy_(on.float() * 2 - 1)
            mixed.scores["conv1/weight"].copy_(reference.scores["conv1/weight"])
        head = {"weight": torch.ones(4, 40), "scale": torch.tensor(2.0, dtype=torch.float16), "ids": torch.arange(4)}
        mixed.save_pretrained(path, head=head, notes="ä")
        files["mixed"] = (path.read_bytes(), mixed.pack(head=head, notes="ä"))
        for name, config in {
            "fraction": {"fraction": 0.4, "seed": 2},
            "magnitude": {"fraction": 0.3, "fraction_by": "magnitude"},
            "frozen": {"norm": "frozen"},
        }.items():
            masked = masked_with(Tiny(), "large", **config)
            masked.save_pretrained(path)
            files[name] = (path.read_bytes(), masked.pack())
        (Path(folder) / "reference.smn").write_bytes(files[REFERENCE][0])
        masked = masked_with(Tiny(), "dense")
        with torch.no_grad():
            masked.scores["conv2/weight"].view(-1)[::40] *= -1
        masked.save_pretrained(path, relative_to=Path(folder) / "reference.smn")
        files["relative"] = (path.read_bytes(), masked.pack())
    return files


@functools.cache
def parsed(name: str) -> smn.Smn:
    return smn.parse(corpus()[name][0])


@functools.cache
def magnitudes(name: str) -> dict[str, list[float]]:
    """|w| of the weights that carry a bit in a file."""
    mask = corpus()[name][1]
    weights = weights_with_bits(dict(Tiny().named_parameters()), mask.sizes, mask.chosen)
    return {key: weight.abs().tolist() for key, weight in weights.items()}


# ---- how ----------------------------------------------------------------------------------------------------------

# A mutation returns the bytes, and the bits that are right for them: those of the original where a hash guards
# them, those that the oracle decodes where the hashes were made right, or None where any valid mask will do.
Case = tuple[bytes, dict[str, bytes] | None]
GUARDED: dict[str, bytes] = {}
INTERESTING = (0, 1, 7, 8, 9, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32, 2**35, 2**40, 2**53, 2**62, 2**63, 2**64 - 1)


def pick(rng: random.Random) -> tuple[str, bytes]:
    name = rng.choice(sorted(corpus()))
    return name, corpus()[name][0]


def original(name: str) -> dict[str, bytes]:
    return {key: bits.tobytes() for key, bits in corpus()[name][1].bits.items()}


def mangle(data: bytes, rng: random.Random) -> bytes:
    """Some bytes, damaged in one of the usual ways."""
    out = bytearray(data)
    way = rng.randrange(8)
    at = rng.randrange(len(out)) if out else 0
    if way == 0 and out:
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif way == 1 and out:
        for _ in range(rng.choice((1, 1, 3, 20))):
            out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif way == 2:
        del out[at:]
    elif way == 3:
        out += rng.randbytes(rng.choice((1, 2, 8, 100))) if rng.random() < 0.5 else bytes(rng.choice((1, 8, 100)))
    elif way == 4:
        del out[at : at + rng.choice((1, 2, 8))]
    elif way == 5:
        out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
    elif way == 6:
        end = min(at + rng.choice((4, 16, 64)), len(out))
        out[at:end] = bytes([rng.choice((0, 0xFF, rng.randrange(256)))]) * (end - at)
    else:
        a, b = sorted((at, rng.randrange(len(out)) if out else 0))
        out[a:b] = reversed(out[a:b])
    return bytes(out)


def flips(rng: random.Random) -> Case:
    """Bits and bytes anywhere."""
    name, data = pick(rng)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 10))):
        at = rng.randrange(len(out))
        out[at] = out[at] ^ 1 << rng.randrange(8) if rng.random() < 0.7 else rng.randrange(256)
    return bytes(out), original(name)


def lengths(rng: random.Random) -> Case:
    """Cut off, extended, cut out of the middle, or with another length of the header."""
    name, data = pick(rng)
    if rng.random() < 0.3:
        length = rng.choice((*INTERESTING, int.from_bytes(data[:8], "little") + rng.randint(-20, 20)))
        return (max(length, 0) % 2**64).to_bytes(8, "little") + data[8:], original(name)
    return mangle(data, rng), original(name)


def splices(rng: random.Random) -> Case:
    """The header of one file on the body of another, or any two pieces."""
    (a, first), (b, second) = pick(rng), pick(rng)
    ends = [8 + int.from_bytes(data[:8], "little") for data in (first, second)]
    if rng.random() < 0.5:
        data = first[: ends[0]] + second[ends[1] :]
    elif rng.random() < 0.5:
        data = first[:8] + second[8 : ends[1]].ljust(ends[0] - 8)[: ends[0] - 8] + first[ends[0] :]
    else:
        data = first[: rng.randrange(len(first))] + second[rng.randrange(len(second)) :]
    return data, original(b if data == second else a)


def headers(rng: random.Random) -> Case:
    """Lies in the safetensors header: offsets, shapes, types, names."""
    name, data = pick(rng)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice([key for key in header if key != "__metadata__"] or ["new"])
        entry = header.setdefault(key, {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})
        way = rng.randrange(9)
        number: Any = rng.choice((*INTERESTING, -1, 1.5, "1", None, len(data) - end, rng.randrange(2000)))
        if way == 0:
            entry["data_offsets"] = [number, *entry.get("data_offsets", [])[1:]]
        elif way == 1:
            entry["data_offsets"] = [*entry.get("data_offsets", [])[:1], number]
        elif way == 2:
            entry["shape"] = rng.choice(([number], [number, number], [], [*entry.get("shape", []), 1], [0]))
        elif way == 3:
            entry["dtype"] = rng.choice(("F64", "F32", "BF16", "F8_E4M3", "F4", "C64", "BOOL", "I64", None, 7))
        elif way == 4:
            header[rng.choice(("mask.x", "norm.x", "lzma", "head.", "mask.conv1.weight", "x"))] = header.pop(key)
        elif way == 5:
            header[key] = dict(header[rng.choice([other for other in header if other != "__metadata__"])])
        elif way == 6:
            del header[key]
        elif way == 7:
            header["__metadata__"] = rng.choice(({}, {"format": "selfmask"}, None, [], {"format": number}))
        else:
            entry.pop(rng.choice(("dtype", "shape", "data_offsets")), None)
            entry["extra"] = 1
    text = json.dumps(header).encode()
    return smn.with_header(text if rng.random() < 0.9 else mangle(text, rng), data[end:]), original(name)


VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    0.5,
    2,
    7,
    8,
    2**31,
    2**35,
    2**64,
    10**400,
    1e308,
    -1e-320,
    float("inf"),
    float("nan"),
    "",
    "x",
    "raw",
    "rice",
    "lzma",
    "all",
    "threshold",
    "topk",
    "frozen",
    "adapt",
    "magnitude",
    "\ud800",
    "\0",
    "0" * 64,
    "f" * 64,
    "F" * 64,
    "x" * 5000,
    [],
    [[]],
    [1],
    ["x"],
    [None],
    [1, 2],
    {},
    {"x": 1},
    [["x", 1], [2, 3]],
    [[1, 2]],
    [8, 3, 3, 3],
    [10**30] * 3,
)


def edit_json(value: Any, rng: random.Random) -> Any:
    """One random edit somewhere in a JSON document."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value))
        way = rng.random()
        if way < 0.08:
            del value[key]
        elif way < 0.16 and isinstance(value, dict):
            value[rng.choice(("x", "", "conv1.weight", "norm.weight", "fraction", key + ".x"))] = value.pop(key)
        elif way < 0.22 and isinstance(value, dict):
            value["x"] = copy.deepcopy(rng.choice(VALUES))
        else:
            value[key] = edit_json(value[key], rng)
        return value
    if isinstance(value, int | float) and abs(value) < 2**64 and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 8, -8, 0.5))
    if isinstance(value, str) and value and rng.random() < 0.4:
        return mangle(value.encode("utf-8", "replace"), rng).decode("utf-8", "replace")
    return copy.deepcopy(rng.choice(VALUES))


def manifests(rng: random.Random) -> Case:
    """Edits of the manifest with the content hash made right."""
    file = parsed(pick(rng)[0]).copy()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.5 and isinstance(file.manifest, dict):  # where most is to be checked
            part = rng.choice(("config", "config", "masks", "preprocessing"))
            file.manifest[part] = edit_json(file.manifest.get(part), rng)
        else:
            file.manifest = edit_json(file.manifest, rng)
    if rng.random() < 0.05:
        file.metadata[rng.choice(("format", "version", "x"))] = rng.choice(("", "0", "2", "1.0", "x"))
    text = json.dumps(file.manifest)
    if rng.random() < 0.1:
        text = mangle(text.encode(), rng).decode("utf-8", "replace")
    return smn.build(file, text), None


def tables(rng: random.Random) -> Case:
    """Tensors renamed, retyped, reshaped, resized, swapped, added and removed, with the content hash made right."""
    file = parsed(pick(rng)[0]).copy()
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(sorted(file.tensors) or ["x"])
        dtype, shape, data = file.tensors.get(key, ("U8", [0], b""))
        way = rng.randrange(7)
        if way == 0:
            other = rng.choice(sorted(file.tensors) or ["x"])
            file.tensors[key], file.tensors[other] = file.tensors.get(other, (dtype, shape, data)), (dtype, shape, data)
        elif way == 1:
            file.tensors[rng.choice(("mask.x", "norm.x", "lzma", "head.x", "head.", "x", key + "x"))] = (
                file.tensors.pop(key, ("U8", [0], b""))
            )
        elif way == 2:
            width, dtype = rng.choice(
                ((8, "F64"), (4, "F32"), (2, "BF16"), (1, "BOOL"), (1, "I8"), (1, "U8"), (8, "I64"))
            )
            data = data[: len(data) // width * width]
            file.tensors[key] = (dtype, [len(data) // width], data)
        elif way == 3:
            shape = rng.choice(([1, *shape], [*shape, 1], shape[::-1]))
            file.tensors[key] = (dtype, shape, data)
        elif way == 4:
            data = rng.randbytes(rng.choice((0, 1, 100, 400, 13_000)))
            file.tensors[key] = ("U8", [len(data)], data)
        elif way == 5:
            file.tensors.pop(key, None)
        else:
            file.tensors[rng.choice(("head.new", "norm.new", "mask.new", "lzma", "new"))] = ("U8", [1], b"x")
    return smn.build(file), None


def payloads(rng: random.Random) -> Case:
    """Coded bits altered, with every hash and count made right where the oracle finds a mask in them."""
    name, _ = pick(rng)
    file = parsed(name).copy()
    masks = file.manifest["masks"]
    n = {key: len(values) for key, values in magnitudes(name).items()}
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(sorted(masks))
        way = rng.random()
        old = file.tensors[f"mask.{key}"][2]
        if way < 0.15:
            masks[key]["codec"], new = "rice", rice_like(n[key], rng)
        elif way < 0.25:
            masks[key]["codec"], new = "raw", rng.randbytes((n[key] + 7) // 8)
        elif way < 0.35:
            masks[key]["codec"], new = rng.choice(("raw", "rice", "lzma")), old
        elif way < 0.5:
            new = old
            masks[key]["codec"] = "lzma"
            file.with_payload(f"mask.{key}", b"")
            sharing = [other for other in sorted(masks) if masks[other]["codec"] == "lzma"]
            total = sum((n[other] + 7) // 8 for other in sharing)
            stream = bytes(total) if rng.random() < 0.5 else rng.randbytes(total)
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 23}]
            stream = lzma.compress(stream[: total - rng.choice((0, 0, 0, 1))], lzma.FORMAT_RAW, filters=filters)
            file.with_payload("lzma", stream if rng.random() < 0.5 else mangle(stream, rng))
            new = b""
        else:
            new = mangle(old, rng)
        file.with_payload(f"mask.{key}", new)
        if "lzma" in file.tensors and rng.random() < 0.3:
            file.with_payload("lzma", mangle(file.tensors["lzma"][2], rng))
    coded = {key: (entry["codec"], file.tensors[f"mask.{key}"][2]) for key, entry in masks.items()}
    try:
        bits = smn.decode(coded, file.tensors.get("lzma", ("U8", [0], b""))[2], magnitudes(name))
    except smn.InvalidError:
        return smn.build(file), GUARDED  # no bits are right for this file
    packed = {key: smn.packed(values) for key, values in bits.items()}
    if file.manifest["relative_to"]:
        packed = {key: xnor(data, original(REFERENCE)[key], n[key]) for key, data in packed.items()}
    for key, data in packed.items():
        masks[key]["active"] = int(np.bitwise_count(np.frombuffer(data, np.uint8)).sum())
    unpacked = {key: smn.unpacked(data, n[key]) for key, data in packed.items()}
    file.manifest["mask_sha256"] = smn.mask_hash(unpacked)
    return smn.build(file), packed


def xnor(a: bytes, b: bytes, n: int) -> bytes:
    same = [1 - (x ^ y) for x, y in zip(smn.unpacked(a, n), smn.unpacked(b, n), strict=True)]
    return smn.packed(same)


def rice_like(n: int, rng: random.Random) -> bytes:
    """Bytes with the outline of a rice code, and anything in its fields."""
    number = rng.choice((0, 1, 2, 2, 3, 127))
    out = bytes([number | rng.choice((0, 0x80))]) + rng.choice((rng.randbytes(2 * number), b"\x80\x7f" * number))
    if number == 2 and rng.random() < 0.5:
        out = out[:1] + b"\x00\x3f\x00\x3e"
    for _ in range(number + 1):
        count = rng.choice((0, 1, n // 100, n, n + 1, 2**34, rng.randrange(n + 1)))
        out += bytes([rng.choice((0, 1, 3, 7, 30, 31, 255))])
        while count > 127:
            out += bytes([count & 0x7F | 0x80])
            count >>= 7
        out += bytes([count])
    return out + rng.randbytes(rng.choice((0, 1, 5, n // 16)))


MUTATIONS: dict[str, tuple[Callable[[random.Random], Case], int]] = {
    "flips": (flips, 5000),
    "lengths": (lengths, 2500),
    "splices": (splices, 1500),
    "headers": (headers, 3500),
    "manifests": (manifests, 4500),
    "tables": (tables, 1000),
    "payloads": (payloads, 2000),
}
STEP = 500
PARTS = [
    pytest.param(kind, start, marks=[pytest.mark.heavy] if start else [])
    for kind, (_, number) in MUTATIONS.items()
    for start in range(0, number, STEP)
]


def test_there_are_twenty_thousand() -> None:
    assert sum(number for _, number in MUTATIONS.values()) >= 20_000


# ---- what must hold -----------------------------------------------------------------------------------------------


def make(kind: str, number: int) -> Case:
    return MUTATIONS[kind][0](random.Random(f"{kind}/{number}"))


def check(masked: MaskedModel, path: Path, case: Case) -> bool:
    """Load a file as a user would; True if it held a mask. Anything but a MaskFileError escapes."""
    data, right = case
    path.write_bytes(data)
    try:
        inspect_mask_file(path)
    except MaskFileError:
        inspected = False
    else:
        inspected = True
    try:
        masked.load_mask(path, "fuzzed")
    except MaskFileError:
        assert masked.mask_names == [REFERENCE]
        return False
    assert inspected, "what loads can be inspected"
    try:
        masked.set_mask("fuzzed")
        mask = masked.pack()
        if right is not None:
            assert {key: bits.tobytes() for key, bits in mask.bits.items()} == right, "a wrong mask was accepted"
        assert masked(images()).shape == (2, 40)
        assert 0 <= masked.sparsity()["total"] <= 1
    finally:
        masked.set_mask(REFERENCE)
        masked.delete_mask("fuzzed")
    return True


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> MaskedModel:
    """The base, with the mask that the relative file refers to."""
    path = tmp_path_factory.mktemp("fuzz") / "reference.smn"
    path.write_bytes(corpus()[REFERENCE][0])
    masked = MaskedModel(Tiny())
    masked.load_mask(path, REFERENCE)
    masked.set_mask(REFERENCE)
    return masked


def peak_memory(reset: bool = False) -> int:
    """The most memory this process had, in KB; Linux can forget earlier tests."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(("kind", "start"), PARTS)
def test_mutated_files(masked: MaskedModel, tmp_path: Path, kind: str, start: int) -> None:
    cases = {number: make(kind, number) for number in range(start, start + STEP)}
    base = [parameter.detach().clone() for parameter in masked.base.parameters()]
    masked(images())
    before = peak_memory(reset=True)
    accepted = 0
    failures: dict[str, int] = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # numpy warns before it computes nonsense
        for number, case in cases.items():
            try:
                accepted += check(masked, tmp_path / "a.smn", case)
            except Exception as error:
                failures.setdefault(repr(error), number)
    assert not failures, "\n".join(
        f"python -m tests.maskfile.test_fuzz {kind} {number}  # {error}" for error, number in failures.items()
    )
    assert peak_memory() - before < 64 << 10, "files of a few KB took more than 64 MB"
    assert all(torch.equal(*pair) for pair in zip(base, masked.base.parameters(), strict=True))
    if kind in ("manifests", "payloads"):
        assert accepted > 0.02 * STEP, "the edits never get past the first checks: they test little"
    assert accepted < 0.7 * STEP, "the edits change nothing: they test little"


def test_the_files_that_are_mutated_are_good(masked: MaskedModel, tmp_path: Path) -> None:
    for name, (data, mask) in corpus().items():
        assert check(masked, tmp_path / "a.smn", (data, original(name)))
        assert check(masked, tmp_path / "a.smn", (smn.build(parsed(name)), original(name)))
        assert mask.sha256 == parsed(name).manifest["mask_sha256"]
    codecs = [entry["codec"] for name in corpus() for entry in parsed(name).manifest["masks"].values()]
    assert set(codecs) == {"raw", "rice", "lzma"}


if __name__ == "__main__":
    kind, number = sys.argv[1], int(sys.argv[2])
    path = Path(f"{kind}-{number}.smn")
    data, right = make(kind, number)
    path.write_bytes(data)
    Path("reference.smn").write_bytes(corpus()[REFERENCE][0])
    model = MaskedModel(Tiny())
    model.load_mask("reference.smn", REFERENCE)
    model.load_mask(path, "fuzzed")
    model.set_mask("fuzzed")
    found = {key: bits.tobytes() for key, bits in model.pack().bits.items()}
    print("loaded;", "any mask is right" if right is None else f"the right mask: {found == right}")
