"""A mask against its frozen backbone, on labelled images."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Images
from ..embedding import Progress, embed
from ..errors import EvaluationError
from ..loading import Embedder
from ..masking import MaskedModel
from .knn import knn_accuracy
from .probe import stratified


@dataclasses.dataclass(frozen=True)
class KnnResult:
    """Top-1 accuracy of the frozen backbone and, where there is one, of the mask on it."""

    knn_before: float
    knn_after: float | None
    k: int
    temperature: float
    train_images: int
    test_images: int
    classes: int


def knn_before_after(
    embedder: Embedder,
    train: Images,
    test: Images | None,
    *,
    k: int = 200,
    temperature: float = 0.1,
    batch_size: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> KnnResult:
    """k-NN accuracy on `test` with `train` as the bank, without the mask and with it.

    Without `test`, `train` is split into halves, class by class and at random. Images that do not decode are left out.
    """
    masked = isinstance(embedder.model, MaskedModel)
    model = BothVectors(embedder.model) if isinstance(embedder.model, MaskedModel) else embedder.model
    total = len(train) + (0 if test is None else len(test))

    known = [_labels(images) for images in (train, test) if images is not None]  # before the work

    def vectors(images: Images, labels: list[int], before: int) -> tuple[Tensor, Tensor]:
        advance = None if progress is None else lambda done, _: progress(before + done, total)
        rows, kept = embed(model, images, embedder.preprocessing, batch_size=batch_size, progress=advance)
        return rows, torch.tensor(labels)[kept]

    bank, labels = vectors(train, known[0], 0)
    if test is not None:
        queries, truth = vectors(test, known[1], len(train))
    else:
        first = stratified(labels.numpy(), 0.5, seed)
        second = np.setdiff1d(np.arange(len(labels)), first)
        queries, truth = bank[second], labels[second]
        bank, labels = bank[first], labels[first]
    k = min(k, len(bank))
    sides = zip(bank.chunk(1 + masked, 1), queries.chunk(1 + masked, 1), strict=True)
    accuracies = [knn_accuracy(b, labels, q, truth, k=k, temperature=temperature) for b, q in sides]
    return KnnResult(
        knn_before=accuracies[0],
        knn_after=accuracies[1] if masked else None,
        k=k,
        temperature=temperature,
        train_images=len(bank),
        test_images=len(queries),
        classes=len(set(labels.tolist())),
    )


def _labels(images: Images) -> list[int]:
    if images.labels is None:
        raise EvaluationError(
            "these images have no labels",
            expected="a folder with a sub-folder for each class, a list with labels, or a labelled data set",
            todo="sort some images into folders by class; `selfmask embed` works without labels",
        )
    return images.labels


class BothVectors(nn.Module):
    """The frozen backbone's vector and the mask's, side by side: every image is decoded only once."""

    def __init__(self, masked: MaskedModel) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, images: Tensor) -> Tensor:
        with self.masked.disable_mask():
            before = self.masked(images)
        return torch.cat([before, self.masked(images)], 1)
