"""Tables in RESULTS.md and the README, and the pictures in docs/, from the records. Rendering twice changes nothing."""

import json
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from bayeszip.errors import DataError, ModelError
from bayeszip.experiments.records import Record, read
from bayeszip.experiments.tables import PRINTED, TABLES, TITLES, Grid, front, short_table
from bayeszip.files import write_atomically

__all__ = ["PAGES", "checkout", "inherited", "render", "rendered"]

FIGURE, SIZES = "docs/lenet-5.svg", "docs/accuracy-size.svg"
COLORS = {"sws": "tab:blue", "vd": "tab:orange", "vd+sws": "tab:red"}

#: Where in the pages sections stand, each between `<!-- name -->` and `<!-- /name -->`.
PAGES = {
    "RESULTS.md": ("table", "figure", "ablation", "choice", "inherited", "results", "targets", "quoted"),
    "README.md": ("quick", "paper", "results"),
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
    _draw_figure(list(read(root / "results" / "figure").values()), root / FIGURE)
    _draw_sizes(list(read(root / "results" / "quick").values()), root / SIZES)


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
    quoted = [
        (row["method"], f"{100 - row['error']:.2f}", str(row["ratio"]), row["source"])
        for row in sorted(_quoted(), key=lambda row: row["ratio"])
    ]
    grids = {
        **{name: table(held[name]) for name, table in TABLES.items()},
        "results": TABLES["quick"](held["quick"]),
        "paper": [short_table(held["table"])],
        "inherited": [Grid(("recipe", "setting", "why it is so"), tuple(reasons))],
        "quoted": [Grid(("method", "test accuracy, %", "times smaller", "source"), tuple(quoted))],
    }
    return {
        **{name: "\n".join(line for grid in many for line in grid.markdown()) for name, many in grids.items()},
        "quick": _quick_line([record for record in held["quick"] if record["name"].startswith("tau1=1-")]),
    }


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


def _quoted() -> list[dict[str, Any]]:
    text = files("bayeszip.report").joinpath("quoted.json").read_text(encoding="utf-8")
    return json.loads(text)["lenet-300-100"]


def _axes() -> tuple[Any, Any]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModelError("pictures need matplotlib: pip install 'bayeszip[plot]'") from error
    # Fixed ids and no date, so that the file changes only when the figures do.
    mpl.rcParams.update({"svg.hashsalt": "bayeszip", "font.size": 10})
    figure = Figure(figsize=(7.2, 4.3))
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_ylabel("MNIST test accuracy, %")
    axes.grid(alpha=0.2)
    return figure, axes


def _save(figure: Any, axes: Any, ticks: Sequence[float], labels: Sequence[str], path: Path) -> None:
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.legend(loc="best", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _draw_figure(records: Sequence[Record], path: Path) -> None:
    """Accuracy against compression for the three methods, their fronts, and what the paper's table prints."""
    figure, axes = _axes()
    for method, color in COLORS.items():
        own = [record for record in records if record["recipe"]["name"] == method]
        for group, style, more in ((own, ".", {"alpha": 0.5}), (front(own), "-", {"label": method})):
            sizes = [4 * record["params"] / record["bytes"] for record in group]
            axes.plot(sizes, [100 * record["accuracy"] for record in group], style, color=color, **more)
        accuracy, ratio = PRINTED["lenet-5"][method]
        axes.plot(ratio, accuracy, "x", color=color, markersize=8)
    axes.plot([], [], "x", color="0.4", label="the paper's table, its accounting")
    axes.set_ylim(bottom=98.0)
    axes.set_xlabel("times smaller than float32 (1.72 MB), whole file")
    axes.set_title(f"{TITLES['lenet-5']}, compressed by three methods")
    ticks = [100, 200, 400, 800, 1600, 2400]
    _save(figure, axes, ticks, [f"{tick}×" for tick in ticks], path)


def _draw_sizes(records: Sequence[Record], path: Path) -> None:
    """Accuracy against size, smaller to the left: our runs with their spread, and what others report."""
    figure, axes = _axes()
    gray = {"textcoords": "offset points", "fontsize": 8, "color": "0.4"}
    for row in _quoted():
        place = (4 * records[0]["params"] / row["ratio"], 100 - row["error"])
        axes.plot(*place, "o", color="0.6", markersize=5)
        axes.annotate(row["method"], place, (6, -3), **gray)
    accuracies = [100 * record["accuracy"] for record in records]
    axes.plot([record["bytes"] for record in records], accuracies, ".", color="tab:red", alpha=0.4)
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["name"].rpartition("-")[0], []).append(record)
    means = sorted(
        (statistics.mean(r["bytes"] for r in group), statistics.mean(100 * r["accuracy"] for r in group))
        for group in groups.values()
    )
    axes.plot(*zip(*means, strict=True), "-o", color="tab:red", label="bayeszip, recipe quick (mean of the seeds)")
    axes.set_xlim(1_700, 60_000)
    axes.set_xlabel("size of the network (float32: 1.07 MB)")
    axes.set_title(f"{TITLES['lenet-300-100']}, compressed")
    ticks = [2_000, 4_000, 8_000, 16_000, 32_000]
    _save(figure, axes, ticks, [f"{tick // 1000} kB" for tick in ticks], path)
