"""Which numbers a step computes with: bfloat16 where that is faster, float32 elsewhere.

Only forward and backward passes of the backbone are concerned. Scores, heads and what they learn by stay in float32,
and so does all that is measured: the gate, teachers, embeddings.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .config import Precision

_FAST = ("avx512_bf16", "amx_bf16")  # instructions of a CPU that multiply bfloat16; without them, it is emulated
_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)
_ALLOWING = ("DEFAULT", "ALL", "BF16", "FP16", "AMX", "AVX10")  # what oneDNN calls sets of instructions with these


def chosen(precision: Precision, model: nn.Module, device: torch.device) -> Precision:
    """What `auto` means for this model on this device: the same in every run, so nothing is timed."""
    if precision != "auto":
        return precision
    return "bfloat16" if _is_faster(model, device) else "float32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Within, the backbone computes with this precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def _is_faster(model: nn.Module, device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    if device.type != "cpu" or not multiplies_bfloat16():
        return False
    # On a CPU, grouped convolutions take twice as long as in float32: `python -m benchmarks.precision`. Where linear
    # layers do most of the work, as in transformers that have some, that is still less than what these save.
    grouped = any(isinstance(each, nn.modules.conv._ConvNd) and each.groups > 1 for each in model.modules())
    return not grouped or mostly_linear(model)


def mostly_linear(model: nn.Module) -> bool:
    """Whether most of the weights, scores apart, belong to linear layers, as in transformers."""
    sizes = [(each, each.weight.numel()) for each in model.modules() if isinstance(each, _WEIGHTED)]
    return 2 * sum(size for each, size in sizes if isinstance(each, nn.Linear)) > sum(size for _, size in sizes)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, as far as torch knows, and oneDNN, which computes, may use them."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(name in most for name in _ALLOWING) and any(found.get(name) for name in _FAST)
