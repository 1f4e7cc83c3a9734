"""Numbers that are not finite, found at the step that brings them, and by name."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from bayeszip.fitting.batches import Batch, Inputs, tensors_of
from bayeszip.fitting.course import DATA, Course, Problem
from bayeszip.variational.terms import Term

__all__ = ["find_not_finite", "parts_not_finite", "terms_not_finite", "weights_not_finite"]


def find_not_finite(course: Course, parts: Tensor, batch: Batch) -> str | None:
    """What a step's loss or gradients show to be NaN or infinite; None if nothing. To be asked before the step.

    Costs a sum over each gradient; only if that is not finite, a search from the data on.
    """
    problem = course.problem
    total = float(parts.sum()) + sum(float(_sum(gradient)) for _, gradient in _gradients(problem))
    if math.isfinite(total):
        return None
    return (
        _in_data(batch.inputs, "inputs")
        or _in_data(batch.targets, "targets")
        or weights_not_finite(problem.network)
        or terms_not_finite(problem.terms)
        or parts_not_finite(course, parts)
        or next((f"the gradient of {name}" for name, gradient in _gradients(problem) if _is_bad(gradient)), None)
    )


def parts_not_finite(course: Course, parts: Tensor) -> str | None:
    """The parts of the loss, or of its sums, that are not finite."""
    bad = [name for name, value in zip(course.parts, parts.tolist(), strict=True) if not math.isfinite(value)]
    return " and ".join("the data's loss" if name == DATA else f"the {name}" for name in bad) or None


def weights_not_finite(network: nn.Module) -> str | None:
    """The first trained parameter that is not finite."""
    trained = {name: parameter.detach() for name, parameter in network.named_parameters() if parameter.requires_grad}
    # All at once: asking a GPU for each would take longer than the answer.
    finite = [torch.isfinite(parameter).all() for parameter in trained.values()]
    known = torch.stack(finite).tolist() if finite else []
    return next((name for name, is_finite in zip(trained, known, strict=True) if not is_finite), None)


def terms_not_finite(terms: Sequence[Term]) -> str | None:
    """The first parameter of a term that is not finite."""
    return next((name for name, parameter in _of_terms(terms) if _is_bad(parameter)), None)


def _gradients(problem: Problem) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in (*problem.network.named_parameters(), *_of_terms(problem.terms)):
        if parameter.grad is not None:
            yield name, parameter.grad


def _of_terms(terms: Sequence[Term]) -> Iterator[tuple[str, nn.Parameter]]:
    for term in terms:
        yield from ((f"the {term.name}'s {name}", parameter) for name, parameter in term.named_parameters())


def _sum(tensor: Tensor) -> Tensor:
    """At least in float32: finite values of half precision may well have a sum beyond it."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))


def _is_bad(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor.detach()).all())


def _in_data(part: Inputs, name: str) -> str | None:
    for tensor in tensors_of(part):
        if tensor.is_floating_point() and _is_bad(tensor):
            rows = (~torch.isfinite(tensor)).reshape(tensor.shape[0] if tensor.dim() else 1, -1).any(dim=1)
            return f"the data ({name} of {int(rows.sum())} of {len(rows)} examples of the batch)"
    return None
