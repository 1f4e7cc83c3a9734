"""The report's charts as PNG and SVG files, drawn by matplotlib from the same data as the page."""

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from bayeszip.errors import ModelError, OutputUsageError, printable
from bayeszip.files import create_folder, write_atomically
from bayeszip.report.charts import mixture_counts, moment_name, short_count
from bayeszip.report.contents import Contents
from bayeszip.snapshots import BINS, Snapshot

__all__ = ["check_plots", "write_curve", "write_plots"]

BLUE, RED, GRAY, DARK = "#2b5f94", "#c2512f", "#c9c6bf", "#6b6f76"
LINES = (BLUE, RED, "#5d8a4a", "#b98a1d")
#: Fixed ids and no date, so that a file changes only when its figures do.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "bayeszip",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": DARK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3dfd8",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}

#: Tensors with a bar of their own: a figure has but so many pixels.
MOST_BARS = 120

Axes = Any
Figure = Any


def write_plots(contents: Contents, folder: str | os.PathLike[str]) -> list[Path]:
    """Every chart that `contents` have data for, as `name.png` and `name.svg` in `folder`; returns their paths.

    Raises:
        ModelError: matplotlib is not installed.
        OutputError: a file can't be written.
    """
    with _styled() as new_figure:
        target = create_folder(folder)
        paths = []
        for name, size, draw in _plots(contents):
            figure = new_figure(size)
            draw(figure, contents)
            for ending in ("png", "svg"):
                paths.append(target / f"{name}.{ending}")
                write_atomically(paths[-1], _drawn(figure, ending))
    return paths


def write_curve(
    path: str | os.PathLike[str], sizes: Sequence[int], errors: Sequence[float], accuracies: Sequence[float] | None
) -> None:
    """Error, and accuracy where it was measured, against bytes; all errors and accuracies in percent.

    Raises:
        ModelError: matplotlib is not installed.
        OutputUsageError: the file is to be neither .png nor .svg.
        OutputError: it can't be written.
    """
    ending = Path(path).suffix.removeprefix(".")
    if ending not in ("png", "svg"):
        raise OutputUsageError(f"a plot is written to .svg or .png, not {str(path)!r}")
    panels = [("weights moved by, %", errors, RED)]
    panels += [("accuracy, %", accuracies, BLUE)] if accuracies is not None else []
    with _styled() as new_figure:
        figure = new_figure((7.5, 2.6 * len(panels)))
        for axes, (label, values, color) in zip(
            figure.subplots(len(panels), 1, sharex=True, squeeze=False).reshape(-1), panels, strict=True
        ):
            axes.plot(sizes, values, "o-", color=color, markersize=4)
            axes.set_xscale("log")
            axes.set_ylabel(label)
            axes.set_xlabel("bytes")
        write_atomically(path, _drawn(figure, ending))


def check_plots() -> None:
    """Refuse plots that could not be drawn, before any work.

    Raises:
        ModelError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ModelError("plots need matplotlib: pip install 'bayeszip[plot]'") from error


@contextlib.contextmanager
def _styled() -> Iterator[Callable[[tuple[float, float]], Figure]]:
    """What makes figures of a size in inches, in the report's style."""
    check_plots()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    def new_figure(size: tuple[float, float]) -> Figure:
        figure = NewFigure(figsize=size, dpi=160)
        FigureCanvasAgg(figure)
        return figure

    with mpl.rc_context(STYLE):
        yield new_figure


def _drawn(figure: Figure, ending: str) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, format=ending, metadata={"Date": None} if ending == "svg" else {"Software": None})
    return held.getvalue()


