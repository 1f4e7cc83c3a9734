"""The quick model by itself, on matrices small enough to follow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bayeszip.codec.counting import Counts, code_counted
from bayeszip.codec.matrix import View, survey_of
from bayeszip.codec.mixing import deepest_levels
from bayeszip.codec.rangecoder import RangeDecoder, RangeEncoder


def coded(coder, symbols: np.ndarray, view: View, survey, values: int, step: int) -> None:
    levels = deepest_levels(values)
    model = Counts.of(view, levels)
    for first in range(0, view.rows, step):
        coder.reserve(2 * step * view.columns * (levels + 1) + 16)
        last = min(first + step, view.rows)
        coder.span = code_counted(coder.span, coder.buffer, coder.end, symbols, survey.rows, survey.columns,
                                  first, last, values, levels, model, None)  # fmt: skip


@pytest.mark.parametrize("short", [0, 5])
@given(
    symbols=hnp.arrays(np.uint8, (40, 33), elements=st.integers(0, 6), fill=st.just(0)).filter(np.any),
    step=st.integers(1, 40),
)
def test_matrices_come_back_in_any_portions(short, symbols, step):
    flat = symbols.reshape(-1)[: symbols.size - short].copy()
    if not flat.any():
        flat[0] = 1
    view = View(flat.size, 40, 33, 1, 0, flagged=True)
    survey = survey_of(flat, view)
    encoder = RangeEncoder()
    coded(encoder, flat.copy(), view, survey, 6, step)
    octets = encoder.finish()
    decoder, found = RangeDecoder(octets, 0, len(octets)), np.zeros_like(flat)
    coded(decoder, found, view, survey, 6, 40)
    decoder.finish()
    assert np.array_equal(found, flat)


def test_columns_are_learned():
    """A matrix whose weights keep to some columns costs less than one of the same density at random."""
    random = np.random.default_rng(0)
    view = View(40_000, 200, 200, 1, 0, flagged=True)

    def cost(share: np.ndarray) -> int:
        symbols = (random.random((200, 200)) < share).astype(np.uint8).reshape(-1)
        symbols[:200] = 1  # no column is dead
        encoder = RangeEncoder()
        coded(encoder, symbols, view, survey_of(symbols, view), 1, 10)
        return len(encoder.finish())

    assert cost(np.where(np.arange(200) % 10 == 0, 0.5, 0.01)) < 0.7 * cost(np.full(200, 0.059))
