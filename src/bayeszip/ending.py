"""The ending: from a posterior to a file, quantized as the recipe says or so that a target is kept."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip import codec, graph
from bayeszip.damage import SHARE
from bayeszip.errors import RecipeError, TargetError
from bayeszip.fitting import Course, Figures, Steering
from bayeszip.fitting.course import is_in_force
from bayeszip.fitting.shared_values import FreeSymbols, SharedValues
from bayeszip.graph.storable import parameter_count
from bayeszip.packing.contents import CLUSTERS, clustered
from bayeszip.packing.curvature import Curvature
from bayeszip.packing.pack import pack
from bayeszip.posterior import Posterior
from bayeszip.quantize import Quantization, quantize, with_values
from bayeszip.recipe import Recipe
from bayeszip.result import Form, Result, coder_of, write_weights
from bayeszip.snapping import by_curvature, together
from bayeszip.summary import show_bytes
from bayeszip.targets import (
    FINER,
    ByteSteering,
    Quality,
    QualitySteering,
    Target,
    better,
    largest_within,
    smallest_good,
    with_more,
    within_bytes,
)
from bayeszip.tensors import CompressedModel, QuantizedTensor
from bayeszip.variational import GroupPrior, Rate, variational_weights

__all__ = [
    "BesideWeights",
    "Ending",
    "at_rates",
    "bytes_now",
    "check_curvature",
    "check_trials",
    "clustered_others",
    "held_to",
    "prices_of_zeros",
    "smallest_size",
    "steering_towards",
]


def bytes_now(course: Course, settings: Recipe) -> int:
    """What the weights would take if they were quantized and coded now; the rest of a file not counted."""
    posterior = course.posterior()
    coder, options = coder_of(settings.coding)
    return codec.measure(CompressedModel(quantize(posterior, settings.quantization_of(posterior))), coder, **options)


def prices_of_zeros(kept: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What the coder asks for each weight to be zero, and not to be, in bits, where these of a network's are kept."""
    model = CompressedModel({name: QuantizedTensor(own.astype(np.uint8), np.arange(2.0)) for name, own in kept.items()})
    return {name: (told.zero, told.nonzero) for name, told in codec.prices(model).tensors.items()}


def clustered_others(tensors: Mapping[str, Tensor]) -> dict[str, QuantizedTensor]:
    """The matrices among the tensors of a network that are no Gaussian weights, if they have values to share."""
    return clustered({name: tensor for name, tensor in tensors.items() if tensor.numel() > CLUSTERS})


def check_trials(validation: object | None, target: object | None) -> None:
    """Refuse trials of a rate that nothing can judge, or that a target leaves no room for.

    Raises:
        RecipeError: there is no validation data, or there is a target.
    """
    if validation is None:
        raise RecipeError("quantization.rate_trials are judged on validation data; give some, or set it to 0")
    if target is not None:
        raise RecipeError("a target decides how small the file is; set quantization.rate_trials=0, or drop the target")


def check_curvature(training: object | None, target: object | None, rates: Sequence[float]) -> None:
    """Refuse a curvature that no data show, or that nothing asks for.

    Args:
        rates: what a bit weighs in each of the files to be made.

    Raises:
        RecipeError: there is no training data, or there is a target, or a bit weighs nothing.
    """
    if not any(rates):
        raise RecipeError(
            "quantization.curvature says what moves cost that save bits; set quantization.rate, or give rates, or set "
            "it to 0"
        )
    if training is None:
        raise RecipeError("quantization.curvature is seen on training data; give some (train_loader), or set it to 0")
    if target is not None:
        raise RecipeError("a target decides what is kept; set quantization.curvature=0, or drop the target")


def at_rates(settings: Recipe, rates: Sequence[float], target: object | None) -> tuple[Recipe, ...]:
    """The recipe at each of these rates, for further endings of its training.

    Raises:
        RecipeError: one of them is none, or there twice; or a target, or trials, decide how small the file is.
    """
    if isinstance(rates, str) or not isinstance(rates, Sequence):
        raise RecipeError(f"rates are several numbers: (0.5, 1, 2), not {rates!r}")
    if not rates:
        return ()
    if target is not None:
        raise RecipeError("a target decides how small the file is, and rates make several files; give one of them")
    if settings.quantization.rate_trials:
        raise RecipeError("rates make a file each, and trials choose one; set quantization.rate_trials=0")
    weighed = tuple(settings.at_rate(rate) for rate in rates)
    # As names of files and phases have them: what reads the same there would be one file.
    every = [f"{each.quantization.rate:g}" for each in (settings, *weighed)]
    if doubled := sorted({rate for rate in every if every.count(rate) > 1}, key=float):
        raise RecipeError(f"rate {doubled[0]} is there twice; the first file has the recipe's, {every[0]}")
    return weighed


