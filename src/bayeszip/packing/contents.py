"""What there is to pack: the tensors of a network, each as what it is to be treated as."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayeszip import graph
from bayeszip.quantize import Precision, cluster
from bayeszip.tensors import QuantizedTensor

__all__ = ["CLUSTERS", "Contents", "clustered", "contents_of", "is_matrix", "is_statistic"]

#: Shared values, besides 0, of a matrix that nothing says more of: that was not trained to share any, or of a network
#: whose error can't be told.
CLUSTERS = 64

#: Types of 16 bits: shared values are ones that they can hold, so that loading a tensor in its own type moves none.
_SHORT: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

#: Shorter vectors are not worth a grid of their own.
SHORTEST = 8


@dataclass(frozen=True)
class Contents:
    """Tensors by name, in float32.

    Args:
        matrices: weight matrices and kernels.
        biases: vectors added to what a matrix makes of its input.
        matrix_of: for each bias that matrix.
        vectors: other vectors: of norms, slopes, factors. They are rounded in proportion to themselves.
        precisions: of those that have 16 bits.
    """

    matrices: Mapping[str, np.ndarray]
    biases: Mapping[str, np.ndarray]
    matrix_of: Mapping[str, str]
    vectors: Mapping[str, np.ndarray]
    precisions: Mapping[str, Precision]

    def size(self) -> float:
        """The sum of the squares of all matrices."""
        with np.errstate(over="ignore"):
            return sum(float(np.square(array.astype(np.float64)).sum()) for array in self.matrices.values())

    def moved(self, tensors: Mapping[str, np.ndarray]) -> float:
        """How far these tensors are from the matrices, as a share of the matrices' size; root mean squares of both."""
        size = self.size()
        with np.errstate(over="ignore"):
            distance = sum(
                float(np.square(tensors[name] - array.astype(np.float64)).sum())
                for name, array in self.matrices.items()
            )
        return float(np.sqrt(distance / size)) if 0 < size < np.inf else 0.0


def contents_of(tensors: Mapping[str, Tensor], kept: Collection[str] = ()) -> Contents:
    """Sorts tensors by their form and names; the vectors named in `kept` are left out, to be kept bit for bit."""
    matrices = {name: _values(tensor) for name, tensor in tensors.items() if is_matrix(tensor)}
    vectors = {
        name: _values(tensor) for name, tensor in tensors.items() if name not in kept and _is_vector(name, tensor)
    }
    matrix_of = {name: _matrix_name(name) for name in vectors if _matrix_name(name) in matrices}
    return Contents(
        matrices,
        {name: vectors[name] for name in matrix_of},
        matrix_of,
        {name: array for name, array in vectors.items() if name not in matrix_of and array.size >= SHORTEST},
        {name: _SHORT[tensors[name].dtype] for name in (*matrices, *vectors) if tensors[name].dtype in _SHORT},
    )


def clustered(tensors: Mapping[str, Tensor], components: int = CLUSTERS) -> dict[str, QuantizedTensor]:
    """The matrices among the tensors, by at most so many shared values of their own besides 0."""
    return {
        name: cluster(_values(tensor), components, _SHORT.get(tensor.dtype))
        for name, tensor in tensors.items()
        if is_matrix(tensor)
    }


def _matrix_name(bias: str) -> str:
    """fc.bias belongs to fc.weight, bias_ih_l0 to weight_ih_l0, in_proj_bias to in_proj_weight."""
    head, dot, tail = bias.rpartition(".")
    return head + dot + tail.replace("bias", "weight") if "bias" in tail else ""


def _values(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def is_matrix(tensor: Tensor) -> bool:
    """Whether it has two dimensions or more, and values that a codebook can hold."""
    floating = tensor.dtype in graph.FLOATING.values() and tensor.dim() >= 2 and tensor.numel() > 1
    if not floating or tensor.is_meta or tensor.layout != torch.strided:
        return False
    return bool(torch.isfinite(tensor.float()).all()) and _is_told_apart(tensor)


def _is_told_apart(tensor: Tensor) -> bool:
    """Whether float32 has its values: a float64 tensor where they lie closer together than that is kept as it is."""
    return bool((tensor.float() - tensor).abs().max() <= 1e-3 * (tensor.max() - tensor.min()))


def is_statistic(name: str) -> bool:
    """Whether a norm keeps it of what it has seen."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _is_vector(name: str, tensor: Tensor) -> bool:
    """Whether it may be rounded: what is not called as parameters of layers are (frequencies, for one) may not."""
    tail = name.rpartition(".")[2]
    if not (tail == "weight" or "bias" in tail or is_statistic(name)):
        return False
    # Two bytes an element are soon less than a grid.
    fewest = SHORTEST if tensor.dtype in _SHORT else 2
    plain = tensor.dtype in graph.FLOATING.values() and tensor.dim() == 1 and tensor.numel() >= fewest
    return plain and not tensor.is_meta and tensor.layout == torch.strided and _has_room(tensor)


def _has_room(tensor: Tensor) -> bool:
    """Whether a grid near its values lies in its own type, and in float32."""
    if tensor.dtype == torch.float32:
        return bool(torch.isfinite(tensor).all())
    sizes, float32 = tensor.double().abs(), torch.finfo(torch.float32)
    least = float32.smallest_normal if tensor.dtype == torch.float64 else 0.0
    most = min(torch.finfo(tensor.dtype).max, float32.max) / 2
    even = bool((tensor == tensor[0]).all())
    return bool(((sizes <= most) & ((sizes >= least) | (sizes == 0))).all()) and (even or _is_told_apart(tensor))
