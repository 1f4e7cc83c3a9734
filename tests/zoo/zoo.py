"""Networks of many kinds, each with toy data, a loss and a figure to keep: what `compress` has to stand.

A kind is added by a file of its own beside this one, which calls `add`; `test_*.py` of that file then takes it by name.
What each has to keep is said once, in the table of docs/guide/tasks.md, where `allowed` reads it.
"""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["KINDS", "Kind", "add", "allowed", "stated_bytes", "trained"]

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "tasks.md"


@dataclass(frozen=True)
class Kind:
    """A kind of network with something to do.

    Args:
        name: as in the guide's table.
        network: makes one, without weights.
        data: makes so many examples from a seed: inputs and targets, each a tensor or several.
        shape: of each of its inputs, another than that of the data: other lengths and sizes where it takes any, or
            else another number of examples.
        loss: by which it is trained, and compressed.
        examples: how many it is trained on.
        epochs: for how long it is trained before it is compressed.
        size: of a batch.
    """

    name: str
    network: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Any, Any]]
    shape: tuple[int, ...]
    loss: Any = F.cross_entropy
    examples: int = 512
    epochs: int = 30
    size: int = 64
    rate: float = 3e-3

    def batches(self, *, validation: bool = False, size: int | None = None) -> list[tuple[Any, Any]]:
        """Of training examples, or of half as many others."""
        size = size or self.size
        count = self.examples // 2 if validation else self.examples
        inputs, targets = self.data(count, 1 if validation else 0)
        return [(_rows(inputs, start, size), _rows(targets, start, size)) for start in range(0, count, size)]

    def examples_of(self, rows: int = 2) -> tuple[Tensor, ...]:
        """A few inputs, as the network takes them."""
        first = self.batches()[0][0]
        return tuple(each[:rows] for each in (first if isinstance(first, tuple) else (first,)))

    def at_another_shape(self) -> tuple[Tensor, ...]:
        """Inputs that the network takes as well."""
        generator = torch.Generator().manual_seed(5)
        return tuple(
            torch.randn(self.shape, generator=generator)
            if each.is_floating_point()
            else torch.randint(int(each.max()) + 1, self.shape, generator=generator)
            for each in self.examples_of(64)
        )


KINDS: dict[str, Kind] = {}


def add(kind: Kind) -> Kind:
    """Make it known by its name."""
    return KINDS.setdefault(kind.name, kind)


def trained(name: str) -> nn.Module:
    """The network of a kind, trained on its data; always the same."""
    return copy.deepcopy(_trained(name))


@functools.cache
def _trained(name: str) -> nn.Module:
    kind = KINDS[name]
    torch.manual_seed(0)
    network = kind.network()
    optimizer = torch.optim.Adam(network.parameters(), kind.rate)
    batches = kind.batches()
    for _ in range(kind.epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            kind.loss(called(network, inputs), targets).backward()
            optimizer.step()
    return network.eval()


def called(network: nn.Module, inputs: Any) -> Any:
    """What the network says to one input, to several in order, or to several by name."""
    if isinstance(inputs, Tensor):
        return network(inputs)
    return network(**inputs) if isinstance(inputs, dict) else network(*inputs)


def allowed(name: str) -> tuple[str, float]:
    """What the guide's table lets a kind lose: ("points", 2.0) of accuracy, or ("%", 20.0) of its loss added."""
    row = re.search(rf"^\| {re.escape(name)} \|.*\| ([\d.]+) (points|%)[^|]*\|$", GUIDE.read_text("utf-8"), re.M)
    if row is None:
        raise AssertionError(f"{GUIDE.name} has no row for {name}")
    return row[2], float(row[1])


def stated_bytes(name: str) -> tuple[int, int]:
    """What the guide's table says of a kind's files: by `pack`, and compressed."""
    figures = r"([\d,]+) B \| ([\d,]+) B \| [\d.]+(?: %)? \|"
    row = re.search(rf"^\| {re.escape(name)} \|.*? \| {figures}", GUIDE.read_text("utf-8"), re.M)
    if row is None:
        raise AssertionError(f"{GUIDE.name} has no row for {name}")
    return int(row[1].replace(",", "")), int(row[2].replace(",", ""))


def _rows(part: Any, start: int, size: int) -> Any:
    if isinstance(part, Tensor):
        return part[start : start + size]
    if isinstance(part, dict):
        return {name: tensor[start : start + size] for name, tensor in part.items()}
    return tuple(tensor[start : start + size] for tensor in part)
