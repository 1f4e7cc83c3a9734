"""How small and how accurate does `quick` make LeNet-300-100, over seeds and over strengths τ₁?

    python experiments/quick.py [--device cuda] [--seeds 0 1 2] [--tau1 0.5 1 2]

Each run leaves a folder in results/quick; runs that are there already are not repeated. `experiments/render.py` turns
them into RESULTS.md and the figure of the README.
"""

import argparse
from pathlib import Path

from bayeszip import pipeline
from bayeszip.loaders import load_data
from bayeszip.recipe import recipe
from bayeszip.record import file_figures, write_record

RESULTS = Path(__file__).resolve().parents[1] / "results" / "quick"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tau1", type=float, nargs="+", default=[1.0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for tau1 in arguments.tau1:
        for seed in arguments.seeds:
            folder = arguments.results / f"lenet-300-100-tau1-{tau1:g}-seed-{seed}"
            if not (folder / "result.json").exists():
                run(tau1, seed, arguments.device, folder)


def run(tau1: float, seed: int, device_name: str, folder: Path) -> None:
    settings = recipe("quick").override(f"all.tau1={tau1}")
    device = pipeline.resolve_device(device_name)
    loaders = load_data("mnist", batch_size=settings.batch_size, seed=seed, device=device)
    network = pipeline.build_seeded("lenet-300-100", seed)
    result = pipeline.compress(
        network, loaders.train, val_loader=loaders.validation, recipe=settings, seed=seed, device=device, pretrain=True
    )
    # Evaluated on a CPU, as anyone can repeat it.
    on_cpu = load_data("mnist", batch_size=1, seed=0, device=pipeline.resolve_device("cpu"))
    figures = file_figures(result.network().cpu(), result.blob, on_cpu.test)
    write_record(folder, result, figures)
    print(
        f"{folder.name}: {100 * figures['accuracy']:.2f} %, {figures['bytes']:,} bytes, {figures['ratio']:.0f}×",
        flush=True,
    )


if __name__ == "__main__":
    main()
