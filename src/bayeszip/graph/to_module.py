"""From a compressed model to a plain module of stock layers that computes its graph: `to_module`."""

import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bayeszip.errors import FormatError, InputError, ModelError, shown
from bayeszip.graph.families import RULES
from bayeszip.graph.families.base import Shape
from bayeszip.graph.indices import is_index
from bayeszip.graph.soundness import (
    Step,
    at_sizes,
    check_sound,
    refusing,
    rehearse,
    stored_picks,
    tensor_shapes,
)
from bayeszip.graph.state import DTYPES, charge_loaded, loaded_dtype, stated_dtype, to_torch
from bayeszip.limits import Budget, Limits
from bayeszip.operators import OPERATORS
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor, RawTensor, Varying, sized

__all__ = ["Network", "to_module"]

#: Names of more parts than this are refused: modules nest as deep, and Python's own calls with them.
_DEEPEST = 64


#: So many shapes of inputs that fit are remembered.
_MOST_FITTING = 256


@dataclass(frozen=True)
class _Open:
    """A graph whose inputs may have other shapes than those it states, and the shapes and types known to fit."""

    graph: Graph
    tensors: dict[str, Shape]
    limits: Limits
    picks: dict[str, tuple[int, int]]
    fitting: set[Hashable] = field(default_factory=set)


def _changed(step: Step, node: Node) -> dict[str, Any]:
    """The attributes of a step that vary, as they are at other sizes."""
    return {each.attribute: node.attributes[each.attribute] for each in step.varying}


@contextmanager
def _types_told(graph: Graph, given: Sequence[torch.dtype], floating: torch.dtype) -> Iterator[None]:
    """What fails with inputs of other types than the graph states is their fault, not the file's."""
    try:
        yield
    except FormatError as error:
        stated = {node.inputs[0]: DTYPES[str(node.attributes["dtype"])] for node in graph.nodes if node.op == "input"}
        for place, dtype in enumerate(given):
            wanted = floating if place in stated and stated[place].is_floating_point else stated.get(place, dtype)
            if wanted != dtype:
                raise InputError(f"the network takes {wanted} as its input {place}, not {dtype}; {error}") from error
        raise


class Network(nn.Module):
    """A network that computes a graph. Its layers are stock ones, under the names they had where they come from."""

    def __init__(self, steps: tuple[Step, ...], outputs: tuple[int, ...], inputs: int) -> None:
        super().__init__()
        self._bayeszip_steps = steps
        self._bayeszip_outputs = outputs
        self._bayeszip_inputs = inputs
        #: What calls are checked by where the graph doesn't state its inputs, or runs at other sizes than it states.
        self._bayeszip_open: _Open | None = None

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        values: list[Tensor | None] = [x, *more]
        if len(values) != self._bayeszip_inputs:
            raise TypeError(f"the network takes {self._bayeszip_inputs} inputs, not {len(values)}")
        for place, each in enumerate(values):
            if not isinstance(each, Tensor):
                raise TypeError(f"the network takes tensors; input {place} is a {type(each).__name__}")
        if self._bayeszip_open is not None:
            self._bayeszip_check(self._bayeszip_open, (x, *more))
        shapes: list[Any] = [each.shape for each in (x, *more)]
        for step in self._bayeszip_steps:
            arguments: list[Any] = [values[value] for value in step.inputs]
            if step.layer is not None:
                result: Tensor = self._bayeszip_part(step.layer)(*arguments)
            else:
                tensors = [None if name is None else self._bayeszip_tensor(name) for name in step.tensors]
                attributes = sized(step.attributes, step.varying, shapes, step.inputs)
                result = RULES[step.op].compute(arguments, tensors, attributes)
            values.append(result)
            shapes.append(result.shape)
            for value in step.last_used:
                values[value] = None
        results = tuple(values[value] for value in self._bayeszip_outputs)
        return results[0] if len(results) == 1 else results

    def _bayeszip_check(self, opened: "_Open", inputs: Sequence[Tensor]) -> None:
        """Hold inputs against the graph before anything runs; what was found to fit isn't looked at again."""
        if torch.compiler.is_compiling() or not all(type(size) is int for each in inputs for size in each.shape[1:]):
            return  # there sizes may have names, and whatever a check does would be taken for a part of the network
        names = {name for step in self._bayeszip_steps for name in step.tensors if name is not None}
        held = {name: self._bayeszip_tensor(name) for name in names}
        floating = next((each.dtype for each in held.values() if each.is_floating_point()), torch.float32)
        key = (floating, *((tuple(each.shape[1:]), each.dtype) for each in inputs))
        if key in opened.fitting:
            return
        shapes = [(-1, *each.shape[1:]) for each in inputs]
        graph, found = at_sizes(opened.graph, opened.tensors, Budget(opened.limits), shapes, opened.picks)
        steps = [
            replace(step, attributes={**step.attributes, **_changed(step, node)})
            for step, node in zip(self._bayeszip_steps, graph.nodes, strict=True)
        ]
        hollow = {name: tensor.to("meta") for name, tensor in held.items()}
        with _types_told(opened.graph, [each.dtype for each in inputs], floating):
            rehearse(steps, [each.dtype for each in inputs], hollow, found, floating)
        if len(opened.fitting) < _MOST_FITTING:
            opened.fitting.add(key)

    def _bayeszip_part(self, path: str) -> Any:
        """A module by its path. Names are data, so they are looked up among modules, never as attributes."""
        part: Any = self
        for name in path.split(".") if path else ():
            part = part._modules[name]
        return part

    def _bayeszip_tensor(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        owner = self._bayeszip_part(path)
        tensor: Tensor = owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]
        return tensor


