"""A run ended at any moment and resumed gives the file, bit for bit, and the record of one that was never ended."""

import dataclasses
import io
import itertools
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import bayeszip
from bayeszip import cli
from bayeszip.errors import CheckpointError, Interrupted, RecipeError
from bayeszip.fitting import ResidentBatches, Watcher
from bayeszip.fitting.checkpoint import Checkpoints
from bayeszip.fitting.keeper import Checkpointing, Interval
from bayeszip.progress import TrainingProgress, Watchers
from bayeszip.recipe import recipe

#: 1 epoch of pretraining, 4 of vd, 2 of vd+sws, 1 of the closing step.
QUICK = recipe("quick").override(
    "epochs_scale=0.05", "all.compact_every=1", "mixture.components=5", "closing.epochs=20", "all.rate_log_sigma2=0.1"
)
STEPS = 4 * 8


class Crash(BaseException):
    """Ends a run as abruptly as Python allows."""


def crash() -> None:
    raise Crash


class Acting(Watcher):
    """Acts after so many steps; keeps what it is told."""

    def __init__(self, after: int = 0, act=crash) -> None:
        self.left, self.act = after, act
        self.steps: list[str] = []
        self.warnings: list[str] = []

    def on_batch(self, phase, done) -> None:
        self.steps.append(phase.name)
        if len(self.steps) == self.left:
            self.act()

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)


def data(seed: int = 0, n: int = 128) -> ResidentBatches:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 12, generator=generator)
    return ResidentBatches(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long(), 32, shuffle=True, seed=seed)


def net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(12, 16)
    network = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():  # so that compaction has something to leave out
        first.weight[:, 6:] *= 1e-4
    return network


def run(folder=None, *, every="1steps", watcher=None, resume=False, force=False, model=None, train=None, **options):
    checkpoints = None if folder is None else Checkpointing(folder, every, force=force)
    settings = {"recipe": QUICK, "seed": 5, "pretrain": True, "device": "cpu", **options}
    return bayeszip.compress(
        model or net(), train or data(), val_loader=data(1), watcher=watcher or Acting(), checkpoints=checkpoints,
        resume=resume, **settings,
    )  # fmt: skip


def record(result) -> list[dict]:
    """The history, but for what depends on the clock: times, and for which epochs there was time to measure bytes."""
    return [{**dataclasses.asdict(stats), "seconds": 0, "bytes": None} for stats in result.fit.history]


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture(scope="module")
def whole():
    watcher = Acting()
    result = run(watcher=watcher)
    assert [phase for phase, _ in itertools.groupby(watcher.steps)] == ["l2", "vd", "vd+sws", "values"]
    assert len(watcher.steps) == STEPS
    computed = [stats.weights_computed for stats in result.fit.history if stats.phase.startswith("vd")]
    assert computed[-1] < computed[0]
    # Behind a norm: the units of layers are among what has to be saved.
    assert result.compressed.tensors["0.weight"].scale is not None
    return result


@pytest.mark.parametrize("after", [1, 5, 13, 21, 28, 31])
def test_ended_after_any_step(whole, tmp_path, after):
    with pytest.raises(Crash):
        run(tmp_path, watcher=Acting(after))
    resumed = Acting()
    result = run(tmp_path, watcher=resumed, resume=True)
    assert result.blob == whole.blob
    assert record(result) == record(whole)
    # The step that crashed was not saved any more, and is all that is done again.
    assert len(resumed.steps) == STEPS - after + 1


def test_ended_again_and_again(whole, tmp_path):
    for _ in range(5):
        with pytest.raises(Crash):
            run(tmp_path, watcher=Acting(5), resume=True)
    resumed = Acting()
    assert run(tmp_path, watcher=resumed, resume=True).blob == whole.blob
    assert len(resumed.steps) == STEPS - 5 * 4


