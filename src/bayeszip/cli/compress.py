"""`bayeszip compress`."""

import contextlib
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bayeszip.cli.base import (
    AugmentOption,
    DataOption,
    DeviceOption,
    JsonOption,
    LossOption,
    MetricOption,
    ModelArgument,
    OutputOption,
    PretrainOption,
    RecipeOption,
    SeedOption,
    SettingsOption,
    WeightsOption,
    command,
)
from bayeszip.errors import RecipeError, TargetError

if TYPE_CHECKING:
    from bayeszip.fitting import Judge, Watcher
    from bayeszip.fitting.batches import Loader
    from bayeszip.progress import Watchers
    from bayeszip.recipe import Recipe
    from bayeszip.result import Result

__all__ = ["compress"]


class Log(enum.StrEnum):
    """What else can show the training."""

    tensorboard = enum.auto()


@command
def compress(
    model: ModelArgument,
    output: OutputOption,
    data: DataOption = "mnist",
    recipe: RecipeOption = "vd+sws",
    weights: WeightsOption = None,
    pretrain: PretrainOption = None,
    settings: SettingsOption = None,
    loss: LossOption = None,
    metric: MetricOption = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The file has at most so many bytes: 3500, 20k, 1.5MB.")
    ] = None,
    min_ratio: Annotated[float | None, typer.Option(help="Or it is at least so many times smaller.")] = None,
    max_accuracy_drop: Annotated[
        float | None,
        typer.Option(metavar="POINTS", help="Or it loses at most so many points of accuracy on the validation data."),
    ] = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Or its loss there grows by at most this share: 0.1 is a tenth."),
    ] = None,
    max_metric_drop: Annotated[
        float | None, typer.Option(metavar="AMOUNT", help="Or its metric there worsens by at most so much.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="A folder that receives the recipe, the training history, snapshots of the weights and the report, "
            "and meanwhile the checkpoints.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder of --run, if there is one.")
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(metavar="INTERVAL", help="How often to write one: 5m (the default), 90s, 10epochs, 500steps."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="How many checkpoints to keep; by default 2.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Resume although recipe, versions, threads or data have changed.")
    ] = False,
    log: Annotated[
        Log | None, typer.Option("--log", help="Write logs for TensorBoard into the folder of --run.")
    ] = None,
    mixed_precision: Annotated[
        str | None,
        typer.Option(help="bf16 or no. By default as `accelerate launch` says, else no.", show_default=False),
    ] = None,
    augment: AugmentOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Retrain a network to be small, and write it to a file.

    **Examples**

    `bayeszip compress lenet-300-100 --recipe quick -o net.bayz`

    `bayeszip compress nets:resnet --weights w.safetensors --data mydata:loaders -o net.bayz --set epochs_scale=0.1`

    `bayeszip compress lenet-300-100 --recipe quick --max-bytes 6k -o net.bayz` (or `--max-accuracy-drop 0.3`)

    `bayeszip compress nets:unet --weights w.safetensors --data mydata:images --loss mse -o net.bayz`

    `bayeszip compress lenet-5 --run runs/lenet-5 --resume -o net.bayz` (again and again, whatever ended it)

    `accelerate launch --multi_gpu -m bayeszip compress lenet-5 -o net.bayz` (on all GPUs of this machine)
    """
    from bayeszip import compressing, models
    from bayeszip.devices import resolve_device
    from bayeszip.fitting.keeper import Checkpointing
    from bayeszip.fitting.launch import leave
    from bayeszip.loaders import load_data, load_test, load_weights, named_loss, named_metric
    from bayeszip.recipe import recipe as named_recipe
    from bayeszip.targets import parse_bytes

    chosen = named_recipe(recipe).override(*(settings or ()))
    if run is None and (resume or force or checkpoint_every or keep):
        raise RecipeError("checkpoints lie in the folder of a run; name it with --run")
    _check_options(run, log, force and not resume, max_metric_drop is not None and metric is None)
    _check_places(output, run)
    checkpoints = (
        None if run is None else Checkpointing(run / "checkpoints", checkpoint_every or "5m", keep or 2, force)
    )
    target = resolve_device(device)
    network = models.build_seeded(model, seed)
    if weights is not None:
        load_weights(network, weights)
    if pretrain is None:
        pretrain = model in models.BUILT_IN and weights is None
    loaders = load_data(data, batch_size=chosen.batch_size, seed=seed, device=target)
    # Now, so that what is wrong with it is known before the training, of which it is no part.
    test = load_test(data, device=target)
    with _missed_is_kept(output, run, test), _watched(chosen, pretrain, run, log) as watcher:
        result = compressing.compress(
            network,
            loaders.train,
            val_loader=loaders.validation,
            recipe=chosen,
            seed=seed,
            device=target,
            pretrain=pretrain,
            watcher=watcher,
            loss=named_loss(loss or "cross-entropy"),
            metric=None if metric is None else named_metric(metric),
            max_bytes=None if max_bytes is None else parse_bytes(max_bytes),
            min_ratio=min_ratio,
            max_accuracy_drop=max_accuracy_drop,
            max_loss_increase=max_loss_increase,
            max_metric_drop=max_metric_drop,
            checkpoints=checkpoints,
            resume=resume,
            mixed_precision=mixed_precision,
            augment=augment,
        )
    _deliver(result, test, output, run, as_json)
    leave()


def _check_options(run: Path | None, log: Log | None, forced_afresh: bool, no_metric: bool) -> None:
    """Options that make no sense without another."""
    if log is not None and run is None:
        raise RecipeError(f"--log {log} writes into the folder of a run; name one with --run")
    if forced_afresh:
        raise RecipeError("--force is about a run that is resumed; add --resume")
    if no_metric:
        raise RecipeError("--max-metric-drop is about a metric; name it with --metric")


def _check_places(output: Path, run: Path | None) -> None:
    """Before the training: what can't be written after it is refused now."""
    from bayeszip.files import check_writable, create_folder
    from bayeszip.fitting.launch import is_main_process

    if is_main_process():
        check_writable(output)
        if run is not None:
            create_folder(run)


