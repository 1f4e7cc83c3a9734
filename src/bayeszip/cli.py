"""The command line. Exit status 0: done, 1: failed, 2: misused; no traceback for what a user can mend."""

import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from bayeszip import __version__
from bayeszip.errors import BayeszipError, RecipeError
from bayeszip.files import read_file

__all__ = ["app", "main"]

# Modules that import torch, which takes seconds, are imported by the commands that need them.

app = typer.Typer(
    name="bayeszip",
    help="Make trained PyTorch networks tiny, and get them back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

#: Exit status after Ctrl-C, as shells expect it.
INTERRUPTED = 128 + signal.SIGINT

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A .bayz file.", show_default=False)]
DataOption = Annotated[
    str, typer.Option("--data", help="mnist, idx:FOLDER (four IDX files), or module:function that returns loaders.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]


def main() -> None:
    """Entry point."""
    app()


Command = TypeVar("Command", bound=Callable[..., None])


def _command(function: Command) -> Command:
    """Make a command of `function`: what goes wrong in it becomes a line on standard error and an exit status."""

    @functools.wraps(function)
    def guarded(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except BayeszipError as error:
            _fail(str(error), 2 if isinstance(error, RecipeError) else 1)
        except KeyboardInterrupt:
            _fail("interrupted; nothing was written", INTERRUPTED)

    app.command()(guarded)
    return function


def _fail(message: str, status: int) -> NoReturn:
    Console(stderr=True).print(f"[bold red]bayeszip:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(status)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"bayeszip {__version__}")
        raise typer.Exit


@_command
def compress(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="lenet-300-100, lenet-5, or module:factory.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the file.", show_default=False)],
    data: DataOption = "mnist",
    recipe: Annotated[
        str, typer.Option("--recipe", help="A name (`bayeszip recipes` lists them) or a JSON file.")
    ] = "vd+sws",
    weights: Annotated[
        Path | None, typer.Option("--weights", help="Pretrained weights of MODEL, a .safetensors file.")
    ] = None,
    pretrain: Annotated[
        bool | None,
        typer.Option(
            help="Train MODEL first. By default built-in networks are, unless --weights are given.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a setting of the recipe; may be repeated."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="A folder that receives the recipe, the training history and the report."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of all random numbers.")] = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Retrain a network to be small, and write it to a file.

    **Examples**

    `bayeszip compress lenet-300-100 --recipe quick -o net.bayz`

    `bayeszip compress nets:resnet --weights w.safetensors --data mydata:loaders -o net.bayz --set epochs_scale=0.1`
    """
    from bayeszip import models, pipeline
    from bayeszip.files import check_writable
    from bayeszip.loaders import load_data, load_weights
    from bayeszip.recipe import recipe as named_recipe
    from bayeszip.record import create_folder, file_figures, write_record

    chosen = named_recipe(recipe).override(*(settings or ()))
    check_writable(output)
    if run is not None:
        create_folder(run)
    target = pipeline.resolve_device(device)
    network = pipeline.build_seeded(model, seed)
    if weights is not None:
        load_weights(network, weights)
    loaders = load_data(data, batch_size=chosen.batch_size, seed=seed, device=target)
    result = pipeline.compress(
        network,
        loaders.train,
        val_loader=loaders.validation,
        recipe=chosen,
        seed=seed,
        device=target,
        pretrain=(model in models.BUILT_IN and weights is None) if pretrain is None else pretrain,
    )
    figures = file_figures(result.network(), result.blob, loaders.test)
    result.save(output)
    if run is not None:
        write_record(run, result, figures)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        typer.echo(result.report())
        typer.echo(f"test accuracy {100 * figures['accuracy']:.2f} %, written to {output}")


@_command
def evaluate(
    file: FileArgument,
    data: DataOption = "mnist",
    into: Annotated[
        str | None,
        typer.Option("--into", help="The network's class (as MODEL of compress), for a file without a graph."),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Decode a file and measure the accuracy of what it holds on the test set.

    **Example**

    `bayeszip evaluate net.bayz --data mnist --json`
    """
    from bayeszip import models, pipeline
    from bayeszip.loaders import load_data
    from bayeszip.record import file_figures

    target = pipeline.resolve_device(device)
    network = pipeline.load(file, into=models.build(into) if into else None, map_location=target)
    loaders = load_data(data, batch_size=1000, seed=0, device=target)
    figures = file_figures(network, read_file(file), loaders.test)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        typer.echo(
            f"accuracy {100 * figures['accuracy']:.2f} %, {figures['bytes']:,} bytes, "
            f"{figures['ratio']:.1f} times smaller than {figures['params']:,} parameters in float32"
        )


@_command
def info(file: FileArgument, as_json: JsonOption = False) -> None:
    """Show what a file holds, and what takes how many bytes. Needs no torch.

    **Example**

    `bayeszip info net.bayz`
    """
    from bayeszip import codec
    from bayeszip.summary import as_text, description_dict, facts_table, tensors_table

    description = codec.describe(read_file(file))
    if as_json:
        typer.echo(json.dumps(description_dict(description)))
        return
    ratio = 4 * description.original_parameters / description.bytes
    facts = [
        ("file", f"{file}, format version {description.version}, coder {description.coder}"),
        ("size", f"{description.bytes:,} bytes, {ratio:.1f} times smaller"),
        ("parameters before", f"{description.original_parameters:,}"),
    ]
    typer.echo(as_text(facts_table(facts), tensors_table(description)))


@_command
def pack(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A .safetensors file.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the file.", show_default=False)],
    components: Annotated[int, typer.Option(min=1, max=2**16 - 1, help="Shared values of a tensor, besides 0.")] = 64,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Instead: how far a weight may move, as a share of its tensor's largest.", show_default=False
        ),
    ] = None,
    coder: Annotated[str, typer.Option(help="default, context or csr-huffman.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Cluster and code weights as they are: no data, no training, no network.

    **Example**

    `bayeszip pack weights.safetensors -o net.bayz --components 32`
    """
    from bayeszip import codec, pipeline
    from bayeszip.files import check_writable
    from bayeszip.loaders import read_weights
    from bayeszip.recipe import Coding
    from bayeszip.summary import description_dict

    check_writable(output)
    result = pipeline.pack(
        read_weights(weights), components=components, max_error=max_error, coding=Coding(coder=coder)
    )
    result.save(output)
    if as_json:
        typer.echo(json.dumps(description_dict(codec.describe(result.blob))))
    else:
        typer.echo(result.report())
        typer.echo(f"written to {output}")


@_command
def verify(
    file: FileArgument,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="A network (as MODEL of compress) that should compute the same.", show_default=False
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option("--weights", help="Its weights, a .safetensors file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a file is sound, and what it computes against another network if one is given.

    **Example**

    `bayeszip verify net.bayz`
    """
    from bayeszip import models, pipeline
    from bayeszip.loaders import load_weights

    if weights is not None and against is None:
        raise typer.BadParameter("say with --against what they are the weights of", param_hint="--weights")
    network = None if against is None else models.build(against)
    if network is not None and weights is not None:
        load_weights(network, weights)
    difference = pipeline.verify(file, against=network)
    if as_json:
        typer.echo(json.dumps({"sound": True, "difference": difference}))
        return
    compared = (
        "" if difference is None else f"; computes the same as {against}, to {difference:.1e} of the largest output"
    )
    typer.echo(f"{file} is sound: it decodes, and encodes to the same bytes{compared}")


@_command
def export(
    file: FileArgument,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A path ending in .onnx or .safetensors.", show_default=False)
    ],
    dense: Annotated[bool, typer.Option("--dense", help="safetensors: original shapes, zeros put back.")] = False,
) -> None:
    """Write the network in a file in another format.

    **Example**

    `bayeszip export net.bayz net.onnx`
    """
    from bayeszip import pipeline
    from bayeszip.files import check_writable

    check_writable(target)
    pipeline.export(file, target, dense=dense)
    typer.echo(f"written to {target}: {target.stat().st_size:,} bytes")


@_command
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe as JSON.", show_default=False)] = None,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting with what it means.")] = False,
) -> None:
    """List the recipes, print one as JSON, or explain the settings.

    **Example**

    `bayeszip recipes quick > mine.json`, edit, then `bayeszip compress … --recipe mine.json`
    """
    from bayeszip.recipe import RECIPES, settings_help
    from bayeszip.recipe import recipe as named_recipe
    from bayeszip.summary import as_text, facts_table

    if name is not None:
        typer.echo(named_recipe(name).to_json(), nl=False)
    elif settings:
        typer.echo(as_text(facts_table(settings_help())))
    else:
        typer.echo(as_text(facts_table((name, recipe.summary()) for name, recipe in RECIPES.items())))
