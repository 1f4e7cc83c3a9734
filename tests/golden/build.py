"""Writes the golden files of all format versions, once. Files that exist are never touched.

python tests/golden/build.py
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from bayeszip.codec import cheapest_path, decode, encode
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

HERE = Path(__file__).parent
NETWORKS = HERE.parent.parent / "benchmarks" / "networks"
GAUSS = np.random.default_rng(20261115)
CODEBOOK = np.array([0, -0.5, 0.75, 0.125, -1.5], dtype=np.float32)


def digest(model: CompressedModel) -> str:
    """What a model is, in every bit, as a hash that doesn't depend on how it is coded."""
    sha = hashlib.sha256()
    for name, tensor in model.tensors.items():
        values = tensor.symbols.astype("<u2") if isinstance(tensor, QuantizedTensor) else tensor.values
        kind = tensor.codebook.tobytes() if isinstance(tensor, QuantizedTensor) else tensor.dtype
        sha.update(repr((name, tensor.shape, kind)).encode() + values.tobytes())
        if isinstance(tensor, QuantizedTensor) and (tensor.grid or tensor.scale):
            scale = tensor.scale
            told = (tensor.axis, scale.grid, scale.codebook.tobytes(), scale.symbols.tolist()) if scale else None
            sha.update(repr((tensor.grid, told)).encode() + tensor.dequantize().tobytes())
    graph = model.graph
    nodes = [(n.op, n.inputs, n.tensors, sorted(n.attributes.items())) for n in graph.nodes] if graph else None
    if graph is not None and graph.varies:
        sha.update(repr([node.varying for node in graph.nodes]).encode())
    sha.update(repr((nodes, (graph.inputs, graph.outputs) if graph else None, model.original_parameters)).encode())
    return sha.hexdigest()


def quantized(shape: tuple[int, ...], density: float, codebook: np.ndarray = CODEBOOK) -> QuantizedTensor:
    symbols = GAUSS.integers(1, codebook.size, shape) * (GAUSS.random(shape) < density)
    return QuantizedTensor(symbols, codebook)


def models() -> dict[str, CompressedModel]:
    raw = {}
    for dtype, held in RAW_DTYPES.items():
        values = (GAUSS.normal(size=(5, 130)) * 50).astype("<f8" if held.kind == "f" else "<i8")
        raw[f"{dtype}.weight"] = RawTensor((values > 0) if dtype == "bool" else values.astype(held), dtype)
        raw[f"{dtype}.scalar"] = RawTensor(np.ones((), dtype=held), dtype)
        raw[f"{dtype}.empty"] = RawTensor(np.zeros((3, 0, 2), dtype=held), dtype)
    convolution = Graph(
        2,
        (
            Node("conv2d", (1,), ("a.weight", None), {"stride": (2, 1), "padding_mode": "circular", "groups": 2}),
            Node("max_pool2d", (2,), (), {"ceil_mode": True, "kernel_size": (3, 3)}),
            Node("relu", (0,)),
        ),
        (3, 4),
    )
    norm = {
        name: RawTensor(GAUSS.random(8).astype("<f4"), "float32")
        for name in ("weight", "bias", "running_mean", "running_var")
    }
    return {
        "empty": CompressedModel({}),
        "tiny": CompressedModel({"w": quantized((), 1.0)}, None, 7),
        "raw": CompressedModel(raw),
        "convolution": CompressedModel(
            {"a.weight": quantized((6, 4, 3, 3), 0.4), "ä/🙂": quantized((9,), 0.5)}, convolution
        ),
        "norm": CompressedModel(
            {f"bn1.{name}": tensor for name, tensor in norm.items()}
            | {"bn1.num_batches_tracked": RawTensor(np.array(977), "int64")}
        ),
        "large": CompressedModel({"w": quantized((900, 700), 0.004), "v": quantized((2**19 + 9,), 0.002)}),
        "alphabet": CompressedModel({"w": quantized((40, 30), 0.7, np.arange(700, dtype=np.float32) / 7)}),
        "few": CompressedModel({"w": quantized((64, 64), 0.1, CODEBOOK[:2]), "z": quantized((9, 9), 0.0)}),
    } | {path.stem: decode(path.read_bytes()) for path in sorted(NETWORKS.glob("*.bayz"))}  # fmt: skip