def _deliver(result: "Result", test: "Loader", output: Path, run: Path | None, as_json: bool) -> None:
    """Write the file and the record, and say what they are; of several processes the first does."""
    from bayeszip.fitting.launch import is_main_process
    from bayeszip.record import file_figures, write_record

    if not is_main_process():
        return
    figures = file_figures(result.network(), result.description, test, _judge(result))
    result.save(output)
    if run is not None:
        write_record(run, result, figures)
    if as_json:
        typer.echo(json.dumps({**figures, "warnings": list(result.warnings)}))
    else:
        typer.echo(result.report())
        accuracy = figures["accuracy"]
        said = f"loss {figures['loss']:.4g}" if accuracy is None else f"accuracy {100 * accuracy:.2f} %"
        typer.echo(f"test {said}, written to {output}")


def _judge(result: "Result") -> "Judge | None":
    return result.fit.judge if result.fit is not None else None


@contextlib.contextmanager
def _missed_is_kept(output: Path, run: Path | None, test: "Loader") -> Iterator[None]:
    """What was reached instead of a target is worth a training: it stays beside the output, and in the run's folder."""
    from bayeszip.fitting.launch import is_main_process
    from bayeszip.record import file_figures, write_record
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
            write_record(run, result, file_figures(result.network(), result.description, test, _judge(result)))
        where = f"{nearest}, and in {run}" if run is not None else nearest
        raise TargetError(f"{error}. What was reached is in {where}", result) from error


@contextlib.contextmanager
def _watched(recipe: "Recipe", pretrain: bool, run: Path | None, log: Log | None) -> "Iterator[Watchers]":
    """A progress display, and what the folder of the run is to receive while the training goes on."""
    from bayeszip.fitting.launch import is_main_process
    from bayeszip.progress import TensorBoardLog, TrainingProgress, Watchers
    from bayeszip.snapshots import SNAPSHOTS, SnapshotRecorder

    if not is_main_process():
        yield Watchers()
        return
    phases = recipe.scaled().sequence(pretrain)
    with contextlib.ExitStack() as stack:
        watchers: list[Watcher] = []
        if run is not None:
            watchers.append(SnapshotRecorder(run / SNAPSHOTS))
        if run is not None and log is Log.tensorboard:
            watchers.append(stack.enter_context(contextlib.closing(TensorBoardLog(run / "tensorboard", phases))))
        yield Watchers(stack.enter_context(TrainingProgress(phases)), *watchers)
