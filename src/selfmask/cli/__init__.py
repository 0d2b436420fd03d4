"""The command line: one verb a file, each thin: parse, call, print.

A verb's file is imported when the verb is used: `selfmask --help`, and the completion of verbs, need no torch.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from ..errors import InterruptedRunError, SelfmaskError
from ..memory import keep_memory
from .streams import lasting_streams

VERBS = {
    "adapt": "Adapt a backbone to unlabelled images by learning which of its weights to switch off.",
    "embed": "Turn images into vectors: write file names and float32 vectors to one file.",
    "evaluate": "Measure accuracy on labelled images: of the frozen backbone, and of the mask or cascade.",
    "train": "Train with labels: a mask and its head in one small file, or a baseline.",
    "compare": "Compare masks with fine-tuning, linear heads, LoRA and BitFit: accuracy against labels and bytes.",
    "cascade": "Learn one mask for all images, and an expert mask for each cluster of images.",
    "inspect": "Show the contents of a mask file: sizes, share of active weights by layer, base.",
    "backbones": "List backbones: vector length, size, and whether the weights are on this machine.",
    "demo": "Adapt a small network trained on CIFAR-10 to images of clothes, and measure the gain.",
    "pretrain": "Train the network behind `selfmask/tiny` from random weights, with the training loop used for masks.",
}
"""The verbs, with the first sentence of their own help."""


_A_MOMENT = 2.0  # seconds; torchrun looks ten times a second whether a process has failed


class _Verbs(TyperGroup):
    """Knows the names of the verbs, and imports the one that is used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest


def load(verb: str) -> Any:
    """The command of a verb, with its options. Made anew each time: objectives may have been added."""
    module = import_module(f".{verb}", __name__)
    made = module.command() if hasattr(module, "command") else getattr(module, verb)
    if not isinstance(made, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(verb)(made)
        made = alone
    return typer.main.get_command(made)


_app = typer.Typer(
    name="selfmask",
    cls=_Verbs,
    help="Adapt a frozen vision backbone by learning which of its weights to switch off.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
for _name, _help in VERBS.items():
    _app.command(_name, help=_help)(lambda: None)


@_app.callback()
def _main() -> None:
    """Adapt a frozen vision backbone by learning which of its weights to switch off."""


def main() -> None:
    """The command line as a process of its own, which may use memory as suits it."""
    keep_memory()
    with lasting_streams():
        app()


def app() -> None:
    """Run the command line, in whatever process.

    Our own errors are shown as text, without a traceback, and give exit code 2; a run that was interrupted, and
    saved, gives 130, as a shell expects after Ctrl-C.
    """
    warnings.filterwarnings("ignore", module="PIL")  # about odd files; what cannot be read is counted and listed
    try:
        _app()
    except SelfmaskError as error:
        _let_the_main_process_speak()
        text = f"[bold red]error:[/] {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        sys.exit(130 if isinstance(error, InterruptedRunError) else 2)
    except KeyboardInterrupt:  # before typer listens, or after
        Console(stderr=True).print("Aborted.")
        sys.exit(130)


def _let_the_main_process_speak() -> None:
    """Of several processes that fail alike, one is to show the error; but one that fails alone is to show it, too.

    If the main one failed as well, it has spoken within a moment, and torchrun ends the others. A variable RANK alone
    means nothing: other launchers set it.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        time.sleep(_A_MOMENT)
