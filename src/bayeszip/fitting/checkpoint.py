"""Checkpoints: the state of a run on disk, complete or not there at all, so that the run survives what ends it.

A checkpoint is one safetensors file. The tensors of the state, wherever they stand in it, are its tensors; the rest of
the state is JSON in its metadata, beside the conditions under which the run trains and the SHA-256 of the whole file.
Nothing in it is ever executed. What a state means is not known here: it is what `state_dict` methods give, and what
they give is dictionaries, lists and tuples of tensors, arrays and plain values.

    save:    temporary file ──► fsync ──► rename ──► fsync of the folder ──► read back ──► old ones deleted
    newest:  the last file whose SHA-256 is right; broken ones are skipped, and named
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from bayeszip.errors import BayeszipError, CheckpointError, OutputError
from bayeszip.files import Lock, create_folder, read_file, remove_temporaries, write_atomically

__all__ = ["Checkpoint", "Checkpoints", "differences", "read_checkpoint", "write_checkpoint"]

State = Mapping[str, Any]

_NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")

#: Stands before the SHA-256 in a file, and only there: quotes inside the other metadata are escaped.
_DIGEST_MARK = b'"sha256":"'
_NO_DIGEST = b"0" * 64

#: Single keys that stand for what JSON has no form for.
_TENSOR, _ARRAY, _TUPLE, _PAIRS = "$tensor", "$array", "$tuple", "$pairs"
_FORMS = {_TENSOR, _ARRAY, _TUPLE, _PAIRS}

#: How many differences a refusal shows.
_SHOWN = 12


class Checkpoint(NamedTuple):
    """A state as it was saved, and the conditions under which it was."""

    path: Path
    state: dict[str, Any]
    conditions: dict[str, Any]

    def check_conditions(self, now: State) -> None:
        """Refuse to go on under other conditions, since the run would end otherwise than it began.

        Raises:
            CheckpointError: shows each difference.
        """
        found = differences(self.conditions, now)
        if not found:
            return
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(
            f"{self.path} was written under other conditions than these:\n  "
            + "\n  ".join(found[:_SHOWN])
            + f"{more}\nGo back to those, start a new run in another folder, or force it to go on (--force)."
        )


class Checkpoints:
    """The checkpoints of one run, in a folder of their own; one process at a time holds it.

    Args:
        folder: created if need be.
        keep: how many to keep, at least 1; a second one is there for the day the first can't be read.
        warn: told of checkpoints that had to be skipped.
        writes: False for a process that only reads, beside the one that holds the folder.

    Raises:
        OutputError: the folder can't be created, or another process holds it.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, warn: Callable[[str], None], writes: bool = True
    ) -> None:
        self.folder, self.keep, self._warn = create_folder(folder), keep, warn
        self._broken: set[Path] = set()
        self._lock = Lock(self.folder / ".lock") if writes else None
        if writes:
            # What a process that was killed left behind; nobody else writes here.
            remove_temporaries(self.folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes work in the folder."""
        if self._lock is not None:
            self._lock.release()

    def save(self, state: State, conditions: State) -> Path:
        """Write the next checkpoint, and only when it was read back delete those that are too many.

        Raises:
            OutputError: it could not be written; those before are untouched.
        """
        paths = self.paths()
        path = self.folder / f"checkpoint-{_number(paths[-1]) + 1 if paths else 1:08d}.safetensors"
        write_checkpoint(path, state, conditions)
        older = [other for other in paths if other not in self._broken]
        kept = older[max(0, len(older) - self.keep + 1) :]
        for other in paths:
            if other not in kept:
                # One that stays is only too many; the next save tries again.
                with contextlib.suppress(OSError):
                    other.unlink()
        return path

    def newest(self) -> Checkpoint | None:
        """The last checkpoint that is whole, or None if nothing was saved yet. Broken ones are skipped, with a warning.

        Raises:
            CheckpointError: there are checkpoints, and all are broken.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                self._broken.add(path)
                self._warn(f"{error}; the one before it is taken")
        if paths:
            raise CheckpointError(
                f"all checkpoints in {self.folder} are broken; delete them to begin again: the last is {paths[-1].name}"
            )
        return None

    def clear(self) -> None:
        """Delete all checkpoints.

        Raises:
            OutputError: one can't be deleted.
        """
        for path in self.paths():
            try:
                path.unlink()
            except OSError as error:
                raise OutputError(f"can't delete {path}: {error.strerror or error}; delete it by hand") from error

    def paths(self) -> list[Path]:
        """All checkpoints there are, whole or not, the oldest first."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise OutputError(f"can't read the folder {self.folder}: {error.strerror or error}") from error
        return sorted((self.folder / name for name in names if _NAME.fullmatch(name)), key=_number)


def write_checkpoint(path: str | os.PathLike[str], state: State, conditions: State) -> None:
    """Write a state to `path`, whole or not at all, and read it back.

    Raises:
        OutputError: it could not be written or is not what was written; then nothing is left at `path`.
        CheckpointError: the state holds something that a checkpoint can't.
    """
    blob = _to_bytes(state, conditions)
    write_atomically(path, blob)
    try:
        same = read_file(path) == blob
    except BayeszipError:
        same = False
    if not same:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise OutputError(f"{path} is not what was written to it; check the disk")


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, and check every bit of it.

    Raises:
        CheckpointError: it is missing, can't be read, or is not whole.
    """
    try:
        blob = read_file(path)
        _check_digest(blob)
        metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
        tensors = from_safetensors(blob)
        state = _restored(json.loads(metadata["state"]), tensors)
        conditions = json.loads(metadata["conditions"])
    except BayeszipError as error:
        raise CheckpointError(f"the checkpoint {path} is broken ({error})") from error
    except (KeyError, ValueError, TypeError, SafetensorError, RecursionError) as error:
        # The SHA-256 is right, so it was written so: by something else, or by another version.
        raise CheckpointError(f"the checkpoint {path} is not one of this version of bayeszip ({error!r})") from error
    return Checkpoint(Path(path), state, conditions)


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two values as JSON has them: a line each, by its path.

    >>> differences({"seed": 1, "data": {"examples": 60}}, {"seed": 1, "data": {"examples": 61}})
    ['data.examples: 60 then, 61 now']
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            line
            for key in keys
            for line in differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
        ]
    if isinstance(before, list | tuple) and isinstance(now, list | tuple) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{name}[{index}]")]
    return [] if before == now else [f"{name}: {_shown(before)} then, {_shown(now)} now"]


