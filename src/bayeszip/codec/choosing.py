"""What a model costs in the context coder, and which symbols are worth their bits: both by the coder's own loops."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from bayeszip.codec.contexts import Stream, ranks_of
from bayeszip.codec.header import outline_of
from bayeszip.codec.packed import header_in_file
from bayeszip.codec.pricing import Pricing
from bayeszip.codec.rangecoder import PROBABILITY_BITS, RangeEncoder
from bayeszip.errors import ModelError
from bayeszip.tensors import Aim, CompressedModel, Prices, QuantizedTensor, TensorPrices

__all__ = ["cheapest", "prices"]

#: magic, version and coder, checksum
_FRAME_BYTES = 9
_NOTHING = np.zeros(0)


def prices(model: CompressedModel) -> Prices:
    """What the coder "context" asks for a model; in all, the size of its file, but for the last byte or so.

    Where all of a row, a column or a tensor is zero, its weights are not coded; a weight that is not zero is taken to
    cost there what it costs where it is dearest in the tensor.
    """
    pricings = {
        name: Pricing.of(tensor.size, _values_by_rank(tensor), _NOTHING, _NOTHING) for name, tensor in _quantized(model)
    }
    bits, _ = _coded(model, pricings)
    told = {name: _prices_of(tensor, pricings[name]) for name, tensor in _quantized(model)}
    return Prices(told, bits - sum(float(each.paid.sum()) for each in told.values()))


def cheapest(model: CompressedModel, aims: Mapping[str, Aim], strength: float, *, passes: int = 4) -> CompressedModel:
    """The model with the symbols that make distance from their aims + `strength` · ln 2 · bits of the file small.

    Tensors are walked through in the order of the file. Each weight becomes zero, the value nearest to its mean, one of
    the two beside that, or stays what it was: whichever is cheapest in its context, as the choices before have made it.
    Prices change with choices, so all is done again as long as the sum falls; it never grows. Where all of a row, a
    column or a tensor is zero, it stays so. Tensors without an aim stay as they are, and so do codebooks.

    Args:
        aims: by the names of quantized tensors.
        strength: what a bit is worth, in units of ln 2 nats.
        passes: how often each weight is considered, at most.
    """
    strangers = [name for name in aims if not isinstance(model.tensors.get(name), QuantizedTensor)]
    if strangers:
        raise ModelError(f"only quantized tensors of the model can have an aim, not {', '.join(strangers)}")
    if not 0 < strength < math.inf:
        raise ModelError(f"the worth of a bit must be positive and finite, not {strength}")
    least = _cost(model, aims, strength)
    for _ in range(passes):
        _, symbols = _coded(model, {name: _aimed(model, name, aim, strength) for name, aim in aims.items()})
        tensors = {name: replace(tensor, symbols=symbols[name]) for name, tensor in _quantized(model) if name in aims}
        chosen = replace(model, tensors={**model.tensors, **tensors})
        cost = _cost(chosen, aims, strength)
        if cost >= least:
            break
        model, least = chosen, cost
    return model


def _cost(model: CompressedModel, aims: Mapping[str, Aim], strength: float) -> float:
    """Distance and bits of the whole, in nats."""
    missed = sum(aim.missed_by(_tensor(model, name).dequantize()) for name, aim in aims.items())
    return missed + strength * math.log(2) * _coded(model, {})[0]


def _coded(model: CompressedModel, pricings: Mapping[str, Pricing]) -> tuple[float, dict[str, np.ndarray]]:
    """The bits of a whole file, and the symbols that pricings chose."""
    outline, encoder = outline_of(model), RangeEncoder()
    symbols = Stream(encoder, outline).write(model, pricings)
    return 8 * (_FRAME_BYTES + len(header_in_file(outline)[0])) + encoder.spent, symbols


def _quantized(model: CompressedModel) -> Iterator[tuple[str, QuantizedTensor]]:
    return ((name, tensor) for name, tensor in model.tensors.items() if isinstance(tensor, QuantizedTensor))


def _tensor(model: CompressedModel, name: str) -> QuantizedTensor:
    tensor = model.tensors[name]
    if not isinstance(tensor, QuantizedTensor):
        raise ModelError(f"{name} is not quantized")
    return tensor


def _values_by_rank(tensor: QuantizedTensor) -> np.ndarray:
    """The shared values as the loops number them: 0.0, then all others, sorted."""
    return np.concatenate([[0.0], np.sort(tensor.codebook[1:].astype(np.float64), kind="stable")])


def _aimed(model: CompressedModel, name: str, aim: Aim, strength: float) -> Pricing:
    """The aim in units of the codebook, distances in bits."""
    tensor = _tensor(model, name)
    scales = np.broadcast_to(tensor.row_scales().astype(np.float64), tensor.shape)
    means = np.divide(aim.means, scales, out=np.zeros(tensor.shape), where=scales != 0)
    worth = np.broadcast_to(aim.precisions, tensor.shape) * np.square(scales) / (2 * strength * math.log(2))
    return Pricing.of(tensor.size, _values_by_rank(tensor), means.reshape(-1), worth.reshape(-1))


def _prices_of(tensor: QuantizedTensor, pricing: Pricing) -> TensorPrices:
    coded = pricing.weight > 0
    dearest = float(pricing.weight.max(initial=0.0)) or float(PROBABILITY_BITS)
    return TensorPrices(
        zero=pricing.zero.reshape(tensor.shape),
        nonzero=np.where(coded, pricing.weight, dearest).reshape(tensor.shape),
        value=pricing.asked[ranks_of(tensor.codebook)],
        paid=pricing.paid.reshape(tensor.shape),
    )
