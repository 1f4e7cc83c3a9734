"""Malformed files made by hand, each with the error it must meet.

A body is written as hex after the five bytes of magic, version and coder; its checksum fits unless that is the fault.
"""

from collections.abc import Iterator

from mutation import repaired

from bayeszip.codec.bits import BitWriter
from bayeszip.codec.rangecoder import RangeEncoder

__all__ = ["malformed"]

_GOOD = bytes.fromhex("4241595a 11 01 01 00 00 02 6663 04 03 04 10 01 08 0038 00b8 02 02 12 87 01 09 39 48 10 3a")
#: one vector "w": named bare, of three elements
_W = "00 01 05 00 01 77 02 03"
#: the same quantized with values 1.0 and −2.0, and as bools
_QUANTIZED = _W + "10 00 08 003c 00c0"
_BOOLS = _W + "09 00"
#: a matrix of 2 × 3, quantized
_MATRIX = "00 01 05 00 01 77 04 02 03 10 00 08 003c 00c0"

_CONTAINER = [
    ("empty file", b"", "NotBayesZip"),
    ("one byte", b"B", "Truncated"),
    ("magic only", b"BAYZ", "Truncated"),
    ("another magic", b"PK\3\4" + bytes(20), "NotBayesZip"),
    ("magic in lower case", repaired(b"bayz" + _GOOD[4:]), "NotBayesZip"),
    ("eight bytes", _GOOD[:8], "Truncated"),
    ("nine bytes of zeros after the magic", b"BAYZ" + bytes(9), "UnsupportedVersion"),
    ("version 0", repaired(b"BAYZ\x01" + _GOOD[5:]), "UnsupportedVersion"),
    ("version 2 without need", repaired(b"BAYZ\x21" + _GOOD[5:]), "NotCanonical"),
    ("version 3", repaired(b"BAYZ\x31" + _GOOD[5:]), "UnsupportedVersion"),
    ("version 15", repaired(b"BAYZ\xf1" + _GOOD[5:]), "UnsupportedVersion"),
    ("coder 0", repaired(b"BAYZ\x10" + _GOOD[5:]), "UnknownCoder"),
    ("coder 3", repaired(b"BAYZ\x13" + _GOOD[5:]), "UnknownCoder"),
    ("coder 15", repaired(b"BAYZ\x1f" + _GOOD[5:]), "UnknownCoder"),
    ("checksum of zeros", _GOOD + bytes(4), "ChecksumMismatch"),
    ("checksum backwards", _GOOD + repaired(_GOOD)[:-5:-1], "ChecksumMismatch"),
    ("no header", repaired(b"BAYZ\x11"), "Truncated"),
    ("a file in a file", repaired(repaired(_GOOD)), "TrailingBytes"),
]

