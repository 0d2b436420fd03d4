"""`kill -9` while learning from tars or from a Hugging Face data set, then resume: the same mask as ever."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from selfmask import adapt
from selfmask.data import open_images
from selfmask.errors import RunMismatchError

from ..data.shards import write_tar
from ..processes import PROCESSES
from .small import HOW, config, network
from .test_kill import lines

STEPS, IMAGES = 40, 60


def run(where: Any, out: Path) -> None:
    settings = config(steps=STEPS, checkpoint_every=7)
    adapt(network(dropout=0.1), where, settings, out=out, resume=True, preprocessing=HOW, report=False)


def killed_once(where: Any, out: Path) -> None:
    child = PROCESSES.Process(target=run, args=(where, out))
    child.start()
    while child.is_alive() and lines(out) < 15:
        time.sleep(0.002)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    run(where, out)


def pngs() -> list[bytes]:
    found = []
    images = open_images("selfmask/fashion")
    for i in range(IMAGES):
        buffer = io.BytesIO()
        Image.fromarray(images[i].permute(1, 2, 0).numpy()).save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


@pytest.mark.heavy
def test_from_tars(tmp_path: Path) -> None:
    pictures = {f"{i:03d}.png": data for i, data in enumerate(pngs())}
    (tmp_path / "photos").mkdir()
    for name, data in pictures.items():
        (tmp_path / "photos" / name).write_bytes(data)
    for part in range(3):
        write_tar(tmp_path / f"s/p-{part}.tar", dict(list(pictures.items())[part * 20 : part * 20 + 20]))
    where = f"{tmp_path}/s/p-{{0..2}}.tar"
    run(where, tmp_path / "whole")
    killed_once(where, tmp_path / "cut")
    run(str(tmp_path / "photos"), tmp_path / "folder")
    masks = {(tmp_path / each / "mask.smn").read_bytes() for each in ("whole", "cut", "folder")}
    assert len(masks) == 1  # where images lie makes no difference
    write_tar(tmp_path / "s/p-1.tar", dict(list(pictures.items())[21:40]))
    with pytest.raises(RunMismatchError):
        run(where, tmp_path / "cut")


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["saved", "object", "without a length"])
def test_from_a_data_set_of_hugging_face(tmp_path: Path, kind: str) -> None:
    rows = {"image": [{"bytes": data, "path": None} for data in pngs()]}
    images = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()}))
    where: Any = images
    if kind == "saved":
        images.save_to_disk(str(tmp_path / "saved"))
        where = str(tmp_path / "saved")
    elif kind == "without a length":
        where = images.to_iterable_dataset(num_shards=3)
    run(where, tmp_path / "whole")
    killed_once(where, tmp_path / "cut")
    run(images, tmp_path / "object")
    masks = {(tmp_path / each / "mask.smn").read_bytes() for each in ("whole", "cut", "object")}
    assert len(masks) == 1  # nor does it, how they come by
