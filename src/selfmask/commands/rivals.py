"""Methods that learn without labels: each the same way, with the same objective, steps, seed and gate.

Labels, where there are any, only measure. The frozen backbone and AdaBN, which takes the batch-norm statistics of the
images and learns nothing, stand beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..backbones import Backbone
from ..data import Images, SomeImages
from ..data.pixels import fit, normalised
from ..embedding.embedder import Embedder, PlainVariants
from ..errors import BadImageError
from ..evaluation.measuring import with_maps
from ..evaluation.rows import rows_of
from ..files import RunFile
from ..masking import MaskConfig, MaskedModel, get_masked_model
from ..masking.norms import norm_layers
from ..preprocessing import Preprocessing, preprocessing_for
from ..report.rivals import RivalCell
from ..training import Processes, open_folder
from .adapt_config import AdaptConfig, AdaptMethod
from .cells import Cells
from .evaluate import features_of
from .job import Job

ADABN = "adabn"
_ENOUGH = 4096  # images that batch-norm statistics are taken of
_BATCH = 64
_A_LOOK = 20  # what a cell without training costs, in steps: only the estimate of time left needs to know


class RivalsRunner(Cells[RivalCell]):
    """Runs cells.

    test: labelled images to measure with, or None where there are no labels.
    """

    def __init__(self, job: Job, test: Images | None, config: AdaptConfig) -> None:
        super().__init__(job.folder, job.display)
        self.job, self.test, self.config = job, test, config

    def cost(self, cell: RivalCell) -> int:
        if cell.method not in get_args(AdaptMethod):
            return _A_LOOK
        return _A_LOOK + self.config.number_of_steps(max(1, len(self.job.images) // self.config.batch_size))

    def run(self, cell: RivalCell) -> None:
        start = time.perf_counter()
        with open_folder(self.place(cell), True, Processes()) as folder:
            assert folder is not None
            backbone = self.job.load()
            preprocessing = preprocessing_for(backbone.preprocessing, None, self.config.size)
            model, numbers = self._made(cell, backbone, preprocessing)
            seconds = numbers.pop("seconds", time.perf_counter() - start)
            numbers |= self._measured(cell.method, model, preprocessing)
            folder.write_json(RunFile.RESULT, {**numbers, "seed": cell.seed, "seconds": seconds})

    def _made(
        self, cell: RivalCell, backbone: Backbone, preprocessing: Preprocessing
    ) -> tuple[nn.Module, dict[str, Any]]:
        """What the method makes of the backbone, and what that took."""
        if cell.method == ADABN:
            adapted = adabn(backbone.model, self.job.images, preprocessing)
            return adapted, {"bytes": len(adapted.mask_bytes())}
        if cell.method not in get_args(AdaptMethod):
            return backbone.model, {"bytes": 0}
        out = self.job.folder / "adapted" / cell.name
        config = self.config.changed(method=cast(AdaptMethod, cell.method), seed=cell.seed)
        result = self.job.adapted(backbone, config, out, report=False)
        file = out / (RunFile.MASK if cell.method == "mask" else RunFile.TUNED)
        said = ("quality_before", "quality_after", "gain", "gain_error", "best_step", "kept")
        numbers = {name: result.result.get(name) for name in said}
        return result.model, {**numbers, "bytes": file.stat().st_size, "seconds": result.result["seconds"]}

    def _measured(self, method: str, model: nn.Module, preprocessing: Preprocessing) -> dict[str, Any]:
        """Accuracies as they are and with a map, where there are labels, and what the map takes."""
        if self.test is None:
            return {"rows": {}}
        model = model.to(Processes().device).eval()
        embedder = Embedder("", model, preprocessing, 0, variants=PlainVariants(model, method, method))
        features = with_maps(features_of(embedder, self.job.images, self.test))
        return {"rows": rows_of(features), "map_bytes": sum(len(each.as_bytes()) for each in features.maps.values())}


def adabn(model: nn.Module, images: Images, preprocessing: Preprocessing) -> MaskedModel:
    """The backbone with the batch-norm statistics of these images in place of its own (Li et al., 2016).

    As a mask that leaves all weights on: so it can be stored and weighed like the others.
    """
    adapted = get_masked_model(model, MaskConfig(norm="recalibrate"))
    adapted.preprocessing = preprocessing
    if norm_layers(model):
        adapted.to(Processes().device).recalibrate(_batches(images, preprocessing))
    return adapted.eval()


def _batches(images: Images, preprocessing: Preprocessing) -> Iterator[Tensor]:
    """Some of the images, as the backbone wants them; unreadable ones are left out."""
    order = np.random.default_rng(0).permutation(len(images))[:_ENOUGH]
    some, ready = SomeImages(images, order.tolist()), list[Tensor]()
    for number in range(len(some)):
        try:
            ready.append(fit(some.load(number, near=max(preprocessing.size)), preprocessing))
        except BadImageError:
            continue
        if len(ready) == _BATCH:
            yield _pixels(ready, preprocessing)
            ready = []
    if len(ready) > 1 or len(some) < _BATCH:  # a batch of one has no spread; where it is all there is, so be it
        yield _pixels(ready, preprocessing)


def _pixels(ready: list[Tensor], preprocessing: Preprocessing) -> Tensor:
    pixels = torch.stack(ready).to(Processes().device, torch.float32, memory_format=torch.channels_last)
    return normalised(pixels, preprocessing)
