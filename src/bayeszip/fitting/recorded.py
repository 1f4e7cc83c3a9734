"""Steps on a GPU without the host in between: one step is recorded as a CUDA graph, then replayed for a whole pass.

What changes from step to step lies on the device: the rows of each batch, and the dials, one line a step; the recorded
step reads the line its own counter points at. Python neither launches kernels nor waits for them within a pass.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeszip.fitting.augmentation import Augmentation
from bayeszip.fitting.course import Course, Dials
from bayeszip.fitting.engine import Engine
from bayeszip.fitting.resident import ResidentBatches
from bayeszip.fitting.steps import take_step

__all__ = [
    "STEPS_AT_ONCE",
    "WARM_UP",
    "RecordedSteps",
    "can_be_recorded",
    "own_stream",
    "record",
    "recording",
    "reduced_precision",
    "strides",
]

#: Steps taken as they are before the recording: kernels are chosen and states made at the first ones.
WARM_UP = 2

#: Steps recorded as one: each replay costs the host the same, whatever it holds.
STEPS_AT_ONCE = 10

#: Recording is for one thread at a time; replaying is not.
_recording = threading.RLock()


def can_be_recorded(batches: object, device: torch.device) -> bool:
    """Whether the data lies on the GPU and comes in batches of equal size, long enough to pay.

    A transform of the caller's own may draw its random numbers on the host, where a replay would not see them.
    """
    return (
        device.type == "cuda"
        and isinstance(batches, ResidentBatches)
        and batches.inputs.is_cuda
        and (batches.augment is None or isinstance(batches.augment, Augmentation))
        and batches.shuffle
        and batches.n_examples // batches.batch_size > 2 * WARM_UP
    )


class RecordedSteps:
    """The steps of one pass after another, until a parameter changes its shape; then make a new one.

    Args:
        noise: the source of the layers' noise, which a replay must move on.
        sums: to which every step adds the parts of its loss.
        on_warning: told why a step can't be recorded, if so.
    """

    def __init__(
        self,
        course: Course,
        optimizer: torch.optim.Optimizer,
        batches: ResidentBatches,
        engine: Engine,
        noise: torch.Generator,
        sums: Tensor,
        on_warning: Callable[[str], None],
    ) -> None:
        self._course, self._optimizer, self._batches, self._engine = course, optimizer, batches, engine
        device = batches.inputs.device
        full = batches.n_examples // batches.batch_size
        self._rows = torch.zeros(full, batches.batch_size, dtype=torch.int64, device=device)
        self._dials = torch.zeros(full, len(course.dials_at(0.0).line()), device=device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._noise, self._sums, self._on_warning = noise, sums, on_warning
        #: By how many steps each replays.
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._resists = False

    def run_pass(self, epoch: int, strength: float, on_step: Callable[[int], None]) -> None:
        """One pass over the data, or what is left of it; `on_step` is told how many of its steps are over."""
        order, skip = self._batches.begin_pass()
        if order is None:  # never: `can_be_recorded` asks for shuffled batches
            raise TypeError("batches are not shuffled")
        size, full, steps = self._batches.batch_size, len(self._rows), len(self._batches)
        self._rows.copy_(order[: full * size].view(full, size))
        epochs = self._course.phase.epochs
        schedule = [self._course.dials_at((epoch + step / steps) / epochs, strength) for step in range(steps)]
        self._dials.copy_(torch.tensor([dials.line() for dials in schedule[:full]]), non_blocking=True)
        first = skip
        # What is left of a pass that was taken up near its end may be too short to warm up.
        if not self._graphs and not self._resists and skip + WARM_UP <= full:
            first = skip + WARM_UP
            # One thread at a time: the first steps may ask the GPU for what a recording elsewhere does not allow.
            with _recording, reduced_precision():
                for step in range(skip, first):
                    self._take(schedule[step], self._rows[step])
                self._record()
        self._counter.fill_(first)
        with reduced_precision():
            for step, done in strides(first, full, STEPS_AT_ONCE if self._graphs else 1):
                if self._graphs:
                    self._graphs[done - step].replay()
                else:
                    self._take(schedule[step], self._rows[step])
                self._batches.given(done)
                on_step(done)
            if full < steps:
                self._take(schedule[full], order[full * size :])
        self._batches.end_pass()

    def _take(self, dials: Dials, rows: Tensor) -> None:
        batch = self._batches.select(rows)
        self._sums += take_step(self._course, self._optimizer, dials, batch, engine=self._engine)

    def _record(self) -> None:
        """Record a step. A network that can't be recorded, since it asks the GPU for a value, is trained as it is."""

        def step() -> None:
            line = self._dials.index_select(0, self._counter)[0]
            rows = self._rows.index_select(0, self._counter)[0]
            self._counter += 1
            self._take(self._course.dials_in(line), rows)

        sources = [self._noise, *([self._batches.augmenting] if self._batches.augment else [])]
        self._graphs, reason = recording(step, (1, STEPS_AT_ONCE), *sources)
        self._resists = not self._graphs
        if self._resists:
            self._on_warning(f"phase {self._course.phase.name}: steps are taken one by one, which is slower: {reason}")


