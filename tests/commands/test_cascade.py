"""Fitting a cascade: every stage once, whatever happens in between, and the same file in the end."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from selfmask import AdaptConfig, Cascade, CascadeConfig, MaskedModel, adapt, fit_cascade, get_masked_model, memory
from selfmask.commands.cascade.expert import train_expert
from selfmask.commands.cascade.job import Job, check_memory, least_images
from selfmask.commands.cascade.run import collect, prepare
from selfmask.data import SomeImages
from selfmask.data.identity import identity
from selfmask.errors import (
    BadImageError,
    ClusterError,
    ConfigError,
    ExpertError,
    NotAMaskFileError,
    RunBusyError,
    RunDamagedError,
    RunError,
    RunMismatchError,
    TooManyBadImagesError,
    WrongBaseError,
)
from selfmask.training.display import StagesDisplay
from selfmask.training.start import Start
from tests.light import mostly_heavy
from tests.training.small import HOW, config, network

from ..cascade.small import EXPERTS, cascade_config, clothes
from ..light import no_report
from ..processes import PROCESSES

IMAGES = 150


def fit(out: Path | None, settings: CascadeConfig | None = None, **more: Any) -> Cascade:
    """Without a report unless it is asked for: it takes longer than the rest."""
    model = more.pop("model", None) or network()
    with nullcontext() if more.pop("report", False) else no_report():
        return fit_cascade(model, clothes(IMAGES), settings or cascade_config(), out=out, preprocessing=HOW, **more)


def job(folder: Path, settings: CascadeConfig | None = None) -> Job:
    return Job(network(), clothes(IMAGES), settings or cascade_config(), folder, HOW, {}, 0.05)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "cascade"
    fit(out, report=True)
    return out


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_it_leaves_a_file_numbers_and_a_report(whole: Path) -> None:
    result = read(whole / "result.json")
    assert (result["experts"], result["images"], sum(result["sizes"])) == (EXPERTS, IMAGES, IMAGES)
    assert result["bytes"]["file"] == (whole / "cascade.smn").stat().st_size
    assert result["bytes"]["paper"] * 32 == result["bytes"]["float32"]
    assert all(change > 0 for change in result["expert_changes"])
    assert set(result["seconds"]) >= {"dispatcher", "expert 0"}
    page = (whole / "report.html").read_text()
    assert page.count("<img") >= EXPERTS * 4
    for k in range(EXPERTS):
        expert = read(whole / f"experts/{k}/config.json")
        assert expert["facts"]["steps"] == 6  # as many as the dispatcher took
        assert expert["facts"]["start"] == Start.of(whole / "dispatcher").identity(network())


def test_without_a_folder_it_leaves_nothing(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cascade = fit(None)
    assert torch.equal(cascade.embed(clothes(10)), Cascade.load(network(), whole / "cascade.smn").embed(clothes(10)))


def test_vectors_are_white_on_the_images_it_was_fitted_to(whole: Path) -> None:
    cascade = Cascade.load(network(), whole / "cascade.smn")
    for combination in ("conditional", "unconditional"):
        deviations = cascade.embed(clothes(IMAGES), combination=combination).double().std(0)
        np.testing.assert_allclose(deviations[deviations > 0], 1, atol=2e-3)


def test_experts_begin_where_the_dispatcher_ended(tmp_path: Path, whole: Path) -> None:
    """Scores, statistics, projector and prototypes; the queue, which holds other images, begins anew."""
    state = torch.load(whole / "dispatcher/checkpoints/last.pt", weights_only=True)
    seen: dict[str, Any] = {}

    def watch(model: MaskedModel, line: Mapping[str, Any]) -> None:
        seen.setdefault("model", {key: value.clone() for key, value in model.state_dict().items()})

    start = Start.of(whole / "dispatcher")
    frozen = config(steps=1, lr=1e-12, head_lr=1e-12)
    adapt(network(), clothes(40), frozen, out=tmp_path / "e", start=start, preprocessing=HOW, report=False, watch=watch)
    for key, value in state["model"].items():
        if key.startswith("scores"):
            torch.testing.assert_close(seen["model"][key], value, atol=1e-6, rtol=0)
    objective = torch.load(tmp_path / "e/checkpoints/last.pt", weights_only=True)["objective"]
    for key, value in state["objective"].items():
        if key.startswith(("projector", "prototypes")):
            torch.testing.assert_close(objective[key], value, atol=2e-3, rtol=0)  # prototypes get length 1 again
    assert objective["queue_filled"] < state["objective"]["queue_filled"]
    assert not (tmp_path / "e/report.html").exists()


def test_an_expert_that_does_not_help_is_the_dispatcher(tmp_path: Path, whole: Path) -> None:
    """With a gate: what it falls back to is where it began, to the bit, statistics included."""
    guarded = AdaptConfig.preset(
        "fast", steps=2, batch_size=8, size=16, log_every=1, checkpoint_every=1, quality_every=1, track=()
    )
    adapt(network(), clothes(60), guarded, out=tmp_path / "d", preprocessing=HOW)
    base = MaskedModel.from_pretrained(network(), tmp_path / "d/mask.smn").pack()
    worse = dataclasses.replace(guarded, lr=1e-9)
    result = adapt(network(), clothes(60), worse, out=tmp_path / "e", start=Start.of(tmp_path / "d"), preprocessing=HOW)
    assert result.result["kept"] in ("start", "mask")
    mask = MaskedModel.from_pretrained(network(), tmp_path / "e/mask.smn").pack()
    assert mask.sha256 == base.sha256
    if result.result["kept"] == "start":
        assert result.helped is False
        assert all(torch.equal(value, base.norm[name]) for name, value in mask.norm.items())


class Plug(StagesDisplay):
    """Pulls the plug after so many signs of life: steps, images, stages."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def share(self, share: float, name: str | None = None) -> None:
        super().share(share, name)
        self.left -= 1
        if self.left <= 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("seed", mostly_heavy(range(4)))
