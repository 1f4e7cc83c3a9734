"""Running statistics of batch norms taken anew: those of a noisy training are not those of the network that is left."""

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bayeszip.fitting.augmentation import Augmentation, Transform, augmented
from bayeszip.fitting.batches import Loader, called_with, on_device, rows_of, running
from bayeszip.fitting.resident import ResidentBatches
from bayeszip.fitting.state import Passes, load_random_state, random_state
from bayeszip.modes import trained_norms, training

__all__ = ["renew_statistics", "renewed_norms", "undisturbed"]

#: Examples are plenty for a mean and a variance.
ENOUGH = 2**15


@torch.no_grad()
def renew_statistics(network: nn.Module, loader: Loader, augment: Augmentation | Transform | None = None) -> None:
    """Replace the statistics of all batch norms by those of the network as it is, over a part of the training data.

    Norms that are frozen, or that the network itself keeps in `eval()`, keep theirs.

    It is shown them as in training, changed by `augment`: those are the statistics that its weights were trained with.

    The loader, and all random numbers, go on afterwards as if nothing had been: the same batches are looked at whenever
    it is asked.
    """
    norms = renewed_norms(network)
    if not norms:
        return
    device, seen = next(network.parameters()).device, 0
    drawing = torch.Generator(device).manual_seed(0) if augment is not None else None
    with training(network), _taken_anew(norms), undisturbed(loader) as batches:
        for batch in on_device(batches, device):
            with running("statistics"):
                called_with(network, augmented(batch.inputs, augment, drawing))
            seen += rows_of(batch.targets)
            if seen >= ENOUGH:
                break


def renewed_norms(network: nn.Module) -> list[_NormBase]:
    """Those whose statistics are taken anew: not frozen, nor kept in `eval()` by the network whatever it is told."""
    with training(network):
        return [layer for layer in trained_norms(network) if layer.training]


@contextlib.contextmanager
def _taken_anew(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Norms begin with no statistics, and take plain averages; those that nothing passes get the old ones back."""
    before = [(layer.momentum, {name: buffer.clone() for name, buffer in layer.named_buffers()}) for layer in norms]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None  # a plain average
    try:
        yield
    finally:
        for layer, (momentum, buffers) in zip(norms, before, strict=True):
            layer.momentum = momentum
            if layer.num_batches_tracked is None or not layer.num_batches_tracked:
                for name, buffer in layer.named_buffers():
                    buffer.copy_(buffers[name])


@contextlib.contextmanager
def undisturbed(loader: Loader) -> Iterator[Loader]:
    """The same batches, whenever they are looked at; afterwards the loader and all random numbers go on as before.

    Of batches that lie on a device these are in an order of their own: rows may lie sorted by class, and the order of
    the training is not to be given away.
    """
    if isinstance(loader, ResidentBatches):
        size = max(1, min(loader.batch_size, loader.n_examples))
        loader = ResidentBatches(
            loader.inputs, loader.targets, size, shuffle=True, augment=loader.augment, drop_last=True
        )
        generators = []
    else:
        generators = Passes(loader).generators
    before = random_state(*generators)
    for generator in (torch.default_generator, *generators):
        generator.manual_seed(0)
    # The user's data sets may draw from these two.
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    try:
        yield loader
    finally:
        load_random_state(before, *generators)
