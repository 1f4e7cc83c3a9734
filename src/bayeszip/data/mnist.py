"""MNIST as it is published: four IDX files, checked by their sums, and where they are."""

import gzip
import hashlib
import io
import zlib
from pathlib import Path

from bayeszip.data.published import Published
from bayeszip.errors import DataError

__all__ = ["MIRRORS", "PUBLISHED", "SHA256"]

#: Where MNIST is published; each serves `<name>.gz` for every name of `SHA256`.
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

#: sha256 of the four files, uncompressed
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

#: No file of MNIST is as long, so what is longer when unpacked is another.
_MAX_BYTES = 2**26


def _checked(file: str, compressed: bytearray) -> dict[str, bytearray]:
    """The file as it came, if its uncompressed content is the published one."""
    try:
        with gzip.open(io.BytesIO(compressed)) as stream:
            content = stream.read(_MAX_BYTES)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"the answer is not a sound gzip file: {error}") from error
    actual, expected = hashlib.sha256(content).hexdigest(), SHA256[file.removesuffix(".gz")]
    if actual != expected:
        raise DataError(f"wrong checksum: sha256 of the uncompressed content is {actual}, not {expected}")
    return {file: compressed}


def _holds(folder: Path) -> bool:
    return all(any((folder / f"{name}{suffix}").is_file() for suffix in ("", ".gz", ".xz")) for name in SHA256)


PUBLISHED = Published(
    name="mnist",
    title="MNIST",
    mirrors=MIRRORS,
    files=tuple(f"{name}.gz" for name in SHA256),
    unpack=_checked,
    holds=_holds,
    forms="or .xz, or uncompressed",
)
