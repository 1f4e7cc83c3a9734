"""The compiled loops against the formulas they replace, over the range of float32."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from scipy import stats

from bayeszip.variational import kernels
from bayeszip.variational.distributions import THETA2_FLOOR, kl_log_uniform, kl_log_uniform_slope, log_alpha

MAGNITUDES = [0.0, 1e-45, 1e-40, 1e-30, 1e-20, 1e-12, 1e-10, 3e-10, 1e-7, 1e-3, 0.05, 1.0, 3.0, 1e3, 1e10]


def grid() -> tuple[np.ndarray, np.ndarray]:
    theta = np.array([sign * size for size in MAGNITUDES for sign in (1, -1)], np.float32)
    log_sigma2 = np.linspace(-40, 40, 161, dtype=np.float32)
    pairs = np.meshgrid(theta, log_sigma2)
    return pairs[0].ravel().copy(), pairs[1].ravel().copy()


def by_formula(theta: np.ndarray, log_sigma2: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """KL of each weight and its slopes in θ and log σ², in float64."""
    t, s = torch.from_numpy(theta).double(), torch.from_numpy(log_sigma2).double()
    a = log_alpha(t, s)
    slope = kl_log_uniform_slope(a)
    return kl_log_uniform(a).numpy(), (-2 * slope * t / (t.square() + THETA2_FLOOR)).numpy(), slope.numpy()


def run_kernel(theta: np.ndarray, log_sigma2: np.ndarray, scale: float = 1.0) -> tuple[float, np.ndarray, np.ndarray]:
    by_theta, by_log_sigma2 = np.empty_like(theta), np.empty_like(theta)
    value = kernels.kl_with_slopes(theta, log_sigma2, np.float32(scale), by_theta, by_log_sigma2)
    return value, by_theta, by_log_sigma2


def test_kl_over_the_whole_range():
    theta, log_sigma2 = grid()
    each, by_theta, by_log_sigma2 = by_formula(theta, log_sigma2)
    for i in range(theta.size):
        value, in_theta, in_log_sigma2 = run_kernel(theta[i : i + 1], log_sigma2[i : i + 1])
        where = f"θ={theta[i]}, log σ²={log_sigma2[i]}"
        assert value == pytest.approx(each[i], rel=5e-6, abs=2e-7), where
        assert in_log_sigma2[0] == pytest.approx(by_log_sigma2[i], rel=2e-5, abs=1e-12), where
        assert in_theta[0] == pytest.approx(by_theta[i], rel=2e-5, abs=1e-12), where


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 50_001])
def test_kl_sums_all_weights_whatever_their_number(size):
    rng = np.random.default_rng(size)
    theta = rng.normal(0, 0.05, size).astype(np.float32)
    log_sigma2 = rng.uniform(-12, 0, size).astype(np.float32)
    each, by_theta, by_log_sigma2 = by_formula(theta, log_sigma2)
    value, in_theta, in_log_sigma2 = run_kernel(theta, log_sigma2, scale=-3.0)
    assert value == pytest.approx(each.sum(), rel=1e-6, abs=2e-7)
    np.testing.assert_allclose(in_theta, -3 * by_theta, rtol=3e-5)
    np.testing.assert_allclose(in_log_sigma2, -3 * by_log_sigma2, rtol=3e-5, atol=1e-12)


@given(st.floats(-87, 87, width=32))
def test_exp_is_within_a_few_units_in_the_last_place(x):
    assert kernels._exp.py_func(np.float32(x)) == pytest.approx(np.exp(np.float64(np.float32(x))), rel=4e-7)


@given(st.floats(np.float32(1.2e-38).item(), np.float32(3e38).item(), width=32))
def test_log_is_within_a_few_units_in_the_last_place(x):
    assert kernels._log.py_func(np.float32(x)) == pytest.approx(np.log(np.float64(np.float32(x))), rel=4e-7, abs=1e-7)


def test_read_grid_is_exact_for_a_quadratic():
    nodes, low, spacing = 40, np.float32(-1), np.float32(0.05)
    x = low + spacing * np.arange(nodes, dtype=np.float32)
    theta = np.random.default_rng(0).uniform(-0.9, 0.9, 5001).astype(np.float32)
    by_theta, moments = np.empty_like(theta), np.zeros((4, nodes, 3))
    kernels.read_grid(theta, low, spacing, 2 * x + 1, by_theta, moments)
    np.testing.assert_allclose(by_theta, 2 * theta + 1, atol=1e-5)
    count, first, second = moments.sum(axis=0).T
    assert count.sum() == theta.size
    # Σθ and Σθ² from the tables alone: θ = x + t·spacing.
    assert (count * x + first * spacing).sum() == pytest.approx(theta.sum(), abs=1e-2)
    assert (count * x**2 + 2 * x * first * spacing + second * spacing**2).sum() == pytest.approx(
        (theta**2).sum(), rel=1e-4
    )


def test_read_grid_counts_a_hundred_million_weights():
    """Counts are sums of ones, which float32 can't hold beyond 2²⁴."""
    moments = np.zeros((4, 3, 3))
    theta, by_theta = np.full(2**26 // 64, 0.5, np.float32), np.empty(2**26 // 64, np.float32)
    moments[:, 0, 0] = 2**24
    kernels.read_grid(theta, np.float32(0), np.float32(1), np.zeros(3, np.float32), by_theta, moments)
    assert moments[:, 0, 0].sum(dtype=np.float64) == 2**26 + theta.size


@njit
def words(counter: np.uint64, key: np.uint64) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    return kernels.philox(counter, key)


def test_philox_gives_its_authors_known_answers():
    """Of philox4x32-10 in Random123's kat_vectors, those whose upper counter words are 0."""
    assert [hex(word) for word in words(np.uint64(0), np.uint64(0))] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_noise_is_standard_normal():
    values = np.empty(1_000_000, np.float32)
    kernels.fill_normal(values, np.uint64(7))
    noise = values.astype(np.float64)
    size = noise.size
    assert abs(noise.mean()) < 4 / np.sqrt(size)
    assert abs(noise.var() - 1) < 4 * np.sqrt(2 / size)
    assert abs((noise**3).mean()) < 4 * np.sqrt(15 / size)
    assert abs((noise**4).mean() - 3) < 4 * np.sqrt(96 / size)
    assert stats.kstest(noise[::10], "norm").pvalue > 1e-3
    assert np.abs(noise).max() > 4.4


def test_noise_is_independent_within_and_across_draws():
    values = [np.empty(400_000, np.float32) for _ in range(2)]
    for seed, draw in enumerate(values):
        kernels.fill_normal(draw, np.uint64(seed))
    quarters = np.concatenate(values).astype(np.float64).reshape(8, -1)
    limit = 4.5 / np.sqrt(quarters.shape[1])
    assert np.abs(np.corrcoef(quarters) - np.eye(8)).max() < limit
    assert np.abs(np.corrcoef(quarters**2) - np.eye(8)).max() < limit
    assert abs(np.corrcoef(quarters[:, 1:].ravel(), quarters[:, :-1].ravel())[0, 1]) < limit
