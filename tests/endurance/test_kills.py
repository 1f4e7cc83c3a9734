"""A handful of the kills that `kills.py` deals out by the hundred."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).parent / "kills.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill -9")
def test_runs_that_are_killed_end_like_those_left_alone():
    command = [sys.executable, str(KILLS), "--runs", "3", "--kills", "9", "--seed", "1", "--no-report"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["runs"] >= 3
    assert figures["kills"] >= 9
    assert figures["faults"] == []


def test_the_report_has_what_was_asked_for():
    """At least 50 runs and 200 kills, in every part of a run, and no fault."""
    figures = json.loads(KILLS.with_name("report.json").read_text())
    assert figures["runs"] >= 50
    assert figures["kills"] >= 200
    assert figures["faults"] == []
    for part in ("pretraining", "compression, phase 1", "compression, phase 2", "closing"):
        assert figures["during"][part] > 0


def test_the_report_of_faults_is_clean():
    """An error, and a kill, at every system call of a save."""
    figures = json.loads(KILLS.with_name("faults.json").read_text())
    assert {"openat", "write", "fsync", "rename", "unlink"} <= set(figures["calls"])
    for kind in ("EIO", "ENOSPC", "EROFS", "SIGKILL"):
        assert figures["tried"][kind] == len(figures["calls"])
    assert figures["faults"] == []
