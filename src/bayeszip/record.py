"""The record of a run: what was asked for, with what, what happened, what came out. Results are data.

A run's folder holds `result.json` (figures, recipe and history), `snapshots.json` (its weights at a few moments),
`report.txt` and `net.bayz`.
"""

import contextlib
import dataclasses
import json
import math
import os
import platform
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayeszip import __version__
from bayeszip.codec import Description
from bayeszip.errors import ModelError
from bayeszip.files import create_folder, write_atomically
from bayeszip.fitting import Judge, evaluate
from bayeszip.fitting.batches import Loader
from bayeszip.result import Fit, Result
from bayeszip.snapshots import SNAPSHOTS

__all__ = ["RECORD", "file_figures", "for_json", "run_record", "size_figures", "write_record"]

#: The files of a record, in the order in which they are removed: without the first there is none.
RECORD = ("result.json", "report.txt", "net.bayz")

#: Significant digits of a figure of an epoch.
DIGITS = 5


def file_figures(
    network: nn.Module, sizes: dict[str, Any], test: Loader, judge: Judge | None = None, measured: str | None = None
) -> dict[str, Any]:
    """The figures of a decoded file: accuracy of its network on `test`, and its size against the original's.

    Args:
        sizes: as `size_figures` gives them.
        judge: measures loss and metric too, if it has them, and an accuracy only where there are classes.
        measured: what `test` is, if the figures are to tell: `test`, or `validation`.
    """
    told = {} if measured is None else {"measured": measured}
    if judge is None:
        return {"accuracy": evaluate(network, test, cast=True), **sizes, **told}
    found = judge(network, test, cast=True)
    metric = {judge.metric.name: found.metric} if judge.metric is not None else {}
    loss = {"loss": found.loss} if judge.likelihood is not None else {}
    return {"accuracy": found.accuracy, **loss, **metric, **sizes, **told}


def size_figures(description: Description, beside: Container[str]) -> dict[str, Any]:
    """The size of a file against its original's, and what is in it.

    Args:
        beside: tensors that are no parameters, and don't count as such.
    """
    held = [tensor for tensor in description.tensors if tensor.name not in beside]
    return {
        "bytes": description.bytes,
        "ratio": 4 * description.original_parameters / description.bytes,
        "params": description.original_parameters,
        "nonzero": sum(tensor.nonzero for tensor in held),
        "params_kept": sum(tensor.size for tensor in held),
    }


def run_record(result: Result, figures: dict[str, Any]) -> dict[str, Any]:
    """What there is to say about a run, as JSON can hold it.

    On the validation data accuracy is stated four times: of the network that was given (`…_before`), at the end of the
    last phase (`…_trained`) of the training that the file is from, right after quantization (`…_snapped`), and of the
    file. What the snap costs is the step from the second to the third, what the closing phase brings the one from there
    to the fourth.
    """
    fit = result.fit
    if fit is None:
        raise ModelError("nothing was trained, so there is no run to record")
    return {
        **figures,
        "validation_accuracy_before": fit.accuracy_before,
        "validation_accuracy_trained": result.accuracy_trained,
        "validation_accuracy_snapped": result.accuracy_snapped,
        "validation_accuracy": result.accuracy,
        "validation_loss_before": fit.before.loss,
        "validation_loss": result.figures.loss,
        **_metric_figures(result, fit),
        "seconds": round(fit.seconds, 1),
        "seed": fit.seed,
        **({"target": fit.target, "strength": fit.strength} if fit.target else {}),
        **({"rate": result.rate} if fit.recipe.quantization.rate else {}),
        "augment": fit.augment,
        **({"teacher": fit.teacher} if fit.teacher else {}),
        "device": fit.device,
        "versions": {"bayeszip": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "recipe": json.loads(fit.recipe.to_json()),
        "warnings": list(result.warnings),
        "history": [_rounded(dataclasses.asdict(stats)) for stats in fit.history],
    }


def _metric_figures(result: Result, fit: Fit) -> dict[str, Any]:
    if fit.metric is None:
        return {}
    return {
        "metric": fit.metric.name,
        "validation_metric_before": fit.before.metric,
        "validation_metric": result.figures.metric,
    }


def write_record(
    folder: str | os.PathLike[str],
    result: Result,
    figures: dict[str, Any],
    *others: dict[str, Any],
    hold_out: bool = True,
    model: str | None = None,
    data: str | None = None,
) -> None:
    """`result.json`, `report.txt` and `net.bayz` in `folder`, which is created if need be.

    Records of other rates, which an earlier training left there, are removed.

    Args:
        others: the figures of the result's others; each has its record in a folder `rate=…` below, and a line here.
        hold_out: as `--hold-out` says; only where nothing was to be held out does the record tell.
        model, data: as the command line was given them, if it was.

    Raises:
        OutputError: the folder or a file can't be written.
    """
    record, target = {**run_record(result, figures), "model": model, "data": data}, create_folder(folder)
    if not hold_out:
        record["hold_out"] = False
    for other, own in zip(result.others, others, strict=True):
        write_record(target / f"rate={other.rate:g}", other, own, hold_out=hold_out, model=model, data=data)
        record.setdefault("others", []).append({"rate": other.rate, **own})
    write_atomically(target / "net.bayz", result.blob)
    write_atomically(target / "report.txt", result.report().encode())
    _remove_others(target, {f"rate={other.rate:g}" for other in result.others})
    if not record["history"]:  # then those that are there are of a run before
        (target / SNAPSHOTS).unlink(missing_ok=True)
    # Last: where it is, the others are too.
    write_atomically(target / "result.json", (_one_line_an_epoch(record) + "\n").encode())


def _remove_others(folder: Path, kept: set[str]) -> None:
    """The records `rate=…` in `folder` but those that are kept; of each the files that a record has, and no more."""
    for old in folder.glob("rate=*"):
        if old.name in kept or old.is_symlink() or not (old / "result.json").is_file():
            continue
        with contextlib.suppress(OSError):  # a file that is somebody else's keeps its folder
            for name in RECORD:
                (old / name).unlink(missing_ok=True)
            old.rmdir()


def _rounded(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {name: _rounded(value) for name, value in figures.items()}
    return float(f"{figures:.{DIGITS}g}") if isinstance(figures, float) else figures


def for_json(held: Any) -> Any:
    """The same as JSON can hold it, which knows no NaN and nothing infinite: they become null."""
    if isinstance(held, dict):
        return {name: for_json(value) for name, value in held.items()}
    if isinstance(held, list | tuple):
        return [for_json(value) for value in held]
    return None if isinstance(held, float) and not math.isfinite(held) else held


def _one_line_an_epoch(record: dict[str, Any]) -> str:
    """JSON that a person can read and a diff can show."""
    record = for_json(record)
    history = record.pop("history")
    text = json.dumps(record, indent=1, ensure_ascii=False)
    lines = ",\n".join(f"  {json.dumps(stats)}" for stats in history)
    return f'{text[:-2]},\n "history": [\n{lines}\n ]\n}}'
