"""`compress()`: the path from a trained network to a small file, top to bottom."""

import contextlib
import copy
import dataclasses
import inspect
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
from bayeszip.devices import device_name, resolve_device
from bayeszip.ending import (
    BesideWeights,
    Ending,
    at_rates,
    bytes_now,
    check_curvature,
    check_trials,
    held_to,
    steering_towards,
)
from bayeszip.errors import DataError, RecipeError
from bayeszip.fitting import (
    Course,
    EpochStats,
    Figures,
    Fitting,
    Judge,
    Likelihood,
    Metric,
    Phase,
    Steering,
    Watcher,
    count_examples,
    start_terms,
)
from bayeszip.fitting.augmentation import Augmentation, Transform, known_augment, name_of
from bayeszip.fitting.batches import (
    Inputs,
    Loader,
    checked_batch,
    checked_loader,
    count_batches,
    examples_from,
    given_by,
    in_order,
    mapped,
    running,
)
from bayeszip.fitting.conditions import data_conditions, machine_conditions, network_conditions
from bayeszip.fitting.engine import Engine, told
from bayeszip.fitting.keeper import Checkpointing, Keeper
from bayeszip.fitting.launch import make_engine
from bayeszip.fitting.likelihood import Loss
from bayeszip.fitting.outputs import names_in, predictions
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.fitting.statistics import renew_statistics
from bayeszip.fitting.teacher import in_words, known_teacher
from bayeszip.graph.storable import check_storable, unwrapped
from bayeszip.modes import evaluating
from bayeszip.posterior import Posterior
from bayeszip.progress import TrainingProgress
from bayeszip.recipe import Recipe, Settings
from bayeszip.recipe import recipe as named_recipe
from bayeszip.result import Fit, Result
from bayeszip.settings import to_dict
from bayeszip.snapping import seen_curvatures, seen_if_any
from bayeszip.targets import Quality, Target, better, steered_phase
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import Conversion, Term, check_materialized, to_stock, to_variational
from bayeszip.variational.usage import called_layers

__all__ = [
    "ATTEMPTS",
    "check_loaders",
    "check_options",
    "compress",
    "converted",
    "judged_examples",
    "needing_validation",
    "plain_network",
]

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
    seed, augment = _checked_seed(seed), known_augment(augment)
    plan = named_recipe(recipe).having(settings).scaled().selecting(include, exclude, strengths)
    further, hardware, chosen = at_rates(plan, rates, target), resolve_device(device), Metric.of(metric)
    check_options(plan, target=target, metric=chosen, validated=val_loader is not None, rates=rates, pretrain=pretrain)
    check_loaders(train_loader, val_loader)
    engine = make_engine(hardware, mixed_precision=mixed_precision, accumulate=plan.accumulate, seed=seed)
    network = plain_network(model).to(hardware)
    first = first_inputs(train_loader) if example_inputs is None or teacher is not None else None
    examples, judge = judged_examples(network, first, example_inputs, Judge(Likelihood.of(loss), chosen))
    tutor = known_teacher(teacher, network, (*plan.phases, plan.closing), first)
    data = _Data(train_loader, count_examples(train_loader), judge, val_loader, augment, tutor)
    conditions = partial(_conditions, network, data, plan, seed, pretrain, target, further, engine)
    phases = (*plan.sequence(pretrain), *(each.closing for each in further))
    with (
        _seeded(seed, network),
        _watching(watcher if engine.is_main else Watcher(), phases) as watching,
        _keeping(checkpoints, resume, conditions, _History(watching, plan, engine)) as keeper,
    ):
        training = _Training(data, keeper, engine)
        if pretrain:
            training.fit(network, plan.pretraining)
        path = _Path(network, examples, plan, training.in_nats(network), target, training.judged(network), further)
        result, conversion, strength = path.go()
        keeper.finish()
    history = Fit(
        recipe=plan,
        seed=seed,
        conversion=conversion,
        before=path.before,
        seconds=keeper.seconds,
        device=engine.describe(device_name(hardware)),
        history=tuple(keeper.watcher.history),
        target=str(target) if target else None,
        strength=strength,
        augment=None if augment is None else name_of(augment),
        teacher=in_words(tutor),
        judge=judge,
        reach=reach_of([(phase, phase.epochs * count_batches(train_loader)) for phase in plan.phases]),
    )
    others = (_told_of(other, history, settings) for other, settings in zip(result.others, further, strict=True))
    result = dataclasses.replace(_told_of(result, history, plan), others=tuple(others))
    for finding in result.warnings if engine.is_main else ():
        watching.on_finding(finding)
    return held_to(target, result)


