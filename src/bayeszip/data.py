"""Labeled images in memory: IDX files, MNIST wherever it is found, and batches of them.

IDX is the format MNIST came in: two zero bytes, a type code, the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values, big-endian, in C order.
"""

import gzip
import hashlib
import http.client
import io
import lzma
import math
import os
import struct
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeszip.errors import DataError, OutputError
from bayeszip.files import write_atomically

__all__ = ["MIRRORS", "Batches", "Dataset", "Split", "cache_folder", "download_mnist", "load", "read_idx"]

#: Where MNIST is published; each serves `<name>.gz` for every name of `MNIST_SHA256`.
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

#: sha256 of the four files, uncompressed
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

#: One in so many training examples is set aside for validation: 5,000 of MNIST's 60,000.
VALIDATION_ONE_IN = 12
#: Seed of the validation split, the paper's number. Changing it makes every accuracy measured before incomparable.
SPLIT_SEED = 20171106494

_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_USUAL_NAMES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "test-images": "t10k-images-idx3-ubyte",
    "test-labels": "t10k-labels-idx1-ubyte",
}
_MAX_DIMENSIONS = 8
_MAX_BYTES = 2**33
_CHUNK = 2**20
_MAX_DOWNLOAD = 2**26
_TIMEOUT = 30.0


@dataclass(frozen=True, eq=False)
class Split:
    """Images as float32 in [0, 1], N × channels × height × width, and their labels as int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Split":
        """The same examples on another device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three disjoint splits; `validation` is cut from the published training set, `test` is the published one."""

    train: Split
    validation: Split
    test: Split
    name: str

    @property
    def classes(self) -> int:
        """One more than the largest label of all."""
        return 1 + max(int(split.labels.max()) for split in (self.train, self.validation, self.test))


def load(spec: str, *, mirrors: Sequence[str] = MIRRORS) -> Dataset:
    """The data set that `spec` names: `mnist`, or `idx:FOLDER` for a folder of IDX files.

    MNIST is looked for in the folder that the environment variable BAYESZIP_DATA names, in a checkout's data/mnist
    and in the cache folder; failing these it is downloaded from `mirrors` into the cache folder.

    Raises:
        DataError: the data are missing, damaged or of the wrong form; the message names the file.
    """
    if spec == "mnist":
        return _mnist(mirrors)
    kind, separator, folder = spec.partition(":")
    if kind == "idx" and separator:
        if not folder:
            raise DataError("idx: needs a folder, as in idx:path/to/folder")
        return _dataset(Path(folder).expanduser(), spec)
    raise DataError(f"unknown data set {spec!r}; give mnist or idx:FOLDER")


# ---------------------------------------------------------------------------------------------------------------------
# IDX files


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """The array in an IDX file: plain, or compressed if its name ends in .gz or .xz.

    Memory is taken as bytes arrive, never on the word of the header.

    Raises:
        DataError: the file can't be read, is not IDX, or is longer or shorter than its header says.
    """
    path = Path(path)
    try:
        with _opened(path) as stream:
            dtype, shape = _read_header(stream, path)
            return _read_values(stream, path, dtype, shape)
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} is not a sound {path.suffix} file: {error}") from error
    except (MemoryError, ValueError) as error:  # too much for this machine; a path that is none
        raise DataError(f"{path} can't be read: {str(error) or 'there is not enough memory'}") from error
    except EOFError as error:
        raise DataError(f"{path} is truncated: its compressed data end too early") from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def _opened(path: Path) -> io.BufferedIOBase:
    match path.suffix:
        case ".gz":
            return gzip.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case _:
            return path.open("rb")


def _read_header(stream: io.BufferedIOBase, path: Path) -> tuple[np.dtype, tuple[int, ...]]:
    magic = stream.read(4)
    if len(magic) < 4:
        raise DataError(f"{path} is truncated: {len(magic)} bytes, too few for an IDX header")
    if magic[:2] != b"\0\0":
        raise DataError(f"{path} is not an IDX file: it starts with {magic.hex(' ')}{_compression_hint(magic)}")
    if magic[2] not in _IDX_DTYPES:
        known = ", ".join(f"0x{code:02x}" for code in _IDX_DTYPES)
        raise DataError(f"{path} has the unknown IDX type code 0x{magic[2]:02x}; known are {known}")
    rank = magic[3]
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise DataError(f"{path} claims {rank} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
    sizes = stream.read(4 * rank)
    if len(sizes) < 4 * rank:
        raise DataError(f"{path} is truncated: its header of {4 + 4 * rank} bytes ends after {4 + len(sizes)}")
    return np.dtype(_IDX_DTYPES[magic[2]]), struct.unpack(f">{rank}I", sizes)


def _compression_hint(magic: bytes) -> str:
    for start, suffix in ((b"\x1f\x8b", ".gz"), (b"\xfd7zX", ".xz")):
        if magic.startswith(start):
            return f", as a compressed file does; let its name end in {suffix}"
    return ", not with 00 00"


def _read_values(stream: io.BufferedIOBase, path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    expected = math.prod(shape) * dtype.itemsize
    if not expected and math.prod(max(1, size) for size in shape) > _MAX_BYTES:
        raise DataError(f"{path} is empty, but claims sizes of {' × '.join(map(str, shape))}")
    described = f"its header promises {' × '.join(map(str, shape))} values of {dtype.itemsize} bytes"
    if expected > _MAX_BYTES:
        raise DataError(f"{path} is too large: {described}, {expected:,} bytes; {_MAX_BYTES:,} are allowed")
    values = _read_at_most(stream, expected + 1)
    if len(values) < expected:
        raise DataError(f"{path} is truncated: {described}, {expected:,} bytes, and {len(values):,} follow")
    if len(values) > expected:
        raise DataError(f"{path} is too long: {described}, {expected:,} bytes, and more follow")
    return np.frombuffer(values, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _read_at_most(stream: io.BufferedIOBase, limit: int) -> bytearray:
    """Up to `limit` bytes, in chunks: what a header promises is not allocated before it is there."""
    content = bytearray()
    while len(content) < limit and (chunk := stream.read(min(_CHUNK, limit - len(content)))):
        content += chunk
    return content


# ---------------------------------------------------------------------------------------------------------------------
# A folder of IDX files


def _dataset(folder: Path, name: str) -> Dataset:
    paths = _find_files(folder)
    images, labels = _read_pair(paths["train-images"], paths["train-labels"])
    test_images, test_labels = _read_pair(paths["test-images"], paths["test-labels"])
    if images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{paths['train-images']} and {paths['test-images']} hold images of different sizes, "
            f"{images.shape[1:]} and {test_images.shape[1:]}"
        )
    if len(images) < 2:
        raise DataError(f"{paths['train-images']} holds one image; training and validation need two")
    train, validation = _split_rows(len(images))
    return Dataset(
        train=_split(images[train], labels[train]),
        validation=_split(images[validation], labels[validation]),
        test=_split(test_images, test_labels),
        name=name,
    )


def _find_files(folder: Path) -> dict[str, Path]:
    """The four files of a folder, by role; names like MNIST's first, else the only one that fits."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} can't be read as a folder of IDX files: {error.strerror or error}") from error
    found = {role: _candidates(entries, role) for role in _USUAL_NAMES}
    missing = [f"{_USUAL_NAMES[role]} (or .gz, .xz)" for role, paths in found.items() if not paths]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}")
    for role, paths in found.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise DataError(f"{folder} holds several files that could be the {role}: {names}; keep one")
    return {role: paths[0] for role, paths in found.items()}


