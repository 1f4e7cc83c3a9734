"""The report as one page: no script, nothing fetched, light and dark, on paper and on a phone."""

import json
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Any

from bayeszip.fitting.course import DATA
from bayeszip.report import charts
from bayeszip.report.contents import Contents, Layer, Span
from bayeszip.report.markup import Markup, element, join
from bayeszip.summary import show_bytes
from bayeszip.tensors import QuantizedTensor

__all__ = ["page"]

#: What the parts of a file are, in the words of `codec.describe`.
MEANINGS = {
    "weights": "which weights are not zero, and their values",
    "raw": "tensors kept bit for bit",
    "layout": "which rows and columns hold any",
    "rows": "where each row ends",
    "offsets": "distances between weights that are not zero",
    "values": "Huffman-coded values",
    "codes": "the Huffman codes",
    "codebooks": "the shared values",
    "graph": "what the network computes",
    "header": "names, shapes and kinds of the tensors",
    "magic": "the mark of a .bayz file, its version and coder",
    "checksum": "proof that nothing was damaged",
    "end": "what the coder needs to finish",
    "padding": "bits that fill the last byte",
}
#: A part of the loss is shown if it is more than this share of the largest.
LEAST_PART = 1e-3
#: Segments of the bar of bytes; the smallest ones beyond are taken together.
MOST_SEGMENTS = 24
NETWORKS = {
    "lenet-300-100": "LeNet-300-100",
    "lenet-5": "LeNet-5",
    "resnet-8": "ResNet-8",
    "resnet-20": "ResNet-20",
    "resnet-20-4": "ResNet-20-4",
    "vgg-16": "VGG-16",
}

Row = Sequence[object]


def page(contents: Contents) -> str:
    """The whole page. The same contents give the same text."""
    name = NETWORKS.get(contents.network or "", "A network")
    title = f"{name} in {contents.description.bytes:,} bytes"
    style = (resources.files("bayeszip.report") / "page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        # Whatever names a file holds: nothing on this page may run or be fetched.
        element("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content="bayeszip"),
        element("title", f"{title} – {contents.name}"),
        element("style", Markup(style)),
    )
    sections = (
        _opening(contents, title),
        _bytes(contents),
        _layers(contents),
        _weights(contents),
        _first_layer(contents),
        _training(contents),
        _accuracy(contents),
        _provenance(contents),
    )
    body = element("body", element("main", *sections))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(title: str, *parts: object) -> Markup:
    return element("section", element("h2", title), *parts)


def _figure(title: str, note: str, *parts: object, kind: str | None = None) -> Markup:
    caption = element("figcaption", element("b", title), note)
    return element("figure", caption, *parts, class_=kind)


def _table(head: Sequence[str], rows: Iterable[Row], *, words: int = 1, foot: Row | None = None) -> Markup:
    """A table; its first `words` columns are words, the others figures."""

    def cells(name: str, row: Row) -> Markup:
        return element("tr", *(element(name, cell, class_="n" if i >= words else None) for i, cell in enumerate(row)))

    return element(
        "div",
        element(
            "table",
            element("thead", cells("th", head)),
            element("tbody", *(cells("td", row) for row in rows)),
            element("tfoot", cells("td", foot)) if foot else None,
        ),
        class_="scroll",
        tabindex=0,
    )


def _more(title: str, *parts: object) -> Markup:
    return element("details", element("summary", title), *parts)


# ── what went in and came out ─────────────────────────────────────────────────────────────────────────────────────────


def _opening(contents: Contents, title: str) -> Markup:
    figures = [
        element("div", element("dt", name), element("dd", value, element("small", note)))
        for name, value, note in _figures(contents)
    ]
    columns = 4 if len(figures) % 4 == 0 else 3
    words = element("div", element("p", contents.name, class_="file"), element("h1", title), _lead(contents))
    return element(
        "header",
        element("div", words, charts.scale_squares(contents), class_="hero"),
        element("dl", *figures, class_=f"figures of{columns}"),
    )


def _lead(contents: Contents) -> Markup:
    described, run = contents.description, contents.run
    smaller = f"{_times(contents.ratio)} times smaller" if contents.ratio >= 1 else "larger than before"
    said: list[object] = [
        f"{described.original_parameters:,} parameters, {show_bytes(4 * described.original_parameters)} in float32, "
        "became a file of ",
        element("b", f"{described.bytes:,} bytes"),
        ", ",
        element("b", smaller),
        ". ",
    ]
    if run is not None and run.accuracy is not None:
        which = "test set" if run.test_accuracy is not None else "validation data"
        said += ["The network in it gets ", element("b", _percent(run.accuracy)), f" of the {which} right. "]
    if described.parts.get("graph"):
        said.append("It loads without its class, and nothing in it is executed.")
    return element("p", *said, class_="lead")


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2f}"


