"""A header in fewer bytes: octet by octet, by those before it, after a text that every reader knows.

Names, shapes and nodes repeat themselves within a header, and from network to network. So each octet is eight
decisions, mixed from what followed the last few octets wherever they stood before, and from the octet that followed
their latest occurrence. The model begins with what it learns from `PRIMER`.

    size of the header │ length of what follows │ the header's octets, range-coded
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled, entry, prepare
from bayeszip.codec.evidence import UNIT_WEIGHT, decide, weigh
from bayeszip.codec.header import Outline, outline_parts, write_outline
from bayeszip.codec.primer import PRIMER
from bayeszip.codec.rangecoder import RangeDecoder, RangeEncoder, Span
from bayeszip.codec.syntax import InvalidField, NotCanonical, Number, Reader, TrailingBytes, Truncated
from bayeszip.errors import ModelError

__all__ = ["header_in_file", "pack", "packed_parts", "unpack"]

#: Contexts of an octet: so many octets before it, together; and one that stands so far before it, alone, as the same
#: octet of the last float32 or run does. The expected octet is one input more.
_ORDERS, _ALONE = 5, 4
_INPUTS = _ORDERS + 2
#: Start weights of the mixture in 1/65536, and other numbers: found by trial on headers of networks.
_WEIGHT, _RATE, _PRIOR, _MOST = 16000, 60, 6, 1 << 8
#: Places for evidence that each input has; contexts may meet in one.
_PLACES = 1 << 16
#: An octet is expected after this many that stood together before; runs of expected ones are told apart up to here.
_EXPECTING, _LONGEST_RUN = 3, 15
#: A packed header has at most so many octets for each byte of its stream and so many beside, so that no file can be
#: unpacked into something huge; and at most so many in all: plain Python takes two seconds for them.
_MOST_FOR_A_BYTE, _MOST_BESIDE, _MOST_OCTETS = 16, 64, 1 << 15

#: Bytes that the least likely octet takes: eight decisions of 14 bits.
_LONGEST_OCTET = 14

_SIZE, _LENGTH = Number("size of the header"), Number("length of the packed header")


class Memory(NamedTuple):
    """The model: evidence and weights of all inputs, and what is expected.

    Args:
        contexts: of the octet at hand; `places`, `inputs`: of the decision at hand.
        latest: what came behind the latest occurrence of some octets, as its place, by their context.
        expected: the place of the octet that is expected next, −1 for none; and how many in a row were as expected.
    """

    zeros: np.ndarray
    ones: np.ndarray
    weights: np.ndarray
    contexts: np.ndarray
    places: np.ndarray
    inputs: np.ndarray
    latest: np.ndarray
    expected: np.ndarray

    @classmethod
    def fresh(cls) -> "Memory":
        zeros, ones = np.zeros((2, _INPUTS * _PLACES), dtype=np.uint16)
        weights = np.full(_INPUTS, _WEIGHT * (UNIT_WEIGHT >> 16), dtype=np.int64)
        contexts, places, inputs = np.zeros((3, _INPUTS), dtype=np.int64)
        latest, expected = np.full(_PLACES, -1, dtype=np.int64), np.array([-1, 0], dtype=np.int64)
        return cls(zeros, ones, weights, contexts, places, inputs, latest, expected)


@compiled
def _context(octets: np.ndarray, first: int, count: int) -> int:
    """A number below 2²² for `count` octets from `first` on; what lies before the first of all is left out."""
    number = 0
    for place in range(max(first, 0), first + count):
        number = (number * 773 + octets[place] + 1) & 0x3FFFFF
    return number


@entry
def _code(
    span: Span, buffer: np.ndarray, end: int | None, octets: np.ndarray, first: int, last: int, memory: Memory
) -> Span:
    """Codes the octets `first` to `last`; those before are known."""
    contexts, expected = memory.contexts, memory.expected
    for at in range(first, last):
        for order in range(_ORDERS):
            contexts[order] = _context(octets, at - order, order)
        contexts[_ORDERS] = _context(octets, at - _ALONE, 1)
        octet, span = _code_octet(span, buffer, end, int(octets[at]), octets, memory)
        octets[at] = octet
        if expected[0] >= 0 and octet == octets[expected[0]]:
            expected[0] += 1
            expected[1] += 1
        else:
            expected[0], expected[1] = -1, 0
        if at + 1 >= _EXPECTING:
            place = _context(octets, at + 1 - _EXPECTING, _EXPECTING) % _PLACES
            if expected[0] < 0:
                expected[0] = memory.latest[place]
            memory.latest[place] = at + 1
    return span


@compiled
def _code_octet(
    span: Span, buffer: np.ndarray, end: int | None, octet: int, octets: np.ndarray, memory: Memory
) -> tuple[int, Span]:
    contexts, places, expected = memory.contexts, memory.places, memory.expected
    likely = octets[expected[0]] if expected[0] >= 0 else 0
    run = (_INPUTS - 1) * _PLACES + 2 * min(expected[1], _LONGEST_RUN)
    # The last input has a say as long as the octet goes on as expected.
    count = _INPUTS if expected[0] >= 0 else _INPUTS - 1
    node = 1
    for level in range(7, -1, -1):
        hoped = likely >> level & 1
        for index in range(_INPUTS - 1):
            places[index] = index * _PLACES + ((contexts[index] * 1000003 + node * 40503) >> 5) % _PLACES
        places[_INPUTS - 1] = run + hoped
        odds = weigh(memory.zeros, memory.ones, places, memory.inputs, memory.weights, count, _PRIOR)
        bit, span = decide(span, buffer, end, octet >> level & 1, odds, memory.zeros, memory.ones, places,
                           memory.inputs, memory.weights, count, _RATE, _MOST)  # fmt: skip
        if bit != hoped:
            count = _INPUTS - 1
        node = 2 * node + bit
    return node - 256, span


class _Octets:
    """A header's octets behind the primer's, and the model of them."""

    def __init__(self, size: int) -> None:
        prepare(8 * size)
        self.all = np.zeros(len(PRIMER) + size, dtype=np.int64)
        self.all[: len(PRIMER)] = np.frombuffer(PRIMER, dtype=np.uint8)
        self.header = self.all[len(PRIMER) :]
        self._memory = Memory(*(array.copy() for array in _primed()))
        self._coded = 0

    def code(self, coder: RangeEncoder | RangeDecoder, until: int) -> None:
        """Codes those of the header's octets that are not coded yet, `until` the given one."""
        coder.reserve(_LONGEST_OCTET * (until - self._coded))
        first, last = len(PRIMER) + self._coded, len(PRIMER) + until
        coder.span = _code(coder.span, coder.buffer, coder.end, self.all, first, last, self._memory)
        self._coded = until


