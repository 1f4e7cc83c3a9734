"""Recipes: every setting of a compression, by name, from and to JSON; the paper's recipes among them.

>>> recipe("paper-vd+sws").phases[1].tau2
0.02
>>> recipe("quick").override("vd.epochs=3").phases[0].epochs
3
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bayeszip.errors import RecipeError
from bayeszip.fitting import Phase
from bayeszip.posterior import Posterior
from bayeszip.quantize import Quantization
from bayeszip.settings import (
    at_least,
    between,
    check,
    choice,
    from_dict,
    parsed,
    positive,
    printable,
    setting,
    to_dict,
)
from bayeszip.variational.groups import GroupPrior, GroupSettings
from bayeszip.variational.mixture import MixtureStart
from bayeszip.variational.rate import Rate, RateSettings
from bayeszip.variational.selection import Selection, Strength
from bayeszip.variational.terms import KINDS, known_kind

__all__ = ["RECIPES", "Coding", "Recipe", "Settings", "recipe", "settings_help"]

#: Parts of a recipe that are no phases of the compression, by their names.
_PARTS = ("mixture", "quantization", "closing", "coding")

#: Changes to a recipe: fields and their values, or assignments as `--set` takes them.
Settings = Mapping[str, object] | Sequence[str]


@dataclass(frozen=True)
class Coding:
    """How the quantized network becomes bytes."""

    coder: str = setting("default", "which coder writes the file", choice("default", "context", "csr-huffman"))
    offset_bits: int = setting(0, "csr-huffman: width of a column offset (0: the smallest file)", between(0, 32))
    widths_multiple_of: int = setting(
        1, "leave layers as wide as a multiple of this, for hardware that likes it", at_least(1)
    )
    norms: str = setting(
        "fold",
        "batch norms: folded into a scale and a bias for each channel, or kept (as with keep_indices); what is kept is "
        "not rounded, nor are vectors by themselves then",
        choice("fold", "keep"),
    )
    norm_error: float = setting(
        0.004,
        "how far norms' factors and shifts, and vectors that no layer owns, move when they are rounded: a share of "
        "themselves, or of the deviation of what is shifted (0: not at all)",
        between(0, 0.5),
    )
    keep_indices: bool = setting(False, "store which units survived, so that the original shapes can be restored")

    def __post_init__(self) -> None:
        check(self, "coding")
        if self.offset_bits and self.coder == "context":
            raise RecipeError("coding.offset_bits is about csr-huffman; set coding.coder=csr-huffman, or leave it out")


#: What `all.…` sets in the closing phase too: the others would switch it on, or make no sense there.
REACHES_CLOSING = ("distillation", "distillation_temperature")

_NO_CLOSING = Phase(name="values", epochs=0, noise=False, rate_theta=1e-3, schedule="linear")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what `compress` does, but for the network, the data and the seed."""

    name: str = setting("custom", "what to call it in results", printable)
    batch_size: int = setting(128, "examples a step, for data that bayeszip loads itself", between(1, 2**31))
    accumulate: int = setting(
        1, "compute each batch in so many parts, one after the other, to save memory", between(1, 2**31)
    )
    epochs_scale: float = setting(1.0, "multiplies the epochs of every phase", positive)
    biases: bool = setting(True, "treat biases like weights: Gaussian, pruned, shared")
    start_log_sigma2: float = setting(-10.0, "log σ² at the start", between(-40, 10))
    start_size: float = setting(
        0.0, "root mean square that weights with a batch norm behind them begin with (0: as they came)", between(0, 1e3)
    )
    #: Which tensors are compressed, and how strongly.
    layers: Selection = field(default_factory=Selection)
    pretraining: tuple[Phase, ...] = ()
    phases: tuple[Phase, ...] = ()
    mixture: MixtureStart = field(default_factory=MixtureStart)
    quantization: Quantization = field(default_factory=Quantization)
    #: Trains the shared values; 0 epochs: off.
    closing: Phase = _NO_CLOSING
    reassign: bool = setting(
        False,
        "closing phase: weights that are not zero move on, and take the value next to them; off: they keep theirs",
    )
    coding: Coding = field(default_factory=Coding)

    def __post_init__(self) -> None:
        check(self, self.name)
        names = [phase.name for phase in (*self.pretraining, *self.phases, self.closing)]
        reserved = {"all", *(entry.name for entry in dataclasses.fields(self))}
        doubled = {name for name in names if names.count(name) > 1 or name in reserved}
        if doubled:
            raise RecipeError(f"{self.name}: phases need names of their own, not {', '.join(sorted(doubled))}")
        if self.quantization.assignment == "mixture" and not any(phase.tau2 for phase in self.phases):
            raise RecipeError(f"{self.name}: no phase trains the mixture (τ₂ > 0); set quantization.assignment=fit")
        if self.quantization.rate and self.coding.coder == "csr-huffman":
            raise RecipeError(
                f"{self.name}: bits are those of the coder context; set quantization.rate=0 for csr-huffman"
            )

    def scaled(self) -> "Recipe":
        """The same with `epochs_scale` applied; a phase that had an epoch keeps at least one."""

        def scale(phase: Phase) -> Phase:
            epochs = max(1, round(phase.epochs * self.epochs_scale)) if phase.epochs else 0
            return dataclasses.replace(phase, epochs=epochs)

        return dataclasses.replace(
            self,
            epochs_scale=1.0,
            pretraining=tuple(map(scale, self.pretraining)),
            phases=tuple(map(scale, self.phases)),
            closing=scale(self.closing),
        )

    def override(self, *assignments: str) -> "Recipe":
        """A copy with settings changed: `batch_size=64`, `vd.epochs=100`, `mixture.components=9`, `all.tau1=2`.

        `NAME.field` is a field of the phase NAME, or of `mixture`, `quantization`, `closing`, `coding`; `all.field`
        sets it in every phase of the compression, distillation in the closing one too; `NAME.term.field` sets one of a
        further term, which it adds.

        They are made together, so that their order is no matter, but for a setting that is made twice: the last counts.

        Raises:
            RecipeError: names what is unknown, or what a value must be.
        """
        own: dict[str, str] = {}
        parts: dict[str, dict[str, str]] = {}
        phases: dict[str, dict[str, dict[str, str]]] = {}
        for assignment in assignments:
            path, equals, text = (part.strip() for part in assignment.partition("="))
            if not equals:
                raise RecipeError(f"write settings as FIELD=VALUE, not {assignment!r}")
            owner, _, name = path.rpartition(".")
            owner = "closing" if owner == self.closing.name else owner
            if not owner:
                _refuse_fields_of_phases(name, text, self)
                own[name] = text
            elif owner in _PARTS:
                parts.setdefault(owner, {})[name] = text
            else:
                phase_name, _, term = owner.partition(".")
                for phase in self._called(phase_name, owner):
                    phases.setdefault(phase.name, {}).setdefault(term, {})[name] = text
                if phase_name == "all" and name in REACHES_CLOSING:
                    parts.setdefault("closing", {})[name] = text
        changes: dict[str, Any] = parsed(self, own, self.name)
        for part, texts in parts.items():
            settings = getattr(self, part)
            changes[part] = dataclasses.replace(settings, **parsed(settings, texts, part))
        for sequence in ("pretraining", "phases"):
            changes[sequence] = tuple(_changed(phase, phases.get(phase.name, {})) for phase in getattr(self, sequence))
        return dataclasses.replace(self, **changes)

    def selecting(
        self,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strengths: Mapping[str, float] | None = None,
    ) -> "Recipe":
        """A copy that compresses what the patterns say; what is not given stays as the recipe has it."""
        given: dict[str, Any] = {"include": include, "exclude": exclude}
        for name, patterns in given.items():
            if isinstance(patterns, str):
                raise RecipeError(f"{name} is a list of patterns: [{patterns!r}]")
            if patterns is not None and not isinstance(patterns, Iterable):
                raise RecipeError(f"{name} is a list of patterns on names, such as ['encoder.*'], not {patterns!r}")
        changes = {name: tuple(patterns) for name, patterns in given.items() if patterns is not None}
        if strengths is not None and not isinstance(strengths, Mapping):
            raise RecipeError(f"strengths are factors by pattern, such as {{'head.*': 0.5}}, not {strengths!r}")
        if strengths is not None:
            changes["strengths"] = tuple(Strength(pattern, factor) for pattern, factor in strengths.items())
        return dataclasses.replace(self, layers=dataclasses.replace(self.layers, **changes))

    def having(self, settings: "Settings") -> "Recipe":
        """A copy with settings changed: `{"all.tau1": 2}`, or what `override` takes, one or several."""
        if isinstance(settings, Mapping):
            return self.override(*(f"{path}={value}" for path, value in settings.items()))
        assignments = [settings] if isinstance(settings, str) or not isinstance(settings, Iterable) else list(settings)
        if not all(isinstance(each, str) for each in assignments):
            raise RecipeError(f"settings are {{'all.tau1': 2}}, or ['all.tau1=2'], not {settings!r}")
        return self.override(*assignments)

    def _called(self, name: str, owner: str) -> list[Phase]:
        """The phases that `all`, or a phase's own name, stands for; `owner` is what was written."""
        every = [*self.pretraining, *self.phases]
        chosen = [phase for phase in every if phase.name == name] if name != "all" else list(self.phases)
        if not chosen:
            known = ["all", *(phase.name for phase in every), *_PARTS]
            raise RecipeError(f"{self.name} has no part {owner!r}; known: {', '.join(known)}")
        return chosen

    @property
    def starts(self) -> dict[str, Any]:
        """What it says of the start of terms, by their names."""
        return {"mixture": self.mixture}

    def quantization_of(self, posterior: Posterior) -> Quantization:
        """How a network amid its training is quantized: before there is a mixture, with one that is fitted."""
        if self.quantization.assignment == "fit" or posterior.mixture is not None:
            return self.quantization
        return dataclasses.replace(
            self.quantization,
            assignment="fit",
            prune_rate=0.95,
            components=self.mixture.components,
            merge_within=0.0,
            codebook_bits=16,
        )

    def at_rate(self, rate: float) -> "Recipe":
        """A copy by which a bit weighs `rate`; its closing phase says so in its name."""
        weighed = self.having({"quantization.rate": rate})
        name = f"{self.closing.name}-rate={weighed.quantization.rate:g}"
        return dataclasses.replace(weighed, closing=dataclasses.replace(self.closing, name=name))

    def sequence(self, pretrain: bool) -> tuple[Phase, ...]:
        """All phases in the order in which they run."""
        return (*(self.pretraining if pretrain else ()), *self.phases, self.closing)

    def summary(self) -> str:
        """One line: the phases and what follows."""
        steps = [f"{phase.name} {phase.epochs}" for phase in self.sequence(pretrain=True) if phase.epochs]
        return f"{', '.join(steps)} epochs; shared values by {self.quantization.assignment}"

    def to_json(self) -> str:
        return json.dumps(to_dict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"the recipe is not valid JSON: {error}") from error
        return from_dict(cls, values, "recipe")