def _told_of(result: Result, fit: Fit, settings: Recipe) -> Result:
    """With how it came about, by `settings`, and what is wrong with it; of closing phases, its own alone."""
    names = {phase.name for phase in settings.sequence(pretrain=True)}
    own = tuple(stats for stats in fit.history if stats.phase in names)
    result = dataclasses.replace(result, fit=dataclasses.replace(fit, recipe=settings, history=own))
    return dataclasses.replace(result, warnings=findings(result))


def check_options(
    settings: Recipe,
    *,
    target: Target | None,
    metric: Metric | None,
    validated: bool,
    rates: Sequence[float],
    pretrain: bool,
) -> None:
    """Refuse what contradicts itself, before anything is trained or loaded.

    Args:
        validated: whether there are validation data.

    Raises:
        RecipeError, DataError: names what is at odds, and what to do.
    """
    if settings.quantization.rate_trials:
        check_trials(validated or None, target)
    if settings.quantization.curvature:
        check_curvature(True, target, (settings.quantization.rate, *rates))
    if target is not None and target.max_metric_drop is not None and metric is None:
        raise RecipeError("max_metric_drop is about a metric; give metric=")
    if (name := needing_validation(settings, target, metric)) and not validated:
        kind = RecipeError if name == "metric" else DataError
        raise kind(f"{name}{'=' * (name == 'metric')} is measured on validation data; give val_loader")
    if pretrain and not any(phase.epochs for phase in settings.pretraining):
        raise RecipeError(f"pretrain=True, but {settings.name} has no pretraining; add a phase of it, or leave it out")


def needing_validation(settings: Recipe, target: Target | None, metric: Metric | None) -> str | None:
    """The first option or setting that only validation data can serve; None: there is none."""
    if target is not None and target.budget(1) is None:
        return next(name for name, value in vars(target).items() if value is not None)
    if metric is not None:
        return "metric"
    return "quantization.rate_trials" if settings.quantization.rate_trials else None


def check_loaders(train_loader: Loader, val_loader: Loader | None) -> None:
    """Refuse what gives no batches."""
    checked_loader(train_loader, "train_loader")
    if val_loader is not None:
        checked_loader(val_loader, "val_loader")


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


def plain_network(model: nn.Module) -> nn.Module:
    """A copy that can be trained and stored: without wrappers, its weights as what they come to."""
    model = unwrapped(model)
    check_materialized(model)
    check_storable(model)
    return graph.plain_copy(model)


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
class _Data:
    """What a network is trained on, judged by, and taught by."""

    batches: Loader
    n_data: int
    judge: Judge
    validation: Loader | None
    augment: Augmentation | Transform | None
    #: None: the network as it came.
    teacher: nn.Module | None

    @property
    def likelihood(self) -> Likelihood:
        if self.judge.likelihood is None:  # never: there is always a loss
            raise TypeError(self.judge)
        return self.judge.likelihood


@dataclass(frozen=True)
class _Training:
    """What every phase is fitted with."""

    data: _Data
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
        result, conversion, strength = self._attempt(quality, None)
        # Without a strength the next training would be under the same prior.
        for _ in range(ATTEMPTS - 1 if steered_phase(self.settings.phases) else 0):
            if quality is None or quality.is_kept(result.figures):
                break
            other, conversion, weaker = self._attempt(quality, strength * WEAKER)
            kept, result = result, better(other, result, quality)
            strength = strength if result is kept else weaker
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
        return result, conversion, strength

    def _attempt(self, quality: Quality | None, ceiling: float | None) -> tuple[Result, Conversion, float]:
        """One training from the start, with a strength of at most `ceiling`, and its ending."""
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
        return dataclasses.replace(result, others=tuple(others)), conversion, steering.strength()

    @cached_property
    def original(self) -> nn.Module:
        """The network as it came, to compare with."""
        return copy.deepcopy(self.network).eval().requires_grad_(False)

    @property
    def teacher(self) -> nn.Module:
        """Whom it learns from."""
        given = self.training.data.teacher
        return self.original if given is None else given

    def _gaussian(self, quality: Quality | None) -> tuple[nn.Module, Conversion]:
        """The network with Gaussian weights; a copy, if it may be needed again."""
        network = self.network if quality is None else copy.deepcopy(self.network)
        return network, converted(network, self.settings, self.examples)

    def _ending(self, network: nn.Module, settings: Recipe | None = None) -> Ending:
        settings = settings or self.settings
        close = partial(self.training.close, closing=settings.closing, teacher=self.teacher)
        judge = partial(self.training.judged, cast=True)
        data = self.training.data.batches
        see = partial(seen_curvatures, loader=data)
        # Processes on unlike machines might choose otherwise.
        warn, alone = self.training.keeper.watcher.on_warning, self.training.engine.processes == 1
        watch = partial(seen_if_any, loader=data, warn=warn) if alone else None
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


