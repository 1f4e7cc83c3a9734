"""`bayeszip info`."""

from bayeszip.cli.base import FileArgument, JsonOption, command
from bayeszip.cli.contents import show

__all__ = ["info"]


@command
def info(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show what a file holds, and what takes how many bytes. Needs no torch.

    **Example**

    `bayeszip info net.bayz`
    """
    show(file=file, as_json=as_json)
