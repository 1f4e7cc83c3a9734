"""Carries out the runs of an experiment: each by `compress`, several in processes side by side.

A run that has its record is not repeated, and one that was stopped goes on from its checkpoint, so that the same
command takes up what was stopped. Runs that begin alike share their pretrained network: it is trained once, as their
recipe says, and kept below the output folder.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save
from torch import nn

from bayeszip.compressing import compress
from bayeszip.devices import resolve_device
from bayeszip.errors import RecipeError, TrainingError
from bayeszip.experiments.records import Record, add, file_of, missing, record_of
from bayeszip.experiments.runs import Experiment, Run
from bayeszip.files import Lock, create_folder, remove_temporaries, write_atomically
from bayeszip.fitting import Fitting, Watcher, count_examples, evaluate
from bayeszip.fitting.augmentation import Augmentation
from bayeszip.fitting.conditions import machine_conditions
from bayeszip.fitting.keeper import Checkpointing, Keeper
from bayeszip.fitting.launch import make_engine
from bayeszip.loaders import Loaders, load_data, load_test, load_weights
from bayeszip.models import build_seeded
from bayeszip.processes import Outcome, Workers, side_by_side, untouched_device
from bayeszip.record import file_figures, size_figures
from bayeszip.result import Result

__all__ = ["Task", "carry_out", "do", "located"]

GOES_ON = "stopped; runs that are recorded stay, and the same command goes on with the others"


@dataclass(frozen=True)
class Task:
    """A run, or the pretraining that it begins from; where its files go, on what it is trained, and where.

    Args:
        data: what it is trained on, as `--data` names it.
    """

    run: Run
    folder: Path
    device: str
    data: str
    pretraining: bool = False

    @property
    def weights(self) -> Path:
        """The pretrained network: of this model and beginning, trained as the recipe says, in batches of its size."""
        settings, variant = self.run.recipe.scaled(), self.run.variant
        said = [variant.data, str(settings.batch_size), *map(repr, settings.pretraining)]
        said += [repr(how) for how in (variant.augment_before, variant.mixed_precision) if how is not None]
        said += [] if variant.hold_out else ["all examples"]
        digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:8]
        return self.folder.parent / "pretrained" / f"{variant.model}-{self.run.beginning}-{digest}.safetensors"

    @property
    def beginnings(self) -> "list[Task]":
        """The pretrainings that it needs: its own, and its teacher's."""
        begun = [replace(self, pretraining=True)]
        if self.run.teacher is not None:
            begun.append(replace(self, run=self.run.teacher, pretraining=True))
        return begun

    @property
    def unfinished(self) -> Path:
        """Where its checkpoints are while it is trained."""
        name = self.weights.stem if self.pretraining else f"{self.folder.name}-{self.run.name}"
        return self.folder.parent / "unfinished" / name

    @property
    def checkpoints(self) -> Checkpointing:
        return Checkpointing(self.unfinished, every="3m", keep=1)


def do(task: Task) -> list[Record]:
    """What a worker does with a task; returns the run's records, one for each of its endings."""
    device = resolve_device(task.device)
    recipe, variant = task.run.recipe, task.run.variant
    seed = task.run.beginning if task.pretraining else task.run.seed
    loaders = load_data(task.data, batch_size=recipe.batch_size, seed=seed, device=device, hold_out=variant.hold_out)
    if task.pretraining:
        _pretrain(task, loaders, device)
        return []
    network, *teachers = map(_pretrained, task.beginnings)
    result = compress(
        network,
        loaders.train,
        val_loader=loaders.validation,
        recipe=recipe,
        seed=seed,
        device=device,
        watcher=Watcher(),
        max_bytes=variant.max_bytes,
        max_accuracy_drop=variant.max_accuracy_drop,
        rates=task.run.rates,
        checkpoints=task.checkpoints,
        resume=True,
        mixed_precision=variant.mixed_precision,
        augment=variant.augment,
        teacher=teachers[0] if teachers else None,
    )
    endings = dict(zip(task.run.endings, (result, *result.others), strict=True))
    if task.run.sealed:
        return [record_of(task.run, name, each, _sizes(each)) for name, each in endings.items()]
    # On a CPU, as anyone can repeat it.
    test = load_test(task.data, device=torch.device("cpu")).loader
    before, records = evaluate(network.to(device), test), []
    for name, each in endings.items():
        figures = {**file_figures(each.network().cpu(), _sizes(each), test), "accuracy_before": before}
        each.save(file_of(task.folder, name))
        records.append(record_of(task.run, name, each, figures))
    return records


def _pretrained(task: Task) -> nn.Module:
    """The network that a pretraining left."""
    network = build_seeded(task.run.variant.model, task.run.seed)
    load_weights(network, task.weights)
    return network


def _sizes(result: Result) -> dict[str, Any]:
    return size_figures(result.description, result.beside)


