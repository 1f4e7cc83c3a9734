"""Runs NNCodec, the peer, on a network's float tensors at several steps, in its own virtual environment.

    PYTHON pack_peer.py tensors.npz options.json FOLDER

See codec_peer.py for how to make that environment. For each set of options it writes what the bitstream decodes to as
FOLDER/N.npz; it prints the bitstreams' sizes as JSON.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import codec_peer  # noqa: F401 - puts a stub in place of torchvision


def main(source: str, options: str, folder: str) -> None:
    from nncodec import nnc

    tensors = {name: values.astype(np.float32) for name, values in np.load(source).items()}
    sizes = []
    for number, chosen in enumerate(json.loads(Path(options).read_text())):
        copies = {name: values.copy() for name, values in tensors.items()}
        stream = nnc.compress(copies, return_bitstream=True, bitstream_path="bitstream.nnc", **chosen)
        np.savez(Path(folder) / f"{number}.npz", **nnc.decompress(stream))
        sizes.append(len(stream))
    print(json.dumps(sizes))


if __name__ == "__main__":
    paths = [os.path.abspath(argument) for argument in sys.argv[1:4]]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        main(*paths)
