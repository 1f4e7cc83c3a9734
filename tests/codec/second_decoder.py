"""A second decoder of format versions 1 and 2, after docs/format.md: plain Python, slow, no checks but the checksum.

It shares no line with `bayeszip.codec`; both must read the same model from every file.
"""

import struct
from base64 import b64decode
from collections.abc import Sequence
from copy import copy
from functools import cache
from math import prod
from pathlib import Path

__all__ = ["read"]

DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2}
ROLES = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
MEMBERS: list[Sequence[str | None]] = [ROLES[:2], ROLES[:1], ROLES[1:2], ROLES, ROLES[:4], [None]]

# start weights and rate
CELLS = ((58000, 2764, 1017, 3407, 25080, 31457, 68523, 6664, 14420, 31457, 24538), 13)
VALUES = ((9000, 5000, 1000, 13000, 10000, 4000), 20)
FLAGS = ((20000, 20000, 20000, 20000, 20000), 120)
RAW = ((14000, 14000, 14000, 14000, 14000), 24)
PRIORS = (251, 376, 94, 222, 202, 305, 173, 111, 69, 26, 345)


def read(blob: bytes) -> dict:
    """{"tensors": {name: (shape, dtype or codebook as bytes, elements as ints)}, "nodes": …, "original": …}

    "scales": {name: (axis, codebook as bytes, elements)}; "grids": {name: kind and numbers, None for values}.
    """
    crc = 0xFFFFFFFF
    for byte in blob[:-4]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert blob[:4] == b"BAYZ"
    assert blob[-4:] == struct.pack("<I", crc ^ 0xFFFFFFFF)
    assert blob[4] >> 4 in (1, 2)
    version, number = blob[4] >> 4, blob[4] & 15
    if version == 2 and number > 8:
        blob, number = unpacked(blob), number - 8
    header = Header(blob[:-4], 5)
    coders: dict[int, type[Csr] | type[Context]] = {1: Csr, 2: Context}
    coder = coders[number](blob[header.at : -4], header)
    split = iter(streams_of(blob, header) if number == 2 and header.option else ())
    ways = ways_of(header) if number == 2 else {}
    tensors: dict[str, tuple[tuple[int, ...], str | bytes, list[int]]] = {}
    scales, grids = {}, {}
    for name, shape, kind in header.tensors:
        coder = next(split, coder)
        if kind < 16:
            tensors[name] = (shape, DTYPES[kind], coder.raw(shape, DTYPES[kind]))
            continue
        book = header.books[kind - 16]
        tensors[name] = (shape, book, coder.quantized(shape, book, kind, ways.get(name, 0)))
        grids[name] = header.grids[kind - 16]
        if header.scales.get(name):
            number, axis = divmod(header.scales[name] - 1, 2)
            book = header.books[number]
            scales[name] = (axis, book, coder.quantized(shape[axis : axis + 1], book, 16 + number))
    read = {"tensors": tensors, "nodes": header.nodes, "ends": header.ends, "original": header.original}
    return read | {"scales": scales, "grids": grids, "version": version}


@cache
def primed() -> "Octets":
    """The model that has learned the text on the page."""
    page = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
    text = b64decode(page.split("```primer\n")[1].split("```")[0])
    octets, known = Octets(), Known(text)
    for _ in text:
        octets.take(known)
    return octets


def unpacked(blob: bytes) -> bytes:
    """The file with its header as it would be if it weren't packed."""
    at, numbers = 5, []
    for _ in range(2):
        value = shift = 0
        while True:
            value, shift, at = value | (blob[at] & 127) << shift, shift + 7, at + 1
            if blob[at - 1] < 128:
                break
        numbers.append(value)
    size, length = numbers
    octets, stream = primed().copy(), Range(blob[at : at + length])
    return blob[:5] + bytes(octets.take(stream) for _ in range(size)) + blob[at + length :]


class Known:
    """Gives bits that are known, where a stream would have them read."""

    def __init__(self, octets: bytes) -> None:
        self.bits_left = [octet >> level & 1 for octet in reversed(octets) for level in range(8)]

    def bit(self, probability: int) -> int:
        return self.bits_left.pop()


