"""Curves of accuracy against bytes: networks with their data, their pretraining, and the strengths and rates they are
tried at. A strength is a training; the rates are endings of it, and cost a closing phase each.

Everything about a network stands in its line of `NETWORKS`, in `bayeszip compress`'s own words.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from bayeszip.experiments.runs import Variant, at_rate

__all__ = [
    "AFRESH",
    "AIMS",
    "AT_NO_RATE",
    "BEYOND",
    "CURVES",
    "FURTHER",
    "LAST",
    "LATER",
    "NETWORKS",
    "PRICED",
    "UNTOUCHED",
    "WAYS",
    "Aim",
    "Curve",
    "Network",
    "Point",
    "Way",
    "variant_of",
]

#: Whatever a recipe has. Weights choose by themselves, as they did when the records were made.
AT_NO_RATE = "quantization.rate_trials=0 quantization.rate=0 quantization.together=false"

#: Seeds that nobody chose on. A curve has the first of them alone.
UNTOUCHED = tuple(range(10, 15))
#: Others, for networks that are trained on all images when the figures of the former have been seen.
AFRESH = tuple(range(20, 25))
#: Others again, for ways that were set when those figures had been seen too; and so on, ten after ten.
LATER, LAST, BEYOND, FURTHER = (tuple(range(first, first + 5)) for first in (30, 40, 50, 60))


@dataclass(frozen=True)
class Network:
    """How a network is trained and compressed.

    Args:
        title: how pages call it.
        data: what it is trained on, as `--data` names it.
        recipe: by which it is compressed.
        augment: how images are changed, as `--augment` takes it, in the runs with augmentation.
        seeds: how many a headline has.
        pretraining: settings of the pretraining, as `--set` takes them: its phase is called `l2`.
        augment_before: how images are changed in the pretraining, if otherwise.
        settings: what is changed in the recipe.
        mixed_precision: as `--mixed-precision` takes it.
    """

    title: str
    data: str
    recipe: str
    augment: str
    seeds: int
    pretraining: str = ""
    augment_before: str = ""
    settings: str = ""
    mixed_precision: str | None = None


_CIFAR = Network("", data="cifar10", recipe="deep", augment="shift=4,flip", seeds=3, mixed_precision="bf16")
_MNIST = Network("", data="mnist", recipe="vd+sws", settings="mixture.components=17", augment="", seeds=5)

NETWORKS: dict[str, Network] = {
    "lenet-300-100": replace(_MNIST, title="LeNet-300-100", augment="shift=1,affine=5/0.05"),
    "lenet-5": replace(_MNIST, title="LeNet-5", augment="shift=1,affine=10/0.1/0.1"),
    "resnet-8": replace(_CIFAR, title="ResNet-8"),
    "resnet-20": replace(_CIFAR, title="ResNet-20"),
    # Large enough to learn images by heart, until most of their weights are gone.
    "resnet-20-4": replace(
        _CIFAR,
        title="ResNet-20-4",
        pretraining="l2.rate_theta=0.1 l2.epochs=110",
        augment_before="shift=4,flip,cutout=8",
        settings="vd+sws.epochs=15",
    ),
    "vgg-16": replace(
        _CIFAR,
        title="VGG-16",
        pretraining="l2.rate_theta=0.1 l2.epochs=112",
        augment_before="shift=4,flip,cutout=16",
        settings="vd+sws.epochs=15",
    ),
}


class Way(NamedTuple):
    """Another way of training: what is set, and what that is in words; the recipe, and how images are changed in the
    compression, where these are not the network's."""

    settings: str
    meaning: str
    recipe: str = ""
    augment: str = ""


