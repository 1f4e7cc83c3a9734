"""Where runs are trained: many from the same pretrained networks, several at once on a GPU.

On a GPU networks are trained together, as one batched model, and what recipes have in common at their beginning is
trained once:

    pretrained ──► vd ──┬──► quantized, values trained          the run `vd`
                        └──► vd+sws ──► quantized, …            the run `vd+sws`

What follows, from quantized weights to a file and its figures, is for processes. A run that has its record already is
not repeated, so that an experiment can be stopped and taken up again.
"""

import contextlib
import copy
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from safetensors.torch import save
from torch import Tensor, nn

from bayeszip import data, pipeline
from bayeszip.errors import RecipeError, TrainingError
from bayeszip.files import write_atomically
from bayeszip.fitting import EpochStats, Phase, Watcher, evaluate, fit
from bayeszip.fitting.ensemble import Member, close_together, fit_together
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.pipeline import start_prior
from bayeszip.posterior import Posterior
from bayeszip.quantize import quantize, round_codebook
from bayeszip.recipe import MixtureStart, recipe
from bayeszip.result import write_weights
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import Conversion, MixturePrior, to_stock, to_variational
from runs import (
    EVALUATION_BATCH,
    RESULTS,
    Run,
    Trained,
    file_and_record,
    in_order,
    mnist,
    parser,
    pretrained,
    recorded_recipe,
    weights_file,
)

#: Networks trained at once on a GPU: one alone leaves it waiting for the next small kernel.
TOGETHER = 32

Item = TypeVar("Item")
#: What becomes of a trained run: told the run, its training, where pretrained networks are, and the run's folder.
Finish = Callable[[Run, Trained, Path, Path], str]


