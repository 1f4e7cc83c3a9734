"""Work is budgeted like memory, and every door has the same lock: files that once cost seconds, memory or a crash."""

import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mutation import repaired
from torch import nn

from bayeszip import codec, loading, report
from bayeszip.codec import Limits, decode, describe, encode
from bayeszip.codec.syntax import Number, Reader
from bayeszip.errors import BayeszipError, FormatError, ModelError
from bayeszip.graph import dense_tensors, load_into, to_module
from bayeszip.limits import LimitExceeded
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor, RawTensor

#: What refusing may cost; a packed header more, for each of its bytes.
SECONDS, BYTES = 0.05, 16 << 20
PER_PACKED_BYTE = 3e-3

EMPTY = np.zeros((0, 0), dtype=np.uint8)
BOOK = np.array([0.0, 0.5], dtype=np.float32)


def weight(*shape: int) -> QuantizedTensor:
    return QuantizedTensor(np.ones(shape, dtype=np.uint8), BOOK)


def of_packed(blob: bytes) -> float:
    """Seconds that its header may take because it is packed."""
    packed = Reader(blob, 5)
    return 0.1 + PER_PACKED_BYTE * [Number("").read(packed) for _ in range(2)][1] if blob[4] & 8 else 0.0


def test_the_first_packed_header_of_a_process_is_refused_soon():
    code = """
import time
from bayeszip.codec import decode
from bayeszip.codec.checksum import crc32c
from bayeszip.errors import FormatError
body = b"BAYZ\\x2a\\x40\\x00"
begin = time.process_time()
try:
    decode(body + crc32c(body).to_bytes(4, "little"))
except FormatError:
    print(time.process_time() - begin)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) <= SECONDS + 0.1 + 0.5


def lstm(stated: bool = True) -> bytes:
    """An LSTM whose recurrent weight is empty: torch would read past it."""
    first = (Node("input", (0,), (), {"shape": (2, 3)}),) if stated else ()
    node = Node("lstm", (len(first),), ("w", "e", None, None))
    tensors = {"w": weight(4, 3), "e": QuantizedTensor(EMPTY, BOOK)}
    return encode(CompressedModel(tensors, Graph(1, (*first, node), (1 + len(first),))))


def squares() -> bytes:
    """Sums of a column and a row of the same numbers, flattened: a size that is squared again and again."""
    nodes = [Node("input", (0,), (), {"shape": (1000,)})]
    for _ in range(32):
        last = len(nodes)
        nodes += [
            Node("reshape", (last,), (), {"shape": (-1, 1)}),
            Node("reshape", (last,), (), {"shape": (1, -1)}),
            Node("add", (last + 1, last + 2)),
            Node("flatten", (last + 3,)),
        ]
    return encode(CompressedModel({}, Graph(1, tuple(nodes), (len(nodes),))))


def empty_tensors() -> bytes:
    """A quarter of a million tensors without elements, four a layer."""
    layers = bytes.fromhex("04 00 02 6130 02 00") + bytes.fromhex("0c 02 00") * 65535
    return repaired(b"BAYZ\x12\x00" + bytes.fromhex("808004") + layers + bytes.fromhex("00 ffff0f"))


def shared_codebook() -> bytes:
    """Tensors of one weight, each of which has 60,000 values to choose from."""
    book = np.arange(60_000, dtype=np.float32)
    return encode(CompressedModel({f"t{i}": QuantizedTensor(np.ones(1, dtype=np.uint16), book) for i in range(200)}))


def constant() -> bytes:
    """A raw tensor of 2²⁸ equal numbers in a few bytes."""
    return repaired(b"BAYZ\x12" + bytes.fromhex("00 01 05 00 01 61 02 8080808001 00 00") + bytes(6))


def zeros() -> bytes:
    """A quantized tensor of 2³⁰ zeros."""
    return repaired(b"BAYZ\x12" + bytes.fromhex("00 01 05 00 01 61 02 8080808004 10 00 04 003c") + bytes(8))


FILES: dict[str, Callable[[], bytes]] = {
    "an LSTM without recurrent weights": lstm,
    "the same, its inputs not stated": lambda: lstm(stated=False),
    "squaring reshapes": squares,
    "262,144 empty tensors": empty_tensors,
    "one-weight tensors of a large codebook": shared_codebook,
    "a large constant": constant,
    "2³⁰ zeros": zeros,
}


class Own(nn.Module):
    """A class of the user's, to load into."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def doors(path: Path) -> dict[str, Callable[[], object]]:
    out = path.parent
    return {
        "load": lambda: loading.load(path),
        "into": lambda: loading.load(path, into=Own()),
        "verify": lambda: loading.verify(path),
        "against": lambda: loading.verify(path, against=Own()),
        "safetensors": lambda: loading.export(path, out / "x.safetensors"),
        "dense": lambda: loading.export(path, out / "x.safetensors", dense=True),
        "onnx": lambda: loading.export(path, out / "x.onnx"),
        "report": lambda: report.gather(path),
    }


