"""Sweeps: what is varied, the study that workers share and may leave at any moment, pruning, the front."""

import dataclasses
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bayeszip
from bayeszip.cli import main
from bayeszip.errors import DataError, ModelError, OutputError, RecipeError, TrainingError
from bayeszip.fitting import EpochStats
from bayeszip.loaders import load_test
from bayeszip.recipe import recipe
from bayeszip.sweep import Plan, front_of, grid_of, open_study, parse_dimensions, study, work, worker, write_front
from bayeszip.sweep.front import Front, Point
from bayeszip.sweep.pruning import Milestone, Pruned, PruningWatcher, is_hopeless

optuna = pytest.importorskip("optuna")

QUICK = recipe("quick")

# ---------------------------------------------------------------------------------------------------------------------
# What is varied


def test_ranges_and_lists_become_values_that_the_recipe_takes():
    texts = ["all.tau1=0.1:10:log", "vd.epochs=10:20", "mixture.components=5, 9", "vd.schedule=linear,cosine"]
    dimensions = parse_dimensions(texts, QUICK)
    assert [dimension.whole for dimension in dimensions] == [False, True, False, False]
    trial = optuna.trial.FixedTrial(
        {"all.tau1": 0.3, "vd.epochs": 11, "mixture.components": "9", "vd.schedule": "cosine"}
    )
    values = [f"{dimension.field}={dimension.suggest(trial)}" for dimension in dimensions]
    assert values == ["all.tau1=0.3", "vd.epochs=11", "mixture.components=9", "vd.schedule=cosine"]
    assert QUICK.override(*values).phases[0].tau1 == 0.3


def test_what_one_setting_may_be_is_told_beside_the_others():
    """Trials of a rate need one."""
    varied = ["quantization.rate_trials=1,2", "quantization.rate=1:2"]
    assert [each.field for each in parse_dimensions(varied, QUICK)] == ["quantization.rate_trials", "quantization.rate"]
    with pytest.raises(RecipeError, match=r"quantization\.rate, which is 0"):
        parse_dimensions(varied[:1], QUICK)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all.tau9=1:2", "no setting tau9"),
        ("nowhere.tau1=1:2", "no part 'nowhere'"),
        ("all.tau1=2:1", "the range 2:1 is empty"),
        ("all.tau1=1:1", "the range 1:1 is empty"),
        ("all.tau1=", "write what to vary as FIELD=LOW:HIGH"),
        ("all.tau1", "write what to vary as FIELD=LOW:HIGH"),
        ("all.tau1=0:1:log", "begins above 0, not at 0"),
        ("all.tau1=0:1:cubic", "LOW:HIGH:log, not '0:1:cubic'"),
        ("all.tau1=-1:1", "at least 0"),
        ("all.tau1=low:high", "must be of type float"),
        ("vd.schedule=linear:cosine", "takes words, not numbers"),
        ("vd.schedule=linear,steep", "one of constant, linear, cosine"),
        ("vd.epochs=5,5", "names a value twice"),
        ("all.tau1=1,,2", "must be of type float"),
    ],
)
def test_what_can_not_be_varied_is_named(text, message):
    with pytest.raises(RecipeError, match=message):
        parse_dimensions([text], QUICK)


def test_a_sweep_varies_something_and_nothing_twice():
    with pytest.raises(RecipeError, match="something to vary"):
        parse_dimensions([], QUICK)
    with pytest.raises(RecipeError, match=r"all\.tau1 can be varied only once"):
        parse_dimensions(["all.tau1=1:2", "all.tau1=3,4"], QUICK)


# ---------------------------------------------------------------------------------------------------------------------
# The study


@pytest.fixture
def storage(tmp_path, monkeypatch):
    # Several workers in one process, which outside of tests runs one trial at a time.
    real = study._is_running
    monkeypatch.setattr(study, "_is_running", lambda pid: pid == os.getpid() or real(pid))
    return f"journal:{tmp_path}/study.journal"


@pytest.fixture(params=["journal", "sqlite"])
def any_storage(request, storage, tmp_path):
    return storage if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"


