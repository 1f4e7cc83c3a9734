"""Sizes besides those it states that a graph can be computed at: `other_sizes`, `varying_dims`."""

import contextlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice

from bayeszip.errors import BayeszipError, ModelError
from bayeszip.graph.families.base import Shape, ints
from bayeszip.graph.soundness import at_sizes, charge_run, shapes, stored_picks, tensor_shapes
from bayeszip.limits import Budget, Limits
from bayeszip.tensors import CompressedModel, Graph

__all__ = ["ODD_PARTS", "PARTS", "input_shapes", "near", "other_sizes", "runnable_sizes", "varying_dims"]

#: A dimension is free where a network takes it at one of these parts of its size.
PARTS = (Fraction(2), Fraction(1, 2))

#: Sizes that are tried of a graph that comes from a file, which may have any number of free dimensions.
TRIES = 16

#: Further parts to try, made odd if possible: of even sizes many follow from one another in more ways than one.
ODD_PARTS = (Fraction(3, 4), Fraction(3, 2))


def near(size: int) -> list[int]:
    """Other sizes to try in place of one, the most telling first; none is 0."""
    odd = [int(size * part) - 1 | 1 for part in ODD_PARTS]
    plain = [int(size * part) for part in (*ODD_PARTS, *PARTS)]
    return [each for each in dict.fromkeys((*odd, *plain)) if each > 0 and each != size]


def input_shapes(graph: Graph) -> list[Shape]:
    """The shapes that a graph states for its inputs; −1 is the batch."""
    stated = {node.inputs[0]: (-1, *ints(node, "shape")) for node in graph.nodes if node.op == "input"}
    if missing := set(range(graph.inputs)) - set(stated):
        raise ModelError(f"the graph doesn't state the shape of input {min(missing)}")
    return [stated[place] for place in range(graph.inputs)]


def other_sizes(
    model: CompressedModel, budget: Budget | None = None, tries: int | None = None
) -> Iterator[tuple[list[Shape], list[Shape]]]:
    """Shapes of inputs that a graph doesn't state but can be computed at, with those of all its values then.

    All free dimensions change at once, by the same part, then one after the other.

    Args:
        tries: how many sizes are looked at, at most; None: all.
    """
    graph = model.graph
    if graph is None or not graph.varies:
        return
    stated, picks = input_shapes(graph), stored_picks(model)
    free = [(node.inputs[0], each.place + 1) for node in graph.nodes if node.op == "input" for each in node.varying]
    for given in islice(_near(stated, free), tries):
        try:
            yield given, at_sizes(graph, tensor_shapes(model), budget, given, picks)[1]
        except BayeszipError:
            continue


def _near(stated: Sequence[Shape], free: Sequence[tuple[int, int]]) -> Iterator[list[Shape]]:
    """Shapes of inputs, other in their free dimensions (which input, which dimension of it) than those stated."""
    for places in (free, *([place] for place in free if len(free) > 1)) if free else ():
        for turn in range(max(len(near(stated[which][dim])) for which, dim in places)):
            wanted = [list(shape) for shape in stated]
            for which, dim in places:
                sizes = near(stated[which][dim])
                wanted[which][dim] = sizes[turn % len(sizes)]
            yield [tuple(shape) for shape in wanted]


def runnable_sizes(model: CompressedModel, limits: Limits, most: int) -> list[list[Shape]]:
    """Shapes of inputs, at most so many, that a graph doesn't state and that a run within the limits can have."""
    found: list[list[Shape]] = []
    for given, shapes_then in islice(other_sizes(model, Budget(limits), TRIES), most):
        with contextlib.suppress(BayeszipError):
            charge_run(model, Budget(limits), shapes_then)
            found.append(given)
    return found


def varying_dims(model: CompressedModel) -> list[Sequence[int]] | None:
    """For each value of a graph the dimensions that differ at other sizes; None if no other size is known to work."""
    stated = shapes(model)
    others = [found for _, found in other_sizes(model)]
    if not others:
        return None
    return [
        [dim for dim, size in enumerate(shape) if any(other[value][dim] != size for other in others)]
        for value, shape in enumerate(stated)
    ]
