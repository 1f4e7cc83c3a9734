"""Patterns on names: what is taken, how strongly, and patterns that name nothing."""

import pytest
import torch
from torch import nn

import bayeszip
from bayeszip.errors import ModelError, RecipeError
from bayeszip.variational import Divergence, to_variational, variational_weights
from bayeszip.variational.divergence import kl_sum
from bayeszip.variational.selection import Selection, Strength

NAMES = ["encoder.0.weight", "encoder.0.bias", "encoder.10.weight", "head.weight", "head.bias", "scale"]


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (Selection(), NAMES),
        (Selection(include=("encoder",)), NAMES[:3]),
        (Selection(include=("encoder.*",)), NAMES[:3]),
        (Selection(include=("encoder.1",), exclude=()), None),
        (Selection(include=("encoder.?",)), NAMES[:2]),
        (Selection(exclude=("*.bias", "scale")), [NAMES[0], NAMES[2], NAMES[3]]),
        (Selection(include=("head",), exclude=("*.bias",)), ["head.weight"]),
    ],
)
def test_patterns(selection, taken):
    if taken is None:
        with pytest.raises(ModelError, match=r"called 'encoder.1'; there are, for example, encoder.0.weight"):
            selection.among(NAMES)
        return
    strength_of = selection.among(NAMES)
    assert [name for name in NAMES if strength_of(name) is not None] == taken


def test_the_last_strength_that_matches_counts():
    strength_of = Selection(strengths=(Strength("*", 2.0), Strength("head", 0.5))).among(NAMES)
    assert [strength_of(name) for name in NAMES] == [2.0, 2.0, 2.0, 0.5, 0.5, 2.0]


def test_what_is_no_pattern():
    with pytest.raises(RecipeError, match=r"layers.exclude must be patterns"):
        Selection(exclude=("",))
    with pytest.raises(RecipeError, match=r"layers.strengths.factor must be greater than 0"):
        Strength("fc", 0.0)


def test_what_is_excluded_is_kept_with_the_reason():
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    conversion = to_variational(network, selection=Selection(exclude=("1", "2.bias")))
    assert conversion.converted == ("0", "2")
    assert conversion.kept == (("1", "Linear, excluded"), ("2.bias", "excluded"))
    assert conversion.gaussian == ("0.weight", "0.bias", "2.weight")
    assert [weight.name for weight in variational_weights(network)] == list(conversion.gaussian)


def test_nothing_is_left():
    with pytest.raises(ModelError, match="unless they are frozen or excluded"):
        to_variational(nn.Linear(2, 2), selection=Selection(exclude=("*",)))


def test_strengths_weigh_the_divergence_of_each_tensor():
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    to_variational(network, selection=Selection(strengths=(Strength("0", 3.0),)))
    weights = list(variational_weights(network))
    assert [weight.strength for weight in weights] == [3.0, 3.0, 1.0, 1.0]
    expected = 0.5 * (3 * kl_sum(weights[:2]) + kl_sum(weights[2:]))
    (cost,) = Divergence().cost(weights, 0.5)
    torch.testing.assert_close(cost, expected)
    slopes = torch.autograd.grad(expected, [weight.log_sigma2 for weight in weights])
    (added,) = Divergence().add_gradients(weights, 0.5)
    torch.testing.assert_close(added, cost.detach())
    for weight, slope in zip(weights, slopes, strict=True):
        torch.testing.assert_close(weight.log_sigma2.grad, slope)


class Tied(nn.Module):
    """What it reads words by is what it tells words by."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(words)).relu())


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (Selection(exclude=("words",)), ["body.weight", "body.bias"]),
        (Selection(exclude=("head",)), ["body.weight", "body.bias"]),
        (Selection(include=("head", "body")), ["words.weight", "body.weight", "body.bias"]),
        (Selection(strengths=(Strength("head", 0.5),)), ["words.weight", "body.weight", "body.bias"]),
    ],
)
def test_a_tied_weight_is_taken_or_left_by_any_of_its_names(selection, taken):
    network = Tied()
    to_variational(network, selection=selection)
    weights = list(variational_weights(network))
    assert [weight.name for weight in weights] == taken
    assert weights[0].strength == (0.5 if selection.strengths else 1.0)
    # The name is the one that the network itself has for it.
    assert set(taken) <= {name for name, _ in network.named_parameters()}


@pytest.mark.parametrize("patterns", [{"exclude": ["words"]}, {"exclude": ["head"]}, {"include": ["head", "body"]}])
def test_a_network_with_a_tied_weight_is_compressed_by_any_of_its_names(patterns, tmp_path):
    words = torch.arange(96) % 12
    batches, watcher = [(words, (words + 1) % 12)], bayeszip.Watcher()
    settings = ["epochs_scale=0.02"]
    result = bayeszip.compress(Tied(), batches, recipe="quick", settings=settings, watcher=watcher, **patterns)
    assert ("words.weight" in result.fit.conversion.gaussian) is ("include" in patterns)
    result.save(tmp_path / "tied.bayz")
    torch.testing.assert_close(bayeszip.load(tmp_path / "tied.bayz")(words), result.model(words))
