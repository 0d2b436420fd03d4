"""The loop: against a plain one written out here, and to the bit after every kind of interruption."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from selfmask import adapt, get_masked_model
from selfmask.commands.adapt import Adaptation, AdaptResult
from selfmask.data import ImageStore, open_images
from selfmask.data.views import MultiCrop
from selfmask.errors import ConfigError, DivergedRunError, ImagesChangedError, InterruptedRunError, RunWriteError
from selfmask.objectives.heads import LinearHead
from selfmask.objectives.supervised import Supervised
from selfmask.objectives.swav import SwAV
from selfmask.training import LoopConfig, ParameterGroup, Processes, Steps, train
from selfmask.training.display import QuietDisplay
from selfmask.training.schedule import cosine
from selfmask.training.seeds import derive

from .small import HOW, Clothes, config, network


class Stopper(QuietDisplay):
    """Presses Ctrl-C when a step has been logged."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def line(self, line: Mapping[str, Any]) -> None:
        if line["step"] == self.step:
            os.kill(os.getpid(), self.number)


def run(out: Path, resume: bool = False, display: QuietDisplay | None = None, **changes: Any) -> AdaptResult:
    options: dict[str, Any] = {"display": display or QuietDisplay(), "report": False}
    base = network(dropout=0.1)
    return adapt(base, Clothes(), config(**changes), out=out, resume=resume, preprocessing=HOW, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> AdaptResult:
    """A run that nothing interrupted."""
    return run(tmp_path_factory.mktemp("whole") / "run")


def folder_of(result: AdaptResult) -> Path:
    assert result.folder is not None
    return result.folder


def same(one: AdaptResult, other: AdaptResult) -> bool:
    return (folder_of(one) / "mask.smn").read_bytes() == (folder_of(other) / "mask.smn").read_bytes()


def test_it_does_what_a_plain_loop_does() -> None:
    """The same steps written out: gradients, schedule, frozen prototypes, queue."""
    settings = config(steps=8)
    store = ImageStore(open_images(Clothes()), side=32)
    processes = Processes()

    def parts() -> tuple[Any, SwAV, Steps]:
        masked = get_masked_model(network(), settings.mask)
        objective = SwAV(16, settings.objective, seed=1)
        views = MultiCrop(settings.chosen_views, HOW)
        return masked, objective, Steps(store, views, batch_size=8, seed=0, processes=processes)

    masked, objective, batches = parts()
    groups = [
        ParameterGroup(list(masked.scores.parameters()), 300.0),
        ParameterGroup(list(objective.parameters()), 0.15, 1e-6),
    ]
    train(masked, objective, groups, batches, 8, LoopConfig(), None, processes)

    plain, heads, batches = parts()
    plain.train()
    momentum: dict[nn.Parameter, torch.Tensor] = {}
    for step in range(8):
        heads.before_step(plain, step / 8)
        loss, _ = heads.loss(plain, batches[step], step / 8)
        parameters = [*plain.scores.parameters(), *heads.parameters()]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        rate = cosine((step + 0.5) / 8)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter is heads.prototypes.weight and step / 8 < settings.objective.freeze_prototypes:
                continue
            assert gradient is not None
            is_score = any(parameter is score for score in plain.scores.parameters())
            if not is_score:
                gradient = gradient + 1e-6 * parameter.detach()
            old = momentum.get(parameter)
            momentum[parameter] = gradient if old is None else 0.9 * old + gradient
            with torch.no_grad():
                parameter -= (300.0 if is_score else 0.15) * rate * momentum[parameter]
    for (name, mine), theirs in zip(masked.scores.items(), plain.scores.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(objective.state_dict(), heads.state_dict(), rtol=1e-4, atol=1e-5)
    assert masked.sparsity()["total"] < 1


def test_accumulating_gradients_adds_them_up() -> None:
    """With a loss that is a mean over images, parts of a batch give the gradient of the whole."""
    weights = []
    for accumulate in (1, 4):
        store, processes = ImageStore(open_images(Clothes()), side=32), Processes()
        views = MultiCrop(config().chosen_views, HOW)
        batches = Steps(store, views, batch_size=8, seed=0, processes=processes, with_labels=True)
        model, objective = network(norm=False), Supervised(LinearHead(16, [str(i) for i in range(10)]))
        groups = [ParameterGroup([*model.parameters(), *objective.parameters()], 0.1)]
        train(model, objective, groups, batches, 4, LoopConfig(accumulate=accumulate), None, processes)
        weights.append(model[0].weight)
    torch.testing.assert_close(weights[0], weights[1])


def test_two_runs_are_the_same_and_another_seed_is_not(tmp_path: Path, whole: AdaptResult) -> None:
    second, other = (run(tmp_path / name, seed=seed) for name, seed in (("b", 0), ("c", 1)))
    assert same(whole, second)
    assert [line["loss"] for line in whole.log] == [line["loss"] for line in second.log]
    assert not same(whole, other)
    assert other.result["active"] < 1


@pytest.mark.parametrize(("step", "number"), [*((step, signal.SIGINT) for step in (1, 4, 6, 11)), (4, signal.SIGTERM)])
def test_ctrl_c_saves_and_the_resumed_run_ends_in_the_same_bits(
    tmp_path: Path, whole: AdaptResult, step: int, number: int
) -> None:
    with pytest.raises(InterruptedRunError, match=rf"after step {step} of 12[\s\S]*--resume"):
        run(tmp_path / "cut", display=Stopper(step, number))
    assert not (tmp_path / "cut" / "result.json").exists()
    resumed = run(tmp_path / "cut", resume=True)
    assert same(whole, resumed)
    assert [line["step"] for line in resumed.log] == list(range(1, 13))


def test_ctrl_c_at_the_last_step_is_no_less_a_stop(tmp_path: Path, whole: AdaptResult) -> None:
    """Whoever runs many after each other would have to press it again."""
    with pytest.raises(InterruptedRunError, match="after step 12 of 12"):
        run(tmp_path / "cut", display=Stopper(12))
    resumed = run(tmp_path / "cut", resume=True)
    assert resumed.result["steps"] == 12
    assert same(whole, resumed)


def test_a_crash_between_checkpoints_goes_back_to_the_last_one(tmp_path: Path, whole: AdaptResult) -> None:
    class Crash(QuietDisplay):
        def line(self, line: Mapping[str, Any]) -> None:
            if line["step"] == 8:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "cut", display=Crash())
    assert same(whole, run(tmp_path / "cut", resume=True))


def test_a_finished_run_resumes_to_itself_and_keeps_its_numbers(tmp_path: Path, whole: AdaptResult) -> None:
    shutil.copytree(folder_of(whole), tmp_path / "run")
    again = run(tmp_path / "run", resume=True)
    assert same(whole, again)
    assert again.result == whole.result


@pytest.mark.parametrize("log", ["", None, '{"step": 1, "lo'])
def test_a_log_that_was_lost_does_not_stop_a_run_whose_last_step_is_saved(
    tmp_path: Path, whole: AdaptResult, log: str | None
) -> None:
    shutil.copytree(folder_of(whole), tmp_path / "run")
    for name in ("result.json", "mask.smn", "log.jsonl"):
        (tmp_path / "run" / name).unlink()
    if log is not None:
        (tmp_path / "run/log.jsonl").write_text(log)
    again = run(tmp_path / "run", resume=True)
    assert same(whole, again)
    assert again.result["loss"] is None


def test_killed_before_the_first_checkpoint_nothing_is_logged_twice(tmp_path: Path) -> None:
    class Crash(QuietDisplay):
        def line(self, line: Mapping[str, Any]) -> None:
            if line["step"] == 2:
                with (tmp_path / "cut" / "log.jsonl").open("a") as file:
                    file.write('{"step": 3, "lo')
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "cut", display=Crash())
    assert [line["step"] for line in run(tmp_path / "cut", resume=True).log] == list(range(1, 13))


