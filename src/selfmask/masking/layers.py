"""Which tensors make up one layer: an attention has its queries, keys and values in one tensor, in two or in three."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(?:to_|linear_|lin_|w)?(?:q|k|v|kv|query|key|value)(?:_proj|_lin|_linear)?(_weight|_bias)?")


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
