"""Proof on the spot that two models compute the same: `prove_same`, `difference`."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeszip.errors import BayeszipError, ModelError
from bayeszip.graph.families.base import Shape, elements
from bayeszip.graph.free import input_shapes, runnable_sizes
from bayeszip.graph.soundness import at_sizes, charge_run, refusing, tensor_shapes
from bayeszip.graph.state import DTYPES
from bayeszip.graph.to_module import Network, to_module
from bayeszip.limits import Budget, Limits
from bayeszip.tensors import CompressedModel, Graph

__all__ = ["Difference", "alike", "difference", "one_precision", "outputs_of", "prove_same", "random_inputs"]

#: Outputs may differ by so many times what rounding every parameter to float32 once more would do; a constant that was
#: folded into a bias was rounded so. A border or a sign done wrong is off by far more.
_ROUNDINGS = 32.0

#: Batches of random inputs, besides the examples.
_RANDOM_BATCHES = 3

#: Batches at other sizes, where the network runs at some.
_OTHER_SIZES = 2

#: Differences below this, relative to the largest output, are float64's own.
_FLOOR = 1e-9


@dataclass(frozen=True)
class Difference:
    """How far outputs of two models are apart at most, relative to the largest; and what rounding accounts for."""

    worst: float
    rounding: float

    def __bool__(self) -> bool:
        """Whether there is more to it than rounding."""
        return not self.worst <= self.rounding

    def __str__(self) -> str:
        return f"outputs differ by {self.worst:.3g} times the largest output; rounding explains {self.rounding:.1g}"


def prove_same(
    original: CompressedModel,
    shrunk: CompressedModel,
    example_inputs: Sequence[Tensor] | Tensor = (),
    *,
    rounding: float | None = None,
) -> float:
    """Make sure that removing dead units changed nothing; the largest difference, relative.

    Raises:
        ModelError: the models differ by more than rounding; the message says by how much.
    """
    found = difference(original, shrunk, example_inputs, rounding=rounding)
    if found:
        raise ModelError(
            f"removing dead units changed what the network computes: {found}; nothing was written. Please report this "
            "network"
        )
    return found.worst


def difference(
    original: CompressedModel,
    other: CompressedModel,
    example_inputs: Sequence[Tensor] | Tensor = (),
    *,
    rounding: float | None = None,
    limits: Limits | Budget | None = None,
    precision: torch.dtype = torch.float32,
) -> Difference:
    """Run two models in float64 on the example inputs and on random ones.

    Args:
        rounding: what to put down to rounding, relative to the largest output; None: measured on the original, as
            what a change of each parameter in its last bit does.
        limits: what the other model may ask for, if it comes from a file.
        precision: the type that the original's parameters had; all have that last bit.

    Raises:
        ModelError: their outputs can't be compared, or one of them can't be run.
    """
    examples = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    generator = torch.Generator().manual_seed(0)
    batches = [_in_float64(examples)] if examples else []
    batches += [_in_float64(random_inputs(original, generator, examples)) for _ in range(_RANDOM_BATCHES)]
    budget = Budget.of(limits or Limits.none())
    charge_run(other, budget)
    sizes = runnable_sizes(other, budget.limits, _OTHER_SIZES)
    batches += [_in_float64(random_inputs(original, generator, examples, shapes=given)) for given in sizes]
    network = to_module(original, torch.float64, Limits.none())
    answers = _answers(network, batches)
    worst = _worst_gap(answers, to_module(other, torch.float64, budget))
    if rounding is None:
        shaken = _worst_gap(answers, _shaken(network, generator, torch.finfo(precision).eps / 2))
        rounding = max(_FLOOR, _ROUNDINGS * shaken) if math.isfinite(shaken) else _FLOOR
    return Difference(worst, rounding)


def _shaken(network: Network, generator: torch.Generator, share: float) -> Network:
    """The network with every number of its floating-point tensors changed by this share of it, up or down."""
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
                tensor.mul_(1 + signs * share)
    return network


def random_inputs(
    model: CompressedModel,
    generator: torch.Generator,
    examples: Sequence[Tensor] = (),
    batch: int = 4,
    limits: Limits | Budget | None = None,
    shapes: Sequence[Shape] | None = None,
) -> tuple[Tensor, ...]:
    """Inputs of the shapes the graph states, or of others: normal numbers, or integers in a range known to be valid."""
    if model.graph is None:
        raise ModelError("a model without a graph can't be run")
    shapes = shapes or input_shapes(model.graph)
    sizes = _value_shapes(model, model.graph, shapes)
    stated = {
        node.inputs[0]: (model.graph.inputs + at, node)
        for at, node in enumerate(model.graph.nodes)
        if node.op == "input"
    }
    drawn = []
    for position in range(model.graph.inputs):
        value, node = stated[position]
        shape = (batch, *shapes[position][1:])
        Budget.of(limits).check("values", elements(shape))
        dtype: torch.dtype = DTYPES[str(node.attributes["dtype"])]
        picks = _picked_rows(model, model.graph, value, sizes)
        if dtype.is_floating_point and not picks:
            drawn.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        else:
            low, high = _valid_integers(picks, examples[position] if examples else None)
            drawn.append(torch.randint(low, high + 1, shape, generator=generator).to(dtype))
    return tuple(drawn)


#: Whole numbers below this are themselves as floats.
_EXACT = 2.0**53
#: What picks from its first input by its second.
_PICKING = ("take", "gather")
#: What leaves numbers as they are, or lays them out otherwise.
_PASSING = ("cast", "view", "reshape", "flatten", "select", "slice", "permute", "expand")


def _value_shapes(model: CompressedModel, graph: Graph, inputs: Sequence[Shape]) -> Sequence[Shape]:
    """The shape of every value that something is picked from, at these sizes or, where there are none such, as stated.

    Once for all nodes: a file can hold thousands that pick.
    """
    if not any(node.op in _PICKING for node in graph.nodes):
        return ()
    try:
        return at_sizes(graph, tensor_shapes(model), inputs=inputs)[1]
    except BayeszipError:
        return at_sizes(graph, tensor_shapes(model))[1]


def _picked_rows(model: CompressedModel, graph: Graph, value: int, sizes: Sequence[Shape]) -> list[tuple[int, int]]:
    """For each table whose rows a value picks, perhaps moved by a constant: what picks the first, and the last.

    Args:
        sizes: the shapes of all values, where anything is picked from one.
    """
    moved, found = {value: 0.0}, []
    for place, node in enumerate(graph.nodes, graph.inputs):
        shift = moved.get(node.inputs[-1 if node.op in _PICKING else 0]) if node.inputs else None
        if shift is None:
            continue
        if node.op in _PICKING:
            rows = sizes[node.inputs[0]][int(str(node.attributes["dim"]))]
            found.append((math.ceil(-shift), math.floor(rows - 1 - shift)))
        elif node.op == "embedding":
            rows = model.tensors[str(node.tensors[0])].shape[0]
            found.append((math.ceil(-shift), math.floor(rows - 1 - shift)))
        elif node.op == "add_scalar" and abs(further := shift + float(str(node.attributes["value"]))) < _EXACT:
            moved[place] = further
        elif node.op in _PASSING:
            moved[place] = shift
    return found


def _valid_integers(picks: Sequence[tuple[int, int]], example: Tensor | None) -> tuple[int, int]:
    """A range that an integer input may have: within the example's, and the rows of all tables that it picks from."""
    own = [(int(example.min()), int(example.max()))] if example is not None and example.numel() else []
    ranges = [*own, *picks] or [(0, 1)]
    low, high = max(first for first, _ in ranges), min(last for _, last in ranges)
    return (low, high) if low <= high else ranges[0]


