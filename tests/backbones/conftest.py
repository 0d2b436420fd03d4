"""A machine without network, and caches of its own, for every test."""

import socket
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches: what this machine has must not decide what a test sees."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    return tmp_path / "hub"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send all connections to a port where nobody listens: they are really refused."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, address)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
