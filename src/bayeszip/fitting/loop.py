"""The training loop: phase by phase, from pretrained weights to a posterior ready to be quantized.

for each phase:  reseed? ──► for each epoch:  compact? ──► for each batch:  dials (rates, τ's, σ of the components)
                                                                            loss ──► gradients ──► Adam
                                          └──► EpochStats ──► on_epoch
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.data import Batches as ResidentBatches
from bayeszip.errors import DataError, RecipeError, TrainingError
from bayeszip.fitting.batches import Batches, Inputs, count_batches, on_device, running
from bayeszip.fitting.evaluation import evaluate
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.recorded import RecordedSteps, can_be_recorded
from bayeszip.fitting.steps import PARTS, Loss, Problem, adam, dials_at, take_step
from bayeszip.fitting.teacher import Teacher
from bayeszip.variational.compaction import compact, expand
from bayeszip.variational.distributions import log_alpha
from bayeszip.variational.layers import VariationalLayer, VariationalWeight, variational_weights
from bayeszip.variational.mixture import MixturePrior

__all__ = ["PRUNING_LOG_ALPHA", "EpochStats", "Fitting", "Watcher", "fit"]

#: log 19: the log α at which the dropout rate σ²/(θ²+σ²) is 0.95, the paper's threshold (app. B).
PRUNING_LOG_ALPHA = math.log(19)

#: Replayed steps between two looks at the progress: a replay takes less time than a look.
STEPS_A_LOOK = 50


@dataclass(frozen=True)
class EpochStats:
    """What an epoch came to. Loss parts are means over its batches, in nats per example."""

    phase: str
    epoch: int
    epochs: int
    seconds: float
    nll: float
    kl: float
    mixture: float
    hyper_prior: float
    accuracy: float | None
    zeros: float
    weights_computed: int
    #: What a file would take now; filled in by whoever knows how to code one.
    bytes: int | None = None


class Watcher:
    """Told what goes on; does nothing. Progress displays, logs and records derive from it."""

    def on_phase(self, phase: Phase, network: nn.Module, prior: MixturePrior | None) -> None:
        """Before the first step of a phase, with the network and the mixture it starts from."""

    def on_batch(self, phase: Phase, done: float) -> None:
        """`done` is the share of the phase that is over."""

    def on_epoch(self, stats: EpochStats, network: nn.Module, prior: MixturePrior | None) -> None:
        """After each epoch, with the network as it is now."""

    def strength(self) -> float:
        """Factor on τ₁ for the epoch to come, asked before each; 1 unless somebody steers."""
        return 1.0


class Fitting:
    """A network on its way through phases of training, and where on that way it is.

    Args:
        network: with variational layers, or plain for phases without τ's (pretraining).
        batches: what to train on; iterated once an epoch.
        n_data: N, how many examples that is.
        prior: the mixture over the means; needed where a phase has τ₂ > 0.
        teacher: the network whose outputs are distilled; needed where a phase has distillation > 0.
        loss: mean negative log-likelihood of a batch, from outputs and targets.
        validation: for the accuracy in `EpochStats`; never trained on.
        watcher: told of batches and epochs.

    Raises:
        RecipeError: a phase needs a prior, a teacher or variational layers, and there is none.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Batches,
        phases: Sequence[Phase],
        *,
        n_data: int,
        prior: MixturePrior | None = None,
        teacher: nn.Module | None = None,
        loss: Loss = F.cross_entropy,
        validation: Batches | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.batches, self.phases, self.validation = batches, phases, validation
        self.watcher = watcher or Watcher()
        self.device = next(network.parameters()).device
        weights = tuple(variational_weights(network))
        #: How many weights have a posterior; compaction leaves some of them uncomputed.
        self.n_weights = sum(weight.theta.numel() for weight in weights)
        asked = Teacher(teacher, batches) if teacher and any(phase.distillation for phase in phases) else None
        self.problem = Problem(network, weights, prior, asked, loss, n_data)
        for phase in phases:
            self._check_needs(phase)
        #: Where on the way it is: which phase, how many of its epochs are over, how many batches of the next one.
        self.phase_index = self.epoch = self.batch = 0
        #: Of the phase at hand; None before its first step.
        self.optimizer: torch.optim.Optimizer | None = None
        #: The loss's parts over the batches of this epoch so far.
        self.sums = torch.zeros(len(PARTS), device=self.device)
        self._recorded: RecordedSteps | None = None

    @property
    def network(self) -> nn.Module:
        return self.problem.network

    @property
    def phase(self) -> Phase:
        """The phase at hand."""
        return self.phases[self.phase_index]

    def run(self) -> None:
        """Train in place, from where it is to the end.

        Raises:
            TrainingError: the loss is not finite; names the phase and the epoch.
        """
        try:
            with _own_stream(self.device), self._noise():
                while self.phase_index < len(self.phases):
                    self._run_phase()
        finally:
            # Whatever ends the training, the caller gets the network's own shapes back.
            expand(self.network)
            self.network.eval()

    def _check_needs(self, phase: Phase) -> None:
        if (phase.tau1 or phase.tau2) and not self.n_weights:
            raise RecipeError(f"{phase.name}: τ₁ and τ₂ weigh priors on Gaussian weights; this network has none")
        if phase.tau2 and self.problem.prior is None:
            raise RecipeError(f"{phase.name}: τ₂ weighs a mixture prior; there is none")
        if phase.distillation and self.problem.teacher is None:
            raise RecipeError(f"{phase.name}: distillation needs the pretrained network as a teacher")

    @contextlib.contextmanager
    def _noise(self) -> Iterator[None]:
        """On a GPU the layers draw from a source of this fitting alone, so that several can go on side by side."""
        if self.device.type != "cuda":
            yield
            return
        layers = [layer for layer in self.network.modules() if isinstance(layer, VariationalLayer)]
        self._source = torch.Generator(self.device).manual_seed(int(torch.randint(2**63 - 1, ())))
        for layer in layers:
            layer.generator = self._source
        try:
            yield
        finally:
            for layer in layers:
                layer.generator = None

    def _run_phase(self) -> None:
        for layer in self.network.modules():
            if isinstance(layer, VariationalLayer):
                layer.noise = self.phase.noise
        if self.optimizer is None:
            self._begin_phase()
        while self.epoch < self.phase.epochs:
            stats = self._run_epoch()
            self.epoch, self.batch = self.epoch + 1, 0
            self.sums.zero_()
            self.watcher.on_epoch(stats, self.network, self.problem.prior)
        self.optimizer = self._recorded = None
        self.phase_index, self.epoch = self.phase_index + 1, 0

    def _begin_phase(self) -> None:
        if self.phase.reseed and self.problem.prior is not None:
            self.problem.prior.reseed(_survivors(self.problem.weights))
        self.optimizer = adam(self.problem, self.phase)
        self.watcher.on_phase(self.phase, self.network, self.problem.prior)

    def _run_epoch(self) -> EpochStats:
        phase, began = self.phase, time.perf_counter()
        if phase.compact_every and self.epoch and self.batch == 0 and self.epoch % phase.compact_every == 0:
            compact(self.network, PRUNING_LOG_ALPHA, _select_in(cast(torch.optim.Optimizer, self.optimizer)))
            self._recorded = None
        self.network.train()
        if can_be_recorded(self.batches, self.device):
            self._run_recorded()
        else:
            self._run_batches()
        self._check_finite(self.sums)
        self._check_weights()
        nll, kl, mixture, hyper_prior = (self.sums / self.batch).tolist()
        return EpochStats(
            phase=phase.name,
            epoch=self.epoch + 1,
            epochs=phase.epochs,
            seconds=time.perf_counter() - began,
            nll=nll,
            kl=kl,
            mixture=mixture,
            hyper_prior=hyper_prior,
            accuracy=None if self.validation is None else evaluate(self.network, self.validation),
            zeros=self._share_of_zeros(),
            weights_computed=sum(weight.theta.numel() for weight in self.problem.weights),
        )

    def _run_batches(self) -> None:
        strength = self.watcher.strength()
        n_batches = count_batches(self.batches)
        for inputs, targets in on_device(self.batches, self.device):
            done = (self.epoch + min(self.batch, n_batches) / n_batches) / self.phase.epochs
            self._take_step(done, strength, inputs, targets)
            self.batch += 1
            self.watcher.on_batch(self.phase, done)
        if not self.batch:
            raise DataError("the training data gave no batch; check the loader (and drop_last)")

    def _take_step(self, done: float, strength: float, inputs: Inputs, targets: Inputs) -> None:
        dials = dials_at(self.phase, done, strength)
        optimizer = cast(torch.optim.Optimizer, self.optimizer)
        with running(f"phase {self.phase.name}, epoch {self.epoch + 1} of {self.phase.epochs}"):
            parts = take_step(self.problem, self.phase, optimizer, dials, inputs, targets)
        self.sums += parts
        # A GPU is asked once an epoch, so that it never waits; the CPU at every step.
        if self.device.type == "cpu":
            self._check_finite(parts)

    def _run_recorded(self) -> None:
        """The same on a GPU that holds the data."""
        phase, batches = self.phase, cast(ResidentBatches, self.batches)
        if self._recorded is None:
            optimizer = cast(torch.optim.Optimizer, self.optimizer)
            self._recorded = RecordedSteps(self.problem, phase, optimizer, batches, self._source)

        def on_step(step: int) -> None:
            if step % STEPS_A_LOOK == 0:
                self.watcher.on_batch(phase, (self.epoch + step / len(batches)) / phase.epochs)

        with running(f"phase {phase.name}, epoch {self.epoch + 1} of {phase.epochs}"):
            sums, steps = self._recorded.run_pass(self.epoch, self.watcher.strength(), on_step)
        self.sums += sums
        self.batch += steps

    @torch.no_grad()
    def _share_of_zeros(self) -> float:
        """The share of all weights that would be zero if the network were quantized now."""
        if not self.n_weights:
            return 0.0
        alive = torch.zeros((), dtype=torch.int64, device=self.device)
        for weight in self.problem.weights:
            if self.phase.tau2 and self.problem.prior is not None:
                alive += torch.count_nonzero(self.problem.prior.assign(weight.theta))
            else:
                alive += (log_alpha(weight.theta, weight.log_sigma2) < PRUNING_LOG_ALPHA).sum()
        return 1 - alive.item() / self.n_weights

    def _check_finite(self, parts: Tensor) -> None:
        if torch.isfinite(parts).all():
            return
        culprits = [name for name, value in zip(PARTS, parts.tolist(), strict=True) if not math.isfinite(value)]
        raise self._not_finite(" and ".join(culprits))

    def _check_weights(self) -> None:
        """The last step's loss says nothing of the weights it left."""
        names, parameters = zip(*self.network.named_parameters(), strict=True)
        # All at once: asking a GPU for each would take longer than the answer.
        finite = torch.stack([torch.isfinite(parameter.detach()).all() for parameter in parameters]).tolist()
        if not all(finite):
            raise self._not_finite(names[finite.index(False)])

    def _not_finite(self, what: str) -> TrainingError:
        return TrainingError(
            f"phase {self.phase.name}, epoch {self.epoch + 1} of {self.phase.epochs}: {what} is no longer finite. "
            "Check the data for NaN, lower the phase's learning rates (--set "
            f"{self.phase.name}.rate_theta=…), or start from a network that is trained."
        )


def fit(
    network: nn.Module,
    batches: Batches,
    phases: Sequence[Phase],
    *,
    n_data: int,
    prior: MixturePrior | None = None,
    teacher: nn.Module | None = None,
    loss: Loss = F.cross_entropy,
    validation: Batches | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Train `network` (and `prior`, where a phase has τ₂ > 0) in place through `phases`; see `Fitting`."""
    Fitting(
        network,
        batches,
        phases,
        n_data=n_data,
        prior=prior,
        teacher=teacher,
        loss=loss,
        validation=validation,
        watcher=watcher,
    ).run()


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, work in a stream of one's own: steps can be recorded there, and others don't wait for it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


def _select_in(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter, Callable[[Tensor], Tensor]], None]:
    """Keeps the optimizer's state in step with parameters that lose rows and columns."""

    def select(parameter: nn.Parameter, selection: Callable[[Tensor], Tensor]) -> None:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = selection(value)

    return select


def _survivors(weights: Sequence[VariationalWeight]) -> Tensor:
    """The means that pruning would keep."""
    with torch.no_grad():
        kept = [w.theta[log_alpha(w.theta, w.log_sigma2) < PRUNING_LOG_ALPHA].flatten().float() for w in weights]
    return torch.cat(kept)
