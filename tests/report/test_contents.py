"""What a report is made of: figures that add up, and folders that are refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip import CompressedModel, QuantizedTensor, codec, models, pack
from bayeszip.errors import BayeszipError, DataError
from bayeszip.limits import LimitExceeded
from bayeszip.report import gather, page
from bayeszip.report.contents import Point
from bayeszip.report.quoted import is_quoted_on, quoted_data, quoted_for
from bayeszip.snapshots import BINS


def test_figures_add_up(finished):
    contents = finished.contents
    model = contents.model
    assert contents.values.zeros + sum(contents.values.counts) == model.parameters == contents.kept
    assert sum(contents.values.counts) == model.nonzero == contents.nonzero
    assert contents.ratio == 4 * contents.description.original_parameters / len(finished.file.read_bytes())


def test_a_file_is_held_to_what_a_caller_allows(finished):
    with pytest.raises(LimitExceeded, match="file"):
        gather(finished.file, limits=codec.Limits(file=10))


def test_layers_know_what_they_were(finished):
    weight = next(layer for layer in finished.contents.layers if layer.described.name == "1.weight")
    assert weight.before == (12, 64)
    assert weight.units_before == 12
    assert weight.units_after == weight.described.shape[0] <= 12


def test_phases_cover_the_run_without_gaps(finished):
    spans = finished.contents.spans()
    assert [span.name for span in spans] == ["l2", "vd", "vd+sws", "values"]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(finished.contents.run.history)


def test_curves_have_only_what_was_measured(finished):
    contents = finished.contents
    sizes = [(n, stats.bytes) for n, stats in enumerate(contents.run.history, start=1) if stats.bytes is not None]
    curve = contents.curve("size", "bytes")
    assert list(zip(curve.epochs, curve.values, strict=True)) == sizes
    parts = contents.parts_of_loss()
    assert [part.label for part in parts] == ["data", "divergence", "mixture"]
    assert len(parts[0].values) == len(contents.run.history)


def test_the_file_is_among_the_points(finished):
    points = finished.contents.points()
    assert {point.kind for point in points} == {"epoch", "file"}
    assert {point.bytes for point in points if point.kind == "file"} == {len(finished.file.read_bytes())}


def test_without_a_run_the_file_speaks_for_itself(finished):
    alone = gather(finished.file)
    assert (alone.run, alone.spans(), alone.points()) == (None, [], [])
    assert alone.values == finished.contents.values


def test_the_papers_networks_are_known_by_their_tensors(tmp_path):
    zeros = {"fc1": (4, 784), "fc2": (3, 4), "fc3": (10, 3)}
    tensors = {f"{name}.weight": QuantizedTensor(np.zeros(shape, int), np.zeros(1)) for name, shape in zeros.items()}
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel(tensors, None, 266_610)))
    contents = gather(tmp_path / "net.bayz")
    assert contents.network == "lenet-300-100"
    assert [layer.before for layer in contents.layers] == [(300, 784), (100, 300), (10, 100)]
    assert contents.quoted == quoted_for("lenet-300-100") != ()
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel(tensors, None, 266_611)))
    assert gather(tmp_path / "net.bayz").network is None


def test_statistics_are_no_parameters(tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    pack(network, example_inputs=(torch.zeros(1, 1, 5, 5),), components=64).save(tmp_path / "net.bayz")
    contents = gather(tmp_path / "net.bayz")
    assert contents.kept == sum(parameter.numel() for parameter in network.parameters())
    assert contents.kept < contents.model.parameters


def test_many_values_are_counted_in_bins(tmp_path):
    rng = np.random.default_rng(0)
    books = [np.concatenate([[0], rng.normal(size=200)]).astype(np.float32) for _ in range(2)]
    tensors = {str(i): QuantizedTensor(rng.integers(0, 201, (30, 30)), book) for i, book in enumerate(books)}
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel(tensors)))
    values = gather(tmp_path / "net.bayz").values
    assert len(values.values) == BINS
    assert values.width > 0
    assert values.zeros + sum(values.counts) == 1800


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished.folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("result.json", "{"),
        ("result.json", "[]"),
        ("result.json", '{"bytes": "many"}'),
        ("snapshots.json", "7"),
        ("snapshots.json", '{"shapes": {}, "moments": [{"phase": "vd"}]}'),
    ],
)
def test_a_damaged_record_is_named(copied, name, text):
    (copied / name).write_text(text)
    with pytest.raises(DataError, match=name):
        gather(copied / "net.bayz", copied)


@pytest.mark.parametrize("field", ["recipe", "history", "versions", "seconds"])
def test_a_record_that_lacks_something_is_refused(copied, field):
    held = json.loads((copied / "result.json").read_text())
    del held[field]
    (copied / "result.json").write_text(json.dumps(held))
    with pytest.raises(DataError, match=field):
        gather(copied / "net.bayz", copied)


def test_the_run_of_another_file_is_refused(finished, copied, tmp_path):
    other = tmp_path / "other.bayz"
    other.write_bytes(codec.encode(CompressedModel({"w": QuantizedTensor(np.zeros((2, 2), int), np.zeros(1))})))
    with pytest.raises(DataError, match="made another file"):
        gather(other, finished.folder)
    with pytest.raises(DataError, match=r"no result\.json"):
        gather(finished.file, tmp_path)
    with pytest.raises(BayeszipError):
        gather(tmp_path / "missing.bayz")


def test_a_run_without_snapshots_still_makes_a_report(copied):
    (copied / "snapshots.json").unlink()
    assert gather(copied / "net.bayz", copied).run.snapshots.moments == ()


def changed(folder, **figures):
    """The contents when the record of the run in `folder` says so."""
    held = json.loads((folder / "result.json").read_text()) | figures
    (folder / "result.json").write_text(json.dumps(held))
    return gather(folder / "net.bayz", folder)


@pytest.mark.parametrize(
    "figures",
    [
        {"bytes": 0},
        {"others": [{"rate": 2.0, "bytes": 0, "accuracy": 0.5}]},
        {"others": [{"rate": 2.0, "bytes": -5, "accuracy": 0.5}]},
        {"measured": "training"},
    ],
)
def test_figures_that_can_not_be_are_refused(copied, figures):
    with pytest.raises(DataError, match="not the record of a run"):
        changed(copied, **figures)


def test_an_epoch_without_bytes_is_refused(copied):
    held = json.loads((copied / "result.json").read_text())
    held["history"][-1]["bytes"] = -3
    with pytest.raises(DataError, match="-3 bytes"):
        changed(copied, **held)


def test_validation_data_do_not_pass_for_the_test_set(copied):
    others = [{"rate": 2.0, "bytes": 90, "accuracy": 0.75, "measured": "validation"}]
    contents = changed(copied, measured="validation", others=others)
    assert {point.measured for point in contents.points()} == {"validation"}
    assert sum(point.kind == "file" for point in contents.points()) == 1
    text = page(contents)
    assert "of the validation data right" in text
    assert "test set right" not in text
    assert "Test accuracy" not in text
    text = page(changed(copied, measured="test"))
    assert "of the test set right" in text
    assert "Test accuracy" in text


#: What a record says of the data, and whether the figures of the literature stand beside the run's.
DATA = [
    ({}, True),
    ({"data": "mnist"}, True),
    ({"data": "idx:fash"}, False),
    ({"data": "mnist:loaders"}, False),
    ({"data": "cifar10"}, False),
    ({"data": None}, False),
]


@pytest.mark.parametrize(("said", "compared"), DATA)
def test_others_figures_are_shown_for_their_own_data_alone(copied, tmp_path, said, compared):
    zeros = {"fc1": (4, 784), "fc2": (3, 4), "fc3": (10, 3)}
    tensors = {f"{name}.weight": QuantizedTensor(np.zeros(shape, int), np.zeros(1)) for name, shape in zeros.items()}
    blob = codec.encode(CompressedModel(tensors, None, 266_610))
    (copied / "net.bayz").write_bytes(blob)
    held = json.loads((copied / "result.json").read_text())
    (copied / "result.json").write_text(json.dumps({name: held[name] for name in held.keys() - {"model", "data"}}))
    contents = changed(copied, bytes=len(blob), **said)
    assert any(point.kind == "quoted" for point in contents.points()) is compared
    assert ("what others report on MNIST" in page(contents)) is compared


def test_every_network_that_is_quoted_has_its_data():
    assert {name: quoted_data(name) for name in ("lenet-5", "vgg-16", None)} == {
        "lenet-5": "mnist",
        "vgg-16": "cifar10",
        None: None,
    }
    assert all(quoted_data(network) for network in models.BUILT_IN)
    assert is_quoted_on("vgg-16", "cifar10:downloads")
    assert not is_quoted_on("vgg-16", "mnist")
    assert not is_quoted_on(None, None)


def test_other_files_of_the_training_are_points_of_the_curve(copied):
    held = json.loads((copied / "result.json").read_text())
    held["others"] = [{"rate": 2.0, "bytes": 90, "accuracy": 0.75}, {"rate": 4.0, "bytes": 80, "accuracy": None}]
    (copied / "result.json").write_text(json.dumps(held))
    contents = gather(copied / "net.bayz", copied)
    assert [point for point in contents.points() if point.kind == "other"] == [
        Point("rate 2", 90, 75.0, "other", "test")
    ]
    text = page(contents)
    assert "others of its training" in text
    assert ">rate 2</text>" in text
    held["others"][0]["rate"] = "much"
    (copied / "result.json").write_text(json.dumps(held))
    with pytest.raises(DataError, match="not the record of a run"):
        gather(copied / "net.bayz", copied)
