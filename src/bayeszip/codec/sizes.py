"""Numbers in attributes that follow the sizes of earlier values, as a file holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bayeszip.codec.syntax import Number, Record, Signed, Tuple
from bayeszip.operators import Operator
from bayeszip.tensors import MAX_FACTORS, Node, Varying

__all__ = ["VARIED", "Varied", "varied_of", "varying"]

_MOST_FACTOR = 2**31


@dataclass(frozen=True)
class Varied:
    """`slot` = place · attributes of the operator + number of the attribute; `form` = 2 · dimensions + 1 if scaled.

    A dimension is a pair: the distance of its value from the newest one, and which of its dimensions. What isn't
    scaled has a factor and a divisor of 1 and an offset of 0.
    """

    slot: int
    form: int
    dims: tuple[tuple[int, int], ...]
    factor: int | None
    divisor: int | None
    offset: int | None


_DIM = Tuple((Number("distance to a value"), Number("dimension of a value", 31)))

VARIED = Record(
    Varied,
    {
        "slot": Number("number that varies"),
        "form": Number("form of what varies", 2 * MAX_FACTORS + 1),
        "dims": lambda varied: Tuple((_DIM,) * (varied.form // 2)),
        "factor": lambda varied: Signed("factor", _MOST_FACTOR) if varied.form % 2 else None,
        "divisor": lambda varied: Number("divisor", _MOST_FACTOR) if varied.form % 2 else None,
        "offset": lambda varied: Signed("offset") if varied.form % 2 else None,
    },
)


def varied_of(node: Node, operator: Operator, newest: int) -> tuple[Varied, ...]:
    """What varies in a node, as its file says it; `newest` is the value before the node's own."""
    names = [attribute.name for attribute in operator.attributes]
    return tuple(_varied(each, names, newest) for each in node.varying)


def _varied(each: Varying, names: Sequence[str], newest: int) -> Varied:
    scaled = (each.factor, each.divisor, each.offset) != (1, 1, 0)
    return Varied(
        slot=each.place * len(names) + names.index(each.attribute),
        form=2 * len(each.dims) + scaled,
        dims=tuple((newest - value, dim) for value, dim in each.dims),
        factor=each.factor,
        divisor=each.divisor,
        offset=each.offset,
    )


def varying(stored: Sequence[Any], operator: Operator, newest: int) -> tuple[Varying, ...]:
    """What varies in a node, from what its file says."""
    return tuple(
        Varying(
            operator.attributes[each.slot % len(operator.attributes)].name,
            each.slot // len(operator.attributes),
            tuple((newest - distance, dim) for distance, dim in each.dims),
            *((1, 1, 0) if each.factor is None else (each.factor, each.divisor, each.offset)),
        )
        for each in stored
    )
