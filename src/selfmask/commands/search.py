"""`search`: the images of a collection that are nearest to a photo, by the frozen backbone and by each mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ..backbones import at_hand
from ..data import decode_image
from ..data.images import MAX_PIXELS
from ..embedding.embedder import FROZEN, Embedder
from ..embedding.mapping import made_for
from ..embedding.vectors import embed
from ..errors import CollectionError
from ..serving.collection import Collection, Neighbours, Space
from .opening import load_embedder


@dataclasses.dataclass(frozen=True)
class Found:
    """The nearest images of one photo in every space."""

    photo: str
    image: Tensor
    neighbours: dict[str, Neighbours]


def search(
    collection: Collection,
    photos: Sequence[Path],
    k: int,
    *,
    spaces: Sequence[str] | None = None,
    backbone: str | None = None,
    weights: Path | None = None,
    max_pixels: int = MAX_PIXELS,
    may_use: Callable[[str], bool] | None = None,
) -> list[Found]:
    """The nearest images of each photo, in all spaces or in some. What made the vectors is loaded from the collection.

    backbone, weights: what to put the masks on, where the collection does not name a backbone at hand.
    """
    chosen = [_space(collection, name) for name in (collection.spaces if spaces is None else spaces)]
    images = [decode_image(photo, max_pixels=max_pixels) for photo in photos]  # before models: a typo is said at once
    near: dict[str, list[Neighbours]] = {}
    for embedder, own in _embedders(collection, chosen, backbone, weights, may_use):
        for space in own:
            rows, _ = embed(embedder.module([space.about.kind]), images, embedder.preprocessing, skip_bad=False)
            near[space.name] = space.search(rows, k)
    return [
        Found(str(photo), image, {space.name: near[space.name][number] for space in chosen})
        for number, (photo, image) in enumerate(zip(photos, images, strict=True))
    ]


def _space(collection: Collection, name: str) -> Space:
    if name not in collection.spaces:
        raise CollectionError(
            f"the collection has no vectors of {name}",
            expected=", ".join(collection.spaces),
            todo="index the images with that mask, too: selfmask index RUN RUN IMAGES --out NEW-FOLDER",
        )
    return collection.spaces[name]


def _embedders(
    collection: Collection,
    spaces: Sequence[Space],
    backbone: str | None,
    weights: Path | None,
    may_use: Callable[[str], bool] | None,
) -> list[tuple[Embedder, list[Space]]]:
    """What makes the vectors of these spaces; the frozen ones are made by a run's, where there is one."""
    about, found = collection.about, list[tuple[Embedder, list[Space]]]()
    frozen = [space for space in spaces if space.about.is_frozen]
    runs = [space for space in spaces if not space.about.is_frozen]
    if frozen and not runs:  # any run has the backbone, but loads more than that
        runs = [space for space in collection.spaces.values() if not space.about.is_frozen][:1]
    for space in runs:
        folder = collection.run_of(space)
        assert folder is not None
        embedder = load_embedder(folder, backbone=backbone, weights=weights, size=about.size, may_use=may_use)
        found.append((embedder, [space] if space in spaces else []))
    if frozen and found and FROZEN in found[0][0].variants.variants:
        found[0][1].extend(frozen)
    elif frozen:
        found.append((_alone(collection, backbone, weights, may_use), frozen))
    for embedder, own in found:
        for space in own:
            _check(embedder, space)
    return found


def _alone(
    collection: Collection, backbone: str | None, weights: Path | None, may_use: Callable[[str], bool] | None
) -> Embedder:
    """The frozen backbone of a collection without runs."""

    about = collection.about
    own = Path(about.weights) if about.weights is not None else None
    weights = weights or own
    name = backbone or about.backbone
    if name is None or (backbone is None and not at_hand(name, weights) and not (may_use and may_use(name))):
        raise CollectionError(
            "the collection names no backbone at hand",
            expected="the backbone that its images were indexed with",
            found=str(about.backbone)[:200],
            todo="name it: --backbone NAME, with --weights FILE if its weights are your own",
        )
    return load_embedder(name, weights=weights, size=about.size)


def _check(embedder: Embedder, space: Space) -> None:
    """Vectors of another model say nothing about those of the collection."""
    expected, found = space.about.made_for, made_for(embedder, space.about.kind)
    if expected != found:
        same = expected.model == found.model
        raise CollectionError(
            f"the vectors of {space.name} were made otherwise than those of the photo would be",
            expected=expected.preprocessing if same else f"the model with fingerprint {expected.model[:16]}",
            found=found.preprocessing if same else found.model[:16],
            todo="use the backbone and weights that the images were indexed with: --backbone, --weights",
        )
