"""Well-formed files from strangers: random graphs over all operators, random tensors, through every door.

    python tests/abuse/strangers.py --files 100000 --jobs 12 --report tests/abuse/strangers.json

A file is drawn so that most of its nodes fit together, then spoiled in a few places (shapes, types, roles, names,
attributes, links). Workers, under limits of memory and time, take it through every door. Faults are: a crash, a hang,
an error outside the family, more memory than the limits allow, a file that `verify` calls sound and that doesn't load
or run, and two runs with different answers; each is told with its seed, and `--first SEED --files 1` tries it again.

The report says for each door how often it let a file through, and by which error it refused. It is saved as it grows:
after `--seconds`, or when it is interrupted, the same command goes on.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tensor_kinds import KINDS, any_ways, small_ways
from units import Crew, go_on, left, save, serve

from bayeszip.codec import Limits, encode, inspect
from bayeszip.errors import BayeszipError, ModelError
from bayeszip.operators import OPERATORS, Attribute, Operator
from bayeszip.tensors import (
    RAW_DTYPES,
    CompressedModel,
    Graph,
    Node,
    QuantizedTensor,
    RawTensor,
    Varying,
)

__all__ = ["campaign", "stranger", "worker"]

LIMITS = Limits(elements=2**17, memory=2**20, loaded=2**21, values=2**16, operations=2**26)
#: Bytes that a child may take beyond what it has once all is imported; seconds of work, and of waiting, for one file.
MEMORY, SECONDS, WAITING = 3 << 30, 20, 300
#: MiB of resident memory, beyond what the first files took; a compiler and an exporter are loaded on the way.
GROWTH = 600

_ODD_INTS = (-(2**40), -7, -2, -1, 0, 1, 2, 3, 5, 64, 2**31, 2**40)
_ODD_FLOATS = (0.0, -1.0, 1e-5, 0.5, 3.0, 1e300, float("inf"), -float("inf"))
_ODD_NAMES = (
    "", ".", "a..b", "__class__", "forward", "_modules.w", "fc\x1b[2J.weight", "__metadata__", "_kept", "_kept.0",
    "\u202eevil", "x\ny", "rnn.weight_hh_l0", "fc.weight", "fc.bias", "fc.in_features", "rnn.weight_ih_l0",
    "norm.weight", ".".join("a" * 80), "../../etc/passwd", "training", "constant.0", "fc.weight.weight",
    "emb.weight", "é" * 20,
)  # fmt: skip


@dataclass
class Sketch:
    """A graph that grows; `shapes` are those of its values (−1: the batch), None where they don't fit."""

    dice: random.Random
    inputs: int
    nodes: list[Node] = field(default_factory=list)
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    tensors: dict[str, QuantizedTensor | RawTensor] = field(default_factory=dict)

    def tensor(self, *shape: int, dtype: str | None = None, high: int = 4) -> str:
        """A new tensor under a name that suits its place, or an old one of its shape."""
        old = [name for name, each in self.tensors.items() if each.shape == shape and dtype is None]
        if old and self.dice.random() < 0.1:
            return self.dice.choice(old)
        numbers = np.random.default_rng(self.dice.getrandbits(32))
        name = f"l{len(self.tensors)}.weight"
        if dtype is None and self.dice.random() < 0.7:
            self.tensors[name] = KINDS[self.dice.choice(list(KINDS))](numbers, shape)
        else:
            held = RAW_DTYPES[dtype or "float32"]
            values = numbers.normal(size=shape) if held.kind == "f" else numbers.integers(0, high, shape)
            self.tensors[name] = RawTensor(np.asarray(values).astype(held), dtype or "float32")
        return name


def _attribute(dice: random.Random, attribute: Attribute, rank: int) -> Any:
    """A value of the attribute's kind that may make sense."""
    if attribute.kind == "bool":
        return dice.random() < 0.5
    if attribute.kind == "choice":
        return dice.choice(attribute.choices)
    if attribute.kind == "float":
        return dice.choice((0.5, 1e-5, 1.0, 2.0))
    if attribute.kind == "int":
        return dice.choice((attribute.default, 0, 1, 2, -1, rank - 1))
    count = (len(attribute.default) if isinstance(attribute.default, tuple) else 0) or dice.randint(1, 3)
    if attribute.name == "dims":
        return tuple(dice.sample(range(rank), rank)) if attribute.default == (0, 2, 1) else (dice.randrange(-1, rank),)
    return tuple(dice.choice((0, 1, 1, 2, 3)) for _ in range(count))


