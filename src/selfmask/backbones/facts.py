"""What is known of a backbone's origin, to be told to those whom a mask is shared with."""

from __future__ import annotations

from ..errors import BackboneError
from ..hub.card import BaseFacts
from .loading import resolve
from .sources import HubFile


def base_facts(name: str | None) -> BaseFacts:
    """Repository and licence of the backbone of that name, as far as they are known; asks no network."""
    if name is None:
        return BaseFacts()
    try:
        recipe = resolve(name)
    except BackboneError:  # of the user's own
        return BaseFacts(name)
    return BaseFacts(name, recipe.source.repo if isinstance(recipe.source, HubFile) else None, recipe.licence)
