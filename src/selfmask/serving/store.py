"""Names to models: read from files when they are first asked for, kept packed, and read again when a file changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from ..backbones import Backbone
from ..cascade.combination import CONDITIONAL
from ..cascade.file import is_cascade, open_cascade
from ..cascade.model import Cascade
from ..embedding.embedder import base_fingerprint, mask_fingerprint
from ..embedding.mapping import map_of_run
from ..errors import FeatureMapError, HeadError, MaskFileError, UnusableModelError
from ..evaluation.feature_map import FeatureMap, MadeFor
from ..maskfile import OpenedMask, Source, open_container
from ..masking import MaskedModel
from ..masking.switching import Switch
from ..memory import give_back
from ..objectives.heads import Head, head_of
from ..preprocessing import of_file
from ..shelf import Found
from .hot import HotViews
from .mixed import MixedPasses
from .models import CascadeModel, FrozenModel, MaskModel, Model
from .shelf import FROZEN, Shelf, opened, unknown


class _Kept(NamedTuple):
    """What was made of a file: a model, or why there is none."""

    found: Found
    result: Model | UnusableModelError
    nbytes: int


class Store:
    """The models of a shelf. Those in memory take at most `room` bytes; which file is meant is looked up every time."""

    def __init__(
        self,
        backbone: Backbone,
        shelf: Shelf,
        views: HotViews,
        room: int,
        size: int | None = None,
        count: Callable[[str], None] = lambda what: None,
        *,
        passes: MixedPasses | None = None,
    ) -> None:
        """size: of images, where it is not to be the one that files say. count: told of every "hit" and "miss". passes:
        that models may share; None where each has its own."""
        self.backbone, self.shelf, self._views, self._room, self._count = backbone, shelf, views, room, count
        self._size, self._passes = size, passes
        self.masked = MaskedModel(backbone.model)
        self._base_print = base_fingerprint(backbone.model, self.masked.fingerprints)
        preprocessing = of_file(backbone.preprocessing, backbone.preprocessing, size)
        self.frozen = FrozenModel(FROZEN, backbone.model, preprocessing, backbone.width, self._base_print, passes)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._loading: dict[tuple[str, Found], Future[Model]] = {}
        self._pinned: set[str] = set()
        self.nbytes = 0

    def pin(self, name: str) -> Model:
        """Load a model, and keep it and its weights."""
        self._pinned.add(name)
        return self.get(name)

    def get(self, name: str) -> Model:
        """The model of that name as its file is now."""
        if name in (FROZEN, self.backbone.name):
            return self.frozen
        found = self.shelf.find(name)
        if found is None:
            self._drop(name)
            raise unknown(name)
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and kept.found == found:
                self._kept.move_to_end(name)
                self._count("hit")
                if isinstance(kept.result, UnusableModelError):
                    raise _again(kept.result)
                return kept.result
            mine = (name, found) not in self._loading
            loading = self._loading.setdefault((name, found), Future())
        if mine:
            self._count("miss")
            try:
                loading.set_result(self._load(name, found))
            except BaseException as error:
                loading.set_exception(error)
            finally:
                with self._lock:
                    del self._loading[name, found]
        return loading.result()

    def at_hand(self, name: str) -> Model | None:
        """The model, if it is in memory and its file is unchanged: this takes no longer than looking at the file."""
        if name in (FROZEN, self.backbone.name):
            return self.frozen
        with self._lock:
            kept = self._kept.get(name)
        if kept is None or isinstance(kept.result, UnusableModelError) or self.shelf.find(name) != kept.found:
            return None
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
        self._count("hit")
        return kept.result

    def check(self, data: bytes) -> None:
        """Refuse what could not be served: the same checks as of every file."""
        self._read("the upload", data, None)

    # ---- reading ------------------------------------------------------------------------------------------------

    def _load(self, name: str, found: Found) -> Model:
        result: Model | UnusableModelError
        try:
            with opened(found.path) as (descriptor, stamp):
                found = found._replace(stamp=stamp)  # it may be another than a moment ago
                whiten = map_of_run(found.path) if found.map is not None else None
                result = self._read(name, descriptor, whiten)
        except FileNotFoundError:
            self._drop(name)
            raise unknown(name) from None
        except MaskFileError as error:
            result = UnusableModelError(
                f"the file of {name!r} cannot be used: {error.what}",
                expected=error.expected,
                found=error.found,
                todo="put a sound file in its place",
            )
        except OSError as error:  # which may be gone the next time
            raise UnusableModelError(f"the file of {name!r} cannot be read", found=error.strerror) from error
        self._keep(name, found, result)
        give_back()
        if isinstance(result, UnusableModelError):
            raise _again(result)
        return result

    def _read(self, name: str, source: Source, map_file: Path | None) -> Model:
        with open_container(source, name) as container:
            if is_cascade(container):
                cascade = Cascade.load(self.backbone.model, open_cascade(container), size=self._size)
                fingerprint = cascade.fingerprint(CONDITIONAL)
                whiten = self._map(map_file, MadeFor(fingerprint, cascade.preprocessing))
                return CascadeModel(name, cascade, self._views, whiten, fingerprint)
            mask = self.masked.read_mask(OpenedMask(container))
        own = self.backbone.preprocessing
        preprocessing = of_file(mask.preprocessing or own, own, self._size)
        try:
            head: Head | None = head_of(mask.head)
        except HeadError:  # none, or one that others made for themselves
            head = None
        fingerprint = mask_fingerprint(self._base_print, mask)
        whiten = self._map(map_file, MadeFor(fingerprint, preprocessing))
        switch = Switch.of(mask, self.backbone.model)
        width = self.backbone.width
        return MaskModel(name, switch, self._views, preprocessing, width, head, whiten, fingerprint, self._passes)

    @staticmethod
    def _map(file: Path | None, made_for: MadeFor) -> FeatureMap | None:
        """The map that a run left, if it is one of these vectors."""
        if file is None:
            return None
        try:
            return FeatureMap.load(file).check(made_for, str(file))
        except FeatureMapError:  # vectors do without
            return None

    # ---- keeping ------------------------------------------------------------------------------------------------

    def _keep(self, name: str, found: Found, result: Model | UnusableModelError) -> None:
        nbytes = 0 if isinstance(result, UnusableModelError) else result.nbytes
        with self._lock:
            self._remove(name)
            self._kept[name] = _Kept(found, result, nbytes)
            self.nbytes += nbytes
            for oldest in list(self._kept)[:-1]:
                if self.nbytes <= self._room:
                    break
                if oldest not in self._pinned:
                    self._remove(oldest)
        if name in self._pinned and isinstance(result, MaskModel):
            self._views.pin(result)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._remove(name)

    def _remove(self, name: str) -> None:
        old = self._kept.pop(name, None)
        if old is not None:
            self.nbytes -= old.nbytes
            self._views.forget(lambda key: key is old.result or (isinstance(key, tuple) and key[0] is old.result))


def _again(error: UnusableModelError) -> UnusableModelError:
    """A new error that says the same: one that is raised twice would collect the tracebacks of both."""
    return UnusableModelError(error.what, expected=error.expected, found=error.found, todo=error.todo)