def _weights(sketch: Sketch, op: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> tuple[str | None, ...]:
    """Tensors that fit an operator's input."""
    dice, new = sketch.dice, sketch.tensor
    width, channels = abs(shape[-1]) if shape else 1, abs(shape[1]) if len(shape) > 1 else 1
    some = dice.randint(1, 4)
    if op == "linear":
        return new(some, width), dice.choice((None, new(some)))
    if op.startswith("conv"):
        rank = int(op[-2])
        groups = attributes["groups"] = dice.choice((1, 1, channels))
        kernel = tuple(dice.randint(1, 3) for _ in range(rank))
        if "transpose" in op:
            return new(channels, some, *kernel), dice.choice((None, new(some * groups)))
        return new(some * groups, channels // groups, *kernel), dice.choice((None, new(some * groups)))
    if op.removesuffix("_from") in ("lstm", "gru", "rnn"):
        rows = {"lstm": 4, "gru": 3, "rnn": 1}[op.removesuffix("_from")] * some
        biases = dice.choice(((None, None), (new(rows), new(rows))))
        return new(rows, width), new(rows, some), *biases
    if op == "embedding":
        return (new(dice.randint(2, 6), some),)
    if op in ("layer_norm", "rms_norm"):
        attributes["shape"] = shape[-dice.randint(1, 2) :]
        return tuple(dice.choice((None, new(*map(abs, attributes["shape"])))) for _ in OPERATORS[op].tensors)
    if op in ("parameter", "buffer"):
        dtype = None if op == "parameter" else dice.choice(("float32", "int64", "bool", "float16"))
        return (new(*(dice.randint(1, 3) for _ in range(dice.randint(0, 3))), dtype=dtype),)
    return tuple(new(channels) for _ in OPERATORS[op].tensors)


def _grow(sketch: Sketch) -> None:
    """One more node: a few attempts at one that fits, else one that may not."""
    from bayeszip.graph.families import RULES

    dice = sketch.dice
    op = dice.choice(list(OPERATORS))
    operator: Operator = OPERATORS[op]
    for attempt in range(6):
        count = operator.inputs if operator.inputs >= 0 else dice.choice((1, 2, 3, 3, 4))
        inputs = tuple(dice.randrange(sketch.inputs, len(sketch.shapes)) for _ in range(count))
        if count > 1 and dice.random() < 0.6:
            inputs = inputs[:1] * count
        shapes = [sketch.shapes[value] for value in inputs]
        first = shapes[0] if shapes and shapes[0] is not None else (-1, 2)
        attributes = {
            each.name: each.default if dice.random() < 0.5 else _attribute(dice, each, len(first))
            for each in operator.attributes
        }
        if op in ("view", "expand"):
            attributes["shape"] = tuple(dice.sample(first, len(first))) if op == "view" else first
        before = dict(sketch.tensors)
        node = Node(op, inputs, _weights(sketch, op, first, attributes), attributes)
        try:
            given = [None if name is None else sketch.tensors[name].shape for name in node.tensors]
            RULES[op].check_tensors(node, given)
            fitting = [each for each in shapes if each is not None]
            shape = RULES[op].shape(node, fitting, given) if len(fitting) == len(shapes) else None
        except (ModelError, ValueError, TypeError, LookupError, ArithmeticError):
            if attempt < 5 or dice.random() < 0.9:
                sketch.tensors = before
                continue
            shape = None
        if shape is not None and np.prod(np.abs(np.array(shape, dtype=float))) > 5000:
            sketch.tensors = before
            continue
        sketch.nodes.append(node)
        sketch.shapes.append(shape)
        return


def _spoil(sketch: Sketch) -> None:
    """Change one thing that a file may say otherwise."""
    dice = sketch.dice
    at = dice.randrange(len(sketch.nodes))
    node = sketch.nodes[at]
    kind = dice.randrange(6)
    if kind == 0 and node.attributes:
        attribute = dice.choice(OPERATORS[node.op].attributes)
        value: Any = {
            "int": lambda: dice.choice(_ODD_INTS),
            "float": lambda: dice.choice(_ODD_FLOATS),
            "bool": lambda: dice.random() < 0.5,
            "choice": lambda: dice.choice(attribute.choices),
            "ints": lambda: tuple(dice.choice(_ODD_INTS) for _ in range(dice.choice((0, 1, 2, 3, 4, 40)))),
        }[attribute.kind]()
        sketch.nodes[at] = replace(node, attributes={**node.attributes, attribute.name: value})
    elif kind == 1 and node.tensors:
        names = [dice.choice([None, *sketch.tensors]) if dice.random() < 0.5 else name for name in node.tensors]
        sketch.nodes[at] = replace(node, tensors=tuple(names))
    elif kind == 2 and node.inputs:
        sketch.nodes[at] = replace(node, inputs=tuple(dice.randrange(sketch.inputs + at) for _ in node.inputs))
    elif kind == 3 and sketch.tensors:
        name = dice.choice(list(sketch.tensors))
        shape = tuple(dice.choice((0, 1, 2, 3, 7)) for _ in range(dice.randint(0, 4)))
        dtype = dice.choice((None, None, *RAW_DTYPES))
        made = sketch.tensor(*shape, dtype=dtype, high=dice.choice((2, 4, 120)))
        sketch.tensors[name] = sketch.tensors[made]
    elif kind == 4 and sketch.tensors:
        _rename(sketch, dice.choice(list(sketch.tensors)), dice.choice(_ODD_NAMES))
    elif kind == 5:
        sketch.tensors[dice.choice(_ODD_NAMES)] = sketch.tensors[sketch.tensor(dice.randint(0, 3), 2)]


def _vary(sketch: Sketch) -> None:
    """Let sizes of inputs be free, and numbers in attributes follow sizes: most so that they fit as they are."""
    dice = sketch.dice
    for at, node in enumerate(sketch.nodes):
        if node.op == "input":
            shape = node.attributes["shape"]
            free = [place for place in range(len(shape)) if dice.random() < 0.6]  # type: ignore[arg-type]
            sketch.nodes[at] = replace(node, varying=tuple(Varying("shape", place) for place in free))
        elif dice.random() < 0.5:
            sketch.nodes[at] = replace(node, varying=tuple(_followed(sketch, at, node)))


def _followed(sketch: Sketch, at: int, node: Node) -> Iterator[Varying]:
    dice, shapes = sketch.dice, sketch.shapes[sketch.inputs : sketch.inputs + at]
    known = [
        (sketch.inputs + value, dim, size)
        for value, shape in enumerate(shapes)
        for dim, size in enumerate(shape or ())
        if size > 0
    ]
    for attribute in OPERATORS[node.op].attributes:
        held = node.attributes[attribute.name]
        numbers = held if isinstance(held, tuple) else (held,)
        for place, number in enumerate(numbers):
            if not isinstance(number, int) or isinstance(number, bool) or not known or dice.random() < 0.4:
                continue
            same = [each for each in known if each[2] == number]
            picked = dice.choices(same if same and dice.random() < 0.7 else known, k=dice.choice((1, 1, 1, 2, 4)))
            factor, divisor = dice.choice(((1, 1), (1, 1), (2, 1), (1, 2), (-1, 1), (2**31, 1), (0, 3)))
            plain = Varying(attribute.name, place, tuple(each[:2] for each in picked), factor, divisor)
            at_hand = plain.at([shape or (1,) * 9 for shape in (*((),) * sketch.inputs, *shapes)])
            yield replace(plain, offset=number - at_hand if dice.random() < 0.9 else dice.choice(_ODD_INTS))


def _rename(sketch: Sketch, old: str, new: str) -> None:
    if new not in sketch.tensors:
        sketch.tensors = {new if name == old else name: tensor for name, tensor in sketch.tensors.items()}
        sketch.nodes = [
            replace(node, tensors=tuple(new if name == old else name for name in node.tensors)) for node in sketch.nodes
        ]


def stranger(seed: int) -> CompressedModel:
    """A model that a file may hold."""
    dice = random.Random(seed)
    sketch = Sketch(dice, dice.choice((1, 1, 1, 2)))
    stated = dice.random() < 0.85
    states: list[tuple[int, ...]] = []
    for position in range(sketch.inputs):
        shape = tuple(dice.randint(1, 5) for _ in range(dice.randint(1, 3)))
        sketch.shapes.append(None if stated else (-1, *shape))
        if stated:
            dtype = dice.choice(("float32",) * 6 + ("int64", "bool", "float64", "uint8"))
            own = dice.choice(("float32",) * 8 + ("float64", "bfloat16", "float16"))
            states.append(shape)
            sketch.nodes.append(Node("input", (position,), (), {"shape": shape, "dtype": dtype, "computes_in": own}))
    if stated:
        sketch.shapes += [(-1, *shape) for shape in states]
    else:
        sketch.inputs, inputs = 0, sketch.inputs
    for _ in range(dice.randint(1, 8)):
        _grow(sketch)
    if not stated:
        sketch.inputs = inputs
    if sketch.nodes and dice.random() < 0.5:
        for _ in range(dice.choice((1, 1, 2, 4))):
            _spoil(sketch)
    if stated and dice.random() < 0.4:
        _vary(sketch)
    if dice.random() < 0.1:  # large enough for all ways of coding
        numbers = np.random.default_rng(dice.getrandbits(32))
        sketch.tensors["apart.weight"] = KINDS[dice.choice(list(KINDS))](numbers, (12, 9))
    last = sketch.inputs + len(sketch.nodes) - 1
    outputs = (last,) if dice.random() < 0.8 else tuple(dice.randint(0, last) for _ in range(dice.randint(0, 3)))
    return CompressedModel(sketch.tensors, Graph(sketch.inputs, tuple(sketch.nodes), outputs))


# ── the doors ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Finding(Exception):
    """What must not be."""


@contextlib.contextmanager
def _door(name: str, outcomes: Counter) -> Iterator[None]:
    """A door: it lets through, or refuses by an error of the family, in words that are safe to print."""
    try:
        yield
        outcomes[f"{name}: passed"] += 1
    except BayeszipError as error:
        outcomes[f"{name}: {type(error).__name__}"] += 1
        if not all(line.isprintable() for line in str(error).split("\n")):
            raise Finding(f"{name} prints {str(error)!r}") from error
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"{name} lets {type(error).__name__} through: {str(error)[:300]}") from error


def _through(seed: int, folder: Path, outcomes: Counter) -> None:
    """One file through every door."""
    from bayeszip import graph, loading

    dice = random.Random(seed)
    with _door("encode", outcomes):
        model = stranger(seed)
        blob = encode(model, "csr-huffman") if seed % 10 == 0 else encode(model, ways=any_ways(model, dice))
    if "blob" not in locals():
        return
    path = folder / "stranger.bayz"
    path.write_bytes(blob)
    with _door("decode", outcomes):
        decoded, description = inspect(blob, LIMITS)
        if description.bytes != len(blob) or decoded != model:
            raise Finding("decode: another model")
    sound, network = False, None
    with _door("verify", outcomes):
        loading.verify(path, limits=LIMITS)
        sound = True
    with _door("load", outcomes):
        network = loading.load(path, limits=LIMITS)
    if sound != (network is not None):
        raise Finding(f"verify says {sound}, load says {network is not None}")
    if seed % 3 == 0:
        with _door("into", outcomes):
            _into(path)
    elif seed % 3 == 1:
        dense = seed % 2 == 0
        with _door("export, dense" if dense else "export", outcomes):
            loading.export(path, folder / "out.safetensors", dense=dense, limits=LIMITS)
    if seed % 7 == 0 and importlib.util.find_spec("rich") is None:
        outcomes["report: rich is not installed"] += 1
    elif seed % 7 == 0:
        with _door("report", outcomes):
            _report(path)
    if network is None:
        return
    with _door("run", outcomes):
        _run(model, network, path, seed)
    for turn in range(4 if model.graph is not None and model.graph.varies else 0):
        with _door("run at another size", outcomes):
            _run(model, network, path, seed + turn, other=True)
    if seed % 20 == 0 and model.graph is not None and graph.soundness.states_inputs(model.graph):
        with _door("against", outcomes):
            loading.verify(path, against=network, limits=LIMITS)
    if seed % 500 == 0:
        with _door("onnx", outcomes):
            loading.export(path, folder / "out.onnx", limits=LIMITS)


def _into(path: Path) -> None:
    """A class of one's own whose names strangers guess; whatever it takes must run or refuse."""
    import torch
    from torch import nn

    from bayeszip import loading

    class Zoo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.rnn, self.norm = nn.Linear(3, 7), nn.LSTM(3, 2), nn.BatchNorm1d(3)
            self.emb = nn.Embedding(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

        @property
        def poisoned(self) -> None:
            raise Finding("a name of the file was looked up as an attribute")

    net = loading.load(path, into=Zoo().eval(), limits=LIMITS)
    assert isinstance(net, Zoo)
    with contextlib.suppress(RuntimeError, IndexError):
        net.rnn(torch.randn(2, 1, net.rnn.input_size))
        net.emb(torch.tensor([0]))


def _report(path: Path) -> None:
    from bayeszip import report
    from bayeszip.summary import as_text, tensors_table

    contents = report.gather(path, limits=LIMITS)
    page, table = report.page(contents), as_text(tensors_table(contents.description))
    if "\x1b" in page + table or "<script" in page:
        raise Finding("report: a name of the file came through")


def _run(model: CompressedModel, network: Callable[..., Any], path: Path, seed: int, *, other: bool = False) -> None:
    """Twice on the same inputs, with other things in memory the second time: one answer.

    Args:
        other: whether to run at other sizes than those that are stated, small ones, none, or far too large ones.
    """
    import torch

    from bayeszip import loading
    from bayeszip.graph.free import input_shapes
    from bayeszip.graph.proof import outputs_of, random_inputs

    assert model.graph is not None
    generator = torch.Generator().manual_seed(seed)
    stated = {node.inputs for node in model.graph.nodes if node.op == "input"}
    if other:
        dice = random.Random(seed)
        shapes = [list(shape) for shape in input_shapes(model.graph)]
        for node in model.graph.nodes:
            for each in node.varying if node.op == "input" else ():
                size = dice.choice((0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 10, 12, 60, 3000))
                shapes[node.inputs[0]][each.place + 1] = size
        inputs = random_inputs(model, generator, batch=2, shapes=[tuple(shape) for shape in shapes])
    elif len(stated) == model.graph.inputs:
        inputs = random_inputs(model, generator, batch=2)
    else:
        dice = random.Random(seed)
        shapes = [[dice.randint(1, 4) for _ in range(dice.randint(0, 3))] for _ in range(model.graph.inputs)]
        inputs = tuple(torch.randn(2, *shape) for shape in shapes)
    with torch.no_grad():
        answers = []
        for second in (False, True):
            net = loading.load(path, limits=LIMITS) if second else network
            litter = [torch.full((dice_size,), float("nan")) for dice_size in (3, 17, 400, 9000)] if second else []
            try:
                answers.append(outputs_of(net(*inputs)))
            except (IndexError, RuntimeError) as error:  # numbers that the network computes, and then picks rows by
                kind = ("take", "embedding") if isinstance(error, IndexError) else ("gather",)
                if any(node.op in kind for node in model.graph.nodes) and "out of" in str(error):
                    raise ModelError(str(error)) from error
                raise
            except ValueError as error:  # an input that is stated after all
                if len(stated) < model.graph.inputs and "takes inputs of shape" in str(error):
                    raise ModelError(str(error)) from error
                raise
            del litter
    for one, again in zip(*answers, strict=True):
        if one.shape != again.shape or not torch.equal(one.double().nan_to_num(7.0), again.double().nan_to_num(7.0)):
            raise Finding("run: two answers")


# ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def worker() -> None:
    """The files of seeds that come in, each with what every door said."""
    import torch

    torch.set_num_threads(1)
    signal.alarm(WAITING)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder, small_ways():
        with contextlib.suppress(Finding):
            for seed in (0, 1):  # loads what must be loaded
                _through(seed, Path(folder), Counter())
        held = _resident()

        def tried(seed: int) -> dict:
            outcomes: Counter[str] = Counter()
            faults = []
            try:
                _through(seed, Path(folder), outcomes)
            except Finding as finding:
                faults.append(f"{seed}: {finding}")
            grown = _resident() - held
            if grown > GROWTH:
                faults.append(f"memory grew by {grown} MiB")
            return {"files": 1, "faults": faults, "outcomes": outcomes, "most_grown_mib": grown}

        serve(tried, WAITING, SECONDS, MEMORY)


def _resident() -> int:
    """MiB in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def campaign(
    count: int, first: int = 0, jobs: int = 1, report: Path | None = None, seconds: float = float("inf")
) -> dict:
    """What so many files come to; as many as time allows, the others by the next call with the same report."""
    results = json.loads(report.read_text()) if report and report.exists() else {}
    command = [sys.executable, "-W", "ignore", __file__, "--worker"]
    crew = Crew(command, jobs, {"OMP_NUM_THREADS": "1"}, time.monotonic() + seconds)

    def keep() -> None:
        results["outcomes"] = dict(sorted(results.get("outcomes", {}).items()))
        if report:
            save(report, results)

    go_on(results, first, count, crew, keep)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="by the clock; then the same command goes on"
    )
    parser.add_argument("--report", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    found = campaign(options.files, options.first, options.jobs, options.report, options.seconds)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if left(found, options.first, options.files):
        raise SystemExit(f"{found.get('files', 0)} of {options.files} files; the same command goes on")


if __name__ == "__main__":
    main()
