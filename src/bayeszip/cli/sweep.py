"""`bayeszip sweep`."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from bayeszip.cli.base import (
    DataOption,
    DeviceOption,
    JobsOption,
    JsonOption,
    ModelArgument,
    PretrainOption,
    RecipeOption,
    SeedOption,
    SettingsOption,
    WeightsOption,
    command,
    table_console,
)
from bayeszip.errors import RecipeError, TrainingError, printable

if TYPE_CHECKING:
    from torch import nn

    from bayeszip.loaders import Loaders
    from bayeszip.recipe import Recipe
    from bayeszip.sweep import Outcome, Plan, SharedStudy

__all__ = ["sweep"]

#: What Ctrl-C leaves.
_STOPPED = "stopped; trials that are complete stay, and the same command goes on"


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
        int, typer.Option("--trials", metavar="N", min=1, help="How many the study is to have, whoever runs them.")
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
            metavar="SHARE",
            min=0,
            help="End a trial that is worse than a finished one was at the same point by this share of its error and "
            "of its bytes; 0: never.",
        ),
    ] = 0.25,
    jobs: JobsOption = 1,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compress a network that tells classes many times under varied settings, and keep the front of error and bytes.

    Run the same command again to go on after an interruption, with more --trials to add some, or on further machines at
    the same time to share the work; --jobs runs several trials at a time here. The front is one on validation data; the
    test set stays sealed, and `bayeszip evaluate` says what a file that was chosen comes to on it.

    **Example**

    `bayeszip sweep lenet-300-100 --recipe quick --vary all.tau1=0.3:5:log --vary mixture.components=9,17,33 -o sweep`
    """
    from bayeszip import models
    from bayeszip.devices import local_rank, resolve_device
    from bayeszip.files import create_folder
    from bayeszip.loaders import check_batch_size
    from bayeszip.processes import untouched_device
    from bayeszip.recipe import recipe as named_recipe
    from bayeszip.sweep import Plan, check_classes, check_optuna, check_success, front_of, parse_dimensions, write_front

    if local_rank() is not None:
        raise RecipeError("a trial runs in one process; start `bayeszip sweep` once for each GPU, without a launcher")
    chosen = named_recipe(recipe).override(*(settings or ()))
    dimensions = parse_dimensions(vary, chosen)
    check_batch_size(data, (*(settings or ()), *vary))
    if pretrain is None:
        pretrain = model in models.BUILT_IN and weights is None
    device = untouched_device(device) if jobs > 1 else str(resolve_device(device))
    prepare = _Preparation(model, weights, data, seed, device)
    # What can't be had, or measured, is told here, once, and not by every trial.
    check_classes(*replace(prepare, device="cpu")(chosen))
    check_optuna()
    create_folder(folder)
    plan = Plan(chosen, dimensions, prepare, pretrain, seed, device, margin)
    facts = {"model": model, "data": data, "weights": None if weights is None else str(weights), **plan.facts()}
    share = _Share(plan, storage or f"journal:{folder / 'study.journal'}", facts, trials, folder, alone=jobs == 1)
    study = share.open()
    console = Console(stderr=True)
    if jobs == 1:
        _work_alone(share, study)
    else:
        _work_side_by_side(share, jobs, console)
    check_success(study)
    front = front_of(study)
    for line in write_front(front, folder):
        console.print(printable(line), highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps(front.to_dict()))
    else:
        table_console().print(front.table())
        typer.echo(
            f"{front.complete} trials complete, {front.pruned} pruned, {front.failed} failed; "
            f"the front's files are in {printable(str(folder / 'front'))}"
        )


@dataclass(frozen=True)
class _Preparation:
    """How to make the network and the loaders for a trial."""

    model: str
    weights: Path | None
    data: str
    seed: int
    device: str

    def __call__(self, recipe: "Recipe") -> "tuple[nn.Module, Loaders]":
        from bayeszip import models
        from bayeszip.devices import resolve_device
        from bayeszip.loaders import load_data, load_weights

        network = models.build_seeded(self.model, self.seed)
        if self.weights is not None:
            load_weights(network, self.weights)
        device = resolve_device(self.device)
        return network, load_data(self.data, batch_size=recipe.batch_size, seed=self.seed, device=device)


@dataclass(frozen=True)
class _Share:
    """What a process needs to take part in the study."""

    plan: "Plan"
    storage: str
    facts: dict[str, Any]
    trials: int
    folder: Path
    alone: bool

    def open(self) -> "SharedStudy":
        from bayeszip.sweep import grid_of, open_study

        grid = grid_of(self.plan.dimensions)
        return open_study(self.storage, self.facts, trials=self.trials, seed=self.plan.seed, grid=grid)

    def work(self, study: "SharedStudy") -> None:
        from bayeszip.sweep import work

        console = Console(stderr=True)
        # Where there is no terminal, or others write to it too, a line a trial says enough.
        show = console.is_terminal and self.alone
        work(self.plan, study, self.folder, lambda outcome: _tell(console, outcome, study.wanted), show=show)


def _work_alone(share: _Share, study: "SharedStudy") -> None:
    try:
        share.work(study)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_STOPPED) from None


def _take_part(share: _Share) -> None:
    share.work(share.open())


def _work_side_by_side(share: _Share, jobs: int, console: Console) -> None:
    from bayeszip.processes import side_by_side

    def say(message: str) -> None:
        console.print(message, highlight=False, markup=False)

    with side_by_side(_take_part, jobs, share.plan.device, _STOPPED, say) as workers:
        faults = [outcome.error for outcome in workers.outcomes([share] * jobs) if outcome.error is not None]
    if faults:
        raise TrainingError(faults[0])


def _tell(console: Console, outcome: "Outcome", trials: int) -> None:
    figures = "" if outcome.bytes is None else f", error {100 * (outcome.error or 0):.2f} %, {outcome.bytes:,} bytes"
    settings = " ".join(f"{field}={value}" for field, value in outcome.settings.items())
    why = f": {outcome.why}" if outcome.why else ""
    line = f"trial {outcome.number} ({trials} wanted) {outcome.state}{figures}  {settings}{why}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
