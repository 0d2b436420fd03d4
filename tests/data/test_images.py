"""Every mode and every damage of an image file, with real files."""

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from selfmask.data import decode_image
from selfmask.data.images import MAX_PIXELS, _register_heif, array_to_rgb, printable, to_rgb
from selfmask.errors import BadImageError

# Pillow warns of what it finds damaged; whether we take the image is what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]

# A grey ramp, and a picture whose four corners differ, so that no turn goes unseen.
_register_heif()  # so that HEIF can be written, too
RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
COLOURS = np.zeros((16, 24, 3), np.uint8)
COLOURS[:8, :12], COLOURS[:8, 12:], COLOURS[8:, :12], COLOURS[8:, 12:] = (
    (200, 30, 40),
    (30, 180, 60),
    (50, 60, 220),
    (240, 230, 20),
)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def hwc(image: Tensor) -> np.ndarray:
    assert image.dtype == torch.uint8
    assert image.is_contiguous()
    return image.permute(1, 2, 0).numpy()


def grey3(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_formats_are_exact(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(hwc(decode_image(encoded(Image.fromarray(COLOURS), kind, **options))), COLOURS)


@pytest.mark.parametrize("kind", ["JPEG", "AVIF", "GIF", "HEIF"])
def test_lossy_formats_are_close(kind: str) -> None:
    found = hwc(decode_image(encoded(Image.fromarray(COLOURS), kind))).astype(int)
    # away from the edges, where JPEG's colours bleed
    assert np.abs(found - COLOURS)[[3, 3, 12, 12], [4, 19, 4, 19]].max() <= 12


def test_grey_and_one_bit() -> None:
    assert np.array_equal(hwc(decode_image(encoded(Image.fromarray(RAMP), "PNG"))), grey3(RAMP))
    bits = Image.fromarray(RAMP).point(lambda value: 255 * (value > 99)).convert("1")
    assert np.array_equal(hwc(decode_image(encoded(bits, "PNG"))), grey3(np.where(RAMP > 99, 255, 0)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    wide = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    assert np.array_equal(hwc(decode_image(encoded(Image.fromarray(wide), kind))), grey3(RAMP))


def test_16_bit_big_endian_tiff() -> None:
    wide = (RAMP.astype(np.uint16) * 257).astype(">u2")
    header = b"MM\0*\0\0\0\x08"  # the smallest TIFF: header, one directory, the pixels
    entries = [(256, 3, 16 << 16), (257, 3, 16 << 16), (258, 3, 16 << 16), (259, 3, 1 << 16), (262, 3, 1 << 16)]
    entries += [(273, 4, 8 + 2 + 12 * 8 + 4), (278, 3, 16 << 16), (279, 4, 512)]
    directory = len(entries).to_bytes(2, "big") + b"".join(
        tag.to_bytes(2, "big") + kind.to_bytes(2, "big") + (1).to_bytes(4, "big") + value.to_bytes(4, "big")
        for tag, kind, value in entries
    )
    assert np.array_equal(hwc(decode_image(header + directory + bytes(4) + wide.tobytes())), grey3(RAMP))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RAMP.astype(np.float32) / 255, RAMP),
        (RAMP.astype(np.float32), RAMP),
        (RAMP.astype(np.float32) * 257, RAMP),
        (RAMP.astype(np.float32) * 1e6 - 7e5, RAMP),
        (RAMP.astype(np.int32), RAMP),
        (RAMP.astype(np.int32) * 257, RAMP),
        (RAMP.astype(np.int32) * 100_000 - 300_000, RAMP),
        (np.full((4, 4), -5.0, np.float32), np.zeros((4, 4), np.uint8)),
    ],
    ids=["unit", "byte", "16 bit", "stretched", "int byte", "int 16 bit", "int stretched", "flat"],
)
def test_32_bit_takes_the_smallest_usual_range(values: np.ndarray, expected: np.ndarray) -> None:
    assert np.array_equal(hwc(decode_image(encoded(Image.fromarray(values), "TIFF"))), grey3(expected))


def test_not_a_number_is_black() -> None:
    values = RAMP.astype(np.float32)
    values[3, 3], values[4, 4] = np.nan, np.inf
    expected = RAMP.copy()
    expected[3, 3] = expected[4, 4] = 0
    assert np.array_equal(hwc(decode_image(encoded(Image.fromarray(values), "TIFF"))), grey3(expected))


def on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[:, :, None] / 255
    return colour * share + 255 * (1 - share)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparency_is_laid_on_white(kind: str) -> None:
    alpha = np.tile(np.linspace(0, 255, 24).round().astype(np.uint8), (16, 1))
    image = Image.fromarray(np.dstack([COLOURS, alpha]))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    found = hwc(decode_image(encoded(image, kind, **options)))
    assert np.abs(found - on_white(COLOURS, alpha)).max() <= 1
    assert (found[:, 0] == 255).all()


def test_grey_with_alpha() -> None:
    alpha = RAMP.T.copy()
    found = hwc(decode_image(encoded(Image.fromarray(np.dstack([RAMP, alpha]), "LA"), "PNG")))
    assert np.abs(found - on_white(grey3(RAMP), alpha)).max() <= 1


def test_palette_with_and_without_transparency() -> None:
    image = Image.fromarray(COLOURS).quantize(4)
    assert image.mode == "P"
    plain = hwc(decode_image(encoded(image, "PNG")))
    assert np.array_equal(plain, np.asarray(image.convert("RGB")))
    clear = image.getpixel((0, 0))
    assert isinstance(clear, int)
    for kind in ("PNG", "GIF"):
        found = hwc(decode_image(encoded(image, kind, transparency=clear)))
        expected = plain.copy()
        expected[np.asarray(image) == clear] = 255
        assert np.array_equal(found, expected)
    half = hwc(decode_image(encoded(image, "PNG", transparency=bytes([128] * 4))))
    assert np.abs(half - on_white(plain, np.full((16, 24), 128))).max() <= 1


def test_one_clear_colour_of_a_true_colour_png() -> None:
    found = hwc(decode_image(encoded(Image.fromarray(COLOURS), "PNG", transparency=(200, 30, 40))))
    expected = COLOURS.copy()
    expected[:8, :12] = 255
    assert np.array_equal(found, expected)


def test_cmyk_and_ycbcr() -> None:
    for mode in ("CMYK", "YCbCr"):
        found = hwc(decode_image(encoded(Image.fromarray(COLOURS).convert(mode), "TIFF"))).astype(int)
        assert np.abs(found - COLOURS).max() <= 2
    jpeg = hwc(decode_image(encoded(Image.fromarray(COLOURS).convert("CMYK"), "JPEG", quality=95))).astype(int)
    assert np.abs(jpeg - COLOURS)[[3, 3, 12, 12], [4, 19, 4, 19]].max() <= 12


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
    content = encoded(Image.fromarray(COLOURS), kind, exif=exif, **options)
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(hwc(decode_image(content)), expected)
    assert (expected.shape == (24, 16, 3)) == (orientation >= 5)


def test_damaged_exif_does_not_cost_the_image() -> None:
    content = encoded(Image.fromarray(COLOURS), "JPEG", exif=b"Exif\0\0MM\0*\0\0\xff\xff\x12")
    assert decode_image(content).shape == (3, 16, 24)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(content)) as image:
        assert getattr(image, "n_frames", 1) == 3
    assert np.abs(hwc(decode_image(content)).astype(int) - (255, 0, 0)).max() <= 2


