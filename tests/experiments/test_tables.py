"""Tables: intervals, steps of accuracy, fronts."""

import io

import numpy as np
import pytest
from rich.console import Console

from bayeszip.errors import RecipeError
from bayeszip.experiments.pages import checkout
from bayeszip.experiments.plan import EXPERIMENTS
from bayeszip.experiments.records import read
from bayeszip.experiments.runs import parse_seeds, picked
from bayeszip.experiments.tables import STUDENT_T, TABLES, Grid, front, mean_of, paper_table, with_interval


def test_an_interval_holds_the_mean_in_95_of_100_cases():
    values = np.random.default_rng(0).normal(size=(20_000, 5))
    half = np.array([float(with_interval(list(row), ".6f").split(" ± ")[1]) for row in values])
    assert np.mean(np.abs(values.mean(axis=1)) <= half) == pytest.approx(0.95, abs=0.006)
    assert with_interval([3.0], ".1f") == "3.0"


def test_a_terminal_shows_what_markdown_tells():
    table = Grid(("recipe", "bytes"), (("`vd`", "**1,000**"), ("[deep]", "2,000"))).terminal()
    written = io.StringIO()
    Console(file=written, force_terminal=True, width=40, no_color=True).print(table)
    told = written.getvalue()
    assert "\x1b[1m1,000" in told
    assert "[deep]" in told
    assert not set("*`") & set(told)


def test_quantiles_are_student_s():
    stats = pytest.importorskip("scipy.stats")
    for degrees, quantile in enumerate(STUDENT_T, 1):
        assert quantile == pytest.approx(stats.t.ppf(0.975, degrees), abs=6e-4)
    assert with_interval([0.0, 1.0] * 30, ".3f") == f"0.500 ± {1.96 * np.std([0, 1] * 30, ddof=1) / 60**0.5:.3f}"


def record(seed, **figures):
    known = {"model": "lenet-5", "seed": seed, "recipe": {"name": "vd+sws"}, "accuracy": 0.99, "params": 1000}
    steps = {"validation_accuracy_trained": 0.98, "validation_accuracy_snapped": 0.97, "validation_accuracy": 0.9750}
    return {**known, "bytes": 10, "paper_bytes": 20, "nonzero": 50, **steps, **figures}


def test_the_snap_and_the_closing_phase_are_told_apart():
    (grid,) = paper_table([record(10), record(11)])
    row = dict(zip(grid.head, grid.rows[0], strict=True))
    assert (row["seeds"], row["the snap"], row["closing phase"]) == ("10–11", "-1.00", "+0.50")
    assert row["times smaller, paper's accounting"] == "200 ± 0"
    (grid,) = paper_table([record(10), record(12, validation_accuracy_snapped=None)])
    assert grid.rows[0][1:5] == ("10, 12", "99.00 ± 0.00", "–", "–")


def sealed(record):
    return {name: value for name, value in record.items() if name not in ("accuracy", "accuracy_before")}


def without_validation(record):
    return {name: None if name.startswith("validation_") else value for name, value in record.items()}


@pytest.mark.parametrize("change", [sealed, without_validation])
@pytest.mark.parametrize("experiment", TABLES)
def test_every_table_has_rows_for_runs_that_were_not_measured(experiment, change):
    records = list(read(checkout() / "results" / experiment).values())
    whole = TABLES[experiment](records)
    grids = TABLES[experiment]([change(record) for record in records])
    assert [len(grid.head) for grid in grids] == [len(grid.head) for grid in whole]
    assert all(len(grid.rows) >= len(other.rows) > 0 for grid, other in zip(grids, whole, strict=True))
    column = "test accuracy, %" if change is sealed else "validation, %"
    for grid in grids:
        if column in grid.head:
            assert {row[grid.head.index(column)].strip("*") for row in grid.rows} == {"–"}


def test_a_front_is_what_no_other_beats_on_validation():
    points = [(10, 0.90), (20, 0.95), (15, 0.89), (30, 0.95), (40, 0.97)]
    records = [{"bytes": size, "validation_accuracy": accuracy} for size, accuracy in points]
    assert [(r["bytes"], r["validation_accuracy"]) for r in front(records)] == [(10, 0.90), (20, 0.95), (40, 0.97)]


def test_where_nothing_was_held_out_nothing_is_beaten():
    runs = [{"bytes": size, "validation_accuracy": None} for size in (3, 1, 2)]
    assert [run["bytes"] for run in front(runs)] == [1, 2, 3]
    assert mean_of(runs, "validation_accuracy") is None
    assert mean_of(runs, "bytes") == 2


def test_a_grid_as_markdown():
    assert Grid(("a", "b"), (("1", "2"),), "T").markdown() == ["### T", "", "| a | b |", "|---|---|", "| 1 | 2 |", ""]


def test_runs_are_picked_by_parts_of_their_names():
    runs = EXPERIMENTS["table"].runs
    every = runs()
    for only in ("lenet-5-vd-10", "lenet-5-vd-10,", " lenet-5-vd-10 ,,"):
        assert [run.name for run in runs(only=only)] == ["lenet-5-vd-10"]
    assert len(runs(only="lenet-5-vd-10, lenet-5-vd-11")) == 2
    assert runs(only="") == every
    assert len(every) > 2
    for only, culprit in (("lenet-5-vd-10,lenet-6", "'lenet-6'"), (",", "','"), (" ", "' '")):
        with pytest.raises(RecipeError, match=culprit):
            runs(only=only)
    assert picked([("a", ["a-10", "a-rate=2-10"]), ("b", ["b-10"])], "rate=2", "run") == ["a"]


def test_seeds_are_a_range_or_a_number():
    assert parse_seeds("10:15") == (10, 11, 12, 13, 14)
    assert parse_seeds("3") == (3,)
