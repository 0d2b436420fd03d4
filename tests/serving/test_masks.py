"""Masks added and removed while the server runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from selfmask import get_masked_model
from tests.training.small import network

from .served import ADMIN, ask, offline, photo, save_mask, served, vectors_of

HEADERS = {"authorization": f"Bearer {ADMIN}"}
PHOTOS = [photo(0), photo(1)]


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "admin").write_text(ADMIN)
    (tmp_path / "masks").mkdir()
    return {"admin_key_file": str(tmp_path / "admin")}


def test_an_upload_is_usable_at_once_and_there_after_a_restart(tmp_path: Path, admin: dict[str, str]) -> None:
    file = save_mask(tmp_path / "new.smn", 1)
    other = save_mask(tmp_path / "other.smn", 2)
    with served(tmp_path / "masks", **admin) as (client, _):
        assert ask(client, "birds", *PHOTOS).status_code == 404
        added = client.post("/v1/masks?name=birds", content=file.read_bytes(), headers=HEADERS)
        assert (added.status_code, added.json()["id"]) == (201, "birds")
        assert torch.equal(vectors_of(ask(client, "birds", *PHOTOS)), offline(file, PHOTOS))
        again = client.post("/v1/masks?name=birds", content=other.read_bytes(), headers=HEADERS)
        assert again.status_code == 409
        form = {"file": ("x.smn", other.read_bytes())}
        assert client.post("/v1/masks?name=birds&replace=true", files=form, headers=HEADERS).status_code == 201
        assert torch.equal(vectors_of(ask(client, "birds", *PHOTOS)), offline(other, PHOTOS))
    with served(tmp_path / "masks", **admin) as (client, _):
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["frozen", "birds"]
        assert torch.equal(vectors_of(ask(client, "birds", *PHOTOS)), offline(other, PHOTOS))
        assert client.delete("/v1/masks/birds", headers=HEADERS).json()["deleted"]
        assert client.delete("/v1/masks/birds", headers=HEADERS).status_code == 404
        assert ask(client, "birds", *PHOTOS).status_code == 404
    assert list((tmp_path / "masks").iterdir()) == []


def test_what_is_no_mask_of_this_backbone_is_not_written(tmp_path: Path, admin: dict[str, str]) -> None:
    sound = save_mask(tmp_path / "new.smn", 1).read_bytes()
    get_masked_model(network()).save_pretrained(tmp_path / "foreign.smn")
    save_mask(tmp_path / "masks" / "run" / "mask.smn", 2)
    cases = {
        b"": 422,
        b"no mask": 422,
        sound[:-50]: 422,
        sound[:-1] + b"x": 422,
        (tmp_path / "foreign.smn").read_bytes(): 422,
    }
    with served(tmp_path / "masks", **admin) as (client, _):
        for data, status in cases.items():
            assert client.post("/v1/masks?name=a", content=data, headers=HEADERS).status_code == status
        for name in ("", "..", "../a", "a/b", "frozen", ".a", "a.smn", "a" * 200, "%00", "é"):
            assert client.post("/v1/masks", params={"name": name}, content=sound, headers=HEADERS).status_code == 400
        for replace in ("true", "false"):
            where = f"/v1/masks?name=run&replace={replace}"
            assert client.post(where, content=sound, headers=HEADERS).status_code == 409
        assert client.delete("/v1/masks/run", headers=HEADERS).status_code == 409
        assert client.delete("/v1/masks/..%2Fnew", headers=HEADERS).status_code == 404
    assert [each.name for each in (tmp_path / "masks").iterdir()] == ["run"]
    assert (tmp_path / "new.smn").exists()


def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, admin: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = save_mask(tmp_path / "masks" / "a.smn", 1), save_mask(tmp_path / "new.smn", 2)
    before = old.read_bytes()

    class Full:
        """A file whose disk has no room."""

        def __init__(self, file: IO[bytes]) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            self.file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    with served(tmp_path / "masks", **admin) as (client, _):
        vectors = vectors_of(ask(client, "a", *PHOTOS))
        with monkeypatch.context() as patch:
            real = os.fdopen
            patch.setattr(os, "fdopen", lambda *a, **k: Full(real(*a, **k)) if a[1:] == ("w+b",) else real(*a, **k))
            answer = client.post("/v1/masks?name=a&replace=true", content=new.read_bytes(), headers=HEADERS)
        assert answer.status_code == 507, answer.text
        assert torch.equal(vectors_of(ask(client, "a", *PHOTOS)), vectors)
    assert old.read_bytes() == before
    assert [each.name for each in (tmp_path / "masks").iterdir()] == ["a.smn"]
