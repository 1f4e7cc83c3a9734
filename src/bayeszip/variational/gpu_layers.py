"""Linear and convolutional layers on a GPU, sampled in few passes over memory. Needs triton.

A layer that is linear in its weights multiplies them with patches of its input, of which a linear layer has one for
each example. With x the patches (places × depth), θ and σ² the weights (outputs × depth), ε standard normal, and a
column of ones in x for the bias:

    y = x θᵀ + ε √(x² (σ²)ᵀ)                   forward, with ε / 2√… kept as r
    dx = g θ + 2x (g r) σ²                      backward, for g = dL/dy
    dθ = gᵀ x,   d log σ² = σ² (g r)ᵀ x²

The products are torch's, of x and x² in one call; the kernels here bring tensors into the form that it likes and do
all that is between. What belongs to x² or σ² lies behind what belongs to x or θ, `second` numbers further on.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Geometry", "pays", "sample_by_patches"]

#: Rows and columns (at most) of a tile.
ROWS, COLUMNS = 64, 64
#: Elements of a gradient that a program sums up.
UNPACK_BLOCK = 256
#: Matrices are made as wide as a multiple of this, for which products are faster.
ALIGNED = 4
#: Patches and weights, as numbers, up to which this is faster than convolutions that never write patches down.
MOST_PATCHES, MOST_WEIGHTS = 2**24, 2**22
#: Products that keep the device busy: those over all places are split up until there are as many.
PRODUCTS = 256


@dataclass(frozen=True)
class Geometry:
    """How patches lie in an input; by default it is one patch, of one pixel."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """The size of the output."""
        first, second = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return first, second

    def constants(self) -> dict[str, int]:
        pairs = {"k": self.kernel, "s": self.stride, "p": self.padding, "d": self.dilation}
        return {f"{name}{axis}": pair[at] for name, pair in pairs.items() for at, axis in enumerate("yx")}


def pays(input: Tensor, outputs: int, geometry: Geometry) -> bool:
    """Whether a layer is small enough for this: the copies it makes grow with the kernel."""
    batch, channels, height, width = input.shape
    out_height, out_width = geometry.output(height, width)
    depth = channels * math.prod(geometry.kernel)
    return batch * out_height * out_width * depth <= MOST_PATCHES and outputs * depth <= MOST_WEIGHTS


def sample_by_patches(
    input: Tensor,
    theta: Tensor,
    log_sigma2: Tensor,
    bias: Tensor | None,
    bias_log_sigma2: Tensor | None,
    geometry: Geometry,
    floor: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A sample of the output of a layer with Gaussian weights; `floor` is added to its variance.

    Args:
        input: batch × channels × height × width.
        theta, log_sigma2: outputs × channels × the kernel's height and width.
    """
    given = (input, theta, log_sigma2, bias, bias_log_sigma2)
    output: Tensor = _SampleByPatches.apply(*given, geometry, floor, generator)
    return output


