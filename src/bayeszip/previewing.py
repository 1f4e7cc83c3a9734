"""`preview()`: what a compression would do, before it does: what is pruned, what is not and why, bytes and time."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bayeszip import compressing, targets
from bayeszip.compressing import converted
from bayeszip.ending import Ending, smallest_size
from bayeszip.fitting import Figures, Fitting, Likelihood, Phase, ResidentBatches, count_examples, start_terms
from bayeszip.fitting.augmentation import Augmentation, Transform
from bayeszip.fitting.batches import Loader, checked_batch, count_batches, expected_batches, given_by, rows_of
from bayeszip.fitting.engine import Engine
from bayeszip.fitting.likelihood import Loss
from bayeszip.fitting.loop import Moment
from bayeszip.graph.storable import copied, parameter_count
from bayeszip.modes import unfreeze
from bayeszip.opening import Data, Opening, opened
from bayeszip.recipe import Recipe, Settings
from bayeszip.summary import as_text, facts_table, show_bytes
from bayeszip.targets import Target
from bayeszip.variational import Conversion, variational_weights

__all__ = ["Preview", "preview"]

#: Steps that are timed, after as many that are not: the first ones choose kernels and make states.
TIMED = 4
#: Seconds after which fewer steps have to do.
PATIENCE = 3.0


@dataclass(frozen=True)
class Preview:
    """What a compression would do."""

    conversion: Conversion
    #: The Gaussian weights: how many a tensor has, and its factor on τ₁.
    tensors: Mapping[str, tuple[int, float]]
    #: Of the whole network.
    parameters: int
    #: The file with every Gaussian weight at zero: graph, names, and what is not pruned. None has fewer bytes.
    floor: int
    #: At most: layers that shrink are faster, and not all that may be tried for a target or a rate is.
    seconds: float
    device: str
    #: How often the network is trained, at most: for a figure to keep, again where a training was too strong.
    attempts: int = 1

    def report(self) -> str:
        """The same in plain text."""
        return as_text(facts_table(self._facts()))

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        return {
            "pruned": {name: {"weights": count, "strength": factor} for name, (count, factor) in self.tensors.items()},
            "not_pruned": [{"name": name, "why": why} for name, why in self.conversion.kept],
            "parameters": self.parameters,
            "floor": self.floor,
            "seconds": self.seconds,
            "device": self.device,
            "attempts": self.attempts,
        }

    def _facts(self) -> Iterator[tuple[str, str]]:
        gaussian = sum(count for count, _ in self.tensors.values())
        yield "parameters", f"{self.parameters:,}, of them {gaussian:,} to be pruned and shared"
        for name, (count, factor) in self.tensors.items():
            yield "pruned", f"{name}: {count:,}" + ("" if factor == 1 else f", τ₁ × {factor:g}")
        for name, why in self.conversion.kept:
            became = "stays as it is" if why.endswith("frozen") else "trained, then folded, rounded or clustered"
            yield "not pruned", f"{name or 'the network itself'} ({why}): {became}"
        yield "no file is below", show_bytes(self.floor)
        tries = f", for {self.attempts} trainings, of which the first may do" if self.attempts > 1 else ""
        yield "time", f"at most {_duration(self.seconds)} on {self.device}{tries}"


def preview(
    model: nn.Module,
    train_loader: Loader,
    *,
    val_loader: Loader | None = None,
    recipe: str | Recipe = "vd+sws",
    settings: Settings = (),
    device: str | torch.device = "auto",
    loss: str | Loss | Likelihood = F.cross_entropy,
    metric: Any = None,
    example_inputs: Any = None,
    pretrain: bool = False,
    max_bytes: int | None = None,
    min_ratio: float | None = None,
    max_accuracy_drop: float | None = None,
    max_loss_increase: float | None = None,
    max_metric_drop: float | None = None,
    rates: Sequence[float] = (),
    mixed_precision: str | None = None,
    augment: str | Augmentation | Transform | None = None,
    teacher: nn.Module | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strengths: Mapping[str, float] | None = None,
) -> Preview:
    """What `compress` would do with these arguments; a few steps are taken, on a copy, to see how long they take.

    Raises:
        ModelError, DataError, RecipeError, TrainingError, TargetError: as `compress` would before its training.
    """
    target = Target.of(
        max_bytes=max_bytes,
        min_ratio=min_ratio,
        max_accuracy_drop=max_accuracy_drop,
        max_loss_increase=max_loss_increase,
        max_metric_drop=max_metric_drop,
    )
    begun = opened(
        model,
        train_loader,
        val_loader=val_loader,
        recipe=recipe,
        settings=settings,
        target=target,
        device=device,
        loss=loss,
        metric=metric,
        example_inputs=example_inputs,
        pretrain=pretrain,
        rates=rates,
        mixed_precision=mixed_precision,
        augment=augment,
        teacher=teacher,
        selection=(include, exclude, strengths),
        alone=True,
    )
    return _previewed(begun, pretrain)


def _previewed(begun: Opening, pretrain: bool) -> Preview:
    """By the first steps of each phase, and by a file in which all weights are zero."""
    plan, network, device, clock = begun.settings, begun.network, begun.device, _Clock(begun.data, begun.engine)
    seconds = 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if pretrain:
            before = [phase for phase in plan.pretraining if phase.epochs]
            seconds += sum(clock.measure(copied(network), each, {}, begun.data.teacher) for each in before)
        original = copied(network).eval().requires_grad_(False)
        conversion = converted(network, plan, begun.examples)
        ending = Ending(network, begun.examples, plan, None, lambda _: Figures())
        began = time.perf_counter()
        floor = smallest_size(network, original, ending, begun.target)
        coding = time.perf_counter() - began
        tensors = {each.name: (each.theta.numel(), each.strength) for each in variational_weights(network)}
        work = _Work.of(plan, begun.target, len(begun.further), clock.has_classes(original))
        seconds += work.seconds(clock, network, original, ending) + work.files * coding
    return Preview(conversion, tensors, parameter_count(original), floor, seconds, str(device), work.attempts)


@dataclass(frozen=True)
class _Work:
    """What is trained, at most, once the network is a given one."""

    #: Trainings, each of all phases.
    attempts: int
    #: Closing phases, of all trainings together.
    closings: int

    @property
    def files(self) -> int:
        """How often the network is traced and coded: when a training begins, at its ends, and as `pack` does."""
        return self.attempts + self.closings + 1

    @classmethod
    def of(cls, plan: Recipe, target: Target | None, further: int, has_classes: bool) -> "_Work":
        """As `Ending` and the path around it try files."""
        finer = len(targets.FINER) + 1
        if target is not None and target.budget(1) is None:
            return cls(compressing.ATTEMPTS, compressing.ATTEMPTS * (targets.TRIALS + finer) + len(targets.FINER))
        if target is not None:
            return cls(1, 1)
        trials = plan.quantization.rate_trials
        # What says numbers may need finer values than the recipe has.
        return cls(1, (1 + trials if trials else 1) + (0 if has_classes else finer) + further)

    def seconds(self, clock: "_Clock", network: nn.Module, original: nn.Module, ending: Ending) -> float:
        """That it takes, by the first steps of each phase."""
        plan, tutor = ending.settings, clock.data.teacher
        phases, closing = [phase for phase in plan.phases if phase.epochs], plan.closing
        starts, teacher = ending.starts(original), original if tutor is None else tutor
        taken = [clock.measure(network, phase, starts, teacher) for phase in phases]
        total = self.attempts * sum(taken)
        if not closing.epochs:
            return total
        if phases:
            # Closing phases train the same network; their steps take no longer than those before them.
            return total + self.closings * closing.epochs * taken[-1] / phases[-1].epochs
        trained = copied(original)
        unfreeze(trained)
        return total + self.closings * clock.measure(trained, closing, {}, teacher)


class _Enough(Exception):
    """Ends a training that was only begun to be timed."""


@dataclass(frozen=True)
class _Clock:
    """Times phases by their first steps."""

    data: Data
    engine: Engine

    def measure(
        self, network: nn.Module, phase: Phase, starts: Mapping[str, Any], teacher: nn.Module | None = None
    ) -> float:
        """Seconds that the phase will take."""
        n_data, moments = self.data.n_data, list[tuple[int, float]]()

        def at_rest(moment: Moment) -> None:
            moments.append((fitting.steps, time.perf_counter()))
            is_slow = fitting.steps > 0 and moments[-1][1] - began > PATIENCE
            if moment == "epoch" or fitting.steps >= 2 * TIMED or is_slow:
                raise _Enough

        terms = start_terms(network, (phase,), starts)
        fitting = Fitting(
            network,
            # A teacher is asked about all that there is, before the first step.
            _first(self.data.batches, 2 * TIMED),
            (phase,),
            n_data=n_data,
            terms=terms,
            teacher=teacher,
            loss=self.data.likelihood,
            at_rest=at_rest,
            engine=self.engine,
            augment=self.data.augment,
        )
        began = time.perf_counter()
        with contextlib.suppress(_Enough):
            fitting.run()
        # Where there are too few steps to leave the first ones out, they count.
        first = next((moment for moment in moments if moment[0] >= min(TIMED, moments[-1][0] - 1)), (0, began))
        if moments[-1][0] <= first[0]:
            first = (0, began)
        a_step = (moments[-1][1] - first[1]) / (moments[-1][0] - first[0])
        return phase.epochs * (a_step * self._steps(n_data) + self._evaluation(network))

    def has_classes(self, network: nn.Module) -> bool:
        """Whether an accuracy is measured, or nothing is."""
        if self.data.validation is None:
            return True
        return self.data.judge(network, _first(self.data.validation, TIMED)).accuracy is not None

    def _steps(self, n_data: int) -> int:
        """In an epoch."""
        counted = count_batches(self.data.batches)
        if counted is not None:
            return counted
        first = next(checked_batch(batch).targets for batch in given_by(self.data.batches))
        return expected_batches(n_data, rows_of(first))

    def _evaluation(self, network: nn.Module) -> float:
        validation = self.data.validation
        if validation is None:
            return 0.0
        few, began = _first(validation, TIMED), time.perf_counter()
        self.data.judge(network, few)
        parts = 1.0 if few is validation else count_examples(validation) / max(count_examples(few), 1)
        return parts * (time.perf_counter() - began)


def _first(batches: Loader, count: int) -> Loader:
    """So many of the batches, where that can be had without going through them."""
    return batches.first(count * batches.batch_size) if isinstance(batches, ResidentBatches) else batches


def _duration(seconds: float) -> str:
    """
    >>> _duration(42.3), _duration(600), _duration(9000)
    ('42 s', '10 minutes', '2.5 hours')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
