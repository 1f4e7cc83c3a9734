"""Records of an experiment: a folder with `runs.jsonl`, a line for each run, and the files, named as the runs are."""

import base64
import binascii
import dataclasses
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayeszip import codec
from bayeszip.codec.accounting import paper_size
from bayeszip.errors import DataError, RecipeError
from bayeszip.experiments.runs import Run
from bayeszip.files import create_folder, read_file, write_atomically
from bayeszip.fitting.augmentation import Augmentation
from bayeszip.recipe import Recipe
from bayeszip.record import run_record
from bayeszip.result import Result
from bayeszip.targets import Target

__all__ = [
    "OFFSET_BITS",
    "Record",
    "add",
    "file_of",
    "history_of",
    "is_of",
    "missing",
    "pack_history",
    "read",
    "recipe_of",
    "recode",
    "record_of",
    "take",
]

RUNS = "runs.jsonl"

#: The paper's width of a column offset (its app. B), for the networks that it counts.
OFFSET_BITS = {"lenet-300-100": 5, "lenet-5": 8}

Record = dict[str, Any]


def record_of(run: Run, name: str, result: Result, figures: dict[str, Any]) -> Record:
    """The line of a run's ending. What the file tells by itself is left out, but for the figures that tables quote."""
    if result.fit is None:
        raise RecipeError(f"{name} was not trained")
    whole = run_record(result, figures)
    names = ["accuracy", "accuracy_before", "bytes", "params", "nonzero"]
    quoted = {name: whole.pop(name) for name in names if name in whole}
    for derived in ("ratio", "params_kept", "recipe", "seed"):
        whole.pop(derived, None)
    history = whole.pop("history")
    offset_bits = OFFSET_BITS.get(run.variant.model)
    precision = run.variant.mixed_precision
    return {
        "name": name,
        "model": run.variant.model,
        "seed": run.seed,
        **quoted,
        **({} if offset_bits is None else {"paper_bytes": paper_size(result.compressed, offset_bits).bytes}),
        **whole,
        **({} if run.teacher is None else {"teacher": run.teacher.variant.model}),
        **({} if precision is None else {"mixed_precision": precision}),
        **({} if run.variant.hold_out else {"hold_out": False}),
        "recipe": _sparse(result.fit.recipe),
        "history": pack_history(history),
    }


def read(folder: Path) -> dict[str, Record]:
    """The records in `folder` by the names of their runs; none if nothing is there.

    Raises:
        DataError: a line is no record.
    """
    path = folder / RUNS
    if not path.exists():
        return {}
    records = {}
    for number, line in enumerate(read_file(path).decode(errors="replace").splitlines(), 1):
        try:
            record = json.loads(line)
            records[str(record["name"])] = record
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}, is not the record of a run: {error}") from error
    return records


def add(folder: Path, record: Record) -> None:
    """Put a record beside those in `folder`, ordered by name; the file is replaced whole."""
    _write(folder, {**read(folder), record["name"]: record})


def _write(folder: Path, records: Mapping[str, Record]) -> None:
    lines = (
        json.dumps(records[name], ensure_ascii=False, separators=(",", ":")) for name in sorted(records, key=_order)
    )
    write_atomically(folder / RUNS, "".join(f"{line}\n" for line in lines).encode())


def take(source: Path, target: Path) -> list[str]:
    """Put the records in `source`, with their files, beside those in `target`; returns their names.

    Raises:
        DataError: there is none, or a file is missing.
    """
    records = read(source)
    if not records:
        raise DataError(f"{source} has no records; give the folder that --again was given")
    create_folder(target)
    for name, record in records.items():
        if "accuracy" in record:  # else it was sealed, and has no file
            write_atomically(file_of(target, name), read_file(file_of(source, name)))
        add(target, record)
    return list(records)


