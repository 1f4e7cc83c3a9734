"""`bayeszip recipes`."""

from typing import Annotated

import typer

from bayeszip.cli.base import command
from bayeszip.errors import RecipeError

__all__ = ["recipes"]


@command
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

    if name is not None and settings:
        raise RecipeError(f"--settings explains the settings of all recipes; give it without {name}")
    if name is not None:
        typer.echo(named_recipe(name).to_json(), nl=False)
    elif settings:
        typer.echo(as_text(facts_table(settings_help())))
    else:
        typer.echo(as_text(facts_table((name, recipe.summary()) for name, recipe in RECIPES.items())))
