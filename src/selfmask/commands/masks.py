"""`masks`: what there is in a folder of masks, or in a pack; packing one, and unpacking it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from ..backbones import Backbone
from ..embedding.embedder import Embedder
from ..embedding.loading import NamedFile, load, ready
from ..errors import DifferentMasksError, EmbedderError, MaskWriteError, NotAMaskFileError
from ..files import RunFile, write_atomically
from ..maskfile import licence_of
from ..maskfile.packing import Packer
from ..maskfile.packs import OpenedPack, is_pack
from ..masking import MaskedModel
from ..preprocessing import Preprocessing
from ..shelf import ENDING, About, Found, MaskFolder, read_about
from .opening import load_embedder

MayUse = Callable[[str], bool]


def list_masks(folder: Path, *, base: str | None = None, licence: str | None = None) -> list[About]:
    """What the files of a folder, or the masks in a pack, say of themselves; broken files say why they are.

    base, licence: only masks of such a backbone, or under such a licence: part of its name, or a glob pattern. Broken
    files are listed in any case: nobody knows what they are.
    """
    if folder.is_file() and is_pack(folder):
        return [about for about in _in_pack(folder) if _wanted(about, base, licence)]
    return [about for about, _ in _listed(folder, base, licence)]


def _listed(folder: Path, base: str | None, licence: str | None) -> list[tuple[About, Found]]:
    if not folder.is_dir():
        raise NotAMaskFileError(
            f"{folder} is not a folder of masks",
            expected="a folder of .smn files and run folders",
            found="a file" if folder.exists() else "nothing of that name",
            todo="check the path",
        )
    shelf = MaskFolder(folder)
    found = ((name, shelf.find(name)) for name in shelf.names())
    listed = [(read_about(name, each, whole=True), each) for name, each in found if each is not None]
    return [pair for pair in listed if pair[0].problem is not None or _wanted(pair[0], base, licence)]


def _wanted(about: About, base: str | None, licence: str | None) -> bool:
    return _matches(about.base, base) and _matches(about.licence, licence)


def _matches(word: str | None, pattern: str | None) -> bool:
    if pattern is None:
        return True
    text = pattern.lower()
    return fnmatchcase((word or "").lower(), text if set(text) & set("*?[") else f"*{text}*")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Masks of one backbone, by name; and the other files of their folder, with why they are not among them."""

    base: str | None
    found: dict[str, Found]
    skipped: dict[str, str]


def masks_of_one_base(folder: Path, *, base: str | None = None, licence: str | None = None) -> Chosen:
    """The sound masks of a folder: of the backbone that most of them are for, if they are for several."""
    listed = _listed(folder, base, licence)
    sound = [about for about, _ in listed if about.problem is None and about.kind == "mask"]
    if not sound:
        raise NotAMaskFileError(
            f"there are no masks to use in {folder}",
            expected="NAME.smn files, or run folders with mask.smn",
            found=f"{len(listed)} files, of which {sum(about.problem is not None for about, _ in listed)} are broken",
            todo=f"look at them: selfmask masks {folder}",
        )
    name = Counter(about.base for about in sound).most_common(1)[0][0]
    chosen = Chosen(name, {}, {})
    for about, found in listed:
        if about.problem is not None:
            chosen.skipped[about.name] = about.problem
        elif about.kind != "mask":
            chosen.skipped[about.name] = f"it is a {about.kind}, not a mask"
        elif about.base != name:
            chosen.skipped[about.name] = f"it is a mask of {about.base or 'a backbone that it does not name'}"
        else:
            chosen.found[about.name] = found
    return chosen


def base_of(
    chosen: Chosen, *, backbone: str | None = None, weights: Path | None = None, may_use: MayUse | None = None
) -> tuple[MaskedModel, Preprocessing]:
    """The backbone of these masks, as a model that can load them all, and the preprocessing of the first."""
    first = next(iter(chosen.found.values()))
    what = first.path.parent if first.is_run else first.path
    embedder = load_embedder(what, backbone=backbone, weights=weights, may_use=may_use)
    return masked_of(embedder), embedder.preprocessing


