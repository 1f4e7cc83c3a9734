"""Which settings? LeNet-300-100 by `vd+sws` and `sws` as their settings vary, judged on validation images alone.

    python experiments/choice.py [--device cuda] [--only K=33]

`figure.py` tries the same on LeNet-5. One line a run goes to `results/choice/lenet-300-100.jsonl`; no file is kept and
the test set is never opened.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bayeszip.files import create_folder
from bench import Bench
from figure import TAUGHT, varied_runs
from runs import RESULTS, Run, Trained, coded, paper_bytes, parser

MODEL = "lenet-300-100"

#: For each method settings as `--set` takes them, changed in its recipe.
VARIED: dict[str, Sequence[str]] = {
    "vd+sws": [
        *(
            f"all.tau1={tau1} vd.rate_log_sigma2={rate} mixture.components={components} {distillation}".strip()
            for tau1 in (0.3, 0.5, 0.7, 1)
            for rate in (1e-3, 5e-4)
            for distillation in ("", TAUGHT)
            for components in (17, 33)
        ),
        *(
            f"all.tau1=0.7 mixture.components=33 {settings}"
            for settings in (
                "vd+sws.std_last=0.003",
                "vd+sws.std_last=0.0015",
                "vd+sws.tau1=0.35",
                "vd+sws.tau2=0.05",
                "closing.epochs=30",
            )
        ),
    ],
    "sws": [
        *(f"all.tau2={tau2}" for tau2 in (0.01, 0.02, 0.03, 0.05)),
        *(f"all.tau2={tau2} {TAUGHT}" for tau2 in (0.02, 0.03)),
        *(f"all.tau2={tau2} all.rate_theta=1e-3 all.rate_means=1e-3" for tau2 in (0.02, 0.03)),
        *(
            f"all.std_first={first} all.std_last={last} mixture.components={components}"
            for components in (17, 33)
            for first, last in ((0.015, 0.004), (0.02, 0.004), (0.02, 0.002), (0.03, 0.003))
        ),
    ],
}


def planned(seeds: int = 2, epochs_scale: float = 1.0) -> list[Run]:
    return varied_runs(MODEL, VARIED, seeds, epochs_scale)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, seeds=2).parse_args(arguments)
    done = {(f"{line['method']} {line['settings']}", line["seed"]) for line in lines()}
    runs = [
        run
        for run in planned(options.seeds, options.epochs_scale)
        if options.only in run.name and (run.name, run.seed) not in done
    ]
    create_folder(RESULTS / "choice")
    Bench(options.device, options.pretrained, options.together).record("choice", runs, note)


def lines(folder: Path = RESULTS / "choice") -> list[dict[str, object]]:
    """What was noted so far."""
    path = folder / f"{MODEL}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def note(run: Run, trained: Trained, pretrained_in: Path, folder: Path) -> str:
    """Add a line on a trained run."""
    result = coded(run, trained, pretrained_in)
    method, _, settings = run.name.partition(" ")
    line = {
        "method": method,
        "settings": settings,
        "seed": run.seed,
        "validation_accuracy": result.accuracy,
        "bytes": len(result.blob),
        "paper_bytes": paper_bytes(result.compressed, run.model),
        "seconds": round(trained.seconds, 1),
        "trained_together": trained.together,
        "device": trained.device,
    }
    with (folder.parent / f"{MODEL}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return f"{run.name}, seed {run.seed}: {result.accuracy} of validation, {len(result.blob):,} bytes"


if __name__ == "__main__":
    main(sys.argv[1:])
