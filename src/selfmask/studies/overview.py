"""All studies on one page: what became of each of the paper's claims, and what the runs behind it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import RunWriteError
from ..files import RunFile, write_atomically
from ..training import RunFolder
from .output import CLAIMS_HEAD, claim_row, first, lines_of, rest, table
from .runner import Findings, Tasks, in_order
from .verdicts import Judgement, judged

PAGE = "README.md"
_VERDICTS = {
    "repeated": "Repeated in miniature",
    "not visible": "Not visible at this scale",
    "contradicted": "Contradicted",
    "not measured": "Not measured",
}
_AT_PAPER_SCALE = {"repeated": "Repeated", "not visible": "Not visible"}
_REASON, _TELLING = "length", ("knn", "active_share")


def write_overview(studies: Sequence[Findings], tasks: Tasks, folder: Path) -> Path:
    """Write the page beside those of the studies; the file."""
    file = folder / PAGE
    write_atomically(file, as_markdown(studies, tasks).encode(), RunWriteError)
    return file


def as_markdown(studies: Sequence[Findings], tasks: Tasks) -> str:
    scale = studies[0].scale
    found = [(each, claim.text, judged(claim, each)) for each in studies for claim in each.study.claims]
    text = ["# The paper's claims, and what became of them here", ""]
    text += [f"Written by `selfmask study all --scale {scale.name}`, and by nothing else. {scale.recipe}", ""]
    text += [
        "A claim is repeated or contradicted if the difference is beyond its 95 % interval over seeds; otherwise it is "
        "not visible. Numbers are hundredths, those of losses as they are.",
        "",
        _took(studies, tasks),
    ]
    titles = _VERDICTS if scale.in_miniature else _VERDICTS | _AT_PAPER_SCALE
    for verdict, title in titles.items():
        rows = [(each, claim, it) for each, claim, it in found if it.verdict == verdict]
        if rows:
            text += ["", f"## {title}: {len(rows)} of {len(found)}", "", *_claims(rows)]
        if rows and verdict == "contradicted":
            text += ["", *_why(studies)]
    text += ["", "## Studies", "", *table(("study", "what it shows", "numbers", "missing"), *map(_row, studies))]
    return "\n".join(text) + "\n"


def _claims(rows: Sequence[tuple[Findings, str, Judgement]]) -> list[str]:
    head = ("study", *(name for name in CLAIMS_HEAD if name != "here"))
    return table(head, *([_link(each), claim, *claim_row(found)[1:]] for each, claim, found in rows))


def _why(studies: Sequence[Findings]) -> list[str]:
    """What longer runs and slower ones come to, if that was asked: whether these are the reason."""
    lines = [line for each in studies if each.study.name == _REASON for line in lines_of(each)]
    if not lines:
        return []
    rows = [[*first(line, with_x=True), *rest(line)[:3]] for line in lines if line.measure in _TELLING]
    text = f"Is the length of the runs the reason, or their rate? The study [{_REASON}]({_REASON}.md) has:"
    return [text, "", *table(("case", "setting", "measure", "times as long", "found", "seeds", "steps"), *rows)]


def _took(studies: Sequence[Findings], tasks: Tasks) -> str:
    """How many cells there are, and what those that are finished took."""
    cells = list(in_order(entry.task for each in studies for entry in (*each.values, *each.missing)))
    files = [tasks.place(cell) / RunFile.TOOK for cell in cells if tasks.is_finished(cell)]
    took: list[Mapping[str, float]] = [RunFolder.read_json(file) for file in files if file.exists()]
    minutes = sum(each["core_seconds"] for each in took) / 60
    return f"{len(files):,} of {len(cells):,} cells are finished; they took {minutes:,.0f} minutes of one core."


def _row(found: Findings) -> list[str]:
    return [_link(found), found.study.title, f"{len(found.values):,}", f"{len(found.missing):,}"]


def _link(found: Findings) -> str:
    name = found.study.name
    return f"[{name}]({name}.md) ([page]({name}.html))"
