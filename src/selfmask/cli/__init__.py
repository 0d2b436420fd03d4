"""The command line: one verb a file, each thin: parse, call, print."""

from __future__ import annotations

import os
import sys
import warnings

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import InterruptedRunError, SelfmaskError
from ..memory import keep_memory
from . import adapt, backbones, cascade, compare, demo, embed, evaluate, inspect, pretrain, train

_app = typer.Typer(
    name="selfmask",
    help="Adapt a frozen vision backbone by learning which of its weights to switch off.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
_app.command("adapt")(adapt.adapt)
_app.command("embed")(embed.embed)
_app.command("evaluate")(evaluate.evaluate)
_app.command("train")(train.train)
_app.command("compare")(compare.compare)
_app.add_typer(cascade.cascade, name="cascade")
_app.command("inspect")(inspect.inspect)
_app.command("backbones")(backbones.backbones)
_app.command("demo")(demo.demo)
_app.command("pretrain")(pretrain.pretrain)


@_app.callback()
def _main() -> None:
    """Adapt a frozen vision backbone by learning which of its weights to switch off."""


def main() -> None:
    """The command line as a process of its own, which may use memory as suits it."""
    keep_memory()
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
        if os.environ.get("RANK", "0") == "0":  # one of several processes speaks for all
            text = f"[bold red]error:[/] {escape(str(error))}"
            Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        sys.exit(130 if isinstance(error, InterruptedRunError) else 2)
