"""Uniform steps against clustering at equal error: bytes of whole files, by what a bit is worth.

    python benchmarks/codec_steps.py [weights.safetensors …]

Without files, tensors of Gaussian and of Laplacian weights. Matrices and kernels alone are counted.
"""

import sys
from pathlib import Path

import numpy as np

from bayeszip import codec
from bayeszip.quantize import at_error, cluster
from bayeszip.tensors import CompressedModel, QuantizedTensor

PRICES = (0.0, 0.05, 0.1, 0.15, 0.2)
COMPONENTS = (16, 64, 256)


def networks(paths: list[str]) -> dict[str, dict[str, np.ndarray]]:
    if paths:
        from safetensors.numpy import load_file

        return {Path(path).stem: _matrices(load_file(path)) for path in paths}
    random = np.random.default_rng(0)
    shapes = {"a.weight": ((64, 300), 0.05), "b.weight": ((128, 64, 3, 3), 0.02), "c.weight": ((10, 1000), 0.1)}
    return {
        kind: {name: draw(size=shape).astype(np.float32) * scale for name, (shape, scale) in shapes.items()}
        for kind, draw in (("Gaussian", random.normal), ("Laplacian", random.laplace))
    }


def _matrices(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors.items() if array.ndim > 1 and array.dtype == np.float32}


def error_of(weights: dict[str, np.ndarray], tensors: dict[str, QuantizedTensor]) -> float:
    distance = sum(float(np.square(tensors[name].dequantize() - array).sum()) for name, array in weights.items())
    return float(np.sqrt(distance / sum(float(np.square(array).sum()) for array in weights.values())))


def main() -> None:
    print("| weights | components | error | clustered |" + "".join(f" steps, price {price} |" for price in PRICES))
    print("| --- |" + " --: |" * (3 + len(PRICES)))
    for name, weights in networks(sys.argv[1:]).items():
        for components in COMPONENTS:
            clustered = {each: cluster(array, components) for each, array in weights.items()}
            error, size = error_of(weights, clustered), codec.measure(CompressedModel(clustered))
            cells = [
                f"{codec.measure(CompressedModel(at_error(weights, error, price))) / size:.1%}" for price in PRICES
            ]
            print("| " + " | ".join([name, str(components), f"{error:.4f}", f"{size:,}", *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
