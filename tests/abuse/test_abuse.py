"""A minute of the abuse campaign; `python tests/abuse/campaign.py` runs all of it and writes the report."""

from collections.abc import Callable
from functools import reduce

import checks
import pytest
from malformed import malformed
from mutation import LIMITS, Outcome

from bayeszip.codec import decode
from bayeszip.codec import syntax as kinds
from bayeszip.errors import BayeszipError, FormatError

MALFORMED = list(malformed())


def of_all(check: Callable[[bytes], Outcome], files: dict[str, bytes]) -> Outcome:
    return reduce(Outcome.merged, map(check, files.values()), Outcome())


@pytest.mark.parametrize(("blob", "error"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_malformed_files_meet_their_errors(blob, error):
    with pytest.raises(getattr(kinds, error)) as caught:
        decode(blob, LIMITS)
    assert isinstance(caught.value, FormatError)
    assert isinstance(caught.value, BayeszipError)


def test_the_corpus_is_large_and_cheap_to_refuse():
    found = checks.malformed_corpus()
    assert found["files"] >= 80
    assert not found["wrong"]
    assert found["largest_mib"] <= 16


def test_claiming_everything_is_cheap_to_refuse():
    found = checks.claim_everything()
    assert found["error"] == "LimitExceeded"
    assert found["bytes"] <= 100
    assert found["median_ms"] <= 10


def test_refusing_takes_little_memory():
    found = checks.refusals(300, 1)
    assert found["files"] > 100
    assert found["largest_mib"] <= 16


def test_every_value_of_every_enumeration_in_a_few_files():
    outcome = of_all(checks.enumerations, checks.golden(115))
    assert outcome.tried > 5_000
    assert not outcome.faults


def test_prefixes_and_flips_of_small_golden_files_are_refused():
    for check in (checks.prefixes, checks.flips):
        outcome = of_all(check, checks.golden(500))
        assert outcome.tried > 1000
        assert (outcome.accepted, outcome.faults) == (0, [])


def test_every_value_of_every_byte():
    outcome = of_all(checks.values, checks.golden(30))
    assert outcome.tried > 10_000
    assert not outcome.faults


@pytest.mark.parametrize("seed", range(2))
def test_mutants_are_refused_or_canonical(seed):
    outcome = checks.mutated(20_000, seed)
    assert not outcome.faults
    assert outcome.accepted > 100  # a suite whose mutants are all refused at the door would prove little
    assert len(outcome.refused) >= 10
    assert outcome.slowest_refusal < 1.0


@pytest.mark.parametrize("name", [name for name in checks.golden(700) if "large" not in name])
def test_golden_files_are_what_they_were(name):
    assert checks.golden_agreed(name)["faults"] == []


def test_nothing_is_opened_or_imported():
    found = checks.audit_events()
    assert found["files"] >= 20
    assert found["events"] == {}
