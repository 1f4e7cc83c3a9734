"""Compiles the inner loops with numba where it is installed; without it, the same source runs as plain Python.

Loops compiled here use Python's integers only as far as 63 bits reach, so that both ways give the same bytes.
`BAYESZIP_COMPILE=0` in the environment switches compilation off.

numba's cache notices changes to a loop's own file alone: whoever changes a loop that loops in other files call
(`evidence`, `rangecoder`, `bits`, `huffman`) deletes `__pycache__/*.nb?` in this folder.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["COMPILED", "compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED = os.environ.get("BAYESZIP_COMPILE", "1") != "0"
if COMPILED:
    try:
        import numba
    except ImportError:  # pragma: no cover - numba is a dependency, but decoding does without
        COMPILED = False


def compiled(function: Function) -> Function:
    """`function`, compiled at its first call and cached on disk, or itself."""
    return _compiled(function) if COMPILED else function


def _compiled(function: Function) -> Function:
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # there is no folder that numba could keep its cache in
        return cast(Function, numba.njit(nogil=True)(function))