def _refuse_fields_of_phases(name: str, text: str, recipe: Recipe) -> None:
    """What is a phase's, or some other part's, is said with its owner."""
    if name in {entry.name for entry in dataclasses.fields(recipe)}:
        return
    owners = [("all", Phase), ("mixture", MixtureStart), ("quantization", Quantization), ("coding", Coding)]
    owner = next((owner for owner, kind in owners if name in {entry.name for entry in dataclasses.fields(kind)}), None)
    if owner == "all":
        phases = ", ".join(f"{phase.name}.{name}" for phase in recipe.phases)
        raise RecipeError(
            f"{name} is a setting of phases: write all.{name}={text}" + (f", or {phases}" if phases else "")
        )
    if owner is not None:
        raise RecipeError(f"{name} is a setting of {owner}: write {owner}.{name}={text}")


def _changed(phase: Phase, changes: Mapping[str, Mapping[str, str]]) -> Phase:
    """The phase with settings changed: its own, under no name, and those of further terms, under theirs."""
    if not changes:
        return phase
    beside = [f"{kind}.{each.name}" for kind, each in _term_fields()]
    own = parsed(phase, changes.get("", {}), phase.name, beside)
    terms = dict(phase.terms)
    for term, texts in changes.items():
        if term:
            settings = terms.get(term) or known_kind(term).Settings()
            terms[term] = dataclasses.replace(settings, **parsed(settings, texts, f"{phase.name}.{term}"))
    return dataclasses.replace(phase, **own, terms=terms)


