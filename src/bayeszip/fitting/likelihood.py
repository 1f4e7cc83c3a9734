"""The data's loss as a likelihood: the mean loss of any task in nats per example, so that τ₁ weighs the same.

    classes    cross-entropy, a nat a nat        −log p = D · ℓ          D: targets of an example (pixels, tokens)
                                                                         that the loss doesn't ignore
    switches   binary cross-entropy              −log p = D · ℓ
    squared    noise of variance s² = E[ℓ]       −log p = D · ℓ / (2 s²) + const
    absolute   noise of scale b = E[ℓ]           −log p = D · ℓ / b + const

s² and b are estimated: the mean loss of the pretrained network on data it was not trained on, where there are any. So a
loss of 0.03 in square meters weighs what 30,000 in square millimeters does, and the network is held to the accuracy it
came with: a loss that is larger by a tenth costs D/20 nats an example, whatever its unit.

What the teacher of a distillation said is imitated in the same way: classes and switches by softened cross-entropy
(Hinton et al. 2015), probabilities by their cross-entropy, anything else by its squared distance in units of the same
noise; where none of these makes sense, not at all, which a teacher that somebody gave is refused for.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.errors import DataError, RecipeError
from bayeszip.fitting.batches import Loader, called_with, on_device, rows_of, running
from bayeszip.fitting.outputs import class_dim, predictions, shape_in_words
from bayeszip.fitting.statistics import undisturbed
from bayeszip.modes import evaluating

__all__ = ["LOSSES", "Likelihood", "Loss"]

Loss = Callable[[Any, Any], Tensor]

#: What the command line and `loss=` take by name.
LOSSES: dict[str, Loss] = {
    "cross-entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}

#: Which likelihood torch's own losses stand for; both forms of each.
_KINDS: dict[Any, str] = {
    F.cross_entropy: "classes",
    F.nll_loss: "classes",
    F.binary_cross_entropy_with_logits: "switches",
    F.binary_cross_entropy: "probabilities",
    F.mse_loss: "squared",
    F.huber_loss: "squared",
    F.smooth_l1_loss: "squared",
    F.l1_loss: "absolute",
    nn.CrossEntropyLoss: "classes",
    nn.NLLLoss: "classes",
    nn.BCEWithLogitsLoss: "switches",
    nn.BCELoss: "probabilities",
    nn.MSELoss: "squared",
    nn.HuberLoss: "squared",
    nn.SmoothL1Loss: "squared",
    nn.L1Loss: "absolute",
}

#: Kinds that are log-likelihoods as they are.
NATS = ("classes", "switches", "probabilities")
#: Batches that noise is estimated from.
BATCHES = 64
#: A network that explains all but this share of its targets' variance is taken for exact.
EXACT = 1e-4
#: The class that torch's losses ignore unless they are told another.
IGNORED = -100
#: Below this a mean loss is taken for zero, whatever its unit: float32 has hardly anything left there.
LEAST = 1e-30


@dataclass(frozen=True)
class Likelihood:
    """A mean loss, and what it is in nats.

    Args:
        function: of outputs and targets; torch's own take what the outputs predict, others the outputs as they are.
        kind: classes, switches (logits), probabilities (of switches), squared, absolute, or unknown.
        weight: nats per element of the targets in units of the loss; None: the loss counts as it is.
        closeness: nats per element in units of a squared distance to the teacher; None: there is none to speak of.
    """

    function: Loss
    kind: str = "unknown"
    weight: float | None = None
    closeness: float | None = None

    @classmethod
    def of(cls, loss: "str | Loss | Likelihood") -> "Likelihood":
        """The loss as it is, and which kind it is.

        Raises:
            RecipeError: there is none of this name, or it is no mean.
        """
        if isinstance(loss, Likelihood):
            return loss
        if isinstance(loss, str):
            if loss not in LOSSES:
                raise RecipeError(f"there is no loss {loss!r}; known: {', '.join(LOSSES)}, or give a function")
            return cls.of(LOSSES[loss])
        if not callable(loss):
            raise RecipeError(f"loss must be a function of outputs and targets, not {type(loss).__name__}")
        if isinstance(loss, type):
            raise RecipeError(f"loss must be a function of outputs and targets, not a class: {loss.__name__}()")
        reduction = getattr(loss, "reduction", "mean")
        if isinstance(loss, nn.Module) and reduction != "mean":
            raise RecipeError(f"{type(loss).__name__}(reduction={reduction!r}): a loss must be a mean over the batch")
        own = type(loss) if isinstance(loss, nn.Module) else loss
        # By identity: a callable of the caller's, such as a dataclass, need not be hashable.
        kind = next((kind for known, kind in _KINDS.items() if known is own), "unknown")
        return cls(loss, kind, closeness=1.0 if kind in ("squared", "absolute") else None)

    def plain(self, outputs: Any, targets: Any) -> Tensor:
        """The loss as its owner knows it.

        Raises:
            DataError: it is not one number, nobody knows which of the outputs it is about, or shapes don't fit.
        """
        if self.kind == "unknown":
            return _one_number(self.function(outputs, targets))
        found = predictions(outputs)
        if found is None:
            raise DataError(
                f"the network returns {type(outputs).__name__}, of which the loss can't know what to take; give "
                "loss=function(outputs, targets), or return it under the name logits"
            )
        if self.kind in ("squared", "absolute"):
            _check_alike(found, targets)
        return _one_number(self.function(found, targets))

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Nats per example, without what does not depend on the network.

        Raises:
            DataError: it can't be differentiated, though outputs can.
        """
        loss, found = self.plain(outputs, targets), predictions(outputs)
        if found is not None and found.requires_grad and not loss.requires_grad:
            raise DataError(
                "the loss doesn't depend on the network's weights: was it computed from detached outputs, or made a "
                "number on the way?"
            )
        if self.weight is None:
            return loss
        factor = self.weight * self._elements(outputs, targets)
        return loss if isinstance(factor, float) and factor == 1 else loss * factor

    def imitation(self, outputs: Any, taught: Tensor, targets: Any, temperature: float) -> Tensor | None:
        """The cost of saying something else than the teacher did, in the unit of the loss; None: that has none."""
        ours = predictions(outputs)
        if ours is None or ours.shape != taught.shape:
            return None
        count = 1.0 if self.weight is None else self._elements(outputs, targets)
        dim = self._class_dim(ours, targets)
        if dim is not None:
            return count * _softened(ours, taught, dim, temperature)
        if self.kind == "switches":
            softened = torch.sigmoid(taught / temperature)
            return count * F.binary_cross_entropy_with_logits(ours / temperature, softened) * temperature**2
        if self.kind == "probabilities":
            return count * F.binary_cross_entropy(ours, taught)
        if self.closeness is None:
            return None
        return count * self.closeness * F.mse_loss(ours, taught)

    def needed_imitation(self, outputs: Any, taught: Tensor, targets: Any, temperature: float) -> Tensor:
        """The same, for a teacher that somebody gave, who would not want it passed over.

        Raises:
            RecipeError: there is no such cost; names the loss.
        """
        cost = self.imitation(outputs, taught, targets, temperature)
        if cost is None:
            name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
            raise RecipeError(
                f"a teacher can't be imitated under the loss {name}: {self._why_not(outputs, targets)}, or name "
                "another loss (cross-entropy, mse, mae, bce), or leave the teacher out"
            )
        return cost

    def _why_not(self, outputs: Any, targets: Any) -> str:
        """Why nothing is imitated, and what to do."""
        ours = predictions(outputs)
        is_regression = ours is not None and isinstance(targets, Tensor) and ours.shape == targets.shape
        if is_regression and self.weight is None:
            return "nobody measured what the network leaves unexplained. Call measure_noise() before the first step"
        if is_regression:
            return (
                "it is below 0, so that nobody knows which distance from a teacher is a large one. Add a constant that "
                "keeps it above 0"
            )
        held = "targets that are not given" if targets is None else f"targets {_in_words(targets)}"
        return (
            f"outputs {_in_words(ours)} and {held} are neither classes nor numbers to compare. Give targets of the "
            "outputs' shape, as floats, or classes"
        )

    @torch.no_grad()
    def estimated(self, network: nn.Module, loader: Loader) -> "Likelihood":
        """With the noise that `network` leaves on this data, as its unit; what is in nats already has none."""
        if self.kind in NATS:
            return replace(self, weight=1.0, closeness=None)
        device, totals = next(network.parameters()).device, _Totals()
        with evaluating(network), undisturbed(loader) as batches:
            for batch in on_device(islice(batches, BATCHES), device):
                with running("the noise of the data"):
                    outputs = called_with(network, batch.inputs)
                    totals.add(float(self.plain(outputs, batch.targets)), outputs, batch.targets)
        return self._with(totals)

    def _with(self, totals: "_Totals") -> "Likelihood":
        loss = totals.loss
        if not math.isfinite(loss):
            # Whoever trains it will say what is wrong with it.
            return self
        if totals.classes or loss < 0:
            return replace(self, weight=1.0, closeness=None)
        floor = max(EXACT * totals.variance, LEAST)
        noise = max(totals.distance, floor)
        closeness = 1 / (2 * noise) if totals.is_regression else None
        if self.kind == "absolute":
            return replace(self, weight=1 / max(loss, math.sqrt(floor)), closeness=closeness)
        return replace(self, weight=1 / (2 * max(loss, floor)), closeness=closeness)

    def _class_dim(self, ours: Tensor, targets: Any) -> int | None:
        if self.kind not in ("classes", "unknown"):
            return None
        if targets is None and self.kind == "classes":
            # Images have their classes in the second dimension.
            return 1 if ours.dim() > 3 else -1
        dim = class_dim(ours, targets)
        if dim is not None or not isinstance(targets, Tensor):
            return dim
        if ours.shape == targets.shape and self.kind == "classes" and ours.dim() > 1:
            # Targets that are shares of classes themselves.
            return 1
        # Classes of a sequence in one row.
        rows = class_dim(ours.flatten(0, -2), targets.flatten()) if ours.dim() > 1 else None
        return None if rows is None else -1

    def _elements(self, outputs: Any, targets: Any) -> float | Tensor:
        """D: how many things an example has to predict, on average over the batch.

        Where targets are classes those count that the loss does not ignore, since its mean is over these alone. Then
        it is a tensor: a GPU is not asked for the number. Without targets it is as many as there are outputs.
        """
        ours = predictions(outputs)
        if targets is None and ours is not None:
            dim = self._class_dim(ours, None)
            return ours.numel() / max(1, len(ours)) / (1 if dim is None else ours.shape[dim])
        tensors, rows = [targets] if isinstance(targets, Tensor) else _values(targets), max(1, rows_of(targets))
        if self.kind in ("classes", "unknown") and all(map(_are_classes, tensors)):
            ignored = getattr(self.function, "ignore_index", IGNORED)
            # As int64, since −100 is another number among bytes.
            return torch.stack([(tensor.long() != ignored).sum() for tensor in tensors]).sum() / rows
        count = sum(tensor.numel() for tensor in tensors) / rows
        if self.kind == "classes" and ours is not None and len(tensors) == 1 and ours.shape == tensors[0].shape:
            return count / ours.shape[1]
        return count


