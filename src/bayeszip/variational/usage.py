"""By which layers a network computes: a weight may be read by another module than the one that holds it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayeszip.modes import evaluating

__all__ = ["called_layers"]


@torch.no_grad()
def called_layers(network: nn.Module, inputs: Sequence[Tensor]) -> frozenset[str] | None:
    """The paths of the modules that are called for these inputs, in `eval()`; None: the network doesn't take them so.

    Whoever multiplies by `self.embedding.weight` uses the embedding, but doesn't call it. Where a layer is called and
    its weights are read by others as well, as those of an encoder by its decoder, it doesn't count as called either.
    """
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    fused, trial, cached = torch.backends.mha.get_fastpath_enabled(), _Trial(network), torch.is_autocast_cache_enabled()
    hooks = [hook for part in network.modules() for hook in trial.hooks_on(part)]
    try:
        # Fused kernels for inference call no layer at all.
        torch.backends.mha.set_fastpath_enabled(False)
        # Who comes second would read a copy of the weight that was made for the first.
        torch.set_autocast_cache_enabled(False)
        # What is compiled would be looked at when it is, not when it runs.
        with evaluating(network), torch.compiler.set_stance("force_eager"), trial:
            network(*(each.to(device) for each in inputs))
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return None  # it will be said, in better words, when the network is trained
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch.set_autocast_cache_enabled(cached)
        for hook in hooks:
            hook.remove()
    parts = network.named_modules(remove_duplicate=False)
    return frozenset(path for path, part in parts if id(part) in trial.called and not trial.is_read_elsewhere(part))


class _Trial(TorchDispatchMode):
    """Notes which modules are called, and what is computed with parameters while no module that holds them runs.

    It sees tensors where they are computed with: who asks for a weight's type or shape reads nothing.
    """

    #: Else torch refuses operators that take functions, such as `flex_attention`.
    supports_higher_order_operators = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        #: Modules, by their identity.
        self.called: set[int] = set()
        self._running: list[int] = []
        self._read: set[int] = set()
        #: The modules that hold parameters, by where these lie.
        self._holders: dict[int, set[int]] = {}
        for part in network.modules():
            for place in _places(part):
                self._holders.setdefault(place, set()).add(id(part))

    def hooks_on(self, part: nn.Module) -> Iterator[Any]:
        """Hooks that tell when it runs; what its own hooks do is part of that."""

        def begin(module: nn.Module, given: Any) -> None:
            self.called.add(id(part))
            self._running.append(id(part))

        def end(module: nn.Module, given: Any, outputs: Any) -> None:
            self._running.pop()

        yield part.register_forward_pre_hook(begin, prepend=True)
        yield part.register_forward_hook(end, always_call=True)

    def is_read_elsewhere(self, part: nn.Module) -> bool:
        """Whether a module that doesn't hold them computed with one of its own parameters."""
        return any(place in self._read for place in _places(part))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._running and not _reads_nothing(func):
            places = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self._read.update(
                place for place in places if self._running[-1] not in self._holders.get(place, self._running)
            )
        return func(*args, **(kwargs or {}))


def _reads_nothing(func: Any) -> bool:
    """Whether an operator gives the same elements under another name, or none but the form of a tensor."""
    name = str(getattr(func, "__name__", "")).partition(".")[0]
    return name in ("detach", "alias") or name.startswith("new_") or name.endswith("_like")


def _places(part: nn.Module) -> list[int]:
    """Where the parameters of a module's own lie that have any elements."""
    return [place for parameter in part.parameters(recurse=False) if (place := _place(parameter))]


def _place(tensor: Tensor) -> int:
    """Where a tensor begins in memory, as its `.data` does too; 0: nowhere."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0  # a sparse one, or of a class that keeps its elements otherwise
