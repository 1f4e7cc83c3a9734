"""A Compressor in real data-parallel processes: whatever their noise and data, all ranks hold the same weights."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("rank.py")
SETTINGS = (
    "all.epochs=6", "batch_size=64", "all.rate_theta=0.01", "all.rate_log_sigma2=0.05", "all.distillation=0",
    "mixture.components=9",
)  # fmt: skip
#: The last phase without noise, so without gradients of variances.
QUIET = ("vd.epochs=0", "vd+sws.tau1=0", "vd+sws.noise=false")


@pytest.mark.parametrize("settings", [SETTINGS, (*SETTINGS, *QUIET)], ids=["noisy", "quiet"])
def test_two_ranks_stay_identical(tmp_path, settings):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), "2", str(tmp_path / "meeting"), *settings],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert first["weights"] == second["weights"]
    check(first)


def test_one_rank(tmp_path, capsys):
    runpy.run_path(str(RANK))["main"](0, 1, tmp_path / "meeting", SETTINGS)
    check(json.loads(capsys.readouterr().out.splitlines()[-1]))


def check(outcome):
    assert 0 < outcome["zeros"] < 1
    assert 0 < outcome["file"] < 4 * (12 * 16 + 16 + 32 + 16 * 3 + 3)
