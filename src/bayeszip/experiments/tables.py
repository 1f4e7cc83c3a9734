"""Tables of what experiments came to, for a page and for a terminal: our figures beside those that the paper prints.

Figures over seeds are means with their 95 % confidence interval, from Student's t.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from bayeszip.experiments.curves import AIMS, CURVES, NETWORKS, Curve, Point
from bayeszip.experiments.parts import ABLATED, PARTS, SNAP
from bayeszip.experiments.plan import EXPERIMENTS, METHODS
from bayeszip.experiments.records import Record, recipe_of
from bayeszip.experiments.runs import at_rate

__all__ = [
    "PRINTED",
    "TABLES",
    "Grid",
    "aims_table",
    "curve_groups",
    "front",
    "mean_of",
    "part_group",
    "short_table",
    "with_interval",
]

#: For each network and method what the paper prints: accuracy in %, times smaller.
PRINTED: dict[str, dict[str, tuple[float, float]]] = {
    "lenet-300-100": {"l2": (98.39, 1), "sws": (98.16, 34), "vd": (98.05, 131), "vd+sws": (98.24, 161)},
    "lenet-5": {"l2": (99.13, 1), "sws": (99.01, 84), "vd": (99.09, 349), "vd+sws": (99.14, 482)},
}

#: 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond them the normal distribution's, 1.96.
STUDENT_T: tuple[float, ...] = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
STUDENT_T += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)

Records = Sequence[Record]


@dataclass(frozen=True)
class Grid:
    """A table: its head and its rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def markdown(self) -> list[str]:
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        table = [f"| {' | '.join(cells)} |" for cells in lines]
        table[1] = f"|{'|'.join(lines[1])}|"
        return ([f"### {self.title}", ""] if self.title else []) + [*table, ""]

    def terminal(self) -> Table:
        table = Table(title=self.title or None, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for number, name in enumerate(self.head):
            table.add_column(name, justify="right" if number else "left", header_style="dim")
        for row in self.rows:
            table.add_row(*map(_on_terminal, row))
        return table


def _on_terminal(cell: str) -> Text:
    """A cell as it looks on a page: what Markdown says of it is shown instead of told."""
    return Text(cell.strip("*").replace("`", ""), style="bold" if cell.startswith("**") else "")


def with_interval(values: Sequence[float], form: str) -> str:
    """Mean ± half the 95 % confidence interval of the mean, t·s/√n; one value alone has none.

    >>> with_interval([1.0, 2.0, 3.0], ".2f")
    '2.00 ± 2.48'
    """
    mean = format(statistics.mean(values), form)
    if len(values) == 1:
        return mean
    t = STUDENT_T[len(values) - 2] if len(values) - 2 < len(STUDENT_T) else 1.96
    return f"{mean} ± {format(t * statistics.stdev(values) / math.sqrt(len(values)), form)}"


def paper_table(records: Records) -> list[Grid]:
    """Both networks by all methods."""
    head = (
        "recipe",
        "seeds",
        "test accuracy, %",
        "the snap",
        "closing phase",
        "not zero, %",
        "times smaller, paper's accounting",
        "whole file, bytes",
        "times smaller",
        "the paper: accuracy, %",
        "times smaller",
        "difference in accuracy",
    )
    grids = []
    for model, printed in PRINTED.items():
        groups = {name: [r for r in records if r["model"] == model and r["recipe"]["name"] == name] for name in METHODS}
        rows = [
            _paper_row(name, group, *printed[name.removeprefix("paper-")]) for name, group in groups.items() if group
        ]
        if rows:
            grids.append(Grid(head, tuple(rows), NETWORKS[model].title))
    return grids


def _paper_row(name: str, group: Records, accuracy: float, ratio: float) -> tuple[str, ...]:
    return (
        f"`{name}`",
        _seeds(group),
        _percent(group, "accuracy"),
        _step(group, "validation_accuracy_trained", "validation_accuracy_snapped"),
        _step(group, "validation_accuracy_snapped", "validation_accuracy"),
        with_interval([100 * record["nonzero"] / record["params"] for record in group], ".2f"),
        "1" if name == "l2" else _ratio(group, "paper_bytes"),
        _bytes(group),
        _ratio(group),
        f"{accuracy:.2f}",
        f"{ratio:g}",
        "–" if (own := _mean_percent(group, "accuracy")) is None else _signed(own - accuracy),
    )


def short_table(records: Records) -> Grid:
    """Our recipes beside the paper's figures."""
    head = ("network", "recipe", "test accuracy, %", "times smaller, paper's accounting", "whole file, bytes")
    rows = []
    for model, printed in PRINTED.items():
        for name in ("sws", "vd", "vd+sws"):
            group = [record for record in records if record["model"] == model and record["recipe"]["name"] == name]
            if group:
                figures = (_percent(group, "accuracy"), _ratio(group, "paper_bytes"), _bytes(group), _ratio(group))
                quoted = f"{printed[name][0]:.2f} %, {printed[name][1]:g}×"
                rows.append((NETWORKS[model].title, f"`{name}`", *figures, quoted))
    return Grid((*head, "times smaller", "the paper"), tuple(rows))


def figure_table(records: Records) -> list[Grid]:
    """The runs on the fronts of the three methods."""
    head = ("file", "test accuracy, %", "validation, %", "bytes", "times smaller")
    methods = ("sws", "vd", "vd+sws")
    fronts = [front([record for record in records if record["recipe"]["name"] == name]) for name in methods]
    return [Grid(head, tuple(_file_row("figure", record) for group in fronts for record in group))]


def ablation_table(records: Records) -> list[Grid]:
    head = ("without", "seeds", "test accuracy, %", "validation, %", "the snap", "closing phase", "bytes")
    rows = []
    for variant in EXPERIMENTS["ablation"].variants:
        group = _group(records, variant.name)
        if group:
            steps = (
                _step(group, "validation_accuracy_trained", "validation_accuracy_snapped"),
                _step(group, "validation_accuracy_snapped", "validation_accuracy"),
            )
            accuracies = (_percent(group, "accuracy"), _percent(group, "validation_accuracy"))
            rows.append((variant.meaning, _seeds(group), *accuracies, *steps, _bytes(group), _ratio(group)))
    return [Grid((*head, "times smaller"), tuple(rows))]


def choice_table(records: Records) -> list[Grid]:
    rows = []
    for variant in EXPERIMENTS["choice"].variants:
        group = _group(records, variant.name)
        if group:
            mean = _mean_percent(group, "validation_accuracy")
            accuracy = "–" if mean is None else f"{mean:.2f}"
            size = statistics.mean(record["bytes"] for record in group)
            rows.append(
                (variant.recipe, size, (f"`{variant.recipe}`", f"`{variant.meaning}`", accuracy, f"{size:,.0f}"))
            )
    head = ("recipe", "settings", "validation accuracy, %", "bytes")
    return [Grid(head, tuple(row for *_, row in sorted(rows)))]


def quick_table(records: Records) -> list[Grid]:
    head = ("τ₁", "seeds", "test accuracy, %", "bytes", "times smaller", "weights not zero", "seconds, one thread")
    strengths = sorted({recipe_of(record).phases[0].tau1 for record in records})
    rows = []
    for tau1 in strengths:
        group = [record for record in records if recipe_of(record).phases[0].tau1 == tau1]
        counts = (with_interval([record[name] for record in group], ",.0f") for name in ("nonzero", "seconds"))
        rows.append((f"{tau1:g}", _seeds(group), _percent(group, "accuracy"), _bytes(group), _ratio(group), *counts))
    return [Grid(head, tuple(rows))]


def targets_table(records: Records) -> list[Grid]:
    rows = [
        (
            NETWORKS[record["model"]].title,
            record["target"],
            *_file_row("targets", record),
            _percent([record], "validation_accuracy_before"),
            f"{record['strength']:.3g}",
        )
        for record in sorted(records, key=lambda record: (record["model"], record["bytes"]))
    ]
    figures = ("test accuracy, %", "validation, %", "bytes", "times smaller", "validation before, %", "τ₁ ×")
    head = ("network", "target", "file", *figures)
    return [Grid(head, tuple(rows))]


def parts_table(records: Records) -> list[Grid]:
    """For each network and strength, what each part alone and all together come to, and that less none of them."""
    head = ("part", "seeds", "test accuracy, %", "bytes", "accuracy against none", "bytes against none, %", "seconds")
    grids = []
    for ablated in ABLATED:
        for strength in ablated.strengths:
            none = part_group(records, ablated.model, strength, "none", 0)
            rows = [
                _part_row(meaning, group, none)
                for part, (_, *meanings) in PARTS.items()
                for meaning, rate in zip(meanings, (0, SNAP), strict=True)
                if (group := part_group(records, ablated.model, strength, part, rate))
            ]
            if rows:
                grids.append(Grid(head, tuple(rows), f"{NETWORKS[ablated.model].title}, τ₁ = {strength:g}"))
    return grids


def part_group(records: Records, model: str, strength: float, part: str, rate: float) -> list[Record]:
    """What a part came to at a strength, with each seed."""
    return _group(records, at_rate(f"{model}-tau1={strength:g}-{part}", rate))


def _part_row(meaning: str, group: Records, none: Records) -> tuple[str, ...]:
    points = _against(group, none, "accuracy", lambda ours, theirs: 100 * (ours - theirs), "+.2f")
    size = _against(group, none, "bytes", lambda ours, theirs: 100 * (ours / theirs - 1), "+.1f")
    seconds = f"{statistics.mean(record['seconds'] for record in group):.0f}"
    return (meaning, _seeds(group), _percent(group, "accuracy"), _bytes(group), points, size, seconds)


def _against(
    group: Records, others: Records, figure: str, difference: Callable[[float, float], float], form: str
) -> str:
    """A difference in a figure over the seeds that both have, in the mean."""
    base = {record["seed"]: record for record in others}
    pairs = [(record, base[record["seed"]]) for record in group if record["seed"] in base]
    if not pairs or group == others or any(figure not in record for pair in pairs for record in pair):
        return "–"
    mean, _, interval = with_interval(
        [difference(*(record[figure] for record in pair)) for pair in pairs], form
    ).partition(" ± ")
    return f"{mean} ± {interval.lstrip('+')}" if interval else mean


def frontier_table(records: Records) -> list[Grid]:
    """Each network's curves, smallest files first; headlines in bold."""
    figures = ("seeds", "test accuracy, %", "validation, %", "whole file, bytes", "times smaller", "seconds")
    head, grids = ("τ₁", "weight of a bit", *figures), []
    for curve in CURVES:
        rows = []
        for point, group in curve_groups(records, curve):
            accuracies = (_percent(group, name) for name in ("accuracy", "validation_accuracy"))
            seconds = f"{statistics.mean(record['seconds'] for record in group):.0f}"
            place = (f"{point.strength:g}", f"{point.rate:g}")
            cells = (*place, _seeds(group), *accuracies, _bytes(group), _ratio(group))
            emphasis = "**" if point.is_headline else ""
            rows.append((*(f"{emphasis}{cell}{emphasis}" for cell in cells), seconds))
        if rows:
            augment = f" (`{curve.augment}`)" if curve.augmented else ""
            grids.append(Grid(head, tuple(rows), f"{curve.title}{augment}"))
    return grids


def aims_table(records: Records) -> Grid:
    """What was aimed at, and what the runs for it came to."""
    figures = ("test accuracy, %", "before, %", "whole file, bytes", "times smaller")
    rows = []
    for aim in AIMS:
        if group := _group(records, aim.runs):
            came_to = (_percent(group, "accuracy"), _percent(group, "accuracy_before"), _bytes(group), _ratio(group))
            rows.append((NETWORKS[group[0]["model"]].title, str(aim), *came_to, _seeds(group), f"`{aim.runs}`"))
    return Grid(("network", "aim", *figures, "seeds", "runs"), tuple(rows))


def mean_of(group: Records, name: str) -> float | None:
    """A figure's mean; None where it was not measured."""
    values = [record[name] for record in group]
    return None if None in values else statistics.mean(values)


def curve_groups(records: Records, curve: Curve) -> list[tuple[Point, list[Record]]]:
    """The points of a curve that have records, each with them, smallest files first."""
    groups = [(point, group) for point in curve.points() if (group := _group(records, point.name))]
    return sorted(groups, key=lambda held: statistics.mean(record["bytes"] for record in held[1]))


#: For each experiment what its records come to.
TABLES: dict[str, Callable[[Records], list[Grid]]] = {
    "table": paper_table,
    "figure": figure_table,
    "ablation": ablation_table,
    "choice": choice_table,
    "quick": quick_table,
    "targets": targets_table,
    "parts": parts_table,
    "frontier": frontier_table,
}


def front(records: Iterable[Record], by: str = "validation_accuracy") -> list[Record]:
    """The runs that no other beats in both size and accuracy on validation images, smallest first.

    Where no images were held out nothing tells which are beaten, and all of them are there. Others' files may be
    judged `by` their test accuracy, which can only be kind to them.
    """
    held = sorted(records, key=lambda record: (record["bytes"], -(record[by] or 0.0)))
    if any(record[by] is None for record in held):
        return held
    best: list[Record] = []
    for record in held:
        if not best or record[by] > best[-1][by]:
            best.append(record)
    return best


def _group(records: Records, variant: str) -> list[Record]:
    return [record for record in records if record["name"].rpartition("-")[0] == variant]


def _file_row(experiment: str, record: Record) -> tuple[str, ...]:
    shares = (_percent([record], name) for name in ("accuracy", "validation_accuracy"))
    size = record["bytes"]
    return f"{experiment}/{record['name']}.bayz", *shares, f"{size:,}", f"{4 * record['params'] / size:.0f}"


def _seeds(group: Records) -> str:
    seeds = sorted(record["seed"] for record in group)
    joined = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}–{seeds[-1]}" if joined else ", ".join(map(str, seeds))


def _percent(group: Records, name: str) -> str:
    """An accuracy; a dash where a run did not measure it, since it was sealed, or trained on all images."""
    if any(record.get(name) is None for record in group):
        return "–"
    return with_interval([100 * record[name] for record in group], ".2f")


def _mean_percent(group: Records, name: str) -> float | None:
    """The mean of an accuracy; None where a run did not measure it."""
    if any(record.get(name) is None for record in group):
        return None
    return statistics.mean(100 * record[name] for record in group)


def _bytes(group: Records) -> str:
    return with_interval([record["bytes"] for record in group], ",.0f")


def _ratio(group: Records, name: str = "bytes") -> str:
    return with_interval([4 * record["params"] / record[name] for record in group], ".0f")


def _step(group: Records, before: str, after: str) -> str:
    """What validation accuracy changes by from one moment to the next; a dash where it was not measured."""
    if any(record[before] is None or record[after] is None for record in group):
        return "–"
    return _signed(statistics.mean(100 * (record[after] - record[before]) for record in group))


def _signed(points: float) -> str:
    # Nothing is +0.00, never −0.00.
    return f"{round(points, 2) + 0.0:+.2f}"
