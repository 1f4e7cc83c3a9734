"""Every error a user of bayeszip may see: one family, named by what is at fault."""

from collections.abc import Sequence

__all__ = [
    "BayeszipError",
    "CheckpointError",
    "DataError",
    "DataUsageError",
    "FormatError",
    "InputError",
    "Interrupted",
    "ModelError",
    "ModelUsageError",
    "OutputError",
    "OutputUsageError",
    "RecipeError",
    "TargetError",
    "TrainingError",
    "UsageError",
    "listed",
    "printable",
    "shown",
]

_LONGEST_MESSAGE = 200
#: Of a list of names, so many are named.
_LISTED = 3


def printable(text: str) -> str:
    r"""Text from a stranger's file, with what could steer a terminal written out.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: object) -> str:
    """Anything from a file, for a message: escaped, and cut where it is long."""
    escaped = ascii(text)
    return escaped if len(escaped) <= _LONGEST_MESSAGE // 2 else escaped[: _LONGEST_MESSAGE // 2] + "…"


def listed(names: Sequence[str]) -> str:
    """Names in a row, for a message: the first few of them, and how many more there are.

    >>> print(listed(["a", "b", "c", "d", "e"]))
    a, b, c and 2 more
    """
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


class BayeszipError(Exception):
    """Something bayeszip was given, or met, that it can't work with; the message says what and what to do.

    Whatever a message quotes, it can't steer a terminal.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))


class UsageError(BayeszipError):
    """What was asked for can't be meant: a name that nobody knows, a wrong ending, options at odds with each other.

    The command line ends with status 2 after one of these, with 1 after others.
    """


class DataError(BayeszipError):
    """A data set is missing, damaged or of the wrong form."""


class DataUsageError(DataError, UsageError):
    """No data set has this name."""


class ModelError(BayeszipError):
    """A network can't be compressed, traced, or loaded into, as it is."""


class InputError(ModelError, ValueError):
    """A loaded network was called with inputs of another shape or type than it takes."""


class ModelUsageError(ModelError, UsageError):
    """No network, module, layer or device has this name, or no file of weights this ending."""


class RecipeError(UsageError):
    """A recipe or one of its settings is unknown, out of range or contradicts another."""


class TrainingError(BayeszipError):
    """Training can't go on: a loss that is not finite, for example."""


class TargetError(BayeszipError):
    """A size or an accuracy asked for is out of reach; the message says what was reached.

    `result` holds that, if there is any.
    """

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class CheckpointError(BayeszipError):
    """A run can't go on from a checkpoint: none is whole, or it belongs to another run."""


class Interrupted(BayeszipError):
    """A run was told by a signal to end; it can be resumed."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class FormatError(BayeszipError):
    """A file is not a valid `.bayz` file. The codec's named kinds derive from this; messages are cut where long."""

    def __init__(self, message: str = "") -> None:
        line = printable(message[: _LONGEST_MESSAGE + 1])
        super().__init__(line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 1] + "…")


class OutputError(BayeszipError):
    """A file could not be written; whatever stood at its path before is still there."""


class OutputUsageError(OutputError, UsageError):
    """Nothing is written to files of this ending, or to a place of this kind."""
