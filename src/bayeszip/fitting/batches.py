"""A batch is a value; a loader gives them, or what can be made one: (inputs, targets), each a tensor or several, in
order or by name; or all in one, by name.
"""

import contextlib
import dataclasses
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from bayeszip.errors import DataError, TrainingError

__all__ = [
    "TARGETS",
    "Batch",
    "ByName",
    "ByPlace",
    "Inputs",
    "Loader",
    "batched_sampler",
    "by_place",
    "called_with",
    "checked_batch",
    "checked_loader",
    "count_batches",
    "count_examples",
    "examples_from",
    "expected_batches",
    "given_by",
    "in_order",
    "in_parts",
    "in_rows",
    "laid_out",
    "mapped",
    "named_arguments",
    "on_device",
    "rows_of",
    "running",
    "sliced",
    "takes",
    "tensors_of",
]

#: What a network is called with: one tensor, or several in order or by name.
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

#: Whatever can be iterated for batches, once for each pass.
Loader = Iterable[Any]

#: Modules whose iterators give what they have once: of generators, of what wraps others, and of torch's loaders.
_SPENT = ("builtins", "itertools", "torch.utils.data.dataloader")

#: Under which of these names a batch that is given by name has its targets.
TARGETS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Batch:
    """Examples for one step; unpacks into inputs and targets."""

    inputs: Inputs
    targets: Inputs
    #: Which rows of the data they are, where that is known.
    rows: Tensor | None = None
    #: The part that they are of what all processes compute together; 0 if the batch was too small for all.
    share: float = 1.0

    def __iter__(self) -> Iterator[Inputs]:
        yield self.inputs
        yield self.targets

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return dataclasses.replace(self, inputs=mapped(self.inputs, moved), targets=mapped(self.targets, moved))


