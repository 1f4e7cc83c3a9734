"""Headers, as byte literals, and what they leave out."""

import numpy as np
import pytest
from codec_models import compressed_models, graph_of_chain, lenet
from hypothesis import given

from bayeszip.codec.header import outline_of, read_outline, write_outline
from bayeszip.codec.syntax import DuplicateName, InvalidField, InvalidGraph, NotCanonical, Reader, Truncated
from bayeszip.errors import ModelError
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor, RawTensor

CODEBOOK = np.array([0.0, 1.0, -2.0], dtype=np.float32)


def quantized(*shape: int) -> QuantizedTensor:
    return QuantizedTensor(np.zeros(shape, dtype=np.uint8), CODEBOOK)


def header_of(tensors, graph=None, original=None) -> bytes:
    return write_outline(outline_of(CompressedModel(tensors, graph, original)))


def test_a_two_layer_network_byte_by_byte():
    tensors = {
        "fc1.weight": quantized(3, 300),
        "fc1.bias": quantized(3),
        "fc2.weight": quantized(2, 3),
        "fc2.bias": quantized(2),
    }
    assert header_of(tensors, graph_of_chain(["fc1", "fc2"]), 1000) == bytes.fromhex(
        "03"  # flags: graph, original parameters
        "e807"  # 1000
        "02"  # layers
        "00 00 03 666331 04 03 ac02"  # weight+bias, nothing shared, "fc1", two dimensions: 3, 300
        "08 05 02"  # weight+bias, last number + 1; two dimensions, the second chained: 2
        "10 03"  # first codebook, four tensors
        "08 003c 00c0"  # two values in float16: 1.0, −2.0
        "04 18 02 12 02"  # nodes: flatten, linear, relu, linear
    )


def test_sizes_of_lenet_headers():
    outline = outline_of(lenet())
    everything = len(write_outline(outline))
    assert everything - 2 * 16 <= 32  # codebook left aside
    graphless = outline_of(CompressedModel(lenet().tensors, None, 266_610))
    assert everything - len(write_outline(graphless)) <= 10


def test_batch_norm_is_one_layer():
    raw = {
        name: RawTensor(np.zeros(7, dtype="<f4"), "float32")
        for name in ("weight", "bias", "running_mean", "running_var")
    }
    tensors = {f"bn.{name}": tensor for name, tensor in raw.items()}
    tensors["bn.num_batches_tracked"] = RawTensor(np.zeros((), dtype="<i8"), "int64")
    assert header_of(tensors) == bytes.fromhex("00 01 03 00 02 626e 02 07 00 03 04 00")


@given(compressed_models())
def test_every_outline_comes_back(model):
    outline = outline_of(model)
    octets = write_outline(outline)
    source = Reader(octets)
    assert read_outline(source, outline.version) == outline
    assert source.position == len(octets)


@pytest.mark.parametrize(
    ("octets", "error"),
    [
        ("", Truncated),
        ("10 00", InvalidField),  # an unknown flag
        ("02 00 00", NotCanonical),  # original parameters as many as there are anyway
        ("04 00 01 00", InvalidGraph),  # ends without a graph
        ("00 01 06 00 01 61 02 01 00 00", InvalidField),  # members that don't exist
        ("00 01 05 01 01 61 02 01 00 00", InvalidField),  # shares a byte with nothing
        ("00 01 05 00 01 ff 02 01 00 00", InvalidField),  # not UTF-8
        ("00 01 0d 02 01 00 00", InvalidField),  # counts on from a name without number
        ("00 01 05 00 01 61 03 00 00", InvalidField),  # chained to nothing
        ("00 01 05 00 01 61 01 00 00", InvalidField),  # a chained dimension of none
        ("00 01 05 00 01 61 06 ffffffff0f ffffffff0f 01 00 00", InvalidField),  # 2⁷² elements
        ("00 01 05 00 01 61 02 01 0a 00", InvalidField),  # a dtype that doesn't exist
        ("00 01 05 00 01 61 02 01 11 00 00 00", InvalidField),  # the second codebook first
        ("00 01 05 00 01 61 02 01 00 01", InvalidField),  # two kinds for one tensor
        ("00 01 05 00 01 61 02 01 10 00 07 180000 00000000", InvalidField),  # floats with a fraction of 24 bits
        ("00 01 05 00 01 61 02 01 10 00 07 0000ff 00", InvalidField),  # an infinity in few bits
        ("00 01 05 00 01 61 02 01 10 00 07 00007f 01", NotCanonical),  # 1.0 in few bits, filled with a one
        ("00 01 05 00 01 61 02 01 10 00 04 007c", InvalidField),  # infinity in a codebook
        ("00 01 05 00 01 61 02 01 10 00 06 0000803f", NotCanonical),  # 1.0 fits in 16 bits
        ("00 02 05 00 01 61 02 01 05 01 00 02 01 00 01", DuplicateName),
        ("00 01 05 00 08 612e776569676874 02 01 00 00", NotCanonical),  # "a.weight" as a bare name
        ("01 00 01 00", InvalidGraph),  # opcode 0
        ("01 00 01 fe03", InvalidGraph),  # opcode 255
        ("01 00 01 13 00", NotCanonical),  # an empty mask
        ("01 00 01 13 01 01", InvalidGraph),  # reads a value before the input
        ("01 00 01 13 04", InvalidGraph),  # an attribute that ReLU doesn't have
        ("01 00 01 03 02 01 00", InvalidGraph),  # a tensor that doesn't exist
        ("05 00 00 01 01 05", InvalidGraph),  # an output that doesn't exist
    ],
)
def test_faulty_headers_have_named_errors(octets, error):
    with pytest.raises(error):
        read_outline(Reader(bytes.fromhex(octets)))


@pytest.mark.parametrize(
    "model",
    [
        CompressedModel({"\ud800": quantized(1)}),
        CompressedModel({"x" * 2000: quantized(1)}),
        CompressedModel({}, None, -1),
        CompressedModel({}, Graph(1, (Node("max_pool2d", (0,), (), {"ceil_mode": 3}),), (1,))),
        CompressedModel({}, Graph(1, (Node("max_pool2d", (0,), (), {"stride": "2"}),), (1,))),
    ],
)
def test_models_that_the_format_cannot_hold_are_refused(model):
    with pytest.raises(ModelError):
        write_outline(outline_of(model))


def test_long_shared_names_cannot_blow_up():
    layer = "05 e707 00 00"  # 999 bytes shared with the layer before: names would be equal, but parsing must stay small
    first = "05 00 e707" + "61" * 999 + "00"
    with pytest.raises((InvalidField, DuplicateName)):
        read_outline(Reader(bytes.fromhex("00 90 4e" + first + layer * 9999 + "00 8f4e")))


def test_codebooks_take_the_narrowest_format():
    def stored(values: list[float]) -> int:
        codebook = np.array([0.0, *values], dtype=np.float32)
        return len(header_of({"w": QuantizedTensor(np.zeros(1, dtype=np.uint8), codebook)}))

    none = stored([])
    assert stored([0.5]) == none + 2  # float16
    assert stored([1e20]) == none + 4  # float32
    assert stored([0.75, -0.5, 0.25, 1.5]) == none + 3 + 2  # four bits each: a sign, two of exponent, one of fraction
    assert stored([k / 64 + 1 for k in range(16)]) == none + 3 + 14  # seven bits each, none of them exponent
