"""Committed results: files give the figures of their records, pages are rendered from them, choices can be traced."""

import functools
import subprocess
from pathlib import Path

import pytest

from bayeszip import codec, data, loading
from bayeszip.codec.accounting import paper_size
from bayeszip.errors import DataError
from bayeszip.experiments import EXPERIMENTS
from bayeszip.experiments.curves import NETWORKS
from bayeszip.experiments.pages import PAGES, inherited, rendered
from bayeszip.experiments.records import OFFSET_BITS, file_of, history_of, is_of, read, recipe_of
from bayeszip.fitting import ResidentBatches, evaluate
from bayeszip.graph.indices import beside_parameters
from bayeszip.recipe import RECIPES
from bayeszip.record import size_figures
from bayeszip.settings import to_dict

ROOT = Path(__file__).resolve().parents[1]
HELD = {name: records for name in EXPERIMENTS if (records := read(ROOT / "results" / name))}
IN_PIECES = {"frontier", "parts", "targets"}
WITH_FILES = [(name, record) for name, records in HELD.items() if name != "choice" for record in records.values()]


@functools.cache
def images_to_test(model):
    """What the network is tested with; None where that is neither in the checkout nor in the cache."""
    try:
        test = data.load_test(NETWORKS[model].data, mirrors=())
    except DataError:
        return None
    # What a batch of this size computes stays in a core's cache.
    return ResidentBatches(test.images, test.labels, 250)


def is_judged(experiment, record):
    """Whether a file is shown all test images: of the parts, whose tables compare means, one seed of each row is."""
    alike = (other["seed"] for other in HELD[experiment].values() if other["recipe"] == record["recipe"])
    return experiment != "parts" or record["seed"] == min(alike)


@pytest.mark.parametrize(
    ("experiment", "record"), WITH_FILES, ids=lambda part: part if isinstance(part, str) else part["name"]
)
def test_a_file_gives_the_figures_of_its_record(experiment, record):
    path = file_of(ROOT / "results" / experiment, record["name"])
    blob, test = path.read_bytes(), images_to_test(record["model"]) if is_judged(experiment, record) else None
    model, description = codec.inspect(blob)
    figures = size_figures(description, beside_parameters(model))
    if test is not None:
        # Another machine may round a tie between two outputs the other way.
        assert evaluate(loading.load(path), test, cast=True) == pytest.approx(record["accuracy"], abs=2e-4)
    assert {name: figures[name] for name in ("bytes", "params", "nonzero")} == {
        name: record[name] for name in ("bytes", "params", "nonzero")
    }
    assert codec.encode(model, description.coder, **description.options) == blob
    if record["model"] in OFFSET_BITS:
        assert paper_size(model, OFFSET_BITS[record["model"]]).bytes == record["paper_bytes"]


@pytest.mark.parametrize("name", HELD)
def test_every_record_is_of_a_planned_run_with_the_settings_of_the_plan(name):
    planned = {each: run for run in EXPERIMENTS[name].runs() for each in run.endings}
    assert set(HELD[name]) <= set(planned)
    assert [record["name"] for record in HELD[name].values() if not is_of(record, planned[record["name"]])] == []
    # What takes many hours of a GPU comes in pieces.
    assert name in IN_PIECES or set(HELD[name]) == set(planned)


def test_a_record_tells_how_its_training_went():
    for _, record in WITH_FILES:
        settings = recipe_of(record)
        epochs = [epoch for epoch in history_of(record) if epoch["phase"] == settings.closing.name]
        # For a figure to keep, several files are tried.
        is_kept = "points" in record.get("target", "")
        tries = len(epochs) // settings.closing.epochs if is_kept else 1
        assert len(epochs) == tries * settings.closing.epochs
        assert tries or not settings.closing.epochs
        trained = [epoch for epoch in history_of(record) if epoch["phase"] != settings.closing.name]
        end = [(epoch["phase"], epoch["epoch"]) for epoch in trained][-1:]
        ends = [epoch["accuracy"] for epoch in trained if (epoch["phase"], epoch["epoch"]) in end]
        # And several trainings, of which none may be better than none.
        assert len(ends) == 1 or is_kept or not trained
        before = [record["validation_accuracy_before"]] if is_kept or not trained else []
        assert record["validation_accuracy_trained"] in ends + before


def test_the_folders_hold_records_and_files_alone_under_short_names():
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    expected = {f"results/{name}/runs.jsonl" for name in HELD} | {"results/choice/inherited.json"}
    expected |= {f"results/{name}/{record['name']}.bayz" for name, record in WITH_FILES}
    assert set(listed.stdout.split()) == expected
    assert max(map(len, expected)) < 80


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_are_rendered_from_the_records(page):
    assert (ROOT / page).read_text(encoding="utf-8") == rendered(ROOT, page), "run: bayeszip reproduce --render"


def fields_of(recipe):
    """Every setting by the name that `--set` has for it."""
    found = {}
    for name, value in to_dict(recipe).items():
        if isinstance(value, dict):
            found |= {f"{name}.{field}": setting for field, setting in value.items()}
        elif isinstance(value, list | tuple):
            found |= {f"{phase['name']}.{field}": setting for phase in value for field, setting in phase.items()}
        else:
            found[name] = value
    return {name: value for name, value in found.items() if name.rpartition(".")[2] != "name"}


@pytest.mark.parametrize("name", ["vd+sws", "vd", "sws", "quick", "smallest", "deep"])
def test_every_setting_that_is_not_the_paper_s_was_tried_or_is_stated_as_inherited(name):
    """Tried: in the committed sweep the setting has several values, and the recipe's is one of them."""
    ours = fields_of(RECIPES[name])
    paper = fields_of(RECIPES[f"paper-{name if name in ('vd', 'sws') else 'vd+sws'}"])
    swept = [fields_of(recipe_of(record)) for record in HELD["choice"].values() if record["recipe"]["name"] == name]
    differing = {field for field, value in ours.items() if field not in paper or paper[field] != value}
    tried = {field: {settings.get(field) for settings in swept} for field in differing}
    untried = {field for field, values in tried.items() if len(values) < 2 or ours[field] not in values}
    assert differing
    assert untried == set(inherited(ROOT)[name]), "state the reason in results/choice/inherited.json, or sweep it"
    assert all(inherited(ROOT)[name].values())
