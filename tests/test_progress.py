"""The progress display: plain lines without a terminal, a bar with the time left in one."""

import functools
import io
import itertools
import sys

import pytest
import torch.nn.functional as F
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from bayeszip import progress
from bayeszip.errors import ModelError, OutputError
from bayeszip.fitting import Course, EpochStats, Phase, Watcher
from bayeszip.fitting.course import Problem
from bayeszip.progress import TensorBoardLog, TimeLeft, TrainingProgress, Watchers
from bayeszip.variational import Divergence, to_variational, variational_weights

PHASES = (Phase(name="l2", epochs=2, noise=False), Phase(name="vd", epochs=3, tau1=1.0))


def stats(phase="vd", epoch=1, epochs=3, **changes):
    values = {
        "parts": {"data": 0.25, "divergence": 0.5},
        "accuracy": 0.9812,
        "zeros": 0.5,
        "bytes": 4321,
    }
    return EpochStats(
        phase=phase, epoch=epoch, epochs=epochs, seconds=1.0, weights_computed=10, **{**values, **changes}
    )


def course(network=None, phase=PHASES[0]):
    weights = tuple(variational_weights(network or nn.Identity()))
    return Course(Problem(network, weights, (Divergence(),), None, F.cross_entropy, 10), phase)


def shown(events, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with TrainingProgress(PHASES, console) as display:
        for event in events:
            for done in (0.25, 0.5):
                display.on_batch(PHASES[1], done)
            display.on_epoch(event, course())
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_every_figure_is_shown_at_the_end_of_a_phase(terminal):
    text = shown([stats(epoch=3)], terminal)
    for figure in ("vd", "3/3", "0.25", "0.5", "98.12 %", "50.00 %", "4,321 B", "left"):
        assert figure in text
    assert "mixture" not in text


def test_small_losses_are_no_zeros():
    text = shown([stats(epoch=3, parts={"data": 6.6123456e-07, "divergence": 1234.5})], terminal=False)
    assert "loss 6.612e-07  divergence 1234" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_is_cut_on_a_narrow_terminal(width):
    parts = {"data": 2.6734e-05, "divergence": 1.2345, "mixture": 0.4567, "groups": 0.1122, "rate": 3.4455e-05}
    phases = tuple(Phase(name="values-rate=0.25", epochs=100) for _ in range(1))
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with TrainingProgress(phases, console) as display:
        told = stats(phases[0].name, 1, 100, parts=parts, bytes=123_456, loss=0.0312, metric=27.5)
        display.on_epoch(told, course())
    text = console.file.getvalue()
    assert "…" not in text
    shown_parts = ("2.673e-05", "1.234", "0.4567", "0.1122", "3.446e-05")
    for figure in ("values-rate=0.25", "1/100", *shown_parts, "98.12 %", "0.0312", "27.5", "50.00 %", "123,456 B"):
        assert figure in text


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with TrainingProgress(PHASES, console) as display:
        display.on_epoch(stats(epoch=3), course())
        assert "epoch 3/3" in console.file.getvalue()


def test_nothing_goes_to_standard_output_where_standard_error_is_closed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    with TrainingProgress(PHASES) as display:
        display.on_epoch(stats(epoch=3), course())
        display.on_warning("it is broken")
    assert capsys.readouterr().out == ""


@pytest.fixture
def told_again(monkeypatch):
    """What a display says while the last phase runs three times, a step a second."""
    clock = itertools.count(0.0).__next__
    monkeypatch.setattr(progress, "TimeLeft", functools.partial(TimeLeft, now=clock))
    return _told_again


def _told_again(terminal, *, open_ended):
    phases = (Phase(name="vd", epochs=2, tau1=1.0), Phase(name="values", epochs=2, noise=False))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    said = []
    with TrainingProgress(phases, console, open_ended=open_ended) as display:
        for phase in (phases[0], *3 * (phases[1],)):
            for step in range(8):
                display.on_batch(phase, step / 8)
                if step % 4 == 3:
                    display.on_epoch(stats(phase.name, step // 4 + 1, 2), course())
            display._live.refresh()
            said.append(console.file.getvalue())
            console.file.seek(0)
            console.file.truncate()
    return said


@pytest.mark.parametrize("terminal", [False, True])
def test_where_phases_may_come_again_nobody_knows_the_end(told_again, terminal):
    first, *others = told_again(terminal, open_ended=True)
    assert "at least" in first
    for said in others:
        assert " 0 s left" not in said
        assert "0:00:00 left" not in said
        assert "100%" not in said


def test_a_phase_that_comes_again_without_notice_is_new_work(told_again):
    first, *_, last = told_again(True, open_ended=False)
    assert "50%" in first
    assert "at least" not in first
    assert "100%" not in last
    assert "0:00:00 left" not in last


def test_figures_that_are_not_of_a_file_say_so():
    text = shown([stats(epoch=3, loss=0.0312, metric=27.5)], terminal=False)
    assert "validation (unsnapped) 98.12 %" in text
    assert "validation loss (unsnapped) 0.0312" in text
    assert "validation metric (unsnapped) 27.5" in text


def test_findings_are_shown_and_logged(caplog):
    console = Console(file=io.StringIO(), width=120, color_system=None)
    Watchers(TrainingProgress(PHASES, console), Watcher()).on_finding("it is broken")
    assert "warning: it is broken" in console.file.getvalue()
    assert "it is broken" in caplog.text


def test_the_last_known_size_stays():
    text = shown([stats(epoch=2), stats(epoch=3, bytes=None)], terminal=False)
    assert "4,321 B" in text


def test_without_a_terminal_a_phase_takes_a_line_not_a_line_an_epoch():
    lines = shown([stats(epoch=epoch) for epoch in (1, 2, 3)], terminal=False).splitlines()
    assert len(lines) == 1
    assert "epoch 3/3" in lines[0]


def test_what_is_not_known_is_left_out():
    text = shown([stats(epoch=3, accuracy=None, zeros=0.0, bytes=None, parts={"data": 0.25})], terminal=False)
    for absent in ("validation", "zeros", "file", "divergence"):
        assert absent not in text


class Listing(Watcher):
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def on_phase(self, course):
        self.told.append(("phase", course.phase.name))

    def on_batch(self, phase, done):
        self.told.append(("batch", done))

    def on_epoch(self, stats, course):
        self.told.append(("epoch", stats.epoch))


def test_several_watchers_are_all_told():
    watchers = Listing(), Listing()
    together = Watchers(*watchers)
    together.on_phase(course(phase=PHASES[1]))
    together.on_batch(PHASES[1], 0.5)
    together.on_epoch(stats(epoch=2), course())
    assert watchers[0].told == watchers[1].told == [("phase", "vd"), ("batch", 0.5), ("epoch", 2)]


def test_a_full_disk_is_told_of_once_and_the_training_goes_on():
    class Full(Watcher):
        def on_epoch(self, stats, course):
            raise OutputError("run/snapshots.json can't be written: no space left on device")

    class Heard(Listing):
        def on_warning(self, message):
            self.told.append(message)

    first, last = Heard(), Listing()
    together = Watchers(first, Full(), last)
    for epoch in (1, 2):
        together.on_epoch(stats(epoch=epoch), course())
    assert last.told == [("epoch", 1), ("epoch", 2)]
    warnings = [message for message in first.told if isinstance(message, str)]
    assert warnings == ["run/snapshots.json can't be written: no space left on device. The training goes on"]


def test_tensorboard_gets_every_epoch_under_its_number(tmp_path):
    network = nn.Linear(3, 2)
    to_variational(network)
    log = TensorBoardLog(tmp_path, PHASES)
    log.on_epoch(stats("l2", 2, 2, parts={"data": 0.25}, zeros=0.0, bytes=None), course(nn.Linear(3, 2)))
    log.on_epoch(stats("vd", 1, 3), course(network))
    log.on_epoch(stats("vd", 3, 3, bytes=1234), course(network))
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {
        name: [(event.step, round(event.value, 4)) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    # l2 has two epochs, so vd's first is the third.
    assert scalars["size/bytes"] == [(3, 4321), (5, 1234)]
    assert scalars["loss/data"] == [(2, 0.25), (3, 0.25), (5, 0.25)]
    assert scalars["loss/divergence"] == [(3, 0.5), (5, 0.5)]
    assert "loss/mixture" not in scalars
    assert events.Tags()["histograms"] == ["weights/weight", "weights/bias"]


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModelError, match=r"bayeszip\[tensorboard\]"):
        TensorBoardLog(tmp_path, PHASES)


SECONDS = {"l2": 1.0, "vd": 2.3, "vd+sws": 2.7, "values": 1.3}
ALL = (
    Phase(name="l2", epochs=5, noise=False),
    Phase(name="vd", epochs=20, tau1=1.0, distillation=0.5),
    Phase(name="vd+sws", epochs=10, tau1=1.0, tau2=0.1, distillation=0.5),
    Phase(name="values", epochs=5, noise=False, distillation=0.5),
)


def estimates(seconds, steps=4, warm_up=3.0):
    """What is said to be left after each epoch, and what was; the first step of a phase takes longer."""
    clock, said, left = [0.0], [], TimeLeft(ALL, lambda: clock[0])
    for phase in ALL:
        clock[0] += warm_up
        for step in range(phase.epochs * steps):
            clock[0] += seconds[phase.name] / steps
            left.on_step(phase, step / (phase.epochs * steps))
            if step % steps == steps - 1:
                left.on_epoch((step + 1) / (phase.epochs * steps))
                said.append((left.seconds(), clock[0]))
    return [(estimate, clock[0] - at) for estimate, at in said]


def test_the_time_left_knows_that_phases_to_come_cost_more():
    for estimate, truth in estimates(SECONDS):
        assert estimate == pytest.approx(truth, abs=10, rel=0.1)
    assert estimates(SECONDS)[-1][0] == 0


def test_what_was_measured_counts_for_more_than_what_was_assumed():
    slower = {**SECONDS, "vd": 6.0, "vd+sws": 7.0}
    for estimate, truth in estimates(slower, warm_up=0.0)[8:]:
        assert estimate == pytest.approx(truth, rel=0.25, abs=12)


def test_nothing_is_said_before_something_is_known():
    left = TimeLeft(ALL)
    assert left.seconds() is None
    left.on_step(ALL[0], 0.0)
    assert left.seconds() is None
    left.on_step(Phase(name="another"), 0.0)
    left.on_step(Phase(name="another"), 0.5)
    assert left.seconds() is None


def test_a_phase_that_follows_itself_has_a_pace_of_its_own():
    clock = [0.0]
    left = TimeLeft(ALL[3:], lambda: clock[0])
    for _ in range(3):
        for step in range(11):
            clock[0] += 1.0
            left.on_step(ALL[3], step / 10)
            if step == 9:
                # A step a second; half a second an epoch.
                assert left.seconds() == pytest.approx(1.0)
        left.on_epoch(1.0)
        assert left.seconds() == 0
    assert left.is_open


def test_a_step_back_is_no_new_run():
    left = TimeLeft(ALL, iter(range(100)).__next__)
    for done in (0.0, 0.1, 0.0, 0.1):
        left.on_step(ALL[0], done)
    assert not left.is_open
    left.on_step(ALL[1], 0.0)
    left.on_step(ALL[0], 0.0)
    assert left.is_open


def test_more_batches_than_were_expected_are_no_new_run():
    left = TimeLeft(ALL, iter(range(100)).__next__)
    for done in (0.0, 0.5, 1.0, 1.0, 1.0):
        left.on_step(ALL[0], done)
    assert not left.is_open
    left.on_epoch(1.0)
    left.on_step(ALL[0], 0.0)
    assert left.is_open


def test_a_phase_that_runs_again_is_counted_from_there():
    left = TimeLeft(ALL, iter(range(100)).__next__)
    for phase in (*ALL[:3], ALL[1]):
        for done in (0.0, 0.5):
            left.on_step(phase, done)
    left.on_epoch(1.0)
    # A step a second is two seconds for the phases that were seen.
    assert left.seconds() == pytest.approx(2 + 2 / 10 / 2.7 * 1.3 * 5, rel=0.5)
