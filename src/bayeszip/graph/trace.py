"""From a module to the graph of what it computes: `trace`, by way of torch.export."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from bayeszip.errors import ModelError
from bayeszip.graph.aten import Lowering, UnknownOperator
from bayeszip.tensors import Graph

__all__ = ["UnknownOperator", "UntraceableModel", "trace"]


class UntraceableModel(ModelError):
    """What a module computes can't be written as a graph (data-dependent control flow, for example)."""


def trace(module: nn.Module, example_inputs: tuple[Tensor, ...] | Tensor) -> Graph:
    """What a module computes in `eval()`, as a graph of the closed list of operators.

    Dimension 0 of every input is the batch; its size stays free. Tensors keep their names in the module; of tied
    ones the first name stands for all. Dropout disappears. The module is left as it was.

    Raises:
        UnknownOperator: the module uses an operator outside the list; the message names it and its layer.
        UntraceableModel: torch.export can't follow the module, or its batch size isn't free.
    """
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    program = _exported(module, _with_batch(inputs))
    lowering = Lowering(program, _canonical_names(module))
    for node in program.graph.nodes:
        lowering.add(node)
    return lowering.graph()


def _with_batch(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs with a batch of at least two: torch.export takes a size of one for a constant."""
    if not inputs or not all(isinstance(each, Tensor) and each.ndim for each in inputs):
        raise ModelError("example_inputs must be tensors whose first dimension is the batch")
    sizes = {each.shape[0] for each in inputs}
    if len(sizes) > 1:
        raise ModelError(f"the example inputs disagree on the batch size: {sorted(sizes)}")
    if sizes == {0}:
        raise ModelError("the example inputs are empty: give a batch of at least one")
    return tuple(torch.cat([each, each]) if each.shape[0] == 1 else each for each in inputs)


def _exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    batch = Dim("batch", min=1, max=2**20)
    shapes = _like_arguments(module, [{0: batch} for _ in inputs])
    with _in_eval(module), _plain_attention(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
            # Operators that write into their input may be taken for ordinary ones only if nobody else sees it.
            return program if all(map(_is_pure, program.graph.nodes)) else program.run_decompositions({})
        except Exception as error:  # torch.export raises a dozen kinds; each means the same to the caller
            reason = str(error).strip().split("\n")[0]
            raise UntraceableModel(
                f"torch.export can't follow {type(module).__name__}: {type(error).__name__}: {reason}"
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
def _plain_attention() -> Iterator[None]:
    """Attention as ordinary operators, not as the fused inference kernel."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
