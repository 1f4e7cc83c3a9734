"""`bayeszip compress`."""

import contextlib
import enum
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayeszip.cli.base import (
    DataOption,
    DeviceOption,
    JsonOption,
    LossOption,
    MetricOption,
    ModelArgument,
    PretrainOption,
    RecipeOption,
    SeedOption,
    SettingsOption,
    WeightsOption,
    check_ending,
    command,
)
from bayeszip.errors import RecipeError, TargetError, printable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bayeszip.fitting import Judge, Watcher
    from bayeszip.fitting.keeper import Checkpointing
    from bayeszip.loaders import Loaders, Reported
    from bayeszip.progress import Watchers
    from bayeszip.recipe import Recipe
    from bayeszip.result import Result

__all__ = ["compress"]


#: Panels of the help: the columns of each are as wide as its own options need.
_HOW_SMALL, _WHICH, _TRAINING, _RUN = "How small (one of these)", "Which weights", "Training", "The folder of the run"


class Log(enum.StrEnum):
    """What else can show the training."""

    tensorboard = enum.auto()


@command
def compress(
    model: ModelArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write the .bayz file.", show_default=False)
    ] = None,
    data: DataOption = "mnist",
    recipe: RecipeOption = "vd+sws",
    weights: WeightsOption = None,
    pretrain: PretrainOption = None,
    settings: SettingsOption = None,
    loss: LossOption = None,
    metric: MetricOption = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="The file has at most so many bytes: 3500, 20k, 1.5MB.", rich_help_panel=_HOW_SMALL
        ),
    ] = None,
    min_ratio: Annotated[
        float | None,
        typer.Option(metavar="RATIO", help="Or it is at least so many times smaller.", rich_help_panel=_HOW_SMALL),
    ] = None,
    max_accuracy_drop: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS",
            help="Or it loses at most so many points of accuracy on the validation data.",
            rich_help_panel=_HOW_SMALL,
        ),
    ] = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Or its loss there grows by at most this share: 0.1 is a tenth.",
            rich_help_panel=_HOW_SMALL,
        ),
    ] = None,
    max_metric_drop: Annotated[
        float | None,
        typer.Option(
            metavar="AMOUNT", help="Or its metric there worsens by at most so much.", rich_help_panel=_HOW_SMALL
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,…",
            rich_help_panel=_HOW_SMALL,
            help="Or from the same training a further file for each of these weights of a bit, such as 0.5,1,2,4: the "
            "more, the smaller and the less accurate. They are called NAME-rate=2.bayz.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            rich_help_panel=_RUN,
            help="A folder that receives the recipe, the training history, snapshots of the weights and the report, "
            "and the checkpoints, of which the last stays there.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint in the folder of --run, if there is one.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="INTERVAL",
            help="How often to write one: 5m (the default), 90s, 10epochs, 500steps.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="How many checkpoints to keep; by default 2.", rich_help_panel=_RUN),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Resume although recipe, versions, threads or data have changed.", rich_help_panel=_RUN
        ),
    ] = False,
    log: Annotated[
        Log | None,
        typer.Option("--log", help="Write logs for TensorBoard into the folder of --run.", rich_help_panel=_RUN),
    ] = None,
    mixed_precision: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="bf16 or no. By default as `accelerate launch` says, else no.",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    augment: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Change training images at random, each time anew: shift=2 (pixels), flip (left to right), affine=10 "
            "or affine=10/0.1/0.1 (degrees/scale/shear), cutout=8 (pixels hidden), joined by commas.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="NETWORK",
            help="Learn from this network, where that is a better one: a .bayz file, module:factory, or "
            "MODEL=FILE.safetensors. By default from MODEL as it comes.",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    hold_out: Annotated[
        bool,
        typer.Option(
            "--hold-out/--no-hold-out",
            help="Set a part of the training images aside for validation; or train on all of them, when settings are "
            "chosen.",
            rich_help_panel=_TRAINING,
        ),
    ] = True,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Prune only what this names, such as `encoder.*`; may be repeated.",
            rich_help_panel=_WHICH,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Don't prune what this names; may be repeated.", rich_help_panel=_WHICH),
    ] = None,
    strength: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STRENGTH",
            help="PATTERN=FACTOR: prune what this names so much more strongly; may be repeated.",
            rich_help_panel=_WHICH,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be pruned and what not, the least bytes, and the time."),
    ] = False,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Retrain a network to be small, and write it to a file.

    **Examples**

    `bayeszip compress lenet-300-100 --recipe quick -o net.bayz`

    `bayeszip compress nets:resnet --weights w.safetensors --data mydata:loaders -o net.bayz --set epochs_scale=0.1`

    `bayeszip compress lenet-300-100 --recipe quick --max-bytes 6k -o net.bayz` (or `--max-accuracy-drop 0.3`)

    `bayeszip compress lenet-300-100 --recipe quick --rates 1,2,4 -o net.bayz` (three more files, smaller and smaller)

    `bayeszip compress nets:unet --weights w.safetensors --data mydata:images --loss mse -o net.bayz`

    `bayeszip compress lenet-5 --run runs/lenet-5 --resume -o net.bayz` (again and again, whatever ended it)

    `bayeszip compress resnet-20 --recipe deep --data cifar10 --teacher resnet-20-4=big.safetensors -o net.bayz`

    `bayeszip compress nets:gpt --exclude head --strength "blocks.*=0.5" --dry-run`

    `accelerate launch --multi_gpu -m bayeszip compress lenet-5 -o net.bayz` (on all GPUs of this machine)
    """
    from bayeszip import compressing, models
    from bayeszip.devices import resolve_device
    from bayeszip.fitting.launch import leave
    from bayeszip.loaders import load_data, load_test, named_loss

    chosen = _recipe(recipe, settings or (), data).selecting(include, exclude, _strengths(strength))
    _check_run(run, log, resume=resume, force=force, every=checkpoint_every, keep=keep, dry_run=dry_run)
    further = _rates(rates)
    goal = _goal(
        max_bytes,
        min_ratio=min_ratio,
        max_accuracy_drop=max_accuracy_drop,
        max_loss_increase=max_loss_increase,
        max_metric_drop=max_metric_drop,
    )
    way = _way(chosen, goal, further, metric, augment, mixed_precision, teacher)
    if pretrain is None:
        pretrain = model in models.BUILT_IN and weights is None
    _check_options(chosen, goal, way, hold_out, pretrain)
    checkpoints = _checkpointing(run, checkpoint_every, keep, force)
    target, judged_by = resolve_device(device), named_loss(loss or "cross-entropy")
    _check_places(output, run, further, dry_run)
    network = _network(model, seed, weights)
    loaders = load_data(data, batch_size=chosen.batch_size, seed=seed, device=target, hold_out=hold_out)
    if output is None or dry_run:
        options = {"recipe": chosen, "loss": judged_by, **goal, **way}
        _show_preview(network, loaders, target, pretrain, options, as_json)
        return
    # Now, so that what is wrong with it is known before the training, of which it is no part.
    reported = load_test(data, device=target, beside=loaders)
    asked = {"hold_out": hold_out, "model": model, "data": data}
    with _missed_is_kept(output, run, reported, asked), _watched(chosen, pretrain, goal, further, run, log) as watcher:
        result = compressing.compress(
            network,
            loaders.train,
            val_loader=loaders.validation,
            recipe=chosen,
            seed=seed,
            device=target,
            pretrain=pretrain,
            watcher=watcher,
            loss=judged_by,
            checkpoints=checkpoints,
            resume=resume,
            **goal,
            **way,
        )
    _deliver(result, reported, output, run, asked, as_json)
    leave()


def _recipe(name: str, settings: Sequence[str], data: str) -> "Recipe":
    from bayeszip.loaders import check_batch_size
    from bayeszip.recipe import recipe

    chosen = recipe(name).override(*settings)
    check_batch_size(data, settings)
    return chosen


def _network(model: str, seed: int, weights: Path | None) -> "nn.Module":
    from bayeszip import models
    from bayeszip.loaders import load_weights

    network = models.build_seeded(model, seed)
    if weights is not None:
        load_weights(network, weights)
    return network


def _goal(max_bytes: str | None, **others: float | None) -> dict[str, Any]:
    """The target as `compressing.compress` takes it."""
    from bayeszip.targets import parse_bytes

    return {"max_bytes": None if max_bytes is None else parse_bytes(max_bytes), **others}


def _way(
    recipe: "Recipe",
    goal: dict[str, Any],
    rates: Sequence[float],
    metric: str | None,
    augment: str | None,
    mixed_precision: str | None,
    teacher: str | None,
) -> dict[str, Any]:
    """What else it takes from text; typos, and what contradicts the goal, are refused before any work is done."""
    from bayeszip.ending import at_rates
    from bayeszip.fitting.augmentation import Augmentation
    from bayeszip.fitting.launch import known_precision
    from bayeszip.loaders import load_teacher, named_metric
    from bayeszip.targets import Target

    at_rates(recipe, rates, Target.of(**goal))
    if goal["max_metric_drop"] is not None and metric is None:
        raise RecipeError("--max-metric-drop is about a metric; name it with --metric")
    return {
        "rates": rates,
        "metric": None if metric is None else named_metric(metric),
        "augment": None if augment is None else Augmentation.parse(augment),
        "mixed_precision": known_precision(mixed_precision),
        "teacher": None if teacher is None else load_teacher(teacher),
    }


def _check_options(recipe: "Recipe", goal: dict[str, Any], way: dict[str, Any], hold_out: bool, pretrain: bool) -> None:
    """Refuse what `compressing.compress` would, before data are loaded; in the words of the command line."""
    from bayeszip.opening import check_options, needing_validation
    from bayeszip.targets import Target

    target, metric = Target.of(**goal), way["metric"]
    if (name := needing_validation(recipe, target, metric)) and not hold_out:
        name = name if "." in name else f"--{name.replace('_', '-')}"
        raise RecipeError(f"{name} is measured on validation images; drop it, or --no-hold-out")
    check_options(
        recipe.scaled(), target=target, metric=metric, validated=hold_out, rates=way["rates"], pretrain=pretrain
    )


def _strengths(given: list[str] | None) -> dict[str, float] | None:
    """PATTERN=FACTOR, each."""
    if given is None:
        return None
    strengths = {}
    for text in given:
        pattern, _, factor = text.rpartition("=")
        try:
            number = float(factor)
        except ValueError:
            number = None
        if not pattern or number is None:
            raise RecipeError(f"write strengths as PATTERN=FACTOR, not {text!r}")
        strengths[pattern] = number
    return strengths


def _rates(given: str | None) -> tuple[float, ...]:
    """RATE,RATE,…"""
    try:
        return tuple(float(rate) for rate in given.split(",")) if given else ()
    except ValueError:
        raise RecipeError(f"write rates as numbers with commas between them, such as 0.5,1,2, not {given!r}") from None


def _beside(output: Path, rate: float) -> Path:
    """Where the file of a further rate goes."""
    return output.with_name(f"{output.stem}-rate={rate:g}{output.suffix}")


def _checkpointing(run: Path | None, every: str | None, keep: int | None, force: bool) -> "Checkpointing | None":
    from bayeszip.fitting.keeper import Checkpointing

    return None if run is None else Checkpointing(run / "checkpoints", every or "5m", keep or 2, force)


def _check_run(
    run: Path | None,
    log: Log | None,
    *,
    resume: bool,
    force: bool,
    every: str | None,
    keep: int | None,
    dry_run: bool,
) -> None:
    """Refuse what needs the folder of a run where there is none, or none is filled."""
    given = {"--run": run, "--resume": resume, "--checkpoint-every": every, "--keep": keep, "--force": force}
    if dry_run and (unused := [name for name, value in (given | {"--log": log}).items() if value]):
        raise RecipeError(f"--dry-run trains nothing and writes nothing: leave out {', '.join(unused)}")
    if log is not None and run is None:
        raise RecipeError(f"--log {log} writes into the folder of a run; name one with --run")
    if run is None and any(given.values()):
        raise RecipeError("checkpoints lie in the folder of a run; name it with --run")
    if force and not resume:
        raise RecipeError("--force is about a run that is resumed; add --resume")


def _show_preview(
    network: "nn.Module",
    loaders: "Loaders",
    device: "torch.device",
    pretrain: bool,
    asked: dict[str, Any],
    as_json: bool,
) -> None:
    """What the command would do without --dry-run; of several processes the first tries it."""
    from bayeszip.fitting.launch import is_main_process
    from bayeszip.previewing import preview

    if not is_main_process():
        return
    found = preview(network, loaders.train, val_loader=loaders.validation, device=device, pretrain=pretrain, **asked)
    typer.echo(json.dumps(found.to_dict()) if as_json else found.report(), nl=as_json)


def _check_places(output: Path | None, run: Path | None, rates: Sequence[float], dry_run: bool) -> None:
    """Before the training: what can't be written after it is refused now."""
    from bayeszip.files import check_writable, create_folder
    from bayeszip.fitting.launch import is_main_process

    if output is not None:
        check_ending(output, "a compressed network", ".bayz")
    if dry_run:
        return
    if output is None:
        raise RecipeError("say where to write the file, with -o; or only try, with --dry-run")
    if is_main_process():
        if run is not None:  # the file may be meant for it
            create_folder(run)
        for path in (output, *(_beside(output, rate) for rate in rates)):
            check_writable(path)


