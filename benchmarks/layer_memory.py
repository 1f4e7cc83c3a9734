"""Time and memory of Gaussian layers on a GPU, against plain ones: whole networks, and layer by layer in both ways.

First steps of ResNet-20 and VGG-16 (CIFAR-10's shapes): forward, loss, backward, Adam; without the divergence and the
mixture, which don't depend on the batch. Then single convolutions, forward and backward, by patches (`gpu_layers`) and
by torch's convolutions (`sampling`), from which `gpu_layers.MOST_PATCHES` is to be set. Needs a GPU with CUDA.

    python benchmarks/layer_memory.py [--batch 256] [--steps 15] [--seconds 50] [--json]
"""

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bayeszip.variational import to_variational
from bayeszip.variational.sampling import VARIANCE_FLOOR, Convolution, sample_product

#: Steps taken before any is timed or recorded: kernels are compiled and chosen, states made.
WARM_UP = 3
GIB = 2**30


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A convolution and its norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions beside a shortcut, which drops pixels and adds channels of zeros where these change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.more = outputs - inputs
        self.first, self.second = convolution(inputs, outputs, self.stride), convolution(outputs, outputs)

    def forward(self, input: Tensor) -> Tensor:
        inside = self.second(F.relu(self.first(input)))
        shortcut = F.pad(input[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(inside + shortcut)


def resnet20() -> nn.Module:
    widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
    blocks = [Block(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(convolution(3, 16), nn.ReLU(), *blocks, *head)


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [convolution(inputs, width), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


NETWORKS = {"ResNet-20": resnet20, "VGG-16": vgg16}
#: Inputs, outputs, stride, pixels on a side, the kernel's side: the convolutions of both networks, and of LeNet-5.
SHAPES = (
    (1, 20, 1, 28, 5),
    (20, 50, 1, 12, 5),
    (3, 16, 1, 32, 3),
    (16, 16, 1, 32, 3),
    (16, 32, 2, 32, 3),
    (32, 32, 1, 16, 3),
    (32, 64, 2, 16, 3),
    (64, 64, 1, 8, 3),
    (64, 64, 1, 32, 3),
    (128, 128, 1, 16, 3),
    (256, 256, 1, 8, 3),
    (512, 512, 1, 4, 3),
    (512, 512, 1, 2, 3),
)


@dataclass(frozen=True)
class Figures:
    """Of one row; `failure` says why there are none."""

    name: str
    ms: float = 0.0
    #: The most that tensors took at any moment, and what the process held of the GPU for it.
    peak_gib: float = 0.0
    held_gib: float = 0.0
    failure: str = ""


def training_step(build: Callable[[], nn.Module], variational: bool, low: bool, batch: int) -> Callable[[], None]:
    """A step of training; `low`: in bf16 by autocast, channels last."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = build().to(device)
    if variational:
        to_variational(network)
    network.train()
    inputs, targets = torch.randn(batch, 3, 32, 32, device=device), torch.arange(batch, device=device) % 10
    if low:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, capturable=device == "cuda", foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        # What autocast caches would not be there when a recorded step is replayed.
        with torch.autocast(device, torch.bfloat16, enabled=low, cache_enabled=False):
            output = network(inputs)
        F.cross_entropy(output.float(), targets).backward()
        optimizer.step()

    return step


def layer_step(shape: tuple[int, ...], by_patches: bool, batch: int) -> Callable[[], None]:
    """One convolution, there and back."""
    inputs, outputs, stride, side, kernel = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    padding = 1 if kernel == 3 else 0
    x = torch.randn(batch, inputs, side, side, device=device, requires_grad=inputs > 3)
    weights = [torch.randn(outputs, inputs, kernel, kernel, device=device, requires_grad=True) for _ in range(2)]

    def step() -> None:
        if by_patches:
            from bayeszip.variational.gpu_layers import Geometry, sample_by_patches

            geometry = Geometry((kernel, kernel), (stride, stride), (padding, padding))
            output = sample_by_patches(x, *weights, None, None, geometry, VARIANCE_FLOOR)
        else:
            product = Convolution((stride, stride), (padding, padding), (1, 1), 1)
            output = sample_product(x, *weights, None, None, product)
        trained = [part for part in (x, *weights) if part.requires_grad]
        torch.autograd.grad(output, trained, torch.ones_like(output))

    return step


def measure(name: str, prepare: Callable[[], Callable[[], None]], recorded: bool, steps: int) -> Figures:
    """Prepare a step and time it, as it is or recorded as a CUDA graph and replayed."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    # One stream for all of it, in which steps can be recorded.
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            milliseconds = _timed(prepare(), recorded, steps)
    except (RuntimeError, ImportError) as error:
        return Figures(name, failure=str(error).partition("\n")[0][:60])
    peak, held = torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - held
    return Figures(name, milliseconds, peak / GIB, held / GIB)


def _timed(step: Callable[[], None], recorded: bool, steps: int) -> float:
    for _ in range(WARM_UP):
        step()
    if recorded:
        # What the steps before held is given back, so that the recording's own memory is what is counted.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
        step = graph.replay
        step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / steps


def rows(batch: int, steps: int) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """The table each row belongs to, and what measures it."""
    for network, low, recorded in itertools.product(NETWORKS, (False, True), (False, True)):
        how = f"{'bf16, channels last' if low else 'fp32 (TF32)'}, {'recorded' if recorded else 'eager'}"
        for variational in (False, True):
            name = f"{network}, {how}, {'Gaussian' if variational else 'plain'}"
            prepare = _later(training_step, NETWORKS[network], variational, low, batch)
            yield "networks", _later(measure, name, prepare, recorded, steps)
    for shape in SHAPES:
        inputs, outputs, stride, side, kernel = shape
        out = (side + (2 if kernel == 3 else 0) - kernel) // stride + 1
        numbers = batch * out * out * inputs * kernel * kernel
        for by_patches in (True, False):
            name = f"{inputs}→{outputs}, {kernel}×{kernel}, stride {stride}, {side}×{side}, {numbers / 2**20:.1f} Mi"
            name += " numbers in patches: " + ("patches" if by_patches else "convolution")
            yield "layers", _later(measure, name, _later(layer_step, shape, by_patches, batch), True, steps)


def _later(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def print_table(title: str, figures: list[Figures]) -> None:
    """Each row beside the one that it is compared with: the first of every two."""
    table = Table("step", title=title)
    for heading in ("ms", "peak GiB", "held GiB", "time over", "memory over"):
        table.add_column(heading, justify="right")
    for place, row in enumerate(figures):
        first = figures[place - place % 2]
        compared = place % 2 and not first.failure and not row.failure
        over = (f"{row.ms / first.ms:.2f}×", f"{row.peak_gib / first.peak_gib:.2f}×") if compared else ("", "")
        cells = (f"{row.ms:.2f}", f"{row.peak_gib:.2f}", f"{row.held_gib:.2f}")
        table.add_row(row.name, *((row.failure, "", "", "", "") if row.failure else (*cells, *over)))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each row")
    parser.add_argument("--seconds", type=float, default=50, help="no row begins later than this")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("layer_memory.py measures a GPU with CUDA, and there is none here")
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    tables: dict[str, list[Figures]] = {"networks": [], "layers": []}
    for table, figures in rows(arguments.batch, arguments.steps):
        late = time.monotonic() - began > arguments.seconds
        tables[table].append(Figures("not measured", failure="out of time") if late else figures())
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "batch": arguments.batch}
    if arguments.json:
        print(json.dumps(machine | {name: [asdict(row) for row in found] for name, found in tables.items()}, indent=2))
        return
    where = f"batch {arguments.batch}, {machine['gpu']}, torch {torch.__version__}"
    print_table(f"A training step, {where}", tables["networks"])
    print_table(f"A convolution there and back, recorded, fp32 (TF32), {where}", tables["layers"])


if __name__ == "__main__":
    main()