def recode(folder: Path) -> tuple[int, int]:
    """Code the files of the records anew, as `encode` does today; returns their bytes before and after.

    They hold the same networks, bit for bit: `encode` compares. One that would not become smaller stays as it is.

    Raises:
        DataError: there are no records.
    """
    records, before, after = read(folder), 0, 0
    if not records:
        raise DataError(f"{folder} has no records")
    for name, record in records.items():
        path = file_of(folder, name)
        if not path.exists():  # it was sealed
            continue
        blob = codec.read(path)
        model, description = codec.inspect(blob)
        width = {key: value for key, value in description.options.items() if key == "offset_bits"}
        shorter = min(blob, codec.encode(model, description.coder, **width), key=len)
        write_atomically(path, shorter)
        record["bytes"] = len(shorter)
        before, after = before + len(blob), after + len(shorter)
    _write(folder, records)
    return before, after


def _order(name: str) -> tuple[str, int]:
    variant, _, seed = name.rpartition("-")
    return variant, int(seed) if seed.isdecimal() else 0


def missing(folder: Path, runs: Sequence[Run]) -> list[Run]:
    """Those of `runs` that lack a record in `folder`, or lost a file.

    Raises:
        RecipeError: one is recorded there with other settings.
    """
    records = read(folder)
    for run in runs:
        for name in run.endings:
            if name in records and not is_of(records[name], run):
                raise RecipeError(f"{folder} holds {name} with other settings; give another folder, or move it away")

    def is_done(run: Run) -> bool:
        return all(name in records and (run.sealed or file_of(folder, name).exists()) for name in run.endings)

    return [run for run in runs if not is_done(run)]


def is_of(record: Record, run: Run) -> bool:
    """Whether a record tells of an ending of this very run: its network, its seed, and all that was asked for.

    What the network was pretrained on a record doesn't tell: `Task.weights` has it in its name.
    """
    variant = run.variant
    augment = None if variant.augment is None else str(Augmentation.parse(variant.augment))
    target = Target.of(max_bytes=variant.max_bytes, max_accuracy_drop=variant.max_accuracy_drop)
    teacher = None if variant.teacher is None else variant.teacher.model
    goal = None if target is None else str(target)
    asked = (variant.model, run.seed, variant.hold_out, augment, teacher, variant.mixed_precision, goal)
    keys = ("augment", "teacher", "mixed_precision", "target")
    told = (record["model"], record["seed"], record.get("hold_out", True), *map(record.get, keys))
    return told == asked and recipe_of(record) == run.endings.get(record["name"])


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.bayz"


def recipe_of(record: Record) -> Recipe:
    """The recipe in a record; settings that it does not name are at their defaults."""
    return Recipe.from_json(json.dumps(record["recipe"]))


def _sparse(settings: Any) -> Any:
    """Settings as JSON holds them, without those at their defaults."""
    if isinstance(settings, tuple):
        return [_sparse(part) for part in settings]
    if isinstance(settings, Mapping):
        return {name: _sparse(part) for name, part in settings.items()}
    if not dataclasses.is_dataclass(settings):
        return settings
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(settings)
    }
    values = {name: getattr(settings, name) for name in defaults}
    return {name: _sparse(value) for name, value in values.items() if value != defaults[name]}


def pack_history(history: Sequence[Any]) -> str:
    """What each epoch came to, in few characters: JSON by columns, LZMA, base 85."""
    columns: dict[str, list[Any]] = {}
    for epoch in history:
        for name, value in epoch.items():
            columns.setdefault(name, []).append(value)
    text = json.dumps(columns, separators=(",", ":")).encode()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
    return base64.b85encode(lzma.compress(text, lzma.FORMAT_RAW, filters=filters)).decode()


def history_of(record: Record) -> list[dict[str, Any]]:
    """Undo `pack_history`.

    Raises:
        DataError: the record's history is damaged.
    """
    try:
        packed = base64.b85decode(record["history"])
        columns = json.loads(lzma.decompress(packed, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9}]))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    except (KeyError, ValueError, binascii.Error, lzma.LZMAError, AttributeError) as error:
        raise DataError(f"the history of {record.get('name')} is damaged: {error}") from error