@pytest.mark.parametrize(("every", "after", "lost"), [("2epochs", 15, 3), ("7steps", 17, 6), ("1h", 22, 2)])
def test_at_most_an_interval_is_lost(whole, tmp_path, every, after, lost):
    """Also written between phases: after steps 4, 20 and 28."""
    with pytest.raises(Crash):
        run(tmp_path, every=every, watcher=Acting(after + 1))
    resumed = Acting()
    assert run(tmp_path, watcher=resumed, resume=True).blob == whole.blob
    assert len(resumed.steps) == STEPS - after + lost


def test_a_loader_of_torch_is_taken_up_in_the_middle_of_a_pass(tmp_path):
    def loader() -> torch.utils.data.DataLoader:
        source = data()
        dataset = torch.utils.data.TensorDataset(source.inputs, source.targets)
        return torch.utils.data.DataLoader(dataset, 32, shuffle=True, generator=torch.Generator().manual_seed(1))

    expected = run(train=loader())
    with pytest.raises(Crash):
        run(tmp_path, train=loader(), watcher=Acting(11))
    assert run(tmp_path, train=loader(), resume=True).blob == expected.blob


@pytest.mark.parametrize("target", [{"max_bytes": 450}, {"max_accuracy_drop": 30.0}])
def test_a_target_is_steered_to_as_before(tmp_path, target):
    expected = run(**target)
    for after in (9, 12):
        with pytest.raises(Crash):
            run(tmp_path, resume=True, watcher=Acting(after), **target)
    result = run(tmp_path, resume=True, **target)
    assert result.blob == expected.blob
    assert result.fit.strength == expected.fit.strength


@pytest.mark.parametrize("curvature", [0, 1])
def test_trials_of_a_rate_are_taken_up(tmp_path, curvature):
    """The closing phase runs once without a rate, and once for each that is tried."""
    settings = QUICK.override(
        "quantization.rate=4", "quantization.rate_trials=3", f"quantization.curvature={curvature}"
    )
    whole = Acting()
    expected = run(watcher=whole, recipe=settings)
    assert len(whole.steps) >= STEPS + 4
    with pytest.raises(Crash):
        run(tmp_path, watcher=Acting(STEPS + 3), recipe=settings)
    resumed = Acting()
    result = run(tmp_path, watcher=resumed, resume=True, recipe=settings)
    assert (result.blob, result.rate) == (expected.blob, expected.rate)
    assert len(resumed.steps) == len(whole.steps) - STEPS - 2


def test_further_rates_are_taken_up(tmp_path):
    whole = Acting()
    expected = run(watcher=whole, rates=(1, 4))
    assert len(whole.steps) == STEPS + 2 * 4
    for after in (STEPS - 2, 5, 5):  # amid the first closing phase, the second and the third
        with pytest.raises(Crash):
            run(tmp_path, watcher=Acting(after), resume=True, rates=(1, 4))
    with pytest.raises(CheckpointError, match=r"rates\[1\]: 4.0 then, 2.0 now"):
        run(tmp_path, resume=True, rates=(1, 2))
    resumed = Acting()
    result = run(tmp_path, watcher=resumed, resume=True, rates=(1, 4))
    for one, other in zip((result, *result.others), (expected, *expected.others), strict=True):
        assert one.blob == other.blob
        assert record(one) == record(other)
    assert resumed.steps == ["values-rate=4"] * 3


@pytest.mark.parametrize("steps", [(), ("closing.optimizer=sgd", "quantization.values=3")])
def test_free_symbols_are_taken_up(steps, whole, tmp_path):
    settings = QUICK.override("reassign=true", "closing.rate_theta=0.03", *steps)
    expected = run(recipe=settings)
    assert expected.blob != whole.blob
    with pytest.raises(Crash):
        run(tmp_path, watcher=Acting(STEPS - 2), recipe=settings)
    assert run(tmp_path, resume=True, recipe=settings).blob == expected.blob


def test_nothing_saved_yet_begins_at_the_start(whole, tmp_path):
    assert run(tmp_path / "new", resume=True).blob == whole.blob


