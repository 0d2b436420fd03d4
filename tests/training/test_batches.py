"""Batches depend on nothing but the step."""

from __future__ import annotations

import pytest
import torch

from selfmask.data import ImageStore, open_images
from selfmask.data.views import MultiCrop, ViewsConfig
from selfmask.errors import ConfigError, TooFewImagesError
from selfmask.training import Processes, Steps

from .small import HOW, Clothes


class Rank(Processes):
    """One of several processes, as far as sharing out is concerned."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


def steps(batch_size: int = 8, *, seed: int = 0, processes: Processes | None = None, labels: bool = False) -> Steps:
    store = ImageStore(open_images(Clothes(20)), side=32)
    views = MultiCrop(ViewsConfig(size=16, small_size=8, small=1), HOW)
    return Steps(
        store,
        views,
        batch_size=batch_size,
        seed=seed,
        processes=processes or Rank(0, 1),
        with_labels=labels,
    )


def test_a_batch_can_be_made_at_any_time() -> None:
    there, back = steps(), steps()
    forward = [there[step] for step in range(5)]
    backward = [back[step] for step in reversed(range(5))][::-1]
    for one, other in zip(forward, backward, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(forward[0][0], forward[1][0])


def test_worker_processes_make_the_same_batches() -> None:
    with steps().between(1, 4, workers=0) as here, steps().between(1, 4, workers=2) as elsewhere:
        for one, other in zip(here, elsewhere, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_epoch_sees_every_image_at_most_once_and_the_next_in_another_order() -> None:
    batches = steps()
    assert batches.per_epoch == 2
    first, second = batches._order(0), batches._order(1)
    assert sorted(first.tolist()) == list(range(20))
    assert first.tolist() != second.tolist()


def test_labels_belong_to_their_images() -> None:
    batches = steps(labels=True)
    views, labels = batches[0]
    chosen = batches._order(0)[:8]
    assert labels.tolist() == [Clothes(20).targets[i] for i in chosen]
    assert len(views) == 3


def test_processes_share_one_batch() -> None:
    whole = steps()[3]
    parts = [steps(processes=Rank(rank, 2))[3] for rank in range(2)]
    for view, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(view, torch.cat([first, second]))


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="divided evenly"):
        steps(processes=Rank(0, 3))


def test_fewer_images_than_a_batch_are_refused_with_advice() -> None:
    with pytest.raises(TooFewImagesError, match="--batch-size 10"):
        steps(batch_size=64)


def test_progress_by_the_epoch_goes_from_none_in_the_first_to_all_in_the_last() -> None:
    made = steps()  # two steps an epoch
    assert [made.progress_by_epoch(step, 8) for step in range(8)] == [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1]
    assert [made.progress_by_epoch(step, 2) for step in range(2)] == [0, 0.5]
