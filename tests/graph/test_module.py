"""Modules from files: names that are refused, tensors that keep their bits, classes that don't fit."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip.errors import FormatError, ModelError
from bayeszip.graph import (
    UnknownOperator,
    UntraceableModel,
    drop_dead_units,
    from_state,
    load_into,
    to_module,
    to_raw,
    to_torch,
    trace,
)
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor


def linear_model(weight: str = "fc.weight", **others: str) -> CompressedModel:
    tensor = QuantizedTensor(np.ones((3, 4), dtype=np.uint8), np.array([0.0, 2.0], dtype=np.float32))
    graph = Graph(1, (Node("input", (0,), (), {"shape": (4,)}), Node("linear", (1,), (weight, None))), (2,))
    return CompressedModel({weight: tensor} | dict.fromkeys(others.values(), tensor), graph)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "fc.", ".weight", "fc..weight", "__class__", "fc.__dict__", "forward", "forward.weight", "training",
        "_modules.weight", "_parameters", "state_dict.weight", "T_destination", "_bayeszip_steps", "to.weight",
        "dump_patches",
    ],
)  # fmt: skip
def test_hostile_names_are_refused(name):
    with pytest.raises(FormatError, match="can't be called"):
        to_module(linear_model(name))


@pytest.mark.parametrize("other", ["fc", "fc.weight.more", "fc.in_features", "fc.forward", "fc.bias.weight"])
def test_names_that_clash_are_refused(other):
    with pytest.raises(FormatError, match="can't be called"):
        to_module(linear_model("fc.weight", other=other))


@pytest.mark.parametrize("name", ["weight", "w", "a.b.c.d.weight", "ζ.weight", "0.1.weight", "x y.weight"])
def test_unusual_names_work(name):
    module = to_module(linear_model(name))
    assert list(module.state_dict()) == [name]
    assert torch.equal(module(torch.ones(2, 4)), torch.full((2, 3), 8.0))


def test_a_bias_that_the_node_does_not_read_is_not_added():
    module = to_module(
        CompressedModel(
            dict(linear_model().tensors) | {"fc.bias": QuantizedTensor([1, 1, 1], [0.0, 5.0])}, linear_model().graph
        )
    )
    assert torch.equal(module(torch.ones(1, 4)), torch.full((1, 3), 8.0))


def test_a_weight_used_twice_is_one_parameter():
    nodes = (
        Node("input", (0,), (), {"shape": (4,)}),
        Node("linear", (1,), ("fc.weight", None)),
        Node("relu", (2,)),
        Node("linear", (3,), ("fc.weight", None)),
    )
    model = CompressedModel({"fc.weight": QuantizedTensor(np.eye(4, dtype=int), [0.0, 2.0])}, Graph(1, nodes, (4,)))
    module = to_module(model)
    assert len(list(module.parameters())) == 1
    assert torch.equal(module(torch.ones(1, 4)), torch.full((1, 4), 4.0))


def test_without_a_graph_the_class_is_asked_for():
    with pytest.raises(ModelError, match="into="):
        to_module(CompressedModel(linear_model().tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool])
def test_raw_tensors_keep_their_bits(dtype):
    tensor = (torch.randn(3, 5) * 3).to(dtype).t()
    raw = to_raw(tensor)
    assert raw.shape == (5, 3)
    back = to_torch(raw)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_nan_payloads_and_negative_zeros_survive():
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x00000001, 0x7F800000], dtype=torch.int32)
    assert torch.equal(to_torch(to_raw(bits.view(torch.float32))).view(torch.int32), bits)


def test_scalars_and_empty_tensors_keep_their_shapes():
    assert to_raw(torch.tensor(3)).shape == ()
    assert to_torch(to_raw(torch.zeros(0, 4))).shape == (0, 4)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()]
)
def test_tensors_that_cannot_be_stored_are_named(tensor):
    with pytest.raises(ModelError, match=r"layer\.weight"):
        to_raw(tensor, "layer.weight")


def test_from_state_takes_tied_tensors_once_and_checks_names_and_shapes():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].weight = net[0].weight
    quantized = QuantizedTensor(np.zeros((4, 4), dtype=int), [0.0])
    tensors = from_state(net, {"0.weight": quantized})
    assert list(tensors) == [
        "0.weight", "0.bias", "1.bias", "2.weight", "2.bias", "2.running_mean", "2.running_var",
        "2.num_batches_tracked",
    ]  # fmt: skip
    assert tensors["0.weight"] is quantized
    with pytest.raises(ModelError, match=r"\['nope'\]"):
        from_state(net, {"nope": quantized})
    with pytest.raises(ModelError, match=r"0.bias.*\(4, 4\).*\(4,\)"):
        from_state(net, {"0.bias": quantized})


def test_a_class_that_does_not_fit_is_told_both_shapes():
    with pytest.raises(ModelError, match=r"fc.weight has shape \(3, 4\).*\(2, 4\)"):
        load_into(linear_model(), _Named(nn.Linear(4, 2, bias=False)))
    with pytest.raises(ModelError, match=r"no tensor 'fc.weight'"):
        load_into(linear_model(), nn.Linear(4, 3))


class _Named(nn.Module):
    def __init__(self, fc: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.fc, self.scale = fc, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale


def test_a_class_that_computes_something_else_is_refused():
    assert load_into(linear_model(), _Named(nn.Linear(4, 3, bias=False))).fc.weight[0, 0] == 2
    with pytest.raises(ModelError, match="something else"):
        load_into(linear_model(), _Named(nn.Linear(4, 3, bias=False), scale=2.0))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).relu())


def test_a_tied_tensor_shrinks_at_all_its_places():
    net, tokens = _Tied().eval(), torch.randint(0, 9, (2, 3))
    with torch.no_grad():
        net.table.weight[:, [1, 3]] = 0
    graph = trace(net, tokens)
    shrunk = drop_dead_units(CompressedModel(from_state(net, graph=graph), graph))
    assert {name: tensor.shape for name, tensor in shrunk.tensors.items()} == {"table.weight": (9, 3)}
    expected = net(tokens)
    loaded = load_into(shrunk, _Tied())
    assert loaded.head.weight is loaded.table.weight
    assert (loaded.head.in_features, loaded.table.embedding_dim) == (3, 3)
    assert torch.allclose(loaded(tokens), expected, atol=1e-6)
    assert torch.allclose(to_module(shrunk)(tokens), expected, atol=1e-6)


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), _Cumulative())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Cumulative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumprod(x, dim=1)


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_an_unknown_operator_is_named_with_its_layer():
    with pytest.raises(UnknownOperator, match=r"aten.cumprod.default.*'inner.1'.*_Cumulative"):
        trace(_Odd(), torch.zeros(2, 4))


def test_control_flow_on_data_is_untraceable():
    with pytest.raises(UntraceableModel, match="_Branching"):
        trace(_Branching(), torch.ones(2, 4))


def test_a_module_that_cannot_be_followed_is_told_by_the_error_alone(capfd, caplog):
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    with pytest.raises(UntraceableModel, match="_Branching"):
        trace(_Branching(), torch.zeros(2, 4))
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (capfd.readouterr().err, told) == ("", [])
    assert [logger.level for logger in loggers] == levels


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((x.shape[0],), 3), batch_first=True)
        return self.lstm(packed)[1][0][-1]


class _FixedBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(2.0)[:, None]


@pytest.mark.parametrize("net", [_Packed(), _FixedBatch()])
def test_what_cannot_be_followed_is_one_kind_of_error(net):
    with pytest.raises((UnknownOperator, UntraceableModel), match=r"."):
        trace(net, torch.ones(2, 5, 4) if isinstance(net, _Packed) else torch.ones(2, 4))


class _Counting(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


def test_a_network_with_a_memory_has_no_graph():
    with pytest.raises(UnknownOperator, match="writes into calls"):
        trace(_Counting(), torch.ones(2, 4))


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, padding_idx=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens != 0).unsqueeze(-1)
        return (self.table((tokens * 2 + 1).clamp(max=8)) * mask).sum(1) / mask.sum(1).clamp(min=1)


def test_whole_numbers_stay_whole():
    net, tokens = _Tokens().eval(), torch.randint(0, 5, (3, 4))
    graph = trace(net, tokens)
    network = to_module(CompressedModel(from_state(net, graph=graph), graph))
    assert torch.allclose(network(tokens), net(tokens))
    assert network.table.padding_idx == 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [((), "must be tensors"), ((torch.tensor(1.0),), "first dimension"), ((torch.zeros(0, 4),), "empty")],
)
def test_example_inputs_are_checked(inputs, message):
    with pytest.raises(ModelError, match=message):
        trace(nn.Linear(4, 2), inputs)
    with pytest.raises(ModelError, match="doesn't take 2"):
        trace(nn.Linear(4, 2), (torch.zeros(2, 4), torch.zeros(2, 4)))
    with pytest.raises(ModelError, match=r"disagree.*\[2, 3\]"):
        trace(nn.Bilinear(4, 4, 2), (torch.zeros(2, 4), torch.zeros(3, 4)))


@pytest.mark.parametrize("form", [lambda y: {"logits": {"deep": y}}, lambda y: (y, (y, y))], ids=["dict", "nested"])
def test_outputs_whose_form_a_graph_would_lose_are_not_traced(form):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return form(self.fc(x))

    with pytest.raises(UntraceableModel, match="a graph returns tensors or a tuple of them"):
        trace(Odd(), torch.randn(2, 3))
