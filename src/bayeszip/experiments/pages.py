"""Tables in RESULTS.md, the README and docs/, and pictures there, from the records. Rendering twice changes nothing."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayeszip.errors import DataError
from bayeszip.experiments.curves import NETWORKS
from bayeszip.experiments.measurements import epochs_table, latency_table
from bayeszip.experiments.pictures import draw_figure, draw_networks, draw_parts, draw_sizes
from bayeszip.experiments.records import Record, read
from bayeszip.experiments.tables import TABLES, Grid, aims_table, front, short_table
from bayeszip.files import write_atomically
from bayeszip.report.quoted import quoted_for

__all__ = ["PAGES", "checkout", "inherited", "render", "rendered"]

FIGURE, SIZES, PARTS = "docs/lenet-5.svg", "docs/accuracy-size.svg", "docs/parts.svg"

#: Where in the pages sections stand, each between `<!-- name -->` and `<!-- /name -->`.
PAGES = {
    "RESULTS.md": (
        *("aims", *(f"frontier-{model}" for model in NETWORKS)),
        *("table", "figure", "parts", "ablation", "results", "targets", "latency", "epochs", "quoted"),
    ),
    "docs/trials.md": ("choice", "inherited"),
    "README.md": ("quick", "networks", "paper", "results"),
}


def checkout() -> Path:
    """The root of the source tree that holds the records.

    Raises:
        DataError: this is an installed package.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "results").is_dir():
        raise DataError("the records are in the repository, not in the package; give --again DIR to train them anew")
    return root


def render(root: Path) -> None:
    """Write the pages' tables and the pictures."""
    for name in PAGES:
        write_atomically(root / name, rendered(root, name).encode())
    draw_figure(list(read(root / "results" / "figure").values()), root / FIGURE)
    draw_sizes(list(read(root / "results" / "quick").values()), root / SIZES)
    draw_parts(list(read(root / "results" / "parts").values()), root / PARTS)
    draw_networks(list(read(root / "results" / "frontier").values()), _peer(root), root / "docs")


def rendered(root: Path, page: str) -> str:
    """A page with the figures of the records."""
    text = (root / page).read_text(encoding="utf-8")
    contents = _sections(root)
    for name in PAGES[page]:
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        if not (opening and closing):
            raise DataError(f"{page} lacks the markers of {name}")
        text = f"{before}{opening}{contents[name].rstrip()}\n{closing}{after}"
    return text


def inherited(root: Path) -> dict[str, dict[str, str]]:
    """For each default recipe the settings that no sweep has tried, each with the reason for its value."""
    return json.loads((root / "results" / "choice" / "inherited.json").read_text(encoding="utf-8"))


def _sections(root: Path) -> dict[str, str]:
    held = {name: list(read(root / "results" / name).values()) for name in TABLES}
    reasons = [
        (f"`{name}`", f"`{field}`", why) for name, fields in inherited(root).items() for field, why in fields.items()
    ]
    grids = {
        **{name: table(held[name]) for name, table in TABLES.items()},
        "results": TABLES["quick"](held["quick"]),
        "paper": [short_table(held["table"])],
        "inherited": [Grid(("recipe", "setting", "why it is so"), tuple(reasons))],
        "latency": latency_table(_measured(root, "latency")),
        "epochs": epochs_table(_measured(root, "epoch_time")),
        "quoted": [_quoted()],
    }
    return {
        **{name: _markdown(many) or "Not measured yet." for name, many in grids.items()},
        **{f"frontier-{model}": _frontier(model, held["frontier"], _peer(root)) for model in NETWORKS},
        "aims": _aims(held["frontier"]),
        "networks": _networks(held["frontier"]),
        "quick": _quick_line([record for record in held["quick"] if record["name"].startswith("tau1=1-")]),
    }


def _markdown(grids: Sequence[Grid]) -> str:
    return "\n".join(line for grid in grids for line in grid.markdown())


def _frontier(model: str, records: Sequence[Record], peer: Sequence[dict[str, Any]]) -> str:
    """A network's picture, the table of its curves, and NNCodec's points."""
    own = [record for record in records if record["model"] == model]
    if not own:
        return "No run has been recorded yet."
    others = front((row for row in peer if row["model"] == model), by="accuracy")
    rows = tuple(
        (f"{row['qp']}", f"{row['nonweight_qp']}", f"{100 * row['accuracy']:.2f}", f"{row['bytes']:,}")
        for row in others
    )
    head = ("NNCodec, qp", "qp of other tensors", "test accuracy, %", "bytes")
    grids = [*TABLES["frontier"](own), *([Grid(head, rows)] if rows else [])]
    return f"![Accuracy against size of {NETWORKS[model].title}](docs/frontier-{model}.svg)\n\n{_markdown(grids)}"


def _networks(records: Sequence[Record]) -> str:
    """The aims, and what is to be known of them."""
    if not records:
        return ""
    lines = (
        "Accuracy of decoded files on the test set, and whole files: means over seeds with their 95 % confidence",
        "intervals, for each aim of those runs that came nearest. Before: the networks as they came (± 0.00: the seeds",
        "began from one). `bayeszip reproduce frontier --only RUNS` tells how they were trained, `--again DIR` trains",
        "them; most have settings of their own, or further epochs, beside a recipe's. [RESULTS.md](RESULTS.md) has all",
        "other runs, and what had been seen when strengths were chosen; those of `whole` were trained without images",
        "held out.",
        "",
        _aims(records),
    )
    return "\n".join(lines)


def _aims(records: Sequence[Record]) -> str:
    """What was aimed at, and all curves in one picture."""
    if not records:
        return "No run has been recorded yet."
    return f"{_markdown([aims_table(records)])}\n![Accuracy against size of networks](docs/frontier.svg)"


def _quick_line(records: Sequence[Record]) -> str:
    """What `make compress` comes to, as the mean over seeds: its last bits depend on the machine."""
    size, ratio, accuracy = (
        statistics.mean(figures)
        for figures in zip(*((r["bytes"], 4 * r["params"] / r["bytes"], r["accuracy"]) for r in records), strict=True)
    )
    return (
        f"The file comes to about {size / 1000:.1f} kB, {ratio:.0f} times less than the network in float32, and gets\n"
        f"{100 * accuracy:.1f} % of MNIST's test set right."
    )


def _quoted() -> Grid:
    """What others report, by network and size as they state it."""
    rows = []
    for model, network in NETWORKS.items():
        for row in sorted(quoted_for(model), key=lambda row: -row.size(10**6)):
            size = f"{row.ratio:g}×" if row.ratio else f"{row.bytes:,} bytes"
            cells = (f"{100 - row.error:.2f}", size, row.counted or "–", row.source, row.read or "–")
            rows.append((network.title, row.method, *cells))
    head = ("network", "method", "test accuracy, %", "size", "what is counted", "source", "read")
    return Grid(head, tuple(rows))


def _measured(root: Path, name: str) -> dict[str, Any]:
    """Figures that a benchmark has left; none if it was not run."""
    path = root / "benchmarks" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}


def _peer(root: Path) -> list[dict[str, Any]]:
    """NNCodec's figures for pretrained networks."""
    return _measured(root, "nncodec")["rows"]
