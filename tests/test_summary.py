"""What is printed of a file that may come from anyone."""

import numpy as np
import pytest

from bayeszip import CompressedModel, QuantizedTensor, codec
from bayeszip.recipe import settings_help
from bayeszip.summary import as_text, facts_table, tensors_table


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


def test_long_names_are_folded_not_cut():
    name = "block.".join(map(str, range(60)))
    assert name in "".join(
        line[: line.rfind("  2×2")] if "2×2" in line else line for line in table_of(name).splitlines()
    ).replace(" ", "")


def test_every_setting_shows_its_default():
    text = as_text(facts_table(settings_help()))
    assert all(default in text for default in ("[custom]", "[constant]", "[mixture]", "[default]"))
