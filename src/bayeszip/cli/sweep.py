"""`bayeszip sweep`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bayeszip.cli.base import (
    DataOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    PretrainOption,
    RecipeOption,
    SeedOption,
    SettingsOption,
    WeightsOption,
    command,
)
from bayeszip.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from bayeszip.loaders import Loaders
    from bayeszip.recipe import Recipe
    from bayeszip.sweep import Outcome

    Preparation = Callable[[Recipe], tuple[nn.Module, Loaders]]

__all__ = ["sweep"]


@command
def sweep(
    model: ModelArgument,
    folder: Annotated[
        Path,
        typer.Option("-o", "--output", help="A folder for the trials, the front and its plot.", show_default=False),
    ],
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="FIELD=…",
            help="A setting and what to try: LOW:HIGH, LOW:HIGH:log, or A,B,C; may be repeated.",
            show_default=False,
        ),
    ],
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="How many the study is to have, whoever runs them.")
    ] = 20,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            help="Where workers meet: journal:FILE or a database such as sqlite:///FILE. "
            "By default a journal in the folder.",
            show_default=False,
        ),
    ] = None,
    data: DataOption = "mnist",
    recipe: RecipeOption = "quick",
    weights: WeightsOption = None,
    pretrain: PretrainOption = None,
    settings: SettingsOption = None,
    margin: Annotated[
        float,
        typer.Option(
            "--prune-margin",
            min=0,
            help="End a trial that is worse than a finished one was at the same point by this share of its error and "
            "of its bytes; 0: never.",
        ),
    ] = 0.25,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compress a network many times under varied settings, and keep the front of error and bytes.

    Run the same command again to go on after an interruption, with more --trials to add some, or on further machines at
    the same time to share the work.

    **Example**

    `bayeszip sweep lenet-300-100 --recipe quick --vary all.tau1=0.3:5:log --vary mixture.components=9,17,33 -o sweep`
    """
    from bayeszip import models
    from bayeszip.devices import local_rank
    from bayeszip.files import create_folder
    from bayeszip.recipe import recipe as named_recipe
    from bayeszip.sweep import Plan, front_of, grid_of, open_study, parse_dimensions, work, write_front

    if local_rank() is not None:
        raise RecipeError("a trial runs in one process; start `bayeszip sweep` once for each GPU, without a launcher")
    chosen = named_recipe(recipe).override(*(settings or ()))
    dimensions = parse_dimensions(vary, chosen)
    if pretrain is None:
        pretrain = model in models.BUILT_IN and weights is None
    create_folder(folder)
    plan = Plan(chosen, dimensions, _preparation(model, weights, data, seed, device), pretrain, seed, device, margin)
    facts = {"model": model, "data": data, "weights": None if weights is None else str(weights), **plan.facts()}
    place = storage or f"journal:{folder / 'study.journal'}"
    study = open_study(place, facts, trials=trials, seed=seed, grid=grid_of(dimensions))
    console = Console(stderr=True)
    # Where there is no terminal, a line a trial says enough.
    work(plan, study, folder, lambda outcome: _tell(console, outcome, study.wanted), show=console.is_terminal)
    front = front_of(study)
    for line in write_front(front, folder):
        console.print(line, highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps(front.to_dict()))
    else:
        Console().print(front.table())
        typer.echo(
            f"{front.complete} trials complete, {front.pruned} pruned, {front.failed} failed; "
            f"the front's files are in {folder / 'front'}"
        )


def _preparation(model: str, weights: Path | None, data: str, seed: int, device: str) -> "Preparation":
    """How to make the network and the loaders for a trial."""
    from bayeszip import models
    from bayeszip.devices import resolve_device
    from bayeszip.loaders import load_data, load_weights

    target = resolve_device(device)

    def prepare(recipe: "Recipe") -> "tuple[nn.Module, Loaders]":
        network = models.build_seeded(model, seed)
        if weights is not None:
            load_weights(network, weights)
        return network, load_data(data, batch_size=recipe.batch_size, seed=seed, device=target)

    return prepare


def _tell(console: Console, outcome: "Outcome", trials: int) -> None:
    figures = "" if outcome.bytes is None else f", error {100 * (outcome.error or 0):.2f} %, {outcome.bytes:,} bytes"
    settings = " ".join(f"{field}={value}" for field, value in outcome.settings.items())
    why = f": {outcome.why}" if outcome.why else ""
    line = f"trial {outcome.number} ({trials} wanted) {outcome.state}{figures}  {settings}{why}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
