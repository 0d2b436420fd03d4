"""Small copies of data sets, in the layouts that they have on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from selfmask.data.coop import COOP, split_file


def paint(root: Path, *names: str) -> Path:
    """One small image of its own grey value for each name."""
    for value, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 4), value).save(file, "PNG")
    return root


ROWS: dict[str, Any] = {
    "train": [["dots/1.jpg", 0, "dotted"], ["grid/1.jpg", 1, "a grid"], ["dots/2.jpg", 0, "dotted"]],
    "val": [["grid/2.jpg", 1, "a grid"]],
    "test": [["grid/3.jpg", 1, "a grid"], ["dots/3.jpg", 0, "dotted"]],
}


def coop_copy(data: Path, name: str, rows: Any = ROWS, *, images: int = 0) -> Path:
    """A data set with CoOp's split; `images`: which of its folders they are in. Returns the split."""
    paint(data / COOP[name].images[images], *(path for part in ROWS.values() for path, *_ in part))
    file = split_file(name, data)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return file


def inatloc_copy(data: Path, images: str = "iNatLoc") -> Path:
    """iNatLoc500 as its archives unpack; `images`: where those of the images were unpacked. Returns the lists."""
    home, lists = data / "inatloc500", data / "inatloc500" / "metadata_choe"
    train = [f"train/00{label}_Animalia_{kind}/{i}.jpg,{label}" for label, kind in enumerate("ab") for i in range(3)]
    test = [f"test/Aves/{kind} b/{i}.jpg,{label}" for label, kind in enumerate("ab") for i in range(2)]
    paint(home / images, *(row.partition(",")[0] for row in (*train, *test)))
    for part, rows in (("train", train), ("test", test)):
        (lists / part).mkdir(parents=True)
        (lists / part / "class_labels.txt").write_text("\n".join(rows) + "\n")
    (lists / "class_names.txt").write_text("Anas a,0\nAnas b,1\n")
    return lists
