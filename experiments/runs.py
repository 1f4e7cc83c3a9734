"""Runs of experiments: many compressions from the same pretrained networks, several at once on a GPU, each recorded.

Training is for threads, since a GPU is kept busy by several at once; what follows it, quantized weights to a file and
its figures, for processes. A run that has its record already is not repeated, so that an experiment can be stopped and
taken up again.
"""

import argparse
import copy
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import nn

from bayeszip import codec, data, pipeline
from bayeszip.errors import BayeszipError
from bayeszip.fitting import EpochStats, Watcher, count_examples, evaluate, fit
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

#: Runs at once on a GPU: one alone leaves it waiting for the next small kernel.
JOBS_ON_GPU = 8
EVALUATION_BATCH = 1000


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
        jobs: trainings at once.
    """

    def __init__(self, device: str, folder: Path, jobs: int | None = None) -> None:
        self.device = pipeline.resolve_device(device)
        self.folder = folder
        self.jobs = jobs or (JOBS_ON_GPU if self.device.type == "cuda" else 1)
        if self.jobs > 1:
            # Threads that only wait for a GPU take turns with those that compute.
            sys.setswitchinterval(5e-4)

    @cached_property
    def train_split(self) -> data.Split:
        return mnist().train.to(self.device)

    @cached_property
    def validation(self) -> data.Batches:
        split = mnist().validation.to(self.device)
        return data.Batches(split.images, split.labels, EVALUATION_BATCH)

    def batches(self, batch_size: int, seed: int) -> data.Batches:
        split = self.train_split
        return data.Batches(split.images, split.labels, batch_size, shuffle=True, seed=seed)

    def pretrain(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Train, by the recipe `l2`, the networks that are not there yet."""
        missing = [key for key in sorted(set(wanted)) if not weights_file(self.folder, *key).exists()]
        networks = {key: pipeline.build_seeded(*key).to(self.device) for key in missing}
        settings = recipe("l2")

        def train(key: tuple[str, int], watcher: Watcher) -> str:
            network, batches = networks[key], self.batches(settings.batch_size, key[1])
            fit(network, batches, settings.pretraining, n_data=count_examples(batches), watcher=watcher)
            self.folder.mkdir(parents=True, exist_ok=True)
            weights = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
            save_file(weights, weights_file(self.folder, *key))
            return f"{key[0]} seed {key[1]}: {100 * evaluate(network, self.validation):.2f} % on validation"

        epochs = sum(phase.epochs for phase in settings.pretraining)
        self.all_of("pretraining", [Task(lambda watcher, k=key: train(k, watcher), epochs) for key in missing])

    def train(self, run: Run, watcher: Watcher) -> Trained:
        """All of `compress` that a GPU is for."""
        began = time.perf_counter()
        settings = run.recipe.scaled()
        network = pretrained(self.folder, run.model, run.seed).to(self.device)
        teacher = copy.deepcopy(network).eval().requires_grad_(False)
        batches = self.batches(settings.batch_size, run.seed)
        how = {"n_data": count_examples(batches), "teacher": teacher, "validation": self.validation, "watcher": watcher}
        accuracy_before = evaluate(network, self.validation)
        conversion = to_variational(network, log_sigma2=settings.start_log_sigma2, biases=settings.biases)
        prior = start_prior(network, settings)
        fit(network, batches, settings.phases, prior=prior, **how)
        quantized = quantize(Posterior.of(network, prior), settings.quantization)
        to_stock(network)
        if settings.closing.epochs and len(next(iter(quantized.values())).codebook) > 1:
            write_weights(network, quantized)
            shared = SharedValues(network, quantized)
            fit(shared, batches, (settings.closing,), **how)
            codebook = round_codebook(shared.codebook(), settings.quantization.codebook_bits)
            quantized = {name: QuantizedTensor(tensor.symbols, codebook) for name, tensor in quantized.items()}
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        seconds = time.perf_counter() - began
        return Trained(quantized, conversion, accuracy_before, seconds, device, tuple(watcher.history))

    def record(self, experiment: str, runs: Sequence[Run]) -> float:
        """Do the runs that have no record yet; returns the seconds that took."""
        missing = [run for run in runs if not (RESULTS / experiment / run.name / "result.json").exists()]
        self.pretrain((run.model, run.seed) for run in missing)
        # The longest first: none is left alone at the end.
        tasks = [
            Task(
                lambda watcher, r=run: self.train(r, watcher),
                run.epochs,
                lambda trained, r=run: (r, trained, self.folder, RESULTS / experiment / r.name, self.jobs),
            )
            for run in sorted(missing, key=lambda run: -run.epochs)
        ]
        return self.all_of(experiment, tasks)

    def all_of(self, title: str, tasks: Sequence["Task"]) -> float:
        """Do all, `jobs` at once, with a progress bar; what fails is told, and the others go on."""
        if not tasks:
            return 0.0
        began = time.perf_counter()
        failures: list[str] = []
        console = Console(stderr=True, soft_wrap=True)

        def tell(line: str) -> None:
            console.print(f"[{time.perf_counter() - began:.0f} s] {line}", markup=False, highlight=False)

        def guarded(work: Callable[[], Any]) -> Any:
            try:
                return work()
            except BayeszipError as error:
                failures.append(str(error))
                tell(f"failed: {error}")
                return None

        workers = max(1, (os.cpu_count() or 1) // 2 if self.jobs > 1 else 1)
        with (
            Progress(*Progress.get_default_columns(), console=console) as progress,
            ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread) as processes,
            ThreadPoolExecutor(self.jobs) as threads,
        ):
            bar = progress.add_task(title, total=sum(task.epochs for task in tasks))

            def work(task: Task) -> Future[str] | str | None:
                outcome = guarded(lambda: task.work(_History(lambda: progress.advance(bar))))
                if task.finish is None or outcome is None:
                    return outcome
                return processes.submit(finish, *task.finish(outcome))

            for outcome in threads.map(work, tasks):
                line = guarded(outcome.result) if isinstance(outcome, Future) else outcome
                if line is not None:
                    tell(line)
        if failures:
            raise SystemExit(f"{title}: {len(failures)} of {len(tasks)} failed; run again to repeat them")
        return time.perf_counter() - began


