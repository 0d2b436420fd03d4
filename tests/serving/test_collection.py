"""Collections: what is found in them, and what they know of their images."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from selfmask import FeatureMap
from selfmask.commands.opening import load_embedder
from selfmask.data import SomeImages, open_images
from selfmask.embedding.vectors import embed
from selfmask.errors import CollectionError
from selfmask.evaluation import nearest
from selfmask.serving import building
from selfmask.serving import collection as collections
from selfmask.serving.collection import Collection
from tests.embedding.samples import pictures

from .indexed import IMAGES, clothes, indexed
from .served import BACKBONE

pytestmark = pytest.mark.usefixtures("few_points")
WHITE = Path("map.safetensors")


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


def test_some_of_other_images_are_indexed_by_their_own_names(tmp_path: Path) -> None:
    indexed(tmp_path / "c", BACKBONE, images=SomeImages(open_images("selfmask/fashion"), [7, 3]))
    with Collection.open(tmp_path / "c") as found:
        assert [found.name(0), found.name(1)] == ["000007", "000003"]