#: Switches the rate term on; and symbols that are free in the closing phase.
PRICED, _FREE = "all.rate.tau=0.5 vd.rate.ramp=0.2", "reassign=true closing.epochs=20"
_NARROW = "all.groups.tau=30 vd.groups.ramp=0.2 mixture.components=9"
_SETTLED = "reassign=true closing.epochs=60 closing.rate_theta=0.003"
_SHORT = "vd.epochs=60 vd.rate_log_sigma2=0.0014 vd+sws.epochs=12 quantization.together=true"
_FORMER = "all.rate.tau=0 mixture.seeding=quantiles reassign=false closing.rate_theta=0.001"
_GENTLE = (
    "quantization.values=8 closing.epochs=10 closing.optimizer=sgd closing.rate_theta=0.04 closing.weight_decay=0.0005"
    " closing.schedule=cosine"
)
WAYS: dict[str, Way] = {
    "priced": Way(PRICED, "with the rate term"),
    "free": Way(_FREE, "with symbols that are free in the closing phase"),
    "priced-free": Way(f"{PRICED} {_FREE}", "with the rate term, and symbols that are free in the closing phase"),
    "dear": Way(
        "all.rate.tau=4 vd.rate.ramp=0.2 reassign=true closing.epochs=40",
        "with a rate term of 4, and symbols that are free in a closing phase of 40 epochs",
    ),
    "narrow": Way(
        f"{_NARROW} {_FREE}", "with the prior on units, 9 components, and symbols that are free in the closing phase"
    ),
    # A network of so few bytes learns nothing by heart; what it need not know of turned images it can spend otherwise.
    "narrow-settled": Way(
        f"{_NARROW} {_SETTLED}",
        "with the prior on units, 9 components, images that are only shifted, and symbols that are free in a closing"
        " phase of 60 epochs",
        augment="shift=1",
    ),
    "narrow-seven": Way(
        f"{_NARROW} {_SETTLED} mixture.components=7",
        "with the prior on units, 7 components, images that are only shifted, and symbols that are free in a closing"
        " phase of 60 epochs",
        augment="shift=1",
    ),
    "narrow-six": Way(
        f"{_NARROW} {_SETTLED} quantization.values=6 closing.optimizer=sgd closing.rate_theta=0.1"
        " closing.schedule=cosine",
        "with the prior on units, 9 components, images that are only shifted, and symbols that are free in a closing"
        " phase of 60 epochs by gradient descent with 6 values that are not zero",
        augment="shift=1",
    ),
    "smallest": Way("", "by the recipe `smallest`", "smallest"),
    "smallest-half": Way("epochs_scale=0.5", "by the recipe `smallest` with half of its epochs", "smallest"),
    "shorter": Way(
        "epochs_scale=0.7 l2.epochs=160 vd+sws.epochs=35 vd.rate_log_sigma2=0.0014 mixture.components=17",
        "with 0.7 of the epochs",
    ),
    "half": Way(
        "epochs_scale=0.5 l2.epochs=120 vd+sws.epochs=35 vd.rate_log_sigma2=0.002 mixture.components=17",
        "with half of the epochs",
    ),
    # What weights that move on win back at the end costs half of what an epoch with noise does.
    "late": Way(
        "vd.epochs=46 vd.rate_log_sigma2=0.0018 vd+sws.epochs=8 closing.epochs=45",
        "with half of the epochs, and a closing phase of 45",
    ),
    "coarse": Way("mixture.components=9", "with 9 components"),
    "joint": Way(
        f"{_SHORT} closing.epochs=45 mixture.components=33",
        "with 60 + 12 epochs with noise, 33 components, weights of a row that take values together, and a closing phase"
        " of 45",
    ),
    # The same by what there was before: for what the terms and stages beyond it are worth.
    "bare": Way(
        f"{_SHORT} {_FORMER} closing.epochs=10 mixture.components=33",
        "with 60 + 12 epochs with noise, 33 components, weights of a row that take values together, no rate term,"
        " components seeded at quantiles, and symbols that stay in a closing phase of 10",
    ),
    # The recipe, a little shorter, with and without what there was not before: else all is equal, but for the closing
    # rate that goes with it.
    "equal": Way(
        _SHORT,
        "with 60 + 12 epochs with noise, and weights of a row that take values together where a bit weighs nothing",
    ),
    "former": Way(
        f"{_SHORT} {_FORMER}",
        "with 60 + 12 epochs with noise, weights of a row that take values together, no rate term, components seeded at"
        " quantiles, and symbols that stay",
    ),
    # `equal`, ended by fewer values and by gradient descent.
    "gentle": Way(
        f"{_SHORT} {_GENTLE}",
        "with 60 + 12 epochs with noise, weights of a row that take 8 values together, and a closing phase of 10 epochs"
        " by gradient descent",
    ),
    "brief": Way(
        "l2.epochs=50 vd.epochs=20 vd.rate_log_sigma2=0.004 vd+sws.epochs=6 closing.epochs=5 mixture.components=33"
        " quantization.together=true",
        "with a quarter of the epochs, 33 components, and weights of a row that take values together",
    ),
    # A better teacher, most of all for what is left after the snap, whose bytes are settled. It did not help.
    "tutored": Way(
        "mixture.components=9 quantization.together=true vd.epochs=72 vd.rate_log_sigma2=0.0012 vd+sws.epochs=12"
        " closing.epochs=60 closing.distillation=0.9 closing.distillation_temperature=4",
        "with 9 components, and a closing phase of 60 epochs with distillation of 0.9",
    ),
    "fine": Way("mixture.components=49", "with 49 components"),
    "taught": Way(
        "vd.epochs=60 vd+sws.epochs=24 closing.epochs=6 closing.rate_theta=0.001 reassign=false all.rate.tau=3"
        " mixture.components=17 all.distillation=0.9 all.distillation_temperature=4",
        "with distillation of 0.9 and a rate term of 3",
    ),
}


