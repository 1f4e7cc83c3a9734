"""Runs of experiments: many compressions from the same pretrained networks, several at once on a GPU, each recorded.

On a GPU networks are trained together, as one batched model; what follows, from quantized weights to a file and its
figures, is for processes. A run that has its record already is not repeated, so that an experiment can be stopped and
taken up again.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from safetensors.torch import load_file, save_file
from torch import nn

from bayeszip import codec, data, pipeline
from bayeszip.fitting import EpochStats, Watcher, evaluate, fit
from bayeszip.fitting.ensemble import Member, close_together, fit_together
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.pipeline import start_prior
from bayeszip.posterior import Posterior
from bayeszip.quantize import quantize, round_codebook
from bayeszip.recipe import Recipe, recipe
from bayeszip.record import file_figures, write_record
from bayeszip.result import Fit, Form, Result, write_weights
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import Conversion, to_stock, to_variational

RESULTS = Path(__file__).resolve().parents[1] / "results"

#: The paper's width of a column offset (its app. B).
OFFSET_BITS = {"lenet-300-100": 5, "lenet-5": 8}
#: What the paper's accounting leaves out of a file.
NOT_COUNTED = ("magic", "header", "graph", "padding", "checksum")

#: Networks trained at once on a GPU: one alone leaves it waiting for the next small kernel.
TOGETHER_ON_GPU = 16
EVALUATION_BATCH = 1000

Item = TypeVar("Item")


@dataclass(frozen=True)
class Run:
    """One compression: of `model`, pretrained from `seed`, by `recipe`; `name` is its folder below the experiment's."""

    name: str
    model: str
    recipe: Recipe
    seed: int

    @property
    def epochs(self) -> int:
        settings = self.recipe.scaled()
        return sum(phase.epochs for phase in (*settings.phases, settings.closing))


@dataclass(frozen=True)
class Trained:
    """What is left of the training of a run."""

    quantized: Mapping[str, QuantizedTensor]
    conversion: Conversion
    accuracy_before: float
    seconds: float
    device: str
    history: tuple[EpochStats, ...]


