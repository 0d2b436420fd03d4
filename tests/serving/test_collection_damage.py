"""Collections that were damaged or forged: none gets past the door."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selfmask import FeatureMap
from selfmask.errors import CollectionError, CorruptCollectionError
from selfmask.maskfile.container import container_bytes, open_container
from selfmask.serving import collection as collections
from selfmask.serving import graph
from selfmask.serving.collection import Collection
from tests.fuzzing.mutations import edit_json, mangle

from .indexed import IMAGES


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def refused(folder: Path, text: str = "") -> None:
    with pytest.raises(CorruptCollectionError) as caught:
        Collection.open(folder)
    assert text in str(caught.value)


def test_every_file_is_guarded(copy: Path) -> None:
    files = [file for file in copy.rglob("*") if file.is_file()]
    assert len(files) > 15
    for file in files:
        data = file.read_bytes()
        for damaged in (data[:-1], data[: len(data) // 2], b"", data + b"\0", _flipped(data)):
            file.write_bytes(damaged)
            refused(copy)
        file.unlink()
        refused(copy)
        os.mkfifo(file)
        refused(copy)
        file.unlink()
        file.write_bytes(data)
    Collection.open(copy).close()


def _flipped(data: bytes) -> bytes:
    place = len(data) // 3
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda about: about.update(format="other"), "not that of a collection"),
        (lambda about: about.update(version=2), "version"),
        (lambda about: about.update(images=0), "whole number"),
        (lambda about: about.update(images=10**12), "whole number"),
        (lambda about: about.update(images=IMAGES + 1), "other tensors"),
        (lambda about: about.update(sampled=IMAGES), "other tensors"),
        (lambda about: about.update(classes=["one"]), "class"),
        (lambda about: about.update(spaces=[]), "spaces"),
        (lambda about: about.update(spaces=about["spaces"] * 2), "spaces"),
        (lambda about: about["spaces"][0].update(width=10**9), "whole number"),
        (lambda about: about["spaces"][0].update(width=7), "other tensors"),
        (lambda about: about["spaces"][0].update(power=2), "number"),
        (lambda about: about["spaces"][0].update(power=None), "other files"),
        (lambda about: about["spaces"][0].update(preprocessing={}), "missing"),
        (lambda about: about["files"].update({"../../etc/passwd": {"bytes": 1, "sha256": "0" * 64}}), "other files"),
        (lambda about: about["files"].update({"run-0/mask.smn": {"bytes": 1, "sha256": "0" * 64}}), "other files"),
        (lambda about: about["files"].pop("thumbnails.bin"), "other files"),
        (lambda about: about["files"]["items.safetensors"].update(sha256="x"), "SHA-256"),
        (lambda about: about["files"]["items.safetensors"].update(bytes=10**18), "whole number"),
        (lambda about: about.update(title=["a"]), "text"),
        (lambda about: about.pop("title"), "missing"),
    ],
)
def test_what_it_says_of_itself_is_checked(copy: Path, change: Change, text: str) -> None:
    file = copy / "collection.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))
    refused(copy, text)


def test_what_is_no_collection_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path / "a\0b", tmp_path):
        with pytest.raises(CollectionError):
            Collection.open(place)
    for text in ("", "[]", "{", '{"format": "selfmask-collection"}', "[" * 100_000, '{"a": NaN}'):
        (tmp_path / "collection.json").write_text(text)
        refused(tmp_path)


def test_more_than_fits_into_memory_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collections, "memory_left", lambda available: 100_000)
    with pytest.raises(CollectionError, match="does not fit into memory"):
        Collection.open(whole)


def forge(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a file, and make all hashes right: whoever made the collection meant it so."""
    file = folder / name
    with open_container(file) as opened:
        words = dict(opened.metadata)
        tensors = opened.read()
    change(tensors)
    guarded = graph.FORMAT if words.pop("sha256", None) else None
    file.write_bytes(container_bytes(tensors, words, guarded))
    about = json.loads((folder / "collection.json").read_text())
    data = file.read_bytes()
    about["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "collection.json").write_text(json.dumps(about))


def put(name: str, place: int, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[place] = value

    return change


def high(tensors: dict[str, torch.Tensor]) -> None:
    """A neighbour on the first floor that stands only on the ground."""
    floors = tensors["floors"].numpy()
    starts = graph.Graph(floors, tensors["neighbours"].numpy()).starts()
    tall, low = int(np.argmax(floors > 1)), int(np.argmax(floors == 1))
    tensors["neighbours"][int(starts[tall]) + 2 * graph.LINKS] = low


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("graph-0.safetensors", put("neighbours", 0, IMAGES), "neighbours from"),
        ("graph-0.safetensors", put("neighbours", 0, -2), "neighbours from"),
        ("graph-0.safetensors", put("neighbours", -1, 2**31 - 1), "neighbours from"),
        ("graph-0.safetensors", put("floors", 0, 0), "floors"),
        ("graph-0.safetensors", put("floors", 0, 100), "floors"),
        ("graph-0.safetensors", put("floors", 0, -1), "floors"),
        ("graph-0.safetensors", put("floors", 0, 5), "neighbours expected"),
        ("graph-0.safetensors", high, "does not stand there"),
        ("graph-0.safetensors", lambda tensors: tensors.pop("floors"), "expected"),
        ("vectors-1.safetensors", put("vectors", 0, torch.nan), "length 1"),
        ("vectors-1.safetensors", put("vectors", 5, 1e30), "length 1"),
        ("items.safetensors", put("name_ends", 3, 10**9), "names"),
        ("items.safetensors", put("name_ends", 3, -5), "names"),
        ("items.safetensors", put("name_ends", -1, 10**15), "names"),
        ("items.safetensors", put("thumbnail_ends", 4, 0), "thumbnails"),
        ("items.safetensors", put("thumbnail_ends", -1, 10**12), "thumbnails"),
        ("items.safetensors", put("sampled", 0, IMAGES), "plane"),
        ("items.safetensors", put("sampled", 0, -1), "plane"),
        ("items.safetensors", put("labels", 0, 10), "class"),
        ("items.safetensors", put("labels", 0, -1), "class"),
        ("plane-0.safetensors", put("points", 0, torch.inf), "nowhere"),
    ],
)
def test_forged_numbers_lead_nowhere(
    copy: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object], text: str
) -> None:
    forge(copy, name, change)
    refused(copy, text)


