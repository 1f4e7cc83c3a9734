"""Data sets that somebody publishes: where they are kept on this machine, and how they get there."""

import contextlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayeszip.errors import DataError, OutputError
from bayeszip.files import write_atomically

__all__ = ["Published", "cache_folder"]

_MAX_DOWNLOAD = 2**28
_TIMEOUT = 30.0


@dataclass(frozen=True)
class Published:
    """A data set as its authors publish it, and how to tell that a folder holds it.

    Attributes:
        name: of its folder in the cache, in a checkout's data/ and under BAYESZIP_DATA.
        title: how messages call it.
        mirrors: addresses that serve every file of `files`.
        files: what is downloaded.
        unpack: the content of a downloaded file → what is kept of it, by name; refuses all but the published content.
        holds: whether a folder has all that is needed.
        forms: in which other forms a folder may hold the files, for advice.
    """

    name: str
    title: str
    mirrors: Sequence[str]
    files: Sequence[str]
    unpack: Callable[[str, bytearray], Mapping[str, bytes | bytearray]]
    holds: Callable[[Path], bool]
    forms: str

    def folder(self, mirrors: Sequence[str] | None = None) -> Path:
        """A folder that holds the data set; the cache's, after a download, if there is none yet.

        Raises:
            DataError: BAYESZIP_DATA names a folder without it, or it can't be downloaded; says what to do.
        """
        if chosen := os.environ.get("BAYESZIP_DATA"):
            for folder in (Path(chosen), Path(chosen) / self.name):
                if self.holds(folder):
                    return folder
            raise DataError(
                f"BAYESZIP_DATA names {chosen}, which lacks {self.title}; "
                f"put {', '.join(self.files)} there ({self.forms}) or unset it"
            )
        for folder in (_checkout() / "data" / self.name, self.cached):
            if self.holds(folder):
                return folder
        self.download(self.cached, self.mirrors if mirrors is None else mirrors)
        return self.cached

    @property
    def cached(self) -> Path:
        """Where downloads of it are kept."""
        return cache_folder() / self.name

    def download(self, folder: Path, mirrors: Sequence[str]) -> None:
        """Put the data set into `folder`, each file checked before it gets its name; files already there stay.

        Raises:
            DataError: no mirror gave a sound file, or the folder can't be written; says what to do instead.
        """
        with self._kept_in(folder), _progress() as progress:
            for file in self.files:
                if not (folder / file).is_file():
                    for name, content in self._fetch(file, mirrors, folder, progress).items():
                        write_atomically(folder / name, content)

    @contextlib.contextmanager
    def _kept_in(self, folder: Path) -> Iterator[None]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            yield
        except (OSError, OutputError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"can't keep {self.title} in {folder}: {reason}. {self._advice(folder)}") from error

    def _fetch(self, file: str, mirrors: Sequence[str], folder: Path, progress: Any) -> Mapping[str, bytes | bytearray]:
        """What is kept of `file`, from the first mirror whose answer is the published one."""
        faults = []
        for mirror in mirrors:
            url = f"{mirror.rstrip('/')}/{file}"
            try:
                return self.unpack(file, _download(url, progress))
            except DataError as error:
                faults.append(f"{url}: {error}")
            except urllib.error.HTTPError as error:
                with error:
                    faults.append(f"{url}: the server answers {error.code} {error.reason}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = getattr(error, "reason", None) or error
                faults.append(f"{url}: {reason}")
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise DataError(f"{self.title} could not be downloaded:{listed}\n{self._advice(folder)}")

    def _advice(self, folder: Path) -> str:
        files = ", ".join(self.files)
        return f"Put {files} into {folder}, or into any folder and name it in the environment variable BAYESZIP_DATA."


def cache_folder() -> Path:
    """Where bayeszip keeps downloads: under XDG_CACHE_HOME if that is set, else where the platform keeps caches."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "bayeszip"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bayeszip"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "bayeszip" / "Cache"
    return Path.home() / ".cache" / "bayeszip"


def _checkout() -> Path:
    """The root of the source tree, if this file is in one."""
    return Path(__file__).resolve().parents[3]


def _download(url: str, progress: Any) -> bytearray:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
        promised = response.headers.get("Content-Length")
        total = int(promised) if promised else None
        task = progress.add_task(url.rsplit("/", 1)[-1], total=total)
        content = bytearray()
        while chunk := response.read(2**16):
            content += chunk
            progress.update(task, completed=len(content))
            if len(content) > _MAX_DOWNLOAD:
                raise DataError(f"the answer is longer than {_MAX_DOWNLOAD:,} bytes, so it is not what is published")
    if total is not None and len(content) != total:
        raise DataError(f"the connection was cut after {len(content):,} of {total:,} bytes")
    return content


def _progress() -> Any:
    """A bar for each file on stderr, gone when done; silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
