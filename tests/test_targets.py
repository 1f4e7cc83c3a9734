"""Targets: hit from below and never exceeded, found during the training, and refused in words where out of reach."""

import contextlib
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import bayeszip
from bayeszip import codec, compressing, ending, targets
from bayeszip.cli import app
from bayeszip.compressing import WEAKER
from bayeszip.errors import DataError, RecipeError, TargetError
from bayeszip.experiments import EXPERIMENTS
from bayeszip.experiments.records import file_of, is_of, read
from bayeszip.fitting import Course, EpochStats, Figures, Phase, ResidentBatches, Watcher
from bayeszip.fitting.course import Problem
from bayeszip.posterior import GaussianTensor, Posterior
from bayeszip.quantize import Quantization, quantize
from bayeszip.recipe import recipe
from bayeszip.record import run_record
from bayeszip.targets import ByteSteering, Quality, QualitySteering, Target, largest_within, parse_bytes, within_bytes
from bayeszip.tensors import CompressedModel
from bayeszip.variational import Divergence, to_variational, variational_weights

TARGETS = Path(__file__).resolve().parents[1] / "results" / "targets"
RECORDS = read(TARGETS)
RECIPE = recipe("quick").override(
    "all.epochs=24", "vd+sws.epochs=8", "closing.epochs=3", "l2.epochs=4", "all.rate_log_sigma2=0.02",
    "vd.rate_theta=0.01", "mixture.components=9", "all.tau1=0.1",
)  # fmt: skip


