"""The report: whole, self-contained, escaped, and honest."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from torch import Tensor

from selfmask.errors import ConfigError, SelfmaskError
from selfmask.report.examples import NeighbourLabels, Neighbours
from selfmask.report.page import ReportData, write_report

NAN = float("nan")
VOID = {"meta", "img", "br"}
EVIL = "<script>alert('x')</script>\"><img src=http://evil.example/x onerror=alert(1)>"


class Page(HTMLParser):
    """Reads a page, and fails where tags do not close as they were opened."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if identity := dict(attrs).get("id"):
            self.ids.append(identity)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def image(seed: int, height: int = 28, width: int = 28) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def neighbours(queries: int = 3, near: int = 4, side: int = 28, labelled: bool = True) -> Neighbours:
    def rows(start: int) -> list[list[Tensor]]:
        return [[image(start + 50 * q + n, side, side) for n in range(near)] for q in range(queries)]

    labels = NeighbourLabels(["cat"] * queries, [["dog"] * near] * queries, [["cat"] * near] * queries)
    return Neighbours(
        [image(q, side, side) for q in range(queries)], rows(1000), rows(9000), labels if labelled else None
    )


def data(**changes: Any) -> ReportData:
    full = ReportData(
        title="tiny on birds",
        config={"backbone": "selfmask/tiny", "mask": {"rule": "threshold", "mu": 0.0}, "queue": None, "crops": [2, 6]},
        result={
            "knn_before": 0.712,
            "knn_after": 0.764,
            "probe_before": 0.601,
            "probe_after": 0.633,
            "mask_bytes": 143_211,
            "one_bit_bytes": 341_504,
            "base_bytes": 10_928_128,
            "seconds": 191.4,
            "steps": 1200,
            "seed": 7,
            "images": 4000,
            "stopped": None,
        },
        log=[
            {"step": s, "loss": 6.2 - s / 100, "ln_k": 6.2, "active": 1 - s / 1000, "flips": 500 - s}
            | {"images_per_second": 800.0, "quality": s / 100}
            for s in range(1, 100)
        ],
        active_by_layer={"stem.weight": 0.99, "stage1.conv.weight": 0.91},
        neighbours=neighbours(),
        bad_images=[("a.jpg", "truncated"), ("b.png", "no image")],
    )
    return dataclasses.replace(full, **changes)


EMPTY = ReportData(title="empty", config={}, result={}, log=[], active_by_layer={})


def only(**parts: Any) -> ReportData:
    """A report of these parts alone: quick to draw."""
    return dataclasses.replace(EMPTY, **parts)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(report: ReportData) -> tuple[str, Page]:
        write_report(tmp_path / "report.html", report)
        html = (tmp_path / "report.html").read_bytes().decode("utf-8")
        return html, Page(html)

    return write


def assert_self_contained(html: str, page: Page) -> None:
    assert not page.having("script")
    assert not page.having("link")
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                assert (value or "").startswith(("data:image/png;base64,", "#")), (tag, name, value)
            if not name.startswith("xmlns"):
                assert "url(" not in re.sub(r"url\(#\w+\)", "", value or "") or name in ("alt", "title"), (tag, value)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", html).replace("http-equiv", "").replace("http://evil", "")


def test_the_page_shows_everything(written: Any) -> None:
    html, page = written(data())
    assert_self_contained(html, page)
    assert {"numbers", "run", "neighbours", "bytes", "layers", "details", "unreadable", "config", "result"} <= set(
        page.ids
    )
    assert len(page.ids) == len(set(page.ids))
    assert len(page.having("svg")) == 4
    assert len(page.having("figcaption")) == 4
    assert len(page.having("img")) == 3 * (1 + 2 * 4)
    for words in (
        "tiny on birds",
        "k-NN (k = 20)",
        "71.2%",
        "76.4%",
        "+5.2 points",
        "better",
        "143 kB",
        "3 min 11 s",
        "10,928,128",
        "76.3 times smaller",
        "32 times smaller",
        "90.1%",
        "mask.rule",
        "threshold",
        "truncated",
    ):
        assert words in page.text, words
    assert "queue" not in [word.strip() for word in page.words]  # a setting that is None
    assert "stopped" not in page.text
    assert "worse" not in page.text


