"""Weights chosen by what they do to inputs."""

import numpy as np
import pytest
import torch
from torch import nn

import bayeszip
from bayeszip import codec
from bayeszip.codec.ways import DEPENDENT
from bayeszip.errors import RecipeError
from bayeszip.packing.contents import contents_of
from bayeszip.packing.curvature import Block, Curvature
from bayeszip.packing.knobs import at_error
from bayeszip.packing.pushing import Pushing
from bayeszip.packing.steps import own_steps
from bayeszip.tensors import CompressedModel


def correlated(columns: int = 24, rows: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and inputs whose columns are far from independent."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(500, 4)) @ random.normal(size=(4, columns)) + 0.1 * random.normal(size=(500, columns))
    return random.normal(size=(rows, columns)).astype(np.float32), inputs + 0.5


def told(inputs: np.ndarray, rows: int, bias: str | None) -> Curvature:
    with_one = np.column_stack([inputs, np.ones(len(inputs))])
    block = Block(slice(0, rows), slice(0, inputs.shape[1]), True, with_one.T @ with_one / len(inputs))
    return Curvature([block], np.ones(rows), bias, None, np.zeros(rows))


def entropy(symbols: np.ndarray) -> float:
    counts = np.bincount(symbols.ravel())
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def test_errors_pushed_on_disturb_outputs_far_less():
    weight, inputs = correlated()
    bias = np.zeros(len(weight), np.float32)
    contents = contents_of({"a.weight": torch.from_numpy(weight), "a.bias": torch.from_numpy(bias)})

    def disturbed(tensors) -> float:
        outputs = inputs @ tensors["a.weight"].dequantize().T + tensors["a.bias"].dequantize()
        before = inputs @ weight.T
        return float(np.linalg.norm(outputs - before) / np.linalg.norm(before - before.mean(0)))

    plain = own_steps(contents).at(0.1)
    pushing = Pushing(contents, {"a.weight": told(inputs, len(weight), "a.bias")})
    pushed = at_error(pushing, disturbed(plain.tensors))
    assert disturbed(pushed.tensors) == pytest.approx(pushed.error, rel=0.05)
    bits = [entropy(trial.tensors["a.weight"].symbols) for trial in (pushed, plain)]
    assert bits[0] < 0.75 * bits[1]


def test_inputs_that_are_never_there_need_no_weights():
    weight, inputs = correlated()
    inputs[:, 5:9] = 0
    contents = contents_of({"a.weight": torch.from_numpy(weight)})
    tensors = at_error(Pushing(contents, {"a.weight": told(inputs, len(weight), None)}), 0.05).tensors
    dead = tensors["a.weight"].symbols[:, 5:9]
    assert np.count_nonzero(dead) < 0.2 * dead.size


@pytest.mark.parametrize(("rows", "bias"), [(40, None), (1, "a.bias")])
@pytest.mark.parametrize("dependent", [False, True])
def test_where_nothing_takes_a_shift_none_is_pushed_there(rows, bias, dependent, monkeypatch):
    """A single bias is kept as it is: what was pushed on to it would be lost."""
    monkeypatch.setattr("bayeszip.packing.pushing.LEAST_CELLS", 1)
    weight, inputs = correlated(rows=rows)
    inputs += 3
    contents = contents_of({"a.weight": torch.from_numpy(weight), "a.bias": torch.ones(1)})
    trial = Pushing(contents, {"a.weight": told(inputs, rows, bias)}, dependent).at(0.05)
    before = inputs @ weight.T
    change = inputs @ (trial.tensors["a.weight"].dequantize() - weight).T
    assert np.linalg.norm(change) / np.linalg.norm(before - before.mean(0)) == pytest.approx(trial.error, rel=1e-3)


def test_values_along_a_path_make_smaller_files_at_equal_error():
    weight, inputs = correlated(64, 96)
    inputs[:, 5:9] = 0  # columns that come out empty are no part of the path
    contents = contents_of({"a.weight": torch.from_numpy(weight)})
    found = {"a.weight": told(inputs, len(weight), None)}
    plain, paths = (at_error(Pushing(contents, found, dependent), 0.05) for dependent in (False, True))
    assert (plain.ordered, paths.ordered) == (True, False)
    sizes = [codec.measure(CompressedModel({"w": trial.tensors["a.weight"]})) for trial in (plain, paths)]
    assert sizes[1] < 0.97 * sizes[0]
    assert codec.describe(codec.encode(CompressedModel(dict(paths.tensors)))).options["ways"] == DEPENDENT << 1


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5),
    )  # fmt: skip
    state = net.state_dict()
    state["1.running_mean"].uniform_(-0.5, 0.5)
    state["1.running_var"].uniform_(0.5, 2)
    return net.eval()


def smooth_images(count: int) -> torch.Tensor:
    coarse = torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(3))
    return nn.functional.interpolate(coarse, size=(6, 6), mode="bilinear")


def test_with_calibration_a_file_of_the_same_size_computes_nearly_the_same(tmp_path):
    net, images = network(), smooth_images(256)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    plain = bayeszip.pack(net, example_inputs=images[:1], quality=85)
    calibrated = bayeszip.pack(
        net, example_inputs=images[:1], max_bytes=plain.bytes, calibration=list(images[:128].split(32))
    )
    assert calibrated.bytes <= plain.bytes
    calibrated.save(tmp_path / "net.bayz")
    with torch.no_grad():
        before = net(images[128:])
        gaps = [
            float((each(images[128:]) - before).norm() / (before - before.mean(0)).norm())
            for each in (plain.network(), bayeszip.load(tmp_path / "net.bayz"))
        ]
    assert gaps[1] < 0.5 * gaps[0]
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


def test_calibration_needs_a_network_and_a_knob_it_can_serve():
    images = smooth_images(4)
    with pytest.raises(RecipeError, match="calibration needs a network"):
        bayeszip.pack(network().state_dict(), calibration=[images])
    with pytest.raises(RecipeError, match="quality or max_bytes"):
        bayeszip.pack(network(), calibration=[images], max_error=0.1)


def test_a_weight_that_layers_share_is_calibrated_on_the_inputs_of_both():
    class Twice(nn.Module):
        directions: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.second.weight = self.first.weight
            # Each meets half of the directions that there are.
            self.register_buffer("directions", torch.linalg.qr(torch.randn(32, 32)).Q)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            halves = rows[:, :16] @ self.directions[:16], rows[:, 16:] @ self.directions[16:]
            return torch.stack([self.first(halves[0]), self.second(halves[1])])

    torch.manual_seed(0)
    net, rows = Twice(), torch.randn(512, 32)
    packed = bayeszip.pack(net, quality=95, calibration=rows)
    with torch.no_grad():
        before, after = net(rows), packed.network()(rows)
    errors = [float((after - before)[use].norm() / before[use].norm()) for use in range(2)]
    assert max(errors) < 0.06


def test_biases_that_layers_of_one_weight_have_of_their_own_are_rounded_like_other_vectors():
    weight, inputs = correlated()
    generator = torch.Generator().manual_seed(0)
    own = {name: torch.randn(len(weight), generator=generator) for name in ("a.bias", "b.bias")}
    contents = contents_of({"a.weight": torch.from_numpy(weight), **own})
    tensors = Pushing(contents, {"a.weight": told(inputs, len(weight), None)}).at(0.05).tensors
    for name, bias in own.items():
        moved = np.abs(tensors[name].dequantize() - bias.numpy())
        assert 0 < moved.max() < 0.05 * float(bias.abs().max())
