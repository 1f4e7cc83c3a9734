"""`compress()`: the path from a trained network to a small file, top to bottom."""

import contextlib
import copy
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip import graph
from bayeszip.devices import device_name, resolve_device
from bayeszip.ending import BesideWeights, Ending, bytes_now, check_trials, held_to, steering_towards
from bayeszip.errors import DataError, RecipeError
from bayeszip.fitting import (
    Course,
    EpochStats,
    Fitting,
    Phase,
    Steering,
    Watcher,
    count_examples,
    evaluate,
    start_terms,
)
from bayeszip.fitting.augmentation import Augmentation, Transform, name_of
from bayeszip.fitting.batches import Loader, checked_batch
from bayeszip.fitting.conditions import data_conditions, machine_conditions, network_conditions
from bayeszip.fitting.course import Loss
from bayeszip.fitting.engine import Engine
from bayeszip.fitting.keeper import Checkpointing, Keeper
from bayeszip.fitting.launch import make_engine
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.fitting.statistics import renew_statistics
from bayeszip.graph.storable import check_storable, unwrapped
from bayeszip.posterior import Posterior
from bayeszip.progress import TrainingProgress
from bayeszip.recipe import Recipe, Settings
from bayeszip.recipe import recipe as named_recipe
from bayeszip.result import Fit, Result
from bayeszip.settings import to_dict
from bayeszip.targets import Target
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import Term, check_materialized, to_stock, to_variational

__all__ = ["compress"]

#: The share of training time that "bytes it would have now" may take.
MEASURING_SHARE = 0.02


def compress(
    model: nn.Module,
    train_loader: Loader,
    *,
    val_loader: Loader | None = None,
    recipe: str | Recipe = "vd+sws",
    settings: Settings = (),
    seed: int = 0,
    device: str | torch.device = "auto",
    loss: Loss = F.cross_entropy,
    example_inputs: Sequence[Tensor] | None = None,
    pretrain: bool = False,
    watcher: Watcher | None = None,
    max_bytes: int | None = None,
    min_ratio: float | None = None,
    max_accuracy_drop: float | None = None,
    checkpoints: str | os.PathLike[str] | Checkpointing | None = None,
    resume: bool = False,
    mixed_precision: str | None = None,
    augment: str | Augmentation | Transform | None = None,
) -> Result:
    """Retrain `model` to be small, quantize it, drop what is dead, and code it. `model` itself is not changed.

    Args:
        model: a trained network. Layers that have no variational form, and frozen ones, stay as they are; weights that
            are computed from others (weight norm, pruning masks) are taken as what they come to.
        train_loader: gives (inputs, targets), each a tensor or several; iterated once an epoch.
        val_loader: for accuracies in progress and report; never trained on.
        recipe: a name, a path to a JSON file, or a `Recipe`.
        settings: what to change in it: `{"all.tau1": 2, "coding.keep_indices": True}`, or `["all.tau1=2"]`.
        seed: of the noise and of anything else drawn here; a loader's shuffling is its own.
        device: `auto` takes a GPU if there is one.
        loss: mean negative log-likelihood of a batch, from outputs and targets.
        example_inputs: the network's inputs, to trace it with; by default those of the first batch.
        pretrain: first run the recipe's pretraining, for a network that comes without weights.
        watcher: told of batches and epochs; by default a progress display on standard error.
        max_bytes, min_ratio, max_accuracy_drop: a target instead of a knob, at most one of them; τ₁ is then found
            during the training. The file has at most so many bytes, and not many fewer; or is so many times smaller;
            or its network loses at most so many percentage points of accuracy on the validation data.
        checkpoints: a folder in which to save the run, each 5 minutes and between phases, or `Checkpointing`. SIGTERM
            then ends the run when its state is saved.
        resume: go on from the newest of `checkpoints`, if there is one. On a CPU the file is then, bit for bit, that of
            a run that was never interrupted.
        mixed_precision: `bf16` computes the network in it, `no` does not; by default as `accelerate launch` says.
        augment: changes training images at random, on the device, each time they are seen: `shift=2,flip,affine=10`,
            an `Augmentation`, or a callable on a batch of inputs. The teacher of a distillation sees the same images.

    In processes launched together, by `accelerate launch` or `torchrun`, call it in all of them: each trains on its
    share of every batch, and all return the same result; the first alone watches, measures and writes checkpoints.

    Raises:
        ModelError, DataError, RecipeError, TrainingError: with what is wrong and what to do.
        CheckpointError: `checkpoints` holds another run, or this one under other conditions; says which.
        TargetError: the target is out of reach; says so before the training where that is certain.
    """
    target = Target.of(max_bytes, min_ratio, max_accuracy_drop)
    if max_accuracy_drop is not None and val_loader is None:
        raise DataError("max_accuracy_drop is measured on validation data; give val_loader")
    plan, hardware = named_recipe(recipe).having(settings).scaled(), resolve_device(device)
    if plan.quantization.rate_trials:
        check_trials(val_loader, target)
    augment = Augmentation.parse(augment) if isinstance(augment, str) else augment
    engine = make_engine(hardware, mixed_precision=mixed_precision, accumulate=plan.accumulate, seed=seed)
    network = _plain_copy(model).to(hardware)
    examples = _examples(train_loader, example_inputs)
    data = _Data(train_loader, count_examples(train_loader), loss, val_loader, augment)
    conditions = partial(_conditions, network, data, plan, seed, pretrain, target, engine)
    with (
        _seeded(seed, network),
        _watching(watcher if engine.is_main else Watcher(), plan, pretrain) as watching,
        _keeping(checkpoints, resume, conditions, _History(watching, plan, engine)) as keeper,
    ):
        training = _Training(data, keeper, engine)
        if pretrain:
            training.fit(network, plan.pretraining)
        accuracy_before = training.accuracy(network)
        teacher = copy.deepcopy(network).eval().requires_grad_(False)
        conversion = to_variational(network, log_sigma2=plan.start_log_sigma2, biases=plan.biases)
        terms = start_terms(network, plan.phases, plan.starts)
        close = partial(training.close, closing=plan.closing, teacher=teacher)
        ending = Ending(network, examples, plan, close, partial(training.accuracy, cast=True), training.renew)
        keeper.watcher.beside = ending.beside_weights(network, teacher)
        steering = steering_towards(target, network, teacher, ending, accuracy_before)
        training.fit(network, plan.phases, terms, teacher, steering)
        posterior = Posterior.of(network, terms)
        to_stock(network)
        result = ending.towards(target, posterior, accuracy_before)
        keeper.finish()
    history = Fit(
        recipe=plan,
        seed=seed,
        conversion=conversion,
        accuracy_before=accuracy_before,
        seconds=keeper.seconds,
        device=engine.describe(device_name(hardware)),
        history=tuple(keeper.watcher.history),
        target=str(target) if target else None,
        strength=steering.strength(),
        augment=None if augment is None else name_of(augment),
    )
    return held_to(target, dataclasses.replace(result, fit=history), accuracy_before)


