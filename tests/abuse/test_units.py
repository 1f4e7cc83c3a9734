"""Work in units: it adds up, goes on where it was stopped, and a unit that ends its worker is a fault."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from units import Crew, go_on, merged, source

WORKER = """
import os, sys, time
sys.path.insert(0, FOLDER)
from units import serve
def unit(number):
    if number == 3:
        os.abort()
    if number == 5:
        while True:
            time.sleep(1)
    return {"tried": 1, "refused": {str(number % 2): 1}, "slowest": number, "faults": []}
serve(unit, waiting=WAITING)
"""
COMMANDER = """
import json, sys
from pathlib import Path
sys.path.insert(0, FOLDER)
from units import Crew, go_on, save
path = Path(sys.argv[1])
results = json.loads(path.read_text()) if path.exists() else {}
go_on(results, 0, 6, Crew([sys.executable, "-c", sys.argv[2]], 2), lambda: save(path, results))
"""


def _code(template: str, waiting: int = 1) -> str:
    return template.replace("FOLDER", repr(str(Path(__file__).parent))).replace("WAITING", str(waiting))


def _crew(jobs: int, **settings: float) -> Crew:
    return Crew([sys.executable, "-c", _code(WORKER)], jobs, **settings)  # type: ignore[arg-type]


def test_figures_add_up():
    first = {"tried": 2, "slowest_ms": 3.0, "faults": ["a"], "refused": {"x": 1}}
    second = {"tried": 5, "slowest_ms": 1.0, "faults": ["a", "b"], "refused": {"x": 1, "y": 2}, "more": 1}
    expected = {"tried": 7, "slowest_ms": 3.0, "faults": ["a", "b"], "refused": {"x": 2, "y": 2}, "more": 1}
    assert merged(first, second) == expected


def test_a_crash_and_a_hang_are_faults_and_the_others_are_done():
    results: dict = {}
    assert go_on(results, 2, 5, _crew(2), lambda: None)
    assert (results["tried"], results["slowest"], results["refused"]) == (3, 6, {"0": 3})
    crash, hang = sorted(results["faults"])
    assert crash.startswith(f"3: the worker ended with {-signal.SIGABRT}")
    assert hang.startswith(f"5: the worker ended with {-signal.SIGALRM}")


def test_what_is_left_when_time_is_up_is_done_the_next_time():
    results: dict = {}
    assert not go_on(results, 0, 3, _crew(1, until=time.monotonic()), lambda: None)
    assert go_on(results, 0, 3, _crew(1, lifetime=1), lambda: None)
    assert (results["tried"], results["unfinished"]) == (3, [])
    before = dict(results)
    assert go_on(results, 0, 3, _crew(1), lambda: None)
    assert results == before


def test_figures_of_another_source_are_not_added_to():
    results = {"source": "another", "first": 0, "begun": 3, "unfinished": [], "tried": 3}
    assert go_on(results, 0, 1, _crew(1), lambda: None)
    assert (results["tried"], results["source"]) == (1, source())


def test_a_command_that_is_terminated_keeps_what_was_done(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "-c", _code(COMMANDER), str(path), _code(WORKER, waiting=60)]
    with subprocess.Popen(command) as process:  # unit 5 hangs
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and json.loads(path.read_text()).get("tried") == 4):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    results = json.loads(path.read_text())
    assert (results["tried"], results["unfinished"], len(results["faults"])) == (4, [5], 1)
    assert not os.path.exists(f"{path}.tmp")
