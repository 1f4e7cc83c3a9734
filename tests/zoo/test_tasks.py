"""Every kind of task, compressed by default settings: it keeps what the guide says, and loads without its class."""

import pytest
import tasks
import torch

import bayeszip
import zoo
from bayeszip.fitting import Watcher
from bayeszip.fitting.evaluation import Judge
from bayeszip.fitting.likelihood import Likelihood
from bayeszip.fitting.outputs import predictions
from bayeszip.recipe import recipe

#: The default recipe, shortened.
RECIPE = recipe("vd+sws").override("epochs_scale=0.15")
KINDS = [kind.name for kind in (
    tasks.MLP, tasks.CNN, tasks.UNET, tasks.AUTOENCODER, tasks.SIAMESE, tasks.DICT, tasks.SEGMENTATION,
)]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_tasks_of_all_kinds_are_compressed(name, tmp_path):
    kind, network = zoo.KINDS[name], zoo.trained(name)
    validation = kind.batches(validation=True)
    result = bayeszip.compress(
        network, kind.batches(), val_loader=validation, recipe=RECIPE, loss=kind.loss, device="cpu", watcher=Watcher()
    )
    before, after = result.fit.before, result.figures
    unit, allowed = zoo.allowed(name)
    if unit == "points":
        assert 100 * (before.accuracy - after.accuracy) <= allowed
    else:
        assert before.accuracy is None
        assert after.loss <= (1 + allowed / 100) * before.loss
    inputs = kind.batches()[0][0]
    examples = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    assert result.bytes < bayeszip.pack(network, example_inputs=examples).bytes
    # Without its class, the network says the same.
    result.save(tmp_path / "net.bayz")
    loaded = bayeszip.load(tmp_path / "net.bayz")
    assert result.without_graph is None
    with torch.no_grad():
        assert torch.equal(predictions(zoo.called(loaded, inputs)), predictions(zoo.called(result.model, inputs)))
    if kind is not tasks.DICT:
        assert Judge(Likelihood.of(kind.loss))(loaded, validation).loss == pytest.approx(after.loss, rel=1e-5)


def test_outputs_by_name_come_back_in_their_order():
    kind = tasks.DICT
    result = bayeszip.compress(
        zoo.trained(kind.name),
        kind.batches(),
        val_loader=kind.batches(validation=True),
        recipe=RECIPE.override("epochs_scale=0.02"),
        loss=kind.loss,
        device="cpu",
        watcher=Watcher(),
    )
    logits, hidden = result.model(kind.batches()[0][0])
    assert logits.shape[1] == 5
    assert (hidden >= 0).all()
    assert result.accuracy > 0.5
