"""The built-in networks, and networks named by `module:factory`."""

import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayeszip
from bayeszip import data, graph
from bayeszip.errors import ModelError, ModelUsageError
from bayeszip.graph.storable import parameter_count
from bayeszip.models import BUILT_IN, VGG16, LeNet5, LeNet300, ResNet, build


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """A current folder into which a test can put modules; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lenet-300-100", 266_610),
        ("lenet-5", 431_080),
        ("resnet-8", 78_186),
        ("resnet-20", 269_722),
        ("resnet-20-4", 4_286_026),
        ("vgg-16", 14_724_042),
    ],
)
def test_parameters_are_the_papers(name, parameters):
    assert parameter_count(build(name)) == parameters


@pytest.mark.parametrize("name", BUILT_IN)
def test_networks_score_ten_classes_for_each_image(name):
    network = build(name).eval()
    images = torch.rand(3, *network.input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores, alone = network(images), network(images[1:2])
    assert scores.shape == (3, 10)
    # Each image is scored on its own.
    torch.testing.assert_close(alone, scores[1:2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lenet-5", (3, 32, 32), r"as in MNIST, not of 3 × 32 × 32; give it such images \(--data mnist\) or"),
        ("lenet-300-100", (3, 32, 32), "LeNet300 is made for images of 1 × 28 × 28, as in MNIST, not of 3 × 32 × 32"),
        ("resnet-8", (1, 28, 28), "ResNet is made for images of 3 × 32 × 32, as in CIFAR-10, not of 1 × 28 × 28"),
        ("resnet-20", (784,), r"as in CIFAR-10, not of 784; give it such images \(--data cifar10\) or choose"),
        ("vgg-16", (3, 28, 28), "VGG16 is made for images of 3 × 32 × 32, as in CIFAR-10, not of 3 × 28 × 28"),
    ],
)
def test_images_of_other_data_are_refused(name, shape, message):
    with pytest.raises(ModelError, match=message):
        build(name)(torch.zeros(2, *shape))


def test_networks_are_made_for_the_data_they_name():
    assert LeNet300.input_shape == LeNet5.input_shape == tuple(data.load_test("mnist").images.shape[1:])
    assert ResNet.input_shape == VGG16.input_shape == (3, 32, 32)


def test_layers_carry_the_expected_names():
    assert [name for name, _ in LeNet300().named_children()] == ["fc1", "fc2", "fc3"]
    assert [name for name, _ in LeNet5().named_children()] == ["conv1", "conv2", "fc1", "fc2"]


def test_lenet300_is_two_rectified_layers_and_a_linear_one():
    network, images = LeNet300(), torch.rand(2, 1, 28, 28)
    hidden = (images.reshape(2, 784) @ network.fc1.weight.T + network.fc1.bias).clamp(min=0)
    hidden = (hidden @ network.fc2.weight.T + network.fc2.bias).clamp(min=0)
    torch.testing.assert_close(network(images), hidden @ network.fc3.weight.T + network.fc3.bias)


def test_lenet5_equals_rectify_then_pool():
    network, images = LeNet5(), torch.rand(2, 1, 28, 28)
    hidden = images
    for convolution in (network.conv1, network.conv2):
        hidden = F.max_pool2d(F.relu(F.conv2d(hidden, convolution.weight, convolution.bias)), 2)
    assert hidden.shape == (2, 50, 4, 4)
    hidden = F.relu(F.linear(hidden.reshape(2, 800), network.fc1.weight, network.fc1.bias))
    torch.testing.assert_close(network(images), F.linear(hidden, network.fc2.weight, network.fc2.bias))


def normed(hidden: torch.Tensor, convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> torch.Tensor:
    hidden = F.conv2d(hidden, convolution.weight, convolution.bias, convolution.stride, 1)
    return F.batch_norm(hidden, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5)


@pytest.mark.parametrize(("name", "blocks"), [("resnet-8", 1), ("resnet-20", 3)])
def test_a_resnet_is_what_the_paper_draws(name, blocks):
    """Written out from He et al. (2016), with shortcuts of option A, and from MLPerf Tiny's reference."""
    network = disturbed(build(name))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = F.relu(normed(images, network.conv1, network.bn1))
    for stage in (network.layer1, network.layer2, network.layer3):
        assert len(stage) == blocks
        for block in stage:
            change = F.relu(normed(expected, block.conv1, block.bn1))
            change = normed(change, block.conv2, block.bn2)
            if change.shape != expected.shape:
                if name == "resnet-8":
                    expected = F.conv2d(expected, block.shortcut.weight, block.shortcut.bias, stride=2)
                else:
                    zeros = torch.zeros(2, expected.shape[1] // 2, *change.shape[2:])
                    expected = torch.cat([zeros, expected[:, :, ::2, ::2], zeros], 1)
            expected = F.relu(change + expected)
    assert expected.shape == (2, 64, 8, 8)
    expected = F.linear(expected.mean((2, 3)), network.linear.weight, network.linear.bias)
    with torch.no_grad():
        torch.testing.assert_close(network(images), expected, rtol=1e-4, atol=1e-4)


def test_vgg16_halves_the_sides_five_times():
    layers = list(VGG16().features)
    plan = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)]
    assert plan == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert [index for index, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)] == [6, 13, 23, 33, 43]


