"""Steps on a GPU on batches of any loader: each is copied into fixed buffers, from which a recorded step reads.

    the host:  next batch ──► pinned memory ──► …          while the GPU still computes the step before
    the GPU:                            copy ──► buffers ──► recorded step

Nothing is asked of the loader before the step that it is for has its turn, so that a state taken between two steps
knows exactly what was given. Batches of another shape than the first (the last of a pass, most often) are taken as
they come.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from bayeszip.fitting.augmentation import Augmentation, Transform, augmented
from bayeszip.fitting.batches import Batch, Inputs, mapped, tensors_of
from bayeszip.fitting.course import Course, Dials
from bayeszip.fitting.engine import Engine
from bayeszip.fitting.recorded import WARM_UP, recording, reduced_precision
from bayeszip.fitting.steps import take_step

__all__ = ["StagedSteps"]

#: Batches in pinned memory at a time: one on its way to the GPU, one that the host fills.
SLOTS = 2


class StagedSteps:
    """The steps of a phase, recorded at the first batches and replayed; make a new one where parameters change shape.

    Args:
        noise: the source of the layers' noise, which a replay must move on.
        augment: changes the inputs of each batch on the device; what is not bayeszip's own is never recorded.
        augmenting: what `augment` draws from.
        sums: to which every step adds the parts of its loss.
        on_warning: told why a step can't be recorded, if so.
    """

    def __init__(
        self,
        course: Course,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        noise: torch.Generator,
        augment: Augmentation | Transform | None,
        augmenting: torch.Generator | None,
        sums: Tensor,
        on_warning: Callable[[str], None],
    ) -> None:
        self._course, self._optimizer, self._engine, self._device = course, optimizer, engine, noise.device
        self._augment, self._augmenting = augment, augmenting
        self._noise, self._sums, self._on_warning = noise, sums, on_warning
        self._line = torch.zeros(len(course.dials_at(0.0).line()), device=self._device)
        self._staging: _Staging | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._resists = False
        self._taken = 0
        self._before: Batch | None = None

    def take(self, dials: Dials, batch: Batch) -> None:
        """One step on a batch, wherever its tensors are."""
        if self._augment is not None and not isinstance(self._augment, Augmentation):
            # It may draw its random numbers on the host, where a replay would not see them.
            batch = self._augmented(batch.to(self._device))
        if self._graph is None and not self._resists and self._taken >= WARM_UP and _alike(batch, self._before):
            self._record(batch)
        if self._graph is None or self._staging is None or not self._staging.holds(batch):
            self._taken, self._before = self._taken + 1, batch
            with reduced_precision():
                self._step(dials, batch.to(self._device))
            return
        self._staging.put(batch)
        self._line.copy_(torch.tensor(dials.line()), non_blocking=True)
        self._graph.replay()

    def _step(self, dials: Dials, batch: Batch) -> None:
        if isinstance(self._augment, Augmentation):
            batch = self._augmented(batch)
        self._sums += take_step(self._course, self._optimizer, dials, batch, engine=self._engine)

    def _augmented(self, batch: Batch) -> Batch:
        inputs = augmented(batch.inputs, self._augment, self._augmenting, batch.targets)
        return dataclasses.replace(batch, inputs=inputs)

    def _record(self, batch: Batch) -> None:
        staging = _Staging(batch, self._device)

        def step() -> None:
            self._step(self._course.dials_in(self._line), staging.batch)

        graphs, reason = recording(step, (1,), self._noise, *([self._augmenting] if self._augmenting else []))
        self._resists = not graphs
        if graphs:
            self._graph, self._staging = graphs[1], staging
        else:
            name = self._course.phase.name
            self._on_warning(f"phase {name}: steps are taken one by one, which is slower: {reason}")


class _Staging:
    """Buffers on the device for a batch, and pinned ones on the way there."""

    def __init__(self, like: Batch, device: torch.device) -> None:
        sample = dataclasses.replace(like, rows=None)
        self.batch = dataclasses.replace(
            sample, inputs=_buffers(like.inputs, device=device), targets=_buffers(like.targets, device=device)
        )
        self._tensors = _tensors_of(self.batch)
        self._slots = [
            [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self._tensors] for _ in range(SLOTS)
        ]
        self._sent = [torch.cuda.Event() for _ in range(SLOTS)]
        self._next = 0

    def holds(self, batch: Batch) -> bool:
        """Whether a batch has the form that the buffers have."""
        return _alike(batch, self.batch)

    def put(self, batch: Batch) -> None:
        """Copy a batch into the buffers, when all steps asked for so far are done with them."""
        given = _tensors_of(batch)
        if all(tensor.device == own.device for tensor, own in zip(given, self._tensors, strict=True)):
            torch._foreach_copy_(self._tensors, given)
            return
        slot, self._next = self._next, (self._next + 1) % SLOTS
        self._sent[slot].synchronize()  # what was in it is on the device
        for own, pinned, tensor in zip(self._tensors, self._slots[slot], given, strict=True):
            source = tensor if tensor.is_cuda else pinned.copy_(tensor)
            own.copy_(source, non_blocking=True)
        self._sent[slot].record()


def _alike(batch: Batch, other: Batch | None) -> bool:
    """Whether two batches have the same form, so that what was recorded for one does for the other."""
    return (
        other is not None
        and batch.share == other.share
        and _form(batch.inputs) == _form(other.inputs)
        and _form(batch.targets) == _form(other.targets)
        and all(
            one.shape == two.shape and one.dtype == two.dtype
            for one, two in zip(_tensors_of(batch), _tensors_of(other), strict=True)
        )
    )


def _buffers(part: Inputs, device: torch.device) -> Inputs:
    return mapped(part, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def _form(part: Inputs) -> object:
    """0 for one tensor, how many there are, or their names."""
    if isinstance(part, dict):
        return tuple(part)
    return 0 if isinstance(part, Tensor) else len(part)


def _tensors_of(batch: Batch) -> list[Tensor]:
    return [*tensors_of(batch.inputs), *tensors_of(batch.targets)]
