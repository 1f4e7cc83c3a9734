"""The path from a trained network to a small file and back, top to bottom. The only file that knows every stage."""

import contextlib
import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from bayeszip import codec, graph, models
from bayeszip.errors import DataError, FormatError, ModelError, OutputError, RecipeError, TargetError
from bayeszip.files import read_file, write_atomically
from bayeszip.fitting import EpochStats, Fitting, Phase, Watcher, count_examples, evaluate
from bayeszip.fitting.batches import Batches, checked_batch
from bayeszip.fitting.conditions import data_conditions, machine_conditions, network_conditions
from bayeszip.fitting.engine import Engine
from bayeszip.fitting.keeper import Checkpointing, Keeper
from bayeszip.fitting.launch import local_rank, make_engine
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.fitting.steps import Loss
from bayeszip.graph.proof import random_inputs
from bayeszip.graph.storable import check_storable, unwrapped
from bayeszip.posterior import Posterior
from bayeszip.progress import TrainingProgress
from bayeszip.quantize import Precision, Quantization, bounded, cluster, quantize, round_codebook
from bayeszip.recipe import Coding, Recipe
from bayeszip.recipe import recipe as named_recipe
from bayeszip.result import Fit, Form, Result, coded, coder_of, write_weights
from bayeszip.settings import to_dict
from bayeszip.targets import (
    AccuracySteering,
    ByteSteering,
    Steering,
    Target,
    largest_within,
    smallest_accurate,
    within_bytes,
)
from bayeszip.tensors import CompressedModel, QuantizedTensor
from bayeszip.variational import (
    MixturePrior,
    check_materialized,
    to_stock,
    to_variational,
    variational_weights,
)

__all__ = [
    "Ending",
    "Fit",
    "Result",
    "build_seeded",
    "bytes_now",
    "compress",
    "export",
    "load",
    "pack",
    "read_model",
    "resolve_device",
    "start_prior",
    "verify",
]

#: Types of 16 bits.
_SHORT: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

#: The share of training time that "bytes it would have now" may take.
MEASURING_SHARE = 0.02


