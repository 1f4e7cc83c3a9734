"""The sums over all weights, and the sampling of outputs, on a GPU: each in one pass over memory. Needs triton.

The same formulas as `distributions` and `mixture`; the tests hold them to each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bayeszip.variational.distributions import HALF_LOG_2PI, K1, K2, K3, LOG_ALPHA_BOUND, THETA2_FLOOR

__all__ = ["add_noise", "kl_with_slopes", "mixture_with_slopes", "rate_with_slopes"]

#: Weights that a program reads at once; fewer where it holds K values for each.
KL_BLOCK = 1024
RATE_BLOCK = 1024
SAMPLE_BLOCK = 1024
MIXTURE_BLOCK = 32
#: Blocks that a program of the mixture's kernel goes through, adding up what concerns the components.
MIXTURE_ROUNDS = 8


def kl_with_slopes(theta: Tensor, log_sigma2: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`scale` × Σ KL (eq. 4, sign corrected), and its gradients in θ and in log σ²; both are vectors."""
    by_theta, by_log_sigma2, sums = _results(theta, KL_BLOCK)
    factor = torch.as_tensor(scale, dtype=torch.float32, device=theta.device)
    _kl[(len(sums),)](
        theta,
        log_sigma2,
        factor,
        by_theta,
        by_log_sigma2,
        sums,
        theta.numel(),
        k1=K1,
        k2=K2,
        k3=K3,
        floor=THETA2_FLOOR,
        bound=LOG_ALPHA_BOUND,
        block=KL_BLOCK,
    )
    return sums.sum(dtype=torch.float64).float() * factor, by_theta, by_log_sigma2


