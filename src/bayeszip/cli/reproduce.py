"""`bayeszip reproduce`."""

import importlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bayeszip.cli.base import DeviceOption, command
from bayeszip.errors import DataError

__all__ = ["reproduce"]

EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments"


class What(StrEnum):
    """What of the paper to reproduce."""

    table = "table"
    figure = "figure"


@command
def reproduce(
    what: Annotated[What, typer.Argument(help="The paper's table, or its figure.", show_default=False)],
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from 0 [table: 5, figure: 1].")] = None,
    device: DeviceOption = "auto",
    only: Annotated[str, typer.Option(help="Only runs whose name contains this, such as lenet-5 or vd+sws.")] = "",
    epochs_scale: Annotated[
        float | None, typer.Option(help="Factor on all epochs but pretraining's, for a trial.")
    ] = None,
    together: Annotated[
        int | None, typer.Option(min=1, help="Networks trained at once, as one batched model [32 on a GPU].")
    ] = None,
    render_only: Annotated[bool, typer.Option("--render-only", help="Only render pages from the records.")] = False,
) -> None:
    """Run the paper's experiments again, and render RESULTS.md and the figure from their records.

    Runs that have their record in results/ are not repeated: what was stopped is taken up again. Needs a checkout of
    the repository; a GPU takes minutes, a CPU hours.

    **Examples**

    `bayeszip reproduce table`

    `bayeszip reproduce figure --only vd+sws --device cuda`
    """
    if not (EXPERIMENTS / "render.py").exists():
        raise DataError("the experiments are in the repository, not in the package; clone it, and run this there")
    sys.path.insert(0, str(EXPERIMENTS))
    options = [f"--device={device}", f"--only={only}"]
    given = {"seeds": seeds, "epochs-scale": epochs_scale, "together": together}
    options += [f"--{name}={value}" for name, value in given.items() if value is not None]
    if not render_only:
        importlib.import_module(what.value).main(options)
    importlib.import_module("render").main()
