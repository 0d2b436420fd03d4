"""Runs that go wrong: named, answered, and never for the worse. And the guard by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from selfmask import AdaptConfig, MaskConfig, MaskedModel, adapt, get_masked_model
from selfmask.commands.adapt import AdaptResult
from selfmask.data import ImageStore, open_images
from selfmask.data.views import MultiCrop, ViewsConfig
from selfmask.errors import ConfigError, InterruptedRunError, RunMismatchError, TooFewImagesError
from selfmask.objectives.swav import SwAV
from selfmask.training import Guard, LoopConfig, ParameterGroup, Processes, RunFolder, Steps, train
from selfmask.training.display import QuietDisplay
from selfmask.training.guard import GENTLER
from selfmask.training.quality import Gain
from tests.light import mostly_heavy

from .small import HOW, Clothes, config, network
from .test_loop import Stopper

# The base is called directly here, on purpose, to compare with.
pytestmark = pytest.mark.filterwarnings("ignore::selfmask.errors.DirectCallWarning")

NAN = float("nan")
BACK, STOPPED = "returned to step", "stopped; step"


# All held-out images the same: what is higher at all is proven higher.
KINDS = torch.zeros(1, 20, dtype=torch.long)
GAIN = partial(Gain.of, kinds=KINDS)


def scores(quality: float, *shape: int) -> Tensor:
    return torch.full(shape or KINDS.shape, quality, dtype=torch.float64).log()


def fast(**changes: Any) -> AdaptConfig:
    """The preset, scaled down, with an objective that can be made to fail."""
    small = AdaptConfig.preset(
        "fast", objective="contrast", lr=15.0, steps=12, batch_size=8, size=16, quality_every=2, log_every=1, track=()
    )
    return dataclasses.replace(small, **{"checkpoint_every": 3, **changes})


def run(settings: AdaptConfig, model: nn.Module | None = None, images: Any = None, **options: Any) -> AdaptResult:
    options = {"report": False, **options}  # which takes longer than the run
    return adapt(model or network(), images or Clothes(200), settings, preprocessing=HOW, **options)


def assert_frozen(masked: MaskedModel, base: nn.Module) -> None:
    """To the bit what the frozen backbone is."""
    images = torch.randn(5, 3, 16, 16)
    assert masked.sparsity()["total"] == 1
    with torch.no_grad():
        assert torch.equal(masked.eval()(images), base.eval()(images))


def assert_ended_in_trouble(result: AdaptResult, words: str) -> None:
    """Named twice, answered once, then given up; and what comes out is what went in."""
    first, second = result.result["troubles"]
    assert words in first["trouble"]
    assert first["answer"].startswith(BACK)
    assert words in second["trouble"]
    assert second["answer"].startswith(STOPPED)
    assert [line["step"] for line in result.log][-1] == second["step"] < result.result["steps"]
    gentler = {line["step"]: line["lr"] for line in result.log}[second["step"]]
    assert gentler <= GENTLER * result.log[0]["lr"]
    assert_best(result)


def assert_best(result: AdaptResult) -> None:
    numbers = result.result
    troubled = {trouble["step"] for trouble in numbers["troubles"]}  # such a point is not kept, however good
    measured = {0: numbers["quality_before"]}
    measured |= {step: quality for step, quality in result.quality if step not in troubled}
    assert measured[numbers["best_step"]] == numbers["quality_after"] >= numbers["quality_before"]
    assert result.helped == (numbers["kept"] == "mask") == (numbers["best_step"] > 0)
    for value in result.model.state_dict().values():
        assert value.isfinite().all()


# ---- runs that go wrong ------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A backbone with noise, in training only, that one weight lets in: any training will want that weight off."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.noise, self.dropout = network(), nn.Conv2d(1, 1, 1, bias=False), nn.Dropout(0.5)
        nn.init.constant_(self.noise.weight, 0.3)

    def forward(self, images: Tensor) -> Tensor:
        noise: Tensor = self.noise(self.dropout(images.new_ones(len(images), 1, 16, 1)))
        return self.body(images) + (noise.flatten(1) if self.training else 0)


def test_a_tensor_that_is_switched_off_as_a_whole() -> None:
    base = Noisy()
    result = run(fast(steps=40, quality_every=40, lr=600.0, head_lr=1e-4, heads_first=0.0), base)
    assert_ended_in_trouble(result, "all weights of noise.weight are off")
    assert_frozen(result.model, base)


@pytest.mark.parametrize("objective", ["contrast", "swav"])
def test_a_loss_that_is_not_a_number(tmp_path: Path, objective: str) -> None:
    """A rate so high that the heads overflow, and all scores with them."""
    settings = fast(head_lr=1e38) if objective == "contrast" else config(head_lr=1e30, gate=True, quality_every=12)
    result = run(settings, out=tmp_path / "run", report=True)
    assert_ended_in_trouble(result, "the loss is not finite")
    assert not any(map(math.isnan, (line["quality"] for line in result.log if "quality" in line)))
    assert result.result["loss"] is None  # there is no NaN in JSON
    assert "NaN" not in (tmp_path / "run" / "result.json").read_text()
    assert "the loss is not finite" in (tmp_path / "run" / "report.html").read_text()


def test_trouble_reaches_the_trackers_and_the_display(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []

    class Seeing(QuietDisplay):
        def line(self, line: Mapping[str, Any]) -> None:
            seen.append(line)

    run(fast(head_lr=1e38, track=("tensorboard",)), out=tmp_path / "run", display=Seeing())
    assert sum("trouble" in line for line in seen) == 2


def test_a_loss_that_stays_at_that_of_a_guess() -> None:
    """Random heads that hardly learn; the log has a line every 10 steps, as it has by default."""
    rates = {"lr": 1e-9, "head_lr": 1e-9}
    settings = config(steps=170, gate=True, quality_every=50, log_every=10, checkpoint_every=50, **rates)
    result = run(settings, network(norm=False))
    assert_ended_in_trouble(result, "the loss stays at ln K = 3.00, the chance level")
    first, second = (trouble["step"] for trouble in result.result["troubles"])
    assert first <= 100
    assert second - first <= 100


def test_features_that_become_alike() -> None:
    base = network()
    result = run(fast(head_lr=0.5, lr=1e-6, quality_every=4), base)
    assert_ended_in_trouble(result, "the features of all images have collapsed to nearly the same vector")
    assert_frozen(result.model, base)


def test_after_going_back_once_a_run_can_end_well() -> None:
    result = run(fast(head_lr=0.05, lr=1e-6, quality_every=4))
    assert [trouble["answer"][: len(BACK)] for trouble in result.result["troubles"]] == [BACK]
    assert result.log[-1]["step"] == 12
    assert_best(result)


# ---- images that teach nothing -------------------------------------------------------------------------------------


class Alike(Dataset[Tensor]):
    """One picture, again and again; `off` pixels of each are another."""

    def __init__(self, off: int) -> None:
        self.off, self.picture = off, Clothes(1)[0][0]

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        picture = self.picture.clone()
        picture.flatten()[index * self.off : (index + 1) * self.off] ^= 1
        return picture


def test_identical_images_are_refused() -> None:
    with pytest.raises(TooFewImagesError, match="all identical"):
        run(fast(), images=Alike(0))


def test_images_that_hardly_differ_are_no_reason_to_crash() -> None:
    base = network()
    result = run(fast(), base, Alike(1))
    assert_best(result)
    if not result.helped:
        assert_frozen(result.model, base)


@pytest.mark.parametrize("number", [4, 6, 11])
def test_a_handful_of_images_is_enough_to_hold_some_out(number: int) -> None:
    assert_best(run(fast(batch_size=2, steps=3), images=Clothes(number)))


def test_fewer_than_a_batch_when_some_are_held_out() -> None:
    with pytest.raises(TooFewImagesError, match="not counting those held out"):
        run(fast(batch_size=8), images=Clothes(9))


# ---- the best point ------------------------------------------------------------------------------------------------


def test_where_nothing_is_gained_the_mask_is_the_identity(tmp_path: Path) -> None:
    """A rate at which half of the weights go: quality falls at once, and never comes back."""
    base = network()
    result = run(fast(steps=6, lr=1e4), base, out=tmp_path / "run")
    assert all(quality < result.result["quality_before"] for _, quality in result.quality)
    assert (result.result["best_step"], result.result["kept"], result.helped) == (0, "identity", False)
    assert result.result["active"] == 1
    assert result.result["quality_after"] == result.result["quality_before"]
    assert_frozen(result.model, base)
    assert_frozen(MaskedModel.from_pretrained(network(), tmp_path / "run" / "mask.smn"), network())


def test_without_a_gate_nobody_says_whether_it_helped() -> None:
    result = run(config(steps=2))
    assert result.helped is None
    assert result.quality == []
    assert "kept" not in result.result


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_rule_that_starts_with_weights_off_falls_back_to_the_frozen_backbone(tmp_path: Path, share: float) -> None:
    """Not to its own start, whose random half of the weights is worse than all of them."""
    settings = fast(steps=4, mask=MaskConfig(rule="topk", active_share=share))
    for resume in (False, True):
        base = network()
        result = run(settings, base, out=tmp_path / "run", resume=resume)
        assert result.result["kept"] == "identity"
        assert result.result["quality_before"] == result.result["quality_after"]
        assert_frozen(result.model, base)
    assert_frozen(MaskedModel.from_pretrained(network(), tmp_path / "run" / "mask.smn"), network())


def test_a_rule_that_starts_with_weights_off_is_kept_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its start, far below the frozen backbone, is not taken for something that was lost."""
    qualities = iter([0.1, 0.5, 0.2, 0.4, 0.6, 0.55])  # the start, the frozen backbone, then every step
    monkeypatch.setattr("selfmask.training.quality.Quality._measured", lambda *_: scores(next(qualities), 7, 40))
    topk = MaskConfig(rule="topk", active_share=0.5)
    result = run(config(steps=4, log_every=1, quality_every=1, gate=True, mask=topk))
    assert (result.result["kept"], result.result["best_step"]) == ("mask", 3)
    assert [result.result[f"quality_{side}"] for side in ("before", "after")] == pytest.approx([0.5, 0.6])
    assert result.result["troubles"] == []
    assert result.model.sparsity()["total"] == pytest.approx(0.5, abs=0.01)


