"""The paper's table: two networks, four methods, five seeds.

    bayeszip reproduce table         (or python experiments/table.py [--device cuda] [--only lenet-5])

Besides our recipes the paper's own, to the letter. Settings were chosen on validation images, from the runs of
`choice.py` and `figure.py`.
"""

import sys
from collections.abc import Sequence

from bayeszip.recipe import recipe
from bench import run_experiment
from runs import Run

MODELS = ("lenet-300-100", "lenet-5")
METHODS = ("l2", "sws", "vd", "vd+sws", "paper-sws", "paper-vd", "paper-vd+sws")


def planned(seeds: int = 5, epochs_scale: float = 1.0) -> list[Run]:
    return [
        Run(f"{model}-{method}-seed-{seed}", model, recipe(method).override(f"epochs_scale={epochs_scale}"), seed)
        for model in MODELS
        for method in METHODS
        for seed in range(seeds)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    run_experiment("table", planned, __doc__, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