def opened(storage, trials=3, seed=0, **plan):
    return open_study(storage, {"vary": ["x=0:1"], **plan}, trials=trials, seed=seed)


def test_the_study_has_as_many_trials_as_wanted_whoever_asks(any_storage):
    first, second = opened(any_storage), opened(any_storage)
    trials = [first.ask(), second.ask(), first.ask()]
    assert [trial.number for trial in trials] == [0, 1, 2]
    assert first.ask() is None
    assert second.ask() is None
    first.complete(trials[0], (0.1, 100))
    second.prune(trials[1])
    first.fail(trials[2], "it did not fit")
    assert [len(second.finished(state)) for state in ("COMPLETE", "PRUNED", "FAIL")] == [1, 1, 1]
    assert second.ask() is None
    assert opened(any_storage, trials=4).ask().number == 3


def test_who_asks_at_the_same_moment_and_comes_too_late_gets_nothing(storage, monkeypatch):
    first, second = opened(storage, trials=1), opened(storage, trials=1)
    ask = first.study.ask
    taken = []

    def slow_ask():
        # Between the look at the count and the question another worker asks.
        taken.append(second.ask())
        return ask()

    monkeypatch.setattr(first.study, "ask", slow_ask)
    assert first.ask() is None
    assert taken[0].number == 0
    second.complete(taken[0], (0.1, 100))
    assert len(second.finished("COMPLETE", "PRUNED", "FAIL")) == 1


def test_what_a_lost_worker_had_begun_is_begun_again(any_storage):
    shared = opened(any_storage, trials=2)
    trial = shared.ask()
    value = trial.suggest_float("x", 0, 1)
    trial.set_user_attr(study.WORKER, {"host": study.socket.gethostname(), "pid": _a_dead_process()})
    again = opened(any_storage, trials=2)
    revived = again.ask()
    assert revived.number == 1
    assert revived.suggest_float("x", 0, 1) == value
    # Exactly once, and the study still has two trials in the end.
    assert again.ask().suggest_float("x", 0, 1) != value
    assert again.ask() is None


def _a_dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_worker_that_had_the_number_of_this_process_is_gone(tmp_path):
    shared = opened(f"journal:{tmp_path}/study", trials=1)
    assert shared.ask().number == 0
    assert shared.ask().number == 1


def test_a_worker_elsewhere_is_lost_when_it_is_silent(storage, monkeypatch):
    shared = opened(storage, trials=1)
    trial = shared.ask()
    trial.set_user_attr(study.WORKER, {"host": "elsewhere", "pid": 1})
    assert opened(storage, trials=1).ask() is None
    monkeypatch.setattr(study, "LOST_AFTER", -1.0)
    assert opened(storage, trials=1).ask().number == 1


def test_a_trial_that_ends_its_workers_is_given_up(storage):
    shared = opened(storage, trials=1)
    settings = []
    for _ in range(study.MOST_RETRIES + 2):
        trial = shared.ask()
        settings.append(trial.suggest_float("x", 0, 1))
        trial.set_user_attr(study.WORKER, {"host": study.socket.gethostname(), "pid": _a_dead_process()})
    assert len(set(settings[:-1])) == 1
    assert settings[-1] != settings[0]


def test_of_a_grid_nothing_is_tried_twice(storage, monkeypatch):
    dimensions = parse_dimensions(["vd.schedule=linear,cosine", "mixture.components=5,9"], QUICK)
    grid = grid_of(dimensions)
    assert len(grid) == 4
    assert grid_of(parse_dimensions(["vd.schedule=linear,cosine", "vd.tau1=1:2"], QUICK)) == []
    first, second = (open_study(storage, {}, trials=20, seed=0, grid=grid) for _ in range(2))
    ask, tried = first.study.ask, []

    def settings(trial):
        return {dimension.field: dimension.suggest(trial) for dimension in dimensions}

    def slow_ask():
        # Another worker takes what this one has put into the queue.
        monkeypatch.setattr(first.study, "ask", ask)
        tried.append(settings(second.ask()))
        return ask()

    monkeypatch.setattr(first.study, "ask", slow_ask)
    for shared in (first, second, first):
        tried.append(settings(shared.ask()))
    assert sorted(map(str, tried)) == sorted(map(str, grid))
    assert first.ask() is None
    assert second.ask() is None


