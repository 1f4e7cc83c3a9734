"""From a module to the graph of what it computes: `trace`, by way of torch.export."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn.modules import transformer

from bayeszip.errors import FormatError, ModelError
from bayeszip.graph.families import ATEN
from bayeszip.graph.lowering import Lowering, UnknownOperator
from bayeszip.graph.proof import alike, one_precision, outputs_of
from bayeszip.graph.quiet import quiet
from bayeszip.graph.sizes import with_free_sizes
from bayeszip.graph.state import dtype_of, from_state
from bayeszip.graph.to_module import to_module
from bayeszip.limits import Limits
from bayeszip.tensors import CompressedModel, Graph

__all__ = ["UnknownOperator", "UntraceableModel", "trace"]


class UntraceableModel(ModelError):
    """What a module computes can't be written as a graph (data-dependent control flow, for example)."""


@one_precision()
def trace(module: nn.Module, example_inputs: tuple[Tensor, ...] | Tensor) -> Graph:
    """What a module computes in `eval()`, as a graph of the closed list of operators.

    Dimension 0 of every input is the batch; its size stays free, and so do other sizes of the inputs where the module
    takes them twice or half as large: see `with_free_sizes`. Tensors keep their names in the module; of tied
    ones the first name stands for all. Dropout disappears. Casts from one floating-point type to another disappear
    too: the graph computes in one type throughout, that of most of the module's parameters, and so does a part of the
    module that asks for autocast. The module is left as it was.

    Raises:
        UnknownOperator: the module uses an operator outside the list; the message names it and its layer.
        UntraceableModel: torch.export can't follow the module, its batch size isn't free, or the graph doesn't
            compute what the module does.
    """
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    program = _exported(module, _with_batch(inputs))
    # To take a program apart costs more than all else here, and each is asked for in several forms.
    apart = cache(_taken_apart)
    graph = _graph_of(module, program, inputs, apart)

    def traced(others: Sequence[tuple[Tensor, ...]], *, spelled: bool) -> list[Graph]:
        """The network at the sizes of other inputs as well."""
        programs = [(program, inputs), *((exported(each), each) for each in others)]
        return [_graph_of(module, one, given, apart, spelled=spelled) for one, given in programs]

    @cache
    def exported(others: tuple[Tensor, ...]) -> ExportedProgram:
        return _exported(module, _with_batch(others))

    return with_free_sizes(module, graph, inputs, traced)


def _graph_of(
    module: nn.Module,
    program: ExportedProgram,
    inputs: tuple[Tensor, ...],
    apart: Callable[[ExportedProgram, object], ExportedProgram | None],
    *,
    spelled: bool = False,
) -> Graph:
    names = _canonical_names(module)
    taken_apart: set[object] = set()
    while True:
        try:
            graph = _lowered(program, names, dtype_of(module, inputs), spelled=spelled)
            _check(module, graph, inputs)
            return graph
        except UnknownOperator as error:
            # Many operators outside the list are made of operators inside it (einsum, for example): take them apart.
            if error.target is None or error.target in taken_apart:
                raise
            taken_apart.add(error.target)
            simpler = apart(program, error.target)
            if simpler is None:
                raise
            program = simpler


def _lowered(program: ExportedProgram, names: dict[str, str], dtype: torch.dtype, *, spelled: bool) -> Graph:
    lowering = Lowering(program, names, ATEN, dtype, spelled=spelled)
    for node in program.graph.nodes:
        try:
            lowering.add(node)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # An overload or an argument (a size that varies, for example) that the table doesn't expect.
            raise UnknownOperator(
                f"{node.target}, called as {node.format_node()}, is not understood: {error}"
            ) from error
    return _pruned(lowering.graph())


def _check(module: nn.Module, graph: Graph, inputs: tuple[Tensor, ...]) -> None:
    """Run the graph against the module on the example inputs: a meaning that was missed must not go unnoticed."""
    model = CompressedModel(from_state(module, graph=graph), graph)
    try:
        network = to_module(model, limits=Limits.none()).to(inputs[0].device)
    except FormatError as error:
        raise UntraceableModel(f"the graph of {type(module).__name__} can't be built: {error}") from error
    with _in_eval(module), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            returned = module(*inputs)
            expected, found = outputs_of(returned), outputs_of(network(*inputs))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = " ".join(str(error).splitlines()[:1])
            raise UntraceableModel(f"{type(module).__name__}, or its graph, doesn't run: {reason}") from error
    # Names of outputs don't go into a graph; they come in the order they have.
    by_name = returned.values() if isinstance(returned, Mapping) else returned
    flat = tuple(by_name) if isinstance(returned, tuple | list | Mapping) else (returned,)
    if not all(isinstance(each, Tensor) for each in flat):
        kind = type(returned).__name__
        raise UntraceableModel(
            f"{type(module).__name__} returns a {kind}; a graph returns tensors or a tuple of them: wrap the network "
            "in one that returns what is needed"
        )
    short = any(each.dtype.itemsize == 2 and each.is_floating_point() for each in (*module.parameters(), *inputs))
    tolerance = 5e-2 if short else 1e-4
    if len(expected) != len(found):
        raise UntraceableModel(f"{type(module).__name__} returns {len(expected)} tensors, its graph {len(found)}")
    if not alike(expected, found, tolerance):
        raise UntraceableModel(f"the graph of {type(module).__name__} doesn't compute what the module does")


