"""Sizes and speed of the codec beside its peers, in one run; writes benchmarks/codec.json and benchmarks/CODEC.md.

    python benchmarks/codec_table.py [--peer /tmp/nncodec/bin/python] [--only sizes|speed|threads|start|scale]

The peer is NNCodec 2.1.3 in a virtual environment of its own; see codec_peer.py for how to make it. Without it, its
columns stay empty. Times are processor seconds of one thread, the best of three; those of threads are by the clock.
"""

import argparse
import json
import lzma
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import startup
from bayeszip.codec import decode, describe, encode, measure
from bayeszip.codec.huffman import HuffmanCode
from bayeszip.tensors import CompressedModel, QuantizedTensor

HERE = Path(__file__).parent
CODEBOOK = (
    np.concatenate([[0.0], np.sort(np.random.default_rng(5).normal(size=16))]).astype(np.float16).astype(np.float32)
)
LENET_300_100 = {"fc1.weight": (300, 784), "fc2.weight": (100, 300), "fc3.weight": (10, 100)}
RESNET_18 = (
    [(64, 3, 7, 7)]
    + [(64, 64, 3, 3)] * 4
    + [(128, 64, 3, 3), (128, 128, 3, 3), (128, 64, 1, 1)] + [(128, 128, 3, 3)] * 2
    + [(256, 128, 3, 3), (256, 256, 3, 3), (256, 128, 1, 1)] + [(256, 256, 3, 3)] * 2
    + [(512, 256, 3, 3), (512, 512, 3, 3), (512, 256, 1, 1)] + [(512, 512, 3, 3)] * 2
    + [(1000, 512)]
)  # fmt: skip


def synthetic(rows: float, columns: float, seed: int = 0) -> CompressedModel:
    """LeNet-300-100's shapes, 1.5 % weights of 16 values, in a share of the rows and of the columns."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (height, width) in LENET_300_100.items():
        live = np.outer(_some(random, height, rows), _some(random, width, columns))
        mask = live & (random.random((height, width)) < 0.015 * live.size / live.sum())
        tensors[name] = QuantizedTensor(random.integers(1, 17, (height, width)) * mask, CODEBOOK)
    return CompressedModel(tensors)


def _some(random: np.random.Generator, count: int, share: float) -> np.ndarray:
    chosen = np.zeros(count, dtype=bool)
    chosen[random.permutation(count)[: max(1, round(share * count))]] = True
    return chosen


def bound(model: CompressedModel, rows: bool, columns: bool) -> float:
    """Bytes of the places among live cells and of the values: the entropy, without which rows and columns live."""
    bits = 0.0
    for tensor in model.tensors.values():
        mask = tensor.symbols.reshape(tensor.shape[0], -1) > 0
        cells = (mask.any(1).sum() if rows else mask.shape[0]) * (mask.any(0).sum() if columns else mask.shape[1])
        counts = np.bincount(tensor.symbols.reshape(-1), minlength=2)[1:]
        bits += _entropy(np.array([mask.sum(), cells - mask.sum()])) + _entropy(counts)
    return bits / 8


def _entropy(counts: np.ndarray) -> float:
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def peer(python: str | None, model: CompressedModel) -> dict | None:
    """NNCodec's figures for the model's indices: signed, 0 for no weight."""
    if python is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "indices.npz"
        np.savez(path, **{name: _signed(tensor) for name, tensor in model.tensors.items()})
        run = subprocess.run(
            [python, str(HERE / "codec_peer.py"), str(path)], capture_output=True, text=True, check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return json.loads(run.stdout.strip().splitlines()[-1])


def _signed(tensor: QuantizedTensor) -> np.ndarray:
    """Symbols as small integers of the values' signs, the nearer to 0 the smaller."""
    negative = np.flatnonzero(tensor.codebook < 0)
    positive = np.flatnonzero(tensor.codebook > 0)
    table = np.zeros(tensor.codebook.size, dtype=np.int32)
    table[negative[np.argsort(-tensor.codebook[negative])]] = -np.arange(1, negative.size + 1)
    table[positive[np.argsort(tensor.codebook[positive])]] = np.arange(1, positive.size + 1)
    return table[tensor.symbols]


