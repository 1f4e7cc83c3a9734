"""By which layers a network computes: a weight may be read by another module than the one that holds it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayeszip.modes import evaluating
from bayeszip.readers import reading

__all__ = ["called_layers"]


@torch.no_grad()
def called_layers(network: nn.Module, inputs: Sequence[Tensor]) -> frozenset[str] | None:
    """The paths of the modules that are called for these inputs, in `eval()`; None: the network doesn't take them so.

    Whoever multiplies by `self.embedding.weight` uses the embedding, but doesn't call it. Where a layer is called and
    its weights are read by others as well, as those of an encoder by its decoder, it doesn't count as called either.
    """
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    try:
        with evaluating(network), reading(network) as readers:
            network(*(each.to(device) for each in inputs))
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return None  # it will be said, in better words, when the network is trained
    parts = network.named_modules(remove_duplicate=False)
    return frozenset(path for path, part in parts if id(part) in readers.called and not readers.are_elsewhere(part))
