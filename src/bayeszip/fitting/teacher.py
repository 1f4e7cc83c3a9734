"""The pretrained network as a teacher: what it says about each batch, for distillation."""

import torch
from torch import Tensor, nn

from bayeszip.fitting.batches import Batch, Loader, called_with, running
from bayeszip.fitting.outputs import predictions
from bayeszip.fitting.resident import ResidentBatches

__all__ = ["Teacher"]

#: Examples shown at once to a network that is not trained.
ROWS_AT_ONCE = 1000


class Teacher:
    """What the pretrained network says: asked once for every row if batches say which rows they hold."""

    @torch.no_grad()
    def __init__(self, network: nn.Module, loader: Loader) -> None:
        self._network = network
        self._outputs: Tensor | None = None
        # What it would say of augmented inputs is another thing each time.
        if not isinstance(loader, ResidentBatches) or loader.augment or not loader.n_examples or _by_batch(network):
            return
        inputs = loader.inputs
        with running("distillation"):
            # Not if keeping the outputs takes more memory than the inputs do.
            one = predictions(network(inputs[:1]))
            if one is not None and one.numel() <= inputs[:1].numel():
                self._outputs = torch.cat([_said(network, part) for part in inputs.split(ROWS_AT_ONCE)])

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Tensor | None:
        """What it predicts for a batch; None: it returns several things, of which nobody says which that is."""
        if self._outputs is not None and batch.rows is not None:
            return self._outputs.index_select(0, batch.rows)
        return predictions(called_with(self._network, batch.inputs))


def _said(network: nn.Module, inputs: Tensor) -> Tensor:
    said = predictions(network(inputs))
    if said is None:  # never: the same network said something to one of them
        raise TypeError(type(network))
    return said


def _by_batch(network: nn.Module) -> bool:
    """Whether what it says of an example depends on the others in the batch."""
    norms = (layer for layer in network.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    return any(layer.running_mean is None for layer in norms)
