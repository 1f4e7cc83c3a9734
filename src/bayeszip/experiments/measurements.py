"""Tables of what the benchmarks have measured: latency of loaded networks, and epochs of training."""

from typing import Any

from bayeszip.experiments.tables import Grid

__all__ = ["epochs_table", "latency_table"]


def latency_table(figures: dict[str, Any]) -> list[Grid]:
    """What `benchmarks/latency.py` left: milliseconds of originals and of loaded networks."""
    rows = [
        (
            row["file"],
            f"{row['original_macs'] / 1e6:.2f} → {row['loaded_macs'] / 1e6:.2f}",
            row["runtime"],
            f"{row['batch']}",
            f"{row['original_ms']:.2f}",
            f"{row['loaded_ms']:.2f}",
            f"{row['original_ms'] / row['loaded_ms']:.2f}",
        )
        for row in figures["rows"]
    ]
    head = ("file", "million multiplications", "runtime", "batch", "original, ms", "loaded, ms", "times faster")
    return [Grid(head, tuple(rows))] if rows else []


def epochs_table(figures: dict[str, Any]) -> list[Grid]:
    """What `benchmarks/epoch_time.py` left: epochs of plain and of variational training."""
    names = ("seconds", "over_plain", "over_resident", "peak_gib", "held_gib", "memory_over_plain")
    rows = [
        (
            row["network"],
            "fp32" if row["precision"] == "no" else row["precision"],
            row["feed"],
            row["kind"],
            *("–" if not row[name] else f"{row[name]:.2f}" for name in names),
            row["failure"] or "",
        )
        for row in figures["rows"]
    ]
    head = (
        *("network", "precision", "batches", "training", "seconds", "over plain", "over resident"),
        *("peak memory, GiB", "held, GiB", "memory over plain", "note"),
    )
    title = f"{figures['device']}, batch {figures['batch']}, torch {figures['torch']}" if rows else ""
    return [Grid(head, tuple(rows), title)] if rows else []
