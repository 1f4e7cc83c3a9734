"""Scales and ticks: both ends where they belong, round values inside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeszip.report.axes import Frame, Scale, padded

MAGNITUDES = st.floats(1e-6, 1e6)


@given(MAGNITUDES, MAGNITUDES, st.booleans())
def test_a_scale_maps_its_ends_to_its_ends(low, length, log):
    scale = Scale(low, low + length, 10, 30, log)
    assert scale(low) == pytest.approx(10)
    assert scale(low + length) == pytest.approx(30)


@given(MAGNITUDES, MAGNITUDES, st.booleans())
def test_ticks_lie_inside_in_order_and_are_few(low, length, log):
    scale = Scale(low, low + length, log=log)
    ticks = scale.ticks(6)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 13
    assert all(low * (1 - 1e-6) - 1e-9 * length <= tick <= (low + length) * (1 + 1e-6) for tick in ticks)


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 10), [0, 2, 4, 6, 8, 10]),
        (Scale(-1.2, 1.2), [-1, -0.5, 0, 0.5, 1]),
        (Scale(0.7, 1e6, log=True), [1, 100, 1e4, 1e6]),
        (Scale(2e3, 6e4, log=True), [2e3, 5e3, 1e4, 2e4, 5e4]),
        (Scale(3, 3), [3]),
    ],
)
def test_ticks_are_round(scale, ticks):
    assert scale.ticks(6 if not scale.log or scale.high < 1e5 else 5) == pytest.approx(ticks)


def test_padding_leaves_room_even_around_a_single_value():
    for values in ([5.0], [0.0], [1.0, 2.0]):
        low, high = padded(values)
        assert low < min(values) <= max(values) < high


def test_a_frame_names_both_axes():
    drawn = Frame(Scale(0, 1), Scale(0, 1), "epoch", "bytes").drawn("A chart")
    assert ">epoch</text>" in drawn
    assert ">bytes</text>" in drawn
    assert 'aria-label="A chart"' in drawn
