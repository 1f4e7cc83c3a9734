"""The teacher of a distillation: the same answers, whether asked once for all rows or batch by batch."""

import copy
import inspect

import pytest
import torch
from torch import nn

from bayeszip.errors import ModelError, TrainingError
from bayeszip.fitting import Phase, ResidentBatches, fit
from bayeszip.fitting.teacher import Teacher, in_words, known_teacher


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(100, 6, generator=generator), torch.arange(100) % 3


def test_a_teacher_that_knows_all_rows_answers_as_one_that_is_asked():
    network = nn.Linear(6, 3)
    batches = ResidentBatches(*data(), 16, shuffle=True, seed=1)
    teacher = Teacher(network, batches)
    for batch in batches:
        assert torch.allclose(teacher.outputs(batch), network(batch.inputs), atol=1e-6)


def test_rows_are_asked_once():
    class Counting(nn.Linear):
        asked = 0

        def forward(self, inputs):
            Counting.asked += len(inputs)
            return super().forward(inputs)

    batches = ResidentBatches(*data(), 16, shuffle=True, seed=1)
    teacher = Teacher(Counting(6, 3), batches)
    asked = Counting.asked
    for batch in batches:
        teacher.outputs(batch)
    assert Counting.asked == asked <= 101


def test_outputs_larger_than_the_inputs_are_not_kept():
    batches = ResidentBatches(*data(), 16, shuffle=True)
    network = nn.Linear(6, 30)
    teacher = Teacher(network, batches)
    batch = next(iter(batches))
    assert torch.equal(teacher.outputs(batch), network(batch.inputs))
    assert teacher._outputs is None


def test_distillation_from_a_plain_loader_gives_the_same_training():
    torch.manual_seed(0)
    start, master = nn.Linear(6, 3), nn.Linear(6, 3)
    phase = Phase(name="imitate", epochs=2, noise=False, distillation=0.7, rate_theta=0.01)
    trained = []
    for plain in (False, True):
        network = copy.deepcopy(start)
        batches = ResidentBatches(*data(), 20)
        loader = list(batches) if plain else ResidentBatches(*data(), 20)
        fit(network, loader, [phase], n_data=100, teacher=master)
        trained.append(network.weight.detach())
    assert torch.allclose(*trained, atol=1e-6)
    assert not torch.allclose(trained[0], start.weight)


class Empty(nn.Linear):
    """A network that is a container as well, and has nothing in it."""

    def __len__(self):
        return 0


def test_a_teacher_of_no_length_is_asked_all_the_same():
    torch.manual_seed(0)
    start, master = nn.Linear(6, 3), Empty(6, 3)
    like = nn.Linear(6, 3)
    like.load_state_dict(master.state_dict())
    phase = Phase(name="imitate", noise=False, distillation=1.0, rate_theta=0.01)
    trained = [copy.deepcopy(start), copy.deepcopy(start)]
    for network, teacher in zip(trained, (master, like), strict=True):
        fit(network, ResidentBatches(*data(), 20), [phase], n_data=100, teacher=teacher)
    assert torch.equal(trained[0].weight, trained[1].weight)


class Weighted(nn.Module):
    """As in a network that is trained: what is the weight makes a difference."""

    def forward(self, values, weights):
        return (values * weights.exp()).sum(1)


class Swapped(nn.Module):
    def forward(self, weights, values):
        return Weighted()(values, weights)


class FromFile(nn.Module):
    def forward(self, x, *more):
        return Weighted()(x, *more)


class LikeAFile(nn.Module):
    """Its first argument is called as that of a file, which knows no other."""

    def forward(self, x, weights):
        return Weighted()(x, weights)


class PassedOn(nn.Module):
    def forward(self, values, **others):
        return Weighted()(values, **others)


class Renamed(nn.Module):
    def forward(self, values, factors, **others):
        return Weighted()(values, factors)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Weighted, Weighted),
        (Swapped, Weighted),
        (FromFile, Weighted),
        (FromFile, LikeAFile),
        (PassedOn, Weighted),
        (Renamed, Weighted),
        (Weighted, LikeAFile),
    ],
)
def test_a_teacher_is_given_named_inputs_by_name_or_in_the_networks_order(kind, own):
    network = own()
    network.kept = nn.Parameter(torch.zeros(1))
    values, weights = torch.randn(5, 4, 3), torch.randn(5, 4, 1)
    first, second = inspect.signature(network.forward).parameters
    ways = ({first: values, second: weights}, {second: weights, first: values})
    for shown in (*ways, None):
        teacher = known_teacher(kind(), network, [Phase(distillation=0.5)], shown)
        for named in ways:
            assert torch.equal(teacher(**named), network(values, weights))
        assert in_words(teacher) == f"{kind.__name__}, 0 parameters"


