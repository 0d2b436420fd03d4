"""Passes that images of different masks share: when they do, and what they are told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from selfmask.masking.mixing import Mixing
from selfmask.masking.switching import Switch
from selfmask.serving import engine as engines
from selfmask.serving.mixed import MixedPasses

from .served import ask, backbone, hold, offline, photo, save_mask, served, until, vectors_of

PHOTOS = [photo(number) for number in range(8)]


def test_images_of_different_masks_share_a_pass_and_are_told(tmp_path: Path) -> None:
    shares = {"a": 0.002, "b": 0.08, "c": 0.02, "many": 0.4}
    for number, (name, off) in enumerate(shares.items()):
        save_mask(tmp_path / f"{name}.smn", number, off, classes=("x", "y") if name == "a" else ())
    with served(tmp_path, workers=1, max_hot=4) as (client, engine):
        answers = _at_once(client, engine, [*shares, "a"])
        for name, answer in zip([*shares, "a"], answers, strict=True):
            shared = answer.headers["x-selfmask-batch"], answer.headers["x-selfmask-masks"]
            assert shared == ("5", "4"), name
            right = offline(tmp_path / f"{name}.smn", PHOTOS[:1])
            assert torch.allclose(vectors_of(answer), right, rtol=1e-5, atol=1e-5), name
        assert client.post("/v1/classify", data={"model": "a"}, files={"file": PHOTOS[0]}).status_code == 200
        assert b'selfmask_batch_masks_bucket{le="4.0"}' in client.get("/metrics").content


@pytest.mark.parametrize("how", ["max_batch", "base"])
def test_where_they_cannot_each_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    names = ["a", "b", "c"]
    for number, name in enumerate(names):
        save_mask(tmp_path / f"{name}.smn", number)
    if how == "base":
        monkeypatch.setattr(engines.Mixing, "of", staticmethod(lambda base, size: None))
    with served(tmp_path, workers=1, max_hot=4, max_batch=1 if how == "max_batch" else 32) as (client, engine):
        for name, answer in zip(names, _at_once(client, engine, names), strict=True):
            assert answer.headers["x-selfmask-masks"] == "1"
            assert torch.equal(vectors_of(answer), offline(tmp_path / f"{name}.smn", PHOTOS[:1]))


def _at_once(client, engine, names):  # type: ignore[no-untyped-def]
    """Answers to requests that all wait before the first of them runs."""
    for name in names:  # read once, so that they line up at once
        ask(client, name, PHOTOS[1])
    with ThreadPoolExecutor(len(names) + 1) as pool:
        with hold(engine):
            first = pool.submit(ask, client, "frozen", PHOTOS[0])
            until(lambda: engine.queue.inside == 1 and engine.queue.waiting == 0)
            asked = [pool.submit(ask, client, name, PHOTOS[0]) for name in names]
            until(lambda: engine.queue.waiting == len(names))
        assert first.result().status_code == 200
        return [each.result() for each in asked]


def test_images_of_a_size_that_was_not_tried_do_not_share() -> None:
    own = backbone()
    mixing = Mixing.of(own.model.eval(), (32, 32))
    assert mixing is not None
    passes = MixedPasses(mixing)
    assert passes.takes(Switch({}, {}), (32, 32))
    assert not passes.takes(Switch({}, {}), (64, 64))