def _shown(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def _to_bytes(state: State, conditions: State) -> bytearray:
    tensors: dict[str, Tensor] = {}
    plain = _plain(state, "state", tensors)
    metadata = {
        "state": json.dumps(plain, ensure_ascii=False),
        "conditions": json.dumps(conditions, ensure_ascii=False),
        "sha256": _NO_DIGEST.decode(),
    }
    written = to_safetensors(tensors, metadata)
    # A state may be large: one copy less at a time.
    tensors.clear()
    blob = bytearray(written)
    del written
    start = blob.index(_DIGEST_MARK) + len(_DIGEST_MARK)
    blob[start : start + len(_NO_DIGEST)] = hashlib.sha256(blob).hexdigest().encode()
    return blob


def _check_digest(blob: bytes) -> None:
    start = blob.find(_DIGEST_MARK) + len(_DIGEST_MARK)
    end = start + len(_NO_DIGEST)
    digest = hashlib.sha256()
    for part in (memoryview(blob)[:start], _NO_DIGEST, memoryview(blob)[end:]):
        digest.update(part)
    if digest.hexdigest().encode() != blob[start:end]:
        raise CheckpointError(f"its {len(blob):,} bytes are not those that were written")


def _plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON can hold it; its tensors go into `tensors`, names into their places."""
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {_TENSOR: _put(value, path, tensors)}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {_ARRAY: _put(torch.from_numpy(np.array(value)), path, tensors)}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(entry, f"{path}.{index}", tensors) for index, entry in enumerate(value)]}
    if isinstance(value, list):
        return [_plain(entry, f"{path}.{index}", tensors) for index, entry in enumerate(value)]
    if isinstance(value, Mapping):
        entries = {key: _plain(entry, f"{path}.{key}", tensors) for key, entry in value.items()}
        if all(isinstance(key, str) and key not in _FORMS for key in entries):
            return entries
        return {_PAIRS: [[_plain(key, path, tensors), entry] for key, entry in entries.items()]}
    raise CheckpointError(
        f"{path} is of type {type(value).__name__}; a checkpoint holds tensors, arrays, plain values, and "
        "dictionaries, lists and tuples of them"
    )


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(f"{path} is a {tensor.layout} tensor on {tensor.device}; a checkpoint holds dense ones")
    name = path
    while name in tensors:
        name += "'"
    # A copy of its own: safetensors refuses tensors that share memory, as tied weights do.
    tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return name


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restored(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    form = next(iter(value)) if len(value) == 1 else None
    if form == _TENSOR:
        return tensors[value[form]]
    if form == _ARRAY:
        return tensors[value[form]].numpy()
    if form == _TUPLE:
        return tuple(_restored(entry, tensors) for entry in value[form])
    if form == _PAIRS:
        return {_restored(key, tensors): _restored(entry, tensors) for key, entry in value[form]}
    return {key: _restored(entry, tensors) for key, entry in value.items()}
