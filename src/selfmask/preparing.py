"""What every run needs before its first step: preprocessing, decoded images, a rate for its scores."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from contextlib import suppress
from typing import Any

import torch

from .data import Images, ImageStore, open_images
from .errors import BadImageError, ConfigError, TooFewImagesError, TooManyBadImagesError
from .maskfile import Preprocessing
from .masking import MaskedModel
from .training import RunFolder
from .training.display import Display

IMAGENET = Preprocessing((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear")
_CACHE_SIDE = 2  # cached images keep twice the pixels of a large crop a side: small crops stay sharp


def preprocessing_for(known: Preprocessing | None, given: Preprocessing | None, size: int | None) -> Preprocessing:
    """As given, else as the model carries it, else ImageNet's; at another size, if one is asked for."""
    how = given or known or IMAGENET
    how = how if size is None else dataclasses.replace(how, size=(size, size))
    if how.size[0] != how.size[1]:
        raise ConfigError("views are square", expected="one size", found=how.size, todo="give a size: --size")
    return how


def store_of(images: Any, how: Preprocessing, max_bad: float, display: Display, folder: RunFolder | None) -> ImageStore:
    """Decode all images, with a display of how far it is, and refuse what cannot be learned from."""
    opened = open_images(images)
    try:
        with display.decoding(len(opened)) as progress:
            store = ImageStore(opened, side=_CACHE_SIDE * max(how.size), max_bad=max_bad, progress=progress)
    except TooManyBadImagesError as error:
        if folder is not None:
            folder.write_json("bad_images.json", dict(error.bad))
        raise
    if folder is not None and store.bad:
        folder.write_json("bad_images.json", dict(store.bad))
    if len(store) < 2 or _all_alike(store):
        raise TooFewImagesError(
            "there is nothing to tell apart in these images",
            expected="many different images",
            found=f"{len(store)} image(s)" + (", all alike" if len(store) > 1 else ""),
            todo="check the folder; a few hundred images are a good start",
        )
    return store


def _all_alike(store: ImageStore) -> bool:
    first = store[0]
    return all(torch.equal(first, store[i]) for i in range(1, len(store)))


def fingerprint(store: ImageStore) -> str:
    """Tells two sets of images apart, by names and by some of their pixels."""
    digest = hashlib.sha256(json.dumps([store.names, store.side]).encode())
    for index in range(0, len(store), max(1, len(store) // 16)):
        digest.update(store[index].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def content_of(*parts: Images) -> str:
    """Tells sets of images apart before they are decoded: by names and labels of all, and by the pixels of some."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps([part.names, part.labels, part.classes]).encode())
        for number in range(0, len(part), max(1, len(part) // 16)):
            with suppress(BadImageError):
                digest.update(part[number].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def score_rate(masked: MaskedModel, distance: float, momentum: float, steps: int) -> float:
    """The learning rate at its highest, if the scores of all layers together are to travel a distance in a run."""
    # The more layers carry a mask, the less each may change.
    layers = max(1, sum(score.dim() > 1 for score in masked.scores.parameters()))
    # A cosine has half its height on average, and momentum adds up to 1 / (1 - momentum) times the gradient.
    return distance / layers * (1 - momentum) / (0.5 * steps)
