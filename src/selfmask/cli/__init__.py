"""The command line: one verb a file, each thin: parse, call, print.

A verb's file is imported when the verb is used: `selfmask --help`, and the completion of verbs, need no torch.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import BaseWarning, InterruptedRunError, SelfmaskError
from ..memory import keep_memory
from ..plain import plain
from .console import Console, error_as_json, print_error, print_json, show_warning
from .streams import lasting_streams

_NO_MEMORY = re.compile("can't allocate memory|out of memory", re.IGNORECASE)
VERBS = {
    "adapt": "Adapt a backbone to unlabelled images by learning which of its weights to switch off.",
    "embed": "Turn images into vectors: write file names and float32 vectors to one file.",
    "index": "Index images for searching: vectors of the frozen backbone and of masks, thumbnails, nearest neighbours.",
    "search": "Find the images of a collection that are nearest to a photo, by the frozen backbone and by each mask.",
    "evaluate": "Measure accuracy on labelled images: frozen, and with the mask or cascade, with and without a map.",
    "export": "Write the adapted network as a file that other programs run, without selfmask.",
    "predict": "Tell the class of each image, and how probable it is.",
    "curate": "Find near-duplicates and outliers among images, and say which to label first.",
    "check": "Check whether a mask still helps on new images, and how far these have drifted.",
    "find": "Find the mask that fits some images best, among many and the frozen backbone, without labels.",
    "combine": "Combine masks of one backbone into one: by vote, by what all leave on, or by what any leaves on.",
    "masks": "List a folder of masks; or pack many masks of one backbone into one file, and unpack it.",
    "train": "Train with labels: a mask and its head in one small file, or a baseline.",
    "compare": "Compare masks with fine-tuning, linear heads, LoRA and BitFit: accuracy against labels and bytes.",
    "cascade": "Learn one mask for all images, and an expert mask for each cluster of images.",
    "serve": "Serve one backbone under any number of masks: embeddings, classes and search over HTTP.",
    "study": "Repeat a table or figure of the paper, in miniature or in full.",
    "compress": "Compress masks and weights with general compressors, and compare the bytes with our own coding.",
    "inspect": "Show the contents of a mask file: sizes, share of active weights by layer, base.",
    "push": "Share a mask on the Hugging Face hub: the file, its map and a model card, in one commit.",
    "pull": "Get a mask from the Hugging Face hub into a folder, which can be used as that of a run.",
    "backbones": "List backbones: vector length, size, and whether the weights are on this machine.",
    "datasets": "List data sets known by name: images, classes, split, licence, and whether they are on this machine.",
    "doctor": "Show what this machine has (torch, devices, memory, extras), and try what training needs.",
    "demo": "Adapt a small network trained on CIFAR-10 to images of clothes, and measure the gain.",
    "pretrain": "Train a network of this package from random weights, with the training loop used for masks.",
}
"""The verbs, with the first sentence of their own help."""


class _Verbs(TyperGroup):
    """Knows the names of the verbs, and imports the one that is used."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _plain_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _plain_usage():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest


@contextmanager
def _plain_usage() -> Iterator[None]:
    """Mistakes in usage are printed by typer, which does not look at what it prints."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "message") and hasattr(error, "format_message"):  # typer's errors; it has a click of its own
            error.message = plain(error.message, keep="\n")
            if _wants_json():
                print_json({"error": error.format_message(), "kind": "UsageError"})
        raise


def _wants_json() -> bool:
    return "--json" in sys.argv[1:]


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
    try:
        with lasting_streams():
            app()
    finally:
        # All is done: Ctrl-C, while Python takes itself down, would only make it print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def app() -> None:
    """Run the command line, in whatever process.

    Our own errors are shown as text, without a traceback, and give exit code 2; a run that was interrupted, and
    saved, gives 130, as a shell expects after Ctrl-C. With --json, an error is a JSON object on standard output, too.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal's encoding does not have is no reason to stop
            with suppress(OSError):  # nor is an output that is no longer what it was opened as
                stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # about odd files; what cannot be read is counted and listed
        warnings.simplefilter("default", BaseWarning)
        warnings.showwarning = show_warning
        try:
            _run()
        except SelfmaskError as error:
            rank = os.environ.get("RANK", "0")
            if rank == "0" and _wants_json():
                print_json(error_as_json(error))
            if not error.of_main:  # of what stops them all, the main one speaks
                print_error(error, process=None if rank == "0" else rank)
            sys.exit(130 if isinstance(error, InterruptedRunError) else 2)
        except KeyboardInterrupt:  # before typer listens, or after
            Console(stderr=True).say("Aborted.")
            sys.exit(130)


def _run() -> None:
    """What the system refuses is an error of ours, too: a name that is too long, a disk that fails, memory."""
    try:
        _app()
    except OSError as error:
        if isinstance(error, SelfmaskError):
            raise
        named = "a file" if error.filename is None else error.filename
        raise SelfmaskError(f"cannot use {named}", found=error.strerror or error, todo="check the path") from error
    except (MemoryError, RuntimeError) as error:
        # torch has no error of its own for memory of the CPU
        if isinstance(error, RuntimeError) and not _NO_MEMORY.search(str(error)):
            raise
        raise SelfmaskError(
            "there is not enough memory",
            found=str(error).partition("\n")[0] or None,
            todo="use a smaller batch or size: --batch-size, --size; or fewer workers",
        ) from error
