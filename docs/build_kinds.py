"""Measures the kinds of networks of tests/zoo, and writes what they came to into the table of docs/guide/tasks.md.

python docs/build_kinds.py    # some minutes
"""

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "zoo"))

from compressed import NAMES, compressed, judged, packed  # noqa: E402

import bayeszip  # noqa: E402
import zoo  # noqa: E402
from bayeszip.fitting.evaluation import Figures  # noqa: E402


def measured(name: str) -> tuple[str, ...]:
    """The cells of a kind: bytes by `pack`, bytes compressed, before, after."""
    network = zoo.trained(name)
    before, small = judged(name, network), packed(name)
    with tempfile.TemporaryDirectory() as folder:
        result = compressed(name, network, Path(folder))
        after = judged(name, bayeszip.load(Path(folder) / "net.bayz"))
    return f"{small.bytes:,} B", f"{result.bytes:,} B", _shown(before), _shown(after)


def _shown(figures: Figures) -> str:
    return f"{figures.loss:.4f}" if figures.accuracy is None else f"{100 * figures.accuracy:.1f} %"


def main() -> None:
    for name in NAMES:
        cells = measured(name)
        print(name, *cells, flush=True)
        page = zoo.GUIDE.read_text("utf-8")
        row = rf"^(\| {re.escape(name)} \|.*? B) \| [\d,]+ B \| [\d,]+ B \| [^|]* \| [^|]* \|"
        page, count = re.subn(row, lambda found, told=cells: " | ".join((found[1], *told)) + " |", page, flags=re.M)
        if count != 1:
            raise SystemExit(f"{zoo.GUIDE} has {count} rows for {name}")
        zoo.GUIDE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