@pytest.mark.parametrize("name", FILES)
def test_every_door_refuses_quickly_and_in_little_memory(name, tmp_path):
    path = tmp_path / "x.bayz"
    path.write_bytes(FILES[name]())
    for door, enter in doors(path).items():
        spent = []
        for _ in range(3):  # the first loads what must be loaded
            begin = time.process_time()
            with pytest.raises((FormatError, ModelError)):
                enter()
            spent.append(time.process_time() - begin)
        assert min(spent) <= SECONDS + of_packed(path.read_bytes()), f"{door} takes {min(spent):.3f} s"
        tracemalloc.start()
        with pytest.raises(BayeszipError):
            enter()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= BYTES, f"{door} takes {peak >> 20} MiB"


def test_a_segmentation_fault_is_refused_by_name():
    for blob in (lstm(), lstm(stated=False)):
        with pytest.raises(FormatError, match=r"lstm: weights of shapes \(4, 3\) and \(0, 0\)"):
            to_module(decode(blob))


@pytest.mark.parametrize(
    ("make", "limit"),
    [(empty_tensors, "tensors"), (shared_codebook, "codebooks"), (constant, "work"), (zeros, "work")],
)
def test_what_is_exceeded_has_a_name(make, limit):
    for read in (decode, describe):
        with pytest.raises(LimitExceeded, match=f"raise `{limit}`"):
            read(make())


def test_an_activation_is_held_to_the_limit_too():
    model = decode(squares())
    with pytest.raises(LimitExceeded, match="raise `values`"):
        to_module(model)
    with pytest.raises(LimitExceeded, match="raise `nodes`"):
        decode(squares(), Limits(nodes=100))
    with pytest.raises(LimitExceeded, match="raise `names`"):
        decode(encode(CompressedModel({"a" * 900: weight(1)})), Limits(names=800))


def test_loaded_bytes_are_counted_in_their_type():
    node = Node("linear", (1,), ("w", None))
    graph = Graph(1, (Node("input", (0,), (), {"shape": (10,)}), node), (2,))
    model = CompressedModel({"w": weight(100, 10)}, graph)
    to_module(model, torch.float32, Limits(loaded=4000))
    to_module(model, torch.float16, Limits(loaded=2000))
    with pytest.raises(LimitExceeded, match="8000 bytes of a loaded network"):
        to_module(model, torch.float64, Limits(loaded=7999))


def test_dense_tensors_are_counted_before_they_are_made():
    """Two masks of a few bytes each, and a dense tensor of as many elements as both multiplied."""
    mask = np.zeros(2**15, dtype=bool)
    mask[0] = True
    tensors = {
        "w": weight(1, 1),
        "_kept": RawTensor(np.array([0, 0], dtype=np.int32), "int32"),
        "_kept.0": RawTensor(mask, "bool"),
    }
    with pytest.raises(LimitExceeded, match=f"{4 * 2**30} bytes"):
        dense_tensors(CompressedModel(tensors), Limits(loaded=2**20))


def test_a_run_that_checks_is_charged_for_its_multiplications():
    graph = Graph(1, (Node("input", (0,), (), {"shape": (3,)}), Node("linear", (1,), ("fc.weight", "fc.bias"))), (2,))
    model = CompressedModel({"fc.weight": weight(3, 3), "fc.bias": weight(3)}, graph)
    load_into(model, Own(), limits=Limits(operations=9 + 3))
    with pytest.raises(LimitExceeded, match="raise `operations`"):
        load_into(model, Own(), limits=Limits(operations=5))
    with pytest.raises(LimitExceeded, match="192 bytes, the limit is 191; raise `memory`"):
        load_into(model, Own(), limits=Limits(memory=191))  # three inputs and three outputs of four samples in float64


def test_a_comparison_is_charged_too(tmp_path):
    graph = Graph(1, (Node("input", (0,), (), {"shape": (3,)}), Node("linear", (1,), ("fc.weight", "fc.bias"))), (2,))
    path, own = tmp_path / "x.bayz", Own()
    path.write_bytes(encode(CompressedModel({"fc.weight": weight(3, 3), "fc.bias": weight(3)}, graph)))
    loading.load(path, into=own)
    assert loading.verify(path, against=own, limits=Limits(operations=12)) == 0
    with pytest.raises(LimitExceeded, match="raise `operations`"):
        loading.verify(path, against=own, limits=Limits(operations=5))


