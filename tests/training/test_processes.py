"""Two processes that share a batch learn what one process learns from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from selfmask.training.sync_norm import SyncNorm

ROOT = Path(__file__).parents[2]

# One process of a run: what it adapts and where to is given; the scores at the end are left in a file.
WORKER = """
import sys, torch
from pathlib import Path
from selfmask import adapt
from tests.training.small import HOW, Clothes, config, network
out, norm, sync = Path(sys.argv[1]), sys.argv[2] == "norm", sys.argv[3] == "sync"
result = adapt(network(norm=norm), Clothes(), config(sync_norm=sync, lr=100.0), out=out, preprocessing=HOW)
if result.log:
    torch.save(dict(result.model.scores.items()), out / "scores.pt")
    torch.save(dict(result.model._norm.named_buffers()), out / "norm.pt")
"""


def launch(out: Path, *words: str, processes: int) -> dict[str, torch.Tensor]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if processes == 1:
            env = {key: value for key, value in env.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        command = [sys.executable, "-c", WORKER, str(out), *words]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for child in children:
        output, _ = child.communicate(timeout=120)
        assert child.returncode == 0, output
    scores: dict[str, torch.Tensor] = torch.load(out / "scores.pt", weights_only=True)
    return scores


@pytest.mark.parametrize(("norm", "sync"), [("none", "apart"), ("norm", "sync")])
def test_two_processes_learn_what_one_learns(tmp_path: Path, norm: str, sync: str) -> None:
    one = launch(tmp_path / "one", norm, "apart", processes=1)
    two = launch(tmp_path / "two", norm, sync, processes=2)
    assert any((score < 1).any() for score in one.values())
    for name, score in one.items():
        torch.testing.assert_close(score, two[name], rtol=1e-3, atol=1e-3, msg=name)
        assert torch.equal(score > 0, two[name] > 0), name
    if norm == "norm":
        mine, theirs = (torch.load(tmp_path / name / "norm.pt", weights_only=True) for name in ("one", "two"))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("one", "two")]
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
