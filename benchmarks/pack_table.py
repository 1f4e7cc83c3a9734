"""`pack` beside NNCodec at equal weight error and at equal accuracy; writes pack.json and PACK.md beside this file.

    python benchmarks/pack_table.py --peer PYTHON [--cifar cifar10:FOLDER] [--add resnet-20=weights.safetensors …]
        [--only mixer …] [--way nncodec …] [--again] [--render]

Networks are those that pack_networks.py trains, and any that `--add` names. The peer is NNCodec 2.1.3 in a virtual
environment of its own (see codec_peer.py); of its options, those below are tried and the smallest file is taken. Both
are measured as whole files, on the same test images. What is in pack.json already is not measured again, unless by
--again; so a run that was broken off goes on where it was. --render makes the page anew from the figures.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

import bayeszip
from bayeszip import data, models
from bayeszip.fitting import Batch, ResidentBatches, evaluate
from pack_networks import FOLDER, NETWORKS, SEEN

HERE = Path(__file__).parent
#: NNCodec's steps are about 2^(qp/4).
STEPS = range(-32, -9, 2)
#: A step for other tensors than matrices as fine as by default, and one that costs less.
OTHERS = (-75, -40)
QUALITIES = (99, 98, 96, 93, 90, 86, 80, 72, 62, 50)
CALIBRATION = 1024
#: The errors, and the losses of accuracy in points, that files are compared at.
ERRORS = (0.05, 0.1, 0.2)
LOSSES = (0.3, 1.0)


@dataclass(frozen=True)
class Case:
    """A network with its weights, and images: for calibration from the training set, for accuracy from the test set."""

    name: str
    network: nn.Module
    example: torch.Tensor
    calibration: list[Batch]
    test: ResidentBatches


def case_of(name: str, weights: Path, cifar: str) -> Case:
    build, spec, _ = NETWORKS.get(name, (models.BUILT_IN.get(name), "cifar10", 0))
    spec = cifar if spec == "cifar10" else spec
    network = build()
    network.load_state_dict(load_file(weights))
    train, test = data.load_training(spec)[0], data.load_test(spec)
    calibration = [
        Batch(train.images[first : first + 128], train.labels[first : first + 128])
        for first in range(0, CALIBRATION, 128)
    ]
    return Case(
        name,
        network.eval(),
        train.images[:1],
        calibration,
        ResidentBatches(test.images, test.labels, 500),
    )


def ours(case: Case, calibrated: bool) -> list[dict]:
    """Files from fine to coarse, until little is left; then more where accuracy begins to be lost."""
    whole = evaluate(case.network, case.test)
    points = []
    for quality in QUALITIES:
        points.append(_packed(case, quality, calibrated))
        if points[-1]["accuracy"] < 0.8 * whole:
            break
    for loss in LOSSES:
        for _ in range(3):
            bounds = _between(points, whole - loss / 100, "quality")
            if bounds is not None:
                points.append(_packed(case, sum(bounds) / 2, calibrated))
    return points


def _packed(case: Case, quality: float, calibrated: bool) -> dict:
    calibration = case.calibration if calibrated else None
    result = bayeszip.pack(case.network, example_inputs=(case.example,), quality=quality, calibration=calibration)
    accuracy = evaluate(result.network(), case.test)
    return {"bytes": result.bytes, "error": result.moved, "accuracy": accuracy, "quality": quality}


def _between(points: list[dict], floor: float, key: str) -> tuple[float, float] | None:
    """Of the smallest file that is accurate enough and the next smaller one, what they were made with."""
    enough = [point for point in points if point["accuracy"] >= floor]
    if not enough:
        return None
    best = min(enough, key=lambda point: point["bytes"])
    smaller = [point for point in points if point["bytes"] < best["bytes"]]
    if not smaller:
        return None
    return best[key], max(smaller, key=lambda point: point["bytes"])[key]


def theirs(case: Case, python: str) -> list[dict]:
    """NNCodec's files at all options."""
    coarse = [
        {"qp": qp, "use_dq": dq, "nonweight_qp": other, "row_skipping": True}
        for qp in STEPS
        for dq, other in ((True, OTHERS[0]), (True, OTHERS[1]), (False, OTHERS[1]))
    ]
    points = _bitstreams(case, python, coarse)
    finer = {}
    for loss in LOSSES:
        bounds = _between(points, evaluate(case.network, case.test) - loss / 100, "qp")
        for qp in range(int(min(bounds or (0, 0))) + 1, int(max(bounds or (0, 0)))):
            finer[qp] = {"qp": qp, "use_dq": True, "nonweight_qp": OTHERS[1], "row_skipping": True}
    return points + _bitstreams(case, python, list(finer.values()))


