"""The training loop. One for every objective: masks or full weights, with labels or without."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import ConfigError, DivergedRunError, InterruptedRunError, RunDamagedError
from ..masking import MaskedModel
from ..objectives import Health, Objective
from ..stopping import stop_flag
from .batches import Steps
from .config import LoopConfig
from .flips import FlipCounter
from .folder import RunFolder
from .guard import Guard, put_state, take_state
from .optimizer import PerTensorSGD
from .precision import autocast, chosen
from .processes import Processes
from .quality import as_quality
from .schedule import cosine
from .seeds import derive
from .sync_norm import SyncNorm

Report = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate.

    per_tensor: gradients count in units of each tensor's own, as in `PerTensorSGD`.
    together: parameters that count as one tensor there.
    start: the share of the run after which they learn.
    """

    parameters: list[nn.Parameter]
    lr: float
    weight_decay: float = 0.0
    per_tensor: bool = False
    start: float = 0.0
    together: Sequence[Sequence[nn.Parameter]] = ()


def train(
    model: nn.Module,
    objective: Objective,
    groups: list[ParameterGroup],
    batches: Steps,
    steps: int,
    config: LoopConfig,
    folder: RunFolder | None,
    processes: Processes,
    reports: Sequence[Report] = (),
    guard: Guard | None = None,
) -> None:
    """Train `model` and the objective's heads in place; go on from the folder's last checkpoint if it has one.

    `folder` is None in all processes but the main one. Each of `reports` gets every line of the log. With a guard, the
    model ends at the best point, not at the last.
    """
    optimizer = PerTensorSGD(
        [
            {
                "params": group.parameters,
                "lr": group.lr,
                "weight_decay": group.weight_decay,
                "per_tensor": group.per_tensor,
            }
            for group in groups
        ],
        momentum=config.momentum,
        together=[whole for group in groups for whole in group.together],
    )
    state = _State(model, objective, optimizer, folder, processes, guard)
    start = state.restore()
    run: Any = torch.compile(model) if config.compile else model
    workers = processes.workers if config.workers is None else config.workers
    precision = chosen(config.precision, model, processes.device)
    meter = _Meter(model, start)
    sync_norm = config.sync_norm and processes.count > 1
    model.train()
    objective.train()
    end = start if guard is not None and guard.stopped else steps
    with stop_flag() as asked_to_stop, batches.between(start, end, workers) as made:
        for step, batch in enumerate(made, start):
            progress = step / steps
            torch.manual_seed(derive(config.seed, "step", step, processes.rank))  # for dropout and its kin
            factor = cosine((step + 0.5) / steps, config.warmup) * (guard.scale if guard else 1.0)
            for group, settings in zip(groups, optimizer.param_groups, strict=True):
                settings["lr"] = group.lr * factor if progress >= group.start else 0.0
            if isinstance(model, MaskedModel):
                by_epoch = model.config.share_every == "epoch"
                model.progress = batches.progress_by_epoch(step, steps) if by_epoch else progress

            objective.before_step(model, progress)
            optimizer.zero_grad()
            for part in _parts(batch, config.accumulate, processes.device):
                with autocast(precision, processes.device), SyncNorm() if sync_norm else nullcontext():
                    loss, health = objective.loss(run, part, progress)
                (loss / config.accumulate).backward()  # type: ignore[no-untyped-call]
                meter.add(loss, health, _size(part) * processes.count)
            objective.after_backward(model, progress)
            processes.average_gradients(model, objective)
            optimizer.step()
            objective.after_step(model, progress)

            done = step + 1
            if done % config.log_every == 0 or done == steps:
                line = meter.line(done, processes, lr=groups[0].lr * factor)
                if guard is not None:
                    line |= state.guarded(guard, line, done == steps)
                elif not math.isfinite(line["loss"]):  # before it could get into a checkpoint
                    raise DivergedRunError(
                        f"the loss is not finite at step {done}",
                        todo="lower the learning rate, or use --precision float32 (the previous checkpoint is kept)",
                    )
                state.log(line)
                for report in reports:
                    report(line)
            stop, over = processes.any(asked_to_stop()), guard is not None and guard.stopped
            if done % config.checkpoint_every == 0 or done == steps or stop or over:
                state.save(done)
            if over:
                break
            if stop:  # after the last step too: whoever calls may have more to do
                raise InterruptedRunError(
                    f"stopped after step {done} of {steps}; everything is saved",
                    todo="continue with --resume and the run folder; for a cascade, run the same command again",
                )
    if isinstance(model, MaskedModel):
        model.progress = 1.0
    if guard is not None:
        state.put(guard.best_state)


