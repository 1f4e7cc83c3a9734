"""Runs the whole abuse campaign against the decoder and writes the report beside this file.

    python tests/abuse/campaign.py [--mutations 1000000] [--minutes 60 --jobs 2] [--bounds 200000] [--steps flips,…]

Steps that are not run keep the figures they have in report.json. `--minutes` is the processor time of the search led
by branches, by all its `--jobs` together; it can also be run by itself (search.py). `--output` names another folder
for report.json, search.json and REPORT.md than this one, which holds those that are committed. All steps but "coverage"
need numpy and numba alone, and run in `--jobs` processes where they take long.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import checks  # noqa: E402
import numpy as np  # noqa: E402
from mutation import Outcome  # noqa: E402


def search(minutes: float, jobs: int, path: Path) -> dict:
    """The search led by branches (search.py), in processes of its own; its figures stay in search.json."""
    arguments = ["--minutes", str(minutes), "--jobs", str(jobs), "--output", str(path)]
    subprocess.run([sys.executable, str(HERE / "search.py"), *arguments], check=False)
    return json.loads(path.read_text())


def coverage() -> dict:
    """Branch coverage of the codec by its tests, run as plain Python so that loops count too."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"BAYESZIP_COMPILE": "0", "COVERAGE_FILE": f"{folder}/data"}
        tool = [sys.executable, "-m", "coverage"]
        tests = [str(ROOT / "tests" / "codec" / f"test_{name}.py") for name in _COVERING]
        subprocess.run(
            [*tool, "run", "--branch", "--source=bayeszip.codec", "-m", "pytest", "-q", *tests,
             str(HERE / "test_abuse.py"), "-k", _NOT_COVERING],
            cwd=ROOT, env=environment, check=True, capture_output=True,
        )  # fmt: skip
        subprocess.run(
            [*tool, "json", "-o", f"{folder}/out.json"], cwd=ROOT, env=environment, check=True, capture_output=True
        )
        found = json.loads(Path(f"{folder}/out.json").read_text())
    files = {Path(name).name: file["summary"] for name, file in found["files"].items()}
    return {
        "percent": round(found["totals"]["percent_covered"], 2),
        "files": {name: round(file["percent_covered"], 1) for name, file in sorted(files.items())},
    }


_COVERING = ("syntax", "header", "huffman", "csr", "container", "rangecoder", "evidence", "counting", "rawbytes")
#: too slow as plain Python, or about processes of their own
_NOT_COVERING = " and ".join(
    f"not {name}" for name in ("mutants", "every_value", "opened", "widths", "every_prefix", "learned", "refusing")
)


def _figures(outcome: Outcome) -> dict:
    return {
        "tried": outcome.tried,
        "accepted": outcome.accepted,
        "refused": dict(outcome.refused.most_common()),
        "lines": len(outcome.sites),
        "faults": outcome.faults[:20],
        "slowest_refusal_ms": round(1000 * outcome.slowest_refusal, 1),
    }


