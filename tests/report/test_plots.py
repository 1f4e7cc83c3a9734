"""Plots: a PNG and an SVG for everything there is data for, the same every time."""

import sys

import numpy as np
import pytest

from bayeszip import CompressedModel, QuantizedTensor, codec
from bayeszip.errors import ModelError
from bayeszip.report import gather
from bayeszip.report.plots import write_plots

ALL = {"bytes", "weights", "first-layer", "training", "accuracy-size"}


def test_every_chart_is_drawn(finished, tmp_path):
    paths = write_plots(finished.contents, tmp_path)
    assert {path.name for path in paths} == {f"{name}.{ending}" for name in ALL for ending in ("png", "svg")}
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


def test_a_file_alone_gives_what_it_can_and_the_same_again(tmp_path):
    tensors = {"$\\frac$": QuantizedTensor(np.eye(3, dtype=int), np.array([0, 1.5], np.float32))}
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel(tensors)))
    contents = gather(tmp_path / "net.bayz")
    first, second = (write_plots(contents, tmp_path / name) for name in ("first", "second"))
    assert {path.stem for path in first} == {"bytes", "weights", "first-layer"}
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_without_matplotlib_the_extra_is_named(finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModelError, match=r"bayeszip\[plot\]"):
        write_plots(finished.contents, tmp_path)
