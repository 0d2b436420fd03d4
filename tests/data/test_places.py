"""Shards on servers: read in blocks, a few tries when one fails, and then an error that names it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from selfmask.data import open_images, places
from selfmask.data.identity import identity
from selfmask.errors import DataUnavailableError, NoImagesError

from .shards import Server, serving, shards


@pytest.fixture(autouse=True)
def _few_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "_WAITS", (0.01, 0.01))
    monkeypatch.setattr(places, "_BLOCK", 4096)
    monkeypatch.setenv("SELFMASK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(shards(tmp_path / "s", 2, labels=True)) as server:
        yield server


def test_tars_of_a_web_server_are_those_of_the_disk(server: Server) -> None:
    images = open_images(f"{server.url}/photos-{{000..001}}.tar")
    there = open_images(server.folder)
    assert (images.names, images.labels) == (there.names, there.labels)
    assert identity(images) == identity(there)
    assert images[13].equal(there[13])
    blocks = [asked for asked in server.asked if asked.startswith("GET")]
    assert len(blocks) == len(set(blocks))  # every block once, though each holds many images
    assert len(blocks) == sum(-(-file.stat().st_size // 4096) for file in server.folder.iterdir())


def test_an_answer_that_stops_half_way_is_asked_for_again(server: Server) -> None:
    server.trouble["photos-000.tar"] = ["half", "half", ""]
    images = open_images(f"{server.url}/photos-000.tar")
    assert images[9].equal(open_images(server.folder)[9])


@pytest.mark.parametrize("trouble", ["403", "half"])
def test_a_server_that_refuses_or_always_stops_is_named_after_a_few_tries(server: Server, trouble: str) -> None:
    server.trouble["photos-001.tar"] = [trouble]
    start = time.monotonic()
    with pytest.raises(DataUnavailableError, match=r"cannot read http://127.*photos-001.tar") as caught:
        open_images(f"{server.url}/photos-{{000..001}}.tar")
    assert time.monotonic() - start < 10
    assert "3 tries" in str(caught.value)
    if trouble == "403":
        assert "403" in str(caught.value)
    asked = [each for each in server.asked if "photos-001" in each and each.startswith("GET")]
    assert 3 <= len(asked) <= 6


def test_what_is_not_there_is_said_at_once(server: Server) -> None:
    with pytest.raises(NoImagesError, match=r"there is no http://.*photos-007.tar"):
        open_images(f"{server.url}/photos-007.tar")
    with pytest.raises(NoImagesError, match=r"URL ending in .tar or .parquet"):
        open_images(f"{server.url}/photos")
    with pytest.raises(NoImagesError, match=r"cannot open nonsense://x.tar"):
        open_images("nonsense://x.tar")


def test_a_server_that_gives_only_whole_files_is_refused(server: Server) -> None:
    server.trouble["photos-000.tar"] = ["no ranges"]
    with pytest.raises(DataUnavailableError, match=r"in parts"):
        open_images(f"{server.url}/photos-000.tar")


def test_nobody_there(server: Server) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(DataUnavailableError, match=r"cannot read http"):
        open_images(f"{url}/photos-000.tar")


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that speaks as much of S3 as reading needs; who asks is not looked at."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    (server.folder / "photos").mkdir()
    for file in server.folder.glob("*.tar"):
        file.rename(server.folder / "photos" / file.name)
    return server


def test_tars_of_s3_are_those_of_the_disk(s3: Server) -> None:
    images, there = open_images("s3://photos/photos-{000..001}.tar"), open_images(s3.folder / "photos")
    assert identity(images) == identity(there)
    assert images[17].equal(there[17])
    assert any(asked.startswith("GET photos/photos-001.tar bytes=") for asked in s3.asked)
    with pytest.raises(NoImagesError, match=r"there is no s3://photos/photos-002.tar"):
        open_images("s3://photos/photos-002.tar")


def test_s3_that_refuses_is_named(s3: Server) -> None:
    s3.trouble["photos/photos-001.tar"] = ["403"]
    with pytest.raises(DataUnavailableError, match=r"cannot read s3://photos/photos-001.tar") as caught:
        open_images("s3://photos/photos-{000..001}.tar")
    assert "3 tries" in str(caught.value)
