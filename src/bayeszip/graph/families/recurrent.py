"""LSTM, GRU and plain recurrent layers: a unit is a row in every gate and a column of the recurrent weight."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from bayeszip.errors import ModelError
from bayeszip.graph.families.base import (
    UNKNOWN,
    Atoms,
    Attributes,
    Held,
    Rule,
    Shape,
    Site,
    SiteTensor,
    Values,
    along,
    elements,
)
from bayeszip.graph.lowering import Call, Lower, Lowered, Lowering, is_used, rank_of, shape_of
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS"]


class Recurrent(Rule):
    """One layer in one direction over batch × time × features, from a state of zeros, or from one that is given.

    Args:
        gates: how many blocks of rows the weights have.
        source: the block that new content comes from; a unit for which it is always zero never leaves zero.
    """

    optional = ("bias_ih", "bias_hh")
    floating = True

    def __init__(self, gates: int, source: int) -> None:
        self._gates, self._source = gates, source

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """weight_ih: rows × features; weight_hh: rows × units; both biases, of all rows, or none."""
        read, recurrent, *biases = tensors
        if read is None or recurrent is None or len(read) != 2 or len(recurrent) != 2 or not min(*read, *recurrent):
            raise ModelError(f"{node.op}: weights of shapes {read} and {recurrent} are no matrices of gates and units")
        rows = self._gates * recurrent[1]
        if read[0] != rows or recurrent[0] != rows or biases not in ([None, None], [(rows,), (rows,)]):
            raise ModelError(f"{node.op}: tensors of shapes {tuple(tensors)} don't fit {recurrent[1]} units")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape, *states), (read, recurrent, *_) = inputs, tensors
        if read is None or recurrent is None or len(shape) != 3 or shape[2] != read[1] or shape[1] < 1:
            raise ModelError(f"{node.op}: weights {read} and {recurrent} can't be applied to a value of shape {shape}")
        units = recurrent[1]
        if any(state != (shape[0], units) for state in states):
            raise ModelError(
                f"{node.op}: {units} units can't begin from states of shapes {', '.join(map(str, states))}"
            )
        return (shape[0], units) if node.attributes.get("result") == "cell" else (shape[0], shape[1], units)

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        # A step costs something however small it is.
        return inputs[0][1] * (4096 + sum(elements(each) for each in tensors if each is not None))

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        value = x[0].flip(1) if a["reverse"] else x[0]
        weights = [tensor for tensor in tensors if tensor is not None]
        zeros = value.new_zeros(1, value.shape[0], weights[1].shape[1])
        state, cell = [each[None].contiguous() for each in x[1:]] + [zeros, zeros][len(x) - 1 :]
        settings: tuple[Any, ...] = (weights, len(weights) == 4, 1, 0.0, False, False, True)
        if self._gates == 4:
            result, _, cell = torch.lstm(value, (state, cell), *settings)
            if a["result"] == "cell":
                return cell[0]
        elif self._gates == 3:
            result, _ = torch.gru(value, state, *settings)
        else:
            result, _ = (torch.rnn_relu if a["activation"] == "relu" else torch.rnn_tanh)(value, state, *settings)
        return result.flip(1) if a["reverse"] else result

    def couple(self, site: Site, atoms: Atoms) -> None:
        units = site.output.coordinates[-1]
        for each in site.inputs:
            atoms.join(each.coordinates[0], site.output.coordinates[0])
        for state in site.inputs[1:]:
            atoms.join(state.coordinates[-1], units)
        atoms.pin(site.inputs[0].coordinates[1])
        if len(site.output.shape) == 3:
            atoms.pin(site.output.coordinates[1])
        read, recurrent = self._weights(site)
        for tensor in site.tensors:
            if tensor is not None:
                atoms.join(tensor.coordinates[0], np.tile(units, self._gates))
        atoms.join(read.coordinates[1], site.inputs[0].coordinates[-1])
        atoms.join(recurrent.coordinates[1], units)

    def constants(self, site: Site) -> np.ndarray:
        """The units that never leave zero: they begin there, and nothing that isn't zero ever comes in."""
        read, recurrent = (self._block(tensor.values) for tensor in self._weights(site))
        inputs = along(site.inputs[0].constants, -1, site.inputs[0].shape[-1])
        quiet = ~(read[:, inputs != 0] != 0).any(axis=1)
        for bias in site.tensors[2:]:
            if bias is not None:
                quiet &= self._block(bias.values) == 0
        for state in site.inputs[1:]:
            quiet &= along(state.constants, -1, len(quiet)) == 0
        while True:
            still = quiet & ~(recurrent[:, ~quiet] != 0).any(axis=1)
            if np.array_equal(still, quiet):
                return np.where(quiet, 0.0, UNKNOWN).reshape((1,) * (len(site.output.shape) - 1) + (-1,))
            quiet = still

    def needs(self, site: Site, live: np.ndarray) -> None:
        read, recurrent = self._weights(site)
        units, columns = site.output.coordinates[-1], site.inputs[0].coordinates[-1]
        rows = np.tile(live[units], self._gates)
        zero = along(site.inputs[0].constants, -1, len(columns)) == 0
        live[columns[(read.values[rows] != 0).any(axis=0) & ~zero]] = True
        never = along(site.output.constants, -1, len(units)) == 0
        live[units[(recurrent.values[rows] != 0).any(axis=0) & ~never]] = True

    def _weights(self, site: Site) -> tuple[SiteTensor, SiteTensor]:
        read, recurrent = site.tensors[:2]
        if read is None or recurrent is None:
            raise ModelError(f"{site.node.op} has no weights")
        return read, recurrent

    def _block(self, rows: np.ndarray) -> np.ndarray:
        """The rows that new content comes from."""
        units = len(rows) // self._gates
        return rows[self._source * units : (self._source + 1) * units]


