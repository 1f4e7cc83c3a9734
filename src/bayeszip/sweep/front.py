"""The front of a sweep: the trials that no other beats in both error and bytes; as a table, a plot and files."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bayeszip.errors import OutputError
from bayeszip.files import create_folder, read_file, write_atomically
from bayeszip.sweep.study import SharedStudy

__all__ = ["Front", "Point", "front_of", "write_front"]

#: What the folder of a trial holds for good.
FILES = ("net.bayz", "result.json", "report.txt")


@dataclass(frozen=True)
class Point:
    """A complete trial: what was set, and what came of it."""

    trial: int
    #: On the validation data, as decoded.
    error: float
    bytes: int
    settings: dict[str, Any]
    #: On which machine it ran.
    host: str


@dataclass(frozen=True)
class Front:
    """How many trials came to what, the complete ones, and those that none of them beats, the smallest first."""

    complete: int
    pruned: int
    failed: int
    points: tuple[Point, ...]
    front: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        counts = {"complete": self.complete, "pruned": self.pruned, "failed": self.failed}
        return {**counts, "front": [asdict(point) for point in self.front]}

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        names = list(self.front[0].settings) if self.front else []
        for name in ("trial", "bytes", "validation error", *names):
            table.add_column(name, justify="right", style="cyan", header_style="dim")
        for point in self.front:
            settings = (_shown(point.settings[name]) for name in names)
            table.add_row(str(point.trial), f"{point.bytes:,}", f"{100 * point.error:.2f} %", *settings)
        return table


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def front_of(study: SharedStudy) -> Front:
    """The front of what the study holds now."""
    complete = study.finished("COMPLETE")
    points = sorted(
        (
            Point(
                trial=trial.number,
                error=trial.values[0],
                bytes=int(trial.values[1]),
                settings=dict(trial.params),
                host=trial.user_attrs["worker"]["host"],
            )
            for trial in complete
        ),
        key=lambda point: (point.bytes, point.error, point.trial),
    )
    pruned, failed = len(study.finished("PRUNED")), len(study.finished("FAIL"))
    return Front(len(complete), pruned, failed, tuple(points), tuple(_unbeaten(points)))


def _unbeaten(points: Sequence[Point]) -> list[Point]:
    """Of points sorted by bytes: each that has a smaller error than all smaller ones."""
    front: list[Point] = []
    least = math.inf
    for point in points:
        if point.error < least:
            front.append(point)
            least = point.error
    return front


def write_front(front: Front, folder: Path) -> list[str]:
    """`front.json`, `front.svg` and, in `folder`/front, the file and the record of each trial on it.

    Returns:
        What could not be written here, a line each: the files of trials that ran on machines with disks of their own.

    Raises:
        OutputError: something can't be written.
    """
    write_atomically(folder / "front.json", (json.dumps(front.to_dict(), indent=1) + "\n").encode())
    missing = []
    target = create_folder(folder / "front")
    names = {f"trial-{point.trial:04d}" for point in front.front}
    for point in front.front:
        source = folder / "trials" / f"{point.trial:04d}"
        if not (source / FILES[0]).exists():
            missing.append(f"trial {point.trial} ran on {point.host}; its files are there, in trials/{point.trial:04d}")
            continue
        kept = create_folder(target / f"trial-{point.trial:04d}")
        for name in FILES:
            write_atomically(kept / name, read_file(source / name))
    _remove_others(target, names)
    plot = _plot(front)
    if plot is None:
        missing.append("no plot: it needs matplotlib (pip install 'bayeszip[plot]')")
    else:
        write_atomically(folder / "front.svg", plot)
    return missing


def _remove_others(target: Path, names: set[str]) -> None:
    """Trials that were on the front before better ones came."""
    for folder in target.glob("trial-*"):
        if folder.name not in names:
            try:
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
            except FileNotFoundError:
                pass  # another worker was faster
            except OSError as error:
                raise OutputError(f"can't delete {folder}: {error.strerror or error}") from error


def _plot(front: Front) -> bytes | None:
    """Bytes against error: all complete trials, and the front as a line; None without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import ScalarFormatter
    except ImportError:
        return None
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter([p.bytes for p in front.points], [100 * p.error for p in front.points], s=18, c="0.6", label="trials")
    # In steps: between two trials on the front nothing better is known than the smaller one.
    sizes, errors = [p.bytes for p in front.front], [100 * p.error for p in front.front]
    axes.plot(sizes, errors, "o-", color="C0", drawstyle="steps-post", label="front")
    for point in front.front:
        axes.annotate(
            str(point.trial), (point.bytes, 100 * point.error), (4, 4), textcoords="offset points", fontsize=8
        )
    axes.set(xlabel="bytes of the file", ylabel="validation error, %", xscale="log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(ScalarFormatter())
    axes.tick_params(axis="x", which="both", labelrotation=30)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    drawn = io.BytesIO()
    # Without a date and with fixed names, the same front gives the same bytes.
    with rc_context({"svg.hashsalt": "bayeszip"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
