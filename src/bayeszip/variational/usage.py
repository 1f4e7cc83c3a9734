"""By which layers a network computes: a weight may be read by another module than the one that holds it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayeszip.modes import evaluating

__all__ = ["called_layers"]


@torch.no_grad()
def called_layers(network: nn.Module, inputs: Sequence[Tensor]) -> frozenset[str] | None:
    """The paths of the modules that are called for these inputs, in `eval()`; None: the network doesn't take them so.

    Whoever multiplies by `self.embedding.weight` uses the embedding, but doesn't call it.
    """
    called: set[str] = set()
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    fused = torch.backends.mha.get_fastpath_enabled()
    hooks = [
        part.register_forward_pre_hook(lambda module, given, path=path: called.add(path))
        for path, part in network.named_modules(remove_duplicate=False)
    ]
    try:
        # Fused kernels for inference call no layer at all.
        torch.backends.mha.set_fastpath_enabled(False)
        with evaluating(network):
            network(*(each.to(device) for each in inputs))
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return None  # it will be said, in better words, when the network is trained
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for hook in hooks:
            hook.remove()
    return frozenset(called)
