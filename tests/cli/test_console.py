"""Whatever files say, the terminal only shows it: no escape sequence, no forged line, no markup, no traceback."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import nn

import selfmask
from selfmask import MaskConfig, get_masked_model
from selfmask.cli.console import Console, print_json
from selfmask.cli.display import ConsoleDisplay
from selfmask.cli.embed import progress_on
from selfmask.errors import ConfigError, SelfmaskError
from tests.cli.inside import Done
from tests.cli.inside import selfmask as run
from tests.cli.small import SMALL, fine, kept
from tests.cli.test_adapt import save_clothes

NASTY = "\x1b[31m\x1b]0;owned\x07\x9b2J\u202egpj\u2066\ud83d\r\n  do:       [red]:warning: rm -rf\x00"
ODD = re.compile("[^\n\\x20-\\x7e│┃┏┓┗┛┡┩━─┴┬└┘┳╇┼├┤╞═┻╭╮╰╯·█±]")
FILE = NASTY.replace("/", "").replace("\x00", "").replace("\ud83d", "\udcff")  # a name that a file can have


def safe(text: str) -> str:
    """What stands there, if it orders nothing."""
    assert not ODD.findall(text)
    text.encode()
    return text


def done_safely(done: Done) -> Done:
    safe(done.stdout)
    safe(done.stderr)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("terminal", [False, True])
def test_whatever_is_printed_orders_nothing(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=300, force_terminal=terminal, color_system=None)
    table = Table(NASTY, title=NASTY, caption=NASTY)
    table.add_row(NASTY)
    table.add_row(Text(NASTY))
    console.print(table)
    console.print(NASTY, style="bold")
    console.print(Text.assemble((NASTY, "red")))
    console.say(NASTY, "and a second line")
    shown = safe(out.getvalue())
    assert shown.count("[red]:warning: rm -rf") == 8
    assert shown.endswith("\nand a second line\n")


def test_a_bar_still_moves() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(NASTY, total=2)
        bar.refresh()
    codes = set(re.findall("\x1b[^A-Za-z]*[A-Za-z]", out.getvalue()))
    assert codes <= {"\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\x1b[0m"}  # what rich itself needs
    assert r"\x1b]0;owned" in out.getvalue()


def test_a_display_says_trouble_on_one_line() -> None:
    out = io.StringIO()
    ConsoleDisplay(Console(file=out, width=80)).say(NASTY)
    assert safe(out.getvalue()).count("\n") == 1


def test_errors_keep_their_lines_apart() -> None:
    text = safe(str(SelfmaskError(NASTY, expected=NASTY, found=f"{NASTY}\n{NASTY}", todo="count")))
    assert [line for line in text.splitlines() if line.startswith("  do:")] == ["  do:       count"]
    assert [line[:12] for line in text.splitlines()[1:]].count("  found:    ") == 1


@pytest.fixture
def nasty_mask(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    masked = get_masked_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), MaskConfig())
    masked.base_name = NASTY.replace("\ud83d", "")
    file = tmp_path / f"{FILE}.smn"
    masked.save_pretrained(file, notes=NASTY.replace("\ud83d", ""))
    return file


def test_inspect_of_a_file_with_an_evil_name_and_notes(nasty_mask: Path) -> None:
    done = done_safely(run("inspect", nasty_mask))
    assert done.returncode == 0
    assert "[red]:warning: rm -rf" in done.stdout
    told = json.loads(run("inspect", nasty_mask, "--json").stdout)
    assert told["notes"] == told["base_name"] == NASTY.replace("\ud83d", "")  # exact: JSON escapes by itself


def test_errors_of_files_with_evil_names(tmp_path: Path, nasty_mask: Path) -> None:
    broken = tmp_path / f"broken{FILE}.smn"
    broken.write_bytes(nasty_mask.read_bytes()[:-1])
    config = tmp_path / f"{FILE}.toml"
    config.write_text('"\\u001b[31m" = 1\n')
    listed = tmp_path / "list.txt"
    listed.write_text("\x1b[31m.jpg,1,2,3\n")
    for words in (
        ("inspect", broken),
        ("embed", nasty_mask, tmp_path),
        ("embed", FILE, FILE),
        ("adapt", FILE),
        ("adapt", listed, *SMALL),
        ("adapt", tmp_path, "--config", config),
        ("adapt", tmp_path, "--backbone", FILE),
        ("adapt", "--resume", tmp_path / FILE),
        ("evaluate", "selfmask/tiny", "--data", FILE),
        ("adapt", tmp_path, "--steps", FILE),
        ("adapt", tmp_path, f"--{FILE}"),
        (FILE,),
        (f"--{FILE}",),
    ):
        done = done_safely(run(*words))
        assert done.returncode == 2, words
        assert "rror" in done.stderr


@pytest.mark.heavy
def test_a_run_on_pictures_with_evil_names(tmp_path: Path) -> None:
    images = tmp_path / f"{FILE}"
    save_clothes(images, 30)
    folder = next(each for each in images.iterdir() if each.is_dir())
    folder.rename(images / f"[red]{FILE}")
    (images / f"[red]{FILE}" / f"{FILE}.jpg").write_bytes(b"no image")
    out = tmp_path / "run"
    done = done_safely(fine(run("adapt", images, *SMALL, "--split", "all", "--out", out)))
    assert "could not be read" in done.stdout
    assert kept(out)["images"].endswith(FILE)  # the exact name, to find the images again
    done = done_safely(run("evaluate", out, "--data", images, "--report", tmp_path / "page.html", "--no-cache"))
    assert done.returncode == 0, done.stderr
    for page in (out / "report.html", tmp_path / "page.html"):
        text = page.read_bytes().decode()
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)
        assert "owned" in text
    assert done_safely(run("embed", out, images, "--out", tmp_path / "v.npz")).returncode == 0
    assert len((tmp_path / "v.npz.bad.txt").read_text().splitlines()) == 1


def test_warnings_are_shown_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfmask.cli._app", lambda: warnings.warn(f"odd {NASTY}", RuntimeWarning, stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = done_safely(run())
    assert "RuntimeWarning: odd \\x1b[31m" in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_tells_its_own_error_and_the_main_one_those_of_all(
    monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    error = ConfigError("it broke")

    def fail() -> None:
        raise error

    monkeypatch.setattr("selfmask.cli._app", fail)
    whose = "error: it broke" if rank == "0" else "error in process 1: it broke"
    assert run() == Done(2, "", f"{whose}\n")
    error.of_main = True
    assert run() == Done(2, "", "")


@pytest.mark.parametrize("words", [("missing.smn",), (), ("--no-such", "x.smn"), ("a.smn", "b.smn")])
def test_with_json_errors_are_json_too(words: tuple[str, ...]) -> None:
    done = run("inspect", *words, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 2
    assert told["error"]
    assert "rror" in done.stderr


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5, (float("inf"),)], "b": NASTY})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": [None, 1.5, [None]], "b": NASTY}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_console_of_few_letters_shows_what_it_can(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=stream, width=80)
    table = Table("█·", title="ä ± 図")
    console.print(table)
    stream.flush()
    shown = raw.getvalue().decode(encoding)
    assert {"ascii": "\\xe4 +- \\u56f3", "latin-1": "ä +- \\u56f3", "utf-8": "ä ± 図"}[encoding] in shown
    assert ("#." in shown) == (encoding != "utf-8")


@pytest.mark.heavy
@pytest.mark.parametrize("words", [["--help"], ["inspect", "--help"], ["inspect", "ä\u202e図.smn"]])
def test_other_locales_are_no_traceback(words: list[str]) -> None:
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "selfmask", *words]
    done = subprocess.run(command, env={**os.environ, **plain}, capture_output=True)
    assert done.returncode == (0 if "--help" in words else 2)
    assert b"Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()


def test_nothing_prints_past_the_console() -> None:
    root = Path(selfmask.__file__).parent
    for file in root.rglob("*.py"):
        name = str(file.relative_to(root))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and name != "training/loop.py":
                assert node.func.id != "print" or name == "cli/console.py", name
            if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
                assert name == "cli/console.py" or "Console" not in {each.name for each in node.names}, name


def test_forced_colours_do_not_make_a_terminal_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out)
    assert console.is_terminal
    assert not console.redraws
    with progress_on(console, "embedding") as progress:
        progress(1, 2)
    assert out.getvalue() == ""  # no bar; lines come after seconds only
    assert Console(file=io.StringIO(), force_terminal=True).redraws
