"""The training loop: phase by phase, from pretrained weights to a posterior ready to be quantized.

for each phase:  reseed? ──► for each epoch:  compact? ──► for each batch:  rates, τ's, σ of the components
                                                                            loss ──► gradients ──► Adam
                                          └──► EpochStats ──► on_epoch
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.errors import DataError, RecipeError, TrainingError
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.schedules import SCHEDULES, geometric, ramp
from bayeszip.variational.compaction import compact, expand
from bayeszip.variational.distributions import log_alpha
from bayeszip.variational.layers import VariationalLayer, VariationalWeight, variational_weights
from bayeszip.variational.mixture import MixturePrior
from bayeszip.variational.objective import regularizer

__all__ = [
    "PRUNING_LOG_ALPHA",
    "EpochStats",
    "Loss",
    "Watcher",
    "checked_pair",
    "count_examples",
    "evaluate",
    "fit",
]

Loss = Callable[[Tensor, Tensor], Tensor]

#: Examples shown at once to a network that is not trained.
ROWS_AT_ONCE = 1000

#: log 19: the log α at which the dropout rate σ²/(θ²+σ²) is 0.95, the paper's threshold (app. B).
PRUNING_LOG_ALPHA = math.log(19)


@dataclass(frozen=True)
class EpochStats:
    """What an epoch came to. Loss parts are means over its batches, in nats per example."""

    phase: str
    epoch: int
    epochs: int
    seconds: float
    nll: float
    kl: float
    mixture: float
    hyper_prior: float
    accuracy: float | None
    zeros: float
    weights_computed: int
    #: What a file would take now; filled in by whoever knows how to code one.
    bytes: int | None = None


class Watcher:
    """Told what goes on; does nothing. Progress displays and logs derive from it."""

    def on_batch(self, phase: Phase, done: float) -> None:
        """`done` is the share of the phase that is over."""

    def on_epoch(self, stats: EpochStats, network: nn.Module, prior: MixturePrior | None) -> None:
        """After each epoch, with the network as it is now."""


@dataclass
class _Run:
    """What the functions below share while they fit one network."""

    network: nn.Module
    batches: Iterable[tuple[Tensor, Tensor]]
    n_data: int
    prior: MixturePrior | None
    teacher: "_Teacher | None"
    loss: Loss
    validation: Iterable[tuple[Tensor, Tensor]] | None
    watcher: Watcher
    device: torch.device
    #: How many weights have a posterior; compaction leaves some of them uncomputed.
    n_weights: int


class _Teacher:
    """What the pretrained network says: asked once for every row if the batches say which rows they hold."""

    @torch.no_grad()
    def __init__(self, network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._network, self._batches = network, batches
        self._outputs: Tensor | None = None
        inputs = getattr(batches, "inputs", None)
        if not hasattr(batches, "rows") or not isinstance(inputs, Tensor) or not len(inputs):
            return
        with _running("distillation"):
            # Not if keeping the outputs takes more memory than the inputs do.
            if network(inputs[:1]).numel() <= inputs[:1].numel():
                self._outputs = torch.cat([network(part) for part in inputs.split(ROWS_AT_ONCE)])

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> Tensor:
        """Its outputs for the batch at hand."""
        rows: Tensor | None = getattr(self._batches, "rows", None)
        if self._outputs is None or rows is None:
            return cast(Tensor, self._network(inputs))
        return self._outputs.index_select(0, rows)


def fit(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    phases: Sequence[Phase],
    *,
    n_data: int,
    prior: MixturePrior | None = None,
    teacher: nn.Module | None = None,
    loss: Loss = F.cross_entropy,
    validation: Iterable[tuple[Tensor, Tensor]] | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Train `network` (and `prior`, where a phase has τ₂ > 0) in place through `phases`.

    Args:
        network: with variational layers, or plain for phases without τ's (pretraining).
        batches: what to train on; iterated once an epoch.
        n_data: N, how many examples that is.
        prior: the mixture over the means; needed where a phase has τ₂ > 0.
        teacher: the network whose outputs are distilled; needed where a phase has distillation > 0.
        loss: mean negative log-likelihood of a batch, from outputs and targets.
        validation: for the accuracy in `EpochStats`; never trained on.
        watcher: told of batches and epochs.

    Raises:
        RecipeError: a phase needs a prior, a teacher or variational layers, and there is none.
        TrainingError: the loss is not finite; names the phase and the epoch.
    """
    device = next(network.parameters()).device
    n_weights = sum(weight.theta.numel() for weight in variational_weights(network))
    asked = _Teacher(teacher, batches) if teacher and any(phase.distillation for phase in phases) else None
    run = _Run(network, batches, n_data, prior, asked, loss, validation, watcher or Watcher(), device, n_weights)
    for phase in phases:
        _check_needs(phase, run)
    try:
        for phase in phases:
            _fit_phase(run, phase)
    finally:
        # Whatever ends the training, the caller gets the network's own shapes back.
        expand(network)
        network.eval()


