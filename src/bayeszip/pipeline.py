"""The path from a trained network to a small file and back, top to bottom. The only file that knows every stage."""

import contextlib
import copy
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip import codec, graph, models
from bayeszip.errors import DataError, ModelError
from bayeszip.files import write_atomically
from bayeszip.fitting import EpochStats, Phase, Watcher, count_examples, evaluate, fit
from bayeszip.fitting.loop import Loss
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.posterior import Posterior
from bayeszip.progress import TrainingProgress
from bayeszip.quantize import Quantization, quantize, round_codebook
from bayeszip.recipe import Recipe
from bayeszip.recipe import recipe as named_recipe
from bayeszip.summary import as_text, facts_table, show_bytes, tensors_table
from bayeszip.tensors import CompressedModel, Graph, QuantizedTensor
from bayeszip.variational import Conversion, MixturePrior, to_stock, to_variational, variational_weights

__all__ = ["Result", "build_seeded", "compress", "load", "read_model", "resolve_device"]

Batches = Iterable[tuple[Tensor, Tensor]]

#: The share of training time that "bytes it would have now" may take.
MEASURING_SHARE = 0.02


@dataclass(frozen=True)
class Result:
    """A compressed network: the file's bytes, the plain module they decode to, and how it came about."""

    blob: bytes
    model: nn.Module
    compressed: CompressedModel
    recipe: Recipe
    seed: int
    conversion: Conversion
    #: Why the file holds tensors without a graph; None if it holds the graph.
    without_graph: str | None
    accuracy_before: float | None
    accuracy: float | None
    seconds: float
    history: tuple[EpochStats, ...] = field(repr=False)

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(self.blob)

    @property
    def ratio(self) -> float:
        """4 bytes × parameters of the original ÷ size of the whole file."""
        return 4 * (self.compressed.original_parameters or 0) / len(self.blob)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        write_atomically(path, self.blob)

    def report(self) -> str:
        """What went in, what came out, and where the bytes are, in plain text."""
        facts = [
            ("recipe", f"{self.recipe.name}, seed {self.seed}"),
            ("time", f"{self.seconds:.0f} s"),
            ("parameters before", f"{self.compressed.original_parameters:,}"),
            ("parameters kept", f"{self.compressed.parameters:,}, of them {self.compressed.nonzero:,} not zero"),
            ("file", f"{show_bytes(self.bytes)}, {self.ratio:.1f} times smaller"),
        ]
        if self.accuracy is not None and self.accuracy_before is not None:
            change = f"{100 * self.accuracy_before:.2f} % before, {100 * self.accuracy:.2f} % as decoded"
            facts.append(("validation accuracy", change))
        if self.conversion.kept:
            facts.append(("layers left as they are", self.conversion.kept_summary()))
        if self.without_graph:
            facts.append(("no graph in the file", f"{self.without_graph}; load it with into="))
        return as_text(facts_table(facts), tensors_table(codec.describe(self.blob)))


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
) -> Result:
    """Retrain `model` to be small, quantize it, drop what is dead, and code it. `model` itself is not changed.

    Args:
        model: a trained network. Layers that have no variational form stay as they are.
        train_loader: gives (inputs, targets); iterated once an epoch.
        val_loader: for accuracies in progress and report; never trained on.
        recipe: a name, a path to a JSON file, or a `Recipe`.
        seed: of the noise and of anything else drawn here; a loader's shuffling is its own.
        device: `auto` takes a GPU if there is one.
        loss: mean negative log-likelihood of a batch, from outputs and targets.
        example_inputs: the network's inputs, to trace it with; by default those of the first batch.
        pretrain: first run the recipe's pretraining, for a network that comes without weights.
        watcher: told of batches and epochs; by default a progress display on standard error.

    Raises:
        ModelError, DataError, RecipeError, TrainingError: with what is wrong and what to do.
    """
    began = time.perf_counter()
    settings = named_recipe(recipe).scaled()
    network = copy.deepcopy(model).to(resolve_device(device))
    examples = _examples(train_loader, example_inputs)
    n_data = count_examples(train_loader)
    with _seeded(seed, network), _watching(watcher, settings, pretrain) as watching:
        training = _Training(train_loader, n_data, loss, val_loader, _Bookkeeper(watching, settings))
        if pretrain:
            training.fit(network, settings.pretraining)
        accuracy_before = None if val_loader is None else evaluate(network, val_loader)
        teacher = copy.deepcopy(network).eval().requires_grad_(False)
        conversion = to_variational(network, log_sigma2=settings.start_log_sigma2, biases=settings.biases)
        prior = _start_prior(network, settings)
        training.fit(network, settings.phases, prior, teacher)
        posterior = Posterior.of(network, prior)
        to_stock(network)
        quantized = quantize(posterior, settings.quantization)
        _write_weights(network, quantized)
        if settings.closing.epochs:
            quantized = _train_shared_values(training, network, quantized, teacher, settings)
    small, without_graph = _shrink(network.cpu(), quantized, examples)
    coder, options = _coding(settings)
    blob = codec.encode(small, coder, **options)
    decoded = codec.decode(blob, _own_limits(small))
    plain = graph.to_module(decoded) if decoded.graph else graph.load_into(decoded, network)
    return Result(
        blob=blob,
        model=plain,
        compressed=decoded,
        recipe=settings,
        seed=seed,
        conversion=conversion,
        without_graph=without_graph,
        accuracy_before=accuracy_before,
        accuracy=None if val_loader is None else evaluate(plain, val_loader),
        seconds=time.perf_counter() - began,
        history=tuple(training.bookkeeper.history),
    )


