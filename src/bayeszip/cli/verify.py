"""`bayeszip verify`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bayeszip.cli.base import FileArgument, JsonOption, command
from bayeszip.errors import printable

__all__ = ["verify"]


@command
def verify(
    file: FileArgument,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="A network (as MODEL of compress) that should compute the same.", show_default=False
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option("--weights", help="Its weights, a .safetensors file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a file is sound, and what it computes against another network if one is given.

    **Example**

    `bayeszip verify net.bayz`
    """
    from bayeszip import loading, models
    from bayeszip.loaders import load_weights

    if weights is not None and against is None:
        raise typer.BadParameter("say with --against what they are the weights of", param_hint="--weights")
    network = None if against is None else models.build(against)
    if network is not None and weights is not None:
        load_weights(network, weights)
    difference = loading.verify(file, against=network)
    if as_json:
        typer.echo(json.dumps({"sound": True, "difference": difference}))
        return
    compared = (
        "" if difference is None else f"; computes the same as {against}, to {difference:.1e} of the largest output"
    )
    typer.echo(printable(f"{file} is sound: it decodes, and encodes to the same bytes{compared}"))
