"""To variational and back: which layers, which tensors, tying, and weights that can't be compressed."""

import copy

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from bayeszip.errors import ModelError
from bayeszip.models import LeNet300
from bayeszip.variational import VariationalLayer, to_stock, to_variational, variational_weights
from bayeszip.variational.divergence import kl_sum


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's; a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.mix(self.mix(self.embed(tokens)))))


def test_start_is_the_papers():
    network = LeNet300()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    parameters = {name: id(parameter) for name, parameter in network.named_parameters()}
    conversion = to_variational(network)
    assert conversion.converted == ("fc1", "fc2", "fc3")
    assert conversion.kept == ()
    weights = list(variational_weights(network))
    assert [w.name for w in weights] == list(before)
    for weight in weights:
        assert id(weight.theta) == parameters[weight.name]
        assert torch.equal(weight.theta, before[weight.name])
        assert (weight.log_sigma2 == -10).all()
    assert sum(w.theta.numel() for w in weights) == 266_610


def test_to_stock_restores_class_tensors_and_outputs():
    network = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.ConvTranspose1d(3, 2, 2), nn.Flatten(), nn.Linear(14, 2))
    original = copy.deepcopy(network)
    inputs = torch.randn(3, 2, 8)
    to_variational(network)
    assert sum(isinstance(layer, VariationalLayer) for layer in network) == 3
    assert to_stock(network) is network
    assert [type(layer) for layer in network] == [type(layer) for layer in original]
    assert network.state_dict().keys() == original.state_dict().keys()
    assert torch.equal(network(inputs), original(inputs))
    assert vars(network[0]).keys() == vars(original[0]).keys()


def test_biases_have_a_switch():
    network = LeNet300()
    to_variational(network, biases=False, log_sigma2=-7.0)
    weights = list(variational_weights(network))
    assert [w.name for w in weights] == ["fc1.weight", "fc2.weight", "fc3.weight"]
    assert all((w.log_sigma2 == -7).all() for w in weights)
    network.train()(torch.randn(2, 1, 28, 28)).sum().backward()
    assert network.fc1.bias.grad is not None
    to_stock(network)


def test_tied_weights_count_once_and_share_their_variance():
    network = Tied()
    conversion = to_variational(network)
    assert conversion.converted == ("embed", "mix", "out")
    assert conversion.kept == (("norm", "LayerNorm"),)
    assert network.out.weight is network.embed.weight
    assert network.out.weight_log_sigma2 is network.embed.weight_log_sigma2
    weights = list(variational_weights(network))
    assert [w.name for w in weights] == ["embed.weight", "mix.weight", "mix.bias"]
    each = [kl_sum([w]).item() for w in weights]
    assert kl_sum(weights).item() == pytest.approx(sum(each), rel=1e-5)
    assert network.train()(torch.tensor([[1, 2]])).shape == (1, 2, 7)
    to_stock(network)
    assert network.out.weight is network.embed.weight


def test_norms_and_computed_weights_are_kept_and_listed():
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.PReLU(3), nn.ReLU())
    network.append(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    hooked = nn.Linear(3, 3)
    nn.utils.prune.identity(hooked, "weight")
    network.append(hooked)
    conversion = to_variational(network)
    assert conversion.converted == ("0",)
    kinds = [kind for _, kind in conversion.kept]
    assert kinds[:2] == ["BatchNorm1d", "PReLU"]
    assert ("5", "Linear") in conversion.kept
    assert [w.name for w in variational_weights(network)] == ["0.weight", "0.bias"]


def test_a_network_without_layers_to_compress():
    with pytest.raises(ModelError, match="BatchNorm1d has no layer that can be compressed; these can: Linear, Conv1d"):
        to_variational(nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.fill_(torch.nan), r"1\.weight holds 6 values that are NaN or infinite"),
        (lambda w: w[0, 1:2].fill_(-torch.inf), r"1\.weight holds 1 values that are NaN or infinite"),
    ],
)
def test_weights_that_are_not_finite(spoil, message):
    network = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        spoil(network[1].weight)
    with pytest.raises(ModelError, match=message):
        to_variational(network)
    assert type(network[1]) is nn.Linear
    assert set(dict(network[1].named_parameters())) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.Linear(3, 2, device="meta"), r"1\.weight has no values yet"),
        (lambda: nn.LazyLinear(2), r"1\.weight has no values yet; run the network once"),
        (lambda: nn.Linear(3, 2, dtype=torch.complex64), r"1\.weight is a torch.strided torch.complex64 tensor"),
    ],
)
def test_weights_that_are_no_dense_real_numbers(layer, message):
    network = nn.Sequential(nn.Linear(3, 3), layer())
    with pytest.raises(ModelError, match=message):
        to_variational(network)
    assert type(network[0]) is nn.Linear


def test_sparse_weights():
    network = nn.Sequential(nn.Linear(3, 3))
    network[0].weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ModelError, match=r"0\.weight is a torch.sparse_coo"):
        to_variational(network)


def test_single_and_all_zero_weights():
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 4))
    nn.init.zeros_(network[1].weight)
    to_variational(network)
    value = kl_sum(list(variational_weights(network)))
    value.backward()
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())
    assert (network[1].weight.grad == 0).all()


def test_a_variational_network_can_be_copied():
    network = LeNet300()
    to_variational(network)
    twin = copy.deepcopy(network)
    twin.fc1.weight_log_sigma2.data.zero_()
    assert (network.fc1.weight_log_sigma2 == -10).all()
    assert twin(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


def test_what_is_said_of_tables_is_no_matter_of_other_layers():
    """An attribute of a layer of one's own may have the name of a table's."""

    class Scaled(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.sparse, self.max_norm = 0.5, 1.0

        def forward(self, inputs):
            return self.sparse * super().forward(inputs)

    network = nn.Sequential(nn.Embedding(20, 8, sparse=True), Scaled(8, 3))
    assert len(to_variational(network, log_sigma2=-10).converted) == 2
    assert (network[0].sparse, network[1].sparse) == (False, 0.5)
