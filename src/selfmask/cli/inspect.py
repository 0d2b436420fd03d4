"""`selfmask inspect`: what is in a mask file, without its base."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import Console, print_json
from .pull import brought_here

if TYPE_CHECKING:
    from ..cascade.file import CascadeAbout
    from ..maskfile import Manifest

_BAR = 24
_MOST = 500  # layers in the table: each takes a millisecond to draw, and nobody reads more


def inspect(
    file: Annotated[
        str, typer.Argument(help="A mask or cascade file (.smn), or its address on the hub.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show the contents of a mask file: sizes, share of active weights by layer, base.

    The file is also checked for damage. Example:  selfmask inspect birds.smn
    """
    from ..cascade.file import inspect_cascade, is_cascade
    from ..maskfile import inspect_mask_file, open_container

    with open_container(brought_here(file, Console(stderr=True))) as opened:
        if is_cascade(opened):
            _show_cascade(file, inspect_cascade(opened), as_json)
            return
        manifest, parts = inspect_mask_file(opened)
    summary = summarise(manifest, parts)
    if as_json:
        print_json(summary)
    else:
        _show(Console(), file, manifest, summary)


def summarise(manifest: Manifest, parts: dict[str, int]) -> dict[str, Any]:
    """The numbers that `inspect` shows, as plain values."""
    bits = sum(entry.bits for entry in manifest.masks.values())
    active = sum(entry.active for entry in manifest.masks.values())
    words = dataclasses.asdict(manifest)
    return {
        "bytes": {
            **parts,
            "one_bit": sum(-(-entry.bits // 8) for entry in manifest.masks.values()),
            "float32": 4 * sum(math.prod(entry.shape) for entry in manifest.masks.values()),
        },
        "bits": bits,
        "active_share": active / bits if bits else 1.0,
        "codecs": dict(Counter(entry.codec for entry in manifest.masks.values())),
        **words,
    }


def _show(console: Console, file: str, manifest: Manifest, summary: dict[str, Any]) -> None:
    size = summary["bytes"]
    sizes = Table("", "bytes", "relative to float32", title=file, title_justify="left")
    for what, number in (
        ("float32 copy of the masked weights", size["float32"]),
        ("1 bit per weight", size["one_bit"]),
        ("masks in this file, coded", size["masks"]),
        ("batch-norm statistics", size["norm"]),
        ("head", size["head"]),
        ("this file, total", size["file"]),
    ):
        sizes.add_row(what, f"{number:,}", f"{number / max(size['float32'], 1):.2%}")
    console.print(sizes)
    layers = Table("layer", "weights", "active", "", "codec", title="share of active weights", title_justify="left")
    for name, entry in islice(manifest.masks.items(), _MOST):
        share = entry.active / entry.bits if entry.bits else 1.0
        filled = round(_BAR * share)
        bar = "█" * filled + "·" * (_BAR - filled)
        layers.add_row(name, f"{entry.bits:,}", f"{share:.2%}", bar, entry.codec)
    console.print(layers)
    if (more := len(manifest.masks) - _MOST) > 0:
        console.say(f"and {more:,} more: see --json")
    facts = Table.grid(padding=(0, 2))
    prepared = "unknown"
    if (known := manifest.preprocessing) is not None:
        height, width = known.size
        prepared = f"{height}x{width} {known.interpolation}, mean {known.mean}, std {known.std}"
    settings = {key: value for key, value in manifest.config.items() if value not in ((), [], None)}
    for key, value in {
        "active, total": f"{summary['active_share']:.3%} of {summary['bits']:,}",
        "base": f"{manifest.base_name or 'unnamed'}, fingerprint {manifest.fingerprint[:16]}",
        "preprocessing": prepared,
        "settings": ", ".join(f"{key}={value}" for key, value in settings.items()),
        "relative to": manifest.relative_to and f"mask {manifest.relative_to[:16]}",
        "mask": manifest.mask_sha256[:16],
        "written by": manifest.creator,
        "notes": manifest.notes,
        **_shared(manifest),
    }.items():
        if value:
            facts.add_row(key, value)
    console.print(facts)


def _shared(manifest: Manifest) -> dict[str, str]:
    """What the file says to those who get it: licence, data, how it was trained."""
    known = manifest.extensions.get("share")
    words = known.words if known is not None and isinstance(known.words, dict) else {}
    found = {}
    for key, value in words.items():
        parts = [f"{name} {each}" for name, each in value.items()] if isinstance(value, dict) else [str(value)]
        found["trained with" if key == "training" else str(key)] = ", ".join(parts)
    return found


def _show_cascade(file: str, about: CascadeAbout, as_json: bool) -> None:
    """A cascade: the bytes of its parts. What its masks hold is known only with the base."""
    manifest = about.manifest
    bits = (1 + about.experts) * sum(-(-entry.bits // 8) for entry in manifest.masks.values())
    if as_json:
        summary = {**dataclasses.asdict(about), "bytes": {**about.parts, "one_bit": bits}}
        del summary["parts"]
        print_json(summary)
        return
    console = Console()
    table = Table("", "bytes", "relative to 1 bit per weight", title=file, title_justify="left")
    titles = {"conditional": "PCA, conditional", "unconditional": "PCA, unconditional", "file": "this file, total"}
    rows = {titles.get(name, name.replace(".", " ")): size for name, size in about.parts.items() if name != "file"}
    for what, size in {"1 bit per weight, all masks": bits, **rows, titles["file"]: about.parts["file"]}.items():
        table.add_row(what, f"{size:,}", f"{size / max(bits, 1):.2%}")
    console.print(table)
    settings = ", ".join(f"{key}={value}" for key, value in about.settings.items())
    console.say(
        f"{about.experts} experts with {about.width} features on {manifest.base_name or 'an unnamed base'}, "
        f"fingerprint {manifest.fingerprint[:16]}",
        f"{settings}; written by {about.creator}",
    )
