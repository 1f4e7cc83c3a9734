"""The keeper of a run: carries its fittings one after the other, saves their state when it is time, and takes it up.

    carry(fitting):   over in an earlier process?   its result is put back
                      interrupted there?            it goes on from the checkpoint
                      else                          it runs from its start

What lies between two fittings is done again when a run is taken up; it must give the same again. A checkpoint holds the
results of the fittings that are over, the whole state of the one at hand, and the watcher's.
"""

import contextlib
import copy
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from bayeszip.errors import BayeszipError, CheckpointError, Interrupted, OutputError, RecipeError
from bayeszip.fitting.checkpoint import Checkpoints
from bayeszip.fitting.loop import Fitting, Moment
from bayeszip.fitting.watching import Watcher

__all__ = ["Checkpointing", "Interval", "Keeper"]

W = TypeVar("W", bound=Watcher)


@dataclass(frozen=True)
class Checkpointing:
    """Where a run is saved, and how often.

    Args:
        folder: for checkpoints alone; created if need be.
        every: `5m`, `90s`, `2h`, `10epochs` or `500steps`. Between two phases a checkpoint is written in any case.
        keep: how many to keep.
        force: go on although recipe, versions, threads or data are no longer what they were.
    """

    folder: str | os.PathLike[str]
    every: str = "5m"
    keep: int = 2
    force: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise RecipeError(f"checkpoints are kept in a folder, given as a path, not {self.folder!r}")
        Interval.parse(self.every)
        if not isinstance(self.keep, int) or self.keep < 1:
            raise RecipeError(f"at least 1 checkpoint must be kept, not {self.keep!r}")


class Interval(NamedTuple):
    """How far apart checkpoints are."""

    amount: float
    unit: Literal["seconds", "epochs", "steps"]

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """
        >>> Interval.parse("5m")
        Interval(amount=300.0, unit='seconds')
        """
        # Whoever gives a number has not said of what.
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|m|h|epochs?|steps?)", str(text).strip())
        amount = float(found[1]) if found else 0.0
        if found is None or not amount:
            raise RecipeError(f"{text!r} is no interval of checkpoints; write 5m, 90s, 2h, 10epochs or 500steps")
        if found[2] in ("s", "m", "h"):
            return cls(amount * {"s": 1, "m": 60, "h": 3600}[found[2]], "seconds")
        return cls(amount, "epochs" if found[2].startswith("epoch") else "steps")


