"""Images changed at random each time they are seen, on the device where they are.

What moves into an image from outside is zero. So zero must be a background: it is black where pixels lie in [0, 1], as
MNIST's and those of IDX files do, and the mean color where they are normalized, as CIFAR-10's are. Data with another
background need a transform of their own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayeszip.errors import DataError, RecipeError
from bayeszip.fitting.batches import running
from bayeszip.settings import at_least, between, check, setting

__all__ = ["Augmentation", "Transform", "augmented", "known_augment", "name_of"]

#: What a user may give in place of an `Augmentation`: a batch of inputs → as many inputs. It draws its random numbers
#: from torch's global generator, if any.
Transform = Callable[[Any], Any]

_SYNTAX = "give parts such as shift=2, flip, affine=10 (degrees) or affine=10/0.1/0.1 (degrees/scale/shear), cutout=8"


@dataclass(frozen=True)
class Augmentation:
    """How images are changed: turned, scaled and sheared, then shifted and mirrored, then hidden in part, each image by
    its own draw.

    In text `shift=2,flip,affine=10/0.1/0.05,cutout=8`, parts in any order, or `none`.

    Example:
        >>> Augmentation.parse("affine=10, shift=1")
        Augmentation(shift=1, flip=False, rotation=10.0, scale=0.0, shear=0.0, cutout=0)
        >>> str(Augmentation(shift=4, flip=True))
        'shift=4,flip'
    """

    shift: int = setting(0, "by at most so many whole pixels, up or down and left or right", at_least(0))
    flip: bool = setting(False, "every other image, by chance, is mirrored left to right")
    rotation: float = setting(0.0, "by at most so many degrees, either way", between(0, 180))
    scale: float = setting(0.0, "larger or smaller by at most this share", between(0, 0.9))
    shear: float = setting(0.0, "each row moves by at most this many pixels against the next", between(0, 1))
    cutout: int = setting(0, "a square of so many pixels a side is hidden, about any pixel of the image", at_least(0))

    def __post_init__(self) -> None:
        check(self, "augment")

    @classmethod
    def parse(cls, text: str) -> "Augmentation":
        """The augmentation that `text` describes.

        Raises:
            RecipeError: a part is unknown, given twice, or out of range.
        """
        fields: dict[str, Any] = {}
        for part in () if text.strip() == "none" else text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in _PARTS or bool(equals) != (name != "flip"):
                raise RecipeError(f"augment can't be {part.strip()!r}; {_SYNTAX}")
            found = _PARTS[name](value)
            if found.keys() & fields.keys():
                raise RecipeError(f"augment has {name} twice; give it once")
            fields |= found
        return cls(**fields)

    def __str__(self) -> str:
        parts = [f"shift={self.shift}"] if self.shift else []
        parts += ["flip"] if self.flip else []
        affine = [self.rotation, self.scale, self.shear]
        while affine and not affine[-1]:
            affine.pop()
        parts += ["affine=" + "/".join(repr(value).removesuffix(".0") for value in affine)] if affine else []
        parts += [f"cutout={self.cutout}"] if self.cutout else []
        return ",".join(parts) or "none"

    @property
    def moves(self) -> bool:
        """Whether what is in an image may be elsewhere afterwards."""
        return bool(self.shift or self.flip or self.rotation or self.scale or self.shear)

    def apply(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """As many images, N × channels × height × width, each changed by its own draw; the given ones stay as they are.

        All random numbers are drawn on the images' device, the same from the same state of `generator` (None: torch's
        global one), and nothing waits for the device: it can be recorded in a CUDA graph.

        Raises:
            DataError: `images` are no images, or bytes, of which zero may not be the background.
            RecipeError: they are too small to be shifted so far, or to have so much hidden.
        """
        self._check_images(images)
        if self.rotation or self.scale or self.shear:
            images = self._transformed(images, generator)
        if self.shift or self.flip:
            images = self._moved(images, generator)
        if self.cutout:
            images = self._hidden_in_part(images, generator)
        return images

    def _check_images(self, images: Tensor) -> None:
        if images.ndim != 4:
            raise DataError(
                f"augment={self} changes images, N × channels × height × width; inputs have shape {tuple(images.shape)}"
            )
        if not images.is_floating_point():
            raise DataError(f"augment={self} changes images of floats whose background is 0, not of {images.dtype}")
        if self.shift >= min(images.shape[2:]):
            size = " × ".join(map(str, images.shape[2:]))
            raise RecipeError(f"augment.shift={self.shift} would move images of {size} out of sight; choose less")
        if self.cutout >= min(images.shape[2:]):
            size = " × ".join(map(str, images.shape[2:]))
            raise RecipeError(f"augment.cutout={self.cutout} could hide whole images of {size}; choose less")

    def _transformed(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Each image seen through a linear map about its center, values between pixels by bilinear interpolation.

        A pixel at (x, y) takes the value at (u, v) = R(θ) · [[1, h], [0, 1]] · (x, y) / s, with the angle θ, the shear
        h and the scale s drawn uniformly. (Written out, not as `affine_grid`'s matrix product: that may be of reduced
        precision.)
        """
        n, _, height, width = images.shape
        precise = torch.promote_types(images.dtype, torch.float32)
        draws = torch.rand(3, n, 1, 1, generator=generator, device=images.device, dtype=precise) * 2 - 1
        angle, scale, shear = draws[0] * math.radians(self.rotation), 1 + draws[1] * self.scale, draws[2] * self.shear
        y, x = (torch.arange(size, device=images.device, dtype=precise) - (size - 1) / 2 for size in (height, width))
        x, y = x + shear * y[:, None], y[:, None]
        u = (torch.cos(angle) * x - torch.sin(angle) * y) / scale
        v = (torch.sin(angle) * x + torch.cos(angle) * y) / scale
        # `grid_sample` counts from −1 to 1 between the outer edges of the image.
        grid = torch.stack((u * (2 / width), v * (2 / height)), -1)
        return F.grid_sample(images.to(precise), grid, padding_mode="zeros", align_corners=False).to(images.dtype)

    def _moved(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Each image shifted and mirrored by selecting rows and columns of it with a margin of zeros."""
        n, channels, height, width = images.shape
        device = images.device
        offsets = torch.randint(0, 2 * self.shift + 1, (2, n, 1), generator=generator, device=device)
        rows = torch.arange(height, device=device)
        columns = torch.arange(width, device=device)
        if self.flip:
            mirrored = torch.rand(n, 1, generator=generator, device=device) < 0.5
            columns = torch.where(mirrored, width - 1 - columns, columns)
        rows, columns = rows + offsets[0], columns + offsets[1]
        padded = F.pad(images, [self.shift] * 4)
        places = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).reshape(n, 1, height * width)
        return padded.flatten(2).gather(2, places.expand(-1, channels, -1)).view(images.shape)

    def _hidden_in_part(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Each image with a square of zeros about one of its pixels, as far as that lies inside (DeVries and Taylor,
        2017, "Improved Regularization of Convolutional Neural Networks with Cutout")."""
        n, _, height, width = images.shape
        inside = []
        for size in (height, width):
            center = torch.randint(0, size, (n, 1), generator=generator, device=images.device)
            place = torch.arange(size, device=images.device) - center + self.cutout // 2
            inside.append((place >= 0) & (place < self.cutout))
        rows, columns = inside
        return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def known_augment(augment: Any) -> Augmentation | Transform | None:
    """What changes images, from text or as it is; None: nothing does.

    Raises:
        RecipeError: it is neither text that says how, nor an `Augmentation`, nor a function.
    """
    if isinstance(augment, str):
        return Augmentation.parse(augment)
    if augment is not None and not isinstance(augment, Augmentation) and not callable(augment):
        raise RecipeError(f"augment is text, an Augmentation, or a function of a batch, not {augment!r}; {_SYNTAX}")
    return augment


def augmented(
    inputs: Any, augment: Augmentation | Transform | None, generator: torch.Generator | None, targets: Any = None
) -> Any:
    """A batch of inputs as training is to see them; a user's transform is held to give as many as it was given.

    Args:
        targets: those of the batch, which stay as they are.

    Raises:
        DataError: the inputs are none that `augment` can change, or a transform gave something else than a batch; or
            targets say something of each pixel, and pixels would move away under them.
    """
    if augment is None:
        return inputs
    if isinstance(augment, Augmentation):
        if not isinstance(inputs, Tensor):
            raise DataError(f"augment={augment} changes one tensor of images, not {type(inputs).__name__} of inputs")
        lie_in_images = isinstance(targets, Tensor) and targets.dim() > 2 and targets.shape[-2:] == inputs.shape[-2:]
        if lie_in_images and augment.moves:
            raise DataError(
                f"augment={augment} would move images and leave their targets, which have as many rows and columns; "
                "give a loader that changes both alike"
            )
        return augment.apply(inputs, generator)
    with running("augmentation", f"the transform {name_of(augment)}"):
        changed = augment(inputs)
    if _rows(changed) is None or _rows(changed) != _rows(inputs):
        raise DataError(f"the transform {name_of(augment)} must give as many inputs as it is given, in the same form")
    return changed


def name_of(augment: Augmentation | Transform) -> str:
    """An augmentation in words, for records and messages."""
    return (
        str(augment) if isinstance(augment, Augmentation) else getattr(augment, "__qualname__", type(augment).__name__)
    )


def _rows(inputs: Any) -> list[int] | None:
    """How many rows each tensor of a batch has; None if it is no batch of tensors."""
    parts = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
    tensors = list(parts)
    return [len(tensor) for tensor in tensors] if all(isinstance(t, Tensor) and t.ndim for t in tensors) else None


def _pixels(name: str, text: str) -> dict[str, Any]:
    try:
        return {name: int(text)}
    except ValueError:
        raise RecipeError(f"augment's {name} is a whole number of pixels, as in {name}=2, not {text!r}") from None


def _affine(text: str) -> dict[str, Any]:
    names, values = ("rotation", "scale", "shear"), text.split("/")
    try:
        # As many names as values, and an error where these are more.
        return dict(zip(names[: len(values)], map(float, values), strict=True))
    except ValueError:
        raise RecipeError(
            f"augment's affine is degrees[/scale[/shear]], as in affine=10 or affine=10/0.1/0.1, not {text!r}"
        ) from None


#: Names of parts → the fields they set.
_PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "shift": partial(_pixels, "shift"),
    "flip": lambda _: {"flip": True},
    "affine": _affine,
    "cutout": partial(_pixels, "cutout"),
}
