"""A network as ONNX, checked against itself: `to_onnx`."""

import importlib
import logging
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeszip.errors import ModelError
from bayeszip.graph.families.base import Shape
from bayeszip.graph.free import runnable_sizes
from bayeszip.graph.onnx_tables import OPSET, with_tables
from bayeszip.graph.proof import outputs_of, random_inputs
from bayeszip.graph.quiet import quiet
from bayeszip.graph.soundness import charge_run, refusing
from bayeszip.graph.to_module import Network, to_module
from bayeszip.limits import Budget, Limits
from bayeszip.tensors import CompressedModel

__all__ = ["to_onnx"]

_LOG = logging.getLogger("bayeszip")

#: How far onnxruntime may be from torch, relative to the largest output.
TOLERANCE = 1e-5

#: At so many other sizes, where the network runs at some.
_OTHER_SIZES = 2

#: In a shorter type than float32: by so many times its precision.
_ROUNDINGS = 16


def to_onnx(
    model: CompressedModel,
    dtype: torch.dtype = torch.float32,
    limits: Limits | Budget | None = None,
    *,
    plain: bool = False,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
) -> bytes:
    """The network as an ONNX file's bytes; onnxruntime has run it, at several sizes, and agreed with torch.

    The batch size is free, and so are other sizes of the inputs where they are in the graph and torch.onnx can keep
    them so. Weights are tables of shared values and indices of 4 or 8 bits, from which a runtime makes them when it
    loads the file.

    Args:
        dtype: of its floating-point tensors, inputs and outputs. float32 by default, whatever the network's own type:
            runtimes have all operators in it.
        limits: what the model may ask for; a budget, where reading its file has been charged to it.
        plain: write the weights out, for runtimes that know no indices of 4 bits (ONNX before opset 21).
        input_names: what the inputs are called in the file, in order.
        output_names: what the outputs are called.

    Raises:
        ModelError: a package is missing, the model has no graph that states its inputs, onnxruntime lacks an operator
            in this type, or the outputs differ.
    """
    if dtype == torch.bfloat16:
        raise ModelError("onnxruntime can't run bfloat16 networks on a CPU to check them; take float32 or float16")
    onnx, _, runtime = map(_needed, ("onnx", "onnxscript", "onnxruntime"))
    budget = Budget.of(limits)
    network = to_module(model, dtype, budget)
    charge_run(model, budget)
    _check_names(model, input_names, output_names)
    sizes = runnable_sizes(model, budget.limits, _OTHER_SIZES)
    for free in (True, False) if sizes else (False,):
        shapes: list[list[Shape] | None] = [*sizes, None] if free else [None]
        examples = [_inputs(model, dtype, seed, given) for seed, given in enumerate((shapes[0], *shapes))]
        try:
            # Before the exporter, which may take for ever over numbers that pick what isn't there.
            expected = [_computed(network, inputs) for inputs in examples]
            dims = [_free_dims(model, place) if free else [] for place in range(len(examples[0]))]
            proto = _exported(network, examples[0], dims, plain=plain, names=(input_names, output_names))
            _tell_sizes(proto, examples, expected)
            blob: bytes = (proto if plain else with_tables(proto, model, onnx)).SerializeToString()
            most = max(TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps)
            _check(examples[1:], expected[1:], blob, runtime, most)
            return blob
        except ModelError as error:
            if not free:
                raise
            _LOG.warning("the ONNX file takes inputs of the stated sizes alone, at any batch size: %s", error)
    raise ModelError("torch.onnx can't export the network")


