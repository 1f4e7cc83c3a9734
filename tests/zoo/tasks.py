"""Kinds that differ by their task: classes, images, pairs, outputs by name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import Kind, add

__all__ = ["AUTOENCODER", "CNN", "DICT", "MLP", "SEGMENTATION", "SIAMESE", "UNET"]


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _clouds(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Five classes of 24 features, six of which tell."""
    labels = torch.arange(count) % 5
    inputs = _noise(seed, count, 24)
    inputs[:, :6] += 4 * F.one_hot(labels, 6)
    return inputs, labels


def _bars(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of 12 × 12 with a bright bar; the class is the place and direction of the bar."""
    labels = torch.arange(count) % 4
    images = 0.5 * _noise(seed, count, 1, 12, 12)
    for index, label in enumerate(labels.tolist()):
        place = 3 + 5 * (label % 2)
        rows = (place, slice(None)) if label < 2 else (slice(None), place)
        images[index, 0][rows] += 1.5
    return images, labels


def _blurred(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images, and the smooth ones below the noise."""
    coarse = _noise(seed, count, 1, 4, 4)
    smooth = F.interpolate(coarse, size=(16, 16), mode="bilinear", align_corners=False)
    return smooth + 0.3 * _noise(seed + 100, count, 1, 16, 16), smooth


def _low_rank(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points near a curved surface of four dimensions in 32."""
    inputs = torch.tanh(_noise(seed, count, 4) @ _noise(7, 4, 32)) + 0.1 * _noise(seed + 100, count, 32)
    return inputs, inputs


def _pairs(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two noisy views, of one of eight prototypes (1) or of two (0)."""
    same = torch.arange(count) % 2
    prototypes = 2 * _noise(7, 8, 16)
    first = torch.randint(8, (count,), generator=torch.Generator().manual_seed(seed))
    second = torch.where(same == 1, first, (first + 1 + torch.arange(count) % 7) % 8)
    left, right = (
        prototypes[which] + 0.4 * _noise(seed + 100 + k, count, 16) for k, which in enumerate((first, second))
    )
    return (left, right), same


def _squares(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images, and the class of each pixel: background, or one of two brightnesses."""
    masks = torch.zeros(count, 12, 12, dtype=torch.int64)
    places = torch.randint(0, 7, (count, 2), generator=torch.Generator().manual_seed(seed))
    for index, (top, left) in enumerate(places.tolist()):
        masks[index, top : top + 5, left : left + 5] = 1 + index % 2
    return (masks[:, None] * 1.5 - 1) + 0.4 * _noise(seed + 100, count, 1, 12, 12), masks


class UNet(nn.Module):
    """Two floors, one bridge."""

    def __init__(self, channels: int = 8, outputs: int = 1) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, channels, 3, padding=1)
        self.deep = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.out = nn.Conv2d(2 * channels, outputs, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        high = F.relu(self.down(images))
        low = F.relu(self.deep(F.max_pool2d(high, 2)))
        return self.out(torch.cat([high, F.relu(self.up(low))], 1))


class Siamese(nn.Module):
    """One body for two inputs, and what it thinks of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head((self.body(left) - self.body(right)).abs())


class Named(nn.Module):
    """Says more than one thing, each by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(24, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        hidden = F.relu(self.body(features))
        return {"logits": self.head(hidden), "hidden": hidden}


def named_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """A loss that takes outputs by name."""
    return F.cross_entropy(outputs["logits"], targets)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 5))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),  # which is what there is, of images of 12 × 12
        nn.Flatten(),
        nn.Linear(108, 4),
    )


def _autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 6), nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 32))


MLP = add(Kind("MLP", _mlp, _clouds, (7, 24)))
CNN = add(Kind("CNN with BatchNorm", _cnn, _bars, (3, 1, 20, 26), epochs=8))
UNET = add(Kind("U-Net", UNet, _blurred, (3, 1, 24, 20), F.mse_loss, examples=128, epochs=40, size=16))
AUTOENCODER = add(Kind("autoencoder", _autoencoder, _low_rank, (7, 32), F.mse_loss, epochs=100))
SIAMESE = add(Kind("Siamese", Siamese, _pairs, (7, 16)))
DICT = add(Kind("dict of outputs", Named, _clouds, (7, 24), named_loss))
SEGMENTATION = add(
    Kind("segmentation", lambda: UNet(outputs=3), _squares, (3, 1, 20, 16), examples=128, epochs=30, size=16)
)
