"""Pages that are generated say what the source says; examples in the README run."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import bayeszip
from bayeszip.fitting import ResidentBatches
from bayeszip.recipe import RECIPES, recipe
from bayeszip.variational.terms import KINDS

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_operators_is_current():
    built = runpy.run_path(str(ROOT / "docs" / "build_operators.py"))
    assert built["PAGE"].read_text(encoding="utf-8") == built["page"](), "run: python docs/build_operators.py"


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    first, loop = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    monkeypatch.chdir(tmp_path)
    # The recipes they name take hundreds of epochs; the snippets are about the calls.
    for name in ("vd+sws", "quick"):
        monkeypatch.setitem(RECIPES, name, recipe(name).override("epochs_scale=0.001"))

    class MyNet(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    x = torch.randn(64, 6)
    loader = ResidentBatches(x, (x[:, 0] > 0).long(), 16)
    names = {"model": MyNet(), "MyNet": MyNet, "train_loader": loader, "val_loader": loader, "x": x[:2]}
    exec(first, names)
    assert (tmp_path / "net.bayz").stat().st_size == names["result"].bytes
    assert names["net"](x).shape == (64, 2)
    assert bayeszip.load(tmp_path / "as-is.bayz")(x).shape == (64, 2)
    (tmp_path / "net.bayz").unlink()
    exec(loop, {**names, "torch": torch, "F": nn.functional, "dataset": x, "batches": loader})
    assert bayeszip.load(tmp_path / "net.bayz")(x).shape == (64, 2)


def test_the_python_of_the_page_on_extending_runs(capsys):
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    names = {"__name__": "extending"}
    try:
        for snippet in re.findall(r"```python\n(.*?)```", text, re.S):
            exec(snippet, names)
    finally:
        KINDS.pop("unit-norms", None)
    assert "'unit-norms': " in capsys.readouterr().out


def test_the_files_that_the_page_on_extending_names_are_there():
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(named) > 8
    for path in named:
        assert (ROOT / path).is_file() or (ROOT / "src" / "bayeszip" / path).is_file(), path


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    from bayeszip.cli import app

    known = {command.callback.__name__ for command in app.registered_commands}
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M))
    used = set(re.findall(r"^bayeszip (\w+)", blocks, re.M))
    assert {"compress", "evaluate", "info"} <= used <= known
    assert "make compress" in text
    assert "make test" in text


@pytest.fixture(scope="module")
def written():
    """What `make docs` makes of a page."""
    return runpy.run_path(str(ROOT / "docs" / "pages.py"))["written"]


def test_the_reference_has_every_public_name(written):
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^::: (\w+)$", text, re.M))
    assert names == set(bayeszip._OWNERS)
    page = written(text)
    assert ":::" not in page
    assert "    train_loader: " in page
    assert "max_loss_increase, max_metric_drop`: a target instead of a knob" in page
    assert re.search(
        r"### Result\.save\n\n```python\nsave\(self, path: .*\n```\n\nWrite the file, whole or not at all\.", page
    )
    assert max(map(len, re.search(r"```python\ncompress\(.*?```", page, re.S)[0].splitlines())) <= 100


def test_a_page_shows_every_file_that_it_mentions(written):
    for path in sorted((ROOT / "docs" / "guide").glob("*.md")):
        page = written(path.read_text(encoding="utf-8"))
        for name in ("nets", "mydata"):
            if f"{name}:" in page:
                assert f"`{name}.py`:\n\n```python\n" in page, path.name
    assert "<!-- file" not in page
