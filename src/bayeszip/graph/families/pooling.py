"""Pools and interpolation: channels pass through, space changes."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
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
    elements,
    ints,
)
from bayeszip.graph.lowering import Call, Lower, Lowered, Lowering, rank_of, repeated, shape_of
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS"]

#: Windows, strides and dilations are smaller than this: torch computes with them in 32 bits here and there.
_LARGEST = 2**31


class _Spatial(Rule):
    """Channels, dimension 1, pass through; what comes behind is space and stays."""

    floating = True

    def couple(self, site: Site, atoms: Atoms) -> None:
        before, after = site.inputs[0].coordinates, site.output.coordinates
        atoms.pin(before[0], after[0], *before[2:], *after[2:])
        atoms.join(before[1], after[1])

    def constants(self, site: Site) -> np.ndarray:
        """The constant of each channel, NaN where it isn't the same all over."""
        channels = along(site.inputs[0].constants, 1, site.output.shape[1])
        return channels.reshape(1, -1, *(1,) * (len(site.output.shape) - 2))


class AdaptivePool(_Spatial):
    """An output of a given size."""

    def __init__(self, rank: int, function: Callable[..., torch.Tensor]) -> None:
        self._rank, self._function = rank, function

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return _resized(node, inputs[0], ints(node, "output_size"), (self._rank,))

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return self._function(x[0], a["output_size"])


class Interpolation(_Spatial):
    """An output of a given size, each element a mean of others whose weights sum to one."""

    _ranks: ClassVar[dict[str, tuple[int, ...]]] = {
        "nearest": (1, 2, 3), "nearest-exact": (1, 2, 3), "linear": (1,), "bilinear": (2,), "bicubic": (2,),
        "trilinear": (3,),
    }  # fmt: skip

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return _resized(node, inputs[0], ints(node, "size"), self._ranks[str(node.attributes["mode"])])

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        corners = None if a["mode"].startswith("nearest") else a["align_corners"]
        return F.interpolate(x[0], size=a["size"], mode=a["mode"], align_corners=corners)


def _resized(node: Node, shape: Shape, sizes: Shape, ranks: Sequence[int]) -> Shape:
    if len(shape) != len(sizes) + 2 or len(sizes) not in ranks or min(sizes) < 1 or min(shape[1:]) < 1:
        raise ModelError(f"{node.op} can't bring a value of shape {shape} to {sizes}")
    return (*shape[:2], *sizes)


class _Pool(_Spatial):
    def __init__(self, rank: int, function: Callable[..., torch.Tensor]) -> None:
        self._rank, self._function = rank, function

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        kernel, padding = ints(node, "kernel_size"), ints(node, "padding")
        if len(kernel) != self._rank or any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
            raise ModelError(f"{node.op}: a padding of {padding} is more than half of the window {kernel}")

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        return elements(output) * elements(inputs[0][2:])  # a window may be as large as its input

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,) = inputs
        if len(shape) != self._rank + 2 or min(shape[1:]) < 1:
            raise ModelError(f"{node.op} takes {self._rank + 2} dimensions, not a value of shape {shape}")
        dilation = ints(node, "dilation") if "dilation" in node.attributes else (1,) * self._rank
        per_dim = zip(
            shape[2:], ints(node, "kernel_size"), ints(node, "stride"), ints(node, "padding"), dilation, strict=True
        )
        sizes = [_pooled(*each, ceil=bool(node.attributes["ceil_mode"])) for each in per_dim]
        if min(sizes) < 1:
            raise ModelError(f"{node.op}: the window is larger than its input of shape {shape}")
        return (*shape[:2], *sizes)


class MaxPool(_Pool):
    """The maximum over windows; padding never wins."""

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        settings = (a["kernel_size"], a["stride"], a["padding"], a["dilation"])
        return self._function(x[0], *settings, ceil_mode=a["ceil_mode"])


class AveragePool(_Pool):
    """The mean over windows; padding counts as zeros unless it is told not to."""

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        settings = (a["kernel_size"], a["stride"], a["padding"], a["ceil_mode"], a["count_include_pad"])
        return self._function(x[0], *settings)

    def constants(self, site: Site) -> np.ndarray:
        channels = super().constants(site)
        if not any(ints(site.node, "padding")):
            return channels
        return np.where(channels == 0.0, 0.0, UNKNOWN)


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool) -> int:
    """The size of a pool's output, as torch computes it: a window may not start in the padding on the right."""
    if min(kernel, stride, dilation) < 1 or padding < 0 or max(kernel, stride, dilation) >= _LARGEST:
        raise ModelError("a pool's kernel, stride and dilation must be at least 1, its padding at least 0")
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1
    return count


