"""Networks of any layers, compressed by default settings on toy data: small, as good as before, loaded without a class."""

import dataclasses

import layered
import pytest
import torch
import zoo
from torch import nn

import bayeszip
from bayeszip.fitting import Watcher
from bayeszip.loading import verify
from bayeszip.recipe import recipe
from bayeszip.tensors import QuantizedTensor, RawTensor

#: The recipe's schedule, shortened to seconds.
SHORT = recipe("quick").override("epochs_scale=0.1", "all.rate_log_sigma2=4e-3")

#: Points of accuracy that each may lose, and how many times smaller than `pack`'s its file must be; docs/guide/layers.md.
KINDS = {
    layered.LSTM: (1.0, 4),
    layered.GRU: (1.0, 4),
    layered.ENCODER: (1.0, 2),
    layered.GPT: (1.0, 2),
    layered.BILINEAR: (2.0, 2),
    layered.CONV1D: (1.0, 2),
    layered.OWN: (1.0, 2),
}


def share_right(network, kind):
    """Of targets that are there to be hit."""
    right = total = 0
    with torch.no_grad():
        for inputs, targets in kind.batches(validation=True):
            counts = targets >= 0
            right += ((zoo.called(network, inputs).argmax(-1) == targets) & counts).sum().item()
            total += counts.sum().item()
    return right / total


def inputs_of(kind, rows=2):
    first = kind.batches()[0][0]
    return tuple(each[:rows] for each in (first if isinstance(first, tuple) else (first,)))


def compress(kind, network, **options):
    settings = {"recipe": SHORT, "loss": kind.loss, "device": "cpu", "watcher": Watcher(), **options}
    return bayeszip.compress(network, kind.batches(), **settings)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_layer_is_compressed(kind, tmp_path):
    points, times = KINDS[kind]
    network = zoo.trained(kind.name)
    result = compress(kind, network)
    packed = bayeszip.pack(network, example_inputs=inputs_of(kind))
    matrices = {name for name, each in network.named_parameters() if each.dim() > 1}
    assert matrices <= set(result.fit.conversion.gaussian)
    assert times * result.bytes < packed.bytes
    result.save(tmp_path / "net.bayz")
    loaded = bayeszip.load(tmp_path / "net.bayz")
    assert share_right(loaded, kind) >= share_right(network, kind) - points / 100
    assert verify(tmp_path / "net.bayz", against=loaded) < 1e-6