_HEADERS = [
    ("scales in version 1", "10 00", "InvalidField"),
    ("flags unknown", "20 00", "InvalidField"),
    ("a grid in version 1", _W + "10 00 01 08 003c", "InvalidField"),
    ("flags in two bytes", "80 00 00", "NotCanonical"),
    ("option 0", "08 00 00", "NotCanonical"),
    ("option too wide", "08 11 00", "InvalidField"),
    ("original parameters superfluous", "02 00 00", "NotCanonical"),
    ("original parameters cut", "02 ff", "Truncated"),
    ("original parameters of ten bytes", "02" + "ff" * 9 + "01 00", "InvalidField"),
    ("ends without a graph", "04 00 01 01 00", "InvalidGraph"),
    ("layers missing", "00 02 05 00 01 61 02 01", "Truncated"),
    ("more layers than bytes", "00 ff7f 05", "Truncated"),
    ("more layers than allowed", "00 ffff7f" + "05" * 40, "InvalidField"),
    ("members 6", "00 01 06 00 01 61 02 01 00 00", "InvalidField"),
    ("members 7", "00 01 07 00 01 61 02 01 00 00", "InvalidField"),
    ("name shared with nothing", "00 01 05 01 01 61 02 01 00 00", "InvalidField"),
    ("name longer than the file", "00 01 05 00 7f 61 02 01 00 00", "Truncated"),
    ("name not UTF-8", "00 01 05 00 01 ff 02 01 00 00", "InvalidField"),
    ("name an overlong UTF-8 NUL", "00 01 05 00 02 c080 02 01 00 00", "InvalidField"),
    ("name a UTF-8 surrogate", "00 01 05 00 03 eda080 02 01 00 00", "InvalidField"),
    ("name of 1001 bytes", "00 01 05 00 e907" + "61" * 1001 + "02 01 00 00", "InvalidField"),
    ("step from a name without a number", "00 01 0d 02 01 00 00", "InvalidField"),
    ("step not used", "00 02 05 00 01 31 02 01 05 00 01 32 02 01 00 01", "NotCanonical"),
    ("shared part not used", "00 02 05 00 02 6162 02 01 05 00 02 6163 02 01 00 01", "NotCanonical"),
    ("a layer's name as a bare name", "00 01 05 00 08 612e776569676874 02 01 00 00", "NotCanonical"),
    ("weight and bias apart", "00 02 01 00 01 61 02 03 02 01 00 02 03 00 01", "NotCanonical"),
    ("equal names", "00 02 05 00 01 61 02 01 05 01 00 02 01 00 01", "DuplicateName"),
    ("equal names across layers", "00 02 01 00 01 61 02 01 01 01 00 02 02 00 01", "DuplicateName"),
    ("33 dimensions", "00 01 05 00 01 61 42" + "01" * 33 + "00 00", "InvalidField"),
    ("chained to nothing", "00 01 05 00 01 61 03 00 00", "InvalidField"),
    ("chained without dimensions", "00 01 05 00 01 61 01 00 00", "InvalidField"),
    ("chain not used", "00 02 05 00 01 61 04 05 06 05 00 01 62 04 07 05 00 01", "NotCanonical"),
    ("a dimension above 2⁴⁸", "00 01 05 00 01 61 02 ffffffffffff7f 00 00", "InvalidField"),
    ("2⁷² elements", "00 01 05 00 01 61 06 ffffffff0f ffffffff0f 01 00 00", "InvalidField"),
    ("2⁷² elements times none", "00 01 05 00 01 61 06 ffffffff0f ffffffff0f 00 00 00", "InvalidField"),
    (
        "2⁴⁹ elements in two tensors",
        "00 02 05 00 01 61 02 80808080808040 05 00 01 62 02 80808080808040 00 01",
        "InvalidField",
    ),
    ("10¹² elements", "00 01 05 00 01 61 02 80a094a58d1d 00 00", "LimitExceeded"),
    ("many elements in many tensors", "00 02 05 00 01 61 02 80800c 05 00 01 62 02 80800c 00 01", "LimitExceeded"),
    ("dtype 10", _W + "0a 00", "InvalidField"),
    ("kind 15", _W + "0f 00", "InvalidField"),
    ("the second codebook first", _W + "11 00 00 00", "InvalidField"),
    ("two kinds for one tensor", _W + "00 01", "InvalidField"),
    ("no kind", _W, "Truncated"),
    ("runs not joined", "00 02 05 00 01 61 02 01 05 00 01 62 02 01 00 00 00 00", "NotCanonical"),
    ("codebook cut", _W + "10 00 08 003c 00", "Truncated"),
    ("codebook of 2¹⁶ + 1 values", _W + "10 00 808010", "InvalidField"),
    ("codebook with infinity", _W + "10 00 04 007c", "InvalidField"),
    ("codebook with NaN in bfloat16", _W + "10 00 05 c07f", "InvalidField"),
    ("codebook wider than need be", _W + "10 00 06 0000803f", "NotCanonical"),
    ("codebook in the later of two formats", _W + "10 00 05 803f", "NotCanonical"),
    ("codebook with fractions of 24 bits", _W + "10 00 07 180000 00000000", "InvalidField"),
    ("codebook with exponents of 9 bits", _W + "10 00 07 000900 0000", "InvalidField"),
    ("codebook of 257 narrow floats", _W + "10 00 8708 000000" + "00" * 40, "InvalidField"),
    ("codebook filled with ones", _W + "10 00 13 00007f 0f", "NotCanonical"),
    ("equal codebooks", "00 02 05 00 01 61 02 01 05 00 01 62 02 01 10 00 11 00 04 003c 04 003c", "NotCanonical"),
    (
        "equal codebooks of empty tensors",
        "00 02 05 00 01 61 02 00 05 00 01 62 02 00 10 00 11 00 04 003c 04 003c",
        "NotCanonical",
    ),
    ("opcode 0", "01 00 01 00", "InvalidGraph"),
    ("opcode 2000", "01 00 01 a01f", "InvalidGraph"),
    ("more nodes than bytes", "01 00 7f 12", "Truncated"),
    ("mask empty", "01 00 01 13 00", "NotCanonical"),
    ("mask superfluous", "01 00 01 13 01 00", "NotCanonical"),
    ("an input before the first", "01 00 01 13 01 01", "InvalidGraph"),
    ("an attribute too many", "01 00 01 13 04", "InvalidGraph"),
    ("an attribute at its default", "01 00 01 19 04 02", "NotCanonical"),
    ("a tensor that doesn't exist", "01 00 01 03 02 01 00", "InvalidGraph"),
    ("an output that doesn't exist", "05 00 00 01 01 05", "InvalidGraph"),
    ("ends as usual", "05 00 00 01 01 00", "NotCanonical"),
    ("a million inputs", "05 00 00 c0843d 01 00", "InvalidField"),
]  # fmt: skip

