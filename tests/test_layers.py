"""What becomes of layers: left out, frozen, gone easy on, in a loop of one's own; tests/zoo compresses all kinds."""

import layered
import pytest
import torch
from torch import nn

import bayeszip
import zoo
from bayeszip.fitting import Watcher
from bayeszip.recipe import recipe
from bayeszip.record import run_record
from bayeszip.tensors import QuantizedTensor, RawTensor

#: The recipe's schedule, shortened to seconds.
SHORT = recipe("quick").override("epochs_scale=0.1", "all.rate_log_sigma2=4e-3")

#: A training that is only begun.
FEW = recipe("quick").override("all.epochs=2", "closing.epochs=1", "all.rate_log_sigma2=0.05")


def share_right(network, kind):
    """Of targets that are there to be hit."""
    right = total = 0
    with torch.no_grad():
        for inputs, targets in kind.batches(validation=True):
            counts = targets >= 0
            right += ((zoo.called(network, inputs).argmax(-1) == targets) & counts).sum().item()
            total += counts.sum().item()
    return right / total


def compress(kind, network, **options):
    settings = {"recipe": SHORT, "loss": kind.loss, "device": "cpu", "watcher": Watcher(), **options}
    return bayeszip.compress(network, kind.batches(), **settings)


def test_what_is_excluded_is_clustered_and_the_report_says_so():
    """An LSTM that could not be made Gaussian made a file of 84,617 bytes where `pack` made one of 21,657."""
    kind, network = layered.LSTM, zoo.trained(layered.LSTM.name)
    result = compress(kind, network, exclude=["rnn"], strengths={"head": 0.5}, recipe=FEW)
    assert isinstance(result.compressed.tensors["rnn.weight_hh_l0"], QuantizedTensor)
    assert len(result.compressed.tensors["rnn.weight_hh_l0"].codebook) <= 65
    assert isinstance(result.compressed.tensors["rnn.bias_hh_l0"], RawTensor)
    assert "rnn (LSTM, excluded): trained" in result.report()
    # Clusters take more than the steps of `pack`: that is said, or where it can be judged, the latter are taken.
    packed = bayeszip.pack(network, example_inputs=kind.examples_of()).bytes
    assert result.bytes > packed == result.packed
    assert f"`pack` makes a file of {packed:,} B" in result.report()
    judged = compress(kind, network, exclude=["rnn"], recipe=FEW, val_loader=kind.batches(validation=True))
    assert judged.bytes <= packed
    settings = recipe_of(result)["layers"]
    assert settings["exclude"] == ["rnn"]
    assert settings["strengths"] == [{"pattern": "head", "factor": 0.5}]
    assert "rnn.weight_hh_l0" not in result.fit.conversion.gaussian


def recipe_of(result):
    return run_record(result, {})["recipe"]


def test_what_is_frozen_stays_bit_for_bit_whatever_its_kind():
    kind, network = layered.LSTM, zoo.trained(layered.LSTM.name)
    network.rnn.requires_grad_(False)
    result = compress(kind, network, recipe=FEW)
    stored = result.compressed.tensors["rnn.weight_hh_l0"]
    assert isinstance(stored, RawTensor)
    assert set(stored.values.ravel().tolist()) <= set(network.rnn.weight_hh_l0.flatten().tolist())
    assert "rnn (LSTM, frozen): left as it was" in " ".join(result.report().split())


def test_norms_are_said_to_be_trained_and_rounded():
    kind = layered.ENCODER
    report = " ".join(compress(kind, zoo.trained(kind.name), recipe=FEW).report().split())
    assert "(LayerNorm): trained, then rounded" in report
    assert "left as it was" not in report


def test_a_stronger_prior_on_a_part_prunes_more_of_it():
    kind, network = layered.OWN, zoo.trained(layered.OWN.name)
    kept = []
    for factor in (0.05, 20.0):
        result = compress(kind, network, strengths={"2": factor}, recipe=FEW.override("all.epochs=10"))
        kept.append(result.compressed.tensors["2.weight"].nonzero)
    assert kept[1] < 0.7 * kept[0]


def test_in_a_loop_of_ones_own():
    kind, network = layered.GRU, zoo.trained(layered.GRU.name)
    batches = kind.batches(size=64)
    before, packed = share_right(network, kind), bayeszip.pack(network, example_inputs=kind.examples_of())
    compressor = bayeszip.Compressor(network, SHORT, n_data=kind.examples, steps_per_epoch=len(batches))
    optimizer = torch.optim.Adam(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)
    network.train()
    for step in range(compressor.total_steps):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        (kind.loss(network(inputs), targets) + compressor.regularizer()).backward()
        optimizer.step()
        compressor.step()
    result = compressor.finalize(example_inputs=kind.examples_of(), train_loader=batches)
    assert type(network.rnn) is nn.GRU
    assert share_right(network, kind) > before - 0.02
    assert share_right(result.model, kind) == pytest.approx(share_right(network, kind), abs=0.005)
    assert 4 * result.bytes < packed.bytes
