"""Compiled loops, also where nothing can be cached."""

from types import SimpleNamespace

import pytest

from bayeszip.codec import compilation

numba = pytest.importorskip("numba")


def doubled(value: int) -> int:
    return 2 * value


def test_a_folder_for_the_cache_is_not_needed(monkeypatch):
    def without_a_folder(*, nogil: bool, cache: bool = False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(nogil=nogil)

    monkeypatch.setattr(compilation, "numba", SimpleNamespace(njit=without_a_folder))
    function = compilation._compiled(doubled)
    assert function is not doubled
    assert function(21) == 42


def test_compilation_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(compilation, "COMPILED", False)
    assert compilation.compiled(doubled) is doubled
