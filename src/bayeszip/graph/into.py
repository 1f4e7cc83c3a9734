"""A compressed model's tensors into the user's own class: `load_into`."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bayeszip.errors import ModelError
from bayeszip.graph.indices import is_index
from bayeszip.graph.liveness import states_inputs
from bayeszip.graph.lowering import CONSTANT
from bayeszip.graph.plain import computed_tensors, make_plain, unwrapped
from bayeszip.graph.proof import alike, outputs_of, random_inputs
from bayeszip.graph.state import to_torch
from bayeszip.graph.to_module import to_module
from bayeszip.tensors import CompressedModel

__all__ = ["load_into"]


def load_into(model: CompressedModel, net: nn.Module, *, check: bool = True) -> nn.Module:
    """Write a model's tensors into `net`, whose layers shrink to the sizes that survived; returns `net`.

    A weight that a layer of `net` computes (by a weight norm, for example) becomes a parameter if the file holds it.
    Tensors of `net` that the model lacks keep their values (what dead-unit removal found unread isn't in the file).

    Args:
        check: run `net` against the model's graph on random inputs, where it has one: a class whose `forward` counts
            on the old sizes would otherwise go wrong silently.

    Raises:
        ModelError: a tensor has no place in `net`, or can't have the shape it has there (both shapes are named);
            or `net` computes something else than the model. `net` may be partly written then.
    """
    owners = dict(unwrapped(net).named_modules())
    for path, owner in owners.items():
        if any(f"{path}.{name}".removeprefix(".") in model.tensors for name in computed_tensors(owner)):
            make_plain(owner)
    owners = dict(unwrapped(net).named_modules())
    places = _places(net)
    for name, tensor in model.tensors.items():
        if is_index(name):
            continue
        path, _, leaf = name.rpartition(".")
        if path not in owners or not isinstance(getattr(owners[path], leaf, None), Tensor):
            if name.startswith(CONSTANT):
                continue  # the class makes it itself
            if _is_new_bias(owners.get(path), leaf):
                weight: Any = owners[path].weight
                owners[path].register_parameter(leaf, nn.Parameter(to_torch(tensor).to(weight.device, weight.dtype)))
                continue
            raise ModelError(
                f"{type(net).__name__} has no tensor {name!r}; it must be the class the file was made from"
            )
        _write(places[id(getattr(owners[path], leaf))], name, to_torch(tensor))
    for module in owners.values():
        _restate(module)
    if check and model.graph is not None and states_inputs(model.graph):
        _check(model, net)
    return net


def _places(net: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """For each tensor all the places it has in a network: a tied one has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in net.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            places.setdefault(id(tensor), []).append((module, leaf))
    return places


def _is_new_bias(owner: nn.Module | None, leaf: str) -> bool:
    """Whether the owner is a layer without a bias, which folding a constant has given one."""
    return owner is not None and leaf == "bias" and "bias" in owner._parameters and owner._parameters["bias"] is None


def _write(places: list[tuple[nn.Module, str]], name: str, value: Tensor) -> None:
    """Put a tensor at all its places, in place of one of the same shape or of a larger one."""
    owner, leaf = places[0]
    old = getattr(owner, leaf)
    value = value.to(device=old.device, dtype=old.dtype)
    if old.shape == value.shape:
        with torch.no_grad():
            old.copy_(value)
        return
    fits = old.ndim == value.ndim and all(new <= was for new, was in zip(value.shape, old.shape, strict=True))
    if not fits or not all(isinstance(each, (*_SIZES, nn.RNNBase)) for each, _ in places):
        raise ModelError(
            f"{name} has shape {tuple(value.shape)} in the file and {tuple(old.shape)} in the {type(owner).__name__} "
            "it is to be loaded into"
        )
    value = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    for each, own_leaf in places:
        setattr(each, own_leaf, value)  # not past the module: recurrent layers need to notice


def _linear_sizes(layer: nn.Module, weight: Tensor) -> dict[str, int]:
    return {"out_features": weight.shape[0], "in_features": weight.shape[1]}


def _convolution_sizes(layer: nn.Module, weight: Tensor) -> dict[str, int]:
    groups = _remaining_groups(layer, weight.shape[0], "out_channels")
    return {"out_channels": weight.shape[0], "in_channels": weight.shape[1] * groups, "groups": groups}


def _transposed_convolution_sizes(layer: nn.Module, weight: Tensor) -> dict[str, int]:
    groups = _remaining_groups(layer, weight.shape[0], "in_channels")
    return {"in_channels": weight.shape[0], "out_channels": weight.shape[1] * groups, "groups": groups}


def _remaining_groups(layer: nn.Module, channels: int, attribute: str) -> int:
    """Groups leave whole: each still has as many channels as before."""
    groups, before = int(layer.groups), int(getattr(layer, attribute))  # type: ignore[arg-type]
    return channels * groups // before if groups > 1 else 1


def _group_norm_sizes(layer: nn.Module, weight: Tensor) -> dict[str, int]:
    groups, before = int(layer.num_groups), int(layer.num_channels)  # type: ignore[arg-type]
    return {"num_channels": weight.shape[0], "num_groups": weight.shape[0] * groups // before}


def _features(layer: nn.Module, weight: Tensor) -> dict[str, int]:
    return {"num_features": weight.shape[0]}


#: Layers that can shrink, and the sizes they state about themselves, by their weight.
_SIZES: dict[type[nn.Module], Callable[[nn.Module, Tensor], dict[str, int]]] = {
    nn.Linear: _linear_sizes,
    nn.Conv1d: _convolution_sizes,
    nn.Conv2d: _convolution_sizes,
    nn.Conv3d: _convolution_sizes,
    nn.ConvTranspose1d: _transposed_convolution_sizes,
    nn.ConvTranspose2d: _transposed_convolution_sizes,
    nn.ConvTranspose3d: _transposed_convolution_sizes,
    nn.BatchNorm1d: _features,
    nn.BatchNorm2d: _features,
    nn.BatchNorm3d: _features,
    nn.InstanceNorm1d: _features,
    nn.InstanceNorm2d: _features,
    nn.InstanceNorm3d: _features,
    nn.GroupNorm: _group_norm_sizes,
    nn.Embedding: lambda layer, weight: {"embedding_dim": weight.shape[1]},
    nn.PReLU: lambda layer, weight: {"num_parameters": weight.shape[0]},
}


def _restate(module: nn.Module) -> None:
    """Let a layer's stated sizes follow its tensors."""
    if isinstance(module, nn.RNNBase):
        _restate_recurrent(module)
    weight = getattr(module, "weight", None)
    if weight is None:
        weight = getattr(module, "running_mean", None)
    for kind, sizes in _SIZES.items():
        if isinstance(module, kind) and isinstance(weight, Tensor):
            for attribute, size in sizes(module, weight).items():
                setattr(module, attribute, size)


def _restate_recurrent(module: nn.RNNBase) -> None:
    """A recurrent module has one number of units for all its layers and directions."""
    directions = 2 if module.bidirectional else 1
    units = {weight.shape[1] for name, weight in module.named_parameters() if name.startswith("weight_hh")}
    between = {
        weight.shape[1]
        for name, weight in module.named_parameters()
        if name.startswith("weight_ih") and not name.startswith("weight_ih_l0")
    }
    if len(units) > 1 or not between <= {each * directions for each in units}:
        raise ModelError(
            f"the layers of a {type(module).__name__} kept {sorted(units)} units, but the module can have only one "
            "number for all: load without into="
        )
    module.hidden_size, module.input_size = units.pop(), int(module.weight_ih_l0.shape[1])  # type: ignore[index]


def _check(model: CompressedModel, net: nn.Module) -> None:
    """Compare with the model's own graph on random inputs, in the precision of `net`."""
    first = next((each for each in net.parameters() if each.is_floating_point()), None)
    dtype = torch.float32 if first is None else first.dtype
    device = torch.device("cpu") if first is None else first.device
    inputs = random_inputs(model, torch.Generator().manual_seed(0))
    inputs = tuple(each.to(device, dtype) if each.is_floating_point() else each.to(device) for each in inputs)
    training = [part for part in net.modules() if part.training]
    net.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = outputs_of(to_module(model, dtype).to(device)(*inputs))
            found = outputs_of(net(*inputs))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{type(net).__name__} doesn't run with the sizes that survived ({str(error).splitlines()[0]}); its "
            "forward may count on the original ones: load without into="
        ) from error
    finally:
        for part in training:
            part.training = True
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    if len(expected) != len(found):
        raise ModelError(f"{type(net).__name__} returns {len(found)} tensors, the file's own graph {len(expected)}")
    if not alike(expected, found, tolerance):
        raise ModelError(
            f"{type(net).__name__} with these tensors computes something else than the file's own graph; its "
            "forward may count on the original sizes: load without into="
        )
