"""Frames of videos, so many a second, each an image by itself; read by PyAV, which is of the extra `video`.

Once, all packets of a video are looked through without decoding them: then it is known which frames there are, and
from which keyframe each is decoded. Frames that follow each other are decoded together, and the last ones kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadImageError, ConfigError, MalformedDataError, MissingExtraError, SelfmaskError
from .folders import open_folder
from .images import check_pixels, printable
from .names import Names
from .places import LocalFile, Place
from .recent import Recent
from .records import RecordImages

# What each is read as is never guessed: FFmpeg also knows formats that open other files, and addresses.
_FORMATS = {".mp4": "mov", ".m4v": "mov", ".mov": "mov", ".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}
ENDINGS = tuple(_FORMATS)
# Only what people keep videos in: a decoder that is not asked cannot be attacked.
_CODECS = ("h264", "hevc", "vp8", "vp9", "libvpx-vp9", "av1", "libdav1d", "mpeg4", "mpeg2video", "mjpeg")
RATE = Fraction(1)
"""Frames a second, unless the user says otherwise."""
_HIGHEST = 1000  # names have milliseconds
_MARK = "fps="
_TOGETHER, _TOGETHER_BYTES = 16, 64 << 20  # frames decoded at a time, at most
_ENOUGH = 8  # frames, after which the next keyframe begins another lot
_AT_ONCE = 8  # videos looked through side by side
_FRAMES: Recent[list[Tensor | str]] = Recent(
    256 << 20, lambda lot: sum(each.numel() for each in lot if isinstance(each, Tensor))
)
_HASHES: Recent[bytes] = Recent(1 << 20, len)


@dataclasses.dataclass(frozen=True)
class Video:
    """The frames of a video that are wanted.

    stamps: when each is shown, in units of the file, ascending. keys: the keyframe that each is decoded from.
    times: the seconds, from the beginning, that each was taken for.
    lots: the numbers of the first frames of those that are decoded together.
    exact: whether decoded frames have the stamps of their packets; old AVI files only have those of decoding.
    trouble: what is wrong with it; then one more image stands for what is missing, and is bad.
    """

    stamps: NDArray[np.int64]
    keys: NDArray[np.int64]
    times: list[Fraction]
    pixels: int = 0
    lots: list[int] = dataclasses.field(default_factory=lambda: [0])
    trouble: str = ""
    exact: bool = True

    def __len__(self) -> int:
        return len(self.times) + bool(self.trouble)


class VideoImages(RecordImages):
    """The frames of some videos, one after the other."""

    own_names = True

    def __init__(
        self,
        places: Sequence[Place],
        names: Sequence[str],
        rate: Fraction,
        labels: Sequence[int] | None = None,
        classes: list[str] | None = None,
    ) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self._videos = list(pool.map(lambda place: _looked_through(place, rate), places))
        if not any(video.times for video in self._videos):
            more = f" and {len(places) - 1:,} more" if len(places) > 1 else ""
            raise MalformedDataError(
                f"there are no frames in {places[0].name}{more}", found=self._videos[0].trouble or "an empty video"
            )
        own = None
        if labels is not None:
            own = [label for label, video in zip(labels, self._videos, strict=True) for _ in range(len(video))]
        super().__init__(places, Names(_named(names, self._videos)), own, classes)
        self._starts = [0, *itertools.accumulate(map(len, self._videos))]
        self.undivided = True
        if labels is not None:
            self.note = (
                "frames of one video may be learned from and tested with, unless folders train and test divide them"
            )

    def shard(self, i: int) -> int:
        return bisect_right(self._starts, i) - 1

    def sha256(self, i: int) -> bytes:
        """Of the file that it is a frame of, and of its time: nothing is decoded to know what it is."""
        place, stamp = self.shards[self.shard(i)], self._stamps[self.shard(i)]
        whole = _HASHES.get((place.name, stamp), lambda: _hash(place))
        return hashlib.sha256(whole + self.names[i].rpartition("#")[2].encode()).digest()

    def load(self, i: int, *, near: int | None = None) -> Tensor:
        shard = self.shard(i)
        video, number = self._videos[shard], i - self._starts[shard]
        if number == len(video.times):
            raise BadImageError(f"cannot read {self.names[i]}", found=video.trouble)
        check_pixels(video.pixels, self.max_pixels)
        lot = bisect_right(video.lots, number) - 1
        stop = video.lots[lot + 1] if lot + 1 < len(video.lots) else len(video.times)
        wanted = range(video.lots[lot], stop)
        key = (self.shards[shard].name, self._stamps[shard], tuple(video.stamps[wanted.start : stop].tolist()))
        frames = _FRAMES.get(
            (*key, self.max_pixels), lambda: _decoded(self.shards[shard], video, wanted, self.max_pixels)
        )
        frame = frames[number - wanted.start]
        if isinstance(frame, str):
            raise BadImageError(f"cannot read {self.names[i]}", found=frame)
        return frame.clone()  # others may be given the same


def is_video(path: str) -> bool:
    return Path(path).suffix.lower() in _FORMATS


def rate_named(text: str | None) -> Fraction:
    """What stands behind the `#` of a video, or of a folder of them: `fps=2`, `fps=0.5`."""
    if text is None:
        return RATE
    found = re.fullmatch(r"fps=(\d{1,4}(?:\.\d{1,6})?|\d{1,4}/\d{1,4})", text)
    rate = Fraction(found[1]) if found and not re.search(r"/0+$", found[1]) else Fraction(0)
    if not 0 < rate <= _HIGHEST:
        raise ConfigError("not a rate of frames", expected=f"#fps=2, #fps=0.5, at most {_HIGHEST:,}", found=f"#{text}")
    return rate


def with_rate(where: str) -> tuple[str, str | None]:
    """The path, and the rate behind it, if there is one."""
    path, mark, text = where.rpartition("#")
    return (path, text) if mark and text.startswith(_MARK) else (where, None)


def open_videos(places: Sequence[Place], rate: str | None) -> VideoImages:
    names = [place.name.rpartition("/")[2] for place in places]
    if len({*names}) < len(names):
        names = [place.name for place in places]
    return VideoImages(places, names, rate_named(rate))


def open_folder_of_videos(root: Path, split: str, rate: str | None) -> VideoImages:
    """The frames of all videos below a folder, which may have parts and classes as one of images has."""
    files = open_folder(root, split, ENDINGS)
    places = [LocalFile(file) for file in files.files]
    images = VideoImages(places, files.names, rate_named(rate), files.labels, files.classes)
    images.undivided = files.undivided
    return images


def _named(names: Sequence[str], videos: Sequence[Video]) -> Iterator[bytes]:
    for name, video in zip(names, videos, strict=True):
        for time in video.times:
            yield f"{name}#{float(time):.3f}".encode()
        if video.trouble:
            yield (f"{name}#end" if video.times else name).encode()


def _hash(place: Place) -> bytes:
    with place.open() as file:
        return hashlib.file_digest(file, "sha256").digest()


# ---- looking through a video ----------------------------------------------------------------------------------------


class _File:
    """What PyAV asks of a file. Damaged videos lead to places before its beginning; an error would be printed."""

    def __init__(self, file: io.BufferedReader, size: int) -> None:
        self.read, self.tell, self._file, self._size = file.read, file.tell, file, size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._file.tell()
        elif whence == os.SEEK_END:
            offset += self._size
        return -1 if offset < 0 else self._file.seek(offset)


@contextlib.contextmanager
def _opened(place: Place, max_pixels: int | None = None) -> Iterator[tuple[Any, Any]]:
    """The file, and the stream of its pictures, ready to be decoded."""
    try:
        import av
    except ImportError:
        raise MissingExtraError(
            f"cannot read {place.name}: PyAV is not installed", todo="pip install 'selfmask[video]'"
        ) from None
    how = _FORMATS[Path(place.name.partition("?")[0]).suffix.lower()]
    with place.open() as file, av.open(_File(file, place.size()), format=how, metadata_errors="replace") as container:
        if not container.streams.video:
            raise BadImageError("not a video", found="no pictures in it")
        stream = container.streams.video[0]
        codec = stream.codec_context
        if codec is None or codec.name not in _CODECS:
            raise BadImageError("not a video", found=f"pictures coded as {codec.name if codec else 'nothing known'}")
        codec.thread_count = 1  # decoding is divided among threads by lots
        if max_pixels is not None:
            codec.options = {"max_pixels": str(max_pixels)}
        yield container, stream


def _looked_through(place: Place, rate: Fraction) -> Video:
    """Which frames to take; what cannot be read counts as one bad image."""
    shown, keys, cut = list[int](), list[int](), ""
    unit, pixels, packets, longest, begins, exact = Fraction(1), 0, 0, 0, None, True
    try:
        with _opened(place) as (container, stream):
            unit, pixels = Fraction(stream.time_base), stream.codec_context.width * stream.codec_context.height
            try:
                for packet in container.demux(stream):
                    stamp = packet.dts if packet.pts is None else packet.pts
                    packets += packet.size > 0
                    if stamp is None or packet.is_discard or not packet.size:
                        continue
                    if packet.is_corrupt:
                        cut = "a part of the file is missing"
                        continue
                    exact = exact and packet.pts is not None
                    shown.append(stamp)
                    longest = max(longest, packet.duration or 0)
                    if packet.is_keyframe:
                        keys.append(stamp)
            except Exception as error:  # FFmpeg's errors have many kinds
                cut = _reason(error)
            if not cut and packets < stream.frames:
                cut = f"{packets:,} of {stream.frames:,} frames are there"
            begins = stream.start_time
            length = float((stream.duration or 0) * unit) or (container.duration or 0) / 1e6
    except (MissingExtraError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, SelfmaskError) and not isinstance(error, BadImageError):
            raise  # what a server said
        return Video(np.empty(0, np.int64), np.empty(0, np.int64), [], trouble=_reason(error))
    if not shown or not keys or not unit or not pixels:
        return Video(np.empty(0, np.int64), np.empty(0, np.int64), [], trouble=cut or "there are no frames")
    shown.sort()
    keys.sort()
    begins = shown[0] if begins is None else min(begins, shown[0])
    seconds = float((shown[-1] + longest - begins) * unit)
    if not cut and length > seconds + max(1.0, 0.02 * length):
        cut = f"it ends after {seconds:.1f} of {length:.1f} seconds"
    stamps, times = _chosen(np.array(shown, np.int64), keys[0], begins, unit, rate)
    own = np.array(keys, np.int64)[np.searchsorted(keys, stamps, "right") - 1]
    return Video(stamps, own, times, pixels, _lots(own, pixels), cut, exact)


def _chosen(
    shown: NDArray[np.int64], key: int, begins: int, unit: Fraction, rate: Fraction
) -> tuple[NDArray[np.int64], list[Fraction]]:
    """The frame that is shown at each time; each frame once, also where more a second are wanted than there are."""
    shown = shown[shown >= key]  # before the first keyframe nothing can be decoded
    numbers, stamps, step = list[int](), list[int](), 1 / (unit * rate)
    place, number = -1, 0
    while place + 1 < len(shown):
        # The first time at which another frame is shown than the last one, but not before the next step.
        number = max(number, math.ceil((int(shown[place + 1]) - begins) / step))
        place = int(np.searchsorted(shown, begins + math.floor(number * step), "right")) - 1
        numbers.append(number)
        stamps.append(int(shown[place]))
        number += 1
        if begins + number * step > int(shown[-1]):
            break
    return np.array(stamps, np.int64), [number / rate for number in numbers]


def _lots(keys: NDArray[np.int64], pixels: int) -> list[int]:
    most = max(1, min(_TOGETHER, _TOGETHER_BYTES // (3 * pixels)))
    lots = [0]
    for place in range(1, len(keys)):
        size = place - lots[-1]
        if size >= most or (size >= _ENOUGH and keys[place] != keys[place - 1]):
            lots.append(place)
    return lots


# ---- decoding -------------------------------------------------------------------------------------------------------


def _decoded(place: Place, video: Video, wanted: range, max_pixels: int) -> list[Tensor | str]:
    """Some frames that follow each other; for each that cannot be had, the reason."""
    found: list[Tensor | str] = ["it cannot be decoded" for _ in wanted]
    try:
        with _opened(place, max_pixels) as (container, stream):
            keys = video.keys[wanted.start : wanted.stop]
            for key in np.unique(keys):
                own = [number for number in wanted if video.keys[number] == key]
                stamps = video.stamps[own[0] : own[-1] + 1].tolist()
                for at, frame in _shown_at(container, stream, int(key), stamps, video.exact):
                    found[own[0] + at - wanted.start] = _pixels(frame, max_pixels)
    except (MissingExtraError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, SelfmaskError) and not isinstance(error, BadImageError):
            raise
        why = _reason(error)
        return [why if isinstance(each, str) else each for each in found]
    return found


def _shown_at(container: Any, stream: Any, key: int, stamps: Sequence[int], exact: bool) -> Iterator[tuple[int, Any]]:
    """The frames of these times, all decoded from one keyframe; without exact stamps, the last one before each."""
    container.seek(key, stream=stream)
    at, last, before = 0, None, float(key)
    for frame in itertools.chain(_frames(container, stream), [None]):
        now = math.inf if frame is None else frame.dts if frame.pts is None else frame.pts
        if now is None:
            continue
        while at < len(stamps) and stamps[at] < now:
            if last is not None and (before == stamps[at] or not exact):
                yield at, last
            at += 1
        if at == len(stamps):
            return
        last, before = frame, now


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """All frames from here on; damaged packets are passed over."""
    import av

    for packet in container.demux(stream):
        with contextlib.suppress(av.InvalidDataError):
            yield from packet.decode()


def _pixels(frame: Any, max_pixels: int) -> Tensor | str:
    if frame.is_corrupt:
        return "a part of the frame is damaged"
    check_pixels(frame.width * frame.height, max_pixels)
    pixels = frame.to_ndarray(format="rgb24")
    turned = np.rot90(pixels, round(frame.rotation / 90) % 4)  # as the camera was held
    return torch.from_numpy(np.ascontiguousarray(turned.transpose(2, 0, 1)))


def _reason(error: Exception) -> str:
    if isinstance(error, BadImageError):
        return str(error.found)
    return printable(Path(" ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__))