def compress(
    model: nn.Module,
    train_loader: Batches,
    *,
    val_loader: Batches | None = None,
    recipe: str | Recipe = "vd+sws",
    seed: int = 0,
    device: str | torch.device = "auto",
    loss: Loss = F.cross_entropy,
    example_inputs: Sequence[Tensor] | None = None,
    pretrain: bool = False,
    watcher: Watcher | None = None,
    max_bytes: int | None = None,
    min_ratio: float | None = None,
    max_accuracy_drop: float | None = None,
    checkpoints: str | os.PathLike[str] | Checkpointing | None = None,
    resume: bool = False,
    mixed_precision: str | None = None,
) -> Result:
    """Retrain `model` to be small, quantize it, drop what is dead, and code it. `model` itself is not changed.

    Args:
        model: a trained network. Layers that have no variational form, and frozen ones, stay as they are; weights that
            are computed from others (weight norm, pruning masks) are taken as what they come to.
        train_loader: gives (inputs, targets), each a tensor or several; iterated once an epoch.
        val_loader: for accuracies in progress and report; never trained on.
        recipe: a name, a path to a JSON file, or a `Recipe`.
        seed: of the noise and of anything else drawn here; a loader's shuffling is its own.
        device: `auto` takes a GPU if there is one.
        loss: mean negative log-likelihood of a batch, from outputs and targets.
        example_inputs: the network's inputs, to trace it with; by default those of the first batch.
        pretrain: first run the recipe's pretraining, for a network that comes without weights.
        watcher: told of batches and epochs; by default a progress display on standard error.
        max_bytes, min_ratio, max_accuracy_drop: a target instead of a knob, at most one of them; τ₁ is then found
            during the training. The file has at most so many bytes, and not many fewer; or is so many times smaller;
            or its network loses at most so many percentage points of accuracy on the validation data.
        checkpoints: a folder in which to save the run, each 5 minutes and between phases, or `Checkpointing`. SIGTERM
            then ends the run when its state is saved.
        resume: go on from the newest of `checkpoints`, if there is one. On a CPU the file is then, bit for bit, that of
            a run that was never interrupted.
        mixed_precision: `bf16` computes the network in it, `no` does not; by default as `accelerate launch` says.

    In processes launched together, by `accelerate launch` or `torchrun`, call it in all of them: each trains on its
    share of every batch, and all return the same result; the first alone watches, measures and writes checkpoints.

    Raises:
        ModelError, DataError, RecipeError, TrainingError: with what is wrong and what to do.
        CheckpointError: `checkpoints` holds another run, or this one under other conditions; says which.
        TargetError: the target is out of reach; says so before the training where that is certain.
    """
    target = Target.of(max_bytes, min_ratio, max_accuracy_drop)
    if max_accuracy_drop is not None and val_loader is None:
        raise DataError("max_accuracy_drop is measured on validation data; give val_loader")
    settings = named_recipe(recipe).scaled()
    hardware = resolve_device(device)
    engine = make_engine(hardware, mixed_precision=mixed_precision, accumulate=settings.accumulate, seed=seed)
    model = unwrapped(model)
    check_materialized(model)
    check_storable(model)
    network = graph.plain_copy(model).to(hardware)
    examples = _examples(train_loader, example_inputs)
    n_data = count_examples(train_loader)
    conditions = partial(_conditions, network, train_loader, n_data, loss, settings, seed, pretrain, target, engine)
    with (
        _seeded(seed, network),
        _watching(watcher if engine.is_main else Watcher(), settings, pretrain) as watching,
        _keeping(checkpoints, resume, conditions, _Bookkeeper(watching, settings, engine)) as keeper,
    ):
        training = _Training(train_loader, n_data, loss, val_loader, keeper, engine)
        if pretrain:
            training.fit(network, settings.pretraining)
        accuracy_before = training.accuracy(network)
        teacher = copy.deepcopy(network).eval().requires_grad_(False)
        conversion = to_variational(network, log_sigma2=settings.start_log_sigma2, biases=settings.biases)
        prior = start_prior(network, settings)
        close = partial(training.close, closing=settings.closing, teacher=teacher)
        ending = Ending(network, examples, settings, close, partial(training.accuracy, cast=True))
        if target is not None:
            training.bookkeeper.inner = _steering(target, watching, network, teacher, ending, accuracy_before)
        training.fit(network, settings.phases, prior, teacher)
        strength = training.bookkeeper.strength() / watching.strength()
        posterior = Posterior.of(network, prior)
        to_stock(network)
        result = _towards(target, posterior, ending, accuracy_before)
        keeper.finish()
    result = dataclasses.replace(
        result,
        fit=Fit(
            recipe=settings,
            seed=seed,
            conversion=conversion,
            accuracy_before=accuracy_before,
            seconds=keeper.seconds,
            device=engine.describe(_device_name(hardware)),
            history=tuple(training.bookkeeper.history),
            target=str(target) if target else None,
            strength=strength,
        ),
    )
    return _held_to(target, result, accuracy_before)