def to_module(
    model: CompressedModel, dtype: torch.dtype | None = None, limits: Limits | Budget | None = None
) -> Network:
    """The plain module of a compressed model, in eval mode.

    Nothing that the model names is imported or executed: operators come from the closed list, and names only ever
    become names of submodules and parameters. One output is returned as it is, several as a tuple.

    Args:
        dtype: of all floating-point tensors; by default the type that the original network computed in. As for any
            module, `to()` changes it later.
        limits: what the model may ask for; a budget, where reading its file has been charged to it.

    A graph that doesn't state the shapes of its inputs, or runs at other sizes too, is checked when it is called,
    before anything runs, within the same limits.

    Raises:
        ModelError: the model has no graph.
        FormatError: a tensor's name can't be the name of a parameter, or the operators of the graph don't fit
            together, or it asks for more than the limits.
    """
    if model.graph is None:
        raise ModelError("the file holds tensors alone, no graph: load it into the network's own class with into=")
    budget = Budget.of(limits)
    dtype = dtype or stated_dtype(model.graph)
    with refusing("the network can't be built"):
        found = check_sound(model, budget)
        charge_loaded(model, dtype, budget)
        layers = _layers(model.graph, model)
        steps = tuple(_steps(model, model.graph, {path: node for path, (node, _) in layers.items()}, dtype))
        if found is not None:
            rehearse(steps, [None] * model.graph.inputs, _without_values(model, dtype), found, dtype)
        network = Network(steps, model.graph.outputs, model.graph.inputs)
        if found is None or model.graph.varies:
            network._bayeszip_open = _Open(model.graph, tensor_shapes(model), budget.limits, stored_picks(model))
        return _filled(network, model, model.graph, layers, dtype)


def _without_values(model: CompressedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=loaded_dtype(tensor, dtype), device="meta")
        for name, tensor in model.tensors.items()
    }


