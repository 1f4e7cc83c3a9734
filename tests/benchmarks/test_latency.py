"""The benchmark of latency: what it is told to measure, and figures for a committed file."""

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

ROOT = Path(__file__).resolve().parents[2]
MODULE = runpy.run_path(str(ROOT / "benchmarks" / "latency.py"))
FILE = ROOT / "results" / "table" / "lenet-5-vd+sws-10.bayz"


@pytest.mark.parametrize(
    ("file", "network"),
    [
        ("lenet-5-vd+sws-10.bayz", "lenet-5"),
        ("resnet-20-augmented-tau1=0.2-10.bayz", "resnet-20"),
        ("resnet-20-4-augmented-tau1=0.2-10.bayz", "resnet-20-4"),
    ],
)
def test_a_file_is_named_after_its_network(file, network):
    assert MODULE["network_of"](Path(file)) == network
    with pytest.raises(SystemExit, match="not named after a built-in network"):
        MODULE["network_of"](Path("something.bayz"))


def test_a_smaller_network_is_measured_beside_its_original(tmp_path, monkeypatch, capsys):
    for name in ("WARM_UP", "ROUNDS"):
        monkeypatch.setitem(MODULE["main"].__globals__, name, 1)
    MODULE["main"]([str(FILE), "-o", str(tmp_path / "latency.json")])
    rows = json.loads((tmp_path / "latency.json").read_text())["rows"]
    assert [(row["runtime"], row["batch"]) for row in rows] == [
        ("torch", 1),
        ("onnxruntime", 1),
        ("torch", 64),
        ("onnxruntime", 64),
    ]
    for row in rows:
        assert row["original_parameters"] == 431_080 > row["loaded_parameters"]
        # 24·24·20·25 + 8·8·50·500 + 800·500 + 500·10
        assert row["original_macs"] == 2_293_000 > row["loaded_macs"]
        assert row["original_ms"] > 0 < row["loaded_ms"]
    assert "times faster" in capsys.readouterr().out


def test_without_files_it_measures_what_is_committed():
    assert MODULE["default_files"]()[0] == FILE
    assert all(path.exists() for path in MODULE["default_files"]())
