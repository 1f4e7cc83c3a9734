"""The paper's coder: sparse rows and Huffman codes, one for each codebook. Raw tensors are stored as they are."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bayeszip.codec.bits import BitReader, BitWriter
from bayeszip.codec.compilation import prepare
from bayeszip.codec.csr import WIDEST, Layout, SymbolRows, choose_layout, read_entries, read_layout, write_entries
from bayeszip.codec.csr import write_layout as write_csr_layout
from bayeszip.codec.header import Outline, TensorOutline, codebook_length, scaled
from bayeszip.codec.huffman import HuffmanCode
from bayeszip.codec.parts import Part
from bayeszip.codec.syntax import CorruptPayload, InvalidField, NotCanonical, TrailingBytes
from bayeszip.errors import ModelError
from bayeszip.tensors import RAW_DTYPES, CompressedModel, QuantizedTensor, RawTensor

__all__ = ["PaperCoder"]

_PIECE = 1 << 18


@dataclass(frozen=True)
class PaperCoder:
    """CSR + Huffman. `offset_bits` fixes the width of column offsets (the paper: 5 or 8); None: the best is sought."""

    offset_bits: int | None = None

    def __post_init__(self) -> None:
        width = self.offset_bits
        if width is not None and (not isinstance(width, int) or isinstance(width, bool) or not 1 <= width <= WIDEST):
            raise ModelError(f"offset_bits is {width!r}, must be from 1 to {WIDEST}")

    @property
    def option(self) -> int:
        return self.offset_bits or 0

    @property
    def version(self) -> int:
        return 1

    def settled(self, model: CompressedModel) -> "PaperCoder":
        return self

    @classmethod
    def of_option(cls, option: int) -> "PaperCoder":
        if option > WIDEST:
            raise InvalidField(f"offsets of {option} bits don't exist")
        return cls(option or None)

    def write(self, model: CompressedModel, outline: Outline) -> bytes:
        """Code tables, then tensors in order."""
        prepare(outline.memory)
        layouts = {
            described: choose_layout(tensor.symbols.reshape(-1), tensor.shape, self.offset_bits)
            for described, tensor in _quantized(model, outline)
            if tensor.nonzero
        }
        out = BitWriter()
        codes = _codes(model, outline, layouts)
        for code in codes:
            out.put(code is not None, 1)
            if code is not None:
                code.write(out)
        for described, tensor in _in_order(model, outline):
            if isinstance(tensor, RawTensor):
                _write_raw(out, tensor)
            else:
                _write_quantized(out, tensor, layouts.get(described), codes[described.codebook or 0])
        return out.to_bytes()

    def read(
        self, outline: Outline, data: bytes, start: int, end: int, parts: list[Part]
    ) -> dict[str, QuantizedTensor | RawTensor]:
        """The tensors in `data[start:end]`; what took which bits is added to `parts`."""
        prepare(outline.memory)
        source = BitReader(data, start, end)
        codes = []
        for codebook in outline.codebooks:
            used = source.get(1, "a code's mark")
            codes.append(HuffmanCode.read(source, codebook_length(codebook)) if used else None)
        parts.append(Part(None, "codes", 8 * start, source.position))
        tensors: dict[str, QuantizedTensor | RawTensor] = {}
        for described in outline.tensors:
            if described.dtype is not None:
                tensors[described.name] = _read_raw(source, described, described.dtype, parts)
                continue
            tensor = _read_quantized(source, described, outline, codes, parts)
            if described.scale is not None:
                begin = source.position
                tensor = scaled(tensor, _read_quantized(source, described.scale, outline, codes, []), described.axis)
                parts.append(Part(described.name, "scales", begin, source.position))
            tensors[described.name] = tensor
        if source.end - source.position >= 8:
            raise TrailingBytes(f"{(source.end - source.position) // 8} bytes follow the last tensor")
        parts.append(Part(None, "padding", source.position, 8 * end))
        if source.get(source.end - source.position, "the end"):
            raise NotCanonical("the last byte is not filled with zeros")
        if self.write(CompressedModel(tensors), outline) != data[start:end]:
            raise NotCanonical("the weights are not laid out in the prescribed way")
        return tensors


def _in_order(model: CompressedModel, outline: Outline) -> Iterator[tuple[TensorOutline, QuantizedTensor | RawTensor]]:
    """All tensors, each with the vector of its scales behind it."""
    for described in outline.tensors:
        tensor = model.tensors[described.name]
        yield described, tensor
        if described.scale is not None and isinstance(tensor, QuantizedTensor) and tensor.scale is not None:
            yield described.scale, tensor.scale


def _quantized(model: CompressedModel, outline: Outline) -> Iterator[tuple[TensorOutline, QuantizedTensor]]:
    for described, tensor in _in_order(model, outline):
        if isinstance(tensor, QuantizedTensor):
            yield described, tensor


def _codes(model: CompressedModel, outline: Outline, layouts: dict[TensorOutline, Layout]) -> list[HuffmanCode | None]:
    """A code for each codebook that any entry uses, over the symbols of all its tensors and their padding."""
    counts = [np.zeros(codebook_length(codebook), dtype=np.int64) for codebook in outline.codebooks]
    for described, tensor in _quantized(model, outline):
        layout = layouts.get(described)
        if layout is not None:
            found = _histogram(tensor)
            found[0] = layout.padding
            counts[described.codebook or 0] += found
    return [HuffmanCode.of_counts(found) if found.any() else None for found in counts]


def _histogram(tensor: QuantizedTensor) -> np.ndarray:
    """How often each symbol occurs; piece by piece, since numpy counts in wide integers."""
    symbols = tensor.symbols.reshape(-1)
    found = np.zeros(tensor.codebook.size, dtype=np.int64)
    for start in range(0, symbols.size, _PIECE):
        found += np.bincount(symbols[start : start + _PIECE], minlength=found.size)
    return found


def _write_quantized(out: BitWriter, tensor: QuantizedTensor, layout: Layout | None, code: HuffmanCode | None) -> None:
    """A bit that says if there is any weight but 0; then the layout and the entries. Nothing for an empty tensor."""
    if not tensor.size:
        return
    out.put(layout is not None, 1)
    if layout is not None and code is not None:
        write_csr_layout(out, layout)
        write_entries(out, SymbolRows.of(tensor.symbols.reshape(-1), tensor.shape, layout.transposed), layout, code)


def _read_quantized(
    source: BitReader,
    described: TensorOutline,
    outline: Outline,
    codes: list[HuffmanCode | None],
    parts: list[Part],
) -> QuantizedTensor:
    begin = source.position
    filled = described.size and source.get(1, "a tensor's mark")
    symbols = np.zeros(described.size, dtype=np.uint8 if outline.symbols(described) <= 2**8 else np.uint16)
    name = described.name
    if filled:
        code = codes[described.codebook or 0]
        if code is None:
            raise CorruptPayload("a tensor has weights, but there is no code for them")
        layout = read_layout(source, described.size, described.shape)
        offsets, entries = read_entries(
            source, SymbolRows.of(symbols, described.shape, layout.transposed), layout, code
        )
        parts.append(Part(name, "rows", begin, offsets))
        parts.append(Part(name, "offsets", offsets, entries))
        parts.append(Part(name, "values", entries, source.position))
    else:
        parts.append(Part(name, "rows", begin, source.position))
    symbols.flags.writeable = False
    return QuantizedTensor(symbols.reshape(described.shape), outline.values(described), outline.grid(described))


def _write_raw(out: BitWriter, tensor: RawTensor) -> None:
    octets = np.frombuffer(tensor.values.tobytes(), dtype=np.uint8)
    if octets.size:
        out.put(int(octets.any()), 1)
    if octets.any():
        out.put_all(octets, 8)


def _read_raw(source: BitReader, described: TensorOutline, dtype: str, parts: list[Part]) -> RawTensor:
    held = RAW_DTYPES[dtype]
    count = described.size * held.itemsize
    begin = source.position
    if count and source.get(1, "a tensor's mark"):
        octets = source.get_all(count, 8, "a raw tensor")
    else:
        octets = np.zeros(count, dtype=np.uint8)
    if dtype == "bool" and octets.max(initial=0) > 1:
        raise CorruptPayload("a bool is neither 0 nor 1")
    parts.append(Part(described.name, "raw", begin, source.position))
    octets.flags.writeable = False
    return RawTensor(octets.view(held).reshape(described.shape), dtype)
