"""`bayeszip pack`."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayeszip.cli.base import JsonOption, check_ending, command
from bayeszip.errors import DataError, RecipeError, printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bayeszip.packing import Point

__all__ = ["pack"]

#: Examples that weights are calibrated on.
CALIBRATION = 1024

_KNOBS = "How far to go (one of these)"


@command
def pack(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A .safetensors file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write the .bayz file.", show_default=False)
    ] = None,
    quality: Annotated[
        float | None,
        typer.Option(
            help="0 to 100; at 95 weights move by 5 % of their size. By default 98.",
            rich_help_panel=_KNOBS,
            show_default=False,
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(help="The best file of at most so many bytes: 20k, 1.5MB.", rich_help_panel=_KNOBS),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="How far a weight may move, as a share of its tensor's largest.",
            rich_help_panel=_KNOBS,
            show_default=False,
        ),
    ] = None,
    components: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=2**16 - 1,
            help="Cluster each tensor to so many shared values besides 0, and keep the rest bit for bit.",
            rich_help_panel=_KNOBS,
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            help="The network that the weights belong to, as MODEL of compress: its graph goes in. That of one of your "
            "own does with --calibrate, which shows its inputs.",
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(help="With --into: choose weights by what they do to training examples of this data."),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Show bytes against quality instead of one file.")] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="With --sweep and --into: accuracy on the validation examples, too.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With --sweep: a picture of it, .svg or .png.")] = None,
    coder: Annotated[str, typer.Option(help="default, context or csr-huffman.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Quantize and code weights as they are, without training.

    **Example**

    `bayeszip pack weights.safetensors -o net.bayz --quality 95`

    `bayeszip pack weights.safetensors --into lenet-5 --calibrate mnist --sweep --data mnist`
    """
    from bayeszip.loaders import read_weights
    from bayeszip.recipe import Coding
    from bayeszip.targets import parse_bytes

    knobs: dict[str, Any] = {"quality": quality, "max_error": max_error, "components": components}
    knobs["max_bytes"] = None if max_bytes is None else parse_bytes(max_bytes)
    knobs["coding"] = Coding(coder=coder)
    if into is None and (calibrate or data):
        raise RecipeError("--calibrate and --data need the network: name it with --into")
    if not sweep and (output is None or plot is not None or data is not None):
        raise RecipeError("name the file to write with -o; --plot and --data go with --sweep")
    if sweep and (
        output is not None or any(value is not None for value in (quality, max_bytes, max_error, components))
    ):
        raise RecipeError("--sweep shows several qualities and writes no file: leave out -o and the knobs")
    _check_places(output, plot)
    model: nn.Module | dict[str, Tensor] = read_weights(weights)
    options: dict[str, Any] = {"example_inputs": None, "calibration": None}
    if into is not None:
        model, options = _network(into, weights, calibrate)
    if sweep:
        _sweep(model, options | {"coding": knobs["coding"]}, data, plot, as_json)
    elif output is not None:
        _pack(model, knobs | options, output, as_json)


def _check_places(output: Path | None, plot: Path | None) -> None:
    """What can't be written after the work is refused before it."""
    from bayeszip.files import check_writable

    if output is not None:
        check_ending(output, "a packed network", ".bayz")
        check_writable(output)
    if plot is not None:
        from bayeszip.report.plots import check_plots

        check_ending(plot, "a plot", ".svg", ".png")
        check_writable(plot)
        check_plots()


def _pack(model: Any, options: dict[str, Any], output: Path, as_json: bool) -> None:
    from bayeszip import packing
    from bayeszip.summary import description_dict

    result = packing.pack(model, **options)
    result.save(output)
    if as_json:
        typer.echo(json.dumps(description_dict(result.description)))
    else:
        typer.echo(result.report())
        typer.echo(f"written to {printable(str(output))}")


def _network(into: str, weights: Path, calibrate: str | None) -> tuple["nn.Module", dict[str, Any]]:
    """The network with its weights, and what `pack` is to know besides: an example input, and calibration data."""
    import torch

    from bayeszip import models
    from bayeszip.fitting.batches import checked_batch, in_order, mapped, rows_of
    from bayeszip.loaders import load_data, load_weights

    network = models.build(into)
    load_weights(network, weights)
    batches, seen = [], 0
    for batch in load_data(calibrate, batch_size=128, seed=0, device=torch.device("cpu")).train if calibrate else ():
        batches.append(checked_batch(batch))
        seen += rows_of(batches[-1].targets)
        if seen >= CALIBRATION:
            break
    example: Any = None
    if batches:
        example = in_order(network, mapped(batches[0].inputs, lambda tensor: tensor[:1]))
    elif isinstance(shape := getattr(network, "input_shape", None), tuple):
        example = (torch.zeros(1, *shape),)
    return network, {"example_inputs": example, "calibration": batches or None}


def _accuracy(model: "nn.Module", data: str) -> "Callable[[nn.Module], float] | None":
    """That of a file's network on the validation examples of this data; None: it has none."""
    import torch

    from bayeszip.fitting import Judge
    from bayeszip.fitting.batches import ByPlace, named_arguments
    from bayeszip.loaders import load_data

    validation = load_data(data, batch_size=128, seed=0, device=torch.device("cpu")).validation
    if validation is None:
        return None
    names = named_arguments(model)

    def accuracy(network: "nn.Module") -> float:
        found = Judge(None)(ByPlace(network, names), validation).accuracy
        if found is None:
            raise DataError(
                f"--data is for accuracy, but the targets of {data} are no classes: leave it out, and see by how much "
                "weights move instead"
            )
        return found

    return accuracy


def _sweep(model: Any, options: dict[str, Any], data: str | None, plot: Path | None, as_json: bool) -> None:
    from bayeszip import packing
    from bayeszip.summary import as_text, curve_table

    accuracy = None if data is None else _accuracy(model, data)
    points = packing.curve(model, accuracy=accuracy, **options)
    if plot is not None:
        _plot(points, plot)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(point) for point in points]))
    else:
        typer.echo(as_text(curve_table([dataclasses.asdict(point) for point in points])))


def _plot(points: "list[Point]", path: Path) -> None:
    from bayeszip.report.plots import write_curve

    measured = [point.accuracy for point in points if point.accuracy is not None]
    write_curve(
        path,
        [point.bytes for point in points],
        [100 * point.moved for point in points],
        [100 * share for share in measured] or None,
    )
