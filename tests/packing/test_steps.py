"""Uniform steps for a whole network."""

import numpy as np
import pytest
import torch

from bayeszip import codec
from bayeszip.packing.contents import contents_of
from bayeszip.packing.knobs import Trial, at_error
from bayeszip.packing.steps import by_clusters, one_step, own_steps, within_bounds
from bayeszip.quantize import cluster
from bayeszip.tensors import CompressedModel, UniformGrid


def two_layers(ratio: float = 8.0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(0)
    return {
        "a.weight": torch.from_numpy(random.normal(size=(60, 50)).astype(np.float32)),
        "a.bias": torch.from_numpy(random.normal(size=60).astype(np.float32)),
        "b.weight": torch.from_numpy((random.laplace(size=(40, 60)) / ratio).astype(np.float32)),
        "norm.running_var": torch.from_numpy(random.uniform(1e-3, 10, 60).astype(np.float32)),
    }


def measured(tensors) -> int:
    return codec.measure(CompressedModel(tensors))


def test_steps_at_the_error_of_clustering_make_smaller_files():
    contents = contents_of(two_layers())
    clustered = {name: cluster(array, 32) for name, array in contents.matrices.items()}
    error = contents.moved({name: tensor.dequantize() for name, tensor in clustered.items()})
    trial = at_error(one_step(contents), error)
    assert 0.97 * error < trial.error <= error
    assert measured({name: trial.tensors[name] for name in clustered}) < 0.95 * measured(clustered)


def test_one_step_is_one_for_all_but_tensors_it_would_leave_little_of():
    near, far = (one_step(contents_of(two_layers(ratio))).at(0.05).tensors for ratio in (2.0, 1000.0))
    assert near["a.weight"].grid.step == near["b.weight"].grid.step
    assert isinstance(far["b.weight"].grid, UniformGrid)
    values, weights = far["b.weight"].dequantize(), two_layers(1000.0)["b.weight"].numpy()
    assert np.linalg.norm(values - weights) < 0.2 * np.linalg.norm(weights)


def test_biases_and_vectors_move_by_a_part_of_what_weights_do():
    state = two_layers()
    for steps in (one_step, own_steps):
        tensors = steps(contents_of(state)).at(0.05).tensors
        of_weights = np.abs(tensors["a.weight"].dequantize() - state["a.weight"].numpy()).max()
        assert 0 < np.abs(tensors["a.bias"].dequantize() - state["a.bias"].numpy()).max() <= of_weights
        ratio = tensors["norm.running_var"].dequantize() / state["norm.running_var"].numpy()
        assert 1e-4 < np.abs(ratio - 1).max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_multiples_are_ones_that_the_tensors_type_holds(dtype):
    weights = two_layers()["a.weight"].to(dtype)
    tensor = at_error(one_step(contents_of({"w": weights})), 0.05).tensors["w"]
    values = torch.from_numpy(tensor.dequantize())
    assert torch.equal(values.to(dtype).float(), values)
    assert isinstance(tensor.grid, UniformGrid)


def test_a_tensor_of_few_values_keeps_them():
    values = np.float32([-0.31, 0.0, 0.17, 0.9])
    weights = torch.from_numpy(values[np.random.default_rng(0).integers(0, 4, (50, 60))])
    contents = contents_of({"w": weights, "v": two_layers()["a.weight"]})
    trial = by_clusters(at_error(one_step(contents), 0.03), contents)
    assert np.array_equal(trial.tensors["w"].dequantize(), weights.numpy())
    assert trial.tensors["v"].grid is not None
    assert trial.error <= 0.03


@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e37])
def test_no_weight_is_too_small_or_too_large_for_steps(scale):
    weights = two_layers()["a.weight"] * scale / 8
    tensor = own_steps(contents_of({"w": weights})).at(0.05).tensors["w"]
    assert np.abs(tensor.dequantize().astype(np.float64) - weights.numpy()).max() < 0.2 * float(weights.abs().max())


@pytest.mark.parametrize("share", [0.1, 0.01, 1e-3])
def test_bounds_hold_for_all_that_is_rounded(share):
    state = two_layers()
    tensors = within_bounds(contents_of(state), share)
    assert set(tensors) == set(state)
    for name, tensor in tensors.items():
        moved = np.abs(tensor.dequantize().astype(np.float64) - state[name].numpy())
        bound = state[name].abs() if name == "norm.running_var" else state[name].abs().max()
        assert (moved <= share * bound.double().numpy()).all()
        assert moved.any()


def test_a_trial_keeps_what_it_is_told_beside_tensors():
    contents = contents_of({"v": two_layers()["a.weight"]})
    trial = by_clusters(Trial(at_error(own_steps(contents), 0.1).tensors, 0.1, 0.1, {"m": np.ones(2)}), contents)
    assert list(trial.buffers) == ["m"]


def test_values_that_depend_on_each_other_make_smaller_files_at_equal_error():
    random = np.random.default_rng(0)
    shapes = {"a.weight": (96, 80), "b.weight": (8, 8)}
    contents = contents_of({
        name: torch.from_numpy(random.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()
    })  # fmt: skip
    plain, paths = (at_error(steps, 0.1) for steps in (own_steps(contents), own_steps(contents).dependent()))
    assert (plain.ordered, paths.ordered) == (True, False)
    assert measured(paths.tensors) < 0.975 * measured(plain.tensors)
    # A matrix too small for the coder to know of it is as it was.
    assert isinstance(paths.tensors["b.weight"].grid, UniformGrid)
    assert paths.tensors["a.weight"].grid.step < 0.7 * plain.tensors["a.weight"].grid.step
