"""Searches for files that break the decoder, led by the branches they take: a fuzzer in a page of plain Python.

    PYTHONPATH=src python tests/abuse/search.py --minutes 60 --jobs 14 --output tests/abuse/search.json

The decoder runs uncompiled, and every branch that it takes is counted, by powers of two. A file that takes a branch
as often as none before becomes a parent of further files; of those that do the same, the cheapest stays. Processes
tell each other of new branches. Half of them treat small tensors as large ones, so that all models are reached.
`--minutes` is processor time, of all processes together. Nothing is written but the output; it needs numpy alone.
"""

import argparse
import json
import multiprocessing
import os
import platform
import queue
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

os.environ["BAYESZIP_COMPILE"] = "0"
sys.dont_write_bytecode = True
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "codec")]

import numpy as np  # noqa: E402
import second_decoder  # noqa: E402
from checks import small_ways_files  # noqa: E402
from malformed import malformed  # noqa: E402
from mutation import GOLDEN, Outcome, mutant, trial  # noqa: E402

from bayeszip.codec import (  # noqa: E402
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
    ways,
)
from bayeszip.errors import FormatError  # noqa: E402
from bayeszip.tensors import RAW_DTYPES, CompressedModel, Graph, Node, QuantizedTensor, RawTensor  # noqa: E402

__all__ = ["search"]

#: small enough for plain Python; whatever declares more is refused
LIMITS = Limits(elements=1 << 10, memory=1 << 10)
LONGEST = 500
#: seconds of processor time after which one file counts as a hang
PATIENCE = 30
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

    def name(self, edge: Edge) -> str:
        """An edge in words that mean the same in every process."""
        code = self.codes[edge[0]]
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}:{code.co_name}:{edge[1]}>{edge[2]}"


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
            coder = streams.ContextCoder(**described.options if described.coder == "context" else {})
            return container._write(model, coder, "context")
    except FormatError:
        return None


def seeds(small_as_large: bool) -> list[bytes]:
    """Golden files and malformed ones that are small, and small models of every kind."""
    found = [path.read_bytes() for path in GOLDEN if path.stat().st_size <= LONGEST]
    found += [blob for _, blob, _ in malformed() if 9 < len(blob) <= LONGEST]
    if small_as_large:
        ways.LEAST_CELLS, ways._STREAM = 16, 64
        found += small_ways_files()
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
    """One process of the search."""

    def __init__(self, number: int) -> None:
        self.dice = random.Random(number)
        self.outcome = Outcome()
        self.corpus = Corpus()
        self.agreed = 0
        self.small_as_large = number % 2 == 1
        signal.signal(signal.SIGVTALRM, _hang)
        self.seeds = seeds(self.small_as_large)
        self.branches = Branches()

    def attempt(self, blob: bytes) -> bool:
        """Tries one file; true if it takes a branch that none took before."""
        self.branches.counts.clear()
        accepted, begin = self.outcome.accepted, time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
        try:
            trial(blob, self.outcome, LIMITS)
        except Hang:
            self.outcome.faults.append(f"a hang for {blob.hex()[:400]}")
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        cost = time.process_time() - begin
        before = len(self.corpus.features)
        new_edge = self.corpus.add(blob, cost, self.branches.taken())
        if self.outcome.accepted > accepted and len(self.corpus.features) > before and not self.small_as_large:
            self._compare(blob)
        return new_edge

    def _compare(self, blob: bytes) -> None:
        """The second decoder must read the same."""
        model, other = decode(blob, LIMITS), second_decoder.read(blob)["tensors"]
        for name, tensor in model.tensors.items():
            if isinstance(tensor, QuantizedTensor):
                bits = tensor.symbols.reshape(-1)
            else:
                bits = np.frombuffer(tensor.values.tobytes(), dtype=f"<u{tensor.values.dtype.itemsize}")
            if (tensor.shape, bits.tolist()) != (tuple(other[name][0]), list(other[name][2])):
                self.outcome.faults.append(f"the second decoder reads {name!r} differently: {blob.hex()[:400]}")
        self.agreed += 1

    def child(self) -> bytes | None:
        parent = self.corpus.pick(self.dice)
        if self.dice.random() < 0.1:
            return lie(parent, self.dice)
        return mutant(parent, self.dice, [self.corpus.pick(self.dice)])

    def figures(self) -> dict[str, Any]:
        return {
            "cpu_seconds": time.process_time(),
            "tried": self.outcome.tried,
            "accepted": self.outcome.accepted,
            "agreed": self.agreed,
            "refused": dict(self.outcome.refused),
            "faults": self.outcome.faults[:20],
            "slowest_refusal_ms": 1000 * self.outcome.slowest_refusal,
            "features": len(self.corpus.features),
            "parents": len(self.corpus.files()),
            "edges": [self.branches.name(edge) for edge in self.corpus.edges],
        }


