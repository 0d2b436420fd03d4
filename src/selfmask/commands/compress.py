"""`compress`: what general compressors, and our coding, make of a mask or of the weights in any checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..backbones.weights import read_state
from ..embedding.loading import NamedFile
from ..errors import BadWeightsError, ConfigError
from ..files import RunFile
from ..maskfile.compressing import Sizes, sizes_of_mask, sizes_of_weights
from ..masking import MaskedModel
from ..training.tuned import FORMAT, open_tuned
from .opening import load_embedder

_SHARED = 2  # times the file's bytes that its tensors may have: some share memory with others


def compress(
    what: Path,
    *,
    backbone: str | None = None,
    weights: Path | None = None,
    may_use: Callable[[str], bool] | None = None,
) -> Sizes:
    """Sizes of a mask (.smn), of trained weights, or of any state dict; of a run folder, what it has learned.

    A mask is decoded first, on the backbone that it names: `backbone`, `weights` and `may_use` are as in
    `load_embedder`. Files that are broken, or no such files, are refused.
    """
    file = _learned(what)
    if file.suffix != Path(RunFile.MASK).suffix:
        return sizes_of_weights(_weights(file))
    model = load_embedder(what, backbone=backbone, weights=weights, may_use=may_use).model
    if not isinstance(model, MaskedModel):
        raise ConfigError(
            f"{what} is not a single mask",
            expected="a mask file (.smn), or weights (.safetensors, .pt)",
            found="a cascade",
            todo="see the bytes of its parts: selfmask inspect FILE",
        )
    return sizes_of_mask(model.pack(), dict(model.base.named_parameters()))


def _learned(what: Path) -> Path:
    """The file that a run folder is about."""
    if not what.is_dir():
        return what
    files = [what / name for name in (RunFile.CASCADE, RunFile.TUNED, RunFile.MASK)]
    return next((file for file in files if file.is_file()), files[-1])


def _weights(file: Path) -> list[Tensor]:
    """All weights that a file holds, each once; of our own files without the head, which masks are counted without."""
    with NamedFile(file) as named:
        if named.format == FORMAT:
            return list(open_tuned(named.container).weights.values())
    found = {
        (tensor.data_ptr(), tensor.shape, tensor.stride()): tensor
        for tensor in read_state(file).values()
        if tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type == "cpu"
    }
    size, most = sum(tensor.nbytes for tensor in found.values()), _SHARED * file.stat().st_size
    if not size or size > most:
        raise BadWeightsError(
            f"{file} does not hold what it says" if size else f"{file} holds no weights",
            expected=f"tensors of floating-point numbers, of at most {most:,} bytes together",
            found=f"{size:,} bytes",
        )
    return list(found.values())
