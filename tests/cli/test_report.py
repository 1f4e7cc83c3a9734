"""`bayeszip report` and what `compress` leaves for it, as a user meets them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bayeszip.cli import app

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
