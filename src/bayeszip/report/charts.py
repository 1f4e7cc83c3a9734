"""The charts of the page, drawn as SVG by hand: each has a title, named axes, and figures that show when pointed at."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import numpy as np

from bayeszip.report.axes import Frame, Scale, padded
from bayeszip.report.contents import Contents, Curve, Point, Span, Values
from bayeszip.report.first_layer import Picture
from bayeszip.report.markup import Markup, element, join
from bayeszip.snapshots import BINS, MixtureShape, Snapshot
from bayeszip.summary import show_bytes

__all__ = [
    "accuracy_and_size",
    "colored",
    "curves",
    "density_map",
    "input_map",
    "mixture_counts",
    "moment_name",
    "scale_squares",
    "short_count",
    "snapshot_chart",
    "tiles",
    "values_chart",
]

#: Opacities in which a weight's size is shown.
SHADES = 6

#: Colors that lines take turns in.
COLORS = 4


def scale_squares(contents: Contents) -> Markup:
    """The network before and after, as squares whose areas are their sizes."""
    side = 132.0
    small = max(1.0, side / math.sqrt(max(contents.ratio, 1e-9)))
    side, small = (side, small) if small <= side else (side * side / small, side)
    before, after = 4 * contents.description.original_parameters, contents.description.bytes
    label = f"Two squares to scale: {show_bytes(before)} before, {show_bytes(after)} after"
    base, left, right = 140.0, 0.0, side + 26
    return element(
        "svg",
        element(
            "rect",
            _title(f"{before:,} bytes in float32"),
            x=left,
            y=base - side,
            width=side,
            height=side,
            class_="past",
        ),
        element(
            "rect",
            _title(f"{after:,} bytes in the file"),
            x=right,
            y=base - small,
            width=small,
            height=small,
            class_="fill1",
        ),
        element("text", show_bytes(before), x=left, y=base + 18, class_="label"),
        element("text", show_bytes(after), x=right, y=base + 18, class_="label strong"),
        viewBox=f"0 0 {right + max(small, 72):.0f} 164",
        role="img",
        aria_label=label,
        class_="squares",
    )


def mixture_counts(mixture: MixtureShape, places: np.ndarray, width: float, weights: int) -> np.ndarray:
    """How many of `weights` the mixture expects in a bin of `width` around each place."""
    means, stds, proportions = (
        np.array(column)[:, None] for column in (mixture.means, mixture.stds, mixture.proportions)
    )
    below, above = (_normal_cdf((places + offset - means) / stds) for offset in (-width / 2, width / 2))
    counts: np.ndarray = weights * (proportions * (above - below)).sum(axis=0)
    return counts


def _normal_cdf(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(values / math.sqrt(2)))


def snapshot_chart(snapshot: Snapshot, reach: float, top: float) -> Markup:
    """Weights in bins, on a logarithmic scale: all, those that would be kept, and what the mixture expects."""
    frame = _weights_frame(reach, top)
    x, y = frame.place()
    base, width = y(frame.y.low), 2 * snapshot.reach / BINS
    middles = [(number - BINS // 2) * width for number in range(BINS)]

    def steps(counts: Sequence[int], kind: str) -> Markup:
        outline = "".join(
            f"M{x(middle - width / 2):.2f} {base:.2f}V{y(count):.2f}H{x(middle + width / 2):.2f}V{base:.2f}z"
            for middle, count in zip(middles, counts, strict=True)
            if count
        )
        return element("path", d=outline, class_=kind)

    touched = join(
        element(
            "rect",
            _title(f"around {middle:.3g}: {count:,} weights, {kept:,} kept"),
            x=x(middle - width / 2),
            y=y(count),
            width=x(width) - x(0.0),
            height=base - y(count),
            class_="touch",
        )
        for middle, count, kept in zip(middles, snapshot.counts, snapshot.kept, strict=True)
        if count
    )
    curve = _mixture_curve(snapshot.mixture, frame, width, sum(snapshot.counts)) if snapshot.mixture else None
    drawn = (steps(snapshot.counts, "past"), steps(snapshot.kept, "fill1"), curve, touched)
    return frame.drawn(f"Histogram of the weights, {moment_name(snapshot)}", *drawn)


def moment_name(snapshot: Snapshot) -> str:
    """When a snapshot was taken, in words."""
    if snapshot.epoch == 0:
        return f"at the start of {snapshot.phase}"
    if snapshot.epoch == snapshot.epochs:
        return f"at the end of {snapshot.phase}"
    return f"{snapshot.phase}, epoch {snapshot.epoch} of {snapshot.epochs}"


def _weights_frame(reach: float, top: float) -> Frame:
    return Frame(
        x=Scale(-reach, reach),
        y=Scale(0.7, max(top, 10.0) * 1.6, log=True),
        x_label="weight",
        y_label="weights in a bin",
        y_tick=short_count,
        height=222,
    )


def _mixture_curve(mixture: MixtureShape, frame: Frame, width: float, weights: int) -> Markup:
    x, y = frame.place()
    places = np.linspace(frame.x.low, frame.x.high, 481)
    expected = mixture_counts(mixture, places, width, weights)
    # A rim keeps the line apart from the bars behind it.
    return join((_line(places, expected, x, y, "rim"), _line(places, expected, x, y, "stroke2")))


def _line(places: np.ndarray, values: np.ndarray, x: Scale, y: Scale, kind: str) -> Markup:
    """A line that is broken where it would leave the chart below."""
    steps, pen_up = [], True
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        if value < y.low:
            pen_up = True
            continue
        steps.append(f"{'M' if pen_up else 'L'}{x(place):.1f} {y(min(value, y.high)):.1f}")
        pen_up = False
    return element("path", d="".join(steps), class_=kind) if steps else Markup("")


def values_chart(values: Values, reach: float, top: float) -> Markup:
    """The values that the file's weights take: a pin for each shared value, or bins."""
    frame = _weights_frame(reach, top)
    x, y = frame.place()
    marks = []
    pairs = [(0.0, values.zeros), *zip(values.values, values.counts, strict=True)]
    for value, count in pairs:
        if not count or abs(value) > reach:
            continue
        kind = "1" if value else "0"
        title = _title(f"{value:.4g}: {count:,} weights")
        if values.width and value:
            left, right = x(value - values.width / 2), x(value + values.width / 2)
            size = {"width": max(right - left - 0.3, 0.4), "height": y(frame.y.low) - y(count)}
            marks.append(element("rect", title, x=left, y=y(count), class_="fill1", **size))
        else:
            stem = element("line", x1=x(value), x2=x(value), y1=y(frame.y.low), y2=y(count), class_=f"stem{kind}")
            marks.append(
                element("g", title, stem, element("circle", cx=x(value), cy=y(count), r=3.2, class_=f"dot{kind}"))
            )
    return frame.drawn("The values of the weights in the file", *marks)