def papers_bytes(model: CompressedModel, width: int) -> int:
    """CSR + Huffman to the letter (sec. 4, app. B): no layout is chosen, and `IR` holds cumulative sums.

    Empty rows and columns go, at a bit for each row and column where any does; then `IR` in as many bits as its largest
    entry needs, column offsets of `width` bits with padding zeros, and one Huffman code, sent as its code lengths. All
    else costs what it costs in a file of ours.
    """
    bits, counts = 0, np.zeros(max(tensor.codebook.size for tensor in model.tensors.values()), dtype=np.int64)
    for tensor in model.tensors.values():
        matrix = tensor.symbols.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
        rows, columns = matrix.any(1), matrix.any(0)
        bits += 2 + sum(live.size for live in (rows, columns) if not live.all() and live.any())
        places = [np.flatnonzero(row) for row in matrix[rows][:, columns]]
        padding = sum(int((np.diff(found, prepend=-1) - 1 >> width).sum()) for found in places)
        entries = sum(found.size for found in places) + padding
        bits += (len(places) + 1) * entries.bit_length() + entries * width
        counts += np.bincount(matrix[matrix > 0], minlength=counts.size)
        counts[0] += padding
    lengths = HuffmanCode.of_counts(counts).lengths.astype(np.int64)
    bits += int((counts * lengths).sum()) + 3 + lengths.size * int(lengths.max()).bit_length()
    parts = describe(encode(model, coder="csr-huffman")).parts
    return sum(count for part, count in parts.items() if part not in ("codes", "padding")) + (bits + 7) // 8


def sizes(python: str | None) -> list[dict]:
    cases = {
        "random places": (synthetic(1, 1), 5, (False, False)),
        "30 % of rows": (synthetic(0.3, 1), 5, (True, False)),
        "30 % of columns": (synthetic(1, 0.3), 5, (False, True)),
        "30 % of rows × columns": (synthetic(0.3, 0.3), 5, (True, True)),
    }
    files = [HERE / "networks" / f"{name}.bayz" for name in ("lenet-300-100-a", "lenet-300-100-b", "lenet-5")]
    for experiment in ("quick", "table"):
        # The first seed of each: those of the table begin at 10.
        files += [p for seed in (0, 10) for p in sorted((HERE.parent / "results" / experiment).glob(f"*-{seed}.bayz"))]
    for path in files:
        network = decode(path.read_bytes())
        convolutional = any(len(tensor.shape) == 4 for tensor in network.tensors.values())
        name = path.stem if path.parent.name == "networks" else f"{path.parent.name}, {path.stem}"
        cases[name] = (network, 8 if convolutional else 5, (True, True))
    table = []
    for name, (model, width, live) in cases.items():
        found = peer(python, model)
        values = next(iter(model.tensors.values())).codebook.size - 1
        symbols = b"".join(tensor.symbols.tobytes() for tensor in model.tensors.values())
        table.append(
            {
                "case": name,
                "weights": model.nonzero,
                "ours": len(encode(model)),
                "nncodec": None if found is None else found["bytes"] + 2 * values,
                "csr_paper": papers_bytes(model, width),
                "csr_width": measure(model, coder="csr-huffman", offset_bits=width),
                "csr_best": measure(model, coder="csr-huffman"),
                "xz": len(lzma.compress(symbols, preset=9 | lzma.PRESET_EXTREME)),
                "bound": round(bound(model, *live)),
            }
        )
    return table


def resnet(density: float, values: int) -> CompressedModel:
    """ResNet-18's shapes with weights of so many values, the outer ones the likelier."""
    random = np.random.default_rng(0)
    share = np.abs(np.arange(values) - (values - 1) / 2) + 1
    codebook = np.concatenate([[0.0], np.sort(random.normal(size=values))]).astype(np.float32)
    tensors = {}
    for number, shape in enumerate(RESNET_18):
        symbols = random.choice(values, size=shape, p=share / share.sum()) + 1
        symbols[random.random(shape) >= density] = 0
        tensors[f"layer{number}.weight"] = QuantizedTensor(symbols, codebook)
    return CompressedModel(tensors)


def halves(density: float) -> CompressedModel:
    """Twenty matrices of half a million weights of 15 values: as large as the thorough model takes."""
    random = np.random.default_rng(0)
    symbols = (random.integers(1, 16, (500, 1000)) * (random.random((500, 1000)) < density) for _ in range(20))
    return CompressedModel({f"l{n}.weight": QuantizedTensor(each, CODEBOOK[:16]) for n, each in enumerate(symbols)})


