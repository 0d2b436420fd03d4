"""Damage of every kind, from a seed: to bytes, to JSON documents, to safetensors files and to zip archives.

All fuzzers use these, and none other. What guards itself by a hash is damaged as it is, or with the hash made right, so
that the checks behind it are reached.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import warnings
import zipfile
from typing import Any

from tests.maskfile import smn

INTERESTING = (0, 1, 7, 8, 9, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32, 2**35, 2**40, 2**53, 2**62, 2**63, 2**64 - 1)


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


def length_lies(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another length of its header."""
    length = rng.choice((*INTERESTING, int.from_bytes(data[:8], "little") + rng.randint(-20, 20)))
    return (max(length, 0) % 2**64).to_bytes(8, "little") + data[8:]


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


def header_lies(data: bytes, rng: random.Random) -> bytes:
    """Lies in the header of a safetensors file: offsets, shapes, types, names."""
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
            names = ("mask.x", "masks", "norm.x", "lzma", "head.", "mask.conv1.weight", "x")
            header[rng.choice(names)] = header.pop(key)
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
    return smn.with_header(text if rng.random() < 0.9 else mangle(text, rng), data[end:])


def edit_tensors(tensors: dict[str, smn.Part], rng: random.Random) -> None:
    """Rename, retype, reshape, resize, swap, add and remove tensors."""
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(sorted(tensors) or ["x"])
        dtype, shape, data = tensors.get(key, ("U8", [0], b""))
        way = rng.randrange(7)
        if way == 0:
            other = rng.choice(sorted(tensors) or ["x"])
            tensors[key], tensors[other] = tensors.get(other, (dtype, shape, data)), (dtype, shape, data)
        elif way == 1:
            tensors[rng.choice(("mask.x", "norm.x", "lzma", "head.x", "head.", "x", key + "x"))] = tensors.pop(
                key, ("U8", [0], b"")
            )
        elif way == 2:
            width, dtype = rng.choice(
                ((8, "F64"), (4, "F32"), (2, "BF16"), (1, "BOOL"), (1, "I8"), (1, "U8"), (8, "I64"))
            )
            data = data[: len(data) // width * width]
            tensors[key] = (dtype, [len(data) // width], data)
        elif way == 3:
            shape = rng.choice(([1, *shape], [*shape, 1], shape[::-1]))
            tensors[key] = (dtype, shape, data)
        elif way == 4:
            data = rng.randbytes(rng.choice((0, 1, 100, 400, 13_000)))
            tensors[key] = ("U8", [len(data)], data)
        elif way == 5:
            tensors.pop(key, None)
        else:
            tensors[rng.choice(("head.new", "norm.new", "mask.new", "lzma", "new"))] = ("U8", [1], b"x")


def container(data: bytes, words: str, rng: random.Random) -> tuple[bytes, bool]:
    """A safetensors file of ours, damaged; and whether its hash still guards what was written."""
    way = rng.randrange(6)
    if way == 0:
        return mangle(data, rng), True
    if way == 1:
        return length_lies(data, rng), True
    if way == 2:
        return header_lies(data, rng), True
    file = smn.parse(data, words) if words else smn.Smn(*plain_parts(data))
    metadata, tensors = dict(file.metadata), file.stored or file.tensors
    text = metadata.get(words, "")
    if way == 3:
        edit_tensors(tensors, rng)
    elif way == 4 or not words:
        key = rng.choice(sorted(tensors))
        dtype, shape, part = tensors[key]
        changed = mangle(part, rng)
        tensors[key] = (dtype, shape if len(changed) == len(part) else [len(changed)], changed)
    else:
        tensors = file.tensors  # the layout that goes with a manifest in plain text
        for _ in range(rng.choice((1, 1, 2, 4))):
            file.manifest = edit_json(file.manifest, rng)
        text = json.dumps(file.manifest)
        if rng.random() < 0.1:
            text = mangle(text.encode(), rng).decode("utf-8", "replace")
    if rng.random() < 0.03:
        metadata[rng.choice(("format", "version", "x"))] = rng.choice(("", "0", "1", "2", "3", "x"))
    if words:
        metadata[words] = text
    if "sha256" in metadata:
        hashed = smn.hashed(metadata, text) if words else ""
        metadata["sha256"] = smn.content_hash(hashed, tensors)
    return smn.assemble(metadata, tensors), False


def plain_parts(data: bytes) -> tuple[dict[str, str], Any, dict[str, smn.Part]]:
    """Of a safetensors file without a document."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", {})
    parts = {
        key: (entry["dtype"], entry["shape"], data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]])
        for key, entry in header.items()
    }
    return metadata, None, parts


def archive(data: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """A zip archive, damaged: as it is, or in what its members hold, with all sums made right."""
    if rng.random() < 0.5:
        return mangle(data, rng), True
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        chosen, way = rng.choice(names), rng.randrange(5)
        for name in names:
            content = old.read(name)
            if name == chosen:
                if way == 0:
                    continue
                if way == 1:
                    name = rng.choice(("x", "", "../x", name + "x", rng.choice(names)))
                else:  # where its words are, mostly
                    head = rng.choice((len(content), min(len(content), 200)))
                    content = mangle(content[:head], rng) + content[head:]
            with contextlib.suppress(ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of two members with one name
                new.writestr(zipfile.ZipInfo(name or "x"), content)
    return out.getvalue(), False


def lines(text: str, rng: random.Random) -> bytes:
    """A text file: lines changed, or bytes."""
    rows = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        way, at = rng.randrange(6), rng.randrange(len(rows))
        if way == 0:
            rows.insert(at, rng.choice(rows))
        elif way == 1 and len(rows) > 1:
            del rows[at]
        elif way == 2:
            rows[at] += rng.choice(WORDS)
        elif way == 3:
            rows[at] = rng.choice(WORDS) + rows[at]
        elif way == 4:
            cut = rng.randrange(len(rows[at]) + 1)
            rows[at] = rows[at][:cut] + rng.choice(WORDS) + rows[at][cut:]
        else:
            rows[at] = rows[at].replace(rng.choice("=:,[]{}.0 "), rng.choice(WORDS), 1)
    data = "\n".join(rows).encode("utf-8", "surrogatepass")
    return data if rng.random() < 0.6 else mangle(data, rng)


WORDS = (
    "",
    " ",
    "\t",
    ",",
    ":",
    "=",
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    "\\",
    "\0",
    "\r",
    "\x85",
    "#",
    "-",
    "- ",
    "? ",
    "! ",
    "&a ",
    "*a ",
    "<<: ",
    "!!python/object:os.system ",
    "!!binary ",
    "!!set ",
    "!!timestamp ",
    "2001-99-99",
    "1:60:60",
    "0x",
    "1e999",
    "nan",
    ".inf",
    "9" * 5000,
    "true",
    "null",
    "~",
    "é",
    "\U0001f426",
    "\ud800",
    "\u202e",
    "\x1b[2J",
    "../../etc/passwd",
    "x" * 3000,
    "[" * 2000,
)
