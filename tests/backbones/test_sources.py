"""Where weights come from: caches, real downloads from a server in this process, and no network at all."""

import hashlib
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
from selfmask.errors import BadWeightsError, WeightsUnavailableError


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
    with pytest.raises(WeightsUnavailableError, match=r"404(.|\n)*--weights(.|\n)*TORCH_HOME(.|\n)*selfmask/tiny"):
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


# ---- pins ---------------------------------------------------------------------------------------------------------


def test_a_download_with_its_hash_in_its_name_is_checked(server: str, tmp_path: Path) -> None:
    """As torch.hub names its files; another content is not kept."""
    content = b"weights"
    digest = hashlib.sha256(content).hexdigest()
    for name, whole in ((f"net-{digest[:8]}.pth", True), ("net-0123abcd.pth", False)):
        (tmp_path / "served" / name).write_bytes(content)
        source = WebFile(f"{server}/{name}")
        if whole:
            assert fetch(source, "some/name").read_bytes() == content
        else:
            with pytest.raises(WeightsUnavailableError, match="hash"):
                fetch(source, "some/name")
            assert source.local() is None


def test_a_file_of_the_hub_is_downloaded_at_its_commit(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", server)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server + "/{repo_id}/resolve/{revision}/{filename}")
    for revision, content in (("main", b"changed"), ("a" * 40, b"pinned")):
        folder = tmp_path / "served" / "timm" / "x" / "resolve" / revision
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
    source = HubFile("timm/x", ("model.safetensors",), "a" * 40)
    assert f"resolve/{'a' * 40}/" in source.where
    assert fetch(source, "x").read_bytes() == b"pinned"


def test_a_name_with_a_hash_takes_no_other_weights(tmp_path: Path) -> None:
    from selfmask.backbones import loading

    path = tmp_path / "tiny.safetensors"
    save_file(TinyResNet().state_dict(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    backbone = load_backbone(f"selfmask/tiny@sha256:{digest}", weights=path)
    assert backbone.name == f"selfmask/tiny@sha256:{digest}"
    assert loading.at_hand(backbone.name, None)
    for weights in (path, None):
        with pytest.raises(BadWeightsError, match="not those that were asked for"):
            load_backbone(f"selfmask/tiny@sha256:{'0' * 64}", weights=weights)


def test_a_name_with_a_commit() -> None:
    from selfmask.backbones.loading import resolve
    from selfmask.errors import UnknownBackboneError

    commit = "0123456789" * 4
    source = resolve(f"resnet50.a1_in1k@{commit}").source
    assert isinstance(source, HubFile)
    assert source.revision == commit
    with pytest.raises(UnknownBackboneError, match="@sha256:HASH"):
        resolve(f"swav/resnet50@{commit}")
    with pytest.raises(UnknownBackboneError):
        resolve("resnet50@main")
