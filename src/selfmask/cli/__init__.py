"""The command line: one verb a file, each thin: parse, call, print."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from ..errors import SelfmaskError
from . import demo, inspect

_app = typer.Typer(
    name="selfmask",
    help="Adapt a frozen vision backbone by learning which of its weights to switch off.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
_app.command("inspect")(inspect.inspect)
_app.command("demo")(demo.demo)


@_app.callback()
def _main() -> None:
    """Adapt a frozen vision backbone by learning which of its weights to switch off."""


def app() -> None:
    """Run the command line; our own errors are shown as text, without a traceback, and give exit code 2."""
    try:
        _app()
    except SelfmaskError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
