"""Files are written whole or not at all, whatever fails on the way."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bayeszip.errors import DataError, OutputError
from bayeszip.files import Lock, check_writable, create_folder, opened, read_file, remove_temporaries, write_atomically

OLD, NEW = b"the old content", b"the new content, a little longer"

#: every system call of a write, by the name it is called by
CALLS = ("open", "write", "fsync", "close", "chmod", "replace")


def folder_of(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}


@pytest.fixture
def target(tmp_path) -> Path:
    path = tmp_path / "net.bayz"
    path.write_bytes(OLD)
    return path


def fail(monkeypatch, call: str, error: BaseException, *, before: int = 0) -> None:
    """Let `os.call` raise `error` after `before` calls went well; a failing close still closes."""
    real, count = getattr(os, call), 0

    def failing(*arguments, **options):
        nonlocal count
        count += 1
        if count <= before:
            return real(*arguments, **options)
        if call == "close":
            real(*arguments, **options)
        raise error

    monkeypatch.setattr(f"bayeszip.files.os.{call}", failing)


@pytest.mark.parametrize("data", [b"", b"x", NEW, bytes(range(256)) * 10_000])
def test_content_arrives(tmp_path, data):
    path = tmp_path / "net.bayz"
    write_atomically(path, data)
    assert folder_of(path) == {"net.bayz": data}
    write_atomically(str(path), memoryview(data[::-1]))
    assert folder_of(path) == {"net.bayz": data[::-1]}


def test_what_can_not_be_read_is_named(tmp_path):
    path = tmp_path / "net.bayz"
    for bad, reason in ((path, "No such file"), (tmp_path, "Is a directory"), ("/dev/zero", "it is a device")):
        with pytest.raises(DataError, match=f"can't read .*{reason}"):
            read_file(bad)
    path.write_bytes(NEW)
    assert read_file(path) == NEW
    with pytest.raises(DataError, match="larger than the memory"), opened(path):
        raise MemoryError


def test_parts_of_a_write_are_joined(target, monkeypatch):
    real = os.write
    monkeypatch.setattr("bayeszip.files.os.write", lambda descriptor, rest: real(descriptor, rest[:3]))
    write_atomically(target, NEW)
    assert folder_of(target) == {"net.bayz": NEW}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_failing_system_call_leaves_the_old_file(target, monkeypatch, call, code):
    fail(monkeypatch, call, OSError(code, os.strerror(code)))
    with pytest.raises(OutputError, match=r"can't write .*net\.bayz: .*(choose|path)"):
        write_atomically(target, NEW)
    monkeypatch.undo()
    assert folder_of(target) == {"net.bayz": OLD}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_leaves_the_old_file(target, monkeypatch, call):
    fail(monkeypatch, call, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, NEW)
    monkeypatch.undo()
    assert folder_of(target) == {"net.bayz": OLD}


def test_a_disk_that_fills_up_midway_leaves_the_old_file(target, monkeypatch):
    real = os.write
    calls = []

    def fill(descriptor, rest):
        calls.append(len(rest))
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, rest[:5])

    monkeypatch.setattr("bayeszip.files.os.write", fill)
    with pytest.raises(OutputError, match="the disk is full; free some space"):
        write_atomically(target, NEW)
    assert calls == [len(NEW), len(NEW) - 5, len(NEW) - 10]
    assert folder_of(target) == {"net.bayz": OLD}


def test_content_reaches_the_disk_before_the_name_and_the_folder_after(target, monkeypatch):
    order = []
    for call in ("fsync", "replace"):
        real = getattr(os, call)

        def note(*arguments, call=call, real=real):
            is_folder = call == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            order.append("fsync folder" if is_folder else call)
            return real(*arguments)

        monkeypatch.setattr(f"bayeszip.files.os.{call}", note)
    write_atomically(target, NEW)
    assert order == ["fsync", "replace", "fsync folder"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_can_not_sync_folders_is_no_failure(target, monkeypatch, code):
    fail(monkeypatch, "fsync", OSError(code, os.strerror(code)), before=1)
    write_atomically(target, NEW)
    assert folder_of(target) == {"net.bayz": NEW}


def test_a_folder_that_can_not_be_opened_to_sync_is_no_failure(target, monkeypatch):
    fail(monkeypatch, "open", PermissionError(errno.EACCES, "Permission denied"), before=1)
    write_atomically(target, NEW)
    monkeypatch.undo()
    assert folder_of(target) == {"net.bayz": NEW}


def test_a_folder_whose_close_fails_is_no_failure(target, monkeypatch):
    fail(monkeypatch, "close", OSError(errno.EIO, "Input/output error"), before=1)
    write_atomically(target, NEW)
    monkeypatch.undo()
    assert folder_of(target) == {"net.bayz": NEW}


def test_a_disk_error_after_the_rename_is_told_as_it_is(target, monkeypatch):
    fail(monkeypatch, "fsync", OSError(errno.EIO, "Input/output error"), before=1)
    with pytest.raises(OutputError, match=r"is written and complete, but .*Input/output error.*write it again"):
        write_atomically(target, NEW)
    assert folder_of(target) == {"net.bayz": NEW}


@pytest.mark.parametrize("action", [lambda path: write_atomically(path, NEW), check_writable])
class TestRefusedPaths:
    """What can't be written is refused by the write and by the check made long before it, in the same words."""

    def test_a_folder(self, tmp_path, action):
        with pytest.raises(OutputError, match="it is a folder; name a file in it"):
            action(tmp_path)

    def test_a_missing_folder(self, tmp_path, action):
        with pytest.raises(OutputError, match=r"there is no folder .*missing; create it first"):
            action(tmp_path / "missing" / "net.bayz")
        assert list(tmp_path.iterdir()) == []

    def test_a_file_as_folder(self, target, action):
        with pytest.raises(OutputError, match=r"net\.bayz"):
            action(target / "inner.bayz")
        assert folder_of(target) == {"net.bayz": OLD}

    def test_a_device(self, action):
        with pytest.raises(OutputError, match="not a regular file"):
            action("/dev/null")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    def test_a_name_with_a_nul(self, tmp_path, action):
        with pytest.raises(OutputError, match="choose another path"):
            action(f"{tmp_path}/net\0.bayz")

    def test_an_empty_name(self, tmp_path, monkeypatch, action):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(OutputError, match="'': it is a folder"):
            action("")

    def test_a_name_that_is_too_long(self, tmp_path, action):
        with pytest.raises(OutputError, match="name is too long; choose a shorter one"):
            action(tmp_path / ("x" * 300))
        assert list(tmp_path.iterdir()) == []

    def test_a_write_protected_file(self, target, monkeypatch, action):
        monkeypatch.setattr("bayeszip.files.os.access", lambda path, mode: False)
        with pytest.raises(OutputError, match="write-protected"):
            action(target)
        assert folder_of(target) == {"net.bayz": OLD}

    @pytest.mark.parametrize(
        ("code", "remedy"),
        [
            (errno.EACCES, "permission denied; choose a folder you may write to"),
            (errno.EROFS, "the disk is read-only"),
            (errno.ENOSPC, "the disk is full"),
            (errno.EMFILE, "Too many open files"),
        ],
    )
    def test_a_folder_that_takes_no_files(self, target, monkeypatch, action, code, remedy):
        fail(monkeypatch, "open", OSError(code, os.strerror(code)))
        with pytest.raises(OutputError, match=remedy):
            action(target)
        monkeypatch.undo()
        assert folder_of(target) == {"net.bayz": OLD}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions don't bind this user")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="permission denied"):
            check_writable(tmp_path / "net.bayz")
    finally:
        tmp_path.chmod(0o700)


