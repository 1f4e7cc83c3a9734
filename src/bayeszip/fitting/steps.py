"""One step of training along a course: the dials, the loss in its parts, the optimizer."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from bayeszip.fitting.batches import Batch, Inputs, called_with, in_parts, laid_out
from bayeszip.fitting.course import Course, Dials
from bayeszip.fitting.engine import Engine, SingleProcess

__all__ = ["optimizer_of", "take_step"]

#: Of stochastic gradient descent.
MOMENTUM = 0.9

#: What a step runs on if nothing is said.
ALONE = SingleProcess(torch.device("cpu"))


def optimizer_of(course: Course, rate_factor: float = 1.0) -> torch.optim.Optimizer:
    """What takes the phase's steps, with a group for each kind of parameter that it trains.

    Args:
        rate_factor: on all learning rates.
    """
    groups = course.groups()
    on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    for group in groups:
        group["initial_lr"] = group["lr"] * rate_factor
        if on_gpu:
            # Read on the device, so that a recorded step can be replayed at another rate.
            group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    if course.phase.optimizer == "sgd":
        # Fused: the only form of it that reads its rate on the device.
        return torch.optim.SGD(groups, momentum=MOMENTUM, nesterov=True, fused=True)
    return torch.optim.Adam(groups, fused=True, capturable=on_gpu)


def take_step(
    course: Course,
    optimizer: torch.optim.Optimizer,
    dials: Dials,
    batch: Batch,
    inspect: Callable[[Tensor], None] | None = None,
    engine: Engine = ALONE,
) -> Tensor:
    """One step of the optimizer; returns the loss in its parts, detached, as `course.parts` names them.

    Args:
        batch: this process's share of it.
        inspect: shown the parts when the gradients are there too, and before the weights move.
        engine: what it runs on.
    """
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * dials.rate
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    course.turn(dials)
    optimizer.zero_grad()
    parts = _backward(course, dials, batch, engine)
    if engine.processes > 1:
        engine.add_up([*_gradients(optimizer), parts])
    if inspect is not None:
        inspect(parts)
    optimizer.step()
    return parts


def _backward(course: Course, dials: Dials, batch: Batch, engine: Engine) -> Tensor:
    """Gradients of this process's part of the loss; returns its parts, detached."""
    losses = _data_losses(course, batch, engine)
    loss = next(losses, None)
    if loss is None:
        loss = torch.zeros((), device=next(course.network.parameters()).device)
    data = loss.detach().float()
    if loss.requires_grad:
        loss.backward()
    for loss in losses:
        loss.backward()
        data = data + loss.detach().float()
    return torch.stack([data, *course.add_gradients(dials, engine.processes).values()])


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """One for each parameter; what this process's share did not touch has a gradient of 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad


def _data_losses(course: Course, batch: Batch, engine: Engine) -> Iterator[Tensor]:
    """The data's loss, part by part of this process's share, each weighted by what it is of the batch."""
    if not batch.share:
        return
    with engine.autocast():
        batch = dataclasses.replace(batch, inputs=laid_out(batch.inputs))
    taught: tuple[Inputs, ...] = ()
    teacher = course.problem.teacher
    if course.phase.distillation and teacher is not None:
        with engine.autocast():
            said = teacher.outputs(batch)
        taught = () if said is None else (said,)
    for share, (inputs, targets, *lesson) in in_parts(engine.accumulate, batch.inputs, batch.targets, *taught):
        with engine.autocast():
            outputs = called_with(course.network, inputs)
            loss = course.problem.likelihood(outputs, targets)
            loss = course.blend(loss, outputs, cast(Tensor, lesson[0]) if lesson else None, targets)
        weight = share * batch.share
        yield loss if weight == 1 else loss * weight
