"""The benchmark of the order of units, on a committed file."""

import math
import runpy
from pathlib import Path

import pytest

from bayeszip import codec

ROOT = Path(__file__).resolve().parents[2]
MODULE = runpy.run_path(str(ROOT / "benchmarks" / "unit_order.py"))


def test_sorting_lies_between_a_random_order_and_none():
    model = codec.decode((ROOT / "results" / "table" / "lenet-5-vd+sws-10.bayz").read_bytes())
    at_random, in_order, without = MODULE["sizes"](model)
    assert without < in_order < at_random
    hidden = [model.tensors[name].shape[0] for name in model.tensors if name.endswith("weight")][:-1]
    assert at_random - without == pytest.approx(sum(math.log2(math.factorial(units)) for units in hidden) / 8)