def test_a_run_that_is_over_can_be_resumed_and_begun_anew(whole, tmp_path):
    first = run(tmp_path)
    assert len(names(tmp_path)) == 1
    resumed = Acting()
    again = run(tmp_path, resume=True, watcher=resumed)
    assert first.blob == again.blob == whole.blob
    assert record(again) == record(first)
    # A run that is over takes no longer by being taken up.
    assert run(tmp_path, resume=True).fit.seconds == again.fit.seconds <= first.fit.seconds
    assert resumed.steps == []
    anew = Acting()
    assert run(tmp_path, watcher=anew).blob == whole.blob
    assert len(anew.steps) == STEPS


def test_a_run_that_is_not_over_is_not_thrown_away(tmp_path):
    with pytest.raises(Crash):
        run(tmp_path, watcher=Acting(6))
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds a run that is not over; resume it \(--resume\), delete"):
        run(tmp_path)
    assert names(tmp_path) == before


def test_a_broken_checkpoint_is_skipped(whole, tmp_path):
    with pytest.raises(Crash):
        run(tmp_path, watcher=Acting(14))
    newest = tmp_path / names(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    resumed = Acting()
    assert run(tmp_path, watcher=resumed, resume=True).blob == whole.blob
    assert len(resumed.warnings) == 1
    assert f"{newest} is broken" in resumed.warnings[0]
    assert "the one before it is taken" in resumed.warnings[0]
    assert len(resumed.steps) == STEPS - 14 + 2


def test_a_full_disk_does_not_end_the_training(whole, tmp_path, monkeypatch):
    watcher = Acting(6, lambda: monkeypatch.setattr(Checkpoints, "save", full))

    def full(self, state, conditions):
        raise bayeszip.errors.OutputError("can't write x: the disk is full; free some space")

    assert run(tmp_path, watcher=watcher).blob == whole.blob
    assert len(watcher.warnings) == 1
    assert watcher.warnings[0].startswith("no checkpoint: can't write x: the disk is full; free some space. The traini")
    # After step 5, and between phases after step 4.
    assert watcher.warnings[0].endswith("goes on; the last checkpoint is " + str(tmp_path / names(tmp_path)[-1]))
    monkeypatch.undo()
    resumed = Acting()
    assert run(tmp_path, watcher=resumed, resume=True).blob == whole.blob
    assert len(resumed.steps) == STEPS - 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(whole, tmp_path, number):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    watcher = Acting(10, lambda: os.kill(os.getpid(), number))
    kind = Interrupted if number == signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(kind, match=rf"stopped by {number.name}; the last checkpoint is .*; go on with --resume"):
        run(tmp_path, every="1h", watcher=watcher)
    assert len(watcher.steps) == 10
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    resumed = Acting()
    assert run(tmp_path, watcher=resumed, resume=True).blob == whole.blob
    assert len(resumed.steps) == STEPS - 10


def test_a_second_signal_does_not_wait(tmp_path):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path, every="1h", watcher=Acting(2, twice))
    assert str(caught.value) == ""
    assert names(tmp_path) == []


def test_without_checkpoints_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    run(watcher=Acting(3, lambda: seen.append(signal.getsignal(signal.SIGTERM))))
    assert seen == [before]


def test_in_another_thread_there_are_no_signals(whole, tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path)))
    thread.start()
    thread.join()
    assert results[0].blob == whole.blob


