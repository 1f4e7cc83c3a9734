"""Labeled images by name: MNIST and CIFAR-10 wherever they are found, and folders of IDX files."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bayeszip.data import cifar10, idx, mnist
from bayeszip.data.idx import read_idx
from bayeszip.data.published import Published, cache_folder
from bayeszip.data.splits import SPLIT_SEED, Dataset, Split
from bayeszip.errors import DataError, DataUsageError

__all__ = [
    "SPLIT_SEED",
    "Dataset",
    "Split",
    "cache_folder",
    "is_known",
    "load",
    "load_test",
    "load_training",
    "read_idx",
]


class _Reader(NamedTuple):
    """How the parts of a folder are read; the first never opens what the second reads."""

    training: Callable[[Path], tuple[Split, Split]]
    test: Callable[[Path], Split]


_IDX = _Reader(idx.read_training, idx.read_test)
_CIFAR10 = _Reader(cifar10.read_training, cifar10.read_test)

#: name → the data set as published, and how a folder of it is read
_PUBLISHED: dict[str, tuple[Published, _Reader]] = {
    "mnist": (mnist.PUBLISHED, _IDX),
    "cifar10": (cifar10.PUBLISHED, _CIFAR10),
}
#: what stands before the colon → how the folder named after it is read
_FOLDERS: dict[str, _Reader] = {"cifar10": _CIFAR10, "idx": _IDX}


def is_known(spec: str) -> bool:
    """Whether `spec` names a data set of this package, found or not; other names may mean something to others."""
    kind, colon, _ = spec.partition(":")
    return kind in _FOLDERS if colon else kind in _PUBLISHED


def load(spec: str, *, mirrors: Sequence[str] | None = None) -> Dataset:
    """The data set that `spec` names: `mnist`, `cifar10`, `cifar10:FOLDER` or `idx:FOLDER`, a folder of IDX files.

    MNIST and CIFAR-10 are looked for in the folder that the environment variable BAYESZIP_DATA names, in a checkout's
    data/ and in the cache folder; failing these they are downloaded into the cache folder, from `mirrors` instead of
    their usual homes if given.

    Raises:
        DataError: the data are missing, damaged or of the wrong form; the message names the file.
    """
    train, validation = load_training(spec, mirrors=mirrors)
    test = load_test(spec, mirrors=mirrors)
    sizes = [tuple(split.images.shape[1:]) for split in (train, test)]
    if sizes[0] != sizes[1]:
        raise DataError(f"{spec} holds images of different sizes, {sizes[0]} and {sizes[1]}, for training and the test")
    return Dataset(train, validation, test, name=spec)


def load_training(spec: str, *, mirrors: Sequence[str] | None = None) -> tuple[Split, Split]:
    """Training and validation examples alone; the files of the test set are not opened.

    See `load`, which takes and raises the same.
    """
    with _located(spec, mirrors) as (reader, folder):
        return reader.training(folder)


def load_test(spec: str, *, mirrors: Sequence[str] | None = None) -> Split:
    """Test examples alone; see `load`, which takes and raises the same."""
    with _located(spec, mirrors) as (reader, folder):
        return reader.test(folder)


@contextlib.contextmanager
def _located(spec: str, mirrors: Sequence[str] | None) -> Iterator[tuple[_Reader, Path]]:
    """How to read what `spec` names, and where it is; whoever finds it damaged in the cache is told what to do."""
    kind, colon, path = spec.partition(":")
    if colon and kind in _FOLDERS:
        if not path:
            raise DataUsageError(f"{kind}: needs a folder, as in {kind}:path/to/folder")
        yield _FOLDERS[kind], Path(path).expanduser()
    elif spec in _PUBLISHED:
        published, reader = _PUBLISHED[spec]
        folder = published.folder(mirrors)
        try:
            yield reader, folder
        except DataError as error:
            if folder != published.cached:
                raise
            raise DataError(f"{error}; delete {folder}, and {published.title} is downloaded again") from error
    else:
        raise DataUsageError(f"unknown data set {spec!r}; give mnist, cifar10, cifar10:FOLDER or idx:FOLDER")
