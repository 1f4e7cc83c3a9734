"""Which sizes of a network's inputs are free, and what in its graph follows them: `with_free_sizes`.

The module itself says which: it is run on its example inputs, made longer and shorter along one dimension after the
other. If the graph runs at those sizes as it is, once its inputs may have them, that is all. If not, the module is
traced at a second size, and every number in which the two graphs differ must follow from sizes of values before it. At
a third size the module and its graph must agree.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations_with_replacement, islice
from typing import Protocol

import torch
from torch import Tensor, nn

from bayeszip.errors import ModelError
from bayeszip.graph.families.base import Shape
from bayeszip.graph.free import PARTS, near
from bayeszip.graph.plain import copied
from bayeszip.graph.proof import alike, outputs_of
from bayeszip.graph.soundness import at_sizes, shapes, tensor_shapes
from bayeszip.graph.state import from_state
from bayeszip.graph.to_module import to_module
from bayeszip.limits import Limits
from bayeszip.tensors import CompressedModel, Graph, Node, Varying

__all__ = ["resized", "with_free_sizes"]

#: So many combinations of sizes are tried.
_COMBINATIONS = 3

#: Parts of the sizes at which a graph that was found must hold, too: what branches by size or cuts off at a length may
#: do so beyond twice the size. Only where no value can come to more elements than this, if values grow with the square
#: of their inputs, as attention's do.
_FAR, _FAR_ELEMENTS = (Fraction(4), Fraction(1, 4)), 2**26

#: Relative to the largest output; as in `trace`.
_TOLERANCE = 1e-4

#: A dimension of an input: which input, which dimension.
Place = tuple[int, int]

Inputs = tuple[Tensor, ...]


class Traced(Protocol):
    """The graphs of a module at its example inputs and at others; `spelled`: see `Lowering`."""

    def __call__(self, others: Sequence[Inputs], *, spelled: bool) -> list[Graph]: ...


@dataclass(frozen=True)
class _Free:
    """Dimensions that change together, and sizes besides their own that the module has run at."""

    places: tuple[Place, ...]
    sizes: tuple[int, ...]


def with_free_sizes(module: nn.Module, graph: Graph, inputs: Inputs, traced: Traced) -> Graph:
    """The graph with every size of its inputs free that is free in the module; the graph as it is if none is.

    A size counts as free where the module runs with twice or half of it, and where it does with four times or a quarter
    of it, if it has to say the same as the graph there. Modules that do something else at sizes that were not tried (by
    a branch in Python, for example) can't be told from others.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        original = _on_cpu(module)
        examples = tuple(each[:2].cpu() for each in inputs)
        if original is None:
            return graph
        free = list(_freed(original, examples))
        others = list(islice(_combinations(original, examples, free), _COMBINATIONS))
        if not others:
            return graph
        others += _far_off(original, graph, examples, free)
        places = {place for each in free for place in each.places}
        for found in _candidates(original, graph, examples, traced, others, places):
            if all(_agree(original, found, each) for each in (examples, *others)):
                return found
    return graph


def _candidates(
    module: nn.Module, graph: Graph, inputs: Inputs, traced: Traced, others: Sequence[Inputs], places: set[Place]
) -> Iterator[Graph]:
    """Graphs that may be the network's at all sizes, the simplest first."""
    yield _opened(graph, places)
    # At the size of the examples something may be left out (a slice that takes all, for example): then two others.
    for apart, spelled in ((False, False), (False, True), (True, True)):
        try:
            first, second, *_ = traced(others[: 1 + apart], spelled=spelled)[apart:]
            yield _at(module, _joined(module, _opened(first, places), second), inputs)
        except (ModelError, ValueError):
            continue


def _at(module: nn.Module, graph: Graph, inputs: Inputs) -> Graph:
    """The graph with what varies as it is for these inputs."""
    sizes = [(-1, *each.shape[1:]) for each in inputs]
    return at_sizes(graph, tensor_shapes(_model(module, graph)), inputs=sizes)[0]


def _on_cpu(module: nn.Module) -> nn.Module | None:
    """The module, or a copy where a mistake (a row that a table lacks) does no harm; None if it can't be copied."""
    if all(each.device.type == "cpu" for each in (*module.parameters(), *module.buffers())) and not module.training:
        return module
    try:
        return copied(module).cpu().eval()
    except Exception:  # a module may hold anything
        return None