@dataclass(frozen=True)
class Ending:
    """From symbols to a file: the shared values trained, dead units dropped, coded.

    Args:
        network: plain, with the trained weights.
        examples: its inputs, to trace it with.
        close: trains the shared values of a network with these symbols; None: they stay as they are.
        judge: what the network that a file holds comes to.
        renew: takes the statistics of batch norms anew, without noise; None: they stay as training left them.
        in_place: let `network` take the result's weights; for one that is finished once.
        see: the curvatures that training data show of a network with these weights, None where they show none; None:
            there are no data.
        watch: what the layers of a network meet on training data; None as well.
    """

    network: nn.Module
    examples: tuple[Tensor, ...] | None
    settings: Recipe
    close: Callable[[nn.Module, Mapping[str, QuantizedTensor], SharedValues], None] | None
    judge: Callable[[nn.Module], Figures]
    renew: Callable[[nn.Module], None] | None = None
    in_place: bool = False
    see: Callable[[nn.Module, Mapping[str, QuantizedTensor]], Mapping[str, Curvature] | None] | None = None
    watch: Callable[[nn.Module], Mapping[str, Curvature] | None] | None = None

    def form(self, network: nn.Module) -> Form:
        """A copy of `network`, ready to be coded."""
        plain = graph.copied(network).cpu()
        trained = {name for name, each in self.network.named_parameters() if each.requires_grad}
        for name, parameter in plain.named_parameters():
            # The network as it came may be frozen as a whole, which says nothing of what is to stay as it is.
            parameter.requires_grad_(name in trained)
        return Form(plain, self.examples, self.settings.coding, clustered_others)

    def starts(self, original: nn.Module) -> dict[str, Any]:
        """What terms are told at their start: by the recipe, and of prices and of what is a unit."""
        known = {**self.settings.starts, Rate.name: prices_of_zeros}
        if is_in_force(GroupPrior, self.settings.phases):
            known[GroupPrior.name] = self.form(original).units()
        return known

    def beside_weights(self, network: nn.Module, original: nn.Module) -> "BesideWeights":
        """What a file takes beside the Gaussian weights of `network`; `original` is the same network, plain."""
        shapes = {weight.name: tuple(weight.theta.shape) for weight in variational_weights(network)}
        return BesideWeights(self.form(original), shapes, self.settings)

    def finish(
        self, quantized: Mapping[str, QuantizedTensor], posterior: Posterior, budget: int | None = None
    ) -> Result:
        """Leaves `network` as it is, unless `in_place`, so that other symbols can be tried."""
        network = self.network if self.in_place else graph.copied(self.network)
        write_weights(network, quantized)
        self._renew(network)
        snapped = self.judge(network)
        quantized = self._with_trained_values(network, quantized)
        form = self.form(network)
        if budget is not None:
            # Other values may take a few bytes more.
            quantized = largest_within(quantized, posterior, form.size, budget)
            write_weights(network, quantized)
        result = form.code(quantized)
        write_weights(network, form.others(quantized))
        died = tuple(name for name, tensor in quantized.items() if len(tensor.shape) > 1 and not tensor.nonzero)
        # Where the training was: there it takes least time. The result's own network stays on the CPU.
        place = next((parameter.device for parameter in network.parameters()), None)
        judged = graph.copied(result.network()).to(place)
        figures, rate = self.judge(judged), self.settings.quantization.rate
        return dataclasses.replace(result, figures=figures, snapped=snapped, died=died, rate=rate)

    def towards(self, target: Target | None, posterior: Posterior, quality: Quality | None, before: Figures) -> Result:
        """Quantized as the recipe says, or so that the file keeps to the target.

        Args:
            quality: what the target says is to be kept.
            before: what the network came to.
        """
        how = self.settings.quantization
        if quality is not None:
            return smallest_good(posterior, how, lambda symbols: self.finish(symbols, posterior), quality)
        budget = target.budget(parameter_count(self.network)) if target is not None else None
        if budget is None:
            return self._unharmed(posterior, how, before)
        return self.within(budget, posterior, how)

    def _unharmed(self, posterior: Posterior, how: Quantization, before: Figures) -> Result:
        """Quantized as the recipe says; by finer values, where these cost a network without classes too much.

        How many values classes need is known, and what they lose is bounded; numbers can need any precision.
        """
        result = self.as_set(posterior, how)
        if before.loss is None or before.accuracy is not None:
            return result
        allowed = SHARE * abs(before.loss)
        quality = Quality("loss", -1.0, -before.loss - allowed, allowed)
        for finer in with_more(quantize(posterior, how), posterior, how):
            if quality.is_kept(result.figures):
                break
            result = better(self.finish(finer, posterior), result, quality)
        return result

    def untrained(self, posterior: Posterior, quality: Quality) -> Result:
        """The network as it came, by as many shared values as it takes to keep a figure; the most there are if none do.

        Args:
            posterior: of the network before it was trained.
        """
        best: Result | None = None
        for values in FINER:
            how = Quantization(assignment="fit", components=values, codebook_bits=32)
            finished = dataclasses.replace(self.finish(quantize(posterior, how), posterior), rate=how.rate)
            best = better(finished, best, quality)
            if quality.is_kept(best.figures):
                break
        if best is None:  # never: there is at least one number of values
            raise TypeError(FINER)
        return best

    def or_packed(self, result: Result, original: nn.Module, quality: Quality | None) -> Result:
        """`result`, or `original` as `pack` makes it, where that is smaller and as good on the validation data.

        Where `result` takes less than a bit for each weight, which `pack` can't do, nothing is tried.

        Args:
            original: the network as it came.
            quality: what a target says is to be kept; by default, what `result` comes to.
        """
        weights = sum(int(each.count_nonzero()) for each in original.parameters())
        if 8 * result.bytes < weights:
            return result
        packed = pack(graph.copied(original).cpu(), example_inputs=self.examples, coding=self.settings.coding)
        result = dataclasses.replace(result, packed=packed.bytes)
        # Packing takes no heed of what is frozen, which was to stay; and without figures nobody knows which is better.
        frozen = any(not each.requires_grad for each in self.network.parameters())
        if packed.bytes >= result.bytes or frozen or result.figures.loss is None:
            return result
        figures = self.judge(packed.network())
        other = dataclasses.replace(packed, figures=figures, snapped=figures, packed=packed.bytes)
        if quality is not None:
            return better(other, result, quality)
        return result if _points_lost(result.figures, figures) > 0 else other

    def as_set(self, posterior: Posterior, how: Quantization) -> Result:
        """Quantized as `how` says; of the rates that it tries, by the first that keeps the figures of none."""
        seen = self._seen(posterior, how)
        if not how.rate_trials:
            return self.finish(self._symbols(posterior, how, seen), posterior)
        network, apart = self.network, dataclasses.replace(self, network=graph.copied(self.network), in_place=True)
        without = apart._at_rate(0.0, posterior, how, seen)
        chosen, by = without, apart.network
        for trial in range(how.rate_trials):
            apart = dataclasses.replace(apart, network=graph.copied(network))
            result = apart._at_rate(how.rate * 0.75**trial, posterior, how, seen)
            if result.bytes < without.bytes and _points_lost(without.figures, result.figures) <= how.rate_drop + 1e-9:
                chosen, by = result, apart.network
                break
        if self.in_place:
            network.load_state_dict(by.state_dict())
        return chosen

    def _at_rate(
        self, rate: float, posterior: Posterior, how: Quantization, seen: Mapping[str, Curvature] | None
    ) -> Result:
        tried = _at(how, rate)
        return dataclasses.replace(self.finish(self._symbols(posterior, tried, seen), posterior), rate=rate)

    def _symbols(
        self, posterior: Posterior, how: Quantization, seen: Mapping[str, Curvature] | None
    ) -> Mapping[str, QuantizedTensor]:
        """Quantized as `how` says, by what is `seen` if that counts."""
        if how.rate and seen is not None:
            return by_curvature(quantize(posterior, _at(how, 0.0)), posterior, seen, how)
        quantized = quantize(posterior, how)
        if how.rate or not how.together or self.watch is None:
            return quantized
        return self._together(quantized, posterior, how, self.watch)

    def _together(
        self,
        quantized: Mapping[str, QuantizedTensor],
        posterior: Posterior,
        how: Quantization,
        watch: Callable[[nn.Module], Mapping[str, Curvature] | None],
    ) -> Mapping[str, QuantizedTensor]:
        """The same with regard to what layers meet, as the network is without shared values."""
        network = graph.copied(self.network)
        write_means(network, quantized, posterior)
        self._renew(network)
        return together(quantized, posterior, watch(network) or {}, how.codebook_bits)

    def _seen(self, posterior: Posterior, how: Quantization) -> Mapping[str, Curvature] | None:
        """What data show of the network as it is without a rate, if that counts."""
        if not (how.curvature and how.rate) or self.see is None:
            return None
        return self.see(self.network, quantize(posterior, _at(how, 0.0)))

    def within(self, budget: int, posterior: Posterior, how: Quantization) -> Result:
        """A file of at most `budget` bytes."""
        symbols = within_bytes(posterior, how, self.form(self.network).size, budget)
        return self.finish(symbols, posterior, budget)

    def _with_trained_values(
        self, network: nn.Module, quantized: Mapping[str, QuantizedTensor]
    ) -> Mapping[str, QuantizedTensor]:
        """The closing step: better values, by the same symbols or by those that are next to them."""
        nothing_to_train = len(next(iter(quantized.values())).codebook) == 1
        closing = self.settings.closing
        if self.close is None or not closing.epochs or nothing_to_train:
            return quantized
        kind = FreeSymbols if self.settings.reassign else SharedValues
        shared = kind(network, quantized, averaged=closing.optimizer == "sgd")
        self.close(network, quantized, shared)
        chosen = shared.symbols()
        moved = {name: dataclasses.replace(t, symbols=chosen.get(name, t.symbols)) for name, t in quantized.items()}
        quantized = with_values(moved, shared.codebook(), self.settings.quantization.codebook_bits)
        write_weights(network, quantized)
        self._renew(network)
        return quantized

    def _renew(self, network: nn.Module) -> None:
        if self.renew is not None:
            self.renew(network)


