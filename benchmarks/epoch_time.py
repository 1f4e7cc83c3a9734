"""Epochs of ResNet-20 and VGG-16: plain training against VD, VD+SWS and all terms, in time and memory; fp32 and bf16.

Batches lie on the device (`resident`) or come from an iterable that hands over tensors of the device (`loader`). All
rows are epochs of the real training loop on made-up images of CIFAR-10's shape; the first epoch, in which steps are
recorded, is not timed. What is timed is a shorter epoch than CIFAR-10's 45,000 images; the table states what these
would take.

    python benchmarks/epoch_time.py [--batch 256] [--images 12800] [--seconds 150] [--device cuda] [-o epoch_time.json]

With `-o` the figures are written as JSON: `benchmarks/epoch_time.json` is what RESULTS.md shows. Rows of other networks
and precisions that the file has from the same device, torch, batch and images stay, so that these can be measured one
by one (`--networks resnet-20 --precisions bf16`).
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bayeszip import models
from bayeszip.devices import device_name, resolve_device
from bayeszip.ending import prices_of_zeros
from bayeszip.errors import BayeszipError
from bayeszip.fitting import Course, EpochStats, Fitting, Phase, ResidentBatches, Watcher, start_terms
from bayeszip.fitting.launch import make_engine
from bayeszip.variational import to_variational
from bayeszip.variational.groups import GroupSettings
from bayeszip.variational.rate import RateSettings

NETWORKS = ("resnet-20", "vgg-16")
PRECISIONS = ("no", "bf16")
FEEDS = ("resident", "loader")
#: How weights are trained; three epochs, of which the first warms up.
KINDS = {
    "plain": Phase(name="plain", epochs=3, noise=False, rate_theta=1e-3),
    "VD": Phase(name="VD", epochs=3, tau1=1.0),
    "VD+SWS": Phase(name="VD+SWS", epochs=3, tau1=1.0, tau2=0.02),
    "all terms": Phase(
        name="all", epochs=3, tau1=1.0, tau2=0.02, terms={"rate": RateSettings(0.5), "groups": GroupSettings(3.0)}
    ),
}
#: Images of CIFAR-10 that networks are trained on; the others are for validation.
CIFAR10 = 45_000
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """What an epoch takes; `failure` says why it was not measured."""

    network: str
    precision: str
    feed: str
    kind: str
    #: Of an epoch of 45,000 images.
    seconds: float = 0.0
    #: The most that tensors took at any moment, the data among them, and what the process held of the GPU.
    peak_gib: float | None = None
    held_gib: float | None = None
    failure: str = ""


class HandedOver:
    """A loader of somebody's own: tensors of the device, in the order in which they lie."""

    def __init__(self, images: Tensor, labels: Tensor, batch: int) -> None:
        self.batches = list(zip(images.split(batch), labels.split(batch), strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Clock(Watcher):
    """Keeps what each epoch took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.warnings: list[str] = []

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        self.seconds.append(stats.seconds)

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)


def measure(row: Row, device: torch.device, batch: int, images: int) -> Row:
    """The row with its figures."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        clock = _trained(row, device, batch, images)
    except (RuntimeError, BayeszipError) as error:  # out of memory, say: a row of the table, not the end of it
        return Row(row.network, row.precision, row.feed, row.kind, failure=str(error).partition("\n")[0][:80])
    return Row(
        row.network,
        row.precision,
        row.feed,
        row.kind,
        statistics.median(clock.seconds[1:]) * CIFAR10 / images,
        torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        torch.cuda.max_memory_reserved() / GIB if on_gpu else None,
        "; ".join(clock.warnings),
    )


def _trained(row: Row, device: torch.device, batch: int, images: int) -> Clock:
    torch.manual_seed(0)
    network: nn.Module = models.build(row.network)
    if row.kind != "plain":
        to_variational(network)
    network = network.to(device)
    if row.precision == "bf16":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pixels, labels = torch.randn(images, 3, 32, 32, device=device), torch.arange(images, device=device) % 10
    feed = ResidentBatches(pixels, labels, batch, shuffle=True) if row.feed == "resident" else None
    clock, phase = Clock(), KINDS[row.kind]
    Fitting(
        network,
        feed or HandedOver(pixels, labels, batch),
        (phase,),
        n_data=images,
        terms=start_terms(network, (phase,), {"rate": prices_of_zeros}),
        watcher=clock,
        engine=make_engine(device, mixed_precision=row.precision),
    ).run()
    return clock


def measured(
    device: torch.device, batch: int, images: int, seconds: float, networks: Sequence[str], precisions: Sequence[str]
) -> list[Row]:
    """All rows; none begins later than after so many seconds."""
    began, found = time.monotonic(), []
    for network, precision, feed, kind in itertools.product(networks, precisions, FEEDS, KINDS):
        row = Row(network, precision, feed, kind)
        if time.monotonic() - began > seconds:
            found.append(Row(network, precision, feed, kind, failure="out of time"))
        else:
            found.append(measure(row, device, batch, images))
    return found


def compared(rows: list[Row]) -> list[dict]:
    """Rows with what they are over: time and memory of plain training, and of resident batches."""
    held = {(row.network, row.precision, row.feed, row.kind): row for row in rows}

    def over(row: Row, other: Row, name: str) -> float | None:
        ours, theirs = getattr(row, name), getattr(other, name)
        return round(ours / theirs, 3) if ours and theirs else None

    return [
        asdict(row)
        | {
            "over_plain": over(row, held[row.network, row.precision, row.feed, "plain"], "seconds"),
            "over_resident": over(row, held[row.network, row.precision, "resident", row.kind], "seconds"),
            "memory_over_plain": over(row, held[row.network, row.precision, row.feed, "plain"], "peak_gib"),
        }
        for row in rows
    ]


def with_other_rows(figures: dict, path: Path) -> dict:
    """The figures, with rows of other networks and precisions that were measured alike and left in the file."""
    if not path.exists():
        return figures
    before = json.loads(path.read_text())
    if {**before, "rows": []} != {**figures, "rows": []}:
        return figures
    ours = {(row["network"], row["precision"]) for row in figures["rows"]}
    kept = [row for row in before["rows"] if (row["network"], row["precision"]) not in ours]
    return figures | {
        "rows": sorted(kept + figures["rows"], key=lambda row: (row["network"], PRECISIONS.index(row["precision"])))
    }


def print_table(figures: dict) -> None:
    title = f"An epoch of 45,000 images, batch {figures['batch']}, {figures['device']}, torch {figures['torch']}"
    table = Table("network", "precision", "batches", "training", title=title)
    for heading in ("seconds", "over plain", "over resident", "peak GiB", "held GiB", "over plain", "note"):
        table.add_column(heading, justify="right")
    for row in figures["rows"]:
        numbers = ("seconds", "over_plain", "over_resident", "peak_gib", "held_gib", "memory_over_plain")
        cells = ("–" if not row[name] else f"{row[name]:.2f}" for name in numbers)
        names = (row["network"], "fp32" if row["precision"] == "no" else row["precision"], row["feed"], row["kind"])
        table.add_row(*names, *cells, row["failure"])
    Console(width=150).print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=12_800, help="images of the epoch that is timed")
    parser.add_argument("--seconds", type=float, default=150, help="no row begins later than this")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, metavar="NAME")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS, metavar="TYPE")
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON")
    chosen = parser.parse_args(arguments)
    device = resolve_device(chosen.device)
    rows = measured(device, chosen.batch, chosen.images, chosen.seconds, chosen.networks, chosen.precisions)
    figures = {
        "device": device_name(device),
        "torch": str(torch.__version__),
        "batch": chosen.batch,
        "images": chosen.images,
        "rows": compared(rows),
    }
    if chosen.output is not None:
        kept = with_other_rows(figures, chosen.output)
        chosen.output.write_text(json.dumps(kept, indent=1) + "\n")
    print_table(figures)


if __name__ == "__main__":
    main()