class Bench:
    """The data on a device, the pretrained networks, and runs on them.

    Args:
        folder: of pretrained networks, which are trained if they are not there.
        together: how many networks are trained at once on a GPU, as one batched model; on a CPU it is one.
    """

    def __init__(self, device: str, folder: Path, together: int | None = None) -> None:
        self.device = pipeline.resolve_device(device)
        self.folder = folder
        self.on_gpu = self.device.type == "cuda"
        self.together = together or TOGETHER if self.on_gpu else 1
        self.device_name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    @cached_property
    def train_split(self) -> data.Split:
        return mnist().train.to(self.device)

    @cached_property
    def validation(self) -> data.Batches:
        return in_order(mnist().validation.to(self.device))

    @property
    def n_data(self) -> int:
        return len(self.train_split.images)

    def batches(self, batch_size: int, seed: int) -> data.Batches:
        split = self.train_split
        return data.Batches(split.images, split.labels, batch_size, shuffle=True, seed=seed)

    def pretrain(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Train, by the recipe `l2`, the networks that are not there yet."""
        missing = [key for key in sorted(set(wanted)) if not weights_file(self.folder, *key).exists()]
        settings = recipe("l2")
        epochs = sum(phase.epochs for phase in settings.pretraining)
        self.folder.mkdir(parents=True, exist_ok=True)
        with _progress("pretraining", epochs * len(missing)) as bar:
            for group in _groups(missing, lambda key: key[0], self.together):
                members = [
                    Member(
                        pipeline.build_seeded(*key).to(self.device),
                        self.batches(settings.batch_size, key[1]),
                        settings.pretraining,
                    )
                    for key in group
                ]
                if self.on_gpu:
                    self._fit_together(members, bar)
                else:
                    self._fit_alone(members[0].network, members[0], None, bar)
                for key, member in zip(group, members, strict=True):
                    weights = {name: tensor.cpu() for name, tensor in member.network.state_dict().items()}
                    write_atomically(weights_file(self.folder, *key), save(weights))

    def record(self, experiment: str, runs: Sequence[Run], finish: Finish | None = None) -> None:
        """Do the runs that have no record yet, and note the seconds that took.

        Args:
            finish: what becomes of a trained run, in a process of its own; by default its file and its record.

        Raises:
            RecipeError: a run was recorded with other settings.
            ExceptionGroup: some runs failed; the others are recorded.
        """
        missing = [run for run in runs if not _is_recorded(RESULTS / experiment / run.name / "result.json", run)]
        if not missing:
            Console(stderr=True).print(
                f"{experiment}: all {len(runs)} runs have their records in {RESULTS / experiment}"
            )
            return
        began = time.perf_counter()
        try:
            self.pretrain((run.model, run.seed) for run in missing)
            failures = self._record(experiment, missing, finish or file_and_record)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "interrupted; runs that are recorded stay, the same command does the others"
            ) from None
        finally:
            self._note_seconds(experiment, time.perf_counter() - began, missing)
        if failures:
            raise ExceptionGroup(f"{len(failures)} of {len(missing)} runs failed", failures)

    def _record(self, experiment: str, runs: Sequence[Run], finish: Finish) -> list[Exception]:
        """Train group by group, while processes finish what is trained; returns what went wrong."""
        workers = max(1, (os.cpu_count() or 1) // 2)
        failures: list[Exception] = []
        with (
            _progress(experiment, _epochs(runs)) as bar,
            ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread) as processes,
        ):
            files: list[Future[str]] = []
            for group in self._groups(runs):
                try:
                    trained = self._train(group, bar)
                except TrainingError as error:
                    failures.append(error)
                    continue
                for run, training in zip(group, trained, strict=True):
                    folder = RESULTS / experiment / run.name
                    files.append(processes.submit(finish, run, training, self.folder, folder))
                failures += bar.say_all([file for file in files if file.done()])
                files = [file for file in files if not file.done()]
            failures += bar.say_all(as_completed(files))
        return failures

    def _note_seconds(self, experiment: str, seconds: float, runs: Sequence[Run]) -> None:
        """Add to `seconds.json` what some runs took, if any were done, and pretraining if there was any."""
        path = RESULTS / experiment / "seconds.json"
        done = sum((path.parent / run.name / "result.json").exists() for run in runs)
        if not done:
            return
        taken = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        taken.append(
            {"seconds": round(seconds, 1), "runs": done, "device": self.device_name, "together": self.together}
        )
        write_atomically(path, (json.dumps(taken, indent=1) + "\n").encode())

    def _groups(self, runs: Sequence[Run]) -> Iterator[list[Run]]:
        """Runs that are trained at once: those whose first phases are alike, and all that begin as they do."""
        beginnings: dict[_Beginning, list[Run]] = {}
        for run in runs:
            beginnings.setdefault(_Beginning.of(run, 1), []).append(run)
        for alike in _groups(list(beginnings), _Beginning.kind, self.together):
            yield [run for beginning in alike for run in beginnings[beginning]]

    def _train(self, runs: Sequence[Run], bar: "_Bar") -> list[Trained]:
        """All of `compress` that a GPU is for. What runs have in common at their beginning is trained once."""
        # With it the same group of runs draws the same noise.
        torch.manual_seed(runs[0].seed)
        starts = {_Beginning.of(run, 0): run for run in runs}
        states = {beginning: self._start(run) for beginning, run in starts.items()}
        for depth in range(1, 1 + max(len(run.settings.phases) for run in runs)):
            longer = {_Beginning.of(run, depth): run for run in runs if len(run.settings.phases) >= depth}
            for group in _groups(list(longer), _Beginning.kind, self.together):
                branches = [states[beginning.before()].branch() for beginning in group]
                self._train_phase(branches, [longer[beginning] for beginning in group], depth, bar)
                states |= zip(group, branches, strict=True)
        ends = [states[_Beginning.of(run, len(run.settings.phases))].branch() for run in runs]
        quantized = self._quantized(ends, runs, bar)
        return [end.trained(tensors, self.device_name) for end, tensors in zip(ends, quantized, strict=True)]

    def _start(self, run: Run) -> "_State":
        network = pretrained(self.folder, run.model, run.seed).to(self.device)
        with torch.no_grad():
            taught = torch.cat([network(part) for part in self.train_split.images.split(EVALUATION_BATCH)])
        accuracy = evaluate(network, self.validation)
        settings = run.settings
        teacher = copy.deepcopy(network)
        conversion = to_variational(network, log_sigma2=settings.start_log_sigma2, biases=settings.biases)
        return _State(network, teacher, taught, conversion, accuracy)

    def _train_phase(self, states: "Sequence[_State]", runs: Sequence[Run], depth: int, bar: "_Bar") -> None:
        """One phase of some states, in place."""
        phases = [run.settings.phases[depth - 1] for run in runs]
        for state, run, phase in zip(states, runs, phases, strict=True):
            if phase.tau2 and state.prior is None:
                start = copy.deepcopy(state.teacher)
                to_variational(start, log_sigma2=run.settings.start_log_sigma2, biases=run.settings.biases)
                state.prior = start_prior(start, run.settings)
        self._fit(states, self._members(states, runs, phases, [depth] * len(runs)), bar)

    def _members(
        self, states: "Sequence[_State]", runs: Sequence[Run], phases: Sequence[Phase], depths: Sequence[int]
    ) -> list[Member]:
        return [
            Member(
                state.network,
                # Another order of the batches in every phase.
                self.batches(run.settings.batch_size, run.seed + 1000 * depth),
                (phase,),
                state.prior,
                state.taught,
            )
            for state, run, phase, depth in zip(states, runs, phases, depths, strict=True)
        ]

    def _fit(self, states: "Sequence[_State]", members: Sequence[Member], bar: "_Bar") -> None:
        began = time.perf_counter()
        if self.on_gpu:
            self._fit_together(members, bar)
        else:
            self._fit_alone(members[0].network, members[0], states[0].teacher, bar)
        _count(states, members, began)

    def _fit_together(self, members: Sequence[Member], bar: "_Bar") -> None:
        fit_together(
            members, n_data=self.n_data, validation=self.validation, on_epoch=lambda: bar.advance(len(members))
        )

    def _fit_alone(self, network: nn.Module, member: Member, teacher: nn.Module | None, bar: "_Bar") -> None:
        fit(
            network,
            member.batches,
            member.phases,
            n_data=self.n_data,
            prior=member.prior,
            teacher=teacher,
            validation=self.validation,
            watcher=_History(member.history, bar),
        )

    def _quantized(
        self, states: "Sequence[_State]", runs: Sequence[Run], bar: "_Bar"
    ) -> list[dict[str, QuantizedTensor]]:
        """Symbols, and shared values trained in the closing phase."""
        with ThreadPoolExecutor() as threads:
            posteriors = [Posterior.of(state.network, state.prior) for state in states]
            quantized = list(threads.map(quantize, posteriors, [run.settings.quantization for run in runs]))
        for state, tensors in zip(states, quantized, strict=True):
            write_weights(to_stock(state.network), tensors)
        closed = [index for index, run in enumerate(runs) if run.settings.closing.epochs]
        for group in _groups(closed, lambda index: _closing_kind(runs[index]), self.together):
            codebooks = self._close(
                [states[index] for index in group],
                [runs[index] for index in group],
                [quantized[index] for index in group],
                bar,
            )
            for index, codebook in zip(group, codebooks, strict=True):
                rounded = round_codebook(codebook, runs[index].settings.quantization.codebook_bits)
                quantized[index] = _with_codebook(quantized[index], rounded)
        return quantized

    def _close(
        self,
        states: "Sequence[_State]",
        runs: Sequence[Run],
        quantized: Sequence[Mapping[str, QuantizedTensor]],
        bar: "_Bar",
    ) -> list[np.ndarray]:
        began = time.perf_counter()
        for state in states:
            state.prior = None
        depths = [1 + len(run.settings.phases) for run in runs]
        members = self._members(states, runs, [run.settings.closing for run in runs], depths)
        if self.on_gpu:
            codebooks = close_together(
                members,
                quantized,
                n_data=self.n_data,
                validation=self.validation,
                on_epoch=lambda: bar.advance(len(members)),
            )
        else:
            shared = SharedValues(members[0].network, quantized[0])
            self._fit_alone(shared, members[0], states[0].teacher, bar)
            codebooks = [shared.codebook()]
        _count(states, members, began)
        return codebooks


@dataclass
class _State:
    """Of a network on its way, which may part."""

    network: nn.Module
    #: The pretrained network, and what it says to all images.
    teacher: nn.Module
    taught: Tensor
    conversion: Conversion
    accuracy_before: float
    prior: MixturePrior | None = None
    history: tuple[EpochStats, ...] = ()
    #: Its share of the time, and the most networks it was trained together with.
    seconds: float = 0.0
    together: int = 1

    def branch(self) -> "_State":
        return dataclasses.replace(self, network=copy.deepcopy(self.network), prior=copy.deepcopy(self.prior))

    def trained(self, quantized: Mapping[str, QuantizedTensor], device: str) -> Trained:
        return Trained(
            quantized, self.conversion, self.accuracy_before, self.seconds, self.together, device, self.history
        )


def _count(states: Sequence[_State], members: Sequence[Member], began: float) -> None:
    """What a phase that began then took, and its history."""
    for state, member in zip(states, members, strict=True):
        state.seconds += (time.perf_counter() - began) / len(members)
        state.together = max(state.together, len(members))
        state.history += tuple(member.history)


@dataclass(frozen=True)
class _Beginning:
    """The first phases of a run, and all that decides what they come to; equal for runs that begin alike."""

    model: str
    seed: int
    batch_size: int
    start_log_sigma2: float
    biases: bool
    phases: tuple[Phase, ...]
    #: None until a phase trains the mixture.
    mixture: MixtureStart | None

    @classmethod
    def of(cls, run: Run, depth: int) -> "_Beginning":
        settings = run.settings
        return cls(
            run.model,
            run.seed,
            settings.batch_size,
            settings.start_log_sigma2,
            settings.biases,
            settings.phases[:depth],
            settings.mixture if any(phase.tau2 for phase in settings.phases[:depth]) else None,
        )

    def before(self) -> "_Beginning":
        """Without the last phase."""
        phases = self.phases[:-1]
        mixture = self.mixture if any(phase.tau2 for phase in phases) else None
        return dataclasses.replace(self, phases=phases, mixture=mixture)

    def kind(self) -> tuple[Any, ...]:
        """What those have in common whose last phases can be trained together."""
        shape: tuple[Any, ...] = ()
        if self.phases:
            last = self.phases[-1]
            shape = (last.epochs, last.noise, last.reseed, last.tau1 > 0, last.tau2 > 0, last.std_first > 0)
        mixture = self.mixture
        fixed = mixture and (mixture.components, mixture.zero_proportion, mixture.hyper_shape)
        return self.model, self.batch_size, self.biases, len(self.phases), shape, fixed


class _Bar:
    """A progress bar over epochs."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self.console = progress, task, progress.console

    def advance(self, epochs: int = 1) -> None:
        self._progress.advance(self._task, epochs)

    def say_all(self, files: Iterable[Future[str]]) -> list[Exception]:
        """Print what became of runs; returns what went wrong with some."""
        failures: list[Exception] = []
        for file in files:
            try:
                self.console.print(file.result(), markup=False, highlight=False)
            except Exception as error:
                failures.append(error)
        return failures


@contextlib.contextmanager
def _progress(title: str, epochs: int) -> Iterator[_Bar]:
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True, soft_wrap=True)) as progress:
        yield _Bar(progress, progress.add_task(title, total=epochs or 1, completed=0 if epochs else 1))