def pack(
    model: nn.Module | Mapping[str, Tensor],
    *,
    example_inputs: Sequence[Tensor] | Tensor | None = None,
    components: int = 64,
    max_error: float | None = None,
    coding: Coding | None = None,
) -> Result:
    """Cluster and code a network as it is: no data, no training.

    Weight matrices and kernels (floating-point tensors of two or more dimensions) are quantized, each with shared
    values of its own, whether they are frozen (`requires_grad=False`) or not; everything else is kept bit for bit.
    Weights that are computed from other tensors (weight norms, parametrizations, pruning masks) go in as computed.

    Args:
        model: a network, or the tensors of one by name; what `torch.compile` or data-parallel training wrapped around
            it doesn't count.
        example_inputs: with them the graph is traced, dead units go, and the file loads without the class.
        components: how many shared values a tensor may take besides 0.
        max_error: instead of `components`, how far a weight may move, in units of its tensor's largest.
        coding: how to code.
    """
    if components < 1 or components >= 2**16:
        raise RecipeError(f"components must lie between 1 and 65,535, not {components}")
    if max_error is not None and not 0 < max_error < 1:
        raise RecipeError(f"max_error must lie between 0 and 1, not {max_error}")
    network = None
    if isinstance(model, Mapping):
        tensors = graph.unwrapped_names(model)
    elif isinstance(model, nn.Module):
        check_materialized(model)
        network = graph.plain_copy(model)
        tensors = {name: parameter.detach() for name, parameter in network.named_parameters()}
    else:
        raise ModelError(f"pack takes a network or tensors by name, not a {type(model).__name__}")
    quantized = {
        name: _packed(name, tensor, components, max_error) for name, tensor in tensors.items() if _is_packable(tensor)
    }
    if network is None:
        kept = {name: quantized.get(name) or graph.to_raw(tensor, name) for name, tensor in tensors.items()}
        result = coded(CompressedModel(kept), coding or Coding(), None)
        return dataclasses.replace(result, moved=_moved(tensors, quantized))
    moved = _moved(tensors, quantized)
    write_weights(network, quantized)
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    return dataclasses.replace(Form(network, inputs, coding or Coding()).code(quantized), moved=moved)


def _moved(tensors: Mapping[str, Tensor], quantized: Mapping[str, QuantizedTensor]) -> float:
    """How far quantization moves weights, as a share of their size; root mean squares of both."""
    distance = size = 0.0
    for name, tensor in quantized.items():
        weights = tensors[name].detach().cpu().double().numpy()
        with np.errstate(over="ignore"):
            distance += float(np.square(tensor.dequantize() - weights).sum())
            size += float(np.square(weights).sum())
    return math.sqrt(distance / size) if 0 < size < math.inf else 0.0


def verify(
    path: str | os.PathLike[str], *, against: nn.Module | None = None, limits: codec.Limits | None = None
) -> float | None:
    """Check a file whole: it decodes, encodes to the same bytes again, and builds a network.

    Args:
        against: a network that should compute the same, such as the original with the file's weights; compared in
            float64 on random inputs.

    Returns:
        The largest difference from `against`, relative to its largest output.
    """
    blob, budget = read_file(path), codec.Budget.of(limits)
    model, description = codec.inspect(blob, budget)
    if codec.encode(model, description.coder, **description.options) != blob:
        raise FormatError(f"{path} decodes, but encodes to other bytes: it was not written by bayeszip")
    if model.graph is not None:
        graph.to_module(model, limits=budget)
    if against is None:
        return None
    if model.graph is None:
        raise ModelError(f"{path} holds tensors without a graph, so there is nothing to run against")
    network = graph.plain_copy(against)
    traced = graph.trace(network, random_inputs(model, torch.Generator().manual_seed(0)))
    own = CompressedModel(graph.from_state(network, {}, traced), traced)
    found = graph.difference(own, model, limits=codec.Budget.of(limits))
    if found:
        raise ModelError(
            f"{path} computes something else than {type(network).__name__}: {found}. A file holds quantized weights: "
            "compare with a network that has these, as `bayeszip export --dense` gives them"
        )
    return found.worst


def load(
    path: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    dtype: str | torch.dtype | None = None,
    map_location: str | torch.device = "cpu",
    limits: codec.Limits | None = None,
) -> nn.Module:
    """The network in a `.bayz` file, as a plain module in `eval()` mode. Nothing in the file is executed.

    Args:
        into: a network of the original class; its layers take the weights, and the sizes, of the file.
        dtype: of the floating-point tensors, as `torch.float16` or "float16"; by default the type that the original
            network computed in, or that of `into`.
        map_location: the device to put it on.
        limits: what the file may ask for; see `codec.Limits`.

    Raises:
        FormatError: the file is damaged or not a `.bayz` file.
        ModelError: it holds tensors only, so `into` is needed; or `into` does not fit.
    """
    floating, budget = _floating(dtype), codec.Budget.of(limits)
    model = read_model(path, budget)
    if into is not None:
        network = graph.load_into(model, into, limits=budget)
    elif model.graph is not None:
        network = graph.to_module(model, floating, budget)
    else:
        raise ModelError(
            f"{path} holds tensors without a graph; load it with into= (--into) and a network of its class"
        )
    return network.to(device=resolve_device(map_location), dtype=floating)


