"""The frozen outcome of fitting: means, log-variances and what the terms leave, as arrays that nothing trains."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from bayeszip.variational import GaussianMixture, MixturePrior, Term, variational_weights

__all__ = ["GaussianTensor", "Posterior"]


@dataclass(frozen=True)
class GaussianTensor:
    """q(w) = N(θ, σ²) for one tensor."""

    theta: np.ndarray
    log_sigma2: np.ndarray


@dataclass(frozen=True)
class Posterior:
    """What is known of every Gaussian weight, by state-dict name, and what terms left behind, by their names."""

    weights: Mapping[str, GaussianTensor]
    left: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, network: nn.Module, terms: Iterable[Term] = ()) -> "Posterior":
        """Freeze a network with variational layers, and the terms it was trained with."""
        weights = {
            weight.name: GaussianTensor(_array(weight.theta), _array(weight.log_sigma2))
            for weight in variational_weights(network)
        }
        left = {term.name: term.frozen() for term in terms}
        return cls(weights, {name: value for name, value in left.items() if value is not None})

    @property
    def mixture(self) -> GaussianMixture | None:
        """The mixture prior, if there was one."""
        return self.left.get(MixturePrior.name)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()
