"""What a study found: a table with the spread over seeds, beside the paper's numbers, and what became of its claims."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ..errors import RunWriteError
from ..evaluation.metrics import interval
from ..files import write_atomically
from .numbers import find
from .runner import Findings
from .scale import Case
from .study import Claim, Entry

_MOST_POINTS = 20
Verdict = Literal["repeated", "not visible", "contradicted", "not measured"]


@dataclasses.dataclass(frozen=True)
class Line:
    """One cell of the table: the mean over seeds and half the width of its 95 % interval."""

    case: str
    setting: str
    measure: str
    x: float | None
    mean: float
    spread: float | None
    seeds: int
    steps: int
    paper: float | None

    @property
    def difference(self) -> float | None:
        return None if self.paper is None else self.mean - self.paper


def lines_of(found: Findings) -> list[Line]:
    """The numbers of all seeds as one, in the order of the study."""
    groups: dict[tuple[Case, str, str, float | None], list[Entry]] = {}
    for number in found.values:
        key = number.case, number.setting, number.measure, number.x
        groups.setdefault(key, []).append(number)
    lines = []
    for (case, setting, measure, x), numbers in groups.items():
        mean, spread = interval([found.values[number] for number in numbers])
        at = x if numbers[0].paper_x is None else numbers[0].paper_x
        paper = find(found.study.name, backbone=case.backbone, setting=setting, data=case.data, measure=measure, x=at)
        steps = max(number.steps for number in numbers)
        lines.append(Line(str(case), setting, measure, x, mean, spread, len(numbers), steps, paper))
    return lines


def for_reading(lines: Sequence[Line]) -> list[Line]:
    """Without curves of so many points that nobody reads them: figures show these, and the CSV file has them all."""
    points = Counter((line.case, line.setting, line.measure) for line in lines if line.x is not None)
    return [line for line in lines if points[line.case, line.setting, line.measure] <= _MOST_POINTS or line.x is None]


def as_csv(lines: Sequence[Line]) -> str:
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(Line)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "difference"])
    for line in lines:
        values = [*(getattr(line, name) for name in names), line.difference]
        writer.writerow(["" if value is None else _short(value) for value in values])
    return out.getvalue()


def as_markdown(found: Findings, lines: Sequence[Line], figures: Sequence[str] = ()) -> str:
    """The page of a study: what it is, its table, its figures, and what became of the paper's claims."""
    study, scale = found.study, found.scale
    text = [f"# {study.title}", ""]
    text += [f"`selfmask study {study.name} --scale {scale.name}`", "", scale.recipe, ""]
    with_x = any(line.x is not None for line in lines)
    head = ["case", "setting", "measure", *(["at"] if with_x else [])]
    head += ["found", "seeds", "steps", "paper", "difference"]
    shown = for_reading(lines)
    text += _table(head, *([*_first(line, with_x), *_rest(line)] for line in shown))
    if left := len(lines) - len(shown):
        text += ["", f"{left:,} more, the points of long curves, are in `{study.name}.csv`."]
    text += ["", *(f"![{name}]({name})" for name in figures)]
    if found.missing:
        text += ["", "Missing:", ""]
        text += dict.fromkeys(
            f"- {entry.case}, {entry.setting}, {entry.measure}: {why.splitlines()[0]}"
            for entry, why in found.missing.items()
        )
    if study.claims:
        text += ["", "## What the paper says", ""]
        rows = [[claim.text, *judged(claim, found)] for claim in study.claims]
        text += _table(["claim", "here", "difference (± 95 %)"], *rows)
    return "\n".join(text) + "\n"


def judged(claim: Claim, found: Findings) -> tuple[Verdict, str]:
    """Whether one setting is better than another here, on the mean of all data: seed by seed, if beyond the spread."""
    better, worse = (_by_seed(found, claim, setting) for setting in (claim.better, claim.worse))
    both = [better[key] - worse[key] for key in better if key in worse]
    if not both:
        return "not measured", ""
    seeds = sorted({key[-1] for key in better if key in worse})
    each = [_mean([better[k] - worse[k] for k in better if k in worse and k[-1] == seed]) for seed in seeds]
    mean, width = interval(each)
    shown = f"{100 * mean:+.1f}" + (f" ± {100 * width:.1f}" if width is not None else " (one seed)")
    if claim.equal and width is not None:
        return "repeated" if abs(mean) <= width else "contradicted", shown
    if width is None or abs(mean) <= width:
        return "not visible", shown
    return "repeated" if mean > 0 else "contradicted", shown


def _by_seed(found: Findings, claim: Claim, setting: str) -> dict[tuple[Case, int], float]:
    return {
        (number.case, number.seed): value
        for number, value in found.values.items()
        if number.setting == setting and number.measure in claim.measures and number.x == claim.x
    }


def write(found: Findings, folder: Path) -> list[Path]:
    """CSV, Markdown and figures of a study; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = lines_of(found)
    figures = found.study.draw(found.values, folder, found.place)
    files = {f"{found.study.name}.csv": as_csv(lines), f"{found.study.name}.md": as_markdown(found, lines, figures)}
    for name, content in files.items():
        write_atomically(folder / name, content.encode(), RunWriteError)
    return [folder / name for name in (*files, *figures)]


def _first(line: Line, with_x: bool) -> Iterator[str]:
    yield from (line.case, line.setting, line.measure)
    if with_x:
        yield "" if line.x is None else f"{line.x:g}"


def _rest(line: Line) -> Iterator[str]:
    yield _number(line.mean, line.spread)
    yield str(line.seeds)
    yield f"{line.steps:,}" if line.steps else ""
    yield "" if line.paper is None else _number(line.paper)
    yield "" if line.difference is None else f"{line.difference:+.3g}"


def _number(value: float, spread: float | None = None) -> str:
    if 0 < abs(value) < 0.005 and not spread:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}" + (f" ± {spread:.3f}" if spread else "")


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
