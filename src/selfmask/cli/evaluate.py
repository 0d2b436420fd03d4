"""`selfmask evaluate`: how good the vectors are, on labelled images, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .console import Console, print_json
from .embed import (
    UseBackbone,
    UseBatchSize,
    UseMaxPixels,
    UseScale,
    UseSize,
    UseWeights,
    UseWhat,
    may_use,
    progress_on,
    say_scale,
)
from .pull import brought_here

if TYPE_CHECKING:
    from ..evaluation.measuring import Evaluation, Measured

_WORST = 3  # classes named


def evaluate(
    what: UseWhat,
    data: Annotated[
        str, typer.Option(help="Labelled images: a folder with a sub-folder for each class, or the name of a data set.")
    ],
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Evaluation protocols, separated by commas: knn, linear (probe), head (trained with the mask).",
            show_default="all that apply",
        ),
    ] = None,
    label_fraction: Annotated[float, typer.Option(help="Share of the training labels to use.")] = 1.0,
    stratified: Annotated[
        bool,
        typer.Option("--stratified/--uniform", help="Draw that share from each class, or uniformly from all images."),
    ] = True,
    seeds: Annotated[int, typer.Option(min=1, help="Number of random choices of labels, if not all are used.")] = 5,
    k: Annotated[str, typer.Option(help="Numbers of neighbours for k-NN, separated by commas.")] = "20,200",
    temperature: Annotated[
        float,
        typer.Option(help="Temperature of k-NN: votes are weighted by exp(similarity / temperature). DINO used 0.07."),
    ] = 0.1,
    sweep: Annotated[
        bool, typer.Option(help="Choose the linear probe's regularisation on a fifth of the labels.")
    ] = False,
    whiten: Annotated[
        str,
        typer.Option(
            help="Also measure whitened vectors: auto, a power from 0 (centred) to 1 (fully whitened), or none."
        ),
    ] = "auto",
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="File with the map to whiten with, such as map.safetensors of a run.",
            show_default="fitted to the training images",
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report with figures: FILE.html.")] = None,
    cache: Annotated[bool, typer.Option(help="Cache features, and reuse cached ones.")] = True,
    batch_size: UseBatchSize = None,
    scale: UseScale = None,
    max_pixels: UseMaxPixels = None,
    backbone: UseBackbone = None,
    weights: UseWeights = None,
    size: UseSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as one JSON object.")] = False,
) -> None:
    """Measure accuracy on labelled images: frozen, and with the mask or cascade, with and without a map.

    Example:  selfmask evaluate runs/birds --data labelled-birds/ --report birds.html
    """
    from ..cascade.combination import COMBINATIONS
    from ..cascade.model import Cascade
    from ..commands.evaluate import features_of, maps_for, seen_by
    from ..commands.opening import load_embedder
    from ..data.images import MAX_PIXELS
    from ..data.labels import matched
    from ..data.partition import open_split
    from ..embedding.cache import FeatureCache, cache_folder
    from ..evaluation.feature_map import power_named
    from ..evaluation.measuring import evaluate as measure
    from ..evaluation.measuring import with_maps
    from ..evaluation.protocols import HEAD, Settings, check_head, protocols_of

    console = Console(stderr=as_json)

    say = console.say
    settings = Settings(label_fraction, stratified, seeds, _neighbours(k), temperature, sweep)
    power = None if whiten == "none" else power_named(whiten)
    protocols_of(protocol or "knn")  # a wrong name is said before the work
    train, test, divided = open_split(data, max_pixels=MAX_PIXELS if max_pixels is None else max_pixels)
    if train.note:
        say(train.note)
    if not divided:
        say("the data has no train and test splits: a fixed fifth of each class is held out for testing")
    what = brought_here(what, console)
    embedder = load_embedder(what, backbone=backbone, weights=weights, size=size, may_use=may_use)
    if isinstance(cascade := embedder.model, Cascade):
        cascade.scale = cascade.scale if scale is None else scale.value
        say_scale(cascade, say)
    given = {} if map_file is None else maps_for(embedder, map_file)
    applies = embedder.head is not None and {*embedder.head.classes} == {*matched(train, test).classes}
    protocols = protocols_of(protocol or ("knn,linear,head" if applies else "knn,linear"))
    if HEAD in protocols:
        check_head(embedder.head, matched(train, test).classes)  # before the work
    kept = FeatureCache(cache_folder(), say) if cache else None
    with progress_on(console, "embedding") as progress:
        features = features_of(
            embedder,
            train,
            test,
            divided=divided,
            batch_size=batch_size or embedder.batch_size,
            cache=kept,
            progress=progress,
        )
    if whiten != "none":  # a cascade's own vectors are whitened already
        without = COMBINATIONS if isinstance(embedder.model, Cascade) else ()
        features = with_maps(features, power=power, given=given, without=without)
    with progress_on(console, "measuring") as progress:
        evaluation = measure(embedder.name, features, protocols, settings, progress=progress)
    seen = seen_by(what, test)
    for line in _notes(evaluation, seen):
        say(line)
    if as_json:
        print_json({**evaluation.as_dict(), "test_images_seen": seen})
    else:
        _show(console, evaluation)
    if report is not None:
        from ..report.evaluation import write_evaluation  # here, because matplotlib takes its time

        write_evaluation(report, evaluation, data, seen)
        say(f"report: {report}")


def _neighbours(text: str) -> tuple[int, ...]:
    from ..errors import EvaluationError

    try:
        return tuple(dict.fromkeys(int(each) for each in text.split(",")))
    except ValueError as error:
        raise EvaluationError(
            "unknown numbers of neighbours", expected="whole numbers, separated by commas", found=text
        ) from error


def _notes(evaluation: Evaluation, seen: int | None) -> Iterator[str]:
    settings = evaluation.settings
    if seen:
        yield (
            f"warning: the run was trained on {seen:,} of these test images, so the numbers may be better than those "
            "of new images; adapt without them (--split train), or test on other images"
        )
    if evaluation.left_out:
        yield f"{evaluation.left_out:,} images could not be read and were left out"
    if most := max(evaluation.unseen):
        yield (
            f"up to {most:,} of {len(evaluation.classes):,} classes have no label in a draw and are never predicted; "
            "--stratified draws labels from every class"
        )
    for k in settings.k if "knn" in evaluation.results else ():
        if evaluation.labelled_images < k:
            yield f"k = {k} exceeds the number of labelled images: using {evaluation.labelled_images}"


def _show(console: Console, evaluation: Evaluation) -> None:
    from ..evaluation.metrics import TOP
    from ..evaluation.protocols import title_of

    with_top5 = len(evaluation.classes) > TOP  # else it is 1 by definition
    table = Table("", "", "top-1", *(["top-5"] if with_top5 else []), "worst classes", title_justify="left")
    table.title = evaluation.name
    for protocol, variants in evaluation.results.items():
        for number, (variant, found) in enumerate(variants.items()):
            cells = [
                title_of(protocol, evaluation.settings) if number == 0 else "",
                evaluation.titles[variant],
                _share(found.top1, found.top1_interval),
            ]
            if with_top5:
                cells.append(_share(found.top5, found.top5_interval))
            table.add_row(*cells, _worst(found))
    console.print(table)
    settings = evaluation.settings
    share = "all labels" if settings.label_fraction == 1 else f"{evaluation.labelled_images:,} labels per seed"
    over = (
        f"; ± is the 95 % confidence interval over {evaluation.seeds} choices of labels" if evaluation.seeds > 1 else ""
    )
    console.say(
        f"{evaluation.test_images:,} test images, {evaluation.train_images:,} training images, "
        f"{len(evaluation.classes)} classes, {share}{over}"
    )


def _share(mean: float, half_width: float | None) -> str:
    return f"{mean:.2%}" if half_width is None else f"{mean:.2%} ± {100 * half_width:.2f}"


def _worst(found: Measured) -> str:
    worst = sorted(found.per_class, key=lambda name: found.per_class[name])[:_WORST]
    return ", ".join(f"{name} {found.per_class[name]:.0%}" for name in worst)