def test_every_figure_is_valid_xml(written: Any) -> None:
    html, _ = written(data())
    drawn = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawn) == 4
    for svg in drawn:
        assert ElementTree.fromstring(svg).attrib["aria-label"]


def test_an_empty_run_gives_a_page_without_empty_sections(written: Any) -> None:
    html, page = written(EMPTY)
    assert_self_contained(html, page)
    assert page.ids == ["numbers"]
    assert not page.having("svg")
    assert not page.having("table")
    assert "cannot say whether the mask helps" in page.text


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"log": []}, "run"),
        ({"neighbours": None}, "neighbours"),
        ({"neighbours": Neighbours([], [], [])}, "neighbours"),
        ({"active_by_layer": {}}, "layers"),
        ({"bad_images": []}, "unreadable"),
        ({"config": {}}, "config"),
        ({"result": {}}, "bytes"),
        ({"result": {"base_bytes": 100, "one_bit_bytes": 3, "mask_bytes": None}}, "bytes"),
    ],
)
def test_what_is_missing_is_left_out(written: Any, change: dict[str, Any], gone: str) -> None:
    assert gone not in written(data(**change))[1].ids


def test_one_log_line(written: Any) -> None:
    _, page = written(data(log=[{"step": 1, "loss": 6.0, "ln_k": 6.2, "active": 0.99, "flips": 3}]))
    assert len(page.having("svg")) == 3


def test_better_on_one_and_worse_on_the_other_is_said(written: Any) -> None:
    _, page = written(only(result={"knn_before": 0.8, "knn_after": 0.75, "probe_before": 0.5, "probe_after": 0.6}))
    assert "\N{MINUS SIGN}5.0 points worse" in page.text
    assert "+10.0 points better" in page.text
    assert "According to k-NN (k = 20), this mask is worse than the frozen backbone." in page.text


def test_a_map_is_shown_as_the_rival_it_is(written: Any) -> None:
    rows = {"frozen": 0.70, "mask": 0.72, "frozen+map": 0.75, "mask+map": 0.74}
    _, page = written(only(result={"rows": {name: {"knn": value} for name, value in rows.items()}}))
    assert "k-NN (k = 20) 70.0% 72.0% +2.0 points better" in page.text
    assert "k-NN (k = 20) + map 75.0% 74.0% \N{MINUS SIGN}1.0 points worse" in page.text
    assert "According to k-NN (k = 20) + map, this mask is worse than the frozen backbone." in page.text


@pytest.mark.parametrize("after", [0.8, 0.8004, 0.7996])
def test_a_difference_too_small_to_show_is_no_change(written: Any, after: float) -> None:
    _, page = written(only(result={"knn_before": 0.8, "knn_after": after}))
    assert "0.0 points the same" in page.text
    assert "better" not in page.text
    assert "worse" not in page.text


def test_half_a_measurement_makes_no_verdict(written: Any) -> None:
    _, page = written(only(result={"knn_before": None, "knn_after": 0.75, "probe_before": 0.5, "probe_after": NAN}))
    assert "not measured 75.0%" in page.text
    assert "50.0% not a number" in page.text
    assert "points" not in page.text
    assert "cannot say whether the mask helps" in page.text


def test_an_unknown_measure_is_shown_and_not_judged(written: Any) -> None:
    _, page = written(only(result={"uniformity_before": -2.5, "uniformity_after": -3.25}))
    assert "uniformity -2.5 -3.25 \N{MINUS SIGN}0.75" in page.text
    assert "worse" not in page.text


GATED = {"quality_before": 0.5234, "quality_after": 0.5512, "best_step": 80, "kept": "mask", "active": 0.87}
IDENTITY = GATED | {"quality_after": 0.5234, "best_step": 0, "kept": "identity", "active": 1.0}
GATED_LOG = [{"step": s, "loss": 2.0, "active": 0.7, "quality": 0.5 + s / 1600} for s in (40, 80, 120)]


def test_quality_without_labels_is_judged_as_a_number_and_called_an_estimate(written: Any) -> None:
    _, page = written(only(result=GATED, log=GATED_LOG))
    assert "quality without labels 0.523 0.551 +0.028 better" in page.text
    assert "points" not in page.text
    assert "is an estimate" in page.text
    assert "cannot say whether the mask helps" not in page.text
    assert "The ring marks the point that was kept." in page.text
    assert "step 80 is kept" in page.text
    assert "Nothing better" not in page.text


