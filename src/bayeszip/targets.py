"""A target instead of a knob: a number of bytes, a ratio, or a figure to keep, and the strength that leads there.

 first phase with τ₁     a `TargetSteering` turns a factor on τ₁, the strength, towards the target
 phases after it         weights beyond the budget are cut while the others can still make up for it
 quantization            `within_bytes`: as many weights as the budget holds; is there room left, finer shared values
 closing phase           the shared values are trained; what is then still too much is trimmed

Sizes are those of coded files, never estimates. For a figure to keep (accuracy, loss, metric) the ending looks for the
smallest file that does; where none with the recipe's shared values does, it gives bytes for it: finer values, then
weights that had been pruned.
"""

import copy
import dataclasses
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayeszip.errors import DataError, RecipeError, TargetError
from bayeszip.fitting import Course, EpochStats, Figures, Metric, Phase, Steering
from bayeszip.fitting.course import is_pruning
from bayeszip.posterior import Posterior
from bayeszip.quantize import Quantization, quantize, share_anew, trim, unpruned
from bayeszip.result import Result
from bayeszip.schedules import SCHEDULES
from bayeszip.settings import as_number
from bayeszip.summary import show_bytes
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational import MixturePrior

__all__ = [
    "ByteSteering",
    "Quality",
    "QualitySteering",
    "Target",
    "TargetSteering",
    "better",
    "largest_within",
    "parse_bytes",
    "smallest_good",
    "steered_phase",
    "with_more",
    "within_bytes",
]

Quantized = Mapping[str, QuantizedTensor]

#: How many bytes a file with these weights has.
Size = Callable[[Quantized], int]

#: The strength is set anew in every so many-th part of a phase, rounded down to epochs.
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
#: Share of the phase after which a network has got used to its rates, and the prior has hardly begun (`tau1_ramp`).
SETTLING = 0.15
#: Sizes fall like a power of the time passed; ever slower, so that a share of the last power is expected.
SLOWING = 0.15
#: Where to head for, in units of the budget: weights too many are cut, while weights too few don't come back.
AIM = 1.05
#: A file that takes this share of its budget is as large as it should be.
ENOUGH = 0.97
#: More shared values than this are no longer shared.
MOST_VALUES = 4096
#: How many shared values are tried where those of the recipe are too few for a figure to keep.
FINER = (24, 64, 256, 1024)
#: How many of them weights share that are taken back to use up a budget.
TAKEN_BACK_VALUES = 256
#: For a figure to keep: how many files are tried, how far apart they are at first, and when they are close enough.
TRIALS, STRIDE, CLOSE = 6, 1.25, 1.04


@dataclass(frozen=True)
class Quality:
    """A figure to keep, as a score: higher is better.

    Args:
        figure: which of the `Figures`.
        sign: −1 where lower is better.
        floor: the least score.
        slack: by how much that is less than before.
    """

    figure: str
    sign: float
    floor: float
    slack: float

    def score(self, figures: Figures | EpochStats) -> float:
        """Of what was measured; what was not is as bad as can be."""
        value = getattr(figures, self.figure)
        return -math.inf if value is None or math.isnan(value) else self.sign * value

    def is_kept(self, figures: Figures | EpochStats) -> bool:
        # Nothing but rounding: figures come in any unit.
        return self.score(figures) >= self.floor - 1e-9 * abs(self.floor)


