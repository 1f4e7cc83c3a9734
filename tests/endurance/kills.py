"""Kills short runs with SIGKILL at random moments, resumes them until they end, and compares with runs left alone.

    python tests/endurance/kills.py [--runs 50] [--kills 200] [--seed 0] [--no-report]

Every run is of another kind and seed: networks, loaders, recipes, intervals of checkpoints, the library and the command
line take turns. It is killed about as often as its share of `--kills`; then it must end, with a file equal bit for bit
to that of the run nobody killed, and with the same history. After each kill whatever is visible in its folders must be
whole. Figures go to REPORT.md and report.json beside this file.

Torch is imported once: runs are forks of this process, which itself never trains.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayeszip
from bayeszip import cli, codec
from bayeszip.errors import CheckpointError
from bayeszip.files import write_atomically
from bayeszip.fitting import ResidentBatches, Watcher
from bayeszip.fitting.checkpoint import read_checkpoint
from bayeszip.fitting.keeper import Checkpointing
from bayeszip.recipe import recipe

HERE = Path(__file__).parent
QUICK = recipe("quick").override("epochs_scale=0.05", "all.compact_every=1", "mixture.components=5", "all.tau1=0.3")
INTERVALS = ("1steps", "3steps", "1epochs", "0.05s")


class Silent(Watcher):
    """Displays nothing."""

    def on_warning(self, message: str) -> None:
        print("warning:", message, file=sys.stderr)


def points(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(160, 12, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def pictures(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = points(seed)
    return inputs[:, :9].reshape(-1, 1, 3, 3).repeat(1, 1, 3, 3), targets


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(150, 3))


def resident(data: tuple[torch.Tensor, torch.Tensor], seed: int) -> ResidentBatches:
    return ResidentBatches(*data, 32, shuffle=True, seed=seed)


def loader(data: tuple[torch.Tensor, torch.Tensor], seed: int) -> DataLoader:
    return DataLoader(TensorDataset(*data), 32, shuffle=True, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a run is made."""

    name: str
    network: Callable[[], nn.Module] = dense
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = points
    batches: Callable = resident
    recipe: bayeszip.Recipe = QUICK
    options: dict = dataclasses.field(default_factory=dict)

    def run(self, seed: int, folder: Path, every: str, **_: object) -> dict:
        torch.manual_seed(seed)
        result = bayeszip.compress(
            self.network(), self.batches(self.data(seed), seed), val_loader=[self.data(seed + 1)], recipe=self.recipe,
            seed=seed, device="cpu", pretrain=True, watcher=Silent(), resume=True,
            checkpoints=Checkpointing(folder / "checkpoints", every), **self.options,
        )  # fmt: skip
        result.save(folder / "net.bayz")
        history = result.fit.history if result.fit is not None else ()
        return {"history": [_timeless(dataclasses.asdict(stats)) for stats in history]}


class CommandLine:
    """LeNet-300-100 on a small data set in IDX files, as a user would compress it."""

    name = "command line"

    def run(self, seed: int, folder: Path, every: str, idx: Path) -> dict:
        arguments = [
            "compress", "lenet-300-100", "--data", f"idx:{idx}", "--recipe", "quick", "--seed", str(seed), "--resume",
            "--set", "epochs_scale=0.02", "--set", "batch_size=60", "--set", "all.tau1=0.01", "--run", str(folder),
            "--checkpoint-every", every, "--device", "cpu", "-o", str(folder / "net.bayz"),
        ]  # fmt: skip
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            cli.app(arguments, standalone_mode=False)
        record = json.loads((folder / "result.json").read_text())
        return {"history": [_timeless(stats) for stats in record["history"]]}


KINDS = (
    Kind("dense"),
    Kind("BatchNorm, Dropout, DataLoader", normalized, batches=loader),
    Kind("convolutional", convolutional, pictures),
    Kind("paper's recipe", recipe=recipe("paper-vd+sws").override("epochs_scale=0.02", "all.rate_theta=0.003")),
    Kind("towards 400 bytes", normalized, options={"max_bytes": 400}),
    CommandLine(),
)