def test_signs_of_life_are_given_now_and_then(storage, monkeypatch):
    shared = opened(storage)
    trial = shared.ask()
    first = trial.user_attrs[study.ALIVE]
    shared.sign(trial)
    assert trial.user_attrs[study.ALIVE] == first
    monkeypatch.setattr(study, "SIGN_EVERY", 0.0)
    shared.sign(trial)
    assert trial.user_attrs[study.ALIVE] > first


def test_a_worker_taken_for_lost_too_early_changes_nothing_any_more(storage):
    shared = opened(storage, trials=2)
    trial = shared.ask()
    assert shared._lose(trial.number)
    shared.complete(trial, (0.1, 100), milestones=[])
    shared.sign(trial)
    assert shared.finished("COMPLETE", "FAIL") == []


def test_another_plan_is_refused_with_its_differences(storage):
    opened(storage)
    with pytest.raises(RecipeError, match=r"of another sweep:\n  vary\[0\]: \"x=0:1\" then, \"y=0:1\" now\n"):
        open_study(storage, {"vary": ["y=0:1"]}, trials=3, seed=0)


def test_workers_that_join_try_something_else(storage):
    values = [opened(storage, trials=9).ask().suggest_float("x", 0, 1) for _ in range(4)]
    assert len(set(values)) == 4


def test_the_same_seed_tries_the_same(tmp_path):
    values = [opened(f"journal:{tmp_path}/{name}", seed=5).ask().suggest_float("x", 0, 1) for name in "ab"]
    assert values[0] == values[1]


def test_a_storage_that_can_not_be_used_is_named(tmp_path):
    (tmp_path / "broken").write_text("not a journal\nat all\n")
    (tmp_path / "broken.db").write_bytes(b"not a database" * 100)
    for name in (
        "journal",
        "nonsense",
        "oracle-of-delphi:///x",
        f"journal:{tmp_path}",
        f"journal:{tmp_path}/broken",
        f"journal:{tmp_path}/broken/study",
        f"sqlite:///{tmp_path}/gone/study.db",
        f"sqlite:///{tmp_path}/broken.db",
    ):
        with pytest.raises(OutputError) as caught:
            opened(name)
        assert name in str(caught.value)
        assert "journal:FILE" in str(caught.value)


def test_a_storage_that_is_lost_on_the_way_is_named(storage):
    shared = opened(storage)
    trial = shared.ask()
    path = Path(storage.partition(":")[2])
    path.unlink()
    path.mkdir()
    for use in (shared.ask, lambda: shared.complete(trial, (0.1, 100), milestones=[]), lambda: shared.finished("FAIL")):
        with pytest.raises(OutputError, match=r"study\.journal can't be used \(IsADirectoryError"):
            use()


def test_without_optuna_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModelError, match=r"pip install 'bayeszip\[sweep\]'"):
        opened(f"journal:{tmp_path}/study")


# ---------------------------------------------------------------------------------------------------------------------
# Pruning


def epoch(number, accuracy, size, epochs=10, phase="vd"):
    return EpochStats(phase, number, epochs, 1.0, {"data": 0.1}, accuracy, 0.5, 10, size)


@pytest.mark.parametrize(
    ("here", "hopeless"),
    [
        (Milestone("vd", 0.5, 0.025, 1250), True),
        (Milestone("vd", 0.5, 0.024, 9000), False),
        (Milestone("vd", 0.5, 0.900, 1200), False),
        (Milestone("vd", 0.45, 0.900, 9000), True),
        (Milestone("vd", 0.7, 0.900, 9000), False),
        (Milestone("vd+sws", 0.5, 0.900, 9000), False),
        (Milestone("vd", 0.2, 0.900, 9000), False),
    ],
)
def test_hopeless_is_what_is_worse_in_both_by_the_margin_at_the_same_point(here, hopeless):
    rival = [Milestone("vd", 0.2, 0.02, 1000), Milestone("vd", 0.5, 0.02, 1000)]
    assert is_hopeless(here, rival, 0.25) is hopeless


