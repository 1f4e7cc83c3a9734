"""A whole file: magic, version and coder, header, payload, checksum.

"BAYZ" │ version and coder │ header │ payload │ CRC-32C of all before
 4 B         1 B              …         …         4 B, least significant first

The header is packed where that makes it shorter.
"""

import os
import stat
from typing import Protocol

from bayeszip.codec.checksum import crc32c
from bayeszip.codec.header import Outline, outline_of, outline_parts, read_outline
from bayeszip.codec.packed import header_in_file, packed_parts, unpack
from bayeszip.codec.paper import PaperCoder
from bayeszip.codec.parts import Description, Part, TensorDescription, bytes_by_part
from bayeszip.codec.streams import ContextCoder
from bayeszip.codec.syntax import (
    ChecksumMismatch,
    InvalidField,
    NotBayesZip,
    NotCanonical,
    Reader,
    TrailingBytes,
    Truncated,
    UnknownCoder,
    UnsupportedVersion,
)
from bayeszip.errors import FormatError, ModelError
from bayeszip.files import opened
from bayeszip.limits import Budget, LimitExceeded, Limits
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

__all__ = ["CODERS", "DEFAULT_CODER", "MAGIC", "VERSIONS", "decode", "describe", "encode", "inspect", "measure", "read"]

MAGIC = b"BAYZ"
#: a file has the lowest version that can say what it says
VERSIONS = (1, 2)
#: added to the coder's number where the header is packed, and the version that this takes
_PACKED, _VERSION_OF_PACKED = 8, 2
_CHECKSUM_BYTES = 4
_PIECE = 1 << 20
_SHORTEST = len(MAGIC) + 1 + _CHECKSUM_BYTES


class Coder(Protocol):
    """Turns a model's tensors into bytes and back; `read` refuses all bytes but those that `write` gives.

    `option` is what the file must say about the coder itself, `version` the lowest version in which it can; `settled`
    decides for a model what was left open.
    """

    @property
    def option(self) -> int: ...

    @property
    def version(self) -> int: ...

    @classmethod
    def of_option(cls, option: int) -> "Coder": ...

    def settled(self, model: CompressedModel) -> "Coder": ...

    def write(self, model: CompressedModel, outline: Outline) -> bytes: ...

    def read(
        self, outline: Outline, data: bytes, start: int, end: int, parts: list[Part]
    ) -> dict[str, QuantizedTensor | RawTensor]: ...


#: a coder's name in Python → its number in the file and its class. Numbers are part of the format.
CODERS: dict[str, tuple[int, type[Coder]]] = {"csr-huffman": (1, PaperCoder), "context": (2, ContextCoder)}
_NAMES = {number: name for name, (number, _) in CODERS.items()}
DEFAULT_CODER = "context"


def encode(
    model: CompressedModel, coder: str = DEFAULT_CODER, *, packed: int | None = None, **options: int | None
) -> bytes:
    """The model as a file. What was written is decoded and compared before it is returned.

    Args:
        coder: "csr-huffman", the paper's.
        packed: 1 to have the header packed, 0 to leave it plain; by default, whichever is shorter.
        options: of the coder; for "csr-huffman": `offset_bits`, the width of a column offset; for "context": `ways`,
            how it codes (`describe` tells those of a file), by default as suits the model.
    """
    blob = _write(model, _coder(coder, options), coder, packed)
    try:
        decoded, _, _ = _read(blob, Budget(Limits.none()))  # what the caller holds as a model, he may have as a file
    except FormatError as error:
        raise ModelError(f"the model doesn't survive coding: {error}") from error
    if not _same(decoded, model):
        raise ModelError("the model doesn't survive coding: the file decodes to another one; please report this")
    return blob