@dataclass(frozen=True)
class Target:
    """What a file has to keep to; exactly one of these.

    Args:
        max_bytes: the whole file has at most so many bytes.
        min_ratio: the whole file is at least so many times smaller than the parameters in float32.
        max_accuracy_drop: the file's network is at most so many percentage points less accurate on the validation
            data than the network before; the smallest such file is looked for.
        max_loss_increase: or its loss there is larger by at most this share of what it was: 0.1 is a tenth.
        max_metric_drop: or the caller's metric is worse by at most so much, in its own unit.

    Raises:
        RecipeError: none or several are given, or one is out of range.
    """

    max_bytes: int | None = None
    min_ratio: float | None = None
    max_accuracy_drop: float | None = None
    max_loss_increase: float | None = None
    max_metric_drop: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            names = list(vars(self))
            raise RecipeError(f"give one of {', '.join(names[:-1])} and {names[-1]}, not {' and '.join(given)}")
        ((name, value),) = given.items()
        object.__setattr__(self, name, as_number(name, value, whole=name == "max_bytes"))
        low, high = 1 if name in ("max_bytes", "min_ratio") else 0, 100 if name == "max_accuracy_drop" else math.inf
        if not low <= value < high:
            limit = f"lie between {low} and {high} points" if high < math.inf else f"be at least {low}, and finite"
            raise RecipeError(f"{name} must {limit}, not {value}")

    @classmethod
    def of(cls, **given: Any) -> "Target | None":
        """The target, or None if none is given."""
        return cls(**given) if any(value is not None for value in given.values()) else None

    def __str__(self) -> str:
        if self.max_bytes is not None:
            return f"at most {self.max_bytes:,} bytes"
        if self.min_ratio is not None:
            return f"at least {self.min_ratio:g} times smaller"
        if self.max_loss_increase is not None:
            return f"loss at most {100 * self.max_loss_increase:g} % larger"
        if self.max_metric_drop is not None:
            return f"metric at most {self.max_metric_drop:g} worse"
        return f"at most {self.max_accuracy_drop:g} points of accuracy lost"

    def budget(self, parameters: int) -> int | None:
        """The most bytes that a network of so many parameters may take; None: that is not what counts."""
        if self.min_ratio is not None:
            return int(4 * parameters / self.min_ratio)
        return self.max_bytes

    def quality(self, before: Figures, metric: Metric | None = None) -> Quality | None:
        """What is to be kept of what a network came to before; None: that is not what counts.

        Raises:
            DataError: it was not measured.
        """
        if self.max_bytes is not None or self.min_ratio is not None:
            return None
        name, sign = "accuracy", 1.0
        if self.max_loss_increase is not None:
            name, sign = "loss", -1.0
        elif self.max_metric_drop is not None:
            name, sign = "metric", 1.0 if metric is None or metric.higher_is_better else -1.0
        value = getattr(before, name)
        if value is None:
            why = "the targets are no classes" if name == "accuracy" else "give val_loader, and metric= for a metric"
            if name == "metric" and metric is not None:
                why = f"{metric.name} is not a number there"
            raise DataError(f"there is no validation {name} to keep to: {why}")
        allowed = self._allowed(abs(value))
        return Quality(name, sign, sign * value - allowed, max(allowed, _known_to(name, value, before.targets)))

    def _allowed(self, size: float) -> float:
        if self.max_loss_increase is not None:
            return self.max_loss_increase * size
        return self.max_metric_drop if self.max_metric_drop is not None else (self.max_accuracy_drop or 0.0) / 100

    def missed_by(self, result: Result, before: Figures, metric: Metric | None = None) -> str | None:
        """How a result misses the target, and what to do; None if it doesn't."""
        budget = self.budget(result.compressed.original_parameters or 0)
        if budget is not None:
            return None if result.bytes <= budget else f"the file has {result.bytes:,} bytes, more than {budget:,}"
        quality = self.quality(before, metric)
        if quality is None or quality.is_kept(result.figures):
            return None
        return (
            f"the best of the files tried {self._lost(before, result.figures)}, at {show_bytes(result.bytes)}. Allow "
            "more, train longer (epochs_scale), or give a network and data that are less at odds"
        )

    def _lost(self, before: Figures, after: Figures) -> str:
        if self.max_accuracy_drop is not None:
            drop = 100 * ((before.accuracy or 0.0) - (after.accuracy or 0.0))
            return f"loses {drop:.2f} points on the validation data, more than {self.max_accuracy_drop:g}"
        name = "loss" if self.max_loss_increase is not None else "metric"
        was, is_now = (math.nan if found is None else found for found in (getattr(before, name), getattr(after, name)))
        return f"has a validation {name} of {is_now:.4g}, where it was {was:.4g}, and is to keep: {self}"