class TestConditions:
    """A run that would not end as it began is refused, with what differs."""

    @pytest.fixture(autouse=True)
    def _begun(self, tmp_path):
        with pytest.raises(Crash):
            run(tmp_path, watcher=Acting(6))

    @pytest.mark.parametrize(
        ("changed", "line"),
        [
            ({"seed": 6}, "seed: 5 then, 6 now"),
            ({"pretrain": False}, "pretrain: true then, false now"),
            ({"recipe": QUICK.override("vd.tau1=2")}, "recipe.phases.vd.tau1: 1.0 then, 2.0 now"),
            ({"max_bytes": 500}, "target: "),
            ({"mixed_precision": "bf16"}, 'mixed_precision: absent then, "bf16" now'),
            ({"loss": nn.functional.nll_loss}, 'data.loss: "cross_entropy" then, "nll_loss" now'),
            ({"train": data(seed=3)}, "data.content: "),
            ({"train": data(n=160)}, "data.examples: 128 then, 160 now"),
        ],
    )
    def test_what_is_asked_for(self, tmp_path, changed, line):
        with pytest.raises(CheckpointError) as caught:
            run(tmp_path, resume=True, **changed)
        assert f"\n  {line}" in str(caught.value)
        assert "--force" in str(caught.value)

    def test_versions(self, tmp_path, monkeypatch):
        monkeypatch.setattr("bayeszip.fitting.conditions.__version__", "99.0")
        with pytest.raises(CheckpointError, match=r'versions\.bayeszip: ".*" then, "99\.0" now'):
            run(tmp_path, resume=True)

    def test_threads(self, tmp_path):
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        try:
            with pytest.raises(CheckpointError, match=rf"threads: {before} then, {before + 1} now"):
                run(tmp_path, resume=True)
        finally:
            torch.set_num_threads(before)

    def test_the_network(self, tmp_path):
        other = net()
        with torch.no_grad():
            other[3].bias += 1e-6
        with pytest.raises(CheckpointError, match=r"network\.content: "):
            run(tmp_path, resume=True, model=other)
        wider = nn.Sequential(nn.Linear(12, 17), nn.ReLU(), nn.Linear(17, 3))
        with pytest.raises(CheckpointError, match=r'0\.weight: "float32 \[16, 12\]" then, "float32 \[17, 12\]" now'):
            run(tmp_path, resume=True, model=wider)

    def test_forced_onto_what_does_not_fit(self, tmp_path):
        shorter = QUICK.override("vd.epochs=0", "l2.epochs=1")
        with pytest.raises(CheckpointError, match="further on than these phases go"):
            run(tmp_path, resume=True, force=True, recipe=shorter)
        other = nn.Sequential(nn.Linear(12, 3))
        with pytest.raises(CheckpointError, match=r"only the checkpoint has a tensor 1\.weight"):
            run(tmp_path, resume=True, force=True, model=other)

    def test_forced(self, tmp_path):
        resumed = Acting()
        longer = QUICK.override("vd.epochs=100")
        result = run(tmp_path, resume=True, force=True, watcher=resumed, recipe=longer)
        assert [stats.epoch for stats in result.fit.history if stats.phase == "vd"] == [1, 2, 3, 4, 5]
        assert len(resumed.steps) == STEPS + 4 - 5


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("5m", (300, "seconds")),
        ("90 s", (90, "seconds")),
        ("1.5h", (5400, "seconds")),
        ("10epochs", (10, "epochs")),
        ("1 epoch", (1, "epochs")),
        ("500steps", (500, "steps")),
    ],
)
def test_intervals(text, interval):
    assert Interval.parse(text) == interval


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "0s", "5 minutes", "1e3s", "nan s", 5, None])
def test_what_is_no_interval(tmp_path, text):
    with pytest.raises(RecipeError, match="is no interval of checkpoints; write 5m, 90s"):
        Checkpointing(tmp_path, text)


def test_settings_that_make_no_sense(tmp_path):
    with pytest.raises(RecipeError, match="at least 1 checkpoint must be kept"):
        Checkpointing(tmp_path, keep=0)
    with pytest.raises(RecipeError, match="at least 1 checkpoint must be kept, not '2'"):
        Checkpointing(tmp_path, keep="2")
    with pytest.raises(RecipeError, match="kept in a folder, given as a path, not 3"):
        run(3)
    with pytest.raises(RecipeError, match="nothing to resume from"):
        run(resume=True)