def test_weights_on_are_those_of_the_point_that_was_kept(written: Any) -> None:
    _, page = written(only(result=GATED, log=GATED_LOG))
    assert "active weights 87.0%" in page.text


def test_quality_that_hardly_changed_is_the_same(written: Any) -> None:
    _, page = written(only(result=GATED | {"quality_after": 0.52345}))
    assert "0.523 0.523 0.000 the same" in page.text
    assert "better" not in page.text


def test_measures_with_labels_come_before_the_one_without_and_need_no_estimate(written: Any) -> None:
    _, page = written(only(result=GATED | {"knn_before": 0.7, "knn_after": 0.75}))
    assert page.text.index("k-NN (k = 20)") < page.text.index("quality without labels")
    assert "estimate" not in page.text
    _, page = written(only(result=GATED | {"knn_before": 0.7, "knn_after": 0.65}))
    assert "According to k-NN (k = 20), this mask is worse" in page.text


@pytest.mark.parametrize("labels", [{}, {"knn_before": 0.7, "knn_after": 0.7}, {"knn_before": 0.7, "knn_after": 0.6}])
def test_a_mask_that_changes_nothing_is_called_that_first_of_all(written: Any, labels: dict[str, float]) -> None:
    lost = [{"step": 130, "loss": NAN, "ln_k": 2.0}, {"step": 140, "loss": 2.0, "ln_k": 2.0}]
    _, page = written(only(result=IDENTITY | labels, log=[*GATED_LOG, *lost]))
    plain = "Nothing better than the frozen backbone was found. The mask leaves every weight on and changes nothing"
    assert page.text.index(plain) < page.text.index("quality without labels")
    assert "0.523 0.523 0.000 the same" in page.text
    assert "active weights 100%" in page.text
    assert "step 0 is kept" in page.text
    assert "the start, that is, the frozen backbone" in page.text
    for words in ("mask is worse", "estimate", "cannot say", "do not trust", "which is the chance level"):
        assert words not in page.text


def test_troubles_are_listed_with_what_was_done(written: Any) -> None:
    troubles = [
        {"step": 40, "trouble": "all weights of stem.weight are off", "answer": "went back to step 0"},
        {"step": 90, "trouble": EVIL, "answer": "stopped for good; step 0 is kept"},
    ]
    html, page = written(only(result=IDENTITY | {"troubles": troubles}))
    assert_self_contained(html, page)
    assert "40 all weights of stem.weight are off went back to step 0" in page.text
    assert "stopped for good; step 0 is kept" in page.text
    assert "troubles" in page.ids
    _, page = written(only(result=GATED | {"troubles": []}, log=GATED_LOG))
    assert "troubles" not in page.ids
    assert "troubles" not in page.text


def test_nan_losses_are_said_at_the_top(written: Any) -> None:
    log = [{"step": s, "loss": NAN if s > 7 else 5.0, "ln_k": 6.2} for s in range(10)]
    _, page = written(only(log=log))
    assert "not a number on 2 of 10 log lines" in page.text
    assert "Red ticks" in page.text
    _, page = written(only(log=[{"step": s, "loss": NAN, "ln_k": 6.2} for s in range(10)]))
    assert "not a number on 10 of 10 log lines" in page.text


def test_a_loss_that_stays_at_ln_k_is_said(written: Any) -> None:
    level = math.log(500)
    log = [{"step": s, "loss": level - 0.01, "ln_k": level} for s in range(100)]
    assert "which is the chance level" in written(only(log=log))[1].text
    assert "which is the chance level" not in written(only(log=data().log))[1].text


