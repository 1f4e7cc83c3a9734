"""The promises of the decoder as figures: each check returns what it found; tests and the report judge it."""

import json
import os
import random
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from time import process_time

from agreement import agrees, digest
from malformed import malformed
from mutation import GOLDEN, LIMITS, Outcome, fields, mutant, mutations, repaired, trial
from tensor_kinds import files, small_ways

from bayeszip.codec import Limits, decode, encode, inspect
from bayeszip.errors import FormatError
from bayeszip.operators import OPERATORS

__all__ = [
    "MEMORY_CASES",
    "SETTINGS",
    "audit_events",
    "claim_everything",
    "compile_loops",
    "enumerations",
    "flips",
    "golden",
    "golden_agreed",
    "identical_bytes",
    "limits_hold",
    "malformed_corpus",
    "memory",
    "mutated",
    "prefixes",
    "refusals",
    "seeds",
    "values",
]

HERE = Path(__file__).parent
#: enough for every golden file
ALL_GOLDEN = Limits(elements=1 << 21, memory=1 << 22)


def golden(largest: int = 1 << 30) -> dict[str, bytes]:
    """The golden files of all versions up to a size."""
    held = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in GOLDEN}
    return {name: blob for name, blob in held.items() if len(blob) <= largest}


def prefixes(blob: bytes) -> Outcome:
    """Every prefix of a file."""
    outcome = Outcome()
    for length in range(len(blob)):
        trial(blob[:length], outcome)
    return outcome