def recording(
    step: Callable[[], None], counts: Sequence[int], *generators: torch.Generator
) -> tuple[dict[int, torch.cuda.CUDAGraph], str]:
    """Graphs that do again what `step` asks of the GPU, by how many times they do it; or none, and why.

    Args:
        generators: those that move on with it, besides torch's own.
    """
    drawn = host_random_state()
    try:
        # In one pool of memory: they are never replayed at the same time, and leave nothing in it for each other.
        pool = torch.cuda.graph_pool_handle()
        with _recording, reduced_precision():
            # What recordings before this one held, for a network that was larger then.
            torch.cuda.empty_cache()
            graphs = {count: record(step, count, pool, *generators) for count in counts}
    except RuntimeError as error:
        return {}, str(error).partition("\n")[0]
    if host_random_state() != drawn:
        return {}, "the network or its loss draws random numbers on the host, where a replay would not see them"
    return graphs, ""


def host_random_state() -> tuple[object, ...]:
    """What tells whether somebody drew random numbers on the host."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state[1].tobytes(), numpy_state[2]


def strides(first: int, last: int, length: int) -> Iterator[tuple[int, int]]:
    """From `first` to `last` in strides that end at multiples of `length` where they are as long, the others of 1.

    >>> list(strides(2, 9, 4))
    [(2, 3), (3, 4), (4, 8), (8, 9)]
    """
    while first < last:
        stride = length if first % length == 0 and first + length <= last else 1
        yield first, first + stride
        first += stride


def record(step: Callable[[], None], count: int, pool: Any, *generators: torch.Generator) -> torch.cuda.CUDAGraph:
    """A graph that does again, `count` times, what `step` asks of the GPU.

    Args:
        pool: the memory it works in; graphs that share one must not depend on what others left there.
        generators: those that move on with it, besides torch's own.

    Raises:
        RuntimeError: it asks for something that can't be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.current_stream().synchronize()
    # Other threads go on meanwhile, with recorded steps of their own.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for _ in range(count):
            step()
        graph.capture_end()
    except BaseException:
        # Ends the recording; what was wrong with it is known.
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        torch.cuda.current_stream().synchronize()
        raise
    return graph


@contextlib.contextmanager
def reduced_precision() -> Iterator[None]:
    """Matrix products with the precision that torch's convolutions have by default (TF32): weights are noisy here."""
    matmul = torch.backends.cuda.matmul
    name: str = "allow_tf32"
    chosen: bool | str = True
    try:
        before: bool | str = matmul.allow_tf32
    except RuntimeError:  # set in torch's newer way, with which this one must not be mixed
        name, chosen, before = "fp32_precision", "tf32", matmul.fp32_precision
    setattr(matmul, name, chosen)
    try:
        yield
    finally:
        setattr(matmul, name, before)


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, work in a stream of one's own: steps can be recorded there, and others don't wait for it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
