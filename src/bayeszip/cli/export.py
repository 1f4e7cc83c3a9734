"""`bayeszip export`."""

from pathlib import Path
from typing import Annotated

import typer

from bayeszip.cli.base import FileArgument, command
from bayeszip.errors import printable

__all__ = ["export"]


@command
def export(
    file: FileArgument,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A path ending in .onnx or .safetensors.", show_default=False)
    ],
    dense: Annotated[bool, typer.Option("--dense", help="safetensors: original shapes, zeros put back.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="float32, float64, float16 or bfloat16. By default float32 in ONNX; in safetensors as the network "
            "was, and float32 for quantized weights of a file without a graph.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="ONNX: weights written out, for runtimes older than opset 21.")
    ] = False,
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="NAMES", help="ONNX: names of the inputs, with commas between.")
    ] = None,
    outputs: Annotated[
        str | None, typer.Option("--outputs", metavar="NAMES", help="ONNX: names of the outputs, with commas between.")
    ] = None,
) -> None:
    """Write the network in a file in another format.

    **Example**

    `bayeszip export net.bayz net.onnx --dtype float16`
    """
    from bayeszip import loading
    from bayeszip.files import check_writable

    check_writable(target)
    loading.export(
        file,
        target,
        dense=dense,
        dtype=dtype,
        plain=plain,
        input_names=_split(inputs),
        output_names=_split(outputs),
    )
    typer.echo(printable(f"written to {target}: {target.stat().st_size:,} bytes"))


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if names else []
