"""Whole files: there and back, and nothing but what was written."""

import os
import threading

import numpy as np
import pytest
from codec_models import compressed_models, lenet
from hypothesis import given, settings

from bayeszip.codec import CODERS, Limits, container, decode, describe, encode, inspect, measure, read
from bayeszip.codec.checksum import crc32c
from bayeszip.codec.syntax import (
    ChecksumMismatch,
    LimitExceeded,
    NotBayesZip,
    TrailingBytes,
    Truncated,
    UnknownCoder,
    UnsupportedVersion,
)
from bayeszip.errors import FormatError, ModelError
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

ALL_CODERS = pytest.mark.parametrize("coder", CODERS)


def repaired(body: bytes) -> bytes:
    """A file whose checksum fits again."""
    return body + crc32c(body).to_bytes(4, "little")


def test_checksum_is_crc32c():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@ALL_CODERS
@given(model=compressed_models())
def test_any_model_comes_back(coder, model):
    blob = encode(model, coder=coder)
    decoded = decode(blob)
    assert decoded == model
    assert list(decoded.tensors) == list(model.tensors)
    assert encode(decoded, coder=coder) == blob
    assert measure(model, coder=coder) == len(blob)


@ALL_CODERS
@settings(max_examples=50)
@given(model=compressed_models())
def test_parts_add_up(coder, model):
    blob = encode(model, coder=coder)
    description = describe(blob)
    assert inspect(blob) == (model, description)
    whole = sum(description.parts.values()) + sum(tensor.bytes for tensor in description.tensors)
    assert whole == description.bytes == len(blob)
    assert [tensor.nonzero for tensor in description.tensors] == [t.nonzero for t in model.tensors.values()]


def test_the_header_is_taken_apart_by_what_it_tells():
    few = QuantizedTensor(np.array([0, 1, 2]), np.array([0.0, 0.1, 0.2], dtype=np.float32))
    raw = RawTensor(np.zeros(3, dtype="<f4"), "float32")
    graphless, bookless, whole = (
        describe(encode(model, packed=0)).parts
        for model in (CompressedModel({"a": few}), CompressedModel({"a": raw}), lenet())
    )
    # Two float32 values and how many there are.
    assert (graphless["graph"], graphless["codebooks"]) == (0, 9)
    assert (bookless["graph"], bookless["codebooks"]) == (0, 0)
    assert whole["graph"] > len(lenet().graph.nodes)


@pytest.mark.parametrize("offset_bits", [5, 8])
def test_the_papers_widths_can_be_asked_for(offset_bits):
    blob = encode(lenet(), coder="csr-huffman", offset_bits=offset_bits)
    assert describe(blob).options["offset_bits"] == offset_bits
    assert decode(blob) == lenet()
    assert len(blob) >= len(encode(lenet(), coder="csr-huffman"))


@ALL_CODERS
def test_every_prefix_and_every_flipped_bit_is_refused(coder):
    blob = encode(lenet(density=0.0005), coder=coder)
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            decode(blob[:length])
    for bit in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            decode(bytes(damaged))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda blob: b"", NotBayesZip),
        (lambda blob: b"PK\x03\x04" + blob, NotBayesZip),
        (lambda blob: blob[:8], Truncated),
        (lambda blob: blob[:4] + b"\x3f" + blob[5:], UnsupportedVersion),
        (lambda blob: blob[:4] + b"\x1f" + blob[5:], UnknownCoder),
        (lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), ChecksumMismatch),
        (lambda blob: repaired(blob[:-4] + b"\x00"), TrailingBytes),
    ],
)
def test_damaged_files_have_named_errors(damage, error):
    with pytest.raises(error):
        decode(damage(encode(lenet(), coder="csr-huffman")))


@ALL_CODERS
def test_limits_hold_before_anything_is_allocated(coder):
    codebook = np.array([0.0, 1.0], dtype=np.float32)
    blob = encode(CompressedModel({"w": QuantizedTensor(np.eye(30, dtype=np.uint8), codebook)}), coder=coder)
    with pytest.raises(LimitExceeded, match="900 weights"):
        decode(blob, Limits(elements=899))
    with pytest.raises(LimitExceeded, match="908 bytes"):
        decode(blob, Limits(memory=907))
    with pytest.raises(LimitExceeded, match="raise `file`"):
        decode(blob, Limits(file=len(blob) - 1))
    decode(blob, Limits(elements=900, memory=908, file=len(blob)))


