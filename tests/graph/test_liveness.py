"""Constants through a batch norm: a dead channel becomes exactly what the norm makes of it, and moves on."""

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip import graph
from bayeszip.errors import BayeszipError
from bayeszip.quantize import cluster
from bayeszip.tensors import CompressedModel, Graph, Node, RawTensor


@pytest.mark.parametrize("affine", [True, False])
def test_a_dead_channel_leaves_what_its_norm_makes_of_its_bias(affine):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5, affine=affine), nn.ReLU(), nn.Conv2d(5, 3, 1)
    ).double().eval()  # fmt: skip
    first, norm, _, last = network
    with torch.no_grad():
        first.weight[1:3] = 0
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.1, 4)
        if affine:
            # Far from 1, and one that turns the sign.
            norm.weight.copy_(torch.tensor([0.3, 2.5, -1.7, 4.0, 0.6]))
            norm.bias.copy_(torch.tensor([0.1, 0.4, 0.9, -0.2, 0.3]))
    network.float()
    x = torch.randn(2, 2, 6, 6)
    traced = graph.trace(network, (x,))
    quantized = {"0.weight": cluster(first.weight.detach().numpy(), 256)}
    model = CompressedModel(graph.from_state(network, quantized, traced), traced)
    small = graph.drop_dead_units(model, fold="always")
    assert small.tensors["0.weight"].shape == (3, 2, 3, 3)
    assert graph.prove_same(model, small, (x,)) < 1e-6
    # By hand: the channels are constant behind the norm, and the last bias takes what they add to it.
    gamma, beta = (norm.weight, norm.bias) if affine else (torch.ones(5), torch.zeros(5))
    constant = gamma * (first.bias - norm.running_mean) / (norm.running_var + norm.eps).sqrt() + beta
    kept = torch.relu(constant)[1:3].double()
    gained = (last.weight[:, 1:3, 0, 0].double() @ kept + last.bias.double()).detach().numpy()
    bias = small.tensors["3.bias"]
    assert isinstance(bias, RawTensor)
    np.testing.assert_allclose(bias.values, gained, rtol=1e-6, atol=1e-7)


def test_groups_of_one_number_are_refused():
    """For a batch of one example torch lets them through to an error of its own."""
    nodes = (
        Node("input", (0,), (), {"shape": (2,)}),
        Node("group_norm", (1,), (None, None), {"groups": 2}),
    )
    model = CompressedModel({}, Graph(1, nodes, (2,)))
    with pytest.raises(BayeszipError, match="have nothing to normalize over"):
        graph.to_module(model)


class Coupled(nn.Module):
    """A residual sum, a flattened map and attention's heads."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.flat = nn.Linear(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.flat(torch.relu(x + self.block(x)).flatten(1)).unsqueeze(1)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def test_what_can_only_go_together_has_one_number():
    network = Coupled().eval()
    traced = graph.trace(network, (torch.zeros(3, 1, 2, 2),))
    units = graph.coupled_units(CompressedModel(graph.from_state(network, {}, traced), traced))
    assert set(units) == set(network.state_dict())
    channels = units["stem.weight"][0]
    assert len(set(channels)) == 4
    assert (channels >= 0).all()
    for name, dim in (("stem.bias", 0), ("block.weight", 0), ("block.weight", 1), ("block.bias", 0)):
        assert (units[name][dim] == channels).all()
    assert (units["flat.weight"][1] == np.repeat(channels, 4)).all()
    assert (units["stem.weight"][1] == -1).all()  # the network's input
    assert (units["head.weight"][0] == -1).all()  # and its output
    heads = units["attention.out_proj.weight"][1]
    assert len(set(heads)) == 2
    assert (units["attention.in_proj_weight"][0] == np.tile(heads, 3)).all()


def test_without_a_graph_nobody_knows_what_goes_together():
    assert graph.coupled_units(CompressedModel({}, None)) is None
