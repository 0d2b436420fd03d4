"""How `selfmask/tiny` got its weights: the same loop, on full weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from .backbones.tiny import PREPROCESSING, TinyResNet
from .data import ImageStore, open_images
from .data.views import MultiCrop, ViewsConfig
from .errors import ConfigError, RunWriteError
from .heads import LinearHead
from .maskfile.writer import write_atomically
from .objectives import Objective, SwAV, SwAVConfig
from .objectives.supervised import Supervised
from .training import LoopConfig, ParameterGroup, Processes, Steps, open_folder, train
from .training.display import Display

BATCH = 256
WEIGHTS = "tiny.safetensors"


def pretrain(
    images: str, out: Path, *, epochs: float, labels: bool, lr: float, seed: int, resume: bool, display: Display
) -> Path:
    """Train the tiny backbone from random weights; return the file of its weights.

    Without labels: SwAV, as an adaptation does, but on the weights themselves. With labels: cross-entropy on one view.
    """
    processes = Processes()
    opened = open_images(images)
    with open_folder(out, resume, processes) as folder:
        with display.decoding(len(opened)) as progress:
            store = ImageStore(opened, side=2 * max(PREPROCESSING.size), progress=progress)
        torch.manual_seed(seed)
        model = TinyResNet().to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        objective, views = _with_labels(store, seed) if labels else _without_labels(seed)
        batches = Steps(
            *(store, MultiCrop(views, PREPROCESSING)),
            batch_size=BATCH,
            seed=seed,
            processes=processes,
            with_labels=labels,
        )
        steps = round(epochs * batches.per_epoch)
        config = {"images": images, "epochs": epochs, "labels": labels, "lr": lr, "seed": seed, "steps": steps}
        decay = 5e-4 if labels else 1e-4
        config |= {"batch_size": BATCH, "weight_decay": decay, "views": dataclasses.asdict(views)}
        if isinstance(objective, SwAV):
            config |= {"swav": dataclasses.asdict(objective.config)}
        processes.from_main(lambda: folder.begin(config) if folder else None)
        loop = LoopConfig(steps=steps, warmup=0.1, seed=seed, checkpoint_every=100)
        objective.to(processes.device)
        group = ParameterGroup([*model.parameters(), *objective.parameters()], lr, decay)
        with display.training(steps):
            train(model, objective, [group], batches, loop, folder, processes, [display.line])
        if folder is not None:
            write_atomically(out / WEIGHTS, save(half(model)), RunWriteError)
            folder.write_json("result.json", {**config, "loss": folder.read_log()[-1]["loss"]})
    return out / WEIGHTS


def half(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights as they are shipped: floating-point ones with 16 bits."""
    return {
        name: (value.half() if value.is_floating_point() else value).contiguous()
        for name, value in model.state_dict().items()
    }


def _without_labels(seed: int) -> tuple[Objective, ViewsConfig]:
    # Sharper assignments, few prototypes and soft crops, or a small network from random weights stays at ln K.
    swav = SwAVConfig(prototypes=100, epsilon=0.03, queue_length=0, freeze_prototypes=0.02)
    views = ViewsConfig(size=32, large=2, small=0, large_scale=(0.3, 1), blur_p=0)
    return SwAV(256, swav, seed=seed), views


def _with_labels(store: ImageStore, seed: int) -> tuple[Objective, ViewsConfig]:
    if store.labels is None:
        raise ConfigError("these images have no labels", todo="train without labels, or give class folders")
    views = ViewsConfig(
        size=32, large=1, small=0, large_scale=(0.4, 1), jitter=(0.3, 0.3, 0.3, 0.05), blur_p=0, grey_p=0.1
    )
    classes = [str(number) for number in range(max(store.labels) + 1)]
    return Supervised(LinearHead(256, classes, seed=seed)), views