def _at(how: Quantization, rate: float) -> Quantization:
    """The same at another rate, which is not tried but taken."""
    return dataclasses.replace(how, rate=rate, rate_trials=0)


def _points_lost(before: Figures, after: Figures) -> float:
    """Of accuracy; for a network without classes, percent by which its loss grew."""
    if before.accuracy is not None:
        return 100 * (before.accuracy - (after.accuracy or 0.0))
    if before.loss is None or after.loss is None:
        return 0.0
    return 100 * (after.loss - before.loss) / max(abs(before.loss), 1e-30)


def write_means(network: nn.Module, quantized: Mapping[str, QuantizedTensor], posterior: Posterior) -> None:
    """Give a network the means of the weights that are not zero, as if shared values cost nothing."""
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, tensor in quantized.items():
            means = np.where(tensor.symbols != 0, posterior.weights[name].theta, 0.0)
            parameters[name].copy_(torch.from_numpy(means))


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
    target: Target | None,
    network: nn.Module,
    original: nn.Module,
    ending: Ending,
    quality: Quality | None,
    ceiling: float | None = None,
) -> Steering:
    """What steers the training of `network` towards the target.

    Args:
        ceiling: the most that the strength may be.

    Raises:
        TargetError: it can't be reached, whatever the training does.
    """
    settings = ending.settings
    if target is None:
        return Steering()
    if quality is not None:
        return QualitySteering(settings.phases, quality=quality, ceiling=ceiling)
    budget = target.budget(parameter_count(original)) or 0
    smallest_size(network, original, ending, target)
    beside, (coder, options) = ending.beside_weights(network, original).now(original), coder_of(settings.coding)
    return ByteSteering(
        settings.phases,
        budget=budget,
        size=lambda quantized: beside + codec.measure(CompressedModel(dict(quantized)), coder, **options),
        how=settings.quantization,
    )


