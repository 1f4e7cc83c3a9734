"""A graph in the making: walks a program of torch.export and notes what each of its nodes became."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from bayeszip.errors import ModelError
from bayeszip.graph.state import DTYPES, to_raw
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Graph, Node, RawTensor

__all__ = [
    "CONSTANT",
    "Call",
    "Lower",
    "Lowered",
    "Lowering",
    "UnknownOperator",
    "is_used",
    "listed",
    "rank_of",
    "repeated",
    "shape_of",
]

#: Tensors that tracing found, which the module doesn't hold, are called this and something.
CONSTANT = "constant_"

#: Batch sizes to compute with what depends on the batch size alone.
_BATCHES = (2, 3)

#: A dimension of −k is k times the batch size.
Shape = tuple[int, ...]

#: What a node of the program becomes: a value of the graph, or several.
Lowered = int | tuple[int, ...]


class UnknownOperator(ModelError):
    """A module uses an operator outside the closed list.

    Args:
        target: the operator, where it is one of ATen's.
    """

    def __init__(self, message: str, target: object = None) -> None:
        super().__init__(message)
        self.target = target


class Call:
    """An ATen call with its arguments by their names in the schema, defaults filled in."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        schema = node.target._schema  # type: ignore[union-attr]
        # Where `trace` lets an operator that writes into its input pass, it means the same as the one that doesn't.
        self.name: str = schema.name.removeprefix("aten::")
        if not self.name.startswith("_"):
            self.name = self.name.removesuffix("_")
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

    def get(self, name: str, default: Any = None) -> Any:
        return self._arguments.get(name, default)

    @property
    def source(self) -> fx.Node:
        """The value that the call is about."""
        return self._arguments["self"] if "self" in self._arguments else self._arguments["input"]

    @property
    def shape(self) -> Shape:
        """The shape of the (first) result."""
        return shape_of(self.node)

    def unsupported(self, what: str = "") -> UnknownOperator:
        """The error that says which operator of which layer isn't in the list."""
        stack = self.node.meta.get("nn_module_stack") or {}
        path, kind = list(stack.values())[-1] if stack else ("", "")
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        where = f"{path!r} ({kind})" if path else "the network's own forward"
        detail = f" {what}" if what else ""
        return UnknownOperator(
            f"operator {str(self.node.target)!r}{detail}, used in {where}, is not in the closed list; "
            "the file can hold the tensors alone, to be loaded with into=",
            self.node.target,
        )


Lower = Callable[["Lowering", Call], Lowered]


def shape_of(node: fx.Node) -> Shape:
    """The shape of a node's (first) result, −k for k times the batch size."""
    value = node.meta["val"]
    value = value[0] if isinstance(value, list | tuple) else value
    return tuple(_size(each, node) for each in value.shape)


def rank_of(node: Any) -> int:
    value: Tensor = node.meta["val"]
    return value.ndim


def is_used(node: fx.Node, index: int) -> bool:
    """Whether anything takes this one of a node's results."""
    return any(len(user.args) > 1 and user.args[1] == index and user.users for user in node.users)


def listed(value: Any) -> list[int]:
    """An argument that may be one number instead of a list."""
    return [value] if isinstance(value, int) else list(value)


def _size(size: Any, node: fx.Node) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    symbols = expression.free_symbols
    factor = expression / next(iter(symbols)) if len(symbols) == 1 else None
    if factor is None or not factor.is_Integer:
        raise UnknownOperator(f"{node} has a dimension of size {expression}, which is no multiple of the batch size")
    return -int(factor)


