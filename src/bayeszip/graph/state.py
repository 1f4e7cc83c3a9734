"""Tensors of torch and tensors of a file, bit for bit: `from_state`, `to_raw`, `to_torch`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.errors import FormatError, ModelError
from bayeszip.graph.indices import dense_state, is_index
from bayeszip.limits import Budget, Limits
from bayeszip.tensors import RAW_DTYPES, CompressedModel, Graph, QuantizedTensor, RawTensor

__all__ = [
    "DTYPES",
    "FLOATING",
    "charge_loaded",
    "check_tensor",
    "dense_tensors",
    "dtype_of",
    "from_state",
    "loaded_dtype",
    "plain_tensors",
    "stated_dtype",
    "to_raw",
    "to_torch",
]

#: dtype name → torch's.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


#: Elements that are converted at a time.
_PIECE = 2**18

#: Those that a network can compute in.
FLOATING = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}


def dtype_of(module: nn.Module, inputs: Sequence[Tensor] = ()) -> torch.dtype:
    """The floating-point type that a module computes in: that of most of its parameters, or else of its inputs."""
    known = set(FLOATING.values())
    elements: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.dtype in known:
            elements[parameter.dtype] += parameter.numel()
    others = (each.dtype for each in (*inputs, *module.buffers()) if each.dtype in known)
    return elements.most_common(1)[0][0] if elements else next(others, torch.float32)


def stated_dtype(graph: Graph | None) -> torch.dtype:
    """The floating-point type that a graph says its network computes in."""
    first = next((node for node in (graph.nodes if graph else ()) if node.op == "input"), None)
    name = "float32" if first is None else str(first.attributes["computes_in"])
    if name not in FLOATING:
        raise FormatError(f"a network can't compute in {name!r}; known: {', '.join(FLOATING)}")
    return FLOATING[name]


def from_state(
    module: nn.Module, quantized: Mapping[str, QuantizedTensor] | None = None, graph: Graph | None = None
) -> dict[str, QuantizedTensor | RawTensor]:
    """All tensors of a module, ordered as its state dict: the quantized ones as given, the others bit for bit.

    Of tied tensors the first name stands for all. Buffers that a state dict leaves out are taken only if the graph
    reads them, as are the constants that tracing found.

    Raises:
        ModelError: a quantized tensor's name or shape isn't the module's, or a tensor is of a dtype that can't be
            stored.
    """
    quantized = dict(quantized or {})
    read = set(graph.tensor_names()) if graph else set()
    stored = {name: place for place, name in enumerate(module.state_dict(keep_vars=True))}
    tensors: dict[str, QuantizedTensor | RawTensor] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named():
            if name in quantized:
                tensors[name] = _fitting(name, quantized.pop(name), tensor)
            elif name in stored or name in read:
                tensors[name] = to_raw(tensor, name)
    if quantized:
        raise ModelError(f"{type(module).__name__} has no tensors named {sorted(quantized)}")
    # A layer's buffers behind its parameters, as in a state dict, not all buffers behind all parameters.
    tensors = dict(sorted(tensors.items(), key=lambda item: stored.get(item[0], len(stored))))
    return tensors | {name: constant for name, constant in (graph.constants if graph else {}).items() if name in read}


def to_raw(tensor: Tensor, name: str = "a tensor") -> RawTensor:
    """A torch tensor, its bits kept.

    Raises:
        ModelError: the tensor has no values (meta), isn't dense, or its dtype can't be stored.
    """
    check_tensor(tensor, name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    return RawTensor(plain.numpy().copy().view(RAW_DTYPES[dtype]).reshape(tuple(tensor.shape)), dtype)


def check_tensor(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that a file can't hold; see `to_raw`."""
    if tensor.is_meta:
        raise ModelError(f"{name} is on the meta device: it has no values")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "a quantized one" if tensor.is_quantized else tensor.layout
        raise ModelError(f"{name} isn't a dense tensor but {kind}: make it dense first")
    if str(tensor.dtype).removeprefix("torch.") not in RAW_DTYPES:
        raise ModelError(f"{name} has dtype {tensor.dtype}, which can't be stored; known: {', '.join(RAW_DTYPES)}")


