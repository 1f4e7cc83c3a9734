"""The elementwise work over all weights, each in one pass, compiled for the CPU.

A training step of a dense layer is a few matrix products; done as separate tensor operations, the regularizer's dozen
passes over all weights would cost more than they do. Logarithm and exponential are polynomials (after Cephes' `logf`
and `expf`, within a few units in the last place) because a loop that calls the C library is not vectorized.
"""

import numpy as np
from numba import njit

from bayeszip.variational.distributions import K1, K2, K3, LOG_ALPHA_BOUND, THETA2_FLOOR

__all__ = ["kl_with_slopes", "read_grid"]

_f, _i = np.float32, np.int32
_K1, _K2, _K3, _BOUND, _FLOOR = _f(K1), _f(K2), _f(K3), _f(LOG_ALPHA_BOUND), _f(THETA2_FLOOR)
_LN2 = _f(np.log(2))

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
def _kl_block(theta: np.ndarray, log_sigma2: np.ndarray, by_theta: np.ndarray, by_log_sigma2: np.ndarray) -> np.float32:
    total = _f(0)
    for i in range(theta.size):
        theta2 = theta[i] * theta[i] + _FLOOR
        log_alpha = min(max(log_sigma2[i] - _log(theta2), -_BOUND), _BOUND)
        inverse_alpha = _exp(-log_alpha)
        odds = _exp(-(_K2 + _K3 * log_alpha))
        one_minus_s = odds / (_f(1) + odds)
        rate = inverse_alpha / (_f(1) + inverse_alpha)
        total += _K1 * one_minus_s + _f(0.5) * _log(_f(1) + inverse_alpha)
        slope = -(_K1 * _K3 * one_minus_s * (_f(1) - one_minus_s) + _f(0.5) * rate)
        by_log_sigma2[i] = slope
        by_theta[i] = _f(-2) * slope * theta[i] / theta2
    return total


@njit(nogil=True, cache=True)
def kl_with_slopes(theta: np.ndarray, log_sigma2: np.ndarray, by_theta: np.ndarray, by_log_sigma2: np.ndarray) -> float:
    """Σ KL of `distributions.kl_log_uniform` over flat float32 arrays; its gradients go into the last two."""
    total = 0.0
    for start in range(0, theta.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        total += float(_kl_block(theta[block], log_sigma2[block], by_theta[block], by_log_sigma2[block]))
    return total


@njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
def read_grid(
    theta: np.ndarray,
    low: np.float32,
    spacing: np.float32,
    slope: np.ndarray,
    curvature: np.ndarray,
    by_theta: np.ndarray,
    moments: np.ndarray,
) -> float:
    """Read a function off a grid at each θ: f(x+δ) ≈ f(x) + f'(x)δ + ½f''(x)δ² around the nearest node x.

    Args:
        low, spacing: the first node and the distance of nodes.
        slope, curvature: f' and f'' at the nodes, per node distance (multiplied by spacing and spacing²).
        by_theta: receives f'(θ).
        moments: nodes × 3, receives for each node how many weights it is nearest to, and Σt and Σt² of their
            offsets t = δ/spacing.

    Returns:
        Σ f'δ + ½f''δ²; the caller adds Σ f(x) from the counts.
    """
    total = 0.0
    scale = _f(1) / spacing
    last = _i(slope.size - 1)
    for start in range(0, theta.size, _BLOCK):
        block = _f(0)
        for i in range(start, min(start + _BLOCK, theta.size)):
            position = (theta[i] - low) * scale
            node = min(max(_i(position + _f(0.5)), _i(0)), last)
            offset = position - _f(node)
            bend = curvature[node] * offset
            block += (slope[node] + _f(0.5) * bend) * offset
            by_theta[i] = (slope[node] + bend) * scale
            moments[node, 0] += _f(1)
            moments[node, 1] += offset
            moments[node, 2] += offset * offset
        total += float(block)
    return total
