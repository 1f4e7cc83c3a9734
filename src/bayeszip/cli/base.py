"""What all commands share: the application, its options, and how a function becomes one."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from bayeszip import __version__
from bayeszip.cli.guard import guarded
from bayeszip.errors import OutputUsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "DataOption",
    "DeviceOption",
    "FileArgument",
    "JobsOption",
    "JsonOption",
    "LossOption",
    "MetricOption",
    "ModelArgument",
    "PretrainOption",
    "RecipeOption",
    "SeedOption",
    "SettingsOption",
    "WeightsOption",
    "app",
    "check_ending",
    "command",
    "table_console",
]

app = typer.Typer(
    name="bayeszip",
    help="Make trained PyTorch networks tiny, and get them back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A .bayz file.", show_default=False)]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="lenet-300-100, lenet-5, resnet-8, resnet-20, resnet-20-4, vgg-16, or module:factory.",
        show_default=False,
    ),
]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="mnist, cifar10, cifar10:FOLDER, idx:FOLDER (IDX files), or module:function that returns loaders.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="LOSS",
        help="mse, mae, bce, cross-entropy (the default), or module:function of outputs and targets.",
        show_default=False,
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="METRIC",
        help="A further figure: a loss by name, or module:function of outputs and targets; `,lower` behind it says "
        "that lower is better.",
    ),
]
JobsOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="How many runs to train at a time, each in its own process.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
RecipeOption = Annotated[str, typer.Option("--recipe", help="A name (`bayeszip recipes` lists them) or a JSON file.")]
WeightsOption = Annotated[
    Path | None, typer.Option("--weights", help="Pretrained weights of MODEL, a .safetensors file.")
]
PretrainOption = Annotated[
    bool | None,
    typer.Option(
        help="Train MODEL first. By default built-in networks are, unless --weights are given.", show_default=False
    ),
]


def _checked_seed(seed: int) -> int:
    # Not as a range of the option: help would print it.
    if not 0 <= seed < 2**63:
        raise typer.BadParameter(f"a seed lies between 0 and {2**63 - 1}; {seed} does not")
    return seed


SeedOption = Annotated[int, typer.Option("--seed", metavar="N", callback=_checked_seed, help="Of all random numbers.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SETTING", help="Change a setting of the recipe: FIELD=VALUE; may be repeated."),
]

Command = TypeVar("Command", bound=Callable[..., None])


class _PlainFlags:
    """A command, or all of them, in whose help a flag is its name alone: the type that typer adds says nothing."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class _Command(_PlainFlags, TyperCommand):
    pass


class _Group(_PlainFlags, TyperGroup):
    pass


def command(function: Command) -> Command:
    """Make a command of `function`: what goes wrong in it becomes a line on standard error and an exit status."""
    app.command(cls=_Command)(guarded(function))
    return function


def check_ending(path: Path, what: str, *endings: str) -> None:
    """Refuse to write `what` to a file of another ending: to be asked before any work.

    Raises:
        OutputUsageError: names the endings.
    """
    if path.suffix not in endings:
        raise OutputUsageError(f"{what} is written to {' or '.join(endings)}, not {str(path)!r}")


def table_console() -> "Console":
    """Standard output, for tables: where it is no terminal, no column is cut."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=240)


@app.callback(cls=_Group, invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"bayeszip {__version__}")
        raise typer.Exit
