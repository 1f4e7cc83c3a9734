"""Compiles the inner loops with numba where it is installed; without it, the same source runs as plain Python.

Loading numba takes a second or more, so it is put off until there is enough to do: `prepare`. Small files are decoded,
and most bad ones refused, without it. Loops use Python's integers only as far as 63 bits reach, so that both ways give
the same bytes. `BAYESZIP_COMPILE` in the environment: 0 never compiles, 1 compiles at the first use.

numba's cache notices changes to a loop's own file alone: whoever changes a loop that loops in other files call
(`evidence`, `rangecoder`, `bits`, `huffman`) deletes `__pycache__/*.nb?` in this folder.
"""

import os
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

__all__ = ["compiled", "prepare"]

Function = TypeVar("Function", bound=Callable[..., Any])

#: plain Python codes so many bytes of tensors in less time than numba takes to load
_PATIENCE = {"0": sys.maxsize, "1": 0}.get(os.environ.get("BAYESZIP_COMPILE", ""), 2048)

_loops: list[FunctionType] = []
_lock = threading.Lock()
_done = 0


def compiled(function: Function) -> Function:
    """Marks a loop: `function` itself, until `prepare` puts its compiled form in its place."""
    _loops.append(cast(FunctionType, function))
    return function


def prepare(work: int) -> None:
    """Announces that loops will run over `work` bytes of tensors; compiles them once all work so far is worth it."""
    global _done
    with _lock:
        _done += work
        if _done > _PATIENCE and _loops:
            _replace_all()
            _loops.clear()


def _replace_all() -> None:
    """Puts compiled loops in the place of plain ones, in all modules of this package."""
    try:
        import numba
    except ImportError:  # pragma: no cover - numba is a dependency, but decoding does without
        return
    faster = {loop: _compiled(loop, numba.njit) for loop in _loops}
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__}."):
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in faster:
                    setattr(module, key, faster[value])


def _compiled(function: FunctionType, njit: Callable[..., Any]) -> Any:
    """`function`, compiled at its first call and cached on disk."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # there is no folder that numba could keep its cache in
        return njit(nogil=True)(function)
