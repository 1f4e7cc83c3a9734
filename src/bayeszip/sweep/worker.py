"""One worker of a sweep: asks the study for trials and compresses under their settings until there are enough."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bayeszip.compressing import compress, is_open_ended
from bayeszip.errors import BayeszipError, DataError, OutputError, TrainingError
from bayeszip.files import create_folder
from bayeszip.fitting import Watcher
from bayeszip.fitting.batches import called_with, checked_batch, mapped, running
from bayeszip.fitting.outputs import class_dim, predictions, shape_in_words
from bayeszip.loaders import Loaders
from bayeszip.modes import evaluating
from bayeszip.progress import TrainingProgress, Watchers
from bayeszip.recipe import Recipe
from bayeszip.record import size_figures, write_record
from bayeszip.result import Result
from bayeszip.sweep.pruning import Milestone, Pruned, PruningWatcher
from bayeszip.sweep.space import Dimension
from bayeszip.sweep.study import ERROR, SharedStudy

if TYPE_CHECKING:
    import optuna

__all__ = ["Outcome", "Plan", "check_classes", "check_success", "work"]

#: If no trial ever succeeds, so many failures are enough to know.
HOPELESS_FAILURES = 3


@dataclass(frozen=True)
class Plan:
    """What every trial of a sweep has in common.

    Args:
        recipe: whose settings are varied.
        dimensions: which, and over what.
        prepare: makes the network and the loaders for a trial's recipe, the same every time.
        pretrain: whether the network must be trained first.
        seed: of every trial.
        device: to train on.
        margin: how clearly a trial must be worse to be pruned; 0: never.
    """

    recipe: Recipe
    dimensions: tuple[Dimension, ...]
    prepare: Callable[[Recipe], tuple[nn.Module, Loaders]]
    pretrain: bool = False
    seed: int = 0
    device: str = "auto"
    margin: float = 0.25

    def facts(self) -> dict[str, Any]:
        """What all workers must agree on, as JSON can hold it."""
        return {
            "recipe": json.loads(self.recipe.to_json()),
            "vary": [str(dimension) for dimension in self.dimensions],
            "seed": self.seed,
            "pretrain": self.pretrain,
        }


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    number: int
    #: complete, pruned or failed
    state: str
    settings: dict[str, str]
    error: float | None = None
    bytes: int | None = None
    why: str | None = None


def work(
    plan: Plan, study: SharedStudy, folder: Path, on_outcome: Callable[[Outcome], None], *, show: bool = True
) -> None:
    """Run trials until the study has enough, each in a folder of its own below `folder`/trials.

    Args:
        on_outcome: told of every trial of this worker.
        show: display the training of each.

    Raises:
        TrainingError: no trial succeeds.
        OutputError: a result can't be written.
    """
    trials = create_folder(folder / "trials")
    while (trial := study.ask()) is not None:
        try:
            outcome = _run(plan, study, trial, trials / f"{trial.number:04d}", show)
        except BaseException:
            # Ctrl-C, a full disk: whoever comes next begins this trial again.
            study.give_back(trial)
            raise
        on_outcome(outcome)
        check_success(study, HOPELESS_FAILURES)


def check_success(study: SharedStudy, failures: int = 1) -> None:
    """Refuse a study that has so many failures, and nothing else.

    Raises:
        TrainingError: says what the last of them said.
    """
    failed = study.finished("FAIL")
    if len(failed) >= failures and not study.finished("COMPLETE", "PRUNED"):
        raise TrainingError(f"no trial succeeds; the last says: {failed[-1].user_attrs[ERROR]}")


@torch.no_grad()
def check_classes(network: nn.Module, loaders: Loaders) -> None:
    """Refuse, before any trial, what has no error to weigh bytes against.

    Raises:
        DataError: there are no validation data, or their targets are no classes of the network's.
    """
    first = None if loaders.validation is None else next(iter(loaders.validation), None)
    if first is None:
        raise DataError("a sweep measures the error on validation data; the loaders give none")
    batch, device = checked_batch(first), next(network.parameters()).device
    inputs, targets = (mapped(part, lambda each: each[:2].to(device)) for part in (batch.inputs, batch.targets))
    with evaluating(network), running("the first batch of validation"):
        outputs = called_with(network, inputs)
    if class_dim(predictions(outputs), targets) is None:
        raise DataError(
            "a sweep weighs bytes against the share of wrong classes, but for two examples outputs are "
            f"{shape_in_words(outputs)} and targets {shape_in_words(targets)}, which are no classes; for other tasks "
            "use compress, with --loss and --rates"
        )


def _run(plan: Plan, study: SharedStudy, trial: "optuna.Trial", folder: Path, show: bool) -> Outcome:
    settings = {dimension.field: dimension.suggest(trial) for dimension in plan.dimensions}
    rivals = [_milestones(other.user_attrs) for other in study.finished("COMPLETE")]

    def sign() -> None:
        # A storage that is out of reach for a while is no reason to end a training; at its end it is.
        with contextlib.suppress(OutputError):
            study.sign(trial)

    pruning = PruningWatcher(rivals, plan.margin, sign)
    try:
        result = _compress(plan, settings, pruning, show)
    except Pruned:
        study.prune(trial, milestones=pruning.milestones)
        last = pruning.milestones[-1]
        return Outcome(trial.number, "pruned", settings, last.error, last.bytes)
    except BayeszipError as failure:
        study.fail(trial, str(failure))
        return Outcome(trial.number, "failed", settings, why=str(failure))
    # Without a figure on test data: the trial takes part in a choice.
    write_record(folder, result, size_figures(result.description, result.beside))
    error = 1 - _accuracy(result)
    study.complete(trial, (error, result.bytes), milestones=pruning.milestones, seconds=_seconds(result))
    return Outcome(trial.number, "complete", settings, error, result.bytes)


def _compress(plan: Plan, settings: dict[str, str], pruning: PruningWatcher, show: bool) -> Result:
    recipe = plan.recipe.override(*(f"{field}={value}" for field, value in settings.items()))
    network, loaders = plan.prepare(recipe)
    with contextlib.ExitStack() as stack:
        watcher: Watcher = pruning
        if show:
            phases = recipe.scaled().sequence(plan.pretrain)
            display = TrainingProgress(phases, open_ended=is_open_ended(recipe, None))
            watcher = Watchers(stack.enter_context(display), pruning)
        return compress(
            network,
            loaders.train,
            val_loader=loaders.validation,
            recipe=recipe,
            seed=plan.seed,
            device=plan.device,
            pretrain=plan.pretrain,
            watcher=watcher,
        )


def _accuracy(result: Result) -> float:
    if result.accuracy is None:
        raise DataError("a sweep measures the error in classes on validation data; there was none to measure")
    return result.accuracy


def _seconds(result: Result) -> float:
    return 0.0 if result.fit is None else round(result.fit.seconds, 1)


def _milestones(attributes: dict[str, Any]) -> list[Milestone]:
    return [Milestone(*milestone) for milestone in attributes.get("milestones", ())]
