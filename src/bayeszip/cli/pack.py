"""`bayeszip pack`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bayeszip.cli.base import JsonOption, OutputOption, command

__all__ = ["pack"]


@command
def pack(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A .safetensors file.", show_default=False)],
    output: OutputOption,
    components: Annotated[int, typer.Option(min=1, max=2**16 - 1, help="Shared values of a tensor, besides 0.")] = 64,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Instead: how far a weight may move, as a share of its tensor's largest.", show_default=False
        ),
    ] = None,
    coder: Annotated[str, typer.Option(help="default, context or csr-huffman.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Cluster and code weights as they are: no data, no training, no network.

    **Example**

    `bayeszip pack weights.safetensors -o net.bayz --components 32`
    """
    from bayeszip import packing
    from bayeszip.files import check_writable
    from bayeszip.loaders import read_weights
    from bayeszip.recipe import Coding
    from bayeszip.summary import description_dict

    check_writable(output)
    result = packing.pack(read_weights(weights), components=components, max_error=max_error, coding=Coding(coder=coder))
    result.save(output)
    if as_json:
        typer.echo(json.dumps(description_dict(result.description)))
    else:
        typer.echo(result.report())
        typer.echo(f"written to {output}")
