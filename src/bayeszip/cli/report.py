"""`bayeszip report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bayeszip.cli.base import FileArgument, check_ending, command
from bayeszip.errors import printable

__all__ = ["report"]


@command
def report(
    file: FileArgument,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="The folder of the run that made FILE, for its training.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the HTML page.")] = Path("report.html"),
    plots: Annotated[
        Path | None,
        typer.Option("--plots", help="A folder that receives the charts as PNG and SVG too.", show_default=False),
    ] = None,
) -> None:
    """Write a page to look at: what went in and came out, where the bytes are, the weights, the training.

    It opens in any browser, without a network.

    **Examples**

    `bayeszip report net.bayz -o report.html`

    `bayeszip report runs/7/net.bayz --run runs/7 --plots plots`
    """
    from bayeszip import report as room
    from bayeszip.files import check_writable, create_folder, write_atomically
    from bayeszip.report.plots import check_plots, write_plots

    check_ending(output, "a report", ".html")
    check_writable(output)
    if plots is not None:
        create_folder(plots)
        check_plots()
    with Console(stderr=True).status("drawing"):
        contents = room.gather(file, run)
        write_atomically(output, room.page(contents).encode())
        drawn = [] if plots is None else write_plots(contents, plots)
    for path in (output, *drawn):
        typer.echo(f"written to {printable(str(path))}")
