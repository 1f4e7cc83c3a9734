"""Ways of coding and streams side by side: chosen alike, written alike by any number of threads, read or refused."""

import time

import numpy as np
import pytest
from agreement import agrees
from test_container import repaired

from bayeszip.codec import Budget, Limits, decode, describe, encode, streams, ways
from bayeszip.codec.header import outline_of
from bayeszip.codec.syntax import InvalidField, LimitExceeded, NotCanonical, Truncated
from bayeszip.codec.threads import side_by_side, thread_count
from bayeszip.errors import FormatError, ModelError
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

CODEBOOK = np.array([0, -0.5, 0.75, 0.125, -1.5], dtype=np.float32)


def sparse(shape: tuple[int, ...], density: float = 0.01, seed: int = 0) -> QuantizedTensor:
    random = np.random.default_rng(seed)
    return QuantizedTensor(random.integers(1, 5, shape) * (random.random(shape) < density), CODEBOOK)


@pytest.fixture
def small_streams(monkeypatch):
    """Streams of 2000 elements, networks that are large from 5000 on."""
    monkeypatch.setattr(ways, "_STREAM", 2000)
    monkeypatch.setattr(streams, "_LARGE", 5000)


def network(layers: int = 5) -> CompressedModel:
    tensors: dict[str, QuantizedTensor | RawTensor] = {}
    for number in range(layers):
        tensors[f"fc{number}.weight"] = sparse((40, 30), 0.02, number)
        tensors[f"fc{number}.bias"] = RawTensor(np.zeros(40, dtype="<f4"), "float32")
    return CompressedModel(tensors)


def test_small_networks_are_one_stream_of_version_1():
    blob = encode(network(), packed=0)
    assert (describe(blob).version, describe(blob).options) == (1, {"ways": 0, "packed": 0})


@pytest.mark.parametrize("threads", ["1", "2", "8"])
def test_large_networks_are_split_into_the_same_bytes_by_any_number_of_threads(small_streams, monkeypatch, threads):
    monkeypatch.setenv("BAYESZIP_THREADS", "3")
    blob = encode(network())
    monkeypatch.setenv("BAYESZIP_THREADS", threads)
    assert encode(network()) == blob
    assert decode(blob) == network()
    assert list(decode(blob).tensors) == list(network().tensors)
    described = describe(blob)
    assert (described.version, described.options["ways"]) == (2, 1)
    assert described.parts["streams"] == 2  # three streams, two lengths
    whole = sum(described.parts.values()) + sum(tensor.bytes for tensor in described.tensors)
    assert whole == len(blob)


def test_a_stream_ends_with_the_tensor_that_fills_it(small_streams):
    outline = outline_of(network())
    groups = ways.grouped(outline, 1)
    assert [[tensor.name for tensor in group] for group in groups] == [
        ["fc0.weight", "fc0.bias", "fc1.weight"],
        ["fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight"],
        ["fc3.bias", "fc4.weight", "fc4.bias"],
    ]
    assert ways.grouped(outline, 0) == [outline.tensors]
    assert ways.grouped(outline_of(CompressedModel({})), 1) == [()]


def test_an_empty_network_may_be_split_too():
    blob = encode(CompressedModel({}), ways=1)
    assert decode(blob) == CompressedModel({})
    assert describe(blob).version == 2


def test_every_prefix_and_every_flipped_bit_of_streams_is_refused(small_streams):
    blob = encode(network(3), ways=1)
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            decode(blob[:length])
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            decode(bytes(flipped))


def test_lengths_that_lie_are_refused(small_streams):
    blob = encode(network(), ways=1)
    start = len(blob) - 4 - sum(
        count for part, count in describe(blob).parts.items() if part in ("streams", "end")
    ) - sum(tensor.bytes for tensor in describe(blob).tensors)  # fmt: skip
    first = blob[start]
    assert first < 0x80
    assert decode(repaired(blob[:-4])) == network()
    for other in set(range(128)) - {first}:
        with pytest.raises(FormatError):
            decode(repaired(blob[:start] + bytes([other]) + blob[start + 1 : -4]))
    with pytest.raises(InvalidField, match="beyond the end"):
        decode(repaired(blob[:start] + b"\xff\x7f" + blob[start + 1 : -4]))
    with pytest.raises(Truncated):
        decode(repaired(blob[:start]))


def test_an_error_in_any_stream_is_that_of_the_first_that_has_one(small_streams, monkeypatch):
    blob = bytearray(encode(network(), ways=1)[:-4])
    blob[-1] ^= 0x10
    blob[-60] ^= 0x10
    errors = set()
    for threads in ("1", "2", "8"):
        monkeypatch.setenv("BAYESZIP_THREADS", threads)
        with pytest.raises(FormatError) as caught:
            decode(repaired(bytes(blob)))
        errors.add((type(caught.value), str(caught.value)))
    assert len(errors) == 1


