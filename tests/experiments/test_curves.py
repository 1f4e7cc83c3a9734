"""Curves: every point is what a user could type, and the plan holds what the pages promise."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from bayeszip import data, models
from bayeszip.experiments import EXPERIMENTS
from bayeszip.experiments.curves import AFRESH, AIMS, BEYOND, CURVES, LAST, LATER, NETWORKS, UNTOUCHED, Curve
from bayeszip.experiments.runner import Task
from bayeszip.experiments.runs import Experiment
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
    variants, points = curve.variants(), curve.points()
    # Those that were run later look for one figure.
    assert len(points) >= (1 if curve.whole or curve.family else 6)
    assert list(curve.strengths) == sorted(set(curve.strengths))
    assert {(point.strength, point.rate) for point in points if point.is_headline} == set(curve.headlines) != set()
    firsts = Experiment("frontier", "", variants, ()).runs((10,))
    assert [f"{point.name}-10" for point in points] == [name for run in firsts for name in run.endings]
    count = 3 if NETWORKS[curve.model].data == "cifar10" else 5
    wanted = [count if strength in dict(curve.headlines) else 1 for strength in curve.strengths]
    assert [len(variant.seeds) for variant in variants] == wanted
    # Those that are trained on all images, and those that were run later, have seeds that no other had shown.
    family = curve.family or (AFRESH if curve.whole else UNTOUCHED)
    assert {seed for variant in variants for seed in variant.seeds} <= set(family)
    families = (AFRESH, UNTOUCHED, LATER, LAST, BEYOND)
    assert len({*range(10), *chain(*families)}) == 10 + sum(map(len, families))
    assert {variant.hold_out for variant in variants} == {not curve.whole}


def test_aims_are_of_headlines_that_are_planned_with_all_seeds():
    headlines = {point.name for curve in CURVES for point in curve.points() if point.is_headline}
    assert {aim.runs for aim in AIMS} <= headlines
    assert all(bool(aim.ratio) != bool(aim.bytes) for aim in AIMS)


def test_runs_of_a_curve_begin_alike_and_differ_in_strength():
    runs = FRONTIER.runs(only="resnet-20-augmented-tau1")
    assert all(run.recipe.pretraining == runs[0].recipe.pretraining for run in runs)
    assert {run.variant.augment for run in runs} == {run.variant.augment_before for run in runs} == {"shift=4,flip"}
    strengths = {phase.tau1 for run in runs for phase in run.recipe.phases}
    assert strengths == set(next(curve for curve in CURVES if curve.name == "resnet-20-augmented").strengths)
    assert not any(run.variant.augment for run in FRONTIER.runs(only="resnet-20-half"))


def test_names_of_runs_say_which_curve_they_are_of():
    curves = {curve.name for curve in CURVES}
    runs = FRONTIER.runs()
    names = [name for run in runs for name in run.endings]
    assert {name.partition("-tau1=")[0] for name in names} == curves
    assert len(set(names)) == len(names)
    # Both are told from the other by a piece of their names.
    assert {run.variant.model for run in FRONTIER.runs(only="resnet-20-half")} == {"resnet-20"}


def test_seeds_that_are_asked_for_take_the_place_of_the_published_ones():
    curve = Curve("lenet-5", False, (1, 2), ((2, 0),))
    assert [variant.seeds for variant in curve.variants()] == [(10,), (10, 11, 12, 13, 14)]
    assert {run.seed for run in FRONTIER.runs((3,), only="lenet-5")} == {3}


def test_rates_are_endings_of_one_training_and_no_rate_keeps_the_name():
    curve = Curve("resnet-20", True, (0.2,), ((0.2, 1),), rates=(0.5, 1))
    assert [point[:3] for point in curve.points()] == [
        ("resnet-20-augmented-tau1=0.2", 0.2, 0),
        ("resnet-20-augmented-tau1=0.2-rate=0.5", 0.2, 0.5),
        ("resnet-20-augmented-tau1=0.2-rate=1", 0.2, 1),
    ]
    run = Experiment("frontier", "", curve.variants(), ()).runs()[0]
    assert list(run.endings) == [f"{point.name}-10" for point in curve.points()]
    assert [each.quantization.rate for each in run.endings.values()] == [0, 0.5, 1]


def test_a_curve_on_all_images_has_a_name_of_its_own_and_may_have_one_beginning():
    curve = Curve("vgg-16", True, (0.1,), ((0.1, 0),), way="coarse", whole=True, beginning=20)
    (variant,) = curve.variants()
    assert variant.name == "vgg-16-augmented-coarse-whole-tau1=0.1"
    assert curve.title == "VGG-16, with augmentation, on all images, with 9 components"
    assert {run.beginning for run in Experiment("frontier", "", (variant,), ()).runs()} == {AFRESH[0]}


def test_a_curve_may_be_taught_by_another_network_trained_on_the_same_images():
    curve = Curve("resnet-20", True, (0.3,), ((0.3, 0),), whole=True, family=LATER, teacher="resnet-20-4")
    assert curve.title == "ResNet-20, with augmentation, on all images, taught by a ResNet-20-4"
    runs = Experiment("frontier", "", curve.variants(), ()).runs()
    assert {run.seed for run in runs} == set(LATER[:3])
    (teacher,) = {task.weights for run in runs for task in Task(run, Path("frontier"), "cpu", "cifar10").beginnings[1:]}
    (late,) = (each for each in CURVES if each.name == "resnet-20-4-augmented-late-whole")
    alone = Experiment("frontier", "", late.variants(), ()).runs()[0]
    assert teacher == Task(alone, Path("frontier"), "cpu", "cifar10").weights


def test_a_way_may_change_images_otherwise_than_the_pretraining_does():
    curve = Curve("lenet-5", True, (9,), ((9, 0),), way="narrow-settled", family=LATER)
    (variant,) = curve.variants()
    assert (variant.augment, variant.augment_before) == ("shift=1", NETWORKS["lenet-5"].augment)
    assert variant.seeds == LATER
    assert replace(curve, augmented=False).variants()[0].augment is None


def test_seeds_after_the_first_end_at_the_headlines_alone():
    curve = Curve("resnet-20", True, (0.1, 0.2), ((0.2, 1),), rates=(0.5, 1, 2))
    runs = Experiment("frontier", "", curve.variants(), ()).runs()
    assert [(run.seed, run.rates) for run in runs] == [
        *((10, (0.5, 1, 2)), (10, (0.5, 1, 2))),
        *((11, (1,)), (12, (1,))),
    ]
    # Another seed is a first one of its own.
    assert {run.rates for run in Experiment("frontier", "", curve.variants(), ()).runs((3,))} == {(0.5, 1, 2)}


def test_a_curve_by_prices_has_names_and_settings_of_its_own():
    curve = Curve("lenet-5", True, (2,), ((2, 0),), way="priced")
    (variant,) = curve.variants()
    assert variant.name == "lenet-5-augmented-priced-tau1=2"
    assert variant.name.partition("-tau1=")[0] == curve.name
    assert curve.title == "LeNet-5, with augmentation, with the rate term"
    (run, *_) = Experiment("frontier", "", (variant,), (0,)).runs()
    assert all(phase.terms["rate"].tau == 0.5 for phase in run.recipe.phases)
