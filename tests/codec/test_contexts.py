"""The context coder: what it exploits, and that it is the same everywhere."""

import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bayeszip.codec import decode, describe, encode, measure
from bayeszip.codec.matrix import survey_of, view_of
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

NETWORKS = Path(__file__).parent.parent.parent / "benchmarks" / "networks"
CODEBOOK = np.concatenate([[0.0], np.linspace(-1, 1, 16)]).astype(np.float32)


def sparse(shape: tuple[int, ...], density: float, rows: float = 1.0, columns: float = 1.0, seed: int = 0):
    """Weights at random places of live rows and columns."""
    random = np.random.default_rng(seed)
    live = np.outer(random.random(shape[0]) < rows, random.random(shape[1]) < columns)
    mask = live & (random.random(shape) < density / (rows * columns))
    return random.integers(1, 17, shape) * mask


def size_of(symbols: np.ndarray) -> int:
    return measure(CompressedModel({"w": QuantizedTensor(symbols, CODEBOOK)}))


def entropy_bound(symbols: np.ndarray) -> float:
    """Bytes for places within live rows and columns and for evenly distributed values."""
    mask = symbols > 0
    cells = int(mask.any(1).sum() * mask.any(0).sum())
    share = mask.sum() / cells
    return (cells * -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) + 4 * mask.sum()) / 8


@pytest.mark.parametrize(("rows", "columns"), [(1.0, 1.0), (0.3, 1.0), (1.0, 0.3), (0.3, 0.3)])
def test_close_to_entropy_whatever_dies(rows, columns):
    symbols = sparse((300, 784), 0.015, rows, columns)
    flags = (symbols.shape[0] * (rows < 1) + symbols.shape[1] * (columns < 1)) / 8
    assert size_of(symbols) < 1.04 * entropy_bound(symbols) + flags + 60


def test_the_quick_model_is_close_to_entropy_too():
    symbols = sparse((1000, 1000), 0.02)
    assert size_of(symbols) < 1.03 * entropy_bound(symbols)


def test_pictures_are_noticed():
    """Weights that recur at a distance of 28 cost less than the same number at random."""
    random = np.random.default_rng(0)
    picture = np.zeros((60, 28, 28), dtype=np.int64)
    for page in picture:
        row, column = random.integers(2, 20, 2)
        page[row : row + 6, column : column + 4] = 3
    symbols = picture.reshape(60, 784)
    assert survey_of(symbols.reshape(-1).astype(np.uint8), view_of(symbols.shape)).lag == 28
    shuffled = symbols[:, random.permutation(784)]
    assert size_of(symbols) < 0.5 * size_of(shuffled)


def test_all_zeros_cost_almost_nothing():
    tensors = {f"l{i}.weight": QuantizedTensor(np.zeros((1000, 1000), dtype=np.uint8), CODEBOOK) for i in range(8)}
    for ways, most in ((0, 1), (None, 8)):  # by default, eight millions are split into streams, a byte each
        description = describe(encode(CompressedModel(tensors), ways=ways))
        assert sum(tensor.bytes for tensor in description.tensors) + description.parts["end"] <= most


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8"])
def test_raw_floats_beat_xz(dtype):
    values = np.random.default_rng(0).normal(scale=0.05, size=(100, 300)).astype(dtype)
    name = {"<f4": "float32", "<f2": "float16", "<f8": "float64"}[dtype]
    assert measure(CompressedModel({"w": RawTensor(values, name)})) < 0.97 * len(
        lzma.compress(values.tobytes(), preset=9)
    )


def test_counting_integers_cost_almost_nothing():
    assert measure(CompressedModel({"ids": RawTensor(np.arange(5000, dtype="<i8"), "int64")})) < 500


@pytest.mark.parametrize("values", [1, 2, 3, 255, 256, 2**16 - 1])
def test_every_size_of_codebook(values):
    random = np.random.default_rng(values)
    symbols = random.integers(0, values + 1, (30, 20)) * (random.random((30, 20)) < 0.5)
    codebook = np.concatenate([[0.0], random.permutation(values) - values / 2 + 0.25]).astype(np.float32)
    model = CompressedModel({"w": QuantizedTensor(symbols, codebook)})
    assert decode(encode(model)) == model


@pytest.mark.parametrize("shape", [(2**19 + 1,), (3, 2**18), (2**18, 3), (800, 700), (1, 2**19), (2, 2**18)])
def test_large_shapes_come_back(shape):
    random = np.random.default_rng(0)
    symbols = (random.integers(1, 17, shape) * (random.random(shape) < 0.01)).astype(np.uint8)
    model = CompressedModel({"w": QuantizedTensor(symbols, CODEBOOK)})
    assert decode(encode(model)) == model


_ELSEWHERE = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from codec_models import lenet
from bayeszip.codec import decode, encode
import numpy as np
from bayeszip.tensors import CompressedModel, RawTensor
small = dict(list(lenet(density=0.05).tensors.items())[3:])
small["raw"] = RawTensor(np.linspace(-1, 1, 100).astype("<f4"), "float32")
model = CompressedModel(small)
for coder in ("context", "csr-huffman"):
    blob = encode(model, coder=coder)
    assert decode(blob) == model or sys.exit("changed")
    print(hashlib.sha256(blob).hexdigest())
"""


def test_the_same_bytes_everywhere():
    """Compiled and not, with and without SIMD, optimized, under other hash seeds and thread counts."""
    features = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX2 FMA3"
    settings = [
        ({}, []),
        ({"BAYESZIP_COMPILE": "0"}, []),
        ({"BAYESZIP_COMPILE": "0", "NPY_DISABLE_CPU_FEATURES": features}, ["-O"]),
        ({"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "8", "NUMBA_NUM_THREADS": "2"}, ["-O"]),
    ]
    here = os.path.dirname(__file__)
    found = set()
    for environment, flags in settings:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", *flags, "-c", _ELSEWHERE, here],
            env=os.environ | environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.add(run.stdout)
    assert len(found) == 1
    assert len(found.pop().split()) == 2


@pytest.mark.parametrize("name", ["lenet-300-100-a", "lenet-300-100-b", "lenet-5"])
def test_trained_networks_are_a_quarter_smaller_than_the_papers(name):
    width = 8 if name == "lenet-5" else 5
    network = decode((NETWORKS / f"{name}.bayz").read_bytes())
    assert measure(network) < 0.75 * measure(network, coder="csr-huffman", offset_bits=width)
