"""Quantization: argmax responsibility by brute force, the threshold, fitted mixtures, merging, the codebook."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeszip import codec
from bayeszip.errors import ModelError, RecipeError
from bayeszip.posterior import GaussianTensor, Posterior
from bayeszip.quantize import (
    Quantization,
    _nearest_means,
    bounded,
    by_rate,
    cluster,
    fit_mixture,
    quantize,
    round_codebook,
    share_anew,
    stepped,
    trim,
)
from bayeszip.tensors import CompressedModel, QuantizedTensor, UniformGrid
from bayeszip.variational import GaussianMixture


def posterior(
    theta: np.ndarray, log_sigma2: float | np.ndarray = -20.0, mixture: GaussianMixture | None = None
) -> Posterior:
    theta = np.asarray(theta, np.float32)
    variance = np.broadcast_to(np.asarray(log_sigma2, np.float32), theta.shape)
    return Posterior({"w": GaussianTensor(theta, variance)}, {} if mixture is None else {"mixture": mixture})


def mixture(means: list[float], deviations: list[float], proportions: list[float]) -> GaussianMixture:
    return GaussianMixture(np.array(means), -2 * np.log(deviations), np.log(proportions))


def brute_force(theta: float, prior: GaussianMixture) -> float:
    """The mean of the component with the largest π N(θ | μ, λ⁻¹)."""
    joint = []
    for mean, log_precision, log_proportion in zip(
        prior.means, prior.log_precisions, prior.log_proportions, strict=True
    ):
        deviation = math.exp(-0.5 * log_precision)
        joint.append(log_proportion - math.log(deviation) - 0.5 * ((theta - mean) / deviation) ** 2)
    return prior.means[int(np.argmax(joint))]


@given(st.integers(0, 2**16))
@settings(max_examples=30)
def test_each_weight_takes_the_mean_of_its_most_responsible_component(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 18))
    prior = mixture([0.0, *rng.normal(0, 0.3, k)], rng.uniform(0.01, 0.2, k + 1), rng.dirichlet(np.ones(k + 1)))
    theta = rng.normal(0, 0.4, (7, 11)).astype(np.float32)
    tensor = quantize(posterior(theta, mixture=prior), Quantization())["w"]
    expected = np.array([brute_force(float(t), prior) for t in theta.ravel()], np.float32).reshape(theta.shape)
    np.testing.assert_array_equal(tensor.dequantize(), expected)


def test_the_codebook_is_sorted_after_zero_and_shared_by_all_tensors():
    prior = mixture([0.0, 0.5, -0.3, 0.1, 9.0], [0.05] * 5, [0.6, 0.1, 0.1, 0.1, 0.1])
    weights = {
        "a": GaussianTensor(np.array([0.5, 0.0], np.float32), np.full(2, -9.0, np.float32)),
        "b": GaussianTensor(np.array([[-0.3], [0.1]], np.float32), np.full((2, 1), -9.0, np.float32)),
    }
    tensors = quantize(Posterior(weights, {"mixture": prior}), Quantization())
    expected = np.array([0, -0.3, 0.1, 0.5], np.float32)  # nobody chose 9
    for tensor in tensors.values():
        np.testing.assert_array_equal(tensor.codebook, expected)
    assert tensors["a"].symbols.tolist() == [3, 0]
    assert tensors["b"].symbols.tolist() == [[1], [2]]


@pytest.mark.parametrize(("log_alpha", "kept"), [(math.log(19) - 1e-3, True), (math.log(19) + 1e-3, False)])
def test_variational_dropout_prunes_at_the_papers_threshold(log_alpha, kept):
    theta = np.array([0.2, -0.2, 0.9], np.float32)
    log_sigma2 = np.array([log_alpha + 2 * math.log(0.2)] * 2 + [-20], np.float32)
    tensor = quantize(posterior(theta, log_sigma2), Quantization(assignment="fit", prune_rate=0.95))["w"]
    np.testing.assert_allclose(tensor.dequantize(), theta * [kept, kept, 1], rtol=1e-6)


def test_pruning_goes_with_a_mixture_too_and_exact_zeros_stay():
    prior = mixture([0.0, 0.5], [0.01, 0.2], [0.01, 0.99])
    theta = np.array([0.5, 0.5, 0.0], np.float32)
    tensor = quantize(posterior(theta, [-20, 5, -20], prior), Quantization(prune_rate=0.95))["w"]
    assert tensor.dequantize().tolist() == [0.5, 0.0, 0.0]


def test_a_mixture_is_needed_for_assignment_by_it():
    with pytest.raises(ModelError, match="use assignment=fit"):
        quantize(posterior(np.ones(3)), Quantization())


def test_components_that_coincide_merge():
    prior = mixture([0.0, 0.3, 0.3, 0.31, 0.005], [0.02] * 5, [0.5, 0.1, 0.1, 0.2, 0.1])
    theta = np.array([0.3, 0.31, 0.0, 0.005, 0.31], np.float32)
    apart = quantize(posterior(theta, mixture=prior), Quantization())["w"]
    assert sorted(apart.codebook.tolist()) == pytest.approx([0, 0.31])  # 0.3 is outvoted by 0.31 everywhere here
    merged = quantize(posterior(theta, mixture=prior), Quantization(merge_within=1.0))["w"]
    # 0.005 joins the pinned zero; 0.3, 0.3 and 0.31 meet at their mean by proportion.
    assert merged.codebook.tolist() == pytest.approx([0, (0.1 * 0.3 + 0.1 * 0.3 + 0.2 * 0.31) / 0.4])
    assert merged.symbols.tolist() == [1, 1, 0, 0, 1]


def test_merging_keeps_components_below_and_above_zero_apart():
    prior = mixture([0.0, -0.5, -0.51, 0.5, 0.2], [0.02] * 5, [0.2] * 5)
    theta = np.array([-0.5, 0.0, 0.2, 0.5], np.float32)
    tensor = quantize(posterior(theta, mixture=prior), Quantization(merge_within=1.0))["w"]
    assert tensor.codebook.tolist() == pytest.approx([0, -0.505, 0.2, 0.5])
    assert tensor.symbols.tolist() == [1, 0, 2, 3]


def test_half_precision_rounds_saturates_and_joins_equals():
    rounded = round_codebook(np.array([0.1, 1e6, -1e6, 1e-9]), 16)
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(rounded, np.array([0.1, 65504, -65504, 0], np.float16).astype(np.float32))
    theta = np.array([0.1, 0.09999, 1e-9, 0.5], np.float32)
    tensor = quantize(posterior(theta), Quantization(assignment="fit", codebook_bits=16))["w"]
    assert tensor.codebook.tolist() == [0, float(np.float16(0.1)), 0.5]
    assert tensor.symbols.tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], [0.0]),
        ([0.25] * 9, [0.25]),
        ([0.25, -1e-3, 0.25], [-1e-3, 0.25]),
        ([3.0, 1.0, 2.0, 2.0], [1.0, 2.0, 3.0]),
    ],
)
def test_fewer_distinct_values_than_components(values, expected):
    fitted = fit_mixture(np.array(values, np.float32), 64)
    assert fitted.means.tolist() == pytest.approx(expected)
    assert np.exp(fitted.log_proportions).sum() == pytest.approx(1)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4])
def test_modes_stay_apart_whatever_their_scale(scale):
    """Two modes at ±scale with a spread of a fiftieth: a variance floor that is not relative would join small ones."""
    rng = np.random.default_rng(0)
    values = scale * np.concatenate([rng.normal(-1, 0.02, 500), rng.normal(1, 0.02, 500)])
    fitted = fit_mixture(values.astype(np.float32), 2)
    assert fitted.means.tolist() == pytest.approx([-scale, scale], rel=0.01)
    assert np.exp(-0.5 * fitted.log_precisions).tolist() == pytest.approx([0.02 * scale] * 2, rel=0.1)


def test_sixty_four_components_follow_the_weights():
    values = np.random.default_rng(0).normal(0, 0.05, 5000).astype(np.float32)
    tensor = quantize(posterior(values), Quantization(assignment="fit"))["w"]
    assert 32 < len(tensor.codebook) <= 65
    assert np.abs(tensor.dequantize() - values).mean() < 0.05 * 0.05


def test_an_outlier_keeps_its_value_and_leaves_the_others_theirs():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 0.05, 4000), [40.0]]).astype(np.float32)
    tensor = quantize(posterior(values), Quantization(assignment="fit", components=16))["w"]
    decoded = tensor.dequantize()
    assert decoded[-1] == pytest.approx(40, rel=1e-3)
    assert np.abs(decoded[:-1] - values[:-1]).mean() < 0.2 * 0.05


def test_a_dense_network_keeps_its_weights():
    """A spike of weights that were decayed away must not cost the others their values."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 1e-6, 50_000), rng.normal(0, 0.05, 50_000)]).astype(np.float32)
    tensor = quantize(posterior(values), Quantization(assignment="fit"))["w"]
    assert np.abs(tensor.dequantize() - values).max() < 0.05
    assert np.square(tensor.dequantize() - values).mean() < 1e-3 * 0.05**2


