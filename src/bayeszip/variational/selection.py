"""Which tensors of a network are compressed, and how strongly: patterns on their names."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bayeszip.errors import ModelUsageError, RecipeError, shown
from bayeszip.settings import check, positive, setting

__all__ = ["Selection", "Strength"]


@dataclass(frozen=True)
class Strength:
    """How strongly what a pattern names is pruned."""

    pattern: str = setting("*", "names of parameters or modules, as a shell matches files: encoder.*, *.bias, fc1")
    factor: float = setting(1.0, "factor on τ₁ for them", positive)

    def __post_init__(self) -> None:
        check(self, "layers.strengths")


@dataclass(frozen=True)
class Selection:
    """Which tensors become Gaussian, and how strongly each is pruned.

    A pattern matches a parameter by its name or by that of a module it lies in: `encoder.*`, `*.bias`, `fc1`. Of
    several strengths that match one the last counts.

    >>> strength_of = Selection(exclude=("head",), strengths=(Strength("*.bias", 0.5),)).among(["fc.bias", "head.bias"])
    >>> strength_of("fc.bias"), strength_of("head.bias")
    (0.5, None)
    """

    #: Only what one of these matches; none: everything.
    include: tuple[str, ...] = ()
    #: Nothing that one of these matches.
    exclude: tuple[str, ...] = ()
    strengths: tuple[Strength, ...] = ()

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if not isinstance(patterns, tuple) or not all(isinstance(each, str) and each for each in patterns):
                raise RecipeError(f"layers.{name} must be patterns on names, such as encoder.*, not {patterns!r}")

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude or self.strengths)

    def among(self, names: Sequence[str]) -> Callable[..., float | None]:
        """The strength of each of these parameters, or None: it is not to be compressed.

        A parameter that several modules hold is asked for by all its names: one that is included will do, and so will
        one that is excluded.

        Raises:
            ModelUsageError: a pattern matches none of them, so that it must be a mistake.
        """
        for pattern in (*self.include, *self.exclude, *(each.pattern for each in self.strengths)):
            if not any(_matches(name, pattern) for name in names):
                known = ", ".join(shown(name)[1:-1] for name in names[:5])
                said = f"no parameter or module is called {shown(pattern)}; there are, for example, {known}"
                raise ModelUsageError(said)

        def strength_of(*names: str) -> float | None:
            left_out = self.include and not any(_match(names, pattern) for pattern in self.include)
            if left_out or any(_match(names, pattern) for pattern in self.exclude):
                return None
            return next((each.factor for each in reversed(self.strengths) if _match(names, each.pattern)), 1.0)

        return strength_of


def _match(names: Iterable[str], pattern: str) -> bool:
    return any(_matches(name, pattern) for name in names)


def _matches(name: str, pattern: str) -> bool:
    """Whether the name, or that of a module around it, is as the pattern says."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