def _known_to(name: str, value: float, targets: float | None) -> float:
    """How precisely a figure is known: what is less than that must not turn a strength."""
    if name != "accuracy":
        return max(1e-3 * abs(value), sys.float_info.min)
    return max(1e-3, math.sqrt(value * (1 - value) / targets) if targets else 0.0)


def parse_bytes(text: str) -> int:
    """A number of bytes as people write it.

    >>> parse_bytes("20k"), parse_bytes("1.5 MB"), parse_bytes("2KiB"), parse_bytes("3,500")
    (20000, 1500000, 2048, 3500)
    """
    # A comma parts thousands: "1,5k" could mean two things, of which one is ten times the other.
    found = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d+|\d*\.\d+) *(?:([kKmMgG])(i?))?[bB]?", text.strip())
    if not found:
        raise RecipeError(f"{text!r} is not a number of bytes; write 20000, 20k, 1.5MB or 64KiB")
    power = " kmg".index(found[2].lower()) if found[2] else 0
    return int(float(found[1].replace(",", "")) * (1024 if found[3] else 1000) ** power)


def steered_phase(phases: Sequence[Phase]) -> Phase | None:
    """The first with a term that the strength is a factor of, which is set then; None: there is nothing to steer by."""
    return next((phase for phase in phases if phase.epochs and is_pruning(phase)), None)


class TargetSteering(Steering):
    """Sets the strength during the first phase with τ₁, or another weight that can be steered, a few times. Abstract.

    Args:
        phases: those of the compression.
        ceiling: the most that the strength may be: less than what was too strong in a training before.
    """

    def __init__(self, phases: Sequence[Phase], ceiling: float | None = None) -> None:
        steered = steered_phase(phases)
        self.phase = steered.name if steered else None
        self._phases = {phase.name: phase for phase in phases}
        self._after = [phase.name for phase in phases[phases.index(steered) + 1 if steered else 0 :]]
        self._strongest = STRONGEST if ceiling is None else max(WEAKEST, math.log(ceiling))
        self.log_strength = min(START, self._strongest) if steered else 0.0

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
                self.log_strength = min(max(self.log_strength + change, WEAKEST), self._strongest)
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
        try:
            kept = largest_within(quantized, posterior, self._size, int(AIM * self._budget))
        except TargetError:
            # What a file holds beside weights is counted as if no unit were dead: at the end the file itself will tell.
            return
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


class QualitySteering(TargetSteering):
    """As strong as a figure on the validation data bears.

    Args:
        quality: the figure to keep.
    """

    def __init__(self, phases: Sequence[Phase], *, quality: Quality, ceiling: float | None = None) -> None:
        super().__init__(phases, ceiling)
        self._quality = quality
        #: How far full rates by themselves bring the score below the floor; known when the network has settled.
        self.shock = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "shock": self.shock}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.shock = state["shock"]

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        super().on_epoch(stats, course)
        spare = self._spare(stats, 0.0)
        if stats.phase in self._after and is_pruning(course.phase) and spare != -math.inf:
            # What is dead stays so; the others can still be relieved.
            self.log_strength = max(self.log_strength + GAIN * min(max(spare, -1.0), 0.0), WEAKEST)

    def _change(self, stats: EpochStats, course: Course) -> float | None:
        # While rates are high the weights jitter, which costs accuracy that comes back.
        done = stats.epoch / stats.epochs
        rate, quality = self._rate(done), self._quality
        if done <= SETTLING and rate:
            # The prior has hardly begun. The last look counts: the first epoch is the worst.
            below = max(quality.floor - quality.score(stats), 0.0)
            self.shock = below / rate**2 if math.isfinite(below) else 0.0
        spare = self._spare(stats, max(rate * quality.slack, rate**2 * self.shock))
        return None if spare == -math.inf else GAIN * min(max(spare, -2.0), 1.0)

    def _spare(self, stats: EpochStats, jitter: float) -> float:
        """How much better it is than it need be, in units of what may be lost; `jitter` of it comes back."""
        quality = self._quality
        return (quality.score(stats) - (quality.floor - jitter)) / quality.slack