def test_a_few_examples_are_no_margin():
    assert not is_hopeless(Milestone("vd", 0.5, 0.002, 9000), [Milestone("vd", 0.5, 0.0, 1000)], 0.25)


def test_the_watcher_ends_a_hopeless_trial_and_keeps_its_milestones():
    rivals = [[Milestone("vd", 0.5, 0.02, 1000)]]
    watcher = PruningWatcher(rivals, 0.25)
    watcher.on_epoch(epoch(4, None, 5000), None)
    watcher.on_epoch(epoch(4, 0.5, None), None)
    watcher.on_epoch(epoch(4, 0.99, 5000), None)
    with pytest.raises(Pruned):
        watcher.on_epoch(epoch(5, 0.9, 5000), None)
    assert [milestone.bytes for milestone in watcher.milestones] == [5000, 5000]
    PruningWatcher(rivals, 0.0).on_epoch(epoch(5, 0.9, 5000), None)


# ---------------------------------------------------------------------------------------------------------------------
# A worker


@pytest.fixture
def plan():
    return Plan(QUICK, parse_dimensions(["all.tau1=0.1:10:log"], QUICK), lambda recipe: None)


def stands_for(monkeypatch, outcome):
    """Trials that don't train: `outcome` gives the error and the bytes of each, or raises."""
    count = itertools.count()

    def compressed(plan, settings, pruning, show):
        error, size = outcome(next(count), pruning)
        return SimpleNamespace(accuracy=1 - error, bytes=size, blob=b"", description=None, beside=(), fit=None)

    monkeypatch.setattr(worker, "_compress", compressed)
    monkeypatch.setattr(worker, "write_record", lambda folder, result, figures: None)
    monkeypatch.setattr(worker, "size_figures", lambda description, beside: {})


def test_a_worker_records_what_became_of_each_trial(plan, tmp_path, monkeypatch):
    def outcome(number, pruning):
        if number == 1:
            raise DataError("no such data")
        pruning.on_epoch(epoch(5, 0.98 if number == 0 else 0.5, 1000 if number == 0 else 5000), None)
        return 0.02, 1000

    stands_for(monkeypatch, outcome)
    shared, seen = opened(f"journal:{tmp_path}/study"), []
    work(plan, shared, tmp_path, seen.append)
    assert [found.state for found in seen] == ["complete", "failed", "pruned"]
    assert [found.error for found in seen] == [pytest.approx(0.02), None, 0.5]
    assert seen[1].why == "no such data"
    assert shared.finished("FAIL")[0].user_attrs["error"] == "no such data"
    assert shared.finished("PRUNED")[0].user_attrs["milestones"] == [["vd", 0.5, 0.5, 5000]]
    assert len({found.settings["all.tau1"] for found in seen}) == 3


def test_a_sweep_in_which_nothing_succeeds_ends(plan, tmp_path, monkeypatch):
    def outcome(number, pruning):
        raise TrainingError("the loss is not finite")

    stands_for(monkeypatch, outcome)
    with pytest.raises(TrainingError, match="no trial succeeds; the last says: the loss is not finite"):
        work(plan, opened(f"journal:{tmp_path}/study", trials=50), tmp_path, lambda found: None)


def test_a_finding_is_left_to_those_who_show_it(caplog):
    PruningWatcher([], 0.25).on_finding("it is broken")
    assert not caplog.text


def test_an_interrupted_trial_is_left_to_the_next(plan, tmp_path, monkeypatch):
    def outcome(number, pruning):
        if number == 1:
            raise KeyboardInterrupt
        return 0.1 / (number + 1), 1000 * (number + 1)

    stands_for(monkeypatch, outcome)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        work(plan, opened(f"journal:{tmp_path}/study"), tmp_path, seen.append)
    shared = opened(f"journal:{tmp_path}/study")
    (lost,) = (trial for trial in shared.study.trials if trial.user_attrs.get("lost"))
    work(plan, shared, tmp_path, seen.append)
    assert len(seen) == 3
    assert seen[1].settings["all.tau1"] == repr(lost.params["all.tau1"])


