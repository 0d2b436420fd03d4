"""The command line without a new process, which would take seconds to import torch."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from selfmask.cli import app


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def selfmask(*words: str | Path) -> Done:
    """`selfmask WORDS`, as a shell would see it."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["selfmask", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            app()
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())