def _filled(
    network: Network,
    model: CompressedModel,
    graph: Graph,
    layers: dict[str, tuple[Node, nn.Module]],
    dtype: torch.dtype,
) -> Network:
    """The network with its tensors, each at its name."""
    buffers = graph.buffer_names()
    for name, tensor in model.tensors.items():
        if is_index(name):
            continue
        _place_layers(network, name, layers)
        value = to_torch(tensor, dtype)
        _register(network, name, value, is_buffer=name in buffers or not value.is_floating_point())
    for module in network.modules():
        # What the file doesn't tell, how many batches a norm has seen, a stock layer can do without.
        module._buffers.update(
            {name: None for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        )
    return network.eval()


def _place_layers(network: Network, name: str, layers: dict[str, tuple[Node, nn.Module]]) -> None:
    """Put the stock layers that a tensor lies in at their paths, from the outside in; each is put once."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        if path in layers:
            _place(network, path, layers.pop(path)[1])


def _layers(graph: Graph, model: CompressedModel) -> dict[str, tuple[Node, nn.Module]]:
    """The paths at which a stock layer can stand, each with the node that it computes."""
    found: dict[str, tuple[Node, nn.Module]] = {}
    for node in graph.nodes:
        path = _layer_path(node, model)
        if path is not None and path not in found and (layer := _built(node, model)) is not None:
            found[path] = (node, layer)
    return found


def _layer_path(node: Node, model: CompressedModel) -> str | None:
    """Where the node's stock layer would stand: the common prefix of its tensors, if they are named by their roles."""
    if node.varying:
        return None
    roles = OPERATORS[node.op].tensors
    path = next((name.rpartition(".")[0] for name in node.tensors if name is not None), "")
    if not path:
        return None
    for role, name in zip(roles, node.tensors, strict=True):
        own = f"{path}.{role}"
        if (name is None and own in model.tensors) or (name is not None and name != own):
            return None
    return path


def _steps(model: CompressedModel, graph: Graph, layers: dict[str, Node], dtype: torch.dtype) -> Iterator[Step]:
    floating = next((name for name, each in model.tensors.items() if _is_floating(each) and not is_index(name)), None)
    own = str(stated_dtype(graph)).removeprefix("torch.")
    path_of = {_signature(node): path for path, node in layers.items()}
    outputs = set(graph.outputs)
    last_use = {value: position for position, node in enumerate(graph.nodes) for value in node.inputs}
    for position, node in enumerate(graph.nodes):
        used_up = {value for value in node.inputs if last_use[value] == position} - outputs
        path = path_of.get(_signature(node))
        attributes, tensors, varying = dict(node.attributes), node.tensors, node.varying
        if _is_last(node):
            # Said as it was written: torch.onnx, behind a recurrence, reads another place at `size - 1`.
            attributes["index"], varying = -1, ()
        wanted = str(attributes.get("dtype", ""))
        if "float" in wanted and (node.op == "cast" or wanted != own):
            # To the type that all of the network computes in; a tensor tells it, so that it follows `to()`.
            attributes["dtype"], tensors = str(dtype).removeprefix("torch."), (floating,)
        yield Step(node.op, node.inputs, path, tensors, attributes, tuple(sorted(used_up)), varying)


def _is_last(node: Node) -> bool:
    """Whether it is what is selected at the end of a dimension, however long that is."""
    return node.op == "select" and node.varying == (
        Varying("index", dims=((node.inputs[0], int(str(node.attributes["dim"]))),), offset=-1),
    )


def _is_floating(tensor: QuantizedTensor | RawTensor) -> bool:
    return isinstance(tensor, QuantizedTensor) or "float" in tensor.dtype


def _signature(node: Node) -> tuple[object, ...]:
    """What two nodes that one layer computes have in common."""
    return node.op, node.tensors, tuple(sorted(node.attributes.items()))


def _built(node: Node, model: CompressedModel) -> nn.Module | None:
    shapes = [None if name is None else model.tensors[name].shape for name in node.tensors]
    with warnings.catch_warnings(), refusing(f"{node.op} can't be built from tensors of shapes {shapes}"):
        warnings.simplefilter("ignore")  # a layer without elements is none of torch's business here
        return RULES[node.op].layer(shapes, node.attributes)


def _place(root: nn.Module, path: str, layer: nn.Module) -> None:
    owner, leaf = _owner(root, path)
    _check_free(owner, leaf, path)
    owner.add_module(leaf, layer)


def _register(root: nn.Module, name: str, value: Tensor, *, is_buffer: bool) -> None:
    """Put a tensor at its name; in a stock layer, in the place that waits for it."""
    owner, leaf = _owner(root, name)
    parameter, buffer = owner._parameters.get(leaf), owner._buffers.get(leaf)
    if parameter is not None and parameter.is_meta:
        owner._parameters[leaf] = nn.Parameter(value)
    elif buffer is not None and buffer.is_meta:
        owner._buffers[leaf] = value
    else:
        _check_free(owner, leaf, name)
        if is_buffer:
            owner.register_buffer(leaf, value)
        else:
            owner.register_parameter(leaf, nn.Parameter(value))


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a name, made of plain containers where it isn't there yet, and the name's last part."""
    *path, leaf = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            _check_free(owner, part, name)
            owner.add_module(part, nn.Module())
        child = owner._modules[part]
        if child is None:
            raise _refused(name, f"{part!r} is taken")
        owner = child
    return owner, leaf


def _check_free(owner: nn.Module, part: str, name: str) -> None:
    if not part:
        raise _refused(name, "a part of it is empty")
    if part.startswith(("__", "_bayeszip")):
        raise _refused(name, f"{shown(part)} is reserved")
    if name.count(".") >= _DEEPEST:
        raise _refused(name, f"it has more than {_DEEPEST} parts")
    held = (vars(owner), owner._parameters, owner._buffers, owner._modules)
    if part in _attributes(type(owner)) or any(part in each for each in held):  # type: ignore[arg-type]
        raise _refused(name, f"{shown(part)} is an attribute of {type(owner).__name__} or taken by another tensor")


@cache
def _attributes(kind: Hashable) -> frozenset[str]:
    return frozenset(dir(kind))


def _refused(name: str, reason: str) -> FormatError:
    return FormatError(f"a tensor can't be called {shown(name)}: {reason}")
