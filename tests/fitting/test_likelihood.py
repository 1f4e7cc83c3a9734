"""The data's loss as a likelihood: nats whatever the unit, and the teacher imitated by the kind of output."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bayeszip.errors import DataError, RecipeError
from bayeszip.fitting.likelihood import EXACT, Likelihood
from bayeszip.fitting.outputs import Outputs, class_dim, predictions, restored


class Constant(nn.Module):
    """Says the same to everyone."""

    def __init__(self, value=0.0, shape=(1,)):
        super().__init__()
        self.value = nn.Parameter(torch.full(shape, value))

    def forward(self, inputs):
        return self.value.expand(len(inputs), *self.value.shape)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e4])
def test_a_squared_distance_weighs_the_same_in_every_unit(unit):
    targets = noise(64, 3, 4)
    found = Likelihood.of("mse").estimated(Constant(0.0, (3, 4)), [(targets, unit * targets)])
    # The Gaussian's own density, but for what does not depend on the outputs.
    outputs = noise(64, 3, 4, seed=1)
    deviation = targets.square().mean().sqrt()
    gaussian = -torch.distributions.Normal(outputs, deviation).log_prob(targets).sum((1, 2)).mean()
    constant = 12 * (0.5 * math.log(2 * math.pi) + deviation.log())
    assert found(unit * outputs, unit * targets).item() == pytest.approx((gaussian - constant).item(), rel=1e-4)


def test_an_absolute_distance_is_a_laplacian():
    targets = noise(64, 5)
    found = Likelihood.of("mae").estimated(Constant(0.0, (5,)), [(targets, targets)])
    scale = targets.abs().mean()
    outputs = noise(64, 5, seed=1)
    laplace = -torch.distributions.Laplace(outputs, scale).log_prob(targets).sum(1).mean()
    assert found(outputs, targets).item() == pytest.approx((laplace - 5 * (2 * scale).log()).item(), rel=1e-4)


def test_classes_count_once_for_each_that_is_told():
    network, images = nn.Conv2d(3, 4, 1), noise(2, 3, 5, 5)
    classes = torch.randint(4, (2, 5, 5))
    found = Likelihood.of("cross-entropy").estimated(network, [(images, classes)])
    expected = F.cross_entropy(network(images), classes, reduction="sum") / 2
    assert found(network(images), classes).item() == pytest.approx(expected.item(), rel=1e-5)
    shares = F.one_hot(classes[:, 0, 0], 4).float()
    rows = network(images)[:, :, 0, 0]
    assert found(rows, shares).item() == pytest.approx(F.cross_entropy(rows, shares).item())


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        ("cross-entropy", -100),
        (nn.CrossEntropyLoss(ignore_index=255), 255),
        (lambda o, t: F.cross_entropy(o, t), -100),
    ],
)
def test_targets_that_are_ignored_do_not_count(loss, ignored):
    outputs = noise(4, 9, 8)
    tokens = torch.randint(9, (4, 8), generator=torch.Generator().manual_seed(0))
    tokens[:, 1:] = ignored
    tokens[0, 1:3] = 5
    found = Likelihood.of(loss).estimated(Constant(0.0, (9, 8)), [(outputs, tokens)])
    expected = F.cross_entropy(outputs, tokens, reduction="sum", ignore_index=ignored) / 4
    assert found(outputs, tokens).item() == pytest.approx(expected.item(), rel=1e-6)
    softened = F.cross_entropy(outputs / 2, F.softmax(noise(4, 9, 8, seed=1) / 2, dim=1)) * 4
    taught = found.imitation(outputs, noise(4, 9, 8, seed=1), tokens, 2.0)
    assert taught.item() == pytest.approx(6 / 4 * softened.item(), rel=1e-6)


def test_where_nothing_is_ignored_the_loss_is_the_same_to_the_last_bit():
    found = Likelihood.of("cross-entropy").estimated(
        Constant(0.0, (9, 7)), [(noise(5, 9, 7), torch.zeros(5, 7).long())]
    )
    for shape in ((5,), (5, 7)):
        outputs, classes = noise(5, 9, *shape[1:]), torch.full(shape, 3)
        assert torch.equal(found(outputs, classes), F.cross_entropy(outputs, classes) * (classes.numel() / 5))
    # 156 is the byte of −100.
    outputs, labels = noise(3, 200), torch.tensor([1, 156, 199], dtype=torch.uint8)
    assert torch.equal(found(outputs, labels), F.cross_entropy(outputs, labels))


@pytest.mark.parametrize("loss", ["mse", "mae", nn.HuberLoss()])
def test_targets_are_not_spread_over_all_examples(loss):
    with pytest.raises(DataError, match=r"shape \(8, 1\) and targets \(8,\).*unsqueeze"):
        Likelihood.of(loss).plain(noise(8, 1), noise(8))
    assert Likelihood.of(loss).plain(noise(8, 1), noise(8, 1)) == 0


def test_a_class_is_no_loss():
    with pytest.raises(RecipeError, match=r"CrossEntropyLoss\(\)"):
        Likelihood.of(nn.CrossEntropyLoss)


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6])
def test_the_unit_of_numbers_does_not_matter(unit):
    targets, outputs = noise(64, 4), noise(64, 4) + 0.1 * noise(64, 4, seed=1)
    found = Likelihood.of("mse").estimated(Copy(), [(outputs * unit, targets * unit)])
    alike = Likelihood.of("mse").estimated(Copy(), [(outputs, targets)])
    assert found(outputs * unit, targets * unit).item() == pytest.approx(alike(outputs, targets).item(), rel=1e-4)


def test_a_network_that_is_exact_does_not_make_the_noise_vanish():
    inputs = noise(64, 4)
    found = Likelihood.of("mse").estimated(Copy(), [(inputs, inputs)])
    assert found.weight == pytest.approx(1 / (2 * EXACT * inputs.var(correction=0).item()), rel=1e-3)


class Copy(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.factor * inputs


@pytest.mark.parametrize(
    ("loss", "targets", "weight"),
    [
        (lambda o, t: F.mse_loss(o, t), noise(32, 4), "scaled"),
        (lambda o, t: F.mse_loss(o, t) - 100, noise(32, 4), 1.0),
        (lambda o, t: F.cross_entropy(o, t), torch.arange(32) % 4, 1.0),
        (nn.BCEWithLogitsLoss(), (noise(32, 4) > 0).float(), 1.0),
        (nn.HuberLoss(), noise(32, 4), "scaled"),
    ],
)
def test_losses_of_ones_own_are_scaled_unless_they_are_nats(loss, targets, weight):
    network = Constant(0.1, (4,))
    found = Likelihood.of(loss).estimated(network, [(noise(32, 4), targets)])
    plain = loss(network(noise(32, 4)), targets).item()
    assert found.weight == pytest.approx(1 / (2 * plain) if weight == "scaled" else weight)


def test_nothing_is_estimated_from_a_loader_that_goes_on_as_before():
    from bayeszip.fitting import ResidentBatches

    batches = [ResidentBatches(noise(40, 4), noise(40, 4), 8, shuffle=True, seed=3) for _ in range(2)]
    Likelihood.of("mse").estimated(Constant(0.0, (4,)), batches[0])
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("hinge", "no loss 'hinge'; known: cross-entropy, mse, mae, bce"),
        (3, "function of outputs and targets, not int"),
        (nn.MSELoss(reduction="sum"), r"MSELoss\(reduction='sum'\): a loss must be a mean"),
    ],
)
def test_losses_that_are_none(loss, message):
    with pytest.raises(RecipeError, match=message):
        Likelihood.of(loss)


def test_a_loss_need_not_be_hashable():
    @dataclass
    class Weighted:
        factors: list[float]

        def __call__(self, outputs, targets):
            return self.factors[0] * F.mse_loss(outputs, targets)

    assert Likelihood.of(Weighted([2.0])).kind == "unknown"


def test_outputs_of_which_nobody_knows_what_to_take():
    with pytest.raises(DataError, match="give loss=function"):
        Likelihood.of("mse").plain({"a": noise(2, 3), "b": noise(2, 3)}, noise(2, 3))


# Imitation


def test_images_are_imitated_by_their_distance_never_by_a_softmax():
    images, targets = noise(4, 1, 8, 8), noise(4, 1, 8, 8, seed=1)
    found = Likelihood.of("mse").estimated(Constant(0.0, (1, 8, 8)), [(images, targets)])
    variance = targets.square().mean()
    taught, ours = noise(4, 1, 8, 8, seed=2), noise(4, 1, 8, 8, seed=3)
    expected = 64 * F.mse_loss(ours, taught) / (2 * variance)
    assert found.imitation(ours, taught, targets, 2.0).item() == pytest.approx(expected.item(), rel=1e-4)
    assert found.imitation(taught, taught, targets, 2.0).item() == 0


def test_classes_are_imitated_by_softened_cross_entropy():
    ours, taught, targets = noise(6, 5), noise(6, 5, seed=1), torch.arange(6) % 5
    expected = 4 * F.cross_entropy(ours / 2, F.softmax(taught / 2, dim=1))
    for likelihood in (Likelihood.of("cross-entropy"), Likelihood.of(lambda o, t: F.cross_entropy(o, t))):
        assert likelihood.imitation(ours, taught, targets, 2.0).item() == pytest.approx(expected.item(), rel=1e-5)
        named = likelihood.imitation({"logits": ours, "hidden": noise(6, 9)}, taught, targets, 2.0)
        assert named.item() == pytest.approx(expected.item(), rel=1e-5)


def test_switches_are_imitated_as_such():
    ours, taught, targets = noise(6, 5), noise(6, 5, seed=1), (noise(6, 5, seed=2) > 0).float()
    expected = 4 * F.binary_cross_entropy_with_logits(ours / 2, torch.sigmoid(taught / 2))
    assert Likelihood.of("bce").imitation(ours, taught, targets, 2.0).item() == pytest.approx(expected.item())


def test_probabilities_are_imitated_by_their_cross_entropy():
    ours, taught, targets = noise(6, 4).sigmoid(), noise(6, 4, seed=1).sigmoid(), (noise(6, 4, seed=2) > 0).float()
    found = Likelihood.of(nn.BCELoss()).estimated(Constant(), [])
    expected = F.binary_cross_entropy(ours, taught, reduction="sum") / 6
    assert found.imitation(ours, taught, targets, 2.0).item() == pytest.approx(expected.item())
    assert found.imitation(ours, taught, targets, 2.0) > found.imitation(taught, taught, targets, 2.0)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [("mse", noise(6, 5, seed=2)), ("bce", (noise(6, 5, seed=2) > 0).float()), ("cross-entropy", torch.arange(6) % 5)],
)
def test_without_targets_a_teacher_weighs_as_much_as_with_them(loss, targets):
    """As many things are told of an example as the network says of it."""
    found = Likelihood.of(loss).estimated(Constant(shape=(5,)), [(noise(6, 2), targets)])
    ours, taught = noise(6, 5), noise(6, 5, seed=1)
    with_them, without = (found.imitation(ours, taught, given, 2.0).item() for given in (targets, None))
    assert without == pytest.approx(with_them)


def test_what_can_not_be_imitated_is_not():
    unknown = Likelihood.of(lambda outputs, targets: outputs.mean())
    assert unknown.imitation(noise(6, 5), noise(6, 5), noise(6), 2.0) is None
    assert unknown.imitation(Outputs(a=noise(6, 5), b=noise(6, 5)), noise(6, 5), noise(6), 2.0) is None


# Outputs


def test_what_a_network_predicts():
    first, second = noise(2, 3), noise(2, 4)
    assert predictions(first) is first
    assert predictions((first, second)) is first
    assert predictions({"x": first}) is first
    assert predictions({"hidden": second, "logits": first, "loss": torch.zeros(())}) is first
    assert predictions({"a": first, "b": second}) is None
    assert predictions("nothing") is None


def test_names_come_back():
    first, second = noise(2, 3), noise(2, 4)
    named = restored((first, second), ("logits", "hidden"))
    assert named["logits"] is named.logits is first
    assert restored(first, ("only",))["only"] is first
    assert restored(first, None) is first
    with pytest.raises(AttributeError):
        _ = named.other


def test_numbers_are_no_classes():
    assert class_dim(noise(8, 5), torch.zeros(8, dtype=torch.int64)) == -1
    assert class_dim(noise(8, 5), torch.zeros(8)) is None
    assert class_dim(noise(8, 1), torch.zeros(8, dtype=torch.int64)) is None
    assert class_dim(noise(8, 1, 6, 6), noise(8, 1, 6)) is None
