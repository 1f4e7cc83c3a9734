"""Runs the whole abuse campaign against the decoder and writes the report beside this file.

    python tests/abuse/campaign.py --jobs 12 [--seconds 540] [--steps prefixes,flips,…]

Every step is a number of units (units.py) in `--jobs` processes. Figures are saved as they come, with what is left: the
same command goes on after `--seconds`, or when it was interrupted, and begins anew only what was run on other source.
`--output` names another folder for report.json and REPORT.md than this one, which holds those that are committed; what
workers keep (compiled loops, files of the search) goes to build/abuse. Numpy and numba are all that is needed, but for
"coverage", which runs only if it is named. A unit is tried again by `echo NUMBER | campaign.py --worker STEP`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent / "codec")]

import checks  # noqa: E402
from mutation import Outcome  # noqa: E402
from search import SLICE, Searcher  # noqa: E402
from units import Crew, go_on, left, save, serve  # noqa: E402

KEPT = ROOT / "build" / "abuse"
#: seconds after which a unit counts as a hang
WAITING = 1800
#: mutants of one unit, and refusals
MUTANTS, REFUSALS = 5000, 2000


@dataclass(frozen=True)
class Step:
    """So many units, what one of them comes to, and how Python is started for them."""

    units: int
    unit: Callable[[int], dict]
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    compiled: bool = False


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
        "lines": sorted(outcome.sites),
        "faults": outcome.faults[:20],
        "slowest_refusal_ms": round(1000 * outcome.slowest_refusal, 1),
    }


def steps(mutations: int, bounds: int, minutes: float) -> dict[str, Step]:
    """All of the campaign, by name."""
    names = list(checks.golden())
    files = sorted(checks.golden().values(), key=len, reverse=True)
    small = list(checks.golden(150).values())
    shares, cases = -(-bounds // MUTANTS), checks.MEMORY_CASES
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(KEPT / "bounds-checked")}

    def mutants(first: int) -> Callable[[int], dict]:
        return lambda unit: _figures(checks.mutated(MUTANTS, first + unit))

    return {
        "golden": Step(len(names), lambda unit: checks.golden_agreed(names[unit])),
        "prefixes": Step(len(files), lambda unit: _figures(checks.prefixes(files[unit]))),
        "flips": Step(len(files), lambda unit: _figures(checks.flips(files[unit])), compiled=True),
        "enumerations": Step(len(files), lambda unit: _figures(checks.enumerations(files[unit])), compiled=True),
        "values": Step(len(small), lambda unit: _figures(checks.values(small[unit])), compiled=True),
        "mutations": Step(-(-mutations // MUTANTS), mutants(0), compiled=True),
        "bounds": Step(shares, mutants(1_000_000), environment=checked, compiled=True),
        "optimized": Step(shares, mutants(2_000_000), flags=("-O",), compiled=True),
        "search": Step(round(60 * minutes / SLICE), _searching(), environment={"BAYESZIP_COMPILE": "0"}),
        "malformed": Step(1, lambda _: checks.malformed_corpus(), compiled=True),
        "refusals": Step(10, lambda unit: checks.refusals(REFUSALS, unit), compiled=True),
        "claim": Step(1, lambda _: checks.claim_everything()),
        "audit": Step(1, lambda _: checks.audit_events(), compiled=True),
        "identical": Step(len(checks.SETTINGS), checks.identical_bytes, compiled=True),
        "memory": Step(len(cases), lambda unit: {"cases": [checks.memory(cases[unit])]}, compiled=True),
        "coverage": Step(1, lambda _: coverage()),
    }


def _searching() -> Callable[[int], dict]:
    """The search led by branches, a slice at a time by the one searcher of a process."""
    searchers: list[Searcher] = []

    def searched(unit: int) -> dict:
        if not searchers:
            searchers.append(Searcher(unit, KEPT / "search"))
        return searchers[0].go_on(SLICE)

    return searched


def campaign(chosen: dict[str, Step], folder: Path, jobs: int, until: float) -> bool:
    """Goes on with the chosen steps, as long as there is time; true if all are done."""
    path = folder / "report.json"
    results = _kept_in(path)
    files = checks.golden().values()
    results["files"] = {"files": len(files), "bytes": sum(map(len, files))}
    compiled: set[str] = set()
    for name, step in chosen.items():
        begin = time.monotonic()
        figures = results.setdefault(name, {})
        if step.compiled and left(figures, 0, step.units) and str(step.environment) not in compiled:
            checks.compile_loops(step.environment)
            compiled.add(str(step.environment))
        command = [sys.executable, "-W", "ignore", *step.flags, __file__, "--worker", name]
        crew = Crew(command, min(jobs, step.units), step.environment | {"OMP_NUM_THREADS": "1"}, until)
        done = go_on(figures, 0, step.units, crew, lambda: save(path, results))
        print(f"{name}: {time.monotonic() - begin:.0f} s{'' if done else ', not done'}", flush=True)
        if not done:
            return False
    return True


def _kept_in(path: Path) -> dict[str, Any]:
    """What a report holds; figures that don't say which source they are of are from before there were units."""
    held = json.loads(path.read_text()) if path.exists() else {}
    return {name: told for name, told in held.items() if name == "files" or "source" in told}


