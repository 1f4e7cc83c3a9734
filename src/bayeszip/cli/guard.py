"""What goes wrong in a command becomes a line on standard error and an exit status."""

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from bayeszip.errors import BayeszipError, FormatError, Interrupted, UsageError, printable

__all__ = ["guarded"]

#: Exit status after Ctrl-C, as shells expect it.
INTERRUPTED = 128 + signal.SIGINT

Command = TypeVar("Command", bound=Callable[..., None])


def guarded(function: Command) -> Command:
    """`function`, whose errors end the process; what is wrong with a file is said with its name, its option `file`."""

    @functools.wraps(function)
    def guarding(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
            if sys.stdout is not None:
                sys.stdout.flush()  # here it can be told that this fails
        except Interrupted as error:
            _fail(str(error), 128 + error.signal)
        except FormatError as error:
            _fail(f"{printable(str(options['file']))}: {error}" if "file" in options else str(error), 1)
        except BayeszipError as error:
            _fail(str(error), 2 if isinstance(error, UsageError) else 1)
        except KeyboardInterrupt as interrupt:
            _fail(str(interrupt) or "interrupted", INTERRUPTED)
        except OSError:
            if (reason := _unwritable_output()) is None:
                raise
            if reason.errno == errno.EPIPE:
                sys.exit(1)  # whoever reads has read enough, as `head` does
            _fail(f"can't write to standard output: {reason.strerror}", 1)

    return guarding  # type: ignore[return-value]


def _unwritable_output() -> OSError | None:
    """Why standard output takes nothing; then nothing more goes there, so that the end of the process is quiet."""
    try:
        print(flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _fail(message: str, status: int) -> NoReturn:
    from rich.console import Console
    from rich.markup import escape

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        message = f"process {rank}: {message}"
    Console(stderr=True).print(f"[bold red]bayeszip:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(status)
