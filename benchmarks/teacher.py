"""How often are a teacher's neighbours of the same class? And how far do features lie from the origin? docs/recipe.md.

    python -m benchmarks.teacher [--once]     --once: the pairs, too, that nothing was chosen on

What `fast` learns from are each image's 20 nearest images, by teachers made of the frozen backbone. Labels only measure
here. The sets are those of tools/small_sets.py and tools/photo_sets.py, in the folder that SELFMASK_DATA names; weights
are in the folder that SELFMASK_WEIGHTS names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor

from selfmask.data import open_images
from selfmask.embedding.vectors import embed
from selfmask.evaluation.whitening import chosen_power
from selfmask.objectives.neighbours import NeighboursConfig, nearest
from selfmask.objectives.principal import principal, whitened
from selfmask.training.layout import Layout

from .curve import LOOKED_AT, ONCE, Pair, backbone_for

MORE = (Pair("selfmask/tiny", "small-mnist"), Pair("lite0", "small-fashion"))


class Both(torch.nn.Module):
    """Vectors and places, means of an image and its mirror, as a run's teacher sees them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.layout = model, Layout(model, model)

    def forward(self, images: Tensor) -> Tensor:
        return (self.layout(images) + self.layout(images.flip(-1))) / 2


def seen(pair: Pair) -> tuple[Tensor, Tensor]:
    """Vectors and places of the training images."""
    model, preprocessing = backbone_for(pair)
    both = Both(model.eval())
    found, _ = embed(both, open_images(pair.images, split="train"), preprocessing)
    return found[:, : both.layout.features], found[:, both.layout.features :]


def teachers(vectors: Tensor, places: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name -> unit vectors of the training images."""
    width, power = NeighboursConfig().width, chosen_power(principal(vectors)[0])
    yield "vectors as they are", F.normalize(vectors, dim=1)
    yield "half whitened", whitened(vectors, 0.5, width)
    yield "whitened as the map", whitened(vectors, power, width)
    if places.shape[1]:
        parts = [whitened(each, power, width) for each in (vectors, places)]
        yield "what is seen where", parts[1]
        yield "both (`fast`)", torch.cat(parts, 1)


def how_far(vectors: Tensor) -> float:
    """The length of their mean, in deviations from it: far ones are moved before they are projected."""
    centre = vectors.mean(0)
    return float(centre.norm() / (vectors - centre).square().sum(1).mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true")
    count = NeighboursConfig().neighbours
    rows: dict[str, list[float]] = {}
    far: list[float] = []
    pairs = [*LOOKED_AT, *MORE, *(ONCE if parser.parse_args().once else ())]
    for pair in pairs:
        labels = torch.tensor(open_images(pair.images, split="train").labels)
        found, places = seen(pair)
        far.append(how_far(found))
        for name, vectors in teachers(found, places):
            same = labels[nearest(vectors, count)] == labels[:, None]
            rows.setdefault(name, []).append(100 * float(same.double().mean()))
    print(f"| of {count} neighbours, % of the same class | " + " | ".join(map(str, pairs)) + " | mean |")
    print("|" + " --- |" * (len(pairs) + 2))
    for name, shares in rows.items():
        print(f"| {name} | " + " | ".join(f"{share:.1f}" for share in (*shares, mean(shares))) + " |")
    print("\n| the mean of all vectors, in deviations from it | " + " | ".join(map(str, pairs)) + " |")
    print("|" + " --- |" * (len(pairs) + 1))
    print("| | " + " | ".join(f"{each:.1f}" for each in far) + " |")


if __name__ == "__main__":
    main()
