"""What a fitting moves, as tensors and plain values: weights, optimizer, random numbers, the place in the data."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.errors import CheckpointError, DataError
from bayeszip.fitting.batches import Loader, batched_sampler, given_by
from bayeszip.variational.layers import Live, VariationalLayer

__all__ = [
    "Passes",
    "load_module_state",
    "load_optimizer_state",
    "load_random_state",
    "module_state",
    "optimizer_state",
    "random_state",
    "snapshot",
]


def module_state(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, the non-persistent ones too, and which rows and columns compaction has left."""
    layers = ((path, layer) for path, layer in module.named_modules() if isinstance(layer, VariationalLayer))
    return {
        "tensors": {name: tensor.detach() for name, tensor in _tensors(module)},
        "live": {path: list(layer.live) for path, layer in layers if layer.live is not None},
    }


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """What `module_state` gave, into a module of the same structure; shapes may differ by compaction.

    Raises:
        CheckpointError: names a tensor that only one of both has.
    """
    held, own = state["tensors"], dict(_tensors(module))
    for name in (*held, *own):
        if (name in held) != (name in own):
            where = "the checkpoint" if name in held else "the network"
            raise CheckpointError(f"only {where} has a tensor {name}; was the network's code changed?")
    for name, tensor in own.items():
        value = held[name]
        if tensor.shape == value.shape:
            tensor.data.copy_(value)
        else:
            tensor.data = value.to(tensor.device, copy=True)
        tensor.grad = None
    for path, layer in module.named_modules():
        if isinstance(layer, VariationalLayer):
            layer.live = _live(state["live"].get(path), layer)


def _live(held: Sequence[Any] | None, layer: VariationalLayer) -> Live | None:
    if held is None:
        return None
    rows, columns, full_shape = held
    return Live(rows.to(layer.weight.device), columns.to(layer.weight.device), torch.Size(full_shape))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the optimizer remembers of each parameter, in order. Its settings are the phase's."""
    return [dict(optimizer.state.get(parameter, {})) for parameter in _parameters(optimizer)]


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Sequence[Mapping[str, Any]]) -> None:
    parameters = list(_parameters(optimizer))
    if len(parameters) != len(state):
        raise CheckpointError(f"the checkpoint's optimizer moves {len(state)} tensors, this one {len(parameters)}")
    optimizer.state.clear()
    for parameter, remembered in zip(parameters, state, strict=True):
        if remembered:
            optimizer.state[parameter] = {name: _beside(value, parameter) for name, value in remembered.items()}


def _beside(value: Any, parameter: Tensor) -> Any:
    """A copy on the parameter's device; laid out as the parameter, as fused kernels expect it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def random_state(*generators: torch.Generator | None) -> dict[str, Any]:
    """All random numbers that a training may draw: torch's, those of `generators`, numpy's and Python's own."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else [],
        "generators": [None if generator is None else generator.get_state() for generator in generators],
        # The user's data sets may draw from this one.
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "python": random.getstate(),
    }


def load_random_state(state: Mapping[str, Any], *generators: torch.Generator | None) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    for generator, held in zip(generators, state["generators"], strict=False):
        if generator is not None and held is not None:
            generator.set_state(held)
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])


def snapshot(state: Any, before: Any = None) -> Any:
    """A copy of a state that later steps don't change, in the memory of the snapshot before it where that fits.

    A few calls for all tensors together: on a GPU an epoch may take no longer than a call for each of them would.
    """
    pairs: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}

    def copied(value: Any, old: Any) -> Any:
        if isinstance(value, Tensor):
            fits = isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (
                value.shape, value.dtype, value.device
            )  # fmt: skip
            target = old if fits else torch.empty_like(value)
            targets, sources = pairs.setdefault((value.device, value.dtype), ([], []))
            targets.append(target)
            sources.append(value)
            return target
        if isinstance(value, dict):
            return {key: copied(entry, old.get(key) if isinstance(old, dict) else None) for key, entry in value.items()}
        if isinstance(value, list):
            olds = old if isinstance(old, list) and len(old) == len(value) else [None] * len(value)
            return [copied(entry, its_old) for entry, its_old in zip(value, olds, strict=True)]
        return value

    result = copied(state, before)
    for targets, sources in pairs.values():
        torch._foreach_copy_(targets, sources)
    return result


class Passes:
    """Passes over a loader, that can be taken up in the middle of one.

    A loader with `state_dict` and `load_state_dict` is asked where it is. Of any other the pass is begun again with the
    random numbers it began with, and what was given already is skipped: the same batches follow if the loader's order
    depends on those random numbers alone, as torch's `DataLoader` does, with workers or without.
    """

    def __init__(self, batches: Loader) -> None:
        self.batches = batches
        self._knows = all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict"))
        #: Those that a `DataLoader` and its samplers draw from, where they don't use torch's own.
        samplers = (
            getattr(batches, "sampler", None),
            getattr(batches, "batch_sampler", None),
            batched_sampler(batches),
        )
        found = [getattr(part, "generator", None) for part in (batches, *samplers)]
        self.generators = [part for part in found if isinstance(part, torch.Generator)]
        self._began: dict[str, Any] | None = None
        # A pass that somebody began before, and left, is not the one that will be saved.
        leave = getattr(batches, "end_pass", None)
        if callable(leave):
            leave()

    def rest(self, given: int) -> Iterator[Any]:
        """What this pass has not given yet, of which `given` batches are over."""
        batches = given_by(self.batches)
        if self._knows:
            yield from batches
            return
        if given == 0 or self._began is None:
            self._began = random_state(*self.generators)
            yield from batches
            return
        now = random_state(*self.generators)
        load_random_state(self._began, *self.generators)
        for skipped in range(given):
            if next(batches, None) is None:
                raise DataError(f"the loader ends after {skipped} batches, but gave {given} before; was it changed?")
        load_random_state(now, *self.generators)
        yield from batches

    def state_dict(self) -> dict[str, Any]:
        if self._knows:
            return {"batches": self.batches.state_dict()}  # type: ignore[attr-defined]
        return {"began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._knows and "batches" in state:
            self.batches.load_state_dict(state["batches"])  # type: ignore[attr-defined]
        self._began = state.get("began")