# ---------------------------------------------------------------------------------------------------------------------
# The front


def point(trial, error, size):
    return Point(trial, error, size, {"all.tau1": 0.5}, "here")


def test_the_front_is_what_no_other_beats(tmp_path):
    rng = np.random.default_rng(0)
    shared = opened(f"journal:{tmp_path}/study", trials=40)
    for _ in range(40):
        error, size = rng.integers(0, 9) / 100, int(rng.integers(1000, 1010))
        trial = shared.ask()
        shared.complete(trial, (error, size))
    front = front_of(shared)
    values = {(found.error, found.bytes) for found in front.points}
    unbeaten = {
        (error, size)
        for error, size in values
        if not any(e <= error and s <= size and (e, s) != (error, size) for e, s in values)
    }
    assert {(found.error, found.bytes) for found in front.front} == unbeaten
    assert [found.bytes for found in front.front] == sorted(found.bytes for found in front.front)
    assert front.complete == len(front.points) == 40


def test_the_front_is_written_and_what_was_on_it_before_goes(tmp_path):
    for number in range(3):
        folder = tmp_path / "trials" / f"{number:04d}"
        folder.mkdir(parents=True)
        for name in ("net.bayz", "result.json", "report.txt"):
            (folder / name).write_text(f"{name} of {number}")
    first, second, third = point(0, 0.02, 2000), point(1, 0.01, 1000), point(7, 0.005, 3000)
    write_front(Front(1, 0, 0, (first,), (first,)), tmp_path)
    assert (tmp_path / "front" / "trial-0000" / "net.bayz").read_text() == "net.bayz of 0"
    missing = write_front(Front(3, 0, 0, (second, first, third), (second, third)), tmp_path)
    assert missing == ["trial 7 ran on here; its files are there, in trials/0007"]
    assert [path.name for path in (tmp_path / "front").iterdir()] == ["trial-0001"]
    drawn = (tmp_path / "front.svg").read_bytes()
    assert b"validation error" in drawn
    assert json.loads((tmp_path / "front.json").read_text())["front"][1] == dataclasses.asdict(third)
    write_front(Front(3, 0, 0, (second, first, third), (second, third)), tmp_path)
    assert (tmp_path / "front.svg").read_bytes() == drawn


# ---------------------------------------------------------------------------------------------------------------------
# The command


NETS = """
import os
import time
from pathlib import Path
from torch import nn

def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 2))

def together():
    # No worker gets ahead before another has its first trial too.
    Path(f"arrived-{os.getpid()}").touch()
    while len(list(Path().glob("arrived-*"))) < 2:
        time.sleep(0.05)
    return tiny()
"""


def write_idx(path, array):
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "nets.py").write_text(NETS)
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for split, n in (("train", 480), ("t10k", 120)):
        labels = rng.integers(0, 2, n).astype(np.uint8)
        pixels = rng.integers(0, 200, (n, 8, 8))
        pixels[:, :4] += 20 * labels[:, None, None]
        write_idx(folder / "images" / f"{split}-images-idx3-ubyte", pixels.astype(np.uint8))
        write_idx(folder / "images" / f"{split}-labels-idx1-ubyte", labels)
    return folder


def arguments(output, trials, *more, scale="0.03", model="nets:tiny"):
    data = [model, "--data", "idx:images", "--pretrain", "--device", "cpu"]
    settings = ["--set", f"epochs_scale={scale}"]
    # Batches of a factory have the size that it gives them.
    settings += [] if "--data" in more else ["--set", "batch_size=64"]
    vary = ["--vary", "all.tau1=0.01:1:log", "--vary", "mixture.components=5,9"]
    return ["sweep", *data, *settings, *vary, "--trials", str(trials), "-o", str(output), *more]


def started(folder, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "bayeszip", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run(folder, monkeypatch, capsys):
    def run(*words, columns="200"):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys, "argv", ["bayeszip", *words])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