class ByNameAlone(nn.Module):
    def forward(self, *, values, weights):
        return Weighted()(values, weights)


class Wrapped(nn.Module):
    """Takes whatever it passes on, as `AveragedModel` does."""

    def __init__(self, inner=Renamed):
        super().__init__()
        self.inner = inner()

    def forward(self, *inputs, **named):
        return self.inner(*inputs, **named)


class Defaulting(nn.Module):
    """Would answer without its inputs, and takes any name."""

    def forward(self, first=None, second=None, **others):
        return torch.zeros(5, 3) if first is None else Weighted()(first, second)


@pytest.mark.parametrize(
    "kind",
    [Weighted, Swapped, FromFile, Renamed, PassedOn, ByNameAlone, Wrapped, Defaulting],
    ids=lambda kind: kind.__name__,
)
def test_a_teacher_is_given_inputs_in_order_by_the_networks_names(kind):
    network = Weighted()
    network.kept = nn.Parameter(torch.zeros(1))
    values, weights = torch.randn(5, 4, 3), torch.randn(5, 4, 1)
    for shown in ((values, weights), None):
        teacher = known_teacher(kind(), network, [Phase(distillation=0.5)], shown)
        assert torch.equal(teacher(values, weights), network(values, weights))
        assert in_words(teacher) == f"{kind.__name__}, 0 parameters"


def test_a_network_that_takes_anything_has_a_teacher_too():
    network = Wrapped(Weighted)
    network.kept = nn.Parameter(torch.zeros(1))
    inputs = torch.randn(5, 4, 3), torch.randn(5, 4, 1)
    teacher = known_teacher(Renamed(), network, [Phase(distillation=0.5)], inputs)
    assert torch.equal(teacher(*inputs), network(*inputs))


def test_only_those_inputs_that_there_are_have_an_order():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = nn.Parameter(torch.zeros(1))

        def forward(self, values, weights, factor=1.0):
            return factor * Weighted()(values, weights)

    network, inputs = Optional(), (torch.randn(5, 4, 3), torch.randn(5, 4, 1))
    teacher = known_teacher(Swapped(), network, [Phase(distillation=0.5)], inputs)
    assert torch.equal(teacher(*inputs), network(*inputs))


class Masking(nn.Module):
    """Its arguments may be masked, and stand in another order than those of whom it teaches."""

    def forward(self, mask=None, x=None):
        return x if mask is None else x * mask


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, mask=None):
        return self.scale * (x if mask is None else x * mask)


def test_inputs_that_come_beside_the_first_ones_later_reach_the_teacher():
    teacher = known_teacher(Masking(), Masked(), [Phase(distillation=0.5)], torch.ones(2, 3))
    assert torch.equal(teacher(torch.ones(2, 3)), torch.ones(2, 3))
    assert torch.equal(teacher(torch.ones(2, 3), torch.zeros(3)), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="longer"):
        teacher(torch.ones(2, 3), torch.zeros(3), torch.zeros(3))


class Several(nn.Module):
    def forward(self, inputs):
        return {"first": inputs, "second": inputs}


def test_a_network_of_several_outputs_is_asked_which_is_to_imitate():
    network = nn.Sequential(nn.Linear(3, 3), Several())
    with pytest.raises(ModelError, match=r"the network answers several tensors, .*under the name logits"):
        known_teacher(nn.Linear(3, 3), network, [Phase(distillation=0.5)], torch.ones(2, 3))


def test_who_fails_on_a_batch_is_named():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = nn.Parameter(torch.zeros(1))

        def forward(self, values, weights):
            raise ValueError("never")

    network = Weighted()
    network.kept = nn.Parameter(torch.zeros(1))
    phases, inputs = [Phase(distillation=0.5)], (torch.randn(5, 4, 3), torch.randn(5, 4, 1))
    with pytest.raises(TrainingError, match=r"the teacher: .* fails on a batch"):
        known_teacher(Failing(), network, phases, inputs)
    with pytest.raises(TrainingError, match=r"the first batch: .* fails on a batch"):
        known_teacher(Weighted(), Failing(), phases, inputs)
