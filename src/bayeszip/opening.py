"""The opening: from what a caller asks to what a compression begins with, checked before anything is trained.

`compress` goes on from here, and `preview` looks at it.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip import graph
from bayeszip.devices import resolve_device
from bayeszip.ending import at_rates, check_curvature, check_trials
from bayeszip.errors import DataError, RecipeError
from bayeszip.fitting import Judge, Likelihood, Metric, count_examples
from bayeszip.fitting.augmentation import Augmentation, Transform, known_augment
from bayeszip.fitting.batches import (
    Inputs,
    Loader,
    checked_batch,
    checked_loader,
    examples_from,
    given_by,
    in_order,
    mapped,
    named_arguments,
    running,
)
from bayeszip.fitting.engine import Engine
from bayeszip.fitting.launch import make_engine
from bayeszip.fitting.likelihood import Loss
from bayeszip.fitting.outputs import names_in, predictions
from bayeszip.fitting.statistics import undisturbed
from bayeszip.fitting.teacher import check_imitated, known_teacher
from bayeszip.graph.storable import check_storable, unwrapped
from bayeszip.modes import evaluating
from bayeszip.recipe import Recipe, Settings
from bayeszip.recipe import recipe as named_recipe
from bayeszip.targets import Target
from bayeszip.variational import check_materialized

__all__ = ["Data", "Opening", "check_options", "needing_validation", "opened"]


@dataclass(frozen=True)
class Data:
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
class Opening:
    """What a compression begins with.

    Args:
        further: the recipe at each of the rates, for further endings.
        network: a plain copy, on the device.
        examples: its inputs, to trace it with.
    """

    settings: Recipe
    target: Target | None
    further: tuple[Recipe, ...]
    device: torch.device
    engine: Engine
    network: nn.Module
    examples: tuple[Tensor, ...]
    data: Data


def opened(
    model: nn.Module,
    train_loader: Loader,
    *,
    val_loader: Loader | None,
    recipe: str | Recipe,
    settings: Settings,
    target: Target | None,
    device: str | torch.device,
    loss: str | Loss | Likelihood,
    metric: Any,
    example_inputs: Any,
    pretrain: bool,
    rates: Sequence[float],
    mixed_precision: str | None,
    augment: str | Augmentation | Transform | None,
    teacher: nn.Module | None,
    selection: tuple[Sequence[str] | None, Sequence[str] | None, Mapping[str, float] | None],
    seed: int = 0,
    alone: bool = False,
) -> Opening:
    """Take the arguments of `compress`; what is asked has no default here, so that nobody can forget it.

    Args:
        selection: what to include, what to exclude, and how strongly each is pruned.
        seed: of the order in which several processes go through the data.
        alone: leave other processes out of it.

    Raises:
        ModelError, DataError, RecipeError, TrainingError: with what is wrong and what to do.
    """
    changes = known_augment(augment)
    plan = named_recipe(recipe).having(settings).scaled().selecting(*selection)
    further, hardware, chosen = at_rates(plan, rates, target), resolve_device(device), Metric.of(metric)
    check_options(plan, target=target, metric=chosen, validated=val_loader is not None, rates=rates, pretrain=pretrain)
    checked_loader(train_loader, "train_loader")
    if val_loader is not None:
        checked_loader(val_loader, "val_loader")
    engine = make_engine(hardware, mixed_precision=mixed_precision, accumulate=plan.accumulate, seed=seed, alone=alone)
    network = _plain_network(model).to(hardware)
    first = _first_inputs(train_loader) if example_inputs is None or teacher is not None else None
    examples, judge = _judged_examples(network, first, example_inputs, Judge(Likelihood.of(loss), chosen))
    if val_loader is not None:
        _check_names(val_loader, judge.arguments, "the training data" if example_inputs is None else "example_inputs")
        if target is not None and target.max_accuracy_drop is not None:
            _check_has_classes(target, judge, network, val_loader)
    phases = (*(plan.pretraining if pretrain else ()), *plan.phases, plan.closing)
    tutor = known_teacher(teacher, network, phases, first)
    if tutor is not None and judge.likelihood is not None:
        check_imitated(tutor, network, judge.likelihood.estimated(network, train_loader), train_loader)
    data = Data(train_loader, count_examples(train_loader), judge, val_loader, changes, tutor)
    return Opening(plan, target, further, hardware, engine, network, examples, data)


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


def _plain_network(model: nn.Module) -> nn.Module:
    """A copy that can be trained and stored: without wrappers, its weights as what they come to."""
    model = unwrapped(model)
    check_materialized(model)
    check_storable(model)
    return graph.plain_copy(model)


def _first_inputs(loader: Loader) -> Inputs:
    """Those of the first batch, in its form; two examples, on the CPU.

    Raises:
        DataError: there is no batch, or it is none.
    """
    with undisturbed(loader) as batches:
        first = next(given_by(batches), None)
    if first is None:
        raise DataError("the training data gave no batch; check the loader")
    return mapped(checked_batch(first).inputs, lambda tensor: tensor[:2].cpu())


def _check_has_classes(target: Target, judge: Judge, network: nn.Module, validation: Loader) -> None:
    """Refuse an accuracy to keep where there is none, by one batch.

    Raises:
        DataError: the targets are no classes.
    """
    with undisturbed(validation) as batches:
        first = list(itertools.islice(given_by(batches), 1))
    if first:
        target.quality(judge(network, first))


@torch.no_grad()
def _judged_examples(
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
    arguments = named_arguments(network)[: len(examples)]
    return examples, dataclasses.replace(judge, names=names_in(outputs), arguments=arguments)


def _check_names(validation: Loader, arguments: Sequence[str], traced: str) -> None:
    """Refuse validation data with other inputs by name than the network is traced with, which a file would not take.

    Args:
        arguments: those that it is traced with; `traced`: whose.

    Raises:
        DataError: names both.
    """
    with undisturbed(validation) as batches:
        first = next(given_by(batches), None)
    inputs = None if first is None else checked_batch(first).inputs
    if isinstance(inputs, dict) and set(inputs) != set(arguments):
        raise DataError(
            f"the validation data give the inputs {', '.join(inputs)}, but {traced} "
            f"{', '.join(arguments) or 'inputs by their places alone'}, and a file takes the inputs that the network "
            "was traced with: give the same in both"
        )


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
