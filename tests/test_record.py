"""The record of a run: what it counts, and what it tells."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import bayeszip
from bayeszip import codec, compressing
from bayeszip.graph.indices import beside_parameters
from bayeszip.recipe import Coding, recipe
from bayeszip.record import size_figures, write_record
from bayeszip.report.run import read_run


class Positioned(nn.Module):
    """A table of positions that is no parameter, and a hidden unit that is dead."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
        self.hidden, self.out = nn.Linear(8, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.hidden.weight.fill_(0.5)[0] = 0
            self.hidden.bias.fill_(0.25)[0] = 0
            self.out.weight.fill_(0.5)
            self.out.bias.fill_(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x + self.positions).relu())


@pytest.mark.parametrize("keep_indices", [False, True])
def test_neither_buffers_nor_indices_are_counted_as_parameters(keep_indices):
    coding = Coding(keep_indices=keep_indices)
    result = bayeszip.pack(Positioned(), example_inputs=torch.randn(2, 16, 8), coding=coding)
    figures = size_figures(result.description, result.beside)
    # Of 54 + 21 the first hidden unit is gone, with its row, its bias and its column.
    assert (figures["params"], figures["params_kept"], figures["nonzero"]) == (75, 63, 63)
    model, description = codec.inspect(result.blob)
    assert size_figures(description, beside_parameters(model)) == figures
    assert figures["bytes"] == result.bytes


@pytest.fixture(scope="module")
def result():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    batches = [(inputs, (inputs[:, 0] > 0).long())]
    quick = recipe("quick").override("epochs_scale=0.02")
    return compressing.compress(nn.Linear(4, 2), batches, recipe=quick, watcher=bayeszip.Watcher())


def rewritten(result, folder, **changes):
    """The record, read as JSON that holds no NaN, of `result` with a history of which each epoch has `changes`."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    history = tuple(dataclasses.replace(stats, **changes) for stats in result.fit.history)
    result = dataclasses.replace(result, fit=dataclasses.replace(result.fit, history=history))
    write_record(folder, result, size_figures(result.description, result.beside))
    return json.loads((folder / "result.json").read_text(), parse_constant=refuse)


def test_small_losses_keep_their_digits(result, tmp_path):
    record = rewritten(result, tmp_path, parts={"data": 6.6123456e-07}, loss=1.234567e-6)
    assert {stats["parts"]["data"] for stats in record["history"]} == {6.6123e-07}
    assert {stats["loss"] for stats in record["history"]} == {1.2346e-06}


def test_what_is_not_a_number_is_null(result, tmp_path):
    record = rewritten(result, tmp_path, loss=math.nan, metric=math.inf)
    assert {(stats["loss"], stats["metric"]) for stats in record["history"]} == {(None, None)}
    assert {stats.loss for stats in read_run(tmp_path).history} == {None}


def test_a_record_tells_of_network_and_data_as_they_were_given(result, tmp_path):
    sizes = size_figures(result.description, result.beside)
    write_record(tmp_path, result, sizes)
    assert (read_run(tmp_path).model, read_run(tmp_path).data, read_run(tmp_path).says_data) == (None, None, True)
    write_record(tmp_path, result, sizes, model="lenet-5", data="idx:mine")
    assert (read_run(tmp_path).model, read_run(tmp_path).data) == ("lenet-5", "idx:mine")
