"""Compacted layers compute what they did with their dead rows and columns at zero, and can grow back."""

import copy

import pytest
import torch
from torch import nn

from bayeszip.models import LeNet5, LeNet300
from bayeszip.variational import to_stock, to_variational, variational_weights
from bayeszip.variational.compaction import compact, expand
from bayeszip.variational.layers import VariationalLayer

LIMIT = 2.944
CASES = {
    "LeNet-300-100": (LeNet300, (4, 1, 28, 28)),
    "LeNet-5": (LeNet5, (4, 1, 28, 28)),
    "conv1d and conv3d": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.Unflatten(2, (2, 2, 2)), nn.Conv3d(6, 5, 2)),
        (2, 4, 8),
    ),
}


def pruned(build, seed: int = 0, **options) -> nn.Module:
    """A network with a third of its rows and columns pruned by a large variance."""
    torch.manual_seed(seed)
    network = build()
    to_variational(network, **options)
    with torch.no_grad():
        for layer in network.modules():
            if getattr(layer, "weight_log_sigma2", None) is not None:
                rows = torch.rand(layer.weight.shape[0]) < 0.3
                layer.weight_log_sigma2[rows] = 10.0
                layer.weight_log_sigma2[:, torch.rand(layer.weight.shape[1]) < 0.3] = 10.0
                if layer.bias_log_sigma2 is not None:
                    layer.bias_log_sigma2[rows] = 12.0
    return network


def zeroed(network: nn.Module) -> nn.Module:
    """The same with the weights in dead rows and columns at zero."""
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for layer in twin.modules():
            if not isinstance(layer, VariationalLayer) or layer.weight_log_sigma2 is None:
                continue
            dead = layer.weight_log_sigma2.flatten(2) >= 5 if layer.weight.dim() > 2 else layer.weight_log_sigma2 >= 5
            dead = dead.reshape(*layer.weight.shape[:2], -1).all(dim=2)
            layer.weight[:, dead.all(dim=0)] = 0
            if layer.bias_log_sigma2 is not None:
                dead_rows = dead.all(dim=1) & (layer.bias_log_sigma2 >= 5)
                layer.weight[dead_rows], layer.bias[dead_rows] = 0, 0
    return twin


def nothing(parameter, selection) -> None:
    pass


