"""Whether a graph can be computed, found out before anything of it is: `shapes`, `rehearse`.

Every operator says in its family what tensors and inputs it takes; here that is asked of all nodes in order, and each
value is held against the caller's budget as it is met. Where types may differ, torch is asked too, with tensors that
have no values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayeszip.errors import BayeszipError, FormatError, InputError, ModelError, shown
from bayeszip.graph.families import RULES
from bayeszip.graph.families.base import Shape, elements, ints
from bayeszip.graph.families.elementwise import Elementwise
from bayeszip.graph.families.tables import counted
from bayeszip.graph.indices import is_index
from bayeszip.graph.state import DTYPES
from bayeszip.limits import Budget, Limits
from bayeszip.operators import OPERATORS
from bayeszip.tensors import CompressedModel, Graph, Node, RawTensor, Varying

__all__ = [
    "Step",
    "at_sizes",
    "charge_run",
    "check_roles",
    "check_sound",
    "refusing",
    "rehearse",
    "shapes",
    "states_inputs",
    "stored_picks",
    "tensor_shapes",
]

_MOST_DIMENSIONS = 32

#: The batch size of a rehearsal; no size that a network could take for a constant.
_BATCH = 3

#: No number that varies becomes larger, in either direction.
_LARGEST_SIZE = 2**53

#: Bytes of an element in a run that checks: four samples in float64.
_RUN_BYTES = 4 * 8

#: What torch and numpy raise where something doesn't fit.
_FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@contextmanager
def refusing(what: str, kind: type[BayeszipError] = FormatError) -> Iterator[None]:
    """Whatever torch raises inside comes out as `kind`: one family of errors for a caller."""
    try:
        yield
    except BayeszipError as error:
        if kind is FormatError and isinstance(error, ModelError):
            raise FormatError(f"{what}: {error}") from error
        raise
    except _FOREIGN as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise kind(f"{what}: {reason[:120]}") from error


def states_inputs(graph: Graph) -> bool:
    """Whether an `input` node stands between every network input and its readers."""
    readers = [node.op for node in graph.nodes for value in node.inputs if value < graph.inputs]
    return all(op == "input" for op in readers) and all(value >= graph.inputs for value in graph.outputs)


def check_roles(graph: Graph, tensors: Mapping[str, Shape]) -> None:
    """Hold the tensors of all nodes against what their operators take, whatever the inputs.

    Raises:
        ModelError: names the node.
    """
    if not graph.inputs or not graph.outputs:
        raise ModelError("a network takes at least one input and returns at least one output")
    stated: dict[int, object] = {}
    for position, node in enumerate(graph.nodes):
        with _at(position, node):
            if node.op == "input":
                said = node.attributes["shape"], node.attributes["dtype"]
                if node.inputs[0] >= graph.inputs or stated.setdefault(node.inputs[0], said) != said:
                    raise ModelError(f"node {position} states something other than one input of the network once")
            if any(isinstance(each, tuple) and len(each) > 2 * _MOST_DIMENSIONS for each in node.attributes.values()):
                raise ModelError(f"{node.op} has an attribute of more numbers than any value has dimensions")
            for role, name in zip(OPERATORS[node.op].tensors, node.tensors, strict=True):
                if (name is None and role not in RULES[node.op].optional) or is_index(name or ""):
                    raise ModelError(f"{node.op} has no {role} among the network's own tensors")
            RULES[node.op].check_tensors(node, _shapes_of(node, tensors))


def tensor_shapes(model: CompressedModel) -> dict[str, Shape]:
    """The shape of every tensor."""
    return {name: tensor.shape for name, tensor in model.tensors.items()}


def shapes(model: CompressedModel, budget: Budget | None = None) -> list[Shape]:
    """The shape of every value of a model's graph; see `at_sizes`."""
    if model.graph is None:
        raise ModelError("the model has no graph")
    return at_sizes(model.graph, tensor_shapes(model), budget)[1]