def loaded_dtype(tensor: QuantizedTensor | RawTensor, floating: torch.dtype | None) -> torch.dtype:
    """The type that a tensor is loaded in: `floating` for floating-point ones, its own otherwise."""
    own = torch.float32 if isinstance(tensor, QuantizedTensor) else DTYPES[tensor.dtype]
    return floating if floating is not None and own.is_floating_point else own


def charge_loaded(model: CompressedModel, floating: torch.dtype | None, budget: Budget) -> None:
    """Take the bytes that the loaded tensors will have from a budget, before the first of them is made."""
    for tensor in model.tensors.values():
        budget.charge("loaded", tensor.size * loaded_dtype(tensor, floating).itemsize)


def to_torch(tensor: QuantizedTensor | RawTensor, floating: torch.dtype | None = None) -> Tensor:
    """The torch tensor of its own memory: the values of a quantized one, the very bits of a raw one.

    Made in pieces: indexing a codebook takes numpy eight bytes a weight.

    Args:
        floating: the type of floating-point tensors, by default float32 and their own.
    """
    made = torch.empty(tensor.shape, dtype=loaded_dtype(tensor, floating))
    flat = made.view(-1)
    source = (tensor.symbols if isinstance(tensor, QuantizedTensor) else tensor.values).reshape(-1)
    for start in range(0, source.size, _PIECE):
        piece = source[start : start + _PIECE]
        if isinstance(tensor, QuantizedTensor):
            values = torch.from_numpy(_values(tensor, start, start + piece.size))
        elif tensor.dtype == "bfloat16":
            values = torch.from_numpy(piece.view(np.int16).copy()).view(torch.bfloat16)
        else:
            values = torch.from_numpy(piece.copy())
        flat[start : start + _PIECE] = values
    return made


def _values(tensor: QuantizedTensor, first: int, last: int) -> np.ndarray:
    """A stretch of what `dequantize` gives, row by row."""
    values = np.asarray(tensor.codebook[tensor.symbols.reshape(-1)[first:last]])
    if tensor.scale is None:
        return values
    inner = math.prod(tensor.shape[tensor.axis + 1 :])
    channels = np.arange(first, last) // inner % tensor.shape[tensor.axis]
    return values * tensor.scale.dequantize()[channels] + np.float32(0)


def plain_tensors(model: CompressedModel, limits: Limits | Budget | None = None) -> dict[str, Tensor]:
    """The tensors as they are in the file, the quantized ones in the type that the network computes in."""
    own, budget = stated_dtype(model.graph), Budget.of(limits)
    _check_exportable(model)
    charge_loaded(model, own, budget)
    return {
        name: to_torch(tensor, None if isinstance(tensor, RawTensor) else own)
        for name, tensor in model.tensors.items()
        if not is_index(name)
    }


def dense_tensors(model: CompressedModel, limits: Limits | Budget | None = None) -> dict[str, Tensor]:
    """The same in their original shapes, zeros put back; see `dense_state`."""
    own, dense = stated_dtype(model.graph), {}
    _check_exportable(model)
    for name, values in dense_state(model, limits).items():
        tensor = model.tensors[name]
        if isinstance(tensor, RawTensor):
            dense[name] = to_torch(RawTensor(values, tensor.dtype))
        else:
            dense[name] = torch.from_numpy(values).to(own)
    return dense


def _check_exportable(model: CompressedModel) -> None:
    if "__metadata__" in model.tensors:
        raise ModelError("a tensor is called __metadata__, a name that safetensors files keep for themselves")


def _fitting(name: str, quantized: QuantizedTensor, tensor: Tensor) -> QuantizedTensor:
    if quantized.shape != tuple(tensor.shape):
        raise ModelError(f"{name} is quantized as {quantized.shape} but has shape {tuple(tensor.shape)}")
    return quantized
