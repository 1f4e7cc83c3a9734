"""A target instead of a knob: a number of bytes, a ratio, or an accuracy to keep, and the strength that leads there.

 first phase with τ₁     a `TargetSteering` turns a factor on τ₁, the strength, towards the target
 phases after it         weights beyond the budget are cut while the others can still make up for it
 quantization            `within_bytes`: as many weights as the budget holds; is there room left, finer shared values
 closing phase           the shared values are trained; what is then still too much is trimmed

Sizes are those of coded files, never estimates. For an accuracy to keep, the ending looks for the smallest such file.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayeszip.errors import RecipeError, TargetError
from bayeszip.fitting import Course, EpochStats, Phase, Steering
from bayeszip.posterior import Posterior
from bayeszip.quantize import Quantization, quantize, share_anew, trim
from bayeszip.result import Result
from bayeszip.schedules import SCHEDULES
from bayeszip.summary import show_bytes
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import MixturePrior

__all__ = [
    "AccuracySteering",
    "ByteSteering",
    "Target",
    "TargetSteering",
    "largest_within",
    "parse_bytes",
    "smallest_accurate",
    "within_bytes",
]

Quantized = Mapping[str, QuantizedTensor]

#: How many bytes a file with these weights has.
Size = Callable[[Quantized], int]

#: How often the strength is set anew in a phase, at most.
DECISIONS = 16
#: Share of the deviation that one decision corrects; the weights take a few decisions' time to follow.
GAIN = 0.5
#: d log bytes / d log τ₁, measured on LeNet-300-100 over τ₁ from 0.5 to 2.
ELASTICITY = -0.45
#: The most that one decision changes the strength, and its range, in logarithms.
LARGEST_CHANGE = 1.0
WEAKEST, STRONGEST = math.log(1e-3), math.log(1e2)
#: Where it begins, in units of the recipe's τ₁: weights that stayed too long are pruned later, dead ones hardly revive.
START = math.log(0.1)
#: Sizes fall like a power of the time passed; ever slower, so that a share of the last power is expected.
SLOWING = 0.15
#: Where to head for, in units of the budget: weights too many are cut, while weights too few don't come back.
AIM = 1.05
#: A file that takes this share of its budget is as large as it should be.
ENOUGH = 0.97
#: More shared values than this are no longer shared.
MOST_VALUES = 4096
#: For an accuracy to keep: how many files are tried, how far apart they are at first, and when they are close enough.
TRIALS, STRIDE, CLOSE = 6, 1.25, 1.04


@dataclass(frozen=True)
class Target:
    """What a file has to keep to; exactly one of these.

    Args:
        max_bytes: the whole file has at most so many bytes.
        min_ratio: the whole file is at least so many times smaller than the parameters in float32.
        max_accuracy_drop: the file's network is at most so many percentage points less accurate on the validation
            data than the network before; the smallest such file is looked for.

    Raises:
        RecipeError: none or several are given, or one is out of range.
    """

    max_bytes: int | None = None
    min_ratio: float | None = None
    max_accuracy_drop: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise RecipeError(f"give one of max_bytes, min_ratio and max_accuracy_drop, not {' and '.join(given)}")
        ((name, value),) = given.items()
        if isinstance(value, bool) or not isinstance(value, int if name == "max_bytes" else int | float):
            raise RecipeError(f"{name} must be a number{', whole' if name == 'max_bytes' else ''}, not {value!r}")
        low, high = (0, 100) if name == "max_accuracy_drop" else (1, math.inf)
        if not low <= value < high:
            limit = f"lie between {low} and {high} points" if high < math.inf else f"be at least {low}, and finite"
            raise RecipeError(f"{name} must {limit}, not {value}")

    @classmethod
    def of(
        cls, max_bytes: int | None = None, min_ratio: float | None = None, max_accuracy_drop: float | None = None
    ) -> "Target | None":
        """The target, or None if none is given."""
        if max_bytes is None and min_ratio is None and max_accuracy_drop is None:
            return None
        return cls(max_bytes, min_ratio, max_accuracy_drop)

    def __str__(self) -> str:
        if self.max_bytes is not None:
            return f"at most {self.max_bytes:,} bytes"
        if self.min_ratio is not None:
            return f"at least {self.min_ratio:g} times smaller"
        return f"at most {self.max_accuracy_drop:g} points of accuracy lost"

    def budget(self, parameters: int) -> int | None:
        """The most bytes that a network of so many parameters may take; None: that is not what counts."""
        if self.min_ratio is not None:
            return int(4 * parameters / self.min_ratio)
        return self.max_bytes

    def missed_by(self, result: Result, accuracy_before: float | None) -> str | None:
        """How a result misses the target, and what to do; None if it doesn't."""
        budget = self.budget(result.compressed.original_parameters or 0)
        if budget is not None:
            return None if result.bytes <= budget else f"the file has {result.bytes:,} bytes, more than {budget:,}"
        drop = 100 * ((accuracy_before or 0.0) - (result.accuracy or 0.0))
        if self.max_accuracy_drop is None or drop <= self.max_accuracy_drop + 1e-9:
            return None
        return (
            f"the most accurate of the files tried loses {drop:.2f} points on the validation data, more than "
            f"{self.max_accuracy_drop:g}, at {show_bytes(result.bytes)}. Allow a larger drop, train longer "
            "(epochs_scale), lower τ₁ (all.tau1), or take more shared values (mixture.components)"
        )


