"""The paper's numbers: as many as it has, typed right, and fitting together where the paper says how."""

from __future__ import annotations

import math
from collections import Counter
from importlib import resources

import pytest

from selfmask.errors import ConfigError
from selfmask.studies.numbers import Number, find, names, paper_numbers

R18, SWAV, CLIP = "resnet18", "swav/resnet50", "vit_base_patch32_clip_224.openai"
DATA = {"cifar10", "cifar100", "dtd", "eurosat", "flowers102", "oxfordiiitpet", "sun397", "ucf101", "food101"}
DATA |= {"inatloc500", ""}
COUNTS = {  # rows by study and table
    "supervised": {"tab:masking_sup": 3 * 3 * 8 + 3 * 2, "text": 1},
    "rules": {"tab:rama": 2 * 3 * 7 + 7},
    "low-shot": {"fig:lowshot": 4 * (6 + 6 + 7)},
    "cascade": {"tab:supermask": 2 * 3 * 2 + 3, "text": 4},
    "ablations": {"tab:abl:protos": 9, "tab:abl:frozen": 9, "tab:abl:init": 9},
    "invariance": {"fig:equi": 2 * 30, "fig:o1o": 4 * 30},
    "compression": {"tab:cmp1": 20, "tab:cmp2": 20, "text": 5, "abstract": 1},
    "sparsity": {"tab:rama": 7, "fig:vit": (6 + 5) * 12, "fig:daaa": 2 * (3 * 57 + 8 + 2 * 4)},
    "progressive": {"tab:progressive": 2 * 3 * 4 + 4},
    "selective": {"fig:sm": 4 + 10 + 3, "fig:c100maxmag": 2 * 11, "text": 4},
    "clusters": {"fig:5l": 5 * 100, "text": 2},
    "variance": {"tab:variance": 2 * (5 + 2)},
    "cost": {"text": 6},
}
STUDIES = pytest.mark.parametrize("study", sorted(COUNTS))
# measure: from, to
RANGES = {
    **dict.fromkeys(["knn", "linear", "top1", "knn_mean", "knn_deviation"], (0, 1)),
    **dict.fromkeys(["active_share", "active_share_low", "active_share_high", "active_share_deviation"], (0, 1)),
    **dict.fromkeys(["storage_share", "masked_share", "cumulative_share", "cumulative_share_at_least"], (0, 1)),
    **dict.fromkeys(["linear_gain", "reduction_at_least"], (0, 1)),
    "reduction": (-0.004, 1),
    "loss": (0, math.log(10) + 0.01),
    "times_smaller": (1, 100),
    "times_larger": (1, 100),
    "size_mbit": (1, 3000),
    "values": (23_462_592, 23_462_592),
    "hours": (1, 24),
    "dollars": (12, 48),
    "dollars_per_hour": (2, 2),
    "memory_gb": (24, 24),
}
SPOTS: dict[
    str, list[tuple[str, str, str, str, float | None, float]]
] = {  # study: backbone, setting, data, measure, x, value
    "supervised": [
        (R18, "frozen", "cifar10", "knn", None, 0.826),
        (R18, "full fine-tuning", "", "size_mbit", None, 368),
        (R18, "mask", "", "size_mbit", None, 12),
        (R18, "mask", "oxfordiiitpet", "top1", None, 0.852),
        (SWAV, "frozen", "eurosat", "knn", None, 0.754),
        (SWAV, "full fine-tuning", "flowers102", "top1", None, 0.987),
        (SWAV, "mask", "sun397", "top1", None, 0.482),
        (CLIP, "full fine-tuning", "", "size_mbit", None, 2752),
        (CLIP, "frozen", "sun397", "knn", None, 0.687),
        (CLIP, "mask", "dtd", "top1", None, 0.738),
        (CLIP, "mask", "ucf101", "top1", None, 0.815),
    ],
    "rules": [
        (SWAV, "topk 50%", "cifar10", "knn", None, 0.891),
        (SWAV, "topk 50%", "flowers102", "knn", None, 0.403),
        (SWAV, "topk found", "eurosat", "knn", None, 0.973),
        (SWAV, "SMN", "ucf101", "knn", None, 0.549),
        (SWAV, "topk found", "dtd", "linear", None, 0.733),
        (SWAV, "SMN", "sun397", "linear", None, 0.631),
        (SWAV, "SMN", "cifar10", "active_share", None, 0.914),
        (SWAV, "SMN", "ucf101", "active_share", None, 0.957),
    ],
    "low-shot": [
        (SWAV, "linear probe", "cifar100", "linear", 0.0025, 0.2107),
        (SWAV, "SMN + linear probe", "cifar100", "linear", 0.1, 0.6877),
        (SWAV, "full fine-tuning", "cifar10", "top1", 0.005, 0.7071),
        (SWAV, "mask", "cifar10", "top1", 0.0025, 0.3143),
        (SWAV, "SMN + linear probe", "sun397", "linear", 0.07, 0.388917),
        (SWAV, "full fine-tuning", "sun397", "top1", 0.1, 0.287),
        (SWAV, "mask", "sun397", "top1", 0.04, 0.049068),
    ],
    "cascade": [
        (SWAV, "SMN", "cifar100", "knn", None, 0.656),
        (SWAV, "SMN", "", "storage_share", None, 1 / 32),
        (SWAV, "conditional cascade", "", "storage_share", None, 6 / 32),
        (SWAV, "conditional cascade", "inatloc500", "knn", None, 0.395),
        (SWAV, "conditional cascade", "inatloc500", "linear", None, 0.521),
        (SWAV, "unconditional cascade", "inatloc500", "linear", None, 0.550),
        (SWAV, "cascade", "", "times_smaller", None, 5),
    ],
    "ablations": [
        (SWAV, "50 prototypes", "cifar10", "knn", None, 0.510),
        (SWAV, "5000 prototypes", "sun397", "knn", None, 0.496),
        (SWAV, "nothing frozen", "sun397", "knn", None, 0.177),
        (SWAV, "biases frozen", "dtd", "knn", None, 0.505),
        ("dino/resnet50", "DINO weights", "dtd", "knn", None, 0.695),
        ("resnet50", "supervised weights", "sun397", "knn", None, 0.505),
    ],
    "invariance": [
        ("", "rate 100 and scores 2.5 and threshold 0.5", "cifar10", "loss", 12, 2.03144717216492),
        ("", "rate 100 and scores 2.5 and threshold 0.5", "cifar10", "loss", 30, 0.424037992954254),
        ("", "rate 100", "cifar10", "loss", 1, 2.305828332901),
        ("", "rate 100", "cifar10", "loss", 11, 1.6775951385498),
        ("", "scores 2.0", "cifar10", "loss", 30, 0.732134759426117),
        ("", "threshold 0.5", "cifar10", "loss", 30, 0.320863753557205),
    ],
    "compression": [
        (SWAV, "mask by gzip", "cifar100", "reduction", None, 0.7832),
        (SWAV, "weights by snappy", "cifar100", "reduction", None, -0.000046),
        (SWAV, "mask by lzma", "sun397", "reduction", None, 0.8332),
        (SWAV, "weights by lz4", "sun397", "reduction", None, -0.0039),
        (SWAV, "mask against weights both compressed", "cifar100", "storage_share", None, 0.01305),
        (SWAV, "mask against weights both compressed", "sun397", "storage_share", None, 0.012695),
        ("", "mask by the best", "", "reduction", None, 0.83),
    ],
    "sparsity": [
        (SWAV, "self-supervised all weights", "cifar10", "active_share", None, 0.914),
        (CLIP, "supervised fc1 weights", "*", "active_share", 1, 0.9986860603094101),
        (CLIP, "supervised v_proj weights", "*", "active_share", 12, 0.9809468686580658),
        (CLIP, "supervised k_proj biases", "*", "active_share", 7, 1),
        (CLIP, "supervised q_proj biases", "*", "active_share", 9, 0.5784505382180214),
        (SWAV, "self-supervised weights", "*", "active_share_low", 17, 0.8868038569885004),
        (SWAV, "self-supervised downsample biases", "*", "active_share_deviation", 6, 0.10649009952285103),
        (SWAV, "supervised weights", "*", "active_share_high", 57, 0.900164688242526),
        (SWAV, "supervised downsample weights", "*", "active_share", 51, 0.2813720703125),
        (SWAV, "supervised downsample biases", "*", "active_share_deviation", 51, 0.05375641717972365),
    ],
    "progressive": [
        (SWAV, "topk progressive", "dtd", "knn", None, 0.658),
        (SWAV, "topk progressive", "eurosat", "linear", None, 0.981),
        (SWAV, "topk found", "ucf101", "knn", None, 0.572),
        (SWAV, "SMN", "flowers102", "linear", None, 0.983),
        (SWAV, "SMN", "ucf101", "active_share", None, 0.957),
    ],
    "selective": [
        (SWAV, "first stages", "cifar10", "knn", 213504, 0.792),
        (SWAV, "random", "cifar10", "knn", 23462592, 0.921),
        (SWAV, "random as many as the first stages", "cifar10", "knn", 8506880, 0.567),
        (SWAV, "random", "cifar100", "knn", 11731296, 0.673),
        (SWAV, "magnitude", "cifar100", "knn", 1173129.5, 0.5369),
        (SWAV, "random as many as the first stages", "", "masked_share", 1426944, 0.061),
        (SWAV, "random", "cifar10", "times_smaller", None, 64),
    ],
    "clusters": [
        (SWAV, "cluster 1", "cifar100", "cumulative_share", 1, 0.035),
        (SWAV, "cluster 2", "cifar100", "cumulative_share", 20, 0.928),
        (SWAV, "cluster 3", "cifar100", "cumulative_share", 14, 0.733),
        (SWAV, "cluster 4", "cifar100", "cumulative_share", 10, 0.617),
        (SWAV, "cluster 5", "cifar100", "cumulative_share", 50, 0.963),
        (SWAV, "three clusters", "cifar100", "cumulative_share_at_least", 20, 0.8),
    ],
    "variance": [
        (SWAV, "SMN", "dtd", "knn", 1, 0.685),
        (SWAV, "SMN", "dtd", "knn_deviation", None, 0.005),
        (SWAV, "SMN", "ucf101", "knn", 3, 0.557),
        (SWAV, "SMN", "ucf101", "knn_mean", None, 0.569),
        (SWAV, "SMN", "ucf101", "knn_deviation", None, 0.007),
    ],
    "cost": [
        ("", "most demanding experiments at least", "", "memory_gb", None, 24),
        ("", "most experiments at most", "", "hours", None, 24),
        ("", "supervised mask of a smaller data set", "", "hours", None, 6),
        ("", "one model at least", "", "dollars", None, 12),
        ("", "one model at most", "", "dollars", None, 48),
        ("", "A100", "", "dollars_per_hour", None, 2),
    ],
}
FOUR = "cifar10+cifar100+sun397+dtd"
"""What "*" stands for above: the sets that a figure takes the mean over."""


