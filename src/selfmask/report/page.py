"""The report page: what a run's numbers mean, in words that do not flatter, laid out by `template.html`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ..evaluation.measuring import MAP
from ..evaluation.rows import COLUMNS
from ..files import write_atomically
from ..plain import plain as visible
from . import figures
from .confusion import confusion_figure
from .examples import Card, Neighbours, cards
from .figures import curve, percent, three_digits

FROZEN = "frozen"  # the row of the backbone itself
MAX_BAD_IMAGES, MAX_TEXT = 500, 600

_OF_ROWS = {key + end: title + more for key, title in COLUMNS.items() for end, more in (("", ""), ("_map", " + map"))}
_WITH_LABELS = {"accuracy": "test accuracy", **_OF_ROWS}
_MEASURES = {**_WITH_LABELS, "quality": "quality without labels"}


@dataclass(frozen=True)
class ReportData:
    """All that a report shows. What is missing, None or empty is left out of the page.

    result: the numbers of the run. Pairs NAME_before and NAME_after are compared, and `rows` (`evaluation.rows`) in the
        same way: what was learned with the frozen backbone, both as they are and both with a map. `quality` is a
        number, other known measures are shares of 1. `kept` is "identity" where nothing was gained, `best_step` the
        step that was kept; `troubles` say what went wrong, as step, trouble and answer. `mask_bytes` (or, of another
        method than a mask, `bytes`), `one_bit_bytes` and `base_bytes` (the float32 copy) are set side by side.
    log: the lines of the log; figures take `step`, `loss`, `ln_k`, `active`, `flips` and `quality` from them.
    active_by_layer: share of active weights of each masked tensor, in the order of the network.
    bad_images: files that could not be read, with the reason.
    confusion, classes: of the test images, where there are labels: how many of each class were taken for which.
    """

    title: str
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    log: Sequence[Mapping[str, Any]]
    active_by_layer: Mapping[str, float]
    neighbours: Neighbours | None = None
    bad_images: Sequence[tuple[str, str]] = ()
    confusion: Sequence[Sequence[int]] = ()
    classes: Sequence[str] = ()


@dataclass(frozen=True)
class Measure:
    """One number before and after, as the table shows it."""

    name: str
    before: str
    after: str
    difference: str
    verdict: str  # "better", "worse", "the same", or empty where nobody can say


@dataclass(frozen=True)
class Size:
    """One way to store a task: what it is, its bytes, how that compares, and the length of its bar in percent."""

    what: str
    size: str
    compared: str
    bar: float


def write_report(path: Path, data: ReportData) -> None:
    """Write the page, whole or not at all. The same data gives the same bytes."""
    # File names may hold bytes that are no text; Python keeps those as characters that UTF-8 cannot write.
    write_atomically(path, render(data).encode("utf-8", "backslashreplace"))


def render(data: ReportData) -> str:
    """The page as text."""
    measures, examples = list(_measures({**_pairs(data.result), **data.result})), cards(data.neighbours)
    return template("template.html").render(
        title=data.title,
        is_mask=_is_mask(data.result),
        light=figures.LIGHT,
        dark=figures.DARK,
        measures=measures,
        identity=_is_identity(data.result),
        cautions=list(_cautions(data, measures)),
        facts=dict(_facts(data)),
        sizes=list(_sizes(data.result)),
        loss=figures.loss_figure(data.log),
        lost_steps=not np.isfinite(curve(data.log, "loss")[1]).all(),
        mask=figures.mask_figure(data.log),
        quality=figures.quality_figure(data.log, data.result.get("quality_before"), data.result.get("best_step")),
        kept_step=data.result.get("best_step"),
        troubles=data.result.get("troubles") or (),
        lines_per_point=math.ceil(len(data.log) / figures.MAX_POINTS),
        layers=figures.layers_figure(data.active_by_layer),
        grouped=len(data.active_by_layer) > figures.MAX_BARS,
        confusion=confusion_figure(data.confusion, data.classes, "confusion") if data.confusion else None,
        examples=examples,
        hits=_hits(examples),
        columns=max((len(row) for card in examples for row in (card.before, card.after)), default=1),
        bad_images=data.bad_images[:MAX_BAD_IMAGES],
        bad_count=len(data.bad_images),
        result=dict(flat({key: value for key, value in data.result.items() if key != "troubles"})),
        config=dict(flat(data.config)),
    )


def template(name: str) -> Template:
    """A page's layout; whatever text gets into it stays text, without invisible characters."""
    environment = Environment(
        loader=PackageLoader("selfmask", "report"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    return environment.get_template(name)


def _pairs(result: Mapping[str, Any]) -> dict[str, float]:
    """The table of accuracies as pairs of numbers before and after."""
    rows = result.get("rows") or {}
    own = next((variant for variant in rows if variant != FROZEN and not variant.endswith(MAP)), "")
    sides = {"_before": FROZEN, "_after": own, "_map_before": FROZEN + MAP, "_map_after": own + MAP}
    found = ((key, end, rows.get(variant, {})) for key in COLUMNS for end, variant in sides.items())
    return {key + end: row[key] for key, end, row in found if key in row}


def _measures(result: Mapping[str, Any]) -> Iterator[Measure]:
    """Every pair of numbers before and after; a known measure is judged, an unknown one only shown."""
    names = dict.fromkeys(key.removesuffix("_before").removesuffix("_after") for key in result)
    known = list(_MEASURES)
    for name in sorted(names, key=lambda name: known.index(name) if name in known else len(known)):
        before, after = result.get(f"{name}_before"), result.get(f"{name}_after")
        if not (_is_number(before) or _is_number(after)):
            continue
        title = _MEASURES.get(name, name.replace("_", " "))
        if name in _WITH_LABELS:
            points = _difference(before, after, ".1f", 100)
            yield Measure(title, _share(before), _share(after), points and f"{points} points", _verdict(points))
        elif name in _MEASURES:
            change = _difference(before, after, ".3f")
            yield Measure(title, _number(before, ".3f"), _number(after, ".3f"), change, _verdict(change))
        else:
            yield Measure(title, _number(before), _number(after), _difference(before, after, ".3g"), "")


def _difference(before: Any, after: Any, digits: str, scale: int = 1) -> str:
    if not (is_finite(before) and is_finite(after)):
        return ""
    text = f"{scale * (after - before):+{digits}}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text) else text[1:]


def _verdict(points: str) -> str:
    """Of the difference as it is shown, so that words and numbers never disagree."""
    return {"": "", "+": "better", "\N{MINUS SIGN}": "worse"}.get(points[:1], "the same")


def _cautions(data: ReportData, measures: Sequence[Measure]) -> Iterator[str]:
    """What a reader must know before trusting the mask."""
    if not _is_identity(data.result):
        yield from _cautions_of_measures(measures, "mask" if _is_mask(data.result) else "model")
    losses, levels = curve(data.log, "loss")[1], curve(data.log, "ln_k")[1]
    finite, levels = losses[np.isfinite(losses)], levels[np.isfinite(levels)]
    if (lost := len(losses) - len(finite)) and "kept" not in data.result:  # a guarded run has gone back to before
        yield f"The loss was not a number on {lost:,} of {len(losses):,} log lines; do not trust such a run."
    if len(finite) and len(levels) and not _is_identity(data.result):
        end = float(finite[-math.ceil(len(finite) / 10) :].mean())
        if end >= 0.99 * levels[-1]:
            yield (
                f"The loss ended at {end:.3f} with ln K at {levels[-1]:.3f}, which is the chance level: "
                "the run was too short to learn anything, or it collapsed."
            )
    if off := [name for name, share in data.active_by_layer.items() if share == 0]:
        more = f" and {len(off) - 3} more" if len(off) > 3 else ""
        yield f"All weights are off, so no signal passes: {', '.join(off[:3])}{more}."


def _cautions_of_measures(measures: Sequence[Measure], what: str) -> Iterator[str]:
    if worse := [measure.name for measure in measures if measure.verdict == "worse"]:
        yield (
            f"According to {' and '.join(worse)}, this {what} is worse than the frozen backbone. Use the backbone "
            "as it is, or adapt again for longer or with a lower learning rate."
        )
    judged = {measure.name for measure in measures if measure.verdict}
    if not judged:
        yield (
            f"Nothing was measured with labels before and after, so this page cannot say whether the {what} helps. "
            "If you have some labels, measure it with selfmask evaluate."
        )
    elif not judged & set(_WITH_LABELS.values()):
        yield (
            f"Nothing was measured with labels: that the {what} helps is an estimate by a label-free quality. "
            "If you have some labels, measure it with selfmask evaluate."
        )


def _is_mask(result: Mapping[str, Any]) -> bool:
    return "mask_bytes" in result or "bytes" not in result


def _is_identity(result: Mapping[str, Any]) -> bool:
    return result.get("kept") == "identity"


def _facts(data: ReportData) -> Iterator[tuple[str, str]]:
    result = data.result
    if is_finite(size := result.get("mask_bytes")):
        yield "mask file", in_bytes(size)
    shares = curve(data.log, "active")[1]
    if is_finite(active := result.get("active")):  # of the point that was kept, which need not be the last
        yield "active weights", percent(active)
    elif np.isfinite(shares).any():
        yield "active weights", percent(float(shares[np.isfinite(shares)][-1]))
    if is_finite(images := result.get("images")):
        yield "images", f"{images:,}"
    if data.bad_images:
        yield "unreadable", f"{len(data.bad_images):,}"
    if is_finite(steps := result.get("steps")):
        yield "steps", f"{steps:,}"
    if is_finite(seconds := result.get("seconds")):
        yield "time", duration(seconds)
    speeds = curve(data.log, "images_per_second")[1]
    if np.isfinite(speeds).any():
        yield "images per second", three_digits(float(np.nanmedian(speeds)))
    if result.get("seed") is not None:
        yield "seed", str(result["seed"])


def _sizes(result: Mapping[str, Any]) -> Iterator[Size]:
    rows = (
        ("float32 copy of the backbone", result.get("base_bytes")),
        ("one bit per masked weight", result.get("one_bit_bytes")),
        ("mask file, including statistics", result.get("mask_bytes"))
        if _is_mask(result)
        else ("file of the trained tensors", result.get("bytes")),
    )
    known = [(what, size) for what, size in rows if is_finite(size) and size > 0]
    if not known or known[-1][0] != rows[-1][0]:
        return
    base, largest = known[0][1], max(size for _, size in known)
    for what, size in known:
        yield Size(what, f"{size:,}", times(size, base), 100 * size / largest)


def times(size: float, base: float) -> str:
    """How a size compares with another; nothing where it is the same."""
    if size == base:
        return ""
    ratio = base / size
    return f"{three_digits(ratio)} times smaller" if ratio > 1 else f"{three_digits(1 / ratio)} times larger"


def _hits(examples: Sequence[Card]) -> dict[str, tuple[int, int]] | None:
    """How many of the shown neighbours are of their query's class, before and after; None without labels."""
    rows = {
        "before": [each.right for card in examples for each in card.before],
        "after": [each.right for card in examples for each in card.after],
    }
    if any(right is None for row in rows.values() for right in row):
        return None
    return {name: (sum(map(bool, row)), len(row)) for name, row in rows.items()}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings under dotted names; None is left out."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            yield f"{prefix}{key}", words


def plain(text: object) -> str:
    """Text of the user's as the page shows it: not too long, and nothing invisible."""
    letters = str(text)
    shown = visible(letters[:MAX_TEXT])
    return shown if len(letters) <= MAX_TEXT else f"{shown}… ({len(letters):,} characters)"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> TypeGuard[float]:
    return _is_number(value) and math.isfinite(value)


def _share(value: Any) -> str:
    return f"{value:.1%}" if is_finite(value) else _number(value)


def _number(value: Any, digits: str = ".4g") -> str:
    if not _is_number(value):
        return "not measured"
    return f"{value:{digits}}" if math.isfinite(value) else "not a number"


def in_bytes(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{three_digits(size / unit)} {name}"
    return f"{size:.0f} bytes"


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{three_digits(seconds)} s"