def test_limits_hold_before_any_stream_is_read():
    zeros = QuantizedTensor(np.zeros((600, 1000), dtype=np.uint8), CODEBOOK)
    blob = encode(CompressedModel({f"w{number}": zeros for number in range(4)}), ways=1)
    with pytest.raises(LimitExceeded):
        decode(blob, Limits(elements=2_399_999))
    budget = Budget(Limits(elements=2_400_000))
    decode(blob, budget)
    assert budget.spent["elements"] == 2_400_000


def test_version_1_has_no_ways():
    blob = encode(CompressedModel({"w": sparse((80, 60))}), ways=2, packed=0)
    with pytest.raises(InvalidField, match="version 1 lacks"):
        decode(repaired(blob[:4] + b"\x12" + blob[5:-4]))
    usual = encode(CompressedModel({"w": sparse((80, 60))}), ways=0, packed=0)
    with pytest.raises(NotCanonical):
        decode(repaired(usual[:4] + b"\x22" + usual[5:-4]))


@pytest.mark.parametrize("number", [-1, True, "1", 2**8192, 1.0])
def test_ways_are_numbers_in_bounds(number):
    with pytest.raises(ModelError, match="ways"):
        encode(CompressedModel({"w": sparse((80, 60))}), ways=number)


@pytest.mark.parametrize("number", [6, 8, 1 << 40])
def test_ways_must_suit_the_model(number):
    with pytest.raises(ModelError, match="don't suit"):
        encode(CompressedModel({"w": sparse((80, 60))}), ways=number)


def test_all_ways_come_back_and_the_second_decoder_agrees():
    model = CompressedModel({"a": sparse((80, 60), 0.4), "v": sparse((9,), 0.5), "b": sparse((70, 61), 0.3, 1)})
    for number in range(32):
        if number >> 1 & 3 == 3 or number >> 3 & 3 == 3:
            continue  # dependent values: tests/codec/test_trellis.py
        blob = encode(model, ways=number)
        assert decode(blob) == model
        assert describe(blob).options["ways"] == number
        agrees(blob, model)


def test_a_large_network_is_coded_quickly_where_the_thorough_model_gains_nothing(monkeypatch):
    monkeypatch.setattr(streams, "_LARGE", 100_000)
    picture = np.zeros((300, 28, 28), dtype=np.int64)
    random = np.random.default_rng(0)
    for page in picture:
        row, column = random.integers(2, 20, 2)
        page[row : row + 6, column : column + 4] = 3
    model = CompressedModel(
        {"noise": sparse((300, 784), 0.02), "picture": QuantizedTensor(picture.reshape(300, 784), CODEBOOK)}
    )
    found = ways.ways_of(outline_of(model), describe(encode(model)).options["ways"])
    assert {tensor.name: way for tensor, way in found.items()} == {"noise": ways.QUICK}


def test_describing_many_streams_is_linear():
    """Eight times as many tensors and streams take about eight times as long, not sixty-four."""

    def seconds(count: int) -> float:
        ones = QuantizedTensor(np.ones(1, dtype=np.uint8), CODEBOOK)
        blob = encode(CompressedModel({f"w{number}": ones for number in range(count)}), ways=1)
        begin = time.process_time()
        describe(blob)
        return time.process_time() - begin

    seconds(10)
    assert seconds(4000) < 24 * seconds(500) + 0.5


def test_threads_keep_their_models_within_what_reading_may_take(small_streams):
    outline = outline_of(network())
    groups = ways.grouped(outline, 1)
    assert streams._most_threads(outline, groups) == (24 * 2**20 + outline.memory) // (2**21 + 4 * 17 * 2**16 + 24 * 40)
    vector = outline_of(CompressedModel({"w": QuantizedTensor(np.zeros(2**19, dtype=np.uint8), CODEBOOK)}))
    assert streams._most_threads(vector, [vector.tensors]) == 1
    assert streams._most_threads(outline_of(CompressedModel({})), [()]) == 12


def test_tasks_side_by_side_keep_their_order(monkeypatch):
    monkeypatch.setenv("BAYESZIP_THREADS", "4")
    assert thread_count() == 4
    assert side_by_side([lambda place=place: place**2 for place in range(50)]) == [place**2 for place in range(50)]
    assert side_by_side([]) == []

    def fail(place: int) -> int:
        if place in (7, 3):
            raise ValueError(place)
        return place

    with pytest.raises(ValueError, match="3"):
        side_by_side([lambda place=place: fail(place) for place in range(20)])


@pytest.mark.parametrize(("own", "omp", "expected"), [("3", "5", 3), ("", "5", 5), ("x", "2", 2), ("0", "2", 2)])
def test_threads_are_counted_by_the_environment(monkeypatch, own, omp, expected):
    monkeypatch.setenv("BAYESZIP_THREADS", own)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert thread_count() == expected


def test_as_many_threads_as_cores_by_default(monkeypatch):
    monkeypatch.delenv("BAYESZIP_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_count() >= 1
