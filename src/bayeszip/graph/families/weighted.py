"""Linear layers and convolutions: where units are computed from others, and constants meet biases."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bayeszip.errors import ModelError
from bayeszip.graph.families.base import (
    UNKNOWN,
    Atoms,
    Attributes,
    Folded,
    Held,
    Rule,
    Shape,
    Site,
    Values,
    along,
    couple_groups,
    elements,
    extent,
    ints,
)
from bayeszip.graph.lowering import Call, Lower, Lowering, rank_of, repeated, shape_of
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS"]

#: Strides, paddings and dilations are smaller than this: torch computes with them in 64 bits.
_LARGEST = 2**31


class Linear(Rule):
    """y = x·Wᵀ + b over the last dimension; the dimensions before it pass through."""

    optional = ("bias",)
    floating = True

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """weight: outputs × inputs; bias: outputs."""
        weight, bias = tensors
        if weight is None or len(weight) != 2 or not min(weight) or bias not in (None, weight[:1]):
            raise ModelError(f"linear: a weight of shape {weight} and a bias of shape {bias} make no layer")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), weight = inputs, tensors[0]
        if weight is None or not shape or weight[1] != shape[-1]:
            raise ModelError(f"linear: a weight of shape {weight} can't be applied to a value of shape {shape}")
        return (*shape[:-1], weight[0])

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        return elements(output) * extent(inputs[0][-1])

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return F.linear(x[0], tensors[0], tensors[1])  # type: ignore[arg-type]

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        rows, columns = shapes[0] or (0, 0)
        return nn.Linear(columns, rows, bias=shapes[1] is not None, device="meta")

    def couple(self, site: Site, atoms: Atoms) -> None:
        before, after = site.inputs[0].coordinates, site.output.coordinates
        for one, other in zip(before[:-1], after[:-1], strict=True):
            atoms.join(one, other)
        weight, bias = site.tensors
        if weight is not None:
            atoms.join(weight.coordinates[0], after[-1])
            atoms.join(weight.coordinates[1], before[-1])
        if bias is not None:
            atoms.join(bias.coordinates[0], after[-1])

    def constants(self, site: Site) -> np.ndarray:
        rows = _affine(site, along(site.inputs[0].constants, -1, site.inputs[0].shape[-1]))
        return rows.reshape((1,) * (len(site.output.shape) - 1) + (-1,))

    def needs(self, site: Site, live: np.ndarray) -> None:
        columns = site.inputs[0].coordinates[-1]
        constants = along(site.inputs[0].constants, -1, len(columns))
        used = _connected(site)[live[site.output.coordinates[-1]]].any(axis=0)
        free = (constants == 0) | (site.foldable & np.isfinite(constants))
        live[columns[used & ~free]] = True

    def fold(self, site: Site, live: np.ndarray) -> Folded | None:
        columns = site.inputs[0].coordinates[-1]
        constants = along(site.inputs[0].constants, -1, len(columns))
        return _folded(site, constants, ~live[columns])


class _Kernel(Rule):
    """A kernel over `rank` dimensions behind the channels, which lie in dimension 1."""

    optional = ("bias",)
    floating = True
    #: Attributes with one number for each dimension of the kernel, in the order that `_size` takes them.
    _attributes: tuple[str, ...] = ("stride", "padding", "dilation")

    def __init__(self, rank: int, function: Callable[..., torch.Tensor], kind: Callable[..., nn.Module]) -> None:
        self._rank, self._function, self._kind = rank, function, kind

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """weight: two kinds of channels, in groups, × kernel; bias: the channels written."""
        weight, bias, groups = *tensors, _groups(node)
        if weight is None or len(weight) != self._rank + 2 or not min(weight) or weight[0] % groups:
            raise ModelError(f"{node.op}: a weight of shape {weight} can't be one of {groups} groups")
        after = self._read_and_written(weight, groups)[1]
        if bias not in (None, (after,)):
            raise ModelError(f"{node.op}: a bias of shape {bias} doesn't fit {after} outputs")
        settings = {name: ints(node, name) for name in self._attributes}
        if any(len(each) != self._rank or not 0 <= min(each) <= max(each) < _LARGEST for each in settings.values()):
            raise ModelError(f"{node.op}: {settings} are not {self._rank} numbers each, of a size that makes sense")
        if min(*settings["stride"], *settings["dilation"]) < 1:
            raise ModelError(f"{node.op}: kernel, stride and dilation must be at least 1, padding at least 0")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), weight, groups = inputs, tensors[0], _groups(node)
        if len(shape) != self._rank + 2 or weight is None or min(shape[1:]) < 1:
            raise ModelError(f"{node.op}: a weight of shape {weight} can't be applied to a value of shape {shape}")
        before, after = self._read_and_written(weight, groups)
        if before != shape[1]:
            raise ModelError(f"{node.op}: a weight of shape {weight} in {groups} groups can't read {shape[1]} channels")
        settings = (ints(node, name) for name in self._attributes)
        sizes = [self._size(*each) for each in zip(shape[2:], weight[2:], *settings, strict=True)]
        if min(sizes) < 1:
            raise ModelError(f"{node.op}: with the kernel {weight[2:]} nothing is left of a value of shape {shape}")
        return (shape[0], after, *sizes)

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        weight = tensors[0] or (1, 1)
        return max(elements(output), elements(inputs[0])) * elements(weight[1:])

    def workspace(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        # Some convolutions lay out what each output reads.
        weight = tensors[0] or (1, 1)
        return max(elements(output[2:]), elements(inputs[0][2:])) * elements(weight[2:]) * extent(inputs[0][1])

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        groups = _groups(site.node)
        if groups == 1:
            return {}
        return {"groups": count(site.inputs[0].coordinates[1][:: site.inputs[0].shape[1] // groups])}

    def _read_and_written(self, weight: Shape, groups: int) -> tuple[int, int]:
        """How many channels a weight reads, and how many it computes."""
        raise NotImplementedError

    def _size(self, size: int, kernel: int, *settings: int) -> int:
        """What becomes of the size of a dimension."""
        raise NotImplementedError

    def _channels(self, site: Site) -> np.ndarray:
        """The constant of each input channel."""
        return along(site.inputs[0].constants, 1, site.inputs[0].shape[1])


class Convolution(_Kernel):
    """A convolution; its weight lies outputs first."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        mode, padding = node.attributes["padding_mode"], ints(node, "padding")
        for size, amount in zip(inputs[0][2:], padding, strict=False):
            if (mode == "reflect" and amount >= size) or (mode == "circular" and amount > size):
                raise ModelError(f"{node.op}: a value of shape {inputs[0]} can't be padded by {padding} ({mode})")
        return super().shape(node, inputs, tensors)

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        value, padding = x[0], a["padding"]
        if a["padding_mode"] != "zeros":
            around = [amount for each in reversed(padding) for amount in (each, each)]
            value, padding = F.pad(value, around, mode=a["padding_mode"]), 0
        return self._function(value, *tensors, a["stride"], padding, a["dilation"], a["groups"])

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        written, read, *kernel = shapes[0] or (0, 0)
        settings = (a["stride"], a["padding"], a["dilation"], a["groups"])
        options = {"bias": shapes[1] is not None, "padding_mode": a["padding_mode"], "device": "meta"}
        return self._kind(read * a["groups"], written, tuple(kernel), *settings, **options)

    def _read_and_written(self, weight: Shape, groups: int) -> tuple[int, int]:
        return weight[1] * groups, weight[0]

    def _size(self, size: int, kernel: int, *settings: int) -> int:
        stride, padding, dilation = settings
        return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1

    def couple(self, site: Site, atoms: Atoms) -> None:
        _couple_kernel(site, atoms, rows=1, columns=0)

    def constants(self, site: Site) -> np.ndarray:
        channels = self._channels(site)
        if self._pads_zeros(site):
            channels = np.where(channels == 0, 0.0, UNKNOWN)
        rows = _affine(site, channels)
        return rows.reshape(1, -1, *(1,) * self._rank)

    def needs(self, site: Site, live: np.ndarray) -> None:
        if _groups(site.node) > 1:
            return  # a group's inputs and outputs are one atom
        channels = self._channels(site)
        used = _connected(site)[live[site.output.coordinates[1]]].any(axis=0)
        # At a border that is padded with zeros the constant isn't there: only zero goes without a trace.
        free = (channels == 0) | (site.foldable & (not self._pads_zeros(site)) & np.isfinite(channels))
        live[site.inputs[0].coordinates[1][used & ~free]] = True

    def fold(self, site: Site, live: np.ndarray) -> Folded | None:
        if _groups(site.node) > 1:
            return None
        return _folded(site, self._channels(site), ~live[site.inputs[0].coordinates[1]])

    def _pads_zeros(self, site: Site) -> bool:
        return site.node.attributes["padding_mode"] == "zeros" and any(ints(site.node, "padding"))


