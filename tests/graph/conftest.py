"""Networks with planted dead and constant units, and the one law: fewer units, the same function."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip.graph import drop_dead_units, from_state, prove_same, to_module, trace
from bayeszip.tensors import CompressedModel, QuantizedTensor


def quantized(tensor: torch.Tensor, values: int = 8) -> QuantizedTensor:
    """Round to a few shared values, zero among them, as a trained network's weights are."""
    array = tensor.detach().numpy().astype(np.float32)
    nonzero = array[array != 0]
    if not nonzero.size:
        return QuantizedTensor(np.zeros(array.shape, dtype=np.uint8), np.zeros(1))
    centers = np.unique(np.quantile(nonzero, np.linspace(0.05, 0.95, values)).astype(np.float32))
    centers = centers[centers != 0]
    symbols = np.abs(array[..., None] - centers).argmin(-1) + 1
    symbols[array == 0] = 0
    return QuantizedTensor(symbols, np.concatenate([np.zeros(1, dtype=np.float32), centers]))


def compressed(module: nn.Module, inputs: tuple[torch.Tensor, ...], raw: Callable[[str], bool]) -> CompressedModel:
    graph = trace(module, inputs)
    chosen = {
        name: quantized(parameter) for name, parameter in module.named_parameters() if parameter.ndim and not raw(name)
    }
    return CompressedModel(from_state(module, chosen, graph), graph)


@pytest.fixture(scope="session")
def compress() -> Callable[..., CompressedModel]:
    """(module, inputs, raw=name → bool) → the quantized model with its graph."""

    def build(
        module: nn.Module, *inputs: torch.Tensor, raw: Callable[[str], bool] = lambda name: False
    ) -> CompressedModel:
        return compressed(module.eval(), inputs, raw)

    return build


@pytest.fixture(scope="session")
def shrink() -> Callable[..., CompressedModel]:
    """(model, inputs, …) → the shrunk model, proven to compute the same and to be at rest."""

    def build(
        model: CompressedModel, *inputs: torch.Tensor, rounding: float | None = None, **options
    ) -> CompressedModel:
        shrunk = drop_dead_units(model, **options)
        prove_same(model, shrunk, inputs, rounding=rounding)
        assert drop_dead_units(shrunk, **options) == shrunk
        assert shrunk.original_parameters == model.original_parameters
        to_module(shrunk)
        return shrunk

    return build