def blobs(n=1024, seed=0):
    """Gaussian clouds; eight of 24 features tell six classes apart, more or less."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 6
    inputs = torch.randn(n, 24, generator=generator)
    inputs[:, :8] += 2.5 * nn.functional.one_hot(labels, 8).float()
    return inputs, labels


def batches(seed=0):
    return ResidentBatches(*blobs(seed=seed), 128, shuffle=True, seed=seed)


def compress(settings=RECIPE, watcher=None, **target):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6))
    return bayeszip.compress(
        model,
        batches(),
        val_loader=batches(1),
        recipe=settings,
        pretrain=True,
        device="cpu",
        watcher=watcher or Watcher(),
        **target,
    )


@pytest.mark.parametrize("budget", [300, 500, 900])
def test_byte_budgets_are_hit_from_below(budget):
    result = compress(max_bytes=budget)
    assert 0.95 * budget <= result.bytes <= budget
    assert result.bytes == len(result.blob) == codec.measure(codec.decode(result.blob))
    assert result.fit.target == f"at most {budget} bytes"
    assert f"at most {budget} bytes" in result.report()
    assert result.accuracy > 0.6


def test_a_smaller_budget_is_met_by_a_stronger_prior():
    small, large = (compress(max_bytes=budget) for budget in (250, 1200))
    assert small.fit.strength > large.fit.strength
    assert small.compressed.nonzero < large.compressed.nonzero


@pytest.mark.parametrize("target", [{"max_bytes": 500}, {"min_ratio": 16.0}, {"max_accuracy_drop": 3.0}], ids=str)
def test_targets_are_kept_in_units_of_layers_too(target):
    result = compress(RECIPE.override("mixture.units=layer"), **target)
    assert any(tensor.scale is not None for tensor in result.compressed.tensors.values())
    assert Target.of(**target).missed_by(result, result.fit.before) is None
    assert result.bytes <= 700


def test_a_ratio_is_a_byte_budget():
    result = compress(min_ratio=12.5)
    assert 12.5 <= result.ratio <= 12.5 / 0.95
    assert "at least 12.5 times smaller" in result.report()


@pytest.mark.parametrize("unit", [1e-15, 1.0, 1e9])
def test_a_figure_is_kept_in_whatever_unit_it_comes(unit):
    target = Target(max_loss_increase=0.05)
    quality = target.quality(Figures(loss=unit), None)
    assert quality.is_kept(Figures(loss=1.0499 * unit))
    assert not quality.is_kept(Figures(loss=1.051 * unit))


def test_an_accuracy_is_kept_with_a_small_file():
    tight, loose = (compress(max_accuracy_drop=drop) for drop in (1, 12))
    for result, drop in ((tight, 1), (loose, 12)):
        assert result.fit.accuracy_before - result.accuracy <= drop / 100 + 1e-9
    assert loose.bytes < tight.bytes


@pytest.mark.parametrize("name", ["paper-vd", "paper-sws", "l2"])
def test_recipes_without_a_strength_or_a_mixture_keep_to_a_budget_too(name):
    settings = recipe(name).override("epochs_scale=0.01", "l2.rate_theta=0.01")
    assert 0.95 * 700 <= compress(settings, max_bytes=700).bytes <= 700


def test_what_can_not_be_reached_is_said_before_the_training():
    class Never(Watcher):
        def on_batch(self, phase, done):
            raise AssertionError(phase.name)

    with pytest.raises(TargetError, match=r"20 bytes is out of reach: with every weight zero it takes \d+"):
        bayeszip.compress(
            nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6)),
            batches(),
            recipe=RECIPE,
            device="cpu",
            watcher=Never(),
            max_bytes=20,
        )


def test_an_accuracy_that_is_not_kept_comes_with_what_was_reached(monkeypatch):
    for room in (targets, ending):
        monkeypatch.setattr(room, "FINER", (1,))
    # One epoch at a rate that ruins the network.
    ruin = recipe("paper-vd").override("vd.epochs=1", "vd.rate_theta=3", "quantization.components=1", "l2.epochs=4")
    with pytest.raises(TargetError, match=r"loses \d+\.\d\d points .* more than 0, at .* B") as caught:
        compress(ruin, max_accuracy_drop=0)
    assert caught.value.result.fit.accuracy_before > caught.value.result.accuracy


@pytest.mark.parametrize(("name", "trainings"), [("paper-sws", 1), ("paper-vd", 3)])
def test_without_a_strength_there_is_no_weaker_prior_to_train_under(name, trainings, monkeypatch):
    monkeypatch.setattr(Quality, "is_kept", lambda quality, figures: False)
    settings = recipe(name).override("epochs_scale=0.001", "l2.epochs=1")
    trained = Counter[str]()

    class Counting(Watcher):
        def on_epoch(self, stats, course):
            trained[stats.phase] += 1

    network = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6))
    with contextlib.suppress(TargetError):
        bayeszip.compress(
            network, batches(), val_loader=batches(1), recipe=settings, device="cpu", watcher=Counting(),
            max_accuracy_drop=1,
        )  # fmt: skip
    assert trained[settings.phases[0].name] == trainings


@pytest.fixture
def three_trainings(monkeypatch):
    """Lets no training keep its figure, and prefers the one of this number; gives the ends and strengths of all."""
    ceilings, ends, strengths = [], [], []
    monkeypatch.setattr(Quality, "is_kept", lambda quality, figures: False)

    def steering_towards(*given):
        ceilings.append(given[-1])
        steering = ending.steering_towards(*given)
        strengths.append(steering)
        return steering

    class Noting(Watcher):
        def on_epoch(self, stats, course):
            if (stats.phase, stats.epoch) == ("vd+sws", stats.epochs):
                ends.append(stats.accuracy)

    def preferring(number, **options):
        settings = RECIPE.override("vd.epochs=4", "vd+sws.epochs=2", "all.rate_theta=0.02", "closing.epochs=1")
        results = []

        def better(one, other, quality):
            results[:] = results or [other]
            results.append(one)
            return results[min(number, len(results) - 1)]

        monkeypatch.setattr(compressing, "better", better)
        monkeypatch.setattr(compressing, "steering_towards", steering_towards)
        try:
            result = compress(settings, watcher=Noting(), max_accuracy_drop=3, seed=1, **options)
        except TargetError as error:
            result = error.result
        return result, ends, ceilings, [steering.strength() for steering in strengths]

    return preferring


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_record_tells_of_the_training_that_its_file_is_from(number, three_trainings):
    result, ends, _, strengths = three_trainings(number)
    assert len(set(ends)) == len(ends) == 3
    assert result.trained.accuracy == ends[number]
    assert run_record(result, {})["validation_accuracy_trained"] == ends[number]
    assert result.fit.strength == strengths[number]


def test_each_training_is_weaker_than_the_last_whichever_was_best(three_trainings):
    _, _, ceilings, strengths = three_trainings(0)
    assert ceilings[0] is None
    assert ceilings[1:] == [pytest.approx(WEAKER * strength) for strength in strengths[:2]]
    assert strengths[2] < strengths[1] < strengths[0]


def test_a_network_that_no_training_has_changed_is_recorded_as_it_was(three_trainings):
    result, ends, _, _ = three_trainings(3)
    assert result.fit.strength == 0
    assert run_record(result, {})["validation_accuracy_trained"] == result.fit.accuracy_before
    assert len(ends) == 3


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"max_bytes": 100, "min_ratio": 3}, "one of max_bytes, .* and max_metric_drop, not max_bytes and min_ratio"),
        ({"max_bytes": 0}, "max_bytes must be at least 1"),
        ({"max_bytes": 20.5}, "max_bytes must be a whole number"),
        ({"min_ratio": math.inf}, "min_ratio must be at least 1, and finite"),
        ({"max_accuracy_drop": -1}, "between 0 and 100 points"),
        ({"max_accuracy_drop": True}, "must be a number"),
    ],
)
def test_targets_that_make_no_sense(target, message):
    with pytest.raises(RecipeError, match=message):
        Target(**target)


def test_numbers_of_numpy_are_numbers():
    assert type(Target(max_bytes=np.int64(500)).max_bytes) is int
    assert type(Target(min_ratio=np.float32(2)).min_ratio) is float


def test_a_small_budget_is_no_reason_to_stop_half_way():
    """While units live that will be dead, norms and tables beside them take more than the whole file will."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU(),
        nn.Linear(96, 6),
    )  # fmt: skip
    settings = RECIPE.override("epochs_scale=0.3", "all.rate_log_sigma2=0.08")
    result = bayeszip.compress(model, batches(), recipe=settings, pretrain=True, watcher=Watcher(), max_bytes=240)
    assert result.bytes <= 240


