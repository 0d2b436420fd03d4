"""One image, whatever its format and mode, becomes a uint8 RGB tensor."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import BadImageError

_HEIF = "HEIF"  # of the extra `heic`
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
# Only what people keep photographs in: a decoder that is not asked cannot be attacked.
_BUILT_IN = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "GIF", "PPM", "AVIF")
FORMATS = (*_BUILT_IN, _HEIF)
EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".apng",
    ".webp",
    ".avif",
    ".heic",
    ".heif",
    ".hif",
    ".bmp",
    ".dib",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".pfm",
)

MAX_PIXELS = 50_000_000
"""Of one image, unless the user says otherwise: decoding takes about ten bytes for each, of WebP twenty."""

_STRIP = 1 << 18  # pixels converted at a time
_ORIENTATION = 0x0112  # of EXIF: how the camera was held
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(source: Path | bytes | BinaryIO, *, near: int | None = None, max_pixels: int = MAX_PIXELS) -> Tensor:
    """The image as uint8 [3, H, W] in RGB, upright, the first frame if it moves, on white where it is transparent.

    16-bit grey is scaled by its range, as are integers and floats wider than a byte. With `near`, a large JPEG may be
    decoded at 1/2, 1/4 or 1/8 of its size, which is much faster; no side gets shorter than twice `near`.
    What would be decoded to more than `max_pixels` is refused, by its header.
    Raises BadImageError for anything that is not a whole image of an allowed format and a sensible size.
    """
    name = printable(source) if isinstance(source, Path) else "image"
    try:
        if isinstance(source, Path):
            if not stat.S_ISREG(source.stat().st_mode):  # opening a pipe would wait for ever
                raise _UnreadableError("not a file")
            with source.open("rb") as stream:
                return _decode(stream, near, max_pixels)
        return _decode(io.BytesIO(source) if isinstance(source, bytes) else source, near, max_pixels)
    except Exception as error:  # Pillow's decoders raise nearly every kind of error on damaged files
        raise BadImageError(
            f"cannot read {name}", expected=f"a complete image ({', '.join(FORMATS)})", found=_reason(error)
        ) from error


def to_rgb(image: Image.Image) -> Tensor:
    """A Pillow image of any mode as uint8 [3, H, W]; nothing else as large as that is made on the way."""
    convert = _conversion(image)
    pixels = np.empty((3, image.height, image.width), np.uint8)  # for small images, calls to torch would take longer
    for top, strip in _strips(image):
        pixels[:, top : top + strip.height] = np.asarray(convert(strip)).transpose(2, 0, 1)
    return torch.from_numpy(pixels)


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """The image in parts of few rows, each with the number of its first."""
    rows = max(1, _STRIP // max(1, image.width))
    if image.height <= rows:
        yield 0, image
        return
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _conversion(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """How parts of the image become RGB."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # which Pillow has scaled
        return lambda part: _grey(np.asarray(part), 0, 65535)
    if image.mode in ("I", "F"):
        low, span = _range(image)
        return lambda part: _grey(_finite(part), low, span)
    if image.has_transparency_data:
        return _on_white
    return lambda part: part if part.mode == "RGB" else part.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def array_to_rgb(values: NDArray[Any]) -> Tensor:
    """An array H x W or H x W x C (1, 3 or 4 channels), uint8, uint16 (grey) or float in 0 to 1, as uint8 [3, H, W]."""
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.ndim != 2 and not (values.ndim == 3 and values.shape[2] in (3, 4)):
        raise BadImageError("not an image", expected="1, 3 or 4 channels", found=f"shape {values.shape}")
    if 0 in values.shape:
        raise BadImageError("an image has no pixels", found=f"shape {values.shape}")
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min()), float(values.max())
        if not (low >= -1e-3 and high <= 1 + 1e-3):  # also true for NaN
            raise BadImageError(
                "the values of an image are out of range",
                expected="floats from 0 to 1",
                found=f"floats from {low:.3g} to {high:.3g}",
                todo="remove the normalisation from the data set: the backbone's own is applied",
            )
        values = np.round(values.clip(0, 1) * 255).astype(np.uint8)
    if values.dtype != np.uint8 and not (values.dtype == np.uint16 and values.ndim == 2):
        raise BadImageError("not an image", expected="uint8 or float values", found=f"{values.dtype} values")
    return to_rgb(Image.fromarray(np.ascontiguousarray(values)))


def printable(path: Path) -> str:
    """A path as valid UTF-8 with forward slashes; bytes that are no UTF-8 are shown as `\\xNN`."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


class _UnreadableError(Exception):
    """A reason that is ours, not Pillow's."""


def check_pixels(pixels: int, limit: int) -> None:
    """Refuse an image that is too large to be decoded."""
    if pixels > limit:
        raise BadImageError(
            "an image is too large",
            found=f"{pixels:,} pixels, more than the limit of {limit:,} (--max-pixels)",
        )


def _decode(stream: BinaryIO, near: int | None, max_pixels: int) -> Tensor:
    if not stream.read(1):
        raise _UnreadableError("it is empty")
    stream.seek(0)
    formats: tuple[str, ...] = _BUILT_IN
    if _is_heic(stream):
        _register_heif()
        formats = (_HEIF, "AVIF")  # which may begin alike
    with Image.open(stream, formats=formats) as image:
        whole = image.width * image.height
        if whole == 0:
            raise _UnreadableError("it has no pixels")
        if near is not None:
            image.draft(None, (2 * near, 2 * near))  # None keeps the mode
        # A progressive JPEG is taken apart at its full size, whatever comes out.
        check_pixels(whole if image.info.get("progressive") else image.width * image.height, max_pixels)
        image.load()
        # Asked after loading: Pillow turns TIFF itself, and some PNGs carry EXIF behind the pixels.
        turn = _UPRIGHT.get(_orientation(image))
        return to_rgb(image if turn is None else image.transpose(turn))


@cache
def _register_heif() -> None:
    """Let Pillow read HEIC: only when one comes, since few have any, and the library is of an extra."""
    try:
        import pillow_heif
    except ImportError:
        raise _UnreadableError('a HEIC image, which needs pillow-heif: pip install "selfmask[heic]"') from None
    pillow_heif.register_heif_opener(thumbnails=False)


def _is_heic(stream: BinaryIO) -> bool:
    head = stream.read(12)
    stream.seek(0)
    return head[4:8] == b"ftyp" and head[8:12] in _HEIC_BRANDS


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF; the image itself is fine
        return 1


def _grey(values: NDArray[Any], low: float, span: float) -> Image.Image:
    scaled = (values.astype(np.float64) - low) * (255 / span)
    return Image.fromarray(np.round(scaled).clip(0, 255).astype(np.uint8)).convert("RGB")


def _finite(image: Image.Image) -> NDArray[np.float64]:
    return np.nan_to_num(np.asarray(image).astype(np.float64), posinf=0.0, neginf=0.0)


def _range(image: Image.Image) -> tuple[float, float]:
    """32-bit values have no agreed range: take the smallest usual one that holds them all, else stretch them."""
    found = [(values.min(), values.max()) for _, strip in _strips(image) for values in [_finite(strip)]]
    low, high = min(each for each, _ in found), max(each for _, each in found)
    for top in (1, 255, 65535) if image.mode == "F" else (255, 65535):
        if low >= 0 and high <= top:
            return 0, top
    return low, high - low or 1


def _reason(error: Exception) -> str:
    """Why, in one line."""
    if isinstance(error, BadImageError):
        return str(error.found)
    if isinstance(error, UnidentifiedImageError):
        return "not an image in one of these formats"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(f"{error}".split()) or type(error).__name__
