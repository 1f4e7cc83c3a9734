"""`bayeszip reproduce`."""

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bayeszip.cli.base import DeviceOption, JobsOption, command, table_console
from bayeszip.errors import DataError, RecipeError, printable

if TYPE_CHECKING:
    from bayeszip.experiments import Experiment

__all__ = ["reproduce"]


class What(StrEnum):
    """What can be reproduced."""

    table = "table"
    figure = "figure"
    ablation = "ablation"
    choice = "choice"
    quick = "quick"
    targets = "targets"
    parts = "parts"
    frontier = "frontier"


@command
def reproduce(
    what: Annotated[
        What | None, typer.Argument(help="The paper's table or figure, or an experiment of ours.", show_default=False)
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option("--again", metavar="DIR", help="Train the runs, and keep records and files in DIR."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="FIRST:END", help="Such as 10:15, or one number [as published].")
    ] = None,
    jobs: JobsOption = 1,
    only: Annotated[
        str, typer.Option(help="Only runs whose name contains this, or one of several: lenet-5,vgg-16.")
    ] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:FOLDER", help="Where data of the runs are, such as cifar10:FOLDER; may be repeated."
        ),
    ] = None,
    epochs_scale: Annotated[float, typer.Option(help="Factor on all epochs, for a trial.")] = 1.0,
    device: DeviceOption = "auto",
    sealed: Annotated[
        bool, typer.Option("--sealed", help="For a choice: the test set is not opened, and no files are kept.")
    ] = False,
    take: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Put what --again DIR has left, here or elsewhere, among the records."),
    ] = None,
    recode: Annotated[
        bool,
        typer.Option("--recode", help="Code the files of its records anew, where that makes them shorter."),
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Write RESULTS.md, the README's tables and the pictures from the records.")
    ] = False,
) -> None:
    """Show the experiments that the repository has records of, or run them again.

    With --again each run is trained by `compress` as anyone runs it. Runs that have their record in DIR are not
    repeated, and those that were stopped go on from their checkpoints: the same command takes up what was stopped. On
    a GPU several jobs share it through NVIDIA's Multi-Process Service, which is started for them where it is installed.

    **Examples**

    `bayeszip reproduce table`

    `bayeszip reproduce table --again again --seeds 10:15 --jobs 12 --device cuda`

    `timeout 550 bayeszip reproduce frontier --again again --only resnet-20-augmented --data cifar10:FOLDER --jobs 4`

    `bayeszip reproduce table --again trial --only lenet-300-100-vd --epochs-scale 0.05 --jobs 2`
    """
    from bayeszip.experiments import EXPERIMENTS
    from bayeszip.experiments.pages import checkout
    from bayeszip.experiments.pages import render as render_pages
    from bayeszip.experiments.records import recode as recode_files
    from bayeszip.experiments.records import take as take_records
    from bayeszip.experiments.runs import parse_seeds

    given = {
        "an experiment": what is not None,
        "--again": again is not None,
        "--seeds": seeds is not None,
        "--jobs": jobs != 1,
        "--only": bool(only),
        "--data": bool(data),
        "--epochs-scale": epochs_scale != 1,
        "--device": device != "auto",
        "--sealed": sealed,
        "--take": take is not None,
        "--recode": recode,
        "--render": render,
    }
    _check_used([name for name, is_given in given.items() if is_given])
    if render:
        render_pages(checkout())
        return
    if what is None:
        for known in EXPERIMENTS.values():
            typer.echo(f"bayeszip reproduce {known.name:<10} {known.question}")
        return
    experiment = EXPERIMENTS[what.value]
    if take is not None:
        taken = take_records(take / experiment.name, checkout() / "results" / experiment.name)
        typer.echo(f"{len(taken)} records taken; bayeszip reproduce --render writes them into the pages")
        return
    if recode:
        before, after = recode_files(checkout() / "results" / experiment.name)
        typer.echo(f"{before:,} bytes became {after:,}; bayeszip reproduce --render writes them into the pages")
        return
    if again is None:
        _show_recorded(experiment, checkout() / "results" / experiment.name, only)
        return
    from bayeszip.experiments.runner import carry_out

    if sealed:
        experiment = dataclasses.replace(experiment, sealed=True)
    runs = experiment.runs(parse_seeds(seeds) if seeds else None, only, epochs_scale)
    carry_out(experiment, runs, again, jobs=jobs, device=device, data=data or ())
    _show(experiment, again / experiment.name, [name for run in runs for name in run.endings])
    typer.echo(f"\nrecords and files are in {printable(str(again / experiment.name))}")


def _check_used(given: list[str]) -> None:
    """Refuse what the command would ignore, by what else was given."""
    if "--render" in given:
        used, remedy = {"--render"}, "--render writes all pages from the committed records; give nothing else with it"
    elif "an experiment" not in given:
        used, remedy = set(), "without an experiment they are only listed; name one, such as table"
    elif "--take" in given:
        used, remedy = {"an experiment", "--take"}, "--take DIR takes all that --again DIR has left; give it alone"
    elif "--recode" in given:
        used, remedy = {"an experiment", "--recode"}, "--recode codes the files of all its records; give it alone"
    elif "--again" in given:
        return
    else:
        used, remedy = {"an experiment", "--only"}, "that is for runs that are trained; add --again DIR"
    if unused := [name for name in given if name not in used]:
        raise RecipeError(f"{', '.join(unused)}: {remedy}")


def _show_recorded(experiment: "Experiment", folder: Path, only: str) -> None:
    """The table of the runs that have a record in `folder`."""
    from bayeszip.experiments.records import read
    from bayeszip.experiments.runs import picked

    recorded = [(name, [name]) for name in read(folder)]
    if not recorded:
        raise DataError(f"no run of {experiment.name} has been recorded yet; --again DIR trains them")
    try:
        names = picked(recorded, only, f"record in {folder}")
    except RecipeError as error:
        raise RecipeError(f"{error}; --again DIR trains what is not recorded") from None
    _show(experiment, folder, names)
    place = printable(str(folder))
    typer.echo(f"\n{len(names)} runs, from their records in {place}; to train them yourself, add --again DIR")


def _show(experiment: "Experiment", folder: Path, names: list[str]) -> None:
    """The experiment's table of these runs."""
    from bayeszip.experiments.records import read
    from bayeszip.experiments.tables import TABLES

    records, console = read(folder), table_console()
    for grid in TABLES[experiment.name]([records[name] for name in names]):
        console.print(grid.terminal())