def _plots(contents: Contents) -> Iterator[tuple[str, tuple[float, float], Callable[[Figure, Contents], None]]]:
    """Name, size in inches and drawing of each plot there is data for."""
    yield "bytes", (7.5, 0.32 * min(len(contents.layers), MOST_BARS) + 1.6), _draw_bytes
    moments = len(contents.run.snapshots.moments) if contents.run else 0
    yield "weights", (7.5, 2.3 * ((moments + 2) // 2)), _draw_weights
    if contents.picture is not None:
        yield "first-layer", (7.5, 4.6), _draw_first_layer
    if contents.run is not None and contents.run.history:
        yield "training", (7.5, 5.2), _draw_training
    if any(point.kind == "file" for point in contents.points()):
        yield "accuracy-size", (7.5, 4.2), _draw_accuracy


def _draw_bytes(figure: Figure, contents: Contents) -> None:
    axes = figure.subplots()
    described = contents.description
    items = [(layer.described.name, layer.described.bytes) for layer in contents.layers][:MOST_BARS]
    rest = described.bytes - sum(count for _, count in items)
    about = "about the file" if len(items) == len(contents.layers) else "all others, and about the file"
    names, counts = zip(*reversed([*items, (about, rest)]), strict=True)
    bars = axes.barh(range(len(names)), counts, color=BLUE)
    axes.bar_label(bars, [f"{count:,}" for count in counts], padding=4, color=DARK)
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_xlabel("bytes")
    axes.set_title(f"Where the {described.bytes:,} bytes are")
    axes.grid(axis="y", visible=False)


def _draw_weights(figure: Figure, contents: Contents) -> None:
    moments = contents.run.snapshots.moments if contents.run else ()
    panels = figure.subplots((len(moments) + 2) // 2, 2, sharex=True, sharey=True, squeeze=False).reshape(-1)
    for axes, moment in zip(panels, moments, strict=False):
        _draw_moment(axes, moment)
    last = panels[len(moments)]
    values = contents.values
    if values.width:
        edges = values.values[0] + values.width * (np.arange(len(values.values) + 1) - 0.5)
        last.stairs(values.counts, edges, fill=True, color=BLUE)
    else:
        last.vlines(values.values, 0.7, values.counts, color=BLUE)
        last.plot(values.values, values.counts, "o", color=BLUE, markersize=3.5)
    last.vlines([0], 0.7, [max(values.zeros, 0.7)], color=DARK)
    last.set_title("in the file")
    for axes in panels[len(moments) + 1 :]:
        axes.set_visible(False)
    for axes in panels:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
        axes.set_xlabel("weight")
        axes.set_ylabel("weights in a bin")


def _draw_moment(axes: Axes, moment: Snapshot) -> None:
    width = 2 * moment.reach / BINS
    edges = np.linspace(-moment.reach, moment.reach, BINS + 1)
    axes.stairs(moment.counts, edges, fill=True, color=GRAY)
    axes.stairs(moment.kept, edges, fill=True, color=BLUE)
    if moment.mixture is not None:
        places = np.linspace(-moment.reach, moment.reach, 481)
        counts = mixture_counts(moment.mixture, places, width, sum(moment.counts))
        axes.plot(places, counts, color=RED, linewidth=1)
    axes.set_title(_plain(moment_name(moment)))


def _draw_first_layer(figure: Figure, contents: Contents) -> None:
    picture = contents.picture
    if picture is None:
        return
    if picture.kind == "matrix":
        axes = figure.subplots()
        axes.imshow(picture.tiles[0], cmap="Blues", vmin=0, interpolation="nearest", aspect="auto")
        axes.set_title(_plain(f"{picture.tensor}: share of weights that are not zero; {picture.note}"))
        axes.grid(visible=False)
        return
    mosaic = _mosaic(picture.tiles)
    reach = float(np.nanmax(np.abs(mosaic))) or 1.0
    axes = figure.subplots()
    if picture.kind == "colors":
        axes.imshow(np.nan_to_num(0.5 + 0.5 * mosaic / reach, nan=1.0), interpolation="nearest")
    else:
        axes.imshow(mosaic, cmap="RdBu", vmin=-reach, vmax=reach, interpolation="nearest")
    axes.set_title(_plain(f"{picture.tensor}: what each of {len(picture.tiles)} units looks at"))
    axes.axis("off")


def _mosaic(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """All tiles as one image, side by side with gaps between them."""
    height, width, *channels = tiles[0].shape if tiles else (1, 1)
    gap = max(1, width // 8)
    columns = max(1, math.ceil(math.sqrt(1.6 * len(tiles))))
    rows = max(1, -(-len(tiles) // columns))
    mosaic = np.full((rows * (height + gap), columns * (width + gap), *channels), np.nan)
    mosaic[0, 0] = 0.0
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        top, left = row * (height + gap), column * (width + gap)
        mosaic[top : top + height, left : left + width] = tile
    return mosaic


def _draw_training(figure: Figure, contents: Contents) -> None:
    panels = figure.subplots(2, 2, sharex=True).reshape(-1)
    for color, curve in zip(cycle(LINES), contents.parts_of_loss(), strict=False):
        panels[0].plot(curve.epochs, curve.values, color=color, label=curve.label, linewidth=1.2)
    if panels[0].lines:
        panels[0].legend()
    panels[0].set_title("Parts of the loss, nats per example")
    for axes, (title, name, scale) in zip(
        panels[1:],
        (
            ("Validation accuracy, %", "accuracy", 100.0),
            ("Zeros, % of the weights", "zeros", 100.0),
            ("Size, bytes", "bytes", 1.0),
        ),
        strict=True,
    ):
        curve = contents.curve(title, name, scale)
        axes.plot(curve.epochs, curve.values, color=BLUE, linewidth=1.2, marker="." if len(curve.epochs) < 16 else None)
        axes.set_title(title)
    if contents.curve("", "bytes").values:
        panels[3].set_yscale("log")
        _count_in_thousands(panels[3].yaxis)
    for axes in panels:
        for number, span in enumerate(contents.spans()):
            axes.axvspan(span.start, span.end, color="#f5f3ef" if number % 2 == 0 else "white", zorder=0)
    for axes in panels[2:]:
        axes.set_xlabel("epoch")


def _draw_accuracy(figure: Figure, contents: Contents) -> None:
    axes = figure.subplots()
    for point in contents.points():
        if point.kind == "epoch":
            axes.plot(point.bytes, point.accuracy, "o", markersize=4, markerfacecolor="white", color=BLUE)
            continue
        color, size = {"quoted": (GRAY, 5), "other": (BLUE, 5), "file": (BLUE, 8)}[point.kind]
        hollow = {"markerfacecolor": "white"} if point.measured == "validation" else {}
        axes.plot(point.bytes, point.accuracy, "o", markersize=size, color=color, **hollow)
        text = f"this file, {point.measured}" if point.kind == "file" else point.label.split(" (")[0]
        axes.annotate(_plain(text), (point.bytes, point.accuracy), (7, -3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    _count_in_thousands(axes.xaxis)
    axes.set_xlabel("size of the file, bytes")
    axes.set_ylabel("accuracy, %")
    gray = f", gray: quoted, on {contents.quoted_on}" if contents.quoted else ""
    axes.set_title(f"Accuracy against size; rings: validation, dots: test data{gray}")


def _count_in_thousands(axis: Any) -> None:
    axis.set_major_formatter(lambda size, _: short_count(size))
    axis.set_minor_formatter(lambda size, _: short_count(size))


def _plain(text: str) -> str:
    """Text without what matplotlib would read as a formula, or can't draw."""
    return printable(text).replace("$", r"\$")
