"""All that a report shows, gathered once: the page and the plots draw the same data."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bayeszip import codec, models
from bayeszip.codec import Description, TensorDescription
from bayeszip.errors import DataError
from bayeszip.fitting import EpochStats
from bayeszip.graph import check_sound
from bayeszip.graph.indices import beside_parameters, is_index, surviving
from bayeszip.graph.storable import parameter_count
from bayeszip.report.first_layer import Picture, first_layer, values_of
from bayeszip.report.quoted import TITLES, Quoted, is_quoted_on, quoted_data, quoted_for
from bayeszip.report.run import Run, read_run
from bayeszip.snapshots import BINS
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

__all__ = ["Contents", "Curve", "Layer", "Point", "Span", "Values", "gather"]


@dataclass(frozen=True)
class Layer:
    """A tensor before and after. `units`: rows (or whatever the layer gives out) that it had, None: not known."""

    described: TensorDescription
    before: tuple[int, ...] | None
    units_before: int | None
    units_after: int | None
    #: Whether it is a parameter: neither a statistic nor a mask.
    trained: bool = True


@dataclass(frozen=True)
class Values:
    """The values that the file's weights take, and how often. `width` of a bin; 0: each value on its own."""

    values: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int
    width: float


@dataclass(frozen=True)
class Span:
    """A phase: the epochs it took, counted through the whole run."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Curve:
    """A figure against epochs, counted through the whole run; only epochs in which it was measured."""

    label: str
    epochs: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """An accuracy (in percent) and a size. `kind`: "epoch", "file", "other" or "quoted"; `measured`: on which data."""

    label: str
    bytes: int
    accuracy: float
    kind: str
    measured: str


@dataclass(frozen=True)
class Contents:
    """A file, and the run that made it if it is at hand."""

    name: str
    digest: str
    description: Description
    model: CompressedModel
    network: str | None
    layers: tuple[Layer, ...]
    values: Values
    picture: Picture | None
    run: Run | None
    quoted: tuple[Quoted, ...]

    @property
    def ratio(self) -> float:
        return 4 * self.description.original_parameters / self.description.bytes

    @property
    def nonzero(self) -> int:
        return sum(layer.described.nonzero for layer in self.layers if layer.trained)

    @property
    def kept(self) -> int:
        return sum(layer.described.size for layer in self.layers if layer.trained)

    @property
    def quoted_on(self) -> str:
        """The data set that quoted figures are of."""
        return TITLES.get(quoted_data(self.network) or "", "")

    def spans(self) -> list[Span]:
        """The phases of the run, in order."""
        spans: list[Span] = []
        for number, stats in enumerate(self._history(), start=1):
            if spans and spans[-1].name == stats.phase:
                spans[-1] = Span(stats.phase, spans[-1].start, number)
            else:
                spans.append(Span(stats.phase, number - 1, number))
        return spans

    def curve(self, label: str, figure: str, scale: float = 1.0) -> Curve:
        """A figure of `EpochStats` over the run, where it is known."""
        return _curve(label, (getattr(stats, figure) for stats in self._history()), scale)

    def parts_of_loss(self) -> list[Curve]:
        """The parts of the loss over the run, by their names."""
        names = dict.fromkeys(name for stats in self._history() for name in stats.parts)
        curves = [_curve(name, (stats.parts.get(name) for stats in self._history())) for name in names]
        return [curve for curve in curves if curve.values]

    def points(self) -> list[Point]:
        """Accuracy against size: the run's epochs, what others report, its other files, and the file itself last."""
        return [*self._epoch_points(), *self._quoted_points(), *self._other_points(), *self._file_points()]

    def _history(self) -> Sequence[EpochStats]:
        return self.run.history if self.run else ()

    def _epoch_points(self) -> Iterator[Point]:
        for stats in self._history():
            if stats.bytes and stats.accuracy is not None:
                label = f"{stats.phase}, epoch {stats.epoch} of {stats.epochs}"
                yield Point(label, stats.bytes, 100 * stats.accuracy, "epoch", "validation")

    def _quoted_points(self) -> Iterator[Point]:
        for row in self.quoted:
            size = row.size(self.description.original_parameters)
            yield Point(f"{row.method} ({row.reference})", size, 100 - row.error, "quoted", "test")

    def _other_points(self) -> Iterator[Point]:
        for other in self.run.others if self.run else ():
            if other.accuracy is not None:
                yield Point(f"rate {other.rate:g}", other.bytes, 100 * other.accuracy, "other", other.measured)

    def _file_points(self) -> Iterator[Point]:
        if self.run is not None:
            for accuracy, measured in (
                (self.run.validation_accuracy, "validation"),
                (self.run.test_accuracy, "test"),
            ):
                if accuracy is not None:
                    yield Point("this file", self.description.bytes, 100 * accuracy, "file", measured)


