"""Every kind of network, compressed by default settings: as good as the guide says, loaded without its class."""

from collections import OrderedDict

import pytest
import tasks
import torch
import torch.nn.functional as F
from compressed import HUGGING_FACE, NAMES, compressed, judged, packed

import bayeszip
import zoo
from bayeszip.fitting import Watcher
from bayeszip.loading import verify
from bayeszip.recipe import recipe


def tensors_of(outputs):
    """Without names, which a file does not hold."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return list(outputs.values() if isinstance(outputs, dict) else outputs)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_is_compressed(name, tmp_path):
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    kind, network = zoo.KINDS[name], zoo.trained(name)
    before, small = judged(name, network), packed(name)
    result = compressed(name, network, tmp_path)
    if result.fit is not None:  # by a loop of its own it is not known
        matrices = {name for name, each in network.named_parameters() if each.dim() > 1}
        assert matrices <= set(result.fit.conversion.gaussian)
    assert result.without_graph is None
    assert result.bytes == (tmp_path / "net.bayz").stat().st_size < small.bytes
    # The guide's figures are of one machine: on another one weights round otherwise.
    assert zoo.stated_bytes(name) == pytest.approx((small.bytes, result.bytes), rel=0.15)
    loaded = bayeszip.load(tmp_path / "net.bayz")
    after = judged(name, loaded)
    unit, allowed = zoo.allowed(name)
    if unit == "points":
        assert 100 * (before.accuracy - after.accuracy) <= allowed
    else:
        assert before.accuracy is None
        assert after.loss <= (1 + allowed / 100) * before.loss
    assert verify(tmp_path / "net.bayz", against=loaded) < 1e-6
    # At another shape it says what the network of its class says with the file's weights.
    others = kind.at_another_shape()
    assert others[0].shape != kind.batches()[0][0][0].shape
    original = bayeszip.load(tmp_path / "net.bayz", into=kind.network()).eval()
    with torch.no_grad():
        for said, meant in zip(tensors_of(loaded(*others)), tensors_of(original(*others)), strict=True):
            assert said.shape == meant.shape
            assert torch.allclose(said, meant, rtol=1e-4, atol=1e-4 * float(meant.abs().max()))


class ModelOutput(OrderedDict):
    """As Hugging Face has it: by name, as attributes, and in order; what is None is not there."""

    def __init__(self, **outputs):
        super().__init__((name, value) for name, value in outputs.items() if value is not None)

    def __getattr__(self, name):
        return self.get(name)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class Answering(tasks.Named):
    """Says what it says in a form of its own, and a loss where it is given labels."""

    form = ModelOutput

    def forward(self, features, labels=None):
        said = super().forward(features)
        loss = None if labels is None else F.cross_entropy(said["logits"], labels)
        return self.form(loss=loss, logits=said["logits"], hidden_states=said["hidden"])


class HuggingFace(Answering):
    def __init__(self):
        from transformers.modeling_outputs import SequenceClassifierOutput

        super().__init__()
        self.form = SequenceClassifierOutput


def attribute_loss(outputs, targets):
    return F.cross_entropy(outputs.logits, targets)


def by_name(batches):
    return [{"features": inputs, "labels": targets} for inputs, targets in batches]


@pytest.mark.parametrize("form", [dict, ModelOutput, "transformers"])
@pytest.mark.parametrize("own", [False, True])
def test_outputs_by_name(form, own, tmp_path):
    """By a loss of torch, which takes the logits, and by one of one's own; from batches in order, and by name."""
    if form == "transformers":
        pytest.importorskip("transformers")
    network = {dict: tasks.Named, ModelOutput: Answering, "transformers": HuggingFace}[form]()
    network.load_state_dict(zoo.trained(tasks.DICT.name).state_dict())
    loss = F.cross_entropy if not own else tasks.named_loss if form is dict else attribute_loss
    train, validation = tasks.DICT.batches(), tasks.DICT.batches(validation=True)
    if form is not dict:
        train, validation = by_name(train), by_name(validation)
    short = recipe("quick").override("epochs_scale=0.05")
    result = bayeszip.compress(
        network, train, val_loader=validation, recipe=short, loss=loss, device="cpu", watcher=Watcher()
    )
    assert result.fit.before.accuracy > 0.95
    assert result.accuracy > 0.9
    result.save(tmp_path / "net.bayz")
    # A file holds no names: they come in their order.
    logits, hidden = bayeszip.load(tmp_path / "net.bayz")(torch.zeros(3, 24))
    assert logits.shape == (3, 5)
    assert (hidden >= 0).all()