def speed(python: str | None) -> list[dict]:
    cases = {
        "ResNet-18 shapes, 2 % weights": resnet(0.02, 15),
        "ResNet-18 shapes, 50 % weights": resnet(0.5, 15),
        "ResNet-18 shapes, dense, 4 bits": resnet(1.0, 15),
        "ResNet-18 shapes, dense, 8 bits": resnet(1.0, 255),
        "20 tensors of 500k, 2 % weights": halves(0.02),
    }
    table = []
    for name, model in cases.items():
        times = []
        for _ in range(3):
            begin = time.process_time()
            blob = encode(model)
            middle = time.process_time()
            decode(blob)
            times.append((middle - begin, time.process_time() - middle))
        found = peer(python, model)
        count = model.parameters / 1e6
        ours = {"bytes": len(blob), "encode": min(t[0] for t in times), "decode": min(t[1] for t in times)}
        rates = {
            who: figures and {"bytes": figures["bytes"]} | {k: count / figures[k] for k in ("encode", "decode")}
            for who, figures in (("ours", ours), ("nncodec", found))
        }
        table.append({"case": name, "weights": model.parameters} | rates)
    return table


def threads() -> list[dict]:
    """The same large network by one thread and by two: seconds by the clock, the best of ten by turns."""
    model = halves(0.02)
    thorough = 1  # streams, and every tensor as usual: the case that has most to do
    table = []
    for name, ways in (("as by default", None), ("all by the thorough model", thorough)):
        best = {count: [math.inf, math.inf] for count in (1, 2)}
        for _ in range(10):
            for count, figures in best.items():
                os.environ["BAYESZIP_THREADS"] = str(count)
                begin = time.perf_counter()
                blob = encode(model, ways=ways)
                middle = time.perf_counter()
                decode(blob)
                figures[:] = np.minimum(figures, [middle - begin, time.perf_counter() - middle]).tolist()
        os.environ["BAYESZIP_THREADS"] = "1"
        rates = {str(count): [model.parameters / 1e6 / seconds for seconds in best[count]] for count in best}
        table.append({"case": name, "bytes": len(blob), "rates": rates})
    return table


_SCALE = """
import json, sys, time
import numpy as np
from bayeszip.codec import decode, encode
from bayeszip.tensors import CompressedModel, QuantizedTensor
def memory(kind):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(kind))
side = int(sys.argv[1])
codebook = np.arange(16, dtype=np.float32)
decode(encode(CompressedModel({"w": QuantizedTensor(np.eye(900, dtype=np.uint8), codebook)})))
base = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far
symbols = np.zeros((side, side), dtype=np.uint8)
random = np.random.default_rng(0)
for row in symbols:
    row[random.integers(0, side, side // 50)] = random.integers(1, 16)
symbols.flags.writeable = False
model = CompressedModel({"w": QuantizedTensor(symbols, codebook)})
begin = time.process_time()
blob = encode(model)
middle = time.process_time()
encoding = memory("VmHWM") - base
del model, symbols
decode(blob)
print(json.dumps({"weights": side * side, "bytes": len(blob), "encode_and_verify": middle - begin,
                  "decode": time.process_time() - middle, "peak_over_symbols": encoding / side**2}))
"""


def scale() -> list[dict]:
    """10 and 100 million weights: seconds and peak memory (symbols included) over the symbols' own size."""
    runs = (
        subprocess.run([sys.executable, "-c", _SCALE, str(side)], capture_output=True, text=True, check=True)
        for side in (3162, 10_000)
    )
    return [json.loads(run.stdout) for run in runs]


def page(results: dict) -> str:
    """All figures as one page."""
    lines = ["# The codec in figures", "", "Written by `python benchmarks/codec_table.py`; don't edit.", ""]
    lines += [f"Machine: {results['machine']}.", ""]
    sections = {"sizes": _sizes, "speed": _speed, "threads": _threads, "start": _start, "scale": _scale}
    for name, section in sections.items():
        if name in results:
            lines += [*section(results[name]), ""]
    return "\n".join(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] + ["--:"] * (len(head) - 1), *rows)]


