"""The paper's table and figure in Markdown and SVG, ours beside what is printed there."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

Runs = list[dict[str, Any]]

#: For each network and method what the paper prints: accuracy in %, weights not zero in %, times smaller.
PRINTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "lenet-300-100": {
        "l2": (98.39, 100, 1),
        "sws": (98.16, 8.6, 34),
        "vd": (98.05, 1.6, 131),
        "vd+sws": (98.24, 1.5, 161),
    },
    "lenet-5": {"l2": (99.13, 100, 1), "sws": (99.01, 3.6, 84), "vd": (99.09, 0.7, 349), "vd+sws": (99.14, 0.5, 482)},
}
TITLES = {"lenet-300-100": "LeNet-300-100", "lenet-5": "LeNet-5"}
COLORS = {"sws": "tab:blue", "vd": "tab:orange", "vd+sws": "tab:red"}


def table_section(runs: Runs, taken: Runs) -> list[str]:
    """Both networks by all methods; empty if there are no runs."""
    if not runs:
        return []
    lines = [
        "## The paper's table",
        "",
        "`bayeszip reproduce table`. Mean and standard deviation over seeds, of decoded files on MNIST's test set; in",
        "brackets the seed that is best on validation. The paper's accounting counts what its codec (CSR with offsets",
        "of 5 or 8 bits, Huffman) makes of the weights, shared values included; the other size is our whole file,",
        "header and graph included. Recipes beginning with `paper-` follow the paper to the letter. L2 is the",
        "pretrained network: its accuracy is that of 64 shared values, its size in the paper's accounting that of",
        "dense float32. The snap: what accuracy on validation images changes by when weights are quantized.",
        *([seconds_line(taken)] if taken else []),
        *alone_lines(runs),
        "",
    ]
    for model, printed in PRINTED.items():
        of_model = [run for run in runs if run["model"] == model]
        if not of_model:
            continue
        lines += [
            f"### {TITLES[model]}",
            "",
            "| recipe | seeds | test accuracy, % | the snap | not zero, % | times smaller, paper's accounting | "
            "whole file, bytes | times smaller | the paper: accuracy, % | times smaller | difference in accuracy |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name in ("l2", "sws", "vd", "vd+sws", "paper-sws", "paper-vd", "paper-vd+sws"):
            group = [run for run in of_model if run["recipe"]["name"] == name]
            if group:
                lines.append(_row(name, group, printed[name.removeprefix("paper-")]))
        lines.append("")
    return lines


def seconds_line(taken: Runs) -> str:
    """What an experiment took, from its `seconds.json`."""
    seconds: dict[str, float] = {}
    for entry in taken:
        seconds[entry["device"]] = seconds.get(entry["device"], 0.0) + entry["seconds"]
    parts = " and ".join(f"{count:.0f} s on one {device}" for device, count in seconds.items())
    return f"Training, but for pretraining, and coding took {parts}."


def alone_lines(runs: Runs) -> list[str]:
    """What runs took that were trained by themselves on a GPU."""
    return [
        f"`{run['recipe']['name']}` on one {TITLES[run['model']]} alone, "
        f"{' + '.join(str(phase['epochs']) for phase in run['recipe']['phases'])} epochs: {run['seconds']:.1f} s."
        for run in runs
        if run["trained_together"] == 1 and run["device"] != "cpu" and run["recipe"]["phases"]
    ]


def short_table(runs: Runs) -> list[str]:
    """Our recipes beside the paper's figures, for the README."""
    lines = [
        "| network | recipe | test accuracy, % | times smaller, paper's accounting | whole file, bytes | "
        "times smaller | the paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, printed in PRINTED.items():
        for name in ("sws", "vd", "vd+sws"):
            group = [run for run in runs if run["model"] == model and run["recipe"]["name"] == name]
            if not group:
                continue
            cells = [
                TITLES[model],
                f"`{name}`",
                _spread([100 * run["accuracy"] for run in group], ".2f"),
                _spread([4 * run["params"] / run["paper_bytes"] for run in group], ".0f"),
                _spread([run["bytes"] for run in group], ",.0f"),
                _spread([run["ratio"] for run in group], ".0f"),
                f"{printed[name][0]:.2f} %, {printed[name][2]:g}×",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def ablation_section(runs: Runs, parts: Mapping[str, str]) -> list[str]:
    """What the recipe comes to without each of its parts; empty if there are no runs."""
    if not runs:
        return []
    lines = [
        "## What each part is for",
        "",
        "`python experiments/ablation.py`. LeNet-300-100 by the recipe `vd+sws` with one part left out, or as in the",
        "paper; mean and standard deviation over seeds.",
        "",
        "| without | seeds | test accuracy, % | validation, % | the snap | bytes | times smaller |",
        "|---|---|---|---|---|---|---|",
    ]
    for part, meaning in parts.items():
        group = [run for run in runs if f"-without-{part}-" in run["folder"]]
        if group:
            lines.append(_ablation_row(meaning, group))
    return [*lines, ""]


def _ablation_row(meaning: str, runs: Runs) -> str:
    cells = [
        meaning,
        str(len(runs)),
        _spread([100 * run["accuracy"] for run in runs], ".2f"),
        _spread([100 * run["validation_accuracy"] for run in runs], ".2f"),
        _snap(runs),
        _spread([run["bytes"] for run in runs], ",.0f"),
        _spread([run["ratio"] for run in runs], ".0f"),
    ]
    return f"| {' | '.join(cells)} |"


def choice_section(lines: Runs) -> list[str]:
    """The sweep from which LeNet-300-100's settings were chosen; empty if there is none."""
    if not lines:
        return []
    groups: dict[tuple[str, str], Runs] = {}
    for line in lines:
        groups.setdefault((line["method"], line["settings"]), []).append(line)
    page = [
        "## How settings were chosen",
        "",
        "`python experiments/choice.py`: LeNet-300-100, two seeds each, judged on the 5,000 validation images alone;",
        "settings as `--set` takes them. The figure tries the like on LeNet-5. From both: 33 components, and τ₁ = 0.7",
        "for `vd+sws` and, to begin as it does, `vd`; for `sws` a first width between those that were tried (0.012).",
        "",
        "| recipe | settings | validation accuracy, % | bytes |",
        "|---|---|---|---|",
    ]
    for (method, settings), group in sorted(groups.items(), key=lambda item: (item[0][0], _mean_bytes(item[1]))):
        accuracy = statistics.mean(100 * line["validation_accuracy"] for line in group)
        page.append(f"| `{method}` | `{settings}` | {accuracy:.2f} | {_mean_bytes(group):,.0f} |")
    return [*page, ""]


def _mean_bytes(lines: Runs) -> float:
    return statistics.mean(line["bytes"] for line in lines)


def _row(name: str, runs: Runs, printed: tuple[float, float, float]) -> str:
    best = max(runs, key=lambda run: run["validation_accuracy"])
    accuracy = [100 * run["accuracy"] for run in runs]
    counted = [4 * run["params"] / run["paper_bytes"] for run in runs]
    cells = [
        f"`{name}`",
        str(len(runs)),
        f"{_spread(accuracy, '.2f')} ({100 * best['accuracy']:.2f})",
        _snap(runs),
        _spread([100 * run["nonzero"] / run["params"] for run in runs], ".2f"),
        "1" if name == "l2" else _spread(counted, ".0f"),
        _spread([run["bytes"] for run in runs], ",.0f"),
        _spread([run["ratio"] for run in runs], ".0f"),
        f"{printed[0]:.2f}",
        f"{printed[2]:g}",
        _signed(statistics.mean(accuracy) - printed[0]),
    ]
    return f"| {' | '.join(cells)} |"


def _snap(runs: Runs) -> str:
    """What validation accuracy changes by, from the last epoch before quantization to the file."""
    return _signed(statistics.mean(100 * (run["validation_accuracy"] - run["accuracy_trained"]) for run in runs))


def _signed(points: float) -> str:
    # Without a sign for nothing.
    return f"{round(points, 2) + 0.0:+.2f}"


def _spread(values: Sequence[float], form: str) -> str:
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form)}"


