"""The command line as a user meets it: in processes of its own, with exit statuses and messages."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import typer
from torch import nn

import bayeszip
from bayeszip import cli
from bayeszip.cli import COMMANDS, main
from bayeszip.codec import encode
from bayeszip.tensors import CompressedModel, QuantizedTensor

NETS = """
import torch
from torch import nn

def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 2))

def broken():
    net = tiny()
    with torch.no_grad():
        net[1].weight[0, 0] = float("nan")
    return net

def no_layers():
    return nn.Sequential(nn.Flatten(), nn.PReLU())

def loaders():
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = list(zip(x.split(16), (x.mean((1, 2, 3)) > 0).long().split(16)))
    return data, data

def not_loaders():
    return 5

def drawn_splits():
    with open("calls", "a") as calls:
        calls.write("called ")
    data, _ = loaders()
    order = torch.randperm(len(data))
    return [data[place] for place in order[:2]], [data[place] for place in order[2:]]

def other_images():
    data, _ = loaders()
    return data, data, [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))]

def undefined(outputs, targets):
    return outputs.sum() * float("nan")
"""


def write_idx(path, array):
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with networks, and with images whose class is which half is bright."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "nets.py").write_text(NETS)
    images = folder / "images"
    images.mkdir()
    rng = np.random.default_rng(0)
    for split, n in (("train", 480), ("t10k", 120)):
        labels = rng.integers(0, 2, n).astype(np.uint8)
        pixels = rng.integers(0, 60, (n, 8, 8))
        pixels[:, :4] += 120 * labels[:, None, None]
        write_idx(images / f"{split}-images-idx3-ubyte", pixels.astype(np.uint8))
        write_idx(images / f"{split}-labels-idx1-ubyte", labels)
    return folder


def command(folder, *arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "bayeszip", *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """The command line in this process: importing torch takes longer than most commands."""

    def run(*arguments, columns=200):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["bayeszip", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        return Done(left.value.code or 0, *capsys.readouterr())

    return run


def compress_arguments(output, *more, model="nets:tiny"):
    quick = ["--recipe", "quick", "--set", "epochs_scale=0.05", "--set", "all.tau1=0.1"]
    # Batches of a factory have the size that it gives them.
    quick += [] if "--data" in more else ["--set", "batch_size=32"]
    return ["compress", model, "--data", "idx:images", "--pretrain", *quick, "-o", output, *more]


@pytest.fixture(scope="module")
def compressed(folder):
    done = command(folder, *compress_arguments("net.bayz", "--json", "--run", "record"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compress_writes_what_evaluate_measures_in_a_new_process(folder, compressed):
    done = command(folder, "evaluate", "net.bayz", "--data", "idx:images", "--loss", "cross-entropy", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    # A file doesn't know how its training went.
    assert figures == {name: value for name, value in compressed.items() if name != "warnings"}
    assert figures["accuracy"] > 0.9
    assert figures["measured"] == "test"
    assert figures["bytes"] == (folder / "net.bayz").stat().st_size
    assert figures["params"] == 64 * 12 + 12 + 12 * 2 + 2
    assert figures["ratio"] == pytest.approx(4 * figures["params"] / figures["bytes"])
    assert 0 < figures["nonzero"] <= figures["params_kept"] <= figures["params"]


def test_evaluate_in_words(run, folder, compressed):
    done = run("evaluate", "net.bayz", "--data", "idx:images")
    assert f"accuracy {100 * compressed['accuracy']:.2f} %" in done.stdout
    assert f"{compressed['bytes']:,} bytes" in done.stdout


def test_figures_that_are_no_numbers_are_null_in_json(run, compressed):
    done = run("evaluate", "net.bayz", "--data", "idx:images", "--loss", "nets:undefined", "--json")
    assert done.returncode == 0, done.stderr
    assert "NaN" not in done.stdout
    assert json.loads(done.stdout)["loss"] is None


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 2)

    def forward(self, x):
        features = self.first(x.flatten(1)).relu()
        return {"features": features, "logits": self.last(features)}


def test_evaluate_says_which_of_several_outputs_it_judges(run, folder):
    bayeszip.pack(TwoOutputs(), example_inputs=torch.zeros(2, 1, 8, 8)).save(folder / "two.bayz")
    done = run("evaluate", "two.bayz", "--data", "idx:images")
    assert "two.bayz has 2 outputs without names, of which the first is judged; --into knows which" in done.stderr
    assert "accuracy" in done.stdout


def test_the_run_folder_holds_the_whole_record(folder, compressed):
    record = json.loads((folder / "record" / "result.json").read_text())
    assert {key: record[key] for key in compressed} == compressed
    assert record["recipe"]["phases"][0]["tau1"] == 0.1
    assert record["seed"] == 0
    assert record["versions"]["torch"]
    assert len(record["history"]) > 3
    assert (folder / "record" / "net.bayz").read_bytes() == (folder / "net.bayz").read_bytes()
    assert "validation accuracy" in (folder / "record" / "report.txt").read_text()


def test_info_adds_up_to_the_file(run, folder, compressed):
    done = run("info", "net.bayz", "--json")
    described = json.loads(done.stdout)
    total = sum(described["parts"].values()) + sum(tensor["bytes"] for tensor in described["tensors"])
    assert total == described["bytes"] == compressed["bytes"]
    table = run("info", "net.bayz")
    assert table.returncode == 0
    assert "1.weight" in table.stdout
    assert f"{compressed['bytes']:,}" in table.stdout


def test_info_does_not_need_torch(folder, compressed):
    (folder / "torch.py").write_text("raise ImportError('torch is not here')")
    try:
        assert command(folder, "info", "net.bayz").returncode == 0
    finally:
        (folder / "torch.py").unlink()


def test_further_rates_give_further_files(run, folder):
    options = ("--set", "mixture.components=9", "--rates", "3,1e3", "--run", "rates")
    done = run(*compress_arguments("several.bayz", *options, "--json"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(each["rate"], each["file"]) for each in told["others"]] == [
        (3.0, "several-rate=3.bayz"),
        (1000.0, "several-rate=1000.bayz"),
    ]
    record = json.loads((folder / "rates" / "result.json").read_text())
    for each, recorded in zip(told["others"], record["others"], strict=True):
        assert (folder / each["file"]).stat().st_size == each["bytes"] == recorded["bytes"]
        assert (folder / "rates" / f"rate={each['rate']:g}" / "net.bayz").read_bytes() == (
            folder / each["file"]
        ).read_bytes()
        assert recorded["accuracy"] == each["accuracy"]
    assert told["bytes"] > told["others"][1]["bytes"]
    alone = json.loads((folder / "rates" / "rate=1000" / "result.json").read_text())
    assert alone["recipe"]["quantization"]["rate"] == 1000
    again = run(*compress_arguments("several.bayz", *options, "--resume"))
    assert "weight of a bit" in again.stdout
    assert again.stdout.splitlines()[-1].endswith("written to several-rate=1000.bayz")


def test_records_of_other_rates_do_not_outlive_their_training(run, folder):
    """What is not a record, or has something of the user's beside it, stays."""
    options = ("--set", "closing.epochs=0", "--run", "again")
    assert run(*compress_arguments("again.bayz", "--rates", "1,2,3", *options)).returncode == 0
    kept = folder / "again"
    (kept / "rate=mine").mkdir()
    (kept / "rate=2" / "notes").write_text("mine")
    assert run(*compress_arguments("again.bayz", "--rates", "4", *options)).returncode == 0
    assert sorted(each.name for each in kept.glob("rate=*")) == ["rate=2", "rate=4", "rate=mine"]
    assert [each.name for each in (kept / "rate=2").iterdir()] == ["notes"]
    assert {each.name for each in (kept / "rate=4").iterdir()} == {"result.json", "report.txt", "net.bayz"}


