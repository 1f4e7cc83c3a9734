"""What inputs show of layers."""

from collections import UserDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bayeszip.errors import DataError
from bayeszip.packing import curvature
from bayeszip.packing.curvature import curvatures


def batches(*shape: int, count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, *shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(5, 3), (5,)),
        (nn.Linear(5, 3), (4, 5)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 7, 6)),
        (nn.Conv2d(4, 6, (3, 1), dilation=2, padding="same", padding_mode="circular", groups=2), (4, 7, 6)),
        (nn.Conv1d(4, 8, 3, groups=4), (4, 9)),
    ],
)
def test_moments_tell_what_moves_of_weights_do_to_outputs(layer, shape):
    """Δ·H·Δᵀ is the mean square of what a row's output moves by: for any Δ, of the bias too."""
    inputs = batches(*shape)
    found = curvatures(nn.Sequential(layer), inputs)["0.weight"]
    moves = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    shift = torch.randn(len(moves), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = layer(torch.cat(inputs))
        layer.weight += moves
        layer.bias += shift
        axis = -1 if isinstance(layer, nn.Linear) else 1
        change = (layer(torch.cat(inputs)) - before).movedim(axis, 0).flatten(1).square().mean(1)
    rows = np.column_stack([moves.flatten(1).numpy(), shift.numpy()]).astype(np.float64)
    told = np.concatenate([np.einsum("rc,cd,rd->r", rows[b.rows], b.moments, rows[b.rows]) for b in found.blocks])
    np.testing.assert_allclose(told, change.numpy(), rtol=1e-4)


def test_wide_matrices_fall_into_parts_and_layers_take_turns(monkeypatch):
    net = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3))
    whole = curvatures(net, batches(10))
    monkeypatch.setattr(curvature, "WIDEST", 4)
    monkeypatch.setattr(curvature, "MEMORY", 100)
    parted = curvatures(net, batches(10))
    assert list(parted) == list(whole) == ["0.weight", "2.weight"]
    blocks = parted["0.weight"].blocks
    assert [block.columns.stop for block in blocks] == [3, 6, 10]
    assert [block.constant for block in blocks] == [False, False, True]
    full = whole["0.weight"].blocks[0].moments
    # Sums of float32, which products of other widths take in another order.
    np.testing.assert_allclose(blocks[1].moments, full[3:6, 3:6], rtol=1e-5)
    np.testing.assert_allclose(blocks[2].moments, full[6:, 6:], rtol=1e-5)
    np.testing.assert_allclose(parted["2.weight"].outputs, whole["2.weight"].outputs)


def test_outputs_matter_as_their_derivatives_say():
    net = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[3.0, 0.5]]))
    found = curvatures(net, batches(4))
    np.testing.assert_allclose(found["0.weight"].outputs, [9.0, 0.25])
    np.testing.assert_allclose(found["1.weight"].outputs, [1.0])


def test_of_classes_the_fisher_information_is_taken():
    """With two equally likely classes the derivative by a logit is ± ½."""
    net = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
    found = curvatures(net, [(batch, torch.zeros(6, dtype=torch.long)) for batch in batches(4)])
    np.testing.assert_allclose(found["0.weight"].outputs, [0.25, 0.25])


def test_the_norm_behind_a_layer_is_found_and_what_meets_no_input_is_not():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3, bias=False)
            self.norm = nn.BatchNorm2d(3)
            self.unused = nn.Linear(2, 2)

        def forward(self, images):
            return F.relu(self.norm(self.conv(images)))

    net = Net().eval()
    net.norm.running_mean += torch.tensor([1.0, 2.0, 3.0])
    found = curvatures(net, batches(1, 5, 5))
    assert list(found) == ["conv.weight"]
    assert (found["conv.weight"].bias, found["conv.weight"].mean) == (None, "norm.running_mean")
    np.testing.assert_allclose(found["conv.weight"].means, [1, 2, 3])


def test_no_batch_is_refused():
    with pytest.raises(DataError, match="no batch"):
        curvatures(nn.Sequential(nn.Linear(2, 2)), [])


def test_inputs_that_are_not_finite_are_refused_at_the_layer_that_meets_them():
    network = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    with pytest.raises(DataError, match=r"the layer of 1\.weight meets inputs"):
        curvatures(network, [*batches(5), torch.full((1, 5), torch.nan)])


