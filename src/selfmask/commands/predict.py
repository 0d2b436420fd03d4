"""`predict`: the class of each image, and how probable it is."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch

from ..data import Images
from ..embedding.embedder import Embedder
from ..embedding.vectors import Progress, embed, embed_batches
from ..errors import FeaturesWriteError, HeadError, LabelsError, MissingExtraError
from ..evaluation.predicting import By, HeadPredictor, Predictor, learned_from
from ..files import replacing, write_atomically
from ..running import best_device

_NEIGHBOURS = 20
COLUMNS = ("name", "class", "probability")


@dataclasses.dataclass(frozen=True)
class Predictions:
    """A row an image: its name, its class and the probability of that; and what could not be read, with the reason.

    accuracy, compared: where the images are labelled with these classes, the share that is right, of how many.
    """

    names: list[str]
    classes: list[str]
    probabilities: list[float]
    bad: list[tuple[str, str]]
    accuracy: float | None = None
    compared: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(self.classes).most_common())


def predictor_for(
    embedder: Embedder,
    examples: Images | None = None,
    *,
    by: By = "probe",
    k: int | None = None,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Predictor:
    """What tells classes: labelled examples, if there are any, and else the head that was trained with the model.

    k: neighbours that vote; by default 20, or fewer, so that those of the smallest class could be the most.
    """
    if examples is None:
        if embedder.head is None:
            raise HeadError(
                f"{embedder.name} has no head that tells classes",
                expected="a run of `selfmask train`, or labelled examples",
                todo="give some: --examples FOLDER, with a sub-folder for each class",
            )
        return HeadPredictor(embedder.head.to(best_device()))
    if examples.labels is None:
        raise LabelsError(
            "the examples have no labels", expected="a folder with a sub-folder for each class, or a labelled list"
        )
    module = embedder.module([embedder.variant])
    rows, kept = embed(module, examples, embedder.preprocessing, batch_size=batch_size, progress=progress)
    labels = torch.tensor(examples.labels)[kept]
    classes = examples.classes or [str(number) for number in range(int(labels.max()) + 1)]
    counts = labels.bincount()
    counts = counts[counts > 0]
    if len(counts) < 2:
        raise LabelsError("the examples are of one class", expected="two or more", found=classes[int(labels[0])])
    return learned_from(
        rows.to(best_device()), labels.to(best_device()), classes, by=by, k=k or min(_NEIGHBOURS, int(counts.min()))
    )


def predict(
    embedder: Embedder,
    images: Images,
    predictor: Predictor,
    *,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Predictions:
    """Classes of all images, a batch at a time: only the rows are held."""
    names, numbers, probabilities, bad, kept = list[str](), list[int](), list[float](), list[tuple[str, str]](), []
    module = embedder.module([embedder.variant])
    for batch in embed_batches(module, images, embedder.preprocessing, batch_size=batch_size):
        bad += [(images.names[number], why) for number, why in batch.bad]
        if batch.indices:
            best = predictor(batch.features.to(best_device())).max(1)
            kept += batch.indices
            names += [images.names[number] for number in batch.indices]
            numbers += best.indices.tolist()
            probabilities += best.values.tolist()
        if progress is not None:
            progress(len(names) + len(bad), len(images))
    classes = [predictor.classes[number] for number in numbers]
    accuracy, compared = _accuracy(images, kept, classes, predictor.classes)
    return Predictions(names, classes, probabilities, bad, accuracy, compared)


def _accuracy(images: Images, kept: list[int], found: list[str], known: list[str]) -> tuple[float | None, int]:
    """Of images whose folders, or lists, name one of the classes."""
    if images.labels is None or images.classes is None or not set(images.classes) & set(known):
        return None, 0
    truth = [images.classes[images.labels[number]] for number in kept]
    pairs = [(right, own) for right, own in zip(truth, found, strict=True) if right in known]
    return (sum(right == own for right, own in pairs) / len(pairs) if pairs else None), len(pairs)


def check_out(out: Path) -> None:
    """Before the work: whether the file can be written."""
    if out.suffix not in (".csv", ".parquet"):
        raise FeaturesWriteError(f"unknown file format: {out}", expected="a name ending in .csv or .parquet")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtraError(
            f"cannot write {out}: pyarrow is not installed",
            todo="pip install 'selfmask[parquet]', or choose a name ending in .csv",
        )


def write_predictions(out: Path, found: Predictions) -> None:
    """A .csv or .parquet file with the columns name, class and probability, whole or not at all."""
    check_out(out)
    if out.suffix == ".csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, own, probability in zip(found.names, found.classes, found.probabilities, strict=True):
            writer.writerow([name, own, f"{probability:.6f}"])
        write_atomically(out, text.getvalue().encode("utf-8", "backslashreplace"), FeaturesWriteError)
        return
    import pyarrow as pa  # of an extra
    import pyarrow.parquet as pq

    columns = [found.names, found.classes, pa.array(found.probabilities, pa.float32())]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        pq.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True))), file)
