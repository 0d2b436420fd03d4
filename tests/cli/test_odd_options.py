"""Whatever is given to an option, the answer is a run or an error that says what to do, without a traceback."""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfmask import checked, cli
from selfmask.errors import RunWriteError
from selfmask.files import write_atomically
from tests.cli.inside import selfmask
from tests.cli.small import SMALL, fine, refused
from tests.light import mostly_heavy

BEGUN = {
    "adapt": "selfmask.commands.adapt.adapt",
    "train": "selfmask.commands.train.train",
    "compare": "selfmask.commands.compare.compare",
    "cascade": "selfmask.commands.cascade.run.fit_cascade",
    "pretrain": "selfmask.commands.pretrain.pretrain",
    "embed": "selfmask.embedding.features.write_features",
    "evaluate": "selfmask.commands.evaluate.features_of",
}
NUMBERS = ["inf", "-inf", "nan", "0", "-1", "1e308", "9" * 30, "", "x", ",", "1,2,3", "\u202e\x1b[31m", "x" * 5000]
PLACES = ["", ".", "/", "/dev/null", "/dev/zero", "/proc/self/mem", "no/such", "x" * 5000, "\x1b[31m\udcff", "~nobody"]
ENDINGS = (".smn", ".toml", ".txt", ".npz", ".safetensors", ".html")
FILES = {"out", "resume", "config", "weights", "images", "data", "what", "classes", "report", "dispatcher", "backbone"}
FILES |= {"map_file"}