def _timeless(stats: dict) -> dict:
    """Without what depends on the clock: times, and for which epochs there was time to measure bytes."""
    return {name: value for name, value in stats.items() if name not in ("seconds", "bytes")}


def write_idx(folder: Path) -> Path:
    """A data set of 10 classes that a stripe decides."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part, count in (("train", 660), ("t10k", 60)):
        labels = draw.integers(0, 10, count)
        images = draw.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 150
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return folder


def warm_up() -> None:
    """Load what children would each load anew; without a backward pass, after which torch can't be forked."""
    packed = bayeszip.pack(convolutional(), example_inputs=(pictures(0)[0],))
    codec.decode(packed.blob)
    from bayeszip.variational import Divergence, MixturePrior, Weighed, regularizer, to_variational, variational_weights

    network = dense()
    to_variational(network)
    with torch.no_grad():
        network.train()(points(0)[0])
        regularizer(
            [Weighed(Divergence(), 1.0), Weighed(MixturePrior(5, 0.1), 0.1)],
            tuple(variational_weights(network)),
            n_data=10,
        )


def start(kind: Kind | CommandLine, seed: int, folder: Path, every: str, idx: Path) -> int:
    """A process that runs until it is over, and then leaves `outcome.json`."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        # Where it says why, if it fails.
        os.dup2(os.open(folder / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        outcome = kind.run(seed, folder, every, idx=idx)
        outcome["sha256"] = hashlib.sha256((folder / "net.bayz").read_bytes()).hexdigest()
        write_atomically(folder / "outcome.json", json.dumps(outcome).encode())
        status = 0
    except BaseException as error:  # whatever it is, the parent must hear of it
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def wait(child: int, seconds: float | None) -> int | None:
    """The status of a process that ended within so many seconds; None: it goes on."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if done:
            return status
        if end is not None and time.monotonic() >= end:
            return None
        time.sleep(0.0005)


@dataclasses.dataclass
class Figures:
    """What happened."""

    runs: int = 0
    kills: int = 0
    #: Where the newest checkpoint stood at the moment of a kill.
    during: Counter = dataclasses.field(default_factory=Counter)
    kinds: Counter = dataclasses.field(default_factory=Counter)
    #: Kills that left a temporary file, which nobody sees.
    in_a_write: int = 0
    checkpoints_read: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def as_dict(self) -> dict:
        return {**vars(self), "during": dict(sorted(self.during.items())), "kinds": dict(self.kinds)}


