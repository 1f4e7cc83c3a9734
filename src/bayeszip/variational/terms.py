"""What is added to the data's loss: terms, each an object in a file of its own.

    loss = E_q[−log p(y|x,w)] + (1/N) Σ_terms τ · cost(weights)

A term knows its own settings in a phase, and nothing else of a training: what it trains and at which rates, what it
schedules, what it does when a phase begins, its cost and gradients, which weights it holds for dead, and what of it is
frozen when the training is over. Whatever lists the parts of a loss (progress, records, reports) takes them by name.
docs/extending.md walks through a new one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bayeszip.errors import RecipeError
from bayeszip.variational.layers import VariationalWeight

__all__ = ["KINDS", "Term", "Trained", "known_kind"]

#: Every kind of term by its name; a subclass of `Term` enters itself.
KINDS: "dict[str, type[Term]]" = {}


class Trained(NamedTuple):
    """A parameter of a term, by name, and the field of the term's settings that holds its learning rate."""

    name: str
    parameter: nn.Parameter
    rate: str


class Term(nn.Module):
    """One term of the objective. Abstract: subclasses say at least their names, settings and cost.

    Parameters and buffers of this module are trained, saved and resumed with the network. `settings` below is always
    an instance of `Settings`: what one phase says of the term.
    """

    #: How settings, progress and records call it.
    name: ClassVar[str] = ""
    #: The names of the parts into which its cost falls.
    parts: ClassVar[tuple[str, ...]] = ()
    #: A frozen dataclass: what a phase says of it.
    Settings: ClassVar[type[Any]]
    #: Whether a target of size or accuracy turns its weight.
    steered: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # One that is called like its parent is another way to do the same.
        if "name" in vars(cls):
            cls.parts = cls.parts or (cls.name,)
            KINDS[cls.name] = cls

    @classmethod
    def start(cls, network: nn.Module, start: Any) -> "Term":
        """The term at its start values.

        Args:
            network: with Gaussian weights, as it was pretrained.
            start: what the recipe says under the term's name, if anything.
        """
        return cls()

    @classmethod
    def counts(cls, settings: Any) -> bool:
        """Whether it takes part in a phase with these settings."""
        raise NotImplementedError

    def dials(self, settings: Any, done: float) -> tuple[float, ...]:
        """What it schedules, when the share `done` of the phase is over: τ, then what `turn` takes."""
        raise NotImplementedError

    def enter(self, settings: Any) -> None:
        """Switch to a phase, at its start or when a run is taken up in the middle of it."""

    def begin(self, settings: Any, weights: Sequence[VariationalWeight]) -> None:
        """What happens once, before the first step of a phase."""

    def renew(
        self,
        settings: Any,
        epoch: int,
        weights: Sequence[VariationalWeight],
        keeps: Callable[[VariationalWeight], Tensor],
    ) -> None:
        """What happens before each epoch of a phase, the first included.

        Args:
            epoch: how many of the phase are over.
            keeps: which weights of a tensor no term in force holds for dead.
        """

    def turn(self, *dials: float | Tensor) -> None:
        """Take up what is scheduled besides τ, before each step."""

    def trained(self) -> Iterator[Trained]:
        """What it trains; by default every parameter, at the rate that the settings call `rate_NAME`."""
        for name, parameter in self.named_parameters():
            if parameter.numel():
                yield Trained(name, parameter, f"rate_{name}")

    def cost(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        """τ × its parts, float32 scalars, differentiable in the weights and in what the term trains."""
        raise NotImplementedError

    def add_gradients(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        """`cost`, detached, its gradients added to those there are; terms override it where fewer passes do."""
        parts = self.cost(weights, tau)
        torch.autograd.backward([part for part in parts if part.requires_grad])
        return tuple(part.detach() for part in parts)

    def keeps(self, weight: VariationalWeight) -> Tensor | None:
        """Which weights of a tensor it does not hold for dead; None: it does not judge."""
        return None

    def frozen(self) -> Any:
        """What quantization needs of it, as a frozen value; None: nothing."""
        return None


def known_kind(name: str) -> type[Term]:
    """The kind of term called `name`.

    Raises:
        RecipeError: nobody knows it.
    """
    if name not in KINDS:
        raise RecipeError(f"there is no term {name!r}; known: {', '.join(KINDS)}, or import the module that defines it")
    kind = KINDS[name]
    if not dataclasses.is_dataclass(kind.Settings):
        raise RecipeError(f"the settings of the term {name!r} must be a frozen dataclass")
    return kind