def test_more_values_than_are_fitted_to():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.choice([-0.3, 0.1, 0.4], 200_000) + rng.normal(0, 0.004, 200_000), [5.0]])
    fitted = fit_mixture(values.astype(np.float32), 4)
    assert fitted.means.tolist() == pytest.approx([-0.3, 0.1, 0.4, 5.0], abs=0.01)


def test_everything_pruned_is_all_zeros():
    tensor = quantize(posterior(np.full((3, 2), 0.1), 5.0), Quantization(assignment="fit", prune_rate=0.95))["w"]
    assert tensor.codebook.tolist() == [0]
    assert tensor.nonzero == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codebook_bits": 24}, "codebook_bits must be 16 or 32"),
        ({"assignment": "nearest"}, "assignment must be one of mixture, fit"),
        ({"prune_rate": 0.2}, "prune_rate must be between 0.5 and 1"),
        ({"components": 0}, "components must be between 1 and 65535"),
        ({"rate": -1.0}, "rate must be between 0 and"),
        ({"rate_trials": 3}, "rate_trials tries parts of quantization.rate, which is 0"),
        ({"curvature": -1.0}, "curvature must be between 0 and"),
    ],
)
def test_settings_that_are_refused(values, message):
    with pytest.raises(RecipeError, match=message):
        Quantization(**values)