def mapped(part: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """The same form, with `function` of each tensor."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, dict):
        return {name: function(tensor) for name, tensor in part.items()}
    return tuple(map(function, part))


def tensors_of(part: Inputs) -> tuple[Tensor, ...]:
    """All of it, in order."""
    if isinstance(part, Tensor):
        return (part,)
    return tuple(part.values()) if isinstance(part, dict) else part


def checked_loader(loader: Any, name: str, *, once: bool = False) -> None:
    """Refuse a data set in place of a loader of its batches.

    Args:
        once: whether it will do to go through it once.

    Raises:
        DataError: it is one, or can't be iterated at all, or not again.
    """
    if not once and isinstance(loader, Iterator) and type(loader).__module__ in _SPENT:
        raise DataError(
            f"{name} is a {type(loader).__name__}, which gives its batches once; give a list, a DataLoader, or an "
            "object whose __iter__ begins anew"
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise DataError(
            f"{name} is a Dataset ({type(loader).__name__}), which gives examples, not batches; wrap it: "
            "torch.utils.data.DataLoader(dataset, batch_size=…, shuffle=True)"
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(f"{name} must give batches when it is iterated; a {type(loader).__name__} does not")


def checked_batch(batch: Any) -> Batch:
    """What a loader gave as a batch, lists made tuples; by name, what is not the targets is the inputs.

    Raises:
        DataError: it is something else, or has a tensor without a row for each example.
    """
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        return in_rows(_by_name(batch))
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = _tensors(batch[0]), _tensors(batch[1])
        if inputs is not None and targets is not None:
            return in_rows(Batch(inputs, targets))
    parts = ", ".join(type(part).__name__ for part in batch) if isinstance(batch, tuple | list) else ""
    raise DataError(
        "a batch must be (inputs, targets), each a tensor or a tuple of tensors, or tensors by name, "
        f"not {type(batch).__name__}{f' of {parts}' if parts else ''}"
    )


def _by_name(batch: Mapping[str, Any]) -> Batch:
    name = next((name for name in TARGETS if isinstance(batch.get(name), Tensor)), None)
    inputs = {str(key): value for key, value in batch.items() if key != name and isinstance(value, Tensor)}
    if name is None or not inputs:
        raise DataError(
            f"a batch by name needs inputs, and targets under one of {', '.join(TARGETS)}; it has "
            f"{', '.join(map(str, batch)) or 'nothing'}"
        )
    return Batch(inputs, batch[name])


def in_rows(batch: Batch) -> Batch:
    """The same; a number, which has no rows to count, to show a few of or to divide, is refused."""
    for kind, part in (("input", batch.inputs), ("target", batch.targets)):
        for name, tensor in part.items() if isinstance(part, dict) else enumerate(tensors_of(part), start=1):
            if not tensor.dim():
                which = kind if isinstance(part, Tensor) else f"{kind} {name}"
                raise DataError(
                    f"the {which} of a batch is one number, a tensor without dimensions, but every tensor of a batch "
                    "needs an example in each row: repeat the number for each (.expand(n)), make it a part of the "
                    "network, or let the loader collate single examples (batch_size=…)"
                )
    return batch


def _tensors(part: Any) -> Inputs | None:
    if isinstance(part, Tensor):
        return part
    if isinstance(part, Mapping) and part and all(isinstance(tensor, Tensor) for tensor in part.values()):
        return {str(name): tensor for name, tensor in part.items()}
    if isinstance(part, tuple | list) and part and all(isinstance(tensor, Tensor) for tensor in part):
        return tuple(part)
    return None


def given_by(loader: Loader) -> Iterator[Any]:
    """What a loader gives, as it is; where its own code fails, that is told, with the place.

    Raises:
        DataError: reading, computing or collating the data failed. Errors of the caller's own kinds pass.
    """
    try:
        yield from loader
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        # A worker's error has the worker's own traceback in it, and comes from a place in torch.
        where = "" if "Original Traceback" in str(error) else f" ({place.filename}, line {place.lineno})"
        raise DataError(f"the loader fails to give a batch: {type(error).__name__}: {error}{where}") from error


def on_device(loader: Loader, device: torch.device) -> Iterator[Batch]:
    """The batches, checked, on `device`."""
    for batch in given_by(loader):
        yield checked_batch(batch).to(device)


def laid_out(inputs: Inputs) -> Inputs:
    """The same numbers; images that autocast will have a GPU compute in bf16 with their channels last in memory.

    Its convolutions take them that way alone, and keep them so from layer to layer.
    """
    if not torch.is_autocast_enabled("cuda"):
        return inputs
    return mapped(inputs, _channels_last)


def _channels_last(tensor: Tensor) -> Tensor:
    is_images = tensor.is_cuda and tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_images else tensor


def called_with(network: nn.Module, inputs: Inputs) -> Any:
    """What the network says to one input or to several."""
    if isinstance(inputs, Tensor):
        return network(inputs)
    return network(**inputs) if isinstance(inputs, dict) else network(*inputs)


def in_order(network: nn.Module, inputs: Inputs, names: Sequence[str] = ()) -> tuple[Tensor, ...]:
    """The inputs in the order of the network's arguments: a graph knows them by their places.

    Args:
        names: the arguments in their order, where the network doesn't tell.

    Raises:
        DataError: an argument that is not given stands before one that is, or there is none of that name.
    """
    if not isinstance(inputs, dict):
        return tensors_of(inputs)
    known = list(names or inspect.signature(network.forward).parameters)
    leading = [name for name in known if name in inputs]
    strange = sorted(set(inputs) - set(known))
    if strange or leading != known[: len(leading)]:
        missing = next((name for name in known if name not in inputs), "")
        reason = f"it has no argument {strange[0]}" if strange else f"{missing} comes before {leading[-1]}"
        raise DataError(
            f"the inputs {', '.join(inputs)} can't be put in the order of {type(network).__name__}.forward: {reason}. "
            f"Wrap the network in one of your own with `def forward(self, {', '.join(inputs)})` that calls it by name"
        )
    return tuple(inputs[name] for name in leading)


def by_place(network: nn.Module, inputs: Inputs, names: Sequence[str] = ()) -> Inputs:
    """The inputs without their names, where the network knows these not, as one from a file; else as they are.

    Args:
        names: the order of the inputs, from a network that knows them.

    Raises:
        DataError: there are several, and nobody knows their order.
    """
    if not isinstance(inputs, dict) or takes(network, **inputs):
        return inputs
    if names:
        return in_order(network, inputs, names)
    if len(inputs) > 1:
        raise DataError(
            f"the data give {', '.join(inputs)} by name, which {type(network).__name__} does not take; a file knows "
            "inputs by their places alone: load it into its class (into=, --into), or give batches of (inputs, targets)"
        )
    return next(iter(inputs.values()))


def named_arguments(network: nn.Module) -> tuple[str, ...]:
    """The arguments that its `forward` has names for, in order; whatever else it may take is none of them."""
    parameters = inspect.signature(network.forward).parameters.values()
    return tuple(each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))


class ByPlace(nn.Module):
    """A network that may not know the names of its inputs, as one from a file: it is given them in another's order.

    Args:
        names: the arguments of the other, in their order.
    """

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network, self._names = network, tuple(names)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return called_with(self.network, by_place(self.network, named, self._names) if named else inputs)


class ByName(nn.Module):
    """A network that has another's arguments in another order: what it is given by place it is given by their names.

    Args:
        names: the arguments of the other, in their order.
    """

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network, self._names = network, tuple(names)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        # More than there are names for nobody takes.
        return self.network(**dict(zip(self._names, inputs, strict=len(inputs) > len(self._names))), **named)


def examples_from(network: nn.Module, given: Any) -> tuple[Tensor, ...]:
    """Inputs to trace a network with, from what a caller gives: a tensor, several, or a batch as a loader gives it.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(given, Tensor):
        return (given.cpu(),)
    if isinstance(given, Mapping):
        known = inspect.signature(network.forward).parameters
        named = {name: tensor for name, tensor in given.items() if name in known and name not in TARGETS} or dict(given)
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise DataError(f"example_inputs must be tensors; {name} is {type(tensor).__name__}")
        return tuple(tensor.cpu() for tensor in in_order(network, named))
    if not isinstance(given, Iterable):
        raise DataError(f"example_inputs must be tensors, in order or by name, or a batch of the loader, not {given!r}")
    parts = tuple(given)
    if all(isinstance(part, Tensor) for part in parts) and takes(network, *parts):
        return tuple(part.cpu() for part in parts)
    return tuple(tensor.cpu() for tensor in in_order(network, checked_batch(parts).inputs))


def takes(network: nn.Module, /, *inputs: object, **named: object) -> bool:
    """Whether the network can be called with so many inputs, and with others of these names."""
    try:
        inspect.signature(network.forward).bind(*inputs, **named)
    except TypeError:
        return False
    return True


def count_examples(loader: Loader) -> int:
    """N: how many examples a pass has; asks the loader, its sampler or its dataset, or else counts."""
    if hasattr(loader, "n_examples"):
        return int(loader.n_examples)
    for source in (batched_sampler(loader), getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(source, Sized):
            return len(source)
    total = sum(rows_of(checked_batch(batch).targets) for batch in given_by(loader))
    if not total:
        raise DataError("the training data gave no batch; check the loader")
    return total


def batched_sampler(loader: Loader) -> Any:
    """The sampler that batches are drawn by, if there is one.

    With a `batch_sampler` of the caller's a `DataLoader`'s own `sampler` is torch's default, which nobody asks.
    """
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None)


def rows_of(part: Inputs) -> int:
    """How many examples it holds."""
    return len(tensors_of(part)[0])


def sliced(part: Inputs, n: int, low: int, high: int) -> Inputs:
    """The examples from `low` up to `high` of n.

    Raises:
        DataError: a tensor has another number of rows.
    """
    for tensor in tensors_of(part):
        if not tensor.dim() or len(tensor) != n:
            raise DataError(
                f"a batch of {n} targets has a tensor of shape {tuple(tensor.shape)}; to be divided, every tensor of a "
                "batch needs an example in each row"
            )
    return mapped(part, lambda tensor: tensor[low:high])


def in_parts(count: int, *batch: Inputs) -> Iterator[tuple[float, tuple[Inputs, ...]]]:
    """The batch in at most `count` parts of even size, each after its share of the examples."""
    n = rows_of(batch[0])
    count = max(1, min(count, n))
    if count == 1:
        yield 1.0, batch
        return
    for part in range(count):
        low, high = part * n // count, (part + 1) * n // count
        yield (high - low) / n, tuple(sliced(tensors, n, low, high) for tensors in batch)


def count_batches(loader: Loader) -> int | None:
    """How many batches a pass has; None: nobody knows. A loader of a stream has a length that raises."""
    try:
        return max(1, len(loader)) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def expected_batches(n_data: int, rows: int) -> int:
    """How many batches a pass over so many examples has if all have as many rows as the first one."""
    return max(1, math.ceil(n_data / max(1, rows)))


@contextlib.contextmanager
def running(where: str, what: str = "the network or its loss") -> Iterator[None]:
    """What the caller's network, loss or metric can't do with the caller's data, with a name on it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # torch's words where BatchNorm is shown one example alone.
        lonely = "Expected more than 1 value per channel" in str(error)
        alone = "norms need several examples: take larger batches, or leave out a last batch of one example (drop_last)"
        remedy = alone if lonely else "check that they fit the data"
        raise TrainingError(f"{where}: {what} fails on a batch; {remedy}. {type(error).__name__}: {error}") from error
