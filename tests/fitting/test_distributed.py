"""Two real processes that train together through Accelerate, against one that does the same alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_processes
from safetensors.torch import load_file

from bayeszip.errors import DataError, RecipeError
from bayeszip.fitting.batches import in_parts, sliced
from bayeszip.fitting.engine import SingleProcess
from bayeszip.fitting.launch import make_engine
from bayeszip.fitting.shares import checksum


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes have left."""
    folder = tmp_path_factory.mktemp("distributed")
    port, script = str(free_port()), str(Path(two_processes.__file__))
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", script, str(folder)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Both end with the scenario in which one of them is lost.
    assert [process.returncode for process in processes] == [1, 1], errors
    assert all((folder / f"said-{rank}.json").exists() for rank in (0, 1)), errors
    return folder


def of_both(folder, scenario):
    return [load_file(folder / f"{scenario}-{rank}.safetensors") for rank in (0, 1)]


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if name != "draw")


@pytest.mark.parametrize("scenario", ["resident", "loader", "list", "stream", "accumulated"])
def test_two_processes_come_to_what_one_with_the_whole_batch_does(folder, scenario):
    alone = two_processes.SCENARIOS[scenario]()
    first, second = of_both(folder, scenario)
    assert largest_difference(alone, first) < 1e-4
    assert largest_difference(first, second) == 0
    # It is a training: the weights have moved, the mixture too, the loss has fallen.
    assert float(first["history"][-1, 0]) < 0.7 * float(first["history"][0, 0])
    assert float(first["history"][-1, 2]) != 0


def test_with_noise_the_processes_draw_differently_and_stay_the_same(folder):
    alone = two_processes.SCENARIOS["noise"]()
    first, second = of_both(folder, "noise")
    assert float(first["draw"]) != float(second["draw"])
    assert largest_difference(first, second) == 0
    # Divergence and mixture count once, not twice.
    assert float(first["history"][0, 1]) == pytest.approx(float(alone["history"][0, 1]), rel=0.05)


def test_the_strength_is_that_of_the_first_process(folder):
    noise, strength = (of_both(folder, scenario)[0] for scenario in ("noise", "strength"))
    first, second = of_both(folder, "strength")
    assert largest_difference(first, second) == 0
    assert largest_difference(noise, strength) == 0


def test_running_statistics_are_of_all_examples(folder):
    alone = two_processes.SCENARIOS["statistics"]()
    first, second = of_both(folder, "statistics")
    assert largest_difference(first, second) == 0
    assert torch.allclose(first["1.running_mean"], alone["1.running_mean"], atol=0.5)


def test_bf16_trains_too_and_not_to_the_same_bits(folder):
    full, (first, second) = of_both(folder, "resident")[0], of_both(folder, "bf16")
    assert largest_difference(first, second) == 0
    assert 0 < largest_difference(full, first) < 0.5
    assert float(first["history"][-1, 4]) > 0.9


def test_compress_gives_all_processes_the_same_file(folder):
    first, second = of_both(folder, "compress")
    assert torch.equal(first["blob"], second["blob"])
    assert torch.equal(first["sizes"], second["sizes"])
    assert int(first["sizes"].max()) > 0


def test_a_run_is_taken_up_by_all_processes_where_it_was(folder):
    first, second = of_both(folder, "resumed")
    assert torch.equal(first["blob"], second["blob"])
    # The whole history is there, but the batches of the first epochs were not computed again.
    assert int(first["epochs"]) == int(second["epochs"]) == 7
    assert 0 < int(first["batches again"]) == int(second["batches again"]) < int(first["batches"])
    # Only the first process writes; nobody's temporary file or second lock is left.
    assert sorted(path.suffix for path in (folder / "checkpoints").iterdir() if path.name != ".lock") == [
        ".safetensors"
    ]


def test_failures_are_named_by_every_process_and_none_waits_for_ever(folder):
    first, second = (json.loads((folder / f"said-{rank}.json").read_text()) for rank in (0, 1))
    for said in (first, second):
        assert said["diverging"].startswith("TrainingError: at the end of an epoch: odd of process 1 is not that of")
        assert "must give every process the same batches" in said["other_batches"]
        assert said["odd_batches"].startswith("DataError: the loader can't be shared by 2 processes")
        # All have gone back together, and given up together.
        assert "epoch 1 of 2, step 1: " in said["poisoned"]
        assert "is not finite, for the second time" in said["poisoned"]
    assert "the data (inputs of 1 of 10 examples" in second["poisoned"]
    assert second["lost"] == "DataError: the disk of this one is gone"
    assert first["lost"].startswith("TrainingError: this process has lost touch with the others")


NETS = """
from torch import nn

def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 2))
"""

LOADERS = """
import torch
from bayeszip.fitting import ResidentBatches

def loaders():
    x = torch.randn(240, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x.mean((1, 2, 3)) > 0).long()
    return ResidentBatches(x, y, 48, shuffle=True), ResidentBatches(x, y, 120)
"""


def test_accelerate_launches_the_command_line(tmp_path):
    (tmp_path / "nets.py").write_text(NETS + LOADERS)
    launch = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", str(free_port())]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--module"]
    command = ["compress", "nets:tiny", "--data", "nets:loaders", "--pretrain", "--device", "cpu", "--recipe", "quick"]
    command += ["--set", "epochs_scale=0.02", "-o", "net.bayz", "--run", "run", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *launch, "bayeszip", *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["bytes"] == (tmp_path / "net.bayz").stat().st_size
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["device"].startswith("2 × cpu")
    # One line a phase, so one process prints them.
    assert done.stderr.count("phase vd ") == 1


def test_without_a_launcher_there_is_one_process():
    engine = make_engine(torch.device("cpu"))
    assert isinstance(engine, SingleProcess)
    assert engine.is_main
    assert make_engine(torch.device("cpu"), accumulate=2).accumulate == 2


def test_the_launcher_says_how_to_compute(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    engine = make_engine(torch.device("cpu"))
    assert engine.accumulate == 4
    with engine.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert make_engine(torch.device("cpu"), accumulate=2).accumulate == 2
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    assert make_engine(torch.device("cpu")).accumulate == 1
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(RecipeError, match="one of no, bf16, not fp16"):
        make_engine(torch.device("cpu"))


def test_a_batch_in_parts_is_the_whole_batch():
    x, y = torch.arange(14.0).view(7, 2), torch.arange(7)
    parts = list(in_parts(3, (x, x + 1), y))
    assert sum(share for share, _ in parts) == pytest.approx(1)
    assert torch.cat([targets for _, (_, targets) in parts]).equal(y)
    assert torch.cat([inputs[1] for _, (inputs, _) in parts]).equal(x + 1)
    assert len(list(in_parts(30, x, y))) == 7
    with pytest.raises(DataError, match=r"shape \(7, 2\).* an example in each row"):
        sliced(x, 6, 0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_sees_every_bit(dtype):
    tensor = torch.ones(5).to(dtype)
    other = tensor.clone()
    assert checksum(tensor) == checksum(other)
    other.view(torch.uint8)[3] ^= 1
    assert checksum(tensor) != checksum(other)
    assert checksum(tensor) != checksum(tensor[:4])
