"""What the order of hidden units costs a file: at random, sorted as files have it, and what no order costs.

    python benchmarks/unit_order.py FILE.bayz …

A network of n hidden units is the same in n! orders, so a file that told none of them would be log₂ n! bits smaller
than one in a random order, layer by layer. Means over files.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bayeszip import codec
from bayeszip.graph import order_units
from bayeszip.graph.ordering import reordered
from bayeszip.tensors import CompressedModel

#: Random orders of each file.
ORDERS = 5


def sizes(model: CompressedModel) -> tuple[float, float, float]:
    """Bytes in a random order (the mean of several), sorted, and without what the random order costs."""
    generator, layers = np.random.default_rng(0), list[int]()

    def shuffled(symbols: np.ndarray) -> np.ndarray:
        layers.append(len(symbols))
        return generator.permutation(len(symbols))

    at_random = statistics.mean(codec.measure(reordered(model, shuffled)) for _ in range(ORDERS))
    orders = sum(math.lgamma(units + 1) for units in layers) / math.log(2) / ORDERS
    return at_random, codec.measure(order_units(model)), at_random - orders / 8


def main(files: Sequence[str]) -> None:
    rows = [sizes(codec.decode(Path(file).read_bytes())) for file in files]
    for name, column in zip(("random order", "sorted", "no order"), _columns(rows), strict=True):
        print(f"{name:>12}: {statistics.mean(column):,.0f} bytes")


def _columns(rows: Sequence[tuple[float, ...]]) -> Iterator[tuple[float, ...]]:
    return zip(*rows, strict=True)


if __name__ == "__main__":
    main(sys.argv[1:])
