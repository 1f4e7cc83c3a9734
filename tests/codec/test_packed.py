"""Packed headers: shorter, the same on every way there and back, and refused unless they are just that."""

import re
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from codec_models import compressed_models, lenet
from hypothesis import given, settings
from hypothesis import strategies as st
from second_decoder import unpacked

from bayeszip.codec import CODERS, decode, describe, encode, measure
from bayeszip.codec.checksum import crc32c
from bayeszip.codec.header import outline_of, outline_parts, write_outline
from bayeszip.codec.packed import header_in_file, pack, packed_parts, unpack
from bayeszip.codec.primer import PRIMER
from bayeszip.codec.syntax import InvalidField, NotCanonical, Reader, TrailingBytes, Truncated, UnknownCoder
from bayeszip.errors import FormatError, ModelError
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor

PAGE = Path(__file__).parent.parent.parent / "docs" / "format.md"


def repaired(body: bytes) -> bytes:
    return body + crc32c(body).to_bytes(4, "little")


def residual(blocks: int) -> CompressedModel:
    """A network that says the same again and again."""
    rng, codebook = np.random.default_rng(1), np.array([0, 0.5, -0.5], dtype=np.float32)
    names = [f"layer{stage}.{block}.conv{number}" for stage in (1, 2) for block in range(blocks) for number in (1, 2)]
    return CompressedModel({
        f"{name}.weight": QuantizedTensor(rng.integers(0, 3, (8, 8, 3, 3)).astype(np.uint8), codebook) for name in names
    })  # fmt: skip


@given(octets=st.binary(max_size=300))
def test_any_octets_come_back(octets):
    packed = pack(octets)
    source = Reader(b"before" + packed + b"behind", 6, 6 + len(packed))
    assert unpack(source) == octets
    assert source.position == 6 + len(packed)


def packed_if_allowed(model, coder):
    """None: the header repeats itself more than is allowed, as that of a codebook of zeros does."""
    try:
        return encode(model, coder=coder, packed=1)
    except ModelError:
        return None


@pytest.mark.parametrize("coder", CODERS)
@settings(max_examples=40)
@given(model=compressed_models())
def test_a_model_comes_back_from_either_header(coder, model):
    plain, packed = encode(model, coder=coder, packed=0), packed_if_allowed(model, coder)
    if packed is None:
        assert encode(model, coder=coder) == plain
        return
    assert decode(plain) == decode(packed) == model
    for way, blob in enumerate((plain, packed)):
        assert describe(blob).options["packed"] == way
        assert encode(model, coder=coder, **describe(blob).options) == blob
    assert (describe(packed).version, packed[4] & 8) == (2, 8)
    assert encode(model, coder=coder) == min(plain, packed, key=len)
    assert measure(model, coder=coder) == min(len(plain), len(packed))


@settings(max_examples=40)
@given(model=compressed_models())
def test_parts_of_a_packed_header_add_up(model):
    outline = outline_of(model)
    parts = packed_parts(outline)
    assert sum(parts.values()) == len(pack(write_outline(outline)))
    assert all(size >= 0 for size in parts.values())
    assert (parts["graph"] == 0) == (model.graph is None)


def test_what_repeats_costs_next_to_nothing():
    once, often = (outline_of(residual(blocks)) for blocks in (4, 16))
    plain = len(write_outline(often)) - len(write_outline(once))
    packed = len(header_in_file(often)[0]) - len(header_in_file(once)[0])
    assert packed < plain / 8


def test_names_and_nodes_as_people_write_them_cost_little():
    outline = outline_of(lenet())
    plain, packed = outline_parts(outline), packed_parts(outline)
    assert all(packed[part] <= 0.75 * plain[part] for part in ("header", "graph"))
    assert describe(encode(lenet())).options["packed"] == 1


def test_the_text_that_is_learned_first_is_the_one_on_the_page():
    (block,) = re.findall(r"```primer\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert b64decode(block) == PRIMER


def test_the_second_decoder_unpacks_the_same():
    blob = encode(residual(3), packed=1)
    header = write_outline(outline_of(residual(3)))
    assert unpacked(blob)[5 : 5 + len(header)] == header


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda head, stream: (head[0], len(stream) + 1, stream), Truncated),
        (lambda head, stream: (head[0] + 1, len(stream), stream), FormatError),
        (lambda head, stream: (head[0] - 1, len(stream), stream), FormatError),
        (lambda head, stream: (head[0], len(stream) + 1, stream + b"\0"), FormatError),
        (lambda head, stream: (16 * len(stream) + 65, len(stream), stream), InvalidField),
        (lambda head, stream: (2**60, len(stream), stream), InvalidField),
        (lambda head, stream: (0, 0, b""), Truncated),
    ],
)
def test_other_lengths_are_refused(damage, error):
    packed = pack(write_outline(outline_of(CompressedModel({}))))
    size, length, stream = damage((packed[0], packed[1]), packed[2:])
    body = b"BAYZ\x2a" + number(size) + number(length) + stream
    with pytest.raises(error):
        decode(repaired(body))


def number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_octets_behind_the_header_are_refused():
    header = write_outline(outline_of(CompressedModel({})))
    with pytest.raises(TrailingBytes, match="follow the header"):
        decode(repaired(b"BAYZ\x2a" + pack(header + b"\1")))


def test_a_header_that_is_not_canonical_stays_so_when_it_is_packed():
    # Zero layers, told in two bytes.
    with pytest.raises(NotCanonical):
        decode(repaired(b"BAYZ\x2a" + pack(b"\0\x80\0")))


def test_version_1_has_no_packed_headers():
    blob = encode(lenet(), packed=1)
    with pytest.raises(UnknownCoder):
        decode(repaired(blob[:4] + bytes([blob[4] & 15 | 16]) + blob[5:-4]))


def test_what_repeats_itself_too_much_stays_plain():
    nodes = (Node("input", (0,), (), {"shape": (3,)}), *(Node("relu", (place,)) for place in range(1, 3000)))
    model = CompressedModel({}, Graph(1, nodes, (3000,)))
    assert describe(encode(model)).options["packed"] == 0
    with pytest.raises(ModelError, match="leave it plain"):
        encode(model, packed=1)


def test_every_prefix_is_refused_and_no_file_has_a_twin():
    blob = encode(residual(2), packed=1)
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            decode(blob[:length])
    refused = 0
    for bit in range(40, 8 * (5 + len(pack(write_outline(outline_of(residual(2))))))):
        damaged = bytearray(blob[:-4])
        damaged[bit // 8] ^= 1 << bit % 8
        other = repaired(bytes(damaged))
        try:
            model, options = decode(other), describe(other).options
        except FormatError:
            refused += 1
        else:
            assert encode(model, **options) == other
    assert refused