def test_cut_at_a_random_moment_it_goes_on_to_the_same_file(tmp_path: Path, whole: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "cut", display=Plug(chance.randint(1, 24)))
    finished = {file: file.stat().st_mtime_ns for file in (tmp_path / "cut").glob("**/mask.smn")}
    fit(tmp_path / "cut")
    assert (tmp_path / "cut/cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()
    assert {file: file.stat().st_mtime_ns for file in finished} == finished  # what was finished is not done again


def fit_in_another_process(out: Path, errors: Path) -> None:
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    fit(out, workers=2)


def begin(out: Path, errors: Path) -> BaseProcess:
    """Train experts side by side in other processes, and return when one has begun."""
    child = PROCESSES.Process(target=fit_in_another_process, args=(out, errors))
    child.start()
    while child.is_alive() and not list(out.glob("experts/*/log.jsonl")):
        time.sleep(0.01)
    return child


@pytest.mark.heavy
def test_killed_while_experts_are_trained_side_by_side(tmp_path: Path, whole: Path) -> None:
    """`kill -9` of the main process ends its workers, too; then the same call ends in the same file."""
    out = tmp_path / "cut"
    child = begin(out, tmp_path / "errors")
    child.kill()
    child.join()
    while True:
        try:
            fit(out)
            break
        except RunBusyError:  # a worker notices within a second that nobody waits for it any more
            time.sleep(0.2)
    assert (out / "cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()


@pytest.mark.heavy
def test_ctrl_c_while_experts_are_trained_side_by_side(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "cut"
    child = begin(out, tmp_path / "errors")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    child.join()
    assert child.exitcode == 1
    assert "InterruptedRunError" in (tmp_path / "errors").read_text()
    assert not (out / "cascade.smn").exists()
    fit(out)
    assert (out / "cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()


def test_experts_can_be_trained_anywhere_and_collected(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "shared"
    prepare(job(out), None, StagesDisplay())
    with pytest.raises(ExpertError, match="expert 0 is not trained") as caught:
        collect(job(out), StagesDisplay())
    assert "--index 0" in str(caught.value)
    for index in reversed(range(EXPERTS)):
        train_expert(job(out), index)
    with pytest.raises(ConfigError, match="no such expert"):
        train_expert(job(out), EXPERTS)
    collect(job(out), StagesDisplay())
    assert (out / "cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()


def copied(whole: Path, to: Path) -> Path:
    """A cascade with all experts, not yet collected."""
    shutil.copytree(whole, to)
    for name in ("cascade.smn", "result.json", "report.html"):
        (to / name).unlink()
    return to


@pytest.mark.parametrize("damage", ["missing", "cut off", "of another base"])
def test_an_expert_that_cannot_be_used_is_named_and_the_rest_is_kept(tmp_path: Path, whole: Path, damage: str) -> None:
    out = copied(whole, tmp_path / "run")
    file = out / "experts/1/mask.smn"
    if damage == "missing":
        file.unlink()
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        adapt(network(norm=False), clothes(40), config(steps=1), out=tmp_path / "o", preprocessing=HOW, report=False)
        shutil.copy(tmp_path / "o/mask.smn", file)
    with pytest.raises(ExpertError, match="expert 1") as caught:
        collect(job(out), StagesDisplay())
    assert "--index 1" in str(caught.value)
    shutil.rmtree(out / "experts/1")
    fit(out)
    assert (out / "cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()


def test_a_damaged_router_is_named(tmp_path: Path, whole: Path) -> None:
    out = copied(whole, tmp_path / "run")
    (out / "router.safetensors").write_bytes(b"x" * 200)
    with pytest.raises(RunDamagedError, match=r"router\.safetensors"):
        fit(out)


def test_a_dispatcher_can_be_given(tmp_path: Path, whole: Path) -> None:
    fit(tmp_path / "folder", dispatcher=whole / "dispatcher")
    assert (tmp_path / "folder/cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()
    alone = tmp_path / "alone.smn"
    shutil.copy(whole / "dispatcher/mask.smn", alone)
    cascade = fit(tmp_path / "file", dispatcher=alone)  # of which only bits are known
    first = MaskedModel.from_pretrained(network(), alone).pack()
    cascade.masked.set_mask("dispatcher")
    assert cascade.masked.pack().sha256 == first.sha256
    with pytest.raises(RunMismatchError, match="dispatcher"):
        fit(tmp_path / "file")


def test_dispatchers_that_cannot_be_used_are_refused_before_any_work(tmp_path: Path, whole: Path) -> None:
    other = network()
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    with pytest.raises(WrongBaseError):
        fit(tmp_path / "run", model=other, dispatcher=whole / "dispatcher")
    with pytest.raises(NotAMaskFileError):
        fit(tmp_path / "run", dispatcher=tmp_path / "nowhere")
    with pytest.raises(NotAMaskFileError):
        fit(tmp_path / "run", dispatcher=tmp_path)
    assert not list((tmp_path / "run").glob("**/*.smn"))


def test_clusters_that_are_too_small_keep_the_dispatcher(tmp_path: Path) -> None:
    many = cascade_config(experts=IMAGES // least_images(cascade_config()))  # enough only if all were of one size
    with pytest.raises(ClusterError, match="cluster") as caught:
        fit(tmp_path / "run", many)
    assert "--experts" in str(caught.value)
    kept = (tmp_path / "run/dispatcher/mask.smn").stat().st_mtime_ns
    fit(tmp_path / "run", cascade_config(router="kmeans", experts=2))  # the remedy, in the same folder
    assert (tmp_path / "run/dispatcher/mask.smn").stat().st_mtime_ns == kept


def test_too_few_images_for_all_experts_are_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="fewer images than the experts need") as caught:
        fit(tmp_path / "run", cascade_config(experts=40))
    assert "--experts" in str(caught.value)
    assert not (tmp_path / "run/dispatcher").exists()


def test_fewer_images_than_components_keep_the_dispatcher(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="20 components") as caught:
        fit(tmp_path / "run", cascade_config(components=20))
    assert "--components" in str(caught.value)
    assert (tmp_path / "run/dispatcher/mask.smn").exists()


def test_other_settings_are_refused(tmp_path: Path, whole: Path) -> None:
    out = copied(whole, tmp_path / "run")
    for changes in ({"experts": 2}, {"seed": 1}, {"steps": 7}):
        with pytest.raises(RunMismatchError):
            fit(out, cascade_config(**changes))
    with pytest.raises(ConfigError, match="workers"):
        fit(tmp_path / "new", workers=0)


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    class Second(StagesDisplay):
        def share(self, share: float, name: str | None = None) -> None:
            with pytest.raises(RunBusyError):
                fit(tmp_path / "run")
            raise RunError("seen")

    with pytest.raises(RunError, match="seen"):
        fit(tmp_path / "run", display=Second())


def test_epochs_become_the_same_number_of_steps() -> None:
    """The paper's rule: epochs in proportion to how much smaller the cluster is, rounded."""
    paper = CascadeConfig.preset("paper", epochs=150)
    for own in (5_000, 10_000, 12_345):
        expert = paper.expert(0, 50_000, own)
        assert expert.epochs == round(50_000 / own * 150)
        assert expert.number_of_steps(own // 64) == pytest.approx(150 * (50_000 // 64), rel=0.02)
    assert paper.expert(0, 50_000, 50).seed != paper.expert(1, 50_000, 50).seed
    assert paper.adapt.objective.queue_start == pytest.approx(1 / 5)


# ---- what must not happen silently ---------------------------------------------------------------------------------


def cut_after_dispatcher(out: Path, **more: Any) -> None:
    class Cut(StagesDisplay):
        def finished(self, name: str, seconds: float) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(out, display=Cut(), **more)


def test_a_dispatcher_of_other_settings_is_not_taken_for_this_one(tmp_path: Path, whole: Path) -> None:
    cut_after_dispatcher(tmp_path / "own")
    with pytest.raises(RunMismatchError, match="steps"):
        fit(tmp_path / "own", cascade_config(steps=7))
    adapt(network(), clothes(40), config(steps=3), out=tmp_path / "other", preprocessing=HOW, report=False)
    with pytest.raises(RunMismatchError, match="another dispatcher"):
        fit(tmp_path / "own", dispatcher=tmp_path / "other")
    cut_after_dispatcher(tmp_path / "given", dispatcher=whole / "dispatcher")
    with pytest.raises(RunMismatchError, match="given"):
        fit(tmp_path / "given")
    fit(tmp_path / "given", dispatcher=whole / "dispatcher")


def test_other_images_are_not_taken_for_these(tmp_path: Path, whole: Path) -> None:
    out = copied(whole, tmp_path / "run")
    other = dataclasses.replace(job(out), images=clothes(IMAGES + 1))
    for call in (lambda: collect(other, StagesDisplay()), lambda: train_expert(other, 0)):
        with pytest.raises(RunMismatchError, match="not the images"):
            call()
    assert not (out / "cascade.smn").exists()


def test_a_missing_mask_of_an_expert_is_made_again_by_its_command(tmp_path: Path, whole: Path) -> None:
    out = copied(whole, tmp_path / "run")
    before = (out / "experts/1/mask.smn").read_bytes()
    (out / "experts/1/mask.smn").unlink()
    train_expert(job(out), 1)
    assert (out / "experts/1/mask.smn").read_bytes() == before
    (out / "dispatcher/mask.smn").unlink()
    (out / "router.safetensors").unlink()
    fit(out)
    assert (out / "cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()


def test_a_damaged_cascade_is_named_with_a_remedy_that_works(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "cascade.smn").write_bytes((whole / "cascade.smn").read_bytes()[:-9])
    with pytest.raises(RunDamagedError, match="cascade") as caught:
        fit(out)
    assert "remove it" in str(caught.value)
    (out / "cascade.smn").unlink()
    fit(out)
    assert (out / "cascade.smn").read_bytes() == (whole / "cascade.smn").read_bytes()


def test_a_dispatcher_that_does_not_say_how_to_prepare_images(tmp_path: Path) -> None:
    masked = get_masked_model(network(), config().mask)
    masked.save_pretrained(tmp_path / "bare.smn")
    cascade = fit(tmp_path / "run", dispatcher=tmp_path / "bare.smn")
    assert cascade.preprocessing == HOW


def test_a_dispatcher_of_another_size_is_refused(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(ConfigError, match="another size"):
        fit(tmp_path / "run", cascade_config(size=24), dispatcher=whole / "dispatcher")


def test_a_mask_and_a_checkpoint_of_different_runs_are_refused_before_any_work(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole / "dispatcher", tmp_path / "mixed")
    shutil.copy(whole / "experts/0/mask.smn", tmp_path / "mixed/mask.smn")
    with pytest.raises(RunDamagedError, match="different runs"):
        fit(tmp_path / "run", dispatcher=tmp_path / "mixed")
    shutil.copy(tmp_path / "mixed/mask.smn", tmp_path / "alone.smn")
    fit(tmp_path / "run", dispatcher=tmp_path / "alone.smn")  # the remedy, in the same folder


def test_statistics_are_those_of_the_mask(tmp_path: Path) -> None:
    """Without a gate, they are estimated after the last checkpoint."""
    settings = AdaptConfig.preset("fast", steps=3, batch_size=8, size=16, gate=False, lr=3000.0, track=())
    adapt(network(), clothes(60), settings, out=tmp_path / "d", preprocessing=HOW, report=False)
    mask = MaskedModel.from_pretrained(network(), tmp_path / "d/mask.smn").pack()
    begun = Start.of(tmp_path / "d").begin(network()).pack()
    assert mask.norm
    assert all(torch.equal(value, begun.norm[name]) for name, value in mask.norm.items())


def test_images_that_cannot_be_read_are_counted_with_a_given_dispatcher_too(tmp_path: Path, whole: Path) -> None:
    class Bad(SomeImages):
        def load(self, i: int, *, near: int | None = None) -> torch.Tensor:
            if i % 3 == 0:
                raise BadImageError("cannot read", found="nothing")
            return super().load(i, near=near)

    bad = Bad(clothes(IMAGES), range(IMAGES))
    with pytest.raises(TooManyBadImagesError, match="50 of 150"):
        fit_cascade(network(), bad, cascade_config(), out=tmp_path / "run", dispatcher=whole / "dispatcher")


@pytest.mark.parametrize("labels", mostly_heavy([[10**9] * IMAGES, [-1] * IMAGES, None]))
def test_labels_of_any_kind_or_none(tmp_path: Path, whole: Path, labels: list[int] | None) -> None:
    images = clothes(IMAGES)
    images.labels = labels
    images.classes = None
    out = copied(whole, tmp_path / "run")
    began = read(out / "config.json")
    (out / "config.json").write_text(json.dumps(began | {"facts": began["facts"] | {"content": identity(images)[:16]}}))
    collect(dataclasses.replace(job(out), images=images), StagesDisplay())
    page = (out / "report.html").read_text()
    assert ("most common in the cluster" in page) == (labels is not None and labels[0] > 0)


def test_more_memory_than_there_is_is_not_asked_for() -> None:
    with pytest.raises(ConfigError, match="memory") as caught:
        check_memory(64, 50_000)
    assert "--experts" in str(caught.value)
    check_memory(5, 256)


def test_the_memory_of_a_container_counts_not_that_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_left_to_groups", lambda _: [100 << 20])
    with pytest.raises(ConfigError, match="memory"):
        check_memory(5, 256)  # 108 MiB
    check_memory(4, 256)


class Unsendable(nn.Sequential):
    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("cannot pickle this")


def test_models_that_cannot_be_sent_to_another_process_are_refused(tmp_path: Path, whole: Path) -> None:
    out = copied(whole, tmp_path / "run")
    shutil.rmtree(out / "experts/2")
    with pytest.raises(ConfigError, match="another process") as caught:
        fit(out, model=Unsendable(*network()), workers=2)
    assert "workers=1" in str(caught.value)


def test_experts_may_see_a_number_of_images_as_in_the_paper() -> None:
    config = CascadeConfig.preset("reference", expert_images=7_500_000)
    assert [config.expert(0, 137_994, own).epochs for own in (10_000, 27_600, 50_000)] == [750, 272, 150]
