"""Normalization: batch and instance norm channel by channel, group norm group by group, layer norm over all."""

import math
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
    Held,
    Rule,
    Shape,
    Site,
    Values,
    along,
    couple_groups,
    ints,
)
from bayeszip.graph.lowering import Call, Lower, Lowered, Lowering, rank_of
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS"]


def _check_eps(node: Node) -> None:
    eps = node.attributes["eps"]
    if not isinstance(eps, float | int) or not 0 <= eps < 1e30:
        raise ModelError(f"{node.op}: eps must be a number that is at least 0 and not large, not {eps!r}")


class _ChannelNorm(Rule):
    """A norm whose tensors have one element for each channel, dimension 1."""

    optional = ("weight", "bias")
    floating = True

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """All of one dimension and one size."""
        _check_eps(node)
        shapes = {each for each in tensors if each is not None}
        if len(shapes) > 1 or any(len(each) != 1 or not each[0] for each in shapes):
            raise ModelError(f"{node.op}: tensors of shapes {tuple(tensors)} don't fit the same channels")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,) = inputs
        if len(shape) < 2 or shape[1] < 1 or any(each is not None and each != (shape[1],) for each in tensors):
            raise ModelError(f"{node.op}: tensors of shapes {tuple(tensors)} don't fit a value of shape {shape}")
        return shape

    def couple(self, site: Site, atoms: Atoms) -> None:
        before, after = site.inputs[0].coordinates, site.output.coordinates
        atoms.pin(before[0], after[0], *before[2:], *after[2:])
        atoms.join(before[1], after[1])
        for tensor in site.tensors:
            if tensor is not None:
                atoms.join(tensor.coordinates[0], after[1])

    def constants(self, site: Site) -> np.ndarray:
        """A channel whose weight is zero is its bias."""
        weight, bias = site.tensors[:2]
        if weight is None:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        offset = np.zeros(site.output.shape[1]) if bias is None else bias.values.astype(np.float64)
        return self._channels(site, np.where(weight.values == 0, offset, UNKNOWN))

    def _channels(self, site: Site, constants: np.ndarray) -> np.ndarray:
        return constants.reshape(1, -1, *(1,) * (len(site.output.shape) - 2))


class InstanceNorm(_ChannelNorm):
    """Each channel of each sample by its own mean and variance."""

    def __init__(self, rank: int, kind: Callable[..., nn.Module]) -> None:
        self._rank, self._kind = rank, kind

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        shape = super().shape(node, inputs, tensors)
        if len(shape) != self._rank + 2 or math.prod(shape[2:]) < 2:
            raise ModelError(f"{node.op}: a value of shape {shape} has nothing to normalize over")
        return shape

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return F.instance_norm(x[0], weight=tensors[0], bias=tensors[1], eps=a["eps"])

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        if shapes[0] is None or shapes[1] is None:
            return None
        return self._kind(shapes[0][0], eps=a["eps"], affine=True, device="meta")


class BatchNorm(_ChannelNorm):
    """Each channel by its running mean and variance: it turns a dead channel into a constant."""

    def __init__(self, ranks: tuple[int, ...], kind: Callable[..., nn.Module]) -> None:
        self._ranks, self._kind = ranks, kind

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        shape = super().shape(node, inputs, tensors)
        if len(shape) not in self._ranks:
            raise ModelError(f"{node.op} can't be applied to a value of shape {shape}")
        return shape

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        weight, bias, mean, variance = tensors
        try:
            return F.batch_norm(x[0], mean, variance, weight, bias, eps=a["eps"])
        except ValueError as error:  # some versions of torch refuse an eps of 0
            raise ModelError(f"batch_norm: {error}; another version of torch may compute it") from error

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        if (shapes[0] is None) != (shapes[1] is None) or shapes[2] is None or not a["eps"]:
            return None
        return self._kind(shapes[2][0], eps=a["eps"], affine=shapes[0] is not None, device="meta")

    def constants(self, site: Site) -> np.ndarray:
        weight, bias, mean, variance = (
            None if tensor is None else tensor.values.astype(np.float64) for tensor in site.tensors
        )
        if mean is None or variance is None:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        channels = along(site.inputs[0].constants, 1, site.output.shape[1])
        scale = (1.0 if weight is None else weight) / np.sqrt(variance + float(site.node.attributes["eps"]))  # type: ignore[arg-type]
        offset = np.zeros_like(mean) if bias is None else bias
        result = np.where(scale == 0, offset, (channels - mean) * scale + offset)
        return self._channels(site, np.where(np.isfinite(scale), result, UNKNOWN))


