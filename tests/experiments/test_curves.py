"""Curves: every point is what a user could type, and the plan holds what the pages promise."""

import pytest

from bayeszip import data, models
from bayeszip.experiments import EXPERIMENTS
from bayeszip.experiments.curves import CURVES, NETWORKS, Curve, curve_of
from bayeszip.fitting.augmentation import Augmentation

FRONTIER = EXPERIMENTS["frontier"]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_known_to_the_command_line(name):
    network = NETWORKS[name]
    assert name in models.BUILT_IN
    assert data.is_known(network.data)
    assert str(Augmentation.parse(network.augment)) == network.augment


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_a_curve_has_six_points_and_headlines_with_seeds_that_nobody_chose_on(curve):
    variants = curve.variants()
    assert len(variants) >= 6
    assert list(curve.strengths) == sorted(set(curve.strengths))
    assert set(curve.headlines) <= set(curve.strengths)
    assert {len(variant.seeds) for variant in variants} == {1, 3 if NETWORKS[curve.model].data == "cifar10" else 5}
    assert min(seed for variant in variants for seed in variant.seeds) >= 10


def test_runs_of_a_curve_begin_alike_and_differ_in_strength():
    runs = FRONTIER.runs(only="resnet-20-augmented")
    assert all(run.recipe.pretraining == runs[0].recipe.pretraining for run in runs)
    assert {run.variant.augment for run in runs} == {run.variant.augment_before for run in runs} == {"shift=4,flip"}
    strengths = {phase.tau1 for run in runs for phase in run.recipe.phases}
    assert strengths == set(next(curve for curve in CURVES if curve.name == "resnet-20-augmented").strengths)
    assert not any(run.variant.augment for run in FRONTIER.runs(only="resnet-20-tau1"))


def test_names_of_runs_say_which_curve_they_are_of():
    curves = {curve.name for curve in CURVES}
    runs = FRONTIER.runs()
    assert {curve_of(run.name) for run in runs} == curves
    assert len({run.name for run in runs}) == len(runs)
    # Both are told from the other by a piece of their names.
    assert {run.variant.model for run in FRONTIER.runs(only="resnet-20-tau1")} == {"resnet-20"}


def test_seeds_that_are_asked_for_take_the_place_of_the_published_ones():
    curve = Curve("lenet-5", False, (1, 2), (2,))
    assert [variant.seeds for variant in curve.variants()] == [(10,), (10, 11, 12, 13, 14)]
    assert {run.seed for run in FRONTIER.runs((3,), only="lenet-5")} == {3}
