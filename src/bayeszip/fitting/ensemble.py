"""Networks of one architecture trained at once, as one batched model: seeds and settings side by side on a GPU.

A small network leaves a GPU waiting for its next order. Here the parameters of S networks lie as S rows of one matrix,
`vmap` runs the network over the rows, and every order concerns all of them:

    rows of each network's batch ──► outputs (S × batch × …) ──► S losses ──► gradient (S × D) ──► Adam, a row a network

Each network has its own order of batches, noise, teacher, mixture and settings; what a step consists of is the same.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bayeszip.data import Batches
from bayeszip.errors import DataError, ModelError, RecipeError, TrainingError
from bayeszip.fitting.loop import PRUNING_LOG_ALPHA, EpochStats, survivors
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.recorded import STEPS_AT_ONCE, WARM_UP, own_stream, record, reduced_precision, strides
from bayeszip.fitting.shared_values import Places, spread
from bayeszip.fitting.steps import Dials, dials_at
from bayeszip.tensors import QuantizedTensor
from bayeszip.variational.convert import to_variational
from bayeszip.variational.distributions import log_alpha, log_gamma_density
from bayeszip.variational.layers import VariationalLayer, on_triton, variational_weights
from bayeszip.variational.mixture import MixturePrior, components_of, mixtures_with_gradients
from bayeszip.variational.objective import kl_rows_with_slopes

__all__ = ["Member", "close_together", "fit_together"]

#: Adam's, as torch has them.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

#: Settings in which the members of an ensemble may differ; the others decide what a step consists of.
NUMBERS = frozenset(
    {"tau1", "tau2", "tau1_ramp", "tau2_ramp", "weight_decay", "distillation", "distillation_temperature", "schedule"}
    | {"rate_theta", "rate_log_sigma2", "rate_means", "rate_log_precisions", "rate_log_proportions"}
    | {"std_first", "std_last", "name", "compact_every"}
)


@dataclass
class Member:
    """One network of an ensemble, and what it is trained with; see `Fitting`."""

    network: nn.Module
    batches: Batches
    phases: Sequence[Phase]
    prior: MixturePrior | None = None
    #: The pretrained network's outputs for all rows of the data.
    taught: Tensor | None = None
    history: list[EpochStats] = field(default_factory=list)


def fit_together(
    members: Sequence[Member],
    *,
    n_data: int,
    validation: Batches | None = None,
    on_epoch: Callable[[], None] = lambda: None,
) -> None:
    """Train all members' networks and mixtures in place through their phases, which must be alike but for numbers.

    Rows and columns that die are computed to the end; the loss is the cross-entropy; batches may differ in their order.

    Raises:
        DataError: the members' batches are not of the same data and size.
        ModelError: the networks differ in their parameters, have buffers, or some that are not to be trained.
        RecipeError: the phases differ in more than numbers.
    """
    _check_same_data(members)
    for phases in zip(*(member.phases for member in members), strict=True):
        _Together(members, phases, n_data, validation).run(on_epoch)


def close_together(
    members: Sequence[Member],
    quantized: Sequence[Mapping[str, QuantizedTensor]],
    *,
    n_data: int,
    validation: Batches | None = None,
    on_epoch: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """Train the shared values of all members, whose weights take the given symbols; returns their codebooks.

    The members' networks are plain, all their parameters quantized with one codebook each.
    """
    _check_same_data(members)
    layout = _Layout.of(members)
    codebooks = [next(iter(tensors.values())).codebook for tensors in quantized]
    width = max(len(codebook) for codebook in codebooks) - 1
    symbols = np.stack([_symbols(layout, tensors) for tensors in quantized]).astype(np.int64)
    # The values of all members in one vector, those of each in a row.
    symbols = np.where(symbols > 0, symbols + width * np.arange(len(members))[:, None], 0)
    device = next(members[0].network.parameters()).device
    places = Places.of_symbols(symbols, 1 + width * len(members), device)
    rows = [torch.tensor(np.pad(codebook[1:], (0, width + 1 - len(codebook))), device=device) for codebook in codebooks]
    for phases in zip(*(member.phases for member in members), strict=True):
        together = _Together(members, phases, n_data, validation, rows, lambda values: spread(values.flatten(), places))
        together.run(on_epoch)
        rows = list(together.theta.values.detach())
    return [
        np.concatenate([[np.float32(0)], row.cpu().numpy()[: len(codebook) - 1]])
        for row, codebook in zip(rows, codebooks, strict=True)
    ]


def _symbols(layout: "_Layout", tensors: Mapping[str, QuantizedTensor]) -> np.ndarray:
    missing = [name for name in layout.names if name not in tensors]
    if missing:
        raise ModelError(f"{missing[0]} is not quantized; shared values are trained together where all weights are")
    return np.concatenate([tensors[name].symbols.ravel() for name in layout.names])


class _Rows:
    """Parameters of all members, a row each, with Adam's state and a learning rate for each row."""

    def __init__(self, rows: Sequence[Tensor], rates: Sequence[float], weight_decay: Sequence[float]) -> None:
        self.values = torch.stack([row.detach().float() for row in rows]).requires_grad_()
        self._first, self._second = torch.zeros_like(self.values), torch.zeros_like(self.values)
        self._rates = torch.tensor(rates, device=self.values.device)
        self._decay = torch.tensor(weight_decay, device=self.values.device)
        self._trained = any(rates)

    @torch.no_grad()
    def step(self, rate: Tensor, corrections: tuple[Tensor, Tensor]) -> None:
        """One step of Adam, at `rate` (a row each) times the row's own; `corrections`: 1 − β₁ᵗ and √(1 − β₂ᵗ)."""
        gradient = self.values.grad
        if gradient is None or not self._trained:
            return
        rates = self._rates * rate
        if on_triton(self.values):
            from bayeszip.variational.gpu_kernels import adam_step

            state = (self.values, gradient.contiguous(), self._first, self._second)
            adam_step(*state, rates, self._decay, corrections, (BETA1, BETA2), EPSILON)
            return
        gradient = gradient + self._decay.unsqueeze(1) * self.values
        self._first.lerp_(gradient, 1 - BETA1)
        self._second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        spread = (self._second.sqrt() / corrections[1]).add_(EPSILON)
        self.values.sub_(self._first / spread * (rates / corrections[0]).unsqueeze(1))


