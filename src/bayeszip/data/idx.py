"""IDX files, and folders of them.

IDX is the format MNIST came in: two zero bytes, a type code, the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values, big-endian, in C order.
"""

import gzip
import io
import lzma
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bayeszip.data.splits import Split, split_rows
from bayeszip.errors import DataError

__all__ = ["read_idx", "read_test", "read_training"]

#: One in so many training examples is set aside for validation: 5,000 of MNIST's 60,000.
VALIDATION_ONE_IN = 12

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


def read_training(folder: Path) -> tuple[Split, Split]:
    """Training and validation examples of a folder of IDX files; those of the test are not opened, nor missed.

    Raises:
        DataError: a file is missing, damaged or of the wrong form; the message names it.
    """
    images_path, labels_path = _find_files(folder, ("train-images", "train-labels"))
    images, labels = _read_pair(images_path, labels_path)
    if len(images) < 2:
        raise DataError(f"{images_path} holds one image; training and validation need two")
    train, validation = split_rows(len(images), VALIDATION_ONE_IN)
    return _split(images[train], labels[train]), _split(images[validation], labels[validation])


def read_test(folder: Path) -> Split:
    """Test examples of a folder of IDX files; raises as `read_training` does."""
    return _split(*_read_pair(*_find_files(folder, ("test-images", "test-labels"))))


def _find_files(folder: Path, roles: Sequence[str]) -> list[Path]:
    """The files of a folder that play these roles; names like MNIST's first, else the only one that fits."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} can't be read as a folder of IDX files: {error.strerror or error}") from error
    found = {role: _candidates(entries, role) for role in roles}
    missing = [f"{_USUAL_NAMES[role]} (or .gz, .xz)" for role, paths in found.items() if not paths]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}")
    for role, paths in found.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise DataError(f"{folder} holds several files that could be the {role}: {names}; keep one")
    return [found[role][0] for role in roles]


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