def test_the_package_ships_a_file_for_every_study() -> None:
    files = {file.name for file in (resources.files("selfmask") / "studies" / "paper").iterdir()}
    assert files == {f"{study}.csv" for study in COUNTS}
    assert names() == sorted(COUNTS)


@STUDIES
def test_as_many_as_printed_and_none_twice(study: str) -> None:
    numbers = paper_numbers(study)
    assert Counter(number.table for number in numbers) == COUNTS[study]
    assert max(Counter(_key(number) for number in numbers).values()) == 1
    assert {name for number in numbers for name in number.data.split("+")} <= DATA
    for number in numbers:
        low, high = RANGES[number.measure]
        assert low <= number.value <= high, number


@STUDIES
def test_typed_as_printed(study: str) -> None:
    for backbone, setting, data, measure, x, value in SPOTS[study]:
        data = FOUR if data == "*" else data
        what = {"backbone": backbone, "setting": setting, "data": data, "measure": measure, "x": x}
        assert find(study, **what) == value, what


def test_curves_have_every_point() -> None:
    for study, ends in {"invariance": {30}, "clusters": {100}, "sparsity": {12, 57}}.items():
        curves: dict[tuple[object, ...], list[float]] = {}
        for number in paper_numbers(study):
            if number.x is not None and "downsample" not in number.setting and number.table != "text":
                curves.setdefault((number.table, number.setting, number.measure), []).append(number.x)
        assert {len(xs) for xs in curves.values()} == ends
        assert all(xs == list(range(1, len(xs) + 1)) for xs in curves.values())


