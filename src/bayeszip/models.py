"""The networks of the compression literature, LeNet-300-100 and LeNet-5, and how to name one's own."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from bayeszip.errors import ModelError

__all__ = ["BUILT_IN", "LeNet5", "LeNet300", "build", "build_seeded", "made_by", "parameter_count"]


class LeNet300(nn.Module):
    """LeNet-300-100: three fully connected layers, 784-300-100-10, ReLU between them; 266,610 parameters.

    Example:
        >>> import torch
        >>> LeNet300()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(images.flatten(1)))
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

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return self.fc2(hidden)


#: name → the network it builds, freshly initialized
BUILT_IN: dict[str, Callable[[], nn.Module]] = {"lenet-300-100": LeNet300, "lenet-5": LeNet5}


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
        raise ModelError(f"unknown model {name!r}; give {', '.join(BUILT_IN)} or module:factory")
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


def parameter_count(module: nn.Module) -> int:
    """How many parameters `module` has; one that is used in several places counts once.

    Raises:
        ModelError: a lazy layer has not seen data yet, so nobody knows.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ModelError(f"{name} has no shape yet; run the lazy network once on an example before")
    return sum(parameter.numel() for parameter in module.parameters())


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


def _import(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ModelError(
                f"there is no module {module_name!r}, neither installed nor in {os.getcwd()}; check its name"
            ) from error
        raise ModelError(f"importing {module_name} failed: {error}; install what it needs") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, factory_name: str) -> Any:
    try:
        return reduce(getattr, factory_name.split("."), module)
    except AttributeError as error:
        where = f"module {module.__name__} ({module.__file__})"
        raise ModelError(f"{where} has no {factory_name!r}; name a function or class in it") from error


def _called(factory: Any, name: str) -> Any:
    if not callable(factory):
        raise ModelError(f"{name} is a {type(factory).__name__}, not a function or class to call")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name}() failed: {type(error).__name__}: {error}") from error
