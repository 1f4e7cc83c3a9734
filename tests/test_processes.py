"""Workers: tasks and their outcomes, what ends them, and what they share."""

import operator
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from bayeszip.errors import Interrupted, ModelError, RecipeError
from bayeszip.experiments.runs import parse_seeds
from bayeszip.processes import MPS_CONTROL, Workers, side_by_side, untouched_device


def answers(workers, tasks):
    return [(outcome.answer, outcome.error) for outcome in workers.outcomes(tasks)]


def test_workers_keep_their_interpreters_and_a_mistake_costs_one_task():
    with Workers(operator.call, 2) as workers:
        first = {answer for answer, _ in answers(workers, [os.getpid] * 6)}
        assert 1 <= len(first) <= 2
        assert os.getpid() not in first
        with pytest.raises(RecipeError) as refused:
            parse_seeds("x")
        assert answers(workers, [partial(parse_seeds, "x")]) == [(None, str(refused.value))]
        assert {answer for answer, _ in answers(workers, [os.getpid] * 6)} <= first


def test_who_ends_over_a_task_or_meets_a_fault_is_replaced():
    with Workers(operator.call, 1) as workers:
        before, dead, after = answers(workers, [os.getpid, partial(os._exit, 3), os.getpid])
        assert dead == (None, "its process ended with status 3")
        assert before != after
        fault, again = answers(workers, [partial(int, "x"), os.getpid])
        assert fault == (None, "ValueError: invalid literal for int() with base 10: 'x'")
        assert again != after


def test_workers_are_gone_afterwards():
    with Workers(operator.call, 1) as workers:
        ((pid, _),) = answers(workers, [os.getpid])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


PARENT = """
import operator, os, time
from functools import partial
from bayeszip.processes import Workers
if __name__ == "__main__":
    with Workers(operator.call, 1) as workers:
        for outcome in workers.outcomes([os.getpid, partial(time.sleep, 600)]):
            print(outcome.answer, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while _is_there(pid):
        assert time.monotonic() < deadline, "the worker outlives its parent"
        time.sleep(0.1)


def _is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Where nobody collects orphans, what is left of one stays listed.
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_work_and_say_what_stays(number):
    before = signal.getsignal(number)
    with (
        pytest.raises(Interrupted, match="goes on") as ended,
        side_by_side(operator.call, 2, "cpu", "the same command goes on", print),
    ):
        os.kill(os.getpid(), number)
    assert ended.value.signal == number
    assert signal.getsignal(number) is before


def test_cores_are_divided(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    with side_by_side(operator.call, 5, "cpu", "", print) as workers:
        assert answers(workers, [partial(os.getenv, "OMP_NUM_THREADS")]) == [("3", None)]
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A program in place of NVIDIA's, which notes what it is told."""

    def install(status):
        program = tmp_path / MPS_CONTROL
        program.write_text(
            f'#!/bin/sh\necho "$@ $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/told\necho no GPU >&2\nexit {status}\n'
        )
        program.chmod(0o755)
        return tmp_path / "told"

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return install


def pipe_of_a_worker(said, jobs=2, device="cuda"):
    with side_by_side(operator.call, jobs, device, "", said.append) as workers:
        ((pipe, _),) = answers(workers, [partial(os.getenv, "CUDA_MPS_PIPE_DIRECTORY")])
    return pipe


def test_the_gpu_is_shared_through_the_service_which_ends_with_the_work(control):
    told, said = control(0), []
    pipe = pipe_of_a_worker(said)
    assert said == ["processes share the GPU through NVIDIA's Multi-Process Service, started for them"]
    assert [line.split() for line in told.read_text().splitlines()] == [["-d", pipe], ["quit", pipe]]
    assert not os.path.exists(pipe)
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_without_the_service_processes_take_turns(control):
    said = []
    assert pipe_of_a_worker(said) is None
    control(1)
    assert pipe_of_a_worker(said) is None
    assert said[0].startswith(f"{MPS_CONTROL} is not installed, so processes take turns")
    assert said[1] == "NVIDIA's Multi-Process Service does not start (no GPU), so processes take turns on the GPU"


@pytest.mark.parametrize(("jobs", "device"), [(1, "cuda"), (2, "cpu")])
def test_where_nothing_is_shared_no_service_is_started(control, jobs, device):
    told, said = control(0), []
    assert pipe_of_a_worker(said, jobs, device) is None
    assert not said
    assert not told.exists()


def test_a_service_that_runs_is_used(control, monkeypatch):
    told, said = control(0), []
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somebody/else's")
    assert pipe_of_a_worker(said) == "/somebody/else's"
    assert "that CUDA_MPS_PIPE_DIRECTORY names" in said[0]
    assert not told.exists()


def test_a_device_is_known_without_being_touched(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert untouched_device("auto") == "cpu"
    for device, message in (("gpu", "there is no device 'gpu'"), ("cuda", "there is no CUDA device")):
        with pytest.raises(ModelError, match=message):
            untouched_device(device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [untouched_device(device) for device in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]


STOPPER = """
import signal, time
from pathlib import Path
from bayeszip.errors import Interrupted

def work(path):
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    Path(path).write_text("at work")
    while not told:
        time.sleep(0.01)
    time.sleep(0.5)
    Path(path).write_text("saved")
    raise Interrupted("stopped", signal.SIGTERM)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGTERM")
def test_workers_that_are_told_to_end_save_their_state_in_silence(tmp_path, monkeypatch, capfd):
    (tmp_path / "stopper_of_workers.py").write_text(STOPPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    import stopper_of_workers  # type: ignore[import-not-found]

    states = [tmp_path / name for name in "abc"]
    with Workers(operator.call, 4) as workers:
        tasks = [*(partial(stopper_of_workers.work, str(path)) for path in states), os.getpid]
        assert next(workers.outcomes(tasks)).error is None
        deadline = time.monotonic() + 60
        while not all(path.exists() and path.read_text() for path in states):
            assert time.monotonic() < deadline, "the workers don't begin"
            time.sleep(0.05)
    assert [path.read_text() for path in states] == ["saved"] * 3
    assert "Traceback" not in capfd.readouterr().err
