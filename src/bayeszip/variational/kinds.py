"""Which layer takes which variational form: one table, and a rule for all that is not in it.

- A layer of the table, or a subclass of one that computes what its parent does, samples its outputs (`layers`).
- Any other module that holds weights of its own, matrices or more, samples these (`sampled`): recurrent layers and
  their cells, attention, `nn.Bilinear`, tables of positions, subclasses with a forward of their own.
- Norms have no form: they are trained along, folded and rounded. Neither has what can't be sampled: weights that are
  computed from others, scripted modules.
"""

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from bayeszip.variational import layers
from bayeszip.variational.layers import TABLES, VariationalLayer
from bayeszip.variational.sampled import sampled_class

__all__ = ["LOCAL", "form_of", "is_norm", "is_read_elsewhere", "roles_of"]

#: Layers that sample their outputs. A foreign one goes by its name, so that nobody has to have it installed.
LOCAL: dict[type[nn.Module] | str, type[VariationalLayer]] = {
    nn.Linear: layers.VariationalLinear,
    nn.Conv1d: layers.VariationalConv1d,
    nn.Conv2d: layers.VariationalConv2d,
    nn.Conv3d: layers.VariationalConv3d,
    nn.ConvTranspose1d: layers.VariationalConvTranspose1d,
    nn.ConvTranspose2d: layers.VariationalConvTranspose2d,
    nn.ConvTranspose3d: layers.VariationalConvTranspose3d,
    nn.Embedding: layers.VariationalEmbedding,
    "transformers.pytorch_utils.Conv1D": layers.VariationalTransposedLinear,
}

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

#: Their parent multiplies by their weights without calling them.
_READ_BY_PARENT = (NonDynamicallyQuantizableLinear,)

#: Fused inference kernels read the weights of their children, whatever these compute with.
_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)

#: What a subclass must have left alone to compute what its parent does.
_METHODS = ("forward", "__call__", "_conv_forward", "_output_padding")


def is_norm(layer: nn.Module) -> bool:
    """Whether it is a normalization layer, torch's or one that is called so: behind it, scales of weights are free."""
    return isinstance(layer, _NORMS) or type(layer).__name__.endswith("Norm")


def is_read_elsewhere(parent: nn.Module) -> bool:
    """Whether the weights of this module's children are read by other ways than their own forward."""
    return isinstance(parent, _READERS)


def roles_of(layer: nn.Module) -> tuple[str, ...]:
    """The names of a layer's own parameters that could be Gaussian; none if the layer has no variational form.

    Vectors are taken along with a matrix, as its biases; alone they are scales, of which there are few.
    """
    if is_norm(layer) or isinstance(layer, torch.jit.ScriptModule) or _is_computed(layer):
        return ()
    if isinstance(layer, TABLES) and layer.max_norm is not None:
        return ()  # its rows are rescaled whenever they are read
    held = {name: each for name, each in layer._parameters.items() if each is not None}
    if _parent_in_table(type(layer)) is not None:
        return tuple(name for name in ("weight", "bias") if name in held) if "weight" in held else ()
    dense = [name for name, each in held.items() if each.is_floating_point() and each.layout == torch.strided]
    return tuple(dense) if any(_is_matrix(held[name]) for name in dense) else ()


def form_of(layer: nn.Module, *, called: bool) -> type[VariationalLayer]:
    """The class that a layer with `roles_of` it takes.

    Args:
        called: whether it is by calling the layer that its weights are used; else they are sampled for whoever reads
            them.
    """
    kind = type(layer)
    parent = _parent_in_table(kind)
    if parent is None or not called or kind in _READ_BY_PARENT or not _computes_the_same(kind, parent):
        return sampled_class(kind, roles_of(layer), parent is not None and LOCAL[_key(parent)].makes_columns)
    return _local_class(kind, LOCAL[_key(parent)])


#: Classes made so far for subclasses of layers in the table.
_MADE: dict[type, type[VariationalLayer]] = {}


def _local_class(kind: type[nn.Module], form: type[VariationalLayer]) -> type[VariationalLayer]:
    """`kind` in the form of a class that it is, or inherits from."""
    if form.stock is kind:
        return form
    if kind not in _MADE:
        _MADE[kind] = type(f"Variational{kind.__name__}", (form, kind), {})
    return _MADE[kind]


def _parent_in_table(kind: type[nn.Module]) -> type[nn.Module] | None:
    return next((parent for parent in kind.__mro__ if _key(parent) in LOCAL), None)


def _key(kind: type) -> type | str:
    return kind if kind in LOCAL else f"{kind.__module__}.{kind.__qualname__}"


def _computes_the_same(kind: type[nn.Module], parent: type[nn.Module]) -> bool:
    return all(getattr(kind, name, None) is getattr(parent, name, None) for name in _METHODS)


def _is_matrix(tensor: torch.Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) > 1


def _is_computed(layer: nn.Module) -> bool:
    """Whether tensors of the layer are computed from others: by parametrizations, or by hooks of torch's own."""
    if isinstance(layer, parametrize.ParametrizationList) or parametrize.is_parametrized(layer):
        return True
    return any(type(hook).__module__.startswith("torch.nn.utils.") for hook in layer._forward_pre_hooks.values())
