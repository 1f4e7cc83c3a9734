"""The proof on drawn inputs: numbers that a network may meet, of any kind, and what is done where it can't run."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayeszip
from bayeszip import graph
from bayeszip.errors import BayeszipError, InputError, ModelError
from bayeszip.graph.proof import random_inputs
from bayeszip.graph.soundness import at_sizes
from bayeszip.tensors import CompressedModel, Graph, Node


class Tables(nn.Module):
    """A table for each column of one input of whole numbers."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.tables = nn.ModuleList(nn.Embedding(rows, 3) for rows in (5, 7, 11))
        self.head = nn.Linear(9, 2)

    def forward(self, columns: Tensor) -> Tensor:
        picked = [table(columns[:, at] - self.first) for at, table in enumerate(self.tables)]
        return self.head(torch.cat(picked, 1))


class Cast(nn.Module):
    """Rows picked by numbers that come as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, places: Tensor) -> Tensor:
        return self.table(places.long()).sum(1)


class Squared(nn.Module):
    """Rows picked by something that no one can tell from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, places: Tensor) -> Tensor:
        return self.table(places * places).sum(1)


def traced(network: nn.Module, *inputs: Tensor) -> CompressedModel:
    found = graph.trace(network.eval(), inputs)
    return CompressedModel(graph.from_state(network, graph=found), found)


@pytest.mark.parametrize("first", [0, 1990])
def test_tables_of_different_lengths_are_tried_with_rows_that_all_have(first, tmp_path):
    columns = torch.tensor([[4, 6, 10], [0, 1, 2]]) + first
    model = traced(Tables(first), columns)
    generator = torch.Generator().manual_seed(0)
    for examples in ((), (columns,)):
        (drawn,) = random_inputs(model, generator, examples, batch=64)
        assert drawn.min() >= first
        assert drawn.max() == first + 4
    bayeszip.pack(Tables(first), example_inputs=(columns,)).save(tmp_path / "net.bayz")
    assert bayeszip.load(tmp_path / "net.bayz", into=Tables(first))(columns).shape == (2, 2)


def test_floats_that_pick_rows_are_whole_numbers_within_the_table():
    (drawn,) = random_inputs(traced(Cast(), torch.tensor([[0.0, 5.0]])), torch.Generator().manual_seed(0), batch=64)
    assert drawn.is_floating_point()
    assert set(drawn.unique().tolist()) == set(range(6))


def test_what_is_drawn_and_can_not_be_run_is_left_out_where_there_is_an_example():
    examples = torch.tensor([[1, 3], [2, 0]])
    model = traced(Squared(), examples)
    wild = torch.tensor([[0, 9], [1, 1]])
    assert graph.prove_same(model, model, wild[1:]) == 0
    with pytest.raises(ModelError, match="can't be run"):
        graph.prove_same(model, model, wild)


def test_a_loaded_network_refuses_inputs_of_another_shape_in_its_own_words():
    network = bayeszip.pack(nn.Linear(4, 2), example_inputs=torch.randn(2, 4)).network()
    with pytest.raises(BayeszipError, match="takes inputs of shape") as refused:
        network(torch.randn(2, 5))
    assert isinstance(refused.value, ValueError)


class Masked(nn.Module):
    """Rows of a table that a mask weighs: two inputs of two types, at any length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.table(tokens) * mask.unsqueeze(-1)).sum(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tokens, mask: (mask, tokens), "takes torch.int64 as its input 0, not torch.float32"),
        (lambda tokens, mask: (tokens, mask.double()), "takes torch.float32 as its input 1, not torch.float64"),
        (lambda tokens, mask: (tokens, mask[..., None]), r"takes inputs of shape \(batch, any\)"),
    ],
)
def test_inputs_that_do_not_fit_are_not_the_files_fault(change, message):
    tokens, mask = torch.randint(9, (2, 5)), torch.ones(2, 5)
    network = bayeszip.pack(Masked(), example_inputs=(tokens, mask)).network()
    network(tokens.int(), mask)  # what can be computed is
    with pytest.raises(InputError, match=message):
        network(*change(tokens, mask))


def test_what_is_no_tensor_is_named():
    network = bayeszip.pack(nn.Linear(4, 2), example_inputs=torch.randn(2, 4)).network()
    with pytest.raises(TypeError, match="takes tensors; input 0 is a ndarray"):
        network(np.zeros((2, 4), np.float32))


class Gated(nn.Module):
    """A linear layer that reads a parameter, which has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.gate, self.head = nn.Parameter(torch.randn(3)), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.gate(self.query))


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_without_a_batch_can_be_calibrated(seed):
    torch.manual_seed(seed)
    batches = [torch.randn(8, 6) for _ in range(3)]
    packed = bayeszip.pack(Gated(), example_inputs=batches[0], calibration=batches, quality=95)
    assert packed.network()(batches[0]).shape == (8, 2)


def test_what_many_nodes_pick_from_is_worked_out_once(monkeypatch):
    """A file can hold thousands of them: with the shapes of all values for each, 5 kB took ten seconds."""
    asked = []
    monkeypatch.setattr(graph.proof, "at_sizes", lambda *given, **more: asked.append(given) or at_sizes(*given, **more))
    first = Node("input", (0,), (), {"shape": (3,), "dtype": "int64"})
    picks = (Node("gather", (1, 1), (), {"dim": 1}) for _ in range(50))
    (drawn,) = random_inputs(CompressedModel({}, Graph(1, (first, *picks), (51,))), torch.Generator(), batch=64)
    assert (drawn.min(), drawn.max()) == (0, 2)
    assert len(asked) == 1
