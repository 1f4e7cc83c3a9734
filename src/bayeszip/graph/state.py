"""Tensors of torch and tensors of a file, bit for bit: `from_state`, `to_raw`, `to_torch`."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.errors import FormatError, ModelError
from bayeszip.graph.indices import dense_state, is_index
from bayeszip.tensors import RAW_DTYPES, CompressedModel, Graph, QuantizedTensor, RawTensor

__all__ = [
    "DTYPES",
    "FLOATING",
    "check_tensor",
    "dense_tensors",
    "dtype_of",
    "from_state",
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


def to_torch(tensor: QuantizedTensor | RawTensor) -> Tensor:
    """The torch tensor of its own memory: float32 for a quantized one, the very bits for a raw one."""
    if isinstance(tensor, QuantizedTensor):
        return torch.from_numpy(np.array(tensor.dequantize()))
    values = tensor.values.copy()
    if tensor.dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def plain_tensors(model: CompressedModel) -> dict[str, Tensor]:
    """The tensors as they are in the file, the quantized ones in the type that the network computes in."""
    own = stated_dtype(model.graph)
    return {
        name: to_torch(tensor) if isinstance(tensor, RawTensor) else to_torch(tensor).to(own)
        for name, tensor in model.tensors.items()
        if not is_index(name)
    }


def dense_tensors(model: CompressedModel) -> dict[str, Tensor]:
    """The same in their original shapes, zeros put back; see `dense_state`."""
    own, dense = stated_dtype(model.graph), {}
    for name, values in dense_state(model).items():
        tensor = model.tensors[name]
        if isinstance(tensor, RawTensor):
            dense[name] = to_torch(RawTensor(values, tensor.dtype))
        else:
            dense[name] = torch.from_numpy(values).to(own)
    return dense


def _fitting(name: str, quantized: QuantizedTensor, tensor: Tensor) -> QuantizedTensor:
    if quantized.shape != tuple(tensor.shape):
        raise ModelError(f"{name} is quantized as {quantized.shape} but has shape {tuple(tensor.shape)}")
    return quantized
