"""From ATen calls, as torch.export leaves them, to our operators: one table, `LOWERINGS`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from bayeszip.errors import ModelError
from bayeszip.operators import OPERATORS, AttributeValue
from bayeszip.tensors import Graph, Node

__all__ = ["LOWERINGS", "Call", "Lowering", "UnknownOperator"]


class UnknownOperator(ModelError):
    """A module uses an operator outside the closed list."""


class Call:
    """An ATen call with its arguments by their names in the schema, defaults filled in."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        schema = node.target._schema  # type: ignore[union-attr]
        # Where `trace` lets an operator that writes into its input pass, it means the same as the one that doesn't.
        self.name: str = schema.name.removeprefix("aten::").removesuffix("_")
        self._arguments: dict[str, Any] = {}
        for position, argument in enumerate(schema.arguments):
            if position < len(node.args):
                self._arguments[argument.name] = node.args[position]
            else:
                default = argument.default_value if argument.has_default_value() else None
                self._arguments[argument.name] = node.kwargs.get(argument.name, default)

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arguments

    def unsupported(self, what: str = "") -> UnknownOperator:
        """The error that says which operator of which layer isn't in the list."""
        stack = self.node.meta.get("nn_module_stack") or {}
        path, kind = list(stack.values())[-1] if stack else ("", "")
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        where = f"{path!r} ({kind})" if path else "the network's own forward"
        detail = f" {what}" if what else ""
        return UnknownOperator(
            f"operator {str(self.node.target)!r}{detail}, used in {where}, is not in the closed list; "
            "the file can hold the tensors alone, to be loaded with into="
        )


class Lowering:
    """A graph in the making: walks an exported program and notes what each of its nodes became."""

    def __init__(self, program: ExportedProgram, canonical: Mapping[str, str]) -> None:
        signature = program.graph_signature
        self._tensor_names = {
            placeholder: canonical.get(name, name)
            for table in (signature.inputs_to_parameters, signature.inputs_to_buffers)
            for placeholder, name in table.items()
        }
        self._user_inputs = [name for name in signature.user_inputs if isinstance(name, str)]
        self._values: dict[fx.Node, int] = {}
        self._nodes: list[Node] = []
        self._outputs: list[int] = []

    def add(self, node: fx.Node) -> None:
        """Take in the next node of the program."""
        if node.op == "placeholder":
            if node.name in self._user_inputs:
                self._values[node] = self._declare(node)
        elif node.op == "output":
            self._outputs = [self.value(each) for each in node.args[0]]  # type: ignore[union-attr]
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            call = Call(node)
            if call.name == "sym_size":
                return
            if call.name not in LOWERINGS:
                raise call.unsupported()
            self._values[node] = LOWERINGS[call.name](self, call)
        elif any(isinstance(each, fx.Node) and isinstance(each.meta.get("val"), Tensor) for each in node.args):
            raise UnknownOperator(f"operator {node.target} is not in the closed list")

    def graph(self) -> Graph:
        return Graph(len(self._user_inputs), tuple(self._nodes), tuple(self._outputs))

    def emit(
        self, op: str, inputs: Sequence[int], tensors: Sequence[str | None] = (), **attributes: AttributeValue
    ) -> int:
        """Append a node; its value. Attributes at their defaults needn't be told apart: `Node` fills them in."""
        self._nodes.append(Node(op, tuple(inputs), tuple(tensors), attributes))
        return len(self._user_inputs) + len(self._nodes) - 1

    def value(self, node: Any) -> int:
        """The value that a node of the program became."""
        if node not in self._values:
            raise UnknownOperator(f"{node} (neither an input nor computed from one) can't be a value of the graph")
        return self._values[node]

    def tensor(self, node: Any) -> str | None:
        """The name of the parameter or buffer that a placeholder stands for."""
        if node is None:
            return None
        if node.name not in self._tensor_names:
            raise UnknownOperator(f"{node} is computed, not a parameter: it can't be the weight of a layer")
        return self._tensor_names[node.name]

    def _declare(self, node: fx.Node) -> int:
        example = node.meta["val"]
        shape = tuple(int(size) for size in example.shape[1:])
        return self.emit("input", [self._user_inputs.index(node.name)], shape=shape, dtype=_dtype(example.dtype))


def rank(node: Any) -> int:
    return node.meta["val"].ndim


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    choices = next(each.choices for each in OPERATORS["input"].attributes if each.name == "dtype")
    if name not in choices:
        raise ModelError(f"an input of dtype {dtype} can't be described in a file; known: {', '.join(choices)}")
    return name