def _freed(module: nn.Module, inputs: Inputs) -> Iterator[_Free]:
    """Dimensions that can change by themselves, then those that change with others of their size."""
    fixed: list[Place] = []
    for place in ((which, dim) for which, each in enumerate(inputs) for dim in range(1, each.ndim)):
        found = _working(module, inputs, (place,))
        if found is None:
            fixed.append(place)
        else:
            yield found
    for anywhere in (False, True):
        groups: dict[object, list[Place]] = {}
        for which, dim in fixed:
            groups.setdefault((anywhere or dim, inputs[which].shape[dim]), []).append((which, dim))
        for group in groups.values():
            if len(group) > 1 and (found := _working(module, inputs, tuple(group))) is not None:
                fixed = [place for place in fixed if place not in group]
                yield found


def _working(module: nn.Module, inputs: Inputs, places: tuple[Place, ...]) -> _Free | None:
    """Sizes that these dimensions can have together; None if they can neither be doubled nor halved."""
    which, dim = places[0]
    now = inputs[which].shape[dim]

    def takes(size: int) -> bool:
        return size > 0 and _runs(module, resized(inputs, dict.fromkeys(places, size)))

    plain = [int(now * part) for part in PARTS if takes(int(now * part))]
    more = [size for size in near(now) if plain and size not in plain and takes(size)]
    return _Free(places, (*more[:2], *plain)) if plain else None


def _combinations(module: nn.Module, inputs: Inputs, free: Sequence[_Free]) -> Iterator[Inputs]:
    """Inputs with all free dimensions at other sizes, different ones for each, on which the module runs."""
    longest = max((len(each.sizes) for each in free), default=0)
    for turn in range(longest):
        sizes = [each.sizes[(turn + place) % len(each.sizes)] for place, each in enumerate(free)]
        wanted = {place: size for each, size in zip(free, sizes, strict=True) for place in each.places}
        others = resized(inputs, wanted)
        if _runs(module, others):
            yield others


def _far_off(module: nn.Module, graph: Graph, inputs: Inputs, free: Sequence[_Free]) -> Iterator[Inputs]:
    """Inputs with all free dimensions much longer, or shorter, on which the module runs."""
    largest = len(inputs[0]) * max(math.prod(map(abs, shape)) for shape in shapes(_model(module, graph)))
    for part in _FAR:
        wanted = {(which, dim): int(inputs[which].shape[dim] * part) for each in free for which, dim in each.places}
        growth = math.prod(wanted[place] / inputs[place[0]].shape[place[1]] for place in wanted)
        if not all(wanted.values()) or growth**2 * largest > _FAR_ELEMENTS:
            continue
        others = resized(inputs, wanted)
        if _runs(module, others):
            yield others


def resized(inputs: Inputs, sizes: dict[Place, int]) -> Inputs:
    """The inputs with some dimensions made shorter, or longer by repetition."""
    result = list(inputs)
    for (which, dim), size in sizes.items():
        rows = torch.arange(size, device=result[which].device) % result[which].shape[dim]
        result[which] = result[which].index_select(dim, rows)
    return tuple(result)


def _runs(module: nn.Module, inputs: Inputs) -> bool:
    try:
        return bool(outputs_of(module(*inputs)))
    except Exception:  # whatever a module makes of it, it doesn't take this size
        return False


def _opened(graph: Graph, places: set[Place]) -> Graph:
    """The graph whose inputs are free along these dimensions, and nothing else."""
    nodes = []
    for node in graph.nodes:
        if node.op == "input":
            dims = sorted(dim for which, dim in places if which == node.inputs[0])
            node = replace(node, varying=tuple(Varying("shape", dim - 1) for dim in dims))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _agree(module: nn.Module, graph: Graph, inputs: Inputs) -> bool:
    """Whether module and graph compute the same."""
    try:
        network = to_module(_model(module, graph), limits=Limits.none())
        expected, found = outputs_of(module(*inputs)), outputs_of(network(*inputs))
    except Exception:  # a module may raise anything; either way they don't
        return False
    short = any(each.dtype.itemsize == 2 and each.is_floating_point() for each in (*module.parameters(), *inputs))
    return len(expected) == len(found) and alike(expected, found, 5e-2 if short else _TOLERANCE)