def gather(
    file: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    limits: codec.Limits | None = None,
) -> Contents:
    """Read a file, and the folder of the run that made it.

    Args:
        limits: what the file may ask for; see `codec.Limits`.

    Raises:
        FormatError: the file is damaged or not a `.bayz` file.
        DataError: the folder holds no record, or that of another file.
    """
    budget = codec.Budget(limits)
    blob = codec.read(file, budget)
    model, description = codec.inspect(blob, budget)
    check_sound(model, budget)
    run = None if folder is None else _run_of(file, blob, Path(folder))
    network, shapes = _known_network(description)
    if run is not None and run.snapshots.shapes:
        shapes = dict(run.snapshots.shapes)
    elif any(is_index(name) for name in model.tensors):
        shapes = {name: tuple(len(mask) for mask in masks) for name, masks in surviving(model).items()}
    return Contents(
        name=Path(file).name,
        digest=hashlib.sha256(blob).hexdigest(),
        description=description,
        model=model,
        network=network,
        layers=tuple(_layers(description, model, shapes)),
        values=_values(model),
        picture=first_layer(model),
        run=run,
        quoted=_quoted(network, run),
    )


def _quoted(network: str | None, run: Run | None) -> tuple[Quoted, ...]:
    """What others report for the network; nothing beside a run on other data than theirs."""
    if run is not None and run.says_data and not is_quoted_on(network, run.data):
        return ()
    return quoted_for(network)


def _run_of(file: str | os.PathLike[str], blob: bytes, folder: Path) -> Run:
    run = read_run(folder)
    own = folder / "net.bayz"
    if run.bytes != len(blob) or (own.is_file() and own.read_bytes() != blob):
        raise DataError(
            f"the run in {folder} made another file ({run.bytes:,} bytes) than {file} ({len(blob):,} bytes); "
            "give the file's own run, or leave --run out"
        )
    return run


def _known_network(description: Description) -> tuple[str | None, dict[str, tuple[int, ...]]]:
    """The built-in network that the file came from, by its number of parameters and its tensors' names."""
    names = {tensor.name for tensor in description.tensors if not is_index(tensor.name)}
    for network, build in models.BUILT_IN.items():
        module = build()
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        if parameter_count(module) == description.original_parameters and names and names <= set(shapes):
            return network, shapes
    return None, {}


def _layers(description: Description, model: CompressedModel, shapes: dict[str, tuple[int, ...]]) -> Iterator[Layer]:
    outputs, untrained = _output_dims(model), beside_parameters(model)
    for tensor in description.tensors:
        if is_index(tensor.name):
            continue
        before = shapes.get(tensor.name)
        if before is not None and len(before) != len(tensor.shape):
            before = None
        dim = outputs.get(tensor.name, 0)
        has_units = len(tensor.shape) >= 2
        yield Layer(
            tensor,
            before,
            before[dim] if has_units and before is not None else None,
            tensor.shape[dim] if has_units else None,
            tensor.name not in untrained,
        )


def _output_dims(model: CompressedModel) -> dict[str, int]:
    """The dimension of each weight along which a layer's units lie, where that is not the first."""
    nodes = model.graph.nodes if model.graph else ()
    return {
        name: 1
        for node in nodes
        for name in node.tensors[:1]
        if name is not None and (node.op.startswith("conv_transpose") or node.op == "embedding")
    }


def _values(model: CompressedModel) -> Values:
    """Value by value where they are few; else, as with a codebook a tensor, in bins."""
    counts: dict[float, int] = {}
    for name, tensor in model.tensors.items():
        if isinstance(tensor, QuantizedTensor) and not is_index(name):
            times = np.bincount(tensor.symbols.reshape(-1), minlength=len(tensor.codebook))
            for value, count in zip(tensor.codebook.tolist(), times.tolist(), strict=True):
                counts[value] = counts.get(value, 0) + count
    zeros = counts.pop(0.0, 0)
    if 0 < len(counts) <= BINS:
        ordered = sorted(counts.items())
        return Values(tuple(value for value, _ in ordered), tuple(count for _, count in ordered), zeros, 0.0)
    return _binned(model, counts, zeros)


def _binned(model: CompressedModel, counts: dict[float, int], zeros: int) -> Values:
    """Quantized values in even bins; those of raw tensors where nothing is quantized."""
    if counts:
        values, weights = np.array(list(counts)), np.array(list(counts.values()))
    else:
        raw = [tensor for tensor in model.tensors.values() if isinstance(tensor, RawTensor) and "float" in tensor.dtype]
        values = np.concatenate([np.zeros(0), *(values_of(tensor).reshape(-1) for tensor in raw)])
        zeros, values = int(np.count_nonzero(values == 0)), values[values != 0]
        weights = np.ones(len(values), dtype=np.int64)
    reach = float(np.abs(values).max(initial=0.0)) or 1.0
    held, edges = np.histogram(values, BINS, (-reach, reach), weights=weights)
    middles = (edges[1:] + edges[:-1]) / 2
    return Values(tuple(middles.tolist()), tuple(int(count) for count in held), zeros, float(edges[1] - edges[0]))


def _curve(label: str, values: Iterable[float | None], scale: float = 1.0) -> Curve:
    """The values of epochs, counted through all phases, without those that are not known or nothing."""
    points = [(number, scale * value) for number, value in enumerate(values, start=1) if value]
    return Curve(label, tuple(epoch for epoch, _ in points), tuple(value for _, value in points))
