"""Searches for files that break the decoder, led by the branches they take: a fuzzer in a page of plain Python.

    python tests/abuse/campaign.py --steps search --minutes 60 --jobs 14

The decoder runs uncompiled, and every branch that it takes is counted, by powers of two. A file that takes a branch
as often as none before becomes a parent of further files; of those that do the same, the cheapest stays. Processes
tell each other of new branches through a folder, which they also begin from. Half of them treat small tensors as large
ones, so that all models are reached.
"""

import hashlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import tensor_kinds as kinds
from agreement import agrees
from malformed import malformed
from mutation import GOLDEN, Outcome, mutant, trial

from bayeszip.codec import (
    Limits,
    container,
    contexts,
    counting,
    decode,
    describe,
    encode,
    evidence,
    matrix,
    mixing,
    rangecoder,
    rawbytes,
    streams,
)
from bayeszip.errors import FormatError
from bayeszip.tensors import RAW_DTYPES, CompressedModel, Graph, Node, QuantizedTensor, RawTensor

__all__ = ["SLICE", "Searcher"]

#: small enough for plain Python; whatever declares more is refused
LIMITS = Limits(elements=1 << 10, memory=1 << 10)
LONGEST = 500
#: seconds by the clock after which one file counts as a hang; of processor time, of one unit of the search
PATIENCE, SLICE = 60, 20
SOURCE = str(Path(container.__file__).parent.parent)

Edge = tuple[int, int, int]
Feature = tuple[Edge, int]


class Branches:
    """Counts the branches that the package takes: (code, from, to), as offsets, or as lines before Python 3.12."""

    def __init__(self) -> None:
        self.counts: Counter[Edge] = Counter()
        self.codes: dict[int, CodeType] = {}
        self.no_more: Any = None
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            self.no_more = monitoring.DISABLE
            monitoring.use_tool_id(monitoring.COVERAGE_ID, "bayeszip search")
            monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.BRANCH, self._branch)
            monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.BRANCH)
        else:
            sys.settrace(self._call)

    def _branch(self, code: CodeType, offset: int, destination: int) -> Any:
        key = id(code)
        if key not in self.codes:
            if not code.co_filename.startswith(SOURCE):
                return self.no_more
            self.codes[key] = code
        self.counts[key, offset, destination] += 1
        return None

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code, before = frame.f_code, frame.f_lineno
        if not code.co_filename.startswith(SOURCE):
            return None
        key = id(code)
        self.codes[key] = code

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal before
            if event == "line":
                self.counts[key, before, frame.f_lineno] += 1
                before = frame.f_lineno
            return line

        return line

    def taken(self) -> list[Feature]:
        """The branches since the last call, each with the power of two that its count reached."""
        found = [(edge, min(count.bit_length(), 8)) for edge, count in self.counts.items()]
        self.counts.clear()
        return found


class Corpus:
    """For every feature the cheapest file that shows it."""

    def __init__(self) -> None:
        self.owners: dict[Feature, tuple[float, bytes]] = {}
        self.features: list[Feature] = []
        self.edges: set[Edge] = set()

    def add(self, blob: bytes, cost: float, taken: list[Feature]) -> bool:
        """Keeps what is new or cheaper; true if a branch is taken for the first time."""
        new_edge = False
        for feature in taken:
            owner = self.owners.get(feature)
            if owner is None:
                self.features.append(feature)
                new_edge |= feature[0] not in self.edges
                self.edges.add(feature[0])
            if owner is None or cost < owner[0] / 2:
                self.owners[feature] = (cost, blob)
        return new_edge

    def pick(self, dice: random.Random) -> bytes:
        """A file that shows a feature drawn at random; the cheapest of three, since time is what is spent."""
        return min((self.owners[dice.choice(self.features)] for _ in range(3)), key=lambda owner: owner[0])[1]

    def files(self) -> list[bytes]:
        return list({blob: None for _, blob in self.owners.values()})


@contextmanager
def turned(decision: int) -> Iterator[None]:
    """Within, the encoder says the opposite at one of its decisions, and goes on as if that were so."""
    honest, left = rangecoder.code_bit, decision

    def code_bit(
        span: rangecoder.Span, buffer: np.ndarray, end: int | None, probability: int, bit: int
    ) -> tuple[int, rangecoder.Span]:
        nonlocal left
        left -= 1
        return honest(span, buffer, end, probability, 1 - bit if left == -1 else bit)

    with ExitStack() as patches:
        for module in (rangecoder, mixing, counting, evidence):
            patches.enter_context(patch.object(module, "code_bit", code_bit))
        yield


def lie(blob: bytes, dice: random.Random) -> bytes | None:
    """A well-formed file that holds one decision an encoder wouldn't have made; None if `blob` can't be decoded."""
    try:
        model = decode(blob, LIMITS)
        with turned(dice.randrange(1 << dice.randrange(1, 12))):
            described = describe(blob, LIMITS)
            coder = streams.ContextCoder(described.options.get("ways"))
            return container._write(model, coder, "context", described.options["packed"])
    except FormatError:
        return None