def test_where_bits_alone_are_weighed_their_weight_is_steered():
    rated = recipe("quick").override("all.tau1=0", "all.rate.tau=0.3")
    assert targets.steered_phase(rated.phases).name == "vd"
    assert targets.steered_phase(recipe("l2").phases) is None


def test_a_ratio_out_of_reach_is_told_as_a_ratio():
    with pytest.raises(TargetError, match=r"1e\+06 times smaller is out of reach: with every weight zero"):
        compress(min_ratio=1e6)


def test_an_accuracy_that_is_none_is_refused_before_the_pretraining():
    watcher = Watcher()
    watcher.on_batch = None  # called in the first epoch
    inputs, model = torch.randn(32, 24), nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6))
    data = ResidentBatches(inputs, inputs[:, :6], 16)
    with pytest.raises(DataError, match="there is no validation accuracy to keep to: the targets are no classes"):
        bayeszip.compress(
            model, data, val_loader=data, recipe=RECIPE, loss="mse", pretrain=True, max_accuracy_drop=1, watcher=watcher
        )


@pytest.mark.parametrize("text", ["1,5k", "2,5MB", "1,50,000", ",5"])
def test_a_comma_that_could_be_a_point_is_refused(text):
    with pytest.raises(RecipeError, match="not a number of bytes"):
        parse_bytes(text)


def test_commas_part_thousands():
    assert [parse_bytes(text) for text in ("1,500", "12,345,678", "1,000k", ".5k")] == [1500, 12345678, 1000000, 500]


def test_an_accuracy_needs_validation_data():
    with pytest.raises(DataError, match="val_loader"):
        bayeszip.compress(nn.Linear(24, 6), batches(), recipe=RECIPE, max_accuracy_drop=1)


@pytest.mark.parametrize("text", ["", "20 kk", "-3", "1e5", "k", "three"])
def test_sizes_that_are_none(text):
    with pytest.raises(RecipeError, match="not a number of bytes"):
        parse_bytes(text)


def posterior(size=4000, seed=0):
    random = np.random.default_rng(seed)
    theta = random.normal(size=(40, size // 40)).astype(np.float32)
    return Posterior({"w": GaussianTensor(theta, random.normal(size=theta.shape).astype(np.float32))})


def file_size(quantized):
    return codec.measure(CompressedModel(dict(quantized)))


def test_the_least_noisy_weights_are_kept():
    beliefs = posterior()
    how = Quantization(assignment="fit", components=8)
    kept = largest_within(quantize(beliefs, how), beliefs, file_size, 1000)["w"].symbols != 0
    noise = beliefs.weights["w"].log_sigma2 - np.log(beliefs.weights["w"].theta ** 2)
    assert 0 < kept.sum() < kept.size
    assert noise[kept].max() <= noise[~kept].min()
    assert 990 <= file_size(largest_within(quantize(beliefs, how), beliefs, file_size, 1000)) <= 1000


def test_room_that_is_left_buys_finer_values():
    beliefs = posterior()
    how = Quantization(assignment="fit", components=8)
    coarse = quantize(beliefs, how)
    fine = within_bytes(beliefs, how, file_size, 2 * file_size(coarse))
    assert 0.95 * 2 * file_size(coarse) <= file_size(fine) <= 2 * file_size(coarse)

    def error(quantized):
        return np.square(quantized["w"].dequantize() - beliefs.weights["w"].theta).mean()

    assert error(fine) < 0.1 * error(coarse)


def stats(phase, epoch, epochs, accuracy=None):
    return EpochStats(phase, epoch, epochs, 1.0, {"data": 0.1}, accuracy, 0.5, 10)


def steered_network():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6))
    to_variational(network)
    return network


def course(network, name="vd"):
    phase = Phase(name=name, epochs=32, tau1=1.0, schedule="linear")
    weights = tuple(variational_weights(network))
    return Course(Problem(network, weights, (Divergence(),), None, F.cross_entropy, 10), phase)


def byte_steering(budget):
    how = Quantization(assignment="fit", prune_rate=0.95, components=8)
    phases = [Phase(name="vd", epochs=32, tau1=1.0, schedule="linear"), Phase(name="more", epochs=4, tau1=1.0)]
    return ByteSteering(phases, budget=budget, size=file_size, how=how)


