"""What the folder of a run tells: the record that `compress --run` wrote, read back and checked."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayeszip.errors import DataError
from bayeszip.files import read_file
from bayeszip.fitting import EpochStats
from bayeszip.snapshots import SNAPSHOTS, Snapshots, read_snapshots

__all__ = ["Run", "read_run"]

#: What accuracy is measured on, unless a record says otherwise.
TEST = "test"


@dataclass(frozen=True)
class Other:
    """A further file of a training, at another weight of a bit; its accuracy is a share of the data `measured`."""

    rate: float
    bytes: int
    accuracy: float | None
    measured: str = TEST


@dataclass(frozen=True)
class Run:
    """A run. Accuracies are shares; `accuracy` is on the test set, or on what `measured` says."""

    bytes: int
    accuracy: float | None
    validation_accuracy: float | None
    validation_accuracy_before: float | None
    seconds: float
    seed: int
    device: str
    versions: dict[str, str]
    recipe: dict[str, Any]
    history: tuple[EpochStats, ...]
    snapshots: Snapshots
    others: tuple[Other, ...] = ()
    #: Whether examples were set aside for validation, as far as the record tells; older ones don't.
    hold_out: bool = True
    #: `test`, or `validation` where there was no test set.
    measured: str = TEST
    #: As the command line was given them, if it was.
    model: str | None = None
    data: str | None = None
    #: Whether the record has a word for its data at all; older ones don't.
    says_data: bool = False

    @property
    def test_accuracy(self) -> float | None:
        """On the test set, if there was one."""
        return self.accuracy if self.measured == TEST else None


def read_run(folder: str | os.PathLike[str]) -> Run:
    """What a run left in `folder`.

    Raises:
        DataError: there is no record in it, or it is damaged.
    """
    path, snapshots = Path(folder) / "result.json", Path(folder) / SNAPSHOTS
    if not path.is_file():
        raise DataError(f"{folder} holds no finished run: there is no result.json in it; `compress --run` writes one")
    try:
        held = json.loads(read_file(path))
        return Run(
            bytes=_size(held["bytes"]),
            accuracy=_share(held, "accuracy"),
            validation_accuracy=_share(held, "validation_accuracy"),
            validation_accuracy_before=_share(held, "validation_accuracy_before"),
            seconds=_finite(held["seconds"]),
            seed=int(held["seed"]),
            device=str(held["device"]),
            versions={str(name): str(version) for name, version in held["versions"].items()},
            recipe=dict(held["recipe"]),
            history=tuple(_epoch(stats) for stats in held["history"]),
            snapshots=read_snapshots(snapshots) if snapshots.is_file() else Snapshots(),
            others=tuple(
                Other(_finite(other["rate"]), _size(other["bytes"]), _share(other, "accuracy"), _measured(other))
                for other in held.get("others", ())
            ),
            hold_out=held.get("hold_out", True) is not False,
            measured=_measured(held),
            model=_text(held, "model"),
            data=_text(held, "data"),
            says_data="data" in held,
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{path} is not the record of a run: {type(error).__name__}: {error}") from error


def _share(held: dict[str, Any], name: str) -> float | None:
    return None if held.get(name) is None else _finite(held[name])


def _text(held: dict[str, Any], name: str) -> str | None:
    return None if held.get(name) is None else str(held[name])


def _measured(held: dict[str, Any]) -> str:
    value = held.get("measured", TEST)
    if value not in (TEST, "validation"):
        raise ValueError(f"figures are measured on test or validation data, not on {value!r}")
    return str(value)


def _size(value: Any) -> int:
    count = int(value)
    if count <= 0:
        raise ValueError(f"no file has {count} bytes")
    return count


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no figure")
    return number


def _epoch(held: dict[str, Any]) -> EpochStats:
    """An epoch's figures, each of the type it should have."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "phase": str,
        "epoch": int,
        "epochs": int,
        "weights_computed": int,
        "bytes": _size,
        "steps": int,
        "parts": lambda parts: {str(name): _finite(value) for name, value in parts.items()},
    }
    figures: dict[str, Any] = {}
    for field in dataclasses.fields(EpochStats):
        if field.name not in held and field.default is not dataclasses.MISSING:
            continue
        missing = field.name in ("accuracy", "bytes", "loss", "metric", "steps") and held[field.name] is None
        figures[field.name] = None if missing else kinds.get(field.name, _finite)(held[field.name])
    return EpochStats(**figures)
