"""`selfmask pretrain`: train the bundled tiny backbone from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def pretrain(
    images: Annotated[str, typer.Argument(help="What to learn from: a folder, an .npz file, or a data set's name.")],
    out: Annotated[Path, typer.Option(help="The run folder.")],
    epochs: Annotated[float, typer.Option(help="How often every image is seen.")] = 20,
    labels: Annotated[bool, typer.Option("--labels", help="Learn from labels instead of from views alone.")] = False,
    lr: Annotated[float, typer.Option(help="The learning rate of the weights.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the first weights, of views and of the order of images.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
) -> None:
    """Train the network behind `selfmask/tiny` from random weights, with the loop that adapts masks.

    The file it writes, tiny.safetensors, can be used with: --backbone selfmask/tiny --weights FILE.
    """
    from ..commands.pretrain import PretrainConfig
    from ..commands.pretrain import pretrain as run
    from ..training.display import ConsoleDisplay

    console = Console()
    display = ConsoleDisplay(console)
    config = PretrainConfig(epochs=epochs, labels=labels, lr=lr, seed=seed)
    file = run(images, out, config, resume=resume, display=display)
    console.print(f"weights in {file} ({file.stat().st_size:,} bytes)", highlight=False, markup=False, soft_wrap=True)
