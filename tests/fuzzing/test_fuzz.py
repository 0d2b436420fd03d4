"""Twenty thousand damaged files of every kind: a typed error or the right content, never anything else.

Every case is made from its own seed, "FORMAT/NUMBER"; a failure names it, and `python -m benchmarks.fuzz --only FORMAT
--from NUMBER --mutations 1` runs it again. `python -m benchmarks.fuzz` runs a million.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.maskfile import smn
from tests.maskfile.tiny import images

from . import masks
from .formats import FORMATS, LOADED, try_one
from .memory import growth

MUTATIONS = 20_000
PARTS = [
    (name, start, min(1000, count - start))
    for name, each in FORMATS.items()
    for count in [each.share * MUTATIONS // 1000]
    for start in range(0, count, 1000)
]
MADE_ANEW = ("vectors (parts)",)  # whatever is wrong with them, the file that comes of them is right
HARD_TO_LOAD = ("vectors (cache)", "checkpoint", "npz", "weights")  # nearly every change is found out


@pytest.mark.parametrize(("name", "start", "count"), PARTS)
def test_damaged_files(tmp_path: Path, name: str, start: int, count: int) -> None:
    try_one(name, start, tmp_path)  # what is made once is made before memory is counted
    base = [parameter.detach().clone() for parameter in masks.base().base.parameters()]
    outcomes, failures = Counter[str](), dict[str, int]()

    def run() -> None:
        for number in range(start, start + count):
            try:
                outcomes[try_one(name, number, tmp_path)] += 1
            except Exception as error:
                failures.setdefault(repr(error)[:300], number)

    taken = growth(run)
    assert not failures, "\n".join(f"{name}/{number}: {error}" for error, number in failures.items())
    assert taken < 64 << 20, "files of a few kB took more than 64 MB"
    assert all(torch.equal(*pair) for pair in zip(base, masks.base().base.parameters(), strict=True))
    if name not in MADE_ANEW:
        assert outcomes[LOADED] < 0.95 * count, "the changes change nothing: they test little"
    if name not in HARD_TO_LOAD:
        assert outcomes[LOADED] > 0.01 * count, "nothing gets past the first checks: this tests little"


def test_there_are_twenty_thousand() -> None:
    assert sum(count for _, _, count in PARTS) == MUTATIONS


@pytest.mark.filterwarnings("ignore::selfmask.errors.BaseWarning")  # one is of version 1
def test_the_masks_that_are_mutated_are_good(tmp_path: Path) -> None:
    for name, (data, mask) in masks.corpus().items():
        for each in (data, smn.build(masks.parsed(name))):
            assert masks.read((each, masks.original(name)), tmp_path / "a.smn") == LOADED
        assert mask.sha256 == masks.parsed(name).manifest["mask_sha256"]
    codecs = [entry["codec"] for name in masks.corpus() for entry in masks.parsed(name).manifest["masks"].values()]
    assert set(codecs) == {"raw", "rice", "lzma"}
    assert masks.base()(images()).shape == (2, 40)
