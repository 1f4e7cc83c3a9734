"""A compressed model's tensors into the user's own class: `load_into`."""

import contextlib
import math
import warnings
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.errors import ModelError, listed, shown
from bayeszip.graph.families import RULES
from bayeszip.graph.folding import CHANNELS
from bayeszip.graph.indices import is_index
from bayeszip.graph.liveness import coupled_units
from bayeszip.graph.lowering import CONSTANT
from bayeszip.graph.plain import computed_tensors, make_plain, unwrapped
from bayeszip.graph.proof import alike, one_precision, outputs_of, random_inputs
from bayeszip.graph.soundness import charge_run, refusing, shapes, states_inputs
from bayeszip.graph.state import from_state, to_torch
from bayeszip.graph.to_module import to_module
from bayeszip.graph.trace import trace
from bayeszip.limits import Budget, Limits
from bayeszip.operators import OPERATORS
from bayeszip.tensors import CompressedModel, Node, QuantizedTensor, RawTensor

__all__ = ["load_into"]


def load_into(
    model: CompressedModel, net: nn.Module, *, check: bool = True, limits: Limits | Budget | None = None
) -> nn.Module:
    """Write a model's tensors into `net`, whose layers shrink to the sizes that survived; returns `net`.

    Where a layer can't shrink, or a `forward` counts on the old sizes (attention, for example), the tensors get zeros
    back in place of what died, if the model's graph is there to prove that this computes the same.

    A weight that a layer of `net` computes (by a weight norm, for example) becomes a parameter if the file holds it.
    Tensors of `net` that the model lacks keep their values (what dead-unit removal found unread isn't in the file).

    Args:
        check: run `net` against the model's graph on random inputs, where it has one: a class whose `forward` counts
            on the old sizes would otherwise go wrong silently.
        limits: what the model may ask for; a budget, where reading its file has been charged to it.

    Raises:
        ModelError: a tensor has no place in `net`, or can't have the shape it has there (both shapes are named);
            or `net` computes something else than the model. Its tensors and sizes are as they were then, but weights
            that its layers computed are parameters.
    """
    budget, inner = Budget.of(limits), unwrapped(net)
    _check_values(net)
    owners = dict(inner.named_modules())
    for path, owner in owners.items():
        if any(f"{path}.{name}".removeprefix(".") in model.tensors for name in computed_tensors(owner)):
            make_plain(owner)
    owners = dict(inner.named_modules())
    tensors = _with_norms(model, owners)
    whole = {
        name: tuple(held.shape)
        for name in tensors
        if (held := _held(owners.get(name.rpartition(".")[0]), name.rpartition(".")[2])) is not None
    }
    stated = model.graph is not None and states_inputs(model.graph)
    if stated:
        with refusing(f"the tensors can't be put into {type(net).__name__}", ModelError):
            shapes(model, budget)  # before anything is run at the sizes that the graph states
    proven = check and stated
    kept = _Kept(inner, tensors)
    try:
        try:
            _cut_to_size(net, tensors, budget)
            if proven:
                _check(model, net, budget)
        except ModelError:
            kept.give_back()
            smaller = any(tensors[name].shape != shape for name, shape in whole.items())
            if not (proven and smaller and _with_zeros_back(model, net, tensors, whole, budget)):
                raise
    except BaseException:  # Ctrl-C and want of memory, too
        kept.give_back()
        raise
    _tell_of_others(inner, tensors)
    return net


class _Kept:
    """What a network holds under these names, and the sizes its layers state, to be given back."""

    def __init__(self, net: nn.Module, names: Container[str]) -> None:
        held = dict((*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)))
        self._values = {id(tensor): tensor.detach().clone() for name, tensor in held.items() if name in names}
        self._tensors = [
            (module, leaf, tensor)
            for module in net.modules()
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items())
        ]
        self._sizes = [
            (module, name, size) for module in net.modules() for name, size in vars(module).items() if type(size) is int
        ]

    @torch.no_grad()
    def give_back(self) -> None:
        for module, leaf, tensor in self._tensors:
            if _held(module, leaf) is not tensor:
                setattr(module, leaf, tensor)
            if tensor is not None and (value := self._values.get(id(tensor))) is not None:
                tensor.copy_(value)
        for module, name, size in self._sizes:
            setattr(module, name, size)


