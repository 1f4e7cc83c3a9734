"""Layers whose weights are Gaussian: q(w) = N(θ, σ²). Subclasses of the stock modules, with θ in `weight` and `bias`.

In training a layer samples its output rather than its weights (local reparameterization, Kingma et al. 2015): for a
layer that is linear in its weights, y = L(x; w) is Gaussian with

    E[y] = L(x; θ),   Var[y] = L(x²; σ²),

so one noise value for each output suffices. In `eval()`, and with `noise` off, it is the stock layer at w = θ.

log σ² of a parameter lives beside it, in `weight_log_sigma2` and `bias_log_sigma2` (None: that tensor has no noise and
no divergence). A state dict of the stock layer loads as it is; log σ² then keeps its value.

Layers that are not linear in their weights, or whose forward nobody here has read, sample the weights themselves: see
`sampled`. `kinds` says which layer takes which form.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.variational.distributions import PRUNING_LOG_ALPHA, log_alpha
from bayeszip.variational.sampling import (
    VARIANCE_FLOOR,
    Convolution,
    MatrixProduct,
    check_way_there,
    is_transformed,
    on_triton,
    sample_around,
    sample_product,
    standard_normal_like,
)

__all__ = [
    "TABLES",
    "Live",
    "VariationalConv1d",
    "VariationalConv2d",
    "VariationalConv3d",
    "VariationalConvTranspose1d",
    "VariationalConvTranspose2d",
    "VariationalConvTranspose3d",
    "VariationalEmbedding",
    "VariationalLayer",
    "VariationalLinear",
    "VariationalTransposedLinear",
    "VariationalWeight",
    "is_kept",
    "variational_weights",
]


#: Layers that pick rows.
TABLES = (nn.Embedding, nn.EmbeddingBag)


class VariationalWeight(NamedTuple):
    """One tensor of posterior means with its log-variances, under the name it has in the state dict."""

    name: str
    theta: nn.Parameter
    log_sigma2: nn.Parameter
    #: Factor on τ₁ for this tensor alone.
    strength: float = 1.0


class Live(NamedTuple):
    """The rows and columns of a weight that are still computed, and the shape it had."""

    rows: Tensor
    columns: Tensor
    full_shape: torch.Size


class VariationalLayer(nn.Module):
    """What all variational layers share. Abstract: subclasses say how they are `_linear` in their weights."""

    #: The parameters that may have a posterior.
    roles: ClassVar[tuple[str, ...]] = ("weight", "bias")
    #: The class that it was, and will be again.
    stock: ClassVar[type[nn.Module]]
    weight: Any
    bias: Any
    weight_log_sigma2: nn.Parameter | None
    bias_log_sigma2: nn.Parameter | None
    #: Sample in training. Off for soft weight sharing alone, whose posterior is a delta peak.
    noise: bool
    #: Where a GPU draws the noise from; None: torch's own source.
    generator: torch.Generator | None = None
    #: Set while the layer computes only the rows and columns that are alive; see `compaction`.
    live: "Live | None"
    #: Factors on τ₁, by role, that are not 1.
    strengths: Mapping[str, float]
    #: The dimension of activations that a weight's rows and columns stand for; None: can't be compacted.
    _channel_dim: int | None = None
    #: Whether the columns of its weight are what it makes, and the rows what it reads.
    makes_columns: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.stock = cls.__bases__[-1]

    def start_posterior(self, log_sigma2: float, strengths: Mapping[str, float]) -> None:
        """Add log σ², constant, to a layer that holds pretrained weights.

        Args:
            strengths: by the roles that get a posterior, their factors on τ₁.
        """
        self.noise = True
        self.live = None
        if isinstance(self, TABLES):
            # By its prior each row has a gradient; and afterwards, by the shared values.
            vars(self).update(sparse=False)
        self.strengths = {role: strength for role, strength in strengths.items() if strength != 1}
        for role in self.roles:
            theta = self._parameters.get(role)
            variance = None
            if theta is not None and role in strengths:
                variance = nn.Parameter(torch.full_like(theta, log_sigma2, dtype=torch.float32))
            self.register_parameter(f"{role}_log_sigma2", variance)

    def end_posterior(self) -> None:
        """Take away what `start_posterior` added."""
        for role in self.roles:
            del self._parameters[f"{role}_log_sigma2"]
        del self.noise, self.live, self.strengths

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, *context: Any) -> Tensor:
        raise NotImplementedError

    def _compute(self, input: Tensor, *context: Any) -> Tensor:
        """The output, from the live inputs only if the layer is compacted; dead outputs are 0."""
        live, dim = self.live, self._channel_dim
        if live is None or dim is None:
            return self._sample(input, *context)
        # Where channels come last in memory, they do in what is made here.
        place = -1 if not input.is_contiguous() and input.movedim(dim, -1).is_contiguous() else dim
        selected = _selected(input.movedim(dim, place), place, live.columns)
        output = self._sample(selected.movedim(place, dim), *context).movedim(dim, place)
        return _amid_zeros(output, place, live.rows, live.full_shape[0]).movedim(place, dim)

    def _sample(self, input: Tensor, *context: Any) -> Tensor:
        log_sigma2 = self.weight_log_sigma2
        if log_sigma2 is None or not (self.training and self.noise):
            return self._linear(input, self.weight, self.bias, *context)
        biases = (self.bias, self.bias_log_sigma2)
        if not is_transformed():
            output = self._by_patches(input, log_sigma2)
            if output is not None:
                return output
            product = self._as_product(input, *context)
            if product is not None:
                return sample_product(product[0], self.weight, log_sigma2, *biases, product[1], self.generator)
        mean = self._linear(input, self.weight, self.bias, *context)
        dtype = self.weight.dtype
        bias_variance = None if self.bias_log_sigma2 is None else self.bias_log_sigma2.exp().to(dtype)
        variance = self._linear(input.square(), log_sigma2.exp().to(dtype), bias_variance, *context)
        return sample_around(mean, variance, self.generator)

    def _by_patches(self, input: Tensor, log_sigma2: Tensor) -> Tensor | None:
        """A sample of the output by `gpu_layers`; None where that can't be or won't pay."""
        return None

    def _as_product(self, input: Tensor, *context: Any) -> tuple[Tensor, MatrixProduct | Convolution] | None:
        """The input, padded unless with zeros, and `_linear` as `sampling` takes it; None: autograd does as well."""
        return None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for role in self.roles:
            key = f"{role}_log_sigma2"
            if getattr(self, key) is not None:
                state_dict.setdefault(prefix + key, getattr(self, key).detach())
        super()._load_from_state_dict(state_dict, prefix, *rest)


class VariationalLinear(VariationalLayer, nn.Linear):
    """`nn.Linear` with Gaussian weights."""

    _channel_dim = -1

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, *context: Any) -> Tensor:
        return F.linear(input, weight, bias)

    def _by_patches(self, input: Tensor, log_sigma2: Tensor) -> Tensor | None:
        outputs, inputs = self.weight.shape
        if input.shape[-1] != inputs or not _fits_kernels(input, self.weight):
            return None
        output = _sample_by_patches(self, input.reshape(-1, inputs, 1, 1), log_sigma2)
        return None if output is None else output.view(*input.shape[:-1], outputs)

    def _as_product(self, input: Tensor, *context: Any) -> tuple[Tensor, MatrixProduct | Convolution] | None:
        # On a CPU there is little to save, and the order in which autograd computes is in the bits of files.
        return None if input.device.type == "cpu" else (input, MatrixProduct())

    def forward(self, input: Tensor) -> Tensor:
        return self._compute(input)


class VariationalTransposedLinear(VariationalLayer):
    """x W + b with Gaussian weights, W being inputs × outputs: what Hugging Face calls `Conv1D`. Mixed into it."""

    makes_columns = True

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, *context: Any) -> Tensor:
        return F.linear(input, weight.t(), bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x)


class _VariationalConv(VariationalLayer):
    # Padding, whatever its mode, copies or adds zeros; it therefore commutes with the square of the input.
    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, *context: Any) -> Tensor:
        return self._conv_forward(input, weight, bias)  # type: ignore[operator]

    def _as_product(self, input: Tensor, *context: Any) -> tuple[Tensor, MatrixProduct | Convolution] | None:
        layer: Any = self
        padding, nothing = layer.padding, (0,) * len(layer.stride)
        if input.dim() != len(nothing) + 2:
            return None
        if layer.padding_mode != "zeros":
            input, padding = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), nothing
        elif padding == "valid":
            padding = nothing
        elif padding == "same":
            both = [dilation * (size - 1) for dilation, size in zip(layer.dilation, layer.kernel_size, strict=True)]
            if any(total % 2 for total in both):
                return None
            padding = tuple(total // 2 for total in both)
        return input, Convolution(layer.stride, padding, layer.dilation, layer.groups)

    def forward(self, input: Tensor) -> Tensor:
        return self._compute(input)


class VariationalConv1d(_VariationalConv, nn.Conv1d):
    """`nn.Conv1d` with Gaussian weights."""

    _channel_dim = -2


class VariationalConv2d(_VariationalConv, nn.Conv2d):
    """`nn.Conv2d` with Gaussian weights."""

    _channel_dim = -3

    def _by_patches(self, input: Tensor, log_sigma2: Tensor) -> Tensor | None:
        plain = self.groups == 1 and self.padding_mode == "zeros" and not isinstance(self.padding, str)
        # Where channels come last torch's convolutions keep them there, and patches would be of a copy.
        fits = input.dim() == 4 and input.shape[1] == self.weight.shape[1] and input.is_contiguous()
        if not (plain and fits and _fits_kernels(input, self.weight)):
            return None
        geometry = (self.kernel_size, self.stride, self.padding, self.dilation)
        return _sample_by_patches(self, input, log_sigma2, *geometry)


class VariationalConv3d(_VariationalConv, nn.Conv3d):
    """`nn.Conv3d` with Gaussian weights."""

    _channel_dim = -4


class _VariationalConvTranspose(VariationalLayer):
    makes_columns = True
    _rank: int

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, *context: Any) -> Tensor:
        layer: Any = self
        padding = (layer.padding, self._padding_of_output(input, *context))
        transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self._rank - 1]
        return transpose(input, weight, bias, layer.stride, *padding, layer.groups, layer.dilation)

    def _as_product(self, input: Tensor, *context: Any) -> tuple[Tensor, MatrixProduct | Convolution] | None:
        layer: Any = self
        if input.dim() != self._rank + 2:
            return None
        geometry = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return input, Convolution(*geometry, transposed=True, output_padding=self._padding_of_output(input, *context))

    def _padding_of_output(self, input: Tensor, output_size: list[int] | None) -> tuple[int, ...]:
        layer: Any = self
        geometry = (layer.stride, layer.padding, layer.kernel_size, self._rank, layer.dilation)
        return tuple(layer._output_padding(input, output_size, *geometry))

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return self._compute(input, output_size)


class VariationalConvTranspose1d(_VariationalConvTranspose, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d` with Gaussian weights."""

    _rank = 1


