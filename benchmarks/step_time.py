"""Time and memory of a training step: plain, with Gaussian weights (VD), with the mixture prior (VD+SWS), and with all.

All rows are steps of the real training loop on LeNet-300-100, timed in turns within one process, so that whatever else
the machine does falls on all of them; peak memory is that of a process of its own for each row.

    python benchmarks/step_time.py [--rounds 40] [--threads 2] [--json]
"""

import argparse
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bayeszip.ending import prices_of_zeros
from bayeszip.fitting import Phase, Watcher, fit
from bayeszip.models import LeNet300
from bayeszip.variational import Divergence, GroupPrior, MixturePrior, Rate, Term, VariationalWeight, to_variational
from bayeszip.variational.distributions import log_mixture
from bayeszip.variational.kernels import fill_normal

BATCH_SIZE, STEPS_AN_EPOCH, N_DATA = 256, 6, 55_000
BATCHES = [(torch.rand(BATCH_SIZE, 1, 28, 28), torch.arange(BATCH_SIZE) % 10)] * STEPS_AN_EPOCH

VD = Phase(name="vd", epochs=2, tau1=1.0)
SWS = Phase(name="vd+sws", epochs=2, tau1=1.0, tau2=0.02)


class NaivePrior(MixturePrior):
    """Every component at every weight, by autograd: D × K in time and in memory."""

    def add_gradients(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        theta = torch.cat([weight.theta.flatten() for weight in weights])
        value = log_mixture(theta, *self.components()).sum() * -tau
        hyper_cost = self.log_hyper_prior() * -tau
        (value + hyper_cost).backward()
        return value.detach(), hyper_cost.detach()


class Stopwatch(Watcher):
    """Seconds of each step of the second epoch; the first warms up, and compacts at its end."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_batch(self, phase: Phase, done: float) -> None:
        if done >= 0.5:
            self.stamps.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.stamps)]


class Row:
    """One kind of step, ready to be taken."""

    def __init__(self, name: str) -> None:
        self.network: nn.Module = LeNet300()
        self.terms: tuple[Term, ...] = ()
        self.phase = Phase(name="plain", epochs=2, noise=False)
        if name == "plain":
            return
        to_variational(self.network)
        self.phase = VD if name == "VD" else SWS
        self.terms = (Divergence(),)
        if name.startswith("VD+SWS"):
            kind = NaivePrior if "naive" in name else MixturePrior
            self.terms = (Divergence(), kind(17, weight_std=0.04))
        if "all terms" in name:
            self.terms += (GroupPrior(self.network), Rate.start(self.network, prices_of_zeros))
            self.phase = replace(SWS, terms={"groups": {"tau": 1.0}, "rate": {"tau": 1.0}})
        if "half" in name:
            self.phase = replace(SWS, compact_every=1)
            _prune_every_other(self.network)

    def take_steps(self) -> list[float]:
        stopwatch = Stopwatch()
        fit(self.network, BATCHES, (self.phase,), n_data=N_DATA, terms=self.terms, watcher=stopwatch)
        return stopwatch.seconds()


ROWS = ("plain", "VD", "VD+SWS", "VD+SWS, all terms", "VD+SWS, half the units dead", "VD+SWS, naive mixture")


@torch.no_grad()
def _prune_every_other(network: nn.Module) -> None:
    """Inputs and hidden units, by a variance that drowns the mean."""
    for layer in (network.fc1, network.fc2, network.fc3):
        layer.weight_log_sigma2[:, ::2] = 10.0
    for layer in (network.fc1, network.fc2):
        layer.weight_log_sigma2[::2] = 10.0
        layer.bias_log_sigma2[::2] = 10.0


@dataclass(frozen=True)
class Figures:
    name: str
    median_ms: float
    fastest_ms: float
    ratio: float
    peak_mb: float


def measure(rounds: int, threads: int) -> list[Figures]:
    rows = {name: Row(name) for name in ROWS}
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    for number in range(rounds + 1):
        for name, row in rows.items():
            steps = row.take_steps()
            if number:  # the first round compiles
                seconds[name] += steps
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        Figures(name, 1e3 * median[name], 1e3 * min(times), median[name] / median["plain"], peak_mb(name, threads))
        for name, times in seconds.items()
    ]


def peak_mb(name: str, threads: int) -> float:
    """Peak resident memory of a new process that takes these steps alone."""
    command = [sys.executable, __file__, "--threads", str(threads), "--memory-of", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_memory(name: str) -> None:
    fill_normal(np.empty(4, np.float32), np.uint64(0))  # the compiler itself, 60 MB, is nobody's
    Row(name).take_steps()
    status = Path("/proc/self/status")
    if status.exists():  # Linux; its ru_maxrss would count what the process inherited from the one that started it
        kilobytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        print(int(kilobytes) * 1024 / 1e6)
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def print_table(figures: list[Figures], threads: int) -> None:
    title = f"A step of LeNet-300-100, batch {BATCH_SIZE}, {threads} threads"
    table = Table("step", title=title, caption="memory: the whole process; in brackets: more than the plain step's")
    for heading in ("median ms", "fastest ms", "over plain", "peak MB"):
        table.add_column(heading, justify="right")
    for row in figures:
        memory = f"{row.peak_mb:.0f} ({row.peak_mb - figures[0].peak_mb:+.0f})"
        table.add_row(row.name, f"{row.median_ms:.2f}", f"{row.fastest_ms:.2f}", f"{row.ratio:.2f}×", memory)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each row, five timed steps each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--memory-of", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.memory_of:
        print_memory(arguments.memory_of)
        return
    figures = measure(arguments.rounds, arguments.threads)
    if arguments.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": arguments.threads}
        print(json.dumps({**machine, "batch_size": BATCH_SIZE, "rows": [asdict(row) for row in figures]}, indent=2))
    else:
        print_table(figures, arguments.threads)


if __name__ == "__main__":
    main()
