"""LeNet-300-100 and LeNet-5 with planted units: what goes, what stays, and that outputs don't change."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayeszip import codec
from bayeszip.errors import ModelError
from bayeszip.graph import drop_dead_units, load_into, prove_same, to_module, trace

IMAGES = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))


class LeNet300(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, 10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(self.dropout(F.relu(self.fc2(x))))


class LeNet5(nn.Module):
    def __init__(self, *, activation: bool = False, padding: int = 0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=padding)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=padding)
        self.fc1 = nn.Linear(50 * (7 if padding else 4) ** 2, 500)
        self.fc2 = nn.Linear(500, 10)
        self.activation = nn.ReLU() if activation else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.activation(self.conv1(x)), 2)
        x = F.max_pool2d(self.activation(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc2(F.relu(self.fc1(x)))


def unread(layer: nn.Linear | nn.Conv2d, *units: int, block: int = 1) -> None:
    """Nothing reads these inputs of a layer."""
    with torch.no_grad():
        for unit in units:
            layer.weight[:, unit * block : (unit + 1) * block] = 0


def constant(layer: nn.Linear | nn.Conv2d, value: float, *units: int) -> None:
    """These outputs of a layer are its bias alone."""
    with torch.no_grad():
        assert layer.bias is not None
        layer.weight[list(units)] = 0
        layer.bias[list(units)] = value


def planted_lenet300() -> LeNet300:
    torch.manual_seed(0)
    net = LeNet300()
    unread(net.fc1, *range(100))  # pixels: they are the input and stay
    unread(net.fc2, *range(50))
    constant(net.fc1, -0.25, *range(50, 70))
    constant(net.fc1, 0.25, *range(70, 75))
    unread(net.fc3, *range(10))
    constant(net.fc2, 0.0, *range(10, 15))
    constant(net.fc2, -1.0, *range(15, 20))
    constant(net.fc2, 0.5, *range(20, 23))
    return net


def sizes(model):
    return {name: tensor.shape for name, tensor in model.tensors.items()}


def test_lenet300_loses_what_is_dead_and_zero(compress, shrink):
    shrunk = shrink(compress(planted_lenet300(), IMAGES), IMAGES, fold="never")
    assert sizes(shrunk) == {
        "fc1.weight": (230, 784),
        "fc1.bias": (230,),
        "fc2.weight": (80, 230),
        "fc2.bias": (80,),
        "fc3.weight": (10, 80),
        "fc3.bias": (10,),
    }


def test_lenet300_loses_constants_too_where_asked(compress, shrink):
    shrunk = shrink(compress(planted_lenet300(), IMAGES), IMAGES, fold="always")
    assert shrunk.tensors["fc2.weight"].shape == (77, 225)
    assert shrunk.tensors["fc3.weight"].shape == (10, 77)


@pytest.mark.parametrize("constants", [0, 17])
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_folding_is_done_where_it_makes_the_file_smaller(compress, shrink, constants, sparsity):
    net = planted_lenet300()
    constant(net.fc2, 0.5, *range(23, 23 + constants))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter[torch.rand_like(parameter) < sparsity] = 0
    model = compress(net, IMAGES)
    size = {fold: len(codec.encode(shrink(model, IMAGES, fold=fold))) for fold in ("never", "smaller", "always")}
    assert size["smaller"] <= min(size.values())
    assert len(set(size.values())) > 1


def test_a_raw_bias_takes_constants_at_no_cost(compress, shrink):
    model = compress(planted_lenet300(), IMAGES, raw=lambda name: name.endswith("bias"))
    shrunk = shrink(model, IMAGES)
    assert shrunk.tensors["fc2.weight"].shape == (77, 225)
    assert shrunk.tensors["fc3.bias"].dtype == "float32"


def test_without_folding_outputs_are_equal_to_the_last_bits(compress, shrink):
    shrink(compress(planted_lenet300(), IMAGES), IMAGES, fold="never", rounding=1e-14)


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_lenet5(compress, shrink, activation, padding):
    torch.manual_seed(0)
    net = LeNet5(activation=activation, padding=padding)
    block = 49 if padding else 16
    unread(net.conv2, 0, 1, 2)
    constant(net.conv1, 0.0, 3, 4)
    constant(net.conv1, -0.5, 5)
    constant(net.conv1, 0.5, 6)
    unread(net.fc1, 0, 1, block=block)
    constant(net.conv2, 0.0, 2)
    constant(net.conv2, -0.5, 3, 4)
    constant(net.conv2, 0.5, 5)
    unread(net.fc2, *range(7))
    constant(net.fc1, -1.0, 7, 8)
    with torch.no_grad():
        net.fc1.weight[9:20, : 40 * block] = 0  # reads some channels only: alive
        net.fc1.weight[:, 49 * block : 50 * block - 1] = 0  # one column of the last channel is read: alive
    shrunk = shrink(compress(net, IMAGES), IMAGES, fold="always")
    # With ReLU the negative constants are zeros; without, they fold where no zero padding is in the way.
    gone1 = 5 + (1 if activation or not padding else 0) + (0 if padding else 1)
    assert sizes(shrunk) == {
        "conv1.weight": (20 - gone1, 1, 5, 5),
        "conv1.bias": (20 - gone1,),
        "conv2.weight": (44, 20 - gone1, 5, 5),
        "conv2.bias": (44,),
        "fc1.weight": (491, 44 * block),
        "fc1.bias": (491,),
        "fc2.weight": (10, 491),
        "fc2.bias": (10,),
    }


def test_a_layer_that_is_all_dead_keeps_one_unit(compress, shrink):
    torch.manual_seed(0)
    net = LeNet5(activation=True)
    with torch.no_grad():
        net.conv2.weight.zero_()
        net.conv2.bias.fill_(-1.0)
    shrunk = shrink(compress(net, IMAGES), IMAGES)
    assert shrunk.tensors["conv1.weight"].shape == (1, 1, 5, 5)
    assert shrunk.tensors["conv2.weight"].shape == (1, 1, 5, 5)
    # Behind it all is constant, and 500 constants fold into ten biases.
    assert shrunk.tensors["fc1.weight"].shape == (1, 16)
    assert not shrunk.tensors["conv2.weight"].nonzero


def test_widths_round_up(compress, shrink):
    shrunk = shrink(compress(planted_lenet300(), IMAGES), IMAGES, fold="always", multiple_of=8)
    assert shrunk.tensors["fc2.weight"].shape == (80, 232)
    assert shrunk.tensors["fc3.weight"].shape == (10, 80)


def test_the_trace_of_lenet300_names_what_it_should():
    net = planted_lenet300().train()
    graph = trace(net, IMAGES[:1])
    assert net.training
    assert [node.op for node in graph.nodes] == ["input", "flatten", "linear", "relu", "linear", "relu", "linear"]
    assert graph.nodes[0].attributes == {"shape": (1, 28, 28), "dtype": "float32", "computes_in": "float32"}
    assert list(graph.tensor_names()) == [f"fc{layer}.{leaf}" for layer in (1, 2, 3) for leaf in ("weight", "bias")]


@pytest.fixture
def lenet5(compress):
    torch.manual_seed(0)
    net = LeNet5(activation=True)
    unread(net.conv2, *range(5))
    unread(net.fc1, *range(10), block=16)
    return drop_dead_units(compress(net, IMAGES))


def test_the_module_is_made_of_stock_layers(lenet5):
    module = to_module(lenet5)
    assert type(module.conv1) is nn.Conv2d
    assert (module.conv2.in_channels, module.conv2.out_channels) == (15, 40)
    assert type(module.fc1) is nn.Linear
    assert module.fc1.in_features == 640
    assert list(module.state_dict()) == list(lenet5.tensors)
    assert not module.training
    for batch in (1, 2, 7):
        assert module(torch.zeros(batch, 1, 28, 28)).shape == (batch, 10)
    with pytest.raises(ValueError, match=r"\(1, 28, 28\).*\(2, 784\)"):
        module(torch.zeros(2, 784))


def test_the_module_trains_copies_and_pickles(lenet5):
    module = to_module(lenet5)
    expected = module(IMAGES)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(IMAGES), expected)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(module(IMAGES), torch.tensor([1, 2, 3]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)


def test_the_module_compiles_and_traces_again(lenet5):
    module = to_module(lenet5)
    again = trace(module, IMAGES)
    assert again == lenet5.graph
    explained = torch._dynamo.explain(module)(IMAGES)
    assert explained.graph_count == 1
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(IMAGES), module(IMAGES), atol=1e-6)


def test_loading_into_the_class_shrinks_its_layers(lenet5):
    net = load_into(lenet5, LeNet5(activation=True))
    assert net.conv1.out_channels == 15
    assert net.fc1.weight.shape == (500, 640)
    assert torch.allclose(net.eval()(IMAGES), to_module(lenet5)(IMAGES), atol=1e-6)


def test_proof_notices_a_changed_weight(compress):
    model = compress(planted_lenet300(), IMAGES)
    tensor = model.tensors["fc3.bias"]
    codebook = tensor.codebook.copy()
    codebook[1:] *= 1.001
    other = copy.copy(model)
    object.__setattr__(other, "tensors", model.tensors | {"fc3.bias": type(tensor)(tensor.symbols, codebook)})
    with pytest.raises(ModelError, match=r"outputs differ by \S+ times the largest output; rounding explains \S+;"):
        prove_same(model, other, IMAGES)
