"""Numbers that are not finite, found at the step that brings them, and by name."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from bayeszip.fitting.batches import Inputs
from bayeszip.fitting.steps import PARTS, Problem

__all__ = ["find_not_finite", "parts_not_finite", "weights_not_finite"]


def find_not_finite(problem: Problem, parts: Tensor, inputs: Inputs, targets: Inputs) -> str | None:
    """What a step's loss or gradients show to be NaN or infinite; None if nothing. To be asked before Adam's step.

    Costs a sum over each gradient; only if that is not finite, a search from the data on.
    """
    total = float(parts.sum()) + sum(float(_sum(gradient)) for _, gradient in _gradients(problem))
    if math.isfinite(total):
        return None
    return (
        _in_data(inputs, "inputs")
        or _in_data(targets, "targets")
        or weights_not_finite(problem.network)
        or _in_mixture(problem)
        or parts_not_finite(parts)
        or next((f"the gradient of {name}" for name, gradient in _gradients(problem) if _is_bad(gradient)), None)
    )


def parts_not_finite(parts: Tensor) -> str | None:
    """The parts of the loss, or of its sums, that are not finite."""
    bad = [name for name, value in zip(PARTS, parts.tolist(), strict=True) if not math.isfinite(value)]
    return " and ".join(bad) or None


def weights_not_finite(network: nn.Module) -> str | None:
    """The first trained parameter that is not finite."""
    trained = {name: parameter.detach() for name, parameter in network.named_parameters() if parameter.requires_grad}
    # All at once: asking a GPU for each would take longer than the answer.
    finite = [torch.isfinite(parameter).all() for parameter in trained.values()]
    known = torch.stack(finite).tolist() if finite else []
    return next((name for name, is_finite in zip(trained, known, strict=True) if not is_finite), None)


def _gradients(problem: Problem) -> Iterator[tuple[str, Tensor]]:
    named: Iterable[tuple[str, nn.Parameter]] = problem.network.named_parameters()
    yield from ((name, parameter.grad) for name, parameter in named if parameter.grad is not None)
    if problem.prior is not None:
        mixture = problem.prior.named_parameters()
        yield from ((f"the mixture's {name}", part.grad) for name, part in mixture if part.grad is not None)


def _sum(tensor: Tensor) -> Tensor:
    """At least in float32: finite values of half precision may well have a sum beyond it."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))


def _is_bad(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor.detach()).all())


def _in_data(part: Inputs, name: str) -> str | None:
    for tensor in (part,) if isinstance(part, Tensor) else part:
        if tensor.is_floating_point() and _is_bad(tensor):
            rows = (~torch.isfinite(tensor)).reshape(tensor.shape[0] if tensor.dim() else 1, -1).any(dim=1)
            return f"the data ({name} of {int(rows.sum())} of {len(rows)} examples of the batch)"
    return None


def _in_mixture(problem: Problem) -> str | None:
    if problem.prior is None:
        return None
    return next((f"the mixture's {name}" for name, part in problem.prior.named_parameters() if _is_bad(part)), None)