def _deliver(
    result: "Result", reported: "Reported", output: Path, run: Path | None, asked: dict[str, Any], as_json: bool
) -> None:
    """Write the file and the record, and say what they are; of several processes the first does.

    Args:
        asked: what the record tells of the command line, as `write_record` takes it.
    """
    from bayeszip.fitting.launch import is_main_process
    from bayeszip.record import for_json

    if not is_main_process():
        return
    places = {output: result, **{_beside(output, each.rate): each for each in result.others}}
    for path, each in places.items():
        each.save(path)
    with _told_if_judging_fails(output):
        figures = _recorded(run, result, reported, asked)
    if as_json:
        told = [{**own, "warnings": list(each.warnings)} for each, own in zip(places.values(), figures, strict=True)]
        others = [
            {"rate": each.rate, "file": os.fspath(_beside(output, each.rate)), **own}
            for each, own in zip(result.others, told[1:], strict=True)
        ]
        typer.echo(json.dumps(for_json({**told[0], **({"others": others} if others else {})})))
        return
    typer.echo(result.report())
    for path, own in zip(places, figures, strict=True):
        accuracy = own["accuracy"]
        said = f"loss {own['loss']:.4g}" if accuracy is None else f"accuracy {100 * accuracy:.2f} %"
        typer.echo(f"{reported.kind} {said}, written to {printable(str(path))}")


