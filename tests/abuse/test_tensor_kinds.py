"""The one list of kinds has all that a file may hold."""

from dataclasses import fields, is_dataclass
from random import Random
from typing import get_args

import numpy as np
import tensor_kinds as kinds
from mutation import Outcome, trial

from bayeszip.codec import describe, ways
from bayeszip.tensors import CompressedModel, Grid, QuantizedTensor


def _drawn() -> list[QuantizedTensor]:
    numbers = np.random.default_rng(0)
    return [kind(numbers, (6, 5)) for kind in kinds.KINDS.values()]


def test_there_are_grids_of_every_type():
    assert {type(tensor.grid) for tensor in _drawn()} == {type(None), *get_args(Grid)}


def test_kinds_differ_in_whatever_a_tensor_may_differ_in():
    """A new field of a tensor, or of a grid, must be one that some kind here sets to something else than others do."""
    for told in (_drawn(), [tensor.grid for tensor in _drawn() if tensor.grid], [t.scale for t in _drawn() if t.scale]):
        for kind in {type(each) for each in told}:
            assert is_dataclass(kind)
            for field in fields(kind):
                values = {repr(getattr(each, field.name)) for each in told if type(each) is kind}
                assert len(values) > 1 or field.name in {"step", "size", "base", "ratio", "axis", "scale"}, field.name


def test_every_kind_takes_any_shape():
    numbers = np.random.default_rng(1)
    for shape in ((), (0,), (3,), (0, 2), (2, 3, 1, 2)):
        for name, kind in kinds.KINDS.items():
            assert kind(numbers, shape).shape == shape, name


def test_files_are_canonical_and_coded_in_every_way():
    outcome = Outcome()
    with kinds.small_ways():
        for blob in kinds.files():
            trial(blob, outcome)
        options = {describe(blob).options.get("ways", 0) for blob in kinds.files()}
    assert (outcome.accepted, outcome.faults) == (len(kinds.files()), [])
    known = {getattr(ways, name) for name in ways.__all__ if name.isupper()} - {ways.LEAST_CELLS}
    assert {option >> 1 & 3 for option in options} == known
    assert {option & 1 for option in options} == {0, 1}


def test_ways_are_drawn_that_suit_a_model():
    model = CompressedModel({"a": _drawn()[0], "b": _drawn()[1]})
    with kinds.small_ways():
        drawn = {kinds.any_ways(model, Random(seed)) for seed in range(50)}
    assert len(drawn) == 18  # streams or not, and three ways for each of two tensors
