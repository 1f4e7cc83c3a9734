"""Batches of tensors that already are where they are needed."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bayeszip.errors import DataError
from bayeszip.fitting.augmentation import Augmentation, Transform, augmented
from bayeszip.fitting.batches import Batch

__all__ = ["ResidentBatches"]


class ResidentBatches:
    """Batches of tensors that lie on a device; the same seed gives the same batches in order.

    Each pass makes one permutation on the tensors' device and selects from it, without waiting for a GPU.

    Args:
        inputs: one row an example.
        targets: as many rows, on the same device.
        batch_size: rows a batch; the last batch holds the remainder.
        shuffle: a new order for each pass; otherwise batches are slices, in order.
        seed: start of the orders, and of what `augment` draws.
        drop_last: leave the remainder out.
        augment: changes the inputs of every batch that is given, on their device.

    Example:
        >>> x, y = torch.arange(5.0), torch.arange(5)
        >>> [y.tolist() for _, y in ResidentBatches(x, y, 2)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        augment: Augmentation | Transform | None = None,
    ) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{len(inputs)} inputs and {len(targets)} targets don't match")
        if inputs.device != targets.device:
            raise DataError(f"inputs on {inputs.device} and targets on {targets.device}; move them to one device")
        if batch_size < 1:
            raise DataError(f"a batch holds at least 1 example, not {batch_size}")
        self.inputs, self.targets = inputs, targets
        self.batch_size, self.shuffle, self.drop_last, self.augment = batch_size, shuffle, drop_last, augment
        self._generator = torch.Generator(inputs.device).manual_seed(seed)
        #: What `augment` draws from.
        self.augmenting = torch.Generator(inputs.device).manual_seed(seed)
        self._pass_began = self._generator.get_state()
        self._given = 0
        self._skip = 0

    @property
    def n_examples(self) -> int:
        """How many examples there are, those that `drop_last` leaves out included."""
        return len(self.targets)

    def __len__(self) -> int:
        n = self.n_examples
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order, skip = self.begin_pass()
        for index in range(skip, len(self)):
            self.given(index + 1)
            yield self.batch(order, index)
        self.end_pass()

    def begin_pass(self) -> tuple[Tensor | None, int]:
        """The rows in the order of the pass that begins (None: as they lie), and how many batches it skips.

        With `batch`, `given` and `end_pass` what iterating does, for whoever iterates in a way of his own.
        """
        self._pass_began = self._generator.get_state()
        skip, self._skip = self._skip, 0
        if not self.shuffle:
            return None, skip
        return torch.randperm(self.n_examples, generator=self._generator, device=self.inputs.device), skip

    def batch(self, order: Tensor | None, index: int) -> Batch:
        """The batch at `index` of a pass in this order."""
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        if order is not None:
            return self.select(order[rows])
        return Batch(self._augmented(self.inputs[rows]), self.targets[rows])

    def select(self, rows: Tensor) -> Batch:
        """The batch of these rows."""
        inputs = self._augmented(self.inputs.index_select(0, rows))
        return Batch(inputs, self.targets.index_select(0, rows), rows)

    def _augmented(self, inputs: Tensor) -> Tensor:
        changed: Tensor = augmented(inputs, self.augment, self.augmenting, self.targets)
        return changed

    def augmented_by(self, augment: Augmentation | Transform) -> "ResidentBatches":
        """The same data in the same order, changed by `augment` each time they are given."""
        other = copy.copy(self)
        other.augment = augment
        return other

    def first(self, examples: int) -> "ResidentBatches":
        """Batches of the first examples alone, in orders of their own."""
        other = copy.copy(self)
        other.inputs, other.targets = self.inputs[:examples], self.targets[:examples]
        other._generator = torch.Generator(self.inputs.device).manual_seed(0)
        other.augmenting = torch.Generator(self.inputs.device).manual_seed(0)
        other._skip = other._given = 0
        return other

    def given(self, batches: int) -> None:
        """Note that this pass has given so many batches."""
        self._given = batches

    def end_pass(self) -> None:
        """The next pass begins where the random numbers of this one ended."""
        self._given = 0
        self._pass_began = self._generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        """Where the batches stand: the random states, that of the order as this pass began, and how many are given."""
        return {
            "generator": self._pass_began.clone(),
            "augmenting": self.augmenting.get_state(),
            "given": self._given,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state` was taken: the rest of that pass, then passes as they would follow."""
        given = int(state["given"])
        if not 0 <= given <= len(self):
            raise DataError(
                f"the state stands at batch {given}, but a pass has {len(self)}; was the batch size changed?"
            )
        try:
            self._generator.set_state(state["generator"].cpu())
            self.augmenting.set_state(state["augmenting"].cpu())
        except (RuntimeError, TypeError) as error:
            raise DataError(f"the random state does not fit {self.inputs.device}: {error}") from error
        self._pass_began, self._given, self._skip = self._generator.get_state(), given, given
