"""Records: a line a run, the file replaced whole, recipes and histories packed without loss."""

import json

import pytest

from bayeszip.errors import DataError
from bayeszip.experiments.records import _sparse as sparse
from bayeszip.experiments.records import add, file_of, history_of, pack_history, read, recipe_of, take
from bayeszip.recipe import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_back_from_what_differs_from_the_defaults(name):
    settings = RECIPES[name].override("closing.epochs=0", "coding.offset_bits=5")
    kept = sparse(settings)
    assert recipe_of({"recipe": kept}) == settings
    assert "biases" not in kept


def test_settings_of_further_terms_come_back():
    settings = RECIPES["vd+sws"].override("all.groups.tau=10", "vd.rate.tau=0.5", "vd+sws.rate.tau=0")
    kept = json.loads(json.dumps(sparse(settings)))
    assert kept["phases"][0]["terms"] == {"groups": {"tau": 10.0}, "rate": {"tau": 0.5}}
    assert recipe_of({"recipe": kept}) == settings


def test_a_history_comes_back():
    history = [
        {"phase": "vd", "epoch": epoch, "nll": 1 / epoch, "bytes": None, "parts": {"kl": 0.5}} for epoch in (1, 2)
    ]
    assert history_of({"history": pack_history(history)}) == history
    assert history_of({"history": pack_history([])}) == []
    for damaged in ({}, {"history": "~~~"}, {"history": "00000"}):
        with pytest.raises(DataError, match=r"history of .* is damaged"):
            history_of(damaged)


def test_records_are_ordered_and_replaced_by_name(tmp_path):
    for name in ("b-10", "b-9", "a-1"):
        add(tmp_path, {"name": name, "bytes": 1})
    add(tmp_path, {"name": "b-9", "bytes": 2})
    assert [(name, record["bytes"]) for name, record in read(tmp_path).items()] == [("a-1", 1), ("b-9", 2), ("b-10", 1)]
    assert read(tmp_path / "nowhere") == {}


def test_records_of_pieces_come_together_with_their_files(tmp_path):
    for piece, names in (("one", ("a-10", "a-11")), ("two", ("a-11", "b-10"))):
        (tmp_path / piece).mkdir()
        for name in names:
            add(tmp_path / piece, {"name": name, "bytes": 3, "accuracy": 0.5, "of": piece})
            file_of(tmp_path / piece, name).write_bytes(piece.encode())
        assert take(tmp_path / piece, tmp_path / "all") == list(names)
    assert {name: record["of"] for name, record in read(tmp_path / "all").items()} == {
        "a-10": "one",
        "a-11": "two",
        "b-10": "two",
    }
    assert file_of(tmp_path / "all", "a-11").read_bytes() == b"two"
    with pytest.raises(DataError, match="has no records"):
        take(tmp_path / "three", tmp_path / "all")


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"bytes": 3}'])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "runs.jsonl").write_text(f'{{"name": "a-1"}}\n{line}\n')
    with pytest.raises(DataError, match="line 2, is not the record of a run"):
        read(tmp_path)