class TransposedConvolution(_Kernel):
    """A transposed convolution; its weight lies inputs first. Only zero is read without a trace."""

    _attributes = (*_Kernel._attributes, "output_padding")

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        super().check_tensors(node, tensors)
        for extra, *steps in zip(*(ints(node, name) for name in ("output_padding", "stride", "dilation")), strict=True):
            if extra >= max(steps):
                raise ModelError(f"{node.op}: an output padding of {extra} must be smaller than stride or dilation")

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        settings = (a["stride"], a["padding"], a["output_padding"], a["groups"], a["dilation"])
        return self._function(x[0], *tensors, *settings)

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        read, written, *kernel = shapes[0] or (0, 0)
        settings = (a["stride"], a["padding"], a["output_padding"], a["groups"])
        options = {"bias": shapes[1] is not None, "dilation": a["dilation"], "device": "meta"}
        return self._kind(read, written * a["groups"], tuple(kernel), *settings, **options)

    def _read_and_written(self, weight: Shape, groups: int) -> tuple[int, int]:
        return weight[0], weight[1] * groups

    def _size(self, size: int, kernel: int, *settings: int) -> int:
        stride, padding, dilation, extra = settings
        return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1

    def couple(self, site: Site, atoms: Atoms) -> None:
        _couple_kernel(site, atoms, rows=0, columns=1)

    def constants(self, site: Site) -> np.ndarray:
        weight, bias = _weight(site), site.tensors[1]
        rows = np.zeros(site.output.shape[1]) if bias is None else bias.values.astype(np.float64)
        varies = self._channels(site) != 0
        groups = _groups(site.node)
        read = (weight != 0).any(axis=tuple(range(2, weight.ndim))) & varies[:, None]
        touched = read.reshape(groups, -1, weight.shape[1]).any(axis=1).ravel()
        return np.where(touched, UNKNOWN, rows).reshape(1, -1, *(1,) * self._rank)

    def needs(self, site: Site, live: np.ndarray) -> None:
        if _groups(site.node) > 1:
            return  # a group's inputs and outputs are one atom
        weight = _weight(site)
        connected = (weight != 0).any(axis=tuple(range(2, weight.ndim)))
        used = connected[:, live[site.output.coordinates[1]]].any(axis=1)
        live[site.inputs[0].coordinates[1][used & (self._channels(site) != 0)]] = True


