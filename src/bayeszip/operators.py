"""The closed list of operators a network in a file may consist of, as data: no torch, nothing to execute.

The codec writes a graph by this list, `graph` gives each entry its meaning. An operator's opcode and the order of
its attributes are part of the file format: entries are added at the end, never renumbered.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["OPERATORS", "OPERATOR_OF_OPCODE", "Attribute", "AttributeValue", "Operator"]

AttributeKind = Literal["int", "ints", "bool", "float", "choice"]
AttributeValue = int | tuple[int, ...] | bool | float | str


@dataclass(frozen=True)
class Attribute:
    """One setting of an operator: its name, its kind, and the default that costs no bytes in a file."""

    name: str
    kind: AttributeKind
    default: AttributeValue
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """An operator: `inputs` activations (−1: any number from one up) and the `tensors` it owns, by role."""

    name: str
    opcode: int
    inputs: int = 1
    tensors: tuple[str, ...] = ()
    attributes: tuple[Attribute, ...] = ()

    def defaults(self) -> dict[str, AttributeValue]:
        return {attribute.name: attribute.default for attribute in self.attributes}


_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def _convolution(name: str, opcode: int, rank: int, *, transposed: bool = False) -> Operator:
    attributes = [
        Attribute("stride", "ints", (1,) * rank),
        Attribute("padding", "ints", (0,) * rank),
        Attribute("dilation", "ints", (1,) * rank),
        Attribute("groups", "int", 1),
    ]
    if transposed:
        attributes.append(Attribute("output_padding", "ints", (0,) * rank))
    else:
        attributes.append(Attribute("padding_mode", "choice", "zeros", _PADDING_MODES))
    return Operator(name, opcode, tensors=("weight", "bias"), attributes=tuple(attributes))


def _pool(name: str, opcode: int, rank: int, *, average: bool = False) -> Operator:
    attributes = [
        Attribute("kernel_size", "ints", (2,) * rank),
        Attribute("stride", "ints", (2,) * rank),
        Attribute("padding", "ints", (0,) * rank),
        Attribute("ceil_mode", "bool", False),
    ]
    if average:
        attributes.append(Attribute("count_include_pad", "bool", True))
    else:
        attributes.append(Attribute("dilation", "ints", (1,) * rank))
    return Operator(name, opcode, attributes=tuple(attributes))


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("linear", 1, tensors=("weight", "bias")),
        _convolution("conv1d", 2, 1),
        _convolution("conv2d", 3, 2),
        _convolution("conv3d", 4, 3),
        _pool("max_pool1d", 5, 1),
        _pool("max_pool2d", 6, 2),
        _pool("avg_pool1d", 7, 1, average=True),
        _pool("avg_pool2d", 8, 2, average=True),
        Operator("relu", 9),
        Operator("tanh", 10),
        Operator("sigmoid", 11),
        Operator("flatten", 12, attributes=(Attribute("start_dim", "int", 1), Attribute("end_dim", "int", -1))),
        # From the second dimension on; the batch dimension is always kept.
        Operator("reshape", 13, attributes=(Attribute("shape", "ints", (-1,)),)),
        # States what a network input looks like, its batch dimension left out, and passes it on unchanged.
        Operator(
            "input", 14, attributes=(Attribute("shape", "ints", ()), Attribute("dtype", "choice", "float32", _DTYPES))
        ),
    )
}

OPERATOR_OF_OPCODE: dict[int, Operator] = {operator.opcode: operator for operator in OPERATORS.values()}
