"""Trains the networks of `pack`'s table, on MNIST and CIFAR-10; writes .safetensors files into a folder.

    python benchmarks/pack_networks.py [--only mixer …] [--cifar cifar10:FOLDER] [--output build/pack-networks]

Small networks of several kinds, a few minutes of one core each. SEEN were looked at while `pack` was written; the
others were trained for the table alone.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip import data, models
from bayeszip.fitting import evaluate
from bayeszip.fitting.augmentation import Augmentation
from bayeszip.loaders import load_test

FOLDER = Path(__file__).parents[1] / "build" / "pack-networks"
BATCH = 128


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 192), nn.GELU(), nn.Linear(192, 96), nn.GELU(), nn.Linear(96, 10))


def separable() -> nn.Module:
    """Depthwise and pointwise convolutions, as in MobileNet."""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.BatchNorm2d(inputs)]
        layers += [nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def plain() -> nn.Module:
    """Wide kernels, biases and two large matrices, without norms."""
    layers: list[nn.Module] = [nn.Conv2d(1, 12, 5, 2, 2), nn.ReLU(), nn.Conv2d(12, 32, 5, 2, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10))


class Residual(nn.Module):
    """Sums of what a layer of two convolutions makes of its input, and the input."""

    def __init__(self, width: int = 24, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images)
        for block in self.blocks:
            hidden = F.relu(hidden + block(hidden))
        return self.out(hidden.mean((2, 3)))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021) over 16 patches of 7 × 7 pixels."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.across = nn.ModuleList(_mlp(16, 32) for _ in range(blocks))
        self.within = nn.ModuleList(_mlp(width, 2 * width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        for place, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            hidden = hidden + across(self.norms[2 * place](hidden).transpose(1, 2)).transpose(1, 2)
            hidden = hidden + within(self.norms[2 * place + 1](hidden))
        return self.out(hidden.mean(1))


def _mlp(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


#: name → network, data, epochs
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "convolutional": (convolutional, "mnist", 4),
    "perceptron": (perceptron, "mnist", 6),
    "separable": (separable, "mnist", 4),
    "mixer": (Mixer, "mnist", 5),
    "plain": (plain, "mnist", 4),
    "residual": (Residual, "mnist", 4),
    "resnet-8": (models.BUILT_IN["resnet-8"], "cifar10", 4),
}
SEEN = ("convolutional", "perceptron", "resnet-20")


def train(name: str, cifar: str) -> nn.Module:
    build, spec, epochs = NETWORKS[name]
    spec = cifar if spec == "cifar10" else spec
    torch.manual_seed(0)
    network = build()
    split = data.load_training(spec)[0]
    images, labels = split.images, split.labels
    augment = Augmentation.parse("shift=2,flip" if spec == cifar else "shift=1")
    steps = epochs * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            optimizer.zero_grad()
            F.cross_entropy(network(augment.apply(images[rows])), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NETWORKS, nargs="+", default=list(NETWORKS))
    parser.add_argument("--cifar", default="cifar10")
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        begin = time.perf_counter()
        network = train(name, arguments.cifar)
        save_file(network.state_dict(), arguments.output / f"{name}.safetensors")
        spec = arguments.cifar if NETWORKS[name][1] == "cifar10" else NETWORKS[name][1]
        right = evaluate(network, load_test(spec, device=torch.device("cpu")).loader)
        count = sum(parameter.numel() for parameter in network.parameters())
        print(f"{name}: {count:,} parameters, {100 * right:.2f} %, {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
