"""The pretrained network as a teacher: what it says about each batch, for distillation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.errors import DataError
from bayeszip.fitting.batches import Batch, Inputs, Loader, called_with, running
from bayeszip.fitting.evaluation import class_dim
from bayeszip.fitting.resident import ResidentBatches

__all__ = ["Teacher", "imitation"]

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
            if network(inputs[:1]).numel() <= inputs[:1].numel():
                self._outputs = torch.cat([network(part) for part in inputs.split(ROWS_AT_ONCE)])

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Tensor:
        """Its outputs for a batch."""
        if self._outputs is not None and batch.rows is not None:
            return self._outputs.index_select(0, batch.rows)
        outputs = called_with(self._network, batch.inputs)
        if not isinstance(outputs, Tensor):
            raise DataError(
                f"distillation needs one tensor of outputs, not {type(outputs).__name__}; set all.distillation=0"
            )
        return outputs


def _by_batch(network: nn.Module) -> bool:
    """Whether what it says of an example depends on the others in the batch."""
    norms = (layer for layer in network.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    return any(layer.running_mean is None for layer in norms)


def imitation(outputs: Tensor, taught: Tensor, targets: Inputs, temperature: float) -> Tensor:
    """Cross-entropy from the teacher's softened outputs (Hinton et al. 2015)."""
    dim = class_dim(outputs, targets) or -1
    # One row an output: for `cross_entropy` the classes of larger tensors would lie in their second dimension.
    ours, theirs = (logits.movedim(dim, -1).flatten(0, -2) / temperature for logits in (outputs, taught))
    # Scaled by the squared temperature so that gradients keep their size.
    return F.cross_entropy(ours, F.softmax(theirs, dim=-1)) * temperature**2
