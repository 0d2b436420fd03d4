"""The tables of `docs/serve.md`, from the log of `benchmarks.serve_load`."""

from __future__ import annotations

import statistics
from typing import Any

from .load_client import ONE, UNIFORM, ZIPF

MUST = {ZIPF: 0.75, UNIFORM: 0.5, "plain": 1.2}
_NAMES = {ONE: "one mask", ZIPF: "Zipf over all masks", UNIFORM: "uniform over all masks", "plain": "plain server"}


def show(log: list[dict[str, Any]]) -> None:
    """Print two tables in Markdown: ratios of each backbone and size, and what they are made of."""
    print("\n| | Zipf, of one mask | uniform, of one mask | one mask / plain server | p50 and p99 at 70 % | memory |")
    print("|---|---|---|---|---|---|")
    for found in log:
        print(_ratios(found))
    print("\n| | traffic | requests/s | p50 | p99 | server's CPU a request | client's share of the CPU | refused |")
    print("|---|---|---|---|---|---|---|---|")
    for found in log:
        for what, sent in found["sent"].items():
            print(_row(_title(found), _NAMES[what], sent))
        print(_row(_title(found), "Zipf, at 70 % of its rate", [found["paced"]]))
    for found in log:
        print(
            f"\n{_title(found)}: {found['masks']:,} masks, {found['clients']} clients, "
            f"{len(found['sent'][ONE])} rounds of {found['sent'][ONE][0]['requests']:,} requests each, "
            f"load average {found['load_at_start']:.1f} at the "
            f"start, {found['when'][:10]}; all masks read for the first time, with a vector of each, in "
            f"{found['reading_s']:.0f} s."
        )


def _title(found: dict[str, Any]) -> str:
    return f"{found['backbone'].replace('resnet', 'ResNet-')}, {found['size']} px"


def _ratios(found: dict[str, Any]) -> str:
    sent = found["sent"]
    cells = [_ratio(sent[what], sent[ONE], MUST[what]) for what in (ZIPF, UNIFORM)]
    cells.append(_ratio(sent[ONE], sent["plain"], MUST["plain"]))
    paced, memory = found["paced"], found["memory"]
    grown, allowed = max(memory.values()) - memory["start"], found["memory_bound"]
    within = "" if grown <= allowed else "**more than** "
    cells += [
        f"{paced['p50']:,.0f} ms, {paced['p99']:,.0f} ms",
        f"{memory['start'] / 1e6:,.0f} MB and {grown / 1e6:,.0f} MB more; {within}{allowed / 1e6:,.0f} MB are allowed",
    ]
    return f"| {_title(found)} | {' | '.join(cells)} |"


def _ratio(sent: list[dict[str, Any]], other: list[dict[str, Any]], least: float) -> str:
    """The median over rounds, where it lies, and the same by CPU time."""
    ratios = [each["rate"] / one["rate"] for each, one in zip(sent, other, strict=True)]
    by_cpu = statistics.median(one["server"] / each["server"] for each, one in zip(sent, other, strict=True))
    middle = statistics.median(ratios)
    shown = f"{middle:.2f}" if middle >= least else f"**{middle:.2f}** (short of {least})"
    return f"{shown} ({min(ratios):.2f} to {max(ratios):.2f}; by CPU {by_cpu:.2f})"


def _row(title: str, what: str, sent: list[dict[str, Any]]) -> str:
    middle = {key: statistics.median(each[key] for each in sent) for key in ("rate", "p50", "p99", "server", "client")}
    share = middle["client"] / (middle["client"] + middle["server"])
    cells = [
        title,
        what,
        f"{middle['rate']:.1f}",
        f"{middle['p50']:,.0f} ms",
        f"{middle['p99']:,.0f} ms",
        f"{middle['server'] * 1e3:.1f} ms",
        f"{share:.0%}",
        f"{sum(each['refused'] for each in sent)}",
    ]
    return f"| {' | '.join(cells)} |"
