"""The terms together, by name, and the one place that divides by N.

    loss = E_q[−log p(y|x,w)] + (1/N) · { τ₁ Σᵢ KL(θᵢ, σᵢ²) − τ₂ [ Σᵢ log GM_ψ(θᵢ) + Σ_k log Gamma(λ_k | a, b) ] + … }

The objective of app. A per example, to be minimized; the sign of log GM is corrected (eq. 2 is printed with +, see
docs/notation.md). The first term is the mean over a minibatch of what the training loop computes; N is the number of
training examples. What stands in braces is a list of terms, which a recipe may extend.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayeszip.variational.layers import VariationalWeight
from bayeszip.variational.terms import Term

__all__ = ["Weighed", "add_gradients", "part_names", "regularizer"]


class Weighed(NamedTuple):
    """A term and its weight τ at one step: a number, or a tensor on the device for a recorded step to read."""

    term: Term
    tau: float | Tensor


def part_names(terms: Sequence[Term]) -> tuple[str, ...]:
    """The parts of the loss that terms add, in order."""
    return tuple(part for term in terms for part in term.parts)


def regularizer(terms: Sequence[Weighed], weights: Sequence[VariationalWeight], n_data: int) -> dict[str, Tensor]:
    """(1/N) Σ τ · cost in its parts by name: nats per training example, float32 scalars with gradients.

    Args:
        terms: those that take part; one whose τ is the number 0 is not evaluated.
        weights: the Gaussian weights, each once.
        n_data: N.
    """
    with torch.autocast(weights[0].theta.device.type, enabled=False):
        return _parts(terms, weights, n_data, lambda term, tau: term.cost(weights, tau))


def add_gradients(terms: Sequence[Weighed], weights: Sequence[VariationalWeight], n_data: int) -> dict[str, Tensor]:
    """The parts of `regularizer`, detached, their gradients added to those of the parameters.

    Terms do so in fewer passes than autograd would take.
    """
    return _parts(terms, weights, n_data, lambda term, tau: term.add_gradients(weights, tau))


def _parts(
    terms: Sequence[Weighed],
    weights: Sequence[VariationalWeight],
    n_data: int,
    evaluate: Callable[[Term, float | Tensor], tuple[Tensor, ...]],
) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    for term, tau in terms:
        # A tensor always counts: asking a GPU for its value would make it wait.
        if isinstance(tau, Tensor) or tau != 0:
            values = evaluate(term, tau / n_data)
        else:
            values = (weights[0].theta.new_zeros((), dtype=torch.float32),) * len(term.parts)
        parts |= zip(term.parts, values, strict=True)
    return parts
