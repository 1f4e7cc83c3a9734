"""One phase in force: what is minimized over what, who is trained at which rate, what is scheduled, what is dead.

Every driver of a training goes by it: the loop of `compress` (`loop`), its recorded steps (`recorded`), and somebody
else's loop (`compressor`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayeszip.errors import RecipeError
from bayeszip.fitting.batches import Inputs
from bayeszip.fitting.likelihood import Likelihood, Loss
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.teacher import Teacher
from bayeszip.posterior import Posterior
from bayeszip.schedules import SCHEDULES
from bayeszip.variational.layers import VariationalLayer, VariationalWeight, variational_weights
from bayeszip.variational.objective import Weighed, add_gradients, part_names, regularizer
from bayeszip.variational.terms import KINDS, Term

__all__ = [
    "DATA",
    "MEANS",
    "RATE",
    "Course",
    "Dials",
    "Loss",
    "Problem",
    "groups_of",
    "is_in_force",
    "is_pruning",
    "start_terms",
]

#: The part of the loss that comes from the data; terms add the others.
DATA = "data"

#: In a group of parameters, the setting that holds its learning rate: a phase's, or `TERM.FIELD`.
RATE = "bayeszip_rate"
#: That of the network's own parameters.
MEANS = "rate_theta"


class Dials(NamedTuple):
    """What a phase schedules, at one step: numbers, or tensors on the device for a recorded step to read."""

    #: Factor on every learning rate.
    rate: float | Tensor
    #: For each term in force τ, then what it schedules besides.
    of_terms: tuple[tuple[float | Tensor, ...], ...]

    @property
    def taus(self) -> tuple[float | Tensor, ...]:
        return tuple(dials[0] for dials in self.of_terms)

    def line(self) -> list[float | Tensor]:
        """All in one row."""
        return [self.rate, *(dial for dials in self.of_terms for dial in dials)]


@dataclass(frozen=True)
class Problem:
    """What is minimized over what."""

    network: nn.Module
    #: The network's Gaussian weights; none in pretraining.
    weights: tuple[VariationalWeight, ...]
    #: All that phases may put in force.
    terms: tuple[Term, ...]
    teacher: Teacher | None
    #: Of a batch, in nats per example; or, in pretraining, in whatever unit the caller's has.
    loss: Loss | Likelihood
    #: N.
    n_data: int

    @cached_property
    def likelihood(self) -> Likelihood:
        """The loss, and which kind it is."""
        return Likelihood.of(self.loss)


def start_terms(network: nn.Module, phases: Sequence[Phase], starts: Mapping[str, Any]) -> tuple[Term, ...]:
    """The terms that a phase will put in force, at their start values.

    Args:
        starts: what the recipe says of terms, by name.
    """
    if next(variational_weights(network), None) is None:
        return ()
    return tuple(kind.start(network, starts.get(kind.name)) for kind in KINDS.values() if is_in_force(kind, phases))


def is_in_force(kind: type[Term], phases: Sequence[Phase]) -> bool:
    """Whether one of the phases has this kind of term."""
    said = [phase.settings_of(kind) for phase in phases]
    return any(settings is not None and kind.counts(settings) for settings in said)


def is_pruning(phase: Phase) -> bool:
    """Whether a term that a target can turn is in force: τ₁'s, or another by which weights die."""
    return any(kind.steered and is_in_force(kind, [phase]) for kind in KINDS.values())


