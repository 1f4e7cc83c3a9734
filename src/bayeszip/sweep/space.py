"""What a sweep varies: settings of a recipe, each over a range or a list of values."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bayeszip.errors import RecipeError
from bayeszip.recipe import Recipe

if TYPE_CHECKING:
    import optuna

__all__ = ["Dimension", "grid_of", "parse_dimension", "parse_dimensions"]


@dataclass(frozen=True)
class Dimension:
    """One setting and the values it may take: one of `choices`, or any between `low` and `high`."""

    field: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    #: Whole numbers only.
    whole: bool = False

    def suggest(self, trial: "optuna.Trial") -> str:
        """The value that a trial takes, as `--set` would be given it."""
        if self.choices:
            return str(trial.suggest_categorical(self.field, self.choices))
        if self.whole:
            return str(trial.suggest_int(self.field, int(self.low), int(self.high), log=self.log))
        return repr(trial.suggest_float(self.field, self.low, self.high, log=self.log))

    def __str__(self) -> str:
        if self.choices:
            return f"{self.field}={','.join(self.choices)}"
        return f"{self.field}={self.low:g}:{self.high:g}{':log' if self.log else ''}"


def grid_of(dimensions: Sequence[Dimension]) -> list[dict[str, str]]:
    """All combinations if every setting has a list of values; none if one has a range."""
    if not all(dimension.choices for dimension in dimensions):
        return []
    fields = [dimension.field for dimension in dimensions]
    combinations = itertools.product(*(dimension.choices for dimension in dimensions))
    return [dict(zip(fields, values, strict=True)) for values in combinations]


def parse_dimensions(texts: Iterable[str], recipe: Recipe) -> tuple[Dimension, ...]:
    """Each as `parse_dimension` reads it, beside the first values of the others; no setting twice.

    Raises:
        RecipeError: there is none, or two vary the same setting.
    """
    varied = list(texts)
    firsts = [re.split("[,:]", text)[0].strip() for text in varied]
    dimensions = tuple(
        parse_dimension(text, recipe, beside=firsts[:place] + firsts[place + 1 :]) for place, text in enumerate(varied)
    )
    fields = [dimension.field for dimension in dimensions]
    if not fields:
        raise RecipeError("a sweep needs something to vary: --vary FIELD=LOW:HIGH[:log] or FIELD=A,B,C")
    doubled = sorted({field for field in fields if fields.count(field) > 1})
    if doubled:
        raise RecipeError(f"{', '.join(doubled)} can be varied only once")
    return dimensions


def parse_dimension(text: str, recipe: Recipe, beside: Sequence[str] = ()) -> Dimension:
    """`FIELD=LOW:HIGH`, `FIELD=LOW:HIGH:log` or `FIELD=A,B,C`, held to what the recipe takes.

    Args:
        beside: other settings that are changed, FIELD=VALUE each.

    >>> from bayeszip.recipe import recipe
    >>> str(parse_dimension("all.tau1=0.1:10:log", recipe("quick")))
    'all.tau1=0.1:10:log'
    >>> parse_dimension("vd.epochs=10:20", recipe("quick")).whole
    True

    Raises:
        RecipeError: the setting is unknown, the range is empty, or a value is not for this setting.
    """
    field, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not field or not values:
        raise RecipeError(f"write what to vary as FIELD=LOW:HIGH[:log] or FIELD=A,B,C, not {text!r}")
    if ":" in values:
        return _range(field, values, recipe, beside)
    choices = tuple(choice.strip() for choice in values.split(","))
    for choice in choices:
        recipe.override(*beside, f"{field}={choice}")
    if len(set(choices)) < len(choices):
        raise RecipeError(f"{field}: {values} names a value twice")
    return Dimension(field, choices)


def _range(field: str, values: str, recipe: Recipe, beside: Sequence[str]) -> Dimension:
    low_text, high_text, *scale = (part.strip() for part in values.split(":"))
    if scale not in ([], ["log"]):
        raise RecipeError(f"{field}: write a range as LOW:HIGH or LOW:HIGH:log, not {values!r}")
    for end in (low_text, high_text):
        recipe.override(*beside, f"{field}={end}")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        raise RecipeError(f"{field} takes words, not numbers; list them: {field}=A,B,C") from None
    if not low < high:
        raise RecipeError(f"{field}: the range {low_text}:{high_text} is empty; the lower end comes first")
    if scale and low <= 0:
        raise RecipeError(f"{field}: a range on a log scale begins above 0, not at {low_text}")
    return Dimension(
        field, low=low, high=high, log=bool(scale), whole=_takes_whole_numbers(field, low, high, recipe, beside)
    )


def _takes_whole_numbers(field: str, low: float, high: float, recipe: Recipe, beside: Sequence[str]) -> bool:
    """Whether a number inside the range is refused for not being whole; both ends were taken."""
    inside = low + (high - low) / 3.14159
    try:
        recipe.override(*beside, f"{field}={inside!r}")
    except RecipeError:
        return True
    return False
