"""Pictures of accuracy against size, drawn by matplotlib from records: the same records give the same file."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bayeszip.errors import ModelError
from bayeszip.experiments.curves import CURVES, NETWORKS, Curve
from bayeszip.experiments.parts import ABLATED, PARTS, SNAP, Ablated
from bayeszip.experiments.records import Record
from bayeszip.experiments.tables import PRINTED, curve_groups, front, mean_of, part_group
from bayeszip.report.quoted import Quoted, quoted_for

__all__ = ["draw_figure", "draw_networks", "draw_parts", "draw_sizes", "free_spots"]

COLORS = {"sws": "tab:blue", "vd": "tab:orange", "vd+sws": "tab:red"}
#: With and without augmentation.
OURS = {True: "tab:red", False: "tab:orange"}
PEER = "tab:blue"
GRAY: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "0.4"}

#: Points of accuracy below the best that parts are drawn down to.
SHOWN = 5.0

Records = Sequence[Record]
Axes = Any


class Point(NamedTuple):
    """Mean size and accuracies (in percent) of the files at one strength and rate."""

    bytes: float
    accuracy: float
    #: None where no images were held out.
    validation_accuracy: float | None
    is_headline: bool


@contextmanager
def _figure(path: Path, rows: int = 1, columns: int = 1, width: float = 1.0) -> Iterator[list[Axes]]:
    """A figure of panels, so many times as wide as one alone, which is written when it is drawn."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModelError("pictures need matplotlib: pip install 'bayeszip[plot]'") from error
    # Fixed ids and no date, so that the file changes only when the figures do.
    with mpl.rc_context({"svg.hashsalt": "bayeszip", "font.size": 10}):
        figure = Figure(figsize=(7.2 * width * columns**0.8, 4.3 * rows**0.95))
        panels = figure.subplots(rows, columns, squeeze=False).reshape(-1)
        for axes in panels:
            axes.set_xscale("log")
            axes.grid(alpha=0.2)
        yield list(panels)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})


def _finish(axes: Axes, title: str, x_label: str, ticks: Sequence[float], labels: Sequence[str]) -> None:
    axes.set_xlabel(x_label)
    axes.set_title(title)
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.legend(loc="best", frameon=False)


def draw_figure(records: Records, path: Path) -> None:
    """Accuracy against compression for the three methods, their fronts, and what the paper's table prints."""
    with _figure(path) as (axes,):
        for method, color in COLORS.items():
            own = [record for record in records if record["recipe"]["name"] == method]
            for group, style, more in ((own, ".", {"alpha": 0.5}), (front(own), "-", {"label": method})):
                sizes = [4 * record["params"] / record["bytes"] for record in group]
                axes.plot(sizes, [100 * record["accuracy"] for record in group], style, color=color, **more)
            accuracy, ratio = PRINTED["lenet-5"][method]
            axes.plot(ratio, accuracy, "x", color=color, markersize=8)
        axes.plot([], [], "x", color="0.4", label="the paper's table, its accounting")
        axes.set_ylim(bottom=98.0)
        axes.set_ylabel("MNIST test accuracy, %")
        ticks = [100, 200, 400, 800, 1600, 2400]
        title = f"{NETWORKS['lenet-5'].title}, compressed by three methods"
        label = "times smaller than float32 (1.72 MB), whole file"
        _finish(axes, title, label, ticks, [f"{tick}×" for tick in ticks])


def draw_sizes(records: Records, path: Path) -> None:
    """Accuracy against size, smaller to the left: runs of `quick` with their spread, and what others report."""
    with _figure(path) as (axes,):
        accuracies = [100 * record["accuracy"] for record in records]
        axes.plot([record["bytes"] for record in records], accuracies, ".", color="tab:red", alpha=0.4)
        groups: dict[str, list[Record]] = {}
        for record in records:
            groups.setdefault(record["name"].rpartition("-")[0], []).append(record)
        means = sorted(
            (statistics.mean(r["bytes"] for r in group), statistics.mean(100 * r["accuracy"] for r in group))
            for group in groups.values()
        )
        label = "bayeszip, recipe quick (mean of the seeds)"
        axes.plot(*zip(*means, strict=True), "-o", color="tab:red", label=label)
        axes.set_xlim(1_700, 60_000)
        axes.set_ylim(97.7, 98.6)
        _draw_quoted(axes, "lenet-300-100", records[0]["params"])
        axes.set_ylabel("MNIST test accuracy, %")
        ticks = [2_000, 4_000, 8_000, 16_000, 32_000]
        title = f"{NETWORKS['lenet-300-100'].title}, compressed"
        _finish(axes, title, "size of the network (float32: 1.07 MB)", ticks, [f"{tick // 1000} kB" for tick in ticks])


