"""The closed list of operators a network in a file may consist of, as data: no torch, nothing to execute.

The codec writes a graph by this list, `graph` gives each entry its meaning. An operator's opcode and the order of
its attributes are part of the file format: entries are added at the end, never renumbered.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["BUFFER_ROLES", "OPERATORS", "OPERATOR_OF_OPCODE", "Attribute", "AttributeValue", "Operator"]

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
_FLOATING = ("float32", "float64", "float16", "bfloat16")
_DTYPES = (*_FLOATING, "int64", "int32", "int16", "int8", "uint8", "bool")


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


def _norm(name: str, opcode: int, *statistics: str, shaped: bool = False, grouped: bool = False) -> Operator:
    attributes = [Attribute("eps", "float", 1e-5)]
    if shaped:
        attributes.append(Attribute("shape", "ints", ()))
    if grouped:
        attributes.append(Attribute("groups", "int", 1))
    return Operator(name, opcode, tensors=("weight", "bias", *statistics), attributes=tuple(attributes))


def _recurrent(name: str, opcode: int, *more: Attribute, states: int = 0) -> Operator:
    """One layer in one direction over batch × time × features, from a state of zeros or from given `states`."""
    attributes = (Attribute("reverse", "bool", False), *more)
    tensors = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return Operator(name, opcode, 1 + states, tensors, attributes)


#: The cell is that of the last step taken, batch × units.
_RESULT = Attribute("result", "choice", "sequence", ("sequence", "cell"))
_ACTIVATION = Attribute("activation", "choice", "tanh", ("tanh", "relu"))
_REDUCTION = (Attribute("dims", "ints", (-1,)), Attribute("keepdim", "bool", False))
_RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")
_INTERPOLATIONS = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")

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
        # The first one says in what type the network computes: that of its floating-point tensors once it is loaded.
        Operator(
            "input",
            14,
            attributes=(
                Attribute("shape", "ints", ()),
                Attribute("dtype", "choice", "float32", _DTYPES),
                Attribute("computes_in", "choice", "float32", _FLOATING),
            ),
        ),
        # Opcodes below 64 take one byte in a file: those for what networks use most.
        _norm("batch_norm1d", 15, "running_mean", "running_var"),
        _norm("batch_norm2d", 16, "running_mean", "running_var"),
        _norm("batch_norm3d", 17, "running_mean", "running_var"),
        _norm("layer_norm", 18, shaped=True),
        _norm("group_norm", 19, grouped=True),
        Operator("add", 20, inputs=2),
        Operator("mul", 21, inputs=2),
        Operator("sub", 22, inputs=2),
        Operator("div", 23, inputs=2),
        Operator("concat", 24, inputs=-1, attributes=(Attribute("dim", "int", 1),)),
        # One of several equal parts, or any other stretch, of a dimension.
        Operator(
            "slice",
            25,
            attributes=(Attribute("dim", "int", 1), Attribute("start", "int", 0), Attribute("end", "int", -1)),
        ),
        Operator("select", 26, attributes=(Attribute("dim", "int", 1), Attribute("index", "int", 0))),
        Operator("permute", 27, attributes=(Attribute("dims", "ints", (0, 2, 1)),)),
        # All dimensions; −k stands for k times the batch size.
        Operator("view", 28, attributes=(Attribute("shape", "ints", (-1,)),)),
        # To a shape as in `view`; the second input tells the batch size.
        Operator("expand", 29, inputs=2, attributes=(Attribute("shape", "ints", (-1,)),)),
        Operator("adaptive_avg_pool1d", 30, attributes=(Attribute("output_size", "ints", (1,)),)),
        Operator("adaptive_avg_pool2d", 31, attributes=(Attribute("output_size", "ints", (1, 1)),)),
        Operator("mean", 32, attributes=_REDUCTION),
        Operator("sum", 33, attributes=_REDUCTION),
        Operator("amax", 34, attributes=_REDUCTION),
        Operator("softmax", 35, attributes=(Attribute("dim", "int", -1),)),
        Operator("log_softmax", 36, attributes=(Attribute("dim", "int", -1),)),
        Operator("matmul", 37, inputs=2),
        # Queries, keys, values, and perhaps a mask; a scale of 0 stands for the usual 1/√features.
        Operator(
            "attention",
            38,
            inputs=-1,
            attributes=(Attribute("causal", "bool", False), Attribute("scale", "float", 0.0)),
        ),
        Operator("embedding", 39, tensors=("weight",), attributes=(Attribute("padding_idx", "int", -1),)),
        _recurrent("lstm", 40, _RESULT),
        _recurrent("gru", 41),
        _recurrent("rnn", 42, _ACTIVATION),
        Operator("gelu", 43, attributes=(Attribute("approximate", "choice", "none", ("none", "tanh")),)),
        Operator("silu", 44),
        Operator("relu6", 45),
        Operator("hardswish", 46),
        Operator("hardsigmoid", 47),
        Operator("leaky_relu", 48, attributes=(Attribute("slope", "float", 0.01),)),
        Operator("elu", 49, attributes=(Attribute("alpha", "float", 1.0),)),
        Operator("prelu", 50, tensors=("weight",)),
        _convolution("conv_transpose1d", 51, 1, transposed=True),
        _convolution("conv_transpose2d", 52, 2, transposed=True),
        _convolution("conv_transpose3d", 53, 3, transposed=True),
        Operator(
            "interpolate",
            54,
            attributes=(
                Attribute("size", "ints", (1, 1)),
                Attribute("mode", "choice", "nearest", _INTERPOLATIONS),
                Attribute("align_corners", "bool", False),
            ),
        ),
        # Amounts before and after, from the last dimension on, as torch counts them.
        Operator(
            "pad",
            55,
            attributes=(
                Attribute("amounts", "ints", (1, 1, 1, 1)),
                Attribute("mode", "choice", "constant", ("constant", "reflect", "replicate", "circular")),
                Attribute("value", "float", 0.0),
            ),
        ),
        Operator("add_scalar", 56, attributes=(Attribute("value", "float", 1.0),)),
        Operator("mul_scalar", 57, attributes=(Attribute("value", "float", 1.0),)),
        Operator("div_scalar", 58, attributes=(Attribute("value", "float", 1.0),)),
        # A tensor of the model as a value: one that is trained, or one that isn't.
        Operator("parameter", 59, inputs=0, tensors=("parameter",)),
        Operator("buffer", 60, inputs=0, tensors=("buffer",)),
        # The first input where the mask, the second, is false; elsewhere the value.
        Operator("masked_fill", 61, inputs=2, attributes=(Attribute("value", "float", 0.0),)),
        _pool("max_pool3d", 62, 3),
        _pool("avg_pool3d", 63, 3, average=True),
        Operator("adaptive_avg_pool3d", 64, attributes=(Attribute("output_size", "ints", (1, 1, 1)),)),
        Operator("adaptive_max_pool1d", 65, attributes=(Attribute("output_size", "ints", (1,)),)),
        Operator("adaptive_max_pool2d", 66, attributes=(Attribute("output_size", "ints", (1, 1)),)),
        _norm("instance_norm1d", 67),
        _norm("instance_norm2d", 68),
        _norm("instance_norm3d", 69),
        Operator(
            "rms_norm",
            70,
            tensors=("weight",),
            attributes=(Attribute("shape", "ints", ()), Attribute("eps", "float", 0.0)),
        ),
        Operator("selu", 71),
        Operator("celu", 72, attributes=(Attribute("alpha", "float", 1.0),)),
        Operator("mish", 73),
        Operator("softplus", 74, attributes=(Attribute("beta", "float", 1.0), Attribute("threshold", "float", 20.0))),
        Operator("softsign", 75),
        Operator("log_sigmoid", 76),
        Operator("clamp", 77, attributes=(Attribute("min", "float", 0.0), Attribute("max", "float", 1.0))),
        Operator("pow", 78, attributes=(Attribute("exponent", "float", 2.0),)),
        Operator("exp", 79),
        Operator("log", 80),
        Operator("sqrt", 81),
        Operator("rsqrt", 82),
        Operator("reciprocal", 83),
        Operator("abs", 84),
        Operator("neg", 85),
        Operator("sin", 86),
        Operator("cos", 87),
        Operator("erf", 88),
        Operator("maximum", 89, inputs=2),
        Operator("minimum", 90, inputs=2),
        # The first input is the mask: the second where it is true, the third elsewhere.
        Operator("where", 91, inputs=3),
        Operator(
            "compare_scalar",
            92,
            attributes=(Attribute("relation", "choice", "eq", _RELATIONS), Attribute("value", "float", 0.0)),
        ),
        Operator("logical_not", 93),
        # A floating-point type stands for the one that the network computes in.
        Operator("cast", 94, attributes=(Attribute("dtype", "choice", "float32", _DTYPES),)),
        # Coordinates of a dimension of the first input, by the whole numbers in the second, which has one dimension.
        Operator("take", 95, inputs=2, attributes=(Attribute("dim", "int", 1),)),
        # Over one dimension.
        Operator("argmax", 96, attributes=_REDUCTION),
        Operator("cumsum", 97, attributes=(Attribute("dim", "int", -1),)),
        Operator("compare", 98, inputs=2, attributes=(Attribute("relation", "choice", "eq", _RELATIONS),)),
        Operator("sign", 99),
        Operator("floor", 100),
        # To the nearest whole number, of two the even one.
        Operator("round", 101),
        Operator("log1p", 102),
        Operator("expm1", 103),
        # 0, 1, 2, … up to `size`, in int64; the input tells where to compute.
        Operator("arange", 104, attributes=(Attribute("size", "int", 1),)),
        # From a first state, batch × units: the hidden one, and for an LSTM the cell.
        _recurrent("lstm_from", 105, _RESULT, states=2),
        _recurrent("gru_from", 106, states=1),
        _recurrent("rnn_from", 107, _ACTIVATION, states=1),
        # The k largest, or smallest, of a dimension in their order, or where they lie.
        Operator(
            "topk",
            108,
            attributes=(
                Attribute("k", "int", 1),
                Attribute("dim", "int", -1),
                Attribute("largest", "bool", True),
                Attribute("result", "choice", "values", ("values", "indices")),
            ),
        ),
        # An element of a dimension of the first input for each of the whole numbers in the second, which is as large in
        # all other dimensions.
        Operator("gather", 109, inputs=2, attributes=(Attribute("dim", "int", 1),)),
    )
}

#: Roles of tensors that are statistics or masks, not parameters.
BUFFER_ROLES = ("running_mean", "running_var", "buffer")

OPERATOR_OF_OPCODE: dict[int, Operator] = {operator.opcode: operator for operator in OPERATORS.values()}
