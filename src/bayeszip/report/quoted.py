"""What others report for the networks of the literature: quoted, not run here."""

import json
from dataclasses import dataclass
from importlib import resources

__all__ = ["TITLES", "Quoted", "is_quoted_on", "quoted_data", "quoted_for"]

#: Data sets that figures are quoted for, by the names that `--data` has for them.
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


@dataclass(frozen=True)
class Quoted:
    """A method's figures: the error on the test set in percent, and how many times smaller, or how many bytes.

    Args:
        counted: what the size is of, where that is said; else whatever its authors count.
        read: where the figures were read, `at its source` or `second-hand`, where that is known.
    """

    method: str
    source: str
    error: float
    ratio: float | None = None
    bytes: int | None = None
    counted: str = ""
    read: str = ""

    @property
    def reference(self) -> str:
        """Where its figures are from."""
        return f"{self.source}, {self.read}" if self.read == "second-hand" else self.source

    def size(self, parameters: int) -> int:
        """Bytes, of a network with so many parameters."""
        return self.bytes or round(4 * parameters / (self.ratio or 1))


def quoted_for(network: str | None) -> tuple[Quoted, ...]:
    """The figures for a built-in network, by its name; none for others."""
    held = json.loads((resources.files("bayeszip.report") / "quoted.json").read_text(encoding="utf-8"))
    return tuple(Quoted(**row) for row in held.get(network, ()))


def quoted_data(network: str | None) -> str | None:
    """The data set that the figures for a built-in network are of, as `--data` names it."""
    if network is None:
        return None
    return "mnist" if network.startswith("lenet") else "cifar10"


def is_quoted_on(network: str | None, data: str | None) -> bool:
    """Whether `data`, as the command line was given them, are those of the figures for a built-in network."""
    own = quoted_data(network)
    # A folder of CIFAR-10 is CIFAR-10; `mnist:…` would be a function of somebody's.
    return data is not None and (data == own or (own == "cifar10" and data.startswith("cifar10:")))
