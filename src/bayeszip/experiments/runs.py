"""What an experiment is: variants of a compression, each run with several seeds. All settings, no behavior."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from bayeszip.errors import RecipeError
from bayeszip.recipe import Recipe, recipe

__all__ = ["Experiment", "Run", "Variant", "at_rate", "parse_seeds", "picked"]

Named = TypeVar("Named")


@dataclass(frozen=True)
class Variant:
    """One row of an experiment, run with several seeds.

    Args:
        name: of its files, before the seed.
        settings: changed in the recipe, as `--set` takes them, separated by blanks.
        max_bytes, max_accuracy_drop: what to train towards, as `compress` takes it.
        meaning: what is changed, in words.
        data: what it is trained on, as `--data` names it.
        augment: how images are changed in the compression, as `--augment` takes it.
        augment_before: the same in the pretraining.
        beginning: the seed whose pretrained network all seeds begin from; None: each from its own.
        teacher: whose pretrained network it learns from, that of its `beginning`; None: it learns from its own.
        mixed_precision: as `--mixed-precision` takes it, in both.
        hold_out: as `--hold-out` says, in both.
        rates: further endings of its training, as `--rates` takes them.
        later_rates: those of them that seeds after the first of `seeds` have; None: all.
        seeds: those that are published, where they are not the experiment's.
    """

    name: str
    model: str
    recipe: str
    settings: str = ""
    max_bytes: int | None = None
    max_accuracy_drop: float | None = None
    meaning: str = ""
    data: str = "mnist"
    augment: str | None = None
    augment_before: str | None = None
    beginning: int | None = None
    teacher: "Variant | None" = None
    mixed_precision: str | None = None
    hold_out: bool = True
    rates: tuple[float, ...] = ()
    later_rates: tuple[float, ...] | None = None
    seeds: tuple[int, ...] = ()


def at_rate(name: str, rate: float) -> str:
    """What an ending is called.

    >>> at_rate("lenet-5", 0), at_rate("lenet-5", 0.5)
    ('lenet-5', 'lenet-5-rate=0.5')
    """
    return f"{name}-rate={rate:g}" if rate else name


@dataclass(frozen=True)
class Run:
    """One training. `name` is unique in its experiment."""

    name: str
    variant: Variant
    recipe: Recipe
    seed: int
    #: Takes part in a choice: the test set stays sealed, and no file is kept.
    sealed: bool
    #: Of which only the pretraining is run: whom it learns from.
    teacher: "Run | None" = None

    @property
    def beginning(self) -> int:
        """The seed of the pretrained network that it begins from."""
        return self.seed if self.variant.beginning is None else self.variant.beginning

    @property
    def rates(self) -> tuple[float, ...]:
        """What it ends at beside the recipe's own ending."""
        later = self.variant.later_rates
        return self.variant.rates if later is None or self.seed not in self.variant.seeds[1:] else later

    @cached_property
    def endings(self) -> dict[str, Recipe]:
        """What it leaves: for each record its name, and the recipe that it was made by."""
        settings = self.recipe.scaled()
        further = {f"{at_rate(self.variant.name, rate)}-{self.seed}": settings.at_rate(rate) for rate in self.rates}
        return {self.name: settings, **further}


@dataclass(frozen=True)
class Experiment:
    """A question, and the runs that answer it."""

    name: str
    question: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    sealed: bool = False

    def runs(self, seeds: Sequence[int] | None = None, only: str = "", epochs_scale: float = 1.0) -> list[Run]:
        """Its runs, or those that `picked` takes by their endings; with these `seeds`, or those that are published.

        Raises:
            RecipeError: a part of `only` picks none.
        """
        planned = [
            Run(
                f"{variant.name}-{seed}",
                variant,
                _recipe_of(variant, epochs_scale),
                seed,
                self.sealed,
                _teacher_of(variant, epochs_scale),
            )
            for variant in self.variants
            for seed in seeds or variant.seeds or self.seeds
        ]
        return picked([(run, run.endings) for run in planned], only, f"run of {self.name}")


def _recipe_of(variant: Variant, epochs_scale: float) -> Recipe:
    """What a variant is trained by. Its own scale, where it has one, and this one multiply."""
    settings = recipe(variant.recipe).override(*variant.settings.split())
    return settings.override(f"epochs_scale={settings.epochs_scale * epochs_scale}")


def _teacher_of(variant: Variant, epochs_scale: float) -> Run | None:
    teacher = variant.teacher
    if teacher is None:
        return None
    if teacher.beginning is None:
        raise RecipeError(f"{variant.name}: its teacher {teacher.name} has no beginning, the seed of its pretraining")
    return Run(teacher.name, teacher, _recipe_of(teacher, epochs_scale), teacher.beginning, sealed=True)


def picked(known: Sequence[tuple[Named, Iterable[str]]], only: str, what: str) -> list[Named]:
    """Those of which a name contains one of the parts of `only` between commas; all of them where it is empty.

    >>> picked([(name, [name]) for name in ("a-10", "a-11", "b-10")], "a-11, b", "run")
    ['a-11', 'b-10']

    Args:
        known: each with its names.
        what: they are, for a message.

    Raises:
        RecipeError: a part picks none.
    """
    if not only:
        return [each for each, _ in known]
    parts = [part for part in map(str.strip, only.split(",")) if part]
    if not parts:
        raise RecipeError(f"{only!r} names nothing; write parts of names with commas between them, such as a-10,b")
    for part in parts:
        if not any(part in name for _, names in known for name in names):
            raise RecipeError(f"no {what} has {part!r} in its name, which is like {next(iter(known[0][1]))}")
    return [each for each, names in known if any(part in name for part in parts for name in names)]


def parse_seeds(text: str) -> tuple[int, ...]:
    """`10:15` is five seeds from 10, `3` is one.

    Raises:
        RecipeError: it is neither.
    """
    first, colon, last = text.partition(":")
    if first.isdecimal() and (last.isdecimal() if colon else not last):
        seeds = range(int(first), int(last) if colon else int(first) + 1)
        if 0 < len(seeds) <= 1000 and seeds[-1] < 2**63:
            return tuple(seeds)
    raise RecipeError(f"write seeds as FIRST:END, such as 10:15 for five of them, or as one number, not {text!r}")
