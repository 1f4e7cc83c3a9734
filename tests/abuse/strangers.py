"""Well-formed files from strangers: random graphs over all operators, random tensors, through every door.

    python tests/abuse/strangers.py --files 100000 --report tests/abuse/strangers.json

A file is drawn so that most of its nodes fit together, then spoiled in a few places (shapes, types, roles, names,
attributes, links). Child processes, under limits of memory and time, take it through every door. Findings are: a crash,
a hang, an error outside the family, more memory than the limits allow, a file that `verify` calls sound and that
doesn't load or run, and two runs with different answers.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bayeszip.codec import Limits, encode, inspect
from bayeszip.errors import BayeszipError, ModelError
from bayeszip.operators import OPERATORS, Attribute, Operator
from bayeszip.tensors import (
    RAW_DTYPES,
    CompressedModel,
    Graph,
    LogGrid,
    Node,
    QuantizedTensor,
    RawTensor,
    UniformGrid,
    Varying,
)

__all__ = ["Findings", "campaign", "stranger", "worker"]

LIMITS = Limits(elements=2**17, memory=2**20, loaded=2**21, values=2**16, operations=2**26)
#: Bytes that a child may take beyond what it has once all is imported; seconds of work, and of waiting, for one file.
MEMORY, SECONDS, WAITING = 3 << 30, 20, 300
#: Of resident memory, beyond what the first files took, when all are done.
GROWTH = 400 << 20

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
            self.tensors[name] = self._quantized(shape, numbers)
        else:
            held = RAW_DTYPES[dtype or "float32"]
            values = numbers.normal(size=shape) if held.kind == "f" else numbers.integers(0, high, shape)
            self.tensors[name] = RawTensor(np.asarray(values).astype(held), dtype or "float32")
        return name

    def _quantized(self, shape: tuple[int, ...], numbers: np.random.Generator) -> QuantizedTensor:
        """By values, by a grid, or with a scale for each row, as version 2 of the format has them."""
        symbols = numbers.integers(0, 4, shape, dtype=np.uint8)
        kind = self.dice.random()
        scale, axis = None, 0
        if kind < 0.2 and len(shape) > 1 and symbols.size:
            axis = self.dice.randrange(2)
            grid = LogGrid(0.25, 1.5, 5, signed=self.dice.random() < 0.5)
            scale = QuantizedTensor.on_grid(numbers.integers(0, 5, shape[axis : axis + 1]), grid)
        if kind > 0.8:
            return QuantizedTensor.on_grid(symbols, UniformGrid(0.25, 4))
        return QuantizedTensor(symbols, np.array([0.0, -0.75, 0.5, 1.25], dtype=np.float32), scale=scale, axis=axis)


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
    if op in ("lstm", "gru", "rnn"):
        rows = {"lstm": 4, "gru": 3, "rnn": 1}[op] * some
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
    last = sketch.inputs + len(sketch.nodes) - 1
    outputs = (last,) if dice.random() < 0.8 else tuple(dice.randint(0, last) for _ in range(dice.randint(0, 3)))
    return CompressedModel(sketch.tensors, Graph(sketch.inputs, tuple(sketch.nodes), outputs))


# ── the doors ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Finding(Exception):
    """What must not be."""


@contextlib.contextmanager
def _door(name: str, refused: Counter) -> Iterator[None]:
    """A door: it lets through, or refuses by an error of the family, in words that are safe to print."""
    try:
        yield
    except BayeszipError as error:
        refused[f"{name}: {type(error).__name__}"] += 1
        if not all(line.isprintable() for line in str(error).split("\n")):
            raise Finding(f"{name} prints {str(error)!r}") from error
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"{name} lets {type(error).__name__} through: {str(error)[:300]}") from error


def _through(seed: int, folder: Path, refused: Counter) -> None:
    """One file through every door."""
    from bayeszip import graph, loading

    with _door("encode", refused):
        model = stranger(seed)
        blob = encode(model, "csr-huffman" if seed % 10 == 0 else "context")
    if "blob" not in locals():
        return
    path = folder / "stranger.bayz"
    path.write_bytes(blob)
    with _door("decode", refused):
        decoded, description = inspect(blob, LIMITS)
        if description.bytes != len(blob) or decoded != model:
            raise Finding("decode: another model")
    sound, network = False, None
    with _door("verify", refused):
        loading.verify(path, limits=LIMITS)
        sound = True
    with _door("load", refused):
        network = loading.load(path, limits=LIMITS)
    if sound != (network is not None):
        raise Finding(f"verify says {sound}, load says {network is not None}")
    if seed % 3 == 0:
        with _door("into", refused):
            _into(path)
    elif seed % 3 == 1:
        dense = seed % 2 == 0
        with _door("export, dense" if dense else "export", refused):
            loading.export(path, folder / "out.safetensors", dense=dense, limits=LIMITS)
    if seed % 7 == 0:
        with _door("report", refused):
            _report(path)
    if network is None:
        return
    with _door("run", refused):
        _run(model, network, path, seed)
    for turn in range(4 if model.graph is not None and model.graph.varies else 0):
        with _door("run at another size", refused):
            _run(model, network, path, seed + turn, other=True)
    if seed % 20 == 0 and model.graph is not None and graph.soundness.states_inputs(model.graph):
        with _door("against", refused):
            loading.verify(path, against=network, limits=LIMITS)
    if seed % 500 == 0:
        with _door("onnx", refused):
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
            except IndexError as error:  # numbers that the network computes, and then picks rows by
                if any(node.op in ("take", "embedding") for node in model.graph.nodes):
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


# ── children and their parent ─────────────────────────────────────────────────────────────────────────────────────────


def worker(first: int, count: int) -> None:
    """The files of so many seeds, each announced before it is tried; findings and counts as lines of JSON."""
    import torch

    torch.set_num_threads(1)
    refused: Counter = Counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        with contextlib.suppress(Finding):
            for seed in (0, 1):  # loads what must be loaded
                _through(seed, Path(folder), Counter())
        status = Path("/proc/self/statm").read_text().split()
        page = resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (int(status[0]) * page + MEMORY,) * 2)
        resident = int(status[1]) * page
        for kind in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(kind, signal.SIG_DFL)
        for seed in range(first, first + count):
            print(json.dumps({"seed": seed}), flush=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, WAITING)
            try:
                _through(seed, Path(folder), refused)
            except Finding as finding:
                print(json.dumps({"finding": str(finding)}), flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = int(Path("/proc/self/statm").read_text().split()[1]) * page - resident
    print(json.dumps({"refused": refused, "grown": grown}), flush=True)


@dataclass
class Findings:
    """What a campaign found."""

    files: int = 0
    findings: list[str] = field(default_factory=list)
    refused: Counter = field(default_factory=Counter)
    grown: int = 0
    seconds: float = 0.0

    def merged(self, other: "Findings") -> "Findings":
        return Findings(
            self.files + other.files,
            self.findings + other.findings,
            self.refused + other.refused,
            max(self.grown, other.grown),
            self.seconds + other.seconds,
        )


def campaign(count: int, first: int = 0) -> Findings:
    """So many files, in a child that is replaced when one of them ends it."""
    result, begin, seed, end = Findings(), time.perf_counter(), first, first + count
    while seed < end:
        with tempfile.TemporaryFile("w+") as errors:
            done = False
            command = [sys.executable, "-W", "ignore", __file__, "--worker", str(seed), str(min(end - seed, 2000))]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
            with subprocess.Popen(command, env=one_thread, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
                for line in child.stdout or ():
                    told = json.loads(line)
                    if "seed" in told:
                        seed = told["seed"]
                        result.files += 1
                    elif "finding" in told:
                        result.findings.append(f"{seed}: {told['finding']}")
                    else:
                        done = True
                        result.refused.update(told["refused"])
                        result.grown = max(result.grown, told["grown"])
            if child.returncode or not done:
                errors.seek(0)
                result.findings.append(f"{seed}: the child ended with {child.returncode}: {errors.read()[-300:]}")
        seed += 1
    if result.grown > GROWTH:
        result.findings.append(f"memory grew by {result.grown >> 20} MiB")
    result.seconds = time.perf_counter() - begin
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--worker", type=int, nargs=2)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    found = Findings()
    while found.files < options.files:  # what has run is reported as it goes
        count = min(2000, options.files - found.files)
        found = found.merged(campaign(count, options.first + found.files))
        told = {
            "files": found.files,
            "first": options.first,
            "findings": found.findings,
            "refused": dict(sorted(found.refused.items())),
            "grown_mib": found.grown >> 20,
            "seconds": round(found.seconds),
        }
        if options.report:
            options.report.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
