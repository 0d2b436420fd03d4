"""Threads that share a cascade, and with it one base: each gets what it would get alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from selfmask import Cascade
from selfmask.cascade.model import CONDITIONAL, DISPATCHER, UNCONDITIONAL
from selfmask.embedding.embedder import FROZEN
from tests.masking.architectures import assert_same_state, state_of
from tests.masking.test_threads import in_threads, many_switches

from .small import fitted, pixels

SIDES = [FROZEN, DISPATCHER, CONDITIONAL, UNCONDITIONAL]


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    with many_switches():
        yield


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Cascade:
    return fitted(tmp_path_factory.mktemp("masks"))


def test_every_thread_gets_its_own_vectors(cascade: Cascade, tmp_path: Path) -> None:
    before, batches = state_of(cascade.masked.base), [pixels(24)[start : start + 8] for start in (0, 8, 16)]
    with torch.no_grad():
        # Rounding depends on how many images run at a time, so on what else is asked for.
        expected = [[cascade.vectors(batch, SIDES[:n]) for n in range(1, 5)] for batch in batches]
    prints = [cascade.fingerprint(side) for side in SIDES]
    cascade.save(tmp_path / "alone.smn")

    def work(number: int) -> None:
        for turn in range(6):
            batch, sides = (number + turn) % len(batches), (number + turn) % len(SIDES)
            found = cascade.vectors(batches[batch], SIDES[: 1 + sides])
            assert all(torch.equal(*pair) for pair in zip(found, expected[batch][sides], strict=True))
        side = number % len(SIDES)
        assert cascade.fingerprint(SIDES[side]) == prints[side]
        cascade.save(tmp_path / f"{number}.smn")

    in_threads(6, work)
    assert_same_state(cascade.masked.base, before)
    for number in range(6):
        assert (tmp_path / f"{number}.smn").read_bytes() == (tmp_path / "alone.smn").read_bytes()


def test_a_cascade_leaves_the_mask_that_was_set(cascade: Cascade, tmp_path: Path) -> None:
    cascade = copy.deepcopy(cascade)
    cascade.masked.set_mask("expert 1")
    with torch.no_grad():
        cascade.vectors(pixels(8), SIDES)
    cascade.save(tmp_path / "cascade.smn")
    cascade.fingerprint(UNCONDITIONAL)
    assert cascade.masked.active_mask == "expert 1"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: cascade.masked.active_mask).result() == "expert 1"