def test_one_budget_is_charged_along_the_way():
    graph = Graph(1, (Node("input", (0,), (), {"shape": (3,)}), Node("linear", (1,), ("w", None))), (2,))
    budget = codec.Budget()
    to_module(decode(encode(CompressedModel({"w": weight(3, 3)}, graph)), budget), limits=budget)
    assert budget.spent["elements"] == 9
    assert budget.spent["loaded"] == 36
    assert (budget.spent["tensors"], budget.spent["nodes"]) == (1, 2)


def test_describing_is_linear():
    def seconds(count: int) -> float:
        blob = encode(CompressedModel({f"t{i}": weight(1) for i in range(count)}))
        spent = []
        for _ in range(3):
            begin = time.process_time()
            describe(blob)
            spent.append(time.process_time() - begin)
        return min(spent)

    few, many = seconds(1000), seconds(8000)
    assert many < 12 * few
    assert many < 3.0


@pytest.mark.parametrize("kind", ["quantized", "raw float32", "raw float64 as float32"])
def test_loading_peaks_at_twice_what_is_declared(kind, tmp_path):
    """In a process of its own: bytes beyond those before, against those of the loaded network."""
    code = f"""
import numpy as np, torch
from bayeszip import loading
from bayeszip.codec import Limits, container
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor, RawTensor
def memory(kind):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(kind))
def model(size):
    symbols = np.zeros((size, size), dtype=np.uint8)
    symbols[::7, ::5] = 1
    tensor = QuantizedTensor(symbols, [0, 0.5])
    if {kind!r} != "quantized":
        held = {kind!r}.split()[1]
        tensor = RawTensor(np.zeros((size, size), dtype=held), held)
    nodes = (Node("input", (0,), (), {{"shape": (size,)}}), Node("linear", (1,), ("fc.weight", None)))
    return CompressedModel({{"fc.weight": tensor}}, Graph(1, nodes, (2,)))
def write(size):
    blob = container._write(model(size), container.ContextCoder(), "context", None)
    open({str(tmp_path / "x.bayz")!r}, "wb").write(blob)
write(900)
loading.load({str(tmp_path / "x.bayz")!r})
write(5000)
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
network = loading.load({str(tmp_path / "x.bayz")!r}, limits=Limits(work=2**40))  # zeros are no work, but might be
print((memory("VmHWM") - before) / sum(each.nbytes for each in network.parameters()))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-1000:]
    allowed = 2.0 if kind != "raw float64 as float32" else 3.0  # twice as many bytes are declared as are loaded
    assert float(run.stdout) <= allowed + 0.35  # 32 MiB that every decoding may take


#: What SECURITY.md states, of processor time.
PER_BYTE, PER_ELEMENT = 2e-4, 1e-5


def costly() -> dict[str, CompressedModel]:
    """Files that take long for their bytes, or for their elements."""
    first = Node("input", (0,), (), {"shape": (3,)})
    empty = RawTensor(np.zeros(0, dtype="<f4"), "float32")
    roles = ("weight", "bias", "running_mean", "running_var")
    norms = (Node("layer_norm", (i,), (None, None), {"shape": (3,), "eps": float(i)}) for i in range(1, 300))
    return {
        "nodes": CompressedModel({}, Graph(1, (first, *(Node("relu", (i,)) for i in range(1, 3000))), (3000,))),
        "tensors": CompressedModel({f"t{i}": weight(1) for i in range(2000)}),
        "empty tensors": CompressedModel({f"t{i}.{role}": empty for i in range(500) for role in roles}),
        "norms": CompressedModel({}, Graph(1, (first, *norms), (300,))),
        "a constant": CompressedModel({"w": RawTensor(np.ones((100, 200), dtype="<f8"), "float64")}),
        "many values": CompressedModel({"w": QuantizedTensor(np.full((200, 200), 3), np.arange(60_000, dtype="<f4"))}),
    }


@pytest.mark.parametrize("name", list(costly()))
def test_the_bound_on_time_that_is_stated(name):
    model = costly()[name]
    blob = encode(model)
    spent = []
    for _ in range(4):
        begin = time.process_time()
        decoded = decode(blob)
        describe(blob)
        if decoded.graph is not None:
            to_module(decoded)
        spent.append(time.process_time() - begin)
    assert min(spent) <= PER_BYTE * len(blob) + of_packed(blob) + PER_ELEMENT * model.parameters
