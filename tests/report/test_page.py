"""The page: whole, self-contained, the same every time, and safe whatever names a file holds."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bayeszip import CompressedModel, QuantizedTensor, RawTensor, codec
from bayeszip.report import gather, page
from bayeszip.report.page import MOST_SEGMENTS
from bayeszip.report.plots import write_plots

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "tests" / "golden" / "v1").glob("*.bayz"))
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "</style><script>alert(1)</script>",
    "javascript:alert(1)",
    "&lt;b&gt;",
    "a\x00b\u202e\n]]>",
    "]]><!--",
]
#: Whatever of HTML and SVG the page may be made of; nothing that runs or fetches.
TAGS = re.findall(
    r"\w+",
    "html head meta title style body main header section h1 h2 p b i small span code pre div dl dt dd figure "
    "figcaption details summary table thead tbody tfoot tr th td svg g path rect circle line text",
)


class Outline(HTMLParser):
    """The elements of a page: properly nested, their attributes, their text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.text = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text[self.open[-1] if self.open else ""] = self.text.get(self.open[-1] if self.open else "", "") + data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def said(self):
        return " ".join(text for tag, text in self.text.items() if tag != "style")


def checked(text):
    """The outline of a page that keeps the rules of all pages."""
    outline = Outline(text.removeprefix("<!DOCTYPE html>\n"))
    assert {tag for tag, _ in outline.elements} <= set(TAGS)
    attributes = {name for _, attributes in outline.elements for name in attributes}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "srcdoc", "action")}
    style = outline.text["style"]
    assert "url(" not in style
    assert "@import" not in style
    assert "://" not in text
    policy = [a["content"] for tag, a in outline.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    return outline


def test_the_page_tells_all_there_is(finished):
    outline = checked(page(finished.contents))
    headings = "Where the bytes are|Layer by layer|The weights|The first layer|The training|Accuracy against size"
    for heading in headings.split("|"):
        assert heading in outline.text["h2"]
    run = finished.contents.run
    for figure in (
        f"{finished.contents.description.bytes:,} B",
        f"{100 * run.accuracy:.2f} %",
        f"{100 * run.validation_accuracy_before:.2f} % before",
        "quick, seed 0",
        '"hyper_shape": 100000.0',
        run.device,
        run.versions["torch"],
        finished.contents.digest,
    ):
        assert figure in outline.said()


def test_before_during_and_after_are_there_with_the_mixture(finished):
    text = page(finished.contents)
    captions = re.findall(r"<figcaption><b>(Before|During|After)</b>", text)
    assert captions == ["Before", *["During"] * (len(captions) - 2), "After"]
    assert len(captions) == len(finished.contents.run.snapshots.moments) + 1 >= 5
    with_mixture = [moment for moment in finished.contents.run.snapshots.moments if moment.mixture]
    assert text.count('class="rim"') == len(with_mixture) >= 2


@pytest.mark.parametrize("loss", [0.0, 6.6e-07])
def test_a_loss_that_is_small_or_nothing_makes_a_page(finished, tmp_path, loss):
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    held = json.loads((folder / "result.json").read_text())
    for stats in held["history"]:
        stats["parts"] = {"data": loss}
    (folder / "result.json").write_text(json.dumps(held))
    contents = gather(folder / "net.bayz", folder)
    text = page(contents)
    checked(text)
    assert ("Parts of the loss" in text) == (loss > 0)
    assert ('<td class="n">6.6e-07</td>' in text) == (loss > 0)
    assert write_plots(contents, tmp_path / "plots")


def widths_of_bars(text):
    """The widths of the segments of each bar of bytes."""
    return [
        list(map(int, re.findall(r"flex:(\d+) 1 0", bar)))
        for bar in re.findall(r'<div class="bar".*?</div></div>', text)
    ]


def test_every_chart_says_what_it_shows(finished):
    charts = [attributes for tag, attributes in checked(page(finished.contents)).elements if tag == "svg"]
    assert sum(attributes.get("class") == "chart" for attributes in charts) >= 9
    assert all(attributes.get("aria-label") for attributes in charts if attributes["class"] != "tile")


def test_the_same_contents_give_the_same_page(finished):
    assert page(gather(finished.file, finished.folder)) == page(finished.contents)


def test_a_file_alone_makes_a_page(finished):
    outline = checked(page(gather(finished.file)))
    assert "In the file" in outline.said()
    assert "The training" not in outline.said()
    assert "accuracy" not in outline.said()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_kind_of_file_makes_a_page(path):
    text = page(gather(path))
    assert f"{path.stat().st_size:,} bytes" in checked(text).text["b"]
    assert [sum(widths) for widths in widths_of_bars(text)] == 2 * [path.stat().st_size]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_tensors_stay_text(tmp_path, name):
    tensors = {
        name: QuantizedTensor(np.array([[0, 1], [1, 0]]), np.array([0, 1.5], np.float32)),
        f"{name}.bias": RawTensor(np.array([np.nan, np.inf], dtype="<f4"), "float32"),
    }
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel(tensors)))
    checked(page(gather(tmp_path / "net.bayz")))


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_record_says_stays_text(finished, tmp_path, name):
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    held = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    held |= {"device": name, "versions": {name: name}, "recipe": {"name": name, name: [name]}}
    for stats in held["history"]:
        stats["phase"] = name
    (folder / "result.json").write_text(json.dumps(held), encoding="utf-8")
    snapshots = (folder / "snapshots.json").read_text(encoding="utf-8")
    (folder / "snapshots.json").write_text(snapshots.replace('"vd"', json.dumps(name)), encoding="utf-8")
    checked(page(gather(folder / "net.bayz", folder)))


def test_a_files_own_name_stays_text(finished, tmp_path):
    path = tmp_path / "<script>alert(1)<"
    path.write_bytes(finished.file.read_bytes())
    checked(page(gather(path)))


def test_many_tensors_fit_into_one_bar(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": RawTensor(rng.normal(size=10 + i).astype("<f4"), "float32") for i in range(80)}
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel(tensors)))
    text = page(gather(tmp_path / "net.bayz"))
    widths = widths_of_bars(text)[0]
    assert len(widths) == MOST_SEGMENTS + 1
    assert sum(widths) == (tmp_path / "net.bayz").stat().st_size
    assert "57 others: " in text
    assert all(f">t{i}</td>" in text for i in range(80))


def test_the_page_says_where_values_are_in_units(tmp_path, finished):
    said = "are in units of their layer or channel"
    scale = QuantizedTensor(np.array([1, 1]), np.array([0, 20], np.float32))
    tensor = QuantizedTensor(np.array([[0, 1], [1, 0]]), np.array([0, 1.5], np.float32), scale=scale)
    (tmp_path / "net.bayz").write_bytes(codec.encode(CompressedModel({"w": tensor})))
    text = page(gather(tmp_path / "net.bayz"))
    checked(text)
    assert said in text
    assert said not in page(finished.contents)


def test_a_picture_of_it_is_in_the_readme():
    path = "docs/report-lenet-5.png"
    assert (ROOT / path).read_bytes().startswith(b"\x89PNG")
    assert f"]({path})" in (ROOT / "README.md").read_text(encoding="utf-8")
