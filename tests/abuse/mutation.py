"""Damages files on purpose: every way a byte can change, with the checksum made to fit again."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import process_time
from typing import NamedTuple

from bayeszip.codec import Limits, decode, describe, encode
from bayeszip.codec.checksum import crc32c
from bayeszip.codec.header import HEADER
from bayeszip.codec.syntax import Number, Reader
from bayeszip.errors import FormatError

__all__ = ["GOLDEN", "LIMITS", "Outcome", "Span", "fields", "mutant", "mutations", "repaired", "trial"]

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("v?/*.bayz"))
#: enough for every seed; mutants that declare more are refused, as they would be by a caller with such limits
LIMITS = Limits(elements=1 << 16, memory=1 << 20)


def repaired(body: bytes) -> bytes:
    """A file whose checksum fits."""
    return body + crc32c(body).to_bytes(4, "little")


@dataclass
class Outcome:
    """What became of many files: `sites` are the lines that refused them, `faults` what must not be."""

    tried: int = 0
    accepted: int = 0
    refused: Counter = field(default_factory=Counter)
    sites: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_refusal: float = 0.0

    def merged(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.tried + other.tried,
            self.accepted + other.accepted,
            self.refused + other.refused,
            self.sites + other.sites,
            self.faults + other.faults,
            max(self.slowest_refusal, other.slowest_refusal),
        )


def trial(blob: bytes, outcome: Outcome, limits: Limits = LIMITS) -> bool:
    """Decodes one file. It must be refused by a FormatError or be canonical. True if it led somewhere new."""
    outcome.tried += 1
    begin = process_time()
    try:
        model = decode(blob, limits)
    except FormatError as error:
        cost = process_time() - begin
        if cost > outcome.slowest_refusal:  # perhaps the machine was busy, or a loop had to be loaded
            outcome.slowest_refusal = max(outcome.slowest_refusal, min(cost, *(_cost(blob, limits) for _ in range(3))))
        outcome.refused[type(error).__name__] += 1
        if len(str(error)) > 200 or not str(error).isprintable():
            outcome.faults.append(f"a message of {len(str(error))} letters")
        site = _site(error)
        outcome.sites[site] += 1
        return outcome.sites[site] == 1
    except Exception as error:  # whatever else comes is the fault we look for
        outcome.faults.append(f"{type(error).__name__}: {error} for {blob.hex()[:400]}")
        return True
    outcome.accepted += 1
    described = describe(blob, limits)
    try:
        again: bytes | str = encode(model, coder=described.coder, **described.options)
    except Exception as error:
        again = f"{type(error).__name__}: {error}"
    if again != blob:
        told = again if isinstance(again, str) else again.hex()[:400]
        outcome.faults.append(f"not canonical: {blob.hex()[:400]} becomes {told}")
    return False


def _cost(blob: bytes, limits: Limits) -> float:
    """Seconds of processor time that a refusal takes."""
    begin = process_time()
    with suppress(FormatError):
        decode(blob, limits)
    return process_time() - begin


def _site(error: FormatError) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"


def _flip(body: bytearray, dice: random.Random, _: list[bytes]) -> None:
    body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)


def _set(body: bytearray, dice: random.Random, _: list[bytes]) -> None:
    body[dice.randrange(len(body))] = dice.choice((0, 1, 2, 16, 17, 127, 128, 255, dice.randrange(256)))


def _nudge(body: bytearray, dice: random.Random, _: list[bytes]) -> None:
    place = dice.randrange(len(body))
    body[place] = (body[place] + dice.choice((-8, -2, -1, 1, 2, 8))) % 256


def _insert(body: bytearray, dice: random.Random, _: list[bytes]) -> None:
    place = dice.randrange(len(body) + 1)
    body[place:place] = dice.choice((b"\0", b"\xff", b"\x80", bytes([dice.randrange(256)]), dice.randbytes(3)))


def _delete(body: bytearray, dice: random.Random, _: list[bytes]) -> None:
    place = dice.randrange(len(body))
    del body[place : place + dice.choice((1, 1, 2, 4))]


def _repeat(body: bytearray, dice: random.Random, _: list[bytes]) -> None:
    place = dice.randrange(len(body))
    body[place:place] = body[place : place + dice.randrange(1, 9)]


def _splice(body: bytearray, dice: random.Random, seeds: list[bytes]) -> None:
    other = dice.choice(seeds)[:-4]
    place = dice.randrange(len(other))
    body[dice.randrange(len(body)) :] = other[place:]


def _coder(body: bytearray, dice: random.Random, _: list[bytes]) -> None:
    if len(body) > 4:
        body[4] = dice.choice((0x11, 0x12, 0x21, 0x22))


_WAYS = (_flip, _flip, _set, _set, _nudge, _nudge, _insert, _delete, _repeat, _splice, _coder)


class _Recorder(Reader):
    """Notes which bytes each field of the header takes."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body, 5)
        self.spans: list[Span] = []

    def take(self, count: int, what: str) -> bytes:
        taken = super().take(count, what)
        if count:
            goes_on = self.spans and self.spans[-1].name == what and self.data[self.position - count - 1] >= 0x80
            start = self.spans.pop().start if goes_on and count == 1 else self.position - count
            self.spans.append(Span(what, start, self.position))
        return taken


class Span(NamedTuple):
    """A field of the header: `body[start:end]`."""

    name: str
    start: int
    end: int


@lru_cache(4096)
def fields(body: bytes) -> tuple[Span, ...]:
    """The fields of a header, as far as it can be read."""
    recorder = _Recorder(body)
    with suppress(FormatError):
        HEADER.read(recorder)
    return tuple(recorder.spans)


def _number(dice: random.Random) -> bytes:
    out = bytearray()
    Number("any").write(out, dice.choice((dice.randrange(20), dice.randrange(300), 1 << dice.randrange(50))))
    return bytes(out)


def _field(body: bytearray, dice: random.Random) -> None:
    """Replaces, doubles, removes or moves a whole field of the header."""
    spans = fields(bytes(body))
    if not spans:
        return
    _, start, end = dice.choice(spans)
    held = bytes(body[start:end])
    other = dice.choice(spans)
    ways = (_number(dice), _number(dice), _number(dice), 2 * held, b"", bytes(body[other.start : other.end]))
    body[start:end] = dice.choice(ways)


def mutant(parent: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """A changed file with its checksum repaired: fields of the header, bytes anywhere, pieces of other files."""
    body = bytearray(parent[:-4])
    if dice.random() < 0.3:
        _field(body, dice)
    for _ in range(dice.choice((0, 1, 1, 1, 1, 2, 3, 5)) if len(body) > 5 else 1):
        if body:
            dice.choice(_WAYS)(body, dice, others)
    if not body.startswith(b"BAYZ") and dice.random() < 0.9:
        body[:4] = b"BAYZ"
    return repaired(bytes(body))


def mutations(seeds: list[bytes], count: int, seed: int, outcome: Outcome) -> None:
    """`count` mutants of `seeds`; a mutant that is refused at a new line joins the seeds."""
    dice = random.Random(seed)
    seeds = list(seeds)
    for _ in range(count):
        blob = mutant(dice.choice(seeds), dice, seeds)
        if trial(blob, outcome) and len(blob) < 2000:
            seeds.append(blob)