def test_two_processes_join_one_study_and_a_rerun_adds_what_is_missing(folder, run):
    together = {"model": "nets:together"}
    workers = [started(folder, *arguments("joined", 4, "--prune-margin", "0", **together)) for _ in range(2)]
    ended = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ended
    shares = [[line for line in errors.splitlines() if line.startswith("trial ")] for _, errors in ended]
    assert all(shares), "both workers have run trials"
    numbers = sorted(int(line.split()[1]) for line in itertools.chain(*shares))
    assert len(numbers) == len(set(numbers)) == 4
    status, output, errors = run(*arguments("joined", 5, "--prune-margin", "0", "--json", **together))
    assert status == 0, errors
    figures = json.loads(output)
    assert (figures["complete"], figures["failed"]) == (5, 0)
    records = [json.loads(path.read_text()) for path in sorted((folder / "joined" / "trials").glob("*/result.json"))]
    assert len(records) == 5
    tried = {(record["recipe"]["phases"][0]["tau1"], record["recipe"]["mixture"]["components"]) for record in records}
    assert len(tried) == 5
    values = {(1 - record["validation_accuracy"], record["bytes"]) for record in records}
    for member in figures["front"]:
        mine = (member["error"], member["bytes"])
        assert mine in values
        assert not any(e <= mine[0] and s <= mine[1] and (e, s) != mine for e, s in values)
        kept = folder / "joined" / "front" / f"trial-{member['trial']:04d}"
        assert (kept / "net.bayz").stat().st_size == member["bytes"]
        assert bayeszip.load(kept / "net.bayz") is not None
        assert 1 - json.loads((kept / "result.json").read_text())["validation_accuracy"] == member["error"]


def test_a_killed_sweep_goes_on_where_it_was(folder, run, tmp_path):
    output = tmp_path / "killed"
    worker = started(folder, *arguments(output, 2, scale="0.3"))
    journal = f"journal:{output}/study.journal"
    deadline = time.monotonic() + 60
    begun = []
    while not begun and time.monotonic() < deadline:
        time.sleep(0.1)
        if (output / "study.journal").exists() and "components" in (output / "study.journal").read_text():
            begun = [trial for trial in _trials(journal) if trial.state.name == "RUNNING" and len(trial.params) == 2]
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    assert begun
    assert not list(output.glob("trials/*/net.bayz"))
    status, table, errors = run(*arguments(output, 2, scale="0.3"))
    assert status == 0, errors
    assert "2 trials complete, 0 pruned, 0 failed" in table or "1 trials complete, 1 pruned, 0 failed" in table
    first, again, _ = _trials(journal)
    assert first.state.name == "FAIL"
    assert first.user_attrs["lost"]
    assert again.params == first.params == begun[0].params


def _trials(storage):
    return optuna.load_study(study_name=study.NAME, storage=study._backend(storage)).trials


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (["--vary", "vd.nonsense=1:2"], 2, "no setting nonsense"),
        (["--vary", "vd.tau1=2:1"], 2, "is empty"),
        (["--storage", "journal"], 2, "'journal' is no storage; give journal:FILE"),
        (["--storage", "sqlite:////gone/x.db"], 1, "sqlite:////gone/x.db can't be used"),
        (["--trials", "0"], 2, "--trials"),
        (["--data", "idx:gone"], 1, "gone"),
        (["--data", "idx:gone", "--jobs", "2"], 1, "gone"),
        (["--data", "mnsit"], 2, "mnsit"),
        (["--weights", "gone.safetensors"], 1, "gone.safetensors"),
        (["--data", "nets:gone", "--vary", "batch_size=7,64"], 2, "the batches are those that nets:gone gives"),
    ],
)
def test_a_mistake_gets_a_line_and_no_traceback(run, tmp_path, more, status, message):
    code, _, errors = run(*arguments(tmp_path / "out", 4, *more))
    assert code == status
    assert "trial" not in errors.replace("--trials", "")
    assert message in errors
    assert "Traceback" not in errors


