"""What became of the paper's claims: one setting against another, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..evaluation.metrics import interval
from .numbers import printed, same
from .runner import Findings
from .scale import Case
from .study import Claim

Verdict = Literal["repeated", "not visible", "contradicted", "not measured"]


class Judgement(NamedTuple):
    """A verdict, and the numbers behind it, in words; accuracies and shares in hundredths.

    difference: of the two settings, with its 95 % interval. here, paper: what both have.
    """

    verdict: Verdict
    difference: str = ""
    here: str = ""
    paper: str = ""
    seeds: int = 0
    steps: int = 0


def judged(claim: Claim, found: Findings) -> Judgement:
    """Whether one setting is better than another here, on the mean of all data: seed by seed, if beyond the spread."""
    better, worse = (_by_seed(found, claim, setting) for setting in (claim.better, claim.worse))
    both = [key for key in better if key in worse]
    paper = _of_paper(claim, found)
    if not both:
        return Judgement("not measured", paper=paper)
    seeds = sorted({seed for _, seed in both})
    each = [_mean([better[key] - worse[key] for key in both if key[-1] == seed]) for seed in seeds]
    mean, width = interval(each)
    shown = _number(claim, mean, "+") + (f" ± {_number(claim, width)}" if width is not None else " (one seed)")
    here = _against(claim, *(_mean([of[key] for key in both]) for of in (better, worse)))
    steps = max(entry.steps for entry in found.values if entry.setting in (claim.better, claim.worse))
    return Judgement(_verdict(claim, mean, width), shown, here, paper, len(seeds), steps)


def _verdict(claim: Claim, mean: float, width: float | None) -> Verdict:
    if claim.equal and width is not None:
        return "repeated" if abs(mean) <= width else "contradicted"
    if width is None or abs(mean) <= width:
        return "not visible"
    return "repeated" if mean > 0 else "contradicted"


def _by_seed(found: Findings, claim: Claim, setting: str) -> dict[tuple[Case, int], float]:
    return {
        (number.case, number.seed): value
        for number, value in found.values.items()
        if number.setting == setting and number.measure in claim.measures and number.x == claim.x
    }


def _of_paper(claim: Claim, found: Findings) -> str:
    """Its own numbers, as a mean over the data sets that it has both of; nothing where it prints none."""
    at = next((entry.paper_x for entry in found.values if entry.x == claim.x and entry.paper_x is not None), claim.x)
    numbers = [each for each in printed(found.study.name) if each.measure in claim.measures and same(each.x, at)]
    sides = [
        {(each.backbone, each.data): each.value for each in numbers if each.setting == setting}
        for setting in (claim.better, claim.worse)
    ]
    both = [data for data in sides[0] if data in sides[1]]
    return _against(claim, *(_mean([side[data] for data in both]) for side in sides)) if both else ""


def _against(claim: Claim, better: float, worse: float) -> str:
    return f"{_number(claim, better)} against {_number(claim, worse)}"


def _number(claim: Claim, value: float, sign: str = "") -> str:
    """Shares in hundredths; a loss is no share."""
    return f"{value:{sign}.3f}" if "loss" in claim.measures else f"{100 * value:{sign}.1f}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