@dataclass(frozen=True)
class Task:
    """Something to do with a watcher, that long; and what `finish` is then called with, if it is."""

    work: Callable[["_History"], Any]
    epochs: int
    finish: Callable[[Any], tuple[Any, ...]] | None = None


class _History(Watcher):
    """Keeps the history, and moves a progress bar on after each epoch; threads take turns at it."""

    _turn = Lock()

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance
        self.history: list[EpochStats] = []

    def on_epoch(self, stats: EpochStats, *state: Any) -> None:
        self.history.append(stats)
        with self._turn:
            self._advance()


def finish(run: Run, trained: Trained, pretrained_in: Path, folder: Path, jobs: int) -> str:
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
        "runs_at_once": jobs,
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
    device = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "cpu"
    path = RESULTS / experiment / "seconds.json"
    taken = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    taken.append({"seconds": round(seconds, 1), "device": device, "runs_at_once": bench.jobs})
    path.write_text(json.dumps(taken, indent=1) + "\n", encoding="utf-8")


def parser(description: str | None, seeds: int = 5, epochs_scale: float = 1.0) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--seeds", type=int, default=seeds, help="how many seeds, from 0")
    options.add_argument("--only", default="", help="only runs whose name contains this")
    options.add_argument("--jobs", type=int, default=None, help="runs at once; by default 8 on a GPU, else 1")
    options.add_argument(
        "--pretrained", type=Path, default=RESULTS / "pretrained", help="where pretrained networks are"
    )
    options.add_argument("--epochs-scale", type=float, default=epochs_scale, help="factor on all epochs")
    return options
