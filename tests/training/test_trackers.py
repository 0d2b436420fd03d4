"""Where TensorBoard is not installed: nothing is logged to it by default, and who asks learns what to install."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from selfmask.errors import MissingExtraError
from selfmask.training import config
from selfmask.training.trackers import Trackers


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "tensorboard"), ("wandb", "track"), ("mlflow", "track")])
def test_what_is_missing_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    for module in (name, f"torch.utils.{name}"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"(?s){name} is not installed.*selfmask\[{extra}\]"):
        Trackers((name,), None)


def test_the_default_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.RunConfig().track == ("tensorboard",)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    spec = importlib.util.spec_from_file_location("selfmask.training.config_again", config.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    assert again.RunConfig().track == ()
