"""`selfmask serve`, up to where the server begins to answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfmask import MaskConfig, get_masked_model
from selfmask.backbones import load_backbone

from ..cli.inside import selfmask


def test_it_says_what_it_serves_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfmask.serving.server.run", lambda *_: None)
    masked = get_masked_model(load_backbone("selfmask/tiny").model, MaskConfig())
    for name, told in (("clothes", "1 mask"), ("shoes", "2 masks")):
        masked.save_pretrained(tmp_path / f"{name}.smn")
        done = selfmask("serve", "--backbone", "selfmask/tiny", "--masks", tmp_path, "--port", "8123")
        assert done.returncode == 0, done.stderr
        assert f"selfmask/tiny and {told} of {tmp_path}: http://127.0.0.1:8123" in done.stderr.replace("\n", "")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = selfmask("serve", "--backbone", "selfmask/tiny", "--masks", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "is not a folder" in done.stderr