def test_trials_are_not_launched_in_many_processes(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, errors = run(*arguments(tmp_path / "out", 4))
    assert code == 2
    assert "once for each GPU" in errors


def test_an_unknown_model_is_told_before_anything_is_made(run, tmp_path):
    code, _, errors = run(*arguments(tmp_path / "out", 4, model="lenet-6"))
    assert code == 2
    assert "lenet-6" in errors
    assert not (tmp_path / "out").exists()


def test_help_has_an_example(run):
    assert "bayeszip sweep lenet-300-100" in run("sweep", "--help")[1]


def test_a_sweep_leaves_the_test_set_alone_and_runs_trials_side_by_side(folder, run, tmp_path):
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    for path in (folder / "images").glob("train-*"):
        (sealed / path.name).write_bytes(path.read_bytes())
    more = ["--data", f"idx:{sealed}", "--prune-margin", "0", "--jobs", "2"]
    status, output, errors = run(*arguments(tmp_path / "out", 4, *more))
    assert status == 0, errors
    assert "4 trials complete, 0 pruned, 0 failed" in output
    assert "test" not in output.replace(str(tmp_path), "")
    records = [json.loads(path.read_text()) for path in (tmp_path / "out" / "trials").glob("*/result.json")]
    assert len(records) == 4
    assert not any("accuracy" in record for record in records)
    with pytest.raises(DataError, match="lacks t10k-images"):
        load_test(f"idx:{sealed}", device=torch.device("cpu"))


LOADERS = """
import torch

class Sealed:
    def __iter__(self):
        raise AssertionError("the test set was opened")

def loaders():
    torch.manual_seed(0)
    batches = [(torch.rand(16, 1, 8, 8), torch.randint(2, (16,))) for _ in range(4)]
    return batches, batches[:1], Sealed()
"""


def test_a_sweep_is_not_given_the_third_of_a_factory_s_loaders(folder, run, tmp_path):
    (folder / "loaders_of_a_sweep.py").write_text(LOADERS)
    status, _, errors = run(*arguments(tmp_path / "out", 2, "--data", "loaders_of_a_sweep:loaders"))
    assert status == 0, errors


NUMBERS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 1))

def loaders():
    batches = [(torch.randn(16, 1, 8, 8), torch.randn(16, 1)) for _ in range(3)]
    return batches, batches[:1]
"""


def test_a_network_without_classes_is_refused_before_the_first_trial(folder, run, tmp_path):
    (folder / "numbers_of_a_sweep.py").write_text(NUMBERS)
    more = ("--data", "numbers_of_a_sweep:loaders")
    status, _, errors = run(*arguments(tmp_path / "out", 2, *more, model="numbers_of_a_sweep:net"))
    assert status == 1
    assert "outputs are (2, 1) and targets (2, 1), which are no classes" in " ".join(errors.split())
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_that_what_is_complete_stays(folder, run, tmp_path, monkeypatch):
    real, begun = worker._compress, []

    def interrupted(*arguments):
        begun.append(1)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(worker, "_compress", interrupted)
    status, _, errors = run(*arguments(tmp_path / "out", 3))
    assert status == 130
    assert errors.endswith("bayeszip: stopped; trials that are complete stay, and the same command goes on\n")


def test_through_a_pipe_no_column_is_cut(run, tmp_path):
    status, output, errors = run(*arguments(tmp_path / "out", 1), columns="40")
    assert status == 0, errors
    assert output.splitlines()[0].split() == ["trial", "bytes", "validation", "error", "all.tau1", "mixture.components"]


def test_a_sweep_of_failed_trials_alone_is_a_failure(folder, run, tmp_path, monkeypatch):
    def fails(*_):
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr(worker, "_compress", fails)
    status, output, errors = run(*arguments(tmp_path / "out", 2))
    assert status == 1
    assert "no trial succeeds; the last says: the loss is not finite" in errors
    assert not output


def test_a_fault_of_all_workers_is_told_once(folder, run, tmp_path):
    fails = 'if multiprocessing.parent_process(): raise ValueError("lost")'
    loaders = LOADERS.replace("torch.manual_seed(0)", fails)
    (folder / "lost_on_the_way.py").write_text(f"import multiprocessing\n{loaders}")
    status, _, errors = run(*arguments(tmp_path / "out", 9, "--data", "lost_on_the_way:loaders", "--jobs", "2"))
    assert status == 1
    assert "no trial succeeds; the last says: " in errors
    assert "Traceback" not in errors