def _in_float64(batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each.detach().cpu().double() if each.is_floating_point() else each.detach().cpu() for each in batch)


def _answers(network: Network, batches: Sequence[tuple[Tensor, ...]]) -> list[tuple[tuple[Tensor, ...], list[Tensor]]]:
    """What the network says to each batch that it runs on, of which the first, an example's if there is one, is one.

    Others are drawn, and may hold what it never meets: a row that a table does not have.
    """
    answers = []
    for inputs in batches:
        try:
            with torch.no_grad(), refusing("a network can't be run on random inputs", ModelError):
                answers.append((inputs, outputs_of(network(*inputs))))
        except ModelError:
            if not answers:
                raise
    return answers


def _worst_gap(answers: Sequence[tuple[tuple[Tensor, ...], list[Tensor]]], network: Network) -> float:
    """The largest difference between a network's outputs and others', relative to the largest output of the batch."""
    worst = 0.0
    for inputs, expected in answers:
        with torch.no_grad(), refusing("a network can't be run on random inputs", ModelError):
            found = outputs_of(network(*inputs))
        if len(expected) != len(found):
            raise ModelError(f"one network returns {len(expected)} tensors, the other {len(found)}")
        worst = max([worst, *(_gap(one, other) for one, other in zip(expected, found, strict=True))])
    return worst


def _gap(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        raise ModelError(f"an output has shape {tuple(one.shape)} in one network and {tuple(other.shape)} in the other")
    # Where both overflow alike they agree; what overflows in one alone is a difference without measure.
    alike = (one == other) | (one.isnan() & other.isnan())
    if alike.all():
        return 0.0
    one, other = one.double(), other.double()
    finite = one.isfinite()
    scale = max(float(one[finite].abs().max()) if finite.any() else 0.0, torch.finfo(torch.float64).tiny)
    gaps = (one - other)[~alike].abs() / scale
    return float(gaps.nan_to_num(nan=math.inf).max())


def alike(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float) -> bool:
    """Whether outputs agree, relative to the largest of each; where one isn't finite, the other is the same."""
    for one, other in zip(expected, found, strict=True):
        one, other = one.double(), other.double()
        scale = float(one.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if one.numel() else 0.0
        if one.shape != other.shape or not torch.allclose(
            one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        ):
            return False
    return True


def outputs_of(result: object) -> list[Tensor]:
    """The tensors a network returned, however it holds them."""
    if isinstance(result, Tensor):
        return [result.detach()]
    if isinstance(result, dict):
        return [tensor for each in result.values() for tensor in outputs_of(each)]
    if isinstance(result, list | tuple):
        return [tensor for each in result for tensor in outputs_of(each)]
    return []


@contextmanager
def one_precision() -> Iterator[None]:
    """Where a forward asks for autocast, by itself or since a trainer has wrapped it, nothing is cast: a graph computes
    in one type throughout."""
    kind = torch.autocast
    enter, leave = kind.__enter__, kind.__exit__
    kind.__enter__, kind.__exit__ = (lambda region: region), (lambda region, *error: None)  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]
