"""A save in which any system call fails, or that is killed at any of them, never loses the newest whole checkpoint."""

import builtins
import errno
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bayeszip.errors import OutputError
from bayeszip.fitting.checkpoint import Checkpoints, read_checkpoint

#: Every function through which a save reaches the system; the `open` that is built in reads back.
CALLS = {
    os: ("open", "write", "fsync", "close", "chmod", "replace", "unlink", "stat", "lstat", "access", "listdir"),
    builtins: ("open",),
}


class Shim:
    """Counts the calls a save makes; at one of them, something happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.names: list[str] = []
        self.at: Callable[[int, str], None] = lambda index, name: None
        for module, names in CALLS.items():
            for name in names:
                self._wrap(module, name)

    def _wrap(self, module, name: str) -> None:
        real = getattr(module, name)

        def counted(*arguments, **options):
            self.names.append(f"{module.__name__}.{name}")
            try:
                self.at(len(self.names) - 1, name)
            except OSError:
                if name == "close":  # a close that fails closes all the same
                    real(*arguments, **options)
                raise
            return real(*arguments, **options)

        self.monkeypatch.setattr(module, name, counted)


def state(n: int) -> dict:
    return {"n": n, "weights": torch.full((300,), float(n))}


def prepared(folder: Path) -> Checkpoints:
    """Two checkpoints, as many as are kept, so that the next save deletes one."""
    checkpoints = Checkpoints(folder, keep=2, warn=lambda message: pytest.fail(message))
    for path in checkpoints.paths():
        path.unlink()
    for n in (1, 2):
        checkpoints.save(state(n), {})
    return checkpoints


def calls_of_a_save(folder: Path) -> list[str]:
    checkpoints = prepared(folder)
    with checkpoints, pytest.MonkeyPatch.context() as monkeypatch:
        shim = Shim(monkeypatch)
        checkpoints.save(state(3), {})
        return list(shim.names)


def visible(folder: Path) -> list[int]:
    """What a user sees, each of it whole."""
    return [read_checkpoint(path).state["n"] for path in sorted(folder.iterdir()) if not path.name.startswith(".")]


def temporaries(folder: Path) -> list[Path]:
    return list(folder.glob(".*.tmp"))


def test_the_calls_are_the_ones_expected(tmp_path):
    names = calls_of_a_save(tmp_path)
    order = [
        "os.open",
        "os.write",
        "os.fsync",
        "os.close",
        "os.replace",
        "os.open",
        "os.fsync",
        "os.close",
        "builtins.open",
    ]
    assert [name for name in names if name in {*order, "os.unlink"}] == [*order, "os.unlink"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EINTR, errno.EDQUOT])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_fault_at_every_call(tmp_path, code, lasting):
    outcomes = set()
    for index in range(len(calls_of_a_save(tmp_path))):
        checkpoints = prepared(tmp_path)

        def fail(now: int, name: str, index=index) -> None:
            if now == index or (lasting and now > index):
                raise OSError(code, os.strerror(code))

        with checkpoints, pytest.MonkeyPatch.context() as monkeypatch:
            Shim(monkeypatch).at = fail
            saved = was_saved(checkpoints, state(3))
        found = visible(tmp_path)
        assert found[-1] == 3 if saved else 2 in found, (index, found)
        outcomes.add(saved)
        if not lasting:
            assert temporaries(tmp_path) == []
        # Whatever happened, the next save works and cleans up.
        with Checkpoints(tmp_path, keep=2, warn=pytest.fail) as checkpoints:
            newest = checkpoints.newest().state["n"]
            assert newest == found[-1]
            checkpoints.save(state(4), {})
        assert visible(tmp_path) == [newest, 4]
        assert temporaries(tmp_path) == []
    assert outcomes == {False, True}


def was_saved(checkpoints: Checkpoints, new: dict) -> bool:
    """Whether a save went well; if not, one clear error said so."""
    try:
        checkpoints.save(new, {})
    except OutputError as error:
        if str(checkpoints.folder) not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_short_writes_are_joined(tmp_path, monkeypatch, size):
    real = os.write
    checkpoints = prepared(tmp_path)
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:size]))
    with checkpoints:
        checkpoints.save(state(3), {})
    assert visible(tmp_path) == [2, 3]


def test_a_disk_that_fills_up_at_any_byte(tmp_path, monkeypatch):
    real = os.write
    room = 0

    def write(descriptor: int, data) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[: min(room, 97)])
        room -= written
        return written

    with prepared(tmp_path) as checkpoints:
        size = checkpoints.paths()[-1].stat().st_size
        monkeypatch.setattr(os, "write", write)
        for bytes_left in range(0, size, 61):
            room = bytes_left
            with pytest.raises(OutputError, match=r"can't write .*checkpoint-00000003.*: the disk is full; free some"):
                checkpoints.save(state(3), {})
            assert visible(tmp_path) == [1, 2]
            assert temporaries(tmp_path) == []
        room = size
        checkpoints.save(state(3), {})
    assert visible(tmp_path) == [2, 3]


def test_a_disk_that_returns_other_bytes_than_it_took(tmp_path, monkeypatch):
    real = os.write
    checkpoints = prepared(tmp_path)
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[::-1]))
    with checkpoints, pytest.raises(OutputError, match="is not what was written to it; check the disk"):
        checkpoints.save(state(3), {})
    assert visible(tmp_path) == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("chunk", [2**30, 400], ids=["whole writes", "small writes"])
def test_killed_at_every_call(tmp_path, chunk):
    index, killed = 0, True
    while killed:
        checkpoints = prepared(tmp_path)
        checkpoints._lock.release()
        killed = _killed_save(tmp_path, index, chunk)
        found = visible(tmp_path)
        assert found in ([1, 2], [1, 2, 3], [2, 3])
        with Checkpoints(tmp_path, keep=2, warn=pytest.fail) as checkpoints:
            assert temporaries(tmp_path) == []
            assert checkpoints.newest().state["n"] == found[-1]
        index += 1
    assert found == [2, 3]
    assert index > 15


def _killed_save(folder: Path, index: int, chunk: int) -> bool:
    """Save in a process that is killed just before its call number `index`; False if it made fewer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            checkpoints = Checkpoints(folder, keep=2, warn=print)
            real = os.write
            os.write = lambda descriptor, data: real(descriptor, memoryview(data)[:chunk])
            shim = Shim(pytest.MonkeyPatch())
            shim.at = lambda now, name: os.kill(os.getpid(), signal.SIGKILL) if now == index else None
            checkpoints.save(state(3), {})
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
