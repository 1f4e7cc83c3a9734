"""`bayeszip export`."""

from pathlib import Path
from typing import Annotated

import typer

from bayeszip.cli.base import FileArgument, command

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
            help="float32, float64, float16 or bfloat16. By default float32 in ONNX; in safetensors as it was.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the network in a file in another format.

    **Example**

    `bayeszip export net.bayz net.onnx --dtype float16`
    """
    from bayeszip import loading
    from bayeszip.files import check_writable

    check_writable(target)
    loading.export(file, target, dense=dense, dtype=dtype)
    typer.echo(f"written to {target}: {target.stat().st_size:,} bytes")
