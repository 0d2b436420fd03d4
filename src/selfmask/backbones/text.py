"""What a CLIP makes of class names: one vector a class, in the space of its image vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BadWeightsError, ConfigError, NoTextTowerError, WeightsUnavailableError
from . import clip, transformers_clip
from .loading import check_weights, resolve, unpinned
from .recipe import TextTower
from .sources import fetch
from .weights import load_weights

LABEL = "{label}"
"""Where the class name goes in a template."""
PAPER = (f"This is a photo of a {LABEL}",)
"""The paper's only template."""
_BATCH = 256


def class_embeddings(
    name: str, classes: Sequence[str], templates: Sequence[str] = PAPER, *, weights: Path | None = None
) -> tuple[Tensor, float]:
    """Unit vectors [classes, width] of the classes, and what to multiply cosines by to get the logits of this CLIP.

    A class is the mean of its unit vectors under all templates. Underscores in its name stand for spaces. `weights` is
    a file of the whole model, both towers.
    """
    return text_embeddings(name, class_prompts(classes, templates), weights=weights)


def class_prompts(classes: Sequence[str], templates: Sequence[str] = PAPER) -> list[list[str]]:
    """For each class, its name put into each template."""
    if not templates or any(LABEL not in template for template in templates):
        raise ConfigError(
            "a prompt template has no placeholder for the class name",
            expected=f"{LABEL} in each template, and at least one template",
            found=next((repr(template) for template in templates if LABEL not in template), "no template"),
            todo=f"put {LABEL} where the class name goes, as in {PAPER[0]!r}",
        )
    labels = [name.replace("_", " ").strip() for name in classes]
    if not labels or not all(labels):
        raise ConfigError("a class has no name", expected="a name for each class", found=list(classes))
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ConfigError(
            "two classes have the same name, so their text embeddings cannot differ",
            found=[name for name, label in zip(classes, labels, strict=True) if label == twice],
            todo="rename one of them, or give other names in a file: --classes",
        )
    return [[template.replace(LABEL, label) for template in templates] for label in labels]


def text_embeddings(
    name: str, prompts: Sequence[Sequence[str]], *, weights: Path | None = None
) -> tuple[Tensor, float]:
    """As `class_embeddings`, with the prompts of each class written out.

    The text tower is read from the same place as the backbone of that name, used, and let go.
    """
    with torch.random.fork_rng(devices=[]):  # it is built with random weights first
        tower = _load(name, weights)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tower.model.float().eval().to(device)
    texts = [text for group in prompts for text in group]
    with torch.no_grad():
        vectors = torch.cat(
            [
                tower.encode(tower.tokenize(texts[start : start + _BATCH]).to(device)).cpu()
                for start in range(0, len(texts), _BATCH)
            ]
        )
        scale = float(tower.model.logit_scale.exp())  # type: ignore[operator]
    units = iter(F.normalize(vectors, dim=-1))
    means = [torch.stack([next(units) for _ in group]).mean(0) for group in prompts]
    return F.normalize(torch.stack(means), dim=-1), scale


def _load(name: str, weights: Path | None) -> TextTower:
    recipe, bare = resolve(name), unpinned(name)
    source = recipe.source
    tower = clip.text_tower(bare) or transformers_clip.text_tower(bare)
    if tower is None:
        raise NoTextTowerError(
            f"{name} has no text tower",
            expected=f"a CLIP model: {clip.PREFIX}ARCH, {clip.PREFIX}ARCH:TAG, {transformers_clip.PREFIX}OWNER/NAME or "
            f"{transformers_clip.PREFIX}FOLDER",
            todo=f"choose a CLIP backbone (selfmask backbones {clip.PREFIX}), or another head",
        )
    if weights is not None:
        path = Path(weights)
    elif source is not None:
        path = fetch(source, name)
    else:
        raise WeightsUnavailableError(
            f"no published weights exist for {name}",
            todo="pass a checkpoint of the whole CLIP model as --weights (in Python: weights=)",
        )
    check_weights(recipe, path, name)
    try:
        load_weights(tower.model, path, name, tower.translate)
    except BadWeightsError as error:
        raise BadWeightsError(
            f"cannot load the text tower of {name} from {path}",
            expected="a checkpoint of the whole CLIP model, image tower and text tower",
            found=f"{error.what}: {error.found}",
            todo="give a checkpoint with both towers, or choose another head, which needs no text tower",
        ) from error
    return tower