@cache
def _primed() -> Memory:
    """The model that knows the primer; never changed."""
    prepare(8 * len(PRIMER))
    memory, encoder = Memory.fresh(), RangeEncoder()
    encoder.reserve(_LONGEST_OCTET * len(PRIMER))
    octets = np.frombuffer(PRIMER, dtype=np.uint8).astype(np.int64)
    _code(encoder.span, encoder.buffer, encoder.end, octets, 0, len(PRIMER), memory)
    return memory


def header_in_file(outline: Outline, packed: int | None = None) -> tuple[bytes, bool]:
    """The header as it stands in a file, and whether it is packed; by default, if that is shorter and allowed.

    Raises:
        ModelError: it is to be packed, and is too long, or repeats itself more than is allowed.
    """
    plain = write_outline(outline)
    if packed == 0 or (packed is None and len(plain) > _MOST_OCTETS):
        return plain, False
    coded = _coded(plain, ())
    allowed = _is_allowed(len(plain), len(coded.stream))
    if packed and not allowed:
        raise ModelError(f"a header of {len(plain)} bytes can't be packed in {len(coded.stream)}; leave it plain")
    shorter = coded.whole()
    return (shorter, True) if packed or (allowed and len(shorter) < len(plain)) else (plain, False)


def pack(header: bytes) -> bytes:
    """The header, packed."""
    return _coded(header, ()).whole()


def packed_parts(outline: Outline) -> dict[str, int]:
    """The packed header's bytes by what they tell, as `outline_parts` has them."""
    sizes = outline_parts(outline)
    told = [part for part, size in sizes.items() if size]
    *places, _ = accumulate(sizes[part] for part in told)
    coded = _coded(write_outline(outline), places)
    whole = len(coded.whole())
    before = whole - len(coded.stream)
    bounds = [0, *(before + place for place in coded.places), whole]
    return dict.fromkeys(sizes, 0) | dict(zip(told, (end - start for start, end in pairwise(bounds)), strict=True))


class _Coded(NamedTuple):
    """A header of `size` octets as a stream, and how much of it tells what lies before some places."""

    size: int
    stream: bytes
    places: list[int]

    def whole(self) -> bytes:
        """As it stands in a file."""
        out = bytearray()
        _SIZE.write(out, self.size)
        _LENGTH.write(out, len(self.stream))
        return bytes(out) + self.stream


def _coded(header: bytes, places: Sequence[int]) -> _Coded:
    octets, encoder, spent = _Octets(len(header)), RangeEncoder(), []
    octets.header[:] = np.frombuffer(header, dtype=np.uint8)
    for place in (*places, len(header)):
        octets.code(encoder, place)
        spent.append(int(encoder.spent) // 8)
    stream = encoder.finish()
    return _Coded(len(header), stream, [min(place, len(stream)) for place in spent[:-1]])


def _is_allowed(size: int, length: int) -> bool:
    return size <= min(_MOST_FOR_A_BYTE * length + _MOST_BESIDE, _MOST_OCTETS)


def unpack(source: Reader) -> bytes:
    """The header that is packed next; refuses all bytes but those that `pack` gives."""
    size, length = _SIZE.read(source), _LENGTH.read(source)
    if length > source.end - source.position:
        left = source.end - source.position
        raise Truncated(f"the file ends inside the packed header: {length} bytes needed, {left} left")
    if not _is_allowed(size, length):
        raise InvalidField(f"a header of {size} bytes is packed in {length}, which is beyond what is allowed")
    start = source.position
    octets, decoder = _Octets(size), RangeDecoder(source.data, start, start + length)
    octets.code(decoder, size)
    try:
        decoder.finish()
    except (NotCanonical, TrailingBytes) as error:
        raise type(error)("the packed header is not written in the shortest way") from error
    source.position += length
    return octets.header.astype(np.uint8).tobytes()
