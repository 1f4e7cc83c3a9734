"""Runs of experiments: many compressions from the same pretrained networks, several at once on a GPU, each recorded.

A run that has its record already is not repeated, so that an experiment can be stopped and taken up again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
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
from bayeszip.fitting import Watcher, count_examples, evaluate, fit
from bayeszip.pipeline import Result
from bayeszip.recipe import Recipe, recipe
from bayeszip.record import file_figures, write_record

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


class Bench:
    """The data on a device, the pretrained networks, and runs on them.

    Args:
        folder: of pretrained networks, which are trained if they are not there.
        jobs: runs at once.
    """

    def __init__(self, device: str, folder: Path, jobs: int | None = None) -> None:
        self.device = pipeline.resolve_device(device)
        self.folder = folder
        self.jobs = jobs or (JOBS_ON_GPU if self.device.type == "cuda" else 1)
        if self.jobs > 1:
            # Threads that only wait for a GPU take turns with those that compute.
            sys.setswitchinterval(5e-4)

    @cached_property
    def dataset(self) -> data.Dataset:
        return data.load("mnist")

    @cached_property
    def train(self) -> data.Split:
        return self.dataset.train.to(self.device)

    @cached_property
    def validation(self) -> data.Batches:
        split = self.dataset.validation.to(self.device)
        return data.Batches(split.images, split.labels, EVALUATION_BATCH)

    @cached_property
    def test(self) -> data.Batches:
        """On a CPU, as anyone can repeat it."""
        return data.Batches(self.dataset.test.images, self.dataset.test.labels, EVALUATION_BATCH)

    def batches(self, batch_size: int, seed: int) -> data.Batches:
        return data.Batches(self.train.images, self.train.labels, batch_size, shuffle=True, seed=seed)

    def pretrained(self, model: str, seed: int) -> nn.Module:
        """The network with the weights that `pretrain` left."""
        network = pipeline.build_seeded(model, seed)
        network.load_state_dict(load_file(self._weights(model, seed)))
        return network

    def pretrain(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Train, by the recipe `l2`, the networks that are not there yet."""
        missing = [(model, seed) for model, seed in sorted(set(wanted)) if not self._weights(model, seed).exists()]
        networks = [pipeline.build_seeded(model, seed).to(self.device) for model, seed in missing]
        settings = recipe("l2")

        def train(network: nn.Module, key: tuple[str, int], watcher: Watcher) -> str:
            batches = self.batches(settings.batch_size, key[1])
            fit(network, batches, settings.pretraining, n_data=count_examples(batches), watcher=watcher)
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.cpu() for name, tensor in network.state_dict().items()}, self._weights(*key))
            return f"{key[0]} seed {key[1]}: {100 * evaluate(network, self.validation):.2f} % on validation"

        epochs = sum(phase.epochs for phase in settings.pretraining)
        tasks = [
            Task(lambda watcher, n=network, k=key: train(n, k, watcher), epochs)
            for network, key in zip(networks, missing, strict=True)
        ]
        self.all_of("pretraining", tasks)

    def compress(self, run: Run, watcher: Watcher) -> Result:
        return pipeline.compress(
            self.pretrained(run.model, run.seed),
            self.batches(run.recipe.batch_size, run.seed),
            val_loader=self.validation,
            recipe=run.recipe,
            seed=run.seed,
            device=self.device,
            watcher=watcher,
        )

    def record(self, experiment: str, runs: Sequence[Run]) -> float:
        """Do the runs that have no record yet; returns the seconds that took."""
        missing = [run for run in runs if not (RESULTS / experiment / run.name / "result.json").exists()]
        self.pretrain((run.model, run.seed) for run in missing)

        def task(run: Run, watcher: Watcher) -> str:
            result = self.compress(run, watcher)
            figures = file_figures(result.network().cpu(), result.blob, self.test) | {
                "model": run.model,
                "paper_bytes": paper_bytes(result, run.model),
                "runs_at_once": self.jobs,
            }
            write_record(RESULTS / experiment / run.name, result, figures)
            return (
                f"{run.name}: {100 * figures['accuracy']:.2f} %, {figures['bytes']:,} bytes, {figures['ratio']:.0f}×, "
                f"{4 * figures['params'] / figures['paper_bytes']:.0f}× in the paper's accounting"
            )

        # The longest first: none is left alone at the end.
        ordered = sorted(missing, key=lambda run: -run.epochs)
        return self.all_of(experiment, [Task(lambda watcher, r=run: task(r, watcher), run.epochs) for run in ordered])

    def all_of(self, title: str, tasks: Sequence["Task"]) -> float:
        """Do all, `jobs` at once, with a progress bar; what fails is told, and the others go on."""
        if not tasks:
            return 0.0
        began = time.perf_counter()
        failures: list[str] = []
        console = Console(stderr=True, soft_wrap=True)
        with Progress(*Progress.get_default_columns(), console=console) as progress:
            bar = progress.add_task(title, total=sum(task.epochs for task in tasks))

            def work(task: Task) -> None:
                try:
                    line = task.work(_Advance(lambda: progress.advance(bar)))
                    console.print(f"[{time.perf_counter() - began:.0f} s] {line}", markup=False, highlight=False)
                except BayeszipError as error:
                    failures.append(str(error))
                    console.print(f"failed: {error}", markup=False, highlight=False)

            with ThreadPoolExecutor(self.jobs) as executor:
                list(executor.map(work, tasks))
        if failures:
            raise SystemExit(f"{title}: {len(failures)} of {len(tasks)} failed; run again to repeat them")
        return time.perf_counter() - began

    def _weights(self, model: str, seed: int) -> Path:
        return self.folder / f"{model}-seed-{seed}.safetensors"


@dataclass(frozen=True)
class Task:
    """Something to do with a watcher, that long."""

    work: Callable[[Watcher], str]
    epochs: int


class _Advance(Watcher):
    """Moves a progress bar on after each epoch; threads take turns at it."""

    _turn = Lock()

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance

    def on_epoch(self, *epoch: Any) -> None:
        with self._turn:
            self._advance()


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


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0")
    options.add_argument("--only", default="", help="only runs whose name contains this")
    options.add_argument("--jobs", type=int, default=None, help="runs at once; by default 8 on a GPU, else 1")
    options.add_argument(
        "--pretrained", type=Path, default=RESULTS / "pretrained", help="where pretrained networks are"
    )
    options.add_argument("--epochs-scale", type=float, default=1.0, help="less than 1 for a trial")
    return options
