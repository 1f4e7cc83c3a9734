"""The closing step: train the shared values themselves, every weight's assignment fixed or free.

A weight is w_i = v[s_i] times the scale c_i of its row, if the tensor has scales, so the gradient of value k is
Σ_{i: s_i=k} c_i ∂L/∂w_i. Only weights that are not zero take part; they are sorted by symbol, so that this sum runs
over consecutive stretches: adding into a few bins instead is slow on a GPU.

Where assignments are free, each weight keeps a latent u_i, which begins at its value, and takes the value next to it:
s_i = argmin_k |u_i − v_k|, zero included. Choosing has no gradient, so that of the weight is handed straight through
(Bengio, Léonard, Courville 2013): ∂L/∂u_i := c_i ∂L/∂w_i.

A value of many weights has the sum of many gradients. Adam scales that out of its steps; plain gradient descent would
throw such a value far at a rate that moves weights but a little. There its gradient is the mean over its weights
instead, so that it moves as they do on average.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayeszip.modes import set_training
from bayeszip.tensors import QuantizedTensor

__all__ = ["FreeSymbols", "Places", "SharedValues", "spread"]


class SharedValues(nn.Module):
    """A network whose quantized weights are read from one trainable vector of shared values.

    Args:
        network: plain; its other parameters stay trainable.
        tensors: the quantized weights by state-dict name, all with the same codebook.
        averaged: whether a value's gradient is the mean over its weights, for steps as large as gradients are; else
            their sum.
    """

    def __init__(self, network: nn.Module, tensors: Mapping[str, QuantizedTensor], averaged: bool = False) -> None:
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
        self._averaged = averaged

    def forward(self, *inputs: Any, **named: Any) -> Any:
        shared = self._spread()
        shared |= {name: shared[name] * scales for name, scales in self._scales.items()}
        weights = {place: shared[name].to(dtype) for place, (name, dtype) in self._owners.items()}
        # Ties are resolved already: torch's own way does not restore a module that stands at two places.
        return functional_call(self._network[0], weights, inputs, named, tie_weights=False)

    def _spread(self) -> dict[str, Tensor]:
        """The weights, before their rows' scales."""
        values: Tensor = self.values
        if self._averaged:
            weights = torch.stack([places.lengths for places in self._places.values()]).sum(0).clamp(min=1)
            values = values.detach() + (values - values.detach()) / weights
        return {name: spread(values, places) for name, places in self._places.items()}

    def train(self, mode: bool = True) -> "SharedValues":
        if mode:
            set_training(self._network[0])
        else:
            self._network[0].eval()
        return super().train(mode)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the network: its running statistics go on."""
        return self._network[0].named_buffers(*args, **options)

    def codebook(self) -> np.ndarray:
        """The values as they are now, 0.0 in front."""
        return np.concatenate([[np.float32(0)], self.values.detach().cpu().numpy()])

    def symbols(self) -> dict[str, np.ndarray]:
        """Those that weights have now, by name; none where they keep what they had."""
        return {}


class FreeSymbols(SharedValues):
    """The same with symbols that are free: a weight that is not zero moves on, and takes the value next to it."""

    def __init__(self, network: nn.Module, tensors: Mapping[str, QuantizedTensor], averaged: bool = False) -> None:
        super().__init__(network, tensors, averaged)
        self._kept = {name: places.positions.sort().values for name, places in self._places.items()}
        start, places = self.values.detach(), self._places
        latents = [spread(start, places[name]).ravel()[positions] for name, positions in self._kept.items()]
        self.latents = nn.Parameter(torch.cat(latents))

    def symbols(self) -> dict[str, np.ndarray]:
        with torch.no_grad():
            chosen = self._per_tensor(_nearest(self.latents, self.values))
        symbols = {name: np.zeros(places.shape, np.int64) for name, places in self._places.items()}
        for name, own in chosen.items():
            symbols[name].ravel()[self._kept[name].cpu().numpy()] = own.cpu().numpy()
        return symbols

    def _spread(self) -> dict[str, Tensor]:
        taken: Tensor = _Take.apply(self.latents, self.values, self._averaged)
        weights = {}
        for name, own in self._per_tensor(taken).items():
            shape = self._places[name].shape
            zeros = own.new_zeros(int(np.prod(shape, dtype=np.int64)))
            weights[name] = zeros.index_copy(0, self._kept[name], own).view(shape)
        return weights

    def _per_tensor(self, flat: Tensor) -> dict[str, Tensor]:
        lengths = [len(positions) for positions in self._kept.values()]
        return dict(zip(self._kept, flat.split(lengths), strict=True))


def _nearest(latents: Tensor, values: Tensor) -> Tensor:
    """For each latent the symbol of the value next to it; 0 is the value 0."""
    ordered, order = torch.cat([values.new_zeros(1), values]).sort()
    return order[torch.bucketize(latents, (ordered[1:] + ordered[:-1]) / 2)]


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


class _Take(torch.autograd.Function):
    """u, v → the value next to each latent; its gradient goes straight to the latent, and to the value it took."""

    @staticmethod
    def forward(ctx: Any, latents: Tensor, values: Tensor, averaged: bool) -> Tensor:
        symbols = _nearest(latents, values)
        ctx.save_for_backward(symbols)
        ctx.count, ctx.reduce = len(values), "mean" if averaged else "sum"
        return torch.cat([values.new_zeros(1), values])[symbols]

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (symbols,) = ctx.saved_tensors
        ordered, order = symbols.sort()
        ends = torch.searchsorted(ordered, torch.arange(ctx.count + 1, device=symbols.device), right=True)
        lengths = ends.diff(prepend=ends.new_zeros(1))
        reduced = torch.segment_reduce(outputs[0][order], ctx.reduce, lengths=lengths, unsafe=True, initial=0.0)
        return outputs[0], reduced[1:], None