def test_long_runs_are_looked_at_ten_times() -> None:
    config = AdaptConfig.preset("fast")
    lengths = {1: 60, 120: 60, 600: 60, 601: 70, 1920: 200, 10**6: 10**5}
    assert {steps: config.look_every(steps) for steps in lengths} == lengths
    assert dataclasses.replace(config, quality_every=30).look_every(1920) == 30


@pytest.mark.parametrize("wrong", [{"quality_every": 0}, {"log_every": 2, "quality_every": 3}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quality_every"):
        AdaptConfig(gate=True, **wrong)


class Plain(Dataset[Tensor]):
    """Images of one colour each, which no crop or flip changes."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 20, 20), 8 * index, dtype=torch.uint8)


def test_held_out_images_are_never_trained_on() -> None:
    trained, measured = set(), set()
    base = network()

    def see(_: nn.Module, inputs: tuple[Tensor]) -> None:
        colours = (inputs[0].mean((1, 2, 3)) * HOW.std[0] + HOW.mean[0]) * 255 / 8
        (trained if torch.is_grad_enabled() else measured).update(colours.round().int().tolist())

    base.register_forward_pre_hook(see)
    views = ViewsConfig(small=0, jitter_p=0.0, grey_p=0.0, blur_p=0.0)
    run(fast(views=views, steps=20, lr=1e-6, head_lr=1e-6), base, Plain())
    held = set(range(30)) - trained
    assert len(held) == 6
    assert held <= measured


def test_steps_use_only_the_images_they_may() -> None:
    store = ImageStore(open_images(Clothes(20)), side=32)
    views = MultiCrop(ViewsConfig(size=16, small_size=8, small=1), HOW)
    among = [1, 2, 3, 5, 7, 11, 13, 17, 19]
    steps = Steps(store, views, batch_size=4, seed=0, processes=Processes(), among=among)
    assert steps.per_epoch == 2
    for epoch in range(3):
        assert sorted(steps.among[steps._order(epoch)].tolist()) == among


# ---- interrupted runs ----------------------------------------------------------------------------------------------


def troubled(out: Path, **options: Any) -> AdaptResult:
    """A run that goes back once, and finds something better after that."""
    settings = fast(lr=60.0)
    with mock.patch.object(Gain, "proven", lambda gain, _: gain.mean > 0):  # 20 images prove little
        return run(settings, network(dropout=0.1), Clothes(100), out=out, **options)


def numbers_of(result: AdaptResult) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """All that does not depend on the clock. Flips count from the last look, which an interruption is."""
    numbers = {key: value for key, value in result.result.items() if not key.endswith("seconds")}
    keys = ("step", "loss", "active", "lr", "quality", "trouble", "answer")
    return numbers, [tuple(line.get(key) for key in keys) for line in result.log]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> AdaptResult:
    return troubled(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("step", mostly_heavy([5, 6, 1, 4, 10, 11], 2))
def test_resumed_before_or_after_going_back_it_ends_in_the_same_bits(
    tmp_path: Path, whole: AdaptResult, step: int
) -> None:
    (back,) = (trouble["step"] for trouble in whole.result["troubles"])
    assert 1 < back < whole.result["best_step"]
    with pytest.raises(InterruptedRunError):
        troubled(tmp_path / "cut", display=Stopper(step))
    resumed = troubled(tmp_path / "cut", resume=True)
    assert whole.folder is not None
    assert (tmp_path / "cut" / "mask.smn").read_bytes() == (whole.folder / "mask.smn").read_bytes()
    assert numbers_of(resumed) == numbers_of(whole)
    again = troubled(tmp_path / "cut", resume=True)  # a finished one
    assert again.result == resumed.result
    for key, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value), key


def test_a_run_that_stopped_for_good_is_not_continued(tmp_path: Path) -> None:
    """Not even if it was killed before it could write what it came to."""
    settings = fast(head_lr=1e38)
    whole = run(settings, out=tmp_path / "run")
    stopped = whole.log[-1]["step"]
    assert stopped < 12
    for name in ("result.json", "mask.smn"):
        (tmp_path / "run" / name).unlink()
    resumed = run(settings, out=tmp_path / "run", resume=True)
    assert resumed.log[-1]["step"] == stopped
    assert numbers_of(resumed) == numbers_of(whole)


# ---- the guard in a loop, with a quality that is easy to foresee -----------------------------------------------------


class PowerCutError(RuntimeError):
    pass


Watch = Callable[[MaskedModel, Mapping[str, Any]], None]


def guarded(
    path: Path, best_share: float, watch: Watch | None = None, resume: bool = False
) -> tuple[MaskedModel, Guard]:
    """Training that switches weights off; quality is best when so many are left. A checkpoint every third step."""
    settings, processes = config(), Processes()
    masked = get_masked_model(network(), settings.mask)
    objective = SwAV(16, settings.objective, seed=1)
    store = ImageStore(open_images(Clothes()), side=32)
    batches = Steps(store, MultiCrop(settings.chosen_views, HOW), batch_size=8, seed=0, processes=processes)
    groups = [
        ParameterGroup(list(masked.scores.parameters()), 300.0),
        ParameterGroup(list(objective.parameters()), 0.15),
    ]
    guard = Guard(lambda: scores(1 - 2 * abs(masked.sparsity()["total"] - best_share)), GAIN, every=1, looks=12)
    with RunFolder(path, resume=resume) as folder:
        folder.begin({}, {}, {})
        loop = LoopConfig(log_every=1, checkpoint_every=3)
        reports = [] if watch is None else [lambda line: watch(masked, line)]
        train(masked, objective, groups, batches, 12, loop, folder, processes, reports, guard)
    return masked, guard


def copied(masked: MaskedModel) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in masked.state_dict().items()}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def test_a_run_ends_at_its_best_point_and_not_at_its_last(tmp_path: Path) -> None:
    points: dict[int, dict[str, Tensor]] = {}
    shares: dict[int, float] = {}

    def watch(masked: MaskedModel, line: Mapping[str, Any]) -> None:
        points[line["step"]], shares[line["step"]] = copied(masked), line["active"]

    masked, guard = guarded(tmp_path, 0.9, watch)
    assert guard.stopped  # the last weights that it switched off were too many, twice
    nearest = min(shares, key=lambda step: abs(shares[step] - 0.9))
    assert 0 < guard.best_step == nearest < 12
    assert masked.sparsity()["total"] == shares[nearest]
    assert_same(masked.state_dict(), points[nearest])


def cut_at(place: int) -> Watch:
    def cut(_: MaskedModel, line: Mapping[str, Any]) -> None:
        if line["step"] == place:
            raise PowerCutError

    return cut


Whole = tuple[MaskedModel, Guard]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return guarded(tmp_path_factory.mktemp("uncut"), 0.9)


@pytest.mark.parametrize("step", mostly_heavy([3, 7, 2, 5, 8, 10], 2))
def test_a_crash_anywhere_loses_neither_the_best_point_nor_the_way(tmp_path: Path, uncut: Whole, step: int) -> None:
    whole, guard = uncut
    with pytest.raises(PowerCutError):
        guarded(tmp_path / "cut", 0.9, cut_at(step))
    resumed, other = guarded(tmp_path / "cut", 0.9, resume=True)
    assert (other.best_step, other.best_quality) == (guard.best_step, guard.best_quality)
    assert_same(resumed.state_dict(), whole.state_dict())


def test_a_crash_between_the_two_checkpoints_goes_on_from_the_later_one(
    tmp_path: Path, uncut: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever save it hits: the best point has been written and the last one has not."""
    whole, guard = uncut
    save = RunFolder.save_checkpoint
    for number in range(1, 4):
        saved = 0

        def cut(folder: RunFolder, name: str, state: Mapping[str, Any], number: int = number) -> None:
            nonlocal saved
            saved += name == "last"
            if name == "last" and saved == number:
                raise PowerCutError
            save(folder, name, state)

        path = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "save_checkpoint", cut)
            with pytest.raises(PowerCutError):
                guarded(path, 0.9)
        resumed, other = guarded(path, 0.9, resume=True)
        assert (other.best_step, other.best_quality) == (guard.best_step, guard.best_quality)
        assert_same(resumed.state_dict(), whole.state_dict())


# ---- the guard by itself -------------------------------------------------------------------------------------------


def watching(*qualities: float) -> Guard:
    """A guard that has measured these, one a step; its states are the numbers of the steps."""
    guard = Guard(lambda: scores(qualities[0]), GAIN, every=1, looks=10)
    guard.begin(lambda: {"at": 0})
    for step, quality in enumerate(qualities[1:], 1):
        line, take = {"step": step, "loss": 1.0}, partial(dict, at=step)
        assert guard.look(line, nn.Identity(), take, scores(quality)) is None
    return guard


@pytest.mark.parametrize(
    ("qualities", "best"),
    [((0.5,), 0), ((0.5, 0.49, 0.48), 0), ((0.5, 0.5, 0.5), 0), ((0.5, 0.6, 0.55), 1), ((0.5, 0.6, 0.6), 2)],
)
def test_the_best_point_is_the_last_of_the_highest_start_included(qualities: tuple[float, ...], best: int) -> None:
    guard = watching(*qualities)
    assert (guard.best_step, guard.best_state) == (best, {"at": best})
    assert guard.best_quality == pytest.approx(max(qualities))
    assert guard.first_quality == pytest.approx(qualities[0])


def look(guard: Guard, model: nn.Module | None = None, quality: float | None = None, **line: Any) -> str | None:
    measured = None if quality is None else scores(quality)
    return guard.look({"step": 10, "loss": 1.0, **line}, model or nn.Identity(), dict, measured)


def test_a_run_whose_quality_was_measured_in_another_way_is_not_continued() -> None:
    guard = watching(0.4, 0.5)
    state = guard.state_dict()
    guard.load_state_dict(state, {})
    for other in ({**state, "measure": 2}, {key: value for key, value in state.items() if key != "measure"}):
        with pytest.raises(RunMismatchError, match="another release"):
            guard.load_state_dict(other, {})


def test_images_that_are_hardly_told_apart_are_no_reason_to_keep_anything() -> None:
    """As of pure noise: to recognise it somewhat better is of no use."""
    guard = watching(0.01, 0.02, 0.029)
    assert (guard.best_step, guard.best_gain) == (0, None)


def test_a_point_that_may_be_better_by_luck_is_not_kept() -> None:
    """As high on average as one that is kept, but by some images alone."""
    guard = watching(0.5)
    some = scores(0.5)
    some[:, :4] += 1.0
    assert guard.look({"step": 1, "loss": 1.0}, nn.Identity(), dict, some) is None
    assert (guard.best_step, guard.best_gain) == (0, None)
    assert guard.look({"step": 2, "loss": 1.0}, nn.Identity(), dict, scores(0.5) + 0.2) is None
    assert guard.best_step == 2
    assert guard.best_gain is not None
    assert guard.best_gain.mean == pytest.approx(0.2)


def test_of_points_that_cannot_be_told_apart_the_last_is_kept() -> None:
    """A little worse on average, but by some images alone; and again, until together it is no luck any more."""
    guard = watching(0.5, 0.6)
    lower = scores(0.6)
    for step, kept in ((2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 7)):
        lower[:, step] -= 0.3
        assert guard.look({"step": step, "loss": 1.0}, nn.Identity(), partial(dict, at=step), lower.clone()) is None
        assert (guard.best_step, guard.best_state) == (kept, {"at": kept})
        resumed = watching(0.5)
        resumed.load_state_dict(guard.state_dict(), guard.best_state)
        guard = resumed
    assert guard.best_quality < 0.6


def test_of_equally_good_points_the_last_is_kept_in_nearly_all_runs() -> None:
    """The highest of ten is higher by luck than the last in most runs, and no reason to go back to it."""
    draws, runs, last = torch.Generator().manual_seed(0), 200, 0
    for _ in range(runs):
        guard = watching(0.5)
        for step in range(1, 11):
            found = scores(0.9) + 0.1 * torch.randn(KINDS.shape, generator=draws)
            guard.look({"step": step, "loss": 1.0}, nn.Identity(), partial(dict, at=step), found)
        last += guard.best_step == 10
    assert last >= 0.9 * runs


def test_quality_that_is_lost_is_trouble_and_a_little_less_is_not() -> None:
    guard = watching(0.5, 0.6)
    assert look(guard, quality=0.52) is None
    assert look(guard, quality=0.5) == "quality fell from 0.600 to 0.500"
    assert guard.best_step == 1


@pytest.mark.parametrize("loss", [NAN, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_trouble_and_its_quality_does_not_count(loss: float) -> None:
    guard = watching(0.5)
    assert look(guard, loss=loss, quality=0.9) == "the loss is not finite"
    assert guard.best_step == 0


def test_features_that_are_alike_are_trouble() -> None:
    assert look(watching(0.5), spread=0.3) is None
    assert (
        look(watching(0.5), spread=0.001, quality=0.9)
        == "the features of all images have collapsed to nearly the same vector"
    )


def test_a_tensor_without_active_weights_is_trouble_and_is_named() -> None:
    masked = get_masked_model(network(), MaskConfig())
    assert look(watching(0.5), masked) is None
    with torch.no_grad():
        masked.scores["4/weight"].fill_(-1)
    assert look(watching(0.5), masked) == "all weights of 4.weight are off"


def plateau(losses: Callable[[int], float], every: int, steps: int = 400) -> list[int]:
    """The steps at which a guard says that the loss, in units of ln K, stays at that of a guess."""
    guard = watching(0.5)
    found = []
    for step in range(every, steps + 1, every):
        loss = sum(losses(s) for s in range(step - every, step)) / every  # a line is the mean over its steps
        if trouble := guard.look({"step": step, "loss": 3 * loss, "ln_k": 3.0}, nn.Identity(), dict):
            assert "ln K = 3.00" in trouble
            guard.answer(step)
            found.append(step)
    return found


@pytest.mark.parametrize("every", [1, 3, 10, 25, 50])
def test_a_plateau_is_seen_within_100_steps_however_often_a_line_is_logged(every: int) -> None:
    found = plateau(lambda _: 1.001, every)
    assert 60 <= found[0] <= 100
    assert 60 <= found[1] - found[0] <= 100  # it is looked for anew after an answer


@pytest.mark.parametrize("every", [1, 10])
def test_a_plateau_that_comes_later_is_seen_too(every: int) -> None:
    found = plateau(lambda step: 0.5 if step < 155 else 1.0, every)
    assert 155 < found[0] <= 255


@pytest.mark.parametrize(
    "losses",
    [
        lambda step: 1.2 - step / 150,  # a slow start
        lambda step: 0.98,  # just below
        lambda step: 1.0 if step % 60 else 0.2,  # now and then better
    ],
    ids=["slow", "below", "now and then"],
)
def test_a_loss_that_gets_away_from_ln_k_is_no_plateau(losses: Callable[[int], float]) -> None:
    assert plateau(losses, 1) == []


def test_an_objective_without_ln_k_has_no_plateau() -> None:
    guard = watching(0.5)
    assert all(look(guard, step=step, loss=9.9) is None for step in range(10, 500, 10))


def test_the_first_answer_goes_back_and_the_second_stops() -> None:
    guard = watching(0.5, 0.6)
    assert guard.scale == 1
    assert guard.answer(5) == "returned to step 1, continuing with a quarter of the learning rate"
    assert (guard.scale, guard.stopped) == (0.25, False)
    assert guard.answer(9) == "stopped; step 1 is kept"
    assert guard.stopped


def test_what_a_guard_knows_can_be_saved(tmp_path: Path) -> None:
    guard = watching(0.5, 0.6)
    look(guard, loss=2.0, ln_k=3.0, step=7)
    guard.answer(7)
    torch.save(guard.state_dict(), tmp_path / "guard.pt")
    other = Guard(guard._measure, guard._gain, every=1, looks=10)
    other.load_state_dict(torch.load(tmp_path / "guard.pt", weights_only=True), guard.best_state)
    of_scores = {"_first": None, "_top": None}
    for name in of_scores:
        torch.testing.assert_close(vars(other)[name], vars(guard)[name], rtol=0, atol=0)
    assert vars(other) | of_scores == vars(guard) | of_scores
