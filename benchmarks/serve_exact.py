"""`python -m benchmarks.serve_exact`: ten thousand requests of all sizes for many masks at once, every vector checked.

What is right is what `selfmask embed` gives without a server, one image at a time. A vector whose image had a forward
pass to itself must be the same to the bit; one that shared it, with images of its own mask or of others, must be within
1e-5 of it (absolutely, or relative to its value). Prints how many were which, and exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from selfmask import MaskedModel
from selfmask.data.images import decode_image
from selfmask.embedding.vectors import embed

from .load_client import ZIPF, photos, traffic
from .load_servers import ours
from .many_masks import backbone, prepared

TOLERANCE = 1e-5
_COUNTS = (1, 1, 1, 2, 5)  # images of a request


@dataclasses.dataclass(frozen=True)
class Request:
    mask: str
    images: list[int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--masks", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("build/load"))
    parser.add_argument("--options", nargs="*", default=[], help="more options of `selfmask serve`: give them last")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = asked.folder / asked.backbone
    facts, images = prepared(folder, asked.backbone, asked.masks), photos(asked.size)
    requests = mixed(asked.requests, [*facts.names, "frozen"], asked.clients)
    right = offline(asked.backbone, asked.size, folder, {each.mask for each in requests}, images)
    print(
        f"{asked.requests:,} requests, {len(right):,} masks, {asked.clients} clients; {asked.backbone}, {asked.size} px"
    )
    begin, found, worst = time.monotonic(), Counter[str](), 0.0
    with (
        ours(asked.backbone, asked.size, folder, asked.options) as (_, port),
        ThreadPoolExecutor(asked.clients) as pool,
    ):
        for request, answer in zip(requests, pool.map(lambda each: ask(port, each, images), requests), strict=True):
            for image, vector, batch, masks in zip(request.images, *answer, strict=True):
                expected = right[request.mask][image]
                away = float(((vector - expected).abs() / expected.abs().clamp(min=1)).max())
                worst = max(worst, away)
                alone = "alone" if batch == 1 else "with others of its mask" if masks == 1 else "with other masks"
                same = torch.equal(vector, expected)
                verdict = "same bits" if same else "within 1e-5" if batch > 1 and away <= TOLERANCE else "WRONG"
                found[f"{alone}: {verdict}"] += 1
    for what, count in sorted(found.items()):
        print(f"{count:7,} {what}")
    wrong = sum(count for what, count in found.items() if "WRONG" in what)
    print(f"{found.total():,} vectors in {time.monotonic() - begin:.0f} s, {wrong} wrong; farthest away: {worst:.1e}")
    return 1 if wrong else 0


def mixed(count: int, names: list[str], clients: int) -> list[Request]:
    """Half of them in Zipf's proportions, half uniform."""
    turns = random.Random(0)
    often = [
        name for turn in range(1 + count // (500 * clients)) for name in chain(*traffic(ZIPF, names, clients, turn))
    ]
    return [
        Request(turns.choice(names) if turn % 2 else often[turn], turns.sample(range(8), turns.choice(_COUNTS)))
        for turn in range(count)
    ]


def offline(name: str, size: int, folder: Path, masks: Iterable[str], images: list[str]) -> dict[str, Tensor]:
    """The vectors of all images under each mask, as `selfmask embed --batch-size 1` has them."""
    of = backbone(name, size)
    of.model.load_state_dict(load_file(folder / "weights.safetensors"))
    files = [base64.b64decode(each.partition(",")[2]) for each in images]
    decoded = [decode_image(file, near=size) for file in files]
    found = {}
    for mask in sorted(masks):
        model = (
            of.model if mask == "frozen" else MaskedModel.from_pretrained(of.model, folder / "masks" / f"{mask}.smn")
        )
        found[mask] = embed(model.eval(), decoded, of.preprocessing, batch_size=1)[0]
    return found


def ask(port: int, request: Request, images: list[str]) -> tuple[list[Tensor], list[int], list[int]]:
    """The vectors, and for each how many images and masks shared its forward pass."""
    body = {"model": request.mask, "input": [images[each] for each in request.images], "encoding_format": "base64"}
    sent = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/embeddings", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(sent, timeout=60) as answer:
        found = json.load(answer)["data"]
        shared = [
            [int(each) for each in answer.headers[f"x-selfmask-{what}"].split(",")] for what in ("batch", "masks")
        ]
    vectors = [
        torch.from_numpy(np.frombuffer(base64.b64decode(each["embedding"]), np.float32).copy()) for each in found
    ]
    return vectors, shared[0], shared[1]


if __name__ == "__main__":
    sys.exit(main())