def flips(blob: bytes) -> Outcome:
    """Every single flipped bit of a file."""
    outcome = Outcome()
    damaged = bytearray(blob)
    for bit in range(8 * len(blob)):
        damaged[bit // 8] ^= 1 << bit % 8
        trial(bytes(damaged), outcome)
        damaged[bit // 8] ^= 1 << bit % 8
    return outcome


def enumerations(blob: bytes) -> Outcome:
    """Every value of every byte of a field that is an enumeration or holds one, with the checksum repaired."""
    found = [span for span in fields(blob[:-4]) if span.name in _ENUMERATIONS]
    short = [range(span.start, span.end) for span in found if span.end - span.start < 4]  # not a codebook's values
    return _every_value(blob, [4, *chain.from_iterable(short)], ALL_GOLDEN)


#: flags, kinds, formats, opcodes, masks and choices, by the names of their fields
_ENUMERATIONS = {"flags", "layer", "number of dimensions", "kind of tensor", "codebook", "node", "mask of a node"} | {
    attribute.name for operator in OPERATORS.values() for attribute in operator.attributes if attribute.kind == "choice"
}


def values(blob: bytes) -> Outcome:
    """Every value of every byte, one at a time, with the checksum repaired."""
    return _every_value(blob, range(len(blob) - 4), LIMITS)


def _every_value(blob: bytes, places: Iterable[int], limits: Limits) -> Outcome:
    outcome = Outcome()
    for place in places:
        for value in range(256):
            if value != blob[place]:
                trial(repaired(blob[:place] + bytes([value]) + blob[place + 1 : -4]), outcome, limits)
    return outcome


def mutated(count: int, seed: int) -> Outcome:
    """So many mutants of the small golden files, of the malformed corpus and of all kinds and ways, by a seed."""
    outcome = Outcome()
    with small_ways():
        mutations(seeds(), count, seed, outcome)
    return outcome


def golden_agreed(name: str) -> dict:
    """A golden file: it decodes to what it was made of, is written so again, and the second decoder reads the same."""
    blob, faults = golden()[name], []
    expected = json.loads((HERE.parent / "golden" / name).with_name("manifest.json").read_text())[Path(name).name]
    model, described = inspect(blob)
    try:
        agrees(blob, model)
    except AssertionError as error:
        faults.append(f"{name}: the second decoder differs: {error}")
    if digest(model) != expected["digest"] or described.version != int(name[1]):
        faults.append(f"{name} decodes to another model")
    if encode(model, coder=expected["coder"], **expected["options"]) != blob:
        faults.append(f"{name} is written differently")
    return {"tried": 1, "accepted": 1, "faults": faults}


@cache
def seeds() -> list[bytes]:
    """What mutants descend from: small golden files and malformed ones; tried once, which loads compiled loops."""
    found = list(golden(500).values()) + [blob for _, blob, _ in malformed() if 9 < len(blob) < 500]
    found += files()
    for _ in range(2):  # the second time with all of them compiled
        for blob in found:
            with small_ways():
                trial(blob, Outcome())
    return found


def malformed_corpus() -> dict:
    """The hand-made files: wrong errors, and the cost of refusing each."""
    wrong, slowest, largest = [], 0.0, 0
    seeds()
    corpus = list(malformed())
    for name, blob, expected in corpus:
        outcome = Outcome()
        trial(blob, outcome)  # loads what the first call must
        tracemalloc.start()
        trial(blob, outcome)
        largest = max(largest, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        timed = Outcome()
        trial(blob, timed)
        slowest = max(slowest, timed.slowest_refusal)  # of processor time, the least of four
        if set(outcome.refused) != {expected} or outcome.accepted or outcome.faults:
            wrong.append(f"{name}: {dict(outcome.refused)} instead of {expected}")
    return {"files": len(corpus), "wrong": wrong, "slowest_ms": 1000 * slowest, "largest_mib": largest / 2**20}


def claim_everything() -> dict:
    """A hundred bytes that claim 10¹² weights: milliseconds to refuse."""
    name = b"x" * 60
    header = bytes.fromhex("00 01 05 00") + bytes([len(name)]) + name + bytes.fromhex("02 80a094a58d1d 00 00")
    blob = repaired(b"BAYZ\x12" + header)
    times = []
    for _ in range(9):
        begin = process_time()
        try:
            decode(blob)
            raise AssertionError("a file of 10¹² weights was accepted")
        except FormatError as error:
            times.append(process_time() - begin)
            kind = type(error).__name__
    return {"bytes": len(blob), "error": kind, "median_ms": 1000 * sorted(times)[4]}


def refusals(count: int, seed: int) -> dict:
    """The memory that refusing a mutant takes, of all golden files that the limits allow."""
    dice, refused, largest = random.Random(seed), 0, 0
    allowed = [blob for blob in golden().values() if _fits(blob)]
    seeds()
    tracemalloc.start()
    for _ in range(count):
        blob = mutant(dice.choice(allowed), dice, allowed)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        if not _fits(blob):
            refused += 1
            largest = max(largest, tracemalloc.get_traced_memory()[1] - held)
    tracemalloc.stop()
    return {"files": refused, "largest_mib": largest / 2**20}


def _fits(blob: bytes) -> bool:
    """Whether a file is accepted under the limits of this campaign."""
    try:
        decode(blob, LIMITS)
    except FormatError:
        return False
    return True


def _in_new_process(code: str, environment: dict[str, str] | None = None, flags: tuple[str, ...] = ()) -> dict:
    """What `code` prints, as JSON; run with the folders of these tests on the path."""
    prelude = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent / 'codec')]}\n"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *flags, "-c", prelude + code],
        env=os.environ | (environment or {}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"exit status {run.returncode}: {run.stderr[-2000:]}")
    return json.loads(run.stdout)


def audit_events() -> dict:
    """What the interpreter reports of imports, files, sockets, processes and code while golden files are decoded."""
    return _in_new_process(
        """
import json, collections
from checks import golden
from bayeszip.codec import decode
files = list(golden().values())
for blob in files:
    decode(blob)                       # loads the compiled loops
events, on = collections.Counter(), False
def hook(event, arguments):
    if on:
        events[event] += 1
sys.addaudithook(hook)
on = True
for blob in files:
    decode(blob)
on = False
watched = ("import", "open", "exec", "compile", "socket", "subprocess", "os.", "ctypes", "marshal", "pickle", "code.")
print(json.dumps({"files": len(files), "events": {k: v for k, v in events.items() if k.startswith(watched)}}))
"""
    )