def test_of_a_file_no_more_is_read_than_is_sensible(tmp_path):
    path, blob = tmp_path / "net.bayz", encode(lenet())
    path.write_bytes(blob)
    assert read(path) == blob
    with pytest.raises(LimitExceeded, match="raise `file`"):
        read(path, Limits(file=len(blob) - 1))
    for begins, error in ((blob, LimitExceeded), (b"", NotBayesZip), (b"BAYX", NotBayesZip)):
        path.write_bytes(begins)
        os.truncate(path, 400 * 10**9)  # takes no place
        with pytest.raises(error):
            read(path)
    path.write_bytes(b"BAY")
    assert read(path) == b"BAY"
    path.write_bytes(b"")
    with pytest.raises(NotBayesZip):
        read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_read_in_any_pieces(tmp_path):
    path, blob = tmp_path / "pipe", encode(lenet())
    os.mkfifo(path)

    def read_what(*pieces, limits=None):
        def write():
            with open(path, "wb", buffering=0) as file:
                for piece in pieces:
                    file.write(piece)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            return read(path, limits)
        finally:
            writer.join()

    assert read_what(blob[:1], blob[1:6], blob[6:]) == blob
    for pieces in ((b"",), (b"no file",)):
        with pytest.raises(NotBayesZip):
            read_what(*pieces)
    with pytest.raises(LimitExceeded, match="raise `file`"):
        read_what(blob, limits=Limits(file=len(blob) - 1))


@ALL_CODERS
def test_a_tiny_file_that_claims_everything_is_refused(coder):
    header = bytes.fromhex("00 01 05 00 01 61 02 80a094a58d1d 10 00 00")
    with pytest.raises(LimitExceeded, match=r"10{12} weights"):
        decode(repaired(b"BAYZ" + bytes([0x10 | CODERS[coder][0]]) + header))


@ALL_CODERS
def test_bools_are_bools(coder):
    good = CompressedModel({"mask": RawTensor(np.array([True, False]), "bool")})
    assert decode(encode(good, coder=coder)) == good
    odd = CompressedModel({"mask": RawTensor(np.array([2, 0], dtype=np.uint8).view(bool), "bool")})
    with pytest.raises(ModelError):
        encode(odd, coder=coder)


def test_unknown_coders_and_options_are_refused():
    with pytest.raises(ModelError, match="csr-huffman"):
        encode(lenet(), coder="zip")
    with pytest.raises(ModelError, match="offset_bits"):
        encode(lenet(), coder="csr-huffman", offset_bits=0)
    with pytest.raises(ModelError, match="colour"):
        encode(lenet(), coder="csr-huffman", colour=1)


@ALL_CODERS
def test_large_alphabets(coder):
    symbols = np.random.default_rng(0).integers(0, 2**16, size=(40, 50))
    codebook = np.arange(2**16, dtype=np.float32)
    model = CompressedModel({"w": QuantizedTensor(symbols, codebook)})
    assert decode(encode(model, coder=coder)) == model


def test_a_coder_that_errs_is_noticed(monkeypatch):
    """`encode` decodes what it wrote and compares: names, order, every element."""
    model = CompressedModel({"a": RawTensor(np.arange(9), "int64"), "b": RawTensor(np.arange(9), "int64")})
    renamed = CompressedModel({"a": model.tensors["a"], "c": model.tensors["b"]})
    reordered = CompressedModel(dict(reversed(model.tensors.items())))
    changed = CompressedModel(model.tensors | {"b": RawTensor(np.arange(9)[::-1].copy(), "int64")})
    for other in (renamed, reordered, changed):
        monkeypatch.setattr(container, "_read", lambda blob, limits, other=other: (other, None, []))
        with pytest.raises(ModelError, match="another one"):
            encode(model)
    monkeypatch.undo()
    assert decode(encode(model)) == model


def test_bits_per_weight():
    codebook = np.array([0.0, 1.0], dtype=np.float32)
    tensors = {
        "w": QuantizedTensor(np.arange(64) % 2, codebook),
        "none": QuantizedTensor(np.zeros((0, 4), dtype=np.uint8), codebook),
    }
    full, none = describe(encode(CompressedModel(tensors), coder="csr-huffman")).tensors
    assert full.bits_per_weight == 8 * full.bytes / 64
    assert none.bits_per_weight == 0


def test_only_bytes_are_decoded():
    blob = encode(CompressedModel({}))
    assert decode(bytearray(blob)) == decode(memoryview(blob)) == CompressedModel({})
    for wrong in (10**12, "net.bayz", None):
        with pytest.raises(TypeError, match="bytes"):
            decode(wrong)