class GroupNorm(_ChannelNorm):
    """Groups of channels by their common mean and variance; a group leaves as a whole."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        shape, groups = super().shape(node, inputs, tensors), node.attributes["groups"]
        if not isinstance(groups, int) or groups < 1 or shape[1] % groups:
            raise ModelError(f"group_norm: {shape[1]} channels can't form {groups} groups")
        if math.prod((shape[1] // groups, *shape[2:])) < 2:  # torch refuses that too, for a batch of one
            raise ModelError(f"group_norm: {groups} groups of a value of shape {shape} have nothing to normalize over")
        return shape

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return F.group_norm(x[0], a["groups"], tensors[0], tensors[1], a["eps"])

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        if shapes[0] is None or shapes[1] is None:
            return None
        return nn.GroupNorm(a["groups"], shapes[0][0], eps=a["eps"], device="meta")

    def couple(self, site: Site, atoms: Atoms) -> None:
        super().couple(site, atoms)
        groups = int(site.node.attributes["groups"])  # type: ignore[arg-type]
        couple_groups(site.inputs[0].coordinates[1], site.output.coordinates[1], groups, atoms)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        groups = int(site.node.attributes["groups"])  # type: ignore[arg-type]
        return {"groups": count(site.output.coordinates[1][:: site.output.shape[1] // groups])}


class LayerNorm(Rule):
    """The last dimensions by their common mean and variance: all of their coordinates stay."""

    optional = ("weight", "bias")
    floating = True

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """All of the shape that is normalized."""
        _check_eps(node)
        normalized = ints(node, "shape")
        if not normalized or min(normalized) < 1 or any(each not in (None, normalized) for each in tensors):
            raise ModelError(f"{node.op}: tensors of shapes {tuple(tensors)} don't fit {normalized}")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), normalized = inputs, ints(node, "shape")
        if shape[-len(normalized) :] != normalized:
            raise ModelError(f"{node.op} over {normalized} can't be applied to a value of shape {shape}")
        return shape

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return F.layer_norm(x[0], a["shape"], tensors[0], tensors[1], a["eps"])

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        if shapes[0] is None:
            return None
        return nn.LayerNorm(a["shape"], eps=a["eps"], bias=shapes[1] is not None, device="meta")

    def couple(self, site: Site, atoms: Atoms) -> None:
        before, after = site.inputs[0].coordinates, site.output.coordinates
        normalized = len(ints(site.node, "shape"))
        for one, other in zip(before, after, strict=True):
            atoms.join(one, other)
        atoms.pin(*after[-normalized:])
        for tensor in site.tensors:
            if tensor is not None:
                atoms.pin(*tensor.coordinates)

    def constants(self, site: Site) -> np.ndarray:
        """An element whose weight is zero is its bias."""
        weight, bias = site.tensors[0], site.tensors[1] if len(site.tensors) > 1 else None
        rank = len(site.output.shape)
        if weight is None:
            return np.full((1,) * rank, UNKNOWN)
        offset = 0.0 if bias is None else bias.values.astype(np.float64)
        constants = np.where(weight.values == 0, offset, UNKNOWN)
        return constants.reshape((1,) * (rank - constants.ndim) + constants.shape)


class RMSNorm(LayerNorm):
    """The same by the root mean square alone."""

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return F.rms_norm(x[0], a["shape"], tensors[0], a["eps"])

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        return None if shapes[0] is None else nn.RMSNorm(a["shape"], eps=a["eps"], device="meta")


OPERATORS: dict[str, Rule] = {
    "batch_norm1d": BatchNorm((2, 3), nn.BatchNorm1d),
    "batch_norm2d": BatchNorm((4,), nn.BatchNorm2d),
    "batch_norm3d": BatchNorm((5,), nn.BatchNorm3d),
    "instance_norm1d": InstanceNorm(1, nn.InstanceNorm1d),
    "instance_norm2d": InstanceNorm(2, nn.InstanceNorm2d),
    "instance_norm3d": InstanceNorm(3, nn.InstanceNorm3d),
    "group_norm": GroupNorm(),
    "layer_norm": LayerNorm(),
    "rms_norm": RMSNorm(),
}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_batch_norm(lowering: Lowering, call: Call) -> int:
    if call["running_mean"] is None or (call.get("training")):
        raise call.unsupported("without running statistics")
    roles = ("weight", "bias", "running_mean", "running_var")
    dims = max(1, rank_of(call.source) - 2)
    if dims > 3:
        raise call.unsupported(f"over {dims} dimensions")
    tensors = [lowering.tensor(call[role]) for role in roles]
    return lowering.emit(f"batch_norm{dims}d", [lowering.value(call.source)], tensors, eps=call["eps"])


def _lower_batch_norm_of_three(lowering: Lowering, call: Call) -> Lowered:
    return (_lower_batch_norm(lowering, call),)


def _lower_instance_norm(lowering: Lowering, call: Call) -> int:
    if not call["use_input_stats"]:
        return _lower_batch_norm(lowering, call)
    dims = rank_of(call.source) - 2
    if dims not in (1, 2, 3):
        raise call.unsupported(f"over {dims} dimensions")
    tensors = [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])]
    return lowering.emit(f"instance_norm{dims}d", [lowering.value(call.source)], tensors, eps=call["eps"])


def _lower_layer_norm(lowering: Lowering, call: Call) -> int:
    tensors = [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])]
    shape = tuple(call["normalized_shape"])
    return lowering.emit("layer_norm", [lowering.value(call.source)], tensors, eps=call["eps"], shape=shape)


def _lower_layer_norm_of_three(lowering: Lowering, call: Call) -> Lowered:
    return (_lower_layer_norm(lowering, call),)


def _lower_rms_norm(lowering: Lowering, call: Call) -> int:
    eps = torch.finfo(call.source.meta["val"].dtype).eps if call["eps"] is None else float(call["eps"])
    shape = tuple(call["normalized_shape"])
    return lowering.emit(
        "rms_norm", [lowering.value(call.source)], [lowering.tensor(call["weight"])], shape=shape, eps=eps
    )


def _lower_group_norm(lowering: Lowering, call: Call) -> int:
    tensors = [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])]
    return lowering.emit(
        "group_norm", [lowering.value(call.source)], tensors, eps=call["eps"], groups=call["num_groups"]
    )


ATEN: dict[str, Lower] = {
    "batch_norm": _lower_batch_norm,
    "_native_batch_norm_legit_no_training": _lower_batch_norm_of_three,
    "instance_norm": _lower_instance_norm,
    "layer_norm": _lower_layer_norm,
    "native_layer_norm": _lower_layer_norm_of_three,
    "rms_norm": _lower_rms_norm,
    "group_norm": _lower_group_norm,
}
