"""Parts beyond the paper: alone and together, at two strengths, on seeds that no curve has."""

import pytest

from bayeszip.experiments import EXPERIMENTS
from bayeszip.experiments.curves import CURVES
from bayeszip.experiments.parts import ABLATED, PARTS, SNAP
from bayeszip.experiments.tables import parts_table
from bayeszip.recipe import recipe

RUNS = {run.name: run for run in EXPERIMENTS["parts"].runs()}


def on(settings):
    """Which parts a recipe has switched on."""
    phases = settings.phases
    return {
        "rate-term": any(phase.terms["rate"].tau > 0 for phase in phases),
        "groups": any(phase.terms["groups"].tau > 0 for phase in phases),
        "seeding": settings.mixture.seeding == "even",
        "reassign": settings.reassign,
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_its_part_and_no_other(name):
    part = RUNS[name].variant.name.partition("-tau1=")[2].partition("-")[2]
    expected = {each: part in (each, "all") for each in PARTS if each not in ("none", "all")}
    assert on(RUNS[name].recipe) == expected
    assert [each.quantization.rate for each in RUNS[name].endings.values()] == [0, SNAP]


def test_they_are_run_on_seeds_that_no_curve_has_from_one_pretrained_network():
    untouched = {seed for curve in CURVES for variant in curve.variants() for seed in variant.seeds}
    assert not untouched & {run.seed for run in RUNS.values()}
    for ablated in ABLATED:
        own = [run for run in RUNS.values() if run.variant.model == ablated.model]
        assert len(own) == len(PARTS) * 2 * len(ablated.seeds)
        assert all(run.recipe.pretraining == own[0].recipe.pretraining for run in own)


def test_their_epochs_are_a_share_of_the_recipe_s():
    (run,) = (each for each in EXPERIMENTS["parts"].runs(epochs_scale=0.2) if each.name == "lenet-5-tau1=1-none-0")
    epochs = [[phase.epochs for phase in each.recipe.scaled().phases] for each in (RUNS[run.name], run)]
    assert epochs == [[50, 20], [10, 4]]


def test_all_of_them_are_the_recipe_smallest():
    together, smallest = RUNS["lenet-5-tau1=1-all-0"].recipe, recipe("smallest")
    assert [phase.terms for phase in together.phases] == [phase.terms for phase in smallest.phases]
    assert together.mixture == smallest.mixture
    assert together.reassign == smallest.reassign
    assert together.closing == smallest.closing


def test_what_recipes_have_on_can_be_switched_off():
    settings = RUNS["lenet-5-tau1=1-all-0"].recipe
    off = RUNS["lenet-5-tau1=1-none-0"].variant.settings.partition("all.tau1=1 ")[2].split()
    assert any(on(settings).values())
    assert not any(on(settings.override(*off)).values())
    assert not any(on(recipe("vd+sws").override(*off)).values())


def test_the_table_compares_seed_by_seed():
    figures = {"validation_accuracy": 0.97, "seconds": 3.0, "params": 1000, "model": "lenet-5"}
    sizes = {("none", 0): 100, ("none", 1): 200, (f"none-rate={SNAP:g}", 0): 50}
    sizes |= {("rate-term", 0): 90, ("rate-term", 1): 160, ("rate-term", 2): 1}
    records = [
        {"name": f"lenet-5-tau1=1-{part}-{seed}", "seed": seed, "bytes": size, "accuracy": 0.9 + size / 1000, **figures}
        for (part, seed), size in sizes.items()
    ]
    (grid,) = parts_table(records)
    assert grid.title == "LeNet-5, τ₁ = 1"
    assert [row[0] for row in grid.rows] == ["none of them", "symbols by rate and distortion", "the rate term"]
    assert [row[5] for row in grid.rows] == ["–", "-50.0", "-15.0 ± 63.5"]
    assert [row[4] for row in grid.rows] == ["–", "-5.00", "-2.50 ± 19.06"]
    sealed = [{name: value for name, value in record.items() if name != "accuracy"} for record in records]
    assert {row[4] for row in parts_table(sealed)[0].rows} == {"–"}
