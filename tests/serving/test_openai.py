"""OpenAI's own client, as people have it, against a server on this machine."""

from __future__ import annotations

from pathlib import Path

import httpx2
import openai
import pytest
import torch

from .served import ADMIN, KEY, offline, photo, served, uri

PHOTOS = [photo(number) for number in range(3)]


def client_of(server: httpx2.Client, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0, timeout=60)


def test_it_gets_vectors_in_either_form(client: httpx2.Client, masks: Path) -> None:
    expected = offline(masks / "m1.smn", PHOTOS)
    with client_of(client) as ours:
        # Unless told otherwise, it asks for base64 and decodes it itself.
        for more in ({}, {"encoding_format": "float"}):
            answer = ours.embeddings.create(model="m1", input=[uri(each) for each in PHOTOS], **more)  # type: ignore[arg-type]
            assert torch.equal(torch.tensor([each.embedding for each in answer.data]), expected)
            assert [each.index for each in answer.data] == [0, 1, 2]
            assert (answer.model, answer.usage.total_tokens) == ("m1", 3)
        coded = ours.embeddings.create(model="m1", input=uri(PHOTOS[0]), encoding_format="base64")
        assert isinstance(coded.data[0].embedding, str)
        width = expected.shape[1]
        assert (
            len(ours.embeddings.create(model="m1", input=uri(PHOTOS[0]), dimensions=width).data[0].embedding) == width
        )


def test_it_lists_what_there_is(client: httpx2.Client) -> None:
    with client_of(client) as ours:
        names = [each.id for each in ours.models.list()]
        assert {"frozen", "m0", "animals", "run"} <= set(names)
        assert ours.models.retrieve("m0").owned_by == "selfmask"


def test_it_understands_what_is_refused(client: httpx2.Client) -> None:
    with client_of(client) as ours:
        with pytest.raises(openai.NotFoundError, match="there is no model 'nobody'"):
            ours.embeddings.create(model="nobody", input=uri(PHOTOS[0]))
        with pytest.raises(openai.BadRequestError, match="not a data URI"):
            ours.embeddings.create(model="m0", input="https://example.com/cat.jpg")
        with pytest.raises(openai.BadRequestError, match="cannot be shortened"):
            ours.embeddings.create(model="m0", input=uri(PHOTOS[0]), dimensions=7)


def test_its_key_is_the_one_that_opens(masks: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    with served(masks, api_key_file=str(tmp_path / "keys")) as (server, _):
        with client_of(server, KEY) as ours:
            assert len(ours.embeddings.create(model="m0", input=uri(PHOTOS[0])).data) == 1
        with client_of(server, ADMIN) as ours, pytest.raises(openai.AuthenticationError):
            ours.embeddings.create(model="m0", input=uri(PHOTOS[0]))
