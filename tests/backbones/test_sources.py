"""Where weights come from: caches, real downloads from a server in this process, and no network at all."""

import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from selfmask.backbones import TinyResNet, load_backbone, sources
from selfmask.backbones.sources import HubFile, WebFile, fetch
from selfmask.errors import WeightsUnavailableError


class Hub(SimpleHTTPRequestHandler):
    """Serves files with what the client of the hub asks of every answer."""

    asked: list[str]

    def end_headers(self) -> None:
        self.send_header("ETag", '"0123456789abcdef"')
        self.send_header("X-Repo-Commit", "1" * 40)
        super().end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        type(self).asked.append(f"{self.command} {self.path}")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server for the folder `served`; no proxy in between."""
    (tmp_path / "served").mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Hub.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(tmp_path / "served"))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def cached(hub_cache: Path, repo: str, file: str) -> Path:
    """Where the hub's client keeps a file that it downloaded."""
    folder = hub_cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1" * 40)
    (folder / "snapshots" / ("1" * 40)).mkdir(parents=True)
    return folder / "snapshots" / ("1" * 40) / file


def test_a_file_of_the_web_is_downloaded_once(server: str, tmp_path: Path) -> None:
    torch.save(TinyResNet().state_dict(), tmp_path / "served" / "tiny.pth")
    source = WebFile(f"{server}/tiny.pth")
    assert source.local() is None
    first = fetch(source, "some/name")
    assert first.read_bytes() == (tmp_path / "served" / "tiny.pth").read_bytes()
    downloads = len(Hub.asked)
    assert fetch(source, "some/name") == source.local() == first
    assert len(Hub.asked) == downloads


def test_a_file_of_the_hub_is_downloaded_under_the_name_that_is_there(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", server)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server + "/{repo_id}/resolve/{revision}/{filename}")
    folder = tmp_path / "served" / "timm" / "x" / "resolve" / "main"
    folder.mkdir(parents=True)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    source = HubFile("timm/x", ("model.safetensors", "pytorch_model.bin"))
    assert fetch(source, "x").read_bytes() == b"weights"
    downloads = len(Hub.asked)
    assert fetch(source, "x") == source.local()
    assert len(Hub.asked) == downloads


def test_what_the_server_does_not_have_is_an_error_with_advice(server: str) -> None:
    with pytest.raises(WeightsUnavailableError, match=r"404(.|\n)*--weights(.|\n)*TORCH_HOME"):
        fetch(WebFile(f"{server}/gone.pth"), "some/name")


@pytest.mark.parametrize("name", ["resnet18", "swav/resnet50", "dino/resnet50", "open_clip/RN50:openai"])
@pytest.mark.usefixtures("no_network")
def test_no_network_is_an_error_with_advice_at_once(name: str) -> None:
    import open_clip  # noqa: F401  its import is not what is timed

    start = time.perf_counter()
    with pytest.raises(WeightsUnavailableError, match="--weights") as caught:
        load_backbone(name)
    assert time.perf_counter() - start < 5
    assert "HF_HOME" in str(caught.value) or "TORCH_HOME" in str(caught.value)
    assert "refused" in str(caught.value.found)


def test_a_host_that_never_answers_does_not_keep_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PATIENCE", 0.3)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.perf_counter()
        with pytest.raises(WeightsUnavailableError):
            fetch(WebFile(f"http://127.0.0.1:{silent.getsockname()[1]}/a.pth"), "some/name")
        assert time.perf_counter() - start < 3


@pytest.mark.usefixtures("no_network")
def test_weights_in_the_caches_need_no_network(hub_cache: Path) -> None:
    import timm

    torch.manual_seed(3)
    published = timm.create_model("resnet18", num_classes=1000).state_dict()
    save_file(published, cached(hub_cache, "timm/resnet18.a1_in1k", "model.safetensors"))
    for name in ("resnet18", "resnet18.a1_in1k", "timm/resnet18.a1_in1k"):
        backbone = load_backbone(name)
        assert (backbone.name, backbone.width) == (name, 512)
        for key, value in backbone.model.state_dict().items():
            assert torch.equal(value, published[key]), key


@pytest.mark.usefixtures("no_network")
def test_the_publishers_files_in_the_cache_of_torch_hub() -> None:
    import timm

    torch.manual_seed(3)
    published = timm.create_model("resnet50", num_classes=0).state_dict()
    extra = {"projection_head.0.weight": torch.zeros(2, 2), "prototypes.weight": torch.zeros(2, 2)}
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(
        {f"module.{key}": value for key, value in {**published, **extra}.items()},
        folder / "swav_800ep_pretrain.pth.tar",
    )
    backbone = load_backbone("swav/resnet50")
    assert backbone.width == 2048
    assert backbone.preprocessing.std == (0.228, 0.224, 0.225)
    assert torch.equal(backbone.model.state_dict()["layer4.2.conv3.weight"], published["layer4.2.conv3.weight"])
    assert "swav_800ep" in backbone.note