def _model(module: nn.Module, graph: Graph) -> CompressedModel:
    return CompressedModel(from_state(module, graph=graph), graph)


def _joined(module: nn.Module, first: Graph, second: Graph) -> Graph:
    """The first graph, in which all numbers that differ from the second's follow sizes of values before.

    Raises:
        ModelError: the graphs differ in more than numbers, or a number follows nothing.
    """
    if len(first.nodes) != len(second.nodes) or first.outputs != second.outputs:
        raise ModelError("at another size the graph has other nodes")
    models = _model(module, first), _model(module, second)
    if any(models[1].tensors.get(name) != models[0].tensors[name] for name in first.tensor_names()):
        raise ModelError("at another size the graph has other constants")
    known = list(zip(shapes(replace(models[0], graph=_closed(first))), shapes(models[1]), strict=True))
    nodes = []
    for position, (one, other) in enumerate(zip(first.nodes, second.nodes, strict=True)):
        if (one.op, one.inputs, one.tensors) != (other.op, other.inputs, other.tensors):
            raise ModelError("at another size the graph has other nodes")
        if one.op != "input" and one.attributes != other.attributes:
            sizes = _Sizes(known, first.inputs, first.inputs + position, one.inputs)
            one = replace(one, varying=tuple(_differences(one, other, sizes)))
        nodes.append(one)
    return replace(first, nodes=tuple(nodes))


def _closed(graph: Graph) -> Graph:
    return replace(graph, nodes=tuple(replace(node, varying=()) for node in graph.nodes))


def _differences(one: Node, other: Node, sizes: "_Sizes") -> Iterator[Varying]:
    for name, value in one.attributes.items():
        again = other.attributes[name]
        if value == again:
            continue
        if isinstance(value, tuple) and isinstance(again, tuple) and len(value) == len(again):
            for place, pair in enumerate(zip(value, again, strict=True)):
                if pair[0] != pair[1]:
                    yield sizes.followed(name, place, pair)
        elif type(value) is type(again) is int:
            yield sizes.followed(name, 0, (value, again))
        else:
            raise ModelError(f"{one.op}: {name} differs at another size")


class _Sizes:
    """Sizes of values before a node, at two sizes of the inputs; only those that differ."""

    def __init__(self, known: Sequence[tuple[Shape, Shape]], start: int, end: int, own: Sequence[int]) -> None:
        self._dims: dict[tuple[int, int], tuple[int, int]] = {}
        # What a node reads tells most, then what comes last.
        for value in (*own, *range(end - 1, start - 1, -1)):
            for dim, pair in enumerate(zip(*known[value], strict=True)):
                if value >= start and pair[0] != pair[1] and min(pair) > 0:
                    self._dims.setdefault(pair, (value, dim))

    def followed(self, name: str, place: int, pair: tuple[int, int]) -> Varying:
        """What a number that is the first of the pair at one size and the second at the other may be."""
        ways = [each for count in (1, 2) for each in combinations_with_replacement(self._dims.items(), count)]
        fitting = [
            Varying(name, place, tuple(dim for _, dim in way), *found)
            for way in ways
            if (found := _linear(pair, *(size for size, _ in way))) is not None
        ]
        if not fitting:
            raise ModelError(f"{name} follows no size")
        return min(fitting, key=_effort)


def _linear(pair: tuple[int, int], *sizes: tuple[int, int]) -> tuple[int, int, int] | None:
    """(factor, divisor, offset) that make of the sizes' products the numbers of the pair."""
    first, second = map(math.prod, zip(*sizes, strict=True))
    if first == second:
        return None
    slope = Fraction(pair[1] - pair[0], second - first)
    offset = pair[0] - slope * first
    whole = slope != 0 and offset.denominator == 1
    return (slope.numerator, slope.denominator, int(offset)) if whole else None


def _effort(varying: Varying) -> tuple[int, ...]:
    """The simplest way first: the size itself, one less or more, a part or a multiple, products."""
    factor, divisor, offset = abs(varying.factor), varying.divisor, abs(varying.offset)
    rank = (factor != 1) + (divisor != 1) + 2 * (offset != 0) + 2 * (len(varying.dims) - 1)
    return rank, offset, factor + divisor
