"""How accurate at which size? LeNet-5 by the three methods, as their settings vary: the paper's figure.

    bayeszip reproduce figure        (or python experiments/figure.py [--device cuda] [--only vd])

Settings of the table were chosen from the validation accuracies of these runs.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from bayeszip.recipe import recipe
from bench import run_experiment
from runs import Run

#: Mostly by the dense network, whose outputs are softened more.
TAUGHT = "all.distillation=0.9 all.distillation_temperature=4 closing.distillation=0.9"

#: For each method settings as `--set` takes them, changed in its recipe.
VARIED: dict[str, Sequence[str]] = {
    "vd+sws": [
        *(f"all.tau1={tau1}" for tau1 in (0.1, 0.25, 0.5, 1, 2, 4, 8)),
        *(f"all.tau1={tau1} mixture.components=33" for tau1 in (0.5, 1, 2)),
        *(f"all.tau1={tau1} vd.rate_log_sigma2=5e-4" for tau1 in (1, 2)),
        "all.tau1=1 mixture.components=9",
        "all.tau1=1 vd.rate_theta=2e-3",
        f"all.tau1=1 {TAUGHT}",
        f"all.tau1=2 {TAUGHT}",
    ],
    "vd": [
        *(f"all.tau1={tau1}" for tau1 in (0.1, 0.25, 0.5, 1, 2, 4, 8)),
        *(f"all.tau1={tau1} quantization.components=64" for tau1 in (0.5, 1, 2)),
        *(f"all.tau1={tau1} quantization.components=16" for tau1 in (1, 2, 4)),
    ],
    "sws": [
        *(f"all.tau2={tau2}" for tau2 in (0.003, 0.01, 0.03, 0.06, 0.1, 0.3)),
        *(f"all.tau2={tau2} mixture.zero_proportion=0.99" for tau2 in (0.03, 0.1)),
        *(f"all.tau2={tau2} mixture.zero_proportion=0.9999" for tau2 in (0.03, 0.1)),
        *(f"all.tau2={tau2} all.rate_theta=2e-3 all.rate_means=2e-3" for tau2 in (0.03, 0.1)),
        *(
            f"all.std_first={first} all.std_last={last} mixture.components={components}"
            for components in (17, 33)
            for first, last in ((0.015, 0.004), (0.02, 0.004), (0.02, 0.002), (0.03, 0.003))
        ),
    ],
}


#: What they are changed from: the recipes before anything was chosen from these runs.
FROM = {
    "vd+sws": "all.tau1=1 mixture.components=17",
    "vd": "all.tau1=1",
    "sws": "all.std_first=0 all.std_last=0 mixture.components=17",
}


def planned(seeds: int = 1, epochs_scale: float = 0.6) -> list[Run]:
    runs = varied_runs("lenet-5", VARIED, seeds, epochs_scale)
    return [dataclasses.replace(run, name=f"{run.name} seed-{run.seed}".replace(" ", "_")) for run in runs]


def varied_runs(model: str, varied: Mapping[str, Sequence[str]], seeds: int, epochs_scale: float) -> list[Run]:
    """A run for each of the settings and seeds, named by method and settings."""
    return [
        Run(
            f"{method} {settings}",
            model,
            recipe(method).override(*FROM[method].split(), *settings.split(), f"epochs_scale={epochs_scale}"),
            seed,
        )
        for method, many in varied.items()
        for settings in many
        for seed in range(seeds)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    run_experiment("figure", planned, __doc__, arguments, seeds=1, epochs_scale=0.6)


if __name__ == "__main__":
    main(sys.argv[1:])