def recipe(name_or_path: "str | Recipe") -> Recipe:
    """A recipe by name, or from a JSON file, or as it is.

    Raises:
        RecipeError: there is no such name or file.
    """
    if isinstance(name_or_path, Recipe):
        return name_or_path
    if not isinstance(name_or_path, str | os.PathLike):
        raise RecipeError(f"a recipe is a name, a path to a JSON file, or a Recipe, not {name_or_path!r}")
    if name_or_path in RECIPES:
        return RECIPES[name_or_path]
    path = Path(name_or_path)
    # `os.path` answers, where `Path` raises, for what can't be a path at all.
    if path.suffix == ".json" or os.path.exists(path):
        try:
            return Recipe.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"can't read the recipe {name_or_path}: {error}") from error
    raise RecipeError(f"there is no recipe {name_or_path!r}; known: {', '.join(RECIPES)}, or a path to a JSON file")


def settings_help() -> list[tuple[str, str]]:
    """Every setting as `--set` names it, with its default and what it means."""
    parts: list[tuple[str, type[Any]]] = [
        ("", Recipe),
        ("PHASE.", Phase),
        ("mixture.", MixtureStart),
        ("quantization.", Quantization),
        ("coding.", Coding),
    ]
    entries = [(prefix, entry) for prefix, part in parts for entry in dataclasses.fields(part)]
    entries += [(f"PHASE.{term}.", entry) for term, entry in _term_fields()]
    return [
        (f"{prefix}{entry.name}", f"{entry.metadata['doc']} [{_default(entry)}]")
        for prefix, entry in entries
        if entry.metadata
    ]


