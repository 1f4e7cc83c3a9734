"""The elementwise work over all weights, and the noise, each in one pass, compiled for the CPU.

A training step of a dense layer is a few matrix products; done as separate tensor operations, the regularizer's dozen
passes over all weights would cost more than they do. Logarithm and exponential are polynomials (after Cephes' `logf`
and `expf`, within a few units in the last place) because a loop that calls the C library is not vectorized.
"""

import numpy as np
from numba import njit

from bayeszip.variational.distributions import K1, K2, K3, LOG_ALPHA_BOUND, LOG_SIGNAL_BOUND, THETA2_FLOOR

__all__ = [
    "add_ratios",
    "fill_normal",
    "kl_with_slopes",
    "philox",
    "rate_with_slopes",
    "ratio_slopes",
    "read_grid",
    "tabulate_mixture",
]

_f, _i, _u, _u64 = np.float32, np.int32, np.uint32, np.uint64
_K1, _K2, _K3, _BOUND, _FLOOR = _f(K1), _f(K2), _f(K3), _f(LOG_ALPHA_BOUND), _f(THETA2_FLOOR)
_LN2 = _f(np.log(2))
#: exp of less than this is no normal float32.
_EXP_LOW = _f(-87)

#: log σ² is held within ± the first, and θ²/σ² below the second.
_VARIANCE_BOUND, _MOST_SIGNAL = _f(LOG_SIGNAL_BOUND), _f(1e18)

#: Sums are float32 within a block and float64 across blocks.
_BLOCK = 4096
_FASTMATH = {"contract", "reassoc", "nsz", "arcp"}


@njit(inline="always")
def _log(x: np.float32) -> np.float32:
    """log x for a normal x > 0: x = m·2^e with m in [√½, √2), then a polynomial in m − 1."""
    bits = _f(x).view(_i)
    exponent = (bits - _i(0x3F3504F3)) >> _i(23)
    m = _i(bits - (exponent << _i(23))).view(_f) - _f(1)
    p = _f(7.0376836292e-2)
    p = p * m - _f(1.1514610310e-1)
    p = p * m + _f(1.1676998740e-1)
    p = p * m - _f(1.2420140846e-1)
    p = p * m + _f(1.4249322787e-1)
    p = p * m - _f(1.6668057665e-1)
    p = p * m + _f(2.0000714765e-1)
    p = p * m - _f(2.4999993993e-1)
    p = p * m + _f(3.3333331174e-1)
    return m + m * m * (p * m - _f(0.5)) + _f(exponent) * _LN2


@njit(inline="always")
def _exp(x: np.float32) -> np.float32:
    """exp x for |x| < 87: 2^k times a polynomial in the remainder, ln 2 in two parts to keep it exact."""
    k = np.floor(x * _f(1.4426950408889634) + _f(0.5))
    r = x - k * _f(0.693359375) + k * _f(2.12194440e-4)
    p = _f(1.9875691500e-4)
    p = p * r + _f(1.3981999507e-3)
    p = p * r + _f(8.3334519073e-3)
    p = p * r + _f(4.1665795894e-2)
    p = p * r + _f(1.6666665459e-1)
    p = p * r + _f(5.0000001201e-1)
    mantissa = p * r * r + r + _f(1)
    return _i(_f(mantissa).view(_i) + (_i(k) << _i(23))).view(_f)


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def _kl_block(
    theta: np.ndarray, log_sigma2: np.ndarray, scale: np.float32, by_theta: np.ndarray, by_log_sigma2: np.ndarray
) -> np.float32:
    total = _f(0)
    for i in range(theta.size):
        theta2 = theta[i] * theta[i] + _FLOOR
        log_alpha = min(max(log_sigma2[i] - _log(theta2), -_BOUND), _BOUND)
        inverse_alpha = _exp(-log_alpha)
        odds = _exp(-(_K2 + _K3 * log_alpha))
        one_minus_s = odds / (_f(1) + odds)
        rate = inverse_alpha / (_f(1) + inverse_alpha)
        total += _K1 * one_minus_s + _f(0.5) * _log(_f(1) + inverse_alpha)
        slope = -scale * (_K1 * _K3 * one_minus_s * (_f(1) - one_minus_s) + _f(0.5) * rate)
        by_log_sigma2[i] = slope
        by_theta[i] = _f(-2) * slope * theta[i] / theta2
    return total