def read_model(path: str | os.PathLike[str], limits: codec.Limits | codec.Budget | None = None) -> CompressedModel:
    """Decode a file."""
    return codec.decode(read_file(path), limits)


def export(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dense: bool = False,
    dtype: str | torch.dtype | None = None,
    limits: codec.Limits | None = None,
) -> None:
    """Write the network in a `.bayz` file in another format, by the target's ending: `.onnx` or `.safetensors`.

    Args:
        dense: for safetensors, the tensors in their original shapes, zeros put back; the file must say which units
            survived (coding.keep_indices).
        dtype: of the floating-point tensors. By default float32 for ONNX; for safetensors as they were, or float32
            where a file of tensors alone doesn't tell.
        limits: what the file may ask for; see `codec.Limits`.
    """
    floating, budget = _floating(dtype), codec.Budget.of(limits)
    model = read_model(path, budget)
    ending = Path(target).suffix
    if dense and ending != ".safetensors":
        raise OutputError(f"{target}: dense tensors are exported to .safetensors only")
    if ending == ".onnx":
        from bayeszip.graph.onnx import to_onnx

        write_atomically(target, to_onnx(model, floating or torch.float32, budget))
    elif ending == ".safetensors":
        graph.check_sound(model, budget)
        tensors = graph.dense_tensors(model, budget) if dense else graph.plain_tensors(model, budget)
        if floating is not None:
            tensors = {name: each.to(floating) if each.is_floating_point() else each for name, each in tensors.items()}
        write_atomically(target, to_safetensors(tensors))
    else:
        raise OutputError(f"{target}: networks are exported to .onnx or .safetensors, not {ending or 'no ending'!r}")