def _repeated(value: Any, count: int) -> tuple[int, ...]:
    """An argument that may be one number for all dimensions, as one for each."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


_Rule = Callable[[Lowering, Call], int]


def _same(lowering: Lowering, call: Call) -> int:
    """In eval mode the call returns its input: no node at all."""
    return lowering.value(call["self"] if "self" in call else call["input"])


def _dropout(lowering: Lowering, call: Call) -> int:
    if call["train"]:
        raise call.unsupported("that drops in eval mode too")
    return lowering.value(call["input"])


def _unary(op: str) -> _Rule:
    return lambda lowering, call: lowering.emit(op, [lowering.value(call["self"])])


def _linear(lowering: Lowering, call: Call) -> int:
    tensors = [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])]
    return lowering.emit("linear", [lowering.value(call["input"])], tensors)


def _convolution(dims: int) -> _Rule:
    def lower(lowering: Lowering, call: Call) -> int:
        dilation = _repeated(call["dilation"], dims)
        padding = call["padding"]
        if isinstance(padding, str):
            padding = _named_padding(call, padding, call["weight"].meta["val"].shape[2:], dilation)
        if rank(call["input"]) != dims + 2:
            raise call.unsupported("without a batch dimension")
        return lowering.emit(
            f"conv{dims}d",
            [lowering.value(call["input"])],
            [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])],
            stride=_repeated(call["stride"], dims),
            padding=_repeated(padding, dims),
            dilation=dilation,
            groups=call["groups"],
        )

    return lower


def _named_padding(call: Call, padding: str, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    if padding == "valid":
        return (0,) * len(kernel)
    total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if any(each % 2 for each in total):
        raise call.unsupported("with padding='same' and an even kernel")
    return tuple(each // 2 for each in total)


def _pool(op: str, dims: int) -> _Rule:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank(call["self"]) != dims + 2:
            raise call.unsupported("without a batch dimension")
        kernel = _repeated(call["kernel_size"], dims)
        attributes: dict[str, AttributeValue] = {
            "kernel_size": kernel,
            "stride": _repeated(call["stride"], dims) if call["stride"] else kernel,
            "padding": _repeated(call["padding"], dims),
            "ceil_mode": bool(call["ceil_mode"]),
        }
        if "count_include_pad" in call:
            attributes["count_include_pad"] = bool(call["count_include_pad"])
            if "divisor_override" in call and call["divisor_override"] is not None:
                raise call.unsupported("with divisor_override")
        else:
            attributes["dilation"] = _repeated(call["dilation"], dims)
        return lowering.emit(op, [lowering.value(call["self"])], (), **attributes)

    return lower


def _flatten(lowering: Lowering, call: Call) -> int:
    dims = rank(call["self"])
    start, end = call["start_dim"] % dims, call["end_dim"] % dims
    if start == end:
        return lowering.value(call["self"])
    return lowering.emit(
        "flatten", [lowering.value(call["self"])], start_dim=start, end_dim=-1 if end == dims - 1 else end
    )


def _reshape(lowering: Lowering, call: Call) -> int:
    """A view whose batch dimension is the input's: said by the shapes it has, not by how it was asked for."""
    before, after = (node.meta["val"].shape for node in (call["self"], call.node))
    if tuple(before) == tuple(after):
        return lowering.value(call["self"])
    if not len(after) or before[0] != after[0] or not all(isinstance(size, int) for size in after[1:]):
        raise call.unsupported("across the batch dimension")
    shape = tuple(int(size) for size in after[1:])
    if len(shape) == 1:
        return lowering.emit("flatten", [lowering.value(call["self"])])
    return lowering.emit("reshape", [lowering.value(call["self"])], shape=shape)


LOWERINGS: dict[str, _Rule] = {
    "linear": _linear,
    "conv1d": _convolution(1),
    "conv2d": _convolution(2),
    "conv3d": _convolution(3),
    "max_pool1d": _pool("max_pool1d", 1),
    "max_pool2d": _pool("max_pool2d", 2),
    "avg_pool1d": _pool("avg_pool1d", 1),
    "avg_pool2d": _pool("avg_pool2d", 2),
    "relu": _unary("relu"),
    "tanh": _unary("tanh"),
    "sigmoid": _unary("sigmoid"),
    "flatten": _flatten,
    "view": _reshape,
    "reshape": _reshape,
    "unflatten": _reshape,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "alpha_dropout": _dropout,
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
    "alias": _same,
}
