"""Posterior → symbols and shared values. The only step that loses information.

Two ways, as in app. B of the paper:

- with a mixture: each θ takes the mean of its most responsible component, in the unit of its tensor, which becomes the
  scale of all its rows;
- without (variational dropout alone): weights whose dropout rate σ²/(θ²+σ²) reaches a threshold become 0, and a
  mixture fitted to the fixed rest gives the shared values.

Components that coincide, or that no weight chose, disappear from the codebook. If bits weigh anything, each weight then
takes the value that is worth them: `by_rate`.

Weights that were never trained for it are quantized tensor by tensor: `cluster` to a number of shared values, `bounded`
within an error that no weight may exceed, `stepped` to a grid, `dependent` to a grid by a path through a trellis.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from bayeszip import codec
from bayeszip.errors import ModelError, RecipeError
from bayeszip.posterior import GaussianTensor, Posterior
from bayeszip.settings import at_least, between, check, choice, setting
from bayeszip.tensors import (
    MAX_LOG_SYMBOLS,
    MAX_SYMBOLS,
    Aim,
    CompressedModel,
    LogGrid,
    QuantizedTensor,
    RawTensor,
    UniformGrid,
)
from bayeszip.variational import GaussianMixture

__all__ = [
    "PRICE_OF_A_BIT",
    "PRICE_OF_A_DEPENDENT_BIT",
    "Precision",
    "Quantization",
    "bits_of_multiples",
    "bounded",
    "by_rate",
    "cheapest_multiples",
    "cluster",
    "dependent",
    "fit_mixture",
    "in_precision",
    "on_multiples",
    "quantize",
    "round_codebook",
    "round_norms",
    "round_vector",
    "round_vectors",
    "share_anew",
    "significant_bits",
    "stepped",
    "trim",
    "unpruned",
    "with_values",
]

_CHUNK = 2**20

#: A step over the root mean square of what rounding to it moves.
_SPREAD = math.sqrt(12)

#: Share of the squared error by which more of it makes no difference, and that of an output's error.
LOST = 0.01
LOST_IN_A_SUM = 0.3

#: Types that shared values may be rounded to; they are held in float32.
Precision = Literal["float16", "bfloat16", "float32"]

#: Multiples from 0 on for each one in use: beyond, their values are stored instead of a step.
_MOST_ON_A_GRID = 4

#: How often weights choose among shared values that then move to them.
_TURNS = 3

#: How far rounding to a type moves a value, at most, relative to it.
_ROUNDING: dict[str, float] = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}

#: What a grid's step, or base, and its values lie between.
_FLOAT32 = np.finfo(np.float32)

#: What a bit is worth in squared error, in units of a squared step; at a high rate 2 ln 2 / 12, where steps are fine.
PRICE_OF_A_BIT = 0.1
#: The same where values depend on each other, and their step is shorter.
PRICE_OF_A_DEPENDENT_BIT = 0.35


@dataclass(frozen=True)
class Quantization:
    """How weights become symbols."""

    assignment: str = setting(
        "mixture",
        "mixture: by the trained prior; fit: prune, then fit a mixture to what is left",
        choice("mixture", "fit"),
    )
    prune_rate: float = setting(
        1.0, "weights whose dropout rate σ²/(θ²+σ²) is at least this become 0 (1: none do)", between(0.5, 1)
    )
    components: int = setting(64, "shared values that assignment=fit looks for", between(1, 2**16 - 1))
    values: int = setting(
        0,
        "at most so many shared values that are not zero: where there are more, neighbors of one sign join (0: as many "
        "as there are)",
        between(0, 2**16 - 1),
    )
    merge_within: float = setting(
        0.0, "components merge that lie within this many standard deviations of each other", at_least(0)
    )
    codebook_bits: int = setting(32, "precision of the shared values: 32, or 16 (IEEE half)", between(16, 32))
    rate: float = setting(
        0.0,
        "what a bit of the file weighs when each weight takes a shared value, against (θ − value)² / 2σ² and in units "
        "of ln 2 (0: nothing)",
        between(0, 1e6),
    )
    rate_trials: int = setting(
        0,
        "how many rates to try on the validation data, `rate` and down by quarters; the first that keeps the accuracy "
        "is taken, or none (0: `rate` as it is)",
        between(0, 16),
    )
    rate_drop: float = setting(
        0.0, "rate_trials: percentage points of validation accuracy that a rate may cost", between(0, 100)
    )

    curvature: float = setting(
        0.0,
        "what the loss's curvature on training data weighs beside 1/σ² where moves are weighed against bits; moves of "
        "a row of weights then count together (0: nothing)",
        between(0, 1e6),
    )

    together: bool = setting(
        False,
        "where bits weigh nothing: weights of a row choose among the shared values by what their moves do together on "
        "training data (off: each by itself)",
    )

    def __post_init__(self) -> None:
        check(self, "quantization")
        if self.rate_trials and not self.rate:
            raise RecipeError(
                "quantization.rate_trials tries parts of quantization.rate, which is 0; set it to 1 or so"
            )
        if self.values == 1:
            raise RecipeError("quantization.values must be at least 2, one of each sign, or 0 for as many as there are")
        if self.codebook_bits not in (16, 32):
            raise RecipeError(f"quantization.codebook_bits must be 16 or 32, not {self.codebook_bits}")


def quantize(posterior: Posterior, settings: Quantization) -> dict[str, QuantizedTensor]:
    """Symbols for every weight of the posterior, with one codebook for all; tensors with a unit have it as a scale."""
    if settings.assignment == "mixture":
        if posterior.mixture is None:
            raise ModelError("assignment=mixture needs a network trained with a mixture prior; use assignment=fit")
        mixture, first = posterior.mixture, 0
    else:
        mixture, first = fit_mixture(_survivors(posterior, settings.prune_rate), settings.components), 1
    group, values = _merge(mixture, settings.merge_within, pinned=first == 0)
    symbols = {}
    for name, weight in posterior.weights.items():
        kept = ~_pruned(weight, settings.prune_rate)
        symbols[name] = np.zeros(weight.theta.shape, np.int64)
        symbols[name][kept] = _assign(weight.theta[kept], name, mixture, group) + first
    if first:
        values = np.concatenate([[0.0], values])
        values = _with_zero(values, symbols, {name: weight.theta for name, weight in posterior.weights.items()})
    tensors = _compact_codebook(symbols, round_codebook(values, settings.codebook_bits))
    for name, unit in mixture.units.items():
        tensors[name] = _in_unit(tensors[name], round_codebook(np.array([0.0, unit]), settings.codebook_bits))
    if settings.values and len(_shared_codebook(tensors)) - 1 > settings.values:
        tensors = _with_neighbors_joined(tensors, posterior, settings)
    return by_rate(tensors, posterior, settings.rate, settings.codebook_bits) if settings.rate else tensors


def trim(quantized: Mapping[str, QuantizedTensor], posterior: Posterior, kept: int) -> dict[str, QuantizedTensor]:
    """The same with at most `kept` weights that are not zero: those with the least noise for their size, σ²/θ²."""
    alive = {name: tensor.symbols != 0 for name, tensor in quantized.items()}
    noise = np.concatenate([_log_alpha(posterior.weights[name])[alive[name]] for name in quantized])
    if kept >= noise.size:
        return dict(quantized)
    chosen = np.zeros(noise.size, bool)
    chosen[np.argsort(noise, kind="stable")[:kept]] = True
    symbols, start = {}, 0
    for name, tensor in quantized.items():
        count = int(alive[name].sum())
        symbols[name] = tensor.symbols.astype(np.int64)
        symbols[name][alive[name]] *= chosen[start : start + count]
        start += count
    return _with_scales(_compact_codebook(symbols, _shared_codebook(quantized)), quantized)


def by_rate(
    quantized: Mapping[str, QuantizedTensor], posterior: Posterior, strength: float, codebook_bits: int
) -> dict[str, QuantizedTensor]:
    """Each weight by the shared value with the least (θ − v)² / 2σ² + strength · ln 2 · bits, and values that fit.

    The posterior says what a move costs: it is as wide as the loss is flat. The bits are what the coder asks where the
    weight stands; zero is a value like any other. Weights choose and values move to the mean of those that chose them,
    in turns.
    """
    aims = {
        name: Aim(weight.theta.astype(np.float64), np.exp(-weight.log_sigma2.astype(np.float64)))
        for name, weight in posterior.weights.items()
    }
    for _ in range(_TURNS):
        chosen = codec.cheapest(CompressedModel(quantized), aims, strength).tensors
        symbols = {name: tensor.symbols for name, tensor in chosen.items() if isinstance(tensor, QuantizedTensor)}
        moved = {name: replace(tensor, symbols=symbols[name]) for name, tensor in quantized.items()}
        quantized = with_values(moved, _means_of_members(quantized, symbols, aims), codebook_bits)
    return dict(quantized)


def with_values(
    quantized: Mapping[str, QuantizedTensor], values: np.ndarray, codebook_bits: int
) -> dict[str, QuantizedTensor]:
    """The same symbols with other shared values, rounded; of these, only such as are in use and differ."""
    symbols = {name: tensor.symbols for name, tensor in quantized.items()}
    return _with_scales(_compact_codebook(symbols, round_codebook(values, codebook_bits)), quantized)


def _with_neighbors_joined(
    quantized: Mapping[str, QuantizedTensor], posterior: Posterior, settings: Quantization
) -> dict[str, QuantizedTensor]:
    """The same zeros by fewer other values: as many neighbors to each as to the next, and each the mean of its weights.

    Components lie where the mixture has drawn weights to, at almost even steps; so do pairs of them. Values that were
    fitted to the weights anew would be closer to them, and so close to each other where weights are many that symbols
    took more bits.
    """
    joined = _joined(_shared_codebook(quantized), settings.values)
    moved = {name: replace(tensor, symbols=joined[tensor.symbols]) for name, tensor in quantized.items()}
    sums, counts = np.zeros((2, settings.values + 1))
    for name, tensor in moved.items():
        flat = tensor.symbols.ravel()
        sums += np.bincount(flat, _in_units(posterior.weights[name].theta, tensor).ravel(), sums.size)
        counts += np.bincount(flat, minlength=sums.size)
    sums[0] = 0.0
    return with_values(moved, sums / np.maximum(counts, 1), settings.codebook_bits)


def _joined(codebook: np.ndarray, count: int) -> np.ndarray:
    """For each symbol of a sorted codebook the one of `count` that it becomes; signs stay apart, and 0 stays 0."""
    is_negative = codebook[1:] < 0
    negative, positive = int(is_negative.sum()), int((~is_negative).sum())
    below = round(count * is_negative.mean())
    # Where there are few of a sign, they keep one.
    below = min(max(below, min(negative, 1)), count - min(positive, 1))
    left = np.arange(negative) * below // max(negative, 1)
    right = np.arange(positive) * (count - below) // max(positive, 1)
    return np.concatenate([[0], 1 + left, 1 + below + right])


def _means_of_members(
    quantized: Mapping[str, QuantizedTensor], symbols: Mapping[str, np.ndarray], aims: Mapping[str, Aim]
) -> np.ndarray:
    """The values nearest to the aims of the weights that have them; one that nobody has stays, and so does 0."""
    codebook = _shared_codebook(quantized).astype(np.float64)
    sums, mass = np.zeros((2, codebook.size))
    for name, tensor in quantized.items():
        precisions = np.broadcast_to(aims[name].precisions * np.square(tensor.row_scales()), tensor.shape).ravel()
        flat = symbols[name].ravel()
        sums += np.bincount(flat, precisions * _in_units(aims[name].means, tensor).ravel(), codebook.size)
        mass += np.bincount(flat, precisions, codebook.size)
    means = np.divide(sums, mass, out=codebook.copy(), where=mass > 0)
    means[0] = 0.0
    return means


def share_anew(
    quantized: Mapping[str, QuantizedTensor], posterior: Posterior, components: int, codebook_bits: int
) -> dict[str, QuantizedTensor]:
    """The same zeros; the other weights by at most `components` values fitted to their means."""
    alive = {name: tensor.symbols != 0 for name, tensor in quantized.items()}
    theta = {name: _in_units(posterior.weights[name].theta, tensor) for name, tensor in quantized.items()}
    means = fit_mixture(np.concatenate([theta[name][places] for name, places in alive.items()]), components).means
    bounds = 0.5 * (means[1:] + means[:-1])
    symbols = {name: np.where(places, np.searchsorted(bounds, theta[name]) + 1, 0) for name, places in alive.items()}
    values = round_codebook(np.concatenate([[0.0], means]), codebook_bits)
    return _with_scales(_compact_codebook(symbols, values), quantized)


def unpruned(quantized: Mapping[str, QuantizedTensor], posterior: Posterior) -> dict[str, QuantizedTensor]:
    """Every weight whose mean is not 0, by one value to begin with: for `trim` and `share_anew` to choose from."""
    codebook = np.array([0.0, 1.0], np.float32)
    symbols = {name: (posterior.weights[name].theta != 0).astype(np.int64) for name in quantized}
    return _with_scales({name: QuantizedTensor(array, codebook) for name, array in symbols.items()}, quantized)


def _in_units(weights: np.ndarray, tensor: QuantizedTensor) -> np.ndarray:
    """Weights in units of their channel's scale, where the tensor has scales."""
    if tensor.scale is None:
        return weights
    scales = tensor.row_scales()
    return np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0)


