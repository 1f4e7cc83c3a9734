"""The command line. Exit status 0: done, 1: failed, 2: misused; no traceback for what a user can mend.

A module a command; only that of the command asked for is imported. What imports torch, which takes seconds, is imported
by the commands that need it, when they run. `bayeszip info FILE` needs no parser either, which takes as long to import
as a small file to read.
"""

import importlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["COMMANDS", "main"]

#: Names of modules of this room, and of what they define.
COMMANDS = (
    "compress",
    "evaluate",
    "export",
    "info",
    "pack",
    "recipes",
    "report",
    "reproduce",
    "sweep",
    "verify",
)


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What its encoding lacks is written out: no training ends over a letter of its report.
            stream.reconfigure(errors="backslashreplace")
    asked = sys.argv[1:2]
    if asked == ["info"] and len(sys.argv) == 3 and not sys.argv[2].startswith("-"):
        sys.exit(importlib.import_module("bayeszip.cli.contents").show(file=Path(sys.argv[2])))
    _offering(asked if asked and asked[0] in COMMANDS else COMMANDS)()


def _offering(commands: Iterable[str]) -> Any:
    """The application, with these commands at least."""
    for name in commands:
        importlib.import_module(f"bayeszip.cli.{name}")
    return importlib.import_module("bayeszip.cli.base").app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _offering(COMMANDS)
    raise AttributeError(f"module 'bayeszip.cli' has no attribute {name!r}")