def smallest_size(network: nn.Module, original: nn.Module, ending: Ending, target: Target | None) -> int:
    """Of a file in which every Gaussian weight of `network` is zero.

    Raises:
        TargetError: even that has more bytes than the target allows.
    """
    shapes = {each.name: each.theta.shape for each in variational_weights(network)}
    nothing = {name: QuantizedTensor(np.zeros(shape, np.uint8), np.zeros(1)) for name, shape in shapes.items()}
    size = ending.form(original).size
    parameters = parameter_count(original)
    budget = None if target is None else target.budget(parameters)
    if target is not None and budget is not None:
        try:
            largest_within(nothing, Posterior.of(network), size, budget)
        except TargetError as error:
            if target.min_ratio is None:
                raise
            least = size(nothing)
            raise TargetError(
                f"{target.min_ratio:g} times smaller is out of reach: with every weight zero the file takes "
                f"{show_bytes(least)}, and is {4 * parameters / least:.1f} times smaller; lower min_ratio"
            ) from error
    return size(nothing)


def held_to(target: Target | None, result: Result) -> Result:
    """`result`, unless it misses the target.

    Raises:
        TargetError: it does; holds the result.
    """
    missed = target.missed_by(result, result.fit.before, result.fit.metric) if target and result.fit else None
    if missed:
        raise TargetError(missed, result)
    return result