def test_positions_that_are_looked_at_lie_all_over_an_image(monkeypatch):
    layer = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    images = torch.linspace(-1, 2, 32).expand(8, 1, 32, 32) + 0.1 * torch.randn(8, 1, 32, 32)

    def moments(positions: int) -> np.ndarray:
        monkeypatch.setattr(curvature, "POSITIONS", positions)
        return curvatures(nn.Sequential(layer), [images])["0.weight"].blocks[0].moments

    # 256 of 8,192 are every 32nd: a stride would see the left edge, and nothing else.
    whole, some = moments(2**13), moments(256)
    assert np.linalg.norm(some - whole) < 0.1 * np.linalg.norm(whole)


def test_moments_alone_are_those_of_a_whole_look():
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    whole, alone = (curvatures(net, [torch.randn(9, 5, generator=torch.Generator().manual_seed(0))], derivatives=on)
                    for on in (True, False))  # fmt: skip
    for name, found in alone.items():
        assert np.allclose(found.blocks[0].moments, whole[name].blocks[0].moments)
        assert (found.outputs == 1).all()


class Shared(nn.Module):
    """Two convolutions of one weight, with strides, biases and norms as they are given."""

    def __init__(self, first: nn.Conv2d, second: nn.Conv2d, norms: bool = False) -> None:
        super().__init__()
        second.weight = first.weight
        self.first, self.second = first, second
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) if norms else nn.Identity() for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        one, other = self.norms[0](self.first(images)), self.norms[1](self.second(3 * images))
        return torch.cat([one.flatten(1), other.flatten(1)], dim=1)


def test_of_a_weight_that_layers_share_the_inputs_of_all_of_them_count():
    """Δ·H·Δᵀ is the mean square over all positions of all uses."""
    net, images = Shared(nn.Conv2d(4, 6, 3, stride=2), nn.Conv2d(4, 6, 3, groups=1, padding=1)), batches(4, 7, 6)
    found = curvatures(net, images)
    assert list(found) == ["first.weight"]
    moves = torch.randn(net.first.weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        given = torch.cat(images)
        changes = [
            F.conv2d(given, moves, stride=2).movedim(1, 0).flatten(1),
            F.conv2d(3 * given, moves, padding=1).movedim(1, 0).flatten(1),
        ]
    rows = moves.flatten(1).double().numpy()
    (block,) = found["first.weight"].blocks
    told = np.einsum("rc,cd,rd->r", rows, block.moments[:-1, :-1], rows)
    np.testing.assert_allclose(told, torch.cat(changes, dim=1).square().mean(1).numpy(), rtol=1e-4)
    # Every output's derivative is 1: as many of them as there are positions.
    np.testing.assert_allclose(found["first.weight"].outputs, sum(change.shape[1] for change in changes) / 12)


def test_a_shift_is_taken_by_what_all_uses_of_a_weight_have_in_common():
    apart = Shared(nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3))
    found = curvatures(apart, batches(4, 7, 6))["first.weight"]
    assert (found.bias, found.mean) == (None, None)
    apart.second.bias = apart.first.bias
    assert curvatures(apart, batches(4, 7, 6))["first.weight"].bias == "first.bias"
    normed = Shared(nn.Conv2d(4, 6, 3, bias=False), nn.Conv2d(4, 6, 3, bias=False), norms=True)
    assert curvatures(normed, batches(4, 7, 6))["first.weight"].mean is None
    normed.norms[1] = normed.norms[0]
    assert curvatures(normed, batches(4, 7, 6))["first.weight"].mean == "norms.0.running_mean"


def test_a_norm_behind_two_layers_takes_the_shift_of_neither():
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.norm(self.one(rows)) + self.norm(self.other(rows))

    found = curvatures(Siamese(), batches(5))
    assert [each.mean for each in found.values()] == [None, None]


def test_a_weight_that_is_held_by_something_else_too_is_not_seen():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 5), nn.Linear(5, 9)
            self.head.weight = self.table.weight

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.head(rows)

    assert curvatures(Tied(), batches(5)) == {}
    # Of another layout: the same rows, and other columns.
    other = nn.Conv1d(6, 4, 3)
    grouped = nn.Conv1d(12, 4, 3, groups=2)
    grouped.weight = other.weight
    grouped.bias = None
    assert curvatures(nn.Sequential(other, nn.Upsample(8), nn.Conv1d(4, 12, 1), grouped), batches(6, 8)).keys() == {
        "2.weight"
    }


