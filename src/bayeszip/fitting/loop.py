"""The training loop: phase by phase, from pretrained weights to a posterior ready to be quantized.

for each phase:  begin ──► for each epoch:  compact? ──► for each batch:  dials (rates, τ's, what terms schedule)
                                                                          loss ──► gradients ──► step
                                        └──► EpochStats ──► steering, watcher

After each step, epoch and phase the fitting is at rest: `state_dict` then holds all that what follows depends on.
What is not finite takes it back to the start of the epoch, once, and at lower rates.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.errors import CheckpointError, DataError, TrainingError
from bayeszip.fitting.augmentation import Augmentation, Transform, augmented
from bayeszip.fitting.batches import Batch, Loader, checked_batch, count_batches, expected_batches, rows_of, running
from bayeszip.fitting.course import Course, Dials, Problem, start_terms
from bayeszip.fitting.engine import Engine, SingleProcess, told
from bayeszip.fitting.evaluation import Figures, Judge, Metric
from bayeszip.fitting.finite import find_not_finite, parts_not_finite, weights_not_finite
from bayeszip.fitting.likelihood import Likelihood, Loss
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.recorded import RecordedSteps, can_be_recorded, own_stream
from bayeszip.fitting.resident import ResidentBatches
from bayeszip.fitting.staged import StagedSteps
from bayeszip.fitting.state import (
    Passes,
    load_module_state,
    load_optimizer_state,
    load_random_state,
    module_state,
    optimizer_state,
    random_state,
    snapshot,
)
from bayeszip.fitting.steering import Steering
from bayeszip.fitting.steps import optimizer_of, take_step
from bayeszip.fitting.teacher import Teacher
from bayeszip.fitting.watching import EpochStats, Watcher
from bayeszip.modes import set_training
from bayeszip.variational.compaction import compact, expand
from bayeszip.variational.distributions import PRUNING_LOG_ALPHA
from bayeszip.variational.layers import VariationalLayer, variational_weights
from bayeszip.variational.terms import Term

__all__ = ["Fitting", "Moment", "fit"]

#: What has just ended when a fitting is at rest.
Moment = Literal["step", "epoch", "phase"]

#: Replayed steps between two looks at the progress: a replay takes less time than a look.
STEPS_A_LOOK = 50

#: A GPU multiplies in blocks of so many channels; between two multiples it is slower than at the next.
GPU_BLOCKS = 8

#: Factor on all learning rates after something was not finite.
SLOWER = 0.5


class NotFinite(TrainingError):
    """Caught by the fitting itself, the first time."""


class Fitting:
    """A network on its way through phases of training, and where on that way it is.

    Args:
        network: with variational layers, or plain for phases without τ's (pretraining).
        batches: what to train on; iterated once an epoch.
        n_data: N, how many examples that is.
        terms: of the objective, which are trained too; None: those that the phases have, at their start.
        teacher: the network whose outputs are distilled; needed where a phase has distillation > 0.
        loss: mean negative log-likelihood of a batch, from outputs and targets.
        validation: for the figures in `EpochStats`; never trained on.
        metric: one more of them.
        watcher: told of batches and epochs.
        steering: asked for the strength of each epoch.
        at_rest: called after each step, epoch and phase; may take the state, or end the training by raising.
        engine: what it runs on; by default this process alone.
        augment: changes the inputs of every batch, on the device; the teacher is shown the same.

    Raises:
        RecipeError: a phase needs a term, a teacher or variational layers, and there is none.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Loader,
        phases: Sequence[Phase],
        *,
        n_data: int,
        terms: Sequence[Term] | None = None,
        teacher: nn.Module | None = None,
        loss: Loss | Likelihood = F.cross_entropy,
        validation: Loader | None = None,
        metric: Metric | None = None,
        watcher: Watcher | None = None,
        steering: Steering | None = None,
        at_rest: Callable[[Moment], None] | None = None,
        engine: Engine | None = None,
        augment: Augmentation | Transform | None = None,
    ) -> None:
        self.device = next(network.parameters()).device
        self.engine = engine or SingleProcess(self.device)
        if augment is not None and isinstance(batches, ResidentBatches):
            # There, so that it is recorded with the steps.
            batches, augment = batches.augmented_by(augment), None
        self._augment = augment
        self.batches, self.phases, self.validation = self.engine.share(batches), phases, validation
        self.watcher, self.steering, self.at_rest = watcher or Watcher(), steering or Steering(), at_rest
        weights = tuple(variational_weights(network))
        #: How many weights have a posterior; compaction leaves some of them uncomputed.
        self.n_weights = sum(weight.theta.numel() for weight in weights)
        distills = any(phase.distillation for phase in phases)
        asked = Teacher(teacher, batches) if distills and teacher is not None else None
        held = start_terms(network, phases, {}) if terms is None else tuple(terms)
        self.problem = Problem(network, weights, held, asked, loss, n_data)
        self._judge = Judge(self.problem.likelihood, metric)
        self._courses = [Course(self.problem, phase) for phase in phases]
        for course in self._courses:
            course.check_needs()
        #: Where on the way it is: which phase, how many of its epochs are over, how many batches of the next one.
        self.phase_index = self.epoch = self.batch = 0
        #: Batches of a pass: as the loader says, else as many as the last pass had, or as a first batch lets expect.
        self.n_batches = count_batches(self.batches)
        #: All steps so far.
        self.steps = 0
        #: On all learning rates; less than 1 after something was not finite.
        self.rate_factor = 1.0
        #: Of the phase at hand; None before its first step.
        self.optimizer: torch.optim.Optimizer | None = None
        #: The loss's parts over the batches of this epoch so far.
        self.sums = torch.zeros(0, device=self.device)
        self._recorded: RecordedSteps | StagedSteps | None = None
        self._passes = Passes(self.batches)
        #: On a GPU the layers draw from a source of this fitting alone, so that several can go on side by side.
        self._source = torch.Generator(self.device) if self.device.type == "cuda" else None
        #: What the augmentation of other loaders' batches draws from.
        self._augmenting = None if augment is None else torch.Generator(self.device)
        self._seeded = False
        self._epoch_began = 0.0
        #: The state at the start of the epoch, to go back to.
        self._good: dict[str, Any] | None = None

    @property
    def network(self) -> nn.Module:
        return self.problem.network

    @property
    def course(self) -> Course:
        """The phase in force."""
        return self._courses[self.phase_index]

    @property
    def phase(self) -> Phase:
        return self.course.phase

    def run(self) -> None:
        """Train in place, from where it is to the end.

        Raises:
            TrainingError: something is not finite, for the second time; names it, the phase, the epoch and the step.
        """
        self.engine.begin(self.network, *self.problem.terms)
        try:
            with own_stream(self.device), self._noise():
                while self.phase_index < len(self.phases):
                    try:
                        self._run_phase()
                    except NotFinite as error:
                        self._go_back(error)
        finally:
            # Whatever ends the training, the caller gets the network's own shapes back.
            expand(self.network)
            self.network.eval()
            self._good = None

    def state_dict(self) -> dict[str, Any]:
        """Where on the way it is, and all that the rest of the way depends on. Tensors are the ones in use."""
        return {
            "phase": self.phase_index,
            "epoch": self.epoch,
            "batch": self.batch,
            "steps": self.steps,
            "n_batches": self.n_batches,
            "rate_factor": self.rate_factor,
            "sums": self.sums,
            "seconds": time.perf_counter() - self._epoch_began if self.batch else 0.0,
            **self.result(),
            "optimizer": None if self.optimizer is None else optimizer_state(self.optimizer),
            "passes": self._passes.state_dict(),
            "random": random_state(self._source, self._augmenting, *self._passes.generators),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            CheckpointError: it is of another network, or of other phases.
        """
        self.phase_index, self.epoch, self.batch = state["phase"], state["epoch"], state["batch"]
        epochs = [*(phase.epochs for phase in self.phases), 0]
        if self.phase_index >= len(epochs) or self.epoch + (self.batch > 0) > epochs[self.phase_index]:
            raise CheckpointError("the checkpoint is further on than these phases go; were they shortened?")
        self.steps, self.rate_factor = state["steps"], state["rate_factor"]
        self.n_batches = state["n_batches"]
        self.sums = state["sums"].to(self.device, copy=True)
        self._epoch_began = time.perf_counter() - state["seconds"]
        self.load_result(state)
        self._recorded = self.optimizer = None
        if state["optimizer"] is not None:
            self.course.enter()
            self.optimizer = optimizer_of(self.course, self.rate_factor)
            load_optimizer_state(self.optimizer, state["optimizer"])
        self._passes.load_state_dict(state["passes"])
        load_random_state(state["random"], self._source, self._augmenting, *self._passes.generators)
        self._seeded = True

    def result(self) -> dict[str, Any]:
        """What is left of it when it is over: the network, the terms, and what steered."""
        return {
            "network": module_state(self.network),
            "terms": {term.name: module_state(term) for term in self.problem.terms},
            "steering": self.steering.state_dict(),
        }

    def load_result(self, state: dict[str, Any]) -> None:
        """Put the network, the terms and what steers to what they were."""
        load_module_state(self.network, state["network"])
        for term in self.problem.terms:
            load_module_state(term, state["terms"][term.name])
        self.steering.load_state_dict(state["steering"])

    @contextlib.contextmanager
    def _noise(self) -> Iterator[None]:
        """The layers' noise from the source of this fitting, where it has one."""
        # A checkpoint holds the main process's sources, which the others must not share.
        if not self._seeded or not self.engine.is_main:
            for source in (self._source, self._augmenting):
                if source is not None:
                    source.manual_seed(int(torch.randint(2**63 - 1, ())))
            self._seeded = True
        if self._source is None:
            yield
            return
        layers = [layer for layer in self.network.modules() if isinstance(layer, VariationalLayer)]
        for layer in layers:
            layer.generator = self._source
        try:
            yield
        finally:
            for layer in layers:
                layer.generator = None

    def _run_phase(self) -> None:
        course = self.course
        course.enter()
        if self.optimizer is None:
            self._begin_phase()
        while self.epoch < course.phase.epochs:
            stats = self._run_epoch()
            self.epoch, self.batch = self.epoch + 1, 0
            self.sums.zero_()
            self.steering.on_epoch(stats, course)
            self.watcher.on_epoch(stats, course)
            self._rest("epoch")
        self.optimizer = self._recorded = None
        self.phase_index, self.epoch = self.phase_index + 1, 0
        self._rest("phase")

    def _rest(self, moment: Moment) -> None:
        if self.at_rest is not None:
            self.at_rest(moment)

    def _begin_phase(self) -> None:
        self.course.begin()
        self.steering.on_phase(self.course)
        self.optimizer = optimizer_of(self.course, self.rate_factor)
        self.sums = torch.zeros(len(self.course.parts), device=self.device)
        self.watcher.on_phase(self.course)

    def _go_back(self, error: NotFinite) -> None:
        """To the start of the epoch, at lower rates; the second time is the last."""
        if self._good is None or self.rate_factor < 1:
            raise TrainingError(
                f"{error}, for the second time. Check the data for NaN, lower the phase's learning rates (--set "
                f"{self.phase.name}.rate_theta=…), or start from a network that is trained."
            ) from error
        where = "where it was resumed" if self._good["batch"] else "the start of the epoch"
        self.watcher.on_warning(f"{error}; going back to {where}, with half the learning rates")
        self.load_state_dict({**self._good, "rate_factor": SLOWER})

    def _run_epoch(self) -> EpochStats:
        phase = self.phase
        if not self.batch:
            self._epoch_began = time.perf_counter()
        self._good = snapshot(self.state_dict(), self._good)
        if phase.compact_every and self.epoch and self.batch == 0 and self.epoch % phase.compact_every == 0:
            select = _select_in(cast(torch.optim.Optimizer, self.optimizer))
            blocks = GPU_BLOCKS if self.device.type == "cuda" else 1
            if compact(self.network, PRUNING_LOG_ALPHA, select, multiple_of=blocks):
                self._recorded = None
            self._check_alike()
        if not self.batch:
            self.course.renew(self.epoch)
        set_training(self.network)
        if self._is_recorded() and can_be_recorded(self.batches, self.device):
            self._run_recorded()
        else:
            self._run_batches()
        # The last step's loss says nothing of the weights it left.
        self._check(parts_not_finite(self.course, self.sums) or weights_not_finite(self.network), "")
        self.engine.level_buffers(self.network)
        self._check_alike()
        judged = self._judged()
        return EpochStats(
            phase=phase.name,
            epoch=self.epoch + 1,
            epochs=phase.epochs,
            seconds=time.perf_counter() - self._epoch_began,
            parts=dict(zip(self.course.parts, (self.sums / self.batch).tolist(), strict=True)),
            accuracy=judged.accuracy,
            zeros=self.course.share_of_zeros(self.n_weights),
            weights_computed=sum(weight.theta.numel() for weight in self.problem.weights),
            loss=judged.loss,
            metric=judged.metric,
            steps=self.batch,
        )

    def _judged(self) -> Figures:
        validation = self.validation
        return Figures() if validation is None else told(self.engine, lambda: self._judge(self.network, validation))

    def _check_alike(self) -> None:
        """All processes must hold the same network, terms and optimizer."""
        if self.engine.processes == 1:
            return
        optimizer = cast(torch.optim.Optimizer, self.optimizer)
        modules = {"the network": self.network} | {f"the {term.name}": term for term in self.problem.terms}
        held = {
            f"{name} of {owner}": tensor
            for owner, module in modules.items()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        for index, state in enumerate(optimizer_state(optimizer)):
            moments = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            held |= {f"the optimizer's {name} {index}": value for name, value in moments.items()}
        self.engine.check_alike(held, self._where())

    def _run_batches(self) -> None:
        strength = self.engine.from_main(self.steering.strength)
        take = self._take_staged if self._is_recorded() else self._take_step
        if not self.batch:
            # One that fills batches up, as to a number of tokens, may have more of them in one epoch than in another.
            self.n_batches = count_batches(self.batches) or self.n_batches
        for batch in map(checked_batch, self._passes.rest(self.batch)):
            if self.n_batches is None:
                self.n_batches = self._expected(batch)
            done = (self.epoch + min(self.batch, self.n_batches) / self.n_batches) / self.phase.epochs
            take(self.course.dials_at(done, strength), batch)
            self.batch, self.steps = self.batch + 1, self.steps + 1
            self.watcher.on_batch(self.phase, done)
            self._rest("step")
        if not self.batch:
            raise DataError(
                "the training data gave no batch; check the loader (and drop_last). A generator gives batches once, "
                "and each epoch needs them: give a list, or a loader"
            )
        if count_batches(self.batches) is None:
            self.n_batches = self.batch

    def _expected(self, batch: Batch) -> int:
        """How many batches a pass has, if all are like this one, of which each process has its share."""
        rows = torch.tensor(float(rows_of(batch.targets)), device=self.device)
        self.engine.add_up([rows])
        return expected_batches(self.problem.n_data, int(rows))

    def _is_recorded(self) -> bool:
        """Whether steps are recorded and replayed: on a GPU, where a step is nothing but itself."""
        return self.device.type == "cuda" and self.engine.processes == 1

    def _take_staged(self, dials: Dials, batch: Batch) -> None:
        if not isinstance(self._recorded, StagedSteps):
            self._recorded = StagedSteps(
                self.course,
                cast(torch.optim.Optimizer, self.optimizer),
                self.engine,
                cast(torch.Generator, self._source),
                self._augment,
                self._augmenting,
                self.sums,
                self.watcher.on_warning,
            )
        with running(self._where()):
            self._recorded.take(dials, batch)

    def _take_step(self, dials: Dials, batch: Batch) -> None:
        course, optimizer = self.course, cast(torch.optim.Optimizer, self.optimizer)
        batch = batch.to(self.device)
        inputs = augmented(batch.inputs, self._augment, self._augmenting, batch.targets)
        batch = dataclasses.replace(batch, inputs=inputs)

        def inspect(parts: Tensor) -> None:
            self._check(find_not_finite(course, parts, batch), f", step {self.batch + 1}")

        with running(self._where()):
            # A GPU is asked once an epoch, so that it never waits; the CPU at every step.
            look = inspect if self.device.type == "cpu" else None
            self.sums += take_step(course, optimizer, dials, batch, look, self.engine)

    def _run_recorded(self) -> None:
        """The same on a GPU that holds the data."""
        phase, batches = self.phase, cast(ResidentBatches, self.batches)
        if not isinstance(self._recorded, RecordedSteps):
            self._recorded = RecordedSteps(
                self.course,
                cast(torch.optim.Optimizer, self.optimizer),
                batches,
                self.engine,
                cast(torch.Generator, self._source),
                self.sums,
                self.watcher.on_warning,
            )

        def on_step(step: int) -> None:
            if step % STEPS_A_LOOK == 0:
                self.steps, self.batch = self.steps + step - self.batch, step
                self.watcher.on_batch(phase, (self.epoch + step / len(batches)) / phase.epochs)
                self._rest("step")

        with running(self._where()):
            self._recorded.run_pass(self.epoch, self.steering.strength(), on_step)
        self.steps, self.batch = self.steps + len(batches) - self.batch, len(batches)

    def _where(self) -> str:
        return f"phase {self.phase.name}, epoch {self.epoch + 1} of {self.phase.epochs}"

    def _check(self, not_finite: str | None, step: str) -> None:
        if not_finite is not None:
            raise NotFinite(f"{self._where()}{step}: {not_finite} is not finite")


def fit(network: nn.Module, batches: Loader, phases: Sequence[Phase], **settings: Any) -> None:
    """Train `network`, and the terms, in place through `phases`; settings are `Fitting`'s."""
    Fitting(network, batches, phases, **settings).run()


def _select_in(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter, Callable[[Tensor], Tensor]], None]:
    """Keeps the optimizer's state in step with parameters that lose rows and columns."""

    def select(parameter: nn.Parameter, selection: Callable[[Tensor], Tensor]) -> None:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = selection(value)

    return select
