"""Work in several processes of one machine: tasks for workers, cores divided among them, a GPU that they share."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from bayeszip.errors import BayeszipError, Interrupted, ModelError, ModelUsageError

__all__ = ["Outcome", "Workers", "side_by_side", "untouched_device"]

#: NVIDIA's Multi-Process Service: lets kernels of several processes run at once.
MPS_CONTROL = "nvidia-cuda-mps-control"
_PATIENCE = 30


@dataclass(frozen=True)
class Outcome:
    """What became of a task: an answer, or an error in words."""

    task: Any
    answer: Any = None
    error: str | None = None


class Workers:
    """Processes that each do one task at a time and keep their interpreter for the next.

    They are spawned, so that none inherits what this process has begun with a GPU, and end with it, however it ends.

    Args:
        function: given a task, returns the answer; both go through a pipe.
        jobs: how many tasks are done at a time.
    """

    def __init__(self, function: Callable[[Any], Any], jobs: int) -> None:
        self._function, self._jobs = function, jobs
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, Any] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        workers = (*self._idle, *self._busy)
        # All at once: each may have a state to save.
        for worker in workers:
            worker.tell_to_end()
        for worker in workers:
            worker.end()

    def outcomes(self, tasks: Iterable[Any]) -> Iterator[Outcome]:
        """Each task's outcome, as soon as it is there. A worker that ends over its task costs that task alone."""
        waiting = deque(tasks)
        while waiting or self._busy:
            while waiting and len(self._busy) < self._jobs:
                worker = self._idle.pop() if self._idle else _Worker(self._context, self._function)
                self._busy[worker] = waiting.popleft()
                worker.connection.send(self._busy[worker])
            ready = set(wait([worker.connection for worker in self._busy]))
            for worker in [worker for worker in self._busy if worker.connection in ready]:
                task = self._busy.pop(worker)
                try:
                    answer, error, sound = worker.connection.recv()
                except (EOFError, ConnectionError):
                    answer, error, sound = None, worker.how_it_ended(), False
                if sound:
                    self._idle.append(worker)
                else:
                    worker.end()
                yield Outcome(task, answer, error)


class _Worker:
    """A process and this end of the pipe to it."""

    def __init__(self, context: Any, function: Callable[[Any], Any]) -> None:
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, function), daemon=True)
        self.process.start()
        other.close()

    def how_it_ended(self) -> str:
        self.process.join(_PATIENCE)
        return f"its process ended with status {self.process.exitcode}"

    def tell_to_end(self) -> None:
        self.connection.close()
        self.process.terminate()

    def end(self) -> None:
        self.tell_to_end()
        self.process.join(_PATIENCE)


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    """Do tasks until the pipe is closed."""
    # Ctrl-C reaches all processes of a terminal; the first decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            task = connection.recv()
            try:
                connection.send((function(task), None, True))
            except (Interrupted, KeyboardInterrupt):
                # It was told to end, and has saved where it was.
                return
            except BayeszipError as error:
                connection.send((None, str(error), True))
            except Exception as error:
                # What a fault leaves behind, on a GPU above all, is not for the next task.
                connection.send((None, f"{type(error).__name__}: {error}", False))
                return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def side_by_side(
    function: Callable[[Any], Any], jobs: int, device: str, stopped: str, say: Callable[[str], None]
) -> Iterator[Workers]:
    """Workers for `device`, which share it and the cores; Ctrl-C and SIGTERM end them and say `stopped`."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted(stopped, number)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores // jobs))}
    gpu = _shared_gpu(say) if device.startswith("cuda") and jobs > 1 else contextlib.nullcontext()
    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _environment(threads), gpu, Workers(function, jobs) as workers:
            yield workers
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def untouched_device(device: str) -> str:
    """The device by name, known to be there, without touching it: else workers could not share it.

    Raises:
        ModelError: there is no such device.
    """
    import torch  # a worker whose tasks don't need it starts without

    # Asked of the driver's library, where torch would otherwise begin with CUDA in this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ModelUsageError(f"there is no device {device!r}; give auto, cpu, cuda or cuda:1") from error
    if kind == "cuda" and not available:
        raise ModelError(f"device {device} can't be used here: there is no CUDA device; give --device cpu")
    return device


@contextlib.contextmanager
def _shared_gpu(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the GPU does work of several processes at once, by NVIDIA's Multi-Process Service where that is there.

    This process must not have touched CUDA, and must start its workers inside.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        say("processes share the GPU through the Multi-Process Service that CUDA_MPS_PIPE_DIRECTORY names")
        yield
        return
    control = shutil.which(MPS_CONTROL)
    if control is None:
        say(f"{MPS_CONTROL} is not installed, so processes take turns on the GPU; it still gets more to do")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="bayeszip-mps-", ignore_cleanup_errors=True) as folder:
        places = {f"CUDA_MPS_{kind}_DIRECTORY": os.path.join(folder, kind.lower()) for kind in ("PIPE", "LOG")}
        for place in places.values():
            os.mkdir(place)
        with _environment(places):
            fault = _mps(control, "-d")
            if not fault:
                say("processes share the GPU through NVIDIA's Multi-Process Service, started for them")
                try:
                    yield
                finally:
                    _mps(control, said="quit\n")
        if fault:
            say(f"NVIDIA's Multi-Process Service does not start ({fault}), so processes take turns on the GPU")
            yield


def _mps(control: str, *options: str, said: str = "") -> str | None:
    """Tell the service something; returns what went wrong."""
    try:
        # Its daemon inherits what it is given: with pipes, whoever reads them would wait for its end.
        with tempfile.TemporaryFile() as answer:
            done = subprocess.run(
                [control, *options], input=said.encode(), stdout=answer, stderr=answer, timeout=_PATIENCE, check=False
            )
            answer.seek(0)
            words = answer.read(200).decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (words or f"status {done.returncode}") if done.returncode else None


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started inside inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