def decayed() -> np.ndarray:
    """Weights as a penalty leaves them: most next to zero."""
    generator = np.random.default_rng(3)
    weights = generator.normal(size=(40, 100)).astype(np.float32)
    return np.where(generator.random(weights.shape) < 0.9, weights * 1e-5 + 1e-6, weights).astype(np.float32)


def test_what_lies_next_to_zero_becomes_zero():
    weights = decayed()
    tensor = cluster(weights, 16)
    assert (tensor.symbols == 0).mean() > 0.85
    # Nothing worth mentioning is lost by it.
    values = _nearest_means(weights.ravel().astype(np.float64), 16)
    nearest = values[np.abs(weights.ravel()[:, None] - values).argmin(axis=1)]
    best = np.square(nearest - weights.ravel()).sum()
    assert np.square(tensor.dequantize() - weights).sum() < 1.02 * best


def test_weights_away_from_zero_stay_away():
    weights = np.random.default_rng(4).normal(1.0, 0.1, size=2000).astype(np.float32)
    assert (cluster(weights, 8).symbols != 0).all()
    few = np.array([1e-9, 2e-9, 5.0], np.float32)
    assert cluster(few, 8).dequantize().tolist() == few.tolist()  # as many values as there are: nothing is lost


def test_a_fit_makes_zeros_too():
    given = posterior(decayed(), -40.0)
    symbols = quantize(given, Quantization(assignment="fit", components=16))["w"].symbols
    assert (symbols == 0).mean() > 0.85


def test_values_that_would_add_up_in_an_output_stay():
    generator = np.random.default_rng(5)
    weights = np.where(
        generator.random((64, 4096)) < 0.95, generator.normal(3e-4, 1e-5, (64, 4096)), generator.normal(size=(64, 4096))
    ).astype(np.float32)
    inputs = generator.random(4096)
    exact, ours = weights @ inputs, cluster(weights, 64).dequantize() @ inputs
    assert np.linalg.norm(ours - exact) < 0.04 * np.linalg.norm(exact)