def draw_networks(records: Records, peer: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """`frontier-MODEL.svg` for each network that has records, and `frontier.svg` with all; returns which these are.

    Args:
        peer: NNCodec's figures for the pretrained networks: `model`, `bytes`, `accuracy`, `validation_accuracy`.
    """
    drawn = [model for model in NETWORKS if any(record["model"] == model for record in records)]
    for model in drawn:
        with _figure(folder / f"frontier-{model}.svg") as (axes,):
            _draw_network(axes, model, records, peer)
    if drawn:
        columns = min(2, len(drawn))
        with _figure(folder / "frontier.svg", -(-len(drawn) // columns), columns) as panels:
            for axes, model in zip(panels, drawn, strict=False):
                _draw_network(axes, model, records, peer)
            for axes in panels[len(drawn) :]:
                axes.set_visible(False)
    return drawn


def _draw_network(axes: Axes, model: str, records: Records, peer: Sequence[Mapping[str, Any]]) -> None:
    """Our curves, NNCodec's, what others report, and the pretrained network's accuracy."""
    own = [record for record in records if record["model"] == model]
    curves = {curve: points for curve in CURVES if curve.model == model and (points := _points(own, curve))}
    quoted = quoted_for(model)
    before = {augmented: _mean_before(own, curves, augmented) for augmented in sorted({c.augmented for c in curves})}
    lowest, highest = _heights([point for points in curves.values() for point in points], quoted, [*before.values()])
    sizes = [record["bytes"] for record in own] + [row.size(own[0]["params"]) for row in quoted]
    for curve, points in curves.items():
        _draw_curve(axes, points, curve)
    for augmented, accuracy in before.items():
        said = "with" if augmented else "without"
        axes.plot([], [], "-o", color=OURS[augmented], label=f"bayeszip, {said} augmentation")
        axes.axhline(accuracy, color=OURS[augmented], linestyle=":")
    best = front((dict(row) for row in peer if row["model"] == model), by="accuracy")
    others = [(row["bytes"], 100 * row["accuracy"]) for row in best]
    if others:
        axes.plot(*zip(*others, strict=True), "-s", color=PEER, markersize=4, label="NNCodec, pretrained network")
        sizes += [size for size, accuracy in others if accuracy > lowest]
    axes.plot([], [], ":", color="0.4", label="the pretrained networks' mean")
    axes.set_ylim(lowest, highest)
    left, right = 0.8 * min(sizes), 3 * max(sizes)
    axes.set_xlim(left, right)
    _draw_quoted(axes, model, own[0]["params"])
    axes.set_ylabel(_accuracy_of(model))
    _finish(axes, f"{NETWORKS[model].title} (float32: {4 * own[0]['params'] / 1e6:.2f} MB)", *_kilobytes(left, right))


def _mean_before(records: Records, curves: Iterable[Curve], augmented: bool) -> float:
    """The accuracy of the networks that curves with augmentation, or those without, began from."""
    groups = (group for curve in curves if curve.augmented == augmented for _, group in curve_groups(records, curve))
    return statistics.mean(100 * record["accuracy_before"] for group in groups for record in group)


def _heights(points: Sequence[Point], quoted: Sequence[Quoted], before: Sequence[float]) -> tuple[float, float]:
    """What of the accuracies is shown.

    Endings that are further below the least of the headlines than it is below the pretrained networks would press the
    rest together.
    """
    least = min([point.accuracy for point in points if point.is_headline] or [point.accuracy for point in points])
    shown = [point.accuracy for point in points if point.accuracy >= 2 * least - max([least, *before])]
    heights = [*shown, *(100 - row.error for row in quoted), *before]
    margin = 0.1 * (max(heights) - min(heights)) or 0.5
    return min(heights) - margin, max(heights) + margin


def _kilobytes(left: float, right: float) -> tuple[str, list[float], list[str]]:
    """The title of an axis of sizes, its ticks, and what stands at them."""
    steps = (1, 2, 5) if right > 10 * left else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    ticks = [step * 10**power for power in range(2, 8) for step in steps]
    ticks = [tick for tick in ticks if left <= tick <= right]
    return "whole file, kB", ticks, [f"{tick / 1000:g}" for tick in ticks]


def _accuracy_of(model: str) -> str:
    return f"{'MNIST' if NETWORKS[model].data == 'mnist' else 'CIFAR-10'} test accuracy, %"


def _draw_curve(axes: Axes, points: Sequence[Point], curve: Curve) -> None:
    """All points, a line through those that no other beats on validation images, headlines larger."""
    color = OURS[curve.augmented]
    best = front(point._asdict() for point in points)
    axes.plot([p["bytes"] for p in best], [p["accuracy"] for p in best], "-", color=color, alpha=0.7)
    for point in points:
        size = 9 if point.is_headline else 5
        axes.plot(point.bytes, point.accuracy, "o", color=color, markersize=size, alpha=1 if point.is_headline else 0.6)


def _points(records: Records, curve: Curve) -> list[Point]:
    return [_point(group, point.is_headline) for point, group in curve_groups(records, curve)]


def _point(group: Records, is_headline: bool) -> Point:
    size, accuracy = (statistics.mean(record[name] for record in group) for name in ("bytes", "accuracy"))
    return Point(size, 100 * accuracy, mean_of(group, "validation_accuracy"), is_headline)


def draw_parts(records: Records, path: Path) -> None:
    """A panel for each network that parts were tried on."""
    drawn = [ablated for ablated in ABLATED if any(record["model"] == ablated.model for record in records)]
    if drawn:
        with _figure(path, len(drawn), width=1.5) as panels:
            for axes, ablated in zip(panels, drawn, strict=True):
                _draw_parts_of(axes, ablated, records)


def _draw_parts_of(axes: Axes, ablated: Ablated, records: Records) -> None:
    """A line for each part, through its strengths, and one for the part with symbols by rate and distortion."""
    drawn: list[Point] = []
    for place, (part, (_, meaning, _)) in enumerate(PARTS.items()):
        for rate, style, label in ((0, "-o", meaning), (SNAP, "--s", None)):
            groups = (part_group(records, ablated.model, strength, part, rate) for strength in ablated.strengths)
            points = [_point(group, False) for group in groups if group]
            places = [point.bytes for point in points], [point.accuracy for point in points]
            axes.plot(*places, style, color=f"C{place}", markersize=5, label=label)
            drawn += points
    axes.plot([], [], "--s", color="0.4", markersize=5, label="the same, and symbols by rate and distortion")
    heights, sizes = [point.accuracy for point in drawn], [point.bytes for point in drawn]
    # What a part has ruined would press the others together.
    axes.set_ylim(bottom=max(min(heights), max(heights) - SHOWN) - 0.05)
    axes.set_ylabel(_accuracy_of(ablated.model))
    _finish(axes, f"{NETWORKS[ablated.model].title}, part by part", *_kilobytes(0.9 * min(sizes), 1.1 * max(sizes)))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_quoted(axes: Axes, model: str, parameters: int) -> None:
    """What others report, once the axes have their limits; hollow where it was not read at its source."""
    rows = [(row, (row.size(parameters), 100 - row.error)) for row in quoted_for(model)]
    for row, place in rows:
        hollow = {"markerfacecolor": "white"} if row.read == "second-hand" else {}
        axes.plot(*place, "o", color="0.6", markersize=5, **hollow)
    points = axes.transData.transform([place for _, place in rows]) * 72 / axes.figure.dpi if rows else ()
    end = axes.transAxes.transform((1, 0))[0] * 72 / axes.figure.dpi
    spots = free_spots([(x, y, len(row.method)) for (row, _), (x, y) in zip(rows, points, strict=True)], end)
    for (row, place), spot in zip(rows, spots, strict=True):
        axes.annotate(row.method, place, spot, ha="left" if spot[0] > 0 else "right", **GRAY)


def free_spots(labels: Sequence[tuple[float, float, int]], end: float = math.inf) -> list[tuple[int, int]]:
    """For each label, by where its point is and how many letters it has, the first spot beside it that is still free.

    It is to the right of the point, or to the left where it would reach beyond the end of the panel.

    >>> free_spots([(0, 0, 10), (20, 0, 10)])
    [(6, -3), (6, 5)]
    >>> free_spots([(0, 0, 10), (20, 0, 10)], end=60)
    [(6, -3), (-6, 5)]
    """
    taken: list[tuple[float, float, float]] = []
    chosen = []
    for x, y, letters in labels:
        width = 4.3 * letters
        side = 6 if x + 6 + width <= end else -6
        left = x + side - (width if side < 0 else 0)

        def overlap(rise: float, y: float = y, left: float = left, width: float = width) -> int:
            low = y + rise
            return sum(left < right and at < left + width and abs(low - height) < 8 for at, right, height in taken)

        rise = min((-3, 5, -11, 13, -19, 21), key=overlap)
        taken.append((left, left + width, y + rise))
        chosen.append((side, rise))
    return chosen