def _pretrain(task: Task, loaders: Loaders, device: torch.device) -> None:
    """As `compress` does before it compresses."""
    variant, settings, seed = task.run.variant, task.run.recipe.scaled(), task.run.beginning
    network = build_seeded(variant.model, seed).to(device)
    watcher = Watcher()
    torch.manual_seed(seed)
    fitting = Fitting(
        network,
        loaders.train,
        settings.pretraining,
        n_data=count_examples(loaders.train),
        validation=loaders.validation,
        watcher=watcher,
        engine=make_engine(device, mixed_precision=variant.mixed_precision, accumulate=settings.accumulate, seed=seed),
        augment=None if variant.augment_before is None else Augmentation.parse(variant.augment_before),
    )
    conditions = {"pretraining": task.weights.stem, **machine_conditions(device)}
    with Keeper(task.checkpoints, conditions, watcher, resume=True) as keeper:
        keeper.carry(fitting)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_atomically(task.weights, save(weights))
    _forget(task)


def _forget(task: Task) -> None:
    """What is done needs no checkpoints."""
    shutil.rmtree(task.unfinished, ignore_errors=True)


def located(runs: Sequence[Run], given: Sequence[str]) -> dict[str, str]:
    """Where the data of the runs are: as one of `given` says, such as `cifar10:FOLDER`, or by their name alone.

    Raises:
        RecipeError: no run is trained on what is given.
    """
    wanted = {run.variant.data for run in runs}
    places = {spec.partition(":")[0]: spec for spec in given}
    for name, spec in places.items():
        if name not in wanted:
            raise RecipeError(f"none of these runs is trained on {spec!r}; they need {', '.join(sorted(wanted))}")
    return {name: places.get(name, name) for name in wanted}


def carry_out(
    experiment: Experiment,
    runs: Sequence[Run],
    output: Path,
    *,
    jobs: int = 1,
    device: str = "auto",
    data: Sequence[str] = (),
) -> None:
    """Do those of `runs` that have no record in `output` yet, `jobs` at a time, on data that lie where `data` says.

    Raises:
        RecipeError: a run is recorded there with other settings.
        TrainingError: some runs failed; the others are recorded.
    """
    console = Console(stderr=True, soft_wrap=True)
    places = located(runs, data)
    folder = create_folder(output / experiment.name)
    create_folder(output / "pretrained")
    device = untouched_device(device)
    with ExitStack() as stack:
        stack.callback(Lock(output / ".lock").release)
        remove_temporaries(folder)
        # The longest first, so that the last to end are short.
        left = sorted(missing(folder, runs), key=_epochs, reverse=True)
        if len(left) < len(runs):
            _say(console, f"{len(runs) - len(left)} of {len(runs)} runs have their records in {folder}")
        if not left:
            return
        workers = stack.enter_context(side_by_side(do, jobs, device, GOES_ON, lambda message: _say(console, message)))
        tasks = [Task(run, folder, device, places[run.variant.data]) for run in left]
        failures = _record(workers, tasks, console)
    if failures:
        listed = "".join(f"\n  {failure.task.run.name}: {failure.error}" for failure in failures)
        raise TrainingError(f"{len(failures)} of {len(left)} runs failed, the others are recorded:{listed}")


def _epochs(run: Run) -> int:
    """What it trains for, all its endings counted."""
    settings = run.recipe.scaled()
    trained = sum(phase.epochs for phase in settings.sequence(pretrain=False))
    return trained + len(run.rates) * settings.closing.epochs


def _record(workers: Workers, tasks: Sequence[Task], console: Console) -> list[Outcome]:
    """Pretraining first, once for those that begin alike; returns what failed."""
    beginnings: dict[Path, Task] = {}
    for begun in chain.from_iterable(task.beginnings for task in tasks):
        beginnings.setdefault(begun.weights, begun)
    lacking = [task for path, task in beginnings.items() if not path.exists()]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal
    ) as progress:
        failures = _follow(workers, lacking, progress, "pretraining")
        broken = {failure.task.weights: failure.error for failure in failures}
        errors = [next(filter(None, (broken.get(each.weights) for each in task.beginnings)), None) for task in tasks]
        ready = [task for task, error in zip(tasks, errors, strict=True) if error is None]
        failures = _follow(workers, ready, progress, tasks[0].folder.name)
    return failures + [
        Outcome(task, error=f"pretraining: {error}")
        for task, error in zip(tasks, errors, strict=True)
        if error is not None
    ]


def _follow(workers: Workers, tasks: Sequence[Task], progress: Progress, title: str) -> list[Outcome]:
    """Keep the records of tasks as they are done; returns what failed."""
    bar = progress.add_task(title, total=len(tasks), visible=bool(tasks))
    failures = []
    for outcome in workers.outcomes(tasks):
        progress.advance(bar)
        if outcome.error is not None:
            failures.append(outcome)
            _say(progress.console, f"{title}, {outcome.task.run.name} failed: {outcome.error}")
            continue
        for record in outcome.answer:
            add(outcome.task.folder, record)
            _say(progress.console, _told(record))
        # Only now: a record that is lost costs nothing but the ending.
        _forget(outcome.task)
    return failures


def _told(record: Record) -> str:
    accuracy = f"{100 * record['accuracy']:.2f} % of test, " if "accuracy" in record else ""
    judged = record["validation_accuracy"]
    validation = "" if judged is None else f"{100 * judged:.2f} % of validation, "
    return f"{record['name']}: {accuracy}{validation}{record['bytes']:,} bytes, {record['seconds']:.0f} s"


def _say(console: Console, message: str) -> None:
    console.print(message, markup=False, highlight=False)
