"""A second reader and writer of mask files: plain Python, bit by bit, sharing no code with the library.

It is the oracle that the real codecs are compared with, and the tool that makes hostile files: it builds any
header it is told to, and repairs the hashes so that the checks behind them are reached.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import lzma
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

Part = tuple[str, list[int], bytes]  # type, shape, bytes
KINDS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class InvalidError(Exception):
    """The oracle finds that these bytes are no mask."""


# ---- the container ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Smn:
    """A mask file taken apart: in the plain layout, with a tensor for each mask, whatever it came in."""

    metadata: dict[str, str]
    manifest: Any
    tensors: dict[str, Part]
    stored: dict[str, Part] = dataclasses.field(default_factory=dict)
    """The tensors as they are in the file."""

    def copy(self) -> Smn:
        return Smn(dict(self.metadata), json.loads(json.dumps(self.manifest)), dict(self.tensors), dict(self.stored))

    def with_payload(self, key: str, data: bytes) -> None:
        self.tensors[key] = ("U8", [len(data)], data)


def parse(data: bytes, words: str = "manifest") -> Smn:
    """Take a valid file apart; `words` is where its document is."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    metadata = header.pop("__metadata__")
    tensors = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[key] = (entry["dtype"], entry["shape"], body[begin:end])
    smn = Smn(metadata, json.loads(unpacked_text(metadata[words])), tensors, dict(tensors))
    if "masks" in tensors and words == "manifest":
        data = tensors.pop("masks")[2]
        for name, entry in sorted(smn.manifest["masks"].items()):
            length = entry.pop("bytes")
            smn.with_payload(f"mask.{name}", data[:length])
            data = data[length:]
        assert not data
    return smn


def build(smn: Smn, manifest_text: str | None = None, *, compact: bool = False) -> bytes:
    """Put a file together, with the content hash that belongs to it; `manifest_text` stands in for the manifest.

    compact: in the layout that the library writes, as far as the content has one.
    """
    smn = joined(smn) if compact else smn
    text = manifest_text if manifest_text is not None else json.dumps(smn.manifest)
    text = packed_text(text) if compact else text
    metadata = {**smn.metadata, "manifest": text, "sha256": content_hash(hashed(smn.metadata, text), smn.tensors)}
    return assemble(metadata, smn.tensors)


def joined(smn: Smn) -> Smn:
    """All masks in one tensor, and their lengths in the manifest."""
    smn, data = smn.copy(), b""
    masks = smn.manifest.get("masks") if isinstance(smn.manifest, dict) else None
    for name, entry in sorted(masks.items()) if isinstance(masks, dict) else ():
        if isinstance(entry, dict):
            part = smn.tensors.pop(f"mask.{name}", ("U8", [0], b""))[2]
            entry["bytes"] = len(part)
            data += part
    smn.with_payload("masks", data)
    return smn


def packed_text(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"))).decode()


def unpacked_text(text: str) -> str:
    return text if text.startswith("{") else zlib.decompress(base64.b64decode(text)).decode()


def assemble(metadata: Mapping[str, Any], tensors: Mapping[str, Part]) -> bytes:
    """A safetensors file, with no hash made right; tensors lie in the order given."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return with_header(json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def with_header(header: bytes, body: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body


def hashed(metadata: Mapping[str, Any], text: str) -> str:
    """What the content hash covers besides the tensors; since version 2 also format and version."""
    if metadata.get("version") == "1":
        return text
    return f"{metadata.get('format')} {metadata.get('version')}\n{text}"


def content_hash(manifest: str, tensors: Mapping[str, Part]) -> str:
    total = hashlib.sha256(manifest.encode("utf-8", "surrogatepass") + b"\0")
    for key in sorted(tensors):
        dtype, shape, data = tensors[key]
        total.update(json.dumps([key, KINDS.get(dtype, dtype), shape]).encode() + b"\0" + data)
    return total.hexdigest()


def mask_hash(bits: Mapping[str, Sequence[int]]) -> str:
    total = hashlib.sha256()
    for name in sorted(bits):
        total.update(json.dumps([name, len(bits[name])]).encode() + b"\0" + packed(bits[name]))
    return total.hexdigest()


def base_hash(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> str:
    """The fingerprint of base tensors, given as (type, shape, bytes)."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        kind, shape, data = tensors[name]
        total.update(hashlib.sha256(json.dumps([name, kind, list(shape)]).encode() + b"\0" + data).digest())
    return total.hexdigest()


# ---- the codecs -------------------------------------------------------------------------------------------------


def packed(bits: Sequence[int]) -> bytes:
    """Eight bits a byte, the first one highest, zeros at the end."""
    text = "".join(map(str, bits))
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))


def unpacked(data: bytes, n: int) -> list[int]:
    if len(data) != (n + 7) // 8:
        raise InvalidError("wrong number of bytes")
    bits = [byte >> shift & 1 for byte in data for shift in range(7, -1, -1)]
    if any(bits[n:]):
        raise InvalidError("bits beyond the end")
    return bits[:n]