def test_what_is_printed_twice_is_the_same() -> None:
    rules = {_row(number): number.value for number in paper_numbers("rules")}
    again = {_row(number): number.value for number in paper_numbers("progressive")}
    both = rules.keys() & again.keys()
    assert len(both) == 2 * 2 * 4 + 4
    assert all(rules[row] == again[row] for row in both)
    first = [_curve("invariance", "standard", "loss", table) for table in ("fig:equi", "fig:o1o")]
    assert first[0] == first[1]


def test_layers_add_up_to_the_overall_share() -> None:
    """Weighted by the sizes of ResNet-50's tensors, the layers' shares are the mean of the four sets' in Table 2."""
    sizes, width = [3 * 64 * 49], 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [width * inner, 9 * inner**2, 4 * inner**2]
            if block == 0:  # the downsampling convolution and its batch norm
                sizes += [4 * width * inner, 4 * inner]
            width = 4 * inner
    weights = _curve("sparsity", "self-supervised weights", "active_share")
    biases = _curve("sparsity", "self-supervised downsample biases", "active_share")
    count = sum(sizes) + sum(sizes[int(layer) - 1] for layer in biases)
    active = sum(share * sizes[int(layer) - 1] for curve in (weights, biases) for layer, share in curve.items())
    assert count == 23_462_592
    overall = [find("rules", data=name, measure="active_share") or 0 for name in FOUR.split("+")]
    assert active / count == pytest.approx(sum(overall) / 4, abs=2e-4)


