"""What the command line prints to may go away (`| head`, a closed terminal, a full disk); the work goes on."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)  # nobody reads there any more, and nobody misses it


class _Lasting:
    """A stream that swallows what can no longer be written, and from then on everything."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.lost = error
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()  # what was still to be written, or the interpreter would try at its end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Within, no print fails. If the output was lost and somebody may miss it, the process ends with exit code 1."""
    for descriptor in range(3):  # closed ones would be given to the next file that is opened, and written into
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    out, err = (_Lasting(stream or open(os.devnull, "w")) for stream in before)  # noqa: SIM115, PTH123 - to the end
    sys.stdout, sys.stderr = out, err
    try:
        yield
        _check(out)
    except SystemExit as end:
        if not end.code:
            _check(out)
        raise
    finally:
        sys.stdout, sys.stderr = before


def _check(out: _Lasting) -> None:
    out.flush()
    if out.lost is not None and out.lost.errno not in _GONE:
        sys.exit(f"error: the output could not be written: {out.lost.strerror}")
