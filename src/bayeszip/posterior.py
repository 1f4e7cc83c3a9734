"""The frozen outcome of fitting: means, log-variances and the mixture, as numpy arrays that nothing trains any more."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from bayeszip.variational import MixturePrior, variational_weights

__all__ = ["GaussianTensor", "Mixture", "Posterior"]


@dataclass(frozen=True)
class GaussianTensor:
    """q(w) = N(θ, σ²) for one tensor."""

    theta: np.ndarray
    log_sigma2: np.ndarray


@dataclass(frozen=True)
class Mixture:
    """GM_ψ: means, log-precisions and log-proportions of K components."""

    means: np.ndarray
    log_precisions: np.ndarray
    log_proportions: np.ndarray

    def __len__(self) -> int:
        return len(self.means)

    def log_joint(self, values: np.ndarray) -> np.ndarray:
        """log π_k + log N(x | μ_k, λ_k⁻¹) but for a constant, values × components."""
        constants = self.log_proportions + 0.5 * self.log_precisions
        return constants - 0.5 * np.exp(self.log_precisions) * (values[:, None] - self.means) ** 2


@dataclass(frozen=True)
class Posterior:
    """What is known of every Gaussian weight, by state-dict name, and the mixture prior if there was one.

    In `mixture`, component 0 is the one pinned at zero.
    """

    weights: Mapping[str, GaussianTensor]
    mixture: Mixture | None = None

    @classmethod
    def of(cls, network: nn.Module, prior: MixturePrior | None = None) -> "Posterior":
        """Freeze a network with variational layers."""
        weights = {
            weight.name: GaussianTensor(_array(weight.theta), _array(weight.log_sigma2))
            for weight in variational_weights(network)
        }
        mixture = None if prior is None else Mixture(*(_array(values) for values in prior.components()))
        return cls(weights, mixture)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()
