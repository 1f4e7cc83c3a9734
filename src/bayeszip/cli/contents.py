"""What `bayeszip info` shows of a file."""

import json
from pathlib import Path

from bayeszip import codec
from bayeszip.cli.guard import guarded
from bayeszip.errors import printable
from bayeszip.summary import as_text, description_dict, facts_table, tensors_table

__all__ = ["show"]


@guarded
def show(*, file: Path, as_json: bool = False) -> None:
    """Print what a file holds, and what takes how many bytes."""
    description = codec.describe(codec.read(file))
    if as_json:
        print(json.dumps(description_dict(description)))
        return
    ratio = 4 * description.original_parameters / description.bytes
    facts = [
        ("file", f"{printable(str(file))}, format version {description.version}, coder {description.coder}"),
        ("size", f"{description.bytes:,} bytes, {ratio:.1f} times smaller"),
        ("parameters before", f"{description.original_parameters:,}"),
    ]
    print(as_text(facts_table(facts), tensors_table(description)))
