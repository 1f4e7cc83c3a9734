"""Targets on networks of four kinds: every one is met, and none is thrown away."""

import pytest
import tasks

import bayeszip
import zoo
from bayeszip.fitting import Watcher
from bayeszip.recipe import recipe

RECIPE = recipe("quick").override(
    "all.epochs=16", "vd+sws.epochs=6", "closing.epochs=3", "all.rate_log_sigma2=0.02", "vd.rate_theta=0.01",
    "mixture.components=9", "all.tau1=0.1",
)  # fmt: skip
BUDGETS = {tasks.MLP: (250, 500, 1000), tasks.CNN: (300, 600, 1200), tasks.AUTOENCODER: (800, 1600, 2400),
           tasks.SIAMESE: (300, 600, 1000)}  # fmt: skip


def compress(kind, **target):
    return bayeszip.compress(
        zoo.trained(kind.name),
        kind.batches(size=128),
        val_loader=kind.batches(validation=True, size=256),
        recipe=RECIPE,
        loss=kind.loss,
        device="cpu",
        watcher=Watcher(),
        **target,
    )


@pytest.mark.parametrize("drop", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("kind", [tasks.MLP, tasks.CNN, tasks.SIAMESE], ids=lambda kind: kind.name)
def test_accuracies_are_kept(kind, drop):
    result = compress(kind, max_accuracy_drop=drop)
    assert 100 * (result.fit.before.accuracy - result.accuracy) <= drop + 1e-9
    assert result.bytes < BUDGETS[kind][-1] + 100


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.3])
def test_losses_are_kept(share):
    result = compress(tasks.AUTOENCODER, max_loss_increase=share)
    assert result.figures.loss <= (1 + share) * result.fit.before.loss * (1 + 1e-9)
    assert result.fit.target == f"loss at most {100 * share:g} % larger"


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(kind, budget) for kind, budgets in BUDGETS.items() for budget in budgets],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_budgets_are_used(kind, budget):
    result = compress(kind, max_bytes=budget)
    assert 0.95 * budget <= result.bytes <= budget