def visible(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def inspect(folder: Path, figures: Figures, where: str) -> None:
    """After a kill: every file that can be seen is whole."""
    newest = None
    for path in sorted(visible(folder)):
        try:
            if path.suffix == ".safetensors":
                newest = read_checkpoint(path).state
                figures.checkpoints_read += 1
            elif path.suffix == ".bayz":
                codec.decode(path.read_bytes())
            elif path.suffix == ".json":
                json.loads(path.read_text())
        except (CheckpointError, bayeszip.BayeszipError, ValueError) as error:
            figures.faults.append(f"{where}: {path.name} is not whole: {error}")
    figures.in_a_write += any(path.suffix == ".tmp" for path in folder.rglob(".*"))
    figures.during[_moment(newest)] += 1


def _moment(state: dict | None) -> str:
    if state is None:
        return "before the first checkpoint"
    if state["fitting"] is None:
        return "after the training"
    stage = ("pretraining", "compression", "closing")[min(len(state["results"]), 2)]
    phase = state["fitting"]["phase"]
    if stage != "compression":
        return stage
    return f"compression, phase {phase + 1}" if phase < 2 else "between compression and closing"


def endure(kind, seed: int, kills: int, root: Path, idx: Path, draw: random.Random, figures: Figures) -> None:
    """One run left alone, and its twin killed about so often."""
    # Each kind meets each interval.
    every = INTERVALS[(seed + seed // len(KINDS)) % len(INTERVALS)]
    where = f"{kind.name}, seed {seed}, {every}"
    alone, twin = root / f"{seed}-alone", root / f"{seed}-killed"
    for folder in (alone, twin):
        folder.mkdir()
    began = time.monotonic()
    if wait(start(kind, seed, alone, every, idx), None) != 0:
        figures.faults.append(f"{where}: fails by itself: {(alone / 'stderr.txt').read_text()[-300:]}")
        return
    lasts = time.monotonic() - began
    figures.runs += 1
    figures.kinds[kind.name] += 1
    for _ in range(kills):
        child = start(kind, seed, twin, every, idx)
        status = wait(child, draw.uniform(0, 1.6 * lasts / kills + 0.05 * lasts))
        if status is None:
            os.kill(child, signal.SIGKILL)
            status = wait(child, None)
        if status == signal.SIGKILL:
            figures.kills += 1
            inspect(twin, figures, where)
        elif status != 0:
            figures.faults.append(f"{where}: can't be resumed: {(twin / 'stderr.txt').read_text()[-300:]}")
            return
        else:
            break
    if not (twin / "outcome.json").exists() and wait(start(kind, seed, twin, every, idx), None) != 0:
        figures.faults.append(f"{where}: can't be resumed: {(twin / 'stderr.txt').read_text()[-300:]}")
        return
    for name in ("outcome.json", "net.bayz"):
        if (alone / name).read_bytes() != (twin / name).read_bytes():
            figures.faults.append(f"{where}: another {name} than that of the run left alone")


def campaign(runs: int, kills: int, seed: int) -> Figures:
    """At least so many runs and kills."""
    draw, figures = random.Random(seed), Figures()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        idx = write_idx(root / "idx")
        number = 0
        while figures.runs < runs or figures.kills < kills:
            missing = -(-(kills - figures.kills) // max(1, runs - figures.runs))
            endure(KINDS[number % len(KINDS)], number, max(1, missing) + 1, root, idx, draw, figures)
            if figures.faults:
                break
            number += 1
            print(f"\r{figures.runs} runs, {figures.kills} kills", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures


def report(figures: Figures, seconds: float) -> None:
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    data = {"machine": machine, "seconds": round(seconds), **figures.as_dict()}
    (HERE / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    moments = "\n".join(f"| {name} | {count} |" for name, count in sorted(figures.during.items()))
    kinds = ", ".join(f"{name} ({count})" for name, count in figures.kinds.items())
    outcome = "all ended with the file, bit for bit, and the history of the run nobody killed"
    if figures.faults:
        outcome = "faults:\n" + "\n".join(f"- {fault}" for fault in figures.faults)
    (HERE / "REPORT.md").write_text(
        f"""# Endurance report

Written by `python tests/endurance/kills.py`; don't edit. Machine: {machine}; {seconds / 60:.0f} minutes on one core.

{figures.runs} runs, killed {figures.kills} times by SIGKILL at random moments and resumed each time: {outcome}.

- Runs: {kinds}; checkpoints each {", ".join(INTERVALS)} in turn.
- After every kill all files that could be seen were read: {figures.checkpoints_read} checkpoints, none of them broken.
- {figures.in_a_write} kills hit a write, and left a hidden temporary file that the next process removed.

| where the newest checkpoint stood at a kill | kills |
|---|---:|
{moments}
"""
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-report", action="store_true", help="print the figures as JSON instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    began = time.monotonic()
    figures = campaign(arguments.runs, arguments.kills, arguments.seed)
    if arguments.no_report:
        print(json.dumps(figures.as_dict()))
    else:
        report(figures, time.monotonic() - began)
    for fault in figures.faults:
        print(fault, file=sys.stderr)
    return 1 if figures.faults else 0


if __name__ == "__main__":
    sys.exit(main())
