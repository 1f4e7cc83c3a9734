"""CIFAR-10 in its binary version, from a folder, an archive or its usual home (Krizhevsky, 2009).

The version is six files of records, five for training and one for the test. A record is a label, one byte from 0 to 9,
and 3 × 32 × 32 bytes of red, green and blue, each row by row: 3,073 bytes. Nothing in it is pickled.
"""

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch

from bayeszip.data.published import Published
from bayeszip.data.splits import Split, split_rows
from bayeszip.errors import DataError
from bayeszip.files import read_file

__all__ = ["ARCHIVE", "MEAN", "MIRRORS", "PUBLISHED", "SHA256", "STD", "read_test", "read_training"]

ARCHIVE = "cifar-10-binary.tar.gz"
MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)

#: sha256 of the archive whose md5 the authors publish as c32a1d4ab5d03f1284b67883e8d87530
SHA256 = {ARCHIVE: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"}

TRAINING_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)

#: Mean and standard deviation of red, green and blue over the 50,000 published training images, in units of 255; what
#: networks see is (pixel / 255 − mean) / deviation.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

#: One in so many training examples is set aside for validation: 5,000 of 50,000, as He et al. (2016) do.
VALIDATION_ONE_IN = 10

_INNER_FOLDER = "cifar-10-batches-bin"
_IMAGE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_CLASSES = 10
_MAX_BYTES = 2**30
_CHUNK = 2**20


def read_training(folder: Path) -> tuple[Split, Split]:
    """Training and validation examples; the file of the test is not opened, nor missed.

    Args:
        folder: holds the archive or its files, or is the archive itself.

    Raises:
        DataError: a file is missing, damaged or of the wrong form; the message names it.
    """
    records = _read(folder, TRAINING_FILES)
    train, validation = split_rows(len(records), VALIDATION_ONE_IN)
    return _split(records[train]), _split(records[validation])


def read_test(folder: Path) -> Split:
    """Test examples; takes and raises what `read_training` does."""
    return _split(_read(folder, TEST_FILES))


def _split(records: np.ndarray) -> Split:
    mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    pixels = torch.from_numpy(records[:, 1:].astype(np.float32)).reshape(-1, *_IMAGE)
    return Split(pixels.div_(255).sub_(mean).div_(deviation), torch.from_numpy(records[:, 0].astype(np.int64)))


def _read(folder: Path, names: Sequence[str]) -> np.ndarray:
    """The records of the files called so, one a row, file after file."""
    try:
        place = _place(folder, names)
        is_archive = place.is_file()
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error.strerror or error}") from error
    contents = _from_archive(place, names) if is_archive else {name: read_file(place / name) for name in names}
    return np.concatenate([_records(contents[name], f"{place / name}") for name in names])


def _place(folder: Path, names: Sequence[str]) -> Path:
    """The folder that holds the files called so, or the archive."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; give a folder with {ARCHIVE} or the files that it holds")
    for place in (folder, folder / _INNER_FOLDER):
        missing = [name for name in names if not (place / name).is_file()]
        if not missing:
            return place
        if len(missing) < len(names):
            raise DataError(f"{place} lacks {', '.join(missing)}")
    if (folder / ARCHIVE).is_file():
        return folder / ARCHIVE
    pickled = any((folder / name).exists() for name in ("cifar-10-python.tar.gz", "cifar-10-batches-py"))
    hint = "; it holds the Python version, whose pickles are not read: get the binary version" if pickled else ""
    raise DataError(f"{folder} holds neither {ARCHIVE} nor {', '.join(names)}{hint}")


def _records(content: bytes | bytearray, where: str) -> np.ndarray:
    """The records of a file, one a row."""
    count, rest = divmod(len(content), _RECORD)
    if not count or rest:
        raise DataError(f"{where} has {len(content):,} bytes; a file of CIFAR-10 holds whole records of {_RECORD:,}")
    records = np.frombuffer(content, np.uint8).reshape(count, _RECORD)
    wrong = np.flatnonzero(records[:, 0] >= _CLASSES)
    if len(wrong):
        raise DataError(
            f"{where} has the label {records[wrong[0], 0]} in record {wrong[0]:,}; CIFAR-10's labels are 0 to 9"
        )
    return records


def _from_archive(path: Path, names: Sequence[str]) -> dict[str, bytearray]:
    try:
        with path.open("rb") as stream:
            return _members(stream, names)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def _members(compressed: IO[bytes], names: Iterable[str]) -> dict[str, bytearray]:
    """The files called so in the archive, whatever folder they are in; nothing is written anywhere.

    It is read to its end, where its checksum is.
    """
    found = {}
    try:
        with gzip.open(compressed) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = member.name.rsplit("/", 1)[-1]
                    if name in names and member.isreg():
                        found[name] = _content(archive, member)
            while stream.read(_CHUNK):
                pass
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise DataError(f"not a sound .tar.gz archive: {error}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"the archive lacks {', '.join(missing)}")
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytearray:
    """Memory is taken as bytes arrive, and never more than any file of CIFAR-10 could need."""
    if member.size > _MAX_BYTES:
        raise DataError(f"{member.name} claims {member.size:,} bytes; {_MAX_BYTES:,} are allowed")
    content = bytearray()
    stream = archive.extractfile(member)
    while stream and (chunk := stream.read(_CHUNK)):
        content += chunk
    return content


# ---------------------------------------------------------------------------------------------------------------------
# As it is published


def _unpacked(file: str, archive: bytearray) -> dict[str, bytearray]:
    """The six files of the archive, if it is the published one."""
    actual = hashlib.sha256(archive).hexdigest()
    if actual != SHA256[file]:
        raise DataError(f"wrong checksum: sha256 is {actual}, not {SHA256[file]}")
    return _members(io.BytesIO(archive), (*TRAINING_FILES, *TEST_FILES))


def _holds(folder: Path) -> bool:
    names = (*TRAINING_FILES, *TEST_FILES)
    unpacked = any(all((place / name).is_file() for name in names) for place in (folder, folder / _INNER_FOLDER))
    return unpacked or (folder / ARCHIVE).is_file()


PUBLISHED = Published(
    name="cifar10",
    title="CIFAR-10",
    mirrors=MIRRORS,
    files=(ARCHIVE,),
    unpack=_unpacked,
    holds=_holds,
    forms="or the .bin files that it holds",
)
