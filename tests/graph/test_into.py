"""Into the user's own class where it can't follow in its sizes: zeros come back in place of what died."""

import layered
import numpy as np
import pytest
import torch
from torch import nn

import bayeszip
from bayeszip.errors import ModelError
from bayeszip.graph import load_into
from bayeszip.tensors import CompressedModel, Graph, Node, RawTensor

TOKENS = torch.randint(layered.TOKENS, (3, layered.LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def without_heads(net):
    """Two of the heads, and some hidden units, are dead."""
    for name, weight in net.named_parameters():
        if "in_proj" in name or "qkv" in name:
            for part in weight.chunk(3):
                part[8:] = 0
        if name.endswith(("out_proj.weight", ".out.weight")):
            weight[:, 8:] = 0
        if "linear1" in name or ".up." in name:
            weight[3:9] = 0
    return net.eval()


class Separate(nn.Module):
    """Queries, keys and values by layers of their own, as most of Hugging Face's networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(layered.TOKENS, 12)
        self.parts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = (part(x).view(*x.shape[:2], 4, 3).transpose(1, 2) for part in self.parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


def separate():
    net = Separate()
    with torch.no_grad():
        for part in net.parts:
            part.weight[:3], part.bias[:3], part.weight[9:], part.bias[9:] = 0, 0, 0, 0
        net.out.weight[:, :3], net.out.weight[:, 9:] = 0, 0
    return net.eval()


class Uneven(nn.Module):
    """A recurrent module has one number of units for all its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(layered.TOKENS, 6),
            nn.LSTM(6, 8, 2, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0][:, -1])


def uneven():
    net = Uneven()
    with torch.no_grad():
        for name, weight in net.rnn.named_parameters():
            if name.endswith("_l0"):
                for gate in weight.chunk(4):
                    gate[2:5] = 0
    net.rnn.weight_ih_l1.data[:, 2:5] = 0
    return net.eval()


CASES = {
    "encoder": (lambda: without_heads(layered.Encoder()), layered.Encoder, "in_proj_weight"),
    "packed by hand": (lambda: without_heads(layered.GPTNet()), layered.GPTNet, "qkv.weight"),
    "separate": (separate, Separate, "parts.0.weight"),
    "uneven LSTM": (uneven, Uneven, "weight_ih_l0"),
}


@pytest.mark.parametrize("name", CASES)
def test_zeros_come_back_where_the_class_counts_on_its_sizes(name, tmp_path):
    torch.manual_seed(0)
    build, kind, shrunk = CASES[name]
    net = build()
    result = bayeszip.pack(net, example_inputs=(TOKENS,))
    small = {key: tensor.shape for key, tensor in result.compressed.tensors.items() if key.endswith(shrunk)}
    assert any(tuple(shape) != tuple(net.get_parameter(key).shape) for key, shape in small.items())
    result.save(tmp_path / "net.bayz")
    loaded = bayeszip.load(tmp_path / "net.bayz", into=kind()).eval()
    torch.testing.assert_close(loaded(TOKENS), result.model(TOKENS), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loaded(TOKENS), net(TOKENS), atol=0.1, rtol=0.1)
    assert {key: p.shape for key, p in loaded.named_parameters()} == {key: p.shape for key, p in net.named_parameters()}


def test_a_class_that_computes_something_else_is_refused_as_before(tmp_path):
    class Other(layered.GPTNet):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + 1

    torch.manual_seed(0)
    bayeszip.pack(without_heads(layered.GPTNet()), example_inputs=(TOKENS,)).save(tmp_path / "net.bayz")
    with pytest.raises(ModelError, match="load without into="):
        bayeszip.load(tmp_path / "net.bayz", into=Other())


def test_sizes_that_no_input_can_have_are_refused_before_anything_runs():
    """The class lacks one tensor and could hold the other among zeros: that is tried at the sizes the graph states."""
    nodes = (
        Node("input", (0,), (), {"shape": (0, -7), "dtype": "float32", "computes_in": "float32"}),
        Node("linear", (1,), ("0.weight", "strange")),
    )
    tensors = {
        "0.weight": RawTensor(np.ones((2, 4), np.float32), "float32"),
        "strange": RawTensor(np.ones(2, np.float32), "float32"),
    }
    with pytest.raises(ModelError):
        load_into(CompressedModel(tensors, Graph(1, nodes, (2,))), nn.Sequential(nn.Linear(4, 3)))


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(128, 2))


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(8),
        lambda: nn.InstanceNorm2d(8, affine=True),
        lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        lambda: nn.GroupNorm(2, 8),
    ],
)
def test_what_is_loaded_is_in_eval_and_computes_what_the_file_does(norm, tmp_path):
    inputs, network = torch.randn(4, 3, 6, 6), normed(norm()).eval()
    with torch.no_grad():
        for parameter in network[1].parameters():
            parameter.normal_()
    result = bayeszip.pack(network, example_inputs=inputs)
    result.save(tmp_path / "net.bayz")
    net = bayeszip.load(tmp_path / "net.bayz", into=normed(norm()))
    assert not any(part.training for part in net.modules())
    torch.testing.assert_close(net(inputs), result.model(inputs), rtol=1e-4, atol=1e-5)