def at_sizes(
    graph: Graph,
    tensors: Mapping[str, Shape],
    budget: Budget | None = None,
    inputs: Sequence[Shape] | None = None,
    picks: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[Graph, list[Shape]]:
    """The graph with all that varies worked out, and the shape of every value (−k: k times the batch size).

    Args:
        budget: against which each value is held, before the next is looked at.
        inputs: of the network, for a graph that doesn't state them, or runs at other sizes than it states.
        picks: the smallest and the largest number of tensors that pick rows, as `stored_picks` finds them.

    Raises:
        ModelError: a node can't be applied to its tensors and inputs, or an input is read before it is stated.
        LimitExceeded: a value is too large.
    """
    budget = budget or Budget(Limits.none())
    check_roles(graph, tensors)
    nodes: list[Node] = []
    found: list[Shape | None] = list(inputs) if inputs else [None] * graph.inputs
    for position, node in enumerate(graph.nodes):
        with _at(position, node):
            node = _sized(node, found, stated=inputs is None)
        read = [found[value] for value in node.inputs]
        if node.op == "input":
            read = [()]  # what it states, `check_roles` has seen to
        known = [shape for shape in read if shape is not None]
        if len(known) < len(read):
            raise ModelError(f"node {position} ({node.op}) reads a network input whose shape isn't stated")
        with _at(position, node):
            shape = RULES[node.op].shape(node, known, _shapes_of(node, tensors))
            if node.varying and inputs is not None:
                RULES[node.op].check_tensors(node, _shapes_of(node, tensors))
            if len(shape) > _MOST_DIMENSIONS or 0 in shape:
                raise ModelError(f"a value of {len(shape)} dimensions ({shown(shape)}) is empty or has too many")
        budget.check("values", elements(shape))
        nodes.append(node)
        found.append(shape)
    _check_picks(graph.inputs, nodes, tensors, found, picks or {})
    return replace(graph, nodes=tuple(nodes)), [() if shape is None else shape for shape in found]


def _sized(node: Node, found: Sequence[Shape | None], *, stated: bool) -> Node:
    """A node with its varying numbers worked out; at the sizes that are stated they must be those that it holds."""
    if node.op == "input":
        given = found[node.inputs[0]]
        if given is None:
            return node
        shape = ints(node, "shape")
        free = {each.place for each in node.varying}
        if len(given) != len(shape) + 1 or any(
            size != given[place + 1] for place, size in enumerate(shape) if place not in free
        ):
            wanted = ["batch", *("any" if place in free else str(size) for place, size in enumerate(shape))]
            raise InputError(f"the network takes inputs of shape ({', '.join(wanted)}), not (batch, *{given[1:]})")
    if not node.varying:
        return node
    followed = [(found[value], dim) for each in node.varying for value, dim in each.dims]
    if any(shape is None or not dim < len(shape) or shape[dim] < 1 for shape, dim in followed):
        raise ModelError(f"{node.op} follows a dimension that isn't there, or depends on the batch size")
    attributes = node.sized([shape or () for shape in found])
    for each in node.varying:
        value = attributes[each.attribute]
        if not -_LARGEST_SIZE <= (value[each.place] if isinstance(value, tuple) else int(value)) <= _LARGEST_SIZE:
            raise ModelError(f"{node.op}: {each.attribute} becomes larger than any size")
    if stated and attributes != node.attributes:
        raise ModelError(f"{node.op} holds {shown(dict(node.attributes))}, but the sizes it follows say otherwise")
    return replace(node, attributes=attributes)


def stored_picks(model: CompressedModel) -> dict[str, tuple[int, int]]:
    """The smallest and the largest number of every stored tensor that rows are picked by."""
    if model.graph is None:
        return {}
    found: dict[str, tuple[int, int]] = {}
    for _, source in _picking(model.graph.inputs, model.graph.nodes):
        name = str(source.tensors[0]) if source.op in ("buffer", "parameter") else ""
        # Each once, however many nodes read it; numbers that aren't whole are refused by their type later.
        tensor = model.tensors[name] if name and name not in found else None
        if isinstance(tensor, RawTensor) and tensor.size and not tensor.is_floating:
            found[name] = int(tensor.values.min()), int(tensor.values.max())
    return found


_PICKING = ("take", "embedding", "gather")

#: What lays out all elements otherwise, and leaves none away.
_LAYING_OUT = ("view", "reshape", "flatten", "permute", "expand")


def _picking(inputs: int, nodes: Sequence[Node]) -> Iterator[tuple[int, Node]]:
    """Where rows are picked, and the node whose numbers pick them, however these are laid out."""
    sources: list[Node | None] = [None] * inputs
    for position, node in enumerate(nodes):
        if node.op in _PICKING and (source := sources[node.inputs[-1]]) is not None:
            yield position, source
        sources.append(sources[node.inputs[0]] if node.op in _LAYING_OUT else node)


def _check_picks(
    inputs: int,
    nodes: Sequence[Node],
    tensors: Mapping[str, Shape],
    found: Sequence[Shape | None],
    picks: Mapping[str, tuple[int, int]],
) -> None:
    """Refuse to pick rows that don't exist, by numbers that are stored or counted."""
    for position, source in _picking(inputs, nodes):
        node = nodes[position]
        picked = counted(source) if source.op == "arange" else picks.get(str((*source.tensors, None)[0]))
        if picked is None:
            continue
        rows = tensors[str(node.tensors[0])][0] if node.op == "embedding" else _size_along(node, found[node.inputs[0]])
        if picked[0] < 0 or picked[1] >= rows:
            raise ModelError(f"node {position} ({node.op}) picks rows {picked[0]} to {picked[1]} of {rows}")


def _size_along(node: Node, shape: Shape | None) -> int:
    dim = node.attributes["dim"]
    return abs(shape[dim]) if shape and isinstance(dim, int) else 0


def charge_run(model: CompressedModel, budget: Budget, found: Sequence[Shape] | None = None) -> None:
    """Take from a budget what a run on a few samples asks for, where a network is run to check it.

    Args:
        found: the shapes of all values in that run; None: those at the sizes that the graph states.

    Raises:
        LimitExceeded: too many multiplications, or activations that take too many bytes side by side.
    """
    if model.graph is None:
        return
    graph, tensors = model.graph, tensor_shapes(model)
    found = shapes(model) if found is None else found
    last = {value: position for position, node in enumerate(graph.nodes) for value in node.inputs}
    live = 0
    for position, node in enumerate(graph.nodes):
        rule, shape, own = RULES[node.op], found[graph.inputs + position], _shapes_of(node, tensors)
        read = [found[value] for value in node.inputs]
        budget.charge("operations", rule.operations(read, shape, own))
        live += elements(shape)
        budget.check("memory", _RUN_BYTES * (live + rule.workspace(read, shape, own)))
        live -= sum(
            elements(found[value]) for value in set(node.inputs) if last[value] == position and value >= graph.inputs
        )


def _shapes_of(node: Node, tensors: Mapping[str, Shape]) -> list[Shape | None]:
    return [None if name is None else tensors[name] for name in node.tensors]


@contextmanager
def _at(position: int, node: Node) -> Iterator[None]:
    """Say which node is at fault; attributes of the wrong length or kind make Python stumble instead of a rule."""
    try:
        yield
    except InputError:
        raise  # whoever calls the network is at fault, and no node
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ModelError(f"node {position} ({node.op}) makes no sense: {error}") from error


def check_sound(model: CompressedModel, limits: Limits | Budget | None = None) -> list[Shape] | None:
    """The shapes of all values; None where the graph doesn't state its inputs, and only its tensors can be checked.

    Raises:
        FormatError: the graph can't be computed, or asks for more than the limits.
    """
    if model.graph is None:
        return None
    try:
        if not states_inputs(model.graph):
            check_roles(model.graph, tensor_shapes(model))
            return None
        found = at_sizes(model.graph, tensor_shapes(model), Budget.of(limits), picks=stored_picks(model))[1]
    except ModelError as error:
        raise FormatError(f"the graph can't be computed: {error}") from error
    return found


@dataclass(frozen=True)
class Step:
    """One node, ready to run: the stock layer at a path, or an operator on tensors by name."""

    op: str
    inputs: tuple[int, ...]
    layer: str | None
    tensors: tuple[str | None, ...]
    attributes: dict[str, Any]
    last_used: tuple[int, ...]
    varying: tuple[Varying, ...] = ()


def rehearse(
    steps: Sequence[Step],
    inputs: Sequence[torch.dtype | None],
    tensors: Mapping[str, Tensor],
    found: Sequence[Shape],
    floating: torch.dtype,
) -> None:
    """Let torch go through a graph with tensors that have no values: their types and shapes must fit, as `found`.

    Args:
        inputs: the types of those that the graph doesn't state.
        floating: the type that the network computes in.

    Raises:
        FormatError: names the node.
    """
    values = [None if dtype is None else _hollow(shape, dtype) for shape, dtype in zip(found, inputs, strict=False)]
    known: dict[object, Tensor] = {}
    for position, step in enumerate(steps):
        rule, shape = RULES[step.op], _sizes(found[len(inputs) + position])
        own = [None if name is None else tensors[name] for name in step.tensors]
        if step.op == "input":
            dtype = _type_of_input(step, own, values[step.inputs[0]], floating)
            values.append(_hollow(found[len(inputs) + position], dtype))
            continue
        read = [value for value in (values[each] for each in step.inputs) if value is not None]
        kinds = [None if each is None else (each.shape, each.dtype) for each in (*read, *own)]
        key = (step.op, *step.attributes.values(), *kinds)
        if key not in known:
            with refusing(f"node {position} ({step.op}) can't be computed"), torch.no_grad():
                types = {each.dtype for each in (*read, *own) if each is not None}
                if rule.floating and (len(types) > 1 or not all(each.is_floating_point for each in types)):
                    raise FormatError(f"node {position} ({step.op}) takes floating-point numbers of one type")
                plain = rule.floating and not isinstance(rule, Elementwise)  # then the rule has said all there is
                known[key] = _hollow(shape, types.pop()) if plain else rule.rehearse(read, own, step.attributes)
        if tuple(known[key].shape) != shape:
            raise FormatError(f"node {position} ({step.op}) would give {tuple(known[key].shape)}, not {shape}")
        values.append(known[key])
        for value in step.last_used:
            values[value] = None


def _type_of_input(
    step: Step, own: Sequence[Tensor | None], given: Tensor | None, floating: torch.dtype
) -> torch.dtype:
    """The type that an input goes on with: of the tensor it is cast like, or as stated; uncast, as it comes."""
    stated = DTYPES[step.attributes["dtype"]]
    if own:
        return stated if own[0] is None else own[0].dtype
    if given is not None:
        return given.dtype
    return floating if stated.is_floating_point else stated


def _sizes(shape: Shape) -> tuple[int, ...]:
    return tuple(size if size > 0 else -size * _BATCH for size in shape)


def _hollow(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(_sizes(shape), dtype=dtype, device="meta")
