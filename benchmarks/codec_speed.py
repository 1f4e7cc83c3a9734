"""How fast the codec encodes (with its proof) and decodes, in millions of weights a second; against another tree too.

    python benchmarks/codec_speed.py [--against /path/to/another/checkout/src]

Each case runs in a process of its own, this tree and the other by turns, so that both meet the same machine. Times are
processor seconds of one thread, the best of three rounds. Where files of the two trees differ, so does the size shown.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
#: name → (shape, tensors, share of weights, shared values)
CASES = {
    "98 % zero": ((2000, 2000), 1, 0.02, 15),
    "50 % zero": ((2000, 2000), 1, 0.5, 15),
    "dense, 4 bits": ((2000, 2000), 1, 1.0, 15),
    "dense, 8 bits": ((2000, 2000), 1, 1.0, 255),
    "20 tensors of 500k, 98 % zero": ((500, 1000), 20, 0.02, 15),
    "raw float32": ((400, 1000), 1, 1.0, 0),
}


def measured(case: str) -> dict:
    """Figures of one case, by whatever tree is on the path."""
    import hashlib

    from bayeszip.codec import decode, encode
    from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

    shape, count, density, values = CASES[case]
    random = np.random.default_rng(0)
    codebook = np.concatenate([[0.0], np.sort(random.normal(size=values))]).astype(np.float32)

    def tensor():
        if not values:
            return RawTensor(random.normal(size=shape).astype("<f4"), "float32")
        symbols = random.integers(1, values + 1, shape) * (random.random(shape) < density)
        return QuantizedTensor(symbols.astype(np.uint16), codebook)

    model = CompressedModel({f"layer{number}.weight": tensor() for number in range(count)})
    times = []
    for _ in range(3):
        begin = time.process_time()
        blob = encode(model)
        middle = time.process_time()
        decode(blob)
        times.append((middle - begin, time.process_time() - middle))
    encoding, decoding = (model.parameters / 1e6 / min(column) for column in zip(*times, strict=True))
    digest = hashlib.sha256(blob).hexdigest()
    return {"bytes": len(blob), "encode": encoding, "decode": decoding, "digest": digest}


def by(tree: Path, case: str) -> dict:
    command = [sys.executable, str(Path(__file__).resolve()), "--case", case]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measured(arguments.case)))
        return
    print("| case | bytes | encode and prove | decode | encode, times the other | decode, times the other |")
    print("| --- | --: | --: | --: | --: | --: |")
    for case in CASES:
        ours = by(HERE.parent / "src", case)
        other = by(arguments.against, case) if arguments.against else None
        ratios = [f"{ours[key] / other[key]:.1f}" if other else "–" for key in ("encode", "decode")]
        size = f"{ours['bytes']:,}"
        if other and other["digest"] != ours["digest"]:
            size += f" (other: {other['bytes']:,})"
        figures = [size, f"{ours['encode']:.1f}", f"{ours['decode']:.1f}", *ratios]
        print("| " + " | ".join([case, *figures]) + " |", flush=True)


if __name__ == "__main__":
    main()
