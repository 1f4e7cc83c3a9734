"""The benchmark of epochs runs to its end at toy size, and says what is over what."""

import json
import runpy
from pathlib import Path

import pytest

MODULE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "epoch_time.py"))
Row, compared, main = MODULE["Row"], MODULE["compared"], MODULE["main"]


def test_it_measures_every_row_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "epochs.json"
    small = ["--device", "cpu", "--batch", "2", "--images", "4", "--networks", "resnet-8", "--seconds", "3600"]
    main([*small, "-o", str(path)])
    figures = json.loads(path.read_text())
    assert {(row["precision"], row["feed"], row["kind"]) for row in figures["rows"]} == {
        (precision, feed, kind)
        for precision in ("no", "bf16")
        for feed in ("resident", "loader")
        for kind in ("plain", "VD", "VD+SWS", "all terms")
    }
    assert all(row["seconds"] > 0 and not row["failure"] for row in figures["rows"])
    assert all(row["peak_gib"] is None for row in figures["rows"])
    assert "over resident" in capsys.readouterr().out


def test_what_is_over_what():
    rows = [
        Row("n", "no", "resident", "plain", 2.0, 1.0),
        Row("n", "no", "resident", "VD", 3.0, 2.5),
        Row("n", "no", "loader", "plain", 4.0, 1.0),
        Row("n", "no", "loader", "VD", failure="out of time"),
    ]
    plain, ours, handed, late = compared(rows)
    assert (plain["over_plain"], ours["over_plain"], ours["memory_over_plain"]) == (1.0, 1.5, 2.5)
    assert (handed["over_plain"], handed["over_resident"]) == (1.0, 2.0)
    assert late["over_plain"] is None
    assert late["failure"] == "out of time"


def test_networks_and_precisions_can_be_measured_one_by_one(tmp_path):
    path, about = tmp_path / "epochs.json", {"device": "a", "batch": 2}
    join = MODULE["with_other_rows"]
    first, other, third, anew = (
        {"network": name, "precision": precision, "seconds": seconds}
        for name, precision, seconds in (
            ("resnet-20", "no", 1),
            ("resnet-20", "bf16", 2),
            ("vgg-16", "no", 3),
            ("resnet-20", "bf16", 4),
        )
    )
    assert join({**about, "rows": [first]}, path)["rows"] == [first]
    path.write_text(json.dumps({**about, "rows": [first, other, third]}))
    assert join({**about, "rows": [anew]}, path)["rows"] == [first, anew, third]
    assert join({**about, "device": "b", "rows": [anew]}, path)["rows"] == [anew]


def test_a_row_that_fails_is_named_and_does_not_end_the_table(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setitem(MODULE["measure"].__globals__, "_trained", fails)
    row = MODULE["measure"](Row("n", "no", "loader", "VD"), MODULE["resolve_device"]("cpu"), 2, 4)
    assert row.failure == "CUDA out of memory."
    assert row.seconds == pytest.approx(0)
