"""What a graph says is held against what its operators take, before anything of it is built or run."""

import numpy as np
import pytest
import torch

from bayeszip.errors import FormatError, ModelError
from bayeszip.graph import check_sound, to_module
from bayeszip.graph.families import RULES
from bayeszip.graph.soundness import charge_run, stored_picks
from bayeszip.limits import Budget, LimitExceeded, Limits
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


def test_stored_numbers_gather_what_exists():
    nodes = (Node("parameter", (), ("table",)), Node("buffer", (), ("places",)), Node("gather", (2, 3), (), {"dim": 0}))
    table = RawTensor(np.arange(6, dtype=np.float32).reshape(3, 2), "float32")
    for place, whole in ((2, True), (3, False), (-1, False)):
        model = stated(*nodes, table=table, places=RawTensor(np.array([[0, place]], dtype=np.int64), "int64"))
        if whole:
            assert to_module(model)(torch.ones(1, 3)).tolist() == [[0.0, 5.0]]
            continue
        with pytest.raises(FormatError, match="picks rows"):
            to_module(model)


@pytest.mark.parametrize("layout", [("view", {"shape": (1, 2)}), ("permute", {"dims": (1, 0)})])
def test_stored_numbers_are_known_however_they_are_laid_out(layout):
    op, said = layout
    laid_out = (Node("buffer", (), ("places",)), Node(op, (3,), (), said))
    nodes = (Node("parameter", (), ("table",)), *laid_out, Node("gather", (2, 4), (), {"dim": 0}))
    table = RawTensor(np.ones((3, 2), dtype=np.float32), "float32")
    shape = (2,) if op == "view" else (2, 1)
    to_module(stated(*nodes, table=table, places=RawTensor(np.full(shape, 2, dtype=np.int64), "int64")))
    with pytest.raises(FormatError, match="picks rows 3 to 3 of 3"):
        to_module(stated(*nodes, table=table, places=RawTensor(np.full(shape, 3, dtype=np.int64), "int64")))


@pytest.mark.parametrize("op", ["gather", "take"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_numbers_that_are_not_whole_are_refused_by_their_type(op, value):
    nodes = (Node("parameter", (), ("table",)), Node("parameter", (), ("places",)), Node(op, (2, 3), (), {"dim": 0}))
    table = RawTensor(np.ones((3, 2), dtype=np.float32), "float32")
    model = stated(*nodes, table=table, places=RawTensor(np.full((1, 2)[op == "take" :], value), "float64"))
    check_sound(model)  # of types it knows nothing
    with pytest.raises(FormatError, match="by whole numbers"):
        to_module(model)


def test_a_tensor_that_many_nodes_pick_by_is_read_once(monkeypatch):
    places = RawTensor(np.zeros((1, 2), dtype=np.int64), "int64")
    reads = []
    monkeypatch.setattr(RawTensor, "size", property(lambda tensor: reads.append(tensor) or tensor.values.size))
    table = RawTensor(np.ones((3, 2), dtype=np.float32), "float32")
    picks = (Node("gather", (2, 3), (), {"dim": 0}) for _ in range(5))
    model = stated(
        Node("parameter", (), ("table",)), Node("buffer", (), ("places",)), *picks, table=table, places=places
    )
    reads.clear()
    assert stored_picks(model) == {"places": (0, 0)}
    assert reads == [places]


@pytest.mark.parametrize(("k", "dim"), [(0, 1), (-1, 1), (4, 1), (2**60, 1), (1, 0), (1, 2), (1, -3)])
def test_no_more_of_a_dimension_is_sought_than_there_is(k, dim):
    said = {"k": k, "dim": dim, "largest": True, "result": "values"}
    with pytest.raises(FormatError, match="topk"):
        to_module(stated(Node("topk", (1,), (), said)))


def test_what_cannot_be_sorted_or_is_no_number_of_a_place_is_refused():
    said = {"k": 2, "dim": 1, "largest": True, "result": "values"}
    truth = Node("compare_scalar", (1,), (), {"relation": "gt", "value": 0.0})
    with pytest.raises(FormatError, match=r"node 2 \(topk\) can't be computed"):
        to_module(stated(truth, Node("topk", (2,), (), said)))
    with pytest.raises(FormatError, match="gather picks by whole numbers in int64"):
        to_module(stated(Node("gather", (1, 1), (), {"dim": 1})))


@pytest.mark.parametrize("places", [(2,), (1, 2, 1), (2, 3), (0, 2)])
def test_numbers_that_do_not_fit_what_they_pick_from_are_refused(places):
    nodes = (Node("parameter", (), ("table",)), Node("buffer", (), ("places",)), Node("gather", (2, 3), (), {"dim": 0}))
    table = RawTensor(np.ones((3, 2), dtype=np.float32), "float32")
    with pytest.raises(FormatError, match=r"gather|empty"):
        to_module(stated(*nodes, table=table, places=RawTensor(np.zeros(places, dtype=np.int64), "int64")))


def test_numbers_that_pick_what_is_not_there_end_in_an_error_of_torch():
    network = to_module(stated(Node("cast", (1,), (), {"dtype": "int64"}), Node("gather", (1, 2), (), {"dim": 1})))
    assert network(torch.tensor([[2.0, 0.0, 1.0]])).tolist() == [[1.0, 2.0, 0.0]]
    for wrong in (3.0, -1.0, 1e18):
        with pytest.raises(RuntimeError, match="out of bounds"):
            network(torch.tensor([[0.0, wrong, 1.0]]))


@pytest.mark.parametrize(("op", "said"), [("topk", {"k": 900}), ("gather", {})])
def test_what_sorting_and_picking_allocate_is_held_against_the_budget(op, said):
    places = Node("topk", (1,), (), {"k": 900, "dim": 1, "largest": True, "result": "indices"})
    last = Node(op, (1,) if op == "topk" else (1, 2), (), {"dim": 1, **said})
    nodes = (Node("input", (0,), (), {"shape": (1000,)}), places, last)
    model = CompressedModel({}, Graph(1, nodes, (3,)))
    check_sound(model, Limits(values=1000))
    charge_run(model, Budget(Limits(memory=10**6, operations=10**6)))
    with pytest.raises(LimitExceeded):
        check_sound(model, Limits(values=899))
    with pytest.raises(LimitExceeded):
        charge_run(model, Budget(Limits(memory=10**5)))


def test_values_of_too_many_dimensions_are_refused():
    with pytest.raises(FormatError, match="dimensions"):
        check_sound(stated(Node("reshape", (1,), (), {"shape": (3, *(1,) * 40)})))
    with pytest.raises(FormatError, match="more numbers"):
        check_sound(stated(Node("view", (1,), (), {"shape": (2**50,) * 1000})))
