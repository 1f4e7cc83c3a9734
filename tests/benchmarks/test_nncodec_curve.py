"""NNCodec's curve, with a made-up peer that rounds: which networks are taken, what is kept, and what a failure says."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from bayeszip.experiments import EXPERIMENTS
from bayeszip.experiments.runner import Task
from bayeszip.models import build_seeded

MODULE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "nncodec_curve.py"))
PEER = """
import json, sys
import numpy as np
tensors, options, folder = sys.argv[1:]
sizes = []
for number, told in enumerate(json.load(open(options))):
    step = 2.0 ** (told["qp"] / 4)
    np.savez(f"{folder}/{number}.npz", **{k: (step * np.round(v / step)).ravel() for k, v in np.load(tensors).items()})
    sizes.append(-1000 * told["qp"])
print("whatever it says")
print(json.dumps(sizes))
"""


@pytest.fixture
def pretrained(tmp_path, monkeypatch):
    """A folder with the network that a curve begins from, and a peer."""
    monkeypatch.setitem(MODULE["main"].__globals__, "HERE", tmp_path)
    monkeypatch.setitem(MODULE["main"].__globals__, "NONWEIGHT", (-75,))
    (tmp_path / "pack_peer.py").write_text(PEER)
    (tmp_path / "pretrained").mkdir()
    run = EXPERIMENTS["frontier"].runs(only="lenet-300-100-tau1")[0]
    path = Task(run, tmp_path / "frontier", "cpu", "mnist").weights
    save_file(build_seeded("lenet-300-100", 0).state_dict(), path)
    return tmp_path / "pretrained"


def test_points_of_networks_that_are_there_take_the_place_of_older_ones(pretrained, tmp_path, capsys):
    path = tmp_path / "nncodec.json"
    others = [{"model": "vgg-16", "bytes": 1}, {"model": "lenet-300-100", "bytes": 2}]
    path.write_text(json.dumps({"rows": others}))
    words = [str(pretrained), "--peer", sys.executable, "--only", "lenet-300-100", "lenet-5", "--qp", "-40", "-4"]
    MODULE["main"]([*words, "-o", str(path)])
    kept, fine, coarse = json.loads(path.read_text())["rows"]
    assert kept == others[0]
    assert (fine["qp"], fine["bytes"], coarse["bytes"]) == (-40, 40_000, 4_000)
    # At a step of 1/2 nothing is left of such weights, and all images get the same answer.
    assert fine["accuracy"] != coarse["accuracy"] == pytest.approx(0.1, abs=0.02)
    assert 0 <= fine["validation_accuracy"] <= 1
    assert "has no pretrained lenet-5; left out" in capsys.readouterr().out


def test_the_augmented_network_comes_first(tmp_path):
    runs = [EXPERIMENTS["frontier"].runs(only=name)[0] for name in ("resnet-20-half", "resnet-20-augmented")]
    plain, augmented = (Task(run, tmp_path / "frontier", "cpu", "cifar10").weights for run in runs)
    plain.parent.mkdir()
    assert MODULE["weights_of"]("resnet-20", plain.parent) is None
    plain.touch()
    assert MODULE["weights_of"]("resnet-20", plain.parent) == plain
    augmented.touch()
    assert MODULE["weights_of"]("resnet-20", plain.parent) == augmented


def test_a_peer_that_fails_is_told(pretrained, tmp_path):
    (tmp_path / "pack_peer.py").write_text("raise SystemExit('no such codec')")
    with pytest.raises(SystemExit, match=r"NNCodec failed: .*no such codec"):
        MODULE["main"]([str(pretrained), "--peer", sys.executable, "--only", "lenet-300-100"])
