"""An attention has its queries, keys and values in one tensor, in two or in three: which tensors make up one layer, and
how many projections one tensor holds."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FUSED = re.compile(r"(?:^|\.)(?:in_proj_weight|in_proj_bias|(?:to_|w)?(q?kv)(?:_proj)?\.(?:weight|bias))$")
_PART = re.compile(r"(?:to_|linear_|lin_|w)?(?:q|k|v|kv|query|key|value)(?:_proj|_lin|_linear)?(_weight|_bias)?")


def projections_in(name: str, rows: int) -> int:
    """How many projections a tensor with so many rows holds one below the other: 3 where q, k and v are fused."""
    match = _FUSED.search(name)
    count = 1 if match is None else 2 if match[1] == "kv" else 3
    return count if rows % count == 0 else 1


def layers_of(names: Iterable[str]) -> list[list[str]]:
    """Names of tensors, in groups that would be one tensor, were the network written another way.

    `attn.q_proj.weight`, `attn.k_proj.weight` and `attn.v_proj.weight` are what `attn.qkv.weight` is elsewhere. A
    tensor that has no such kin is a group by itself.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = (f"qkv{match[1] or ''}" if (match := _PART.fullmatch(part)) else part for part in name.split("."))
        groups.setdefault(".".join(parts), []).append(name)
    return list(groups.values())