class Lowering:
    """What the nodes of a program became so far, by a table of what each ATen operator becomes.

    Args:
        spelled: whether what no input has a part in (positions, masks) is spelled out by operators instead of stored,
            where it has more than one element; buffers are then stored as they are.
    """

    def __init__(
        self,
        program: ExportedProgram,
        canonical: Mapping[str, str],
        table: Mapping[str, Lower],
        dtype: torch.dtype,
        *,
        spelled: bool = False,
    ) -> None:
        signature = program.graph_signature
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
            raise UnknownOperator(
                f"the network writes into {', '.join(changed)} while it computes: no graph can say that"
            )
        self.spelled = spelled
        self._table, self._dtype = table, str(dtype).removeprefix("torch.")
        self._parameters = {node: canonical.get(name, name) for node, name in signature.inputs_to_parameters.items()}
        self._buffers = {node: canonical.get(name, name) for node, name in signature.inputs_to_buffers.items()}
        stored = {**program.state_dict, **program.constants}
        held = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        self._held = {node: stored[name] for node, name in held.items() if isinstance(stored.get(name), Tensor)}
        self._user_inputs = [name for name in signature.user_inputs if isinstance(name, str)]
        self._values: dict[fx.Node, Lowered] = {}
        self._constants: dict[fx.Node, Any] = {}
        # What depends on nothing but the batch size, for each of `_BATCHES`.
        self._sized: dict[fx.Node, tuple[Any, ...]] = {}
        self._batch: object = None
        self._stored: dict[str, int] = {}
        self._new_tensors: dict[str, RawTensor] = {}
        self._name_of_bits: dict[tuple[str, Shape, bytes], str] = {}
        self._nodes: list[Node] = []
        self._outputs: list[int] = []

    def add(self, node: fx.Node) -> None:
        """Take in the next node of the program."""
        if node.op == "placeholder":
            if node.name in self._user_inputs:
                self._values[node] = self._declare(node)
            elif node.name in self._held and not (self.spelled and node.name in self._buffers):
                self._constants[node] = self._held[node.name]
        elif node.op == "output":
            self._outputs = [self.value(each) for each in node.args[0]]  # type: ignore[union-attr]
        elif node.op == "call_function":
            self._add_call(node)
        else:
            raise UnknownOperator(f"{node.op} {node.target} is not in the closed list")

    def graph(self) -> Graph:
        return Graph(len(self._user_inputs), tuple(self._nodes), tuple(self._outputs), self._new_tensors)

    def emit(
        self, op: str, inputs: Sequence[int], tensors: Sequence[str | None] = (), **attributes: AttributeValue
    ) -> int:
        """Append a node; its value. Attributes that aren't given are at their defaults."""
        if any(isinstance(each, float) and math.isnan(each) for each in attributes.values()):
            raise UnknownOperator(f"{op} with NaN has no place in a file, which holds numbers")
        self._nodes.append(Node(op, tuple(inputs), tuple(tensors), attributes))
        return len(self._user_inputs) + len(self._nodes) - 1

    def value(self, node: Any) -> int:
        """The value that a node of the program became; a tensor of the model becomes one here."""
        if not isinstance(node, fx.Node):
            raise UnknownOperator(f"{node!r} can't be a value of the graph")
        found = self._values.get(node)
        if isinstance(found, int):
            return found
        if node.name in self._parameters:
            return self._store("parameter", self._parameters[node.name])
        if node.name in self._buffers:
            return self._store("buffer", self._buffers[node.name])
        constant = self._constants.get(node)
        if isinstance(constant, Tensor):
            return self.constant(constant, node)
        if node in self._sized:
            return self._repeated(node)
        raise UnknownOperator(f"{node} can't be a value of the graph: its operator is not in the closed list")

    def constant(self, tensor: Tensor, node: fx.Node) -> int:
        """A tensor that no input has a part in, as a value; equal ones are stored once."""
        raw = to_raw(tensor, node.name)
        bits = (raw.dtype, raw.shape, raw.values.tobytes())
        if bits not in self._name_of_bits:
            name = f"{CONSTANT}{node.name}"
            # Under a name that the module doesn't use.
            while name in self._new_tensors or name in self._parameters.values() or name in self._buffers.values():
                name += "_"
            self._name_of_bits[bits], self._new_tensors[name] = name, raw
        return self._store("buffer", self._name_of_bits[bits])

    def known(self, node: Any) -> Tensor | None:
        """The tensor a node stands for, if neither inputs nor parameters have a part in it."""
        found = self._constants.get(node)
        return found if isinstance(found, Tensor) else None

    def sized(self, node: Any) -> tuple[tuple[int, Any], ...]:
        """What a node stands for at several batch sizes, if it depends on nothing else; else none."""
        return tuple(zip(_BATCHES, self._sized[node], strict=True)) if node in self._sized else ()

    def number(self, argument: Any) -> float | None:
        """An operand that is one number: written in the code, or a constant of one element."""
        if isinstance(argument, fx.Node):
            known = self.known(argument)
            return float(known) if known is not None and known.ndim == 0 else None
        return float(argument)

    def sliced(self, value: int, dim: int, start: int, end: int) -> int:
        """A stretch of a dimension."""
        return self.emit("slice", [value], dim=dim, start=start, end=end)

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a node stands for a parameter or buffer as it is."""
        return node.name in self._parameters or node.name in self._buffers

    def tensor(self, node: Any) -> str | None:
        """The name of the parameter or buffer that a placeholder stands for."""
        if node is None:
            return None
        name = self._parameters.get(node.name) or self._buffers.get(node.name)
        if name is None:
            raise UnknownOperator(f"with {node}, which is computed, as a tensor of the layer")
        return name

    def reference(self) -> int:
        """A value whose first dimension is the batch."""
        return len(self._user_inputs)

    def _add_call(self, node: fx.Node) -> None:
        if not node.users:
            return  # `trace` has made sure that it changes nothing either
        if not _has_tensor(node):
            self._note_size(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            self._add_python(node)
            return
        call = Call(node)
        if torch.Tag.nondeterministic_seeded in node.target.tags and call.name not in self._table:
            raise call.unsupported("that draws random numbers")
        if self._fold(node):
            return
        if call.name not in self._table:
            raise call.unsupported()
        try:
            self._values[node] = self._table[call.name](self, call)
        except UnknownOperator as error:
            if error.target is not None:
                raise
            # Not for what the operator does but for what it is given: taking it apart would not help.
            raise UnknownOperator(str(call.unsupported(str(error)))) from error

    def _add_python(self, node: fx.Node) -> None:
        """An item of several results is one of them; there is nothing else."""
        source, index = (*node.args[:2], None, None)[:2]
        if getattr(node.target, "__name__", "") != "getitem" or not isinstance(source, fx.Node):
            raise UnknownOperator(f"operator {node.target} is not in the closed list")
        several = self._values.get(source)
        if isinstance(several, tuple) and isinstance(index, int) and index < len(several):
            self._values[node] = several[index]
        elif source in self._constants:
            self._constants[node] = self._constants[source][index]
        elif source in self._sized:
            self._sized[node] = tuple(each[index] for each in self._sized[source])

    def _fold(self, node: fx.Node) -> bool:
        """Compute a node here and now if no input and no parameter has a part in it, at most the batch size."""
        sources = node.all_input_nodes
        if self.spelled and not sources and math.prod(shape_of(node)) > 1:
            return False
        if all(each in self._constants for each in sources):
            self._constants[node] = _computed(node, self._constants)
            return True
        if not all(each in self._constants or each in self._sized for each in sources):
            return False
        self._sized[node] = tuple(
            _computed(node, self._constants | {each: values[place] for each, values in self._sized.items()})
            for place in range(len(_BATCHES))
        )
        return True

    def _note_size(self, node: fx.Node) -> None:
        """Remember a number that is the batch size, or was computed from it."""
        expression = _expression(node.meta.get("val"))
        if expression is not None and expression.free_symbols == {self._batch}:
            self._sized[node] = tuple(int(expression.subs(self._batch, batch)) for batch in _BATCHES)

    def _repeated(self, node: fx.Node) -> int:
        """A tensor that is the same for every sample: that of one, repeated."""
        shape = shape_of(node)
        batch_dims = [dim for dim, size in enumerate(shape) if size < 0]
        if len(batch_dims) > 1 or min(shape, default=0) < -1:
            raise UnknownOperator(f"{node}, which depends on the batch size, has shape {shape}")
        one, *others = self._sized[node]
        sample = one.narrow(batch_dims[0], 0, 1) if batch_dims else one
        if not all(torch.equal(sample.expand_as(each), each) for each in (one, *others)):
            raise UnknownOperator(f"{node} depends on the batch size, or on a sample's place in the batch")
        constant = self.constant(sample, node)
        return self.emit("expand", [constant, self.reference()], shape=shape) if batch_dims else constant

    def _store(self, op: str, name: str) -> int:
        if name not in self._stored:
            self._stored[name] = self.emit(op, [], [name])
        return self._stored[name]

    def _declare(self, node: fx.Node) -> int:
        dtype = str(node.meta["val"].dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelError(f"an input of dtype {dtype} can't be described in a file; known: {', '.join(DTYPES)}")
        position = self._user_inputs.index(node.name)
        self._batch = _expression(node.meta["val"].shape[0])
        said = {"computes_in": self._dtype} if position == 0 else {}
        return self.emit("input", [position], shape=shape_of(node)[1:], dtype=dtype, **said)


def _expression(size: Any) -> Any:
    """What a size is computed from, as sympy says it; None if it is just a number."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _computed(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda each: known[each])
    with torch.no_grad():
        result = node.target(*arguments, **keywords)  # type: ignore[operator]
    return tuple(result) if isinstance(result, list) else result


def _has_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value))


def repeated(value: Any, count: int) -> tuple[int, ...]:
    """An argument that may be one number for all dimensions, as one for each."""
    values = tuple(listed(value))
    return values * count if len(values) == 1 else values