def test_all_ways_to_hand_over_an_image(tmp_path: Path) -> None:
    content = encoded(Image.fromarray(COLOURS), "PNG")
    file = tmp_path / "x.png"
    file.write_bytes(content)
    with file.open("rb") as stream:
        for source in (file, content, stream):
            assert np.array_equal(hwc(decode_image(source)), COLOURS)


def test_near_reads_a_large_jpeg_small() -> None:
    smooth = Image.fromarray(COLOURS).resize((1200, 800), Image.Resampling.BICUBIC)
    content = encoded(smooth, "JPEG", quality=95)
    small = decode_image(content, near=50)
    assert small.shape == (3, 100, 150)
    expected = np.asarray(smooth.resize((150, 100), Image.Resampling.BOX)).astype(int)
    assert np.abs(hwc(small) - expected).max() <= 6
    assert decode_image(content, near=500).shape == (3, 800, 1200)


@pytest.mark.parametrize("orientation", [1, 6, 8])
def test_a_photo_of_a_phone_is_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    large = Image.fromarray(COLOURS).resize((240, 160), Image.Resampling.NEAREST)
    jpeg, heic = (decode_image(encoded(large, kind, exif=exif.tobytes(), quality=95)) for kind in ("JPEG", "HEIF"))
    assert jpeg.shape == heic.shape
    assert (jpeg.float() - heic.float()).abs().mean() < 8