def _with_scales(
    tensors: Mapping[str, QuantizedTensor], like: Mapping[str, QuantizedTensor]
) -> dict[str, QuantizedTensor]:
    """The tensors with the scales of those they came from."""
    return {
        name: replace(tensor, scale=like[name].scale, axis=like[name].axis) if tensor.nonzero else tensor
        for name, tensor in tensors.items()
    }


def _in_unit(tensor: QuantizedTensor, scales: np.ndarray) -> QuantizedTensor:
    """The tensor with `scales[1]` for every row, if any of its weights is left to scale."""
    rows = tensor.shape[:1]
    return replace(tensor, scale=QuantizedTensor(np.ones(rows, np.uint8), scales)) if tensor.nonzero else tensor


def _shared_codebook(quantized: Mapping[str, QuantizedTensor]) -> np.ndarray:
    return next(iter(quantized.values())).codebook


def _log_alpha(weight: GaussianTensor) -> np.ndarray:
    """log σ² − log θ²; infinite where θ is 0."""
    with np.errstate(divide="ignore"):
        return weight.log_sigma2.astype(np.float64) - 2 * np.log(np.abs(weight.theta.astype(np.float64)))


def cluster(weights: np.ndarray, components: int, precision: Precision | None = None) -> QuantizedTensor:
    """A tensor by at most `components` shared values, least far off in the square; exact zeros stay zero.

    A tensor that takes no more than `components` values besides 0 keeps them.

    Args:
        precision: of the shared values; None: half where that is lost in what clustering does, else float32. Half
            would flatten weights that are all tiny, huge, or far from zero and close together.
    """
    values = np.unique(weights[weights != 0])
    if values.size <= components:
        symbols = np.where(weights == 0, 0, np.searchsorted(values, weights) + 1)
    else:
        values = _nearest_means(weights[weights != 0].astype(np.float64), components)
        symbols = np.where(weights == 0, 0, np.searchsorted(0.5 * (values[1:] + values[:-1]), weights) + 1)
    codebook = _with_zero(np.concatenate([[0.0], values.astype(np.float64)]), {"": symbols}, {"": weights})
    if precision is None:
        precision = "float16" if _is_lost_in_clustering("float16", codebook, symbols, weights) else "float32"
    return _compact_codebook({"": symbols}, in_precision(codebook, precision))[""]