class Bench:
    """The data on a device, the pretrained networks, and runs on them.

    Args:
        folder: of pretrained networks, which are trained if they are not there.
        together: how many networks are trained at once, as one batched model; on a CPU one after the other is faster.
    """

    def __init__(self, device: str, folder: Path, together: int | None = None) -> None:
        self.device = pipeline.resolve_device(device)
        self.folder = folder
        self.together = together or (TOGETHER_ON_GPU if self.device.type == "cuda" else 1)
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    @cached_property
    def train_split(self) -> data.Split:
        return mnist().train.to(self.device)

    @cached_property
    def validation(self) -> data.Batches:
        return _in_order(mnist().validation.to(self.device))

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
                self._fit(members, bar)
                for key, member in zip(group, members, strict=True):
                    weights = {name: tensor.cpu() for name, tensor in member.network.state_dict().items()}
                    save_file(weights, weights_file(self.folder, *key))

    def record(self, experiment: str, runs: Sequence[Run]) -> float:
        """Do the runs that have no record yet; returns the seconds that took."""
        missing = [run for run in runs if not (RESULTS / experiment / run.name / "result.json").exists()]
        if not missing:
            return 0.0
        began = time.perf_counter()
        self.pretrain((run.model, run.seed) for run in missing)
        workers = max(1, (os.cpu_count() or 1) // 2)
        with (
            _progress(experiment, sum(run.epochs for run in missing)) as bar,
            ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread) as processes,
        ):
            files: list[Future[str]] = []
            for group in _groups(missing, _kind, self.together):
                for run, trained in zip(group, self._train(group, bar), strict=True):
                    folder = RESULTS / experiment / run.name
                    files.append(processes.submit(finish, run, trained, self.folder, folder, len(group)))
                for file in [file for file in files if file.done()]:
                    bar.console.print(file.result(), markup=False, highlight=False)
                    files.remove(file)
            for file in files:
                bar.console.print(file.result(), markup=False, highlight=False)
        return time.perf_counter() - began

    def _train(self, runs: Sequence[Run], bar: "_Bar") -> list[Trained]:
        """All of `compress` that a GPU is for."""
        began = time.perf_counter()
        members = [self._member(run) for run in runs]
        before = [evaluate(member.network, self.validation) for member in members]
        start = [run.recipe.scaled() for run in runs]
        conversions = [
            to_variational(member.network, log_sigma2=settings.start_log_sigma2, biases=settings.biases)
            for member, settings in zip(members, start, strict=True)
        ]
        for member, settings in zip(members, start, strict=True):
            member.prior = start_prior(member.network, settings)
        teacher = None if self.together > 1 else pretrained(self.folder, runs[0].model, runs[0].seed).to(self.device)
        self._fit(members, bar, teacher)
        quantized = self._quantized(members, start, bar, teacher)
        seconds = (time.perf_counter() - began) / len(runs)
        return [
            Trained(tensors, conversion, accuracy, seconds, self.device_name, tuple(member.history))
            for tensors, conversion, accuracy, member in zip(quantized, conversions, before, members, strict=True)
        ]

    def _member(self, run: Run) -> Member:
        network = pretrained(self.folder, run.model, run.seed).to(self.device)
        settings = run.recipe.scaled()
        batches = self.batches(settings.batch_size, run.seed)
        with torch.no_grad():
            taught = torch.cat([network(part) for part in batches.inputs.split(EVALUATION_BATCH)])
        return Member(network, batches, settings.phases, None, taught)

    def _fit(self, members: Sequence[Member], bar: "_Bar", teacher: nn.Module | None = None) -> None:
        """Together on a GPU; else it is one."""
        if self.together == 1:
            self._fit_one(members[0].network, members[0], bar, teacher)
            return
        fit_together(
            members, n_data=self.n_data, validation=self.validation, on_epoch=lambda: bar.advance(len(members))
        )

    def _fit_one(self, network: nn.Module, member: Member, bar: "_Bar", teacher: nn.Module | None) -> None:
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
        self, members: Sequence[Member], recipes: Sequence[Recipe], bar: "_Bar", teacher: nn.Module | None
    ) -> list[dict[str, QuantizedTensor]]:
        """Symbols, and shared values trained in the closing phase."""
        with ThreadPoolExecutor() as threads:
            posteriors = [Posterior.of(member.network, member.prior) for member in members]
            quantized = list(threads.map(quantize, posteriors, [settings.quantization for settings in recipes]))
        if not recipes[0].closing.epochs:
            return quantized
        for member, tensors, settings in zip(members, quantized, recipes, strict=True):
            write_weights(to_stock(member.network), tensors)
            member.phases, member.prior = (settings.closing,), None
        if self.together > 1:
            codebooks = close_together(
                members,
                quantized,
                n_data=self.n_data,
                validation=self.validation,
                on_epoch=lambda: bar.advance(len(members)),
            )
        else:
            shared = SharedValues(members[0].network, quantized[0])
            self._fit_one(shared, members[0], bar, teacher)
            codebooks = [shared.codebook()]
        return [
            _with_codebook(tensors, round_codebook(codebook, settings.quantization.codebook_bits))
            for tensors, codebook, settings in zip(quantized, codebooks, recipes, strict=True)
        ]


