"""Pictures and pages of the frontier, from made-up records: what is drawn, and that it is reproducible."""

import json
import shutil
from pathlib import Path

import pytest

from bayeszip.experiments.curves import CURVES
from bayeszip.experiments.pages import PAGES, rendered
from bayeszip.experiments.parts import ABLATED, PARTS, SNAP
from bayeszip.experiments.pictures import Point, _draw_curve, _draw_network, _heights, _point, draw_networks, draw_parts
from bayeszip.experiments.runs import at_rate
from bayeszip.experiments.tables import aims_table, frontier_table
from bayeszip.report.quoted import quoted_for

ROOT = Path(__file__).resolve().parents[2]
PEER = [
    {
        "model": "vgg-16",
        "qp": qp,
        "nonweight_qp": -50,
        "bytes": size,
        "accuracy": accuracy,
        "validation_accuracy": accuracy,
    }
    for qp, size, accuracy in ((-20, 900_000, 0.93), (-14, 500_000, 0.9), (-8, 200_000, 0.1))
]


def made_up(*models):
    """A record for each planned run of these networks: the stronger, the smaller and the worse."""
    return [
        {
            "name": f"{point.name}-{seed}",
            "model": curve.model,
            "seed": seed,
            "accuracy": 0.94 - 0.01 * (point.strength + point.rate) + 0.001 * (seed - 10),
            "accuracy_before": 0.95,
            "validation_accuracy": 0.93 - 0.01 * (point.strength + point.rate),
            "bytes": round(50_000 / (point.strength + point.rate)),
            "params": 14_724_042,
            "seconds": 60.0,
        }
        for curve in CURVES
        if curve.model in models
        for point in curve.points()
        for seed in ((10, 11, 12) if point.is_headline else (10,))
    ]


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def test_each_network_has_a_picture_with_the_peer_and_what_others_report(matplotlib, tmp_path):
    records = made_up("vgg-16", "resnet-20")
    assert draw_networks(records, PEER, tmp_path) == ["resnet-20", "vgg-16"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "frontier.svg",
        "frontier-resnet-20.svg",
        "frontier-vgg-16.svg",
    }
    drawn = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    for words in (
        "bayeszip, with augmentation",
        "NNCodec, pretrained network",
        "LilNetX",
        "LilNetX, smaller",
    ):
        assert f"<!-- {words} -->" in drawn["frontier-vgg-16"]
        assert f"<!-- {words} -->" in drawn["frontier"]
    assert "bayeszip, without augmentation" in drawn["frontier-resnet-20"]
    assert "NNCodec" not in drawn["frontier-resnet-20"]
    draw_networks(records, PEER, tmp_path)
    assert {path.stem: path.read_text() for path in tmp_path.iterdir()} == drawn


def test_networks_pretrained_with_augmentation_and_without_have_a_line_each(matplotlib):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    records = [
        record | {"accuracy_before": 0.95 if "augmented" in record["name"] else 0.85} for record in made_up("resnet-20")
    ]
    _draw_network(axes, "resnet-20", records, ())
    heights = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":" and len(line.get_ydata())]
    assert sorted(heights) == pytest.approx([85, 95])