_SIMD = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX2 FMA3"
#: environments and flags of Python under which the same bytes must come out
SETTINGS: list[tuple[dict[str, str], tuple[str, ...]]] = [
    *(({"OMP_NUM_THREADS": count, "NUMBA_NUM_THREADS": count}, ()) for count in ("1", "2", "8")),
    *(({"PYTHONHASHSEED": seed}, ()) for seed in ("0", "7", "4294967295")),
    ({"NPY_DISABLE_CPU_FEATURES": _SIMD, "NUMBA_CPU_NAME": "generic"}, ()),
    ({"BAYESZIP_COMPILE": "0"}, ()),
    ({"BAYESZIP_COMPILE": "0", "NPY_DISABLE_CPU_FEATURES": _SIMD}, ("-O",)),
]


def identical_bytes(setting: int) -> dict:
    """The digest of golden models that are coded again under one of the settings."""
    code = """
import hashlib, json
from checks import golden
from bayeszip.codec import decode, describe, encode
sha = hashlib.sha256()
for blob in golden(8000).values():
    described = describe(blob)
    sha.update(encode(decode(blob), coder=described.coder, **described.options))
print(json.dumps({"digests": [sha.hexdigest()]}))
"""
    return {"settings": 1, "most_files": len(golden(8000))} | _in_new_process(code, *SETTINGS[setting])


def compile_loops(environment: dict[str, str] | None = None) -> None:
    """Fills numba's cache, so that many processes after this one need not."""
    _in_new_process("from checks import seeds\nseeds()\nprint('{}')", environment)


#: large tensors, as Python that makes them, and their coders
_LARGE = {
    "sparse, context": ("(random.random((8000, 8000)) < 0.02).astype(np.uint8) * 3", "context"),
    "dense, context": ("random.integers(0, 17, (4000, 4000), dtype=np.uint8)", "context"),
    "raw float32, context": ("random.normal(size=(2000, 2000)).astype('<f4')", "context"),
    "sparse, csr-huffman": ("(random.random((8000, 8000)) < 0.02).astype(np.uint8) * 3", "csr-huffman"),
    "dense, csr-huffman": ("random.integers(0, 17, (4000, 4000), dtype=np.uint8)", "csr-huffman"),
}
MEMORY_CASES = list(_LARGE)


def memory(case: str) -> dict:
    """Peak memory of decoding, beyond what was there before, against what the file declares."""
    code = """
import json
import numpy as np
def memory(kind):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(kind))
from bayeszip.codec import decode, encode
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor
eye, ones = QuantizedTensor(np.eye(9, dtype=np.uint8), [0, 1.0]), RawTensor(np.ones(9, "<f4"), "float32")
big = QuantizedTensor(np.eye(900, dtype=np.uint8), [0, 1.0])
small = CompressedModel({"a": eye, "b": ones, "c": big})
for coder in ("context", "csr-huffman"):
    decode(encode(small, coder=coder))
path, declared = PATH
blob = open(path, "rb").read()
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far, that of loading numba
before = memory("VmRSS")
model = decode(blob)
peak = memory("VmHWM")
print(json.dumps({"declared_mib": declared / 2**20, "beyond_mib": (peak - before) / 2**20}))
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.bayz"
        declared = _write_large(case, path)["declared"]
        return {"case": case} | _in_new_process(code.replace("PATH", repr((str(path), declared))))


def _write_large(case: str, path: Path) -> dict:
    """A large file, written by a process of its own so that its making leaves no trace."""
    made, coder = _LARGE[case]
    code = f"""
import json
from pathlib import Path
import numpy as np
from bayeszip.codec import encode
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor
random = np.random.default_rng(0)
book = np.linspace(-1, 1, 17, dtype=np.float32); book[0] = 0
values = {made}
tensor = QuantizedTensor(values, book) if values.dtype == np.uint8 else RawTensor(values, "float32")
Path({str(path)!r}).write_bytes(encode(CompressedModel({{"w": tensor}}), coder={coder!r}))
print(json.dumps({{"declared": values.nbytes}}))
"""
    return _in_new_process(code)


def limits_hold(blob: bytes, elements: int, size: int) -> bool:
    """Whether exactly as much as the file declares is allowed, and one less isn't."""
    decode(blob, Limits(elements, size))
    for tight in (Limits(elements - 1, size), Limits(elements, size - 1)):
        try:
            decode(blob, tight)
        except FormatError:
            continue
        return False
    return True
