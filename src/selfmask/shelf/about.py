"""What the files of a folder of masks say of themselves, without their base."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .. import checked
from ..cascade.file import is_cascade, open_cascade
from ..errors import MaskFileError
from ..files import RunFile
from ..maskfile import Manifest, OpenedMask, licence_of, open_container
from .folder import Found


@dataclasses.dataclass(frozen=True)
class About:
    """One model.

    active: the share of weights that are on; kept: what a run says it kept ("identity": it gained nothing and kept the
    backbone as it is); problem: why it cannot be used.
    """

    name: str
    kind: str
    bytes: int = 0
    changed: int = 0
    """Seconds since 1970."""
    base: str | None = None
    active: float | None = None
    head: bool = False
    map: bool = False
    licence: str | None = None
    kept: str | None = None
    quality_before: float | None = None
    quality_after: float | None = None
    notes: str = ""
    problem: str | None = None


def read_about(name: str, found: Found, *, whole: bool = False) -> About:
    """From the header of a file, and the result of its run. whole: from all of it, so that any damage is seen."""
    about = About(name, "mask", found.stamp.size, found.stamp.changed // 10**9, map=found.map is not None)
    if found.is_run:
        about = dataclasses.replace(about, **_result(found.path.parent / RunFile.RESULT))
    try:
        with open_container(found.path) as file:
            if is_cascade(file):
                manifest: Manifest = open_cascade(file).about().manifest
                return dataclasses.replace(about, kind="cascade", base=manifest.base_name)
            mask = OpenedMask(file)
            if whole:
                mask.checked()
            bits = sum(entry.bits for entry in mask.manifest.masks.values())
            on = sum(entry.active for entry in mask.manifest.masks.values())
            return dataclasses.replace(
                about,
                base=mask.manifest.base_name,
                active=on / bits if bits else 1.0,
                head="head.classes" in mask.table,
                licence=licence_of(mask.manifest.extensions),
                notes=mask.manifest.notes[:1000],
            )
    except MaskFileError as error:
        return dataclasses.replace(about, problem=error.what)


def _result(file: Path) -> dict[str, Any]:
    """What a run says of its outcome, as far as it does."""
    try:
        result = checked.mapping(checked.document(checked.content(file), finite=False))
        return {
            "kept": checked.optional(result.get("kept"), lambda value: checked.printable(value, most=100)),
            "quality_before": checked.optional(result.get("quality_before"), checked.number),
            "quality_after": checked.optional(result.get("quality_after"), checked.number),
        }
    except (OSError, ValueError):
        return {}
