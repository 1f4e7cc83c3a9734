"""Networks traced at one size run at others wherever the module does, and refuse what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip.codec import Limits, decode, encode
from bayeszip.errors import FormatError, ModelError
from bayeszip.graph import drop_dead_units, from_state, prove_same, to_module, trace
from bayeszip.graph.free import TRIES, other_sizes, runnable_sizes, varying_dims
from bayeszip.limits import LimitExceeded
from bayeszip.tensors import CompressedModel, Graph, Node, Varying


class Gpt(nn.Module):
    """One causal block with a table of 32 positions; its mask is stored, or made as long as needed."""

    def __init__(self, *, stored: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.attention, self.head = nn.Linear(16, 48), nn.Linear(16, 50)
        self.stored = stored
        self.mask: Tensor
        self.register_buffer("mask", torch.triu(torch.full((32, 32), float("-inf")), 1) if stored else None)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape
        h = self.tokens(x) + self.positions(torch.arange(length, device=x.device))
        q, k, v = (each.view(batch, length, 2, 8).transpose(1, 2) for each in self.attention(h).split(16, 2))
        mask = self.mask[:length, :length] if self.stored else torch.triu(torch.full((length,) * 2, float("-inf")), 1)
        attended = F.softmax(q @ k.transpose(-2, -1) * 0.3 + mask, -1) @ v
        return self.head(attended.transpose(1, 2).reshape(batch, length, 16))


class Typed(nn.Module):
    """Positions and types of tokens from buffers, as Hugging Face's BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.types = nn.Embedding(50, 8), nn.Embedding(32, 8), nn.Embedding(2, 8)
        self.places: Tensor
        self.kinds: Tensor
        self.register_buffer("places", torch.arange(32)[None], persistent=False)
        self.register_buffer("kinds", torch.zeros(1, 32, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places[:, : x.shape[1]]
        kinds = self.kinds.expand(places.shape[0], -1).gather(1, places).expand(*x.shape)
        return (self.tokens(x) + self.positions(places) + self.types(kinds)).tanh()


class Resized(nn.Module):
    """Convolutions with an output twice as large as what a stride of two leaves; so it doesn't follow the input."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.out(F.relu(self.down(x))), scale_factor=2, mode="bilinear")


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.c = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        return self.c(torch.cat([a, self.up(F.relu(self.b(F.max_pool2d(a, 2))))], 1))


class Patches(nn.Module):
    """Heights times widths become a sequence, and space again."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.mix = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x)
        batch, channels, height, width = h.shape
        sequence = self.mix(h.view(batch, channels, height * width).transpose(1, 2))
        return sequence.transpose(1, 2).reshape(batch, channels, height, width)


class Continued(nn.Module):
    """A second layer goes on where the first one ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(4, 6, batch_first=True), nn.GRU(4, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x, self.first(x)[1])[0]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Added(nn.Module):
    """Two inputs that must have the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.both(x) * self.both(y)).sum((1, 2))


class Fixed(nn.Module):
    """Flattened before a linear layer, as LeNets are: no other size, but for what pooling rounds off."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 5), nn.Linear(4 * 12 * 12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.max_pool2d(self.conv(x), 2).flatten(1))


TOKENS = torch.arange(64).reshape(2, 32) % 50

#: A module, its example inputs, and shapes at which it runs too, an odd one among them where it can.
RUNS = {
    "GPT at its longest": (Gpt(), (TOKENS,), [(2, 16), (1, 7), (3, 1)]),
    "GPT at half": (Gpt(), (TOKENS[:, :16],), [(2, 32), (1, 9)]),
    "GPT, mask made": (Gpt(stored=False), (TOKENS,), [(2, 16), (1, 7)]),
    "types from a buffer": (Typed(), (TOKENS,), [(2, 16), (1, 7)]),
    "resized": (Resized(), (torch.randn(2, 3, 32, 24),), [(2, 3, 17, 40), (1, 3, 64, 24)]),
    "U-Net": (UNet(), (torch.randn(2, 1, 32, 32),), [(1, 1, 64, 48), (2, 1, 16, 32)]),
    "patches": (Patches(), (torch.randn(2, 3, 16, 16),), [(2, 3, 32, 24)]),
    "last of an LSTM": (Last(), (torch.randn(2, 8, 4),), [(3, 11, 4), (1, 3, 4)]),
    "a decoder": (Continued(), (torch.randn(2, 8, 4),), [(3, 11, 4), (1, 3, 4)]),
    "two inputs": (Added(), (torch.randn(2, 8, 4), torch.randn(2, 8, 4)), [(2, 5, 4)]),
}


def traced(module: nn.Module, inputs: tuple[Tensor, ...]) -> CompressedModel:
    graph = trace(module.eval(), inputs)
    return CompressedModel(from_state(module, graph=graph), graph)


def drawn(inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(shape) if each.is_floating_point() else torch.randint(0, 50, shape, dtype=each.dtype)
        for each in inputs
    )


@pytest.mark.parametrize("case", RUNS)
@torch.no_grad()
def test_a_file_runs_at_other_sizes(case):
    module, inputs, shapes = RUNS[case]
    for parameter in module.parameters():
        if parameter.ndim > 1 and len(parameter) > 4 and module is not RUNS["patches"][0]:
            parameter[: len(parameter) // 4] = 0  # something dead, which goes
    model = traced(module, inputs)
    blob = encode(model)
    assert decode(blob) == model
    assert blob[4] >> 4 == 2
    small = drop_dead_units(model)
    prove_same(model, small, inputs)
    network = to_module(decode(encode(small)))
    for shape in shapes:
        others = drawn(inputs, shape)
        assert torch.allclose(network(*others), module(*others), atol=1e-5)


def test_what_has_one_size_is_written_as_ever():
    model = traced(Fixed(), (torch.randn(2, 1, 28, 28),))
    assert not model.graph.varies
    assert encode(model, packed=0)[4] >> 4 == 1
    with pytest.raises(ValueError, match=r"takes inputs of shape \(batch, \*\(1, 28, 28\)\)"):
        to_module(model)(torch.randn(2, 1, 56, 56))


@pytest.mark.parametrize(
    ("case", "shape", "message"),
    [
        ("GPT at half", (2, 33), "slice: 0 to 33 is not a stretch"),
        ("GPT, mask made", (2, 33), "picks rows 0 to 32 of 32"),
        ("U-Net", (2, 1, 17, 32), "concat: shapes"),
        ("U-Net", (2, 2, 32, 32), r"takes inputs of shape \(batch, 1, any, any\), not \(batch, \*\(2, 32, 32\)\)"),
        ("U-Net", (2, 1, 32), "takes inputs of shape"),
        ("U-Net", (2, 1, 0, 32), "can't have the shape"),
        ("two inputs", (2, 8, 5), "takes inputs of shape"),
    ],
)
def test_what_the_module_refuses_is_refused_before_anything_runs(case, shape, message):
    module, inputs, _ = RUNS[case]
    with pytest.raises(ModelError, match=message):
        to_module(traced(module, inputs))(*drawn(inputs, shape))


def test_the_limits_hold_at_other_sizes():
    module, inputs, _ = RUNS["U-Net"]
    network = to_module(traced(module, inputs), limits=Limits(values=2**16))
    network(torch.randn(1, 1, 64, 64))
    with pytest.raises(LimitExceeded, match="raise `values`"):
        network(torch.randn(1, 1, 256, 256))


def test_a_file_has_few_of_its_sizes_tried():
    inputs = [Node("input", (place,), (), {"shape": (8,)}, (Varying("shape", 0),)) for place in range(40)]
    model = CompressedModel({}, Graph(40, tuple(inputs), (40,)))
    assert len(list(other_sizes(model, tries=TRIES))) == TRIES < len(list(other_sizes(model)))


def test_sizes_that_a_run_cannot_afford_are_left_out():
    """Small at the size it states, a million times as large one pixel further on."""
    size = Varying("size", 1, ((1, 2),), 2**20, 1, 1 - 64 * 2**20)
    nodes = (
        Node("input", (0,), (), {"shape": (1, 64)}, (Varying("shape", 1),)),
        Node("reshape", (1,), (), {"shape": (1, 1, 64)}, (Varying("shape", 2, ((1, 2),)),)),
        Node("interpolate", (2,), (), {"size": (1, 1)}, (size,)),
    )
    model = CompressedModel({}, Graph(1, nodes, (3,)))
    assert list(other_sizes(model))
    assert runnable_sizes(model, Limits(memory=2**20), 2) == []
    assert runnable_sizes(model, Limits.none(), 2)


@torch.no_grad()
def test_a_row_of_a_table_that_only_other_sizes_read_stays():
    module = Gpt().eval()
    module.positions.weight.zero_()
    module.positions.weight[20:] = torch.randn(12, 16)
    model = traced(module, (TOKENS[:, :16],))
    network = to_module(drop_dead_units(model))
    assert torch.allclose(network(TOKENS), module(TOKENS), atol=1e-5)


@torch.no_grad()
def test_a_sum_over_a_free_dimension_is_no_constant():
    """A dead channel's bias, summed over places, is as large as there are places: it can't go into the next bias."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.relu(self.each(x)).sum(1))

    module = Summed().eval()
    module.each.weight[:3] = 0
    module.each.bias[:3] = torch.tensor([0.5, 0.25, -1.0])
    small = drop_dead_units(traced(module, (torch.randn(2, 8, 4),)), fold="always")
    assert small.tensors["each.weight"].shape == (5, 4)  # the one that is zero after all goes
    x = torch.randn(2, 5, 4)
    assert torch.allclose(to_module(small)(x), module(x), atol=1e-5)


def test_a_branch_that_another_size_takes_stays_at_one_size():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.shape[1] > 5 else 2 * self.fc(x)

    assert not trace(Branch().eval(), torch.randn(2, 8, 4)).varies


def test_what_is_cut_off_at_a_length_far_beyond_stays_at_one_size():
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x[:, :20]).mean(1)

    module = Clipped().eval()
    assert module(torch.randn(2, 16, 4)).shape == (2, 4)  # twice as long it cuts off nothing
    assert not trace(module, torch.randn(2, 8, 4)).varies


