"""The artifact: one safe, small file per mask."""

from .codecs import Members
from .fingerprint import Fingerprints
from .manifest import Manifest
from .mask import Bits, PackedMask, pack_bits, unpack_bits, weights_with_bits
from .reader import inspect_mask_file, read_mask_file
from .writer import write_mask_file

__all__ = [
    "Bits",
    "Fingerprints",
    "Manifest",
    "Members",
    "PackedMask",
    "inspect_mask_file",
    "pack_bits",
    "read_mask_file",
    "unpack_bits",
    "weights_with_bits",
    "write_mask_file",
]