def work(number: int, seconds: float, finds: "list[Queue]", results: "Queue") -> None:
    """Searches for so much processor time; tells the others of new branches, and the parent how it goes."""
    searcher = Searcher(number)
    for blob in searcher.seeds:
        searcher.attempt(blob)
    told, tried = time.process_time(), 0
    while time.process_time() < seconds:
        child = searcher.child()
        if child is not None and len(child) <= LONGEST and searcher.attempt(child):
            for other, box in enumerate(finds):
                if other != number:
                    box.put(blob)
        tried += 1
        if tried % 100 == 0:
            for blob in _waiting(finds[number]):
                searcher.attempt(blob)
        if time.process_time() - told > 15:
            told = time.process_time()
            results.put((number, searcher.figures()))
    results.put((number, searcher.figures()))
    for box in finds:
        box.cancel_join_thread()


def _waiting(box: "Queue") -> Iterator[bytes]:
    while True:
        try:
            yield box.get_nowait()
        except queue.Empty:
            return


def merged(parts: list[dict[str, Any]], jobs: int) -> dict[str, Any]:
    """The figures of all processes as one."""
    refused: Counter[str] = Counter()
    for part in parts:
        refused.update(part["refused"])
    summed = ("tried", "accepted", "agreed")
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "jobs": jobs,
        "cpu_seconds": round(sum(part["cpu_seconds"] for part in parts)),
        **{key: sum(part[key] for part in parts) for key in summed},
        "refused": dict(refused.most_common()),
        "faults": [fault for part in parts for fault in part["faults"]],
        "slowest_refusal_ms": round(max(part["slowest_refusal_ms"] for part in parts), 1),
        "edges": len({edge for part in parts for edge in part["edges"]}),
        "features": max(part["features"] for part in parts),
        "parents": sum(part["parents"] for part in parts),
    }


def search(minutes: float, jobs: int, output: Path) -> dict[str, Any]:
    """Runs the search; `output` holds the figures so far at any time."""
    spawn = multiprocessing.get_context("spawn")
    finds: list[Queue] = [spawn.Queue() for _ in range(jobs)]
    results: Queue = spawn.Queue()
    workers = [
        spawn.Process(target=work, args=(number, 60 * minutes / jobs, finds, results), daemon=True)
        for number in range(jobs)
    ]
    for worker in workers:
        worker.start()
    latest: dict[int, dict[str, Any]] = {}
    while True:
        alive = any(worker.is_alive() for worker in workers)
        try:
            number, figures = results.get(timeout=2)
            latest[number] = figures
        except queue.Empty:
            if alive:
                continue
        if latest:
            so_far = merged(list(latest.values()), jobs)
            died = [f"process {n} ended with {w.exitcode}" for n, w in enumerate(workers) if w.exitcode]
            so_far["faults"] += died
            output.write_text(json.dumps(so_far, indent=1) + "\n")
            print(f"{so_far['cpu_seconds']} s of CPU: {so_far['tried']:,} files, {so_far['edges']} branches,"
                  f" {so_far['features']} features, {len(so_far['faults'])} faults", flush=True)  # fmt: skip
        if not alive and results.empty():
            break
    if len(latest) < jobs:
        raise SystemExit(f"only {len(latest)} of {jobs} processes reported")
    return so_far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=HERE / "search.json")
    arguments = parser.parse_args()
    found = search(arguments.minutes, arguments.jobs, arguments.output)
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