def test_a_loaded_network_can_be_traced_again():
    module, inputs, _ = RUNS["GPT at half"]
    model = traced(module, inputs)
    assert trace(to_module(model), inputs) == model.graph


def test_which_dimensions_vary():
    model = traced(*RUNS["patches"][:2])
    assert 16 not in next(given[0] for given, _ in other_sizes(model))[2:]
    found = varying_dims(model)
    assert found[model.graph.outputs[0]] == [2, 3]
    assert found[model.graph.inputs] == [2, 3]


@pytest.mark.parametrize(
    ("varying", "message"),
    [
        ((Varying("shape", 0, ((1, 0),)),), "depends on the batch size"),
        ((Varying("shape", 0, ((1, 5),)),), "isn't there"),
        ((Varying("shape", 0, ((1, 1),), 2),), "say otherwise"),
        ((Varying("shape", 0, ((1, 1),), 1, 1, 2**53),), "larger than any size"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(varying, message):
    nodes = (
        Node("input", (0,), (), {"shape": (4, 2)}, (Varying("shape", 0),)),
        Node("reshape", (1,), (), {"shape": (4, 2)}, varying),
    )
    model = CompressedModel({}, Graph(1, nodes, (2,)))
    assert decode(encode(model)) == model
    with pytest.raises(FormatError, match=message):
        to_module(model)


@pytest.mark.parametrize(
    "varying",
    [
        (Varying("shape", 3, ((1, 1),)),),
        (Varying("dims", 0, ((1, 1),)),),
        (Varying("shape", 1, ((1, 1),)), Varying("shape", 0, ((1, 1),))),
        (Varying("shape", 0),),
        (Varying("shape", 0, ((1, 1),), 1, 0),),
        (Varying("shape", 0, ((2, 1),)),),
    ],
)
def test_what_cannot_vary_is_no_node(varying):
    node = Node("reshape", (1,), (), {"shape": (4, 2)})
    with pytest.raises(ModelError):
        Graph(1, (Node("relu", (0,)), replace(node, varying=varying)), (2,))


class Stepwise(nn.Module):
    """A recurrent layer's cell called in a loop: at another length there are other nodes, in whatever form."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


def test_operators_are_taken_apart_once_at_each_size(monkeypatch):
    """To look for free sizes asks for graphs at three sizes, in two forms; taking apart is what takes the time."""
    asked = []
    taken = torch.export.ExportedProgram.run_decompositions

    def counted(program, table):
        asked.append(program)
        return taken(program, table)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    graph = trace(Stepwise(), torch.randn(2, 4, 3))
    assert not graph.varies
    assert 2 <= len(asked) == len(set(map(id, asked))) <= 3