def test_a_loss_that_is_not_a_number_stops_the_run_and_is_not_saved(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = float("inf")
    with pytest.raises(DivergedRunError, match="not finite"):
        adapt(model, Clothes(), config(), out=tmp_path / "run", preprocessing=HOW)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_without_a_folder_an_interrupted_run_does_not_claim_to_be_saved() -> None:
    with pytest.raises(InterruptedRunError, match="nothing was saved"):
        adapt(network(), Clothes(), config(), preprocessing=HOW, display=Stopper(2))


def test_norms_over_all_processes_are_those_of_one_that_is_alone(tmp_path: Path, whole: AdaptResult) -> None:
    assert same(whole, run(tmp_path / "synced", sync_norm=True))


def test_half_precision_learns_too_and_keeps_scores_and_heads_exact(tmp_path: Path, whole: AdaptResult) -> None:
    result = run(tmp_path / "run", precision="bfloat16")
    assert all(score.dtype == torch.float32 for score in result.model.scores.values())
    assert result.result["active"] < 1
    assert result.log[0]["loss"] == pytest.approx(whole.log[0]["loss"], rel=0.02)


def test_signals_are_handed_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    run(tmp_path / "run", steps=1)
    assert signal.getsignal(signal.SIGINT) is before


def test_it_runs_in_a_thread(tmp_path: Path) -> None:
    """Notebooks and servers train in threads, where signals cannot be handled."""
    results: list[AdaptResult] = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path / "run", steps=2)))
    thread.start()
    thread.join()
    assert results[0].result["steps"] == 2