def rate_with_slopes(
    theta: Tensor, log_sigma2: Tensor, extra: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ p · extra, p = 1/(1 + α), and `scale` × its gradients in θ and in log σ²; all of these are vectors."""
    by_theta, by_log_sigma2, sums = _results(theta, RATE_BLOCK)
    factor = torch.as_tensor(scale, dtype=torch.float32, device=theta.device)
    _rate[(len(sums),)](
        theta,
        log_sigma2,
        extra,
        factor,
        by_theta,
        by_log_sigma2,
        sums,
        theta.numel(),
        floor=THETA2_FLOOR,
        bound=LOG_ALPHA_BOUND,
        block=RATE_BLOCK,
    )
    return sums.sum(dtype=torch.float64).float(), by_theta, by_log_sigma2


def _results(theta: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what a kernel over θ and log σ² finds: its slopes in both, and a sum for each of its programs."""
    sums = torch.empty(triton.cdiv(theta.numel(), block), device=theta.device)
    return torch.empty_like(theta), torch.empty_like(theta), sums


def mixture_with_slopes(
    theta: Tensor, means: Tensor, log_precisions: Tensor, log_proportions: Tensor, scale: float | Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """`scale` × Σ log GM (eq. 5), its gradients in μ, log λ and log π, and in θ; all of these are vectors."""
    size, components = theta.numel(), means.numel()
    precisions = log_precisions.exp()
    offsets = log_proportions + 0.5 * log_precisions - HALF_LOG_2PI
    width = triton.next_power_of_2(max(1, components - 1))
    programs = triton.cdiv(size, MIXTURE_BLOCK * MIXTURE_ROUNDS)
    by_theta = torch.empty_like(theta)
    factor = torch.as_tensor(scale, dtype=torch.float32, device=theta.device)
    # For each program: a line that begins with Σ log GM, then for each component Σ r, Σ r·pull, Σ r·pull².
    sums = torch.empty(programs, 4, components, device=theta.device)
    _mixture[(programs,)](
        theta,
        means,
        precisions,
        offsets,
        factor,
        by_theta,
        sums,
        size,
        components,
        width=width,
        block=MIXTURE_BLOCK,
        rounds=MIXTURE_ROUNDS,
    )
    total = sums.sum(dim=0, dtype=torch.float64)
    density, (mass, first, second) = total[0, 0], total[1:]
    by_components = [first, 0.5 * (mass - second / precisions), mass]
    return (density * factor).float(), [(part * factor).float() for part in by_components], by_theta


def add_noise(mean: Tensor, variance: Tensor, noise: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """mean + noise·√(variance + floor), in place of the mean, and r = noise / 2√(variance + floor), of its type.

    All are laid out alike in memory; the noise is float32, and if the mean is too, r takes its place.
    """
    ratio = noise if mean.dtype == noise.dtype else torch.empty_like(mean)
    size = mean.numel()
    _add_noise[(triton.cdiv(size, SAMPLE_BLOCK),)](mean, variance, noise, ratio, size, floor=floor, block=SAMPLE_BLOCK)
    return mean, ratio


@triton.jit
def _add_noise(
    mean: tl.tensor,
    variance: tl.tensor,
    noise: tl.tensor,
    ratio: tl.tensor,
    size: tl.tensor,
    floor: tl.constexpr,
    block: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    deviation = tl.sqrt(tl.load(variance + place, mask=inside, other=1.0).to(tl.float32) + floor)
    value = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    drawn = tl.load(noise + place, mask=inside, other=0.0)
    tl.store(mean + place, (value + drawn * deviation).to(mean.dtype.element_ty), mask=inside)
    tl.store(ratio + place, (0.5 * drawn / deviation).to(ratio.dtype.element_ty), mask=inside)


@triton.jit
def _kl(
    theta: tl.tensor,
    log_sigma2: tl.tensor,
    factor: tl.tensor,
    by_theta: tl.tensor,
    by_log_sigma2: tl.tensor,
    sums: tl.tensor,
    size: tl.tensor,
    k1: tl.constexpr,
    k2: tl.constexpr,
    k3: tl.constexpr,
    floor: tl.constexpr,
    bound: tl.constexpr,
    block: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    place = program.to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    mean = tl.load(theta + place, mask=inside, other=1.0)
    variance = tl.load(log_sigma2 + place, mask=inside, other=0.0)
    scale = tl.load(factor)
    square = mean * mean + floor
    log_alpha = tl.minimum(tl.maximum(variance - tl.log(square), -bound), bound)
    # sigmoid(−x) as 1 / (1 + eˣ); x stays below 77 within the bound, so that eˣ is finite in float32.
    noise = 1.0 / (1.0 + tl.exp(k2 + k3 * log_alpha))
    signal = 1.0 / (1.0 + tl.exp(log_alpha))
    # ½ log(1 + α⁻¹), without overflow.
    far = tl.maximum(-log_alpha, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(log_alpha)))
    tl.store(sums + program, tl.sum(tl.where(inside, k1 * noise + 0.5 * far, 0.0), axis=0))
    slope = scale * (-k1 * k3 * noise * (1.0 - noise) - 0.5 * signal)
    tl.store(by_log_sigma2 + place, slope, mask=inside)
    tl.store(by_theta + place, slope * mean * -2.0 / square, mask=inside)


@triton.jit
def _rate(
    theta: tl.tensor,
    log_sigma2: tl.tensor,
    extra: tl.tensor,
    factor: tl.tensor,
    by_theta: tl.tensor,
    by_log_sigma2: tl.tensor,
    sums: tl.tensor,
    size: tl.tensor,
    floor: tl.constexpr,
    bound: tl.constexpr,
    block: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    place = program.to(tl.int64) * block + tl.arange(0, block)
    inside = place < size
    mean = tl.load(theta + place, mask=inside, other=1.0)
    variance = tl.load(log_sigma2 + place, mask=inside, other=0.0)
    bits = tl.load(extra + place, mask=inside, other=0.0)
    square = mean * mean + floor
    log_alpha = tl.minimum(tl.maximum(variance - tl.log(square), -bound), bound)
    # p, and 1 − p by itself, which is lost where p is nearly 1.
    kept, dropped = 1.0 / (1.0 + tl.exp(log_alpha)), 1.0 / (1.0 + tl.exp(-log_alpha))
    tl.store(sums + program, tl.sum(kept * bits, axis=0))
    slope = -tl.load(factor) * dropped * kept * bits
    tl.store(by_log_sigma2 + place, slope, mask=inside)
    # d log α / dθ = −2θ/θ², with the floor that log α has.
    tl.store(by_theta + place, slope * mean * -2.0 / square, mask=inside)


@triton.jit
def _mixture(
    theta: tl.tensor,
    means: tl.tensor,
    precisions: tl.tensor,
    offsets: tl.tensor,
    factor: tl.tensor,
    by_theta: tl.tensor,
    sums: tl.tensor,
    size: tl.tensor,
    components: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    rounds: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    # The first component, that of zero, by itself: without it there are often as many as a power of two.
    zero_mean, zero_precision, zero_offset = tl.load(means), tl.load(precisions), tl.load(offsets)
    component = 1 + tl.arange(0, width)
    real = component < components
    mean = tl.load(means + component, mask=real, other=0.0)
    precision = tl.load(precisions + component, mask=real, other=0.0)
    offset = tl.load(offsets + component, mask=real, other=-float("inf"))
    scale = tl.load(factor)
    density = tl.zeros((block,), tl.float32)
    # Added up for each place in the block and only in the end across them, which threads would have to agree on.
    zero_mass = tl.zeros((block,), tl.float32)
    zero_first = tl.zeros((block,), tl.float32)
    zero_second = tl.zeros((block,), tl.float32)
    mass = tl.zeros((block, width), tl.float32)
    first = tl.zeros((block, width), tl.float32)
    second = tl.zeros((block, width), tl.float32)
    for step in range(rounds):
        place = (program * rounds + step) * block + tl.arange(0, block)
        inside = place < size
        value = tl.load(theta + place, mask=inside, other=0.0)
        deviation = value[:, None] - mean[None, :]
        pull = deviation * precision[None, :]
        joint = offset[None, :] - 0.5 * pull * deviation
        zero_pull = (value - zero_mean) * zero_precision
        zero_joint = zero_offset - 0.5 * zero_pull * (value - zero_mean)
        largest = tl.maximum(tl.max(joint, axis=1), zero_joint)
        share = tl.exp(joint - largest[:, None])
        zero_share = tl.exp(zero_joint - largest)
        total = tl.sum(share, axis=1) + zero_share
        part = tl.where(inside, 1.0 / total, 0.0)
        responsibility, zero_responsibility = share * part[:, None], zero_share * part
        weighted, zero_weighted = responsibility * pull, zero_responsibility * zero_pull
        density += tl.where(inside, largest + tl.log(total), 0.0)
        mass += responsibility
        first += weighted
        second += weighted * pull
        zero_mass += zero_responsibility
        zero_first += zero_weighted
        zero_second += zero_weighted * zero_pull
        tl.store(by_theta + place, -scale * (tl.sum(weighted, axis=1) + zero_weighted), mask=inside)
    line = sums + program * 4 * components
    tl.store(line, tl.sum(density, axis=0))
    _store_sums(line + components, zero_mass, mass, component, real)
    _store_sums(line + 2 * components, zero_first, first, component, real)
    _store_sums(line + 3 * components, zero_second, second, component, real)


@triton.jit
def _store_sums(line: tl.tensor, zero: tl.tensor, others: tl.tensor, component: tl.tensor, real: tl.tensor) -> None:
    """What a program added up, for each component."""
    tl.store(line, tl.sum(zero, axis=0))
    tl.store(line + component, tl.sum(others, axis=0), mask=real)
