"""How a file of version 2 is coded, as one number: in streams side by side or not, and each large tensor in which way.

Bit 0: streams. Then two bits for each quantized tensor of 4096 cells or more, in order.
"""

from bayeszip.codec.header import OPTION_BITS, Outline, TensorOutline
from bayeszip.codec.syntax import InvalidField
from bayeszip.tensors import UniformGrid

__all__ = [
    "DEPENDENT",
    "LEAST_CELLS",
    "NEIGHBORS",
    "QUICK",
    "USUAL",
    "Ways",
    "choosable",
    "grouped",
    "option_of",
    "ways_of",
]

#: by its size and density; by the quick model, whatever these; by the model that looks at neighbors; by the same, as
#: multiples of a step that depend on those before
USUAL, QUICK, NEIGHBORS, DEPENDENT = range(4)
#: smaller tensors have no choice
LEAST_CELLS = 1 << 12
_MOST_CHOICES = (OPTION_BITS - 1) // 2
#: a stream ends with the tensor that brings it to so many elements
_STREAM = 1 << 19

#: the way of each tensor that isn't coded as usual
Ways = dict[TensorOutline, int]


def choosable(outline: Outline) -> list[TensorOutline]:
    """The tensors that have a choice."""
    large = [tensor for tensor in outline.tensors if tensor.dtype is None and tensor.size >= LEAST_CELLS]
    return large[:_MOST_CHOICES]


def option_of(outline: Outline, streams: bool, ways: Ways) -> int:
    """The number that says so."""
    option = int(streams)
    for place, tensor in enumerate(choosable(outline)):
        option |= ways.get(tensor, USUAL) << 1 + 2 * place
    return option


def ways_of(outline: Outline, option: int) -> Ways:
    """What a number says about the tensors."""
    tensors = choosable(outline)
    if option >> 1 + 2 * len(tensors):
        raise InvalidField(f"the coder's option names more ways of coding than the {len(tensors)} large tensors have")
    ways = {tensor: option >> 1 + 2 * place & 3 for place, tensor in enumerate(tensors)}
    for tensor, way in ways.items():
        if way == DEPENDENT and not isinstance(outline.grid(tensor), UniformGrid):
            raise InvalidField(f"the coder's option says that {tensor.name!r} has a step, but it has none")
    return {tensor: way for tensor, way in ways.items() if way}


def grouped(outline: Outline, option: int) -> list[tuple[TensorOutline, ...]]:
    """The tensors of each stream: consecutive ones, until they have 2¹⁹ elements together."""
    if not option & 1:
        return [outline.tensors]
    groups: list[list[TensorOutline]] = [[]]
    held = 0
    for tensor in outline.tensors:
        if held >= _STREAM:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.size
    return [tuple(group) for group in groups]
