"""The built-in networks, and networks named by `module:factory`."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayeszip.errors import ModelError
from bayeszip.models import BUILT_IN, LeNet5, LeNet300, build, parameter_count


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """A current folder into which a test can put modules; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    assert sys.path == path


@pytest.mark.parametrize(("name", "parameters"), [("lenet-300-100", 266_610), ("lenet-5", 431_080)])
def test_parameters_are_the_papers(name, parameters):
    assert parameter_count(build(name)) == parameters


@pytest.mark.parametrize("name", BUILT_IN)
def test_networks_score_ten_classes_for_each_image(name):
    network = build(name)
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    scores = network(images)
    assert scores.shape == (3, 10)
    # Each image is scored on its own.
    torch.testing.assert_close(network(images[1:2]), scores[1:2])


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
    with pytest.raises(ModelError, match=r"unknown model .*lenet-300-100, lenet-5 or module:factory"):
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
