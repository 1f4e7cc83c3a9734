"""NNCodec's curve: the pretrained networks of the frontier, coded without training, by its quantization parameter.

    python benchmarks/nncodec_curve.py DIR/pretrained --peer /tmp/nncodec/bin/python [--data cifar10:FOLDER]
        [--only resnet-20 …] [--qp -38 -34 …] [-o benchmarks/nncodec.json]

`DIR/pretrained` is what `bayeszip reproduce frontier --again DIR` leaves: the very networks that our curves begin from,
those of the first seed. Instead, MODEL=FILE names a network that was pretrained elsewhere, and may be repeated. The
peer is NNCodec 2.1.3 in a virtual environment of its own; see codec_peer.py for how to make it, and pack_peer.py for
what is asked of it. Bytes are those of the whole bitstream, which has no graph; accuracies are those of the decoded
weights. What is written is what RESULTS.md and the pictures show; networks that are not measured stay in it as they
are.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayeszip import models
from bayeszip.devices import resolve_device
from bayeszip.experiments import EXPERIMENTS
from bayeszip.experiments.curves import CURVES, NETWORKS
from bayeszip.experiments.runner import Task
from bayeszip.fitting import evaluate
from bayeszip.loaders import load_data, load_test, load_weights

HERE = Path(__file__).parent
#: From fine to coarse: four further on, the grid is twice as wide.
STEPS = (-38, -34, -30, -28, -26, -24, -22, -20, -18, -16)
#: Norms and biases, which it codes finely by default.
NONWEIGHT = (-75, -50)


def weights_of(model: str, folder: Path) -> Path | None:
    """The pretrained network that the model's curve begins from, the augmented one first; None: it is not there."""
    curves = sorted((curve for curve in CURVES if curve.model == model), key=lambda curve: not curve.augmented)
    for curve in curves:
        run = EXPERIMENTS["frontier"].runs(only=f"{curve.variants()[0].name}-")[0]
        path = Task(run, folder.parent / "frontier", "cpu", run.variant.data).weights
        if (folder / path.name).exists():
            return folder / path.name
    return None


def options(steps: list[int]) -> list[dict[str, Any]]:
    """What NNCodec is told, a point each."""
    return [
        {"qp": step, "nonweight_qp": nonweight, "use_dq": True, "param_opt": True, "row_skipping": True}
        for step in steps
        for nonweight in NONWEIGHT
    ]


def coded(python: str, state: dict[str, np.ndarray], told: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """For each point the size of the bitstream, and what it decodes to."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        np.savez(folder / "tensors.npz", **state)
        (folder / "options.json").write_text(json.dumps(told))
        command = [python, HERE / "pack_peer.py", folder / "tensors.npz", folder / "options.json", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if run.returncode:
            raise SystemExit(f"NNCodec failed: {run.stderr.strip().splitlines()[-1:]}")
        sizes = json.loads(run.stdout.strip().splitlines()[-1])
        return [(size, dict(np.load(folder / f"{number}.npz"))) for number, size in enumerate(sizes)]


def networks(places: list[str], only: list[str]) -> dict[str, Path]:
    """The file of each network that is there: as MODEL=FILE says, or in the folder that is given."""
    named = {model: Path(path) for model, equals, path in (place.partition("=") for place in places) if equals}
    for folder in (Path(place) for place in places if "=" not in place):
        for model in only:
            path = weights_of(model, folder)
            if path is None:
                print(f"{folder} has no pretrained {model}; left out")
            else:
                named.setdefault(model, path)
    return {model: named[model] for model in only if model in named}


def points(model: str, path: Path, python: str, data: str, steps: list[int]) -> list[dict[str, Any]]:
    """The model's points, on the validation and on the test images."""
    device = resolve_device("auto")
    network = models.build(model)
    load_weights(network, path)
    network.to(device)
    validation = load_data(data, batch_size=256, seed=0, device=device).validation
    test = load_test(data, device=device).loader
    held = {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
    told = options(steps)
    found = []
    for how, (size, decoded) in zip(
        told, coded(python, {name: tensor.cpu().numpy() for name, tensor in held.items()}, told), strict=True
    ):
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(torch.from_numpy(decoded[name].reshape(tensor.shape)))
        figures = {"accuracy": evaluate(network, test), "validation_accuracy": evaluate(network, validation)}
        about = {"model": model, "weights": path.stem, "qp": how["qp"], "nonweight_qp": how["nonweight_qp"]}
        found.append({**about, "bytes": size, **figures})
        print(f"{path.stem}: qp {how['qp']}, {size:,} bytes, {100 * figures['accuracy']:.2f} %", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", metavar="FOLDER|MODEL=FILE", help="of pretrained networks")
    parser.add_argument("--peer", required=True, help="the Python of NNCodec's virtual environment")
    parser.add_argument("--data", default="cifar10", help="where CIFAR-10 is: cifar10:FOLDER")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--qp", nargs="+", type=int, default=list(STEPS))
    parser.add_argument("-o", "--output", type=Path, default=HERE / "nncodec.json")
    chosen = parser.parse_args(arguments)
    rows = json.loads(chosen.output.read_text())["rows"] if chosen.output.exists() else []
    for model, path in networks(chosen.places, chosen.only).items():
        data = chosen.data if NETWORKS[model].data == "cifar10" else NETWORKS[model].data
        found = points(model, path, chosen.peer, data, chosen.qp)
        rows = [row for row in rows if row["model"] != model] + found
        chosen.output.write_text(json.dumps({"version": "NNCodec 2.1.3", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