def _check_needs(phase: Phase, run: _Run) -> None:
    if (phase.tau1 or phase.tau2) and not run.n_weights:
        raise RecipeError(f"{phase.name}: τ₁ and τ₂ weigh priors on Gaussian weights; this network has none")
    if phase.tau2 and run.prior is None:
        raise RecipeError(f"{phase.name}: τ₂ weighs a mixture prior; there is none")
    if phase.distillation and run.teacher is None:
        raise RecipeError(f"{phase.name}: distillation needs the pretrained network as a teacher")


def _fit_phase(run: _Run, phase: Phase) -> None:
    weights = tuple(variational_weights(run.network))
    for layer in run.network.modules():
        if isinstance(layer, VariationalLayer):
            layer.noise = phase.noise
    if phase.reseed and run.prior is not None:
        run.prior.reseed(_survivors(weights))
    optimizer = _optimizer(run, phase, weights)
    for epoch in range(phase.epochs):
        if phase.compact_every and epoch and epoch % phase.compact_every == 0:
            compact(run.network, PRUNING_LOG_ALPHA, _select_in(optimizer))
        stats = _fit_epoch(run, phase, epoch, optimizer, weights)
        run.watcher.on_epoch(stats, run.network, run.prior)


def _fit_epoch(
    run: _Run, phase: Phase, epoch: int, optimizer: torch.optim.Optimizer, weights: Sequence[VariationalWeight]
) -> EpochStats:
    began = time.perf_counter()
    run.network.train()
    n_batches = _count_batches(run.batches)
    sums = torch.zeros(4, device=run.device)
    count = 0
    for count, (inputs, targets) in enumerate(_on_device(run.batches, run.device), start=1):
        done = (epoch + min(count - 1, n_batches) / n_batches) / phase.epochs
        with _running(f"phase {phase.name}, epoch {epoch + 1} of {phase.epochs}"):
            parts = _step(run, phase, done, optimizer, weights, inputs, targets)
        sums += parts
        # A GPU is asked once an epoch, so that it never waits; the CPU at every step.
        if run.device.type == "cpu":
            _check_finite(parts, phase, epoch)
        run.watcher.on_batch(phase, done)
    if not count:
        raise DataError("the training data gave no batch; check the loader (and drop_last)")
    _check_finite(sums, phase, epoch)
    _check_weights(run, phase, epoch)
    nll, kl, mixture, hyper_prior = (sums / count).tolist()
    return EpochStats(
        phase=phase.name,
        epoch=epoch + 1,
        epochs=phase.epochs,
        seconds=time.perf_counter() - began,
        nll=nll,
        kl=kl,
        mixture=mixture,
        hyper_prior=hyper_prior,
        accuracy=None if run.validation is None else evaluate(run.network, run.validation),
        zeros=_share_of_zeros(run, phase, weights),
        weights_computed=sum(weight.theta.numel() for weight in weights),
    )


