"""Images that lie, as the bytes of files, within larger files: shards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from .images import decode_image
from .places import Place
from .sources import Images

_HASH = 32
_UNKNOWN = bytes(_HASH)


class RecordImages(Images):
    """Records of shards. What is read is hashed on the way, so that nobody need read it again to know what it was.

    shards: the files that they lie in.
    """

    def __init__(
        self,
        shards: Sequence[Place],
        names: Sequence[str],
        labels: list[int] | None = None,
        classes: list[str] | None = None,
    ) -> None:
        super().__init__(names, labels, classes)
        self.shards = shards
        self._stamps = [shard.stamp() for shard in shards]
        self._hashes = bytearray(_HASH * len(names))

    def record(self, i: int) -> bytes:
        """The bytes of an image, as they would lie in a file; BadImageError where there are none."""
        raise NotImplementedError

    def shard(self, i: int) -> int:
        """The number of the shard that it lies in."""
        raise NotImplementedError

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        return decode_image(self._read(i), near=near, max_pixels=self.max_pixels)

    def sha256(self, i: int) -> bytes:
        """The hash of its bytes: what a file of them would have."""
        known = bytes(self._hashes[_HASH * i : _HASH * (i + 1)])
        return hashlib.sha256(self._read(i)).digest() if known == _UNKNOWN else known

    def stamp(self, shard: int) -> str:
        """What the file system, or the server, says of a shard now. What was known of one that changed is forgotten."""
        if (now := self.shards[shard].stamp()) != self._stamps[shard]:
            self._hashes, self._stamps[shard] = bytearray(len(self._hashes)), now
        return now

    def _read(self, i: int) -> bytes:
        data = self.record(i)
        self._hashes[_HASH * i : _HASH * (i + 1)] = hashlib.sha256(data).digest()
        return data
