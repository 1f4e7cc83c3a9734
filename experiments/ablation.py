"""What is each part of `vd+sws` for? Both networks, with one part at a time left out or as in the paper.

python experiments/ablation.py [--device cuda] [--only lenet-5]
"""

import sys
from collections.abc import Sequence

from bayeszip.recipe import recipe
from bench import Bench, note_seconds
from runs import Run, parser

#: What is left out, and the settings that do it.
PARTS: dict[str, str] = {
    "nothing": "",
    "distillation": "all.distillation=0 closing.distillation=0",
    "ramp of τ₁": "vd.tau1_ramp=0",
    "rates: the paper's": "vd.rate_theta=5e-5 vd.rate_log_sigma2=1e-4 vd.schedule=constant",
    "re-seeding of components": "vd+sws.reseed=false",
    "tightening of components": "vd+sws.std_last=0.01",
    "pruning by rate": "quantization.prune_rate=1",
    "training of shared values": "closing.epochs=0",
    "soft weight sharing: vd": "",
}
#: LeNet-5 takes longer: fewer seeds and epochs.
SEEDS = {"lenet-300-100": 5, "lenet-5": 2}
EPOCHS_SCALE = {"lenet-300-100": 1.0, "lenet-5": 0.5}


def planned(seeds: int = 5, epochs_scale: float = 1.0) -> list[Run]:
    return [
        Run(
            f"{model} {part} seed-{seed}".replace(" ", "_"),
            model,
            recipe("vd" if part.endswith(": vd") else "vd+sws").override(
                *settings.split(), f"epochs_scale={EPOCHS_SCALE[model] * epochs_scale}"
            ),
            seed,
        )
        for model in SEEDS
        for part, settings in PARTS.items()
        for seed in range(min(SEEDS[model], seeds))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    runs = [run for run in planned(options.seeds, options.epochs_scale) if options.only in run.name]
    bench = Bench(options.device, options.pretrained, options.together)
    note_seconds("ablation", bench, bench.record("ablation", runs))


if __name__ == "__main__":
    main(sys.argv[1:])
