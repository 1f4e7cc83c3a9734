"""The runner: what a run is trained on, what it leaves, what is taken up, and what stays sealed."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bayeszip import codec
from bayeszip.cli import main
from bayeszip.errors import DataError, OutputError, RecipeError, TrainingError
from bayeszip.experiments import EXPERIMENTS, runner
from bayeszip.experiments.records import add, file_of, history_of, is_of, read, recipe_of
from bayeszip.experiments.runner import Task, carry_out, do, located
from bayeszip.experiments.runs import Experiment, Variant
from bayeszip.fitting import Watcher
from bayeszip.fitting.keeper import Checkpointing
from bayeszip.processes import Outcome

ROOT = Path(__file__).resolve().parents[2]
MODEL = "nets_of_experiments:Recorder"
SETTINGS = "batch_size=64 l2.epochs=3 vd.epochs=4 vd+sws.epochs=3 closing.epochs=2 mixture.components=5"
BOTH = Variant("both", MODEL, "vd+sws", SETTINGS, data="idx:images")
SMALL = Experiment("small", "how it is done", (BOTH, dataclasses.replace(BOTH, name="other")), (0, 1))


def marks(split):
    return set(map(tuple, split.images.flatten(1)[:, :2].mul(255).round().int().tolist()))


class InThisProcess:
    """Does what workers do, and notes it."""

    def __init__(self, function):
        self.function, self.done = function, []

    def outcomes(self, tasks):
        for task in tasks:
            self.done.append((task.run.name, task.pretraining))
            try:
                yield Outcome(task, self.function(task))
            except TrainingError as error:
                yield Outcome(task, error=str(error))


@pytest.fixture
def workers(monkeypatch):
    """What was done, when nothing is spawned; `function` may be set to something else."""
    held = InThisProcess(do)
    monkeypatch.setattr(runner, "side_by_side", lambda *arguments: contextlib.nullcontext(held))
    return held


def small_runs(**options):
    return SMALL.runs(**options)


def test_a_run_is_trained_on_the_training_split_and_nothing_else(nets, splits, tmp_path):
    run = small_runs(seeds=(0,), only="both")[0]
    (tmp_path / "out" / "small").mkdir(parents=True)
    (tmp_path / "out" / "pretrained").mkdir()
    task = Task(run, tmp_path / "out" / "small", "cpu", BOTH.data, pretraining=True)
    published = marks(splits.train)
    assert not published & (marks(splits.validation) | marks(splits.test))
    assert do(task) == []
    assert published == nets.SEEN
    nets.SEEN.clear()
    (record,) = do(dataclasses.replace(task, pretraining=False))
    assert published == nets.SEEN
    assert record["accuracy"] is not None


def test_a_run_on_all_images_sees_those_for_validation_and_says_so(nets, splits, tmp_path):
    whole = dataclasses.replace(SMALL, variants=(dataclasses.replace(BOTH, hold_out=False),))
    (run,) = whole.runs(seeds=(0,))
    (tmp_path / "out" / "small").mkdir(parents=True)
    (tmp_path / "out" / "pretrained").mkdir()
    task = Task(run, tmp_path / "out" / "small", "cpu", BOTH.data, pretraining=True)
    held_out = Task(small_runs(seeds=(0,), only="both")[0], tmp_path / "out" / "small", "cpu", BOTH.data)
    assert task.weights != held_out.weights
    published = marks(splits.train) | marks(splits.validation)
    assert do(task) == []
    assert published == nets.SEEN
    nets.SEEN.clear()
    (record,) = do(dataclasses.replace(task, pretraining=False))
    assert published == nets.SEEN
    assert record["validation_accuracy"] is None
    assert record["hold_out"] is False
    assert is_of(record, run)
    assert not is_of(record, held_out.run)


def test_a_teacher_is_pretrained_once_and_told_of(nets, images, tmp_path, workers):
    teacher = dataclasses.replace(BOTH, name="teacher", beginning=7)
    taught = dataclasses.replace(BOTH, teacher=teacher)
    experiment = dataclasses.replace(SMALL, variants=(taught,))
    carry_out(experiment, experiment.runs(), tmp_path / "out", device="cpu")
    assert workers.done == [("both-0", True), ("teacher", True), ("both-1", True), ("both-0", False), ("both-1", False)]
    records = read(tmp_path / "out" / "small")
    assert {record["teacher"] for record in records.values()} == {MODEL}
    assert all(is_of(records[run.name], run) for run in experiment.runs())
    alone = dataclasses.replace(SMALL, variants=(BOTH,)).runs()
    assert not any(is_of(records[run.name], run) for run in alone)


def test_runs_whose_teacher_fails_fail(nets, images, tmp_path, workers):
    def fails(task):
        if task.run.name == "teacher":
            raise TrainingError("it knows nothing")
        return do(task)

    workers.function = fails
    taught = dataclasses.replace(BOTH, name="taught", teacher=dataclasses.replace(BOTH, name="teacher", beginning=7))
    experiment = dataclasses.replace(SMALL, variants=(BOTH, taught), seeds=(0,))
    with pytest.raises(TrainingError, match="taught-0: pretraining: it knows nothing"):
        carry_out(experiment, experiment.runs(), tmp_path / "out", device="cpu")
    assert set(read(tmp_path / "out" / "small")) == {"both-0"}
    unseeded = dataclasses.replace(SMALL, variants=(dataclasses.replace(taught, teacher=BOTH),))
    with pytest.raises(RecipeError, match="the seed of its pretraining"):
        unseeded.runs()


def test_the_command_trains_on_the_training_split_and_nothing_else(nets, images, splits, tmp_path, monkeypatch, capsys):
    words = ["compress", MODEL, "--data", f"idx:{images}", "--pretrain", "--device", "cpu", "-o", "net.bayz"]
    settings = [word for setting in SETTINGS.split() for word in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", ["bayeszip", *words, *settings])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code, capsys.readouterr().err
    assert marks(splits.train) == nets.SEEN


def test_runs_leave_records_and_files_and_what_begins_alike_is_pretrained_once(nets, images, tmp_path, workers):
    runs = small_runs()
    carry_out(SMALL, runs, tmp_path / "out", device="cpu")
    assert workers.done == [("both-0", True), ("both-1", True), *((run.name, False) for run in runs)]
    folder = tmp_path / "out" / "small"
    records = read(folder)
    assert set(records) == {run.name for run in runs}
    for run in runs:
        record, blob = records[run.name], file_of(folder, run.name).read_bytes()
        assert recipe_of(record) == run.recipe.scaled()
        assert record["bytes"] == len(blob)
        assert codec.describe(blob).original_parameters == record["params"]
        assert [epoch["phase"] for epoch in history_of(record)] == ["vd"] * 4 + ["vd+sws"] * 3 + ["values"] * 2
        assert {"validation_accuracy_trained", "validation_accuracy_snapped", "validation_accuracy"} <= set(record)
    (first, second) = sorted((tmp_path / "out" / "pretrained").iterdir())
    assert not load_file(first)["body.1.weight"].equal(load_file(second)["body.1.weight"])


def test_seeds_that_share_a_beginning_are_pretrained_once_by_its_seed(nets, images, tmp_path, workers):
    shared = dataclasses.replace(SMALL, variants=(dataclasses.replace(BOTH, beginning=1),))
    carry_out(shared, shared.runs(), tmp_path / "shared", device="cpu")
    assert workers.done == [("both-0", True), ("both-0", False), ("both-1", False)]
    (weights,) = (tmp_path / "shared" / "pretrained").iterdir()
    own = dataclasses.replace(SMALL, variants=(BOTH,))
    carry_out(own, own.runs((1,)), tmp_path / "own", device="cpu")
    assert weights.read_bytes() == (tmp_path / "own" / "pretrained" / weights.name).read_bytes()
    first, second = (file_of(tmp_path / "shared" / "small", name).read_bytes() for name in ("both-0", "both-1"))
    assert first != second == file_of(tmp_path / "own" / "small", "both-1").read_bytes()


def test_what_is_recorded_is_not_repeated_and_what_lost_its_file_is(nets, images, tmp_path, workers):
    runs = small_runs(seeds=(0,))
    carry_out(SMALL, runs[:1], tmp_path, device="cpu")
    workers.done.clear()
    carry_out(SMALL, runs, tmp_path, device="cpu")
    assert workers.done == [("other-0", False)]
    file_of(tmp_path / "small", "both-0").unlink()
    workers.done.clear()
    carry_out(SMALL, runs, tmp_path, device="cpu")
    assert workers.done == [("both-0", False)]


class Stops(Watcher):
    """Ends the training that it watches, once."""

    left = 3

    def on_epoch(self, stats, course):
        Stops.left -= 1
        if not Stops.left:
            raise TrainingError("the machine is taken away")


def test_what_was_stopped_goes_on_from_its_checkpoint(nets, images, tmp_path, workers, monkeypatch):
    (run,) = small_runs(seeds=(0,), only="both")
    carry_out(SMALL, [run], tmp_path / "whole", device="cpu")
    epochs = []
    monkeypatch.setattr(runner, "Watcher", Stops)
    monkeypatch.setattr(Task, "checkpoints", property(lambda task: Checkpointing(task.unfinished, "1epochs", 1)))
    for left in (2, 3, 0):  # amid the pretraining, amid the compression, and not at all
        monkeypatch.setattr(Stops, "left", left)
        monkeypatch.setattr(workers, "function", lambda task: (epochs.append(task.pretraining), do(task))[1])
        with contextlib.nullcontext() if not left else pytest.raises(TrainingError, match="taken away"):
            carry_out(SMALL, [run], tmp_path / "parts", device="cpu")
    assert epochs == [True, True, False, False]
    blobs = [file_of(tmp_path / name / "small", run.name).read_bytes() for name in ("whole", "parts")]
    assert blobs[0] == blobs[1]
    assert list((tmp_path / "parts" / "unfinished").iterdir()) == []


def test_a_run_with_rates_leaves_a_record_and_a_file_for_each(nets, images, tmp_path, workers):
    several = dataclasses.replace(SMALL, variants=(dataclasses.replace(BOTH, rates=(2, 30)),))
    (run,) = several.runs((0,))
    carry_out(several, [run], tmp_path / "out", device="cpu")
    folder = tmp_path / "out" / "small"
    records = read(folder)
    assert list(records) == list(run.endings) == ["both-0", "both-rate=2-0", "both-rate=30-0"]
    for name, record in records.items():
        assert record["bytes"] == len(file_of(folder, name).read_bytes())
        assert is_of(record, run)
        assert not is_of({**record, "target": "at most 3,000 bytes"}, run)
        assert record["accuracy_before"] == records["both-0"]["accuracy_before"]
    assert records["both-0"]["bytes"] > records["both-rate=30-0"]["bytes"]
    assert [epoch["phase"] for epoch in history_of(records["both-rate=2-0"])][-2:] == ["values-rate=2"] * 2
    workers.done.clear()
    carry_out(several, [run], tmp_path / "out", device="cpu")
    assert workers.done == []
    # One of them lost: all are made again, as before.
    file_of(folder, "both-rate=2-0").unlink()
    carry_out(several, [run], tmp_path / "out", device="cpu")
    assert workers.done == [("both-0", False)]
    assert {name: record["bytes"] for name, record in read(folder).items()} == {
        name: record["bytes"] for name, record in records.items()
    }
    other = dataclasses.replace(
        several, variants=(dataclasses.replace(BOTH, rates=(2,), settings=SETTINGS + " all.tau1=3"),)
    )
    with pytest.raises(RecipeError, match="with other settings"):
        carry_out(other, other.runs((0,)), tmp_path / "out", device="cpu")


def test_images_are_changed_where_the_variant_says_so(nets, images, splits, tmp_path, workers):
    moved = dataclasses.replace(BOTH, name="moved", augment="shift=1", augment_before="shift=2")
    experiment = dataclasses.replace(SMALL, variants=(BOTH, moved))
    carry_out(experiment, experiment.runs((0,)), tmp_path / "out", device="cpu")
    assert nets.SEEN - marks(splits.train)
    records = read(tmp_path / "out" / "small")
    assert [records[name]["augment"] for name in ("both-0", "moved-0")] == [None, "shift=1"]
    assert len(list((tmp_path / "out" / "pretrained").iterdir())) == 2
    still = dataclasses.replace(experiment, variants=(dataclasses.replace(moved, augment=None),))
    with pytest.raises(RecipeError, match="holds moved-0 with other settings"):
        carry_out(still, still.runs((0,)), tmp_path / "out", device="cpu")


def test_a_target_is_handed_on(nets, images, tmp_path, workers):
    towards = dataclasses.replace(BOTH, name="towards", max_accuracy_drop=40.0)
    experiment = dataclasses.replace(SMALL, variants=(towards,))
    carry_out(experiment, experiment.runs((0,)), tmp_path / "out", device="cpu")
    (record,) = read(tmp_path / "out" / "small").values()
    assert "40" in record["target"]
    assert record["strength"] > 0


def test_data_are_where_the_user_says():
    runs = EXPERIMENTS["frontier"].runs(only="augmented-tau1")
    assert located(runs, ["cifar10:there"]) == {"mnist": "mnist", "cifar10": "cifar10:there"}
    with pytest.raises(RecipeError, match="none of these runs is trained on 'cifar10:there'; they need mnist"):
        located(EXPERIMENTS["table"].runs(), ["cifar10:there"])


def test_other_settings_are_refused(nets, images, tmp_path, workers):
    carry_out(SMALL, small_runs(seeds=(0,), only="both"), tmp_path, device="cpu")
    with pytest.raises(RecipeError, match="holds both-0 with other settings"):
        carry_out(SMALL, small_runs(seeds=(0,), epochs_scale=2), tmp_path, device="cpu")


def test_what_failed_is_named_and_the_others_are_kept(nets, images, tmp_path, workers):
    def fails(task):
        if task.run.name == "other-0" or (task.pretraining and task.run.name == "both-1"):
            raise TrainingError("the loss is not finite")
        return do(task)

    workers.function = fails
    with pytest.raises(TrainingError) as caught:
        carry_out(SMALL, small_runs(), tmp_path, device="cpu")
    assert str(caught.value).splitlines() == [
        "3 of 4 runs failed, the others are recorded:",
        "  other-0: the loss is not finite",
        "  both-1: pretraining: the loss is not finite",
        "  other-1: pretraining: the loss is not finite",
    ]
    assert set(read(tmp_path / "small")) == {"both-0"}


def test_two_in_one_folder_are_refused(tmp_path, workers, monkeypatch):
    def taken(path):
        raise OutputError("another process works here")

    monkeypatch.setattr(runner, "Lock", taken)
    with pytest.raises(OutputError, match="another process"):
        carry_out(SMALL, small_runs(), tmp_path, device="cpu")
    assert workers.done == []


def test_choosing_does_not_need_test_files_and_reporting_does(nets, images, tmp_path, workers):
    for path in images.glob("t10k-*"):
        path.unlink()
    choosing = dataclasses.replace(SMALL, name="choosing", sealed=True)
    carry_out(choosing, choosing.runs((0,), "both"), tmp_path / "out", device="cpu")
    (record,) = read(tmp_path / "out" / "choosing").values()
    assert "accuracy" not in record
    assert 0 < record["validation_accuracy"] <= 1
    assert [path.name for path in (tmp_path / "out" / "choosing").iterdir()] == ["runs.jsonl"]
    workers.function = lambda task: do(task) if task.pretraining else _refused(task)
    with pytest.raises(TrainingError, match="lacks t10k-images-idx3-ubyte"):
        carry_out(SMALL, small_runs(seeds=(0,), only="both"), tmp_path / "out", device="cpu")


def _refused(task):
    try:
        return do(task)
    except DataError as error:
        raise TrainingError(str(error)) from error


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setenv("COLUMNS", "300")
        monkeypatch.setattr(sys, "argv", ["bayeszip", "reproduce", *words])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


def test_the_command_shows_the_committed_records(command):
    status, output, _ = command("table")
    assert status == 0
    assert "vd+sws" in output
    assert "70 runs, from their records in" in output
    assert "add --again DIR" in output
    status, output, _ = command("table", "--only", "lenet-5-vd+sws")
    assert "5 runs, from their records" in output
    assert "LeNet-300-100" not in output
    status, output, _ = command("table", "--only", "lenet-5-vd-10,lenet-300-100-sws-1")
    assert "6 runs, from their records" in output
    assert [line.split()[2] for line in command()[1].splitlines()][:3] == ["table", "figure", "ablation"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["table", "--seeds", "10:15"], 2, "add --again DIR"),
        (["table", "--sealed"], 2, "add --again DIR"),
        (["table", "--again", "out", "--seeds", "15:10"], 2, "write seeds as FIRST:END"),
        (["table", "--again", "out", "--only", "lenet-7"], 2, "no run of table has 'lenet-7' in its name"),
        (["table", "--only", "lenet-7"], 2, "has 'lenet-7' in its name, which is like lenet-300-100-l2-10; --again"),
        (["table", "--only", "lenet-5,lenet-7"], 2, "has 'lenet-7' in its name"),
        (["table", "--again", "out", "--only", ","], 2, "',' names nothing"),
        (["table", "--again", "out", "--device", "gpu"], 2, "there is no device 'gpu'"),
        (["table", "--again", "out", "--epochs-scale", "0"], 2, "must be greater than 0"),
        (["table", "--jobs", "0"], 2, "--jobs"),
        (["frieze"], 2, "frieze"),
        (["table", "--render"], 2, "give nothing else with it"),
        (
            ["--render", "--only", "x", "--seeds", "1", "--take", "out"],
            2,
            "--seeds, --only, --take: --render writes all",
        ),
        (["--again", "out"], 2, "--again: without an experiment they are only listed; name one"),
        (["--take", "out"], 2, "--take: without an experiment they are only listed; name one"),
        (["table", "--take", "out", "--again", "out", "--seeds", "1"], 2, "--again, --seeds: --take DIR takes all"),
        (["--recode"], 2, "--recode: without an experiment they are only listed; name one"),
        (["table", "--recode", "--only", "x"], 2, "--only: --recode codes the files of all its records"),
        (["table", "--device", "cpu"], 2, "--device: that is for runs that are trained; add --again DIR"),
    ],
)
def test_a_mistake_gets_a_line_and_no_traceback(command, tmp_path, monkeypatch, words, status, message):
    monkeypatch.chdir(tmp_path)
    code, _, errors = command(*words)
    assert code == status
    assert message in errors
    assert "Traceback" not in errors


def test_an_experiment_without_records_says_so(command, monkeypatch, tmp_path):
    monkeypatch.setattr("bayeszip.experiments.pages.checkout", lambda: tmp_path)
    status, _, errors = command("parts")
    assert status == 1
    assert "no run of parts has been recorded yet; --again DIR trains them" in errors


def test_files_are_coded_anew_where_that_is_shorter(command, monkeypatch, tmp_path):
    monkeypatch.setattr("bayeszip.experiments.pages.checkout", lambda: tmp_path)
    source = next(iter(sorted((ROOT / "results" / "quick").glob("*.bayz"))))
    record = read(ROOT / "results" / "quick")[source.stem]
    model = codec.decode(source.read_bytes())
    folder = tmp_path / "results" / "quick"
    folder.mkdir(parents=True)
    longer = codec.encode(model, packed=0)
    file_of(folder, source.stem).write_bytes(longer)
    add(folder, {**record, "bytes": len(longer)})
    status, output, errors = command("quick", "--recode")
    assert status == 0, errors
    blob = file_of(folder, source.stem).read_bytes()
    assert codec.decode(blob) == model
    assert len(blob) == read(folder)[source.stem]["bytes"] < len(longer)
    assert f"{len(longer):,} bytes became {len(blob):,}" in output
    # There is nothing to be gained a second time.
    assert f"{len(blob):,} bytes became {len(blob):,}" in command("quick", "--recode")[1]
    assert command("parts", "--recode")[0] == 1


def test_outside_a_checkout_it_trains_only(command, monkeypatch, tmp_path):
    monkeypatch.setattr("bayeszip.experiments.pages.__file__", str(tmp_path / "a" / "b" / "c" / "pages.py"))
    status, _, errors = command("table")
    assert status == 1
    assert "give --again DIR" in errors


def test_the_command_trains_in_processes_and_prints_the_table(command, tmp_path):
    words = ["quick", "--again", str(tmp_path), "--only", "tau1=1", "--seeds", "10:12", "--jobs", "2"]
    status, output, errors = command(*words, "--epochs-scale", "0.001", "--device", "cpu")
    assert status == 0, errors
    assert "10–11" in output
    lines = [json.loads(line) for line in (tmp_path / "quick" / "runs.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["tau1=1-10", "tau1=1-11"]
    assert all((tmp_path / "quick" / f"{line['name']}.bayz").stat().st_size == line["bytes"] for line in lines)


def test_a_choice_is_sealed_by_the_command(command, tmp_path, workers):
    words = ["quick", "--again", str(tmp_path), "--only", "tau1=1", "--seeds", "0", "--epochs-scale", "0.001"]
    status, output, errors = command(*words, "--device", "cpu", "--sealed")
    assert status == 0, errors
    assert output.splitlines()[1].split()[:3] == ["1", "0", "–"]
    assert "of validation" in errors
    assert "of test" not in errors
    assert [path.name for path in (tmp_path / "quick").iterdir()] == ["runs.jsonl"]


def test_help_has_examples(command):
    assert "bayeszip reproduce table --again again --seeds 10:15 --jobs 12 --device cuda" in command("--help")[1]
