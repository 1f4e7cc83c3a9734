"""Samples of the output of a layer that is linear in its weights, which keep little for the way back.

With L(x; w) what the layer computes, θ and σ² the means and variances of its weights, ε standard normal and g the
gradient in y:

    y = L(x; θ) + ε √L(x²; σ²)                           forward, with ε / 2√… kept as r
    dx = Lᵀ(g; θ) + 2x · Lᵀ(g r; σ²)                     backward, Lᵀ the transpose of L in x
    dθ = L*(x, g),   d log σ² = σ² · L*(x², g r)         and L* its transpose in w

Autograd by itself would keep x, x², σ², the variance, its root and the noise; this keeps x, the parameters and r.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayeszip.variational.kernels import fill_normal

__all__ = [
    "VARIANCE_FLOOR",
    "Convolution",
    "MatrixProduct",
    "check_way_there",
    "is_transformed",
    "on_triton",
    "sample_around",
    "sample_product",
    "standard_normal_like",
]

#: Added to the variance under the square root, whose gradient at 0 is infinite.
VARIANCE_FLOOR = 1e-8

#: Gradients in the input, the weight and the bias; None for one that is not wanted.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Wanted = tuple[bool, bool, bool]


@dataclass(frozen=True)
class MatrixProduct:
    """L(x; w) = x wᵀ, along the last dimension of x."""

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def gradients(self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
        rows, inputs = gradient.reshape(-1, len(weight)), input.reshape(-1, weight.shape[1])
        return (
            (rows @ weight).view(input.shape) if wanted[0] else None,
            rows.t() @ inputs if wanted[1] else None,
            rows.sum(dim=0) if wanted[2] else None,
        )


@dataclass(frozen=True)
class Convolution:
    """L(x; w) = x convolved with w, in as many dimensions as `stride` has; batches only, padded with zeros."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def output(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(input, weight, bias, *self._geometry())

    def gradients(self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
        outputs = [gradient.shape[1]]
        result: Gradients = torch.ops.aten.convolution_backward(
            gradient, input, weight, outputs, *self._geometry(), wanted
        )
        return result

    def _geometry(self) -> tuple[Any, ...]:
        output_padding = self.output_padding or (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, self.transposed, output_padding, self.groups


def sample_product(
    input: Tensor,
    theta: Tensor,
    log_sigma2: Tensor,
    bias: Tensor | None,
    bias_log_sigma2: Tensor | None,
    product: MatrixProduct | Convolution,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A sample of `product` with Gaussian weights; it can be differentiated once. Not for use where `is_transformed`.

    Under autocast it computes in that type, as the products themselves would.
    """
    sample: Tensor = _SampleProduct.apply(input, theta, log_sigma2, bias, bias_log_sigma2, product, generator)
    return sample


class _SampleProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        theta: Tensor,
        log_sigma2: Tensor,
        bias: Tensor | None,
        bias_log_sigma2: Tensor | None,
        product: MatrixProduct | Convolution,
        generator: torch.Generator | None,
    ) -> Tensor:
        cast = _autocast_type(input)
        dtype = theta.dtype if cast is None else cast
        x = input if cast is None else input.to(cast)
        mean = product.output(x, theta.to(dtype), None if bias is None else bias.to(dtype))
        bias_variance = None if bias_log_sigma2 is None else bias_log_sigma2.exp().to(dtype)
        variance = product.output(x.square(), log_sigma2.exp().to(dtype), bias_variance)
        sample, ratio = _add_noise(mean, variance, generator)
        ctx.product = product
        ctx.save_for_backward(x, theta, log_sigma2, bias_log_sigma2, ratio)
        return sample

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = outputs
        x, theta, log_sigma2, bias_log_sigma2, ratio = ctx.saved_tensors
        of_input, of_theta, of_log_sigma2, of_bias, of_bias_log_sigma2, *_ = ctx.needs_input_grad
        gradients = ctx.product.gradients
        by_input, by_theta, by_bias = gradients(gradient, x, theta.to(x.dtype), (of_input, of_theta, of_bias))
        by_log_sigma2 = by_bias_log_sigma2 = None
        if of_input or of_log_sigma2 or of_bias_log_sigma2:
            sigma2, wanted = log_sigma2.exp(), (of_input, of_log_sigma2, of_bias_log_sigma2)
            by_square, by_log_sigma2, by_bias_log_sigma2 = gradients(
                gradient * ratio, x.square(), sigma2.to(x.dtype), wanted
            )
            if of_input:
                by_input = by_input.addcmul_(x, by_square, value=2)
            if of_log_sigma2:
                by_log_sigma2 = sigma2.mul_(by_log_sigma2)
            if of_bias_log_sigma2:
                by_bias_log_sigma2 = bias_log_sigma2.exp().mul_(by_bias_log_sigma2)
        return by_input, by_theta, by_log_sigma2, by_bias, by_bias_log_sigma2, None, None


def _autocast_type(input: Tensor) -> torch.dtype | None:
    """The type in which autocast would have this multiplied, if it is on."""
    kind = input.device.type
    if input.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _add_noise(mean: Tensor, variance: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """mean + ε√variance and r = ε / 2√variance; neither of the two given is of use any more."""
    precise = torch.promote_types(variance.dtype, torch.float32)
    noise = standard_normal_like(variance, generator, precise)
    alike = mean.stride() == variance.stride() == noise.stride()
    if precise == torch.float32 and alike and mean.numel() > 0 and on_triton(mean):
        from bayeszip.variational import gpu_kernels

        return gpu_kernels.add_noise(mean, variance, noise, VARIANCE_FLOOR)
    deviation = variance.to(precise).add_(VARIANCE_FLOOR).sqrt_()
    mean.addcmul_(noise, deviation)
    # In place of the deviation, whose layout is the output's.
    ratio = torch.div(noise, deviation, out=deviation).mul_(0.5)
    return mean, ratio.to(mean.dtype)


def sample_around(mean: Tensor, variance: Tensor, generator: torch.Generator | None) -> Tensor:
    """mean + ε√variance with standard normal ε, for autograd to differentiate."""
    # At least float32: the floor is nothing beside 1 in half precision.
    deviation = (variance.to(torch.promote_types(variance.dtype, torch.float32)) + VARIANCE_FLOOR).sqrt()
    return mean + (deviation * standard_normal_like(deviation, generator)).to(mean.dtype)


def standard_normal_like(
    tensor: Tensor, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Standard normal noise of a shape and type (or `dtype`), governed by torch's seed or, on a GPU, `generator`.

    On a CPU torch draws from a serial Mersenne twister, three times slower than the kernel that it only seeds here.
    """
    dtype = tensor.dtype if dtype is None else dtype
    check_way_there(generator)
    if tensor.device.type != "cpu" or dtype != torch.float32 or is_transformed():
        return torch.empty_like(tensor, dtype=dtype).normal_(generator=generator)
    size = tensor.numel()
    values = torch.empty(-(-size // 4) * 4)
    fill_normal(values.numpy(), np.uint64(torch.randint(2**63 - 1, ()).item()))
    return values[:size].view(tensor.shape)


def check_way_there(generator: torch.Generator | None) -> None:
    """Refuse to draw noise on the way back, from a source of which nobody keeps where it stood on the way there.

    Raises:
        RuntimeError: layers are computed again.
    """
    if generator is not None and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "the network computes its layers again on the way back (gradient checkpointing), where they would draw "
            "other noise than before: switch that off while it is compressed"
        )


def is_transformed() -> bool:
    """Whether what runs is a function that `torch.compile` or `torch.func` makes another of."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def on_triton(tensor: Tensor) -> bool:
    """Whether kernels written in triton can take it; else torch's do."""
    if not tensor.is_cuda or is_transformed() or not _has_triton():
        return False
    return tensor.device.index == torch.cuda.current_device()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