class _History(Watcher):
    """Keeps the history, and moves a progress bar on."""

    def __init__(self, history: list[EpochStats], bar: _Bar) -> None:
        self._history, self._bar = history, bar

    def on_epoch(self, stats: EpochStats, *state: Any) -> None:
        self._history.append(stats)
        self._bar.advance()


def _groups(items: Sequence[Item], kind: Callable[[Item], Any], size: int) -> Iterator[list[Item]]:
    """At most `size` items of one kind at a time."""
    kinds: dict[Any, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    for alike in kinds.values():
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _closing_kind(run: Run) -> tuple[Any, ...]:
    return run.model, run.settings.batch_size, run.settings.biases, run.settings.closing.epochs


def _is_recorded(path: Path, run: Run) -> bool:
    if not path.exists():
        return False
    if recorded_recipe(path) != run.settings:
        raise RecipeError(f"{path.parent} was recorded with other settings; move it away to run it with these")
    return True


def _epochs(runs: Sequence[Run]) -> int:
    """Of all runs, what they have in common counted once."""
    beginnings = {
        _Beginning.of(run, depth): run.settings.phases[depth - 1].epochs
        for run in runs
        for depth in range(1, 1 + len(run.settings.phases))
    }
    return sum(beginnings.values()) + sum(run.settings.closing.epochs for run in runs)


def _with_codebook(tensors: Mapping[str, QuantizedTensor], codebook: np.ndarray) -> dict[str, QuantizedTensor]:
    return {name: QuantizedTensor(tensor.symbols, codebook) for name, tensor in tensors.items()}


def _one_thread() -> None:
    """A process of many keeps to one core."""
    torch.set_num_threads(1)


def run_experiment(
    name: str,
    planned: Callable[[int, float], list[Run]],
    description: str | None,
    arguments: Sequence[str] | None,
    seeds: int = 5,
    epochs_scale: float = 1.0,
) -> None:
    """An experiment's command line: do those of its planned runs that are asked for and have no record yet."""
    options = parser(description, seeds, epochs_scale).parse_args(arguments)
    everything = planned(options.seeds, options.epochs_scale)
    runs = [run for run in everything if options.only in run.name]
    if not runs:
        raise RecipeError(f"no run of {name} has {options.only!r} in its name, which is like {everything[0].name}")
    Bench(options.device, options.pretrained, options.together).record(name, runs)
