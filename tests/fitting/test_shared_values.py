"""Shared values: the gradient against autograd through a gather, and training with assignments fixed or free."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bayeszip.fitting import Phase, fit
from bayeszip.fitting.shared_values import FreeSymbols, SharedValues
from bayeszip.tensors import QuantizedTensor

CODEBOOK = np.array([0, -0.7, -0.2, 0.3, 0.9, 1.7], np.float32)


def quantized(*shape: int, seed: int = 0, symbols: int = 5) -> QuantizedTensor:
    """Symbol 5 is in the codebook and never used."""
    return QuantizedTensor(np.random.default_rng(seed).integers(0, symbols, shape), CODEBOOK)


def build() -> tuple[nn.Sequential, dict[str, QuantizedTensor]]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return network, {"0.weight": quantized(5, 6), "3.weight": quantized(3, 5, seed=1), "0.bias": quantized(5, seed=2)}


def test_output_and_gradient_are_those_of_a_gather():
    network, tensors = build()
    shared = SharedValues(network, tensors)
    inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
    output = shared(inputs)
    F.cross_entropy(output, targets).backward()

    values = torch.tensor(CODEBOOK[1:], requires_grad=True)
    full = torch.cat([torch.zeros(1), values])
    weights = {name: full[torch.from_numpy(t.symbols.astype(np.int64))] for name, t in tensors.items()}
    expected = torch.func.functional_call(network, weights, (inputs,))
    torch.testing.assert_close(output, expected)
    F.cross_entropy(expected, targets).backward()
    torch.testing.assert_close(shared.values.grad, values.grad, rtol=1e-5, atol=1e-7)
    assert shared.values.grad[4] == 0


def test_gradient_against_finite_differences():
    network, tensors = build()
    network.double().eval()
    shared = SharedValues(network, tensors)
    shared.values.data = shared.values.data.double()
    inputs, targets = torch.randn(16, 6).double(), torch.randint(3, (16,))

    def loss(values: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(shared, {"values": values}, (inputs,)), targets)

    assert torch.autograd.gradcheck(loss, (shared.values,))


def test_parameters_are_the_values_and_what_was_not_quantized():
    network, tensors = build()
    shared = SharedValues(network, tensors)
    ids = {id(p) for p in shared.parameters()}
    others = {id(p) for name, p in network.named_parameters() if name not in tensors}
    assert ids == others | {id(shared.values)}


def test_fit_moves_values_and_keeps_assignments():
    network, tensors = build()
    shared = SharedValues(network, tensors)
    inputs = torch.randn(64, 6)
    targets = (inputs[:, 0] > 0).long()
    before = F.cross_entropy(shared.eval()(inputs), targets).item()
    phase = Phase(name="values", epochs=40, noise=False, rate_theta=1e-2)
    fit(shared, [(inputs, targets)], (phase,), n_data=64)
    assert F.cross_entropy(shared(inputs), targets).item() < 0.8 * before
    assert not network.training
    codebook = shared.codebook()
    assert codebook.dtype == np.float32
    assert codebook[0] == 0
    assert codebook[5] == CODEBOOK[5]
    assert (codebook[1:5] != CODEBOOK[1:5]).all()


def test_a_tied_weight_is_one_tensor():
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    network[1].weight = network[0].weight
    tensor = quantized(4, 4)
    shared = SharedValues(network, {"0.weight": tensor})
    weight = torch.from_numpy(tensor.dequantize())
    inputs = torch.randn(2, 4)
    torch.testing.assert_close(shared(inputs), inputs @ weight.T @ weight.T)


@pytest.mark.parametrize("symbols", [1, 2])
def test_all_zero_and_one_value(symbols):
    network = nn.Linear(4, 3, bias=False)
    tensor = quantized(3, 4, symbols=symbols)
    shared = SharedValues(network, {"weight": tensor})
    inputs = torch.randn(2, 4)
    shared(inputs).sum().backward()
    expected = (inputs.sum(0) * torch.from_numpy((tensor.symbols == 1).astype(np.float32))).sum()
    assert shared.values.grad[0].item() == pytest.approx(expected.item(), abs=1e-5)
    assert (shared.values.grad[1:] == 0).all()


class TwoPlaces(nn.Module):
    """One module at two places, and one tensor in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.tied(self.again(self.first(inputs).relu()).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shared_modules_and_tied_tensors_of_any_type_come_back_as_they_were(dtype):
    network = TwoPlaces().to(dtype)
    before = dict(network.named_parameters(remove_duplicate=False))
    shared = SharedValues(network, {"first.weight": quantized(4, 4), "first.bias": quantized(4, seed=1)})
    inputs = torch.randn(3, 4, dtype=dtype)
    outputs = shared(inputs)
    outputs.sum().backward()
    assert outputs.dtype == dtype
    after = dict(network.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    with torch.no_grad():
        network.first.weight.copy_(torch.from_numpy(quantized(4, 4).dequantize()))
        network.first.bias.copy_(torch.from_numpy(quantized(4, seed=1).dequantize()))
    torch.testing.assert_close(outputs, network(inputs))


def test_scales_take_part_in_output_and_gradient():
    network, tensors = build()
    tensors["0.weight"] = replace(tensors["0.weight"], scale=QuantizedTensor([1] * 5, np.array([0, 3.0])))
    tensors["3.weight"] = replace(
        tensors["3.weight"], axis=1, scale=QuantizedTensor([1, 2, 0, 2, 1], np.array([0, 0.25, 7]))
    )
    shared = SharedValues(network, tensors)
    inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
    output = shared(inputs)
    F.cross_entropy(output, targets).backward()

    values = torch.tensor(CODEBOOK[1:], requires_grad=True)
    full = torch.cat([torch.zeros(1), values])
    weights = {name: full[torch.from_numpy(t.symbols.astype(np.int64))] for name, t in tensors.items()}
    weights["0.weight"] = weights["0.weight"] * 3
    weights["3.weight"] = weights["3.weight"] * torch.tensor([0.25, 7, 0, 7, 0.25])
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights[name].detach().numpy(), tensor.dequantize())
    expected = torch.func.functional_call(network, weights, (inputs,))
    torch.testing.assert_close(output, expected)
    F.cross_entropy(expected, targets).backward()
    torch.testing.assert_close(shared.values.grad, values.grad, rtol=1e-5, atol=1e-7)


def nearest(latents: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return np.abs(latents[:, None] - codebook).argmin(1)


def test_free_symbols_begin_as_they_are_with_the_gradient_of_shared_values():
    network, tensors = build()
    tensors["0.weight"] = replace(tensors["0.weight"], scale=QuantizedTensor([1] * 5, np.array([0, 3.0])))
    fixed, free = SharedValues(network, tensors), FreeSymbols(network, tensors)
    inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
    for shared in (fixed, free):
        F.cross_entropy(shared(inputs), targets).backward()
    assert torch.equal(free(inputs), fixed(inputs))
    torch.testing.assert_close(free.values.grad, fixed.values.grad, rtol=1e-5, atol=1e-7)
    assert fixed.symbols() == {}
    for name, symbols in free.symbols().items():
        np.testing.assert_array_equal(symbols, tensors[name].symbols)


def test_the_gradient_of_a_weight_is_that_of_its_latent():
    network, tensors = build()
    scale = np.array([3, 3, 3, 3, 3.0])
    tensors["0.weight"] = replace(tensors["0.weight"], scale=QuantizedTensor([1] * 5, np.array([0, 3.0])))
    free = FreeSymbols(network, tensors)
    inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
    F.cross_entropy(free(inputs), targets).backward()
    weights = {name: torch.from_numpy(tensor.dequantize()).requires_grad_() for name, tensor in tensors.items()}
    F.cross_entropy(torch.func.functional_call(network, weights, (inputs,)), targets).backward()
    expected = [
        (weight.grad * (torch.tensor(scale)[:, None] if name == "0.weight" else 1))[weight != 0]
        for name, weight in weights.items()
    ]
    torch.testing.assert_close(free.latents.grad, torch.cat(expected).float(), rtol=1e-5, atol=1e-7)


def test_weights_take_the_value_next_to_them_and_zeros_stay():
    network, tensors = build()
    free = FreeSymbols(network, tensors)
    inputs = torch.randn(64, 6)
    targets = (inputs[:, 0] > 0).long()
    before = F.cross_entropy(free.eval()(inputs), targets).item()
    fit(free, [(inputs, targets)], (Phase(name="values", epochs=40, noise=False, rate_theta=1e-2),), n_data=64)
    assert F.cross_entropy(free(inputs), targets).item() < 0.8 * before
    found, latents = free.symbols(), free.latents.detach().numpy()
    kept = {name: tensor.symbols != 0 for name, tensor in tensors.items()}
    chosen = np.concatenate([found[name][kept[name]] for name in tensors])
    np.testing.assert_array_equal(chosen, nearest(latents, free.codebook()))
    assert (chosen != np.concatenate([tensors[name].symbols[kept[name]] for name in tensors])).any()
    assert all((found[name][~kept[name]] == 0).all() for name in tensors)
    weights = {name: torch.from_numpy(free.codebook()[symbols]) for name, symbols in found.items()}
    torch.testing.assert_close(free(inputs), torch.func.functional_call(network, weights, (inputs,)))


def test_values_that_pass_each_other_are_still_found():
    tensor = QuantizedTensor([[1, 2, 3, 0]], np.array([0, -1.0, 0.5, 2.0]))
    free = FreeSymbols(nn.Linear(4, 1, bias=False), {"weight": tensor})
    with torch.no_grad():
        free.values.copy_(torch.tensor([3.0, -0.5, 1.0]))
        free.latents.copy_(torch.tensor([2.4, 0.2, -0.4]))
    assert free.symbols()["weight"].tolist() == [[1, 0, 2, 0]]
    free(torch.eye(4)).sum().backward()
    assert free.values.grad.tolist() == [1, 1, 0]


@pytest.mark.parametrize("kind", [SharedValues, FreeSymbols])
def test_averaged_values_have_the_mean_of_their_weights_gradients(kind):
    network, tensors = build()
    tensors["0.weight"] = replace(tensors["0.weight"], scale=QuantizedTensor([1] * 5, np.array([0, 3.0])))
    summed, averaged = kind(network, tensors), kind(network, tensors, averaged=True)
    inputs, targets = torch.randn(16, 6), torch.randint(3, (16,))
    for shared in (summed, averaged):
        F.cross_entropy(shared(inputs), targets).backward()
    assert torch.equal(averaged(inputs), summed(inputs))
    members = sum(np.bincount(tensor.symbols.ravel(), minlength=6)[1:] for tensor in tensors.values())
    assert members[4] == 0
    expected = summed.values.grad / torch.from_numpy(np.maximum(members, 1))
    torch.testing.assert_close(averaged.values.grad, expected, rtol=1e-5, atol=1e-8)
    if kind is FreeSymbols:
        assert torch.equal(averaged.latents.grad, summed.latents.grad)


def test_a_value_that_is_averaged_moves_as_its_weights_do():
    tensor = QuantizedTensor([[1, 1, 1, 2, 0]], np.array([0, 0.5, 2.0]))
    free = FreeSymbols(nn.Linear(5, 1, bias=False), {"weight": tensor}, averaged=True)
    before = free.latents.detach().clone()
    phase = Phase(name="values", epochs=1, noise=False, optimizer="sgd", rate_theta=0.01, schedule="constant")
    fit(free, [(torch.eye(5), torch.zeros(5, dtype=torch.long))], (phase,), n_data=5, loss=lambda out, _: out.sum())
    moved = free.latents.detach() - before
    np.testing.assert_allclose(free.values.detach() - torch.tensor([0.5, 2.0]), [moved[:3].mean(), moved[3]], rtol=1e-4)
    assert (moved < 0).all()


def test_nothing_but_zeros_has_no_latents():
    tensor = QuantizedTensor(np.zeros((3, 4), np.int64), CODEBOOK)
    free = FreeSymbols(nn.Linear(4, 3, bias=False), {"weight": tensor})
    assert not free(torch.randn(2, 4)).any()
    assert not free.symbols()["weight"].any()