class Normed(nn.Module):
    """A layer with a norm behind it, and between them or beside them whatever `between` does."""

    def __init__(self, layer: nn.Module, norm: nn.Module, between: Callable) -> None:
        super().__init__()
        self.layer, self.norm, self.between = layer, norm, between

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.between(self.layer(given), self.norm)


@pytest.mark.parametrize(
    ("between", "is_its"),
    [
        (lambda out, norm: norm(out), True),
        (lambda out, norm: norm(input=out), True),
        (lambda out, norm: norm(F.relu(out)), False),
        (lambda out, norm: norm(F.relu_(out)), False),
        (lambda out, norm: norm(out) + out, False),
        (lambda out, norm: norm(out) + out.mean(), False),
        (lambda out, norm: norm(out) * (out > 0), False),
        (lambda out, norm: norm(out) + out.detach(), False),
        (lambda out, norm: (norm(out), out), False),
    ],
    ids=["behind", "by-keyword", "activation", "in-place", "residual", "read-later", "compared", "apart", "returned"],
)
def test_a_norm_takes_a_shift_only_of_what_it_alone_is_given_as_it_was_computed(between, is_its):
    net = Normed(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), between)
    assert curvatures(net, batches(2, 5, 5))["layer.weight"].mean == ("norm.running_mean" if is_its else None)


@pytest.mark.parametrize("others", [1, 2])
def test_a_norm_takes_a_shift_only_if_no_batch_was_read_by_others(others):
    class Now(nn.Module):
        """Reads what the layer computed in one batch alone, the first or the second."""

        def __init__(self) -> None:
            super().__init__()
            self.batches = 0

        def forward(self, out: torch.Tensor) -> torch.Tensor:
            self.batches += 1
            return out.mean() if self.batches == others else torch.zeros(())

    now = Now()
    net = Normed(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), lambda out, norm: norm(out) + now(out))
    net.now = now
    assert curvatures(net, batches(2, 5, 5))["layer.weight"].mean is None
    assert now.batches >= 2


def test_a_norm_of_another_dimension_takes_no_shift_of_rows():
    """Of batch × length × features a BatchNorm1d holds the length for its channels."""
    net = Normed(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), lambda out, norm: norm(out))
    assert curvatures(net, batches(4, 5))["layer.weight"].mean is None
    assert curvatures(net, batches(5))["layer.weight"].mean == "norm.running_mean"


def test_a_weight_that_something_reads_is_not_seen():
    class Mirrored(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.encoder, self.reads = nn.Linear(6, 3), reads
            self.decoder = nn.Linear(3, 6)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(self.encoder(rows).repeat(1, 2))
            return F.linear(hidden, self.encoder.weight.T) if self.reads else self.decoder(hidden)

    assert list(curvatures(Mirrored(reads=False), batches(6))) == ["encoder.weight", "decoder.weight"]
    assert curvatures(Mirrored(reads=True), batches(6)) == {}


def test_a_weight_that_is_read_in_another_precision_is_not_seen():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.last(F.linear(self.encoder(rows), self.encoder.weight))

    assert list(curvatures(Mixed(), batches(6))) == ["last.weight"]


def test_inputs_beside_the_first_may_be_anything():
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, rows, state, time, flag):
            assert state is None
            assert flag
            return self.layer(rows) * time

    rows = batches(5)
    plain = curvatures(nn.Sequential(nn.Linear(5, 3)), rows)["0.weight"]
    found = curvatures(Flagged(), [(each, None, torch.tensor(2.0), True) for each in rows])["layer.weight"]
    np.testing.assert_array_equal(found.blocks[0].moments, plain.blocks[0].moments)