def _connected(site: Site) -> np.ndarray:
    """Which outputs read which inputs: outputs × inputs, true where any weight between the two is not zero."""
    return _dense(np.any(_weight(site) != 0, axis=tuple(range(2, _weight(site).ndim))), site)


def _summed(site: Site) -> np.ndarray:
    """Outputs × inputs, what a constant input is multiplied by: the weights summed over the kernel."""
    return _dense(_weight(site).sum(axis=tuple(range(2, _weight(site).ndim)), dtype=np.float64), site)


def _dense(weight: np.ndarray, site: Site) -> np.ndarray:
    """A grouped matrix as that of one group, with nothing between the groups."""
    groups = _groups(site.node) if "groups" in site.node.attributes else 1
    if groups == 1:
        return weight
    rows, columns = weight.shape[0] // groups, weight.shape[1]
    dense = np.zeros((groups, rows, groups, columns), dtype=weight.dtype)
    each = np.arange(groups)
    dense[each, :, each] = weight.reshape(groups, rows, columns)
    return dense.reshape(groups * rows, groups * columns)


def _weight(site: Site) -> np.ndarray:
    weight = site.tensors[0]
    if weight is None:
        raise ModelError(f"{site.node.op} has no weight")
    return weight.values


def _affine(site: Site, constants: np.ndarray) -> np.ndarray:
    """The constant of each row; NaN where it reads anything that varies."""
    known, bias = np.isfinite(constants), site.tensors[1]
    rows = _summed(site) @ np.where(known, constants, 0.0) + (0.0 if bias is None else bias.values)
    return np.where(_connected(site)[:, ~known].any(axis=1), UNKNOWN, rows)


def _folded(site: Site, constants: np.ndarray, dead: np.ndarray) -> Folded | None:
    columns = dead & np.isfinite(constants) & (constants != 0)
    if not columns.any():
        return None
    return Folded(_summed(site)[:, columns] @ constants[columns], _weight(site)[:, columns])


