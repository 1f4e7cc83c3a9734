"""What goes beyond the paper, part by part: each alone and all together, at two strengths.

Settings here are judged on validation images, on seeds that no curve has.
"""

from dataclasses import dataclass

from bayeszip.experiments.curves import variant_of
from bayeszip.experiments.runs import Variant

__all__ = ["ABLATED", "PARTS", "Ablated", "part_variants"]

#: Switches every part off, whatever a recipe has.
_OFF = "quantization.rate_trials=0 quantization.rate=0 all.rate.tau=0 all.groups.tau=0 mixture.seeding=quantiles"

#: For each part what switches it on, and what it is.
PARTS: dict[str, tuple[str, str]] = {
    "none": ("", "none of them"),
    "snap": ("quantization.rate=1 quantization.rate_trials=4", "symbols by rate and distortion"),
    "rate": ("all.rate.tau=0.5 vd.rate.ramp=0.2", "the rate term"),
    "groups": ("all.groups.tau=10 vd.groups.ramp=0.2", "the prior on units"),
    "seeding": ("mixture.seeding=even", "components seeded evenly"),
}
PARTS["all"] = (" ".join(settings for settings, _ in PARTS.values() if settings), "all of them")


@dataclass(frozen=True)
class Ablated:
    """A network that parts are tried on.

    Args:
        augmented: whether images are changed, in the pretraining too.
        strengths: two values of τ₁.
        seeds: those that it is run with.
    """

    model: str
    augmented: bool
    strengths: tuple[float, float]
    seeds: tuple[int, ...]


ABLATED = (
    Ablated("lenet-300-100", False, (0.7, 1.4), tuple(range(5))),
    Ablated("lenet-5", False, (1, 2), tuple(range(5))),
    Ablated("resnet-20", True, (0.2, 0.5), (0, 1)),
)


def part_variants() -> tuple[Variant, ...]:
    """A variant for each network, strength and part."""
    return tuple(
        variant_of(
            ablated.model,
            f"{ablated.model}-tau1={strength:g}-{part}",
            f"all.tau1={strength:g} {_OFF} {settings}",
            augmented=ablated.augmented,
            meaning=meaning,
            seeds=ablated.seeds,
        )
        for ablated in ABLATED
        for strength in ablated.strengths
        for part, (settings, meaning) in PARTS.items()
    )