@pytest.mark.parametrize("name", CASES)
def test_the_same_function_of_fewer_weights(name):
    build, shape = CASES[name]
    network = pruned(build)
    reference = zeroed(network).eval()
    full = sum(p.numel() for p in network.parameters())
    shapes = {n: p.shape for n, p in network.named_parameters()}
    compact(network, LIMIT, nothing)
    assert sum(p.numel() for p in network.parameters()) < 0.75 * full
    inputs = torch.randn(shape)
    torch.testing.assert_close(network.eval()(inputs), reference(inputs), rtol=1e-4, atol=1e-5)
    once = [p.data_ptr() for p in network.parameters()]
    compact(network, LIMIT, nothing)
    assert [p.data_ptr() for p in network.parameters()] == once

    expand(network)
    assert {n: p.shape for n, p in network.named_parameters()} == shapes
    torch.testing.assert_close(network(inputs), reference(inputs), rtol=1e-4, atol=1e-5)
    to_stock(network)
    for ours, theirs in zip(network.parameters(), to_stock(reference).parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_widths_are_multiples_of_what_hardware_likes(name):
    build, shape = CASES[name]
    network = pruned(build)
    widths = [tuple(layer.weight.shape[:2]) for layer in network.modules() if hasattr(layer, "live")]
    reference = zeroed(network).eval()
    assert compact(network, LIMIT, nothing, multiple_of=4)
    found = [tuple(layer.weight.shape[:2]) for layer in network.modules() if hasattr(layer, "live")]
    assert found != widths
    for now, before in zip(found, widths, strict=True):
        assert all(new % 4 == 0 or new == old for new, old in zip(now, before, strict=True))
    # Dead weights that fill a block up are as they were: noise about values next to nothing.
    alive = zeroed(network).eval()
    inputs = torch.randn(shape)
    torch.testing.assert_close(alive(inputs), reference(inputs), rtol=1e-4, atol=1e-5)
    assert not compact(network, LIMIT, nothing, multiple_of=4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_the_whole_layer_without_its_dead_part(memory_format):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(6, 8, 3)).to(torch.float64)
    to_variational(layer, log_sigma2=-30.0)
    with torch.no_grad():
        layer[0].weight_log_sigma2[[1, 4]] = layer[0].weight_log_sigma2[:, [0, 2, 5]] = 30.0
        layer[0].bias_log_sigma2[[1, 4]] = 30.0
    whole = zeroed(layer).eval()
    compact(layer.eval(), LIMIT, nothing)
    assert layer[0].weight.shape[:2] == (6, 3)
    images = torch.randn(4, 6, 7, 7, dtype=torch.float64).to(memory_format=memory_format)
    ours, theirs = images.clone().requires_grad_(), images.clone().requires_grad_()
    weights = torch.randn(4, 8, 5, 5, dtype=torch.float64)
    (layer(ours).pow(3) * weights).sum().backward()
    (whole(theirs).pow(3) * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    live = layer[0].live
    torch.testing.assert_close(layer[0].weight.grad, whole[0].weight.grad[live.rows][:, live.columns])


def test_again_as_more_is_pruned():
    network = pruned(LeNet300)
    compact(network, LIMIT, nothing)
    rows = network.fc1.live.rows.clone()
    with torch.no_grad():
        network.fc1.weight_log_sigma2[:7] = 10
        network.fc1.bias_log_sigma2[:7] = 12
    assert not compact(network, LIMIT, nothing)  # not worth it yet
    assert torch.equal(network.fc1.live.rows, rows)
    with torch.no_grad():
        network.fc1.weight_log_sigma2[:70] = 10
        network.fc1.bias_log_sigma2[:70] = 12
    assert compact(network, LIMIT, nothing)
    assert torch.equal(network.fc1.live.rows, rows[70:])
    expand(network)
    assert (network.fc1.weight[rows[:70]] == 0).all()
    assert (network.fc1.weight[rows[70:]] != 0).any(dim=1).all()


def test_noise_and_gradients_live_where_the_layer_does():
    network = pruned(LeNet300)
    compact(network, LIMIT, nothing)
    output = network.train()(torch.randn(4, 1, 28, 28))
    assert output.shape == (4, 10)
    output.square().sum().backward()
    assert all(p.grad.shape == p.shape for p in network.parameters())


def test_a_live_bias_keeps_its_row_with_and_without_a_posterior():
    network = pruned(LeNet300, biases=False)
    reference = zeroed(network).eval()
    compact(network, LIMIT, nothing)
    assert network.fc1.live.rows.numel() == 300
    assert network.fc1.live.columns.numel() < 784
    inputs = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(network.eval()(inputs), reference(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [LeNet300, LeNet5])
def test_a_network_that_is_dead_altogether(build):
    network = build()
    to_variational(network, log_sigma2=20.0)
    compact(network, LIMIT, nothing)
    output = network.train()(torch.randn(2, 1, 28, 28))
    assert output.shape == (2, 10)
    expand(network)
    assert network.eval()(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_the_optimizers_state_follows():
    network = pruned(LeNet300)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    network.train()(torch.randn(8, 1, 28, 28)).square().sum().backward()
    optimizer.step()
    before = optimizer.state[network.fc1.weight]["exp_avg"].clone()

    def select(parameter, selection) -> None:
        state = optimizer.state[parameter]
        state.update({key: selection(value) for key, value in state.items() if value.dim()})

    compact(network, LIMIT, select)
    live = network.fc1.live
    after = optimizer.state[network.fc1.weight]["exp_avg"]
    assert torch.equal(after, before[live.rows][:, live.columns])
    network(torch.randn(8, 1, 28, 28)).square().sum().backward()
    optimizer.step()


def test_tied_grouped_transposed_and_embedding_layers_are_left_alone():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    network = nn.Sequential(
        first, second, nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 4, 3), nn.Embedding(5, 4)
    )
    to_variational(network, log_sigma2=20.0)
    shapes = [p.shape for p in network.parameters()]
    compact(network, LIMIT, nothing)
    assert [p.shape for p in network.parameters()] == shapes


def test_what_else_a_layer_of_ones_own_holds_is_not_cut():
    class Gained(nn.Linear):
        """A linear layer, and a number of its owner's for each of the 40 things that he keeps there."""

        def __init__(self) -> None:
            super().__init__(12, 32)
            self.gain = nn.Parameter(torch.arange(40.0))

    network = pruned(lambda: nn.Sequential(Gained()))
    assert compact(network, LIMIT, nothing)
    assert len(network[0].weight) < 32
    expand(network)
    assert network[0].gain.equal(torch.arange(40.0))
    assert network[0].weight.shape == (32, 12)


def test_to_stock_gives_full_shapes():
    network = pruned(LeNet300)
    compact(network, LIMIT, nothing)
    to_stock(network)
    assert network.fc1.weight.shape == (300, 784)
    assert list(variational_weights(network)) == []
