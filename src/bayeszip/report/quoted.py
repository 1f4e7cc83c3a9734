"""What others report for the networks of the literature: quoted, not run here."""

import json
from dataclasses import dataclass
from importlib import resources

__all__ = ["Quoted", "quoted_for"]


@dataclass(frozen=True)
class Quoted:
    """A method's figures: how many times smaller, and the error on the test set in percent."""

    method: str
    source: str
    ratio: float
    error: float


def quoted_for(network: str | None) -> tuple[Quoted, ...]:
    """The figures for a built-in network, by its name; none for others."""
    held = json.loads((resources.files("bayeszip.report") / "quoted.json").read_text(encoding="utf-8"))
    return tuple(Quoted(**row) for row in held.get(network, ()))
