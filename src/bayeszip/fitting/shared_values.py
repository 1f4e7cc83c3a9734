"""The closing step: train the shared values themselves, with every weight's assignment fixed.

A weight is w_i = v[s_i] times the scale c_i of its row, if the tensor has scales, so the gradient of value k is
Σ_{i: s_i=k} c_i ∂L/∂w_i. Only weights that are not zero take part; they are kept sorted by symbol, so that this sum
runs over consecutive stretches: adding into a few bins instead is slow on a GPU.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayeszip.tensors import QuantizedTensor

__all__ = ["Places", "SharedValues", "spread"]


class SharedValues(nn.Module):
    """A network whose quantized weights are read from one trainable vector of shared values.

    Args:
        network: plain; its other parameters stay trainable.
        tensors: the quantized weights by state-dict name, all with the same codebook.
    """

    def __init__(self, network: nn.Module, tensors: Mapping[str, QuantizedTensor]) -> None:
        super().__init__()
        # Not registered: the quantized weights are no parameters any more.
        self._network = [network]
        codebook = next(iter(tensors.values())).codebook
        device = next(network.parameters()).device
        self.values = nn.Parameter(torch.tensor(codebook[1:], device=device))
        self.others = nn.ParameterList(p for name, p in network.named_parameters() if name not in tensors)
        self._places = {name: Places.of(tensor, device) for name, tensor in tensors.items()}
        self._scales = {
            name: torch.from_numpy(tensor.row_scales()).to(device)
            for name, tensor in tensors.items()
            if tensor.scale is not None
        }
        self._owners = _owners(network, tensors)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        shared = {name: spread(self.values, places) for name, places in self._places.items()}
        shared |= {name: shared[name] * scales for name, scales in self._scales.items()}
        weights = {place: shared[name].to(dtype) for place, (name, dtype) in self._owners.items()}
        # Ties are resolved already: torch's own way does not restore a module that stands at two places.
        return functional_call(self._network[0], weights, inputs, named, tie_weights=False)

    def train(self, mode: bool = True) -> "SharedValues":
        self._network[0].train(mode)
        return super().train(mode)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the network: its running statistics go on."""
        return self._network[0].named_buffers(*args, **options)

    def codebook(self) -> np.ndarray:
        """The values as they are now, 0.0 in front."""
        return np.concatenate([[np.float32(0)], self.values.detach().cpu().numpy()])


def _owners(network: nn.Module, names: Container[str]) -> dict[str, tuple[str, torch.dtype]]:
    """Each place that holds one of the parameters `names`, once for each module: the parameter's name and type."""
    first_name = {id(parameter): name for name, parameter in network.named_parameters()}
    return {
        f"{path}.{role}" if path else role: (first_name[id(parameter)], parameter.dtype)
        for path, module in network.named_modules()
        for role, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if first_name[id(parameter)] in names
    }


class Places:
    """Where the non-zero weights of a tensor are: flat positions sorted by symbol, and how many have each symbol."""

    def __init__(self, shape: tuple[int, ...], positions: Tensor, lengths: Tensor) -> None:
        self.shape, self.positions, self.lengths = shape, positions, lengths

    @classmethod
    def of(cls, tensor: QuantizedTensor, device: torch.device) -> "Places":
        return cls.of_symbols(tensor.symbols, len(tensor.codebook), device)

    @classmethod
    def of_symbols(cls, symbols: np.ndarray, count: int, device: torch.device) -> "Places":
        """Of symbols below `count`; 0 is the weight that is no value's."""
        flat = symbols.ravel().astype(np.int64)
        order = np.argsort(flat, kind="stable")
        lengths = np.bincount(flat, minlength=count)
        positions = torch.from_numpy(order[lengths[0] :]).to(device)
        return cls(symbols.shape, positions, torch.from_numpy(lengths[1:]).to(device))


def spread(values: Tensor, places: Places) -> Tensor:
    """v → w: shared values to their places, zeros elsewhere; differentiable."""
    weights: Tensor = _Spread.apply(values, places)
    return weights


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Places) -> Tensor:
        ctx.places = places
        weights = values.new_zeros(int(np.prod(places.shape, dtype=np.int64)))
        spread = values.repeat_interleave(places.lengths, output_size=places.positions.numel())
        return weights.index_copy_(0, places.positions, spread).view(places.shape)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        gathered = outputs[0].reshape(-1).index_select(0, ctx.places.positions)
        return torch.segment_reduce(gathered, "sum", lengths=ctx.places.lengths, unsafe=True, initial=0.0), None