#: what follows the name of a tensor of 2 × 3, with scales
_SCALED = "10 01 05 00 01 77 04 02 03 10 00"

#: a vector of 4096, quantized, after the coder's option
_LARGE = "01 05 00 01 77 02 8020 10 00 08 003c 00c0"

_NEWER = [
    ("an option of 0", "08 00" + _LARGE, "NotCanonical"),
    ("an option in more bytes than it needs", "08 8400" + _LARGE, "NotCanonical"),
    ("an option without end", "08" + "80" * 1300 + "01" + _LARGE, "InvalidField"),
    ("a way that doesn't exist", "08 06" + _LARGE, "InvalidField"),
    ("ways of more tensors than there are", "08 10" + _LARGE, "InvalidField"),
    ("a way of a small tensor", "08 04 01 05 00 01 77 02 03 10 00 08 003c 00c0", "InvalidField"),
    ("flags unknown", "20 00", "InvalidField"),
    ("scales of nothing", "10 00", "NotCanonical"),
    ("scales of none", _SCALED + "00 00 08 003c 00c0", "NotCanonical"),
    ("scales of a vector", "10 01 05 00 01 77 02 03 10 00 01 08 003c", "NotCanonical"),
    ("scales for two of one", _SCALED + "01 01 08 003c 00c0", "InvalidField"),
    ("scales of an empty tensor", "10 01 05 00 01 77 04 00 03 10 00 01 00 08 003c 00c0", "InvalidField"),
    ("scales of a codebook that doesn't exist", _SCALED + "05 00 08 003c 00c0", "InvalidField"),
    ("runs of scales cut", _SCALED + "01", "Truncated"),
    ("a grid's numbers in few bits", _W + "10 00 01 0b 000000 00", "InvalidField"),
    ("a grid of one symbol", _W + "10 00 01 00 003c", "InvalidField"),
    ("a grid of 2¹⁶ + 1 symbols", _W + "10 00 01 808010 003c", "InvalidField"),
    ("a grid with step 0", _W + "10 00 01 08 0000", "InvalidField"),
    ("a grid with a negative step", _W + "10 00 01 08 00bc", "InvalidField"),
    ("a grid with an infinite step", _W + "10 00 01 08 007c", "InvalidField"),
    ("a grid with a step that is none", _W + "10 00 01 08 007e", "InvalidField"),
    ("a grid with a denormal step", _W + "10 00 01 0a 01000000", "InvalidField"),
    ("a grid wider than need be", _W + "10 00 01 0a 0000803f", "NotCanonical"),
    ("a grid beyond float32", _W + "10 00 01 0d 007f", "InvalidField"),
    ("a grid cut", _W + "10 00 02 08 003c 00", "Truncated"),
    ("a ratio of 1", _W + "10 00 02 08 003c 003c", "InvalidField"),
    ("a ratio below 1", _W + "10 00 03 08 003c 0038", "InvalidField"),
    ("ratios beyond float32", _W + "10 00 03 8208 000080000000007f", "InvalidField"),
    ("4097 symbols at equal ratios", _W + "10 00 02 808001 003c 013c", "InvalidField"),
    ("equal grids", "00 02 05 00 01 61 02 01 05 00 01 62 02 01 10 00 11 00 01 08 003c 01 08 003c", "NotCanonical"),
]  # fmt: skip