def test_time_is_an_interval_too(tmp_path, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr("bayeszip.fitting.keeper.time.monotonic", lambda: next(now) * 60.0)
    saved = []
    real = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, *rest: saved.append(real(self, *rest)))
    run(tmp_path, every="1m")
    often = len(saved)
    assert often > STEPS / 2
    run(tmp_path, every="10h")
    assert len(saved) - often == 5


def test_warnings_are_shown_by_the_first_who_watches():
    shown = io.StringIO()
    second = Acting()
    watchers = Watchers(TrainingProgress(QUICK.phases, Console(file=shown)), second)
    watchers.on_warning("[bold] no checkpoint: x")
    assert shown.getvalue() == "warning: [bold] no checkpoint: x\n"
    assert second.warnings == []


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[1] / "docs" / "guide" / "long.md"
    *_, snippet = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippet, names)
    assert names["result"].bytes > 0
    assert len(list((tmp_path / "checkpoints").glob("*.safetensors"))) == 1


STOPPED = """
import os, signal, sys
from bayeszip import cli
from bayeszip.fitting.keeper import Keeper

at_rest = Keeper._at_rest
def stop(self, fitting, moment):
    if fitting.steps == 9:
        os.kill(os.getpid(), signal.SIGTERM)
    at_rest(self, fitting, moment)
Keeper._at_rest = stop
cli.app(sys.argv[1:])
"""


def test_the_command_ends_with_143_and_goes_on(tmp_path):
    data_folder = write_idx(tmp_path / "idx")
    command = [
        "compress", "lenet-300-100", "--data", f"idx:{data_folder}", "--recipe", "quick", "--set", "epochs_scale=0.01",
        "--set", "batch_size=50", "--device", "cpu", "--run", str(tmp_path / "run"), "-o", str(tmp_path / "net.bayz"),
    ]  # fmt: skip
    stopped = subprocess.run([sys.executable, "-c", STOPPED, *command], capture_output=True, text=True)
    assert stopped.returncode == 143, stopped.stderr
    assert "bayeszip: stopped by SIGTERM; the last checkpoint is" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not (tmp_path / "net.bayz").exists()
    runner = CliRunner()
    again = runner.invoke(cli.app, command)
    assert again.exit_code == 1
    assert "holds a run that is not over" in again.output
    changed = runner.invoke(cli.app, [*command, "--resume", "--seed", "1"])
    assert changed.exit_code == 1
    assert "seed: 0 then, 1 now" in changed.output
    done = runner.invoke(cli.app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "net.bayz").exists()
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_options_without_a_run_are_refused(tmp_path):
    command = ["compress", "lenet-5", "-o", str(tmp_path / "net.bayz")]
    for options in (["--resume"], ["--force"], ["--checkpoint-every", "5m"], ["--keep", "3"]):
        refused = CliRunner().invoke(cli.app, [*command, *options])
        assert refused.exit_code == 2
        assert "name it with --run" in refused.output
    alone = CliRunner().invoke(cli.app, [*command, "--run", str(tmp_path / "run"), "--force"])
    assert alone.exit_code == 2
    assert "add --resume" in alone.output
    odd = CliRunner().invoke(cli.app, [*command, "--run", str(tmp_path / "run"), "--checkpoint-every", "often"])
    assert odd.exit_code == 2
    assert "no interval of checkpoints" in odd.output


def write_idx(folder: Path) -> Path:
    """Ten classes that a stripe decides."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part, count in (("train", 300), ("t10k", 50)):
        labels = np.arange(count) % 10
        images = draw.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 150
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return folder


def test_the_state_of_several_watchers_is_kept():
    class Remembering(Watcher):
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict:
            return {"value": self.value}

        def load_state_dict(self, state: dict) -> None:
            self.value = state["value"]

    state = Watchers(Watcher(), Remembering(3)).state_dict()
    second = Remembering(0)
    Watchers(Watcher(), second, Remembering(1)).load_state_dict(state)
    assert second.value == 3
