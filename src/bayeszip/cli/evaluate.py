"""`bayeszip evaluate`."""

import json
from typing import Annotated

import typer

from bayeszip.cli.base import DataOption, DeviceOption, FileArgument, JsonOption, LossOption, MetricOption, command
from bayeszip.errors import printable

__all__ = ["evaluate"]


@command
def evaluate(
    file: FileArgument,
    data: DataOption = "mnist",
    loss: LossOption = None,
    metric: MetricOption = None,
    into: Annotated[
        str | None,
        typer.Option("--into", help="The network's class (as MODEL of compress), for a file without a graph."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Compute in float32, float64, float16 or bfloat16; by default as the network did.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Decode a file and measure what it holds on the test set: its accuracy, or with --loss and --metric other figures.

    Where a function gives two loaders, without a third for the test, it is measured on the second, and told so.

    **Example**

    `bayeszip evaluate net.bayz --data mnist --json`
    """
    from bayeszip import codec, loading, models
    from bayeszip.devices import resolve_device
    from bayeszip.fitting import Judge
    from bayeszip.graph.indices import beside_parameters
    from bayeszip.loaders import load_test, named_loss, named_metric
    from bayeszip.record import file_figures, for_json, size_figures

    target = resolve_device(device)
    budget = codec.Budget.of(None)
    # Read once: what comes through a pipe is gone then.
    model, description = codec.inspect(codec.read(file, budget), budget)
    beside = models.build(into) if into else None
    network = loading.network_in(model, file, into=beside, dtype=dtype, map_location=target, limits=budget)
    judge = None
    if loss is not None or metric is not None:
        # A loss that nobody asked for may be none of the file's: a cross-entropy of numbers, say.
        judge = Judge(None if loss is None else named_loss(loss), None if metric is None else named_metric(metric))
    if into is None and model.graph is not None and len(model.graph.outputs) > 1:
        said = f"{file} has {len(model.graph.outputs)} outputs without names, of which the first is judged"
        typer.echo(printable(f"{said}; --into knows which is meant"), err=True)
    sizes = size_figures(description, beside_parameters(model))
    reported = load_test(data, device=target)
    figures = file_figures(network, sizes, reported.loader, judge, reported.kind)
    if as_json:
        typer.echo(json.dumps(for_json(figures)))
    else:
        quality = [] if figures["accuracy"] is None else [f"accuracy {100 * figures['accuracy']:.2f} %"]
        measured = ("loss", judge.metric.name if judge and judge.metric else "loss")
        quality += [f"{name} {figures[name]:.4g}" for name in dict.fromkeys(measured) if figures.get(name) is not None]
        where = "" if reported.kind == "test" else f"{reported.kind} "
        typer.echo(
            f"{where}{', '.join(quality)}, {figures['bytes']:,} bytes, "
            f"{figures['ratio']:.1f} times smaller than {figures['params']:,} parameters in float32"
        )
