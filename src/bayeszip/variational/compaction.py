"""Work that shrinks as the network does: layers stop computing the rows and columns whose weights are all pruned.

A row (output unit or channel) is dead when all its weights and its bias are pruned, a column (input) when all weights
that read it are. A compacted layer holds live rows × columns, and on a GPU dead ones that fill a block; what it left
out is zero from then on. `expand` puts the zeros back.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bayeszip.variational.distributions import log_alpha
from bayeszip.variational.kinds import is_read_elsewhere
from bayeszip.variational.layers import Live, VariationalLayer

__all__ = ["compact", "expand"]

#: Layers are compacted if at most this share of the weights computed so far would be left: new shapes cost time too.
WORTHWHILE = 0.95

#: What happened to a parameter, for whatever else has its shape, such as an optimizer's state.
Selection = Callable[[Tensor], Tensor]


@torch.no_grad()
def compact(
    module: nn.Module,
    log_alpha_limit: float,
    on_select: Callable[[nn.Parameter, Selection], None],
    *,
    multiple_of: int = 1,
) -> bool:
    """Compact every layer that can be, in place, if that is worth it; again and again as more weights are pruned.

    Args:
        log_alpha_limit: a weight counts as pruned where log α ≥ this.
        on_select: told of each parameter that changed its shape.
        multiple_of: what rows and columns of a layer are to be a multiple of, for hardware that computes in such
            blocks; dead ones fill them up, as far as there are any.

    Returns:
        Whether anything changed.
    """
    kept = [(layer, *_kept(layer, log_alpha_limit, multiple_of)) for layer in _compactable_layers(module)]
    before = sum(layer.weight.numel() for layer, _, _ in kept)
    after = sum(len(rows) * len(columns) * layer.weight[0, 0].numel() for layer, rows, columns in kept)
    if after > WORTHWHILE * before:
        return False
    for layer, rows, columns in kept:
        if (len(rows), len(columns)) != tuple(layer.weight.shape[:2]):
            _compact_layer(layer, rows, columns, on_select)
    return True


def _compact_layer(
    layer: VariationalLayer, rows: Tensor, columns: Tensor, on_select: Callable[[nn.Parameter, Selection], None]
) -> None:
    before = layer.live or _everything(layer)
    layer.live = Live(before.rows[rows], before.columns[columns], before.full_shape)
    for role, parameter in _gaussian(layer):
        select = _block(rows, columns) if role == "weight" else _entries(rows)
        parameter.data, parameter.grad = select(parameter.data), None
        on_select(parameter, select)


def _gaussian(layer: VariationalLayer) -> Iterator[tuple[str, nn.Parameter]]:
    """The means and variances of a layer by their roles. What else a layer of somebody's own holds is not cut."""
    for role in layer.roles:
        for name in (role, f"{role}_log_sigma2"):
            parameter = layer._parameters.get(name)
            if parameter is not None:
                yield role, parameter


@torch.no_grad()
def expand(module: nn.Module) -> None:
    """Give every compacted layer its full shape back; the means are 0 where it was dead, and so is log σ²."""
    for layer in module.modules():
        if not isinstance(layer, VariationalLayer) or layer.live is None:
            continue
        rows, columns, full_shape = layer.live
        for role, parameter in _gaussian(layer):
            is_weight = role == "weight"
            full = parameter.new_zeros(full_shape if is_weight else full_shape[:1])
            full[(rows[:, None], columns) if is_weight else (rows,)] = parameter.data
            parameter.data, parameter.grad = full, None
        layer.live = None


def _compactable_layers(module: nn.Module) -> Iterator[VariationalLayer]:
    """Layers with rows and columns to leave out, and no tensor that another layer holds too, or reads."""
    read = {id(child) for parent in module.modules() if is_read_elsewhere(parent) for child in parent.children()}
    layers = [each for each in module.modules() if isinstance(each, VariationalLayer) and id(each) not in read]
    holders: dict[int, int] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    for layer in layers:
        own = all(holders[id(parameter)] == 1 for parameter in layer.parameters(recurse=False))
        if own and layer._channel_dim is not None and getattr(layer, "groups", 1) == 1:
            yield layer


def _alive(layer: VariationalLayer, limit: float) -> tuple[Tensor, Tensor]:
    """Which rows and columns hold a weight (or, for rows, a bias) that is not pruned."""
    if layer.weight_log_sigma2 is None:  # never: `start_posterior` always gives the weight a variance
        raise TypeError(type(layer))
    weights = (log_alpha(layer.weight, layer.weight_log_sigma2) < limit).flatten(start_dim=1)
    weights = weights.view(layer.weight.shape[0], layer.weight.shape[1], -1).any(dim=2)
    row_alive, column_alive = weights.any(dim=1), weights.any(dim=0)
    if layer.bias is not None:
        variance = layer.bias_log_sigma2
        row_alive |= log_alpha(layer.bias, variance) < limit if variance is not None else layer.bias != 0
    return row_alive, column_alive


def _kept(layer: VariationalLayer, limit: float, multiple_of: int) -> tuple[Tensor, Tensor]:
    """Indices of the rows and columns that it goes on to compute."""
    rows, columns = _alive(layer, limit)
    return _indices(rows, multiple_of), _indices(columns, multiple_of)


def _indices(alive: Tensor, multiple_of: int) -> Tensor:
    """Where it is alive, and where not the first places that make a multiple; at least one place, since a convolution
    without channels is refused."""
    wanted = -(-max(1, int(alive.sum())) // multiple_of) * multiple_of
    # The sort is stable: those alive come first, each part in order.
    first = torch.argsort(alive.int(), descending=True, stable=True)[:wanted]
    return first.sort().values


def _everything(layer: VariationalLayer) -> Live:
    rows, columns = (torch.arange(size, device=layer.weight.device) for size in layer.weight.shape[:2])
    return Live(rows, columns, layer.weight.shape)


def _block(rows: Tensor, columns: Tensor) -> Selection:
    return lambda tensor: tensor.index_select(0, rows).index_select(1, columns)


def _entries(rows: Tensor) -> Selection:
    return lambda tensor: tensor.index_select(0, rows)