def newer_models() -> dict[str, CompressedModel]:
    """What version 1 can't hold: grids, scales and sizes that vary."""
    gauss = np.random.default_rng(20261116)
    steps, wide = UniformGrid(0.03125, 15), UniformGrid(float(np.float32(0.001)), 700)
    ratios = LogGrid(0.125, float(np.float32(2**0.25)), 24)
    scales = LogGrid(float(np.float32(0.01)), 1.1875, 32, signed=False)

    def symbols(shape: tuple[int, ...], size: int, density: float = 1.0) -> np.ndarray:
        return gauss.integers(1, size, shape) * (gauss.random(shape) < density)

    def scale(count: int, grid: LogGrid = scales) -> QuantizedTensor:
        return QuantizedTensor.on_grid(symbols((count,), grid.size), grid)

    graph = Graph(1, (Node("linear", (0,), ("fc.weight", "fc.bias")), Node("relu", (1,))), (2,))
    length, half = Varying("shape", 0), Varying("shape", 0, ((4, 1),), 1, 2, 0)
    sequence = Graph(
        1,
        (
            Node("input", (0,), (), {"shape": (6, 8)}, (length,)),
            Node("arange", (1,), (), {"size": 6}, (Varying("size", 0, ((1, 1),)),)),
            Node("embedding", (2,), ("position.weight",)),
            Node("add", (1, 3)),
            Node("reshape", (4,), (), {"shape": (3, 2, 8)}, (half,)),
            Node("select", (5,), (), {"dim": 1, "index": 2}, (Varying("index", 0, ((5, 1),), offset=-1),)),
        ),
        (6,),
    )
    return {
        "step": CompressedModel({"w": QuantizedTensor.on_grid(symbols((6, 5), 15, 0.7), steps)}),
        "ratio": CompressedModel({"w": QuantizedTensor.on_grid(symbols((4, 9), 24), ratios)}),
        "scaled": CompressedModel(
            {
                "fc.weight": QuantizedTensor(symbols((7, 5), 5, 0.4), CODEBOOK, None, scale(7)),
                "fc.bias": QuantizedTensor(symbols((7,), 5), CODEBOOK),
            },
            graph,
        ),
        "network": CompressedModel(
            {
                "conv1.weight": QuantizedTensor.on_grid(symbols((12, 3, 3, 3), 15, 0.5), steps, scale(12)),
                "conv1.bias": QuantizedTensor.on_grid(symbols((12,), 700), wide),
                "conv2.weight": QuantizedTensor.on_grid(symbols((20, 12, 3, 3), 15, 0.1), steps, scale(20)),
                "conv2.bias": QuantizedTensor.on_grid(symbols((20,), 700, 0.6), wide),
                "up.weight": QuantizedTensor(symbols((20, 6, 2, 2), 5, 0.5), CODEBOOK, None, scale(6, ratios), 1),
                "up.bias": RawTensor(gauss.random(6).astype("<f4"), "float32"),
                "plain.weight": QuantizedTensor(symbols((9, 6), 5, 0.3), CODEBOOK),
            }
        ),
        "sizes": CompressedModel({"position.weight": QuantizedTensor(symbols((16, 8), 5), CODEBOOK)}, sequence),
    }


def ways_models() -> dict[str, tuple[int, CompressedModel]]:
    """Ways of coding that version 1 lacks: neighbors, the quick model for all, streams, dependent values; by number."""
    gauss = np.random.default_rng(20261117)
    fine, few = UniformGrid(0.015625, 300), UniformGrid(0.125, 9)

    def smooth(shape: tuple[int, ...], grid: UniformGrid, spread: float) -> QuantizedTensor:
        numbers = np.rint(spread * gauss.normal(size=shape).cumsum(axis=-1)).astype(np.int64)
        symbols = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
        return QuantizedTensor.on_grid(symbols * (symbols < grid.size), grid)

    def on_path(shape: tuple[int, ...], spread: float) -> QuantizedTensor:
        """Multiples of a step as the trellis has them; a row and a column of a matrix are dead."""
        ratios = np.random.default_rng(20261118).normal(scale=spread, size=shape)
        if len(shape) == 2:
            ratios[1], ratios[:, 2] = 0, 0
        numbers = cheapest_path(ratios, 0.35)
        symbols = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
        return QuantizedTensor.on_grid(symbols, UniformGrid(0.0625, int(symbols.max()) + 1))

    sparse = QuantizedTensor(gauss.integers(1, 5, (300, 2000)) * (gauss.random((300, 2000)) < 0.002), CODEBOOK)
    filters = {"a.weight": smooth((24, 20, 3, 3), fine, 9.0), "b.weight": smooth((70, 60), few, 0.5)}
    return {
        "neighbors": (0b10100, CompressedModel(filters)),
        "flat": (0b100, CompressedModel({"w": smooth((5000,), few, 0.4)})),
        "quick": (0b10, CompressedModel({"w": smooth((90, 60), few, 0.3), "v": smooth((9,), few, 0.3)})),
        "dependent": (0b11110, CompressedModel({"a": on_path((16, 40, 3, 3), 6.0), "b": on_path((90, 50), 1.5)})),
        "path": (0b110, CompressedModel({"v": on_path((4500,), 2.0)})),
        "streams": (0b1000011, CompressedModel({"a": sparse, "b.weight": smooth((80, 52), fine, 4.0),
                                                "c": sparse, "d": smooth((64, 64), few, 0.2)})),
    }  # fmt: skip


def main() -> None:
    write(HERE / "v1", models())
    write(HERE / "v2", newer_models())
    write_ways(HERE / "v2", ways_models())


def write_ways(folder: Path, models: dict[str, tuple[int, CompressedModel]]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, (ways, model) in models.items():
        path = folder / f"{name}.context.bayz"
        if not path.exists():
            options = {"ways": ways, "packed": 0}
            path.write_bytes(encode(model, "context", **options))
            manifest[path.name] = {"coder": "context", "options": options, "digest": digest(model)}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def write(folder: Path, models: dict[str, CompressedModel]) -> None:
    folder.mkdir(exist_ok=True)
    manifest_path = folder / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    for name, model in models.items():
        for label, coder, options in (
            ("context", "context", {"ways": 0, "packed": 0}),
            ("packed", "context", {"ways": 0, "packed": 1}),
            ("csr", "csr-huffman", {"packed": 0}),
            ("csr5", "csr-huffman", {"offset_bits": 5, "packed": 0}),
            ("packed-csr", "csr-huffman", {"packed": 1}),
        ):
            path = folder / f"{name}.{label}.bayz"
            if path.exists() or (label == "csr5" and name != "convolution"):
                continue
            if "packed" in label and folder.name == "v1":
                continue
            path.write_bytes(encode(model, coder=coder, **options))
            manifest[path.name] = {"coder": coder, "options": options, "digest": digest(model)}
    manifest_path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
