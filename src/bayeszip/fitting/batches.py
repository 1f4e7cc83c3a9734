"""A batch is a value; a loader gives them, or what can be made one: (inputs, targets), each a tensor or several."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from bayeszip.errors import DataError, TrainingError

__all__ = [
    "Batch",
    "Inputs",
    "Loader",
    "called_with",
    "checked_batch",
    "count_batches",
    "count_examples",
    "in_parts",
    "laid_out",
    "on_device",
    "rows_of",
    "running",
    "sliced",
]

#: What a network is called with: one tensor, or several in order.
Inputs = Tensor | tuple[Tensor, ...]

#: Whatever can be iterated for batches, once for each pass.
Loader = Iterable[Any]


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
        return dataclasses.replace(self, inputs=_moved(self.inputs, device), targets=_moved(self.targets, device))


def checked_batch(batch: Any) -> Batch:
    """What a loader gave as a batch, lists made tuples.

    Raises:
        DataError: it is something else.
    """
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, targets = _tensors(batch[0]), _tensors(batch[1])
        if inputs is not None and targets is not None:
            return Batch(inputs, targets)
    parts = ", ".join(type(part).__name__ for part in batch) if isinstance(batch, tuple | list) else ""
    raise DataError(
        "a batch must be (inputs, targets), each a tensor or a tuple of tensors, "
        f"not {type(batch).__name__}{f' of {parts}' if parts else ''}"
    )


def _tensors(part: Any) -> Inputs | None:
    if isinstance(part, Tensor):
        return part
    if isinstance(part, tuple | list) and part and all(isinstance(tensor, Tensor) for tensor in part):
        return tuple(part)
    return None


def on_device(loader: Loader, device: torch.device) -> Iterator[Batch]:
    """The batches, checked, on `device`."""
    for batch in loader:
        yield checked_batch(batch).to(device)


def _moved(part: Inputs, device: torch.device) -> Inputs:
    if isinstance(part, Tensor):
        return part.to(device, non_blocking=True)
    return tuple(tensor.to(device, non_blocking=True) for tensor in part)


def laid_out(inputs: Inputs) -> Inputs:
    """The same numbers; images that autocast will have a GPU compute in bf16 with their channels last in memory.

    Its convolutions take them that way alone, and keep them so from layer to layer.
    """
    if not torch.is_autocast_enabled("cuda"):
        return inputs
    if not isinstance(inputs, Tensor):
        return tuple(cast(Tensor, laid_out(tensor)) for tensor in inputs)
    is_images = inputs.is_cuda and inputs.dim() == 4 and inputs.is_floating_point()
    return inputs.contiguous(memory_format=torch.channels_last) if is_images else inputs


def called_with(network: nn.Module, inputs: Inputs) -> Any:
    """What the network says to one input or to several."""
    return network(inputs) if isinstance(inputs, Tensor) else network(*inputs)


def count_examples(loader: Loader) -> int:
    """N: how many examples a pass has; asks the loader, its sampler or its dataset, or else counts."""
    if hasattr(loader, "n_examples"):
        return int(loader.n_examples)
    for source in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(source, Sized):
            return len(source)
    total = sum(rows_of(checked_batch(batch).targets) for batch in loader)
    if not total:
        raise DataError("the training data gave no batch; check the loader")
    return total


def rows_of(part: Inputs) -> int:
    """How many examples it holds."""
    return len(part if isinstance(part, Tensor) else part[0])


def sliced(part: Inputs, n: int, low: int, high: int) -> Inputs:
    """The examples from `low` up to `high` of n.

    Raises:
        DataError: a tensor has another number of rows.
    """
    for tensor in (part,) if isinstance(part, Tensor) else part:
        if not tensor.dim() or len(tensor) != n:
            raise DataError(
                f"a batch of {n} targets has a tensor of shape {tuple(tensor.shape)}; to be divided, every tensor of a "
                "batch needs an example in each row"
            )
    return part[low:high] if isinstance(part, Tensor) else tuple(tensor[low:high] for tensor in part)


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


def count_batches(loader: Loader) -> int:
    """How many batches a pass has; 1 where nobody knows. A loader of a stream has a length that raises."""
    try:
        return max(1, len(loader)) if isinstance(loader, Sized) else 1
    except TypeError:
        return 1


@contextlib.contextmanager
def running(where: str) -> Iterator[None]:
    """What the caller's network or loss can't do with the caller's data, with a name on it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # torch's words where BatchNorm is shown one example alone.
        lonely = "Expected more than 1 value per channel" in str(error)
        remedy = "leave out a last batch of one example (drop_last)" if lonely else "check that they fit the data"
        raise TrainingError(
            f"{where}: the network or its loss fails on a batch; {remedy}. {type(error).__name__}: {error}"
        ) from error