def _conditions(
    network: nn.Module,
    data: _Data,
    settings: Recipe,
    seed: int,
    pretrain: bool,
    target: Target | None,
    further: Sequence[Recipe],
    engine: Engine,
) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    return {
        # Phases by name, so that a difference says which.
        "recipe": {**to_dict(settings), "phases": {phase.name: to_dict(phase) for phase in settings.phases}},
        "seed": seed,
        "pretrain": pretrain,
        "target": str(target),
        "rates": [each.quantization.rate for each in further] or None,
        "processes": engine.processes,
        "mixed_precision": None if engine.mixed_precision == "no" else engine.mixed_precision,
        **machine_conditions(next((parameter.device for parameter in network.parameters()), torch.device("cpu"))),
        "network": network_conditions(network),
        "data": data_conditions(data.batches, data.n_data, data.likelihood.function),
        "validation": None if data.validation is None else count_batches(data.validation),
        "metric": None if data.judge.metric is None else data.judge.metric.name,
        "augmentation": None if data.augment is None else name_of(data.augment),
        "teacher": None if data.teacher is None else network_conditions(data.teacher),
    }


def first_inputs(loader: Loader) -> Inputs:
    """Those of the first batch, in its form; two examples, on the CPU.

    Raises:
        DataError: there is no batch, or it is none.
    """
    first = next(given_by(loader), None)
    if first is None:
        raise DataError("the training data gave no batch; check the loader")
    return mapped(checked_batch(first).inputs, lambda tensor: tensor[:2].cpu())


@torch.no_grad()
def judged_examples(
    network: nn.Module, first: Inputs | None, given: Any, judge: Judge
) -> tuple[tuple[Tensor, ...], Judge]:
    """Inputs to trace the network with, in order, and the judge that knows names a graph does not know.

    Args:
        first: inputs as batches have them, where a caller has given none.
    """
    examples = in_order(network, first) if given is None and first is not None else examples_from(network, given)
    device = next(network.parameters()).device
    with evaluating(network), running("the first batch"):
        outputs = network(*(tensor.to(device) for tensor in examples))
    _check_one_output(outputs, judge)
    arguments = tuple(inspect.signature(network.forward).parameters)[: len(examples)]
    return examples, dataclasses.replace(judge, names=names_in(outputs), arguments=arguments)


def _checked_seed(seed: Any) -> int:
    """As a plain number; torch takes those of 64 bits.

    Raises:
        RecipeError: it is none.
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not -(2**63) <= int(seed) < 2**64:
        raise RecipeError(f"seed must be a whole number of at most 64 bits, not {seed!r}")
    return int(seed)


def _check_one_output(outputs: Any, judge: Judge) -> None:
    """Refuse a cross-entropy over one class: it is 0 whatever the network says, so nothing would hold its weights."""
    function = None if judge.likelihood is None else judge.likelihood.function
    found = predictions(outputs)
    is_entropy = function is F.cross_entropy or isinstance(function, nn.CrossEntropyLoss)
    if is_entropy and found is not None and found.dim() == 2 and found.shape[1] == 1:
        raise RecipeError(
            "the network has one output for each example, and a cross-entropy over one class is always 0; say what it "
            "is trained on, with loss= (--loss): mse for a number, bce for one of two classes, or a function"
        )


@contextlib.contextmanager
def _seeded(seed: int, network: nn.Module) -> Iterator[None]:
    """Random numbers from `seed` inside; outside they go on as if nothing had happened."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _watching(watcher: Watcher | None, phases: Sequence[Phase]) -> Iterator[Watcher]:
    """The caller's watcher, or a display that ends with the training."""
    if watcher is not None and not isinstance(watcher, Watcher):
        raise RecipeError(
            f"watcher must be an instance of bayeszip.Watcher or of a class derived from it, not {watcher!r}"
        )
    if watcher is not None:
        yield watcher
        return
    with TrainingProgress(phases) as display:
        yield display