def _floating(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating-point type that a network can be in, by its name too."""
    found = graph.FLOATING.get(str(dtype).removeprefix("torch."))
    if dtype is not None and found is None:
        raise RecipeError(f"dtype must be one of {', '.join(graph.FLOATING)}, not {dtype}")
    return found


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto`: a GPU if there is one; one for each process of those launched together."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device) == "cuda" and local_rank() is not None:
        device = f"cuda:{local_rank()}"
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!s} can't be used here: {str(error).splitlines()[0]}") from error
    return resolved


def build_seeded(name: str, seed: int) -> nn.Module:
    """The network `name` (see `models.build`), its first values drawn from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return models.build(name)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


class _Bookkeeper(Watcher):
    """Passes everything on, adds the bytes a file would take now, and keeps the history."""

    def __init__(self, inner: Watcher, settings: Recipe, engine: Engine) -> None:
        self.inner, self.settings, self.engine = inner, settings, engine
        self.history: list[EpochStats] = []
        self._trained = self._measured = 0.0

    def on_phase(self, phase: Phase, network: nn.Module, prior: MixturePrior | None) -> None:
        self.inner.on_phase(phase, network, prior)

    def on_batch(self, phase: Phase, done: float) -> None:
        self.inner.on_batch(phase, done)

    def on_warning(self, message: str) -> None:
        self.inner.on_warning(message)

    def strength(self) -> float:
        return self.inner.strength()

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": [dataclasses.asdict(stats) for stats in self.history],
            "trained": self._trained,
            "measured": self._measured,
            # Who stands behind it changes when the compression begins.
            "inner": {type(self.inner).__name__: self.inner.state_dict()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = [EpochStats(**stats) for stats in state["history"]]
        self._trained, self._measured = state["trained"], state["measured"]
        held = state["inner"].get(type(self.inner).__name__)
        if held is not None:
            self.inner.load_state_dict(held)

    def on_epoch(self, stats: EpochStats, network: nn.Module, prior: MixturePrior | None) -> None:
        self._trained += stats.seconds
        size = self.engine.from_main(lambda: self._measure(stats, network, prior))
        stats = dataclasses.replace(stats, bytes=int(size) or None)
        self.history.append(stats)
        self.inner.on_epoch(stats, network, prior)

    def _measure(self, stats: EpochStats, network: nn.Module, prior: MixturePrior | None) -> int:
        """What a file would take now; 0 if it is not measured, since that would take too large a share of the time."""
        last = stats.epoch == stats.epochs
        if not stats.zeros or not (last or self._measured <= MEASURING_SHARE * self._trained):
            return 0
        began = time.perf_counter()
        size = bytes_now(network, prior if stats.mixture else None, self.settings)
        self._measured += time.perf_counter() - began
        return size


@dataclass(frozen=True)
class _Training:
    """What every phase is fitted with."""

    batches: Batches
    n_data: int
    loss: Loss
    validation: Batches | None
    keeper: Keeper[_Bookkeeper]
    engine: Engine

    @property
    def bookkeeper(self) -> _Bookkeeper:
        return self.keeper.watcher

    def fit(
        self,
        network: nn.Module,
        phases: Sequence[Phase],
        prior: MixturePrior | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.keeper.carry(
            Fitting(
                network,
                self.batches,
                phases,
                n_data=self.n_data,
                prior=prior,
                teacher=teacher,
                loss=self.loss,
                validation=self.validation,
                watcher=self.bookkeeper,
                engine=self.engine,
            )
        )

    def close(
        self,
        network: nn.Module,
        quantized: Mapping[str, QuantizedTensor],
        shared: SharedValues,
        *,
        closing: Phase,
        teacher: nn.Module,
    ) -> None:
        """Train the shared values of `network`."""
        symbols = {name: torch.from_numpy(tensor.symbols.astype(np.int32)) for name, tensor in quantized.items()}
        self.engine.check_alike(symbols, "quantization")
        self.fit(shared, (closing,), teacher=teacher)
        self.engine.level_buffers(network)

    def accuracy(self, network: nn.Module, *, cast: bool = False) -> float | None:
        """On the validation data, if there is any."""
        validation = self.validation
        if validation is None:
            return None
        return self.engine.from_main(lambda: evaluate(network, validation, cast=cast))


def _keeping(
    checkpoints: str | os.PathLike[str] | Checkpointing | None,
    resume: bool,
    conditions: Callable[[], dict[str, Any]],
    bookkeeper: _Bookkeeper,
) -> Keeper[_Bookkeeper]:
    if checkpoints is None:
        if resume:
            raise RecipeError("there is nothing to resume from; say where the checkpoints are")
        return Keeper(None, {}, bookkeeper)
    settings = checkpoints if isinstance(checkpoints, Checkpointing) else Checkpointing(checkpoints)
    engine = bookkeeper.engine
    keeper = Keeper(settings, conditions(), bookkeeper, resume=resume, writes=engine.is_main)
    engine.check_alike(
        {"what was found": keeper.taken_up}, f"all processes must see the checkpoints in {settings.folder}"
    )
    return keeper


def _conditions(
    network: nn.Module,
    batches: Batches,
    n_data: int,
    loss: Loss,
    settings: Recipe,
    seed: int,
    pretrain: bool,
    target: Target | None,
    engine: Engine,
) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    return {
        # Phases by name, so that a difference says which.
        "recipe": {**to_dict(settings), "phases": {phase.name: to_dict(phase) for phase in settings.phases}},
        "seed": seed,
        "pretrain": pretrain,
        "target": str(target),
        "processes": engine.processes,
        **machine_conditions(next((parameter.device for parameter in network.parameters()), torch.device("cpu"))),
        "network": network_conditions(network),
        "data": data_conditions(batches, n_data, loss),
    }


def bytes_now(network: nn.Module, prior: MixturePrior | None, settings: Recipe) -> int:
    """What the weights would take if they were quantized and coded now; before there is a mixture, with one fitted."""
    how = settings.quantization
    if prior is None:
        how = Quantization(assignment="fit", prune_rate=0.95, components=settings.mixture.components, codebook_bits=16)
    coder, options = coder_of(settings.coding)
    return codec.measure(CompressedModel(quantize(Posterior.of(network, prior), how)), coder, **options)


def start_prior(network: nn.Module, settings: Recipe) -> MixturePrior | None:
    """The mixture at its start values, if a phase will train it; Δμ follows the spread of the pretrained weights."""
    if not any(phase.tau2 for phase in settings.phases):
        return None
    weights = torch.cat([weight.theta.detach().flatten().float() for weight in variational_weights(network)])
    start = settings.mixture
    prior = MixturePrior(
        start.components, weights.std(correction=0).item(), start.zero_proportion, start.hyper_shape, start.hyper_rate
    )
    return prior.to(weights.device)


@dataclass(frozen=True)
class Ending:
    """From symbols to a file: the shared values trained, dead units dropped, coded.

    Args:
        network: plain, with the trained weights.
        examples: its inputs, to trace it with.
        close: trains the shared values of a network with these symbols; None: they stay as they are.
        accuracy: of the network that a file holds; None: it is not asked for.
        in_place: let `network` take the result's weights; for one that is finished once.
    """

    network: nn.Module
    examples: tuple[Tensor, ...] | None
    settings: Recipe
    close: Callable[[nn.Module, Mapping[str, QuantizedTensor], SharedValues], None] | None
    accuracy: Callable[[nn.Module], float | None]
    in_place: bool = False

    def form(self, network: nn.Module) -> Form:
        """A copy of `network`, ready to be coded."""
        return Form(copy.deepcopy(network).cpu(), self.examples, self.settings.coding)

    def finish(
        self, quantized: Mapping[str, QuantizedTensor], posterior: Posterior, budget: int | None = None
    ) -> Result:
        """Leaves `network` as it is, unless `in_place`, so that other symbols can be tried."""
        network = self.network if self.in_place else copy.deepcopy(self.network)
        write_weights(network, quantized)
        quantized = self._with_trained_values(network, quantized)
        form = self.form(network)
        if budget is not None:
            # Other values may take a few bytes more.
            quantized = largest_within(quantized, posterior, form.size, budget)
            write_weights(network, quantized)
        result = form.code(quantized)
        return dataclasses.replace(result, accuracy=self.accuracy(result.network()))

    def _with_trained_values(
        self, network: nn.Module, quantized: Mapping[str, QuantizedTensor]
    ) -> Mapping[str, QuantizedTensor]:
        """The closing step: the same symbols, better values."""
        nothing_to_train = len(next(iter(quantized.values())).codebook) == 1
        if self.close is None or not self.settings.closing.epochs or nothing_to_train:
            return quantized
        shared = SharedValues(network, quantized)
        self.close(network, quantized, shared)
        codebook = round_codebook(shared.codebook(), self.settings.quantization.codebook_bits)
        quantized = {name: QuantizedTensor(tensor.symbols, codebook) for name, tensor in quantized.items()}
        write_weights(network, quantized)
        return quantized


def _steering(
    target: Target,
    watching: Watcher,
    network: nn.Module,
    teacher: nn.Module,
    ending: Ending,
    accuracy_before: float | None,
) -> Steering:
    """Towards the target.

    Raises:
        TargetError: it can't be reached, whatever the training does.
    """
    settings = ending.settings
    budget = target.budget(models.parameter_count(teacher))
    if budget is None:
        drop = (target.max_accuracy_drop or 0.0) / 100
        return AccuracySteering(watching, settings.phases, floor=(accuracy_before or 0.0) - drop, drop=drop)
    form, weights = ending.form(teacher), tuple(variational_weights(network))
    shapes = {weight.name: weight.theta.shape for weight in weights}
    nothing = {name: QuantizedTensor(np.zeros(shape, np.uint8), np.zeros(1)) for name, shape in shapes.items()}
    largest_within(nothing, Posterior.of(network), form.size, budget)
    ones = {name: QuantizedTensor(np.ones(shape, np.uint8), np.arange(2.0)) for name, shape in shapes.items()}
    coder, options = coder_of(settings.coding)
    # What a file takes beside its weights; those of a network that is being compacted have other shapes.
    beside = form.size(ones) - codec.measure(CompressedModel(ones), coder, **options)
    return ByteSteering(
        watching,
        settings.phases,
        budget=budget,
        size=lambda quantized: beside + codec.measure(CompressedModel(dict(quantized)), coder, **options),
        how=settings.quantization,
    )


def _held_to(target: Target | None, result: Result, accuracy_before: float | None) -> Result:
    """`result`, unless it misses the target."""
    missed = target.missed_by(result, accuracy_before) if target else None
    if missed:
        raise TargetError(missed, result)
    return result


def _towards(target: Target | None, posterior: Posterior, ending: Ending, accuracy_before: float | None) -> Result:
    """Quantized as the recipe says, or so that the file keeps to the target."""
    how = ending.settings.quantization
    if target is None:
        return ending.finish(quantize(posterior, how), posterior)
    budget = target.budget(models.parameter_count(ending.network))
    if budget is None:
        floor = (accuracy_before or 0.0) - (target.max_accuracy_drop or 0.0) / 100
        return smallest_accurate(posterior, how, lambda symbols: ending.finish(symbols, posterior), floor)
    symbols = within_bytes(posterior, how, ending.form(ending.network).size, budget)
    return ending.finish(symbols, posterior, budget)


def _is_packable(tensor: Tensor) -> bool:
    """Whether it is worth a codebook, and has values that one can hold."""
    is_matrix = tensor.dtype in graph.FLOATING.values() and tensor.dim() >= 2 and tensor.numel() > 1
    if not is_matrix or tensor.is_meta or tensor.layout != torch.strided:
        return False
    as_float32 = tensor.float()
    if not torch.isfinite(as_float32).all():
        return False
    # A float64 tensor whose values lie closer together than float32 can tell apart is kept as it is.
    return bool((as_float32 - tensor).abs().max() <= 1e-3 * (tensor.max() - tensor.min()))


def _packed(name: str, tensor: Tensor, components: int, max_error: float | None) -> QuantizedTensor:
    weights = tensor.detach().float().cpu().numpy()
    largest = float(np.abs(weights).max(initial=0.0))
    # Shared values that the tensor's own type can hold: loading it in that type moves none.
    precision = _SHORT.get(tensor.dtype)
    try:
        if max_error and largest:
            return bounded(weights, max_error * largest, precision or "float32")
        return cluster(weights, components, precision)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error


def _examples(batches: Batches, given: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    if given is not None:
        return tuple(tensor.cpu() for tensor in given)
    for batch in batches:
        inputs = checked_batch(batch)[0]
        return tuple(tensor[:2].cpu() for tensor in (inputs if isinstance(inputs, tuple) else (inputs,)))
    raise DataError("the training data gave no batch; check the loader")


@contextlib.contextmanager
def _seeded(seed: int, network: nn.Module) -> Iterator[None]:
    """Random numbers from `seed` inside; outside they go on as if nothing had happened."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _watching(watcher: Watcher | None, settings: Recipe, pretrain: bool) -> Iterator[Watcher]:
    """The caller's watcher, or a display that ends with the training."""
    if watcher is not None:
        yield watcher
        return
    phases = [*(settings.pretraining if pretrain else ()), *settings.phases, settings.closing]
    with TrainingProgress(phases) as display:
        yield display
