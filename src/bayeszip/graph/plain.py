"""Networks as plain layers that hold their own tensors: without wrappers, norms of weights, masks over them."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from bayeszip.errors import ModelError
from bayeszip.graph.state import check_tensor

__all__ = ["computed_tensors", "copied", "make_plain", "plain_copy", "unwrapped", "unwrapped_names"]

#: What a wrapper puts in front of every name: data-parallel ones, torch.compile.
_PREFIXES = ("module.", "_orig_mod.")


def unwrapped(module: nn.Module) -> nn.Module:
    """The network that data-parallel training or `torch.compile` was wrapped around.

    Raises:
        ModelError: it is no network, or one that TorchScript has made into a program.
    """
    if not isinstance(module, nn.Module):
        said = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise ModelError(f"a network is a torch.nn.Module, not {said}; give the network itself")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = f"the part {name}" if name else "this network"
            raise ModelError(f"torch.jit has scripted or traced {which}, which hides its layers; give the one before")
    while True:
        if isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        elif isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
            module = inner
        else:
            return module


def unwrapped_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without what a wrapper put in front of all its names.

    Raises:
        ModelError: a name is no text, or what it names is no tensor that a file can hold.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ModelError(f"tensors are named by text, not {name!r}")
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{name} is a {type(tensor).__name__}, not a tensor: leave it out")
        check_tensor(tensor, name)
    names = list(tensors)
    while names and (prefix := next((each for each in _PREFIXES if all(n.startswith(each) for n in names)), None)):
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, tensors.values(), strict=True))


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a network, unwrapped, in eval mode, on the CPU, of plain layers. The network is left as it was.

    Raises:
        ModelError: it can't be copied, or has a tensor that a file can't hold.
    """
    module = unwrapped(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_tensor(tensor, name)
    for name, held in module.state_dict().items():
        # What else a module wants to keep is its own affair; weights that are packed away are not.
        if not isinstance(held, Tensor) and not name.endswith("_extra_state"):
            raise ModelError(
                f"{name} holds its weights as a {type(held).__name__}, not as a tensor: the network is quantized "
                "already. Give the one in floating point"
            )
    plain = copied(module).cpu().eval()
    for part in list(plain.modules()):
        make_plain(part)
    return plain


def copied(module: nn.Module) -> nn.Module:
    """A copy of a network as it is, in whatever state its last call left it.

    A layer may keep what it computed beside its parameters: a feature, an attention, in lists too. With gradients torch
    refuses to copy these, so that the copy gets what they are without.

    Raises:
        ModelError: it can't be copied.
    """
    kept: dict[int, Any] = {
        id(each): each.detach().clone() for part in module.modules() for each in _computed(vars(part))
    }
    try:
        return copy.deepcopy(module, kept)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"{type(module).__name__} can't be copied: {str(error).splitlines()[0]}") from error


def _computed(held: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors with a history that are held, in containers within containers too."""
    open_, seen = [*held.values()], set[int]()
    while open_:
        value = open_.pop()
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            open_.extend(value.values() if isinstance(value, Mapping) else value)


def computed_tensors(layer: nn.Module) -> list[str]:
    """The names of a layer's tensors that are computed from others: by parametrizations, or by hooks of torch's own."""
    names = list(layer.parametrizations) if parametrize.is_parametrized(layer) else []  # type: ignore[arg-type]
    return names + [name for hook in layer._forward_pre_hooks.values() if (name := _name_of(hook)) is not None]


@torch.no_grad()
def make_plain(layer: nn.Module) -> None:
    """Let a layer hold the values of its computed tensors as parameters of its own, in place of what they come from."""
    for hook in list(layer._forward_pre_hooks.values()):
        name = _name_of(hook)
        if name is not None:
            remove = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}.get(type(hook), prune.remove)
            remove(layer, name)
    if not parametrize.is_parametrized(layer):
        return
    values = {name: getattr(layer, name).detach().clone() for name in computed_tensors(layer)}
    # Not `remove_parametrizations`: it would change the class, which the original of a copy shares.
    layer.__class__ = type(layer).__bases__[0]
    del layer._modules["parametrizations"]
    others = dict(layer._parameters)
    layer._parameters.clear()
    for name, value in (*values.items(), *others.items()):
        setattr(layer, name, nn.Parameter(value) if name in values and value.is_floating_point() else value)


def _name_of(hook: object) -> str | None:
    """The tensor that one of torch's own hooks computes."""
    if isinstance(hook, WeightNorm | SpectralNorm):
        return hook.name
    return hook._tensor_name if isinstance(hook, prune.BasePruningMethod) else None