def parse_bytes(text: str) -> int:
    """A number of bytes as people write it.

    >>> parse_bytes("20k"), parse_bytes("1.5 MB"), parse_bytes("2KiB"), parse_bytes("3,500")
    (20000, 1500000, 2048, 3500)
    """
    found = re.fullmatch(r"([\d,]*\.?\d+) *(?:([kKmMgG])(i?))?[bB]?", text.strip())
    if not found:
        raise RecipeError(f"{text!r} is not a number of bytes; write 20000, 20k, 1.5MB or 64KiB")
    power = " kmg".index(found[2].lower()) if found[2] else 0
    return int(float(found[1].replace(",", "")) * (1024 if found[3] else 1000) ** power)


class TargetSteering(Steering):
    """Sets the strength during the first phase with τ₁, a few times. Abstract.

    Args:
        phases: those of the compression.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        steered = next((phase for phase in phases if phase.tau1 and phase.epochs), None)
        self.phase = steered.name if steered else None
        self._phases = {phase.name: phase for phase in phases}
        self._after = [phase.name for phase in phases[phases.index(steered) + 1 if steered else 0 :]]
        self.log_strength = START if steered else 0.0

    def strength(self) -> float:
        return math.exp(self.log_strength)

    def on_phase(self, course: Course) -> None:
        if course.phase.name in self._after:
            self._cut(course, mixed=False)

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        if stats.phase == self.phase:
            every = max(1, stats.epochs // DECISIONS)
            change = self._change(stats, course) if stats.epoch % every == 0 else None
            if change is not None:
                change = min(max(change, -LARGEST_CHANGE), LARGEST_CHANGE)
                self.log_strength = min(max(self.log_strength + change, WEAKEST), STRONGEST)
        elif stats.phase in self._after and stats.epoch == (stats.epochs + 1) // 2:
            self._cut(course, mixed=course.phase.tau2 > 0)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a run that goes on later."""
        return {"log_strength": self.log_strength}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log_strength = state["log_strength"]

    def _rate(self, done: float) -> float:
        """Factor on the learning rates when so much of the steered phase is over."""
        return SCHEDULES[self._phases[self.phase].schedule](done) if self.phase else 0.0

    def _change(self, stats: EpochStats, course: Course) -> float | None:
        """What to add to the logarithm of the strength."""
        raise NotImplementedError

    def _cut(self, course: Course, *, mixed: bool) -> None:
        """Set weights to zero that will not fit, while the others are still trained; `mixed`: the mixture is, too."""


class ByteSteering(TargetSteering):
    """Towards a number of bytes.

    While the rates are high, jitter passes for signal: by their α alone, far more weights would be kept than in the
    end. What is measured is therefore what a file would take if the mixture came now, which sends to zero what is near.

    Args:
        size: of a file with these weights, header and graph included.
        how: the recipe's quantization.
    """

    def __init__(self, phases: Sequence[Phase], *, budget: int, size: Size, how: Quantization) -> None:
        super().__init__(phases)
        self._budget, self._size, self._how = budget, size, how
        #: The phase in which the mixture begins.
        self._mixing = next((phase for phase in phases if phase.tau2), None)
        #: log of the share of the phase that was over, and log of the size, at the last decision.
        self.last: tuple[float, float] | None = None

    def heading(self, done: float, course: Course) -> float | None:
        """The size at the end of the phase, of which `done` is over, if things go on like this; at first, None."""
        size = math.log(self._size(self._quantized(course, course.phase.tau2 > 0)[0]))
        last, self.last = self.last, (math.log(done), size)
        if last is None:
            return None
        power = (last[1] - size) / (math.log(done) - last[0])
        return math.exp(size + math.log(done) * SLOWING * min(max(power, 0.0), 2.0))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.last = state["last"]

    def _change(self, stats: EpochStats, course: Course) -> float | None:
        heading = self.heading(stats.epoch / stats.epochs, course)
        return None if heading is None else GAIN * math.log(AIM * self._budget / heading) / ELASTICITY

    @torch.no_grad()
    def _cut(self, course: Course, *, mixed: bool) -> None:
        quantized, posterior = self._quantized(course, mixed)
        kept = largest_within(quantized, posterior, self._size, int(AIM * self._budget))
        for weight in course.weights:
            lost = (quantized[weight.name].symbols != 0) & (kept[weight.name].symbols == 0)
            weight.theta.masked_fill_(torch.from_numpy(lost).to(weight.theta.device), 0.0)

    def _quantized(self, course: Course, mixed: bool) -> tuple[dict[str, QuantizedTensor], Posterior]:
        """As the recipe says; before the mixture is trained, with the one that its phase would begin with now."""
        prior = next((term for term in course.problem.terms if isinstance(term, MixturePrior)), None)
        if prior is not None and self._mixing is not None and not mixed:
            prior = copy.deepcopy(prior)
            prior.begin(self._mixing, course.weights)
            prior.turn(*prior.dials(self._mixing, 0.0)[1:])
        terms = [prior] if prior is not None and self._how.assignment == "mixture" else []
        posterior = Posterior.of(course.network, terms)
        return quantize(posterior, self._how), posterior