def _tell_of_others(net: nn.Module, tensors: Container[str]) -> None:
    """Warn of what keeps the values it came with: it may be computed with where the file's inputs don't lead."""
    held = {id(parameter) for name, parameter in net.named_parameters(remove_duplicate=False) if name in tensors}
    others = [name for name, parameter in net.named_parameters() if id(parameter) not in held]
    if others:
        warnings.warn(
            f"the file doesn't hold {listed(others)}, on which no output depended when it was made: "
            f"{type(net).__name__} keeps the values that it has there",
            UserWarning,
            stacklevel=4,
        )


def _check_values(net: nn.Module) -> None:
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ModelError(
                f"{name} of {type(net).__name__} has no values yet; run the network once, or build it on the CPU, "
                "before a file is loaded into it"
            )


def _cut_to_size(net: nn.Module, tensors: Mapping[str, QuantizedTensor | RawTensor], budget: Budget) -> None:
    """Write the tensors as they are, and let layers follow in their sizes."""
    owners, all_places = dict(unwrapped(net).named_modules()), _places(net)
    writes: list[tuple[str, _Places]] = []
    loaded = 0
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner, held = owners.get(path), _held(owners.get(path), leaf)
        if is_index(name) or (held is None and name.startswith(CONSTANT)):
            continue  # no part of the network, or what the class makes itself
        if held is None and not _is_new_bias(owner, leaf):
            raise ModelError(
                f"{type(net).__name__} has no tensor {shown(name)}; it must be the class the file was made from"
            )
        places = [(owner, leaf)] if held is None and owner is not None else all_places[id(held)]
        _check_fits(places, name, tensor.shape, held)
        writes.append((name, places))
        loaded += tensor.size * (4 if held is None else held.dtype.itemsize)
    budget.charge("loaded", loaded)  # nothing is made before all of it is known to fit
    with refusing(f"the tensors can't be put into {type(net).__name__}", ModelError):
        for name, places in writes:
            _write(places, to_torch(tensors[name]))
        for module in owners.values():
            _restate(module)


def _with_zeros_back(
    model: CompressedModel,
    net: nn.Module,
    tensors: Mapping[str, QuantizedTensor | RawTensor],
    whole: Mapping[str, tuple[int, ...]],
    budget: Budget,
) -> bool:
    """Write the tensors in the shapes that `net` had, zeros where something died; whether that computes the same.

    What died is no longer known, and need not be: units of a kind may change places. Survivors come first, in each of
    the parts into which a dimension falls.
    """
    named = {name: shape for name, shape in whole.items() if not is_index(name)}
    for name in tensors:
        path, _, leaf = name.rpartition(".")
        if name not in whole and leaf == "bias" and f"{path}.weight" in whole:
            named[name] = whole[f"{path}.weight"][:1]  # made of constants that were folded
    if not all(_fits_in(tensors[name].shape, shape) for name, shape in named.items()):
        return False
    budget.charge("loaded", sum(4 * math.prod(shape) for shape in named.values()))
    _fill(net, {name: torch.full(shape, 0.01) for name, shape in named.items()})
    for counts in (_parts_of_dims(model, net), _gates_of(net)):
        values = {name: to_torch(tensors[name]) for name in named}
        _fill(net, {name: _spread(value, named[name], counts.get(name, 1)) for name, value in values.items()})
        with contextlib.suppress(ModelError):
            _check(model, net, budget)
            return True
    return False