def test_positions_that_stand_for_all_count_as_often_as_all(monkeypatch):
    """A batch of 600 rows weighs a hundred times as much as one of six, though as many are looked at of both."""
    layer = nn.Linear(1, 1, bias=False)
    given = [torch.full((600, 1), 1.0), torch.full((6, 1), 3.0)]
    monkeypatch.setattr(curvature, "POSITIONS", 6)
    moments = curvatures(nn.Sequential(layer), given, examples=606)["0.weight"].blocks[0].moments
    np.testing.assert_allclose(moments[0, 0], (600 * 1 + 6 * 9) / 606, rtol=1e-6)


def test_batches_that_a_user_might_have():
    """Empty ones say nothing; a dictionary of whatever class is one; a number is named."""
    layer = nn.Sequential(nn.Linear(5, 3))
    plain = curvatures(layer, batches(5))["0.weight"]
    with_empty = curvatures(layer, [torch.empty(0, 5), *batches(5)])["0.weight"]
    by_name = curvatures(layer, [(UserDict(input=batch), torch.zeros(6)) for batch in batches(5)])["0.weight"]
    for found in (with_empty, by_name):
        np.testing.assert_array_equal(found.blocks[0].moments, plain.blocks[0].moments)
    with pytest.raises(DataError, match="the input of a batch is one number"):
        curvatures(layer, [torch.tensor(1.0)])


class Doubling(nn.BatchNorm1d):
    """A norm that hands on what it is given, too."""

    def forward(self, inputs):
        return super().forward(inputs) + inputs


@pytest.mark.parametrize(("norm", "takes"), [(nn.BatchNorm1d, True), (Doubling, False)])
def test_a_norm_of_ones_own_takes_no_shift(norm, takes):
    net = nn.Sequential(nn.Linear(5, 4, bias=False), norm(4), nn.ReLU(), nn.Linear(4, 2))
    assert (curvatures(net, batches(5))["0.weight"].mean is not None) == takes


class Held(nn.Module):
    """Computes its first layers again on the way back, as memory is saved; or without a way back."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.last = how, nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        if self.how == "frozen":
            with torch.no_grad():
                hidden = self.first(inputs)
        elif self.how == "plain":
            hidden = self.first(inputs)
        else:
            hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=self.how == "reentrant")
        return 100 * self.last(hidden.relu())


@pytest.mark.parametrize("how", ["reentrant", "saved"])
def test_derivatives_are_felt_where_layers_compute_again_on_the_way_back(how):
    found, plain = (curvatures(Held(each), batches(5)) for each in (how, "plain"))
    for name, seen in plain.items():
        np.testing.assert_allclose(found[name].outputs, seen.outputs, rtol=1e-6)
        np.testing.assert_allclose(found[name].blocks[0].moments, seen.blocks[0].moments, rtol=1e-6)


def test_a_layer_that_no_derivative_comes_to_is_not_seen():
    """Beside layers that matter 10,000 times a 1 in its place would say that it doesn't."""
    assert list(curvatures(Held("frozen"), batches(5))) == ["last.weight"]
    assert list(curvatures(Held("frozen"), batches(5), derivatives=False)) == ["first.weight", "last.weight"]


def test_images_without_a_batch_around_them_are_felt_as_those_with_one():
    class OneByOne(nn.Sequential):
        def forward(self, inputs):
            return torch.stack([super(OneByOne, self).forward(each) for each in inputs])

    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.Flatten(-3), nn.Linear(100, 2)
    with torch.no_grad():
        layers[2].weight[:, :25] *= 100
    stacked, single = nn.Sequential(*layers), OneByOne(*layers)
    found = [curvatures(net, batches(3, 7, 7))["0.weight"].outputs for net in (stacked, single)]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2], "a batch of calibration must be inputs, .*not int"),
        ([None], "must be inputs, .*not NoneType"),
        ([(None, torch.zeros(3))], "holds no tensor, but a NoneType"),
        ([(torch.full((4, 5), torch.nan), torch.zeros(4).long())], "says to the calibration data is NaN"),
    ],
)
def test_what_is_no_calibration_is_refused(given, message):
    with pytest.raises(DataError, match=message):
        curvatures(nn.Sequential(nn.Linear(5, 3)), given)


def test_a_generator_that_was_used_up_is_named(monkeypatch):
    monkeypatch.setattr(curvature, "MEMORY", 100)
    net = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3))
    with pytest.raises(DataError, match="gave no batch; a generator gives batches once; give a list or a loader"):
        curvatures(net, (each for each in batches(10)))
