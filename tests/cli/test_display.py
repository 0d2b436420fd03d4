"""What the user sees: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from selfmask.cli.console import Console
from selfmask.cli.display import ConsoleDisplay, ConsoleStages, describe

LINE = {"loss": 4.5, "ln_k": 6.215, "active": 0.9876, "flips": 12.4, "images_per_second": 345.6}


def test_a_line_names_what_matters() -> None:
    text = describe(LINE)
    assert text == "loss 4.500 (ln K 6.21)  active 98.76%  12 flips/step  346 images/s"


def test_without_a_terminal_the_last_step_is_a_plain_line() -> None:
    out = io.StringIO()
    display = ConsoleDisplay(Console(file=out, width=120))
    with display.training(20):
        for step in (10, 20):
            display.line(LINE | {"step": step})
    assert out.getvalue().startswith("step 20/20  loss 4.500")
    assert out.getvalue().count("\n") == 1
    assert "\x1b" not in out.getvalue()


def test_the_last_quality_stays_on_the_line_and_trouble_is_said_at_once() -> None:
    out = io.StringIO()
    display = ConsoleDisplay(Console(file=out, width=120))
    with display.training(20):
        display.line(LINE | {"step": 5, "quality": 0.7})
        display.line(LINE | {"step": 10, "trouble": "[b] all weights are off", "answer": "went back to step 5"})
        assert out.getvalue() == "step 10: [b] all weights are off; went back to step 5\n"
        display.line(LINE | {"step": 20})
    assert "346 images/s  quality 0.700" in out.getvalue()


def test_in_a_terminal_one_bar_moves_and_is_gone_at_the_end() -> None:
    out = io.StringIO()
    display = ConsoleDisplay(Console(file=out, force_terminal=True, width=80))
    with display.decoding(5) as count:
        assert count is not None
        count(3, 5)
    with display.training(20):
        display.line(LINE | {"step": 10})
        assert display._bar is not None
        display._bar.refresh()
    assert "10/20" in out.getvalue()
    assert "loss 4.500" in out.getvalue()


def test_of_stages_it_says_how_many_are_done_and_how_long_the_rest_takes() -> None:
    out = io.StringIO()
    display = ConsoleStages(Console(file=out, width=100))
    costs = dict.fromkeys(["one", "two", "three"], 10.0)
    with display.stages(costs, ["one"]), display.stage("two"), display.training(8):
        display.line({"step": 4})
    said = out.getvalue()
    assert "1 of 3 are already finished" in said
    assert "2/3  two" in said
    assert "left" in said
