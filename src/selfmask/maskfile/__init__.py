"""The artifact: one safe, small file per mask, or one for many masks of a base."""

from .base import Base
from .codecs import Members
from .container import Container, PathLike, Source, open_container
from .extensions import Extension, licence_of, shared, sharing
from .fingerprint import Fingerprints, State, state_of
from .manifest import Manifest
from .mask import Bits, PackedMask, pack_bits, unpack_bits, weights_with_bits
from .reader import MaskSource, OpenedMask, inspect_mask_file, read_mask_file
from .writer import mask_file_bytes, shared_bytes, write_mask_file

__all__ = [
    "Base",
    "Bits",
    "Container",
    "Extension",
    "Fingerprints",
    "Manifest",
    "MaskSource",
    "Members",
    "OpenedMask",
    "PackedMask",
    "PathLike",
    "Source",
    "State",
    "inspect_mask_file",
    "licence_of",
    "mask_file_bytes",
    "open_container",
    "pack_bits",
    "read_mask_file",
    "shared",
    "shared_bytes",
    "sharing",
    "state_of",
    "unpack_bits",
    "weights_with_bits",
    "write_mask_file",
]
