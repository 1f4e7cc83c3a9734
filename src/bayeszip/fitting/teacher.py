"""Whom a network learns from, the pretrained one or a better one: what it says about each batch, for distillation."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayeszip.errors import DataError, ModelError, RecipeError
from bayeszip.fitting.batches import (
    Batch,
    ByName,
    ByPlace,
    Inputs,
    Loader,
    called_with,
    mapped,
    named_arguments,
    on_device,
    running,
    takes,
    tensors_of,
)
from bayeszip.fitting.likelihood import Likelihood
from bayeszip.fitting.outputs import predictions, shape_in_words
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.resident import ResidentBatches
from bayeszip.fitting.statistics import undisturbed
from bayeszip.graph.storable import copied, parameter_count, unwrapped
from bayeszip.modes import evaluating

__all__ = ["Teacher", "check_alike", "check_imitated", "in_words", "known_teacher"]

#: Examples shown at once to a network that is not trained.
ROWS_AT_ONCE = 1000


class Teacher:
    """What a network says: asked once for every row if batches say which rows they hold."""

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


@torch.no_grad()
def known_teacher(
    given: nn.Module | None, network: nn.Module, phases: Sequence[Phase], inputs: Inputs | None
) -> nn.Module | None:
    """A copy of the teacher that a caller gave, where `network` is; None: there is none but the network as it came.

    Args:
        inputs: of `network`, in the form that batches have, to see that both say the same kind of thing; None: nobody
            has any yet.

    Raises:
        RecipeError: no phase would ask it, or it is no network.
        ModelError: what it says can't be compared with what `network` says.
        TrainingError: it can't be called with them.
    """
    if given is None:
        return None
    if not isinstance(given, nn.Module):
        raise RecipeError(f"teacher must be a network, an nn.Module, not {given!r}")
    if not any(phase.distillation and phase.epochs for phase in phases):
        raise RecipeError(
            "no phase of the recipe asks a teacher; say how much of the loss is to be learnt from it, "
            "all.distillation=0.5, or leave it out"
        )
    device = next(network.parameters()).device
    teacher = _called_alike(copied(unwrapped(given)), network, inputs).to(device).eval().requires_grad_(False)
    if inputs is not None:
        shown = mapped(inputs, lambda tensor: tensor.to(device))
        with running("the teacher"):
            taught = predictions(called_with(teacher, shown))
        with evaluating(network), running("the first batch"):
            own = predictions(called_with(network, shown))
        check_alike(taught, own)
    return teacher


def _called_alike(teacher: nn.Module, network: nn.Module, inputs: Inputs | None) -> nn.Module:
    """The teacher, to be called as the network is: it may have other names for its arguments, or another order."""
    names = every = named_arguments(network)
    if isinstance(inputs, dict):
        names = tuple(name for name in every if name in inputs) or every
    elif inputs is not None:
        names = every[: len(tensors_of(inputs))]
    if not takes(teacher, **dict.fromkeys(inputs if isinstance(inputs, dict) else names)):
        return ByPlace(teacher, every)
    own = named_arguments(teacher)
    # Whoever takes any name passes it on, perhaps to one that doesn't know it.
    knows = set(names) <= set(own)
    # Other calls may give more than these inputs.
    in_place = all(own.index(name) == place for place, name in enumerate(every) if name in own)
    return teacher if (in_place or not knows) and takes(teacher, *names) else ByName(teacher, every)


def check_alike(taught: Tensor | None, own: Tensor | None) -> None:
    """Refuse a teacher that says something else than the network does to the same inputs.

    Raises:
        ModelError: states both, or that nobody knows which of the network's tensors is to be like the teacher's.
    """
    if own is None:
        raise ModelError(
            "the network answers several tensors, of which nobody says which is to imitate the teacher: return it "
            "under the name logits, or leave the teacher out"
        )
    if taught is None or taught.shape != own.shape:
        said = "several tensors" if taught is None else shape_in_words(taught)
        raise ModelError(
            f"the teacher answers {said} where the network answers {shape_in_words(own)}; one that can be imitated has "
            "the same inputs and outputs"
        )


@torch.no_grad()
def check_imitated(teacher: nn.Module, network: nn.Module, likelihood: Likelihood, loader: Loader) -> None:
    """Refuse a teacher that nothing could be learnt from under this loss, by a first batch.

    Raises:
        RecipeError: the loss gives no way to imitate it.
        ModelError: it answers NaN, or one of both something else than probabilities, where the loss takes these.
        DataError: the loss is not finite, so that nobody knows what it weighs.
    """
    device = next(network.parameters()).device
    with undisturbed(loader) as batches:
        batch = next(on_device(batches, device), None)
    if batch is None:
        return  # whoever trains will say so
    with evaluating(network), running("the teacher"):
        outputs, taught = called_with(network, batch.inputs), predictions(called_with(teacher, batch.inputs))
    own = predictions(outputs)
    check_alike(taught, own)
    if taught is None or own is None:  # never: these are no like of anything
        raise TypeError(type(teacher))
    # Infinite ones may be meant, as of classes that are masked.
    if bool(taught.isnan().any()):
        raise ModelError(
            "the teacher answers NaN: check its weights, and whether it takes this data as the network does"
        )
    for whose, said in (("network", own), ("teacher", taught)):
        if likelihood.kind == "probabilities" and not bool(((said >= 0) & (said <= 1)).all()):
            raise ModelError(
                f"the {whose} answers numbers outside of [0, 1], and the loss takes probabilities: let it end in a "
                "sigmoid, or train both on logits (loss=bce, nn.BCEWithLogitsLoss)"
            )
    with running("the first batch"):
        loss = float(likelihood.plain(outputs, batch.targets))
    if not math.isfinite(loss):
        raise DataError(f"the loss of the first batch is {loss:g}: check the data, the network and the loss for NaN")
    likelihood.needed_imitation(outputs, taught, batch.targets, 1.0)


def in_words(teacher: nn.Module | None) -> str | None:
    """What a report says of it."""
    if teacher is None:
        return None
    own = teacher.network if isinstance(teacher, ByName | ByPlace) else teacher
    return f"{type(own).__name__}, {parameter_count(own):,} parameters"