def seeds(small_as_large: bool) -> list[bytes]:
    """Golden files and malformed ones that are small, and small models of every kind."""
    found = [path.read_bytes() for path in GOLDEN if path.stat().st_size <= LONGEST]
    found += [blob for _, blob, _ in malformed() if 9 < len(blob) <= LONGEST]
    if small_as_large:
        for module, name, least in kinds.SMALL:
            vars(module)[name] = least
        found += kinds.files()
        matrix._MOST_CELLS, matrix._MOST_WEIGHTS, matrix._LEAST_SIDE, matrix._FLAT_COLUMNS = 100, 20, 4, 16
        for module in (rawbytes, contexts):
            vars(module)["LEAST_NOISE"] = 16
    return found + [encode(model, coder=coder) for model in _models() for coder in ("context", "csr-huffman")]


def _models() -> Iterator[CompressedModel]:
    noise = np.random.default_rng(0)
    codebook = np.array([0, -0.5, 0.75, 0.125, -1.5, 1.0], dtype=np.float32)
    for dtype, held in RAW_DTYPES.items():
        values = (noise.normal(size=(3, 7)) * 50).astype("<f8" if held.kind == "f" else "<i8")
        yield CompressedModel({"a": RawTensor((values > 0) if dtype == "bool" else values.astype(held), dtype)})
    for shape in ((), (0, 3), (30,), (6, 5), (12, 30), (2, 3, 3, 3), (4, 2, 5), (3, 120), (130, 2)):
        symbols = noise.integers(1, 6, shape) * (noise.random(shape) < 0.3)
        yield CompressedModel({"conv1.weight": QuantizedTensor(symbols, codebook)}, original_parameters=5000)
    for kind in kinds.KINDS.values():
        yield CompressedModel({"w": kind(noise, (6, 5))})
    layers = {"fc1.weight": (6, 12), "fc1.bias": (6,), "fc2.weight": (4, 6), "fc2.bias": (4,)}
    tensors = {
        name: QuantizedTensor(noise.integers(1, 6, shape) * (noise.random(shape) < 0.3), codebook)
        for name, shape in layers.items()
    }
    nodes = (
        Node("linear", (0,), ("fc1.weight", "fc1.bias")),
        Node("relu", (1,)),
        Node("linear", (2,), ("fc2.weight", "fc2.bias")),
    )
    yield CompressedModel(tensors, Graph(1, nodes, (3,)))


class Hang(BaseException):
    """A file took longer than `PATIENCE`."""


def _hang(*_: object) -> None:
    raise Hang


class Searcher:
    """One process of the search.

    Args:
        number: other numbers search elsewhere; odd ones treat small tensors as large.
        folder: where files that take new branches are kept.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.dice = random.Random(number)
        self.folder, self.known = folder, set[str]()
        folder.mkdir(parents=True, exist_ok=True)
        self.outcome, self.corpus, self.agreed = Outcome(), Corpus(), 0
        self.small_as_large = number % 2 == 1
        signal.signal(signal.SIGALRM, _hang)
        self.waiting = seeds(self.small_as_large)
        self.branches = Branches()

    def attempt(self, blob: bytes) -> bool:
        """Tries one file; true if it takes a branch that none took before."""
        self.branches.counts.clear()
        accepted, begin = self.outcome.accepted, time.process_time()
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            trial(blob, self.outcome, LIMITS)
        except Hang:
            self.outcome.faults.append(f"a hang for {blob.hex()[:400]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        cost = time.process_time() - begin
        before = len(self.corpus.features)
        new_edge = self.corpus.add(blob, cost, self.branches.taken())
        if self.outcome.accepted > accepted and len(self.corpus.features) > before and not self.small_as_large:
            self._compare(blob)
        return new_edge

    def _compare(self, blob: bytes) -> None:
        """The second decoder must read the same."""
        try:
            agrees(blob, decode(blob, LIMITS))
        except Exception as error:
            self.outcome.faults.append(f"the second decoder: {error!r} for {blob.hex()[:400]}")
        self.agreed += 1

    def child(self) -> bytes | None:
        parent = self.corpus.pick(self.dice)
        if self.dice.random() < 0.1:
            return lie(parent, self.dice)
        return mutant(parent, self.dice, [self.corpus.pick(self.dice)])

    def go_on(self, seconds: float) -> dict[str, Any]:
        """Searches for so much processor time, what others found first; the figures of that time."""
        begin, self.outcome, self.agreed = time.process_time(), Outcome(), 0
        self.waiting += self._found_by_others()
        while time.process_time() - begin < seconds:
            if self.waiting:
                self.attempt(self.waiting.pop(0))
                continue
            child = self.child()
            if child is not None and len(child) <= LONGEST and self.attempt(child):
                self._tell(child)
        return {
            "tried": self.outcome.tried,
            "accepted": self.outcome.accepted,
            "agreed": self.agreed,
            "refused": dict(self.outcome.refused),
            "faults": self.outcome.faults[:20],
            "slowest_refusal_ms": round(1000 * self.outcome.slowest_refusal, 1),
            "most_branches": len(self.corpus.edges),
            "most_features": len(self.corpus.features),
            "most_parents": len(self.corpus.files()),
        }

    def _tell(self, blob: bytes) -> None:
        """Leaves a file for other processes, and for those of another day."""
        name = hashlib.sha256(blob).hexdigest()[:16]
        self.known.add(name)
        (self.folder / f"{name}.tmp").write_bytes(blob)
        (self.folder / f"{name}.tmp").replace(self.folder / f"{name}.bayz")

    def _found_by_others(self) -> list[bytes]:
        new = [path for path in sorted(self.folder.glob("*.bayz")) if path.stem not in self.known]
        self.known |= {path.stem for path in new}
        return [path.read_bytes() for path in new]