def decode(
    coded: Mapping[str, tuple[str, bytes]], shared: bytes, magnitudes: Mapping[str, Sequence[float]]
) -> dict[str, list[int]]:
    """The bits of all tensors; `magnitudes` are |w| as float32 values, of the weights that carry a bit."""
    bits = {}
    sharing = [name for name in sorted(coded) if coded[name][0] == "lzma"]
    lengths = [(len(magnitudes[name]) + 7) // 8 for name in sharing]
    data = unlzma(shared, sum(lengths))
    for name, length in zip(sharing, lengths, strict=True):
        if coded[name][1]:
            raise InvalidError("bytes beside the shared stream")
        bits[name], data = unpacked(data[:length], len(magnitudes[name])), data[length:]
    for name, (codec, payload) in coded.items():
        if codec == "raw":
            bits[name] = unpacked(payload, len(magnitudes[name]))
        elif codec == "rice":
            bits[name] = unrice(payload, magnitudes[name])
    return bits


def unlzma(stream: bytes, length: int) -> bytes:
    if not length:
        if stream:
            raise InvalidError("a stream that nothing uses")
        return b""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 8 * 1024 * 1024}]
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
    try:
        data = decoder.decompress(stream, max_length=length + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise InvalidError(str(error)) from error
    if len(data) != length or not decoder.eof or decoder.unused_data:
        raise InvalidError("wrong length")
    return data


def unrice(payload: bytes, magnitudes: Sequence[float]) -> list[int]:
    """One tensor, symbol by symbol."""
    n = len(magnitudes)
    at = 0

    def byte() -> int:
        nonlocal at
        if at >= len(payload):
            raise InvalidError("ends early")
        at += 1
        return payload[at - 1]

    first = byte()
    number, rare_symbol = first & 0x7F, first >> 7
    if number > 3:
        raise InvalidError("too many borders")
    borders = [struct.unpack("<f", bytes([0, 0, byte(), byte()]))[0] for _ in range(number)]
    if not all(math.isfinite(border) for border in borders) or not all(
        after < before for before, after in itertools.pairwise(borders)
    ):
        raise InvalidError("borders do not fall")
    classes = []
    for _ in range(number + 1):
        k, count = byte(), 0
        for shift in range(0, 35, 7):
            low = byte()
            count |= (low & 0x7F) << shift
            if low < 0x80:
                break
        else:
            raise InvalidError("an endless number")
        if k > 30 or count > n:
            raise InvalidError("an impossible class")
        classes.append((k, count))
    remainders = []
    for k, count in classes:
        planes = []
        for _ in range(k):
            plane = "".join(f"{byte():08b}" for _ in range((count + 7) // 8))
            planes.append([int(bit) for bit in plane[:count]])
        remainders.append([sum(plane[i] << bit for bit, plane in enumerate(planes)) for i in range(count)])
    unary = "".join(f"{value:08b}" for value in payload[at:])
    if unary.count("1") != sum(count for _, count in classes) or len(unary) - (unary.rfind("1") + 1) >= 8:
        raise InvalidError("wrong number of codes")
    quotients = (len(zeros) for zeros in unary.split("1"))

    # Class i has |w| >= border i and below the one before; positions of the last class count all weights.
    members: list[list[int]] = [[] for _ in borders]
    for i, magnitude in enumerate(magnitudes):
        for border, member in zip(borders, members, strict=True):
            if magnitude >= border:
                member.append(i)
                break
    bits = [1 - rare_symbol] * n
    for (k, count), remainder, member in zip(classes, remainders, [*members, list(range(n))], strict=True):
        position = -1
        for i in range(count):
            position += (next(quotients) << k) + remainder[i] + 1
            if position >= len(member):
                raise InvalidError("a position beyond the class")
            bits[member[position]] = rare_symbol
    return bits


# ---- statistics -------------------------------------------------------------------------------------------------


def statistics(stream: bytes, base: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Coded statistics, number by number; `base` has those of the base, by name, that are not stored otherwise."""
    names = sorted(base)
    count = sum(len(base[name]) for name in names)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": max(4 * count, 1 << 12)}]
    data = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters).decompress(stream)
    planes, rest = divmod(len(data), count)
    assert 1 <= planes <= 4
    assert rest == 0
    folded = [sum(data[plane * count + i] << 8 * plane for plane in range(planes)) for i in range(count)]
    steps = (-(z + 1) // 2 if z % 2 else z // 2 for z in folded)
    codes = {name: [next(steps) for _ in base[name]] for name in names}
    found: dict[str, list[float]] = {}
    for name in sorted(names, key=lambda name: not name.endswith("running_var")):
        found[name] = []
        for i, (code, own) in enumerate(zip(codes[name], base[name], strict=True)):
            if code == 0:
                new = own
            elif name.endswith("running_var"):
                whole, fraction = divmod(code, 128)
                new = max((own + 2.0**-17) * math.ldexp(1 + fraction / 128, whole) - 2.0**-17, 0.0)
            else:
                variance = found[name.replace("running_mean", "running_var")][i]
                new = own + code * (math.sqrt(variance + 2.0**-17) / 128)
            found[name].append(struct.unpack("<f", struct.pack("<f", new))[0])
    return found


# ---- which weights carry a bit ----------------------------------------------------------------------------------


def chosen(name: str, magnitudes: Sequence[float], config: Mapping[str, Any]) -> list[int]:
    """The places of the weights that carry a bit, in order."""
    n, fraction = len(magnitudes), config["fraction"]
    if fraction >= 1:
        return list(range(n))
    if config["fraction_by"] == "magnitude":
        largest = sorted(range(n), key=lambda i: (-magnitudes[i], i))  # among equals the first
        return sorted(largest[: round(fraction * n)])
    start = int.from_bytes(hashlib.sha256(f"{config['seed']}:{name}".encode()).digest()[:8], "little")
    return [i for i in range(n) if splitmix64(start, i + 1) >> 11 < round(fraction * 2**53)]


def splitmix64(start: int, i: int) -> int:
    z = (start + i * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31
