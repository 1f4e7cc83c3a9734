"""`preview()`: what a compression would do, before it does: what is pruned, what is not and why, bytes and time."""

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.compressing import converted, judged_examples, plain_network
from bayeszip.devices import resolve_device
from bayeszip.ending import Ending, at_rates
from bayeszip.fitting import Figures, Fitting, Judge, Likelihood, Phase, ResidentBatches, count_examples, start_terms
from bayeszip.fitting.batches import Loader, checked_batch, count_batches, rows_of
from bayeszip.fitting.likelihood import Loss
from bayeszip.fitting.loop import Moment
from bayeszip.graph.storable import parameter_count
from bayeszip.recipe import Recipe, Settings
from bayeszip.recipe import recipe as named_recipe
from bayeszip.summary import as_text, facts_table, show_bytes
from bayeszip.tensors import QuantizedTensor
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
    #: At most: layers that shrink are faster.
    seconds: float
    device: str

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
        yield "time", f"at most {_duration(self.seconds)} on {self.device}"


def preview(
    model: nn.Module,
    train_loader: Loader,
    *,
    val_loader: Loader | None = None,
    recipe: str | Recipe = "vd+sws",
    settings: Settings = (),
    device: str | torch.device = "auto",
    loss: str | Loss | Likelihood = F.cross_entropy,
    example_inputs: Sequence[Tensor] | None = None,
    pretrain: bool = False,
    rates: Sequence[float] = (),
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strengths: Mapping[str, float] | None = None,
) -> Preview:
    """What `compress` would do with these arguments; a few steps are taken, on a copy, to see how long they take.

    Raises:
        ModelError, DataError, RecipeError, TrainingError: as `compress` would.
    """
    plan = named_recipe(recipe).having(settings).scaled().selecting(include, exclude, strengths)
    hardware = resolve_device(device)
    network = plain_network(model).to(hardware)
    examples, judge = judged_examples(network, train_loader, example_inputs, Judge(Likelihood.of(loss)))
    clock = _Clock(train_loader, val_loader, judge)
    seconds = 0.0
    with torch.random.fork_rng([hardware] if hardware.type == "cuda" else []):
        if pretrain:
            seconds += sum(clock.measure(copy.deepcopy(network), phase, {}) for phase in plan.pretraining)
        teacher = copy.deepcopy(network).eval().requires_grad_(False)
        conversion = converted(network, plan, examples)
        weights = list(variational_weights(network))
        ending = Ending(network, examples, plan, None, lambda _: Figures())
        nothing = {each.name: QuantizedTensor(np.zeros(each.theta.shape, np.uint8), np.zeros(1)) for each in weights}
        floor = ending.form(teacher).size(nothing)
        tensors = {each.name: (each.theta.numel(), each.strength) for each in weights}
        # Closing phases train the same network; their steps take no longer than those before them.
        closing = plan.closing.epochs * (1 + len(at_rates(plan, rates, None)))
        phases = list(plan.phases)
        if phases:
            phases[-1] = dataclasses.replace(phases[-1], epochs=phases[-1].epochs + closing)
        starts = ending.starts(teacher)
        seconds += sum(clock.measure(network, phase, starts, teacher) for phase in phases if phase.epochs)
    return Preview(conversion, tensors, parameter_count(teacher), floor, seconds, str(hardware))


class _Enough(Exception):
    """Ends a training that was only begun to be timed."""


@dataclass(frozen=True)
class _Clock:
    """Times phases by their first steps."""

    batches: Loader
    validation: Loader | None
    judge: Judge

    def measure(
        self, network: nn.Module, phase: Phase, starts: Mapping[str, Any], teacher: nn.Module | None = None
    ) -> float:
        """Seconds that the phase will take."""
        n_data, moments = count_examples(self.batches), list[tuple[int, float]]()

        def at_rest(moment: Moment) -> None:
            moments.append((fitting.steps, time.perf_counter()))
            is_slow = fitting.steps > 0 and moments[-1][1] - began > PATIENCE
            if moment == "epoch" or fitting.steps >= 2 * TIMED or is_slow:
                raise _Enough

        terms = start_terms(network, (phase,), starts)
        fitting = Fitting(
            network,
            # A teacher is asked about all that there is, before the first step.
            _first(self.batches, 2 * TIMED),
            (phase,),
            n_data=n_data,
            terms=terms,
            teacher=teacher,
            loss=self.judge.likelihood or F.cross_entropy,
            at_rest=at_rest,
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

    def _steps(self, n_data: int) -> int:
        """In an epoch."""
        counted = count_batches(self.batches)
        if counted > 1:
            return counted
        return math.ceil(n_data / rows_of(next(checked_batch(batch).targets for batch in self.batches)))

    def _evaluation(self, network: nn.Module) -> float:
        if self.validation is None:
            return 0.0
        few, began = _first(self.validation, TIMED), time.perf_counter()
        self.judge(network, few)
        parts = 1.0 if few is self.validation else count_examples(self.validation) / max(count_examples(few), 1)
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
