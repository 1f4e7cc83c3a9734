"""Schedules at their ends and in the middle."""

import pytest

from bayeszip.schedules import SCHEDULES, geometric, ramp


@pytest.mark.parametrize(
    ("name", "start", "middle", "end"), [("constant", 1, 1, 1), ("linear", 1, 0.5, 0), ("cosine", 1, 0.5, 0)]
)
def test_rates(name, start, middle, end):
    schedule = SCHEDULES[name]
    assert [schedule(done) for done in (0.0, 0.5, 1.0)] == pytest.approx([start, middle, end])


def test_every_schedule_is_known():
    assert set(SCHEDULES) == {"constant", "linear", "cosine"}


def test_ramp():
    assert [ramp(done, 0.5) for done in (0.0, 0.25, 0.5, 1.0)] == [0, 0.5, 1, 1]
    assert ramp(0.0, 0.0) == 1


def test_geometric():
    assert [geometric(done, 0.01, 0.0001) for done in (0.0, 0.5, 1.0)] == pytest.approx([0.01, 0.001, 0.0001])
