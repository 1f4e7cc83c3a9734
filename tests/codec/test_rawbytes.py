"""Raw tensors as bytes by significance, and what counts as noise."""

import numpy as np
import pytest

from bayeszip.codec.rawbytes import from_planes, noise_of, planes_of
from bayeszip.tensors import RAW_DTYPES


def test_planes_by_hand():
    assert planes_of(np.array([1.0, -2.0], dtype="<f4"), "float32").tolist() == [[0x7F, 0, 0, 0], [0x80, 0, 0, 1]]
    assert planes_of(np.array([258], dtype="<i4"), "int32").tolist() == [[0, 0, 1, 2]]


@pytest.mark.parametrize("dtype", RAW_DTYPES)
def test_planes_come_back(dtype):
    held = RAW_DTYPES[dtype]
    octets = np.random.default_rng(0).integers(
        0, 2 if dtype == "bool" else 256, 100_000 * held.itemsize, dtype=np.uint8
    )
    values = octets.view(held)
    assert from_planes(planes_of(values, dtype), dtype, held).tobytes() == values.tobytes()


def test_noise_is_told_from_order():
    random = np.random.default_rng(0)
    noise, counting = random.integers(0, 256, 5000), np.arange(5000) % 256
    planes = np.stack([noise, counting, np.zeros(5000)], axis=1).astype(np.uint8)
    assert noise_of(planes) == 0b001
    assert noise_of(planes[:500]) == 0
