"""A stream of tensors, range-coded, every decision by an adaptive probability.

Nothing travels that a decoder can find out by itself. A tensor begins with a bit that says if it holds any weight;
then come its density, its lag, its live rows and columns, and its live cells.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bayeszip.codec.compilation import prepare
from bayeszip.codec.counting import Counts, code_counted, price_ranks
from bayeszip.codec.header import Outline, TensorOutline, scaled
from bayeszip.codec.matrix import MOST_LAG, SPARSEST, Survey, View, count_rows, survey_of, translate, view_of
from bayeszip.codec.mixing import Flags, Memory, MixingModel, code_flags, code_mixed, deepest_levels, price_values
from bayeszip.codec.neighbors import LAG_BITS, SPREAD_BITS, Neighbors, code_neighbors, lag_of, spread_of
from bayeszip.codec.parts import Part
from bayeszip.codec.pricing import Pricing
from bayeszip.codec.rangecoder import RangeDecoder, RangeEncoder, Span
from bayeszip.codec.rawbytes import LEAST_NOISE, RawMemory, code_raw, from_planes, noise_of, planes_of
from bayeszip.codec.syntax import CorruptPayload, NotCanonical
from bayeszip.codec.ways import DEPENDENT, NEIGHBORS, USUAL, Ways
from bayeszip.tensors import RAW_DTYPES, CompressedModel, QuantizedTensor, RawTensor

__all__ = ["Stream", "ranks_of"]

_DENSITY_BITS = SPARSEST.bit_length()
_LAG_BITS = (MOST_LAG - 1).bit_length()
_BLOCK = 1 << 18
_NO_UNITS = np.zeros(0, dtype=np.int64)


def ranks_of(codebook: np.ndarray) -> np.ndarray:
    """The place of each symbol when values are sorted; 0.0, which is no weight, stays at 0."""
    ranks = np.zeros(codebook.size, dtype=np.int64)
    ranks[1 + np.argsort(codebook[1:], kind="stable")] = np.arange(1, codebook.size)
    return ranks


class Stream:
    """Codes tensors in either direction; holds what the models learn from one tensor to the next.

    Every method takes what is to be written and returns what was coded, which is the same; a decoder's caller hands
    in zeros. `told` is where the last survey ended.
    """

    def __init__(self, coder: RangeEncoder | RangeDecoder, outline: Outline, ways: Ways | None = None) -> None:
        self.coder = coder
        self.outline = outline
        self.ways = ways or {}
        self.memory = Memory.fresh()
        self.raw_memory: dict[int, RawMemory] = {}
        self.told = 0
        self.shared: dict[int, np.ndarray] = {}
        self.ranks = -1, _NO_UNITS  # of the codebook that was used last
        self.units = _NO_UNITS

    def write(self, model: CompressedModel, pricings: Mapping[str, Pricing]) -> dict[str, np.ndarray]:
        """Writes all tensors in order; returns the symbols of those with a pricing, as it chose them."""
        chosen = {}
        for described in self.outline.tensors:
            tensor = model.tensors[described.name]
            if isinstance(tensor, QuantizedTensor):
                pricing = pricings.get(described.name)
                symbols = self.quantized(described, tensor.symbols.reshape(-1), pricing)
                if pricing is not None:
                    chosen[described.name] = symbols.reshape(tensor.shape)
                if described.scale is not None and tensor.scale is not None:
                    self.quantized(described.scale, tensor.scale.symbols)
            else:
                self.raw(described, planes_of(tensor.values, tensor.dtype))
        return chosen

    def read(self, parts: list[Part]) -> dict[str, QuantizedTensor | RawTensor]:
        """The tensors in order; what took which bytes is added to `parts`."""
        tensors: dict[str, QuantizedTensor | RawTensor] = {}
        for described in self.outline.tensors:
            begin = self.coder.position
            if described.dtype is None:
                tensor: QuantizedTensor | RawTensor = self.read_quantized(described)
            else:
                tensor = self.read_raw(described, described.dtype)
            told = max(begin, self.told)
            parts.append(Part(described.name, "layout", 8 * begin, 8 * told))
            parts.append(Part(described.name, "weights", 8 * told, 8 * self.coder.position))
            if described.scale is not None and isinstance(tensor, QuantizedTensor):
                begin = self.coder.position
                tensor = scaled(tensor, self.read_quantized(described.scale), described.axis)
                parts.append(Part(described.name, "scales", 8 * begin, 8 * self.coder.position))
            tensors[described.name] = tensor
        return tensors

    def quantized(self, described: TensorOutline, symbols: np.ndarray, pricing: Pricing | None = None) -> np.ndarray:
        """Writes a tensor's symbols; returns them, or what a pricing chose in their place."""
        if not symbols.size:
            return symbols
        filled = bool(symbols.any())
        self.coder.bits(int(filled), 1)
        view = self._view(described)
        if filled:
            coded = symbols.copy()  # the loops write back what they code
            translate(coded, self._ranks(described))
            self._cells(described, view, self._survey(view, survey_of(coded, view)), coded, pricing)
            translate(coded, np.argsort(self._ranks(described)))
            symbols = coded
        self._remember(described, view, symbols)
        return symbols

    def read_quantized(self, described: TensorOutline) -> QuantizedTensor:
        symbols = np.zeros(described.size, dtype=np.uint8 if self.outline.symbols(described) <= 2**8 else np.uint16)
        if symbols.size:
            view = self._view(described)
            if self.coder.bits(0, 1):
                self._read_filled(described, view, symbols)
            self._remember(described, view, symbols)
        symbols.flags.writeable = False
        codebook, grid = self.outline.values(described), self.outline.grid(described)
        return QuantizedTensor(symbols.reshape(described.shape), codebook, grid)

    def _read_filled(self, described: TensorOutline, view: View, symbols: np.ndarray) -> None:
        if self.outline.symbols(described) == 1:
            raise CorruptPayload("a tensor has weights, but no value for them")
        survey = self._survey(view, None)
        self._cells(described, view, survey, symbols)
        if not symbols.any() or survey_of(symbols, view) != survey:
            raise NotCanonical("a tensor's rows, columns, density or lag are not the ones that its weights show")
        translate(symbols, np.argsort(self._ranks(described)))

    def _view(self, described: TensorOutline) -> View:
        view = view_of(described.shape)
        return replace(view, quick=True) if self.ways.get(described) else view

    def _ranks(self, described: TensorOutline) -> np.ndarray:
        number = described.codebook or 0
        if self.ranks[0] != number:
            self.ranks = number, ranks_of(self.outline.values(described))
        return self.ranks[1]

    def _survey(self, view: View, known: Survey | None) -> Survey:
        """What is said beforehand: the density; the lag, where it isn't known; live rows; live columns."""
        density = self.coder.bits(known.density if known else 0, _DENSITY_BITS)
        lag = view.lag
        if view.seeks_lag(density):
            lag = self.coder.bits(known.lag if known else 0, _LAG_BITS)
        rows = known.rows.copy() if known else np.ones(view.rows, dtype=np.uint8)
        columns = known.columns.copy() if known else np.ones(view.columns, dtype=np.uint8)
        if view.flagged:
            prepare(rows.size + columns.size)
            self.coder.reserve(3 * (rows.size + columns.size))
            self._run(code_flags, rows, _NO_UNITS, 0, self.memory.flags[0], Flags.fresh())
            self._run(code_flags, columns, self._inputs(view), lag, self.memory.flags[1], Flags.fresh())
        self.told = self.coder.position
        return Survey(rows, columns, density, lag)

    def _inputs(self, view: View) -> np.ndarray:
        """How busy the units are that the columns belong to, if the layer before has the right number of units."""
        count = self.units.size
        return self.units if count > 1 and view.columns % count == 0 else _NO_UNITS

    def _busy(self, view: View) -> np.ndarray:
        """For each column 1 + the weights of its unit, 8 at most; 0 without units."""
        units = self._inputs(view)
        if not units.size:
            return np.zeros(view.columns, dtype=np.int64)
        return np.repeat(1 + np.minimum(units, 7), view.columns // units.size)

    def _run(self, loop: Callable[..., Span], *arguments: Any) -> None:
        """Lets a loop code from where the coder is."""
        self.coder.span = loop(self.coder.span, self.coder.buffer, self.coder.end, *arguments)

    def _cells(
        self,
        described: TensorOutline,
        view: View,
        survey: Survey,
        symbols: np.ndarray,
        pricing: Pricing | None = None,
    ) -> None:
        values = self.outline.symbols(described) - 1
        levels = deepest_levels(values)
        prepare(int(np.count_nonzero(survey.rows)) * int(np.count_nonzero(survey.columns)))
        if view.mixed(survey.density):
            self.coder.reserve(2 * view.size * (levels + 1) + 16)
            shared = self.shared.setdefault(described.codebook or 0, np.zeros((2, 1 << levels), dtype=np.int32))
            model = MixingModel.of(view, survey, levels, shared)
            self._run(code_mixed, symbols, survey.rows, self._busy(view), view.kernel, survey.lag,
                      self.memory.cells, self.memory.values, values, levels, model, pricing)  # fmt: skip
            if pricing is not None:
                price_values(pricing.asked, values, levels, self.memory.values, model, pricing)
            shared[:] = model.value_zeros[: 1 << levels], model.value_ones[: 1 << levels]
            return
        if self.ways.get(described, USUAL) in (NEIGHBORS, DEPENDENT):
            self._neighbors(described, view, survey, symbols)
            return
        counts = Counts.of(view, levels)
        rows = max(1, _BLOCK // view.columns)
        for first in range(0, view.rows, rows):
            last = min(first + rows, view.rows)
            self.coder.reserve(2 * (last - first) * view.columns * (levels + 1) + 16)
            self._run(code_counted, symbols, survey.rows, survey.columns, first, last, values, levels, counts,
                      pricing)  # fmt: skip
        if pricing is not None:
            price_ranks(pricing.asked, values, levels, counts.values)

    def _neighbors(self, described: TensorOutline, view: View, survey: Survey, symbols: np.ndarray) -> None:
        """Codes the mean magnitude and, of dependent values, a lag; then the live cells."""
        values = self.outline.symbols(described) - 1
        negative = int(np.count_nonzero(self.outline.values(described)[1:] < 0))
        dependent = self.ways.get(described) == DEPENDENT
        levels = deepest_levels((negative + 1) // 2 + (values - negative + 1) // 2 if dependent else values)
        cells = int(np.count_nonzero(survey.rows)) * int(np.count_nonzero(survey.columns))
        spread = self.coder.bits(spread_of(symbols, negative, cells), SPREAD_BITS)
        seeks = dependent and view.flagged and not view.lag
        lag = self.coder.bits(lag_of(symbols, negative, view), LAG_BITS) if seeks else view.lag
        model = Neighbors.of(view, levels, values, spread, lag, dependent)
        rows = max(1, _BLOCK // view.columns)
        for first in range(0, view.rows, rows):
            last = min(first + rows, view.rows)
            self.coder.reserve(2 * (last - first) * view.columns * (levels + 1) + 16)
            self._run(code_neighbors, symbols, survey.rows, survey.columns, first, last, view.kernel, lag,
                      negative, values, levels, dependent or None, model)  # fmt: skip
        if spread_of(symbols, negative, cells) != spread or (seeks and lag_of(symbols, negative, view) != lag):
            raise NotCanonical("a tensor's mean magnitude or lag is not the one that its weights show")

    def _remember(self, described: TensorOutline, view: View, symbols: np.ndarray) -> None:
        """The weights in each row of a matrix: its units are the inputs of the matrix or bias that follows."""
        if len(described.shape) > 1 and view.rows == described.shape[0]:
            self.units = count_rows(symbols, view.rows)

    def raw(self, described: TensorOutline, planes: np.ndarray) -> np.ndarray:
        """Codes a raw tensor's bytes: if any is not 0; which places are noise; then all elements."""
        count, size = planes.shape
        if not count or not self.coder.bits(int(planes.any()), 1):
            return planes
        noise = self.coder.bits(noise_of(planes), size) if count >= LEAST_NOISE else 0
        if size not in self.raw_memory:
            self.raw_memory[size] = RawMemory.fresh(size)
        memory = self.raw_memory[size]
        prepare(8 * planes.size)
        row = described.shape[-1] if len(described.shape) > 1 else 2
        for first in range(0, count, _BLOCK):
            last = min(first + _BLOCK, count)
            self.coder.reserve(16 * size * (last - first) + 16)
            self._run(code_raw, planes.reshape(-1), size, first, last, row, noise, memory)
        if not planes.any() or noise_of(planes) != noise:
            raise NotCanonical("a raw tensor's noise is not where it should be")
        return planes

    def read_raw(self, described: TensorOutline, dtype: str) -> RawTensor:
        held = RAW_DTYPES[dtype]
        planes = self.raw(described, np.zeros((described.size, held.itemsize), dtype=np.uint8))
        if dtype == "bool" and planes.max(initial=0) > 1:
            raise CorruptPayload("a bool is neither 0 nor 1")
        values = from_planes(planes, dtype, held)
        values.flags.writeable = False
        return RawTensor(values.reshape(described.shape), dtype)
