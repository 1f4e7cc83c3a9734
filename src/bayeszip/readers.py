"""Who reads what while a network computes: which module multiplies by a weight, or takes what a layer computed."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Readers", "place_of", "reading"]


@contextlib.contextmanager
def reading(network: nn.Module) -> Iterator["Readers"]:
    """The readers of the network's parameters, and of what else is followed, while it is called."""
    readers = Readers(network)
    hooks = [hook for part in network.modules() for hook in readers.hooks_on(part)]
    try:
        with _LAYER_BY_LAYER, readers:
            yield readers
    finally:
        for hook in hooks:
            hook.remove()


class _LayerByLayer:
    """While it is entered networks compute by calling their layers; several threads may be in it at a time.

    Both switches are those of the whole process, so that the first to come sets them and the last to go sets them back.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                # Fused kernels for inference call no layer at all.
                self._before.callback(
                    torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
                )
                torch.backends.mha.set_fastpath_enabled(False)
                # What is compiled would be looked at when it is, not when it runs.
                self._before.enter_context(torch.compiler.set_stance("force_eager"))
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.close()


_LAYER_BY_LAYER = _LayerByLayer()


class Readers(TorchDispatchMode):
    """Notes which modules are called, and by which of them tensors are read: the innermost that runs.

    It sees tensors where they are computed with: who asks for a weight's type or shape reads nothing.
    """

    #: Else torch refuses operators that take functions, such as `flex_attention`.
    supports_higher_order_operators = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        #: Modules, by their identity.
        self.called: set[int] = set()
        self._running: list[int] = []
        #: The modules that read what lies at a place.
        self._by: dict[int, set[int]] = {}
        #: What a copy of a parameter was made from, and the copy, since another tensor might come to lie in its place.
        self._copied: dict[int, tuple[int, Tensor]] = {}
        #: The modules that hold the parameters at a place.
        self._holders: dict[int, set[int]] = {}
        for part in network.modules():
            for parameter in part.parameters(recurse=False):
                self.follow(parameter)
                self._holders.setdefault(place_of(parameter), set()).add(id(part))

    def follow(self, tensor: Tensor) -> None:
        """From now on notes its readers too; it must not be given up before they are asked for."""
        if place := place_of(tensor):
            self._by.setdefault(place, set())

    def of(self, tensor: Tensor) -> frozenset[int]:
        """The modules that read a tensor which is followed, by their identity."""
        return frozenset(self._by.get(place_of(tensor), ()))

    def are_elsewhere(self, part: nn.Module) -> bool:
        """Whether a module that doesn't hold them computed with one of its own parameters."""
        # What is replaced in the midst of a call, as by a change of its type, lies where nobody looked.
        return any(self.of(own) - self._holders.get(place_of(own), set()) for own in part.parameters(recurse=False))

    def hooks_on(self, part: nn.Module) -> Iterator[Any]:
        """Hooks that tell when it runs; what its own hooks do is part of that."""

        def begin(module: nn.Module, given: Any) -> None:
            self.called.add(id(part))
            self._running.append(id(part))

        def end(module: nn.Module, given: Any, outputs: Any) -> None:
            self._running.pop()

        yield part.register_forward_pre_hook(begin, prepend=True)
        yield part.register_forward_hook(end, always_call=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._running or _reads_nothing(func):
            return func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (readers := self._by.get(self._source(leaf))) is not None:
                readers.add(self._running[-1])
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (source := place_of(args[0])) in self._holders:
            # Autocast keeps it for whoever computes with the parameter next.
            self._copied[place_of(made)] = source, made
        return made

    def _source(self, tensor: Tensor) -> int:
        place = place_of(tensor)
        return self._copied[place][0] if place in self._copied else place


def _reads_nothing(func: Any) -> bool:
    """Whether an operator gives the same elements under another name, or none but the form of a tensor."""
    name = str(getattr(func, "__name__", "")).partition(".")[0]
    return name in ("detach", "alias") or name.startswith("new_") or name.endswith("_like")


def place_of(tensor: Tensor) -> int:
    """Where a tensor begins in memory, as its `.data` does too; 0: nowhere."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0  # a sparse one, or of a class that keeps its elements otherwise
