"""The range coder: exact, short, and of one form only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeszip.codec.rangecoder import RangeDecoder, RangeEncoder, code_bit
from bayeszip.codec.syntax import NotCanonical, TrailingBytes

DECISIONS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 7, 900, 32768, 60000, 65535])), max_size=300)


def encoded(decisions: list[tuple[int, int]]) -> bytes:
    encoder = RangeEncoder()
    encoder.reserve(2 * len(decisions))
    for bit, probability in decisions:
        _, encoder.span = code_bit(encoder.span, encoder.buffer, None, probability, bit)
    return encoder.finish()


def decoded(octets: bytes, decisions: list[tuple[int, int]]) -> list[int]:
    decoder = RangeDecoder(b"before" + octets + b"after", 6, 6 + len(octets))
    bits = []
    for _, probability in decisions:
        bit, decoder.span = code_bit(decoder.span, decoder.buffer, decoder.end, probability, 0)
        bits.append(bit)
    decoder.finish()
    return bits


@given(DECISIONS)
def test_decisions_come_back(decisions):
    assert decoded(encoded(decisions), decisions) == [bit for bit, _ in decisions]


@given(DECISIONS)
def test_the_length_is_the_information(decisions):
    bits = sum(-np.log2(p / 65536 if bit else 1 - p / 65536) for bit, p in decisions)
    assert len(encoded(decisions)) <= bits / 8 + 1.01


@given(DECISIONS, st.binary(min_size=1, max_size=3))
def test_no_other_bytes_give_the_same_decisions(decisions, tail):
    octets = encoded(decisions)
    wanted = [bit for bit, _ in decisions]
    for other in {octets + tail, octets + b"\0", octets[:-1], octets[:-1] + tail} - {octets}:
        try:
            found = decoded(other, decisions)
        except (NotCanonical, TrailingBytes):
            found = None
        assert found != wanted


def test_a_carry_runs_through_many_bytes():
    decisions = [(0, 1)] + [(0, 65535)] * 40 + [(0, 1)] * 10 + [(1, 1)]
    assert decoded(encoded(decisions), decisions) == [bit for bit, _ in decisions]


def test_nothing_takes_nothing():
    assert encoded([]) == b""
    assert encoded([(1, 65535)] * 1000) == b""
    with pytest.raises(TrailingBytes):
        decoded(b"\1" * 9, [])