def colored(lines: Sequence[Curve]) -> Iterator[tuple[int, Curve]]:
    """Each line with the number of its color; colors come again where lines are many."""
    return zip(cycle(range(1, COLORS + 1)), lines, strict=False)


def curves(lines: Iterable[Curve], spans: Sequence[Span], y_label: str, *, log: bool = False, unit: str = "") -> Markup:
    """Figures over the epochs of a run, its phases marked."""
    drawn = [line for line in lines if line.values]
    values = [value for line in drawn for value in line.values]
    low, high = (min(values) / 1.3, max(values) * 1.3) if log else padded(values)
    frame = Frame(
        x=Scale(0, max(span.end for span in spans)),
        y=Scale(low, high, log=log),
        x_label="epoch",
        y_label=y_label,
        y_tick=short_count if log else "{:g}".format,
    )
    x, y = frame.place()
    marks = []
    for number, line in colored(drawn):
        path = "L".join(f"{x(epoch):.1f} {y(value):.1f}" for epoch, value in zip(line.epochs, line.values, strict=True))
        marks.append(element("path", d=f"M{path}", class_=f"stroke{number}"))
        sparse = len(line.epochs) < 16
        marks += [
            element(
                "circle",
                _title(f"{line.label} at epoch {epoch}: {value:,.5g}{unit}"),
                cx=x(epoch),
                cy=y(value),
                r=2.2 if sparse else 4.0,
                class_=f"dot{number}" if sparse else "touch",
            )
            for epoch, value in zip(line.epochs, line.values, strict=True)
        ]
    return frame.drawn(f"{y_label} over the epochs of the run", *marks, behind=_phases(frame, spans))