_CSR = [
    ("no code where there are weights", _QUANTIZED, "0" + "1" * 23, "CorruptPayload"),
    ("code lengths cut", _QUANTIZED, "1 111", "Truncated"),
    ("code over-subscribed", _QUANTIZED, "1 000 111 0", "InvalidCode"),
    ("code under-subscribed", _QUANTIZED, "1 001 10 10 00", "InvalidCode"),
    ("code without symbols", _QUANTIZED, "1 000 000 0", "InvalidCode"),
    ("code lengths wider than need be", _QUANTIZED, "1 001 00 01 01 1 000 00000 000010 11 01 10", "NotCanonical"),
    ("code for nothing", _QUANTIZED, "1 000 011 0", "NotCanonical"),
    ("offsets of 17 bits", _QUANTIZED, "1 000 011 1 000 10001 000001 1" + "0" * 20, "InvalidField"),
    ("counts of 63 bits", _QUANTIZED, "1 000 011 1 000 00001 111111" + "0" * 80, "InvalidField"),
    ("more entries than weights", _QUANTIZED, "1 000 011 1 000 00000 000111 1111111" + "0" * 20, "CorruptPayload"),
    ("an entry beyond the row", _QUANTIZED, "1 000 011 1 000 00010 000001 1 11 0", "CorruptPayload"),
    ("values cut", _QUANTIZED, "1 000 011 1 000 00000 000010 11", "CorruptPayload"),
    ("counts cut", _MATRIX, "1 000 011 1 000 00001 100000 000", "Truncated"),
    ("a row dropped in vain", _MATRIX, "1 000 011 1 010 00010 000001 11 0 0 00 00 0 1", "NotCanonical"),
    ("padding that isn't needed", _QUANTIZED, "1 001 01 10 10 1 000 00001 000010 10 0 0 0 10", "NotCanonical"),
    ("a worse layout", _QUANTIZED, "1 000 011 1 000 01000 000001 1 00000010 1", "NotCanonical"),
    ("filled with ones", _QUANTIZED, "1 000 011 1 000 00010 000001 1 10 1 1", "NotCanonical"),
    ("a byte too many", _QUANTIZED, "0 0 000000 00000000", "TrailingBytes"),
    ("a bool of 2", _BOOLS, "1 00000010 00000000 00000000", "CorruptPayload"),
    ("zeros said to be something", _BOOLS, "1 00000000 00000000 00000000", "NotCanonical"),
    ("raw bytes cut", _BOOLS, "1 00000001", "Truncated"),
]  # fmt: skip

_CONTEXT = [
    ("zeros said to be weights", _QUANTIZED, ((1, 1), (31, 5)), b"", "NotCanonical"),
    ("the wrong density", _QUANTIZED, ((1, 1), (30, 5), (0xFFFF, 16)), b"", "NotCanonical"),
    ("the wrong lag", _MATRIX, ((1, 1), (1, 5), (40, 6), (0xFFFFFF, 24)), b"", "NotCanonical"),
    ("weights without values", _W + "10 00 00", ((1, 1),), b"", "CorruptPayload"),
    ("a zero byte too many", _QUANTIZED, ((0, 1),), b"\0", "NotCanonical"),
    ("bytes too many", _QUANTIZED, ((0, 1),), b"\0\0\0\0\0\0\1", "TrailingBytes"),
    ("not the smallest end", _QUANTIZED, (), b"\x81", "NotCanonical"),
    ("not the shortest end", _QUANTIZED, (), b"\x80\1", "NotCanonical"),
    ("no payload for no weights", _QUANTIZED, (), b"\xff\xff\xff\xff\xff", "NotCanonical"),
    ("an option", "08 05 01 05 00 01 77 02 03 10 00 08 003c 00c0", (), b"", "InvalidField"),
    ("raw zeros said to be something", _BOOLS, ((1, 1), (0, 24)), b"", "NotCanonical"),
    ("bools of 255", _BOOLS, ((1, 1), (0xFFFFFFFF, 32)), b"", "CorruptPayload"),
    ("noise where there is none", "00 01 05 00 01 77 02 8004 08 00", ((1, 1), (1, 1), (5, 8)), b"", "NotCanonical"),
]


def _csr(body: str, bits: str) -> bytes:
    out = BitWriter()
    for bit in bits.replace(" ", ""):
        out.put(int(bit), 1)
    return repaired(b"BAYZ\x11" + bytes.fromhex(body) + out.to_bytes())


def _context(body: str, plain: tuple[tuple[int, int], ...], tail: bytes, version: int = 1) -> bytes:
    encoder = RangeEncoder()
    for value, count in plain:
        encoder.bits(value, count)
    return repaired(b"BAYZ" + bytes([16 * version + 2]) + bytes.fromhex(body) + encoder.finish() + tail)


def malformed() -> Iterator[tuple[str, bytes, str]]:
    """(what is wrong, the file, the name of the error)."""
    yield from _CONTAINER
    for name, body, error in _HEADERS:
        yield f"header: {name}", repaired(b"BAYZ\x12" + bytes.fromhex(body)), error
    for name, body, error in _NEWER:
        yield f"version 2: {name}", repaired(b"BAYZ\x22" + bytes.fromhex(body)), error
    huge = _SCALED + "01 00 05 007f"  # scales with the tensor's own codebook, whose one value is 2¹²⁷
    yield "version 2: values times scales beyond float32", _context(huge, ((0, 1), (0, 1)), b"", 2), "InvalidField"
    told = ((1, 1), (31, 5), (100, 7))
    yield "version 2: the wrong mean magnitude", _context("08 04" + _LARGE, told, b"", 2), "NotCanonical"
    for name, body, bits, error in _CSR:
        yield f"csr-huffman: {name}", _csr(body, bits), error
    for name, body, plain, tail, error in _CONTEXT:
        yield f"context: {name}", _context(body, plain, tail), error