def _check_names(model: CompressedModel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    graph = model.graph
    for what, names, count in (
        ("inputs", inputs, graph.inputs if graph else 0),
        ("outputs", outputs, len(graph.outputs) if graph else 0),
    ):
        if names and (len(names) != count or len(set(names)) != count or not all(names)):
            raise ModelError(f"the network has {count} {what}; {len(set(names))} different names are given for them")


def _inputs(model: CompressedModel, dtype: torch.dtype, seed: int, shapes: list[Shape] | None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    drawn = random_inputs(model, generator, batch=2 + 2 * min(seed, 1), shapes=shapes)
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in drawn)


def _computed(network: Network, inputs: tuple[Tensor, ...]) -> list[np.ndarray]:
    with torch.no_grad(), refusing("the network can't be run on random inputs", ModelError):
        return [each.numpy() for each in outputs_of(network(*inputs))]


def _check(
    batches: Sequence[tuple[Tensor, ...]],
    expected: Sequence[Sequence[np.ndarray]],
    blob: bytes,
    runtime: ModuleType,
    most: float,
) -> None:
    for inputs, outputs in zip(batches, expected, strict=True):
        difference = _difference(outputs, inputs, blob, runtime)
        if not difference <= most:
            raise ModelError(
                f"onnxruntime's outputs differ from torch's by {difference:.3g}: this network can't be exported"
            )


def _needed(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ModelError(f"exporting to ONNX needs {package}: pip install 'bayeszip[onnx]'") from error


def _exported(
    network: Network,
    inputs: tuple[Tensor, ...],
    free: Sequence[Sequence[int]],
    *,
    plain: bool,
    names: tuple[Sequence[str], Sequence[str]],
) -> Any:
    """What torch.onnx makes of a network, an `onnx.ModelProto`, at all sizes of the `free` dimensions that it can."""
    batch, auto = torch.export.Dim("batch"), torch.export.Dim.AUTO
    first, *more = ({0: batch, **dict.fromkeys(dims, auto)} for dims in free)
    shapes = (first, tuple(more)) if more else (first,)
    with quiet():
        try:
            program = torch.onnx.export(
                network,
                inputs,
                dynamo=True,
                dynamic_shapes=shapes,
                verbose=False,
                input_names=list(names[0]) or None,
                output_names=list(names[1]) or None,
                opset_version=None if plain else OPSET,
            )
        except Exception as error:  # torch.onnx raises many kinds; each means the same to the caller
            # What torch.onnx says itself is advice to its developers.
            reason = " ".join(str(error.__cause__ or error).split())
            raise ModelError(f"torch.onnx can't export the network: {reason}") from error
        if program is None:
            raise ModelError("torch.onnx can't export the network")
        return _named(program.model_proto)


def _free_dims(model: CompressedModel, place: int) -> list[int]:
    nodes = model.graph.nodes if model.graph is not None else ()
    stated = [node for node in nodes if node.op == "input" and node.inputs == (place,)]
    return [each.place + 1 for node in stated[:1] for each in node.varying]


def _named(proto: Any) -> Any:
    """The model with free sizes called by an input that has them: its name and the dimension."""
    names: dict[str, str] = {}
    for each in proto.graph.input:
        for place, dim in enumerate(each.type.tensor_type.shape.dim):
            if dim.dim_param and dim.dim_param != "batch":
                names.setdefault(dim.dim_param, f"{each.name}_{place}")
    for each in (*proto.graph.input, *proto.graph.output):
        for dim in each.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), dim.dim_param)
    return proto


def _tell_sizes(proto: Any, batches: Sequence[tuple[Tensor, ...]], expected: Sequence[Sequence[np.ndarray]]) -> None:
    """Make sizes of outputs free that are stated and that the network doesn't keep to, under names of their own.

    torch.onnx works the sizes of some outputs out wrong, such as a recurrent layer's: as a number, or as the size of
    an input that they don't have.
    """
    known = [_sizes_by_name(proto, inputs) for inputs in batches]
    wrong = False
    for output, computed in zip(proto.graph.output, zip(*expected, strict=True), strict=True):
        found = zip(*(each.shape for each in computed), strict=True)
        for place, (dim, sizes) in enumerate(zip(output.type.tensor_type.shape.dim, found, strict=True)):
            stated = [dim.dim_value if dim.HasField("dim_value") else each.get(dim.dim_param) for each in known]
            if any(one is not None and one != other for one, other in zip(stated, sizes, strict=True)):
                dim.dim_param, wrong = f"{output.name}_{place}", True
    if wrong:  # then those of values within may be as wrong, and nobody needs them
        del proto.graph.value_info[:]


def _sizes_by_name(proto: Any, inputs: tuple[Tensor, ...]) -> dict[str, int]:
    """What the free sizes of a model are when it is given these inputs."""
    return {
        dim.dim_param: size
        for each, tensor in zip(proto.graph.input, inputs, strict=True)
        for dim, size in zip(each.type.tensor_type.shape.dim, tensor.shape, strict=True)
        if dim.dim_param
    }


def _difference(expected: Sequence[np.ndarray], inputs: tuple[Tensor, ...], blob: bytes, runtime: ModuleType) -> float:
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is told by what it raises
    try:
        session = runtime.InferenceSession(blob, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of its own for each kind
        reason = str(error).strip().splitlines()[-1]
        raise ModelError(f"onnxruntime can't run the network, try another dtype, such as float32: {reason}") from error
    feed = {each.name: value.numpy() for each, value in zip(session.get_inputs(), inputs, strict=True)}
    try:
        results = session.run(None, feed)
    except Exception as error:  # as above
        raise ModelError(f"onnxruntime can't run the network: {str(error).strip().splitlines()[-1]}") from error
    worst = 0.0
    for one, other in zip(expected, results, strict=True):
        if one.shape != other.shape:
            raise ModelError(f"onnxruntime's output has shape {other.shape}, torch's {one.shape}")
        differs = ~((one == other) | (np.isnan(one) & np.isnan(other)))
        with np.errstate(invalid="ignore"):  # of infinities that are equal
            gap = np.abs(one.astype(np.float64) - other)[differs].max(initial=0.0)
        worst = max(worst, float(gap) / max(float(np.abs(one).max(initial=0.0)), 1e-30))
    return worst
