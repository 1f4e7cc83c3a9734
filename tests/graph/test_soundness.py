"""What a graph says is held against what its operators take, before anything of it is built or run."""

import numpy as np
import pytest
import torch

from bayeszip.errors import FormatError, ModelError
from bayeszip.graph import check_sound, to_module
from bayeszip.graph.families import RULES
from bayeszip.operators import OPERATORS, AttributeValue
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor, RawTensor

BOOK = np.array([0.0, 0.5], dtype=np.float32)
OWNERS = [name for name, operator in OPERATORS.items() if operator.tensors and operator.inputs]


def weight(*shape: int) -> QuantizedTensor:
    return QuantizedTensor(np.ones(shape, dtype=np.uint8), BOOK)


def unstated(op: str, *shapes: tuple[int, ...] | None, **attributes: AttributeValue) -> CompressedModel:
    """One operator that reads a network input of which nothing is said."""
    tensors = {f"t{i}": weight(*shape) for i, shape in enumerate(shapes) if shape is not None}
    roles = tuple(None if shape is None else f"t{i}" for i, shape in enumerate(shapes))
    return CompressedModel(tensors, Graph(1, (Node(op, (0,) * OPERATORS[op].inputs, roles, attributes),), (1,)))


def stated(*nodes: Node, shape: tuple[int, ...] = (3,), **tensors: QuantizedTensor | RawTensor) -> CompressedModel:
    first = Node("input", (0,), (), {"shape": shape})
    return CompressedModel(tensors, Graph(1, (first, *nodes), (1 + len(nodes),)))


@pytest.mark.parametrize("op", OWNERS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 0), (3, 0), (2, 2, 2, 2, 2, 2)])
def test_tensors_are_checked_where_inputs_are_not_stated(op, shape):
    model = unstated(op, *(shape,) * len(OPERATORS[op].tensors))
    for check in (check_sound, to_module):
        with pytest.raises(FormatError, match=op):
            check(model)


@pytest.mark.parametrize("op", OWNERS)
def test_roles_that_must_be_filled_are(op):
    roles = OPERATORS[op].tensors
    model = unstated(op, *(None,) * len(roles), **({"shape": (3,)} if op in ("layer_norm", "rms_norm") else {}))
    if set(roles) <= set(RULES[op].optional):
        to_module(model)
    else:
        with pytest.raises(FormatError, match="has no"):
            to_module(model)


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3), (4, 1), (4,), None),
        ((4, 3), (4, 1), None, (4,)),
        ((4, 3), (8, 1), None, None),
        ((4, 3), (4, 2), None, None),
        ((4, 3), (4, 1), (3,), (4,)),
        ((3, 4), (4, 1), None, None),
    ],
)
def test_an_lstm_whose_tensors_do_not_fit_each_other_is_refused(shapes):
    to_module(unstated("lstm", (4, 3), (4, 1), (4,), (4,)))
    with pytest.raises(FormatError, match="lstm"):
        to_module(unstated("lstm", *shapes))


def test_inputs_that_are_not_stated_are_checked_on_every_call():
    network = to_module(unstated("lstm", (8, 3), (8, 2), None, None))
    assert network(torch.zeros(5, 4, 3)).shape == (5, 4, 2)
    for wrong in ((5, 4, 2), (5, 3), (5, 4, 3, 1)):
        with pytest.raises(ModelError, match="lstm"):
            network(torch.zeros(wrong))
    with pytest.raises(FormatError, match="floating-point"):
        network(torch.zeros(5, 4, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    "nodes",
    [
        (Node("input", (1,), (), {"shape": (3,)}),),
        (Node("input", (0,), (), {"shape": (4,)}),),
        (Node("input", (0,), (), {"shape": (3,), "dtype": "int64"}),),
    ],
)
def test_an_input_is_stated_once_and_as_one_thing(nodes):
    with pytest.raises(FormatError, match="one input"):
        check_sound(stated(*nodes))


def test_types_are_checked_as_shapes_are():
    whole = RawTensor(np.ones((2, 3), dtype=np.int64), "int64")
    with pytest.raises(FormatError, match=r"node 1 \(linear\) takes floating-point numbers"):
        to_module(stated(Node("linear", (1,), ("w", None)), w=whole))
    with pytest.raises(FormatError, match="boolean"):
        to_module(stated(Node("masked_fill", (1, 1))))


def test_an_input_that_is_cast_is_checked_as_what_it_becomes():
    """Attention reads the first input twice as the graph casts it, to float16, and once as it comes."""
    taken = {"shape": (2, 3), "dtype": "float32", "computes_in": "float16"}
    nodes = (Node("input", (0,), (), taken), Node("attention", (1, 1, 0), (), {"causal": False, "scale": 0.0}))
    network = to_module(CompressedModel({}, Graph(1, nodes, (2,))))
    with pytest.raises(FormatError, match="of one type"):
        network(torch.ones(1, 2, 3))
    assert network(torch.ones(1, 2, 3, dtype=torch.float16)).dtype == torch.float16


def test_stored_numbers_pick_rows_that_exist():
    nodes = (Node("buffer", (), ("places",)), Node("take", (1, 2), (), {"dim": 1}))
    good = RawTensor(np.array([2, 0], dtype=np.int64), "int64")
    assert to_module(stated(*nodes, places=good))(torch.arange(3.0)[None]).tolist() == [[2.0, 0.0]]
    for place in (3, -1):
        with pytest.raises(FormatError, match="picks rows"):
            to_module(stated(*nodes, places=RawTensor(np.array([0, place], dtype=np.int64), "int64")))


def test_values_of_too_many_dimensions_are_refused():
    with pytest.raises(FormatError, match="dimensions"):
        check_sound(stated(Node("reshape", (1,), (), {"shape": (3, *(1,) * 40)})))
    with pytest.raises(FormatError, match="more numbers"):
        check_sound(stated(Node("view", (1,), (), {"shape": (2**50,) * 1000})))
