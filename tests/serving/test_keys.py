"""Who may ask, and who may change masks."""

from __future__ import annotations

import base64
import hmac
from pathlib import Path
from unittest import mock

import pytest

from selfmask.errors import ConfigError
from selfmask.serving.config import ServeConfig
from selfmask.serving.keys import Keys

from .served import ADMIN, KEY, photo, save_mask, served, uri

BODY = {"model": "frozen", "input": uri(photo(0))}


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "keys").write_text(f"# ours\n{KEY}\n{'o' * 20}\n")
    (tmp_path / "admin").write_text(ADMIN)
    (tmp_path / "masks").mkdir()
    return {"api_key_file": str(tmp_path / "keys"), "admin_key_file": str(tmp_path / "admin")}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_a_key_nothing_but_health_answers(tmp_path: Path, key_files: dict[str, str]) -> None:
    mask = save_mask(tmp_path / "new.smn", 1).read_bytes()
    with served(tmp_path / "masks", **key_files) as (client, engine):
        assert client.get("/health").status_code == 200
        for path in (
            "/",
            "/ready",
            "/metrics",
            "/v1/models",
            "/docs",
            "/openapi.json",
            "/healthy",
            "/health/",
            "//health",
        ):
            assert client.get(path).status_code == 401, path
        assert client.post("/v1/embeddings", json=BODY).status_code == 401
        for wrong in (
            bearer("x" * 32),
            bearer(KEY[:-1]),
            bearer(ADMIN),
            {"x-api-key": "x"},
            {"authorization": "Basic x"},
        ):
            assert client.post("/v1/embeddings", json=BODY, headers=wrong).status_code == 401
        basic = {"authorization": "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()}
        for right in (bearer(KEY), bearer("o" * 20), {"x-api-key": KEY}, basic):
            assert client.post("/v1/embeddings", json=BODY, headers=right).status_code == 200
        # The admin key opens masks, and nothing else; the others do not open masks.
        where = "/v1/masks?name=new"
        for wrong in ({}, bearer(KEY), basic, bearer("x" * 32)):
            assert client.post(where, content=mask, headers=wrong).status_code == 401
            assert client.delete("/v1/masks/new", headers=wrong).status_code == 401
        assert engine.shelf.names() == []
        assert client.post(where, content=mask, headers=bearer(ADMIN)).status_code == 201
        assert client.get("/v1/models", headers=bearer(ADMIN)).status_code == 401
        assert client.get("/v1/models", headers=bearer(KEY)).json()["data"][1]["id"] == "new"


def test_without_an_admin_key_masks_cannot_be_changed(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        assert client.post("/v1/masks?name=new", content=b"x").status_code == 401
        assert client.get("/v1/models").status_code == 200
        # Another site whose name leads here is none of this machine's.
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 401
        assert client.get("/v1/models", headers={"host": "localhost:80"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_others_are_let_in_only_with_a_key_or_if_asked_twice(host: str) -> None:
    with pytest.raises(ConfigError, match="without a key"):
        ServeConfig(host=host).check_host()
    ServeConfig(host=host, insecure=True).check_host()
    ServeConfig(host=host, api_key_file="keys").check_host()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_this_machine_is_let_in(host: str) -> None:
    ServeConfig(host=host).check_host()


@pytest.mark.parametrize("content", ["", "# nothing\n", "short\n", f"{KEY}\nshort"])
def test_keys_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError):
        Keys.of(tmp_path / "keys")


def test_all_keys_are_compared_whichever_is_right() -> None:
    """So that how long it takes tells neither which it was, nor how much of it was right."""
    compared, real = [], hmac.compare_digest

    def watched(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return real(one, other)

    keys = Keys([KEY, "o" * 20, "p" * 20])
    with mock.patch("hmac.compare_digest", watched):
        assert [keys.holds(given) for given in (KEY, "p" * 20, "wrong")] == [True, True, False]
    assert compared == [32] * 9