def _bitstreams(case: Case, python: str, options: list[dict]) -> list[dict]:
    state = case.network.state_dict()
    floats = {name: tensor.numpy() for name, tensor in state.items() if tensor.dtype == torch.float32}
    points = []
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "tensors.npz", **floats)
        (Path(folder) / "options.json").write_text(json.dumps(options))
        run = subprocess.run(
            [python, str(HERE / "pack_peer.py"), f"{folder}/tensors.npz", f"{folder}/options.json", folder],
            capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        for number, size in enumerate(json.loads(run.stdout.strip().splitlines()[-1])):
            with np.load(Path(folder) / f"{number}.npz") as decoded:
                points.append(options[number] | {"bytes": size} | _judged(case, dict(decoded)))
    return points


def _judged(case: Case, decoded: dict[str, np.ndarray]) -> dict:
    """The error of the matrices, and the accuracy, of what a bitstream decodes to."""
    state = {name: tensor.clone() for name, tensor in case.network.state_dict().items()}
    distance = size = 0.0
    for name, values in decoded.items():
        if state[name].dim() > 1:
            distance += float(np.square(values - state[name].numpy().astype(np.float64)).sum())
            size += float(np.square(state[name].numpy().astype(np.float64)).sum())
    before = {name: tensor.clone() for name, tensor in state.items()}
    case.network.load_state_dict(state | {name: torch.from_numpy(values) for name, values in decoded.items()})
    accuracy = evaluate(case.network, case.test)
    case.network.load_state_dict(before)
    return {"error": math.sqrt(distance / size), "accuracy": accuracy}


def at_error(points: list[dict], error: float) -> float | None:
    """Bytes at an error: between the files of the front, linear in log bytes over log error."""
    front = _front(points, "error", 1)
    for finer, coarser in pairwise(front):
        if finer["error"] <= error <= coarser["error"]:
            share = math.log(error / finer["error"]) / math.log(coarser["error"] / finer["error"])
            return finer["bytes"] * (coarser["bytes"] / finer["bytes"]) ** share
    return None


def at_accuracy(points: list[dict], accuracy: float) -> int | None:
    """The smallest file that is as accurate."""
    return min((point["bytes"] for point in points if point["accuracy"] >= accuracy), default=None)


def _front(points: list[dict], key: str, sign: int) -> list[dict]:
    """Those that no other is better than in both, from the largest file to the smallest."""
    chosen: list[dict] = []
    for point in sorted(points, key=lambda each: (each["bytes"], sign * each[key])):
        if not chosen or sign * point[key] < sign * chosen[-1][key]:
            chosen.append(point)
    return chosen[::-1]


def page(results: dict) -> str:
    """All figures as one page."""
    lines = ["# `pack` in figures", "", "Written by `python benchmarks/pack_table.py`; don't edit.", ""]
    lines += [f"Machine: {results['machine']}. Sizes in bytes, of whole files: ours hold the graph, too.", ""]
    lines += ["## At equal weight error", ""]
    lines += ["| network | error | **pack** | NNCodec | pack / NNCodec |", "| --- | --: | --: | --: | --: |"]
    complete = {name: found for name, found in results["networks"].items() if found.keys() >= {"pack", "nncodec"}}
    for name, found in complete.items():
        for error in ERRORS:
            lines += _row(name, f"{error:.0%}", at_error(found["pack"], error), at_error(found["nncodec"], error))
    lines += ["", "## At equal accuracy", ""]
    lines += ["| network | accuracy | **pack** | with calibration | NNCodec | pack / NNCodec | calibrated / NNCodec |"]
    lines += ["| --- | --: | --: | --: | --: | --: | --: |"]
    for name, found in complete.items():
        for loss in LOSSES:
            floor = found["accuracy"] - loss / 100
            sizes = [at_accuracy(found.get(way, []), floor) for way in ("pack", "calibrated", "nncodec")]
            label = f"{found['accuracy']:.2%} − {loss:g}"
            lines.append("| " + " | ".join([_named(name), label, *map(_count, sizes), *_against(sizes)]) + " |")
    return "\n".join([*lines, "", *_notes(), ""])


def _row(name: str, label: str, mine: float | None, other: float | None) -> list[str]:
    if mine is None or other is None:
        return []
    return [f"| {_named(name)} | {label} | **{mine:,.0f}** | {other:,.0f} | {mine / other - 1:+.1%} |"]


def _named(name: str) -> str:
    return f"{name} (seen)" if name in SEEN else name


def _count(size: float | None) -> str:
    return "–" if size is None else f"{size:,.0f}"


def _against(sizes: list[int | None]) -> list[str]:
    return ["–" if size is None or sizes[2] is None else f"{size / sizes[2] - 1:+.1%}" for size in sizes[:2]]


def _notes() -> list[str]:
    return [
        "Error: how far matrices and kernels moved, as a share of their size (root mean squares); sizes between two",
        "files are interpolated. Accuracy: the smallest file that loses at most so many points on all test images,",
        "picked on these very images on both sides.",
        "NNCodec 2.1.3: the best of all steps, with and without dependent quantization, with its default step for what",
        "is not a matrix and a coarser one. Calibration: 1,024 training images. Networks marked as seen were looked at",
        "while `pack` was written; no setting was chosen on the others.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the Python of NNCodec's virtual environment")
    parser.add_argument("--cifar", default="cifar10")
    parser.add_argument("--add", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--way", choices=("pack", "calibrated", "nncodec"), nargs="+")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    path = HERE / "pack.json"
    results = json.loads(path.read_text()) if path.exists() else {"networks": {}}
    files = {name: FOLDER / f"{name}.safetensors" for name in NETWORKS}
    files |= {name: Path(file) for name, _, file in (each.partition("=") for each in arguments.add)}
    ways = {
        "pack": lambda case: ours(case, False),
        "calibrated": lambda case: ours(case, True),
        "nncodec": lambda case: theirs(case, arguments.peer),
    }
    for name in () if arguments.render else arguments.only or files:
        done = set() if arguments.again else results["networks"].get(name, {}).keys()
        if not (wanted := [way for way in arguments.way or ways if way not in done]):
            continue
        case = case_of(name, files[name], arguments.cifar)
        accuracy = evaluate(case.network, case.test)
        for way in wanted:
            points = ways[way](case)
            # Read again: others may be at work on other networks.
            results = json.loads(path.read_text()) if path.exists() else {"networks": {}}
            found = results["networks"].setdefault(name, {})
            found |= {"accuracy": accuracy, way: points}
            results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores shared with other work"
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(name, way, len(points), flush=True)
    (HERE / "PACK.md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
