"""Much work as numbered units, in worker processes; the same command goes on where it was stopped.

A worker is a command that reads the numbers of units, a line each, and answers each by a line of JSON with its figures
(`serve`). Figures add up (`merged`) in a report that is saved every few seconds, with the units that are left: when
time is up, or the command is interrupted or terminated, workers end and their units are begun again the next time. A
unit that ends its worker, or that takes too long, is a fault, and the next one gets a new worker.
"""

import contextlib
import hashlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["Crew", "go_on", "left", "merged", "save", "serve", "source", "versions"]

#: seconds between two reports
_PAUSE = 5.0
#: after so many, all is broken
_FAULTS = 100


@dataclass(frozen=True)
class Crew:
    """Who does the work.

    Args:
        command: a worker.
        jobs: how many of them there are.
        environment: what is different in theirs.
        until: the time, as `time.monotonic` has it, at which they stop.
        lifetime: units after which a worker is replaced by a new one.
    """

    command: Sequence[str]
    jobs: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    until: float = float("inf")
    lifetime: int = 2000


def versions() -> str:
    """Machine, Python and libraries, in words."""
    told = [f"{name} {metadata.version(name)}" for name in ("numpy", "numba", "torch") if _installed(name)]
    return ", ".join([f"{platform.machine()}, Python {platform.python_version()}", *told])


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


@cache
def source() -> str:
    """What is tried, and by what: a digest of the package, of this folder, and of the golden files."""
    here = Path(__file__).parent
    sha = hashlib.sha256()
    for path in sorted([*(here.parent.parent / "src").rglob("*.py"), *here.glob("*.py"), *here.parent.rglob("*.bayz")]):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:12]


def merged(first: Any, second: Any) -> Any:
    """Two figures as one: numbers are summed, lists joined without repeats, mappings by key.

    Of what is called `slowest…`, `largest…` or `most…`, the larger stays.
    """
    if isinstance(first, dict):
        both = dict(first)
        for key, value in second.items():
            if key not in both:
                both[key] = value
            else:
                both[key] = max(both[key], value) if key.startswith(_MAXIMA) else merged(both[key], value)
        return both
    return first + [each for each in second if each not in first] if isinstance(first, list) else first + second


_MAXIMA = ("slowest", "largest", "most")


def save(path: Path, results: dict) -> None:
    """Writes a report, whole or not at all."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    beside.replace(path)


def serve(unit: Callable[[int], dict], waiting: float, seconds: float = 0, memory: int | None = None) -> None:
    """Answers for units until there are no more; the kernel ends this process when one takes too much.

    Args:
        waiting: seconds by the clock for a unit; 0 for any.
        seconds: of processor time for a unit; 0 for any, since to be limited makes `process_time` coarse.
        memory: bytes that this process may take beyond what it has now.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes elsewhere
    if memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
    for kind in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(kind, signal.SIG_DFL)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, waiting)
        begin = time.process_time()
        figures = unit(int(line))
        figures["cpu_seconds"] = time.process_time() - begin
        print(json.dumps(figures), file=answers, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def go_on(results: dict, first: int, count: int, crew: Crew, keep: Callable[[], None]) -> bool:
    """Has the units from `first` on done that are left of `count`, adds their figures to `results`; true if all are.

    Args:
        results: the figures so far; they begin anew if they are of another source, or of other units.
        keep: saves them.
    """
    if not _same(results, first):
        results.clear()
        results |= {"source": source(), "first": first, "machine": versions(), "begun": 0, "unfinished": []}
    board = _Board(results, first + count, crew)
    before = {kind: signal.signal(kind, board.stop) for kind in (signal.SIGTERM, signal.SIGINT)}
    threads = [threading.Thread(target=board.work) for _ in range(crew.jobs)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            if time.monotonic() > crew.until:
                board.stop()
            board.keep_now_and_then(keep)
    finally:
        board.stop()
        for thread in threads:
            thread.join()
        for kind, handler in before.items():
            signal.signal(kind, handler)
    keep()
    return not left(results, first, count)


def left(results: dict, first: int, count: int) -> bool:
    """Whether there is anything left to do of so many units."""
    return not _same(results, first) or bool(results["unfinished"]) or results["begun"] < count


def _same(results: dict, first: int) -> bool:
    """Whether figures are of this source, and of units from `first` on."""
    return (results.get("source"), results.get("first")) == (source(), first)


class _Board:
    """Which units are done and in whose hands the others are."""

    def __init__(self, results: dict, end: int, crew: Crew) -> None:
        self.results, self.end, self.crew = results, end, crew
        self.again = list(results["unfinished"])
        self.lock, self.stopped, self.workers = threading.Lock(), False, set[subprocess.Popen]()
        self.kept = time.monotonic()

    def stop(self, *_: object) -> None:
        """Ends all workers; what they had in hand is left."""
        self.stopped = True
        for worker in list(self.workers):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    def keep_now_and_then(self, keep: Callable[[], None]) -> None:
        if time.monotonic() - self.kept > _PAUSE:
            with self.lock:
                keep()
            self.kept = time.monotonic()

    def take(self) -> int | None:
        """The next unit; None if there is none, or time is up."""
        with self.lock:
            if self.stopped or time.monotonic() >= self.crew.until:
                return None
            if self.again:
                return self.again.pop(0)
            unit = self.results["first"] + self.results["begun"]
            if unit >= self.end:
                return None
            self.results["begun"] += 1
            self.results["unfinished"].append(unit)
            return unit

    def done(self, unit: int, figures: dict) -> None:
        with self.lock:
            self.results |= merged(self.results, figures)
            self.results["cpu_seconds"] = round(self.results.get("cpu_seconds", 0), 3)
            self.results["unfinished"].remove(unit)

    def work(self) -> None:
        """One thread: a worker after the other, while there are units."""
        unit = self.take()
        while unit is not None:
            begin = time.perf_counter()
            unit = self._by_one_worker(unit)
            with self.lock:
                self.results["seconds"] = round(self.results.get("seconds", 0) + time.perf_counter() - begin, 1)

    def _by_one_worker(self, unit: int) -> int | None:
        """Has units done by a new worker, this one first, and returns one for the next worker."""
        with tempfile.TemporaryFile("w+") as errors, self._worker(errors) as worker:
            for _ in range(self.crew.lifetime):
                answer = self._ask(worker, unit)
                if answer is None and self.stopped:
                    return None
                if answer is None:
                    status = worker.wait()
                    errors.seek(0)
                    self.done(unit, {"faults": [f"{unit}: the worker ended with {status}: {errors.read()[-300:]}"]})
                    return None if len(self.results["faults"]) > _FAULTS else self.take()
                self.done(unit, answer)
                following = self.take()
                if following is None:
                    return None
                unit = following
        return unit

    def _worker(self, errors: Any) -> subprocess.Popen:
        worker = subprocess.Popen(
            self.crew.command, env=os.environ | dict(self.crew.environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        self.workers.add(worker)
        if self.stopped:
            self.stop()
        return worker

    @staticmethod
    def _ask(worker: subprocess.Popen, unit: int) -> dict | None:
        """What the worker answers; None if it ended."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            os.write(worker.stdin.fileno(), f"{unit}\n".encode())
        except BrokenPipeError:
            return None
        line = worker.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None
