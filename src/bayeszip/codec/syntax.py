"""The grammar of a file: fields that know how to write and how to read themselves, named errors.

Each field is described once; `write` and `read` of one description can't drift apart. A field's `write` refuses what
its `read` would refuse.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from bayeszip.errors import FormatError
from bayeszip.limits import Budget, LimitExceeded, Limits

__all__ = [
    "ChecksumMismatch",
    "CorruptPayload",
    "DuplicateName",
    "Field",
    "InvalidCode",
    "InvalidField",
    "InvalidGraph",
    "LimitExceeded",
    "Many",
    "NotBayesZip",
    "NotCanonical",
    "Number",
    "Octets",
    "Reader",
    "Real",
    "Record",
    "Signed",
    "Text",
    "TrailingBytes",
    "Truncated",
    "Tuple",
    "UnknownCoder",
    "UnsupportedVersion",
]


class NotBayesZip(FormatError):
    """The file doesn't begin as a `.bayz` file does."""


class UnsupportedVersion(FormatError):
    """The file was written by a later format version than this reader knows."""


class UnknownCoder(FormatError):
    """The file names a coder that doesn't exist."""


class ChecksumMismatch(FormatError):
    """The file was damaged: its checksum doesn't fit its bytes."""


class Truncated(FormatError):
    """The file ends before it should."""


class TrailingBytes(FormatError):
    """The file goes on after it should have ended."""


class InvalidField(FormatError):
    """A field of the header holds a value that it can't have."""


class DuplicateName(FormatError):
    """Two tensors of the file have the same name."""


class InvalidGraph(FormatError):
    """The file's graph is not one: an unknown operator, a value that doesn't exist, a wrong number of inputs."""


class InvalidCode(FormatError):
    """A prefix code of the file is over- or under-subscribed."""


class CorruptPayload(FormatError):
    """The coded weights contradict the header or themselves."""


class NotCanonical(FormatError):
    """The file says what it says in another way than the one this format prescribes."""


class Reader:
    """Takes bytes from the front of `data`; never beyond `end`, nor more of anything than `budget` has."""

    def __init__(self, data: bytes, start: int = 0, end: int | None = None, budget: Budget | None = None) -> None:
        self.data = data
        self.position = start
        self.end = len(data) if end is None else end
        self.budget = budget or Budget(Limits.none())

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.position:
            raise Truncated(f"the file ends inside {what}: {count} bytes needed, {self.end - self.position} left")
        self.position += count
        return self.data[self.position - count : self.position]


class Field(Protocol):
    """What can be written and read."""

    def write(self, out: bytearray, value: Any) -> None: ...

    def read(self, source: Reader) -> Any: ...


@dataclass(frozen=True)
class Number:
    """An integer from 0 to `most`, seven bits a byte, least significant first, in as few bytes as will do (LEB128)."""

    name: str
    most: int = 2**62

    def write(self, out: bytearray, value: int) -> None:
        self._check(value)
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)

    def read(self, source: Reader) -> int:
        value = shift = 0
        while True:
            byte = source.take(1, self.name)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            self._check(value)
            if shift > max(63, self.most.bit_length()):
                raise InvalidField(f"{self.name} has more than {shift // 7} bytes")
        if shift and not byte:
            raise NotCanonical(f"{self.name} is written in more bytes than it needs")
        self._check(value)
        return value

    def _check(self, value: int) -> None:
        if not 0 <= value <= self.most:
            raise InvalidField(f"{self.name} is {value}, must be from 0 to {self.most}")


@dataclass(frozen=True)
class Signed:
    """An integer of either sign: 0, −1, 1, −2, 2, … as the numbers 0, 1, 2, 3, 4, …"""

    name: str
    most: int = 2**53

    def write(self, out: bytearray, value: int) -> None:
        Number(self.name, 2 * self.most).write(out, 2 * value if value >= 0 else -2 * value - 1)

    def read(self, source: Reader) -> int:
        value = Number(self.name, 2 * self.most).read(source)
        return value // 2 if value % 2 == 0 else -(value + 1) // 2


@dataclass(frozen=True)
class Octets:
    """Exactly `count` bytes."""

    name: str
    count: int

    def write(self, out: bytearray, value: bytes) -> None:
        if len(value) != self.count:
            raise InvalidField(f"{self.name} has {len(value)} bytes, must have {self.count}")
        out += value

    def read(self, source: Reader) -> bytes:
        return source.take(self.count, self.name)


@dataclass(frozen=True)
class Text:
    """A length in bytes, then as many bytes."""

    name: str

    def write(self, out: bytearray, value: bytes) -> None:
        Number(self.name).write(out, len(value))
        out += value

    def read(self, source: Reader) -> bytes:
        return source.take(Number(self.name).read(source), self.name)


@dataclass(frozen=True)
class Real:
    """A double that is not NaN, as its eight bytes, least significant first."""

    name: str

    def write(self, out: bytearray, value: float) -> None:
        self._check(value)
        out += struct.pack("<d", value)

    def read(self, source: Reader) -> float:
        (value,) = struct.unpack("<d", source.take(8, self.name))
        self._check(value)
        return value

    def _check(self, value: float) -> None:
        if value != value:
            raise InvalidField(f"{self.name} is NaN")


@dataclass(frozen=True)
class Tuple:
    """A known sequence of fields, one after the other."""

    fields: tuple[Field, ...]

    def write(self, out: bytearray, value: Sequence[Any]) -> None:
        for field, item in zip(self.fields, value, strict=True):
            field.write(out, item)

    def read(self, source: Reader) -> tuple[Any, ...]:
        return tuple(field.read(source) for field in self.fields)


@dataclass(frozen=True)
class Many:
    """A count, then as many items. Every item takes at least a byte, so a count can't exceed what is left.

    `charged`: the limit that items count for; `weight`: how much each of them, 1 by default.
    """

    name: str
    item: Field
    most: int = 2**16
    charged: str | None = None
    weight: Callable[[Any], int] | None = None

    def write(self, out: bytearray, value: Sequence[Any]) -> None:
        Number(self.name, self.most).write(out, len(value))
        for item in value:
            self.item.write(out, item)

    def read(self, source: Reader) -> tuple[Any, ...]:
        count = Number(self.name, self.most).read(source)
        if count > source.end - source.position:
            raise Truncated(f"{count} {self.name} are declared in {source.end - source.position} bytes")
        if self.charged is None:
            return tuple(self.item.read(source) for _ in range(count))
        source.budget.check(self.charged, count)
        items = []
        for _ in range(count):
            items.append(self.item.read(source))
            source.budget.charge(self.charged, self.weight(items[-1]) if self.weight else 1)
        return tuple(items)


@dataclass(frozen=True)
class Record:
    """Named fields in order. A field given as a function looks at the fields before it; None: absent, value None."""

    kind: Callable[..., Any]
    fields: Mapping[str, Field | Callable[[Any], Field | None]]

    def write(self, out: bytearray, value: Any) -> None:
        for name, described in self.fields.items():
            field = described(value) if callable(described) else described
            if field is not None:
                field.write(out, getattr(value, name))

    def sizes(self, value: Any) -> dict[str, int]:
        """How many bytes each field takes."""
        sizes, out = {}, bytearray()
        for name, described in self.fields.items():
            before = len(out)
            Record(self.kind, {name: described}).write(out, value)
            sizes[name] = len(out) - before
        return sizes

    def read(self, source: Reader) -> Any:
        seen = SimpleNamespace()
        for name, described in self.fields.items():
            field = described(seen) if callable(described) else described
            setattr(seen, name, None if field is None else field.read(source))
        return self.kind(**vars(seen))
