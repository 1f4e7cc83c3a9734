"""An independent judge: Torch-Pruning removes the same planted channels, and both networks compute the same."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayeszip.graph import drop_dead_units, from_state, to_module, trace
from bayeszip.tensors import CompressedModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tp = pytest.importorskip("torch_pruning")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 6, 3, padding=1)
        self.back = nn.Conv2d(6, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.wide = nn.Conv2d(16, 5, 1)
        self.head = nn.Linear(5 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = x + self.back(F.relu(self.inner(x)))
        x = torch.cat([x, F.relu(self.depthwise(x))], 1)
        x = F.adaptive_avg_pool2d(F.relu(self.wide(x)), 2)
        return self.head(torch.flatten(x, 1))


def zero_readers(net: Residual, stream: list[int], inner: list[int], wide: list[int]) -> None:
    """Nobody reads these channels."""
    with torch.no_grad():
        net.inner.weight[:, stream] = 0
        net.wide.weight[:, stream + [8 + each for each in stream]] = 0
        net.back.weight[:, inner] = 0
        for each in wide:
            net.head.weight[:, 4 * each : 4 * each + 4] = 0


def test_both_remove_the_same_channels():
    torch.manual_seed(0)
    net = Residual().eval()
    net.bn.running_mean.normal_()
    zero_readers(net, stream=[1, 6], inner=[0, 4], wide=[2])
    x = torch.randn(2, 3, 7, 7)
    graph = trace(net, x)
    shrunk = drop_dead_units(CompressedModel(from_state(net, graph=graph), graph))
    ours = to_module(shrunk)
    expected = net(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dependencies = tp.DependencyGraph().build_dependency(net, example_inputs=x)
        for layer, channels in ((net.stem, [1, 6]), (net.inner, [0, 4]), (net.wide, [2])):
            dependencies.get_pruning_group(layer, tp.prune_conv_out_channels, idxs=channels).prune()
    theirs = {name: value for name, value in net.state_dict().items() if "num_batches" not in name}

    assert {name: tuple(value.shape) for name, value in ours.state_dict().items()} == {
        name: tuple(value.shape) for name, value in theirs.items()
    }
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs[name])
    assert torch.allclose(net(x), expected, atol=1e-5)
    assert torch.allclose(ours(x), expected, atol=1e-5)
