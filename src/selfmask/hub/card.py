"""The model card: what is known of a mask, in words for people and in the metadata that the hub asks for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from huggingface_hub import ModelCardData
from torch import nn

from ..files import RunFile
from ..maskfile import Manifest, inspect_mask_file
from ..plain import plain
from ..preprocessing import Preprocessing
from .address import HubAddress

_TAGS = ["selfmask", "mask", "adaptation"]
_UNKNOWN = "not stated"
_HOLDS = ("It holds no weights of the backbone", "It holds weights that were trained from those of the backbone")


@dataclasses.dataclass(frozen=True)
class BaseFacts:
    """What is known of the base: its name, its repository on the hub, and its licence."""

    name: str | None = None
    repo: str | None = None
    licence: str | None = None

    @classmethod
    def of_model(cls, model: nn.Module) -> Self:
        """As a timm model carries it."""
        known = getattr(model, "pretrained_cfg", None)
        known = known if isinstance(known, Mapping) else {}
        return cls(Preprocessing.of_model(model)[0], known.get("hf_hub_id") or None, known.get("license") or None)


def mask_card(
    repo: str,
    content: bytes,
    *,
    base: BaseFacts,
    result: Mapping[str, Any] | None = None,
    table: Sequence[Sequence[str]] = (),
) -> str:
    """The card of a mask file.

    result: the numbers of its run (`result.json`). table: accuracies, in words, with a head.
    """
    manifest, parts = inspect_mask_file(content)
    shared = manifest.extensions.get("share")
    words = shared.words if shared else {}
    name = manifest.base_name or base.name
    bits = sum(entry.bits for entry in manifest.masks.values())
    active = sum(entry.active for entry in manifest.masks.values())
    facts = {
        "base": f"`{_line(name)}`" if name else "a network of its owner's",
        "licence of the base": base.licence or _UNKNOWN,
        "fingerprint of the base": f"`{manifest.base_fingerprint or manifest.fingerprint}`",
        "learned from": words.get("data") or _UNKNOWN,
        "trained with": _training(words.get("training"), manifest),
        "mask": f"{active:,} of {bits:,} weights on ({active / max(bits, 1):.2%}), {parts['file']:,} bytes",
        "mask, SHA-256": f"`{manifest.mask_sha256}`",
        "file, SHA-256": f"`{hashlib.sha256(content).hexdigest()}`",
        "licence": words.get("licence") or _UNKNOWN,
    }
    return _card(repo, "A mask", facts, base, words.get("licence"), result, table, RunFile.MASK, _python(repo, name))


def plain_card(
    repo: str,
    content: bytes,
    file: str,
    *,
    base: BaseFacts,
    licence: str | None,
    data: str | None,
    result: Mapping[str, Any] | None = None,
    table: Sequence[Sequence[str]] = (),
) -> str:
    """The card of another file of a run: a cascade, or tuned weights."""
    facts = {
        "base": f"`{_line(base.name)}`" if base.name else "a network of its owner's",
        "licence of the base": base.licence or _UNKNOWN,
        "learned from": data or _UNKNOWN,
        "file": f"`{file}`, {len(content):,} bytes",
        "file, SHA-256": f"`{hashlib.sha256(content).hexdigest()}`",
        "licence": licence or _UNKNOWN,
    }
    title = "A cascade of masks" if file == RunFile.CASCADE else "Tuned weights"
    return _card(repo, title, facts, base, licence, result, table, file, "")


def _card(
    repo: str,
    title: str,
    facts: Mapping[str, str],
    base: BaseFacts,
    licence: str | None,
    result: Mapping[str, Any] | None,
    table: Sequence[Sequence[str]],
    file: str,
    python: str,
) -> str:
    address = HubAddress.parse(repo)
    about = ModelCardData(
        license=licence,
        library_name="selfmask",
        base_model=base.repo,
        tags=_TAGS,
        pipeline_tag="image-feature-extraction",
    )
    parts = [
        f"---\n{about.to_yaml()}\n---",
        f"# {address.repo.partition('/')[2]}",
        f"{title} for a vision backbone, learned with selfmask. {_HOLDS[file == RunFile.TUNED]}, and loading it runs "
        "no code.",
        _table([["", ""], *([key, _line(value)] for key, value in facts.items())]),
        "## Did it help?",
        _verdict(result),
    ]
    if table:
        parts += ["With labels, which were only measured with:", _table(table)]
    shell = f"    selfmask embed hf://{address.repo} photos/\n    selfmask pull {address.repo}"
    parts += ["## How to load it", f"File: `{file}`. On the command line:", shell, *([python] if python else [])]
    parts.append("Add `@` and a commit to the address, and nobody can change what you load.")
    return "\n\n".join(parts) + "\n"


def _python(repo: str, name: str | None) -> str:
    known = json.dumps(name)
    load = f"model = load_backbone({known}).model" if name else "model = ...  # the network that it was learned on"
    imported = "from selfmask.backbones import load_backbone\n" if name else ""
    return (
        f"In Python:\n\n```python\n{imported}from selfmask import MaskedModel\n\n{load}\n"
        f'masked = MaskedModel.from_pretrained(model, "hf://{HubAddress.parse(repo).repo}")\n```'
    )


def _verdict(result: Mapping[str, Any] | None) -> str:
    """What the gate found, with its error."""
    if not result or "gain" not in result:
        return "Not measured: no gate was run, or its result did not come with the mask."
    gain, error = result["gain"], result.get("gain_error")
    kept = result.get("kept") in ("identity", "start")
    verdict = "No gain was found, and the file leaves the backbone as it is." if kept else "Yes, by its own measure."
    numbers = f"quality without labels {result['quality_before']:.3f} before, {result['quality_after']:.3f} after"
    wide = "" if error is None else f" ± {error:.4f} (standard error)"
    return f"{verdict} On held-out images: {numbers}; gain {gain:.4f}{wide}."


def _training(said: object, manifest: Manifest) -> str:
    told = said if isinstance(said, str) else None
    if isinstance(said, Mapping):
        told = ", ".join(f"{key} {value}" for key, value in said.items())
    return f"{told}; {manifest.creator}" if told else manifest.creator


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *lines])


def _line(text: object) -> str:
    """In a cell of a table: one line, in which nothing is a border or a tag."""
    return " ".join(plain(text, keep="\n").split()).replace("|", "\\|").replace("<", "&lt;")