class _Together:
    """One phase of all members."""

    def __init__(
        self,
        members: Sequence[Member],
        phases: Sequence[Phase],
        n_data: int,
        validation: Batches | None,
        rows: Sequence[Tensor] | None = None,
        weights: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        #: From what is trained to the weights: themselves, or the places of shared values.
        self.weights = weights
        self.members, self.phases, self.n_data, self.validation = members, phases, n_data, validation
        self.phase = phases[0]
        self.network = _computing(members[0].network)
        self.device = next(self.network.parameters()).device
        self.layout = _Layout.of(members)
        _check_alike(phases)
        rate = [phase.rate_theta for phase in phases]
        self.theta = _Rows(rows or self.layout.rows("theta"), rate, [phase.weight_decay for phase in phases])
        self.log_sigma2: _Rows | None = None
        if self.layout.gaussian:
            rates = [phase.rate_log_sigma2 if phase.noise else 0.0 for phase in phases]
            self.log_sigma2 = _Rows(self.layout.rows("log_sigma2"), rates, [0.0] * len(members))
        self.mixtures = _Mixtures(members, phases) if self.phase.tau2 else None
        self.has_taught = any(phase.distillation for phase in phases)
        if self.has_taught:
            self._taught = torch.stack([_needed(member.taught) for member in members])
            self._share = self._column([phase.distillation for phase in phases])
            self._temperature = self._column([phase.distillation_temperature for phase in phases]).view(-1, 1, 1)
        self._row_of = torch.arange(len(members), device=self.device).unsqueeze(1)
        self.sums = torch.zeros(4, len(members), device=self.device)
        self._steps = torch.zeros((), device=self.device)

    def run(self, on_epoch: Callable[[], None]) -> None:
        with own_stream(self.device):
            self._run(on_epoch)

    def _run(self, on_epoch: Callable[[], None]) -> None:
        batches = self.members[0].batches
        full = batches.n_examples // batches.batch_size
        self._line = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._rows = torch.zeros(full, len(self.members), batches.batch_size, dtype=torch.int64, device=self.device)
        self._dials = torch.zeros(full, len(Dials._fields), len(self.members), device=self.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for layer in self.network.modules():
            if isinstance(layer, VariationalLayer):
                layer.noise = self.phase.noise
        for epoch in range(self.phase.epochs):
            began = time.perf_counter()
            self.sums.zero_()
            self._run_pass(epoch, full, len(batches))
            self._note(epoch, began, len(batches))
            on_epoch()
        self._write_back()

    def _run_pass(self, epoch: int, full: int, steps: int) -> None:
        batches = self.members[0].batches
        orders = torch.stack([_shuffled(member.batches) for member in self.members])
        size = batches.batch_size
        self._rows.copy_(orders[:, : full * size].view(len(self.members), full, size).transpose(0, 1))
        table = torch.tensor(
            [
                list(
                    zip(*(dials_at(phase, (epoch + step / steps) / phase.epochs) for phase in self.phases), strict=True)
                )
                for step in range(steps)
            ],
            device=self.device,
        )
        self._dials.copy_(table[:full])
        first = 0
        with reduced_precision():
            if not self._graphs and self.device.type == "cuda" and full > 2 * WARM_UP:
                first = WARM_UP
                for step in range(first):
                    self._take(self._dials[step], self._rows[step])
                self._graphs = {count: record(self._take_next, count) for count in (1, STEPS_AT_ONCE)}
            self._line.fill_(first)
            for step, done in strides(first, full, STEPS_AT_ONCE if self._graphs else 1):
                if self._graphs:
                    self._graphs[done - step].replay()
                else:
                    self._take_next()
            if full < steps:
                self._take(table[full], orders[:, full * size :])

    def _take_next(self) -> None:
        dials, rows = self._dials.index_select(0, self._line)[0], self._rows.index_select(0, self._line)[0]
        self._line += 1
        self._take(dials, rows)

    def _take(self, dials: Tensor, rows: Tensor) -> None:
        """A step of every member, on the rows of its batch."""
        rate, tau1, tau2, std = dials
        stacks = [self.theta, *([self.log_sigma2] if self.log_sigma2 else [])]
        for stack in stacks:
            stack.values.grad = None
        batches = self.members[0].batches
        losses = self._losses(batches.inputs[rows], batches.targets[rows], rows)
        losses.sum().backward()
        parts = [losses.detach(), *torch.zeros(3, len(losses), device=self.device)]
        if self.log_sigma2 is not None and self.phase.tau1:
            parts[1] = self._add_divergence(tau1 / self.n_data)
        if self.mixtures is not None:
            parts[2], parts[3] = self.mixtures.add_gradients(self._gaussian(), self.theta, tau2 / self.n_data, std)
        self._steps += 1
        corrections = 1 - BETA1**self._steps, (1 - BETA2**self._steps).sqrt()
        for stack in (*stacks, *(self.mixtures.trained() if self.mixtures else ())):
            stack.step(rate, corrections)
        self.sums += torch.stack(parts)

    def _losses(self, inputs: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
        self.network.train()
        outputs = self._outputs(inputs, 0)
        losses = vmap(F.cross_entropy)(outputs, targets)
        if not self.has_taught:
            return losses
        taught = self._taught[self._row_of, rows]
        soft = torch.log_softmax(outputs / self._temperature, dim=-1)
        copied = -(torch.softmax(taught / self._temperature, dim=-1) * soft).sum(dim=-1).mean(dim=-1)
        # Scaled by the squared temperature so that gradients keep their size.
        return (1 - self._share) * losses + self._share * copied * self._temperature.flatten().square()

    def _outputs(self, inputs: Tensor, of_members: int | None) -> Tensor:
        """S × batch × …, each member on its own inputs (`of_members` 0) or all on the same (None)."""
        parameters = self.layout.parameters(
            self.weights(self.theta.values), self.log_sigma2.values if self.log_sigma2 else None
        )

        def one(values: dict[str, Tensor], batch: Tensor) -> Tensor:
            outputs: Tensor = functional_call(self.network, values, (batch,))
            return outputs

        return vmap(one, in_dims=(0, of_members), randomness="different")(parameters, inputs)

    def _gaussian(self) -> Tensor:
        """The means that have a deviation; they come first."""
        return self.theta.values.detach()[:, : self.layout.gaussian].contiguous()

    def _add_divergence(self, scale: Tensor) -> Tensor:
        log_sigma2 = self.log_sigma2
        if log_sigma2 is None:  # never: asked for with deviations only
            raise TypeError("no deviations")
        value, by_theta, by_log_sigma2 = kl_rows_with_slopes(self._gaussian(), log_sigma2.values.detach(), scale)
        _gradient(self.theta)[:, : self.layout.gaussian] += by_theta
        _gradient(log_sigma2).add_(by_log_sigma2)
        return value

    @torch.no_grad()
    def _note(self, epoch: int, began: float, steps: int) -> None:
        """What the epoch came to, for each member."""
        means = (self.sums / steps).tolist()
        if not torch.isfinite(self.theta.values).all():
            raise TrainingError(
                f"phase {self.phase.name}, epoch {epoch + 1}: weights are no longer finite; lower the rates"
            )
        accuracies = self._accuracies()
        zeros = self._zeros()
        for index, (member, phase) in enumerate(zip(self.members, self.phases, strict=True)):
            member.history.append(
                EpochStats(
                    phase=phase.name,
                    epoch=epoch + 1,
                    epochs=phase.epochs,
                    seconds=(time.perf_counter() - began) / len(self.members),
                    nll=means[0][index],
                    kl=means[1][index],
                    mixture=means[2][index],
                    hyper_prior=means[3][index],
                    accuracy=accuracies[index] if accuracies else None,
                    zeros=zeros[index],
                    weights_computed=self.layout.gaussian,
                )
            )

    def _accuracies(self) -> list[float]:
        if self.validation is None:
            return []
        self.network.eval()
        right = torch.zeros(len(self.members), device=self.device)
        for inputs, targets in self.validation:
            right += (self._outputs(inputs, None).argmax(dim=-1) == targets).sum(dim=-1)
        return (right / self.validation.n_examples).tolist()

    def _zeros(self) -> list[float]:
        """For each member the share of Gaussian weights that would be zero if it were quantized now, as in `fit`."""
        if self.log_sigma2 is None:
            return [0.0] * len(self.members)
        if self.mixtures is not None:
            self.mixtures.write_back()
            return self.mixtures.zeros(self._gaussian())
        alive = log_alpha(self._gaussian(), self.log_sigma2.values) < PRUNING_LOG_ALPHA
        return (1 - alive.float().mean(dim=1)).tolist()

    @torch.no_grad()
    def _write_back(self) -> None:
        self.layout.write(self.weights(self.theta.values), self.log_sigma2.values if self.log_sigma2 else None)
        if self.mixtures is not None:
            self.mixtures.write_back()

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self.device)


class _Mixtures:
    """The members' mixtures, a row each."""

    def __init__(self, members: Sequence[Member], phases: Sequence[Phase]) -> None:
        self.priors = [_needed(member.prior) for member in members]
        if phases[0].reseed:
            for member, prior in zip(members, self.priors, strict=True):
                prior.reseed(survivors(tuple(variational_weights(member.network))))
        nothing = [0.0] * len(members)
        self.means = _Rows([p.means for p in self.priors], [phase.rate_means for phase in phases], nothing)
        precisions = [0.0 if phase.std_first else phase.rate_log_precisions for phase in phases]
        self.log_precisions = _Rows([p.log_precisions for p in self.priors], precisions, nothing)
        self.log_proportions = _Rows(
            [p.log_proportions for p in self.priors], [phase.rate_log_proportions for phase in phases], nothing
        )
        self.held = phases[0].std_first > 0
        self.log_precisions.values.requires_grad_(not self.held)
        self.hyper_rate = torch.stack([prior.hyper_rate for prior in self.priors]).unsqueeze(1)

    def trained(self) -> tuple[_Rows, ...]:
        return self.means, self.log_precisions, self.log_proportions

    def add_gradients(
        self, means_of_weights: Tensor, theta: _Rows, weight: Tensor, std: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds those of −`weight` × (log GM + log Gamma) to θ and ψ; returns both parts, a value a member."""
        for stack in self.trained():
            stack.values.grad = None
        if self.held:
            with torch.no_grad():
                self.log_precisions.values.copy_((-2 * std.log()).unsqueeze(1).expand_as(self.log_precisions.values))
        free = (self.means.values, self.log_precisions.values, self.log_proportions.values)
        components = components_of(*free, self.priors[0].zero_proportion)
        value, by_components, by_theta = mixtures_with_gradients(means_of_weights, components, -weight)
        _gradient(theta)[:, : by_theta.shape[1]] += by_theta
        wanted = [index for index, part in enumerate(components) if part.requires_grad]
        torch.autograd.backward([components[i] for i in wanted], [by_components[i] for i in wanted])
        if self.held:
            return value, torch.zeros_like(value)
        density = log_gamma_density(self.log_precisions.values, self.priors[0].hyper_shape, self.hyper_rate)
        hyper_prior = density.sum(dim=1) * -weight
        hyper_prior.sum().backward()
        return value, hyper_prior.detach()

    @torch.no_grad()
    def zeros(self, means_of_weights: Tensor) -> list[float]:
        """For each member the share of weights whose component is that of zero, by the mixtures as written back."""
        rows = zip(self.priors, means_of_weights, strict=True)
        return [1 - torch.count_nonzero(prior.assign(row)).item() / row.numel() for prior, row in rows]

    @torch.no_grad()
    def write_back(self) -> None:
        for row, prior in enumerate(self.priors):
            if self.held:
                # The hyper-prior's mode moves along.
                prior.tighten((-0.5 * self.log_precisions.values[row, 0]).exp())
            prior.means.copy_(self.means.values[row])
            prior.log_precisions.copy_(self.log_precisions.values[row])
            prior.log_proportions.copy_(self.log_proportions.values[row])


@dataclass(frozen=True)
class _Layout:
    """Where each parameter of a network lies in a row: Gaussian means first, in the order of their deviations."""

    networks: tuple[nn.Module, ...]
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    #: How many Gaussian means there are.
    gaussian: int
    deviations: tuple[str, ...]

    @classmethod
    def of(cls, members: Sequence[Member]) -> "_Layout":
        networks = tuple(member.network for member in members)
        named = [dict(network.named_parameters()) for network in networks]
        shapes = {name: parameter.shape for name, parameter in named[0].items()}
        if any({name: p.shape for name, p in other.items()} != shapes for other in named):
            raise ModelError("networks trained together must have the same parameters")
        if not all(parameter.requires_grad for own in named for parameter in own.values()):
            raise ModelError("networks with frozen parameters can't be trained together")
        if any(True for _ in networks[0].buffers()):
            raise ModelError("networks with buffers, such as running statistics, can't be trained together")
        first = [weight.name for weight in variational_weights(networks[0])]
        deviations = tuple(f"{name}_log_sigma2" for name in first)
        names = (*first, *(name for name in shapes if name not in first and name not in deviations))
        gaussian = sum(shapes[name].numel() for name in first)
        return cls(networks, names, tuple(shapes[name] for name in names), gaussian, deviations)

    def rows(self, kind: str) -> list[Tensor]:
        names = self.names if kind == "theta" else self.deviations
        parameters = [dict(network.named_parameters()) for network in self.networks]
        return [torch.cat([own[name].detach().flatten() for name in names]) for own in parameters]

    def parameters(self, theta: Tensor, log_sigma2: Tensor | None) -> dict[str, Tensor]:
        """The matrices as tensors of S rows each, by name."""
        parts = dict(zip(self.names, _cut(theta, self.shapes), strict=True))
        if log_sigma2 is not None:
            parts |= zip(self.deviations, _cut(log_sigma2, self.shapes[: len(self.deviations)]), strict=True)
        return parts

    def write(self, theta: Tensor, log_sigma2: Tensor | None) -> None:
        """Every row into the parameters of its network."""
        stacked = self.parameters(theta, log_sigma2)
        for row, network in enumerate(self.networks):
            for name, parameter in network.named_parameters():
                if name in stacked:
                    parameter.copy_(stacked[name][row])


def _computing(network: nn.Module) -> nn.Module:
    """The network that computes for all: variational layers, which can do so faster; without noise if it has none."""
    if any(isinstance(layer, VariationalLayer) for layer in network.modules()):
        return network
    copied = copy.deepcopy(network)
    to_variational(copied)
    for layer in copied.modules():
        if isinstance(layer, VariationalLayer):
            layer.weight_log_sigma2 = layer.bias_log_sigma2 = None
    return copied


def _cut(matrix: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = matrix.split([shape.numel() for shape in shapes], dim=1)
    return [part.view(len(matrix), *shape) for part, shape in zip(parts, shapes, strict=True)]


def _gradient(rows: _Rows) -> Tensor:
    if rows.values.grad is None:
        rows.values.grad = torch.zeros_like(rows.values)
    return rows.values.grad


def _shuffled(batches: Batches) -> Tensor:
    order, _ = batches.begin_pass()
    batches.end_pass()
    return torch.arange(batches.n_examples, device=batches.inputs.device) if order is None else order


def _check_same_data(members: Sequence[Member]) -> None:
    first = members[0].batches
    for member in members:
        other = member.batches
        same = other.inputs is first.inputs and other.targets is first.targets
        if not same or other.batch_size != first.batch_size:
            raise DataError("networks are trained together on the same data, in batches of one size")


def _check_alike(phases: Sequence[Phase]) -> None:
    def kind(phase: Phase) -> dict[str, object]:
        fixed = {name: value for name, value in vars(phase).items() if name not in NUMBERS}
        return fixed | {name: getattr(phase, name) > 0 for name in ("tau1", "tau2", "std_first")}

    if any(kind(phase) != kind(phases[0]) for phase in phases):
        raise RecipeError(f"phases trained together may differ in numbers only; these do more: {phases[0].name}")


def _needed(value: Any) -> Any:
    if value is None:
        raise RecipeError(
            "τ₂ needs a mixture prior, and distillation the pretrained network's outputs, of every member"
        )
    return value
