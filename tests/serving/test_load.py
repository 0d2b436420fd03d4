"""Many requests at once for many masks: every vector is the one that `selfmask embed` gives."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from .served import ask, many, offline, photo, save_masks, served, vectors_of

PHOTOS = [photo(number) for number in range(16)]


@pytest.mark.parametrize("max_batch", [1, 32])
def test_mixed_requests_get_the_vectors_of_embed(tmp_path: Path, max_batch: int) -> None:
    _load(tmp_path, masks=5, requests=150, max_batch=max_batch)


@pytest.mark.heavy
@pytest.mark.parametrize("max_batch", [1, 32])
def test_many_mixed_requests_get_the_vectors_of_embed(tmp_path: Path, max_batch: int) -> None:
    _load(tmp_path, masks=40, requests=many(10_000), max_batch=max_batch)


def _load(folder: Path, masks: int, requests: int, max_batch: int) -> None:
    """To the bit where an image ran alone, as it does offline in batches of one; within 1e-5 where it had company."""
    names = [*save_masks(folder, masks), "frozen"]
    files = {name: None if name == "frozen" else folder / f"{name}.smn" for name in names}
    expected = {name: offline(files[name], PHOTOS, batch_size=1) for name in names}
    turns, kinds = random.Random(0), Counter[str]()
    jobs = [(turns.choice(names), turns.sample(range(16), turns.choice([1, 1, 1, 2, 5]))) for _ in range(requests)]

    with served(folder, max_batch=max_batch, max_hot=4, max_wait_ms=2.0, memory="300K") as (client, engine):

        def work(job: tuple[str, list[int]]) -> None:
            name, numbers = job
            answer = ask(client, name, *(PHOTOS[number] for number in numbers))
            vectors = vectors_of(answer)
            shared = (answer.headers[f"x-selfmask-{what}"].split(",") for what in ("batch", "masks"))
            for number, vector, batch, masks in zip(numbers, vectors, *shared, strict=True):
                right = expected[name][number]
                assert int(masks) <= int(batch)
                kinds["shared with other masks"] += masks != "1"
                if torch.equal(vector, right):
                    kinds["the same"] += 1
                elif batch != "1" and torch.allclose(vector, right, rtol=1e-5, atol=1e-5):
                    kinds["close"] += 1
                else:
                    kinds["wrong"] += 1

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(work, jobs))
        assert engine.queue.inside == 0
    mixed = kinds.pop("shared with other masks")
    assert kinds.total() == sum(len(numbers) for _, numbers in jobs)
    assert kinds["wrong"] == 0
    assert mixed > 0 if max_batch > 1 else mixed == kinds["close"] == 0