def _phases(frame: Frame, spans: Sequence[Span]) -> Markup:
    x, y = frame.place()
    top, base = y(frame.y.high), y(frame.y.low)
    marks = []
    for number, span in enumerate(spans):
        left, width = x(span.start), x(span.end) - x(span.start)
        band = "band odd" if number % 2 else "band"
        marks.append(
            element("rect", _title(f"phase {span.name}"), x=left, y=top, width=width, height=base - top, class_=band)
        )
        if width > 7 * len(span.name):
            marks.append(element("text", span.name, x=left + width / 2, y=top - 6, class_="phase middle"))
    return join(marks)


def accuracy_and_size(points: Sequence[Point]) -> Markup:
    """Accuracy against size, smaller to the left."""
    points = _comparable(points)
    sizes, accuracies = [point.bytes for point in points], [point.accuracy for point in points]
    frame = Frame(
        x=Scale(min(sizes) / 1.4, max(sizes) * 1.6, log=True),
        y=Scale(*padded(accuracies, 0.12)),
        x_label="size of the file, bytes",
        y_label="accuracy, %",
        x_tick=short_count,
        width=760,
        height=390,
    )
    x, y = frame.place()
    marks = []
    for point in points:
        title = _title(f"{point.label}: {show_bytes(point.bytes)}, {point.accuracy:.2f} % ({point.measured} data)")
        kind = f"file {point.measured}" if point.kind in ("file", "other") else point.kind
        radius = {"epoch": 3.0, "quoted": 4.0, "other": 4.0, "file": 6.0}[point.kind]
        marks.append(element("circle", title, cx=x(point.bytes), cy=y(point.accuracy), r=radius, class_=kind))
    return frame.drawn("Accuracy against size", *marks, *_labels(points, frame))


def _comparable(points: Sequence[Point]) -> list[Point]:
    """Without epochs so bad that what matters would be pressed into a corner; the table has them."""
    least = min(point.accuracy for point in points if point.kind != "epoch") - 2
    return [point for point in points if point.kind != "epoch" or point.accuracy >= least]


