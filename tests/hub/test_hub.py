"""Push, pull and load, against a hub that speaks the protocol of the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants

from selfmask import MaskedModel
from selfmask.commands.pull import pull
from selfmask.commands.push import contents, push
from selfmask.errors import (
    CardError,
    CorruptMaskFileError,
    HubAccessError,
    HubAddressError,
    HubError,
    HubFileError,
    HubNotFoundError,
    HubUnreachableError,
    NotAMaskFileError,
    RunExistsError,
    WrongBaseError,
)
from selfmask.files import RunFile
from selfmask.hub.address import HubAddress
from selfmask.hub.transfer import check_access
from selfmask.maskfile import inspect_mask_file

from ..maskfile.tiny import Tiny, masked_with
from .loopback import READER, Hub, Repo

WORDS = {"license": "cc-by-4.0", "data": "1,000 photos | my own", "trained_with": {"steps": 5}}
RESULT = {"gain": 0.0213, "gain_error": 0.0041, "quality_before": 0.5, "quality_after": 0.52, "kept": "mask"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as `selfmask adapt` leaves it; its paths are nobody's business."""
    folder = tmp_path / "run"
    folder.mkdir()
    masked_with(Tiny(), "sparse").save_pretrained(folder / RunFile.MASK)
    config = {"verb": "adapt", "images": "/home/secret/photos", "backbone": "resnet18", "preset": "fast"}
    (folder / RunFile.CONFIG).write_text(json.dumps({**config, "config": {"objective": {"name": "neighbours"}}}))
    rows = {name: dict.fromkeys(("knn", "knn_200", "probe_few", "probe"), 0.5) for name in ("frozen", "mask")}
    (folder / RunFile.RESULT).write_text(json.dumps({**RESULT, "rows": rows, "steps": 240, "images": 1000}))
    (folder / RunFile.SEEN).write_bytes(b"hashes of images")
    return folder


def test_what_is_pushed_is_what_is_loaded(hub: Hub) -> None:
    masked = masked_with(Tiny(), "sparse")
    address = masked.push_to_hub("me/birds", **WORDS, result=RESULT)
    assert address == f"hf://me/birds@{hub.repos['me/birds'].branches['main']}"
    assert hub.repos["me/birds"].private
    loaded = MaskedModel.from_pretrained(Tiny(), "hf://me/birds")
    assert loaded.pack().sha256 == masked.pack().sha256
    assert loaded.origin == f"{address}/mask.smn"  # pinned, though no revision was given
    loaded.load_mask(address, name="again")
    with loaded.using("again"):
        assert loaded.origin == f"{address}/mask.smn"
    words = loaded.pack().extensions["share"].words
    assert words == {"licence": "cc-by-4.0", "data": "1,000 photos | my own", "training": {"steps": 5}}


def test_a_mask_of_this_machine_comes_from_nowhere_else(hub: Hub, tmp_path: Path) -> None:
    masked_with(Tiny(), "sparse").save_pretrained(tmp_path / "a.smn")
    assert MaskedModel.from_pretrained(Tiny(), tmp_path / "a.smn").origin is None
    assert hub.seen == []