def test_the_strength_rises_while_the_file_is_too_large_and_falls_while_it_is_too_small():
    for budget, direction in ((100, 1), (100_000, -1)):
        steering, network = byte_steering(budget), steered_network()
        before = steering.strength()
        for epoch in range(1, 9):
            steering.on_epoch(stats("vd", epoch, 32), course(network))
        assert direction * (steering.strength() - before) > 0
        steering.on_epoch(stats("other", 8, 32), course(network, "other"))


def test_weights_beyond_the_budget_are_cut_when_the_next_phase_begins():
    steering, network = byte_steering(400), steered_network()
    beliefs = Posterior.of(network)
    before = quantize(beliefs, Quantization(assignment="fit", prune_rate=0.95, components=8))
    kept = largest_within(before, beliefs, file_size, int(targets.AIM * 400))
    steering.on_phase(course(network, "more"))
    for name, tensor in kept.items():
        cut = (before[name].symbols != 0) & (tensor.symbols == 0)
        expected = np.where(cut, 0, beliefs.weights[name].theta)
        assert np.array_equal(network.get_parameter(name).detach().numpy(), expected)
    assert 0 < sum(tensor.nonzero for tensor in kept.values()) < sum(tensor.nonzero for tensor in before.values())


def test_steering_is_taken_up_where_it_was():
    steering, network, other = byte_steering(500), steered_network(), byte_steering(500)
    for epoch in range(1, 7):
        steering.on_epoch(stats("vd", epoch, 32), course(network))
    other.load_state_dict(json.loads(json.dumps(steering.state_dict())))
    for each in (steering, other):
        each.on_epoch(stats("vd", 8, 32), course(network))
    assert other.strength() == steering.strength()


def test_the_accuracy_decides_how_strong():
    phases = [Phase(name="vd", epochs=16, tau1=1.0, schedule="linear")]
    strengths = []
    for accuracy in (0.98, 0.95):
        steering = QualitySteering(phases, quality=Quality("accuracy", 1.0, 0.975, 0.005))
        before = steering.strength()
        for epoch in range(1, 17):
            steering.on_epoch(stats("vd", epoch, 16, accuracy), course(steered_network()))
        strengths.append(steering.strength() / before)
    assert strengths[0] > 1 > strengths[1]
    assert min(strengths) >= math.exp(targets.WEAKEST - targets.START)


def test_what_high_rates_cost_by_themselves_does_not_turn_the_strength():
    """A network that loses five points in its first epochs, and wins them back as the rates fall."""
    steering = QualitySteering(
        [Phase(name="vd", epochs=32, tau1=1.0, schedule="linear")], quality=Quality("accuracy", 1.0, 0.975, 0.005)
    )
    strengths = [steering.strength()]
    for epoch in range(1, 33):
        accuracy = 0.98 - 0.05 * (1 - epoch / 32) ** 2
        steering.on_epoch(stats("vd", epoch, 32, accuracy), course(steered_network()))
        strengths.append(steering.strength())
    assert min(strengths) == strengths[0]
    assert strengths[-1] > 2 * strengths[0]
    resumed = QualitySteering(
        [Phase(name="vd", epochs=32, tau1=1.0, schedule="linear")], quality=Quality("accuracy", 1.0, 0.975, 0.005)
    )
    resumed.load_state_dict(json.loads(json.dumps(steering.state_dict())))
    assert resumed.state_dict() == steering.state_dict()


def test_the_command_line_takes_targets(tmp_path):
    done = CliRunner().invoke(app, ["compress", "lenet-300-100", "-o", str(tmp_path / "n.bayz"), "--max-bytes", "3x"])
    assert done.exit_code == 2
    help_text = CliRunner().invoke(app, ["compress", "--help"], env={"COLUMNS": "200"}).output
    assert all(option in help_text for option in ("--max-bytes", "--min-ratio", "--max-accuracy-drop"))


@pytest.mark.parametrize("name", RECORDS)
def test_committed_files_keep_to_their_targets(name):
    (run,) = (run for run in EXPERIMENTS["targets"].runs() if run.name == name)
    record, variant = RECORDS[name], run.variant
    assert is_of(record, run)
    assert record["bytes"] == file_of(TARGETS, name).stat().st_size
    if variant.max_bytes is not None:
        assert 0.95 * variant.max_bytes <= record["bytes"] <= variant.max_bytes
    else:
        lost = 100 * (record["validation_accuracy_before"] - record["validation_accuracy"])
        assert lost <= variant.max_accuracy_drop


def test_there_are_committed_files_for_three_budgets():
    assert set(RECORDS) >= {"3kB-0", "6kB-0", "12kB-0"}
