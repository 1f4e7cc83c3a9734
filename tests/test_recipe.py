"""Recipes: the paper's settings to the letter, JSON there and back, overrides, and refusals that name the culprit."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeszip.errors import RecipeError
from bayeszip.fitting import Phase
from bayeszip.quantize import Quantization
from bayeszip.recipe import RECIPES, Coding, Recipe, recipe, settings_help
from bayeszip.variational.groups import GroupSettings
from bayeszip.variational.mixture import MixtureStart
from bayeszip.variational.rate import RateSettings


def test_the_papers_recipe_is_the_papers():
    vd, vd_sws = recipe("paper-vd+sws").phases
    assert (vd.epochs, vd.tau1, vd.tau2) == (200, 1.0, 0.0)
    assert (vd_sws.epochs, vd_sws.tau1, vd_sws.tau2) == (100, 1.0, 2e-2)
    for phase in (vd, vd_sws):
        rates = (phase.rate_theta, phase.rate_log_sigma2, phase.rate_means, phase.rate_log_precisions)
        assert rates == (5e-5, 1e-4, 1e-4, 1e-4)
        assert phase.rate_log_proportions == 3e-3
        assert (phase.schedule, phase.noise, phase.tau1_ramp, phase.tau2_ramp) == ("constant", True, 0.0, 0.0)
        assert (phase.reseed, phase.std_first, phase.distillation, phase.compact_every) == (False, 0.0, 0.0, 0)
    chosen = recipe("paper-vd+sws")
    assert chosen.mixture == MixtureStart(components=17, zero_proportion=0.999, hyper_shape=1e5, hyper_rate=10.0)
    assert chosen.start_log_sigma2 == -10.0
    assert chosen.quantization == Quantization(assignment="mixture", prune_rate=1.0, merge_within=0.0, codebook_bits=32)
    assert chosen.closing.epochs == 0
    assert chosen.biases


def test_the_papers_variational_dropout_alone():
    chosen = recipe("paper-vd")
    (phase,) = chosen.phases
    assert (phase.epochs, phase.tau1, phase.tau2) == (200, 1.0, 0.0)
    how = chosen.quantization
    assert (how.assignment, how.prune_rate, how.components) == ("fit", 0.95, 64)


def test_the_papers_soft_weight_sharing_alone():
    (phase,) = recipe("paper-sws").phases
    assert (phase.epochs, phase.noise, phase.tau1, phase.tau2) == (100, False, 0.0, 1e-2)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name):
    assert Recipe.from_json(RECIPES[name].to_json()) == RECIPES[name]
    assert json.loads(RECIPES[name].to_json())["name"] == name


def test_a_recipe_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    mine = dataclasses.replace(recipe("quick"), name="mine", batch_size=7)
    path.write_text(mine.to_json(), encoding="utf-8")
    assert recipe(str(path)) == mine


phases = st.builds(
    Phase,
    name=st.sampled_from(["a", "b", "c"]),
    epochs=st.integers(0, 1000),
    tau1=st.floats(0, 100),
    tau2=st.floats(1e-6, 100),
    rate_theta=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
)


@given(phases, st.builds(Coding, offset_bits=st.integers(0, 32)), st.integers(1, 10_000), st.booleans())
def test_any_recipe_survives_json(phase, coding, batch_size, biases):
    made = Recipe(name="made", batch_size=batch_size, biases=biases, phases=(phase,), coding=coding)
    assert Recipe.from_json(made.to_json()) == made


def test_overrides_reach_every_part():
    changed = recipe("quick").override(
        "batch_size=32", "vd.epochs=7", "all.tau1=2.5", "mixture.components=9", "values.epochs=3", "l2.epochs=1"
    )
    assert changed.batch_size == 32
    assert changed.phases[0].epochs == 7
    assert [phase.tau1 for phase in changed.phases] == [2.5, 2.5]
    assert changed.mixture.components == 9
    assert changed.closing.epochs == 3
    assert changed.pretraining[0].epochs == 1
    assert changed.pretraining[0].tau1 == 0.0
    assert recipe("quick").phases[0].epochs != 7


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quick", ["quantization.rate_trials=2", "quantization.rate=1"]),
        ("quick", ["all.noise=false", "all.tau1=0"]),
        ("vd+sws", ["all.tau2=0", "quantization.assignment=fit"]),
        ("quick", ["vd.rate.ramp=0.2", "vd.rate.tau=1"]),
    ],
)
def test_the_order_of_overrides_is_no_matter(name, settings):
    assert recipe(name).override(*settings) == recipe(name).override(*reversed(settings))


def test_of_an_override_that_is_there_twice_the_last_counts():
    changed = recipe("quick").override("all.tau1=2", "vd.tau1=3", "vd.epochs=7", "vd.epochs=8")
    assert [phase.tau1 for phase in changed.phases] == [3, 2]
    assert changed.phases[0].epochs == 8
    assert recipe("quick").override("vd.tau1=3", "all.tau1=2").phases[0].tau1 == 2


@pytest.mark.parametrize("term", ["rate", "groups"])
def test_costs_of_noisy_weights_need_noise(term):
    with pytest.raises(RecipeError, match=f"sws: the term {term} is a cost of noisy weights, and needs noise=true"):
        recipe("sws").override(f"all.{term}.tau=1")


def test_epochs_scale_shortens_every_phase_and_drops_none():
    scaled = recipe("quick").override("epochs_scale=0.001").scaled()
    assert [phase.epochs for phase in (*scaled.pretraining, *scaled.phases, scaled.closing)] == [1, 1, 1, 1]
    assert recipe("paper-vd").override("epochs_scale=0.5").scaled().closing.epochs == 0
    assert scaled.scaled() == scaled


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("nonsense", "FIELD=VALUE"),
        ("nonsense=1", "no setting nonsense; known: .*batch_size"),
        ("tau1=2", r"tau1 is a setting of phases: write all\.tau1=2, or vd\.tau1, vd\+sws\.tau1"),
        ("zero_proportion=0.9", r"is a setting of mixture: write mixture\.zero_proportion=0\.9"),
        ("norms=keep", r"is a setting of coding: write coding\.norms=keep"),
        ("vd.nonsense=1", r"vd has no setting nonsense; known: .*tau1, .*rate\.tau"),
        ("nowhere.tau1=1", "no part 'nowhere'; known: .*vd"),
        ("vd.tau1=-1", "vd.tau1 must be at least 0, not -1.0"),
        ("vd.tau1=nan", "vd.tau1 must be finite"),
        ("vd.epochs=2.5", "vd.epochs must be of type int, not '2.5'"),
        ("vd.noise=perhaps", "vd.noise must be true or false"),
        ("vd.noise=false", "needs noise=true"),
        ("vd.schedule=zigzag", "vd.schedule must be one of constant, linear, cosine"),
        ("mixture.zero_proportion=1", "between 0 and 1"),
        ("quantization.codebook_bits=24", "16 or 32"),
        ("coding.coder=zip", "must be one of default, context, csr-huffman"),
        ("phases=1", "no setting phases"),
    ],
)
def test_a_wrong_override_says_what_is_wrong(assignment, message):
    with pytest.raises(RecipeError, match=message):
        recipe("quick").override(assignment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ('{"nonsense": 1}', "no setting nonsense"),
        ('{"batch_size": "many"}', "batch_size must be of type int, not 'many'"),
        ('{"batch_size": true}', "batch_size must be of type int"),
        ('{"phases": [{"name": "vd", "tau1": "big"}]}', "vd.tau1 must be of type float"),
        ('{"phases": [{"name": "x", "tau2": 1}, {"name": "x"}]}', "names of their own"),
        ('{"phases": [{"name": "coding", "tau2": 1}]}', "names of their own"),
        ("[" * 100_000, "not valid JSON"),
        ('{"batch_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"epochs_scale": 1' + "0" * 400 + "}", "epochs_scale must be finite"),
        ('{"mixture": {"components": 65536}}', "mixture.components must be between"),
        ('{"phases": [{"name": "all", "tau2": 1}]}', "names of their own"),
        ('{"phases": [{"name": "vd", "tau1": 1}]}', "no phase trains the mixture"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_json(text)


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "\u202ea"])
def test_names_that_could_steer_a_terminal_are_refused(tmp_path, name):
    held = json.loads(RECIPES["quick"].to_json())
    for changed in (held | {"name": name}, held | {"phases": [held["phases"][0] | {"name": name}]}):
        (tmp_path / "mine.json").write_text(json.dumps(changed))
        with pytest.raises(RecipeError, match="name must be a line of printable characters") as refused:
            recipe(str(tmp_path / "mine.json"))
        assert "\x1b" not in str(refused.value)
    assert dataclasses.replace(RECIPES["quick"], name="klein, 日本").name == "klein, 日本"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RecipeError, match=r"no recipe 'paper'; known: .*paper-vd"):
        recipe("paper")
    with pytest.raises(RecipeError, match=r"can't read the recipe gone\.json"):
        recipe("gone.json")


def test_every_setting_is_documented():
    documented = dict(settings_help())
    parts = (("PHASE.", Phase), ("mixture.", MixtureStart), ("quantization.", Quantization))
    for prefix, part in (*parts, ("PHASE.groups.", GroupSettings), ("PHASE.rate.", RateSettings)):
        for field in dataclasses.fields(part):
            assert documented[prefix + field.name]


@pytest.mark.parametrize("name", ["a" * 5000, "nul\0"])
def test_a_name_that_can_not_be_a_path(name):
    with pytest.raises(RecipeError, match="there is no recipe"):
        recipe(name)


def test_distillation_of_all_phases_is_that_of_the_closing_one_too():
    changed = recipe("quick").override("all.distillation=0", "all.distillation_temperature=3")
    assert {phase.distillation for phase in (*changed.phases, changed.closing)} == {0.0}
    assert changed.closing.distillation_temperature == 3
    # What would make no sense there doesn't reach it.
    assert recipe("quick").override("all.epochs=3", "all.tau1=2").closing == recipe("quick").closing


def test_offsets_are_not_for_every_coder():
    with pytest.raises(RecipeError, match="offset_bits is about csr-huffman"):
        recipe("quick").override("coding.coder=context", "coding.offset_bits=5")


def test_bits_can_weigh_with_the_coder_that_tells_them():
    with pytest.raises(RecipeError, match="those of the coder context"):
        recipe("quick").override("quantization.rate=1", "coding.coder=csr-huffman")