def test_without_the_extra_a_heic_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.fromarray(COLOURS), "HEIF")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # which makes importing it fail
    _register_heif.cache_clear()
    with pytest.raises(BadImageError, match=r"selfmask\[heic\]"):
        decode_image(content)
    assert decode_image(encoded(Image.fromarray(COLOURS), "PNG")).shape == (3, 16, 24)


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "PPM", "BMP", "AVIF", "HEIF"])
def test_truncated_images_are_errors(kind: str) -> None:
    content = encoded(Image.fromarray(NOISE), kind)
    for share in (0.01, 0.5, 0.9):
        with pytest.raises(BadImageError):
            decode_image(content[: int(len(content) * share)])


def test_damaged_images_are_images_or_bad_never_anything_else() -> None:
    random = np.random.default_rng(1)
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "PPM", "BMP", "AVIF", "HEIF"):
        content = np.frombuffer(encoded(Image.fromarray(NOISE[:24, :24]), kind), np.uint8)
        for _ in range(60):
            damaged = content.copy()
            damaged[random.integers(0, len(content), 8)] = random.integers(0, 256, 8)
            with suppress(BadImageError):
                assert decode_image(damaged.tobytes()).dtype == torch.uint8


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"hello, I am a text file\n" * 50, "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),  # a format that runs programs
        (b"\xff\xd8\xff\xe0", ""),
    ],
    ids=["empty", "text", "postscript", "four bytes"],
)
def test_what_is_no_image(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "x.jpg"
    file.write_bytes(content)
    for source in (file, content):
        with pytest.raises(BadImageError) as caught:
            decode_image(source)
        assert reason in str(caught.value.found)
        assert "\n" not in str(caught.value.found)
    with pytest.raises(BadImageError, match=r"x\.jpg"):
        decode_image(file)


def test_a_folder_a_pipe_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    for name in ("folder.jpg", "pipe.jpg", "loop.jpg", "missing.jpg"):
        with pytest.raises(BadImageError):
            decode_image(tmp_path / name)


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """An image that this process may not read; a super-user has to become somebody else for that."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "x.png"
        file.write_bytes(encoded(Image.fromarray(COLOURS), "PNG"))
        file.chmod(0)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)
        yield file
        os.seteuid(was)


def test_unreadable_file(forbidden: Path) -> None:
    with pytest.raises(BadImageError, match="permission denied"):
        decode_image(forbidden)


@pytest.mark.parametrize("side", [10_000, 15_000])
def test_decompression_bombs_are_errors(side: int) -> None:
    content = encoded(Image.new("1", (side, side)), "PNG")
    assert len(content) < 1_000_000
    with pytest.raises(BadImageError, match="pixels"):
        decode_image(content)


def test_arrays() -> None:
    assert np.array_equal(hwc(array_to_rgb(RAMP)), grey3(RAMP))
    assert np.array_equal(hwc(array_to_rgb(RAMP[:, :, None])), grey3(RAMP))
    assert np.array_equal(hwc(array_to_rgb(COLOURS / 255)), COLOURS)
    assert np.array_equal(hwc(array_to_rgb(RAMP.astype(np.uint16) * 257)), grey3(RAMP))
    clear = np.dstack([COLOURS, np.zeros((16, 24), np.uint8)])
    assert (hwc(array_to_rgb(clear)) == 255).all()
    for wrong in (COLOURS.astype(np.int64), COLOURS / 100, np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4), np.uint8)):
        with pytest.raises(BadImageError):
            array_to_rgb(wrong)
    with pytest.raises(BadImageError, match="normalisation"):
        array_to_rgb(np.full((4, 4, 3), np.nan))


def test_names_are_always_valid_text() -> None:
    name = printable(Path(os.fsdecode(b"caf\xe9/\xf0\x9f\x90\xb1.jpg")))
    assert name == "caf\\xe9/\N{CAT FACE}.jpg"
    assert name.encode()


def test_large_images_are_converted_strip_by_strip_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    colour = Image.fromarray(random.integers(0, 256, (40, 30, 4), dtype=np.uint8))
    wide = random.integers(0, 65536, (40, 30), dtype=np.uint16)
    palette = colour.convert("RGB").quantize(16)
    clear = palette.copy()
    clear.info["transparency"] = 3
    images = [
        *(colour.convert(mode) for mode in ("RGB", "RGBA", "L", "LA", "1", "CMYK", "YCbCr", "La", "RGBa")),
        palette,
        clear,
        Image.fromarray(wide),
        Image.frombytes("I;16B", (30, 40), wide.astype(">u2").tobytes()),
        Image.fromarray(wide.astype(np.int32) * 1000),
        Image.fromarray(wide.astype(np.float32) - 300),
    ]
    before = [to_rgb(image) for image in images]
    monkeypatch.setattr("selfmask.data.images._STRIP", 100)
    for image, expected in zip(images, before, strict=True):
        found = to_rgb(image)
        assert found.equal(expected), image.mode
        assert found.is_contiguous()


def test_too_many_pixels_are_refused_by_the_header() -> None:
    content = encoded(Image.new("L", (100, 50)), "PNG")
    assert decode_image(content, max_pixels=5000).shape == (3, 50, 100)
    with pytest.raises(BadImageError, match=r"5,000 pixels, more than the limit of 4,999 \(--max-pixels\)"):
        decode_image(content, max_pixels=4999)
    with pytest.raises(BadImageError, match="5,000 pixels"):  # what follows the header is not looked at
        decode_image(content[:60], max_pixels=4999)
    assert MAX_PIXELS == 50_000_000


def test_a_large_jpeg_that_is_read_small_is_small() -> None:
    photo = Image.fromarray(COLOURS).resize((1200, 800))
    plain, progressive = (encoded(photo, "JPEG", progressive=each) for each in (False, True))
    assert decode_image(plain, near=50, max_pixels=20_000).shape == (3, 100, 150)
    for content, near in ((plain, None), (plain, 500), (progressive, 50)):  # which is taken apart at its full size
        with pytest.raises(BadImageError, match="960,000 pixels"):
            decode_image(content, near=near, max_pixels=20_000)


READ = """
import pathlib, resource, sys
from selfmask.data import decode_image
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decode_image(pathlib.Path(sys.argv[1]))
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("PNG", "I;16"),
        ("TIFF", "F"),
        ("TIFF", "CMYK"),
        ("JPEG", "RGB"),
        ("GIF", "P"),
        ("WEBP", "RGBA"),
        ("BMP", "RGB"),
        ("HEIF", "RGB"),
    ],
)
def test_decoding_takes_few_bytes_a_pixel(tmp_path: Path, kind: str, mode: str) -> None:
    side, file = 3000, tmp_path / "large"
    Image.new(mode, (side, side)).save(file, kind)
    done = subprocess.run([sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=True)
    assert int(done.stdout) / side**2 < (24 if kind == "WEBP" else 14)
