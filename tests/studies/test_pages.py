"""What a reader gets: one page for a study that needs no other file, and one over all studies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from selfmask.studies.drawing import curves
from selfmask.studies.output import write
from selfmask.studies.overview import as_markdown
from selfmask.studies.runner import Findings, run_study
from selfmask.studies.scale import Case, Scale
from selfmask.studies.study import Claim, Entry, Study
from selfmask.studies.tasks import Subject, Task, World, leave
from selfmask.studies.verdicts import judged

from .few import tasks_in

SUBJECT = Subject("selfmask/tiny", "selfmask/fashion")
CASE = Case(SUBJECT, "swav/resnet50", "cifar10")


@dataclasses.dataclass(frozen=True)
class Toy(Task):
    verb = "toy"
    setting: str = ""
    seed: int = 0
    value: float = 0.0

    @property
    def title(self) -> str:
        return f"toy {self.setting} {self.seed}"

    def settings(self) -> Mapping[str, Any]:
        return {"setting": self.setting, "seed": self.seed, "value": self.value}

    def run(self, place: Path, world: World) -> None:
        leave(place, {"value": self.value})


class Toys(Study):
    """Two settings of Table 2, at two places of a curve and without one."""

    name = "rules"
    title = "A study of <b>toys</b>"
    claims = (
        Claim("the threshold is better", ("knn",), "SMN", "topk 50%"),
        Claim("and the other way round", ("knn",), "topk 50%", "SMN"),
        Claim("nobody looked", ("linear",), "SMN", "topk 50%"),
    )

    def entries(self, scale: Scale) -> list[Entry]:
        found = []
        for setting, value in (("SMN", 0.9), ("topk 50%", 0.5)):
            for seed in scale.repetitions():
                toy = Toy(SUBJECT, setting, seed, value + seed / 100)
                one = Entry(CASE, setting, "knn", toy, lambda result: result["value"], seed=seed, steps=60)
                found += [one, *(dataclasses.replace(one, x=x, measure="curve") for x in (1.0, 2.0))]
        return found

    def draw(self, found: Mapping[Entry, float], folder: Path, place: Callable[[Task], Path]) -> Sequence[str]:
        return curves(found, folder / "rules.svg", x="x", y="y", measures=("curve",))


@pytest.fixture
def found(tmp_path: Path) -> Findings:
    return run_study(Toys(), Scale("laptop"), tasks_in(tmp_path))


def test_the_page_of_a_study_needs_no_other_file(found: Findings, tmp_path: Path) -> None:
    files = {file.name: file for file in write(found, tmp_path / "results")}
    assert set(files) == {"rules.csv", "rules.md", "rules.html", "rules.svg"}
    page = files["rules.html"].read_text()
    assert page.count("data:image/svg+xml;base64,") == 1
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "<script" not in page
    for words in ("the threshold is better", "repeated", "contradicted", "0.910", "60", "0.921", "-0.011"):
        assert words in page
    assert "<b>toys</b>" not in page  # names stay text


def test_the_same_numbers_give_the_same_files(found: Findings, tmp_path: Path) -> None:
    first, second = (write(found, tmp_path / name) for name in ("one", "two"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_a_verdict_has_its_numbers_and_the_papers(found: Findings) -> None:
    it = judged(Toys.claims[0], found)
    assert (it.verdict, it.here, it.seeds, it.steps) == ("repeated", "91.0 against 51.0", 3, 60)
    assert it.difference == "+40.0 ± 0.0"
    better, _, worse = it.paper.partition(" against ")
    assert float(better) > float(worse)  # the mean of its seven data sets


def test_the_overview_sorts_claims_by_what_became_of_them(found: Findings, tmp_path: Path) -> None:
    page = as_markdown([found], tasks_in(tmp_path))
    repeated, contradicted, unknown = (
        page.partition(f"## {title}")[2].partition("\n## ")[0]
        for title in ("Repeated in miniature: 1 of 3", "Contradicted: 1 of 3", "Not measured: 1 of 3")
    )
    assert "the threshold is better | +40.0 ± 0.0 | 91.0 against 51.0 | 3 | 60 |" in repeated
    assert "and the other way round" in contradicted
    assert "nobody looked" in unknown
    assert "6 of 6 cells are finished" in page
    assert "[rules](rules.md) ([page](rules.html))" in page


def test_where_a_claim_is_contradicted_the_study_of_reasons_is_shown(found: Findings, tmp_path: Path) -> None:
    class Reasons(Toys):
        name = "length"
        claims = ()

    runner = tasks_in(tmp_path)
    page = as_markdown([found, run_study(Reasons(), Scale("laptop"), runner)], runner)
    contradicted = page.partition("## Contradicted")[2].partition("\n## ")[0]
    assert "| SMN | knn |  | 0.910 ± 0.025 | 3 | 60 |" in contradicted
