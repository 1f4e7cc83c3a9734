"""Checkpoints: what is saved comes back bit for bit, what is broken is found, and what changed is shown."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from bayeszip.errors import CheckpointError, OutputError
from bayeszip.fitting.checkpoint import Checkpoints, differences, read_checkpoint, write_checkpoint

CONDITIONS = {"seed": 3, "recipe": {"phases": [{"epochs": 4}], "name": "quick"}}


def refuse_to_warn(message: str) -> None:
    raise AssertionError(message)


def opened(folder: Path, keep: int = 2, warn=refuse_to_warn) -> Checkpoints:
    return Checkpoints(folder, keep=keep, warn=warn)


def numbered(n: int) -> dict:
    """A small state that says which it is."""
    return {"n": n, "weights": torch.full((40,), float(n))}


def same(a, b) -> bool:
    """Equal in type and to the bit, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or a != a


def trained() -> dict:
    """What a real run has: a network after a step, its optimizer, the random states."""
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    network(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return {
        "network": dict(network.state_dict()),
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
    }


KINDS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({}, id="nothing"),
        pytest.param(trained(), id="a run"),
        pytest.param({kind: torch.arange(6).view(2, 3).to(getattr(torch, kind)) for kind in KINDS}, id="types"),
        pytest.param({"a": torch.tensor([-0.0, np.nan, np.inf, 1e-42]), "b": np.nan, "c": -0.0}, id="odd floats"),
        pytest.param({"a": torch.zeros(()), "b": torch.zeros(0, 3), "c": torch.zeros(1)}, id="small shapes"),
        pytest.param({"a": 2**80, "b": 0.1, "c": 5e-324, "d": True, "e": None, "f": 'θ\n"\\'}, id="plain values"),
        pytest.param({"a": (1, [2, (3,)], ()), "b": {1: "x", (2, 3): torch.ones(1)}, "c": {}}, id="nesting"),
        pytest.param({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}, id="names that meet"),
        pytest.param({"$tensor": "x", "$tuple": {"$pairs": [1]}}, id="names that mean something"),
        pytest.param({'"sha256":"': torch.ones(2), "sha256": '"sha256":"' + "0" * 64}, id="names of the checksum"),
        pytest.param({"a": np.arange(4, dtype=np.uint32), "b": np.zeros((2, 0)), "c": np.array(1.5)}, id="arrays"),
    ],
)
def test_what_is_saved_comes_back(tmp_path, state):
    write_checkpoint(tmp_path / "c", state, CONDITIONS)
    found = read_checkpoint(tmp_path / "c")
    assert same(found.state, state)
    assert found.conditions == CONDITIONS


