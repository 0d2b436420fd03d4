"""Figures: valid, small, the same every time, and true to the log."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from selfmask.report import figures

NAN = float("nan")


def log(count: int, **more: float) -> list[dict[str, float]]:
    return [
        {"step": step, "loss": 6.2 - step / count, "ln_k": 6.2, "active": 1 - 0.1 * step / count, "flips": 900 - step}
        | more
        for step in range(1, count + 1)
    ]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def points(svg: str, colour: str) -> list[int]:
    """How many points each curve of a colour has."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: ' + re.escape(colour), svg)
    return [len(re.findall("[ML]", path)) for path in paths]


def variable(name: str) -> str:
    return f"var(--{name}, {figures.LIGHT[name]})"


def test_a_curve_follows_the_steps_and_the_later_line_of_a_step_counts() -> None:
    lines = [
        {"step": 3, "loss": 1.0},
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 0.5},
        {"loss": 9.0},
        {"step": 4, "quality": 0.5},
        {"step": 5, "loss": math.inf},
        {"step": 6, "loss": "NaN"},
        {"step": 7, "loss": 10**400},
        {"step": NAN, "loss": 1.0},
    ]
    steps, losses = figures.curve(lines, "loss")
    assert steps.tolist() == [1, 2, 3, 5, 6, 7]
    np.testing.assert_equal(losses, [3.0, NAN, 0.5, NAN, NAN, NAN])
    assert figures.curve(lines, "flips")[0].size == 0


@pytest.mark.parametrize("count", [401, 1000, 12_345])
def test_thinning_takes_means_over_equal_stretches(count: int) -> None:
    rng = np.random.default_rng(count)
    steps, values = np.arange(count, dtype=float), rng.normal(size=count)
    values[rng.random(count) < 0.2] = NAN
    few_steps, few = figures.thin(steps, values)
    assert len(few) == 400
    sizes, first = [], 0
    for place in range(400):  # an oracle in plain loops: the first stretches take the remainder
        size = count // 400 + (place < count % 400)
        kept = [v for v in values[first : first + size].tolist() if not math.isnan(v)]
        assert few_steps[place] == pytest.approx(sum(range(first, first + size)) / size)
        assert few[place] == pytest.approx(sum(kept) / len(kept) if kept else NAN, nan_ok=True)
        sizes.append(size)
        first += size
    assert sum(sizes) == count


def test_short_logs_are_shown_point_by_point() -> None:
    steps, values = np.arange(400.0), np.arange(400.0)
    assert figures.thin(steps, values)[1] is values


def test_a_long_log_gives_a_small_figure() -> None:
    for svg in (figures.loss_figure(log(50_000)), figures.mask_figure(log(50_000))):
        assert svg is not None
        assert len(svg) < 60_000
        assert max(points(svg, variable("accent"))) <= figures.MAX_POINTS


def test_the_loss_figure_has_ln_k_and_the_last_value() -> None:
    svg = figures.loss_figure(log(100))
    assert svg is not None
    assert {"ln K = 6.20", "loss", "step", "5.2"} <= set(texts(svg))
    without = figures.loss_figure([{"step": line["step"], "loss": line["loss"]} for line in log(100)])
    assert without is not None
    assert not any("ln K" in text for text in texts(without))


def test_lost_steps_are_marked() -> None:
    lines = log(50)
    sound = figures.loss_figure(lines)
    for place in (10, 11, 30):
        lines[place]["loss"] = NAN
    marked = figures.loss_figure(lines)
    assert sound is not None
    assert marked is not None
    assert len(points(marked, variable("warn"))) == len(points(sound, variable("warn"))) + 3


def test_a_log_full_of_nan_stays_small() -> None:
    svg = figures.loss_figure([{"step": step, "loss": NAN if step else 1.0} for step in range(20_000)])
    assert svg is not None
    assert len(svg) < 60_000


@pytest.mark.parametrize("lines", [[], [{"step": 1}], [{"step": 1, "loss": NAN, "active": None, "flips": "x"}]])
def test_nothing_to_draw_is_no_figure(lines: list[dict[str, object]]) -> None:
    assert figures.loss_figure(lines) is None
    assert figures.mask_figure(lines) is None
    assert figures.quality_figure(lines) is None
    assert figures.layers_figure({}) is None


@pytest.mark.parametrize(
    "lines",
    [
        log(1, quality=0.3),
        log(2, quality=0.3),
        [{"step": 0, "loss": 0.0, "active": 1.0, "flips": 0, "quality": 0.0}] * 3,
        [{"step": s, "loss": (-1) ** s * 1e29, "active": 1e-12 * s, "flips": 1e12, "quality": -1e-9} for s in range(9)],
        [{"step": s, "loss": NAN if s % 2 else 1.0, "active": NAN if s % 2 else 0.5, "quality": s} for s in range(9)],
    ],
    ids=["one", "two", "constant", "extreme", "gaps"],
)
def test_odd_logs_give_valid_figures(lines: list[dict[str, float]]) -> None:
    for draw in (figures.loss_figure, figures.mask_figure, figures.quality_figure):
        svg = draw(lines)
        assert svg is not None
        ElementTree.fromstring(svg)