def _recorded(run: Path | None, result: "Result", reported: "Reported", asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What the result and its others come to on test data; also in the record, which is there before them.

    Test data can fail like any other, and a training is not to be lost by it.
    """
    from bayeszip.record import file_figures, size_figures, write_record

    every, judge = (result, *result.others), _judge(result)
    sizes = [size_figures(each.description, each.beside) for each in every]
    if run is not None:
        write_record(run, result, *sizes, **asked)
    figures = [
        file_figures(each.network(), own, reported.loader, judge, reported.kind)
        for each, own in zip(every, sizes, strict=True)
    ]
    if run is not None:
        write_record(run, result, *figures, **asked)
    return figures


@contextlib.contextmanager
def _told_if_judging_fails(output: Path) -> Iterator[None]:
    """Say what is there all the same."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        said = "what follows happened when it was judged on the test data or recorded"
        typer.echo(printable(f"{output} is written; {said}"), err=True)
        raise


def _judge(result: "Result") -> "Judge | None":
    return result.fit.judge if result.fit is not None else None


@contextlib.contextmanager
def _missed_is_kept(output: Path, run: Path | None, reported: "Reported", asked: dict[str, Any]) -> Iterator[None]:
    """What was reached instead of a target is worth a training: it stays beside the output, and in the run's folder."""
    from bayeszip.fitting.launch import is_main_process
    from bayeszip.result import Result

    try:
        yield
    except TargetError as error:
        result = error.result
        if not isinstance(result, Result) or not is_main_process():
            raise
        nearest = output.with_name(f"{output.stem}.nearest{output.suffix}")
        result.save(nearest)
        if run is not None:
            with _told_if_judging_fails(nearest):
                _recorded(run, result, reported, asked)
        where = f"{nearest}, and in {run}" if run is not None else nearest
        raise TargetError(f"{error}. What was reached is in {where}", result) from error


@contextlib.contextmanager
def _watched(
    recipe: "Recipe",
    pretrain: bool,
    goal: dict[str, Any],
    rates: Sequence[float],
    run: Path | None,
    log: Log | None,
) -> "Iterator[Watchers]":
    """A progress display, and what the folder of the run is to receive while the training goes on."""
    from bayeszip.compressing import is_open_ended
    from bayeszip.fitting.launch import is_main_process
    from bayeszip.progress import TensorBoardLog, TrainingProgress, Watchers
    from bayeszip.record import RECORD
    from bayeszip.snapshots import SNAPSHOTS, SnapshotRecorder
    from bayeszip.targets import Target

    if not is_main_process():
        yield Watchers()
        return
    recipe = recipe.scaled()
    phases = (*recipe.sequence(pretrain), *(recipe.at_rate(rate).closing for rate in rates))
    with contextlib.ExitStack() as stack:
        watchers: list[Watcher] = []
        if run is not None:
            watchers.append(SnapshotRecorder(run / SNAPSHOTS, outdated=[run / RECORD[0]]))
        if run is not None and log is Log.tensorboard:
            watchers.append(stack.enter_context(contextlib.closing(TensorBoardLog(run / "tensorboard", phases))))
        open_ended = is_open_ended(recipe, Target.of(**goal))
        yield Watchers(stack.enter_context(TrainingProgress(phases, open_ended=open_ended)), *watchers)
