"""`bayeszip info`."""

import json

import typer

from bayeszip.cli.base import FileArgument, JsonOption, command
from bayeszip.files import read_file

__all__ = ["info"]


@command
def info(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show what a file holds, and what takes how many bytes. Needs no torch.

    **Example**

    `bayeszip info net.bayz`
    """
    from bayeszip import codec
    from bayeszip.summary import as_text, description_dict, facts_table, tensors_table

    description = codec.describe(read_file(file))
    if as_json:
        typer.echo(json.dumps(description_dict(description)))
        return
    ratio = 4 * description.original_parameters / description.bytes
    facts = [
        ("file", f"{file}, format version {description.version}, coder {description.coder}"),
        ("size", f"{description.bytes:,} bytes, {ratio:.1f} times smaller"),
        ("parameters before", f"{description.original_parameters:,}"),
    ]
    typer.echo(as_text(facts_table(facts), tensors_table(description)))
