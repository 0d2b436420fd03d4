"""`python -m benchmarks.planning`: what 100 million photos and 10,000 masks would take, from rates measured here."""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from .streams import alone, photo, show

PLANNED, ALL, MASKS = 48, 100_000_000, 10_000
CORES, PRICE = 1_000, 0.04
"""Rented, and dollars an hour for each: assumed, not measured."""
MASK = 380_350  # bytes of a learned mask of ResNet-50: docs/benchmarks.md
NAMED = 56  # bytes for each name in a process: `python -m benchmarks.streams names`


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        plan(Path(folder))
    return 0


def plan(folder: Path) -> None:
    """What 100 million photos and 10,000 masks would take, from rates that are measured here, on one core."""
    write_photos(folder / "plan", PLANNED)
    found = alone(planned, str(folder / "plan"))
    embedding = ALL / found["images/s"] / 3600
    adapting = MASKS * found["adapt, s"] / 3600
    rows: list[dict[str, Any]] = [
        {"what": "photos embedded", "a core": f"{found['images/s']:.2f} images/s", "all": ALL, "core hours": embedding},
        {"what": "masks learned", "a core": f"{found['adapt, s']:,.0f} s a mask", "all": MASKS, "core hours": adapting},
    ]
    for row in rows:
        row[f"days on {CORES:,} cores"] = row["core hours"] / CORES / 24
        row[f"dollars at {PRICE} a core hour"] = row["core hours"] * PRICE
    show(f"resnet50 at 224 pixels, photos of 1280 x 853 from tars; {found['steps']:,} steps a mask", rows)
    sizes = [
        {"what": "photos", "bytes each": found["bytes a photo"], "GB in all": found["bytes a photo"] * ALL / 1e9},
        {"what": "vectors (2,048 float32)", "bytes each": 8192, "GB in all": 8192 * ALL / 1e9},
        {"what": "masks", "bytes each": MASK, "GB in all": MASK * MASKS / 1e9},
        {
            "what": "names of all, in each process",
            "bytes each": NAMED,
            "GB in all": NAMED * ALL / 1e9,
        },
    ]
    show("bytes", sizes)


def write_photos(folder: Path, count: int) -> None:
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        for number in range(count):
            buffer = io.BytesIO()
            photo(number).save(buffer, "JPEG", quality=90)
            member = tarfile.TarInfo(f"{number:05d}.jpg")
            member.size = len(buffer.getvalue())
            tar.addfile(member, io.BytesIO(buffer.getvalue()))


def planned(where: str) -> dict[str, Any]:
    import timm
    import torch

    import selfmask
    from selfmask import AdaptConfig
    from selfmask.data import open_images
    from selfmask.embedding.vectors import embed as vectors
    from selfmask.preprocessing import Preprocessing

    torch.set_num_threads(1)
    how = Preprocessing((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic")
    model, images = timm.create_model("resnet50", num_classes=0).eval(), open_images(where)
    vectors(model, images, how, batch_size=16)
    start = time.process_time()
    vectors(model, images, how, batch_size=16)
    rate = len(images) / (time.process_time() - start)
    settings = AdaptConfig.preset("fast", size=224, batch_size=16)
    dry = selfmask.adapt(model, where, settings, preprocessing=how, dry_run=True).result
    return {
        "images/s": rate,
        "adapt, s": dry["seconds"],
        "steps": dry["steps"],
        "bytes a photo": (Path(where) / "0.tar").stat().st_size / len(images),
    }


if __name__ == "__main__":
    sys.exit(main())
