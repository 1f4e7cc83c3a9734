"""How long a small file takes from nothing: new processes right after installation, beside Python and torch alone.

    python benchmarks/startup.py [--repeats 20] [FILE …]

Every row is run by turns with the others, and the least is told: seconds by the clock, and of processor time, which a
busy machine spoils less. As after a fresh installation, there is bytecode of the package, and numba finds no cache.
"""

import argparse
import compileall
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["FILES", "measured", "table"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
FILES = [RESULTS / "quick" / "tau1=1-0.bayz", RESULTS / "table" / "lenet-5-vd+sws-10.bayz"]


def rows(files: list[Path]) -> dict[str, list[str]]:
    """What Python is asked to do, by the words of the table."""
    asked = {"`python -c pass`": ["-c", "pass"]} | {
        f"`import {name}`": ["-c", f"import {name}"] for name in ("numpy", "torch")
    }
    for file in files:
        size = f"{file.stat().st_size:,} bytes"
        asked[f"`load`, {size}"] = ["-c", f"import bayeszip; bayeszip.load({str(file)!r})"]
        asked[f"`bayeszip info`, {size}"] = ["-m", "bayeszip", "info", str(file)]
    return asked


def taken(arguments: list[str]) -> tuple[float, float]:
    """Seconds of a new process: by the clock, and of processor time."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        begin = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{arguments} ended with {process.returncode}")
        return time.perf_counter() - begin, used.ru_utime + used.ru_stime


def measured(files: list[Path], repeats: int) -> dict[str, list[float]]:
    """Seconds by the clock and of processor time, the least of all repeats, by the words of the table."""
    compileall.compile_dir(ROOT / "src", quiet=1)
    asked = rows(files)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in asked}
    for _ in range(repeats):
        for name, arguments in asked.items():
            found[name].append(taken(arguments))
    return {name: list(map(min, zip(*times, strict=True))) for name, times in found.items()}


def table(least: dict[str, list[float]]) -> list[str]:
    """The figures in Markdown."""
    torch = least["`import torch`"]
    lines = [
        "| | seconds | beyond `import torch` | of the processor | beyond `import torch` |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, figures in least.items():
        beyond = [
            f"{own - other:.2f}" if name.startswith("`load`") else "" for own, other in zip(figures, torch, strict=True)
        ]
        lines.append(f"| {name} | {figures[0]:.2f} | {beyond[0]} | {figures[1]:.2f} | {beyond[1]} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print("\n".join(table(measured(options.files or FILES, options.repeats))))


if __name__ == "__main__":
    main()