def test_the_bands_lie_around_their_means() -> None:
    """But for one bound, which is printed that of another layer."""
    for kind, wrong in (("self-supervised", [17]), ("supervised", [])):
        low, mean, high = (_curve("sparsity", f"{kind} weights", f"active_share{end}") for end in ("_low", "", "_high"))
        assert [layer for layer in mean if abs(low[layer] + high[layer] - 2 * mean[layer]) > 1e-9] == wrong


def test_an_open_question_and_a_wrong_one_are_refused() -> None:
    assert find("rules", setting="SMN", data="food101") is None
    with pytest.raises(ConfigError, match="say which one: setting, measure"):
        find("rules", data="dtd")
    with pytest.raises(ConfigError, match="no such field"):
        find("rules", dataset="dtd")
    with pytest.raises(ConfigError, match="no such study"):
        paper_numbers("../rules")


def _key(number: Number) -> tuple[object, ...]:
    return (number.table, *_row(number), number.x)


def _row(number: Number) -> tuple[str, str, str, str]:
    return number.backbone, number.setting, number.data, number.measure


def _curve(study: str, setting: str, measure: str, table: str | None = None) -> dict[float, float]:
    numbers = [n for n in paper_numbers(study) if n.setting == setting and n.measure == measure]
    return {number.x or 0: number.value for number in numbers if table in (None, number.table)}


def test_what_the_paper_rounds_is_found() -> None:
    weights = 23_462_592
    where = {"backbone": "swav/resnet50", "data": "cifar100", "measure": "knn"}
    assert find("selective", setting="magnitude", x=0.05 * weights, **where) == 0.5369
    assert find("selective", setting="magnitude", x=0.1 * weights, **where) == 0.6156
    assert find("selective", setting="random", x=0.05 * weights, **where) == 0.5006
    assert find("selective", setting="random", x=0.06 * weights, **where) is None
