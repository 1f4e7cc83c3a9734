"""The record of a run: what it counts, and what it tells."""

import pytest
import torch
from torch import nn

import bayeszip
from bayeszip import codec
from bayeszip.graph.indices import beside_parameters
from bayeszip.recipe import Coding
from bayeszip.record import size_figures


class Positioned(nn.Module):
    """A table of positions that is no parameter, and a hidden unit that is dead."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
        self.hidden, self.out = nn.Linear(8, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.hidden.weight.fill_(0.5)[0] = 0
            self.hidden.bias.fill_(0.25)[0] = 0
            self.out.weight.fill_(0.5)
            self.out.bias.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x + self.positions).relu())


@pytest.mark.parametrize("keep_indices", [False, True])
def test_neither_buffers_nor_indices_are_counted_as_parameters(keep_indices):
    coding = Coding(keep_indices=keep_indices)
    result = bayeszip.pack(Positioned(), example_inputs=torch.randn(2, 16, 8), coding=coding)
    figures = size_figures(result.description, result.beside)
    # Of 54 + 21 the first hidden unit is gone, with its row, its bias and its column.
    assert (figures["params"], figures["params_kept"], figures["nonzero"]) == (75, 63, 63)
    model, description = codec.inspect(result.blob)
    assert size_figures(description, beside_parameters(model)) == figures
    assert figures["bytes"] == result.bytes
