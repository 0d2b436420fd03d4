"""Memory that stays with the process: seen by the pages that it has to fetch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from selfmask import adapt, memory_kept
from selfmask.cli import memory
from selfmask.embedding.embed import embed

from ..training.small import HOW, Clothes, config, network

glibc = pytest.mark.skipif(memory._glibc() is None, reason="another C library")

# In a process of its own: one that has done much has room for everything.
FETCHED = """
import json, resource
from pathlib import Path
import numpy as np
from selfmask.memory import memory_kept

def fetched():  # how many pages of a large block have to be fetched from the system: 64 if they are huge, else 32768
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def held():  # how many such blocks this process holds
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (128 << 20)

seen = {"before": [fetched(), fetched()]}
with memory_kept():
    seen["warming up"] = [fetched() for _ in range(4)]
    seen["within"] = [fetched(), fetched()]
    with memory_kept():
        seen["inner"] = [fetched(), fetched()]
    seen["after the inner"] = [fetched(), fetched()]
    seen["held"] = [held()]
seen["held"].append(held())
seen["after"] = [fetched(), fetched()]
try:
    with memory_kept():
        fetched()
        raise KeyError
except KeyError:
    seen["after an error"] = [fetched(), fetched()]
print(json.dumps(seen))
"""


@glibc
def test_freed_memory_is_used_again_within_and_returned_after() -> None:
    done = subprocess.run([sys.executable, "-c", FETCHED], check=True, capture_output=True, text=True)
    seen = json.loads(done.stdout)
    for when in ("before", "after", "after an error"):
        assert min(seen[when]) >= 64, when
    for when in ("within", "inner", "after the inner"):
        assert max(seen[when]) < 32, when
    most, left = seen["held"]
    assert left < most - 0.5


@glibc
def test_embedding_keeps_its_memory() -> None:
    depths: list[int] = []

    class Model(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            depths.append(memory._depth)
            return images.mean((2, 3))

    embed(Model(), [image for image, _ in Clothes(3).items], HOW, batch_size=1)
    assert depths == [1, 1, 1]
    assert memory._depth == 0


@glibc
def test_training_keeps_its_memory() -> None:
    depths: list[int] = []
    adapt(network(), Clothes(), config(steps=1), preprocessing=HOW, watch=lambda *_: depths.append(memory._depth))
    assert depths == [1]
    assert memory._depth == 0


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    with memory_kept():
        assert memory._depth == 0