def test_scales_stay_where_weights_are_trimmed_or_shared_anew():
    scale = QuantizedTensor(np.array([1, 2]), np.array([0, 0.5, 4.0]))
    tensor = QuantizedTensor(np.array([[1, 2, 0], [2, 1, 1]]), np.array([0, -1.0, 1.0]), None, scale)
    given = posterior(tensor.dequantize() + np.float32(1e-3))
    trimmed = trim({"w": tensor}, given, 2)["w"]
    assert (trimmed.nonzero, trimmed.scale) == (2, scale)
    anew = share_anew({"w": tensor}, given, 2, 32)["w"]
    assert anew.scale == scale
    assert np.allclose(anew.dequantize(), tensor.dequantize(), atol=5e-3)


@given(st.integers(0, 2**16), st.integers(2, 7), st.integers(0, 6))
@settings(max_examples=40)
def test_fewer_values_are_means_of_neighbors_of_one_sign_and_zeros_stay(seed, count, negative):
    rng = np.random.default_rng(seed)
    means = [*(-0.2 - 0.3 * np.arange(negative)), *(0.2 + 0.3 * np.arange(6 - negative))]
    prior = mixture([0.0, *means], [0.1] * 7, [0.4, *[0.1] * 6])
    theta = rng.uniform(min(means) - 0.1, max(means) + 0.1, (30, 40)).astype(np.float32)
    as_it_has, fewer = (
        quantize(posterior(theta, mixture=prior), Quantization(values=values))["w"] for values in (0, count)
    )
    assert len(as_it_has.codebook) == 7
    assert len(fewer.codebook) == 1 + min(count, 6)
    if count >= 6:
        np.testing.assert_array_equal(fewer.dequantize(), as_it_has.dequantize())
        return
    np.testing.assert_array_equal(np.sign(fewer.dequantize()), np.sign(as_it_has.dequantize()))
    for symbol in range(1, count + 1):
        members = fewer.symbols == symbol
        assert fewer.codebook[symbol] == pytest.approx(theta[members].mean(), abs=1e-6)
        joined = np.unique(as_it_has.symbols[members])
        assert np.array_equal(joined, np.arange(joined[0], joined[-1] + 1))
        assert not np.isin(as_it_has.symbols[~members], joined).any()


def test_one_value_for_both_signs_is_refused():
    with pytest.raises(RecipeError, match="at least 2, one of each sign"):
        Quantization(values=1)


def test_fewer_values_are_in_units_of_their_tensors():
    units = {"w": 4.0}
    prior = replace(mixture([0.0, -1.0, 0.9, 1.1], [0.05] * 4, [0.4, 0.2, 0.2, 0.2]), units=units)
    theta = 4 * np.array([[-1.0, 0.9, 1.1, 0.0, 1.1]], np.float32)
    tensor = quantize(posterior(theta, mixture=prior), Quantization(values=2))["w"]
    assert tensor.codebook.tolist() == pytest.approx([0, -1, 3.1 / 3])
    assert tensor.dequantize()[0].tolist() == pytest.approx([-4, 4 * 3.1 / 3, 4 * 3.1 / 3, 0, 4 * 3.1 / 3])


def test_without_a_price_every_weight_takes_the_nearest_multiple():
    weights = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    weights[:, 3] = 0
    tensor = stepped(weights, 0.125, price=0)
    assert isinstance(tensor.grid, UniformGrid)
    assert np.abs(tensor.dequantize() - weights).max() <= 0.0625
    assert not tensor.symbols[:, 3].any()
    assert np.array_equal(stepped(tensor.dequantize(), 0.125).dequantize(), tensor.dequantize())


def test_a_price_saves_bits_and_never_takes_a_weight_away_from_zero():
    weights = np.random.default_rng(0).laplace(size=(80, 90)).astype(np.float32)
    free, priced = stepped(weights, 1.0, price=0), stepped(weights, 1.0, price=0.2)
    assert np.all(np.abs(priced.dequantize()) <= np.abs(free.dequantize()))
    assert np.abs(priced.dequantize() - weights).max() < 1.5
    sizes = [codec.measure(CompressedModel({"w": tensor})) for tensor in (priced, free)]
    assert sizes[0] < 0.97 * sizes[1]


def test_steps_that_are_too_fine_are_refused():
    with pytest.raises(ModelError, match="raise it"):
        stepped(np.ones((2, 2), np.float32), 1e-6)


