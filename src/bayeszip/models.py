"""The networks of the compression literature, for MNIST and for CIFAR-10, and how to name one's own."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial, reduce
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip.errors import ModelError, ModelUsageError

__all__ = ["BUILT_IN", "VGG16", "LeNet5", "LeNet300", "ResNet", "build", "build_seeded", "made_by", "named"]


class LeNet300(nn.Module):
    """LeNet-300-100: three fully connected layers, 784-300-100-10, ReLU between them; 266,610 parameters.

    Example:
        >>> import torch
        >>> LeNet300()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    #: channels, height and width of the images it is made for
    input_shape: ClassVar = (1, 28, 28)

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        if pixels.shape[1] != 784:
            raise _misfit(self, images)
        hidden = F.relu(self.fc1(pixels))
        hidden = F.relu(self.fc2(hidden))
        return self.fc3(hidden)


class LeNet5(nn.Module):
    """LeNet-5 in Caffe's form: two 5×5 convolutions of 20 and 50 channels, without padding, each followed by 2×2
    max-pooling; fully connected layers of 500 and 10 units; 431,080 parameters.

    Caffe's own file (`lenet.prototxt`) has one ReLU, after the first fully connected layer. The papers this network
    is compared in have one after each hidden layer: the code of Sparse VD (Molchanov et al., 2017) takes the
    rectifier as the default of its convolutions too, and the tutorial of SWS (Ullrich et al., 2017) spells it out.
    So does this network; the number of parameters is the same. Pooling comes before the ReLU, which gives the same
    values as the other order for a quarter of the work.

    Example:
        >>> import torch
        >>> LeNet5()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    #: channels, height and width of the images it is made for
    input_shape: ClassVar = (1, 28, 28)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.input_shape:
            raise _misfit(self, images)
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return self.fc2(hidden)


class ResNet(nn.Module):
    """A residual network for CIFAR-10: a convolution, three stages of blocks that double the channels and halve the
    sides, the mean over the image, and one linear layer; each convolution of 3×3 is followed by a BatchNorm.

    With `blocks=3` it is ResNet-20 of He et al. (2016), section 4.2, with their shortcuts without parameters
    (option A): 269,722 parameters; with `width=64` too, ResNet-20-4, four times as wide: 4,286,026.

    With `blocks=1`, `projection=True` and `bias=True` it is ResNet-8 of MLPerf Tiny, whose shortcuts between stages are
    convolutions of 1×1 without a norm. Its 78,186 parameters are those that the reference trains; the 78,666 that are
    published count running statistics too. The reference pads strided convolutions on one side only, this network on
    both, as torch does.

    Args:
        blocks: residual blocks a stage, of two convolutions each.
        width: channels of the first stage.
        projection: shortcuts between stages are convolutions of 1×1, rather than every other pixel and no more
            channels than there are, the others zero.
        bias: convolutions have biases, also those that a norm follows and cancels.

    Example:
        >>> import torch
        >>> ResNet(blocks=1, width=4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    #: channels, height and width of the images it is made for
    input_shape: ClassVar = (3, 32, 32)

    def __init__(self, blocks: int, width: int = 16, *, projection: bool = False, bias: bool = False) -> None:
        super().__init__()

        def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
            first = _ResidualBlock(inputs, outputs, stride, projection=projection, bias=bias)
            others = (_ResidualBlock(outputs, outputs, projection=projection, bias=bias) for _ in range(blocks - 1))
            return nn.Sequential(first, *others)

        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(width, width, 1)
        self.layer2 = stage(width, 2 * width, 2)
        self.layer3 = stage(2 * width, 4 * width, 2)
        self.linear = nn.Linear(4 * width, 10)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] != 3:
            raise _misfit(self, images)
        hidden = F.relu(self.bn1(self.conv1(images)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        return self.linear(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


class _ResidualBlock(nn.Module):
    """Two convolutions with their norms, and what they are added to: the input, or a shortcut to the next stage."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, *, projection: bool, bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if projection else _PaddedShortcut(outputs - inputs)

    def forward(self, hidden: Tensor) -> Tensor:
        change = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(hidden)))))
        return F.relu(change + self.shortcut(hidden))


class _PaddedShortcut(nn.Module):
    """Every other pixel, and zeros for the channels that the next stage has more; He et al.'s option A."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, hidden: Tensor) -> Tensor:
        # Means of one pixel each: hidden[:, :, ::2, ::2] in one operator of a file.
        halved = F.avg_pool2d(hidden, 1, 2)
        before = self.channels // 2
        return F.pad(halved, (0, 0, 0, 0, before, self.channels - before))


class VGG16(nn.Module):
    """VGG-16 in its form for CIFAR-10: 13 convolutions of 3×3, each with a BatchNorm, max-pooling after the second,
    fourth, seventh, tenth and last, and one linear layer; 14,724,042 parameters.

    Biases of convolutions, which the norms would cancel, are left out.

    Example:
        >>> import torch
        >>> VGG16()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    #: channels, height and width of the images it is made for
    input_shape: ClassVar = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for outputs, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(512, 10)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.input_shape:
            raise _misfit(self, images)
        return self.classifier(self.features(images).flatten(1))


def _initialize(layer: nn.Module) -> None:
    """Weights whose deviation √(2 / inputs) keeps the scale of rectified activations (He et al., 2015, eq. 10)."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _misfit(network: "LeNet300 | LeNet5 | ResNet | VGG16", images: Tensor) -> ModelError:
    made_for, given = (" × ".join(map(str, shape)) for shape in (network.input_shape, images.shape[1:]))
    data, name = ("MNIST", "mnist") if network.input_shape == LeNet5.input_shape else ("CIFAR-10", "cifar10")
    return ModelError(
        f"{type(network).__name__} is made for images of {made_for}, as in {data}, not of {given}; "
        f"give it such images (--data {name}) or choose another network"
    )


#: name → the network it builds, freshly initialized
BUILT_IN: dict[str, Callable[[], nn.Module]] = {
    "lenet-300-100": LeNet300,
    "lenet-5": LeNet5,
    "resnet-8": partial(ResNet, blocks=1, projection=True, bias=True),
    "resnet-20": partial(ResNet, blocks=3),
    "resnet-20-4": partial(ResNet, blocks=3, width=64),
    "vgg-16": VGG16,
}


def build(name: str) -> nn.Module:
    """A network by name: a built-in one, or `module:factory`, where `factory()` returns it.

    `module` is imported as Python imports it, the current folder included; `factory` may be dotted, and may also be
    the network itself.

    Raises:
        ModelError: there is no such name, module or factory, or the factory fails or returns something else.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if not all(name.partition(":")):
        raise ModelUsageError(f"unknown model {name!r}; give {', '.join(BUILT_IN)} or module:factory")
    network = made_by(name)
    if not isinstance(network, nn.Module):
        raise ModelError(f"{name} returned {type(network).__name__}, not a torch.nn.Module")
    return network


def build_seeded(name: str, seed: int) -> nn.Module:
    """The network `name` (see `build`), its first values drawn from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(name)


def made_by(factory_name: str) -> Any:
    """What `module:factory` returns; a network given in place of a factory, as it is.

    Raises:
        ModelError: there is no such module or factory, or the factory fails.
    """
    module_name, _, name = factory_name.partition(":")
    with _current_folder_importable():
        factory = _attribute(_import(module_name), name)
        return factory if isinstance(factory, nn.Module) else _called(factory, factory_name)


def named(name: str) -> Any:
    """What `module:name` stands for, as it is.

    Raises:
        ModelError: there is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = name.partition(":")
    with _current_folder_importable():
        return _attribute(_import(module_name), attribute)


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """An installed command, unlike `python -m`, does not look for modules in the current folder by itself."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be younger than the finder's last look
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


_BY_NAME = "name it as Python imports it, from the current folder on: nets:small for nets.py, models.nets:small"


def _import(module_name: str) -> ModuleType:
    if "/" in module_name or os.sep in module_name or module_name.startswith("."):
        raise ModelUsageError(f"{module_name!r} is a path; {_BY_NAME}")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            remedy = _BY_NAME if module_name.endswith(".py") else "check its name"
            raise ModelUsageError(
                f"there is no module {module_name!r}, neither installed nor in {os.getcwd()}; {remedy}"
            ) from error
        raise ModelError(f"importing {module_name} failed: {error}; install what it needs") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, factory_name: str) -> Any:
    try:
        return reduce(getattr, factory_name.split("."), module)
    except AttributeError as error:
        where = f"module {module.__name__} ({module.__file__})"
        raise ModelUsageError(f"{where} has no {factory_name!r}; name a function or class in it") from error


def _called(factory: Any, name: str) -> Any:
    if not callable(factory):
        raise ModelUsageError(f"{name} is a {type(factory).__name__}, not a function or class to call")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name}() failed: {type(error).__name__}: {error}") from error
