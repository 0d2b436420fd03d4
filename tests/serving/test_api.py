"""The HTTP interface: vectors as they are offline, in the forms that clients know."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from selfmask.embedding.embedder import base_fingerprint, mask_fingerprint
from selfmask.evaluation.feature_map import FeatureMap, MadeFor
from selfmask.masking import MaskedModel
from selfmask.objectives.heads import head_of
from selfmask.serving.engine import Engine

from .served import BACKBONE, ask, backbone, offline, photo, save_mask, served, until, uri, vectors_of

PHOTOS = [photo(number) for number in range(4)]


@pytest.mark.parametrize("name", ["m0", "m1", "m2", "animals", "run"])
def test_vectors_are_those_of_embed_to_the_bit(client: httpx2.Client, masks: Path, name: str) -> None:
    file = masks / f"{name}.smn"
    file = file if file.is_file() else masks / name / "mask.smn"
    assert torch.equal(vectors_of(ask(client, name, PHOTOS[0])), offline(file, PHOTOS[:1]))
    answer = ask(client, name, *PHOTOS)
    assert answer.headers["x-selfmask-batch"] == "4,4,4,4"
    assert torch.equal(vectors_of(answer), offline(file, PHOTOS))


@pytest.mark.parametrize("name", ["frozen", BACKBONE])
def test_the_backbone_itself_is_served(client: httpx2.Client, name: str) -> None:
    assert torch.equal(vectors_of(ask(client, name, *PHOTOS)), offline(None, PHOTOS))


def test_the_answer_is_of_the_form_that_openai_clients_read(client: httpx2.Client) -> None:
    body = {"model": "m0", "input": uri(PHOTOS[0]), "encoding_format": "base64", "user": "somebody", "unknown": 1}
    answer = client.post("/v1/embeddings", json=body).json()
    assert (answer["object"], answer["model"]) == ("list", "m0")
    assert answer["usage"] == {"prompt_tokens": 1, "total_tokens": 1}
    (entry,) = answer["data"]
    assert (entry["object"], entry["index"]) == ("embedding", 0)
    coded = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    assert torch.equal(torch.from_numpy(coded.copy())[None], vectors_of(ask(client, "m0", PHOTOS[0])))


def test_a_form_does_as_well(client: httpx2.Client) -> None:
    files = [("file", (f"{n}.png", each, "image/png")) for n, each in enumerate(PHOTOS)]
    answer = client.post("/v1/embeddings", data={"model": "m1"}, files=files)
    assert torch.equal(vectors_of(answer), vectors_of(ask(client, "m1", *PHOTOS)))


def test_classes_come_with_probabilities_likeliest_first(client: httpx2.Client, masks: Path) -> None:
    body = {"model": "animals", "input": [uri(each) for each in PHOTOS], "top": 2}
    data = client.post("/v1/classify", json=body).json()["data"]
    model = MaskedModel.from_pretrained(backbone().model, masks / "animals.smn")
    head = head_of(model.pack().head)
    expected = head(offline(masks / "animals.smn", PHOTOS)).softmax(1)
    for row, entry in zip(expected, data, strict=True):
        best = row.argsort(descending=True)[:2].tolist()
        assert [each["label"] for each in entry["classes"]] == [head.classes[number] for number in best]
        assert [each["probability"] for each in entry["classes"]] == pytest.approx(row[best].tolist())
    refused = client.post("/v1/classify", json={"model": "m0", "input": uri(PHOTOS[0])})
    assert refused.status_code == 400
    assert "no head" in refused.json()["error"]["message"]


def test_a_runs_map_whitens_if_asked_and_a_map_of_others_does_not(tmp_path: Path) -> None:
    mask = save_mask(tmp_path / "run" / "mask.smn", seed=1)
    own = backbone()
    masked = MaskedModel.from_pretrained(own.model, mask)
    vectors = offline(mask, [photo(number) for number in range(40)])
    model = mask_fingerprint(base_fingerprint(own.model), masked.pack())
    fitted = FeatureMap.fit(vectors, made_for=MadeFor(model, own.preprocessing))
    fitted.save(tmp_path / "run" / "map.safetensors")
    with served(tmp_path) as (client, _):
        plain = vectors_of(ask(client, "run", *PHOTOS))
        assert torch.equal(plain, offline(mask, PHOTOS))
        assert torch.equal(vectors_of(ask(client, "run", *PHOTOS, whiten="auto")), fitted(plain))
        assert torch.equal(vectors_of(ask(client, "run", *PHOTOS, whiten=1)), fitted.at(1)(plain))
        FeatureMap.fit(vectors, made_for=MadeFor("0" * 64, own.preprocessing)).save(
            tmp_path / "run" / "map.safetensors"
        )
        assert ask(client, "run", *PHOTOS, whiten="auto").status_code == 400
        assert ask(client, "run", *PHOTOS, whiten=2).status_code == 400
        assert torch.equal(vectors_of(ask(client, "run", *PHOTOS)), plain)


def test_models_are_listed_with_what_their_files_say(client: httpx2.Client, masks: Path) -> None:
    data = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert list(data) == ["frozen", "animals", "m0", "m1", "m2", "run"]
    assert data["m1"]["active"] == pytest.approx(0.92, abs=0.01)
    assert data["m1"]["bytes"] == (masks / "m1.smn").stat().st_size
    assert [name for name, each in data.items() if each.get("head")] == ["animals"]
    assert client.get("/v1/models/m1").json() == data["m1"]
    assert client.get(f"/v1/models/{'x' * 200}").status_code == 404


WRONG = {
    "no such model": ({"model": "none", "input": uri(PHOTOS[0])}, 404),
    "a path for a name": ({"model": "../masks/m0", "input": uri(PHOTOS[0])}, 404),
    "an absolute path": ({"model": "/etc/passwd", "input": uri(PHOTOS[0])}, 404),
    "a URL": ({"model": "m0", "input": "http://127.0.0.1/x.png"}, 400),
    "text": ({"model": "m0", "input": ["hello"]}, 400),
    "tokens": ({"model": "m0", "input": [[1, 2]]}, 400),
    "nothing": ({"model": "m0", "input": []}, 400),
    "no model": ({"input": uri(PHOTOS[0])}, 400),
    "no image": ({"model": "m0", "input": "data:image/png;base64,aGVsbG8="}, 400),
    "half an image": ({"model": "m0", "input": uri(PHOTOS[0][:100])}, 400),
    "bad base64": ({"model": "m0", "input": "data:image/png;base64,a"}, 400),
    "another length": ({"model": "m0", "input": uri(PHOTOS[0]), "dimensions": 3}, 400),
    "another encoding": ({"model": "m0", "input": uri(PHOTOS[0]), "encoding_format": "hex"}, 400),
    "no map": ({"model": "m0", "input": uri(PHOTOS[0]), "whiten": "auto"}, 400),
    "too many": ({"model": "m0", "input": [uri(PHOTOS[0])] * 65}, 400),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(client: httpx2.Client, engine: Engine, case: str) -> None:
    body, status = WRONG[case]
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}
    until(lambda: engine.queue.inside == 0)


def test_one_bad_image_of_several_is_named_and_nothing_is_left_behind(client: httpx2.Client, engine: Engine) -> None:
    answer = ask(client, "m0", PHOTOS[0], b"no image", PHOTOS[1])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "BadImage")
    assert torch.equal(vectors_of(ask(client, "m0", PHOTOS[0])), vectors_of(ask(client, "m0", PHOTOS[0])))
    until(lambda: engine.queue.inside == 0)


@pytest.mark.parametrize("path", ["/", "/v2", "/v1/embeddings/x", "/v1/masks"])
def test_other_paths_and_methods_are_refused(client: httpx2.Client, path: str) -> None:
    assert client.put(path).status_code in (401, 404, 405)


def test_health_runs_the_backbone_and_ready_says_so(client: httpx2.Client) -> None:
    before = _count(client, "selfmask_batch_images_count")
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert _count(client, "selfmask_batch_images_count") <= before + 1


def test_metrics_count_what_was_asked(client: httpx2.Client) -> None:
    label = 'selfmask_requests_total{route="/v1/embeddings",status="200"}'
    before = [_count(client, name) for name in (label, "selfmask_batch_images_sum", "selfmask_switches_total")]
    for name in ("m0", "m1", "m2"):
        ask(client, name, *PHOTOS)
    after = [_count(client, name) for name in (label, "selfmask_batch_images_sum", "selfmask_switches_total")]
    assert after[0] == before[0] + 3
    assert after[1] >= before[1] + 12
    assert before[2] <= after[2] <= before[2] + 3


def test_the_interface_is_described(client: httpx2.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/v1/classify", "/v1/models", "/v1/masks", "/health"} <= set(paths)
    body = paths["/v1/embeddings"]["post"]["requestBody"]["content"]
    assert {"model", "input", "encoding_format"} <= set(body["application/json"]["schema"]["properties"])


def _count(client: httpx2.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, flags=re.MULTILINE)
    return float(found[1]) if found else 0.0