OPERATORS: dict[str, Rule] = {
    "lstm": Recurrent(gates=4, source=2),
    "gru": Recurrent(gates=3, source=2),
    "rnn": Recurrent(gates=1, source=0),
}
OPERATORS |= {f"{name}_from": rule for name, rule in OPERATORS.items()}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_recurrent(op: str, **attributes: AttributeValue) -> Lower:
    """All layers and directions of a recurrent module, one node each; its results are (output, states)."""

    def lower(lowering: Lowering, call: Call) -> Lowered:
        given = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
        begins_at_zero = all(_lower_is_zero(lowering, each) for each in given)
        states = [] if begins_at_zero else [lowering.value(each) for each in given]
        kind = op if begins_at_zero else f"{op}_from"
        has_biases, layers, both = call["has_biases"], call["num_layers"], call["bidirectional"]
        parameters = [lowering.tensor(each) for each in call["params"]]
        each_has = 4 if has_biases else 2
        if len(parameters) != each_has * layers * (2 if both else 1) or rank_of(call["input"]) != 3:
            raise call.unsupported("with projections or without a batch dimension")
        value = lowering.value(call["input"])
        value = value if call["batch_first"] else lowering.emit("permute", [value], dims=(1, 0, 2))
        batch, steps = -1, abs(shape_of(call["input"])[1 if call["batch_first"] else 0])
        hidden: list[int] = []
        cells: list[int] = []
        for layer in range(layers):
            outputs = []
            for direction in range(2 if both else 1):
                place = layer * (2 if both else 1) + direction
                start = place * each_has
                tensors = ([*parameters[start : start + each_has], None, None])[:4]
                settings: dict[str, AttributeValue] = {**attributes, "reverse": bool(direction)}
                read = [value, *(lowering.emit("select", [each], dim=0, index=place) for each in states)]
                outputs.append(lowering.emit(kind, read, tensors, **settings))
                units = int(call["params"][start + 1].meta["val"].shape[1])
                if is_used(call.node, 1):
                    last = lowering.emit("select", [outputs[-1]], dim=1, index=0 if direction else steps - 1)
                    hidden.append(lowering.emit("view", [last], shape=(1, batch, units)))
                if op == "lstm" and is_used(call.node, 2):
                    cell = lowering.emit(kind, read, tensors, **settings, result="cell")
                    cells.append(lowering.emit("view", [cell], shape=(1, batch, units)))
            value = outputs[0] if len(outputs) == 1 else lowering.emit("concat", outputs, dim=2)
        value = value if call["batch_first"] else lowering.emit("permute", [value], dims=(1, 0, 2))
        # A state that nobody takes has no node; the output stands in its place.
        return (value, *(_lower_joined(lowering, each, 0) if each else value for each in (hidden, cells)))

    return lower


def _lower_joined(lowering: Lowering, values: list[int], dim: int) -> int:
    return values[0] if len(values) == 1 else lowering.emit("concat", values, dim=dim)


def _lower_is_zero(lowering: Lowering, node: Any) -> bool:
    known = lowering.known(node)
    if known is not None:
        return not known.any()
    return isinstance(node, fx.Node) and str(node.target).split(".")[-2:-1] in (
        ["zeros"],
        ["new_zeros"],
        ["zeros_like"],
    )


ATEN: dict[str, Lower] = {
    "lstm": _lower_recurrent("lstm"),
    "gru": _lower_recurrent("gru"),
    "rnn_tanh": _lower_recurrent("rnn"),
    "rnn_relu": _lower_recurrent("rnn", activation="relu"),
}
