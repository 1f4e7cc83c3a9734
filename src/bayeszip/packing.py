"""`pack()`: a network clustered and coded as it is, without data and without training."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip import graph
from bayeszip.errors import ModelError, RecipeError
from bayeszip.quantize import Precision, bounded, cluster
from bayeszip.recipe import Coding
from bayeszip.result import Form, Result, coded, write_weights
from bayeszip.tensors import CompressedModel, QuantizedTensor
from bayeszip.variational import check_materialized

__all__ = ["pack"]

#: Everything but the weights is kept bit for bit.
AS_IT_IS = Coding(norms="keep")

#: Types of 16 bits.
_SHORT: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def pack(
    model: nn.Module | Mapping[str, Tensor],
    *,
    example_inputs: Sequence[Tensor] | Tensor | None = None,
    components: int = 64,
    max_error: float | None = None,
    coding: Coding | None = None,
) -> Result:
    """Cluster and code a network as it is: no data, no training.

    Weight matrices and kernels (floating-point tensors of two or more dimensions) are quantized, each with shared
    values of its own, whether they are frozen (`requires_grad=False`) or not; everything else is kept bit for bit.
    Weights that are computed from other tensors (weight norms, parametrizations, pruning masks) go in as computed.

    Args:
        model: a network, or the tensors of one by name; what `torch.compile` or data-parallel training wrapped around
            it doesn't count.
        example_inputs: with them the graph is traced, dead units go, and the file loads without the class.
        components: how many shared values a tensor may take besides 0.
        max_error: instead of `components`, how far a weight may move, in units of its tensor's largest.
        coding: how to code.
    """
    if components < 1 or components >= 2**16:
        raise RecipeError(f"components must lie between 1 and 65,535, not {components}")
    if max_error is not None and not 0 < max_error < 1:
        raise RecipeError(f"max_error must lie between 0 and 1, not {max_error}")
    network = None
    if isinstance(model, Mapping):
        tensors = graph.unwrapped_names(model)
    elif isinstance(model, nn.Module):
        check_materialized(model)
        network = graph.plain_copy(model)
        tensors = {name: parameter.detach() for name, parameter in network.named_parameters()}
    else:
        raise ModelError(f"pack takes a network or tensors by name, not a {type(model).__name__}")
    quantized = {
        name: _packed(name, tensor, components, max_error) for name, tensor in tensors.items() if _is_packable(tensor)
    }
    if network is None:
        kept = {name: quantized.get(name) or graph.to_raw(tensor, name) for name, tensor in tensors.items()}
        result = coded(CompressedModel(kept), coding or AS_IT_IS, None)
        return dataclasses.replace(result, moved=_moved(tensors, quantized))
    moved = _moved(tensors, quantized)
    write_weights(network, quantized)
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    return dataclasses.replace(Form(network, inputs, coding or AS_IT_IS).code(quantized), moved=moved)


def _moved(tensors: Mapping[str, Tensor], quantized: Mapping[str, QuantizedTensor]) -> float:
    """How far quantization moves weights, as a share of their size; root mean squares of both."""
    distance = size = 0.0
    for name, tensor in quantized.items():
        weights = tensors[name].detach().cpu().double().numpy()
        with np.errstate(over="ignore"):
            distance += float(np.square(tensor.dequantize() - weights).sum())
            size += float(np.square(weights).sum())
    return math.sqrt(distance / size) if 0 < size < math.inf else 0.0


def _is_packable(tensor: Tensor) -> bool:
    """Whether it is worth a codebook, and has values that one can hold."""
    is_matrix = tensor.dtype in graph.FLOATING.values() and tensor.dim() >= 2 and tensor.numel() > 1
    if not is_matrix or tensor.is_meta or tensor.layout != torch.strided:
        return False
    as_float32 = tensor.float()
    if not torch.isfinite(as_float32).all():
        return False
    # A float64 tensor whose values lie closer together than float32 can tell apart is kept as it is.
    return bool((as_float32 - tensor).abs().max() <= 1e-3 * (tensor.max() - tensor.min()))


def _packed(name: str, tensor: Tensor, components: int, max_error: float | None) -> QuantizedTensor:
    weights = tensor.detach().float().cpu().numpy()
    largest = float(np.abs(weights).max(initial=0.0))
    # Shared values that the tensor's own type can hold: loading it in that type moves none.
    precision = _SHORT.get(tensor.dtype)
    try:
        if max_error and largest:
            return bounded(weights, max_error * largest, precision or "float32")
        return cluster(weights, components, precision)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
