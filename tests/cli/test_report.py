"""`bayeszip report` and what `compress` leaves for it, as a user meets them."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bayeszip import codec
from bayeszip.cli import app
from bayeszip.snapshots import SnapshotRecorder

NETS = """
import torch
from torch import nn

def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 2))

def loaders():
    x = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = list(zip(x.split(16), (x.mean((1, 2, 3)) > 0.5).long().split(16)))
    return data, data
"""
COMPRESS = "compress report_nets:tiny --data report_nets:loaders --recipe quick --set epochs_scale=0.03 -o net.bayz"


def bayeszip(*arguments):
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which a run with logs has been, and which is the current one."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "report_nets.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = bayeszip(*COMPRESS.split(), "--run", "run", "--log", "tensorboard")
        assert done.exit_code == 0, done.output
        yield folder


def test_a_run_leaves_what_a_report_needs(folder):
    assert {path.name for path in (folder / "run").iterdir()} >= {"result.json", "snapshots.json", "tensorboard"}
    assert any((folder / "run" / "tensorboard").glob("events.out.tfevents.*"))
    done = bayeszip("report", "net.bayz", "--run", "run")
    assert done.exit_code == 0, done.output
    assert "written to report.html" in done.output
    assert "<b>Before</b>" in (folder / "report.html").read_text(encoding="utf-8")


def test_plots_are_written_beside_the_page(folder):
    done = bayeszip("report", "net.bayz", "-o", "alone.html", "--plots", "plots")
    assert done.exit_code == 0, done.output
    assert (folder / "alone.html").is_file()
    for name in ("bytes.png", "weights.svg"):
        assert f"written to {Path('plots') / name}" in done.output
        assert (folder / "plots" / name).is_file()


def test_plots_that_can_not_be_drawn_are_refused_before_the_page(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = bayeszip("report", "net.bayz", "-o", "none.html", "--plots", "plots")
    assert done.exit_code == 1
    assert "plots need matplotlib" in done.output
    assert not (folder / "none.html").exists()


def test_a_file_is_evaluated_by_reading_it_once(folder, monkeypatch):
    """What came through a pipe is gone then."""
    left, read = [True], codec.read
    monkeypatch.setattr(codec, "read", lambda path, limits=None: read(path, limits) if left.pop() else b"")
    done = bayeszip("evaluate", "net.bayz", "--data", "report_nets:loaders", "--json")
    assert done.exit_code == 0, done.output
    assert not left


def test_snapshots_of_a_run_that_was_not_finished_are_no_other_runs(folder, monkeypatch):
    """The file and the record of the run before don't speak of them."""
    done = bayeszip(*COMPRESS.split(), "--run", "twice")
    assert done.exit_code == 0, done.output
    kept = (folder / "twice" / "net.bayz").read_bytes()
    interrupted = SnapshotRecorder.on_epoch

    def on_epoch(self, stats, course):
        interrupted(self, stats, course)
        if stats.phase == "vd":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotRecorder, "on_epoch", on_epoch)
        assert bayeszip(*COMPRESS.split(), "--run", "twice", "--seed", "1").exit_code
    done = bayeszip("report", "net.bayz", "--run", "twice")
    assert done.exit_code == 1
    assert "holds no finished run" in done.stderr
    assert (folder / "twice" / "net.bayz").read_bytes() == kept


def test_what_is_refused_before_a_training_leaves_the_record(folder):
    record = (folder / "run" / "result.json").read_bytes()
    assert bayeszip(*COMPRESS.split(), "--run", "run", "--loss", "mse").exit_code
    assert (folder / "run" / "result.json").read_bytes() == record


def test_a_training_without_a_phase_has_no_snapshots(folder):
    arguments = [*COMPRESS.split(), "--run", "phases"]
    assert bayeszip(*arguments).exit_code == 0
    none = ["--recipe", "l2", "--set", "closing.epochs=0"]
    assert bayeszip(*arguments, *none).exit_code == 0
    assert {path.name for path in (folder / "phases").iterdir()} == {
        "checkpoints",
        "net.bayz",
        "report.txt",
        "result.json",
    }


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("report net.bayz --run nowhere", 1, "result.json"),
        ("report report_nets.py", 1, "not a .bayz file"),
        ("report net.bayz -o nowhere/report.html", 1, "nowhere"),
        (f"{COMPRESS} --log tensorboard", 2, "--run"),
        (f"{COMPRESS} --run run --log wandb", 2, "wandb"),
    ],
)
def test_mistakes_give_a_message_and_a_status(folder, arguments, status, message):
    done = bayeszip(*arguments.split())
    assert done.exit_code == status
    assert message in done.stderr