LOAD = functools.cache(cli.load)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are pipes, or have no end."""
    folder = tmp_path_factory.mktemp("odd")
    for ending in ENDINGS:
        os.mkfifo(folder / f"pipe{ending}")
        (folder / f"zero{ending}").symlink_to("/dev/zero")
    return folder


@pytest.fixture
def no_runs(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among these files, and where no work begins."""

    def begin(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    for module in {place.rpartition(".")[0] for place in BEGUN.values()}:
        importlib.import_module(module)  # before any is changed: some have the function of another
    monkeypatch.chdir(odd)
    monkeypatch.setattr(cli, "load", LOAD)
    for place in BEGUN.values():
        monkeypatch.setattr(place, begin)


def cases(verb: str, photos: Path) -> Iterator[list[str]]:
    """The verb with one odd value, for all options in turn."""
    command = LOAD(verb)
    places = [*PLACES, *(f"{kind}{ending}" for kind in ("pipe", "zero") for ending in ENDINGS)]
    words = {
        "embed": ["selfmask/tiny", str(photos)],
        "evaluate": ["selfmask/tiny", f"--data={photos}"],
    }.get(verb, [str(photos), *(["--backbone=selfmask/tiny"] if verb != "pretrain" else [])])
    for option in (command.commands["run"] if verb == "cascade" else command).params:
        if option.name == "help" or getattr(option, "is_flag", False):
            continue
        for value in places if option.name in FILES else NUMBERS:
            if option.param_type_name == "option":
                own = [word for word in words if not word.startswith(f"{option.opts[0]}=")]
                yield [verb, *own, f"{option.opts[0]}={value}"]
            else:
                place = 1 if verb == "embed" and option.name == "images" else 0
                yield [verb, *(value if number == place else word for number, word in enumerate(words))]


def answered(words: list[str]) -> None:
    done = selfmask(*words)
    assert done.returncode in (0, 2), words
    assert "Traceback" not in done.stderr, words
    assert not {"\x1b", "\u202e", "\udcff"} & {*done.stdout, *done.stderr}, words
    if done.returncode == 2:
        assert "rror" in done.stderr, words


@pytest.mark.parametrize("verb", mostly_heavy(list(BEGUN), 2))
def test_odd_values(verb: str, no_runs: None, photos: Path) -> None:
    for words in random.Random(verb).sample(list(cases(verb, photos)), 60):
        if words[-1] not in ("/", "--data=/"):  # all images of this machine
            answered(words)


@pytest.mark.heavy
@pytest.mark.parametrize("verb", BEGUN)
def test_all_odd_values(verb: str, no_runs: None, photos: Path) -> None:
    for words in cases(verb, photos):
        if words[-1] not in ("/", "--data=/"):
            answered(words)


@pytest.mark.parametrize(
    "words",
    [
        ("adapt", "--epochs", "inf"),
        ("adapt", "--epochs", "nan"),
        ("adapt", "--steps", "9" * 25),
        ("adapt", "--s0", "1e308"),
        ("adapt", "--warmup", "-1"),
        ("adapt", "--momentum", "2"),
        ("adapt", "--workers", "-1"),
        ("adapt", "--max-bad", "nan"),
        ("adapt", "--max-pixels", "0"),
        ("compare", "--size", "0"),
        ("compare", "--seeds", "1000000000"),
        ("train", "--size", "1000000000"),
        ("cascade", "--experts", "1000000000"),
    ],
    ids=" ".join,
)
def test_numbers_that_make_no_sense(words: tuple[str, ...], photos: Path, tmp_path: Path) -> None:
    verb, *option = words
    small = [word for word in SMALL if option[0] not in ("--epochs", "--steps") or word not in ("--steps", "2")]
    done = selfmask(verb, photos, *small, *option, "--out", tmp_path / "run")
    refused(done, "expected")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("what", ["pipe.smn", "/proc/self/mem", "/dev/zero", "/dev/null", ".", "x" * 5000, ""])
def test_inspect_of_what_is_no_file(what: str, odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(odd)
    done = selfmask("inspect", what, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr


def test_a_config_file_can_name_what_no_path_can_be(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text in ('images = "a\\u0000b"', f'images = "{"x" * 5000}"', 'images = "p"\nweights = "a\\u0000b"'):
        file.write_text(text)
        refused(selfmask("adapt", "--config", file, "--out", tmp_path / "run"), "error:")
    file.write_bytes(b"#" * (5 << 20))
    refused(selfmask("adapt", "--config", file, "--out", tmp_path / "run"), "larger than")


def test_devices_are_not_replaced_by_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(RunWriteError):
            write_atomically(path, b"data")
    assert not (tmp_path / "pipe").is_file()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_what_is_read_is_a_file_and_not_too_long(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert checked.content(file, most=5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4"):
        checked.content(file, most=4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises((OSError, ValueError), match=r"not a regular file|Is a directory"):
            checked.content(path, most=4)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(36, "File name too long", "xxx"), "File name too long"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
    ],
    ids=["name", "python", "torch"],
)
def test_what_the_system_refuses_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "_app", fail)
    refused(selfmask(), said)


@pytest.mark.heavy
def test_large_images_are_counted_and_listed_by_every_verb(photos: Path, tmp_path: Path) -> None:
    """Pictures of clothes have 28 x 28 = 784 pixels."""
    small = ("--max-pixels", "783")
    for verb, *more in (("adapt",), ("train",), ("cascade", "--experts", "2")):
        done = selfmask(verb, photos, *SMALL, *small, *more, "--out", tmp_path / verb)
        refused(done, "784 pixels, more than the limit of 783 (--max-pixels)")
    refused(selfmask("compare", photos, *SMALL, *small, "--out", tmp_path / "compare"), "no vectors of the images")
    for words in (
        ("embed", "selfmask/tiny", photos, "--out", tmp_path / "v.npz"),
        ("evaluate", "selfmask/tiny", "--data", photos),
    ):
        refused(selfmask(*words, *small), "read")
        assert selfmask(*words, "--max-pixels", "784").returncode == 0
    out = tmp_path / "allowed"
    fine(selfmask("adapt", photos, *SMALL, "--max-pixels", "784", "--out", out))
    assert json.loads((out / "config.json").read_text())["max_pixels"] == 784
