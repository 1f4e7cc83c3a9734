"""Fields write what they read, in one way only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeszip.codec.syntax import (
    InvalidField,
    Many,
    NotCanonical,
    Number,
    Octets,
    Reader,
    Real,
    Signed,
    Text,
    Truncated,
)
from bayeszip.errors import FormatError, shown
from bayeszip.limits import Budget, LimitExceeded, Limits


def written(field, value) -> bytes:
    out = bytearray()
    field.write(out, value)
    return bytes(out)


@pytest.mark.parametrize(
    ("field", "value", "octets"),
    [
        (Number("n"), 0, b"\x00"),
        (Number("n"), 127, b"\x7f"),
        (Number("n"), 128, b"\x80\x01"),
        (Number("n"), 300, b"\xac\x02"),
        (Signed("s"), -1, b"\x01"),
        (Signed("s"), 1, b"\x02"),
        (Text("t"), b"fc1", b"\x03fc1"),
        (Octets("o", 2), b"ab", b"ab"),
        (Real("r"), 1.0, b"\x00\x00\x00\x00\x00\x00\xf0\x3f"),
        (Many("m", Number("n")), (1, 2, 300), b"\x03\x01\x02\xac\x02"),
    ],
)
def test_bytes_of_each_field(field, value, octets):
    assert written(field, value) == octets
    assert field.read(Reader(octets)) == value


@given(st.integers(0, 2**62))
def test_every_number_comes_back(value):
    assert Number("n").read(Reader(written(Number("n"), value))) == value


@given(st.integers(-(2**53), 2**53))
def test_every_signed_number_comes_back(value):
    assert Signed("s").read(Reader(written(Signed("s"), value))) == value


@pytest.mark.parametrize(
    ("field", "octets", "error"),
    [
        (Number("n"), b"", Truncated),
        (Number("n"), b"\x80", Truncated),
        (Number("n"), b"\x80\x00", NotCanonical),
        (Number("n"), b"\xff" * 9 + b"\x7f", InvalidField),
        (Number("n"), b"\x80" * 11, InvalidField),
        (Number("n", most=9), b"\x0a", InvalidField),
        (Text("t"), b"\x05abc", Truncated),
        (Octets("o", 3), b"ab", Truncated),
        (Many("m", Number("n")), b"\x09\x01", Truncated),
        (Real("r"), b"\x00" * 6 + b"\xf8\x7f", InvalidField),
    ],
)
def test_faulty_bytes_have_named_errors(field, octets, error):
    with pytest.raises(error) as caught:
        field.read(Reader(octets))
    assert isinstance(caught.value, FormatError)


def test_what_is_unreadable_is_unwritable():
    for field, value in (
        (Number("n", most=9), 10),
        (Number("n"), -1),
        (Octets("o", 3), b"ab"),
        (Real("r"), float("nan")),
    ):
        with pytest.raises(InvalidField):
            written(field, value)


def test_limits_name_the_one_that_is_exceeded():
    budget = Budget(Limits(elements=10, memory=100))
    budget.charge("elements", 10)
    budget.check("memory", 100)
    with pytest.raises(LimitExceeded, match="11 weights, the limit is 10; raise `elements`"):
        budget.charge("elements", 1)
    with pytest.raises(LimitExceeded, match="memory"):
        budget.check("memory", 101)


def test_text_of_a_file_is_escaped_and_cut():
    assert shown("a\x1b[31m\n") == r"'a\x1b[31m\n'"
    assert len(shown("x" * 10_000)) <= 101


def test_messages_are_printable_and_short():
    assert str(InvalidField("a\nb")) == r"a\nb"
    assert len(str(InvalidField("x" * 1000))) == 200
