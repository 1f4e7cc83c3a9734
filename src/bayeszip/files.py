"""Files that are either written whole or not at all, in folders that one process holds at a time; and read.

The bytes go to a temporary file beside the target, which takes the target's name only when they are safely on the
disk. Whatever happens before that moment, an interrupt included, leaves the old file as it was.
"""

import contextlib
import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from bayeszip.errors import DataError, OutputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Lock", "check_writable", "create_folder", "opened", "read_file", "remove_temporaries", "write_atomically"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)

#: What `_place` names a temporary file; hidden, so that nobody takes it for a finished one.
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")

#: What a file system answers that can't synchronize a folder at all, which is no failure of this write.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose a path on another disk",
    errno.EDQUOT: "your disk quota is used up; free some space or choose a path on another disk",
    errno.EFBIG: "the file is too large for this disk or your limits; choose a path on another disk",
    errno.EACCES: "permission denied; choose a folder you may write to",
    errno.EPERM: "permission denied; choose a folder you may write to",
    errno.EROFS: "the disk is read-only; choose a path on another disk",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


def write_atomically(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """Write `data` to `path` so that a reader finds the old file or the new one, never a part.

    A symbolic link is followed, an existing file's permissions are kept.

    Raises:
        OutputError: the file could not be written; the old one, if any, is untouched and nothing half-written is left.
    """
    target, temporary = _place(path)
    try:
        mode = _mode(target)
        # From its first byte on the temporary file is at most as open as the one whose place it takes.
        _write_new(temporary, data, 0o666 if mode is None else stat.S_IMODE(mode) & 0o777)
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except OSError as error:
        _remove(temporary)
        raise _output_error(path, error) from error
    except BaseException:
        _remove(temporary)
        raise
    _sync_folder(target)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes.

    Raises:
        DataError: it is missing or can't be read.
    """
    with opened(path) as file:
        return file.readall()


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """A file, or a pipe, to be read piece by piece.

    Raises:
        DataError: it is missing, can't be read, has no end, or doesn't fit into memory.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # /dev/zero never ends
                raise DataError(f"can't read {_shown(path)}: it is a device; name a file")
            yield file
    except OSError as error:
        raise DataError(f"can't read {_shown(path)}: {error.strerror or error}") from error
    except MemoryError as error:
        raise DataError(f"can't read {_shown(path)}: it is larger than the memory of this machine") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `OutputError` now if `path` could not be written later, by creating and removing a file beside it."""
    _, temporary = _place(path)
    try:
        _write_new(temporary, b"\0", 0o600)
    except OSError as error:
        raise _output_error(path, error) from error
    finally:
        _remove(temporary)


def create_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder, with those above it, if it is not there yet; to be asked for before a training that will fill it.

    Raises:
        OutputError: it can't be created.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise OutputError(f"can't create the folder {_shown(folder)}: {reason or error}") from error
    return Path(folder)


def remove_temporaries(folder: str | os.PathLike[str]) -> None:
    """Remove what processes that were killed left of their writes into `folder`; only for who alone writes there."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name):
                _remove(Path(folder, name))


class Lock:
    """Held by one process at a time, and given back by the system however that process ends.

    Raises:
        OutputError: another process holds it, or the file can't be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise _output_error(path, error) from error
        if fcntl is None:
            return
        try:
            # Of the process, not of the open file: workers that it forks don't keep it when it is gone.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self.release()
                folder = Path(path).parent
                raise OutputError(f"another process works in {folder}; wait for it, or choose another") from error
            # Some network file systems know no locks; then nothing is promised, as without one.

    def release(self) -> None:
        """Give it back; more than once does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _checked_target(path: str | os.PathLike[str]) -> Path:
    """Where `path` leads, links followed, if a file may be put there."""
    try:
        target = Path(os.path.realpath(path))
        mode = _mode(target)
        if mode is None and not stat.S_ISDIR(_mode(target.parent) or 0):
            raise OutputError(f"can't write {_shown(path)}: there is no folder {target.parent}; create it first")
    except ValueError as error:  # a NUL character, for one
        raise OutputError(f"can't write {_shown(path)}: {error}; choose another path") from error
    except OSError as error:
        raise _output_error(path, error) from error
    if mode is None:
        return target
    if stat.S_ISDIR(mode):
        raise OutputError(f"can't write {_shown(path)}: it is a folder; name a file in it")
    if not stat.S_ISREG(mode):  # a rename would replace a device such as /dev/null by a file
        raise OutputError(f"can't write {_shown(path)}: it is not a regular file; choose another path")
    if not os.access(target, os.W_OK):
        raise OutputError(f"can't write {_shown(path)}: the file is write-protected; choose another path")
    return target


def _mode(path: Path) -> int | None:
    """Kind and permissions of what stands at `path`; None if nothing does."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _place(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where `path` leads, links followed, if a file may be put there; and a temporary file beside it."""
    target = _checked_target(path)
    try:
        # Not derived from the target's name, which may already be as long as the file system allows.
        return target, target.parent / f".{secrets.token_hex(8)}.tmp"
    except OSError as error:
        raise _output_error(path, error) from error


def _write_new(path: Path, data: bytes | bytearray | memoryview, mode: int) -> None:
    """Create `path`, fill it and wait until the disk has it."""
    descriptor = os.open(path, _CREATE, mode)  # the umask takes its share
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(target: Path) -> None:
    """Wait until the disk knows the new name too, where a folder can be opened for that."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(target.parent, os.O_RDONLY)
    except OSError:  # a folder that may be written but not read: nothing to synchronize through
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise OutputError(
                f"{target} is written and complete, but the disk did not confirm its name ({error.strerror}); "
                "check the disk and write it again"
            ) from error
    finally:
        # It was opened for reading only: whatever its end brings, nothing is lost by it.
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _output_error(path: str | os.PathLike[str], error: OSError) -> OutputError:
    fallback = f"{error.strerror or error}; choose another path"
    return OutputError(f"can't write {_shown(path)}: {_REMEDIES.get(error.errno or 0, fallback)}")


def _shown(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if text.isprintable() and text else repr(text)