class Keeper(Generic[W]):
    """See above. Use it as a context manager around the run.

    SIGTERM and Ctrl-C end the run after the step at hand, when a checkpoint is written. A second one ends it at once.

    Args:
        settings: None: nothing is kept, and signals do what they always do.
        conditions: what must be the same when the run is taken up; plain values.
        watcher: its state is kept too; told of what goes wrong.
        resume: go on from the newest checkpoint, if there is one.
        writes: False for a process that trains together with one that does; it is told by that one when to stop.

    Raises:
        CheckpointError: the folder holds a run that is not over, and `resume` is off; or one under other conditions.
        OutputError: the folder can't be written to, or another process works in it.
    """

    def __init__(
        self,
        settings: Checkpointing | None,
        conditions: Mapping[str, Any],
        watcher: W,
        *,
        resume: bool = False,
        writes: bool = True,
    ) -> None:
        self._conditions, self.watcher = conditions, watcher
        #: The results of the fittings that are over, and how many of them were carried here.
        self._results: list[dict[str, Any]] = []
        self._carried = 0
        #: The checkpoint's state; its fitting is that after the results.
        self._resumed: dict[str, Any] | None = None
        self._seconds_before, self._began = 0.0, time.perf_counter()
        #: Whether the run that was taken up is over, and nothing was added to it.
        self._is_over = False
        self._signals = _Signals()
        self._checkpoints: Checkpoints | None = None
        self._failing = False
        self._writes = writes
        if settings is None:
            return
        self._every = Interval.parse(settings.every)
        self._checkpoints = Checkpoints(settings.folder, keep=settings.keep, warn=watcher.on_warning, writes=writes)
        try:
            if writes or resume:
                self._open(self._checkpoints, resume, settings.force)
        except BaseException:
            self._checkpoints.close()
            raise
        self._reset(0)

    @property
    def seconds(self) -> float:
        """How long the run has taken so far, in all processes that carried it; once it is over, no longer."""
        if self._is_over:
            return self._seconds_before
        return self._seconds_before + time.perf_counter() - self._began

    @property
    def taken_up(self) -> Tensor:
        """Where the run was when it was taken up: fittings that were over, and steps of the one at hand."""
        at_hand = None if self._resumed is None else self._resumed["fitting"]
        return torch.tensor([len(self._results), 0 if at_hand is None else at_hand["steps"]])

    def carry(self, fitting: Fitting) -> None:
        """Bring the run's next fitting to its end.

        Raises:
            Interrupted: a signal ended it; the checkpoint is written.
        """
        if self._checkpoints is None:
            fitting.run()
            return
        self._carried += 1
        is_over = self._carried <= len(self._results)
        if self._resumed is not None:
            self._take_up(fitting, self._resumed, is_over)
        if is_over:
            return
        self._resumed, self._is_over = None, False
        self._last_steps = fitting.steps
        fitting.at_rest = lambda moment: self._at_rest(fitting, moment)
        fitting.run()
        self._results.append(copy.deepcopy(fitting.result()))

    def _take_up(self, fitting: Fitting, state: Mapping[str, Any], is_over: bool) -> None:
        """Put `fitting`, and who watches, to where the checkpoint has them."""
        try:
            self.watcher.load_state_dict(state["watcher"])
            if is_over:
                fitting.load_result(self._results[self._carried - 1])
            elif state["fitting"] is not None:
                fitting.load_state_dict(state["fitting"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            # Only where somebody forced it.
            raise CheckpointError(f"what the checkpoint holds does not fit this run: {error!r}") from error

    def finish(self) -> None:
        """The run is over: one checkpoint is left, from which it can be taken up at its end."""
        if self._checkpoints is not None:
            self._checkpoints.keep = 1
            self._save(None)

    def __enter__(self) -> "Keeper[W]":
        if self._checkpoints is not None:
            self._signals.catch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signals.release()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if kind is None:
            self._stop_if_asked()

    def _open(self, checkpoints: Checkpoints, resume: bool, force: bool) -> None:
        found = checkpoints.newest()
        if found is None:
            return
        if not resume:
            if found.state["fitting"] is not None:
                raise CheckpointError(
                    f"{checkpoints.folder} holds a run that is not over; resume it (--resume), delete that folder, or "
                    "name another"
                )
            checkpoints.clear()
            return
        if not force:
            found.check_conditions(self._conditions)
        self._resumed, self._results = found.state, found.state["results"]
        self._seconds_before = found.state["seconds"]
        self._is_over = found.state["fitting"] is None

    def _at_rest(self, fitting: Fitting, moment: Moment) -> None:
        if not self._writes:
            return
        self._epochs += moment == "epoch"
        passed = {
            "seconds": time.monotonic() - self._last_time,
            "epochs": self._epochs,
            "steps": fitting.steps - self._last_steps,
        }
        if moment == "phase" or passed[self._every.unit] >= self._every.amount or self._signals.caught:
            self._save(fitting)
            self._reset(fitting.steps)
        self._stop_if_asked()

    def _reset(self, steps: int) -> None:
        self._last_time, self._last_steps, self._epochs = time.monotonic(), steps, 0

    def _save(self, fitting: Fitting | None) -> None:
        """Write a checkpoint; if that fails the training goes on, and the last one stays."""
        if self._checkpoints is None or not self._writes:
            return
        state = {
            "fitting": None if fitting is None else fitting.state_dict(),
            "results": self._results,
            "seconds": self.seconds,
            "watcher": self.watcher.state_dict(),
        }
        try:
            self._checkpoints.save(state, self._conditions)
            self._failing = False
        except BayeszipError as error:
            if not self._failing:
                self.watcher.on_warning(f"no checkpoint: {error}. The training goes on; {self._newest_name()}")
            self._failing = True

    def _newest_name(self) -> str:
        paths = []
        with contextlib.suppress(OutputError):
            paths = self._checkpoints.paths() if self._checkpoints is not None else []
        return f"the last checkpoint is {paths[-1]}" if paths else "there is no checkpoint yet"

    def _stop_if_asked(self) -> None:
        caught = self._signals.caught
        if caught is None:
            return
        message = f"stopped by {signal.Signals(caught).name}; {self._newest_name()}; go on with --resume"
        if caught == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise Interrupted(message, caught)


class _Signals:
    """SIGTERM and SIGINT, noted instead of obeyed; only the first, and only in the main thread."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def catch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.release()
        if os.getpid() == self._process:
            self.caught = number
        else:  # a child that inherited this: not the run
            os.kill(os.getpid(), number)
