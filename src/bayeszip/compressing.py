"""`compress()`: the path from a trained network to a small file, top to bottom."""

import contextlib
import dataclasses
import math
import numbers
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip import graph
from bayeszip.damage import findings, reach_of
from bayeszip.devices import device_name
from bayeszip.ending import BesideWeights, Ending, bytes_now, held_to, smallest_size, steering_towards
from bayeszip.errors import RecipeError
from bayeszip.fitting import Course, EpochStats, Figures, Fitting, Phase, Steering, Watcher, start_terms
from bayeszip.fitting.augmentation import Augmentation, Transform, name_of
from bayeszip.fitting.batches import Loader, count_batches
from bayeszip.fitting.conditions import data_conditions, machine_conditions, network_conditions
from bayeszip.fitting.engine import Engine, told
from bayeszip.fitting.keeper import Checkpointing, Keeper
from bayeszip.fitting.likelihood import Loss
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.fitting.statistics import renew_statistics
from bayeszip.fitting.teacher import in_words
from bayeszip.opening import Data, Opening, opened
from bayeszip.posterior import Posterior
from bayeszip.progress import TrainingProgress
from bayeszip.recipe import Recipe, Settings
from bayeszip.result import Fit, Result
from bayeszip.settings import to_dict
from bayeszip.snapping import curvatures_if_any, moments_if_any
from bayeszip.targets import Quality, Target, better, steered_phase
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import Conversion, Term, to_stock, to_variational
from bayeszip.variational.usage import called_layers

__all__ = ["ATTEMPTS", "compress", "converted", "is_open_ended"]

#: The share of training time that "bytes it would have now" may take.
MEASURING_SHARE = 0.02
#: How often a network is trained, at most, for a figure to keep, and by which factor a prior that was too strong is
#: weaker then.
ATTEMPTS, WEAKER = 3, 0.2


