"""Which of many models is best on some images? All are seen on a few; who is proven worse is seen on no more.

Every round looks at more images, as those of the rounds before and as many new ones, and no model is run twice on an
image. Scores are those of `quality.py`, compared image by image with those of whoever is ahead. The chance that the
best one drops out is at most 5 %: it would have to be beaten, beyond its error, by one of its rivals in one of the
rounds, and the error that is allowed is divided by as many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from .quality import LEAST, Gain, as_quality


class Runner(Protocol):
    """One model in a race."""

    def scores(self, images: int) -> Tensor:
        """Its scores [copies, images] on the first images, as in `Quality`; in every round they are more."""

    def forget(self) -> None:
        """It dropped out: nothing more is asked of it."""


@dataclasses.dataclass(frozen=True)
class Place:
    """How a model fared.

    images: how many it was seen on. quality: among these; it falls with their number, so those of models that were seen
    on as many can be compared. gain: how much higher its scores are than those of the measure that all are held
    against, on the same images. worse: whether another was proven better.
    """

    name: str
    images: int
    quality: float
    gain: Gain
    worse: bool


@dataclasses.dataclass(frozen=True)
class Race:
    """places: the best first. helps: whether the best is proven better than what all are held against."""

    places: list[Place]
    helps: bool

    @property
    def best(self) -> Place:
        return self.places[0]

    @property
    def clear(self) -> bool:
        """Whether all but the best are proven worse."""
        return all(place.worse for place in self.places[1:])


def race(runners: Mapping[str, Runner], kinds: Tensor, rounds: Sequence[int], against: str) -> Race:
    """Run models in rounds of growing numbers of images, until it is clear which is best.

    kinds: of the distorted copies [copies, n]. against: the one that is in all rounds, and that others are to beat.
    """
    looks = max(1, len(rounds) * (len(runners) - 1))
    left, places = list(runners), dict[str, Place]()

    def compared(before: Tensor, after: Tensor) -> Gain:
        return Gain.of(before, after, kinds[:, : before.shape[1]])

    for images in rounds:
        scores: dict[str, Tensor] = {against: runners[against].scores(images)}
        ahead = against
        for name in [name for name in left if name != against]:
            scores[name] = runners[name].scores(images)
            if scores[name].mean() > scores[ahead].mean():
                ahead = name
            gain = compared(scores[against], scores[name])
            places[name] = Place(name, images, as_quality(scores[name]), gain, worse=False)
            if compared(scores[name], scores[ahead]).proven(looks):  # at once: what it saw takes memory
                _drop(name, runners, places, scores)
        for name in [name for name in scores if name not in (ahead, against)]:
            if compared(scores[name], scores[ahead]).proven(looks):
                _drop(name, runners, places, scores)
        beaten = ahead != against and compared(scores[against], scores[ahead]).proven(looks)
        none = compared(scores[against], scores[against])
        places[against] = Place(against, images, as_quality(scores[against]), none, worse=beaten)
        # Those that did well go first the next time: what is worse is then seen sooner.
        left = sorted(scores, key=lambda name: -float(scores[name].mean()))
        if len(left) == 1 or (len(left) == 2 and beaten):
            break
    helps = beaten and places[ahead].quality > LEAST
    return Race([*_ordered(left, places), *_ordered([name for name in runners if name not in left], places)], helps)


def _drop(name: str, runners: Mapping[str, Runner], places: dict[str, Place], scores: dict[str, Tensor]) -> None:
    runners[name].forget()
    places[name] = dataclasses.replace(places[name], worse=True)
    del scores[name]


def _ordered(names: Sequence[str], places: Mapping[str, Place]) -> Iterator[Place]:
    """Who was seen on more images was longer among the best; gains, other than qualities, hardly depend on that."""
    return iter(sorted((places[name] for name in names), key=lambda place: (-place.images, -place.gain.mean)))
