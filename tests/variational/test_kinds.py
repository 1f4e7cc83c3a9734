"""Which layer takes which form."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bayeszip.variational import to_stock, to_variational, variational_weights
from bayeszip.variational.compaction import compact
from bayeszip.variational.layers import VariationalLayer, VariationalLinear
from bayeszip.variational.sampled import SampledLayer
from bayeszip.variational.usage import called_layers


class Same(nn.Linear):
    """Computes what its parent does."""

    def extra_repr(self) -> str:
        return "the same"


class Other(nn.Linear):
    """Computes something of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight.tanh(), self.bias)


class Padded(nn.Conv2d):
    """Goes its own way in what `forward` calls."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(F.pad(input, (1, 1, 1, 1)), weight, bias)


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


def form(layer: nn.Module, log_sigma2: float = -10.0) -> nn.Module:
    to_variational(nn.Sequential(nn.Linear(1, 1), layer), log_sigma2=log_sigma2)
    return layer


def test_a_subclass_that_computes_what_its_parent_does_samples_its_outputs():
    layer = form(Same(3, 3))
    assert isinstance(layer, VariationalLinear)
    assert isinstance(layer, Same)
    assert layer.extra_repr() == "the same"
    to_stock(layer)
    assert type(layer) is Same


@pytest.mark.parametrize("layer", [Other(3, 3), Padded(1, 1, 3), nn.Bilinear(2, 2, 2), nn.LSTMCell(2, 2)])
def test_whatever_else_holds_matrices_samples_these(layer):
    kind = type(layer)
    assert isinstance(form(layer), SampledLayer)
    to_stock(layer)
    assert type(layer) is kind


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LayerNorm([3, 3]),
        OwnRMSNorm,
        lambda: nn.PReLU(3),
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)),
    ],
    ids=["LayerNorm", "a norm of one's own", "PReLU", "scripted", "parametrized"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_norms_vectors_and_what_cannot_be_sampled_are_kept(build):
    assert not any(isinstance(part, VariationalLayer) for part in form(build()).modules())


def test_two_layers_of_a_kind_have_the_same_class():
    assert type(form(Other(3, 3))) is type(form(Other(3, 5)))
    assert type(form(Same(3, 3))) is type(form(Same(3, 5)))


def test_hugging_faces_conv1d_samples_its_outputs():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    layer, x = Conv1D(5, 3), torch.randn(2, 4, 3)
    expected = layer(x)
    form(layer, log_sigma2=-4.0)
    assert not isinstance(layer, SampledLayer)
    torch.testing.assert_close(layer.eval()(x), expected)
    drawn = torch.stack([layer.train()(x).detach() for _ in range(3000)])
    torch.testing.assert_close(drawn.mean(0), expected, atol=0.05, rtol=0)
    variance = torch.exp(torch.tensor(-4.0)) * (x.square().sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(drawn.var(0), variance.expand(2, 4, 5), atol=0.02, rtol=0.15)


class Reader(nn.Module):
    """Multiplies by the weights of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.linear(x, self.fc.weight, self.fc.bias))


def test_weights_that_another_module_reads_are_sampled_for_it():
    network, x = Reader(), torch.randn(3, 4)
    called = called_layers(network, (x,))
    assert called == {"", "out"}
    assert network.training
    to_variational(network, log_sigma2=-4.0, called=called)
    assert isinstance(network.fc, SampledLayer)
    assert isinstance(network.out, VariationalLinear)
    network(x).sum().backward()
    assert all(weight.log_sigma2.grad is not None for weight in variational_weights(network))


def test_inputs_that_a_network_does_not_take_say_nothing():
    assert called_layers(Reader(), (torch.randn(3, 5),)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masked", [False, True])
def test_torchs_fast_path_reads_whole_weights(masked):
    """Compaction made matrices of other shapes, which fused kernels for inference read past the layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 1))
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    to_variational(network)
    with torch.no_grad():
        for weight in variational_weights(network):
            weight.theta[: len(weight.theta) // 2] = 0
            weight.log_sigma2[: len(weight.theta) // 2] = 5
    x = torch.randn(2, 5, 8)

    def run():
        with torch.no_grad():
            return network[1](network[0](x), src_key_padding_mask=mask)

    network.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = run()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert compact(network, 3.0, lambda parameter, selection: None)
    assert network[0].live is not None
    kept = slice(None) if mask is None else ~mask
    torch.testing.assert_close(run()[kept], expected[kept], atol=1e-5, rtol=1e-4)