@pytest.mark.parametrize("name", ["resnet-8", "resnet-20", "resnet-20-4", "vgg-16"])
def test_first_weights_keep_the_scale_of_activations(name):
    torch.manual_seed(0)
    for layer in build(name).modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            inputs = layer.weight[0].numel()
            # Within five standard errors of √(2 / inputs).
            assert layer.weight.std().item() == pytest.approx(
                (2 / inputs) ** 0.5, rel=5 / (2 * layer.weight.numel()) ** 0.5
            )
            assert layer.bias is None or not layer.bias.any()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_network_is_traced(name):
    network = build(name).eval()
    traced = graph.trace(network, (torch.zeros(2, *network.input_shape),))
    held = {tensor for tensor in network.state_dict() if not tensor.endswith("num_batches_tracked")}
    assert set(traced.tensor_names()) == held
    assert traced.constants == {}


def disturbed(network: nn.Module) -> nn.Module:
    """The network in `eval()`, its norms and biases no longer those it began with."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.ndim == 1:
                low = 0.5 if name.endswith(("running_var", "weight")) else -0.1
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.2 + low)
    return network.eval()


def thinned(network: nn.Module, keep: int) -> nn.Module:
    """The network with one in `keep` channels of each convolution alive: enough to test with, little to code."""
    with torch.no_grad():
        layers = list(network.modules())
        for layer, norm in pairwise(layers):
            if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                dead = torch.arange(layer.out_channels) % keep != 0
                for tensor in (layer.weight, norm.weight, norm.bias, norm.running_mean):
                    assert tensor is not None
                    tensor[dead] = 0
    return network


@pytest.mark.parametrize("name", ["resnet-8", "resnet-20", "vgg-16"])
def test_a_file_gives_back_what_the_network_computes(name, tmp_path):
    torch.manual_seed(0)
    network = disturbed(build(name))
    if name == "vgg-16":
        network = thinned(network, 16)
    with torch.no_grad():
        # Of few values from the start, so that none is lost.
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.copy_((parameter / parameter.std() * 2).round().clamp(-4, 4) * parameter.std() / 2)
    images = torch.randn(5, 3, 32, 32)
    bayeszip.pack(network, example_inputs=(images[:2],), components=256).save(tmp_path / "net.bayz")
    loaded = bayeszip.load(tmp_path / "net.bayz")
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), network(images), rtol=1e-3, atol=1e-3)
        assert network(images).std() > 0.01


def test_each_build_is_a_network_of_its_own():
    first, second = build("lenet-300-100"), build("lenet-300-100")
    assert first.fc1.weight.data_ptr() != second.fc1.weight.data_ptr()


def test_a_shared_parameter_counts_once():
    layer = nn.Linear(3, 3)
    assert parameter_count(nn.Sequential(layer, nn.ReLU(), layer)) == 12
    assert parameter_count(nn.Identity()) == 0


def test_a_lazy_layer_has_no_count():
    with pytest.raises(ModelError, match=r"weight has no shape yet; run"):
        parameter_count(nn.LazyLinear(3))


@pytest.mark.parametrize("factory", ["make", "Net", "Holder.make", "network"])
def test_a_factory_of_the_current_folder(own_models, factory):
    (own_models / "my_nets.py").write_text(
        "from torch import nn\n"
        "def make(): return nn.Linear(2, 5)\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(2, 5)\n"
        "class Holder:\n"
        "    make = staticmethod(make)\n"
        "network = make()\n"
    )
    assert build(f"my_nets:{factory}").weight.shape == (5, 2)


def test_a_factory_may_import_its_neighbor_when_called(own_models):
    (own_models / "neighbor.py").write_text("WIDTH = 7\n")
    (own_models / "late.py").write_text(
        "from torch import nn\ndef make():\n    from neighbor import WIDTH\n    return nn.Linear(1, WIDTH)\n"
    )
    assert build("late:make").out_features == 7


def test_a_factory_of_an_installed_module():
    assert isinstance(build("torch.nn:Identity"), nn.Identity)


@pytest.mark.parametrize("name", ["lenet", "LeNet-5", "", ":", "module:", ":factory"])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(
        ModelError, match=r"unknown model .*lenet-300-100, lenet-5, .*resnet-20, .*vgg-16 or module:factory"
    ):
        build(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("make = 3", "broken:make is a int, not a function"),
        ("def make(): return 'net'", "broken:make returned str, not a torch.nn.Module"),
        ("def make(): return None", "broken:make returned NoneType"),
        ("def make(): raise KeyError('size')", r"broken:make\(\) failed: KeyError: 'size'"),
        ("def make(size): pass", r"broken:make\(\) failed: TypeError: .*size"),
        ("def make(): raise SystemExit(3)", r"broken:make\(\) failed: SystemExit: 3"),
        ("other = 3", r"module broken \(.*broken.py\) has no 'make'"),
        ("def make(:", "importing broken failed: SyntaxError"),
        ("1 / 0", "importing broken failed: ZeroDivisionError"),
        ("import sys; sys.exit(2)", "importing broken failed: SystemExit"),
        ("import no_such_thing_at_all", "importing broken failed: No module named 'no_such_thing_at_all'; install"),
    ],
)
def test_a_factory_that_fails_is_named(own_models, source, message):
    (own_models / "broken.py").write_text(source + "\n")
    with pytest.raises(ModelError, match=message):
        build("broken:make")


@pytest.mark.parametrize("module", ["no_such_module_here", "no_such_package.nets"])
def test_a_missing_module_says_where_it_was_looked_for(own_models, module):
    with pytest.raises(
        ModelError, match=f"there is no module '{module}', neither installed nor in .*{own_models.name}"
    ):
        build(f"{module}:make")


@pytest.mark.parametrize("path", ["own_nets.py", "./own_nets", "../own_nets.py", "models/nets.py"])
def test_a_path_in_place_of_a_module_says_how_to_name_it(own_models, path):
    with pytest.raises(ModelUsageError, match=r"name it as Python imports it, .*: nets:small for nets\.py"):
        build(f"{path}:make")