def test_nothing_is_drawn_without_records(matplotlib, tmp_path):
    assert draw_networks([], PEER, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def part_records(model, seeds=(0,)):
    """Made-up records of every part of a network."""
    (ablated,) = (ablated for ablated in ABLATED if ablated.model == model)
    return [
        {"name": f"{at_rate(f'{model}-tau1={strength:g}-{part}', rate)}-{seed}", "model": model, "seed": seed}
        | {"bytes": 1000 + 10 * place, "accuracy": 0.9 + 0.001 * place, "validation_accuracy": None}
        for strength in ablated.strengths
        for place, part in enumerate(PARTS)
        for rate in (0, SNAP)
        for seed in seeds
    ]


def test_parts_have_a_panel_for_each_network_that_was_run(matplotlib, tmp_path):
    path = tmp_path / "parts.svg"
    draw_parts([], path)
    assert not path.exists()
    draw_parts(part_records("resnet-20"), path)
    drawn = path.read_text()
    assert "<!-- ResNet-20, part by part -->" in drawn
    assert "LeNet-5" not in drawn
    for _, meaning, _ in PARTS.values():
        assert f"<!-- {meaning} -->" in drawn
    draw_parts(part_records("resnet-20"), path)
    assert path.read_text() == drawn


def test_endings_far_below_the_headlines_are_not_shown():
    figures = ((90, True), (92, True), (88, False), (86, False))
    points = [Point(1.0, accuracy, None, is_headline) for accuracy, is_headline in figures]
    lowest, highest = _heights(points, (), [93.0])
    assert 86 < lowest < 88
    assert 93 < highest < 94
    lowest, _ = _heights(points[2:], (), [])
    assert lowest < 86


class Noted:
    """Axes that note what is plotted on them."""

    def __init__(self):
        self.lines, self.dots = [], []

    def plot(self, x, y, style, **options):
        (self.lines if style == "-" else self.dots).append((x, y, options))


def test_a_line_joins_what_validation_images_choose_and_dots_are_test_accuracies():
    """The best of the test set is not on the line where another beats it on validation images."""
    figures = [(100, 0.90, 0.90), (200, 0.99, 0.89), (300, 0.92, 0.93)]
    points = [
        _point([{"bytes": size, "accuracy": accuracy, "validation_accuracy": validation}], False)
        for size, accuracy, validation in figures
    ]
    axes = Noted()
    _draw_curve(axes, points, CURVES[0])
    ((sizes, accuracies, _),) = axes.lines
    assert sizes == [100, 300]
    assert accuracies == pytest.approx([90, 92])
    assert [x for x, *_ in axes.dots] == [100, 200, 300]


def test_the_table_of_a_curve_begins_with_its_smallest_file_and_shows_headlines():
    records = [record for record in made_up("vgg-16") if record["name"].startswith("vgg-16-augmented-coarse-tau1=")]
    (grid,) = frontier_table(records)
    assert grid.title == "VGG-16, with augmentation, with 9 components (`shift=4,flip`)"
    sizes = [int(row[5].strip("*").partition(" ")[0].replace(",", "")) for row in grid.rows]
    assert sizes == sorted(sizes)
    bold = [row for row in grid.rows if row[0].startswith("**")]
    assert [row[2] for row in bold] == ["**10–12**"] * len(bold) != []
    assert all("±" in row[3] for row in bold)


def test_the_table_of_aims_tells_what_runs_came_to():
    records = [record for model in ("vgg-16", "resnet-8") for record in made_up(model)]
    first, second = aims_table(records).rows
    assert first[:2] == ("ResNet-8", "86 % in 12,000 bytes")
    assert second[:2] == ("VGG-16", "92 % in 60,000 bytes")
    assert second[3] == "95.00 ± 0.00"
    assert second[-2:] == ("10–12", "`vgg-16-augmented-whole-tau1=0.11`")


@pytest.fixture
def checkout(tmp_path):
    """The committed pages and records, and a frontier of its own."""
    for name in PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "results" / "frontier").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    for folder in (ROOT / "results").iterdir():
        if folder.name != "frontier":
            (tmp_path / "results" / folder.name).symlink_to(folder)
    return tmp_path


def test_pages_have_pictures_and_tables_of_networks_that_have_records(checkout):
    (checkout / "benchmarks" / "nncodec.json").write_text(json.dumps({"rows": PEER}))
    lines = (json.dumps(record) for record in made_up("vgg-16"))
    (checkout / "results" / "frontier" / "runs.jsonl").write_text("\n".join(lines))
    results, readme = (rendered(checkout, page) for page in ("RESULTS.md", "README.md"))
    assert "(docs/frontier-vgg-16.svg)" in results
    assert "frontier-resnet-20.svg" not in results
    assert "| -14 | -50 | 90.00 | 500,000 |" in results
    assert "(docs/frontier.svg)" in readme
    assert "| `vgg-16-augmented-whole-tau1=0.11` |" in readme
    (checkout / "results" / "frontier" / "runs.jsonl").unlink()
    assert "frontier-vgg-16.svg" not in rendered(checkout, "RESULTS.md")
    assert "frontier.svg" not in rendered(checkout, "README.md")


def test_pages_show_what_benchmarks_left(checkout):
    latency = {
        "file": "a.bayz",
        "runtime": "torch",
        "batch": 1,
        "original_ms": 3.0,
        "loaded_ms": 1.5,
        "original_macs": 4_000_000,
        "loaded_macs": 1_000_000,
    }
    epoch = {
        "network": "resnet-20",
        "precision": "bf16",
        "feed": "loader",
        "kind": "VD",
        "seconds": 2.5,
        "over_plain": 1.25,
        "over_resident": 1.1,
        "peak_gib": 3.0,
        "held_gib": None,
        "memory_over_plain": 2.0,
        "failure": "",
    }
    about = {"device": "a GPU", "torch": "2", "batch": 256}
    (checkout / "benchmarks" / "latency.json").write_text(json.dumps({"rows": [latency]}))
    (checkout / "benchmarks" / "epoch_time.json").write_text(json.dumps({**about, "rows": [epoch]}))
    page = rendered(checkout, "RESULTS.md")
    assert "| a.bayz | 4.00 → 1.00 | torch | 1 | 3.00 | 1.50 | 2.00 |" in page
    assert "### a GPU, batch 256, torch 2" in page
    assert "| resnet-20 | bf16 | loader | VD | 2.50 | 1.25 | 1.10 | 3.00 | – | 2.00 |  |" in page


def test_quoted_figures_say_what_they_count():
    sizes = {row.method: row.size(4_000) for row in quoted_for("vgg-16")}
    assert sizes == {"LilNetX": 129_000, "LilNetX, smaller": 76_000}
    assert {row.counted for row in quoted_for("vgg-16")} == {"weights only"}
    (paper,) = (row for row in quoted_for("lenet-5") if row.method == "the paper, VD+SWS")
    assert paper.size(482) == 4
    assert (paper.read, paper.reference) == ("at its source", "Federici et al. 2017")
    assert quoted_for("resnet-8")[1].reference.endswith(", second-hand")