def _couple_kernel(site: Site, atoms: Atoms, *, rows: int, columns: int) -> None:
    """The channels of a convolution: its weight's rows and columns belong to the input's (0) or the output's (1)."""
    before, after = channels = site.inputs[0].coordinates, site.output.coordinates
    weight, bias = site.tensors
    atoms.pin(before[0], after[0], *before[2:], *after[2:])
    if bias is not None:
        atoms.join(bias.coordinates[0], after[1])
    if weight is None:
        return
    atoms.join(weight.coordinates[0], channels[rows][1])
    atoms.pin(*weight.coordinates[2:])
    groups = _groups(site.node)
    if groups == 1:
        atoms.join(weight.coordinates[1], channels[columns][1])
    else:
        couple_groups(before[1], after[1], groups, atoms)
        atoms.pin(weight.coordinates[1])


def _groups(node: Node) -> int:
    groups = node.attributes["groups"]
    if not isinstance(groups, int) or groups < 1:
        raise ModelError(f"{node.op}: groups must be at least 1, not {groups!r}")
    return groups


_CONVOLUTIONS = ((F.conv1d, nn.Conv1d), (F.conv2d, nn.Conv2d), (F.conv3d, nn.Conv3d))
_TRANSPOSED = (
    (F.conv_transpose1d, nn.ConvTranspose1d),
    (F.conv_transpose2d, nn.ConvTranspose2d),
    (F.conv_transpose3d, nn.ConvTranspose3d),
)

OPERATORS: dict[str, Rule] = {
    "linear": Linear(),
    **{f"conv{rank}d": Convolution(rank, *each) for rank, each in enumerate(_CONVOLUTIONS, 1)},
    **{f"conv_transpose{rank}d": TransposedConvolution(rank, *each) for rank, each in enumerate(_TRANSPOSED, 1)},
}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_linear(lowering: Lowering, call: Call) -> int:
    value, weight, bias = lowering.value(call["input"]), call["weight"], call["bias"]
    if lowering.is_tensor(weight) and (bias is None or lowering.is_tensor(bias)):
        return lowering.emit("linear", [value], [lowering.tensor(weight), lowering.tensor(bias)])
    # A weight that is computed, a part of packed projections, for example.
    if rank_of(weight) != 2:
        raise call.unsupported("with a weight that is no matrix")
    turned = lowering.emit("permute", [lowering.value(weight)], dims=(1, 0))
    product = lowering.emit("matmul", [value, turned])
    return product if bias is None else lowering.emit("add", [product, lowering.value(bias)])


def _lower_convolution(dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call["input"]) != dims + 2:
            raise call.unsupported("without a batch dimension")
        dilation = repeated(call["dilation"], dims)
        value, padding = lowering.value(call["input"]), call["padding"]
        if isinstance(padding, str):
            value, padding = _lower_named_padding(lowering, call, value, padding, dilation)
        return lowering.emit(
            f"conv{dims}d",
            [value],
            [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])],
            stride=repeated(call["stride"], dims),
            padding=repeated(padding, dims),
            dilation=dilation,
            groups=call["groups"],
        )

    return lower


def _lower_named_padding(
    lowering: Lowering, call: Call, value: int, padding: str, dilation: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """'same' and 'valid' as numbers; where 'same' is not the same on both sides, the value is padded beforehand."""
    kernel = shape_of(call["weight"])[2:]
    if padding == "valid":
        return value, (0,) * len(kernel)
    total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if any(each % 2 for each in total):
        # torch puts what is odd behind.
        extra = tuple(amount for each in reversed(total) for amount in (0, each % 2))
        value = lowering.emit("pad", [value], amounts=extra)
    return value, tuple(each // 2 for each in total)


def _lower_transposed_convolution(dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call["input"]) != dims + 2:
            raise call.unsupported("without a batch dimension")
        return lowering.emit(
            f"conv_transpose{dims}d",
            [lowering.value(call["input"])],
            [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])],
            groups=call["groups"],
            **{name: repeated(call[name], dims) for name in ("stride", "padding", "dilation", "output_padding")},
        )

    return lower


ATEN: dict[str, Lower] = {
    "linear": _lower_linear,
    **{f"conv{dims}d": _lower_convolution(dims) for dims in (1, 2, 3)},
    **{
        name: _lower_transposed_convolution(dims)
        for name, dims in (("conv_transpose1d", 1), ("conv_transpose2d", 2), ("conv_transpose3d", 3))
    },
}
