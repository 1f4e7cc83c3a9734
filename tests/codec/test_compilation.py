"""Compiled loops: put off until they pay, the same bytes either way, also where nothing can be cached."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bayeszip.codec import compilation, encode
from bayeszip.tensors import CompressedModel, QuantizedTensor

numba = pytest.importorskip("numba")


def doubled(value: int) -> int:
    return 2 * value


def test_a_folder_for_the_cache_is_not_needed():
    def without_a_folder(cache: bool = False, **options: bool):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    function = compilation._compiled(doubled, without_a_folder, forceinline=True)
    assert function is not doubled
    assert function(21) == 42


_DECODING = """
import hashlib, json, sys
from bayeszip.codec import decode, encode
from bayeszip.errors import FormatError
loaded = []
for blob in map(bytes.fromhex, sys.argv[1:]):
    try:
        loaded.append([encode(decode(blob)).hex() == blob.hex(), "numba" in sys.modules])
    except FormatError as error:
        loaded.append([type(error).__name__, "numba" in sys.modules])
print(json.dumps(loaded))
"""


def _in_new_process(files: list[bytes], compile_: str | None) -> list:
    environment = {name: value for name, value in os.environ.items() if name != "BAYESZIP_COMPILE"}
    environment |= {} if compile_ is None else {"BAYESZIP_COMPILE": compile_}
    command = [sys.executable, "-c", _DECODING, *(blob.hex() for blob in files)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)


def test_numba_is_loaded_when_it_pays():
    small, large = (
        encode(CompressedModel({"w": QuantizedTensor(np.eye(side, dtype=np.uint8), [0, 1.0])})) for side in (8, 400)
    )
    damaged = large[:-1] + bytes([large[-1] ^ 1])
    files = [small, damaged, large, small]
    expected = [True, "ChecksumMismatch", True, True]
    assert _in_new_process(files, None) == [[outcome, place > 1] for place, outcome in enumerate(expected)]
    assert _in_new_process(files[:2], "1") == [[outcome, True] for outcome in expected[:2]]
    assert _in_new_process(files, "0") == [[outcome, False] for outcome in expected]
