"""In which mode a network is while it is trained, or looked at: module by module, as its owner left them."""

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["evaluating", "set_training", "trained_norms", "training", "unfreeze"]


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """The network in `eval()`; afterwards each of its modules is in the mode that it was in."""
    with _restored(network):
        network.eval()
        yield


@contextlib.contextmanager
def training(network: nn.Module) -> Iterator[None]:
    """The network as `set_training` leaves it; afterwards each of its modules is in the mode that it was in."""
    with _restored(network):
        set_training(network)
        yield


def set_training(network: nn.Module) -> None:
    """Into `train()`, but for norms that are frozen: their statistics are to stay, like all that is theirs."""
    network.train()
    for layer in _frozen_norms(network):
        layer.eval()


def unfreeze(network: nn.Module) -> None:
    """Have all parameters trained that can be: of a type that has gradients."""
    for parameter in network.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)


def trained_norms(network: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    """Its norms that take statistics, but for those that are frozen."""
    frozen = _frozen_norms(network)
    return [layer for layer in _norms(network) if layer not in frozen]


def _norms(network: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    found = [layer for layer in network.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
    return [layer for layer in found if layer.running_mean is not None]


def _frozen_norms(network: nn.Module) -> set[nn.modules.batchnorm._NormBase]:
    """Those in parts of the network that have parameters, and none to be trained."""
    frozen = set[nn.modules.batchnorm._NormBase]()
    for part in network.modules():
        trained = [parameter.requires_grad for parameter in part.parameters()]
        if trained and not any(trained):
            frozen.update(_norms(part))
    return frozen


@contextlib.contextmanager
def _restored(network: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in network.modules()]
    try:
        yield
    finally:
        # By its own `train` first: a module may pass it on to others than it has.
        network.train(modes[0][1])
        for part, mode in modes:
            part.training = mode
