"""A NaN anywhere in a step is caught at that step and named; the fitting goes back once, more slowly, then stops."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bayeszip.errors import TrainingError
from bayeszip.fitting import Fitting, Phase, ResidentBatches, Watcher, fit
from bayeszip.fitting.loop import SLOWER
from bayeszip.variational import Divergence, MixturePrior, to_variational

PHASE = Phase(name="both", epochs=2, tau1=1.0, tau2=0.1, rate_theta=1e-3)
STEPS = 4


class Listener(Watcher):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.epochs: list[int] = []

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)

    def on_epoch(self, stats, course) -> None:
        self.epochs.append(stats.epoch)


class Tripped(nn.Module):
    """A layer that is the identity until it is told to send back a NaN as gradient."""

    def __init__(self, at: "Trip") -> None:
        super().__init__()
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at.now() and x.requires_grad:
            x = x + 0
            x.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
        return x


class Trip:
    """Goes off at the given steps, counted over everything that is run, repetitions included."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.step = steps, 0

    def now(self) -> bool:
        self.step += 1
        return self.step in self.steps


def data(n: int = 64) -> ResidentBatches:
    generator = torch.Generator().manual_seed(0)
    return ResidentBatches(torch.randn(n, 6, generator=generator), torch.arange(n) % 3, n // STEPS, shuffle=True)


def fitting(listener, *, batches=None, loss=F.cross_entropy, extra=nn.Identity, phase=PHASE) -> Fitting:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), extra())
    to_variational(network)
    return Fitting(
        network,
        batches or data(),
        (phase,),
        n_data=64,
        terms=(Divergence(), MixturePrior(5, 0.3)),
        loss=loss,
        watcher=listener,
    )


def nan_in_data(*steps: int):
    class Spoiled(ResidentBatches):
        trip = Trip(*steps)

        def select(self, rows):
            inputs, targets = super().select(rows)
            if self.trip.now():
                inputs[3, 2] = math.nan
            return inputs, targets

    good = data()
    return {"batches": Spoiled(good.inputs, good.targets, good.batch_size, shuffle=True)}


def nan_in_loss(*steps: int):
    trip = Trip(*steps)
    return {"loss": lambda outputs, targets: F.cross_entropy(outputs, targets) * (math.nan if trip.now() else 1)}


def nan_in_gradient(*steps: int):
    trip = Trip(*steps)
    return {"extra": lambda: Tripped(trip)}


#: how a NaN gets in, and what it is called
INJECTIONS = [
    pytest.param(nan_in_data, r"the data \(inputs of 1 of 16 examples of the batch\)", id="data"),
    pytest.param(nan_in_loss, "the data's loss", id="loss"),
    pytest.param(nan_in_gradient, r"the gradient of 0\.weight", id="gradient"),
]


@pytest.mark.parametrize(("inject", "name"), INJECTIONS)
@pytest.mark.parametrize("step", [1, 4, 7])
def test_once_goes_back_with_lower_rates(inject, name, step):
    listener = Listener()
    run = fitting(listener, **inject(step))
    run.run()
    epoch, within = divmod(step - 1, STEPS)
    assert len(listener.warnings) == 1
    expected = rf"phase both, epoch {epoch + 1} of 2, step {within + 1}: {name} is not finite; going back to the start"
    assert re.match(expected, listener.warnings[0]), listener.warnings[0]
    assert listener.epochs == [1, 2]
    assert run.rate_factor == SLOWER
    assert run.steps == 2 * STEPS
    assert all(torch.isfinite(parameter).all() for parameter in run.network.parameters())


@pytest.mark.parametrize(("inject", "name"), INJECTIONS)
def test_twice_stops(inject, name):
    listener = Listener()
    run = fitting(listener, **inject(2, 5))
    message = rf"phase both, epoch 1 of 2, step 3: {name} is not finite, for the second time\. Check the data"
    with pytest.raises(TrainingError, match=message) as caught:
        run.run()
    assert "--set both.rate_theta=" in str(caught.value)
    assert len(listener.warnings) == 1


@pytest.mark.parametrize("part", ["means", "log_precisions", "log_proportions"])
def test_the_mixture_is_named(part):
    class Spoiler(Listener):
        def on_batch(self, phase: Phase, done: float) -> None:
            if not self.warnings:
                with torch.no_grad():
                    getattr(run.problem.terms[1], part)[1] = math.nan

    listener = Spoiler()
    run = fitting(listener)
    run.run()
    expected = rf"phase both, epoch 1 of 2, step 2: the mixture's {part} is not finite; going back"
    assert len(listener.warnings) == 1
    assert re.match(expected, listener.warnings[0]), listener.warnings[0]
    assert all(torch.isfinite(parameter).all() for parameter in run.problem.terms[1].parameters())


def test_a_weight_is_named():
    class Spoiler(Listener):
        def on_batch(self, phase: Phase, done: float) -> None:
            if not self.warnings:
                with torch.no_grad():
                    run.network[2].weight_log_sigma2[0, 0] = math.inf

    listener = Spoiler()
    run = fitting(listener)
    run.run()
    assert listener.warnings[0].startswith("phase both, epoch 1 of 2, step 2: 2.weight_log_sigma2 is not finite")


def test_going_back_means_the_same_data_and_noise_at_half_the_rates():
    """As if the phase had had half its rates from the start of that epoch on."""
    slow = Phase(**{**vars(PHASE), **{name: 0.5 * value for name, value in vars(PHASE).items() if "rate_" in name}})
    results = []
    for phase, injected in ((PHASE, nan_in_gradient(3)), (slow, nan_in_gradient())):
        run = fitting(Listener(), phase=phase, **injected)
        torch.manual_seed(1)
        run.run()
        results.append([*run.network.parameters(), *run.problem.terms[1].parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_nan_never_reaches_the_weights():
    seen = []

    class Looking(Listener):
        def on_warning(self, message: str) -> None:
            seen.append(all(torch.isfinite(parameter).all() for parameter in run.network.parameters()))

    run = fitting(Looking(), **nan_in_gradient(2))
    run.run()
    assert seen == [True]


def test_weights_that_the_last_step_broke_are_noticed():
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((6,), 3e38))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs[:, :3] - 1e-30 * self.w[:3]

    phase = Phase(name="p", epochs=1, noise=False, rate_theta=1e38)
    with (
        pytest.warns(RuntimeWarning, match="phase p, epoch 1 of 1: w is not finite; going back"),
        pytest.raises(TrainingError, match=r"phase p, epoch 1 of 1: w is not finite, for the second time"),
    ):
        fit(Overflowing(), [next(iter(data(16)))], (phase,), n_data=4)


def test_large_but_finite_gradients_of_half_precision_are_no_fault():
    network = nn.Linear(6, 3).half()
    batches = [(torch.ones(4, 6).half() * 3e4, torch.arange(4) % 3)]
    phase = Phase(name="p", epochs=1, noise=False, rate_theta=0.0)
    fit(network, batches, (phase,), n_data=4, loss=lambda out, y: 3.0 * F.cross_entropy(out.float(), y))
    assert network.weight.grad.float().abs().sum() > 65504