def _same(first: CompressedModel, second: CompressedModel) -> bool:
    """Whether two models are equal, in the order of their tensors too; compared piece by piece to spare memory."""
    if outline_of(first) != outline_of(second):
        return False
    for one, other in zip(first.tensors.values(), second.tensors.values(), strict=True):
        if isinstance(one, QuantizedTensor) and isinstance(other, QuantizedTensor) and one.scale != other.scale:
            return False
        left, right = (
            (tensor.symbols if isinstance(tensor, QuantizedTensor) else tensor.values).reshape(-1)
            for tensor in (one, other)
        )
        for start in range(0, left.size, _PIECE):
            if left[start : start + _PIECE].tobytes() != right[start : start + _PIECE].tobytes():
                return False
    return True


def measure(
    model: CompressedModel, coder: str = DEFAULT_CODER, *, packed: int | None = None, **options: int | None
) -> int:
    """The bytes that `encode` would return, without the proof that they decode: for showing sizes while training."""
    return len(_write(model, _coder(coder, options), coder, packed))


def read(path: str | os.PathLike[str], limits: Limits | Budget | None = None) -> bytes:
    """A file's bytes, for `decode`. What another kind of file begins with is all that is read of it.

    A pipe is read like a file, but without knowing before how many bytes will come.

    Raises:
        FormatError: it doesn't begin as a `.bayz` file does, or has more bytes than `limits` allow.
        DataError: it is missing or can't be read.
    """
    budget = Budget.of(limits)
    with opened(path) as file:
        blob = file.read(len(MAGIC))
        _check_magic(blob)
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode):
            budget.check("file", found.st_size)
            file.seek(0)
            return file.readall()
        held = bytearray(blob)
        while piece := file.read(_PIECE):
            held += piece
            _check_magic(held)
            budget.check("file", len(held))
        return bytes(held)


def decode(blob: bytes, limits: Limits | Budget | None = None) -> CompressedModel:
    """The model in a file; exactly the one that was encoded.

    Args:
        limits: what the file may ask for; a budget, where more than decoding is to be charged to it.

    Raises:
        FormatError: the file is damaged, malformed, not canonical, or declares more than `limits` allow.
    """
    return _read(_octets(blob), Budget.of(limits))[0]


def describe(blob: bytes, limits: Limits | Budget | None = None) -> Description:
    """What a file holds and which part of it takes how many bytes; they add up to `len(blob)`."""
    return inspect(blob, limits)[1]


def inspect(blob: bytes, limits: Limits | Budget | None = None) -> tuple[CompressedModel, Description]:
    """What `decode` and `describe` give, the file read once."""
    blob = _octets(blob)
    model, outline, parts = _read(blob, Budget.of(limits))
    totals = bytes_by_part(parts)
    of_tensor: dict[str | None, dict[str, int]] = {described.name: {} for described in outline.tensors} | {None: {}}
    for (tensor, part), count in totals.items():
        of_tensor[tensor][part] = count
    version, packed, number = _kind(blob)
    name = _NAMES[number]
    return model, Description(
        bytes=len(blob),
        version=version,
        coder=name,
        options={**_options(CODERS[name][1].of_option(outline.option)), "packed": int(packed)},
        original_parameters=outline.original_parameters,
        parts=_whole_parts(of_tensor[None], outline, packed),
        tensors=tuple(
            TensorDescription(
                name=described.name,
                shape=described.shape,
                kind=described.dtype or "quantized",
                size=described.size,
                nonzero=model.tensors[described.name].nonzero,
                symbols=outline.symbols(described),
                parts=of_tensor[described.name],
            )
            for described in outline.tensors
        ),
    )


def _whole_parts(held: dict[str, int], outline: Outline, packed: bool) -> dict[str, int]:
    """The parts of the file as a whole, the header by what it tells."""
    parts: dict[str, int] = {}
    for part, count in held.items():
        if part == "header":
            parts |= packed_parts(outline) if packed else outline_parts(outline)
        else:
            parts[part] = count
    return parts


def _octets(blob: bytes | bytearray | memoryview) -> bytes:
    """The file's bytes; anything else (a number, a path) is a mistake of the caller's."""
    if not isinstance(blob, bytes | bytearray | memoryview):
        raise TypeError(f"the bytes of a file are needed, not {type(blob).__name__}")
    return bytes(blob)


def _options(coder: Coder) -> dict[str, int]:
    """The options with which `encode` writes this very file again."""
    return {name: value for name, value in vars(coder).items() if value is not None}


