"""To variational layers and back: a stock layer changes its class in place, its tensors stay the very same objects."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from bayeszip.errors import ModelError
from bayeszip.variational.compaction import expand
from bayeszip.variational.layers import ROLES, VARIATIONAL_OF_STOCK, VariationalLayer

__all__ = ["Conversion", "check_materialized", "to_stock", "to_variational"]

_STOCK_OF_VARIATIONAL = {variational: stock for stock, variational in VARIATIONAL_OF_STOCK.items()}

#: The square of a weight must be finite in float32.
LARGEST = torch.finfo(torch.float32).max ** 0.5

#: log σ² at the start (table 3).
START_LOG_SIGMA2 = -10.0


@dataclass(frozen=True)
class Conversion:
    """What `to_variational` did.

    Args:
        converted: the layers it made Gaussian.
        kept: those with parameters that it left as they are, and why: their type, or that they are frozen.
    """

    converted: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]


def to_variational(module: nn.Module, *, log_sigma2: float = START_LOG_SIGMA2, biases: bool = True) -> Conversion:
    """Turn the layers of `module` that have a variational form into it, in place.

    Tied weights stay tied and share one log σ². Subclasses and layers whose weight is computed (parametrized, or by
    a hook) are not touched: what they do is not known here. Neither are layers whose weight is frozen
    (`requires_grad=False`): they are neither trained nor pruned nor quantized; a bias that is frozen stays as it is by
    itself. Where all of a network is frozen, as for inference, that says nothing about what should stay, and it is
    unfrozen.

    Args:
        log_sigma2: the starting value of log σ².
        biases: give biases a posterior as well.

    Raises:
        ModelError: no layer can be converted, or a weight is not a finite float tensor.
    """
    check_materialized(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        module.requires_grad_(True)
    stock = [(path, layer) for path, layer in module.named_modules() if _is_stock(layer) and not _is_frozen(layer)]
    if not stock:
        known = ", ".join(kind.__name__ for kind in VARIATIONAL_OF_STOCK)
        raise ModelError(
            f"{type(module).__name__} has no layer that can be compressed; these can: {known}, unless they are frozen"
        )
    for path, layer in stock:
        _check_weights(path, layer)
    variance_of: dict[int, nn.Parameter] = {}
    for _, layer in stock:
        layer.__class__ = VARIATIONAL_OF_STOCK[type(layer)]
        if not isinstance(layer, VariationalLayer):  # never: tells the type checker what the table guarantees
            raise TypeError(type(layer))
        layer.start_posterior(log_sigma2, biases)
        _tie_variances(layer, variance_of)
    return Conversion(tuple(path for path, _ in stock), tuple(_kept_layers(module)))


def to_stock(module: nn.Module) -> nn.Module:
    """Turn variational layers back into stock ones, in place: w = θ. Returns `module`."""
    expand(module)
    for layer in module.modules():
        if isinstance(layer, VariationalLayer):
            layer.end_posterior()
            layer.__class__ = _STOCK_OF_VARIATIONAL[type(layer)]  # type: ignore[assignment]
    return module


def _is_stock(layer: nn.Module) -> bool:
    return type(layer) in VARIATIONAL_OF_STOCK and layer._parameters.get("weight") is not None


def _is_frozen(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and not weight.requires_grad


def _tie_variances(layer: VariationalLayer, variance_of: dict[int, nn.Parameter]) -> None:
    for role in ROLES:
        log_sigma2 = getattr(layer, f"{role}_log_sigma2")
        if log_sigma2 is not None:
            shared = variance_of.setdefault(id(getattr(layer, role)), log_sigma2)
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


def _kept_layers(module: nn.Module) -> Iterator[tuple[str, str]]:
    for path, layer in module.named_modules():
        parameters = dict(layer.named_parameters(recurse=False))
        if isinstance(layer, VariationalLayer):
            if layer.bias is not None and not layer.bias.requires_grad:
                yield f"{path}.bias".removeprefix("."), "frozen"
        elif parameters:
            frozen = not any(parameter.requires_grad for parameter in parameters.values())
            yield path, f"{type(layer).__name__}, frozen" if frozen else type(layer).__name__
