"""Work in threads: compiled loops leave Python to others while they run."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["side_by_side", "thread_count"]

Found = TypeVar("Found")


def thread_count() -> int:
    """How many threads may run: `BAYESZIP_THREADS` or else `OMP_NUM_THREADS`, or as many as this process has cores."""
    for name in ("BAYESZIP_THREADS", "OMP_NUM_THREADS"):
        told = os.environ.get(name, "")
        if told.isascii() and told.isdigit() and int(told):
            return int(told)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(tasks: Sequence[Callable[[], Found]], most: int = 64) -> list[Found]:
    """What the tasks return, in their order; of several errors, that of the first task is raised.

    Args:
        most: threads, whatever the number of cores.
    """
    threads = min(thread_count(), len(tasks), most)
    if threads < 2:
        return [task() for task in tasks]
    found: dict[int, Found] = {}
    errors: dict[int, BaseException] = {}
    waiting = iter(range(len(tasks)))  # handed out in order, so whatever precedes a task that fails has been begun

    def work() -> None:
        for place in waiting:
            if errors and place > min(errors):
                return
            try:
                found[place] = tasks[place]()
            except BaseException as error:
                errors[place] = error

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[min(errors)]
    return [found[place] for place in range(len(tasks))]
