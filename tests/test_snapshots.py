"""Snapshots of a run's weights: every weight counted once, the mixture beside them, readable again."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bayeszip.errors import DataError
from bayeszip.fitting import Course, EpochStats, Phase
from bayeszip.fitting.course import Problem
from bayeszip.snapshots import BINS, SnapshotRecorder, Snapshots, read_snapshots
from bayeszip.variational import Divergence, MixturePrior, to_variational, variational_weights
from bayeszip.variational.distributions import PRUNING_LOG_ALPHA, log_alpha

VD = Phase(name="vd", epochs=4, tau1=1.0)
SWS = Phase(name="vd+sws", epochs=2, tau1=1.0, tau2=0.02)


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    to_variational(net)
    return net


def stats(phase, epoch):
    return EpochStats(
        phase=phase.name,
        epoch=epoch,
        epochs=phase.epochs,
        seconds=1.0,
        parts={"data": 0.1},
        accuracy=None,
        zeros=0.5,
        weights_computed=1,
    )


def course(net, phase, *terms):
    return Course(
        Problem(net, tuple(variational_weights(net)), (Divergence(), *terms), None, F.cross_entropy, 10), phase
    )


def train(recorder, net, prior, *phases):
    """Tell a recorder what a training would."""
    for phase in phases:
        recorder.on_phase(course(net, phase, prior))
        for epoch in range(1, phase.epochs + 1):
            recorder.on_epoch(stats(phase, epoch), course(net, phase, prior))


def test_moments_are_start_middle_and_end_of_each_phase(tmp_path):
    train(SnapshotRecorder(tmp_path / "s.json"), network(), MixturePrior(5), VD, SWS)
    taken = read_snapshots(tmp_path / "s.json")
    moments = [(moment.phase, moment.epoch) for moment in taken.moments]
    # The end of vd is the start of vd+sws.
    assert moments == [("vd", 0), ("vd", 2), ("vd+sws", 0), ("vd+sws", 1), ("vd+sws", 2)]
    assert [moment.mixture is not None for moment in taken.moments] == [False, False, True, True, True]
    assert taken.shapes == {"0.weight": (5, 6), "0.bias": (5,), "2.weight": (2, 5), "2.bias": (2,)}


def test_every_weight_is_counted_where_it_lies(tmp_path):
    net, prior = network(), MixturePrior(5, weight_std=0.2)
    train(SnapshotRecorder(tmp_path / "s.json"), net, prior, SWS)
    moment = read_snapshots(tmp_path / "s.json").moments[0]
    weights = torch.cat([weight.theta.detach().flatten() for weight in variational_weights(net)])
    expected, _ = np.histogram(weights.numpy(), BINS, (-moment.reach, moment.reach))
    assert list(moment.counts) == expected.tolist()
    assert sum(moment.counts) == 47
    noise = torch.cat([weight.log_sigma2.detach().flatten() for weight in variational_weights(net)])
    kept = (prior.assign(weights) > 0) & (log_alpha(weights, noise) < PRUNING_LOG_ALPHA)
    assert sum(moment.kept) == int(kept.sum()) > 0
    assert sum(moment.mixture.proportions) == pytest.approx(1, abs=1e-3)
    assert moment.mixture.means[0] == 0


def test_weights_that_are_no_longer_computed_count_as_zeros(tmp_path):
    recorder, net = SnapshotRecorder(tmp_path / "s.json"), network()
    recorder.on_phase(course(net, VD))
    with torch.no_grad():
        net[0].weight.data, net[0].weight_log_sigma2.data = (
            net[0].weight.data[:, :4],
            net[0].weight_log_sigma2.data[:, :4],
        )
    recorder.on_epoch(stats(VD, 2), course(net, VD))
    first, later = read_snapshots(tmp_path / "s.json").moments
    assert sum(first.counts) == sum(later.counts) == 47
    assert later.counts[BINS // 2] >= 10


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    net, prior = network(), MixturePrior(5)
    train(SnapshotRecorder(tmp_path / "whole.json"), net, prior, VD, SWS)
    part = SnapshotRecorder(tmp_path / "part.json")
    part.on_phase(course(net, VD, prior))
    part.on_epoch(stats(VD, 2), course(net, VD, prior))
    resumed = SnapshotRecorder(tmp_path / "part.json")
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    # An epoch that the run had begun again is not recorded twice.
    for epoch in (2, 3, 4):
        resumed.on_epoch(stats(VD, epoch), course(net, VD, prior))
    train(resumed, net, prior, SWS)
    assert (tmp_path / "part.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


@pytest.mark.parametrize("other", [network(), nn.Linear(3, 2)])
def test_a_run_that_begins_removes_what_speaks_of_the_run_before(tmp_path, other):
    path, record = tmp_path / "s.json", tmp_path / "result.json"
    train(SnapshotRecorder(path), network(), MixturePrior(5), VD)
    old = path.read_bytes()
    record.write_text("{}")
    again = SnapshotRecorder(path, outdated=[record])
    assert (path.read_bytes(), record.exists()) == (old, True)
    again.on_phase(course(other, VD))
    assert not record.exists()
    assert not path.exists() or path.read_bytes() != old


def test_a_run_that_goes_on_removes_nothing(tmp_path):
    path, record = tmp_path / "s.json", tmp_path / "result.json"
    first = SnapshotRecorder(path)
    train(first, network(), MixturePrior(5), VD)
    record.write_text("{}")
    resumed = SnapshotRecorder(path, outdated=[record])
    resumed.load_state_dict(first.state_dict())
    resumed.on_phase(course(network(), SWS))
    assert record.exists()
    assert [moment.phase for moment in read_snapshots(path).moments] == ["vd", "vd", "vd+sws"]


def test_networks_without_gaussian_weights_leave_nothing(tmp_path):
    recorder = SnapshotRecorder(tmp_path / "s.json")
    train(recorder, nn.Linear(3, 2), MixturePrior(5), Phase(name="l2", epochs=2, noise=False))
    assert not (tmp_path / "s.json").exists()


def test_a_few_kilobytes_are_enough(tmp_path):
    train(SnapshotRecorder(tmp_path / "s.json"), network(), MixturePrior(17), VD, SWS)
    assert (tmp_path / "s.json").stat().st_size < 12_000


GOOD = {"phase": "vd", "epoch": 0, "epochs": 1, "reach": 1.0, "counts": [1] * BINS, "kept": [0] * BINS, "mixture": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": [1]},
        {"kept": [-1] * BINS},
        {"reach": 0.0},
        {"reach": float("nan")},
        {"epoch": "first"},
        {"mixture": {"means": [0.0], "stds": [0.0], "proportions": [1.0]}},
        {"mixture": {"means": [0.0], "stds": [0.1, 0.1], "proportions": [1.0]}},
        {"mixture": {"means": []}},
    ],
)
def test_what_is_no_snapshot_is_refused(tmp_path, changes):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"shapes": {}, "moments": [GOOD]}))
    assert len(read_snapshots(path).moments) == 1
    path.write_text(json.dumps({"shapes": {}, "moments": [GOOD | changes]}))
    with pytest.raises(DataError, match=r"s\.json"):
        read_snapshots(path)


def test_nothing_taken_is_valid_too(tmp_path):
    (tmp_path / "s.json").write_text(Snapshots().to_json())
    assert read_snapshots(tmp_path / "s.json") == Snapshots()


def test_weights_are_drawn_in_the_units_of_the_mixture(tmp_path):
    net = network()
    with torch.no_grad():
        net[2].weight.mul_(20)
        net[2].bias.zero_()
    prior = MixturePrior(5, weight_std=0.2, with_units=["0.weight", "2.weight"])
    prior.units.copy_(torch.tensor([0.5, 10.0]))
    train(SnapshotRecorder(tmp_path / "s.json"), net, prior, VD, SWS)
    first, *_, last = read_snapshots(tmp_path / "s.json").moments
    natural = [weight.theta.detach().flatten() for weight in variational_weights(net)]
    for moment, units in ((first, (1, 1, 1, 1)), (last, (0.5, 1, 10, 1))):
        seen = torch.cat([theta / unit for theta, unit in zip(natural, units, strict=True)])
        expected, _ = np.histogram(seen.numpy(), BINS, (-moment.reach, moment.reach))
        assert list(moment.counts) == expected.tolist()
        assert moment.reach == pytest.approx(1.02 * seen.abs().max().item(), rel=1e-3)


def test_a_finding_is_left_to_those_who_show_it(tmp_path, caplog):
    SnapshotRecorder(tmp_path / "snapshots.json").on_finding("it is broken")
    assert not caplog.text