class Octets:
    """The model of a header's octets."""

    def __init__(self) -> None:
        self.mixer, self.evidence = Mixer((16000,) * 7, 60), Evidence()
        self.seen: list[int] = []
        self.latest: dict[int, int] = {}
        self.expected, self.run = -1, 0

    def copy(self) -> "Octets":
        other = copy(self)
        other.mixer = copy(self.mixer)
        other.evidence = Evidence({key: [*pair] for key, pair in self.evidence.items()})
        other.seen, other.latest = [*self.seen], {**self.latest}
        return other

    def take(self, coder: "Known | Range") -> int:
        """The next octet."""
        seen = self.seen
        groups = [seen[max(len(seen) - order, 0) :] for order in range(5)]
        contexts = [context_of(group) for group in (*groups, seen[-4:][:1] if len(seen) > 3 else [])]
        likely = seen[self.expected] if self.expected >= 0 else None
        node, hopeful = 1, likely is not None
        for level in range(7, -1, -1):
            hoped = (likely or 0) >> level & 1
            keys = [(i, (c * 1000003 + node * 40503 >> 5) % 65536) for i, c in enumerate(contexts)]
            keys += [(6, 2 * min(self.run, 15) + hoped)] * hopeful
            inputs = [ln(self.evidence[key][1] + 6) - ln(self.evidence[key][0] + 6) for key in keys]
            bit = self.mixer.code(coder, inputs if hopeful else [*inputs, 0])
            for key in keys:
                self.evidence.learn(key, bit, 256)
            node, hopeful = 2 * node + bit, hopeful and bit == hoped
        seen.append(node - 256)
        self.expected, self.run = (self.expected + 1, self.run + 1) if hopeful else (-1, 0)
        if len(seen) > 2:
            place = context_of(seen[-3:]) % 65536
            self.expected = self.latest.get(place, -1) if self.expected < 0 else self.expected
            self.latest[place] = len(seen)
        return seen[-1]


def context_of(octets: Sequence[int]) -> int:
    value = 0
    for octet in octets:
        value = (773 * value + octet + 1) % 2**22
    return value


def ways_of(header: "Header") -> dict[str, int]:
    large = [name for name, shape, kind in header.tensors if kind > 15 and prod(shape) >= 4096][:4095]
    return {name: header.option >> 1 + 2 * place & 3 for place, name in enumerate(large)}


def streams_of(blob: bytes, header: "Header") -> "list[Context]":
    """For each tensor the coder of the stream that it is in."""
    counts, held = [0], 0
    for _, shape, _ in header.tensors:
        if header.option & 1 and held >= 1 << 19:
            counts, held = [*counts, 0], 0
        counts[-1] += 1
        held += prod(shape)
    lengths = [header.number() for _ in counts[1:]]
    coders, at = [], header.at
    for count, length in zip(counts, [*lengths, len(blob) - 4 - at - sum(lengths)], strict=True):
        coders += [Context(blob[at : at + length], header)] * count
        at += length
    return coders


