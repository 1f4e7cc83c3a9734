"""`pack()`: a network to a file, as it is."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bayeszip import codec, graph
from bayeszip.errors import ModelError, RecipeError, TargetError, listed
from bayeszip.fitting.batches import Batch, Loader, checked_loader, in_rows
from bayeszip.packing.contents import Contents, clustered, contents_of, is_statistic
from bayeszip.packing.curvature import curvatures
from bayeszip.packing.knobs import Knob, Quantizer, Trial, at_error, within_bytes
from bayeszip.packing.pushing import Pushing
from bayeszip.packing.steps import LiveSteps, Steps, by_clusters, one_step, own_steps, within_bounds
from bayeszip.recipe import Coding
from bayeszip.result import Form, Result, check_examples, coded, coder_of, left_out, write_weights
from bayeszip.tensors import CompressedModel, QuantizedTensor
from bayeszip.variational import check_materialized
from bayeszip.variational.kinds import is_norm

__all__ = ["pack"]

#: How many examples of one tensor are looked at together.
BATCH = 128

#: Factors and shifts of norms stand for rows of weights: they move by a part of what weights move by.
NORMS = 0.1


def pack(
    model: nn.Module | Mapping[str, Tensor],
    *,
    example_inputs: Sequence[Tensor] | Tensor | None = None,
    quality: float | None = None,
    max_bytes: int | None = None,
    max_error: float | None = None,
    components: int | None = None,
    calibration: Loader | Tensor | None = None,
    coding: Coding | None = None,
) -> Result:
    """Quantize and code a network as it is, without training. One of four knobs says how far to go.

    Weight matrices and kernels (floating-point tensors of two or more dimensions), frozen or not, take multiples of a
    step: one for the whole network or one for each tensor, each weight by itself or along a path in which they depend
    on each other, whichever makes the smaller file at equal error; tensors that have few values keep them. Biases and
    what norms hold are rounded within the same error. Weights that are computed from other tensors (weight norms,
    parametrizations, pruning masks) go in as computed.

    Args:
        model: a network, or the tensors of one by name; what `torch.compile` or data-parallel training wrapped around
            it doesn't count.
        example_inputs: with them the graph is traced, dead units go, and the file loads without the class.
        quality: from 0 to 100, by default 98; at 95 weights move by 5 % of their size (root mean squares), or, with
            `calibration`, what layers compute from these inputs does.
        max_bytes: the best file of at most so many bytes.
        max_error: how far a weight may move, as a share of its tensor's largest; elements of norms, of themselves.
        components: cluster each matrix to so many shared values besides 0, and keep the rest bit for bit.
        calibration: batches of inputs, or of (inputs, targets), or one tensor of inputs: weights are chosen by what
            they do to these, errors of some made good by others and by the bias or the norm's mean behind them, even
            of a norm that is kept. A few hundred examples suffice. With `quality` or `max_bytes`.
        coding: how to code. With its own `norm_error` left as it is, norms are folded where the graph is known and
            rounded within the quality; with `max_error` or `components` they are kept, and rounded by no more than the
            former says.

    Raises:
        RecipeError: a knob is out of range, or two contradict each other, or `coding` one of them.
        DataError: `calibration` gives no batches.
        TargetError: `max_bytes` is out of reach.
    """
    knob = Knob(components, max_error, quality, max_bytes)
    network, tensors = _tensors_of(model)
    if calibration is not None and (network is None or components is not None or max_error is not None):
        raise RecipeError("calibration needs a network, not its tensors alone, and quality or max_bytes")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if inputs is not None and not isinstance(inputs, Sequence):
        raise ModelError(f"example_inputs must be tensors, in the order of forward, not {type(inputs).__name__}")
    target = _Target(network, tensors, inputs, _coding_for(knob, coding or Coding()))
    if components is not None:
        return target.code(Trial(clustered(tensors, components), 0.0))
    contents = contents_of(tensors, () if max_error is not None else target.norms())
    if max_error is not None:
        return target.code(Trial(within_bounds(contents, max_error), 0.0))
    if not 0 < contents.size() < math.inf:  # all zero, or beyond what squares can hold
        return target.code(Trial(clustered(tensors), 0.0))
    if calibration is not None and network is not None:
        found = curvatures(network, _batches_of(calibration))
        return target.reach(knob, contents, [Pushing(contents, found, target.knows_dependent)])
    return target.reach(knob, contents, [one_step(contents), own_steps(contents)])


def _batches_of(calibration: Loader | Tensor) -> Loader:
    """Batches of what a caller gives; iterated, a tensor would give single examples, which layers take otherwise."""
    if isinstance(calibration, Tensor):
        in_rows(Batch(calibration, calibration))
        return calibration.split(BATCH)
    checked_loader(calibration, "calibration", once=True)
    return calibration


def _coding_for(knob: Knob, coding: Coding) -> Coding:
    """The coding, with norms kept where a knob says how far everything may move, and it says nothing of them.

    Raises:
        RecipeError: it rounds them by an error of its own.
    """
    if (knob.components is None and knob.max_error is None) or coding.norms == "keep" or not coding.norm_error:
        return coding
    if not _leaves_norms_to_knobs(coding):
        name = "max_error" if knob.components is None else "components"
        raise RecipeError(
            f"coding.norm_error={coding.norm_error:g} moves what {name} keeps; leave it out, or set it to 0, or "
            "set coding.norms=keep"
        )
    return dataclasses.replace(coding, norms="keep")


def _leaves_norms_to_knobs(coding: Coding) -> bool:
    """Whether it says nothing of its own on how far norms move: what names a coder alone changes nothing else."""
    return coding.norm_error == Coding().norm_error


def _tensors_of(model: nn.Module | Mapping[str, Tensor]) -> tuple[nn.Module | None, dict[str, Tensor]]:
    """A plain copy of the network, if it is one, and the tensors by name."""
    if isinstance(model, Mapping):
        return None, graph.unwrapped_names(model)
    if not isinstance(model, nn.Module):
        raise ModelError(f"pack takes a network or tensors by name, not a {type(model).__name__}")
    check_materialized(model)
    network = graph.plain_copy(model)
    statistics = {name: buffer for name, buffer in network.named_buffers() if is_statistic(name)}
    held = dict(network.named_parameters()) | statistics
    # Copies: the network takes quantized values, these stay.
    return network, {name: tensor.detach().clone() for name, tensor in held.items()}


class _Target:
    """Where quantized tensors go: the form of a file, with a network or without."""

    def __init__(
        self,
        network: nn.Module | None,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[Tensor] | None,
        coding: Coding,
    ) -> None:
        self._network, self._tensors, self._coding = network, tensors, coding
        self._rounds_norms = _leaves_norms_to_knobs(coding)
        self._coder, self._options = coder_of(self._coding)
        self._form = None if network is None else Form(network, inputs, self._coding)
        if network is not None and inputs is not None and self._form is not None and not self._form.has_graph:
            check_examples(network, inputs)

    @property
    def knows_dependent(self) -> bool:
        """Whether the coder knows of values that depend on each other, and tells its prices."""
        return self._coder == codec.DEFAULT_CODER

    def norms(self) -> set[str]:
        """The tensors of norms that are rounded, or kept, when the graph is known and they are folded into others."""
        if self._network is None or self._form is None or not (self._form.has_graph or self._coding.norms == "keep"):
            return set()
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in self._network.named_modules()
            if is_norm(layer)
            for name in (*layer._parameters, *layer._buffers)
        }

    def reach(self, knob: Knob, contents: Contents, quantizers: Sequence[Steps | Pushing]) -> Result:
        """The smallest file at the quality asked for, or the best within the bytes."""
        first, quantizer = self._first(knob, contents, quantizers)
        best = first
        if isinstance(quantizer, Steps) and self.knows_dependent:
            best = self._better(first, quantizer.dependent(), knob, contents)
            if best is first:
                best = self._better(best, LiveSteps(quantizer, contents), knob, contents)
        return self.code(best)

    def _first(
        self, knob: Knob, contents: Contents, quantizers: Sequence[Steps | Pushing]
    ) -> tuple[Trial, Steps | Pushing]:
        """The best of what the quantizers come to, and which of them it was.

        Raises:
            TargetError: none of them keeps within the bytes.
        """
        budget = knob.max_bytes
        if budget is None:
            sized = [(by_clusters(at_error(each, knob.error), contents), each) for each in quantizers]
            return min(sized, key=lambda found: self.size(found[0]))
        within, failures = [], []
        for each in quantizers:
            try:
                within.append((within_bytes(each, self.size, budget), each))
            except TargetError as error:
                failures.append(error)
        if not within:
            raise failures[0]
        return min(within, key=lambda found: found[0].error)

    def _better(self, best: Trial, quantizer: Quantizer, knob: Knob, contents: Contents) -> Trial:
        """The best trial so far, or that of another quantizer, which is sought from the same factor on."""
        budget = knob.max_bytes
        if budget is None:
            other = by_clusters(at_error(quantizer, knob.error, best.factor), contents)
            return min(best, other, key=self.size)
        try:
            other = within_bytes(quantizer, self.size, budget, best.factor)
            return min(best, other, key=lambda each: each.error)
        except TargetError:
            return best

    def size(self, trial: Trial) -> int:
        """How many bytes the file has."""
        if self._form is None:
            return codec.measure(self._alone(trial), self._coder, **self._options)
        self._write(trial)
        return self._formed(self._form, trial).size(trial.tensors)

    def code(self, trial: Trial) -> Result:
        """The file; how far it moved the matrices is told by what it holds."""
        moved = self._moved(trial.tensors)
        if self._form is None:
            result = coded(self._alone(trial), self._coding, None)
        else:
            self._write(trial)
            result = self._formed(self._form, trial).code(trial.tensors)
        said = (self._not_finite(), _nothing_left(trial.tensors, moved), left_out(result))
        return dataclasses.replace(result, moved=moved, warnings=tuple(each for each in said if each is not None))

    def _not_finite(self) -> str | None:
        """What can't be quantized for what it holds, and costs its whole size: a network that was trained to ruin."""
        floating = {name: tensor for name, tensor in self._tensors.items() if tensor.is_floating_point()}
        # A vector may be a mask of −∞; what is not a number is none.
        broken = [
            name
            for name, tensor in floating.items()
            if tensor.isnan().any() or (tensor.dim() > 1 and not tensor.isfinite().all())
        ]
        if not broken:
            return None
        return f"kept as it is, since it holds NaN or infinity: {listed(broken)}. Is this the network you meant?"

    def _formed(self, form: Form, trial: Trial) -> Form:
        """The form whose norms move by as much as they should, unless the caller has said how much that is."""
        form = form if trial.ordered else form.as_ordered()
        return form.rounding(min(NORMS * trial.error, 0.5)) if self._rounds_norms else form

    def _alone(self, trial: Trial) -> CompressedModel:
        return CompressedModel(
            {name: trial.tensors.get(name) or graph.to_raw(tensor, name) for name, tensor in self._tensors.items()}
        )

    @torch.no_grad()
    def _write(self, trial: Trial) -> None:
        if self._network is None:
            return
        write_weights(self._network, trial.tensors)
        buffers = dict(self._network.named_buffers())
        for name, values in trial.buffers.items():
            buffers[name].copy_(torch.from_numpy(values))

    def _moved(self, quantized: Mapping[str, QuantizedTensor]) -> float:
        values = {name: tensor.dequantize() for name, tensor in quantized.items()}
        packed = {name: tensor for name, tensor in self._tensors.items() if name in values}
        return contents_of(packed).moved(values)


def _nothing_left(tensors: Mapping[str, QuantizedTensor], moved: float) -> str | None:
    """What is wrong with a budget that no weight fits."""
    if moved < 1 or any(each.nonzero for each in tensors.values() if len(each.shape) > 1):
        return None
    return "every weight is zero: allow more bytes, or a higher quality"