def _step(
    run: _Run,
    phase: Phase,
    done: float,
    optimizer: torch.optim.Optimizer,
    weights: Sequence[VariationalWeight],
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """One step of Adam; returns the loss in its four parts, detached."""
    factor = SCHEDULES[phase.schedule](done)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    if phase.std_first and run.prior is not None:
        run.prior.tighten(geometric(done, phase.std_first, phase.std_last))
    optimizer.zero_grad()
    nll = _data_loss(run, phase, inputs, targets)
    total, parts = nll, [nll.detach(), *nll.new_zeros(3)]
    if weights:
        tau1, tau2 = phase.tau1 * ramp(done, phase.tau1_ramp), phase.tau2 * ramp(done, phase.tau2_ramp)
        penalty = regularizer(weights, run.prior, tau1=tau1, tau2=tau2, n_data=run.n_data)
        total = nll + penalty.total
        parts[1:] = [part.detach() for part in penalty]
    total.backward()
    optimizer.step()
    return torch.stack(parts)


def _data_loss(run: _Run, phase: Phase, inputs: Tensor, targets: Tensor) -> Tensor:
    outputs = run.network(inputs)
    nll = run.loss(outputs, targets)
    if not phase.distillation or run.teacher is None:
        return nll
    temperature = phase.distillation_temperature
    dim = _class_dim(outputs, targets) or -1
    # One row an output: for `cross_entropy` the classes of larger tensors would lie in their second dimension.
    ours, theirs = (
        logits.movedim(dim, -1).flatten(0, -2) / temperature for logits in (outputs, run.teacher.outputs(inputs))
    )
    # Scaled by the squared temperature so that gradients keep their size (Hinton et al. 2015).
    imitation = F.cross_entropy(ours, F.softmax(theirs, dim=-1)) * temperature**2
    return (1 - phase.distillation) * nll + phase.distillation * imitation


def _optimizer(run: _Run, phase: Phase, weights: Sequence[VariationalWeight]) -> torch.optim.Optimizer:
    """Adam with one group for each kind of parameter."""
    variances = {id(weight.log_sigma2) for weight in weights}
    trained = [parameter for parameter in run.network.parameters() if parameter.requires_grad]
    means = [parameter for parameter in trained if id(parameter) not in variances]
    groups: list[dict[str, Any]] = [
        {"params": means, "lr": phase.rate_theta, "weight_decay": phase.weight_decay},
        {"params": [weight.log_sigma2 for weight in weights if phase.noise], "lr": phase.rate_log_sigma2},
    ]
    if run.prior is not None and phase.tau2:
        held = phase.std_first > 0
        groups += [
            {"params": [run.prior.means], "lr": phase.rate_means},
            {"params": [] if held else [run.prior.log_precisions], "lr": phase.rate_log_precisions},
            {"params": [run.prior.log_proportions], "lr": phase.rate_log_proportions},
        ]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]], fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _select_in(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter, Callable[[Tensor], Tensor]], None]:
    """Keeps the optimizer's state in step with parameters that lose rows and columns."""

    def select(parameter: nn.Parameter, selection: Callable[[Tensor], Tensor]) -> None:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = selection(value)

    return select


def _survivors(weights: Sequence[VariationalWeight]) -> Tensor:
    """The means that pruning would keep."""
    with torch.no_grad():
        kept = [w.theta[log_alpha(w.theta, w.log_sigma2) < PRUNING_LOG_ALPHA].flatten().float() for w in weights]
    return torch.cat(kept)


@torch.no_grad()
def _share_of_zeros(run: _Run, phase: Phase, weights: Sequence[VariationalWeight]) -> float:
    """The share of all weights that would be zero if the network were quantized now."""
    alive = 0
    for weight in weights:
        if phase.tau2 and run.prior is not None:
            alive += int(torch.count_nonzero(run.prior.assign(weight.theta)))
        else:
            alive += int((log_alpha(weight.theta, weight.log_sigma2) < PRUNING_LOG_ALPHA).sum())
    return 1 - alive / run.n_weights if run.n_weights else 0.0


