"""The default coder: every decision by an adaptive probability, in one range-coded stream or several side by side.

A large network's tensors are in streams that know nothing of each other, so that threads can take one each; the bytes
are the same however many there are.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bayeszip.codec.contexts import Stream
from bayeszip.codec.header import OPTION_BITS, Outline, TensorOutline, outline_of
from bayeszip.codec.matrix import survey_of, view_of
from bayeszip.codec.parts import Part
from bayeszip.codec.rangecoder import RangeDecoder, RangeEncoder
from bayeszip.codec.syntax import InvalidField, Number, Reader
from bayeszip.codec.threads import side_by_side
from bayeszip.codec.trellis import depends, states_along
from bayeszip.codec.ways import (
    DEPENDENT,
    LEAST_CELLS,
    NEIGHBORS,
    QUICK,
    USUAL,
    Ways,
    choosable,
    grouped,
    option_of,
    ways_of,
)
from bayeszip.errors import ModelError
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor, UniformGrid

__all__ = ["ContextCoder"]

#: networks with more elements are split into streams, and coded quickly where the thorough model gains little
_LARGE = 1 << 22
#: cells at the beginning of a tensor that ways are tried on
_SAMPLE = 1 << 16
#: the thorough model must save a fiftieth of a tensor in a large network, neighbors a two-hundredth of any
_WORTH_THOROUGH, _WORTH_NEIGHBORS = 50, 200
#: what the quick model takes to learn, in bytes of a sample
_LEARNING = 32
#: bytes that all models together may take beside the tensors; of one stream's, for each byte of a raw element, a column
_SPARE, _MODEL, _RAW_MODEL, _COLUMN = 24 << 20, 2 << 20, 17 << 16, 24
_LENGTH = Number("length of a stream")


@dataclass(frozen=True)
class ContextCoder:
    """Adaptive contexts and a range coder.

    Args:
        ways: how it codes, as `bayeszip.codec.ways` counts; 0 writes what version 1 could. None: as suits the model.
    """

    ways: int | None = None

    def __post_init__(self) -> None:
        ways = self.ways
        if ways is not None and (not isinstance(ways, int) or isinstance(ways, bool) or not 0 <= ways < 2**OPTION_BITS):
            raise ModelError(f"ways is {ways!r}, must be a number from 0 to 2^{OPTION_BITS} - 1")

    @property
    def option(self) -> int:
        return self.ways or 0

    @property
    def version(self) -> int:
        return 2 if self.ways else 1

    @classmethod
    def of_option(cls, option: int) -> "ContextCoder":
        return cls(option)

    def settled(self, model: CompressedModel) -> "ContextCoder":
        return self if self.ways is not None else ContextCoder(_suitable(model))

    def write(self, model: CompressedModel, outline: Outline) -> bytes:
        """The lengths of all streams but the last, then the streams."""
        try:
            ways = ways_of(outline, self.option)
        except InvalidField as error:
            raise ModelError(f"the ways {self.ways} don't suit the model: {error}") from error
        for tensor, way in ways.items():
            if way == DEPENDENT and states_along(_numbers(model, tensor), view_of(tensor.shape)) is None:
                raise ModelError(f"the ways {self.ways} don't suit the model: {tensor.name} is on no path of a trellis")
        groups = grouped(outline, self.option)
        tasks = [partial(_written, model, replace(outline, tensors=group), ways) for group in groups]
        streams = side_by_side(tasks, _most_threads(outline, groups))
        head = bytearray()
        for stream in streams[:-1]:
            _LENGTH.write(head, len(stream))
        return bytes(head) + b"".join(streams)

    def read(
        self, outline: Outline, data: bytes, start: int, end: int, parts: list[Part]
    ) -> dict[str, QuantizedTensor | RawTensor]:
        """The tensors in `data[start:end]`; what took which bytes is added to `parts`."""
        ways, groups = ways_of(outline, self.option), grouped(outline, self.option)
        source = Reader(data, start, end)
        lengths = [_LENGTH.read(source) for _ in groups[1:]]
        begin, tasks = source.position, []
        if groups[1:]:
            parts.append(Part(None, "streams", 8 * start, 8 * begin))
        for group, length in zip(groups, [*lengths, None], strict=True):
            until = end if length is None else begin + length
            if until > end:
                raise InvalidField(f"a stream of {length} bytes reaches beyond the end of the file")
            tasks.append(partial(_read, replace(outline, tensors=group), ways, data, begin, until))
            begin = until
        tensors: dict[str, QuantizedTensor | RawTensor] = {}
        for found, told in side_by_side(tasks, _most_threads(outline, groups)):
            tensors |= found
            parts += told
        return tensors


def _most_threads(outline: Outline, groups: list[tuple[TensorOutline, ...]]) -> int:
    """As many as keep their models, beside the tensors, within what reading a file may take."""

    def models(group: tuple[TensorOutline, ...]) -> int:
        raw = {outline.itemsize(tensor) for tensor in group if tensor.dtype is not None}
        columns = max((view_of(tensor.shape).columns for tensor in group), default=0)
        return _MODEL + _RAW_MODEL * sum(raw) + _COLUMN * columns

    return max(1, (_SPARE + outline.memory) // max(map(models, groups)))


def _written(model: CompressedModel, outline: Outline, ways: Ways) -> bytes:
    encoder = RangeEncoder()
    Stream(encoder, outline, ways).write(model, {})
    return encoder.finish()


def _read(
    outline: Outline, ways: Ways, data: bytes, start: int, end: int
) -> tuple[dict[str, QuantizedTensor | RawTensor], list[Part]]:
    decoder, parts = RangeDecoder(data, start, end), list[Part]()
    tensors = Stream(decoder, outline, ways).read(parts)
    parts.append(Part(None, "end", 8 * decoder.position, 8 * end))
    decoder.finish()
    return tensors, parts


# ── which ways suit a model: found by trial, the same for the same model ──────────────────────────────────────────────


def _suitable(model: CompressedModel) -> int:
    """The ways that a model is coded in where nobody says so."""
    outline = outline_of(model)
    large, tensors = outline.elements > _LARGE, choosable(outline)
    tasks = [partial(_best_way, outline, tensor, _symbols(model, tensor), large) for tensor in tensors]
    ways = dict(zip(tensors, side_by_side(tasks), strict=True))
    for tensor in tensors:
        on_steps = isinstance(outline.grid(tensor), UniformGrid)
        if on_steps and depends(_numbers(model, tensor), view_of(tensor.shape)):
            ways[tensor] = DEPENDENT
    return option_of(outline, large, ways)


def _symbols(model: CompressedModel, described: TensorOutline) -> np.ndarray:
    tensor = model.tensors[described.name]
    return tensor.symbols.reshape(-1) if isinstance(tensor, QuantizedTensor) else np.zeros(0, dtype=np.uint8)


def _numbers(model: CompressedModel, described: TensorOutline) -> np.ndarray:
    """The multiples of a step that a tensor on a uniform grid has."""
    symbols = _symbols(model, described).astype(np.int64)
    return np.where(symbols % 2, -(symbols + 1) // 2, symbols // 2)


def _best_way(outline: Outline, described: TensorOutline, symbols: np.ndarray, large: bool) -> int:
    """Neighbors are tried on dense tensors; the quick model in place of the thorough one, in large networks."""
    weights = int(np.count_nonzero(symbols))
    dense = weights >= LEAST_CELLS and 4 * weights >= symbols.size
    if not weights or not (dense or large):
        return USUAL
    view = view_of(described.shape)
    thorough = view.mixed(survey_of(symbols, replace(view, quick=True)).density)
    inner = symbols.size // described.shape[0]
    count = min(max(1, _SAMPLE // inner), described.shape[0])
    sample, part = symbols[: count * inner], replace(described, shape=(count, *described.shape[1:]), scale=None)

    def cost(way: int) -> int:
        encoder = RangeEncoder()
        Stream(encoder, outline, {part: way}).quantized(part, sample)
        return encoder.position

    best, least = USUAL, cost(USUAL if thorough else QUICK)
    if large and thorough:
        quick = cost(QUICK)
        if (quick - _LEARNING) * (_WORTH_THOROUGH - 1) <= least * _WORTH_THOROUGH:
            best, least = QUICK, quick
    if dense and cost(NEIGHBORS) * _WORTH_NEIGHBORS < least * (_WORTH_NEIGHBORS - 1):
        best = NEIGHBORS
    return best
