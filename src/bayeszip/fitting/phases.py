"""A phase of training: what is minimized, how fast, for how long. All settings, no behavior."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bayeszip.errors import RecipeError
from bayeszip.schedules import SCHEDULES
from bayeszip.settings import at_least, between, check, choice, from_dict, printable, setting
from bayeszip.variational.divergence import DivergenceSettings
from bayeszip.variational.mixture import MixtureSettings
from bayeszip.variational.terms import Term, known_kind

__all__ = ["Phase"]


@dataclass(frozen=True)
class _Training:
    """What a phase says of the training itself. Defaults are the paper's (table 3)."""

    name: str = setting("phase", "what to call it in progress, results and overrides", printable)
    epochs: int = setting(1, "passes over the training set", at_least(0))
    optimizer: str = setting(
        "adam", "what takes the steps: adam, or sgd with Nesterov's momentum of 0.9", choice("adam", "sgd")
    )
    noise: bool = setting(True, "sample the weights; off: train their means alone")
    weight_decay: float = setting(0.0, "ℓ₂ penalty: adds weight_decay·w to the gradient of each weight", at_least(0))
    distillation: float = setting(
        0.0,
        "share of the loss that asks for the outputs of the teacher (the network as it came, unless another is given) "
        "instead of the labels",
        between(0, 1),
    )
    distillation_temperature: float = setting(
        2.0, "softens what both networks say of classes or switches, for distillation", at_least(1)
    )
    rate_theta: float = setting(
        5e-5, "learning rate of the means θ (of all weights where they have no noise)", at_least(0)
    )
    rate_log_sigma2: float = setting(1e-4, "learning rate of log σ²", at_least(0))
    schedule: str = setting("constant", "how all rates move: constant, or to 0 as linear or cosine", choice(*SCHEDULES))
    compact_every: int = setting(
        0,
        "each so many epochs stop computing rows, columns and channels whose weights are all pruned (0: never)",
        at_least(0),
    )


@dataclass(frozen=True)
class Phase(MixtureSettings, DivergenceSettings, _Training):
    """One phase: its training, and what it says of each term. τ₁ and τ₂ name the terms of the paper."""

    terms: Mapping[str, Any] = field(
        default_factory=dict, metadata={"doc": "further terms by name, set as PHASE.TERM.FIELD", "rule": None}
    )

    def __post_init__(self) -> None:
        check(self, self.name or "phase")
        if self.tau1 and not self.noise:
            raise RecipeError(f"{self.name}: τ₁ weighs the posterior's divergence, which needs noise=true")
        if not isinstance(self.terms, Mapping):
            raise RecipeError(f"{self.name}.terms must be an object of terms by name, not {self.terms!r}")
        object.__setattr__(self, "terms", {name: self._term(name, said) for name, said in self.terms.items()})
        for name, said in self.terms.items():
            kind = known_kind(name)
            if not self.noise and kind.steered and kind.counts(said):
                raise RecipeError(f"{self.name}: the term {name} is a cost of noisy weights, and needs noise=true")

    def _term(self, name: str, said: Any) -> Any:
        """The settings of a further term, from what a recipe says of it."""
        kind = known_kind(name).Settings
        if issubclass(Phase, kind):
            raise RecipeError(f"{self.name}: the settings of {name} are the phase's own, not among its terms")
        return said if isinstance(said, kind) else from_dict(kind, said, f"{self.name}.{name}")

    def settings_of(self, kind: type[Term]) -> Any:
        """What the phase says of a kind of term; None: nothing."""
        return self if isinstance(self, kind.Settings) else self.terms.get(kind.name)