def test_views_and_tied_tensors_come_back_by_their_values(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    state = {"a": base, "b": base, "c": base.T, "d": base[:, 1:3], "e": base[:1].expand(5, 4)}
    write_checkpoint(tmp_path / "c", state, {})
    found = read_checkpoint(tmp_path / "c").state
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_scalars_of_numpy_become_plain(tmp_path):
    write_checkpoint(tmp_path / "c", {"a": np.float64(0.1), "b": np.int64(3), "c": np.bool_(True)}, {})
    assert same(read_checkpoint(tmp_path / "c").state, {"a": 0.1, "b": 3, "c": True})


def test_it_is_a_safetensors_file_with_json(tmp_path):
    write_checkpoint(tmp_path / "c", {"net": {"weight": torch.ones(2)}, "epoch": 3}, CONDITIONS)
    with safe_open(tmp_path / "c", "pt") as file:
        assert file.keys() == ["state.net.weight"]
        assert json.loads(file.metadata()["state"])["epoch"] == 3
        assert json.loads(file.metadata()["conditions"]) == CONDITIONS


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"loader": {"x": object()}}, r"state\.loader\.x is of type object; a checkpoint holds tensors"),
        ({"x": [1, {2}]}, r"state\.x\.1 is of type set"),
        ({"x": np.array([object()])}, r"state\.x is of type ndarray"),
        ({"x": torch.ones(2, device="meta")}, r"state\.x is a torch.strided tensor on meta"),
        ({"x": torch.eye(2).to_sparse()}, r"state\.x is a torch.sparse_coo tensor"),
    ],
)
def test_what_can_not_be_saved_is_named(tmp_path, state, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "c", state, {})
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_bit_and_every_prefix_is_found(tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, {"w": torch.ones(3), "n": 1}, {"seed": 0})
    blob = path.read_bytes()
    for place in range(len(blob)):
        for damaged in (blob[:place], blob[:place] + bytes([blob[place] ^ (1 << place % 8)]) + blob[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"is broken \(its [\d,]+ bytes are not those"):
                read_checkpoint(path)
    path.write_bytes(blob + b"\0")
    with pytest.raises(CheckpointError, match="is broken"):
        read_checkpoint(path)


def test_a_missing_one_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none is broken \(can't read .*No such file"):
        read_checkpoint(tmp_path / "none")


def test_the_last_ones_are_kept(tmp_path):
    with opened(tmp_path, keep=3) as checkpoints:
        assert checkpoints.newest() is None
        for n in range(1, 6):
            saved = checkpoints.save(numbered(n), CONDITIONS)
            assert saved == checkpoints.paths()[-1]
        assert [path.name for path in checkpoints.paths()] == [f"checkpoint-0000000{n}.safetensors" for n in (3, 4, 5)]
        assert checkpoints.newest().state["n"] == 5
    with opened(tmp_path, keep=1) as checkpoints:
        checkpoints.save(numbered(6), CONDITIONS)
        assert [path.name for path in checkpoints.paths()] == ["checkpoint-00000006.safetensors"]
        checkpoints.clear()
        assert checkpoints.paths() == []


def test_the_order_is_that_of_the_numbers(tmp_path):
    shutil.copy(write(tmp_path / "x", 1), tmp_path / "checkpoint-99999999.safetensors")
    with opened(tmp_path) as checkpoints:
        assert checkpoints.save(numbered(2), {}).name == "checkpoint-100000000.safetensors"
        assert checkpoints.newest().state["n"] == 2


def write(path: Path, n: int) -> Path:
    write_checkpoint(path, numbered(n), CONDITIONS)
    return path


@pytest.mark.parametrize("keep", [1, 2])
def test_a_broken_one_is_skipped_with_a_warning_and_goes_first(tmp_path, keep):
    warnings = []
    with opened(tmp_path, keep=3, warn=warnings.append) as checkpoints:
        for n in (1, 2, 3):
            path = checkpoints.save(numbered(n), CONDITIONS)
    path.write_bytes(path.read_bytes()[:-1])
    with opened(tmp_path, keep=keep, warn=warnings.append) as checkpoints:
        assert checkpoints.newest().state["n"] == 2
        assert len(warnings) == 1
        assert re.search(r"checkpoint-00000003\.safetensors is broken .*; the one before it is taken", warnings[0])
        checkpoints.save(numbered(4), CONDITIONS)
        assert [read_checkpoint(path).state["n"] for path in checkpoints.paths()] == [2, 4][-keep:]


def test_if_all_are_broken_nothing_begins_again_by_itself(tmp_path):
    warnings = []
    with opened(tmp_path, warn=warnings.append) as checkpoints:
        for n in (1, 2):
            checkpoints.save(numbered(n), CONDITIONS).write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"all checkpoints in .* are broken; delete them to begin again"):
            checkpoints.newest()
    assert len(warnings) == 2


def test_other_files_are_left_alone(tmp_path):
    for name in ("notes.txt", "checkpoint-1.safetensors", "checkpoint-00000001.safetensors.bak", ".hidden.tmp"):
        (tmp_path / name).write_text("mine")
    with opened(tmp_path, keep=1) as checkpoints:
        assert checkpoints.newest() is None
        for n in (1, 2):
            checkpoints.save(numbered(n), {})
        checkpoints.clear()
    assert sum(path.read_text() == "mine" for path in tmp_path.iterdir()) == 4


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".0123456789abcdef.tmp").write_bytes(b"half")
    with opened(tmp_path) as checkpoints:
        assert checkpoints.paths() == []
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


HOLDER = """
import sys
from bayeszip.files import Lock
lock = Lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_share_a_folder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(OutputError, match=rf"another process works in {tmp_path}; wait for it"):
            opened(tmp_path)
        holder.kill()
    with opened(tmp_path) as checkpoints:
        assert checkpoints.paths() == []


def test_conditions_that_changed_are_shown(tmp_path):
    found = read_checkpoint(write(tmp_path / "c", 1))
    found.check_conditions({"recipe": {"name": "quick", "phases": [{"epochs": 4}]}, "seed": 3})
    changed = {"recipe": {"name": "quick", "phases": [{"epochs": 5}]}, "threads": 2}
    with pytest.raises(CheckpointError) as caught:
        found.check_conditions(changed)
    text = str(caught.value)
    for line in ("seed: 3 then, absent now", "recipe.phases[0].epochs: 4 then, 5 now", "threads: absent then, 2 now"):
        assert f"\n  {line}\n" in text
    assert "--force" in text


def test_differences_are_short():
    assert differences({"a": [1, 2]}, {"a": (1, 2)}) == []
    assert differences({"a": [1, 2]}, {"a": [1]}) == ["a: [1, 2] then, [1] now"]
    assert len(differences({"a": "x" * 500}, {"a": 1})[0]) < 80
    many = {str(n): n for n in range(40)}
    assert len(differences(many, {})) == 40


def test_only_reading_needs_no_lock_and_no_writing(tmp_path):
    path = write(tmp_path / "c", 1)
    before = os.listdir(tmp_path)
    read_checkpoint(path)
    assert os.listdir(tmp_path) == before


def test_a_folder_that_can_not_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"can't create the folder .*file"):
        opened(tmp_path / "file")
