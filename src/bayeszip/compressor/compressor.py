"""The object for a training loop of one's own.

    compressor = Compressor(model, "quick", n_data=len(dataset))       Gaussian weights in place, terms beside them
    optimizer = torch.optim.Adam(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)                                 the recipe's learning rates, phase by phase

    for inputs, targets in batches:                                    for compressor.total_steps steps
        loss = F.cross_entropy(model(inputs), targets) + compressor.regularizer()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        compressor.step()                                              once after each step of the optimizer

    result = compressor.finalize(example_inputs=(inputs[:2],))         the model is plain again, with shared values

Data-parallel: make the Compressor first, on every rank alike, then wrap the model; the terms stay outside, and since
the regularizer has the same gradient everywhere, so do all ranks. `torch.compile` the model as usual.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.damage import findings, reach_of
from bayeszip.ending import (
    BesideWeights,
    Ending,
    bytes_now,
    check_curvature,
    check_trials,
    clustered_others,
    prices_of_zeros,
)
from bayeszip.errors import CheckpointError, ModelError, RecipeError, TrainingError
from bayeszip.fitting import (
    Course,
    Figures,
    Judge,
    Likelihood,
    Metric,
    Phase,
    Watcher,
    count_examples,
    fit,
    start_terms,
)
from bayeszip.fitting.batches import (
    Loader,
    called_with,
    checked_batch,
    checked_loader,
    examples_from,
    given_by,
    in_order,
    named_arguments,
    running,
)
from bayeszip.fitting.checkpoint import differences
from bayeszip.fitting.course import MEANS, RATE, Dials, Problem, groups_of, is_in_force, is_pruning
from bayeszip.fitting.finite import terms_not_finite, weights_not_finite
from bayeszip.fitting.likelihood import Loss
from bayeszip.fitting.outputs import names_in, predictions
from bayeszip.fitting.state import load_module_state, module_state
from bayeszip.fitting.statistics import renew_statistics, undisturbed
from bayeszip.fitting.teacher import check_alike, check_imitated, in_words, known_teacher
from bayeszip.graph import begin_even
from bayeszip.graph.storable import check_storable, copied, unwrapped
from bayeszip.modes import evaluating
from bayeszip.posterior import Posterior
from bayeszip.recipe import Recipe
from bayeszip.recipe import recipe as named_recipe
from bayeszip.result import Fit, Form, Result, check_examples
from bayeszip.settings import to_dict
from bayeszip.snapping import curvatures_if_any, moments_if_any
from bayeszip.targets import Target
from bayeszip.variational import Rate, Term, check_materialized, to_stock, to_variational, variational_weights
from bayeszip.variational.usage import called_layers

__all__ = ["Compressor", "CompressorStats"]

#: Steps between two looks for numbers that are not finite, on a GPU.
CHECK_EVERY = 50
#: What a recipe says of what comes after the last step.
_OF_THE_ENDING = ("quantization", "closing", "reassign", "coding")
#: How far variances are to get, in units of how far they must, and the rate that is never exceeded for it.
WELL_REACHED, FASTEST = 2.0, 0.05


@dataclass(frozen=True)
class CompressorStats:
    """Where a compression stands."""

    phase: str
    #: Steps of the optimizer so far, and in all.
    step: int
    steps: int
    #: The weights of the terms in force, by name.
    taus: Mapping[str, float]
    #: Factor on the recipe's learning rates.
    rate: float
    #: Share of the Gaussian weights that would be zero if the network were quantized now.
    zeros: float
    #: What a file would take now, all of it if example inputs are known; else without its graph, which adds some ten
    #: bytes an operator.
    bytes: int

    @property
    def progress(self) -> float:
        """The share of the schedule that is over."""
        return min(1.0, self.step / self.steps)


class _Stretch(NamedTuple):
    """A phase and the steps that it takes."""

    phase: Phase
    first: int
    steps: int


class Compressor:
    """Makes a network small inside a training loop of one's own. The network's weights become Gaussian in place.

    Only the recipe's phases are gone through: the network comes pretrained. Layers are not compacted on the way, since
    the optimizer is the caller's.

    Args:
        model: a trained network, before it is wrapped (DDP) and before the optimizer is made.
        recipe: a name, a path to a JSON file, or a `Recipe`.
        n_data: N, how many training examples there are.
        batch_size: examples a step of the optimizer, over all ranks and accumulated batches; by default the recipe's.
            With N it says how many steps an epoch of the recipe has.
        steps_per_epoch: says that outright.
        total_steps: or how many steps there will be in all; the phases share them in proportion to their epochs, and
            where they are few, variances are trained faster than the recipe has it, so that they get where they must.
        loss: which kind of loss the loop has, by name or as it is: for `nats`, `distill` and the closing phase.
        example_inputs: the network's inputs, to trace it with, or a batch that holds them; `finalize` takes them too,
            but a recipe with `start_size`, such as `deep`, needs them here.
        teacher: whose outputs `distill` and the closing phase imitate, where it is not `model` as it came: a larger or
            better network with the same inputs and outputs. It is no part of `state_dict()`; give it again.

    Raises:
        ModelError: no layer can be compressed, or a tensor can't be worked with; names it.
        RecipeError: the recipe has no phase to go through, or a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str | Recipe = "vd+sws",
        *,
        n_data: int,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        total_steps: int | None = None,
        loss: str | Loss = F.cross_entropy,
        example_inputs: Any = None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.recipe = named_recipe(recipe).scaled()
        _check_count("n_data", n_data)
        self.model, self.n_data = _bare(model), n_data
        self._stretches = _stretches(self.recipe, n_data, batch_size, steps_per_epoch, total_steps)
        self._haste = 1.0 if total_steps is None else _haste(self._stretches)
        self._likelihood, self._examples = Likelihood.of(loss), example_inputs
        self._began = time.perf_counter()
        _check_tensors(self.model)
        settings, phases = self.recipe, (*self.recipe.phases, self.recipe.closing)
        if settings.quantization.curvature and not settings.quantization.rate:
            raise RecipeError(
                f"{settings.name}: quantization.curvature says what moves cost that save bits; set quantization.rate, "
                "or set it to 0"
            )
        examples = self._example_inputs(None)
        self._tutor = known_teacher(teacher, self.model, phases, examples)
        #: Whether anything was learnt from it.
        self._is_taught = False
        self._original: nn.Module | None = None
        if any(phase.distillation for phase in phases):
            self._original = copied(self.model).eval().requires_grad_(False)
        if settings.start_size and examples is not None:
            begin_even(self.model, examples, settings.start_size)
        elif settings.start_size:
            message = (
                f"{settings.name} would bring weights before norms to one size (start_size), and can't tell without "
                "inputs which these are; give example_inputs, or set start_size=0"
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        self.conversion = to_variational(
            self.model,
            log_sigma2=settings.start_log_sigma2,
            biases=settings.biases,
            selection=settings.layers,
            called=None if examples is None else called_layers(self.model, examples),
        )
        self._weights = tuple(variational_weights(self.model))
        #: The terms of the objective, which hold what is trained beside the model.
        self.terms = start_terms(self.model, settings.phases, {**settings.starts, Rate.name: prices_of_zeros})
        #: Factor on τ₁, for whoever wants to steer.
        self.strength = 1.0
        self._step = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._finalized = False
        self._beside: BesideWeights | None = None
        self._course = self._new_course()
        self._course.enter()
        self._course.begin()
        self._course.renew(0)
        self._apply_dials()

    # How far it is

    @property
    def total_steps(self) -> int:
        """Steps of the optimizer until the schedule is over."""
        return self._stretches[-1].first + self._stretches[-1].steps

    @property
    def phase(self) -> Phase:
        """The phase at hand; after the schedule, its last."""
        return self._stretch.phase

    @property
    def _stretch(self) -> _Stretch:
        return next((s for s in self._stretches if self._step < s.first + s.steps), self._stretches[-1])

    @property
    def _dials(self) -> Dials:
        stretch = self._stretch
        done = min(1.0, (self._step - stretch.first) / stretch.steps)
        return self._course.dials_at(done, self.strength)

    def _epoch(self, step: int) -> int:
        """How many epochs of the phase at hand are over at a step; −1 before it."""
        stretch = self._stretch
        return (step - stretch.first) * max(1, stretch.phase.epochs) // stretch.steps

    def _new_course(self) -> Course:
        """The phase in force at this step."""
        problem = Problem(self.model, self._weights, self.terms, None, self._likelihood, self.n_data)
        return Course(problem, self.phase)

    # What a loop calls

    def plan(self, *, n_data: int, total_steps: int) -> None:
        """Set the length of the training after the fact, for trainers that tell it late; before the first step."""
        self._check_open("plan")
        if self._step:
            raise TrainingError("plan() comes before the first step")
        _check_count("n_data", n_data)
        self.n_data = n_data
        self._stretches = _stretches(self.recipe, n_data, None, None, total_steps)
        self._haste = _haste(self._stretches)
        self._course = self._new_course()
        self._apply_dials()

    def parameter_groups(self, *, weights: bool = True) -> list[dict[str, Any]]:
        """What is to be trained, for an optimizer, with the learning rates that the recipe begins with.

        Args:
            weights: False: variances and terms alone, for those who have an optimizer for the weights already.
        """
        groups = [*([self._course.means()] if weights else []), *self._own_groups()]
        return [{**group, "lr": self._rate(group[RATE])} for group in groups]

    def set_rates_of(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on set rates and weight decay of the optimizer's groups that came from here, phase by phase.

        Raises:
            RecipeError: the optimizer lacks something that is to be trained.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._own_parameters():
            if id(parameter) not in held:
                raise RecipeError(f"the optimizer lacks {name}; make it from parameter_groups()")
        self._optimizers.append(optimizer)
        self._set_rates()

    @torch.compiler.disable
    def regularizer(self) -> Tensor:
        """What to add to the mean loss of a batch: (τ₁ KL − τ₂ log GM − …)/N, scheduled; a float32 scalar.

        Raises:
            TrainingError: the network was finalized.
        """
        self._check_open("regularizer")
        device = self._weights[0].theta.device
        for term in self.terms:
            # The model may have been moved since.
            term.to(device)
        # Where a ramp begins nothing weighs anything yet; a loop takes its gradient all the same.
        total = torch.zeros((), device=device, requires_grad=True)
        for part in self._course.regularizer(self._dials).values():
            total = total + part
        return total

    def add_gradients(self) -> None:
        """Add the gradients of `regularizer()` to those there are: for trainers that keep the loss to themselves.

        Call it once before each step of the optimizer, when gradients are reduced and unscaled.
        """
        total = self.regularizer()
        trained = [part for weight in self._weights for part in (weight.theta, weight.log_sigma2)]
        trained += [parameter for term in self.terms for parameter in term.parameters()]
        trained = [parameter for parameter in trained if parameter.requires_grad]
        if not trained:
            return
        # Not `backward`: a data-parallel wrapper would take these for the gradients of another batch.
        for parameter, gradient in zip(trained, torch.autograd.grad(total, trained, allow_unused=True), strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def measure_noise(self, loader: Loader) -> None:
        """Before the first step: let `nats` weigh the loss by what the network leaves of this data unexplained."""
        self._check_open("measure_noise")
        if self._step:
            raise TrainingError("measure_noise() comes before the first step, while the network is as it came")
        self._likelihood = self._likelihood.estimated(self.model, loader)
        self._course = self._new_course()

    def nats(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of a batch in nats per example, the unit of the regularizer; after `measure_noise`."""
        return self._likelihood(outputs, targets)

    @property
    def _teacher(self) -> nn.Module | None:
        """Whom it learns from; None: the recipe asks nobody."""
        return self._original if self._tutor is None else self._tutor

    def distill(self, loss: Tensor, outputs: Any, *inputs: Tensor, targets: Any = None) -> Tensor:
        """Your loss of a batch, mixed with the imitation of the teacher, where the phase asks for that.

        Args:
            loss: yours, of these outputs.
            outputs: what the model says to `inputs`.
            targets: needed where it is not clear which dimension of the outputs has the classes.
        """
        teacher = self._teacher
        if not self.phase.distillation or teacher is None:
            return loss
        with torch.no_grad(), running("the teacher"):
            taught = predictions(called_with(teacher.to(loss.device), inputs))
        if self._tutor is not None:
            check_alike(taught, predictions(outputs))
        self._is_taught = True
        return self._course.blend(loss, outputs, taught, targets, needed=self._tutor is not None)

    def step(self) -> None:
        """Go one step on in the schedule; once after each step of the optimizer, however many batches that took.

        Raises:
            TrainingError: a weight is no longer finite; names it. On a GPU, which would have to wait for the answer,
                that is asked each `CHECK_EVERY` steps.
        """
        self._check_open("step")
        self._step += 1
        if self._weights[0].theta.device.type == "cpu" or self._step % CHECK_EVERY == 0:
            self._check_finite()
        if self.phase is not self._course.phase:
            self._course = self._new_course()
            self._course.enter()
            self._course.begin()
        epoch = self._epoch(self._step)
        if self._epoch(self._step - 1) != epoch < self.phase.epochs:
            self._course.renew(epoch)
        self._apply_dials()

    @torch.no_grad()
    def stats(self) -> CompressorStats:
        """Where it stands; quantizes and codes the weights, so not for every step."""
        self._check_open("stats")
        course, dials = self._course, self._dials
        return CompressorStats(
            phase=self.phase.name,
            step=self._step,
            steps=self.total_steps,
            taus={term.name: float(tau) for term, tau in zip(course.terms, dials.taus, strict=True)},
            rate=float(dials.rate),
            zeros=course.share_of_zeros(sum(weight.theta.numel() for weight in self._weights)),
            bytes=bytes_now(course, self.recipe) + self._beside_weights().now(self.model),
        )

    def _beside_weights(self) -> BesideWeights:
        if self._beside is None:
            plain = to_stock(copied(self.model)).cpu().eval()
            shapes = {weight.name: tuple(weight.theta.shape) for weight in self._weights}
            form = Form(plain, self._example_inputs(None), self.recipe.coding, clustered_others)
            self._beside = BesideWeights(form, shapes, self.recipe)
        return self._beside

    def _example_inputs(self, given: Any) -> tuple[Tensor, ...] | None:
        """Those that were given now, or when it was made."""
        given = self._examples if given is None else given
        if given is None:
            return None
        examples = examples_from(self.model, given)
        check_examples(self.model, examples)
        return examples

    def _check_finite(self) -> None:
        culprit = weights_not_finite(self.model) or terms_not_finite(self.terms)
        if culprit is not None:
            raise TrainingError(
                f"phase {self.phase.name}, step {self._step}: {culprit} is no longer finite. Check the data for NaN, "
                "clip the gradients, or lower the learning rates."
            )

    # Saving and going on

    def state_dict(self, *, model: bool = True) -> dict[str, Any]:
        """All that the rest of the compression depends on but the optimizer: tensors and plain values, no pickle.

        Args:
            model: False: without the model's tensors, for those who save them anyway.
        """
        self._check_open("state_dict")
        return {
            "step": self._step,
            "strength": self.strength,
            "conditions": self._conditions(),
            "model": module_state(self.model) if model else None,
            "terms": {term.name: module_state(term) for term in self.terms},
            "teacher": None if self._original is None else module_state(self._original),
            "noise": [self._likelihood.weight, self._likelihood.closeness],
            "taught": self._is_taught,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, in a Compressor made for the same network and recipe.

        What a recipe says of the ending (quantization, the closing phase, coding) may have changed.

        Raises:
            CheckpointError: it is of another network, recipe or schedule; says what differs.
        """
        self._check_open("load_state_dict")
        missing = {"step", "strength", "conditions", "model", "terms", "teacher"} - set(state)
        if missing:
            raise CheckpointError(f"this is not the state of a Compressor: it lacks {', '.join(sorted(missing))}")
        conditions = {**state["conditions"], "recipe": _of_training(state["conditions"]["recipe"])}
        found = differences(conditions, self._conditions())
        if found:
            raise CheckpointError("the state is of another compression:\n  " + "\n  ".join(found[:12]))
        for module, held in ((self.model, state["model"]), (self._original, state["teacher"])):
            if module is not None and held is not None:
                load_module_state(module, held)
        for term in self.terms:
            load_module_state(term, state["terms"][term.name])
        self._step, self.strength = int(state["step"]), float(state["strength"])
        self._is_taught = bool(state.get("taught", True))
        if "noise" in state:
            weight, closeness = state["noise"]
            self._likelihood = dataclasses.replace(self._likelihood, weight=weight, closeness=closeness)
        self._course = self._new_course()
        self._course.enter()
        self._apply_dials()

    # The end

    def finalize(
        self,
        *,
        example_inputs: Any = None,
        train_loader: Loader | None = None,
        val_loader: Loader | None = None,
        loss: str | Loss | None = None,
        metric: Any = None,
        max_bytes: int | None = None,
    ) -> Result:
        """Quantize the network, drop what is dead, prove that it computes the same, and code it.

        The model is plain again afterwards, its weights at their shared values, and this object is used up; where it
        fails, both are as they were, and it can be called anew. Where several ranks train, one is enough.

        Args:
            example_inputs: the network's inputs, to trace it with, or a batch that holds them; without, the file holds
                tensors only.
            train_loader: for the recipe's closing phase, which trains the shared values, and for weights that take
                them together; without, both are left out.
            val_loader: for the figures in the report; those before are of the network as it was, if the recipe has
                distillation.
            loss: mean over a batch, from outputs and targets; by default that of the Compressor.
            metric: a further figure, as for `compress`.
            max_bytes: trim the network so that the file has at most so many bytes.

        Raises:
            TrainingError: `step()` was never called.
            TargetError: `max_bytes` is out of reach, whatever is trimmed.
        """
        self._check_open("finalize")
        if not self._step:
            raise TrainingError("step() was never called; call it once after each step of the optimizer")
        if self._step < self.total_steps:
            message = f"finalized after {self._step:,} of {self.total_steps:,} steps: the schedule was not over"
            warnings.warn(message, UserWarning, stacklevel=2)
        budget = None if max_bytes is None else Target(max_bytes=max_bytes).max_bytes
        for name, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
            if loader is not None:
                checked_loader(loader, name)
        if self.recipe.quantization.rate_trials:
            check_trials(val_loader, budget)
        if self.recipe.quantization.curvature:
            check_curvature(train_loader, budget, (self.recipe.quantization.rate,))
        self._check_finite()
        judge = Judge(self._likelihood_of(loss), Metric.of(metric))
        self._check_closing(train_loader, judge)
        # On a copy: what fails half way, at a target or in somebody's data, is not to cost the training.
        network = to_stock(copied(self.model)).eval()
        result = self._ended(network, self._example_inputs(example_inputs), train_loader, val_loader, judge, budget)
        load_module_state(to_stock(self.model).eval(), module_state(network))
        self._finalized = True
        return result

    def _ended(
        self,
        network: nn.Module,
        examples: tuple[Tensor, ...] | None,
        train_loader: Loader | None,
        val_loader: Loader | None,
        judge: Judge,
        budget: int | None,
    ) -> Result:
        """The file; `network`, the model as a plain one, takes its weights."""
        posterior = Posterior.of(self.model, self._trained_terms())
        how, judged = self.recipe.quantization_of(posterior), self._judging(val_loader, judge)
        before = Figures() if self._original is None else judged(self._original)
        ending = Ending(
            network,
            examples,
            self.recipe,
            None if train_loader is None else partial(self._close, train_loader, judge),
            judged,
            None if train_loader is None else partial(renew_statistics, loader=train_loader),
            in_place=True,
            see=None if train_loader is None else partial(curvatures_if_any, loader=train_loader, warn=warnings.warn),
            watch=None if train_loader is None else partial(moments_if_any, loader=train_loader, warn=warnings.warn),
        )
        result = ending.as_set(posterior, how) if budget is None else ending.within(budget, posterior, how)
        result = dataclasses.replace(result, trained=judged(self.model))
        return self._delivered(result, budget, before, judge)

    def _likelihood_of(self, loss: str | Loss | None) -> Likelihood:
        """That of the loop, with the noise that was measured, unless the loss is another one."""
        given = self._likelihood if loss is None else Likelihood.of(loss)
        return self._likelihood if given.function == self._likelihood.function else given

    def judge_on(self, val_loader: Loader, metric: Any = None) -> Figures:
        """What the network comes to now on this data, with its weights at their means: not yet pruned and snapped."""
        return self._judging(val_loader, Judge(self._likelihood, Metric.of(metric)))(self.model)

    def _judging(self, val_loader: Loader | None, judge: Judge) -> Callable[[nn.Module], Figures]:
        """What judges the network, and what becomes of it; nothing without data."""
        if val_loader is None:
            return lambda network: Figures()
        with undisturbed(val_loader) as batches:
            batch = next(given_by(batches), None)
        names: tuple[str, ...] | None = None
        arguments: tuple[str, ...] = ()
        if batch is not None:
            inputs = checked_batch(batch).to(self._device).inputs
            with torch.no_grad(), evaluating(self.model), running("evaluation"):
                names = names_in(called_with(self.model, inputs))
            if isinstance(inputs, dict):
                arguments = named_arguments(self.model)[: len(inputs)]
                in_order(self.model, inputs)
        knowing = dataclasses.replace(judge, names=names, arguments=arguments)
        return lambda network: knowing(network, val_loader, cast=True)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _check_closing(self, train_loader: Loader | None, judge: Judge) -> None:
        """Refuse a closing phase that would pass over the teacher that was given."""
        closing, likelihood = self.recipe.closing, judge.likelihood or self._likelihood
        if train_loader is None or self._tutor is None or not (closing.epochs and closing.distillation):
            return
        try:
            check_imitated(self._tutor.to(self._device), self.model, likelihood, train_loader)
        except RecipeError as error:
            raise RecipeError(f"{error}; or leave out train_loader, and the closing phase with it") from error
        self._is_taught = True

    def _close(
        self, train_loader: Loader, judge: Judge, network: nn.Module, quantized: object, shared: nn.Module
    ) -> None:
        n_data, loss, closing = count_examples(train_loader), judge.likelihood or self._likelihood, self.recipe.closing
        # The model may have been moved since.
        teacher = None if self._teacher is None else self._teacher.to(self._device)
        fit(shared, train_loader, (closing,), n_data=n_data, teacher=teacher, loss=loss)

    def _trained_terms(self) -> list[Term]:
        """Those that a phase had in force so far; it may be ended before the mixture was trained."""
        begun = [stretch.phase for stretch in self._stretches if self._step > stretch.first]
        return [term for term in self.terms if is_in_force(type(term), begun)]

    def _delivered(self, result: Result, max_bytes: int | None, before: Figures, judge: Judge) -> Result:
        history = Fit(
            recipe=self.recipe,
            seed=None,
            conversion=self.conversion,
            before=before,
            seconds=time.perf_counter() - self._began,
            device=str(self._device),
            history=(),
            target=None if max_bytes is None else str(Target(max_bytes=max_bytes)),
            strength=self.strength,
            teacher=in_words(self._tutor) if self._is_taught else None,
            judge=judge,
            reach=self._reach(),
        )
        if self._tutor is not None and not self._is_taught:
            unasked = "nothing was learnt from the teacher: mix it into the loop's loss by distill(), or give finalize"
            warnings.warn(f"{unasked} a train_loader, on which the closing phase asks it", UserWarning, stacklevel=3)
        result = dataclasses.replace(result, fit=history)
        result = dataclasses.replace(result, warnings=findings(result))
        for finding in result.warnings:
            Watcher().on_finding(finding)
        return result

    def _reach(self) -> float | None:
        """How far the training went that was, not the one that was planned."""
        taken = [(s.phase, min(s.steps, max(0, self._step - s.first))) for s in self._stretches]
        held = {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        moved = any(id(weight.theta) in held for weight in self._weights)
        hasty = [
            (dataclasses.replace(phase, rate_log_sigma2=self._haste * phase.rate_log_sigma2), n) for phase, n in taken
        ]
        return reach_of(hasty, means=moved)

    # The schedule

    def _apply_dials(self) -> None:
        self._course.turn(self._dials)
        self._set_rates()

    def _set_rates(self) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if group.get(RATE) == MEANS:
                    group["weight_decay"] = self.phase.weight_decay
                if RATE in group:
                    rate = self._rate(group[RATE])
                    if isinstance(group["lr"], Tensor):
                        group["lr"].fill_(rate)
                    else:
                        group["lr"] = rate

    def _rate(self, name: str) -> float:
        """A learning rate as it is now."""
        haste = self._haste if name == "rate_log_sigma2" else 1.0
        return haste * self._course.rate(name) * float(self._dials.rate)

    def _own_groups(self) -> list[dict[str, Any]]:
        """What is trained besides the model's own parameters."""
        variances = [weight.log_sigma2 for weight in self._weights]
        return [
            {"params": variances, RATE: "rate_log_sigma2", "weight_decay": 0.0},
            *(group for term in self.terms for group in groups_of(term)),
        ]

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for weight in self._weights:
            yield f"{weight.name}_log_sigma2", weight.log_sigma2
        for term in self.terms:
            yield from ((f"the {term.name}'s {name}", parameter) for name, parameter, _ in term.trained())

    def _conditions(self) -> dict[str, Any]:
        """What a state must agree with."""
        return {
            "recipe": _of_training(to_dict(self.recipe)),
            "n_data": self.n_data,
            "steps": [stretch.steps for stretch in self._stretches],
            "model": {
                name: f"{str(tensor.dtype)[6:]} {list(tensor.shape)}" for name, tensor in self.model.named_parameters()
            },
        }

    def _check_open(self, call: str) -> None:
        if self._finalized:
            raise TrainingError(
                f"{call}() after finalize(): the network is plain again; make a new Compressor to compress it further"
            )


def _of_training(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What it says of the training itself."""
    return {name: said for name, said in recipe.items() if name not in _OF_THE_ENDING}


def _haste(stretches: Sequence[_Stretch]) -> float:
    """By how much faster than in the recipe variances must be trained, if steps are few, to get where they must."""
    reach = reach_of([(stretch.phase, stretch.steps) for stretch in stretches], means=False)
    fastest = max((stretch.phase.rate_log_sigma2 for stretch in stretches if is_pruning(stretch.phase)), default=0.0)
    if not reach or not fastest:
        return 1.0
    return max(1.0, min(WELL_REACHED / reach, FASTEST / fastest))


def _bare(model: nn.Module) -> nn.Module:
    """The network that `torch.compile` wraps; data-parallel wrappers, and what is no network, are refused."""
    unwrapped(model)
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ModelError(
            f"the network is wrapped in {type(model).__name__} already; make the Compressor of the network itself "
            "(model.module), then wrap it"
        )
    return model


def _check_tensors(model: nn.Module) -> None:
    """What can't be trained or stored is refused by name; a parameter that is expanded gets memory of its own."""
    check_materialized(model)
    check_storable(model)
    for parameter in model.parameters():
        if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
            parameter.data = parameter.data.contiguous()


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"{name} must be a whole number, at least 1, not {value!r}")


def _stretches(
    recipe: Recipe, n_data: int, batch_size: int | None, steps_per_epoch: int | None, total_steps: int | None
) -> list[_Stretch]:
    """The phases one after the other, in steps of the optimizer."""
    given = {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise RecipeError(f"give one of batch_size, steps_per_epoch and total_steps, not {' and '.join(given)}")
    for name, value in given.items():
        _check_count(name, value)
    phases = [phase for phase in recipe.phases if phase.epochs]
    if not phases:
        raise RecipeError(f"{recipe.name}: the recipe has no phase to go through; pack() codes a network as it is")
    epoch = steps_per_epoch or -(-n_data // (batch_size or recipe.batch_size))
    ends, epochs = [0], 0
    for phase in phases:
        epochs += phase.epochs
        share = epochs / sum(phase.epochs for phase in phases)
        end = round(total_steps * share) if total_steps else epochs * epoch
        # Every phase has at least a step.
        ends.append(max(end, ends[-1] + 1))
    return [_Stretch(phase, first, end - first) for phase, (first, end) in zip(phases, pairwise(ends), strict=True)]