def campaign(count: int, minutes: float, jobs: int, bounds: int, chosen: list[str], folder: Path) -> dict:
    """Runs the chosen steps (none: all), and keeps the figures of the others; saved after each step."""
    path = folder / "report.json"
    files = checks.golden()
    largest_first = sorted(files.values(), key=len, reverse=True)

    def many(check: Callable[[Any], Outcome], tasks: list[Any]) -> dict:
        return _figures(checks.by_many(check, tasks, jobs))

    with tempfile.TemporaryDirectory() as cache:
        steps = {
            "prefixes": lambda: many(checks.prefixes, largest_first),
            "flips": lambda: many(checks.flips, largest_first),
            "enumerations": lambda: many(checks.enumerations, largest_first),
            "values": lambda: many(checks.values, list(checks.golden(150).values())),
            "mutations": lambda: many(checks.mutated, [(-(-count // 100), seed) for seed in range(100)]),
            "search": lambda: search(minutes, jobs, folder / "search.json"),
            "bounds": lambda: checks.mutated_with_bounds_checked(bounds, 2, Path(cache), jobs),
            "optimized": lambda: checks.mutated_optimized(bounds, 3, jobs),
            "malformed": checks.malformed_corpus,
            "refusals": lambda: checks.refusals(20_000, 4),
            "claim": checks.claim_everything,
            "audit": checks.audit_events,
            "identical": checks.identical_bytes,
            "memory": checks.memory,
            "coverage": coverage,
        }
        if set(chosen) - set(steps):
            raise SystemExit(f"unknown steps; there are: {', '.join(steps)}")
        results: dict = json.loads(path.read_text()) if path.exists() else {}
        results["golden"] = {"files": len(files), "bytes": sum(map(len, files.values()))}
        results["machine"] = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
        for name in chosen or steps:
            begin = time.perf_counter()
            results[name] = steps[name]()
            results.pop("search", None)  # has a file of its own
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return results


def report(folder: Path) -> str:
    """The figures as a page; steps that were never run are left out."""
    results = json.loads((folder / "report.json").read_text())
    golden = results["golden"]
    for other in ("search", "strangers"):
        if (folder / f"{other}.json").exists():
            results[other] = json.loads((folder / f"{other}.json").read_text())
    lines = [
        "# Abuse report",
        "",
        f"Written by `python tests/abuse/campaign.py`; don't edit. Machine: {results['machine']}.",
        f"Golden files: {golden['files']}, {golden['bytes']:,} bytes.",
        "",
        "| what | files tried | outcome |",
        "|---|---:|---|",
    ]
    for step, what in _TRIALS.items():
        if step in results:
            lines.append(f"| {what} | {results[step]['tried']:,} | {_verdict(results[step], step)} |")
    lines += ["", '"Canonical": encoding what was decoded gives the same file again, byte for byte.', ""]
    lines += [f"- {line}" for step, told in _LINES.items() if step in results for line in told(results[step])]
    if "memory" in results:
        lines += [
            "",
            "Peak memory of decoding beyond what the process held before; allowed are 32 MiB + 2 × what is declared:",
            "",
            "| case | declared, MiB | peak, MiB |",
            "|---|---:|---:|",
            *(f"| {m['case']} | {m['declared_mib']:.1f} | {m['beyond_mib']:.1f} |" for m in results["memory"]),
        ]
    return "\n".join([*lines, ""])


_TRIALS = {
    "prefixes": "every prefix of all golden files",
    "flips": "every flipped bit of all golden files",
    "enumerations": "every value of every byte of every enumeration in all golden files, checksum repaired",
    "values": "every value of every byte of the smallest golden files, checksum repaired",
    "mutations": "structure-aware mutations, checksum repaired",
    "search": "search led by branches, decoder uncompiled",
    "bounds": "mutations with every array index checked",
    "optimized": "mutations under `python -O`",
}
_LINES = {
    "mutations": lambda r: [
        f"Mutations were refused at {r['lines']} lines, the slowest in {r['slowest_refusal_ms']} ms of processor time;"
        f" by kind: {', '.join(f'{kind} {count:,}' for kind, count in r['refused'].items())}."
    ],
    "refusals": lambda r: [
        f"Refusing {r['files']:,} mutants of all golden files of up to 2¹⁶ weights and 1 MiB: at most"
        f" {r['largest_mib']:.1f} MiB each. Beyond that size, time and memory grow with what a file declares, up to the"
        " caller's limits."
    ],
    "search": lambda r: [
        f"The search took {r['cpu_seconds'] / 60:.0f} minutes of CPU in {r['jobs']} processes ({r['machine']}): "
        f"{r['edges']:,} branches taken, {r['features']:,} different counts of them in one process alone,"
        f" {r['parents']:,} files kept as parents; the second decoder agreed on {r['agreed']:,} accepted files that"
        " took new ways."
    ],
    "strangers": lambda r: [
        f"Strangers (`tests/abuse/strangers.py`): {r['files']:,} well-formed files, random graphs over all operators"
        " and random tensors through decode, describe, verify, load, run, `into=`, export, `--dense`, report,"
        f" `verify --against` and ONNX in child processes, under limits of memory and time: {len(r['findings'])}"
        f" findings; {r['files'] - sum(c for d, c in r['refused'].items() if d.startswith('load:')):,} of them loaded"
        " and were run twice."
    ],
    "malformed": lambda r: [
        f"Malformed by hand: {r['files']} files, {len(r['wrong'])} with an unexpected error; slowest"
        f" {r['slowest_ms']:.1f} ms, largest {r['largest_mib']:.1f} MiB."
    ],
    "claim": lambda r: [f"{r['bytes']} bytes that claim 10¹² weights: {r['error']} in {r['median_ms']:.2f} ms."],
    "audit": lambda r: [
        f"Audit events (import, open, exec, compile, socket, process, …) while {r['files']} files are decoded, once the"
        f" compiled loops are loaded: {sum(r['events'].values())}."
    ],
    "identical": lambda r: [
        f"{r['files']} golden models coded again under {r['settings']} settings (1, 2, 8 threads; three hash seeds; no"
        f" SIMD; uncompiled; `python -O`): {'the same bytes' if r['digests'] == 1 else '**different bytes**'}."
    ],
    "coverage": lambda r: [f"Branch coverage of `bayeszip.codec` by its tests, loops included: {r['percent']} %."],
}


def _verdict(figures: dict, step: str) -> str:
    if figures["faults"]:
        return f"**{len(figures['faults'])} faults**"
    if step in ("prefixes", "flips"):
        return "all refused" if not figures["accepted"] else f"**{figures['accepted']} accepted**"
    return f"{figures['accepted']:,} accepted and canonical, the others refused; no other exception, no crash"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--bounds", type=int, default=200_000)
    parser.add_argument("--steps", default="", help="comma-separated; all by default")
    parser.add_argument("--page", action="store_true", help="only write the page again from report.json")
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not arguments.page:
        steps = [step for step in arguments.steps.split(",") if step]
        campaign(arguments.mutations, arguments.minutes, arguments.jobs, arguments.bounds, steps, arguments.output)
    (arguments.output / "REPORT.md").write_text(report(arguments.output))


if __name__ == "__main__":
    main()
