"""Multiply-adds by hand; times that are times."""

import numpy as np
import torch
from torch import nn

import bayeszip
from bayeszip.graph import from_state, trace
from bayeszip.graph.cost import latency, multiply_adds
from bayeszip.tensors import CompressedModel


def model_of(module: nn.Module, inputs: torch.Tensor) -> CompressedModel:
    graph = trace(module.eval(), inputs)
    return CompressedModel(from_state(module, graph=graph), graph)


def test_multiply_adds_are_those_of_one_sample():
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    assert multiply_adds(model_of(convolution, torch.randn(2, 3, 8, 8))) == 3 * 8 * 9 * 36 + 8 * 36 * 10
    sequence = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    assert multiply_adds(model_of(sequence, torch.randn(2, 7, 6))) == 7 * 6 * 5


def test_without_a_graph_nothing_is_known():
    model = CompressedModel({})
    assert multiply_adds(model) is None
    assert latency(model) is None


@torch.no_grad()
def test_a_report_tells_what_a_sample_costs_before_and_after():
    module = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3))
    module[0].weight[10:] = 0
    module[0].bias[10:] = 0
    result = bayeszip.pack(module, example_inputs=torch.randn(2, 20), components=8)
    told = " ".join(result.report().split())
    assert "multiply-adds a sample 920 before, 230 as decoded" in told
    assert "ms as decoded (CPU, one thread)" in told
    assert np.isfinite(latency(result.compressed))