def _term_fields() -> list[tuple[str, dataclasses.Field[Any]]]:
    """Settings of the terms that a phase may have besides its own, with the names of the terms."""
    further = {name: kind.Settings for name, kind in KINDS.items() if not issubclass(Phase, kind.Settings)}
    return [(name, entry) for name, settings in further.items() for entry in dataclasses.fields(settings)]


def _default(entry: dataclasses.Field[Any]) -> Any:
    return "none" if entry.default is dataclasses.MISSING else entry.default


def _named(recipes: Sequence[Recipe]) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


#: Pretraining with an ℓ₂ penalty, for built-in networks that come without weights.
_L2 = Phase(name="l2", epochs=40, noise=False, weight_decay=1e-4, rate_theta=3e-3, schedule="cosine")
#: The same for residual networks and the like, which come further by gradient descent with momentum.
_MOMENTUM = Phase(
    name="l2", epochs=100, noise=False, optimizer="sgd", weight_decay=5e-4, rate_theta=0.2, schedule="cosine"
)
_PAPER_VD = Phase(name="vd", epochs=200, tau1=1.0)
_PAPER_VD_SWS = Phase(name="vd+sws", epochs=100, tau1=1.0, tau2=2e-2)
_PAPER_SWS = Phase(name="sws", epochs=100, noise=False, tau2=1e-2)

#: Ours.
_VD = Phase(
    name="vd",
    epochs=100,
    tau1=1.0,
    tau1_ramp=0.2,
    distillation=0.5,
    rate_theta=4e-3,
    rate_log_sigma2=1e-3,
    schedule="linear",
    compact_every=2,
)
_VD_SWS = Phase(
    name="vd+sws",
    epochs=40,
    tau1=1.0,
    tau2=2e-2,
    distillation=0.5,
    rate_theta=5e-4,
    rate_log_sigma2=2.5e-4,
    rate_means=5e-4,
    schedule="linear",
    reseed=True,
    std_first=0.01,
    std_last=0.003,
    compact_every=2,
)
_SWS = Phase(
    name="sws",
    epochs=100,
    noise=False,
    tau2=3e-2,
    tau2_ramp=0.2,
    distillation=0.5,
    rate_theta=5e-4,
    rate_means=5e-4,
    schedule="linear",
    # Wider than the hyper-prior has them at the start: the one at zero then reaches more weights.
    std_first=0.012,
    std_last=0.004,
)
_CLOSING = dataclasses.replace(_NO_CLOSING, epochs=10, distillation=0.5)

