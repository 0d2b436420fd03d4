"""Files, packed masks and expanded weights: what is kept, and what happens when files change."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from selfmask import get_masked_model
from selfmask.backbones import Backbone
from selfmask.errors import ConfigError, UnknownModelError, UnusableModelError
from selfmask.masking.switching import SpareView, Switch
from selfmask.serving.config import ServeConfig
from selfmask.serving.engine import Engine
from selfmask.serving.hot import HotViews
from selfmask.serving.shelf import Shelf
from tests.cascade.small import clothes, fitted
from tests.training.small import HOW, network

from .served import PATIENT, backbone, offline, photo, save_mask, save_masks, until

PHOTOS = [photo(number) for number in range(3)]


def engine(folder: Path, **settings: object) -> Engine:
    return Engine(backbone(), folder, ServeConfig(**{**PATIENT, "workers": 1, **settings}))  # type: ignore[arg-type]


def right(engine: Engine, name: str, file: Path) -> bool:
    return torch.equal(engine.embed(name, PHOTOS), offline(file, PHOTOS))


def test_names_are_those_of_files_and_runs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "outside.smn").write_bytes(b"")
    folder = tmp_path / "masks"
    for name in (
        "a.smn",
        "b/mask.smn",
        "c/cascade.smn",
        "d/other.smn",
        "e.txt",
        ".hidden.smn",
        "frozen.smn",
        "f.smn/x",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    shelf = Shelf(folder)
    assert shelf.names() == ["a", "b", "c"]
    for name in ("../outside", "a.smn", "", ".", "..", "b/mask", "a\0", "é", "a" * 200, "a\n", "C:x", "-a"):
        assert shelf.find(name) is None, name


def test_a_replaced_file_is_seen_at_once(tmp_path: Path) -> None:
    file = save_mask(tmp_path / "a.smn", 1)
    with engine(tmp_path) as running:
        assert right(running, "a", file)
        save_mask(file, 2)
        assert right(running, "a", file)
        file.write_bytes(save_mask(tmp_path / "other", 3).read_bytes())  # in place, not by renaming
        assert right(running, "a", file)


@pytest.mark.parametrize("damage", ["deleted", "truncated", "altered", "emptied", "other base", "folder"])
def test_a_file_that_is_gone_or_damaged_is_said_to_be_and_comes_back(tmp_path: Path, damage: str) -> None:
    file = save_mask(tmp_path / "a.smn", 1)
    sound = file.read_bytes()
    with engine(tmp_path) as running:
        assert right(running, "a", file)
        if damage == "deleted":
            file.unlink()
        elif damage == "folder":
            file.unlink()
            file.mkdir()
        elif damage == "other base":
            get_masked_model(network()).save_pretrained(file)
        else:
            content = {"truncated": sound[:-100], "altered": sound[:-1] + b"x", "emptied": b""}[damage]
            file.write_bytes(content)
        kind = UnknownModelError if damage in ("deleted", "folder") else UnusableModelError
        for _ in range(2):
            with pytest.raises(kind):
                running.embed("a", PHOTOS)
        until(lambda: running.queue.inside == 0)  # the request failed by its first image: others may still be decoded
        if damage == "folder":
            file.rmdir()
        file.write_bytes(sound)
        assert right(running, "a", file)


def test_packed_masks_take_no_more_memory_than_asked(tmp_path: Path) -> None:
    names = save_masks(tmp_path, 6)
    with engine(tmp_path) as running:
        for name in names:
            running.embed(name, PHOTOS[:1])
        whole = running.store.nbytes
    weights = sum(each.numel() for each in backbone().model.parameters())
    statistics = sum(each.nbytes for each in backbone().model.buffers())
    assert 0 < whole <= len(names) * (weights / 8 + statistics)
    room = whole // 2
    with engine(tmp_path, memory=str(room)) as running:
        for name in [*names, *names]:
            assert right(running, name, tmp_path / f"{name}.smn")
            assert running.store.nbytes <= room


def test_a_cascade_is_served(tmp_path: Path) -> None:
    """Its experts run on few images at a time, so that vectors are close, and not the same to the bit."""
    net = network().eval()
    cascade = fitted(tmp_path, net)
    (tmp_path / "masks" / "run").mkdir(parents=True)
    cascade.save(tmp_path / "masks" / "run" / "cascade.smn")
    pictures = clothes(40)
    own = Backbone("small", net, HOW, cascade.width)
    with Engine(own, tmp_path / "masks", ServeConfig(workers=2)) as running:
        assert running.about("run").kind == "cascade"
        found = running.embed("run", [pictures[number] for number in range(40)])
    assert len(set(cascade.route(pictures).tolist())) > 1
    assert torch.allclose(found, cascade.embed(pictures), atol=1e-5)


def test_frequent_masks_stay_while_rare_ones_come_and_go(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    net = network().eval()
    views = HotViews(net, room=3, threads=1, count=lambda what: counts.update([what]))
    empty = Switch({}, {})
    for turn in range(50):
        for key in ("often", "also", f"rare {turn}"):
            with views.lease(key, empty):
                pass
    assert counts["switch"] == 52  # each rare one, and the others once


def test_threads_share_a_view_and_no_more_are_made_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = SpareView.__init__

    def counted(self: SpareView, base: torch.nn.Module, *, passing: bool = False) -> None:
        made.append(passing)
        real(self, base, passing=passing)

    monkeypatch.setattr(SpareView, "__init__", counted)
    for passing in (False, True):
        made.clear()
        _lease_in_turn(HotViews(network().eval(), room=4, threads=1, passing=passing))
        assert (made.count(True), made.count(False)) == ((1, 3) if passing else (0, 4))


def _lease_in_turn(views: HotViews) -> None:
    empty = Switch({}, {})
    with views.lease("a", empty) as one, views.lease("a", empty) as other:
        assert one is other
    for key in "abcdefghij" * 3:
        with views.lease(key, empty):
            pass


def test_pinned_masks_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_hot"):
        ServeConfig(workers=2, max_hot=3, pin=("a", "b"))
    save_masks(tmp_path, 4)
    with engine(tmp_path, max_hot=2, pin=("m0",)) as running:
        for name in ("m1", "m2", "m3") * 5:
            running.embed(name, PHOTOS[:1])
        before = running.metrics.text()
        assert right(running, "m0", tmp_path / "m0.smn")
        assert _switches(before) == _switches(running.metrics.text())


def test_an_unreadable_file_is_an_error_and_not_remembered(tmp_path: Path) -> None:
    file = save_mask(tmp_path / "a.smn", 1)
    if os.geteuid() == 0:
        file.unlink()
        file.symlink_to(tmp_path / "nowhere")
        with engine(tmp_path) as running, pytest.raises(UnknownModelError):
            running.embed("a", PHOTOS)
        return
    file.chmod(0)
    with engine(tmp_path) as running:
        with pytest.raises(UnusableModelError):
            running.embed("a", PHOTOS)
        file.chmod(0o600)
        assert right(running, "a", file)


def _switches(metrics: bytes) -> str:
    return next(line for line in metrics.decode().splitlines() if line.startswith("selfmask_switches_total"))