def _are_classes(targets: Tensor) -> bool:
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def _check_alike(outputs: Tensor, targets: Any) -> None:
    """Refuse what torch would spread out: each output would be held against the targets of all examples."""
    if isinstance(targets, Tensor) and targets.shape != outputs.shape:
        raise DataError(
            f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}, but a loss of numbers "
            "holds one against the other; bring them to one shape (targets.unsqueeze(1)?), or give a loss of your own"
        )


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        told = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise DataError(f"the loss must be one number, a mean over the batch, as a tensor; it is {told}")
    return loss


class _Totals:
    """What is summed up over a few batches."""

    def __init__(self) -> None:
        self._rows = 0
        self._loss = self._distance = self._square = self._sum = 0.0
        self._compared = 0
        self.classes = False

    def add(self, loss: float, outputs: Any, targets: Any) -> None:
        rows, ours = rows_of(targets), predictions(outputs)
        self._rows, self._loss = self._rows + rows, self._loss + rows * loss
        self.classes |= isinstance(targets, Tensor) and not targets.is_floating_point()
        if ours is not None and isinstance(targets, Tensor) and ours.shape == targets.shape:
            right = targets.double()
            self._compared += right.numel()
            self._distance += float((ours.double() - right).square().sum())
            self._sum, self._square = self._sum + float(right.sum()), self._square + float(right.square().sum())

    @property
    def loss(self) -> float:
        if not self._rows:
            raise DataError("the data gave no batch; check the loader")
        return self._loss / self._rows

    @property
    def is_regression(self) -> bool:
        """Whether outputs and targets can be compared number by number."""
        return self._compared > 0

    @property
    def distance(self) -> float:
        return self._distance / max(1, self._compared)

    @property
    def variance(self) -> float:
        """Of the targets."""
        count = max(1, self._compared)
        return max(0.0, self._square / count - (self._sum / count) ** 2)


def _softened(ours: Tensor, theirs: Tensor, dim: int, temperature: float) -> Tensor:
    # One row an output: for `cross_entropy` the classes of larger tensors would lie in their second dimension.
    ours, theirs = (logits.movedim(dim, -1).flatten(0, -2) / temperature for logits in (ours, theirs))
    # Scaled by the squared temperature so that gradients keep their size.
    return F.cross_entropy(ours, F.softmax(theirs, dim=-1)) * temperature**2


def _in_words(part: Any) -> str:
    shape = shape_in_words(part)
    return f"{shape} of {str(part.dtype)[6:]}" if isinstance(part, Tensor) else shape


def _values(part: Any) -> list[Tensor]:
    return list(part.values()) if isinstance(part, Mapping) else list(part)
