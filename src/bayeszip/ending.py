"""The ending: from a posterior to a file, quantized as the recipe says or so that a target is kept."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from bayeszip import codec
from bayeszip.errors import RecipeError, TargetError
from bayeszip.fitting import Course, Steering
from bayeszip.fitting.shared_values import SharedValues
from bayeszip.graph.storable import parameter_count
from bayeszip.posterior import Posterior
from bayeszip.quantize import Quantization, quantize, round_codebook
from bayeszip.recipe import Recipe
from bayeszip.result import Form, Result, coder_of, write_weights
from bayeszip.targets import AccuracySteering, ByteSteering, Target, largest_within, smallest_accurate, within_bytes
from bayeszip.tensors import CompressedModel, QuantizedTensor
from bayeszip.variational import variational_weights

__all__ = ["BesideWeights", "Ending", "bytes_now", "check_trials", "held_to", "steering_towards"]


def bytes_now(course: Course, settings: Recipe) -> int:
    """What the weights would take if they were quantized and coded now; the rest of a file not counted."""
    posterior = course.posterior()
    coder, options = coder_of(settings.coding)
    return codec.measure(CompressedModel(quantize(posterior, settings.quantization_of(posterior))), coder, **options)


def check_trials(validation: object | None, target: object | None) -> None:
    """Refuse trials of a rate that nothing can judge, or that a target leaves no room for.

    Raises:
        RecipeError: there is no validation data, or there is a target.
    """
    if validation is None:
        raise RecipeError("quantization.rate_trials are judged on validation data; give some, or set it to 0")
    if target is not None:
        raise RecipeError("a target decides how small the file is; set quantization.rate_trials=0, or drop the target")


@dataclass(frozen=True)
class Ending:
    """From symbols to a file: the shared values trained, dead units dropped, coded.

    Args:
        network: plain, with the trained weights.
        examples: its inputs, to trace it with.
        close: trains the shared values of a network with these symbols; None: they stay as they are.
        accuracy: of the network that a file holds; None: it is not asked for.
        renew: takes the statistics of batch norms anew, without noise; None: they stay as training left them.
        in_place: let `network` take the result's weights; for one that is finished once.
    """

    network: nn.Module
    examples: tuple[Tensor, ...] | None
    settings: Recipe
    close: Callable[[nn.Module, Mapping[str, QuantizedTensor], SharedValues], None] | None
    accuracy: Callable[[nn.Module], float | None]
    renew: Callable[[nn.Module], None] | None = None
    in_place: bool = False

    def form(self, network: nn.Module) -> Form:
        """A copy of `network`, ready to be coded."""
        return Form(copy.deepcopy(network).cpu(), self.examples, self.settings.coding)

    def beside_weights(self, network: nn.Module, teacher: nn.Module) -> "BesideWeights":
        """What a file takes beside the Gaussian weights of `network`; `teacher` is the same network, plain."""
        shapes = {weight.name: tuple(weight.theta.shape) for weight in variational_weights(network)}
        return BesideWeights(self.form(teacher), shapes, self.settings)

    def finish(
        self, quantized: Mapping[str, QuantizedTensor], posterior: Posterior, budget: int | None = None
    ) -> Result:
        """Leaves `network` as it is, unless `in_place`, so that other symbols can be tried."""
        network = self.network if self.in_place else copy.deepcopy(self.network)
        write_weights(network, quantized)
        self._renew(network)
        snapped = self.accuracy(network)
        quantized = self._with_trained_values(network, quantized)
        form = self.form(network)
        if budget is not None:
            # Other values may take a few bytes more.
            quantized = largest_within(quantized, posterior, form.size, budget)
            write_weights(network, quantized)
        result = form.code(quantized)
        accuracy, rate = self.accuracy(result.network()), self.settings.quantization.rate
        return dataclasses.replace(result, accuracy=accuracy, accuracy_snapped=snapped, rate=rate)

    def towards(self, target: Target | None, posterior: Posterior, accuracy_before: float | None) -> Result:
        """Quantized as the recipe says, or so that the file keeps to the target."""
        how = self.settings.quantization
        if target is None:
            return self.as_set(posterior, how)
        budget = target.budget(parameter_count(self.network))
        if budget is None:
            floor = (accuracy_before or 0.0) - (target.max_accuracy_drop or 0.0) / 100
            return smallest_accurate(posterior, how, lambda symbols: self.finish(symbols, posterior), floor)
        return self.within(budget, posterior, how)

    def as_set(self, posterior: Posterior, how: Quantization) -> Result:
        """Quantized as `how` says; of the rates that it tries, by the first that keeps the accuracy of none."""
        if not how.rate_trials:
            return self.finish(quantize(posterior, how), posterior)
        network, apart = self.network, dataclasses.replace(self, network=copy.deepcopy(self.network), in_place=True)
        without = apart._at_rate(0.0, posterior, how)
        chosen, by = without, apart.network
        for trial in range(how.rate_trials):
            apart = dataclasses.replace(apart, network=copy.deepcopy(network))
            result = apart._at_rate(how.rate * 0.75**trial, posterior, how)
            drop = (without.accuracy or 0.0) - (result.accuracy or 0.0)
            if result.bytes < without.bytes and 100 * drop <= how.rate_drop + 1e-9:
                chosen, by = result, apart.network
                break
        if self.in_place:
            network.load_state_dict(by.state_dict())
        return chosen

    def _at_rate(self, rate: float, posterior: Posterior, how: Quantization) -> Result:
        tried = dataclasses.replace(how, rate=rate, rate_trials=0)
        return dataclasses.replace(self.finish(quantize(posterior, tried), posterior), rate=rate)

    def within(self, budget: int, posterior: Posterior, how: Quantization) -> Result:
        """A file of at most `budget` bytes."""
        symbols = within_bytes(posterior, how, self.form(self.network).size, budget)
        return self.finish(symbols, posterior, budget)

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
        quantized = {name: dataclasses.replace(tensor, codebook=codebook) for name, tensor in quantized.items()}
        write_weights(network, quantized)
        self._renew(network)
        return quantized

    def _renew(self, network: nn.Module) -> None:
        if self.renew is not None:
            self.renew(network)


class BesideWeights:
    """What a file takes beside the Gaussian weights, whatever these come to: graph, names, and norms as they are now.

    Args:
        shapes: of the Gaussian weights, by name.
    """

    def __init__(self, form: Form, shapes: Mapping[str, tuple[int, ...]], settings: Recipe) -> None:
        self._form = form
        self._ones = {name: QuantizedTensor(np.ones(shape, np.uint8), np.arange(2.0)) for name, shape in shapes.items()}
        coder, options = coder_of(settings.coding)
        self._measured = codec.measure(CompressedModel(self._ones), coder, **options)
        self._size: int | None = None

    def now(self, network: nn.Module) -> int:
        """With what `network` holds besides the weights."""
        if self._form.take_from(network, self._ones) or self._size is None:
            self._size = self._form.size(self._ones) - self._measured
        return self._size


def steering_towards(
    target: Target | None, network: nn.Module, teacher: nn.Module, ending: Ending, accuracy_before: float | None
) -> Steering:
    """What steers the training of `network` towards the target.

    Raises:
        TargetError: it can't be reached, whatever the training does.
    """
    settings = ending.settings
    if target is None:
        return Steering()
    budget = target.budget(parameter_count(teacher))
    if budget is None:
        drop = (target.max_accuracy_drop or 0.0) / 100
        return AccuracySteering(settings.phases, floor=(accuracy_before or 0.0) - drop, drop=drop)
    shapes = {weight.name: weight.theta.shape for weight in variational_weights(network)}
    nothing = {name: QuantizedTensor(np.zeros(shape, np.uint8), np.zeros(1)) for name, shape in shapes.items()}
    largest_within(nothing, Posterior.of(network), ending.form(teacher).size, budget)
    beside, (coder, options) = ending.beside_weights(network, teacher).now(teacher), coder_of(settings.coding)
    return ByteSteering(
        settings.phases,
        budget=budget,
        size=lambda quantized: beside + codec.measure(CompressedModel(dict(quantized)), coder, **options),
        how=settings.quantization,
    )


def held_to(target: Target | None, result: Result, accuracy_before: float | None) -> Result:
    """`result`, unless it misses the target.

    Raises:
        TargetError: it does; holds the result.
    """
    missed = target.missed_by(result, accuracy_before) if target else None
    if missed:
        raise TargetError(missed, result)
    return result