def test_tensors_switched_off_are_said(written: Any) -> None:
    _, page = written(only(active_by_layer={"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.5}))
    assert "no signal passes: a, b, c and 1 more." in page.text


def test_frames_say_right_and_wrong(written: Any) -> None:
    _, page = written(only(neighbours=neighbours()))
    classes = [attributes.get("class") for attributes in page.having("img")]
    assert classes.count("wrong") == 12
    assert classes.count("right") == 12
    assert "0 of 12 share the class before and 12 of 12 after" in page.text
    _, page = written(only(neighbours=neighbours(labelled=False)))
    assert not any(attributes.get("class") for attributes in page.having("img"))
    assert "judge for yourself" in page.text


def test_thumbnails_are_the_images_made_small(written: Any) -> None:
    large = torch.zeros(3, 300, 200, dtype=torch.uint8)
    large[0] = 255
    _, page = written(only(neighbours=Neighbours([large], [[image(3)]], [[image(4)]])))
    pictures = [
        Image.open(io.BytesIO(base64.b64decode((attributes["src"] or "").split(",")[1])))
        for attributes in page.having("img")
    ]
    assert [picture.size for picture in pictures] == [(64, 96), (28, 28), (28, 28)]
    assert pictures[0].getpixel((30, 40)) == (255, 0, 0)
    assert torch.equal(torch.tensor(list(pictures[1].tobytes())).view(28, 28, 3).permute(2, 0, 1), image(3))


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 8, 8), torch.zeros(8, 8, 3, dtype=torch.uint8), torch.zeros(3, 0, 8, dtype=torch.uint8)]
)
def test_an_image_of_another_kind_is_refused(tmp_path: Path, wrong: Tensor) -> None:
    with pytest.raises(ConfigError, match="uint8"):
        write_report(tmp_path / "report.html", only(neighbours=Neighbours([wrong], [[]], [[]])))
    assert not list(tmp_path.iterdir())


def test_everything_of_the_user_is_escaped(written: Any) -> None:
    html, page = written(
        data(
            title=EVIL,
            config={EVIL: EVIL, "nested": {EVIL: [EVIL]}},
            result={EVIL: EVIL, f"{EVIL}_before": 1, f"{EVIL}_after": 2, "seed": EVIL},
            active_by_layer={EVIL: 0.0},
            neighbours=dataclasses.replace(
                neighbours(1, 1), labels=NeighbourLabels([EVIL], [[EVIL]], [[f"{EVIL} other"]])
            ),
            bad_images=[(EVIL, EVIL)],
        )
    )
    assert_self_contained(html, page)
    assert "<script" not in html.lower()
    assert len(page.having("img")) == 3
    assert page.text.count("alert('x')") >= 8


def test_file_names_that_are_no_text_can_be_shown(written: Any) -> None:
    _, page = written(only(bad_images=[("caf\udce9.jpg", "line\nbreak \x00 zero"), ("画像.png", "empty")]))
    assert r"caf\udce9.jpg" in page.text
    assert r"line\nbreak \x00 zero" in page.text
    assert "画像.png" in page.text


def test_hundreds_of_bad_images_are_folded_and_the_rest_counted(written: Any) -> None:
    bad = [(f"photos/{index:05}.jpg", "truncated") for index in range(20_000)]
    html, page = written(only(bad_images=bad))
    folded = html[html.index('<details id="unreadable">') :]
    assert "open" not in folded[: folded.index(">")]
    assert "photos/00499.jpg" in page.text
    assert "photos/00500.jpg" not in page.text
    assert "And 19,500 more" in page.text
    assert len(html) < 2_000_000


def test_long_values_are_cut_and_say_so(written: Any) -> None:
    html, page = written(only(config={"files": "x" * 1_000_000, "list": list(range(100_000))}, title="t" * 5000))
    assert "(1,000,000 characters)" in page.text
    assert len(html) < 1_000_000


def test_many_noisy_thumbnails_stay_within_two_megabytes(written: Any) -> None:
    html, page = written(only(neighbours=neighbours(20, 10, side=96)))
    assert len(page.having("img")) == 12 * (1 + 2 * 8)
    assert len(html) < 2_000_000


def test_the_same_data_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_report(tmp_path / f"{name}.html", data())
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_writing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "run" / "report.html"
    write_report(path, EMPTY)
    before = path.read_bytes()
    broken = only(neighbours=Neighbours([image(1)], [[torch.zeros(1)]], [[]]))
    with pytest.raises(SelfmaskError):
        write_report(path, broken)
    assert path.read_bytes() == before
    write_report(path, data())
    assert path.read_bytes() != before
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(SelfmaskError, match=r"cannot write .*report\.html"):
        write_report(tmp_path / "report.html", EMPTY)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
