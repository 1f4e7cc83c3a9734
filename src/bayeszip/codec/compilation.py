"""Compiles the inner loops with numba where it is installed; without it, the same source runs as plain Python.

Loading numba takes a second or more, and compiling several, so both are put off until there is enough to do: `prepare`.
Small files are decoded, and most bad ones refused, without. A loop is entered through an `entry`, with numpy arrays;
until loops are compiled, these become lists for as long as the loop runs, which plain Python reads three times faster.
A loop returns scalars, changes arrays in place, and allocates none. Loops use Python's integers only as far as 63 bits
reach, so that both ways give the same bytes. `BAYESZIP_COMPILE` in the environment: 0 never compiles, 1 compiles at the
first use.

numba's cache notices changes to a loop's own file alone: whoever changes a loop that loops in other files call
(`evidence`, `rangecoder`, `bits`, `huffman`) deletes `__pycache__/*.nb?` in this folder.
"""

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np

__all__ = ["compiled", "entry", "prepare", "tabulated"]

Function = TypeVar("Function", bound=Callable[..., Any])

#: plain Python takes so many decisions in less time than numba takes to load
_PATIENCE = {"0": sys.maxsize, "1": 0}.get(os.environ.get("BAYESZIP_COMPILE", ""), 100_000)
#: longer arrays are read through a view, which is slower than a list but costs nothing to make
_LONGEST_LIST = 1 << 18

_loops: list[FunctionType] = []
_entries: set[FunctionType] = set()
_tables: dict[int, np.ndarray] = {}
_faster: dict[FunctionType, Any] = {}
_lock = threading.Lock()
_done = 0


def compiled(function: Function) -> Function:
    """Marks a loop, or a part of one, that other loops call."""
    _loops.append(cast(FunctionType, function))
    return function


def entry(function: Function) -> Function:
    """Marks a loop that is called from outside: compiled if loops are by then, plain otherwise."""
    compiled(function)
    _entries.add(cast(FunctionType, function))

    @functools.wraps(function)
    def entered(*arguments: Any) -> Any:
        faster = _faster.get(cast(FunctionType, function))
        if faster is not None:
            return faster(*arguments)
        borrowed: list[tuple[np.ndarray, list[Any]]] = []
        result = function(*(_plain(argument, borrowed) for argument in arguments))
        for array, items in borrowed:
            array[:] = items
        return result

    return cast(Function, entered)


def tabulated(values: np.ndarray) -> Any:
    """A table that loops read as a global: a list in plain Python, an array in compiled loops."""
    table: list[int] = []  # a number that occurs often is one object, which stays in the processor's cache
    starts = np.concatenate([[0], 1 + np.flatnonzero(np.diff(values)), [values.size]])
    for value, length in zip(values[starts[:-1]].tolist(), np.diff(starts).tolist(), strict=True):
        table += [value] * length
    _tables[id(table)] = values
    return table


def prepare(work: int) -> None:
    """Announces `work` decisions to come; compiles the loops once all work so far is worth it."""
    global _done
    if _done > _PATIENCE:
        return
    with _lock:
        if _done + work > _PATIENCE and not _faster:
            _faster.update(_compile_all())
        _done += work


def _plain(argument: Any, borrowed: list[tuple[np.ndarray, list[Any]]]) -> Any:
    """An argument for plain Python; arrays that are made lists, and to be filled again from them, go to `borrowed`."""
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(_plain(field, borrowed) for field in argument))
    if not isinstance(argument, np.ndarray):
        return argument
    if argument.size > _LONGEST_LIST:
        return argument.data
    items = argument.tolist()
    if argument.flags.writeable:
        borrowed.append((argument, items))
    return items


def _compile_all() -> dict[FunctionType, Any]:
    """The compiled form of every loop: the same code, for which other loops are compiled and tables arrays."""
    try:
        import numba
    except ImportError:  # pragma: no cover - numba is a dependency, but decoding does without
        return {}
    spaces: dict[str, dict[str, Any]] = {}
    faster = {}
    for loop in _loops:
        space = spaces.setdefault(loop.__module__, dict(loop.__globals__))
        copy = FunctionType(loop.__code__, space, loop.__name__, loop.__defaults__, loop.__closure__)
        copy.__module__, copy.__qualname__ = loop.__module__, loop.__qualname__
        faster[loop] = _compiled(copy, numba.njit, forceinline=loop not in _entries)
    for space in spaces.values():
        for name, value in space.items():
            if id(value) in _tables:
                space[name] = _tables[id(value)]
            elif isinstance(value, FunctionType):
                space[name] = faster.get(inspect.unwrap(value), value)
    return faster


def _compiled(function: FunctionType, njit: Callable[..., Any], **options: bool) -> Any:
    """`function`, compiled at its first call and cached on disk.

    Loops allocate nothing, so numba need not count references to their arrays, which costs more than the coding.
    """
    try:
        return njit(cache=True, nogil=True, _nrt=False, **options)(function)
    except RuntimeError:  # there is no folder that numba could keep its cache in
        return njit(nogil=True, _nrt=False, **options)(function)
