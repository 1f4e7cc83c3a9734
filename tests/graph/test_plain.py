"""Networks that are wrapped, or whose weights are computed from others, in the form of plain layers."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import bayeszip
from bayeszip.errors import ModelError
from bayeszip.graph.plain import copied, plain_copy, unwrapped_names


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def old(function: Callable[..., nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """A function of torch's that makes it warn, of itself or of others of its own."""

    def apply(layer: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(layer)

    return apply


def masked(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.ln_structured(layer, "weight", 0.4, n=2, dim=0)
    return layer


def parametrized(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Doubled())


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm, old": old(nn.utils.weight_norm),
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm, old": old(nn.utils.spectral_norm),
    "orthogonal": parametrizations.orthogonal,
    "one's own": parametrized,
    "pruned": masked,
}


def network(way: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(WAYS[way](nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))
    net(torch.randn(2, 6))  # old hooks keep what they computed
    return net.eval()


@pytest.mark.parametrize("way", WAYS)
def test_computed_weights_go_in_as_computed(way, tmp_path):
    net, x = network(way), torch.randn(5, 6)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    expected = net(x).detach()
    result = bayeszip.pack(net, example_inputs=x, components=100)
    assert result.without_graph is None
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} >= set(result.compressed.tensors)
    result.save(tmp_path / "net.bayz")
    assert torch.allclose(bayeszip.load(tmp_path / "net.bayz")(x), expected, atol=1e-5)
    # The network is what it was, and a fresh one of its class takes the file as well.
    assert torch.equal(net(x), expected)
    assert {name: tensor.tolist() for name, tensor in net.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }
    loaded = bayeszip.load(tmp_path / "net.bayz", into=network(way))
    assert torch.allclose(loaded(x), expected, atol=1e-5)
    assert isinstance(dict(loaded.named_parameters())["0.weight"], nn.Parameter)


def test_pruned_units_are_gone():
    result = bayeszip.pack(network("pruned"), example_inputs=torch.randn(2, 6))
    assert result.compressed.tensors["0.weight"].shape == (5, 6)


def test_wrappers_do_not_count(tmp_path):
    net, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4)
    compiled = old(torch.compile)(net)
    for wrapped in (nn.DataParallel(net), compiled, nn.DataParallel(compiled)):
        for inputs in (x, None):
            assert list(bayeszip.pack(wrapped, example_inputs=inputs).compressed.tensors) == ["0.weight", "0.bias"]
        assert list(bayeszip.pack(wrapped.state_dict()).compressed.tensors) == ["0.weight", "0.bias"]
    bayeszip.pack(net, components=20).save(tmp_path / "net.bayz")
    fresh = nn.DataParallel(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    assert bayeszip.load(tmp_path / "net.bayz", into=fresh) is fresh
    assert torch.allclose(fresh.module[0].weight, net[0].weight, atol=1e-3)


def test_only_what_stands_before_every_name_is_a_wrapper():
    some = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert list(unwrapped_names(some)) == ["module.a", "b"]
    assert unwrapped_names({}) == {}


def test_what_cannot_be_copied_is_said():
    net = nn.Linear(2, 2)
    net.stream = (each for each in ())
    with pytest.raises(ModelError, match="Linear can't be copied: cannot pickle 'generator'"):
        plain_copy(net)


class Keeping(nn.Module):
    """Keeps what it has computed, as it is and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self.last = self.layer(inputs)
        self.kept = {"hidden": [self.last.relu(), (self.last,)]}
        return self.last


def test_what_a_layer_has_computed_is_copied_as_it_is():
    net = Keeping()
    net(torch.ones(1, 2))
    other = copied(net)
    assert torch.equal(other.last, net.last)
    assert torch.equal(other.kept["hidden"][0], net.last.relu())
    assert other.kept["hidden"][1][0] is other.last
    assert other.last.grad_fn is None
    assert net.last.grad_fn is not None
    assert other.layer.weight is not net.layer.weight