def test_checking_changes_nothing(target):
    before = target.stat()
    check_writable(target)
    check_writable(target.parent / "new.bayz")
    assert folder_of(target) == {"net.bayz": OLD}
    assert target.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("name", ["x" * 255, "Gewicht-θ 網.bayz", "-o", " "])
def test_odd_names(tmp_path, name):
    check_writable(tmp_path / name)
    write_atomically(tmp_path / name, NEW)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: NEW}


def test_a_relative_path_means_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomically("net.bayz", NEW)
    assert (tmp_path / "net.bayz").read_bytes() == NEW


def test_a_link_is_followed(target, tmp_path):
    link = tmp_path / "link.bayz"
    link.symlink_to(target)
    write_atomically(link, NEW)
    assert link.is_symlink()
    assert target.read_bytes() == NEW


def test_permissions_are_the_old_ones_or_the_usual_ones(target):
    target.chmod(0o640)
    write_atomically(target, NEW)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    usual, ours = target.with_name("usual"), target.with_name("ours")
    usual.write_bytes(NEW)
    write_atomically(ours, NEW)
    assert ours.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400 | 0o200])
def test_a_temporary_file_is_private_from_its_first_byte(target, monkeypatch, mode):
    target.chmod(mode)
    seen, write = [], os.write

    def watched(descriptor, data):
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    write_atomically(target, NEW)
    assert seen
    assert all(each & ~mode == 0 for each in seen)


def test_no_file_is_left_open(target, monkeypatch):
    open_now = lambda: len(os.listdir("/dev/fd"))  # noqa: E731
    before = open_now()
    write_atomically(target, NEW)
    fail(monkeypatch, "fsync", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OutputError):
        write_atomically(target, NEW)
    assert open_now() == before


def test_folders_are_created_with_those_above(tmp_path):
    folder = create_folder(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert create_folder(str(folder)) == folder
    (tmp_path / "file").write_bytes(b"")
    for impossible in (tmp_path / "file", tmp_path / "file" / "a", f"{tmp_path}/\0"):
        with pytest.raises(OutputError, match="can't create the folder"):
            create_folder(impossible)


def test_only_our_own_temporary_files_are_removed(target, monkeypatch):
    monkeypatch.setattr("bayeszip.files.os.replace", lambda *paths: None)  # as if killed just before
    write_atomically(target, NEW)
    assert len(list(target.parent.glob(".*.tmp"))) == 1
    (target.parent / ".mine.tmp").write_bytes(b"")
    remove_temporaries(target.parent)
    assert set(folder_of(target)) == {"net.bayz", ".mine.tmp"}
    remove_temporaries(target.parent / "missing")


HOLDER = """
import sys
from bayeszip.files import Lock
lock = Lock(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX locks and kill -9")
def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path):
    path = tmp_path / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(OutputError, match=f"another process works in {tmp_path}"):
            Lock(path)
        holder.kill()
    lock = Lock(path)
    lock.release()
    lock.release()
    Lock(path).release()


def test_a_lock_that_can_not_be_created_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"can't write .*missing"):
        Lock(tmp_path / "missing" / ".lock")


WRITER = """
import sys
from bayeszip.files import write_atomically
path, mark = sys.argv[1:]
print("ready", flush=True)
while True:
    write_atomically(path, mark.encode() * 200_000)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs kill -9")
def test_two_writers_killed_at_any_moment_leave_one_whole_file(target):
    target.write_bytes(b"a" * 200_000)
    for round_ in range(4):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(target), mark], stdout=subprocess.PIPE)
            for mark in ("a", "b")
        ]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.02 + 0.013 * round_)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        assert target.read_bytes() in (b"a" * 200_000, b"b" * 200_000)
