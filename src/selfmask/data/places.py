"""Files here or on a server, by path or URL. They are read in ranges; a server gets a few chances, not endless ones."""

from __future__ import annotations

import io
import itertools
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, DataUnavailableError, MissingExtraError, NoImagesError, SelfmaskError
from .images import printable
from .recent import Recent

T = TypeVar("T")
_BLOCK = 8 << 20  # bytes asked of a server at once: images that follow each other come together
_KEPT: Recent[bytes] = Recent(16 * _BLOCK, len)
_WAITS = (0.2, 1.0, 3.0)  # seconds before each further try
_TIMEOUT = 60.0  # seconds without a byte
_MOST = 1_000_000  # files that one pattern may name
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


class Place(ABC):
    """A file that can be read in parts."""

    name: str
    """For people, and by which it is told from others."""

    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def stamp(self) -> str:
        """Another one if the file was written to."""

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`; fewer only at the end of the file."""

    def open(self) -> io.BufferedReader:
        """A file object, for programs that want one."""
        return io.BufferedReader(_Stream(self), 1 << 20)


class LocalFile(Place):
    def __init__(self, path: str) -> None:
        self.path, self.name = path, printable(Path(path))

    def size(self) -> int:
        return self._status().st_size

    def stamp(self) -> str:
        found = self._status()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"

    def _status(self) -> os.stat_result:
        try:
            return os.stat(self.path)  # noqa: PTH116 - as elsewhere, where there may be millions
        except OSError as error:
            raise NoImagesError(f"cannot open {self.name}", found=error.strerror, todo="check the path") from error

    def read(self, start: int, stop: int) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as file:  # noqa: PTH123 - faster than a Path, for every image
                file.seek(start)
                return file.read(stop - start)
        except OSError as error:
            raise DataUnavailableError(f"cannot read {self.name}", found=error.strerror) from error


class RemoteFile(Place):
    """What fsspec opens: s3://, https:// and others. How to log in is set as fsspec and its packages want it."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, url
        self._opened: tuple[int, Any, str] | None = None  # by which process
        self._info: dict[str, Any] = {}
        self._version = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}  # connections are of this process

    def size(self) -> int:
        if not self._info:
            self.stamp()
        if not isinstance(size := self._info.get("size"), int):
            raise DataUnavailableError(
                f"cannot read {self.name} in parts", expected="a server that says how large a file is", found=size
            )
        return size

    def stamp(self) -> str:
        self._info = self._tried(_fresh_info)
        known = (
            "size",
            "ETag",
            "etag",
            "LastModified",
            "Last-Modified",
            "last_modified",
            "mtime",
            "generation",
            "version_id",
        )
        self._version = " ".join(str(self._info[key]) for key in known if self._info.get(key) is not None)
        return self._version

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size())
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        data = b"".join(_KEPT.get((self.url, self._version, block), partial(self._block, block)) for block in blocks)
        return data[start - blocks.start * _BLOCK :][: stop - start] if stop > start else b""

    def _block(self, number: int) -> bytes:
        start, stop = number * _BLOCK, min((number + 1) * _BLOCK, self.size())

        def fetch(files: Any, path: str) -> bytes:
            data: bytes = files.cat_file(path, start=start, end=stop)
            if len(data) > stop - start:
                raise DataUnavailableError(
                    f"cannot read {self.name} in parts", expected="a server that answers ranges", found="the whole file"
                )
            if len(data) < stop - start:
                raise EOFError(f"{len(data):,} bytes where {stop - start:,} were asked for")
            return data

        return self._tried(fetch)

    def _tried(self, ask: Callable[[Any, str], T]) -> T:
        for wait in (*_WAITS, None):
            try:
                return ask(*self._files())
            except SelfmaskError:
                raise
            except Exception as error:  # each kind of server has errors of its own
                if _is_absent(error):
                    raise NoImagesError(f"there is no {self.name}", todo="check the address") from error
                if wait is None:
                    raise DataUnavailableError(
                        f"cannot read {self.name}",
                        expected=f"an answer at one of {len(_WAITS) + 1} tries",
                        found=" ".join(
                            f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}".split()
                        )[:500],
                        todo="check the address and who may read it, then run the same command again: "
                        "finished work is kept",
                    ) from error
                time.sleep(wait)
        raise AssertionError  # the last try returns or raises

    def _files(self) -> tuple[Any, str]:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), *_file_system(self.url)
        return self._opened[1:]


def _is_absent(error: Exception) -> bool:
    """fsspec says of a web server that refuses, or does not answer, that there is no such file: the cause knows."""
    cause = error.__cause__
    refused = type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", None) != 404
    return isinstance(error, FileNotFoundError) and not refused


def _fresh_info(files: Any, path: str) -> dict[str, Any]:
    files.invalidate_cache()  # of listings: what was written since is to be seen
    return dict(files.info(path))


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec

        options: dict[str, Any] = {}
        if url.startswith(("http://", "https://")):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT, sock_read=_TIMEOUT)
            options = {"client_kwargs": {"timeout": timeout}}
        if url.startswith("s3://"):
            return _s3(url)
        files, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingExtraError(
            f"cannot open {url}: {error}", todo="pip install 'selfmask[streams]', or the package that is named"
        ) from error
    except ValueError as error:  # no such protocol
        raise NoImagesError(f"cannot open {url}", found=error, todo="check the address") from error
    return files, path


def _s3(url: str) -> tuple[Any, str]:
    """By the client that pyarrow brings, with settings from the environment variables of AWS: no further package."""
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    tries = AwsStandardS3RetryStrategy(max_attempts=1)  # that we try again is enough
    options: dict[str, Any] = {}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        scheme, _, host = endpoint.rpartition("://")
        options = {"scheme": scheme or "https", "endpoint_override": host.rstrip("/")}
    files = S3FileSystem(request_timeout=_TIMEOUT, connect_timeout=_TIMEOUT, retry_strategy=tries, **options)
    wrapped = ArrowFSWrapper(files)
    wrapped.cat_file = partial(wrapped.cat_file, seekable=True)  # else it fails at the first byte of a file
    return wrapped, url.removeprefix("s3://")


class _Stream(io.RawIOBase):
    """A place as a file object."""

    def __init__(self, place: Place) -> None:
        self._place, self._at, self._size = place, 0, place.size()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._place.read(self._at, min(self._at + len(buffer), self._size)) if self._at < self._size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def is_url(where: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*(::|://)", where) is not None


def place_of(where: str) -> Place:
    return RemoteFile(where) if is_url(where) else LocalFile(os.path.expanduser(where))  # noqa: PTH111 - may be no path


def expanded(pattern: str) -> list[str]:
    """The names that braces stand for, as in a shell: `{000..019}` and `{train,val}`."""
    texts, alternatives = _BRACES.split(pattern)[::2], _BRACES.findall(pattern)
    choices = [list(itertools.islice(_choices(each), _MOST + 1)) for each in alternatives]
    total = 1
    for each in choices:
        total *= len(each)
    if total > _MOST:
        raise ConfigError("a pattern names too many files", expected=f"at most {_MOST:,}", found=pattern)
    return [
        "".join(itertools.chain.from_iterable(zip(texts, (*chosen, ""), strict=True)))
        for chosen in itertools.product(*choices)
    ]


def _choices(inside: str) -> Iterator[str]:
    found = _RANGE.fullmatch(inside)
    if found is None:
        yield from inside.split(",")
        return
    first, last = int(found[1]), int(found[2])
    width = max(map(len, found.groups())) if any(re.match(r"-?0\d", each) for each in found.groups()) else 0
    for number in range(first, last + 1) if first <= last else range(first, last - 1, -1):
        yield f"{number:0{width}d}"
