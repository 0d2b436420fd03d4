"""The page's files and routes, and searching over HTTP, on a real socket."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from PIL import Image

from selfmask.commands.search import search
from selfmask.serving import building
from selfmask.serving.collection import Collection
from selfmask.serving.page import routes

from .indexed import IMAGES, clothes, indexed, save_run
from .served import KEY, photo, save_mask, served, uri

STATIC = Path(routes.__file__).parent / "static"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of one mask, and a folder with that mask, a copy of it under another name, and one more."""
    folder = tmp_path_factory.mktemp("page")
    run = save_run(folder / "masks/birds", seed=1)
    shutil.copy(run / "mask.smn", folder / "masks/copy.smn")
    save_mask(folder / "masks/other.smn", seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "POINTS", 20)
        indexed(folder / "clothes.index", run)
    return folder


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[httpx2.Client]:
    with Collection.open(place / "clothes.index") as collection, served(place / "masks", collection) as (client, _):
        yield client


def refused(answer: httpx2.Response, status: int, text: str) -> None:
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]["message"]


def test_the_page_runs_only_what_is_its_own(client: httpx2.Client) -> None:
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"page/page.js", "page/page.css"} <= set(linked)
    for link in linked:
        assert not link.startswith(("http", "//"))
        answer = client.get(f"/{link}")
        assert answer.status_code == 200, link
    for name in ("page.js", "page.css", "index.html"):
        text = (STATIC / name).read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(r"\son\w+=|style=|<script>|innerHTML|eval\(", text)


def test_every_field_of_the_page_has_a_label() -> None:
    text = (STATIC / "index.html").read_text()
    fields = re.findall(r'<(?:select|input)[^>]* id="(\w+)"', text)
    assert {"file", "model", "count", "space"} == set(fields)
    for field in fields:
        assert f'for="{field}"' in text
    assert 'aria-live="polite"' in text
    assert 'lang="en"' in text


def test_a_search_finds_what_the_command_line_finds(client: httpx2.Client, place: Path, tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(photo(1234))
    with Collection.open(place / "clothes.index") as collection:
        right = search(collection, [file], 7)[0]
        listed = {name: collection.listed(near) for name, near in right.neighbours.items()}
    for model in ("birds", "copy"):  # the same mask under another name
        answer = client.post("/v1/search", json={"model": model, "input": uri(photo(1234)), "k": 7})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["spaces"] == {"frozen": "frozen", model: "birds"}
        for name, space in found["spaces"].items():
            assert [each["number"] for each in found["neighbours"][name]] == [each["number"] for each in listed[space]]
            for mine, theirs in zip(found["neighbours"][name], listed[space], strict=True):
                assert mine["similarity"] == pytest.approx(theirs["similarity"], abs=1e-5)
                assert (mine["name"], mine["label"]) == (theirs["name"], theirs["label"])


def test_a_mask_that_was_not_indexed_is_said_so(client: httpx2.Client) -> None:
    answer = client.post("/v1/search", json={"model": "other", "input": uri(photo(5)), "k": 3}).json()
    assert list(answer["neighbours"]) == ["frozen"]
    assert "has no vectors of other" in answer["note"]
    about = client.get("/v1/collection").json()
    assert about["models"] == {"frozen": "frozen", "birds": "birds"}
    assert about["images"] == IMAGES


def test_an_image_of_the_collection_is_searched_for_by_its_number(client: httpx2.Client) -> None:
    found = client.post("/v1/search", json={"model": "birds", "item": 3, "k": 5}).json()["neighbours"]
    for near in found.values():
        assert len(near) == 5
        assert 3 not in [each["number"] for each in near]
    assert client.post("/v1/search", json={"model": "frozen", "item": 3}).json()["neighbours"].keys() == {"frozen"}


def test_thumbnails_images_and_planes(client: httpx2.Client) -> None:
    images = clothes()
    answer = client.get("/v1/collection/thumbnails/2")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
    assert answer.headers["x-content-type-options"] == "nosniff"
    with Image.open(io.BytesIO(answer.content)) as image:
        assert image.size == (28, 28)
    item = client.get("/v1/collection/images/2").json()
    assert images.labels is not None
    assert images.classes is not None
    assert item == {"number": 2, "name": images.names[2], "label": images.classes[images.labels[2]]}
    plane = client.get("/v1/collection/planes/1").json()
    assert len(plane["points"]) == len(plane["numbers"]) == len(plane["labels"]) == 20
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in plane["points"])
    assert plane["labels"] == [images.labels[number] for number in plane["numbers"]]


def test_what_makes_no_sense_is_refused(client: httpx2.Client) -> None:
    good = {"model": "frozen", "input": uri(photo(1))}
    for change, status, text in (
        ({"model": "nobody"}, 404, "nobody"),
        ({"k": 0}, 400, "k"),
        ({"k": 10**9}, 400, "k"),
        ({"item": 3}, 400, "one image"),
        ({"input": []}, 400, "one image"),
        ({"input": [good["input"]] * 2}, 400, "too many"),
        ({"input": "https://example.org/a.png"}, 400, "data URI"),
        ({"input": "data:image/png;base64,AAAA"}, 400, "cannot read"),
    ):
        refused(client.post("/v1/search", json={**good, **change}), status, text)
    for item in (IMAGES, 10**9):
        refused(client.post("/v1/search", json={"model": "frozen", "item": item}), 404, "no such image")
        assert client.get(f"/v1/collection/thumbnails/{item}").status_code == 404
    assert client.post("/v1/search", json={"model": "frozen", "item": -1}).status_code == 400
    for path in ("thumbnails/-1", "images/-1", "planes/9", "planes/-1"):
        assert client.get(f"/v1/collection/{path}").status_code == 404, path
    for path in ("thumbnails/a", "images/1.5", "thumbnails/../../etc/passwd", "thumbnails/%2e%2e%2fabout"):
        assert client.get(f"/v1/collection/{path}").status_code in (404, 422), path
    assert client.post("/v1/search", content=b"\xff{").status_code == 400


def test_without_a_collection_there_is_a_page_and_no_search(place: Path) -> None:
    with served(place / "masks") as (client, _):
        assert client.get("/").status_code == 200
        assert client.get("/v1/collection").json() == {"images": 0}
        refused(client.post("/v1/search", json={"model": "frozen", "input": uri(photo(1))}), 404, "--index")
        assert client.get("/v1/collection/thumbnails/0").status_code == 404


def test_nothing_of_a_collection_is_shown_without_the_key(place: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    with (
        Collection.open(place / "clothes.index") as collection,
        served(place / "masks", collection, api_key_file=str(tmp_path / "keys")) as (client, _),
    ):
        for path in ("/", "/page/page.js", "/v1/collection", "/v1/collection/thumbnails/0", "/v1/collection/planes/0"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, auth=("me", KEY)).status_code == 200, path
        asked = client.get("/", headers={"accept": "text/html"})
        assert asked.headers["www-authenticate"].startswith("Basic")
        assert client.post("/v1/search", json={"model": "frozen", "item": 0}).status_code == 401