@pytest.mark.parametrize("max_error", [0.01, 1e-3, 1e-4])
def test_a_bound_is_not_refused_for_the_last_bit_of_float32(max_error):
    weights = np.random.default_rng(0).uniform(0.4, 0.5, (100, 100)).astype(np.float32)
    assert np.abs(bounded(weights, max_error * 0.5).dequantize().astype(np.float64) - weights).max() <= max_error * 0.5


def two_layers(units: dict[str, float] | None, bits: int = 32) -> tuple[Posterior, dict[str, QuantizedTensor]]:
    """The second layer's weights are twenty times larger; so is what the components were placed for without units."""
    rng = np.random.default_rng(0)
    theta = {
        "a.weight": rng.normal(0, 0.05, (20, 30)),
        "a.bias": rng.normal(0, 0.05, 20),
        "b.weight": rng.normal(0, 1.0, (10, 20, 3)),
    }
    weights = {
        name: GaussianTensor(array.astype(np.float32), np.full(array.shape, 2 * np.log(0.01 * array.std()), np.float32))
        for name, array in theta.items()
    }
    seen = np.concatenate([(array / (units or {}).get(name, 1.0)).ravel() for name, array in theta.items()])
    means = np.quantile(seen, (np.arange(16) + 0.5) / 16)
    ours = mixture([0.0, *means], [0.05 * seen.std()] * 17, [0.2] + [0.05] * 16)
    ours = GaussianMixture(ours.means, ours.log_precisions, ours.log_proportions, units or {})
    posterior = Posterior(weights, {"mixture": ours})
    return posterior, quantize(posterior, Quantization(codebook_bits=bits))


UNITS = {"a.weight": 0.07, "b.weight": 1.4}


def relative_error(tensor: QuantizedTensor, theta: np.ndarray) -> float:
    return float(np.sqrt(np.square(tensor.dequantize() - theta).sum() / np.square(theta).sum()))


def test_in_units_one_codebook_fits_layers_of_different_scale():
    errors, used = {}, {}
    for way, units in (("layer", UNITS), ("network", None)):
        posterior, tensors = two_layers(units)
        assert len({tensor.codebook.tobytes() for tensor in tensors.values()}) == 1
        errors[way] = {name: relative_error(tensors[name], posterior.weights[name].theta) for name in UNITS}
        used[way] = {name: np.unique(tensors[name].symbols).size / tensors[name].codebook.size for name in UNITS}
    assert errors["layer"]["a.weight"] == pytest.approx(errors["layer"]["b.weight"], rel=0.25)
    assert used["layer"] == {"a.weight": 1, "b.weight": 1}
    assert errors["network"]["a.weight"] > 2 * errors["layer"]["a.weight"]
    assert used["network"]["a.weight"] < 1


@pytest.mark.parametrize("bits", [16, 32])
def test_a_unit_is_the_scale_of_every_row_and_survives_what_comes_after(bits):
    posterior, tensors = two_layers(UNITS, bits)
    assert tensors["a.bias"].scale is None
    for name, unit in UNITS.items():
        expected = round_codebook(np.array([unit]), bits)
        np.testing.assert_array_equal(tensors[name].scale.dequantize(), np.repeat(expected, len(tensors[name].symbols)))
    fewer = trim(tensors, posterior, 500)
    assert 0 < sum(tensor.nonzero for tensor in fewer.values()) <= 500
    for name, tensor in fewer.items():
        assert tensor.scale == tensors[name].scale
        alive = tensor.symbols != 0
        np.testing.assert_array_equal(tensor.dequantize()[alive], tensors[name].dequantize()[alive])
    finer = share_anew(tensors, posterior, 256, bits)
    for name in UNITS:
        alive, theta = tensors[name].symbols != 0, posterior.weights[name].theta
        off = np.abs(finer[name].dequantize() - theta)[alive].max()
        assert off < 0.5 * np.abs(tensors[name].dequantize() - theta)[alive].max()
    assert codec.decode(codec.encode(CompressedModel(finer))).tensors == finer


def test_tensors_without_weights_have_no_scale():
    posterior, tensors = two_layers(UNITS)
    assert all(tensor.scale is None for tensor in trim(tensors, posterior, 0).values())