def compress(
    model: nn.Module,
    train_loader: Loader,
    *,
    val_loader: Loader | None = None,
    recipe: str | Recipe = "vd+sws",
    settings: Settings = (),
    seed: int = 0,
    device: str | torch.device = "auto",
    loss: str | Loss = F.cross_entropy,
    metric: Any = None,
    example_inputs: Any = None,
    pretrain: bool = False,
    watcher: Watcher | None = None,
    max_bytes: int | None = None,
    min_ratio: float | None = None,
    max_accuracy_drop: float | None = None,
    max_loss_increase: float | None = None,
    max_metric_drop: float | None = None,
    rates: Sequence[float] = (),
    checkpoints: str | os.PathLike[str] | Checkpointing | None = None,
    resume: bool = False,
    mixed_precision: str | None = None,
    augment: str | Augmentation | Transform | None = None,
    teacher: nn.Module | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strengths: Mapping[str, float] | None = None,
) -> Result:
    """Retrain `model` to be small, quantize it, drop what is dead, and code it. `model` itself is not changed.

    Args:
        model: a trained network. What is frozen stays as it is; what else has no variational form is trained along
            and, if it is a matrix, clustered as `pack` does. Weights that are computed from others (weight norm,
            pruning masks) are taken as what they come to.
        train_loader: gives (inputs, targets), each a tensor or several, or a dict with the targets as `labels`;
            iterated once an epoch.
        val_loader: for loss, accuracy and metric in progress and report; never trained on.
        recipe: a name, a path to a JSON file, or a `Recipe`.
        settings: what to change in it: `{"all.tau1": 2, "coding.keep_indices": True}`, or `["all.tau1=2"]`.
        seed: of the noise and of anything else drawn here; a loader's shuffling is its own.
        device: `auto` takes a GPU if there is one.
        loss: mean over a batch, from outputs and targets; or by name: cross-entropy, mse, mae, bce. What is not a
            negative log-likelihood, such as a squared distance, is scaled by the noise that the network leaves.
        metric: a further figure, from outputs and targets of a batch; higher is better, unless it says
            `higher_is_better=False`, as torchmetrics' do, or is a `Metric` that does.
        example_inputs: the network's inputs, to trace it with, or a batch that holds them; by default the first one.
        pretrain: first run the recipe's pretraining, for a network that comes without weights.
        watcher: told of batches and epochs; by default a progress display on standard error.
        max_bytes, min_ratio, max_accuracy_drop, max_loss_increase, max_metric_drop: a target instead of a knob, at
            most one of them; τ₁ is then found during the training. The file has at most so many bytes, and not many
            fewer; or is so many times smaller; or its network loses at most so many percentage points of accuracy on
            the validation data, or its loss there grows by at most this share, or its metric worsens by at most so
            much. Where a training was too strong, another follows that is less so.
        rates: further endings of the same training, a file for each: what a bit weighs when weights take their shared
            values (`quantization.rate`). The more, the smaller the file, and the less accurate. They are the result's
            `others`, in this order.
        checkpoints: a folder in which to save the run, each 5 minutes and between phases, or `Checkpointing`. SIGTERM
            then ends the run when its state is saved.
        resume: go on from the newest of `checkpoints`, if there is one. On a CPU the file is then, bit for bit, that of
            a run that was never interrupted.
        mixed_precision: `bf16` computes the network in it, `no` does not; by default as `accelerate launch` says.
        augment: changes training images at random, on the device, each time they are seen: `shift=2,flip,cutout=8`,
            an `Augmentation`, or a callable on a batch of inputs. The teacher of a distillation sees the same images.
        teacher: whose outputs are distilled, where it is not `model` as it came: a larger or better network with the
            same inputs and outputs. It is no part of the file.
        include, exclude: patterns on the names of parameters and modules (`encoder.*`, `*.bias`, `fc1`): only what the
            former name is pruned and shared, and nothing that the latter do.
        strengths: how strongly what a pattern names is pruned: factors on τ₁, `{"head.*": 0.5}`.

    In processes launched together, by `accelerate launch` or `torchrun`, call it in all of them: each trains on its
    share of every batch, and all return the same result; the first alone watches, measures and writes checkpoints.

    Raises:
        ModelError, DataError, RecipeError, TrainingError: with what is wrong and what to do.
        CheckpointError: `checkpoints` holds another run, or this one under other conditions; says which.
        TargetError: the target is out of reach; says so before the training where that is certain.
    """
    target = Target.of(
        max_bytes=max_bytes,
        min_ratio=min_ratio,
        max_accuracy_drop=max_accuracy_drop,
        max_loss_increase=max_loss_increase,
        max_metric_drop=max_metric_drop,
    )
    seed = _checked_seed(seed)
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
        seed=seed,
    )
    phases = (*begun.settings.sequence(pretrain), *(each.closing for each in begun.further))
    conditions = partial(_conditions, begun, seed, pretrain)
    with (
        _seeded(seed, begun.network),
        _watching(
            watcher if begun.engine.is_main else Watcher(), phases, is_open_ended(begun.settings, target)
        ) as watching,
        _keeping(checkpoints, resume, conditions, _History(watching, begun.settings, begun.engine)) as keeper,
    ):
        result = _trained(begun, seed, pretrain, keeper)
    for finding in result.warnings if begun.engine.is_main else ():
        watching.on_finding(finding)
    return held_to(target, result)


def _trained(begun: Opening, seed: int, pretrain: bool, keeper: Keeper["_History"]) -> Result:
    """The result, and how it came about; whatever it comes to."""
    plan, network, data, engine = begun.settings, begun.network, begun.data, begun.engine
    training = _Training(data, keeper, engine)
    if pretrain:
        _check_ahead(begun)
        training.fit(network, plan.pretraining, teacher=data.teacher)
    in_nats, before = training.in_nats(network), training.judged(network)
    path = _Path(network, begun.examples, plan, in_nats, begun.target, before, begun.further)
    result, conversion, strength = path.go()
    keeper.finish()
    history = Fit(
        recipe=plan,
        seed=seed,
        conversion=conversion,
        before=before,
        seconds=keeper.seconds,
        device=engine.describe(device_name(begun.device)),
        history=tuple(keeper.watcher.history),
        target=str(begun.target) if begun.target else None,
        strength=strength,
        augment=None if data.augment is None else name_of(data.augment),
        teacher=in_words(data.teacher),
        judge=data.judge,
        reach=_reach(plan.phases, keeper.watcher.history),
    )
    others = (_told_of(other, history, settings) for other, settings in zip(result.others, begun.further, strict=True))
    return dataclasses.replace(_told_of(result, history, plan), others=tuple(others))


def _check_ahead(begun: Opening) -> None:
    """Refuse before the pretraining what would be refused after it: of a selection, of the coder, of a budget.

    Raises:
        ModelError, RecipeError, TargetError: as they would be then.
    """
    devices = [begun.device] if begun.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        network, original = (graph.copied(begun.network) for _ in range(2))
        converted(network, begun.settings, begun.examples)
        ending = Ending(network, begun.examples, begun.settings, None, lambda _: Figures())
        smallest_size(network, original.eval(), ending, begun.target)


