"""Tables in plain words: facts about a result, and where the bytes of a file are."""

import io
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from bayeszip.codec import Description
from bayeszip.errors import printable

__all__ = ["as_text", "curve_table", "description_dict", "facts_table", "rates_table", "show_bytes", "tensors_table"]


def show_bytes(count: int) -> str:
    """To the byte below a megabyte, to three digits above.

    >>> show_bytes(4096), show_bytes(149_999), show_bytes(1_066_440), show_bytes(12_345_678), show_bytes(5_000_000_000)
    ('4,096 B', '149,999 B', '1.07 MB', '12.3 MB', '5,000 MB')
    """
    megabytes = count / 1e6
    if megabytes < 1:
        return f"{count:,} B"
    return f"{megabytes:,.{2 if megabytes < 10 else 1 if megabytes < 100 else 0}f} MB"


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Names and values in two columns; what in them could steer a terminal is written out."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts:
        table.add_row(printable(name), printable(value))
    return table


def tensors_table(description: Description) -> Table:
    """A row for each tensor and each other part of the file; the last column adds up to the file's size."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("tensor", footer="the whole file", overflow="fold")
    table.add_column("shape")
    table.add_column("not zero", justify="right")
    table.add_column("values", justify="right")
    table.add_column("bits/weight", justify="right")
    table.add_column("bytes", justify="right", footer=f"{description.bytes:,}")
    for tensor in description.tensors:
        table.add_row(
            printable(tensor.name),
            "×".join(map(str, tensor.shape)) or "scalar",
            f"{tensor.nonzero:,}",
            f"{tensor.symbols:,}" if tensor.kind == "quantized" else tensor.kind,
            f"{tensor.bits_per_weight:.3f}",
            f"{tensor.bytes:,}",
        )
    for name, count in description.parts.items():
        table.add_row(name, "", "", "", "", f"{count:,}", style="dim")
    return table


def curve_table(points: Iterable[Mapping[str, float | None]]) -> Table:
    """A row for each quality that a network was packed at."""
    points = list(points)
    table = Table(box=box.SIMPLE_HEAD)
    measured = any(point["accuracy"] is not None for point in points)
    for name in ("quality", "bytes", "times smaller", "weights moved by", *(["accuracy"] if measured else [])):
        table.add_column(name, justify="right")
    for point in points:
        cells = [f"{point['quality']:g}", f"{point['bytes']:,}", f"{point['ratio']:.1f}", f"{point['moved']:.1%}"]
        table.add_row(*cells, *([f"{point['accuracy']:.2%}"] if measured else []))
    return table


def rates_table(points: Iterable[Mapping[str, float | None]]) -> Table:
    """A row for each rate that a training was ended at; figures are those of the validation data."""
    points = list(points)
    table = Table(box=box.SIMPLE_HEAD)
    measured = [name for name in ("accuracy", "loss", "metric") if any(point[name] is not None for point in points)]
    for name in ("weight of a bit", "bytes", "times smaller", *(f"validation {name}" for name in measured)):
        table.add_column(name, justify="right")
    for point in points:
        figures = (f"{point[name]:.2%}" if name == "accuracy" else f"{point[name]:.4g}" for name in measured)
        table.add_row(f"{point['rate']:g}", f"{point['bytes']:,}", f"{point['ratio']:.1f}", *figures)
    return table


def description_dict(description: Description) -> dict[str, Any]:
    """What `tensors_table` shows, for JSON."""
    return {
        "bytes": description.bytes,
        "version": description.version,
        "coder": description.coder,
        "options": dict(description.options),
        "original_parameters": description.original_parameters,
        "parts": dict(description.parts),
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "kind": tensor.kind,
                "size": tensor.size,
                "nonzero": tensor.nonzero,
                "symbols": tensor.symbols,
                "bytes": tensor.bytes,
                "bits_per_weight": tensor.bits_per_weight,
                "parts": dict(tensor.parts),
            }
            for tensor in description.tensors
        ],
    }


def as_text(*tables: RenderableType, width: int = 110) -> str:
    """Tables as plain text; brackets and colons in them mean nothing but themselves."""
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, emoji=False)
    for table in tables:
        console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"
