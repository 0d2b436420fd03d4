"""Races: who is proven worse drops out early, and the best one hardly ever does."""

from __future__ import annotations

import torch
from torch import Tensor

from selfmask.training.racing import race

KINDS = (torch.arange(256)[None] + torch.tensor([[0], [3]])) % 7
ROUNDS = [64, 128, 256]


class Known:
    """A model whose scores are known: what all find hard, its own luck, and how good it is."""

    def __init__(self, better: float, seed: int, noise: float = 0.5) -> None:
        common = torch.randn(2, 256, generator=torch.Generator().manual_seed(999))
        own = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed))
        self.all = common + noise * own + better - 3.0
        self.asked: list[int] = []
        self.forgotten = False

    def scores(self, images: int) -> Tensor:
        assert not self.forgotten
        self.asked.append(images)
        return self.all[:, :images]

    def forget(self) -> None:
        self.forgotten = True


def test_a_clear_case_ends_after_the_first_round() -> None:
    runners = {"frozen": Known(0, 0), "good": Known(1.5, 1), "bad": Known(-1.5, 2)}
    found = race(runners, KINDS, ROUNDS, "frozen")
    assert (found.best.name, found.helps, found.clear) == ("good", True, True)
    assert [each.asked for each in runners.values()] == [[64], [64], [64]]
    assert runners["bad"].forgotten
    places = {place.name: place for place in found.places}
    assert [place.name for place in found.places] == ["good", "frozen", "bad"]
    assert abs(places["good"].gain.mean - 1.5) < 0.3
    assert places["frozen"].gain.mean == 0
    assert (places["bad"].worse, places["frozen"].worse, places["good"].worse) == (True, True, False)


def test_what_is_not_told_apart_is_seen_on_all_images() -> None:
    runners = {"frozen": Known(0, 0), "good": Known(1.0, 1), "twin": Known(1.0, 2), "bad": Known(-1.0, 3)}
    found = race(runners, KINDS, ROUNDS, "frozen")
    assert found.best.name in ("good", "twin")
    assert found.helps
    assert not found.clear
    assert runners["good"].asked == runners["twin"].asked == runners["frozen"].asked == ROUNDS
    assert runners["bad"].asked == [64]


def test_no_mask_may_be_better_than_the_backbone() -> None:
    found = race({"frozen": Known(0, 0), "a": Known(-2, 1), "b": Known(-2, 2)}, KINDS, ROUNDS, "frozen")
    assert (found.best.name, found.helps, found.clear) == ("frozen", False, True)
    assert found.best.images == 64
    found = race({"frozen": Known(0, 0), "a": Known(0.01, 1)}, KINDS, ROUNDS, "frozen")
    assert not found.helps
    assert not found.clear
    assert found.best.images == 256


def test_the_best_is_hardly_ever_lost() -> None:
    """Of twenty, of which several are nearly as good: in 20 races it drops out no more often than chance allows."""
    lost = found = 0
    for seed in range(20):
        runners = {"frozen": Known(0, 100 * seed)}
        runners |= {f"mask-{i}": Known(0.5 - 0.05 * i, 100 * seed + i + 1) for i in range(20)}
        ended = race(runners, KINDS, ROUNDS, "frozen")
        places = {place.name: place for place in ended.places}
        lost += places["mask-0"].worse
        found += ended.best.name == "mask-0"
        assert sum(sum(each.asked[-1:]) for each in runners.values()) < 0.8 * 256 * 21
    assert lost <= 3  # 1 is expected at most
    assert found >= 6


def test_scores_that_are_hardly_any_help_nobody() -> None:
    """Better than a backbone that tells nothing, but still as good as nothing itself."""
    frozen, mask = Known(-9, 0), Known(-7, 1)
    found = race({"frozen": frozen, "mask": mask}, KINDS, ROUNDS, "frozen")
    assert found.best.name == "mask"
    assert found.best.quality < 0.03
    assert not found.helps
