"""The tables and figures of docs/recipe.md, from the log of the runs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import spearmanr

Line = dict[str, Any]
FIGURES = Path("docs")


def show(lines: list[Line], figures: bool) -> None:
    by_part: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_part[line["part"]].append(line)
    if by_part["demo"]:
        demo(by_part["demo"])
    if by_part["grid"]:
        grid(by_part["grid"])
    if by_part["ablation"]:
        ablation(by_part["demo"], by_part["ablation"])
    if by_part["reference"]:
        curve(by_part["demo"], by_part["reference"])
    looked_at = [line for line in lines if any("quality" in point for point in line["curve"])]
    correlation(looked_at, figures)
    judged(looked_at)


def table(*rows: list[str]) -> None:
    head, *body = rows
    print("\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)) + "\n")


def change(line: Line, name: str) -> float:
    """In points, from before to after."""
    return float(100 * (line["result"][f"{name}_after"] - line["result"][f"{name}_before"]))


def both(line: Line, name: str) -> str:
    return f"{line['result'][f'{name}_before']:.3f} -> {line['result'][f'{name}_after']:.3f}"


def demo(lines: list[Line]) -> None:
    print("## demo\n")
    rows = [
        [
            str(line["seed"]),
            both(line, "knn"),
            both(line, "probe"),
            both(line, "quality"),
            str(line["result"]["best_step"]),
        ]
        for line in lines
    ]
    gains = [change(line, "knn") for line in lines], [change(line, "probe") for line in lines]
    rows.append(["mean", *(f"**{mean(gain):+.1f} points**" for gain in gains), "", ""])
    table(["seed", "k-NN", "probe, 1 % of the labels", "quality", "kept step"], *rows)


def grid(lines: list[Line]) -> None:
    print("## grid\n")
    rows = []
    right = 0
    for line in lines:
        last = 100 * (line["curve"][-1]["knn"] - line["result"]["knn_before"])
        kept, gain = line["result"]["kept"] == "mask", change(line, "knn")
        # Right: a mask that does not hurt was kept, or one that would not have helped was not.
        fine = gain >= 0 if kept else last <= 0
        right += fine
        rows.append(
            [
                line["backbone"],
                line["images"].removeprefix("small-"),
                both(line, "knn"),
                f"{gain:+.1f}",
                f"{change(line, 'probe'):+.1f}",
                f"{last:+.1f}",
                both(line, "quality"),
                line["result"]["kept"],
                "yes" if fine else "NO",
                f"{line['seconds']:.0f}",
            ]
        )
    head = [
        "backbone",
        "images",
        "k-NN",
        "change",
        "probe 1 %",
        "k-NN at the last step",
        "quality",
        "kept",
        "right",
        "s",
    ]
    table(head, *rows)
    print(f"The gate was right in {right} of {len(lines)} cells.\n")


def ablation(full: list[Line], lines: list[Line]) -> None:
    print("## ablation\n")
    named: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in full:
        named["nothing", line["backbone"], line["images"]].append(line)
    for line in lines:
        name = "nothing" if line["name"] == "fast" else line["name"]
        named[name, line["backbone"], line["images"]].append(line)
    rows = []
    for (name, backbone, images), group in sorted(named.items(), key=lambda item: item[0][1:]):
        last = [100 * (line["curve"][-1]["knn"] - line["result"]["knn_before"]) for line in group]
        gated = [line["result"].get("kept", "no gate") for line in group]
        rows.append(
            [
                f"{backbone}, {images.removeprefix('small-')}",
                name,
                str(len(group)),
                spread([change(line, "knn") for line in group]),
                spread([change(line, "probe") for line in group]),
                spread(last),
                ", ".join(f"{gated.count(word)} {word}" for word in dict.fromkeys(gated)),
            ]
        )
    table(["on", "without", "seeds", "k-NN", "probe 1 %", "k-NN at the last step", "kept"], *rows)


def spread(values: list[float]) -> str:
    return f"{mean(values):+.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def curve(fast: list[Line], reference: list[Line]) -> None:
    print("## steps\n")
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, line in enumerate(fast + reference):
        of_fast = number < len(fast)
        steps = [0, *(point["step"] for point in line["curve"])]
        values = [line["result"]["knn_before"], *(point["knn"] for point in line["curve"])]
        label = "fast, three seeds" if number == 0 else None if of_fast else "reference"
        axes.plot(steps, values, color="#24618f" if of_fast else "#8a5a12", marker=".", label=label)
    axes.axhline(fast[0]["result"]["knn_before"], color="#646b73", linewidth=0.8, linestyle="--", label="frozen")
    axes.set(xlabel="step", ylabel="k-NN accuracy")
    axes.legend(frameon=False)
    figure.savefig(FIGURES / "recipe-steps.png", dpi=120)
    best = max(point["knn"] for line in reference for point in line["curve"])
    steps = reference[0]["curve"][-1]["step"]
    print(f"reference: best k-NN in {steps} steps {best:.4f}, frozen {fast[0]['result']['knn_before']:.4f};")
    print(f"fast: {', '.join(format(line['result']['knn_after'], '.4f') for line in fast)}\n")


def judged(lines: list[Line]) -> None:
    """Was a run that ended a point or more above the frozen backbone accepted? And if not, what did it gain?"""
    print("## gains of a point or more (k-NN, k = 200, at the last step)\n")

    def gained(line: Line, key: str) -> float:
        return float(100 * (line["curve"][-1][key] - line["result"][f"{key}_before"]))

    better = [line for line in lines if gained(line, "knn") >= 1]
    refused = [line for line in better if line["result"]["kept"] != "mask"]
    whole = [line for line in better if line["name"] == "fast"]
    print(f"accepted: {len(better) - len(refused)} of {len(better)},", end=" ")
    print(f"of the whole recipe {sum(line not in refused for line in whole)} of {len(whole)}\n")
    table(
        ["refused: without", "images", "seed", "quality at the last step", "k-NN, k = 200", "k-NN, k = 20"],
        *(
            [
                line["name"],
                line["images"],
                str(line["seed"]),
                f"{line['result']['quality_before']:.3f} -> {line['curve'][-1]['quality']:.3f}",
                f"{gained(line, 'knn'):+.1f}",
                f"{gained(line, 'knn_20'):+.1f}" if "knn_20" in line["curve"][-1] else "",
            ]
            for line in refused
        ),
    )


def correlation(lines: list[Line], figures: bool) -> None:
    """Of the change of quality with the change of k-NN, at the last measured point of every run, gate aside."""
    print("## quality\n")
    points = []
    for line in lines:
        last = [point for point in line["curve"] if "quality" in point][-1]
        points.append(
            (last["quality"] - line["result"]["quality_before"], last["knn"] - line["result"]["knn_before"], line)
        )
    x, y = [100 * p[0] for p in points], [100 * p[1] for p in points]
    rank = spearmanr(x, y)[0]
    same = sum((dx > 0) == (dy > 0) for dx, dy in zip(x, y, strict=True))
    table(
        ["part", "without", "backbone", "images", "seed", "quality", "k-NN"],
        *(
            [
                line["part"],
                "" if line["name"] == "fast" else line["name"],
                line["backbone"],
                line["images"],
                str(line["seed"]),
                f"{dx:+.1f}",
                f"{dy:+.1f}",
            ]
            for dx, dy, (_, _, line) in zip(x, y, points, strict=True)
        ),
    )
    print(f"{len(points)} runs, Spearman's rank correlation {rank:.2f}, the same sign in {same} of {len(points)}\n")
    cost = [
        100 * line["result"]["gate_seconds"] / line["seconds"] for line in lines if "gate_seconds" in line["result"]
    ]
    if cost:
        print(f"The gate took {mean(cost):.1f} % of a run's time in the mean, {max(cost):.1f} % at most.\n")
    if not figures:
        return
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for part, colour in (("demo", "#24618f"), ("grid", "#2e8b57"), ("ablation", "#8a5a12")):
        chosen = [(dx, dy) for dx, dy, (_, _, line) in zip(x, y, points, strict=True) if line["part"] == part]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), s=18, color=colour, label=part)
    axes.axhline(0, color="#646b73", linewidth=0.6)
    axes.axvline(0, color="#646b73", linewidth=0.6)
    axes.set(xlabel="change of quality, points", ylabel="change of k-NN accuracy, points")
    axes.set_title(f"{len(points)} runs, rank correlation {rank:.2f}", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(FIGURES / "recipe-quality.png", dpi=120)
