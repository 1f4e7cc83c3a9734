"""What goes beyond the paper, part by part: each alone and all together, at two strengths.

Each training is ended twice, without a rate and with symbols by rate and distortion: so these are a part of their own,
and stand beside each of the others too. Figures are of the test set, on seeds that no curve has: they say what parts
are worth, and choose no setting.
"""

from dataclasses import dataclass, replace

from bayeszip.experiments.curves import AT_NO_RATE, PRICED, variant_of
from bayeszip.experiments.runs import Variant

__all__ = ["ABLATED", "PARTS", "SNAP", "Ablated", "part_variants"]

#: Switches every part off, whatever a recipe has; the closing phase is as long with one as with another.
_OFF = f"{AT_NO_RATE} all.rate.tau=0 all.groups.tau=0 mixture.seeding=quantiles reassign=false closing.epochs=20"

#: What a bit weighs where symbols are chosen by rate and distortion.
SNAP = 0.5

#: For each training what switches its part on, what that is, and what it is with symbols by rate and distortion.
PARTS: dict[str, tuple[str, str, str]] = {
    "none": ("", "none of them", "symbols by rate and distortion"),
    "rate-term": (PRICED, "the rate term", "the rate term, and symbols so"),
    "groups": ("all.groups.tau=10 vd.groups.ramp=0.2", "the prior on units", "the prior on units, and symbols so"),
    "seeding": ("mixture.seeding=even", "components seeded evenly", "components seeded evenly, and symbols so"),
    "reassign": ("reassign=true", "weights that move on at the end", "weights that move on, and symbols so"),
}
_TOGETHER = " ".join(settings for settings, *_ in PARTS.values() if settings)
PARTS["all"] = (_TOGETHER, "all but symbols by rate and distortion", "all of them")


@dataclass(frozen=True)
class Ablated:
    """A network that parts are tried on.

    Args:
        augmented: whether images are changed, in the pretraining too.
        strengths: two values of τ₁.
        seeds: those that it is run with.
        length: how much of its recipe's epochs each training has, pretraining included. Parts are compared with each
            other, and that many whole trainings would take days.
        settings: what is changed in the recipe, so that a short training prunes at all: σ² grows by a step's rate.
    """

    model: str
    augmented: bool
    strengths: tuple[float, float]
    seeds: tuple[int, ...]
    length: float
    settings: str = ""


ABLATED = (
    Ablated("lenet-300-100", False, (0.7, 1.4), tuple(range(5)), 0.5),
    Ablated("lenet-5", False, (1, 2), tuple(range(5)), 0.5),
    Ablated("resnet-20", True, (0.15, 0.3), (0, 1), 0.2, "vd.rate_log_sigma2=0.005 closing.epochs=30"),
)


def part_variants() -> tuple[Variant, ...]:
    """A variant for each network, strength and part."""
    variants = (
        variant_of(
            ablated.model,
            f"{ablated.model}-tau1={strength:g}-{part}",
            f"epochs_scale={ablated.length:g} all.tau1={strength:g} {_OFF} {ablated.settings} {settings}",
            augmented=ablated.augmented,
            meaning=meaning,
            seeds=ablated.seeds,
        )
        for ablated in ABLATED
        for strength in ablated.strengths
        for part, (settings, meaning, _) in PARTS.items()
    )
    return tuple(replace(variant, rates=(SNAP,)) for variant in variants)
