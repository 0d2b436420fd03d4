"""`selfmask doctor`: what this machine has, and whether it works."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import Console, print_json

FAILED = 1
"""Exit code where something that was tried did not work."""


def doctor(
    test: Annotated[
        bool,
        typer.Option(
            help="Try it: a few steps of training, mixed precision, torch.compile, resume, several processes."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show what this machine has (torch, devices, memory, extras), and try what training needs.

    Takes about two minutes, on the GPU if there is one; --no-test only looks. Exit code 1 if something does not work.
    """
    from ..commands.doctor import facts, tries

    console = Console(stderr=as_json)
    found = facts()
    if not as_json:
        _show(console, found)
    done = tries(console.say) if test else []
    if as_json:
        print_json({**found, "tries": [dataclasses.asdict(each) for each in done]})
    elif done:
        table = Table("", "", "seconds", "", title_justify="left")
        for each in done:
            table.add_row(each.name, "works" if each.works else "FAILS", f"{each.seconds:.0f}", each.note)
        console.print(table)
    if not all(each.works for each in done):
        raise typer.Exit(FAILED)


def _show(console: Console, found: dict[str, Any]) -> None:
    table = Table("", "", title_justify="left")
    table.add_row("Python", f"{found['python']} on {found['system']}")
    table.add_row("packages", ", ".join(f"{name} {own or 'missing'}" for name, own in found["packages"].items()))
    cpu = found["cpu"]
    table.add_row("CPU", f"{cpu['cores']} cores, {cpu['threads']} threads used")
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.0f} GB (CUDA {found['cuda']})" for gpu in found["gpus"]]
    table.add_row("GPU", "; ".join(gpus) or "none that torch can use")
    table.add_row("memory", f"{found['memory_left_bytes'] / 1e9:.1f} of {found['memory_bytes'] / 1e9:.1f} GB left")
    table.add_row("disk", f"{found['disk_left_bytes'] / 1e9:.0f} GB left here")
    for name, missing in found["extras"].items():
        told = "installed" if not missing else f'missing {", ".join(missing)}: pip install "selfmask[{name}]"'
        table.add_row(f"extra {name}", told)
    console.print(table)
