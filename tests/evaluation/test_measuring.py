"""Whole evaluations on real images: what is reported is what each protocol says, and no test image is learned from."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from selfmask import FeatureMap, MaskConfig, get_masked_model
from selfmask.commands.evaluate import features_of
from selfmask.data import Images, open_images
from selfmask.data.partition import open_split
from selfmask.data.sources import ArrayImages
from selfmask.data.splits import label_split
from selfmask.embedding.embedder import Embedder
from selfmask.errors import EvaluationError, HeadError, LabelsError
from selfmask.evaluation import knn_accuracy, linear_probe, linear_probe_fit
from selfmask.evaluation.inputs import OnProgress
from selfmask.evaluation.measuring import Evaluation, Features, evaluate, label_splits, with_maps
from selfmask.evaluation.protocols import PROTOCOLS, Prediction, Settings, Task, protocols_of, title_of
from selfmask.evaluation.rows import as_table, few_per_class, rows_of
from selfmask.objectives.heads import LinearHead
from selfmask.report.evaluation import render

from ..embedding.samples import HOW, pictures, tiny

BOTH = ["knn", "linear"]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    base = tiny()
    return Embedder("tiny", get_masked_model(base, MaskConfig(rule="topk", active_share=0.5)).eval(), HOW, 256)


def some(images: Images, every: int) -> ArrayImages:
    assert isinstance(images, ArrayImages)
    assert images.labels is not None
    return ArrayImages(images.pixels[::every], images.labels[::every], images.classes)


@pytest.fixture(scope="module")
def clothes(embedder: Embedder) -> Features:
    train, test = (some(open_images("selfmask/fashion", split=split), 10) for split in ("train", "test"))
    return features_of(embedder, train, test)


def test_every_protocol_and_side_is_what_its_function_says(clothes: Features) -> None:
    found = evaluate("tiny", clothes, BOTH, Settings(k=(20,), temperature=0.07))
    assert (found.seeds, found.train_images, found.test_images, found.labelled_images) == (1, 400, 100, 400)
    for side in ("frozen", "mask"):
        parts = clothes.train[side], clothes.labels, clothes.test[side], clothes.truth
        knn, linear = (found.results[protocol][side] for protocol in BOTH)
        assert knn.top1 == pytest.approx(knn_accuracy(*parts, k=20, temperature=0.07))
        assert linear.top1 == pytest.approx(linear_probe(*parts))
        assert knn.top1_interval is None
        assert (knn.chosen, linear.chosen) == ([{"k": 20}], [{"lambda": 0.01 / 400}])
        for each in (knn, linear):
            assert each.top1 < each.top5 <= 1
            assert np.sum(each.confusion) == 100
            assert np.trace(each.confusion) == pytest.approx(100 * each.top1)
            assert set(each.per_class) <= set(found.classes)
    assert found.results["knn"]["frozen"] != found.results["knn"]["mask"]


def test_few_labels_are_measured_over_seeds(clothes: Features) -> None:
    settings = Settings(label_fraction=0.1, seeds=3, k=(200,))
    found = evaluate("tiny", clothes, BOTH, settings)
    assert (found.seeds, found.labelled_images) == (3, len(label_split(clothes.labels.tolist(), 0.1, 0)))
    for protocol, measure in (("knn", knn_accuracy), ("linear", linear_probe)):
        each = []
        for seed in range(3):
            chosen = label_split(clothes.labels.tolist(), 0.1, seed)
            bank, labels = clothes.train["mask"][chosen], clothes.labels[chosen]
            options = {"k": len(chosen)} if protocol == "knn" else {}
            each.append(measure(bank, labels, clothes.test["mask"], clothes.truth, **options))
        measured = found.results[protocol]["mask"]
        assert measured.each == pytest.approx(each)
        assert measured.top1 == pytest.approx(np.mean(each))
        assert measured.top1_interval == pytest.approx(4.302652729911275 * np.std(each, ddof=1) / np.sqrt(3))
        assert np.sum(measured.confusion) == 300
    assert evaluate("tiny", clothes, BOTH, settings) == found


def test_the_sweep_says_what_it_chose(clothes: Features) -> None:
    found = evaluate("tiny", clothes, ["linear"], Settings(label_fraction=0.2, seeds=2, sweep=True))
    chosen = [each["lambda"] * found.labelled_images for each in found.results["linear"]["frozen"].chosen]
    assert all(any(value == pytest.approx(p) for p in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)) for value in chosen)


def test_progress_goes_from_nothing_to_all(clothes: Features) -> None:
    steps: list[tuple[int, int]] = []
    evaluate("tiny", clothes, BOTH, Settings(), progress=lambda done, total: steps.append((done, total)))
    assert {total for _, total in steps} == {600}  # k-NN twice and a probe, of two variants
    assert steps[-1] == (600, 600)
    assert len(steps) > 20


def test_labels_are_matched_by_name_and_not_by_number(embedder: Embedder) -> None:
    train, test = (some(open_images("selfmask/fashion", split=split), 20) for split in ("train", "test"))
    straight = evaluate("tiny", features_of(embedder, train, test), ["knn"], Settings(k=(20,)))
    assert test.classes is not None
    assert test.labels is not None
    turned = ArrayImages(test.pixels, [9 - label for label in test.labels], test.classes[::-1])
    assert evaluate("tiny", features_of(embedder, train, turned), ["knn"], Settings(k=(20,))) == straight


def leaked(features: Features) -> list[int]:
    """Test images whose very vector is among those to learn from."""
    rows = {row.numpy().tobytes() for row in features.train["frozen"]}
    return [i for i, row in enumerate(features.test["frozen"]) if row.numpy().tobytes() in rows]


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("undivided"), 61, classes=3)


def test_no_image_is_in_both_parts_of_an_undivided_source(embedder: Embedder, undivided: Path) -> None:
    whole, (train, test, divided) = open_images(undivided), open_split(str(undivided))
    assert not divided
    assert sorted(train.names + test.names) == whole.names  # each once, none lost
    assert [train.names, test.names] == [part.names for part in open_split(str(undivided))[:2]]  # every time
    found = features_of(embedder, train, test, divided=divided)
    assert not leaked(found)
    assert not found.divided
    assert torch.bincount(found.labels).tolist() == [17, 16, 16]
    # The check itself: it sees a leak.
    assert leaked(features_of(embedder, train, whole)) != []


def test_protocols_only_see_the_labelled_share_of_the_training_part(
    embedder: Embedder, undivided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = features_of(embedder, *open_split(str(undivided))[:2])
    held_out = {row.numpy().tobytes() for row in features.test["frozen"]}
    seen: list[int] = []

    def spy(task: Task, on_progress: OnProgress) -> Prediction:
        assert not held_out & {row.numpy().tobytes() for row in task.train}
        seen.append(len(task.train))
        return PROTOCOLS["knn"](task, on_progress)

    monkeypatch.setitem(PROTOCOLS, "spy", spy)
    plain = dataclasses.replace(features, train={"frozen": features.train["frozen"]})
    evaluate("tiny", plain, ["spy"], Settings(label_fraction=0.3, seeds=3))
    assert seen == [15, 15, 15]


def test_classes_that_a_uniform_share_leaves_empty_are_counted(clothes: Features) -> None:
    settings = Settings(label_fraction=0.01, stratified=False, seeds=3)
    found = evaluate("tiny", clothes, ["linear"], settings)
    labels = clothes.labels.tolist()
    drawn = [{labels[number] for number in chosen} for chosen in label_splits(clothes, settings)]
    assert found.unseen == [len(set(labels) - each) for each in drawn]
    assert max(found.unseen) > 0
    assert evaluate("tiny", clothes, ["linear"], Settings(label_fraction=0.01, seeds=3)).unseen == [0, 0, 0]


def test_bad_input_is_refused_before_the_work(embedder: Embedder, tmp_path: Path) -> None:
    train, bad = (open_images(pictures(tmp_path / str(bad), 6, classes=3, bad=bad)) for bad in ((), (0, 3)))
    with pytest.raises(LabelsError, match="no labels"):
        features_of(embedder, open_images(pictures(tmp_path / "flat", 3)), train)
    with pytest.raises(LabelsError, match="never be predicted"):
        features_of(embedder, open_images(pictures(tmp_path / "two", 6, classes=2)), train)
    pictures(tmp_path / "one", 3, classes=3)
    with pytest.raises(LabelsError, match="no images are left"):
        open_split(str(tmp_path / "one"))
    with pytest.raises(LabelsError, match="no labels"):
        open_split(str(tmp_path / "flat"))
    with pytest.raises(LabelsError, match="no readable training images"):
        features_of(embedder, bad, train)


@pytest.mark.parametrize(
    "wrong",
    [{"label_fraction": 0.0}, {"label_fraction": 1.5}, {"seeds": 0}, {"k": (0,)}, {"k": ()}, {"temperature": 0.0}],
    ids=str,
)
def test_settings_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises((EvaluationError, LabelsError)):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", " , ", "knn,svm"])
def test_unknown_protocols(text: str) -> None:
    with pytest.raises(EvaluationError, match="protocol"):
        protocols_of(text)
    assert protocols_of("linear, knn,linear") == ["linear", "knn"]


def test_files_in_both_parts_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    pictures(data / "train", 6, classes=2)
    pictures(data / "test", 6, classes=2)  # the same names and pixels, but other files
    assert open_split(str(data)).divided
    (data / "test" / "class0" / "again.png").symlink_to(data / "train" / "class0" / "0000.png")
    with pytest.raises(EvaluationError, match="1 images are both training and test images"):
        open_split(str(data))
    train, test, divided = open_split("selfmask/fashion")
    assert (len(train), len(test), divided) == (4000, 1000, True)


def test_the_page_has_numbers_and_pictures_and_needs_no_network(clothes: Features) -> None:
    found = evaluate("tiny <b>", clothes, BOTH, Settings(label_fraction=0.1, seeds=2))
    page = render(found, "some & <i>data</i>")
    assert "tiny &lt;b&gt; on some &amp; &lt;i&gt;data&lt;/i&gt;" in page
    assert page.count('aria-label="confusion matrix') == 4
    assert page.count('aria-label="accuracy of each class') == 2
    for sides in found.results.values():
        for measured in sides.values():
            assert f"{measured.top1:.1%} ±" in page
    assert "Ankle boot" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert render(found, "some & <i>data</i>") == page


def test_the_page_of_many_classes_stays_small() -> None:
    classes = [f"$class_{i}^" for i in range(300)]
    truth = torch.arange(300).repeat(2)
    rows = torch.randn(300, 64)[truth] + torch.randn(600, 64)
    features = Features(
        {"frozen": rows},
        truth,
        {"frozen": rows.flip(0)},
        truth.flip(0),
        classes,
        2,
        False,
        {"frozen": "frozen backbone"},
    )
    page = render(evaluate("x", features, ["knn"], Settings(k=(2,))), "y")
    assert len(page) < 500_000
    assert "The 40 worst of 300 classes" in page
    assert "2 images could not be read" in page


def test_evaluations_are_plain_data(clothes: Features) -> None:
    found = evaluate("tiny", clothes, ["knn"], Settings())
    assert isinstance(found, Evaluation)
    plain = found.as_dict()
    assert plain["results"]["knn"]["mask"]["top1"] == found.results["knn"]["mask"].top1
    assert plain["settings"]["k"] == (20, 200)


def test_every_k_is_measured_and_the_first_leads(clothes: Features) -> None:
    found = evaluate("tiny", clothes, ["knn"], Settings(k=(20, 200)))
    assert list(found.results) == ["knn", "knn_200"]
    parts = clothes.train["mask"], clothes.labels, clothes.test["mask"], clothes.truth
    for key, k in (("knn", 20), ("knn_200", 200)):
        assert found.results[key]["mask"].top1 == pytest.approx(knn_accuracy(*parts, k=k))
        assert title_of(key, found.settings) == f"k-NN (k = {k})"


def test_maps_are_fitted_to_training_images_alone_and_stand_beside(clothes: Features) -> None:
    mapped = with_maps(clothes, power=1.0, without=["mask"])
    assert list(mapped.train) == list(mapped.test) == list(mapped.titles) == ["frozen", "frozen+map", "mask"]
    whiten = FeatureMap.fit(clothes.train["frozen"], power=1.0)
    assert torch.equal(mapped.test["frozen+map"], whiten(clothes.test["frozen"]))
    other = with_maps(clothes, given={"frozen": FeatureMap.fit(clothes.train["mask"])})
    assert not torch.equal(other.test["frozen+map"], with_maps(clothes).test["frozen+map"])
    # A head was trained on vectors without a map.
    head = LinearHead(256, clothes.classes)
    found = evaluate("tiny", dataclasses.replace(with_maps(clothes), head=head), ["head"], Settings())
    assert list(found.results["head"]) == ["mask"]


def test_the_rows_of_all_variants_are_what_the_measures_say(clothes: Features) -> None:
    rows = rows_of(with_maps(clothes))
    assert list(rows) == ["frozen", "frozen+map", "mask", "mask+map"]
    parts = clothes.train["mask"], clothes.labels, clothes.test["mask"], clothes.truth
    assert rows["mask"]["knn"] == pytest.approx(knn_accuracy(*parts, k=20))
    assert rows["mask"]["knn_200"] == pytest.approx(knn_accuracy(*parts, k=200))
    assert rows["mask"]["probe"] == pytest.approx(linear_probe(*parts))
    few = [few_per_class(clothes.labels.tolist(), seed) for seed in range(3)]
    assert all(torch.bincount(clothes.labels[some]).tolist() == [10] * 10 for some in few)
    assert len({tuple(some) for some in few}) == 3
    each = [linear_probe(parts[0][some], parts[1][some], *parts[2:]) for some in few]
    assert rows["mask"]["probe_few"] == pytest.approx(np.mean(each))
    head, *lines = as_table(rows)
    assert (len(head), [line[0] for line in lines]) == (5, ["frozen", "frozen + map", "mask", "mask + map"])
    assert few_per_class([0, 1, 1], 0) == [0, 1, 2]  # of what has fewer, all


def test_a_head_is_asked_by_the_names_of_classes_and_not_by_their_order(clothes: Features) -> None:
    probe = linear_probe_fit(clothes.train["mask"], clothes.labels)
    tops = []
    for order in (list(range(10)), [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]):
        head = LinearHead(256, [clothes.classes[i] for i in order], normalised=True)
        head.start_from(probe.weight[order], probe.bias[order])
        (side,) = (
            evaluate("tiny", dataclasses.replace(clothes, head=head), ["head"], Settings()).results["head"].values()
        )
        tops.append(side.top1)
    linear = evaluate("tiny", clothes, ["linear"], Settings()).results["linear"]["mask"].top1
    assert tops == [linear, linear]


def test_a_head_that_is_missing_or_of_other_classes_is_refused(clothes: Features) -> None:
    for head in (None, LinearHead(256, clothes.classes[:-1]), LinearHead(256, [*clothes.classes[:-1], "cat"])):
        with pytest.raises(HeadError):
            evaluate("tiny", dataclasses.replace(clothes, head=head), ["head"], Settings())
