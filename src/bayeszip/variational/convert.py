"""To variational layers and back: a stock layer changes its class in place, its tensors stay the very same objects."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bayeszip.errors import ModelError
from bayeszip.modes import unfreeze
from bayeszip.variational.compaction import expand
from bayeszip.variational.kinds import LOCAL, form_of, roles_of
from bayeszip.variational.layers import VariationalLayer
from bayeszip.variational.selection import Selection

__all__ = ["Conversion", "check_materialized", "to_stock", "to_variational"]

#: The square of a weight must be finite in float32.
LARGEST = torch.finfo(torch.float32).max ** 0.5

#: log σ² at the start (table 3).
START_LOG_SIGMA2 = -10.0


@dataclass(frozen=True)
class Conversion:
    """What `to_variational` did.

    Args:
        converted: the layers it made Gaussian.
        kept: those with parameters that it left as they are, and why: their type, that they are frozen, or excluded.
        gaussian: the parameters that have a posterior, by name.
    """

    converted: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    gaussian: tuple[str, ...] = ()


def to_variational(
    module: nn.Module,
    *,
    log_sigma2: float = START_LOG_SIGMA2,
    biases: bool = True,
    selection: Selection | None = None,
    called: Container[str] | None = None,
) -> Conversion:
    """Turn the layers of `module` that have a variational form into it, in place; `kinds` says which have.

    Tied weights stay tied and share one log σ². Layers whose weight is computed (parametrized, or by a hook) are not
    touched: what they do is not known here. Neither are layers whose weight is frozen (`requires_grad=False`): they
    are neither trained nor pruned nor quantized; a bias that is frozen stays as it is by itself. Where all of a network
    is frozen, as for inference, that says nothing about what should stay, and it is unfrozen.

    Args:
        log_sigma2: the starting value of log σ².
        biases: give biases a posterior as well.
        selection: which tensors to take, and how strongly each is to be pruned; by default all alike.
        called: the layers that the network is known to use by calling them alone; others sample their weights for
            whoever reads them. None: it is not known, and all are taken to be called.

    Raises:
        ModelError: no layer can be converted, a weight is not a finite float tensor, or a pattern names nothing.
    """
    check_materialized(module)
    if any(isinstance(layer, VariationalLayer) for layer in module.modules()):
        raise ModelError(
            f"{type(module).__name__} has Gaussian weights already, from a Compressor before this one; build it anew, "
            "or go on with that one"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        unfreeze(module)
    chosen, kept = _chosen(module, selection or Selection(), biases)
    if not chosen:
        known = ", ".join(kind.__name__ for kind in LOCAL if not isinstance(kind, str))
        raise ModelError(
            f"{type(module).__name__} has no layer that can be compressed; these can: {known}, and whatever else holds "
            f"matrices, unless they are frozen{' or excluded' if selection else ''}"
        )
    parts = dict(module.named_modules())
    for path in chosen:
        _check_weights(path, parts[path])
    variance_of: dict[int, nn.Parameter] = {}
    for path, strengths in chosen.items():
        layer = parts[path]
        layer.__class__ = form_of(layer, called=called is None or path in called)
        if not isinstance(layer, VariationalLayer):  # never: tells the type checker what the table guarantees
            raise TypeError(type(layer))
        layer.start_posterior(log_sigma2, strengths)
        _tie_variances(layer, variance_of)
    gaussian = tuple(_joined(path, role) for path, strengths in chosen.items() for role in strengths)
    return Conversion(tuple(chosen), kept, gaussian)


def to_stock(module: nn.Module) -> nn.Module:
    """Turn variational layers back into stock ones, in place: w = θ. Returns `module`."""
    expand(module)
    for layer in module.modules():
        if isinstance(layer, VariationalLayer):
            layer.end_posterior()
            layer.__class__ = layer.stock  # type: ignore[assignment]
    return module


def _chosen(
    module: nn.Module, selection: Selection, biases: bool
) -> tuple[dict[str, Mapping[str, float]], tuple[tuple[str, str], ...]]:
    """The strengths of what is to be Gaussian, by layer and role; and what is kept, with the reason."""
    named = list(module.named_parameters(remove_duplicate=False))
    strength_of = selection.among([name for name, _ in named])
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    strengths = {key: strength_of(*own) for key, own in names.items()}
    chosen: dict[str, Mapping[str, float]] = {}
    kept: list[tuple[str, str]] = []
    for path, layer in module.named_modules():
        reasons = dict(_reasons(layer, biases, strengths))
        taken = {role: strength for role in reasons if isinstance(strength := reasons[role], float)}
        if any(_is_weight(layer, role) for role in taken):
            chosen[path] = taken
            kept += [(_joined(path, role), why) for role, why in reasons.items() if isinstance(why, str) and why]
        elif reasons:
            why = next((why for why in reasons.values() if isinstance(why, str) and why), "")
            kept.append((path, f"{type(layer).__name__}, {why}" if why else type(layer).__name__))
    return chosen, tuple(kept)


def _reasons(
    layer: nn.Module, biases: bool, strengths: Mapping[int, float | None]
) -> Iterator[tuple[str, float | str]]:
    """For each of a layer's parameters its strength, or why it is to stay as it is: nothing, where that is no news.

    Args:
        strengths: by the identity of parameters, since one that is tied has several names.
    """
    roles = roles_of(layer)
    for role, parameter in layer.named_parameters(recurse=False):
        strength = strengths[id(parameter)]
        if not parameter.requires_grad:
            yield role, "frozen"
        elif role not in roles or (not biases and not _is_weight(layer, role)):
            yield role, ""
        elif strength is None:
            yield role, "excluded"
        else:
            yield role, strength


def _is_weight(layer: nn.Module, role: str) -> bool:
    """Whether a layer's parameter is what makes it worth converting; others are biases."""
    parameter = layer._parameters[role]
    return role == "weight" or ("bias" not in role and parameter is not None and parameter.dim() > 1)


def _joined(path: str, role: str) -> str:
    return f"{path}.{role}" if path else role


def _tie_variances(layer: VariationalLayer, variance_of: dict[int, nn.Parameter]) -> None:
    for role in layer.roles:
        log_sigma2 = layer._parameters[f"{role}_log_sigma2"]
        if log_sigma2 is not None:
            shared = variance_of.setdefault(id(layer._parameters[role]), log_sigma2)
            setattr(layer, f"{role}_log_sigma2", shared)


def check_materialized(module: nn.Module) -> None:
    """Refuse a network whose parameters have no values: lazy layers that saw no data, tensors on `meta`."""
    for name, tensor in module.named_parameters():
        if isinstance(tensor, nn.parameter.UninitializedParameter) or tensor.is_meta:
            raise ModelError(f"{name} has no values yet; run the network once, or load weights, before compressing")


def _check_weights(path: str, layer: nn.Module) -> None:
    for name, tensor in layer.named_parameters(prefix=path, recurse=False):
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise ModelError(
                f"{name} is a {tensor.layout} {tensor.dtype} tensor; only dense real ones can be compressed"
            )
        bad = int((~torch.isfinite(tensor.detach())).sum())
        if bad:
            raise ModelError(f"{name} holds {bad} values that are NaN or infinite; repair or retrain the network first")
        largest = tensor.detach().abs().max().item() if tensor.numel() else 0.0
        if largest > LARGEST:
            raise ModelError(f"{name} holds values up to {largest:.1e}, whose squares are infinite; scale them down")
