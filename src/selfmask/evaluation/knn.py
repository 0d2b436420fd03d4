"""k-NN: how well the nearest neighbours of an image, by cosine similarity, tell its class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import EvaluationError
from .inputs import OnProgress, as_labels, check_features, lengths_of
from .metrics import TOP

_AT_ONCE = 1 << 24  # similarities held at a time: 64 MB, whatever the bank


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor | Sequence[int],
    queries: Tensor,
    query_labels: Tensor | Sequence[int],
    *,
    k: int = 200,
    temperature: float = 0.1,
) -> float:
    """The share of queries whose class the weighted vote of their `k` nearest in the bank gets right (top-1)."""
    truth = as_labels(query_labels, queries, "the queries").to(bank.device)
    predicted = knn_predict(bank, bank_labels, queries, k=k, temperature=temperature)
    return float((predicted == truth).double().mean())


def knn_predict(
    bank: Tensor,
    bank_labels: Tensor | Sequence[int],
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
) -> Tensor:
    """The class of each query: its `k` nearest vote with weight exp(similarity / temperature)."""
    return knn_rank(bank, bank_labels, queries, k=k, temperature=temperature)[:, 0]


def knn_rank(
    bank: Tensor,
    bank_labels: Tensor | Sequence[int],
    queries: Tensor,
    *,
    k: int = 200,
    temperature: float = 0.1,
    on_progress: OnProgress | None = None,
) -> Tensor:
    """The five classes with the most votes for each query (or all, if they are fewer), most first; -1 for no votes."""
    ranked: list[Tensor] = []
    for classes, votes in knn_votes(bank, bank_labels, queries, k=k, temperature=temperature):
        most = votes.topk(min(TOP, len(classes)), dim=1)
        ranked.append(classes[most.indices].masked_fill_(most.values == 0, -1))
        if on_progress is not None:
            on_progress(sum(map(len, ranked)) / len(queries))
    return torch.cat(ranked)


def knn_votes(
    bank: Tensor, bank_labels: Tensor | Sequence[int], queries: Tensor, *, k: int = 200, temperature: float = 0.1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Classes of the bank, ascending, and the votes [some queries, classes] for them, for some queries at a time."""
    if not temperature > 0:
        raise EvaluationError("the temperature must be positive", expected="0.1 in the paper", found=temperature)
    # Numbered anew, so that no more classes are counted than the bank has images, however large their labels.
    numbers = as_labels(bank_labels, bank, "the bank").to(bank.device)
    classes: Tensor
    classes, labels = numbers.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    for similarity, neighbours in _neighbours(bank, queries, k):
        # Relative to the nearest: a factor common to all votes, and exp cannot overflow.
        weights = similarity.sub(similarity[:, :1]).div_(temperature).exp_()
        yield classes, weights.new_zeros(len(weights), len(classes)).scatter_add_(1, labels[neighbours], weights)


def nearest(bank: Tensor, queries: Tensor, k: int, *, exclude_self: bool = False) -> Tensor:
    """The numbers of the `k` nearest in the bank of each query, nearest first.

    With `exclude_self` the queries are the bank itself, and no image is its own neighbour.
    """
    return torch.cat([neighbours for _, neighbours in _neighbours(bank, queries, k, exclude_self)])


def neighbours_of(images: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities and numbers [n, k] of the other images nearest to each, nearest first."""
    found = [(near.clone(), numbers) for near, numbers in _neighbours(images, images, k, exclude_self=True)]
    similarities, numbers = zip(*found, strict=True)
    return torch.cat(similarities), torch.cat(numbers)


def _neighbours(bank: Tensor, queries: Tensor, k: int, exclude_self: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Similarities and numbers of the `k` nearest, nearest first, for some queries at a time."""
    bank, queries = (check_features(x, "the images") for x in (bank, queries))
    if bank.shape[1] != queries.shape[1] or (exclude_self and len(bank) != len(queries)):
        raise EvaluationError("the queries do not match the bank", expected=list(bank.shape), found=list(queries.shape))
    k = _possible(k, len(bank) - exclude_self)
    # The similarities are divided by the lengths, not the bank: a copy of it could be more than there is memory for.
    lengths = lengths_of(bank).clamp_(min=1e-12)
    step = min(max(1, _AT_ONCE // len(bank)), len(queries))
    similarities = bank.new_empty(step, len(bank))
    for start in range(0, len(queries), step):
        some = F.normalize(queries[start : start + step], dim=1)
        similarity = torch.mm(some, bank.T, out=similarities[: len(some)]).div_(lengths)
        if exclude_self:
            similarity.diagonal(start).fill_(-torch.inf)
        found = similarity.topk(k, dim=1)
        yield found.values, found.indices


def _possible(k: int, size: int) -> int:
    if k < 1 or size < 1:
        raise EvaluationError(
            "there are no neighbours", expected="k >= 1 and at least one other image", found=f"k={k}, {size} images"
        )
    if k > size:
        warnings.warn(f"k = {k} is more than the bank holds: using all {size} of it", stacklevel=4)
    return min(k, size)