@njit(nogil=True, cache=True)
def kl_with_slopes(
    theta: np.ndarray, log_sigma2: np.ndarray, scale: np.float32, by_theta: np.ndarray, by_log_sigma2: np.ndarray
) -> float:
    """Σ KL of `distributions.kl_log_uniform` over flat float32 arrays; `scale` × its gradients go into the last two."""
    total = 0.0
    for start in range(0, theta.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        total += float(_kl_block(theta[block], log_sigma2[block], scale, by_theta[block], by_log_sigma2[block]))
    return total


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def _rate_block(
    theta: np.ndarray,
    log_sigma2: np.ndarray,
    extra: np.ndarray,
    scale: np.float32,
    by_theta: np.ndarray,
    by_log_sigma2: np.ndarray,
) -> np.float32:
    total = _f(0)
    for i in range(theta.size):
        theta2 = theta[i] * theta[i] + _FLOOR
        log_alpha = min(max(log_sigma2[i] - _log(theta2), -_BOUND), _BOUND)
        alpha = _exp(log_alpha)
        kept = _f(1) / (_f(1) + alpha)
        total += kept * extra[i]
        # p (1 − p) in an order in which nothing overflows.
        slope = -scale * extra[i] * kept * (kept * alpha)
        by_log_sigma2[i] = slope
        by_theta[i] = _f(-2) * slope * theta[i] / theta2
    return total


@njit(nogil=True, cache=True)
def rate_with_slopes(
    theta: np.ndarray,
    log_sigma2: np.ndarray,
    extra: np.ndarray,
    scale: np.float32,
    by_theta: np.ndarray,
    by_log_sigma2: np.ndarray,
) -> float:
    """Σ p · extra over flat float32 arrays, p = 1/(1 + α); `scale` × its gradients go into the last two."""
    total = 0.0
    for start in range(0, theta.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        total += float(
            _rate_block(theta[block], log_sigma2[block], extra[block], scale, by_theta[block], by_log_sigma2[block])
        )
    return total


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def _ratios_of_row(theta: np.ndarray, log_sigma2: np.ndarray, columns: np.ndarray) -> np.float32:
    total = _f(0)
    for i in range(theta.size):
        variance = min(max(log_sigma2[i], -_VARIANCE_BOUND), _VARIANCE_BOUND)
        ratio = min(theta[i] * theta[i] * _exp(-variance), _MOST_SIGNAL)
        total += ratio
        columns[i] += ratio
    return total


@njit(nogil=True, cache=True)
def add_ratios(theta: np.ndarray, log_sigma2: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
    """θ²/σ² of a matrix, float32, added up for each row and for each column."""
    for row in range(theta.shape[0]):
        rows[row] += _ratios_of_row(theta[row], log_sigma2[row], columns)


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def _slopes_of_row(
    theta: np.ndarray,
    log_sigma2: np.ndarray,
    by_row: np.float32,
    by_column: np.ndarray,
    by_theta: np.ndarray,
    by_log_sigma2: np.ndarray,
) -> None:
    for i in range(theta.size):
        variance = min(max(log_sigma2[i], -_VARIANCE_BOUND), _VARIANCE_BOUND)
        slope = (by_row + by_column[i]) * theta[i] * _exp(-variance)
        by_theta[i] = _f(2) * slope
        by_log_sigma2[i] = -slope * theta[i]


@njit(nogil=True, cache=True)
def ratio_slopes(
    theta: np.ndarray,
    log_sigma2: np.ndarray,
    by_row: np.ndarray,
    by_column: np.ndarray,
    by_theta: np.ndarray,
    by_log_sigma2: np.ndarray,
) -> None:
    """From gradients in the sums of `add_ratios`, those in θ and log σ², which go into the last two."""
    for row in range(theta.shape[0]):
        _slopes_of_row(theta[row], log_sigma2[row], by_row[row], by_column, by_theta[row], by_log_sigma2[row])


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def tabulate_mixture(
    points: np.ndarray,
    means: np.ndarray,
    precisions: np.ndarray,
    offsets: np.ndarray,
    density: np.ndarray,
    slope: np.ndarray,
    responsibility: np.ndarray,
) -> None:
    """log Σ_k exp(offset_k − ½λ_k(x − μ_k)²) at each point x, its slope, and the responsibilities (points × K).

    Far from all components the terms are large and nearly cancel: float64, but for the exponentials.
    """
    for i in range(points.size):
        terms = responsibility[i]
        highest = -np.inf
        for k in range(means.size):
            deviation = points[i] - means[k]
            terms[k] = offsets[k] - 0.5 * precisions[k] * deviation * deviation
            highest = max(highest, terms[k])
        total = 0.0
        for k in range(means.size):
            terms[k] = _exp(max(_f(terms[k] - highest), _EXP_LOW))
            total += terms[k]
        pull = 0.0
        for k in range(means.size):
            terms[k] /= total
            pull += terms[k] * precisions[k] * (points[i] - means[k])
        density[i] = highest + np.log(total)
        slope[i] = -pull


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def read_grid(
    theta: np.ndarray,
    low: np.float32,
    spacing: np.float32,
    slope: np.ndarray,
    by_theta: np.ndarray,
    moments: np.ndarray,
) -> None:
    """Read f′ off a grid at each θ, linearly between nodes, and record where the θ are.

    Args:
        low, spacing: the first node and the distance of nodes; the θ lie between the first and the last node.
        slope: f′ at the nodes.
        by_theta: receives f′(θ).
        moments: 4 × nodes × 3, float64; receives for each node, of the weights between it and the next, their number
            and Σt and Σt² of their distances t from it, in units of the spacing. Weights crowd at a few nodes, and
            adding to one place waits for the addition before; so every fourth weight goes to the same table, and only
            the sum of the four means anything.
    """
    inverse = _f(1) / spacing
    last = _i(slope.size - 2)
    # Unsigned, so that no index is checked for counting from the end.
    nodes, offsets = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    for start in range(0, theta.size, _BLOCK):
        block, slopes = theta[start : start + _BLOCK], by_theta[start : start + _BLOCK]
        # Loops of their own: the first two are vectorized, the last can't be.
        for i in range(block.size):
            position = (block[i] - low) * inverse
            node = min(max(_i(position), _i(0)), last)
            nodes[i], offsets[i] = np.uint32(node), position - _f(node)
        for i in range(block.size):
            left, right = slope[nodes[i]], slope[nodes[i] + np.uint32(1)]
            slopes[i] = left + offsets[i] * (right - left)
        for i in range(block.size):
            table, t = np.uint32(i & 3), offsets[i]
            moments[table, nodes[i], 0] += 1
            moments[table, nodes[i], 1] += t
            moments[table, nodes[i], 2] += t * t


@njit(inline="always")
def philox(counter: np.uint64, key: np.uint64) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """Four random words: Philox4x32-10 of Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3"."""
    x0, x1, x2, x3 = _u(counter), _u(counter >> _u64(32)), _u(0), _u(0)
    k0, k1 = _u(key), _u(key >> _u64(32))
    for _ in range(10):
        a, b = _u64(0xD2511F53) * _u64(x0), _u64(0xCD9E8D57) * _u64(x2)
        x0, x1, x2, x3 = _u(_u(b >> _u64(32)) ^ x1 ^ k0), _u(b), _u(_u(a >> _u64(32)) ^ x3 ^ k1), _u(a)
        k0, k1 = _u(k0 + _u(0x9E3779B9)), _u(k1 + _u(0xBB67AE85))
    return x0, x1, x2, x3


@njit(inline="always")
def _normal_pair(a: np.uint32, b: np.uint32) -> tuple[np.float32, np.float32]:
    """Two independent normal values from two random words, after Box and Muller (1958).

    The angle is drawn within ±π/4, where short polynomials (after Cephes' `sinf` and `cosf`) give sine and cosine, and
    then turned by a random quarter.
    """
    radius = np.sqrt(_f(-2) * _log((_f(_i(a >> _u(1))) + _f(0.5)) * _f(2.0**-31)))
    angle = _f(_i(b) >> _i(2)) * _f(np.pi / 2 * 2.0**-30)
    z = angle * angle
    sine = ((_f(-1.9515295891e-4) * z + _f(8.3321608736e-3)) * z - _f(1.6666654611e-1)) * z * angle + angle
    cosine = (_f(2.443315711809948e-5) * z - _f(1.388731625493765e-3)) * z + _f(4.166664568298827e-2)
    cosine = cosine * z * z - _f(0.5) * z + _f(1)
    radius = radius if b & _u(1) else -radius
    upright = (b & _u(2)) != _u(0)
    return radius * (cosine if upright else -sine), radius * (sine if upright else cosine)


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def fill_normal(values: np.ndarray, seed: np.uint64) -> None:
    """Independent standard normal values, as many as `values` has places; their number is a multiple of four."""
    quarter = values.size // 4
    first, second = values[:quarter], values[quarter : 2 * quarter]
    third, fourth = values[2 * quarter : 3 * quarter], values[3 * quarter :]
    for i in range(quarter):
        a, b, c, d = philox(_u64(i), seed)
        first[i], second[i] = _normal_pair(a, b)
        third[i], fourth[i] = _normal_pair(c, d)