def _coder(name: str, options: dict[str, int | None]) -> Coder:
    if name not in CODERS:
        raise ModelError(f"there is no coder {name!r}; there are: {', '.join(CODERS)}")
    try:
        return CODERS[name][1](**options)
    except TypeError as error:
        raise ModelError(f"the coder {name!r} doesn't know one of the options {sorted(options)}") from error


def _write(model: CompressedModel, coder: Coder, name: str, packed: int | None) -> bytes:
    coder = coder.settled(model)
    outline = outline_of(model, coder.option)
    header, is_packed = header_in_file(outline, packed)
    version = max(outline.version, coder.version, _VERSION_OF_PACKED if is_packed else 1)
    kind = version << 4 | is_packed * _PACKED | CODERS[name][0]
    body = MAGIC + bytes([kind]) + header + coder.write(model, outline)
    return body + crc32c(body).to_bytes(_CHECKSUM_BYTES, "little")


def _read(blob: bytes, budget: Budget) -> tuple[CompressedModel, Outline, list[Part]]:
    budget.check("file", len(blob))
    coder_class = _checked_coder(blob)
    end = len(blob) - _CHECKSUM_BYTES
    source = Reader(blob, len(MAGIC) + 1, end, budget)
    version, packed, _ = _kind(blob)
    outline = _read_packed(source, version) if packed else read_outline(source, version)
    coder = coder_class.of_option(outline.option)
    if coder.version > version:
        raise InvalidField(f"the file's coder has an option that version {version} lacks")
    if max(outline.version, coder.version, _VERSION_OF_PACKED if packed else 1) < version:
        raise NotCanonical(f"the file has version {version}, but needs a lower one only")
    outline.charge(budget, len(blob))
    start = source.position
    parts = [Part(None, "magic", 0, 8 * (len(MAGIC) + 1)), Part(None, "header", 8 * (len(MAGIC) + 1), 8 * start)]
    try:
        tensors = coder.read(outline, blob, start, end, parts)
    except MemoryError as error:
        raise LimitExceeded(f"this machine lacks the {outline.memory} bytes that the file declares") from error
    parts.append(Part(None, "checksum", 8 * end, 8 * len(blob)))
    return CompressedModel(tensors, outline.graph, outline.original_parameters), outline, parts


def _read_packed(source: Reader, version: int) -> Outline:
    header = Reader(unpack(source), budget=source.budget)
    outline = read_outline(header, version)
    if header.position < header.end:
        raise TrailingBytes(f"{header.end - header.position} bytes follow the header in what is packed")
    return outline


def _kind(blob: bytes) -> tuple[int, bool, int]:
    """The file's version, whether its header is packed, and the number of its coder."""
    version, number = divmod(blob[len(MAGIC)], 16)
    packed = number >= _PACKED and version >= _VERSION_OF_PACKED
    return version, packed, number - _PACKED * packed


def _check_magic(blob: bytes | bytearray) -> None:
    """Refuse what begins otherwise, as far as it goes."""
    if not blob or not blob.startswith(MAGIC[: len(blob)]):
        raise NotBayesZip("the file doesn't begin with 'BAYZ': it is not a .bayz file")


def _checked_coder(blob: bytes) -> type[Coder]:
    """The file's coder, if the file begins and ends as it must."""
    _check_magic(blob)
    if len(blob) < _SHORTEST:
        raise Truncated(f"the file has {len(blob)} bytes, fewer than any .bayz file")
    end = len(blob) - _CHECKSUM_BYTES
    version, _, number = _kind(blob)
    if version not in VERSIONS:
        raise UnsupportedVersion(f"the file has format version {version}, this reader knows {VERSIONS}")
    if number not in _NAMES:
        raise UnknownCoder(f"the file uses coder {number}, which doesn't exist in version {version}")
    if crc32c(blob[:end]) != int.from_bytes(blob[end:], "little"):
        raise ChecksumMismatch("the checksum doesn't fit: the file is damaged or incomplete")
    return CODERS[_NAMES[number]][1]