@dataclass(frozen=True)
class _Sizes:
    """Of one call."""

    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    out_height: int
    out_width: int
    #: Places of the kernel.
    taps: int

    @classmethod
    def of(cls, input: Tensor, theta: Tensor, geometry: Geometry) -> "_Sizes":
        batch, channels, height, width = input.shape
        out_height, out_width = geometry.output(height, width)
        taps = math.prod(geometry.kernel)
        return cls(batch, channels, height, width, len(theta), out_height, out_width, taps)

    @property
    def places(self) -> int:
        """Of the output, in all examples."""
        return self.batch * self.out_height * self.out_width

    @property
    def depth(self) -> int:
        """Of a patch: all channels at the first tap, at the second, …, then the 1 for the bias."""
        return _aligned(self.channels * self.taps + 1)

    @property
    def columns(self) -> int:
        """One for each output."""
        return _aligned(self.outputs)

    @property
    def splits(self) -> int:
        """Into how many products those over all places are split; they divide the batch evenly."""
        # A product that is large by itself keeps the device busy.
        wanted = min(PRODUCTS // 2, max(1, 2**20 // (self.outputs * self.depth)), max(1, self.places // 256))
        return max(divisor for divisor in range(1, wanted + 1) if self.batch % divisor == 0)


class _SampleByPatches(torch.autograd.Function):
    """Keeps x, the parameters and r; patches, many times as large as x, are written again on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        theta: Tensor,
        log_sigma2: Tensor,
        bias: Tensor | None,
        bias_log_sigma2: Tensor | None,
        geometry: Geometry,
        floor: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        sizes = _Sizes.of(input, theta, geometry)
        patches = _patches_of(input, geometry, sizes)
        weights = _packed(theta, log_sigma2, bias, bias_log_sigma2, sizes)
        moments = torch.bmm(patches, weights.transpose(1, 2))
        output = input.new_empty(sizes.batch, sizes.outputs, sizes.out_height, sizes.out_width)
        ratio = input.new_empty(sizes.places, sizes.columns).normal_(generator=generator)
        _sample[_grid(sizes.places, sizes.columns)](
            moments,
            sizes.places * sizes.columns,
            ratio,
            output,
            sizes.places,
            sizes.out_height * sizes.out_width,
            sizes.outputs,
            sizes.columns,
            floor,
            **_tile(sizes.columns),
        )
        ctx.geometry = geometry
        ctx.save_for_backward(input, theta, log_sigma2, bias, bias_log_sigma2, ratio)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, theta, log_sigma2, bias, bias_log_sigma2, ratio = ctx.saved_tensors
        sizes = _Sizes.of(input, theta, ctx.geometry)
        pulled = _pulled(gradients[0].contiguous(), ratio, sizes)
        by_input = None
        if ctx.needs_input_grad[0]:
            weights = _packed(theta, log_sigma2, bias, bias_log_sigma2, sizes)
            by_input = _folded(torch.bmm(pulled, weights), input.contiguous(), ctx.geometry, sizes)
        rows = (2 * sizes.splits, sizes.places // sizes.splits)
        patches = _patches_of(input, ctx.geometry, sizes)
        parts = torch.bmm(pulled.view(*rows, -1).transpose(1, 2), patches.view(*rows, -1))
        by_weights = _unpacked(parts, theta, log_sigma2, bias_log_sigma2, sizes)
        if bias is None:
            by_weights[2] = None
        return by_input, *by_weights, None, None, None


def _patches_of(input: Tensor, geometry: Geometry, sizes: _Sizes) -> Tensor:
    """x and x²: 2 × places × depth."""
    patches = input.new_empty(2, sizes.places, sizes.depth)
    _patches[_grid(sizes.places, sizes.depth)](
        input.contiguous(),
        patches,
        sizes.places * sizes.depth,
        sizes.places,
        sizes.channels,
        sizes.height,
        sizes.width,
        sizes.out_height,
        sizes.out_width,
        sizes.depth,
        **geometry.constants(),
        **_tile(sizes.depth),
    )
    return patches


def _packed(
    theta: Tensor, log_sigma2: Tensor, bias: Tensor | None, bias_log_sigma2: Tensor | None, sizes: _Sizes
) -> Tensor:
    """θ and σ²: 2 × columns × depth."""
    weights = theta.new_empty(2, sizes.columns, sizes.depth)
    _pack[_grid(sizes.columns, sizes.depth)](
        *(_given(part, theta) for part in (theta, log_sigma2, bias, bias_log_sigma2)),
        weights,
        sizes.outputs,
        sizes.columns,
        sizes.channels,
        sizes.taps,
        sizes.depth,
        has_bias=bias is not None,
        noisy_bias=bias_log_sigma2 is not None,
        **_tile(sizes.depth),
    )
    return weights


def _pulled(gradient: Tensor, ratio: Tensor, sizes: _Sizes) -> Tensor:
    """g and g r: 2 × places × columns."""
    pulled = gradient.new_empty(2, sizes.places, sizes.columns)
    _pull[_grid(sizes.places, sizes.columns)](
        gradient,
        ratio,
        pulled,
        sizes.places * sizes.columns,
        sizes.places,
        sizes.out_height * sizes.out_width,
        sizes.outputs,
        sizes.columns,
        **_tile(sizes.columns),
    )
    return pulled


def _folded(by_patches: Tensor, input: Tensor, geometry: Geometry, sizes: _Sizes) -> Tensor:
    """The gradient in the input, from that in its patches."""
    by_input = torch.empty_like(input)
    pixels = sizes.batch * sizes.height * sizes.width
    _fold[_grid(pixels, sizes.channels)](
        by_patches,
        sizes.places * sizes.depth,
        input,
        by_input,
        pixels,
        sizes.channels,
        sizes.height,
        sizes.width,
        sizes.out_height,
        sizes.out_width,
        sizes.depth,
        **geometry.constants(),
        **_tile(sizes.channels),
    )
    return by_input


def _unpacked(
    parts: Tensor, theta: Tensor, log_sigma2: Tensor, bias_log_sigma2: Tensor | None, sizes: _Sizes
) -> list[Tensor | None]:
    """The gradients in θ, log σ², the bias and its log σ², from those in the packed weights."""
    by_theta, by_bias = theta.new_empty(theta.shape), theta.new_empty(sizes.outputs)
    by_log_sigma2 = torch.empty_like(by_theta)
    by_bias_log_sigma2 = None if bias_log_sigma2 is None else torch.empty_like(by_bias)
    size = sizes.outputs * (sizes.channels * sizes.taps + 1)
    _unpack[(triton.cdiv(size, UNPACK_BLOCK),)](
        parts,
        *(_given(part, theta) for part in (log_sigma2, bias_log_sigma2)),
        *(_given(part, theta) for part in (by_theta, by_log_sigma2, by_bias, by_bias_log_sigma2)),
        size,
        sizes.splits * sizes.columns * sizes.depth,
        sizes.splits,
        sizes.columns,
        sizes.channels,
        sizes.taps,
        sizes.depth,
        noisy_bias=bias_log_sigma2 is not None,
        block=UNPACK_BLOCK,
    )
    return [by_theta, by_log_sigma2, by_bias, by_bias_log_sigma2]


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _given(part: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at, where a kernel reads nothing."""
    return other if part is None else part.contiguous()


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(columns, _width(columns))


def _tile(columns: int) -> dict[str, int]:
    return {"rows": ROWS, "columns": _width(columns)}


def _width(columns: int) -> int:
    return min(COLUMNS, triton.next_power_of_2(columns))


@triton.jit
def _patches(
    input: tl.tensor,
    patches: tl.tensor,
    second: tl.tensor,
    places: tl.tensor,
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    out_height: tl.tensor,
    out_width: tl.tensor,
    depth: tl.tensor,
    ky: tl.constexpr,
    kx: tl.constexpr,
    sy: tl.constexpr,
    sx: tl.constexpr,
    py: tl.constexpr,
    px: tl.constexpr,
    dy: tl.constexpr,
    dx: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    k = tl.program_id(1) * columns + tl.arange(0, columns)
    area = out_height * out_width
    example, at = place // area, place % area
    tap, channel = k // channels, k % channels
    y = (at // out_width * sy - py)[:, None] + (tap // kx * dy)[None, :]
    x = (at % out_width * sx - px)[:, None] + (tap % kx * dx)[None, :]
    seen = (place < places)[:, None] & (tap < ky * kx)[None, :]
    if py + px > 0:
        seen = seen & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    pixels = height * width
    value = tl.load(
        input + ((example * channels * pixels)[:, None] + (channel * pixels)[None, :] + y * width + x),
        mask=seen,
        other=0.0,
    )
    value = tl.where((k == channels * ky * kx)[None, :], 1.0, value)
    target = patches + (place[:, None].to(tl.int64) * depth + k[None, :])
    wanted = (place < places)[:, None] & (k < depth)[None, :]
    tl.store(target, value, mask=wanted)
    tl.store(target + second, value * value, mask=wanted)


@triton.jit
def _pack(
    theta: tl.tensor,
    log_sigma2: tl.tensor,
    bias: tl.tensor,
    bias_log_sigma2: tl.tensor,
    weights: tl.tensor,
    outputs: tl.tensor,
    wide: tl.tensor,
    channels: tl.tensor,
    taps: tl.tensor,
    depth: tl.tensor,
    has_bias: tl.constexpr,
    noisy_bias: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    o = tl.program_id(0) * rows + tl.arange(0, rows)
    k = tl.program_id(1) * columns + tl.arange(0, columns)
    tap, channel = k // channels, k % channels
    patch = channels * taps
    there = (o < outputs)[:, None] & (k < patch)[None, :]
    of_bias = (o < outputs)[:, None] & (k == patch)[None, :]
    source = (o * patch)[:, None] + (channel * taps + tap)[None, :]
    unit = o[:, None] + 0 * k[None, :]
    target = weights + (o * depth)[:, None] + k[None, :]
    wanted = (o < wide)[:, None] & (k < depth)[None, :]
    value = tl.load(theta + source, mask=there, other=0.0)
    if has_bias:
        value += tl.load(bias + unit, mask=of_bias, other=0.0)
    tl.store(target, value, mask=wanted)
    log_value = tl.load(log_sigma2 + source, mask=there, other=-float("inf"))
    if noisy_bias:
        log_value = tl.where(of_bias, tl.load(bias_log_sigma2 + unit, mask=of_bias, other=0.0), log_value)
    tl.store(target + wide * depth, tl.exp(log_value), mask=wanted)


@triton.jit
def _sample(
    moments: tl.tensor,
    second: tl.tensor,
    ratio: tl.tensor,
    output: tl.tensor,
    places: tl.tensor,
    area: tl.tensor,
    outputs: tl.tensor,
    wide: tl.tensor,
    floor: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """From moments (places × columns) to the output (example × outputs × area); r takes the place of the noise."""
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    o = tl.program_id(1) * columns + tl.arange(0, columns)
    wanted = (place < places)[:, None] & (o < outputs)[None, :]
    source = place[:, None].to(tl.int64) * wide + o[None, :]
    value = tl.load(moments + source, mask=wanted, other=0.0)
    variance = tl.load(moments + second + source, mask=wanted, other=1.0)
    deviation = tl.sqrt(variance + floor)
    noise = tl.load(ratio + source, mask=wanted, other=0.0)
    tl.store(ratio + source, 0.5 * noise / deviation, mask=wanted)
    target = ((place // area).to(tl.int64) * outputs * area + place % area)[:, None] + (o * area)[None, :]
    tl.store(output + target, value + noise * deviation, mask=wanted)


@triton.jit
def _pull(
    gradient: tl.tensor,
    ratio: tl.tensor,
    pulled: tl.tensor,
    second: tl.tensor,
    places: tl.tensor,
    area: tl.tensor,
    outputs: tl.tensor,
    wide: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """The way back of `_sample`."""
    place = tl.program_id(0) * rows + tl.arange(0, rows)
    o = tl.program_id(1) * columns + tl.arange(0, columns)
    there = (place < places)[:, None] & (o < outputs)[None, :]
    wanted = (place < places)[:, None] & (o < wide)[None, :]
    source = ((place // area).to(tl.int64) * outputs * area + place % area)[:, None] + (o * area)[None, :]
    target = place[:, None].to(tl.int64) * wide + o[None, :]
    value = tl.load(gradient + source, mask=there, other=0.0)
    tl.store(pulled + target, value, mask=wanted)
    noise = tl.load(ratio + target, mask=there, other=0.0)
    tl.store(pulled + second + target, value * noise, mask=wanted)


@triton.jit
def _fold(
    by_patches: tl.tensor,
    second: tl.tensor,
    input: tl.tensor,
    by_input: tl.tensor,
    pixels: tl.tensor,
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    out_height: tl.tensor,
    out_width: tl.tensor,
    depth: tl.tensor,
    ky: tl.constexpr,
    kx: tl.constexpr,
    sy: tl.constexpr,
    sx: tl.constexpr,
    py: tl.constexpr,
    px: tl.constexpr,
    dy: tl.constexpr,
    dx: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """The way back of `_patches`: every pixel gathers from the places that see it."""
    pixel = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * columns + tl.arange(0, columns)
    image = height * width
    example, at = pixel // image, pixel % image
    area = out_height * out_width
    by_mean = tl.zeros((rows, columns), tl.float32)
    by_square = tl.zeros((rows, columns), tl.float32)
    for row in range(ky):
        for column in range(kx):
            y, x = at // width + py - row * dy, at % width + px - column * dx
            seen = (pixel < pixels) & (y >= 0) & (x >= 0) & (y % sy == 0) & (x % sx == 0)
            y, x = y // sy, x // sx
            seen = seen & (y < out_height) & (x < out_width)
            place = (example * area + y * out_width + x).to(tl.int64)
            source = (place * depth)[:, None] + ((row * kx + column) * channels + channel)[None, :]
            there = seen[:, None] & (channel < channels)[None, :]
            by_mean += tl.load(by_patches + source, mask=there, other=0.0)
            by_square += tl.load(by_patches + second + source, mask=there, other=0.0)
    target = (example * channels * image + at)[:, None] + (channel * image)[None, :]
    wanted = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    by_mean += 2 * tl.load(input + target, mask=wanted, other=0.0) * by_square
    tl.store(by_input + target, by_mean, mask=wanted)


@triton.jit
def _unpack(
    parts: tl.tensor,
    log_sigma2: tl.tensor,
    bias_log_sigma2: tl.tensor,
    by_theta: tl.tensor,
    by_log_sigma2: tl.tensor,
    by_bias: tl.tensor,
    by_bias_log_sigma2: tl.tensor,
    size: tl.tensor,
    second: tl.tensor,
    splits: tl.tensor,
    wide: tl.tensor,
    channels: tl.tensor,
    taps: tl.tensor,
    depth: tl.tensor,
    noisy_bias: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The way back of `_pack`: adds up what the splits came to, and leads it on from σ² to log σ²."""
    element = tl.program_id(0) * block + tl.arange(0, block)
    patch = channels * taps
    o, k = element // (patch + 1), element % (patch + 1)
    inside = element < size
    weight, is_bias = inside & (k < patch), inside & (k == patch)
    column = tl.where(k == patch, patch, k % taps * channels + k // taps)
    part = parts + o * depth + column
    total = tl.zeros((block,), tl.float32)
    of_square = tl.zeros((block,), tl.float32)
    for _ in range(splits):
        total += tl.load(part, mask=inside, other=0.0)
        of_square += tl.load(part + second, mask=inside, other=0.0)
        part += wide * depth
    target = o * patch + k
    sigma2 = tl.exp(tl.load(log_sigma2 + target, mask=weight, other=0.0))
    tl.store(by_theta + target, total, mask=weight)
    tl.store(by_log_sigma2 + target, of_square * sigma2, mask=weight)
    tl.store(by_bias + o, total, mask=is_bias)
    if noisy_bias:
        of_bias = tl.exp(tl.load(bias_log_sigma2 + o, mask=is_bias, other=0.0))
        tl.store(by_bias_log_sigma2 + o, of_square * of_bias, mask=is_bias)