def _check_finite(parts: Tensor, phase: Phase, epoch: int) -> None:
    if torch.isfinite(parts).all():
        return
    names = ("the data's loss", "the divergence", "the mixture", "the hyper-prior")
    culprits = [name for name, value in zip(names, parts.tolist(), strict=True) if not math.isfinite(value)]
    raise _not_finite(" and ".join(culprits), phase, epoch)


def _check_weights(run: _Run, phase: Phase, epoch: int) -> None:
    """The last step's loss says nothing of the weights it left."""
    for name, parameter in run.network.named_parameters():
        if not torch.isfinite(parameter.detach()).all():
            raise _not_finite(name, phase, epoch)


def _not_finite(what: str, phase: Phase, epoch: int) -> TrainingError:
    return TrainingError(
        f"phase {phase.name}, epoch {epoch + 1} of {phase.epochs}: {what} is no longer finite. "
        "Check the data for NaN, lower the phase's learning rates (--set "
        f"{phase.name}.rate_theta=…), or start from a network that is trained."
    )


@torch.no_grad()
def evaluate(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, cast: bool = False) -> float:
    """Share of examples whose largest output is the target's, with the weights at their means.

    Args:
        cast: give the network floating-point inputs in its own type. A file gives float32 back, whatever went in.
    """
    training = network.training
    network.eval()
    parameter = next(network.parameters())
    device = parameter.device
    right = torch.zeros((), dtype=torch.int64, device=device)
    total = 0
    for inputs, targets in _on_device(batches, device):
        with _running("evaluation"):
            inputs = inputs.to(parameter.dtype) if cast and inputs.is_floating_point() else inputs
            outputs = network(inputs)
            dim = _class_dim(outputs, targets)
            if dim is None:
                raise DataError(
                    f"accuracy needs a class for each target, but outputs are {tuple(outputs.shape)} and targets "
                    f"{tuple(targets.shape)}; for other tasks leave the validation data out"
                )
            right += (outputs.argmax(dim=dim) == targets).sum()
        total += targets.numel()
    network.train(training)
    if not total:
        raise DataError("there is nothing to evaluate on: the data gave no batch")
    return right.item() / total


def count_examples(batches: Iterable[Any]) -> int:
    """N: how many examples a pass over `batches` has; asks `batches`, its sampler or its dataset, or else counts."""
    if hasattr(batches, "n_examples"):
        return int(batches.n_examples)
    for source in (getattr(batches, "sampler", None), getattr(batches, "dataset", None)):
        if isinstance(source, Sized):
            return len(source)
    total = sum(len(checked_pair(batch)[1]) for batch in batches)
    if not total:
        raise DataError("the training data gave no batch; check the loader")
    return total


def _class_dim(outputs: Tensor, targets: Tensor) -> int | None:
    """The dimension of outputs that targets, as classes, lack: the last, or as for images the second."""
    if outputs.shape[:-1] == targets.shape:
        return -1
    return 1 if outputs.shape[:1] + outputs.shape[2:] == targets.shape else None


def checked_pair(batch: Any) -> tuple[Tensor, Tensor]:
    """A batch as (inputs, targets).

    Raises:
        DataError: it is something else.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    parts = ", ".join(type(part).__name__ for part in batch) if isinstance(batch, tuple | list) else ""
    raise DataError(
        f"a batch must be two tensors, (inputs, targets), not {type(batch).__name__}{f' of {parts}' if parts else ''}"
    )


def _count_batches(batches: Iterable[Any]) -> int:
    """How many batches a pass has; 1 where nobody knows. A loader of a stream has a length that raises."""
    try:
        return max(1, len(batches)) if isinstance(batches, Sized) else 1
    except TypeError:
        return 1


@contextlib.contextmanager
def _running(where: str) -> Iterator[None]:
    """What the caller's network or loss can't do with the caller's data, with a name on it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise TrainingError(
            f"{where}: the network or its loss fails on a batch; check that they fit the data. "
            f"{type(error).__name__}: {error}"
        ) from error


def _on_device(batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in batches:
        inputs, targets = checked_pair(batch)
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