_MAXIMA = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_MEANS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_ADAPTIVE_MEANS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_ADAPTIVE_MAXIMA = (F.adaptive_max_pool1d, F.adaptive_max_pool2d)

OPERATORS: dict[str, Rule] = {
    **{f"max_pool{rank}d": MaxPool(rank, function) for rank, function in enumerate(_MAXIMA, 1)},
    **{f"avg_pool{rank}d": AveragePool(rank, function) for rank, function in enumerate(_MEANS, 1)},
    **{f"adaptive_avg_pool{rank}d": AdaptivePool(rank, function) for rank, function in enumerate(_ADAPTIVE_MEANS, 1)},
    **{f"adaptive_max_pool{rank}d": AdaptivePool(rank, function) for rank, function in enumerate(_ADAPTIVE_MAXIMA, 1)},
    "interpolate": Interpolation(),
}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_pool(op: str, dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call.source) != dims + 2:
            raise call.unsupported("without a batch dimension")
        kernel = repeated(call["kernel_size"], dims)
        attributes: dict[str, AttributeValue] = {
            "kernel_size": kernel,
            "stride": repeated(call["stride"], dims) if call["stride"] else kernel,
            "padding": repeated(call["padding"], dims),
            "ceil_mode": bool(call["ceil_mode"]),
        }
        if "count_include_pad" in call:
            attributes["count_include_pad"] = bool(call["count_include_pad"])
            if "divisor_override" in call and call["divisor_override"] is not None:
                raise call.unsupported("with divisor_override")
        else:
            attributes["dilation"] = repeated(call["dilation"], dims)
        return lowering.emit(op, [lowering.value(call.source)], (), **attributes)

    return lower


def _lower_first(lower: Lower) -> Lower:
    """The same where ATen returns several results of which we know the first."""

    def lowered(lowering: Lowering, call: Call) -> Lowered:
        result = lower(lowering, call)
        return (result,) if isinstance(result, int) else result

    return lowered


def _lower_adaptive_pool(op: str, dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call.source) != dims + 2:
            raise call.unsupported("without a batch dimension")
        return lowering.emit(op, [lowering.value(call.source)], output_size=call.shape[2:])

    return lower


def _lower_interpolate(mode: str) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        before, after = shape_of(call.source)[2:], call.shape[2:]
        factors = call.get("scale_factors", None)
        if factors is not None and any(
            size * factor != new for size, factor, new in zip(before, factors, after, strict=True)
        ):
            raise call.unsupported("by a factor that doesn't lead to a whole size")
        corners = bool(call["align_corners"]) if "align_corners" in call else False
        return lowering.emit("interpolate", [lowering.value(call.source)], size=after, mode=mode, align_corners=corners)

    return lower


ATEN: dict[str, Lower] = {
    **{
        f"{kind}_pool{dims}d": _lower_pool(f"{kind}_pool{dims}d", dims) for kind in ("max", "avg") for dims in (1, 2, 3)
    },
    "max_pool2d_with_indices": _lower_first(_lower_pool("max_pool2d", 2)),
    "max_pool3d_with_indices": _lower_first(_lower_pool("max_pool3d", 3)),
    **{f"adaptive_avg_pool{dims}d": _lower_adaptive_pool(f"adaptive_avg_pool{dims}d", dims) for dims in (1, 2, 3)},
    "_adaptive_avg_pool2d": _lower_adaptive_pool("adaptive_avg_pool2d", 2),
    "_adaptive_avg_pool3d": _lower_adaptive_pool("adaptive_avg_pool3d", 3),
    **{
        f"adaptive_max_pool{dims}d": _lower_first(_lower_adaptive_pool(f"adaptive_max_pool{dims}d", dims))
        for dims in (1, 2)
    },
    **{f"upsample_nearest{dims}d": _lower_interpolate("nearest") for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": _lower_interpolate("nearest-exact") for dims in (1, 2, 3)},
    "upsample_linear1d": _lower_interpolate("linear"),
    "upsample_bilinear2d": _lower_interpolate("bilinear"),
    "upsample_bicubic2d": _lower_interpolate("bicubic"),
    "upsample_trilinear3d": _lower_interpolate("trilinear"),
}