def _fill(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write tensors at their names, and let the layers' sizes follow."""
    owners, all_places = dict(unwrapped(net).named_modules()), _places(net)
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        held = _held(owners[path], leaf)
        _write([(owners[path], leaf)] if held is None else all_places[id(held)], value)
    for module in owners.values():
        _restate(module)


def _spread(value: Tensor, shape: tuple[int, ...], parts: int) -> Tensor:
    """The value in a larger shape, at the start of each of so many parts of its first dimension; else zeros."""
    if tuple(value.shape) == shape:
        return value
    parts = parts if value.shape[0] % parts == 0 and shape[0] % parts == 0 else 1
    full = value.new_zeros(parts, shape[0] // parts, *shape[1:])
    places = (slice(None), *(slice(size) for size in (value.shape[0] // parts, *value.shape[1:])))
    full[places] = value.reshape(parts, -1, *value.shape[1:])
    return full.reshape(shape)


def _gates_of(net: nn.Module) -> dict[str, int]:
    """How many gates lie one after the other in the rows of recurrent layers' tensors."""
    gates = {"LSTM": 4, "GRU": 3}
    return {
        f"{path}.{name}".removeprefix("."): gates[part.mode]
        for path, part in unwrapped(net).named_modules()
        if isinstance(part, nn.RNNBase) and part.mode in gates
        for name in part._parameters
        if not name.startswith("weight_hr")
    }


def _parts_of_dims(model: CompressedModel, net: nn.Module) -> dict[str, int]:
    """The gates, and the three parts of rows that are packed queries, keys and values, as the network uses them."""
    found = _gates_of(net)
    try:
        graph = trace(unwrapped(net), _inputs_for(model, net))
    except ModelError:
        return found
    traced = CompressedModel(from_state(net, graph=graph), graph)
    for name, dims in (coupled_units(traced, mask_pinned=False) or {}).items():
        if dims and len(dims[0]) % 3 == 0 and (dims[0].reshape(3, -1) == dims[0][: len(dims[0]) // 3]).all():
            found[name] = 3
    return found


_Places = list[tuple[nn.Module, str]]


def _with_norms(model: CompressedModel, owners: dict[str, nn.Module]) -> dict[str, QuantizedTensor | RawTensor]:
    """The tensors, with what the class has and a file without norms lacks: a bias that bears a norm's name is all that
    the norm does. One without a bias of its own has it as its mean."""
    tensors = dict(model.tensors)
    for node in model.graph.nodes if model.graph is not None else ():
        if node.op not in CHANNELS or len(node.tensors) < 2 or node.tensors[1] is None:
            continue
        path = node.tensors[1].rpartition(".")[0]
        norm, bias = owners.get(path), model.tensors[node.tensors[1]]
        if not isinstance(norm, nn.modules.batchnorm._NormBase) or norm.running_mean is None:
            continue
        ones, zeros = np.ones(bias.size, np.float32), np.zeros(bias.size, np.float32)
        mean = zeros
        if norm.affine:
            tensors[f"{path}.weight"] = RawTensor(ones, "float32")
        else:
            tensors.pop(node.tensors[1], None)
            mean = -to_torch(bias).float().numpy()
        tensors[f"{path}.running_mean"] = RawTensor(mean, "float32")
        tensors[f"{path}.running_var"] = RawTensor(ones - np.float32(norm.eps), "float32")
        before = str(node.tensors[0]).rpartition(".")[0]
        if _held(owners.get(before), "bias") is not None:
            tensors[f"{before}.bias"] = RawTensor(zeros, "float32")
    return tensors


def _held(owner: nn.Module | None, leaf: str) -> Tensor | None:
    """The tensor of a name in a module; looked up among tensors, so that no name reaches an attribute."""
    return None if owner is None else owner._parameters.get(leaf, owner._buffers.get(leaf))


def _places(net: nn.Module) -> dict[int, _Places]:
    """For each tensor all the places it has in a network: a tied one has several."""
    places: dict[int, _Places] = {}
    for module in net.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            places.setdefault(id(tensor), []).append((module, leaf))
    return places


def _is_new_bias(owner: nn.Module | None, leaf: str) -> bool:
    """Whether the owner is a layer without a bias, which folding a constant has given one."""
    return owner is not None and leaf == "bias" and "bias" in owner._parameters and owner._parameters["bias"] is None


def _check_fits(places: _Places, name: str, shape: tuple[int, ...], held: Tensor | None) -> None:
    """Make sure that a tensor can take the place of one of the same shape or of a larger one."""
    owner, old = places[0][0], None if held is None else tuple(held.shape)
    if old is None:
        # A bias that folding a constant has made: one for each unit of the weight, whatever size that will have.
        fits = len(shape) == 1
    else:
        fits = old == shape or (_fits_in(shape, old) and all(_can_shrink(each) for each, _ in places))
    if not fits:
        cut = old is not None and _fits_in(shape, old)
        remedy = "; if the rest was cut off, as nothing depends on it, load without into=" if cut else ""
        raise ModelError(
            f"{shown(name)[1:-1]} has shape {shape} in the file and {old} in the {type(owner).__name__} it is to be "
            f"loaded into{remedy}"
        )


def _fits_in(shape: tuple[int, ...], old: tuple[int, ...]) -> bool:
    """Whether it is a part of the old shape."""
    return len(old) == len(shape) and all(min(1, was) <= new <= was for new, was in zip(shape, old, strict=True))


def _can_shrink(layer: nn.Module) -> bool:
    return isinstance(layer, tuple(_SIZES)) or (isinstance(layer, nn.RNNBase) and not layer.proj_size)


def _write(places: _Places, value: Tensor) -> None:
    """Put a tensor at all its places."""
    owner, leaf = places[0]
    old = _held(owner, leaf)
    if old is None:
        weight: Any = owner.weight
        owner.register_parameter(leaf, nn.Parameter(value.to(weight.device, weight.dtype)))
        return
    value = value.to(device=old.device, dtype=old.dtype)
    if old.shape == value.shape:
        with torch.no_grad():
            old.copy_(value)
        return
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
    """Groups leave whole: each still has as many channels as before, but the last one, whose channels leave singly."""
    groups, before = int(layer.groups), int(getattr(layer, attribute))  # type: ignore[arg-type]
    return max(1, channels * groups // before)


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
    if module.proj_size:
        return  # none of its weights may shrink
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
    for suffix in (f"l{layer}{turn}" for layer in range(module.num_layers) for turn in ("", "_reverse")[:directions]):
        # torch computes a recurrent layer without looking at the sizes of its weights.
        op = module.mode.lower().partition("_")[0]
        found = [_held(module, f"{role}_{suffix}") for role in OPERATORS[op].tensors]
        given = [None if each is None else tuple(each.shape) for each in found]
        RULES[op].check_tensors(Node(op, (0,), ("",) * len(given)), given)


def _type_and_place(net: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Those of the first parameter."""
    first = next((each for each in net.parameters() if each.is_floating_point()), None)
    return (torch.float32, torch.device("cpu")) if first is None else (first.dtype, first.device)


def _inputs_for(model: CompressedModel, net: nn.Module) -> tuple[Tensor, ...]:
    """Random ones, in the type of `net`, where it is."""
    dtype, device = _type_and_place(net)
    inputs = random_inputs(model, torch.Generator().manual_seed(0))
    return tuple(each.to(device, dtype) if each.is_floating_point() else each.to(device) for each in inputs)


def _check(model: CompressedModel, net: nn.Module, budget: Budget) -> None:
    """Compare with the model's own graph on random inputs, in the precision of `net`."""
    charge_run(model, budget)
    inputs, (dtype, device) = _inputs_for(model, net), _type_and_place(net)
    training = [part for part in net.modules() if part.training]
    net.eval()
    try:
        with torch.no_grad(), one_precision(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = to_module(model, dtype, budget).to(device)
            with refusing("the file's own graph doesn't run", ModelError):
                expected = outputs_of(own(*inputs))
            name = type(net).__name__
            with refusing(f"{name}, whose forward may count on the original sizes, doesn't run with those that "
                          "survived; load without into=", ModelError):  # fmt: skip
                found = outputs_of(net(*inputs))
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
