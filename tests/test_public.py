"""The public surface as type checkers, editors and a fresh interpreter see it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bayeszip
from bayeszip.fitting import Watcher

STUB = Path(bayeszip.__file__).with_name("__init__.pyi")

#: A program that uses the surface; its own comments hold mypy to what `--strict` does.
PROGRAM = Path(__file__).with_name("public_program.py")


def test_mypy_at_its_strictest_knows_the_surface(monkeypatch):
    """As `make check` does, whose cache makes this quick."""
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(PROGRAM.parents[1])
    out, _, status = api.run([str(PROGRAM)])
    assert status == 0, out


def test_the_stub_names_what_there_is():
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    names = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names | {"__version__"} == set(bayeszip.__all__)
    owners = {
        alias.name: (node.module or "").removeprefix("bayeszip.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "bayeszip"
        for alias in node.names
    }
    assert owners == bayeszip._OWNERS


def test_a_fresh_interpreter_lists_it_all_and_imports_nothing():
    script = "import bayeszip, sys; print(*dir(bayeszip)); print('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    names, loaded = out.splitlines()
    wanted = {"compress", "load", "verify", "export", "evaluate", "recipe", "Watcher", "ModelError", "pack", "Result"}
    assert wanted < set(names.split())
    assert loaded == "False False"


def test_a_recipe_is_called_by_its_name_whatever_was_imported_before():
    script = (
        "import bayeszip; a = bayeszip.recipe('quick'); import bayeszip.recipe; print(a == bayeszip.recipe('quick'))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "True"


def test_a_result_is_one_line():
    result = bayeszip.pack(nn.Sequential(nn.Linear(8, 4)), example_inputs=torch.randn(2, 8))
    assert "\n" not in repr(result)
    assert f"{result.bytes:,} bytes" in repr(result)
    assert len(repr(result)) < 200


@pytest.mark.parametrize(
    "settings",
    [{"all.tau1": 2, "batch_size": 8}, ["all.tau1=2", "batch_size=8"]],
    ids=["by name", "as on the command line"],
)
def test_compress_takes_settings(settings):
    x = torch.randn(32, 6)
    loader = bayeszip.ResidentBatches(x, (x[:, 0] > 0).long(), 16)
    quick = bayeszip.recipe("quick").override("epochs_scale=0.001")
    result = bayeszip.compress(
        nn.Sequential(nn.Linear(6, 2)), loader, recipe=quick, settings=settings, device="cpu", watcher=Watcher()
    )
    assert result.fit is not None
    assert {phase.tau1 for phase in result.fit.recipe.phases} == {2.0}
    assert result.fit.recipe.batch_size == 8


def test_one_setting_may_stand_alone():
    assert bayeszip.recipe("quick").having("batch_size=8").batch_size == 8
    with pytest.raises(bayeszip.RecipeError, match="no setting"):
        bayeszip.recipe("quick").having({"batch": 8})
