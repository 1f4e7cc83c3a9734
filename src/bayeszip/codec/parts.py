"""What took which bytes of a file."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Description", "Part", "TensorDescription", "bytes_by_part"]


@dataclass(frozen=True)
class Part:
    """Bits `start` to `end` of a file: a part of `tensor`, or (None) of the file as a whole."""

    tensor: str | None
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class TensorDescription:
    """A tensor and the bytes it takes. `kind`: "quantized" or a dtype; `symbols`: shared values, 0.0 included."""

    name: str
    shape: tuple[int, ...]
    kind: str
    size: int
    nonzero: int
    symbols: int
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.size if self.size else 0.0


@dataclass(frozen=True)
class Description:
    """A file, taken apart: the bytes of all its parts and of all its tensors' parts add up to `bytes`."""

    bytes: int
    version: int
    coder: str
    options: dict[str, int]
    original_parameters: int
    parts: dict[str, int]
    tensors: tuple[TensorDescription, ...]


def bytes_by_part(parts: Iterable[Part]) -> dict[tuple[str | None, str], int]:
    """Bytes of each (tensor, part). A byte that several parts share counts for the one in which it ends."""
    totals: dict[tuple[str | None, str], int] = {}
    for part in parts:
        key = (part.tensor, part.name)
        totals[key] = totals.get(key, 0) + part.end // 8 - part.start // 8
    return totals