def _sizes(rows: list[dict]) -> list[str]:
    head = ["case", "weights", "**ours**", "NNCodec", "CSR + Huffman to the letter", "chosen layouts", "and widths"]
    head += ["xz", "entropy", "ours / entropy", "ours / NNCodec", "ours / CSR + Huffman"]

    def against(row: dict, other: str) -> str:
        return f"{row['ours'] / row[other] - 1:+.1%}" if row[other] else "–"

    def count(row: dict, key: str) -> str:
        return f"{row[key]:,}" if row[key] else "–"

    cells = [
        [row["case"], count(row, "weights"), f"**{row['ours']:,}**"]
        + [count(row, key) for key in ("nncodec", "csr_paper", "csr_width", "csr_best", "xz", "bound")]
        + [against(row, key) for key in ("bound", "nncodec", "csr_paper")]
        for row in rows
    ]
    return [
        "## Size, in bytes, everything included",
        "",
        *_table(head, cells),
        "",
        "Entropy: of places among the live cells (live rows and columns where the case has dead ones, and for trained",
        "networks) and of values by layer; it leaves out which rows and columns live, codebook, names and shapes.",
        "NNCodec: integer indices in one call, and 2 bytes for each shared value. xz: the indices alone, a byte each.",
        "CSR + Huffman: to the letter of the paper, offsets of 5 bits (LeNet-5: 8); then as `csr-huffman` writes it,",
        "the layout of each tensor chosen (transposed or not, empty rows and columns dropped or not); then with the",
        "best width of offsets, too. The last column compares with the first of these.",
        "Trained networks: `benchmarks/networks/`, plain sparse variational dropout on MNIST (40 epochs; LeNet-5 14),",
        "weights snapped to 16 values by k-means (`codec_networks.py` trains their like); and those of `results/`.",
    ]


def _speed(rows: list[dict]) -> list[str]:
    cells = [
        [row["case"], who, f"{row[who]['bytes']:,}", f"{row[who]['encode']:.1f}", f"{row[who]['decode']:.1f}"]
        for row in rows
        for who in ("ours", "nncodec")
        if row[who]
    ]
    return [
        "## Speed, one thread, million weights a second",
        "",
        *_table(["case", "codec", "bytes", "encode", "decode"], cells),
        "",
        "Ours encodes with its proof, a decoding and a comparison. Times of one thread of a shared machine.",
    ]


def _threads(rows: list[dict]) -> list[str]:
    head = ["20 tensors of 500k, 2 % weights", "bytes"]
    head += [f"{what}{more}" for what in ("encode", "decode") for more in (", 1 thread", ", 2 threads", ", times")]
    cells = []
    for row in rows:
        one, two = row["rates"]["1"], row["rates"]["2"]
        rates = [f"{rate:.1f}" for place in (0, 1) for rate in (one[place], two[place], two[place] / one[place])]
        cells.append([row["case"], f"{row['bytes']:,}", *rates])
    return [
        "## Threads, million weights a second by the clock",
        "",
        *_table(head, cells),
        "",
        "The best of ten; where others use the machine too, two threads show less than they could.",
    ]


def _start(rows: dict[str, list[float]]) -> list[str]:
    return [
        "## A small file from nothing, as after a fresh installation",
        "",
        *startup.table(rows),
        "",
        "New processes, each the best of 20 (`startup.py`). Up to 100,000 decisions numba is not loaded: plain Python",
        "has decoded such a file by the time that numba takes to load and to fetch compiled loops from its cache.",
    ]


def _scale(rows: list[dict]) -> list[str]:
    head = ["weights", "bytes", "encode and verify, s", "decode, s", "peak memory of encoding / symbols"]
    cells = [
        [f"{row['weights']:,}", f"{row['bytes']:,}"]
        + [f"{row[key]:.2f}" for key in ("encode_and_verify", "decode", "peak_over_symbols")]
        for row in rows
    ]
    return ["## Scale, one tensor, 2 % weights", "", *_table(head, cells)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the Python of NNCodec's virtual environment")
    parser.add_argument("--only", choices=("sizes", "speed", "threads", "start", "scale"))
    arguments = parser.parse_args()
    os.environ["BAYESZIP_THREADS"] = "1"
    steps = {
        "sizes": lambda: sizes(arguments.peer),
        "speed": lambda: speed(arguments.peer),
        "threads": threads,
        "start": lambda: startup.measured(startup.FILES, 20),
        "scale": scale,
    }
    path = HERE / "codec.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name, step in steps.items():
        if arguments.only in (None, name):
            results[name] = step()
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores shared with other work"
    path.write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "CODEC.md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