def test_a_forged_map_is_refused(copy: Path) -> None:
    data = FeatureMap.fit(torch.randn(50, 12)).as_bytes()
    (copy / "map-0.safetensors").write_bytes(data)
    about = json.loads((copy / "collection.json").read_text())
    about["files"]["map-0.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (copy / "collection.json").write_text(json.dumps(about))
    refused(copy, "length 12")


def test_random_graphs_that_pass_the_check_are_searched_without_harm(whole: Path) -> None:
    """Whatever neighbours a graph names, as long as they stand where it says, faiss stays within its arrays."""
    with Collection.open(whole) as found:
        vectors = found.spaces["frozen"].vectors
    good = graph.build(vectors)
    rng = np.random.default_rng(0)
    for _ in range(20):
        neighbours = good.neighbours.copy()
        some = rng.random(len(neighbours)) < 0.5
        neighbours[some] = rng.permutation(neighbours[some])
        made = graph.Graph(good.floors, neighbours)
        try:
            made.check()
        except ValueError:
            ground = np.concatenate([np.arange(int(s), int(s) + 2 * graph.LINKS) for s in good.starts()[:-1]])
            neighbours = good.neighbours.copy()
            neighbours[ground] = rng.integers(-1, len(vectors), len(ground))
            made = graph.Graph(good.floors, neighbours)
            made.check()
        _, numbers = graph.Searcher(made, vectors)(vectors[:10], 10)
        assert int(numbers.max()) < len(vectors)


def test_random_changes_are_refused_or_harmless(copy: Path) -> None:
    """Of what the collection says of itself: what still opens is searched without an error."""
    file = copy / "collection.json"
    good, outcomes = file.read_text(), Counter[str]()
    for number in range(300):
        rng = random.Random(number)
        if rng.random() < 0.3:
            file.write_bytes(mangle(good.encode(), rng))
        else:
            changed = edit_json(json.loads(good), rng)
            file.write_bytes(json.dumps(changed).encode("utf-8", "surrogatepass"))
        try:
            with Collection.open(copy) as found:
                for space in found.spaces.values():
                    assert len(space.near(0, 3).numbers) == 3
                assert found.name(0)
                assert found.thumbnails[len(found) - 1]
                found.label(0)
        except CollectionError as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["opened"] += 1
    assert outcomes["CorruptCollectionError"] > 200
    assert outcomes["opened"] > 3
