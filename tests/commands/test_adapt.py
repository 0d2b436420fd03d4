"""`selfmask.adapt`: what it needs, what it leaves, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import selfmask
from selfmask import AdaptConfig, MaskConfig, MaskedModel
from selfmask.commands.adapt import AdaptResult, adapt
from selfmask.commands.outcome import Labelled
from selfmask.data import open_images
from selfmask.errors import (
    ConfigError,
    NoImagesError,
    NotABackboneError,
    RunMismatchError,
    RunWriteError,
    TooFewImagesError,
    TooManyBadImagesError,
)
from selfmask.objectives.swav import SwAVConfig
from selfmask.training.display import QuietDisplay

from ..training.small import HOW, Clothes, config, network


def run(images: Any, out: Path | None = None, model: nn.Module | None = None, **options: Any) -> AdaptResult:
    changes = options.pop("changes", {"steps": 3})
    options = {"report": False, **options}  # which takes longer than the run
    return adapt(model or network(), images, config(**changes), out=out, preprocessing=HOW, **options)


def save_images(folder: Path, number: int, *, size: int = 24, alike: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
    for i in range(number):
        pixels = pixels if alike else random.integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return folder


def test_of_many_images_a_sample_is_read(tmp_path: Path) -> None:
    class Watched(Clothes):
        def __getitem__(self, index: int) -> Any:
            read.add(index)
            return super().__getitem__(index)

    class Heard(QuietDisplay):
        def say(self, text: str) -> None:
            said.append(text)

    samples = []
    for seed in (0, 0, 1):
        read, said = set[int](), list[str]()
        run(Watched(48), changes={"steps": 1, "most_images": 20, "seed": seed}, display=Heard())
        samples.append(read)
        assert any("a random sample of 20 of the 48 images" in text for text in said)
    assert [len(sample) for sample in samples] == [20, 20, 20]
    assert samples[0] == samples[1] != samples[2]
    assert AdaptConfig.preset("fast").most_images == 20_000  # minutes, however many there are


def test_the_run_folder_holds_all_of_a_run(tmp_path: Path) -> None:
    labelled = Labelled(open_images(Clothes(40)), open_images(Clothes(40)))
    changes = {"steps": 3, "track": ("tensorboard",)}
    result = run(Clothes(), tmp_path / "run", changes=changes, labelled=labelled, report=True)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "environment.json", "log.jsonl", "events", "checkpoints", "mask.smn"}
    assert names >= {"report.html", "result.json"}
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"last.pt"}
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored == result.result
    assert list(stored["rows"]) == ["frozen", "frozen+map", "mask", "mask+map"]
    assert stored["map_bytes"] == (tmp_path / "run" / "map.safetensors").stat().st_size
    assert "k-NN (k = 20) + map" in (tmp_path / "run" / "report.html").read_text()
    assert stored["mask_bytes"] == (tmp_path / "run" / "mask.smn").stat().st_size
    assert stored["base_bytes"] == 4 * sum(p.numel() for p in network().parameters())
    assert any((tmp_path / "run" / "events").iterdir())


def test_the_mask_gives_the_model_that_was_returned(tmp_path: Path) -> None:
    result = run(Clothes(), tmp_path / "run", changes={"steps": 6})
    loaded = MaskedModel.from_pretrained(network(), tmp_path / "run" / "mask.smn").eval()
    images = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(loaded(images), result.model(images), rtol=0, atol=1e-6)
    assert loaded.preprocessing == HOW
    assert not result.model.training


def test_the_base_is_untouched() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(Clothes(), model=model, changes={"steps": 6})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert result.model.sparsity()["total"] < 1
    assert result.folder is None


def test_a_timm_model_needs_no_more_than_images() -> None:
    """Its own preprocessing, another size, the names at the top of the package."""
    model = timm.create_model("resnet10t", num_classes=0)
    result = selfmask.adapt(model, Clothes(12), AdaptConfig.preset("paper", steps=1, batch_size=4, size=32, track=()))
    assert result.model.preprocessing is not None
    assert result.model.preprocessing.size == (32, 32)
    assert result.model.preprocessing.mean == tuple(model.pretrained_cfg["mean"])


SWIN = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}


@pytest.mark.parametrize(
    ("name", "settings", "size", "small"),
    [
        ("vit_tiny_patch16_224", {"embed_dim": 48, "depth": 1}, None, 224),
        ("swin_s3_tiny_224", SWIN, None, 224),
        ("resnet10t", {}, 64, 32),
        ("convnext_atto", {}, 40, 32),
    ],
)
def test_small_views_have_a_size_that_the_backbone_takes(
    name: str, settings: dict[str, Any], size: int | None, small: int
) -> None:
    """As timm builds them, vision transformers take one size only."""
    seen: set[int] = set()
    model = timm.create_model(name, num_classes=0, **settings)
    model.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].shape[-1]) if len(inputs[0]) > 1 else None)
    changes = {"steps": 1, "batch_size": 2, "size": size, "track": ()}
    selfmask.adapt(model, Clothes(4), AdaptConfig.preset("paper", **changes))
    assert seen == {small, size or 224}


def test_a_size_that_the_backbone_does_not_take_is_refused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, embed_dim=48, depth=1)
    with pytest.raises(ConfigError, match=r"does not accept images of 64 x 64[\s\S]*--size"):
        selfmask.adapt(model, Clothes(4), AdaptConfig(steps=1, batch_size=2, size=64))


def test_a_wrong_tracker_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensorboard, wandb, mlflow"):
        run(Clothes(), tmp_path / "run", changes={"track": ("tensorbord",)})
    assert not (tmp_path / "run" / "config.json").exists()


def test_presets_differ_where_text_and_code_do() -> None:
    paper, reference = (AdaptConfig.preset(name) for name in ("paper", "reference"))
    assert reference.objective.freeze_prototypes == pytest.approx(5005 / 117_188)
    assert paper.objective.freeze_prototypes < reference.objective.freeze_prototypes
    assert paper.objective.queue_start == reference.objective.queue_start == 30 / 150
    assert (paper.lr, paper.head_lr, paper.batch_size, paper.momentum) == (50, 0.15, 64, 0.9)
    assert reference.number_of_steps(781) == 117_150
    assert (paper.objective.freeze_steps, reference.objective.freeze_steps) == (313, 5005)
    short = AdaptConfig.preset("reference", steps=100)
    assert short.objective.freeze_steps is None
    assert short.changed(steps=200, objective=SwAVConfig(freeze_steps=7)).objective.freeze_steps == 7
    full = AdaptConfig.preset("paper", method="full")
    assert (full.lr, full.weight_decay, full.follow, AdaptConfig.preset("fast", method="full").lr) == (
        0.15,
        1e-6,
        "paper",
        0.02,
    )
    with pytest.raises(ConfigError, match="paper or reference"):
        AdaptConfig.preset("papr")


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 5, "epochs": 2}, {"steps": 0}, {"epochs": 0}, {"batch_size": 1}, {"lr": 0}, {"size": 4}],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AdaptConfig(**wrong)


def test_a_few_broken_files_are_skipped_and_listed(tmp_path: Path) -> None:
    photos = save_images(tmp_path / "photos", 40)
    (photos / "broken.jpg").write_text("not an image")
    result = run(photos, tmp_path / "run")
    assert result.result["images"] == 40
    assert list(json.loads((tmp_path / "run" / "bad_images.json").read_text())) == ["broken.jpg"]


def test_many_broken_files_stop_the_run_unless_allowed(tmp_path: Path) -> None:
    photos = save_images(tmp_path / "photos", 20)
    for i in range(5):
        (photos / f"broken{i}.jpg").write_text("not an image")
    with pytest.raises(TooManyBadImagesError, match="broken0"):
        run(photos, tmp_path / "run")
    assert run(photos, tmp_path / "run", max_bad=0.5).result["bad_images"] == 5


def test_images_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoImagesError):
        run(tmp_path / "empty")
    with pytest.raises(TooFewImagesError, match="1 image"):
        run(save_images(tmp_path / "one", 1))
    with pytest.raises(TooFewImagesError, match="all identical"):
        run(save_images(tmp_path / "alike", 20, alike=True))
    with pytest.raises(TooFewImagesError, match="--batch-size"):
        run(save_images(tmp_path / "few", 5))


def test_images_smaller_than_a_crop_are_enlarged(tmp_path: Path) -> None:
    assert run(save_images(tmp_path / "dots", 12, size=3)).model.num_masked > 0


def test_a_model_without_vectors_is_refused() -> None:
    with pytest.raises(NotABackboneError, match="num_classes=0"):
        run(Clothes(), model=nn.Sequential(nn.Conv2d(3, 4, 3)))


def test_resuming_with_other_settings_or_images_says_what_differs(tmp_path: Path) -> None:
    run(Clothes(), tmp_path / "run")
    with pytest.raises(RunMismatchError, match=r"config.lr = 300.0[\s\S]*config.lr = 7.0"):
        run(Clothes(), tmp_path / "run", resume=True, changes={"steps": 3, "lr": 7.0})
    with pytest.raises(RunMismatchError, match="data = "):
        run(Clothes(40), tmp_path / "run", resume=True)
    with pytest.raises(RunMismatchError, match="base = "):
        run(Clothes(), tmp_path / "run", model=network(norm=False), resume=True)


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """The device that is always full takes the place of the log half-way."""
    log = tmp_path / "run" / "log.jsonl"

    class Fill(QuietDisplay):
        def line(self, line: Mapping[str, Any]) -> None:
            if line["step"] == 4:
                log.unlink()
                log.symlink_to("/dev/full")

    changes = {"steps": 6, "track": ("tensorboard",)}
    with pytest.raises(RunWriteError, match="No space left"):
        run(Clothes(), tmp_path / "run", changes=changes, display=Fill())
    log.unlink()
    assert run(Clothes(), tmp_path / "run", changes=changes, resume=True).result["steps"] == 6


def test_a_typo_in_the_path_leaves_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(NoImagesError):
        run(tmp_path / "phtos", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_statistics_are_estimated_anew_at_the_end_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an adaptation as in training with labels; not where they only adapt on the way."""
    seen: list[int] = []
    original = MaskedModel.recalibrate

    def recalibrate(masked: MaskedModel, batches: Any) -> None:
        seen.append(len(batches[0]))
        original(masked, batches)

    monkeypatch.setattr(MaskedModel, "recalibrate", recalibrate)
    for norm in ("adapt", "recalibrate"):
        run(Clothes(), changes={"steps": 2, "mask": MaskConfig(select="all", exclude=("*.bias",), norm=norm)})
    assert seen == [16]  # twice a batch of views, once