def test_the_log_tells_how_many_weights_flipped(whole: AdaptResult) -> None:
    log = whole.log
    total = 3 * 8 * 9 + 8 * 16 * 9
    assert all(0 <= line["flips"] <= total for line in log)
    off = round((1 - log[-1]["active"]) * total)
    assert 0 < off <= sum(line["flips"] for line in log)


WRONG: list[dict[str, Any]] = [
    {"accumulate": 0},
    {"checkpoint_every": 15},
    {"precision": "bf16"},
    {"seed": -1},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoopConfig(**wrong)


def test_seeds_differ_by_use() -> None:
    seeds = {derive(seed, use, step) for seed in range(3) for use in ("views", "order") for step in range(50)}
    assert len(seeds) == 300


@pytest.mark.parametrize("when", ["held_out", "objective", "guard"])
def test_an_image_that_changes_before_the_first_step_is_noticed(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While images are decoded, or while something is fitted to them."""
    photos, before = tmp_path / "photos", getattr(Adaptation, when)
    photos.mkdir()
    for number, (pixels, _) in enumerate(Clothes(24).items):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(photos / f"{number}.png")

    def replacing(self: Adaptation, *given: Any) -> Any:
        shutil.copyfile(photos / "3.png", photos / "4.png")
        return before(self, *given)

    kept = (photos / "4.png").read_bytes()
    monkeypatch.setattr(Adaptation, when, replacing)
    with pytest.raises(ImagesChangedError):
        adapt(network(), photos, config(steps=2), out=tmp_path / "run", preprocessing=HOW, report=False)
    monkeypatch.undo()
    (photos / "4.png").write_bytes(kept)
    adapt(network(), photos, config(steps=2), out=tmp_path / "run", preprocessing=HOW, report=False)


def test_a_disk_that_fails_under_tensorboard_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes in a thread of its own, which would print a traceback."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    monkeypatch.setattr(writer.RecordWriter, "write", full)
    hook = threading.excepthook
    with pytest.raises(RunWriteError, match="No space left"):
        run(tmp_path / "run", steps=60, track=("tensorboard",))
    assert "Traceback" not in capsys.readouterr().err
    assert threading.excepthook is hook
