"""Lets every system call of a save fail, or be the last before a SIGKILL, and looks at what is left.

    python tests/endurance/faults.py [--no-report]

A save is watched once with strace, call by call. Then it is repeated with a fault injected at each of them in turn:
errors, once and from then on; writes that claim to have written; SIGKILL. Afterwards the newest checkpoint before it
must be there, or the new one; everything visible must be whole; the next save must work, and no temporary file be left.
Figures go to FAULTS.md and faults.json beside this file. Needs strace, and leave to trace one's own processes.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from bayeszip.errors import BayeszipError, OutputError
from bayeszip.fitting.checkpoint import Checkpoints, read_checkpoint

HERE = Path(__file__).parent
ERRORS = ("EIO", "ENOSPC", "EROFS", "EACCES", "EINTR", "EDQUOT", "EMFILE")
SAVED, REFUSED, OTHER = 0, 3, 4


def state(n: int) -> dict:
    return {"n": n, "weights": torch.full((300,), float(n))}


def opened(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=2, warn=lambda message: sys.exit(f"skipped: {message}"))


def save_under(options: list[str]) -> tuple[int, Path, list[str]]:
    """A third save, under strace; how its process ended (minus the signal), its folder, and its calls."""
    folder = Path(tempfile.mkdtemp())
    with opened(folder) as checkpoints:
        for n in (1, 2):
            checkpoints.save(state(n), {})
    child = os.fork()
    if child == 0:
        _save(folder)
    os.waitpid(child, os.WUNTRACED)
    log = folder / ".calls"
    command = ["strace", "-p", str(child), "-o", str(log), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        attached = strace.stderr.readline()
        os.kill(child, signal.SIGCONT)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if "attached" not in attached:
        raise SystemExit(f"strace can't trace here: {attached}")
    calls = re.findall(r"^(\w+)\(", log.read_text(), re.MULTILINE)
    log.unlink()
    return status, folder, [call for call in calls if call not in ("exit_group", "restart_syscall")]


def _save(folder: Path) -> None:
    """In a child: wait to be traced, save, and say by the exit status how it went."""
    status = OTHER
    try:
        checkpoints = opened(folder)
        os.kill(os.getpid(), signal.SIGSTOP)
        checkpoints.save(state(3), {})
        status = SAVED
    except OutputError:
        status = REFUSED
    finally:
        os._exit(status)


def look(folder: Path, status: int) -> str | None:
    """What is wrong with what a save left; None: nothing."""
    try:
        visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        found = [read_checkpoint(path).state["n"] for path in visible]
        if status == OTHER:
            return "another exception than OutputError"
        if (3 not in found) if status == SAVED else not {2, 3} & set(found):
            return f"the newest is lost: {found} is left"
        if status == REFUSED and list(folder.glob(".*.tmp")):
            return "a temporary file is left"
        with opened(folder) as checkpoints:
            checkpoints.save(state(4), {})
            newest = checkpoints.newest()
            if newest is None or newest.state["n"] != 4 or list(folder.glob(".*.tmp")):
                return "the next save fails, or leaves a temporary file"
    except BayeszipError as error:
        return str(error)
    finally:
        shutil.rmtree(folder)
    return None


def injections(calls: list[str]) -> list[tuple[str, str]]:
    """(kind, strace's words) for each fault at each call; the k-th call of a name is found by counting."""
    found, seen = [], Counter[str]()
    for call in calls:
        seen[call] += 1
        found += [(error, f"inject={call}:error={error}:when={seen[call]}") for error in ERRORS]
        found.append(("EIO from then on", f"inject={call}:error=EIO:when={seen[call]}+"))
        found.append(("SIGKILL", f"inject={call}:signal=SIGKILL:when={seen[call]}"))
        if call == "write":
            found += [(f"{n} bytes, it says", f"inject=write:retval={n}:when={seen[call]}") for n in (1, 700, 10**6)]
    return found


def campaign() -> dict:
    status, folder, calls = save_under(["-e", "trace=all"])
    shutil.rmtree(folder)
    if status != SAVED:
        raise SystemExit("a save fails by itself")
    tried, ended, faults = Counter[str](), Counter[str](), []
    for kind, words in injections(calls):
        status, folder, _ = save_under(["-e", "trace=all", "-e", words])
        tried[kind] += 1
        ended[{SAVED: "saved all the same", REFUSED: "refused"}.get(status, "killed" if status < 0 else "other")] += 1
        fault = look(folder, status)
        if fault:
            faults.append(f"{words}: {fault}")
    return {"calls": calls, "tried": dict(tried), "ended": dict(ended), "faults": faults}


def report(figures: dict) -> None:
    (HERE / "faults.json").write_text(json.dumps(figures, indent=1) + "\n")
    kinds = "\n".join(f"| {kind} | {count} |" for kind, count in figures["tried"].items())
    ended = ", ".join(f"{count} {how}" for how, count in figures["ended"].items())
    outcome = "the newest whole checkpoint was never lost, nothing half-written was visible, and the next save worked"
    if figures["faults"]:
        outcome = "faults:\n" + "\n".join(f"- {fault}" for fault in figures["faults"])
    (HERE / "FAULTS.md").write_text(
        f"""# Faults at every system call of a save

Written by `python tests/endurance/faults.py`; don't edit. {platform.system()} {platform.machine()}, by strace.

A save that replaces an old checkpoint makes {len(figures["calls"])} system calls: {", ".join(figures["calls"])}.

{sum(figures["tried"].values())} saves with a fault at one of them ({ended}): {outcome}.

| fault at each call | saves |
|---|---:|
{kinds}
"""
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-report", action="store_true", help="print the figures as JSON instead")
    arguments = parser.parse_args()
    figures = campaign()
    if arguments.no_report:
        print(json.dumps(figures))
    else:
        report(figures)
    for fault in figures["faults"]:
        print(fault, file=sys.stderr)
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
