"""Collections: what is found in them, how they are built, and that no damage gets past the door."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from selfmask import FeatureMap
from selfmask.commands.opening import load_embedder
from selfmask.data import SomeImages, open_images
from selfmask.embedding.vectors import Progress, embed
from selfmask.errors import (
    CollectionError,
    CollectionWriteError,
    CorruptCollectionError,
    ForeignFolderError,
    ImagesChangedError,
    RunBusyError,
)
from selfmask.evaluation import nearest
from selfmask.maskfile.container import container_bytes, open_container
from selfmask.serving import building, graph
from selfmask.serving import collection as collections
from selfmask.serving.collection import Collection
from tests.embedding.samples import pictures
from tests.fuzzing.mutations import edit_json, mangle

from .indexed import IMAGES, clothes, indexed, save_run
from .served import BACKBONE

WHITE = Path("map.safetensors")


@pytest.fixture(scope="module", autouse=True)
def _few_points() -> Iterator[None]:
    """On planes: t-SNE would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "POINTS", 12)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("runs")
    return save_run(place / "birds", seed=1), save_run(place / "cats", seed=2)


@pytest.fixture(scope="module")
def whole(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection with two masks, graphs and all."""
    out = tmp_path_factory.mktemp("collection") / "clothes.index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "APPROXIMATE_FROM", 50)
        indexed(out, *runs)
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_it_finds_what_exact_neighbours_are(runs: tuple[Path, Path], tmp_path: Path) -> None:
    indexed(tmp_path / "c", runs[0])
    queries = clothes(10, start=2000)
    embedder = load_embedder(str(runs[0]))
    with Collection.open(tmp_path / "c") as found:
        assert list(found.spaces) == ["frozen", "birds"]
        for space, variant in zip(found.spaces.values(), ("frozen", "mask"), strict=True):
            model = embedder.module([variant])
            bank, asked = (embed(model, part, embedder.preprocessing)[0] for part in (clothes(), queries))
            whiten = FeatureMap.fit(bank)
            assert not space.is_approximate
            right = nearest(whiten(bank), whiten(asked), 10)
            for near, row in zip(space.search(asked, 10), right.tolist(), strict=True):
                assert near.numbers == row
                assert near.similarities == sorted(near.similarities, reverse=True)


def test_a_graph_finds_nearly_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "APPROXIMATE_FROM", 100)
    indexed(tmp_path / "c", BACKBONE, images=clothes(500))
    embedder = load_embedder(BACKBONE)
    asked, _ = embed(embedder.module(["frozen"]), clothes(50, start=2000), embedder.preprocessing)
    with Collection.open(tmp_path / "c") as found:
        space = found.spaces["frozen"]
        assert space.is_approximate
        right = nearest(space.vectors, collections.prepared(asked, space.map), 10)
        got = [near.numbers for near in space.search(asked, 10)]
        shares = [len({*a} & {*b}) / 10 for a, b in zip(got, right.tolist(), strict=True)]
        assert sum(shares) / len(shares) > 0.97
        assert all(near.similarities == sorted(near.similarities, reverse=True) for near in space.search(asked[:5], 10))


def test_neighbours_of_an_image_are_others(whole: Path) -> None:
    with Collection.open(whole) as found:
        for space in found.spaces.values():
            near = space.near(7, 5)
            assert len(near.numbers) == 5
            assert 7 not in near.numbers
        assert len(found.frozen.near(0, 1000).numbers) <= IMAGES - 1  # type: ignore[union-attr]
        with pytest.raises(CollectionError, match="neighbours"):
            space.near(0, 2000)
        with pytest.raises(CollectionError, match="not of the kind"):
            space.search(torch.ones(1, 3), 5)
        with pytest.raises(CollectionError, match="not finite"):
            space.search(torch.full((1, 256), torch.nan), 5)


def test_it_knows_names_labels_thumbnails_and_planes(whole: Path) -> None:
    images = clothes()
    assert images.labels is not None
    assert images.classes is not None
    with Collection.open(whole) as found:
        assert len(found) == IMAGES
        assert list(found.spaces) == ["frozen", "birds", "cats"]
        assert [found.name(i) for i in range(IMAGES)] == images.names
        assert [found.label(i) for i in range(IMAGES)] == [images.classes[label] for label in images.labels]
        for number in (0, 1, IMAGES - 1):
            with Image.open(io.BytesIO(found.thumbnails[number])) as thumbnail:
                assert (thumbnail.format, thumbnail.size) == ("JPEG", (28, 28))
                difference = np.asarray(thumbnail, float) - images[number].permute(1, 2, 0).numpy()
                assert np.abs(difference).mean() < 12
        assert len(found.sampled) == 12
        assert all(plane is not None and plane.shape == (12, 2) for plane in found.planes.values())
        assert not torch.equal(*list(found.planes.values())[:2])  # type: ignore[arg-type]


def test_a_run_s_own_map_is_used_and_none_if_so_asked(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs[0], tmp_path / "run"))
    embedder = load_embedder(str(run))
    rows, _ = embed(embedder.module(["mask"]), clothes(80, start=500), embedder.preprocessing)
    FeatureMap.fit(rows, power=0.7).save(run / WHITE)
    for settings, powers in (({}, 0.7), ({"power": 0.3}, 0.3), ({"maps": False}, None)):
        out = tmp_path / f"out-{powers}"
        about = indexed(out, run, **settings).about
        assert about.spaces[1].power == powers
        with Collection.open(out) as found:
            whiten = None if powers is None else FeatureMap.load(run / WHITE).at(powers)
            bank, _ = embed(embedder.module(["mask"]), clothes(), embedder.preprocessing)
            assert torch.allclose(found.spaces["run"].vectors, collections.prepared(bank, whiten), atol=1e-5)


def test_images_that_cannot_be_read_are_left_out_and_told(tmp_path: Path) -> None:
    images = open_images(pictures(tmp_path / "photos", 12, bad=(3, 8)))
    built = indexed(tmp_path / "c", BACKBONE, images=images)
    assert [name for name, _ in built.bad] == ["0003.png", "0008.png"]
    with Collection.open(tmp_path / "c") as found:
        names = [found.name(i) for i in range(len(found))]
        assert names == [name for name in images.names if name not in ("0003.png", "0008.png")]
        assert found.label(0) is None


def test_one_image_is_a_collection(tmp_path: Path) -> None:
    """With nothing to fit a map to, and no plane."""
    built = indexed(tmp_path / "c", BACKBONE, images=clothes(1))
    assert built.about.spaces[0].power is None
    with Collection.open(tmp_path / "c") as found:
        assert found.planes == {"frozen": None}
        assert found.spaces["frozen"].near(0, 5).numbers == []


# ---- building ------------------------------------------------------------------------------------------------------


class _StopError(Exception):
    pass


def stopping(after: int) -> Any:
    """A stage that is interrupted at the nth sign of progress, of whichever part."""
    left = [after]

    @contextmanager
    def stage(_: str) -> Iterator[Progress]:
        def progress(done: int, total: int) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise KeyboardInterrupt

        progress(0, 1)
        yield progress

    return stage


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_stopped_at_any_point_it_goes_on_to_the_same_collection(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "APPROXIMATE_FROM", 10)
    indexed(tmp_path / "whole", runs[0], images=clothes(20), batch_size=8)
    out, stops = tmp_path / "c", 0
    for after in range(1, 40):
        try:
            indexed(out, runs[0], images=clothes(20), stage=stopping(after), batch_size=8)
        except KeyboardInterrupt:
            stops += 1
            assert not out.exists()
        else:
            break
    assert stops >= 5
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "whole"]


def test_work_for_other_inputs_is_not_used(runs: tuple[Path, Path], tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        indexed(tmp_path / "c", runs[0], images=clothes(8), stage=stopping(4))
    assert (tmp_path / "c.partial").is_dir()
    indexed(tmp_path / "c", runs[1], images=clothes(8), say=said.append)
    assert any("other inputs" in line for line in said)
    with Collection.open(tmp_path / "c") as found:
        assert list(found.spaces) == ["frozen", "cats"]


def test_what_stands_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(ForeignFolderError, match="not a collection"):
        indexed(tmp_path / "mine", BACKBONE)
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial/letter.txt").write_text("dear")
    with pytest.raises(ForeignFolderError, match="no unfinished collection"):
        indexed(tmp_path / "c", BACKBONE)
    assert (tmp_path / "mine/letter.txt").read_text() == (tmp_path / "c.partial/letter.txt").read_text() == "dear"
    indexed(tmp_path / "d", BACKBONE, images=clothes(5))
    with pytest.raises(ForeignFolderError, match="already"):
        indexed(tmp_path / "d", BACKBONE, images=clothes(5))


def test_two_writers_are_kept_apart(tmp_path: Path) -> None:
    @contextmanager
    def stage(name: str) -> Iterator[Progress]:
        with pytest.raises(RunBusyError):
            indexed(tmp_path / "c", BACKBONE, images=clothes(8))
        yield lambda done, total: None

    indexed(tmp_path / "c", BACKBONE, images=clothes(8), stage=stage)


def test_images_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    photos = pictures(tmp_path / "photos", 8)

    @contextmanager
    def stage(name: str) -> Iterator[Progress]:
        if name == "thumbnails":
            shutil.copy(photos / "0000.png", photos / "0001.png")
        yield lambda done, total: None

    with pytest.raises(ImagesChangedError):
        indexed(tmp_path / "c", BACKBONE, images=open_images(photos), stage=stage)
    assert not (tmp_path / "c").exists()
    indexed(tmp_path / "c", BACKBONE, images=open_images(photos))


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(building, "write_thumbnails", full)
        with pytest.raises(CollectionWriteError, match="free some space"):
            indexed(tmp_path / "c", BACKBONE, images=clothes(8))
    assert indexed(tmp_path / "c", BACKBONE, images=clothes(8)).resumed == 8


def test_runs_of_other_backbones_are_kept_apart(runs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CollectionError, match="one collection"):
        index_sizes(tmp_path / "c", runs)


def index_sizes(out: Path, runs: tuple[Path, Path]) -> None:
    """Two runs that were made with images of other sizes."""
    from selfmask.serving.building import Settings, build_collection
    from selfmask.serving.spaces import Source

    from .indexed import silent

    embedders = [load_embedder(str(run), size=size) for run, size in zip(runs, (32, 48), strict=True)]
    sources = [Source(name, each) for name, each in zip("ab", embedders, strict=True)]
    build_collection(out, sources, clothes(5), Settings(), title="", stage=silent, say=lambda _: None)


def test_names_of_runs_that_are_the_same_are_told_apart(tmp_path: Path) -> None:
    for number, place in enumerate(("a", "b")):
        save_run(tmp_path / place / "run", seed=number)
    about = indexed(tmp_path / "c", tmp_path / "a/run", tmp_path / "b/run", images=clothes(8)).about
    assert [space.name for space in about.spaces] == ["frozen", "run", "run-2"]


# ---- damage --------------------------------------------------------------------------------------------------------


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


def test_some_of_other_images_are_indexed_by_their_own_names(tmp_path: Path) -> None:
    indexed(tmp_path / "c", BACKBONE, images=SomeImages(open_images("selfmask/fashion"), [7, 3]))
    with Collection.open(tmp_path / "c") as found:
        assert [found.name(0), found.name(1)] == ["000007", "000003"]