def within_bytes(
    posterior: Posterior, how: Quantization, size: Size, budget: int, *, enough: float = ENOUGH
) -> dict[str, QuantizedTensor]:
    """The weights quantized so that a file has at most `budget` bytes, and if possible not many fewer.

    Raises:
        TargetError: not even with every weight zero.
    """
    size = _asked_once(size)
    loose = dataclasses.replace(how, prune_rate=1.0) if how.assignment == "mixture" else how
    best = largest_within(quantize(posterior, loose), posterior, size, budget)
    # All that is not noise is in. What is left of the budget buys finer values, then weights that had been pruned.
    best = _finer(best, posterior, how, size, budget, enough)
    if size(best) < enough * budget:
        best = _taken_back(best, posterior, how, size, budget)
        best = _finer(best, posterior, how, size, budget, enough)
    return best


def _asked_once(size: Size) -> Size:
    """The same, without coding again what it has coded just before: the best so far is asked for at every turn."""
    known: deque[tuple[Quantized, int]] = deque(maxlen=3)

    def measured(quantized: Quantized) -> int:
        found = next((each for each in known if each[0] is quantized), None) or (quantized, size(quantized))
        known.append(found)
        return found[1]

    return measured


def _taken_back(
    best: dict[str, QuantizedTensor], posterior: Posterior, how: Quantization, size: Size, budget: int
) -> dict[str, QuantizedTensor]:
    """With as many of the weights that had been pruned, the least noisy first, as the budget holds."""
    everything = unpruned(best, posterior)
    values = min(len(next(iter(best.values())).codebook) - 1, TAKEN_BACK_VALUES)
    low, high = (sum(tensor.nonzero for tensor in held.values()) for held in (best, everything))
    if not values or high <= low:
        return best
    high += 1
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        more = share_anew(trim(everything, posterior, middle), posterior, values, how.codebook_bits)
        if size(more) <= budget:
            best, low = (more if size(more) > size(best) else best), middle
        else:
            high = middle
    return best


def _finer(
    best: dict[str, QuantizedTensor], posterior: Posterior, how: Quantization, size: Size, budget: int, enough: float
) -> dict[str, QuantizedTensor]:
    """The same weights by more values, as many as the budget holds."""
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


def smallest_good(
    posterior: Posterior, how: Quantization, finish: Callable[[Quantized], Result], quality: Quality
) -> Result:
    """The smallest of a few files that keep a figure, or if none does, the one that comes closest.

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
        if quality.is_kept(result.figures):
            enough = min(enough, kept)
        else:
            too_few = max(too_few, kept)
        best = better(result, best, quality)
        if too_few >= most or enough <= CLOSE * too_few or kept <= 1:
            break
        kept = _next_count(too_few, enough, most)
    for finer in with_more(loose, posterior, how):
        if best is not None and quality.is_kept(best.figures):
            break
        best = better(finish(finer), best, quality)
    if best is None:  # never: there is at least one trial
        raise TypeError(TRIALS)
    return best


def with_more(loose: Quantized, posterior: Posterior, how: Quantization) -> Iterator[Quantized]:
    """Ever more of the trained network: its weights by finer values, then all of them."""
    present = len(next(iter(loose.values())).codebook) - 1
    for values in FINER:
        if values > present:
            yield share_anew(loose, posterior, values, how.codebook_bits)
    yield share_anew(unpruned(loose, posterior), posterior, FINER[-1], 32)


def _next_count(too_few: float, enough: float, most: int) -> int:
    if enough == math.inf:
        return min(most, math.ceil(STRIDE * too_few))
    return int(enough / STRIDE) if too_few == 0 else int(math.sqrt(too_few * enough))


def better(one: Result, other: Result | None, quality: Quality) -> Result:
    """The one that keeps the figure and is smaller; or at least comes closer to it."""
    if other is None:
        return one
    kept = quality.is_kept(one.figures), quality.is_kept(other.figures)
    if all(kept):
        return one if one.bytes < other.bytes else other
    return one if quality.score(one.figures) > quality.score(other.figures) else other
