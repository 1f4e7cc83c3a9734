"""A phase of training: what is minimized, how fast, for how long. All settings, no behavior."""

from dataclasses import dataclass

from bayeszip.errors import RecipeError
from bayeszip.fitting.schedules import SCHEDULES
from bayeszip.settings import at_least, between, check, choice, setting

__all__ = ["Phase"]


@dataclass(frozen=True)
class Phase:
    """One phase. Learning rates are Adam's; defaults are the paper's (table 3)."""

    name: str = setting("phase", "what to call it in progress, results and overrides")
    epochs: int = setting(1, "passes over the training set", at_least(0))
    noise: bool = setting(True, "sample the weights; off: train their means alone")
    tau1: float = setting(0.0, "τ₁, weight of the divergence from the log-uniform prior", at_least(0))
    tau1_ramp: float = setting(0.0, "share of the phase over which τ₁ rises linearly from 0", between(0, 1))
    tau2: float = setting(0.0, "τ₂, weight of the mixture prior and its hyper-prior", at_least(0))
    tau2_ramp: float = setting(0.0, "share of the phase over which τ₂ rises linearly from 0", between(0, 1))
    weight_decay: float = setting(0.0, "ℓ₂ penalty: adds weight_decay·w to the gradient of each weight", at_least(0))
    distillation: float = setting(
        0.0, "share of the loss that asks for the pretrained network's outputs instead of the labels", between(0, 1)
    )
    distillation_temperature: float = setting(2.0, "softens both networks' outputs for distillation", at_least(1))
    rate_theta: float = setting(
        5e-5, "learning rate of the means θ (of all weights where they have no noise)", at_least(0)
    )
    rate_log_sigma2: float = setting(1e-4, "learning rate of log σ²", at_least(0))
    rate_means: float = setting(1e-4, "learning rate of the components' means μ", at_least(0))
    rate_log_precisions: float = setting(1e-4, "learning rate of log λ", at_least(0))
    rate_log_proportions: float = setting(3e-3, "learning rate of log π", at_least(0))
    schedule: str = setting("constant", "how all rates move: constant, or to 0 as linear or cosine", choice(*SCHEDULES))
    reseed: bool = setting(False, "first place the components at quantiles of the weights that would survive")
    std_first: float = setting(
        0.0,
        "hold the components at this standard deviation at the start (0: λ is learnt under its hyper-prior)",
        at_least(0),
    )
    std_last: float = setting(
        0.0, "…and tighten them evenly in ratio to this at the end (0: hold them to the end)", at_least(0)
    )
    compact_every: int = setting(
        0,
        "each so many epochs stop computing rows, columns and channels whose weights are all pruned (0: never)",
        at_least(0),
    )

    def __post_init__(self) -> None:
        check(self, self.name or "phase")
        if self.tau1 and not self.noise:
            raise RecipeError(f"{self.name}: τ₁ weighs the posterior's divergence, which needs noise=true")