class VariationalConvTranspose2d(_VariationalConvTranspose, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with Gaussian weights."""

    _rank = 2


class VariationalConvTranspose3d(_VariationalConvTranspose, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with Gaussian weights."""

    _rank = 3


class VariationalEmbedding(VariationalLayer, nn.Embedding):
    """`nn.Embedding` with Gaussian rows; the row of `padding_idx` is never noisy."""

    makes_columns = True

    bias = None

    def forward(self, input: Tensor) -> Tensor:
        mean = nn.Embedding.forward(self, input)
        if self.weight_log_sigma2 is None or not (self.training and self.noise):
            return mean
        deviation = (0.5 * F.embedding(input, self.weight_log_sigma2)).exp()
        sample = standard_normal_like(deviation, self.generator) * deviation
        if self.padding_idx is not None:
            sample = sample.masked_fill((input == self.padding_idx).unsqueeze(-1), 0.0)
        return mean + sample.to(mean.dtype)


def _selected(tensor: Tensor, place: int, indices: Tensor) -> Tensor:
    """What lies at ascending `indices` along a dimension."""
    if indices.numel() == tensor.shape[place]:
        return tensor
    if is_transformed():
        return tensor.index_select(place, indices)
    selected: Tensor = _Selected.apply(tensor, place, indices)
    return selected


def _amid_zeros(tensor: Tensor, place: int, indices: Tensor, size: int) -> Tensor:
    """The opposite: `tensor` at these of `size` places, and zeros elsewhere."""
    if indices.numel() == size:
        return tensor
    shape = list(tensor.shape)
    shape[place] = size
    return tensor.new_zeros(shape).index_copy_(place, indices, tensor)


class _Selected(torch.autograd.Function):
    """`index_select` of places that are all different: its gradient is copied, where torch, which can't know that they
    are, would add it up atomically."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, place: int, indices: Tensor) -> Tensor:
        ctx.place, ctx.size = place, tensor.shape[place]
        ctx.save_for_backward(indices)
        return tensor.index_select(place, indices)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (indices,) = outputs, ctx.saved_tensors
        return _amid_zeros(gradient, ctx.place, indices, ctx.size), None, None


def _fits_kernels(input: Tensor, weight: Tensor) -> bool:
    """Whether the fused kernels take these: on a GPU, in float32, with nothing that would have them otherwise."""
    exact = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    return exact and input.numel() > 0 and on_triton(input)


def _sample_by_patches(layer: VariationalLayer, input: Tensor, log_sigma2: Tensor, *geometry: Any) -> Tensor | None:
    from bayeszip.variational import gpu_layers

    shape = gpu_layers.Geometry(*geometry)
    too_small = min(shape.output(*input.shape[2:])) < 1  # torch has the words for it
    if too_small or not gpu_layers.pays(input, len(layer.weight), shape):
        return None
    check_way_there(layer.generator)
    theta = layer.weight.view(*layer.weight.shape[:2], *shape.kernel)
    biases = (layer.bias, layer.bias_log_sigma2)
    return gpu_layers.sample_by_patches(
        input, theta, log_sigma2.view_as(theta), *biases, shape, VARIANCE_FLOOR, layer.generator
    )


def is_kept(weight: VariationalWeight) -> Tensor:
    """Which weights have a dropout rate below the paper's threshold (app. B)."""
    return log_alpha(weight.theta, weight.log_sigma2) < PRUNING_LOG_ALPHA


def variational_weights(module: nn.Module) -> Iterator[VariationalWeight]:
    """Every tensor with a posterior, once each: a layer used twice or a weight tied to another counts once.

    It is called what `named_parameters` calls it, which of several names takes the first.
    """
    names, seen = {id(parameter): name for name, parameter in module.named_parameters()}, set[int]()
    for layer in module.modules():
        if not isinstance(layer, VariationalLayer):
            continue
        for role in layer.roles:
            log_sigma2 = layer._parameters[f"{role}_log_sigma2"]
            if log_sigma2 is not None and id(log_sigma2) not in seen:
                seen.add(id(log_sigma2))
                theta, strength = layer._parameters[role], layer.strengths.get(role, 1.0)
                if theta is None:  # never: it has a variance
                    raise TypeError(role)
                yield VariationalWeight(names[id(theta)], theta, log_sigma2, strength)