class Point(NamedTuple):
    """Where a curve is tried; `name` is that of its files, before the seed."""

    name: str
    strength: float
    rate: float
    is_headline: bool


@dataclass(frozen=True)
class Curve:
    """A network compressed at several strengths, ended at several rates: a line in its picture.

    Args:
        model: a name in `NETWORKS`.
        augmented: whether images are changed, in the pretraining too.
        strengths: values of τ₁, the first of the curve's seeds each.
        headlines: pairs of a strength and a rate that tables quote; they were chosen on validation images. Their
            strengths are run with all seeds.
        rates: weights of a bit, which the first seed's trainings are ended at beside 0; others at the headlines'.
        way: a name in `WAYS`, where it is not trained as its network's line says.
        whole: no images are held out for validation: settings are those of curves that had some.
        beginning: the seed whose pretrained network all its seeds begin from; None: each from its own.
        teacher: a name in `NETWORKS`, whose pretrained network it learns from: that of the first seed of its kind.
        family: its seeds, of which it takes as many as its network has; where they are not those of its kind.
        first: the rate of a training's first ending, where each has but one: an ending costs a closing phase.
    """

    model: str
    augmented: bool
    strengths: tuple[float, ...]
    headlines: tuple[tuple[float, float], ...]
    rates: tuple[float, ...] = ()
    way: str = ""
    whole: bool = False
    beginning: int | None = None
    teacher: str = ""
    family: tuple[int, ...] = ()
    first: float = 0

    @property
    def name(self) -> str:
        parts = (self.model, "augmented" if self.augmented else "", self.way, "whole" if self.whole else "")
        return "-".join(filter(None, parts))

    @property
    def manner(self) -> str:
        """How it is trained, in words."""
        said = [f"{'with' if self.augmented else 'without'} augmentation", "on all images" if self.whole else ""]
        said += [self._way.meaning, f"taught by a {NETWORKS[self.teacher].title}" if self.teacher else ""]
        return ", ".join(filter(None, said))

    @property
    def augment(self) -> str | None:
        """How images are changed while it is compressed, as `--augment` takes it."""
        return (self._way.augment or NETWORKS[self.model].augment) if self.augmented else None

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those of its headlines; its other points have the first."""
        return (self.family or self._kind)[: NETWORKS[self.model].seeds]

    @property
    def _kind(self) -> tuple[int, ...]:
        return AFRESH if self.whole else UNTOUCHED

    @property
    def title(self) -> str:
        return f"{NETWORKS[self.model].title}, {self.manner}"

    def variants(self) -> tuple[Variant, ...]:
        """A variant for each strength."""
        return tuple(map(self._variant, self.strengths))

    def _variant(self, strength: float) -> Variant:
        settings = f"{AT_NO_RATE} all.tau1={strength:g} {self._way.settings}"
        settings += f" quantization.rate={self.first:g}" if self.first else ""
        quoted = tuple(rate for at, rate in self.headlines if at == strength)
        seeds = self.seeds if quoted else self.seeds[:1]
        variant = variant_of(
            self.model, self._named(strength, self.first), settings, augmented=self.augmented, meaning="", seeds=seeds
        )
        return replace(
            variant,
            recipe=self._way.recipe or variant.recipe,
            augment=self.augment,
            rates=self.rates,
            later_rates=tuple(rate for rate in quoted if rate != self.first),
            hold_out=not self.whole,
            beginning=self.beginning,
            teacher=self._teacher,
        )

    @property
    def _teacher(self) -> Variant | None:
        if not self.teacher:
            return None
        teacher = variant_of(self.teacher, self.teacher, "", augmented=self.augmented, meaning="", seeds=())
        return replace(teacher, hold_out=not self.whole, beginning=self._kind[0])

    def points(self) -> tuple[Point, ...]:
        """All that its trainings end in."""
        return tuple(
            Point(self._named(strength, rate), strength, rate, (strength, rate) in self.headlines)
            for strength in self.strengths
            for rate in (self.first, *self.rates)
        )

    @property
    def _way(self) -> Way:
        return WAYS[self.way] if self.way else Way("", "")

    def _named(self, strength: float, rate: float) -> str:
        return at_rate(f"{self.name}-tau1={strength:g}", rate)


def variant_of(
    model: str, name: str, settings: str, *, augmented: bool, meaning: str, seeds: tuple[int, ...]
) -> Variant:
    """A variant of a network as `NETWORKS` has it, with further settings."""
    network = NETWORKS[model]
    augment, before = (network.augment, network.augment_before or network.augment) if augmented else (None, None)
    return Variant(
        name,
        model,
        network.recipe,
        f"{network.pretraining} {network.settings} {settings}",
        meaning=meaning,
        data=network.data,
        augment=augment,
        augment_before=before,
        mixed_precision=network.mixed_precision,
        seeds=seeds,
    )


#: What a bit weighs in the endings of a training.
_RATES = (0.25, 0.5, 0.75, 1, 1.5)

CURVES: tuple[Curve, ...] = (
    Curve("lenet-300-100", False, (0.35, 0.5, 0.7, 1, 1.4, 2, 4), ((0.7, 0), (1, 0))),
    Curve("lenet-300-100", False, (0.35, 0.5, 0.7, 1, 1.4, 2), ((0.5, 0),), way="priced"),
    Curve("lenet-300-100", False, (0.35,), ((0.35, 0.5), (0.35, 1)), _RATES, "priced-free"),
    Curve("lenet-300-100", False, (0.25,), ((0.25, 0), (0.25, 0.5)), _RATES, "smallest"),
    Curve("lenet-300-100", False, (0.5,), ((0.5, 0), (0.5, 0.5)), _RATES, "smallest-half"),
    Curve("lenet-300-100", False, (0.35,), ((0.35, 0.5), (0.35, 1)), _RATES, "priced-free", whole=True),
    Curve("lenet-300-100", True, (0.7, 1, 1.4, 2, 2.5, 3, 4, 6), ((2, 0), (2.5, 0))),
    Curve("lenet-300-100", True, (2.5,), ((2.5, 0.5),), _RATES, "free"),
    Curve("lenet-5", False, (0.5, 0.7, 1, 1.4, 2, 4, 8), ((1, 0), (1.4, 0))),
    Curve("lenet-5", False, (0.7,), ((0.7, 0.5), (0.7, 1)), _RATES, "priced-free"),
    Curve("lenet-5", True, (1, 2, 3, 4, 6, 8, 12), ((4, 0), (8, 0), (12, 0))),
    Curve("lenet-5", True, (4, 8), ((4, 0.5), (8, 0.25), (8, 0.5), (8, 0.75)), _RATES, "free"),
    Curve("lenet-5", True, (4, 8), ((4, 0), (4, 0.25), (8, 0), (8, 0.25), (8, 0.5)), (0.25, 0.5), "dear"),
    Curve("lenet-5", True, (4, 8), ((4, 0), (4, 0.25), (8, 0), (8, 0.25)), (0.25, 0.5), "narrow"),
    Curve("lenet-5", True, (5, 9), ((5, 0), (9, 0)), way="narrow-settled", family=LATER),
    Curve("lenet-5", True, (4.5, 5.2, 10.5), ((4.5, 0), (5.2, 0), (10.5, 0)), way="narrow", whole=True),
    Curve(
        "lenet-5",
        True,
        (4.5, 9.2),
        ((4.5, 0), (9.2, 0)),
        way="narrow-settled",
        whole=True,
        beginning=LAST[0],
        family=LAST,
    ),
    Curve("lenet-5", True, (8,), ((8, 0),), way="narrow-seven", whole=True, beginning=LAST[0], family=BEYOND),
    Curve("lenet-5", True, (8,), ((8, 0),), way="narrow-six", whole=True, beginning=LAST[0], family=FURTHER),
    Curve("resnet-8", True, (0.12,), ((0.12, 0.5),), _RATES),
    Curve("resnet-8", True, (0.2,), ((0.2, 0.25), (0.2, 0.5)), _RATES, "fine"),
    Curve("resnet-8", True, (0.05,), ((0.05, 1),), _RATES, "taught"),
    Curve("resnet-20", True, (0.2,), ((0.2, 0.25), (0.2, 0.5)), _RATES),
    Curve("resnet-20", True, (0.2,), ((0.2, 0.5), (0.2, 0.75)), _RATES, "fine"),
    Curve("resnet-20", True, (0.05,), ((0.05, 1),), _RATES, "taught"),
    Curve("resnet-20", True, (0.27,), ((0.27, 0),), way="joint", beginning=0, family=LATER),
    Curve("resnet-20", True, (0.25,), ((0.25, 0),), way="bare", beginning=0, family=LATER),
    Curve("resnet-20", True, (0.22,), ((0.22, 0), (0.22, 0.25)), (0.25,), "equal", whole=True, family=LATER),
    Curve("resnet-20", True, (0.25, 0.5), ((0.25, 0), (0.5, 0)), way="former", whole=True, family=LATER),
    Curve("resnet-20", True, (0.22,), ((0.22, 0),), way="gentle", whole=True, family=FURTHER),
    Curve("resnet-20", True, (0.3,), ((0.3, 0),), way="coarse", whole=True),
    Curve("resnet-20", True, (0.36,), ((0.36, 0),), way="tutored", whole=True, family=LATER, teacher="resnet-20-4"),
    Curve("resnet-20", False, (0.2,), ((0.2, 0.25),), _RATES, "half"),
    Curve("resnet-20-4", True, (0.2,), ((0.2, 0.25),), _RATES, "half"),
    Curve("resnet-20-4", True, (0.18,), ((0.18, 0.25),), way="late", whole=True, beginning=AFRESH[0], first=0.25),
    Curve("vgg-16", True, (0.08,), ((0.08, 0.25), (0.08, 0.5)), _RATES, "coarse"),
    Curve("vgg-16", True, (0.1, 0.2), ((0.1, 0.5),), _RATES, "shorter"),
    Curve("vgg-16", True, (0.1,), ((0.1, 0),), way="brief", beginning=LATER[0], family=LATER),
    Curve("vgg-16", True, (0.11,), ((0.11, 0),), whole=True, beginning=AFRESH[0]),
)


class Aim(NamedTuple):
    """What runs were to reach, said before they were made: accuracy in %, and times smaller, or else bytes.

    `runs` is their name without the seed.
    """

    runs: str
    accuracy: float
    ratio: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.accuracy:g} % " + (f"at {self.ratio:,} times" if self.ratio else f"in {self.bytes:,} bytes")


#: For each aim the runs that came nearest to it.
AIMS: tuple[Aim, ...] = (
    Aim("lenet-300-100-priced-free-whole-tau1=0.35-rate=1", 98.24, ratio=320),
    Aim("lenet-300-100-augmented-free-tau1=2.5-rate=0.5", 98.24, ratio=500),
    Aim("lenet-5-priced-free-tau1=0.7-rate=1", 99.14, ratio=1000),
    Aim("lenet-5-augmented-narrow-settled-whole-tau1=4.5", 99.14, ratio=1700),
    Aim("lenet-5-augmented-narrow-settled-whole-tau1=9.2", 99.0, ratio=2300),
    Aim("resnet-8-augmented-tau1=0.12-rate=0.5", 86.0, bytes=12_000),
    Aim("resnet-20-augmented-tau1=0.2-rate=0.25", 90.5, bytes=25_000),
    Aim("resnet-20-4-augmented-late-whole-tau1=0.18-rate=0.25", 92.0, bytes=45_000),
    Aim("vgg-16-augmented-whole-tau1=0.11", 92.0, bytes=60_000),
)
