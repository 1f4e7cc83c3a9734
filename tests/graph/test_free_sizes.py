"""Layers before batch norms begin with weights of one size, and the network computes what it did."""

import pytest
import torch
from torch import Tensor, nn

from bayeszip.compressing import converted
from bayeszip.compressor import Compressor
from bayeszip.graph import begin_even
from bayeszip.models import build_seeded
from bayeszip.recipe import recipe

SIZE = 0.05


def size_of(weight: Tensor) -> float:
    return weight.double().square().mean().sqrt().item()


def with_statistics(network: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    """The network after a few batches have passed, and inputs for it."""
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(20):
            network.train()(torch.randn(16, *shape))
    return network.eval(), torch.randn(4, *shape)


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3), nn.BatchNorm2d(6),
        nn.Flatten(), nn.Linear(6 * 64, 5), nn.BatchNorm1d(5), nn.Linear(5, 2),
    )  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ["small", "resnet-8", "vgg-16"])
def test_the_network_computes_what_it_did(name):
    network = small() if name == "small" else build_seeded(name, 0)
    side = 8 if name == "small" else 32
    network, inputs = with_statistics(network, 3, side, side)
    for parameter in network.parameters():
        parameter.mul_(0.3 if parameter.dim() > 1 else 1)
    network, inputs = with_statistics(network, 3, side, side)
    before = network.double()(inputs.double())
    begin_even(network.float(), (inputs,), SIZE)
    after = network.double()(inputs.double())
    assert (after - before).norm() < 1e-4 * before.norm()


def test_weights_before_norms_have_the_size_and_others_their_own():
    network, inputs = with_statistics(small(), 3, 8, 8)
    last = network[8].weight.detach().clone()
    begin_even(network, (inputs,), SIZE)
    assert [size_of(network[place].weight) for place in (0, 3, 6)] == pytest.approx([SIZE] * 3, rel=1e-5)
    assert torch.equal(network[8].weight, last)


def test_a_layer_that_others_read_too_stays():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.layer(inputs)
            return self.norm(hidden) + hidden

    network, inputs = with_statistics(Twice(), 4)
    before = network.layer.weight.detach().clone()
    begin_even(network, (inputs,), SIZE)
    assert torch.equal(network.layer.weight, before)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight"])
def test_what_is_frozen_stays_as_it_is(frozen):
    network, inputs = with_statistics(small(), 3, 8, 8)
    network.get_parameter(frozen).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    begin_even(network, (inputs,), SIZE)
    after = network.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith(("0.", "1.")))
    assert not torch.equal(after["3.weight"], before["3.weight"])


@torch.no_grad()
@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_a_network_of_small_activations_computes_what_it_did(eps):
    """A norm's ε is most of what it divides by: weights become no smaller than a variance of 0 allows."""
    network = small()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = eps
    network, inputs = with_statistics(network, 3, 8, 8)
    network[1].running_var.mul_(1e-6)
    before = network.double()(inputs.double())
    begin_even(network.float(), (inputs,), 1e-3)
    after = network.double()(inputs.double())
    assert (after - before).norm() < 1e-4 * before.norm()


def test_weights_that_are_all_zero_stay():
    network, inputs = with_statistics(small(), 3, 8, 8)
    with torch.no_grad():
        network[0].weight.zero_()
    begin_even(network, (inputs,), SIZE)
    assert all(tensor.isfinite().all() for tensor in network.state_dict().values())


def test_recipes_say_so():
    network, inputs = with_statistics(small(), 3, 8, 8)
    converted(network, recipe("deep"), (inputs,))
    assert size_of(network[0].weight) == pytest.approx(recipe("deep").start_size, rel=1e-5)
    other, inputs = with_statistics(small(), 3, 8, 8)
    Compressor(other, "deep", n_data=100, example_inputs=inputs)
    assert size_of(other[0].weight) == pytest.approx(recipe("deep").start_size, rel=1e-5)
