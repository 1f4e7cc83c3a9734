"""A phase's defaults are the paper's; contradictions are refused."""

import dataclasses

import pytest

from bayeszip.errors import RecipeError
from bayeszip.fitting import Phase
from bayeszip.variational import MixturePrior


def test_rates_are_table_3s():
    phase = Phase()
    rates = (phase.rate_theta, phase.rate_log_sigma2, phase.rate_means, phase.rate_log_precisions)
    assert (*rates, phase.rate_log_proportions) == (5e-5, 1e-4, 1e-4, 1e-4, 3e-3)


def test_every_field_is_documented():
    said = {field.name: field.metadata["doc"] for field in dataclasses.fields(Phase)}
    assert all(said.values())
    assert "the teacher (the network as it came, unless another is given)" in said["distillation"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": -1}, "p.epochs must be at least 0, not -1"),
        ({"tau1": -0.1}, "p.tau1 must be at least 0"),
        ({"tau1": float("nan")}, "p.tau1 must be finite"),
        ({"tau1_ramp": 1.5}, "p.tau1_ramp must be between 0 and 1, not 1.5"),
        ({"schedule": "steps"}, "p.schedule must be one of constant, linear, cosine, not 'steps'"),
        ({"noise": False, "tau1": 1.0}, "p: τ₁ weighs the posterior's divergence, which needs noise=true"),
        ({"epochs": 1.5}, "p.epochs must be of type int"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(RecipeError, match=message):
        Phase(name="p", **values)


def test_components_are_tightened_or_held():
    tightened, held = Phase(std_first=0.1, std_last=0.001), Phase(std_first=0.1)
    prior = MixturePrior()
    assert [prior.dials(tightened, done)[1] for done in (0, 0.5, 1)] == pytest.approx([0.1, 0.01, 0.001])
    assert [prior.dials(held, done)[1] for done in (0, 0.5, 1)] == pytest.approx([0.1, 0.1, 0.1])
    assert len(prior.dials(Phase(std_last=0.001), 0.5)) == 1
