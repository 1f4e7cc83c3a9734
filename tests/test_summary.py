"""What is printed of a file that may come from anyone."""

import numpy as np
import pytest

from bayeszip import CompressedModel, QuantizedTensor, codec
from bayeszip.recipe import settings_help
from bayeszip.summary import as_text, facts_table, show_bytes, tensors_table


def table_of(name: str) -> str:
    tensor = QuantizedTensor(np.array([[0, 1], [1, 0]]), np.array([0, 1.5], np.float32))
    return as_text(tensors_table(codec.describe(codec.encode(CompressedModel({name: tensor})))))


@pytest.mark.parametrize("name", ["[/x]", "[red]w", ":smile:", "日本.weight"])
def test_names_are_shown_as_they_are(name):
    assert name in table_of(name)


@pytest.mark.parametrize(("name", "shown"), [("a\x1b[31mb", r"a\x1b[31mb"), ("a\nb", r"a\nb"), ("\u202ex", r"\u202ex")])
def test_names_cannot_steer_a_terminal(name, shown):
    text = table_of(name)
    assert shown in text
    assert all(letter.isprintable() for line in text.splitlines() for letter in line)


def test_facts_cannot_steer_a_terminal():
    text = as_text(facts_table([("recipe", "a\x1b[2Jb"), ("te\x07acher", "σ², ‘it’")]))
    assert text == "recipe       a\\x1b[2Jb\nte\\x07acher  σ², ‘it’\n"


@pytest.mark.parametrize(
    "count", [99_999, 149_999, 999_999, 1_000_000, 1_049_999, 9_949_999, 99_949_999, 7_654_321_000]
)
def test_sizes_are_shown_to_half_a_percent(count):
    number, unit = show_bytes(count).split()
    shown = float(number.replace(",", "")) * {"B": 1, "MB": 1e6}[unit]
    assert shown == pytest.approx(count, rel=0.005)
    assert shown == count or count >= 1_000_000


def test_long_names_are_folded_not_cut():
    name = "block.".join(map(str, range(60)))
    assert name in "".join(
        line[: line.rfind("  2×2")] if "2×2" in line else line for line in table_of(name).splitlines()
    ).replace(" ", "")


def test_every_setting_shows_its_default():
    text = as_text(facts_table(settings_help()))
    assert all(default in text for default in ("[custom]", "[constant]", "[mixture]", "[default]"))