def _reach(phases: Sequence[Phase], history: Sequence[EpochStats]) -> float | None:
    """How far weights and variances got, by the steps that epochs turned out to have."""
    steps = {stats.phase: stats.steps or 0 for stats in history}
    return reach_of([(phase, phase.epochs * steps.get(phase.name, 0)) for phase in phases])


def _told_of(result: Result, fit: Fit, settings: Recipe) -> Result:
    """With how it came about, by `settings`, and what is wrong with it; of closing phases, its own alone."""
    names = {phase.name for phase in settings.sequence(pretrain=True)}
    own = tuple(stats for stats in fit.history if stats.phase in names)
    result = dataclasses.replace(result, fit=dataclasses.replace(fit, recipe=settings, history=own))
    return dataclasses.replace(result, warnings=findings(result))


def is_open_ended(settings: Recipe, target: Target | None) -> bool:
    """Whether phases may run again, as often as it takes to keep a figure."""
    return settings.quantization.rate_trials > 0 or (target is not None and target.budget(1) is None)


def converted(network: nn.Module, settings: Recipe, examples: tuple[Tensor, ...]) -> Conversion:
    """Make the weights of `network` Gaussian as the recipe says."""
    if settings.start_size:
        graph.begin_even(network, examples, settings.start_size)
    return to_variational(
        network,
        log_sigma2=settings.start_log_sigma2,
        biases=settings.biases,
        selection=settings.layers,
        called=called_layers(network, examples),
    )


class _History(Watcher):
    """Passes everything on, adds the bytes a file would take now, and keeps the history."""

    def __init__(self, inner: Watcher, settings: Recipe, engine: Engine) -> None:
        self.inner, self.settings, self.engine = inner, settings, engine
        self.history: list[EpochStats] = []
        #: What a file takes beside the weights; known when these are Gaussian.
        self.beside: BesideWeights | None = None
        self._trained = self._measured = 0.0

    def on_phase(self, course: Course) -> None:
        self.inner.on_phase(course)

    def on_batch(self, phase: Phase, done: float) -> None:
        self.inner.on_batch(phase, done)

    def on_warning(self, message: str) -> None:
        self.inner.on_warning(message)

    def on_finding(self, message: str) -> None:
        self.inner.on_finding(message)

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        self._trained += stats.seconds
        size = self.engine.from_main(lambda: self._measure(stats, course))
        stats = dataclasses.replace(stats, bytes=int(size) or None)
        self.history.append(stats)
        self.inner.on_epoch(stats, course)

    def trained(self, number: int) -> Figures:
        """What the network came to at the end of a training after so many others; nothing where it has no phase.

        A history that was taken up may tell of later ones already.
        """
        last = next((phase for phase in reversed(self.settings.phases) if phase.epochs), None)
        ends = [stats for stats in self.history if last and (stats.phase, stats.epoch) == (last.name, last.epochs)]
        found = ends[number] if number < len(ends) else None
        return Figures() if found is None else Figures(found.accuracy, found.loss, found.metric)

    def _measure(self, stats: EpochStats, course: Course) -> int:
        """What a file would take now; 0 if it is not measured, since that would take too large a share of the time."""
        last = stats.epoch == stats.epochs
        if not stats.zeros or not (last or self._measured <= MEASURING_SHARE * self._trained):
            return 0
        began = time.perf_counter()
        size = bytes_now(course, self.settings) + (self.beside.now(course.network) if self.beside else 0)
        self._measured += time.perf_counter() - began
        return size

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": [dataclasses.asdict(stats) for stats in self.history],
            "trained": self._trained,
            "measured": self._measured,
            "inner": self.inner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = [EpochStats(**stats) for stats in state["history"]]
        self._trained, self._measured = state["trained"], state["measured"]
        self.inner.load_state_dict(state["inner"])


