"""Layers whose weights are sampled: the law of the sample, who sees it, and layers that are what they were again."""

import copy

import pytest
import torch
from torch import nn

from bayeszip.variational import to_stock, to_variational, variational_weights
from bayeszip.variational.sampled import SampledLayer

SEQUENCE = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
ROWS = SEQUENCE[:, 0]


class Own(nn.Module):
    """A matrix of its own, that another reads besides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table * self.scale + self.table.sum()


CASES = {
    "LSTM": (lambda: nn.LSTM(6, 4, batch_first=True), (SEQUENCE,)),
    "LSTM, both ways, two layers, projected": (
        lambda: nn.LSTM(6, 4, 2, bidirectional=True, proj_size=2),
        (SEQUENCE,),
    ),
    "GRU": (lambda: nn.GRU(6, 4, bias=False), (SEQUENCE,)),
    "RNN": (lambda: nn.RNN(6, 4), (SEQUENCE,)),
    "LSTM cell": (lambda: nn.LSTMCell(6, 4), (ROWS,)),
    "GRU cell": (lambda: nn.GRUCell(6, 4), (ROWS,)),
    "RNN cell": (lambda: nn.RNNCell(6, 4), (ROWS,)),
    "bilinear": (lambda: nn.Bilinear(6, 6, 3), (ROWS, ROWS)),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), (SEQUENCE,) * 3),
    "attention, other widths": (lambda: nn.MultiheadAttention(6, 2, kdim=6, vdim=6, add_bias_kv=True), (SEQUENCE,) * 3),
    "own": (Own, (ROWS,)),
}


def outputs(layer, inputs):
    found = layer(*inputs)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", CASES)
def test_noise_in_training_means_otherwise_and_the_layer_back_at_the_end(name):
    build, inputs = CASES[name]
    layer = build().train()
    before, kinds = copy.deepcopy(layer), [type(part) for part in layer.modules()]
    parameters = {key: id(parameter) for key, parameter in layer.named_parameters()}
    expected = outputs(before, inputs)
    to_variational(layer, log_sigma2=-4.0)
    assert {weight.name for weight in variational_weights(layer)} == set(parameters)
    first, second = outputs(layer, inputs), outputs(layer, inputs)
    assert not torch.allclose(first, second, atol=1e-4)
    first.square().sum().backward()
    for weight in variational_weights(layer):
        assert weight.theta.grad is not None, weight.name
        assert weight.log_sigma2.grad is not None, weight.name
    layer.eval()
    torch.testing.assert_close(outputs(layer, inputs), expected)
    layer.train()
    for part in layer.modules():
        part.noise = False
    torch.testing.assert_close(outputs(layer, inputs), expected)
    for part in layer.modules():
        del part.noise
        part.noise = True
    assert to_stock(layer) is layer
    assert [type(part) for part in layer.modules()] == kinds
    assert {key: id(parameter) for key, parameter in layer.named_parameters()} == parameters
    torch.testing.assert_close(outputs(layer, inputs), expected)
    copy.deepcopy(layer)


def test_a_sample_is_gaussian_around_the_mean():
    layer = nn.Bilinear(2, 3, 2)
    to_variational(layer, log_sigma2=-2.0)
    drawn = torch.stack([layer.weight.detach() for _ in range(4000)])
    torch.testing.assert_close(drawn.mean(0), layer._parameters["weight"].detach(), atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.var(0), torch.full((2, 2, 3), 2.718281828**-2.0), atol=0.02, rtol=0)


def test_within_a_call_a_weight_is_drawn_once():
    layer = Own()
    to_variational(layer, log_sigma2=0.0)
    with torch.no_grad():
        layer._parameters["scale"].zero_()
        layer.scale_log_sigma2.fill_(-60)
    seen = []
    layer.register_forward_hook(lambda module, given, found: seen.append((module.table.sum(), found[0, 0])))
    layer(torch.zeros(1, 6))
    assert seen[0][0].item() == pytest.approx(seen[0][1].item(), abs=1e-5)
    assert not torch.equal(layer.table, layer.table)


def test_the_gradient_is_that_of_the_reparameterized_weight():
    layer = nn.Bilinear(2, 2, 1, bias=False)
    to_variational(layer, log_sigma2=-3.0)
    sample = layer.weight
    sample.sum().backward()
    noise = (sample - layer._parameters["weight"]) / torch.exp(torch.tensor(-1.5))
    torch.testing.assert_close(layer._parameters["weight"].grad, torch.ones(1, 2, 2))
    torch.testing.assert_close(layer.weight_log_sigma2.grad, (0.5 * torch.exp(torch.tensor(-1.5)) * noise).detach())


def test_the_row_that_stands_for_nothing_is_never_noisy():
    layer = nn.EmbeddingBag(5, 3, padding_idx=2)
    to_variational(layer, log_sigma2=0.0)
    assert torch.equal(layer.weight[2], layer._parameters["weight"][2])
    assert not torch.equal(layer.weight[1], layer._parameters["weight"][1])


def test_a_copy_amid_the_training_of_a_recurrent_layer_is_independent():
    layer = nn.LSTM(6, 4)
    to_variational(layer, log_sigma2=-4.0)
    layer(SEQUENCE)
    twin = copy.deepcopy(layer).eval()
    with torch.no_grad():
        layer._parameters["weight_hh_l0"].zero_()
    to_stock(layer).eval()
    assert not torch.allclose(layer(SEQUENCE)[0], twin(SEQUENCE)[0])
    to_stock(twin)
    assert isinstance(twin, nn.LSTM)
    assert not isinstance(twin, SampledLayer)
    assert twin._flat_weights[1] is twin.weight_hh_l0