def _figures(contents: Contents) -> Iterator[tuple[str, str, str]]:
    described, run = contents.description, contents.run
    original = described.original_parameters
    yield "Size", f"{described.bytes:,} B", f"{show_bytes(4 * original)} before"
    yield "Times smaller", _times(contents.ratio), "float32 ÷ the whole file"
    yield "Bits a parameter", f"{8 * described.bytes / max(original, 1):.3f}", "32 before"
    if run is not None and run.test_accuracy is not None:
        yield "Test accuracy", _percent(run.test_accuracy), "of the decoded file"
    if run is not None and run.validation_accuracy is not None:
        before = run.validation_accuracy_before
        yield (
            "Validation accuracy",
            _percent(run.validation_accuracy),
            "" if before is None else f"{_percent(before)} before",
        )
    yield "Parameters kept", f"{contents.kept:,}", f"of {original:,}"
    yield "Not zero", f"{contents.nonzero:,}", f"{100 * contents.nonzero / max(original, 1):.2f} % of the original"
    if run is not None:
        yield "Time", _duration(run.seconds), run.device


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _duration(seconds: float) -> str:
    """
    >>> _duration(42.0), _duration(245.1), _duration(7330.0)
    ('42 s', '4 min 5 s', '2 h 2 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# ── where the bytes are ───────────────────────────────────────────────────────────────────────────────────────────────


def _bytes(contents: Contents) -> Markup:
    described = contents.description
    by_tensor = [(tensor.name, tensor.bytes) for tensor in described.tensors]
    by_tensor.append(("about the file", sum(described.parts.values())))
    by_part: dict[str, int] = {}
    for tensor in described.tensors:
        for part, count in tensor.parts.items():
            name = "raw" if part == "weights" and tensor.kind != "quantized" else part
            by_part[name] = by_part.get(name, 0) + count
    parts = sorted((by_part | described.parts).items(), key=lambda item: -item[1])
    rows = [(name, MEANINGS.get(name, ""), f"{count:,}", _share(count, described.bytes)) for name, count in parts]
    return _section(
        "Where the bytes are",
        _figure("By tensor", f"adds up to {described.bytes:,} bytes", _bar(by_tensor, described.bytes)),
        _figure("By part", "the same bytes by what they are for", _bar(parts, described.bytes)),
        _table(
            ("part", "what it is", "bytes", "share"),
            rows,
            words=2,
            foot=("the whole file", "", f"{described.bytes:,}", "100 %"),
        ),
    )


def _bar(items: Sequence[tuple[str, int]], whole: int) -> Markup:
    """A bar of segments whose widths are their shares; labels where they fit."""
    largest = sorted(range(len(items)), key=lambda place: -items[place][1])[:MOST_SEGMENTS]
    shown = [items[place] for place in sorted(largest) if items[place][1]]
    rest = whole - sum(count for _, count in shown)
    if rest:
        shown.append((f"{sum(1 for _, count in items if count) - len(shown)} others", rest))
    segments = []
    for number, (name, count) in enumerate(shown):
        share = count / whole
        # Letters are about 0.9 % of the bar's width on a wide screen; narrower ones cut labels off by themselves.
        fits = share > 0.009 * min(len(name), 12) + 0.01
        label = join((element("b", name), element("span", f"{count:,} B"))) if fits else None
        tip = f"{name}: {count:,} bytes, {_share(count, whole)}"
        segments.append(element("div", label, title=tip, class_=f"tint{number % 4}", style=f"flex:{count} 1 0"))
    return element("div", *segments, class_="bar", role="img", aria_label="Bytes as widths of segments")


def _share(count: int, whole: int) -> str:
    return f"{100 * count / whole:.1f} %"


# ── layer by layer ────────────────────────────────────────────────────────────────────────────────────────────────────


def _layers(contents: Contents) -> Markup:
    known = any(layer.before for layer in contents.layers)
    head = [
        "tensor",
        *(["before"] if known else []),
        "after",
        "units kept",
        "not zero",
        "share",
        "values",
        "bits/weight",
        "bytes",
    ]
    rows = [_layer_row(layer, known) for layer in contents.layers]
    note = (
        "Units are what a layer gives out: rows of a matrix, channels of a convolution. The share counts weights that "
        "are not zero among those kept; bits are whole bytes of the file divided by weights kept."
    )
    return _section("Layer by layer", element("p", note, class_="note"), _table(head, rows))


def _layer_row(layer: Layer, known: bool) -> Row:
    tensor = layer.described
    units: object = ""
    if layer.units_after is not None:
        units = f"{layer.units_after:,}"
        if layer.units_before is not None:
            units = join((units, element("i", f" of {layer.units_before:,}")))
    share = tensor.nonzero / tensor.size if tensor.size else 0.0
    meter = element(
        "span",
        element("span", style=f"width:{100 * share:.1f}%"),
        class_="meter",
    )
    return (
        tensor.name,
        *([_shape(layer.before)] if known else []),
        _shape(tensor.shape),
        units,
        f"{tensor.nonzero:,}",
        join((meter, element("span", f"{100 * share:.1f} %", class_="percent"))),
        f"{tensor.symbols:,}" if tensor.kind == "quantized" else tensor.kind,
        f"{tensor.bits_per_weight:.3f}",
        f"{tensor.bytes:,}",
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "–"
    return "×".join(map(str, shape)) or "scalar"


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _weights(contents: Contents) -> Markup:
    moments = contents.run.snapshots.moments if contents.run else ()
    values = contents.values
    reach = max([abs(value) for value in values.values] + [moment.reach for moment in moments], default=1.0) * 1.03
    top = float(max([values.zeros, 1, *values.counts] + [max(moment.counts) for moment in moments]))
    figures = [
        _figure(
            "During" if number else "Before",
            charts.moment_name(moment) if number else f"as it came, {charts.moment_name(moment)}",
            charts.snapshot_chart(moment, reach, top),
        )
        for number, moment in enumerate(moments)
    ]
    figures.append(
        _figure("After" if moments else "In the file", _values_note(contents), charts.values_chart(values, reach, top))
    )
    rows = [
        (f"{value:.5g}", f"{count:,}")
        for value, count in sorted([(0.0, values.zeros), *zip(values.values, values.counts, strict=True)])
        if count
    ]
    return _section(
        "The weights",
        _weights_note(contents),
        element("div", *figures, class_="grid"),
        _more("The values in the file as a table", _table(("around" if values.width else "value", "weights"), rows)),
    )


def _weights_note(contents: Contents) -> Markup:
    said = "How many weights have which value, on a logarithmic scale. "
    quantized = (tensor for tensor in contents.model.tensors.values() if isinstance(tensor, QuantizedTensor))
    if any(tensor.scale is not None for tensor in quantized):
        said += "Values in the file, and weights while the mixture is trained, are in units of their layer or channel. "
    if contents.run is None or not contents.run.snapshots.moments:
        return element("p", said, class_="note")
    return element(
        "p",
        said,
        element("span", "Gray", class_="key past"),
        ": all weights, by their means. ",
        element("span", "Blue", class_="key fill1"),
        ": those that would not be zero if training stopped there. ",
        element("span", "Red", class_="key fill2"),
        ": what the mixture prior expects.",
        class_="note",
    )


def _values_note(contents: Contents) -> str:
    values = contents.values
    if values.width:
        return f"the values of the decoded weights; {values.zeros:,} are zero"
    used = sum(1 for count in values.counts if count)
    return f"{used:,} shared values; {values.zeros:,} weights kept are zero"


# ── the first layer ───────────────────────────────────────────────────────────────────────────────────────────────────


def _first_layer(contents: Contents) -> Markup | None:
    picture = contents.picture
    if picture is None:
        return None
    if picture.kind == "matrix":
        note = f"the share of weights that are not zero, block by block; {picture.note}"
        return _section(
            "The first layer", _figure(picture.tensor, note, charts.density_map(picture.tiles[0]), kind="narrow")
        )
    shown = len(picture.tiles)
    which = f"{shown} units" if shown == picture.units else f"the {shown} units with most weights, of {picture.units:,}"
    tone = (
        "in the colors they look for" if picture.kind == "colors" else "blue: positive, red: negative, stronger: larger"
    )
    gallery = _figure(
        "What each unit looks at" if picture.kind == "fields" else "The kernels",
        "; ".join(filter(None, (which, picture.note or tone))),
        charts.tiles(picture),
    )
    if picture.total is None:
        return _section("The first layer", gallery)
    read = int((picture.total > 0).sum())
    note = f"{read:,} of {picture.total.size:,} inputs are read, one by {int(picture.total.max())} weights"
    seen = _figure("What the layer looks at", note, charts.input_map(picture.total))
    return _section("The first layer", element("div", seen, gallery, class_="pair"))


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _training(contents: Contents) -> Markup | None:
    if contents.run is None or not contents.run.history:
        return None
    spans = contents.spans()
    figures = _loss_figures(contents, spans)
    for title, note, curve, label, log, unit in (
        (
            "Validation accuracy",
            "with the weights at their means",
            contents.curve("accuracy", "accuracy", 100.0),
            "%",
            False,
            " %",
        ),
        (
            "Zeros",
            "if training stopped there",
            contents.curve("zeros", "zeros", 100.0),
            "% of the weights",
            False,
            " %",
        ),
        ("Size", "of the weights, coded as they were then", contents.curve("size", "bytes"), "bytes", True, " B"),
    ):
        if curve.values:
            figures.append(_figure(title, note, charts.curves([curve], spans, label, log=log, unit=unit)))
    return _section(
        "The training", element("div", *figures, class_="grid"), _more("The phases as a table", _phases_table(contents))
    )


def _loss_figures(contents: Contents, spans: Sequence[Span]) -> list[Markup]:
    """The parts of the loss in one figure, without those too small to be seen; no figure where all are nothing."""
    parts = contents.parts_of_loss()
    heights = [max(map(abs, part.values)) for part in parts]
    parts = [part for part, height in zip(parts, heights, strict=True) if height > LEAST_PART * max(heights)]
    if not parts:
        return []
    legend = join((element("span", part.label, class_=f"key fill{n}") for n, part in charts.colored(parts)), "  ")
    caption = element("figcaption", element("b", "Parts of the loss"), legend)
    return [element("figure", caption, charts.curves(parts, spans, "nats per example"))]


def _phases_table(contents: Contents) -> Markup:
    history = contents.run.history if contents.run else ()
    rows = []
    for span in contents.spans():
        last = history[span.end - 1]
        rows.append(
            (
                span.name,
                f"{span.end - span.start}",
                _duration(sum(stats.seconds for stats in history[span.start : span.end])),
                f"{last.parts.get(DATA, 0.0):.4g}",
                "–" if last.accuracy is None else _percent(last.accuracy),
                _percent(last.zeros) if last.zeros else "–",
                "–" if last.bytes is None else f"{last.bytes:,}",
            )
        )
    return _table(("phase", "epochs", "time", "data loss", "validation", "zeros", "bytes"), rows)


# ── accuracy against size ─────────────────────────────────────────────────────────────────────────────────────────────


def _accuracy(contents: Contents) -> Markup | None:
    points = contents.points()
    if not any(point.kind == "file" for point in points):
        return None
    said: list[object] = [
        element("span", "Ring", class_="key ring"),
        ": an epoch of this run, on validation data. ",
        element("span", "Dot", class_="key fill1"),
        ": this file. " if not contents.run or not contents.run.others else ": this file, and others of its training. ",
    ]
    if contents.quoted:
        said += [
            element("span", "Gray", class_="key past"),
            f": what others report on {contents.quoted_on}, quoted and not run here; their "
            "accounting may leave out headers, and most chose settings on the test set.",
        ]
    rows = [(point.label, point.measured, f"{point.bytes:,}", f"{point.accuracy:.2f}") for point in points]
    return _section(
        "Accuracy against size",
        element("p", *said, class_="note"),
        element("div", charts.accuracy_and_size(points), class_="scroll wide"),
        _more("The points as a table", _table(("what", "data", "bytes", "accuracy, %"), rows, words=2)),
    )


# ── where it comes from ───────────────────────────────────────────────────────────────────────────────────────────────


def _provenance(contents: Contents) -> Markup:
    described, run = contents.description, contents.run
    facts: list[tuple[str, object]] = [
        ("file", f"{contents.name}, format version {described.version}, coder {described.coder}"),
        ("SHA-256", element("code", contents.digest)),
    ]
    if run is not None:
        facts += [
            ("recipe", f"{run.recipe.get('name', 'without a name')}, seed {run.seed}"),
            ("phases", ", ".join(f"{span.name} {span.end - span.start}" for span in contents.spans()) + " epochs"),
            *(() if run.hold_out else (("trained on", "all examples, none held out for validation"),)),
            *((name, said) for name, said in (("network", run.model), ("data", run.data)) if said is not None),
            ("device", run.device),
            ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
        ]
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in facts]
    load = ("import bayeszip", f'net = bayeszip.load("{contents.name}")  # a plain torch.nn.Module')
    return _section(
        "Where it comes from",
        element("dl", *rows, class_="facts"),
        _code(load) if described.parts.get("graph") else None,
        _more("The recipe, every setting", _code(_json_lines(run.recipe))) if run is not None else None,
    )


def _json_lines(held: dict[str, Any]) -> list[str]:
    return json.dumps(held, indent=2, ensure_ascii=False).splitlines()


def _code(lines: Iterable[str]) -> Markup:
    return element("pre", *(element("code", line) for line in lines))
