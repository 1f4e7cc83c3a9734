"""Committed results: every file gives the figures that its record states, and the pages are rendered from them."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from bayeszip import codec, pipeline
from bayeszip.loaders import load_data
from bayeszip.record import bytes_by_part, file_figures

ROOT = Path(__file__).resolve().parents[1]
RECORDS = sorted(ROOT.glob("results/*/*/result.json"))


@pytest.fixture(scope="module")
def test_set():
    return load_data("mnist", batch_size=1, seed=0, device=torch.device("cpu")).test


@pytest.fixture(scope="module")
def paper_bytes():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "experiments"))
        return runpy.run_path(str(ROOT / "experiments" / "runs.py"))["paper_bytes"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_file_gives_the_figures_of_its_record(path, test_set, paper_bytes):
    record = json.loads(path.read_text(encoding="utf-8"))
    blob = path.with_name("net.bayz").read_bytes()
    figures = file_figures(pipeline.load(path.with_name("net.bayz")), blob, test_set)
    # Another machine may round a tie between two outputs the other way.
    assert figures.pop("accuracy") == pytest.approx(record["accuracy"], abs=2e-4)
    assert figures == {name: record[name] for name in figures}
    parts = bytes_by_part(blob)
    assert record["bytes_by_part"] == parts
    assert sum(parts.pop("tensors").values()) + sum(parts.values()) == len(blob)
    model = codec.decode(blob)
    assert codec.encode(model) == blob
    if "paper_bytes" in record:
        assert paper_bytes(model, record["model"]) == record["paper_bytes"]


def test_the_pages_are_rendered_from_the_records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    render = runpy.run_path(str(ROOT / "experiments" / "render.py"))
    quick = render["by_tau1"](render["read"](ROOT / "results" / "quick"))
    quoted = json.loads((ROOT / "src/bayeszip/report/quoted.json").read_text(encoding="utf-8"))["lenet-300-100"]
    message = "run: python experiments/render.py"
    assert (ROOT / "RESULTS.md").read_text(encoding="utf-8") == render["results_page"](quick, quoted), message
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert render["with_results"](readme, quick) == readme, message


@pytest.mark.parametrize("experiment", ["table", "figure", "ablation"])
def test_every_planned_run_is_there_with_the_recipe_that_the_experiment_has(monkeypatch, experiment):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    planned = runpy.run_path(str(ROOT / "experiments" / f"{experiment}.py"))["planned"]()
    recorded_recipe = runpy.run_path(str(ROOT / "experiments" / "runs.py"))["recorded_recipe"]
    names = {path.parent.name for path in (ROOT / "results" / experiment).glob("*/result.json")}
    assert names == {run.name for run in planned}
    for run in planned:
        path = ROOT / "results" / experiment / run.name / "result.json"
        assert recorded_recipe(path) == run.settings
        record = json.loads(path.read_text(encoding="utf-8"))
        assert (record["model"], record["seed"]) == (run.model, run.seed)


def test_every_line_of_the_choice_is_of_a_planned_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    choice = runpy.run_path(str(ROOT / "experiments" / "choice.py"))
    noted = [(f"{line['method']} {line['settings']}", line["seed"]) for line in choice["lines"]()]
    assert sorted(noted) == sorted((run.name, run.seed) for run in choice["planned"]())
