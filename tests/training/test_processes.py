"""Two processes that share a batch learn what one process learns from it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from selfmask import adapt
from selfmask.training.sync_norm import SyncNorm

from ..processes import PROCESSES
from .small import HOW, Clothes, config, network

# What is adapted: a network with norms that see all processes, and one without norms.
RUNS = {"norm": (True, True), "none": (False, False)}


def run_all(out: Path, processes: int = 1) -> None:
    """What one of so many processes does; scores and statistics at the end are left in files."""
    for name, (norm, sync) in RUNS.items():
        settings = config(sync_norm=sync and processes > 1, lr=100.0)
        result = adapt(network(norm=norm), Clothes(), settings, out=out / name, preprocessing=HOW, report=False)
        if result.log:
            torch.save(dict(result.model.scores.items()), out / name / "scores.pt")
            torch.save(dict(result.model._norm.named_buffers()), out / name / "norm.pt")


def as_torchrun_would(rank: int, port: int, out: Path) -> None:
    """In a process of its own."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_all(out, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process left, and what two left."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [PROCESSES.Process(target=as_torchrun_would, args=(rank, port, two)) for rank in range(2)]
    for child in children:
        child.start()
    run_all(one)
    for child in children:
        child.join(300)
        assert child.exitcode == 0
    return one, two


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_learn_what_one_learns(folders: tuple[Path, Path], name: str) -> None:
    one, two = (folder / name for folder in folders)
    mine, theirs = (torch.load(folder / "scores.pt", weights_only=True) for folder in (one, two))
    assert any((score < 1).any() for score in mine.values())
    for key, score in mine.items():
        torch.testing.assert_close(score, theirs[key], rtol=1e-3, atol=1e-3, msg=key)
        assert torch.equal(score > 0, theirs[key] > 0), key
    mine, theirs = (torch.load(folder / "norm.pt", weights_only=True) for folder in (one, two))
    assert bool(mine) == (name == "norm")
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    logs = [(folder / "log.jsonl").read_text().splitlines() for folder in (one, two)]
    assert [json.loads(line)["step"] for line in logs[0]] == [json.loads(line)["step"] for line in logs[1]]


def test_batch_norm_over_processes_is_batch_norm(tmp_path: Path) -> None:
    """In a world of one, values, gradients and statistics are those of torch."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.randn(6, 4, 5, 5, requires_grad=True)
        results = []
        for synced in (False, True):
            layer = nn.BatchNorm2d(4)
            nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
            if synced:
                with SyncNorm():
                    y = layer(x)
            else:
                y = layer(x)
            gradient = torch.autograd.grad(F.relu(y).square().sum(), [x, layer.weight, layer.bias])
            results.append((y, *gradient, layer.running_mean, layer.running_var))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
        with SyncNorm():
            layer.eval()
            torch.testing.assert_close(layer(x), F.batch_norm(x, *results[1][-2:], layer.weight, layer.bias))
    finally:
        torch.distributed.destroy_process_group()
