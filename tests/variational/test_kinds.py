"""Which layer takes which form."""

import contextlib

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


class Mirrored(nn.Module):
    """Calls its encoder, and reads the encoder's weights for its decoder."""

    def __init__(self, read=lambda weight: weight) -> None:
        super().__init__()
        self.enc, self.last, self.read = nn.Linear(6, 4), nn.Linear(6, 6), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.linear(self.enc(x).relu(), self.read(self.enc.weight).t()))


@pytest.mark.parametrize("read", [lambda weight: weight, lambda weight: weight.data, lambda weight: 2 * weight])
def test_a_layer_that_is_called_and_read_is_sampled_for_both(read):
    network, x = Mirrored(read), torch.randn(3, 6)
    called = called_layers(network, (x,))
    assert called == {"", "last"}
    to_variational(network, called=called)
    assert isinstance(network.enc, SampledLayer)
    assert isinstance(network.last, VariationalLinear)


class Twice(nn.Module):
    """Calls a layer, and reads its weights as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.mid, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.linear(self.mid(x).relu(), self.mid.weight))


@pytest.mark.parametrize("kind", ["around", "decorated", "held"])
def test_a_weight_that_is_read_in_another_precision_is_read(kind):
    """Autocast gives the reader a copy of the weight, which it had made for the layer already."""
    precise = torch.autocast("cpu", torch.bfloat16, cache_enabled=True)

    class Under(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Twice()

        @torch.autocast("cpu", torch.bfloat16, enabled=kind == "decorated")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with precise if kind == "held" else contextlib.nullcontext():
                return self.inner(x)

    with precise if kind == "around" else contextlib.nullcontext():
        assert called_layers(Under(), (torch.randn(3, 6),)) == {"", "inner", "inner.last"}


def test_a_layer_whose_error_is_caught_ran_no_longer_than_that():
    class Trying(Mirrored):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(RuntimeError):
                self.enc(torch.zeros(1, 5))
            return super().forward(x)

    assert called_layers(Trying(), (torch.randn(3, 6),)) == {"", "last"}


def test_rows_that_are_read_elsewhere_are_not_left_out():
    network, x = Mirrored(), torch.randn(3, 6)
    to_variational(network, called=called_layers(network, (x,)))
    with torch.no_grad():
        network.enc.weight_log_sigma2[:, :3] = 5
        network.last.weight_log_sigma2[:, :3] = 5
        network.last.weight[:, :3] = 0
    expected = network.eval()(x)
    assert compact(network, 3.0, lambda parameter, selection: None)
    assert network.enc.live is None
    assert network.last.live is not None
    torch.testing.assert_close(network(x), expected)


def test_a_decoder_has_noise_of_the_weights_that_it_reads():
    network, x = Mirrored(), torch.zeros(1, 6)
    to_variational(network, log_sigma2=-4.0, biases=False, called=called_layers(network, (x,)))
    network.last.noise = False
    with torch.no_grad():
        network.enc.bias.fill_(1.0)
        network.last.weight.copy_(torch.eye(6))
        # Zeros go in: what differs comes from the second reader alone.
        assert (network(x) - network(x)).abs().max() > 0.01


class Asking(nn.Module):
    """Asks for types, sizes and tensors like a layer's weights, and has weights that two layers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 7)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.head.weight = self.embed.weight
        self.head.register_forward_pre_hook(lambda layer, given: (given[0] + 0 * layer.weight.sum(),))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = next(self.head.parameters()).data
        state = weight.new_zeros(1, len(tokens), 4), torch.zeros_like(weight)[None, : len(tokens)]
        x = self.rnn(self.embed(tokens), state)[0].to(self.head.weight.dtype).type_as(self.scaled.bias)
        return self.head(self.scaled(self.attention(x, x, x)[0]).view(-1, self.head.weight.size(1)))


def test_layers_that_are_asked_for_their_form_or_read_their_own_weights_are_called():
    network = Asking()
    called = called_layers(network, (torch.tensor([[1, 2, 3], [4, 5, 6]]),))
    assert {"embed", "rnn", "head", "attention", "scaled"} <= called
    assert "attention.out_proj" not in called


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore::DeprecationWarning")
def test_what_is_compiled_is_looked_at_as_it_is_written():
    from torch.nn.attention.flex_attention import flex_attention

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.tied = torch.compile(nn.Linear(16, 16)), torch.compile(Mirrored())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)[:, None]
            return self.tied(flex_attention(x, x, x)[..., :6])

    called = called_layers(Compiled(), (torch.randn(2, 8, 16),))
    assert {"first._orig_mod", "tied._orig_mod.last"} <= called
    assert "tied._orig_mod.enc" not in called


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