def _with_zero(values: np.ndarray, symbols: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """The values with the smallest of them 0, if most weights have it and the move is lost in what clustering does.

    Training with a weight penalty leaves most weights next to 0. Their shared value is not 0 by chance alone, and zeros
    cost less: they have contexts of their own, and units whose weights are all zero go.
    """
    counts = np.zeros(values.size, np.int64)
    for array in symbols.values():
        counts += np.bincount(array.ravel(), minlength=values.size)
    if not counts[1:].any():
        return values
    smallest = 1 + int(np.abs(values[1:]).argmin())
    size = abs(float(values[smallest]))
    if 2 * counts[smallest] <= counts[1:].sum():
        return values
    errors = {name: np.square(values[array] - weights[name]) for name, array in symbols.items()}
    if counts[smallest] * size**2 > LOST * sum(float(error.sum()) for error in errors.values()):
        return values
    for name, error in errors.items():
        if error.ndim < 2:
            continue
        # All moves have one sign: in the sum that an output is, they add up where errors partly cancel.
        moved = size * np.count_nonzero(symbols[name].reshape(len(error), -1) == smallest, axis=1).max(initial=0)
        if moved > LOST_IN_A_SUM * float(np.sqrt(error.sum() / max(1, len(error)))):
            return values
    return np.where(np.arange(values.size) == smallest, 0.0, values)


def _is_lost_in_clustering(
    precision: Precision, codebook: np.ndarray, symbols: np.ndarray, weights: np.ndarray
) -> bool:
    """Whether rounding the shared values adds next to nothing to the squared error."""
    by_clustering = float(np.square(codebook[symbols] - weights).sum())
    moved = np.square(in_precision(codebook, precision).astype(np.float64) - codebook)
    by_rounding = float(np.bincount(symbols.ravel(), minlength=codebook.size) @ moved)
    return by_rounding <= LOST * by_clustering


def _nearest_means(values: np.ndarray, count: int, iterations: int = 50) -> np.ndarray:
    """`count` values from which the others are least far off in the square: Lloyd's iteration in one dimension.

    It starts where a fine quantizer is best, at even steps of the integral of density^⅓ (Panter and Dite 1951), the
    extremes included: an outlier would not be found later.
    """
    values = np.sort(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    density, edges = np.histogram(values, bins=min(max(values.size // 16, 16), 4096))
    share = np.concatenate([[0.0], np.cumsum(np.cbrt(density))])
    means = np.interp(np.linspace(0, share[-1], count) if count > 1 else share[-1:] / 2, share, edges)
    for _ in range(iterations):
        bounds = np.searchsorted(values, 0.5 * (means[1:] + means[:-1]))
        bounds = np.concatenate([[0], bounds, [values.size]])
        size = np.diff(bounds)
        means = np.where(size > 0, np.diff(sums[bounds]) / np.maximum(size, 1), means)
    return means


def bounded(weights: np.ndarray, max_error: float, precision: Precision = "float32") -> QuantizedTensor:
    """A tensor rounded to even steps so that no weight moves by more than `max_error`.

    Args:
        precision: of the shared values.

    Raises:
        ModelError: that would take more than 2¹⁶ shared values.
    """
    # A little under twice the bound: the shared values are rounded afterwards.
    rounding = _ROUNDING[precision] * (float(np.abs(weights).max(initial=0.0)) + max_error)
    step = 2 * (max_error * (1 - 1e-6) - rounding)
    if step <= 0:
        raise ModelError(f"a bound of {max_error:g} is below the precision of {precision} for these weights; raise it")
    levels = np.rint(weights.astype(np.float64) / step)
    distinct, symbols = np.unique(levels, return_inverse=True)
    if distinct.size >= 2**16:
        raise ModelError(f"a bound of {max_error:g} needs {distinct.size:,} shared values, more than 65,535; raise it")
    most = float(np.abs(distinct).max(initial=0.0))
    if precision == "float32" and most <= _MOST_ON_A_GRID * distinct.size and step > np.finfo(np.float32).tiny:
        # The step as float32 has it must not be the larger one.
        tensor = stepped(weights, float(np.nextafter(np.float32(step), np.float32(0))), price=0)
        if _farthest(tensor.dequantize(), weights) <= max_error:
            return tensor
    codebook = in_precision(distinct * step, precision)
    if _farthest(codebook[symbols].reshape(weights.shape), weights) > max_error:
        raise ModelError(f"a bound of {max_error:g} is below the precision of {precision} for these weights; raise it")
    symbols = symbols.reshape(weights.shape) + 1
    return _compact_codebook({"": symbols}, np.concatenate([[np.float32(0)], codebook]))[""]


def _farthest(values: np.ndarray, weights: np.ndarray) -> float:
    return float(np.abs(values - weights.astype(np.float64)).max(initial=0.0))


def stepped(weights: np.ndarray, step: float, price: float = PRICE_OF_A_BIT) -> QuantizedTensor:
    """A tensor on a uniform grid: every weight takes the multiple of `step` with the least error and the fewest bits.

    Least is (w / step − n)² + price · bits(n), the bits being those of n's share among the tensor's weights. Multiples
    considered are the nearest, the next one towards zero, and zero. Exact zeros stay zero.

    Args:
        price: what a bit is worth; 0 takes the nearest multiple.

    Raises:
        ModelError: that would take more than 2¹⁶ − 1 multiples.
    """
    step = float(np.float32(step))
    if not _fits_a_grid(weights, step):
        raise ModelError(f"a step of {step:g} needs more than {MAX_SYMBOLS:,} shared values; raise it")
    ratio = weights.astype(np.float64) / step
    nearest = np.rint(ratio).astype(np.int64)
    chosen = nearest
    low, high = int(nearest.min(initial=0)), int(nearest.max(initial=0))
    for _ in range(2 if price else 0):
        chosen = cheapest_multiples(ratio, nearest, price, bits_of_multiples(chosen, low, high))
    return on_multiples(chosen, step)


def _fits_a_grid(weights: np.ndarray, step: float) -> bool:
    """Whether a uniform grid of this step can hold them."""
    if not _FLOAT32.smallest_normal <= step <= _FLOAT32.max:
        return False
    step, largest = float(np.float32(step)), float(np.abs(weights.astype(np.float64)).max(initial=0.0))
    return largest + step <= float(_FLOAT32.max) and largest / step <= MAX_SYMBOLS // 2 - 1


def dependent(weights: np.ndarray, step: float, price: float = PRICE_OF_A_DEPENDENT_BIT) -> QuantizedTensor:
    """A tensor on a uniform grid, its multiples ones that the coder "context" can code as dependent on each other.

    That asks for a step about 0.6 times as long as `stepped` does at equal error, and for fewer bits.
    """
    step = float(np.float32(step))
    return on_multiples(codec.cheapest_path(weights.astype(np.float64) / step, price), step)


def on_multiples(multiples: np.ndarray, step: float) -> QuantizedTensor:
    """A tensor of multiples of a step, on the smallest grid that has them."""
    symbols = np.where(multiples < 0, -2 * multiples - 1, 2 * multiples)
    return QuantizedTensor.on_grid(symbols, UniformGrid(step, max(int(symbols.max(initial=0)), 1) + 1))


def round_norms(model: CompressedModel, deviations: Mapping[str, float], error: float) -> CompressedModel:
    """The scales of weights on one logarithmic grid, and what norms hold on grids of their own.

    A factor moves by `error` of itself, a shift by `error` of the deviation of what it is added to (root mean squares);
    0 moves nothing.

    Args:
        deviations: by the name of a shift, or of the weight of a norm without one, as `graph.fold_norms` gives them.
    """
    if not error:
        return model
    scales = [tensor.scale for tensor in model.tensors.values() if isinstance(tensor, QuantizedTensor)]
    factors = [scale.dequantize() for scale in scales if scale is not None and scale.grid is None]
    grid = _log_grid(np.concatenate(factors), error) if factors else None
    own = {name: _log_grid(_raw(model, name), error) for name in _weights_of_norms(model, deviations)}
    rounded: dict[str, QuantizedTensor | RawTensor] = {}
    for name, tensor in model.tensors.items():
        rounded[name] = tensor
        if isinstance(tensor, QuantizedTensor):
            if grid is not None and tensor.scale is not None and tensor.scale.grid is None:
                rounded[name] = replace(tensor, scale=_on_log_grid(tensor.scale.dequantize(), grid))
        elif (of_norm := own.get(name)) is not None:
            rounded[name] = _on_log_grid(tensor.numbers(), of_norm)
        elif name in deviations and name not in own and _is_vector(tensor):
            step = _in_two_bytes(_SPREAD * error * (deviations[name] or 1.0))
            # A shift that no grid of such steps holds stays as it is: coarser ones would move it further than `error`.
            if _fits_a_grid(tensor.numbers(), step):
                rounded[name] = stepped(tensor.numbers(), step)
    return replace(model, tensors=rounded)


def _in_two_bytes(step: float) -> float:
    """A step that is a little shorter, as bfloat16 has it: there is one for every norm, and any will do."""
    return float((np.array(step, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))


def round_vector(values: np.ndarray, error: float) -> QuantizedTensor | None:
    """A vector on a logarithmic grid: each element moves by `error` of itself in the mean; None: no grid holds it."""
    grid = _log_grid(values, error)
    return None if grid is None else _on_log_grid(values, grid)


def round_vectors(model: CompressedModel, uses: Mapping[str, str], error: float) -> CompressedModel:
    """Vectors that are parameters by themselves, on grids of their own; one that no grid holds stays as it is.

    Each element moves by `error` of itself, or, in a summand, of the vector's size (root mean squares); 0 moves
    nothing.

    Args:
        uses: by the name of a vector, as `graph.free_vectors` gives them.
    """
    rounded: dict[str, QuantizedTensor | RawTensor] = dict(model.tensors)
    for name, use in uses.items() if error else ():
        values = _raw(model, name).astype(np.float64)
        step = _in_two_bytes(_SPREAD * error * float(np.sqrt(np.square(values).mean())))
        if use == "summand" and _fits_a_grid(values, step):
            rounded[name] = stepped(values, step)
        else:
            rounded[name] = round_vector(values, error) or rounded[name]
    return replace(model, tensors=rounded)


def _weights_of_norms(model: CompressedModel, deviations: Mapping[str, float]) -> list[str]:
    """Those of norms that are still there."""
    nodes = model.graph.nodes if model.graph is not None else ()
    named = [(*node.tensors, None, None)[:2] for node in nodes if "_norm" in node.op]
    found = dict.fromkeys(weight for weight, bias in named if weight is not None and (bias or weight) in deviations)
    return [name for name in found if _is_vector(model.tensors[name])]


def _is_vector(tensor: QuantizedTensor | RawTensor) -> bool:
    return isinstance(tensor, RawTensor) and tensor.is_floating and tensor.size > 0


def _raw(model: CompressedModel, name: str) -> np.ndarray:
    tensor = model.tensors[name]
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.numbers()


def _log_grid(values: np.ndarray, error: float) -> LogGrid | None:
    """A grid of even ratios from the least to the largest magnitude; None if it would be too long, or has no use."""
    sizes = np.abs(values[values != 0]).astype(np.float64)
    ratio = float(np.float32(1 + _SPREAD * error))
    if not sizes.size or not (_FLOAT32.smallest_normal <= sizes.min() and sizes.max() * ratio <= _FLOAT32.max):
        return None
    count = 1 + math.ceil(math.log(sizes.max() / sizes.min()) / math.log(ratio))
    signed = bool((values < 0).any())
    size = 1 + max(1, count) * (2 if signed else 1)
    return LogGrid(float(np.float32(sizes.min())), ratio, size, signed) if size <= MAX_LOG_SYMBOLS else None


def _on_log_grid(values: np.ndarray, grid: LogGrid) -> QuantizedTensor:
    """Each value by the nearest of the grid in ratio."""
    with np.errstate(divide="ignore"):
        steps = np.log(np.abs(values.astype(np.float64)) / grid.base) / math.log(grid.ratio)
    places = np.clip(np.rint(steps), 0, (grid.size - 1) // (2 if grid.signed else 1) - 1)
    places = np.where(values == 0, 0, places).astype(np.int64)
    symbols = 2 * places + np.where(values < 0, 1, 2) if grid.signed else places + 1
    return QuantizedTensor.on_grid(np.where(values == 0, 0, symbols), grid)


def bits_of_multiples(multiples: np.ndarray, low: int, high: int) -> np.ndarray:
    """What each multiple from `low` to `high` costs by its share, each counted once more than it is there.

    Multiple n is found at n; from the end, if it is negative.
    """
    counts = np.bincount((multiples - low).ravel(), minlength=high - low + 1) + 1.0
    return np.roll(np.log2(counts.sum() / counts), low)


def cheapest_multiples(
    ratio: np.ndarray, nearest: np.ndarray, price: float | np.ndarray, bits: np.ndarray
) -> np.ndarray:
    """Of the nearest multiple, the next one towards zero, and zero, that with the least squared error and bits."""
    chosen, least = nearest, np.square(ratio - nearest) + price * bits[nearest]
    for other in (nearest - np.sign(nearest), np.zeros_like(nearest)):
        cost = np.square(ratio - other) + price * bits[other]
        chosen, least = np.where(cost < least, other, chosen), np.minimum(cost, least)
    return chosen


def significant_bits(precision: Precision) -> int:
    """How many binary digits a type holds."""
    return -round(math.log2(_ROUNDING[precision]))


def in_precision(values: np.ndarray, precision: Precision) -> np.ndarray:
    """The values as that type holds them, in float32."""
    if precision != "bfloat16":
        return round_codebook(values, 16 if precision == "float16" else 32)
    bits = values.astype(np.float32).view(np.uint32)
    # The upper half, to the nearest; of two, the even one.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def round_codebook(values: np.ndarray, bits: int) -> np.ndarray:
    """The values as they will be stored, in float32; half precision saturates rather than overflows."""
    if bits == 16:
        largest = np.finfo(np.float16).max
        values = np.clip(values, -largest, largest).astype(np.float16)
    return values.astype(np.float32)


def fit_mixture(values: np.ndarray, components: int) -> GaussianMixture:
    """A mixture of `components` Gaussians of one width and one proportion, fitted to fixed values.

    By hard expectation-maximization: each value belongs to its most responsible component alone. Were widths and
    proportions free, the components would gather, narrow, where values are dense, and a few wide ones would be
    responsible for all the rest: on a dense network most weights would snap to the mean of such a one. Fewer distinct
    values than components give one component each.
    """
    values = values.astype(np.float64).ravel()
    means = np.unique(values)
    variance = 1e-12
    if means.size > components:
        means = np.unique(_nearest_means(values, components))
        nearest = means[np.searchsorted(0.5 * (means[1:] + means[:-1]), values)]
        # Relative to the values' own spread, so that the floor joins nothing.
        variance = max(float(np.square(values - nearest).mean()), 1e-12 * float(values.var()))
    elif not means.size:
        means = np.zeros(1)
    count = means.size
    return GaussianMixture(means, np.full(count, -np.log(variance)), np.full(count, -np.log(count)))


def _survivors(posterior: Posterior, prune_rate: float) -> np.ndarray:
    kept = [weight.theta[~_pruned(weight, prune_rate)].ravel() for weight in posterior.weights.values()]
    return np.concatenate(kept) if kept else np.zeros(0, np.float32)


def _pruned(weight: GaussianTensor, prune_rate: float) -> np.ndarray:
    """Where σ²/(θ²+σ²) ≥ the rate; exact zeros are always pruned."""
    if prune_rate >= 1:
        return weight.theta == 0
    sigma2 = np.exp(weight.log_sigma2.astype(np.float64))
    return sigma2 >= prune_rate * (weight.theta.astype(np.float64) ** 2 + sigma2)


def _assign(theta: np.ndarray, name: str, mixture: GaussianMixture, group: np.ndarray) -> np.ndarray:
    """The group of each weight's most responsible component."""
    flat = theta.astype(np.float64).ravel()
    if name in mixture.units:
        flat /= mixture.units[name]
    groups = np.empty(flat.size, np.int64)
    step = max(1, _CHUNK // len(mixture))
    for start in range(0, flat.size, step):
        best = mixture.log_joint(flat[start : start + step]).argmax(axis=1)
        groups[start : start + step] = group[best]
    return groups.reshape(theta.shape)


def _merge(mixture: GaussianMixture, within: float, *, pinned: bool) -> tuple[np.ndarray, np.ndarray]:
    """Group components that coincide. Returns the group of each component and the value of each group.

    A group's value is its components' mean, weighted by proportion. With `pinned`, component 0 and all that merge
    with it form group 0, whose value is 0.
    """
    order = np.argsort(mixture.means, kind="stable")
    variances = np.exp(-mixture.log_precisions)
    label = np.zeros(len(mixture), np.int64)
    for left, right in pairwise(order):
        reach = within * np.sqrt(variances[left] + variances[right])
        label[right] = label[left] + (mixture.means[right] - mixture.means[left] > reach)
    if pinned:
        # Group 0 is the pinned one; those below it move up by one.
        zero = label[0]
        label = np.where(label == zero, 0, np.where(label < zero, label + 1, label))
    proportions = np.exp(mixture.log_proportions)
    groups = label.max() + 1
    mass = np.bincount(label, proportions, groups)
    values = np.bincount(label, proportions * mixture.means, groups) / np.maximum(mass, 1e-300)
    if pinned:
        values[0] = 0.0
    return label, values


def _compact_codebook(symbols: Mapping[str, np.ndarray], values: np.ndarray) -> dict[str, QuantizedTensor]:
    """Drop shared values that nobody uses, join those that are equal as stored, sort the rest; 0.0 comes first."""
    used = np.zeros(len(values), bool)
    used[0] = True
    for array in symbols.values():
        used[np.unique(array)] = True
    distinct = np.unique(values[used])
    codebook = np.concatenate([[np.float32(0)], distinct[distinct != 0]])
    position = {value: index for index, value in enumerate(codebook.tolist())}
    # Not every value is in the codebook, only those in use are looked up.
    new_symbol = np.array([position.get(value, 0) for value in values.tolist()])
    return {name: QuantizedTensor(new_symbol[array], codebook) for name, array in symbols.items()}