def test_local_paths_win(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:" / "me").mkdir(parents=True)
    masked_with(Tiny(), "sparse").save_pretrained("hf://me/birds")
    assert MaskedModel.from_pretrained(Tiny(), "hf://me/birds").origin is None
    assert hub.seen == []


def test_the_card_says_what_is_known_and_the_hub_takes_it(hub: Hub, run: Path) -> None:
    push(run, "me/birds", licence="cc-by-4.0", data="1,000 photos | my own")
    files = hub.repos["me/birds"].commits[-1][1]
    assert set(files) == {"README.md", RunFile.MASK}
    text = files["README.md"].decode()
    card = ModelCard(text)
    card.validate()
    assert card.data.license == "cc-by-4.0"
    assert card.data.base_model == "timm/resnet18.a1_in1k"
    manifest, _ = inspect_mask_file(files[RunFile.MASK])
    for said in (
        "licence of the base | apache-2.0",
        "1,000 photos \\| my own",
        "gain 0.0213 ± 0.0041 (standard error)",
        str(manifest.base_fingerprint),
        "steps 240",
        "k-NN (k = 20)",
        'MaskedModel.from_pretrained(model, "hf://me/birds")',
        "selfmask pull me/birds",
    ):
        assert said in text, said
    words = manifest.extensions["share"].words
    assert words["training"] == {
        "verb": "adapt",
        "preset": "fast",
        "objective": "neighbours",
        "steps": 240,
        "images": 1000,
    }


def test_nothing_else_of_a_run_is_published(run: Path) -> None:
    everything = b"".join(contents(run, "me/birds").values())
    assert b"secret" not in everything
    assert b"hashes of images" not in everything


@pytest.mark.parametrize(
    ("file", "said"), [(RunFile.CASCADE, "holds no weights"), (RunFile.TUNED, "holds weights that were trained")]
)
def test_other_files_of_runs_have_cards_too(run: Path, file: RunFile, said: str) -> None:
    (run / RunFile.MASK).rename(run / file)
    files = contents(run, "me/birds", licence="mit", data="my own")
    assert set(files) == {"README.md", file}
    text = files["README.md"].decode()
    assert ModelCard(text).data.base_model == "timm/resnet18.a1_in1k"
    assert all(part in text for part in (said, "my own", "± 0.0041", f"`{file}`"))


def test_a_verdict_without_gain_and_one_without_gate(hub: Hub, run: Path) -> None:
    (run / RunFile.RESULT).write_text(json.dumps(RESULT | {"kept": "identity", "gain": 0.0, "gain_error": None}))
    assert "No gain was found" in contents(run, "me/birds")["README.md"].decode()
    (run / RunFile.RESULT).unlink()
    assert "Not measured" in contents(run, "me/birds")["README.md"].decode()


@pytest.mark.parametrize("said", ["a\x1b[2Jb", "x" * 70_000])
def test_words_that_no_reader_would_take_are_not_written(said: str) -> None:
    with pytest.raises(Exception, match="cannot be stored"):
        masked_with(Tiny(), "sparse").mask_bytes(data=said)


def test_a_licence_the_hub_does_not_know(hub: Hub, run: Path) -> None:
    with pytest.raises(CardError, match=r"(?s)nothing was pushed.*license.*cc-by-4.0"):
        push(run, "me/birds", licence="to kill")
    assert hub.repos["me/birds"].commits == []


def test_pull_gives_a_folder_to_work_with(hub: Hub, run: Path, tmp_path: Path) -> None:
    address = push(run, "me/birds")
    folder, found = pull("me/birds", tmp_path / "here")
    assert str(found) == str(address)
    assert {file.name for file in folder.iterdir()} == {"README.md", RunFile.MASK, RunFile.CONFIG}
    assert json.loads((folder / RunFile.CONFIG).read_text())["origin"] == str(address)
    MaskedModel.from_pretrained(Tiny(), folder / RunFile.MASK)
    with pytest.raises(RunExistsError, match="--out"):
        pull("me/birds", tmp_path / "here")


def test_a_revision_stays_what_it_was(hub: Hub) -> None:
    first = masked_with(Tiny(), "sparse")
    second = masked_with(Tiny(), "dense")
    before = first.push_to_hub("me/birds")
    after = second.push_to_hub("me/birds")
    assert before != after
    for address, masked in ((before, first), (after, second), ("hf://me/birds", second)):
        assert MaskedModel.from_pretrained(Tiny(), address).pack().sha256 == masked.pack().sha256
    branch = first.push_to_hub("me/birds", revision="old")
    assert MaskedModel.from_pretrained(Tiny(), "hf://me/birds@old").origin == f"{branch}/mask.smn"


@pytest.mark.parametrize(
    ("address", "kind", "said"),
    [
        ("hf://me/birds@v9", HubNotFoundError, r"(?s)no revision v9.*leave the revision out"),
        ("hf://me/birds/other.smn", HubNotFoundError, r"(?s)no file other.smn.*name the file"),
        ("hf://me/cats", HubNotFoundError, r"(?s)no such repository.*hf auth login"),
        ("hf://birds", HubAddressError, "hf://OWNER/NAME"),
        ("hf://me/birds@/x", HubAddressError, "hf://OWNER/NAME"),
        ("hf://me/birds/../../etc/passwd", HubAddressError, "hf://OWNER/NAME"),
        ("hf://me/b--irds", HubAddressError, "hf://OWNER/NAME"),
    ],
)
def test_addresses_of_nothing(hub: Hub, address: str, kind: type[HubError], said: str, tmp_path: Path) -> None:
    masked_with(Tiny(), "sparse").push_to_hub("me/birds")
    with pytest.raises(kind, match=said):
        MaskedModel.from_pretrained(Tiny(), address)
    with pytest.raises(kind):
        pull(address, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_addresses() -> None:
    commit = "0123456789" * 4
    for text in (
        "hf://me/birds",
        "hf://me/birds@v1",
        f"hf://me/birds@{commit}/a/b.smn",
        "hf://me/birds@refs/pr/3/x.smn",
    ):
        assert str(HubAddress.parse(text)) == text
    assert HubAddress.parse("hf://me/birds@refs/pr/3/x.smn") == HubAddress("me/birds", "refs/pr/3", "x.smn")
    assert HubAddress.parse(f"me/birds@{commit}").pinned
    assert not HubAddress.parse("me/birds@main").pinned


def test_credentials(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_access("me/birds")
    check_access("club/birds")
    with pytest.raises(HubAccessError, match=r"(?s)repository of me or club.*push to me/birds"):
        check_access("you/birds")
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(HubAccessError, match=r"(?s)a read token.*hf auth login"):
        push(run, "me/birds")
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    with pytest.raises(HubAccessError, match=r"(?s)401.*hf auth login"):
        push(run, "me/birds")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubAccessError, match=r"(?s)not logged in.*hf auth login"):
        push(run, "me/birds")
    assert hub.repos == {}


def test_a_private_one_is_not_there_for_others(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    masked_with(Tiny(), "sparse").push_to_hub("me/birds")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubNotFoundError, match="private"):
        MaskedModel.from_pretrained(Tiny(), "hf://me/birds")


@pytest.mark.parametrize("failing", ["whoami", "create", "validate", "preupload", "commit"])
@pytest.mark.parametrize("how", ["drop", 503])
def test_a_hub_that_goes_down_half_way_has_nothing(hub: Hub, run: Path, failing: str, how: str | int) -> None:
    hub.failing[failing] = how
    with pytest.raises(HubUnreachableError, match=r"(?s)cannot be pushed to.*try again"):
        push(run, "me/birds")
    assert all(not repo.commits for repo in hub.repos.values())
    hub.failing.clear()
    assert push(run, "me/birds").revision == hub.repos["me/birds"].branches["main"]


@pytest.mark.parametrize(
    ("failing", "how"), [("head-resolve", "drop"), ("head-resolve", 503), ("resolve", "drop"), ("resolve", "half")]
)
def test_a_download_that_breaks_off_leaves_nothing(
    hub: Hub, run: Path, tmp_path: Path, failing: str, how: str | int
) -> None:
    push(run, "me/birds")
    hub.failing[failing] = how
    with pytest.raises(HubUnreachableError, match=r"(?s)cannot be downloaded.*try again: nothing is left half-written"):
        MaskedModel.from_pretrained(Tiny(), "hf://me/birds")
    with pytest.raises(HubUnreachableError):
        pull("me/birds", tmp_path / "here")
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != "cache") == ["run"]
    hub.failing.clear()
    MaskedModel.from_pretrained(Tiny(), "hf://me/birds")


def test_a_hub_that_is_down_and_what_was_downloaded_before(hub: Hub) -> None:
    address = masked_with(Tiny(), "sparse").push_to_hub("me/birds")
    MaskedModel.from_pretrained(Tiny(), "hf://me/birds")
    hub.failing = dict.fromkeys(("head-resolve", "resolve", "info"), "drop")
    asked = len(hub.seen)
    assert MaskedModel.from_pretrained(Tiny(), address).origin == f"{address}/mask.smn"
    assert len(hub.seen) == asked  # a commit never changes
    with pytest.raises(HubUnreachableError, match=f"(?s)downloaded before: {address}"):
        MaskedModel.from_pretrained(Tiny(), "hf://me/birds")


def test_offline(hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = push(run, "me/birds")
    pull("me/birds", tmp_path / "online")
    asked = len(hub.seen)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert MaskedModel.from_pretrained(Tiny(), "hf://me/birds").origin == f"{address}/mask.smn"
    folder, found = pull("me/birds", tmp_path / "offline")
    assert str(found) == str(address)
    for file in ("README.md", RunFile.MASK):
        assert (folder / file).read_bytes() == (tmp_path / "online" / file).read_bytes()
    for other in ("hf://me/cats", "hf://me/birds@v2"):
        with pytest.raises(HubUnreachableError, match=r"(?s)HF_HUB_OFFLINE.*unset"):
            MaskedModel.from_pretrained(Tiny(), other)
        with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE"):
            pull(other, tmp_path / "other")
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE"):
        push(run, "me/birds")
    assert len(hub.seen) == asked


def test_a_large_file_is_refused_before_it_is_downloaded(hub: Hub, run: Path, tmp_path: Path) -> None:
    push(run, "me/birds")
    hub.claimed[RunFile.MASK.value] = 1 << 40
    for load in (
        lambda: MaskedModel.from_pretrained(Tiny(), "hf://me/birds"),
        lambda: pull("me/birds", tmp_path / "here"),
    ):
        with pytest.raises(HubFileError, match=r"(?s)too large.*1,099,511,627,776"):
            load()
    assert "resolve" not in hub.seen
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95cos\nsystem\n", b"half"])
def test_files_of_the_hub_are_hostile_like_all_others(hub: Hub, tmp_path: Path, content: bytes) -> None:
    hub.repos["me/birds"] = Repo(private=False)
    whole = masked_with(Tiny(), "sparse").mask_bytes()
    hub.repos["me/birds"].commit({RunFile.MASK.value: whole[:-3] if content == b"half" else content})
    with pytest.raises((CorruptMaskFileError, NotAMaskFileError)):
        MaskedModel.from_pretrained(Tiny(), "hf://me/birds")
    with pytest.raises((CorruptMaskFileError, NotAMaskFileError)):
        pull("me/birds", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_mask_of_another_base_is_refused(hub: Hub) -> None:
    masked_with(Tiny(), "sparse").push_to_hub("me/birds")
    other = Tiny()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(WrongBaseError):
        MaskedModel.from_pretrained(other, "hf://me/birds")


def test_a_repository_without_a_mask(hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/birds"] = Repo(private=False)
    hub.repos["me/birds"].commit({"model.safetensors": b"x"})
    with pytest.raises(HubNotFoundError, match=r"(?s)nothing that selfmask can use.*model.safetensors"):
        pull("me/birds", tmp_path / "here")
