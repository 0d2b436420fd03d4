"""What is printed to may go away: no command fails because of it, and none writes into another's file."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest

from selfmask.cli import app
from selfmask.cli.streams import lasting_streams

CODE = """
import os, sys
from selfmask.cli.streams import lasting_streams
with lasting_streams():
    with open(sys.argv[1], "w") as file:
        for i in range(20_000):
            print("a line of some length", i)
            print("another", i, file=sys.stderr)
        sys.stdout.flush()
        file.write("done")
    sys.exit(0)
"""


def test_nobody_reads(tmp_path: Path) -> None:
    """As in `2>&1 | head`."""
    child = subprocess.Popen(
        [sys.executable, "-c", CODE, tmp_path / "file"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.wait() == 0
    assert (tmp_path / "file").read_text() == "done"


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_from_the_start(tmp_path: Path, closed: str) -> None:
    """The next file that is opened would get the number of the closed one."""
    words = [sys.executable, "-c", CODE, str(tmp_path / "file")]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "done"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="of Linux")
def test_output_that_somebody_may_miss_is_missed(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", CODE, tmp_path / "file"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"could not be written: No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "file").read_text() == "done"  # the work was done


def test_streams_are_handed_back() -> None:
    before = sys.stdout, sys.stderr
    with lasting_streams():
        assert sys.stdout is not before[0]
        assert sys.stdout.encoding == before[0].encoding
    assert (sys.stdout, sys.stderr) == before


def test_an_output_that_is_no_longer_what_it_was_opened_as(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that became a pipe, say: it cannot be told how to write odd characters, and is written to all the same."""

    class Odd(io.StringIO):
        def reconfigure(self, **_: object) -> None:
            raise OSError(errno.ESPIPE, "Illegal seek")

    monkeypatch.setattr(sys, "stdout", Odd())
    monkeypatch.setattr(sys, "argv", ["selfmask", "--help"])
    with pytest.raises(SystemExit) as end:
        app()
    assert end.value.code == 0