def _labels(points: Sequence[Point], frame: Frame) -> list[Markup]:
    """Names of the file and of quoted points, each at the first place beside its point that is free."""
    x, y = frame.place()
    taken = [(x(point.bytes) - 6, y(point.accuracy) - 6, 12.0, 12.0) for point in points]
    labels = []
    for point in sorted(points, key=lambda point: (point.kind != "file", y(point.accuracy), point.label)):
        if point.kind == "epoch":
            continue
        text = f"this file, {point.measured}" if point.kind == "file" else point.label.split(" (")[0]
        width = 6.4 * len(text)
        places = list(_beside(x(point.bytes), y(point.accuracy), width))
        inside = [place for place in places if frame.left <= place[0][0] and place[0][0] + width <= frame.width]
        free = [place for place in inside if not any(_overlap(place[0], other) for other in taken)]
        box, anchor = (free or inside or places)[0]
        taken.append(box)
        start = box[0] + {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        kind = "label strong" if point.kind == "file" else "label"
        labels.append(element("text", text, x=start, y=box[1] + 11, class_=f"{kind} {anchor}"))
    return labels


Box = tuple[float, float, float, float]


def _beside(x: float, y: float, width: float) -> Iterable[tuple[Box, str]]:
    """Places for a label of `width` beside a point, and from where it is written: on either side, above and below,
    then the same farther off.
    """
    for off in (0, 14, 28):
        yield (x + 10, y - 7 - off, width, 14), "start"
        yield (x - 10 - width, y - 7 - off, width, 14), "end"
        yield (x - width / 2, y - 22 - off, width, 14), "middle"
        yield (x - width / 2, y + 8 + off, width, 14), "middle"
        yield (x + 10, y - 7 + off, width, 14), "start"


def _overlap(one: Box, other: Box) -> bool:
    across = one[0] < other[0] + other[2] and other[0] < one[0] + one[2]
    return across and one[1] < other[1] + other[3] and other[1] < one[1] + one[3]


def input_map(total: np.ndarray) -> Markup:
    """How many weights read each input."""
    most = max(int(total.max()), 1)
    cells = [
        element(
            "rect",
            _title(f"row {row}, column {column}: read by {int(count)} weights"),
            x=column,
            y=row,
            width=1,
            height=1,
            class_="fill1",
            fill_opacity=0.08 + 0.92 * int(count) / most,
        )
        for (row, column), count in np.ndenumerate(total)
        if count
    ]
    label = f"Map of the inputs; the one read most is read by {most} weights"
    return _grid(total.shape, cells, label, "map")


def tiles(picture: Picture) -> Markup:
    """A tile a unit, blue where a weight is positive, red where it is negative, deeper where it is larger; or in the
    colors it looks for.
    """
    largest = max((float(np.abs(tile).max()) for tile in picture.tiles), default=1.0) or 1.0
    drawn = []
    for tile in picture.tiles:
        rows, columns = tile.shape[:2]
        count = int(np.count_nonzero(tile))
        cells = _colored(tile / largest) if picture.kind == "colors" else _signed(tile / largest)
        drawn.append(
            element("svg", _title(f"{count:,} weights"), cells, viewBox=f"0 0 {columns} {rows}", class_="tile")
        )
    return element("div", *drawn, class_=f"tiles {picture.kind}", role="img", aria_label=f"{len(drawn)} units")


def _colored(tile: np.ndarray) -> Markup:
    """Gray where a pixel doesn't matter, else the color that a unit likes to see there."""
    levels = np.rint(127.5 + 127.5 * tile).astype(int)
    return join(
        element("path", d=f"M{column} {row}h1v1h-1z", fill="#{:02x}{:02x}{:02x}".format(*levels[row, column]))
        for row, column in np.argwhere(tile.any(axis=2)).tolist()
    )


def _signed(tile: np.ndarray) -> Markup:
    return join(
        element("path", d=_cells(mask), class_=kind, fill_opacity=0.2 + 0.8 * level / SHADES)
        for kind, level, mask in _shaded(tile)
    )


def _shaded(tile: np.ndarray) -> Iterable[tuple[str, int, np.ndarray]]:
    """The cells of each sign and shade."""
    levels = np.ceil(np.abs(tile) * SHADES).clip(0, SHADES)
    for kind, sign in (("fill1", tile > 0), ("fill2", tile < 0)):
        for level in range(1, SHADES + 1):
            mask = sign & (levels == level)
            if mask.any():
                yield kind, level, mask


def _cells(mask: np.ndarray) -> str:
    return "".join(f"M{column} {row}h1v1h-1z" for row, column in np.argwhere(mask).tolist())


def density_map(density: np.ndarray) -> Markup:
    """Where in a matrix the weights are that are not zero."""
    most = float(density.max()) or 1.0
    cells = [
        element(
            "rect",
            _title(f"{100 * share:.2g} % not zero"),
            x=column,
            y=row,
            width=1,
            height=1,
            class_="fill1",
            fill_opacity=0.06 + 0.94 * share / most,
        )
        for (row, column), share in ((place, float(value)) for place, value in np.ndenumerate(density))
        if share
    ]
    return _grid(density.shape, cells, "Density of the weights that are not zero", "map")


def _grid(shape: tuple[int, ...], cells: Sequence[Markup], label: str, kind: str) -> Markup:
    return element("svg", *cells, viewBox=f"0 0 {shape[1]} {shape[0]}", role="img", aria_label=label, class_=kind)


def _title(text: str) -> Markup:
    return element("title", text)


def short_count(value: float) -> str:
    """
    >>> short_count(2.0), short_count(50_000), short_count(2_000_000)
    ('2', '50 k', '2 M')
    """
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
