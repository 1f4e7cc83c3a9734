"""The order of the rooms (docs/architecture.md), and the rules every module keeps, read from the source."""

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "bayeszip"

#: The rooms from the ground up. A room imports from lower floors only; rooms on one floor don't know each other.
FLOORS = (
    {"errors"},
    {"operators", "limits", "files", "settings", "schedules", "devices", "modes", "processes", "readers"},
    {"variational", "tensors", "data", "models"},
    {"posterior", "graph", "codec"},
    {"fitting", "quantize", "summary", "loading"},
    {"recipe", "progress", "snapshots", "loaders"},
    {"result"},
    {"targets", "packing", "damage"},
    {"snapping"},
    {"ending"},
    {"opening"},
    {"compressing", "compressor"},
    {"report", "record", "previewing"},
    {"sweep", "experiments"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

#: Rooms that may know fewer than all below them.
ONLY = {
    "models": {"errors"},
    "data": {"errors", "files"},
    "variational": {"errors", "modes", "readers", "settings", "schedules"},
    "codec": {"errors", "files", "limits", "operators", "tensors"},
    "graph": {"errors", "limits", "operators", "tensors"},
}
#: Training never sees bytes.
NEVER = {("fitting", "codec"), ("fitting", "quantize"), ("posterior", "codec")}
#: No stage of the path knows of any data set or network by name.
NEVER |= {
    (room, leaf) for room in ("fitting", "result", "ending", "opening", "compressing") for leaf in ("data", "models")
}

#: What comes from outside the standard library, where that is less than everything.
OUTSIDE = {
    "errors": set(),
    "files": set(),
    "limits": set(),
    "operators": set(),
    "settings": set(),
    "schedules": set(),
    "devices": {"torch"},
    "modes": {"torch"},
    "readers": {"torch"},
    "tensors": {"numpy"},
    "codec": {"numpy", "numba"},
    "models": {"torch"},
    "variational": {"torch", "numpy", "numba", "triton"},
}
DEPENDENCIES = {"torch", "numpy", "numba", "safetensors", "rich", "typer"}
DEPENDENCIES |= {"accelerate", "lightning", "matplotlib", "optuna", "transformers", "triton"}  # extras
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "core", "common", "misc"}
LONGEST_BODY = 50

Tree = dict[str, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(sources: dict[str, str]) -> Tree:
    return {name: ast.parse(source) for name, source in sources.items()}


def read_package() -> Tree:
    """Every module by its dotted name, a package by its own: bayeszip, bayeszip.codec, bayeszip.codec.csr."""
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("bayeszip", *path.relative_to(PACKAGE).with_suffix("").parts)
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return parsed(sources)


def imports(name: str, tree: Tree) -> Iterator[str]:
    """The dotted names that module `name` imports anywhere in it, the ones inside functions included."""
    is_package = any(other.startswith(f"{name}.") for other in tree)
    for node in ast.walk(tree[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
            base = ".".join([*(parent if node.level else []), *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in tree else base


def inner_imports(name: str, tree: Tree) -> set[str]:
    return {target for target in imports(name, tree) if target.split(".")[0] == "bayeszip"}


def room(module: str) -> str:
    """The first part below the package; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def wrong_imports(tree: Tree) -> list[str]:
    """Each import that goes up, sideways, or past what its room may know."""
    faults = []
    for name in tree:
        here = room(name)
        if here and here not in FLOOR_OF:
            faults.append(f"{name}: room {here} has no floor in FLOORS")
            continue
        for target in sorted(inner_imports(name, tree)):
            there = room(target)
            if there == here or not there:
                continue
            upward = not here or FLOOR_OF.get(there, len(FLOORS)) >= FLOOR_OF[here]
            if upward or there not in ONLY.get(here, {there}) or (here, there) in NEVER:
                faults.append(f"{name} imports {target}")
    return faults


def cycle(tree: Tree) -> list[str]:
    """Modules that import each other in a circle, if any do."""
    graph = {name: {target for target in inner_imports(name, tree) if target in tree} - {name} for name in tree}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


def outside_imports(tree: Tree) -> list[str]:
    """Each import of a package its room may not use, or that is no dependency at all, or that runs what it reads."""
    faults = []
    for name in tree:
        allowed = OUTSIDE.get(room(name), DEPENDENCIES if room(name) else set())
        for target in imports(name, tree):
            top = target.split(".")[0]
            standard = top in sys.stdlib_module_names and top not in UNSAFE_MODULES
            if not standard and top != "bayeszip" and top not in allowed:
                faults.append(f"{name} imports {target}")
    return faults


def functions(tree: Tree) -> Iterator[tuple[str, Function]]:
    for name, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.lineno} {node.name}", node


def unannotated(tree: Tree) -> list[str]:
    """Functions that leave an argument or, except `__init__` and its kind, the result without a type."""
    faults = []
    for place, function in functions(tree):
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
        bare = [argument.arg for argument in (*named, *starred) if argument.annotation is None]
        bare = [argument for argument in bare if argument not in ("self", "cls")]
        is_special = function.name.startswith("__") and function.name.endswith("__")
        if bare or (function.returns is None and not is_special):
            faults.append(f"{place}: {', '.join(bare) or 'result'}")
    return faults


def long_functions(tree: Tree) -> list[str]:
    """Functions whose body, docstring aside, has more lines than a screen."""
    faults = []
    for place, function in functions(tree):
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        length = (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1 if body else 0
        if length > LONGEST_BODY:
            faults.append(f"{place}: {length} lines")
    return faults


def careless(tree: Tree) -> list[str]:
    """Input checked by `assert`, which -O removes, and text run as code."""
    faults = []
    for name, module in tree.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Assert):
                faults.append(f"{name}:{node.lineno} assert")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                faults.append(f"{name}:{node.lineno} {node.func.id}")
    return faults


def without_opening(tree: Tree) -> list[str]:
    """Modules that don't open with a docstring and `__all__`; an empty one may, having nothing to offer."""
    faults = []
    for name, module in tree.items():
        if not module.body or name.endswith("__main__"):
            continue
        names = {
            target.id
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        only_docstring = len(module.body) == 1
        if not ast.get_docstring(module) or ("__all__" not in names and not only_docstring):
            faults.append(name)
    return faults


CHECKS = (wrong_imports, cycle, outside_imports, unannotated, long_functions, careless, without_opening)


@pytest.fixture(scope="module")
def package() -> Tree:
    tree = read_package()
    assert {"bayeszip", "bayeszip.errors", "bayeszip.codec"} <= set(tree)
    return tree


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_the_rules(package, check):
    assert check(package) == []


def test_modules_are_named_by_what_they_hold(package):
    assert [name for name in package if name.rsplit(".", 1)[-1] in VAGUE_NAMES] == []


LONG = "def f() -> None:\n    '''Said at\n    length.'''\n" + "    print()\n" * LONGEST_BODY


@pytest.mark.parametrize(
    ("check", "sources", "faults"),
    [
        (wrong_imports, {"bayeszip.codec.a": "from bayeszip.tensors import X"}, []),
        (wrong_imports, {"bayeszip.codec.a": "from bayeszip.codec.b import X", "bayeszip.codec.b": ""}, []),
        (wrong_imports, {"bayeszip.cli": "import bayeszip.compressing, bayeszip.codec.csr"}, []),
        (wrong_imports, {"bayeszip.cli": "from bayeszip import __version__"}, []),
        (wrong_imports, {"bayeszip.tensors": "import bayeszip.codec"}, ["bayeszip.tensors imports bayeszip.codec"]),
        (
            wrong_imports,
            {"bayeszip.codec.a": "def f():\n    from bayeszip import graph", "bayeszip.graph": ""},
            ["bayeszip.codec.a imports bayeszip.graph"],
        ),
        (
            wrong_imports,
            {"bayeszip.codec": "from ..graph import trace", "bayeszip.codec.a": "", "bayeszip.graph": ""},
            ["bayeszip.codec imports bayeszip.graph"],
        ),
        (
            wrong_imports,
            {"bayeszip.codec.a": "from .. import posterior", "bayeszip.posterior": ""},
            ["bayeszip.codec.a imports bayeszip.posterior"],
        ),
        (wrong_imports, {"bayeszip.fitting.a": "import bayeszip.codec"}, ["bayeszip.fitting.a imports bayeszip.codec"]),
        (wrong_imports, {"bayeszip.models": "import bayeszip.files"}, ["bayeszip.models imports bayeszip.files"]),
        (wrong_imports, {"bayeszip": "from bayeszip.errors import X"}, ["bayeszip imports bayeszip.errors"]),
        (wrong_imports, {"bayeszip.attic": ""}, ["bayeszip.attic: room attic has no floor in FLOORS"]),
        (wrong_imports, {"bayeszip.cli": "import bayeszip.attic"}, ["bayeszip.cli imports bayeszip.attic"]),
        (cycle, {"bayeszip.a": "import bayeszip.b", "bayeszip.b": "import bayeszip.c", "bayeszip.c": ""}, []),
        (
            cycle,
            {"bayeszip.a": "from bayeszip import b", "bayeszip.b": "def f():\n    from . import a"},
            ["bayeszip.a", "bayeszip.b"],
        ),
        (outside_imports, {"bayeszip.codec.a": "import numpy.linalg, numba, zlib"}, []),
        (outside_imports, {"bayeszip.codec.a": "from torch import nn"}, ["bayeszip.codec.a imports torch"]),
        (outside_imports, {"bayeszip": "import numpy"}, ["bayeszip imports numpy"]),
        (outside_imports, {"bayeszip.cli": "import requests"}, ["bayeszip.cli imports requests"]),
        (outside_imports, {"bayeszip.cli": "import pickle"}, ["bayeszip.cli imports pickle"]),
        (unannotated, {"m": "class C:\n    def __init__(self, a: int): pass"}, []),
        (unannotated, {"m": "def f(a, *b: int, c: int, **d) -> None: pass"}, ["m:1 f: a, d"]),
        (unannotated, {"m": "def f(): pass"}, ["m:1 f: result"]),
        (long_functions, {"m": LONG}, []),
        (long_functions, {"m": LONG + "    print()\n"}, [f"m:1 f: {LONGEST_BODY + 1} lines"]),
        (careless, {"m": "model.eval()"}, []),
        (careless, {"m": "def f():\n    assert True\neval('1')"}, ["m:3 eval", "m:2 assert"]),
        (without_opening, {"m": "", "n": "'''N.'''", "o": "'''O.'''\n__all__ = []"}, []),
        (without_opening, {"m": "'''M.'''\nX = 1", "n": "__all__ = []"}, ["m", "n"]),
    ],
)
def test_the_checks_find_what_they_look_for(check, sources, faults):
    assert sorted(check(parsed(sources))) == sorted(faults)


def run_fresh(script: str) -> str:
    """What a new Python process prints."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


LOADED = "import sys; print(*sorted({'torch', 'numpy', 'numba', 'rich', 'typer', 'matplotlib'} & set(sys.modules)))"


def test_importing_bayeszip_imports_nothing_heavy():
    assert run_fresh(f"import bayeszip; {LOADED}") == ""
    assert run_fresh(f"import bayeszip; bayeszip.BayeszipError; {LOADED}") == ""


def test_the_codec_needs_no_torch():
    modules = ["bayeszip.codec", "bayeszip.tensors", "bayeszip.operators", "bayeszip.files"]
    modules += [f"bayeszip.codec.{module.name}" for module in pkgutil.iter_modules([str(PACKAGE / "codec")])]
    assert set(run_fresh(f"import {', '.join(modules)}; {LOADED}").split()) <= {"numpy", "numba"}


def test_every_public_name_is_there():
    """The lazy public surface names only what its modules have."""
    run_fresh("import bayeszip\nfor name in bayeszip.__all__: getattr(bayeszip, name)")
