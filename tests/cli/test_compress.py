"""`selfmask compress`: the table of the paper's appendix for a user's own files, and no file that hurts."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from selfmask.backbones import load_backbone
from selfmask.commands import compress as command
from selfmask.maskfile import compressing
from selfmask.masking import MaskConfig, get_masked_model
from selfmask.objectives.heads import LinearHead
from selfmask.training.methods import prepare
from selfmask.training.tuned import About, write_tuned

from .inside import selfmask
from .small import refused


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mask of few weights, trained biases, and checkpoints of others."""
    folder, loaded = tmp_path_factory.mktemp("compress"), load_backbone("selfmask/tiny")
    masked = get_masked_model(loaded.model, MaskConfig(select=["layer1.*conv*"]))
    masked.base_name, masked.preprocessing = "selfmask/tiny", loaded.preprocessing
    with torch.no_grad():
        for scores in masked.scores.parameters():
            scores.copy_(torch.randn_like(scores) + 1.2)
    masked.save_pretrained(folder / "mask.smn")
    learner = prepare(load_backbone("selfmask/tiny").model, "bitfit", MaskConfig())
    about = About("bitfit", "selfmask/tiny", "0" * 64, loaded.preprocessing, 8, ())
    write_tuned(folder / "tuned.safetensors", learner, LinearHead(256, ["a", "b"]), about)
    weights = {"a.weight": torch.randn(30, 20), "steps": torch.tensor(7)}
    save_file(weights, folder / "plain.safetensors")
    torch.save({"epoch": 3, "state_dict": {**weights, "tied.weight": weights["a.weight"]}}, folder / "nested.pt")
    return folder


def test_a_mask_against_one_and_two_bits(place: Path) -> None:
    done = selfmask("compress", place / "mask.smn", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    sizes = found["files"][str(place / "mask.smn")]
    assert (sizes["kind"], sizes["values"]) == ("mask", 18432 + 36864)
    assert (sizes["plain"], sizes["paper_plain"]) == (sizes["values"] / 8, sizes["values"] / 4)
    assert sizes["coded"] < sizes["by"]["lzma"] < sizes["plain"]
    assert set(sizes["by"]) | set(found["missing"]) == {"gzip", "bz2", "lzma", "lz4", "snappy"}
    shown = selfmask("compress", place / "mask.smn").stdout
    assert f"{sizes['coded']:,}" in shown
    assert f"{1 - sizes['by']['gzip'] / sizes['plain']:.2%}" in shown
    assert f"{1 - sizes['by']['gzip'] / sizes['paper_plain']:.2%}" in shown


def test_weights_of_any_checkpoint(place: Path) -> None:
    files = [place / name for name in ("plain.safetensors", "nested.pt", "tuned.safetensors")]
    found = json.loads(selfmask("compress", *files, "--json").stdout)["files"]
    plain, nested, tuned = (found[str(file)] for file in files)
    assert (plain["kind"], plain["values"], plain["plain"], plain["coded"]) == ("weights", 600, 2400, None)
    assert nested["by"] == plain["by"]  # tied weights count once, numbers that are no weights not at all
    weights = torch.load(place / "nested.pt", weights_only=True)["state_dict"]["a.weight"]
    assert plain["by"]["gzip"] == len(gzip.compress(weights.numpy().tobytes()))
    assert 0 < tuned["values"] < 10_000  # biases and norms, without the head
    assert "reduction" in selfmask("compress", files[0]).stdout


def test_a_run_folder_stands_for_what_it_learned(place: Path, tmp_path: Path) -> None:
    (tmp_path / "tuned.safetensors").write_bytes((place / "tuned.safetensors").read_bytes())
    one, other = (command.compress(path) for path in (tmp_path, place / "tuned.safetensors"))
    assert one == other
    refused(selfmask("compress", place.parent), "mask")  # nothing there


def test_what_is_not_installed_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(compressing, "import_module", nothing)
    done = selfmask("compress", place / "plain.safetensors")
    assert done.returncode == 0
    assert "not installed, so not shown: lz4, snappy" in done.stdout


class _Code:
    """Whoever unpickles it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def test_broken_and_hostile_files_are_refused(place: Path, tmp_path: Path) -> None:
    mask, plain = (place / "mask.smn").read_bytes(), (place / "plain.safetensors").read_bytes()
    files = {
        "cut.smn": mask[: len(mask) // 2],
        "changed.smn": mask[:-5] + bytes([mask[-5] ^ 1]) + mask[-4:],
        "cut.safetensors": plain[:-10],
        "code.pt": pickle.dumps(_Code(tmp_path / "made")),
        "empty.pt": b"",
        "text.safetensors": b"no tensors here",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    torch.save({"huge": torch.zeros(1).expand(1 << 40)}, tmp_path / "huge.pt")
    torch.save({"thin": torch.eye(3).to_sparse(), "steps": 3}, tmp_path / "sparse.pt")
    torch.save([torch.zeros(3)], tmp_path / "list.pt")
    for name in (*files, "huge.pt", "sparse.pt", "list.pt", "missing.pt", "missing.smn"):
        refused(selfmask("compress", tmp_path / name), name)
    assert not (tmp_path / "made").exists()


def test_a_cascade_is_no_mask(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cascade:
        model = torch.nn.Identity()

    monkeypatch.setattr(command, "load_embedder", lambda *_, **__: Cascade)
    refused(selfmask("compress", place / "mask.smn"), "not a single mask", "selfmask inspect")
