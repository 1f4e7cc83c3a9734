"""The command line. Exit status 0: done, 1: failed, 2: misused; no traceback for what a user can mend.

A module a command. What imports torch, which takes seconds, is imported by the commands that need it, when they run.
"""

from bayeszip.cli import compress, evaluate, export, info, pack, recipes, report, reproduce, sweep, verify
from bayeszip.cli.base import app

__all__ = [
    "app",
    "compress",
    "evaluate",
    "export",
    "info",
    "main",
    "pack",
    "recipes",
    "report",
    "reproduce",
    "sweep",
    "verify",
]


def main() -> None:
    """Entry point."""
    app()