@dataclass(frozen=True)
class _Training:
    """What every phase is fitted with."""

    data: Data
    keeper: Keeper[_History]
    engine: Engine

    def fit(
        self,
        network: nn.Module,
        phases: Sequence[Phase],
        terms: Sequence[Term] | None = None,
        teacher: nn.Module | None = None,
        steering: Steering | None = None,
    ) -> None:
        self.keeper.carry(
            Fitting(
                network,
                self.data.batches,
                phases,
                n_data=self.data.n_data,
                terms=terms,
                teacher=teacher,
                loss=self.data.likelihood,
                validation=self.data.validation,
                metric=self.data.judge.metric,
                watcher=self.keeper.watcher,
                steering=steering,
                engine=self.engine,
                augment=self.data.augment,
            )
        )

    def close(
        self,
        network: nn.Module,
        quantized: Mapping[str, QuantizedTensor],
        shared: SharedValues,
        *,
        closing: Phase,
        teacher: nn.Module,
    ) -> None:
        """Train the shared values of `network`."""
        symbols = {name: torch.from_numpy(tensor.symbols.astype(np.int32)) for name, tensor in quantized.items()}
        self.engine.check_alike(symbols, "quantization")
        self.fit(shared, (closing,), teacher=teacher)
        self.engine.level_buffers(network)

    def renew(self, network: nn.Module) -> None:
        """Take the statistics of batch norms anew."""
        renew_statistics(network, self.data.batches, self.data.augment)
        self.engine.level_buffers(network)

    def judged(self, network: nn.Module, *, cast: bool = False) -> Figures:
        """On the validation data, if there is any."""
        data, validation = self.data, self.data.validation
        return (
            Figures() if validation is None else told(self.engine, lambda: data.judge(network, validation, cast=cast))
        )

    def in_nats(self, network: nn.Module) -> "_Training":
        """The same with a loss that weighs as a likelihood does, by the noise that `network` leaves."""
        data = self.data
        loader = data.batches if data.validation is None else data.validation
        found = data.likelihood.estimated(network, loader) if self.engine.is_main else data.likelihood
        told_of = [self.engine.from_main(partial(_number, value)) for value in (found.weight, found.closeness)]
        weight, closeness = (None if math.isnan(value) else value for value in told_of)
        likelihood = dataclasses.replace(data.likelihood, weight=weight, closeness=closeness)
        judge = dataclasses.replace(data.judge, likelihood=likelihood)
        return dataclasses.replace(self, data=dataclasses.replace(data, judge=judge))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass(frozen=True)
class _Path:
    """From a pretrained network to a file, more than once if a target needs it.

    Args:
        network: as it came, or as pretraining left it.
        before: what it comes to.
        further: by which the training is ended once more each.
    """

    network: nn.Module
    examples: tuple[Tensor, ...]
    settings: Recipe
    training: _Training
    target: Target | None
    before: Figures
    further: tuple[Recipe, ...] = ()

    def go(self) -> tuple[Result, Conversion, float]:
        """The result, what of the network was made Gaussian, and the strength that it was trained with.

        Where a figure is to be kept and a training loses too much, the next starts again from the network as it came,
        under a weaker prior; if none keeps it, that network itself is coded, by as many shared values as it takes.
        """
        quality = self.target.quality(self.before, self.training.data.judge.metric) if self.target else None
        result, conversion, strength = self._attempt(0, quality, None)
        last = strength
        # Without a strength the next training would be under the same prior.
        for number in range(1, ATTEMPTS if steered_phase(self.settings.phases) else 1):
            if quality is None or quality.is_kept(result.figures):
                break
            # Weaker than in the last training, also where an earlier one came closer: else the two would be alike.
            other, conversion, last = self._attempt(number, quality, last * WEAKER)
            kept, result = result, better(other, result, quality)
            strength = strength if result is kept else last
        if quality is not None and not quality.is_kept(result.figures):
            network, _ = self._gaussian(quality)
            posterior = Posterior.of(network)
            to_stock(network)
            untrained = self._ending(network).untrained(posterior, quality)
            kept, result = result, better(untrained, result, quality)
            strength = strength if result is kept else 0.0
        if self.target is None or quality is not None:
            smallest = self._ending(self.network).or_packed(result, self.original, quality)
            result = dataclasses.replace(smallest, others=result.others)
            strength = strength if result.moved is None else 0.0
        return result, conversion, strength

    def _attempt(self, number: int, quality: Quality | None, ceiling: float | None) -> tuple[Result, Conversion, float]:
        """One training from the start, with a strength of at most `ceiling`, and its ending.

        Args:
            number: how many were before it.
        """
        training, settings, original = self.training, self.settings, self.original
        network, conversion = self._gaussian(quality)
        ending = self._ending(network)
        terms = start_terms(network, settings.phases, ending.starts(original))
        training.keeper.watcher.beside = ending.beside_weights(network, original)
        steering = steering_towards(self.target, network, original, ending, quality, ceiling)
        training.fit(network, settings.phases, terms, self.teacher, steering)
        posterior = Posterior.of(network, terms)
        to_stock(network)
        result = ending.towards(self.target, posterior, quality, self.before)
        others = [self._ending(network, each).as_set(posterior, each.quantization) for each in self.further]
        trained = training.keeper.watcher.trained(number)
        told = [dataclasses.replace(each, trained=trained) for each in (result, *others)]
        return dataclasses.replace(told[0], others=tuple(told[1:])), conversion, steering.strength()

    @cached_property
    def original(self) -> nn.Module:
        """The network as it came, to compare with."""
        return graph.copied(self.network).eval().requires_grad_(False)

    @property
    def teacher(self) -> nn.Module:
        """Whom it learns from."""
        given = self.training.data.teacher
        return self.original if given is None else given

    def _gaussian(self, quality: Quality | None) -> tuple[nn.Module, Conversion]:
        """The network with Gaussian weights; a copy, if it may be needed again."""
        network = self.network if quality is None else graph.copied(self.network)
        return network, converted(network, self.settings, self.examples)

    def _ending(self, network: nn.Module, settings: Recipe | None = None) -> Ending:
        settings = settings or self.settings
        close = partial(self.training.close, closing=settings.closing, teacher=self.teacher)
        judge = partial(self.training.judged, cast=True)
        data = self.training.data.batches
        warn, alone = self.training.keeper.watcher.on_warning, self.training.engine.processes == 1
        see = partial(curvatures_if_any, loader=data, warn=warn)
        # Processes on unlike machines might choose otherwise.
        watch = partial(moments_if_any, loader=data, warn=warn) if alone else None
        return Ending(network, self.examples, settings, close, judge, self.training.renew, see=see, watch=watch)


