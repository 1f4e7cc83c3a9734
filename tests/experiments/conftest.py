"""A small data set whose images tell which they are, and a network that notes what it is trained on."""

import importlib
import struct
import sys

import numpy as np
import pytest

from bayeszip import data
from bayeszip.experiments import records

NETS = """
from torch import nn

SEEN = set()

class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, images):
        if self.training:
            SEEN.update(map(tuple, images.flatten(1)[:, :2].mul(255).round().int().tolist()))
        return self.body(images)
"""


def write_idx(path, array):
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


def marks(split):
    """What the first two pixels of its images say."""
    return set(map(tuple, split.images.flatten(1)[:, :2].mul(255).round().int().tolist()))


@pytest.fixture
def images(tmp_path):
    """480 images to train on and 120 to test with, numbered in their first two pixels."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng, number = np.random.default_rng(0), 0
    for split, n in (("train", 480), ("t10k", 120)):
        labels = rng.integers(0, 2, n).astype(np.uint8)
        pixels = rng.integers(0, 200, (n, 8, 8))
        pixels[:, :4] += 40 * labels[:, None, None]
        pixels[:, 0, 0], pixels[:, 0, 1] = np.divmod(number + np.arange(n), 256)
        number += n
        write_idx(folder / f"{split}-images-idx3-ubyte", pixels.astype(np.uint8))
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels)
    return folder


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """The module of the network `nets_of_experiments:Recorder`."""
    (tmp_path / "nets_of_experiments.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nets_of_experiments", raising=False)
    monkeypatch.setitem(records.OFFSET_BITS, "nets_of_experiments:Recorder", 5)
    return importlib.import_module("nets_of_experiments")


@pytest.fixture
def splits(images):
    return data.load(f"idx:{images}")