class AccuracySteering(TargetSteering):
    """As strong as the accuracy on the validation data bears.

    Args:
        floor: the accuracy to keep.
        drop: by how much that is less than before.
    """

    def __init__(self, phases: Sequence[Phase], *, floor: float, drop: float) -> None:
        super().__init__(phases)
        # The accuracy itself is known to about a thousandth.
        self._floor, self._drop = floor, max(drop, 1e-3)

    def _change(self, stats: EpochStats, course: Course) -> float | None:
        if stats.accuracy is None:
            return None
        # While rates are high the weights jitter, which costs accuracy that comes back.
        jitter = self._drop * self._rate(stats.epoch / stats.epochs)
        spare = (stats.accuracy - (self._floor - jitter)) / self._drop
        return GAIN * min(max(spare, -2.0), 1.0)


def within_bytes(
    posterior: Posterior, how: Quantization, size: Size, budget: int, *, enough: float = ENOUGH
) -> dict[str, QuantizedTensor]:
    """The weights quantized so that a file has at most `budget` bytes, and if possible not many fewer.

    Raises:
        TargetError: not even with every weight zero.
    """
    loose = dataclasses.replace(how, prune_rate=1.0) if how.assignment == "mixture" else how
    best = largest_within(quantize(posterior, loose), posterior, size, budget)
    # All that is not noise is in. What is left of the budget buys finer values.
    values = len(next(iter(best.values())).codebook) - 1
    low, high = values, max(values, min(MOST_VALUES, sum(tensor.nonzero for tensor in best.values())))
    while size(best) < enough * budget and high - low > max(1, low // 50):
        middle = (low + high) // 2
        finer = share_anew(best, posterior, middle, how.codebook_bits)
        if size(finer) <= budget:
            best, low = finer, middle
        else:
            high = middle
    return best


def largest_within(quantized: Quantized, posterior: Posterior, size: Size, budget: int) -> dict[str, QuantizedTensor]:
    """As many of the weights, the least noisy first, as a file of `budget` bytes holds.

    Raises:
        TargetError: not even one without any.
    """
    if size(quantized) <= budget:
        return dict(quantized)
    best = trim(quantized, posterior, 0)
    least = size(best)
    if least > budget:
        raise TargetError(
            f"a file of {budget:,} bytes is out of reach: with every weight zero it takes {least:,}, for the graph and "
            "for what can't be shared; raise the budget"
        )
    low, high = 0, sum(tensor.nonzero for tensor in quantized.values())
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        fewer = trim(quantized, posterior, middle)
        if size(fewer) <= budget:
            best, low = fewer, middle
        else:
            high = middle
    return best


def smallest_accurate(
    posterior: Posterior, how: Quantization, finish: Callable[[Quantized], Result], floor: float
) -> Result:
    """The smallest of a few files whose accuracy is at least `floor`, or if none is, the most accurate.

    Args:
        finish: trains the shared values of a quantized network and codes it.
    """
    loose = quantize(posterior, dataclasses.replace(how, prune_rate=1.0) if how.assignment == "mixture" else how)
    most = sum(tensor.nonzero for tensor in loose.values())
    kept = sum(tensor.nonzero for tensor in quantize(posterior, how).values())
    too_few, enough = 0, math.inf
    best: Result | None = None
    for _ in range(TRIALS):
        result = finish(trim(loose, posterior, kept))
        if _accuracy(result) >= floor:
            enough = min(enough, kept)
        else:
            too_few = max(too_few, kept)
        if best is None or _is_better(result, best, floor):
            best = result
        if too_few >= most or enough <= CLOSE * too_few or kept <= 1:
            break
        kept = _next_count(too_few, enough, most)
    if best is None:  # never: there is at least one trial
        raise TypeError(TRIALS)
    return best


def _next_count(too_few: float, enough: float, most: int) -> int:
    if enough == math.inf:
        return min(most, math.ceil(STRIDE * too_few))
    return int(enough / STRIDE) if too_few == 0 else int(math.sqrt(too_few * enough))


def _is_better(one: Result, other: Result, floor: float) -> bool:
    """Accurate and smaller; or at least more accurate."""
    if min(_accuracy(one), _accuracy(other)) >= floor:
        return one.bytes < other.bytes
    return _accuracy(one) > _accuracy(other)


def _accuracy(result: Result) -> float:
    return 0.0 if result.accuracy is None else result.accuracy