def test_own_loaders_and_the_report_in_words(run, folder):
    done = run(*compress_arguments("own.bayz", "--data", "nets:loaders"))
    assert done.returncode == 0, done.stderr
    assert "the whole file" in done.stdout
    assert "validation accuracy" in done.stdout.splitlines()[-1]
    assert "written to own.bayz" in done.stdout
    assert "phase vd" in done.stderr


def test_a_factory_that_splits_at_random_is_called_once(run, folder):
    """A second call would report on a split that shares examples with the training."""
    done = run(*compress_arguments("drawn.bayz", "--data", "nets:drawn_splits", "--run", "drawn", "--json"))
    assert done.returncode == 0, done.stderr
    assert (folder / "calls").read_text().split() == ["called"]
    record = json.loads((folder / "drawn" / "result.json").read_text())
    assert record["accuracy"] == record["validation_accuracy"]
    assert record["measured"] == json.loads(done.stdout)["measured"] == "validation"
    assert (record["model"], record["data"]) == ("nets:tiny", "nets:drawn_splits")
    assert json.loads(run("evaluate", "drawn.bayz", "--data", "nets:loaders", "--json").stdout)["measured"] == (
        "validation"
    )
    assert run("evaluate", "drawn.bayz", "--data", "nets:loaders").stdout.startswith("validation accuracy")


