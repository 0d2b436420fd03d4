"""Frames of videos: which ones, under which names, and what becomes of videos that are broken or made to harm."""

from __future__ import annotations

import contextlib
import random
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from selfmask.data import ImageStore, open_images, videos
from selfmask.data.identity import identity
from selfmask.data.videos import rate_named
from selfmask.errors import BadImageError, ConfigError, MalformedDataError, NoImagesError, SelfmaskError

from .movies import CODECS, FPS, SECONDS, picture, shown, write
from .shards import serving


def test_what_was_drawn_is_read() -> None:
    assert [shown(torch.from_numpy(picture(number, 64)).permute(2, 0, 1)) for number in range(256)] == list(range(256))


@pytest.mark.parametrize("ending", CODECS)
def test_a_frame_of_each_second(tmp_path: Path, ending: str) -> None:
    images = open_images(write(tmp_path / f"movie{ending}"))
    assert images.names == [f"movie{ending}#{second}.000" for second in range(SECONDS)]
    assert [shown(images[number]) for number in range(SECONDS)] == [second * FPS for second in range(SECONDS)]
    assert (images[0].dtype, images[0].shape) == (torch.uint8, (3, 64, 64))
    assert images.own_names


@pytest.mark.parametrize(
    ("rate", "expected"),
    [("2.5", [0, 4, 8, 12]), ("0.5", [0, 20, 40]), ("10", [0, 1, 2, 3]), ("1000", [0, 1, 2, 3]), ("1/3", [0, 30])],
)
def test_other_rates(tmp_path: Path, rate: str, expected: list[int]) -> None:
    path = write(tmp_path / "movie.mp4")
    images = open_images(f"{path}#fps={rate}")
    wanted = Fraction(rate)
    assert [shown(images[number]) for number in range(len(expected))] == expected
    assert len(images) == min(FPS * SECONDS, -(-SECONDS * wanted.numerator // wanted.denominator))
    assert len({*images.names}) == len(images)


@pytest.mark.parametrize("key_every", [1, 7, 1000])
def test_any_frame_by_itself_is_what_it_is_in_order(
    tmp_path: Path, key_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "movie.mp4", key_every=key_every)
    images = open_images(f"{path}#fps=10")
    in_order = torch.stack([images[number] for number in range(len(images))])
    monkeypatch.setattr(videos, "_FRAMES", videos.Recent(0, lambda _: 1))  # keeps nothing but the last two lots
    for number in random.Random(0).sample(range(len(images)), 30):
        assert images[number].equal(in_order[number])
    store = ImageStore(open_images(f"{path}#fps=10"), side=32)
    assert [shown(store[number]) for number in range(len(store))] == list(range(FPS * SECONDS))


def test_folders_of_videos_have_classes_and_parts_as_those_of_images(tmp_path: Path) -> None:
    for name in ("train/cats/a.mp4", "train/dogs/b.mkv", "test/cats/c.mp4"):
        write(tmp_path / "set" / name, seconds=2)
    images = open_images(tmp_path / "set")
    assert images.names == ["cats/a.mp4#0.000", "cats/a.mp4#1.000", "dogs/b.mkv#0.000", "dogs/b.mkv#1.000"]
    assert (images.labels, images.classes) == ([0, 0, 1, 1], ["cats", "dogs"])
    assert open_images(f"{tmp_path}/set#fps=0.5", split="test").names == ["cats/c.mp4#0.000"]
    assert not images.undivided
    assert "train and test" in open_images(tmp_path / "set/train").note


def test_by_braces_and_from_a_server_they_are_those_of_the_disk(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "v" / f"{number}.mp4", seconds=1 + number)
    here = open_images(f"{tmp_path}/v/{{0..1}}.mp4#fps=5")
    assert identity(open_images(f"{tmp_path}/v#fps=5")) == identity(here)
    with serving(tmp_path / "v") as server:
        there = open_images(f"{server.url}/{{0..1}}.mp4#fps=5")
        assert identity(there) == identity(here)
        assert all(there[number].equal(here[number]) for number in range(len(here)))
    assert identity(open_images(f"{tmp_path}/v#fps=4")) != identity(here)
    before = identity(open_images(tmp_path / "v"))
    write(tmp_path / "v" / "1.mp4", seconds=2, key_every=3)
    assert identity(open_images(tmp_path / "v")) != before


def test_a_video_held_upright(tmp_path: Path) -> None:
    path = write(tmp_path / "movie.mp4", seconds=1)
    data = bytearray(path.read_bytes())
    place = data.index(b"tkhd") + 4 + 40
    quarter = [0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30]  # clockwise, as a phone writes it that was held upright
    data[place : place + 36] = b"".join(number.to_bytes(4, "big", signed=True) for number in quarter)
    turned = tmp_path / "turned.mp4"
    turned.write_bytes(data)
    straight = open_images(f"{path}#fps=10")[3]
    assert open_images(f"{turned}#fps=10")[3].equal(straight.rot90(-1, (1, 2)))


# ---- broken ones ----------------------------------------------------------------------------------------------------


def test_a_broken_video_is_one_bad_image(tmp_path: Path) -> None:
    write(tmp_path / "v" / "a.mp4")
    (tmp_path / "v" / "b.mp4").write_bytes(b"no video" * 1000)
    (tmp_path / "v" / "c.mp4").touch()
    store = ImageStore(open_images(f"{tmp_path}/v#fps=10"), side=32)
    assert [name for name, _ in store.bad] == ["b.mp4", "c.mp4"]
    (tmp_path / "v" / "a.mp4").unlink()
    with pytest.raises(MalformedDataError, match=r"no frames in .*b.mp4 and 1 more"):
        open_images(tmp_path / "v")


@pytest.mark.parametrize("ending", [".mp4", ".mkv", ".avi"])
def test_what_is_missing_of_a_video_is_a_bad_image(tmp_path: Path, ending: str) -> None:
    options = {"movflags": "faststart"} if ending == ".mp4" else {}
    path = write(tmp_path / f"movie{ending}", **options)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    images = open_images(f"{path}#fps=10")
    assert images.names[len(images) - 1] == f"movie{ending}#end"
    with pytest.raises(BadImageError):
        images[len(images) - 1]
    good = [shown(images[number]) for number in range(len(images) - 1)]
    assert good == list(range(len(good)))
    assert (1 if ending == ".avi" else 20) <= len(good) < 50


def test_an_mp4_without_its_index_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "movie.mp4")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(MalformedDataError, match=r"no frames in .*movie.mp4"):
        open_images(path)


def test_a_frame_that_is_damaged_is_never_another(tmp_path: Path) -> None:
    path = write(tmp_path / "movie.mkv", key_every=5)
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 3 + 4000] = bytes(4000)
    path.write_bytes(data)
    images = open_images(f"{path}#fps=10")
    seen = list[str]()
    for number, name in enumerate(images.names):
        with contextlib.suppress(BadImageError):
            assert shown(images[number]) == round(float(name.rpartition("#")[2]) * FPS)
            seen.append(name)
    assert 40 < len(seen) < 60