def _plain_copy(model: nn.Module) -> nn.Module:
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
    """What a network is trained on, and judged by."""

    batches: Loader
    n_data: int
    loss: Loss
    validation: Loader | None
    augment: Augmentation | Transform | None


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
                loss=self.data.loss,
                validation=self.data.validation,
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

    def accuracy(self, network: nn.Module, *, cast: bool = False) -> float | None:
        """On the validation data, if there is any."""
        validation = self.data.validation
        if validation is None:
            return None
        return self.engine.from_main(lambda: evaluate(network, validation, cast=cast))


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
    engine: Engine,
) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    return {
        # Phases by name, so that a difference says which.
        "recipe": {**to_dict(settings), "phases": {phase.name: to_dict(phase) for phase in settings.phases}},
        "seed": seed,
        "pretrain": pretrain,
        "target": str(target),
        "processes": engine.processes,
        **machine_conditions(next((parameter.device for parameter in network.parameters()), torch.device("cpu"))),
        "network": network_conditions(network),
        "data": data_conditions(data.batches, data.n_data, data.loss),
        "augmentation": None if data.augment is None else name_of(data.augment),
    }


def _examples(loader: Loader, given: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    if given is not None:
        return tuple(tensor.cpu() for tensor in given)
    for batch in loader:
        inputs = checked_batch(batch).inputs
        return tuple(tensor[:2].cpu() for tensor in (inputs if isinstance(inputs, tuple) else (inputs,)))
    raise DataError("the training data gave no batch; check the loader")


@contextlib.contextmanager
def _seeded(seed: int, network: nn.Module) -> Iterator[None]:
    """Random numbers from `seed` inside; outside they go on as if nothing had happened."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _watching(watcher: Watcher | None, settings: Recipe, pretrain: bool) -> Iterator[Watcher]:
    """The caller's watcher, or a display that ends with the training."""
    if watcher is not None:
        yield watcher
        return
    phases = [*(settings.pretraining if pretrain else ()), *settings.phases, settings.closing]
    with TrainingProgress(phases) as display:
        yield display
