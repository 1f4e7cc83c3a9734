"""What a file may ask of the machine that reads it: limits, and the one budget that is charged from bytes to module."""

from collections import Counter
from dataclasses import dataclass, field, fields

from bayeszip.errors import FormatError

__all__ = ["STEPS_PER_BYTE", "Budget", "LimitExceeded", "Limits"]

#: Steps of decoding that each byte of a file pays for, whatever the limit: sparse networks have as many.
STEPS_PER_BYTE = 2**12


class LimitExceeded(FormatError):
    """The file asks for more than the caller's limits allow."""


def _limit(default: int, asks: str) -> int:
    """A limit, and what a file that exceeds it asks for."""
    return field(default=default, metadata={"asks": asks})


@dataclass(frozen=True)
class Limits:
    """What a file may ask for, checked before anything is allocated or done.

    Args:
        elements: weights in all tensors together.
        memory: bytes that the decoded tensors take together.
        tensors: how many there are.
        nodes: operators in the graph, what they read and what it returns.
        names: bytes of all names together.
        codebooks: shared values looked through again, for each tensor but the first that uses a codebook.
        work: steps of decoding (a tenth of a microsecond at most) beyond those that the file's own bytes pay for.
        loaded: bytes that the tensors of a module take, in the type they are loaded in.
        values: elements of an activation, for one sample.
        operations: multiplications that a run on one sample takes, where a network is run to check it.
        file: bytes of the file itself.
    """

    elements: int = _limit(2**30, "weights")
    memory: int = _limit(2**32, "bytes")
    tensors: int = _limit(2**14, "tensors")
    nodes: int = _limit(2**14, "nodes and links in its graph")
    names: int = _limit(2**20, "bytes of names")
    codebooks: int = _limit(2**22, "shared values to be looked through")
    work: int = _limit(2**27, "steps of decoding beyond its size")
    loaded: int = _limit(2**32, "bytes of a loaded network")
    values: int = _limit(2**28, "elements in an activation")
    operations: int = _limit(2**40, "multiplications a sample")
    file: int = _limit(2**32, "bytes to be read")

    @classmethod
    def none(cls) -> "Limits":
        """For what the caller holds already, or made himself."""
        return cls(**{each.name: 2**62 for each in fields(cls)})


_ASKS = {each.name: each.metadata["asks"] for each in fields(Limits)}


class Budget:
    """What is left of the limits while one file becomes a module: everything on the way is charged here."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.spent: Counter[str] = Counter()

    @classmethod
    def of(cls, limits: "Limits | Budget | None") -> "Budget":
        return limits if isinstance(limits, Budget) else cls(limits)

    def charge(self, what: str, amount: int) -> None:
        """Take `amount` of a limit.

        Raises:
            LimitExceeded: names the limit.
        """
        self.check(what, self.spent[what] + amount)
        self.spent[what] += amount

    def check(self, what: str, amount: int) -> None:
        """Make sure that a limit allows this much by itself."""
        limit = getattr(self.limits, what)
        if amount > limit:
            asked = amount if amount < 2**64 else f"2^{amount.bit_length() - 1}"
            raise LimitExceeded(f"the file asks for {asked} {_ASKS[what]}, the limit is {limit}; raise `{what}`")
