"""Training as one watches it: where it stands, the parts of the loss, what a file would take now, and the time left;
on a terminal, and as logs for TensorBoard.
"""

import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bayeszip.errors import ModelError, OutputError
from bayeszip.fitting import Course, EpochStats, Phase, Watcher
from bayeszip.fitting.course import DATA
from bayeszip.summary import show_bytes

__all__ = ["TensorBoardLog", "TimeLeft", "TrainingProgress", "Watchers"]

#: Without a terminal a line is printed this many seconds after the last, and at the end of each phase.
LINE_EVERY = 15.0

#: What noise, a mixture and a teacher add to a plain epoch, in units of it, as long as no such phase was seen.
NOISE, MIXTURE, TEACHER = 1.0, 0.4, 0.3


class Watchers(Watcher):
    """Several watchers in one; each is told everything, in order. One that can't write doesn't end the training."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers
        self._failing: set[int] = set()

    def on_phase(self, course: Course) -> None:
        self._tell(lambda watcher: watcher.on_phase(course))

    def on_batch(self, phase: Phase, done: float) -> None:
        for watcher in self._watchers:
            watcher.on_batch(phase, done)

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        self._tell(lambda watcher: watcher.on_epoch(stats, course))

    def _tell(self, event: Callable[[Watcher], None]) -> None:
        for watcher in self._watchers:
            try:
                event(watcher)
                self._failing.discard(id(watcher))
            except (OutputError, OSError) as error:
                if id(watcher) not in self._failing:
                    self.on_warning(f"{error}. The training goes on")
                self._failing.add(id(watcher))

    def on_warning(self, message: str) -> None:
        # Once is enough: the first is the one that people look at.
        for watcher in self._watchers[:1]:
            watcher.on_warning(message)

    def on_finding(self, message: str) -> None:
        self._tell(lambda watcher: watcher.on_finding(message))

    def state_dict(self) -> dict[str, Any]:
        return {"watchers": [watcher.state_dict() for watcher in self._watchers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # There may be others than before: a log was asked for, say.
        for watcher, held in zip(self._watchers, state["watchers"], strict=False):
            watcher.load_state_dict(held)


class TimeLeft:
    """How long phases still take: each at its own pace, and one to come at the last pace, by what its kind costs.

    The first step of a phase is not counted: it makes ready what the others use. A phase that comes again is new work,
    as are those behind it; how often it comes is not known.

    Args:
        phases: those that will run, in their order.
        now: tells the time, in seconds.
        is_open: phases may come again, so that `seconds` are the least it takes; so they are when one has.
    """

    def __init__(
        self, phases: Sequence[Phase], now: Callable[[], float] = time.monotonic, *, is_open: bool = False
    ) -> None:
        self._phases, self._now, self.is_open = list(phases), now, is_open
        self._begun: set[str] = set()
        #: Seconds an epoch of each phase that was seen takes; the last of them is the newest.
        self._paces: dict[str, float] = {}
        self._name, self._since, self._from, self._done = "", 0.0, 0.0, 0.0
        #: Whether the last epoch of the phase is over: a loader may give more batches in it than were expected.
        self._is_over = False

    def on_step(self, phase: Phase, done: float) -> None:
        """A step is over before which this share of the phase was."""
        is_next = phase.name != self._name or self._is_over
        if is_next or done < self._done:
            # Back by a few steps, it is the same run of the phase.
            self.is_open = self.is_open or (is_next and phase.name in self._begun)
            self._begun.add(phase.name)
            self._name, self._since, self._from = phase.name, self._now(), done
        elif done > self._from:
            self._paces.pop(phase.name, None)
            self._paces[phase.name] = (self._now() - self._since) / ((done - self._from) * phase.epochs)
        self._done, self._is_over = done, False

    def on_epoch(self, done: float) -> None:
        """An epoch is over, and this share of its phase."""
        self._done, self._is_over = done, done >= 1

    def seconds(self) -> float | None:
        """None: nothing is known yet."""
        names = [phase.name for phase in self._phases]
        if not self._paces or self._name not in names:
            return None
        current, (last, pace) = names.index(self._name), list(self._paces.items())[-1]
        plain = pace / next((_cost(phase) for phase in self._phases if phase.name == last), 1.0)
        epochs = [phase.epochs * (1 - self._done if at == current else 1) for at, phase in enumerate(self._phases)]
        left = zip(self._phases[current:], epochs[current:], strict=True)
        return sum(count * self._paces.get(phase.name, plain * _cost(phase)) for phase, count in left)


def _cost(phase: Phase) -> float:
    return 1 + NOISE * phase.noise + MIXTURE * bool(phase.tau2) + TEACHER * bool(phase.distillation)


class TrainingProgress(Watcher):
    """A bar over all phases with the last epoch's figures below it; plain lines where there is no terminal.

    Use it as a context manager around the training, with the phases that will run.

    Args:
        open_ended: phases may come again, nobody knows how often: then there is no share of the whole to show.
    """

    def __init__(self, phases: Sequence[Phase], console: Console | None = None, *, open_ended: bool = False) -> None:
        # Not `file=sys.stderr`: where that is closed, standard output would take its place.
        self._console = console or Console(stderr=True)
        self._starts = _starts(phases)
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            TextColumn("{task.fields[share]}", style="progress.percentage"),
            TimeElapsedColumn(),
            TextColumn("passed,"),
            TextColumn("{task.fields[left]} left"),
            console=self._console,
        )
        self._total = sum(phase.epochs for phase in phases)
        self._task = self._bar.add_task("training", total=None, left="-:--:--", share="")
        self._left = TimeLeft(phases, is_open=open_ended)
        self._show(0.0)
        self._live = Live(self._bar, console=self._console, refresh_per_second=4, transient=False)
        self._plain = not self._console.is_terminal or self._console.is_dumb_terminal
        self._last_line = time.monotonic()
        self._bytes: int | None = None

    def __enter__(self) -> "TrainingProgress":
        if not self._plain:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._plain:
            self._live.stop()

    def on_batch(self, phase: Phase, done: float) -> None:
        self._left.on_step(phase, done)
        left = self._left_in_words(lambda seconds: str(datetime.timedelta(seconds=round(seconds))))
        self._bar.update(self._task, description=phase.name, left=left or "-:--:--")
        self._show(self._starts.get(phase.name, 0) + done * phase.epochs)

    def _show(self, epochs: float) -> None:
        """How far it is, where that is known."""
        if self._left.is_open:
            self._bar.tasks[0].total = None
            self._bar.update(self._task, share="–")
        else:
            share = epochs / self._total if self._total else 0.0
            self._bar.update(self._task, completed=epochs, total=self._total, share=f"{share:>4.0%}")

    def _left_in_words(self, shown: Callable[[float], str]) -> str | None:
        """None: nothing is known, or no more than that it goes on."""
        left = self._left.seconds()
        if left is None or (self._left.is_open and round(left) == 0):
            return None
        return f"at least {shown(left)}" if self._left.is_open else shown(left)

    def on_warning(self, message: str) -> None:
        self._console.print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)

    def on_finding(self, message: str) -> None:
        self.on_warning(message)

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        self._left.on_epoch(stats.epoch / stats.epochs)
        self._show(self._starts.get(stats.phase, 0) + stats.epoch)
        # The size is not measured after every epoch; the last one known is shown meanwhile.
        self._bytes = stats.bytes if stats.bytes is not None else self._bytes
        stats = dataclasses.replace(stats, bytes=self._bytes)
        if not self._plain:
            self._live.update(Group(self._bar, _side_by_side(stats)))
        elif stats.epoch == stats.epochs or time.monotonic() - self._last_line >= LINE_EVERY:
            self._console.print(self._line(stats), highlight=False, markup=False, emoji=False, soft_wrap=True)
            self._last_line = time.monotonic()

    def _line(self, stats: EpochStats) -> str:
        left = self._left_in_words(lambda seconds: f"{seconds:.0f} s")
        said = "" if left is None else f"  {left} left"
        return "  ".join(f"{name} {value}" for name, value in _figures(stats)) + said


class TensorBoardLog(Watcher):
    """Writes the figures of every epoch, and histograms of the weights at the end of each phase, for TensorBoard.

    Args:
        folder: where TensorBoard is to look.
        phases: those that will run; epochs are counted through all of them.

    Raises:
        ModelError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], phases: Sequence[Phase]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ModelError("logs for TensorBoard need it: pip install 'bayeszip[tensorboard]'") from error
        self._writer = SummaryWriter(os.fspath(folder))
        self._starts = _starts(phases)

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        epoch = self._starts.get(stats.phase, 0) + stats.epoch
        for name, value in _logged(stats):
            self._writer.add_scalar(name, value, epoch)
        if stats.epoch == stats.epochs:
            for weight in course.weights:
                self._writer.add_histogram(f"weights/{weight.name}", weight.theta.detach().float(), epoch)
        self._writer.flush()

    def on_finding(self, message: str) -> None:
        self._writer.add_text("warnings", message)

    def close(self) -> None:
        """No more epochs will come."""
        self._writer.close()


