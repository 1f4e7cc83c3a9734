"""What a graph costs in a file: the figures promised."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip import codec
from bayeszip.graph import from_state, trace
from bayeszip.tensors import CompressedModel, QuantizedTensor


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if before != after
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet-18 as in torchvision, an eighth as wide: widths don't matter to the graph."""

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [(8, 8), (8, 16), (16, 32), (32, 64)]
        for number, (before, after) in enumerate(widths, 1):
            blocks = nn.Sequential(Block(before, after, 1 if before == after else 2), Block(after, after, 1))
            self.add_module(f"layer{number}", blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class LeNet300(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


@pytest.mark.parametrize(
    ("net", "shape", "most"), [(LeNet300(), (1, 28, 28), 60), (ResNet18(), (3, 64, 64), 800)], ids=["LeNet", "ResNet"]
)
def test_a_graph_is_small(net, shape, most):
    graph = trace(net, torch.randn(2, *shape))
    zeros = {
        name: QuantizedTensor(np.zeros(parameter.shape, dtype=np.uint8), [0.0])
        for name, parameter in net.named_parameters()
    }
    model = CompressedModel(from_state(net, zeros, graph), graph)
    assert 0 < len(codec.encode(model)) - len(codec.encode(replace(model, graph=None))) < most