class Header:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        flags = self.number()
        self.option = self.number() if flags & 8 else 0
        original = self.number() if flags & 2 else None
        names, shapes, before, chain = [], [], "", 0
        for _ in range(self.number()):
            step, members = divmod(self.number(), 8)
            if step:
                end = max(i + 1 for i, letter in enumerate(before) if letter in "0123456789")
                start = end
                while start and before[start - 1] in "0123456789" and end - start < 18:
                    start -= 1
                before = before[:start] + str(int(before[start:end]) + step) + before[end:]
            else:
                shared = self.number()
                before = (before.encode()[:shared] + self.take(self.number())).decode()
            rank, chained = divmod(self.number(), 2)
            shape = [self.number() for _ in range(rank - chained)]
            if chained:
                shape.insert(1 if rank > 1 else 0, chain)
            chain = shape[0] if rank > 1 else chain
            for place, role in enumerate(MEMBERS[members]):
                names.append(before if role is None else f"{before}.{role}" if before else role)
                shapes.append(() if role == "num_batches_tracked" else tuple(shape[: 1 if place else None]))
        kinds: list[int] = []
        while len(kinds) < len(names):
            kind, length = self.number(), self.number() + 1
            kinds += [kind] * length
        self.tensors = list(zip(names, shapes, kinds, strict=True))
        matrices = [name for name, shape, kind in self.tensors if kind > 15 and len(shape) > 1]
        scales: list[int] = []
        while flags & 16 and len(scales) < len(matrices):
            scale, length = self.number(), self.number() + 1
            scales += [scale] * length
        self.scales = dict(zip(matrices, scales, strict=True)) if flags & 16 else {}
        self.grids: list[tuple[float, ...] | None] = []
        self.books = [
            self.book() for _ in range(max([0, *(kind - 15 for kind in kinds), *((s + 1) // 2 for s in scales)]))
        ]
        self.nodes = [self.node() for _ in range(self.number())] if flags & 1 else None
        self.ends = (self.number(), [self.number() for _ in range(self.number())]) if flags & 4 else None
        self.original = sum(map(prod, shapes)) if original is None else original

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        byte = self.take(1)[0]
        return byte if byte < 128 else byte - 128 + 128 * self.number()

    def signed(self) -> int:
        value = self.number()
        return -(value + 1) // 2 if value % 2 else value // 2

    def book(self) -> bytes:
        head = self.number()
        if head in (1, 2, 3):
            count, form = divmod(self.number(), 4)
            numbers = struct.unpack(f"<{min(head, 2)}f", self.floats(min(head, 2), form))
            self.grids.append((head, count + 1, *numbers))
            magnitude, values = numbers[0], []
            for place in range(count):
                if head == 1:
                    values.append(numbers[0] * (-(place // 2 + 1) if place % 2 == 0 else place // 2 + 1))
                elif head == 2:
                    values.append(-magnitude if place % 2 == 0 else magnitude)
                    magnitude *= numbers[1] if place % 2 else 1.0
                else:
                    values.append(magnitude)
                    magnitude *= numbers[1]
            return struct.pack(f"<{count + 1}f", 0.0, *values)
        self.grids.append(None)
        return bytes(4) + self.floats(*divmod(head, 4))

    def floats(self, count: int, form: int) -> bytes:
        if form == 0:
            return b"".join(struct.pack("<f", *struct.unpack("<e", self.take(2))) for _ in range(count))
        if form == 1:
            return b"".join(b"\0\0" + self.take(2) for _ in range(count))
        if form == 2:
            return self.take(4 * count)
        fraction, exponent, lowest = self.take(3)
        width = 1 + exponent + fraction
        bits = "".join(f"{byte:08b}" for byte in self.take((count * width + 7) // 8))
        out = b""
        for start in range(0, count * width, width):
            word = bits[start : start + width]
            high = int(word[1 : 1 + exponent] or "0", 2) + lowest
            low = int(word[1 + exponent :] or "0", 2) << 23 - fraction
            out += struct.pack("<I", int(word[0]) << 31 | high << 23 | low)
        return out

    def node(self) -> tuple:
        from bayeszip.operators import OPERATOR_OF_OPCODE  # the list of operators is part of the format's definition

        opcode, special = divmod(self.number(), 2)
        operator = OPERATOR_OF_OPCODE[opcode]
        mask = self.number() if special else 0
        inputs = tensors = None
        if mask & 1:
            count = operator.inputs if operator.inputs >= 0 else self.number()
            inputs = [self.number() for _ in range(count)]
        if mask & 2:
            tensors = [self.number() for _ in operator.tensors]
        attributes: dict[str, object] = {}
        for place, attribute in enumerate(operator.attributes):
            if mask >> 2 + place & 1:
                value: object
                if attribute.kind == "bool":
                    value = not attribute.default
                elif attribute.kind == "int":
                    value = self.signed()
                elif attribute.kind == "ints":
                    value = tuple(self.signed() for _ in range(self.number()))
                elif attribute.kind == "choice":
                    value = attribute.choices[self.number()]
                else:
                    (value,) = struct.unpack("<d", self.take(8))
                attributes[attribute.name] = value
        varied = mask >> 2 + len(operator.attributes) & 1
        return (
            operator.name,
            inputs,
            tensors,
            attributes,
            [self.varied() for _ in range(self.number() if varied else 0)],
        )

    def varied(self) -> tuple:
        """(slot, (distance, dimension) pairs, factor, divisor, offset) of a number that follows sizes."""
        slot, (count, scaled) = self.number(), divmod(self.number(), 2)
        dims = [(self.number(), self.number()) for _ in range(count)]
        return slot, dims, *((self.signed(), self.number(), self.signed()) if scaled else (1, 1, 0))


class Csr:
    def __init__(self, data: bytes, header: Header) -> None:
        self.bits = "".join(f"{byte:08b}" for byte in data)
        self.at = 0
        self.codes = {}
        for kind, book in enumerate(header.books, 16):
            if self.get(1):
                width = self.get(3) + 1
                lengths = [self.get(width) for _ in range(len(book) // 4)]
                self.codes[kind] = self.code(lengths)

    def get(self, width: int) -> int:
        self.at += width
        return int(self.bits[self.at - width : self.at] or "0", 2)

    @staticmethod
    def code(lengths: list[int]) -> dict[str, int]:
        used = sorted((length, symbol) for symbol, length in enumerate(lengths) if length)
        if len(used) == 1:
            return {"": used[0][1]}
        words, word, before = {}, 0, 0
        for length, symbol in used:
            word <<= length - before
            words[f"{word:0{length}b}"] = symbol
            word, before = word + 1, length
        return words

    def raw(self, shape: tuple, dtype: str) -> list[int]:
        count, size = prod(shape), ITEM.get(dtype, 1)
        if not count or not self.get(1):
            return [0] * count
        return [int.from_bytes(bytes(self.get(8) for _ in range(size)), "little") for _ in range(count)]

    def quantized(self, shape: tuple, book: bytes, kind: int, way: int = 0) -> list[int]:
        size = prod(shape)
        out = [0] * size
        if not size or not self.get(1):
            return out
        transposed, drop_rows, drop_columns, width, count_width = (self.get(bits) for bits in (1, 1, 1, 5, 6))
        height = shape[0] if len(shape) > 1 else 1
        rows, columns = (size // height, height) if transposed else (height, size // height)
        stay = [row for row in range(rows) if not drop_rows or self.get(1)]
        kept = [column for column in range(columns) if not drop_columns or self.get(1)]
        counts = [self.get(count_width) + drop_rows for _ in stay]
        offsets = [self.get(width) for _ in range(sum(counts))]
        for row, count in zip(stay, counts, strict=True):
            column = -1
            for _ in range(count):
                column += offsets.pop(0) + 1
                word = ""
                while word not in self.codes[kind]:
                    word += str(self.get(1))
                place = kept[column] * (size // columns) + row if transposed else row * columns + kept[column]
                out[place] = self.codes[kind][word]
        return out


# ── the context coder ─────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def exp256(v: int) -> int:
    """exp(v / 256) · 2¹²⁰, as the format defines it: the truncated powers of the truncated exp(1 / 256)."""
    if v == 0:
        return 1 << 120
    if v == 1:
        total, term, order = 0, 1 << 120, 0
        while term:
            total, order = total + term, order + 1
            term //= 256 * order
        return total
    return exp256(v - 1) * exp256(1) >> 120


for _v in range(3072):
    exp256(_v)


@cache
def ln(count: int) -> int:
    if count >= 1 << 16:
        return ln(count >> 4) + 710
    low, high = 0, 2840
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exp256(middle) >> 80 <= count << 40 else (low, middle)
    return low


@cache
def squash(odds: int) -> int:
    odds = min(max(odds, -3071), 3071)
    e, one = exp256(abs(odds)) >> 80, 1 << 40
    upper = min(((e << 16) + (e + one) // 2) // (e + one), 65535)
    return min(max(upper if odds >= 0 else 65536 - upper, 4), 65532)


class Evidence(dict):
    """Pairs of counts, in sixteenths; [0, 0] at first."""

    def __missing__(self, key):
        self[key] = [0, 0]
        return self[key]

    def learn(self, key, bit: int, most: int) -> None:
        pair = self[key]
        pair[bit] += 16
        if pair[bit] > most:
            pair[0] >>= 1
            pair[1] >>= 1


class Mixer:
    def __init__(self, weights: tuple[int, ...], rate: int) -> None:
        self.weights, self.rate = [16 * weight for weight in weights], rate

    def code(self, coder: "Range | Known", inputs: list[int]) -> int:
        total = sum(weight * value for weight, value in zip(self.weights, inputs, strict=True))
        probability = squash(total + (1 << 19) >> 20)
        bit = coder.bit(probability)
        error = (65536 * bit - probability) * self.rate
        self.weights = [w + (value * error + (1 << 15) >> 16) for w, value in zip(self.weights, inputs, strict=True)]
        return bit


class Range:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data + bytes(5), 5
        self.value, self.width = int.from_bytes(self.data[:5], "big"), 1 << 40

    def bit(self, probability: int) -> int:
        split = self.width * probability >> 16
        bit = int(self.value < split)
        if bit:
            self.width = split
        else:
            self.value, self.width = self.value - split, self.width - split
        while self.width <= 1 << 32:
            self.width <<= 8
            self.value = self.value << 8 | (self.data[self.at] if self.at < len(self.data) else 0)
            self.at += 1
        return bit

    def bits(self, count: int) -> int:
        value = 0
        for _ in range(count):
            value = 2 * value + self.bit(1 << 15)
        return value


class Context(Range):
    def __init__(self, data: bytes, header: Header) -> None:
        super().__init__(data)
        self.cell_mixer, self.value_mixer = Mixer(*CELLS), Mixer(*VALUES)
        self.flag_mixers = [Mixer(*FLAGS), Mixer(*FLAGS)]
        self.shared: dict[int, Evidence] = {}
        self.raws: dict[int, tuple] = {}
        self.units: list[int] = []

    def quantized(self, shape: tuple, book: bytes, kind: int, way: int = 0) -> list[int]:
        size = prod(shape)
        out = [0] * size
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        if size and self.bits(1):
            self.filled(shape, size, rows, columns, book, kind, out, way)
        if size and len(shape) > 1 and not (size > 1 << 19 and min(rows, columns) < 16):
            self.units = [sum(map(bool, out[row * columns : (row + 1) * columns])) for row in range(rows)]
        return out

    def filled(self, shape, size: int, rows: int, columns: int, book: bytes, kind: int, out: list, way: int) -> None:
        kernel, lag = prod(shape[2:]), shape[-1] if len(shape) > 3 and 1 < shape[-1] < 64 else 0
        if size > 1 << 19 and min(rows, columns) < 16:
            rows, columns, kernel, lag = -(-size // 4096), 4096, 1, 0
        flagged = rows > 1
        density = self.bits(5)
        mixed = size <= 1 << 19 and size >> (density + 1) // 2 <= 1 << 17 and not way
        if mixed and flagged and not lag:
            lag = self.bits(6)
        units = self.units if len(self.units) > 1 and columns % len(self.units) == 0 else []
        live_rows, live_columns = [1] * rows, [1] * columns
        if flagged:
            live_rows = self.flags(rows, [], 0, self.flag_mixers[0])
            live_columns = self.flags(columns, units, lag, self.flag_mixers[1])
        values = struct.unpack(f"<{len(book) // 4}f", book)[1:]
        order = [0, *(1 + place for place in sorted(range(len(values)), key=values.__getitem__))]
        levels = (len(values) - 1).bit_length()
        if mixed:
            self.mixed(out, live_rows, live_columns, kernel, lag, density, units, len(values), levels, kind)
        elif way > 1:
            self.neighbors(out, live_rows, live_columns, kernel, lag, values, way == 3)
        else:
            self.counted(out, live_rows, live_columns, len(values), levels)
        out[:] = [order[rank] for rank in out]

    def flags(self, count: int, units: list[int], lag: int, mixer: Mixer) -> list[int]:
        flags: list[int] = []
        evidence = Evidence()
        for place in range(count):

            def back(distance: int) -> int:
                return flags[place - distance] if 0 < distance <= place else 0  # noqa: B023

            one, two = back(1), back(2)
            behind, beside = back(lag), back(lag - 1) if lag > 1 else 0
            busy = 1 + min(units[place * len(units) // count], 6) if units else 0
            keys = [0, (1, one, two), (2, one, behind, beside), (3, busy), (4, busy, one, behind)]
            bit = mixer.code(self, [ln(evidence[key][1] + 8) - ln(evidence[key][0] + 8) for key in keys])
            for key in keys:
                evidence.learn(key, bit, 1 << 20)
            flags.append(bit)
        return flags

    def mixed(self, out, rows, columns, kernel, lag, density, units, values, levels, kind) -> None:
        share = min(max((55109, 38968)[density % 2] >> density // 2, 16), 60000)
        ones = [max(1, prior * share >> 16) for prior in PRIORS]
        assumed = [(max(1, prior - one), one) for prior, one in zip(PRIORS, ones, strict=True)]
        evidence, value_evidence = Evidence(), Evidence()
        shared = self.shared.setdefault(kind, Evidence())
        width = len(columns)

        def odds(pair: list[int], index: int) -> int:
            return ln(pair[1] + assumed[index][1]) - ln(pair[0] + assumed[index][0])

        above = None
        for row in (row for row, live in enumerate(rows) if live):
            in_kernel = last = found = 0
            level, since = above is not None, None
            for column in range(width):
                in_kernel = 0 if column % kernel == 0 else in_kernel
                if not columns[column]:
                    continue
                at = row * width + column

                def before(distance: int) -> int:
                    return out[at - distance] if 0 < distance <= column else 0  # noqa: B023

                far = lag if lag > 1 else 0
                near = [before(1), before(2)]
                near += [before(far), before(far + 1), before(far - 1), before(2 * far)] if far else [0] * 4
                near += [before(lag + 2), before(lag - 2)] if lag > 2 else [0] * 2
                up = [0, 0, 0]
                if row:
                    up = [out[at - width], out[at - width - 1] if column else 0]
                    up.append(out[at - width + 1] if column + 1 < width else 0)
                channel = before(kernel) if kernel > 1 else 0
                crowd = sum(map(bool, near)) + bool(near[0]) + bool(near[2])
                unit = 1 + min(units[column * len(units) // width], 7) if units else 0
                in_row = bucket(evidence[1, row])
                pair = min(in_kernel, 7) + 8 * (bool(near[0]) + bool(near[2])) if kernel > 1 else min(crowd, 9)
                wide = sum(map(bool, out[max(at - 4, row * width) : at]))
                for back in (lag, 2 * lag, 3 * lag) if lag > 2 else ():
                    wide += sum(map(bool, out[max(at - back - 4, row * width) : max(min(at - back + 5, at), 0)]))
                twin = above is not None and out[above * width + column] > 0
                if level:
                    order = 3 + min(found, 2) if twin else 2
                else:
                    order = 0 if since is None else 6 + min(since.bit_length(), 7)
                keys = [
                    0,
                    (1, row),
                    (2, column),
                    (3, *map(bool, up), bool(channel), min(crowd, 3)),
                    (4, *map(bool, near[:6])),
                    (5, min(wide, 15), in_row),
                    (6, unit),
                    (7, in_row, bucket(evidence[2, column])),
                    (8, pair),
                    (9, order),
                ]
                base = odds(evidence[0], 0)
                inputs = [base] + [odds(evidence[key], index) - base for index, key in enumerate(keys) if index]
                around = [column] + [column + sign * step for step in (1, lag) if step for sign in (-1, 1)]
                pairs = [evidence[2, place] for place in around if 0 <= place < width]
                inputs.append(odds([sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)], 10) - base)
                bit = self.cell_mixer.code(self, inputs)
                for key in keys:
                    evidence.learn(key, bit, 1 << 20)
                in_kernel += bit
                found += bit
                if level and bit != twin:
                    level, since = False, 0
                elif bit:
                    since = None
                elif since is not None:
                    since += 1
                if bit:
                    left, back, back_left, back_right = near[0], near[2], near[3], near[4]
                    count = 2 * bool(left) + 2 * bool(back) + bool(back_left) + bool(back_right)
                    total = 2 * left + 2 * back + back_left + back_right
                    contexts = [
                        last,
                        first_bits((2 * total + count) // (2 * count) if count else 0, levels - 4),
                        first_bits(left or back or back_left or back_right, levels - 4),
                        (first_bits(left or back_left, levels - 2), first_bits(back or back_right, levels - 2)),
                    ]
                    rank = self.value_of(contexts, values, levels, value_evidence, shared)
                    out[at] = rank + 1
                    last = 1 + (rank >> max(levels - 2, 0))
            above = row

    def value_of(self, contexts, values, levels, evidence, shared) -> int:
        node = 1
        for level in range(levels - 1, -1, -1):
            if (2 * node + 1 << level) - (1 << levels) >= values:
                node *= 2
                continue
            keys: list[tuple[Evidence, object]] = [(evidence, node), (shared, node)]
            if node < 256:
                keys += [(evidence, (place, context, node)) for place, context in enumerate(contexts)]
            inputs = [ln(table[key][1] + 8) - ln(table[key][0] + 8) for table, key in keys]
            bit = self.value_mixer.code(self, inputs + [0] * (6 - len(inputs)))
            for table, key in keys:
                table.learn(key, bit, 1 << 20)
            node = 2 * node + bit
        return node - (1 << levels)

    def neighbors(self, out, rows, columns, kernel, lag, values, dependent) -> None:
        negative, spread, width = sum(value < 0 for value in values), 32 * self.bits(7), len(columns)
        if dependent and len(rows) > 1 and not lag:
            lag = self.bits(6)
        numbers: dict[tuple[int, int], int] = {}
        below, above_zero = [negative], [len(values) - negative]
        if dependent:
            below, above_zero = [negative // 2, (negative + 1) // 2], [above_zero[0] // 2, (above_zero[0] + 1) // 2]
        levels = (below[-1] + above_zero[-1] - 1).bit_length()
        inputs = (16384,) * 7 if dependent else (19660,) * 6
        learned = []
        for _ in below:
            mixers = [Mixer((65536,) if level < levels - 8 else inputs, 20) for level in range(levels)]
            learned.append((Evidence(), [*mixers, Mixer(inputs, 20)]))
        state, sums = 0, [0] * width

        def size(total: int, parts: int) -> int:
            return min(max((ln(16 * total // parts + 1) - spread + 384) // 96, 0), 7) if total else 0

        def line(total: int, cells: int) -> int:
            return min(max((ln(16 * total // cells + 1) - spread + 288) // 64, 0), 7) if cells else 4

        def side(number: int) -> int:
            if not number:
                return 0
            way = min(max((ln(16 * abs(number) + 1) - spread + 760) // 224, 0), 4)
            return way if number > 0 else -way

        for live_rows, row in enumerate(row for row in range(len(rows)) if rows[row]):
            total = cells = 0
            for column in (column for column in range(width) if columns[column] and row * width + column < len(out)):

                def there(up: int, back: int) -> int:
                    return numbers.get((row - up, column - back), 0)  # noqa: B023

                left, left2, above, higher = there(0, 1), there(0, 2), there(1, 0), there(2, 0)
                before, back = there(0, kernel) if kernel > 1 else 0, there(0, lag) if lag > 1 else 0
                magnitudes = [2 * left, 2 * above, before, left2, higher, there(1, 1), there(1, -1)]
                parts = 9
                if dependent and lag:
                    magnitudes, parts = [*magnitudes, 2 * back, there(0, lag + 1), there(0, lag - 1)], 13
                contexts = [
                    (),
                    (1, size(sum(map(abs, magnitudes)), parts)),
                    (2, size(abs(left) + abs(left2), 2), side(left)),
                    (3, size(abs(above) + abs(higher), 2), side(above)),
                    (4, side(before), side(back)),
                    (5, side(2 * left - left2), side(left + above - there(1, 1))),
                ]
                if dependent:
                    contexts.append((6, line(total, cells), line(sums[column], live_rows)))
                odd = state & 1 if dependent else 0
                index = self.index(*learned[odd], contexts, below[odd], above_zero[odd], levels)
                number = index
                if dependent:
                    number = 2 * index - odd * ((index > 0) - (index < 0))
                    state = state >> 1 ^ (2 if index % 2 else 0) ^ (5 if odd else 0)
                numbers[row, column] = number
                out[row * width + column] = number + negative + (number < 0) if number else 0
                total, cells, sums[column] = total + abs(number), cells + 1, sums[column] + abs(number)

    def index(self, evidence, mixers, contexts, below: int, above: int, levels: int) -> int:
        """How many values away from 0.0, of those at hand: `below` it and `above` it."""
        node = 0
        for level in range(levels, -1, -1):
            bit = 0
            if below + above and (not node or (2 * node + 1 << level) - (1 << levels) < below + above):
                keys = [(context, node) for context in (contexts if node < 256 else [()])]
                bit = mixers[level].code(self, [ln(evidence[k][1] + 8) - ln(evidence[k][0] + 8) for k in keys])
                for key in keys:
                    evidence.learn(key, bit, 1 << 12)
            node = 2 * node + bit
            if not node:
                return 0
        rank = node - (1 << levels)
        return rank - below + (rank >= below)

    def counted(self, out, rows, columns, values, levels) -> None:
        width, live_rows, weights, cells = len(columns), 0, 0, 0
        start = [squash(2 * 64 * (step - 16)) for step in range(32)]
        table: dict = {}
        column_ones, scores = [0] * width, [0] * width

        def score(ones: int, zeros: int, base: int) -> int:
            part = squash(base) * 128 >> 16
            return min(max(ln(16 * ones + part + 1) - ln(16 * zeros + 128 - part + 1) - base >> 1, -1024), 1023)

        def adaptive(key, first: int) -> int:
            probability, count = table.get(key, (first, 0))
            bit = self.bit(probability)
            moved = probability + ((65536 * bit - probability) * ((2 << 16) // (2 * count + 3)) >> 16)
            table[key] = (min(max(moved, 8), 65528), min(count + 1, 254))
            return bit

        for row in (row for row, live in enumerate(rows) if live):
            base = ln(weights + 1) - ln(cells - weights + 1)
            if live_rows % 16 == 0:
                scores = [score(ones, live_rows - ones, base) for ones in column_ones]
            ones = seen = own = left = 0
            for column in range(min(width, len(out) - row * width)):
                if not columns[column]:
                    continue
                at = row * width + column
                if seen % 32 == 0:
                    own = (base >> 1) + 1024 + score(ones, seen - ones, base)
                step = min(max(own + scores[column] >> 6, 0), 31)
                left = adaptive(("cell", step, left, bool(row and out[at - width])), start[step])
                seen += 1
                if left:
                    ones += 1
                    column_ones[column] += 1
                    node = 1
                    for level in range(levels - 1, -1, -1):
                        possible = (2 * node + 1 << level) - (1 << levels) < values
                        node = 2 * node + (adaptive(("value", node), 1 << 15) if possible else 0)
                    out[at] = node - (1 << levels) + 1
            live_rows, weights, cells = live_rows + 1, weights + ones, cells + seen

    def raw(self, shape: tuple, dtype: str) -> list[int]:
        count, size = prod(shape), ITEM.get(dtype, 1)
        if not count or not self.bits(1):
            return [0] * count
        noise = self.bits(size) if count >= 512 else 0
        evidence, mixers = self.raws.setdefault(size, (Evidence(), [Mixer(*RAW) for _ in range(size)]))
        row = shape[-1] if len(shape) > 1 else 2
        elements: list[bytes] = []
        for element in range(count):
            one = elements[-1] if element else bytes(size)
            two = elements[-2] if element > 1 else None
            distant = elements[element - row] if element >= row else bytes(size)
            point = 2 * int.from_bytes(one, "big") - int.from_bytes(two, "big") if two is not None else 0
            pointed = (point % 256**size).to_bytes(size, "big")
            octets, onward = b"", True
            for place in range(size):
                if noise >> place & 1:
                    octets += bytes([self.bits(8)])
                    continue
                higher = octets[place - 1] if place else 0
                astray = None if onward else -1
                keys = [(0,), (1, one[place]), (2, higher), (3, distant[place]), (4, astray or pointed[place])]
                node = 1
                for _ in range(8):
                    inputs = [
                        ln(evidence[place, key, node][1] + 6) - ln(evidence[place, key, node][0] + 6) for key in keys
                    ]
                    bit = mixers[place].code(self, inputs)
                    for key in keys:
                        evidence.learn((place, key, node), bit, 1 << 14)
                    node = 2 * node + bit
                octets += bytes([node - 256])
                onward = onward and octets[place] == pointed[place]
            elements.append(octets)
        words = [int.from_bytes(octets, "big") for octets in elements]
        if dtype in ("float32", "float16", "bfloat16", "float64"):
            words = [word >> 1 | (word & 1) << 8 * size - 1 for word in words]
        return words


def bucket(pair: list[int]) -> int:
    ones, zeros = pair[1] // 16, pair[0] // 16
    if not ones:
        return 0 if zeros < 4 else 1 if zeros < 16 else 2 if zeros < 64 else 3
    return 11 - min(((ones + zeros) // ones).bit_length() - 1, 7)


def first_bits(symbol: int, shift: int) -> int:
    return 1 + (symbol - 1 >> max(shift, 0)) if symbol else 0
