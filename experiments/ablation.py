"""What is each part of `vd+sws` for? LeNet-300-100 with one part at a time left out, or as in the paper.

python experiments/ablation.py [--device cuda] [--only reseed]
"""

import sys
from collections.abc import Sequence

from bayeszip.recipe import recipe
from bench import run_experiment
from runs import Run

MODEL = "lenet-300-100"

#: For each part: the recipe, what is changed in it, and what that means.
PARTS: dict[str, tuple[str, str, str]] = {
    "nothing": ("vd+sws", "", "nothing"),
    "distillation": ("vd+sws", "all.distillation=0 closing.distillation=0", "distillation from the dense network"),
    "ramp": ("vd+sws", "vd.tau1_ramp=0", "the ramp of τ₁"),
    "rates": (
        "vd+sws",
        "vd.rate_theta=5e-5 vd.rate_log_sigma2=1e-4 vd.schedule=constant",
        "our rates in the first phase: the paper's instead",
    ),
    "reseed": ("vd+sws", "vd+sws.reseed=false", "re-seeding of components"),
    "tightening": ("vd+sws", "vd+sws.std_last=0.01", "tightening of components"),
    "pruning": ("vd+sws", "quantization.prune_rate=1", "pruning by dropout rate: by the mixture alone"),
    "values": ("vd+sws", "closing.epochs=0", "training of shared values"),
    "sharing": ("vd", "", "soft weight sharing: 32 values fitted to what the first phase leaves, the recipe `vd`"),
}


def planned(seeds: int = 5, epochs_scale: float = 1.0) -> list[Run]:
    return [
        Run(
            f"{MODEL}-without-{part}-seed-{seed}",
            MODEL,
            recipe(name).override(*settings.split(), f"epochs_scale={epochs_scale}"),
            seed,
        )
        for part, (name, settings, _) in PARTS.items()
        for seed in range(seeds)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    run_experiment("ablation", planned, __doc__, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
