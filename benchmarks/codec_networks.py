"""Trains the networks that the codec's table measures, beside those of results/; writes benchmarks/networks/.

    python benchmarks/codec_networks.py [--device cuda] [--only lenet-5] [--epochs-scale 1] [--output FOLDER]

Sparse variational dropout alone, and 16 shared values fitted to the weights afterwards: networks that were not trained
for shared values. Each takes a few minutes of a GPU.
"""

import argparse
from pathlib import Path

from bayeszip import compressing, models
from bayeszip.devices import resolve_device
from bayeszip.loaders import load_data
from bayeszip.recipe import recipe

HERE = Path(__file__).parent
#: name → network and strength τ₁; all with seed 0
NETWORKS = {
    "lenet-300-100-a": ("lenet-300-100", 1.0),
    "lenet-300-100-b": ("lenet-300-100", 2.0),
    "lenet-5": ("lenet-5", 1.0),
}


def train(network_name: str, tau1: float, device_name: str, epochs_scale: float) -> bytes:
    settings = recipe("vd").override(f"all.tau1={tau1}", f"epochs_scale={epochs_scale}", "quantization.components=16")
    device = resolve_device(device_name)
    loaders = load_data("mnist", batch_size=settings.batch_size, seed=0, device=device)
    network = models.build_seeded(network_name, 0)
    result = compressing.compress(
        network, loaders.train, val_loader=loaders.validation, recipe=settings, seed=0, device=device, pretrain=True
    )
    print(f"{network_name}: {100 * (result.accuracy or 0):.2f} % right on validation, {result.bytes:,} B", flush=True)
    return result.blob


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", choices=NETWORKS, nargs="+", default=list(NETWORKS))
    parser.add_argument("--epochs-scale", type=float, default=1.0)
    parser.add_argument("--output", type=Path, default=HERE / "networks")
    arguments = parser.parse_args()
    for name in arguments.only:
        blob = train(*NETWORKS[name], arguments.device, arguments.epochs_scale)
        (arguments.output / f"{name}.bayz").write_bytes(blob)


if __name__ == "__main__":
    main()