def test_a_training_is_not_lost_when_the_test_data_fail(run, folder):
    """The files are there before anything is judged on the test data, and so is the record."""
    options = ("--data", "nets:other_images", "--rates", "2", "--run", "kept")
    done = run(*compress_arguments("kept.bayz", *options))
    assert done.returncode == 1
    assert "kept.bayz is written; what follows happened when it was judged on the test data or recorded" in done.stderr
    assert bayeszip.load(folder / "kept.bayz") is not None
    assert bayeszip.load(folder / "kept-rate=2.bayz") is not None
    record = json.loads((folder / "kept" / "result.json").read_text())
    assert record["bytes"] == (folder / "kept.bayz").stat().st_size
    assert record["history"]
    assert "accuracy" not in record


def test_ctrl_c_while_it_is_judged_says_what_is_written(run, folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bayeszip.record.file_figures", interrupted)
    done = run(*compress_arguments("judged.bayz"))
    assert done.returncode == 130
    assert "judged.bayz is written; what follows happened" in done.stderr
    assert done.stderr.endswith("bayeszip: interrupted\n")
    assert bayeszip.load(folder / "judged.bayz") is not None


def test_the_file_may_lie_in_the_folder_of_the_run(run, folder):
    done = run(*compress_arguments("new/7/net.bayz", "--run", "new/7"))
    assert done.returncode == 0, done.stderr
    assert {"net.bayz", "result.json"} <= {path.name for path in (folder / "new" / "7").iterdir()}


def test_weights_come_from_safetensors(run, folder):
    script = "import nets, safetensors.torch as s; s.save_file(nets.tiny().state_dict(), 'w.safetensors')"
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True)
    arguments = [*compress_arguments("w.bayz", "--weights", "w.safetensors"), "--no-pretrain"]
    assert run(*arguments).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["evaluate", "gone.bayz", "--data", "idx:images"], 1, "can't read gone.bayz"),
        (["info", "gone.bayz"], 1, "can't read gone.bayz"),
        (["info", "nets.py"], 1, "bayeszip: nets.py: the file doesn't begin with"),
        (["info", "nets.py", "--json"], 1, "bayeszip: nets.py: the file doesn't begin with"),
        (["evaluate", "cut.bayz", "--data", "idx:images"], 1, "bayeszip: cut.bayz: "),
        (["verify", "cut.bayz"], 1, "bayeszip: cut.bayz: "),
        (["export", "cut.bayz", "x.onnx"], 1, "bayeszip: cut.bayz: "),
        (["evaluate", "net.bayz", "--data", "idx:gone"], 1, "gone"),
        (["evaluate", "net.bayz", "--data", "cifar"], 2, "idx:FOLDER or module:function"),
        (["evaluate", "net.bayz", "--data", "idx:"], 2, "idx: needs a folder"),
        (["evaluate", "net.bayz", "--data", "gone:loaders"], 2, "there is no module 'gone'"),
        (["evaluate", "net.bayz", "--device", "gpu"], 2, "there is no device 'gpu'; give auto, cpu, cuda or cuda:1"),
        (["export", "net.bayz", "x.tflite"], 2, "to .onnx or .safetensors, not '.tflite'"),
        (["export", "net.bayz", "x"], 2, "to .onnx or .safetensors, not no ending"),
        (["export", "net.bayz", "x.onnx", "--dense"], 2, "dense tensors are exported to .safetensors only"),
        (compress_arguments("x.bayz", model="lenet"), 2, "unknown model 'lenet'"),
        (compress_arguments("x.bayz", model="gone:net"), 2, "there is no module 'gone'"),
        (compress_arguments("x.bayz", model="nets:gone"), 2, "has no 'gone'"),
        (
            [*compress_arguments("x.bayz", model="nets:broken")[:4], "--no-pretrain", "-o", "x.bayz"],
            1,
            "1.weight holds 1",
        ),
        (compress_arguments("x.bayz", model="nets:no_layers"), 1, "no layer that can be compressed"),
        (compress_arguments("x.bayz", "--set", "nonsense=1"), 2, "no setting nonsense"),
        (compress_arguments("x.bayz", "--set", "vd.tau1=much"), 2, "vd.tau1 must be of type float"),
        (["compress", "nets:tiny", "--recipe", "slow", "-o", "x.bayz"], 2, "no recipe 'slow'; known: quick"),
        (compress_arguments("gone/x.bayz"), 1, "gone"),
        (compress_arguments("images"), 2, "a compressed network is written to .bayz, not 'images'"),
        (compress_arguments("x.bin"), 2, "a compressed network is written to .bayz, not 'x.bin'"),
        (compress_arguments("x.bayz", "--data", "nets:loaders", "--set", "batch_size=7"), 2, "that nets:loaders gives"),
        (compress_arguments("x.bayz", "--teacher", "cut.bayz"), 1, "the teacher cut.bayz: the checksum doesn't fit"),
        (["pack", "w.safetensors", "-o", "x.txt"], 2, "a packed network is written to .bayz, not 'x.txt'"),
        (["report", "net.bayz", "-o", "x.pdf"], 2, "a report is written to .html, not 'x.pdf'"),
        (compress_arguments("x.bayz", "--weights", "w.pt"), 2, "safetensors files only"),
        (compress_arguments("x.bayz", "--weights", "gone.safetensors"), 1, "can't read gone.safetensors"),
        (["compress", "nets:tiny", "--data", "nets:not_loaders", "-o", "x.bayz"], 1, "must return (train, validation)"),
        (["compress", "nets:tiny"], 2, "say where to write the file, with -o; or only try, with --dry-run"),
        (compress_arguments("x.bayz", "--rates", "some"), 2, "such as 0.5,1,2, not 'some'"),
        (compress_arguments("x.bayz", "--rates", "1,-2"), 2, "quantization.rate must be"),
        (compress_arguments("x.bayz", "--rates", "1", "--max-bytes", "1k"), 2, "a target decides how small"),
        (compress_arguments("x.bayz", "--strength", "fc=much"), 2, "PATTERN=FACTOR, not 'fc=much'"),
        (compress_arguments("x.bayz", "--exclude", "encoder"), 2, "no parameter or module is called 'encoder'"),
        (["nonsense"], 2, "No such command"),
        (["compress", "nets:tiny", "-o", "x.bayz", "--seed", "minus"], 2, "--seed"),
    ],
)
def test_a_mistake_gets_a_line_and_no_traceback(run, folder, compressed, arguments, status, message):
    (folder / "cut.bayz").write_bytes((folder / "net.bayz").read_bytes()[:-9])
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("x*"))


