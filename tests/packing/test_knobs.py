"""One knob, and the search that gets to it."""

import math

import numpy as np
import pytest

from bayeszip.errors import RecipeError, TargetError
from bayeszip.packing.knobs import FINEST, Knob, Trial, at_error, within_bytes
from bayeszip.tensors import QuantizedTensor


def test_knobs_contradict_each_other():
    with pytest.raises(RecipeError, match="max_error and max_bytes contradict each other"):
        Knob(max_error=0.1, max_bytes=100)


@pytest.mark.parametrize(
    ("name", "value"),
    [("quality", 0), ("quality", 100), ("max_error", 0), ("max_error", 1), ("components", 2**16), ("max_bytes", 0)],
)
def test_a_knob_out_of_range_is_named(name, value):
    with pytest.raises(RecipeError, match=f"{name} must"):
        Knob(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("quality", "95"), ("max_error", True), ("components", 2.5), ("max_bytes", 100.5)]
)
def test_a_knob_that_is_no_such_number_is_named(name, value):
    with pytest.raises(RecipeError, match=f"{name} must be a (whole )?number, not {value!r}"):
        Knob(**{name: value})


def test_numbers_of_numpy_are_numbers():
    assert Knob(max_bytes=np.int64(100)) == Knob(max_bytes=100)
    assert Knob(quality=np.float32(95)).error == pytest.approx(0.05)


def test_the_error_is_what_quality_lacks():
    assert Knob(quality=95).error == pytest.approx(0.05)
    assert Knob().error == pytest.approx(0.02)


class Bent:
    """A quantizer whose error is not its factor, and whose files shrink as errors grow."""

    def __init__(self, power: float) -> None:
        self.power, self.calls = power, 0

    def at(self, factor: float) -> Trial:
        self.calls += 1
        tensor = QuantizedTensor(np.zeros(1, np.uint8), np.zeros(1))
        return Trial({"w": tensor}, 1 - math.exp(-3 * factor**self.power))


@pytest.mark.parametrize("power", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("error", [0.003, 0.05, 0.6])
def test_the_search_comes_close_from_below(power, error):
    quantizer = Bent(power)
    assert 0.98 * error < at_error(quantizer, error).error <= error
    assert quantizer.calls <= 12


@pytest.mark.parametrize("budget", [400, 2000, 7000])
def test_a_budget_is_kept_and_nearly_filled(budget):
    def size(trial: Trial) -> int:
        return 100 + round(-1000 * math.log(trial.error))

    found = within_bytes(Bent(1.0), size, budget)
    assert 0.9 * budget < size(found) <= budget or found.error <= 3 * FINEST


@pytest.mark.parametrize("over", [0.001, 0.004, 0.009])
def test_a_file_that_is_a_little_too_large_is_not_the_end_of_the_search(over):
    """The first trial lies closer to the budget than the search need come, but on its wrong side."""

    def size(trial: Trial) -> int:
        return round(1e6 / trial.error)

    budget = round(size(Bent(1.0).at(0.02)) * (1 - over))
    assert 0.98 * budget < size(within_bytes(Bent(1.0), size, budget, 0.02)) <= budget


def test_what_is_out_of_reach_is_said():
    with pytest.raises(TargetError, match="the smallest file found has 500 bytes, more than 400"):
        within_bytes(Bent(1.0), lambda trial: 500, 400)
