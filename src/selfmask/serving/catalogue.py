"""What there is to ask for, and what its files say of themselves: headers alone are read, and read once."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from .. import checked
from ..backbones import Backbone
from ..cascade.file import is_cascade, open_cascade
from ..errors import MaskFileError
from ..files import RunFile
from ..maskfile import Manifest, OpenedMask, open_container
from .shelf import FROZEN, Found, Shelf

_MOST = 10_000  # headers that are remembered


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
    kept: str | None = None
    quality_before: float | None = None
    quality_after: float | None = None
    notes: str = ""
    problem: str | None = None


class Catalogue:
    """The models of a shelf."""

    def __init__(self, shelf: Shelf, backbone: Backbone) -> None:
        self._shelf = shelf
        self.frozen = About(FROZEN, "backbone", base=backbone.name)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Found, About]] = OrderedDict()

    def all(self) -> list[About]:
        found = (self.of(name) for name in self._shelf.names())
        return [self.frozen, *(each for each in found if each is not None)]

    def of(self, name: str) -> About | None:
        """What the file of a name says; None if there is none."""
        if (found := self._shelf.find(name)) is None:
            return None
        with self._lock:
            known = self._known.get(name)
            if known is not None and known[0] == found:
                self._known.move_to_end(name)
                return known[1]
        about = _read(name, found)
        with self._lock:
            self._known[name] = found, about
            self._known.move_to_end(name)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return about


def _read(name: str, found: Found) -> About:
    about = About(name, "mask", found.stamp.size, found.stamp.changed // 10**9, map=found.map is not None)
    if found.is_run:
        about = dataclasses.replace(about, **_result(found.path.parent / RunFile.RESULT))
    try:
        with open_container(found.path) as file:
            if is_cascade(file):
                manifest: Manifest = open_cascade(file).about().manifest
                return dataclasses.replace(about, kind="cascade", base=manifest.base_name)
            mask = OpenedMask(file)
            bits = sum(entry.bits for entry in mask.manifest.masks.values())
            on = sum(entry.active for entry in mask.manifest.masks.values())
            return dataclasses.replace(
                about,
                base=mask.manifest.base_name,
                active=on / bits if bits else 1.0,
                head="head.classes" in mask.table,
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