def _role(stem: str) -> str | None:
    """What a file called `stem` seems to hold."""
    part = "train" if "train" in stem else "test" if "t10k" in stem or "test" in stem else None
    kind = "images" if "images" in stem else "labels" if "labels" in stem else None
    return f"{part}-{kind}" if part and kind else None


def _candidates(entries: list[Path], role: str) -> list[Path]:
    """The files that could play `role`: one alone if its name is the usual one or if only one name fits.

    The same name with several compressions counts once, the quickest to read of them.
    """
    by_stem: dict[str, Path] = {}
    for suffix in (".xz", ".gz", ""):
        for path in entries:
            compressed = path.suffix in (".gz", ".xz")
            if (path.suffix if compressed else "") == suffix:
                by_stem[(path.stem if compressed else path.name).lower()] = path
    usual = _USUAL_NAMES[role]
    for stem in (usual, usual.replace("-idx", ".idx")):
        if stem in by_stem:
            return [by_stem[stem]]
    return [path for stem, path in sorted(by_stem.items()) if _role(stem) == role]


def _read_pair(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images, N × channels × height × width, and as many labels; both checked, neither converted yet."""
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim not in (3, 4):
        raise DataError(
            f"{images_path} has shape {images.shape}; images are N × height × width or N × channels × height × width"
        )
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{labels_path} holds {labels.dtype} of shape {labels.shape}; labels are a row of integers")
    if len(images) != len(labels):
        raise DataError(f"{images_path} holds {len(images):,} images, but {labels_path} holds {len(labels):,} labels")
    if images.size == 0:
        raise DataError(f"{images_path} holds no images: its shape is {images.shape}")
    if labels.min() < 0:
        raise DataError(f"{labels_path} holds the negative label {labels.min()}")
    _check_range(images, images_path)
    return images[:, None] if images.ndim == 3 else images, labels


def _check_range(images: np.ndarray, path: Path) -> None:
    """Bytes mean 0 to 255; floats must lie in [0, 1] already; what other types would mean, nobody can know."""
    if images.dtype == np.uint8:
        return
    if not np.issubdtype(images.dtype, np.floating):
        raise DataError(f"{path} holds {images.dtype}; images are unsigned bytes, or floats in [0, 1]")
    low, high = float(images.min()), float(images.max())
    if not 0 <= low <= high <= 1:  # also false for NaN
        raise DataError(f"{path} holds floats in [{low:g}, {high:g}]; images of floats must lie in [0, 1]")


def _split(images: np.ndarray, labels: np.ndarray) -> Split:
    pixels = torch.from_numpy(images).to(torch.float32)
    if images.dtype == np.uint8:
        pixels.div_(255)
    return Split(pixels, torch.from_numpy(labels.astype(np.int64)))


def _split_rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of `n` published training examples train and which validate, each in the file's order.

    numpy promises the raw stream of a bit generator for ever, but not what `Generator.permutation` makes of it; so
    the split is the same in every version.
    """
    order = np.argsort(np.random.PCG64(SPLIT_SEED).random_raw(n), kind="stable")
    held_out = max(1, round(n / VALIDATION_ONE_IN))
    return np.sort(order[held_out:]), np.sort(order[:held_out])


# ---------------------------------------------------------------------------------------------------------------------
# Where MNIST is


def cache_folder() -> Path:
    """Where bayeszip keeps downloads: under XDG_CACHE_HOME if that is set, else where the platform keeps caches."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "bayeszip"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bayeszip"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "bayeszip" / "Cache"
    return Path.home() / ".cache" / "bayeszip"


def _mnist(mirrors: Sequence[str]) -> Dataset:
    folder = _mnist_folder(mirrors)
    try:
        return _dataset(folder, "mnist")
    except DataError as error:
        if folder != cache_folder() / "mnist":
            raise
        raise DataError(f"{error}; delete {folder}, and MNIST is downloaded again") from error


def _mnist_folder(mirrors: Sequence[str]) -> Path:
    if chosen := os.environ.get("BAYESZIP_DATA"):
        folder = next((path for path in (Path(chosen), Path(chosen) / "mnist") if _is_complete(path)), None)
        if folder is None:
            names = ", ".join(MNIST_SHA256)
            raise DataError(
                f"BAYESZIP_DATA names {chosen}, which lacks MNIST; put {names} there (plain, .gz or .xz) or unset it"
            )
        return folder
    cached = cache_folder() / "mnist"
    for folder in (_checkout() / "data" / "mnist", cached):
        if _is_complete(folder):
            return folder
    download_mnist(cached, mirrors)
    return cached


def _checkout() -> Path:
    """The root of the source tree, if this file is in one."""
    return Path(__file__).resolve().parents[2]


def _is_complete(folder: Path) -> bool:
    return all(any((folder / f"{name}{suffix}").is_file() for suffix in ("", ".gz", ".xz")) for name in MNIST_SHA256)


def download_mnist(folder: Path, mirrors: Sequence[str] = MIRRORS) -> None:
    """Put the four files of MNIST into `folder`, each checked before it gets its name; files already there stay.

    Raises:
        DataError: no mirror gave a sound file, or the folder can't be written; the message says what to do instead.
    """
    missing = [name for name in MNIST_SHA256 if not (folder / f"{name}.gz").is_file()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _progress() as progress:
            for name in missing:
                write_atomically(folder / f"{name}.gz", _fetch(name, mirrors, folder, progress))
    except OSError as error:
        raise DataError(f"can't keep MNIST in {folder}: {error.strerror or error}. {_advice(folder)}") from error
    except OutputError as error:
        raise DataError(f"can't keep MNIST in {folder}: {error}. {_advice(folder)}") from error


def _fetch(name: str, mirrors: Sequence[str], folder: Path, progress: Any) -> bytes:
    """The compressed file from the first mirror whose answer has the right checksum."""
    faults = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}.gz"
        try:
            compressed = _download(url, progress)
            _check_sha256(compressed, MNIST_SHA256[name])
            return compressed
        except DataError as error:
            faults.append(f"{url}: {error}")
        except urllib.error.HTTPError as error:
            with error:
                faults.append(f"{url}: the server answers {error.code} {error.reason}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            faults.append(f"{url}: {reason}")
    listed = "".join(f"\n  {fault}" for fault in faults)
    raise DataError(f"MNIST could not be downloaded:{listed}\n{_advice(folder)}")


def _download(url: str, progress: Any) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
        promised = response.headers.get("Content-Length")
        total = int(promised) if promised else None
        task = progress.add_task(url.rsplit("/", 1)[-1], total=total)
        content = bytearray()
        while chunk := response.read(2**16):
            content += chunk
            progress.update(task, completed=len(content))
            if len(content) > _MAX_DOWNLOAD:
                raise DataError(f"the answer is longer than {_MAX_DOWNLOAD:,} bytes, so it is not MNIST")
    if total is not None and len(content) != total:
        raise DataError(f"the connection was cut after {len(content):,} of {total:,} bytes")
    return bytes(content)


def _check_sha256(compressed: bytes, expected: str) -> None:
    """Refuse a download whose uncompressed content is not the published one."""
    try:
        with gzip.open(io.BytesIO(compressed)) as stream:
            content = _read_at_most(stream, _MAX_DOWNLOAD + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"the answer is not a sound gzip file: {error}") from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise DataError(f"wrong checksum: sha256 of the uncompressed content is {actual}, not {expected}")


def _advice(folder: Path) -> str:
    names = ", ".join(f"{name}.gz" for name in MNIST_SHA256)
    return f"Put {names} into {folder}, or into any folder and name it in the environment variable BAYESZIP_DATA."


def _progress() -> Any:
    """A bar for each file on stderr, gone when done; silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """Batches of tensors that already are where they are needed; the same seed gives the same batches in order.

    Each pass makes one permutation on the tensors' device and selects from it, without waiting for a GPU.

    Args:
        inputs: one row an example.
        targets: as many rows, on the same device.
        batch_size: rows a batch; the last batch holds the remainder.
        shuffle: a new order for each pass; otherwise batches are slices, in order.
        seed: start of the orders.
        drop_last: leave the remainder out.

    Example:
        >>> x, y = torch.arange(5.0), torch.arange(5)
        >>> [y.tolist() for _, y in Batches(x, y, 2)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{len(inputs)} inputs and {len(targets)} targets don't match")
        if inputs.device != targets.device:
            raise DataError(f"inputs on {inputs.device} and targets on {targets.device}; move them to one device")
        if batch_size < 1:
            raise DataError(f"a batch holds at least 1 example, not {batch_size}")
        self.inputs, self.targets = inputs, targets
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        #: Which rows the batch given last holds, if shuffled; lets others keep figures of their own for each row.
        self.rows: Tensor | None = None
        self._generator = torch.Generator(inputs.device).manual_seed(seed)
        self._pass_began = self._generator.get_state()
        self._given = 0
        self._skip = 0

    @property
    def n_examples(self) -> int:
        """How many examples there are, those that `drop_last` leaves out included."""
        return len(self.targets)

    def __len__(self) -> int:
        n = self.n_examples
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order, skip = self.begin_pass()
        for batch in range(skip, len(self)):
            self.given(batch + 1)
            rows = slice(batch * self.batch_size, (batch + 1) * self.batch_size)
            if order is None:
                yield self.inputs[rows], self.targets[rows]
            else:
                yield self.select(order[rows])
        self.end_pass()

    def begin_pass(self) -> tuple[Tensor | None, int]:
        """The rows in the order of the pass that begins (None: as they lie), and how many batches it skips.

        With `select`, `given` and `end_pass` what iterating does, for whoever iterates in a way of his own.
        """
        self._pass_began = self._generator.get_state()
        skip, self._skip = self._skip, 0
        if not self.shuffle:
            return None, skip
        return torch.randperm(self.n_examples, generator=self._generator, device=self.inputs.device), skip

    def select(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of these rows, which becomes the one given last."""
        self.rows = rows
        return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)

    def given(self, batches: int) -> None:
        """Note that this pass has given so many batches."""
        self._given = batches

    def end_pass(self) -> None:
        """The next pass begins where the random numbers of this one ended."""
        self._given = 0
        self._pass_began = self._generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        """Where the batches stand: the random state in which this pass began, and how many batches it has given."""
        return {"generator": self._pass_began.clone(), "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where `state` was taken: the rest of that pass, then passes as they would follow."""
        given = int(state["given"])
        if not 0 <= given <= len(self):
            raise DataError(
                f"the state stands at batch {given}, but a pass has {len(self)}; was the batch size changed?"
            )
        try:
            self._generator.set_state(state["generator"].cpu())
        except (RuntimeError, TypeError) as error:
            raise DataError(f"the random state does not fit {self.inputs.device}: {error}") from error
        self._pass_began, self._given, self._skip = self._generator.get_state(), given, given
