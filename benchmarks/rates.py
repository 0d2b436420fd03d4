"""Learning rates of methods that learn without labels, on the bundled pair: the data behind docs/rivals.md.

    python -m benchmarks.rates [METHOD ...]

Every run is `fast` but for its method and rate; labels only measure. A table in Markdown is printed row by row.
"""

from __future__ import annotations

import argparse

from torch import nn

from selfmask import AdaptConfig
from selfmask.backbones import load_backbone
from selfmask.commands.adapt import adapt
from selfmask.commands.adapt_config import AdaptMethod
from selfmask.commands.evaluate import features_of
from selfmask.data.partition import open_labelled
from selfmask.embedding.embedder import Embedder, PlainVariants
from selfmask.evaluation.rows import rows_of

RATES: dict[AdaptMethod, tuple[float, ...]] = {
    "full": (0.005, 0.02, 0.08),
    "lora": (0.02, 0.1, 0.4),
    "bitfit": (0.05, 0.2, 0.8),
}
BACKBONE, IMAGES = "selfmask/tiny", "selfmask/fashion"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(RATES))
    parser.add_argument("--rates", type=float, nargs="*", help="instead of those that the page has")
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    train, test = open_labelled(IMAGES)
    how = load_backbone(BACKBONE).preprocessing

    def columns(model: nn.Module) -> list[float]:
        embedder = Embedder("", model, how, 0, variants=PlainVariants(model, "model", "model"))
        (row,) = rows_of(features_of(embedder, train, test)).values()
        return [100 * value for value in row.values()]

    frozen = columns(load_backbone(BACKBONE).model)
    print("| method | rate | k-NN, k = 20 | k = 200 | probe, 10 labels a class | all | gain / error | kept |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print(f"| frozen | | {' | '.join(f'{each:.1f}' for each in frozen)} | | |", flush=True)
    for method in given.methods:
        for rate in given.rates or RATES[method]:
            config = AdaptConfig.preset("fast", method=method, lr=rate, steps=given.steps, track=())
            adapted = adapt(load_backbone(BACKBONE).model, train, config, preprocessing=how, report=False)
            result = adapted.result
            change = [after - before for after, before in zip(columns(adapted.model), frozen, strict=True)]
            proof = f"{result['gain'] / result['gain_error']:.1f}" if result["gain_error"] else "-"
            numbers = " | ".join(f"{each:+.1f}" for each in change)
            print(f"| {method} | {rate:g} | {numbers} | {proof} | step {result['best_step']} |", flush=True)


if __name__ == "__main__":
    main()
