"""The charts draw the figures they are given, where they belong."""

import itertools
import re

import numpy as np
import pytest

from bayeszip.report import charts
from bayeszip.report.contents import Curve, Point, Span
from bayeszip.report.first_layer import Picture
from bayeszip.snapshots import BINS, MixtureShape, Snapshot

MIXTURE = MixtureShape(means=(0.0, -0.4, 0.3), stds=(0.01, 0.02, 0.1), proportions=(0.9, 0.04, 0.06))


def boxes(markup):
    """x, width, y and height of each rect."""
    numbers = r'="(-?[\d.]+)"'
    return [
        tuple(float(re.search(f" {name}{numbers}", rect).group(1)) for name in ("x", "width", "y", "height"))
        for rect in re.findall(r"<rect[^>]*>", markup)
    ]


def test_the_squares_have_the_areas_of_the_sizes(finished):
    (_, before, *_), (_, after, *_) = boxes(charts.scale_squares(finished.contents))
    assert before**2 / after**2 == pytest.approx(finished.contents.ratio, rel=1e-2)


def test_the_mixture_expects_every_weight_somewhere():
    places = np.linspace(-2, 2, 401)
    counts = charts.mixture_counts(MIXTURE, places, places[1] - places[0], 1000)
    assert counts.sum() == pytest.approx(1000)
    assert counts[190:211].sum() == pytest.approx(900, abs=10)


def test_a_histogram_has_a_bar_for_each_bin_that_is_not_empty():
    counts = np.zeros(BINS, int)
    counts[[10, 80, 81]] = [1, 100, 10]
    chart = charts.snapshot_chart(
        Snapshot("vd", 0, 5, 0.5, tuple(counts.tolist()), (0,) * BINS, MIXTURE), reach=1.0, top=100.0
    )
    low, high, middle = boxes(chart)
    assert re.findall(r"<title>(.*?)</title>", chart) == [
        "around -0.435: 1 weights, 0 kept",
        "around 0: 100 weights, 0 kept",
        "around 0.00621: 10 weights, 0 kept",
    ]
    # On a logarithmic scale a factor of ten is the same step everywhere.
    assert high[3] - middle[3] == pytest.approx(middle[3] - low[3], abs=0.05)
    assert "at the start of vd" in chart


def test_curves_run_from_left_to_right_and_mark_their_phases():
    chart = charts.curves(
        [Curve("data", (1, 2, 3), (0.5, 0.25, 0.125)), Curve("nothing", (), ())],
        [Span("l2", 0, 1), Span("a very long name of a phase, longer than its place", 1, 3)],
        "nats",
    )
    (path,) = re.findall(r'<path d="M(.*?)" class="stroke1">', chart)
    places = [tuple(map(float, place.split())) for place in path.split("L")]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted(y for _, y in places)
    assert chart.count('class="band') == 2
    assert ">l2</text>" in chart
    assert "longer than its place</text>" not in chart
    assert "data at epoch 2: 0.25" in chart


def test_labels_lie_apart():
    points = [Point(f"method {n} (source)", 1000 + 150 * n, 99.0, "quoted", "test") for n in range(4)]
    points.append(Point("this file", 1100, 99.01, "file", "test"))
    chart = charts.accuracy_and_size(points)
    text = r'<text x="([\d.]+)" y="([\d.]+)" class="label (?:strong )?(start|middle|end)">((?:method|this file).*?)<'
    placed = re.findall(text, chart)
    spans = []
    for x, y, anchor, text in placed:
        width = 6.4 * len(text)
        start = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        spans.append((start, start + width, float(y)))
    assert len(spans) == 5
    for one, other in itertools.combinations(spans, 2):
        assert one[1] <= other[0] or other[1] <= one[0] or abs(one[2] - other[2]) >= 13


def test_epochs_that_are_far_off_are_left_to_the_table():
    points = [
        Point("early", 5000, 20.0, "epoch", "validation"),
        Point("late", 2000, 98.0, "epoch", "validation"),
        Point("this file", 2000, 98.5, "file", "validation"),
    ]
    chart = charts.accuracy_and_size(points)
    assert "early" not in chart
    assert "late: 2,000 B, 98.00 % (validation data)" in chart


def test_tiles_are_deeper_where_weights_are_larger():
    tile = np.array([[1.0, -0.5], [0.0, 0.1]])
    drawn = charts.tiles(Picture("w", "kernels", (tile,), 1))
    assert re.findall(r'<path d="(.*?)" class="(fill\d)" fill-opacity="([\d.]+)"', drawn) == [
        ("M1 1h1v1h-1z", "fill1", "0.33"),
        ("M0 0h1v1h-1z", "fill1", "1"),
        ("M1 0h1v1h-1z", "fill2", "0.6"),
    ]


def test_colors_are_those_of_the_channels():
    tile = np.zeros((1, 2, 3))
    tile[0, 0] = [1.0, 0.0, -1.0]
    drawn = charts.tiles(Picture("w", "colors", (tile,), 1))
    assert re.findall(r'<path d="(.*?)" fill="(.*?)"', drawn) == [("M0 0h1v1h-1z", "#ff8000")]


def test_maps_leave_out_what_is_empty():
    total = np.array([[0, 3], [1, 0]])
    assert charts.input_map(total).count("<rect") == 2
    assert "read by 3 weights" in charts.input_map(total)
    assert charts.density_map(total / 4).count("<rect") == 2
