"""Seeds for every use of chance, derived from the run's one seed: nothing of it has to be saved to resume."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *use: str | int) -> int:
    """A seed for one use of chance, such as (seed, "views", step); different uses get unrelated ones."""
    text = "/".join(str(part) for part in (seed, *use))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *use: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *use))