#: The paper's three ways, exactly as app. A and B give them, `l2`, and ours.
RECIPES: dict[str, Recipe] = _named(
    [
        Recipe(
            name="quick",
            batch_size=256,
            pretraining=(dataclasses.replace(_L2, epochs=20, weight_decay=3e-5, rate_theta=2e-3),),
            phases=(
                dataclasses.replace(_VD, epochs=80, rate_log_sigma2=5e-4),
                dataclasses.replace(_VD_SWS, epochs=30),
            ),
            quantization=Quantization(prune_rate=0.95, codebook_bits=16),
            closing=_CLOSING,
        ),
        Recipe(
            name="vd+sws",
            batch_size=256,
            pretraining=(_L2,),
            phases=(dataclasses.replace(_VD, tau1=0.7), dataclasses.replace(_VD_SWS, tau1=0.7)),
            mixture=MixtureStart(components=33),
            quantization=Quantization(prune_rate=0.95, codebook_bits=16),
            closing=_CLOSING,
        ),
        # What goes beyond the paper in training: expected bits, a prior on whole units, components that reach to the
        # weights' ends, and weights that move on when their zeros are settled.
        Recipe(
            name="smallest",
            batch_size=256,
            pretraining=(_L2,),
            phases=(
                dataclasses.replace(
                    _VD,
                    tau1=0.25,
                    terms={
                        Rate.name: RateSettings(tau=0.5, ramp=0.2),
                        GroupPrior.name: GroupSettings(tau=10.0, ramp=0.2),
                    },
                ),
                dataclasses.replace(
                    _VD_SWS,
                    tau1=0.25,
                    terms={Rate.name: RateSettings(tau=0.5), GroupPrior.name: GroupSettings(tau=10.0)},
                ),
            ),
            mixture=MixtureStart(seeding="even"),
            quantization=Quantization(prune_rate=0.95, codebook_bits=16),
            closing=dataclasses.replace(_CLOSING, epochs=20),
            reassign=True,
        ),
        # For deep networks with normalization layers. They bear less noise, so that expected bits do what a stronger
        # divergence would. Components reach to the weights' ends. What is left has little to spare: its weights take
        # shared values with regard to each other, and gain by moving on, without noise, when their zeros are settled.
        Recipe(
            name="deep",
            batch_size=256,
            start_size=0.05,
            pretraining=(_MOMENTUM,),
            phases=(
                dataclasses.replace(_VD, epochs=85, tau1=0.2, terms={Rate.name: RateSettings(tau=0.5, ramp=0.2)}),
                dataclasses.replace(_VD_SWS, epochs=35, tau1=0.2, terms={Rate.name: RateSettings(tau=0.5)}),
            ),
            mixture=MixtureStart(seeding="even"),
            quantization=Quantization(prune_rate=0.95, codebook_bits=16, together=True),
            closing=dataclasses.replace(_CLOSING, epochs=20, rate_theta=3e-3),
            reassign=True,
        ),
        Recipe(
            name="vd",
            batch_size=256,
            pretraining=(_L2,),
            phases=(dataclasses.replace(_VD, tau1=0.7),),
            quantization=Quantization(assignment="fit", prune_rate=0.95, components=32, codebook_bits=16),
            closing=_CLOSING,
        ),
        Recipe(
            name="sws",
            batch_size=256,
            pretraining=(_L2,),
            phases=(_SWS,),
            mixture=MixtureStart(components=33),
            quantization=Quantization(codebook_bits=16),
            closing=_CLOSING,
        ),
        Recipe(name="paper-vd+sws", pretraining=(_L2,), phases=(_PAPER_VD, _PAPER_VD_SWS)),
        Recipe(
            name="paper-vd",
            pretraining=(_L2,),
            phases=(_PAPER_VD,),
            quantization=Quantization(assignment="fit", prune_rate=0.95, components=64),
        ),
        Recipe(name="paper-sws", pretraining=(_L2,), phases=(_PAPER_SWS,)),
        # Pretraining alone: what is left of it is fitted and coded.
        Recipe(name="l2", batch_size=64, pretraining=(_L2,), quantization=Quantization(assignment="fit")),
    ]
)


class _NamedAsItsFunction(ModuleType):
    """`bayeszip.recipe` is this module as soon as anything has imported it, and must still be the function."""

    def __call__(self, name_or_path: str | Recipe) -> Recipe:
        return recipe(name_or_path)


sys.modules[__name__].__class__ = _NamedAsItsFunction
