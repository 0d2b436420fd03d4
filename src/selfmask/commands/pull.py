"""`pull`: what somebody shared on the hub, checked, and whole or not at all in a folder."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import constants

from ..cascade.file import inspect_cascade
from ..errors import HubFileError, HubNotFoundError, HubUnreachableError, RunExistsError, RunWriteError, unwritable
from ..evaluation.feature_map import FeatureMap
from ..files import RunFile, sync_folder
from ..hub.address import HubAddress
from ..hub.transfer import MOST_BYTES, Fetched, fetch, names_of, remember
from ..maskfile import inspect_mask_file
from ..training.tuned import open_tuned
from .push import CARD

_MODELS: Mapping[str, Callable[[Path], object]] = {
    RunFile.MASK: inspect_mask_file,
    RunFile.CASCADE: inspect_cascade,
    RunFile.TUNED: open_tuned,
}
"""What vectors can be made with, and what refuses a file that is none."""
_BESIDE = (RunFile.MAP, CARD)
_MOST_WORDS = 1 << 20  # bytes of a card


def pull(text: str, out: str | Path | None = None, *, most: int = MOST_BYTES) -> tuple[Path, HubAddress]:
    """Download what a repository shares, check it, and write it to a folder; return the folder and the pinned address.

    out: the folder, which must not be there yet; by default the name of the repository. The folder can be used as that
    of a run: `selfmask embed FOLDER photos/`. most: bytes of a file.
    """
    folder = Path(out or HubAddress.parse(text).repo.partition("/")[2])
    if folder.exists():
        raise RunExistsError(f"{folder} already exists", todo="choose another folder: --out")
    address, files = fetch_all(text, most=most)
    temporary = folder.parent / f".selfmask-{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir(parents=True)
        for name, found in files.items():
            shutil.copyfile(found.path, temporary / name)
        about = {"verb": "pull", "origin": str(address), "backbone": None, "weights": None}
        (temporary / RunFile.CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise RunWriteError(f"cannot write {folder}", expected="a writable folder", **unwritable(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder, address


def fetch_all(text: str, *, most: int = MOST_BYTES) -> tuple[HubAddress, dict[str, Fetched]]:
    """The file to make vectors with, the map and the card, in the cache and checked; and the pinned address.

    All are of one commit, and none is downloaded if one is too large. Whoever uses them checks them again.
    """
    address, sizes = _listed(text)
    named = [address.file] if address.file else [name for name in _MODELS if name in sizes][:1]
    if not named:
        raise HubNotFoundError(
            f"{address} shares nothing that selfmask can use",
            expected=" or ".join(_MODELS),
            found=", ".join(sorted(sizes)[:5]) or "no files",
            todo="check the address, or name the file: hf://OWNER/NAME/FILE",
        )
    names = [*named, *(name for name in _BESIDE if name in sizes)]
    for name in names:
        limit = _MOST_WORDS if name == CARD else most
        if (size := sizes.get(name) or 0) > limit:
            raise HubFileError(
                f"{name} of {address} is too large",
                expected=f"at most {limit:,} bytes",
                found=f"{size:,}",
                todo="if you trust it: --max-bytes",
            )
    files = {name: fetch(str(address.at(str(address.revision), name)), most=most) for name in names}
    if not (asked := HubAddress.parse(text)).pinned:
        remember(asked.revision, files[names[0]])
    for name, found in files.items():
        if name == RunFile.MAP:
            FeatureMap.load(found.path)
        elif name != CARD:
            _MODELS.get(Path(name).name, inspect_mask_file)(found.path)
    return address, files


def _listed(text: str) -> tuple[HubAddress, dict[str, int | None]]:
    """The pinned address, and the files that are there; in offline mode, those of them that are in the cache."""
    if not constants.HF_HUB_OFFLINE:
        return names_of(text)
    address, found, missing = HubAddress.parse(text), dict[str, int | None](), list[HubUnreachableError]()
    for name in [address.file] if address.file else [*_MODELS, *_BESIDE]:
        try:
            there = fetch(str(HubAddress(address.repo, address.revision, name)))
        except HubUnreachableError as error:
            missing.append(error)
            continue
        address = HubAddress(address.repo, there.address.revision, address.file)
        found[name] = there.path.stat().st_size
    if not found:
        raise missing[0]
    return address, found
