"""Names from a file are data: never attributes, paths, markup or what a terminal obeys; and one family of errors."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bayeszip import loading
from bayeszip.codec import encode
from bayeszip.data import read_idx
from bayeszip.errors import BayeszipError, DataError, FormatError, ModelError, OutputError, TargetError
from bayeszip.graph import load_into, to_module
from bayeszip.report.run import read_run
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor

BOOK = np.array([0.0, 0.5], dtype=np.float32)
ESCAPE = "fc\x1b]0;owned\x07\x1b[2J.weight"


def named(name: str, *shape: int) -> CompressedModel:
    tensor = QuantizedTensor(np.ones(shape or (3, 3), dtype=np.uint8), BOOK)
    nodes = (Node("input", (0,), (), {"shape": (3,)}), Node("linear", (1,), (name, None)))
    return CompressedModel({name: tensor}, Graph(1, nodes, (2,)))


@pytest.mark.parametrize("kind", [ModelError, FormatError, DataError, OutputError, TargetError])
def test_no_message_steers_a_terminal(kind):
    message = str(kind(f"{ESCAPE} is\nno \u202ename"))
    assert "\x1b" not in message
    assert "\x07" not in message
    assert "\u202e" not in message
    assert "x1b[2J" in message


def test_a_name_is_never_looked_up_as_an_attribute():
    class Trap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        @property
        def secret(self) -> torch.Tensor:
            raise AssertionError("a name of the file was given to getattr")

        def __getattr__(self, name: str):
            if name in ("hidden", "secret"):
                raise AssertionError("a name of the file was given to getattr")
            return super().__getattr__(name)

    for name in ("secret", "hidden", "fc.weight.data", "fc.forward"):
        with pytest.raises(ModelError, match="no tensor"):
            load_into(named(name), Trap())


def test_names_that_nest_too_deep_are_refused():
    to_module(named(".".join("a" * 60))).to(torch.float64)
    with pytest.raises(FormatError, match="more than 64 parts"):
        to_module(named(".".join("a" * 480)))


def test_what_safetensors_keeps_for_itself_is_no_name(tmp_path):
    path = tmp_path / "x.bayz"
    path.write_bytes(encode(CompressedModel({"__metadata__": QuantizedTensor(np.ones(3, dtype=np.uint8), BOOK)})))
    for dense in (False, True):
        with pytest.raises(ModelError, match="__metadata__"):
            loading.export(path, tmp_path / "x.safetensors", dense=dense)


def test_no_command_prints_what_steers_a_terminal(tmp_path):
    file, weights = tmp_path / "x.bayz", tmp_path / "x.safetensors"
    file.write_bytes(encode(named(ESCAPE)))
    save_file({ESCAPE: torch.ones(3, 3)}, weights)
    commands = (
        ("info", str(file)),
        ("verify", str(file)),
        ("pack", str(weights), "-o", str(tmp_path / "y.bayz")),
        ("verify", str(file), "--against", "lenet-5", "--weights", str(weights)),
        ("report", str(file), "-o", str(tmp_path / "x.html")),
    )
    for command in commands:
        run = subprocess.run([sys.executable, "-m", "bayeszip", *command], capture_output=True, check=False)
        assert b"\x1b]" not in run.stdout + run.stderr, command
        assert b"\x1b[2J" not in run.stdout + run.stderr, command
        assert b"Traceback" not in run.stderr, command


def test_shrunk_recurrent_weights_that_do_not_fit_are_refused():
    """torch computes with them as they are, beyond their ends."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    tensor = QuantizedTensor(np.ones((4, 1), dtype=np.uint8), BOOK)
    with pytest.raises(ModelError, match="lstm"):
        load_into(CompressedModel({"rnn.weight_hh_l0": tensor}), Own())


def test_a_recurrent_layer_with_projections_keeps_its_sizes():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 5, proj_size=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    own = Own()
    same = QuantizedTensor(np.ones((20, 2), dtype=np.uint8), BOOK)
    with pytest.warns(UserWarning, match="doesn't hold rnn.weight_ih_l0, rnn.bias_ih_l0, .*Own keeps the values"):
        load_into(CompressedModel({"rnn.weight_hh_l0": same}), own)
    assert (own.rnn.hidden_size, own.rnn.proj_size) == (5, 2)
    smaller = QuantizedTensor(np.ones((20, 1), dtype=np.uint8), BOOK)
    with pytest.raises(ModelError, match=r"\(20, 1\)"):
        load_into(CompressedModel({"rnn.weight_hh_l0": smaller}), own)


@pytest.mark.parametrize(
    "record",
    [
        "[" * 100_000,
        "[]",
        "{}",
        '{"bytes": 1e999}',
        json.dumps({"bytes": 1, "seconds": 1, "seed": 1, "device": "", "versions": [], "recipe": {}, "history": []}),
        json.dumps({"bytes": 1, "seconds": 10**400, "seed": 1}),
    ],
)
def test_a_record_that_is_none_is_a_data_error(record, tmp_path):
    (tmp_path / "result.json").write_text(record)
    with pytest.raises(DataError):
        read_run(tmp_path)


@pytest.mark.parametrize("sizes", [(0, 2**32 - 1, 2**32 - 1), (0,) * 8, (2**32 - 1,) * 8, (1, 0, 2**31)])
def test_an_idx_file_that_claims_odd_sizes_is_refused_or_empty(sizes, tmp_path):
    path = tmp_path / "odd-idx"
    path.write_bytes(bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes))
    try:
        found = read_idx(path)
    except DataError:
        return
    assert found.size == 0


def test_a_path_that_is_none_is_a_data_error():
    with pytest.raises(BayeszipError):
        read_idx("nul\0byte")