def report(folder: Path) -> str:
    """The figures as a page; steps that were never run are left out."""
    results = _kept_in(folder / "report.json")
    if "files" not in results:
        raise SystemExit(f"{folder} has no figures of this campaign; run it first")
    files = results.pop("files")
    results = {step: figures for step, figures in results.items() if figures["begun"] > len(figures["unfinished"])}
    strangers = folder / "strangers.json"
    told = json.loads(strangers.read_text()) if strangers.exists() else {}
    results |= {"strangers": told} if "source" in told else {}
    lines = [
        "# Abuse report",
        "",
        "Written by `python tests/abuse/campaign.py`; don't edit.",
        f"Golden files of all versions: {files['files']}, {files['bytes']:,} bytes.",
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
            *(
                f"| {m['case']} | {m['declared_mib']:.1f} | {m['beyond_mib']:.1f} |"
                for m in sorted(results["memory"]["cases"], key=lambda m: m["case"])
            ),
        ]
    return "\n".join([*lines, "", *_machines(results), ""])


def _machines(results: dict) -> list[str]:
    """Where each step was run, and on which source."""
    steps: dict[str, list[str]] = {}
    for name, figures in results.items():
        steps.setdefault(f"{figures['machine']}, source {figures['source']}", []).append(name)
    return [f"Run on {where}: {', '.join(names)}." for where, names in steps.items()]


_TRIALS = {
    "golden": "all golden files: decoded, encoded again, and read by the second decoder",
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
        f"Mutations were refused at {len(r['lines'])} lines, the slowest in {r['slowest_refusal_ms']} ms of processor"
        f" time; by kind: {', '.join(f'{kind} {count:,}' for kind, count in r['refused'].items())}."
    ],
    "refusals": lambda r: [
        f"Refusing {r['files']:,} mutants of all golden files of up to 2¹⁶ weights and 1 MiB: at most"
        f" {r['largest_mib']:.1f} MiB each. Beyond that size, time and memory grow with what a file declares, up to the"
        " caller's limits."
    ],
    "search": lambda r: [
        f"The search took {r['cpu_seconds'] / 60:.0f} minutes of CPU. In one process alone {r['most_branches']:,}"
        f" branches were taken, in {r['most_features']:,} different counts, and {r['most_parents']:,} files kept as"
        f" parents; the second decoder agreed on {r['agreed']:,} accepted files that took new ways."
    ],
    "strangers": lambda r: [
        f"Strangers (`tests/abuse/strangers.py`): {r['files']:,} well-formed files, random graphs over all operators"
        " and random tensors of all kinds through encode, decode, verify, load, run, `into=`, export, `--dense`,"
        f" report, `verify --against` and ONNX in child processes, under limits of memory and time;"
        f" {r['outcomes']['load: passed']:,} of them loaded and were run twice. Findings: {len(r['faults'])}.",
        *(f"Found by seed {fault}" for fault in r["faults"]),
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
        f"{r['most_files']} golden models coded again under {r['settings']} settings (1, 2, 8 threads; three hash"
        f" seeds; no SIMD; uncompiled; `python -O`): {len(r['digests'])} digest of all their bytes."
    ],
    "coverage": lambda r: [f"Branch coverage of `bayeszip.codec` by its tests, loops included: {r['percent']} %."],
}


def _verdict(figures: dict, step: str) -> str:
    if figures["faults"]:
        return f"**{len(figures['faults'])} faults**"
    if step == "golden":
        return "as they were made"
    if step in ("prefixes", "flips"):
        return "all refused" if not figures["accepted"] else f"**{figures['accepted']} accepted**"
    return f"{figures['accepted']:,} accepted and canonical, the others refused; no other exception, no crash"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=60, help="processor time of the search, by all processes")
    parser.add_argument("--bounds", type=int, default=200_000, help="mutations with checked indices, and under -O")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="by the clock")
    parser.add_argument("--steps", default="", help="comma-separated; all by default, but for coverage")
    parser.add_argument("--page", action="store_true", help="only write the page again from the reports")
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = steps(arguments.mutations, arguments.bounds, arguments.minutes)
    if arguments.worker:
        serve(known[arguments.worker].unit, 0 if arguments.worker == "search" else WAITING)  # has a clock of its own
        return
    named = [name for name in arguments.steps.split(",") if name] or [name for name in known if name != "coverage"]
    if set(named) - set(known):
        raise SystemExit(f"unknown steps; there are: {', '.join(known)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    done = arguments.page or campaign(
        {name: known[name] for name in named}, arguments.output, arguments.jobs, time.monotonic() + arguments.seconds
    )
    (arguments.output / "REPORT.md").write_text(report(arguments.output))
    if not done:
        raise SystemExit("not done yet; the same command goes on")


if __name__ == "__main__":
    main()