def _pruned(graph: Graph) -> Graph:
    """The graph without nodes that no output is computed from; inputs stay stated."""
    needed, nodes = set(graph.outputs), graph.nodes
    for position in reversed(range(len(nodes))):
        if graph.inputs + position in needed or nodes[position].op == "input":
            needed.update((graph.inputs + position, *nodes[position].inputs))
    order = sorted(value for value in needed if value >= graph.inputs)
    renamed = {value: value for value in range(graph.inputs)}
    renamed |= {value: graph.inputs + place for place, value in enumerate(order)}
    return replace(
        graph,
        nodes=tuple(nodes[value - graph.inputs].renumbered(renamed) for value in order),
        outputs=tuple(renamed[value] for value in graph.outputs),
    )


def _taken_apart(program: ExportedProgram, operator: object) -> ExportedProgram | None:
    """The program with one operator replaced by those it is made of; None if it is made of none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = torch.export.default_decompositions()
        if operator not in known:
            return None
        try:
            return program.run_decompositions({operator: known[operator]})
        except Exception:  # whatever torch makes of it, the operator stays unknown
            return None


def _with_batch(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs with a batch of at least two: torch.export takes a size of one for a constant."""
    if not inputs or not all(isinstance(each, Tensor) and each.ndim for each in inputs):
        raise ModelError("example_inputs must be tensors whose first dimension is the batch")
    sizes = {each.shape[0] for each in inputs}
    if len(sizes) > 1:
        raise ModelError(
            f"the example inputs disagree on the batch size, their first dimension: {sorted(sizes)}; where the batch "
            "is another one, as in a recurrent layer's state, wrap the network in one that takes it first"
        )
    if sizes == {0}:
        raise ModelError("the example inputs are empty: give a batch of at least one")
    return tuple(torch.cat([each, each]) if each.shape[0] == 1 else each for each in inputs)


def _exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    batch = Dim("batch", min=1, max=2**20)
    shapes = _like_arguments(module, [{0: batch} for _ in inputs])
    # Without gradients from the outset: parts of a module that switch them off then leave no trace of that.
    with _in_eval(module), _plain_attention(), _plain_outputs(module), torch.no_grad(), quiet():
        try:
            program = _followed(module, inputs, shapes)
            # Operators that write into their input may be taken for ordinary ones only if nobody else sees it.
            return program if all(map(_is_pure, program.graph.nodes)) else program.run_decompositions({})
        except UntraceableModel:
            raise
        except Exception as error:  # torch.export raises a dozen kinds; each means the same to the caller
            reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
            raise UntraceableModel(f"torch.export can't follow {type(module).__name__}: {reason[:300]}") from error


def _followed(module: nn.Module, inputs: tuple[Tensor, ...], shapes: tuple[object, ...]) -> ExportedProgram:
    """What torch.export makes of a module, by running it; or by reading its code, where that keeps the batch free."""
    try:
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        if "specialized it to be a constant" not in str(error):
            raise
        # Python's `len(x)` is a number, whatever runs it; whoever reads it knows whose size it is.
        with suppress(Exception):
            return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=True)
        raise UntraceableModel(
            f"{type(module).__name__} takes its batch size, {inputs[0].shape[0]} in the example, for a constant, as a "
            "loop over examples or view(8, -1) does; take it from the input, as in x.view(x.shape[0], -1)"
        ) from error


def _like_arguments(module: nn.Module, shapes: list[dict[int, Dim]]) -> tuple[object, ...]:
    """One entry for each argument of `forward`, those of `*arguments` in a tuple of their own, as torch.export asks."""
    try:
        bound = inspect.signature(module.forward).bind(*shapes)
    except TypeError as error:
        raise ModelError(
            f"{type(module).__name__}.forward doesn't take {len(shapes)} example inputs: {error}"
        ) from error
    return tuple(bound.arguments.values())


def _is_pure(node: fx.Node) -> bool:
    """Whether a call leaves its inputs alone, or changes only one that was computed for it and for nobody else."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return True
    if not node.target._schema.is_mutable:
        return True
    changed = node.args[0]
    if not isinstance(changed, fx.Node) or changed.op != "call_function" or len(changed.users) != 1:
        return False
    maker = changed.target
    if not isinstance(maker, torch._ops.OpOverload):
        return False
    return maker._schema.is_mutable or all(each.alias_info is None for each in maker._schema.returns)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer → the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


@contextmanager
def _in_eval(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, each of its parts back in its own mode afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _plain_outputs(module: nn.Module) -> Iterator[None]:
    """Outputs by name as a dict: torch.export follows no other class that has not been made known to it."""

    def plain(_module: nn.Module, _inputs: object, outputs: object) -> object:
        return dict(outputs.items()) if isinstance(outputs, Mapping) else outputs

    hook = module.register_forward_hook(plain)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as ordinary operators, not as the fused inference kernel, and masks as they are given.

    Whether a mask is the causal one, torch asks its values, which a trace doesn't have. The answer only chooses a
    faster kernel: taken as any other mask, it does the same.
    """
    enabled, detect = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = _said_to_be_causal
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        transformer._detect_is_causal_mask = detect


def _said_to_be_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """In place of torch's function: what the caller says, and no where he says nothing."""
    return is_causal is True