class Course:
    """A problem, and the phase in force for it."""

    def __init__(self, problem: Problem, phase: Phase) -> None:
        self.problem, self.phase = problem, phase
        said = [(term, phase.settings_of(type(term))) for term in problem.terms]
        #: The terms in force, with what the phase says of them.
        self._said = [(term, settings) for term, settings in said if settings is not None and term.counts(settings)]
        self.terms = tuple(term for term, _ in self._said)
        #: The parts of the loss, in the order in which a step returns them.
        self.parts = (DATA, *part_names(self.terms))

    @property
    def network(self) -> nn.Module:
        return self.problem.network

    @property
    def weights(self) -> tuple[VariationalWeight, ...]:
        return self.problem.weights

    def check_needs(self) -> None:
        """Refuse a phase that needs what there is not.

        Raises:
            RecipeError: a term has no Gaussian weights to work on or is not there at all, or a teacher is missing.
        """
        name = self.phase.name
        for kind in KINDS.values():
            if not is_in_force(kind, [self.phase]):
                continue
            if not self.weights:
                raise RecipeError(f"{name}: the {kind.name} is a cost of Gaussian weights; this network has none")
            if not any(isinstance(term, kind) for term in self.problem.terms):
                raise RecipeError(f"{name}: the phase has the term {kind.name}, and the training was given none")
        if self.phase.distillation and self.problem.teacher is None:
            raise RecipeError(f"{name}: distillation needs a teacher; give one, or set {name}.distillation=0")

    # What a phase switches

    def enter(self) -> None:
        """Switch noise and terms to this phase; also when a run is taken up in the middle of it."""
        for layer in self.network.modules():
            if isinstance(layer, VariationalLayer):
                layer.noise = self.phase.noise
        for weight in self.weights:
            # Somebody else's data-parallel wrapper would wait for gradients that never come.
            weight.log_sigma2.requires_grad_(self.phase.noise)
        for term, settings in self._said:
            term.enter(settings)

    def begin(self) -> None:
        """What happens once, before the first step."""
        for term, settings in self._said:
            term.begin(settings, self.weights)

    def renew(self, epoch: int) -> None:
        """What happens before each epoch, of which so many are over."""
        for term, settings in self._said:
            term.renew(settings, epoch, self.weights, self.keeps)

    # What is trained, and how fast

    def groups(self) -> list[dict[str, Any]]:
        """What this phase trains, in groups for an optimizer, each with its learning rate to begin with."""
        named = [self.means(), {"params": [w.log_sigma2 for w in self.weights], RATE: "rate_log_sigma2"}]
        named += [group for term in self.terms for group in groups_of(term)]
        groups = []
        for group in named:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            if trained:
                groups.append({**group, "params": trained, "lr": self.rate(group[RATE])})
        return groups

    def means(self) -> dict[str, Any]:
        """The network's own parameters: the means of weights with a posterior, and all others."""
        variances = {id(weight.log_sigma2) for weight in self.weights}
        means = [p for p in self.network.parameters() if p.requires_grad and id(p) not in variances]
        return {"params": means, RATE: MEANS, "weight_decay": self.phase.weight_decay}

    def rate(self, name: str) -> float:
        """The learning rate of a group as the phase has it, before the schedule; `name` is its `RATE`."""
        term, _, field = name.rpartition(".")
        settings = self.phase.settings_of(KINDS[term]) if term else self.phase
        return 0.0 if settings is None else float(getattr(settings, field))

    # What is scheduled

    def dials_at(self, done: float, strength: float = 1.0) -> Dials:
        """The dials when the share `done` of the phase is over.

        Args:
            strength: factor on the weights of terms that can be steered, for whoever steers the size during training.
        """
        return Dials(
            SCHEDULES[self.phase.schedule](done),
            tuple(
                _times(strength, term.dials(settings, done)) if term.steered else term.dials(settings, done)
                for term, settings in self._said
            ),
        )

    def dials_in(self, line: Tensor) -> Dials:
        """The dials from their row."""
        rest = iter(line[1:])
        return Dials(line[0], tuple(tuple(next(rest) for _ in dials) for dials in self._form.of_terms))

    @cached_property
    def _form(self) -> Dials:
        return self.dials_at(0.0)

    def turn(self, dials: Dials) -> None:
        """Turn the terms to where they are scheduled."""
        for term, own in zip(self.terms, dials.of_terms, strict=True):
            term.turn(*own[1:])

    # The loss

    def weighed(self, dials: Dials) -> list[Weighed]:
        """The terms with their weights."""
        return [Weighed(term, tau) for term, tau in zip(self.terms, dials.taus, strict=True)]

    def regularizer(self, dials: Dials) -> dict[str, Tensor]:
        """What the terms add to the mean loss of a batch, by name."""
        return regularizer(self.weighed(dials), self.weights, self.problem.n_data) if self.terms else {}

    def add_gradients(self, dials: Dials, processes: int) -> dict[str, Tensor]:
        """The same, with gradients added to those there are; each of several processes adds its part of them."""
        n_data = self.problem.n_data * processes
        return add_gradients(self.weighed(dials), self.weights, n_data) if self.terms else {}

    def blend(
        self, loss: Tensor, outputs: Any, taught: Tensor | None, targets: Inputs | None, *, needed: bool = False
    ) -> Tensor:
        """The data's loss, mixed with the imitation of what the teacher said, where the phase asks for that.

        Args:
            needed: whether to refuse a loss under which nothing can be imitated, instead of taking it alone.
        """
        phase, likelihood = self.phase, self.problem.likelihood
        if taught is None or not phase.distillation:
            return loss
        imitate = likelihood.needed_imitation if needed else likelihood.imitation
        copied = imitate(outputs, taught, targets, phase.distillation_temperature)
        return loss if copied is None else (1 - phase.distillation) * loss + phase.distillation * copied

    # What is dead

    @torch.no_grad()
    def keeps(self, weight: VariationalWeight) -> Tensor:
        """Which weights of a tensor no term in force holds for dead."""
        judged = [kept for term in self.terms if (kept := term.keeps(weight)) is not None]
        return reduce(torch.logical_and, judged) if judged else torch.ones_like(weight.theta, dtype=torch.bool)

    @torch.no_grad()
    def share_of_zeros(self, n_weights: int) -> float:
        """The share of all `n_weights` that would be zero if the network were quantized now."""
        if not n_weights:
            return 0.0
        alive = torch.stack([self.keeps(weight).sum() for weight in self.weights]).sum()
        return 1 - alive.item() / n_weights

    def posterior(self) -> Posterior:
        """The weights, and what the terms in force know of them, frozen as they are now."""
        return Posterior.of(self.network, self.terms)


def groups_of(term: Term) -> Iterator[dict[str, Any]]:
    """What a term trains, in groups for an optimizer."""
    for trained in term.trained():
        yield {"params": [trained.parameter], RATE: f"{term.name}.{trained.rate}", "weight_decay": 0.0}


def _times(strength: float, dials: tuple[float, ...]) -> tuple[float, ...]:
    return (strength * dials[0], *dials[1:])
