"""`bayeszip evaluate`."""

import json
from typing import Annotated

import typer

from bayeszip.cli.base import DataOption, DeviceOption, FileArgument, JsonOption, command
from bayeszip.files import read_file

__all__ = ["evaluate"]


@command
def evaluate(
    file: FileArgument,
    data: DataOption = "mnist",
    into: Annotated[
        str | None,
        typer.Option("--into", help="The network's class (as MODEL of compress), for a file without a graph."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Compute in float32, float64, float16 or bfloat16; by default as the network did.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Decode a file and measure the accuracy of what it holds on the test set.

    **Example**

    `bayeszip evaluate net.bayz --data mnist --json`
    """
    from bayeszip import codec, loading, models
    from bayeszip.devices import resolve_device
    from bayeszip.loaders import load_test
    from bayeszip.record import file_figures

    target = resolve_device(device)
    network = loading.load(file, into=models.build(into) if into else None, dtype=dtype, map_location=target)
    figures = file_figures(network, codec.describe(read_file(file)), load_test(data, device=target))
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        typer.echo(
            f"accuracy {100 * figures['accuracy']:.2f} %, {figures['bytes']:,} bytes, "
            f"{figures['ratio']:.1f} times smaller than {figures['params']:,} parameters in float32"
        )