class _State:
    """What must be saved for a resumed run to end in the same bits: everything that changes from step to step."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        folder: RunFolder | None,
        processes: Processes,
        guard: Guard | None,
    ) -> None:
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.folder, self.processes, self.guard = folder, processes, guard
        self._saved_best = 0

    def take(self, done: int) -> dict[str, Any]:
        """A checkpoint of this moment."""
        guard = self.guard.state_dict() if self.guard else None
        return {"step": done, **take_state(self.model, self.objective, self.optimizer), "guard": guard}

    def put(self, state: dict[str, Any]) -> None:
        put_state(state, self.model, self.objective, self.optimizer)

    def restore(self) -> int:
        """Load the last checkpoint into everything; return how many steps are done."""
        last, best = self.processes.from_main(
            lambda: (
                (self.folder.load_checkpoint("last"), self.folder.load_checkpoint("best"))
                if self.folder
                else (None, None)
            )
        )
        # A run that was killed between writing the two goes on from the best point, which is then the later one.
        checkpoint = max((each for each in (last, best) if each), key=lambda each: each["step"], default=None)
        step = 0 if checkpoint is None else int(checkpoint["step"])
        if self.folder is not None:
            self.folder.forget_log_after(step)
        if self.guard is not None and checkpoint is not None:
            # The start has no file: until the checkpoint is put in place, everything stands at it.
            kept = best if checkpoint["guard"]["best_step"] else copy.deepcopy(self.take(0))
            if kept is None:
                raise RunDamagedError(
                    "the checkpoint of the best point is missing", todo="start again in another folder: --out"
                )
            self.guard.load_state_dict(checkpoint["guard"], kept)
        elif self.guard is not None:
            self.guard.begin(partial(self.take, 0))
        if checkpoint is not None:
            self.put(checkpoint)
        return step

    def guarded(self, guard: Guard, line: Mapping[str, Any], last: bool) -> dict[str, Any]:
        """What the guard adds to a line of the log, having kept the best point or gone back to it."""
        added: dict[str, Any] = {}
        scores = guard.measure() if last or line["step"] % guard.every == 0 else None
        if scores is not None:
            added["quality"] = as_quality(scores)
        trouble = guard.look({**line, **added}, self.model, partial(self.take, line["step"]), scores)
        if trouble is not None:
            added |= {"trouble": trouble, "answer": guard.answer(line["step"])}
            self.put(guard.best_state)
        return added

    def log(self, line: Mapping[str, Any]) -> None:
        if self.folder is not None:
            self.folder.log(line)

    def save(self, done: int) -> None:
        if self.folder is None:
            return
        # The best point first, so that `last` never knows of a best one that is not there.
        if self.guard is not None and self.guard.best_step > self._saved_best:
            self.folder.save_checkpoint("best", self.guard.best_state)
            self._saved_best = self.guard.best_step
        self.folder.save_checkpoint("last", self.take(done))


class _Meter:
    """Gathers the numbers of the steps between two lines of the log."""

    def __init__(self, model: nn.Module, step: int) -> None:
        self._flips = FlipCounter(model) if isinstance(model, MaskedModel) else None
        self._since = step
        self._begin()

    def _begin(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._count = self._images = 0
        self._start = time.perf_counter()

    def add(self, loss: Tensor, health: Health, images: int) -> None:
        # Tensors are added up where they are: to read one would wait for the device.
        for name, value in {"loss": loss.detach(), **health.numbers()}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        self._images += images

    def line(self, done: int, processes: Processes, **more: float) -> dict[str, Any]:
        line: dict[str, Any] = {"step": done}
        means = torch.tensor([float(value) / self._count for value in self._sums.values()], device=processes.device)
        processes.average_([means])  # every process saw only its part of the batches
        line |= dict(zip(self._sums, means.tolist(), strict=True))
        if self._flips is not None:
            active, flips = self._flips.count()
            line |= {"active": active, "flips": flips / max(done - self._since, 1)}
        seconds = time.perf_counter() - self._start
        line |= {**more, "images_per_second": self._images / seconds, "seconds": seconds}
        self._since = done
        self._begin()
        return line


def _parts(batch: Any, number: int, device: torch.device) -> Iterator[Any]:
    """The batch on the device, in as many parts as gradients are accumulated over; whatever tensors it is made of."""
    size, rest = divmod(_size(batch), number)
    if rest:
        raise ConfigError(
            "a batch cannot be divided into equal micro-batches",
            expected=f"a multiple of {number} images",
            found=_size(batch),
        )
    for i in range(number):
        own = slice(size * i, size * (i + 1))
        yield tree_map(lambda tensor, own=own: tensor[own].to(device, non_blocking=True), batch)


def _size(batch: Any) -> int:
    return len(tree_leaves(batch)[0])
