"""The progress display: plain lines without a terminal, a bar with the time left in one."""

import io

import pytest
from rich.console import Console
from torch import nn

from bayeszip.fitting import EpochStats, Phase
from bayeszip.progress import TrainingProgress

PHASES = (Phase(name="l2", epochs=2, noise=False), Phase(name="vd", epochs=3, tau1=1.0))


def stats(phase="vd", epoch=1, epochs=3, **changes):
    values = {
        "nll": 0.25,
        "kl": 0.5,
        "mixture": 0.0,
        "hyper_prior": 0.0,
        "accuracy": 0.9812,
        "zeros": 0.5,
        "bytes": 4321,
    }
    return EpochStats(
        phase=phase, epoch=epoch, epochs=epochs, seconds=1.0, weights_computed=10, **{**values, **changes}
    )


def shown(events, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with TrainingProgress(PHASES, console) as display:
        for event in events:
            display.on_batch(PHASES[1], 0.5)
            display.on_epoch(event, nn.Identity(), None)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_every_figure_is_shown_at_the_end_of_a_phase(terminal):
    text = shown([stats(epoch=3)], terminal)
    for figure in ("vd", "3/3", "0.2500", "0.5000", "98.12 %", "50.00 %", "4,321 B", "left"):
        assert figure in text
    assert "mixture" not in text


def test_the_last_known_size_stays():
    text = shown([stats(epoch=2), stats(epoch=3, bytes=None)], terminal=False)
    assert "4,321 B" in text


def test_without_a_terminal_a_phase_takes_a_line_not_a_line_an_epoch():
    lines = shown([stats(epoch=epoch) for epoch in (1, 2, 3)], terminal=False).splitlines()
    assert len(lines) == 1
    assert "epoch 3/3" in lines[0]


def test_what_is_not_known_is_left_out():
    text = shown([stats(epoch=3, accuracy=None, zeros=0.0, bytes=None, kl=0.0)], terminal=False)
    for absent in ("validation", "zeros", "file", "divergence"):
        assert absent not in text
