"""Running studies: every cell once, shared by studies and by processes, and failures that stop nothing else."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from selfmask.errors import ConfigError, DivergedRunError, ForeignFolderError, RunError
from selfmask.locks import Lock
from selfmask.studies.output import as_csv, as_markdown, lines_of, page_of, write
from selfmask.studies.runner import Part, Tasks, findings, in_order, run_study
from selfmask.studies.scale import Case, Scale
from selfmask.studies.study import Claim, Entry, Study
from selfmask.studies.tasks import Measure, Subject, Task, World, leave
from selfmask.studies.verdicts import judged
from selfmask.training.display import StagesDisplay

RAN: list[str] = []
SUBJECT = Subject("selfmask/tiny", "selfmask/fashion")


@dataclasses.dataclass(frozen=True)
class Toy(Task):
    """Leaves a number, or fails."""

    verb = "toy"
    what: str = ""
    value: float = 0.0
    after: tuple[Task, ...] = ()
    trouble: str = ""

    @property
    def needs(self) -> tuple[Task, ...]:
        return self.after

    @property
    def title(self) -> str:
        return f"toy {self.what}"

    def settings(self) -> Mapping[str, Any]:
        return {"what": self.what, "value": self.value}

    def run(self, place: Path, world: World) -> None:
        RAN.append(self.what)
        if self.trouble == "diverged":
            raise DivergedRunError("the loss is not finite")
        if self.trouble:
            raise RunError(self.trouble)
        leave(place, {"value": self.value + sum(world.result(task)["value"] for task in self.after)})


class Pairs(Study):
    name = "rules"  # whose numbers of the paper stand beside
    title = "A study of toys"
    claims = (Claim("a is better", ("knn",), "a", "b"),)

    def __init__(self, *cells: tuple[str, int, Toy]) -> None:
        self.cells = cells

    def entries(self, scale: Scale) -> list[Entry]:
        case = Case(SUBJECT, "swav/resnet50", "cifar10")
        return [
            Entry(case, name, "knn", toy, lambda r: r["value"], seed=seed, steps=7) for name, seed, toy in self.cells
        ]


@pytest.fixture(autouse=True)
def _forget() -> None:
    RAN.clear()


def tasks(folder: Path) -> Tasks:
    return Tasks(folder, StagesDisplay())


def test_what_others_need_comes_first_and_once(tmp_path: Path) -> None:
    base = Toy(SUBJECT, "base", 1.0)
    both = [Toy(SUBJECT, name, 1.0, (base,)) for name in "ab"]
    study = Pairs(*((toy.what, 0, toy) for toy in both))
    found = run_study(study, Scale("laptop"), tasks(tmp_path))
    assert RAN == ["base", "a", "b"]
    assert list(found.values.values()) == [2.0, 2.0]
    run_study(study, Scale("laptop"), tasks(tmp_path))
    assert RAN == ["base", "a", "b"]  # finished cells are not run again, in another process either


def test_equal_tasks_have_one_name_and_all_that_differs_another() -> None:
    toy = Toy(SUBJECT, "a", 1.0)
    assert Toy(SUBJECT, "a", 1.0).name == toy.name
    others = [
        Toy(SUBJECT, "a", 2.0),
        Toy(SUBJECT, "b", 1.0),
        Toy(dataclasses.replace(SUBJECT, data="cifar10"), "a", 1.0),
        Toy(dataclasses.replace(SUBJECT, weights="w.pth"), "a", 1.0),
        Toy(SUBJECT, "a", 1.0, (toy,)),
    ]
    assert len({task.name for task in (toy, *others)}) == 6


def test_a_cell_that_fails_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    bad = Toy(SUBJECT, "bad", trouble="no luck")
    study = Pairs(
        ("a", 0, bad),
        ("a", 1, Toy(SUBJECT, "rests on it", after=(bad,))),
        ("b", 0, Toy(SUBJECT, "nan", trouble="diverged")),
        ("b", 1, Toy(SUBJECT, "good", 5.0)),
    )
    found = run_study(study, Scale("laptop"), tasks(tmp_path))
    assert list(found.values.values()) == [5.0]
    reasons = list(found.missing.values())
    assert "no luck" in reasons[0]
    assert "did not come to an end" in reasons[1]
    assert "not finite" in reasons[2]
    page = as_markdown(page_of(found, lines_of(found)))
    assert "no luck" in page
    RAN.clear()
    run_study(study, Scale("laptop"), tasks(tmp_path))
    assert RAN == ["bad"]  # what failed is tried again; what diverged would diverge again


def test_parts_of_the_work_are_apart_and_together_all_of_it(tmp_path: Path) -> None:
    study = Pairs(*(("a", i, Toy(SUBJECT, str(i), i)) for i in range(5)))
    for part in ("1/2", "2/2"):
        found = run_study(study, Scale("laptop"), tasks(tmp_path), Part.named(part))
        if part == "1/2":
            assert RAN == ["0", "2", "4"]
            assert set(found.missing.values()) == {"not run yet"}
    assert sorted(RAN) == ["0", "1", "2", "3", "4"]
    assert len(found.values) == 5


@pytest.mark.parametrize("text", ["1", "0/2", "3/2", "a/b", "1/0", "-1/2", "all/0", "all", "1/2 "])
def test_no_such_part(text: str) -> None:
    with pytest.raises(ConfigError, match="part of the work"):
        Part.named(text)


def test_all_parts_by_one_name() -> None:
    assert list(map(str, Part.named("all/3"))) == ["1/3", "2/3", "3/3"]
    assert list(map(str, Part.named("2/3"))) == ["2/3"]
    assert list(map(str, Part.named(None))) == ["1/1"]


def test_two_runners_share_one_folder(tmp_path: Path) -> None:
    base = Toy(SUBJECT, "base", 1.0)
    study = Pairs(*(("a", i, Toy(SUBJECT, str(i), i, (base,))) for i in range(6)))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run_study(study, Scale("laptop"), tasks(tmp_path))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(RAN) == ["0", "1", "2", "3", "4", "5", "base"]
    assert not list((tmp_path / "cells").glob("*.lock"))


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ForeignFolderError, match="no run"):
        run_study(Pairs(("a", 0, Toy(SUBJECT, "a"))), Scale("laptop"), tasks(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_data_that_is_missing_fails_its_own_cells_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFMASK_DATA", str(tmp_path / "none"))
    away = Measure(dataclasses.replace(SUBJECT, data="ucf101"))
    found = run_study(Pairs(("a", 0, away), ("b", 0, Toy(SUBJECT, "b", 1.0))), Scale("laptop"), tasks(tmp_path / "out"))
    assert list(found.values.values()) == [1.0]
    assert "ucf101" in next(iter(found.missing.values()))


def test_needs_come_before_what_needs_them() -> None:
    first, second = Toy(SUBJECT, "1"), Toy(SUBJECT, "2")
    third = Toy(SUBJECT, "3", after=(second, first))
    assert list(in_order([third, first])) == [second, first, third]


def test_a_cell_waits_for_what_somebody_else_is_running(tmp_path: Path) -> None:
    base = Toy(SUBJECT, "base", 1.0)
    runner, study = tasks(tmp_path), Pairs(("a", 0, Toy(SUBJECT, "a", 1.0, (base,))))
    runner.begin()
    place = runner.place(base)
    elsewhere = Lock(place.with_name(f"{place.name}.lock"), place)

    def finish() -> None:
        time.sleep(0.5)
        leave(place, {"value": 4.0})
        elsewhere.close(remove=True)

    other = threading.Thread(target=finish)
    other.start()
    found = run_study(study, Scale("laptop"), runner)
    other.join()
    assert RAN == ["a"]
    assert list(found.values.values()) == [5.0]


def test_cells_with_one_title_are_told_apart(tmp_path: Path) -> None:
    class Same(Toy):
        title = "the same"

    display = StagesDisplay()
    runner = Tasks(tmp_path, display)
    runner.run_all([Same(SUBJECT, "a"), Same(SUBJECT, "b")])
    assert len(display.shares) == 2
    assert all(label.startswith("the same (") for label in display.shares)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def found_of(tmp_path: Path, a: list[float], b: list[float]) -> Any:
    cells = [
        (name, seed, Toy(SUBJECT, f"{name}{seed}", v)) for name, vs in (("a", a), ("b", b)) for seed, v in enumerate(vs)
    ]
    return run_study(Pairs(*cells), Scale("laptop"), tasks(tmp_path))


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([0.9, 0.91, 0.92], [0.5, 0.51, 0.52], "repeated"),
        ([0.5, 0.51, 0.52], [0.9, 0.91, 0.92], "contradicted"),
        ([0.5, 0.6, 0.7], [0.55, 0.55, 0.6], "not visible"),
        ([0.9], [0.1], "not visible"),  # of one seed nobody knows the spread
        ([0.9], [], "not measured"),
    ],
)
def test_a_difference_counts_beyond_the_spread(tmp_path: Path, a: list[float], b: list[float], verdict: str) -> None:
    found = found_of(tmp_path, a, b)
    assert judged(Pairs.claims[0], found)[0] == verdict


def test_the_page_has_means_spreads_steps_and_the_papers_numbers(tmp_path: Path) -> None:
    case = Case(SUBJECT, "swav/resnet50", "cifar10")
    toys = [Toy(SUBJECT, str(seed), value) for seed, value in enumerate((0.8, 0.9))]

    class Rules(Pairs):
        def entries(self, scale: Scale) -> list[Entry]:
            return [Entry(case, "SMN", "knn", toy, lambda r: r["value"], seed=i, steps=7) for i, toy in enumerate(toys)]

    found = run_study(Rules(), Scale("laptop"), tasks(tmp_path / "cells"))
    (line,) = lines_of(found)
    assert (line.mean, line.seeds, line.steps, line.paper) == (pytest.approx(0.85), 2, 7, 0.921)
    assert line.spread == pytest.approx(12.706 * 0.05, rel=1e-3)  # Student's t of one degree of freedom
    assert line.difference == pytest.approx(0.85 - 0.921)
    files = write(found, tmp_path / "results")
    page = (tmp_path / "results" / "rules.md").read_text()
    assert "selfmask/tiny (for swav/resnet50) x selfmask/fashion (for cifar10)" in page
    assert "0.850 ± 0.635" in page
    assert "0.921" in page
    assert "selfmask study rules --scale laptop" in page
    assert as_csv([line]).splitlines()[1].startswith("selfmask/tiny (for")
    assert [file.name for file in files] == ["rules.csv", "rules.md", "rules.html"]
    assert findings(Rules(), Scale("laptop"), tasks(tmp_path / "cells")).values
    assert json.loads((tmp_path / "cells" / "cells" / toys[0].name / "result.json").read_text()) == {"value": 0.8}
