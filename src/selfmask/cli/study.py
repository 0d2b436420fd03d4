"""`selfmask study`: the paper's tables and figures, each repeated by one command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from ..errors import ConfigError
from ..files import RunFile
from .console import Console, print_json
from .launching import JobOption, LaunchOption, launch_jobs, this_command

if TYPE_CHECKING:
    from ..studies.scale import Scale
    from ..studies.study import Study

_LIST, _ALL = "list", "all"


def study(
    name: Annotated[str, typer.Argument(help="Name of a study, `all`, or `list` to see which there are.")],
    scale: Annotated[
        Literal["laptop", "paper"],
        typer.Option(help="laptop repeats it in miniature; paper runs it as the paper did, on a GPU."),
    ] = "laptop",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Data set to use instead of those of the scale; may be repeated.", show_default=False),
    ] = None,
    backbone: Annotated[
        list[str] | None,
        typer.Option(help="Backbone to use instead of those of the scale; may be repeated.", show_default=False),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="File with the backbone's weights.", show_default=False)] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Repetitions of every run.", show_default="3, or as in the paper")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Run only one of N parts of the cells, on another machine the others; all/N with --launch.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for cells and results; what is finished there is not run again.")
    ] = Path("runs/studies"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells and what they take; run nothing.")
    ] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Run nothing; write the pages of what is finished in OUT.")
    ] = False,
    launch: LaunchOption = None,
    job_option: JobOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Repeat a table or figure of the paper, in miniature or in full.

    Cells are run once, whichever studies share them; the same command continues what was stopped, and two of them may
    share a folder. Results (a page, CSV, Markdown, SVG) are in OUT/results; of all studies, OUT/results/README.md says
    what became of each claim.

    Examples:  selfmask study list
    selfmask study rules
    selfmask study rules --scale paper --dry-run
    selfmask study rules --shard all/4 --launch slurm
    """
    from ..studies.catalogue import STUDIES, study_named
    from ..studies.output import for_reading, lines_of, write
    from ..studies.overview import write_overview
    from ..studies.runner import Part, Tasks, findings, is_left, run_study
    from ..studies.scale import Scale
    from .display import ConsoleStages

    console = Console(stderr=as_json)
    if name == _LIST:
        _list(console, as_json)
        return
    chosen = list(STUDIES.values()) if name == _ALL else [study_named(name)]
    size = Scale(scale, tuple(data or ()), tuple(backbone or ()), None if weights is None else str(weights), seeds)
    parts, tasks = Part.named(shard), Tasks(out, ConsoleStages(console))
    if dry_run:
        _plans(console, chosen, size)
        return
    if launch is not None and not no_run:
        if shard is None:
            raise ConfigError("--launch has to know the number of jobs", todo="give it: --shard all/N")
        tasks.begin()
        kept = this_command("--shard")
        left = [part for part in parts if any(is_left(each, size, tasks, part) for each in chosen)]
        jobs = [[*kept, "--shard", str(part)] for part in left]
        launch_jobs(jobs, launch, job_option, out / RunFile.JOBS, console)
    all_found = []
    for each in chosen:
        found = findings(each, size, tasks) if no_run or launch else run_study(each, size, tasks, parts)
        all_found.append(found)
        if launch is not None:  # what jobs say is in their logs
            trouble = {entry.task.title: why.partition("\n")[0] for entry, why in found.missing.items()}
            for title, why in trouble.items():
                console.say(f"{title}: {why}")
        files = write(found, out / "results")
        lines = lines_of(found)
        if as_json:
            print_json({"study": each.name, "lines": [vars(line) for line in lines]})
            continue
        table = Table("case", "setting", "measure", "at", "found", "paper", title=each.title, title_justify="left")
        for line in for_reading(lines):
            spread = "" if line.spread is None else f" ± {line.spread:.3f}"
            at, paper = ("" if value is None else f"{value:g}" for value in (line.x, line.paper))
            table.add_row(line.case, line.setting, line.measure, at, f"{line.mean:.3f}{spread}", paper)
        console.print(table)
        console.say(*map(str, files))
    if name == _ALL:
        console.say(str(write_overview(all_found, tasks, out / "results")))


def _list(console: Console, as_json: bool) -> None:
    from ..studies.catalogue import STUDIES

    if as_json:
        print_json(
            {name: {"title": each.title, "claims": [c.text for c in each.claims]} for name, each in STUDIES.items()}
        )
        return
    table = Table("study", "what it repeats", title="studies", title_justify="left")
    for name, each in STUDIES.items():
        table.add_row(name, each.title)
    console.print(table)
    console.say("run one:  selfmask study rules", "all of them, in miniature:  selfmask study all")


def _plans(console: Console, chosen: Sequence[Study], size: Scale) -> None:
    """Cells, steps, time and disk, without opening any data that is not here."""
    from ..studies.plan import plan

    time = "minutes" if size.in_miniature else "GPU hours"
    table = Table("study", "cells", "steps", time, "GB", title_justify="left")
    rows = [(each.name, [each]) for each in chosen]
    for name, studies in rows if len(rows) == 1 else [*rows, ("together", chosen)]:
        found = plan(studies, size)
        said = ", ".join(f"{count} {verb}" for verb, count in found.cells.items())
        took = found.minutes if size.in_miniature else found.hours
        table.add_row(name, said, f"{found.steps:,}", f"{took:,.1f}", f"{found.bytes / 1e9:,.1f}")
    console.print(table)
    if len(rows) > 1:
        console.say("studies share cells: what one has run, the others do not run again")
    if size.in_miniature:
        console.say("minutes are of one core of a laptop, with the bundled backbone and images")
    else:
        console.say("hours are of an A100, and at most: by the paper's own account of its runs")
