"""Latency of loaded networks after dead-unit removal, over the originals: torch and onnxruntime, batch 1 and 64.

python benchmarks/latency.py
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip.graph import drop_dead_units, from_state, prove_same, to_module, trace
from bayeszip.graph.onnx import to_onnx
from bayeszip.graph.soundness import states_inputs
from bayeszip.loading import read_model
from bayeszip.models import LeNet5
from bayeszip.tensors import CompressedModel, QuantizedTensor

CODEBOOK = np.linspace(-0.08, 0.08, 9, dtype=np.float32)[[4, 0, 1, 2, 3, 5, 6, 7, 8]]


ROOT = Path(__file__).parents[1]

#: Where trained files lie, the best first.
TRAINED = ("results/table/lenet-5-*.bayz", "benchmarks/networks/lenet-5.bayz")


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        changes = stride > 1 or before != after
        projection = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut = projection if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


def resnet18() -> nn.Module:
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*stem, *(Block(*each) for each in widths), *head)


def pruned(net: nn.Module, x: Tensor, share: float) -> CompressedModel:
    """The network quantized, with a share of the inputs of every inner layer read by nobody."""
    rng, graph, quantized = np.random.default_rng(0), trace(net, x), {}
    for name, parameter in net.named_parameters():
        if parameter.ndim > 1:
            symbols = rng.integers(1, len(CODEBOOK), parameter.shape)
            symbols[rng.random(parameter.shape) < 0.7] = 0
            if "conv2" in name:
                symbols[:, rng.random(parameter.shape[1]) < share] = 0
            quantized[name] = QuantizedTensor(symbols, CODEBOOK)
    return CompressedModel(from_state(net, quantized, graph), graph)


def milliseconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        run()
    for _ in range(25):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def trained() -> tuple[CompressedModel, str]:
    """LeNet-5 as a trained file holds it: the first one there is, and its name."""
    for pattern in TRAINED:
        for path in sorted(ROOT.glob(pattern)):
            return read_model(path), str(path.relative_to(ROOT))
    raise SystemExit(f"no trained LeNet-5 is there: none of {', '.join(TRAINED)}")


def cases() -> Iterator[tuple[str, CompressedModel, CompressedModel, tuple[int, ...]]]:
    """A network's name, itself and what is left of it, as models; and the size of a sample."""
    net, x = LeNet5().eval(), torch.randn(2, 1, 28, 28)
    graph = trace(net, x)
    small, path = trained()
    if small.graph is None or not states_inputs(small.graph):  # an older file
        small = CompressedModel(small.tensors, graph)
    yield f"LeNet-5, {path}", CompressedModel(from_state(net, graph=graph), graph), drop_dead_units(small), (1, 28, 28)
    x = torch.randn(2, 3, 32, 32)
    large = pruned(resnet18().eval(), x, 0.5)
    small = drop_dead_units(large)
    prove_same(large, small, x)
    yield "ResNet-18, half of the inner channels dead (planted)", large, small, (3, 32, 32)


def main() -> None:
    torch.set_num_threads(1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name, large, small, size in cases():
        print(f"{name}: {large.parameters:,} → {small.parameters:,} parameters")
        print(f"{'batch':>8}{'torch':>22}{'onnxruntime':>22}   (ms: original → loaded)")
        networks = [to_module(each) for each in (large, small)]
        sessions = [onnxruntime.InferenceSession(to_onnx(each), options) for each in (large, small)]
        for batch in (1, 64):
            images = torch.randn(batch, *size)
            with torch.no_grad():
                eager = [milliseconds(partial(each, images)) for each in networks]
            feed = images.numpy()
            runtime = [milliseconds(partial(each.run, None, {each.get_inputs()[0].name: feed})) for each in sessions]
            print(f"{batch:8}{eager[0]:12.2f} → {eager[1]:7.2f}{runtime[0]:12.2f} → {runtime[1]:7.2f}")


if __name__ == "__main__":
    main()
