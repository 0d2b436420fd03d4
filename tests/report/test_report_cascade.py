"""The report of a cascade: whole, escaped, and without claims that it cannot make."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from selfmask.errors import SelfmaskError
from selfmask.report.cascade import (
    COLOURS,
    CascadeReportData,
    ClusterShown,
    cumulative_shares,
    map_figure,
    members_figure,
    mixture_figure,
    render,
    write_cascade_report,
)

from .test_report_page import EVIL, Page, assert_self_contained, image

STORY = {"kept": "mask", "quality_before": 0.5234, "quality_after": 0.5512, "active": 0.87, "steps": 600, "seconds": 83}
START = STORY | {"kept": "start", "quality_after": 0.5234}
PLACES = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)


def cluster(number: int, **changes: Any) -> ClusterShown:
    full = ClusterShown(
        size=1000 + number,
        nearest=[image(10 * number + place) for place in range(3)],
        farthest=[image(10 * number + place) for place in range(3, 7)],
        outcome=STORY,
        classes=[5, 60, 35, 0],
    )
    return dataclasses.replace(full, **changes)


def data(**changes: Any) -> CascadeReportData:
    full = CascadeReportData(
        title="tiny on birds",
        config={"backbone": "selfmask/tiny", "cascade": {"router": "gmm", "experts": 3}},
        result={
            "bytes": {
                "float32": 3_200_000,
                "paper": 100_000,
                "masks": 50_000,
                "router": 4_321,
                "conditional": 25_000,
                "unconditional": 25_001,
                "file": 200_000,
            },
            "seconds": {"dispatcher": 100.0, "experts": 91.4},
            "expert_changes": [0.0123, 0.0456, 0.0],
        },
        clusters=[cluster(0), cluster(1), cluster(2, outcome=START, classes=[1, 0, 0, 3])],
        classes=["wren", "owl", "crow", "gull"],
        maps={"frozen backbone": PLACES, "dispatcher": -PLACES},
        colours=[number % 4 for number in range(40)],
        coloured_by="class",
        names=["wren", "owl", "crow", "gull"],
    )
    return dataclasses.replace(full, **changes)


EMPTY = CascadeReportData("empty", {}, {}, [])


def only(**parts: Any) -> CascadeReportData:
    """A report of these parts alone: quick to draw."""
    return dataclasses.replace(EMPTY, **parts)


def written(report: CascadeReportData) -> tuple[str, Page]:
    html = render(report)
    page = Page(html)
    assert_self_contained(html, page)
    assert len(page.ids) == len(set(page.ids))
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        assert ElementTree.fromstring(svg).attrib["aria-label"]
    return html, page


def test_the_page_shows_everything() -> None:
    _, page = written(data())
    assert {"bytes", "clusters", "maps", "details", "result", "config"} <= set(page.ids)
    assert len(page.having("svg")) == 4
    assert len(page.having("img")) == 3 * (3 + 4)
    for words in (
        "tiny on birds",
        "experts 3",
        "training images 3,003",
        "time for all stages 3 min 11 s",
        "cascade file 200 kB",
        "float32 copies, one for each mask 3,200,000 32 times larger",
        "one bit per weight for each mask 100,000",
        "mask files of dispatcher and experts 50,000 2 times smaller",
        "router 4,321 23.1 times smaller",
        "PCA, conditional 25,000 4 times smaller",
        "PCA, unconditional 25,001",
        "cascade.smn, total 200,000 2 times larger",
        "4 β/32",
        "Cluster 0 1,000 images",
        "Cluster 2 1,002 images",
        "quality 0.5234 before, 0.5512 after; 1.2% of mask bits changed; 87.0% of weights active; 600 steps",
        "0% of mask bits changed",
        "1 min 23 s",
        "Most common: owl 60.0%, crow 35.0%, wren 5.0%",
        "Most common: gull 75.0%, wren 25.0%",
        "2 improved on the dispatcher",
        "for 1 nothing better was found",
        "Mixture of classes in each cluster",
        "40 images, projected onto the plane by t-SNE and coloured by class.",
        "frozen backbone",
        "do not read more into it",
        "cascade.router gmm",
        "seconds.dispatcher 100.0",
    ):
        assert words in page.text, words
    assert page.text.count("Nothing better was found: this expert equals the dispatcher") == 1
    assert page.text.count("Improved on the dispatcher, according to the label-free quality") == 2


@pytest.mark.parametrize("kept", ["mask", "start"])
def test_the_page_leaves_it_to_labels_whether_the_cascade_is_better(kept: str) -> None:
    _, page = written(data(clusters=[cluster(0, outcome=STORY | {"kept": kept})]))
    assert "not whether it is better than the dispatcher or than the frozen backbone" in page.text
    assert "If you have labels, measure that with selfmask evaluate" in page.text
    assert "as estimated by a label-free quality" in page.text


def test_nothing_gives_a_page_without_empty_sections() -> None:
    _, page = written(EMPTY)
    assert page.ids == []
    for tag in ("svg", "table", "dl", "section", "img"):
        assert not page.having(tag)


BARE: dict[str, Any] = {"classes": (), "outcome": {}, "nearest": [], "farthest": []}


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"clusters": []}, ["Cluster", "training images", "improved", "most common"]),
        ({"clusters": [cluster(0, classes=())]}, ["most common", "Mixture of classes"]),
        ({"clusters": [cluster(0, classes=[0, 0, 0, 0])]}, ["most common", "Mixture of classes"]),
        ({"clusters": [cluster(0, outcome={})]}, ["improved", "Nothing better", "quality", "weights active"]),
        ({"clusters": [cluster(0, **BARE)]}, ["nearest", "farthest", "improved", "Most common"]),
        ({"maps": {}}, ["t-SNE"]),
        ({"maps": {"dispatcher": np.empty((0, 2))}, "colours": []}, ["t-SNE"]),
        ({"maps": {"dispatcher": PLACES}, "colours": (), "names": ()}, ["coloured by"]),
        ({"result": {}}, ["bytes", "time for all stages", "bits changed", "All numbers"]),
        ({"result": {"bytes": None, "seconds": None, "expert_changes": None}}, ["one bit", "cascade file"]),
        ({"result": {"bytes": {"masks": 7}}}, ["smaller", "larger", "float32 copies, one"]),
        ({"config": {}}, ["Settings"]),
    ],
)
def test_what_is_missing_is_left_out(change: dict[str, Any], gone: list[str]) -> None:
    _, page = written(data(**change))
    assert [words for words in gone if words in page.text] == []


def test_a_row_without_images_is_left_out() -> None:
    _, page = written(only(clusters=[cluster(0, nearest=[]), cluster(1, size=0, **BARE)]))
    assert [attributes["alt"] for attributes in page.having("img")] == ["farthest image"] * 4
    assert "Cluster 1 0 images" in page.text


def test_everything_of_the_user_is_escaped() -> None:
    evil = cluster(0, outcome={"kept": EVIL, "quality_before": EVIL, "steps": EVIL})
    html, page = written(
        CascadeReportData(
            title=EVIL,
            config={EVIL: {EVIL: EVIL}},
            result={EVIL: EVIL, "bytes": {"paper": EVIL, "file": EVIL}, "seconds": {EVIL: EVIL}},
            clusters=[evil],
            classes=[EVIL, f"{EVIL} 2", "$x^2$", "zero\x00byte"],
            maps={EVIL: PLACES},
            colours=[0] * 40,
            coloured_by=EVIL,
            names=[EVIL, "\ud800"],
        )
    )
    assert "<script" not in html.lower()
    assert len(page.having("img")) == 7
    assert page.text.count("alert('x')") >= 8
    assert r"\ud800" in page.text


def test_more_clusters_than_the_page_shows() -> None:
    many = [cluster(number, nearest=[image(number)], farthest=[]) for number in range(25)]
    _, page = written(data(clusters=many, coloured_by="cluster", colours=[number % 25 for number in range(40)]))
    assert "Cluster 19" in page.text
    assert "Cluster 20" not in page.text
    assert "The first 20 of 25 clusters are shown, here and as lines." in page.text
    assert len(page.having("img")) == 20
    assert "26 β/32" in page.text
    assert "25 improved" in page.text
    assert "20 colours, which repeat" in page.text
    _, page = written(data())
    assert "The first" not in page.text
    assert "repeat" not in page.text


def test_many_clusters_and_classes_stay_small() -> None:
    rng = np.random.default_rng(0)
    many = [cluster(0, nearest=[], farthest=[], classes=rng.integers(0, 50, 1000).tolist()) for _ in range(300)]
    names = [f"class {number}" for number in range(1000)]
    places = rng.normal(size=(5000, 2))
    html, page = written(
        only(clusters=many, classes=names, maps={"a": places, "b": places}, colours=range(5000), names=names)
    )
    assert len(html) < 1_200_000
    assert "experts 300" in page.text


def test_a_legend_has_at_most_twenty_names() -> None:
    for count in (20, 21):
        names = [f"kind {number}" for number in range(count)]
        _, page = written(only(maps={"dispatcher": PLACES}, colours=[0] * 40, names=names))
        assert ("kind 0" in page.text) == (count == 20)
        assert len(page.having("li")) == (20 if count == 20 else 0)


@pytest.mark.parametrize("counts", [[5, 60, 35, 0], [0, 0, 7], [1], [3, 3, 3], list(range(100))])
def test_cumulative_shares_are_those_of_plain_loops(counts: list[int]) -> None:
    found = cumulative_shares(counts)
    for place in range(len(counts)):
        most = sorted(counts, reverse=True)[: place + 1]
        assert found[place] == pytest.approx(sum(most) / sum(counts))
    assert found[-1] == 1
    assert cumulative_shares([0, 0]).tolist() == [0, 0]


def test_a_line_for_each_cluster_that_has_images_and_one_for_all() -> None:
    svg = mixture_figure(np.array([[5, 60, 35], [0, 0, 0], [1, 0, 0]]))
    assert svg is not None
    assert COLOURS[0] in svg
    assert COLOURS[1] not in svg
    assert COLOURS[2] in svg
    assert svg.count("stroke-dasharray") == 1
    assert mixture_figure(np.zeros((3, 0), np.int64)) is None


def test_bars_are_named_while_they_are_few() -> None:
    few, many = members_figure([12_345, 0]), members_figure([7] * 300)
    assert few is not None
    assert many is not None
    assert "12.3k" in few
    assert many.count(">7<") <= 1
    assert members_figure([]) is None


@pytest.mark.parametrize("places", [PLACES, PLACES * 1e6 + 5, PLACES[:1], np.ones((3, 2))])
def test_all_points_of_a_map_are_within_its_frame(places: np.ndarray[Any, Any]) -> None:
    svg = map_figure(places, list(range(len(places))), "x")
    points = [(float(x), float(y)) for x, y in re.findall(r"M([\d.-]+) ([\d.-]+)h0", svg)]
    assert len(points) == len(places)
    assert all(0 < value < 400 for point in points for value in point)


def test_colours_differ() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == 20


def test_thumbnails_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfmask.report.cascade.BUDGET", 100_000)
    noisy = [image(number, 96, 96) for number in range(8)]
    html, page = written(only(clusters=[cluster(0, nearest=noisy, farthest=noisy[:1] * 12)]))
    assert len(page.having("img")) == 8 + 8
    assert len(html) < 150_000


def test_the_same_data_gives_the_same_bytes_and_writing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "run" / "report.html"
    write_cascade_report(path, data())
    before = path.read_bytes()
    write_cascade_report(path, data())
    assert path.read_bytes() == before
    with pytest.raises(SelfmaskError):
        write_cascade_report(path, data(clusters=[cluster(0, nearest=[torch.zeros(1)])]))
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
