"""Names choose what is held out, so that shards may be cut and ordered in any way; older runs go on as they began."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from selfmask import adapt
from selfmask.commands.adapt import Adaptation
from selfmask.data import SomeImages, open_images
from selfmask.data.sources import FileImages, Images
from selfmask.data.splits import first_by_hash

from ..data.shards import png, write_tar
from .small import HOW, network
from .test_guard import fast

PICTURES = {f"{number:03d}.png": png(number) for number in range(60)}


def tars(folder: Path, order: Sequence[str], count: int) -> Images:
    own = -(-len(order) // count)
    for part in range(count):
        write_tar(folder / f"p-{part}.tar", {name: PICTURES[name] for name in order[part * own : (part + 1) * own]})
    return open_images(folder)


def held(images: Images, **changes: Any) -> set[str]:
    recipe = Adaptation(
        network(), images, fast(**changes), given=HOW, name=None, labelled=None, start=None, report=False
    )
    return {images.names[number] for number in recipe.held_out(images.names, images.own_names)}


def test_the_number_and_order_of_shards_make_no_difference(tmp_path: Path) -> None:
    names = sorted(PICTURES)
    (tmp_path / "photos").mkdir()
    for name, data in PICTURES.items():
        (tmp_path / "photos" / name).write_bytes(data)
    chosen = held(open_images(tmp_path / "photos"))
    assert len(chosen) == 12
    assert held(tars(tmp_path / "one", names, 1)) == chosen
    assert held(tars(tmp_path / "many", names[::-1], 7)) == chosen
    assert held(tars(tmp_path / "other", names, 3), seed=1) != chosen
    assert held(SomeImages(open_images(tmp_path / "one"), range(59, -1, -1))) == chosen


def test_what_was_learned_from_is_not_held_out_when_images_are_added() -> None:
    names = [f"{number:05d}.jpg" for number in range(20_000)]
    few, many = ({pool[i] for i in first_by_hash(pool, 256, 7)} for pool in (names[5_000:9_000], names))
    assert len(few) == len(many) == 256
    assert not (many - few) & {*names[5_000:9_000]}
    assert few & many
    shares = [len(first_by_hash(names, 256, seed)) for seed in range(3)]
    assert shares == [256] * 3
    places = [i for seed in range(40) for i in first_by_hash(names, 256, seed)]
    assert abs(sum(places) / len(places) - 10_000) < 300  # no part of the names is favoured (a standard error is 57)


def test_numbers_are_no_names(tmp_path: Path) -> None:
    assert not open_images("selfmask/fashion").own_names
    assert open_images(tmp_path / "p-0.tar" if tars(tmp_path, sorted(PICTURES), 1) else "").own_names


def test_a_run_that_began_before_names_counted_ends_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    for name, data in PICTURES.items():
        (tmp_path / "photos" / name).write_bytes(data)

    def run(out: str, *, stop: bool = False) -> dict[str, Any]:
        def watch(_: nn.Module, line: Mapping[str, Any]) -> None:
            if stop and line["step"] >= 4:
                raise RuntimeError("cut short")

        options: dict[str, Any] = {"preprocessing": HOW, "report": False, "resume": True}
        adapt(network(), tmp_path / "photos", fast(), out=tmp_path / out, watch=watch, **options)
        return dict(json.loads((tmp_path / out / "config.json").read_text())["facts"])

    with monkeypatch.context() as before:
        before.setattr(FileImages, "own_names", False)
        assert "held_out" not in run("old")
        with pytest.raises(RuntimeError, match="cut short"):
            run("cut", stop=True)
    run("cut")
    assert run("new")["held_out"] == "by name"
    losses = {
        name: [json.loads(line).get("loss") for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("old", "cut", "new")
    }
    assert losses["cut"] == losses["old"] != losses["new"]
