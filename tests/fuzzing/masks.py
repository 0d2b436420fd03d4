"""Mask files: mutated in eight ways, and read as a user would, on a base and without."""

from __future__ import annotations

import functools
import json
import lzma
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from selfmask import MaskedModel
from selfmask.errors import BaseWarning, MaskFileError
from selfmask.maskfile import PackedMask, inspect_mask_file, sharing, weights_with_bits, write_mask_file
from selfmask.maskfile.extensions import CODES
from tests.maskfile import smn
from tests.maskfile.make_golden import FOLDERS
from tests.maskfile.tiny import Tiny, flags, images, masked_with

from .mutations import edit_json, edit_tensors, header_lies, length_lies, mangle

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
        masked.train()(images())  # moves the statistics
        masked.eval()
        with torch.no_grad():
            masked.scores["conv2/weight"].view(-1)[::40] *= -1
        masked.save_pretrained(path, relative_to=Path(folder) / "reference.smn")
        files["relative"] = (path.read_bytes(), masked.pack())
        shared = masked_with(Tiny(), "sparse").pack().replaced(extensions=sharing(licence="CC0", training={"steps": 5}))
        write_mask_file(path, shared, {})
        files["shared"] = (path.read_bytes(), shared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BaseWarning)
        for name in ("rice", "frozen"):
            old = FOLDERS["1"] / f"{name}.smn"
            files[f"old {name}"] = (old.read_bytes(), MaskedModel.from_pretrained(Tiny(), old).pack())
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


def pick(rng: random.Random) -> tuple[str, bytes]:
    name = rng.choice(sorted(corpus()))
    return name, corpus()[name][0]


def original(name: str) -> dict[str, bytes]:
    return {key: bits.tobytes() for key, bits in corpus()[name][1].bits.items()}


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
    return length_lies(data, rng) if rng.random() < 0.3 else mangle(data, rng), original(name)


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
    return header_lies(data, rng), original(name)


def manifests(rng: random.Random) -> Case:
    """Edits of the manifest with the content hash made right."""
    file = parsed(pick(rng)[0]).copy()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.5 and isinstance(file.manifest, dict):  # where most is to be checked
            part = rng.choice(("config", "config", "masks", "preprocessing", "extensions"))
            file.manifest[part] = edit_json(file.manifest.get(part), rng)
        else:
            file.manifest = edit_json(file.manifest, rng)
    if rng.random() < 0.05:
        file.metadata[rng.choice(("format", "version", "x"))] = rng.choice(("", "0", "1", "2", "3", "1.0", "x"))
    text = json.dumps(file.manifest)
    if rng.random() < 0.1:
        text = mangle(text.encode(), rng).decode("utf-8", "replace")
    return smn.build(file, text, compact=rng.random() < 0.5), None


def tables(rng: random.Random) -> Case:
    """Tensors renamed, retyped, reshaped, resized, swapped, added and removed, with the content hash made right."""
    file = parsed(pick(rng)[0]).copy()
    if rng.random() < 0.5:
        file = smn.joined(file)
    edit_tensors(file.tensors, rng)
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
        return smn.build(file, compact=rng.random() < 0.5), GUARDED  # no bits are right for this file
    packed = {key: smn.packed(values) for key, values in bits.items()}
    if file.manifest["relative_to"]:
        packed = {key: xnor(data, original(REFERENCE)[key], n[key]) for key, data in packed.items()}
    for key, data in packed.items():
        masks[key]["active"] = int(np.bitwise_count(np.frombuffer(data, np.uint8)).sum())
    unpacked = {key: smn.unpacked(data, n[key]) for key, data in packed.items()}
    file.manifest["mask_sha256"] = smn.mask_hash(unpacked)
    return smn.build(file, compact=rng.random() < 0.5), packed


def statistics(rng: random.Random) -> Case:
    """Codes of statistics altered, or made of any numbers, with the content hash made right."""
    name = rng.choice([name for name in sorted(corpus()) if CODES in parsed(name).tensors])
    file = parsed(name).copy()
    if rng.random() < 0.5:
        codes = b"".join(
            rng.choice((bytes(4), rng.randbytes(2), rng.randbytes(4))) for _ in range(rng.choice((4, 16, 17)))
        )
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 12}]
        file.with_payload(CODES, lzma.compress(codes, lzma.FORMAT_RAW, filters=filters))
    if rng.random() < 0.6:
        file.with_payload(CODES, mangle(file.tensors[CODES][2], rng))
    if rng.random() < 0.2:
        which = rng.choice(("mean", "var"))
        file.tensors[f"norm.norm.running_{which}"] = ("F32", [8], rng.randbytes(32))
    return smn.build(file, compact=rng.random() < 0.5), original(name)


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
    "flips": (flips, 5),
    "lengths": (lengths, 3),
    "splices": (splices, 2),
    "headers": (headers, 3),
    "manifests": (manifests, 5),
    "tables": (tables, 2),
    "payloads": (payloads, 2),
    "statistics": (statistics, 1),
}
"""How, and how often of all."""


def mutate(rng: random.Random) -> Case:
    ways = [way for way, share in MUTATIONS.values() for _ in range(share)]
    return rng.choice(ways)(rng)


# ---- what must hold -----------------------------------------------------------------------------------------------


@functools.cache
def base() -> MaskedModel:
    """The base, with the mask that the relative file refers to."""
    masked = MaskedModel(Tiny())
    masked.load_mask(corpus()[REFERENCE][0], REFERENCE)
    masked.set_mask(REFERENCE)
    return masked


def read(case: Case, path: Path) -> str:
    """Load a file as a user would; "loaded", or the kind of error. Anything but a MaskFileError escapes."""
    masked, (data, right) = base(), case
    path.write_bytes(data)
    try:
        inspect_mask_file(path)
    except MaskFileError:
        inspected = False
    else:
        inspected = True
    try:
        masked.load_mask(path, "fuzzed")
    except MaskFileError as error:
        assert masked.mask_names == [REFERENCE]
        return type(error).__name__
    assert inspected, "what loads can be inspected"
    try:
        masked.set_mask("fuzzed")
        mask = masked.pack()
        if right is not None:
            assert {key: bits.tobytes() for key, bits in mask.bits.items()} == right, "a wrong mask was accepted"
        vectors = masked(images())
        assert vectors.shape == (2, 40)
        assert bool(vectors.isfinite().all()), "vectors that are no numbers"
        assert 0 <= masked.sparsity()["total"] <= 1
    finally:
        masked.set_mask(REFERENCE)
        masked.delete_mask("fuzzed")
    return "loaded"