def test_a_frame_that_the_decoder_leaves_out_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "movie.mkv")
    decoded = videos._frames
    monkeypatch.setattr(videos, "_frames", lambda *given: (f for f in decoded(*given) if f.pts != 300))  # milliseconds
    images = open_images(f"{path}#fps=10")
    assert shown(images[2]) == 2
    with pytest.raises(BadImageError, match="cannot be decoded"):
        images[3]


def test_random_damage_never_raises_anything_but_our_errors(tmp_path: Path) -> None:
    chance = random.Random(0)
    for ending in (".mp4", ".mkv", ".avi"):
        whole = write(tmp_path / f"movie{ending}", seconds=2).read_bytes()
        for turn in range(25):
            data = bytearray(whole)
            for _ in range(chance.choice((1, 4, 40))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path = tmp_path / f"{turn}{ending}"
            path.write_bytes(data)
            try:
                images = open_images(f"{path}#fps=10")
            except SelfmaskError:
                continue
            assert len(images) <= 30
            for number in range(len(images)):
                try:
                    images[number]
                except BadImageError:
                    continue


def test_frames_of_too_many_pixels_are_not_decoded(tmp_path: Path) -> None:
    path = write(tmp_path / "movie.mp4", side=128, seconds=1)
    assert open_images(path, max_pixels=128 * 128)[0].shape == (3, 128, 128)
    with pytest.raises(BadImageError, match=r"16,384 pixels, more than the limit"):
        open_images(path, max_pixels=128 * 128 - 1)[0]


def test_a_playlist_that_calls_itself_a_video_opens_nothing(tmp_path: Path) -> None:
    real = write(tmp_path / "real.mp4", seconds=1)
    for text in (f"#EXTM3U\n#EXTINF:1,\n{real}\n#EXT-X-ENDLIST\n", f"ffconcat version 1.0\nfile '{real}'\n"):
        for ending in (".mp4", ".mkv", ".avi"):
            (tmp_path / f"list{ending}").write_text(text)
            with pytest.raises(MalformedDataError):
                open_images(tmp_path / f"list{ending}")


def test_codecs_that_nobody_uses_are_not_tried(tmp_path: Path) -> None:
    with pytest.raises(MalformedDataError, match="pictures coded as ffv1"):
        open_images(write(tmp_path / "movie.mkv", codec="ffv1", seconds=1))


@pytest.mark.parametrize("text", ["fps=0", "fps=-1", "fps=", "fps=x", "fps=1e3", "fps=1001", "fps=1/0", "2", "column"])
def test_what_is_no_rate_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a rate"):
        rate_named(text)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoImagesError, match=r"movie.mp4"):
        open_images(tmp_path / "movie.mp4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoImagesError, match="there are no images in"):
        open_images(tmp_path / "empty")
