"""One step of training: the scheduled values at it, the loss in its parts, Adam."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bayeszip.fitting.batches import Inputs, in_parts, outputs_of
from bayeszip.fitting.engine import Engine, SingleProcess
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.schedules import SCHEDULES, geometric, ramp
from bayeszip.fitting.teacher import Teacher, imitation
from bayeszip.variational.layers import VariationalWeight
from bayeszip.variational.mixture import MixturePrior
from bayeszip.variational.objective import add_gradients

__all__ = ["PARTS", "Dials", "Loss", "Problem", "adam", "dials_at", "take_step"]

Loss = Callable[[Any, Any], Tensor]

#: The parts of the loss, as `take_step` returns them.
PARTS = ("the data's loss", "the divergence", "the mixture", "the hyper-prior")


#: What a step runs on if nothing is said.
ALONE = SingleProcess(torch.device("cpu"))


class Dials(NamedTuple):
    """What a phase schedules, at one step: numbers, or tensors on the device for a recorded step to read."""

    #: Factor on every learning rate.
    rate: float | Tensor
    tau1: float | Tensor
    tau2: float | Tensor
    #: Standard deviation at which the components are held; 0: they are not.
    std: float | Tensor


def dials_at(phase: Phase, done: float, strength: float = 1.0) -> Dials:
    """The dials when the share `done` of a phase is over.

    Args:
        strength: factor on τ₁, for whoever steers the size during training.
    """
    return Dials(
        SCHEDULES[phase.schedule](done),
        strength * phase.tau1 * ramp(done, phase.tau1_ramp),
        phase.tau2 * ramp(done, phase.tau2_ramp),
        geometric(done, phase.std_first, phase.std_last or phase.std_first) if phase.std_first else 0.0,
    )


@dataclass(frozen=True)
class Problem:
    """What is minimized over what."""

    network: nn.Module
    #: The network's Gaussian weights; none in pretraining.
    weights: Sequence[VariationalWeight]
    prior: MixturePrior | None
    teacher: Teacher | None
    loss: Loss
    #: N.
    n_data: int


def adam(problem: Problem, phase: Phase) -> torch.optim.Optimizer:
    """Adam with one group for each kind of parameter."""
    variances = {id(weight.log_sigma2) for weight in problem.weights}
    trained = [parameter for parameter in problem.network.parameters() if parameter.requires_grad]
    means = [parameter for parameter in trained if id(parameter) not in variances]
    groups: list[dict[str, Any]] = [
        {"params": means, "lr": phase.rate_theta, "weight_decay": phase.weight_decay},
        {"params": [weight.log_sigma2 for weight in problem.weights if phase.noise], "lr": phase.rate_log_sigma2},
    ]
    prior = problem.prior
    if prior is not None and phase.tau2:
        held = phase.std_first > 0
        groups += [
            {"params": [prior.means], "lr": phase.rate_means},
            {"params": [] if held else [prior.log_precisions], "lr": phase.rate_log_precisions},
            {"params": [prior.log_proportions], "lr": phase.rate_log_proportions},
        ]
    groups = [group for group in groups if group["params"]]
    on_gpu = any(parameter.is_cuda for parameter in trained)
    for group in groups:
        group["initial_lr"] = group["lr"]
        if on_gpu:
            # Read on the device, so that a recorded step can be replayed at another rate.
            group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    if prior is not None:
        prior.log_precisions.requires_grad_(not phase.std_first)
    return torch.optim.Adam(groups, fused=True, capturable=on_gpu)


def take_step(
    problem: Problem,
    phase: Phase,
    optimizer: torch.optim.Optimizer,
    dials: Dials,
    inputs: Inputs,
    targets: Inputs,
    inspect: Callable[[Tensor], None] | None = None,
    engine: Engine = ALONE,
) -> Tensor:
    """One step of Adam; returns the loss in its four parts, detached.

    Args:
        inspect: shown the parts when the gradients are there too, and before the weights move.
        engine: what it runs on; `inputs` and `targets` are this process's share of the batch.
    """
    set_dials(problem, phase, optimizer, dials)
    optimizer.zero_grad()
    parts = _backward(problem, phase, dials, inputs, targets, engine)
    if engine.processes > 1:
        engine.add_up([*_gradients(optimizer), parts])
    if inspect is not None:
        inspect(parts)
    optimizer.step()
    return parts


def _backward(problem: Problem, phase: Phase, dials: Dials, inputs: Inputs, targets: Inputs, engine: Engine) -> Tensor:
    """Gradients of this process's part of the loss; returns its four parts, detached."""
    losses = _data_losses(problem, phase, inputs, targets, engine)
    nll = next(losses, None)
    if nll is None:
        nll = torch.zeros((), device=next(problem.network.parameters()).device)
    data = nll.detach().float()
    if nll.requires_grad:
        nll.backward()
    for nll in losses:
        nll.backward()
        data = data + nll.detach().float()
    penalty: Sequence[Tensor] = [torch.zeros_like(data)] * 3
    if problem.weights:
        # Every process adds its part of the priors' gradient, so that the sum over all has it once.
        n_data = problem.n_data * engine.processes
        penalty = add_gradients(problem.weights, problem.prior, tau1=dials.tau1, tau2=dials.tau2, n_data=n_data)
    return torch.stack([data, *penalty])


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """One for each parameter; what this process's share did not touch has a gradient of 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad


def set_dials(problem: Problem, phase: Phase, optimizer: torch.optim.Optimizer, dials: Dials) -> None:
    """Turn rates and the components' width to where they are scheduled."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * dials.rate
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    if phase.std_first and problem.prior is not None:
        problem.prior.tighten(dials.std)


def _data_losses(problem: Problem, phase: Phase, inputs: Inputs, targets: Inputs, engine: Engine) -> Iterator[Tensor]:
    """The data's loss, part by part of this process's share, each weighted by what it is of the batch."""
    if not engine.weight:
        return
    taught: tuple[Inputs, ...] = ()
    if phase.distillation and problem.teacher is not None:
        with engine.autocast():
            taught = (problem.teacher.outputs(inputs),)
    for share, (part, answers, *lesson) in in_parts(engine.accumulate, inputs, targets, *taught):
        with engine.autocast():
            loss = _data_loss(problem, phase, part, answers, cast(Tensor, lesson[0]) if lesson else None)
        weight = share * engine.weight
        yield loss if weight == 1 else loss * weight


def _data_loss(problem: Problem, phase: Phase, inputs: Inputs, targets: Inputs, taught: Tensor | None) -> Tensor:
    outputs = outputs_of(problem.network, inputs)
    nll = problem.loss(outputs, targets)
    if taught is None:
        return nll
    copied = imitation(outputs, taught, targets, phase.distillation_temperature)
    return (1 - phase.distillation) * nll + phase.distillation * copied
