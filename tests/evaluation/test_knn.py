"""k-NN equals its definition, written out in loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from selfmask.errors import EvaluationError, LabelsError
from selfmask.evaluation import knn, knn_accuracy, knn_predict, nearest
from selfmask.evaluation.knn import knn_rank


def clustered(n: int, classes: int = 7, width: int = 12, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    labels = torch.randint(classes, (n,))
    return torch.eye(classes, width)[labels] + spread * torch.randn(n, width), labels


def oracle(bank: Tensor, labels: Tensor, queries: Tensor, k: int, temperature: float) -> list[list[int]]:
    """The definition: cosine similarity in float64, the k most similar, each votes exp(similarity / temperature).

    Classes by votes, most first; -1 where fewer than five have any.
    """
    b, q = bank.double().numpy(), queries.double().numpy()
    ranked = []
    for query in q:
        similarity = [float(query @ row / (np.linalg.norm(query) * np.linalg.norm(row))) for row in b]
        votes: dict[int, float] = {}
        for i in sorted(range(len(b)), key=lambda i: -similarity[i])[:k]:
            votes[int(labels[i])] = votes.get(int(labels[i]), 0.0) + math.exp(similarity[i] / temperature)
        ranked.append((sorted(votes, key=lambda label: -votes[label]) + [-1] * 5)[:5])
    return ranked


@pytest.mark.parametrize("k", [1, 5, 50, 120])
@pytest.mark.parametrize("temperature", [0.07, 0.1, 1.0])
def test_equals_the_definition(k: int, temperature: float) -> None:
    bank, labels = clustered(120)
    queries, truth = clustered(60)
    expected = oracle(bank, labels, queries, k, temperature)
    assert knn_rank(bank, labels, queries, k=k, temperature=temperature).tolist() == expected
    winners = np.array(expected)[:, 0]
    assert knn_predict(bank, labels, queries, k=k, temperature=temperature).tolist() == winners.tolist()
    share = float(np.mean(winners == truth.numpy()))
    assert knn_accuracy(bank, labels, queries, truth.tolist(), k=k, temperature=temperature) == pytest.approx(share)


def test_the_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, labels = clustered(90)
    queries, _ = clustered(50)
    whole = knn_predict(bank, labels, queries, k=9), nearest(bank, queries, 9)
    own = nearest(bank, bank, 4, exclude_self=True)
    monkeypatch.setattr(knn, "_AT_ONCE", 7 * 90)
    assert torch.equal(knn_predict(bank, labels, queries, k=9), whole[0])
    assert torch.equal(nearest(bank, queries, 9), whole[1])
    assert torch.equal(nearest(bank, bank, 4, exclude_self=True), own)


def test_labels_may_be_any_numbers() -> None:
    bank, labels = clustered(80)
    queries, _ = clustered(40)
    plain = knn_predict(bank, labels, queries, k=5)
    assert torch.equal(knn_predict(bank, labels * 10**12 - 5, queries, k=5), plain * 10**12 - 5)


def test_a_low_temperature_does_not_overflow() -> None:
    bank, labels = clustered(80)
    queries, _ = clustered(40)
    sharp = knn_predict(bank, labels, queries, k=80, temperature=1e-4)
    assert torch.equal(sharp, knn_predict(bank, labels, queries, k=1))  # the nearest alone decides


def test_scale_does_not_matter() -> None:
    bank, labels = clustered(80)
    queries, _ = clustered(40)
    scaled = knn_predict(bank * torch.rand(80, 1).add(0.1), labels, queries * 1000, k=11)
    assert torch.equal(scaled, knn_predict(bank, labels, queries, k=11))


def test_nearest_is_sorted_and_leaves_itself_out() -> None:
    points = torch.tensor([[0.0], [0.1], [0.3], [0.7]])
    bank = torch.cat([points.cos(), points.sin()], 1)
    assert nearest(bank, bank, 2).tolist() == [[0, 1], [1, 0], [2, 1], [3, 2]]
    assert nearest(bank, bank, 2, exclude_self=True).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]


def test_k_larger_than_the_bank_is_said() -> None:
    bank, labels = clustered(20)
    with pytest.warns(UserWarning, match="using all 20"):
        predicted = knn_predict(bank, labels, bank, k=200)
    assert torch.equal(predicted, knn_predict(bank, labels, bank, k=20))


def test_memory_is_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = torch.Tensor.topk

    def topk(self: Tensor, k: int, dim: int = -1) -> object:
        sizes.append(self.numel())
        return original(self, k, dim)

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    monkeypatch.setattr(knn, "_AT_ONCE", 10_000)
    bank = torch.randn(3000, 4)
    knn_predict(bank, torch.arange(3000), bank[:200], k=3)  # as many classes as images
    assert max(sizes) <= 10_000


BAD = {
    "no bank": (torch.empty(0, 4), torch.empty(0, dtype=torch.long), torch.ones(2, 4), {}),
    "no queries": (torch.ones(2, 4), torch.zeros(2, dtype=torch.long), torch.empty(0, 4), {}),
    "another width": (torch.ones(2, 4), torch.zeros(2, dtype=torch.long), torch.ones(2, 5), {}),
    "labels missing": (torch.ones(2, 4), torch.zeros(1, dtype=torch.long), torch.ones(2, 4), {}),
    "labels not whole": (torch.ones(2, 4), torch.zeros(2), torch.ones(2, 4), {}),
    "NaN": (torch.full((2, 4), torch.nan), torch.zeros(2, dtype=torch.long), torch.ones(2, 4), {}),
    "k 0": (torch.ones(2, 4), torch.zeros(2, dtype=torch.long), torch.ones(2, 4), {"k": 0}),
    "temperature 0": (torch.ones(2, 4), torch.zeros(2, dtype=torch.long), torch.ones(2, 4), {"temperature": 0.0}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_evaluated_is_refused(case: str) -> None:
    bank, labels, queries, options = BAD[case]
    with pytest.raises(LabelsError if case.startswith("labels") else EvaluationError):
        knn_predict(bank, labels, queries, **{"k": 1, **options})


def test_fewer_than_five_classes_are_all_ranked() -> None:
    bank, labels = clustered(60, classes=3)
    queries, _ = clustered(20, classes=3)
    ranked = knn_rank(bank, labels, queries, k=60)
    assert ranked.shape == (20, 3)
    assert ranked.sort(1).values.tolist() == [[0, 1, 2]] * 20


def test_vectors_of_zeros_are_like_nothing() -> None:
    bank, labels = clustered(30)
    assert knn_rank(torch.cat([bank, torch.zeros(1, 12)]), [*labels.tolist(), 6], bank, k=30).isfinite().all()


def test_how_far_it_is_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "_AT_ONCE", 10 * 90)
    bank, labels = clustered(90)
    shares: list[float] = []
    knn_rank(bank, labels, bank[:50], k=3, on_progress=shares.append)
    assert shares == [0.2, 0.4, 0.6, 0.8, 1.0]