def masked_of(embedder: Embedder) -> MaskedModel:
    if not isinstance(embedder.model, MaskedModel):
        raise EmbedderError(
            f"{embedder.name} is not a mask", expected="a run of `selfmask adapt`, or its mask file (.smn)"
        )
    return embedder.model


# ---- packs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Packed:
    """What became of a folder of masks. file_bytes: what they take as files of this release."""

    masks: int
    bytes: int
    file_bytes: int


def pack_masks(
    folder: Path,
    out: Path,
    *,
    base: str | None = None,
    licence: str | None = None,
    backbone: str | None = None,
    weights: Path | None = None,
    may_use: MayUse | None = None,
) -> Packed:
    """Put the masks of a folder into one file: their bits, statistics, heads and words; no maps and results of runs.

    Whatever cannot be packed is an error: nobody should remove a folder in the belief that all of it is in the pack.
    """
    chosen = masks_of_one_base(folder, base=base, licence=licence)
    if chosen.skipped:
        name, why = next(iter(chosen.skipped.items()))
        raise DifferentMasksError(
            f"{len(chosen.skipped)} of the files in {folder} cannot be in one pack with the others",
            expected=f"masks of {chosen.base or 'one backbone'}",
            found=f"{name}: {why}",
            todo=f"look at them: selfmask masks {folder}; choose by --base, or move them elsewhere",
        )
    model, _ = base_of(chosen, backbone=backbone, weights=weights, may_use=may_use)
    packer = Packer(model.as_base())
    for name, found in chosen.found.items():
        packer.add(name, model.read_mask(found.path))
    size = write_atomically(out, packer.pack(), MaskWriteError)
    return Packed(len(chosen.found), size, packer.file_bytes)


def unpack_masks(
    file: Path,
    folder: Path,
    *,
    backbone: str | None = None,
    weights: Path | None = None,
    may_use: MayUse | None = None,
) -> Packed:
    """Write each mask of a pack to a file of its own in a folder. Files that are there already must be the same."""
    kind = _PackFile()
    embedder = load((kind,), file, backbone=backbone, weights=weights, may_use=may_use)
    model, pack, size = masked_of(embedder), kind.pack, 0
    for number, (name, mask) in enumerate(pack.masks(model.as_base())):
        data = pack.file(number) if pack.words.entries[number].kind is None else model.file_bytes(mask)
        path = folder / f"{name}{ENDING}"
        if path.exists() and path.read_bytes() != data:
            raise MaskWriteError(
                f"there is another file at {path}",
                expected="an empty folder, or one with the same masks",
                todo="choose another folder: --out",
            )
        size += write_atomically(path, data, MaskWriteError)
    return Packed(len(pack.words.entries), pack.size, size)


class _PackFile:
    """A pack, and its base: a model that all its masks can be loaded on."""

    run_file = RunFile.MASK
    pack: OpenedPack

    def open(self, file: NamedFile) -> _PackFile:
        self.pack = OpenedPack(file.container)
        return self

    @property
    def base_name(self) -> str | None:
        return self.pack.manifests[0].base_name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.pack.manifests[0].masks.items()}

    def on(self, backbone: Backbone, size: int | None) -> Embedder:
        return Embedder(backbone.name, ready(MaskedModel(backbone.model)), backbone.preprocessing, backbone.width)


def _in_pack(file: Path) -> list[About]:
    """What the masks of a pack say of themselves."""
    pack, found = OpenedPack(file), []
    changed = int(file.stat().st_mtime)
    for entry, manifest in zip(pack.words.entries, pack.manifests, strict=True):
        bits = sum(each.bits for each in manifest.masks.values())
        on = entry.active if entry.kind is not None else sum(each.active for each in manifest.masks.values())
        about = About(entry.name, "mask", entry.bytes, changed, manifest.base_name, on / bits if bits else 1.0)
        licence = licence_of(manifest.extensions)
        found.append(dataclasses.replace(about, licence=licence, notes=manifest.notes[:1000]))
    return found
