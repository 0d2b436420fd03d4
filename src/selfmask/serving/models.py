"""What a name stands for, in memory: the backbone alone, a mask on it, or a cascade of masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ..cascade.model import Cascade
from ..embedding.vectors import run_batch
from ..evaluation.feature_map import FeatureMap
from ..masking import MaskedModel
from ..masking.direct import base_meant
from ..masking.switching import Switch
from ..objectives.heads import Head
from ..preprocessing import Preprocessing
from .hot import HotViews
from .mixed import MixedPasses, Share


class Mixable(NamedTuple):
    """What it takes to run images of a model together with those of others."""

    passes: MixedPasses
    switch: Switch


class Model(Protocol):
    """A model that is ready to run. A file that is replaced makes another one; who still runs the old one may go on."""

    name: str
    preprocessing: Preprocessing
    width: int
    head: Head | None
    map: FeatureMap | None
    fingerprint: str
    """Of all that its vectors depend on, but images and preprocessing: as an `Embedder` has it."""
    mixable: Mixable | None
    """None where its images must have a pass to themselves."""

    @property
    def nbytes(self) -> int:
        """Of its packed masks and all else that it holds, besides expanded weights."""

    def vectors(self, images: Tensor) -> Tensor:
        """Of uint8 images [n, 3, H, W] that were fitted: float32 [n, width]."""


def can_share(one: Model, other: Model) -> bool:
    """Whether images of both can be in one pass."""
    return one.mixable is not None and other.mixable is not None and one.preprocessing == other.preprocessing


def vectors_of(groups: Sequence[tuple[Model, int]], images: Tensor) -> Tensor:
    """Of images, the first so many of which are of the first model, and so on: of one model, or of some that share."""
    model = groups[0][0]
    if len(groups) == 1 or model.mixable is None:
        return model.vectors(images)
    shares = [Share(each.mixable.switch, count) for each, count in groups if each.mixable is not None]
    return model.mixable.passes.vectors(shares, images, model.preprocessing)


class FrozenModel:
    """The backbone as it is."""

    head: Head | None = None
    map: FeatureMap | None = None
    nbytes = 0

    def __init__(
        self,
        name: str,
        base: nn.Module,
        preprocessing: Preprocessing,
        width: int,
        fingerprint: str,
        passes: MixedPasses | None = None,
    ) -> None:
        self.name, self.base, self.fingerprint = name, base, fingerprint
        self.preprocessing, self.width = preprocessing, width
        none, shares = Switch({}, {}), passes is not None and passes.takes(Switch({}, {}), preprocessing.size)
        self.mixable = Mixable(passes, none) if passes is not None and shares else None

    def vectors(self, images: Tensor) -> Tensor:
        with base_meant():
            return run_batch(self.base, images, self.preprocessing)


class MaskModel:
    """A mask on the backbone."""

    def __init__(
        self,
        name: str,
        switch: Switch,
        views: HotViews,
        preprocessing: Preprocessing,
        width: int,
        head: Head | None,
        whiten: FeatureMap | None,
        fingerprint: str,
        passes: MixedPasses | None = None,
    ) -> None:
        self.name, self.switch, self._views, self.fingerprint = name, switch, views, fingerprint
        self.preprocessing, self.width, self.head, self.map = preprocessing, width, head, whiten
        shares = passes is not None and passes.takes(switch, preprocessing.size)
        self.mixable = Mixable(passes, switch) if passes is not None and shares else None

    @property
    def nbytes(self) -> int:
        return self.switch.nbytes + _bytes_beside(self.head, self.map)

    def vectors(self, images: Tensor) -> Tensor:
        with self._views.lease(self, self.switch) as view:
            return run_batch(view, images, self.preprocessing)


class CascadeModel:
    """A cascade on the backbone: the dispatcher, and for each image the expert that the router chooses."""

    head: Head | None = None
    mixable: Mixable | None = None

    def __init__(
        self, name: str, cascade: Cascade, views: HotViews, whiten: FeatureMap | None, fingerprint: str
    ) -> None:
        self.name, self.map, self.fingerprint = name, whiten, fingerprint
        self.preprocessing, self.width = cascade.preprocessing, cascade.width
        self._cascade = _SwitchedCascade(cascade, self, views)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._cascade.switches.values()) + _bytes_beside(None, self.map)

    def vectors(self, images: Tensor) -> Tensor:
        return run_batch(self._cascade, images, self.preprocessing)


class _SwitchedCascade(Cascade):
    """A cascade whose masks are put in place by views: it waits for nobody, and others need not wait for it."""

    def __init__(self, cascade: Cascade, owner: object, views: HotViews) -> None:
        base = cascade.masked.base
        empty = MaskedModel(base).eval()
        super().__init__(empty, cascade.router, cascade.combinations, cascade.preprocessing, cascade.settings)
        self.eval()
        self.switches = {mask: _switch(cascade.masked, mask) for mask in cascade.masked.mask_names}
        self._owner, self._views = owner, views

    @contextmanager
    def _masked_by(self, mask: str) -> Iterator[nn.Module]:
        with self._views.lease((self._owner, mask), self.switches[mask]) as view:
            yield view


def _switch(masked: MaskedModel, mask: str) -> Switch:
    with masked.using(mask):
        return Switch.of(masked.pack(), masked.base)


def _bytes_beside(head: Head | None, whiten: FeatureMap | None) -> int:
    classes = 0 if head is None else sum(value.nbytes for value in head.state_dict().values())
    # The matrix that a map makes when it is first used is of 64 bits.
    return classes + (0 if whiten is None else whiten.codes.nbytes + 8 * whiten.width**2)