def front(runs: Runs) -> Runs:
    """The runs that no other beats in both size and accuracy on validation images, smallest first."""
    best: Runs = []
    for run in sorted(runs, key=lambda run: (run["bytes"], -run["validation_accuracy"])):
        if not best or run["validation_accuracy"] > best[-1]["validation_accuracy"]:
            best.append(run)
    return best


def figure_section(runs: Runs, picture: str, taken: Runs) -> list[str]:
    """The picture, and the runs on the fronts."""
    if not runs:
        return []
    lines = [
        "## The paper's figure",
        "",
        "`bayeszip reproduce figure`. LeNet-5 by the three methods as their settings vary, one seed each, with 0.6 of",
        "the recipes' epochs. Lines join the runs that no other of the method beats in both size and accuracy on",
        "validation images; drawn is accuracy on the test set. Crosses are the paper's table, in its accounting.",
        *([seconds_line(taken)] if taken else []),
        "",
        f"![Accuracy against compression of LeNet-5]({picture})",
        "",
        "| file | test accuracy, % | validation, % | bytes | times smaller |",
        "|---|---|---|---|---|",
    ]
    for method in COLORS:
        for run in front([run for run in runs if run["recipe"]["name"] == method]):
            lines.append(
                f"| {run['folder']}/net.bayz | {100 * run['accuracy']:.2f} | {100 * run['validation_accuracy']:.2f} | "
                f"{run['bytes']:,} | {run['ratio']:.0f} |"
            )
    return [*lines, ""]


def draw_figure(runs: Runs, path: Path) -> None:
    """Accuracy against compression for the three methods, their fronts, and what the paper's table prints."""
    mpl.rcParams.update({"svg.hashsalt": "bayeszip", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 4.4))
    for method, color in COLORS.items():
        own = [run for run in runs if run["recipe"]["name"] == method]
        axes.plot([run["ratio"] for run in own], [100 * run["accuracy"] for run in own], ".", color=color, alpha=0.5)
        best = front(own)
        axes.plot(
            [run["ratio"] for run in best], [100 * run["accuracy"] for run in best], "-", color=color, label=method
        )
        accuracy, _, ratio = PRINTED["lenet-5"][method]
        axes.plot(ratio, accuracy, "x", color=color, markersize=8)
    axes.plot([], [], "x", color="0.4", label="the paper's table, its accounting")
    axes.set_xscale("log")
    ticks = [100, 200, 400, 800, 1600, 2400]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=98.0)
    axes.set_xlabel("times smaller than float32 (1.72 MB), whole file")
    axes.set_ylabel("MNIST test accuracy, %")
    axes.set_title("LeNet-5, compressed by three methods")
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
