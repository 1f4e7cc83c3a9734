"""Vectors that are parameters by themselves, and what a network does with them: `free_vectors`. Numpy only.

A norm of one's own, a factor for each channel, a class token: to a graph they are values like any other, so only their
readers tell what an error in them does.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Literal

from bayeszip.tensors import CompressedModel, Graph, Node, RawTensor

__all__ = ["Use", "free_vectors"]

#: Summands are added to something, or stand beside it; factors are whatever else there is.
Use = Literal["factor", "summand"]

#: What moves elements about, and computes nothing.
_MOVES = frozenset(("view", "reshape", "flatten", "expand", "permute", "select", "slice"))
_ADDS = frozenset(("add", "sub", "concat"))

#: Behind these an error is one among those of many weights.
_MIXES = frozenset(("matmul", "attention", "softmax", "log_softmax"))

#: These make much of a small error: waves turn by it, exponentials grow by it, steps fall to the other side.
_MAGNIFIES = frozenset((
    "sin", "cos", "exp", "expm1", "floor", "round", "sign", "compare", "compare_scalar", "cast", "argmax",
    "topk",
))  # fmt: skip

#: Shorter ones are not worth a grid of their own.
SHORTEST = 8


def free_vectors(model: CompressedModel, frozen: Collection[str] = ()) -> dict[str, Use]:
    """Parameters that no layer owns, kept bit for bit as yet, which may be rounded in proportion to their size.

    Those whose errors something could magnify are left out. Slopes of PReLU are factors too.

    Args:
        frozen: names of tensors that stay as they are.
    """
    graph = model.graph
    if graph is None:
        return {}
    readers = _readers(graph)
    found: dict[str, Use] = {}
    refused = set(frozen)
    for place, node in enumerate(graph.nodes, start=graph.inputs):
        for name in node.tensors:
            if name is None:
                continue
            if node.op not in ("parameter", "prelu") or _is_magnified(graph, readers, place):
                refused.add(name)
            elif node.op == "prelu" or not _is_added(graph, readers, place):
                found[name] = "factor"
            else:
                found.setdefault(name, "summand")
    return {name: use for name, use in found.items() if name not in refused and _is_worth_it(model, name)}


def _is_worth_it(model: CompressedModel, name: str) -> bool:
    tensor = model.tensors[name]
    return isinstance(tensor, RawTensor) and tensor.is_floating and tensor.size >= SHORTEST


def _mixes(node: Node) -> bool:
    """Whether errors of other weights, and of more of them, come in; slopes have an element each."""
    return node.op in _MIXES or (any(node.tensors) and node.op != "prelu")


def _readers(graph: Graph) -> dict[int, list[int]]:
    """For each value those that are computed from it."""
    readers: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(graph.nodes, start=graph.inputs):
        for value in node.inputs:
            readers[value].append(place)
    return readers


def _is_added(graph: Graph, readers: dict[int, list[int]], value: int) -> bool:
    """Whether all that reads a value, however moved about, adds it to something or puts it beside."""
    reached = _reached(graph, readers, value, lambda node: node.op in _MOVES)
    return all(node.op in _MOVES or node.op in _ADDS for node in reached)


def _is_magnified(graph: Graph, readers: dict[int, list[int]], value: int) -> bool:
    """Whether an error in a value may come out much larger before other weights have a part in it."""
    reached = _reached(graph, readers, value, lambda node: not _mixes(node))
    return any(node.op in _MAGNIFIES for node in reached)


def _reached(graph: Graph, readers: dict[int, list[int]], value: int, passes: Callable[[Node], bool]) -> Iterator[Node]:
    """The nodes that read a value, or what others that let it pass have made of it; each once."""
    waiting, seen = [value], {value}
    while waiting:
        for place in readers[waiting.pop()]:
            if place in seen:
                continue
            seen.add(place)
            node = graph.nodes[place - graph.inputs]
            yield node
            if passes(node):
                waiting.append(place)
