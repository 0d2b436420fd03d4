"""Keys: who may ask, and who may change masks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import checked
from ..errors import ConfigError
from .config import ServeConfig

_SHORTEST = 16


class Keys:
    """The keys of a file, one a line. Only their hashes are kept, and all are compared, each in the same time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    @staticmethod
    def of(file: Path) -> Keys:
        """Read the keys of a file; empty lines, and those that begin with #, are none."""
        try:
            lines = checked.content(file).decode().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the keys in {file} cannot be read", found=getattr(error, "strerror", None) or str(error)
            ) from error
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys or min(map(len, keys)) < _SHORTEST:
            raise ConfigError(
                f"the keys in {file} are no good",
                expected=f"one a line, each of {_SHORTEST} characters or more",
                found=f"one of {min(map(len, keys))}" if keys else "none",
                todo="make one: openssl rand -hex 32",
            )
        return Keys(keys)

    def holds(self, key: str) -> bool:
        given = _hash(key)
        # All of them, whatever is found: how long it takes says nothing.
        return sum([hmac.compare_digest(given, own) for own in self._hashes]) > 0

    def __and__(self, other: Keys) -> bool:
        return bool(set(self._hashes) & set(other._hashes))


def keys_of(config: ServeConfig) -> tuple[Keys | None, Keys | None]:
    """Those for asking, and those for changing masks."""
    user, admin = (
        None if file is None else Keys.of(Path(file)) for file in (config.api_key_file, config.admin_key_file)
    )
    if user is not None and admin is not None and user & admin:
        raise ConfigError("a key is both for asking and for changing masks", todo="use other keys for --admin-key-file")
    return user, admin


def key_in(headers: Mapping[bytes, bytes], *, basic: bool) -> str | None:
    """The key that a request carries: as a bearer token, as x-api-key, or, if `basic`, as a browser's password."""
    if (own := headers.get(b"x-api-key")) is not None:
        return own.decode("latin-1")
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip().decode("latin-1")
    if basic and kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).decode("latin-1").partition(":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