def _keeping(
    checkpoints: str | os.PathLike[str] | Checkpointing | None,
    resume: bool,
    conditions: Callable[[], dict[str, Any]],
    history: _History,
) -> Keeper[_History]:
    if checkpoints is None:
        if resume:
            raise RecipeError("there is nothing to resume from; say where the checkpoints are")
        return Keeper(None, {}, history)
    settings = checkpoints if isinstance(checkpoints, Checkpointing) else Checkpointing(checkpoints)
    engine = history.engine
    keeper = Keeper(settings, conditions(), history, resume=resume, writes=engine.is_main)
    engine.check_alike(
        {"what was found": keeper.taken_up}, f"all processes must see the checkpoints in {settings.folder}"
    )
    return keeper


def _conditions(begun: Opening, seed: int, pretrain: bool) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    settings, network, data, engine = begun.settings, begun.network, begun.data, begun.engine
    return {
        # Phases by name, so that a difference says which.
        "recipe": {**to_dict(settings), "phases": {phase.name: to_dict(phase) for phase in settings.phases}},
        "seed": seed,
        "pretrain": pretrain,
        "target": str(begun.target),
        "rates": [each.quantization.rate for each in begun.further] or None,
        "processes": engine.processes,
        "mixed_precision": None if engine.mixed_precision == "no" else engine.mixed_precision,
        **machine_conditions(next((parameter.device for parameter in network.parameters()), torch.device("cpu"))),
        "network": network_conditions(network),
        "data": data_conditions(data.batches, data.n_data, data.likelihood.function),
        "validation": None if data.validation is None else count_batches(data.validation) or "unknown",
        "metric": None if data.judge.metric is None else data.judge.metric.name,
        "augmentation": None if data.augment is None else name_of(data.augment),
        "teacher": None if data.teacher is None else network_conditions(data.teacher),
    }


def _checked_seed(seed: Any) -> int:
    """As a plain number; torch takes those of 64 bits.

    Raises:
        RecipeError: it is none.
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not -(2**63) <= int(seed) < 2**64:
        raise RecipeError(f"seed must be a whole number of at most 64 bits, not {seed!r}")
    return int(seed)


@contextlib.contextmanager
def _seeded(seed: int, network: nn.Module) -> Iterator[None]:
    """Random numbers from `seed` inside; outside they go on as if nothing had happened."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _watching(watcher: Watcher | None, phases: Sequence[Phase], open_ended: bool) -> Iterator[Watcher]:
    """The caller's watcher, or a display that ends with the training."""
    if watcher is not None and not isinstance(watcher, Watcher):
        raise RecipeError(
            f"watcher must be an instance of bayeszip.Watcher or of a class derived from it, not {watcher!r}"
        )
    if watcher is not None:
        yield watcher
        return
    with TrainingProgress(phases, open_ended=open_ended) as display:
        yield display
