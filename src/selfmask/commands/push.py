"""`push`: what a run learned, to the hub, with a card that is written from the run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import checked
from ..backbones import base_facts
from ..errors import EmbedderError, RunDamagedError
from ..evaluation.rows import as_table
from ..files import RunFile
from ..hub.address import HubAddress
from ..hub.card import mask_card, plain_card
from ..hub.transfer import check_access
from ..hub.transfer import push as push_files
from ..maskfile import OpenedMask, shared_bytes
from ..training.folder import RunFolder

_MODELS = (RunFile.CASCADE, RunFile.TUNED, RunFile.MASK)
CARD = "README.md"


def push(
    what: str | Path,
    repo: str,
    *,
    licence: str | None = None,
    data: str | None = None,
    private: bool = True,
    with_map: bool = True,
    revision: str | None = None,
    message: str | None = None,
) -> HubAddress:
    """Put the file of a run, its map and a card into a repository, in one commit; return the address with the commit.

    what: a run folder, or a mask file. data: the images in the user's words; no path, name or setting that could tell
    more is published, and neither are images, reports and hashes of images.
    """
    check_access(repo)
    return push_files(
        repo,
        contents(what, repo, licence=licence, data=data, with_map=with_map),
        private=private,
        message=message or f"Add what selfmask {version('selfmask')} learned",
        revision=revision,
    )


def contents(
    what: str | Path, repo: str, *, licence: str | None = None, data: str | None = None, with_map: bool = True
) -> dict[str, bytes]:
    """All that `push` would publish, by name."""
    folder, file = _file_of(Path(what))
    config, result = (_json(folder, name) for name in (RunFile.CONFIG, RunFile.RESULT))
    table = as_table(result["rows"]) if result and "rows" in result else ()
    content = file.read_bytes()
    if file.suffix == Path(RunFile.MASK).suffix and file.name != RunFile.CASCADE:
        content = shared_bytes(content, licence=licence, data=data, trained_with=_training(config, result))
        with OpenedMask(content) as opened:
            base = base_facts((config or {}).get("backbone") or opened.manifest.base_name)
        name, card = RunFile.MASK, mask_card(repo, content, base=base, result=result, table=table)
    else:
        name, base = RunFile(file.name), base_facts((config or {}).get("backbone"))
        card = plain_card(repo, content, name, base=base, licence=licence, data=data, result=result, table=table)
    files = {CARD: card.encode(), name.value: content}
    if with_map and folder is not None and (own := folder / RunFile.MAP).is_file():
        files[RunFile.MAP.value] = own.read_bytes()
    return files


def _file_of(path: Path) -> tuple[Path | None, Path]:
    """The run folder, if it is one, and the file to push."""
    if path.is_file():
        return None, path
    for name in _MODELS:
        if (path / name).is_file():
            return path, path / name
    raise EmbedderError(
        f"{path} has nothing to push",
        expected=f"a finished run with {' or '.join(_MODELS)}, or a mask file (.smn)",
        found="no such file or folder" if not path.exists() else "no such file in the folder",
        todo="check the path, or finish the run",
    )


def _json(folder: Path | None, name: str) -> dict[str, Any] | None:
    if folder is None or not (folder / name).is_file():
        return None
    return RunFolder.read_json(folder / name)


def _training(config: Mapping[str, Any] | None, result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How it was trained, without a word that names files or images."""
    if config is None:
        return None
    try:
        settings = checked.mapping(config.get("config") or {})
        objective = checked.mapping(settings.get("objective") or {}).get("name")
        said = {
            "verb": config.get("verb"),
            "preset": config.get("preset"),
            "objective": objective,
            **{name: (result or {}).get(name) for name in ("method", "steps", "seed", "images")},
        }
        return {name: checked.plain(value, most=10) for name, value in said.items() if value is not None}
    except ValueError as error:
        raise RunDamagedError("the run folder does not say how it was trained", found=error) from error
