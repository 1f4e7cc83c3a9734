"""Which settings? What the paper leaves open, and what ours add, compared on the validation images alone.

    python experiments/choose.py [--only lenet-5] [--device cuda]

Each configuration leaves a line in results/choice/MODEL.jsonl: settings, validation accuracy, bytes. The test images
are not opened here.
"""

import json
import sys
from collections.abc import Sequence
from threading import Lock

from bayeszip.fitting import Watcher
from bayeszip.recipe import recipe
from runs import RESULTS, Bench, Run, Task, paper_bytes, parser

_LONGER = ("vd.epochs=100", "vd+sws.epochs=40")
_TAUGHT = ("all.distillation=0.9", "all.distillation_temperature=4", "closing.distillation=0.9")

#: (recipe, settings changed in it), each setting as `--set` takes it.
CANDIDATES: Sequence[tuple[str, tuple[str, ...]]] = [
    ("quick", (*_LONGER, "all.tau1=0.5")),
    ("quick", (*_LONGER, "all.tau1=1")),
    ("quick", (*_LONGER, "all.tau1=2")),
    ("quick", (*_LONGER, "all.tau1=1", *_TAUGHT)),
    ("quick", (*_LONGER, "all.tau1=2", *_TAUGHT)),
    ("quick", (*_LONGER, "all.tau1=1", "vd.rate_theta=2e-3")),
    ("quick", (*_LONGER, "all.tau1=1", "vd.rate_log_sigma2=1e-3")),
    ("quick", (*_LONGER, "all.tau1=1", "mixture.components=9")),
    ("quick", (*_LONGER, "all.tau1=1", "mixture.components=33")),
    ("quick", ("vd.epochs=200", "vd+sws.epochs=60", "all.tau1=1")),
    ("vd", ("quantization.components=16",)),
    ("vd", ("quantization.components=64",)),
    ("sws", ("all.tau2=0.01",)),
    ("sws", ("all.tau2=0.03",)),
    ("sws", ("all.tau2=0.1",)),
    ("sws", ("all.tau2=0.1", "all.rate_theta=2e-3")),
]
MODELS = ("lenet-5", "lenet-300-100")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    bench = Bench(options.device, options.pretrained, options.jobs)
    runs = [
        Run(f"{model}/{name}/{' '.join(settings)}", model, recipe(name).override(*settings), seed)
        for model in MODELS
        for name, settings in CANDIDATES
        for seed in range(options.seeds)
    ]
    choose(bench, [run for run in runs if options.only in run.name])


def choose(bench: Bench, runs: Sequence[Run]) -> None:
    """Note every run's figures on validation; those noted already are left out."""
    folder = RESULTS / "choice"
    folder.mkdir(parents=True, exist_ok=True)
    known = {
        (line["name"], line["seed"])
        for path in folder.glob("*.jsonl")
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    }
    missing = [run for run in runs if (run.name, run.seed) not in known]
    bench.pretrain((run.model, run.seed) for run in missing)
    turn = Lock()

    def note(run: Run, watcher: Watcher) -> str:
        result = bench.compress(run, watcher)
        line = {
            "name": run.name,
            "seed": run.seed,
            "validation_accuracy": result.accuracy,
            "bytes": result.bytes,
            "paper_bytes": paper_bytes(result, run.model),
            "nonzero": result.compressed.nonzero,
            "seconds": round(result.fit.seconds, 1) if result.fit else None,
        }
        with turn, (folder / f"{run.model}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return f"{run.name} seed {run.seed}: {100 * (result.accuracy or 0):.2f} %, {result.bytes:,} bytes"

    ordered = sorted(missing, key=lambda run: -run.epochs)
    bench.all_of("choice", [Task(lambda watcher, r=run: note(r, watcher), run.epochs) for run in ordered])


if __name__ == "__main__":
    main(sys.argv[1:])
