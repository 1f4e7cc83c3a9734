"""What inputs show of a network's layers: how much it matters where, and together with what, a weight moves.

A layer computes y = W·x for the inputs x that it meets. If row r of W moves by Δ, its output moves by Δ·x, in the mean
square by Δ·H·Δᵀ with H = E[x·xᵀ]; and what the network says moves by about g_r times that, g_r being the mean square
of the derivatives of the network's outputs by y_r (Gauss and Newton's approximation, with the two factors taken for
independent, as in K-FAC: Martens and Grosse 2015). A constant 1 beside x stands for the bias.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip.errors import DataError
from bayeszip.fitting.batches import TARGETS, Batch, Inputs, called_with, given_by, in_rows, running
from bayeszip.fitting.outputs import class_dim
from bayeszip.modes import unfreeze
from bayeszip.readers import Readers, place_of, reading

__all__ = ["Block", "Curvature", "curvatures"]

#: Examples looked at, at most, and positions of an image, or of a sequence, of a batch.
EXAMPLES, POSITIONS = 2048, 2**13
#: Columns whose moments are taken together; wider matrices fall into parts.
WIDEST = 1536
#: Memory for moments, in bytes; layers that need more are looked at in turns.
MEMORY = 2**28

Layer = nn.Linear | nn.Conv1d | nn.Conv2d
#: Norms that take a shift away; a subclass may do something else with what it is given.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Block:
    """Rows and columns of a weight matrix, and the mean of x·xᵀ over the inputs that these columns meet.

    `moments` has a row and a column more, for the constant 1, if `constant`.
    """

    rows: slice
    columns: slice
    constant: bool
    moments: np.ndarray


@dataclass(frozen=True)
class Curvature:
    """How much moves of a layer's weights matter; of a weight that layers share, in all of them together.

    Args:
        blocks: that cover the matrix of the weight's first dimension by all others.
        outputs: g, for each row.
        bias: name of the layer's bias, unless it isn't the layer's alone.
        mean: name of the running mean of the norm behind a layer without a bias, if the norm takes all that the layer
            computes and nothing else; `means`: what it is.
    """

    blocks: Sequence[Block]
    outputs: np.ndarray
    bias: str | None
    mean: str | None
    means: np.ndarray


def curvatures(
    network: nn.Module, batches: Iterable[Any], examples: int = EXAMPLES, derivatives: bool = True
) -> dict[str, Curvature]:
    """Of each linear and convolutional layer that meets inputs, by the name of its weight.

    Inputs of layers that share a weight count as those of one layer. A weight that something else holds too, an
    embedding for one, or reads, as a decoder that is tied by hand, is left out: what is done with it there is not seen.
    So is a layer that no derivative comes to. The network is run in eval mode.

    Args:
        batches: of inputs, or of (inputs, targets); gone through once for as many layers as memory allows.
        examples: how many are looked at, at most.
        derivatives: whether g is asked for, which takes most of the time; otherwise it is 1 for all outputs.

    Raises:
        DataError: there is no batch, or what layers meet is not finite.
    """
    names = {id(tensor): name for name, tensor in (*network.named_parameters(), *network.named_buffers())}
    holders = _holders(network)
    shared = {key: sharing for key, held in holders.items() if key in names and (sharing := _layers_of(key, held))}
    found: dict[str, Curvature] = {}
    for turn in _turns(list(shared.values())):
        watches = [_Watch(layers) for layers in turn]
        _run(network, batches, watches, examples, derivatives)
        for watch in watches:
            if watch.is_known:
                name = names[id(watch.weight)]
                found[name] = watch.curvature(names, holders)
                _check_finite(name, found[name])
    return found


def _holders(network: nn.Module) -> dict[int, list[nn.Module]]:
    """For each tensor, by its identity, the modules that hold it, as often as they do."""
    holders: dict[int, list[nn.Module]] = {}
    for module in network.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                holders.setdefault(id(tensor), []).append(module)
    return holders


def _layers_of(weight: int, holders: Sequence[nn.Module]) -> list[Layer]:
    """The holders of a weight if they are layers that have it for their weight, all alike; otherwise none."""
    known = [layer for layer in holders if isinstance(layer, Layer) and _is_known(layer)]
    layers = [layer for layer in known if id(layer.weight) == weight]
    alike = len({(type(layer), _groups(layer)) for layer in layers}) == 1
    return layers if alike and len(layers) == len(holders) == len(set(holders)) else []


def _check_finite(name: str, seen: Curvature) -> None:
    """Refuse what nothing can be weighed by."""
    if not all(np.isfinite(each).all() for each in (seen.outputs, *(block.moments for block in seen.blocks))):
        raise DataError(
            f"the layer of {name} meets inputs, or derivatives of outputs, that are NaN or infinite; check the data "
            "that the network is shown, and what it makes of them"
        )


def _is_known(layer: nn.Module) -> bool:
    # A subclass may compute something else.
    return type(layer) in (nn.Linear, nn.Conv1d, nn.Conv2d)


def _groups(layer: Layer) -> int:
    return 1 if isinstance(layer, nn.Linear) else layer.groups


def _turns(shared: Sequence[list[Layer]]) -> Iterator[list[list[Layer]]]:
    """The layers of each weight, in groups whose moments fit into memory."""
    turn: list[list[Layer]] = []
    taken = 0
    for layers in shared:
        size = sum(8 * (1 + width) ** 2 * groups for groups, width in _parts(layers[0]))
        if turn and taken + size > MEMORY:
            yield turn
            turn, taken = [], 0
        turn.append(layers)
        taken += size
    if turn:
        yield turn


def _parts(layer: Layer) -> list[tuple[int, int]]:
    """The layer's groups, and the width of each part of their columns."""
    columns = layer.weight[0].numel()
    count = -(-columns // WIDEST)
    return [(_groups(layer), (part + 1) * columns // count - part * columns // count) for part in range(count)]


@dataclass(eq=False)
class _Watch:
    """A layer, or several that share their weight, watched while the network runs.

    Args:
        count: positions that they met.
        calls: of the layers.
        readers: of what they compute, modules by their identity.
        is_read_elsewhere: whether something else computed with the weight.
        is_judged: whether derivatives were asked for.
        norm: behind them.
    """

    layers: Sequence[Layer]
    count: int = 0
    examples: int = 0
    calls: int = 0
    readers: set[int] = field(default_factory=set)
    is_read_elsewhere: bool = False
    is_judged: bool = False
    norm: nn.Module | None = None
    moments: list[Tensor] = field(default_factory=list)
    squares: Tensor | None = None

    def __post_init__(self) -> None:
        parts = _parts(self.layers[0])
        for place, (groups, width) in enumerate(parts):
            side = width + (place == len(parts) - 1)
            self.moments.append(torch.zeros(groups, side, side, dtype=torch.float64))

    @property
    def weight(self) -> Tensor:
        return self.layers[0].weight

    @property
    def is_known(self) -> bool:
        """Whether enough was seen: what no derivative came to can't be weighed against layers that felt theirs."""
        felt = self.squares is not None or not self.is_judged
        return bool(self.count and self.examples) and felt and not self.is_read_elsewhere

    def see(self, layer: Layer, inputs: Tensor) -> None:
        """Adds the moments of inputs; of long sequences or large images, those of positions all over them."""
        self.calls += 1
        if not inputs.numel():
            return
        columns, count = _columns(layer, inputs)
        self.count += count
        # Where some stand for all, each counts as often.
        share, start = count / columns.shape[1], 0
        for place, moments in enumerate(self.moments):
            last = place == len(self.moments) - 1
            width = moments.shape[1] - last
            part = columns[:, :, start : start + width]
            if last:
                part = F.pad(part, (0, 1), value=1.0)
            moments += share * (part.transpose(1, 2) @ part).double()
            start += width

    def feel(self, gradient: Tensor) -> None:
        """Adds the squares of derivatives by the layer's outputs."""
        # Counted from behind, since an image may come without a batch around it.
        by_row = gradient.detach().double().square().movedim(1 - self.weight.dim(), 0)
        squares = by_row.reshape(len(self.weight), -1).sum(1)
        self.squares = squares if self.squares is None else self.squares + squares

    def curvature(self, names: Mapping[int, str], holders: Mapping[int, Sequence[nn.Module]]) -> Curvature:
        """What has been seen, by the names of tensors, of which the `holders` are known."""
        rows, start, blocks = len(self.weight), 0, []
        for place, moments in enumerate(self.moments):
            last = place == len(self.moments) - 1
            columns = slice(start, start + moments.shape[1] - last)
            start = columns.stop
            for group, each in enumerate(moments):
                of_group = slice(group * rows // len(moments), (group + 1) * rows // len(moments))
                blocks.append(Block(of_group, columns, last, (each / self.count).numpy()))
        squares = torch.full((rows,), float(self.examples)) if self.squares is None else self.squares
        bias = self._bias(names, holders)
        mean = None if bias is not None else getattr(self.norm, "running_mean", None)
        return Curvature(
            blocks,
            (squares / max(self.examples, 1)).double().numpy(),
            bias,
            None if mean is None else names.get(id(mean)),
            np.zeros(rows) if mean is None else mean.double().numpy().copy(),
        )

    def _bias(self, names: Mapping[int, str], holders: Mapping[int, Sequence[nn.Module]]) -> str | None:
        """The name of the bias that all these layers add, and no others."""
        bias = self.layers[0].bias
        alone = bias is not None and set(holders[id(bias)]) == set(self.layers)
        return names.get(id(bias)) if alone else None

    def find_norm(self, met: Mapping[nn.Module, Sequence["_Watch | None"]]) -> None:
        """Takes the norm behind the layers, where one takes all that they compute and nothing else."""
        behind = [norm for norm, makers in met.items() if self in makers]
        if len(behind) == 1 and self.readers == {id(behind[0])} and list(met[behind[0]]) == [self] * self.calls:
            self.norm = behind[0]


def _spread(count: int) -> Tensor:
    """`POSITIONS` of so many, at most: by multiples of the golden ratio, since a stride may meet edges alone."""
    if count <= POSITIONS:
        return torch.arange(count)
    return (torch.arange(POSITIONS, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2) % 1 * count).long()


def _columns(layer: Layer, inputs: Tensor) -> tuple[Tensor, int]:
    """What the columns of the weight are multiplied with, at `POSITIONS` at most: groups × positions × columns.

    And how many positions there are.
    """
    inputs = inputs.detach().float()
    if isinstance(layer, nn.Linear):
        rows = inputs.reshape(-1, inputs.shape[-1])
        return rows[_spread(len(rows))][None], len(rows)
    if inputs.dim() == layer.weight.dim() - 1:
        inputs = inputs[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    inputs = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    sides = list(zip(inputs.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True))
    counts = [1 + (size - 1 - dilation * (kernel - 1)) // stride for size, kernel, stride, dilation in sides]
    # Only the patches at these places are written out, not those of all images.
    count = len(inputs) * math.prod(counts)
    image, *corner = torch.unravel_index(_spread(count), (len(inputs), *counts))
    reached = [image.view(-1, *[1] * len(sides))]
    for axis, (at, (_, kernel, stride, dilation)) in enumerate(zip(corner, sides, strict=True)):
        along = [1] * axis + [-1] + [1] * (len(sides) - 1 - axis)
        reached.append((stride * at).view_as(reached[0]) + (dilation * torch.arange(kernel)).view(along))
    patches = inputs.movedim(1, -1)[tuple(reached)].movedim(-1, 1)
    return patches.reshape(len(image), layer.groups, -1).movedim(1, 0), count


def _run(
    network: nn.Module, batches: Iterable[Any], watches: Sequence[_Watch], examples: int, derivatives: bool
) -> None:
    """Shows the network its inputs, the watches watching."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    unfreeze(network.eval())
    met: dict[nn.Module, list[_Watch | None]] = {}
    seen = 0
    generator = torch.Generator().manual_seed(0)
    try:
        for batch in given_by(batches):
            inputs, targets = _parted(batch)
            count = _count_rows(inputs)
            # Without gradients torch may take ways of its own past the layers, which hooks don't go with.
            with running("calibration"), torch.enable_grad(), _feeling(watches):
                outputs = _look(network, inputs, watches, met)
                loss = _loss(outputs, targets, generator) if derivatives else None
                if loss is not None and loss.requires_grad:
                    loss.backward()
                    for watch in watches:
                        watch.is_judged = True
            network.zero_grad(set_to_none=True)
            seen += count
            for watch in watches:
                watch.examples += count
            if seen >= examples:
                break
    finally:
        network.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
    if not seen:
        # Large networks are looked at in turns.
        is_used_up = isinstance(batches, Iterator)
        remedy = "a generator gives batches once; give a list or a loader" if is_used_up else "check the loader"
        raise DataError(f"the calibration data gave no batch; {remedy}")
    for watch in watches:
        watch.find_norm(met)


@contextlib.contextmanager
def _feeling(watches: Sequence[_Watch]) -> Iterator[None]:
    """The watches feel the derivatives by what their layers compute, on the way back too: checkpoints compute there."""
    with contextlib.ExitStack() as stack:
        for watch in watches:
            for layer in watch.layers:
                stack.callback(layer.register_forward_hook(_feeling_hook(watch)).remove)
        yield


def _feeling_hook(watch: _Watch) -> Any:
    def hook(layer: Layer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(watch.feel)

    return hook


def _look(
    network: nn.Module, inputs: Inputs, watches: Sequence[_Watch], met: dict[nn.Module, list[_Watch | None]]
) -> Any:
    """What the network says to a batch; the watches know then who has read what their layers computed, and weights."""
    produced: dict[int, _Output] = {}
    with reading(network) as readers, contextlib.ExitStack() as stack:
        for watch in watches:
            for layer in watch.layers:
                # Before it counts as done, since what is seen of inputs is read by nobody else.
                hook = layer.register_forward_hook(_hook(watch, produced, readers), with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
        for norm in network.modules():
            if type(norm) in _NORMS and norm.running_mean is not None:
                stack.callback(norm.register_forward_pre_hook(_norm_hook(produced, met), with_kwargs=True).remove)
        outputs = called_with(network, inputs)
    returned = {place_of(tensor) for tensor in _tensors(outputs)}
    for output in produced.values():
        output.watch.readers |= readers.of(output.tensor)
        if place_of(output.tensor) in returned:
            output.watch.readers.add(id(network))
    for watch in watches:
        watch.is_read_elsewhere |= any(map(readers.are_elsewhere, watch.layers))
    return outputs


class _Output(NamedTuple):
    """What a layer computed."""

    tensor: Tensor
    watch: _Watch


def _hook(watch: _Watch, produced: dict[int, _Output], readers: Readers) -> Any:
    def hook(layer: Layer, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        watch.see(layer, inputs[0] if inputs else named["input"])
        produced[id(output)] = _Output(output, watch)
        readers.follow(output)

    return hook


def _norm_hook(produced: Mapping[int, _Output], met: dict[nn.Module, list[_Watch | None]]) -> Any:
    """Writes down, call by call, whose layers made what a norm is given; None: some other's.

    So is what has the layer's rows in another dimension than that of the norm's channels, which is the second.
    """

    def hook(norm: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        given = inputs[0] if inputs else named["input"]
        made = produced.get(id(given))
        is_its = made is not None and _has_rows_second(made.watch.layers[0], given)
        met.setdefault(norm, []).append(made.watch if made is not None and is_its else None)

    return hook


def _has_rows_second(layer: Layer, output: Tensor) -> bool:
    return output.dim() == (2 if isinstance(layer, nn.Linear) else layer.weight.dim())


def _count_rows(inputs: Inputs) -> int:
    """How many examples the inputs hold, by the first tensor: others may be numbers, states, or none.

    Raises:
        DataError: it has no rows, or there is none.
    """
    tensors = _tensors(inputs)
    if not tensors:
        raise DataError(f"a batch of calibration holds no tensor, but a {type(inputs).__name__}; check the loader")
    in_rows(Batch(tensors[0], tensors[0]))
    return len(tensors[0])


def _parted(batch: Any) -> tuple[Inputs, Tensor | None]:
    """The inputs of a batch, and its targets if it has any that could be classes."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        targets = next((batch[name] for name in TARGETS if isinstance(batch.get(name), Tensor)), None)
        inputs = {str(name): part for name, part in batch.items() if isinstance(part, Tensor) and part is not targets}
        return inputs, targets
    if not isinstance(batch, Batch | tuple | list):
        raise DataError(
            f"a batch of calibration must be inputs, or (inputs, targets), as tensors; not {type(batch).__name__}"
        )
    parts = tuple(batch)
    if len(parts) == 2 and not (isinstance(parts[0], Tensor) and parts[0].dim() == 0):
        given, targets = (dict(part) if isinstance(part, Mapping) else part for part in parts)
        return tuple(given) if isinstance(given, list) else given, targets if isinstance(targets, Tensor) else None
    return parts[0] if len(parts) == 1 else parts, None


def _loss(outputs: Any, targets: Tensor | None, generator: torch.Generator) -> Tensor | None:
    """Whose derivatives have the mean squares sought: of classes drawn as the network says, or of plain outputs."""
    dim = None if targets is None or targets.is_floating_point() else class_dim(outputs, targets)
    if dim is not None:
        logits = outputs.movedim(dim, -1).flatten(0, -2)
        if not bool(logits.isfinite().all()):
            raise DataError("what the network says to the calibration data is NaN or infinite; check the data")
        drawn = torch.multinomial(logits.detach().float().softmax(-1), 1, generator=generator)[:, 0]
        return F.cross_entropy(logits, drawn, reduction="sum")
    found = [tensor for tensor in _tensors(outputs) if tensor.is_floating_point()]
    signs = [torch.randint(0, 2, each.shape, generator=generator).to(each) * 2 - 1 for each in found]
    return torch.stack([(each * sign).sum() for each, sign in zip(found, signs, strict=True)]).sum() if found else None


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    parts = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