class _Bar:
    """A progress bar over epochs."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self.console = progress, task, progress.console

    def advance(self, epochs: int = 1) -> None:
        self._progress.advance(self._task, epochs)


@contextlib.contextmanager
def _progress(title: str, epochs: int) -> Iterator[_Bar]:
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True, soft_wrap=True)) as progress:
        yield _Bar(progress, progress.add_task(title, total=epochs))


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


def _kind(run: Run) -> tuple[Any, ...]:
    """What runs that are trained together have in common."""
    settings = run.recipe.scaled()
    phases = tuple(
        (phase.epochs, phase.noise, phase.reseed, phase.tau1 > 0, phase.tau2 > 0, phase.std_first > 0)
        for phase in (*settings.phases, settings.closing)
    )
    mixture = settings.mixture
    fixed = (mixture.components, mixture.zero_proportion, mixture.hyper_shape, settings.biases)
    return run.model, settings.batch_size, phases, fixed


def _with_codebook(tensors: Mapping[str, QuantizedTensor], codebook: np.ndarray) -> dict[str, QuantizedTensor]:
    return {name: QuantizedTensor(tensor.symbols, codebook) for name, tensor in tensors.items()}


def finish(run: Run, trained: Trained, pretrained_in: Path, folder: Path, together: int) -> str:
    """The file of a trained run, its figures and its record."""
    network = pretrained(pretrained_in, run.model, run.seed)
    write_weights(network, trained.quantized)
    splits = mnist()
    result = Form(network, (splits.train.images[:2],), run.recipe.coding).code(trained.quantized)
    result = dataclasses.replace(
        result,
        accuracy=evaluate(result.network(), _in_order(splits.validation)),
        fit=Fit(
            recipe=run.recipe.scaled(),
            seed=run.seed,
            conversion=trained.conversion,
            accuracy_before=trained.accuracy_before,
            seconds=trained.seconds,
            device=trained.device,
            history=trained.history,
        ),
    )
    figures = file_figures(result.network(), result.blob, _in_order(splits.test)) | {
        "model": run.model,
        "paper_bytes": paper_bytes(result, run.model),
        "trained_together": together,
    }
    write_record(folder, result, figures)
    return (
        f"{run.name}: {100 * figures['accuracy']:.2f} %, {figures['bytes']:,} bytes, {figures['ratio']:.0f}×, "
        f"{4 * figures['params'] / figures['paper_bytes']:.0f}× in the paper's accounting"
    )


@cache
def mnist() -> data.Dataset:
    return data.load("mnist")


def _in_order(split: data.Split) -> data.Batches:
    return data.Batches(split.images, split.labels, EVALUATION_BATCH)


def _one_thread() -> None:
    """A process of many keeps to one core."""
    torch.set_num_threads(1)


def weights_file(folder: Path, model: str, seed: int) -> Path:
    return folder / f"{model}-seed-{seed}.safetensors"


def pretrained(folder: Path, model: str, seed: int) -> nn.Module:
    """The network with the weights that `Bench.pretrain` left."""
    network = pipeline.build_seeded(model, seed)
    network.load_state_dict(load_file(weights_file(folder, model, seed)))
    return network


def paper_bytes(result: Result, model: str) -> int:
    """Size in the paper's accounting: its codec (CSR, Huffman), without what makes a file of it."""
    blob = codec.encode(result.compressed, "csr-huffman", offset_bits=OFFSET_BITS[model])
    return len(blob) - sum(codec.describe(blob).parts.get(part, 0) for part in NOT_COUNTED)


def note_seconds(experiment: str, bench: Bench, seconds: float) -> None:
    """Add to `seconds.json` what a whole experiment took, if anything was done."""
    if not seconds:
        return
    path = RESULTS / experiment / "seconds.json"
    taken = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    taken.append({"seconds": round(seconds, 1), "device": bench.device_name, "together": bench.together})
    path.write_text(json.dumps(taken, indent=1) + "\n", encoding="utf-8")


def parser(description: str | None, seeds: int = 5, epochs_scale: float = 1.0) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--seeds", type=int, default=seeds, help="how many seeds, from 0")
    options.add_argument("--only", default="", help="only runs whose name contains this")
    options.add_argument("--together", type=int, default=None, help="networks trained at once; by default 16 on a GPU")
    options.add_argument(
        "--pretrained", type=Path, default=RESULTS / "pretrained", help="where pretrained networks are"
    )
    options.add_argument("--epochs-scale", type=float, default=epochs_scale, help="factor on all epochs")
    return options