def test_quality_starts_at_the_frozen_backbone_and_the_kept_step_is_marked() -> None:
    lines = [{"step": step, "quality": 0.5 + step / 1000} for step in (40, 80, 120)]
    bare = figures.quality_figure(lines)
    assert bare is not None
    assert points(bare, variable("accent")) == [3]
    whole = figures.quality_figure(lines, 0.51, 80)
    assert whole is not None
    assert points(whole, variable("accent")) == [4]
    assert "step 80 is kept" in texts(whole)
    assert "0.62" in texts(whole)
    for step, words in ((0, True), (50, False), (None, False), (NAN, False), ("80", False)):
        svg = figures.quality_figure(lines, 0.51, step)
        assert svg is not None
        assert any("is kept" in text for text in texts(svg)) == words
    assert figures.quality_figure([{"step": 1, "loss": 2.0}], 0.51, 0) is None


def test_active_share_without_flips_is_one_panel() -> None:
    both, one = figures.mask_figure(log(9)), figures.mask_figure([{"step": 1, "active": 0.9}, {"step": 2, "active": 1}])
    assert both is not None
    assert one is not None
    assert {"share of active weights", "flips per step", "90.0%"} <= set(texts(both))
    assert "flips per step" not in texts(one)


def test_layers_keep_the_order_of_the_network_and_say_their_share() -> None:
    svg = figures.layers_figure({"stem.weight": 1.0, "b.conv.weight": 0.934, "a.bias": 0.0, "odd": NAN})
    assert svg is not None
    words = texts(svg)
    assert [word for word in words if word in ("stem", "b.conv", "a.bias", "odd")] == [
        "stem",
        "b.conv",
        "a.bias",
        "odd",
    ]
    assert {"100%", "93.4%", "0%", "not a number"} <= set(words)


def test_names_are_text_whatever_they_hold() -> None:
    names = ["<script>alert(1)</script>", "$x^2$", "a&b", "zero\x00byte", "名前", 'quo"te', "y" * 300]
    svg = figures.layers_figure(dict.fromkeys(names, 0.5))
    assert svg is not None
    words = texts(svg)
    assert {"<script>alert(1)</script>", "$x^2$", "a&b", r"zero\x00byte", r"\u540d\u524d"} <= set(words)
    assert "<script" not in svg
    assert max(map(len, words)) <= 36


def test_many_tensors_are_grouped_by_the_beginning_of_their_names() -> None:
    shares = {f"blocks.{b}.{part}.weight": b / 24 + p / 1000 for b in range(24) for p, part in enumerate("qkvom")}
    bars = figures.grouped({"stem.weight": 1.0} | shares)
    assert [name for name, _ in bars] == ["stem.weight", *(f"blocks.{b} (5)" for b in range(24))]
    assert [share for _, share in bars] == pytest.approx([1.0, *(b / 24 + 0.002 for b in range(24))])


@pytest.mark.parametrize("name", ["w{}", "model.encoder.layers.{}.weight", "{}.w.w"])
def test_names_that_do_not_tell_are_cut_into_equal_runs(name: str) -> None:
    shares = {name.format(index): index / 1000 for index in range(1000)}
    bars = figures.grouped(shares)
    assert len(bars) == figures.MAX_BARS
    values = [share for _, share in bars]
    assert values == sorted(values)
    counts = [int(label.rsplit("(", 1)[1][:-1]) for label, _ in bars]
    assert sum(counts) == 1000
    assert max(counts) - min(counts) <= 1
    assert np.average(values, weights=counts) == pytest.approx(np.mean(list(shares.values())))


def test_a_resnet50_is_shown_tensor_by_tensor() -> None:
    shares = {f"layer{index}.weight": 0.9 for index in range(61)}
    assert figures.grouped(shares) == list(shares.items())


def test_colours_come_from_the_page() -> None:
    svg = figures.mask_figure(log(20))
    assert svg is not None
    assert variable("accent") in svg
    assert variable("soft") in svg
    named = re.sub(r"var\(--\w+, #\w+\)", "", svg)
    assert not re.search(r"(fill|stroke): #", named)
    assert set(figures.LIGHT) == set(figures.DARK)


@pytest.mark.heavy
def test_same_input_same_bytes_in_another_process_too() -> None:
    lines = [{"step": s, "loss": 6 - s / 99, "ln_k": 6.2, "active": 1 - s / 999} for s in range(99)]
    here = f"{figures.loss_figure(lines)}{figures.mask_figure(lines)}"
    code = f"import runpy; f = runpy.run_path({figures.__file__!r}); log = {lines}; "  # the file alone imports faster
    code += "print(f['loss_figure'](log), f['mask_figure'](log), sep='', end='')"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert run.stdout == here


def test_figures_share_a_page_without_sharing_ids() -> None:
    drawn = [figures.loss_figure(log(9)), figures.mask_figure(log(9)), figures.layers_figure({"a": 0.5})]
    ids = [each for svg in drawn for each in re.findall(r' id="([^"]*)"', svg or "")]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (999, "999"),
        (999.6, "1,000"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (2_500_000, "2.5M"),
        (7e9, "7G"),
        (-1500, "-1.5k"),
        (100, "100"),
        (0.00012, "0.00012"),
    ],
)
def test_short_numbers(number: float, text: str) -> None:
    assert figures.short(number) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0%"),
        (1.0, "100%"),
        (0.9185, "91.8%"),
        (0.9999, "99.99%"),
        (0.99997, "99.997%"),
        (1 - 1e-9, ">99.999%"),
        (0.0002, "0.02%"),
        (1e-9, "<0.001%"),
        (NAN, "not a number"),
    ],
)
def test_percent_never_rounds_to_all_or_nothing(share: float, text: str) -> None:
    assert figures.percent(share) == text