def load(
    path: str | os.PathLike[str], *, into: nn.Module | None = None, limits: codec.Limits | None = None
) -> nn.Module:
    """The network in a `.bayz` file, as a plain module in `eval()` mode. Nothing in the file is executed.

    Args:
        into: a network of the original class; its layers take the weights, and the sizes, of the file.
        limits: what the file may ask for; see `codec.Limits`.

    Raises:
        FormatError: the file is damaged or not a `.bayz` file.
        ModelError: it holds tensors only, so `into` is needed; or `into` does not fit.
    """
    model = read_model(path, limits)
    if into is not None:
        return graph.load_into(model, into)
    if model.graph is None:
        raise ModelError(f"{path} holds tensors without a graph; load it with into= and a network of its class")
    return graph.to_module(model)


def read_model(path: str | os.PathLike[str], limits: codec.Limits | None = None) -> CompressedModel:
    """Decode a file."""
    try:
        blob = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}") from error
    return codec.decode(blob, limits)


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto`: a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


class _Bookkeeper(Watcher):
    """Passes everything on, adds the bytes a file would take now, and keeps the history."""

    def __init__(self, inner: Watcher, settings: Recipe) -> None:
        self.inner, self.settings = inner, settings
        self.history: list[EpochStats] = []
        self._trained = self._measured = 0.0

    def on_batch(self, phase: Phase, done: float) -> None:
        self.inner.on_batch(phase, done)

    def on_epoch(self, stats: EpochStats, network: nn.Module, prior: MixturePrior | None) -> None:
        self._trained += stats.seconds
        last = stats.epoch == stats.epochs
        if stats.zeros and (last or self._measured <= MEASURING_SHARE * self._trained):
            began = time.perf_counter()
            stats = dataclasses.replace(
                stats, bytes=_bytes_now(network, prior if stats.mixture else None, self.settings)
            )
            self._measured += time.perf_counter() - began
        self.history.append(stats)
        self.inner.on_epoch(stats, network, prior)


@dataclass(frozen=True)
class _Training:
    """What every phase is fitted with."""

    batches: Batches
    n_data: int
    loss: Loss
    validation: Batches | None
    bookkeeper: _Bookkeeper

    def fit(
        self,
        network: nn.Module,
        phases: Sequence[Phase],
        prior: MixturePrior | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        fit(
            network,
            self.batches,
            phases,
            n_data=self.n_data,
            prior=prior,
            teacher=teacher,
            loss=self.loss,
            validation=self.validation,
            watcher=self.bookkeeper,
        )


def _bytes_now(network: nn.Module, prior: MixturePrior | None, settings: Recipe) -> int:
    """What the weights would take if they were quantized and coded now; before there is a mixture, with one fitted."""
    how = settings.quantization
    if prior is None:
        how = Quantization(assignment="fit", prune_rate=0.95, components=settings.mixture.components, codebook_bits=16)
    coder, options = _coding(settings)
    return codec.measure(CompressedModel(quantize(Posterior.of(network, prior), how)), coder, **options)


def _start_prior(network: nn.Module, settings: Recipe) -> MixturePrior | None:
    """The mixture at its start values, if a phase will train it; Δμ follows the spread of the pretrained weights."""
    if not any(phase.tau2 for phase in settings.phases):
        return None
    weights = torch.cat([weight.theta.detach().flatten().float() for weight in variational_weights(network)])
    start = settings.mixture
    prior = MixturePrior(
        start.components, weights.std(correction=0).item(), start.zero_proportion, start.hyper_shape, start.hyper_rate
    )
    return prior.to(weights.device)


def _train_shared_values(
    training: _Training,
    network: nn.Module,
    quantized: dict[str, QuantizedTensor],
    teacher: nn.Module,
    settings: Recipe,
) -> dict[str, QuantizedTensor]:
    """The closing step: the same symbols, better values."""
    if len(next(iter(quantized.values())).codebook) == 1:
        return quantized
    shared = SharedValues(network, quantized)
    training.fit(shared, (settings.closing,), teacher=teacher)
    codebook = round_codebook(shared.codebook(), settings.quantization.codebook_bits)
    quantized = {name: QuantizedTensor(tensor.symbols, codebook) for name, tensor in quantized.items()}
    _write_weights(network, quantized)
    return quantized


@torch.no_grad()
def _write_weights(network: nn.Module, quantized: dict[str, QuantizedTensor]) -> None:
    parameters = dict(network.named_parameters())
    for name, tensor in quantized.items():
        parameters[name].copy_(torch.from_numpy(tensor.dequantize()))


def _shrink(
    network: nn.Module, quantized: dict[str, QuantizedTensor], examples: Sequence[Tensor]
) -> tuple[CompressedModel, str | None]:
    """The model without its dead units, proven to compute the same; without a graph, whole, and why there is none."""
    traced: Graph | None = None
    without_graph = None
    try:
        traced = graph.trace(network, tuple(examples))
    except (graph.UnknownOperator, graph.UntraceableModel) as error:
        without_graph = str(error)
    large = CompressedModel(graph.from_state(network, quantized, traced), traced)
    if traced is None:
        return large, without_graph
    small = graph.drop_dead_units(large)
    graph.prove_same(large, small, tuple(examples))
    return small, None


def _coding(settings: Recipe) -> tuple[str, dict[str, int | None]]:
    """The coder and its options."""
    coding = settings.coding
    coder = codec.DEFAULT_CODER if coding.coder == "default" else coding.coder
    return coder, {"offset_bits": coding.offset_bits} if coding.offset_bits else {}


def _own_limits(model: CompressedModel) -> codec.Limits:
    """Room for the model at hand, however large: it is our own."""
    elements = max(2**30, model.parameters)
    return codec.Limits(elements=elements, memory=max(2**32, 16 * elements))


def _examples(batches: Batches, given: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    if given is not None:
        return tuple(tensor.cpu() for tensor in given)
    for inputs, _ in batches:
        return (inputs[:2].cpu(),)
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