def _logged(stats: EpochStats) -> list[tuple[str, float]]:
    figures: list[tuple[str, float | None]] = [
        *((f"loss/{name}", value) for name, value in stats.parts.items()),
        ("validation/accuracy", stats.accuracy),
        ("validation/loss", stats.loss),
        ("validation/metric", stats.metric),
        ("size/zeros", stats.zeros or None),
        ("size/bytes", stats.bytes),
        ("time/seconds", stats.seconds),
    ]
    return [(name, value) for name, value in figures if value is not None]


def _starts(phases: Sequence[Phase]) -> dict[str, int]:
    starts, total = {}, 0
    for phase in phases:
        starts[phase.name] = total
        total += phase.epochs
    return starts


def _figures(stats: EpochStats) -> list[tuple[str, str]]:
    figures = [("phase", stats.phase), ("epoch", f"{stats.epoch}/{stats.epochs}")]
    figures += [("loss" if name == DATA else name, f"{value:.4g}") for name, value in stats.parts.items() if value]
    # Of the weights' means, which quantization has not touched: not yet what a file would hold.
    if stats.accuracy is not None:
        figures.append(("validation (unsnapped)", f"{100 * stats.accuracy:.2f} %"))
    figures += [
        (f"validation {name} (unsnapped)", f"{value:.4g}")
        for name, value in (("loss", stats.loss), ("metric", stats.metric))
        if value is not None
    ]
    if stats.zeros:
        figures.append(("zeros", f"{100 * stats.zeros:.2f} %"))
    if stats.bytes is not None:
        figures.append(("file", show_bytes(stats.bytes)))
    return figures


def _side_by_side(stats: EpochStats) -> Columns:
    """Each figure below its name; in as many rows as the width takes."""
    cells = (Text.assemble((name, "dim"), "\n", (value, "cyan"), no_wrap=True) for name, value in _figures(stats))
    return Columns(cells, padding=(0, 2))