def test_a_network_without_values_is_refused(tmp_path):
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))

    network, inputs = lazy(), torch.randn(4, 5)
    network(inputs)
    bayeszip.pack(network.eval(), example_inputs=inputs).save(tmp_path / "net.bayz")
    with pytest.raises(ModelError, match=r"0.weight of Sequential has no values yet; run the network once"):
        bayeszip.load(tmp_path / "net.bayz", into=lazy())
    with torch.device("meta"), pytest.raises(ModelError, match=r"0.weight of Sequential has no values yet"):
        bayeszip.load(tmp_path / "net.bayz", into=nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)))


class InLowPrecision(nn.Module):
    """A forward that asks for autocast itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(inputs).relu()
        return self.last(hidden.float())


def test_a_forward_with_autocast_has_a_graph_in_one_precision(tmp_path):
    torch.manual_seed(0)
    inputs, network = torch.randn(4, 8), InLowPrecision().eval()
    result = bayeszip.pack(network, example_inputs=inputs, quality=99.99)
    assert result.without_graph is None
    exact = network.last(network.first(inputs).relu())
    torch.testing.assert_close(result.model(inputs), exact, rtol=1e-3, atol=1e-3)
    # And afterwards autocast does what it did.
    assert not network(inputs).equal(exact)
    result.save(tmp_path / "net.bayz")
    bayeszip.load(tmp_path / "net.bayz", into=InLowPrecision())


class Waves(nn.Module):
    """Fourier features: a buffer that no layer holds, as wide as half of what a layer reads."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 8, generator=torch.Generator().manual_seed(0)))
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = x @ self.frequencies
        return self.out(torch.cat([angles.sin(), angles.cos()], -1))


def test_a_buffer_that_was_cut_is_loaded_without_its_class(tmp_path):
    torch.manual_seed(0)
    network = Waves()
    with torch.no_grad():
        network.out.weight.view(3, 2, 8)[:, :, 5:] = 0
    bayeszip.pack(network, example_inputs=torch.randn(4, 2)).save(tmp_path / "net.bayz")
    with pytest.raises(ModelError, match=r"frequencies has shape \(2, 5\).*\(2, 8\).*load without into="):
        bayeszip.load(tmp_path / "net.bayz", into=Waves())
    assert bayeszip.load(tmp_path / "net.bayz")(torch.randn(4, 2)).shape == (4, 3)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_grouped_convolution_follows_to_a_part_of_its_last_group(kind, tmp_path):
    def build() -> nn.Sequential:
        middle = kind(8, 8, 3, groups=2)
        return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), middle, nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))

    torch.manual_seed(0)
    net, images = build(), torch.randn(2, 3, 6, 6)
    net(images)
    with torch.no_grad():
        net[0].weight[4:], net[0].bias[4:] = 0, -1  # the second group reads nothing
        net[5].weight.view(4, 8, -1)[:, 1:] = 0  # and of the first one channel alone is read
        net[0].weight[1:4], net[0].bias[1:4] = 0, -1
    bayeszip.pack(net, example_inputs=(images,)).save(tmp_path / "net.bayz")
    own = build()
    own(images)
    loaded = bayeszip.load(tmp_path / "net.bayz", into=own)
    assert loaded[2].groups == 1
    assert loaded[2].weight.numel() < 8 * 9
    torch.testing.assert_close(loaded(images), bayeszip.load(tmp_path / "net.bayz")(images))


def test_a_class_in_place_of_a_network_is_told(tmp_path):
    bayeszip.pack(nn.Linear(4, 2)).save(tmp_path / "net.bayz")
    with pytest.raises(ModelError, match="not the class Linear; give the network itself"):
        bayeszip.load(tmp_path / "net.bayz", into=nn.Linear)


class Tutorial(nn.Module):
    """Counts on the size of what its convolutions leave, as the network of many a tutorial does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.out = nn.Linear(400, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.max_pool2d(self.first(images).relu(), 2)
        return self.out(nn.functional.max_pool2d(self.second(hidden).relu(), 2).view(-1, 16 * 5 * 5))


@pytest.mark.parametrize("dead", [7, 8, 14])
def test_a_convolution_grows_again_whatever_it_has_lost(dead, tmp_path):
    network, images = Tutorial(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        network.second.weight[:dead] = 0
        network.second.bias[:dead] = 0
    bayeszip.pack(network, example_inputs=(images,)).save(tmp_path / "net.bayz")
    own = bayeszip.load(tmp_path / "net.bayz", into=Tutorial())
    assert (own.second.out_channels, own.second.groups) == (16, 1)
    torch.testing.assert_close(own(images), bayeszip.load(tmp_path / "net.bayz")(images))


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.GRU(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.read(rows)[0].mean(1))


def test_a_network_that_refuses_a_file_is_as_it_was(tmp_path):
    network, rows = Reading(), torch.randn(4, 7, 8)
    with torch.no_grad():  # units that do nothing: 3 of one direction and 6 of the other
        network.out.weight[:, :3] = 0
        network.read.weight_hh_l0[:, :3] = 0
        network.out.weight[:, 16:22] = 0
        network.read.weight_hh_l0_reverse[:, :6] = 0
    bayeszip.pack(network, example_inputs=(rows,)).save(tmp_path / "net.bayz")
    own = Reading()
    before, parameters = own(rows), list(own.parameters())
    with pytest.raises(ModelError, match=r"kept \[10, 13\] units"):
        bayeszip.load(tmp_path / "net.bayz", into=own)
    assert torch.equal(own(rows), before)
    assert all(one is other for one, other in zip(own.parameters(), parameters, strict=True))
    assert own.read.hidden_size == 16
