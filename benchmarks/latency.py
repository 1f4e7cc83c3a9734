"""Latency of loaded networks over the originals: torch and onnxruntime, batch 1 and 64, one thread.

    python benchmarks/latency.py [FILE.bayz …] [-o benchmarks/latency.json]

Files are of built-in networks. Without any, a LeNet-5 of the paper's table is measured, and where they are the first
and the last headline of ResNet-20 and VGG-16 in results/frontier, and networks of results/parts with the prior on units
and without. The original is the built-in network as a user has it:
in torch its own class in eval mode, in onnxruntime what torch's exporter makes of it. With `-o` the figures are written
as JSON: `benchmarks/latency.json` is what RESULTS.md shows.
"""

import argparse
import io
import json
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from bayeszip import loading, models
from bayeszip.experiments.curves import CURVES, UNTOUCHED
from bayeszip.experiments.parts import ABLATED
from bayeszip.experiments.records import file_of, read
from bayeszip.graph.onnx import to_onnx

ROOT = Path(__file__).parents[1]
BATCHES = (1, 64)
WARM_UP, ROUNDS = 5, 25


@dataclass(frozen=True)
class Row:
    """Milliseconds of the original and of the loaded network, in one runtime at one size of batch."""

    file: str
    network: str
    runtime: str
    batch: int
    original_ms: float
    loaded_ms: float
    original_parameters: int
    loaded_parameters: int
    #: Multiplications of one image's weighted layers.
    original_macs: int
    loaded_macs: int


def default_files() -> list[Path]:
    """The first and the last headline of ResNet-20 and of VGG-16, a LeNet-5, and what the prior on units makes of
    networks beside none of the parts: as far as they are there."""
    parts = [
        f"{ablated.model}-tau1={ablated.strengths[0]:g}-{part}-{ablated.seeds[0]}"
        for ablated in ABLATED
        for part in ("none", "groups")
    ]
    headlines = [path for model in ("resnet-20", "vgg-16") for path in _headlines(model)]
    return [ROOT / "results" / "table" / "lenet-5-vd+sws-10.bayz", *headlines, *_held("parts", parts)]


def _headlines(model: str) -> list[Path]:
    """Two of its first curve with augmentation, and of the first seed, that have any."""
    for curve in (curve for curve in CURVES if curve.model == model and curve.augmented):
        quoted = [point.name for point in curve.points() if point.is_headline]
        for seed in UNTOUCHED:
            held = _held("frontier", [f"{name}-{seed}" for name in quoted])
            if held:
                return list(dict.fromkeys((held[0], held[-1])))
    return []


def _held(experiment: str, names: list[str]) -> list[Path]:
    """The files of those runs that have a record."""
    folder = ROOT / "results" / experiment
    records = read(folder)
    return [file_of(folder, name) for name in names if name in records]


def network_of(path: Path) -> str:
    """The built-in network that a file is named after.

    >>> network_of(Path("resnet-20-4-augmented-tau1=0.2-10.bayz"))
    'resnet-20-4'
    """
    known = [name for name in models.BUILT_IN if path.name.startswith(f"{name}-")]
    if not known:
        raise SystemExit(f"{path.name} is not named after a built-in network: {', '.join(models.BUILT_IN)}")
    return max(known, key=len)


def rows_of(path: Path) -> list[Row]:
    """What a file's network takes, beside what its original does."""
    name = network_of(path)
    shape = models.build(name).input_shape
    original, loaded = models.build_seeded(name, 0).eval(), loading.load(path).eval()
    example = torch.randn(2, *shape)
    sessions = [_session(exported(original, example)), _session(to_onnx(loading.read_model(path)))]
    about = [count(network) for network in (original, loaded)], [macs(network, shape) for network in (original, loaded)]
    rows = []
    for batch in BATCHES:
        images = torch.randn(batch, *shape)
        with torch.no_grad():
            eager = in_turns([partial(network, images) for network in (original, loaded)])
        feed = images.numpy()
        runtime = in_turns([partial(each.run, None, {each.get_inputs()[0].name: feed}) for each in sessions])
        for kind, times in (("torch", eager), ("onnxruntime", runtime)):
            rows.append(Row(path.name, name, kind, batch, *times, *about[0], *about[1]))
    return rows


def in_turns(runs: list[Callable[[], object]]) -> list[float]:
    """The median milliseconds of each; in turns, so that whatever else the machine does falls on all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(WARM_UP + ROUNDS):
        for run, held in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if number >= WARM_UP:
                held.append(time.perf_counter() - start)
    return [1e3 * float(np.median(held)) for held in times]


def exported(network: nn.Module, example: Tensor) -> bytes:
    """The network as torch's own exporter writes it, for any number of images."""
    held = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network, (example,), held, dynamo=False, input_names=["images"], dynamic_axes={"images": {0: "n"}}
        )
    return held.getvalue()


def _session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def macs(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Multiplications of convolutions and linear layers for one image, seen by torch's own counter of operations."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(1, *shape))
    return counter.get_total_flops() // 2


def print_table(rows: list[Row]) -> None:
    for path in dict.fromkeys(row.file for row in rows):
        own = [row for row in rows if row.file == path]
        print(f"{path}: {own[0].original_parameters:,} → {own[0].loaded_parameters:,} parameters", end=", ")
        print(f"{own[0].original_macs:,} → {own[0].loaded_macs:,} multiplications")
        for row in own:
            times = f"{row.original_ms:9.3f} → {row.loaded_ms:8.3f} ms"
            factor = row.original_ms / row.loaded_ms
            print(f"{row.runtime:>14}, batch {row.batch:3}: {times}  {factor:6.2f} times faster")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.bayz")
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [row for path in chosen.files or default_files() for row in rows_of(path)]
    figures = {
        "machine": f"{platform.machine()}, one thread",
        "torch": str(torch.__version__),
        "onnxruntime": onnxruntime.__version__,
        "rows": [asdict(row) for row in rows],
    }
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(figures, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
