"""From a `.bayz` file back to a network: loaded, verified, exported."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

from bayeszip import codec, graph
from bayeszip.devices import resolve_device
from bayeszip.errors import FormatError, ModelError, OutputUsageError, RecipeError
from bayeszip.files import write_atomically
from bayeszip.graph.proof import random_inputs
from bayeszip.tensors import CompressedModel

__all__ = ["export", "load", "network_in", "read_model", "verify"]


def load(
    path: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    dtype: str | torch.dtype | None = None,
    map_location: str | torch.device = "cpu",
    limits: codec.Limits | None = None,
) -> nn.Module:
    """The network in a `.bayz` file, as a plain module in `eval()` mode. Nothing in the file is executed.

    Args:
        into: a network of the original class; its layers take the weights, and the sizes, of the file. What the file
            doesn't hold, since nothing depended on it for the inputs that it was traced with, keeps its values, and a
            warning tells of it.
        dtype: of the floating-point tensors, as `torch.float16` or "float16"; by default the type that the original
            network computed in, or that of `into`.
        map_location: the device to put it on.
        limits: what the file may ask for; see `codec.Limits`.

    Raises:
        FormatError: the file is damaged or not a `.bayz` file.
        ModelError: it holds tensors only, so `into` is needed; or `into` does not fit.
    """
    budget = codec.Budget.of(limits)
    return network_in(read_model(path, budget), path, into=into, dtype=dtype, map_location=map_location, limits=budget)


def network_in(
    model: CompressedModel,
    path: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    dtype: str | torch.dtype | None = None,
    map_location: str | torch.device = "cpu",
    limits: codec.Limits | codec.Budget | None = None,
) -> nn.Module:
    """The network of a model that was read from `path`; the rest as `load` takes it."""
    floating, budget = _floating(dtype), codec.Budget.of(limits)
    if into is not None:
        network = graph.load_into(model, into, limits=budget)
    elif model.graph is not None:
        network = graph.to_module(model, floating, budget)
    else:
        raise ModelError(
            f"{path} holds tensors without a graph; load it with into= (--into) and a network of its class"
        )
    return network.eval().to(device=resolve_device(map_location), dtype=floating)


def read_model(path: str | os.PathLike[str], limits: codec.Limits | codec.Budget | None = None) -> CompressedModel:
    """Decode a file."""
    budget = codec.Budget.of(limits)
    return codec.decode(codec.read(path, budget), budget)


def verify(
    path: str | os.PathLike[str], *, against: nn.Module | None = None, limits: codec.Limits | None = None
) -> float | None:
    """Check a file whole: it decodes, encodes to the same bytes again, and builds a network.

    Args:
        against: a network that should compute the same, such as the original with the file's weights; compared in
            float64 on random inputs.

    Returns:
        The largest difference from `against`, relative to its largest output.
    """
    budget = codec.Budget.of(limits)
    blob = codec.read(path, budget)
    model, description = codec.inspect(blob, budget)
    if codec.encode(model, description.coder, **description.options) != blob:
        raise FormatError("the file decodes, but encodes to other bytes: it was not written by bayeszip")
    if model.graph is not None:
        graph.to_module(model, limits=budget)
    if against is None:
        return None
    if model.graph is None:
        raise ModelError(f"{path} holds tensors without a graph, so there is nothing to run against")
    network = graph.plain_copy(against)
    traced = graph.trace(network, random_inputs(model, torch.Generator().manual_seed(0)))
    own = CompressedModel(graph.from_state(network, {}, traced), traced)
    short = [each.dtype for each in network.parameters() if each.is_floating_point() and each.dtype.itemsize == 2]
    # What was rounded to 16 bits can't be what the file holds, bit for bit.
    precision = max(short, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    found = graph.difference(own, model, limits=codec.Budget.of(limits), precision=precision)
    if found:
        raise ModelError(
            f"{path} computes something else than {type(network).__name__}: {found}. A file holds quantized weights: "
            "compare with a network that has these, as `bayeszip export --dense` gives them"
        )
    return found.worst


def export(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dense: bool = False,
    dtype: str | torch.dtype | None = None,
    plain: bool = False,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    limits: codec.Limits | None = None,
) -> None:
    """Write the network in a `.bayz` file in another format, by the target's ending: `.onnx` or `.safetensors`.

    Args:
        dense: for safetensors, the tensors in their original shapes, zeros put back; the file must say which units
            survived (coding.keep_indices).
        dtype: of the floating-point tensors. By default float32 for ONNX; for safetensors as they were, or float32
            where a file of tensors alone doesn't tell.
        plain: for ONNX, weights written out instead of tables and indices of 4 or 8 bits that a runtime makes them
            from; for runtimes older than opset 21.
        input_names: for ONNX, what the inputs are called, in order.
        output_names: for ONNX, what the outputs are called.
        limits: what the file may ask for; see `codec.Limits`.
    """
    floating, budget = _floating(dtype), codec.Budget.of(limits)
    model = read_model(path, budget)
    ending = Path(target).suffix
    if dense and ending != ".safetensors":
        raise OutputUsageError(f"{target}: dense tensors are exported to .safetensors only")
    if ending != ".onnx" and (plain or input_names or output_names):
        raise OutputUsageError(f"{target}: names of inputs and outputs, and plain weights, are for .onnx only")
    if ending == ".onnx":
        from bayeszip.graph.onnx import to_onnx

        names = {"input_names": input_names, "output_names": output_names}
        write_atomically(target, to_onnx(model, floating or torch.float32, budget, plain=plain, **names))
    elif ending == ".safetensors":
        graph.check_sound(model, budget)
        tensors = graph.dense_tensors(model, budget) if dense else graph.plain_tensors(model, budget)
        if floating is not None:
            tensors = {name: each.to(floating) if each.is_floating_point() else each for name, each in tensors.items()}
        write_atomically(target, to_safetensors(tensors))
    else:
        found = repr(ending) if ending else "no ending"
        raise OutputUsageError(f"{target}: networks are exported to .onnx or .safetensors, not {found}")


def _floating(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating-point type that a network can be in, by its name too."""
    found = graph.FLOATING.get(str(dtype).removeprefix("torch."))
    if dtype is not None and found is None:
        raise RecipeError(f"dtype must be one of {', '.join(graph.FLOATING)}, not {dtype}")
    return found
