"""What the paper prints, one file of `paper/` a study: a row for every result in its tables, figures and text.

The numbers stand as they are printed, also where the paper contradicts itself; only percentages became shares of 1.
What it does not print has no row. Where it leaves open what a number belongs to, we took what fits:
- low-shot has one legend for three panels, and the biases of the transformer have none: curves keep their order;
- the first figure of selective names no data set, nor does clusters: the one has the full mask of cifar10, the other
  the hundred classes of cifar100;
- compression and variance name no backbone: masks learned without labels are those of the SwAV ResNet-50.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Number:
    """One number of the paper.

    table: the label of the table or figure; "text" and "abstract" are the paper's own words.
    backbone: by the name that the command line takes; empty where the paper names none.
    setting: the row of the table, or the curve of the figure. SMN is a mask learned without labels, "mask" one learned
        with them, "frozen" the backbone itself.
    data: by our name; several, joined by "+", of a mean over these; empty where no data set is meant.
    measure: what `value` is. Accuracies: `knn`, `linear` (a probe), `top1` (the head that was trained). Shares,
        reductions and gains are parts of 1; what is measured in a unit has it in its name (`size_mbit`).
    x: where on the curve. In low-shot: share of labels; invariance: epoch; sparsity: layer, from 1 on; selective:
        masked parameters; clusters: classes counted; variance: number of the run.
    """

    table: str
    backbone: str
    setting: str
    data: str
    measure: str
    x: float | None
    value: float


FIELDS = tuple(field.name for field in dataclasses.fields(Number))
_FOLDER = resources.files("selfmask.studies") / "paper"


def names() -> list[str]:
    """The studies whose numbers are here."""
    return sorted(file.name.removesuffix(".csv") for file in _FOLDER.iterdir() if file.name.endswith(".csv"))


@cache
def paper_numbers(study: str) -> Sequence[Number]:
    """All numbers of a study, in the order of the paper, and those of a curve by `x`."""
    if study not in names():
        raise ConfigError("the paper has no such study", expected=", ".join(names()), found=study)
    lines = (_FOLDER / f"{study}.csv").read_text(encoding="utf-8").splitlines()
    return tuple(_number(row) for row in csv.DictReader(lines))


def printed(study: str) -> Sequence[Number]:
    """The same; nothing for a study that is not the paper's."""
    return paper_numbers(study) if study in names() else ()


def find(study: str, **what: str | float | None) -> float | None:
    """The one number whose fields are `what`; None where the paper prints none. It may print one more than once.

    `find("rules", setting="SMN", data="dtd", measure="knn")` is 0.674.
    """
    if unknown := set(what) - set(FIELDS):
        raise ConfigError("a number has no such field", expected=", ".join(FIELDS), found=", ".join(sorted(unknown)))
    found = [
        number
        for number in paper_numbers(study)
        if all(same(getattr(number, key), wanted) for key, wanted in what.items())
    ]
    if len({number.value for number in found}) > 1:
        open_fields = [key for key in FIELDS if len({getattr(number, key) for number in found}) > 1 and key != "value"]
        raise ConfigError(
            f"the paper prints several such numbers in the study {study}",
            found=f"{len(found)} numbers",
            todo=f"say which one: {', '.join(open_fields)}",
        )
    return found[0].value if found else None


def same(printed: str | float | None, wanted: str | float | None) -> bool:
    """Numbers but for what the paper rounds: it has 1,173,129.5 where 5 % of the weights are 1,173,129.6."""
    if isinstance(printed, float) and isinstance(wanted, int | float):
        return math.isclose(printed, wanted, rel_tol=1e-6)
    return printed == wanted


def _number(row: dict[str, str]) -> Number:
    x, value = row.pop("x"), row.pop("value")
    return Number(**row, x=float(x) if x else None, value=float(value))