def sparse(units: dict[str, float] | None = None) -> Posterior:
    """Two layers as training leaves them: most weights next to zero, the others near three values, and how surely."""
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in (("a", (40, 60)), ("b", (10, 40))):
        unit = (units or {}).get(name, 1.0)
        theta = random.choice([-0.5, 0.5, 1.0], size=shape) * (random.random(shape) < 0.1)
        theta = theta * random.uniform(0.1, 1.2, size=shape) + random.normal(scale=0.02, size=shape)
        weights[name] = GaussianTensor(
            (unit * theta).astype(np.float32), np.full(shape, -4.0, np.float32) + 2 * np.log(unit)
        )
    prior = mixture([0.0, -0.5, 0.5, 1.0], [0.1, 0.05, 0.05, 0.05], [0.9, 0.04, 0.04, 0.02])
    return Posterior(weights, {"mixture": replace(prior, units=units or {})})


def lagrangian(tensors: dict[str, QuantizedTensor], weights: Posterior, rate: float) -> float:
    nats = sum(
        (
            0.5 * (tensor.dequantize() - weights.weights[name].theta) ** 2 / np.exp(weights.weights[name].log_sigma2)
        ).sum()
        for name, tensor in tensors.items()
    )
    return float(nats) + rate * math.log(2) * codec.prices(CompressedModel(tensors)).bits


@pytest.mark.parametrize("units", [None, {"a": 0.1, "b": 3.0}])
def test_bits_that_weigh_more_leave_fewer_of_them(units):
    weights = sparse(units)
    nearest = quantize(weights, Quantization(codebook_bits=16))
    sizes = []
    for rate in (0.1, 1.0, 4.0):
        chosen = quantize(weights, Quantization(rate=rate, codebook_bits=16))
        assert lagrangian(chosen, weights, rate) < lagrangian(nearest, weights, rate)
        sizes.append(codec.measure(CompressedModel(chosen)))
    assert sizes[0] > sizes[1] > sizes[2]


def test_bits_that_weigh_nothing_change_nothing():
    weights = sparse()
    assert quantize(weights, Quantization(rate=0.0)) == quantize(weights, Quantization())
    assert quantize(weights, Quantization(rate=1.0)) != quantize(weights, Quantization())
    assert Quantization().rate == 0


def test_weights_that_are_known_well_stay_and_values_that_nobody_takes_go():
    prior = mixture([0.0, 0.5, 1.0], [0.1, 0.05, 0.05], [0.9, 0.05, 0.05])
    theta, log_sigma2 = np.zeros((20, 30)), np.full((20, 30), -2.0)
    theta[::2, ::3], log_sigma2[::2, ::3] = 0.5, -12.0
    theta[15, 16], log_sigma2[15, 16] = 1.0, 2.0
    before = quantize(posterior(theta, log_sigma2, prior), Quantization())["w"]
    after = quantize(posterior(theta, log_sigma2, prior), Quantization(rate=1.0))["w"]
    assert before.codebook.tolist() == [0, 0.5, 1.0]
    assert after.codebook.tolist() == [0, 0.5]
    np.testing.assert_array_equal(after.dequantize(), np.where(theta == 0.5, 0.5, 0.0))


@pytest.mark.parametrize("units", [None, {"a": 0.1, "b": 3.0}])
def test_values_are_the_means_of_the_weights_that_chose_them(units):
    weights = sparse(units)
    chosen = quantize(weights, Quantization(rate=0.5))
    codebook = chosen["a"].codebook
    assert codebook.size > 2
    for symbol in range(1, codebook.size):
        theta = np.concatenate(
            [
                weights.weights[name].theta[tensor.symbols == symbol] / (units or {}).get(name, 1.0)
                for name, tensor in chosen.items()
            ]
        )
        # In units of their layers all weights are known equally well.
        assert codebook[symbol] == pytest.approx(theta.mean(), rel=1e-4)


def test_a_rate_that_nothing_is_worth_leaves_zeros():
    weights = sparse({"a": 0.1, "b": 3.0})
    chosen = by_rate(quantize(weights, Quantization()), weights, 1e6, 32)
    assert sum(tensor.nonzero for tensor in chosen.values()) == 0
    assert all(tensor.scale is None for tensor in chosen.values())