@pytest.mark.parametrize("damage", ["truncated", "longer labels", "wrong magic"])
def test_broken_data_names_the_file(run, folder, tmp_path, damage):
    for path in (folder / "images").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    labels = tmp_path / "train-labels-idx1-ubyte"
    if damage == "truncated":
        labels.write_bytes(labels.read_bytes()[:-7])
    elif damage == "longer labels":
        write_idx(labels, np.zeros(500, np.uint8))
    else:
        labels.write_bytes(b"\x01" + labels.read_bytes()[1:])
    arguments = compress_arguments("x.bayz")
    arguments[arguments.index("idx:images")] = f"idx:{tmp_path}"
    done = run(*arguments)
    assert done.returncode == 1
    assert "train-labels-idx1-ubyte" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_the_middle_stops_cleanly(folder, tmp_path):
    output = tmp_path / "x.bayz"
    output.write_bytes(b"old")
    process = subprocess.Popen(
        [sys.executable, "-m", "bayeszip", *compress_arguments(output, "--set", "vd.epochs=1000000")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The pretraining phase announces its end on standard error; after it the long phase runs.
    assert "phase l2" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        # Python loses what is raised amid a finalizer, once in a hundred runs or less; people press the keys again.
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    # A shell shows 130 for both: Python ends by the signal itself where it came amid code that was made as text.
    assert process.returncode in (130, -signal.SIGINT)
    assert "bayeszip: interrupted\n" in errors
    assert "Traceback" not in errors
    assert output.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [output]


def test_recipes_are_listed_printed_and_explained(run):
    assert "paper-vd+sws" in run("recipes").stdout
    printed = run("recipes", "paper-vd").stdout
    assert json.loads(printed)["phases"][0]["epochs"] == 200
    assert "PHASE.tau1" in run("recipes", "--settings").stdout


def test_a_recipe_and_the_settings_of_all_are_not_asked_for_at_once(run):
    done = run("recipes", "quick", "--settings")
    assert done.returncode == 2
    assert "give it without quick" in done.stderr
    assert not done.stdout


def test_every_command_has_help_with_an_example(run):
    listed = run("--help").stdout
    for name in ("compress", "evaluate", "info", "recipes"):
        assert name in listed
        text = run(name, "--help").stdout
        assert f"bayeszip {name}" in text.split("Options")[0].split("Example")[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_on_a_narrow_terminal_cuts_no_name(run, name):
    rows = [line for line in run(name, "--help", columns=80).stdout.splitlines() if line.startswith("│")]
    assert max(map(len, rows)) <= 80
    words = {word for row in rows for word in row.split()}
    params = typer.main.get_command(cli.app).commands[name].params
    assert {option for param in params for option in param.opts + param.secondary_opts if "--" in option} <= words
    assert "<bool>" not in words
    assert str(2**63 - 1) not in "".join(rows)


def test_help_of_all_has_no_types_of_flags(run):
    assert "<bool>" not in run("--help").stdout


def test_version(run):
    assert run("--version").stdout == f"bayeszip {bayeszip.__version__}\n"


def test_what_can_be_mended_is_one_message(run, tmp_path):
    for arguments, message in (
        (["verify", "net.bayz", "--weights", "w.safetensors"], "--against"),
        (compress_arguments(tmp_path / "x.bayz", "--seed", 2**70), "--seed"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert message in done.stderr


def test_a_network_that_does_not_fit_the_data_is_one_line(run, folder, tmp_path):
    (folder / "wide.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(63, 2))\n"
    )
    done = run(*compress_arguments(tmp_path / "x.bayz", model="wide:net"))
    assert done.returncode == 1
    assert "fails on a batch" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_record_that_can_not_be_written_is_refused_before_the_training(run, tmp_path):
    (tmp_path / "taken").write_text("")
    done = run(*compress_arguments(tmp_path / "x.bayz", "--run", tmp_path / "taken"))
    assert done.returncode == 1
    assert "can't create the folder" in done.stderr
    assert not (tmp_path / "x.bayz").exists()


@pytest.mark.parametrize("options", [("--checkpoint-every", "5x"), ("--loss", "msee")])
def test_a_misspelled_option_leaves_no_folder_of_a_run(run, tmp_path, options):
    done = run(*compress_arguments(tmp_path / "x.bayz", "--run", tmp_path / "run", *options))
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


def test_all_images_are_trained_on_where_none_are_held_out(run, tmp_path):
    done = run(*compress_arguments(tmp_path / "x.bayz", "--no-hold-out", "--run", tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "validation" not in done.stdout
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["validation_accuracy"] is None
    assert record["hold_out"] is False
    done = run("report", tmp_path / "x.bayz", "--run", tmp_path / "run", "-o", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert "all examples, none held out" in (tmp_path / "report.html").read_text()


def test_a_file_can_teach_another(run, compressed, tmp_path):
    options = ("--teacher", "net.bayz", "--run", tmp_path / "run")
    done = run(*compress_arguments(tmp_path / "x.bayz", *options))
    assert done.returncode == 0, done.stderr
    assert "teacher" in done.stdout
    assert "parameters" in json.loads((tmp_path / "run" / "result.json").read_text())["teacher"]
    done = run(*compress_arguments(tmp_path / "x.bayz", *options[:2], "--dry-run"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (("--max-accuracy-drop", 1), "--max-accuracy-drop"),
        (("--metric", "mse,lower"), "--metric"),
        (("--set", "quantization.rate=1", "--set", "quantization.rate_trials=2"), "quantization.rate_trials"),
        (("--data", "nets:loaders"), "nets:loaders"),
    ],
)
def test_what_needs_validation_is_refused_where_nothing_is_held_out(run, tmp_path, options, culprit):
    done = run(*compress_arguments(tmp_path / "x.bayz", "--no-hold-out", *options))
    assert done.returncode == 2
    assert culprit in done.stderr
    assert "--no-hold-out" in done.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(run, folder):
    arguments = ["compress", "nets:tiny", "--data", "idx:images", "--recipe", "quick", "--device", "cpu", "--dry-run"]
    done = run(*arguments, "--json", "--exclude", "3", "--strength", "1.weight=0.5")
    figures = json.loads(done.stdout)
    assert figures["pruned"] == {
        "1.weight": {"weights": 768, "strength": 0.5},
        "1.bias": {"weights": 12, "strength": 1.0},
    }
    assert figures["not_pruned"] == [{"name": "3", "why": "Linear, excluded"}]
    assert figures["floor"] > 0
    assert figures["seconds"] > 0
    assert "no file is below" in run(*arguments, "-o", "dry.bayz").stdout
    assert not (folder / "dry.bayz").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "x.bin"], "a compressed network is written to .bayz, not 'x.bin'"),
        (["--max-bytes", "much"], "'much' is not a number of bytes"),
        (["--max-bytes", "1k", "--min-ratio", "2"], "not max_bytes and min_ratio"),
        (["--max-bytes", "1k", "--rates", "2"], "a target decides how small"),
        (["--min-ratio", "0"], "min_ratio must be at least 1"),
        (["--max-metric-drop", "1"], "name it with --metric"),
        (["--metric", "nonsense"], "there is no metric 'nonsense'"),
        (["--set", "quantization.curvature=1"], "quantization.curvature says what moves cost"),
        (["--set", "l2.epochs=0", "--pretrain"], "has no pretraining"),
        (["--strength", "2"], "write strengths as PATTERN=FACTOR, not '2'"),
        (["--strength", "=2"], "write strengths as PATTERN=FACTOR"),
        (["--strength", "1=much"], "write strengths as PATTERN=FACTOR"),
        (["--augment", "turn"], "augment can't be 'turn'"),
        (["--mixed-precision", "fp4"], "mixed precision must be one of no, bf16, not fp4"),
        (["--teacher", "lenet-5"], "lenet-5=FILE.safetensors"),
        (["--teacher", "lenet-5=w.pt"], "weights are read from .safetensors files only"),
        (["--teacher", "lenet-6"], "unknown model 'lenet-6'"),
    ],
)
def test_a_dry_run_finds_the_typos_that_a_run_would(run, options, message):
    done = run("compress", "nets:tiny", "--data", "idx:images", "--dry-run", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--run", "dry"),
        ("--run", "dry", "--resume", "--force"),
        ("--checkpoint-every", "5m"),
        ("--keep", "3"),
        ("--log", "tensorboard"),
    ],
)
def test_a_dry_run_takes_nothing_that_it_would_ignore(run, folder, options):
    done = run("compress", "nets:tiny", "--data", "idx:images", "--dry-run", *options)
    assert done.returncode == 2
    names = ", ".join(option for option in options if option.startswith("--"))
    assert f"--dry-run trains nothing and writes nothing: leave out {names}" in done.stderr
    assert not (folder / "dry").exists()


def test_a_dry_run_says_what_can_not_be_reached(run):
    done = run("compress", "nets:tiny", "--data", "idx:images", "--dry-run", "--recipe", "quick", "--max-bytes", 10)
    assert done.returncode == 1
    assert "10 bytes" in done.stderr
    assert not done.stdout


def test_a_dry_run_tries_the_augmentation(run):
    arguments = ["compress", "nets:tiny", "--data", "idx:images", "--recipe", "quick", "--device", "cpu", "--dry-run"]
    assert run(*arguments, "--augment", "shift=1", "--mixed-precision", "bf16").returncode == 0
    done = run(*arguments, "--augment", "shift=99")
    assert done.returncode == 2
    assert "augment.shift=99 would move images" in done.stderr


def test_patterns_reach_the_record(run, folder):
    patterns = ["--include", "*.weight", "--exclude", "3", "--strength", "1=2"]
    assert run(*compress_arguments("chosen.bayz", "--run", "chosen", *patterns)).returncode == 0
    layers = json.loads((folder / "chosen" / "result.json").read_text())["recipe"]["layers"]
    assert layers == {"include": ["*.weight"], "exclude": ["3"], "strengths": [{"pattern": "1", "factor": 2.0}]}


def named_file(folder, name, tensor="w"):
    path = os.path.join(os.fsencode(folder), name)
    with open(path, "wb") as file:
        file.write(encode(CompressedModel({tensor: QuantizedTensor(np.eye(3, dtype=np.uint8), [0, 1])})))
    return path


@pytest.mark.parametrize(
    ("encoding", "tensor", "shown"),
    [("cp1252", "вес", r"\u0432\u0435\u0441"), ("utf-8:strict", "вес", "вес"), ("ascii", "w", "w")],
)
def test_what_standard_output_can_not_show_is_written_out(tmp_path, encoding, tensor, shown):
    path = named_file(tmp_path, b"bad\xff.bayz", tensor)
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for words in (["info", path], ["info", path, "--json"], ["verify", path], ["info", path + b".gone"]):
        done = subprocess.run([sys.executable, "-m", "bayeszip", *words], capture_output=True, env=environment)
        assert b"Traceback" not in done.stderr
        assert done.returncode == (1 if words[1] != path else 0), done.stderr
        if words == ["info", path]:
            assert shown in done.stdout.decode(encoding.partition(":")[0])
            assert rb"bad\udcff.bayz" in done.stdout


def test_the_name_of_a_file_can_not_steer_the_terminal(run, tmp_path):
    path = os.fsdecode(named_file(tmp_path, b"e\x1b[31m.bayz"))
    (tmp_path / "no\x1b[31m.bayz").write_text("no file")
    page, tensors = tmp_path / "r\x1b[31m.html", tmp_path / "t\x1b[31m.safetensors"
    for words in (
        ("info", path),
        ("verify", path),
        ("report", path, "-o", page),
        ("export", path, tensors),
        ("pack", tensors, "-o", path),
    ):
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert r"\x1b[31m." in done.stdout
    done = run("info", tmp_path / "no\x1b[31m.bayz")
    assert "\x1b" not in done.stderr
    assert r"no\x1b[31m.bayz: the file doesn't begin with" in done.stderr


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_what_has_no_end_is_refused_at_once(run, compressed):
    for words in (("info",), ("verify",), ("evaluate",), ("report",)):
        done = run(*words, "/dev/zero")
        assert done.returncode == 1
        assert "can't read /dev/zero: it is a device; name a file" in done.stderr


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="no /dev/stdin")
def test_a_file_may_come_through_a_pipe(tmp_path):
    with open(named_file(tmp_path, b"net.bayz"), "rb") as file:
        blob = file.read()
    words = [sys.executable, "-m", "bayeszip", "info", "/dev/stdin"]
    done = subprocess.run(words, input=blob, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(blob)} bytes".encode() in done.stdout
    done = subprocess.run(words, input=b"no file", capture_output=True)
    assert done.returncode == 1
    assert b"/dev/stdin: the file doesn't begin with" in done.stderr


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_standard_output_that_takes_nothing_is_no_traceback(tmp_path, options, buffered):
    path = tmp_path / "net.bayz"
    path.write_bytes(encode(CompressedModel({"w": QuantizedTensor(np.eye(3, dtype=np.uint8), [0, 1])})))
    command = [sys.executable, *([] if buffered else ["-u"]), "-m", "bayeszip", "info", str(path), *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
    full = Path("/dev/full")
    if full.exists():
        with full.open("w") as target:
            ended = subprocess.run(command, stdout=target, stderr=subprocess.PIPE, text=True, env=environment)
        assert ended.returncode == 1
        assert ended.stderr == "bayeszip: can't write to standard output: No space left on device\n"
