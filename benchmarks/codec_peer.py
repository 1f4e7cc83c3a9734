"""Runs NNCodec, the peer, on the tensors of an .npz file, in its own virtual environment; prints JSON.

    python -m venv /tmp/nncodec
    /tmp/nncodec/bin/pip install "numpy<2" "torch==2.13.0+cpu" pybind11 setuptools wheel scikit-learn tqdm h5py \
        pandas Click ptflops torchmetrics lightning-utilities opencv-python-headless
    /tmp/nncodec/bin/pip install --no-deps nncodec==2.1.3

Its best lossless way is used: integer indices, signed so that 0 is no weight, in one call for the whole network.
"""

import json
import os
import sys
import tempfile
import time
import types
from unittest import mock

import numpy as np


class _Stub(types.ModuleType):
    """torchvision, which NNCodec imports but doesn't need here."""

    __path__: list = []  # noqa: RUF012 - a package

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


for _name in ("", ".transforms", ".datasets", ".models", ".utils", ".datasets.folder", ".transforms.functional"):
    sys.modules["torchvision" + _name] = _Stub("torchvision" + _name)


def main(path: str) -> None:
    from nncodec import nnc

    tensors = {name: values.astype(np.int32) for name, values in np.load(path).items()}
    best = None
    for param_opt in (True, False):
        times = []
        for _ in range(3):
            begin = time.process_time()
            bitstream = nnc.compress(dict(tensors), row_skipping=True, param_opt=param_opt, use_dq=False,
                                     return_bitstream=True, bitstream_path="bitstream.nnc")  # fmt: skip
            middle = time.process_time()
            decoded = nnc.decompress(bitstream)
            times.append((middle - begin, time.process_time() - middle))
        for name, values in tensors.items():
            if not np.array_equal(decoded[name], values):
                raise SystemExit(f"{name} came back different")
        figures = {"bytes": len(bitstream), "encode": min(t[0] for t in times), "decode": min(t[1] for t in times)}
        if best is None or figures["bytes"] < best["bytes"]:
            best = figures
    print(json.dumps(best))


if __name__ == "__main__":
    source = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main(source)
