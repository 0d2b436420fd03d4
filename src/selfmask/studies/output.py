"""What a study found: a table with the spread over seeds, beside the paper's numbers, and what became of its claims."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..errors import RunWriteError
from ..evaluation.metrics import interval
from ..files import write_atomically
from ..report.study import StudyPage, render_study
from .numbers import find, names
from .runner import Findings
from .scale import Case
from .study import Entry
from .verdicts import Judgement, judged

_MOST_POINTS = 20
_NO_SPREAD = 1e-9  # of numbers that are equal: what rounding their mean leaves
CLAIMS_HEAD = ("claim", "here", "difference (± 95 %)", "numbers", "seeds", "steps", "in the paper")


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
        what = {"backbone": case.backbone, "setting": setting, "data": case.data, "measure": measure}
        paper = find(found.study.name, **what, x=at) if found.study.name in names() else None
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


def page_of(found: Findings, lines: Sequence[Line], figures: Sequence[str] = ()) -> StudyPage:
    """What the page of a study shows: what it is, what became of the paper's claims, its table and its figures."""
    study, scale = found.study, found.scale
    with_x = any(line.x is not None for line in lines)
    head = ["case", "setting", "measure", *(["at"] if with_x else [])]
    shown = for_reading(lines)
    left = len(lines) - len(shown)
    return StudyPage(
        title=study.title,
        command=f"selfmask study {study.name} --scale {scale.name}",
        recipe=scale.recipe,
        head=[*head, "found", "seeds", "steps", "paper", "difference"],
        rows=[[*first(line, with_x), *rest(line)] for line in shown],
        note=f"{left:,} more, the points of long curves, are in {study.name}.csv." if left else "",
        figures=figures,
        missing=list(
            dict.fromkeys(
                f"{entry.case}, {entry.setting}, {entry.measure}: {why.splitlines()[0]}"
                for entry, why in found.missing.items()
            )
        ),
        claims_head=CLAIMS_HEAD,
        claims=[[claim.text, *claim_row(judged(claim, found))] for claim in study.claims],
    )


def claim_row(found: Judgement) -> list[str]:
    """What stands beside a claim, in the columns of `CLAIMS_HEAD`."""
    many = [f"{count:,}" if count else "" for count in (found.seeds, found.steps)]
    return [found.verdict, found.difference, found.here, *many, found.paper]


def as_markdown(page: StudyPage) -> str:
    text = [f"# {page.title}", "", f"`{page.command}`", "", page.recipe, ""]
    text += table(page.head, *page.rows)
    if page.note:
        text += ["", page.note]
    text += ["", *(f"![{name}]({name})" for name in page.figures)]
    if page.missing:
        text += ["", "Missing:", "", *(f"- {each}" for each in page.missing)]
    if page.claims:
        text += ["", "## What the paper says", "", *table(page.claims_head, *page.claims)]
    return "\n".join(text) + "\n"


def write(found: Findings, folder: Path) -> list[Path]:
    """CSV, Markdown, figures and one page of a study; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = lines_of(found)
    figures = found.study.draw(found.values, folder, found.place)
    name, page = found.study.name, page_of(found, lines, figures)
    files = {f"{name}.csv": as_csv(lines), f"{name}.md": as_markdown(page), f"{name}.html": render_study(page, folder)}
    for file, content in files.items():
        write_atomically(folder / file, content.encode(), RunWriteError)
    return [folder / file for file in (*files, *figures)]


def first(line: Line, with_x: bool) -> list[str]:
    """What a number is of, in the first columns of a table."""
    at = [] if not with_x else ["" if line.x is None else f"{line.x:g}"]
    return [line.case, line.setting, line.measure, *at]


def rest(line: Line) -> list[str]:
    """The number, how many seeds and steps it has, and how far it is from the paper's."""
    return [
        _number(line.mean, line.spread),
        str(line.seeds),
        f"{line.steps:,}" if line.steps else "",
        "" if line.paper is None else _number(line.paper),
        "" if line.difference is None else f"{line.difference:+.3g}",
    ]


def _number(value: float, spread: float | None = None) -> str:
    if 0 < abs(value) < 0.005 and not spread:
        return f"{value:.2g}"
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.3f}" + (f" ± {spread:.3f}" if spread and spread > _NO_SPREAD else "")
    )


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def table(head: Sequence[str], *rows: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
