"""What is not imported before it is needed: start-up is paid on every call."""

import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from bayeszip import cli
from bayeszip.cli import main
from bayeszip.codec import encode
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor


@pytest.fixture
def small(tmp_path):
    """A file of one layer."""
    weight = QuantizedTensor(np.random.default_rng(0).integers(0, 3, (20, 30)), [0, 0.5, -0.5])
    nodes = (
        Node("input", (0,), (), {"shape": (30,)}),
        Node("linear", (1,), ("fc.weight", None)),
        Node("relu", (2,)),
    )
    path = tmp_path / "small.bayz"
    path.write_bytes(encode(CompressedModel({"fc.weight": weight}, Graph(1, nodes, (3,)))))
    return str(path)


def imported(code: str) -> set[str]:
    """Modules that a new process has imported after it ran `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint('MODULES', *sys.modules)"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(run.stdout.rpartition("MODULES ")[2].split())


INFO = """
import sys
from bayeszip.cli import main
sys.argv = ["bayeszip", "info", FILE]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_info_needs_neither_torch_nor_numba_nor_other_commands(small, options):
    modules = imported(INFO.replace("FILE", ", ".join(map(repr, [small, *options]))))
    assert "bayeszip.cli.contents" in modules
    assert not modules & {"torch", "numba", "bayeszip.graph", "bayeszip.loading", "concurrent.futures", "sympy"}
    assert ("typer" in modules) == bool(options)  # a parser takes as long to import as the file to read
    others = {"compress", "evaluate", "export", "pack", "recipes", "report", "reproduce", "sweep", "verify"}
    assert not modules & {f"bayeszip.cli.{name}" for name in others}


def test_a_small_file_is_loaded_without_training_or_numba(small):
    modules = imported(f"import bayeszip\nbayeszip.load({small!r})")
    assert "torch" in modules
    floors = ("fitting", "variational", "compressing", "compressor", "recipe", "quantize", "posterior", "cli", "data")
    assert not modules & {"numba", "sympy", "rich", "typer", *(f"bayeszip.{floor}" for floor in floors)}


def test_info_shows_the_same_with_and_without_a_parser(small, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bayeszip", "info", small])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    shown = capsys.readouterr().out
    assert CliRunner().invoke(cli.app, ["info", small]).output == shown
    assert "fc.weight" in shown


def test_info_without_a_parser_tells_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bayeszip", "info", str(tmp_path / "missing.bayz")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert "missing.bayz" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("collecting", [True, False])
def test_importing_leaves_the_garbage_collector_as_it_was(collecting):
    switch = "enable" if collecting else "disable"
    code = f"import gc\ngc.{switch}()\nimport bayeszip\nbayeszip.codec\nassert gc.isenabled() is {collecting}"
    assert "bayeszip.codec" in imported(code)


def test_importing_the_package_imports_nothing():
    assert {name for name in imported("import bayeszip") if name.startswith("bayeszip.")} == set()


@pytest.mark.parametrize("command", ["--help", "nonsense"])
def test_all_commands_are_known_where_none_is_named(command):
    code = f"import sys\nfrom bayeszip.cli import main\nsys.argv = ['bayeszip', {command!r}]\n"
    modules = imported(code + "try:\n    main()\nexcept SystemExit:\n    pass")
    assert {"bayeszip.cli.compress", "bayeszip.cli.verify"} <= modules
